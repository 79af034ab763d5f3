"""Which heads matter for a word: those that give another word more than they give it out of habit.

Many heads look at the previous word, or at [CLS], whatever the word is; by weight alone they would always come first.
The habit of a head at (i, j) is the larger of two means over the other rows: of the weight on key j, and of the weight
at the distance j − i. Heads and keys are ranked by the weight beyond that habit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.weights import Weights

__all__ = [
    "BestKeys",
    "beyond_habit",
    "beyond_received",
    "beyond_sample",
    "nan_note",
    "peaks_beyond_received",
    "sort_key",
]

#: Subtracted from special keys and from a word itself: they come after all other keys, but before none at all.
_PENALTY = 2.0


class BestKeys(NamedTuple):
    """For every head and row: the key with the most weight beyond habit, and how much that is, (h, i)."""

    beyond: Tensor
    key: Tensor


def beyond_habit(w: Tensor, special: Sequence[bool], same: bool) -> BestKeys:
    """The best key of every row of dense weights, against the habits of all other rows.

    A key without weight is never the best, since the mask may forbid it: 0 minus a small habit would win over keys
    that get a little less than usual. `beyond` is −∞ for a row without any weight, NaN for a row with NaN.

    Args:
        w: Weights (h, i, j).
        special: Which keys are special tokens; they are chosen only if there is no other key.
        same: Whether rows and columns are one sequence, so that distances mean something and a word is not its own key.
    """
    h, i, j = w.shape
    visible = (w > 0).to(w.dtype)
    finite = w.nan_to_num()  # a NaN in one row must not spoil the habits of the others
    habit = _mean_of_others(finite.sum(-2, keepdim=True), visible.sum(-2, keepdim=True), finite, visible)
    if same:
        distance = torch.arange(j, device=w.device) - torch.arange(i, device=w.device).unsqueeze(-1) + i - 1  # i j
        index = distance.flatten().expand(h, -1)
        total, count = (
            w.new_zeros(h, i + j - 1).scatter_add_(1, index, x.flatten(1)).gather(1, index).reshape(h, i, j)
            for x in (finite, visible)
        )
        habit = torch.maximum(habit, _mean_of_others(total, count, finite, visible))
    penalty = _penalties(w, special).expand(i, j)
    if same:
        penalty = penalty + torch.eye(i, j, dtype=w.dtype, device=w.device) * _PENALTY
    return _best_keys(w, habit + penalty)


def _penalties(w: Tensor, special: Sequence[bool]) -> Tensor:
    return torch.tensor(list(special), dtype=w.dtype, device=w.device) * _PENALTY


def _best_keys(w: Tensor, expected: Tensor) -> BestKeys:
    """The key with the most weight beyond `expected`, among those that have weight, along the last axis."""
    best = torch.where(w == 0, -torch.inf, w - expected).max(-1)
    return BestKeys(best.values, best.indices)


def _mean_of_others(total: Tensor, count: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    return (total - w) / (count - visible).clamp(min=1)


def beyond_received(weights: Weights, row: int, special: Sequence[bool], same: bool) -> BestKeys:
    """The best key of one row of a long input, (h, 1), in linear memory: habit is what a key receives on average."""
    w = weights.row(row)  # h j
    penalty = _penalties(w, special)
    if same:
        penalty[row] += _PENALTY
    best = _best_keys(w, weights.received().nan_to_num() / weights.shape[-2] + penalty)
    return BestKeys(best.beyond.unsqueeze(-1), best.key.unsqueeze(-1))


def beyond_sample(
    w: Tensor, row: int, sample: Sequence[int], sample_weights: Tensor, special: Sequence[bool], same: bool
) -> BestKeys:
    """The best key of one row of a long input, (h,), against the habits of a sample of rows.

    Args:
        w: The weights of the row, (h, j).
        row: Its position.
        sample: The positions of the sampled rows.
        sample_weights: Their weights, (h, s, j).
        special: Which keys are special tokens.
        same: Whether rows and columns are one sequence.
    """
    others = [n for n, other in enumerate(sample) if other != row]
    others_w, keys = sample_weights[:, others].nan_to_num(), w.shape[-1]
    habit = others_w.sum(1) / (others_w > 0).sum(1).clamp(min=1)  # mean over the rows that see the key
    penalty = _penalties(w, special)
    if same:
        # The key at the same distance from each sampled row, where the sequence has one.
        positions = torch.tensor([sample[n] for n in others], device=w.device).unsqueeze(-1)
        shifted = torch.arange(keys, device=w.device) - row + positions  # s j
        inside = (shifted >= 0) & (shifted < keys)
        at_distance = others_w.gather(2, shifted.clamp(0, keys - 1).expand(len(w), -1, -1)) * inside
        habit = torch.maximum(habit, at_distance.sum(1) / (at_distance > 0).sum(1).clamp(min=1))
        penalty[row] += _PENALTY
    return _best_keys(w, habit + penalty)


def peaks_beyond_received(peak: Tensor, key: Tensor, received: Tensor, special: Sequence[bool], same: bool) -> Tensor:
    """How much the largest weight of every row is beyond what its key receives on average, (h, i).

    Needs statistics only, so it ranks all rows of a long input.

    Args:
        peak: The largest weight of every row, (h, i).
        key: Its key, (h, i); −1 for a row with NaN.
        received: The sum of the weights on every key, (h, j).
        special: Which keys are special tokens.
        same: Whether rows and columns are one sequence.
    """
    key = key.clamp(min=0)
    beyond = peak.nan_to_num(nan=-9.0) - received.nan_to_num().gather(-1, key) / peak.shape[-1]
    beyond = beyond - _penalties(peak, special)[key]
    return beyond - _PENALTY * (key == torch.arange(key.shape[-1], device=key.device)) if same else beyond


def sort_key(x: float) -> float:
    """A number to sort by, largest first: NaN comes last."""
    return float("inf") if x != x else -x


def nan_note(heads: int, total: int) -> list[str]:
    """A note that weights of some heads are NaN, so that these heads cannot be ranked; no note if all are numbers."""
    subject = "These weights" if total == 1 else f"Weights of {heads} of {total} heads"
    return [f"{subject} are not numbers (NaN): the input had NaN, or a score overflowed."] if heads else []
