"""Two matrices row by row: cross-entropy, Kullback–Leibler, Jensen–Shannon, overlap and total variation.

Each measure has two forms: of two strips, centred on the maxima of both rows; and the textbook's, of dense matrices,
which defines what is right. Weights that underflow have no logarithm: where the textbook has one, it takes
log-weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..pytree import register_node
from ..torch_state import as_size, in_functorch
from .sources import Part, Strip
from .strips import DenseForm, Merge, OfParts

__all__ = ["MEASURES", "Comparison", "joint_batch"]


class _Pair:
    """Outcomes of two rows p and q: all keys, and the sink as one more where one of the matrices has one."""

    def __init__(self, p: Strip, q: Strip) -> None:
        self.p, self.q = p.w, q.w
        self.log_p, self.log_q = p.log_w, q.log_w
        if p.log_sink is not None or q.log_sink is not None:
            self.log_p, self.log_q = (_with_sink(x.log_w, x.log_sink, -math.inf) for x in (p, q))
            self.p, self.q = (_with_sink(x.w, x.sink, 0) for x in (p, q))
        log_p, log_q = self.log_p.detach(), self.log_q.detach()
        self.both = self.forbidden = None
        # Where no key is hidden, four passes over the strip are saved. On a GPU reading that would sync, inside
        # torch.vmap there is no one number to read: there a key may be hidden.
        may_hide = log_p.is_cuda or in_functorch() or not log_p.numel()
        if may_hide or log_p.amin() == -torch.inf or log_q.amin() == -torch.inf:
            in_p, in_q = log_p > -torch.inf, log_q > -torch.inf
            self.both = in_p & in_q
            self.forbidden = (in_p & ~in_q).any(-1)

    def where_both(self, x: Tensor, other: float) -> Tensor:
        """x where both rows see the key, else a number: no −inf reaches a gradient."""
        return x if self.both is None else torch.where(self.both, x, other)

    def infinite(self, rows: Tensor) -> Tensor:
        """inf for a row of p that sees what q forbids, without a gradient."""
        return rows if self.forbidden is None else rows.masked_fill(self.forbidden, torch.inf)

    @property
    def log_ratio(self) -> Tensor:
        """log p − log q, 0 where one of them is hidden."""
        return self.where_both(self.log_p - self.log_q, 0)


def _with_sink(keys: Tensor, sink: Tensor | None, default: float) -> Tensor:
    """One column a key, and one for the sink; `default` is its number in a matrix that has none."""
    return torch.cat([keys, keys.new_full((*keys.shape[:3], 1), default) if sink is None else sink], -1)


def _cross_entropy(x: _Pair) -> Tensor:
    return x.infinite(-(x.p * x.where_both(x.log_q, 0)).sum(-1))


def _kl(x: _Pair) -> Tensor:
    return x.infinite((x.p * x.log_ratio).sum(-1))


def _js(x: _Pair) -> Tensor:
    # p log(2p / (p + q)) = p (log 2 − softplus(log q − log p)); where q is hidden that is p log 2.
    ratio, log2 = x.log_ratio, math.log(2)
    softplus = torch.nn.functional.softplus
    of_p = x.p * x.where_both(log2 - softplus(-ratio), log2)
    of_q = x.q * x.where_both(log2 - softplus(ratio), log2)
    js = (of_p + of_q).sum(-1) / 2
    return js + (js.clamp(min=0) - js).detach()  # rounding must not make it negative; its gradient stays


def _overlap(x: _Pair) -> Tensor:
    return torch.minimum(x.p, x.q).sum(-1)


def _total_variation(x: _Pair) -> Tensor:
    return (x.p - x.q).abs().sum(-1) / 2


def _dense_cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _expected(-log_q, log_p, log_q)


def _dense_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _expected(log_p - log_q, log_p, log_q)


def _expected(x: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p x over the keys that p sees; inf where q forbids one of them."""
    in_p, in_q = log_p > -torch.inf, log_q > -torch.inf
    rows = (log_p.exp() * torch.where(in_p & in_q, x, 0)).sum(-1)
    return rows.masked_fill((in_p & ~in_q).any(-1), torch.inf)


def _dense_js(log_p: Tensor, log_q: Tensor) -> Tensor:
    visible = (log_p > -torch.inf) | (log_q > -torch.inf)
    log_middle = torch.logaddexp(*(torch.where(visible, x, 0) for x in (log_p, log_q))) - math.log(2)
    of_p, of_q = (_expected(x - log_middle, x, log_middle) for x in (log_p, log_q))
    return (of_p + of_q) / 2


#: Name: form of two strips, form of dense matrices (`_DENSE_FORMS`).
MEASURES: dict[str, tuple[Callable[[_Pair], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "cross_entropy": (_cross_entropy, _dense_cross_entropy),
    "kl": (_kl, _dense_kl),
    "js": (_js, _dense_js),
    "overlap": (_overlap, lambda p, q: torch.minimum(p, q).sum(-1)),
    "total_variation": (_total_variation, lambda p, q: (p - q).abs().sum(-1) / 2),
}


#: The matrices that the dense form of a measure takes, if not weights.
_DENSE_FORMS: dict[str, DenseForm] = dict.fromkeys(("cross_entropy", "kl", "js"), "log-weights")


@register_node
class Comparison:
    """One measure of every row of two matrices, (b, h, i)."""

    measure: str
    row_fields: ClassVar[tuple[str, ...]] = ()
    merges: ClassVar[tuple[Merge, ...]] = ("sum",)
    counts_sink: ClassVar[bool] = True
    of_parts: ClassVar[OfParts] = "rows"

    @property
    def name(self) -> str:
        return self.measure

    @property
    def dense_form(self) -> DenseForm:
        return _DENSE_FORMS.get(self.measure, "weights")

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        return [like.new_zeros(shape[:3])]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        of_strips, _ = MEASURES[self.measure]
        return [(of_strips(_Pair(*strips)), part.index(part.rows))]

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        _, of_matrices = MEASURES[self.measure]
        return [of_matrices(*torch.broadcast_tensors(*matrices))]


def joint_batch(batches: list[torch.Size]) -> torch.Size:
    """The batch axes of several matrices, broadcast."""
    if all(batch == batches[0] for batch in batches):
        return batches[0]
    try:
        return as_size(torch.broadcast_shapes(*batches))
    except RuntimeError:
        raise ValueError(
            f"batch axes {[tuple(batch) for batch in batches]} of the matrices do not broadcast."
        ) from None
