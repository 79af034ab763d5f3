"""Rows of few keys: the largest of a row and what a column receives, from scores that the forward pass stored.

A search in the forward pass would hold a tile of scores beside the row's best in registers, which leaves few warps, and each round waits
for the last. Here a warp holds four rows, eight lanes each, and a multiprocessor as many warps as it can.

The scores of a row are a tuple of tiles of 32 keys. As one wide tile they would be spread over all lanes of a warp, and every maximum
would take five exchanges for one row instead of three for four.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import pack_scores, row_number, unsigned_order
from .tile_ops import FLOOR, LN2, LOG2E, log_weight, norm_to_base2, store_tile, visible_at_all
from .topk import insert_sorted, side_by_side


@triton.jit
def load_chunk(scores, row, i, b, h, mask, sizes, pitch, MASK: tl.constexpr, CHUNK: tl.constexpr):
    """32 scores of every row, their keys, and which of them are visible."""
    j = CHUNK * 32 + tl.arange(0, 32)[None, :]
    shown = visible_at_all(i[:, None], j, b, h, mask, sizes, MASK) & (i[:, None] < sizes.i)
    s = tl.load(scores + row[:, None] * pitch + j, mask=shown, other=FLOOR)
    return s, j, shown & (s != FLOOR) & (s != float("-inf"))


@triton.jit
def next_below(x, last, CHUNKS: tl.constexpr):
    """The largest number of every row below the last one.

    Less the last, without a sign, what is above it is lower than what is below.
    """
    below = x[0] - last[:, None]
    for c in tl.static_range(1, CHUNKS):
        below = tl.maximum(below, x[c] - last[:, None])
    return tl.max(below, 1) + last


@triton.jit
def exact_rounds(scores, row, i, b, h, mask, sizes, pitch, MASK: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr):
    """The N largest scores of every row and their keys, by rounds over exact scores. They are loaded again: kept, they would take
    registers in every program for the sake of few."""
    x = ()
    for c in tl.static_range(CHUNKS):
        s, _, shown = load_chunk(scores, row, i, b, h, mask, sizes, pitch, MASK, c)
        x = x + (unsigned_order(s, shown),)  # type: ignore[assignment]  # noqa: RUF005 (a star is not of Triton's language)
    values, keys = (), ()
    for _ in tl.static_range(N):
        best = x[0]  # type: ignore[misc]
        for c in tl.static_range(1, CHUNKS):
            best = tl.maximum(best, x[c])
        top = tl.max(best, 1)
        first = tl.full(best.shape, 2147483647, tl.int32)
        for c in tl.static_range(CHUNKS):
            first = tl.minimum(first, tl.where(x[c] == top[:, None], c * 32 + tl.arange(0, 32)[None, :], 2147483647))
        key = tl.min(first, 1)
        rest = ()
        for c in tl.static_range(CHUNKS):
            rest = rest + (tl.where(c * 32 + tl.arange(0, 32)[None, :] == key[:, None], 0, x[c]),)  # type: ignore[assignment]  # noqa: RUF005
        x = rest
        there = top > 0
        exact = tl.load(scores + row * pitch + key, mask=there, other=FLOOR)
        values = values + (exact,)  # type: ignore[assignment]  # noqa: RUF005
        keys = keys + (tl.where(there, key, -1),)  # type: ignore[assignment]  # noqa: RUF005
    return values, keys


@triton.jit
def sorted_rows(values, keys, N: tl.constexpr):
    """The largest first; equal scores stay in the order they came in."""
    best, at = (), ()
    for _ in tl.static_range(N):
        best = best + (values[0] * 0.0 + FLOOR,)  # type: ignore[assignment]  # noqa: RUF005
        at = at + (keys[0] * 0 - 1,)  # type: ignore[assignment]  # noqa: RUF005
    for n in tl.static_range(N):
        best, at = insert_sorted(values[n], keys[n], best, at, N)
    return best, at


@triton.jit
def largest_of_rows(
    scores, x, row, i, b, h, m, l, mask, score, index, weight, sizes, pitch, scale2,
    MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, WEIGHT: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the N largest scores of ROWS rows from their packed numbers `x`, with keys and weights."""
    best = x[0]  # type: ignore[misc]
    for c in tl.static_range(1, CHUNKS):
        best = tl.maximum(best, x[c])
    last = tl.max(best, 1)
    values, keys = (), ()
    bucket = last >> BITS
    shared = tl.zeros([ROWS], tl.int32)
    for rank in tl.static_range(N):
        here = last >> BITS
        if rank > 0:
            shared |= ((here == bucket) & (here > 0)).to(tl.int32)
        bucket = here
        key = (1 << BITS) - 1 - (last & ((1 << BITS) - 1)).to(tl.int32)
        exact = tl.load(scores + row * pitch + key, mask=bucket > 0, other=FLOOR)
        values = values + (exact,)  # type: ignore[assignment]  # noqa: RUF005
        keys = keys + (tl.where(bucket > 0, key, -1),)  # type: ignore[assignment]  # noqa: RUF005
        last = next_below(x, last, CHUNKS)
    if tl.max(((bucket == last >> BITS) & (bucket > 0)).to(tl.int32), 0) > 0:
        values, keys = exact_rounds(scores, row, i, b, h, mask, sizes, pitch, MASK, N, CHUNKS)
    elif tl.max(shared, 0) > 0:
        values, keys = sorted_rows(values, keys, N)
    n = tl.arange(0, BLOCK_N)
    largest, at = side_by_side(values, n, N), side_by_side(keys, n, N)
    score_out = tl.where(at >= 0, largest * (scale2 if SCALE_FOLDED else 1.0) * LN2, float("-inf"))
    store_tile(score, b, h, i, n, score_out, sizes.i, N)
    store_tile(index, b, h, i, n, at, sizes.i, N)
    if WEIGHT:  # from the stored score: for large scores the unrounded one would disagree with it
        m, l = tl.where(l == 0.0, 0.0, m), tl.where(l == 0.0, 1.0, l)
        store_tile(weight, b, h, i, n, tl.exp2((score_out - m[:, None]) * LOG2E) / l[:, None], sizes.i, N)


