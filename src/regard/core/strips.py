"""Complete rows, a strip at a time: the walk behind every question that needs more than an online softmax.

A strip is a few rows of the weights over all keys that they see, of one matrix or of several matrices side by side.
Its rows are normalised by their own scores, so a question is a plain function of log-weights (`Question.of_strip`), and
the results of strips are merged as the states of key blocks are: by sum, maximum or log-sum-exp. The backward computes
every strip again and lets autograd differentiate it there. Memory is a few strips, and the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from .block import MatrixBlock, take
from .intervals import KeyIntervals
from .problem import Problem
from .pytree import flatten, register_node, replace_fields, tree_map, unflatten
from .scores import TanhSum, upcast
from .torch_state import in_functorch, without_autocast

__all__ = ["DenseRows", "HeadRows", "Merge", "Part", "Question", "RowSource", "ScoreRows", "Strip", "safe_lse", "walk"]

#: How many weights a strip may hold, all matrices together: a part of the cache of a CPU core; enough to fill a GPU.
STRIP_NUMBERS = 2**19
STRIP_NUMBERS_GPU = 2**26
#: Rows of a strip that a head gets before heads are walked one by one, and rows that a mask's strip may have.
FEWEST_ROWS, TALLEST_MASKED = 64, 256

Merge = Literal["sum", "max", "lse"]
S = TypeVar("S", bound="RowSource")


@dataclass(frozen=True, eq=False)
class Part:
    """Where a strip lies: sequences, heads of the result, rows and keys. Positions are those of the first matrix."""

    batch: slice
    heads: slice
    block: MatrixBlock

    @property
    def rows(self) -> slice:
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
    log_sink: Tensor | None = None  # b h i 1 : log of the share that a sink takes

    @property
    def scores(self) -> Tensor:
        raise ValueError("by='lse' needs scores; weights of from_dense and heads taken together have none.")


class _ScoreStrip(Strip):
    """Rows of scores, normalised by their own maximum and sum, which stay apart as everywhere."""

    def __init__(self, s: Tensor, sink: Tensor | None) -> None:
        self._s = s
        m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.detach().new_full((*s.shape[:3], 1), -torch.inf)
        self._sink = None if sink is None else upcast(sink)
        if self._sink is not None:
            m = torch.maximum(m, self._sink.detach())
        self._pivot = torch.where(m == -torch.inf, 0, m)  # −inf − −inf is nan
        self._above = s - self._pivot

    @cached_property
    def _exp(self) -> Tensor:
        return self._above.exp()

    @cached_property
    def _l(self) -> Tensor:
        l = self._exp.sum(-1, keepdim=True)
        if self._sink is not None:
            l = l + (self._sink - self._pivot).exp()
        return torch.where(l == 0, 1, l)  # a row with no key

    @cached_property
    def w(self) -> Tensor:  # type: ignore[override]
        return self._exp / self._l

    @cached_property
    def log_w(self) -> Tensor:  # type: ignore[override]
        return self._above - self._l.log()

    @cached_property
    def log_sink(self) -> Tensor | None:  # type: ignore[override]
        return None if self._sink is None else (self._sink - self._pivot) - self._l.log()

    @property
    def scores(self) -> Tensor:
        return self._s


class _WeightStrip(Strip):
    """Rows of weights that exist already."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    @cached_property
    def log_w(self) -> Tensor:  # type: ignore[override]
        # log 0 is −inf with the slope inf: a weight of 0 stays out of the graph.
        return torch.where(self.w > 0, self.w, 1).log().masked_fill(self.w <= 0, -torch.inf)


