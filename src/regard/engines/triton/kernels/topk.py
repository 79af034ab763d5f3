"""The largest scores of every row.

In steps that each have little to do: the forward pass notes the largest score of every few tiles (`bests`), whose
N-th largest is a bound that hardly more than N keys of a row reach (`bound_kernel`); `ballot_kernel` walks the tiles once
more and only marks who reaches it, a bit for each tile, so that no tile waits for a search; `count_kernel` writes the
marked keys down; `settle_kernel` computes those few scores and sorts them. Rows where this fails, since too many keys
are equal or too few tiles are seen, are named in `flags` and searched tile by tile in `search_kernel`, which serves
everything. Imports `tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..launcher import INTERPRETED
from .additive import tanh_sum
from .forward import in_order
from .tile_ops import FLOOR, LN2, LOG2E, fetch, key_blocks, of_rows, place, product, put_tile, scored, tile, visible

#: The interpreter knows no instructions of the device.
PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def places_of_bits(word):
    """Which is the lowest bit of each word: its place stands in the exponent of a float."""
    if not PLAIN:
        return libdevice.ffs(word) - 1
    low = (word & -word).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def bits_in(word):
    """How many bits of each word are set."""
    if not PLAIN:
        return libdevice.popc(word)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@triton.jit
def products(
    rows, k, k_desc, k_map, steps, strides, caps, seen, sizes, n, i, d, b, h, scale,
    D: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr,
    BLOCK_J: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The scores of rows in tile n, as every walk of this kernel computes them."""
    j = n * BLOCK_J + tl.arange(0, BLOCK_J)
    hk = h // sizes.k_group
    near = fetch(k_desc, k_map, b, hk, n * BLOCK_J) if TMA else tile(k, b, hk, j, d, sizes.j, D, False)
    s = product(rows, near.T, EXACT)
    s, slope = scored(s, i[:, None], j[None, :], b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, 0)
    if EDGE:
        s = tl.where(visible(i[:, None], j[None, :], b, h, 0, seen, sizes, MASK), s, FLOOR)
    return s


