"""Several heads as one matrix: their mean, weighted sum or maximum in every cell, computed strip by strip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...engines import Engine, get_engine
from ...engines.replay import is_replayed_device, replay_or_record
from ..arguments import as_values, at_least_one, chosen_keys
from ..broadcast import check_broadcast
from ..inherited import named_by_class
from ..pytree import flatten, replace_fields
from ..result_cache import check_cells
from ..results import TopK
from ..stats import Request
from ..torch_state import as_size, is_tracing
from ..types import KeyLike, KeysLike
from .complete_rows import ColumnSum, DistanceSum, LargestWeights, RowEntropy, RowProduct
from .head_shares import HeadShares
from .position_questions import PositionQuestions
from .questions import RowQuestions
from .sources import HeadRows, RowSource, log_of_heads
from .spans import PoolBy
from .strips import DenseForm, Question

if TYPE_CHECKING:
    from .relations import Relations

__all__ = ["HeadReduction"]

_CASTS = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "detach")
#: Attributes of a `Weights` that heads taken together have not, and the way to what they may be wanted for.
_INSTEAD = {
    **dict.fromkeys(("lse", "max_score", "scores"), "R has no scores of its own, W.{name} has those of each head"),
    **dict.fromkeys(("T", "mT"), "R.received() sums over rows, W.mT @ u has every head"),
    **dict.fromkeys(("see", "explain"), "call methods one by one, such as R.entropy()"),
    **dict.fromkeys(_CASTS, "W.{name}(...).reduce_heads(...)"),
    **dict.fromkeys(("label", "tokens"), "W.{name}, before reduce_heads"),
    "peak": "R.topk(1)",
    "numpy": "R.dense().numpy(force=True), in quadratic memory",
}


@named_by_class
class HeadReduction(PositionQuestions):
    """Heads reduced to one matrix ``(..., i, j)``, or to one a group; made by `Weights.reduce_heads`.

    It answers what a `Weights` answers about rows, columns and blocks, and compares with other matrices. No weight is
    stored: at most one strip of rows of every head exists at a time. Rows of a mean are distributions; those of a sum
    or a maximum are not, and every statistic is its formula over them.

    >>> W = regard.weights(torch.randn(4, 6, 8), mask=regard.causal())
    >>> teacher, student = W.reduce_heads("mean"), regard.weights(torch.randn(6, 2), mask=regard.causal())
    >>> teacher.kl(student).shape
    torch.Size([6])
    """

    def __init__(self, weights: Relations, size: int, shares: HeadShares | None, *, one_head: bool) -> None:
        self._weights, self._size, self._shares = weights, size, shares
        self._factors, self._engine, self._one_head = weights._factors, weights._engine, one_head
        self._tokens = weights._tokens
        self._norm: Tensor | None = None  # of the heads, (*batch, h, i, 2), where a question brings it along

    @property
    def shape(self) -> torch.Size:
        """``(..., i, j)``, or ``(..., groups, i, j)``.

        >>> regard.weights(torch.randn(8, 5, 4)).reduce_heads("max", groups=2).shape
        torch.Size([2, 5, 5])
        """
        head = () if self._one_head else (self._row_heads,)
        return as_size((*self._factors.batch, *head, *self._weights._sizes))

    @property
    def device(self) -> torch.device:
        """Where results are computed.

        >>> regard.weights(torch.randn(4, 5, 8)).reduce_heads("mean").device
        device(type='cpu')
        """
        return self._weights.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of every result.

        >>> regard.weights(torch.randn(4, 5, 8)).reduce_heads("mean").dtype
        torch.float32
        """
        return self._weights.dtype

    @property
    def _row_heads(self) -> int:
        return self._factors.heads // self._size

    def _row_source(self, batch: torch.Size) -> RowSource:
        heads = self._weights._row_source(batch)
        if self._norm is not None:
            heads = replace_fields(heads, norm=self._norm.reshape(-1, *self._norm.shape[-3:]))
        return HeadRows(heads, self._size, self._shares)  # type: ignore[arg-type]  # no heads of heads are made

    def _answer_rows(self, sources: list[RowSource], question: Question, plain: bool) -> list[Tensor]:
        return self._weights._answer_rows(sources, question, plain)

    def _ask_rows(self, question: Question, *others: RowQuestions) -> list[Tensor]:
        """On a GPU the norm of the heads is kept by their matrix, and a question that comes again is replayed."""
        W, engine = self._weights, get_engine(self._engine)
        spec, tensors = flatten((question, self._shares))
        if others or not self._is_by_gpu_kernels(engine, tensors):
            return super()._ask_rows(question, *others)
        request = Request(("norm",))
        norm = W._cache.get(W._leaves, request).get("norm")
        norm = W._ask(request)["norm"] if norm is None else norm
        with_norm = copy(self)  # a call that is recorded reads no cache
        with_norm._norm = norm
        if not W._is_replayed(W._factors, engine):
            return super(HeadReduction, with_norm)._ask_rows(question)
        key = "heads", W._spec, spec, self._size, self._one_head, engine.name
        read = [*W._leaves, *tensors, norm]
        return replay_or_record(key, read, lambda: super(HeadReduction, with_norm)._ask_rows(question))

    def _is_by_gpu_kernels(self, engine: Engine, tensors: list[Tensor]) -> bool:
        """Whether kernels of a GPU may answer a question of such tensors."""
        W = self._weights
        precomputed = W._factors.score.precomputed is not None
        if (
            engine.name != "auto"
            or precomputed
            or self._shared
            or not W._remembers
            or not is_replayed_device(W._factors.q)
            or is_tracing()
        ):
            return False
        return not (torch.is_grad_enabled() and any(t.requires_grad for t in (*W._leaves, *tensors)))

    @property
    def _rows_here(self) -> Tensor:
        return self._weights._rows_here

    @property
    def _keys_here(self) -> Tensor:
        return self._weights._keys_here

    def _over_ranks(self, own: Tensor, what: str, by: Literal["sum", "max"] = "sum") -> Tensor:
        return self._weights._over_ranks(own, what, by)

    def _dense_rows(self, batch: torch.Size, form: DenseForm) -> tuple[Tensor, Tensor | None]:
        if form == "scores":
            raise ValueError("by='lse' needs scores, and heads taken together have none.")
        x, sink = self._weights._dense_rows(batch, form)
        reduced = self._log_reduced if form == "log-weights" else self._reduced
        return reduced(x), None if sink is None else reduced(sink)

    def _log_reduced(self, x: Tensor) -> Tensor:
        return log_of_heads(x.unflatten(1, (-1, self._size)), self._shares)

    def _reduced(self, x: Tensor, axis: int = 1) -> Tensor:
        """Heads of a tensor along one axis reduced to groups."""
        x = x.unflatten(axis, (-1, self._size))
        return x.amax(axis + 1) if self._shares is None else self._shares.sum_of(x, axis)

    def rows(self, part: slice) -> HeadReduction:
        """The same matrix for adjacent rows alone; every question then costs what these rows cost.

        Args:
            part: A slice without step: ``slice(-64, None)`` are the last 64 queries.

        Returns:
            A `HeadReduction` ``(..., rows, j)``; queries stay at their positions.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads("sum").rows(slice(-1, None)).received()
        tensor([2., 2.])
        """
        return type(self)(self._weights.rows(part), self._size, self._shares, one_head=self._one_head)

    def __getitem__(self, key: tuple[KeysLike, KeysLike]) -> Tensor:
        """Cells of rows and columns: ``R[3, "it"]``, ``R[:, 2]``, ``R[5:8, :]``."""
        if not isinstance(key, tuple) or len(key) != 2:
            raise IndexError(f"heads taken together are indexed by rows and columns, R[rows, cols]; got {key!r}.")
        if all(isinstance(part, slice) and part == slice(None) for part in key):
            return self.dense()
        return self._grouped(self._weights[(..., *key)])  # type: ignore[index]

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("heads taken together are not iterated: R.row(i) is one row, R.dense() all of them.")

    if not TYPE_CHECKING:  # hidden from type checkers, which then report a misspelt name

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if (instead := _INSTEAD.get(name)) is not None:
                message += f", which is one of Weights. For R = W.reduce_heads(...): {instead.format(name=name)}."
            raise AttributeError(message)

        def __rmatmul__(self, u: Tensor) -> Tensor:
            raise TypeError(
                "u @ R is not computed of heads taken together; W.mT @ u has every head, R.received() sums rows."
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.dense().numpy(force=True)
        return array if dtype is None else array.astype(dtype, copy=False)

    def _grouped(self, x: Tensor) -> Tensor:
        axis = len(self._factors.batch)
        x = self._reduced(x, axis)
        return x.squeeze(axis) if self._one_head else x

    def row(self, i: KeyLike) -> Tensor:
        """Where query i looks, heads taken together.

        Args:
            i: A position or a token.

        Returns:
            ``(..., j)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads("sum").row(0)
        tensor([2., 2.])
        """
        return self[i, :]

    def column(self, j: KeyLike) -> Tensor:
        """Who looks at key j, heads taken together.

        Args:
            j: A position or a token.

        Returns:
            ``(..., i)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads().column(0)
        tensor([0.5000, 0.5000])
        """
        return self[:, j]

    def dense(self) -> Tensor:
        """All cells as a tensor, in quadratic memory.

        Returns:
            ``(..., i, j)``, or ``(..., groups, i, j)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads("max").dense()
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
        return self._grouped(self._weights._block(*map(range, self._weights._sizes)))

    def __matmul__(self, v: Tensor) -> Tensor:
        j, vector = self.shape[-1], isinstance(v, Tensor) and v.ndim == 1
        v = as_values(v.unsqueeze(-1) if vector else v, j, "values", self)
        batch, outer = self._factors.batch, (self._row_heads, *v.shape[-2:])
        axes = f"values (..., {j}, e), with one head or a head for each matrix,"
        check_broadcast(v.shape[:-2], (*batch, self._row_heads), "values", axes)
        v = v.expand(*batch, *outer).reshape(math.prod(batch), *outer)
        (y,) = self._ask_rows(RowProduct(v))
        return y.squeeze(-1) if vector else y

    def entropy(self) -> Tensor:
        """Entropy of every row of the reduced matrix in nats.

        Returns:
            ``(..., i)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads("mean").entropy()
        tensor([0.6931, 0.6931])
        """
        return self._ask_rows(RowEntropy())[0]

    def mean_distance(self) -> Tensor:
        """The mean distance Σ_j w_ij |i - j| of every row of the reduced matrix, in positions.

        Returns:
            ``(..., i)``.

        Raises:
            ValueError: Lengths differ and `align` was not passed to `regard.weights`.

        >>> regard.weights(torch.zeros(4, 3, 2), mask=regard.causal()).reduce_heads("mean").mean_distance()
        tensor([0.0000, 0.5000, 1.0000])
        """
        self._positions("mean_distance")
        if self._shares is not None:  # a sum over keys and one over heads change places: the engine's pass serves
            return self._grouped(self._weights.see("mean_distance").mean_distance)  # type: ignore[attr-defined]
        return self._ask_rows(DistanceSum(self._factors.query_offset))[0]

    def topk(self, k: int) -> TopK:
        """The k largest cells of every row, largest first, ties to the lower index.

        Args:
            k: How many, at least 1.

        Returns:
            `TopK`, each ``(..., i, k)``; (0, -1) where a row sees fewer keys.

        >>> regard.weights(torch.eye(3).expand(2, 3, 3)).reduce_heads("mean").topk(1).indices.flatten()
        tensor([0, 1, 2])
        """
        check_cells(self.shape[:-1], at_least_one(k, "topk(k)"), 12, self.device)
        values, keys = self._ask_rows(LargestWeights(at_least_one(k, "topk(k)")))
        return TopK(values, keys)

    def received(self) -> Tensor:
        """The weight that each key receives from all rows, heads taken together.

        Returns:
            ``(..., j)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads("sum").received()
        tensor([4., 4.])
        """
        if self._shares is not None:  # a sum over rows and one over heads change places: the engine's pass serves
            return self._grouped(self._weights.see("received").received)  # type: ignore[attr-defined]
        return self._ask_rows(ColumnSum())[0]

    def mass(self, keys: KeysLike) -> Tensor:
        """The weight that every row puts on chosen keys, heads taken together.

        Args:
            keys: As for `Weights.mass`.

        Returns:
            ``(..., i)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads().mass(0)
        tensor([0.5000, 0.5000])
        """
        return self @ chosen_keys(keys, self.shape[-1], self._tokens[1], self._factors.q)

    def pool(self, rows: int, cols: int, i: slice | None = None, j: slice | None = None, by: PoolBy = "sum") -> Tensor:
        """The matrix at lower resolution, tile by tile as `Weights.pool` cuts it.

        Args:
            rows: Number of tiles along the queries.
            cols: Number of tiles along the keys.
            i: The part of the queries that is pooled; None for all.
            j: The part of the keys that is pooled; None for all.
            by: ``"sum"``, ``"mean"`` or ``"max"``.

        Returns:
            ``(..., rows, cols)``.

        >>> regard.weights(torch.zeros(4, 2, 3)).reduce_heads("sum").pool(1, 2)
        tensor([[4., 4.]])
        """
        return self._pool_by((rows, cols, i, j), by)

    def __repr__(self) -> str:
        by = "max" if self._shares is None else "sum"
        return f"HeadReduction({'×'.join(map(str, self.shape))}, {by} of {self._size} heads of {self._weights!r})"
