"""Losses on attention: their definitions, and that a small model learns by each."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard
from regard import losses


def learned(leaves: list[Tensor], loss: Callable[[], Tensor], steps: int = 40, lr: float = 0.1) -> tuple[float, float]:
    """The loss before and after a few steps of Adam."""
    optimizer = torch.optim.Adam(leaves, lr=lr)
    first = loss().item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return first, loss().item()


def leaf(*shape: int, times: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * times).requires_grad_()


def test_an_entropy_floor_opens_collapsed_rows() -> None:
    torch.manual_seed(0)
    q, k = leaf(2, 8, 4, times=2.5), leaf(2, 8, 4, times=2.5)
    W = regard.weights(q, k)
    torch.testing.assert_close(losses.entropy_floor(W, 1.5), torch.relu(1.5 - W.entropy()).mean())
    before, after = learned([q, k], lambda: losses.entropy_floor(regard.weights(q, k), 1.5), 60, lr=0.1)
    assert before > 0.5
    assert after < before / 4


def test_clip_factors_bring_the_largest_score_to_the_threshold() -> None:
    q, k = leaf(1, 4, 8, 3, times=3), leaf(1, 2, 8, 3, times=3)
    W = regard.weights(q, k, mask=regard.causal())
    threshold = W.max_score().amax(-1).median().item()
    factors = losses.clip_factors(W, threshold)
    assert factors.shape == (1, 4)
    assert not factors.requires_grad
    clipped = regard.weights(q * factors[..., None, None], k, mask=regard.causal()).max_score().amax(-1)
    before = W.max_score().amax(-1)
    torch.testing.assert_close(clipped, before.clamp(max=threshold))
    negative = regard.weights(-torch.ones(2, 3), torch.ones(2, 3), score="dot")
    assert losses.clip_factors(negative, 1.0) == 1
    with pytest.raises(ValueError, match="a number > 0; got 0"):
        losses.clip_factors(W, 0)


def largest_scores(query: torch.nn.Linear, key: torch.nn.Linear, x: Tensor) -> Tensor:
    """Of every query head of size 4, by hand."""
    q, k = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (query, key))
    return (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / 2).amax((0, 2, 3)).detach()


def test_qk_clip_brings_the_largest_score_to_the_threshold() -> None:
    torch.manual_seed(0)
    query, key, x = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.randn(2, 6, 8) * 20
    with torch.no_grad():
        query.bias.zero_()
        key.bias.zero_()
    before = largest_scores(query, key, x)
    assert (before > 10).all()
    factors = losses.qk_clip(query, key, before, threshold=10.0)
    torch.testing.assert_close(largest_scores(query, key, x), torch.full((2,), 10.0))
    torch.testing.assert_close(factors, 10 / before)
    unclipped = query.weight.clone()
    losses.qk_clip(query, key, torch.tensor([3.0, torch.nan]), threshold=10.0)
    assert torch.equal(query.weight, unclipped)
    with pytest.raises(ValueError, match="one score a head; got 3"):
        losses.qk_clip(query, key, torch.ones(3))
    with pytest.raises(ValueError, match="the 4 rows of a query head, and a number of them that divides 2; got a key"):
        losses.qk_clip(query, torch.nn.Linear(8, 12), torch.ones(2))
    with pytest.raises(ValueError, match=r"qk_clip\(threshold\) needs a number > 0; got 0"):
        losses.qk_clip(query, key, torch.ones(2), threshold=0)


def test_qk_clip_with_shared_keys_serves_the_worst_head() -> None:
    query, key = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(1, 5, 8) * 10
    losses.qk_clip(query, key, largest_scores(query, key, x), threshold=5.0)
    assert (largest_scores(query, key, x) <= 5.0 + 1e-4).all()


def test_no_rows_lose_nothing() -> None:
    q = torch.zeros(2, 0, 3, requires_grad=True)
    nothing = regard.weights(q)
    index = losses.index_weights(torch.zeros(2, 0, 3), torch.zeros(0, 3), torch.zeros(0, 2))
    for loss in (
        losses.entropy_floor(nothing, 1.0), losses.alignment(nothing, torch.zeros(0, 0).bool()),
        losses.distillation([q.detach()] * 2, [q] * 2), losses.indexer(nothing, index),
    ):  # fmt: skip
        assert loss == 0
    assert losses.clip_factors(nothing, 1.0).tolist() == [1, 1]


def test_alignment_counts_rows_that_see_a_cell() -> None:
    q = leaf(5, 3)
    cells = torch.eye(5).bool()
    cells[2] = False
    w = regard.weights(q).dense()
    want = -torch.stack([w[i, i].log() for i in (0, 1, 3, 4)]).mean()
    torch.testing.assert_close(losses.alignment(regard.weights(q), cells), want)
    hidden = losses.alignment(regard.weights(q, mask=regard.causal()), torch.ones(5, 5).triu(1).bool())
    assert hidden == 0, "no row sees a cell"


def test_alignment_is_learned() -> None:
    torch.manual_seed(0)
    q, k = leaf(2, 8, 4), leaf(2, 8, 4)
    mean = lambda: regard.weights(q, k).reduce_heads("mean")  # noqa: E731
    _, after = learned([q, k], lambda: losses.alignment(mean(), lambda i, j: i + j == 7), lr=0.2)
    assert after < 0.1
    assert mean().topk(1).indices.flatten().tolist() == list(range(7, -1, -1))


@pytest.mark.parametrize("relations", [("qk",), ("qq", "kk", "vv")])
def test_distillation_is_kl_of_relations_and_is_learned(relations: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    teacher, student = [leaf(2, 7, 6) for _ in "qkv"], [leaf(2, 7, 3) for _ in "qkv"]

    def dense(tensors: list[Tensor], pair: str) -> Tensor:
        a, b = (tensors["qkv".index(letter)] for letter in pair)
        return (a @ b.mT / math.sqrt(a.shape[-1])).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1)

    want = sum(
        torch.nn.functional.kl_div((dense(student, pair) + 1e-300).log(), dense(teacher, pair), reduction="sum") / 14
        for pair in relations
    )
    loss = lambda: losses.distillation(teacher, student, relations, mask=regard.causal())  # noqa: E731
    torch.testing.assert_close(loss().double(), want, rtol=1e-6, atol=1e-7)
    before, after = learned(student, loss)
    assert after < before / 3
    assert teacher[0].grad is None
    with pytest.raises(ValueError, match="pairs of the letters"):
        losses.distillation(teacher, student, ("qx",))


class Index:
    """A teacher of h heads, and the leaves of an indexer with n heads."""

    def __init__(self, sink: bool = False) -> None:
        torch.manual_seed(1)
        score = regard.ScaledDot().sink(torch.randn(4).double()) if sink else regard.ScaledDot()
        teacher = torch.randn(2, 4, 9, 6).double() * 2, torch.randn(2, 2, 9, 6).double()
        self.teacher = regard.weights(*teacher, score=score, mask=regard.causal())
        self.q, self.k, self.w = leaf(2, 3, 9, 5), leaf(2, 9, 5), leaf(2, 9, 3)

    def weights(self) -> regard.Weights:
        return losses.index_weights(self.q, self.k, self.w, regard.causal())

    def scores(self) -> Tensor:
        """(b, i, j), by the formula."""
        s = torch.einsum("bin,bnij->bij", self.w, torch.relu(torch.einsum("bnid,bjd->bnij", self.q, self.k)))
        return s.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)

    def target(self) -> Tensor:
        summed = self.teacher.dense().sum(1)
        return summed / summed.sum(-1, keepdim=True)


def kl(p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (torch.where(p > 0, p, 1).log() - torch.where(p > 0, log_q, 0)), 0).sum(-1)


@pytest.mark.parametrize("teacher", [regard.weights(torch.eye(3)), [torch.eye(3)], torch.eye(3)])
def test_a_teacher_that_is_no_list_of_tensors_is_refused(teacher: object) -> None:
    with pytest.raises(
        TypeError, match=r"distillation\(teacher=\) takes a list of the tensors q, k; got .*teacher\.kl\(student\)"
    ):
        losses.distillation(teacher, [torch.eye(3)] * 2)  # type: ignore[arg-type]


def test_index_weights_are_softmax_of_the_index_scores() -> None:
    it = Index()
    torch.testing.assert_close(it.weights().dense().squeeze(1), it.scores().softmax(-1))
    with pytest.raises(ValueError, match=r"w \(..., i, n\)"):
        losses.index_weights(it.q, it.k, it.w.mT)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("topk", [None, 3])
def test_the_indexer_loss_is_kl_from_the_summed_heads(topk: int | None, sink: bool, strips: None) -> None:
    it = Index(sink)
    s, p = it.scores(), it.target()
    if topk is not None:
        order = s.sort(dim=-1, descending=True, stable=True).indices  # ReLU leaves many scores at 0
        chosen = torch.zeros_like(s, dtype=torch.bool).scatter(-1, order[..., :topk], True) & (s > -torch.inf)
        s, p = s.masked_fill(~chosen, -torch.inf), p * chosen
        p = p / p.sum(-1, keepdim=True)
    want = kl(p, s.log_softmax(-1)).mean()
    got = losses.indexer(it.teacher, it.weights(), topk)
    torch.testing.assert_close(got, want)
    leaves = [it.q, it.k, it.w]
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("topk", [None, 2])
@pytest.mark.parametrize(("teacher", "index"), [((3, 2), (2,)), ((2,), (3, 2)), ((), (2,)), ((2,), ())])
def test_batch_axes_of_a_teacher_and_an_index_broadcast(teacher: tuple, index: tuple, topk: int | None) -> None:
    W = regard.weights(torch.randn(*teacher, 4, 5, 3).double(), mask=regard.causal())
    x = [torch.randn(*index, *shape).double() for shape in ((3, 5, 2), (5, 2), (5, 3))]
    batch = torch.broadcast_shapes(teacher, index)
    alone = [
        losses.indexer(regard.weights(q, mask=regard.causal()), losses.index_weights(*t, regard.causal()), topk)
        for q, *t in zip(
            W._factors.q.expand(*batch, 4, 5, 3).flatten(0, -4),
            *(t.expand(*batch, *t.shape[len(index) :]).flatten(0, len(batch) - 1) for t in x), strict=True,
        )
    ]  # fmt: skip
    got = losses.indexer(W, losses.index_weights(*x, regard.causal()), topk)
    torch.testing.assert_close(got, torch.stack(alone).mean())


def test_weights_of_index_heads_are_not_rounded_to_the_type_of_queries() -> None:
    q, k, w = torch.randn(3, 7, 4).bfloat16(), torch.randn(7, 4).bfloat16(), torch.randn(7, 3, requires_grad=True)
    want = torch.einsum("in,nij->ij", w, torch.einsum("nid,jd->nij", q.float(), k.float()).relu()).softmax(-1)
    torch.testing.assert_close(losses.index_weights(q, k, w).dense()[0], want)
    torch.testing.assert_close(losses.index_weights(q.expand(2, 3, 7, 4), k, w).dense()[1, 0], want)


def test_errors_say_what_must_hold() -> None:
    W, one = regard.weights(torch.randn(2, 5, 3)), regard.weights(torch.randn(5, 3))
    index = losses.index_weights(torch.randn(3, 5, 2), torch.randn(5, 2), torch.randn(5, 3))
    assert losses.entropy_floor(W.reduce_heads(), 9.0) > 0
    for ask, message in (
        (lambda: losses.entropy_floor(W.dense(), 1.0), r"entropy_floor\(weights\) takes a Weights, .*; got Tensor"),
        (lambda: losses.entropy_floor(W, "a"), r"entropy_floor\(floor\) needs a number; got 'a'"),
        (lambda: losses.entropy_floor(W, math.nan), "needs a number; got nan"),
        (lambda: losses.clip_factors(W.dense(), 1.0), r"clip_factors\(weights\) takes a Weights"),
        (lambda: losses.clip_factors(W, "a"), r"clip_factors\(threshold\) needs a number; got 'a'"),
        (lambda: losses.alignment(W.dense(), torch.eye(5).bool()), r"alignment\(weights\) takes a Weights"),
        (lambda: losses.distillation([1, 2], [3, 4]), "a list of the tensors q, k; got list"),
        (lambda: losses.index_weights([1], [2], [3]), "got list, list and list"),
        (lambda: losses.index_weights(torch.rand(5, 2), torch.rand(5, 2), torch.rand(5)), r"w \(..., i, n\); got \(5, 2\)"),
        (lambda: losses.indexer(W.dense(), index), r"indexer\(teacher\) takes a Weights, .*; got Tensor"),
        (lambda: losses.indexer(one, index), r"indexer\(teacher\) needs a head axis"),
        (lambda: losses.indexer(W, W), r"one matrix for all heads, \(..., 1, i, j\), .* got \(2, 5, 5\)"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            ask()


def test_the_indexer_loss_has_the_gradient_of_finite_differences() -> None:
    it = Index()

    def loss(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return losses.indexer(it.teacher, losses.index_weights(q, k, w, regard.causal()))

    assert gradcheck(loss, (it.q, it.k, it.w), fast_mode=True)


def test_an_indexer_learns_where_its_teacher_looks() -> None:
    it = Index()
    before, after = learned([it.q, it.k, it.w], lambda: losses.indexer(it.teacher, it.weights()))
    assert after < before / 3
    mask = it.weights().topk(3).indices
    recall = it.teacher.reduce_heads("mean", groups=1).gather(mask).sum(-1).mean()
    assert recall > 0.75


def test_one_key_of_a_row_weighs_all_of_a_choice_of_one() -> None:
    it = Index()
    torch.testing.assert_close(losses.indexer(it.teacher, it.weights(), topk=1), torch.zeros(()).double())


def test_the_example_shows_what_every_loss_is_for() -> None:
    example = Path(__file__).parents[2] / "examples" / "losses_at_work.py"
    curves = runpy.run_path(str(example))["main"]()
    aligned, entropy, scores, teacher, index, selected = (
        {name: line[[0, -1]].tolist() for name, line in lines.items()} for lines in curves.values()
    )
    assert aligned["mean"][0] < 0.1 < 0.95 < aligned["mean"][1]
    assert entropy["without"][1] < 0.2
    assert entropy["with"][1] > 0.9
    assert scores["without"][1] > 8
    assert scores["with"][1] <= 4 * (1 + 1e-5)
    assert teacher["loss"][1] < teacher["loss"][0] / 5
    assert all(last < first / 4 for first, last in index.values())
    assert selected["selected"][1] > selected["selected"][0] + 0.1
    assert selected["selected"][1] > 0.8 * selected["the best"][1]
    picture = (example.parents[1] / "docs" / "pictures" / "losses.svg").read_text()
    assert [what for what in curves if what not in picture] == [], "run: make pictures"
