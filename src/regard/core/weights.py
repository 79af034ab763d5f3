"""The attention matrix as an object: index it, multiply with it, request it. It is never stored.

`Weights` keeps factors (queries, keys, a score, a mask) and what was found out on the way: detached numbers, valid
as long as no factor changes. Everything else is computed when it is asked for, exactly there.
Imports `compute_with_autograd` and what is below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import engines
from ..engines import reference
from ..engines.score_grad import weights_from_norm as weights_and_logs
from .arguments import as_tiling, as_tokens, as_values, at_least_one, chosen_keys
from .autograd import compute_with_autograd
from .indexing import At, Pick, Tokens, as_index, indices, parse, positions_of, runs, word_at
from .problem import Factors, Problem, from_weights
from .result_cache import ResultCache, check_fits, format_bytes
from .scores import Precomputed
from .stats import OPTIONAL_OUTPUTS, Request, Results, softmax
from .torch_state import without_autocast

__all__ = ["Peak", "Statistics", "TopK", "Transposed", "Weights"]


class TopK(NamedTuple):
    """The largest weights of every row and the keys they fall on, (..., h, i, n); (0, −1) where there are fewer."""

    values: Tensor
    indices: Tensor


class Peak(NamedTuple):
    """The largest weight of every row and the key it falls on, (..., h, i)."""

    values: Tensor
    indices: Tensor


class Statistics:
    """The results to one `compute_with_autograd`, as attributes. What was not asked for is not there."""

    def __init__(self, **results: Any) -> None:
        # One by one: torch.compile of PyTorch 2.11 does not follow `vars(self).update`.
        for name, answer in results.items():
            setattr(self, name, answer)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} was not asked for; here are {', '.join(self.__dict__)}. Ask see({name!r}).")

    def __repr__(self) -> str:
        return f"Statistics({', '.join(self.__dict__)})"


#: What `compute_with_autograd` takes by name; top, pool, mass and values are given as keywords.
STATISTICS = ("lse", "max_score", "peak", "entropy", "received", "mean_distance")

#: Which of the engines' results each statistic is made of.
_RAW_OUTPUTS = {
    "lse": ("lse", "norm"),
    "peak": ("max_score", "argmax", "norm"),
    "topk": ("topk_scores", "topk_indices", "norm"),
    "values": ("y",),
}


class Weights:
    """The weights of attention, (..., h, i, j), or (i, j) for one head; made by `regard.weights`.

    W @ v, W.mT @ u, u @ W          linear maps, in linear memory
    W[0, 3]                         batch and head axes alone give a Weights
    W[..., 10, 2], W[3, "it"]       rows and columns give a tensor, computed exactly there
    W.entropy(), W.topk(8), ...      statistics, float32 (float64 for float64 inputs)
    """

    def __init__(
        self,
        factors: Factors,
        engine: str,
        *,
        one_head: bool,
        tokens: tuple[Tokens | None, Tokens | None] = (None, None),
    ) -> None:
        self._factors = factors
        self._engine = engine
        self._one_head = one_head
        self._tokens = tokens
        self._leaves = factors.tensors()
        self._cache = ResultCache()

    @staticmethod
    def from_dense(w: Tensor) -> Weights:
        """The same object over weights that somebody else wrote out, (..., h, i, j) or (i, j)."""
        if not isinstance(w, Tensor) or not w.is_floating_point():
            came = w.dtype if isinstance(w, Tensor) else type(w).__name__
            raise TypeError(f"from_dense(w) takes a floating-point tensor of weights; {came} came.")
        if w.ndim < 2:
            raise ValueError(f"from_dense(w) takes (..., h, i, j) or (i, j); shape {tuple(w.shape)} came.")
        return Weights(from_weights(w), "reference", one_head=w.ndim == 2)

    # What it is.

    @property
    def shape(self) -> torch.Size:
        head = () if self._one_head else (self._factors.heads,)
        return torch.Size((*self._factors.batch, *head, *self._sizes))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self._factors.q.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and of every statistic: float32, float64 for float64 inputs."""
        return torch.float64 if self._factors.q.dtype == torch.float64 else torch.float32

    @property
    def tokens(self) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """The words of rows and of columns, as given to `label`."""
        rows, cols = self._tokens
        return rows.words if rows else None, cols.words if cols else None

    def to(self, *args: Any, **kwargs: Any) -> Weights:
        """The same weights on another device or from factors of another floating-point type."""
        return self._with(self._factors.map(lambda t: _moved(t, *args, **kwargs)))

    def detach(self) -> Weights:
        """The same weights, cut off from autograd."""
        return self._with(self._factors.map(Tensor.detach))

    def label(self, rows: Sequence[str], cols: Sequence[str] | None = None) -> Weights:
        """The same weights with words for rows and columns; one list serves both when the lengths agree."""
        i, j = self._sizes
        if cols is None and i != j:
            raise ValueError(f"{i} rows and {j} columns need tokens apart: label(row_tokens, column_tokens).")
        given = as_tokens(rows, i, "row"), as_tokens(rows if cols is None else cols, j, "column")
        labelled = self._with(self._factors, tokens=given)
        labelled._cache = self._cache.copy()
        return labelled

    def at(self, word: str, nth: int) -> At:
        """The nth occurrence of a word, counted from 1, for use as an index."""
        return word_at(word, nth)

    def show(self, word: Any = None, **options: Any) -> Any:
        """The picture: a page in a notebook, text in a terminal, .save("x.html") or .save("x.svg"); see `look.View`."""
        # The room above is entered by name, when it is asked for: imports point downwards.
        return import_module("regard.look").View(self, word=word, **options)

    def __repr__(self) -> str:
        size = "×".join(map(str, self.shape))
        parts = [size, repr(self._factors.score)]
        if self._factors.mask is not None:
            parts.append(repr(self._factors.mask))
        dense = format_bytes(self.shape.numel() * self.dtype.itemsize)
        return f"Weights({', '.join(parts)}, {self.dtype}, {self.device}, {self._engine}; dense {dense}, not stored)"

    # Linear maps.

    def __matmul__(self, v: Any) -> Tensor:
        return self.see(values=v).y

    def __rmatmul__(self, u: Any) -> Tensor:
        if not isinstance(u, Tensor):
            return NotImplemented
        return self.mT @ u if u.ndim == 1 else (self.mT @ u.mT).mT

    @property
    def mT(self) -> Transposed:
        """The transposed matrix, for `W.mT @ u`."""
        return Transposed(self)

    T = mT

    # Statistics. Each is one question; `compute_with_autograd` asks several at once.

    def lse(self) -> Tensor:
        """log Σ_j exp(s_ij), natural log, (..., h, i); −inf for a row that sees nothing."""
        return self.see("lse").lse

    def max_score(self) -> Tensor:
        """The largest score of every row, before softmax, (..., h, i)."""
        return self.see("max_score").max_score

    def peak(self) -> Peak:
        """The largest weight of every row and where it falls."""
        return self.see("peak").peak

    def entropy(self) -> Tensor:
        """−Σ_j w_ij log w_ij in nats, (..., h, i); a sink's share counts as one more outcome."""
        return self.see("entropy").entropy

    def topk(self, k: int) -> TopK:
        """The n largest weights of every row, largest first, ties to the lower index."""
        return self.see(topk=k).topk

    def received(self) -> Tensor:
        """Σ_i w_ij: what each key is given by all rows, for every query head, (..., h, j)."""
        return self.see("received").received

    def pool(self, rows: int, cols: int, i: slice = slice(None), j: slice = slice(None)) -> Tensor:
        """The sum of the weights in each of rows × cols tiles of a part of the matrix, (..., h, rows, cols).

        Tile r of n positions sees_all_keys ⌊r·n/rows⌋ up to, not including, ⌊(r+1)·n/rows⌋.
        """
        return self.see(pool=(rows, cols, i, j)).pool

    def mean_distance(self) -> Tensor:
        """Σ_j w_ij |distance|: how far away every row looks, in positions, (..., h, i)."""
        return self.see("mean_distance").mean_distance

    def mass(self, keys: Any) -> Tensor:
        """Σ of w_ij over chosen keys (a word, an int, a slice, a list of them, or a bool tensor), (..., h, i)."""
        return self.see(mass=keys).mass

    def see(
        self, *names: str, topk: int | None = None, pool: Any = None, mass: Any = None, values: Any = None
    ) -> Statistics:
        """Several results at once, in the fewest passes, with one backward.

        seen = W.see("entropy", "received", topk=8, pool=(64, 64), values=v)
        seen.entropy, seen.received, seen.topk.values, seen.pool, seen.y
        """
        for name in names:
            if name not in STATISTICS:
                raise ValueError(
                    f"unknown statistic {name!r}; by name: {', '.join(STATISTICS)}; "
                    "as keywords: topk=k, pool=(rows, cols), mass=keys, values=v."
                )
            if name in ("lse", "max_score") and isinstance(self._factors.score, Precomputed):
                raise ValueError(
                    f"{name}: weights that were given ready-made tell nothing about the scores they came from."
                )
        if not names and topk is None and pool is None and mass is None and values is None:
            raise ValueError(
                f"see() was asked nothing. By name: {', '.join(STATISTICS)}; as keywords: topk=, pool=, mass=, values=."
            )
        if "mean_distance" in names:
            self._need_positions("mean_distance")
        asked = list(names)
        extra: dict[str, Any] = {}
        if topk is not None:
            asked.append("topk")
            extra["topk"] = at_least_one(topk, "topk(k)")
        if pool is not None:
            asked.append("pool")
            extra["tiling"] = as_tiling(pool, self._sizes)
        if mass is not None:
            asked.append("mass")
            extra["keys"] = chosen_keys(mass, self._sizes[1], self._tokens[1], self._factors.q)
        if values is not None:
            asked.append("values")
            extra["v"] = values
        return self._seen(asked, extra)

    # How results are had.

    def _seen(self, asked: list[str], extra: dict[str, Any]) -> Statistics:
        vector = isinstance(extra.get("v"), Tensor) and extra["v"].ndim == 1
        if "v" in extra:
            extra["v"] = self._laid_values(extra["v"].unsqueeze(-1) if vector else extra["v"], self._sizes[1], "values")
        raw = tuple(dict.fromkeys(name for statistic in asked for name in _RAW_OUTPUTS.get(statistic, (statistic,))))
        results = self._ask(Request(raw, **extra))
        found: dict[str, Any] = {}
        for statistic in asked:
            if statistic == "peak":
                weight = self._weight_of(results["max_score"], results["norm"])
                found["peak"] = Peak(weight, results["argmax"])
            elif statistic == "topk":
                if (weights := results.get("topk_weights")) is None:
                    weights = self._weight_of(results["topk_scores"], results["norm"].unsqueeze(-2))
                found["topk"] = TopK(weights, results["topk_indices"])
            elif statistic == "values":
                found["y"] = results["y"].squeeze(-1) if vector else results["y"]
            else:
                found[statistic] = results[statistic].to(self.dtype)
        return Statistics(**found)

    def _weight_of(self, score: Tensor, norm: Tensor) -> Tensor:
        """The weight of a score; without a key the score is −inf and the weight 0, also in rows that see nothing."""
        m, l = norm.unbind(-1)
        nothing = l == 0
        return (score - m.masked_fill(nothing, 0)).exp() / l.masked_fill(nothing, 1)

    def _ask(self, request: Request) -> Results:
        """The engines' results, with this matrix's batch and head axes."""
        batch = self._batch_with(request)
        factors = self._factors.expanded(batch)
        live = _need_gradients(*self._leaves, request.v, request.u)
        # The gradient of a maximum is that of the score it falls on, so its place is asked for; the norm serves all.
        names = request.names
        if live:
            names = tuple(dict.fromkeys((*names, "norm", *(("argmax",) if "max_score" in names else ()))))
        v, u = _fold(request.v, batch), _fold(request.u, batch)
        asked = dataclasses.replace(request, names=names, v=v, u=u)
        results = self._computed(factors, asked, live, remember=batch == self._factors.batch)
        return {
            name: self._unfolded(results[name], batch)
            for name in (*request.names, *OPTIONAL_OUTPUTS)
            if name in results
        }

    def _computed(self, factors: Factors, request: Request, live: bool, remember: bool) -> Results:
        if self._engine == "reference":
            return reference.answer(factors.folded(), request)
        cached = self._cache.get(self._leaves, request) if remember else {}
        if not live and all(name in cached for name in request.names):
            return cached
        problem = factors.problem()
        engine = engines.get_engine(self._engine)
        results = compute_with_autograd(problem, request, engine, cached, live)
        if remember:
            self._cache.put(self._leaves, request, results)
        return results

    def _block(self, rows: list[int] | range, cols: list[int] | range) -> Tensor:
        """The weights at these rows and columns, (*batch, h, i, j)."""
        cells = self._factors.batch.numel() * self._factors.heads * len(rows) * len(cols)
        check_fits(cells * self.dtype.itemsize, self.device)
        if self._engine == "reference":
            w = reference.weights(self._factors.folded())[:, :, as_index(rows)][..., as_index(cols)]
            return w.reshape(*self._factors.batch, *w.shape[1:])
        problem = self._factors.problem()
        if cols == range(self._sizes[1]):
            block = problem.block(as_index(rows, self.device), as_index(cols, self.device))
            # A whole row is normalised by its own scores.
            w = without_autocast(problem.q, lambda: softmax(problem.scores(block), problem.sink)[0])
        else:
            parts = list(self._parts_of_rows(problem, rows, cols))
            nothing = problem.q.new_zeros(*problem.shape[:2], 0, len(cols), dtype=problem.compute_dtype)
            w = torch.cat(parts, 2) if parts else nothing
        return w.reshape(*self._factors.batch, *w.shape[1:])

    def _parts_of_rows(self, problem: Problem, rows: list[int] | range, cols: list[int] | range) -> Iterator[Tensor]:
        """Weights at these rows and columns, run by run of neighbouring rows: scores and norm come from one product."""
        live, engine = _need_gradients(*self._leaves), engines.get_engine(self._engine)
        keys = indices(cols, self.device)
        asked = Request(("norm", "cells"), rows=indices(rows, self.device), cols=keys)
        remembered = {} if live else self._cache.get(self._leaves, Request(("norm",)))
        if remembered and engines.same_product(engine, problem):
            results = compute_with_autograd(problem, asked, engine, remembered, live)
            yield weights_and_logs(results["cells"], results["norm"][:, :, asked.rows], False)[0]
            return
        for run in runs(rows):
            every = indices(range(len(run)), self.device)
            request = dataclasses.replace(asked, rows=every)
            results = compute_with_autograd(problem.narrow(run.start, run.stop), request, engine, {}, live)
            yield weights_and_logs(results["cells"], results["norm"], False)[0]

    # Indexing.

    def __getitem__(self, key: Any) -> Any:
        picks = parse(key, self.shape, self._tokens)
        outer, rows, cols = picks[:-2], picks[-2], picks[-1]
        chosen = self._selected(outer)
        i, j = self._sizes
        if rows == range(i) and cols == range(j) and not isinstance(rows, int):
            return chosen
        row_list, col_list = positions_of(rows), positions_of(cols)
        block = chosen._block(row_list, col_list)
        if chosen._one_head:
            block = block.squeeze(-3)
        if isinstance(cols, int):
            block = block.squeeze(-1)
        if isinstance(rows, int):
            block = block.squeeze(-1 if isinstance(cols, int) else -2)
        return block

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(self.shape[0]))

    def row(self, i: int | str | At) -> Tensor:
        """Whom query i looks at: w_ij for every key, (..., h, j)."""
        return self[..., i, :]

    def column(self, j: int | str | At) -> Tensor:
        """Who looks at key j: w_ij for every query, (..., h, i)."""
        return self[..., :, j]

    def dense(self) -> Tensor:
        """The whole matrix written out. Quadratic memory: refused, with what to ask instead, when it would not fit."""
        block = self._block(range(self._sizes[0]), range(self._sizes[1]))
        return block.squeeze(-3) if self._one_head else block

    def _selected(self, picks: list[Pick]) -> Weights:
        """Chosen sequences and heads."""
        factors, batch = self._factors, len(self._factors.batch)
        if all(isinstance(pick, range) and pick == range(n) for pick, n in zip(picks, self.shape, strict=False)):
            return self
        heads = picks[batch] if len(picks) > batch else None
        if heads is not None:
            factors = factors.pick_heads(heads)
        for axis in reversed(range(batch)):
            factors = factors.pick(axis, picks[axis])
        return self._with(factors, one_head=self._one_head or isinstance(heads, int))

    # Small things.

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._factors.q.shape[-2], self._factors.k.shape[-2]

    def _with(self, factors: Factors, **changes: Any) -> Weights:
        kept = {"one_head": self._one_head, "tokens": self._tokens}
        return Weights(factors, self._engine, **{**kept, **changes})

    def _need_positions(self, what: str) -> None:
        if self._factors.offset is None:
            i, j = self._sizes
            raise ValueError(
                f"{what} depends on positions, and {i} queries and {j} keys do not say how they correspond: pass "
                'align="start" (query 0 stands at key 0) or align="end" (the last query stands at the last key, as '
                "with a cache) to weights()."
            )

    def _laid_values(self, v: Any, length: int, what: str) -> Tensor:
        """With all axes (*batch, heads, length, e)."""
        v = as_values(v, length, what, self.device, self.shape)
        if self._factors.heads % v.shape[-3]:
            raise ValueError(
                f"{what} have {v.shape[-3]} heads and the weights {self._factors.heads}; heads of {what} must divide "
                "those of the weights. If the layout is (batch, length, heads, size), pass values.transpose(1, 2)."
            )
        missing = len(self._factors.batch) + 3 - v.ndim
        return v.reshape(*[1] * missing, *v.shape) if missing > 0 else v

    def _batch_with(self, request: Request) -> torch.Size:
        others = [t.shape[:-3] for t in (request.v, request.u) if t is not None]
        if all(other == self._factors.batch for other in others):
            return self._factors.batch
        try:
            return torch.Size(torch.broadcast_shapes(self._factors.batch, *others))
        except RuntimeError:
            raise ValueError(
                f"batch axes {[tuple(o) for o in others]} do not broadcast with those of the weights, "
                f"{tuple(self._factors.batch)}."
            ) from None

    def _unfolded(self, x: Tensor, batch: torch.Size) -> Tensor:
        x = x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:])
        return x.squeeze(len(batch)) if self._one_head else x


