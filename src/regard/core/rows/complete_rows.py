"""Statistics of complete rows that are not those of single heads: of heads together, of distances, of chosen keys.

Statistics that `Weights.see` names are in `core/stats.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..block import MatrixBlock, take
from ..pytree import register_node
from ..stats import distance, entropy, stable_topk
from ..tensor_kinds import readable_numbers
from ..torch_state import is_tracing
from .sources import Part, Strip
from .strips import DenseForm, Merge, OfParts

__all__ = [
    "ChosenKeys",
    "ColumnSum",
    "DistanceBins",
    "DistanceSum",
    "DistanceVariance",
    "GradientProduct",
    "LargestWeights",
    "RowEntropy",
    "RowProduct",
    "induction_targets",
]


class CompleteRowStatistic:
    """One output for every row, (b, h, i, *size), from the row as a whole: two blocks of its keys cannot be merged.

    A statistic whose blocks can be merged is a row statistic (`core/stats.py`), which all engines compute in one pass.
    """

    name: ClassVar[str]
    row_fields: ClassVar[tuple[str, ...]] = ()
    merges: ClassVar[tuple[Merge, ...]] = ("sum",)
    counts_sink: ClassVar[bool] = False
    dense_form: ClassVar[DenseForm] = "weights"
    of_parts: ClassVar[OfParts] = None

    @property
    def size(self) -> tuple[int, ...]:
        return ()

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        return [like.new_zeros(*shape[:3], *self.size)]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        return [(self.of_rows(strips[0], part), part.index(part.rows))]

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        raise NotImplementedError


@register_node
class RowEntropy(CompleteRowStatistic):
    """−Σ w log w; a sink's share counts as one more outcome."""

    name: ClassVar[str] = "entropy of heads together"
    counts_sink: ClassVar[bool] = True
    of_parts: ClassVar[OfParts] = "rows"

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        rows = _entropy(strip.w, strip.log_w)
        return rows if strip.sink is None or strip.log_sink is None else rows + _entropy(strip.sink, strip.log_sink)

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        return [entropy(matrices[0])]


def _entropy(w: Tensor, log_w: Tensor) -> Tensor:
    return -(w * log_w.masked_fill(log_w.detach() == -torch.inf, 0)).sum(-1)


@register_node
class LargestWeights(CompleteRowStatistic):
    """The k largest weights of every row and their keys, (b, h, i, k) each."""

    name: ClassVar[str] = "topk of heads together"
    k: int
    merges: ClassVar[tuple[Merge, ...]] = ("sum", "sum")

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        top = (*shape[:3], self.k)
        return [like.new_zeros(top), like.new_zeros(top, dtype=torch.int64)]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        (strip,) = strips
        _, keys = stable_topk(strip.log_w.detach(), self.k)
        values = _gathered(strip.w, keys)
        where = part.index(part.rows)
        return [(values, where), (keys + torch.where(keys < 0, 0, part.cols.start), where)]

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (w,) = matrices
        keys = stable_topk(torch.where(w > 0, w, -torch.inf).detach(), self.k)[1]
        return [_gathered(w, keys), keys]


def _gathered(w: Tensor, keys: Tensor) -> Tensor:
    """Weights at keys (b, h, i, n); 0 at key −1."""
    if not w.shape[-1]:
        return w.new_zeros(keys.shape)
    return w.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0)


@register_node
class ChosenKeys(CompleteRowStatistic):
    """The weights of every row at keys of its own, (b, h, i, n); 0 at key −1."""

    name: ClassVar[str] = "gather"
    row_fields: ClassVar[tuple[str, ...]] = ("keys",)
    keys: Tensor  # b|1 h|1 i n
    of_parts: ClassVar[OfParts] = "rows"

    @property
    def size(self) -> tuple[int, ...]:
        return (self.keys.shape[-1],)

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        keys = take(take(take(self.keys, 0, part.batch), 1, part.heads), 2, part.rows)
        keys = torch.where((keys >= part.cols.start) & (keys < part.cols.stop), keys - part.cols.start, -1)
        return _gathered(strip.w, keys.expand(*strip.w.shape[:3], -1))

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (w,) = matrices
        return [_gathered(w, self.keys.expand(*w.shape[:3], -1))]


@register_node
class RowProduct(CompleteRowStatistic):
    """W v of matrices that no engine multiplies: (b, h, i, e)."""

    name: ClassVar[str] = "a product of heads together"
    v: Tensor  # b|1 h|1 j e

    @property
    def size(self) -> tuple[int, ...]:
        return (self.v.shape[-1],)

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        v = _at(take(take(self.v, 0, part.batch), 1, part.heads), part.cols)
        return strip.w @ v.to(strip.w.dtype)

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        return [matrices[0] @ self.v.to(matrices[0].dtype)]


def _at(x: Tensor, where: slice) -> Tensor:
    """Some rows of x (b, h, n, e), which `take` would not cut where there is one: a strip may see no key."""
    return x.narrow(2, where.start, where.stop - where.start)


