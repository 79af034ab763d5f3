"""NVIDIA GPUs: the statistics of the weights at the speed of fused attention.

Rooms of kernels: `tiles` (words for tile operations), `tables` (which tiles are seen), `forward` (one pass over the keys),
`reread` (a second pass over the columns), `top` (the largest of a row), `backward`, `additive`; `parted`, `parted_keys` and
`ahead` are the forward pass, the gradient of keys and the second pass once more, for Hopper and what is asked most. Rooms that call
them: `form` (the mask), `prepared` (a problem as kernels take it), `configuration` (tile sizes by shape), `launch`, `largest` and
`flow` (the passes), `start` (one launch). Triton is imported when the engine first computes, never before.

Served: dot, scaled, cosine, Gaussian, bilinear and additive scores with bias, ALiBi, softcap and sink; all masks; bf16,
fp16 and fp32; d up to 256 and any e; top n up to 64. Not served, and computed by `blockwise`: float64, users' functions,
gradients of additive scores and of values with e above 256.
A finite score below −1e22 counts as hidden here: a row that has no other sees nothing.
Imports `factors`, `statistics`, `blockwise`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...around import transformed
from ...factors import Problem
from ...score import Alibi, Bias, Function, Modify, TanhSum
from ...statistics import ONE_PASS, SECOND_PASS, Answers, Question
from .. import blockwise
from ..gradient import Gradient, Gradients

__all__ = ["ENGINE", "why_not"]

LARGEST = 256
MOST_TOP = 64


class CannotServe(NotImplementedError):
    """What was asked is beyond this engine; the message names one that serves."""


def why_not(problem: Problem, question: Question) -> str | None:
    """The reason why this engine cannot serve; None where it can."""
    if not _installed():
        return "Triton is not installed (it comes with PyTorch's CUDA builds for Linux)"
    if problem.q.device.type != "cuda" and not _interpreted():
        return f"it needs tensors on an NVIDIA GPU, and these are on {problem.q.device}"
    if transformed():
        return "inside torch.func tensors have no address"
    if problem.wide == torch.float64:
        return "it computes bfloat16, float16 and float32, and these are float64"
    if isinstance(problem.pair, Function):
        return "a similarity of your own is a Python function, and its kernels take none"
    if any(isinstance(step, Modify) for step in problem.steps):
        return "modify(f) is a Python function, and its kernels take none"
    if not isinstance(problem.pair, TanhSum) and problem.q.shape[-1] > LARGEST:
        return f"its tiles hold sizes up to {LARGEST}, and q and k have {problem.q.shape[-1]}"
    if question.top > MOST_TOP:
        return f"it keeps up to {MOST_TOP} keys a row, and top({question.top}) was asked"
    return _too_many_flags(problem)


def _too_many_flags(problem: Problem) -> str | None:
    from ...mask import Dense, Mask, Predicate

    def any_of(mask: Any, kind: type) -> bool:
        parts = [part for part in vars(mask).values() if isinstance(part, Mask)] if mask is not None else []
        return isinstance(mask, kind) or any(any_of(part, kind) for part in parts)

    _, _, i, j = problem.shape
    if i * j > 2**28 and any_of(problem.mask, Predicate) and not any_of(problem.mask, Dense):
        return f"a mask function would be written out as {i} × {j} flags"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class Triton:
    """The engine of this folder."""

    name = "triton"
    #: The gradient of y is taken in its own type, and `row_dot` makes its share of c.
    narrow = True

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ_e a b of every row in float32: (b, h, i, e) twice to (b, h, i)."""
        from . import flow

        return flow.row_dot(a, b)

    def compute(self, problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
        _check(problem, question)
        if 0 in (*problem.shape, problem.q.shape[-1]):
            return blockwise.ENGINE.compute(problem, question, names, known)
        return _compute(problem, question, names, known)

    def backward(
        self, problem: Problem, question: Question, norm: Tensor, gradient: Gradient, needs: list[bool]
    ) -> Gradients:
        _check(problem, question)
        wide = gradient.dy is not None and gradient.dy.shape[-1] > LARGEST
        if 0 in (*problem.shape, problem.q.shape[-1]) or isinstance(problem.pair, TanhSum) or wide:
            return blockwise.ENGINE.backward(problem, question, norm, _widened(gradient, problem.wide), needs)
        return _backward(problem, question, norm, gradient, needs)


ENGINE = Triton()


def _widened(gradient: Gradient, wide: torch.dtype) -> Gradient:
    """As engines in plain PyTorch take it."""
    dy = None if gradient.dy is None else gradient.dy.to(wide)
    return dataclasses.replace(gradient, left=gradient.left.to(wide), right=gradient.right.to(wide), dy=dy)


def _check(problem: Problem, question: Question) -> None:
    if (reason := why_not(problem, question)) is not None:
        raise CannotServe(f'engine="triton" cannot serve this: {reason}. engine="blockwise" can.')


def _compute(problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
    from . import largest

    answers = dict(known)
    first = tuple(n for n in names if n in ONE_PASS and not n.startswith("top"))
    second = tuple(n for n in names if n in SECOND_PASS)
    if second and "norm" not in known and "norm" not in first:
        first = (*first, "norm")
    top = question.top if any(n.startswith("top") for n in names) else 0
    best = top > 0 and largest.by_ballot(problem, top)
    if first or best:
        answers |= _first_pass(problem, question, first, best)
    if top:
        answers |= largest.top(problem, top, answers.pop("bests", None), answers.get("norm"))
    if second:
        answers |= _second_pass(problem, question, second, answers["norm"])
    return answers


def _first_pass(problem: Problem, question: Question, names: tuple[str, ...], best: bool = False) -> Answers:
    from . import launch

    keys = None if question.keys is None else question.keys.float().view(1, 1, 1, -1)
    v = question.v if "y" in names else None
    if v is None:
        return launch.forward(problem, names, None, keys, best)
    if v.shape[-1] == 1 and "mass" not in names:
        # One number a key: added up in float32 on the way, no product.
        renamed = tuple("mass" if n == "y" else n for n in names)
        found = launch.forward(problem, renamed, None, _one_a_key(v, problem.shape), best)
        found["y"] = found.pop("mass").unsqueeze(-1)
        return found
    parts = [
        launch.forward(problem, *((names, part, keys, best) if n == 0 else (("y",), part, None)))
        for n, part in enumerate(v.split(LARGEST, -1))
    ]
    return {**parts[0], "y": torch.cat([part["y"] for part in parts], -1) if len(parts) > 1 else parts[0]["y"]}


def _second_pass(problem: Problem, question: Question, names: tuple[str, ...], norm: Tensor) -> Answers:
    from . import launch

    if "z" not in names or question.u is None:
        return launch.reread(problem, names, norm, None, question.tiling)
    parts = [
        launch.reread(problem, *((names, norm, part, question.tiling) if n == 0 else (("z",), norm, part, None)))
        for n, part in enumerate(question.u.split(LARGEST, -1))
    ]
    return {**parts[0], "z": torch.cat([part["z"] for part in parts], -1) if len(parts) > 1 else parts[0]["z"]}


def _one_a_key(v: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """(b|1, g, j, 1) as numbers (b|1, h|1, 1, j)."""
    heads = v.shape[1]
    v = v.float() if heads in (1, shape[1]) else v.float().repeat_interleave(shape[1] // heads, 1)
    return v.mT


def _backward(problem: Problem, question: Question, norm: Tensor, gradient: Gradient, needs: list[bool]) -> Gradients:
    from . import flow

    dq, dk, dv = flow.backward(problem, question.v, norm, gradient)
    # In the order of `flatten`: q, k, one tensor a step that has one, the sink; masks have no gradients.
    grads: list[Tensor | None] = [dq if needs[0] else None, dk if needs[1] else None]
    for n, step in enumerate(problem.steps):
        if isinstance(step, Bias | Alibi):
            wanted = needs[len(grads)]
            grads.append(flow.step_gradient(problem, n, question.v, norm, gradient) if wanted else None)
    if problem.sink is not None:
        grads.append(gradient.of_sink(problem.sink, norm) if needs[len(grads)] else None)
    grads += [None] * (len(needs) - len(grads))
    du = None
    if gradient.dz is not None:
        du = _compute(problem, Question(("y",), v=gradient.dz), ("y",), {})["y"]
    return Gradients(grads, dv, du)
