"""Visible keys as a few intervals for every row: what engines loop over, whatever the mask is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..torch_state import host_sync_forbidden, is_tracing, replay_state

__all__ = ["Geometry", "KeyIntervals", "band", "cache_allowed", "cached_on_mask", "caches_on"]

#: Devices whose kernels run beside the host, so that its time counts.
CACHING_DEVICES = ("cuda",)
#: Entries of a mask's cache: layers ask for the same, those of a decoder for two or three things.
MAX_ENTRIES = 8


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """For every row a few disjoint intervals lo <= j < hi of keys, in order; the rest is invisible.

    `exact` says that everything inside is visible. Sets of intervals are closed under `& | ~`: any combination of
    structured masks is again a few intervals, and costs only what it shows.
    """

    lo: Tensor  # b|1 r i
    hi: Tensor  # b|1 r i
    exact: bool

    def intersect(self, other: KeyIntervals) -> KeyIntervals:
        """Keys in both. A method, not `&`: torch.compile of 2.6 traces no operators of our classes."""
        lo = torch.maximum(self.lo[:, :, None], other.lo[:, None])  # b r r' i
        hi = torch.minimum(self.hi[:, :, None], other.hi[:, None])
        return _canonical(lo.flatten(1, 2), hi.flatten(1, 2), self.exact and other.exact)

    def complement(self, keys: int) -> KeyIntervals:
        """The gaps: before the first interval, between two of them, after the last."""
        edge = torch.zeros_like(self.lo[:, :1])
        return _canonical(torch.cat([edge, self.hi], 1), torch.cat([self.lo, edge + keys], 1), self.exact)

    def visible_keys(self, keys: int) -> Tensor:
        """Which keys are in an interval of at least one row: bool, (b|1, j)."""
        # Count starts and ends along the keys: a key is covered while more intervals began than ended.
        depth = self.lo.new_zeros(len(self.lo), keys + 1)
        one = torch.ones_like(self.lo.flatten(1))
        depth.scatter_add_(1, self.lo.flatten(1), one).scatter_add_(1, self.hi.flatten(1), -one)
        return depth.cumsum(1)[:, :keys] > 0


def _canonical(lo: Tensor, hi: Tensor, exact: bool) -> KeyIntervals:
    """Sort the intervals, empty ones last, and drop those that are empty in every row."""
    empty = lo >= hi
    if lo.shape[1] == 1:
        return KeyIntervals(lo.masked_fill(empty, 0), hi.masked_fill(empty, 0), exact)
    lo, order = lo.masked_fill(empty, torch.iinfo(lo.dtype).max).sort(dim=1)
    # An empty interval becomes end..end of the one before it, so that gaps stay right.
    hi = hi.masked_fill(empty, 0).gather(1, order).cummax(dim=1).values
    lo = torch.minimum(lo, hi)
    # A sync on a GPU: only where there are several intervals, of which some can be dropped.
    used = max(1, int((lo < hi).flatten(2).any(2).any(0).sum()))
    return KeyIntervals(lo[:, :used], hi[:, :used], exact)


@dataclass(frozen=True)
class Geometry:
    """Lengths and positions of the matrix that a mask belongs to."""

    rows: int
    keys: int
    offset: int  # the key position of query 0
    device: torch.device

    def interval(self, lo: Tensor | int, hi: Tensor | int, exact: bool = True) -> KeyIntervals:
        """One interval a row, clamped to the keys; lo and hi broadcast to (b|1, 1, i)."""
        blank = torch.zeros(1, 1, self.rows, dtype=torch.int64, device=self.device)
        low, high = torch.broadcast_tensors(blank + lo, blank + hi)
        low = low.clamp(0, self.keys)
        return KeyIntervals(low, torch.maximum(low, high.clamp(0, self.keys)), exact)

    def everything(self) -> KeyIntervals:
        return band(self, None, None)

    @property
    def positions(self) -> Tensor:
        """Key positions of the queries, (i,)."""
        return torch.arange(self.rows, device=self.device) + self.offset


def band(geometry: Geometry, before: int | None, after: int | None) -> KeyIntervals:
    """From `before` keys before each position to `after` keys after it; None for no limit."""
    recorder = replay_state.recorder
    if recorder is not None and geometry.device.type == "cpu":  # of short questions; kernels on a GPU take the numbers
        intervals = _cached_band(geometry, before, after)
        recorder.hold(intervals.lo)
        recorder.hold(intervals.hi)
        return intervals
    uncached = is_tracing() or host_sync_forbidden(geometry.device)
    return _band(geometry, before, after) if uncached else _cached_band(geometry, before, after)


def _band(geometry: Geometry, before: int | None, after: int | None) -> KeyIntervals:
    lo = 0 if before is None else geometry.positions - before
    hi = geometry.keys if after is None else geometry.positions + after + 1
    return geometry.interval(lo, hi)


#: All layers of a model have the same few bands.
_cached_band = functools.lru_cache(maxsize=8)(_band)


def caches_on(device: torch.device) -> bool:
    """Whether intervals are computed once and cached for matrices on this device."""
    return device.type in CACHING_DEVICES


def cache_allowed(tensors: list[Tensor], device: torch.device) -> bool:
    """Whether a result about these tensors may be cached. Inference tensors do not count their changes."""
    if not caches_on(device) or is_tracing() or host_sync_forbidden(device):
        return False
    return not any(t.is_inference() for t in tensors)


def cached_on_mask(mask: Any, key: Any, tensors: list[Tensor], device: torch.device, compute: Callable[[], Any]) -> Any:
    """`compute()`, cached in `vars(mask)` while these very tensors are not changed in place.

    A mask serves all layers of a model, and on a GPU computing its intervals takes longer than attention does.
    """
    if not cache_allowed(tensors, device):
        return compute()
    cache: dict[Any, Any] = vars(mask).setdefault("cache", {})
    key = key, device
    state = [*map(id, tensors)], [t._version for t in tensors]
    cached_state, _, value = cache.get(key, (None, None, None))
    if cached_state != state:
        with torch.inference_mode(False):  # an inference tensor could not be saved for a later backward
            value = compute()
        if len(cache) >= MAX_ENTRIES:
            cache.clear()
        cache[key] = state, tensors, value  # holds the tensors, so that no other gets the id of one of them
    return value
