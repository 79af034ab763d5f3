"""The picture in a terminal: a sentence with its words shaded, a bar a word, the heads that matter; and the walk.

Without colour nothing is lost: shading is a bar under the word as well. Imports `lines`, `spot`, `walk` and `words`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from . import spotlight, token_text
from .text_layout import (
    FAINT,
    Line,
    Span,
    bar,
    number,
    paragraph,
    quoted,
    rendered,
    safe,
    shade,
    tint,
    to_left,
    to_right,
    trimmed,
)
from .walk import Walk

__all__ = ["draw", "draw_overview", "draw_spot", "draw_walk"]

#: Words up to which every one gets a bar; beyond, the strongest do.
ALL_WORDS = 24
STRONGEST = 12
#: Columns below which nothing lines up.
NARROWEST = 40
_LEVELS = "▁▂▃▄▅▆▇█"

_MEASURES = {
    "entropy": "looks at few words",
    "previous": "looks at the word before",
    "mean_distance": "looks far away",
    "sink": "rests on one token",
    "induction": "repeats what followed",
}


def draw(
    subject: Any,
    *,
    word: str | int | None = None,
    layer: int | str | None = None,
    head: int | None = None,
    width: int = 80,
    colour: bool | str = False,
    hide_special: bool = False,
    merge: bool = False,
    top: int | None = None,
    to: str | int | None = None,
    item: int = 0,
) -> str:
    """A recording, a `Weights` or a training history as text for a terminal.

    word     the word that is lit; without it an overview
    width    columns of the terminal
    colour   False, True, or what the terminal can do: "standard", "256", "truecolor"
    top      how many of the strongest words get a bar
    to       rank the heads by the weight on this word
    item     which sequence of a batch
    """
    if spotlight.is_history(subject):
        return rendered(_history(subject, max(width, NARROWEST)), colour)
    if word is None:
        seen = spotlight.overview(subject, layer=layer, head=head, hide_special=hide_special, merge=merge, item=item)
        return draw_overview(seen, width=width, colour=colour, top=top)
    read = {"hide_special": hide_special, "merge": merge, "item": item}
    lit = spotlight.spotlight(subject, word, to=to, layer=layer, head=head, **read)  # type: ignore[arg-type]
    return draw_spot(lit, width=width, colour=colour, top=top)


def draw_spot(lit: spotlight.Spot, *, width: int = 80, colour: bool | str = False, top: int | None = None) -> str:
    """A lit word: the sentence shaded, a bar a word, the heads that matter."""
    return rendered(_spotlight(lit, max(width, NARROWEST), top), colour)


def draw_overview(
    seen: spotlight.Overview, *, width: int = 80, colour: bool | str = False, top: int | None = None
) -> str:
    """Every word's strongest tie, and heads that do one thing."""
    return rendered(_overview(seen, max(width, NARROWEST), top or 10), colour)


# One word.


def _spotlight(lit: spotlight.Spot, width: int, top: int | None) -> list[Line]:
    lines: list[Line] = []
    for n, one in enumerate(lit.shown):
        place, tie = lit.layers[one.layer].place(one.head), _tie(lit, n, width)
        if place and token_text.cells(place) + token_text.cells(tie) + 2 > width:
            lines += [[Span(place, "bold")], [Span(tie)]]
        else:
            lines.append([Span(place, "bold"), Span(f"  {tie}" if place else tie)])
        lines += _sentence(lit, n, width)
        lines += _left_out(lit, n, width)
        lines.append([])
    ranked = _heads(lit, width)
    return [*_notes(lit.notes, width), *lines, *_bars(lit, width, top), *([[], *ranked] if ranked else [])]


def _notes(notes: list[str], width: int) -> list[Line]:
    """What must be said besides, before anything is shown."""
    return [line for note in notes for line in [*paragraph(note, width, "bold"), []]]


