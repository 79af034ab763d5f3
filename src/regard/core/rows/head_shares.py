"""How heads are taken together: the factor of each in a weighted sum, and the total that divides a mean."""

from __future__ import annotations

import torch
from torch import Tensor

from ..block import take
from ..pytree import register_node
from ..tensor_kinds import readable_numbers
from ..torch_state import is_tracing

__all__ = ["HeadShares", "head_shares"]


@register_node
class HeadShares:
    """Factors of heads in a sum, in groups of as many adjacent heads each.

    A mean is a sum that is divided: 14 times 1/14 is 1.0000001 in float32, and no weight exceeds 1.
    """

    factors: Tensor  # 1 h 1 1
    size: int  # heads of a group
    mean: bool

    @property
    def total(self) -> Tensor | None:
        """The sum of each group's factors, which divides a mean: (1, g, 1, 1)."""
        return self.factors.unflatten(1, (-1, self.size)).sum(2) if self.mean else None

    def sum_of(self, w: Tensor, axis: int) -> Tensor:
        """The weighted sum or mean over the heads of each group of a tensor that has groups and their heads on `axis`
        and the one behind it."""
        factors, total = self.aligned(w, axis)
        y = (w * factors).sum(axis + 1, keepdim=True)
        return (y if total is None else y / total).squeeze(axis + 1)

    def aligned(self, x: Tensor, axis: int) -> tuple[Tensor, Tensor | None]:
        """Factors and totals beside such a tensor."""
        behind, total = [1] * (x.ndim - axis - 2), self.total
        total = None if total is None else total.reshape(-1, 1, *behind)
        return self.factors.reshape(-1, self.size, *behind), total

    def cut(self, heads: slice) -> HeadShares:
        """Those of the heads of adjacent groups."""
        return HeadShares(take(self.factors, 1, heads), self.size, self.mean)

    def normalized(self) -> Tensor:
        """Factors that are divided already, (1, h, 1, 1), as kernels of a GPU read them."""
        total = self.total
        return self.factors if total is None else self.factors / total.repeat_interleave(self.size, 1)

    def with_totals(self) -> Tensor:
        """All factors, then the divisor of each group, (h + g,), as compiled tiles read them.

        Added up in the order of the tiles, so that heads that are all on one key make 1.
        """
        factors = self.factors.flatten()
        groups = factors.view(-1, self.size)
        totals = sum(groups.unbind(1), torch.zeros_like(groups[:, 0])) if self.mean else torch.ones_like(groups[:, 0])
        return torch.cat([factors, totals])


def head_shares(by: str, weights: Tensor | None, heads: int, groups: int, q: Tensor) -> HeadShares:
    """The shares of heads that `reduce_heads` was asked for."""
    if by == "max":
        raise ValueError("reduce_heads('max', weights=...): a maximum takes no weights; leave heads out with heads=.")
    dtype = torch.promote_types(q.dtype, torch.float32)  # results have the matrix's type
    if weights is None:  # nothing is checked, so no number is read back from a GPU
        return HeadShares(torch.ones(1, heads, 1, 1, dtype=dtype, device=q.device), heads // groups, by == "mean")
    if not isinstance(weights, Tensor):
        got = type(weights).__name__
        raise TypeError(
            f"reduce_heads(weights=) takes a tensor of a number for each head; got {got}. Use torch.tensor."
        )
    weights = readable_numbers(weights, "reduce_heads(weights=)")
    if (
        weights.shape != (heads,)
        or weights.is_complex()
        or not (  # a graph reads no number back
            is_tracing() or bool(((weights >= 0) & weights.isfinite()).all())
        )
    ):
        raise ValueError(f"reduce_heads(weights=) takes a finite number >= 0 for each of {heads} heads; got {weights}.")
    factors = weights.to(q.device, dtype).reshape(1, heads, 1, 1)
    shares = HeadShares(factors, heads // groups, by == "mean")
    total = shares.total
    if total is not None and not is_tracing() and not bool(((total > 0) & total.isfinite()).all()):
        raise ValueError(
            f"reduce_heads('mean', weights=) divides by their sum, which must be finite and not 0; got {weights}."
        )
    return shares
