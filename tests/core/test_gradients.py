"""The law of gradients: every answer differentiates as the dense matrix does, with respect to all that made it.

Each output is held to the judge's gradient, which autograd takes through the matrix written out in float64, and to
finite differences by `gradcheck`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard
from support.judge import (
    MASKS,
    SCORES,
    SMOOTH,
    MaskCase,
    ScoreCase,
    Sharpness,
    Sizes,
    Truth,
    draw,
    library_answers,
    library_answers_at_once,
    named,
)

# float64 on both sides; a gradient is a sum of about a hundred products of numbers below ten.
TIGHT = {"rtol": 2**14 * 2**-53, "atol": 2**14 * 2**-53}
SMALL = {"b": 2, "h": 4, "g": 2, "i": 3, "j": 5, "d": 2, "e": 3}


class Setting:
    """Leaves that need gradients, the library's answers and the judge's."""

    def __init__(self, score: ScoreCase, mask: MaskCase, engine: str = "blockwise", **sizes: int) -> None:
        n = score.sizes(**{**SMALL, **sizes})
        self.n, self.score, self.mask, self.engine = n, score, mask, engine
        self.q, self.k, self.v, self.u = (draw(*shape, grad=True) for shape in (n.q, n.k, n.v, n.u))
        self.parameters = score.parameters(n, grad=True)
        self.leaves = [self.q, self.k, self.v, self.u, *self.parameters]

    def weights(
        self, q: Tensor | None = None, k: Tensor | None = None, parameters: list[Tensor] | None = None
    ) -> regard.Weights:
        q, k = self.q if q is None else q, self.k if k is None else k
        score = self.score.make(*(self.parameters if parameters is None else parameters))
        return regard.weights(q, k, score=score, mask=self.mask.make(self.n), align="end", engine=self.engine)

    def truth(self) -> Truth:
        return Truth.of(self.score, self.mask, self.n, self.q, self.k, self.parameters, self.n.j - self.n.i)


def finite(x: Tensor) -> Tensor:
    """Rows that see nothing have lse and maximum −inf, which do not move."""
    return torch.where(x == -torch.inf, 0, x)


def gradients(output: Tensor, seed: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(finite(output), leaves, seed, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def assert_alike(got: list[Tensor], want: list[Tensor], what: str) -> None:
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.isfinite(a).all(), f"{what}, leaf {n}: not finite"
        scale = 1 + b.abs().max() if b.numel() else 1
        assert ((a - b).abs() <= TIGHT["atol"] * scale).all(), f"{what}, leaf {n}: off by {(a - b).abs().max():.3g}"


@pytest.mark.parametrize("engine", ["blockwise", "blockwise in tiles of 3 by 4"], indirect=True)
@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_every_answer_has_the_gradient_of_the_dense_matrix(score: ScoreCase, mask: MaskCase, engine: str) -> None:
    it = Setting(score, mask, engine)
    want, got = it.truth().answers(it.v, it.u), library_answers(it.weights(), it.v, it.u)
    at_once = library_answers_at_once(it.weights(), it.v)
    for name in SMOOTH:
        seed = draw(*want[name].shape)
        right = gradients(want[name], seed, it.leaves)
        assert_alike(gradients(got[name], seed, it.leaves), right, name)
        if name in at_once:
            assert_alike(gradients(at_once[name], seed, it.leaves), right, f"see: {name}")


@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_every_answer_of_the_reference_has_the_gradient_of_the_dense_matrix(score: ScoreCase) -> None:
    it = Setting(score, named(MASKS, "causal and padding"), "reference")
    want, got = it.truth().answers(it.v, it.u), library_answers(it.weights(), it.v, it.u)
    for name in SMOOTH:
        seed = draw(*want[name].shape)
        assert_alike(gradients(got[name], seed, it.leaves), gradients(want[name], seed, it.leaves), name)


@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_one_backward_of_everything_is_the_sum_of_all(score: ScoreCase, mask: MaskCase, tiles) -> None:
    tiles(3, 4)
    it = Setting(score, mask)
    want, got = it.truth().answers(it.v, it.u), library_answers_at_once(it.weights(), it.v)
    names = [name for name in SMOOTH if name in got]
    seeds = {name: draw(*want[name].shape) for name in names}
    right = gradients(sum((seeds[n] * finite(want[n])).sum() for n in names), torch.ones(()).double(), it.leaves)
    grads = gradients(sum((seeds[n] * finite(got[n])).sum() for n in names), torch.ones(()).double(), it.leaves)
    assert_alike(grads, right, "all at once")


def finite_differences_agree(score: ScoreCase, mask: MaskCase) -> bool:
    it = Setting(score, mask, b=1, h=2, g=1)

    def every(q: Tensor, k: Tensor, v: Tensor, u: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        answers = library_answers(it.weights(q, k, list(parameters)), v, u)
        return tuple(finite(answers[name]) for name in SMOOTH)

    return gradcheck(every, tuple(it.leaves), fast_mode=True, eps=1e-6, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_finite_differences_agree_for_every_score(score: ScoreCase, tiles) -> None:
    tiles(2, 3)
    assert finite_differences_agree(score, named(MASKS, "causal and padding"))


@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
def test_finite_differences_agree_for_every_mask(mask: MaskCase, tiles) -> None:
    tiles(2, 3)
    assert finite_differences_agree(named(SCORES, "all modifiers and a sink"), mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_finite_differences_agree_for_every_score_with_every_mask(score: ScoreCase, mask: MaskCase, tiles) -> None:
    tiles(2, 3)
    assert finite_differences_agree(score, mask)


ALONE = {
    "y": lambda W, v, u: W @ v, "z": lambda W, v, u: W.mT @ u, "lse": lambda W, v, u: W.lse(), "entropy": lambda W, v, u: W.entropy(),
    "received": lambda W, v, u: W.received(), "mean_distance": lambda W, v, u: W.mean_distance(), "mass": lambda W, v, u: W.mass([0, 2]),
    "pool": lambda W, v, u: W.pool(2, 3), "top": lambda W, v, u: W.topk(2).values, "peak": lambda W, v, u: W.peak().values,
    "max_score": lambda W, v, u: W.max_score(), "dense": lambda W, v, u: W.dense(),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("score", ["scaled_dot", "additive", "all modifiers and a sink"])
def test_finite_differences_agree_entry_by_entry(score: str, name: str, tiles) -> None:
    tiles(2, 3)
    it = Setting(named(SCORES, score), named(MASKS, "causal and padding"), b=1, h=2, g=1, i=2, j=4, e=2)

    def one(q: Tensor, k: Tensor, v: Tensor, u: Tensor, *parameters: Tensor) -> Tensor:
        return finite(ALONE[name](it.weights(q, k, list(parameters)), v, u))

    assert gradcheck(one, tuple(it.leaves), eps=1e-6, atol=1e-6, rtol=1e-5)


BLOCKS = {
    "a cell": (..., 1, 2), "a row": (..., -1, slice(None)), "a column": (..., slice(None), 3), "a tile": (0, slice(None), slice(1, 3), slice(2, 5)),
    "a list of rows": (1, 2, [2, 0, 2], slice(None)), "a list of keys": (..., [4, 1, 1]), "every other": (..., slice(None, None, 2), slice(1, None, 3)),
    "a head": (1, 3, slice(0, 2), slice(None)),
}  # fmt: skip


@pytest.mark.parametrize("key", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("score", ["scaled_dot", "additive a head", "bilinear a head", "all modifiers and a sink"])
def test_a_block_of_weights_has_the_gradient_of_the_dense_matrix(score: str, key: tuple, engine: str) -> None:
    it = Setting(named(SCORES, score), named(MASKS, "window or first keys"), engine)
    want, got = it.truth().w[key], it.weights()[key]
    torch.testing.assert_close(got, want, **TIGHT)
    seed = draw(*want.shape)
    assert_alike(gradients(got, seed, it.leaves), gradients(want, seed, it.leaves), str(key))


def test_a_module_used_as_similarity_learns(engine: str) -> None:
    n = Sizes()
    module = Sharpness(draw(n.d), draw()).double()
    q, k, v = draw(*n.q, grad=True), draw(*n.k), draw(*n.v)
    W = regard.weights(q, k, score=module, engine=engine)
    k_each = torch.repeat_interleave(k, 2, 1)
    w = module(q, k_each).softmax(-1)
    seed = draw(n.b, n.h, n.i, n.e)
    leaves = [q, *module.parameters()]
    assert_alike(
        gradients(W @ v, seed, leaves), gradients(w @ torch.repeat_interleave(v, 2, 1), seed, leaves), "module"
    )
    assert module.sharpness.grad is None  # only returned, not left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_have_the_type_of_what_they_belong_to(dtype: torch.dtype) -> None:
    n = Sizes()
    q, k, v = (draw(*shape, dtype=dtype, grad=True) for shape in (n.q, n.k, n.v))
    slopes = draw(n.h, dtype=torch.float32, grad=True)
    seen = regard.weights(q, k, score=regard.ScaledDot().alibi(slopes), align="end").see(
        "entropy", "received", values=v
    )
    (seen.y.float().sum() + seen.entropy.sum() + seen.received[..., 0].sum()).backward()
    for x in (q, k, v, slopes):
        assert x.grad.dtype == x.dtype
        assert x.grad.shape == x.shape
        assert x.grad.isfinite().all()
        assert x.grad.abs().max() > 0


def test_only_what_needs_a_gradient_gets_one(engine: str) -> None:
    q, k, v = draw(7, 5, grad=True), draw(7, 5), draw(7, 3)
    (regard.weights(q, k, engine=engine) @ v).sum().backward()
    assert q.grad is not None
    assert k.grad is None
    assert v.grad is None


def test_queries_that_are_also_keys_and_values_get_all_three_gradients(engine: str) -> None:
    x = draw(7, 5, grad=True)
    y = x @ x.mT / 5**0.5
    want = torch.autograd.grad((y.softmax(-1) @ x).square().sum(), x)[0]
    got = torch.autograd.grad((regard.weights(x, engine=engine) @ x).square().sum(), x)[0]
    torch.testing.assert_close(got, want, **TIGHT)


def test_expanded_keys_get_the_sum_of_their_gradients(engine: str) -> None:
    q, k = draw(3, 2, 7, 5), draw(1, 1, 7, 5, grad=True)
    w = (q @ k.mT).softmax(-1)
    want = torch.autograd.grad((w * w).sum(), k)[0]
    W = regard.weights(q, k.expand(3, 2, 7, 5), score="dot", engine=engine)
    got = torch.autograd.grad(W.dense().square().sum(), k)[0]
    torch.testing.assert_close(got, want, **TIGHT)
    broadcast = regard.weights(q, k, score="dot", engine=engine)
    got = torch.autograd.grad(broadcast.dense().square().sum(), k)[0]
    torch.testing.assert_close(got, want, **TIGHT)


def test_indices_are_marked_as_what_does_not_differentiate(engine: str) -> None:
    W = regard.weights(draw(7, 5, grad=True), engine=engine)
    assert not W.topk(2).indices.requires_grad
    assert not W.peak().indices.requires_grad
    for value in (W.topk(2).values, W.peak().values, W.max_score(), W.lse(), W.entropy(), W.received()):
        assert value.requires_grad


def test_whole_rows_differentiate_twice() -> None:
    """They are plain PyTorch, in the memory that their tensor takes anyway."""
    it = Setting(named(SCORES, "scaled_dot"), named(MASKS, "causal"))
    first = torch.autograd.grad(it.weights().dense().square().sum(), it.q, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), it.q)[0]
    wanted = torch.autograd.grad(it.truth().w.square().sum(), it.q, create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(wanted.square().sum(), it.q)[0], **TIGHT)


@pytest.mark.parametrize("name", [name for name in SMOOTH if name != "dense"])
def test_a_second_derivative_is_refused_by_name(name: str) -> None:
    it = Setting(named(SCORES, "scaled_dot"), named(MASKS, "causal"))
    output = finite(library_answers(it.weights(), it.v, it.u)[name])
    with pytest.raises(NotImplementedError, match=r"second.*reference"):
        torch.autograd.grad(output.sum(), it.q, create_graph=True)


def test_the_reference_differentiates_twice() -> None:
    it = Setting(named(SCORES, "scaled_dot"), named(MASKS, "causal"), "reference")
    first = torch.autograd.grad(it.weights().entropy().sum(), it.q, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), it.q)[0]
    wanted = torch.autograd.grad(it.truth().entropy().sum(), it.q, create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(wanted.square().sum(), it.q)[0], **TIGHT)


# What is remembered: detached numbers, gradients never lost and never raised twice.

REMEMBERED = {
    "lse": lambda W: W.lse(), "max_score": lambda W: W.max_score(), "peak": lambda W: W.peak().values, "entropy": lambda W: W.entropy(),
    "received": lambda W: W.received(), "mean_distance": lambda W: W.mean_distance(), "top": lambda W: W.topk(2).values, "pool": lambda W: W.pool(2, 2),
    "mass": lambda W: W.mass(1), "a row": lambda W: W.row(2), "a block": lambda W: W[..., 1:, :2], "dense": lambda W: W.dense(),
}  # fmt: skip


def of_dense(x: Tensor, ask) -> Tensor:
    """The gradient of Σ answer², through the matrix written out."""
    return torch.autograd.grad(ask(regard.weights(x, mask=regard.causal(), engine="reference")).square().sum(), x)[0]


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_two_calls_can_each_go_backward(ask) -> None:
    x = draw(5, 3, grad=True)
    W = regard.weights(x, mask=regard.causal())
    first, second = ask(W), ask(W)
    assert torch.equal(first, second)
    for output in (first, second):
        torch.testing.assert_close(torch.autograd.grad(output.square().sum(), x)[0], of_dense(x, ask), **TIGHT)


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_a_call_after_backward_has_a_gradient_still(ask) -> None:
    x = draw(5, 3, grad=True)
    W = regard.weights(x, mask=regard.causal())
    ask(W).sum().backward()
    torch.testing.assert_close(torch.autograd.grad(ask(W).square().sum(), x)[0], of_dense(x, ask), **TIGHT)


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_what_was_remembered_without_gradients_has_them_later(ask) -> None:
    x = draw(5, 3, grad=True)
    W = regard.weights(x, mask=regard.causal())
    with torch.no_grad():
        before = ask(W)
    assert not before.requires_grad
    after = ask(W)
    torch.testing.assert_close(after.detach(), before, **TIGHT)
    torch.testing.assert_close(torch.autograd.grad(after.square().sum(), x)[0], of_dense(x, ask), **TIGHT)


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_what_was_remembered_in_inference_mode_has_gradients_later(ask) -> None:
    x = draw(5, 3, grad=True)
    W = regard.weights(x, mask=regard.causal())
    with torch.inference_mode():
        ask(W)
    torch.testing.assert_close(torch.autograd.grad(ask(W).square().sum(), x)[0], of_dense(x, ask), **TIGHT)


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_what_was_remembered_with_gradients_is_not_in_the_graph_under_no_grad(ask) -> None:
    x = draw(5, 3, grad=True)
    W = regard.weights(x, mask=regard.causal())
    ask(W)
    with torch.no_grad():
        assert not ask(W).requires_grad


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_an_answer_changed_in_place_does_not_change_the_memory(ask) -> None:
    x = draw(5, 3)
    W = regard.weights(x, mask=regard.causal())
    first = ask(W)
    before = first.clone()
    first.fill_(7)
    assert torch.equal(ask(W), before)
    ask(W).unsqueeze_(0)  # which counts as no change
    ask(W).requires_grad_()
    assert not ask(W).requires_grad
    assert torch.equal(ask(W), before)


@pytest.mark.parametrize("ask", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_a_change_of_q_in_place_is_seen(ask) -> None:
    q, k = draw(5, 3), draw(5, 3)
    W = regard.weights(q, k, mask=regard.causal())
    ask(W)
    q.mul_(-2)
    torch.testing.assert_close(ask(W), ask(regard.weights(q, k, mask=regard.causal())), **TIGHT)


@pytest.mark.parametrize("what", ["k", "bias", "sink", "slopes", "mask"])
def test_a_change_of_any_factor_in_place_is_seen(what: str) -> None:
    q, k, bias, sink, slopes = draw(2, 5, 3), draw(2, 5, 3), draw(2, 5, 5), draw(2), draw(2)
    mask = torch.rand(5, 5) < 0.5
    every = {"k": k, "bias": bias, "sink": sink, "slopes": slopes, "mask": mask}

    def make() -> regard.Weights:
        return regard.weights(q, k, score=regard.Dot().bias(bias).alibi(slopes).sink(sink), mask=mask)

    W = make()
    before = W.lse(), W.received()
    every[what].logical_not_() if what == "mask" else every[what].add_(1.5)
    assert not torch.equal(W.lse(), before[0])
    torch.testing.assert_close(W.lse(), make().lse(), **TIGHT)
    torch.testing.assert_close(W.received(), make().received(), **TIGHT)


def test_what_is_remembered_of_one_question_does_not_answer_another() -> None:
    W = regard.weights(draw(5, 3), mask=regard.causal())
    dense = W.dense()
    for rows, cols, i in ((2, 2, slice(None)), (2, 2, slice(1, 5)), (1, 1, slice(None)), (4, 1, slice(0, 4))):
        torch.testing.assert_close(W.pool(rows, cols, i=i).sum(), dense[i].sum(), **TIGHT)
    for n in (1, 4, 2):
        assert W.topk(n).values.shape == (5, n)
    for key in (0, 3):
        torch.testing.assert_close(W.mass(key), dense[:, key], **TIGHT)
    for v in (draw(5, 2), draw(5, 4)):
        torch.testing.assert_close(W @ v, dense @ v, **TIGHT)
        torch.testing.assert_close(W.mT @ v, dense.mT @ v, **TIGHT)


def test_a_change_between_forward_and_backward_is_an_error() -> None:
    x = draw(5, 3, grad=True)
    q = x * 1
    y = regard.weights(q).entropy()
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_detach_cuts_off_the_graph_and_keeps_the_numbers(engine: str) -> None:
    x = draw(5, 3, grad=True)
    W = regard.weights(x, engine=engine)
    assert not W.detach().entropy().requires_grad
    torch.testing.assert_close(W.detach().entropy(), W.entropy().detach(), **TIGHT)


@pytest.mark.parametrize(
    "score",
    [
        lambda p: regard.Similarity(lambda q, k, p: p * (q @ k.mT), (p,)),
        lambda p: regard.ScaledDot().modify(lambda s, i, j, p: p * s, p),
        lambda p: regard.ScaledDot().bias(p.expand(5, 5)),
    ],
    ids=["function", "modify", "bias"],
)
def test_parameters_of_functions_are_detached_and_moved_like_other_tensors(
    score: Callable[[Tensor], regard.Score], engine: str
) -> None:
    W = regard.weights(draw(5, 3), score=score(draw(1, grad=True)), engine=engine)
    assert W.entropy().requires_grad
    assert not W.detach().entropy().requires_grad
    assert {t.device.type for t in W.to("meta")._factors.tensors()} == {"meta"}


def test_the_checker_of_this_file_can_fail() -> None:
    it = Setting(named(SCORES, "scaled_dot"), named(MASKS, "causal"))
    want = gradients(it.truth().entropy(), torch.ones(2, 4, 3).double(), it.leaves)
    wrong = [g + 1e-9 for g in want]
    with pytest.raises(AssertionError, match="off by"):
        assert_alike(wrong, want, "shifted")
