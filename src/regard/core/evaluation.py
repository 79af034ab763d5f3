"""How a lazy matrix is evaluated: requests through an engine and the result cache, blocks of weights exactly.

`LazyMatrix` holds the factors and decides who computes; `weights.Weights` adds the public methods.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .. import engines
from ..engines import numba
from ..engines.explain import explain
from ..engines.replay import is_replayed_device, is_short, replay_alias, replay_or_record
from ..engines.score_grad import weights_from_norm
from .arguments import as_values
from .autograd import compute_with_autograd
from .indexing import Pick, Tokens, as_index, indices, is_full_axis, runs
from .operators import NotElementwise
from .problem import Factors, Problem
from .pytree import flatten, replace_fields
from .result_cache import ResultCache, check_fits
from .results import Peak, Statistics, TopK
from .shared import Shareable
from .stats import FREE_OUTPUTS, OPTIONAL_OUTPUTS, Request, Results, softmax
from .tensor_kinds import is_plain, refuse_transforms
from .torch_state import as_size, in_forward_ad, in_plain_eager, is_tracing, without_autocast
from .types import EngineName

__all__ = ["LazyMatrix", "SeeKey", "Transposed", "torch_function", "weights_of_scores"]

#: Which of the engines' results a statistic is computed from; any other from the result of its own name.
_RAW_OUTPUTS = {
    "lse": dict.fromkeys(("lse", "norm")),
    "peak": dict.fromkeys(("max_score", "argmax", "norm")),
    "topk": dict.fromkeys(("topk_scores", "topk_indices", "norm")),
    "values": dict.fromkeys(("y",)),
}


_NOTHING = Request(())

#: A key of a question, made of the arguments of `see`, and the tensors it is about.
SeeKey = tuple[Hashable, list[Tensor]]

#: Products of two matrices, by the names of PyTorch's functions.
_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm", "mv")

#: Every kind of lazy matrix by its name: Dynamo of 2.6 makes objects only of classes that it can look up.
_KINDS: dict[str, type] = {}


class LazyMatrix(NotElementwise, Shareable):
    """Factors, an engine and the results that are still valid. No weight is stored."""

    #: Whether results are cached, together with a pass's free outputs. `attend` asks once and needs neither.
    _remembers = True
    #: Whether a question that was asked before of tensors of the same shapes is replayed without being looked at again.
    _replays_questions: ClassVar[bool] = True
    #: Whether the matrix takes part in products with `@`.
    _multiplies: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.__name__] = cls

    def __init__(
        self,
        factors: Factors,
        engine: EngineName = "auto",
        *,
        one_head: bool = False,
        tokens: tuple[Tokens | None, Tokens | None] = (None, None),
        flat: tuple[object, list[Tensor]] | None = None,
    ) -> None:
        """`flat`: the factors flattened, where they are already."""
        if not isinstance(factors, Factors):
            raise TypeError(
                f"Weights are made by regard.weights(q, k), or by Weights.from_dense(w) where they exist already; "
                f"got {type(factors).__name__}."
            )
        self._factors = factors
        self._engine = engine
        self._one_head = one_head  # the head axis has size 1 and is not shown
        self._tokens = tokens
        self._spec: Any  # of a tree
        self._leaves: list[Tensor]
        self._spec, self._leaves = flat or flatten(factors)
        self._cache = ResultCache()

    @property
    def shape(self) -> torch.Size:
        """``(..., h, i, j)``, or ``(i, j)`` for one head.

        >>> regard.weights(torch.randn(8, 5, 4)).shape
        torch.Size([8, 5, 5])
        """
        head = () if self._one_head else (self._factors.heads,)
        return as_size((*self._factors.batch, *head, *self._sizes))

    @property
    def device(self) -> torch.device:
        """Where queries and keys are, and where results are computed.

        >>> regard.weights(torch.eye(2)).device
        device(type='cpu')
        """
        return self._factors.q.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of every statistic: float32, float64 for float64 inputs.

        >>> regard.weights(torch.eye(2).bfloat16()).dtype
        torch.float32
        """
        return torch.float64 if self._factors.q.dtype == torch.float64 else torch.float32

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._factors.q.shape[-2], self._factors.k.shape[-2]

    @property
    def _lengths(self) -> tuple[int, int]:
        """Rows and keys of the tensors that are here; fewer than `_sizes` where others are on other ranks."""
        return self._sizes

    def _with(self, factors: Factors, **changes: Any) -> Self:
        options = {"one_head": self._one_head, "tokens": self._tokens}
        registered = _KINDS.get(type(self).__name__)
        kind: Any = registered if registered is type(self) else type(self)
        return kind(factors, self._engine, **{**options, **changes})

    def _select(self, picks: list[Pick]) -> Self:
        """Chosen sequences and heads: one pick for each axis before the last two."""
        factors, batch = self._factors, len(self._factors.batch)
        axes = zip(picks, self.shape[: len(picks)], strict=True)
        if all(not isinstance(pick, int) and is_full_axis(pick, n) for pick, n in axes):
            return self
        heads = picks[batch] if len(picks) > batch else None
        if heads is not None:
            factors = factors.pick_heads(heads)
        for axis in reversed(range(batch)):
            factors = factors.pick(axis, picks[axis])
        return self._with(factors, one_head=self._one_head or isinstance(heads, int))

    # Requests.

    @property
    def _entire(self) -> bool:
        """Whether all of the matrix is here; of a matrix over ranks others may have some."""
        return True

    def _need_entire(self, what: str) -> None:
        """Raises where other ranks have a part of the matrix; `what` takes all of it, and begins the error."""
        if not self._entire:
            raise NotImplementedError(
                f"{what} takes all rows and keys, and this rank has some of them; ask for statistics of `see` and "
                "reduce them over ranks, or gather q and k first."
            )

    def _request(self, statistics: list[str], inputs: dict[str, Any]) -> Request:
        """The request that the named statistics are computed from; `inputs` are its other fields."""
        if (v := inputs.get("v")) is not None:
            vector = isinstance(v, Tensor) and v.ndim == 1
            inputs = {
                **inputs,
                "v": self._broadcast_values(v.unsqueeze(-1) if vector else v, self._lengths[1], "values"),
            }
        raw: dict[str, None] = {}
        for statistic in statistics:
            raw.update(_RAW_OUTPUTS.get(statistic, {statistic: None}))
        return Request(tuple(raw), **inputs)

    def _question_key(self, names: tuple[str, ...], topk: Any, pool: Any, values: Any) -> SeeKey | None:
        """The key and the tensors of a question, if nothing else decides its answer; else None."""
        if not in_plain_eager() or in_forward_ad() or self._cache:
            return None
        plain = pool is None and (topk is None or type(topk) is int)
        if not (plain and self._replays_questions) or self._shared or self._one_head or self._factors.q.ndim != 4:
            return None
        tensors = self._leaves
        if values is not None:
            if not is_plain(values) or values.ndim != 4:
                return None
            tensors = [*tensors, values]
        if _requires_grad(*tensors):
            return None
        key = "see", names, topk, self._spec, self._engine, self._remembers, numba.enabled, torch.get_num_threads()
        return key, tensors

    def _replayed_answer(self, names: tuple[str, ...], topk: int | None, question: SeeKey) -> Statistics | None:
        """The answer to a question that was asked before of such tensors, replayed; None where it was not."""
        results = replay_alias(*question)
        if results is None:
            return None
        if self._remembers:
            self._cache.put_eagerly(self._leaves, _NOTHING if topk is None else Request((), topk=topk), results)
        more = ("topk",) if topk is not None else ()
        return self._fields((*names, *more, *(("values",) if len(question[1]) > len(self._leaves) else ())), results)

    def _statistics(self, statistics: list[str], inputs: dict[str, Any], question: SeeKey | None = None) -> Statistics:
        """The named statistics. `question`: its key, if it is replayed when it comes again."""
        vector = isinstance(inputs.get("v"), Tensor) and inputs["v"].ndim == 1
        return self._fields(statistics, self._ask(self._request(statistics, inputs), question), vector)

    def _fields(self, statistics: Iterable[str], results: Results, vector: bool = False) -> Statistics:
        """The named statistics from an engine's results."""
        dtype = self.dtype
        fields: dict[str, Any] = {}
        for statistic in statistics:
            if statistic == "peak":
                fields["peak"] = Peak(weights_of_scores(results["max_score"], results["norm"]), results["argmax"])
            elif statistic == "topk":
                if (weights := results.get("topk_weights")) is None:
                    weights = weights_of_scores(results["topk_scores"], results["norm"].unsqueeze(-2))
                fields["topk"] = TopK(weights, results["topk_indices"])
            elif statistic == "values":
                fields["y"] = results["y"].squeeze(-1) if vector else results["y"]
            else:
                result = results[statistic]
                fields[statistic] = result if result.dtype is dtype else result.to(dtype)
        return Statistics(**fields)

    def _ask(self, request: Request, question: SeeKey | None = None) -> Results:
        """The engine's results, with this matrix's batch and head axes; perhaps more than were requested."""
        batch, own = self._batch_with(request), self._factors.batch
        factors = self._factors if batch == own else self._factors.expanded(batch)
        requires_grad = _requires_grad(*self._leaves, request.v, request.u)
        # Every gradient needs the norm.
        names = tuple(dict.fromkeys((*request.names, "norm"))) if requires_grad else request.names
        folded = request
        if len(batch) != 1 or names is not request.names or batch != own:
            folded = replace_fields(request, names=names, v=_fold(request.v, batch), u=_fold(request.u, batch))
        results = self._compute(factors, folded, requires_grad, self._remembers and batch == own, question)
        if len(batch) == 1 and not self._one_head:
            return results
        named = [name for name in (*request.names, *OPTIONAL_OUTPUTS) if name in results]
        return {name: self._unfold(results[name], batch) for name in named}

    def _explain(self, request: Request) -> str:
        """Who would serve a request."""
        batch = self._batch_with(request)
        folded = replace_fields(request, v=_fold(request.v, batch), u=_fold(request.u, batch))
        return explain(engines.get_engine(self._engine), self._factors.expanded(batch), folded)

    def _compute(
        self, factors: Factors, request: Request, requires_grad: bool, use_cache: bool, question: SeeKey | None = None
    ) -> Results:
        engine = engines.get_engine(self._engine)
        use_cache = use_cache and not engine.plain  # the results of a transform must not outlive it
        cached = self._cache.get(self._leaves, request) if use_cache else {}
        if not requires_grad and cached.keys() >= {*request.names}:
            return cached

        def evaluate() -> Results:
            problem = engine.prepare(factors)
            problem = problem if engine.plain else problem.with_nan_as_bias()
            results = None if engine.plain else self._pool_rows(problem, request, engine, cached, requires_grad)
            if results is not None:
                return results
            return compute_with_autograd(problem, request, engine, cached, requires_grad, remember=use_cache)

        if requires_grad or not self._is_replayed(factors, engine):
            results = evaluate()
        else:
            refuse_transforms((factors, request))
            spec, tensors = flatten(request)
            key = "question", self._spec, spec, engine.name, use_cache, numba.enabled, torch.get_num_threads(), *cached
            read = [*self._leaves, *tensors, *cached.values()]
            other = question[0] if question is not None and [*map(id, question[1])] == [*map(id, read)] else None
            results = replay_or_record(key, read, evaluate, not is_replayed_device(factors.q), other)
        if use_cache:
            self._cache.put(self._leaves, request, results)
        return results

    def _row_results(self) -> Results:
        """Cached results of the pass over the keys."""
        return self._cache.get(self._leaves, Request(FREE_OUTPUTS))

    def _adopt(self, results: Results) -> None:
        """Cache results of a matrix with equal factors, which another pass need not compute again."""
        self._cache.put(self._leaves, Request(tuple(results)), results)

    def _is_replayed(self, factors: Factors, engine: engines.Engine) -> bool:
        """Whether a question is replayed from the factors on.

        Intervals of a mask of tensors are cached with the mask, which a recorded call cannot read; there only what
        follows them is replayed (`compute_with_autograd`).
        """
        if factors is not self._factors or is_tracing():
            return False
        on_cpu = is_short(factors.q) and numba.enabled and not engine.plain
        return (on_cpu or is_replayed_device(factors.q)) and (factors.mask is None or not flatten(factors.mask)[1])

    def _pool_rows(
        self, problem: Problem, request: Request, engine: engines.Engine, cached: Results, requires_grad: bool
    ) -> Results | None:
        """The pooled map of a part of the rows without a pass over the others; None where that saves nothing."""
        window = request.window
        if window is None or (window.i0, window.i1) == (0, problem.shape[2]):
            return None
        if "norm" in cached and engines.same_product(engines.fused_engine(engine), problem):
            return None
        tiling = replace_fields(window, i0=0, i1=window.i1 - window.i0)
        local = replace_fields(request, names=("pool", "norm"), tiling=tiling)
        rows = problem.narrow(window.i0, window.i1)
        return {"pool": compute_with_autograd(rows, local, engine, {}, requires_grad)["pool"]}

    # Blocks of weights.

    def _block(self, rows: list[int] | range, cols: list[int] | range) -> Tensor:
        """The weights at these rows and columns, (*batch, h, i, j)."""
        self._check_fits(rows, cols)
        engine = engines.get_engine(self._engine)
        problem = engine.prepare(self._factors)
        if engine.plain:
            request = Request(("weights",), rows=indices(rows, self.device), cols=indices(cols, self.device))
            w = engine.compute(problem, request, request.names, {})["weights"]
        elif is_full_axis(cols, self._sizes[1]):
            block = problem.block(as_index(rows, self.device), as_index(cols, self.device))
            exact = problem.with_nan_as_bias().with_exact_distances()
            # All keys of a row are here: it is normalised by its own scores.
            w = without_autocast(problem.q, lambda: softmax(exact.scores(block), exact.sink)[0].to(self.dtype))
        else:
            problem = problem.with_nan_as_bias()
            parts = list(self._blocks_of_runs(problem, engines.fused_engine(engine), rows, cols))
            empty = problem.q.new_zeros(*problem.shape[:2], 0, len(cols), dtype=problem.compute_dtype)
            w = torch.cat(parts, 2) if parts else empty
        return w.reshape(*self._factors.batch, *w.shape[1:])

    def _check_fits(self, rows: list[int] | range, cols: list[int] | range) -> None:
        cells = math.prod(self._factors.batch) * self._factors.heads * len(rows) * len(cols)
        check_fits(cells * self.dtype.itemsize, self.device)

    def _blocks_of_runs(
        self, problem: Problem, engine: engines.FusedEngine, rows: list[int] | range, cols: list[int] | range
    ) -> Iterator[Tensor]:
        """Weights at these rows and columns, one block a run of adjacent rows.

        Scores and norm come from one product: of two products with different shapes, one may be an ulp off, and at
        scores near 10,000 that makes a weight exceed 1.
        """
        requires_grad = _requires_grad(*self._leaves)
        request = Request(("norm", "cells"), rows=indices(rows, self.device), cols=indices(cols, self.device))
        cached = {} if requires_grad else self._cache.get(self._leaves, Request(("norm",)))
        if cached and engines.same_product(engine, problem):
            results = compute_with_autograd(problem, request, engine, cached, requires_grad)
            yield weights_from_norm(results["cells"], results["norm"][:, :, request.rows], False)[0]
            return
        for run in runs(rows):
            local = replace_fields(request, rows=indices(range(len(run)), self.device))
            results = compute_with_autograd(problem.narrow(run.start, run.stop), local, engine, {}, requires_grad)
            yield weights_from_norm(results["cells"], results["norm"], False)[0]

    # Axes.

    def _broadcast_values(self, v: Any, length: int, what: str) -> Tensor:
        """Values with all axes, (*batch, heads, length, e)."""
        v = as_values(v, length, what, self)
        if self._factors.heads % v.shape[-3] if v.shape[-3] else self._factors.heads:
            raise ValueError(
                f"{what} have {v.shape[-3]} heads and the weights {self._factors.heads}; heads of {what} must divide "
                "those of the weights. If the layout is (batch, length, heads, size), pass values.transpose(1, 2)."
            )
        missing = len(self._factors.batch) + 3 - v.ndim
        return v.reshape(*[1] * missing, *v.shape) if missing > 0 else v

    def _broadcast_vectors(self, u: Any) -> Tensor:
        """Vectors of W.mT @ u with all axes, (*batch, query heads, i, e)."""
        rows, heads = self._broadcast_values(u, self._lengths[0], "vectors"), self._factors.heads
        rows = rows.expand(*rows.shape[:-3], heads, -1, -1) if rows.shape[-3] == 1 else rows
        if rows.shape[-3] != heads:
            raise ValueError(
                f"u has {rows.shape[-3]} heads and the weights {heads}: W.mT @ u takes one u a query head."
            )
        return rows

    def _batch_with(self, request: Request) -> torch.Size:
        own = self._factors.batch
        if request.v is None and request.u is None:
            return own
        others = [t.shape[:-3] for t in (request.v, request.u) if t is not None and t.shape[:-3] != own]
        if not others:
            return own
        try:
            return as_size(torch.broadcast_shapes(own, *others))
        except RuntimeError:
            raise ValueError(
                f"batch axes {[tuple(o) for o in others]} do not broadcast with those of the weights, {tuple(own)}."
            ) from None

    def _unfold(self, x: Tensor, batch: torch.Size) -> Tensor:
        return x.reshape(*batch, *x.shape[2 if self._one_head else 1 :])


