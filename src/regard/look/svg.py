"""A picture for a paper: one SVG with the lit sentence, arcs by weight, and the whole matrix as a square.

Vectors only and text as text, dark on a light ground, with a title and a description for those who cannot see it. Two
heads are told apart by colour, by side (above and below the words) and by their labels. A long text is shown by its
strongest words, and its matrix by sums over tiles: never t × t. Imports `spot`, `lines` and `words`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import torch

from . import spotlight, token_text
from .text_layout import number
from .token_groups import Reading

__all__ = ["svg"]

_INK, _PALE, _GROUND = "#1b1b1f", "#6b6b76", "#ffffff"
#: Two heads: an orange and a blue that colour-blind readers tell apart, dark enough for print.
_HUES = ("#c2500a", "#1f5fa8")
_FONT = "'Helvetica Neue', Helvetica, Arial, 'Noto Sans', sans-serif"
_SIZE = 13.0  # of letters, in user units
_GAP = 10.0
_MARGIN = 24.0
_LINE = 640.0  # how wide a line of words may get
#: Positions up to which the square shows every cell; beyond, sums over so many tiles.
_CELLS = 48
#: Words up to which a sentence is shown whole.
_WORDS = 60
_STRIP = (520.0, 120.0)  # width and height of what a training history fills


def svg(
    subject: Any,
    *,
    word: str | int | None = None,
    layer: int | str | None = None,
    head: int | None = None,
    title: str | None = None,
    hide_special: bool = False,
    merge: bool = False,
    item: int = 0,
    to: str | int | None = None,
    notes: Sequence[str] = (),
) -> str:
    """A recording or a `Weights` as one standalone SVG: the spotlight on a word, where one is given, and the square.

    A training history becomes two strips, entropy and largest score of every head over the steps.

    Without a layer and a head the spotlight shows the two heads that matter most for the word, and the square the
    first of them; without a word it shows the head with the strongest tie. `to`: the heads by the weight on this word;
    `notes`: sentences to be written below.
    """
    if spotlight.is_history(subject):
        return _strips(subject, title or "Attention while training")
    reading = {"hide_special": hide_special, "merge": merge, "item": item}
    drawn: list[str] = []
    told: list[str] = []
    top, right = _MARGIN, 0.0
    if word is None:
        seen = spotlight.overview(subject, layer=layer, head=head, **reading)  # type: ignore[arg-type]
        best = seen.links[0].head if seen.links else spotlight.Head(seen.sheets[0].index, head or 0, 0, 0.0, 0.0)
        sheet = next(one for one in seen.sheets if one.index == best.layer)
        rows, cols, lit_row = seen.rows, seen.cols, None
    else:
        lit = spotlight.spotlight(subject, word, to=to, layer=layer, head=head, **reading)  # type: ignore[arg-type]
        best, sheet = lit.shown[0], lit.layers[lit.shown[0].layer]
        rows, cols, lit_row = lit.rows, lit.cols, lit.at
        picture = _Spotlight(lit, top)
        drawn += picture.drawn
        told += picture.told
        top, right = picture.bottom + 28, picture.right
    square = _Square(sheet, best.head, rows, cols, lit_row, top)
    drawn += square.drawn
    told.append(square.told)
    bottom = square.bottom
    for note in [*(seen if word is None else lit).notes, *notes]:
        bottom += 20
        drawn.append(_text(_MARGIN, bottom, note, 12))
        told.append(note)
        right = max(right, _MARGIN + _width(note))
    name = title or (f"Attention of “{token_text.shown(rows.labels[lit_row])}”" if lit_row is not None else "Attention")
    width = max(right, square.right, 300.0) + _MARGIN
    return _document(name, " ".join(told), width, bottom + _MARGIN, drawn)


# The sentence, a word lit.


@dataclass(frozen=True)
class _Box:
    """Where a word stands."""

    x: float
    y: float  # of the line's middle
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class _Spotlight:
    """The sentence with arcs from the lit word, the first head's above the words and the second's below.

    In cross-attention two sentences, the one with the lit word on top; the second head's lines are dashed.
    """

    def __init__(self, lit: spotlight.Spot, top: float) -> None:
        self.lit = lit
        self.drawn: list[str] = []
        self.told: list[str] = []
        keys = {place: _label(lit.cols.labels[place]) for place in _in_sight(lit)}
        self._legend(top)
        top += 18 * len(lit.shown) + 10
        self.reach = 74.0 if sum(map(_width, keys.values())) + _GAP * len(keys) <= _LINE else 46.0
        over = self.reach * len(lit.shown) + _SIZE + 14
        rows: dict[int, _Box] = {}
        if not lit.same:
            looking = range(len(lit.rows.labels)) if len(lit.rows.labels) <= _WORDS else [lit.at]
            names = {place: _label(lit.rows.labels[place]) for place in looking}
            rows = _laid(names, top + _SIZE, 24)
            self._words(names, rows, lit.at)
            top, over = max(box.y for box in rows.values()), 34
        boxes = _laid(keys, top + self.reach, over)
        start = boxes.get(lit.at) if lit.same else rows[lit.at]
        for n in range(len(lit.shown)):
            self._head(n, boxes, start)
        self._words(keys, boxes, lit.at if lit.same else None)
        ends = [box.x + box.width for box in [*boxes.values(), *rows.values()]]
        self.right = max(ends + [_MARGIN + 16 + _width(text) for text in self.told])
        below = self.reach if lit.same and len(lit.shown) > 1 else 24
        self.bottom = max([box.y for box in boxes.values()], default=top) + below

    def _legend(self, top: float) -> None:
        for n, (one, hidden) in enumerate(zip(self.lit.shown, self.lit.hidden, strict=True)):
            place = self.lit.layers[one.layer].place(one.head)
            word, key = (
                token_text.clip(token_text.shown(x), 24) for x in (self.lit.word, self.lit.cols.labels[one.key])
            )
            text = f"{place}{': ' if place else ''}“{word}” → “{key}” {number(one.weight)}"
            if self.lit.cols.hidden:
                text += f" (special tokens hidden; they had {hidden:.3f})"
            y = top + 18 * n + 9
            side = ("above", "below")[n] if self.lit.same else ("solid", "dashed")[n]
            self.drawn.append(_rect(_MARGIN, y - 9, 10, 10, f'fill="{_HUES[n]}"'))
            self.drawn.append(
                _text(_MARGIN + 16, y, f"{text}{f', {side}' if len(self.lit.shown) > 1 else ''}", size=12)
            )
            self.told.append(text + ".")

    def _head(self, n: int, boxes: dict[int, _Box], start: _Box | None) -> None:
        """Lines and shades of one head, the weak ones first."""
        weights, up, hue = self.lit.weights[n], n == 0, _HUES[n]
        least = max(0.01, 0.05 * max(weights, default=0.0))
        for place in sorted(boxes, key=lambda j: weights[j]):
            box, weight = boxes[place], weights[place]
            if not weight >= least:  # NaN is not either
                continue
            y = box.y - _SIZE if up else box.y + 5
            height = 3 + 3 * weight
            shade = f'rx="1.5" fill="{hue}" fill-opacity="{0.15 + 0.85 * weight:.3f}"'
            self.drawn.append(_rect(box.x, y - height if up else y, box.width, height, shade))
            if start is None or box == start:
                continue
            if self.lit.same:
                self.drawn.append(_arc(start, box, up, weight, hue, self.reach))
            else:
                self.drawn.append(_drop(start, box, n, weight))
            if weight >= 0.1:
                written = _text(box.middle + 4, y - 9 if up else y + 16, f"{weight:.2f}", 9.5, hue, halo=True)
                self.drawn.append(written)

    def _words(self, names: dict[int, str], boxes: dict[int, _Box], lit: int | None) -> None:
        before = None
        for place, text in names.items():
            box = boxes[place]
            self.drawn.append(_word(box, text, place == lit))
            if before is not None and place != before + 1:
                self.drawn.append(_text(box.x - _GAP / 2, box.y, "…", 11, _PALE, "middle"))
            before = place


def _label(token: str) -> str:
    return token_text.clip(token_text.shown(token), 24)


def _laid(names: dict[int, str], first: float, step: float) -> dict[int, _Box]:
    """Words from left to right, in as many lines as it takes."""
    boxes: dict[int, _Box] = {}
    x, y = _MARGIN, first
    for place, text in names.items():
        size = _width(text)
        if x + size > _MARGIN + _LINE and x > _MARGIN:
            x, y = _MARGIN, y + step
        boxes[place] = _Box(x, y, size)
        x += size + _GAP
    return boxes


def _in_sight(lit: spotlight.Spot) -> list[int]:
    """All words of a sentence; of a long text the strongest, those beside them, and the lit one."""
    total = len(lit.cols.labels)
    if total <= _WORDS:
        return list(range(total))
    strength = [max(w[j] for w in lit.weights) for j in range(total)]
    centres = sorted(range(total), key=lambda j: -strength[j])[:8] + ([lit.at] if lit.same else [])
    return sorted({j for c in centres for j in range(max(0, c - 2), min(total, c + 3))})


def _arc(start: _Box, end: _Box, up: bool, weight: float, hue: str, reach: float) -> str:
    """A line from the lit word to another, thick by weight; over the words between them on one line of text."""
    side = -1 if up else 1
    y0, y1 = (box.y + (-_SIZE - 7 if up else 12) for box in (start, end))
    same_line = abs(start.y - end.y) < 1
    bow = min(reach - 12, 14 + abs(end.middle - start.middle) * 0.16) if same_line else reach * 0.5
    c0, c1 = (y + side * bow * 1.25 for y in (y0, y1))
    x0, x1 = start.middle, end.middle
    curve = f"M{x0:.1f} {y0:.1f}C{x0:.1f} {c0:.1f} {x1:.1f} {c1:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{curve}" stroke-linecap="round" {_stroke(hue, weight)}/>'


def _drop(start: _Box, end: _Box, n: int, weight: float) -> str:
    """A line down from the lit word to a word of the other sentence; heads are told apart by their dashes."""
    y0, y1 = start.y + 7, end.y - _SIZE - 7
    x0, x1, half = start.middle, end.middle + 6 * n - 3, (y0 + y1) / 2
    dash = f' stroke-dasharray="{4 + 5 * weight:.1f} {3 + 3 * weight:.1f}"' if n else ""
    curve = f"M{x0:.1f} {y0:.1f}C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{curve}" {_stroke(_HUES[n], weight)}{dash}/>'


def _stroke(hue: str, weight: float) -> str:
    thick, opaque = 0.5 + 4.5 * weight, min(1.0, 0.2 + weight)
    return f'fill="none" stroke="{hue}" stroke-width="{thick:.2f}" stroke-opacity="{opaque:.3f}"'


# The whole matrix.


class _Square:
    """The matrix of one head, rows looking at columns; tiles where it is long."""

    def __init__(
        self, sheet: spotlight.Sheet, head: int, rows: Reading, cols: Reading, lit: int | None, top: float
    ) -> None:
        self.drawn: list[str] = []
        whole = len(rows.labels) <= _CELLS and len(cols.labels) <= _CELLS
        cells = _cells(sheet, head, rows, cols) if whole else _tiles(sheet, head)
        place = sheet.place(head)
        n, m = len(cells), len(cells[0]) if cells else 0
        side = min(16.0, max(6.0, 520.0 / max(n, m, 1)))
        names = (
            [token_text.clip(token_text.shown(label), 14) for label in rows.labels]
            if whole
            else _ticks(sheet.weights.shape[1], n)
        )
        across = (
            [token_text.clip(token_text.shown(label), 14) for label in cols.labels]
            if whole
            else _ticks(sheet.weights.shape[2], m)
        )
        left = _MARGIN + max(map(_width, names), default=0.0) * 0.85 + 8
        head_room = max(map(_width, across), default=0.0) * 0.85 + 10
        self.drawn.append(_text(_MARGIN, top + 10, f"{place}{': ' if place else ''}rows look at columns", 12))
        y0 = top + 24 + head_room
        most = max((x for row in cells for x in row if x == x), default=0.0)
        for i, row in enumerate(cells):
            y = y0 + i * side
            bold = whole and i == lit
            self.drawn.append(_text(left - 6, y + side * 0.72, names[i], 11, _INK, "end", bold=bold))
            for j, x in enumerate(row):
                shade = (x / most if most > 0 else 0.0) ** 0.7
                if shade >= 0.01:
                    self.drawn.append(_rect(left + j * side, y, side, side, _dark(shade)))
            if bold:
                self.drawn.append(_frame(left, y, m * side, side, _HUES[0], 1.5))
        for j, name in enumerate(across):
            x = left + (j + 0.5) * side + 3.5
            turned = f' transform="rotate(-90 {x:.1f} {y0 - 6:.1f})"'
            self.drawn.append(_text(x, y0 - 6, name, 11, _INK, extra=turned))
        self.drawn.append(_frame(left, y0, m * side, n * side, _PALE, 0.75))
        self.right, self.bottom = left + m * side, y0 + n * side
        self._scale(most, whole, left)
        self.told = self._description(place, cells, whole, rows, cols)

    def _scale(self, most: float, whole: bool, left: float) -> None:
        """What the darkest shade stands for."""
        y = self.bottom + 16
        for n in range(10):
            shade = ((n + 1) / 10) ** 0.7
            self.drawn.append(_rect(left + n * 10, y, 10, 8, _dark(shade)))
        what = "weight" if whole else "sum of the weights in a tile"
        self.drawn.append(_text(left + 106, y + 8, f"0 to {most:.3f}, {what}", 10.5, _PALE))
        self.bottom = y + 12

    def _description(self, place: str, cells: Any, whole: bool, rows: Reading, cols: Reading) -> str:
        of = f" of {place}" if place else ""
        if not whole:
            size = f"{len(cells)} by {len(cells[0])}"
            return f"A square of {size} tiles{of}: sums of weights over parts of a long text."
        best = [max(range(len(row)), key=lambda j: row[j]) for row in cells] if cols.labels else []
        ties = [
            f"{token_text.shown(name)} → {token_text.shown(cols.labels[j])} "
            f"{f'{row[j]:.2f}' if row[j] == row[j] else 'NaN'}"
            for name, j, row in zip(rows.labels, best, cells, strict=False)
        ]
        return f"A square{of}; the darkest cell of every row: {', '.join(ties)}."


@torch.no_grad()
def _cells(sheet: spotlight.Sheet, head: int, rows: Reading, cols: Reading) -> list[list[float]]:
    w, _ = cols.shares(sheet.weights[head].dense())
    return rows.rows(w.mT).mT.tolist()


@torch.no_grad()
def _tiles(sheet: spotlight.Sheet, head: int) -> list[list[float]]:
    i, j = sheet.weights.shape[-2:]
    return sheet.weights[head].pool(min(i, _CELLS), min(j, _CELLS)).tolist()


def _ticks(total: int, count: int) -> list[str]:
    """Positions at the edges of every sixth tile."""
    return [f"{n * total // count:,}" if n % 6 == 0 else "" for n in range(count)]


# Training.


def _strips(history: spotlight.History, title: str) -> str:
    """What `regard.watch` told, a strip a measure."""
    drawn: list[str] = []
    told: list[str] = []
    top = _MARGIN
    for kind, what in spotlight.WATCHED.items():
        if lines := spotlight.series(history, kind):
            # The head that is closest to dying: entropy dies at the bottom, scores explode at the top.
            # One that ends in no number at all is dead.
            ends = {name: points[-1][1] for name, points in lines.items()}
            dead = -math.inf if kind == "entropy_share" else math.inf
            worst = (min if kind == "entropy_share" else max)(
                ends, key=lambda name: ends[name] if ends[name] == ends[name] else dead
            )
            text = f"{what}: {len(lines)} heads; {worst} ends at {ends[worst]:.3g}".replace("nan", "NaN")
            drawn += [_text(_MARGIN, top + 10, text, 12), *_strip(lines, worst, top + 22)]
            told.append(f"{text}.")
            top += 22 + _STRIP[1] + 36
    return _document(title, " ".join(told), 2 * _MARGIN + 44 + _STRIP[0], top, drawn)


def _strip(lines: dict[str, list[tuple[int, float]]], worst: str, top: float) -> list[str]:
    """A line a head over the steps, one of them in colour."""
    (width, height), left = _STRIP, _MARGIN + 44
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points if math.isfinite(value)] or [0.0]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> str:
        x = left + width * (step - first) / max(1, last - first)
        return f"{x:.1f} {top + height * (1 - (value - low) / ((high - low) or 1)):.1f}"

    drawn = []
    for name in sorted(lines, key=lambda name: name == worst):  # the coloured one on top
        ink = f'stroke="{_HUES[0]}" stroke-width="2"' if name == worst else f'stroke="{_PALE}" stroke-opacity="0.45"'
        if points := [place(*point) for point in lines[name] if math.isfinite(point[1])]:
            drawn.append(f'<path d="M{"L".join(points)}" fill="none" stroke-linejoin="round" {ink}/>')
    drawn.append(_frame(left, top, width, height, _PALE, 0.75))
    drawn += [_text(left - 6, y, f"{x:.3g}", 10.5, _PALE, "end") for x, y in ((high, top + 9), (low, top + height))]
    ends = ((first, left, "start"), (last, left + width, "end"))
    return drawn + [_text(x, top + height + 14, f"step {step:,}", 10.5, _PALE, side) for step, x, side in ends]


# Elements. Every text that is not ours goes through `_text` or `_word`, and there through `escape`.


def _text(
    x: float,
    y: float,
    text: str,
    size: float = 13,
    fill: str = _INK,
    anchor: str = "start",
    *,
    bold: bool = False,
    halo: bool = False,
    extra: str = "",
) -> str:
    if not text:
        return ""
    style = ' font-weight="700"' if bold else ""
    style += f' stroke="{_GROUND}" stroke-width="3" paint-order="stroke"' if halo else ""
    style += "" if anchor == "start" else f' text-anchor="{anchor}"'
    style += ' unicode-bidi="isolate"' if _right_to_left(text) else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{style}{extra}>{_safe(text)}</text>'


def _word(box: _Box, text: str, bold: bool) -> str:
    """A word in the middle of its place; a long one made exactly as wide, whatever font the reader has."""
    style = ' font-weight="700"' if bold else ""
    style += f' textLength="{box.width:.1f}" lengthAdjust="spacingAndGlyphs"' if len(text) > 3 else ""
    style += ' direction="rtl" unicode-bidi="isolate"' if _right_to_left(text) else ""
    frame = _frame(box.x - 3, box.y - _SIZE, box.width + 6, _SIZE + 5, _INK, 1.0) if bold else ""
    place = f'x="{box.middle:.1f}" y="{box.y:.1f}" text-anchor="middle"'
    return f'{frame}<text {place} font-size="{_SIZE}" fill="{_INK}"{style}>{_safe(text)}</text>'


def _right_to_left(text: str) -> bool:
    return any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in text)


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>'


def _dark(shade: float) -> str:
    return f'fill="#14304f" fill-opacity="{shade:.3f}"'


def _frame(x: float, y: float, width: float, height: float, stroke: str, thick: float) -> str:
    return _rect(x, y, width, height, f'fill="none" stroke="{stroke}" stroke-width="{thick}"')


def _safe(text: str) -> str:
    """Text that XML can hold: `shown` leaves no control characters, and two that are not letters are left."""
    return escape(text.replace("\ufffe", "\N{REPLACEMENT CHARACTER}").replace("\uffff", "\N{REPLACEMENT CHARACTER}"))


def _width(text: str) -> float:
    """About how wide a word is set: wide letters take an em, capitals more than small ones."""
    narrow = sum(letter in "iljtf.,:;'|!()[] " for letter in text)
    broad = sum(letter.isupper() or letter in "mw@%" for letter in text)
    return max(6.0, _SIZE * (0.56 * token_text.cells(text) - 0.24 * narrow + 0.16 * broad))


def _document(title: str, description: str, width: float, height: float, drawn: Iterable[str]) -> str:
    name = token_text.shown(title, 400)
    body = "\n".join(part for part in drawn if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(_safe_attribute(name))} '
        f'font-family="{_FONT}">\n<title>{_safe(name)}</title>\n<desc>{_safe(description)}</desc>\n'
        f'<rect width="100%" height="100%" fill="{_GROUND}"/>\n{body}\n</svg>\n'
    )


def _safe_attribute(text: str) -> str:
    return text.replace("\ufffe", "").replace("\uffff", "")
