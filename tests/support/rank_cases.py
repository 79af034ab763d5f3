"""What the processes of a `RankPool` compute: configurations of the bound, split over ranks in every way."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

import regard
from core.test_bound import Case, Configuration, configurations
from regard.distributed import Shards, shards, zigzag
from support.judge import SMOOTH, Truth, asked_at_once

SPLITS = ("contiguous", "uneven", "empty", "zigzag")
#: Answers that stay with rows, and those that come back with keys; the others are the same on every rank.
OF_ROWS = ("y", "lse", "entropy", "mean_distance", "mass", "top", "top index", "peak", "peak index", "max_score")
OF_KEYS = ("z", "received")


def positions(length: int, world: int, kind: str, chance: random.Random) -> list[list[range]]:
    """The positions of every rank."""
    if kind == "zigzag":
        return zigzag(length, world)
    if kind == "contiguous":
        cuts = [rank * length // world for rank in range(1, world)]
    else:
        cuts = sorted(chance.randrange(length + 1) for _ in range(world - 1))
        if kind == "empty" and world > 1:
            cuts[chance.randrange(world - 1)] = cuts[0]
            cuts[0] = 0
            cuts.sort()
    ends = [0, *cuts, length]
    return [[range(a, b)] if a < b else [] for a, b in pairwise(ends)]


def index_of(runs: list[range]) -> Tensor:
    return torch.tensor([n for run in runs for n in run], dtype=torch.int64)


def drawn(seed: int, dtype: torch.dtype | None) -> Configuration:
    about = next(islice(configurations(10_000 + seed, 1), 1))
    # Equal keys tie for the largest, and the gradient of a tie is that of either.
    return Configuration(**{**vars(about), "dtype": dtype, "kind": "randn"}) if dtype else about


class ShardedCase(Case):
    """A configuration, and the part of it that one rank has."""

    def __init__(self, seed: int, world: int, split: str, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(seed)
        super().__init__(drawn(seed, dtype))
        chance = random.Random(seed)
        n = self.about.n
        self.rows = positions(n.i, world, split, chance)
        self.keys = self.rows if n.i == n.j else positions(n.j, world, split, chance)
        self.exchange = chance.choice(("ring", "gather"))
        self.smallest = chance.choice((1, 4, 2048))

    def over_ranks(self, group: Any, rank: int, grad: bool = False) -> tuple[regard.Weights, list[Tensor]]:
        shards.SHORTEST_PIECE = self.smallest
        about, rows, keys = self.about, index_of(self.rows[rank]), index_of(self.keys[rank])
        local = [self.q[:, :, rows], self.k[:, :, keys], self.v[:, :, keys], self.u[:, :, rows], *self.parameters]
        local = [t.detach().clone().requires_grad_(grad) for t in local]
        W = regard.weights(
            local[0], local[1], score=about.score.make(*local[4:]), mask=about.mask.make(about.n), align=about.align,
            engine="blockwise", mesh=Shards(group, self.rows[rank], self.keys[rank], self.exchange, timeout=100),
        )  # fmt: skip
        return W, local

    def joined(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The global answers, from those of all ranks."""
        total = {}
        for name, first in parts[0].items():
            if name not in (*OF_ROWS, *OF_KEYS):
                assert all(torch.equal(first, part[name]) for part in parts), f"{name} differs between ranks"
                total[name] = first
                continue
            places = torch.cat([index_of(runs) for runs in (self.rows if name in OF_ROWS else self.keys)])
            values = torch.cat([part[name] for part in parts], 2)
            total[name] = torch.empty_like(values).index_copy_(2, places, values)
        return total


def answers(group: Any, rank: int, world: int, seed: int, split: str) -> dict[str, Tensor]:
    case = ShardedCase(seed, world, split)
    W, local = case.over_ranks(group, rank)
    return asked_at_once(W, local[2]) | {"z": W.mT @ local[3], "dense": W.dense()}


def _coefficients(seed: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(like[name].shape, dtype=torch.float64) for name in SMOOTH}


def _loss(answers: dict[str, Tensor], coefficients: dict[str, Tensor]) -> Tensor:
    """Everything together. The log-sum-exp of a row without keys is −inf, and has no gradient."""
    finite = {name: torch.where(answers[name] == -torch.inf, 0, answers[name]) for name in SMOOTH}
    return sum(((finite[name] * coefficients[name]).sum() for name in SMOOTH), torch.zeros((), dtype=torch.float64))


def gradients(group: Any, rank: int, world: int, seed: int, split: str) -> dict[str, Tensor]:
    case = ShardedCase(seed, world, split, torch.float64)
    W, local = case.over_ranks(group, rank, grad=True)
    got = asked_at_once(W, local[2]) | {"z": W.mT @ local[3], "dense": W.dense()}
    rows, keys = index_of(case.rows[rank]), index_of(case.keys[rank])
    full = _coefficients(seed, case.truth().answers(case.v, case.u))
    own = {
        name: c[:, :, rows] if name in OF_ROWS else c[:, :, keys] if name in OF_KEYS else c for name, c in full.items()
    }
    _loss(got, own).backward()
    return dict(zip(("q", "k", "v", "u", *range(len(local) - 4)), (t.grad for t in local), strict=True))


def true_gradients(case: ShardedCase, seed: int) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in case.leaves]
    truth = Truth.of(case.about.score, case.about.mask, case.about.n, *leaves[:2], leaves[4:], case.offset)
    want = truth.answers(*leaves[2:4])
    _loss(want, _coefficients(seed, want)).backward()
    return [t.grad for t in leaves]
