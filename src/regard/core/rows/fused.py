"""Questions about complete rows that kernels answer: an online state in place of strips, gradients in closed form.

Strips (`strips.py`) answer every question of every matrix; these are the same numbers, several times as fast, where the
scores of all matrices are products that an engine's kernels compute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...engines import triton
from ...engines.numba import comparison as compiled
from ...engines.numba import head_rows, tile_pool
from ...engines.replay import replay_or_record
from ..problem import Problem
from ..pytree import flatten, unflatten
from ..stats import Request
from ..torch_state import in_functorch, is_tracing, without_autocast
from .comparison import Comparison
from .complete_rows import RowEntropy
from .head_shares import HeadShares
from .sources import ChosenRows, HeadRows, RowSource, ScoreRows
from .spans import BlockMask, CellMass, TilePool, block_edges
from .strips import Question, need_first_order, walk_tiles

__all__ = ["fused", "on_gpu", "span_masses"]

#: Weights of rows on blocks of keys that are stored for a sum over chosen blocks: 1 GB.
MOST_MASSES = 2**28


def fused(sources: Sequence[RowSource], question: Question) -> list[Tensor] | None:
    """The outputs of a question by kernels; None where strips must answer it."""
    if is_tracing() or in_functorch():
        return None
    value = None
    if isinstance(question, Comparison):
        first, second = sources
        if isinstance(second, ScoreRows):
            value = _try_compare(first, second, question.measure)
    elif isinstance(sources[0], HeadRows) and (kernels := _kernels_of_heads(sources[0])) is not None:
        return _of_heads(kernels, sources[0], question)
    elif isinstance(question, RowEntropy) and isinstance(sources[0], HeadRows):
        value = _compare_heads(sources[0], None, "entropy", divided=False)
    elif isinstance(question, TilePool) and isinstance(sources[0], ScoreRows):
        value = _pooled(sources[0], question)
    elif isinstance(question, CellMass) and question.blocks is not None:
        value = _mass_of_blocks(sources[0], question.blocks)
    return None if value is None else [value]


def _try_compare(first: RowSource, second: ScoreRows, measure: str) -> Tensor | None:
    if isinstance(first, ScoreRows):
        return _compare_pair((first.problem, second.problem), measure)
    divided = isinstance(first, ChosenRows) and first.keys is None
    heads = first.rows if isinstance(first, ChosenRows) and divided else first
    if isinstance(heads, HeadRows) and measure in compiled.MERGING:
        return _compare_heads(heads, second, measure, divided=divided)
    return None


def _only_queries_and_keys(problem: Problem) -> bool:
    """Whether gradients of nothing but queries and keys are wanted, through at most one soft cap."""
    if not torch.is_grad_enabled():
        return True
    constant = not any(t.requires_grad for t in flatten(problem.modifiers)[1])
    return constant and sum(not modifier.additive for modifier in problem.modifiers) <= 1


# Two matrices.


def _compare_pair(problems: tuple[Problem, Problem], measure: str) -> Tensor | None:
    kernels = _kernels(problems)
    if not all(map(_only_queries_and_keys, problems)) or not kernels.serves_pair(problems):
        return None
    spec, tensors = flatten(problems)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        value, *_ = without_autocast(tensors[0], lambda: kernels.forward_pass(problems, measure))
        return value
    return _ComparisonNode.apply(spec, measure, *tensors)


def _kernels(problems: tuple[Problem, Problem]) -> Any:
    """The module that compares two matrices on their device."""
    if _on_cpu(problems[0]):
        return compiled
    from ...engines.triton import comparison_pass

    return comparison_pass


def _on_cpu(problem: Problem) -> bool:
    """Whether compiled tiles serve the device; Triton's interpreter takes the place of a GPU in tests."""
    return problem.q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


