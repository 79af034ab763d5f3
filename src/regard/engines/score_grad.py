"""The gradient of the scores in one form for every engine, and weights recomputed from the norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import repeat_kv
from ..core.scores.kinds import upcast

__all__ = ["InputGrads", "ScoreGrad", "weights_from_norm"]


class InputGrads(NamedTuple):
    """Gradients of the problem's tensors, in the order of `flatten`, of v and of u; None where none is needed."""

    problem: list[Tensor | None]
    v: Tensor | None
    u: Tensor | None


@dataclass(frozen=True, eq=False)
class ScoreGrad:
    """In every cell: ds = w ∘ (left · right + d_distance |i − j| − delta − d_entropy log w).

    All terms linear in W are one product: `left` has the gradients of the outputs (dy and so on) as columns, `right`
    the matching values of the keys. `delta` is the sum of all terms that are constant along a row.
    """

    left: Tensor  # b h i e
    right: Tensor  # b|1 h|g|1 j e
    delta: Tensor  # b h i
    d_entropy: Tensor | None  # b h i : gradient of the entropy
    d_distance: Tensor | None  # b h i : gradient of the mean distance
    dy: Tensor | None = None  # b h i e : gradient of y = W v; that of v is Wᵀ dy
    dz: Tensor | None = None  # b h j e : gradient of z = Wᵀ u; that of u is W dz

    def into_scores(self, w: Tensor, log_w: Tensor, rows: slice, cols: slice, distance: Tensor | None) -> Tensor:
        """ds of one block, (b, h, i, j)."""
        right = repeat_kv(self.right[:, :, cols], w.shape[1])
        inside = self.left[:, :, rows] @ right.mT - self.delta[:, :, rows, None]
        if self.d_distance is not None and distance is not None:
            inside = inside + self.d_distance[:, :, rows, None] * distance
        return w * self._less_entropy(inside, log_w, rows)

    def of_sink(self, sink: Tensor, norm: Tensor) -> Tensor:
        """The gradient of a sink, a key without value and position: left · right and the distance are 0 there."""
        w, log_w = weights_from_norm(upcast(sink).expand(*norm.shape[:3], 1), norm, True)
        return (w * self._less_entropy(-self.delta.unsqueeze(-1), log_w, slice(None))).sum_to_size(sink.shape)

    def _less_entropy(self, inside: Tensor, log_w: Tensor, rows: slice) -> Tensor:
        if self.d_entropy is None:
            return inside
        # 0 · log 0 is nan. At −1e5 exp is 0 in every dtype, and the product with d_entropy does not overflow.
        return inside - self.d_entropy[:, :, rows, None] * log_w.clamp(min=-1e5)


def weights_from_norm(s: Tensor, norm: Tensor, all_visible: bool) -> tuple[Tensor, Tensor]:
    """Weights exp(s − m) / l and their logarithms, from scores (b, h, i, j) and the norm (b, h, i, 2) of their rows.

    `all_visible`: no cell is hidden.
    """
    m, l = norm.unsqueeze(-2).unbind(-1)
    # A row with no key has m = −inf and scores −inf: pivot on 0, since −inf − −inf is nan; and l = 0.
    above = s - torch.where(m == -torch.inf, 0, m)
    l = torch.where(l == 0, 1, l)
    w = above.exp() / l
    # A hidden cell weighs 0, also in a row that is nan.
    return w if all_visible else w.masked_fill(s == -torch.inf, 0), above - l.log()
