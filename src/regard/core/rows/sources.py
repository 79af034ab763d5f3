"""Complete rows of weights: where a strip of them lies, what it holds, and the matrices that it is computed from.

A strip is a few rows over all keys that they see. Its rows are normalised by their own scores, so that a weight and the
sum that it is divided by come from one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ..block import MatrixBlock, take
from ..masks.intervals import KeyIntervals
from ..problem import Problem
from ..pytree import register_node, replace_fields, tree_map
from ..scores.kinds import upcast
from .head_shares import HeadShares

__all__ = [
    "ChosenRows",
    "DenseRows",
    "FinishedRows",
    "HeadRows",
    "Part",
    "RowSource",
    "ScoreRows",
    "Strip",
    "WeightStrip",
    "log_of_heads",
    "safe_lse",
]

S = TypeVar("S", bound="RowSource")


@dataclass(frozen=True, eq=False)
class Part:
    """Where a strip lies: sequences, heads of the result, rows and keys. Positions are those of the first matrix."""

    batch: slice
    heads: slice
    block: MatrixBlock
    #: Where its rows lie in tensors that have the rows of one rank; None: at their positions.
    at: slice | None = None

    @property
    def rows(self) -> slice:
        if self.at is not None:
            return self.at
        assert isinstance(self.block.rows, slice)
        return self.block.rows

    @property
    def cols(self) -> slice:
        assert isinstance(self.block.cols, slice)
        return self.block.cols

    def index(self, *rest: Any) -> tuple[Any, ...]:
        """Index of a result (b, h, ...) for this strip."""
        return (self.batch, self.heads, *rest)


class Strip:
    """Complete rows of weights (b, h, i, j) of one matrix; a hidden key has weight 0 and log-weight −inf."""

    w: Tensor
    log_w: Tensor
    sink: Tensor | None = None  # b h i 1 : the share that a sink takes
    log_sink: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        raise ValueError("by='lse' needs scores; weights of from_dense and heads taken together have none.")


class _ScoreStrip(Strip):
    """Rows of scores, normalised by their own maximum and sum, which stay apart as everywhere."""

    def __init__(self, s: Tensor, sink: Tensor | None) -> None:
        self._s = s
        m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.detach().new_full((*s.shape[:3], 1), -torch.inf)
        # One sink a row: its gradient is the difference of two paths, which must meet before rows are added up.
        sink = None if sink is None else upcast(sink).expand(*s.shape[:3], 1)
        if sink is not None:
            m = torch.maximum(m, sink.detach())
        self._pivot = torch.where(m == -torch.inf, 0, m)  # −inf − −inf is nan
        self._above = s - self._pivot
        self._sink_above = None if sink is None else sink - self._pivot

    @cached_property
    def _exp(self) -> Tensor:
        return self._above.exp()

    @cached_property
    def _l(self) -> Tensor:
        l = self._exp.sum(-1, keepdim=True)
        if self._sink_above is not None:
            l = l + self._sink_above.exp()
        return torch.where(l == 0, 1, l)  # a row with no key

    @cached_property
    def w(self) -> Tensor:  # type: ignore[override]
        return self._exp / self._l

    @cached_property
    def log_w(self) -> Tensor:  # type: ignore[override]
        return self._above - self._l.log()

    @cached_property
    def sink(self) -> Tensor | None:  # type: ignore[override]
        return None if self._sink_above is None else self._sink_above.exp() / self._l

    @cached_property
    def log_sink(self) -> Tensor | None:  # type: ignore[override]
        return None if self._sink_above is None else self._sink_above - self._l.log()

    @property
    def scores(self) -> Tensor:
        return self._s


class _FinishedStrip(Strip):
    """Some keys of rows, normalised by the maximum and the sum over all keys."""

    def __init__(self, s: Tensor, norm: Tensor, sink: Tensor | None) -> None:
        m, l = norm.unsqueeze(-2).unbind(-1)  # b h i 1
        pivot, l = torch.where(m == -torch.inf, 0, m), torch.where(l == 0, 1, l)
        self._s = s
        self.log_w = s - pivot - l.log()
        self.w = (s - pivot).exp() / l
        if sink is not None:
            above = upcast(sink) - pivot
            self.sink, self.log_sink = above.exp() / l, above - l.log()

    @property
    def scores(self) -> Tensor:
        return self._s


class WeightStrip(Strip):
    """Rows of weights that exist already."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    @cached_property
    def log_w(self) -> Tensor:  # type: ignore[override]
        # log 0 is −inf with the slope inf: a weight of 0 stays out of the graph.
        return torch.where(self.w > 0, self.w, 1).log().masked_fill(self.w <= 0, -torch.inf)


