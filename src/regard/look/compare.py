"""Two recordings, or two matrices, head by head: how far apart their rows are, and which weight changed most.

Rows are compared as distributions over the words of both texts: words that both have are one outcome, a word that only
one of them has is an outcome which the other gives nothing. The rest of a row is one more: a sink's share, or all of it
where the row sees no word. Where both texts are the same this is `Weights.js` and `Weights.total_variation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.rows.comparison import MEASURES
from ..core.shared import called_by_all_ranks
from ..recorder.head_metrics import Table
from .alignment import Alignment, align_tokens
from .layers import LayerView, Subject, layers_of, visible_cells
from .token_text import name_of

if TYPE_CHECKING:
    from typing import Unpack

    from .options import ViewChanges
    from .view import View

__all__ = ["HeadChange", "HeadChanges", "HeadPair", "compare"]

#: Weights of all heads that are written out at a time.
CELLS = 2**22
#: Cells of all pairs of heads up to which the nearest head is looked for.
NEAREST_CELLS = 2**33


class HeadChange(NamedTuple):
    """A head of `a` and one of `b`: how far apart they are, and the weight that changed most. A row of `compare`."""

    layer: int
    head: int
    layer_b: int
    head_b: int
    js: float
    total_variation: float
    word: str
    key: str
    weight: float
    weight_b: float


@dataclass(eq=False)
class HeadPair:
    """Two heads whose rows and columns are aligned."""

    views: tuple[LayerView, LayerView]
    heads: tuple[int, int]
    rows: Alignment
    cols: Alignment
    cell: tuple[int, int] | None = None  # places of the weight that changed most
    change: HeadChange | None = None

    @property
    def name(self) -> str:
        """Such as "layer 3, head 1", or "layer 3, head 1 and layer 2, head 7" where they have different places."""
        names = [view.head_name(head) or "these weights" for view, head in zip(self.views, self.heads, strict=True)]
        return names[0] if names[0] == names[1] else " and ".join(names)

    def place_of(self, word: str | int) -> int:
        """The place of a word of `a` among the rows of both texts."""
        position = self.rows.sides[0].resolve(word)
        return next(n for n, (a, _) in enumerate(self.rows.places) if a == position)

    def row_change(self, place: int) -> float:
        """Total variation of one row; −1 where a text has no such word."""
        p, q = (_outcomes(self.weights(side, [place]).nan_to_num(nan=0.0), self.cols, None) for side in (0, 1))
        in_both = None not in self.rows.places[place]
        return float((p - q).abs().sum() / 2) if in_both else -1.0

    @torch.no_grad()
    def weights(self, side: int, places: Sequence[int]) -> Tensor:
        """Weights of one side, (places, columns of both); NaN where it has no such word."""
        head = self.heads[side]
        inside = [n for n in places if self.rows.places[n][side] is not None]
        w = torch.full((len(places), len(self.cols)), torch.nan)
        if inside:
            rows = _word_rows(self.views[side], self.rows, self.cols, side, inside)[head].float().cpu()
            at = {place: n for n, place in enumerate(places)}
            w[[at[place] for place in inside]] = self.cols.spread(rows, side, torch.nan)
        return w

    def lacks(self, side: int) -> Tensor:
        """Where one side has no such word, of the row or of the column, (rows of both, columns of both)."""
        rows, cols = (torch.tensor([place[side] is None for place in axis.places]) for axis in (self.rows, self.cols))
        return rows.unsqueeze(1) | cols

    @torch.no_grad()
    def forbidden(self, side: int, places: Sequence[int]) -> Tensor:
        """Where the mask of one side forbids all tokens of both words, not where it lacks one, (places, columns)."""
        factors, words = self.views[side].pick([self.heads[side]])._factors, self.rows.sides[side]
        hidden = torch.zeros(len(places), len(self.cols), dtype=torch.bool)
        if factors.mask is None:
            return hidden
        for n, place in enumerate(places):
            if (word := self.rows.places[place][side]) is not None:
                tokens = torch.arange(words.groups[word].start, words.groups[word].stop, device=factors.q.device)
                visible = visible_cells(factors, tokens)[0].any(0).float().cpu()
                hidden[n] = self.cols.spread(self.cols.sides[side].sum_columns(visible), side, 1.0) == 0
        return hidden


class HeadChanges(Table[HeadChange]):
    """The result of `regard.compare`: a table of pairs of heads, those that differ most first.

    Attributes:
        pairs: The same pairs with their weights aligned, in the same order.
        names: How `a` and `b` are called in pictures.
        notes: Which layers and heads have no counterpart.

    Example:
        >>> a, b = (regard.weights(torch.eye(3), score=regard.ScaledDot(s)) for s in (1.0, 2.0))
        >>> changes = compare(a, b)
        >>> round(changes[0].total_variation, 3)
        0.211
    """

    def __init__(self, pairs: Sequence[HeadPair], names: tuple[str, str], notes: Sequence[str] = ()) -> None:
        super().__init__(HeadChange._fields, [pair.change for pair in pairs if pair.change is not None])
        self.pairs, self.names, self.notes = list(pairs), names, list(notes)

    def first(self, word: str | int | None = None) -> tuple[int, int]:
        """The pair that is shown first and the place of its lit row.

        Args:
            word: A word of `a`, by name or position: the pair whose row of it differs most. Default: the first pair,
                and the row whose weight changed most.

        Returns:
            The number of the pair, and a place among its rows.

        Example:
            >>> W = regard.weights(torch.eye(3)).label(["the", "cat", "sat"])
            >>> regard.compare(W, W).first("cat")
            (0, 1)
        """
        if word is None:
            cell = self.pairs[0].cell
            assert cell is not None, "set where the pair was measured"
            return 0, cell[0]
        places: dict[int, int] = {}
        for n, pair in enumerate(self.pairs):
            with contextlib.suppress(LookupError):
                places[n] = pair.place_of(word)
        if not places:
            self.pairs[0].place_of(word)  # raises, and names the words there are
        best = max(places, key=lambda n: self.pairs[n].row_change(places[n]))
        return best, places[best]

    def show(self, **options: Unpack[ViewChanges]) -> View:
        """The picture: both patterns side by side and their signed difference.

        Args:
            **options: As for `regard.look.View`; `word` is the row to show first.

        Returns:
            A `regard.look.View`: a page in a notebook, text in a terminal, ``.save("ab.html")``.

        Example:
            >>> W = regard.weights(torch.eye(3)).label(["the", "cat", "sat"])
            >>> print(str(regard.compare(W, W).show()).splitlines()[0])
            a and b: 1 pair of heads, 3 words in both
        """
        from .view import View

        return View(self, **options)


@called_by_all_ranks
@torch.no_grad()
def compare(
    a: Subject,
    b: Subject,
    *,
    match: Literal["place", "nearest"] = "place",
    item: int = 0,
    merge: bool | None = None,
    hide_special: bool = False,
    names: tuple[str, str] = ("a", "b"),
) -> HeadChanges:
    """How far apart two recordings are, head by head: two inputs, two models, two checkpoints.

    Args:
        a: A `Recording` or a `Weights`.
        b: Another one. Its words are aligned with those of `a` by their text; words without a counterpart are outcomes
            of their own.
        match: Which heads are compared: ``"place"``, those of the same layer and number, or ``"nearest"``, every head
            of `a` with the head of `b` that is nearest to it, for models of other shapes.
        item: Which sequence of a batch.
        merge: Compare merged words. Default: where that finds more counterparts, as with two tokenizers.
        hide_special: Leave out [CLS], </s> and the like; the other weights are scaled up.
        names: How pictures call the two.

    Returns:
        A table of `HeadChange` rows, those that differ most first: the mean over rows of the Jensen–Shannon divergence
        in nats (0 to log 2) and of the total variation (0 to 1), and the weight that changed most. `.show()` draws it,
        `.to_pandas()` makes a DataFrame.

    Raises:
        ValueError: No word, or no head, has a counterpart.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> a = regard.weights(x).label(["the", "cat", "sat"])
        >>> b = regard.weights(3 * x).label(["the", "dog", "sat"])
        >>> change = regard.compare(a, b)[0]
        >>> change.word, change.key, round(change.weight, 3), round(change.weight_b, 3)
        ('sat', 'the', 0.198, 0.001)
    """
    sides = layers_of(a, item), layers_of(b, item)
    aligned = _Aligned(merge, hide_special)
    groups = list(_by_place(*sides, aligned) if match == "place" else _by_nearness(*sides, aligned))
    if not groups:
        shapes = " and ".join(f"{len(views)} layers" for views in sides)
        raise ValueError(
            f"no head of a has a counterpart in b: {shapes}, of other kinds or words. Record both on the same text, or "
            'compare(a, b, match="nearest").'
        )
    pairs = sorted((pair for group in groups for pair in group), key=_by_change)
    return HeadChanges(pairs, names, _missing(sides, pairs) if match == "place" else ())


def _by_change(pair: HeadPair) -> float:
    assert pair.change is not None, "measured where it was made"
    return -pair.change.js if pair.change.js == pair.change.js else float("inf")


def _missing(sides: tuple[list[LayerView], list[LayerView]], pairs: list[HeadPair]) -> list[str]:
    """A note of how many heads have no counterpart at their place."""
    heads = [sum(view.heads for view in views) for views in sides]
    if heads == [len(pairs)] * 2:
        return []
    return [
        f"{len(pairs)} heads are at the same place in both, of {heads[0]} and {heads[1]}; the others are left out: "
        'match="nearest" compares every head with the nearest one.'
    ]


# Which heads and words belong together.


@dataclass
class _Aligned:
    """The alignment of every two sequences, made once."""

    merge: bool | None
    hide_special: bool
    _cache: dict[tuple[object, ...], Alignment] = field(default_factory=dict)

    def axes(self, a: LayerView, b: LayerView) -> tuple[Alignment, Alignment] | None:
        """Rows and columns of two layers; None where they have no word in common."""
        rows, cols = (self._axis(a, b, axis) for axis in (0, 1))
        return (rows, cols) if rows.in_both and cols.in_both else None

    def _axis(self, a: LayerView, b: LayerView, axis: int) -> Alignment:
        key = tuple((view.weights.tokens[axis], view.sizes[axis]) for view in (a, b))
        if key not in self._cache:
            (tokens_a, size_a), (tokens_b, size_b) = key
            self._cache[key] = align_tokens(
                tokens_a, tokens_b, (size_a, size_b), merge=self.merge, hide_special=self.hide_special
            )
        return self._cache[key]


def _by_place(a: list[LayerView], b: list[LayerView], aligned: _Aligned) -> Iterator[list[HeadPair]]:
    others = {(view.index, view.kind): view for view in b}
    for view in a:
        other = others.get((view.index, view.kind))
        if other is not None and (axes := aligned.axes(view, other)):
            heads = range(min(view.heads, other.heads))
            pairs = [HeadPair((view, other), (h, h), *axes) for h in heads]
            _measure(pairs)
            yield pairs


def _by_nearness(a: list[LayerView], b: list[LayerView], aligned: _Aligned) -> Iterator[list[HeadPair]]:
    cells = sum(x.weights.shape.numel() for x in a) * sum(view.heads for view in b)
    if cells > NEAREST_CELLS:
        raise ValueError(
            f'match="nearest" compares every head with every other one: {cells:.1e} weights here, at most '
            f"{NEAREST_CELLS:.1e}. Take a shorter text, or layers of the recording, seen.select(name=…)."
        )
    for view in a:
        best: list[HeadPair | None] = [None] * view.heads
        nearest = [torch.inf] * view.heads
        for other in b:
            axes = aligned.axes(view, other) if other.kind == view.kind else None
            for h in range(other.heads) if axes else ():
                pairs = [HeadPair((view, other), (g, h), *axes) for g in range(view.heads)]  # type: ignore[misc]
                js = sum(distances["js"].sum(-1) for _, distances in _distances(pairs))
                for g, total in enumerate(js.tolist()):  # type: ignore[union-attr]
                    if total < nearest[g]:
                        nearest[g], best[g] = total, pairs[g]
        for pair in best:
            if pair is not None:
                _measure([pair])
                yield [pair]


# Distances.


def _measure(pairs: list[HeadPair]) -> None:
    """Set `change` and `cell` of pairs of the same two layers."""
    totals = {name: torch.zeros(len(pairs), dtype=torch.float64) for name in ("js", "total_variation")}
    most = [0.0] * len(pairs)
    rows, cols = pairs[0].rows, pairs[0].cols
    both = torch.tensor(cols.in_both)
    cells: list[tuple[int, int, float, float] | None] = [None] * len(pairs)
    for block, distances in _distances(pairs):
        for name in totals:
            totals[name] += distances[name].sum(-1)
        p, q = (distances[side][..., both] for side in ("p", "q"))
        largest, at = (p - q).abs().nan_to_num(nan=-1.0).flatten(1).max(-1)
        for n, (change, cell) in enumerate(zip(largest.tolist(), at.tolist(), strict=True)):
            if change > most[n] or cells[n] is None:
                row, column = divmod(cell, len(both))
                most[n] = change
                cells[n] = block[row], int(both[column]), float(p[n, row, column]), float(q[n, row, column])
    for n, pair in enumerate(pairs):
        means = {name: float(total[n]) / len(rows.in_both) for name, total in totals.items()}
        row, column, weight, weight_b = cells[n] or (0, 0, torch.nan, torch.nan)
        (a, b), (g, h) = pair.views, pair.heads
        pair.cell = (row, column)
        word, key = _name(rows, row), _name(cols, column)
        distances_of_pair = means["js"], means["total_variation"]
        pair.change = HeadChange(a.index, g, b.index, h, *distances_of_pair, word, key, weight, weight_b)


def _name(axis: Alignment, place: int) -> str:
    word = axis.places[place][0]
    assert word is not None, "only words that both texts have can change"
    return name_of(axis.sides[0].labels, word)


def _distances(pairs: list[HeadPair]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Some places of rows that both texts have, with js and total variation (pair, row) and the outcomes p and q."""
    (a, b), rows, cols = pairs[0].views, pairs[0].rows, pairs[0].cols
    heads = [torch.tensor([pair.heads[side] for pair in pairs]) for side in (0, 1)]
    places = rows.in_both
    step = max(1, CELLS // (max(a.heads, b.heads) * max(len(cols), *a.sizes[1:], *b.sizes[1:])))
    for start in range(0, len(places), step):
        block = places[start : start + step]
        p, q = (
            _outcomes(_word_rows(view, rows, cols, side, block).cpu()[heads[side]], cols, side)
            for side, view in enumerate((a, b))
        )
        js = MEASURES["js"][1](p.log(), q.log())
        yield block, {"p": p, "q": q, "js": js, "total_variation": MEASURES["total_variation"][1](p, q)}


def _word_rows(view: LayerView, rows: Alignment, cols: Alignment, side: int, places: Sequence[int]) -> Tensor:
    """The weights of some words of one text, (h, place, word): the mean over their tokens, sums over those of keys."""
    groups = [rows.sides[side].groups[word] for n in places if (word := rows.places[n][side]) is not None]
    spans = [range(group.start, group.stop) for group in groups]
    w = view.weights[..., [token for span in spans for token in span], :]
    if len(spans) < w.shape[-2]:
        w = torch.stack([part.mean(-2) for part in w.split([len(span) for span in spans], -2)], -2)
    return cols.sides[side].word_weights(w)[0]


def _outcomes(w: Tensor, cols: Alignment, side: int | None) -> Tensor:
    """The weight of rows on every word of both texts, and on none of them, in float64, (..., places + 1).

    Args:
        w: Weights of the words of one side; of the words of both if `side` is None.
    """
    outcomes = w.double() if side is None else cols.spread(w.double(), side)
    return torch.cat([outcomes, (1 - outcomes.sum(-1, keepdim=True)).clamp(min=0)], -1)
