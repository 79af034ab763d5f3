"""Two matrices compared row by row: the textbook's values and gradients, never nan, and no digits lost to large scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard
from regard.core.rows.key_choice import KeyChoice
from support.judge import MASKS, SCORES, Sizes, Truth, draw, named

N = Sizes(b=2, h=4, g=2, i=5, j=7, d=3, c=3, e=3)
EPS = 2**-53


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (torch.where(p > 0, p, 1).log() - q.log()), 0).sum(-1)


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda p, q: -torch.where(p > 0, p * torch.where(p > 0, q, 1).log(), 0).sum(-1),
    "kl": lambda p, q: torch.where(p > 0, p * (torch.where(p > 0, p, 1).log() - torch.where(p > 0, q, 1).log()), 0).sum(-1),
    "js": lambda p, q: (kl(p, (p + q) / 2 + (p + q == 0)) + kl(q, (p + q) / 2 + (p + q == 0))) / 2,
    "overlap": lambda p, q: torch.minimum(p, q).sum(-1),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
}  # fmt: skip


def outcomes(truth: Truth, sink: bool) -> Tensor:
    """Weights, and the share of a sink as one more column."""
    if not sink:
        return truth.w
    share = torch.zeros_like(truth.lse) if truth.sink_share is None else truth.sink_share
    return torch.cat([truth.w, share.unsqueeze(-1)], -1)


class Both:
    """Two matrices that share nothing but their lengths, and the judge's."""

    def __init__(self, score: str, mask: str, other_score: str, other_mask: str, engine: str = "auto") -> None:
        self.matrices, self.truths, self.leaves = [], [], []
        cases = [(named(SCORES, s), named(MASKS, m)) for s, m in ((score, mask), (other_score, other_mask))]
        for case, hides in cases:
            q, k, parameters = draw(*N.q, grad=True), draw(*N.k, grad=True), case.parameters(N, grad=True)
            self.matrices.append(
                regard.weights(q, k, score=case.make(*parameters), mask=hides.make(N), align="end", engine=engine)
            )
            self.truths.append(Truth.of(case, hides, N, q, k, parameters, N.j - N.i))
            self.leaves += [q, k, *parameters]
        self.sink = any(case.sink for case, _ in cases)

    def want(self, measure: str) -> Tensor:
        return FORMULAS[measure](*(outcomes(truth, self.sink) for truth in self.truths))