class _HeadStrip(Strip):
    """Rows of several heads as one: their weighted sum, or their largest weight."""

    def __init__(self, heads: Strip, size: int, shares: HeadShares | None) -> None:
        self._heads, self._size, self._shares = heads, size, shares

    def _groups(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self._size))  # b g n i j

    def _joined(self, weights: Tensor) -> Tensor:
        w = self._groups(weights)
        return w.amax(2) if self._shares is None else self._shares.sum_of(w, 1)

    @cached_property
    def w(self) -> Tensor:  # type: ignore[override]
        return self._joined(self._heads.w)

    @cached_property
    def sink(self) -> Tensor | None:  # type: ignore[override]
        return None if self._heads.sink is None else self._joined(self._heads.sink)

    def _log(self, log_w: Tensor) -> Tensor:
        return log_of_heads(self._groups(log_w), self._shares)

    @cached_property
    def log_w(self) -> Tensor:  # type: ignore[override]
        return self._log(self._heads.log_w)

    @cached_property
    def log_sink(self) -> Tensor | None:  # type: ignore[override]
        return None if self._heads.log_sink is None else self._log(self._heads.log_sink)


class _ChosenStrip(Strip):
    """Rows of which only chosen keys count, divided by their sum; a sink does not count."""

    def __init__(self, rows: Strip, chosen: Tensor | None) -> None:
        log_w = rows.log_w if chosen is None else rows.log_w.masked_fill(~chosen, -torch.inf)
        total = safe_lse(log_w, -1, keepdim=True)
        self.log_w = log_w - torch.where(total == -torch.inf, 0, total)

    @cached_property
    def w(self) -> Tensor:  # type: ignore[override]
        return self.log_w.exp()


def log_of_heads(log_w: Tensor, shares: HeadShares | None) -> Tensor:
    """The logarithm of a sum or mean of n heads' weights, or of the largest, from (b, g, n, ...)."""
    if shares is None:
        return log_w.amax(2)
    factors, total = shares.aligned(log_w, 1)
    counts = factors > 0  # log 0 is −inf with the slope inf
    return safe_lse(log_w.masked_fill(~counts, -torch.inf) + torch.where(counts, factors, 1).log(), 2, divisor=total)


def safe_lse(x: Tensor, dim: int, keepdim: bool = False, divisor: Tensor | None = None) -> Tensor:
    """log (Σ exp(x) / divisor); −inf with gradient 0, not nan, where every x is −inf."""
    if not x.shape[dim]:
        return torch.logsumexp(x, dim, keepdim)
    m = x.detach().amax(dim, keepdim=True)
    empty = m == -torch.inf
    pivot = torch.where(empty, 0, m)
    total = (x - pivot).exp().sum(dim, keepdim=True)
    total = total if divisor is None else total / divisor
    lse = (torch.where(empty, 1, total).log() + pivot).masked_fill(empty, -torch.inf)
    return lse if keepdim else lse.squeeze(dim)


