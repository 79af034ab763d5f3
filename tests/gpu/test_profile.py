"""Profiles of heads by the triton kernels on a GPU, judged by float64."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.corpora.profile import profile, targets_of
from support import profile_cases


@pytest.mark.parametrize("name", profile_cases.CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_sum_is_that_of_float64(name: str, dtype: torch.dtype) -> None:
    profile_cases.judged(name, dtype, "cuda")


@pytest.mark.parametrize(("t", "d"), [(4096, 64), (2500, 128), (1024, 256)])
def test_long_sequences_have_the_sums_of_float64(t: int, d: int) -> None:
    q, k = (torch.randn(1, heads, t, d, device="cuda").bfloat16() for heads in (4, 2))
    targets = targets_of(torch.randint(50, (1, t)))
    mine = profile(regard.weights(q, k, mask=regard.causal()), targets)
    right = profile(regard.weights(q.double(), k.double(), mask=regard.causal(), engine="blockwise"), targets)
    torch.testing.assert_close(mine.sums, right.sums, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(mine.tie.double(), right.tie, rtol=1e-4, atol=1e-6)


def test_a_profile_waits_for_the_gpu_nowhere() -> None:
    q = torch.randn(1, 4, 512, 64, device="cuda").bfloat16()
    targets = targets_of(torch.randint(50, (1, 512))).cuda()
    for _ in range(3):  # compiled, recorded, replayed
        torch.cuda.set_sync_debug_mode("error")
        try:
            profile(regard.weights(q, mask=regard.causal()), targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
