"""Questions about rows over ranks: every piece of keys answers for its part, weighed by the norm of complete rows.

The norm is a request of its own, with its own gradient; a question is one more exchange of keys, and its gradient
another. Questions that take a complete row at once (the largest keys of heads together, a choice of keys) are refused
by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.problem import Factors
from ..core.pytree import flatten, replace_fields, unflatten
from ..core.rows.head_shares import HeadShares
from ..core.rows.sources import FinishedRows, HeadRows, Part, RowSource
from ..core.rows.strips import Question, add_grads, add_strips, unowned
from ..core.scores.kinds import upcast
from ..core.stats import Request
from ..core.torch_state import without_autocast
from .checksums import describe
from .exchange import Plan, Wants, visit_keys
from .handshake import agree, backward_call, needed_by_any, saved_tensors
from .pairs import by_piece, cut, hull, visible_span, wants_of
from .passes import pull_back
from .shards import Spans
from .transport import Ranks

if TYPE_CHECKING:
    from .sharded import ShardedWeights

__all__ = ["ShardedRows", "answer", "refuse_complete_rows"]


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedRows:
    """The rows of a matrix over ranks, as questions about rows take them."""

    matrix: ShardedWeights
    batch: torch.Size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        raise NotImplementedError(
            "one matrix is split over ranks and the other is not; pass mesh= and each rank's part to both."
        )

    def factors(self) -> Factors:
        return self.matrix._factors.expanded(self.batch).folded()

    def distances_cancel(self) -> bool:
        """Whether float32 does not hold the gradients of these scores: see `core/distance_grads`."""
        own = self.matrix._factors
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in own.tensors()):
            return False
        return replace_fields(own, q=own.q[..., :0, :], k=own.k[..., :0, :], mask=None).problem().distances_cancel

    def in_float64(self) -> ShardedRows:
        return ShardedRows(self.matrix.to(torch.float64), self.batch)

    def norm(self) -> Tensor:
        """(b, h, i, 2), with a gradient where the factors have one."""
        own = self.matrix._factors
        norm = self.matrix._ask(Request(("norm",)))["norm"]
        norm = norm.reshape(*own.batch, own.heads, *norm.shape[-2:])
        return norm.expand(*self.batch, *norm.shape[-3:]).reshape(self.batch.numel(), *norm.shape[-3:])


@dataclasses.dataclass(frozen=True, eq=False)
class _RowsJob:
    """A question to matrices that are sharded alike."""

    plan: Plan
    wants: Wants
    spans: Spans
    question: Question
    heads: list[tuple[int, HeadShares | None] | None]  # of each matrix: how many are one, and their shares
    shape: tuple[int, int, int, int]  # b h i of this rank's rows, j of all keys


def answer(sources: list[RowSource], question: Question) -> list[Tensor]:
    """The outputs (b, h, ...): for rows those of this rank, tiles on every rank.

    Args:
        sources: `ShardedRows`, or `HeadRows` of them.
        question: What is to be answered.
    """
    rows, heads = zip(*map(_unwrapped, sources), strict=True)
    if any(row.distances_cancel() for row in rows):
        outputs = _answer([row.in_float64() for row in rows], heads, question)
        return [x.to(upcast(rows[0].matrix._factors.q[..., :0]).dtype) if x.is_floating_point() else x for x in outputs]
    return _answer(list(rows), heads, question)


def _answer(
    rows: list[ShardedRows], heads: Sequence[tuple[int, HeadShares | None] | None], question: Question
) -> list[Tensor]:
    plan = rows[0].matrix._plan
    if question.of_parts is None:
        refuse_complete_rows(question.name)
    for other in rows[1:]:
        _need_alike(plan, other.matrix._plan)
    factors, norms = [source.factors() for source in rows], [source.norm() for source in rows]
    spans = plan.rows.spans(plan.ranks.rank)
    wants = [
        hull(spans_of, spans_of[0][0]) for spans_of in zip(*(wants_of(plan, f, spans) for f in factors), strict=True)
    ]
    spec, tensors = flatten((tuple(factors), tuple(norms), question))
    requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    what = f"a question for {question.name}"
    with plan.ranks.together(what):
        record = {
            "matrices, by their numbers": [source.matrix._plan.number for source in rows],
            "batch and heads": [source.matrix._selected for source in rows],
            "question": _described(question),
            "heads together": [None if n is None else [n[0], describe(n[1])] for n in heads],
            "dtype": [str(f.q.dtype) for f in factors],
            "requires_grad": requires_grad,
            "_wants": wants,
        }
        records = agree(plan.ranks, what, record)
        of_ranks = [by_piece(plan, record["_wants"]) for record in records]
        shapes = [(f.q.shape[0], f.heads // (1 if n is None else n[0])) for f, n in zip(factors, heads, strict=True)]
        b, h = torch.broadcast_shapes(*shapes)
        job = _RowsJob(plan, of_ranks, spans, question, list(heads), (b, h, factors[0].q.shape[2], plan.keys.length))
        if requires_grad:
            return list(_QuestionNode.apply(job, spec, *tensors))
        return without_autocast(tensors[0], lambda: _forward(job, factors, norms)[0])


def refuse_complete_rows(what: str) -> NoReturn:
    """Raise NotImplementedError: no rank has all keys of a row."""
    raise NotImplementedError(
        f"{what} takes complete rows, and keys are split over ranks; ask for each head by itself, or gather q and k "
        "first."
    )


def _described(question: Any) -> str:
    """The part of a question that ranks share: all but tensors that have a row for each of their own rows."""
    own = question.row_fields
    shared = {name: describe(getattr(question, name)) for name in question.parts if name not in own}
    sizes = [list(getattr(question, name).shape[3:]) for name in own]
    return f"{type(question).__name__} {shared} {sizes}"


def _unwrapped(source: Any) -> tuple[ShardedRows, tuple[int, HeadShares | None] | None]:
    heads = None
    if isinstance(source, HeadRows):
        if source.shares is not None and source.shares.factors.requires_grad:
            raise NotImplementedError(
                "weights of heads get no gradient over ranks; detach them, or gather q and k first."
            )
        source, heads = source.heads, (source.size, source.shares)
    if not isinstance(source, ShardedRows):
        raise NotImplementedError(
            "one matrix is split over ranks and the other is not, or has a choice of keys; pass mesh= and each rank's "
            "part to both."
        )
    return source, heads


def _need_alike(plan: Plan, other: Plan) -> None:
    if other.ranks.group is not plan.ranks.group:
        raise ValueError("matrices that are compared must be split over the same ranks; pass the same mesh= to both.")
    if other.rows.runs != plan.rows.runs or other.keys.runs != plan.keys.runs:
        raise ValueError(
            "matrices that are compared must have the same rows and keys on every rank; pass equal Shards(rows, keys)."
        )


# Rectangles.


def _rectangles(job: _RowsJob, factors: list[Factors], keys: range) -> Iterator[tuple[range, slice, range, slice]]:
    """For each run of rows that sees some of these keys in any matrix: its rows, their place, these keys, theirs."""
    for rows, at in job.spans:
        first, end = hull((visible_span(f, rows, keys.start, keys.stop) for f in factors), keys.start)
        if first < end:
            yield rows, at, range(first, end), slice(first - keys.start, end - keys.start)


def _sink_rectangles(job: _RowsJob, factors: list[Factors]) -> Iterator[tuple[range, slice, range, slice]]:
    """The rows without any keys, where their sinks count as outcomes."""
    if job.question.counts_sink and any(f.score.sink_logits is not None for f in factors):
        for rows, at in job.spans:
            yield rows, at, range(0), slice(0, 0)


def _problem(factors: Factors, rows: range, keys: range, q: Tensor, k: Tensor) -> Any:
    """The problem of a rectangle; that of no keys has the sink."""
    sink = factors.score.sink_logits
    if keys:
        return cut(factors, rows, keys, q, k).problem()
    return replace_fields(cut(replace_fields(factors, mask=None), rows, keys, q, k).problem(), sink=sink)


def _source(job: _RowsJob, n: int, problem: Any, norm: Tensor) -> RowSource:
    visible = problem.zero_invisible_keys(Request(("norm",)))[0]
    finished, heads = FinishedRows(visible, norm), job.heads[n]
    return finished if heads is None else HeadRows(finished, *heads)


def _placed(job: _RowsJob, rows: range, at: slice, keys: range, offset: int) -> Callable[[Part], Part]:
    """Where a part of a rectangle lies: rows and keys at global positions, rows at their place on this rank too."""

    def place(part: Part) -> Part:
        i, j = part.rows, part.cols
        block = MatrixBlock(
            slice(rows.start + i.start, rows.start + i.stop), slice(keys.start + j.start, keys.start + j.stop),
            offset, part.block.device,
        )  # fmt: skip
        return Part(part.batch, part.heads, block, slice(at.start + i.start, at.start + i.stop))

    return place


# Forward.


def _forward(job: _RowsJob, factors: list[Factors], norms: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and for maxima the number of the strip that holds them, −1 where another rank has it."""
    question = job.question
    totals = question.totals(job.shape, upcast(factors[0].q[..., :0, :0]))
    owners, number = unowned(question, totals), 0

    def visit_rectangle(rows: range, at: slice, keys: range, blocks: list[Tensor]) -> None:
        nonlocal number
        problems = [_problem(f, rows, keys, f.q[:, :, at], k) for f, k in zip(factors, blocks, strict=True)]
        sources = [_source(job, n, p, norms[n][:, :, at]) for n, p in enumerate(problems)]
        place = _placed(job, rows, at, keys, factors[0].query_offset)
        number = add_strips(sources, question, totals, owners, place, number)

    def visit(keys: range, blocks: list[Tensor]) -> list[Tensor]:
        for rows, at, visible, where in _rectangles(job, factors, keys):
            visit_rectangle(rows, at, visible, [k[:, :, where] for k in blocks])
        return []

    own = [f.k for f in factors]
    for rows, at, nothing, where in _sink_rectangles(job, factors):
        visit_rectangle(rows, at, nothing, [k[:, :, where] for k in own])
    visit_keys(job.plan, job.wants, own, visit, [])
    if question.of_parts == "tiles":
        merged = zip(totals, owners, question.merges, strict=True)
        totals = [_merge_tiles(job.plan.ranks, total, owner, merge) for total, owner, merge in merged]
    return totals, owners