def _tie(lit: spotlight.Spot, n: int, width: int) -> str:
    """The word and the one it is tied to; where that tells nothing, the one it looks at most."""
    key = lit.shown[n].key
    if lit.to is None and (len(lit.heads) == 1 or lit.shown[n].beyond <= 0):
        key = max(range(len(lit.weights[n])), key=lambda j: lit.weights[n][j])
    each = (width - 13) // 2
    return f"{quoted(lit.word, each)} → {quoted(lit.cols.labels[key], each)} {number(lit.weights[n][key])}"


def _sentence(lit: spotlight.Spot, n: int, width: int) -> list[Line]:
    """The sentence that is looked at, each word shaded, with a bar under it; the lit word is »marked«."""
    parts: list[tuple[Span, Span]] = []
    if not lit.same:
        parts.append((Span(f"»{safe(lit.word, width - 8)}«", "bold reverse"), Span("")))
        parts.append((Span("→"), Span("")))
    for place in _in_sight(lit, width):
        if place is None:
            parts.append((Span("…"), Span("")))
            continue
        weight, here = lit.weights[n][place], lit.same and place == lit.at
        text = safe(lit.cols.labels[place], width - 6)
        text = f"»{text}«" if here else text
        under = _LEVELS[int(min(weight, 0.999) * 8)] * token_text.cells(text) if weight >= FAINT else ""
        style = "bold reverse" if here else shade(weight, n)
        parts.append((Span(text, style), Span(under, tint(n))))
    return _wrapped(parts, width)


def _in_sight(lit: spotlight.Spot, width: int) -> list[int | None]:
    """The words to show: all of a sentence; of a long text those around the lit word and around its keys."""
    total = len(lit.cols.labels)
    if total <= 120:
        return list(range(total))
    near = 12 if width >= 60 else 6
    centres = [one.key for one in lit.shown] + ([lit.at] if lit.same else [])
    wanted = sorted({place for c in centres for place in range(max(0, c - near), min(total, c + near + 1))})
    shown: list[int | None] = [] if wanted[0] == 0 else [None]
    for before, place in zip([wanted[0] - 1, *wanted], wanted, strict=False):
        shown += [place] if place == before + 1 else [None, place]
    return shown if wanted[-1] == total - 1 else [*shown, None]


def _wrapped(parts: list[tuple[Span, Span]], width: int) -> list[Line]:
    """Words and what stands under them, in as many double lines as it takes."""
    lines: list[Line] = []
    above: Line = [Span("  ")]
    below: Line = [Span("  ")]
    used = 2
    for word, under in parts:
        size = token_text.cells(word.text)
        if used + size > width and len(above) > 1:
            lines += [above, trimmed(below)]
            above, below, used = [Span("  ")], [Span("  ")], 2
        above += [word, Span(" ")]
        below += [under, Span(" " * (size + 1 - token_text.cells(under.text)))]
        used += size + 1
    return [line for line in [*lines, trimmed(above), trimmed(below)] if line]


def _left_out(lit: spotlight.Spot, n: int, width: int) -> list[Line]:
    """What the numbers do not show: hidden tokens, and a sink."""
    told = []
    if lit.cols.hidden:
        told.append(f"special tokens are hidden: they had {lit.hidden[n]:.3f}, the others are scaled up to the whole")
    if 1 - sum(lit.weights[n]) > 0.001:
        told.append(f"{1 - sum(lit.weights[n]):.3f} goes to no word: a sink takes it, or the word sees nothing")
    return [line for text in told for line in paragraph(f"({text})", width, "dim", "  ")]


