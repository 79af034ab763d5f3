"""Equations of einsum: their axes spelt out, whether two sequences meet in one, and which axis is which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["may_be_scores", "own_axes", "sorted_axes", "spell_out"]


def spell_out(equation: str, operands: list[Tensor]) -> str:
    """An equation with letters for the axes of "...", where these are the same number everywhere."""
    sides = equation.partition("->")[0].split(",")
    counts = {x.ndim - len(letters) + 3 for x, letters in zip(operands, sides, strict=False) if "..." in letters}
    free = [letter for letter in "ABCDEFGH" if letter not in equation]
    if len(counts) != 1 or "->" not in equation or max(counts) > len(free):
        return equation
    return equation.replace("...", "".join(free[: max(counts)]))


def may_be_scores(operands: list[Tensor], letters: list[str], result: str) -> bool:
    """Whether an einsum pairs two sequences; a matrix that shares no axis with all others is a projection."""
    if len({x.ndim > 2 for x in operands}) == 1 or "." in "".join(letters):
        return all(x.ndim > 2 for x in operands) or all(x.ndim <= 2 for x in operands)
    return bool(set(letters[0]) & set(letters[1]) & set(result))


def own_axes(operands: list[Tensor], letters: list[str], result: str, of_left: bool = True) -> tuple[int, ...]:
    """The sizes of the axes of the result that one of two operands alone has; of all of them with "..." in between.

    Args:
        operands: The two.
        letters: Their axes.
        result: The axes of the result.
        of_left: Whether axes of the left operand count.
    """
    if "." in "".join(letters):
        return tuple(size for x in operands for size in x.shape)
    left, right = letters
    return tuple(
        x.shape[mine.index(letter)]
        for x, mine, others in zip(operands, (left, right), (right, left), strict=True)
        for letter in mine
        if letter in result and letter not in others and (of_left or mine is right)
    )


class SortedAxes(NamedTuple):
    """The letters of weights and values in order: batch, heads, queries, keys, and size."""

    axes: str
    of_values: str
    has_rows: bool  # whether there is an axis of queries


def sorted_axes(mine: str, others: str, result: str, keys: str, shape: Sequence[int]) -> SortedAxes | None:
    """The axes of weights (letters `mine`) that meet values (`others`) in an einsum; None if they cannot be told apart.

    An axis that the values have too is batch or heads, in the order that most of the three have; where they differ, an
    axis of one is the batch.
    An axis that they lack is that of the queries, or of heads that share the values.
    """
    shared = [letter for letter in result if letter in mine and letter in others]
    shared += [letter for letter in mine if letter in others and letter != keys and letter not in shared]
    if len(shared) == 2:
        shared = _in_order(shared, (mine, others, result), shape, mine)
    rows = [letter for letter in mine if letter not in others]
    if len(rows) > 1 and (len(rows) > 2 or len(shared) > 1):
        return None
    if len(rows) == 2:
        length = shape[mine.index(keys)]
        queries = [letter for letter in rows if shape[mine.index(letter)] == length]
        if len(queries) == 1:
            rows = [letter for letter in rows if letter not in queries] + queries
        elif not mine.endswith("".join([*rows, keys])):  # (…, heads, queries, keys) is the usual order
            return None
    size = [letter for letter in others if letter not in mine]
    return SortedAxes("".join([*shared, *rows, keys]), "".join([*shared, keys, *size]), bool(rows))


def _in_order(two: list[str], sides: tuple[str, ...], shape: Sequence[int], mine: str) -> list[str]:
    """Two axes in the order of most sides; an axis of one first, where the sides differ."""
    swapped = [side.index(two[0]) > side.index(two[1]) for side in sides if set(two) <= set(side)]
    sizes = [shape[mine.index(letter)] for letter in two]
    if any(swapped) and not all(swapped) and sizes.count(1) == 1:
        return sorted(two, key=lambda letter: shape[mine.index(letter)] > 1)
    return two[::-1] if 2 * sum(swapped) > len(swapped) else two
