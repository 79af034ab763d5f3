"""Kernels whose warps are parted by hand: whole tiles, d = 64 and 128, judged by float64.

They are written in Gluon, which the interpreter does not run: only a Hopper GPU can tell whether they are right.
"""

from __future__ import annotations

import pytest
import torch

import regard
from regard.engines.triton import configuration, start

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not configuration._parts_warps(torch.device("cuda")),
    reason="warps are parted on Hopper, with versions of Triton that this was tested with",
)

#: sequences, heads, key heads, queries, keys, whose last query sees the last key or not.
SIZES = [
    (1, 2, 2, 128, 128, "end"),
    (1, 2, 2, 256, 640, "end"),
    (2, 4, 2, 512, 512, "end"),
    (1, 2, 1, 128, 384, "start"),  # keys that no row sees
    (2, 16, 16, 2048, 2048, "end"),  # more blocks than programs
]
STATISTICS = ("lse", "peak", "entropy", "reach")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def truth(q, k, v, causal: bool, align: str, sink=None):
    """Weights, output and what else rows tell, in float64."""
    h, i, j = q.shape[1], q.shape[2], k.shape[2]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(h // k.shape[1], 1),
        v.double().repeat_interleave(h // v.shape[1], 1),
    )
    s = q @ k.mT / q.shape[-1] ** 0.5
    offset = j - i if align == "end" else 0
    rows, cols = torch.arange(i, device="cuda")[:, None] + offset, torch.arange(j, device="cuda")
    if causal:
        s = s.masked_fill(cols > rows, -torch.inf)
    whole = s if sink is None else torch.cat([s, sink.double().view(1, h, 1, 1).expand(*s.shape[:3], 1)], -1)
    w = whole.softmax(-1)
    entropy = -(w * w.clamp_min(1e-300).log()).sum(-1)
    w = w[..., :j]
    return {
        "w": w, "y": w @ v, "lse": whole.logsumexp(-1), "entropy": entropy, "reach": (w * (rows - cols).abs()).sum(-1),
    }  # fmt: skip


def used() -> set[str]:
    return {key[0] for key in start.KEPT}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_tell_the_truth(sizes, d: int, causal: bool) -> None:
    b, h, g, i, j, align = sizes
    q, k, v = draw(b, h, i, d), draw(b, g, j, d), draw(b, g, j, d)
    start.KEPT.clear()
    W = regard.weights(q, k, mask=regard.causal() if causal else None, align=align, engine="triton")
    keys = torch.arange(j, device="cuda") % 3 == 0
    seen, true = W.see(*STATISTICS, mass=keys, values=v), truth(q, k, v, causal, align)
    assert (
        "parted_kernel" if d == 128 else "forward_kernel"
    ) in used()  # smaller products leave room for programs side by side
    assert (seen.y.double() - true["y"]).norm() < 0.005 * true["y"].norm()
    for name in ("lse", "entropy"):
        assert (getattr(seen, name).double() - true[name]).abs().max() < 1e-5, name
    assert (seen.reach.double() - true["reach"]).abs().max() < 1e-5 * j
    assert (seen.mass.double() - (true["w"] * keys).sum(-1)).abs().max() < 1e-5
    assert (seen.peak.weight.double() - true["w"].amax(-1)).abs().max() < 1e-5
    assert (true["w"].gather(-1, seen.peak.index[..., None])[..., 0] - true["w"].amax(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_and_float16_and_heads_side_by_side(causal: bool) -> None:
    q, k, v = (x.transpose(1, 2) for x in draw(2, 512, 3, 4, 128, dtype=torch.float16).unbind(2))
    sink = torch.randn(4, device="cuda")
    start.KEPT.clear()
    W = regard.weights(
        q, k, score=regard.ScaledDot().sink(sink), mask=regard.causal() if causal else None, engine="triton"
    )
    seen, true = W.see("lse", "entropy", values=v), truth(q, k, v, causal, "end", sink)
    assert "parted_kernel" in used()
    assert (seen.y.double() - true["y"]).norm() < 0.001 * true["y"].norm()
    assert (seen.lse.double() - true["lse"]).abs().max() < 1e-5
    assert (seen.entropy.double() - true["entropy"]).abs().max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_reads_its_tiles_once(causal: bool) -> None:
    x = draw(2, 4, 512, 128)
    start.KEPT.clear()
    seen = regard.weights(x, mask=regard.causal() if causal else None, engine="triton").see("entropy", values=x)
    true = truth(x, x, x, causal, "end")
    assert "parted_kernel" in used()
    assert (seen.y.double() - true["y"]).norm() < 0.005 * true["y"].norm()
    assert (seen.entropy.double() - true["entropy"]).abs().max() < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_tell_the_truth(sizes, d: int, causal: bool) -> None:
    """Of the output, entropy and reach; twice, with the same bits."""
    b, h, g, i, j, align = sizes
    live = [x.requires_grad_() for x in (draw(b, h, i, d), draw(b, g, j, d), draw(b, g, j, d))]
    flow = draw(b, h, i, d), torch.randn(b, h, i, device="cuda"), torch.randn(b, h, i, device="cuda") / j

    def ask():
        W = regard.weights(*live[:2], mask=regard.causal() if causal else None, align=align, engine="triton")
        seen = W.see("entropy", "reach", values=live[2])
        return torch.autograd.grad((seen.y, seen.entropy, seen.reach), live, flow)

    start.KEPT.clear()
    found = ask()
    assert ("keys_kernel" if d == 64 and j <= 256 else "parted_keys_kernel") in used()
    assert all(torch.equal(a, b) for a, b in zip(found, ask(), strict=True))
    exact = [x.detach().double().requires_grad_() for x in live]
    true = truth(*exact, causal, align)
    right = torch.autograd.grad([true[n] for n in ("y", "entropy", "reach")], exact, [x.double() for x in flow])
    for mine, theirs in zip(found, right, strict=True):
        assert (mine.double() - theirs).norm() < 0.006 * theirs.norm()


@pytest.mark.parametrize(("rows", "first"), [(8, 0), (4, 512)])
@pytest.mark.parametrize("align", ["start", "end"])
def test_a_pooled_map_is_written_where_nobody_looks(align: str, rows: int, first: int) -> None:
    """Under a causal mask the tile rows before the first block of rows that sees a key are zeros, and nobody clears them."""
    q, k = draw(1, 2, 1024, 64), draw(1, 2, 2048, 64)
    W = regard.weights(q, k, mask=regard.causal(), align=align, engine="triton")
    w = truth(q, k, k, True, align)["w"][:, :, first:]
    pooled = w.unflatten(2, (rows, -1)).unflatten(-1, (16, -1)).sum((3, 5))
    for _ in range(2):  # memory that was used before
        found = W.pool(rows, 16, i=slice(first, None))
        assert (found.double() - pooled).abs().max() < 1e-4 * pooled.max()
        del found
