"""Queries and keys of a long input, from which a page computes exact weights: which heads, in how many bits, how exact.

A weight is exp(scale · q·k + bias − lse) where the mask allows it; a bias has one number a key, one of rows is in lse.
The page stores q and k, in 16 bits where that changes no weight by more than 0.1 %, the lse of the stored ones, and the
mask as a few intervals of keys a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dot_head import DotHead, why_not_exact
from ..layers import LayerView
from .content import PageContent, Start
from .format import raw_bytes

__all__ = ["VectorBlock"]

#: Largest relative error of a weight that is called exact.
TOLERANCE = 1e-3
#: Bytes of the first head's queries and keys, at most, and of all heads' together beyond it.
FIRST_BYTES, MORE_BYTES = 64_000_000, 6_000_000
#: Rows on which the error is measured.
SAMPLE = 32


@dataclass
class VectorBlock:
    """The second block of a page: raw arrays of the heads that are exact, and where each stands."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    heads: list[dict[str, Any]] = field(default_factory=list)

    def add_heads(self, content: PageContent, start: Start) -> None:
        """Store queries and keys of the heads that fit, those of the start first."""
        order = sorted(
            ((n, h) for n, held in enumerate(content.held) for h in held if content.layers[n].long),
            key=lambda pair: (pair not in start.heads, content.stack_of[pair[0]] != start.stack),
        )
        for n, h in order:
            view = content.layers[n]
            if why_not_exact(view.weights) is not None:
                continue
            factors = view.weights._factors
            size = 2 * (factors.q.shape[-2] * factors.q.shape[-1] + factors.k.shape[-2] * factors.k.shape[-1])
            if 2 * size <= FIRST_BYTES if not self.heads else self.size + 2 * size <= MORE_BYTES:
                self._add(n, h, view)

    def _add(self, n: int, h: int, view: LayerView) -> None:
        exact = DotHead.of(view.weights, h, view.summary.lse[h])
        rows = torch.linspace(0, exact.q.shape[0] - 1, SAMPLE).round().long().unique().tolist()
        expected = view.weights[[h]][..., rows, :][0].double().cpu()
        stored, bits = exact, 32
        error = _error(exact, rows, expected)
        # The lse of all rows costs a pass: it is made only where the sample promises that 16 bits suffice.
        if _error(exact.in_16_bits(view.weights, h, rows), rows, expected) <= TOLERANCE:
            rounded = exact.in_16_bits(view.weights, h)
            if (rounded_error := _error(rounded, rows, expected)) <= TOLERANCE:
                stored, bits, error = rounded, 16, rounded_error
        header: dict[str, Any] = {
            "place": n,
            "head": h,
            "d": stored.q.shape[-1],
            "scale": stored.scale,
            "bits": bits,
            "error": error,
        }
        kind = torch.float16 if bits == 16 else torch.float32
        arrays = {
            "q": stored.q.to(kind), "k": stored.k.to(kind), "lse": stored.lse, "bias": stored.bias,
            "lo": stored.lo, "hi": stored.hi,
        }  # fmt: skip
        for name, array in arrays.items():
            if array is not None:
                header[name] = self._append(array)
        header["intervals"] = 0 if stored.lo is None else stored.lo.shape[0]
        self.heads.append(header)

    def _append(self, array: Tensor) -> list[int]:
        """Append an array; returns where it begins, in bytes, and how many numbers it has."""
        raw = raw_bytes(array)
        place = [self.size, array.numel()]
        raw += b"\0" * (-len(raw) % 4)
        self.parts.append(raw)
        self.size += len(raw)
        return place


def _error(head: DotHead, rows: list[int], expected: Tensor) -> float:
    """The largest relative error of a weight in some rows; of weights that are no numbers, infinity."""
    is_positive = expected > 1e-30
    off = (head.rows(rows) / expected - 1).abs()[is_positive]
    worst = float(off.max()) if off.numel() else 0.0
    return worst if worst == worst and worst < 1e30 else 1e30
