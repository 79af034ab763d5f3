"""The six steps of attention for one word as tables in a terminal: scores, weights, and the weighted sum of values."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .terminal import note_lines
from .text_layout import (
    NARROWEST,
    Line,
    Span,
    align_left,
    align_right,
    bar,
    format_number,
    label_width,
    numbered_label,
    paragraph,
    quoted,
    quoted_label,
    render,
    strongest,
    tint,
    trim,
)
from .token_text import cell_width
from .walk import Walk

__all__ = ["draw_walk"]


def draw_walk(steps: Walk, *, width: int = 80, colour: bool | str = False, top: int | None = None) -> str:
    """The six steps of one word as text.

    Args:
        steps: What `regard.walk` returns.
        width: Columns of the terminal.
        colour: False, True, or the colours of the terminal: "standard", "256", "truecolor".
        top: How many of the strongest words are shown.
    """
    width = max(width, NARROWEST)
    chosen = strongest([steps.weights.tolist()], len(steps.words), top)
    if steps.position not in chosen and _is_a_key(steps):
        chosen = sorted([*chosen, steps.position])
    lines = paragraph(f"Attention for {_word(steps)}, step by step", width, "bold")
    lines += [
        *_shapes(steps, width),
        [],
        *note_lines(steps.notes, width),
        *_steps_to_weights(steps, chosen, width),
        [],
        *_steps_to_sum(steps, chosen, width),
    ]
    return render(lines, colour)


def _is_a_key(steps: Walk) -> bool:
    """Whether the word is one of those it looks at."""
    return steps.words[steps.position : steps.position + 1] == (steps.word,)


def _word(steps: Walk) -> str:
    """The word in quotation marks, with its number among the words if it occurs several times there."""
    return quoted_label(steps.words, steps.position) if _is_a_key(steps) else quoted(steps.word)


def _shapes(steps: Walk, width: int) -> list[Line]:
    j, e = steps.v.shape
    if steps.k is None:
        text = f"weights {j} (recorded ready-made, without their scores) · v {j}×{e}"
    else:
        d = steps.k.shape[1]
        text = f"1 query, keys, values: q {d} · k {j}×{d} · v {j}×{e}"
    return paragraph(text, width)


def _steps_to_weights(steps: Walk, chosen: list[int], width: int) -> list[Line]:
    """Steps 2 to 4 and the mask, a row for every word."""
    columns: list[tuple[str, Tensor]] = []
    lines: list[Line] = []
    if steps.product is not None and steps.scaled is not None and steps.masked is not None:
        masks = bool((steps.masked == -float("inf")).any())
        columns = [(f"2 {steps.formula}", steps.product), (f"3 {steps.scaling}", steps.scaled)]
        columns += [(f"+ {name}", x) for name, x in steps.changes]
        columns += [("mask", steps.masked)] if masks else []
        lines += [*_explanation(steps, steps.masked, width), []]
    columns += [("4 softmax", steps.weights)]
    lines += _table(steps, chosen, columns, width)
    if rest := len(steps.words) - len(chosen):
        left = 1 - steps.sink - sum(float(steps.weights[j]) for j in chosen)
        lines += paragraph(f"{rest:,} more: {format_number(max(left, 0.0))} in all", width, "dim")
    if steps.sink:
        lines += paragraph(f"a sink takes {format_number(steps.sink)} and gives nothing", width, "dim")
    return lines


def _explanation(steps: Walk, masked: Tensor, width: int) -> list[Line]:
    """Steps 2 to 4 and the mask in words, with one product written out."""
    then = "".join(f", then {name}" for name, _ in steps.changes)
    scaling = "not scaled" if steps.scaling == "unscaled" else f"{steps.scaling}: large scores would saturate softmax"
    unseen, total = int((masked == -float("inf")).sum()), len(steps.words)
    mask = f"{unseen:,} of {total:,} words may not be looked at" if unseen else "every word may be looked at"
    lines = paragraph(f"2 {steps.formula}: how alike the query of {_word(steps)} is to every key", width)
    lines += _one_product(steps, width)
    lines += paragraph(f"3 {scaling}{then}", width)
    lines += paragraph(f"mask: {mask}", width)
    if unseen == total and not steps.sink:
        return lines + paragraph("4 softmax: nothing may be looked at, so all weights are 0, and their sum is", width)
    if steps.notes:
        return lines + paragraph("4 softmax: weights that are not numbers", width)
    return lines + paragraph(f"4 softmax: weights, none negative, their sum {1 - steps.sink:.4g}", width)


def _one_product(steps: Walk, width: int) -> list[Line]:
    """The dot product with the key of the largest weight: its largest terms written out."""
    if steps.formula != "q·k" or steps.q is None or steps.k is None or steps.product is None:
        return []
    key = int(steps.weights.argmax())
    terms = steps.q * steps.k[key]
    order = terms.abs().argsort(descending=True).tolist()
    count = len(order) if len(order) <= 3 else max(1, min(4, (width - 20) // 18))
    factors = [(float(steps.q[d]), float(steps.k[key, d])) for d in order[:count]]
    total = " + ".join(f"{format_number(a)}·{format_number(b)}" for a, b in factors)
    total += f" + … ({len(order) - count} more)" if len(order) > count else ""
    pair = f"{_word(steps)} · {quoted_label(steps.words, key)}"
    return paragraph(f"{pair} = {total} = {format_number(float(steps.product[key]))}", width, "", "    ")


def _steps_to_sum(steps: Walk, chosen: list[int], width: int) -> list[Line]:
    """Steps 5 and 6: the first few numbers of every weight × value, and their sums."""
    first = _first_width(steps, chosen, width)
    e = steps.v.shape[1]
    fit = max(1, min(e, 6, (width - first - 10) // 9))
    some = f"{e} numbers" if fit == e else f"the first {fit} of {e} numbers"
    lines = [*paragraph(f"5 weight × value, {some}; 6 their sum", width), []]
    titles = "".join(f"{f'[{n}]':>9}" for n in range(fit))
    lines.append([Span(" " * first + "  weight " + titles, "bold")])
    for j in chosen:
        weight = format_number(float(steps.weights[j]))
        word = Span(align_left(numbered_label(steps.words, j, first), first))
        lines.append([word, Span(f"  {weight:>6} {_numbers(steps.weighted[j, :fit])}")])
    if rest := len(steps.words) - len(chosen):
        others = steps.weighted.sum(0) - steps.weighted[chosen].sum(0)
        lines.append([Span(align_left(f"{rest:,} more", first) + "  " + " " * 7 + _numbers(others[:fit]), "dim")])
    lines.append([Span(align_left("6 sum y", first + 9) + _numbers(steps.y[:fit]), "bold")])
    return lines


def _numbers(x: Tensor) -> str:
    return "".join(f"{format_number(number):>9}" for number in x.tolist())


def _table(steps: Walk, chosen: list[int], columns: list[tuple[str, Tensor]], width: int) -> list[Line]:
    """Columns of numbers, a row for every word; in a narrow terminal one table below the other."""
    first = _first_width(steps, chosen, width)
    sizes = [max(8, cell_width(title)) for title, _ in columns]
    fit, used = 0, first
    while fit < len(columns) and used + 2 + sizes[fit] <= width:
        used += 2 + sizes[fit]
        fit += 1
    fit = max(fit, 1)
    here, below = columns[:fit], columns[fit:]
    bar_width = min(24, width - used - 2) if not below else 0
    titles = "".join("  " + align_right(title, size) for (title, _), size in zip(here, sizes, strict=False))
    lines: list[Line] = [[Span(" " * first + titles, "bold")]]
    for j in chosen:
        lit = j == steps.position and _is_a_key(steps)
        line = [Span(align_left(numbered_label(steps.words, j, first), first), "bold" if lit else "")]
        line += [Span(f"  {format_number(float(x[j])):>{size}}") for (_, x), size in zip(here, sizes, strict=False)]
        if bar_width >= 4:
            line.append(Span("  " + bar(float(here[-1][1][j]), bar_width), tint(0)))
        lines.append(trim(line))
    return lines + ([[], *_table(steps, chosen, below, width)] if below else [])


def _first_width(steps: Walk, chosen: Iterable[int], width: int) -> int:
    return max([cell_width(numbered_label(steps.words, j, label_width(width))) for j in chosen] + [7])
