"""Kernels in Gluon: whole tiles, d = 64 and 128, judged by float64.

The interpreter does not run them: only a Hopper GPU can tell whether they are right.
"""

from __future__ import annotations

import pytest
import torch

import regard
from regard.engines.triton import launcher, tile_config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not tile_config._runs_gluon(torch.device("cuda")),
    reason="for Hopper, with versions of Triton that this was tested with",
)

#: sequences, heads, key heads, queries, keys, whose last query sees the last key or not.
SIZES = [
    (1, 2, 2, 128, 128, "end"),
    (1, 2, 2, 256, 640, "end"),
    (2, 4, 2, 512, 512, "end"),
    (1, 2, 1, 128, 384, "start"),  # keys that no row sees
    (2, 16, 16, 2048, 2048, "end"),  # more blocks than programs
]
STATISTICS = ("lse", "peak", "entropy", "mean_distance")
MASKS = {"full": None, "causal": regard.causal(), "window": regard.window(200, 30), "narrow": regard.window(5, 0)}
masks = pytest.mark.parametrize("mask", MASKS)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def truth(q, k, v, mask: str, align: str, sink=None):
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
    before, after = {"full": (j + i, j + i), "causal": (j + i, 0), "window": (200, 30), "narrow": (5, 0)}[mask]
    s = s.masked_fill((cols > rows + after) | (cols < rows - before), -torch.inf)
    logits = s if sink is None else torch.cat([s, sink.double().view(1, h, 1, 1).expand(*s.shape[:3], 1)], -1)
    w = logits.softmax(-1).nan_to_num()  # of rows that see nothing
    entropy = -(w * w.clamp_min(1e-300).log()).sum(-1)
    w = w[..., :j]
    return {
        "w": w, "y": w @ v, "lse": logits.logsumexp(-1), "entropy": entropy, "mean_distance": (w * (rows - cols).abs()).sum(-1),
    }  # fmt: skip


def used() -> set[str]:
    return {key[0] for key in launcher.LAUNCHES}


