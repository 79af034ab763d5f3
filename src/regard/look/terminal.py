"""The picture in a terminal: a sentence with its words shaded, a bar for every word, and the heads that matter.

Without colour nothing is lost: the shade of a word is also a bar under it.
"""

from __future__ import annotations

from typing import Any

from ..learn.sparkline import LEVELS, sparkline
from .compare import HeadChanges
from .history import MEASURES, History, head_label, head_series, is_history
from .layers import Subject
from .options import ViewOptions, changed_options
from .spotlight import Overview, Spotlight, WordTie, overview, spotlight
from .terminal_compare import draw_changes
from .text_layout import (
    FAINT,
    NARROWEST,
    Line,
    Span,
    align_left,
    bar,
    format_number,
    label_width,
    numbered_label,
    paragraph,
    quoted_label,
    render,
    safe,
    shade,
    strongest,
    tint,
    trim,
    word_lines,
)
from .token_text import cell_width

__all__ = ["draw", "draw_overview", "draw_spotlight"]

#: Words up to which a text is shown in full.
ALL_WORDS = 120

_METRICS = {
    "entropy": "looks at few {units}",
    "previous": "looks at the {unit} before",
    "mean_distance_without_sink": "looks far away",
    "sink": "rests on one token",
    "induction": "repeats what followed",
}


def draw(
    subject: Subject | HeadChanges | History,
    options: ViewOptions | None = None,
    *,
    width: int = 80,
    colour: bool | str = False,
    top: int | None = None,
    **changes: Any,
) -> str:
    """A recording, a `Weights`, a comparison or a training history as text.

    Args:
        subject: What to draw.
        options: What to begin with; without a word, the overview.
        width: Columns of the terminal.
        colour: False, True, or the colours of the terminal: "standard", "256", "truecolor".
        top: How many of the strongest words get a bar.
        changes: Single options, by the names of `ViewOptions`.
    """
    options = changed_options(options, changes)
    if isinstance(subject, HeadChanges):
        return draw_changes(subject, width=width, colour=colour, top=top, word=options.word_name)
    if is_history(subject):
        return render(_history_lines(subject, max(width, NARROWEST)), colour)  # type: ignore[arg-type]
    if (word := options.word_name) is None:
        summary = overview(subject, **options.selection)  # type: ignore[arg-type]
        return draw_overview(summary, width=width, colour=colour, top=top)
    lit = spotlight(subject, word, target=options.target, **options.selection)  # type: ignore[arg-type]
    return draw_spotlight(lit, width=width, colour=colour, top=top)


def draw_spotlight(lit: Spotlight, *, width: int = 80, colour: bool | str = False, top: int | None = None) -> str:
    """A lit word: the sentence shaded, a bar for every word, the heads that matter."""
    return render(_spotlight_lines(lit, max(width, NARROWEST), top), colour)


def draw_overview(summary: Overview, *, width: int = 80, colour: bool | str = False, top: int | None = None) -> str:
    """The strongest tie of every word, and the heads that do one thing."""
    return render(_overview_lines(summary, max(width, NARROWEST), top or 10), colour)


# One word.


def _spotlight_lines(lit: Spotlight, width: int, top: int | None) -> list[Line]:
    lines: list[Line] = []
    for n, tie in enumerate(lit.heads):
        name, headline = lit.layers[tie.layer].head_name(tie.head), _headline(lit, n, width)
        if name and cell_width(name) + cell_width(headline) + 2 > width:
            lines += [[Span(name, "bold")], [Span(headline)]]
        else:
            lines.append([Span(name, "bold"), Span(f"  {headline}" if name else headline)])
        lines += _sentence(lit, n, width)
        lines += _missing_weight(lit, n, width)
        lines.append([])
    heads = _heads(lit, width)
    return [*note_lines(lit.notes, width), *lines, *_bars(lit, width, top), *([[], *heads] if heads else [])]


def note_lines(notes: list[str], width: int) -> list[Line]:
    """Notes, each with an empty line after it."""
    return [line for note in notes for line in [*paragraph(note, width, "bold"), []]]


