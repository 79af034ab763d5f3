"""Heads taken together, for the kernels that add them up, and a judge: in Triton's interpreter and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard.core.rows import fused

#: Roundoff of the float32 that scores, weights and sums are computed in, whichever type the inputs have.
U = 2.0**-24


class HeadCase(NamedTuple):
    """Lengths, heads, heads of keys, score, mask (of lengths and heads), and how heads are taken together."""

    i: int
    j: int
    h: int
    g: int
    score: str
    mask: Callable[[int, int, int], Any]
    by: str = "mean"
    groups: int | None = None
    weighted: bool = False
    times: float = 1.0  # of queries, a power of two: rounded to 16 bits they must stay what float64 has


#: Those whose entropy has gradients by kernels: sums of heads without a sink.
SMOOTH_SCORES = ("plain", "bias")


def some_cells(i: int, j: int, heads: int) -> Tensor:
    cells = torch.rand(2, heads, i, j, generator=torch.Generator().manual_seed(3)) < 0.7
    cells[..., i // 2, :] = False  # a row with no key
    return cells


CASES: dict[str, HeadCase] = {
    "no mask": HeadCase(40, 40, 3, 3, "plain", lambda i, j, h: None),
    "causal, grouped keys": HeadCase(50, 50, 4, 2, "plain", lambda i, j, h: regard.causal()),
    "causal, full tiles, groups": HeadCase(64, 64, 4, 4, "plain", lambda i, j, h: regard.causal(), groups=2),
    "causal, sum of weighted heads": HeadCase(45, 45, 4, 1, "plain", lambda i, j, h: regard.causal(), "sum", weighted=True),
    "mean of weighted heads": HeadCase(33, 61, 6, 3, "plain", lambda i, j, h: None, groups=3, weighted=True),
    "largest, rows before and after keys": HeadCase(61, 33, 2, 2, "plain", lambda i, j, h: regard.window(9, 2), "max"),
    "window, alibi, sink": HeadCase(60, 60, 2, 2, "alibi", lambda i, j, h: regard.window(20, 3)),
    "cells of each head, softcap and sink": HeadCase(35, 35, 4, 2, "softcap", some_cells, groups=2),
    "cells of all heads": HeadCase(40, 50, 2, 1, "plain", lambda i, j, h: some_cells(i, j, 1)),
    "several intervals, bias": HeadCase(50, 50, 2, 2, "bias", lambda i, j, h: ~regard.window(2, 2)),
    "a sequence without keys, sink": HeadCase(20, 20, 2, 2, "softcap", lambda i, j, h: regard.padding(torch.tensor([20, 0]))),
    "one row over many keys": HeadCase(1, 70, 6, 3, "plain", lambda i, j, h: regard.causal()),
    "one hot": HeadCase(20, 20, 14, 14, "plain", lambda i, j, h: regard.causal(), times=512.0),
}  # fmt: skip


def matrix(
    name: str, dtype: torch.dtype, device: str, *, exact: bool, grad: bool = False
) -> tuple[Any, list[Tensor], float]:
    """Heads taken together, their queries and keys, and the largest score in absolute value."""
    case, make = CASES[name], torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=make).to(dtype).to(device)
        return x.double() if exact else x

    q, k = draw(2, case.h, case.i, 16) * case.times, draw(2, case.g, case.j, 16)
    q, k = (x.requires_grad_(grad) for x in (q, k))
    scores = {
        "plain": lambda: regard.ScaledDot(),
        "alibi": lambda: regard.ScaledDot().alibi(draw(case.h).abs() / 8).sink(draw(case.h)),
        "softcap": lambda: regard.ScaledDot().softcap(2.0).sink(draw(case.h)),
        "bias": lambda: regard.ScaledDot().bias(draw(case.h, case.i, case.j)),
    }
    mask = case.mask(case.i, case.j, case.h)
    mask = mask.to(device) if hasattr(mask, "to") else mask
    align = "start" if case.i > case.j else "end"
    W = regard.weights(
        q, k, score=scores[case.score](), mask=mask, align=align, engine="reference" if exact else "auto"
    )
    weights = torch.arange(case.h, device=device) / 2 if case.weighted else None
    largest = (q.double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax() / 4).item()
    return W.reduce_heads(case.by, groups=case.groups, weights=weights), [q, k], largest


def answers(matrix: Any, v: Tensor) -> dict[str, Tensor]:
    """What the kernels answer: the entropy by a kernel of its own, the rest from tiles."""
    return {
        "entropy": matrix.entropy(), "topk": matrix.topk(3).values, "product": matrix @ v.to(matrix.dtype),
    }  # fmt: skip


def judged(name: str, dtype: torch.dtype, device: str = "cpu", repeats: int = 1) -> None:
    """Every number within its bound: a weight is exp of a score, a product over d whose rounding its largest size bounds."""
    exact, _, largest = matrix(name, dtype, device, exact=True)
    v = torch.rand(CASES[name].j, 3, dtype=torch.float64, device=device)
    want, w = answers(exact, v), exact.dense()
    r = (16 + 8 * largest) * U
    logs = (w * torch.where(w > 0, w, 1).log().abs()).sum(-1)
    total = w.sum(-1)
    slack = {"entropy": r * (total + logs) + U, "product": r * total.unsqueeze(-1) + U}
    by_kernels: list[bool] = []
    kernels, fused._kernels_of_heads = fused._kernels_of_heads, lambda heads: _seen(by_kernels, kernels(heads))
    try:
        for _ in range(repeats):
            mine, _, _ = matrix(name, dtype, device, exact=False)
            for what, got in answers(mine, v).items():
                limit = slack.get(what, r * want[what] + 4 * U)
                off = (got.double() - want[what]).abs() - limit
                at = int(off.argmax())
                assert bool((off <= 0).all()), (
                    f"{name}: {what} {at} is {got.flatten()[at]}, must be {want[what].flatten()[at]} ± {limit.flatten()[at]}"
                )
                if what == "entropy" and CASES[name].by == "mean":
                    assert bool((got >= 0).all()), f"{name}: an entropy below 0, {got.min()}"
    finally:
        fused._kernels_of_heads = kernels
    assert False not in (by_kernels or [False]), f"{name}: strips answered"


def _seen(by_kernels: list[bool], kernels: Any) -> Any:
    by_kernels.append(kernels is not None)
    return kernels


def judged_gradients(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """The gradients of the entropy of a case: within the rounding of ds to the inputs' type, and that of the scores."""

    def gradients(exact: bool) -> tuple[Tensor, ...]:
        together, leaves, _ = matrix(name, dtype, device, exact=exact, grad=True)
        rows = together.entropy()
        seed = torch.linspace(-1, 2, rows.numel(), dtype=rows.dtype, device=device).reshape(rows.shape)
        return torch.autograd.grad(rows, leaves, seed)

    largest = matrix(name, dtype, device, exact=True)[2]
    limit = 2 * torch.finfo(dtype).eps + (16 + 8 * largest) * U
    for what, got, want in zip(("queries", "keys"), gradients(False), gradients(True), strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error <= limit, f"{name}: the gradient of {what} is off by {error:.2g} of its norm"


def with_gradients(name: str) -> bool:
    return CASES[name].by != "max" and CASES[name].score in SMOOTH_SCORES
