"""Cached results of a matrix, and the check that dense weights fit in memory.

`ResultCache` holds detached tensors, valid while neither the factors nor the tensors themselves are changed in place.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .stats import OPTIONAL_OUTPUTS, Request, Results
from .torch_state import host_sync_forbidden, is_tracing

__all__ = ["ResultCache", "check_cells", "check_fits", "format_bytes", "versions_of"]

#: Numbers of an answer up to which free memory is not looked up.
_ASSUMED_TO_FIT = 2**26


#: Results whose name is their key; most are such.
BY_NAME_ALONE = frozenset(("norm", "lse", "max_score", "argmax", "entropy", "received"))


class ResultCache:
    """Results about a matrix, each with the version it had when it was put here."""

    def __init__(self) -> None:
        self._versions: tuple[int, ...] | None = None
        self._results: dict[Any, tuple[Tensor, int]] = {}

    def __reduce__(self) -> tuple[type[ResultCache], tuple[()]]:
        """Deep copies and pickles begin empty: the change counters of copied factors start at 0."""
        return ResultCache, ()

    def __bool__(self) -> bool:
        return bool(self._results)

    def copy(self) -> ResultCache:
        other = ResultCache()
        other._versions, other._results = self._versions, dict(self._results)
        return other

    def get(self, factors: list[Tensor], request: Request) -> Results:
        """The requested results that are cached and still valid, and the norm: with it, columns need one pass only."""
        if not self._results or is_tracing() or self._versions != versions_of(factors):
            return {}
        valid = {}
        for name in ("norm", *request.names, *OPTIONAL_OUTPUTS):
            key = name if name in BY_NAME_ALONE else _key(name, request)
            result, version = self._results.get(key, (None, 0))
            if result is not None and result._version == version:
                # A fresh alias: `t_()` by the caller must not change the cached tensor (`_version` tells of values).
                valid[name] = result.detach()
        return valid

    def put(self, factors: list[Tensor], request: Request, results: Results) -> None:
        """Cache detached results: with gradients each call is a new autograd node over the same numbers."""
        if is_tracing():
            return
        self.put_eagerly(factors, request, results)

    def put_eagerly(self, factors: list[Tensor], request: Request, results: Results) -> None:
        """The same where nothing traces."""
        if (versions := versions_of(factors)) is None:
            return
        if versions != self._versions:
            self._results, self._versions = {}, versions
        for name, result in results.items():
            key = name if name in BY_NAME_ALONE else _key(name, request)
            if key is None:
                continue
            try:
                self._results[key] = result.detach(), result._version
            except RuntimeError:  # an inference tensor has no version, and could not be saved for a later backward
                continue


def _key(name: str, request: Request) -> Any:
    """The key of a result; None for one that depends on tensors of the request."""
    if name in ("y", "z", "mass", "cells"):
        return None
    if name in ("topk_scores", "topk_indices", "topk_weights"):
        return name, request.topk
    if name == "pool" and request.tiling is not None:
        return name, *vars(request.tiling).values()
    return name


def versions_of(tensors: list[Tensor]) -> tuple[int, ...] | None:
    """How often each tensor was changed in place; None where that is not counted: for inference tensors, and in a CUDA
    graph, whose replays change numbers at the same addresses."""
    if host_sync_forbidden(tensors[0].device):
        return None
    try:
        return tuple([t._version for t in tensors])
    except RuntimeError:  # an inference tensor
        return None


def check_cells(shape: torch.Size, each: int, itemsize: int, device: torch.device) -> None:
    """Raise MemoryError if an answer of so many numbers for `shape` does not fit; free memory is seldom looked up."""
    if not is_tracing() and (cells := math.prod(shape) * each) > _ASSUMED_TO_FIT:
        check_fits(cells * itemsize, device, "this answer")


def check_fits(need: int, device: torch.device, what: str = "these weights as a tensor") -> None:
    """Raise MemoryError if `need` bytes are more than are free."""
    free = None if is_tracing() else _free_bytes(device)
    if free is not None and need > free:
        raise MemoryError(
            f"{what} would take {format_bytes(need)} and {format_bytes(free)} are free. Ask for "
            "what you need: W[0, 3] for one head, W.row(i), W.topk(k), W.pool(64, 64), W @ v."
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # MemAvailable: free memory, and file caches that the system would drop.
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        return None


def format_bytes(n: float) -> str:
    """A size with a unit: 4.29 GB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} PB"
