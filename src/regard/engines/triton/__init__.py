"""The engine for NVIDIA GPUs: the statistics of the weights at the speed of fused attention.

Device code is in `kernels` (Triton) and `hopper` (Gluon, for Hopper GPUs and the most common requests). Host code:
`mask_args` (the mask as kernel arguments), `kernel_inputs` (a problem as kernel arguments), `tile_config` (tile sizes by
shape), `forward_pass`, `decode_pass`, `short_pass`, `topk_pass`, `backward_pass`, `comparison_pass`, `head_rows_pass`, `indexer_pass`,
`tile_pool_pass` and `profile_pass` (which kernels run, and on what), `launcher` (cached launches).
Triton is imported when the engine first computes.

Supported: dot, scaled, cosine, Gaussian, bilinear and additive scores with bias, ALiBi, softcap and sink; all masks; bf16,
fp16 and fp32; d up to 256 and any e; topk up to 64. `blockwise` computes the rest: float64, functions of the user, gradients of
values with e above 256.
A finite score below −1e22 counts as hidden: a row without any other score sees no key.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

from ...core.problem import Factors, Problem, repeat_kv
from ...core.stats import ONE_PASS, SECOND_PASS, Request, Results
from ...core.torch_state import in_functorch
from .. import blockwise
from ..score_grad import InputGrads, ScoreGrad

__all__ = ["ENGINE", "unsupported_reason"]

MAX_SIZE = 256
MAX_TOPK = 64
#: Similarities that the kernels compute, by `SimilarityKernel.kernel_op`.
SIMILARITY_OPS = ("product", "tanh_sum")
#: Modifiers that the kernels compute (`kernels.tile_ops.apply_score_mods`), by `Modifier.kernel_op`.
MODIFIER_OPS = ("bias", "bias_rows", "bias_keys", "alibi", "softcap")


class CannotServe(NotImplementedError):
    """The engine does not support the request; the message names one that does."""


def unsupported_reason(problem: Problem, request: Request) -> str | None:
    """Why this engine does not support a request; None where it does."""
    if not _installed():
        return "Triton is not installed (it comes with PyTorch's CUDA builds for Linux)"
    if problem.q.device.type != "cuda" and not _interpreted():
        return f"it needs tensors on an NVIDIA GPU, and these are on {problem.q.device}"
    if (old := _too_old()) is not None:
        return f"its kernels need Triton 3.5 (PyTorch 2.9) or later, and {old} is installed"
    if in_functorch():
        return "inside torch.func tensors have no address"
    if problem.compute_dtype == torch.float64:
        return "it computes bfloat16, float16 and float32, and these are float64"
    if problem.similarity_kernel.kernel_op is None:
        return "a similarity of your own is a Python function, and its kernels take none"
    if problem.similarity_kernel.kernel_op not in SIMILARITY_OPS:
        return f"its kernels have no code for {problem.similarity_kernel.kernel_op}"
    ops = [modifier.kernel_op for modifier in problem.modifiers]
    if None in ops:
        return "modify(f) is a Python function, and its kernels take none"
    if missing := [op for op in ops if op not in MODIFIER_OPS]:
        return f"its kernels have no code for {missing[0]}"
    if problem.similarity_kernel.kernel_op == "product" and problem.q.shape[-1] > MAX_SIZE:
        return f"its tiles hold sizes up to {MAX_SIZE}, and q and k have {problem.q.shape[-1]}"
    if missing := [name for name in request.names if name in ONE_PASS and name not in _forward_outputs()]:
        return f"its kernels have no code for {missing[0]}"
    if request.topk > MAX_TOPK:
        return f"it keeps up to {MAX_TOPK} keys a row, got topk({request.topk})"
    return _mask_too_large(problem)


def _mask_too_large(problem: Problem) -> str | None:
    _, _, i, j = problem.shape
    if problem.mask is None or i * j <= 2**28:
        return None
    leaves = problem.mask.leaves()
    if any(leaf.is_function for leaf in leaves) and not any(leaf.dense_parts() for leaf in leaves):
        return f"a mask function would be written out as {i} × {j} flags"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _forward_outputs() -> frozenset[str]:
    """Results of the pass over the keys that the kernels compute."""
    from .kernels.forward import Outputs

    return frozenset((*Outputs._fields, "topk_scores", "topk_indices"))


@lru_cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def _too_old() -> str | None:
    """The version of a Triton without `constexpr_function`, by which the kernels know what they compute."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a folder on the path
        return None
    return version if tuple(map(int, version.split(".")[:2])) < (3, 5) else None


