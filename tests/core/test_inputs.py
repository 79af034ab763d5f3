"""The law of inputs: tensors as users have them, of any type, layout and mode, give what the plain ones give."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.core import api
from regard.engines import numba
from support.judge import SMOOTH, Sizes, draw, library_answers, library_answers_at_once

TIGHT = {"rtol": 2**10 * 2**-53, "atol": 2**10 * 2**-53}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **(tolerance or TIGHT), msg=lambda m, name=name: f"{name}: {m}")


# Checks, which are kept by all that they depend on.


def test_what_was_checked_before_answers_as_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of one argument, in turns: none is answered with the mask, score or positions of another."""
    monkeypatch.setattr(api, "CHECKED", {})
    q, k = draw(1, 2, 3, 4), draw(1, 2, 5, 4)
    changes = [
        {}, {"score": "dot"}, {"score": regard.ScaledDot(0.1)}, {"mask": regard.causal(), "align": "end"}, {"engine": "blockwise"},
        {"mask": regard.causal(), "align": "start"}, {"mask": regard.window(1, 0), "align": "end"}, {"score": regard.Dot().softcap(0.5)},
        {"mask": torch.tensor([True, False, True, True, False])[None]}, {"score": regard.ScaledDot().bias(draw(3, 5))},
    ]  # fmt: skip
    truth = [regard.weights(q[0], k[0], **{**change, "engine": "reference"}).dense()[None] for change in changes]
    api.CHECKED.clear()
    for _ in range(3):
        for change, w in zip(changes, truth, strict=True):
            torch.testing.assert_close(regard.weights(q, k, **change).dense(), w, **TIGHT)
    assert len(api.CHECKED) == len(changes) - 2, "those with tensors are checked every time"
    with pytest.raises(ValueError, match="align"):
        regard.weights(q, k, mask=regard.causal())
    with pytest.raises(ValueError, match="convert one"):
        regard.weights(q, k.float())
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert regard.weights(q.float(), k.float())._factors.q.dtype == torch.bfloat16


# Types.


