"""The largest scores of every row by sorting networks, in one walk over its keys.

A thread sorts the scores that it has of a row, eight at a time, and merges them into its eight largest so far, without a branch, an
exchange or a barrier; at the end the lists of a row's four lanes become one. A score and its key are one float64, whose order is
that of scores, and of equal ones has the lower key first: comparing two is one instruction, and beside those that move them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import schedule_tile
from .tile_ops import FLOOR, LN2, LOG2E, key_blocks, load_tile, store_tile
from .topk import load_norm, score_tile, side_by_side

#: Lanes that share a row of a product, each with a list of its own.
LISTS = tl.constexpr(4)


@triton.constexpr_function
def sorting_pairs(n):
    """Batcher's odd–even merge sort of n numbers: pairs of places, the first for the larger."""
    pairs, p = [], 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return tuple(pairs)


@triton.constexpr_function
def merging_pairs(n):
    """Pairs of places that sort a bitonic sequence of n numbers."""
    pairs, half = [], n // 2
    while half >= 1:
        pairs += [(i, i + half) for i in range(n) if i % (2 * half) < half]
        half //= 2
    return tuple(pairs)


@triton.jit
def exchange(x, A: tl.constexpr, B: tl.constexpr):
    """A tuple of tiles with the larger numbers of two of them in place A, and the smaller in B."""
    in_order = x[A] > x[B]
    larger, smaller = tl.where(in_order, x[A], x[B]), tl.where(in_order, x[B], x[A])
    return x[:A] + (larger,) + x[A + 1 : B] + (smaller,) + x[B + 1 :]  # noqa: RUF005 (a star is not of Triton's language)


@triton.jit
def exchanged(x, PAIRS: tl.constexpr):
    """A tuple of tiles after the compare–exchanges of a network."""
    for n in tl.static_range(len(PAIRS)):
        x = exchange(x, PAIRS[n][0], PAIRS[n][1])
    return x


@triton.jit
def largest_of_both(a, b, N: tl.constexpr):
    """The N largest of two sorted lists of N, sorted."""
    x = ()
    for n in tl.static_range(N):
        x = x + (tl.where(a[n] > b[N - 1 - n], a[n], b[N - 1 - n]),)  # type: ignore[assignment]  # noqa: RUF005
    return exchanged(x, merging_pairs(N))


