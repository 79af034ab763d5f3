"""Rows of few keys: the largest of a row and what a column receives, from scores that the forward pass stored.

A search in the forward pass would hold a tile of scores beside the row's best in registers, which leaves few warps, and each round waits
for the last. Here a warp holds four rows, eight lanes each, and a multiprocessor as many warps as it can.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import pack_scores, row_number, unsigned_order
from .tile_ops import FLOOR, LN2, LOG2E, log_weight, norm_to_base2, store_tile, visible_at_all
from .topk import insert_sorted, side_by_side


@triton.jit
def load_scores(
    scores, row, i, b, h, mask, sizes, pitch, MASK: tl.constexpr, FIRST: tl.constexpr, CHUNKS: tl.constexpr
):
    """CHUNKS · 32 scores of rows, from key FIRST on, as (chunk, row, key); their keys, and which of them are visible.

    In this order of axes the eight lanes of a row hold all of its chunks, so that a maximum over a row takes three exchanges.
    """
    j = FIRST + tl.arange(0, CHUNKS)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    shown = visible_at_all(i[None, :, None], j, b, h, mask, sizes, MASK) & (i[None, :, None] < sizes.i)
    s = tl.load(scores + row[None, :, None] * pitch + j, mask=shown, other=FLOOR)
    return s, j, shown & (s != FLOOR) & (s != float("-inf"))


@triton.jit
def row_max(x):
    """The largest of (chunk, row, key) for each row."""
    return tl.max(tl.max(x, 0), 1)


@triton.jit
def first_key(x, j, top):
    """The first key of each row whose number is `top`."""
    return tl.min(tl.min(tl.where(x == top[None, :, None], j, 2147483647), 0), 1)


@triton.jit
def column_weights(s, shown, norm, row, i, sizes, scale2, SCALE_FOLDED: tl.constexpr):
    """The weights of (chunk, row, key), summed over the rows: (chunk, key)."""
    m = tl.load(norm + 2 * row, mask=i < sizes.i, other=0.0)
    m2, log2l = norm_to_base2(m, tl.load(norm + 2 * row + 1, mask=i < sizes.i, other=0.0), SCALE_FOLDED)
    w = tl.exp2(log_weight(s, m2[None, :, None], log2l[None, :, None], scale2, SCALE_FOLDED))
    return tl.sum(tl.where(shown, w, 0.0), 1)


@triton.jit
def store_columns(received, sums, pitch, FIRST: tl.constexpr, CHUNKS: tl.constexpr):
    j = FIRST + tl.arange(0, CHUNKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(received + tl.program_id(0).to(tl.int64) * pitch + j, sums, mask=j < pitch)


@triton.jit
def short_rows_kernel(
    scores, mask, norm, score, index, weight, received, sizes, pitch, scale2,
    MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, WEIGHT: tl.constexpr, RECEIVED: tl.constexpr,
    CHUNKS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The N largest scores of ROWS rows of (CHUNKS + TAIL) · 32 keys, with keys and weights; and the sum over these rows of what each
    key receives, (programs, pitch).

    By rounds over packed numbers, as `topk_of_part_kernel`. Scores that agree in all bits but the lowest share a bucket; they are
    sorted by their exact values afterwards. If the bucket of the N-th goes on past it, the rounds are over exact scores instead.
    """
    blocks = tl.cdiv(sizes.i, ROWS)
    head = tl.program_id(0) // blocks
    b, h = head // sizes.h, head % sizes.h
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    row = row_number(b, h, i, sizes)
    s, j, shown = load_scores(scores, row, i, b, h, mask, sizes, pitch, MASK, 0, CHUNKS)
    x = pack_scores(s, j, shown, BITS)
    last = row_max(x)
    if RECEIVED:
        store_columns(received, column_weights(s, shown, norm, row, i, sizes, scale2, SCALE_FOLDED), pitch, 0, CHUNKS)
    if TAIL:
        s_tail, j_tail, shown_tail = load_scores(scores, row, i, b, h, mask, sizes, pitch, MASK, CHUNKS * 32, TAIL)
        x_tail = pack_scores(s_tail, j_tail, shown_tail, BITS)
        last = tl.maximum(last, row_max(x_tail))
        if RECEIVED:
            sums = column_weights(s_tail, shown_tail, norm, row, i, sizes, scale2, SCALE_FOLDED)
            store_columns(received, sums, pitch, CHUNKS * 32, TAIL)
    values, keys = (), ()
    bucket = last >> BITS
    shared = tl.zeros([ROWS], tl.int32)
    for rank in tl.static_range(N):
        here = last >> BITS
        if rank > 0:
            shared |= ((here == bucket) & (here > 0)).to(tl.int32)
        bucket = here
        there = bucket > 0
        key = (1 << BITS) - 1 - (last & ((1 << BITS) - 1)).to(tl.int32)
        exact = tl.load(scores + row * pitch + key, mask=there, other=FLOOR)
        values = values + (exact,)  # type: ignore[assignment]  # noqa: RUF005 (a star is not of Triton's language)
        keys = keys + (tl.where(there, key, -1),)  # type: ignore[assignment]  # noqa: RUF005
        # Less the last, without a sign, what is above it is lower than what is below.
        below = row_max(x - last[None, :, None])
        if TAIL:
            below = tl.maximum(below, row_max(x_tail - last[None, :, None]))
        last = below + last
    if tl.max(((bucket == last >> BITS) & (bucket > 0)).to(tl.int32), 0) > 0:
        # Loaded again: kept, the scores of every program would take registers for the sake of few.
        s, j, shown = load_scores(scores, row, i, b, h, mask, sizes, pitch, MASK, 0, CHUNKS)
        x = unsigned_order(s, shown)
        if TAIL:
            s_tail, j_tail, shown_tail = load_scores(scores, row, i, b, h, mask, sizes, pitch, MASK, CHUNKS * 32, TAIL)
            x_tail = unsigned_order(s_tail, shown_tail)
        values, keys = (), ()
        for _ in tl.static_range(N):
            top = row_max(x)
            if TAIL:
                top = tl.maximum(top, row_max(x_tail))
            key = first_key(x, j, top)
            if TAIL:
                key = tl.minimum(key, first_key(x_tail, j_tail, top))
                x_tail = tl.where(j_tail == key[None, :, None], 0, x_tail)
            x = tl.where(j == key[None, :, None], 0, x)
            there = top > 0
            exact = tl.load(scores + row * pitch + key, mask=there, other=FLOOR)
            values, keys = values + (exact,), keys + (tl.where(there, key, -1),)  # type: ignore[assignment]  # noqa: RUF005
    elif tl.max(shared, 0) > 0:
        values, keys = sorted_rows(values, keys, N)
    n = tl.arange(0, BLOCK_N)
    best, at = side_by_side(values, n, N), side_by_side(keys, n, N)
    score_out = tl.where(at >= 0, best * (scale2 if SCALE_FOLDED else 1.0) * LN2, float("-inf"))
    store_tile(score, b, h, i, n, score_out, sizes.i, N)
    store_tile(index, b, h, i, n, at, sizes.i, N)
    if WEIGHT:  # from the stored score: for large scores the unrounded one would disagree with it
        m = tl.load(norm + 2 * row, mask=i < sizes.i, other=0.0)
        l = tl.load(norm + 2 * row + 1, mask=i < sizes.i, other=1.0)
        m, l = tl.where(l == 0.0, 0.0, m), tl.where(l == 0.0, 1.0, l)
        store_tile(weight, b, h, i, n, tl.exp2((score_out - m[:, None]) * LOG2E) / l[:, None], sizes.i, N)


@triton.jit
def sorted_rows(values, keys, N: tl.constexpr):
    """The largest first; equal scores stay in the order they came in."""
    best, at = (), ()
    for _ in tl.static_range(N):
        best, at = best + (values[0] * 0.0 + FLOOR,), at + (keys[0] * 0 - 1,)  # type: ignore[assignment]  # noqa: RUF005
    for n in tl.static_range(N):
        best, at = insert_sorted(values[n], keys[n], best, at, N)
    return best, at


__all__ = ["short_rows_kernel"]
