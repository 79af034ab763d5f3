"""Compiled tiles in float32 and float64: their exp and tanh, and float64 as exact as the textbook."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.engines import numba as tiles

pytestmark = pytest.mark.skipif(tiles.load() is None, reason="no compiled tiles on this machine")

DTYPES = [torch.float32, torch.float64]


def mapped(name: str, x: Tensor) -> Tensor:
    """A function of the kernels' intrinsics, of every number."""
    from numba import njit

    from regard.engines.numba.kernels import intrinsics

    function = getattr(intrinsics, name)

    @njit
    def run(x, y):
        for n in range(len(x)):
            y[n] = function(x[n])

    y = torch.empty_like(x)
    run(x.numpy(), y.numpy())
    return y


def worst_ulp(values: Tensor, exact: list[float]) -> float:
    """The largest error, in units in the last place of each value."""
    ulp = torch.finfo(values.dtype).eps
    return max(
        abs(value - truth) / (ulp * 2.0 ** (math.frexp(truth)[1] - 1))
        for value, truth in zip(values.tolist(), exact, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exp_is_right_to_two_units_in_the_last_place_and_zero_far_below(dtype: torch.dtype) -> None:
    lowest = -87.0 if dtype == torch.float32 else -708.0
    x = torch.cat([torch.linspace(lowest, 88.0, 20_001, dtype=dtype), torch.linspace(-1, 1, 4_001, dtype=dtype)])
    assert worst_ulp(mapped("exp", x), [math.exp(number) for number in x.tolist()]) <= 2
    ends = torch.tensor([lowest - 1, -1e30, -math.inf, math.nan, 0.0], dtype=dtype)
    assert mapped("exp", ends)[:3].tolist() == [0, 0, 0]
    assert mapped("exp", ends)[3].isnan()
    assert mapped("exp", ends)[4] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tanh_is_right_to_two_units_in_the_last_place(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-20, 20, 20_002, dtype=dtype), torch.logspace(-30, 0, 2_001, dtype=dtype)])
    assert worst_ulp(mapped("tanh", x), [math.tanh(number) for number in x.tolist()]) <= 2


SCORES = {
    "plain": lambda: regard.ScaledDot(),
    "cap and sink": lambda: regard.ScaledDot().softcap(20.0).sink(torch.randn(4, dtype=torch.float64)),
    "bias": lambda: regard.ScaledDot().bias(torch.randn(1, 4, 1, 70, dtype=torch.float64)),
    "alibi": lambda: regard.ScaledDot().alibi(torch.rand(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(5, 3)], ids=repr)
@pytest.mark.parametrize("score", SCORES)
def test_float64_answers_are_those_of_the_textbook(score: str, mask: object, size: float) -> None:
    q, k, v = (torch.randn(2, 4, 70, 24, dtype=torch.float64) for _ in range(3))
    options = {"score": SCORES[score](), "mask": mask}
    answers, truth = (
        regard.weights(q * size, k, engine=engine, **options).see(
            "lse", "max_score", "entropy", "mean_distance", "received", values=v, topk=3
        )
        for engine in ("blockwise", "reference")
    )
    W = regard.weights(q * size, k, engine="blockwise", **options)
    assert "compiled" in W.explain()
    # One rounding of the scores, of which `size` times 10 is the order, reaches every weight.
    bound = 1e-14 * (10 + 10 * size)
    for name in ("lse", "max_score", "entropy", "received", "y"):
        assert getattr(answers, name).dtype == torch.float64
        torch.testing.assert_close(getattr(answers, name), getattr(truth, name), rtol=bound, atol=bound)
    torch.testing.assert_close(answers.mean_distance, truth.mean_distance, rtol=bound, atol=70 * bound)
    torch.testing.assert_close(answers.topk.values, truth.topk.values, rtol=bound, atol=bound)
    sums = W.dense().sum(-1)
    shares = (
        1.0 if score != "cap and sink" else regard.weights(q * size, k, engine="reference", **options).dense().sum(-1)
    )
    assert (sums - shares).abs().max() <= 4e-15 + (bound if score == "cap and sink" else 0)


def test_gradients_of_float64_pass_gradcheck_in_compiled_tiles() -> None:
    q, k, v = (torch.randn(1, 2, 9, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def answers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        seen = regard.weights(
            q, k, score=regard.ScaledDot().softcap(3.0), mask=regard.causal(), engine="blockwise"
        ).see("lse", "entropy", "received", values=v)
        return seen.y, seen.lse, seen.entropy, seen.received

    assert torch.autograd.gradcheck(answers, (q, k, v))
