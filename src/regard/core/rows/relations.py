"""Questions that join rows, heads or two matrices, as methods of `Weights`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ...engines import get_engine
from ...engines.reference import dense, log_weights
from ...engines.replay import replay_or_record
from ..evaluation import LazyMatrix
from ..indexing import Tokens, as_int, slice_bounds
from ..problem import Factors
from ..stats import Request
from ..torch_state import is_tracing
from ..types import SegmentsLike
from .fused import on_gpu, span_masses
from .head_reduction import HeadReduction
from .head_shares import head_shares
from .position_questions import PositionQuestions
from .questions import RowQuestions
from .segments import Runs, runs_of
from .sources import DenseRows, RowSource, ScoreRows
from .spans import TilePool
from .strips import DenseForm, Question

__all__ = ["Relations", "row_range"]


class Relations(LazyMatrix, PositionQuestions):
    """`PositionQuestions` of factors."""

    _heads_together: ClassVar[type[HeadReduction]] = HeadReduction

    def _row_source(self, batch: torch.Size) -> RowSource:
        factors = self._local_factors().expanded(batch)
        if (w := factors.score.precomputed) is not None:
            flat = w.expand(*batch, *w.shape[-3:]).reshape(math.prod(batch), *w.shape[-3:])
            return DenseRows(flat, factors.query_offset)
        problem = factors.problem().with_lowered_mask().zero_invisible_keys(Request(("lse",)))[0].with_nan_as_bias()
        cached = self._cache.get(self._leaves, Request(("norm",))) if batch == self._factors.batch else {}
        return ScoreRows(problem, cached.get("norm"))

    def _dense_rows(self, batch: torch.Size, form: DenseForm) -> tuple[Tensor, Tensor | None]:
        factors = self._local_factors().expanded(batch).folded()
        if form == "log-weights":
            return log_weights(factors)
        s, w, _, sink = dense(factors)
        return (s if form == "scores" else w), sink

    def _local_factors(self) -> Factors:
        """The factors, if they are those of the entire matrix: other ranks may hold the rest."""
        factors = self._factors
        head = () if self._one_head else (factors.heads,)
        if tuple(self.shape) != (*factors.batch, *head, factors.q.shape[-2], factors.k.shape[-2]):
            raise NotImplementedError(
                "complete rows are not computed over ranks; ask for statistics of `see`, or gather q and k first."
            )
        return factors

    def _ask_rows(self, question: Question, *others: RowQuestions) -> list[Tensor]:
        if others or not isinstance(question, TilePool):
            return super()._ask_rows(question, *others)
        key = "tiles", question.row_edges, question.col_edges, question.by
        return self._replayed_rows(key, partial(super()._ask_rows, question))

    def _replayed_rows(self, key: tuple[Any, ...], compute: Callable[[], list[Tensor]], *more: Tensor) -> list[Tensor]:
        """`compute()`, replayed on a GPU where it depends on the factors, `more` and a key alone."""
        q, engine = self._factors.q, get_engine(self._engine)
        wants_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in self._leaves)
        if wants_gradients or not (self._entire and q.is_cuda and self._is_replayed(self._factors, engine)):
            return compute()
        key = *key, self._spec, engine.name, self._one_head
        return replay_or_record(key, [*self._leaves, *more], compute)  # type: ignore[no-any-return]

    def _segment_masses(self, keys: SegmentsLike) -> Tensor:
        engine, q = get_engine(self._engine), self._factors.q
        if self._entire and on_gpu(q) and not (engine.plain or engine.avoids_gpu_kernels or is_tracing()):
            runs = runs_of(keys, self.shape[-1], self._tokens[1], q.device)
            if runs is not None:
                members = () if runs.members is None else (runs.members,)
                key, pass_over = ("segments", runs.edges), partial(self._masses_of_runs, runs)
                (mass,) = self._replayed_rows(key, pass_over, *members) or (None,)
                if mass is not None:
                    return mass
        return super()._segment_masses(keys)

    def _masses_of_runs(self, runs: Runs) -> list[Tensor]:
        """By one pass of kernels; nothing where they do not serve."""
        by_run = span_masses(self._row_source(self._factors.batch), runs.edges)
        return [] if by_run is None else [self._unfold(runs.masses(by_run), self._factors.batch)]

    def rows(self, part: slice) -> Self:
        """The same matrix for adjacent rows alone; every question then costs what these rows cost.

        Args:
            part: A slice without step: ``slice(-64, None)`` are the last 64 queries.

        Returns:
            `Weights` ``(..., h, rows, j)``; queries stay at their positions.

        >>> W = regard.weights(torch.zeros(6, 2), mask=regard.causal())
        >>> W.rows(slice(-2, None)).received()
        tensor([0.3667, 0.3667, 0.3667, 0.3667, 0.3667, 0.1667])
        """
        start, stop = row_range(part, self._sizes[0])
        chosen, keys, factors = slice(start, stop), slice(0, self._sizes[1]), self._local_factors()
        return self._with(
            Factors(
                factors.q[..., chosen, :], factors.k, factors.score.crop(chosen, keys),
                None if factors.mask is None else factors.mask.crop(chosen, keys),
                None if factors.offset is None else factors.offset + chosen.start,
            ),
            tokens=(None if (words := self._tokens[0]) is None else Tokens(words.words[chosen]), self._tokens[1]),
        )  # fmt: skip

    def reduce_heads(
        self,
        by: Literal["mean", "sum", "max"] = "mean",
        *,
        heads: Sequence[int] | Tensor | None = None,
        groups: int | Literal["kv"] | None = None,
        weights: Tensor | None = None,
    ) -> HeadReduction:
        """Several heads as one matrix, which answers as `Weights` do and is never stored either.

        Args:
            by: ``"mean"``, ``"sum"`` or ``"max"`` of the heads' weights in every cell.
            heads: Which heads; negative ones count from the end. Default: all.
            groups: Number of groups of adjacent heads, each reduced by itself; ``"kv"``: heads that share keys.
                Default: one, without a head axis.
            weights: A number >= 0 for each of the heads; a mean divides by their sum.

        Returns:
            A `HeadReduction` ``(..., i, j)``, or ``(..., groups, i, j)``.

        >>> W = regard.weights(torch.randn(8, 5, 4), mask=regard.causal())
        >>> mean = W.reduce_heads("mean")
        >>> mean.shape, torch.allclose(mean.row(3), W.row(3).mean(0))
        (torch.Size([5, 5]), True)
        >>> mean.entropy().shape, mean.topk(2).indices.shape
        (torch.Size([5]), torch.Size([5, 2]))
        """
        if self._one_head:
            raise ValueError(
                "reduce_heads() needs a head axis, and this matrix is one head: regard.weights(q[None], k[None])."
            )
        if by not in ("mean", "sum", "max"):
            raise ValueError(f"reduce_heads(by) must be 'mean', 'sum' or 'max'; got {by!r}.")
        if heads is not None:
            heads = _head_numbers(heads, self._factors.heads)
        chosen = self if heads is None else self._select([*map(range, self._factors.batch), heads])
        if groups == "kv":
            groups = self._factors.k.shape[-3]
            if heads is not None:
                _need_shared_keys(heads, self._factors.heads, groups)
        count = 1 if groups is None else groups
        n = chosen._factors.heads
        if (number := as_int(count)) is None or number < 1 or n % number:
            raise ValueError(f"reduce_heads(groups=) must divide the {n} heads, or be 'kv'; got {groups!r}.")
        shares = None if by == "max" and weights is None else head_shares(by, weights, n, number, self._factors.q)
        return self._heads_together(chosen, n // number, shares, one_head=groups is None)


def row_range(part: Any, n: int) -> tuple[int, int]:
    """First and end of the rows that a slice without a step picks."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise ValueError(f"rows(part) takes a slice without step; got {part!r}.")
    start, stop, _ = slice_bounds(part, n)
    return start, max(start, stop)


def _head_numbers(heads: Sequence[int] | Tensor, count: int) -> list[int]:
    listed = heads.tolist() if isinstance(heads, Tensor) else list(heads) if isinstance(heads, Iterable) else []
    numbers = [number for head in listed if (number := as_int(head)) is not None and -count <= number < count]
    if not numbers or len(numbers) < len(listed):
        raise IndexError(f"reduce_heads(heads=) takes a list of numbers of some of {count} heads; got {heads!r}.")
    return [number % count for number in numbers]


def _need_shared_keys(heads: Sequence[int], count: int, key_heads: int) -> None:
    """Raise ValueError unless chosen heads fall into groups of adjacent ones, one for each head of keys."""
    owners = [head // (count // key_heads) for head in heads]
    size, rest = divmod(len(owners), key_heads)
    if rest or owners != [owners[n - n % size] for n in range(len(owners))] or len({*owners}) != key_heads:
        raise ValueError(
            f"reduce_heads(heads=, groups='kv') takes as many heads of each of the {key_heads} key heads, those that "
            f"share keys side by side; got heads {list(heads)}."
        )
