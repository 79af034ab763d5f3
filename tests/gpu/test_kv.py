"""Scores of a cache by the triton kernels on a GPU, judged by float64."""

from __future__ import annotations

import pytest
import torch

import regard

WINDOW = 16


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return regard.kv.snapkv(regard.weights(q, k, mask=regard.causal(), align="end"), WINDOW)


def inputs(t: int) -> list[torch.Tensor]:
    return [torch.randn(1, heads, n, 64, device="cuda").bfloat16() for heads, n in ((8, WINDOW), (2, t))]


@pytest.mark.parametrize("t", [200, 4096])
def test_snapkv_scores_are_those_of_float64(t: int) -> None:
    q, k = inputs(t)
    want = scores(q.double(), k.double())
    for _ in range(3):  # computed, recorded, replayed
        torch.testing.assert_close(scores(q, k).double(), want, rtol=5e-5, atol=2e-7)


def test_snapkv_scores_wait_for_the_gpu_nowhere() -> None:
    """The number above all others came from the host, which waited for every kernel before it."""
    q, k = inputs(1024)
    for _ in range(3):
        scores(q, k)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores(q, k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
