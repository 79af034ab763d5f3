"""Which heads matter for a word: those that give another word more than they give it out of habit.

Many heads look at the word before, or at [CLS], whatever the word is; by weight alone they would always come first.
A head's habit at (i, j) is the larger of two means over the other rows: of what key j is given, and of what is given
at the distance j − i. What counts is the weight beyond it. Imports `matrix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.weights import Weights

__all__ = ["Best", "beyond_habit", "beyond_received", "unknown_in"]


class Best(NamedTuple):
    """For every head and row: the key with the most weight beyond habit, and how much that is, (h, i)."""

    beyond: Tensor
    key: Tensor


def beyond_habit(w: Tensor, special: Sequence[bool], same: bool) -> Best:
    """The best key of every row of dense weights (h, i, j); special keys count only where there is nothing else.

    same    whether rows and columns are one sequence, so that distances mean something and a word is not its own answer
    """
    h, i, j = w.shape
    visible = (w > 0).to(w.dtype)
    known = w.nan_to_num()  # one row that is not a number is nobody's habit
    habit = _mean_of_others(known.sum(-2, keepdim=True), visible.sum(-2, keepdim=True), known, visible)
    if same:
        distance = torch.arange(j, device=w.device) - torch.arange(i, device=w.device).unsqueeze(-1) + i - 1  # i j
        at = distance.flatten().expand(h, -1)
        total, count = (
            w.new_zeros(h, i + j - 1).scatter_add_(1, at, x.flatten(1)).gather(1, at).reshape(h, i, j)
            for x in (known, visible)
        )
        habit = torch.maximum(habit, _mean_of_others(total, count, known, visible))
    # A key that may not be chosen counts less than any that may, not nothing: a sentence of one word has no other.
    barred = torch.tensor(list(special), dtype=w.dtype, device=w.device).expand(i, j) * 2
    if same:
        barred = barred + torch.eye(i, j, dtype=w.dtype, device=w.device) * 2
    chosen = (w - habit - barred).max(-1)
    return Best(chosen.values, chosen.indices)


def _mean_of_others(total: Tensor, count: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    return (total - w) / (count - visible).clamp(min=1)


def beyond_received(weights: Weights, row: int, special: Sequence[bool], same: bool) -> Best:
    """The same for one row of a long input, in linear memory: habit is what the key receives on average. (h, 1)"""
    w = weights.row(row)  # h j
    barred = torch.tensor(list(special), dtype=w.dtype, device=w.device) * 2
    if same:
        barred[row] += 2
    chosen = (w - weights.received().nan_to_num() / weights.shape[-2] - barred).max(-1, keepdim=True)
    return Best(chosen.values, chosen.indices)


def unknown_in(heads: int, total: int) -> list[str]:
    """That weights of some heads are not numbers, so that no head could be ranked by them; nothing where all are."""
    whose = "These weights" if total == 1 else f"Weights of {heads} of {total} heads"
    return [f"{whose} are not numbers (NaN): NaN came in, or a score overflowed."] if heads else []