def _merge_tiles(ranks: Ranks, total: Tensor, owner: Tensor | None, merge: str) -> Tensor:
    """Tiles of all ranks, bit-equal on all of them; of equal maxima the first rank's is the owner."""
    parts = ranks.gather(total)
    result = parts[0].clone()
    for rank, part in enumerate(parts[1:], 1):
        if merge == "max":
            if owner is not None and rank == ranks.rank:
                owner.masked_fill_(part <= result, -1)
            elif owner is not None and rank > ranks.rank:
                owner.masked_fill_(part > result, -1)
            result = torch.maximum(result, part)
        else:
            result = torch.logaddexp(result, part) if merge == "lse" else result + part
    return result


# Gradients.


class _QuestionNode(torch.autograd.Function):
    """The autograd node of a question over ranks."""

    @staticmethod
    def forward(ctx: Any, job: _RowsJob, spec: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        factors, norms, _ = unflatten(spec, list(tensors))
        outputs, owners = without_autocast(tensors[0], lambda: _forward(job, list(factors), list(norms)))
        ctx.job, ctx.spec, ctx.count = job, spec, len(tensors)
        ctx.call = backward_call(job.plan.ranks, f"a question for {job.question.name}")
        ctx.has_owner = [owner is not None for owner in owners]
        ctx.save_for_backward(*tensors, *outputs, *(owner for owner in owners if owner is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks = ctx.job.plan.ranks
        saved = saved_tensors(ranks, ctx)
        tensors, outputs = saved[: ctx.count], saved[ctx.count : ctx.count + len(grads)]
        of_maxima = iter(saved[ctx.count + len(grads) :])
        owners = [next(of_maxima) if has else None for has in ctx.has_owner]
        with ranks.together(ctx.call):
            needs = needed_by_any(agree(ranks, ctx.call, {"_needs": ctx.needs_input_grad[2:]}))
            # A row that sees what the other forbids is inf, and has no gradient in any of its parts.
            finite: list[Tensor | None] = [
                g.masked_fill(x == torch.inf, 0) for g, x in zip(grads, outputs, strict=True)
            ]
            of_inputs = without_autocast(
                tensors[0], lambda: _backward(ctx.job, ctx.spec, tensors, outputs, owners, finite, needs)
            )
        return None, None, *of_inputs


def _backward(
    job: _RowsJob, spec: Any, tensors: list[Tensor], outputs: list[Tensor], owners: list[Tensor | None],
    grads: list[Tensor | None], needs: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of all tensors of (factors, norms, question)."""
    factors, norms, question = unflatten(spec, tensors)
    totals = [_zeros(t) if t.is_floating_point() else t for t in tensors]
    of_factors, of_norms, of_question = unflatten(spec, totals)
    of_floats = iter(need and t.is_floating_point() for need, t in zip(needs, tensors, strict=True))
    learned = [[next(of_floats) for _ in flatten(f)[1]][2:] for f in factors]  # but queries and keys
    needed = list(of_floats)[len(norms) :]
    number = 0

    def visit_rectangle(rows: range, at: slice, keys: range, blocks: list[Tensor], sums: list[Tensor]) -> None:
        nonlocal number
        pieces = [
            _RectangleBackward((f, total), learn, rows, at, keys, k)
            for f, total, learn, k in zip(factors, of_factors, learned, blocks, strict=True)
        ]
        sources = [_source(job, n, p.problem, norms[n][:, :, at]) for n, p in enumerate(pieces)]
        tree_spec, tree = flatten((tuple(sources), question))
        wanted = [need for n, p in enumerate(pieces) for need in (*p.needs, True, *p.constants(job.heads[n]))] + needed
        local = [_zeros(t) if need else t.new_zeros(()).expand(t.shape) for t, need in zip(tree, wanted, strict=True)]
        place = _placed(job, rows, at, keys, factors[0].query_offset)
        number = add_grads(
            sources, question, outputs, owners, grads, wanted, unflatten(tree_spec, local), place, number
        )
        rest = iter(local)
        for n, piece in enumerate(pieces):
            piece.add([next(rest) for _ in piece.needs], sums[n])
            of_norms[n][:, :, at] += next(rest)
            for _ in piece.constants(job.heads[n]):
                next(rest)
        for total, g, need in zip(flatten(of_question)[1], rest, needed, strict=True):
            if need:
                total += g

    def visit(keys: range, blocks: list[Tensor]) -> list[Tensor]:
        sums = [_zeros(k) for k in blocks]
        for rows, at, visible, where in _rectangles(job, list(factors), keys):
            visit_rectangle(rows, at, visible, [k[:, :, where] for k in blocks], [s[:, :, where] for s in sums])
        return sums

    own = [f.k for f in factors]
    for rows, at, nothing, where in _sink_rectangles(job, list(factors)):
        empty = [k[:, :, where] for k in own]
        visit_rectangle(rows, at, nothing, empty, [_zeros(k) for k in empty])
    visit_keys(job.plan, job.wants, own, visit, [f.k for f in of_factors])
    for f, learned_here in zip(of_factors, learned, strict=True):
        for total, learn in zip(flatten(f.score)[1], learned_here, strict=False):
            if learn:  # every rank has the parameters of the score, and gets all of their gradient
                total.copy_(job.plan.ranks.sum(total))
    return [
        g.to(t.dtype) if need and t.is_floating_point() else None
        for g, t, need in zip(totals, tensors, needs, strict=True)
    ]


class _RectangleBackward:
    """One matrix in one rectangle: its problem, lowered from leaves, and the totals that their gradients belong to."""

    def __init__(
        self, trees: tuple[Factors, Factors], learned: list[bool], rows: range, at: slice, keys: range, k: Tensor
    ) -> None:
        factors, totals = trees
        score_spec, score_tensors = flatten(factors.score)
        self.leaves = [t.detach().requires_grad_() for t in (factors.q[:, :, at], k)]
        self.leaves += [t.detach().requires_grad_() if w else t for t, w in zip(score_tensors, learned, strict=False)]
        with torch.enable_grad():
            score = unflatten(score_spec, self.leaves[2:])
            lowered = _problem(replace_fields(factors, score=score), rows, keys, *self.leaves[:2])
        spec, self._lowered = flatten(lowered)
        self.needs = [t.requires_grad for t in self._lowered]
        self.problem = unflatten(spec, [t.detach() for t in self._lowered])
        self._totals = [totals.q[:, :, at], *flatten(totals.score)[1]]

    def constants(self, heads: tuple[int, HeadShares | None] | None) -> list[bool]:
        """Tensors of the source behind the problem and the norm: shares of heads, which get no gradient."""
        return [] if heads is None else [False] * len(flatten(heads[1])[1])

    def add(self, of_problem: list[Tensor], of_keys: Tensor) -> None:
        """Gradients of the problem's tensors, into those of queries, keys and the score's parameters."""
        grads = [g if need else None for g, need in zip(of_problem, self.needs, strict=True)]
        pulled = pull_back(self._lowered, grads, self.leaves)
        for total, g in zip([self._totals[0], of_keys, *self._totals[1:]], pulled, strict=True):
            if g is not None:
                total += g


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
