"""Every public method of `Weights`, of heads together and of scores, for a `RankPool`: over ranks and in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

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
OF_HEADS = {**COMMON, "mean_distance": OF_WEIGHTS["mean_distance"]}
for _name in ("distance_variance", "mass", "segment_mass", "topk"):
    OF_HEADS[_name] = COMMON[_name][0], REFUSED


def local(t: Tensor, rows: Tensor) -> Tensor:
    return t.index_select(-2, rows)


_X = torch.linspace(-1, 1, 4 * LENGTH, dtype=torch.float64).reshape(4, LENGTH, 1)
#: Functions of the library that take a matrix, by module and name.
OF_FUNCTIONS: dict[str, Method] = {
    "chains.gradient_relevance": (
        lambda m, o, rows: regard.chains.gradient_relevance(m, *[local(_X, rows)] * 3), REFUSED
    ),
    "chains.rollout": (lambda m, o, rows: regard.chains.rollout([m, o], local(_X, rows)[0])[None], ROWS),
    "chains.rollout_rows": (lambda m, o, rows: regard.chains.rollout_rows([m, o], [1, -1]), KEYS),
    "compare": (lambda m, o, rows: regard.compare(m, o), REFUSED),
    "kv.h2o": (lambda m, o, rows: regard.kv.h2o(m), KEYS),
    "kv.oracle": (lambda m, o, rows: (regard.kv.oracle(m, by="max")), ALL),
    "kv.snapkv": (lambda m, o, rows: regard.kv.snapkv(m, 3), REFUSED),
    "kv.tova": (lambda m, o, rows: regard.kv.tova(m), ALL),
    "kv.update": (lambda m, o, rows: regard.kv.update(torch.zeros(4, 2), m), REFUSED),
    "look.View": (lambda m, o, rows: str(regard.look.View(m)), REFUSED),
    "losses.alignment": (lambda m, o, rows: regard.losses.alignment(m, regard.window(2, 0)), ALL),
    "losses.clip_factors": (lambda m, o, rows: regard.losses.clip_factors(m, 0.1), ALL),
    "losses.entropy_floor": (lambda m, o, rows: regard.losses.entropy_floor(m, 2.0), ALL),
    "losses.indexer": (lambda m, o, rows: regard.losses.indexer(m, o[:1]), REFUSED),
    "patterns.classify": (lambda m, o, rows: regard.patterns.classify(m, [0, 1] * 5 + [2]).shares, ALL),
    "walk": (lambda m, o, rows: regard.walk(m, local(_X, rows), 1, head=0), REFUSED),
}  # fmt: skip
#: What a subject of a picture or a function of a matrix is annotated with.
_MATRICES = ("Weights", "RowQuestions", "Subject")
OF_SCORES = {**_ARRAY, **{name: COMMON[name] for name in ("column", "dense", "device", "dtype", "row", "shape")}}
TABLES = {
    "weights": (OF_WEIGHTS, regard.Weights, lambda m: m),
    "heads": (OF_HEADS, regard.HeadReduction, lambda m: m.reduce_heads("mean", groups=2)),
    "scores": (OF_SCORES, Scores, lambda m: m.scores),
    "functions": (OF_FUNCTIONS, regard, lambda m: m),
}


def public(kind: Any) -> set[str]:
    """The public methods of a class; of the library its functions, and classes, that take a matrix."""
    if kind is not regard:
        return {name for name in dir(kind) if not name.startswith("_")}
    modules = {
        "": regard,
        **{f"{m}.": getattr(regard, m) for m in ("chains", "kv", "look", "losses", "nn", "patterns")},
    }
    return {
        f"{prefix}{name}" for prefix, module in modules.items() for name in module.__all__
        if takes_a_matrix(getattr(module, name))
    }  # fmt: skip


def takes_a_matrix(value: Any) -> bool:
    if not inspect.isfunction(value) and not (inspect.isclass(value) and value.__module__.startswith("regard.look")):
        return False
    annotations = [str(parameter.annotation) for parameter in inspect.signature(value).parameters.values()]
    return any(name in text for text in annotations for name in _MATRICES)


def errors_of_other_calls(group: Any, rank: int, world: int, kind: str) -> list[tuple[str, str, str]]:
    """What each rank raises where rank 1 asks for something else than the others, of every method that asks any rank."""
    table, _, matrix_of = TABLES[kind]
    here = index_of(zigzag(LENGTH, world)[rank])
    x, y = torch.randn(2, 4, LENGTH, 5, dtype=torch.float64)
    raised = []
    for name, (method, _) in table.items():
        W, other = (
            regard.weights(t[:, here], mask=regard.causal(), mesh=Shards(group, here, timeout=100)) for t in (x, y)
        )
        sent = W._plan.ranks.bytes_sent
        try:
            if rank == 1:
                W.mass(1)
            else:
                method(matrix_of(W), matrix_of(other), here)
                if W._plan.ranks.bytes_sent == sent == other._plan.ranks.bytes_sent:
                    W.lse()  # a method that asks no rank: the next one does
            raised.append((name, "nothing", ""))
        except (RankError, NotImplementedError, TypeError, ValueError) as error:
            raised.append((name, type(error).__name__, str(error)))
    return raised


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
    "segments of another kind": (
        lambda W: W.segment_mass([[0]], rows=[[0, 1]]), lambda W: W.segment_mass([[0]], rows=[[0, 1]], by="mean"),
        "the same arguments in this request",
    ),
    "segments of a tensor": (
        lambda W: W.segment_mass(torch.zeros(12, dtype=torch.int64)),
        lambda W: W.segment_mass(torch.zeros(12, dtype=torch.int64).index_fill(0, torch.tensor([3]), -1)),
        "the same arguments in this request",
    ),
    "blocks' means": (lambda W: W.pool_blocks(2, 2), lambda W: W.pool_blocks(2, 2, by="mean"), "the same arguments in"),
    "tokens of patterns": (
        lambda W: regard.patterns.classify(W, tokens=[0, 1] * 6),
        lambda W: regard.patterns.classify(W, tokens=[0, 2, 1] * 4), "the same arguments in this request",
    ),
    "too few tokens": (
        lambda W: regard.patterns.classify(W), lambda W: regard.patterns.classify(W, tokens=[0]), "needs a token at"
    ),
    "no pattern": (
        lambda W: regard.patterns.classify(W), lambda W: regard.patterns.classify(W, threshold=7), "a number between 0 and 1"
    ),
    "a floor that is no number": (
        lambda W: regard.losses.entropy_floor(W, 1.0), lambda W: regard.losses.entropy_floor(W, "1"), "needs a number; got '1'"
    ),
    "another floor": (
        lambda W: regard.losses.entropy_floor(W, 1.0), lambda W: regard.losses.entropy_floor(W, 2.0), "entropy_floor(floor=2.0)"
    ),
    "means of keys": (lambda W: regard.kv.h2o(W), lambda W: regard.kv.h2o(W, mean=False), "the same arguments in"),
    "a refused function": (lambda W: W.received(), lambda W: regard.kv.snapkv(W, 2), "NotImplementedError: snapkv takes all rows"),
    "a picture": (lambda W: W.received(), lambda W: str(W.show()), "NotImplementedError: a picture takes all rows"),
    "an operator": (lambda W: W.received(), lambda W: W + 1, "TypeError: + takes numbers"),
    "a function of tensors": (lambda W: W.received(), lambda W: torch.softmax(W, -1), "TypeError: torch.softmax takes tensors"),
    "a list of vectors": (lambda W: W.received(), lambda W: [1.0] @ W, "TypeError: u @ W takes a tensor of vectors"),
    "no matrix over ranks": (
        lambda W: W.received(), lambda W: regard.weights(torch.randn(2, 12, 5)).kl(W), "one matrix is split over ranks"
    ),
    "a stored matrix": (
        lambda W: W.received(), lambda W: regard.Weights.from_dense(torch.rand(2, 12, 12)).js(W), "one matrix is split"
    ),
    "one layer more": (
        lambda W: regard.patterns.classify(W), lambda W: regard.patterns.classify([W, W]), "the same arguments in"
    ),
    "segments of rows": (
        lambda W: W.segment_mass([[0]], rows=[[0]]), lambda W: W.segment_mass([[0]], rows=[[99]]), "rank 1 of 3 has 'segment_mass(keys=[[0]], rows=[[99]])' and rank 0"
    ),
    "scores": (lambda W: W.row(0), lambda W: W.scores.row(0), "has 'scores of range(0, 1)' and rank"),
    "a floor": (
        lambda W: regard.losses.entropy_floor(W, 1.0), lambda W: regard.losses.entropy_floor(W, 2.0),
        "all ranks must have the same arguments in this request; rank 1 of 3 has 'entropy_floor(floor=2.0)' and rank 0",
    ),
    "a threshold": (
        lambda W: regard.losses.clip_factors(W, 1.0), lambda W: regard.losses.clip_factors(W, 0.0), "needs a number > 0"
    ),
    "an oracle": (lambda W: regard.kv.oracle(W), lambda W: regard.kv.oracle(W, by="min"), "must be 'sum' or 'max'"),
    "another call": (
        lambda W: W.offset_mass(1), lambda W: W.entropy(),
        "all ranks must have the same results in this request; rank 1 of 3 has ['entropy'] and rank 0 ['norm']",
    ),
}  # fmt: skip


def error_of_wrong_call(group: Any, rank: int, world: int, what: str) -> str:
    """The error of one wrong call on rank 1; afterwards the ranks still work together."""
    right, wrong, _ = WRONG[what]
    W = regard.weights(torch.randn(2, LENGTH // world + rank, 5), mask=regard.causal(), mesh=Shards(group, timeout=20))
    W.lse()
    try:
        (wrong if rank == 1 else right)(W)
        text = "no error"
    except RankError as error:
        text = str(error)
    assert regard.weights(torch.randn(3, 2), mesh=Shards(group, timeout=20)).lse().shape == (3,)
    return text


def changed_in_place(group: Any, rank: int, world: int, what: str) -> list[tuple[Tensor, Tensor]]:
    """Answers of this rank and of one process, before and after numbers are changed in place, by one rank or by all."""
    x, length = torch.randn(2, 1, 4 * world, 5), 4 * world
    here, lengths = slice(4 * rank, 4 * rank + 4), torch.tensor([2, 3] if what == "the mask" else [length - 2, length])
    own = x[..., here, :].clone()
    W = regard.weights(own, mask=regard.padding(lengths), mesh=Shards(group, timeout=20))
    alone = regard.weights(x, mask=regard.padding(lengths))
    pairs = []
    for _ in range(2):
        entropy, received = W.entropy(), W.received()
        pairs += [(entropy, alone.entropy()[..., here]), (received.clone(), alone.received()[..., here])]
        if what == "keys of one rank":
            x[..., 4:8, :].mul_(2)
            if rank == 1:
                own.mul_(2)
        elif what == "a result of one rank":
            if rank == 1:
                received.zero_()
        else:
            lengths.copy_(torch.tensor([length, length - 1]))
    return [*pairs, (W.entropy(), alone.entropy()[..., here]), (W.received(), alone.received()[..., here])]


def compiled(group: Any, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients of compiled code around a matrix over ranks, beside those of one process."""
    x = torch.randn(2, 4, 4 * world, 5, dtype=torch.float64)
    full, here = x.clone().requires_grad_(), slice(4 * rank, 4 * rank + 4)
    own = x[:, :, here].clone().requires_grad_()
    shared = distribute_tensor(x, dist.DeviceMesh.from_group(group, "cpu"), [Shard(2)]).requires_grad_()

    @torch.compile(backend="eager")
    def block(x: Tensor, **options: Any) -> Tensor:
        W = regard.weights(x * 2, mask=regard.causal(), **options)
        return (W @ x.sin() + W.kl(W.detach())[..., None]).square()

    block(full).sum().backward()
    y, z = block(own, mesh=Shards(group, timeout=60)), block(shared)
    y.sum().backward()
    z.full_tensor().sum().backward()
    want = block(full).detach()
    return [(y.detach(), want[:, :, here]), (own.grad, full.grad[:, :, here]), (z.full_tensor().detach(), want),
            (shared.grad.full_tensor(), full.grad)]  # fmt: skip


