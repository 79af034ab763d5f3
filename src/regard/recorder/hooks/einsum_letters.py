"""The equation of an einsum: its axes as letters, and whether it pairs queries with keys."""

from __future__ import annotations

from torch import Tensor

__all__ = ["may_be_scores", "spelt_out"]


def spelt_out(equation: str, operands: list[Tensor]) -> str:
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