@triton.jit
def short_rows_kernel(
    scores, mask, norm, score, index, weight, received, sizes, pitch, scale2,
    MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, WEIGHT: tl.constexpr, RECEIVED: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The N largest scores of TURNS times ROWS rows of at most CHUNKS · 32 keys, with keys and weights; and the sum over these rows of
    what each key receives, (programs, pitch).

    By rounds over packed numbers, as `topk_of_part_kernel`. Scores that agree in all bits but the lowest share a bucket; they are
    sorted by their exact values afterwards. If the bucket of the N-th goes on past it, the rounds are over exact scores instead.
    """
    blocks = tl.cdiv(sizes.i, ROWS * TURNS)
    head = tl.program_id(0) // blocks
    b, h = head // sizes.h, head % sizes.h
    start = tl.program_id(0) % blocks * (ROWS * TURNS)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros([ROWS, 32], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for turn in range(0, TURNS):
        i = start + turn * ROWS + tl.arange(0, ROWS)
        row = row_number(b, h, i, sizes)
        m, l = row * 0.0, row * 0.0
        if RECEIVED or WEIGHT:
            m = tl.load(norm + 2 * row, mask=i < sizes.i, other=0.0)
            l = tl.load(norm + 2 * row + 1, mask=i < sizes.i, other=0.0)
        x, more = (), ()
        for c in tl.static_range(CHUNKS):
            s, j, shown = load_chunk(scores, row, i, b, h, mask, sizes, pitch, MASK, c)
            x = x + (pack_scores(s, j, shown, BITS),)  # type: ignore[assignment]  # noqa: RUF005
            w = sums[c]  # type: ignore[misc, var-annotated]
            if RECEIVED:
                m2, log2l = norm_to_base2(m, l, SCALE_FOLDED)
                part = tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
                w += tl.where(shown, part, 0.0)
            more = more + (w,)  # type: ignore[assignment]  # noqa: RUF005
        sums = more
        largest_of_rows(
            scores, x, row, i, b, h, m, l, mask, score, index, weight, sizes, pitch, scale2, MASK, SCALE_FOLDED, N, BLOCK_N, BITS, WEIGHT, CHUNKS, ROWS,
        )  # fmt: skip
    if RECEIVED:
        for c in tl.static_range(CHUNKS):
            k = c * 32 + tl.arange(0, 32)
            out = received + tl.program_id(0).to(tl.int64) * pitch + k
            tl.store(out, tl.sum(sums[c], 0), mask=k < pitch)  # type: ignore[misc]


__all__ = ["short_rows_kernel"]
