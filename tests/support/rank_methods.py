"""Every public method of `Weights`, of heads together and of scores, for a `RankPool`: over ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from regard.core.array_protocol import Scores
from regard.distributed import RankError, Shards, zigzag
from support.rank_cases import index_of

LENGTH = 11
#: Where an answer is: with the rows or keys of a rank (axis 1), the same on every rank, or nowhere.
ROWS, KEYS, ALL, REFUSED = "rows", "keys", "all", "refused"
Method = tuple[Callable[[Any, Any, Tensor], Any], str]

_POSITIONS: dict[str, Method] = {
    "gather": (lambda m, o, rows: m.gather(rows[:, None] // 2), ROWS),
    "induction_mass": (lambda m, o, rows: m.induction_mass([n % 3 for n in range(LENGTH)]), ROWS),
    "offset_mass": (lambda m, o, rows: m.offset_mass(1), ROWS),
    "distance_histogram": (lambda m, o, rows: m.distance_histogram([0, 2, 5]), ROWS),
    "distance_variance": (lambda m, o, rows: m.distance_variance(), ROWS),
}
#: Of a matrix, another one of equal rows and keys, and the positions of the rows that are here.
COMMON: dict[str, Method] = {
    "column": (lambda m, o, rows: m.column(2), ALL),
    "cover": (lambda m, o, rows: m.cover(0.6, 2, 3), ALL),
    "dense": (lambda m, o, rows: m.dense(), ALL),
    "device": (lambda m, o, rows: m.device, ALL),
    "dtype": (lambda m, o, rows: m.dtype, ALL),
    "entropy": (lambda m, o, rows: m.entropy(), ROWS),
    "log_mass": (lambda m, o, rows: m.log_mass(regard.window(3, 0)), ROWS),
    "mass": (lambda m, o, rows: m.mass([0, 3]), ROWS),
    "pool": (lambda m, o, rows: m.pool(2, 3), ALL),
    "pool_blocks": (lambda m, o, rows: m.pool_blocks(4, 3, by="max"), ALL),
    "recall": (lambda m, o, rows: m.recall(regard.window(3, 0)), ROWS),
    "received": (lambda m, o, rows: m.received(), KEYS),
    "row": (lambda m, o, rows: m.row(2), ALL),
    "rows": (lambda m, o, rows: m.rows(slice(0, 4)).pool_blocks(4, 4), ALL),
    "segment_mass": (lambda m, o, rows: m.segment_mass([slice(0, 3), [4]]), ROWS),
    "shape": (lambda m, o, rows: m.shape, ALL),
    "topk": (lambda m, o, rows: m.topk(2).values, ROWS),
    **{name: (lambda m, o, rows, name=name: getattr(m, name)(o), ROWS)
       for name in ("cross_entropy", "js", "kl", "overlap", "total_variation")},
    **_POSITIONS,
}  # fmt: skip
_ARRAY: dict[str, Method] = {
    "at": (lambda m, o, rows: m.at("a", 2), ALL),
    "cuda": (lambda m, o, rows: "needs a GPU", ALL),
    "multiplies": (lambda m, o, rows: m.multiplies, ALL),
    "ndim": (lambda m, o, rows: m.ndim, ALL),
    "numpy": (lambda m, o, rows: torch.tensor(m.numpy()), ALL),
    "size": (lambda m, o, rows: (m.size(), m.size(-1)), ALL),
    "to": (lambda m, o, rows: m.to(torch.float32).row(3), ALL),
    "tokens": (lambda m, o, rows: m.tokens, ALL),
    **{name: (lambda m, o, rows, name=name: getattr(m, name)().row(3), ALL)
       for name in ("cpu", "detach", "double", "float")},
    # Of a type with few digits another order of additions is another number: the first row is 1 alone.
    **{name: (lambda m, o, rows, name=name: getattr(m, name)().row(0), ALL) for name in ("bfloat16", "half")},
}  # fmt: skip

OF_WEIGHTS: dict[str, Method] = {
    **COMMON, **_ARRAY,
    "T": (lambda m, o, rows: m.T @ (1.0 + rows[:, None].double()).expand(4, -1, 1), KEYS),
    "mT": (lambda m, o, rows: m.mT @ (1.0 + rows[:, None].double()).expand(4, -1, 1), KEYS),
    "explain": (lambda m, o, rows: "passes over the keys: 1" in m.explain("entropy"), ALL),
    "from_dense": (lambda m, o, rows: "of the class", ALL),
    "keys_are_values": (lambda m, o, rows: m.keys_are_values, ALL),
    "label": (lambda m, o, rows: m.label([f"w{n}" for n in range(LENGTH)])["w3", "w1"], ALL),
    "lse": (lambda m, o, rows: m.lse(), ROWS),
    "max_score": (lambda m, o, rows: m.max_score(), ROWS),
    "mean_distance": (lambda m, o, rows: m.mean_distance(), ROWS),
    "peak": (lambda m, o, rows: m.peak().indices, ROWS),
    "reduce_heads": (lambda m, o, rows: m.reduce_heads("max").row(3), ALL),
    "scores": (lambda m, o, rows: m.scores.row(3), ALL),
    "see": (lambda m, o, rows: m.see("entropy", topk=2).topk.indices, ROWS),
    "show": (lambda m, o, rows: str(m.show()), REFUSED),
}  # fmt: skip
OF_HEADS = {**COMMON}
for _name in ("distance_variance", "mass", "segment_mass", "topk"):
    OF_HEADS[_name] = COMMON[_name][0], REFUSED
OF_SCORES = {**_ARRAY, **{name: COMMON[name] for name in ("column", "dense", "device", "dtype", "row", "shape")}}
TABLES = {
    "weights": (OF_WEIGHTS, regard.Weights, lambda m: m),
    "heads": (OF_HEADS, regard.HeadReduction, lambda m: m.reduce_heads("mean", groups=2)),
    "scores": (OF_SCORES, Scores, lambda m: m.scores),
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def answers(group: Any, rank: int, world: int, kind: str) -> list[tuple[str, Any, Any]]:
    """For every method: its name, this rank's answer, and the same part of one process's."""
    table, _, matrix_of = TABLES[kind]
    x, y = torch.randn(2, 4, LENGTH, 5, dtype=torch.float64)
    here = index_of(zigzag(LENGTH, world)[rank])
    matrices = []
    for options, rows in (({}, torch.arange(LENGTH)), ({"mesh": Shards(group, here, timeout=100)}, here)):
        pair = [regard.weights(t[:, rows], mask=regard.causal(), **options) for t in (x, y)]
        matrices.append((*map(matrix_of, pair), rows))
    answered = []
    for name, (method, place) in table.items():
        want = method(*matrices[0])
        try:
            got = method(*matrices[1])
        except (NotImplementedError, RankError) as error:
            answered.append((name, "refused", "refused" if place == REFUSED else f"an answer; got {error}"))
            continue
        if isinstance(want, Tensor) and place in (ROWS, KEYS):
            want = want.index_select(1, here)
        answered.append((name, got, "refused" if place == REFUSED else want))
    return answered


#: One call that rank 1 makes with another argument than the other ranks; all of them are told.
WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "a label": (lambda W: W.label(["w"] * LENGTH)["w:2"], lambda W: W.label(["w"]), "row positions need one token"),
    "a type": (lambda W: W.to(torch.float32).lse(), lambda W: W.to(torch.int8), "queries and keys are floating-point"),
    "heads' comparison": (lambda W: W.reduce_heads().kl(W), lambda W: W.reduce_heads().kl(None), "another Weights"),
    "heads' cells": (lambda W: W.reduce_heads()[0, 0], lambda W: W.reduce_heads()[0], "indexed by rows and columns"),
    "heads' mask": (lambda W: W.reduce_heads().recall(regard.causal()), lambda W: W.reduce_heads().recall(3), "mask must"),
    "segments of rows": (
        lambda W: W.segment_mass([[0]], rows=[[0]]), lambda W: W.segment_mass([[0]], rows=[[99]]), "index 99 is out of range"
    ),
    "scores": (lambda W: W.row(0), lambda W: W.scores.row(0), "has 'scores of range(0, 1)' and rank"),
    "a floor": (
        lambda W: regard.losses.entropy_floor(W, 1.0), lambda W: regard.losses.entropy_floor(W, 2.0),
        "all ranks must make the same calls in the same order; rank 1 of 3 is at entropy_floor(floor=2.0) and rank 0 at",
    ),
    "a threshold": (
        lambda W: regard.losses.clip_factors(W, 1.0), lambda W: regard.losses.clip_factors(W, 0.0), "needs a number > 0"
    ),
    "an oracle": (lambda W: regard.kv.oracle(W), lambda W: regard.kv.oracle(W, by="min"), "must be 'sum' or 'max'"),
    "another call": (
        lambda W: W.offset_mass(1), lambda W: W.entropy(),
        "all ranks must make the same calls in the same order; rank 1 of 3 is at this request and rank 0 at a question for",
    ),
}  # fmt: skip


def error_of_wrong_call(group: Any, rank: int, world: int, what: str) -> str:
    """The error of one wrong call on rank 1; afterwards the ranks still work together."""
    right, wrong, _ = WRONG[what]
    W = regard.weights(torch.randn(2, LENGTH // world + rank, 5), mask=regard.causal(), mesh=Shards(group, timeout=100))
    W.lse()
    try:
        (wrong if rank == 1 else right)(W)
        text = "no error"
    except RankError as error:
        text = str(error)
    assert regard.weights(torch.randn(3, 2), mesh=group).lse().shape == (3,)
    return text


def backward(group: Any, rank: int, world: int, what: str) -> str:
    """The error, or the distance of this rank's gradients from those of one process, where ranks differ in backward."""
    x = torch.randn(2, 4 * world, 5, dtype=torch.float64)
    own = x[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    slopes = torch.rand(2, dtype=torch.float64)
    learned = slopes.clone().requires_grad_(what != "one learns" or rank == 1)
    score = regard.ScaledDot().alibi(learned)
    W = regard.weights(own, score=score, mask=regard.causal(), mesh=Shards(group, timeout=100))
    try:
        if what == "a result is left out":
            entropy, received = W.entropy(), W.received()
            (entropy.sum() if rank == 1 else entropy.sum() + received.square().sum()).backward()
        elif what == "another order":
            masses = [W.offset_mass(1), W.offset_mass(2)]
            for mass in reversed(masses) if rank == 1 else masses:
                mass.square().sum().backward()
        elif what == "one asks":
            grads = torch.autograd.grad(W.offset_mass(1).square().sum(), [own, learned] if rank == 1 else [own])
            own.grad, learned.grad = grads[0], grads[1] if rank == 1 else None
        else:
            W.offset_mass(1).square().sum().backward()
    except RankError as error:
        return str(error)
    full, slopes = x.requires_grad_(), slopes.requires_grad_()
    alone = regard.weights(full, score=regard.ScaledDot().alibi(slopes), mask=regard.causal())
    alone.offset_mass(1).square().sum().backward()
    assert (learned.grad is None) == (rank != 1)
    torch.testing.assert_close(own.grad, full.grad[:, 4 * rank : 4 * rank + 4])
    if rank == 1:
        torch.testing.assert_close(learned.grad, slopes.grad)
    return "equal"
