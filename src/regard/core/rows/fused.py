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

from ...engines.numba import comparison as compiled
from ...engines.numba import head_rows, tile_pool
from ...engines.replay import replay_or_record
from ..problem import Problem
from ..pytree import flatten, unflatten
from ..torch_state import in_functorch, is_tracing, without_autocast
from .comparison import Comparison
from .sources import ChosenRows, HeadRows, RowSource, ScoreRows
from .spans import TilePool
from .stats import RowEntropy
from .strips import Question, need_first_order

__all__ = ["fused"]


def fused(sources: Sequence[RowSource], question: Question) -> list[Tensor] | None:
    """The outputs of a question by kernels; None where strips must answer it."""
    if is_tracing() or in_functorch():
        return None
    value = None
    if isinstance(question, Comparison):
        first, second = sources
        if isinstance(second, ScoreRows):
            value = _try_compare(first, second, question.measure)
    elif isinstance(question, RowEntropy) and isinstance(sources[0], HeadRows):
        value = _compare_heads(sources[0], None, "entropy", divided=False)
    elif isinstance(question, TilePool) and isinstance(sources[0], ScoreRows):
        value = _pooled(sources[0], question)
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
    constant = not torch.is_grad_enabled() or not any(t.requires_grad for t in flatten(problem)[1])
    if not constant or len(question.row_edges) < 2 or len(question.col_edges) < 2 or not tile_pool.serves_pool(problem):
        return None
    args = (rows.norm, question.row_edges, question.col_edges, question.by)
    return without_autocast(problem.q, lambda: tile_pool.pooled(problem, *args))


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
    shares = heads.shares.normalized()
    if second is None or not torch.is_grad_enabled() or not any(t.requires_grad for t in flatten(second)[1]):
        args = (problem, rows.norm, shares, heads.shape[1], second, measure, divided)
        value, *_ = _measure_heads(*args)
        # A mean of kernels adds up rounded shares: of heads that are all on one key it may be an ulp above 1.
        return value.clamp(min=0) if measure == "entropy" and heads.shares.total is not None else value
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
