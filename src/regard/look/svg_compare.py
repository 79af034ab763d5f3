"""The picture of a comparison: both patterns of the pair of heads that differs most, and their difference."""

from __future__ import annotations

import torch
from torch import Tensor

from .compare import HeadChanges, HeadPair
from .layers import LONG
from .options import ViewOptions
from .svg_elements import (
    HUES,
    INK,
    LETTERS,
    MARGIN,
    PALE,
    cell_places,
    document,
    frame_rect,
    marked_cells,
    note_lines,
    page_units,
    rect,
    signed_fill,
    text_element,
    text_width,
    tint_fill,
)
from .text_layout import format_number
from .token_text import clip, numbered_texts, printable

__all__ = ["draw_changes"]

_GAP = 18.0
#: Size of cells from which they have names.
_READABLE = 7.0
#: The fill of cells of a word that a text does not have.
_MISSING = 'fill="#dcdfe4"'


def draw_changes(changes: HeadChanges, options: ViewOptions, width: str | None) -> str:
    """Two squares and their difference, side by side, as one SVG.

    Args:
        changes: The result of `regard.compare`.
        options: The word whose row is marked, the title and the notes.
        width: How wide the picture is, such as "6.9in".
    """
    number, place = changes.first(options.word_name)
    pair = changes.pairs[number]
    if max(len(pair.rows), len(pair.cols)) > LONG:
        raise ValueError(
            f"a picture shows comparisons of at most {LONG} words, got {len(pair.rows)}: save a page (.html), or "
            "compare a part of the text."
        )
    squares = _Squares(changes, pair, place, page_units(width, 900.0))
    sentence = _sentence(changes, pair, place)
    bottom, right = squares.bottom, squares.right
    elements = squares.elements
    for line in (line for note in [sentence, *options.notes] for line in note_lines(note, right - MARGIN)):
        bottom += 18
        elements.append(text_element(MARGIN, bottom, line, 12))
    names = " and ".join(printable(name) for name in changes.names)
    described = " ".join([sentence, *options.notes])
    return document(options.title or names, described, right + MARGIN, bottom + MARGIN, elements, width)


def _sentence(changes: HeadChanges, pair: HeadPair, place: int) -> str:
    """The weight of the lit word on the word where it changed most, in either recording."""
    rows = [pair.weights(side, [place])[0] for side in (0, 1)]
    a, b = (row.nan_to_num(nan=0.0) for row in rows)
    key = int((b - a).abs().argmax())
    shares = []
    for side, (row, name) in enumerate(zip(rows, changes.names, strict=True)):
        number = format_number(float(row[key])) if row[key] == row[key] else "NaN"
        masked = bool(pair.forbidden(side, [place])[0, key])
        lacking = f"no such {pair.cols.units[0]}" if pair.lacks(side)[place, key] else "masked" if masked else ""
        shares.append(f"{lacking or number} in {printable(name)}")
    word, other = (numbered_texts(axis.labels)[n] for axis, n in ((pair.rows, place), (pair.cols, key)))
    return f"{pair.name}: “{word}” → “{other}” {', '.join(shares)}."


