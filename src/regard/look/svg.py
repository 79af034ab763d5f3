"""A picture for a paper: one SVG with the lit sentence, arcs by weight, and the matrix as a square.

Vectors only and text as text, dark on a light ground, with a title and a description for screen readers. Two heads
differ in colour, in side (above and below the words) and in their labels. Of a long text the strongest words are drawn,
and its matrix as the largest weights of tiles, never as i × j weights. Cells that the mask hides are hatched.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from ..core.patches import ImageLike
from .compare import HeadChanges
from .dot_head import max_map
from .history import MEASURES, History, head_label, head_series, is_history
from .layers import LayerView, Subject, visible_cells
from .masked_tiles import forbidden_tiles
from .options import ViewOptions, changed_options
from .spotlight import Spotlight, overview, spotlight
from .svg_compare import draw_changes
from .svg_elements import (
    HUES,
    INK,
    LETTERS,
    MARGIN,
    PALE,
    cell_places,
    document,
    fitted_width,
    frame_rect,
    inches,
    marked_cells,
    note_lines,
    page_units,
    rect,
    right_to_left,
    safe_xml,
    text_element,
    text_width,
    tint_fill,
)
from .svg_patches import PatchGrids
from .svg_words import WordBox, flow_words, one_line
from .text_layout import format_number, quoted_label
from .token_groups import TokenGroups
from .token_text import clip, is_patches, numbered_texts, printable

__all__ = ["PicturePart", "svg"]

#: The parts of a picture: the sentence with its lines, or the matrix.
PicturePart = Literal["lines", "square"]

_LINE = 640.0  # how wide a line of words may get
#: Positions up to which the square shows every cell; beyond, the largest weights of so many tiles.
_CELLS = 48
#: Words up to which a sentence is drawn in full.
_WORDS = 60
_STRIP = (520.0, 120.0)  # width and height of what a training history fills


def svg(
    subject: Subject | HeadChanges | History,
    options: ViewOptions | None = None,
    *,
    part: PicturePart | None = None,
    width: str | None = None,
    **changes: Any,
) -> str:
    """A recording, a `Weights`, a comparison or a training history as one standalone SVG.

    With a word: the sentence with arcs to the words it looks at, in the two heads that matter most, and the square of
    the first of them. Without: the square of the head with the strongest tie. A comparison becomes two squares and
    their difference, a training history two strips, entropy and largest score of every head over the steps.

    Args:
        subject: What to draw.
        options: What to begin with.
        part: Only the sentence ("lines") or only the matrix ("square").
        width: How wide the picture is, such as "3.3in"; lines are broken so that its letters are 7.5 points high.
        changes: Single options, by the names of `ViewOptions`.
    """
    options = changed_options(options, changes)
    if part not in (None, "lines", "square"):
        raise ValueError(f'part must be "lines", the sentence, or "square", the matrix; got {part!r}.')
    if width is not None:
        inches(width)  # raises where it is no length
    if isinstance(subject, HeadChanges) or is_history(subject):
        if part is not None:
            raise ValueError(f"part={part!r} is of a picture of one recording; leave it out here.")
        if isinstance(subject, HeadChanges):
            return draw_changes(subject, options, width)
        return _strips(subject, options.title or "Attention while training", width)  # type: ignore[arg-type]
    return _Picture(subject, options, part, width).text  # type: ignore[arg-type]


class _Picture:
    """The picture of one recording: the sentence, the square, or both."""

    def __init__(self, subject: Subject, options: ViewOptions, part: PicturePart | None, width: str | None) -> None:
        self.elements: list[str] = []
        self.sentences: list[str] = []  # of the description
        self.widest = page_units(width, _LINE + 2 * MARGIN) - 2 * MARGIN
        self.bottom, self.right = MARGIN, 0.0
        word = options.word_name
        if word is None and part == "lines":
            ties = overview(subject, metrics=False, **options.selection).ties
            word = ties[0].word if ties else 0
        notes, name = (
            self._overview(subject, options) if word is None else self._spotlight(subject, options, word, part)
        )
        for line in (line for note in [*notes, *options.notes] for line in note_lines(note, self.widest)):
            self.bottom += 20
            self.elements.append(text_element(MARGIN, self.bottom, line, 12))
            self.right = max(self.right, MARGIN + text_width(line))
        self.sentences += [*notes, *options.notes]
        across = max(self.right, 0.0 if width else 300.0) + MARGIN
        described = " ".join(self.sentences)
        self.text = document(options.title or name, described, across, self.bottom + MARGIN, self.elements, width)

    def _overview(self, subject: Subject, options: ViewOptions) -> tuple[list[str], str]:
        summary = overview(subject, **options.selection)
        view, head = summary.layers[0], options.head or 0
        if summary.ties:
            best = summary.ties[0].head
            view, head = next(view for view in summary.layers if view.index == best.layer), best.head
        self._add(_Square(view, head, (summary.rows, summary.cols), None, self.bottom, self.widest))
        return summary.notes, "Attention"

    def _spotlight(
        self, subject: Subject, options: ViewOptions, word: str | int, part: PicturePart | None
    ) -> tuple[list[str], str]:
        lit = spotlight(subject, word, target=options.target, **options.selection)
        if part != "square":
            arcs = _Arcs(lit, self.bottom, self.widest, options.image)
            self.elements += arcs.elements
            self.sentences += arcs.sentences
            self.bottom, self.right = arcs.bottom + (0 if part else 28), arcs.right
        if part != "lines":
            best = lit.heads[0]
            view = lit.layers[best.layer]
            self._add(_Square(view, best.head, (lit.rows, lit.cols), lit.position, self.bottom, self.widest))
        return lit.notes, f"Attention of “{printable(lit.word)}”"

    def _add(self, square: _Square) -> None:
        self.elements += square.elements
        self.sentences.append(square.sentence)
        self.bottom, self.right = square.bottom, max(self.right, square.right)


# The sentence, a word lit.


class _Arcs:
    """The sentence with arcs from the lit word, the first head's above the words and the second's below.

    In cross-attention two sentences, the one with the lit word on top; the second head's lines are dashed. Patches that
    are looked at stand in their grid, one for every head.
    """

    def __init__(self, lit: Spotlight, top: float, line: float, image: ImageLike | None) -> None:
        self.lit = lit
        self.elements: list[str] = []
        self.sentences: list[str] = []
        self.right = 0.0
        keys = {place: _label(lit.cols.labels[place]) for place in _in_sight(lit)}
        top = self._legend(top, line) + 10
        self.reach = 74.0 if one_line(keys, line) else 46.0
        over = self.reach * len(lit.heads) + LETTERS + 14
        rows: dict[int, WordBox] = {}
        if not lit.same:
            looking = range(len(lit.rows.labels)) if len(lit.rows.labels) <= _WORDS else [lit.position]
            names = {place: _label(lit.rows.labels[place]) for place in looking}
            rows = flow_words(names, top + LETTERS, 24, line)
            self._words(names, rows, lit.position)
            top, over = max(box.y for box in rows.values()) + 12, 46
        if is_patches(lit.cols.tokens):
            carried = getattr(lit.layers[lit.heads[0].layer].cols, "image", None)
            grids = PatchGrids(lit, carried if image is None else image, top, line)
            self.elements += grids.elements
            self.right, self.bottom = max(self.right, grids.right), grids.bottom
            return
        boxes = flow_words(keys, top + self.reach, over, line)
        start = boxes.get(lit.position) if lit.same else rows[lit.position]
        self.margin = max([box.x + box.width for box in boxes.values()], default=MARGIN) + 12
        for n in range(len(lit.heads)):
            self._head(n, boxes, start)
        self._words(keys, boxes, lit.position if lit.same else None)
        ends = [box.x + box.width for box in [*boxes.values(), *rows.values()]]
        self.right = max([self.right, *ends])
        below = self.reach if lit.same and len(lit.heads) > 1 else 24
        self.bottom = max([box.y for box in boxes.values()], default=top) + below

    def _legend(self, top: float, line: float) -> float:
        """The tie of every head, in lines of this width; returns where they end."""
        for n, (tie, hidden) in enumerate(zip(self.lit.heads, self.lit.hidden, strict=True)):
            place = self.lit.layers[tie.layer].head_name(tie.head)
            text = f"{place}{': ' if place else ''}{quoted_label(self.lit.rows.labels, self.lit.position)}"
            if self.lit.next_word is not None:
                text += f", writing {quoted_label(self.lit.rows.labels, self.lit.position + 1)}"
            if (key := self.lit.headline_key(n)) is None:
                text += " looks at nothing"
            else:
                text += f" → {quoted_label(self.lit.cols.labels, key)} {format_number(self.lit.weights[n][key])}"
            if self.lit.cols.hidden:
                text += f" (special tokens hidden; they had {hidden:.3f})"
            self.sentences.append(text + ".")
            if len(self.lit.heads) > 1 and not is_patches(self.lit.cols.tokens):
                text += ", " + (("above", "below")[n] if self.lit.same else ("solid", "dashed")[n])
            self.elements.append(rect(MARGIN, top, 10, 10, f'fill="{HUES[n]}"'))
            for part in note_lines(text, line - 16):
                self.elements.append(text_element(MARGIN + 16, top + 9, part, size=12))
                wide = min(
                    text_width(part), max(line - 16, fitted_width(part))
                )  # one word alone may be wider than the line
                self.right = max(self.right, MARGIN + 16 + wide * 12 / LETTERS)
                top += 18
        return top

    def _head(self, n: int, boxes: dict[int, WordBox], start: WordBox | None) -> None:
        """Lines and shades of one head, the weak ones first, and its numbers on top."""
        weights, up, hue = self.lit.weights[n], n == 0, HUES[n]
        numbers = []
        least = max(0.01, 0.05 * max(weights, default=0.0))
        for place in sorted(boxes, key=lambda j: weights[j]):
            box, weight = boxes[place], weights[place]
            if not weight >= least:  # NaN is not either
                continue
            y = box.y - LETTERS if up else box.y + 5
            height = 3 + 3 * weight
            shade = f'rx="1.5" fill="{hue}" fill-opacity="{0.15 + 0.85 * weight:.3f}"'
            self.elements.append(rect(box.x, y - height if up else y, box.width, height, shade))
            if start is None or box == start:
                continue
            if self.lit.same and abs(start.y - box.y) > 1:
                self.elements.append(_around(start, box, up, weight, hue, self.margin))
            elif self.lit.same:
                self.elements.append(_arc(start, box, up, weight, hue, self.reach))
            else:
                self.elements.append(_drop(start, box, n, weight))
            if weight >= 0.1:
                number_of = _beside if self.lit.same else _over
                numbers.append(number_of(start, box, y - 9 if up else y + 16, weight, hue))
        self.elements += numbers

    def _words(self, names: dict[int, str], boxes: dict[int, WordBox], lit: int | None) -> None:
        before = None
        for place, text in names.items():
            box = boxes[place]
            self.elements.append(_word(box, text, place == lit))
            if before is not None and place != before + 1:
                self.elements.append(text_element(box.gap, box.y, "…", 11, PALE, "middle"))
            before = place


def _label(token: str) -> str:
    return clip(printable(token), 24)


def _in_sight(lit: Spotlight) -> list[int]:
    """All words of a sentence; of a long text the strongest, those beside them, and the lit one."""
    total = len(lit.cols.labels)
    if total <= _WORDS:
        return list(range(total))
    strength = [max(w[j] for w in lit.weights) for j in range(total)]
    centres = sorted(range(total), key=lambda j: -strength[j])[:8] + ([lit.position] if lit.same else [])
    return sorted({j for c in centres for j in range(max(0, c - 2), min(total, c + 3))})


def _arc(start: WordBox, end: WordBox, up: bool, weight: float, hue: str, reach: float) -> str:
    """A line from the lit word to another one of its line, thick by weight, over the words between them."""
    y = start.y + (-LETTERS - 7 if up else 12)
    bow = (-1.25 if up else 1.25) * min(reach - 12, 14 + abs(end.middle - start.middle) * 0.16)
    x0, x1 = start.middle, end.middle
    curve = f"M{x0:.1f} {y:.1f}C{x0:.1f} {y + bow:.1f} {x1:.1f} {y + bow:.1f} {x1:.1f} {y:.1f}"
    return f'<path d="{curve}" stroke-linecap="round" {_stroke(hue, weight)}/>'


def _beside(start: WordBox, end: WordBox, y: float, weight: float, hue: str) -> str:
    """The number of a line, at its end: to the left where an arc bends to the right, unless the page ends there."""
    left = start.y == end.y and MARGIN + 8 < end.middle < start.middle
    gap = 3 + _thickness(weight) / 2
    x, anchor = (end.middle - gap, "end") if left else (end.middle + gap, "start")
    return text_element(x, y, f"{weight:.2f}", 9.5, hue, anchor, halo=True)


def _over(_: WordBox, end: WordBox, y: float, weight: float, hue: str) -> str:
    """The number of a line between two sentences: over the word, or under it, where no line of either head passes."""
    return text_element(end.middle, y, f"{weight:.2f}", 9.5, hue, "middle", halo=True)


def _around(start: WordBox, end: WordBox, up: bool, weight: float, hue: str, right: float) -> str:
    """A line to another line of words: beside its own line, along the margin, and beside the other; through no word."""
    y0, y1 = (box.y + (-LETTERS - 7 if up else 12) for box in (start, end))
    g0, g1 = (y + (-14 if up else 15) for y in (y0, y1))
    x0, x1, margin = start.middle, end.middle, MARGIN - 12 if up else right
    turn, down = (-4 if margin < x0 else 4), (4 if g1 > g0 else -4)
    path = (
        f"M{x0:.1f} {y0:.1f}V{g0:.1f}H{margin - turn:.1f}Q{margin:.1f} {g0:.1f} {margin:.1f} {g0 + down:.1f}"
        f"V{g1 - down:.1f}Q{margin:.1f} {g1:.1f} {margin - turn:.1f} {g1:.1f}H{x1:.1f}V{y1:.1f}"
    )
    return f'<path d="{path}" stroke-linejoin="round" {_stroke(hue, 0.6 * weight)}/>'


def _drop(start: WordBox, end: WordBox, n: int, weight: float) -> str:
    """A line down from the lit word to a word of the other sentence; the lines of the second head are dashed."""
    y0, y1 = start.y + 7, end.y - LETTERS - 18  # the numbers of the first head stand below
    x0, x1, half = start.middle, end.middle + 6 * n - 3, (y0 + y1) / 2
    dash = f' stroke-dasharray="{4 + 5 * weight:.1f} {3 + 3 * weight:.1f}"' if n else ""
    curve = f"M{x0:.1f} {y0:.1f}C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{curve}" {_stroke(HUES[n], weight)}{dash}/>'


def _stroke(hue: str, weight: float) -> str:
    opaque = min(1.0, 0.75 + 0.25 * weight)  # the faintest line still stands out from the ground, by 3 to 1
    return f'fill="none" stroke="{hue}" stroke-width="{_thickness(weight):.2f}" stroke-opacity="{opaque:.3f}"'


def _thickness(weight: float) -> float:
    return 0.5 + 4.5 * weight


# The matrix.


class _Square:
    """The matrix of one head, rows looking at columns; tiles where it is long."""

    def __init__(
        self,
        view: LayerView,
        head: int,
        axes: tuple[TokenGroups, TokenGroups],
        lit: int | None,
        top: float,
        widest: float,
    ) -> None:
        rows, cols = axes
        self.elements: list[str] = []
        exact = len(rows.labels) <= _CELLS and len(cols.labels) <= _CELLS
        cells = _cells(view, head, rows, cols) if exact else _tiles(view, head)
        place = view.head_name(head)
        n, m = len(cells), len(cells[0]) if cells else 0
        names, across = (
            numbered_texts(axis.labels, 14)
            if exact or count == len(axis.labels) == len(axis.tokens)
            else _ticks(len(axis.tokens), count)
            for axis, count in ((rows, n), (cols, m))
        )
        left = MARGIN + max(map(text_width, names), default=0.0) * 0.85 + 8
        side = min(16.0, max(6.0, 520.0 / max(n, m, 1)), max(3.0, (MARGIN + widest - left) / max(m, 1)))
        label_height = max(map(text_width, across), default=0.0) * 0.85 + 10
        self.elements.append(text_element(MARGIN, top + 10, f"{place}{': ' if place else ''}rows look at columns", 12))
        y0 = top + 24 + label_height
        # Weights next to 0 are not drawn one by one: they have this ground, as in the page.
        self.elements.append(rect(left, y0, m * side, n * side, tint_fill(0.0)))
        for i, row in enumerate(cells):
            y = y0 + i * side
            bold = n == len(rows.labels) and i == lit
            self.elements.append(text_element(left - 6, y + side * 0.72, names[i], 11, INK, "end", bold=bold))
            for j, x in enumerate(row):
                shade = x**0.6  # one scale, 0 to 1, as in the page
                if shade >= 0.01:
                    self.elements.append(rect(left + j * side, y, side, side, tint_fill(shade)))
        for j, name in enumerate(across):
            x = left + (j + 0.5) * side + 3.5
            turned = f' transform="rotate(-90 {x:.1f} {y0 - 6:.1f})"'
            self.elements.append(text_element(x, y0 - 6, name, 11, INK, extra=turned))
        hidden = _hidden(view, head, rows, cols) if exact else _hidden_tiles(view, head, (n, m))
        broken = cell_places(torch.tensor(cells).isnan())
        self.elements += [marked_cells(hidden, left, y0, side), marked_cells(broken, left, y0, side, crossed=True)]
        self.elements.append(frame_rect(left, y0, m * side, n * side, PALE, 0.75))
        if lit is not None and n == len(rows.labels) and lit < n:  # above the cells of the next row
            self.elements.append(frame_rect(left, y0 + lit * side, m * side, side, HUES[0], 1.5))
        self.right, self.bottom = left + m * side, y0 + n * side
        marks = "; hatched: the mask hides it" * bool(hidden) + "; crossed: not a number" * bool(broken)
        self._scale(left, "weight" if exact else "the largest weight in a tile", marks)
        self.sentence = self._description(place, cells, exact, rows, cols)

    def _scale(self, left: float, what: str, more: str) -> None:
        """The legend of the shades."""
        y = self.bottom + 16
        for n in range(10):
            shade = ((n + 1) / 10) ** 0.6
            self.elements.append(rect(left + n * 10, y, 10, 8, tint_fill(shade)))
        legend = f"0 to 1, {what}{more}"
        self.elements.append(text_element(left + 106, y + 8, legend, 10.5, PALE))
        self.right = max(self.right, left + 106 + 0.85 * text_width(legend))
        self.bottom = y + 12

    def _description(self, place: str, cells: Any, exact: bool, rows: TokenGroups, cols: TokenGroups) -> str:
        of = f" of {place}" if place else ""
        if not exact:
            size = f"{len(cells)} by {len(cells[0])}"
            return f"A square of {size} tiles{of}: the largest weights in parts of a long text."
        columns = numbered_texts(cols.labels)
        best = [max(range(len(row)), key=lambda j: row[j]) for row in cells] if cols.labels else []
        ties = [
            f"{name} → {columns[j]} {f'{row[j]:.2f}' if row[j] == row[j] else 'NaN'}"
            for name, j, row in zip(numbered_texts(rows.labels), best, cells, strict=False)
        ]
        return f"A square{of}; the darkest cell of every row: {', '.join(ties)}."


@torch.no_grad()
def _cells(view: LayerView, head: int, rows: TokenGroups, cols: TokenGroups) -> list[list[float]]:
    w, _ = cols.word_weights(view.weights[head].dense())
    return rows.mean_rows(w).tolist()


@torch.no_grad()
def _tiles(view: LayerView, head: int) -> list[list[float]]:
    i, j = view.weights.shape[-2:]
    return max_map(view.weights[[head]], min(i, _CELLS), min(j, _CELLS))[0].tolist()


def _hidden(view: LayerView, head: int, rows: TokenGroups, cols: TokenGroups) -> list[tuple[int, int]]:
    """The words, by row and column, that the mask hides from a word with all their tokens."""
    if view.weights._factors.mask is None:
        return []
    visible = visible_cells(view.pick([head])._factors)[0]
    return cell_places(torch.tensor([[not bool(visible[a, b].any()) for b in cols.groups] for a in rows.groups]))


def _hidden_tiles(view: LayerView, head: int, tiles: tuple[int, int]) -> list[tuple[int, int]]:
    """The tiles, by row and column, that the mask forbids entirely."""
    hidden = forbidden_tiles(view.weights[[head]], *tiles)
    return [] if hidden is None else cell_places(hidden[0])


def _ticks(total: int, count: int) -> list[str]:
    """Positions at the edges of every sixth tile."""
    return [f"{n * total // count:,}" if n % 6 == 0 else "" for n in range(count)]


def _word(box: WordBox, text: str, bold: bool) -> str:
    """A word in the middle of its box; a long one is stretched to the box, whatever font the reader has.

    Words from right to left are not: Arabic letters are joined, and would come apart.
    """
    style = ' font-weight="700"' if bold else ""
    if right_to_left(text):
        style += ' direction="rtl" unicode-bidi="isolate"'
    elif len(text) > 3:
        style += f' textLength="{box.width:.1f}" lengthAdjust="spacing"'
    frame = frame_rect(box.x - 3, box.y - LETTERS, box.width + 6, LETTERS + 5, INK, 1.0) if bold else ""
    place = f'x="{box.middle:.1f}" y="{box.y:.1f}" text-anchor="middle"'
    return f'{frame}<text {place} font-size="{LETTERS}" fill="{INK}"{style}>{safe_xml(text)}</text>'


# Training.


def _strips(history: History, title: str, size: str | None) -> str:
    """The numbers of `regard.watch`, a strip for every measure."""
    elements: list[str] = []
    sentences: list[str] = []
    top = MARGIN
    for measure, title_of_measure in MEASURES.items():
        series = {head_label(*pair): list(values.items()) for pair, values in head_series(history, measure).items()}
        if series:
            # In colour, the head that is closest to dying: a head collapses at entropy 0, and explodes at large scores.
            # A head that ends in NaN is dead.
            ends = {name: points[-1][1] for name, points in series.items()}
            dead = -math.inf if measure == "entropy_share" else math.inf
            worst = (min if measure == "entropy_share" else max)(
                ends, key=lambda name: ends[name] if ends[name] == ends[name] else dead
            )
            text = f"{title_of_measure}: {len(series)} heads; {worst} ends at {ends[worst]:.3g}".replace("nan", "NaN")
            elements += [text_element(MARGIN, top + 10, text, 12), *_strip(series, worst, top + 22)]
            sentences.append(f"{text}.")
            top += 22 + _STRIP[1] + 36
    return document(title, " ".join(sentences), 2 * MARGIN + 44 + _STRIP[0], top, elements, size)


def _strip(series: dict[str, list[tuple[int, float]]], worst: str, top: float) -> list[str]:
    """A line for every head over the steps, one of them in colour."""
    (width, height), left = _STRIP, MARGIN + 44
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points if math.isfinite(value)] or [0.0]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> str:
        x = left + width * (step - first) / max(1, last - first)
        return f"{x:.1f} {top + height * (1 - (value - low) / ((high - low) or 1)):.1f}"

    elements = []
    for name in sorted(series, key=lambda name: name == worst):  # the coloured one on top
        ink = f'stroke="{HUES[0]}" stroke-width="2"' if name == worst else f'stroke="{PALE}" stroke-opacity="0.45"'
        if points := [place(*point) for point in series[name] if math.isfinite(point[1])]:
            elements.append(f'<path d="M{"L".join(points)}" fill="none" stroke-linejoin="round" {ink}/>')
    elements.append(frame_rect(left, top, width, height, PALE, 0.75))
    elements += [
        text_element(left - 6, y, f"{x:.3g}", 10.5, PALE, "end") for x, y in ((high, top + 9), (low, top + height))
    ]
    ends = ((first, left, "start"), (last, left + width, "end"))
    return elements + [text_element(x, top + height + 14, f"step {step:,}", 10.5, PALE, side) for step, x, side in ends]
