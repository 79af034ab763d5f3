"""Profiles of heads by the triton kernels on a GPU, judged by float64."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.corpora.profile import SUMS, profile, targets_of
from regard.engines.triton import kernel_inputs, profile_pass
from support import profile_cases


@pytest.mark.parametrize("name", profile_cases.CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_sum_is_that_of_float64(name: str, dtype: torch.dtype) -> None:
    profile_cases.judged(name, dtype, "cuda")


def judged(q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
    """Compare with float64: every sum, and the weight at the place of the strongest tie."""
    t, mask = q.shape[2], regard.causal() if causal else None
    targets = targets_of(torch.randint(50, (len(q), t)))
    mine = profile(regard.weights(q, k, mask=mask), targets)
    exact = regard.weights(q.double(), k.double(), mask=mask, engine="blockwise")
    right = profile(exact, targets)
    for n in range(mine.sums.shape[-1]):
        what = SUMS[n] if n < len(SUMS) else f"bin {n - len(SUMS)}"
        torch.testing.assert_close(
            mine.sums[..., n],
            right.sums[..., n],
            rtol=5e-5,
            atol=1e-5 * t,
            msg=lambda text, what=what: f"{what}: {text}",
        )
    torch.testing.assert_close(mine.tie.double(), right.tie, rtol=1e-4, atol=1e-6)
    for b in range(len(q)):
        for h in range(q.shape[1]):
            there = exact[b, h][[int(mine.query[b, h])]][0, int(mine.key[b, h])]
            torch.testing.assert_close(there, right.tie[b, h], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("t", "d"), [(128, 64), (256, 128), (384, 64), (1280, 64), (1152, 128), (1300, 64), (1024, 256)]
)
def test_tiles_of_every_kind_have_the_sums_of_float64(t: int, d: int, causal: bool) -> None:
    """Beside the diagonal, split by an edge of a bin, and far from both; in front of the diagonal and behind it."""
    q, k = (torch.randn(2, heads, t, d, device="cuda").bfloat16() for heads in (4, 2))
    judged(q, k, causal)


@pytest.mark.parametrize("back", [1, 2, 63, 64, 127, 128, 129, 255, 256, 257, 511, 512])
def test_heads_that_look_back_are_counted_at_their_distance(back: int) -> None:
    x = torch.randn(1, 2, 1280 + back, 64, device="cuda").bfloat16()
    early, late = (
        x[:, :, :-back].contiguous(),
        x[:, :, back:].contiguous(),
    )  # row i of the first is row i − back of the other
    judged(2 * early, late, True)
    judged(2 * late, early, False)  # and ahead


@pytest.mark.parametrize(("t", "d"), [(4096, 64), (2500, 128), (1024, 256)])
def test_long_sequences_have_the_sums_of_float64(t: int, d: int) -> None:
    q, k = (torch.randn(1, heads, t, d, device="cuda").bfloat16() for heads in (4, 2))
    judged(q, k, True)


def test_outputs_are_written_where_memory_held_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel_inputs.empty

    def poisoned(*shape: int, dtype: torch.dtype, **more: object) -> torch.Tensor:
        return own(*shape, dtype=dtype, **more).fill_(torch.nan if dtype.is_floating_point else -9)

    monkeypatch.setattr(profile_pass, "empty", poisoned)
    for t in (384, 300):
        q = torch.randn(1, 2, t, 64, device="cuda").bfloat16()
        judged(q, q.roll(1, 2), True)


def test_a_profile_waits_for_the_gpu_nowhere() -> None:
    q = torch.randn(1, 4, 512, 64, device="cuda").bfloat16()
    targets = targets_of(torch.randint(50, (1, 512))).cuda()
    for _ in range(3):  # compiled, recorded, replayed
        torch.cuda.set_sync_debug_mode("error")
        try:
            profile(regard.weights(q, mask=regard.causal()), targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
