"""Two recordings in the terminal: the heads that differ most, and the weights of a word side by side."""

from __future__ import annotations

from .compare import HeadChange, HeadChanges, HeadPair
from .text_layout import (
    NARROWEST,
    Line,
    Span,
    align_left,
    bar,
    format_number,
    label_width,
    numbered_label,
    paragraph,
    quoted,
    quoted_label,
    render,
    safe,
    strongest,
    tint,
    trim,
)
from .token_text import cell_width

__all__ = ["draw_changes"]

#: Heads that are listed.
HEADS = 10


def draw_changes(
    changes: HeadChanges,
    *,
    width: int = 80,
    colour: bool | str = False,
    top: int | None = None,
    word: str | int | None = None,
) -> str:
    """The pairs of heads that differ most, then a word in the first of them.

    Args:
        changes: The result of `regard.compare`.
        width: Columns of the terminal.
        colour: False, True, or the colours of the terminal.
        top: How many of the strongest words get a bar.
        word: The word to light, by name or position in `a`. Default: the one whose weight changed most.
    """
    width = max(width, NARROWEST)
    number, place = changes.first(word)
    pair = changes.pairs[number]
    lines: list[Line] = [[Span(_title(changes, pair, width), "bold")], []]
    for note in changes.notes:
        lines += [*paragraph(note, width, "dim"), []]
    lines += [*_word_lines(changes, pair, place, width, top), [], *_head_lines(changes, width)]
    missing = _missing_words(changes, pair)
    return render([*lines, *(line for text in missing for line in [[], *paragraph(text, width, "dim")])], colour)


def _title(changes: HeadChanges, pair: HeadPair, width: int) -> str:
    count, both = len(changes), len(pair.cols.in_both)
    names = " and ".join(safe(name, width // 3) for name in changes.names)
    return f"{names}: {count} pair{'s' if count > 1 else ''} of heads, {both} {pair.cols.units[1]} in both"


def _word_lines(changes: HeadChanges, pair: HeadPair, place: int, width: int, top: int | None) -> list[Line]:
    """A bar of either side for the words that a word looks at, and by how much they differ."""
    weights = [pair.weights(side, [place])[0].nan_to_num(nan=0.0).tolist() for side in (0, 1)]
    labels = pair.cols.labels
    chosen = strongest(weights, len(labels), top)
    names = [numbered_label(labels, j, label_width(width)) + _mark(pair, j) for j in chosen]
    first = max(map(cell_width, names))
    bar_width = min(max(4, (width - first - 9) // 2 - 9), 30)
    titles = [align_left(f"  {safe(name, bar_width + 5)}", bar_width + 9) for name in changes.names]
    lines: list[Line] = [
        [Span(f"{pair.name}  ", "bold"), Span(f"{quoted_label(pair.rows.labels, place)} looks at")],
        [Span(" " * first), *(Span(title, "bold") for title in titles), Span("  change")],
    ]
    for name, j in zip(names, chosen, strict=True):
        line = [Span(align_left(name, first))]
        for side, w in enumerate(weights):
            line += [Span("  "), Span(align_left(bar(w[j], bar_width), bar_width), tint(side))]
            line += [Span(f" {format_number(w[j]):>5} ")]
        by = weights[1][j] - weights[0][j]
        lines.append(trim([*line, Span(f"  {'+' if by > 5e-4 else ''}{format_number(by)}" if abs(by) >= 5e-4 else "")]))
    return lines


def _mark(pair: HeadPair, j: int) -> str:
    """The mark of a word that only one text has."""
    a, b = pair.cols.places[j]
    return " (a)" if b is None else " (b)" if a is None else ""


def _head_lines(changes: HeadChanges, width: int) -> list[Line]:
    """The heads that differ most, by the mean over rows of the Jensen–Shannon divergence."""
    listed = changes[:HEADS]
    places = [_place(change) for change in listed]
    first = max([cell_width(place) for place in places] + [10])
    each = max(4, min(14, (width - first - 44) // 2))
    title = "Heads that differ most: the divergence of their rows, and the weight that changed most"
    header = f"  {align_left('layer.head', first)}     js  total variation"
    lines = [*paragraph(title, width, "bold"), [Span(header, "dim")]]
    for place, change in zip(places, listed, strict=True):
        tie = f"{quoted(change.word, each)} → {quoted(change.key, each)} "
        tie += f"{format_number(change.weight)} → {format_number(change.weight_b)}"
        line = f"  {align_left(place, first)}  {change.js:5.3f}  {change.total_variation:5.3f}  "
        lines.append([Span(line), Span(tie if cell_width(line + tie) <= width else "")])
    if len(changes) > HEADS:
        lines.append([Span(f"  {len(changes) - HEADS} more", "dim")])
    return lines


def _place(change: HeadChange) -> str:
    a, b = f"{change.layer}.{change.head}", f"{change.layer_b}.{change.head_b}"
    return a if a == b else f"{a} and {b}"


def _missing_words(changes: HeadChanges, pair: HeadPair) -> list[str]:
    """Which words have no counterpart."""
    remarks = []
    for side, name in enumerate(changes.names):
        alone = [pair.cols.labels[n] for n, place in enumerate(pair.cols.places) if place[1 - side] is None]
        if alone:
            words = " ".join(safe(word, 20) for word in alone[:12]) + (" …" if len(alone) > 12 else "")
            remarks.append(f"({'ab'[side]}) only in {safe(name, 40)}: {words}")
    return remarks
