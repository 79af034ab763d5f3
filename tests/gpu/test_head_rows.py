"""Heads taken together by the triton kernels on a GPU, judged by float64: edges, full tiles, long rows, every way of adding up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.engines.triton import tile_config
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