class _HeadStrip(Strip):
    """Rows of several heads as one: their weighted sum, or their largest weight."""

    def __init__(self, heads: Strip, size: int, shares: Tensor | None) -> None:
        self._heads, self._size, self._shares = heads, size, shares

    def _groups(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self._size))  # b g n i j

    @cached_property
    def w(self) -> Tensor:  # type: ignore[override]
        w = self._groups(self._heads.w)
        return w.amax(2) if self._shares is None else (w * self._groups(self._shares)).sum(2)

    def _log(self, log_w: Tensor) -> Tensor:
        x = self._groups(log_w)
        if self._shares is None:
            return x.amax(2)
        shares = self._groups(self._shares)
        counts = shares > 0
        return safe_lse(x.masked_fill(~counts, -torch.inf) + torch.where(counts, shares, 1).log(), 2)

    @cached_property
    def log_w(self) -> Tensor:  # type: ignore[override]
        return self._log(self._heads.log_w)

    @cached_property
    def log_sink(self) -> Tensor | None:  # type: ignore[override]
        return None if self._heads.log_sink is None else self._log(self._heads.log_sink)


def safe_lse(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """log Σ exp(x); −inf with gradient 0, not nan, where every x is −inf."""
    if not x.shape[dim]:
        return torch.logsumexp(x, dim, keepdim)
    m = x.detach().amax(dim, keepdim=True)
    empty = m == -torch.inf
    pivot = torch.where(empty, 0, m)
    total = (x - pivot).exp().sum(dim, keepdim=True)
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
    """Rows of a problem's weights."""

    problem: Problem

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
        return self.problem.q.shape[-1] if isinstance(self.problem.similarity_kernel, TanhSum) else 1

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
            )
        )

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        # Positions are this matrix's own: another one of the walk may be aligned otherwise.
        s = self.problem.bare_scores(self.problem.block(part.rows, part.cols))
        if visible is not None:
            s = s.masked_fill(~_pick(visible, part.batch, part.heads), -torch.inf)
        return _ScoreStrip(s, self.problem.sink)


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

    def key_intervals(self) -> KeyIntervals | None:
        return None

    def visible(self, block: MatrixBlock) -> Tensor | None:
        return None

    def cut(self, part: Part) -> DenseRows:
        return replace_fields(self, weights=part.block.take(_pick(self.weights, part.batch, part.heads)))

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        return _WeightStrip(upcast(self.weights))


@register_node
class HeadRows:
    """Rows of several heads together: `size` adjacent heads of the source become one."""

    heads: ScoreRows | DenseRows
    size: int
    shares: Tensor | None  # b|1 h 1 1 : factor of each head in a sum; None: the largest weight of the heads

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

    def key_intervals(self) -> KeyIntervals | None:
        return self.heads.key_intervals()

    def visible(self, block: MatrixBlock) -> Tensor | None:
        return self.heads.visible(block)

    def cut(self, part: Part) -> HeadRows:
        inner = self._inner(part)
        shares = None if self.shares is None else _pick(self.shares, inner.batch, inner.heads)
        return HeadRows(self.heads.cut(inner), self.size, shares)

    def strip(self, part: Part, visible: Tensor | None) -> Strip:
        return _HeadStrip(self.heads.strip(self._inner(part), visible), self.size, self.shares)

    def _inner(self, part: Part) -> Part:
        heads = part.heads if self.shape[1] > 1 else slice(0, 1)
        return Part(part.batch, slice(heads.start * self.size, heads.stop * self.size), part.block)


def _pick(t: Tensor, batch: slice, heads: slice) -> Tensor:
    """Sequences and heads of a tensor (b|1, h|1, x, y); another one, of a user's function, stays."""
    return take(take(t, 0, batch), 1, heads) if t.ndim == 4 else t


class Question(Protocol):
    """What is asked of complete rows: a node of a tree. Tensors in it get gradients."""

    @property
    def merges(self) -> tuple[Merge, ...]:
        """How the results of two strips for the same place become one, for each output."""

    @property
    def counts_sink(self) -> bool:
        """Whether a sink's share is one more column of the dense weights."""

    @property
    def of_scores(self) -> bool:
        """Whether dense scores are asked for in the place of weights."""

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        """The results before any strip; shape is (b, h, i, j) of all sources broadcast."""

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        """For each output the value of a strip, and the index of the total that it belongs to."""

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        """The textbook: outputs from dense weights (b, h, i, j), with a sink's share as last column where it counts."""