class _ComparisonNode(torch.autograd.Function):
    """The autograd node of a measure: it saves two numbers a row of each matrix, and recomputes the weights."""

    @staticmethod
    def forward(ctx: Any, spec: Any, measure: str, *tensors: Tensor) -> Tensor:
        problems = unflatten(spec, list(tensors))
        value, norms, deltas = without_autocast(tensors[0], lambda: _kernels(problems).forward_pass(problems, measure))
        ctx.spec, ctx.measure, ctx.count = spec, measure, len(tensors)
        ctx.save_for_backward(*tensors, *norms, *deltas, value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_first_order()
        saved = list(ctx.saved_tensors)
        tensors, (norm, norm2, delta, delta2, value) = saved[: ctx.count], saved[ctx.count :]
        problems = unflatten(ctx.spec, tensors)
        second = len(flatten(problems[0])[1])
        needs, slots = ctx.needs_input_grad[2:], ((0, 1), (second, second + 1))  # of q and k
        wanted = tuple(any(needs[n] for n in pair) for pair in slots)
        grad = grad.masked_fill(value == torch.inf, 0)  # a row that sees what the other forbids
        grads = without_autocast(
            grad,
            lambda: _kernels(problems).backward(problems, ctx.measure, [norm, norm2], [delta, delta2], grad, wanted),
        )
        outputs: list[Tensor | None] = [None] * ctx.count
        for pair, of_pair in zip(slots, grads, strict=True):
            for n, g in zip(pair, of_pair or (), strict=False):
                outputs[n] = g.to(tensors[n].dtype) if needs[n] else None
        return None, None, *outputs


# Tiles.


def _pooled(rows: ScoreRows, question: TilePool) -> Tensor | None:
    """Without gradients, which strips give."""
    problem = rows.problem
    if _wants_gradients(problem) or len(question.row_edges) < 2 or len(question.col_edges) < 2:
        return None
    kernels: Any = _gpu_pool(problem) if on_gpu(problem.q) else tile_pool
    if kernels is None or not kernels.serves_pool(problem):
        return None
    args = (rows.norm, question.row_edges, question.col_edges, question.by)
    return without_autocast(problem.q, lambda: kernels.pooled(problem, *args))


def _mass_of_blocks(source: RowSource, blocks: BlockMask) -> Tensor | None:
    """The weight (b, h, i) of every row on the blocks that are flagged, from its weight on every block of keys."""
    b, h, i, j = source.shape
    edges = block_edges(blocks.cols, j)
    if b * h * i * len(edges) > MOST_MASSES or (by_block := span_masses(source, edges)) is None:
        return None
    flags = blocks.blocks.reshape(*[1] * (4 - blocks.blocks.ndim), *blocks.blocks.shape)
    return (by_block * flags.repeat_interleave(blocks.rows, -2)[..., :i, :]).sum(-1)


def span_masses(source: RowSource, edges: tuple[int, ...]) -> Tensor | None:
    """The weight (b, h, i, n) of every row on the keys between each two edges, by one pass of kernels.

    None where they do not serve, or gradients are wanted.
    """
    if is_tracing() or in_functorch() or not isinstance(source, ScoreRows) or not on_gpu(source.problem.q):
        return None
    problem = source.problem
    if _wants_gradients(problem) or len(edges) < 2 or (kernels := _gpu_pool(problem)) is None:
        return None
    if not kernels.serves_pool(problem):
        return None
    return without_autocast(problem.q, lambda: kernels.row_masses(problem, edges))


def _wants_gradients(problem: Problem) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in flatten(problem)[1])


