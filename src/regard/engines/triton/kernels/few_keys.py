"""Rows of few keys: the largest of a row and what a column receives, in one pass over rows whose norm is known.

A program keeps the keys in shared memory and the sums of their columns in registers while it walks some blocks of rows. A chunk of keys gives each
of the lanes that share a row eight scores, which a network sorts and merges (`topk_network`); it sorts no chunk's places that hold no key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    FLOOR,
    LN2,
    LOG2E,
    apply_score_mods,
    load_tile,
    log_weight,
    norm_to_base2,
    product,
    store_tile,
    visible_at_all,
)
from .topk import side_by_side
from .topk_network import LISTS, column_at, exchanged, lane_columns, merge_lists, merging_pairs, pack, sorting_pairs

#: Keys of a tile: so many that each of the lanes of a row has eight, which are sorted at once.
CHUNK = tl.constexpr(32)


@triton.jit
def rows_together(w):
    """A tile (I, J) with the rows added up that a thread has of a product: r and r + 8 of every sixteen."""
    return tl.sum(tl.reshape(w, [w.shape[0] // 16, 2, 8, w.shape[1]]), 1)


@triton.constexpr_function
def places_below(width):
    """Which of a lane's columns in a chunk lie in its first `width`."""
    return tuple(n for n in range(8) if column_at(n, 8) < width)


@triton.jit
def sorted_chunk(s, start, WIDTH: tl.constexpr):
    """Scores of a chunk (I, CHUNK), sorted within each lane; only the first WIDTH keys count."""
    I: tl.constexpr = s.shape[0]
    columns = lane_columns(s)
    first = start + 2 * tl.arange(0, LISTS)[None, :]
    PLACES: tl.constexpr = places_below(WIDTH)
    x = ()
    for n in tl.static_range(len(PLACES)):
        x = x + (pack(tl.reshape(columns[PLACES[n]], (I, LISTS)), first + column_at(PLACES[n], 8)),)  # type: ignore[assignment]  # noqa: RUF005
    return exchanged(x, sorting_pairs(len(PLACES)))


@triton.jit
def merge_shorter(best, x, N: tl.constexpr):
    """The N largest of a sorted list of N and one of N or fewer, sorted."""
    SKIP: tl.constexpr = N - len(x)
    out = ()
    for n in tl.static_range(N):
        if n < SKIP:
            out = out + (best[n],)  # type: ignore[assignment]  # noqa: RUF005
        else:
            out = out + (tl.where(best[n] > x[N - 1 - n], best[n], x[N - 1 - n]),)  # type: ignore[assignment]  # noqa: RUF005
    return exchanged(out, merging_pairs(N))


@triton.jit
def merge_chunk(s, best, C: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """The lists after chunk C of a row."""
    x = sorted_chunk(s, C * CHUNK, WIDTH)
    if C == 0:
        none = pack(tl.full([s.shape[0], LISTS], FLOOR, tl.float32), 2147483647)
        for _ in tl.static_range(N - len(x)):
            x = x + (none,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        x = merge_shorter(best, x, N)
    return x


@triton.jit
def few_keys_kernel(
    q, k, modifiers, strides, caps, mask, norm, received, score, index, weight, sizes, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    RECEIVED: tl.constexpr, WEIGHT: tl.constexpr, N: tl.constexpr, SORTED: tl.constexpr,
    CHUNKS: tl.constexpr, LAST: tl.constexpr, TURNS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The N largest scores of TURNS times BLOCK_I rows of at most CHUNKS · CHUNK keys, with keys and weights; and the sum over these rows of
    what each key receives, (programs, CHUNKS · CHUNK). LAST: keys of the last chunk that are sorted."""
    blocks = tl.cdiv(sizes.i, BLOCK_I * TURNS)
    head = tl.program_id(0) // blocks
    b, h = head // sizes.h, head % sizes.h
    hk = h // sizes.k_group
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, SORTED)
    keys, sums = (), ()
    for c in tl.static_range(CHUNKS):
        j = c * CHUNK + tl.arange(0, CHUNK)
        keys = keys + (load_tile(k, b, hk, j, d, sizes.j, D, True),)  # type: ignore[assignment]  # noqa: RUF005
        sums = sums + (tl.zeros([BLOCK_I // 16, 8, CHUNK], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for turn in range(0, TURNS):
        i = (tl.program_id(0) % blocks * TURNS + turn) * BLOCK_I + tl.arange(0, BLOCK_I)
        q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
        row = 2 * ((b * sizes.h + h).to(tl.int64) * sizes.i + i)
        m = tl.load(norm + row, mask=i < sizes.i, other=0.0)
        l = tl.load(norm + row + 1, mask=i < sizes.i, other=0.0)  # rows past the end see nothing
        m2, log2l = norm_to_base2(m, l, SCALE_FOLDED)
        best, added = (), ()
        for c in tl.static_range(CHUNKS):
            j = c * CHUNK + tl.arange(0, CHUNK)
            s, _ = apply_score_mods(
                product(q_tile, keys[c].T, FP32), i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
            )  # fmt: skip
            if MASK != "none" or c == CHUNKS - 1:
                s = tl.where(visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK), s, FLOOR)
            if RECEIVED:
                w = tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
                added = added + (sums[c] + rows_together(w),)  # type: ignore[assignment]  # noqa: RUF005
            best = merge_chunk(s, best, c, CHUNK if c < CHUNKS - 1 else LAST, SORTED)
        if RECEIVED:
            sums = added
        top_scores, top_keys = merge_lists(best, SORTED)
        top_scores, top_keys = side_by_side(top_scores, n, SORTED), side_by_side(top_keys, n, SORTED)
        score_out = tl.where(top_keys >= 0, top_scores * (scale2 if SCALE_FOLDED else 1.0) * LN2, float("-inf"))
        store_tile(score, b, h, i, n, score_out, sizes.i, N)
        store_tile(index, b, h, i, n, top_keys, sizes.i, N)
        if WEIGHT:  # from the stored score: for large scores the unrounded one would disagree with it
            m, l = tl.where(l == 0.0, 0.0, m), tl.where(l == 0.0, 1.0, l)
            store_tile(weight, b, h, i, n, tl.exp2((score_out - m[:, None]) * LOG2E) / l[:, None], sizes.i, N)
    if RECEIVED:
        for c in tl.static_range(CHUNKS):
            at = received + tl.program_id(0).to(tl.int64) * (CHUNKS * CHUNK) + c * CHUNK + tl.arange(0, CHUNK)
            tl.store(at, tl.sum(tl.reshape(sums[c], [BLOCK_I // 2, CHUNK]), 0))


__all__ = ["CHUNK", "few_keys_kernel"]
