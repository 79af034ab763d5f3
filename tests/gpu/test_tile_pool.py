"""Tiles of the matrix by the triton kernels on a GPU, judged by float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from support import tile_pool_cases

QUESTIONS: dict[str, Callable[[regard.Weights], Tensor]] = {
    "max": lambda W: W.pool(64, 64, by="max"),
    "lse": lambda W: W.pool(64, 64, by="lse"),
    "blocks": lambda W: W.pool_blocks(128, 64, by="max"),
    "small blocks": lambda W: W.pool_blocks(16, 16, by="lse"),
    "part": lambda W: W.pool(31, 17, slice(100, 900), slice(50, 777), by="max"),
    "segments": lambda W: W.segment_mass(torch.arange(W.shape[-1], device="cuda") * 64 // W.shape[-1]),
}


@pytest.mark.parametrize("name", tile_pool_cases.CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    tile_pool_cases.judged(name, dtype, "cuda")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(("t", "d"), [(2048, 128), (1000, 64), (1024, 256)])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(300, 20)])
def test_long_sequences_have_the_tiles_of_float64(question: str, t: int, d: int, mask: regard.Mask | None) -> None:
    q, k = (torch.randn(1, heads, t, d, device="cuda").bfloat16() for heads in (4, 2))
    right = QUESTIONS[question](regard.weights(q.double(), k.double(), mask=mask, engine="blockwise"))
    for _ in range(3):  # computed, recorded, replayed
        mine = QUESTIONS[question](regard.weights(q, k, mask=mask))
        torch.testing.assert_close(mine.double(), right, rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("pool", [(64, 64), (16, 64), (64, 7), (63, 64), (5, 7, slice(9, 500), slice(30, 401))])
@pytest.mark.parametrize(("t", "d"), [(512, 64), (1024, 128)])
def test_maps_of_low_and_of_uneven_tiles_are_those_of_float64(t: int, d: int, pool: tuple) -> None:
    q, k = (torch.randn(2, 4, t, d, device="cuda").bfloat16() for _ in range(2))
    right = regard.weights(q.double(), k.double(), mask=regard.causal(), engine="blockwise").see("received", pool=pool)
    for _ in range(3):
        mine = regard.weights(q, k, mask=regard.causal()).see("received", pool=pool)
        torch.testing.assert_close(mine.pool.double(), right.pool, rtol=5e-5, atol=2e-6)
        torch.testing.assert_close(mine.received.double(), right.received, rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize(("t", "d"), [(1024, 64), (1024, 128), (700, 64)])
def test_a_few_vectors_times_the_transposed_matrix(t: int, d: int, columns: int) -> None:
    q, k = (torch.randn(2, 4, t, d, device="cuda").bfloat16() for _ in range(2))
    u = torch.randn(2, 4, t, columns, device="cuda")
    right = regard.weights(q.double(), k.double(), mask=regard.causal(), engine="blockwise").mT @ u.double()
    for _ in range(3):
        mine = regard.weights(q, k, mask=regard.causal()).mT @ u
        torch.testing.assert_close(mine.double(), right, rtol=5e-5, atol=2e-5)


def test_segments_wait_for_the_gpu_once() -> None:
    q, ids = torch.randn(1, 4, 512, 64, device="cuda").bfloat16(), torch.arange(512, device="cuda") // 16
    regard.weights(q).segment_mass(ids)  # their runs are read
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            regard.weights(q).segment_mass(ids)
            regard.weights(q).pool(16, 16, by="max")
        finally:
            torch.cuda.set_sync_debug_mode("default")
