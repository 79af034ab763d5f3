"""Statistics and maps of a long matrix, one band of rows after the other: in the fewest products, with progress.

A band is the rows of one row of the map. Its lse comes from the first pass; then one more product gives what every key
receives from the band, and the largest weight that it gets there: sum and map, mean and maximum, of the same weights.
Bands need nothing of one another. On a CPU every thread takes a band of its own, since the threads of one product wait
for each other after every step, longest on a machine that has other work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.results import Peak, Statistics
from ..core.weights import Weights
from .dot_head import DotHead, tile_of_key, why_not_exact

__all__ = ["Report", "summarise"]

#: Called with what is done, and with the share of it that is done; what it raises ends the work.
Report = Callable[[str, float], None]

X = TypeVar("X")


def summarise(
    weights: Weights, rows: int, cols: int, report: Report, threads: int | None = None
) -> tuple[Statistics, Tensor]:
    """Entropy, peak, lse, received and the map of every head, and the largest weight of every tile.

    Args:
        weights: Weights (h, i, j), with at least as many rows and keys as there are tiles.
        rows: Number of tiles along the queries; tiles are cut as in `Weights.pool`.
        cols: Number of tiles along the keys.
        report: Called with the step of the work, and its share that is done.
        threads: Bands at a time; as many as PyTorch has threads if None, on a GPU one.

    Returns:
        The statistics, with `pool` (h, rows, cols), and the largest weights, (h, rows, cols), on the CPU.
    """
    h, i, j = weights.shape
    device = weights._factors.q.device
    dots = [DotHead.of(weights, n, torch.zeros(i), device) for n in range(h)] if why_not_exact(weights) is None else []
    tiles = tile_of_key(j, cols).to(device).expand(h, -1)

    def of_band(r: int) -> _Band:
        band = slice(r * i // rows, (r + 1) * i // rows)
        return _dot_band(weights, dots, band, tiles) if dots else _any_band(weights.rows(band), cols)

    received = torch.zeros(h, j, dtype=torch.float64, device=device)
    parts = []
    threads = 1 if device.type != "cpu" else threads or torch.get_num_threads()
    report("summing up every row", 0.0)
    with contextlib.closing(_in_order(of_band, rows, threads)) as bands:
        for r, band in enumerate(bands):
            received += band.received
            parts.append(band[:3])
            report("summing up every row", (r + 1) / rows)
    statistics, pools, maxima = zip(*parts, strict=True)
    joined = {name: torch.cat([getattr(part, name) for part in statistics], -1) for name in ("entropy", "lse")}
    peak = Peak(*(torch.cat([part.peak[n] for part in statistics], -1) for n in range(2)))
    pool, most = torch.stack(pools, 1), torch.stack(maxima, 1)
    return Statistics(**joined, peak=peak, received=received.to(pool.dtype), pool=pool), most.cpu()


class _Band(NamedTuple):
    statistics: Statistics  # entropy, peak and lse of its rows
    pool: Tensor  # h cols
    most: Tensor  # h cols
    received: Tensor  # h j, long: added up, and not stored


@torch.no_grad()
def _dot_band(weights: Weights, dots: list[DotHead], band: slice, tiles: Tensor) -> _Band:
    """A band of heads whose weights follow from dot products alone."""
    statistics = weights.rows(band).see("entropy", "peak", "lse")
    # `head.lse` is 0 less the bias of the rows, if they have one.
    columns = [head.columns(band, statistics.lse[n] + head.lse[band]) for n, head in enumerate(dots)]
    sums, maxima = (torch.stack(one) for one in zip(*columns, strict=True))
    zeros = sums.new_zeros(len(dots), int(tiles[0, -1]) + 1)
    most = zeros.scatter_reduce(1, tiles, maxima, "amax")
    return _Band(statistics, zeros.scatter_add(1, tiles, sums), most, sums)


@torch.no_grad()
def _any_band(part: Weights, cols: int) -> _Band:
    statistics = part.see("entropy", "peak", "lse", "received", pool=(1, cols))
    return _Band(statistics, statistics.pool[:, 0], part.pool(1, cols, by="max")[:, 0], statistics.received)


def _in_order(work: Callable[[int], X], count: int, threads: int) -> Generator[X, None, None]:
    """The results of 0, 1, …, in order, a few of them under way; each on one thread of PyTorch's."""
    if threads == 1:
        yield from map(work, range(count))
        return
    before = torch.get_num_threads()
    waiting: deque[Future[X]] = deque()
    with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
        try:
            for n in range(count):
                waiting.append(pool.submit(work, n))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            torch.set_num_threads(before)  # of threads that begin later