class Triton:
    """The engine of this package."""

    name = "triton"
    plain = False
    avoids_gpu_kernels = False
    #: The gradient of y stays in its own dtype, and `row_dot` computes its part of delta.
    keeps_grad_dtype = True

    def prepare(self, factors: Factors) -> Problem:
        return factors.problem()

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ_e a b of every row in float32: (b, h, i, e) twice to (b, h, i)."""
        from . import backward_pass

        return backward_pass.row_dot(a, b)

    def compute(self, problem: Problem, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        _check(problem, request)
        if request.wants("cells"):  # the norm must come from the same product, not from the kernels
            return blockwise.ENGINE.compute(problem, request, ("norm", "cells"), {})
        if 0 in (*problem.shape, problem.q.shape[-1]):
            return blockwise.ENGINE.compute(problem, request, names, cached)
        return _compute(problem, request, names, cached)

    def free_outputs(self, problem: Problem, request: Request) -> tuple[str, ...]:
        return "norm", "lse", "max_score", "entropy"

    def backward(
        self, problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]
    ) -> InputGrads:
        _check(problem, request)
        wide = gradient.dy is not None and gradient.dy.shape[-1] > MAX_SIZE
        if wide or request.wants("cells") or 0 in (*problem.shape, problem.q.shape[-1]):
            return blockwise.ENGINE.backward(problem, request, norm, _upcast(gradient, problem.compute_dtype), needs)
        return _backward(problem, request, norm, gradient, needs)


ENGINE = Triton()


def _upcast(gradient: ScoreGrad, wide: torch.dtype) -> ScoreGrad:
    """The gradient in the dtype in which plain PyTorch engines compute."""
    dy = None if gradient.dy is None else gradient.dy.to(wide)
    return dataclasses.replace(gradient, left=gradient.left.to(wide), right=gradient.right.to(wide), dy=dy)


def _check(problem: Problem, request: Request) -> None:
    if (reason := unsupported_reason(problem, request)) is not None:
        raise CannotServe(f'engine="triton" cannot serve this: {reason}. engine="blockwise" can.')


def _compute(problem: Problem, request: Request, names: tuple[str, ...], cached: Results) -> Results:
    from . import decode_pass, forward_pass, short_pass, topk_pass
    from .kernel_inputs import KernelInputs

    first = tuple(n for n in names if n in ONE_PASS and not n.startswith("top"))
    second = tuple(n for n in names if n in SECOND_PASS)
    if second and "norm" not in cached and "norm" not in first:
        first = (*first, "norm")
    top = request.topk if any(n.startswith("top") for n in names) else 0
    p = KernelInputs(problem)
    splits = decode_pass.splits_keys(p)
    if (top or second) and "norm" in cached and not splits:
        cached = cached | {"norm": forward_pass.norm_of_product(p, cached["norm"])}
    results = dict(cached)
    if splits:
        stored = decode_pass.stores_scores(p) and (top > 0 or "received" in second)
    else:
        stored = top > 0 and short_pass.serves(p, top, request.v if "y" in first else None)
    if stored:
        return results | _from_scores(problem, request, first, second, top, cached)
    with_tile_maxima = top > 0 and topk_pass.uses_candidates(problem, top)
    if first or with_tile_maxima:
        results |= _first_pass(problem, request, first, with_tile_maxima, by_parts=not (top or second))
    if top:
        results |= topk_pass.topk(problem, top, results.pop("tile_maxima", None), results.get("norm"))
    if second:
        results |= _second_pass(problem, request, second, results["norm"])
    return results


def _from_scores(
    problem: Problem, request: Request, first: tuple[str, ...], second: tuple[str, ...], top: int, cached: Results
) -> Results:
    """Few rows or few keys: columns and the largest are taken from scores that the first pass stores, or in one walk over few keys."""
    from . import decode_pass, short_pass
    from .kernel_inputs import KernelInputs

    p = KernelInputs(problem)
    splits = decode_pass.splits_keys(p)
    if not splits and short_pass.serves_by_chunks(p, top):
        first = first if "norm" in (*first, *cached) else (*first, "norm")
        results = cached | (_first_pass(problem, request, first, by_parts=False) if first else {})
        results |= short_pass.by_chunks(problem, top, results["norm"], "received" in second)
        return results | _other_columns(problem, request, second, results["norm"])
    results = cached | _first_pass(problem, request, first, store=True, by_parts=False)
    scores = results.pop("scores")
    if not splits:
        results |= short_pass.from_scores(problem, top, scores, results.get("norm"), "received" in second)
    elif top:
        results |= decode_pass.topk(problem, top, scores, results.get("norm"))
    if "received" in second and "received" not in results:
        results["received"] = decode_pass.received(problem, scores, results["norm"])
    return results | _other_columns(problem, request, second, results.get("norm"))


def _other_columns(problem: Problem, request: Request, second: tuple[str, ...], norm: Tensor | None) -> Results:
    """Results of the second pass other than what a key receives."""
    others = tuple(n for n in second if n != "received")
    return _second_pass(problem, request, others, norm) if others and norm is not None else {}


def _first_pass(
    problem: Problem, request: Request, names: tuple[str, ...], with_tile_maxima: bool = False, store: bool = False,
    by_parts: bool = True,
) -> Results:  # fmt: skip
    from . import decode_pass, forward_pass
    from .kernel_inputs import KernelInputs

    def forward(names: tuple[str, ...], v: Tensor | None, keys: Tensor | None, first: bool = True) -> Results:
        if decode_pass.splits_keys(KernelInputs(problem)):
            return decode_pass.forward(problem, names, v, keys, store and first)
        return forward_pass.forward(problem, names, v, keys, with_tile_maxima and first, store and first, by_parts)

    keys = None if request.keys is None else request.keys.float().view(1, 1, 1, -1)
    v = request.v if "y" in names else None
    if v is None:
        return forward(names, None, keys)
    if v.shape[-1] == 1 and "mass" not in names:
        # One number a key: summed in float32 as `mass`, without a product.
        renamed = tuple("mass" if n == "y" else n for n in names)
        results = forward(renamed, None, _as_key_mass(v, problem.shape))
        results["y"] = results.pop("mass").unsqueeze(-1)
        return results
    parts = [
        forward(*((names, part, keys) if n == 0 else (("y",), part, None, False)))
        for n, part in enumerate(v.split(MAX_SIZE, -1))
    ]
    return {**parts[0], "y": torch.cat([part["y"] for part in parts], -1) if len(parts) > 1 else parts[0]["y"]}


def _second_pass(problem: Problem, request: Request, names: tuple[str, ...], norm: Tensor) -> Results:
    from . import forward_pass

    if "z" not in names or request.u is None:
        return forward_pass.column_pass(problem, names, norm, None, request.tiling)
    parts = [
        forward_pass.column_pass(
            problem, *((names, norm, part, request.tiling) if n == 0 else (("z",), norm, part, None))
        )
        for n, part in enumerate(request.u.split(MAX_SIZE, -1))
    ]
    return {**parts[0], "z": torch.cat([part["z"] for part in parts], -1) if len(parts) > 1 else parts[0]["z"]}


def _as_key_mass(v: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Values (b|1, g, j, 1) as key masses (b|1, h|1, 1, j)."""
    return (v.float() if v.shape[1] == 1 else repeat_kv(v.float(), shape[1])).mT


def _backward(problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]) -> InputGrads:
    from . import backward_pass

    first, dv = backward_pass.backward(problem, request.v, norm, gradient)
    # In the order of `flatten`: q, k, the similarity's tensor, that of each modifier that has one, the sink; masks have none.
    grads: list[Tensor | None] = [x if need else None for x, need in zip(first, needs, strict=False)]
    for n, step in enumerate(problem.modifiers):
        if step.operand is not None:
            wanted = needs[len(grads)]
            grads.append(backward_pass.modifier_grad(problem, n, request.v, norm, gradient) if wanted else None)
    if problem.sink is not None:
        grads.append(gradient.of_sink(problem.sink, norm) if needs[len(grads)] else None)
    grads += [None] * (len(needs) - len(grads))
    du = None
    if gradient.dz is not None:
        du = _compute(problem, Request(("y",), v=gradient.dz), ("y",), {})["y"]
    return InputGrads(grads, dv, du)
