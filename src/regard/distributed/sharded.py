"""The attention matrix whose rows and keys are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from ..core.array_protocol import Scores
from ..core.evaluation import SeeKey
from ..core.indexing import Pick, Tokens
from ..core.problem import Factors
from ..core.pytree import flatten, replace_fields, unflatten
from ..core.result_cache import versions_of
from ..core.rows.complete_rows import DistanceVariance
from ..core.rows.head_reduction import HeadReduction
from ..core.rows.relations import row_range
from ..core.rows.sources import RowSource
from ..core.rows.strips import Question
from ..core.stats import NOT_DIFFERENTIATED, Request, Results
from ..core.torch_state import without_autocast
from ..core.types import EngineName
from ..core.weights import Weights
from ..engines import FusedEngine, fused_engine, get_engine
from ..engines.score_grad import weights_from_norm
from .calls import call_of, shared_methods
from .checksums import describe
from .exchange import Plan
from .handshake import agree, backward_call, checked_together, needed_by_any, refuse_graphs, saved_tensors
from .pairs import by_piece, hidden_from_all, wants_of
from .passes import Job, compute, vjp
from .questions import ShardedRows, answer, refuse_complete_rows
from .shards import Split, chosen_rows, positions_of, row_blocks, shifted
from .transport import Ranks

__all__ = ["ShardedWeights", "engine_of", "nan_error"]

X = TypeVar("X")

#: The name of a request, and of everything that leads to one, in errors.
REQUEST = "this request"

#: Rows that are computed at once: temporaries of a merge are as large, and a GPU must be filled.
ROWS, ROWS_GPU = 2**12, 2**15


class ShardedWeights(Weights):
    """`Weights` of a sequence that is split over ranks: made by ``regard.weights(..., mesh=...)``.

    `shape` and all positions are global. Results of rows stay with the rank of the rows, those
    for keys with that of the keys; pooled maps and indexed weights are the same on every rank. Every rank must make the
    same calls in the same order.

    >>> regard.distributed.ShardedWeights.__mro__[1].__name__
    'Weights'
    """

    _shared = True

    def __init__(
        self,
        factors: Factors,
        engine: EngineName,
        *,
        plan: Plan,
        one_head: bool,
        tokens: tuple[Tokens | None, Tokens | None] = (None, None),
        selected: str = "all",
    ) -> None:
        self._plan = plan
        self._selected = selected  # batch and heads: ranks that ask different ones would mix their keys
        self._wants: tuple[Any, list[tuple[int, int]]] | None = None  # versions of the tensors, and the keys
        super().__init__(factors, engine, one_head=one_head, tokens=tokens)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._plan.rows.length, self._plan.keys.length

    @property
    def _lengths(self) -> tuple[int, int]:
        rank = self._plan.ranks.rank
        return self._plan.rows.count(rank), self._plan.keys.count(rank)

    def _with(self, factors: Factors, **changes: Any) -> Self:
        return super()._with(factors, **{"plan": self._plan, "selected": self._selected, **changes})

    def _select(self, picks: list[Pick]) -> Self:
        chosen = super()._select(picks)
        if chosen is self:
            return self
        return chosen._with(chosen._factors, selected=f"{self._selected}{picks}")

    def __repr__(self) -> str:
        ranks = self._plan.ranks
        return super().__repr__().replace("Weights(", f"ShardedWeights(rank {ranks.rank} of {ranks.size}, ", 1)

    def _explain(self, request: Request) -> str:
        i, j = self._lengths
        plan = self._plan
        how = "gathered" if plan.gather else "in a ring, two pieces at a time"
        lines = [
            f"ranks: {plan.ranks.size}; rank {plan.ranks.rank} has {i} of {self._sizes[0]} rows and {j} of "
            f"{self._sizes[1]} keys",
            f"keys of other ranks: {how}; {'with' if request.v is not None else 'without'} values",
        ]
        local = Weights(self._position_free_factors(), self._engine, one_head=self._one_head)
        return "\n".join([*lines, "each piece: " + local._explain(replace_fields(request, keys=None))])

    def _local_factors(self) -> Factors:
        raise NotImplementedError(
            'dense weights are not computed over ranks; use an engine other than "reference" for both matrices.'
        )

    @property
    def _entire(self) -> bool:
        return self._plan.ranks.size == 1

    def _position_free_factors(self) -> Factors:
        """Without what depends on global positions: for `explain` alone."""
        return replace_fields(self._factors, mask=None, score=replace_fields(self._factors.score, modifiers=()))

    # Questions about rows.

    def _row_source(self, batch: torch.Size) -> RowSource:
        return ShardedRows(self, batch)  # type: ignore[return-value]

    def _answer_rows(self, sources: list[RowSource], question: Question, plain: bool) -> list[Tensor]:
        return answer(sources, question)

    @property
    def _rows_here(self) -> Tensor:
        return positions_of(self._plan.rows.spans(self._plan.ranks.rank), self.device)

    @property
    def _keys_here(self) -> Tensor:
        return positions_of(self._plan.keys.spans(self._plan.ranks.rank), self.device)

    def _distance_variance(self) -> DistanceVariance:
        mean = self.mean_distance().reshape(self._factors.batch.numel(), self._factors.heads, -1)
        return DistanceVariance(self._factors.query_offset, mean)

    def _over_ranks(self, own: Tensor, what: str, by: Literal["sum", "max"] = "sum") -> Tensor:
        return _Reduced.apply(own, self._plan.ranks, what, by)

    def rows(self, part: slice) -> Self:
        # Every rank has those of the rows that are its own.
        start, stop = self._checked(lambda: row_range(part, self._sizes[0]))
        plan, rank = self._plan, self._plan.ranks.rank
        at = [n for run, place in plan.rows.spans(rank) for n in range(place.start, place.stop)
              if start <= run.start + n - place.start < stop]  # fmt: skip
        runs = [[inside for run in own if (inside := shifted(run, start, stop))] for own in plan.rows.runs]
        factors, chosen, keys = self._factors, slice(start, stop), slice(0, self._sizes[1])
        q = factors.q.index_select(-2, torch.tensor(at, dtype=torch.int64, device=self.device))
        return self._with(
            Factors(
                q, factors.k, factors.score.crop(chosen, keys),
                None if factors.mask is None else factors.mask.crop(chosen, keys),
                None if factors.offset is None else factors.offset + start,
            ),
            plan=replace(plan, rows=Split(runs, "rows")),
            selected=f"{self._selected}.rows({start}:{stop})",
            tokens=(None if (words := self._tokens[0]) is None else Tokens(words.words[chosen]), self._tokens[1]),
        )  # fmt: skip

    # Requests.

    def _broadcast_values(self, v: Any, length: int, what: str) -> Tensor:
        return self._checked(lambda: super(ShardedWeights, self)._broadcast_values(v, length, what))

    def _broadcast_vectors(self, u: Any) -> Tensor:
        return self._checked(lambda: super(ShardedWeights, self)._broadcast_vectors(u))

    def __rmatmul__(self, u: Tensor) -> Tensor:
        if not isinstance(u, Tensor):  # Python would raise on this rank alone
            raise TypeError(f"u @ W takes a tensor of vectors; got {type(u).__name__}.")
        return super().__rmatmul__(u)

    def _ask(self, request: Request, question: SeeKey | None = None) -> Results:
        self._checked(lambda: self._batch_with(request))
        return super()._ask(request)

    def _checked(self, check: Callable[[], X]) -> X:
        return checked_together(self._plan.ranks, REQUEST, check)

    def _called(self, function: Callable[..., X], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> X:
        ranks = self._plan.ranks
        return checked_together(ranks, REQUEST, lambda: function(*args, **kwargs), call_of(function, args, kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        matrix = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        return matrix._checked(lambda: super(ShardedWeights, cls).__torch_function__(func, types, args, kwargs))

    def _compute(
        self, factors: Factors, request: Request, requires_grad: bool, use_cache: bool, question: SeeKey | None = None
    ) -> Results:
        cached = self._cache.get(self._leaves, request) if use_cache else {}
        if requires_grad and "max_score" in request.names:
            # The gradient of a maximum is that of the score at its place.
            request = replace_fields(request, names=tuple(dict.fromkeys((*request.names, "argmax"))))
        at_once = ROWS_GPU if factors.q.device.type == "cuda" else ROWS
        spans = row_blocks(self._plan.rows.spans(self._plan.ranks.rank), at_once)
        folded = factors.folded()
        versions = versions_of(self._leaves)
        if self._wants is None or versions is None or self._wants[0] != versions:
            self._wants = versions, wants_of(self._plan, folded, spans)
        results = self._run(folded, request, spans, self._wants[1], cached, requires_grad)
        if use_cache:
            self._cache.put(self._leaves, request, results)
        return results

    def _run(
        self,
        factors: Factors,
        request: Request,
        spans: list[tuple[range, slice]],
        wants: list[tuple[int, int]],
        cached: Results,
        requires_grad: bool,
        indexed: str = "",
    ) -> Results:
        refuse_graphs()
        plan, what = self._plan, _call_name(request)
        with plan.ranks.together(what):
            record = {
                "matrix, by its number": plan.number,
                "dtype": str(factors.q.dtype),
                "batch and heads": self._selected,
                **_described(request),
                "indexed rows": indexed,
                "requires_grad": [requires_grad, *(t is not None and t.requires_grad for t in (request.v, request.u))],
                "_wants": wants,
                "_cached": list(cached),
            }
            records = agree(plan.ranks, REQUEST, record, nan_error(plan, factors, v=request.v, u=request.u))
            # A rank that changed a tensor or a result in place has lost what others still have: all compute it again.
            cached = {n: x for n, x in cached.items() if all(n in record["_cached"] for record in records)}
            if not requires_grad and all(name in cached for name in request.names):
                return cached
            of_ranks = [by_piece(plan, record["_wants"]) for record in records]
            job = Job(plan, of_ranks, spans, engine_of(self._engine), factors, request)
            if not requires_grad:
                return without_autocast(factors.q, lambda: compute(job, cached))
            spec, tensors = flatten((factors, request))
            outputs = _ShardedNode.apply(job, spec, cached, *tensors)
        return dict(zip(request.names, outputs, strict=True))

    # Blocks of weights.

    @property
    def scores(self) -> Scores:
        """The scores before softmax, indexed as the weights are: the same on every rank.

        Example:
            >>> regard.weights(torch.eye(3)).scores.shape  # over ranks: that of all of them together
            torch.Size([3, 3])
        """
        return _ShardedScores(self)

    def _block(self, rows: list[int] | range, cols: list[int] | range) -> Tensor:
        """The weights at these rows and columns, (*batch, h, i, j), on every rank: the rows' owners compute them."""
        return self._cells("weights", rows, cols, lambda cells, norm: weights_from_norm(cells, norm, False)[0])

    def _cells(
        self, what: str, rows: list[int] | range, cols: list[int] | range, of_scores: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """A function of the scores at these rows and columns and of the rows' norm, on every rank; `what` it gives."""
        self._checked(lambda: self._check_fits(rows, cols))
        place, at, spans = chosen_rows(self._plan.rows.spans(self._plan.ranks.rank), rows)
        index = torch.tensor(at, dtype=torch.int64, device=self.device)
        factors = self._factors.folded()
        chosen = replace_fields(factors, q=factors.q.index_select(2, index))
        request = Request(
            ("norm", "cells"),
            rows=torch.arange(len(at), device=self.device),
            cols=torch.tensor(list(cols), dtype=torch.int64, device=self.device),
        )
        requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in self._leaves)
        wants = wants_of(self._plan, chosen, spans)
        indexed = (
            repr(rows) if isinstance(rows, range) else describe(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        )
        results = self._run(chosen, request, spans, wants, {}, requires_grad, f"{what} of {indexed}")
        w = of_scores(results["cells"], results["norm"])
        where = torch.tensor(place, dtype=torch.int64, device=self.device)
        everywhere = _OnEveryRank.apply(w, where, len(rows), self._plan.ranks)
        return everywhere.reshape(*self._factors.batch, *everywhere.shape[1:])


class _ShardedHeads(HeadReduction):
    """Heads of a matrix over ranks, taken together."""

    _weights: ShardedWeights
    _shared = True

    def _checked(self, check: Callable[[], X]) -> X:
        return self._weights._checked(check)

    def _called(self, function: Callable[..., X], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> X:
        return self._weights._called(function, args, kwargs)

    def __matmul__(self, v: Tensor) -> Tensor:
        refuse_complete_rows("a product of heads together")


ShardedWeights._heads_together = _ShardedHeads


class _ShardedScores(Scores):
    """Scores of a matrix over ranks."""

    _shared = True

    def __init__(self, matrix: ShardedWeights) -> None:
        super().__init__(matrix._factors, matrix._engine, one_head=matrix._one_head, tokens=matrix._tokens)
        self._matrix = matrix

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._matrix._sizes

    def _with(self, factors: Factors, **changes: Any) -> Self:
        return type(self)(self._matrix._with(factors, **changes))

    def _select(self, picks: list[Pick]) -> Self:
        return type(self)(self._matrix._select(picks))

    def _checked(self, check: Callable[[], X]) -> X:
        return self._matrix._checked(check)

    def _called(self, function: Callable[..., X], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> X:
        return self._matrix._called(function, args, kwargs)

    def _block(self, rows: list[int] | range, cols: list[int] | range) -> Tensor:
        return self._matrix._cells("scores", rows, cols, lambda cells, _: cells)


shared_methods(ShardedWeights, _ShardedHeads, _ShardedScores)


class _ShardedNode(torch.autograd.Function):
    """The autograd node of a request over ranks. Its backward is one exchange of keys as well."""

    @staticmethod
    def forward(ctx: Any, job: Job, spec: Any, cached: Results, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = without_autocast(job.factors.q, lambda: compute(job, cached))
        names = job.request.names
        outputs = tuple(results[n].detach() if n in cached else results[n] for n in names)
        ctx.plan, ctx.wants, ctx.spans, ctx.engine = job.plan, job.wants, job.spans, job.engine
        ctx.spec, ctx.names = spec, names
        ctx.call = backward_call(job.plan.ranks, _call_name(job.request))
        ctx.save_for_backward(*tensors, *outputs)
        ctx.mark_non_differentiable(*(x for x, n in zip(outputs, names, strict=True) if n in NOT_DIFFERENTIATED))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ranks = ctx.plan.ranks
        saved = saved_tensors(ranks, ctx)
        count = len(saved) - len(ctx.names)
        tensors, outputs = saved[:count], saved[count:]
        results = dict(zip(ctx.names, outputs, strict=True))
        incoming = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        with ranks.together(ctx.call):
            records = agree(ranks, ctx.call, {"_names": sorted(incoming), "_needs": ctx.needs_input_grad[3:]})
            # A rank whose loss leaves a result out takes part with zeros.
            used = {name for record in records for name in record["_names"]}
            incoming |= {n: torch.zeros_like(results[n]) for n in ctx.names if n in used and n not in incoming}
            factors, request = unflatten(ctx.spec, tensors)
            job = Job(ctx.plan, ctx.wants, ctx.spans, ctx.engine, factors, request)
            needs = needed_by_any(records)
            of_inputs = without_autocast(factors.q, lambda: vjp(job, results, incoming, needs))
        return None, None, None, *of_inputs


class _OnEveryRank(torch.autograd.Function):
    """Rows of one rank in a tensor of all chosen rows, on every rank.

    The result is the same everywhere, and so is its gradient: every rank takes that of its own rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, count: int, ranks: Ranks) -> Tensor:
        ctx.save_for_backward(place)
        everywhere = rows.new_zeros(*rows.shape[:2], count, rows.shape[3])
        everywhere[:, :, place] = rows
        with ranks.together("indexing"):
            return ranks.sum(everywhere)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return g[:, :, place], None, None, None


class _Reduced(torch.autograd.Function):
    """A sum or maximum over the rows of all ranks, the same on each: so is a sum's gradient; a maximum has none."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, what: str, by: str) -> Tensor:
        with ranks.together(what):
            agree(ranks, what, {"shape": list(own.shape), "dtype": str(own.dtype), "reduction": by})
            if by == "sum":
                return ranks.sum(own)
            largest = torch.stack(ranks.gather(own)).amax(0)
            ctx.mark_non_differentiable(largest)
            return largest

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g, None, None, None


def engine_of(name: str) -> FusedEngine:
    """The engine that computes pieces of keys; one that holds all weights is refused."""
    engine = get_engine(name)
    if engine.plain:
        raise ValueError(f'engine="{name}" holds all weights and has no ranks; use "auto" or "blockwise".')
    return fused_engine(engine)


def _call_name(request: Request) -> str:
    return "indexing" if request.rows is not None else f"a request for {', '.join(request.names)}"


def _described(request: Request) -> dict[str, Any]:
    """Everything about a request that ranks share: v and u without their lengths."""

    def outer(t: Tensor | None) -> str:
        if t is None:
            return "none"
        return f"{str(t.dtype).removeprefix('torch.')}, batch and heads {list(t.shape[:2])}, size {t.shape[-1]}"

    return {
        "values": outer(request.v),
        "vectors": outer(request.u),
        "results": list(request.names),
        "number of largest weights": request.topk,
        "tiles": None if request.tiling is None else list(vars(request.tiling).values()),
        "chosen keys": describe(request.keys),
        "columns": describe(request.cols),
    }


def nan_error(plan: Plan, factors: Factors, **tensors: Tensor | None) -> ValueError | None:
    """An error that names a tensor with nan, in rows or in keys that some row sees."""
    for name, t in tensors.items():
        if t is None or not bool(t.detach().isnan().any()):
            continue
        where = t.detach().isnan().any(-1).any(1)  # b n
        rows = name in ("q", "u")
        for run, at in (plan.rows if rows else plan.keys).spans(plan.ranks.rank):
            nan = where[:, at]
            if not rows and (hidden := hidden_from_all(factors, plan.rows.length, run)) is not None:
                nan = nan & ~hidden
            if bool(nan.any()):
                position = run.start + int(nan.any(0).nonzero()[0])
                return ValueError(f"{name} is nan at position {position}")
    return None
