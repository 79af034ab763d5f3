"""Tables of visible tile ranges, from the intervals of every row: the other kernels use them to skip tiles.

PyTorch operators would take fifty small kernels before each pass over a padded batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAST_ALL_KEYS = tl.constexpr(2**31 - 1)  # beyond every key: the start of an empty range


@triton.jit
def key_range(lo, hi, row, n, I, FLAGS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Of row block n: the range of keys that some row sees, and the range that all rows see."""
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
    """For a row block and one of its intervals: first key block, fully visible from and to, past the last."""
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
    """For a key block: the first row block that sees it, those that see all of it from and to, past the last.

    Intervals belong to rows, so the row blocks are scanned one by one. Tiles at the end of the rows or of the keys count
    as edges, so that nothing is read past an end.
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
