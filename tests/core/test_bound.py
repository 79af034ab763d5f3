"""The bound: every number within what its roundoff can explain, element by element, against float64.

A weight is exp(s − lse). With u the unit roundoff of float32, an error of the scores of row i of at most
u · A(√d + 1) · s̄_i, where s̄_i is the largest sum of magnitudes behind a score of the row, and sums over t keys, make a
relative error of the weights of at most

    r_i = u · (A (√d + 1) · s̄_i + B √t + C)

and everything asked of the weights inherits it:

    |y − y64| ≤ u_y |y64| + r_i Σ_j w_ij |v_j|          |lse − lse64|, |max − max64| ≤ r_i + u |lse64|
    |received − …| ≤ Σ_i r_i w_ij                       |H − H64| ≤ r_i (1 + Σ_j w_ij |log w_ij|)

and so on. u_y is the roundoff of the type that is stored. A, B and C were fitted once and are frozen: the constants
with which 2,000 configurations of this file (batches 1000 to 1039) use at most about three quarters of any bound in
float32 (the weights themselves 0.75, the largest ones 0.64, column sums, pooled map and Wᵀu 0.54, lse 0.47); outputs in
16-bit types use 0.99, since half a unit of the last place is the rounding itself. A max over the tensor would miss a key
dropped for one row, and a mean whole wrong rows; this misses neither. The second gate is FlashAttention's, over many
seeds: the errors of an answer are as large as plain PyTorch's in the same precision (geometric mean of the ratio at most
1.5, worst 4), those of gradients at most three times as large.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard
from support.judge import (
    MASKS,
    SCORES,
    SMOOTH,
    MaskCase,
    ScoreCase,
    Sizes,
    Truth,
    draw,
    library_answers_at_once,
    named,
    per_query_head,
)

A, B, C = 2.0, 2.0, 8.0
U32 = 2.0**-24

# torch says so of some short matrices in float16 and bfloat16, and then multiplies them another way.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")

U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

#: A weight below e^−87 = 1.6e-38 may be 0: no sum over a few thousand of them, nor over distances, comes near this.
FLUSHED = 1e-30
#: What a stored number may lose where its type has no exponents left.
TINY = {torch.float64: FLUSHED, torch.float32: FLUSHED, torch.float16: 2.0**-24, torch.bfloat16: FLUSHED}

PRIMES = (1, 2, 3, 5, 7, 11, 13, 17, 29, 31, 61, 67)


@dataclass(frozen=True)
class Configuration:
    score: ScoreCase
    mask: MaskCase
    dtype: torch.dtype
    n: Sizes
    align: str
    kind: str
    tile: tuple[int, int] | None

    def __str__(self) -> str:
        return f"{self.score.name} | {self.mask.name} | {self.dtype} | {self.n} | {self.align} | {self.kind} | tile {self.tile}"


def drawn(chance: random.Random) -> Configuration:
    score = chance.choice(SCORES)
    g = chance.choice((1, 2, 3))
    n = Sizes(
        b=chance.choice((1, 2, 3)), h=g * chance.choice((1, 2, 3)), g=g, i=chance.choice(PRIMES), j=chance.choice(PRIMES),
        d=chance.choice((1, 2, 3, 5, 7, 17, 31)), e=chance.choice((1, 2, 3, 5, 19)),
    )  # fmt: skip
    n = n._replace(c=n.d + 2 if score.sizes_differ else n.d)
    dtype = chance.choice((torch.float32,) * 6 + (torch.float16, torch.bfloat16, torch.float64))
    tile = chance.choice((None, None, (3, 4), (5, 24), (16, 65), (2, 7)))
    return Configuration(
        score,
        chance.choice(MASKS),
        dtype,
        n,
        chance.choice(("start", "end")),
        chance.choice(("randn", "3 randn", "peaked")),
        tile,
    )


class Case:
    """Tensors of a configuration, the truth about them, and how large the terms behind every score are."""

    def __init__(self, about: Configuration) -> None:
        self.about, n, dtype = about, about.n, about.dtype
        times = 3.0 if about.kind == "3 randn" else 1.0
        self.q, self.k = draw(*n.q, dtype=dtype, times=times), draw(*n.k, dtype=dtype, times=times)
        if about.kind == "peaked" and n.c == n.d:
            # Some keys are what a query looks for: rows with one weight near 1.
            for key in range(0, n.j, 3):
                self.k[:, :, key] = 4 * self.q[:, :: n.h // n.g, key % n.i] if n.i else 0
        self.v, self.u = draw(*n.v, dtype=dtype), draw(*n.u, dtype=dtype)
        self.parameters = about.score.parameters(n, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        self.offset = n.j - n.i if about.align == "end" else 0
        self.leaves = [self.q, self.k, self.v, self.u, *self.parameters]

    def truth(self, dtype: torch.dtype = torch.float64) -> Truth:
        about = self.about
        return Truth.of(about.score, about.mask, about.n, self.q, self.k, self.parameters, self.offset, dtype)

    def weights(self) -> regard.Weights:
        about = self.about
        score = about.score.make(*self.parameters)
        return regard.weights(
            self.q, self.k, score=score, mask=about.mask.make(about.n), align=about.align, engine="blockwise"
        )

    def answers(self) -> dict[str, Tensor]:
        W = self.weights()
        return library_answers_at_once(W, self.v) | {"z": W.mT @ self.u, "dense": W.dense()}

    def magnitude(self) -> Tensor:
        """The sum of magnitudes behind every score, (b, h, i, j)."""
        name, n = self.about.score.name, self.about.n
        q, k = self.q.double(), per_query_head(self.k.double(), n.h)
        p = [x.double().abs() for x in self.parameters]
        i, j = torch.arange(n.i)[:, None] + self.offset, torch.arange(n.j)[None]
        far = (i - j).abs()
        if name == "cosine":
            return (
                2.5 * torch.nn.functional.normalize(q, dim=-1).abs() @ torch.nn.functional.normalize(k, dim=-1).abs().mT
                + 2.5
            )
        if name in ("gaussian", "all modifiers and a sink"):
            # Computed from the centre of the keys in float32, from the origin in shorter types; either is below this.
            sigma = 1.7 if name == "gaussian" else 2.0
            size = (q.abs().unsqueeze(-2) + 2 * k.abs().unsqueeze(-3)).square().sum(-1)
            shift = 2 * k.abs().amax(-2, keepdim=True).square().sum(-1, keepdim=True)
            size = (size + shift + q.square().sum(-1, keepdim=True)) / (2 * sigma**2)
            return size if name == "gaussian" else size + p[0] + p[1][:, None, None] * far + p[2] + 3
        if name.startswith("bilinear"):
            return q.abs() @ p[0] @ k.abs().mT
        if name.startswith("additive"):
            v = p[2] if p[2].ndim == 1 else p[2][:, None, None]
            return ((1 + (q.abs() @ p[0]).unsqueeze(-2) + (k.abs() @ p[1]).unsqueeze(-3)) * v).sum(-1)
        scale = {
            "scaled_dot": n.d**-0.5,
            "scaled_dot(0.3)": 0.3,
            "alibi": n.d**-0.5,
            "modify": n.d**-0.5,
            "sink": n.d**-0.5,
        }.get(name, 1.0)
        size = q.abs() @ k.abs().mT * scale
        if name == "modify":
            return size * p[0] + 0.1 * (i.abs() + 2 * j)
        if name == "function":
            return (size + 1) * p[0]
        if name == "alibi":
            return size + p[0][:, None, None] * far
        if "bias" in name:
            return size + p[0] + 2
        return size + 2 * ("softcap" in name)

    def r(self, truth: Truth) -> Tensor:
        """The relative error that roundoff may make of the weights of a row, (b, h, i)."""
        n, dtype = self.about.n, self.about.dtype
        u = U[dtype] if dtype == torch.float64 else U32
        size = self.magnitude().masked_fill(~truth.visible, 0)
        largest = size.amax(-1) if n.j else size.sum(-1)
        if truth.sink_share is not None:
            largest = torch.maximum(largest, self.parameters[-1].double().abs()[:, None])
        # A bilinear score is two products, one behind the other: the second adds up over the keys' size.
        terms = math.sqrt(n.d) + (math.sqrt(n.c) if self.about.score.name.startswith("bilinear") else 0)
        return u * (A * (terms + 1) * largest + B * math.sqrt(n.j) + C)


def bounds(case: Case, truth: Truth) -> dict[str, Tensor]:
    """What every number of every answer may be off by."""
    r, w, dtype = case.r(truth), truth.w, case.about.dtype
    u = U[dtype] if dtype == torch.float64 else U32
    rows = r.unsqueeze(-1)
    off = Truth(truth.s, truth.visible, offset=truth.offset)  # the same questions, of r_i w_ij instead of w_ij
    off.w = rows * w
    size = torch.where(truth.lse == -torch.inf, 0, truth.lse).abs()
    heads = truth.w.shape[1]
    logs = -(w * torch.where(w > 0, w, 1).log()).sum(-1)
    top, _, _ = truth.top(3)
    peak, score, _ = (x.squeeze(-1) for x in truth.top(1))
    score = torch.where(score == -torch.inf, 0, score)
    return {
        "y": U[dtype] * truth.y(case.v).abs() + rows * (w @ per_query_head(case.v.double().abs(), heads)) + TINY[dtype],
        "z": U[dtype] * truth.z(case.u).abs() + (rows * w).mT @ case.u.double().abs() + TINY[dtype],
        "lse": r + u * size, "max_score": r + u * score.abs(), "entropy": r * (1 + logs),
        "received": off.received() + u * truth.received(), "pool": off.pool(3, 4) + u * truth.pool(3, 4), "mean_distance": off.mean_distance(),
        "mass": off.mass([n for n in (0, 2) if n < w.shape[-1]]), "top": rows * top, "peak": r * peak, "dense": rows * w,
    }  # fmt: skip


def used(case: Case, truth: Truth, got: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """For every answer, the largest share of its bound that any of its numbers uses."""
    want, allowed = truth.answers(case.v, case.u), bounds(case, truth)
    for name, limit in allowed.items():
        a, b = got[name].double(), want[name]
        assert a.shape == b.shape, name
        assert torch.equal(a == -torch.inf, b == -torch.inf), name
        error = torch.where(b == -torch.inf, 0, (a - b).abs())
        assert not error.isnan().any(), name
        yield name, (error / (limit + FLUSHED)).max().item() if error.numel() else 0.0


def assert_places(case: Case, truth: Truth, got: dict[str, Tensor]) -> None:
    """A chosen key is one that could be chosen: its score is within the bound of the nth largest."""
    slack = 2 * case.r(truth).unsqueeze(-1)
    for name, n in (("top index", 3), ("peak index", 1)):
        index = got[name] if n > 1 else got[name].unsqueeze(-1)
        _, score, want = truth.top(n)
        assert torch.equal(index < 0, want < 0), name
        if truth.s.shape[-1] == 0:
            continue
        chosen = truth.s.gather(-1, index.clamp(min=0))
        assert ((chosen >= score - slack) | (index < 0)).all(), name
        assert all(len(set(row)) == len(row) for row in index.flatten(0, -2).tolist() if -1 not in row), name


def configurations(seed: int, count: int) -> Iterator[Configuration]:
    chance = random.Random(seed)
    return (drawn(chance) for _ in range(count))


def hold(seed: int, count: int, tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for about in configurations(seed, count):
        with monkeypatch.context() as patched:
            if about.tile is not None:
                tiles(*about.tile)
            case = Case(about)
            truth, got = case.truth(), case.answers()
            for name, share in used(case, truth, got):
                assert share <= 1, f"{name} uses {share:.3g} of its bound: {about}"
            assert_places(case, truth, got)
            patched.undo()
        monkeypatch.undo()


@pytest.mark.parametrize("batch", range(40))
def test_every_number_stays_within_its_bound(batch: int, tiles, monkeypatch) -> None:
    hold(batch, 50, tiles, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(1000, 1360))
def test_every_number_stays_within_its_bound_20000_times(batch: int, tiles, monkeypatch) -> None:
    hold(batch, 50, tiles, monkeypatch)


def off_by(truth: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """The root mean square of every answer's errors, as a share of its largest number."""
    errors = {}
    for name in SMOOTH:
        want = torch.where(truth[name] == -torch.inf, 0, truth[name])
        error = torch.where(truth[name] == -torch.inf, 0, got[name].double() - want)
        errors[name] = (error.square().mean().sqrt() / want.abs().max()).item()
    return errors


