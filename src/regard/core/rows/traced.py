"""Questions about complete rows inside torch.compile: one operator in the graph, and one for its gradients.

Their arguments are flat lists of tensors and ints, and the rest of the tree as text. A question that holds a user's
function has no text form; Dynamo then traces the walk itself and breaks the graph where it reads a number.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..pytree import flatten, has_text, split_ints, unflatten
from .fused import fused
from .sources import RowSource
from .strips import Question, joint_shape, walk_strips

__all__ = ["answer", "traced"]


def answer(sources: Sequence[RowSource], question: Question) -> list[Tensor]:
    """The outputs of a question, by kernels where they serve."""
    return fused(sources, question) or list(walk_strips(sources, question))


def traced(sources: Sequence[RowSource], question: Question) -> list[Tensor] | None:
    """The outputs as a part of a graph; None where the question has no text form."""
    spec, tensors = flatten((tuple(sources), question))
    spec, ints = split_ints(spec)
    if not has_text(spec):
        return None
    return torch.ops.regard.rows(tensors, ints, repr(spec))


def _parsed(tensors: Sequence[Tensor], ints: Sequence[int], spec: str) -> tuple[tuple[RowSource, ...], Question]:
    return unflatten(ast.literal_eval(spec), list(tensors), list(ints))


# The schemas are spelt out: torch 2.6 cannot infer them from list[Tensor].
@torch.library.custom_op(
    "regard::rows", mutates_args=(), schema="(Tensor[] tensors, SymInt[] ints, str spec) -> Tensor[]"
)
def _rows(tensors: list[Tensor], ints: list[int], spec: str) -> list[Tensor]:
    with torch.no_grad():
        return answer(*_parsed(tensors, ints, spec))


@_rows.register_fake
def _(tensors: list[Tensor], ints: list[int], spec: str) -> list[Tensor]:
    sources, question = _parsed(tensors, ints, spec)
    return question.totals(joint_shape(sources), sources[0].like)


@torch.library.custom_op(
    "regard::rows_backward", mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] ints, str spec, Tensor[] grads, bool[] has_grad, bool[] needs) -> Tensor[]",
)  # fmt: skip
def _rows_backward(
    tensors: list[Tensor], ints: list[int], spec: str, grads: list[Tensor], has_grad: list[bool], needs: list[bool]
) -> list[Tensor]:
    """Gradients of the tensors that need one: the forward is computed again, which stores a few numbers a row."""
    inputs = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    with torch.enable_grad():
        outputs = answer(*_parsed(inputs, ints, spec))
    outputs = [x for x, has in zip(outputs, has_grad, strict=True) if has]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
    results = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.contiguous() for g, t in zip(results, wanted, strict=True)]


@_rows_backward.register_fake
def _(
    tensors: list[Tensor], ints: list[int], spec: str, grads: list[Tensor], has_grad: list[bool], needs: list[bool]
) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, need in zip(tensors, needs, strict=True)
        if need
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.ints, ctx.spec = inputs
    ctx.save_for_backward(*tensors)
    ctx.floats = [x.is_floating_point() for x in output]


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    tensors = list(ctx.saved_tensors)
    needs = [bool(need) and t.is_floating_point() for need, t in zip(ctx.needs_input_grad[0], tensors, strict=True)]
    has_grad = [g is not None and real for g, real in zip(grads, ctx.floats, strict=True)]
    with_grad = [g for g, has in zip(grads, has_grad, strict=True) if g is not None and has]
    results = iter(torch.ops.regard.rows_backward(tensors, ctx.ints, ctx.spec, with_grad, has_grad, needs))
    return [next(results) if need else None for need in needs], None, None


_rows.register_autograd(_differentiate, setup_context=_save)
