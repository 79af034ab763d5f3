"""What flows back into the weights, in one form for every engine. Imports `factors` and `score`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import repeat_kv
from ..core.scores import upcast

__all__ = ["InputGrads", "ScoreGrad", "weights_from_norm"]


class InputGrads(NamedTuple):
    """Of the problem's tensors, in the order of `flatten`, of v and of u; None for what needs none."""

    problem: list[Tensor | None]
    v: Tensor | None
    u: Tensor | None


@dataclass(frozen=True, eq=False)
class ScoreGrad:
    """The gradient of the scores is  w ∘ (left · right + ρ |distance| − c − η log w)  in every cell.

    Everything linear in W is written as one product: `left` has a column for each number that a row was mixed
    into (the output's gradient, and so on), `right` the matching values of the keys. `c` gathers what is the
    same along a row.
    """

    left: Tensor  # b h i e
    right: Tensor  # b|1 h|g|1 j e
    delta: Tensor  # b h i
    d_entropy: Tensor | None  # b h i : gradient of the entropy
    d_distance: Tensor | None  # b h i : gradient of the mean distance
    dy: Tensor | None = None  # b h i e : gradient of y = W v, which v wants as Wᵀ dy
    dz: Tensor | None = None  # b h j e : gradient of z = Wᵀ u, which u wants as W dz

    def into_scores(self, w: Tensor, log_w: Tensor, rows: slice, cols: slice, far: Tensor | None) -> Tensor:
        """For one block, (b, h, i, j)."""
        right = repeat_kv(self.right[:, :, cols], w.shape[1])
        inside = self.left[:, :, rows] @ right.mT - self.delta[:, :, rows, None]
        if self.d_distance is not None and far is not None:
            inside = inside + self.d_distance[:, :, rows, None] * far
        return w * self._less_entropy(inside, log_w, rows)

    def of_sink(self, sink: Tensor, norm: Tensor) -> Tensor:
        """The sink is a key whose value is nothing: left · right and the distance are 0 there."""
        w, log_w = weights_from_norm(upcast(sink).expand(*norm.shape[:3], 1), norm, True)
        return (w * self._less_entropy(-self.delta.unsqueeze(-1), log_w, slice(None))).sum_to_size(sink.shape)

    def _less_entropy(self, inside: Tensor, log_w: Tensor, rows: slice) -> Tensor:
        if self.d_entropy is None:
            return inside
        # 0 · log 0 is nan; against a number whose exponential is 0 in every type, and that η cannot overflow, it is 0.
        return inside - self.d_entropy[:, :, rows, None] * log_w.clamp(min=-1e5)


def weights_from_norm(s: Tensor, norm: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Weights and their logarithms from scores (b, h, i, j) and the norm (b, h, i, 2) of their rows.

    `whole`: none of them is hidden.
    """
    m, l = norm.unsqueeze(-2).unbind(-1)
    # A row with no key has m = −inf and scores −inf: pivot on 0, since −inf − −inf is nan; and l = 0.
    above = s - torch.where(m == -torch.inf, 0, m)
    l = torch.where(l == 0, 1, l)
    w = above.exp() / l
    # What is hidden weighs 0, also in a row that is nan.
    return w if whole else w.masked_fill(s == -torch.inf, 0), above - l.log()