#: Seeds whose errors are held against plain PyTorch's. Of a single one the largest error, ours or theirs, is luck.
POOL = 10
#: By how much errors may exceed plain PyTorch's: the geometric mean of the ratios and the worst of them.
USUAL, OF_CELLS = (1.5, 4.0), (1.2, 3.0)
#: A distance is made of three products, |q|², |k|² and q·k: its error is that of the largest, also where q and k are
#: near and their difference, which the formula squares, would be exact.
OF_DISTANCES = (2.5, 10.0)


@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_errors_are_those_of_plain_pytorch_over_many_seeds(score: ScoreCase) -> None:
    ratios: dict[str, list[float]] = {name: [] for name in SMOOTH}
    n = score.sizes(b=1, h=4, g=2, i=61, j=131, d=17, e=7)
    kinds = zip(("none", "causal and padding", "window or first keys"), ("randn", "3 randn", "peaked"), strict=True)
    abouts = [Configuration(score, named(MASKS, mask), torch.float32, n, "end", kind, None) for mask, kind in kinds]
    for _ in range(POOL):
        ours, plain = dict.fromkeys(SMOOTH, 0.0), dict.fromkeys(SMOOTH, 0.0)
        for case in map(Case, abouts):
            truth = case.truth().answers(case.v, case.u)
            theirs = case.truth(torch.float32).answers(case.v, case.u)
            for total, errors in ((ours, off_by(truth, case.answers())), (plain, off_by(truth, theirs))):
                for name, error in errors.items():
                    total[name] += error**2
        for name in SMOOTH:
            ratios[name].append(math.sqrt(ours[name] / plain[name]))
    for name, values in ratios.items():
        mean, worst = math.exp(sum(map(math.log, values)) / POOL), max(values)
        limits = OF_DISTANCES if score.name == "gaussian" else OF_CELLS if name == "dense" else USUAL
        assert mean <= limits[0] and worst <= limits[1], (  # noqa: PT018
            f"{name}: {mean:.3g} times as far off as plain PyTorch (geometric mean), {worst:.3g} times in the worst seed"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
def test_gradients_are_at_most_three_times_as_far_off_as_those_of_plain_pytorch(
    score: ScoreCase, dtype: torch.dtype
) -> None:
    ours: list[float] = []
    plain: list[float] = []
    for mask in ("none", "causal and padding", "window or first keys", "a tensor"):
        for kind in ("randn", "3 randn", "peaked"):
            n = score.sizes(b=2, h=4, g=2, i=29, j=67, d=17, e=7)
            case = Case(Configuration(score, named(MASKS, mask), dtype, n, "end", kind, None))
            for x in case.leaves:
                x.requires_grad_(True)
            want, theirs, got = (
                case.truth().answers(case.v, case.u),
                case.truth(dtype).answers(case.v, case.u),
                case.answers(),
            )
            seeds = {name: torch.randn(want[name].shape, dtype=torch.float64) for name in SMOOTH}
            exact = _gradients(want, seeds, case.leaves)
            for total, answers in ((ours, got), (plain, theirs)):
                grads = _gradients(answers, seeds, case.leaves)
                assert all(g.isfinite().all() for g in grads) or answers is theirs
                total.append(
                    max(((a - b).norm() / (b.norm() + 1e-6)).item() for a, b in zip(grads, exact, strict=True))
                )
    finite = [x for x in plain if math.isfinite(x)]
    # The gradient is rounded to the type it is stored in, whoever computes it.
    assert max(ours) <= 3 * max(finite, default=0.0) + 2 * U[dtype], (
        f"{max(ours):.3g} against {max(finite, default=0.0):.3g}"
    )


def _gradients(answers: dict[str, Tensor], seeds: dict[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    total = sum(
        (seeds[name] * torch.where(x == -torch.inf, 0, x).double()).sum()
        for name, x in answers.items()
        if name in seeds
    )
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x).double() if g is None else g.double() for x, g in zip(leaves, grads, strict=True)]


# The gate itself can fail: bugs that a max or a mean over the tensor let through.


def spoiled(change) -> float:
    """The share of y's bound that a wrong matrix uses."""
    n = Sizes(b=1, h=2, g=1, i=61, j=67, d=17, c=17, e=5)
    case = Case(
        Configuration(named(SCORES, "scaled_dot"), named(MASKS, "none"), torch.float32, n, "start", "randn", None)
    )
    truth = case.truth()
    s = truth.s.clone()
    change(s)
    wrong = Truth(s, s > -torch.inf)
    return ((wrong.y(case.v) - truth.y(case.v)).abs() / bounds(case, truth)["y"]).max().item()


def test_the_bound_sees_a_key_dropped_for_the_last_row_only() -> None:
    assert spoiled(lambda s: s[..., -1, -1].fill_(-torch.inf)) > 10


def test_the_bound_sees_a_scale_off_by_a_thousandth() -> None:
    assert spoiled(lambda s: s.mul_(1.001)) > 10


def test_the_bound_sees_two_keys_exchanged_in_one_row() -> None:
    assert spoiled(lambda s: s[0, 0, 7].copy_(s[0, 0, 7].roll(1))) > 10


def test_the_bound_lets_the_truth_pass() -> None:
    assert spoiled(lambda s: None) == 0