def on_gpu(x: Tensor) -> bool:
    """Whether Triton's kernels compute on this tensor's device, in its interpreter perhaps."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _gpu_pool(problem: Problem) -> Any:
    """The module that pools tiles on a GPU; None where its engine does not serve."""
    if triton.unsupported_reason(problem, Request(("norm",))) is not None:
        return None
    from ...engines.triton import tile_pool_pass

    return tile_pool_pass


# Heads together on a GPU.


def _kernels_of_heads(heads: HeadRows) -> Any | None:
    """The module that adds up the heads of a matrix on a GPU; None where strips or compiled tiles do."""
    rows = heads.heads
    if not isinstance(rows, ScoreRows) or _on_cpu(rows.problem) or heads.shape[0] != rows.shape[0]:
        return None
    from ...engines.triton import head_rows_pass

    return head_rows_pass if head_rows_pass.serves_heads(rows.problem) else None


def _of_heads(kernels: Any, heads: HeadRows, question: Question) -> list[Tensor] | None:
    """The entropy by a kernel of its own; any other statistic of weights from tiles of the finished matrix."""
    rows, asks_entropy = heads.heads, isinstance(question, RowEntropy)
    assert isinstance(rows, ScoreRows)
    problem = rows.problem
    spec, tensors = flatten((problem, rows.norm, heads.shares))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *flatten(question)[1])):
        of_factors = any(t.requires_grad for t in flatten(heads.shares)[1])
        if not asks_entropy or heads.shares is None or problem.sink is not None or of_factors:
            return None
        return [_HeadEntropyNode.apply(spec, heads.shape[1], *tensors)] if _only_queries_and_keys(problem) else None
    if not asks_entropy and (question.dense_form != "weights" or question.counts_sink):
        return None

    def compute() -> list[Tensor]:
        matrix = _head_inputs(kernels, heads.shape[1], problem, rows.norm, heads.shares)
        if asks_entropy:
            return [kernels.entropy(matrix)]
        return walk_tiles(heads, question, lambda *part: kernels.tiles(matrix, *part))

    return without_autocast(problem.q, compute)


def _head_inputs(kernels: Any, groups: int, problem: Problem, norm: Tensor | None, shares: HeadShares | None) -> Any:
    by = "max" if shares is None else "mean" if shares.mean else "sum"
    return kernels.HeadInputs(problem, norm, groups, by, None if shares is None else shares.factors)


class _HeadEntropyNode(torch.autograd.Function):
    """The autograd node of the entropy of heads together: it saves their norm, and recomputes the weights."""

    @staticmethod
    def forward(ctx: Any, spec: Any, groups: int, *tensors: Tensor) -> Tensor:
        from ...engines.triton import head_rows_pass as kernels

        def compute() -> tuple[Tensor, Tensor]:
            matrix = _head_inputs(kernels, groups, *unflatten(spec, list(tensors)))
            return kernels.entropy(matrix), matrix.norm

        value, norm = without_autocast(tensors[0], compute)
        ctx.spec, ctx.groups, ctx.count = spec, groups, len(tensors)
        ctx.save_for_backward(*tensors, norm)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from ...engines.triton import head_rows_pass as kernels

        need_first_order()
        *tensors, norm = ctx.saved_tensors
        problem, _, shares = unflatten(ctx.spec, tensors)

        def compute() -> tuple[Tensor, Tensor]:
            return kernels.entropy_backward(_head_inputs(kernels, ctx.groups, problem, norm, shares), grad)

        grads = [g.to(x.dtype) for g, x in zip(without_autocast(grad, compute), tensors, strict=False)]
        of_rest = [None] * (ctx.count - 2)
        return (
            None,
            None,
            *(g if need else None for g, need in zip(grads, ctx.needs_input_grad[2:4], strict=True)),
            *of_rest,
        )


# Heads together, and another matrix.


def _compare_heads(heads: HeadRows, other: ScoreRows | None, measure: str, *, divided: bool) -> Tensor | None:
    rows = heads.heads
    if not isinstance(rows, ScoreRows) or heads.shares is None:
        return None
    problem, second = rows.problem, None if other is None else other.problem
    constant = not torch.is_grad_enabled() or not any(t.requires_grad for t in flatten(heads)[1])
    # A sink is an outcome of a comparison, but for rows that are divided by what they put on keys.
    if not constant or (problem.sink is not None and not divided) or heads.shape[0] != rows.shape[0]:
        return None
    if second is not None and (not _only_queries_and_keys(second) or second.shape[1] not in (1, heads.shape[1])):
        return None
    kernels = _kernels_with_heads(problem)
    if not kernels.serves_heads(problem, second, heads.shape[1]):
        return None
    shares = heads.shares.with_totals() if _on_cpu(problem) else heads.shares.normalized()
    if second is None or not torch.is_grad_enabled() or not any(t.requires_grad for t in flatten(second)[1]):
        args = (problem, rows.norm, shares, heads.shape[1], second, measure, divided)
        value, *_ = _measure_heads(*args)
        return value
    spec, tensors = flatten((problem, rows.norm, shares, second))
    return _HeadComparisonNode.apply(spec, heads.shape[1], measure, divided, *tensors)


def _kernels_with_heads(problem: Problem) -> Any:
    """The module that compares heads together with another matrix on their device."""
    if _on_cpu(problem):
        return head_rows
    from ...engines.triton import indexer_pass

    return indexer_pass


def _measure_heads(problem: Problem, *args: Any) -> list[Tensor]:
    """The measure of heads together and what its backward needs; on a GPU a call that comes again is replayed."""
    spec, tensors = flatten((problem, args))

    def compute() -> list[Tensor]:
        value, saved = _kernels_with_heads(problem).forward_pass(problem, *args)
        return [value, *saved]

    return without_autocast(problem.q, lambda: replay_or_record(("heads", spec), tensors, compute))


def _differentiate_heads(problem: Problem, *args: Any) -> list[Tensor]:
    """Gradients of the queries and keys of the other matrix."""
    spec, tensors = flatten((problem, args))
    kernels = _kernels_with_heads(problem)
    return without_autocast(
        problem.q,
        lambda: replay_or_record(("heads, backward", spec), tensors, lambda: list(kernels.backward(problem, *args))),
    )


class _HeadComparisonNode(torch.autograd.Function):
    """The autograd node of a measure from heads together, which get no gradient, to another matrix, which does."""

    @staticmethod
    def forward(ctx: Any, spec: Any, heads: int, measure: str, divided: bool, *tensors: Tensor) -> Tensor:
        problem, norm, shares, other = unflatten(spec, list(tensors))
        value, *saved = _measure_heads(problem, norm, shares, heads, other, measure, divided)
        ctx.spec, ctx.divided, ctx.count = spec, divided, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_first_order()
        saved = list(ctx.saved_tensors)
        tensors, rest = saved[: ctx.count], saved[ctx.count :]
        problem, _, shares, other = unflatten(ctx.spec, tensors)
        grads = _differentiate_heads(problem, shares, other, ctx.divided, tuple(rest), grad)
        outputs: list[Tensor | None] = [None] * ctx.count
        first = ctx.count - len(flatten(other)[1])
        for n, g in zip((first, first + 1), grads, strict=True):
            outputs[n] = g.to(tensors[n].dtype) if ctx.needs_input_grad[4 + n] else None
        return None, None, None, None, *outputs
