"""Heads taken together by the triton kernels on a GPU, judged by float64: edges, full tiles, long rows, every way of adding up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.engines.triton import head_rows_pass, tile_config
from support import head_cases

MASKS: dict[str, Any] = {
    "none": lambda t: None,
    "causal": lambda t: regard.causal(),
    "window": lambda t: regard.window(90, 5),
    "documents": lambda t: regard.documents(torch.arange(t, device="cuda")[None] // 300) & regard.causal(),
}


@pytest.mark.parametrize("name", head_cases.CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_is_that_of_float64(name: str, dtype: torch.dtype) -> None:
    head_cases.judged(name, dtype, "cuda", repeats=3)  # computed, recorded, replayed


@pytest.mark.parametrize("name", list(filter(head_cases.with_gradients, head_cases.CASES)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradients_of_the_entropy_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    head_cases.judged_gradients(name, dtype, "cuda")


@pytest.mark.parametrize("strips", [2**26, 2**20])
@pytest.mark.parametrize(("d", "t", "h", "g"), [(128, 1100, 8, 2), (64, 1024, 4, 4), (256, 400, 2, 1)])
def test_gradients_of_long_rows_are_those_of_float64(
    d: int, t: int, h: int, g: int, strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_rows_pass, "STRIP_NUMBERS", strips)
    leaves = [torch.randn(1, n, t, d, device="cuda").bfloat16() for n in (h, g)]

    def gradients(dtype: torch.dtype, engine: Any) -> tuple[torch.Tensor, ...]:
        x = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        rows = regard.weights(*x, mask=regard.causal(), engine=engine).reduce_heads("mean").entropy()
        return torch.autograd.grad(rows, x, torch.linspace(-1, 2, t, device="cuda", dtype=rows.dtype)[None])

    for got, want in zip(gradients(torch.bfloat16, "auto"), gradients(torch.float64, "reference"), strict=True):
        assert (got - want).norm() <= 2 * 2.0**-8 * want.norm()


def test_a_column_of_float32_is_multiplied_as_rows_that_count_more_or_less() -> None:
    q, u = torch.randn(1, 4, 700, 64, device="cuda").bfloat16(), torch.randn(1, 4, 700, 3, device="cuda")
    u[:, :, 5] = 0
    want = regard.weights(q.double(), mask=regard.causal(), engine="reference").mT @ u.double()
    size = regard.weights(q.double(), mask=regard.causal(), engine="reference").mT @ u.double().abs()
    got = regard.weights(q, mask=regard.causal()).mT @ u
    assert ((got - want).abs() <= 2e-5 * size + 1e-9).all()


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("by", ["mean", "sum", "max"])
@pytest.mark.parametrize(("d", "t", "h", "g"), [(128, 1024, 8, 8), (64, 1100, 6, 2), (80, 700, 5, 1), (256, 600, 4, 4)])
def test_long_rows_are_no_further_from_float64_than_twice_plain_pytorch(
    d: int, t: int, h: int, g: int, by: Any, masks: str, gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gluon:
        monkeypatch.setattr(tile_config, "_runs_gluon", lambda device: False)
    q, k = torch.randn(2, h, t, d, device="cuda").bfloat16(), torch.randn(2, g, t, d, device="cuda").bfloat16()
    mask = MASKS[masks](t)

    def entropy(dtype: torch.dtype, engine: Any) -> torch.Tensor:
        W = regard.weights(q.to(dtype), k.to(dtype), mask=mask, engine=engine)
        return W.reduce_heads(by, groups=1).entropy()

    want, plain = entropy(torch.float64, "reference"), entropy(torch.float32, "reference")
    for _ in range(3):
        got = entropy(torch.bfloat16, "auto")
        assert (got - want).norm() <= 2 * (plain - want).norm() + 2e-6 * want.norm()
        assert (got - want).abs().max() <= 1e-4


def test_the_entropy_of_a_mean_waits_for_the_gpu_nowhere() -> None:
    q = torch.randn(1, 4, 512, 64, device="cuda").bfloat16()
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            regard.weights(q, mask=regard.causal()).reduce_heads("mean").entropy()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_norm_of_the_heads_is_computed_once() -> None:
    W = regard.weights(torch.randn(1, 4, 512, 64, device="cuda").bfloat16(), mask=regard.causal())
    W.reduce_heads("mean").entropy()
    assert "norm" in W._row_results()
