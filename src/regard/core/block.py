"""Blocks of the attention matrix: rows, columns and their positions. Scores and masks are computed block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MatrixBlock", "PickedCells"]

Where = slice | Tensor


@dataclass(frozen=True, eq=False)
class MatrixBlock:
    """The cells (row, col) for every row of `rows` and col of `cols`.

    Both are slices with both ends, or 1-D tensors of indices. `offset` is the key position of
    query 0: query row r stands at position r + offset.
    """

    rows: Where
    cols: Where
    offset: int
    device: torch.device

    @property
    def i(self) -> Tensor:
        """Positions of the queries, as a column (i, 1)."""
        return (_indices(self.rows, self.device) + self.offset)[:, None]

    @property
    def j(self) -> Tensor:
        """Positions of the keys, as a row (1, j)."""
        return _indices(self.cols, self.device)[None, :]

    def take(self, tensor: Tensor) -> Tensor:
        """This block of a tensor (..., i|1, j|1); axes of size one stay."""
        return take(take(tensor, -2, self.rows), -1, self.cols)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add `part`, shaped as `take(total)`, into this block of `total`."""
        take(take(total, -2, self.rows), -1, self.cols).add_(part)


@dataclass(frozen=True, eq=False)
class PickedCells:
    """For every query row a few columns of its own: `cols` is (b, h, i, n)."""

    cols: Tensor
    offset: int

    @property
    def i(self) -> Tensor:
        return (torch.arange(self.cols.shape[2], device=self.cols.device) + self.offset)[:, None]

    @property
    def j(self) -> Tensor:
        return self.cols

    def take(self, tensor: Tensor) -> Tensor:
        """The picked cells of a tensor (b|1, h|1, i|1, j|1)."""
        # Indexing the tensor itself, not an expanded view: its gradient then has the tensor's own size.
        at = [
            torch.arange(n, device=self.cols.device).view([-1 if axis == k else 1 for k in range(4)])
            if n != 1
            else self.cols.new_zeros(1)
            for axis, n in enumerate(tensor.shape[:3])
        ]
        return tensor[at[0], at[1], at[2], self.cols if tensor.shape[3] != 1 else self.cols.new_zeros(1, 1, 1, 1)]


def _indices(where: Where, device: torch.device) -> Tensor:
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where


def shifted(positions: Where, start: int) -> Where:
    """The same positions counted from `start` places earlier."""
    return slice(positions.start + start, positions.stop + start) if isinstance(positions, slice) else positions + start


def take(tensor: Tensor, axis: int, where: Where) -> Tensor:
    """Rows of a tensor along one axis: a view for a slice, a copy for indices, itself if it broadcasts there."""
    if tensor.shape[axis] == 1:
        return tensor
    if isinstance(where, slice):
        return tensor.narrow(axis, where.start, where.stop - where.start)
    return tensor.index_select(axis, where)
