"""Masks lowered to the intervals of every row.

Those of tensors are lowered for GPUs, computed once and cached with the mask; those of functions on a CPU, where their
cells are evaluated once for a question: compiled tiles read intervals and flags, and call no function.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..block import MatrixBlock, take
from ..pytree import flatten, register_node
from ..torch_state import in_functorch, is_tracing
from .intervals import Geometry, KeyIntervals, cache_allowed, cached_on_mask, caches_on
from .kinds import Dense, Mask

__all__ = ["IntervalMask", "lower_cells", "lower_to_intervals"]

#: Intervals a row up to which cells become intervals: kernels walk over those of a row.
MAX_INTERVALS = 8
#: Cells that are evaluated at once; as bools they fit a core's cache.
STRIP_CELLS = 2**20
#: Cells up to which they become flags where a row sees more intervals.
MAX_FLAGS = 2**24


@register_node
class IntervalMask(Mask):
    """A mask given by the intervals of every row: the lowered form of padding, documents and functions."""

    structured = True
    lo: Tensor  # b|1 1 i r, int32
    hi: Tensor
    keys_seen: Tensor | None  # keys that some row sees, bool, b|1 1 1 j; None where that is all of them
    keys: int

    def visible(self, block: MatrixBlock) -> Tensor:
        lo, hi = take(self.lo, -2, block.rows), take(self.hi, -2, block.rows)
        inside = [(block.j >= lo[..., r, None]) & (block.j < hi[..., r, None]) for r in range(lo.shape[-1])]
        return functools.reduce(torch.logical_or, inside)

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        return KeyIntervals(self.lo[:, 0].mT, self.hi[:, 0].mT, exact=True)

    def visible_keys(self, geometry: Geometry) -> Tensor | None:
        return None if self.keys_seen is None else self.keys_seen[:, 0, 0]

    def sees_all_keys(self, geometry: Geometry) -> bool:
        return self.keys_seen is None

    def narrow(self, rows: slice) -> Mask:
        lo, hi = take(self.lo, -2, rows), take(self.hi, -2, rows)
        intervals = KeyIntervals(lo[:, 0].mT.long(), hi[:, 0].mT.long(), exact=True)
        keys_seen = intervals.visible_keys(self.keys)[:, None, None]  # fewer rows see fewer keys
        return IntervalMask(lo, hi, keys_seen, self.keys)


def lower_to_intervals(mask: Mask, batch: torch.Size, folded: Mask, geometry: Geometry) -> Mask:
    """An `IntervalMask`, where intervals come from tensors and are exact; else `folded` as it is.

    Args:
        mask: A mask broadcast to a matrix. Its first leaf with tensors holds the cache.
        batch: Batch axes of the matrix.
        folded: The same mask with its batch axes as one, as engines take it.
        geometry: Lengths and positions of the matrix.
    """
    if not caches_on(geometry.device):
        return folded
    leaves = mask.leaves()
    with_tensors = [leaf for leaf in leaves if leaf.interval_source == "tensors"]
    structured = all(leaf.interval_source is not None for leaf in leaves)
    if not structured or not with_tensors:
        return folded
    if is_tracing():  # all layers compute the same, and the compiler shares it
        lowered = _lower(folded, geometry) if mask.is_one_interval else None
    else:
        spec, tensors = flatten(mask)
        if not cache_allowed(tensors, geometry.device):
            return folded
        key = spec, batch, geometry
        lowered = cached_on_mask(with_tensors[0], key, tensors, geometry.device, lambda: _lower(folded, geometry))
    return folded if lowered is None else lowered


def lower_cells(mask: Mask, geometry: Geometry) -> Mask:
    """The cells that a mask shows, as intervals or, of few cells, as flags; else the mask as it is.

    Args:
        mask: A mask broadcast to a matrix of one batch axis. What kernels can read is left as it is.
        geometry: Lengths and positions of the matrix.
    """
    readable = mask.dense_parts() is not None or geometry.rows == 0
    if readable or geometry.device.type != "cpu" or is_tracing() or in_functorch():
        return mask
    intervals = _intervals_of_cells(mask, geometry)
    if intervals is not None:
        return _interval_mask(intervals, intervals.visible_keys(geometry.keys), geometry)
    flags = _flags_of_cells(mask, geometry)
    return mask if flags is None else flags


def _flags_of_cells(mask: Mask, geometry: Geometry) -> Mask | None:
    """A bool tensor of all cells; None where these are too many."""
    rows, keys = range(geometry.rows), range(geometry.keys)
    if _cells(mask, geometry, rows[:1], keys).shape[:2].numel() * len(rows) * len(keys) > MAX_FLAGS:
        return None
    return Dense(_cells(mask, geometry, rows, keys).expand(-1, -1, len(rows), len(keys)).contiguous())


def _cells(mask: Mask, geometry: Geometry, rows: range, keys: range) -> Tensor:
    """Whether each cell is visible, (b|1, h|1, i|1, j|1)."""
    row_slice, key_slice = (slice(part.start, part.stop) for part in (rows, keys))
    cells = mask.visible(MatrixBlock(row_slice, key_slice, geometry.offset, geometry.device))
    return cells.reshape(*[1] * (4 - cells.ndim), *cells.shape)


def _intervals_of_cells(mask: Mask, geometry: Geometry) -> KeyIntervals | None:
    """Exact intervals, from cells evaluated strip by strip; None where heads differ or a row sees too many."""
    bounds, strips = mask.intervals(geometry), []
    if not len(bounds.lo):  # no sequences: nothing is shown
        return KeyIntervals(bounds.lo, bounds.hi, exact=True)
    for rows, keys in _strips(bounds, geometry):
        cells = _cells(mask, geometry, rows, keys)
        if cells.shape[1] > 1:
            return None
        framed = pad(cells[:, 0].expand(-1, len(rows), len(keys)), (1, 1))
        # Visibility changes where an interval begins and where it ends, in turns.
        changes = framed[..., 1:] != framed[..., :-1]
        count = changes.sum(-1)  # b i
        used = int(count.max()) if count.numel() else 0
        if used > 2 * MAX_INTERVALS:
            return None
        place = count.new_zeros(*count.shape, used)  # b i 2r
        place[torch.arange(used, device=geometry.device) < count[..., None]] = changes.nonzero()[:, -1] + keys.start
        strips.append(place)
    most = max((strip.shape[-1] for strip in strips), default=0)
    batch = max((len(strip) for strip in strips), default=1)
    edges = torch.cat([pad(strip, (0, max(2, most) - strip.shape[-1])).expand(batch, -1, -1) for strip in strips], 1)
    # An empty interval becomes end..end of the one before it, so that gaps stay right.
    lo, hi = edges.cummax(-1).values.mT.unflatten(1, (-1, 2)).unbind(2)
    return KeyIntervals(lo, hi, exact=True)


def _strips(bounds: KeyIntervals, geometry: Geometry) -> Iterator[tuple[range, range]]:
    """Adjacent rows with the keys between the first and the last one that their intervals hold."""
    lo, hi = bounds.lo, bounds.hi
    lo = torch.where(lo < hi, lo, geometry.keys).amin((0, 1))
    hi = hi.amax((0, 1))
    widest = int((hi - lo).clamp(min=0).max()) if geometry.rows else 0
    height = max(1, min(256, STRIP_CELLS // max(1, widest)))
    for start in range(0, geometry.rows, height):
        stop = min(geometry.rows, start + height)
        first, last = int(lo[start:stop].min()), int(hi[start:stop].max())
        yield range(start, stop), range(first, max(first, last))


def _lower(mask: Mask, geometry: Geometry) -> IntervalMask | None:
    intervals, visible = mask.intervals(geometry), mask.visible_keys(geometry)
    if not intervals.exact:
        return None
    if mask.sees_all_keys(geometry):
        return _interval_mask(intervals, None, geometry)
    return _interval_mask(intervals, intervals.visible_keys(geometry.keys) if visible is None else visible, geometry)


def _interval_mask(intervals: KeyIntervals, visible: Tensor | None, geometry: Geometry) -> IntervalMask:
    if visible is not None:
        # One sync for all layers of a model: where all keys are seen, none has to be zeroed.
        visible = None if not is_tracing() and bool(visible.all()) else visible[:, None, None]
    lo, hi = (x.int().contiguous().mT[:, None] for x in (intervals.lo, intervals.hi))
    return IntervalMask(lo, hi, visible, geometry.keys)