class _Squares:
    """Three squares with the words of both texts, side by side where names can be read; the lit row is framed."""

    def __init__(self, changes: HeadChanges, pair: HeadPair, lit: int, width: float) -> None:
        self.elements: list[str] = []
        a, b = (pair.weights(side, range(len(pair.rows))) for side in (0, 1))
        self.marks = _marks(pair, a, b)
        in_both = [None not in place for place in pair.rows.places]
        alone = [place for axis in (pair.rows, pair.cols) for place in axis.places if None in place]
        self.lacking = f"one text has no such {pair.cols.units[0]}" if alone else ""
        change = (b.nan_to_num(nan=0.0) - a.nan_to_num(nan=0.0)).tolist()
        rows, cols = (numbered_texts(axis.labels, 14) for axis in (pair.rows, pair.cols))
        self.names = [_only(name, pair.rows.places[n]) for n, name in enumerate(rows)]
        self.across = [_only(name, pair.cols.places[n]) for n, name in enumerate(cols)]
        left = MARGIN + max(map(text_width, self.names)) * 0.85 + 8
        self.head = 22 + max(map(text_width, self.across)) * 0.85  # title and names above a square

        def side(squares: int) -> float:
            """How large cells are with so many squares side by side."""
            return max(2.0, min(28.0, (width - MARGIN - left - (squares - 1) * _GAP) / (squares * len(cols))))

        abreast = next((n for n in (3, 2, 1) if side(n) >= _READABLE), 3)
        self.side = side(abreast)
        first, second = (printable(name, 40) for name in changes.names)
        fills = [
            [[_weight_fill(x) for x in row] for row in a.tolist()],
            [[_weight_fill(x) for x in row] for row in b.tolist()],
            [[signed_fill(x) if both else _MISSING for x in row] for row, both in zip(change, in_both, strict=True)],
        ]
        titles = [first, second, f"{second} − {first}"]
        for n, (title, cells) in enumerate(zip(titles, fills, strict=True)):
            down, across = divmod(n, abreast)
            x = left + across * (len(cols) * self.side + _GAP)
            y = MARGIN + self.head + down * (len(rows) * self.side + self.head + _GAP)
            self._square(title, cells, x, y, lit, first=across == 0)
            for marked, crossed in zip(self.marks[n], (False, True), strict=True):
                self.elements.append(marked_cells(marked, x, y, self.side, crossed))
            self.bottom = y + len(rows) * self.side
        self.right = left + abreast * (len(cols) * self.side + _GAP) - _GAP
        self._legend(left, max(self.right, width - MARGIN), first, second)

    def _square(self, title: str, cells: list[list[str]], left: float, top: float, lit: int, *, first: bool) -> None:
        side, (n, m) = self.side, (len(cells), len(cells[0]))
        limit = max(4, int(m * side / (0.56 * LETTERS)))
        self.elements.append(rect(left, top, m * side, n * side, tint_fill(0.0)))  # of weights next to 0
        self.elements.append(text_element(left, top - self.head + 8, clip(title, limit), 12, bold=True))
        for i, row in enumerate(cells):
            y = top + i * side
            if first and side >= _READABLE:
                name = text_element(
                    left - 6, y + side * 0.72, self.names[i], min(11.0, side), INK, "end", bold=i == lit
                )
                self.elements.append(name)
            self.elements += [rect(left + j * side, y, side, side, fill) for j, fill in enumerate(row) if fill]
        for j, name in enumerate(self.across if side >= _READABLE else []):
            x = left + (j + 0.5) * side + 3.5
            turned = f' transform="rotate(-90 {x:.1f} {top - 6:.1f})"'
            self.elements.append(text_element(x, top - 6, name, min(11.0, side), INK, extra=turned))
        self.elements.append(frame_rect(left, top, m * side, n * side, PALE, 0.75))
        self.elements.append(frame_rect(left, top + lit * side, m * side, side, HUES[0], 1.5))

    def _legend(self, left: float, end: float, first: str, second: str) -> None:
        """The scale and what colours and lines mean, in as many lines as it takes."""
        y = self.bottom + 14
        weights = [tint_fill(((n + 1) / 10) ** 0.6) for n in range(10)]
        changes = [signed_fill((n - 4) / 4) for n in range(9)]
        parts = [(weights, "0 to 1"), (changes, f"−1: {first} gives more,"), ([], f"1: {second} does")]
        parts += [([_MISSING], self.lacking)] if self.lacking else []
        for kind, text in enumerate(("hatched: masked", "crossed: not a number")):
            parts += [([], text)] if any(square[kind] for square in self.marks) else []
        x = left
        for fills, text in parts:
            beside = 8 * len(fills) + 4 * bool(fills)
            size = text_width(text) * 0.85 + beside
            if x + size > end and x > left:
                x, y = left, y + 16
            self.elements += [rect(x + n * 8, y, 8, 8, fill) for n, fill in enumerate(fills)]
            self.elements.append(text_element(x + beside, y + 8, text, 10.5, PALE))
            x += size + 12
            self.right = max(self.right, x - 12)
        self.bottom = y + 12


def _marks(pair: HeadPair, a: Tensor, b: Tensor) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Of the squares of both and of their difference, the cells that masks forbid, and those that are not numbers."""
    places = range(len(pair.rows))
    hidden = [pair.forbidden(side, places) for side in (0, 1)]
    lacks = [pair.lacks(side) for side in (0, 1)]
    broken = [w.isnan() & ~without for w, without in zip((a, b), lacks, strict=True)]
    alone = torch.tensor([None in place for place in pair.rows.places]).unsqueeze(1)
    hidden.append((hidden[0] | lacks[0]) & (hidden[1] | lacks[1]) & ~alone)
    broken.append((broken[0] | broken[1]) & ~alone)
    return [(cell_places(h), cell_places(n)) for h, n in zip(hidden, broken, strict=True)]


def _weight_fill(weight: float) -> str:
    """The fill of a weight; nothing for one that is close to 0, and grey where a text has no such word."""
    if weight != weight:
        return _MISSING
    return tint_fill(weight**0.6) if weight**0.6 >= 0.01 else ""


def _only(name: str, place: tuple[int | None, int | None]) -> str:
    """A word, with the letter of its text where the other has none."""
    return f"{name} (a)" if place[1] is None else f"{name} (b)" if place[0] is None else name