def compiled_as_one_graph(group: Any, rank: int, world: int) -> str:
    """What is said where one graph is asked for."""
    entropy = torch.compile(
        lambda x: regard.weights(x, mesh=Shards(group, timeout=20)).entropy(), backend="eager", fullgraph=True
    )
    try:
        entropy(torch.randn(2, 3, 5))
        return "no error"
    except RuntimeError as error:
        return str(error)


def transformed(group: Any, rank: int, world: int) -> str:
    """What is said where vmap maps a matrix over ranks."""
    try:
        torch.vmap(lambda x: regard.weights(x, mesh=Shards(group, timeout=20)).entropy())(torch.randn(2, 3, 5))
        return "no error"
    except RankError as error:
        return str(error)


def checkpointed(group: Any, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients through an activation checkpoint, over ranks and of one process."""
    x = torch.randn(2, 4 * world, 5, dtype=torch.float64)
    full, own = x.clone().requires_grad_(), x[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()

    def block(x: Tensor, **options: Any) -> Tensor:
        W = regard.weights(x, mask=regard.causal(), **options)
        return W @ x.sin() + (W.entropy() + W.offset_mass(1))[..., None]

    def loss(x: Tensor, **options: Any) -> Tensor:
        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False, **options)
        return x.square().sum()

    loss(full).backward()
    loss(own, mesh=Shards(group, timeout=20)).backward()
    return [(own.grad, full.grad[:, 4 * rank : 4 * rank + 4])]


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
        elif what == "a second time":
            entropy = W.entropy().sum() + W.offset_mass(1).sum()
            entropy.backward()
            _ = entropy.backward() if rank == 1 else W.received()
        elif what == "second derivatives":
            W.offset_mass(1).sum().backward(create_graph=rank == 1)
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