def _headline(lit: Spotlight, n: int, width: int) -> str:
    key = lit.headline_key(n)
    each = (width - 13) // (2 if lit.next_word is None else 4)
    looking = quoted_label(lit.rows.labels, lit.position, each)
    if lit.next_word is not None:
        looking += f", writing {quoted_label(lit.rows.labels, lit.position + 1, each)}"
    if key is None:
        return f"{looking} looks at nothing"
    return f"{looking} → {quoted_label(lit.cols.labels, key, each)} {format_number(lit.weights[n][key])}"


def _sentence(lit: Spotlight, n: int, width: int) -> list[Line]:
    """The words that are looked at, each shaded, with a bar under it; the lit word is »marked«."""
    pairs: list[tuple[Span, Span]] = []
    if not lit.same:
        pairs.append((Span(f"»{safe(lit.word, width - 8)}«", "bold reverse"), Span("")))
        pairs.append((Span("→"), Span("")))
    for position in _visible_positions(lit, width):
        if position is None:
            pairs.append((Span("…"), Span("")))
            continue
        weight, here = lit.weights[n][position], lit.same and position == lit.position
        text = safe(lit.cols.labels[position], width - 6)
        text = f"»{text}«" if here else text
        under = LEVELS[int(min(weight, 0.999) * 8)] * cell_width(text) if weight >= FAINT else ""
        pairs.append((Span(text, "bold reverse" if here else shade(weight, n)), Span(under, tint(n))))
    return word_lines(pairs, width)


def _visible_positions(lit: Spotlight, width: int) -> list[int | None]:
    """All words of a sentence; of a long text those around the lit word and around its keys, None for a gap."""
    total = len(lit.cols.labels)
    if total <= ALL_WORDS:
        return list(range(total))
    near = 12 if width >= 60 else 6
    centres = [tie.key for tie in lit.heads if tie.key is not None] + ([lit.position] if lit.same else [])
    wanted = sorted({n for c in centres or [0] for n in range(max(0, c - near), min(total, c + near + 1))})
    positions: list[int | None] = [] if wanted[0] == 0 else [None]
    for before, position in zip([wanted[0] - 1, *wanted], wanted, strict=False):
        positions += [position] if position == before + 1 else [None, position]
    return positions if wanted[-1] == total - 1 else [*positions, None]


def _missing_weight(lit: Spotlight, n: int, width: int) -> list[Line]:
    """The weight of hidden tokens, and the weight that no word has."""
    remarks = []
    if lit.cols.hidden:
        remarks.append(
            f"special tokens are hidden: they had {lit.hidden[n]:.3f}, the others are scaled up to the whole"
        )
    if 1 - sum(lit.weights[n]) > 0.001:
        row_unit, key_unit = lit.rows.units[0], lit.cols.units[0]
        remarks.append(
            f"{1 - sum(lit.weights[n]):.3f} goes to no {key_unit}: a sink takes it, or the {row_unit} sees nothing"
        )
    return [line for remark in remarks for line in paragraph(f"({remark})", width, "dim", "  ")]


