"""Indexing: what stands in brackets becomes positions.

`W[3, "it", 2:5]` names a head, a token and a range of keys. Numbers count from either end and are checked, tokens are
looked up, and each axis becomes an int, a range or a list of ints.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tensor_kinds import readable_numbers

__all__ = [
    "At",
    "Pick",
    "Tokens",
    "as_index",
    "as_int",
    "expand",
    "indices",
    "is_full_axis",
    "parse",
    "pick_axes",
    "positions_of",
    "runs",
    "slice_bounds",
    "word_at",
]

#: Positions of one axis; an int drops the axis.
Pick = int | range | list[int]


@dataclass(frozen=True)
class At:
    """The nth occurrence of a token, counted from 1."""

    word: str
    nth: int


@dataclass(frozen=True)
class Tokens:
    """The tokens of one axis."""

    words: tuple[str, ...]

    def positions(self, word: str) -> list[int]:
        return [n for n, w in enumerate(self.words) if w == word]

    def find(self, word: str | At) -> int:
        """The position of a token; of several equal ones that of "the:2" or At("the", 2)."""
        name, nth = self._named(word)
        places = self.positions(name)
        if not places:
            raise KeyError(f"no token {name!r} here; the tokens are {self._listed()}.")
        if nth is None:
            if len(places) > 1:
                raise KeyError(
                    f"{name!r} occurs {len(places)} times, at positions {', '.join(map(str, places))}. "
                    f"Say which one: '{name}:1' is the first, '{name}:{len(places)}' the last."
                )
            return places[0]
        if not 1 <= nth <= len(places):
            raise KeyError(f"{name!r} occurs {len(places)} times; got occurrence {nth}.")
        return places[nth - 1]

    def has(self, word: str | At) -> bool:
        """Whether a token occurs, and as often as its number says."""
        name, nth = self._named(word)
        return len(self.positions(name)) >= (1 if nth is None else max(nth, 1))

    def _named(self, word: str | At) -> tuple[str, int | None]:
        """The token and which occurrence of it is meant, if that is said."""
        if isinstance(word, At):
            return word.word, word.nth
        name, _, nth = word.rpartition(":")
        # A token may have a colon itself: "the:2" is the second "the" only where no token is "the:2".
        numbered = name and nth.isdecimal() and nth.isascii() and word not in self.words
        return (name, int(nth)) if numbered else (word, None)

    def _listed(self) -> str:
        shown = " ".join(map(repr, self.words[:20]))
        return shown if len(self.words) <= 20 else f"{shown} … ({len(self.words)} in all)"


def word_at(word: Any, nth: Any) -> At:
    """One of several equal tokens; raises TypeError or ValueError unless `nth` counts from 1."""
    if not isinstance(word, str):
        raise TypeError(f"at(word, nth): the word must be a string; got {type(word).__name__}.")
    if (count := as_int(nth)) is None or count < 1:
        raise ValueError(f"at(word, nth): occurrences are counted from 1; got {nth!r}.")
    return At(word, count)


def parse(key: Any, shape: Sequence[int], tokens: tuple[Tokens | None, Tokens | None]) -> list[Pick]:
    """One pick for every axis of `shape`, whose last two are rows and columns with these tokens."""
    return pick_axes(expand(key, shape), shape, tokens)


def expand(key: Any, shape: Sequence[int]) -> list[Any]:
    """The items of the brackets, one for every axis of `shape`: `:` for an axis that is not mentioned."""
    items = list(key) if isinstance(key, tuple) else [key]
    items = _place_words(items, len(shape))
    if (ellipses := sum(item is Ellipsis for item in items)) > 1:
        raise IndexError(f"an index may have one ellipsis (...) only; got {ellipses}.")
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    mentioned = len(items) - 1
    if mentioned > len(shape):
        raise IndexError(f"there are {len(shape)} axes to index, {tuple(shape)}; got {mentioned} indices.")
    where = next(n for n, item in enumerate(items) if item is Ellipsis)
    items[where : where + 1] = [slice(None)] * (len(shape) - mentioned)
    return items


def pick_axes(items: list[Any], shape: Sequence[int], tokens: tuple[Tokens | None, Tokens | None]) -> list[Pick]:
    """The positions that each of the items takes on its axis."""
    names: list[Tokens | None] = [*[None] * (len(shape) - 2), *tokens]
    picks = [
        _pick(item, axis, n, names[axis], axis - len(shape))
        for axis, (item, n) in enumerate(zip(items, shape, strict=True))
    ]
    if (lists := sum(isinstance(pick, list) for pick in picks)) > 1:
        raise IndexError(
            f"a list of positions may stand on one axis; got lists on {lists}. Index the rest in a second step."
        )
    return picks


def _place_words(items: list[Any], axes: int) -> list[Any]:
    """Tokens address the last two axes: one is a row, two are a row and a column."""
    words = [n for n, item in enumerate(items) if isinstance(item, (str, At))]
    # Where every axis is mentioned, or an ellipsis stands for the others, each token has its axis already.
    if not words or len(items) >= axes or any(item is Ellipsis for item in items):
        return items
    outer, tail = items[: words[0]], items[words[0] :]
    return [*outer, Ellipsis, *tail, *([slice(None)] if len(tail) == 1 else [])]


def _pick(item: Any, axis: int, size: int, tokens: Tokens | None, from_end: int) -> Pick:
    if isinstance(item, (str, At)):
        if from_end < -2:
            raise IndexError(f"words name rows and columns, the last two axes; {item!r} stands at axis {axis}.")
        if tokens is None:
            raise KeyError(
                f"{item!r}: these weights have no tokens. Give them first: W.label(tokens)[...]; "
                "of a recorded batch take one sequence: seen[layer, head, 0]."
            )
        return tokens.find(item)
    if isinstance(item, slice):
        return range(*slice_bounds(item, size))
    if isinstance(item, Tensor):
        item = readable_numbers(item, "an index")
        if item.is_floating_point() or str(item.dtype) == "torch.bool":
            raise IndexError(
                f"indices must be whole numbers; got a tensor of {item.dtype}. Use mask.nonzero().flatten()."
            )
        item = item.tolist()
    if isinstance(item, (list, range)):
        return [_one(n, axis, size, tokens, from_end) for n in item]
    if not isinstance(item, int) and hasattr(item, "__array_interface__") and item.ndim:  # an array of NumPy's
        return _pick(torch.as_tensor(item), axis, size, tokens, from_end)
    return _number(item, axis, size)


def slice_bounds(part: slice, size: int) -> tuple[int, int, int]:
    """Start, stop and step of a forward slice: `part.indices(size)`, which torch.compile of 2.6 cannot trace."""
    start = 0 if part.start is None else _bound(part.start, size)
    stop = size if part.stop is None else _bound(part.stop, size)
    step = 1 if part.step is None else _slice_number(part.step)
    if step < 1:
        raise IndexError(f"slices run forward here; got step {part.step}.")
    return start, stop, step


def _slice_number(value: Any) -> int:
    """An end or the step of a slice."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise IndexError(f"a slice takes whole numbers; got {value!r}. Words are listed: W[['the', 'cat']].") from None