@triton.jit
def bound_kernel(bests, out, I, groups, N: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """A bound for BLOCK rows of a head from the largest products of their groups of tiles, (b, h, groups, i)."""
    blocks = tl.cdiv(I, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, BLOCK_GROUPS)
    inside = (i[:, None] < I) & (g[None, :] < groups)
    largest = tl.load(bests + head * groups * I + g[None, :] * I + i[:, None], mask=inside, other=FLOOR)
    tl.store(out + head * I + i, least_wanted(largest, g, N), mask=i < I)


@triton.jit
def ballot_kernel(
    q, k, k_desc, k_map, steps, strides, caps, seen, row_table, bounds, marks, words, enough, program, sizes, heads, per_group,
    scale, scale2, D: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr, EXACT: tl.constexpr,
    TMA: tl.constexpr, N: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Which keys of BLOCK_I rows may be among the N best. Each row has `words` in `marks`: bit n of word t · BLOCK_J + column
    is key `column` of the tile 32 t + n of those that these rows see.

    `enough`: with as many keys, `bounds` are good; with fewer the tiles are walked once more for one. `program`: the number
    of the first one of this launch.
    """
    block, head = in_order(tl.cdiv(sizes.i, BLOCK_I), heads, per_group, program)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    first, full_from, full_to, past = key_blocks(start, b, 0, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
    rows = tile(q, b, h, i, d, sizes.i, D, True)
    bound = of_rows(bounds, b, h, i, sizes, FLOOR)
    if (past - first) * BLOCK_J < enough:
        largest = tl.full([BLOCK_I, BLOCK_J], FLOOR, tl.float32)
        for n in range(first, past):
            s = products(rows, k, k_desc, k_map, steps, strides, caps, seen, sizes, n, i, d, b, h, scale,
                         D, STEPS, MASK, FOLD, EXACT, TMA, BLOCK_J, MASK != "none")  # fmt: skip
            largest = tl.maximum(largest, s)
        bound = least_wanted(largest, tl.arange(0, BLOCK_J), N)
        tl.store(bounds + head.to(tl.int64) * sizes.i + i, bound, mask=i < sizes.i)
    own = marks + (tl.program_id(0) * BLOCK_I).to(tl.int64) * words
    at = tl.arange(0, BLOCK_I)[:, None] * words + tl.arange(0, BLOCK_J)[None, :]
    for begin in range(first, past, 32):
        end = tl.minimum(begin + 32, past)
        ballot = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
        for n in range(tl.maximum(begin, full_from), tl.minimum(end, full_to)):
            s = products(rows, k, k_desc, k_map, steps, strides, caps, seen, sizes, n, i, d, b, h, scale,
                         D, STEPS, MASK, FOLD, EXACT, TMA, BLOCK_J, False)  # fmt: skip
            ballot = ballot | tl.where(s > bound[:, None], 1 << (n - begin), 0)
        if MASK != "none":
            left = tl.maximum(tl.minimum(end, full_from) - begin, 0)
            right = tl.maximum(begin, full_to)
            for edge in range(0, left + tl.maximum(end - right, 0)):
                n = tl.where(edge < left, begin + edge, right + edge - left)
                s = products(rows, k, k_desc, k_map, steps, strides, caps, seen, sizes, n, i, d, b, h, scale,
                             D, STEPS, MASK, FOLD, EXACT, TMA, BLOCK_J, True)  # fmt: skip
                ballot = ballot | tl.where(s > bound[:, None], 1 << (n - begin), 0)
        tl.store(own + (begin - first) // 32 * BLOCK_J + at, ballot)


@triton.jit
def count_kernel(
    marks, words, bounds, found, counts, flags, row_table, seen, program, sizes, heads, per_group, MASK: tl.constexpr,
    N: tl.constexpr, ROOM: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Write down the keys that were marked, and how many a row has; a flag for blocks of rows where they are no answer."""
    parts: tl.constexpr = BLOCK_I // ROWS
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    owner = tl.program_id(0) // parts
    block, head = in_order(blocks, heads, per_group, program + owner - tl.program_id(0))
    b, h = head // sizes.h, head % sizes.h
    local = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    i = block * BLOCK_I + local
    first, full_from, full_to, past = key_blocks(block * BLOCK_I, b, 0, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
    # Zero, which the compiler does not know: were the columns neighbours to it, it would load four at a time, and then carry every
    # key through shared memory to the thread that writes it.
    column = tl.arange(0, BLOCK_J)[None, :] ^ (sizes.i >> 31)
    own = marks + (owner * BLOCK_I).to(tl.int64) * words
    # Within a head places are counted in 32 bits: wide addresses for every word would take all registers.
    written = found + head.to(tl.int64) * sizes.i * ROOM
    count = tl.zeros([ROWS], tl.int32)
    for begin in range(first, past, 32):
        ballot = tl.load(own + (begin - first) // 32 * BLOCK_J + local[:, None] * words + column)
        bits = bits_in(ballot)
        slot = count[:, None] + tl.cumsum(bits, 1) - bits
        count += tl.sum(bits, 1)
        for n in range(0, tl.max(tl.max(bits, 1), 0)):
            j = (begin + places_of_bits(ballot)) * BLOCK_J + column
            here = (bits > n) & (slot + n < ROOM) & (i[:, None] < sizes.i)
            tl.store(written + (i[:, None] * ROOM + slot + n), j, mask=here)
            ballot = ballot & (ballot - 1)
    tl.store(counts + head.to(tl.int64) * sizes.i + i, count, mask=i < sizes.i)
    # Too many keys, or fewer than N although there are more: the search decides.
    bound = of_rows(bounds, b, h, i, sizes, FLOOR)
    lost = (i < sizes.i) & ((count > ROOM) | ((count < N) & (bound > FLOOR)))
    tl.store(flags + head * blocks + block, 1, mask=tl.max(lost.to(tl.int32), 0) > 0)


@triton.jit
def norm_of(norm, b, h, i, sizes):
    """m and l of rows, such that e^(s − m) / l is a weight, and 0 where s is −inf."""
    at = place(norm, b, h) + i.to(tl.int64) * norm.i
    m = tl.load(at, mask=i < sizes.i, other=0.0)
    l = tl.load(at + 1, mask=i < sizes.i, other=1.0)
    return tl.where(l == 0.0, 0.0, m), tl.where(l == 0.0, 1.0, l)


@triton.jit
def settle_kernel(
    q, k, found, counts, steps, strides, caps, seen, norm, score, index, weight, sizes, heads, scale, scale2,
    D: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr, EXACT: tl.constexpr,
    N: tl.constexpr, WEIGHT: tl.constexpr, ROOM: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The N best of the keys that were taken down, largest first, ties to the lower key. WEIGHT: their weights as well."""
    blocks = tl.cdiv(sizes.i, ROWS)
    head = tl.program_id(0) // blocks
    b, h = head // sizes.h, head % sizes.h
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    count = tl.load(place(counts, b, h) + i.to(tl.int64) * counts.i, mask=i < sizes.i, other=0)
    count = tl.minimum(count, ROOM)
    most = tl.max(count, 0)
    far = place(q, b, h) + i.to(tl.int64) * q.i
    written = place(found, b, h) + i.to(tl.int64)[:, None] * found.i
    s = tl.full([ROWS, ROOM // SLOTS, SLOTS], FLOOR, tl.float32)
    for n in tl.static_range(ROOM // SLOTS):  # most rows need the first slots only
        if n * SLOTS < most:
            slot = n * SLOTS + tl.arange(0, SLOTS)[None, :]
            there = slot < count[:, None]
            j = tl.load(written + slot, mask=there, other=0)
            near = place(k, b, h // sizes.k_group) + j.to(tl.int64) * k.i
            terms = tl.zeros([ROWS, SLOTS, PART], tl.float32)
            for begin in tl.static_range(0, D, PART):
                d = begin + tl.arange(0, PART)
                x = tl.load(far[:, None] + d[None, :] * q.j, mask=(i[:, None] < sizes.i) & (d[None, :] < D), other=0.0)
                inside = there[:, :, None] & (d[None, None, :] < D)
                y = tl.load(near[:, :, None] + d[None, None, :] * k.j, mask=inside, other=0.0)
                terms += x[:, None, :].to(tl.float32) * y.to(tl.float32)
            part, slope = scored(
                tl.sum(terms, 2), i[:, None], j, b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, 0
            )
            part = tl.where(there, part, FLOOR)
            own = tl.arange(0, ROOM // SLOTS)[None, :, None] == n
            s = tl.where(own, part[:, None, :], s)
    s = tl.reshape(s, [ROWS, ROOM])
    slot = tl.arange(0, ROOM)[None, :]
    there = slot < count[:, None]
    j = tl.load(written + slot, mask=there, other=-1)
    factor = scale2 if FOLD else 1.0
    m, l = i * 0.0, i * 0.0
    if WEIGHT:
        m, l = norm_of(norm, b, h, i, sizes)
    for rank in tl.static_range(N):
        top = tl.max(s, 1)
        key = tl.min(tl.where((s == top[:, None]) & there, j, 2147483647), 1)
        some = key < 2147483647
        out = i.to(tl.int64) * score.i + rank
        told = tl.where(some, top * factor * LN2, float("-inf"))
        tl.store(place(score, b, h) + out, told, mask=i < sizes.i)
        tl.store(place(index, b, h) + out, tl.where(some, key, -1), mask=i < sizes.i)
        if WEIGHT:  # from the score as it is told: where both are large, each was rounded on its way there
            tl.store(place(weight, b, h) + out, tl.exp2((told - m) * LOG2E) / l, mask=i < sizes.i)
        there = there & (j != key[:, None])
        s = tl.where(there, s, FLOOR)


@triton.jit
def kept(s, j, best, at, threshold, N: tl.constexpr):
    """The N best scores of every row and their keys, with one more tile looked through.

    Only rows that found something better do work: a tile is searched as often as its luckiest row has finds.
    """
    n = tl.arange(0, best.shape[1])
    while tl.max(tl.max(s, 1) - threshold, 0) > 0:
        top = tl.max(s, 1)
        column = tl.min(tl.where(s == top[:, None], j[None, :], 2147483647), 1)
        s = tl.where(j[None, :] == column[:, None], FLOOR, s)
        # Where it belongs: after all that are better, and after equals with a lower key.
        before = (best > top[:, None]) | ((best == top[:, None]) & (at < column[:, None]))
        rank = tl.sum(before.to(tl.int32), 1)
        moved = tl.where(n[None, :] < rank[:, None], n[None, :], n[None, :] - 1)
        moved = tl.maximum(moved, 0)
        new = n[None, :] == rank[:, None]
        best = tl.where(new, top[:, None], tl.gather(best, moved, 1))
        at = tl.where(new, column[:, None], tl.gather(at, moved, 1))
        threshold = tl.maximum(threshold, tl.sum(tl.where(n[None, :] == N - 1, best, 0.0), 1))
    return best, at, threshold


@triton.jit
def looked_through(
    rows, k, pair, k_desc, k_map, steps, strides, caps, seen, sizes, i, d, b, h, r, best, at, threshold, scale, begin, end,
    PAIR: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, BLOCK_J: tl.constexpr, EDGE: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """Some blocks of keys: `kept` where SEARCH; before, the largest of every BLOCK_J-th key, in `best`."""
    hk = h // sizes.k_group
    for n in range(begin, end):
        j = n * BLOCK_J + tl.arange(0, BLOCK_J)
        if PAIR == "product":
            if TMA and not EDGE:
                near = fetch(k_desc, k_map, b, hk, n * BLOCK_J)
            else:
                near = tile(k, b, hk, j, d, sizes.j, D, EDGE)
            s = product(rows, near.T, EXACT)
        else:
            s = tanh_sum(pair, i, j, b, h, hk, sizes, PAIR, False)
        s, _ = scored(s, i[:, None], j[None, :], b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, 0)
        if EDGE:
            s = tl.where(visible(i[:, None], j[None, :], b, h, r, seen, sizes, MASK), s, FLOOR)
        if SEARCH:
            best, at, threshold = kept(s, j, best, at, threshold, N)
        else:
            best = tl.maximum(best, s)
    return best, at, threshold


@triton.jit
def least_wanted(largest, places, N: tl.constexpr):
    """A bound just below the N-th largest of every row: of the largest of some groups of keys, the N-th is no better
    than the N-th of all. `places` numbers the groups."""
    nth = tl.max(largest, 1)
    for _ in range(1, N):
        column = tl.min(tl.where(largest == nth[:, None], places[None, :], 2147483647), 1)
        largest = tl.where(places[None, :] == column[:, None], FLOOR, largest)
        nth = tl.max(largest, 1)
    return tl.maximum(nth - tl.abs(nth) * 1e-6 - 1e-30, FLOOR)


@triton.jit
def search_kernel(
    q, k, pair, k_desc, k_map, steps, strides, caps, seen, row_table, norm, score, index, weight, flags, sizes, heads, per_group,
    scale, scale2,
    PAIR: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, FLAGGED: tl.constexpr,
):  # fmt: skip
    """The N largest scores of BLOCK_I rows with their keys, largest first, ties to the lower key. WEIGHT: their weights as well.

    FLAGGED: only where a flag is set; each stands for as many rows as this says, 0 where there are none.
    """
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    block, head = in_order(blocks, heads, per_group)
    if FLAGGED > 0:
        if tl.load(flags + head * tl.cdiv(sizes.i, FLAGGED) + block * BLOCK_I // FLAGGED) == 0:
            return
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    rows = i
    if PAIR == "product":
        rows = tile(q, b, h, i, d, sizes.i, D, True)
    at = tl.full([BLOCK_I, BLOCK_N], -1, tl.int32)
    threshold = tl.full([BLOCK_I], FLOOR, tl.float32)
    # Twice over the keys: first for a bound that few keys pass, then for those that do. Searching without a bound finds
    # something in nearly every tile, and a find costs more than a tile.
    best = tl.full([BLOCK_I, BLOCK_J], FLOOR, tl.float32)
    for SEARCH in tl.static_range(2):
        if SEARCH:
            if N <= BLOCK_J:
                threshold = least_wanted(best, tl.arange(0, BLOCK_J), N)
            best = tl.full([BLOCK_I, BLOCK_N], FLOOR, tl.float32)
        for r in range(0, seen.spans):
            first, full_from, full_to, past = key_blocks(start, b, r, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
            # In the order of the keys, an edge of the mask on either side: so an equal score never displaces one that was found.
            for PART in tl.static_range(3):
                begin = first if PART == 0 else full_from if PART == 1 else full_to
                end = full_from if PART == 0 else full_to if PART == 1 else past
                best, at, threshold = looked_through(
                    rows, k, pair, k_desc, k_map, steps, strides, caps, seen, sizes, i, d, b, h, r, best, at, threshold, scale,
                    begin, end, PAIR, D, STEPS, MASK, FOLD, EXACT, TMA, N, BLOCK_J, PART != 1, SEARCH == 1,
                )  # fmt: skip
    factor = scale2 if FOLD else 1.0
    n = tl.arange(0, BLOCK_N)
    told = tl.where(at >= 0, best * factor * LN2, float("-inf"))
    put_tile(score, b, h, i, n, told, sizes.i, N)
    put_tile(index, b, h, i, n, at, sizes.i, N)
    if WEIGHT:
        m, l = norm_of(norm, b, h, i, sizes)
        put_tile(weight, b, h, i, n, tl.exp2((told - m[:, None]) * LOG2E) / l[:, None], sizes.i, N)


__all__ = ["ballot_kernel", "bound_kernel", "count_kernel", "search_kernel", "settle_kernel"]
