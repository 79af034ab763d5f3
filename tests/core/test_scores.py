"""The law of scores: each is its textbook formula, followed by its modifiers in the order they are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot, Similarity
from regard.engines import numba
from support.judge import SCORES, ScoreCase, Sharpness, Sizes, draw, per_query_head

TIGHT = {"rtol": 2**10 * 2**-53, "atol": 2**10 * 2**-53}


def scores_of(W: regard.Weights) -> Tensor:
    """Scores as the library makes them: log w + lse, where no weight is 0."""
    return W.dense().log() + W.lse().unsqueeze(-1)


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_each_score_is_its_formula(case: ScoreCase, engine: str) -> None:
    n = case.sizes()
    q, k, parameters = draw(*n.q), draw(*n.k), case.parameters(n)
    W = regard.weights(q, k, score=case.make(*parameters), align="end", engine=engine)
    i, j = torch.arange(n.i)[:, None] + n.j - n.i, torch.arange(n.j)[None]
    want = case.formula(q, per_query_head(k, n.h), i, j, *parameters)
    torch.testing.assert_close(scores_of(W), want, **TIGHT)


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_each_cell_is_its_formula_on_one_query_and_one_key(case: ScoreCase) -> None:
    n = case.sizes(b=1, h=1, g=1, i=3, j=3)
    q, k, parameters = draw(*n.q), draw(*n.k), case.parameters(n)
    W = regard.weights(q, k, score=case.make(*parameters))
    matrix = case.formula(q, k, torch.arange(3)[:, None], torch.arange(3)[None], *parameters)
    assert W.lse().shape == (1, 1, 3)
    torch.testing.assert_close(scores_of(W)[0, 0, 1, 2], matrix[0, 0, 1, 2], **TIGHT)


# By hand.


def test_scaled_dot_divides_by_the_root_of_the_size_of_q() -> None:
    q, k = torch.ones(1, 64), torch.full((1, 64), 0.5)
    assert regard.weights(q, k).lse().item() == 32 / 8
    assert regard.weights(q, k, score="dot").lse().item() == 32
    assert regard.weights(q, k, score=ScaledDot(0.25)).lse().item() == 8


def test_cosine_of_parallel_orthogonal_and_opposite_vectors() -> None:
    k = torch.tensor([[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0]], dtype=torch.float64)
    W = regard.weights(k[:1] * 7, k, score=Cosine(3.0))
    torch.testing.assert_close(scores_of(W), torch.tensor([[3.0, 0.0, -3.0]], dtype=torch.float64), **TIGHT)


def test_a_zero_vector_is_alike_to_nothing() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    W = regard.weights(x, score="cosine")
    torch.testing.assert_close(scores_of(W), torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64), **TIGHT)
    W.entropy().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-100, -50, 70, 100])
def test_a_cosine_knows_no_lengths(power: int, dtype: torch.dtype, engine: str) -> None:
    """Squares of 2⁷⁰ are inf in float32, and those of 2⁻¹⁰⁰ are 0."""
    q, k, u = draw(2, 7, 5, dtype=dtype), draw(2, 11, 5, dtype=dtype), draw(2, 7, 11, dtype=dtype)
    power = power if dtype == torch.float32 else 8 * power
    answers = []
    for size in (1.0, 2.0**power):
        x = (size * q).requires_grad_()
        w = regard.weights(x, k / size, score=Cosine(3.0), engine=engine).dense()
        (g,) = torch.autograd.grad((w * u).sum(), x)
        answers.append((w.detach(), g * size))
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


def test_gaussian_is_minus_half_the_squared_distance_in_units_of_sigma() -> None:
    q, k = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[4.0, 6.0], [1.0, 2.0]]).double()
    W = regard.weights(q, k, score=Gaussian(2.5))
    torch.testing.assert_close(scores_of(W), torch.tensor([[-25 / 12.5, 0.0]]).double(), **TIGHT)


@pytest.mark.parametrize("far", [0.0, 1e2, 1e4])
def test_gaussian_in_float32_keeps_its_digits_far_from_the_origin(far: float) -> None:
    q, k = draw(7, 5, dtype=torch.float32) + far, draw(11, 5, dtype=torch.float32) + far
    want = -(q.double()[:, None] - k.double()).square().sum(-1) / 2
    got = scores_of(regard.weights(q, k, score=Gaussian())).double()
    # Moved to the keys' centre, numbers are of size 3: their products are exact to some units of 2^-24 · 25; the centre
    # itself is rounded at size `far`, alike for q and k.
    assert (got - want).abs().max() <= 64 * 25 * 2**-24


def keys_in_pairs(r: Callable[..., Tensor], d: int, size: float, sigma: float) -> Tensor:
    """Keys (2, 131, d) in pairs whose scores differ by about 1, so that every row is torn between two.

    Else most rows are on one key, and the largest error of all seeds is that of the one row that is not: luck.
    """
    apart = sigma**2 / (size * (2 * d) ** 0.5)
    return (size * r(2, 66, d).repeat_interleave(2, 1) + apart * r(2, 132, d))[:, :131]


#: Queries and keys (h, i, d), some of them near, all far apart or within a sigma: from a function of draws, and sigma.
NEAR_AND_FAR = {
    "scattered": (lambda r, d: (r(2, 61, d), keys_in_pairs(r, d, 1.0, 0.1)), 0.1),
    "each beside a key": (lambda r, d: (10 * (k := r(2, 131, d))[:, :61] + 0.3 * r(2, 61, d) / d**0.5, 10 * k), 0.3),
    "in clusters": (
        lambda r, d: tuple(
            (30 * c)[:, torch.arange(n) % 8] + r(2, n, d) / d**0.5 for c in [r(2, 8, d)] for n in (61, 131)
        ),
        0.5,
    ),
    "grouped heads": (lambda r, d: (3 * r(4, 61, d), keys_in_pairs(r, d, 3.0, 0.2)), 0.2),
    "within a sigma": (lambda r, d: (0.3 * r(2, 61, d) / d**0.5, 0.3 * r(2, 131, d) / d**0.5), 1.0),
    "clusters within a sigma": (
        lambda r, d: tuple(
            ((0.3 * c)[:, torch.arange(n) % 2] + 0.001 * r(2, n, d)) / d**0.5 for c in [r(2, 2, d)] for n in (61, 131)
        ),
        1.0,
    ),
}


def gaussian_errors(kind: str, size: int, dtype: torch.dtype, seed: int) -> dict[str, tuple[float, float]]:
    """Root mean square errors of the library and of plain PyTorch: differences, squared, added up, softmax."""
    numbers, (make, sigma) = torch.Generator().manual_seed(seed), NEAR_AND_FAR[kind]
    q, k = (x.to(dtype) for x in make(lambda *shape: torch.randn(*shape, generator=numbers), size))
    truth, plain = (
        Gaussian(sigma).similarity(q.to(t), k.repeat_interleave(len(q) // len(k), 0).to(t))
        for t in (torch.float64, dtype)
    )
    W = regard.weights(q, k, score=Gaussian(sigma))
    answers = {
        "dense": (truth.softmax(-1), W.dense(), plain.softmax(-1)),
        "lse": (truth.logsumexp(-1), W.lse(), plain.logsumexp(-1)),
        "max_score": (truth.amax(-1), W.max_score(), plain.amax(-1)),
        "top": (truth.softmax(-1).topk(3).values, W.topk(3).values, plain.softmax(-1).topk(3).values),
    }
    return {
        name: tuple((x.double() - want).square().mean().sqrt().item() for x in (ours, theirs))
        for name, (want, ours, theirs) in answers.items()
    }


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("size", [2, 5, 16, 64])
@pytest.mark.parametrize("kind", NEAR_AND_FAR)
def test_gaussian_errors_are_at_most_twice_those_of_differences(kind, size, compiled, monkeypatch) -> None:
    """Over ten seeds together. Of rows that saturate plain PyTorch has exact weights: less than 2⁻³⁰ is no error."""
    monkeypatch.setattr(numba, "enabled", compiled)
    pooled: dict[str, list[float]] = {}
    for seed in range(10):
        for name, errors in gaussian_errors(kind, size, torch.float32, seed).items():
            sums = pooled.setdefault(name, [0.0, 0.0])
            for n, error in enumerate(errors):
                sums[n] += max(error, 2**-30) ** 2
    for name, (ours, plain) in pooled.items():
        assert ours <= 4 * plain, f"{name}: {(ours / plain) ** 0.5:.3g} times as far off as plain PyTorch"


def test_gaussian_rows_sum_to_one_where_products_cancel() -> None:
    draws = torch.Generator().manual_seed(0)
    q, k = NEAR_AND_FAR["in clusters"][0](lambda *shape: torch.randn(*shape, generator=draws), 16)
    W = regard.weights(q, k, score=Gaussian(0.5))
    assert (W.dense().sum(-1) - 1).abs().max() <= 4 * 2**-23
    torch.testing.assert_close(W[:, 5:9, 3:70], W.dense()[:, 5:9, 3:70], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(W.received(), W.dense().sum(-2), atol=1e-5, rtol=1e-5)


def gaussian_loss(s: Tensor, W: regard.Weights | None, v: Tensor, what: str) -> Tensor:
    """One number for each question, from dense scores s or, if there is one, from a matrix."""
    w = s.softmax(-1)
    dense = {
        "y": lambda: w @ v.repeat_interleave(len(w) // len(v), 0),
        "lse": lambda: s.logsumexp(-1),
        "entropy": lambda: s.logsumexp(-1) - (w * s).sum(-1),
        "received": lambda: w.sum(-2),
        "max_score": lambda: s.amax(-1),
    }
    x = dense[what]() if W is None else W @ v if what == "y" else getattr(W, what)()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return (x * weights.to(x.dtype)).sum()


def gaussian_gradient_errors(kind: str, size: int, what: str, seed: int) -> dict[str, tuple[float, float, float]]:
    """Root mean square errors of the library and of plain PyTorch, and of the gradients themselves."""
    numbers, (make, sigma) = torch.Generator().manual_seed(seed), NEAR_AND_FAR[kind]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    q, k = make(normal, size)
    inputs = q, k, normal(*k.shape[:2], 3), normal(len(q), q.shape[1], k.shape[1])
    grads = []
    for dtype, ours in ((torch.float64, False), (torch.float32, True), (torch.float32, False)):
        a, b, v, bias = tensors = [x.to(dtype).requires_grad_() for x in inputs]
        s = Gaussian(sigma).similarity(a, b.repeat_interleave(len(a) // len(b), 0)) + bias
        W = regard.weights(a, b, score=Gaussian(sigma).bias(bias)) if ours else None
        loss = gaussian_loss(s.detach() if ours else s, W, v, what)
        grads.append(torch.autograd.grad(loss, tensors, allow_unused=True))
    return {
        name: tuple(x.double().square().mean().sqrt().item() for x in (ours - exact, plain - exact, exact))
        for name, exact, ours, plain in zip(("dq", "dk", "dv", "dbias"), *grads, strict=True)
        if exact is not None
    }


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("what", ["y", "lse", "entropy", "received", "max_score"])
@pytest.mark.parametrize("kind", NEAR_AND_FAR)
def test_gaussian_gradients_are_at_most_twice_as_far_off_as_those_of_differences(
    kind, what, compiled, monkeypatch
) -> None:
    """Over seeds and sizes together. Half an ulp of the gradients, 2⁻²⁴, is no error."""
    monkeypatch.setattr(numba, "enabled", compiled)
    pooled: dict[str, list[float]] = {}
    for seed, size in itertools.product(range(4), (2, 16, 64)):
        for name, (ours, plain, exact) in gaussian_gradient_errors(kind, size, what, seed).items():
            sums = pooled.setdefault(name, [0.0, 0.0])
            sums[0] += ours**2
            sums[1] += max(plain, 2**-24 * exact) ** 2
    for name, (ours, plain) in pooled.items():
        assert ours <= 4 * plain, f"{name}: {(ours / plain) ** 0.5:.3g} times as far off as plain PyTorch"


def test_bilinear_is_q_w_k_for_sizes_that_differ() -> None:
    q, k, w = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0]]), torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    assert regard.weights(q, k, score=Bilinear(w)).lse().item() == 1 * 3 + 2 * (5 + 7)


def test_additive_is_v_tanh_of_the_sum_of_projections() -> None:
    q, k = torch.tensor([[2.0]]).double(), torch.tensor([[1.0, 3.0]]).double()
    A, B, v = (
        torch.tensor([[1.0, -1.0]]).double(),
        torch.tensor([[1.0, 0], [0, 0.5]]).double(),
        torch.tensor([2.0, 10]).double(),
    )
    want = 2 * math.tanh(2 + 1) + 10 * math.tanh(-2 + 1.5)
    assert regard.weights(q, k, score=Additive(A, B, v)).lse().item() == pytest.approx(want, rel=1e-14)


def test_a_similarity_may_be_any_function_of_blocks(engine: str) -> None:
    def city_block(q: Tensor, k: Tensor) -> Tensor:
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1)

    n = Sizes()
    q, k = draw(*n.q), draw(*n.k)
    W = regard.weights(q, k, score=city_block, engine=engine)
    torch.testing.assert_close(scores_of(W), city_block(q, per_query_head(k, n.h)), **TIGHT)


def test_a_similarity_sees_blocks_with_heads_matched_in_float32_or_float64() -> None:
    seen: list[tuple] = []

    def watch(q: Tensor, k: Tensor) -> Tensor:
        seen.append((q.dtype, k.dtype, q.shape[:-2], k.shape[:-2]))
        return q @ k.mT

    n = Sizes()
    q, k = draw(*n.q, dtype=torch.bfloat16), draw(*n.k, dtype=torch.bfloat16)
    regard.weights(q, k, score=watch).entropy()
    assert set(seen) == {(torch.float32, torch.float32, (n.b, n.h), (n.b, n.h))}


def test_a_module_is_taken_with_its_parameters(engine: str) -> None:
    module = Sharpness(draw(5), draw())
    q, k = draw(7, 5), draw(11, 5)
    torch.testing.assert_close(scores_of(regard.weights(q, k, score=module, engine=engine)), module(q, k), **TIGHT)


def test_a_module_that_learns_is_followed() -> None:
    module = Sharpness(torch.ones(5).double(), draw())
    q, k = draw(7, 5), draw(11, 5)
    W = regard.weights(q, k, score=module)
    before = W.entropy()
    with torch.no_grad():
        module.sharpness.mul_(3)
    assert not torch.allclose(W.entropy(), before)
    torch.testing.assert_close(scores_of(W), module(q, k), **TIGHT)


def test_modifiers_apply_in_the_order_written(engine: str) -> None:
    q, k, b = draw(5, 3), draw(5, 3), draw(5, 5)
    s = q @ k.mT

    def double(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * s

    for score, want in (
        (Dot().bias(b).modify(double), 2 * (s + b)), (Dot().modify(double).bias(b), 2 * s + b),
        (Dot().softcap(1.0).modify(double), 2 * s.tanh()), (Dot().modify(double).softcap(1.0), (2 * s).tanh()),
        (Dot().bias(b).bias(b), s + 2 * b),
    ):  # fmt: skip
        torch.testing.assert_close(scores_of(regard.weights(q, k, score=score, engine=engine)), want, **TIGHT)


def test_a_modifier_leaves_the_score_it_was_called_on_alone() -> None:
    plain = Dot()
    plain.bias(draw(5, 5)).softcap(2.0).sink(draw(1))
    assert plain.modifiers == ()
    assert plain.sink_logits is None


def test_modify_is_told_positions_not_rows() -> None:
    def only_near(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i - j).abs() <= 1, s, -torch.inf)

    q, k = draw(2, 3), draw(5, 3)
    end = regard.weights(q, k, score=Dot().modify(only_near), align="end").dense() > 0
    assert end.tolist() == [[False, False, True, True, True], [False, False, False, True, True]]


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1), (3, 1, 1), (3, 5, 5), (2, 1, 1, 5), (2, 3, 5, 5), ()])
def test_a_bias_broadcasts_as_torch_does(shape: tuple[int, ...], engine: str) -> None:
    q, b = draw(2, 3, 5, 4), draw(*shape)
    W = regard.weights(q, score=Dot().bias(b), engine=engine)
    torch.testing.assert_close(scores_of(W), q @ q.mT + b, **TIGHT)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1)])
def test_slopes_and_sinks_are_one_number_a_head_or_fewer(shape: tuple[int, ...], engine: str) -> None:
    q, slopes, sink = draw(2, 3, 5, 4), draw(*shape), draw(*shape)
    W = regard.weights(q, score=Dot().alibi(slopes).sink(sink), engine=engine)
    far = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    s = q @ q.mT - slopes[..., None, None] * far
    lse = torch.cat([s, sink[..., None, None].expand(2, 3, 5, 1)], -1).logsumexp(-1)
    torch.testing.assert_close(W.lse(), lse, **TIGHT)
    torch.testing.assert_close(scores_of(W), s, **TIGHT)


def test_projections_with_a_head_axis_belong_to_query_heads_also_when_keys_are_shared(engine: str) -> None:
    n = Sizes(h=4, g=2, c=7)
    q, k = draw(*n.q), draw(*n.k)
    w = draw(n.h, n.d, n.c)
    every = per_query_head(k, n.h)
    want = torch.stack([q[:, h] @ w[h] @ every[:, h].mT for h in range(n.h)], 1)
    torch.testing.assert_close(scores_of(regard.weights(q, k, score=Bilinear(w), engine=engine)), want, **TIGHT)
    A, B, v = draw(n.h, n.d, 3), draw(n.h, n.c, 3), draw(n.h, 3)
    want = torch.stack(
        [torch.tanh((q[:, h] @ A[h])[:, :, None] + (every[:, h] @ B[h])[:, None]) @ v[h] for h in range(n.h)], 1
    )
    torch.testing.assert_close(scores_of(regard.weights(q, k, score=Additive(A, B, v), engine=engine)), want, **TIGHT)
    mixed = Additive(A, B[:1], v[0])
    want = torch.stack(
        [torch.tanh((q[:, h] @ A[h])[:, :, None] + (every[:, h] @ B[0])[:, None]) @ v[0] for h in range(n.h)], 1
    )
    torch.testing.assert_close(scores_of(regard.weights(q, k, score=mixed, engine=engine)), want, **TIGHT)


@pytest.mark.parametrize(("name", "score"), [("dot", Dot()), ("scaled_dot", ScaledDot()), ("cosine", Cosine())])
def test_the_plain_scores_go_by_name(name: str, score: regard.Score) -> None:
    x = draw(5, 3)
    assert torch.equal(regard.weights(x, score=name).lse(), regard.weights(x, score=score).lse())


# Functions that hide parameters.


def test_a_function_that_captures_a_parameter_is_refused() -> None:
    p = draw(grad=True)
    with pytest.raises(ValueError, match="captures the tensor 'p'"):
        Similarity(lambda q, k: p * (q @ k.mT))
    with pytest.raises(ValueError, match="captures the tensor 'p'"):
        Dot().modify(lambda s, i, j: s * p)


def test_a_function_that_captures_a_module_is_refused() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="captures the module 'layer'"):
        Similarity(lambda q, k: layer(q) @ k.mT)


def test_a_function_may_capture_what_needs_no_gradient() -> None:
    p, frozen = draw(), nn.Linear(3, 3).requires_grad_(False).double()
    x = draw(5, 3)
    torch.testing.assert_close(
        scores_of(regard.weights(x, score=lambda q, k: p * (frozen(q) @ k.mT))), p * (frozen(x) @ x.mT), **TIGHT
    )


def test_parameters_that_are_passed_get_gradients(engine: str) -> None:
    p, r, x = draw(grad=True), draw(3, grad=True), draw(5, 3)
    score = Similarity(lambda q, k, r: (q * r) @ k.mT, (r,)).modify(lambda s, i, j, p: s * p, p)
    got = torch.autograd.grad(regard.weights(x, score=score, engine=engine).entropy().sum(), [p, r])
    w = (((x * r) @ x.mT) * p).softmax(-1)
    want = torch.autograd.grad(-(w * w.log()).sum(), [p, r])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def test_a_score_says_in_words_what_it_is() -> None:
    assert repr(ScaledDot().softcap(30.0)) == "ScaledDot().softcap(30)"
    assert repr(Gaussian(2.0).bias(torch.zeros(3, 4)).sink(torch.zeros(2))) == "Gaussian(2).bias(3×4).sink(2)"
    assert repr(Bilinear(torch.zeros(2, 3))) == "Bilinear(2×3)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cosine", "bilinear", "additive"])
def test_scores_of_narrow_inputs_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    q, k = draw(2, 3, 9, 5, dtype=dtype), draw(2, 3, 11, 5, dtype=dtype)
    a, b, v = (draw(*shape, dtype=dtype) for shape in ((5, 5), (5, 5), (5,)))
    make = {
        "cosine": lambda to: Cosine(8.0), "bilinear": lambda to: Bilinear(a.to(to)),
        "additive": lambda to: Additive(a.to(to), b.to(to), v.to(to)),
    }[name]  # fmt: skip
    want = regard.weights(q.double(), k.double(), score=make(torch.float64), engine="reference")
    got = regard.weights(q, k, score=make(dtype))
    torch.testing.assert_close(got.lse().double(), want.lse(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy().double(), want.entropy(), rtol=1e-5, atol=1e-5)


def test_the_formula_of_an_additive_score_takes_one_vector_for_all_heads() -> None:
    q, k, a, b, v = draw(2, 3, 9, 5), draw(2, 3, 11, 4), draw(5, 6), draw(4, 6), draw(6)
    want = (torch.tanh((q @ a).unsqueeze(-2) + (k @ b).unsqueeze(-3)) * v).sum(-1)
    torch.testing.assert_close(Additive(a, b, v).similarity(q, k), want)


def test_whole_numbers_are_parameters_without_a_gradient() -> None:
    ids, table = torch.tensor([0, 2, 1, 0, 2]), torch.randn(3, dtype=torch.float64)

    def by_id(s: Tensor, i: Tensor, j: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        return s + table[ids[j]]

    x = torch.randn(2, 5, 4, dtype=torch.float64)
    results = []
    for engine in ("blockwise", "reference"):
        leaves = [x.clone().requires_grad_(), table.clone().requires_grad_()]
        W = regard.weights(leaves[0], score=regard.ScaledDot().modify(by_id, ids, leaves[1]), engine=engine)
        (W @ x).pow(2).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want)