def _bars(lit: spotlight.Spot, width: int, top: int | None) -> list[Line]:
    """A bar a word for every shown head."""
    labels = lit.cols.labels
    chosen = _strongest(lit.weights, len(labels), top)
    numbered = len(chosen) < len(labels)
    names = [f"{safe(labels[j], _label_width(width))}{f' :{j}' if numbered else ''}" for j in chosen]
    first = max(map(token_text.cells, [*names, "word"]))
    each = (width - first) // len(lit.shown)
    room = min(max(4, each - 9), 40)
    lines: list[Line] = []
    if len(lit.shown) > 1:
        titles = [lit.layers[one.layer].place(one.head) for one in lit.shown]
        if max(map(len, titles)) > room + 6:
            titles = [f"head {one.layer}.{one.head}" for one in lit.shown]
        lines.append([Span(" " * first)] + [Span("  " + to_left(title, room + 7), "bold") for title in titles])
    for name, j in zip(names, chosen, strict=True):
        here = lit.same and j == lit.at
        line = [Span(to_left(name, first), "bold" if here else "")]
        for n, weights in enumerate(lit.weights):
            line += [
                Span("  "),
                Span(to_left(bar(weights[j], room), room), tint(n)),
                Span(f" {number(weights[j]):>5} "),
            ]
        lines.append(trimmed(line))
    if numbered:
        rest = [sum(w) - sum(w[j] for j in chosen) for w in lit.weights]
        line = [Span(to_left(f"{len(labels) - len(chosen):,} more", first), "dim")]
        for part in rest:
            line += [Span("  " + " " * room + f" {number(max(part, 0.0)):>5} ", "dim")]
        lines.append(trimmed(line))
    return lines


def _strongest(weights: list[list[float]], total: int, top: int | None) -> list[int]:
    """Which words get a bar, in the order of the sentence."""
    count = top or (total if total <= ALL_WORDS else STRONGEST)
    if count >= total:
        return list(range(total))
    order = sorted(range(total), key=lambda j: -max((w[j] for w in weights if w[j] == w[j]), default=0.0))
    return sorted(order[:count])


def _heads(lit: spotlight.Spot, width: int, count: int = 8) -> list[Line]:
    """The heads that matter for the word, best first."""
    if len(lit.heads) < 2:
        return []
    if lit.to is not None:
        title = f"Heads by the weight that {quoted(lit.word)} gives to {quoted(lit.cols.labels[lit.to])}"
    elif lit.alone:
        title = f"There is no other word that {quoted(lit.word)} could be tied to; heads by the weight they give most"
    else:
        title = f"Heads that tie {quoted(lit.word)} to another word, most telling first"
    lines = paragraph(title, width, "bold")
    named = any(sheet.name for sheet in lit.layers.values())
    keys = [_told_apart(lit.cols.labels, one.key, 12) for one in lit.heads[:count]]
    first = max([token_text.cells(key) for key in keys] + [8])
    beyond = "" if lit.to is not None or lit.alone else "  beyond"
    start = f"  {'layer  ' if named else ''}head  {to_left('looks at', first)}  weight{beyond}"
    lines.append([Span(start, "dim")])
    room = min(24, width - len(start) - 2)
    for key, one in zip(keys, lit.heads, strict=False):
        place = f"{one.layer:>5}  {one.head:>4}" if named else f"{one.head:>4}"
        text = f"  {place}  {to_left(key, first)}  {number(one.weight):>6}" + (
            f"  {number(one.beyond):>6}" if beyond else ""
        )
        style = tint(lit.shown.index(one)) if one in lit.shown else "dim"
        lines.append([Span(text), Span(f"  {bar(one.weight, room)}" if room >= 4 else "", style)])
    if beyond:
        habit = "beyond: the weight above what the head gives that word, or at that distance, anyway"
        lines += paragraph(habit, width, "dim", "  ")
    return lines


def _told_apart(labels: Sequence[str], place: int, width: int) -> str:
    """A word, with its number where it stands in the sentence several times: the:2."""
    nth = token_text.numbered(labels, place)
    return safe(labels[place], width - len(nth)) + nth


# The whole.


def _overview(seen: spotlight.Overview, width: int, top: int) -> list[Line]:
    lines = _notes(seen.notes, width)
    shown = [safe(label, 24) for label in seen.rows.labels[:120]]
    parts = [(Span(text), Span("")) for text in shown]
    parts += [(Span(f"… {len(seen.rows.labels) - 120:,} more"), Span(""))] if len(seen.rows.labels) > 120 else []
    lines += [*_wrapped(parts, width), []]
    if seen.rows.hidden or seen.cols.hidden:
        told = "(special tokens are hidden, the other weights scaled up to the whole)"
        lines += [*paragraph(told, width, "dim"), []]
    lines += _ties(seen, width, top)
    if seen.measured:
        lines += [[], [Span("Heads that do one thing (layer.head)", "bold")]]
        lines += _measures(seen, width)
    return lines


