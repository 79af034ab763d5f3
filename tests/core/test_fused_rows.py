"""Kernels for questions about complete rows: the textbook in float64, no worse than plain PyTorch, and no other answer than strips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
import regard.chains
import regard.losses
from regard.core.rows import traced as traced_rows
from regard.core.rows.fused import fused
from regard.engines import numba
from regard.engines.numba import comparison, head_rows, tile_pool
from support.comparison_cases import CASES, MEASURES, judged, judged_where_a_row_is_nan, some_cells

pytestmark = pytest.mark.skipif(numba.load() is None, reason="needs numba and the symbols of PyTorch's library")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that divide no length of these tests."""
    monkeypatch.setattr(comparison, "BLOCK_I", 8)
    monkeypatch.setattr(comparison, "BLOCK_J", 16)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every question whether kernels answered it."""
    by_kernels: list[bool] = []

    def ask(*args: Any) -> list[Tensor] | None:
        outputs = fused(*args)
        by_kernels.append(outputs is not None)
        return outputs

    monkeypatch.setattr(traced_rows, "fused", ask)
    return by_kernels


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", CASES)
def test_a_measure_and_its_gradients_are_the_textbooks(name: str, measure: str, answers: list[bool]) -> None:
    judged(name, measure)
    assert answers == [True]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("broken", ["bias", "gradient"])
def test_a_row_of_nan_reaches_the_keys_that_it_sees_and_no_other(
    measure: str, broken: str, answers: list[bool]
) -> None:
    judged_where_a_row_is_nan(measure, broken)
    assert all(answers)


@pytest.mark.parametrize("measure", ["kl", "js"])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_large_scores_lose_no_more_digits_than_plain_pytorch(measure: str, scale: float) -> None:
    errors = []
    for _ in range(8):  # pooled: one draw may be lucky
        x = [torch.randn(2, 65, 16) for _ in range(3)]
        p, q = (regard.weights(scale * y, x[2]) for y in x[:2])
        assert p.kl(p).abs().max() <= 1e-6
        assert p.js(p).abs().max() <= 1e-6
        exact, plain = ([(scale * y).to(t) @ x[2].to(t).mT / 4 for y in x[:2]] for t in (torch.float64, torch.float32))
        errors.append([formula(measure, *s).double() for s in (exact, plain)] + [getattr(p, measure)(q).double()])
    want, plain_rows, rows = (torch.stack(e) for e in zip(*errors, strict=True))
    assert (rows - want).norm() <= 2 * (plain_rows - want).norm() + 1e-7 * want.norm()


def formula(measure: str, s: Tensor, s2: Tensor) -> Tensor:
    a, b = s.log_softmax(-1), s2.log_softmax(-1)
    if measure == "kl":
        return (a.exp() * (a - b)).sum(-1)
    middle = torch.logaddexp(a, b) - math.log(2)
    return ((a.exp() * (a - middle)).sum(-1) + (b.exp() * (b - middle)).sum(-1)) / 2


@pytest.mark.parametrize("measure", MEASURES)
def test_rows_that_see_nothing_and_hidden_poison_leave_no_trace(measure: str, answers: list[bool]) -> None:
    q, k = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    k[:, 4] = math.nan
    cells = torch.ones(5, 5, dtype=torch.bool)
    cells[:, 4] = False
    cells[1] = False
    q.requires_grad_(), k.requires_grad_()
    rows = getattr(regard.weights(q, k, mask=cells), measure)(regard.weights(2 * q, k, mask=cells))
    rows.sum().backward()
    assert answers == [True]
    assert rows.isfinite().all()
    assert (rows[:, 1] == 0).all()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_equal_weights_share_the_gradient_of_their_overlap(answers: list[bool]) -> None:
    """As `torch.minimum` does: of scores that are all 0 a row sees four keys, two of them in both matrices."""
    leaves, k = [torch.zeros(1, 4, requires_grad=True) for _ in range(2)], torch.randn(6, 4)
    sees = (
        torch.tensor([[True, True, True, True, False, False]]),
        torch.tensor([[True, True, False, False, True, True]]),
    )
    p, other = (regard.weights(x, k, score="dot", mask=cells) for x, cells in zip(leaves, sees, strict=True))
    p.overlap(other).sum().backward()
    assert answers == [True]
    for x, cells in zip(leaves, sees, strict=True):
        scores = torch.zeros(1, 6).masked_fill(~cells, -math.inf).requires_grad_()
        fixed = torch.zeros(1, 6).masked_fill(~(sees[0] if cells is sees[1] else sees[1]), -math.inf)
        torch.minimum(scores.softmax(-1), fixed.softmax(-1)).sum().backward()
        assert scores.grad.abs().sum() > 0
        torch.testing.assert_close(x.grad, scores.grad @ k)


def test_a_key_that_only_the_first_sees_is_infinite_however_small_its_weight() -> None:
    q = torch.tensor([[200.0], [1.0]])
    k = torch.tensor([[1.0], [-1.0]])  # the first row weighs key 1 with exp(-400): 0 in float32
    p, q2 = regard.weights(q, k, score="dot"), regard.weights(q, k, score="dot", mask=torch.tensor([[True, False]] * 2))
    assert p.kl(q2).tolist() == [math.inf, math.inf]
    assert p.cross_entropy(q2).tolist() == [math.inf, math.inf]


def test_what_kernels_do_not_compute_is_left_to_strips(answers: list[bool]) -> None:
    x = torch.randn(2, 5, 4)
    bias = torch.zeros(5, requires_grad=True)
    plain = regard.weights(x)
    for other in (
        regard.weights(x, score=regard.ScaledDot().sink(torch.zeros(2))),
        regard.weights(x, score=regard.ScaledDot().bias(bias)),
        regard.weights(x, score=regard.ScaledDot().modify(lambda s, i, j: s + 1)),
        plain.reduce_heads(),
    ):
        assert plain.kl(other).shape == (2, 5)
    assert not any(answers)


def test_a_teacher_without_gradient_costs_no_gradient_of_it() -> None:
    teacher, student = torch.randn(2, 9, 4), torch.randn(2, 9, 4, requires_grad=True)
    regard.weights(teacher).kl(regard.weights(student)).sum().backward()
    assert student.grad.abs().sum() > 0
    with pytest.raises(NotImplementedError, match="first derivatives"):
        torch.autograd.grad(regard.weights(teacher).kl(regard.weights(student)).sum(), student, create_graph=True)


def test_narrow_inputs_compare_in_float32() -> None:
    q, k = (torch.randn(2, 19, 8).bfloat16().requires_grad_() for _ in "qk")
    rows = regard.weights(q, k).kl(regard.weights(k, q))
    want = regard.weights(q.double(), k.double()).kl(regard.weights(k.double(), q.double()))
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, want.float(), rtol=1e-5, atol=1e-5)
    rows.sum().backward()
    assert q.grad.dtype == torch.bfloat16


# Heads together.

HEAD_QUESTIONS = {
    "indexer": lambda W, x, mask: regard.losses.indexer(W, regard.losses.index_weights(*x[:3], mask)),
    "kl": lambda W, x, mask: W.reduce_heads("mean", groups=2).kl(regard.weights(x[0][:, :2], x[0][:, 2:], mask=mask)),
    "one student for all groups": lambda W, x, mask: W.reduce_heads("sum", groups=2).cross_entropy(regard.weights(x[0][:, :1], x[0][:, 1:2], mask=mask)),
    "entropy": lambda W, x, mask: W.reduce_heads("mean", groups=2, weights=x[3].new_tensor([1, 2, 0, 3])).entropy(),
}  # fmt: skip


@pytest.fixture
def small_head_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (numba, head_rows):
        monkeypatch.setattr(module, "_tile_size", lambda problem: (8, 16))


@pytest.mark.usefixtures("small_head_tiles")
@pytest.mark.parametrize("question", HEAD_QUESTIONS)
@pytest.mark.parametrize(
    "mask",
    [None, regard.causal(), regard.window(9, 2), ~regard.window(2, 2)],
    ids=["none", "causal", "window", "several intervals"],
)
@pytest.mark.parametrize("cached", [False, True])
def test_heads_together_are_the_textbooks(question: str, mask: Any, cached: bool, answers: list[bool]) -> None:
    leaves = [torch.randn(shape) for shape in ((2, 4, 37, 5), (2, 37, 5), (2, 37, 4), (2, 4, 37, 8), (2, 2, 37, 8))]
    results = []
    for dtype, engine in ((torch.float32, "auto"), (torch.float64, "reference")):
        x = [t.to(dtype) for t in leaves]
        x[:3] = [t.requires_grad_() for t in x[:3]]
        W = regard.weights(*x[3:], mask=mask, score=regard.ScaledDot().softcap(4.0), engine=engine)
        if cached:
            W.lse()
        rows = HEAD_QUESTIONS[question](W, x, mask)
        grads = torch.autograd.grad(rows.sum(), x[:3], allow_unused=True) if rows.requires_grad else ()
        results.append((rows.detach(), grads))
    assert answers == [True]
    (got, grads), (want, exact) = results
    torch.testing.assert_close(got, want.float(), rtol=3e-6, atol=3e-6)
    for g, e in zip(grads, exact, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            torch.testing.assert_close(g, e.float(), rtol=1e-5, atol=1e-5 * max(1.0, float(e.abs().max())))


def test_what_head_kernels_do_not_compute_is_left_to_strips(answers: list[bool]) -> None:
    x, y = torch.randn(4, 9, 8), torch.randn(9, 8)
    W, student = regard.weights(x, mask=regard.causal()), regard.weights(y, mask=regard.causal())
    sink = regard.weights(x, mask=regard.causal(), score=regard.ScaledDot().sink(torch.zeros(4)))
    assert W.reduce_heads("max").entropy().shape == (9,)
    assert regard.weights(x.clone().requires_grad_()).reduce_heads("mean").entropy().requires_grad
    assert W.reduce_heads("mean").js(student).shape == (9,)
    assert W.reduce_heads("mean").kl(regard.weights(y)).shape == (9,)  # other keys than the heads see
    assert sink.reduce_heads("mean").entropy().shape == (9,)
    assert not any(answers)


@pytest.mark.usefixtures("small_head_tiles")
@pytest.mark.parametrize("heads", [10, 28, 49])
def test_a_mean_of_heads_divides_once(heads: int) -> None:
    """49 times 1/49 is more than 1 in float32: of heads that are all on one key the mean is not that of one head."""
    on_one_key = (100 * torch.randn(40, 8)).expand(heads, 40, 8).contiguous()
    W, S = (regard.weights(q, mask=regard.causal()) for q in (on_one_key, torch.randn(1, 40, 8)))
    mean, each = W.reduce_heads("mean"), W.reduce_heads("mean", groups=heads)
    assert torch.equal(mean.cross_entropy(S)[0], each.cross_entropy(S)[0])
    assert (mean.entropy() >= 0).all()


def test_the_norm_of_heads_is_that_of_their_tiles() -> None:
    errors = []
    for _ in range(6):  # pooled: one draw may be lucky
        q, k = 100 * torch.randn(4, 37, 8), torch.randn(4, 37, 8)
        exact, plain = ((q.to(t) @ k.to(t).mT / 8**0.5).softmax(-1).mean(0) for t in (torch.float64, torch.float32))
        rows = regard.weights(q, k).reduce_heads("mean").entropy()
        errors.append([torch.special.entr(exact).sum(-1), torch.special.entr(plain).sum(-1).double(), rows.double()])
    want, plain_rows, rows = (torch.stack(e) for e in zip(*errors, strict=True))
    assert (rows - want).norm() <= 2 * (plain_rows - want).norm() + 1e-6


def test_a_row_that_sees_nothing_has_nothing_to_compare() -> None:
    cells = ~regard.window(0, 20) & regard.window(9, 20)  # the first row sees no key
    x, q = torch.randn(4, 9, 8), torch.randn(1, 9, 8, requires_grad=True)
    rows = regard.weights(x, mask=cells).reduce_heads("mean").kl(regard.weights(q, mask=cells))
    rows.sum().backward()
    assert (rows[..., 0] == 0).all()
    assert q.grad.isfinite().all()


# Tiles.

TILES = {
    "blocks": lambda W, by: W.pool_blocks(5, 7, by),
    "rows and key blocks": lambda W, by: W.pool_blocks(1, 9, by),
    "a window": lambda W, by: W._pool_by((3, 4, slice(5, 18), slice(2, 30)), by),
    "more tiles than rows": lambda W, by: W._pool_by((23, 2, slice(None), slice(None)), by),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by", ["sum", "mean", "max", "lse"])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    "mask",
    [None, regard.causal(), regard.window(9, 2), ~regard.window(2, 2), some_cells(21, 37)],
    ids=["none", "causal", "window", "several intervals", "a tensor"],
)
def test_tiles_are_the_textbooks(
    mask: Any, tiles: str, by: str, threads: int, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (numba, tile_pool):
        monkeypatch.setattr(module, "_tile_size", lambda problem: (8, 16))
        monkeypatch.setattr(module, "_chunks", lambda *sizes: threads)
    q, k = 3 * torch.randn(2, 2, 21, 5), torch.randn(2, 1, 37, 5)
    score = regard.ScaledDot().softcap(4.0).alibi(torch.tensor([0.2, 0.1])).sink(torch.tensor([0.5, -1.0]))
    W, exact = (
        regard.weights(q.to(t), k.to(t), score=score, mask=mask, align="end", engine=engine)
        for t, engine in ((torch.float32, "auto"), (torch.float64, "reference"))
    )
    got, want = TILES[tiles](W, by), TILES[tiles](exact, by)
    assert answers == [True]
    torch.testing.assert_close(got, want.float(), rtol=5e-6, atol=1e-6)


def test_the_largest_weight_of_a_tile_is_one_of_its_cells_whatever_the_scores(answers: list[bool]) -> None:
    for scale in (1.0, 30.0, 1000.0):
        W = regard.weights(scale * torch.randn(2, 33, 8), mask=regard.causal())
        largest = W.pool(1, 1, by="max").flatten()
        torch.testing.assert_close(largest, W.dense().amax((1, 2)), rtol=1e-5, atol=0)
        lse = W.pool_blocks(1, 33, by="lse").squeeze(-1)
        torch.testing.assert_close(lse, W.lse(), rtol=1e-6, atol=1e-6)
    assert answers == [True] * 6


def test_a_visible_nan_shows_in_its_tile_and_a_hidden_one_nowhere(answers: list[bool]) -> None:
    q, k = torch.randn(6, 4), torch.randn(6, 4)
    k[5] = math.nan
    for by in ("sum", "max", "lse"):
        shown, hidden = regard.weights(q, k), regard.weights(q, k, mask=regard.padding(5))
        assert shown.pool_blocks(2, 6, by=by).isnan().all()
        assert hidden.pool_blocks(2, 5, by=by)[:, 0].isfinite().all()
        strips = regard.weights(q.clone().requires_grad_(), k).pool_blocks(2, 6, by=by)
        assert strips.isnan().all()
    assert answers == [True, True, False] * 3


# Inside torch.compile.


@pytest.mark.parametrize("what", ["segments", "entropy floor", "rollout", "induction"])
def test_products_and_counts_of_rows_break_no_graph(what: str) -> None:
    ids = torch.tensor([3, 1, 3, 3, 2, 1])

    def ask(q: Tensor) -> Tensor:
        W = regard.weights(q, mask=regard.causal())
        if what == "segments":
            return W.segment_mass([slice(0, 3), slice(2, 6)], rows=[slice(2, 5)])
        if what == "entropy floor":
            return regard.losses.entropy_floor(W, 1.0)
        return regard.chains.rollout([W, W], torch.eye(6)) if what == "rollout" else W.induction_mass(ids)

    q = torch.randn(2, 3, 6, 4)
    torch.testing.assert_close(torch.compile(ask, backend="eager", fullgraph=True)(q), ask(q))


def test_questions_about_rows_are_operators_of_a_compiled_graph(answers: list[bool]) -> None:
    def ask(q: Tensor, k: Tensor, other: Tensor) -> Tensor:
        W, S = regard.weights(q, k, mask=regard.causal()), regard.weights(other, k, mask=regard.causal())
        largest = W.reduce_heads("mean").topk(2)
        return W.kl(S).mean() + W.pool(2, 2, by="max").sum() + largest.values.sum()

    leaves = [torch.randn(2, 7, 4, requires_grad=True) for _ in range(3)]
    want = ask(*leaves)
    exact = torch.autograd.grad(want, leaves)
    got = torch.compile(ask, backend="aot_eager", fullgraph=True)(*leaves)
    torch.testing.assert_close(got, want)
    for g, e in zip(torch.autograd.grad(got, leaves), exact, strict=True):
        torch.testing.assert_close(g, e)
    assert True in answers[3:]  # by kernels, there too


#: Made outside of graphs: the compiler of PyTorch 2.8 takes no operators of our classes.
PADDED = regard.causal() & regard.padding(torch.tensor(5))


def padded(k: Tensor) -> Tensor:
    """Keys with nan where PADDED hides them."""
    return k.masked_fill((torch.arange(7) >= 5)[:, None], math.nan)


COMPILED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "segments": lambda q, k: regard.weights(q, k).segment_mass([slice(0, 3), slice(3, 7)]).square(),
    "chosen keys": lambda q, k: regard.weights(q, k).gather(torch.tensor([[0, 2]]).expand(7, 2)),
    "padding": lambda q, k: regard.weights(q, padded(k), mask=PADDED).kl(regard.weights(k, mask=PADDED)),
    "a bool tensor": lambda q, k: regard.weights(q, k, mask=(torch.arange(7) < 5)[None]).js(regard.weights(k)),
    "some rows": lambda q, k: regard.weights(q, k, mask=regard.causal()).pool(2, 3, i=slice(2, 6), by="max"),
    "heads of some rows": lambda q, k: regard.weights(q, k, mask=PADDED).rows(slice(1, 4)).reduce_heads().entropy(),
    "the previous key": lambda q, k: regard.weights(q, k, mask=regard.causal()).offset_mass(1),
    "distances": lambda q, k: regard.weights(q, k).distance_histogram([0, 2, 9]).square(),
    "alignment": lambda q, k: regard.losses.alignment(regard.weights(q, k), torch.eye(7).bool()),
    "rollout": lambda q, k: regard.chains.rollout([regard.weights(q, k)] * 2, torch.eye(7)).square(),
    "indexer": lambda q, k: regard.losses.indexer(
        regard.weights(k), regard.losses.index_weights(q, k[0], torch.ones(7, 2), regard.causal()), topk=3
    ),
}


@pytest.mark.parametrize("question", COMPILED)
def test_relations_are_graphs_without_breaks(question: str) -> None:
    q, k = torch.randn(2, 7, 4, requires_grad=True), torch.randn(2, 7, 4)
    ask = COMPILED[question]
    want, got = ask(q, k).sum(), torch.compile(ask, backend="aot_eager", fullgraph=True)(q, k).sum()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, q)[0] for x in (got, want)))