def walk(sources: Sequence[RowSource], question: Question) -> tuple[Tensor, ...]:
    """The outputs of a question to one or several matrices of equal lengths, with gradients in linear memory."""
    spec, tensors = flatten((tuple(sources), question))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        if in_functorch():
            raise NotImplementedError(
                "torch.func cannot follow a walk over strips, which has a backward of its own. "
                'engine="reference" is plain PyTorch, in quadratic memory; or use torch.autograd.grad.'
            )
        return _WalkNode.apply(spec, *tensors)
    return without_autocast(tensors[0], lambda: tuple(_forward(list(sources), question)[0]))


def _forward(sources: list[RowSource], question: Question) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and for each output that is a maximum the number of the strip that holds it."""
    totals = question.totals(_joint_shape(sources), sources[0].like)
    owners = [
        torch.full(x.shape, -1, dtype=torch.int32, device=x.device) if merge == "max" else None
        for x, merge in zip(totals, question.merges, strict=True)
    ]
    for n, (part, visible) in enumerate(_parts(sources)):
        strips = [source.cut(part).strip(part, v) for source, v in zip(sources, visible, strict=True)]
        for (value, where), total, owner, merge in zip(
            question.of_strip(strips, part), totals, owners, question.merges, strict=True
        ):
            held = total[where]
            if owner is not None:
                larger = value > held
                owner[where] = owner[where].masked_fill(larger, n)
                total[where] = torch.where(larger, value, held)
            else:
                total[where] = torch.logaddexp(held, value) if merge == "lse" else held + value
    return totals, owners


def _backward(
    sources: list[RowSource], question: Question, outputs: list[Tensor], owners: list[Tensor | None],
    grads: list[Tensor | None], needs: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of all tensors of (sources, question) that need one."""
    spec, tensors = flatten((tuple(sources), question))
    zeros = [torch.zeros_like(t, dtype=_wide(t)) if n else t.new_zeros(()).expand(t.shape)
             for t, n in zip(tensors, needs, strict=True)]  # fmt: skip
    total_sources, total_question = unflatten(spec, zeros)
    for n, (part, visible) in enumerate(_parts(sources)):
        local_spec, local = flatten((tuple(source.cut(part) for source in sources), question))
        total = flatten((tuple(source.cut(part) for source in total_sources), total_question))[1]
        inputs = [t.detach().to(z.dtype).requires_grad_() if need else t
                  for t, z, need in zip(local, zeros, needs, strict=True)]  # fmt: skip
        with torch.enable_grad():
            cut_sources, cut_question = unflatten(local_spec, inputs)
            strips = [source.strip(part, v) for source, v in zip(cut_sources, visible, strict=True)]
            values = cut_question.of_strip(strips, part)
        seeds = [
            (value, _seed(value, g[where], outputs[m][where], owner if owner is None else owner[where] == n, merge))
            for m, ((value, where), g, owner, merge) in enumerate(
                zip(values, grads, owners, question.merges, strict=True)
            )
            if g is not None and value.requires_grad
        ]
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        if not seeds:
            continue
        input_grads = torch.autograd.grad([v for v, _ in seeds], wanted, [g for _, g in seeds], allow_unused=True)
        for g, z in zip(input_grads, [z for z, need in zip(total, needs, strict=True) if need], strict=True):
            if g is not None:
                z += g
    return [z.to(t.dtype) if n else None for z, t, n in zip(zeros, tensors, needs, strict=True)]


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _seed(value: Tensor, g: Tensor, output: Tensor, owned: Tensor | None, merge: Merge) -> Tensor:
    """The gradient of a strip's value, from that of the merged output."""
    if owned is not None:
        return g.masked_fill(~owned, 0).to(value.dtype)
    if merge == "lse":
        share = (value.detach() - torch.where(output == -torch.inf, 0, output)).exp()
        return g * share
    return g.expand(value.shape).to(value.dtype)


