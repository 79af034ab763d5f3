"""A weight belongs to its row, whatever way it is asked.

Scores are made by one product, and the norm of their row from these very scores: so a weight is at most 1, a row that is
asked whole sums to 1, and the error against float64 is that of plain PyTorch's softmax in the same precision, also where
scores are near 10,000 and one unit in the last place of a score is a thousandth of a weight.

Every sequence of a batch is a seed of its own. The root mean square of an answer's errors is held against that of
plain PyTorch's, seed by seed: the geometric mean of the ratios to 1.2, the worst of them to 3, and the largest error of
all seeds to three times plain PyTorch's, but for two units in the last place of 1. Gradients are held to 1.5: that of a
cell is the difference of two sums, which plain PyTorch takes before it adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import regard
from regard.engines import numba

SEEDS, ROWS, KEYS, SIZE = 12, 10, 14, 17
U = 2.0**-24

Formula = Callable[[Tensor, Tensor], Tensor]


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(SIZE)


def _in_pairs(x: Tensor, axis: int) -> Tensor:
    return x.repeat_interleave(2, axis)


class Case:
    """Queries and keys of one size of score, a matrix over them, and the formula of its scores."""

    def __init__(self, name: str, times: float, heads: int, seeds: int = SEEDS) -> None:
        # Keys come in pairs whose scores differ by about 1: whatever the size of the scores, every row is torn between
        # two keys, and the largest error of a seed is one of thousands. Else rows are all on one key, and rarely err.
        self.q = math.sqrt(times) * torch.randn(seeds, heads, ROWS, SIZE)
        k = math.sqrt(times) * _in_pairs(torch.randn(seeds, heads // 2, KEYS // 2, SIZE), -2)
        self.k = k + torch.randn(k.shape) / math.sqrt(times)
        self.times, self.sink = times, None
        self.parameters: list[Tensor] = []
        mask, score, self.formula = None, regard.ScaledDot(), scaled
        i, j = torch.arange(ROWS)[:, None] + KEYS - ROWS, torch.arange(KEYS)
        self.visible = torch.ones(ROWS, KEYS, dtype=torch.bool)
        if name.startswith("bias"):
            shape = (1, 1, 1, KEYS // 2) if name == "bias a key" else (1, heads, ROWS, KEYS // 2)
            b = times * _in_pairs(torch.randn(shape), -1)
            score, self.formula = score.bias(b), lambda q, k: scaled(q, k) + b.to(q.dtype)
            self.parameters = [b]
        elif name == "softcap":
            cap = 2.0 * times
            score, self.formula = score.softcap(cap), lambda q, k: cap * torch.tanh(scaled(q, k) / cap)
        elif name == "sink":
            self.sink = times * torch.randn(heads)
            score, self.parameters = score.sink(self.sink), [self.sink]
        elif name == "causal":
            mask, self.visible = regard.causal(), j <= i
        elif name == "window":
            mask, self.visible = regard.window(6, 2), (j - i <= 2) & (i - j <= 6)
        elif name == "a tensor":
            self.visible = torch.rand(ROWS, KEYS) < 0.7
            self.visible[:, 0] = True
            mask = self.visible
        self.W = regard.weights(self.q, self.k, score=score, mask=mask, align="end", engine="blockwise")

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Weights by PyTorch's softmax of whole rows."""
        s = self.formula(self.q.to(dtype), self.k.to(dtype)).masked_fill(~self.visible, -torch.inf)
        if self.sink is not None:
            s = torch.cat([s, self.sink.to(dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
        return s.softmax(-1)[..., :KEYS]

    def bound(self, exact: Tensor) -> Tensor:
        """What a weight may be off by: the bound of `test_bound`, for the magnitudes behind these scores."""
        size = scaled(self.q.abs().double(), self.k.abs().double()).amax(-1, keepdim=True)
        size = size + sum(float(x.abs().max()) for x in self.parameters) + 2 * self.times
        return exact * U * (2 * (math.sqrt(SIZE) + 1) * size + 2 * math.sqrt(KEYS) + 8) + 1e-30

    def terms(self, exact: Tensor, at: Callable[[Tensor], Tensor], seed: Tensor) -> tuple[Tensor, Tensor]:
        """The largest sum of magnitudes behind a number of the gradients of q and of k, seed by seed.

        A gradient is a difference of such terms: where a row is all on one key they cancel to 1e-14 of themselves.
        """
        w = exact.detach().requires_grad_()
        (g,) = torch.autograd.grad((at(w) * seed.abs()).sum(), w)
        q, k = (x.detach().abs().double().requires_grad_() for x in (self.q, self.k))
        grads = torch.autograd.grad((scaled(q, k) * g * w.detach()).sum(), (q, k))
        return tuple(x.flatten(1).amax(1)[:, None, None, None] for x in grads)

    def left_to_keys(self, way: str) -> Tensor:
        """What rows that are asked together sum to: 1, less what a sink takes of the scores they have."""
        if self.sink is None:
            return torch.ones(self.W.shape[:-1])
        problem, together = self.W._factors.problem(), ROWS if way == "dense" else 1
        s = [problem.scores(problem.block(slice(i, i + together), slice(0, KEYS))) for i in range(0, ROWS, together)]
        every = torch.cat([torch.cat(s, 2), self.sink[:, None, None].expand(*self.W.shape[:-1], 1)], -1)
        return 1 - every.softmax(-1)[..., -1].double()


Way = tuple[str, Tensor, Callable[[Tensor], Tensor]]


def ways(W: regard.Weights) -> Iterator[Way]:
    """Every way to ask for weights: its name, its answer, and which cells of a matrix it is."""
    yield "dense", W.dense(), lambda w: w
    yield "row", torch.stack([W.row(i) for i in range(ROWS)], -2), lambda w: w
    yield from parts_of_rows(W)
    peak, topk = W.peak(), W.topk(3)
    yield "peak", peak.values, lambda w: w.gather(-1, peak.indices.unsqueeze(-1)).squeeze(-1)
    yield "topk", topk.values, lambda w: w.gather(-1, topk.indices.clamp(min=0)).masked_fill(topk.indices < 0, 0)
    yield "W @ e", W @ torch.eye(KEYS), lambda w: w
    # From here on the norm is remembered.
    yield from ((f"{name}, norm remembered", got, at) for name, got, at in parts_of_rows(W))


EVERY = [(i, j) for i in range(ROWS) for j in range(KEYS)]


def parts_of_rows(W: regard.Weights, cells: list[tuple[int, int]] = EVERY) -> Iterator[Way]:
    rows, keys = [7, 2, 2, 3, 4, 8, 0, 9, 6, 5, 1], [5, 2, 2, 9, 0, 1, 13, 12, 3, 4, 11, 10, 7, 6, 8]
    i, j = zip(*cells, strict=True)
    yield "columns", torch.stack([W.column(n) for n in range(KEYS)], -1), lambda w: w
    yield "tiles", torch.cat([W[..., :, :5], W[..., :, 5:]], -1), lambda w: w
    yield "listed rows", W[..., rows, 1:], lambda w: w[..., rows, 1:]
    yield "listed keys", W[..., 1:, keys], lambda w: w[..., 1:, keys]
    yield "cells", torch.stack([W[..., a, b] for a, b in cells], -1), lambda w: w[..., i, j]


def assert_as_exact(ours: Tensor, plain: Tensor, name: str, limit: float = 1.2) -> None:
    """Errors of ours and of plain PyTorch's, each (seed, ...): as large, over all seeds."""
    a, b = (x.double().square().flatten(1).mean(1).sqrt() for x in (ours, plain))
    ratio = (a / b).log()
    mean, worst = ratio.mean().exp().item(), ratio.max().exp().item()
    assert mean <= limit, f"{name}: {mean:.3g} times as far off as plain PyTorch, geometric mean of {len(ratio)} seeds"
    assert worst <= 3, f"{name}: {worst:.3g} times as far off as plain PyTorch in the worst of {len(ratio)} seeds"


@pytest.fixture
def walk(tiles, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Compiled tiles or plain ones, also where none divides the matrix."""

    def choose(how: str) -> None:
        if how.startswith("plain"):
            monkeypatch.setattr(numba, "enabled", False)
        if how.endswith("3 by 4"):
            tiles(3, 4)

    return choose


NAMES = ["scaled", "bias", "bias a key", "softcap", "sink", "causal", "window", "a tensor"]
WALKS = [
    *(("compiled", name) for name in NAMES),
    *((how, name) for how in ("compiled 3 by 4", "plain", "plain 3 by 4") for name in ("scaled", "softcap", "sink", "a tensor")),
]  # fmt: skip


@pytest.mark.parametrize("times", [1, 10, 100, 1000])
@pytest.mark.parametrize(("how", "name"), WALKS)
def test_a_weight_belongs_to_its_row_whatever_way_it_is_asked(how: str, name: str, times: int, walk) -> None:
    walk(how)
    case = Case(name, times, heads=32)
    exact, plain = case.plain(torch.float64), case.plain(torch.float32)
    error, bound = (plain - exact).abs(), case.bound(exact)
    for way, got, at in ways(case.W):
        off = (got - at(exact)).abs()
        assert (got <= 1).all(), way
        assert (got >= 0).all(), way
        assert (off <= at(bound)).all(), way  # so two ways agree within the sum of their bounds
        assert_as_exact(off, at(error), way)
        most, theirs = off.max(), at(error).max()
        assert most <= 3 * theirs + 4 * U, f"{way}: off by {most:.3g}, plain PyTorch by {theirs:.3g}"
        if way in ("dense", "row"):
            assert ((got.double().sum(-1) - case.left_to_keys(way)).abs() <= 5e-7).all(), way


@pytest.mark.parametrize("times", [1, 10, 100, 1000])
@pytest.mark.parametrize(("how", "name"), WALKS)
def test_gradients_of_cells_are_as_exact_as_those_of_plain_pytorch(how: str, name: str, times: int, walk) -> None:
    walk(how)
    case = Case(name, times, heads=16, seeds=3 * SEEDS)  # the ratio is 1.2 to 1.3, and that of 12 seeds up to 1.55
    leaves = [case.q.requires_grad_(), case.k.requires_grad_()]
    exact, plain = case.plain(torch.float64), case.plain(torch.float32)
    for way, got, at in parts_of_rows(case.W, cells=EVERY[::9]):
        seed = torch.randn(got.shape)
        want, theirs, ours = (
            torch.autograd.grad((x.to(dtype) * seed.to(dtype)).sum(), leaves, retain_graph=True)
            for x, dtype in ((at(exact), torch.float64), (at(plain), torch.float32), (got, torch.float32))
        )
        for leaf, a, b, c, most in zip("qk", ours, theirs, want, case.terms(exact, at, seed), strict=True):
            name = f"the gradient of {leaf} from {way}"
            a, b = ((x - c).abs() / most for x in (a, b))
            # A gradient is made of weights, each off by its bound, and of their sum.
            assert (a <= 4 * (case.bound(exact) / exact.clamp(min=1e-20)).amax()).all(), name
            # The keys of a pair cancel in the gradient of q: of large scores, the few rows torn between others are left.
            # And of a few cells only a handful are torn: too few numbers for a ratio.
            if way != "cells" and (leaf == "k" or times <= 10):
                assert_as_exact(a, b, name, 1.5)


@pytest.mark.parametrize("times", [1, 100, 1000])
@pytest.mark.parametrize("how", ["compiled", "compiled 3 by 4", "plain"])
def test_weights_in_gradients_belong_to_their_rows_too(how: str, times: int, walk) -> None:
    """Σ lse has W itself for its gradient into a bias a cell, and Σ Wᵀu the sums of rows: of neither is there a kernel."""
    walk(how)
    q, k = (math.sqrt(times) * torch.randn(4, heads, length, 8) for heads, length in ((6, 17), (2, 70)))
    bias = torch.zeros(4, 6, 17, 70, requires_grad=True)
    u = torch.randn(4, 6, 17, 3, requires_grad=True)
    W = regard.weights(q, k, score=regard.ScaledDot().bias(bias), engine="blockwise")
    (w,) = torch.autograd.grad(W.lse().sum(), bias)
    (sums,) = torch.autograd.grad((W.mT @ u).sum(), u)
    assert ((w.double().sum(-1) - 1).abs() <= 5e-7).all()
    assert ((sums.double() - 1).abs() <= 5e-7).all()
    assert (w <= 1).all()
    # The gradient of a weight vanishes where its row has no other.
    (g,) = torch.autograd.grad(W[..., :, :35].sum(), bias)
    alone = w == 1
    assert alone.any() or times == 1
    assert (g[alone].abs() <= 4 * U).all()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("keys", [14, 130, 4096, 65536])
@pytest.mark.parametrize("engine", ["blockwise", "reference"])
def test_rows_asked_whole_sum_to_one_at_any_length(engine: str, keys: int, sink: bool) -> None:
    """Scores of size 3: nearly all of a row is in one of the few running sums that vectors of a CPU take."""
    q, k = 3 * torch.randn(2, 60, 4), torch.randn(2, keys, 4)
    score = regard.ScaledDot().sink(torch.full((2,), -1e4)) if sink else None
    W = regard.weights(q, k, score=score or "scaled_dot", engine=engine)
    for grad in (False, True):
        q.requires_grad_(grad)
        for rows in (W.dense(), W.row(3), W[..., 5:20, :]):
            assert ((rows.double().sum(-1) - 1).abs() <= 4 * 2 * U).all()
            assert (rows <= 1).all()


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ["blockwise", "reference"])
def test_a_mean_of_heads_on_one_key_is_one(
    engine: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of rounded shares are not: 14 times 1/14 is 1.0000001 in float32, with an entropy below 0."""
    monkeypatch.setattr(numba, "enabled", compiled and numba.enabled)
    for heads in (2, 6, 7, 9, 10, 11, 12, 14, 20, 28, 40, 49):
        q = torch.randn(heads, 3, 4, dtype=dtype, requires_grad=heads % 2 == 0)
        R = regard.weights(q, mask=regard.causal(), engine=engine).reduce_heads("mean")
        first = [
            R[0, 0],
            R.row(0)[0],
            R.dense()[0, 0],
            R.rows(slice(0, 1)).dense()[0, 0],
            R.mass(0)[0],
            R.topk(1).values[0, 0],
        ]
        first += [R.gather(torch.zeros(3, 1, dtype=torch.long))[0, 0], R.pool(3, 3, by="max")[0, 0]]
        assert all(x == 1 for x in first), heads
        assert (R.entropy() >= 0).all(), heads
