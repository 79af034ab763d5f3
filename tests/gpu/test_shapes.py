"""Shapes beside the common ones on a real GPU: few rows over many keys, odd sizes and lengths, float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.engines.triton import decode_pass
from regard.engines.triton.kernel_inputs import KernelInputs


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def truth(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, output and lse in float64; causal with the last query at the last key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    w = s.softmax(-1)
    return w, w @ v, s.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("b", "h", "g", "i", "j", "d"),
    [
        (2, 32, 8, 1, 8192, 128), (1, 16, 16, 1, 20000, 64), (1, 32, 8, 16, 4999, 128), (1, 71, 1, 1, 3000, 64),
        (2, 7, 1, 64, 2500, 96), (1, 4, 2, 3, 2049, 256), (1, 2, 2, 1, 100_000, 80),
    ],
)  # fmt: skip
def test_few_rows_over_many_keys(b: int, h: int, g: int, i: int, j: int, d: int, dtype: torch.dtype, causal: bool) -> None:  # fmt: skip
    q, k, v = draw(b, h, i, d, dtype=dtype), draw(b, g, j, d, dtype=dtype), draw(b, g, j, d, dtype=dtype)
    W = regard.weights(q, k, mask=regard.causal() if causal else None, align="end", engine="triton")
    assert decode_pass.splits_keys(KernelInputs(W._factors.problem()))
    seen = W.see("lse", "max_score", "entropy", "received", topk=8, values=v)
    w, y, lse = truth(q, k, v, causal)
    assert (seen.y.double() - y).abs().max() < (0.02 if dtype == torch.bfloat16 else 1e-4)
    assert (seen.lse.double() - lse).abs().max() < 1e-4
    assert (seen.entropy.double() - torch.special.entr(w).sum(-1)).abs().max() < 1e-4
    assert (seen.received.double() - w.sum(-2)).abs().max() < 1e-4
    assert (seen.topk.values.double() - w.topk(8, -1).values).abs().max() < 1e-4
    assert (w.gather(-1, seen.topk.indices) - w.topk(8, -1).values).abs().max() < 1e-4


def test_shares_of_keys_are_merged_in_one_order() -> None:
    """A thousand repeats give the same bits, whichever share was ready first."""
    q, k, v = draw(2, 32, 1, 128), draw(2, 8, 8192, 128), draw(2, 8, 8192, 128)

    def once() -> list[Tensor]:
        seen = regard.weights(q, k, engine="triton").see("lse", "entropy", "received", topk=8, values=v)
        return [seen.y, seen.lse, seen.entropy, seen.received, seen.topk.values, seen.topk.indices]

    first, different = once(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(first, once(), strict=True):
            different += (a != b).sum()
    assert int(different) == 0


@pytest.mark.parametrize("within", [False, True], ids=["heads apart", "heads within positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "e"), [(80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256)])
@pytest.mark.parametrize("t", [512, 517, 700])
def test_sizes_and_lengths_that_fill_no_tile(t: int, d: int, e: int, causal: bool, within: bool) -> None:
    """By the kernel that is written for Hopper: the copy engine writes zeros past the end of rows and of heads."""
    q, k, v = (draw(2, 4, t, n) if not within else draw(2, t, 4, n).transpose(1, 2) for n in (d, d, e))
    q[1, 0] *= torch.nan  # another head's rows lie past the end of a head, and must not be read
    seen = regard.weights(q, k, mask=regard.causal() if causal else None, engine="triton").see("lse", "entropy", topk=8, values=v)  # fmt: skip
    w, y, lse = truth(q, k, v, causal)
    broken = torch.zeros(2, 4, dtype=torch.bool, device="cuda")
    broken[1, 0] = True
    assert seen.y[broken].isnan().all()
    assert (seen.y[~broken].double() - y[~broken]).abs().max() < 0.02
    assert (seen.lse[~broken].double() - lse[~broken]).abs().max() < 1e-4
    assert (seen.entropy[~broken].double() - torch.special.entr(w[~broken]).sum(-1)).abs().max() < 1e-4
    assert (seen.topk.values[~broken].double() - w[~broken].topk(8, -1).values).abs().max() < 1e-4


@pytest.mark.parametrize("d", [64, 128])
def test_float32_is_as_exact_as_pytorch(d: int) -> None:
    q, k, v = (draw(2, 4, 1024, d, dtype=torch.float32) for _ in range(3))
    _, y, _ = truth(q, k, v)
    ours = (regard.weights(q, k, engine="triton") @ v).double() - y
    theirs = F.scaled_dot_product_attention(q, k, v).double() - y
    assert ours.norm() <= theirs.norm()
    assert ours.abs().max() <= 2 * theirs.abs().max()


@pytest.mark.parametrize(("keys", "causal"), [(77, False), (128, False), (600, True), (1500, False), (2100, True)])
@pytest.mark.parametrize("d", [64, 128])
def test_the_largest_of_rows_of_any_length(d: int, keys: int, causal: bool) -> None:
    q, k = draw(2, 4, 300, d), draw(2, 4, keys, d)
    k[:, :, 5:9] = k[:, :, 4:5]  # ties go to the lower key
    top = regard.weights(q, k, mask=regard.causal() if causal else None, align="end", engine="triton").topk(8)
    w, _, _ = truth(q, k, k, causal)
    assert (top.values.double() - w.topk(8, -1).values).abs().max() < 1e-4
    for n in (5, 6, 7, 8):  # wherever one of the equal keys is listed, all before it are
        listed = (top.indices == n).any(-1)
        assert (~listed | (top.indices == n - 1).any(-1)).all()