PAIRS = [
    ("scaled_dot", "none", "dot", "none"),
    ("scaled_dot", "causal", "alibi", "causal"),
    ("dot", "causal", "scaled_dot", "none"),
    ("scaled_dot", "window", "bias", "not a window"),
    ("scaled_dot", "causal and padding", "scaled_dot", "a tensor"),
    ("sink", "padding", "scaled_dot", "documents"),
    ("sink", "causal", "all modifiers and a sink", "causal"),
    ("function", "a function", "cosine", "window or first keys"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
@pytest.mark.parametrize("measure", FORMULAS)
def test_it_is_the_formula_on_dense_weights(measure: str, pair: tuple[str, ...], row_engine: str) -> None:
    both = Both(*pair, engine=row_engine)
    got, want = getattr(both.matrices[0], measure)(both.matrices[1]), both.want(measure)
    assert got.shape == (N.b, N.h, N.i)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert (got[~finite] == math.inf).all()
    torch.testing.assert_close(got[finite], want[finite], rtol=2**8 * EPS, atol=2**8 * EPS)
    seed = torch.where(finite, draw(*got.shape), 0)
    ours = torch.autograd.grad(got, both.leaves, seed, allow_unused=True)
    theirs = torch.autograd.grad(torch.where(finite, want, 0), both.leaves, seed, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        if not finite.all():  # the judge's gradient is nan beside an infinite row
            assert a is None or a.isfinite().all()
        elif b is not None:
            torch.testing.assert_close(a, b, rtol=2**12 * EPS, atol=2**12 * EPS)


@pytest.mark.parametrize("measure", FORMULAS)
def test_finite_differences_agree(measure: str, strips: None) -> None:
    def compare(q: Tensor, k: Tensor, other: Tensor, sink: Tensor) -> Tensor:
        p = regard.weights(q, k, mask=regard.causal(), score=regard.ScaledDot().sink(sink))
        return getattr(p, measure)(regard.weights(other, k, mask=regard.causal(), score=regard.Dot().sink(2 * sink)))

    leaves = draw(1, 2, 4, 3, grad=True), draw(1, 1, 4, 3, grad=True), draw(1, 2, 4, 3, grad=True), draw(2, grad=True)
    assert gradcheck(compare, leaves, fast_mode=True)


@pytest.mark.parametrize("measure", FORMULAS)
def test_rows_that_see_nothing_compare_as_nothing(measure: str, strips: None) -> None:
    q, k = draw(2, 3, 4, grad=True), draw(2, 3, 4, grad=True)
    hidden = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    p = regard.weights(q, k, mask=hidden)
    rows = getattr(p, measure)(regard.weights(k, q, mask=hidden))
    assert (rows[:, 1] == 0).all()
    assert rows.isfinite().all()
    rows.sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_a_key_that_only_the_first_sees_is_infinite_and_has_no_gradient(strips: None) -> None:
    q, k = draw(4, 3, grad=True), draw(4, 3, grad=True)
    p, hides = regard.weights(q, k), regard.weights(q, k, mask=regard.causal())
    assert p.kl(hides).tolist()[:3] == [math.inf] * 3
    assert p.cross_entropy(hides).tolist()[:3] == [math.inf] * 3
    assert p.kl(hides)[3] == 0  # the last row sees every key in both
    assert hides.kl(p).isfinite().all()
    p.kl(hides)[:3].sum().backward()
    assert (q.grad == 0).all()
    assert (k.grad == 0).all()


def test_the_sink_of_one_alone_is_an_outcome_that_the_other_forbids() -> None:
    q = draw(3, 4)
    sink = regard.weights(q, score=regard.ScaledDot().sink(torch.zeros(1).double()))
    assert (sink.kl(regard.weights(q)) == math.inf).all()
    assert regard.weights(q).kl(sink).isfinite().all()
    torch.testing.assert_close(sink.overlap(sink), torch.ones(3).double())


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_large_scores_lose_no_digits(scale: float, row_engine: str) -> None:
    def matrices(dtype: torch.dtype) -> list[regard.Weights]:
        torch.manual_seed(3)
        x = [torch.randn(2, 33, 16) for _ in range(3)]
        return [regard.weights((scale * y).to(dtype), x[2].to(dtype), engine=row_engine) for y in x[:2]]

    (p, q), (exact_p, exact_q) = matrices(torch.float32), matrices(torch.float64)
    assert p.kl(p).abs().max() <= 1e-6
    assert p.js(p).abs().max() <= 1e-6
    want = exact_p.kl(exact_q)
    # What plain PyTorch makes of the same float32 tensors.
    s = [(m._factors.q @ m._factors.k.mT / 4).log_softmax(-1) for m in (p, q)]
    plain = (s[0].exp() * (s[0] - s[1])).sum(-1)
    assert (p.kl(q) - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-6 * want.max()


def test_logarithms_of_weights_that_underflow_are_those_of_scores(row_engine: str) -> None:
    q = torch.tensor([[[1.0]], [[2.0]]]).double().requires_grad_()  # two heads of a row
    k = torch.tensor([[0.0], [-3000.0], [-4000.0]]).double()
    W = regard.weights(q, k.expand(2, 3, 1), score="dot", engine=row_engine)
    p = regard.weights(torch.zeros(1, 1).double(), k, engine=row_engine)
    far = torch.tensor([[[[1, 2]]]])
    answers = {
        "log_mass": (W.log_mass(torch.tensor([[False, False, True]])), [[-4000.0], [-8000.0]]),
        "cross_entropy": (p.cross_entropy(W), [[7000.0 / 3], [14000.0 / 3]]),
        "kl": (p.kl(W), [[7000.0 / 3 - math.log(3)], [14000.0 / 3 - math.log(3)]]),
        "kl to heads together": (p.kl(W.reduce_heads("max")), [7000.0 / 3 - math.log(3)]),
        "kl of chosen keys": (KeyChoice(p, far).kl(KeyChoice(W, far)), [[500 - math.log(2)], [1000 - math.log(2)]]),
        "overlap of chosen keys": (KeyChoice(p, far).overlap(KeyChoice(W, far)), [[0.5], [0.5]]),
    }
    for name, (got, exact) in answers.items():
        torch.testing.assert_close(got, torch.tensor(exact).double(), msg=name)
        if name != "overlap of chosen keys":  # of which W's weights, 1 and 0, have no slope
            (g,) = torch.autograd.grad(got.sum(), q, retain_graph=True)
            assert g.isfinite().all()
            assert g.any()


def test_hidden_poison_never_reaches_a_comparison() -> None:
    q, k = draw(2, 5, 4, grad=True), draw(2, 5, 4)
    k[:, 4] = torch.nan
    k.requires_grad_()
    hide = regard.padding(4)
    rows = regard.weights(q, k, mask=hide).kl(regard.weights(2 * q, k, mask=hide))
    rows.sum().backward()
    assert rows.isfinite().all()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_weights_that_exist_and_single_heads_compare_with_lazy_ones() -> None:
    q, w = draw(3, 5, 4, grad=True), draw(5, 5).softmax(-1).requires_grad_()
    teacher, student = regard.Weights.from_dense(w), regard.weights(q)
    rows = teacher.kl(student)
    assert rows.shape == (3, 5)
    torch.testing.assert_close(rows, kl(w, student.dense()))
    rows.sum().backward()
    assert q.grad.abs().sum() > 0
    assert w.grad.isfinite().all()
    assert regard.weights(draw(2, 3, 5, 4)).js(teacher).shape == (2, 3, 5)


def test_distillation_by_kl_brings_a_student_to_its_teacher() -> None:
    torch.manual_seed(0)
    teacher = regard.weights(torch.randn(2, 12, 8), mask=regard.causal())
    q, k = (torch.randn(2, 12, 4).requires_grad_() for _ in "qk")
    optimizer = torch.optim.Adam([q, k], lr=0.1)
    losses = []
    for _ in range(40):
        loss = teacher.kl(regard.weights(q, k, mask=regard.causal())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


def test_errors_say_what_must_hold() -> None:
    p = regard.weights(torch.randn(4, 5, 3))
    with pytest.raises(TypeError, match="another Weights; got Tensor"):
        p.kl(torch.randn(4, 5, 5))
    with pytest.raises(ValueError, match="same i and j"):
        p.kl(regard.weights(torch.randn(4, 6, 3)))
    with pytest.raises(ValueError, match="heads must be equal, or one; got 4 and 2"):
        p.js(regard.weights(torch.randn(2, 5, 3)))
    with pytest.raises(ValueError, match="float64"):
        p.kl(regard.weights(torch.randn(4, 5, 3).double()))
    with pytest.raises(ValueError, match="do not broadcast"):
        regard.weights(torch.randn(2, 4, 5, 3)).kl(regard.weights(torch.randn(3, 4, 5, 3)))
    twice = torch.randn(4, 3, requires_grad=True)
    rows = regard.weights(twice).kl(regard.weights(2 * twice))
    with pytest.raises(NotImplementedError, match="first derivatives"):
        torch.autograd.grad(rows.sum(), twice, create_graph=True)


def test_each_matrix_keeps_its_own_alignment(strips: None) -> None:
    q, k, score = draw(2, 3, 4), draw(2, 5, 4), regard.ScaledDot().alibi(torch.tensor([0.5, 1.0]).double())
    p, other = (regard.weights(q, k, score=score, align=align) for align in ("start", "end"))
    torch.testing.assert_close(p.kl(other), kl(p.dense(), other.dense()))
