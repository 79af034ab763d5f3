"""Tiles of the matrix by sum, maximum or log-sum-exp on the GPU: from a problem to kernel arguments, and to the map."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.pytree import flatten, unflatten
from ...core.stats import Request
from ..replay import current_recorder, replay_or_record
from . import decode_pass, unsupported_reason
from .kernel_inputs import KernelInputs, LaunchArgs, empty, padded_size, tma_descriptors
from .kernels.tile_ops import tensor_arg
from .kernels.tile_states import merge_rows_kernel, tile_states_kernel
from .launcher import launch
from .tile_config import choose_config

__all__ = ["Edges", "pooled", "row_masses", "serves_pool"]

#: Bytes of the states of all rows in all tiles of keys; beyond them some rows are pooled at a time.
MAX_STATE_BYTES = 2**29
#: Rows and tiles of keys of a program that merges rows.
MERGED_ROWS, MERGED_TILES = 64, 32
#: A key behind all others.
NO_KEY = 2**31 - 1
#: Rows of tiles that are merged at once, and keys of tiles that end at once.
SIZES_AT_ONCE = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Edges:
    """Ascending edges of tiles along an axis of n positions, of which the kernels read what they need."""

    count: int
    first: int
    past: int
    #: Positions of a tile, where all are so long but perhaps the last, which then ends the axis, and `first` is a multiple
    #: of it; else 0, and `at` has the edges, and a last one beyond all positions.
    size: int
    at: Tensor | None = None

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.count, self.first, self.past, self.size


def _edges(at: tuple[int, ...], n: int, device: torch.device, most: int) -> Edges:
    """`most`: the longest tiles that are taken as of one size."""
    size = _one_size(at, n)
    ends = len(at) - 1, at[0], at[-1]
    if 0 < size <= most:
        return Edges(*ends, size)
    on_device = _on_device(at, device)
    if (recorder := current_recorder()) is not None:
        recorder.hold(on_device)
    return Edges(*ends, 0, on_device)


@lru_cache(256)
def _one_size(at: tuple[int, ...], n: int) -> int:
    """The size of tiles that are all alike, a power of two; 0 where they are not."""
    size = at[1] - at[0]
    if size not in SIZES_AT_ONCE or at[0] % size:
        return 0
    if any(b - a != size for a, b in pairwise(at[1:-1])):
        return 0
    last = at[-1] - at[-2]
    return size if last == size or (0 < last < size and at[-1] == n) else 0


@lru_cache(64)
def _on_device(at: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((*at, NO_KEY), dtype=torch.int32, device=device)


def serves_pool(problem: Problem) -> bool:
    """Whether the kernels pool this matrix."""
    return (
        problem.similarity_kernel.kernel_op == "product"
        and 0 not in (*problem.shape, problem.q.shape[-1])
        and unsupported_reason(problem, Request(("norm",))) is None
        and not decode_pass.splits_keys(KernelInputs(problem))  # a few rows would occupy as few multiprocessors
    )


def pooled(
    problem: Problem, norm: Tensor | None, row_edges: tuple[int, ...], key_edges: tuple[int, ...], by: str
) -> Tensor:
    """(b, h, rows, cols): tiles between ascending edges; one without a visible cell is 0, by lse −inf.

    `norm` is not read: that of the scores at hand is computed beside the tiles.
    """
    b, h, i, _ = problem.shape
    height = _rows_at_once(problem, key_edges)
    if (row_edges[0], row_edges[-1]) == (0, i) and i <= height:
        return _replayed(problem, _edges(row_edges, i, problem.q.device, MERGED_ROWS), key_edges, by)
    out = torch.full(
        (b, h, len(row_edges) - 1, len(key_edges) - 1), -torch.inf if by == "lse" else 0.0, device=problem.q.device
    )
    for a in range(row_edges[0], row_edges[-1], height):
        z = min(row_edges[-1], a + height)
        first, past = bisect_right(row_edges, a) - 1, bisect_left(row_edges, z)
        local = tuple(min(max(edge, a), z) - a for edge in row_edges[first : past + 1])
        rows = _edges(local, z - a, problem.q.device, MERGED_ROWS)
        part, here = _replayed(problem.narrow(a, z), rows, key_edges, by), out[:, :, first:past]
        here.copy_(_MERGE[by](here, part))  # a tile may go on from one part to the next
    return out


_MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "lse": torch.logaddexp,
}


def row_masses(problem: Problem, key_edges: tuple[int, ...]) -> Tensor:
    """(b, h, i, n): the weight of every row on the keys between each two edges."""
    i, height = problem.shape[2], _rows_at_once(problem, key_edges)
    parts = [
        _replayed(problem if height >= i else problem.narrow(a, z), Edges(z - a, 0, z - a, 1), key_edges, "sum")
        for a, z in ((a, min(i, a + height)) for a in range(0, i, height))
    ]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _rows_at_once(problem: Problem, key_edges: tuple[int, ...]) -> int:
    b, h, _, _ = problem.shape
    return max(1, MAX_STATE_BYTES // (8 * b * h * max(1, len(key_edges) - 1)))


def _replayed(problem: Problem, rows: Edges, key_edges: tuple[int, ...], by: str) -> Tensor:
    problem = problem.with_lowered_mask()
    config = choose_config("tile_states", KernelInputs(problem), 0, None)
    cols = _edges(key_edges, problem.shape[3], problem.q.device, config.block_j)
    spec, tensors = flatten(problem)
    more = [x for x in (rows.at, cols.at) if x is not None]

    def compute() -> list[Tensor]:
        return [_pool(unflatten(spec, list(tensors)), rows, cols, by)]

    (tiles,) = replay_or_record(("pooled", spec, rows.key, cols.key, by), [*tensors, *more], compute)
    return tiles


def _pool(problem: Problem, rows: Edges, cols: Edges, by: str) -> Tensor:
    p = KernelInputs(problem)
    states, pivots, of_rows = _states(p, cols, by)
    out = empty(p.b, p.h, rows.count, cols.count, like=p.q, dtype=torch.float32)
    blocks = triton.cdiv(p.i, MERGED_ROWS) if rows.size else rows.count

    def launch_args() -> LaunchArgs:
        return triton.cdiv(cols.count, MERGED_TILES) * blocks * p.b * p.h, {
            "states": states, "pivots": pivots, "rows": of_rows, "row_edges": out if rows.at is None else rows.at, "out": out,
            "sizes": p.common_args["sizes"], "tiles": cols.count, "row_tiles": rows.count, "BY": by, "HEIGHT": rows.size,
            "BLOCK_I": MERGED_ROWS, "BLOCK_C": MERGED_TILES,
        }  # fmt: skip

    key = p.key and (p.key, p.i, rows.key, cols.count, by)
    launch(merge_rows_kernel, key, [states, pivots, of_rows, rows.at, out], launch_args)
    return out


def _states(p: KernelInputs, cols: Edges, by: str) -> tuple[Tensor, Tensor, Tensor]:
    """The state of every row in every tile of keys (b, h, tiles, i), their pivots, and the rows' norm (b, h, 2, i)."""
    config = choose_config("tile_states", p, 0, None)
    table, sink = p.row_table(config), p.problem.sink
    states = empty(p.b, p.h, cols.count, p.i, like=p.q, dtype=torch.float32)
    pivots = states if by == "max" else torch.empty_like(states)
    of_rows = states if by == "lse" else empty(p.b, p.h, 2, p.i, like=p.q, dtype=torch.float32)

    def launch_args() -> LaunchArgs:
        block_d, heads = padded_size(p.d, p.q), p.b * p.h
        tma, descriptors, layouts = tma_descriptors(
            p, config, (p.q, (config.block_i, block_d)), (p.k, (config.block_j, block_d))
        )
        arguments: dict[str, Any] = {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "q_desc": descriptors[0], "k_desc": descriptors[1], "q_layout": layouts[0],
            "k_layout": layouts[1], "sink": p.unused if sink is None else tensor_arg(sink), "row_table": table,
            "edges": states if cols.at is None else cols.at, "tiles": cols.count, "first_key": cols.first, "past_key": cols.past,
            "out": states, "out_pivot": pivots, "out_rows": of_rows, "heads": heads, "heads_per_group": p.heads_per_group(0),
            "SCALE_FOLDED": p.scale_folded, "SINK": sink is not None, "BY": by, "WIDTH": cols.size, "TMA": tma,
            "EDGES": p.mask_format.kind != "none" or p.j % config.block_j != 0, "EVEN_BLOCKS": p.j % config.block_j == 0,
            "BLOCK_D": block_d, **p.common_args, **config.launch,
        }  # fmt: skip
        return triton.cdiv(p.i, config.block_i) * heads, arguments

    tensors = [*p.tensors, sink, table.ptr, cols.at, states, pivots, of_rows]
    launch(tile_states_kernel, p.key and (p.key, cols.key, by, config), tensors, launch_args)
    return states, pivots, of_rows