class Transposed:
    """Wᵀ, for `W.mT @ u`: what every key collects from the rows that look at it."""

    def __init__(self, weights: Weights) -> None:
        self.mT = self.T = weights

    @property
    def shape(self) -> torch.Size:
        *outer, i, j = self.mT.shape
        return torch.Size((*outer, j, i))

    def __matmul__(self, u: Any) -> Tensor:
        w = self.mT
        vector = isinstance(u, Tensor) and u.ndim == 1
        rows = w._laid_values(u.unsqueeze(-1) if vector else u, w._sizes[0], "vectors")
        rows = rows.expand(*rows.shape[:-3], w._factors.heads, -1, -1) if rows.shape[-3] == 1 else rows
        if rows.shape[-3] != w._factors.heads:
            raise ValueError(
                f"u has {rows.shape[-3]} heads and the weights {w._factors.heads}: W.mT @ u takes one u a query head."
            )
        z = w._ask(Request(("z",), u=rows))["z"].to(rows.dtype)
        return z.squeeze(-1) if vector else z

    def __repr__(self) -> str:
        return f"Transposed({self.mT!r})"


# Helpers of the two classes.


def _need_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _fold(x: Tensor | None, batch: torch.Size) -> Tensor | None:
    if x is None:
        return None
    if x.shape[:-3] == batch and len(batch) == 1:
        return x
    return x.expand(*batch, *x.shape[-3:]).reshape(batch.numel(), *x.shape[-3:])


def _moved(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`t.to(...)`, where a floating-point type leaves whole numbers and masks as they are."""
    moved = t.to(*args, **kwargs)
    return moved if t.is_floating_point() or moved.dtype == t.dtype else t.to(moved.device)
