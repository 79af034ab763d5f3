"""The largest scores of every row from lists of candidates, in one walk over its keys.

A bound is known for every row that its N largest scores reach, and hardly any other. A thread appends what it has of a row above the
bound to a list of its own in memory: no exchange, no barrier and no atomic. At the end it reads its lists again and sorts them, as
`topk_network` sorts all scores; and where a list is full, or the bound was no bound, all scores of these rows are sorted instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launcher import INTERPRETED
from .forward import schedule_tile
from .tile_ops import FLOOR, LN2, LOG2E, key_blocks, load_row_values, load_tile, store_tile
from .topk import group_bound, load_norm, score_tile, side_by_side
from .topk_network import (
    LISTS,
    column_at,
    exchanged,
    lane_columns,
    largest_of_both,
    merge_lists,
    merge_tile,
    pack,
    sorting_pairs,
)

#: The interpreter has no device instructions.
INTERPRETER = tl.constexpr(INTERPRETED)


@triton.constexpr_function
def append_asm(columns, capacity, pitch):
    """PTX that appends those of some scores $1, $2, … that exceed a bound, with their keys, to a list: its new length.

    Operands after the scores: the bound, the first key, the length, the list. Most often no score exceeds the bound, and the branch skips
    the rest. A list longer than `capacity` is not appended to.
    """
    n = len(columns)
    bound, first, length, at = (f"${n + k}" for k in range(1, 5))
    lines = [
        ".reg .pred some, hit;", ".reg .f32 top, bits;", ".reg .u32 key, count;", ".reg .u64 at;", f"mov.u32 count, {length};", "mov.f32 top, $1;",
        *(f"max.f32 top, top, ${k};" for k in range(2, n + 1)),
        f"setp.gt.f32 some, top, {bound};", f"setp.le.and.u32 some, count, {capacity}, some;", "@!some bra DONE;", f"mad.wide.u32 at, count, {pitch}, {at};",
    ]  # fmt: skip
    for k, column in enumerate(columns, 1):
        lines += [
            f"setp.gt.f32 hit, ${k}, {bound};", f"add.u32 key, {first}, {column};", "mov.b32 bits, key;",
            f"@hit st.global.v2.f32 [at], {{bits, ${k}}};", f"@hit add.u64 at, at, {pitch};", "@hit add.u32 count, count, 1;",
        ]  # fmt: skip
    return "\n".join(["{", *lines, "DONE: mov.u32 $0, count;", "}"])


@triton.constexpr_function
def columns_from(begin, together, count):
    return tuple(column_at(begin + n, count) for n in range(together))


@triton.constexpr_function
def append_constraints(together):
    return "=r," + "f," * together + "f,r,r,l"


@triton.jit
def append(x, bound, first, count, lists, COLUMNS: tl.constexpr, CAPACITY: tl.constexpr, PITCH: tl.constexpr):
    """Lengths of the lists after some tiles (I, LISTS) of scores, whose keys are `first` and the COLUMNS."""
    if not INTERPRETER:
        asm: tl.constexpr = append_asm(COLUMNS, CAPACITY, 8 * PITCH)
        constraints: tl.constexpr = append_constraints(len(COLUMNS))
        operands = x + (bound, first, count, lists)  # noqa: RUF005 (a star is not of Triton's language)
        return tl.inline_asm_elementwise(asm, constraints, operands, tl.int32, is_pure=False, pack=1)
    is_open = count <= CAPACITY
    for n in tl.static_range(len(COLUMNS)):
        hit = is_open & (x[n] > bound)
        pair = (x[n].to(tl.int32, bitcast=True).to(tl.int64) << 32) | (first + COLUMNS[n]).to(tl.int64)
        tl.store((lists + 8 * PITCH * count.to(tl.int64)).to(tl.pointer_type(tl.int64)), pair, mask=hit)
        count += hit.to(tl.int32)
    return count


@triton.jit
def append_tile(s, start, bound, count, lists, CAPACITY: tl.constexpr, TOGETHER: tl.constexpr):
    """Counts of the lists after a tile (I, J) of scores whose keys begin at `start`."""
    I: tl.constexpr = s.shape[0]
    COUNT: tl.constexpr = s.shape[1] // LISTS
    columns = lane_columns(s)
    first = start + 2 * tl.arange(0, LISTS)[None, :] + tl.zeros([I, LISTS], tl.int32)
    for begin in tl.static_range(0, COUNT, TOGETHER):
        x = ()
        for n in tl.static_range(TOGETHER):
            x = x + (tl.reshape(columns[begin + n], (I, LISTS)),)  # type: ignore[assignment]  # noqa: RUF005
        count = append(x, bound, first, count, lists, columns_from(begin, TOGETHER, COUNT), CAPACITY, I * LISTS)
    return count


@triton.jit
def sorted_lists(lists, count, best, N: tl.constexpr, PITCH: tl.constexpr):
    """The N largest of every list, sorted."""
    most = tl.max(tl.max(count, 1), 0)
    at = lists.to(tl.pointer_type(tl.int64))
    for begin in range(0, most, N):
        x = ()
        for n in tl.static_range(N):
            there = begin + n < count
            pair = tl.load(at + (begin + n) * PITCH, mask=there, other=0)
            s = tl.where(there, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), FLOOR)
            x = x + (pack(s, tl.where(there, pair.to(tl.int32), 2147483647)),)  # type: ignore[assignment]  # noqa: RUF005
        best = largest_of_both(best, exchanged(x, sorting_pairs(N)), N)
    return best


@triton.jit
def topk_lists_kernel(
    q, k, k_desc, k_layout, modifiers, strides, caps, mask, row_table, bounds, lists, norm, score, index, weight, min_keys, few_keys, first_program,
    sizes, heads, heads_per_group, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr,
    N: tl.constexpr, SORTED: tl.constexpr, WEIGHT: tl.constexpr, EVEN_BLOCKS: tl.constexpr, EDGES: tl.constexpr, GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The N largest scores of BLOCK_I rows with their keys, largest first, ties to the lower key. WEIGHT: their weights as well.

    `min_keys`: with fewer visible keys `bounds` are too low, and the tiles are walked once more for a better bound. `few_keys`: up to so
    many are all sorted. SORTED: numbers that a network sorts, a power of two. `lists` has CAPACITY + TOGETHER places for each lane of each row of
    each program of this launch, whose first is `first_program`.
    """
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group, first_program)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    first, full_from, full_to, past = key_blocks(start, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    seen = (past - first) * BLOCK_J
    all_sorted = seen <= few_keys
    bound = load_row_values(bounds, b, h, i, sizes, FLOOR)
    if (seen < min_keys) & (not all_sorted):
        largest = tl.full([BLOCK_I, BLOCK_J], FLOOR, tl.float32)
        for n in range(first, past):
            s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                         D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, EDGES)  # fmt: skip
            largest = tl.maximum(largest, s)
        bound = group_bound(largest, N, GROUPS)
    place = tl.arange(0, BLOCK_I)[:, None] * LISTS + tl.arange(0, LISTS)[None, :]
    own = lists.to(tl.int64) + (tl.program_id(0).to(tl.int64) * ((CAPACITY + TOGETHER) * BLOCK_I * LISTS) + place) * 8
    count = tl.zeros([BLOCK_I, LISTS], tl.int32)
    above = tl.where(i < sizes.i, bound, float("inf"))[:, None] + tl.zeros([BLOCK_I, LISTS], tl.float32)
    full_to = tl.where(all_sorted, full_from, full_to)
    for n in range(full_from, full_to):
        s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                     D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, False)  # fmt: skip
        count = append_tile(s, n * BLOCK_J, above, count, own, CAPACITY, TOGETHER)
    if EDGES:
        for edge in range(0, tl.where(all_sorted, 0, full_from - first + past - full_to)):
            n = tl.where(edge < full_from - first, first + edge, full_to + edge - (full_from - first))
            s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                         D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, True)  # fmt: skip
            count = append_tile(s, n * BLOCK_J, above, count, own, CAPACITY, TOGETHER)
    tl.debug_barrier()
    none = pack(tl.full([BLOCK_I, LISTS], FLOOR, tl.float32), 2147483647)
    best = ()
    for _ in tl.static_range(SORTED):
        best = best + (none,)  # type: ignore[assignment]  # noqa: RUF005
    # More than fit, or fewer than N although more keys are visible.
    lost = (tl.max(count, 1) > CAPACITY) | ((tl.sum(count, 1) < N) & (bound > FLOOR))
    again = all_sorted | (tl.max((lost & (i < sizes.i)).to(tl.int32), 0) > 0)
    best = sorted_lists(own, tl.where(again, 0, count), best, SORTED, BLOCK_I * LISTS)
    for n in range(tl.where(again, first, past), past):
        s = score_tile(q_tile, k, k_desc, k_layout, modifiers, strides, caps, mask, sizes, n, i, d, b, h, scale,
                     D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, EVEN_BLOCKS, BLOCK_J, EDGES)  # fmt: skip
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


__all__ = ["topk_lists_kernel"]
