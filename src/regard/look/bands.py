"""Statistics and maps of a long matrix, one band of rows after the other: in the fewest products, with progress.

A band is the rows of one row of the map. Its lse comes from the first pass; then one more product gives what every key
receives from the band, and the largest weight that it gets there: sum and map, mean and maximum, of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.results import Peak, Statistics
from ..core.weights import Weights
from .dot_head import DotHead, tile_of_key, why_not_exact

__all__ = ["Report", "summarise"]

#: Called with what is done, and with the share of it that is done; what it raises ends the work.
Report = Callable[[str, float], None]


def summarise(weights: Weights, rows: int, cols: int, report: Report) -> tuple[Statistics, Tensor]:
    """Entropy, peak, lse, received and the map of every head, and the largest weight of every tile.

    Args:
        weights: Weights (h, i, j), with at least as many rows and keys as there are tiles.
        rows: Number of tiles along the queries; tiles are cut as in `Weights.pool`.
        cols: Number of tiles along the keys.
        report: Hears of the progress.

    Returns:
        The statistics, with `pool` (h, rows, cols), and the largest weights, (h, rows, cols), on the CPU.
    """
    h, i, j = weights.shape
    device = weights._factors.q.device
    dots = [DotHead.of(weights, n, torch.zeros(i), device) for n in range(h)] if why_not_exact(weights) is None else []
    tiles = tile_of_key(j, cols).to(device)
    received = torch.zeros(h, j, dtype=torch.float64, device=device)
    pool, most = torch.zeros(h, rows, cols, device=device), torch.zeros(h, rows, cols, device=device)
    parts = []
    for r in range(rows):
        report("summing up every row", r / rows)
        band = slice(r * i // rows, (r + 1) * i // rows)
        part = weights.rows(band)
        if not dots:
            seen = part.see("entropy", "peak", "lse", "received", pool=(1, cols))
            received += seen.received
            pool[:, r], most[:, r] = seen.pool[:, 0], part.pool(1, cols, by="max")[:, 0].nan_to_num()
        else:
            seen = part.see("entropy", "peak", "lse")
            for n, head in enumerate(dots):
                # `head.lse` is 0 less the bias of the rows, if they have one.
                sums, maxima = head.columns(band, seen.lse[n] + head.lse[band])
                received[n] += sums
                pool[n, r].scatter_add_(0, tiles, sums)
                most[n, r].scatter_reduce_(0, tiles, maxima.nan_to_num(), "amax")
        parts.append(seen)
    report("summing up every row", 1.0)
    joined = {name: torch.cat([getattr(part, name) for part in parts], -1) for name in ("entropy", "lse")}
    peak = Peak(*(torch.cat([part.peak[n] for part in parts], -1) for n in range(2)))
    return Statistics(**joined, peak=peak, received=received.to(pool.dtype), pool=pool), most.cpu()