@masks
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_tell_the_truth(sizes, d: int, mask: str) -> None:
    b, h, g, i, j, align = sizes
    q, k, v = draw(b, h, i, d), draw(b, g, j, d), draw(b, g, j, d)
    launcher.LAUNCHES.clear()
    W = regard.weights(q, k, mask=MASKS[mask], align=align, engine="triton")
    keys = torch.arange(j, device="cuda") % 3 == 0
    seen, true = W.see(*STATISTICS, mass=keys, values=v), truth(q, k, v, mask, align)
    assert (
        "forward_ws_kernel" if d == 128 else "forward_kernel"
    ) in used()  # smaller products leave room for programs side by side
    assert (seen.y.double() - true["y"]).norm() < 0.005 * true["y"].norm()
    for name in ("lse", "entropy"):
        assert (getattr(seen, name).double() - true[name]).abs().max() < 1e-5, name
    assert (seen.mean_distance.double() - true["mean_distance"]).abs().max() < 1e-5 * j
    assert (seen.mass.double() - (true["w"] * keys).sum(-1)).abs().max() < 1e-5
    assert (seen.peak.values.double() - true["w"].amax(-1)).abs().max() < 1e-5
    assert (true["w"].gather(-1, seen.peak.indices[..., None])[..., 0] - true["w"].amax(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_and_float16_and_heads_side_by_side(causal: bool) -> None:
    q, k, v = (x.transpose(1, 2) for x in draw(2, 512, 3, 4, 128, dtype=torch.float16).unbind(2))
    sink = torch.randn(4, device="cuda")
    launcher.LAUNCHES.clear()
    W = regard.weights(
        q, k, score=regard.ScaledDot().sink(sink), mask=regard.causal() if causal else None, engine="triton"
    )
    seen, true = W.see("lse", "entropy", values=v), truth(q, k, v, "causal" if causal else "full", "end", sink)
    assert "forward_ws_kernel" in used()
    assert (seen.y.double() - true["y"]).norm() < 0.001 * true["y"].norm()
    assert (seen.lse.double() - true["lse"]).abs().max() < 1e-5
    assert (seen.entropy.double() - true["entropy"]).abs().max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_reads_its_tiles_once(causal: bool) -> None:
    x = draw(2, 4, 512, 128)
    launcher.LAUNCHES.clear()
    seen = regard.weights(x, mask=regard.causal() if causal else None, engine="triton").see("entropy", values=x)
    true = truth(x, x, x, "causal" if causal else "full", "end")
    assert "forward_ws_kernel" in used()
    assert (seen.y.double() - true["y"]).norm() < 0.005 * true["y"].norm()
    assert (seen.entropy.double() - true["entropy"]).abs().max() < 1e-4


@masks
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("one_pass", [False, True])
def test_gradients_tell_the_truth(monkeypatch, one_pass: bool, sizes, d: int, mask: str) -> None:
    """Of the output, entropy and reach; twice, with the same bits. `one_pass`: by the kernel for all gradients, where it fits."""
    b, h, g, i, j, align = sizes
    if one_pass:
        monkeypatch.setitem(tile_config.forced, "backward", tile_config.GLUON["backward", d])
    live = [x.requires_grad_() for x in (draw(b, h, i, d), draw(b, g, j, d), draw(b, g, j, d))]
    flow = draw(b, h, i, d), torch.randn(b, h, i, device="cuda"), torch.randn(b, h, i, device="cuda") / j

    def ask():
        W = regard.weights(*live[:2], mask=MASKS[mask], align=align, engine="triton")
        seen = W.see("entropy", "mean_distance", values=live[2])
        return torch.autograd.grad((seen.y, seen.entropy, seen.mean_distance), live, flow)

    launcher.LAUNCHES.clear()
    grads = ask()
    few, even, waits = j <= 256, i % (128 if d == 64 else 64) == 0, mask != "full" and d == 128
    two = few or not even or (waits and not one_pass)
    assert ("dkdv_kernel" if d == 64 and few else "dkdv_ws_kernel" if two else "backward_ws_kernel") in used()
    assert all(torch.equal(a, b) for a, b in zip(grads, ask(), strict=True))
    exact = [x.detach().double().requires_grad_() for x in live]
    true = truth(*exact, mask, align)
    right = torch.autograd.grad([true[n] for n in ("y", "entropy", "mean_distance")], exact, [x.double() for x in flow])
    for mine, theirs in zip(grads, right, strict=True):
        assert (mine.double() - theirs).norm() < 0.006 * theirs.norm()


@masks
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_without_values_tell_the_truth(sizes, with_sink: bool, mask: str) -> None:
    b, h, g, i, j, align = sizes
    q, k = draw(b, h, i, 64), draw(b, g, j, 64)
    sink = draw(h).float() if with_sink else None
    score = regard.ScaledDot() if sink is None else regard.ScaledDot().sink(sink)
    launcher.LAUNCHES.clear()
    seen = regard.weights(q, k, score=score, mask=MASKS[mask], align=align, engine="triton").see("lse", "entropy")
    assert "row_pass_pipelined_kernel" in used() or j <= 256
    right = truth(q, k, k, mask, align, sink)
    for name in ("lse", "entropy"):
        mine, theirs = getattr(seen, name).double(), right[name]
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        assert (mine - theirs)[theirs.isfinite()].abs().max() < 1e-4


@masks
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_columns_tell_the_truth(sizes, d: int, mask: str) -> None:
    b, h, g, i, j, align = sizes
    q, k = draw(b, h, i, d), draw(b, g, j, d)
    W = regard.weights(q, k, mask=MASKS[mask], align=align, engine="triton")
    w = truth(q, k, k, mask, align)["w"]
    launcher.LAUNCHES.clear()
    for tall in (64, 128):  # of one tile, and of two
        seen = W.see("received", pool=(i // tall, j // 64))
        assert "column_pass_pipelined_kernel" in used()
        pooled = w.unflatten(2, (i // tall, tall)).unflatten(-1, (j // 64, 64)).sum((3, 5))
        assert (seen.received.double() - w.sum(2)).abs().max() < 1e-5 * w.sum(2).max()
        assert (seen.pool.double() - pooled).abs().max() < 1e-5 * pooled.max()
    assert torch.equal(W.received(), seen.received)  # alone as together
    # Tile rows that end within a tile are another kernel's.
    launcher.LAUNCHES.clear()
    uneven = W.pool(5, 3, i=slice(1, None))
    assert "column_pass_kernel" in used()
    at = [torch.arange(parts + 1) * (n - first) // parts + first for parts, n, first in ((5, i, 1), (3, j, 0))]
    for r in range(5):
        for c in range(3):
            tile = w[:, :, at[0][r] : at[0][r + 1], at[1][c] : at[1][c + 1]].sum((2, 3))
            assert (uneven[:, :, r, c].double() - tile).abs().max() < 1e-4


def test_a_window_ends_within_a_tile_row_that_begins_late() -> None:
    q, k = draw(1, 2, 1024, 64), draw(1, 2, 1024, 64)
    W = regard.weights(q, k, mask=MASKS["window"], engine="triton")
    w = truth(q, k, k, "window", "end")["w"][:, :, 256:]
    launcher.LAUNCHES.clear()
    part = W.pool(3, 16, i=slice(256, None))  # 256 rows each, four tiles
    assert "column_pass_pipelined_kernel" in used()
    pooled = w.unflatten(2, (3, 256)).unflatten(-1, (16, 64)).sum((3, 5))
    assert (part.double() - pooled).abs().max() < 1e-5 * pooled.max()


@pytest.mark.parametrize("d", [64, 128])
def test_columns_have_the_same_bits_while_programs_come_and_go(d: int) -> None:
    """Programs that begin beside others must not write where those read: once in a thousand tiles a barrier that was not
    ended came back into the rows that had taken its place."""
    q, k = draw(1, 16, 16384, d), draw(1, 16, 16384, d)
    W = regard.weights(q, k, mask=regard.causal(), engine="triton")
    launcher.LAUNCHES.clear()
    first = W.received()
    assert "column_pass_pipelined_kernel" in used()
    assert first.isfinite().all()
    assert (first.sum(-1) - 16384).abs().max() < 0.1
    for _ in range(50):
        again = regard.weights(q, k, mask=regard.causal(), engine="triton").received()
        assert torch.equal(again, first)


@pytest.mark.parametrize("causal", [False, True])
def test_columns_of_heads_side_by_side_in_float16(causal: bool) -> None:
    q, k = (x.transpose(1, 2) for x in draw(2, 512, 2, 4, 128, dtype=torch.float16).unbind(2))
    launcher.LAUNCHES.clear()
    received = regard.weights(q, k, mask=regard.causal() if causal else None, engine="triton").received()
    assert "column_pass_pipelined_kernel" in used()
    w = truth(q, k, k, "causal" if causal else "full", "end")["w"]
    assert (received.double() - w.sum(2)).abs().max() < 1e-5 * w.sum(2).max()


@pytest.mark.parametrize(("rows", "first"), [(8, 0), (4, 512)])
@pytest.mark.parametrize("align", ["start", "end"])
def test_a_pooled_map_is_written_where_nobody_looks(align: str, rows: int, first: int) -> None:
    """Under a causal mask the tile rows before the first block of rows that sees a key are zeros, and nobody clears them."""
    q, k = draw(1, 2, 1024, 64), draw(1, 2, 2048, 64)
    W = regard.weights(q, k, mask=regard.causal(), align=align, engine="triton")
    w = truth(q, k, k, "causal", align)["w"][:, :, first:]
    pooled = w.unflatten(2, (rows, -1)).unflatten(-1, (16, -1)).sum((3, 5))
    for _ in range(2):  # memory that was used before
        part = W.pool(rows, 16, i=slice(first, None))
        assert (part.double() - pooled).abs().max() < 1e-4 * pooled.max()
        del part
