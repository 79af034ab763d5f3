"""One head of a long matrix at every resolution, as tiles z.x.y of 256 × 256 cells.

At the last level a cell is one weight; each level above has cells of twice as many words a side, down to level 0, which
is one tile. The first levels come out of one pass over the matrix; a tile below them costs its own window alone:
exp(score − lse), with the lse of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ...core.block import MatrixBlock
from ...core.weights import Weights

__all__ = ["SIDE", "CellBy", "Pyramid"]

#: Cells a side of a tile.
SIDE = 256
#: The level down to which one pass computes all tiles: at least, and at most.
FIRST_LEVELS = (3, 4)
#: Scores that are written out at a time; more on a GPU, where a launch costs more than its memory.
CELLS, GPU_CELLS = 2**22, 2**28

#: The number in a cell: its largest weight, or the share of a row that falls into it, on average.
CellBy = Literal["max", "mean"]


class Pyramid:
    """One head of weights (h, i, j), from all words in 256 cells down to one word a cell.

    Args:
        weights: The weights of a layer.
        head: Which head.
        lse: Its `lse` (i,), if it is there already.
    """

    def __init__(self, weights: Weights, head: int, lse: Tensor | None = None) -> None:
        one = weights[[head]]
        self.dense = one._factors.score.precomputed  # 1 i j
        factors = one._factors
        self.i, self.j = one.shape[-2:]
        self.device = factors.q.device
        if self.dense is None:
            self.problem = factors.problem()
            self.lse = (one.lse()[0] if lse is None else lse).to(self.device, torch.float32)
        self.last = max(0, math.ceil(math.log2(max(self.i, self.j) / SIDE)))
        # Five levels above the last a tile has 2¹⁶ times as many weights as cells: such a pass is made once.
        self.first_level = min(self.last, max(FIRST_LEVELS[0], min(FIRST_LEVELS[1], self.last - 5)))
        self.first: tuple[Tensor, Tensor] | None = None  # of the cells of `first_level`: the largest weight, the sum
        self._fast = self._as_products()
        self._all_finite = self._fast is not None and all(bool(x.isfinite().all()) for x in self._fast[:2])

    def compute_first(self, progress: Callable[[float], None]) -> None:
        """Compute the tiles of levels 0 to `first_level` in one pass.

        Args:
            progress: Called with the share that is done; what it raises ends the pass.
        """
        words = 2 ** (self.last - self.first_level)
        rows, cols = -(-self.i // words), -(-self.j // words)
        most, total = torch.zeros(rows, cols), torch.zeros(rows, cols)
        step = max(1, self._cells // (words * self.j)) * words
        for start in range(0, self.i, step):
            progress(start / self.i)
            span = slice(start, min(self.i, start + step))
            w = self._weights(span, slice(0, self.j))
            at = slice(start // words, -(-span.stop // words))
            most[at] = _pool(w, words, "max").cpu()
            total[at] = _pool(w, words, "sum").cpu()
        progress(1.0)
        self.first = most, total

    def tile(self, z: int, x: int, y: int, by: CellBy) -> Tensor | None:
        """Tile x of the keys and y of the rows at level z, (256, 256), zero beyond the matrix.

        Returns:
            float16, or at the last level float32, −1 where the mask forbids a weight. None for a level of the first
            pass that is not computed yet.

        Raises:
            IndexError: There is no such tile.
        """
        if not (0 <= z <= self.last and 0 <= x < self._tiles(z, self.j) and 0 <= y < self._tiles(z, self.i)):
            raise IndexError(f"there is no tile {z}.{x}.{y}.")
        words = 2 ** (self.last - z)
        if z == self.last:
            cells = self.block(*(_span(n, SIDE, size) for n, size in ((y, self.i), (x, self.j))))
        elif z <= self.first_level:
            if self.first is None:
                return None
            joined = 2 ** (self.first_level - z)
            rows, cols = (slice(n * SIDE * joined, (n + 1) * SIDE * joined) for n in (y, x))
            cells = _pool(self.first[by == "mean"][rows, cols], joined, "sum" if by == "mean" else "max")
            if by == "mean":
                cells = _mean_of_rows(cells, words, _length(_span(y, SIDE * words, self.i)))
        else:
            cells = self._pooled(_span(y, SIDE * words, self.i), _span(x, SIDE * words, self.j), words, by)
        full = torch.zeros(SIDE, SIDE, dtype=torch.float32 if z == self.last else torch.float16)
        full[: cells.shape[0], : cells.shape[1]] = cells.cpu()
        return full

    def block(self, rows: slice, cols: slice) -> Tensor:
        """The weights of some rows and keys, (n, m); −1 where the mask forbids them."""
        if self.dense is not None:
            return self.dense[0, rows, cols].float().cpu()
        w = self._weights(rows, cols)
        mask = self.problem.mask
        if mask is not None:
            visible = mask.visible(MatrixBlock(rows, cols, self.problem.offset, self.device))
            w = w.masked_fill(~visible.reshape(-1, *visible.shape[-2:])[0], -1.0)
        return w.cpu()

    def row(self, i: int) -> Tensor:
        """The weights of one row, (j,); −1 where the mask forbids them."""
        return self.block(slice(i, i + 1), slice(0, self.j))[0]

    def _tiles(self, z: int, size: int) -> int:
        return -(-size // (SIDE * 2 ** (self.last - z)))

    @property
    def _cells(self) -> int:
        return CELLS if self.device.type == "cpu" else GPU_CELLS

    def _pooled(self, rows: slice, cols: slice, words: int, by: CellBy) -> Tensor:
        """A window in cells of so many words a side."""
        step = max(1, self._cells // (words * _length(cols))) * words
        bands = (slice(n, min(rows.stop, n + step)) for n in range(rows.start, rows.stop, step))
        if by == "mean":
            sums = torch.cat([_pool(self._weights(band, cols), words, "sum") for band in bands])
            return _mean_of_rows(sums, words, _length(rows))
        # The exponential is monotone: it is taken of the largest alone.
        return torch.cat([_pool(self._log_weights(band, cols), words, "max").exp() for band in bands])

    def _weights(self, rows: slice, cols: slice) -> Tensor:
        if self.dense is not None:
            return self.dense[0, rows, cols].float().nan_to_num()
        return self._log_weights(rows, cols).exp_()

    def _log_weights(self, rows: slice, cols: slice) -> Tensor:
        """score − lse of a window, −inf where the mask forbids it or where it is no number."""
        if self.dense is not None:
            return self.dense[0, rows, cols].float().log()
        if self._fast is not None:
            q, k, lo, hi = self._fast
            s = q[rows] @ k[cols].T
            if lo is not None and hi is not None and not self._all_visible(lo, hi, rows, cols):
                at = torch.arange(cols.start, cols.stop, device=s.device)
                low, high = (x[:, rows].to(s.device).unsqueeze(-1) for x in (lo, hi))
                s.masked_fill_(~((at >= low) & (at < high)).any(0), -torch.inf)
            if self._all_finite:  # a pass less
                return s
        else:
            block = MatrixBlock(rows, cols, self.problem.offset, self.device)
            s = self.problem.scores(block)[0, 0].float() - self.lse[rows].unsqueeze(-1)
        return s.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)

    @staticmethod
    def _all_visible(lo: Tensor, hi: Tensor, rows: slice, cols: slice) -> bool:
        return bool(((lo[:, rows].amax(-1) <= cols.start) & (hi[:, rows].amin(-1) >= cols.stop)).any())

    def _as_products(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """Vectors whose products are score − lse, and the intervals of the mask; None for any other head.

        One more coordinate subtracts lse within the product, which saves a pass over the scores. A row without a key
        has lse −inf, which a product would turn into nan: it subtracts 0, and the mask hides the row.
        """
        if self.dense is not None:
            return None
        problem = self.problem
        kernel = problem.similarity_kernel
        if problem.modifiers or kernel.kernel_op != "product":
            return None
        lo = hi = None
        if problem.mask is not None:
            intervals = problem.intervals
            if not intervals.exact or len(intervals.lo) > 1:
                return None
            lo, hi = intervals.lo[0].cpu(), intervals.hi[0].cpu()
        q, k = problem.q[0, 0].float(), problem.k[0, 0].float()
        lse = self.lse.nan_to_num(neginf=0.0)
        return torch.cat([kernel.scale * q, -lse.unsqueeze(-1)], -1), torch.cat([k, k.new_ones(len(k), 1)], -1), lo, hi


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _span(n: int, size: int, end: int) -> slice:
    return slice(n * size, min(end, (n + 1) * size))


def _pool(x: Tensor, words: int, by: Literal["max", "sum"]) -> Tensor:
    """Cells of words × words numbers of a window that begins at a multiple of them; the last may be smaller."""
    if words == 1:
        return x
    full = len(x) // words * words
    parts = [x[:full].unflatten(0, (-1, words)), x[full:].unsqueeze(0)] if full else [x.unsqueeze(0)]
    pooled = torch.cat([part.amax(1) if by == "max" else part.sum(1) for part in parts if part.shape[1]])
    if missing := -x.shape[1] % words:
        pooled = torch.nn.functional.pad(pooled, (0, missing), value=-torch.inf if by == "max" else 0.0)
    pooled = pooled.unflatten(1, (-1, words))
    return pooled.amax(-1) if by == "max" else pooled.sum(-1)


def _mean_of_rows(sums: Tensor, words: int, rows: int) -> Tensor:
    """The weight that a row gives the keys of a cell, on average; the last cells may have fewer rows."""
    heights = torch.full((len(sums), 1), float(words), device=sums.device)
    heights[-1] = rows - (len(sums) - 1) * words
    return sums / heights