@pytest.mark.parametrize(("dtype", "u"), [(torch.float32, 2**-24), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_short_types_are_read_exactly_and_computed_in_float32(dtype: torch.dtype, u: float) -> None:
    n = Sizes()
    q, k, v = (draw(*shape, dtype=dtype) for shape in (n.q, n.k, n.v))
    short = regard.weights(q, k, align="end").see("entropy", "received", "mean_distance", "lse", values=v)
    exact = regard.weights(q.double(), k.double(), align="end").see(
        "entropy", "received", "mean_distance", "lse", values=v.double()
    )
    for name in ("entropy", "received", "mean_distance", "lse"):
        torch.testing.assert_close(getattr(short, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-5)
    assert short.y.dtype == dtype
    # The output is rounded once, to its own type.
    assert ((short.y.double() - exact.y).abs() <= u * exact.y.abs() + 1e-5).all()


def test_values_may_be_of_another_type_than_queries() -> None:
    q, v = draw(5, 3, dtype=torch.float32), draw(5, 2, dtype=torch.bfloat16)
    y = regard.weights(q) @ v
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), regard.weights(q) @ v.float(), rtol=2**-8, atol=2**-8)


# Grouped heads.


@pytest.mark.parametrize(("h", "g"), [(6, 1), (6, 2), (6, 3), (6, 6), (1, 1)])
def test_grouped_heads_are_repeated_keys(h: int, g: int, engine: str) -> None:
    n = Sizes(h=h, g=g)
    q, k, v, u = (draw(*shape) for shape in (n.q, n.k, n.v, n.u))
    grouped = regard.weights(q, k, mask=regard.causal(), align="end", engine=engine)
    repeated = regard.weights(q, k.repeat_interleave(h // g, 1), mask=regard.causal(), align="end", engine=engine)
    same(library_answers(grouped, v, u), library_answers(repeated, v.repeat_interleave(h // g, 1), u))


def test_received_is_a_query_heads_and_summing_a_group_is_the_callers_choice(engine: str) -> None:
    q, k = draw(1, 4, 5, 3), draw(1, 2, 7, 3)
    W = regard.weights(q, k, engine=engine)
    received = W.received()
    assert received.shape == (1, 4, 7)
    for h in range(4):
        torch.testing.assert_close(received[0, h], (q[0, h] @ k[0, h // 2].mT / 3**0.5).softmax(-1).sum(0), **TIGHT)
    torch.testing.assert_close(received.sum((-2, -1)), torch.tensor([4 * 5.0]).double(), **TIGHT)


def test_keys_of_a_group_get_the_sum_of_its_gradients(engine: str) -> None:
    q, k, v = draw(1, 4, 5, 3), draw(1, 2, 7, 3, grad=True), draw(1, 2, 7, 3, grad=True)
    every_k, every_v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    want = torch.autograd.grad(((q @ every_k.mT).softmax(-1) @ every_v).square().sum(), (k, v))
    got = torch.autograd.grad((regard.weights(q, k, score="dot", engine=engine) @ v).square().sum(), (k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


# Axes.


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((5, 3), (7, 3), (7, 2)), ((4, 5, 3), (2, 7, 3), (2, 7, 2)), ((4, 5, 3), (7, 3), (7, 2)), ((2, 4, 5, 3), (1, 2, 7, 3), (2, 4, 7, 2)),
        ((1, 4, 5, 3), (3, 4, 7, 3), (3, 1, 7, 2)), ((3, 2, 4, 5, 3), (2, 1, 7, 3), (1, 1, 2, 7, 2)), ((3, 1, 4, 5, 3), (1, 2, 4, 7, 3), (4, 7, 2)),
        ((2, 5, 3), (3, 1, 2, 7, 3), (2, 7, 2)), ((2, 2, 2, 2, 5, 3), (2, 7, 3), (7, 2)),
    ],
)  # fmt: skip
def test_batch_axes_broadcast_as_torch_does(q: tuple, k: tuple, v: tuple, engine: str) -> None:
    Q, K, V = draw(*q, grad=True), draw(*k, grad=True), draw(*v, grad=True)
    W = regard.weights(Q, K, align="end", engine=engine)
    h = q[-3] if len(q) > 2 else 1

    def heads(x: Tensor) -> Tensor:
        return x if x.ndim == 2 else x.repeat_interleave(h // x.shape[-3], -3)

    w = (Q @ heads(K).mT / 3**0.5).softmax(-1)
    want = w @ heads(V)
    got = W @ V
    assert W.shape == w.shape
    torch.testing.assert_close(got, want, **TIGHT)
    torch.testing.assert_close(W.received(), w.sum(-2), **TIGHT)
    torch.testing.assert_close(W.entropy(), -(w * w.log()).sum(-1), **TIGHT)
    seed = draw(*want.shape)
    for a, b in zip(torch.autograd.grad(got, (Q, K, V), seed), torch.autograd.grad(want, (Q, K, V), seed), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def test_a_batch_of_values_may_be_larger_than_that_of_the_weights(engine: str) -> None:
    q, v = draw(3, 5, 4), draw(2, 3, 5, 2)
    W = regard.weights(q, engine=engine)
    torch.testing.assert_close(W @ v, W.dense() @ v, **TIGHT)
    torch.testing.assert_close(W.mT @ v, W.dense().mT @ v, **TIGHT)


# Layout in memory.


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in other arrangements."""
    spread = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    spread[..., ::2] = x
    rows = torch.full((*x.shape[:-2], 3 * x.shape[-2], x.shape[-1]), torch.nan, dtype=x.dtype)
    rows[..., ::3, :] = x
    offset = torch.full((x.numel() + 7,), torch.nan, dtype=x.dtype)
    offset[7:] = x.flatten()
    return {
        "as (batch, length, heads, size)": x.transpose(1, 2).contiguous().transpose(1, 2), "transposed": x.mT.contiguous().mT,
        "every other number": spread[..., ::2], "every third row": rows[..., ::3, :], "not at the start": offset[7:].view(x.shape),
        "heads last": x.movedim(1, -1).contiguous().movedim(-1, 1), "a part of a packed projection": torch.cat([x, x + 1, x + 2], -1)[..., : x.shape[-1]],
    }  # fmt: skip


@pytest.mark.parametrize("layout", layouts(torch.zeros(2, 3, 4, 5)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_arrangement_in_memory_does_not_matter(layout: str, dtype: torch.dtype) -> None:
    n = Sizes()
    q, k, v, u = (draw(*shape, dtype=dtype) for shape in (n.q, n.k, n.v, n.u))
    Q, K, V, U = (layouts(x)[layout].requires_grad_(True) for x in (q, k, v, u))
    for x in (q, k, v, u):
        x.requires_grad_(True)
    plain = library_answers(regard.weights(q, k, mask=regard.causal(), align="end"), v, u)
    odd = library_answers(regard.weights(Q, K, mask=regard.causal(), align="end"), V, U)
    close = TIGHT if dtype == torch.float64 else SINGLE if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    same(odd, plain, **close)
    seeds = {name: draw(*plain[name].shape, dtype=plain[name].dtype) for name in SMOOTH}
    total = [
        sum((seeds[x].float() * answers[x].float().clamp(min=-1e9)).sum() for x in SMOOTH) for answers in (plain, odd)
    ]
    want, got = torch.autograd.grad(total[0], (q, k, v, u)), torch.autograd.grad(total[1], (Q, K, V, U))
    scale = max(g.abs().max().item() for g in want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=close["rtol"] * 4, atol=close["atol"] * scale * 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_expanded_tensors_are_what_they_stand_for(dtype: torch.dtype) -> None:
    q, k, v = draw(1, 4, 5, 3, dtype=dtype), draw(1, 1, 7, 3, dtype=dtype), draw(1, 1, 1, 2, dtype=dtype)
    Q, K, V = q.expand(3, 4, 5, 3), k.expand(3, 4, 7, 3), v.expand(3, 4, 7, 2)
    u = draw(1, 1, 1, 1, dtype=dtype).expand(3, 4, 5, 2)
    assert 0 in K.stride()
    got = library_answers(regard.weights(Q, K, align="end"), V, u)
    want = library_answers(regard.weights(Q.contiguous(), K.contiguous(), align="end"), V.contiguous(), u.contiguous())
    same(got, want, **(TIGHT if dtype == torch.float64 else SINGLE))


def test_an_expanded_bias_or_mask_costs_nothing_and_changes_nothing() -> None:
    q = draw(2, 3, 5, 4)
    b, m = draw(1, 1, 1, 5), torch.rand(1, 1, 5, 1) < 0.7
    wide = regard.weights(q, score=regard.Dot().bias(b.expand(2, 3, 5, 5)), mask=m.expand(2, 3, 5, 5))
    same(
        library_answers(wide, q, q),
        library_answers(regard.weights(q, score=regard.Dot().bias(b), mask=m.expand(1, 1, 5, 5)), q, q),
    )


# Modes.


def test_no_grad_and_inference_mode_give_the_same_numbers(engine: str) -> None:
    n = Sizes()
    q, k, v, u = (draw(*shape, grad=True) for shape in (n.q, n.k, n.v, n.u))
    want = {
        name: x.detach() for name, x in library_answers(regard.weights(q, k, align="end", engine=engine), v, u).items()
    }
    with torch.no_grad():
        got = library_answers(regard.weights(q, k, align="end", engine=engine), v, u)
    assert not any(x.requires_grad for x in got.values())
    same(got, want)
    with torch.inference_mode():
        same(library_answers(regard.weights(q, k, align="end", engine=engine), v, u), want)
        drawn = draw(*n.q)
        W = regard.weights(drawn, k, align="end", engine=engine)
        W.entropy()
        drawn.zero_()
        torch.testing.assert_close(W.entropy(), regard.weights(drawn, k, align="end", engine=engine).entropy())


def test_tensors_made_in_inference_mode_can_be_looked_at_outside() -> None:
    with torch.inference_mode():
        x = draw(5, 3)
    W = regard.weights(x)
    torch.testing.assert_close(W.entropy(), regard.weights(x.clone()).entropy())
    torch.testing.assert_close(W[2], W.dense()[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_inputs_are_cast_first_as_sdpa_does(dtype: torch.dtype) -> None:
    q, k, v = (draw(1, 2, 9, 4, dtype=torch.float32, grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        y = regard.attend(q, k, v, engine="blockwise")
        sdpa = F.scaled_dot_product_attention(q, k, v)
        entropy = regard.weights(q, k).entropy()
        mixed = regard.attend(q.detach().to(dtype), k.detach(), v.detach(), engine="blockwise")
    assert y.dtype == sdpa.dtype == mixed.dtype == dtype
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, regard.weights(q.to(dtype), k.to(dtype)).entropy())
    torch.testing.assert_close(y, sdpa, rtol=0.02, atol=0.02)
    y.float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert q.grad.isfinite().all()


def test_attend_is_weights_times_v(engine: str) -> None:
    n = Sizes()
    q, k, v = draw(*n.q), draw(*n.k), draw(*n.v)
    W = regard.weights(q, k, mask=regard.causal(), align="end", engine=engine)
    torch.testing.assert_close(regard.attend(q, k, v, mask=regard.causal(), align="end", engine=engine), W @ v, **TIGHT)
    x = draw(7, 3)
    torch.testing.assert_close(regard.attend(x, engine=engine), regard.weights(x) @ x, **TIGHT)
    torch.testing.assert_close(regard.attend(x, k := draw(7, 3), engine=engine), regard.weights(x, k) @ k, **TIGHT)


@pytest.mark.parametrize("masked", [False, True])
def test_attend_agrees_with_pytorch_where_pytorch_is_called(masked: bool) -> None:
    q, k, v = (draw(2, 3, 17, 8, dtype=torch.float32) for _ in range(3))
    mask = regard.causal() if masked else None
    for score, scale in (("scaled_dot", None), ("dot", 1.0), (regard.ScaledDot(0.2), 0.2)):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=masked, scale=scale)
        assert torch.equal(regard.attend(q, k, v, mask=mask, score=score), want)
        torch.testing.assert_close(regard.attend(q, k, v, mask=mask, score=score, engine="blockwise"), want, **SINGLE)


# torch.compile.


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def through(function: Callable, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of a fixed mixture of them."""
    leaves = [x.detach().clone().requires_grad_(True) for x in inputs]
    outputs = [x for x in function(*leaves) if x is not None]
    generator = torch.Generator().manual_seed(3)
    mixture = sum(
        (torch.randn(x.shape, generator=generator, dtype=x.dtype) * x).sum()
        for x in outputs
        if x.is_floating_point() and x.requires_grad
    )
    grads = torch.autograd.grad(mixture, leaves, allow_unused=True)
    return outputs, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


COMPILED: dict[str, Callable] = {
    "attend": lambda q, k, v: (regard.attend(q, k, v, mask=regard.window(3, 1)),),
    "attend, plain": lambda q, k, v: (regard.attend(q, k, v),),
    "attend, every modifier": lambda q, k, v: (regard.attend(q, k, v, score=regard.Gaussian(2.0).softcap(5.0).sink(q.new_zeros(2)), mask=regard.causal()),),
    "attend, additive": lambda q, k, v: (regard.attend(q, k, v, score=regard.Additive(k[0, 0, :4, :], k[0, 1, :4, :], v[0, 0, 0])),),
    "see": lambda q, k, v: (lambda s: (s.y, s.entropy, s.received, s.pool, s.mean_distance, s.lse, s.mass))(
        regard.weights(q, k, mask=regard.causal()).see("entropy", "received", "mean_distance", "lse", pool=(2, 3), mass=[0, 2], values=v)
    ),
    "see, top and peak": lambda q, k, v: (lambda s: (s.topk.values, s.topk.indices, s.peak.values, s.peak.indices, s.max_score))(
        regard.weights(q, k, mask=regard.padding([5])).see("peak", "max_score", topk=3)
    ),
    "maps": lambda q, k, v: (lambda W: (W.pool(2, 3), W.pool(2, 3, by="max"), W.reduce_heads().pool(3, 2)))(regard.weights(q, k)),
    "indexing": lambda q, k, v: (lambda W: (W[0, 1, 2], W[..., 1, 3], W[:, 0][..., 2:4, :], W[..., [4, 1], 0]))(regard.weights(q, k, mask=regard.causal())),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_one_graph_it_gives_the_same_with_backward(name: str) -> None:
    q, k, v = draw(1, 2, 7, 4), draw(1, 2, 7, 4), draw(1, 2, 7, 4)
    want, got = through(COMPILED[name], q, k, v), through(compiled(COMPILED[name]), q, k, v)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.parametrize("score", ["cosine", "gaussian", "additive", "bilinear"])
@pytest.mark.parametrize("dense", [False, True], ids=["padding", "a tensor"])
def test_compiled_nan_at_padding_reaches_no_gradient(score: str, dense: bool) -> None:
    # What a score makes of a key has a gradient, and 0 · nan is nan: for a weight that would be all of it.
    a, b, u = draw(4, 6).requires_grad_(), draw(4, 6).requires_grad_(), draw(6).requires_grad_()
    scores = {
        "cosine": lambda: regard.Cosine(2.0),
        "gaussian": lambda: regard.Gaussian(1.5),
        "additive": lambda: regard.Additive(a, b, u),
        "bilinear": lambda: regard.Bilinear(a @ b.mT),
    }
    q, k, v = (draw(2, 2, n, 4) for n in (5, 9, 9))
    k[:, :, 6:], v[:, :, 6:] = math.nan, math.inf
    for x in (q, k, v):
        x.requires_grad_(True)
    shown = (torch.arange(9) < 6).expand(5, 9) if dense else regard.padding(torch.tensor([6, 6]))

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = regard.weights(q, k, score=scores[score](), mask=shown).see("entropy", values=v)
        return seen.y.sum() + seen.entropy.sum()

    leaves = [q, k, v, *((a, b) if score in ("additive", "bilinear") else ())]
    want = torch.autograd.grad(ask(q, k, v), leaves)
    got = torch.autograd.grad(compiled(ask)(q, k, v), leaves)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


def test_compiled_by_inductor_it_gives_the_same() -> None:
    q, k, v = (draw(1, 2, 7, 4, dtype=torch.float32) for _ in range(3))
    torch._dynamo.reset()
    name = "see"
    want = through(COMPILED[name], q, k, v)
    got = through(torch.compile(COMPILED[name], fullgraph=True), q, k, v)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


#: A score whose numbers a graph of changing lengths could be given anew.
OUTSIDE = regard.Gaussian(1.5).softcap(5.0)

GROWING = {
    "a cache": lambda q, k, v: regard.weights(q, k, mask=regard.causal(), align="end").see("entropy", "lse", values=v),
    "the largest": lambda q, k, v: regard.weights(q, k, align="start").see("received", topk=2, values=v),
    "a map": lambda q, k, v: regard.weights(q, k, mask=regard.window(3, 0), align="end").see(pool=(2, 3), values=v),
    "a score made outside": lambda q, k, v: regard.weights(q, k, score=OUTSIDE).see("entropy", values=v),
    "lengths": lambda q, k, v: regard.weights(q, k, score="cosine", mask=regard.padding(torch.tensor([3, 5]))).see("entropy", values=v),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", GROWING)
def test_compiled_lengths_may_change(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ask = GROWING[name]
    graph = torch.compile(ask, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q = draw(2, 2, 5, 4, dtype=torch.float32).requires_grad_()
    for length in (7, 9, 12, 20):
        k, v = (draw(2, 2, length, 4, dtype=torch.float32) for _ in range(2))
        got, want = graph(q, k, v), ask(q, k, v)
        for x in vars(want):
            pairs = zip(want.top, got.top, strict=True) if x == "top" else [(getattr(want, x), getattr(got, x))]
            for a, b in pairs:
                torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
        (mine,), (right,) = (torch.autograd.grad(seen.y.square().sum(), q) for seen in (got, want))
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    if name != "a map":  # whose tiles are laid out for one length
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize(
    "score",
    [regard.ScaledDot().softcap(3.0), regard.Dot().alibi(torch.ones(2)), regard.ScaledDot().bias(torch.ones(5))],
)
def test_compiled_attend_takes_modifiers(score: regard.Score) -> None:
    x = draw(1, 2, 5, 4, dtype=torch.float32)
    ask = lambda x: regard.attend(x, score=score)  # noqa: E731
    torch.testing.assert_close(compiled(ask)(x), ask(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_that_make_fx_draws_computes_the_same(mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    mask = regard.causal() & regard.window(2, 1)

    def ask(x: Tensor) -> Tensor:
        return regard.weights(x, score="cosine", mask=mask).see("entropy", values=x).y

    x, y = (draw(1, 2, 6, 4, dtype=torch.float32) for _ in range(2))
    graph = make_fx(ask, tracing_mode=mode)(x)
    torch.testing.assert_close(graph(y), ask(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda ask: ask, torch.vmap], ids=["plain", "vmap"])
def test_a_graph_of_the_textbook_takes_masks_that_hide_keys(transform: Callable) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    shown = (torch.arange(6) < 4) & torch.ones(6, 6, dtype=torch.bool).tril()
    ask = transform(lambda x: regard.weights(x, mask=shown, engine="reference").entropy())
    x, y = (draw(3, 2, 6, 4) for _ in range(2))
    torch.testing.assert_close(make_fx(ask)(x)(y), ask(y), **TIGHT)


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_with_a_growing_cache_can_be_exported(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return regard.weights(q, k, mask=regard.causal(), align="end").see("entropy", values=k).y

    q, k, longer = (draw(2, 2, n, 4, dtype=torch.float32) for n in (6, 9, 23))
    n = torch.export.Dim("n", min=8, max=64)
    model = torch.export.export(Model(), (q, k), dynamic_shapes={"q": None, "k": {2: n}}, strict=strict).module()
    torch.testing.assert_close(model(q, longer), Model()(q, longer), rtol=1e-5, atol=1e-5)


def test_torch_func_is_served_where_it_can_be_and_refused_by_name() -> None:
    x = draw(3, 2, 6, 4, dtype=torch.float32)
    each = torch.vmap(lambda x: regard.weights(x).entropy())(x)
    torch.testing.assert_close(each, regard.weights(x).entropy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*reference"):
        torch.func.grad(lambda x: regard.weights(x).entropy().sum())(x)
    grad = torch.func.grad(lambda x: regard.weights(x, engine="reference").entropy().sum())(x)
    x.requires_grad_()
    (right,) = torch.autograd.grad(regard.weights(x).entropy().sum(), x)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_what_comes_back_lies_as_what_was_given(backend: str) -> None:
    # Heads within positions, as models have them: laid side by side again they need no copy.
    q, k, v = (draw(2, 7, 3, 4, dtype=torch.float32).transpose(1, 2).requires_grad_() for _ in range(3))
    k = k.detach().contiguous().requires_grad_()  # as after rotary positions
    torch._dynamo.reset()

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.weights(q, k).see("entropy", values=v).y

    y = torch.compile(ask, fullgraph=True, backend=backend)(q, k, v)
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    assert grads[1].is_contiguous()
    assert all(x.transpose(1, 2).is_contiguous() for x in (y, grads[0], grads[2]))
    right = torch.autograd.grad(ask(q, k, v).square().sum(), (q, k, v))
    for ours, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("keys", [7, 1])
def test_compiled_a_single_head_or_key_lies_in_no_order(keys: int, backend: str, dynamic: bool) -> None:
    # The stride of an axis of size 1 is not the same in a graph and outside it.
    packed = draw(2, 7, 5, 4, dtype=torch.float32)
    q, k, v = (x.transpose(1, 2) for x in packed.split([3, 1, 1] if keys > 1 else [1, 2, 2], 2))
    q, k, v = q.expand(2, 2 if keys == 1 else 3, 7, 4), k[:, :, -keys:], v[:, :, -keys:]
    torch._dynamo.reset()

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.reshape(v.shape)
        return regard.weights(q, k, align="end").see("entropy", values=v).y.transpose(1, 2).flatten(2) * 3

    answers = torch.compile(ask, fullgraph=True, backend=backend, dynamic=dynamic)(q, k, v)
    torch.testing.assert_close(answers, ask(q, k, v), rtol=1e-4, atol=1e-5)


def test_compiled_values_that_get_no_gradient_may_lie_in_any_order() -> None:
    q, k, v = (draw(1, 7, 2, 4, dtype=torch.float32).transpose(1, 2).requires_grad_() for _ in range(3))
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def entropy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.weights(q, k).see("entropy", values=v).entropy

    entropy(q, k, v).sum().backward()
    (dq,) = torch.autograd.grad(regard.weights(q, k).entropy().sum(), q)
    torch.testing.assert_close(q.grad, dq, rtol=1e-4, atol=1e-5)
    assert v.grad is None or not v.grad.any()


def test_compiled_a_second_derivative_is_refused() -> None:
    q = draw(1, 2, 7, 4).requires_grad_()
    ask = torch.compile(lambda q: regard.weights(q).entropy(), backend="eager")
    with pytest.raises(NotImplementedError, match=r"second.*reference"):
        torch.autograd.grad(ask(q).sum(), q, create_graph=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_computed_again_for_the_backward_it_gives_the_same(compiled: bool) -> None:
    """Checkpoints that compute anew let what was saved be looked at only once."""
    q, k, v = (draw(1, 2, 7, 4).requires_grad_() for _ in range(3))
    ask = lambda q, k, v: regard.weights(q, k, mask=regard.causal()).see("entropy", values=v).y  # noqa: E731
    want = torch.autograd.grad(ask(q, k, v).square().sum(), (q, k, v))
    ask = torch.compile(ask, backend="eager") if compiled else ask
    y = torch.utils.checkpoint.checkpoint(ask, q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), want, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


SCORES_UNDER_AUTOCAST = {
    "scaled_dot": lambda M, A: regard.ScaledDot(),
    "gaussian": lambda M, A: regard.Gaussian(2.0),
    "bilinear": lambda M, A: regard.Bilinear(M),
    "additive": lambda M, A: regard.Additive(A, -A, A[0]),
    "function": lambda M, A: regard.Similarity(lambda q, k, M: q @ M @ k.mT, (M,)),
}


@pytest.mark.parametrize("score", SCORES_UNDER_AUTOCAST)
@pytest.mark.parametrize("engine", ["blockwise", "reference"])
def test_autocast_takes_nothing_from_the_exactness_of_answers(engine: str, score: str) -> None:
    q, k = (draw(1, 2, 33, 16, dtype=torch.float32) for _ in range(2))
    other = regard.weights(k, q, engine=engine)
    M, A = draw(16, 16, dtype=torch.float32), draw(16, 3, dtype=torch.float32)
    cells = torch.rand(33, 33) < 0.5

    def answers() -> tuple[Tensor, ...]:
        W = regard.weights(q.bfloat16(), k.bfloat16(), score=SCORES_UNDER_AUTOCAST[score](M, A), engine=engine)
        heads = W.reduce_heads()
        return (
            W.lse(), W.entropy(), W.max_score(), W.received(), W.topk(3).values, W.dense(), W[0, 1, 3:9, ::2], W.scores.dense(),
            W.mT @ torch.ones(33), W.recall(cells), W.kl(other.bfloat16()), heads.dense(), heads.recall(cells), heads.entropy(),
        )  # fmt: skip

    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = answers()
    for a, b in zip(under_autocast, answers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Callers with threads and forks.


def work(b: int = 2, h: int = 4, t: int = 150) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(b, h, t, 16, generator=generator).requires_grad_(True) for _ in range(3))
    seen = regard.weights(q, k, mask=regard.causal()).see("entropy", "received", topk=3, pool=(5, 7), values=v)
    (seen.y.square().sum() + seen.entropy.sum() + seen.received.square().sum()).backward()
    return [
        seen.y.detach(),
        seen.entropy.detach(),
        seen.received.detach(),
        seen.topk.values.detach(),
        seen.pool.detach(),
        q.grad,
        k.grad,
        v.grad,
    ]


def test_threads_of_the_caller_do_not_disturb_one_another() -> None:
    want = work()
    answers: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            for _ in range(3):
                answers[n] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for outputs in answers.values():
        for a, b in zip(outputs, want, strict=True):
            torch.testing.assert_close(a, b, **SINGLE)


def test_one_matrix_may_be_questioned_by_many_threads() -> None:
    W = regard.weights(draw(2, 100, 8, dtype=torch.float32), mask=regard.causal())
    fresh = regard.weights(W._factors.q, mask=regard.causal())
    want = [fresh.entropy(), fresh.received(), fresh.topk(3).values, fresh.lse()]
    results: list[list[Tensor]] = []
    threads = [
        threading.Thread(target=lambda: results.append([W.entropy(), W.received(), W.topk(3).values, W.lse()]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for outputs in results:
        for a, b in zip(outputs, want, strict=True):
            torch.testing.assert_close(a, b, **SINGLE)


@pytest.mark.parametrize("shape", [(2, 4, 150), (1, 1, 300), (1, 2, 517), (1, 1, 65), (1, 3, 64)], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_does_not_change_the_answer(threads: int, shape: tuple[int, int, int]) -> None:
    want = work(*shape)
    torch.set_num_threads(threads)
    try:
        got = [work(*shape) for _ in range(3)]
    finally:
        torch.set_num_threads(1)
    for outputs in got:
        for a, b in zip(outputs, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        # Who was faster must not show: the same call gives the same bits.
        assert all(torch.equal(a, b) for a, b in zip(outputs, got[0], strict=True))


@pytest.mark.slow
def test_a_thousand_repeats_under_memory_pressure_are_equal_bit_by_bit() -> None:
    torch.set_num_threads(2)
    try:
        want = work(1, 2, 150)
        for n in range(1000):
            # Memory that the next call gets is full of NaN, and lies elsewhere every time.
            litter = [torch.full((1 + (n * 37 + m * 911) % 50_000,), torch.nan) for m in range(8)]
            del litter
            assert all(torch.equal(a, b) for a, b in zip(work(1, 2, 150), want, strict=True))
    finally:
        torch.set_num_threads(1)


FORKED = """
import os, sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork.*")
import torch, regard
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 300, 16) for _ in range(3))
def ask():
    seen = regard.weights(q, k, mask=regard.causal()).see("entropy", "received", values=v)
    return seen.y, seen.entropy, seen.received
before = ask()
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        after = ask()
        ok = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, before))
        os._exit(0 if ok else 3)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
sys.exit(max(map(abs, codes)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_computes_as_its_parent_did(threads: int) -> None:
    if threads > 1 and numba.load() is None:
        pytest.skip("PyTorch's own operators wait for ever in a child whose parent used several threads")
    code = FORKED.replace("torch.manual_seed(0)", f"torch.manual_seed(0); torch.set_num_threads({threads})")
    done = subprocess.run([sys.executable, "-c", code], timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _child(queue: multiprocessing.Queue) -> None:
    queue.put([x.tolist() for x in work()[1:3]])


def test_a_spawned_child_computes_as_its_parent_does() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    answers = queue.get(timeout=600)
    child.join()
    for a, b in zip(answers, work()[1:3], strict=True):
        torch.testing.assert_close(torch.tensor(a), b, **SINGLE)


def test_asking_at_once_and_asking_alone_agree_in_float32() -> None:
    n = Sizes(i=50, j=70)
    q, k, v, u = (draw(*shape, dtype=torch.float32) for shape in (n.q, n.k, n.v, n.u))
    alone = library_answers(regard.weights(q, k, mask=regard.causal(), align="end"), v, u)
    at_once = library_answers_at_once(regard.weights(q, k, mask=regard.causal(), align="end"), v)
    same(at_once, {name: alone[name] for name in at_once}, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[0, 3, 5, 2], [5], 4])
def test_pytorchs_attention_under_padding_gives_what_ours_gives(lengths: object, dtype: torch.dtype) -> None:
    """It serves a GPU where nothing is trained; a sequence without keys and poison in the padding included."""
    q, k, v = (draw(4, 2, n, 8, dtype=dtype) for n in (3, 5, 5))
    for b, length in enumerate(torch.tensor(lengths).broadcast_to(4)):
        k[b, :, length:], v[b, :, length:] = math.nan, math.inf
    mask = regard.padding(lengths)
    with torch.no_grad():
        got = api._sdpa_of_real_keys(q, k, v, mask, None)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else SINGLE
    torch.testing.assert_close(got, regard.attend(q, k, v, mask=mask, engine="reference"), **tolerance)
    assert api._sdpa_of_real_keys(q, k, v, mask, None) is None  # gradients are for our kernels
