"""Parts of complete rows: the weight on chosen cells, and tiles of the matrix by sum, maximum or log-sum-exp."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..block import MatrixBlock, take
from ..masks.algebra import Mask
from ..pytree import register_node
from ..torch_state import is_tracing
from .sources import Part, Strip, safe_lse
from .strips import DenseForm, Merge, OfParts

__all__ = ["BlockMask", "CellMass", "PoolBy", "TilePool", "block_edges", "smallest_cover", "tile_edges"]

#: Cells that are sorted at a time: a sort takes many times their memory.
_SORTED_CELLS = 2**24

PoolBy = Literal["sum", "mean", "max", "lse"]


@register_node
class BlockMask(Mask):
    """Visible blocks of rows × cols cells; the last block of an axis may be shorter."""

    blocks: Tensor  # *batch|1 h|1 R C : bool
    rows: int
    cols: int

    def visible(self, block: MatrixBlock) -> Tensor:
        rows = (block.i[:, 0] - block.offset) // self.rows
        return self.blocks.index_select(-2, rows).index_select(-1, block.j[0] // self.cols)


@register_node
class CellMass:
    """The weight of every row on the cells that a mask shows, or its logarithm: (b, h, i)."""

    mask: Mask
    log: bool
    offset: int
    row_fields: ClassVar[tuple[str, ...]] = ()
    counts_sink: ClassVar[bool] = False
    of_parts: ClassVar[OfParts] = "rows"

    @property
    def name(self) -> str:
        return "log_mass" if self.log else "recall"

    @property
    def dense_form(self) -> DenseForm:
        return "log-weights" if self.log else "weights"

    @property
    def blocks(self) -> BlockMask | None:
        """The cells as blocks, where they are blocks and the weights of a row on each may be added up."""
        return self.mask if isinstance(self.mask, BlockMask) and not self.log else None

    @property
    def merges(self) -> tuple[Merge, ...]:
        return ("lse" if self.log else "sum",)

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        return [like.new_full(shape[:3], -torch.inf if self.log else 0.0)]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        (strip,) = strips
        cells = self._cells(part.block)
        cells = take(take(cells, 0, part.batch), 1, part.heads)
        return [(self._mass(strip.log_w if self.log else strip.w, cells), part.index(part.rows))]

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (x,) = matrices
        block = MatrixBlock(slice(0, x.shape[-2]), slice(0, x.shape[-1]), self.offset, x.device)
        return [self._mass(x, self._cells(block))]

    def _mass(self, x: Tensor, cells: Tensor) -> Tensor:
        """From weights, or from their logarithms: that of a sum that underflows is −inf."""
        return safe_lse(x.masked_fill(~cells, -torch.inf), -1) if self.log else (x * cells).sum(-1)

    def _cells(self, block: MatrixBlock) -> Tensor:
        cells = self.mask.visible(block)
        return cells.reshape(*[1] * (4 - cells.ndim), *cells.shape)


_REDUCE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim),
    "max": lambda x, dim: x.amax(dim),
    "lse": lambda x, dim: safe_lse(x, dim),
}


@register_node
class TilePool:
    """Tiles between edges of rows and of keys: the sum or maximum of weights, or log Σ exp of scores."""

    row_edges: tuple[int, ...]
    col_edges: tuple[int, ...]
    by: Merge
    name: ClassVar[str] = "pool"
    row_fields: ClassVar[tuple[str, ...]] = ()
    counts_sink: ClassVar[bool] = False
    of_parts: ClassVar[OfParts] = "tiles"

    @property
    def merges(self) -> tuple[Merge, ...]:
        return (self.by,)

    @property
    def dense_form(self) -> DenseForm:
        return "scores" if self.by == "lse" else "weights"

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        tiles = (*shape[:2], len(self.row_edges) - 1, len(self.col_edges) - 1)
        return [like.new_full(tiles, -torch.inf if self.by == "lse" else 0.0)]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        (strip,) = strips
        x = strip.scores if self.by == "lse" else strip.w
        by_col, cols = self._reduced(x, -1, self.col_edges, part.cols)
        assert isinstance(part.block.rows, slice)
        tiles, rows = self._reduced(by_col, -2, self.row_edges, part.block.rows)
        return [(tiles, part.index(rows, cols))]

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        (x,) = matrices
        rows, cols = (list(pairwise(edges)) for edges in (self.row_edges, self.col_edges))
        if not rows or not cols:
            return [x.new_zeros(*x.shape[:2], len(rows), len(cols))]
        tiles = [torch.stack([self._one(x[..., r:s, c:d]) for c, d in cols], -1) for r, s in rows]
        return [torch.stack(tiles, -2)]

    def _one(self, cells: Tensor) -> Tensor:
        if 0 in cells.shape[-2:]:
            return cells.new_full(cells.shape[:-2], -torch.inf if self.by == "lse" else 0.0)
        return _REDUCE[self.by](cells.flatten(-2), -1)

    def _nothing(self, x: Tensor, dim: int) -> Tensor:
        """A tile without positions."""
        return torch.full_like(x.select(dim, 0), -torch.inf if self.by == "lse" else 0.0)

    def _reduced(self, x: Tensor, dim: int, edges: tuple[int, ...], part: slice) -> tuple[Tensor, slice]:
        """One axis of a strip reduced to the tiles that it touches, and which these are."""
        start, stop = max(part.start, edges[0]), min(part.stop, edges[-1])
        if start >= stop:
            return x.narrow(dim, 0, 0), slice(0, 0)
        x = x.narrow(dim, start - part.start, stop - start)
        first, last = bisect_right(edges, start) - 1, bisect_left(edges, stop)
        sizes = [min(edges[n + 1], stop) - max(edges[n], start) for n in range(first, last)]
        reduce = _REDUCE[self.by]
        if len({*sizes}) == 1:
            return reduce(x.unflatten(dim, (len(sizes), sizes[0])), dim), slice(first, last)
        tiles = [reduce(p, dim) if p.shape[dim] else self._nothing(x, dim) for p in x.split(sizes, dim)]
        return torch.stack(tiles, dim), slice(first, last)


def tile_edges(tiles: int, start: int, stop: int) -> tuple[int, ...]:
    """Edges of a number of tiles: tile r of n positions begins at ⌊r·n/tiles⌋."""
    return tuple(start + r * (stop - start) // tiles for r in range(tiles + 1))


def block_edges(size: int, n: int) -> tuple[int, ...]:
    """Edges of blocks of one size; the last may be shorter."""
    return (*range(0, n, size), n) if n else (0,)


def smallest_cover(mass: Tensor, share: float) -> Tensor:
    """For each row (..., n) the smallest set of entries that hold a share of its sum; ties to the lower index. Bool."""
    if is_tracing() or mass.numel() <= _SORTED_CELLS:
        return _smallest_cover(mass, share)
    rows = mass.reshape(-1, mass.shape[-1])
    parts = rows.split(max(1, _SORTED_CELLS // mass.shape[-1]))
    return torch.cat([_smallest_cover(part, share) for part in parts]).view(mass.shape)


def _smallest_cover(mass: Tensor, share: float) -> Tensor:
    value, index = mass.detach().double().sort(dim=-1, descending=True, stable=True)
    before = value.cumsum(-1) - value
    needed = (before < share * value.sum(-1, keepdim=True)) & (value > 0)
    return torch.zeros_like(needed).scatter(-1, index, needed)
