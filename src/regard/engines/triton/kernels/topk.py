"""The largest scores of every row.

Five steps. The forward pass stores the largest score of every few tiles (`tile_maxima`). Their N-th largest is a bound
that hardly more than N keys of a row reach (`topk_bound_kernel`). `mark_candidates_kernel` walks the tiles again and sets a
bit for every key above the bound, so that no tile waits for a search. `compact_kernel` turns the bits into lists of keys, and
`rescore_sort_kernel` computes their scores and sorts them. Rows where this fails, since too many keys are equal or too few
tiles are visible, are marked in `flags`, and `topk_search_kernel`, which serves every problem, searches them tile by tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..launcher import INTERPRETED
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
    load_row_values,
    load_tile,
    product,
    store_tile,
    visible,
)

#: The interpreter has no device instructions.
INTERPRETER = tl.constexpr(INTERPRETED)


@triton.jit
def lowest_set_bit(bits):
    """Index of the lowest set bit of each word; without ffs, from the exponent of the bit as a float."""
    if not INTERPRETER:
        return libdevice.ffs(bits) - 1
    low = (bits & -bits).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def popcount(bits):
    """Number of set bits of each word."""
    if not INTERPRETER:
        return libdevice.popc(bits)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits * 0x01010101) >> 24


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
def mark_candidates_kernel(
    q, k, k_desc, k_layout, modifiers, strides, caps, mask, row_table, bounds, marks, words, min_keys, first_program, sizes, heads, heads_per_group,
    scale, scale2, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    TMA: tl.constexpr, N: tl.constexpr, EVEN_BLOCKS: tl.constexpr, EDGES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mark keys of BLOCK_I rows that may be among the N largest. Each row has `words` in `marks`: bit n of word
    t · BLOCK_J + column is key `column` of tile 32 t + n of those that these rows see.

    `min_keys`: with fewer visible keys `bounds` are too low, and the tiles are walked once more for a better bound.
    `first_program`: number of the first program of this launch.
    """
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group, first_program)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    first, full_from, full_to, past = key_blocks(start, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    bound = load_row_values(bounds, b, h, i, sizes, FLOOR)
    if (past - first) * BLOCK_J < min_keys:
        largest = tl.full([BLOCK_I, BLOCK_J], FLOOR, tl.float32)
        for n in range(first, past):
            s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                         D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, EDGES)  # fmt: skip
            largest = tl.maximum(largest, s)
        bound = group_bound(largest, N, GROUPS)
        tl.store(bounds + head.to(tl.int64) * sizes.i + i, bound, mask=i < sizes.i)
    own = marks + (tl.program_id(0) * BLOCK_I).to(tl.int64) * words
    at = tl.arange(0, BLOCK_I)[:, None] * words + tl.arange(0, BLOCK_J)[None, :]
    for begin in range(first, past, 32):
        end = tl.minimum(begin + 32, past)
        marked = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
        for n in range(tl.maximum(begin, full_from), tl.minimum(end, full_to)):
            s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                         D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, False)  # fmt: skip
            marked = marked | tl.where(s > bound[:, None], 1 << (n - begin), 0)
        if EDGES:
            left = tl.maximum(tl.minimum(end, full_from) - begin, 0)
            right = tl.maximum(begin, full_to)
            for edge in range(0, left + tl.maximum(end - right, 0)):
                n = tl.where(edge < left, begin + edge, right + edge - left)
                s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                             D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, True)  # fmt: skip
                marked = marked | tl.where(s > bound[:, None], 1 << (n - begin), 0)
        tl.store(own + (begin - first) // 32 * BLOCK_J + at, marked)


@triton.jit
def compact_kernel(
    marks, words, bounds, candidates, counts, flags, row_table, mask, first_program, sizes, heads, heads_per_group, MASK: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Lists of the marked keys and their counts; a flag for row blocks that must be searched instead."""
    parts: tl.constexpr = BLOCK_I // ROWS
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    owner = tl.program_id(0) // parts
    block, head = schedule_tile(blocks, heads, heads_per_group, first_program + owner - tl.program_id(0))
    b, h = head // sizes.h, head % sizes.h
    local = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    i = block * BLOCK_I + local
    first, full_from, full_to, past = key_blocks(block * BLOCK_I, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    # `sizes.i >> 31` is 0 but opaque to the compiler, so that it does not vectorise this load: four columns a thread would
    # then be routed through shared memory to the threads that store them.
    column = tl.arange(0, BLOCK_J)[None, :] ^ (sizes.i >> 31)
    own = marks + (owner * BLOCK_I).to(tl.int64) * words
    # 32-bit offsets within a head: 64-bit addresses for every word would take all registers.
    written = candidates + head.to(tl.int64) * sizes.i * CAPACITY
    count = tl.zeros([ROWS], tl.int32)
    for begin in range(first, past, 32):
        marked = tl.load(own + (begin - first) // 32 * BLOCK_J + local[:, None] * words + column)
        bits = popcount(marked)
        slot = count[:, None] + tl.cumsum(bits, 1) - bits
        count += tl.sum(bits, 1)
        for n in range(0, tl.max(tl.max(bits, 1), 0)):
            j = (begin + lowest_set_bit(marked)) * BLOCK_J + column
            here = (bits > n) & (slot + n < CAPACITY) & (i[:, None] < sizes.i)
            tl.store(written + (i[:, None] * CAPACITY + slot + n), j, mask=here)
            marked = marked & (marked - 1)
    tl.store(counts + head.to(tl.int64) * sizes.i + i, count, mask=i < sizes.i)
    # More candidates than fit, or fewer than N although more keys are visible: search these rows.
    bound = load_row_values(bounds, b, h, i, sizes, FLOOR)
    lost = (i < sizes.i) & ((count > CAPACITY) | ((count < N) & (bound > FLOOR)))
    tl.store(flags + head * blocks + block, 1, mask=tl.max(lost.to(tl.int32), 0) > 0)


@triton.jit
def load_norm(norm, b, h, i, sizes):
    """m and l of rows, such that e^(s − m) / l is a weight, and 0 where s is −inf."""
    at = head_ptr(norm, b, h) + i.to(tl.int64) * norm.i
    m = tl.load(at, mask=i < sizes.i, other=0.0)
    l = tl.load(at + 1, mask=i < sizes.i, other=1.0)
    return tl.where(l == 0.0, 0.0, m), tl.where(l == 0.0, 1.0, l)


@triton.jit
def rescore_sort_kernel(
    q, k, candidates, counts, modifiers, strides, caps, mask, norm, score, index, weight, sizes, heads, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    N: tl.constexpr, WEIGHT: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The N largest of the candidates, largest first, ties to the lower key. WEIGHT: their weights too."""
    blocks = tl.cdiv(sizes.i, ROWS)
    head = tl.program_id(0) // blocks
    b, h = head // sizes.h, head % sizes.h
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    count = tl.load(head_ptr(counts, b, h) + i.to(tl.int64) * counts.i, mask=i < sizes.i, other=0)
    count = tl.minimum(count, CAPACITY)
    most = tl.max(count, 0)
    q_ptr = head_ptr(q, b, h) + i.to(tl.int64) * q.i
    written = head_ptr(candidates, b, h) + i.to(tl.int64)[:, None] * candidates.i
    s = tl.full([ROWS, CAPACITY // SLOTS, SLOTS], FLOOR, tl.float32)
    for n in tl.static_range(CAPACITY // SLOTS):  # most rows need the first slots only
        if n * SLOTS < most:
            slot = n * SLOTS + tl.arange(0, SLOTS)[None, :]
            valid = slot < count[:, None]
            j = tl.load(written + slot, mask=valid, other=0)
            k_ptrs = head_ptr(k, b, h // sizes.k_group) + j.to(tl.int64) * k.i
            terms = tl.zeros([ROWS, SLOTS, BLOCK_D], tl.float32)
            for begin in tl.static_range(0, D, BLOCK_D):
                d = begin + tl.arange(0, BLOCK_D)
                x = tl.load(
                    q_ptr[:, None] + d[None, :] * q.j, mask=(i[:, None] < sizes.i) & (d[None, :] < D), other=0.0
                )
                inside = valid[:, :, None] & (d[None, None, :] < D)
                y = tl.load(k_ptrs[:, :, None] + d[None, None, :] * k.j, mask=inside, other=0.0)
                terms += x[:, None, :].to(tl.float32) * y.to(tl.float32)
            part, slope = apply_score_mods(
                tl.sum(terms, 2), i[:, None], j, b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0,
            )  # fmt: skip
            part = tl.where(valid, part, FLOOR)
            own = tl.arange(0, CAPACITY // SLOTS)[None, :, None] == n
            s = tl.where(own, part[:, None, :], s)
    s = tl.reshape(s, [ROWS, CAPACITY])
    slot = tl.arange(0, CAPACITY)[None, :]
    valid = slot < count[:, None]
    j = tl.load(written + slot, mask=valid, other=-1)
    factor = scale2 if SCALE_FOLDED else 1.0
    m, l = i * 0.0, i * 0.0
    if WEIGHT:
        m, l = load_norm(norm, b, h, i, sizes)
    for rank in tl.static_range(N):
        top = tl.max(s, 1)
        key = tl.min(tl.where((s == top[:, None]) & valid, j, 2147483647), 1)
        some = key < 2147483647
        out = i.to(tl.int64) * score.i + rank
        score_out = tl.where(some, top * factor * LN2, float("-inf"))
        tl.store(head_ptr(score, b, h) + out, score_out, mask=i < sizes.i)
        tl.store(head_ptr(index, b, h) + out, tl.where(some, key, -1), mask=i < sizes.i)
        if WEIGHT:  # from the stored score: for large scores the unrounded one would disagree with it
            tl.store(head_ptr(weight, b, h) + out, tl.exp2((score_out - m) * LOG2E) / l, mask=i < sizes.i)
        valid = valid & (j != key[:, None])
        s = tl.where(valid, s, FLOOR)


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
    q, k, tanh_arg, k_desc, k_layout, modifiers, strides, caps, mask, row_table, norm, score, index, weight, flags, sizes, heads, heads_per_group,
    scale, scale2,
    SIMILARITY: tl.constexpr, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, ROWS_PER_FLAG: tl.constexpr, SORTED: tl.constexpr,
    BOUND: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The N largest scores of BLOCK_I rows with their keys, largest first, ties to the lower key. WEIGHT: their weights as well.

    FLAGGED: only where a flag is set; each stands for as many rows as this says, 0 where there are none. SORTED: few enough that a
    thread holds those of its rows. BOUND: keys are more than a tile, so that a bound pays.
    """
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    block, head = schedule_tile(blocks, heads, heads_per_group)
    if ROWS_PER_FLAG > 0:
        if tl.load(flags + head * tl.cdiv(sizes.i, ROWS_PER_FLAG) + block * BLOCK_I // ROWS_PER_FLAG) == 0:
            return
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


__all__ = ["compact_kernel", "mark_candidates_kernel", "rescore_sort_kernel", "topk_bound_kernel", "topk_search_kernel"]
