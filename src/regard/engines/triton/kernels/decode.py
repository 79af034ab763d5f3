"""Few rows, many keys: the keys are split over all multiprocessors, and the states of their parts are merged.

The forward pass gives every block of rows to one program, which is one multiprocessor's work where a model decodes one token
at a time. Here a program owns one share of the keys: it packs the query heads that read them into the rows of one tile, so
that a key is read once for all of them, and writes the state (m, l, t, …, y) of its share. `merge_kernel` merges the states of
a row. With SCORES the scores of these few rows are stored as well, a few bytes beside each key: what a column received and
the largest of a row are then taken from them, without reading the keys again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .forward import online_softmax_update, store_row_stats
from .tile_ops import (
    EMPTY_MAX,
    FLOOR,
    LN2,
    LOG2E,
    add_product,
    apply_score_mods,
    head_ptr,
    key_blocks,
    load_block,
    load_tile,
    log_weight,
    norm_to_base2,
    product,
    store_row,
    store_tile,
    visible,
    visible_at_all,
    wants,
)
from .topk import load_norm

#: Below every number that `ordered` makes.
LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
#: Numbers of a row's state beside y: m, l, t, mean_distance, mass, argmax.
STATE_FIELDS = 6


class SplitArg(NamedTuple):
    """How rows and keys are dealt out, and where states of shares go.

    `state` is (splits, STATE_FIELDS, rows) and `y` (splits, rows, e), with one row for every (b, h, i).
    """

    state: Any
    y: Any
    rows: int
    splits: int
    group: int  # query heads that share keys and values
    head_tiles: int  # tiles that a group's heads take
    blocks: int  # tiles that the positions take


@triton.jit
def packed_rows(block, head_tile, group_id, split, sizes, PACK: tl.constexpr, BLOCK_I: tl.constexpr):
    """Position and query head of every row of a tile: PACK heads for each position. Rows of no head stand past the end."""
    row = tl.arange(0, BLOCK_I)
    head = head_tile * PACK + row % PACK
    i = tl.where(head < split.group, block * (BLOCK_I // PACK) + row // PACK, sizes.i)
    return i, group_id * split.group + tl.minimum(head, split.group - 1)


@triton.jit
def row_number(b, h, i, sizes):
    """Place of a row among those of all heads."""
    return (b * sizes.h + h).to(tl.int64) * sizes.i + i


@triton.jit
def store_state(split, s, row, there, m, l, t, mean_distance, mass, argmax,
              STATS: tl.constexpr):  # fmt: skip
    """The state of a share of the keys; argmax by its bits."""
    at = split.state + s.to(tl.int64) * 6 * split.rows + row
    tl.store(at, m, mask=there)
    tl.store(at + split.rows, l, mask=there)
    if wants(STATS, "entropy"):
        tl.store(at + 2 * split.rows, t, mask=there)
    if wants(STATS, "mean_distance"):
        tl.store(at + 3 * split.rows, mean_distance, mask=there)
    if wants(STATS, "mass"):
        tl.store(at + 4 * split.rows, mass, mask=there)
    if wants(STATS, "argmax"):
        tl.store(at + 5 * split.rows, argmax.to(tl.float32, bitcast=True), mask=there)


@triton.jit
def decode_kernel(
    q, k, v, k_desc, v_desc, k_layout, v_layout, modifiers, strides, caps, sink, keys, mask, row_table, out, split, scores, sizes, scale,
    scale2, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_V: tl.constexpr, SINK: tl.constexpr, SHARED_KV: tl.constexpr, SPLIT: tl.constexpr,
    Y: tl.constexpr, STATS: tl.constexpr, SCORES: tl.constexpr, EDGES: tl.constexpr, TMA: tl.constexpr, PACK: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One share of the keys for one tile of rows. SPLIT: there are several, whose states are merged; else rows end here."""
    n = tl.program_id(0)
    block, n = n % split.blocks, n // split.blocks  # neighbours read the same keys
    head_tile, n = n % split.head_tiles, n // split.head_tiles
    s_id, n = n % split.splits, n // split.splits
    groups = sizes.h // split.group
    b, group_id = n // groups, n % groups
    i, h = packed_rows(block, head_tile, group_id, split, sizes, PACK, BLOCK_I)
    hk, hv = group_id * split.group // sizes.k_group, group_id * split.group // sizes.v_group
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_tile = load_tile(q, b, h[:, None], i, d, sizes.i, D, True)

    m = tl.full([BLOCK_I], EMPTY_MAX, tl.float32)
    l = tl.zeros([BLOCK_I], tl.float32)
    t = tl.zeros([BLOCK_I], tl.float32)
    mean_distance = tl.zeros([BLOCK_I], tl.float32)
    mass = tl.zeros([BLOCK_I], tl.float32)
    argmax = tl.full([BLOCK_I], 2147483647, tl.int32)
    y = tl.zeros([BLOCK_I, BLOCK_E], tl.float32)
    for r in range(0, mask.n_intervals):
        first, full_from, full_to, past = key_blocks(
            block * (BLOCK_I // PACK), b, r, row_table, mask, sizes, MASK, BLOCK_I // PACK, BLOCK_J
        )
        count = past - first
        past = first + (count * (s_id + 1)) // split.splits  # this share's tiles
        first = first + (count * s_id) // split.splits
        full_from = tl.minimum(tl.maximum(full_from, first), past)
        full_to = tl.minimum(tl.maximum(full_to, full_from), past)
        left = full_from - first
        for EDGE in tl.static_range(2 if EDGES else 1):  # tiles seen in full, then those at the edges of the mask
            for n in range(0 if EDGE else full_from, left + past - full_to if EDGE else full_to):
                at = tl.where(n < left, first + n, full_to + n - left) if EDGE else n
                j = at * BLOCK_J + tl.arange(0, BLOCK_J)
                k_tile = load_block(
                    k, k_desc, k_layout, b, hk, at * BLOCK_J, j, d, sizes.j, D, TMA and not EDGE, EDGE == 1
                )
                s = product(q_tile, k_tile.T, FP32)
                s, _ = apply_score_mods(
                    s,
                    i[:, None],
                    j[None, :],
                    b,
                    h[:, None],
                    modifiers,
                    strides,
                    caps,
                    scale,
                    sizes,
                    MODIFIERS,
                    SCALE_FOLDED,
                    0,
                )
                if SCORES:
                    there = (i[:, None] < sizes.i) & (j[None, :] < sizes.j)
                    tl.store(scores + row_number(b, h, i, sizes)[:, None] * sizes.j + j[None, :], s, mask=there)
                if EDGE:
                    s = tl.where(visible(i[:, None], j[None, :], b, h[:, None], r, mask, sizes, MASK), s, FLOOR)
                key_mass = s
                if wants(STATS, "mass"):
                    key_mass = tl.load(head_ptr(keys, b, h[:, None]) + j.to(tl.int64)[None, :] * keys.j, mask=j[None, :] < sizes.j, other=0.0)  # fmt: skip
                m, l, t, mean_distance, mass, argmax, p, a, _ = online_softmax_update(
                    s, m, l, t, mean_distance, mass, argmax, i, j, key_mass, scale2, sizes.offset, STATS, SCALE_FOLDED
                )  # fmt: skip
                if Y:
                    if SHARED_KV:
                        v_tile = k_tile
                    else:
                        v_tile = load_block(
                            v, v_desc, v_layout, b, hv, at * BLOCK_J, j, e, sizes.j, E, TMA and not EDGE, EDGE == 1
                        )
                    y = add_product(p.to(v_tile.dtype), v_tile, y * a[:, None], FP32_V)
    if SPLIT:
        row, there = row_number(b, h, i, sizes), i < sizes.i
        store_state(split, s_id, row, there, m, l, t, mean_distance, mass, argmax, STATS)
        if Y:
            at = split.y + (s_id.to(tl.int64) * split.rows + row)[:, None] * E + e[None, :]
            tl.store(at, y, mask=there[:, None] & (e[None, :] < E))
    else:
        share, empty = store_row_stats(
            out, sink, m, l, t, mean_distance, mass, argmax, b, h, i, sizes, SINK, STATS,
        )  # fmt: skip
        if Y:
            store_tile(out.y, b, h[:, None], i, e, tl.where(empty[:, None], 0.0, y * share[:, None]), sizes.i, E)


@triton.jit
def merge_kernel(
    split, out, sink, sizes, E: tl.constexpr, SINK: tl.constexpr, Y: tl.constexpr, STATS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The states of a row's shares merged, in the order of the shares, and the statistics of the row."""
    row = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    i = (row % sizes.i).to(tl.int32)
    head = row // sizes.i
    b, h = head // sizes.h, head % sizes.h
    e = tl.arange(0, BLOCK_E)
    m = tl.full([1], EMPTY_MAX, tl.float32)
    l = tl.zeros([1], tl.float32)
    t = tl.zeros([1], tl.float32)
    mean_distance = tl.zeros([1], tl.float32)
    mass = tl.zeros([1], tl.float32)
    argmax = tl.full([1], 2147483647, tl.int32)
    y = tl.zeros([1, BLOCK_E], tl.float32)
    for begin in range(0, split.splits, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)[None, :]
        there = s < split.splits
        at = split.state + s.to(tl.int64) * 6 * split.rows + row[:, None]
        part_m = tl.load(at, mask=there, other=EMPTY_MAX)
        part_l = tl.load(at + split.rows, mask=there, other=0.0)
        top = tl.max(part_m, 1)
        new_m = tl.maximum(m, top)
        a, x = tl.exp2(m - new_m), part_m - new_m[:, None]
        p = tl.exp2(x)
        if wants(STATS, "entropy"):
            part = tl.load(at + 2 * split.rows, mask=there, other=0.0)
            t = a * (t + (m - new_m) * l) + tl.sum(p * (part + x * part_l), 1)
        if wants(STATS, "mean_distance"):
            mean_distance = a * mean_distance + tl.sum(p * tl.load(at + 3 * split.rows, mask=there, other=0.0), 1)
        if wants(STATS, "mass"):
            mass = a * mass + tl.sum(p * tl.load(at + 4 * split.rows, mask=there, other=0.0), 1)
        if wants(STATS, "argmax"):
            part = tl.load(at + 5 * split.rows, mask=there, other=0.0).to(tl.int32, bitcast=True)
            first = tl.min(tl.where(there & (part_m == top[:, None]), part, 2147483647), 1)
            tie = tl.where(top == m, tl.minimum(first, argmax), argmax)
            argmax = tl.where(top > m, first, tie)
        l = a * l + tl.sum(p * part_l, 1)
        if Y:
            part_at = split.y + (s.to(tl.int64) * split.rows + row[:, None])[:, :, None] * E + e[None, None, :]
            part_y = tl.load(part_at, mask=there[:, :, None] & (e[None, None, :] < E), other=0.0)
            y = y * a[:, None] + tl.sum(p[:, :, None] * part_y, 1)
        m = new_m
    share, empty = store_row_stats(
        out, sink, m, l, t, mean_distance, mass, argmax, b, h, i, sizes, SINK, STATS,
    )  # fmt: skip
    if Y:
        store_tile(out.y, b[:, None], h[:, None], i, e, tl.where(empty[:, None], 0.0, y * share[:, None]), sizes.i, E)


# From stored scores.


@triton.jit
def received_kernel(scores, norm, mask, received, sizes, scale2, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
                    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):  # fmt: skip
    """The weight that BLOCK_J keys of one head receive from all rows; `norm` is (b, h, i, 2) without gaps."""
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    head = tl.program_id(0) // blocks
    b, h = head // sizes.h, head % sizes.h
    j = tl.program_id(0) % blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    total = tl.zeros([BLOCK_J], tl.float32)
    for begin in range(0, sizes.i, BLOCK_I):
        i = begin + tl.arange(0, BLOCK_I)
        row = row_number(b, h, i, sizes)
        m = tl.load(norm + 2 * row, mask=i < sizes.i, other=0.0)
        m2, log2l = norm_to_base2(m, tl.load(norm + 2 * row + 1, mask=i < sizes.i, other=0.0), SCALE_FOLDED)
        shown = visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK)
        s = tl.load(scores + row[:, None] * sizes.j + j[None, :], mask=shown, other=FLOOR)
        w = tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
        total += tl.sum(tl.where(shown, w, 0.0), 0)
    store_row(received, b, h, j, total, sizes.j)


@triton.jit
def ordered(s, j):
    """Scores and keys as whole numbers: the larger score first, then the lower key."""
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (2147483647 - j).to(tl.int64)


@triton.jit
def score_of(number):
    bits = (number >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unsigned_order(s, shown):
    """Scores as unsigned numbers in their order, all above that of hidden ones, which is 0."""
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)  # −0.0 equals 0.0
    bits = bits ^ ((bits >> 31) | -2147483648)  # negative ones: all bits; others: the sign
    return tl.where(shown, bits, 0).to(tl.uint32, bitcast=True)


@triton.jit
def pack_scores(s, column, shown, BITS: tl.constexpr):
    """Scores as unsigned numbers in their order, the lowest BITS replaced by the column, the lower one first; hidden ones below 2^BITS.

    No two are equal, so that the next largest is the maximum of those below the last, and its column needs no search.
    """
    LOW: tl.constexpr = (1 << BITS) - 1
    bits = unsigned_order(s, shown).to(tl.int32, bitcast=True)
    return ((bits & ~LOW) | (LOW - column)).to(tl.uint32, bitcast=True)


@triton.jit
def topk_of_part_kernel(
    scores,
    mask,
    candidates,
    sizes,
    parts,
    MASK: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """The N largest of BLOCK_J = 2^BITS scores of one row, as numbers that `ordered` makes: candidates (rows, parts, N), in any order.

    By rounds over packed numbers. Scores that agree in all bits but the lowest share a bucket; if that of the N-th goes on past it,
    the rounds are over `ordered` numbers instead.
    """
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    i, head = (row % sizes.i).to(tl.int32), row // sizes.i
    j = part * BLOCK_J + tl.arange(0, BLOCK_J)
    shown = visible_at_all(i, j, head // sizes.h, head % sizes.h, mask, sizes, MASK)
    s = tl.load(scores + row * sizes.j + j, mask=shown, other=FLOOR)
    shown = shown & (s != FLOOR) & (s != float("-inf"))
    own, out = scores + row * sizes.j + part * BLOCK_J, candidates + (row * parts + part) * N
    x = pack_scores(s, tl.arange(0, BLOCK_J), shown, BITS)
    last = tl.max(x, 0)
    bucket = last
    for rank in range(0, N):
        column, bucket = (1 << BITS) - 1 - (last & ((1 << BITS) - 1)).to(tl.int32), last >> BITS
        exact = tl.load(own + column, mask=bucket > 0, other=0.0)
        tl.store(out + rank, tl.where(bucket > 0, ordered(exact, part * BLOCK_J + column), LOWEST))
        last = tl.max(x - last, 0) + last  # unsigned, x - last wraps below last: the next lower x has the largest
    if (bucket == last >> BITS) & (bucket > 0):
        number = tl.where(shown, ordered(s, j), LOWEST)
        for rank in range(0, N):
            top = tl.max(number, 0)
            tl.store(out + rank, top)
            number = tl.where(number == top, LOWEST, number)


@triton.jit
def topk_of_parts_kernel(candidates, norm, score, index, weight, sizes, parts, scale2, SCALE_FOLDED: tl.constexpr, N: tl.constexpr,
                         WEIGHT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The N largest of a row from those of its parts."""
    row = tl.program_id(0).to(tl.int64)
    i, head = (row % sizes.i).to(tl.int32), row // sizes.i
    b, h = head // sizes.h, head % sizes.h
    n = tl.arange(0, BLOCK)
    number = tl.load(candidates + row * parts * N + n, mask=n < parts * N, other=LOWEST)
    m, l = i * 0.0, i * 0.0
    if WEIGHT:
        m, l = load_norm(norm, b, h, i, sizes)
    for rank in range(0, N):
        top = tl.max(number, 0)
        number = tl.where(number == top, LOWEST, number)
        there = top != LOWEST
        s = tl.where(there, score_of(top) * (scale2 if SCALE_FOLDED else 1.0) * LN2, float("-inf"))
        at = i.to(tl.int64) * score.i + rank
        tl.store(head_ptr(score, b, h) + at, s)
        tl.store(head_ptr(index, b, h) + at, tl.where(there, 2147483647 - (top & 0xFFFFFFFF), -1))
        if WEIGHT:
            tl.store(head_ptr(weight, b, h) + at, tl.exp2((s - m) * LOG2E) / l)


__all__ = [
    "STATE_FIELDS",
    "SplitArg",
    "decode_kernel",
    "merge_kernel",
    "received_kernel",
    "topk_of_part_kernel",
    "topk_of_parts_kernel",
]