@register_node
class GradientProduct(CompleteRowStatistic):
    """(W ∘ dy vᵀ) x, or of its positive cells: (b, h, i, c)."""

    name: ClassVar[str] = "gradient_relevance"
    dy: Tensor  # b h|1 i e
    v: Tensor  # b h|1 j e
    x: Tensor  # b h|1 j c
    positive: bool

    @property
    def size(self) -> tuple[int, ...]:
        return (self.x.shape[-1],)

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        dy, v, x = (
            _at(take(take(t, 0, part.batch), 1, part.heads), where)
            for t, where in ((self.dy, part.rows), (self.v, part.cols), (self.x, part.cols))
        )
        return self._product(strip.w, dy, v, x)

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        return [self._product(matrices[0], self.dy, self.v, self.x)]

    def _product(self, w: Tensor, dy: Tensor, v: Tensor, x: Tensor) -> Tensor:
        relevance = w * (dy.to(w.dtype) @ v.to(w.dtype).mT)
        return (relevance.clamp(min=0) if self.positive else relevance) @ x.to(w.dtype)


@register_node
class ColumnSum(CompleteRowStatistic):
    """Σ_i w_ij, (b, h, j)."""

    name: ClassVar[str] = "received of a maximum of heads"

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        b, h, _, j = shape
        return [like.new_zeros(b, h, j)]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        return [(strips[0].w.sum(-2), part.index(part.cols))]

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        return [matrices[0].sum(-2)]


@register_node
class DistanceSum(CompleteRowStatistic):
    """Σ_j w_ij |i − j|, (b, h, i)."""

    name: ClassVar[str] = "mean_distance of a maximum of heads"
    offset: int
    of_parts: ClassVar[OfParts] = "rows"

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        return (strip.w * _distance(part.block)).sum(-1)

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (w,) = matrices
        return [(w * distance(w.shape[-2], w.shape[-1], self.offset, w)).sum(-1)]


@register_node
class DistanceVariance(CompleteRowStatistic):
    """Σ_j w_ij (|i − j| − mean distance)²; `mean` is that distance, if it need not be computed."""

    name: ClassVar[str] = "distance_variance"
    row_fields: ClassVar[tuple[str, ...]] = ("mean",)
    offset: int
    mean: Tensor | None = None  # b h i

    @property
    def of_parts(self) -> OfParts:  # type: ignore[override]
        return None if self.mean is None else "rows"

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        mean = None if self.mean is None else self.mean[part.index(part.rows)].unsqueeze(-1)
        return _variance(strip.w, _distance(part.block), mean)

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (w,) = matrices
        return [_variance(w, distance(w.shape[-2], w.shape[-1], self.offset, w))]


def _distance(block: MatrixBlock) -> Tensor:
    return (block.i - block.j).abs()


def _variance(w: Tensor, distances: Tensor, mean: Tensor | None = None) -> Tensor:
    mean = (w * distances).sum(-1, keepdim=True) if mean is None else mean
    return (w * (distances - mean) ** 2).sum(-1)


@register_node
class DistanceBins(CompleteRowStatistic):
    """The weight of every row by distance, (b, h, i, bins): bin n holds edges[n] ≤ |i − j| < edges[n + 1]."""

    name: ClassVar[str] = "distance_histogram"
    edges: Tensor  # bins + 1
    offset: int
    of_parts: ClassVar[OfParts] = "rows"

    @property
    def size(self) -> tuple[int, ...]:
        return (len(self.edges) - 1,)

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        return self._binned(strip.w, _distance(part.block))

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (w,) = matrices
        return [self._binned(w, distance(w.shape[-2], w.shape[-1], self.offset, w))]

    def _binned(self, w: Tensor, distances: Tensor) -> Tensor:
        inside = [(distances >= a) & (distances < z) for a, z in zip(self.edges[:-1], self.edges[1:], strict=True)]
        return torch.stack([(w * cells).sum(-1) for cells in inside], -1)


def induction_targets(tokens: Tensor | Sequence[Any], rows: Tensor) -> Tensor:
    """For the query at each key position of `rows` the key after the last earlier occurrence of its token, or −1."""
    if isinstance(tokens, (list, tuple)) and any(isinstance(token, Tensor) for token in tokens):
        tokens = [token.item() if isinstance(token, Tensor) and token.numel() == 1 else token for token in tokens]
    if isinstance(tokens, Tensor) and tokens.ndim == 1:
        ids = readable_numbers(tokens, "induction_mass(tokens)").to(rows.device)
    elif isinstance(tokens, Collection) and all(isinstance(token, Hashable) for token in tokens):
        numbers: dict[Any, int] = {}
        ids = torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens], device=rows.device)
    else:
        got = f"a tensor {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else repr(tokens)[:60]
        raise TypeError(
            f"induction_mass(tokens) takes one token a key, a list of strings or ids, or a tensor (j,); got {got}."
        )
    if not is_tracing() and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(ids):
        raise ValueError(f"induction_mass(tokens) needs a token at the position of each query; got {len(ids)} tokens.")
    order = ids.argsort(stable=True)  # occurrences of a token stand side by side, in their order
    same = ids[order[1:]] == ids[order[:-1]]
    targets = torch.full_like(order, -1).scatter(0, order[1:], torch.where(same, order[:-1] + 1, -1))
    return targets[rows]
