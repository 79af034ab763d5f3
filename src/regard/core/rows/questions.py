"""Questions about complete rows, which any matrix with a source of rows answers: `Weights` and `HeadReduction`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ...engines import get_engine
from ..arguments import as_number, as_tiling, at_least_one, segment_flags
from ..broadcast import MatrixShape, check_broadcast, per_cell
from ..indexing import Tokens
from ..masks.algebra import Mask, as_mask
from ..operators import NotElementwise
from ..problem import Factors
from ..pytree import replace_fields
from ..result_cache import check_cells
from ..shared import Shareable, refuse_one_over_ranks
from ..tensor_kinds import readable_numbers
from ..torch_state import is_tracing, without_autocast
from ..types import EngineName, MaskLike, PoolLike, SegmentsLike
from .comparison import Comparison, joint_batch
from .complete_rows import ChosenKeys
from .sources import RowSource
from .spans import BlockMask, CellMass, PoolBy, TilePool, block_edges, smallest_cover, tile_edges
from .strips import DenseForm, Question, walk_strips
from .traced import answer, traced

if TYPE_CHECKING:
    from ..weights import Weights
    from .head_reduction import HeadReduction

__all__ = ["RowQuestions"]


class RowQuestions(NotElementwise, Shareable):
    """Methods of a matrix whose complete rows can be computed, a strip at a time."""

    _factors: Factors
    _engine: EngineName
    _one_head: bool
    _tokens: tuple[Tokens | None, Tokens | None]

    @property
    def shape(self) -> torch.Size:
        """``(..., h, i, j)``, or ``(i, j)`` for one head."""
        raise NotImplementedError

    @property
    def _row_heads(self) -> int:  # of the result
        return self._factors.heads

    def _row_source(self, batch: torch.Size) -> RowSource:
        """This matrix over a batch that its own broadcasts to."""
        raise NotImplementedError

    def _dense_rows(self, batch: torch.Size, form: DenseForm) -> tuple[Tensor, Tensor | None]:
        """By the textbook: a matrix (b, h, i, j), and of weights the share (b, h, i) of a sink, if there is one."""
        raise NotImplementedError

    def _ask_rows(self, question: Question, *others: RowQuestions) -> list[Tensor]:
        """The outputs of a question to this matrix and others, with batch and head axes."""
        matrices = [self, *others]
        batch = joint_batch([matrix._factors.batch for matrix in matrices])
        engines = [get_engine(matrix._engine) for matrix in matrices]
        q = self._factors.q
        if any(engine.plain and not _is_precomputed(matrix) for engine, matrix in zip(engines, matrices, strict=True)):
            outputs = without_autocast(q, lambda: question.of_dense(_dense_matrices(matrices, batch, question)))
        else:
            sources = [matrix._row_source(batch) for matrix in matrices]
            plain = any(e.avoids_gpu_kernels and m._factors.q.is_cuda for e, m in zip(engines, matrices, strict=True))
            outputs = self._answer_rows(sources, question, plain)
        one_head = all(matrix._one_head for matrix in matrices)
        unfolded = [x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:]) for x in outputs]
        return [x.squeeze(len(batch)) if one_head else x for x in unfolded]

    def _answer_rows(self, sources: list[RowSource], question: Question, plain: bool) -> list[Tensor]:
        """The outputs, with one batch axis; `plain`: by no kernels."""
        if plain:
            return list(walk_strips(sources, question))
        traced_outputs = traced(sources, question) if is_tracing() else None
        return answer(sources, question) if traced_outputs is None else traced_outputs

    @property
    def _rows_here(self) -> Tensor:
        """Which rows outputs have, (i,): all, or those of one rank."""
        return torch.arange(self.shape[-2], device=self._factors.q.device)

    @property
    def _keys_here(self) -> Tensor:
        """Which keys outputs have, (j,): likewise."""
        return torch.arange(self.shape[-1], device=self._factors.q.device)

    def _over_ranks(self, own: Tensor, what: str, by: Literal["sum", "max"] = "sum") -> Tensor:
        """A sum or maximum over these rows, over all rows: other ranks may have some; `what` takes it."""
        return own

    def rows(self, part: slice) -> RowQuestions:
        """The same matrix for adjacent rows alone."""
        raise NotImplementedError

    def _compare(self, measure: str, other: Weights | HeadReduction) -> Tensor:
        if not isinstance(other, RowQuestions):
            raise TypeError(
                f"{measure}(other) compares with another Weights; got {type(other).__name__}. "
                "Weights that exist as a tensor: regard.Weights.from_dense(w)."
            )
        refuse_one_over_ranks(self, other)
        if self.shape[-2:] != other.shape[-2:]:
            raise ValueError(
                f"{measure}(other) compares rows of equal keys: both matrices must have the same i and j; "
                f"got {tuple(self.shape)} and {tuple(other.shape)}."
            )
        ours, theirs = (1 if m._one_head else m.shape[-3] for m in (self, other))
        if ours != theirs and 1 not in (ours, theirs):
            raise ValueError(
                f"{measure}(other) compares head by head: heads must be equal, or one; got {ours} and {theirs}. "
                'Their means compare: W.reduce_heads("mean").'
            )
        for name in ("device", "dtype"):
            if (a := getattr(self, name)) != (b := getattr(other, name)):
                raise ValueError(f"{measure}(other): one matrix is {a} and the other {b}; move one with .to().")
        return self._ask_rows(Comparison(measure), other)[0]

    def cross_entropy(self, other: Weights | HeadReduction) -> Tensor:
        """Cross-entropy -Σ_j p_ij log q_ij of every row of another matrix q under this one, p, in nats.

        Args:
            other: Weights of the same rows and keys; other queries, keys, scores and masks. One head stands for all.

        Returns:
            ``(..., h, i)``; 0 for a row of p that sees no key, inf where q forbids a key that p sees. A sink counts
            as one more outcome. Both matrices get gradients.

        >>> p, q = regard.weights(torch.eye(2)), regard.weights(torch.zeros(2, 2))
        >>> p.cross_entropy(q)  # two keys alike: log 2
        tensor([0.6931, 0.6931])
        """
        return self._compare("cross_entropy", other)

    def kl(self, other: Weights | HeadReduction) -> Tensor:
        """Kullback-Leibler divergence Σ_j p_ij (log p_ij - log q_ij) of every row from another matrix q, in nats.

        Computed from log-weights that are centred on the maxima of both rows: large scores cancel nothing.

        Args:
            other: Weights of the same rows and keys; other queries, keys, scores and masks. One head stands for all.

        Returns:
            ``(..., h, i)``; 0 for a row of p that sees no key, inf where q forbids a key that p sees (such a row has
            gradient 0). A sink counts as one more outcome. Both matrices get gradients.

        >>> teacher, student = (regard.weights(torch.randn(4, 6, d), mask=regard.causal()) for d in (64, 16))
        >>> teacher.kl(student).shape, bool((teacher.kl(student) >= -1e-6).all())
        (torch.Size([4, 6]), True)
        >>> teacher.kl(teacher).abs().max()
        tensor(0.)
        """
        return self._compare("kl", other)

    def js(self, other: Weights | HeadReduction) -> Tensor:
        """Jensen-Shannon divergence of every row, ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2, in nats.

        Args:
            other: Weights of the same rows and keys. One head stands for all.

        Returns:
            ``(..., h, i)``, between 0 and log 2. Both matrices get gradients.

        >>> p = regard.Weights.from_dense(torch.tensor([[1.0, 0.0]]))
        >>> p.js(regard.Weights.from_dense(torch.tensor([[0.0, 1.0]])))  # nothing in common: log 2
        tensor([0.6931])
        """
        return self._compare("js", other)

    def overlap(self, other: Weights | HeadReduction) -> Tensor:
        """The weight Σ_j min(p_ij, q_ij) that every row has in common with another matrix q.

        Args:
            other: Weights of the same rows and keys. One head stands for all.

        Returns:
            ``(..., h, i)``, between 0 and 1. A sink counts as one more outcome. Both matrices get gradients.

        >>> p = regard.Weights.from_dense(torch.tensor([[0.5, 0.5, 0.0]]))
        >>> p.overlap(regard.Weights.from_dense(torch.tensor([[0.25, 0.0, 0.75]])))
        tensor([0.2500])
        """
        return self._compare("overlap", other)

    def total_variation(self, other: Weights | HeadReduction) -> Tensor:
        """Total variation ½ Σ_j |p_ij - q_ij| between every row and that of another matrix q.

        Args:
            other: Weights of the same rows and keys. One head stands for all.

        Returns:
            ``(..., h, i)``, between 0 and 1. A sink counts as one more outcome. Both matrices get gradients.

        >>> p = regard.Weights.from_dense(torch.tensor([[0.5, 0.5, 0.0]]))
        >>> p.total_variation(regard.Weights.from_dense(torch.tensor([[0.25, 0.0, 0.75]])))
        tensor([0.7500])
        """
        return self._compare("total_variation", other)

    def pool_blocks(self, rows: int, cols: int, by: PoolBy = "sum") -> Tensor:
        """The matrix in blocks of rows × cols cells; the last block of an axis may be shorter.

        ``rows=1`` gives rows × key blocks: what every query puts on each block of keys.

        Args:
            rows: Queries in a block.
            cols: Keys in a block.
            by: ``"sum"``, ``"mean"`` or ``"max"`` of the weights, or ``"lse"``: log Σ exp of the scores.

        Returns:
            ``(..., h, ⌈i/rows⌉, ⌈j/cols⌉)``. A block that no row sees is 0, by lse -inf.

        >>> regard.weights(torch.zeros(3, 2)).pool_blocks(1, 2)
        tensor([[0.6667, 0.3333],
                [0.6667, 0.3333],
                [0.6667, 0.3333]])
        """
        return self._pool_blocks(rows, cols, by, "pool_blocks")

    def _pool_blocks(self, rows: int, cols: int, by: PoolBy, what: str) -> Tensor:
        i, j = self.shape[-2:]
        edges = (
            block_edges(at_least_one(rows, f"{what}(rows=...)"), i),
            block_edges(at_least_one(cols, f"{what}(cols=...)"), j),
        )
        return self._pool_tiles(*edges, by)

    def _pool_by(self, pool: PoolLike, by: str) -> Tensor:
        """Tiles of a part of the matrix, as `Weights.pool` cuts it, at the cost of its rows."""
        i, j = self.shape[-2:]
        tiling = as_tiling(pool, (i, j))
        check_cells(self.shape[:-2], tiling.rows * tiling.cols, self._factors.q.dtype.itemsize, self._factors.q.device)
        rows = tile_edges(tiling.rows, 0, tiling.i1 - tiling.i0)
        cols = tile_edges(tiling.cols, tiling.j0, tiling.j1)
        part = self if (tiling.i0, tiling.i1) == (0, i) else self.rows(slice(tiling.i0, tiling.i1))
        return part._pool_tiles(rows, cols, by)

    def _pool_tiles(self, row_edges: tuple[int, ...], col_edges: tuple[int, ...], by: str) -> Tensor:
        if by not in get_args(PoolBy):
            raise ValueError(f"by must be {', '.join(map(repr, get_args(PoolBy)))}; got {by!r}.")
        if by == "lse" and _is_precomputed(self):
            raise ValueError("by='lse' needs scores, and weights that were passed to from_dense have none.")
        q = self._factors.q
        check_cells(self.shape[:-2], (len(row_edges) - 1) * (len(col_edges) - 1), q.dtype.itemsize, q.device)
        merge: Any = "sum" if by == "mean" else by
        (tiles,) = self._ask_rows(TilePool(row_edges, col_edges, merge))
        if by != "mean":
            return tiles
        tall, wide = (torch.tensor(edges, device=tiles.device).diff() for edges in (row_edges, col_edges))
        return tiles / (tall[:, None] * wide).clamp(min=1)

    def cover(self, share: float, rows: int, cols: int) -> Tensor:
        """For every block of rows the smallest set of key blocks that holds a share of its weight.

        The oracle that block-sparse attention is judged by: no other set of as many blocks holds more.

        Args:
            share: Between 0 and 1.
            rows: Queries in a block.
            cols: Keys in a block.

        Returns:
            Bool ``(..., h, ⌈i/rows⌉, ⌈j/cols⌉)``; among equal blocks the earlier ones.

        >>> W = regard.Weights.from_dense(torch.tensor([[0.1, 0.6, 0.3]]))
        >>> W.cover(0.8, rows=1, cols=1)
        tensor([[False,  True,  True]])
        """
        if (number := as_number(share)) is None or not 0 <= number <= 1:
            raise ValueError(f"cover(share) takes a share between 0 and 1; got {share!r}.")
        return smallest_cover(self._pool_blocks(rows, cols, "sum", "cover"), float(number))

    def recall(self, mask: MaskLike, block: tuple[int, int] | None = None) -> Tensor:
        """The weight of every row that a mask would let through: what sparse attention retains.

        Args:
            mask: A mask, a bool tensor ``(..., i, j)`` or a function of positions (i, j).
            block: Sizes (rows, cols) of the blocks that a bool tensor ``(..., ⌈i/rows⌉, ⌈j/cols⌉)`` speaks of, such as
                that of `cover`.

        Returns:
            ``(..., h, i)``.

        >>> W = regard.weights(torch.zeros(4, 2))
        >>> W.recall(regard.causal())
        tensor([0.2500, 0.5000, 0.7500, 1.0000])
        >>> W.recall(W.cover(0.5, 2, 2), block=(2, 2))
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        cells = self._as_mask(mask, block, "recall")
        return self._ask_rows(CellMass(cells, False, self._factors.query_offset))[0]

    def log_mass(self, mask: MaskLike, block: tuple[int, int] | None = None) -> Tensor:
        """The logarithm of `recall`, added up from log-weights: no weight is too small for it.

        Its negative is the loss that draws attention to chosen cells (guided alignment).

        Args:
            mask: The cells: a mask, a bool tensor ``(..., i, j)`` or a function of positions (i, j).
            block: As for `recall`.

        Returns:
            ``(..., h, i)``; -inf where a row sees none of the cells.

        >>> regard.weights(torch.zeros(4, 2)).log_mass(lambda i, j: j == 0)
        tensor([-1.3863, -1.3863, -1.3863, -1.3863])
        """
        cells = self._as_mask(mask, block, "log_mass")
        return self._ask_rows(CellMass(cells, True, self._factors.query_offset))[0]

    def _as_mask(self, mask: Any, block: tuple[int, int] | None, what: str) -> Mask:
        """A mask for this matrix, with one batch axis."""
        outer = (*self._factors.batch, self._row_heads)
        i, j = self.shape[-2:]
        offset = self._factors.query_offset
        if block is None:
            cells = as_mask(mask)
            if cells.positional and self._factors.offset is None:
                raise ValueError(f"{what}: {cells!r} depends on positions: pass align= to weights().")
            cells = cells.broadcast_to(MatrixShape((*outer, i, j), offset, self._factors.q.device))
        else:
            if not isinstance(block, (tuple, list)) or len(block) != 2:
                raise ValueError(f"{what}(block=(rows, cols)) takes the two sizes of a block; got {block!r}.")
            rows, cols = (at_least_one(n, f"{what}(block=(rows, cols))") for n in block)
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"{what}(mask, block=...) takes a bool tensor with one flag a block; got {got}.")
            mask = readable_numbers(mask, f"{what}(mask, block=...)")
            blocks = MatrixShape((*outer, -(-i // rows), -(-j // cols)), offset, self._factors.q.device)
            cells = BlockMask(per_cell(mask, blocks, f"{what}(mask, block=...)"), rows, cols)
        folded = replace_fields(self._factors, mask=cells).folded().mask
        assert folded is not None
        return folded

    def segment_mass(
        self, keys: SegmentsLike, rows: SegmentsLike | None = None, by: Literal["sum", "mean"] = "sum"
    ) -> Tensor:
        """The weight that every row puts on many segments of keys at once.

        Args:
            keys: Segment of each key, an int tensor ``(j,)`` with -1 for none; or a list of segments, each as `mass`
                takes keys (a slice, positions, tokens, bools), which may overlap.
            rows: Segments of rows to pool, likewise: ``(i,)`` or a list.
            by: How rows of a segment are pooled: ``"sum"`` or ``"mean"``.

        Returns:
            ``(..., h, i, n)`` for n segments of keys, ``(..., h, r, n)`` with r segments of rows.

        >>> W = regard.weights(torch.zeros(4, 2))
        >>> W.segment_mass(torch.tensor([0, 0, 1, -1]))[0]
        tensor([0.5000, 0.2500])
        >>> W.segment_mass([slice(0, 3), [3]], rows=[slice(2, 4)], by="mean")
        tensor([[0.7500, 0.2500]])
        """
        if by not in ("sum", "mean"):
            raise ValueError(f"segment_mass(by=) must be 'sum' or 'mean'; got {by!r}.")
        mass = self._segment_masses(keys)
        if rows is None:
            return mass
        flags = segment_flags(rows, self.shape[-2], self._tokens[0], self._factors.q, "rows")
        shares = flags if by == "sum" else flags / flags.sum(-1, keepdim=True).clamp(min=1)
        return self._over_ranks(without_autocast(mass, lambda: shares[:, self._rows_here] @ mass), "segment_mass")

    def _segment_masses(self, keys: SegmentsLike) -> Tensor:
        flags = segment_flags(keys, self.shape[-1], self._tokens[1], self._factors.q, "keys")
        return self.__matmul__(flags.index_select(1, self._keys_here).mT)  # type: ignore  # Dynamo cannot follow @

    def gather(self, keys: Tensor) -> Tensor:
        """The weights of every row at keys of its own.

        Args:
            keys: Key positions ``(i, n)``, or with batch and head axes that broadcast; -1 for none.

        Returns:
            ``(..., h, i, n)``; 0 at key -1.

        >>> regard.weights(torch.zeros(3, 2), mask=regard.causal()).gather(torch.tensor([[0], [0], [-1]]))
        tensor([[1.0000],
                [0.5000],
                [0.0000]])
        """
        outer = (*self._factors.batch, self._row_heads)
        i, j = len(self._rows_here), self.shape[-1]
        if not isinstance(keys, Tensor) or keys.ndim < 2 or keys.shape[-2] != i:
            got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
            raise ValueError(
                f"gather(keys) takes a tensor of key positions ({i}, n), a row of them for each query; got {got}."
            )
        if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
            raise TypeError(
                f"gather(keys) takes whole numbers, the positions of keys; got {keys.dtype}. "
                "For one flag a cell: W.recall(flags)."
            )
        check_broadcast(keys.shape[:-1], (*outer, i), "gather(keys)", f"(..., h, {i}) before the last axis")
        keys = readable_numbers(keys, "gather(keys)").long()
        if not is_tracing() and keys.numel() and (int(keys.max()) >= j or int(keys.min()) < -1):
            raise IndexError(
                f"gather(keys): positions are -1 (none) to {j - 1}; got {int(keys.min())} to {int(keys.max())}."
            )
        full = torch.broadcast_to(keys, (*outer, *keys.shape[-2:])).to(self._factors.q.device)
        return self._ask_rows(ChosenKeys(full.reshape(math.prod(self._factors.batch), *full.shape[-3:])))[0]


def _is_precomputed(matrix: RowQuestions) -> bool:
    return matrix._factors.score.precomputed is not None


def _dense_matrices(matrices: list[RowQuestions], batch: torch.Size, question: Question) -> list[Tensor]:
    """Dense matrices, as the question takes them; where one has a sink that counts, its share is the last column."""
    pairs = [matrix._dense_rows(batch, question.dense_form) for matrix in matrices]
    if not question.counts_sink or all(sink is None for _, sink in pairs):
        return [x for x, _ in pairs]
    none = -math.inf if question.dense_form == "log-weights" else 0.0
    shares = [x.new_full(x.shape[:-1], none) if sink is None else sink for x, sink in pairs]
    return [torch.cat([x, share.unsqueeze(-1)], -1) for (x, _), share in zip(pairs, shares, strict=True)]