def _bound(value: Any, size: int) -> int:
    value = _slice_number(value)
    return max(value + size, 0) if value < 0 else min(value, size)


def _one(item: Any, axis: int, size: int, tokens: Tokens | None, from_end: int) -> int:
    """One item of a list as a position."""
    if not isinstance(item, (str, At)):
        return _number(item, axis, size)
    position = _pick(item, axis, size, tokens, from_end)
    assert isinstance(position, int), "a word is one position"
    return position


def as_int(value: Any) -> int | None:
    """A user's number as an int, of NumPy or a tensor too; None for a bool, an int to Python, and any other."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if isinstance(value, Tensor) and (value.dtype == torch.bool or value.is_meta):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _number(item: Any, axis: int, size: int) -> int:
    n = as_int(item)
    if n is None:
        raise IndexError(
            f"axis {axis}: an index is an int, a slice, a word or a list of ints; got {type(item).__name__}."
        )
    if not -size <= n < size:
        raise IndexError(f"index {n} is out of range for axis {axis}, which has {size} positions.")
    return n % size if size else n


def positions_of(pick: Pick) -> list[int] | range:
    """The positions that a pick takes."""
    return range(pick, pick + 1) if isinstance(pick, int) else pick


def is_full_axis(positions: list[int] | range, size: int) -> bool:
    """Whether these are all positions of an axis, in order. Dynamo cannot compare ranges before PyTorch 2.9."""
    return isinstance(positions, range) and (positions.start, positions.stop, positions.step) == (0, size, 1)


def runs(positions: list[int] | range) -> Iterator[range]:
    """Runs of adjacent positions."""
    if isinstance(positions, range) and positions.step == 1:
        if positions:
            yield positions
        return
    start = end = None
    for n in positions:
        if end is not None and n == end:
            end += 1
            continue
        if start is not None and end is not None:
            yield range(start, end)
        start, end = n, n + 1
    if start is not None and end is not None:
        yield range(start, end)


def as_index(positions: list[int] | range, device: torch.device | None = None) -> Any:
    """An index of tensors: a slice with both ends for adjacent positions, else an int64 tensor."""
    if isinstance(positions, range) and positions.step == 1:
        return slice(positions.start, max(positions.start, positions.stop))
    return torch.tensor(list(positions), dtype=torch.int64, device=device)


def indices(positions: list[int] | range, device: torch.device) -> Tensor:
    """An int64 tensor of positions."""
    at = as_index(positions, device)
    return torch.arange(at.start, at.stop, device=device) if isinstance(at, slice) else at
