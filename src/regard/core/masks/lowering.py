"""Masks from tensors, lowered for GPUs: intervals of every row, computed once and cached with the mask."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..block import MatrixBlock, take
from ..pytree import flatten, register_node
from ..torch_state import is_tracing
from .intervals import Geometry, KeyIntervals, cache_allowed, cached_on_mask, caches_on
from .kinds import Mask

__all__ = ["IntervalMask", "lower_to_intervals"]


@register_node
class IntervalMask(Mask):
    """A mask given by the intervals of every row: the lowered form of padding and documents."""

    lo: Tensor  # b|1 1 i r, int32
    hi: Tensor
    keys_seen: Tensor | None  # keys that some row sees, bool, b|1 1 1 j; None where that is all of them
    keys: int

    def visible(self, block: MatrixBlock) -> Tensor:
        lo, hi = take(self.lo, -2, block.rows), take(self.hi, -2, block.rows)
        inside = [(block.j >= lo[..., r, None]) & (block.j < hi[..., r, None]) for r in range(lo.shape[-1])]
        return functools.reduce(torch.logical_or, inside)

    def intervals(self, layout: Geometry) -> KeyIntervals:
        return KeyIntervals(self.lo[:, 0].mT, self.hi[:, 0].mT, exact=True)

    def visible_keys(self, layout: Geometry) -> Tensor | None:
        return None if self.keys_seen is None else self.keys_seen[:, 0, 0]

    def sees_all_keys(self, layout: Geometry) -> bool:
        return self.keys_seen is None

    def narrow(self, rows: slice) -> Mask:
        lo, hi = take(self.lo, -2, rows), take(self.hi, -2, rows)
        intervals = KeyIntervals(lo[:, 0].mT.long(), hi[:, 0].mT.long(), exact=True)
        keys_seen = intervals.visible_keys(self.keys)[:, None, None]  # fewer rows see fewer keys
        return IntervalMask(lo, hi, keys_seen, self.keys)


def lower_to_intervals(mask: Mask, batch: torch.Size, folded: Mask, layout: Geometry) -> Mask:
    """An `IntervalMask`, where intervals come from tensors and are exact; else `folded` as it is.

    Args:
        mask: A mask broadcast to a matrix. Its first leaf with tensors holds the cache.
        batch: Batch axes of the matrix.
        folded: The same mask with its batch axes as one, as engines take it.
        layout: Lengths and positions of the matrix.
    """
    if not caches_on(layout.device):
        return folded
    leaves = mask.leaves()
    with_tensors = [leaf for leaf in leaves if leaf.interval_source == "tensors"]
    structured = all(leaf.interval_source is not None for leaf in leaves)
    if not structured or not with_tensors:
        return folded
    if is_tracing():  # all layers compute the same, and the compiler shares it
        lowered = _lower(folded, layout) if mask.is_one_interval else None
    else:
        spec, tensors = flatten(mask)
        if not cache_allowed(tensors, layout.device):
            return folded
        key = spec, batch, layout
        lowered = cached_on_mask(with_tensors[0], key, tensors, layout.device, lambda: _lower(folded, layout))
    return folded if lowered is None else lowered


def _lower(mask: Mask, layout: Geometry) -> IntervalMask | None:
    intervals, seen = mask.intervals(layout), mask.visible_keys(layout)
    if not intervals.exact:
        return None
    if mask.sees_all_keys(layout):
        seen = None
    else:
        seen = intervals.visible_keys(layout.keys) if seen is None else seen
        # One sync for all layers of a model: where all keys are seen, none has to be zeroed.
        seen = None if not is_tracing() and bool(seen.all()) else seen[:, None, None]
    lo, hi = (x.int().contiguous().mT[:, None] for x in (intervals.lo, intervals.hi))
    return IntervalMask(lo, hi, seen, layout.keys)
