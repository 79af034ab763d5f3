"""What is remembered, and what fits.

`ResultCache` holds the numbers that were found out on the way about one matrix: detached, and valid only as long as
neither the factors nor the numbers themselves were changed in place. Imports `around` and `statistics`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .stats import OPTIONAL_OUTPUTS, Request, Results
from .torch_state import is_tracing

__all__ = ["ResultCache", "check_fits", "format_bytes"]


class ResultCache:
    """Answers about the whole matrix, each with the version it had when it was put here."""

    def __init__(self) -> None:
        self._versions: tuple[int, ...] | None = None
        self._numbers: dict[Any, tuple[Tensor, int]] = {}

    def copy(self) -> ResultCache:
        other = ResultCache()
        other._versions, other._numbers = self._versions, dict(self._numbers)
        return other

    def get(self, factors: list[Tensor], request: Request) -> Results:
        """Those of the question's results that are cached and still true."""
        if not self._numbers or is_tracing() or self._versions != _versions(factors):
            return {}
        found = {}
        for name in (*request.names, *OPTIONAL_OUTPUTS):
            number, version = self._numbers.get(_key(name, request), (None, 0))
            if number is not None and number._version == version:
                found[name] = number.detach()  # whoever turns it round in place turns round their own
        return found

    def put(self, factors: list[Tensor], request: Request, results: Results) -> None:
        """Keep detached numbers: a statistic that needs gradients is a new node each time, over the same number."""
        if is_tracing() or (versions := _versions(factors)) is None:
            return
        if versions != self._versions:
            self._numbers, self._versions = {}, versions
        for name, value in results.items():
            # An inference tensor could not be saved for a backward later on.
            if (key := _key(name, request)) is not None and not value.is_inference():
                self._numbers[key] = value.detach(), value._version


def _key(name: str, request: Request) -> Any:
    """Under what a number is remembered; None for what depends on tensors of the request."""
    if name in ("y", "z", "mass", "cells"):
        return None
    if name in ("topk_scores", "topk_indices", "topk_weights"):
        return name, request.topk
    if name == "pool" and request.tiling is not None:
        return name, *vars(request.tiling).values()
    return name


def _versions(tensors: list[Tensor]) -> tuple[int, ...] | None:
    """How often each tensor was changed in place; None for inference tensors, which do not count it."""
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


def check_fits(need: int, device: torch.device) -> None:
    """Refuse to write out what would not fit."""
    room = None if is_tracing() else _free_bytes(device)
    if room is not None and need > room:
        raise MemoryError(
            f"these weights written out would take {format_bytes(need)} and {format_bytes(room)} are free. Ask for "
            "what you need: W[0, 3] for one head, W.row(i), W.topk(k), W.pool(64, 64), W @ v."
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # What the system could give, caches that it would drop included.
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not told on this system
        return None


def format_bytes(n: float) -> str:
    """A size for people: 4.29 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
