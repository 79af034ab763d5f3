"""The triton engine on a real GPU: traps that others fell into, repeats, graphs, compilation.

Random configurations are in `configurations.py`, which runs many of them at a time.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.core.api import _sdpa_of_real_keys
from regard.core.dropout import attend_with_dropout
from support import kernel_cases

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, times: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * times).to(dtype)


def dense(q, k, v, mask=None):
    """Weights, output and lse in float64."""
    s = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return s.softmax(-1), s.softmax(-1) @ v.double(), s.logsumexp(-1)


@pytest.mark.parametrize("d", [64, 128])
def test_a_cached_launch_serves_other_tensors(d: int) -> None:
    """The second call of a form, one at an odd address, one whose keys are its values."""
    for turn in range(4):
        q, k, v = (
            draw(1, 2, 257 * d + 8)[:, :, turn % 2 : 257 * d + turn % 2].unflatten(-1, (257, d)) for _ in range(3)
        )
        k = v if turn == 3 else k
        q, k, v = (x.requires_grad_() for x in (q.detach(), k.detach(), v.detach()))
        seen = regard.weights(q, k, mask=regard.causal(), engine="triton").see("entropy", "received", topk=4, values=v)
        w, y, _ = dense(q, k, v, torch.ones(257, 257, dtype=torch.bool, device="cuda").tril())
        assert (seen.y.double() - y).abs().max() < 0.02
        assert (seen.received.double() - w.sum(-2)).abs().max() < 1e-3
        assert (seen.topk.values.double() - w.topk(4, -1).values).abs().max() < 1e-4
        grads = torch.autograd.grad((seen.y.double() * y.detach()).sum(), (q, k, v))
        truth = torch.autograd.grad((y * y.detach()).sum(), (q, k, v))
        for mine, right in zip(grads, truth, strict=True):
            assert (mine.double() - right.double()).norm() < 0.02 * right.double().norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_lists_of_candidates_hold_hardly_fewer_than_there_are(d: int, causal: bool) -> None:
    """Of long rows, by the bounds that the forward pass left: a list belongs to one of four lanes, which share eight columns in pairs."""
    from regard.engines.triton import forward_pass, topk_pass

    q, k = draw(2, 4, 4096, d), draw(2, 4, 4096, d)
    problem = regard.weights(q, k, mask=regard.causal() if causal else None)._factors.problem()
    tile_maxima = forward_pass.forward(problem, (), None, None, with_tile_maxima=True)["tile_maxima"]
    bounds = topk_pass._bounds(tile_maxima, 8)[:, :, 1024:].unsqueeze(-1)
    s = (q.float() @ k.float().mT)[:, :, 1024:]
    if causal:
        s = s.masked_fill(torch.ones(4096, 4096, dtype=torch.bool, device="cuda").triu(1)[1024:], -torch.inf)
    above = (s > bounds).unflatten(-1, (512, 4, 2))
    assert (above.sum((-3, -2, -1)) >= 8).float().mean() > 0.999  # the product of kernels may round otherwise
    assert (above.sum((-3, -1)).amax(-1) > topk_pass.CAPACITY).float().mean() < 1e-4


@pytest.mark.parametrize("kind", ["plain", "ties", "equal"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [33, 64, 77, 96])
def test_the_largest_of_few_keys_are_those_of_dense_weights(keys: int, causal: bool, kind: str) -> None:
    """Beside what a key receives: chunks of 32 keys, the last of them partial, and blocks of rows that end within one."""
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.float16) for n in (700, keys, keys))
    if kind != "plain":
        q, k = (x.round() if kind == "ties" else torch.ones_like(x) for x in (q, k))
    mask = regard.causal() if causal else None
    seen = regard.weights(q, k, mask=mask, align="end", engine="triton").see("lse", "received", topk=8, values=v)
    shown = torch.ones(700, keys, dtype=torch.bool, device="cuda").tril(keys - 700) if causal else None
    w, y, _ = dense(q, k, v, shown)
    w = w.nan_to_num(0.0)
    assert (seen.topk.values.double() - w.topk(8, -1).values).abs().max() < 1e-4
    at = w.gather(-1, seen.topk.indices.clamp(min=0)).masked_fill(seen.topk.indices < 0, 0)
    assert (seen.topk.values.double() - at).abs().max() < 1e-4
    assert (seen.received.double() - w.sum(-2)).abs().max() < 1e-3
    assert (seen.y.double() - y.nan_to_num(0.0)).abs().max() < 0.02
    if kind == "equal" and not causal:
        assert torch.equal(seen.topk.indices, torch.arange(8, device="cuda").expand(2, 4, 700, 8))


def test_lists_have_the_same_bits_in_every_repeat() -> None:
    q, k, v = draw(2, 8, 4096, 64), draw(2, 8, 4096, 64), draw(2, 8, 4096, 64)
    ask = lambda: regard.weights(q, k, mask=regard.causal(), engine="triton").see("lse", topk=8, values=v).topk  # noqa: E731
    first = ask()
    values, indices = first.values.clone(), first.indices.clone()
    for _ in range(100):
        again = ask()
        assert torch.equal(again.values, values)
        assert torch.equal(again.indices, indices)


@pytest.mark.parametrize("size", [24, 80, 128])
def test_float32_by_parts_of_16_bits_is_as_exact_as_plain_pytorch(size: int) -> None:
    kernel_cases.judged_by_parts("cuda", size)


@pytest.mark.parametrize("causal", [False, True])
def test_float32_by_parts_has_at_most_the_error_of_fused_attention(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 2048, 128, device="cuda") for _ in range(3))
    mask = regard.causal() if causal else None
    seen = regard.weights(q, k, mask=mask, engine="triton").see("lse", "entropy", values=v)
    shown = torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril() if causal else None
    _, right, _ = dense(q, k, v, shown)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert (seen.y.double() - right).norm() <= 1.05 * (theirs.double() - right).norm()


def test_topk_of_long_rows_by_candidates() -> None:
    assert kernel_cases.count_wrong_topk_of_long_rows((torch.bfloat16, torch.float16), "cuda", tile=128) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_the_largest_of_long_rows_are_those_of_dense_weights(d: int, causal: bool) -> None:
    q, k, v = draw(2, 2, 4096, d), draw(2, 1, 4096, d), draw(2, 1, 4096, d)
    seen = regard.weights(q, k, mask=regard.causal() if causal else None, engine="triton").see(topk=8, values=v)
    mask = torch.ones(4096, 4096, dtype=torch.bool, device="cuda").tril() if causal else None
    w, y, _ = dense(q, k.expand(2, 2, -1, -1), v.expand(2, 2, -1, -1), mask)
    assert (seen.topk.values.double() - w.topk(8, -1).values).abs().max() < 1e-4
    at = w.gather(-1, seen.topk.indices.clamp(min=0)).masked_fill(seen.topk.indices < 0, 0)
    assert (seen.topk.values.double() - at).abs().max() < 1e-4
    assert (seen.y.double() - y).abs().max() < 0.02


@pytest.mark.parametrize("dtype", TYPES)
def test_more_columns_than_a_tile_holds(dtype: torch.dtype) -> None:
    kernel_cases.judged_with_many_columns(dtype, "cuda")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("d", [64, 128])
def test_maps_of_whole_tiles_are_sums_of_weights(dtype: torch.dtype, d: int) -> None:
    kernel_cases.judged_with_maps_of_full_tiles(dtype, "cuda", 1024, d)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_whose_scores_are_all_huge_are_rows_like_any_other(dtype: torch.dtype) -> None:
    kernel_cases.judged_where_all_scores_are_huge(dtype, "cuda")


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_nan_stays_nan(dtype: torch.dtype) -> None:
    kernel_cases.judged_where_numbers_are_nan(dtype, "cuda")


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_nan_gives_no_gradient_to_what_it_does_not_see(dtype: torch.dtype) -> None:
    kernel_cases.judged_where_rows_are_nan(dtype, "cuda")


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", TYPES)
def test_additive_scores_leave_registers_for_wide_values(dtype: torch.dtype, size: int) -> None:
    for wanted in (("norm", "z", "received"), ("y", "lse", "entropy")):
        kernel_cases.judged(
            kernel_cases.KernelCase("additive", "dense", wanted, dtype, (130, 300, "end"), (1, 2, 1, 24, size)), "cuda"
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("b", "h", "g", "t", "d"), [(1, 1, 1, 256, 128), (2, 4, 2, 640, 128), (3, 2, 2, 384, 64), (1, 3, 1, 512, 96)]
)
def test_whole_tiles_by_the_copy_engine_are_right(b: int, h: int, g: int, t: int, d: int, causal: bool) -> None:
    """The fast paths: producer and consumer warps at d = 128, tiles copied by descriptors."""
    q, k, v = draw(b, h, t, d), draw(b, g, t, d), draw(b, g, t, d)
    mask = torch.ones(t, t, dtype=torch.bool, device="cuda").tril() if causal else None
    w, y, lse = dense(q, k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1), mask)
    W = regard.weights(q, k, mask=regard.causal() if causal else None, engine="triton")
    seen = W.see("lse", "max_score", "entropy", "received", pool=(4, 4), topk=4, values=v)
    assert (seen.y.double() - y).abs().max() < 0.02
    assert (seen.lse.double() - lse).abs().max() < 1e-4
    assert (seen.entropy.double() - torch.special.entr(w).sum(-1)).abs().max() < 1e-4
    assert (seen.received.double() - w.sum(-2)).abs().max() < 1e-3
    assert (seen.pool.sum((-1, -2)) - t).abs().max() < 1e-2
    assert (seen.topk.values.double() - w.topk(4, -1).values).abs().max() < 1e-4


@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_mask_of_cells_leaves_room_for_tiles_and_gradients(size: int) -> None:
    """Of long rows, whose tiles are tall: a tile of the mask takes shared memory beside those of keys and values."""
    q, k, v = (x.requires_grad_() for x in (draw(1, 2, 512, size), draw(1, 2, 512, size), draw(1, 2, 512, size)))
    mask = torch.rand(512, 512, device="cuda") < 0.7
    w, y, lse = dense(*(x.detach() for x in (q, k, v)), mask)
    seen = regard.weights(q, k, mask=mask, engine="triton").see("lse", "entropy", "received", topk=4, values=v)
    assert (seen.y.double() - y).abs().max() < 0.02
    assert (seen.lse.double() - lse).abs().max() < 1e-4
    assert (seen.received.double() - w.sum(-2)).abs().max() < 1e-3
    assert (seen.topk.values.double() - w.topk(4, -1).values).abs().max() < 1e-4
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad((dense(*exact, mask)[1] * y).sum(), exact)
    for mine, theirs in zip(torch.autograd.grad((seen.y.double() * y).sum(), (q, k, v)), right, strict=True):
        assert (mine.double() - theirs).norm() < 0.02 * theirs.norm()


def test_transposed_layouts_are_right_by_the_copy_engine() -> None:
    """(b, t, h, d) seen as (b, h, t, d), as models have it, and packed q, k, v."""
    packed = draw(2, 512, 3, 4, 128)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    _, y, _ = dense(*exact)
    output = regard.weights(q, k, engine="triton").see("lse", values=v).y
    assert (output.double() - y).abs().max() < 0.02
    grads = torch.autograd.grad((output.double() * y.detach()).sum(), (q, k, v))
    for mine, right in zip(grads, torch.autograd.grad((y * y.detach()).sum(), exact), strict=True):
        assert (mine.double() - right).norm() < 0.02 * right.norm()
    assert all(x.transpose(1, 2).is_contiguous() for x in (output, *grads)), "they lie as what was given"


def test_the_error_is_at_most_twice_that_of_plain_attention_in_the_same_type() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (draw(2, 4, 1000, 64, dtype=dtype, times=2.0) for _ in range(3))
        _, truth, _ = dense(q, k, v)
        plain = (q @ k.mT / 8).softmax(-1) @ v
        ours = regard.weights(q, k, engine="triton") @ v
        assert (ours.double() - truth).abs().max() <= 2 * (plain.double() - truth).abs().max()


def test_large_scores_and_rows_that_see_nothing() -> None:
    q, k, v = draw(1, 2, 200, 64, times=30.0), draw(1, 2, 200, 64, times=30.0), draw(1, 2, 200, 64)
    mask = torch.rand(200, 200, device="cuda") > 0.5
    mask[17] = False
    seen = regard.weights(q, k, mask=mask, engine="triton").see("lse", "entropy", "peak", "received", values=v)
    for x in (seen.y, seen.entropy, seen.received, seen.peak.values):
        assert x.isfinite().all()
    assert (seen.y[:, :, 17] == 0).all()
    assert (seen.lse[:, :, 17] == -torch.inf).all()
    assert (seen.peak.indices[:, :, 17] == -1).all()


@pytest.mark.parametrize("d", [16, 64, 96, 128])
def test_rows_that_see_nothing_of_the_first_tiles(d: int) -> None:
    """A hidden score must not become the maximum: s · scale − m is one rounding on a GPU, and then it is 1e20, not 0."""
    q, k, v = draw(1, 2, 300, d), draw(1, 2, 300, d), draw(1, 2, 300, d)
    after = torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1)
    W = regard.weights(q, k, mask=~regard.causal(), engine="triton")
    seen = W.see("lse", "entropy", values=v)
    _, y, lse = dense(q, k, v, after)
    assert (seen.lse[..., :-1].double() - lse[..., :-1]).abs().max() < 1e-3
    assert (seen.y[:, :, :-1].double() - y[:, :, :-1]).abs().max() < 0.03
    assert (seen.y[:, :, -1] == 0).all()


def test_a_thousand_repeats_give_the_same_bits() -> None:
    q, k, v = (draw(2, 4, 512, 128).requires_grad_() for _ in range(3))
    dy = draw(2, 4, 512, 128)

    def once():
        seen = regard.weights(q, k, mask=regard.causal(), engine="triton").see(
            "entropy", "received", pool=(4, 4), values=v
        )
        grads = torch.autograd.grad(
            (seen.y, seen.entropy, seen.received),
            (q, k, v),
            (dy, torch.ones_like(seen.entropy), torch.ones_like(seen.received)),
        )
        return [seen.y, seen.entropy, seen.received, seen.pool, *grads]  # fmt: skip

    first, different = once(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(first, once(), strict=True):
            different += (a != b).sum()
    assert int(different) == 0


def test_sums_of_additive_gradients_have_the_same_bits() -> None:
    """Programs add to memory: each number has its thread, so the order is that of the loop."""
    q, k, v, A, B, u = (draw(*shape).requires_grad_() for shape in ((2, 4, 300, 64), (2, 2, 333, 64), (2, 2, 333, 64), (64, 40), (64, 40), (40,)))  # fmt: skip

    def once() -> list[torch.Tensor]:
        W = regard.weights(q, k, score=regard.Additive(A, B, u), mask=regard.causal(), align="end", engine="triton")
        seen = W.see("entropy", values=v)
        return list(torch.autograd.grad(seen.y.float().sum() + seen.entropy.sum(), (q, k, v, A, B, u)))

    first, different = once(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(first, once(), strict=True):
            different += (a != b).sum()
    assert int(different) == 0


def test_more_than_two_to_the_31_elements() -> None:
    q = torch.empty(1, 17, 2**20, 128, device="cuda", dtype=torch.bfloat16).normal_()
    lse = regard.weights(q, mask=regard.window(3, 0), engine="triton").lse()
    tail = regard.weights(q[:, -1:, -64:], mask=regard.window(3, 0), engine="blockwise").lse()
    assert (lse[:, -1:, -32:] - tail[..., -32:]).abs().max() < 1e-3


def test_more_programs_than_65535() -> None:
    q = draw(70_000, 1, 16, 16)
    lse = regard.weights(q, engine="triton").lse()
    truth = (q.float() @ q.float().mT / 4).logsumexp(-1)
    assert (lse - truth).abs().max() < 1e-4


def test_a_mask_of_46341_tokens_does_not_wrap() -> None:
    t = 46_400
    q, k = draw(1, 1, 64, 16), draw(1, 1, t, 16)
    mask = torch.zeros(t, t, dtype=torch.bool, device="cuda")[-64:]
    mask[:, -5:] = True
    received = regard.weights(q, k, mask=mask, align="end", engine="triton").received()
    assert received[..., :-5].abs().max() == 0
    assert abs(float(received.sum()) - 64) < 1e-3


def test_keys_of_stride_0() -> None:
    q, k = draw(2, 2, 100, 64), draw(1, 1, 100, 64).expand(2, 2, 100, 64)
    assert (
        regard.weights(q, k, engine="triton").lse() - regard.weights(q, k.contiguous(), engine="triton").lse()
    ).abs().max() == 0


@pytest.mark.parametrize("t", [64, 192, 320, 129])
def test_gradients_where_the_length_is_no_multiple_of_128(t: int) -> None:
    q, k, v = (draw(1, 2, t, 64).requires_grad_() for _ in range(3))
    ours = torch.autograd.grad(
        regard.weights(q, k, mask=regard.causal(), engine="triton").see("lse", values=v).y.sum(), (q, k, v)
    )
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(t, t, dtype=torch.bool, device="cuda").tril()
    true = torch.autograd.grad(dense(*exact, mask)[1].sum(), exact)
    for a, b in zip(ours, true, strict=True):
        assert (a.double() - b).norm() / b.norm() < 0.02


def test_nothing_to_compute() -> None:
    assert regard.weights(draw(0, 2, 5, 16), engine="triton").entropy().shape == (0, 2, 5)
    assert (regard.weights(draw(1, 5, 16), draw(1, 0, 16), engine="triton").lse() == -torch.inf).all()


@pytest.mark.parametrize("kind", ["causal", "padding", "documents", "documents of their own"])
def test_a_graph_replays(kind: str) -> None:
    """Also over other lengths and documents, which are changed in place."""
    q, k, v = draw(2, 2, 256, 64), draw(2, 2, 256, 64), draw(2, 2, 256, 64)
    lengths, ids = torch.tensor([200, 256], device="cuda"), (torch.arange(256, device="cuda") // 100).repeat(2, 1)
    masks = {
        "causal": regard.causal(),
        "padding": regard.padding(lengths),
        "documents": regard.causal() & regard.documents(ids),
        "documents of their own": regard.documents(ids, ids),
    }

    def ask():
        seen = regard.weights(q, k, mask=masks[kind], engine="triton").see("entropy", "received", values=v)
        return seen.y, seen.entropy, seen.received

    ask()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = ask()
    q.normal_()
    lengths[0] = 130
    ids.copy_(torch.arange(256, device="cuda") // 60)
    graph.replay()
    for a, b in zip(answers, ask(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["padding", "documents", "documents and causal"])
def test_a_mask_costs_no_more_than_a_table(kind: str) -> None:
    """Once it was looked at: what layers of a model share is found out for the first of them."""
    from torch.profiler import ProfilerActivity, profile

    lengths, ids = torch.tensor([300, 512], device="cuda"), (torch.arange(512, device="cuda") // 100).repeat(2, 1)
    mask = regard.padding(lengths) if kind == "padding" else regard.documents(ids)

    def ask():
        own = regard.causal() & mask if kind == "documents and causal" else mask
        q, k, v = inputs
        return regard.weights(q, k, mask=own, engine="triton").see("lse", "entropy", values=v).y

    for turn in range(4):
        inputs = [draw(2, 4, 512, 64) for _ in range(3)]
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            y = ask()
            torch.cuda.synchronize()
        kernels = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        if turn == 3:  # the table and the pass; of padding also keys and values, with 0 where nobody sees them
            assert len(kernels) <= (6 if kind == "padding" else 2), kernels
        i, j = torch.arange(512, device="cuda")[:, None], torch.arange(512, device="cuda")
        visible = {
            "padding": j < lengths[:, None, None, None],
            "documents": i // 100 == j // 100,
            "documents and causal": (i // 100 == j // 100) & (j <= i),
        }
        assert (y.double() - dense(*inputs, visible[kind])[1]).abs().max() < 0.02


def test_compiled_code_gives_the_same() -> None:
    q, k, v = (draw(1, 2, 200, 64).requires_grad_() for _ in range(3))

    def ask(q, k, v):
        seen = regard.weights(q, k, mask=regard.causal(), engine="triton").see("entropy", values=v)
        return seen.y.float().sum() + seen.entropy.sum()

    plain = torch.autograd.grad(ask(q, k, v), (q, k, v))
    compiled = torch.autograd.grad(torch.compile(ask, fullgraph=True)(q, k, v), (q, k, v))
    for a, b in zip(plain, compiled, strict=True):
        assert (a.float() - b.float()).abs().max() < 1e-2


def test_autocast_computes_in_the_low_type() -> None:
    q, v = torch.randn(1, 2, 100, 64, device="cuda"), torch.randn(1, 2, 100, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert regard.attend(q, q, v, score=regard.Cosine(2.0), engine="triton").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: regard.weights(torch.randn(1, 5, 8, device="cuda", dtype=torch.float64), engine="triton"), "float64"),
        (
            lambda: regard.weights(draw(1, 5, 16), score=lambda q, k: q @ k.mT, engine="triton"),
            "similarity of your own",
        ),
        (
            lambda: regard.weights(draw(1, 5, 16), score=regard.Dot().modify(lambda s, i, j: s), engine="triton"),
            "modify",
        ),
        (lambda: regard.weights(draw(1, 5, 512), engine="triton"), "sizes up to 256"),
    ],
)
def test_what_it_cannot_serve_is_refused_and_auto_serves_it(make, reason: str) -> None:
    W = make()
    with pytest.raises(NotImplementedError, match=reason):
        W.entropy()
    regard.weights(draw(1, 5, 512)).entropy()


def test_masks_on_a_gpu_are_drawn() -> None:
    assert regard.padding(torch.tensor([2, 1], device="cuda")).draw(1, 3) == "■ ■ ·"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "keys"), [(40, 40), (1, 24), (7, 33)])
def test_attention_under_padding_is_pytorchs_where_nothing_is_trained(rows: int, keys: int, dtype: torch.dtype) -> None:
    """Triton, which takes seconds to import, is not asked; whatever stands in the padding."""
    lengths = torch.randint(1, keys + 1, (6,), device="cuda")
    lengths[0] = 0
    q, k, v = draw(6, 4, rows, 32, dtype=dtype), draw(6, 4, keys, 32, dtype=dtype), draw(6, 4, keys, 32, dtype=dtype)
    hidden = (torch.arange(keys, device="cuda") >= lengths[:, None])[:, None, :, None]
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)
    mask = regard.padding(lengths)
    with torch.no_grad():
        y = regard.attend(q, k, v, mask=mask)
        assert torch.equal(y, _sdpa_of_real_keys(q, k, v, mask, None))
    ours = regard.attend(q, k, v, mask=mask, engine="triton")
    assert (y.double() - ours.double()).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_dropout_by_pytorchs_attention_has_the_gradients_of_the_weights_that_stay(kind: str) -> None:
    p, lengths = 0.3, torch.tensor([32, 20, 0], device="cuda")
    mask = {"none": None, "causal": regard.causal(), "padding": regard.padding(lengths)}[kind]
    inputs = [draw(3, 4, 32, 32, dtype=torch.float32).requires_grad_() for _ in range(3)]
    values = torch.eye(32, device="cuda").expand(3, 4, 32, 32)
    answers = []
    for v in (inputs[2], values):  # the same seed drops the same weights; of unit vectors they are the output
        torch.manual_seed(3)
        answers.append(attend_with_dropout(*inputs[:2], v, regard.ScaledDot(), mask, None, None, p))
    y, stays = answers[0], answers[1] != 0
    w = regard.weights(*inputs[:2], mask=mask).dense()
    expected = (w * stays / (1 - p)) @ inputs[2]
    share = float(1 - stays[w > 0].double().mean())
    assert abs(share - p) < 0.03
    assert (y - expected).abs().max() < 1e-4
    upstream = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(x, inputs, upstream) for x in (y, expected)), strict=True):
        assert (a - b).abs().max() < 1e-3
