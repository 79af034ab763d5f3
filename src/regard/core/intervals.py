"""Masks as engines take them on a GPU: intervals of every row, found out once and kept with the mask.

One mask serves all layers of a model, and there finding out what it shows takes longer than attention does.
Imports `mask` and what is below it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .block import MatrixBlock, take
from .masks import And, Causal, Documents, Geometry, KeyIntervals, Mask, Not, Padding, Window
from .pytree import flatten, register_node
from .torch_state import host_sync_forbidden, in_functorch, is_tracing

__all__ = ["IntervalMask", "cached_on_mask", "lower_to_intervals"]

#: Where kernels run beside the host, so that its time counts.
KEPT_ON = ("cuda",)
#: So much is kept with a mask: layers ask for the same, those of a decoder for two or three things.
MOST_FOUND = 8


@register_node
class IntervalMask(Mask):
    """A mask as the engines see it, written out as intervals of every row: what padding and documents come to."""

    lo: Tensor  # b|1 1 i r, int32
    hi: Tensor
    keys_seen: Tensor | None  # those that some row sees, bool, b|1 1 1 j; None where that is all of them
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
        spans = KeyIntervals(lo[:, 0].mT.long(), hi[:, 0].mT.long(), exact=True)
        return IntervalMask(
            lo, hi, spans.visible_keys(self.keys)[:, None, None], self.keys
        )  # fewer rows see fewer keys


def lower_to_intervals(mask: Mask, batch: torch.Size, folded: Mask, layout: Geometry) -> Mask:
    """A mask laid over a matrix as `IntervalMask`, where tensors tell them and they are the whole truth; else as it is.

    `folded`: the same with its batch axes as one, as engines take it; kept is what is found out with `mask`.
    """
    leaves = _leaves(mask)
    of_tensors = [leaf for leaf in leaves if isinstance(leaf, (Padding, Documents))]
    cached = all(isinstance(leaf, (Causal, Window, Padding, Documents)) for leaf in leaves)
    if not cached or not of_tensors or layout.device.type not in KEPT_ON:
        return folded
    if is_tracing():  # layers write out the same, and the compiler sees that
        found = _written_out(folded, layout) if _one_interval(mask) else None
    else:
        spec, tensors = flatten(mask)
        if not _kept(tensors, layout.device):
            return folded
        about = spec, batch, layout
        found = cached_on_mask(of_tensors[0], about, tensors, layout.device, lambda: _written_out(folded, layout))
    return folded if found is None else found


def _one_interval(mask: Mask) -> bool:
    """Whether it is plain, without looking at tensors, that a row sees one interval of keys and all of it."""
    if type(mask) is And:
        return _one_interval(mask.left) and _one_interval(mask.right)
    return not isinstance(mask, (And, Not)) and (not isinstance(mask, Documents) or mask.contiguous is True)


def _written_out(mask: Mask, layout: Geometry) -> IntervalMask | None:
    spans, seen = mask.intervals(layout), mask.visible_keys(layout)
    if not spans.exact:
        return None
    if mask.sees_all_keys(layout):
        seen = None
    else:
        seen = spans.visible_keys(layout.keys) if seen is None else seen
        # On a GPU the host must wait for this, once for all layers; where all keys are seen, none has to be blanked.
        seen = None if not is_tracing() and bool(seen.all()) else seen[:, None, None]
    lo, hi = (x.int().contiguous().mT[:, None] for x in (spans.lo, spans.hi))
    return IntervalMask(lo, hi, seen, layout.keys)


def _leaves(mask: Mask) -> list[Mask]:
    parts = mask.masks()
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [mask]


def _kept(tensors: list[Tensor], device: torch.device) -> bool:
    """Whether something may be kept about these tensors. (Of inference tensors nobody counts the changes.)"""
    if device.type not in KEPT_ON or is_tracing() or in_functorch() or host_sync_forbidden(device):
        return False
    return not any(t.is_inference() for t in tensors)


def cached_on_mask(
    keeper: Mask, about: Any, tensors: list[Tensor], device: torch.device, find: Callable[[], Any]
) -> Any:
    """What is found out about these tensors, kept with a mask while they are the same and not changed in place."""
    if not _kept(tensors, device):
        return find()
    kept: dict[Any, Any] = vars(keeper).setdefault("found", {})
    about = about, device
    now = [*map(id, tensors)], [t._version for t in tensors]
    when, _, found = kept.get(about, (None, None, None))
    if when != now:
        with torch.inference_mode(False):  # what is made there could not be saved for a backward later on
            found = find()
        if len(kept) >= MOST_FOUND:
            kept.clear()
        kept[about] = now, tensors, found  # held, so that no other tensor can have the name of one of them
    return found