@triton.jit
def pack(s, j):
    """Scores and their keys, each pair as one float64: in the order of scores, of equal ones the lower key is larger."""
    bits = (tl.maximum(s, FLOOR) + 0.0).to(tl.int32, bitcast=True)  # nan is hidden, and −0 becomes 0
    low = j ^ ~(bits >> 31)  # where the sign is set, more bits are a smaller number
    return ((bits.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def unpack(x):
    """Scores and keys of packed pairs; key −1 where a cell is hidden."""
    both = x.to(tl.int64, bitcast=True)
    bits = (both >> 32).to(tl.int32)
    s = bits.to(tl.float32, bitcast=True)
    return s, tl.where(s > FLOOR, both.to(tl.int32) ^ ~(bits >> 31), -1)


@triton.jit
def in_halves(tiles, COUNT: tl.constexpr):
    """Twice as many tiles (I, LISTS, COUNT / 2), the even and the odd columns of each."""
    I: tl.constexpr = tiles[0].shape[0]
    parts = ()
    for n in tl.static_range(len(tiles)):
        even, odd = tl.split(tl.reshape(tiles[n], (I, LISTS, COUNT // 2, 2)))
        parts = parts + (even, odd)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@triton.jit
def lane_columns(s):
    """Columns of a tile (I, J) of scores, each lane with its own: a tuple of tiles (I, LISTS, 1)."""
    I: tl.constexpr = s.shape[0]
    COUNT: tl.constexpr = s.shape[1] // LISTS
    # Lane l has the columns 8 c + 2 l + p of a product: neither permutation nor split moves a number.
    s = tl.permute(tl.reshape(s, (I, COUNT // 2, LISTS, 2)), (0, 2, 1, 3))
    columns = (tl.reshape(s, (I, LISTS, COUNT)),)
    for level in tl.static_range(log2(COUNT)):
        columns = in_halves(columns, COUNT >> level)
    return columns


@triton.jit
def merge_tile(s, start, best, N: tl.constexpr):
    """The lists after a tile (I, J) of scores whose keys begin at `start`."""
    I: tl.constexpr = s.shape[0]
    COUNT: tl.constexpr = s.shape[1] // LISTS
    columns = lane_columns(s)
    first = start + 2 * tl.arange(0, LISTS)[None, :]
    for begin in tl.static_range(0, COUNT, N):
        x = ()
        for n in tl.static_range(N):
            x = x + (pack(tl.reshape(columns[begin + n], (I, LISTS)), first + column_at(begin + n, COUNT)),)  # type: ignore[assignment]  # noqa: RUF005
        best = largest_of_both(best, exchanged(x, sorting_pairs(N)), N)
    return best


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def column_at(n, count):
    """The first lane's n-th of `count` columns, when they are split by the lowest bit of their place, and each half again."""
    bits = log2(count)
    place = sum(1 << bits - 1 - bit for bit in range(bits) if n >> bit & 1)
    return place // 2 * 8 + place % 2


@triton.jit
def merge_lists(lists, N: tl.constexpr):
    """The N largest of the lists of every row, sorted, as N vectors (I) of scores and N of keys."""
    scores, keys = (), ()
    for rank in tl.static_range(N):
        top = tl.max(lists[0], 1)
        score, key = unpack(top)
        scores = scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
        keys = keys + (key,)  # type: ignore[assignment]  # noqa: RUF005
        taken, rest = lists[0] == top[:, None], ()
        for n in tl.static_range(N - 1 - rank):
            rest = rest + (tl.where(taken, lists[n + 1], lists[n]),)  # type: ignore[assignment]  # noqa: RUF005
        lists = rest
    return scores, keys


@triton.jit
def topk_network_kernel(
    q, k, k_desc, k_layout, modifiers, strides, caps, mask, row_table, norm, score, index, weight, sizes, heads, heads_per_group, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr,
    N: tl.constexpr, SORTED: tl.constexpr, WEIGHT: tl.constexpr, EVEN_BLOCKS: tl.constexpr, EDGES: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The N largest scores of BLOCK_I rows with their keys, largest first, ties to the lower key. WEIGHT: their weights as well.

    SORTED: numbers that a network sorts, a power of two.
    """
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    none = pack(tl.full([BLOCK_I, LISTS], FLOOR, tl.float32), 2147483647)
    best = ()
    for _ in tl.static_range(SORTED):
        best = best + (none,)  # type: ignore[assignment]  # noqa: RUF005
    first, full_from, full_to, past = key_blocks(start, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    for n in range(full_from, full_to):
        s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                     D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, False)  # fmt: skip
        best = merge_tile(s, n * BLOCK_J, best, SORTED)
    if EDGES:
        for edge in range(0, full_from - first + past - full_to):
            n = tl.where(edge < full_from - first, first + edge, full_to + edge - (full_from - first))
            s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                         D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, True)  # fmt: skip
            best = merge_tile(s, n * BLOCK_J, best, SORTED)
    n = tl.arange(0, SORTED)
    scores, keys = merge_lists(best, SORTED)
    scores, keys = side_by_side(scores, n, SORTED), side_by_side(keys, n, SORTED)
    score_out = tl.where(keys >= 0, scores * (scale2 if SCALE_FOLDED else 1.0) * LN2, float("-inf"))
    store_tile(score, b, h, i, n, score_out, sizes.i, N)
    store_tile(index, b, h, i, n, keys, sizes.i, N)
    if WEIGHT:  # from the stored score: for large scores the unrounded one would disagree with it
        m, l = load_norm(norm, b, h, i, sizes)
        store_tile(weight, b, h, i, n, tl.exp2((score_out - m[:, None]) * LOG2E) / l[:, None], sizes.i, N)


__all__ = ["topk_network_kernel"]
