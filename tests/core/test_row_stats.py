"""Heads together, distances, patterns and chosen keys: each as its formula on dense weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard
import regard.chains
from regard.core.rows import strips as core_strips
from support.judge import MASKS, SCORES, Sizes, Truth, draw, named

N = Sizes(b=2, h=4, g=2, i=5, j=7, d=3, c=3, e=3)
EPS = 2**-53
AT = torch.arange(N.i) + N.j - N.i
FAR = (AT[:, None] - torch.arange(N.j)).abs()
TOKENS = ["a", "b", "a", "a", "c", "b", "a"]
TARGETS = torch.tensor([1, 3, -1, 2, 4])  # of the queries at positions 2 to 6
KEYS = torch.tensor([[0, 3], [-1, 2], [6, 6], [1, -1], [5, 4]])
SHARES = torch.tensor([0.5, 2.0, 0.0, 1.0]).double()


def gathered(w: Tensor, keys: Tensor) -> Tensor:
    return torch.stack([torch.stack([w[..., i, j] * (j >= 0) for j in row], -1) for i, row in enumerate(keys)], -2)


def variance(w: Tensor) -> Tensor:
    return (w * (FAR - (w * FAR).sum(-1, keepdim=True)) ** 2).sum(-1)


def bins(w: Tensor) -> Tensor:
    return torch.stack([(w * ((a <= FAR) & (z > FAR))).sum(-1) for a, z in ((0, 1), (1, 3), (3, 9))], -1)


Formula = Callable[[Tensor], Tensor]
#: Of any matrix: the method, and the formula on dense weights (b, h, i, j).
QUESTIONS: dict[str, tuple[Callable[[Any], Tensor], Formula]] = {
    "gather": (lambda W: W.gather(KEYS), lambda w: gathered(w, KEYS)),
    "previous": (lambda W: W.offset_mass(1), lambda w: gathered(w, AT[:, None] - 1).squeeze(-1)),
    "ahead": (lambda W: W.offset_mass(-4), lambda w: gathered(w, torch.where(N.j > AT + 4, AT + 4, -1)[:, None]).squeeze(-1)),
    "induction": (lambda W: W.induction_mass(TOKENS), lambda w: gathered(w, TARGETS[:, None]).squeeze(-1)),
    "variance": (lambda W: W.distance_variance(), variance),
    "histogram": (lambda W: W.distance_histogram([0, 1, 3, 9]), bins),
}  # fmt: skip
V = torch.arange(N.j * 2).reshape(N.j, 2).double() / 7
#: Of heads together.
OF_HEADS: dict[str, tuple[Callable[[regard.HeadReduction], Tensor], Formula]] = {
    **QUESTIONS,
    "dense": (lambda R: R.dense(), lambda w: w),
    "row": (lambda R: R.row(2), lambda w: w[..., 2, :]),
    "column": (lambda R: R.column(4), lambda w: w[..., 4]),
    "cells": (lambda R: R[1:4, 2], lambda w: w[..., 1:4, 2]),
    "largest": (lambda R: R.topk(3).values, lambda w: w.sort(dim=-1, descending=True, stable=True)[0][..., :3]),
    "received": (lambda R: R.received(), lambda w: w.sum(-2)),
    "distance": (lambda R: R.mean_distance(), lambda w: (w * FAR).sum(-1)),
    "mass": (lambda R: R.mass([0, 5]), lambda w: w[..., [0, 5]].sum(-1)),
    "values": (lambda R: R @ V, lambda w: w @ V),
    "pool": (lambda R: R.pool(1, 7, by="max"), lambda w: w.amax(-2, keepdim=True)),
    "segments": (lambda R: R.segment_mass([slice(2, 5)]), lambda w: w[..., 2:5].sum(-1, keepdim=True)),
}
REDUCTIONS: dict[str, tuple[dict[str, Any], Formula]] = {
    "mean": ({"by": "mean"}, lambda w: w.mean(1, keepdim=True)),
    "max in groups": ({"by": "max", "groups": 2}, lambda w: w.unflatten(1, (2, 2)).amax(2)),
    "sum of chosen heads": ({"by": "sum", "heads": [3, 0]}, lambda w: (w[:, 3] + w[:, 0]).unsqueeze(1)),
    "weighted mean": (
        {"by": "mean", "weights": SHARES}, lambda w: (w * (SHARES / SHARES.sum())[:, None, None]).sum(1, keepdim=True),
    ),
    "heads that share keys": ({"by": "mean", "groups": "kv"}, lambda w: w.unflatten(1, (2, 2)).mean(2)),
}  # fmt: skip


class Subject:
    def __init__(self, score: str, mask: str, engine: str) -> None:
        case, hides = named(SCORES, score), named(MASKS, mask)
        self.leaves = [draw(*N.q, grad=True), draw(*N.k, grad=True), *case.parameters(N, grad=True)]
        q, k, *parameters = self.leaves
        self.W = regard.weights(q, k, score=case.make(*parameters), mask=hides.make(N), align="end", engine=engine)
        self.truth = Truth.of(case, hides, N, q, k, parameters, N.j - N.i)

    def agree(self, got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got, want, rtol=2**8 * EPS, atol=2**8 * EPS)
        seed = draw(*got.shape)
        ours = torch.autograd.grad(got, self.leaves, seed, allow_unused=True)
        theirs = torch.autograd.grad(want, self.leaves, seed, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=2**12 * EPS, atol=2**12 * EPS)


SUBJECTS = [("scaled_dot", "none"), ("sink", "causal and padding"), ("alibi", "not a window")]


@pytest.mark.parametrize(("score", "mask"), SUBJECTS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_rows_are_the_formula_on_dense_weights(question: str, score: str, mask: str, row_engine: str) -> None:
    subject = Subject(score, mask, row_engine)
    ask, formula = QUESTIONS[question]
    subject.agree(ask(subject.W), formula(subject.truth.w))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("question", OF_HEADS)
def test_heads_together_are_the_formula_on_dense_weights(question: str, reduction: str, row_engine: str) -> None:
    subject = Subject(*SUBJECTS[len(question + reduction) % 3], row_engine)
    (options, of_heads), (ask, formula) = REDUCTIONS[reduction], OF_HEADS[question]
    got, want = ask(subject.W.reduce_heads(**options)), formula(of_heads(subject.truth.w))
    subject.agree(got, want if "groups" in options else want.squeeze(1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_entropy_and_comparison_of_heads_together(reduction: str, row_engine: str) -> None:
    subject, other = Subject("sink", "causal", row_engine), Subject("sink", "none", row_engine)
    options, of_heads = REDUCTIONS[reduction]
    reduced = subject.W.reduce_heads(**options)
    share = of_heads(torch.cat([subject.truth.w, subject.truth.sink_share.unsqueeze(-1)], -1))
    log = torch.where(share > 0, share, 1).log()
    want = -(share * log).sum(-1)
    subject.agree(reduced.entropy(), want if "groups" in options else want.squeeze(1))
    q = torch.cat([other.truth.w, other.truth.sink_share.unsqueeze(-1)], -1)[:, :1]
    got = reduced.kl(other.W[:, :1])
    want = (share * (log - q.log())).sum(-1)
    torch.testing.assert_close(got, want, rtol=2**10 * EPS, atol=2**10 * EPS)


def test_chosen_heads_that_share_keys_are_groups() -> None:
    W = regard.weights(draw(6, 5, 3), draw(3, 7, 3))
    groups = W.reduce_heads("mean", heads=[4, 5, 1, 0, -4, 3], groups="kv", weights=torch.tensor([1.0, 3, 1, 1, 2, 0]))
    w = W.dense()
    want = torch.stack([(w[4] + 3 * w[5]) / 4, (w[0] + w[1]) / 2, w[2]])
    torch.testing.assert_close(groups.dense(), want)
    for heads in ([0, 1, 2], [0, 2, 1, 3, 4, 5], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="of the 3 key heads, those that share keys side by side"):
            W.reduce_heads("mean", heads=heads, groups="kv")
    for heads in ([6], [-7], []):
        with pytest.raises(IndexError, match="some of 6 heads"):
            W.reduce_heads("mean", heads=heads)
    with pytest.raises(ValueError, match="which must be finite and not 0"):
        W.reduce_heads("mean", groups=3, weights=torch.tensor([1.0, 1, 0, 0, 1, 1]))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_that_are_walked_one_by_one_keep_the_masks_of_their_heads(groups: int, row_engine: str) -> None:
    cells = torch.rand(4, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    W = regard.weights(draw(4, 5, 3), draw(2, 7, 3), mask=cells, engine=row_engine)
    want = W.dense().unflatten(0, (groups, -1))
    for by in ("mean", "max"):
        dense = want.mean(1) if by == "mean" else want.amax(1)
        torch.testing.assert_close(W.reduce_heads(by, groups=groups).pool_blocks(1, 1, by="max"), dense)


def test_weights_of_heads_leave_results_in_the_type_of_the_matrix() -> None:
    W = regard.weights(torch.randn(4, 5, 3))
    R = W.reduce_heads("mean", weights=torch.tensor([1, 2, 0, 1]).double())
    answers = (R.dense(), R.row(1), R.column(1), R[1:3, 2], R.received(), R.entropy(), R.mass(0), R.pool(1, 1))
    assert {x.dtype for x in answers} == {R.dtype} == {torch.float32}


def test_the_largest_of_the_mean_name_their_keys() -> None:
    q = draw(3, 6, 4)
    W = regard.weights(q, mask=regard.causal())
    values, keys = W.reduce_heads("mean").topk(4)
    mean = W.dense().mean(0)
    want = mean.sort(dim=-1, descending=True, stable=True)
    for row in range(6):
        seen = min(row + 1, 4)
        assert keys[row, :seen].tolist() == want.indices[row, :seen].tolist()
        assert keys[row, seen:].tolist() == [-1] * (4 - seen)
        assert (values[row, seen:] == 0).all()


def test_weights_too_small_for_their_type_are_seen_all_the_same() -> None:
    k = torch.tensor([[0.0], [300.0]])
    teacher, student = (
        regard.weights(torch.ones(2, 2, 1), k, score="dot"),
        regard.weights(torch.ones(2, 1), k, score="dot"),
    )
    rows = student.kl(teacher.reduce_heads("mean"))  # a log of the mean of weights would be −inf
    torch.testing.assert_close(rows, torch.zeros(2))


def test_finite_differences_agree(strips: None) -> None:
    def ask(q: Tensor, k: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
        W = regard.weights(q, k, mask=regard.causal())
        R = W.reduce_heads("mean", weights=shares)
        return R.entropy(), R.kl(W), R.topk(2).values, W.distance_variance(), W.offset_mass(1)

    leaves = draw(2, 4, 3, grad=True), draw(1, 4, 3, grad=True), torch.tensor([0.3, 0.9]).double().requires_grad_()
    assert gradcheck(ask, leaves, fast_mode=True)


def test_errors_say_what_must_hold() -> None:
    W = regard.weights(torch.randn(4, 5, 3), torch.randn(4, 7, 3))
    with pytest.raises(ValueError, match="must divide the 4 heads, or be 'kv'; got 3"):
        W.reduce_heads("mean", groups=3)
    with pytest.raises(ValueError, match="'mean', 'sum' or 'max'; got 'min'"):
        W.reduce_heads("min")
    with pytest.raises(ValueError, match="this matrix is one head"):
        W[0].reduce_heads()
    with pytest.raises(ValueError, match="a finite number >= 0 for each of 4 heads"):
        W.reduce_heads("sum", weights=-torch.ones(4))
    with pytest.raises(ValueError, match="a finite number >= 0 for each of 4 heads"):
        W.reduce_heads("sum", weights=torch.tensor([1, 1, 1, float("inf")]))
    with pytest.raises(ValueError, match="takes no weights"):
        W.reduce_heads("max", weights=torch.ones(4))
    with pytest.raises(IndexError, match=r"-1 \(none\) to 6; got 0 to 7"):
        W.gather(torch.tensor([[0], [7], [0], [0], [0]]))
    with pytest.raises(ValueError, match=r"key positions \(5, n\)"):
        W.gather(torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="offset_mass compares positions"):
        W.offset_mass(1)
    with pytest.raises(ValueError, match="two ascending distances"):
        regard.weights(torch.randn(5, 3)).distance_histogram([3, 1])


def test_a_part_of_a_matrix_that_ranks_share_is_not_taken_for_all_of_it() -> None:
    class Shard(regard.Weights):
        _sizes = (10, 5)  # rows of all ranks

    W = regard.weights(torch.randn(2, 5, 3))
    shard = Shard(W._factors, "auto", one_head=False)
    for ask in (lambda: shard.kl(shard), lambda: shard.rows(slice(1, 2)), lambda: shard.reduce_heads().entropy()):
        with pytest.raises(NotImplementedError, match="not computed over ranks"):
            ask()


@pytest.mark.parametrize(("i", "j"), [(0, 3), (3, 0), (0, 0)])
def test_matrices_without_rows_or_keys_answer_with_nothing(i: int, j: int) -> None:
    W = regard.weights(torch.randn(2, i, 4), torch.randn(2, j, 4))
    assert (W.kl(W) == 0).all()
    assert (W.reduce_heads().entropy() == 0).all()
    assert W.gather(torch.full((i, 1), -1)).shape == (2, i, 1)
    assert W.pool_blocks(2, 2, by="max").shape == (2, -(-i // 2), -(-j // 2))
    assert not W.cover(0.5, 1, 1).any()
    assert W.segment_mass([slice(0, 1)]).shape == (2, i, 1)


@pytest.mark.parametrize(
    ("mask", "times"), [(regard.window(100, 0), 4), (regard.causal(), 16)], ids=["window", "causal"]
)
def test_strips_of_a_window_are_as_tall_as_its_keys_allow(mask: Any, times: int) -> None:
    """The number of strips grows with the rows of a window, with the cells of a triangle; each stays within its budget."""
    counts = []
    for t in (2**13, 2**15):
        W = regard.weights(torch.zeros(2, t, 1), mask=mask)
        strips = [part.block for part, _ in core_strips._parts([W._row_source(W._factors.batch)])]
        heights, widths = (
            [x.stop - x.start for x in xs] for xs in zip(*((b.rows, b.cols) for b in strips), strict=True)
        )
        assert max(a * b for a, b in zip(heights, widths, strict=True)) <= core_strips.STRIP_NUMBERS
        counts.append(len(strips))
    assert counts[1] == times * counts[0]


def test_the_largest_in_a_window_name_their_keys(strips: None) -> None:
    W = regard.weights(draw(3, 6, 4), mask=regard.window(1, 0))  # the strip of a late row begins at a late key
    assert torch.equal(W.reduce_heads("mean").topk(1).indices.squeeze(-1), W.dense().mean(0).argmax(-1))


def test_one_key_that_no_row_of_a_strip_sees_adds_nothing() -> None:
    q, v = torch.randn(2, 3, 4), torch.randn(1, 5)
    W = regard.weights(q, torch.randn(2, 1, 4), mask=regard.padding(0))
    assert torch.equal(W.reduce_heads("mean") @ v, torch.zeros(3, 5))
    dy = torch.randn(2, 3, 5)
    assert torch.equal(regard.chains.gradient_relevance(W, dy, v[None], torch.ones(1, 2)), torch.zeros(2, 3, 2))


def test_questions_about_rows_of_several_masks_are_one_graph() -> None:
    mask = regard.window(2, 0) & regard.padding(torch.tensor(4))

    def ask(q: Tensor) -> Tensor:
        return regard.weights(q, mask=mask).recall(regard.causal())

    q = torch.randn(2, 7, 4)
    torch.testing.assert_close(torch.compile(ask, backend="eager", fullgraph=True)(q), ask(q))
