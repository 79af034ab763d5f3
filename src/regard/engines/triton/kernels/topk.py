"""The largest scores of every row: bounds, and a search that serves every problem.

The forward pass stores the largest score of every few tiles (`tile_maxima`). Their N-th largest is a bound that hardly more than N keys
of a row reach (`topk_bound_kernel`); `topk_lists` lists and sorts these. `topk_search_kernel` walks the keys twice, once for a bound and once to
insert, tile by tile, what passes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .additive import tanh_sum
from .forward import schedule_tile
from .tile_ops import (
    FLOOR,
    LN2,
    LOG2E,
    apply_score_mods,
    head_ptr,
    key_blocks,
    load_block,
    load_tile,
    product,
    store_tile,
    visible,
)


@triton.jit
def score_tile(
    q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr,
    EVEN_BLOCKS: tl.constexpr, BLOCK_J: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores of tile n, hidden cells FLOOR. One function, so that every walk computes the same bits."""
    j = n * BLOCK_J + tl.arange(0, BLOCK_J)
    hk = h // sizes.k_group
    k_tile = load_block(
        k,
        k_desc,
        k_layout,
        b,
        hk,
        n * BLOCK_J,
        j,
        d,
        sizes.j,
        D,
        TMA and (EVEN_BLOCKS or not EDGE),
        EDGE and not EVEN_BLOCKS,
    )
    s = product(q_tile, k_tile.T, FP32)
    s, slope = apply_score_mods(
        s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
    )
    if EDGE:
        s = tl.where(visible(i[:, None], j[None, :], b, h, 0, mask, sizes, MASK), s, FLOOR)
    return s


@triton.jit
def topk_bound_kernel(tile_maxima, out, I, groups, N: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """`topk_bound` of BLOCK rows of a head from `tile_maxima` (b, h, groups, i)."""
    blocks = tl.cdiv(I, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, BLOCK_GROUPS)
    inside = (i[:, None] < I) & (g[None, :] < groups)
    largest = tl.load(tile_maxima + head * groups * I + g[None, :] * I + i[:, None], mask=inside, other=FLOOR)
    tl.store(out + head * I + i, topk_bound(largest, g, N), mask=i < I)


@triton.jit
def load_norm(norm, b, h, i, sizes):
    """m and l of rows, such that e^(s − m) / l is a weight, and 0 where s is −inf."""
    at = head_ptr(norm, b, h) + i.to(tl.int64) * norm.i
    m = tl.load(at, mask=i < sizes.i, other=0.0)
    l = tl.load(at + 1, mask=i < sizes.i, other=1.0)
    return tl.where(l == 0.0, 0.0, m), tl.where(l == 0.0, 1.0, l)


@triton.jit
def insert_topk(s, j, best, keys, threshold, N: tl.constexpr):
    """Merge one tile into the N largest scores of every row and their keys.

    One round inserts the largest remaining score of every row; rounds end when no row has a score above its threshold.
    """
    n = tl.arange(0, best.shape[1])
    while tl.max(tl.max(s, 1) - threshold, 0) > 0:
        top = tl.max(s, 1)
        column = tl.min(tl.where(s == top[:, None], j[None, :], 2147483647), 1)
        s = tl.where(j[None, :] == column[:, None], FLOOR, s)
        # Its rank: after all larger scores, and after equal ones with a lower key.
        before = (best > top[:, None]) | ((best == top[:, None]) & (keys < column[:, None]))
        rank = tl.sum(before.to(tl.int32), 1)
        moved = tl.where(n[None, :] < rank[:, None], n[None, :], n[None, :] - 1)
        moved = tl.maximum(moved, 0)
        new = n[None, :] == rank[:, None]
        best = tl.where(new, top[:, None], tl.gather(best, moved, 1))
        keys = tl.where(new, column[:, None], tl.gather(keys, moved, 1))
        threshold = tl.maximum(threshold, tl.sum(tl.where(n[None, :] == N - 1, best, 0.0), 1))
    return best, keys, threshold


@triton.jit
def insert_sorted(value, key, best, keys, N: tl.constexpr):
    """A score and its key in the N best of every row, largest first; `best` and `keys` are N vectors each, one number a row.

    Vectors, not a tile: a thread holds all N of its rows, and nothing is exchanged. An equal score stays behind those before it.
    """
    new_best, new_at = (), ()
    moved, moved_key = value, key  # what goes into the next place: the new score, then each that it displaced
    for n in tl.static_range(N):
        # Scores descend: what is larger than this one is larger than all behind. `moved` may equal one, and would stop there.
        better = value > best[n]
        new_best = new_best + (tl.where(better, moved, best[n]),)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no star)
        new_at = new_at + (tl.where(better, moved_key, keys[n]),)  # type: ignore[assignment]  # noqa: RUF005
        moved = tl.where(better, best[n], moved)
        moved_key = tl.where(better, keys[n], moved_key)
    return new_best, new_at