def _bars(lit: Spotlight, width: int, top: int | None) -> list[Line]:
    """A bar for every word and shown head."""
    labels = lit.cols.labels
    chosen = strongest(lit.weights, len(labels), top)
    if lit.same and top is None and lit.position not in chosen:
        chosen = sorted([*chosen, lit.position])
    some = len(chosen) < len(labels)
    size = label_width(width)  # of some words the position is written, which tells them apart as well
    names = [f"{safe(labels[j], size)} :{j}" if some else numbered_label(labels, j, size) for j in chosen]
    first = max(map(cell_width, [*names, "word"]))
    bar_width = min(max(4, (width - first) // len(lit.heads) - 9), 40)
    lines: list[Line] = []
    if len(lit.heads) > 1:
        titles = [lit.layers[tie.layer].head_name(tie.head) for tie in lit.heads]
        if max(map(len, titles)) > bar_width + 6:
            titles = [f"head {tie.layer}.{tie.head}" for tie in lit.heads]
        lines.append([Span(" " * first)] + [Span("  " + align_left(title, bar_width + 7), "bold") for title in titles])
    for name, j in zip(names, chosen, strict=True):
        here = lit.same and j == lit.position
        line = [Span(align_left(name, first), "bold" if here else "")]
        for n, weights in enumerate(lit.weights):
            line += [
                Span("  "),
                Span(align_left(bar(weights[j], bar_width), bar_width), tint(n)),
                Span(f" {format_number(weights[j]):>5} "),
            ]
        lines.append(trim(line))
    if some:
        line = [Span(align_left(f"{len(labels) - len(chosen):,} more", first), "dim")]
        for weights in lit.weights:
            rest = max(sum(weights) - sum(weights[j] for j in chosen), 0.0)
            line += [Span("  " + " " * bar_width + f" {format_number(rest):>5} ", "dim")]
        lines.append(trim(line))
    return lines


def _heads(lit: Spotlight, width: int, count: int = 8) -> list[Line]:
    """The heads that matter for the word, most telling first."""
    if len(lit.ranking) < 2:
        return []
    word, (unit, _) = quoted_label(lit.rows.labels, lit.position), lit.cols.units
    if lit.target is not None:
        title = f"Heads by the weight that {word} gives to {quoted_label(lit.cols.labels, lit.target)}"
    elif lit.alone:
        title = f"There is no other {unit} that {word} could be tied to; heads by the weight they give most"
    else:
        title = f"Heads that tie {word} to another {unit}, most telling first"
    lines = paragraph(title, width, "bold")
    with_layer = any(view.name for view in lit.layers.values())
    keys = ["–" if tie.key is None else numbered_label(lit.cols.labels, tie.key, 12) for tie in lit.ranking[:count]]
    first = max([cell_width(key) for key in keys] + [8])
    beyond = "" if lit.target is not None or lit.alone else "  beyond"
    header = f"  {'layer  ' if with_layer else ''}head  {align_left('looks at', first)}  weight{beyond}"
    lines.append([Span(header, "dim")])
    bar_width = min(24, width - len(header) - 2)
    for key, tie in zip(keys, lit.ranking, strict=False):
        place = f"{tie.layer:>5}  {tie.head:>4}" if with_layer else f"{tie.head:>4}"
        text = f"  {place}  {align_left(key, first)}  {format_number(tie.weight):>6}"
        if beyond:
            text += f"  {'–' if tie.key is None else format_number(tie.beyond):>6}"
        style = tint(lit.heads.index(tie)) if tie in lit.heads else "dim"
        lines.append([Span(text), Span(f"  {bar(tie.weight, bar_width)}" if bar_width >= 4 else "", style)])
    if beyond:
        meaning = f"beyond: the weight above what the head gives that {unit}, or at that distance, anyway"
        lines += paragraph(meaning, width, "dim", "  ")
    return lines


# All words.


def _overview_lines(summary: Overview, width: int, top: int) -> list[Line]:
    lines = note_lines(summary.notes, width)
    labels = summary.rows.labels
    pairs = [(Span(safe(label, 24)), Span("")) for label in labels[:ALL_WORDS]]
    if len(labels) > ALL_WORDS:
        pairs.append((Span(f"… {len(labels) - ALL_WORDS:,} more"), Span("")))
    lines += [*word_lines(pairs, width), []]
    if summary.rows.hidden or summary.cols.hidden:
        remark = "(special tokens are hidden, the other weights scaled up to the whole)"
        lines += [*paragraph(remark, width, "dim"), []]
    lines += _tie_lines(summary, width, top)
    if summary.metrics:
        lines += [[], [Span("Heads that do one thing (layer.head)", "bold")], *_metric_lines(summary, width)]
    return lines


def _tie_lines(summary: Overview, width: int, top: int) -> list[Line]:
    """The strongest tie of every word."""
    ties, (unit, _) = _varied(summary)[:top], summary.rows.units
    if not ties:
        text = f"No {unit} is tied to another: there is no other {unit}, or no weight to tell by."
        return paragraph(text, width, "bold")
    with_layer = any(view.name for view in summary.layers)
    rows = [numbered_label(summary.rows.labels, tie.word, 14) for tie in ties]
    cols = [numbered_label(summary.cols.labels, tie.key, 14) for tie in ties]
    left, right = max([*map(cell_width, rows), len(unit)]), max([*map(cell_width, cols), 8])
    lines = paragraph(f"Which {unit} is tied to which, most telling first", width, "bold")
    header = f"  {align_left(unit, left)}    {align_left('looks at', right)}  weight  "
    header += "layer.head" if with_layer else "head"
    lines.append([Span(header if len(header) <= width else header.replace("layer.head", "head"), "dim")])
    bar_width = min(24, width - len(header) - 2)
    for tie, word, key in zip(ties, rows, cols, strict=True):
        head = tie.head
        place = f"{head.layer}.{head.head}" if with_layer else str(head.head)
        line = [Span(f"  {align_left(word, left)}  → {align_left(key, right)}  {head.weight:6.3f}  {place:<10}")]
        lines.append(trim([*line, Span("  " + bar(head.weight, bar_width), tint(0))] if bar_width >= 4 else line))
    return lines


def _varied(summary: Overview) -> list[WordTie]:
    """Every pair of words once; three ties of a head at first, so that one head does not fill the list."""
    first: dict[tuple[str, str], WordTie] = {}
    per_head: dict[tuple[int, int], int] = {}
    rest: list[WordTie] = []
    for tie in summary.ties:
        pair = summary.rows.labels[tie.word], summary.cols.labels[tie.key]
        head = tie.head.layer, tie.head.head
        if pair in first:
            continue
        per_head[head] = per_head.get(head, 0) + 1
        if per_head[head] > 3:
            rest.append(tie)
        else:
            first[pair] = tie
    return [*first.values(), *rest]


def _metric_lines(summary: Overview, width: int) -> list[Line]:
    lines: list[Line] = []
    unit, units = summary.cols.units
    meanings = {name: text.format(unit=unit, units=units) for name, text in _METRICS.items()}
    first = max(24, *map(len, meanings.values()))
    for name, meaning in meanings.items():
        if table := summary.metrics.get(name):
            if width >= 60:
                numbers = [
                    (f"{layer}.{head}", f"({value:{'.2f' if value < 10 else '.0f'}})")
                    for layer, head, value in table[:4]
                ]
                best = "  ".join(f"{place:>5} {number:<6}" for place, number in numbers).rstrip()
            else:
                best = "".join(f"{f'{layer}.{head}':>6}" for layer, head, _ in table[:2])
            lines.append([Span(f"  {meaning:<{first}}"), Span(best)])
    return lines


# Training.


def _history_lines(history: History, width: int) -> list[Line]:
    """Entropy and largest score of every head over the steps."""
    steps = [step for step, _ in history]
    lines: list[Line] = [[Span(f"steps {steps[0]:,} to {steps[-1]:,}, {len(steps)} looks", "bold")]]
    for measure, title in MEASURES.items():
        series = {head_label(*pair): list(values.values()) for pair, values in head_series(history, measure).items()}
        lines += [[], [Span(title, "bold")]] if series else []
        first = min(max([cell_width(name) for name in series] + [0]), width // 2)
        spark_width = max(4, width - first - 20)
        for name, values in list(series.items())[:48]:
            ends = f"{values[0]:7.3g} → {values[-1]:<7.3g}".replace("nan", "NaN")
            spark = align_left(sparkline(values, spark_width), spark_width)
            lines.append([Span(f"{align_left(name, first)}  {spark} {ends}".rstrip())])
        lines += [[Span(f"… {len(series) - 48} more heads", "dim")]] if len(series) > 48 else []
    return lines