def _ties(seen: spotlight.Overview, width: int, top: int) -> list[Line]:
    """The strongest tie of each word."""
    some = _varied(seen)[:top]
    if not some:
        return paragraph("No word is tied to another: there is no other word, or no weight to tell by.", width, "bold")
    named = any(sheet.name for sheet in seen.sheets)
    rows = [_told_apart(seen.rows.labels, link.word, 14) for link in some]
    cols = [_told_apart(seen.cols.labels, link.head.key, 14) for link in some]
    left, right = max([*map(token_text.cells, rows), 4]), max([*map(token_text.cells, cols), 8])
    lines = paragraph("Which word is tied to which, most telling first", width, "bold")
    start = f"  {to_left('word', left)}    {to_left('looks at', right)}  weight  {'layer.head' if named else 'head'}"
    lines.append([Span(start if len(start) <= width else start.replace("layer.head", "head"), "dim")])
    room = min(24, width - len(start) - 2)
    for link, word, key in zip(some, rows, cols, strict=True):
        one = link.head
        place = f"{one.layer}.{one.head}" if named else str(one.head)
        line = [Span(f"  {to_left(word, left)}  → {to_left(key, right)}  {one.weight:6.3f}  {place:<10}")]
        lines.append(trimmed([*line, Span("  " + bar(one.weight, room), tint(0))] if room >= 4 else line))
    return lines


def _varied(seen: spotlight.Overview) -> list[spotlight.Link]:
    """Every tie once; of one head three at first, so that it does not fill the list."""
    found: dict[tuple[str, str], spotlight.Link] = {}
    of_head: dict[tuple[int, int], int] = {}
    later: list[spotlight.Link] = []
    for link in seen.links:
        word, key = seen.rows.labels[link.word], seen.cols.labels[link.head.key]
        place = link.head.layer, link.head.head
        if (word, key) in found:
            continue
        of_head[place] = of_head.get(place, 0) + 1
        if of_head[place] > 3:
            later.append(link)
        else:
            found[word, key] = link
    return [*found.values(), *later]


def _measures(seen: spotlight.Overview, width: int) -> list[Line]:
    lines: list[Line] = []
    for name, what in _MEASURES.items():
        if found := seen.measured.get(name):
            if width >= 60:
                best = "  ".join(
                    f"{f'{layer}.{head}':>5} ({number:{'.2f' if number < 10 else '.0f'}})"
                    for layer, head, number in found[:4]
                )
            else:
                best = "".join(f"{f'{layer}.{head}':>6}" for layer, head, _ in found[:2])
            lines.append([Span(f"  {what:<24}"), Span(best)])
    return lines


# Training.


