"""Parts of complete rows: tiles by maximum and lse, chosen cells, covers and segments, as slices of dense weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard
from support.judge import MASKS, SCORES, Sizes, Truth, draw, named

N = Sizes(b=2, h=4, g=2, i=5, j=7, d=3, c=3, e=3)
EPS = 2**-53
CELLS = torch.tensor([[(3 * i + 5 * j) % 4 < 2 for j in range(N.j)] for i in range(N.i)])
SEGMENTS = torch.tensor([0, 0, 2, -1, 1, 2, 2])


def tiles(x: Tensor, rows: list[tuple[int, int]], cols: list[tuple[int, int]], by: str) -> Tensor:
    """Each tile by itself; one without cells is 0, by lse −inf."""
    reduce: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda cells: cells.sum(-1), "mean": lambda cells: cells.mean(-1),
        "max": lambda cells: cells.amax(-1), "lse": lambda cells: cells.logsumexp(-1),
    }  # fmt: skip

    def one(r: tuple[int, int], c: tuple[int, int]) -> Tensor:
        cells = x[..., slice(*r), slice(*c)].flatten(-2)
        return (
            reduce[by](cells) if cells.shape[-1] else cells.new_full(cells.shape[:-1], -math.inf if by == "lse" else 0)
        )

    return torch.stack([torch.stack([one(r, c) for c in cols], -1) for r in rows], -2)


def parts(tiles: int, start: int, stop: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(start + r * (stop - start) // tiles for r in range(tiles + 1)))


def blocks(size: int, n: int) -> list[tuple[int, int]]:
    return [(r, min(n, r + size)) for r in range(0, n, size)]


QUESTIONS: dict[str, tuple[Callable[[regard.Weights], Tensor], Callable[[Truth], Tensor]]] = {
    **{
        f"pool by {by}": (
            lambda W, by=by: W.pool(2, 3, by=by),
            lambda t, by=by: tiles(t.s if by == "lse" else t.w, parts(2, 0, N.i), parts(3, 0, N.j), by),
        )
        for by in ("mean", "max", "lse")
    },
    "more tiles than keys": (lambda W: W.pool(6, 9, by="max"), lambda t: tiles(t.w, parts(6, 0, N.i), parts(9, 0, N.j), "max")),
    "a window": (
        lambda W: W.pool(2, 2, slice(1, 4), slice(2, 6), by="lse"), lambda t: tiles(t.s, parts(2, 1, 4), parts(2, 2, 6), "lse"),
    ),
    **{
        f"blocks by {by}": (
            lambda W, by=by: W.pool_blocks(2, 3, by=by),
            lambda t, by=by: tiles(t.s if by == "lse" else t.w, blocks(2, N.i), blocks(3, N.j), by),
        )
        for by in ("sum", "mean", "max", "lse")
    },
    "rows and key blocks": (lambda W: W.pool_blocks(1, 2), lambda t: tiles(t.w, blocks(1, N.i), blocks(2, N.j), "sum")),
    "recall of a tensor": (lambda W: W.recall(CELLS), lambda t: (t.w * CELLS).sum(-1)),
    "recall of a mask": (lambda W: W.recall(regard.window(1, 0)), lambda t: (t.w * ((t.distance() <= 1) & CAUSAL)).sum(-1)),
    "recall of blocks": (
        lambda W: W.recall(CELLS[:3, :3], block=(2, 3)),
        lambda t: (t.w * CELLS[:3, :3].repeat_interleave(2, 0).repeat_interleave(3, 1)[: N.i, : N.j]).sum(-1),
    ),
    "log mass": (lambda W: W.log_mass(CELLS), lambda t: (t.w * CELLS).sum(-1).log()),
    "segments of keys": (
        lambda W: W.segment_mass(SEGMENTS), lambda t: torch.stack([(t.w * (n == SEGMENTS)).sum(-1) for n in range(3)], -1),
    ),
    "segments of rows": (
        lambda W: W.segment_mass([slice(0, 4), [6, 2]], rows=torch.tensor([0, 0, -1, 1, 1]), by="mean"),
        lambda t: torch.stack([
            torch.stack([t.w[..., r, :4].sum(-1).mean(-1), t.w[..., r, :][..., [2, 6]].sum(-1).mean(-1)], -1)
            for r in ([0, 1], [3, 4])
        ], -2),
    ),
}  # fmt: skip
CAUSAL = torch.arange(N.i)[:, None] + N.j - N.i >= torch.arange(N.j)


@pytest.mark.parametrize(
    ("score", "mask"),
    [("scaled_dot", "none"), ("sink", "causal and padding"), ("bias", "not a window"), ("alibi", "a tensor")],
)
@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_the_formula_on_dense_weights(question: str, score: str, mask: str, row_engine: str) -> None:
    case, hides = named(SCORES, score), named(MASKS, mask)
    leaves = [draw(*N.q, grad=True), draw(*N.k, grad=True), *case.parameters(N, grad=True)]
    W = regard.weights(*leaves[:2], score=case.make(*leaves[2:]), mask=hides.make(N), align="end", engine=row_engine)
    ask, formula = QUESTIONS[question]
    got, want = ask(W), formula(Truth.of(case, hides, N, leaves[0], leaves[1], leaves[2:], N.j - N.i))
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    torch.testing.assert_close(got[finite], want[finite], rtol=2**8 * EPS, atol=2**8 * EPS)
    seed = torch.where(finite, draw(*got.shape), 0)
    ours = torch.autograd.grad(got, leaves, seed, allow_unused=True)
    if finite.all():  # beside an infinite value the judge's gradient is nan
        theirs = torch.autograd.grad(want, leaves, seed, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=2**12 * EPS, atol=2**12 * EPS)
    assert all(g is None or g.isfinite().all() for g in ours)


@pytest.mark.parametrize("by", ["mean", "max", "lse"])
def test_finite_differences_agree(by: str, strips: None) -> None:
    def ask(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        W = regard.weights(q, k, mask=regard.causal())
        map_ = W.pool(2, 2, by=by)
        return torch.where(map_ == -math.inf, 0, map_), W.log_mass(lambda i, j: j % 2 == 0)

    assert gradcheck(ask, (draw(2, 4, 3, grad=True), draw(1, 4, 3, grad=True)), fast_mode=True)


@pytest.mark.parametrize(
    ("by", "heads"), [("mean", False), ("max", False), ("lse", False), ("sum", True), ("max", True)]
)
def test_a_window_of_the_map_costs_its_rows(by: str, heads: bool) -> None:
    visited: set[int] = set()

    def note(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visited.update(i.flatten().tolist())
        return s

    W = regard.weights(draw(2, 40, 4), score=regard.ScaledDot().modify(note), mask=regard.causal())
    visited.clear()  # the one cell that tells whether the function captures a gradient
    (W.reduce_heads("mean") if heads else W).pool(2, 2, slice(8, 12), slice(0, 9), by=by)
    assert visited == set(range(8, 12))


def test_a_maximum_that_two_strips_share_has_one_gradient(monkeypatch: pytest.MonkeyPatch, strips: None) -> None:
    w = torch.full((4, 4), 0.25, dtype=torch.float64, requires_grad=True)
    regard.Weights.from_dense(w).pool(1, 1, by="max").backward()
    assert w.grad.sum() == 1


def test_a_cover_is_the_smallest_set_and_its_recall_is_the_share() -> None:
    W = regard.weights(draw(2, 3, 9, 4), mask=regard.causal())
    share = 0.7
    chosen, mass = W.cover(share, 1, 2), W.pool_blocks(1, 2)
    recall = W.recall(chosen, block=(1, 2))
    assert (recall >= share - 1e-12).all()
    smallest = mass.masked_fill(~chosen, math.inf).amin(-1)
    assert (recall - smallest < share).all(), "a block could be left out"
    assert (smallest >= mass.masked_fill(chosen, 0).amax(-1)).all(), "a block outside holds more"
    assert not W.cover(0.0, 1, 2).any()
    torch.testing.assert_close(W.recall(W.cover(1.0, 3, 3), block=(3, 3)), torch.ones(2, 3, 9).double())


def test_the_log_of_a_mass_that_underflows_is_finite_and_has_a_gradient(strips: None) -> None:
    q = torch.tensor([[1.0], [1.0]], requires_grad=True)
    k = torch.tensor([[0.0], [400.0]])
    W = regard.weights(q, k, score="dot")
    assert (W.recall(lambda i, j: j == 0) == 0).all()
    loss = -W.log_mass(lambda i, j: j == 0)
    torch.testing.assert_close(loss, torch.full((2,), 400.0))
    loss.sum().backward()
    torch.testing.assert_close(q.grad, torch.full((2, 1), 400.0))


def test_alignment_by_log_mass_is_learned() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(8, 4).requires_grad_() for _ in "qk")
    optimizer = torch.optim.Adam([q, k], lr=0.2)
    for _ in range(40):
        loss = -regard.weights(q, k).log_mass(lambda i, j: i + j == 7).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert regard.weights(q, k).peak().indices.tolist() == list(range(7, -1, -1))


@pytest.mark.parametrize("by", ["sum", "mean", "max", "lse"])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_no_rows_or_no_keys_have_no_blocks(sizes: tuple[int, int], by: str, row_engine: str) -> None:
    i, j = sizes
    W = regard.weights(draw(2, i, 3), draw(2, j, 3), engine=row_engine)
    assert W.pool_blocks(2, 3, by=by).shape == (2, -(-i // 2), -(-j // 3))


def test_segments_are_added_up_in_full_width_under_autocast() -> None:
    W = regard.weights(draw(2, 6, 4).float())
    want = W.segment_mass([slice(0, 3)], rows=[slice(0, 6)])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(W.segment_mass([slice(0, 3)], rows=[slice(0, 6)]), want)


def test_errors_say_what_must_hold() -> None:
    W = regard.weights(torch.randn(5, 3), torch.randn(7, 3))
    with pytest.raises(ValueError, match="by must be 'sum', 'mean', 'max', 'lse'; got 'min'"):
        W.pool(2, 2, by="min")
    with pytest.raises(ValueError, match="share between 0 and 1; got 2"):
        W.cover(2, 1, 1)
    with pytest.raises(ValueError, match="needs scores"):
        regard.Weights.from_dense(torch.eye(3)).pool_blocks(1, 1, by="lse")
    with pytest.raises(ValueError, match="depends on positions"):
        W.recall(regard.causal())
    with pytest.raises(TypeError, match="one flag a block; got Causal"):
        W.recall(regard.causal(), block=(2, 2))
    with pytest.raises(ValueError, match=r"one segment a position, \(7,\); got \(5,\)"):
        W.segment_mass(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(TypeError, match="list of segments; got str"):
        W.segment_mass("word")
    with pytest.raises(TypeError, match=r"two readings; got \[0, 0, 1, 1, 1, 1, 1\]\. Pass torch\.tensor"):
        W.segment_mass([0, 0, 1, 1, 1, 1, 1])


def test_a_cover_in_strips_is_the_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    W = regard.weights(torch.randn(2, 7, 4))
    entire = W.cover(0.8, 1, 2)
    monkeypatch.setattr("regard.core.rows.spans._SORTED_CELLS", 9)
    assert torch.equal(W.cover(0.8, 1, 2), entire)
