"""Questions about rows for a `RankPool`: this rank's part of an answer and of its gradients, beside one process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard.distributed import Shards, shards, zigzag
from support.rank_cases import index_of

#: Positions, and the rows that `rows` picks.
LENGTH, PART = 11, slice(2, 9)
SEGMENTS = [slice(0, 3), [3, 5]]


class Ask(NamedTuple):
    """A question to two matrices, and what its answer has an axis 2 of: rows, some rows, keys, or neither."""

    of: Callable[[regard.Weights, regard.Weights], Tensor]
    per: str = "rows"
    axis: int = 2


def norms(*layers: regard.Weights) -> list[Tensor]:
    """A number for each value, of the positions that are here."""
    return [layer._factors.q.norm(dim=-1) for layer in layers]


QUESTIONS = {
    "kl": Ask(lambda p, q: p.kl(q)),
    "cross_entropy": Ask(lambda p, q: p.cross_entropy(q)),
    "js": Ask(lambda p, q: p.js(q)),
    "overlap": Ask(lambda p, q: p.overlap(q)),
    "total_variation": Ask(lambda p, q: p.total_variation(q)),
    "kl of heads together": Ask(lambda p, q: p.reduce_heads().kl(q.reduce_heads("max")), axis=1),
    "entropy of heads together": Ask(lambda p, q: p.reduce_heads("mean", groups=2).entropy()),
    "recall": Ask(lambda p, q: p.recall(regard.window(2, 0))),
    "log_mass": Ask(lambda p, q: p.log_mass(lambda i, j: (i + j) % 3 == 0)),
    "offset_mass": Ask(lambda p, q: p.offset_mass(1)),
    "induction_mass": Ask(lambda p, q: p.induction_mass([n % 3 for n in range(LENGTH)])),
    "distance_histogram": Ask(lambda p, q: p.distance_histogram([0, 1, 3, 9])),
    "distance_variance": Ask(lambda p, q: p.distance_variance()),
    "segment_mass": Ask(lambda p, q: p.segment_mass(SEGMENTS)),
    "segment_mass of rows": Ask(lambda p, q: p.segment_mass(SEGMENTS, rows=[slice(2, 8)], by="mean"), "all"),
    "pool by max": Ask(lambda p, q: p.pool(3, 2, by="max"), "all"),
    "pool by lse": Ask(lambda p, q: p.pool(2, 3, slice(3, 9), slice(1, 8), by="lse"), "all"),
    "pool_blocks": Ask(lambda p, q: p.pool_blocks(4, 3, by="mean"), "all"),
    "cover": Ask(lambda p, q: p.cover(0.7, 3, 3), "all"),
    "rows": Ask(lambda p, q: p.rows(PART).kl(q.rows(PART)), "some rows"),
    "entropy_floor": Ask(lambda p, q: regard.losses.entropy_floor(p, 3.0), "all"),
    "clip_factors": Ask(lambda p, q: regard.losses.clip_factors(p, 0.3), "all"),
    "alignment": Ask(lambda p, q: regard.losses.alignment(p, regard.window(2, 0)), "all"),
    "h2o": Ask(lambda p, q: regard.kv.h2o(p), "keys"),
    "oracle": Ask(lambda p, q: regard.kv.oracle(p, by="max"), "all"),
    "rollout": Ask(lambda p, q: regard.chains.rollout([p, q], p._factors.q.mean(-3), value_norms=norms(p, q)), axis=1),
    "rollout_rows": Ask(
        lambda p, q: regard.chains.rollout_rows([p, q, p], [3, -1], value_norms=norms(p, q, p)), "keys"
    ),
    "rollout_rows of means": Ask(lambda p, q: regard.chains.rollout_rows([p, q], [3, 0], residual=0.3), "keys"),
    "classify": Ask(lambda p, q: regard.patterns.classify(p, threshold=0.3).shares, "all"),
}


def matrices(kind: str, tensors: list[Tensor], **options: Any) -> tuple[regard.Weights, regard.Weights]:
    """Two matrices of (x, k, y, sink, slopes, weight); `kind` says with which masks and scores."""
    x, k, y, sink, slopes, weight = tensors
    scores = [regard.ScaledDot(), regard.ScaledDot()]
    if kind == "bilinear":
        scores[0] = regard.Bilinear(weight)
    if kind == "sinks":
        scores = [score.sink(sink) for score in scores]
    masks: list[Any] = [regard.causal(), regard.causal()]
    if kind == "no mask":
        masks = [None, None]
    if kind == "padding":
        masks[1] = regard.causal() & regard.padding(torch.tensor([LENGTH, 5]))
    p = regard.weights(x, k, mask=masks[0], score=scores[0], **options)
    return p, regard.weights(y, mask=masks[1], score=scores[1].alibi(slopes), **options)


def answers(
    group: Any, rank: int, world: int, kind: str, names: list[str], split: str
) -> list[tuple[str, Tensor, Tensor]]:
    """For every question and every gradient of it: its name, this rank's, and the same part of one process's."""
    shards.SHORTEST_PIECE = 2
    torch.manual_seed(1)
    shapes = (2, 4, LENGTH, 6), (2, 2, LENGTH, 6), (2, 4, LENGTH, 3), (4,), (4,), (6, 6)
    full = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    runs = zigzag(LENGTH, world) if split == "zigzag" else [[range(LENGTH)], *([] for _ in range(world - 1))]
    here = index_of(runs[rank])
    pairs = []
    for name in names:
        ask, results = QUESTIONS[name], []
        for alone in (True, False):
            leaves = [t.clone() if alone or t.ndim < 4 else t[:, :, here] for t in full]
            leaves = [t.requires_grad_() for t in leaves]
            options = {} if alone else {"mesh": Shards(group, runs[rank], timeout=100)}
            results.append((ask.of(*matrices(kind, leaves, **options)), leaves))
        (want, of_all), (got, own) = results
        rows = torch.tensor([n - PART.start for n in here.tolist() if PART.start <= n < PART.stop], dtype=torch.int64)

        def part(x: Tensor, ask: Ask = ask, rows: Tensor = rows) -> Tensor:
            return x if ask.per == "all" else x.index_select(ask.axis, rows if ask.per == "some rows" else here)

        pairs.append((name, got.detach(), part(want.detach())))
        if want.requires_grad:
            c = torch.randn(want.shape, dtype=torch.float64)
            (torch.where(want.isinf(), 0, want) * c).sum().backward()
            (torch.where(got.isinf(), 0, got) * part(c)).sum().backward()
        for n, (mine, all_of_it) in enumerate(zip(own, of_all, strict=True)):
            assert (mine.grad is None) == (all_of_it.grad is None), f"gradient {n} of {name}"
            if mine.grad is not None:
                grad = all_of_it.grad if mine.ndim < 4 else all_of_it.grad[:, :, here]
                pairs.append((f"gradient {n} of {name}", mine.grad, grad))
    return pairs


def refused(group: Any, rank: int, world: int) -> list[str]:
    """What is said of questions that take complete rows, and of matrices that do not fit together."""
    mesh = Shards(group, timeout=100)
    x = torch.randn(2, 4, 5)
    W = regard.weights(x, mask=regard.causal(), mesh=mesh)
    other = regard.weights(x, mesh=Shards(group, [range((world - 1 - rank) * 4, (world - rank) * 4)], timeout=100))
    texts = []
    for ask in (
        lambda: W.reduce_heads().topk(2),
        lambda: W.reduce_heads("max").received(),
        lambda: W.reduce_heads().distance_variance(),
        lambda: W.kl(regard.weights(torch.randn(2, 4 * world, 5))),
        lambda: W.kl(other),
        lambda: W.recall(regard.window(1, 0) if rank == 1 else 3),
        lambda: W.kl(W) if rank == 1 else W.js(W),
        lambda: W.log_mass(regard.window(1, 0) if rank == 1 else regard.causal()),
    ):
        try:
            ask()
            texts.append("no error")
        except (NotImplementedError, RuntimeError, ValueError) as error:
            texts.append(str(error))
    return texts