def _history(history: Sequence[tuple[int, dict[str, float]]], width: int) -> list[Line]:
    """Entropy and largest score of every head over the steps."""
    steps = [step for step, _ in history]
    lines: list[Line] = [[Span(f"steps {steps[0]:,} to {steps[-1]:,}, {len(steps)} looks", "bold")]]
    for kind, title in spotlight.WATCHED.items():
        mine = spotlight.series(history, kind)
        lines += [[], [Span(title, "bold")]] if mine else []
        first = min(max([token_text.cells(name) for name in mine] + [0]), width // 2)
        for name, points in list(mine.items())[:48]:
            values = [value for _, value in points]
            room = max(4, width - first - 20)
            ends = f"{values[0]:7.3g} → {values[-1]:<7.3g}".replace("nan", "NaN")
            lines.append([Span(f"{to_left(name, first)}  {to_left(_spark(values, room), room)} {ends}".rstrip())])
        lines += [[Span(f"… {len(mine) - 48} more heads", "dim")]] if len(mine) > 48 else []
    return lines


def _spark(values: Sequence[float], room: int) -> str:
    """A line of bars from the least to the most, as many as there is room for; a gap where there is no number."""
    picked = [values[n * len(values) // room] for n in range(room)] if len(values) > room else values
    known = [x for x in picked if math.isfinite(x)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = 7.999 / (high - low) if high > low else 0.0
    return "".join(_LEVELS[int((x - low) * step)] if math.isfinite(x) else " " for x in picked)


# The walk.


def draw_walk(steps: Walk, *, width: int = 80, colour: bool | str = False, top: int | None = None) -> str:
    """The six steps of one word as tables: from scores to weights, from weights to the sum."""
    width = max(width, NARROWEST)
    chosen = _strongest([steps.weights.tolist()], len(steps.words), top)
    if steps.position not in chosen and steps.words[steps.position : steps.position + 1] == (steps.word,):
        chosen = sorted([*chosen, steps.position])
    lines = paragraph(f"Attention for {quoted(steps.word)}, step by step", width, "bold")
    lines += [
        *_shapes(steps, width),
        [],
        *_notes(steps.notes, width),
        *_to_weights(steps, chosen, width),
        [],
        *_to_sum(steps, chosen, width),
    ]
    return rendered(lines, colour)


def _shapes(steps: Walk, width: int) -> list[Line]:
    e = steps.v.shape[1]
    if steps.q is None or steps.k is None:
        text = f"weights {len(steps.words)} (recorded ready-made, without their scores) · v {len(steps.words)}×{e}"
    else:
        text = f"q {len(steps.q)} · k {steps.k.shape[0]}×{steps.k.shape[1]} · v {steps.v.shape[0]}×{e} · y {e}"
    return paragraph(text, width, "dim")


def _to_weights(steps: Walk, chosen: list[int], width: int) -> list[Line]:
    """Steps 1 to 4, a row a word."""
    columns: list[tuple[str, Tensor]] = []
    lines: list[Line] = []
    if steps.product is not None and steps.scaled is not None and steps.masked is not None:
        hides = bool((steps.masked == -float("inf")).any())
        columns = [(f"1 {steps.formula}", steps.product), (f"2 {steps.scaling}", steps.scaled)]
        columns += [(f"+ {name}", x) for name, x in steps.changes]
        columns += [("3 mask", steps.masked)] if hides else []
        lines += [*_explained(steps, hides, width), []]
    columns += [("4 softmax", steps.weights)]
    lines += _table(steps, chosen, columns, width)
    if rest := len(steps.words) - len(chosen):
        left = 1 - steps.sink - sum(float(steps.weights[j]) for j in chosen)
        lines += paragraph(f"{rest:,} more: {number(max(left, 0.0))} in all", width, "dim")
    if steps.sink:
        lines += paragraph(f"a sink takes {number(steps.sink)} and gives nothing", width, "dim")
    return lines


def _explained(steps: Walk, hides: bool, width: int) -> list[Line]:
    """What the first four steps do, in words, with one product written out."""
    then = "".join(f", then {name}" for name, _ in steps.changes)
    scaled = "not scaled" if steps.scaling == "unscaled" else f"{steps.scaling}: large scores would saturate softmax"
    unseen = int((steps.masked == -float("inf")).sum()) if hides and steps.masked is not None else 0
    told = f"{unseen:,} of {len(steps.words):,} words may not be looked at" if hides else "every word may be looked at"
    lines = paragraph(f"1 {steps.formula}: how alike the query of {quoted(steps.word)} is to every key", width)
    lines += _one_product(steps, width)
    lines += paragraph(f"2 {scaled}{then}", width)
    lines += paragraph(f"3 mask: {told}", width)
    if unseen == len(steps.words) and not steps.sink:
        return lines + paragraph("4 softmax: nothing may be looked at, so all weights are 0, and their sum is", width)
    if steps.notes:
        return lines + paragraph("4 softmax: weights that are not numbers", width)
    return lines + paragraph(f"4 softmax: weights, none negative, their sum {1 - steps.sink:.4g}", width)


def _one_product(steps: Walk, width: int) -> list[Line]:
    """One dot product written out: its largest terms, cell by cell."""
    if steps.formula != "q·k" or steps.q is None or steps.k is None or steps.product is None:
        return []
    key = int(steps.weights.argmax())
    terms = steps.q * steps.k[key]
    order = terms.abs().argsort(descending=True).tolist()
    count = len(order) if len(order) <= 3 else max(1, min(4, (width - 20) // 18))
    written = " + ".join(f"{number(float(steps.q[d]))}·{number(float(steps.k[key, d]))}" for d in order[:count])
    more = f" + … ({len(order) - count} more)" if len(order) > count else ""
    text = f"{quoted(steps.word)} · {quoted(steps.words[key])} = {written}{more} = {number(float(steps.product[key]))}"
    return paragraph(text, width, "", "    ")


def _to_sum(steps: Walk, chosen: list[int], width: int) -> list[Line]:
    """Steps 5 and 6: the first few numbers of every weight × value, and their sums."""
    first = _first_width(steps, chosen, width)
    e = steps.v.shape[1]
    fit = max(1, min(e, 6, (width - first - 10) // 9))
    some = f"{e} numbers" if fit == e else f"the first {fit} of {e} numbers"
    lines = [*paragraph(f"5 weight × value, {some}; 6 their sum", width), []]
    titles = "".join(f"{f'[{n}]':>9}" for n in range(fit))
    lines.append([Span(" " * first + "  weight " + titles, "bold")])
    for j in chosen:
        numbers = "".join(f"{number(x):>9}" for x in steps.weighted[j, :fit].tolist())
        lines.append(
            [
                Span(to_left(safe(steps.words[j], first), first)),
                Span(f"  {number(float(steps.weights[j])):>6} {numbers}"),
            ]
        )
    if rest := len(steps.words) - len(chosen):
        others = steps.weighted.sum(0) - steps.weighted[chosen].sum(0)
        numbers = "".join(f"{number(x):>9}" for x in others[:fit].tolist())
        lines.append([Span(to_left(f"{rest:,} more", first) + "  " + " " * 7 + numbers, "dim")])
    numbers = "".join(f"{number(x):>9}" for x in steps.y[:fit].tolist())
    lines.append([Span(to_left("6 sum y", first + 9) + numbers, "bold")])
    return lines


def _table(steps: Walk, chosen: list[int], columns: list[tuple[str, Tensor]], width: int) -> list[Line]:
    """Numbers of words side by side; in a narrow terminal one table below the other."""
    first = _first_width(steps, chosen, width)
    sizes = [max(8, token_text.cells(title)) for title, _ in columns]
    fit, used = 0, first
    while fit < len(columns) and used + 2 + sizes[fit] <= width:
        used += 2 + sizes[fit]
        fit += 1
    fit = max(fit, 1)
    here, later = columns[:fit], columns[fit:]
    room = min(24, width - used - 2) if not later else 0
    titles = "".join("  " + to_right(title, size) for (title, _), size in zip(here, sizes, strict=False))
    lines: list[Line] = [[Span(" " * first + titles, "bold")]]
    for j in chosen:
        lit = steps.words[j] == steps.word and j == steps.position
        line = [Span(to_left(safe(steps.words[j], first), first), "bold" if lit else "")]
        line += [Span(f"  {number(float(x[j])):>{size}}") for (_, x), size in zip(here, sizes, strict=False)]
        if room >= 4:
            line.append(Span("  " + bar(float(here[-1][1][j]), room), tint(0)))
        lines.append(trimmed(line))
    return lines + ([[], *_table(steps, chosen, later, width)] if later else [])


def _first_width(steps: Walk, chosen: Iterable[int], width: int) -> int:
    return max([token_text.cells(safe(steps.words[j], _label_width(width))) for j in chosen] + [7])


def _label_width(width: int) -> int:
    return 18 if width >= 60 else 9