@triton.jit
def insert_topk_sorted(s, j, best, keys, threshold, N: tl.constexpr):
    """The N best scores of every row and their keys, with one more tile looked through: as many rounds as the row with the most
    finds has."""
    finds = tl.max(tl.sum((s > threshold[:, None]).to(tl.int32), 1), 0)
    for _ in range(0, tl.minimum(finds, N)):
        top = tl.max(s, 1)
        key = tl.min(tl.where(s == top[:, None], j[None, :], 2147483647), 1)
        s = tl.where(j[None, :] == key[:, None], FLOOR, s)
        best, keys = insert_sorted(top, key, best, keys, N)
    return best, keys, tl.maximum(threshold, best[N - 1])


@triton.jit
def group_bound(largest, N: tl.constexpr, GROUPS: tl.constexpr):
    """A bound just below the N-th largest of GROUPS maxima, from the largest score of every column of a tile (I, J).

    A group is a part of what one thread holds of a row of a product, so that its maximum takes no exchange.
    """
    I: tl.constexpr = largest.shape[0]
    J: tl.constexpr = largest.shape[1]
    x = tl.reshape(largest, [I, GROUPS // 4, J // 2 // GROUPS, 4, 2])
    x = tl.reshape(tl.max(tl.max(x, 4), 2), [I, GROUPS])
    nth = tl.max(x, 1)
    for _ in range(1, N):  # equal maxima go together: the bound may be lower than it need be
        x = tl.where(x == nth[:, None], FLOOR, x)
        nth = tl.max(x, 1)
    return tl.maximum(nth - tl.abs(nth) * 1e-6 - 1e-30, FLOOR)


@triton.jit
def scan_tiles(
    q_tile, k, tanh_arg, k_desc, k_layout, modifiers, strides, caps, mask, sizes, i, d, b, h, r, best, keys, threshold, scale, begin, end,
    SIMILARITY: tl.constexpr, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, BLOCK_J: tl.constexpr, EDGE: tl.constexpr,
    SEARCH: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Walk key blocks `begin` to `end`. SEARCH: insert the N largest, by `insert_topk_sorted` or `insert_topk`; else `best` holds the
    largest of every BLOCK_J-th key."""
    hk = h // sizes.k_group
    for n in range(begin, end):
        j = n * BLOCK_J + tl.arange(0, BLOCK_J)
        if SIMILARITY == "product":
            k_tile = load_block(k, k_desc, k_layout, b, hk, n * BLOCK_J, j, d, sizes.j, D, TMA and not EDGE, EDGE)
            s = product(q_tile, k_tile.T, FP32)
        else:
            s = tanh_sum(tanh_arg, i, j, b, h, hk, sizes, SIMILARITY, False)
        s, _ = apply_score_mods(
            s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
        )
        if EDGE:
            s = tl.where(visible(i[:, None], j[None, :], b, h, r, mask, sizes, MASK), s, FLOOR)
        if SEARCH and SORTED:
            best, keys, threshold = insert_topk_sorted(s, j, best, keys, threshold, N)
        elif SEARCH:
            best, keys, threshold = insert_topk(s, j, best, keys, threshold, N)
        else:
            best = tl.maximum(best, s)
    return best, keys, threshold


@triton.jit
def side_by_side(vectors, n, N: tl.constexpr):
    """N vectors (I) as a tile (I, n)."""
    matrix = vectors[0][:, None] + 0 * n[None, :]
    for k in tl.static_range(1, N):
        matrix = tl.where(n[None, :] == k, vectors[k][:, None], matrix)
    return matrix


@triton.jit
def topk_bound(largest, group_ids, N: tl.constexpr):
    """A bound just below the N-th largest score of every row, from the largest of some groups of keys: the N-th largest
    of these is at most the N-th largest of all. `group_ids` numbers the groups."""
    nth = tl.max(largest, 1)
    for _ in range(1, N):
        column = tl.min(tl.where(largest == nth[:, None], group_ids[None, :], 2147483647), 1)
        largest = tl.where(group_ids[None, :] == column[:, None], FLOOR, largest)
        nth = tl.max(largest, 1)
    return tl.maximum(nth - tl.abs(nth) * 1e-6 - 1e-30, FLOOR)


@triton.jit
def topk_search_kernel(
    q, k, tanh_arg, k_desc, k_layout, modifiers, strides, caps, mask, row_table, norm, score, index, weight, sizes, heads, heads_per_group,
    scale, scale2,
    SIMILARITY: tl.constexpr, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, SORTED: tl.constexpr,
    BOUND: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The N largest scores of BLOCK_I rows with their keys, largest first, ties to the lower key. WEIGHT: their weights as well.

    SORTED: few enough that a
    thread holds those of its rows. BOUND: keys are more than a tile, so that a bound pays.
    """
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    block, head = schedule_tile(blocks, heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    q_tile = i
    if SIMILARITY == "product":
        q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    keys = tl.full([BLOCK_I], -1, tl.int32)
    threshold = tl.where(i < sizes.i, FLOOR, float("inf"))  # rows past the end insert nothing
    # Two walks: the first for a bound that few keys pass, the second inserts those. Without a bound nearly every tile has
    # insertions, and one insertion costs more than a tile.
    best = tl.full([BLOCK_I, BLOCK_J], FLOOR, tl.float32)
    for SEARCH in tl.static_range(0 if BOUND else 1, 2):
        if SEARCH and SORTED:
            if BOUND:
                threshold = tl.maximum(threshold, group_bound(best, N, GROUPS))
            none, lowest = keys, tl.full([BLOCK_I], FLOOR, tl.float32)
            best, keys = (), ()
            for _ in tl.static_range(N):
                best, keys = best + (lowest,), keys + (none,)  # noqa: RUF005 (a star is not of Triton's language)
        elif SEARCH:
            if BOUND and N <= BLOCK_J:
                threshold = tl.maximum(threshold, topk_bound(best, tl.arange(0, BLOCK_J), N))
            best = tl.full([BLOCK_I, BLOCK_N], FLOOR, tl.float32)
            keys = tl.full([BLOCK_I, BLOCK_N], -1, tl.int32)
        for r in range(0, mask.n_intervals):
            first, full_from, full_to, past = key_blocks(start, b, r, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
            # Edge, fully visible, edge: in the order of the keys, so that an equal score never displaces an earlier one.
            for SECTION in tl.static_range(3):
                begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
                end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
                best, keys, threshold = scan_tiles(
                    q_tile, k, tanh_arg, k_desc, k_layout, modifiers, strides, caps, mask, sizes, i, d, b, h, r, best, keys, threshold, scale,
                    begin, end, SIMILARITY, D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, N, BLOCK_J, SECTION != 1, SEARCH == 1, SORTED,
                )  # fmt: skip
    factor = scale2 if SCALE_FOLDED else 1.0
    n = tl.arange(0, BLOCK_N)
    if SORTED:
        best, keys = side_by_side(best, n, N), side_by_side(keys, n, N)
    score_out = tl.where(keys >= 0, best * factor * LN2, float("-inf"))
    store_tile(score, b, h, i, n, score_out, sizes.i, N)
    store_tile(index, b, h, i, n, keys, sizes.i, N)
    if WEIGHT:
        m, l = load_norm(norm, b, h, i, sizes)
        store_tile(weight, b, h, i, n, tl.exp2((score_out - m[:, None]) * LOG2E) / l[:, None], sizes.i, N)


__all__ = ["topk_bound_kernel", "topk_search_kernel"]
