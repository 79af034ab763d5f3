"""Segments of keys as runs of adjacent keys, each in some of them: one pass of kernels adds up the weights of runs."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import MOST_FLAGS, segment_flags
from ..indexing import Tokens
from ..masks.intervals import cache_allowed

__all__ = ["Runs", "runs_of"]

#: Keys of a run, on average, below which a product with flags is as fast.
SHORTEST_RUN = 8
#: Numbers of runs that are never too many.
FEW_RUNS = 64
#: The runs of a tensor of ids while it is not changed in place: layers share it, and reading it waits for the GPU.
_CACHE: dict[int, tuple[weakref.ref[Tensor], int, Runs | None]] = {}
_MAX_CACHED = 64


class Runs(NamedTuple):
    """Runs of adjacent keys, between each two edges, and which segments each is in: (runs, segments), None if run n is
    segment n."""

    edges: tuple[int, ...]
    members: Tensor | None

    def masses(self, by_run: Tensor) -> Tensor:
        """(..., segments), from the weights of runs (..., runs)."""
        if self.members is None:
            return by_run
        # float64: a user may have allowed TF32, which rounds weights to 10 bits
        return (by_run.double() @ self.members.to(by_run.device)).to(by_run.dtype)


def runs_of(segments: Any, n: int, tokens: Tokens | None, device: torch.device) -> Runs | None:
    """The runs of segments of n keys; None where these are no segments, or their runs too many.

    Args:
        segments: As of `segment_mass`.
        n: Number of keys.
        tokens: Labels of the keys.
        device: Where weights are computed.
    """
    if isinstance(segments, Tensor):
        if segments.shape != (n,) or not n or segments.is_floating_point() or segments.dtype == torch.bool:
            return None
        if not cache_allowed([segments], device):
            return _of_ids(segments.cpu(), device)
        ref, version, runs = _CACHE.get(id(segments), (None, None, None))
        if ref is None or ref() is not segments or version != segments._version:
            runs = _of_ids(segments.cpu(), device)
            if len(_CACHE) >= _MAX_CACHED:
                _CACHE.clear()
            _CACHE[id(segments)] = weakref.ref(segments), segments._version, runs
        return runs
    if not isinstance(segments, (list, tuple)) or not segments or len(segments) * n > MOST_FLAGS:
        return None
    flags = segment_flags(segments, n, tokens, torch.empty(0, device="cpu"), "keys").bool()  # many small steps
    begins = torch.ones(n, dtype=torch.bool, device="cpu")
    begins[1:] = (flags[:, 1:] != flags[:, :-1]).any(0)
    return _of_members(begins.nonzero().squeeze(-1), flags[:, begins].mT, n, device)


def _of_ids(ids: Tensor, device: torch.device) -> Runs | None:
    n, count = len(ids), int(ids.max()) + 1
    of_run, sizes = ids.unique_consecutive(return_counts=True)
    if count * n > MOST_FLAGS or count * len(of_run) > MOST_FLAGS:
        return None
    return _of_members(sizes.cumsum(0) - sizes, of_run[:, None] == torch.arange(max(count, 0), device="cpu"), n, device)


def _of_members(begins: Tensor, members: Tensor, n: int, device: torch.device) -> Runs | None:
    """From the first key of each run, and the segments (runs, segments) that it is in."""
    some = members.any(1).nonzero().squeeze(-1)
    if not len(some) or len(begins) > max(FEW_RUNS, n // SHORTEST_RUN):
        return None
    first, last = int(some[0]), int(some[-1])  # runs without a segment at either end are left out
    edges = [*begins.tolist(), n][first : last + 2]
    members = members[first : last + 1]
    alike = members.shape[0] == members.shape[1] and bool(
        (members == torch.eye(len(members), dtype=torch.bool, device="cpu")).all()
    )
    return Runs(tuple(edges), None if alike else members.double().to(device))
