"""The mask as kernel arguments: none, causal, a band, intervals of every row, or flags of every cell.

Also the tables by which kernels skip tiles: the key blocks that a row block sees, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.block import MatrixBlock
from ...core.problem import Problem
from .kernels.tile_ops import MaskArg, TensorArg, tensor_arg
from .kernels.tile_ranges import keys_table_kernel, rows_table_kernel
from .launcher import launch

__all__ = ["MaskFormat", "choose_mask_format", "key_table", "row_table"]

#: Width of an unbounded band: beyond any position, and far from int32 overflow.
UNBOUNDED = 2**30


@dataclass(frozen=True)
class MaskFormat:
    """The mask in the cheapest format that expresses it."""

    kind: str  # none, causal, band, intervals, flags
    arg: MaskArg
    intervals: tuple[Tensor, Tensor] | None = None  # lo, hi (b|1, r, i)


def choose_mask_format(problem: Problem) -> MaskFormat:
    unused = TensorArg(problem.q, 0, 0, 0, 0)
    if problem.mask is None:
        return MaskFormat("none", _mask_arg(unused))
    if (band := _band(problem.mask.band())) is not None:
        kind = "causal" if band == (UNBOUNDED, 0) else "band"
        return MaskFormat(kind, _mask_arg(unused, *band))
    intervals = problem.intervals
    if intervals.exact:
        lo, hi = intervals.lo.int().contiguous(), intervals.hi.int().contiguous()
        return MaskFormat("intervals", _mask_arg(unused, intervals=(lo, hi)), (lo, hi))
    flags = dense_mask(problem)
    lo, hi = _ends_of_rows(flags)
    return MaskFormat("flags", _mask_arg(tensor_arg(flags), intervals=(lo, hi)), (lo, hi))


def _mask_arg(
    flags: TensorArg, before: int = 0, after: int = 0, intervals: tuple[Tensor, Tensor] | None = None
) -> MaskArg:
    lo, hi = intervals or (flags.ptr, flags.ptr)
    count = lo.shape[1] if intervals else 1
    return MaskArg(before, after, lo, hi, count, lo.stride(0) if intervals and len(lo) > 1 else 0, *flags)


def _band(band: tuple[int | None, int | None] | None) -> tuple[int, int] | None:
    """`Mask.band` as numbers that kernels can add to a position."""
    return None if band is None else (_bounded(band[0]), _bounded(band[1]))


def _bounded(side: int | None) -> int:
    return UNBOUNDED if side is None else min(side, UNBOUNDED)


def dense_mask(problem: Problem) -> Tensor:
    """Visible cells (b|1, h|1, i, j) as bytes."""
    _, _, i, j = problem.shape
    assert problem.mask is not None
    flags = problem.mask.visible(MatrixBlock(slice(0, i), slice(0, j), problem.offset, problem.q.device))
    flags = flags.reshape(*[1] * (4 - flags.ndim), *flags.shape)
    return flags.expand(*flags.shape[:2], i, j).view(torch.uint8)


def _ends_of_rows(flags: Tensor) -> tuple[Tensor, Tensor]:
    """First key of every row that some head sees, and the one after the last, (b|1, 1, i)."""
    some = flags.amax(1, keepdim=True)  # b 1 i j
    first = some.argmax(-1)
    last = some.shape[-1] - some.flip(-1).argmax(-1)
    there = some.amax(-1) > 0
    return torch.where(there, first, 0).int().contiguous(), torch.where(there, last, 0).int().contiguous()


def row_table(mask_format: MaskFormat, block_i: int, block_j: int, keys: int) -> Tensor:
    """For every row block and each interval: first key block, fully visible from and to, past the last.

    (b|1, r, blocks, 4)
    """
    return _table(rows_table_kernel, mask_format, block_i, block_j, keys)


def key_table(mask_format: MaskFormat, block_i: int, block_j: int, keys: int) -> Tensor:
    """For every key block: the first row block that sees it, those that see all of it from and to, past the last.

    (b|1, blocks, 4)
    """
    return _table(keys_table_kernel, mask_format, block_i, block_j, keys)


def _table(kernel: Any, mask_format: MaskFormat, block_i: int, block_j: int, keys: int) -> Tensor:
    assert mask_format.intervals is not None
    lo, hi = mask_format.intervals
    b, n_intervals, rows = lo.shape
    by_keys = kernel is keys_table_kernel
    outer = (b,) if by_keys else (b, n_intervals)
    blocks = triton.cdiv(keys, block_j) if by_keys else triton.cdiv(rows, block_i)
    out = torch.empty(*outer, blocks, 4, dtype=torch.int32, device=lo.device)
    args = {
        "lo": lo,
        "hi": hi,
        "out": out,
        "I": rows,
        "J": keys,
        "blocks": blocks,
        **({"n_intervals": n_intervals} if by_keys else {}),
    }
    args |= {"FLAGS": mask_format.kind == "flags", "BLOCK_I": block_i, "BLOCK_J": block_j, "num_warps": 1}
    launch(kernel, (mask_format.kind, block_i, block_j, keys), [lo, hi, out], lambda: (out.numel() // 4, args))
    return out
