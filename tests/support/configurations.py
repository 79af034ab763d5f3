"""Random configurations against float64: every number within what its roundoff can explain, element by element.

A weight is exp(s − lse). With u the unit roundoff of float32, an error of the scores of row i of at most
u · A(√d + 1) · s̄_i, where s̄_i is the largest sum of magnitudes behind a score of the row, and sums over t keys, make a
relative error of the weights of at most

    r_i = u · (A (√d + 1) · s̄_i + B √t + C)

and every answer inherits it:

    |y − y64| ≤ u_y |y64| + r_i Σ_j w_ij |v_j|          |lse − lse64|, |max − max64| ≤ r_i + u |lse64|
    |received − …| ≤ Σ_i r_i w_ij                       |H − H64| ≤ r_i (1 + Σ_j w_ij |log w_ij|)

and so on. u_y is the roundoff of the type that is stored. A, B and C were fitted once and are frozen: the constants
with which 2,000 configurations (batches 1000 to 1039) use at most about three quarters of any bound in
float32 (the weights themselves 0.75, the largest ones 0.64, column sums, pooled map and Wᵀu 0.54, lse 0.47); outputs in
16-bit types use 0.99, since half a unit of the last place is the rounding itself.

In float64 the judge rounds as the library does, and each may be off by r_i: u is twice the roundoff there. (Against
numpy's 80-bit numbers, a configuration where the two differ by 1.01 r_i has the library at 0.82 and the judge at 0.55.)

`python tests/support/configurations.py FILE` runs 20,000 of them, with gradients, and writes a line of JSON for every
batch of 50 into FILE, answers first; batches that stand there are not run again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import regard
from regard.engines import blockwise, numba

sys.path.insert(0, str(Path(__file__).parents[1]))
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
    per_query_head,
)

A, B, C = 2.0, 2.0, 8.0
U32 = 2.0**-24

U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

#: A weight below e^−87 = 1.6e-38 may be 0: no sum over a few thousand of them, nor over distances, comes near this.
FLUSHED = 1e-30
#: What a stored number may lose where its type has no exponents left.
TINY = {torch.float64: FLUSHED, torch.float32: FLUSHED, torch.float16: 2.0**-24, torch.bfloat16: FLUSHED}

#: Numbers of configurations in a batch, and the batches that make 20,000.
BATCH, BATCHES = 50, range(1000, 1400)

PRIMES = (1, 2, 3, 5, 7, 11, 13, 17, 29, 31, 61, 67)


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff that answers are computed with; in float64, that of the judge beside the library's."""
    return 2 * U[dtype] if dtype == torch.float64 else U32


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


class ConfigurationCase:
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

    def double(self, step: float = 0.0, directions: list[Tensor] | None = None) -> ConfigurationCase:
        """The same numbers in float64, as leaves of gradients; moved by a step along directions of its leaves."""
        case = copy.copy(self)
        case.about = dataclasses.replace(self.about, dtype=torch.float64)
        moved = [x.detach().double() for x in self.leaves]
        if directions is not None:
            moved = [x + step * along for x, along in zip(moved, directions, strict=True)]
        case.leaves = [x.requires_grad_(directions is None) for x in moved]
        case.q, case.k, case.v, case.u, *case.parameters = case.leaves
        return case

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
        u = roundoff(dtype)
        size = self.magnitude().masked_fill(~truth.visible, 0)
        largest = size.amax(-1) if n.j else size.sum(-1)
        if truth.sink_share is not None:
            largest = torch.maximum(largest, self.parameters[-1].double().abs()[:, None])
        # A bilinear score is two products, one behind the other: the second adds up over the keys' size.
        terms = math.sqrt(n.d) + (math.sqrt(n.c) if self.about.score.name.startswith("bilinear") else 0)
        return u * (A * (terms + 1) * largest + B * math.sqrt(n.j) + C)


def bounds(case: ConfigurationCase, truth: Truth) -> dict[str, Tensor]:
    """What every number of every answer may be off by."""
    r, w, dtype = case.r(truth), truth.w, case.about.dtype
    u = roundoff(dtype)
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