class _WalkNode(torch.autograd.Function):
    """The autograd node of a walk."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        sources, question = unflatten(spec, list(tensors))
        outputs, owners = without_autocast(tensors[0], lambda: _forward(list(sources), question))
        ctx.spec, ctx.count = spec, len(tensors)
        ctx.has_owner = [owner is not None for owner in owners]
        ctx.save_for_backward(*tensors, *outputs, *(owner for owner in owners if owner is not None))
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "regard computes first derivatives; got create_graph=True, which asks for a second one. "
                'engine="reference" differentiates any number of times, in quadratic memory.'
            )
        saved = ctx.saved_tensors
        tensors, outputs = list(saved[: ctx.count]), list(saved[ctx.count : ctx.count + len(grads)])
        of_maxima = iter(saved[ctx.count + len(grads) :])
        owners = [next(of_maxima) if has else None for has in ctx.has_owner]
        needs = list(ctx.needs_input_grad[1:])
        sources, question = unflatten(ctx.spec, tensors)
        return None, *without_autocast(
            tensors[0], lambda: _backward(list(sources), question, outputs, owners, list(grads), needs)
        )


# Which strips there are.


def _joint_shape(sources: list[RowSource]) -> tuple[int, int, int, int]:
    b, h, i, j = torch.broadcast_shapes(*(source.shape for source in sources))
    return b, h, i, j


def _parts(sources: list[RowSource]) -> Iterator[tuple[Part, list[Tensor | None]]]:
    """Strips that cover every visible cell once, each with the visible cells of every source."""
    b, h, rows, keys = _joint_shape(sources)
    if 0 in (b, h, rows):
        return
    like, offset = sources[0].like, sources[0].offset
    budget = STRIP_NUMBERS_GPU if like.device.type == "cuda" else STRIP_NUMBERS
    per_row = max(1, keys) * sum(source.numbers_per_cell for source in sources)
    heads_at_once = h if h * per_row * FEWEST_ROWS <= budget else 1
    batch_at_once = b if b * heads_at_once * per_row * FEWEST_ROWS <= budget else 1
    height = max(1, min(rows, budget // (batch_at_once * heads_at_once * per_row)))
    intervals = [source.key_intervals() for source in sources]
    if any(x is not None for x in intervals):
        height = min(height, TALLEST_MASKED)
    for start, first, end in _key_ranges(intervals, rows, keys, height):
        block = MatrixBlock(slice(start, min(rows, start + height)), slice(first, end), offset, like.device)
        visible = [source.visible(block) for source in sources]
        for s in range(0, b, batch_at_once):
            for n in range(0, h, heads_at_once):
                yield Part(slice(s, s + batch_at_once), slice(n, n + heads_at_once), block), visible


def _key_ranges(
    intervals: list[KeyIntervals | None], rows: int, keys: int, height: int
) -> list[tuple[int, int, int]]:  # fmt: skip
    """For each strip its first row, and the range of keys that holds all that its rows see in any of the matrices."""
    starts = range(0, rows, height)
    if any(x is None for x in intervals):
        return [(start, 0, keys) for start in starts]
    hulls = []
    for x in intervals:
        assert x is not None
        seen = x.lo < x.hi
        hulls.append((torch.where(seen, x.lo, keys).amin((0, 1)), torch.where(seen, x.hi, 0).amax((0, 1))))
    lo, hi = torch.stack([a for a, _ in hulls]).amin(0), torch.stack([z for _, z in hulls]).amax(0)
    first = [int(x.min()) for x in lo.split(height)]
    end = [int(x.max()) for x in hi.split(height)]
    return [(start, min(a, z), z) for start, a, z in zip(starts, first, end, strict=True)]
