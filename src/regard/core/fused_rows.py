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

from ..engines.numba import comparison as compiled
from .comparison import Comparison
from .problem import Problem
from .pytree import flatten, unflatten
from .row_sources import RowSource, ScoreRows
from .strips import Question, need_first_order
from .torch_state import in_functorch, is_tracing, without_autocast

__all__ = ["fused"]


def fused(sources: Sequence[RowSource], question: Question) -> list[Tensor] | None:
    """The outputs of a question by kernels; None where strips must answer it."""
    if not isinstance(question, Comparison) or is_tracing() or in_functorch():
        return None
    first, second = sources
    if not isinstance(first, ScoreRows) or not isinstance(second, ScoreRows):
        return None
    problems = first.problem, second.problem
    if not _served(problems):
        return None
    spec, tensors = flatten(problems)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        value, *_ = without_autocast(tensors[0], lambda: _kernels(problems).forward_pass(problems, question.measure))
        return [value]
    return [_ComparisonNode.apply(spec, question.measure, *tensors)]


def _served(problems: tuple[Problem, Problem]) -> bool:
    """Whether kernels compute both matrices, and gradients of nothing but queries and keys are wanted."""
    if torch.is_grad_enabled():
        for problem in problems:
            if any(t.requires_grad for t in flatten(problem.modifiers)[1]):
                return False
            if sum(not modifier.additive for modifier in problem.modifiers) > 1:
                return False
    return _kernels(problems).serves_pair(problems)


def _kernels(problems: tuple[Problem, Problem]) -> Any:
    """The module that compares two matrices on their device."""
    if problems[0].q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return compiled
    from ..engines.triton import comparison_pass

    return comparison_pass


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
