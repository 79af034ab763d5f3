"""Which tiles are seen: kernels that make the tables by which the others skip, from the intervals of every row.

In operators of PyTorch it would be fifty small kernels before each pass over a padded batch. Imports only triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAST_ALL_KEYS = tl.constexpr(2**31 - 1)  # beyond every key: what no row sees begins there


@triton.jit
def key_range(lo, hi, row, n, I, FLAGS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Of block n of rows: the keys from and to that some row sees, and that all see."""
    i = n * BLOCK_I + tl.arange(0, BLOCK_I)
    there = i < I
    low, high = tl.load(lo + row * I + i, mask=there, other=0), tl.load(hi + row * I + i, mask=there, other=0)
    some = there & (low < high)
    touch_lo, touch_hi = tl.min(tl.where(some, low, PAST_ALL_KEYS), 0), tl.max(tl.where(some, high, 0), 0)
    full_lo, full_hi = tl.max(tl.where(there, low, 0), 0), tl.min(tl.where(there, high, PAST_ALL_KEYS), 0)
    if FLAGS:  # inside the intervals anything may be hidden
        full_hi = 0
    return touch_lo, touch_hi, full_lo, full_hi


@triton.jit
def rows_table_kernel(lo, hi, out, I, J, blocks, FLAGS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """For a block of rows and one of its intervals: first block of keys, those seen in full from and to, past the last."""
    row, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    touch_lo, touch_hi, full_lo, full_hi = key_range(lo, hi, row, n, I, FLAGS, BLOCK_I)
    some = touch_lo < touch_hi
    first = tl.where(some, touch_lo, 0) // BLOCK_J
    past = tl.where(some, tl.cdiv(touch_hi, BLOCK_J), first)
    at = out + tl.program_id(0).to(tl.int64) * 4
    tl.store(at, first)
    tl.store(at + 1, tl.cdiv(full_lo, BLOCK_J))
    tl.store(at + 2, tl.minimum(tl.maximum(full_hi, 0), J) // BLOCK_J)
    tl.store(at + 3, past)


@triton.jit
def keys_table_kernel(
    lo, hi, out, I, J, blocks, n_intervals, FLAGS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):
    """For a block of keys: the first block of rows that sees it, those that see all of it from and to, past the last.

    Rows have intervals, columns have none: so it is looked up, block by block. Tiles at the end of the rows or of the keys are
    edges: nothing is read past an end.
    """
    b, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    begin = n * BLOCK_J
    end = tl.minimum(begin + BLOCK_J, J)
    full_key_block = begin + BLOCK_J <= J
    first, past, full_from, full_to, count = 0, 0, 0, 0, 0
    for m in range(0, tl.cdiv(I, BLOCK_I)):
        touched, full = 0, 0
        for r in range(0, n_intervals):
            touch_lo, touch_hi, full_lo, full_hi = key_range(lo, hi, b * n_intervals + r, m, I, FLAGS, BLOCK_I)
            touched |= ((touch_lo < end) & (touch_hi > begin)).to(tl.int32)
            full |= ((full_lo <= begin) & (full_hi >= end)).to(tl.int32)
        full = full & touched & (full_key_block & ((m + 1) * BLOCK_I <= I)).to(tl.int32)
        first = tl.where((touched == 1) & (past == 0), m, first)
        past = tl.where(touched == 1, m + 1, past)
        full_from = tl.where((full == 1) & (full_to == 0), m, full_from)
        full_to = tl.where(full == 1, m + 1, full_to)
        count += full
    unbroken = count == full_to - full_from
    at = out + tl.program_id(0).to(tl.int64) * 4
    tl.store(at, first)
    tl.store(at + 1, tl.where(unbroken, full_from, first))
    tl.store(at + 2, tl.where(unbroken, full_to, first))
    tl.store(at + 3, past)


__all__ = ["keys_table_kernel", "rows_table_kernel"]