class RowSource(Protocol):
    """A matrix whose complete rows can be computed: a node of a tree, so that autograd gets its tensors."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, i, j)"""

    @property
    def like(self) -> Tensor:
        """An empty tensor on the device and in the dtype of the weights."""

    @property
    def offset(self) -> int:
        """Key position of query 0."""

    @property
    def numbers_per_cell(self) -> int:
        """Numbers that computing one cell of the result takes."""

    def with_exact_distances(self: S) -> S:
        """The same, with the problems of `Problem.with_exact_distances`."""

    def key_intervals(self) -> KeyIntervals | None:
        """Intervals that hold all that each row sees; None where that is everything."""

    def visible(self, block: MatrixBlock) -> Tensor | None:
        """Which cells of the block are visible, (b|1, h|1, i, j); None where all are."""

    def cut(self: S, part: Part) -> S:
        """Views of all tensors for a strip; those of the mask stay, and it is not applied."""

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        """The strip that this source is cut to; `visible` is that of its block, all sequences and heads."""


@register_node
class ScoreRows:
    """Rows of a problem's weights; `norm` (b, h, i, 2) is theirs where a pass has computed it."""

    problem: Problem
    norm: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.problem.shape

    @property
    def like(self) -> Tensor:
        return torch.empty(0, dtype=self.problem.compute_dtype, device=self.problem.q.device)

    @property
    def offset(self) -> int:
        return self.problem.offset

    @property
    def numbers_per_cell(self) -> int:
        return self.problem.similarity_kernel.numbers_per_cell(self.problem.q.shape[-1])

    def with_exact_distances(self) -> Self:
        problem = self.problem.with_exact_distances()
        return self if problem is self.problem else replace_fields(self, problem=problem, norm=None)

    def key_intervals(self) -> KeyIntervals | None:
        return None if self.problem.mask is None else self.problem.intervals

    def visible(self, block: MatrixBlock) -> Tensor | None:
        if self.problem.mask is None:
            return None
        visible = self.problem.mask.visible(self.problem.block(block.rows, block.cols))
        return visible.reshape(*[1] * (4 - visible.ndim), *visible.shape)

    def cut(self, part: Part) -> ScoreRows:
        h, g = self.problem.q.shape[1], self.problem.k.shape[1]
        per_key_head = h // g
        heads = part.heads if h > 1 else slice(0, 1)
        of_keys = slice(heads.start // per_key_head, -(-heads.stop // per_key_head))
        local = self.problem.at(part.block)

        def pick(t: Tensor) -> Tensor:
            return _pick(t, part.batch, heads)

        return ScoreRows(
            replace_fields(
                local,
                q=pick(local.q),
                k=_pick(local.k, part.batch, of_keys),
                modifiers=tree_map(local.modifiers, pick),
                similarity_kernel=tree_map(local.similarity_kernel, pick),
                sink=None if local.sink is None else pick(local.sink),
                mask=self.problem.mask,  # as it is: a tree and its cut have the same tensors
            ),
            self.norm,
        )

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        return _ScoreStrip(self._scores(part, visible), self.problem.sink)

    def _scores(self, part: Part, visible: Tensor | None) -> Tensor:
        # Positions are this matrix's own: another one of the walk may be aligned otherwise.
        s = self.problem.bare_scores(self.problem.block(part.rows, part.cols))
        return s if visible is None else s.masked_fill(~_pick(visible, part.batch, part.heads), -torch.inf)


@register_node
class FinishedRows(ScoreRows):
    """Some keys of rows; their `norm` is that of all keys, those of other problems and a sink included."""

    def cut(self, part: Part) -> FinishedRows:
        heads = part.heads if self.problem.q.shape[1] > 1 else slice(0, 1)
        assert self.norm is not None
        norm = take(_pick(self.norm, part.batch, heads), 2, part.rows)
        return FinishedRows(ScoreRows.cut(self, part).problem, norm)

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        assert self.norm is not None
        return _FinishedStrip(self._scores(part, visible), self.norm, self.problem.sink)


@register_node
class DenseRows:
    """Rows of weights that exist already."""

    weights: Tensor  # b h i j
    offset: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, i, j = self.weights.shape
        return b, h, i, j

    @property
    def like(self) -> Tensor:
        return upcast(self.weights[:0])

    @property
    def numbers_per_cell(self) -> int:
        return 1

    def with_exact_distances(self) -> DenseRows:
        return self

    def key_intervals(self) -> KeyIntervals | None:
        return None

    def visible(self, block: MatrixBlock) -> Tensor | None:
        return None

    def cut(self, part: Part) -> DenseRows:
        return replace_fields(self, weights=part.block.take(_pick(self.weights, part.batch, part.heads)))

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        return WeightStrip(upcast(self.weights))


@register_node
class HeadRows:
    """Rows of several heads together: `size` adjacent heads of the source become one."""

    heads: ScoreRows | DenseRows
    size: int
    shares: HeadShares | None  # None: the largest weight of the heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, i, j = self.heads.shape
        return b, h // self.size, i, j

    @property
    def like(self) -> Tensor:
        return self.heads.like

    @property
    def offset(self) -> int:
        return self.heads.offset

    @property
    def numbers_per_cell(self) -> int:
        return self.size * self.heads.numbers_per_cell

    def with_exact_distances(self) -> HeadRows:
        return replace_fields(self, heads=self.heads.with_exact_distances())

    def key_intervals(self) -> KeyIntervals | None:
        return self.heads.key_intervals()

    def visible(self, block: MatrixBlock) -> Tensor | None:
        return self.heads.visible(block)

    def cut(self, part: Part) -> HeadRows:
        inner = self._inner(part, self.shape[1])
        shares = None if self.shares is None else self.shares.cut(inner.heads)
        return HeadRows(self.heads.cut(inner), self.size, shares)

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        # Of a mask with heads of its own: this source is cut already, and its shape says one group for whichever it is.
        groups = 1 if visible is None else visible.shape[1] // self.size
        return _HeadStrip(self.heads.strip(self._inner(part, groups), visible), self.size, self.shares)

    def _inner(self, part: Part, groups: int) -> Part:
        """The heads of a strip, in tensors that hold so many groups of them."""
        heads = part.heads if groups > 1 else slice(0, 1)
        return Part(part.batch, slice(heads.start * self.size, heads.stop * self.size), part.block)


@register_node
class ChosenRows:
    """Rows renormalised over chosen keys, as softmax over these keys alone would give them."""

    rows: ScoreRows | DenseRows | HeadRows
    keys: Tensor | None  # b|1 h|1 i n : keys of every row, −1 for none; None: all

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.rows.shape

    @property
    def like(self) -> Tensor:
        return self.rows.like

    @property
    def offset(self) -> int:
        return self.rows.offset

    @property
    def numbers_per_cell(self) -> int:
        return self.rows.numbers_per_cell

    def with_exact_distances(self) -> ChosenRows:
        return replace_fields(self, rows=self.rows.with_exact_distances())

    def key_intervals(self) -> KeyIntervals | None:
        return self.rows.key_intervals()

    def visible(self, block: MatrixBlock) -> Tensor | None:
        return self.rows.visible(block)

    def cut(self, part: Part) -> ChosenRows:
        keys = None if self.keys is None else take(_pick(self.keys, part.batch, part.heads), 2, part.rows)
        return ChosenRows(self.rows.cut(part), keys)

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        rows = self.rows.strip(part, visible)
        return _ChosenStrip(rows, None if self.keys is None else self._cells(self.keys, part.cols))

    def _cells(self, keys: Tensor, cols: slice) -> Tensor:
        """Which keys of a strip are chosen, (b|1, h|1, i, j)."""
        n = cols.stop - cols.start
        inside = torch.where((keys >= cols.start) & (keys < cols.stop), keys - cols.start, n)
        cells = torch.zeros(*keys.shape[:3], n + 1, dtype=torch.bool, device=keys.device)
        return cells.scatter(-1, inside, True)[..., :n]


def _pick(t: Tensor, batch: slice, heads: slice) -> Tensor:
    """Sequences and heads of a tensor (b|1, h|1, x, y); another one, of a user's function, stays."""
    return take(take(t, 0, batch), 1, heads) if t.ndim == 4 else t