def used(case: ConfigurationCase, truth: Truth, got: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """For every answer, the largest share of its bound that any of its numbers uses."""
    want, allowed = truth.answers(case.v, case.u), bounds(case, truth)
    for name, limit in allowed.items():
        a, b = got[name].double(), want[name]
        assert a.shape == b.shape, name
        assert torch.equal(a == -torch.inf, b == -torch.inf), name
        error = torch.where(b == -torch.inf, 0, (a - b).abs())
        assert not error.isnan().any(), name
        yield name, (error / (limit + FLUSHED)).max().item() if error.numel() else 0.0


def assert_places(case: ConfigurationCase, truth: Truth, got: dict[str, Tensor]) -> None:
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


@contextmanager
def tiles_of(about: Configuration) -> Iterator[None]:
    """Engines that walk in the tiles of a configuration."""
    own = [(walk, walk._tile_size) for walk in (blockwise, numba)]
    try:
        for walk, _ in own if about.tile is not None else ():
            walk._tile_size = lambda problem: about.tile
        yield
    finally:
        for walk, tile_size in own:
            walk._tile_size = tile_size


#: A configuration, the name of an answer, and the share of its bound that it uses.
Shares = Iterator[tuple["Configuration", str, float]]


def answer_shares(seed: int, count: int) -> Shares:
    """Every answer of a batch of configurations."""
    torch.manual_seed(seed)
    for about in configurations(seed, count):
        case = ConfigurationCase(about)
        with tiles_of(about):
            truth, answers = case.truth(), case.answers()
            for name, share in used(case, truth, answers):
                yield about, name, share
            assert_places(case, truth, answers)


def gradient_shares(seed: int, count: int) -> Shares:
    """The gradient of all answers of a batch of configurations, by finite differences."""
    torch.manual_seed(seed)
    for about in configurations(seed, count):
        with tiles_of(about):
            yield about, "gradient", difference_share(ConfigurationCase(about))


# Gradients.

#: The steps of central differences; the one with the smaller error bound is used.
STEPS = 1e-4, 1e-6


def finite(x: Tensor) -> Tensor:
    """Rows that see nothing have lse and maximum −inf, which do not move."""
    return torch.where(x == -torch.inf, 0, x)


def total(answers: dict[str, Tensor], seeds: dict[str, Tensor]) -> Tensor:
    """One number that depends on every answer that differentiates."""
    return sum((seed * finite(answers[name]).double()).sum() for name, seed in seeds.items())


def gradients(answers: dict[str, Tensor], seeds: dict[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    slopes = torch.autograd.grad(total(answers, seeds), leaves, allow_unused=True)
    return [torch.zeros_like(x).double() if g is None else g.double() for x, g in zip(leaves, slopes, strict=True)]


def without_ties(seeds: dict[str, Tensor], index: Tensor, others: list[Tensor]) -> dict[str, Tensor]:
    """Seeds that are 0 for the largest keys of a row whose order is not the same everywhere: there is a kink."""
    same = torch.stack([(index == other).all(-1) for other in others]).all(0)
    rows = {"top": same.unsqueeze(-1), "peak": same, "max_score": same}
    return {name: seed * rows.get(name, 1) for name, seed in seeds.items()}


def difference_share(case: ConfigurationCase) -> float:
    """Finite differences of the judge against the library's gradient in float64: the share of their bound.

    A central difference over a step h is off by the truncation, for which the difference over 2h stands, and by the
    rounding of the two totals, which is at most Σ |seed| · bound / h. The rounding of the gradient itself is r_i times
    the change of a score along the direction, below the 1/h ≥ 10⁴ of the latter.
    """
    exact = case.double()
    truth = exact.truth()
    answers = exact.answers()
    seeds = {name: torch.randn(answers[name].shape, dtype=torch.float64) for name in SMOOTH}
    along = [torch.randn(x.shape, dtype=torch.float64) for x in exact.leaves]
    limits = bounds(exact, truth)
    best, size = (math.inf, 0.0), 0.0
    for h in STEPS:
        moved = {step: exact.double(step * h, along) for step in (-2, -1, 1, 2)}
        with torch.no_grad():
            truths = {step: other.truth() for step, other in moved.items()}
            smooth = without_ties(seeds, answers["top index"], [other.top(3)[2] for other in truths.values()])
            at = {step: float(total(truths[step].answers(moved[step].v, moved[step].u), smooth)) for step in moved}
            rounding = sum(float((seed.abs() * limits[name].detach()).sum()) for name, seed in smooth.items()) / h
        slope, wide = (at[1] - at[-1]) / (2 * h), (at[2] - at[-2]) / (4 * h)
        bound = abs(slope - wide) + rounding
        if bound < best[0]:
            slopes = gradients(exact.answers(), smooth, exact.leaves)
            ours = sum(float((g * x).sum()) for g, x in zip(slopes, along, strict=True))
            best = bound, abs(slope - ours)
            size = math.sqrt(sum(float(g.square().sum()) for g in slopes))
        if best[0] < 1e-4 * size:
            break
    assert best[0] <= 1e-3 * size or size == 0, f"differences say little: {best[0]:.3g} of {size:.3g}: {case.about}"
    return best[1] / (best[0] + FLUSHED)


def main(file: Path) -> int:
    """Run the batches that the file lacks. Returns 1 if a number is over its bound."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["kind"], line["batch"]) for line in lines}
    for kind, shares in (("answers", answer_shares), ("gradients", gradient_shares)):
        for batch in (batch for batch in BATCHES if (kind, batch) not in done):
            begin, largest, over = time.time(), {}, []
            for about, name, share in shares(batch, BATCH):
                largest[name] = max(largest.get(name, 0.0), share)
                if not share <= 1:
                    over.append(f"{name} uses {share:.3g} of its bound: {about}")
            seconds = round(time.time() - begin, 1)
            lines.append({"kind": kind, "batch": batch, "over": over, "largest": largest, "seconds": seconds})
            with file.open("a") as out:
                out.write(json.dumps(lines[-1]) + "\n")
            print(kind, batch, f"{seconds} s", *over, flush=True)
        count = BATCH * sum(line["kind"] == kind for line in lines)
        print(
            f"{kind} of {count} configurations, {sum(len(line['over']) for line in lines)} over their bound", flush=True
        )
    return int(any(line["over"] for line in lines))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