class Transposed:
    """Wᵀ, for ``W.mT @ u``: what every key collects from the rows that look at it."""

    _multiplies: ClassVar[bool] = True

    def __init__(self, weights: LazyMatrix) -> None:
        self.mT = self.T = weights

    @property
    def shape(self) -> torch.Size:
        """``(..., h, j, i)``, or ``(j, i)`` for one head."""
        *outer, i, j = self.mT.shape
        return torch.Size((*outer, j, i))

    def __matmul__(self, u: Tensor) -> Tensor:
        w = self.mT
        vector = isinstance(u, Tensor) and u.ndim == 1
        rows = w._broadcast_vectors(u.unsqueeze(-1) if vector else u)
        z = w._ask(Request(("z",), u=rows))["z"].to(rows.dtype)
        return z.squeeze(-1) if vector else z

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return torch_function(func, args, kwargs)

    def __repr__(self) -> str:
        return f"Transposed({self.mT!r})"


def torch_function(func: Any, args: tuple[Any, ...], kwargs: Any, instead: Mapping[str, str] | None = None) -> Any:
    """A function of PyTorch, called with a lazy matrix: products are served, all others are refused by name."""
    name = func.__name__
    if torch.compiler.is_dynamo_compiling() and func is not torch.matmul:
        # Dynamo passes the operands of W @ v as those of v @ W.
        raise TypeError(
            "torch.compile cannot follow @ of a lazy matrix: write torch.matmul(W, v), torch.matmul(W.mT, u) or "
            "W.see(values=v).y."
        )
    operands = [*args, *(kwargs or {}).values()]
    if name in _PRODUCTS and len(operands) == 2:
        left, right = operands
        # Methods, not `@`: torch.compile would come back here.
        if isinstance(left, (LazyMatrix, Transposed)) and left._multiplies:
            return left.__matmul__(right)  # type: ignore[operator]
        if isinstance(right, LazyMatrix) and right._multiplies:
            return right.__rmatmul__(left)  # type: ignore[attr-defined]
    way = (instead or {}).get(name, ".dense(), in quadratic memory")
    raise TypeError(
        f"torch.{name} takes tensors, and a lazy matrix stores none. Use {way}; W @ v, "
        "W.mT @ u, u @ W and torch.matmul are served as they are."
    )


def weights_of_scores(score: Tensor, norm: Tensor) -> Tensor:
    """The weight of a score; where there is no key the score is −inf and the weight 0, also in a row without keys."""
    m, l = norm.unbind(-1)
    empty = l == 0
    return (score - m.masked_fill(empty, 0)).exp() / l.masked_fill(empty, 1)


def _requires_grad(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _fold(x: Tensor | None, batch: torch.Size) -> Tensor | None:
    if x is None:
        return None
    if x.shape[:-3] == batch and len(batch) <= 1:
        return x if batch else x.unsqueeze(0)
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])
