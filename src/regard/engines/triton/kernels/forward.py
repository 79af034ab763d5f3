"""One pass over the keys: what rows can tell.

A program owns a block of query rows and walks the blocks of keys they see, merging each into the state
(m, l, t, y, …) of design: full tiles first, by the copy engine where it serves, then the tiles at the edges of
the mask, cell by cell. Imports `tiles`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .additive import tanh_sum
from .tile_ops import (
    FLOOR,
    LN2,
    LOG2E,
    NOTHING,
    add_product,
    fetch,
    key_blocks,
    place,
    product,
    put_row,
    put_tile,
    scored,
    tile,
    visible,
)


class Outputs(NamedTuple):
    """Where answers go, all `Cells`; those that nobody asked for are never touched."""

    y: Any
    lse: Any
    norm: Any
    max_score: Any
    entropy: Any
    mean_distance: Any
    mass: Any
    argmax: Any


@triton.jit
def in_order(rows, heads, PER_GROUP, first=0):
    """Which block of rows and which head this program owns; `first` programs ran before.

    Heads come in groups whose keys and values fit the cache together; within a group the last rows start first,
    since under a causal mask they take longest.
    """
    pid = tl.program_id(0) + first
    group = pid // (PER_GROUP * rows)
    here = tl.minimum(PER_GROUP, heads - group * PER_GROUP)
    n = pid - group * PER_GROUP * rows
    return rows - 1 - n // here, group * PER_GROUP + n % here


@triton.jit
def weighed(s, m, l, t, mean_distance, mass, argmax, i, j, keys, scale2, offset,
            ENTROPY: tl.constexpr, MEAN_DISTANCE: tl.constexpr, MASS: tl.constexpr, ARGMAX: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    """The state of the rows with one more tile of keys in it: `State.merge` of the plain engine, in registers.

    Also, for the output, the tile's weights and what is left of those before it; and the largest product of the tile in
    every row, before any folded scale.
    """
    top = tl.max(s, 1)
    largest = top
    if ARGMAX:
        first = tl.min(tl.where(s == top[:, None], j[None, :], 2147483647), 1)
    if FOLD:
        top = top * scale2
    higher = tl.maximum(m, top)
    if FOLD:
        x = s * scale2 - higher[:, None]
    else:
        x = s - higher[:, None]
    p = tl.exp2(x)
    a = tl.exp2(m - higher)
    if ENTROPY:
        # A higher maximum shifts every s − m by the same amount, once for each unit of l.
        t = a * (t + (m - higher) * l) + tl.sum(p * x, 1)
    if MEAN_DISTANCE:
        mean_distance = a * mean_distance + tl.sum(p * tl.abs(i[:, None] + offset - j[None, :]).to(tl.float32), 1)
    if MASS:
        mass = a * mass + tl.sum(p * keys[None, :], 1)
    if ARGMAX:
        # Ties go to the lower index, whichever tile came first.
        tie = tl.where(top == m, tl.minimum(first, argmax), argmax)
        argmax = tl.where(top > m, first, tie)
    l = l * a + tl.sum(p, 1)
    return higher, l, t, mean_distance, mass, argmax, p, a, largest


@triton.jit
def noted(bests, per_best, best, largest, visit, b, h, i, sizes):
    """The largest product of `per_best` tiles of every row, written down as it grows; any tiles may share a place."""
    best = tl.where(visit % per_best == 0, largest, tl.maximum(best, largest))
    tl.store(place(bests, b, h) + visit // per_best * bests.i + i, best, mask=i < sizes.i)
    return best


@triton.jit
def told(out, sink, m, l, t, mean_distance, mass, argmax, b, h, i, sizes, SINK: tl.constexpr,
         LSE: tl.constexpr, NORM: tl.constexpr, MAX: tl.constexpr, ENTROPY: tl.constexpr, MEAN_DISTANCE: tl.constexpr,
         MASS: tl.constexpr, ARGMAX: tl.constexpr):  # fmt: skip
    """Write what finished rows tell. Returns what their output must be multiplied by, and which rows see nothing."""
    # A score that is nan leaves no trace in the maximum, but in the sum.
    nothing, unseen = (m <= NOTHING) & (l == 0.0), m <= NOTHING
    if MAX:
        highest = tl.where(l == l, m * LN2, float("nan"))
        put_row(out.max_score, b, h, i, tl.where(nothing, float("-inf"), highest), sizes.i)
    if ARGMAX:
        put_row(out.argmax, b, h, i, tl.where(unseen, -1, argmax), sizes.i)
    a = 1.0
    if SINK:  # one more key, which gives nothing
        drain = tl.maximum(tl.load(place(sink, b, h)).to(tl.float32) * LOG2E, FLOOR)
        higher = tl.maximum(m, drain)
        a, its = tl.exp2(m - higher), tl.exp2(drain - higher)
        t = a * (t + (m - higher) * l) + its * (drain - higher)
        l = a * l + its
        m = higher
        nothing = (m <= NOTHING) & (l == 0.0)
    share = tl.where(nothing, 0.0, a / l)
    if LSE:
        put_row(out.lse, b, h, i, tl.where(nothing, float("-inf"), (m + tl.log2(l)) * LN2), sizes.i)
    if NORM:
        put_row(out.norm, b, h, i, tl.where(nothing, float("-inf"), m * LN2), sizes.i)
        tl.store(place(out.norm, b, h) + i.to(tl.int64) * out.norm.i + 1, tl.where(nothing, 0.0, l), mask=i < sizes.i)
    if ENTROPY:
        h2 = tl.log2(l) - tl.where(nothing, 0.0, t / l)
        # Written so that nan stays: rounding may put a certain row a hair below 0.
        put_row(out.entropy, b, h, i, tl.where(nothing | (h2 < 0), 0.0, h2 * LN2), sizes.i)
    if MEAN_DISTANCE:
        put_row(out.mean_distance, b, h, i, tl.where(nothing, 0.0, mean_distance * share), sizes.i)
    if MASS:
        put_row(out.mass, b, h, i, tl.where(nothing, 0.0, mass * share), sizes.i)
    return share, nothing


@triton.jit
def forward_kernel(
    q, k, v, pair, q_desc, k_desc, v_desc, q_map, k_map, v_map, steps, strides, caps, sink,
    keys, seen, row_table, out, bests, per_best, groups, sizes, heads, per_group, scale, scale2,
    PAIR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, EXACT_V: tl.constexpr, SINK: tl.constexpr, SAME: tl.constexpr,
    Y: tl.constexpr, LSE: tl.constexpr, NORM: tl.constexpr, MAX: tl.constexpr, ENTROPY: tl.constexpr, MEAN_DISTANCE: tl.constexpr,
    MASS: tl.constexpr, ARGMAX: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, WHOLE: tl.constexpr, BESTS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All that one pass can tell of BLOCK_I rows.

    EDGES: there are tiles that rows see in part. WHOLE: the keys fill their last block. BESTS: note the largest product of
    every few tiles, for `top`.
    """
    block, head = in_order(tl.cdiv(sizes.i, BLOCK_I), heads, per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    hk, hv = h // sizes.k_group, h // sizes.v_group
    if PAIR == "product":
        if TMA:  # rows past the end may be another head's: they are computed and never written
            rows = fetch(q_desc, q_map, b, h, start)
        else:
            rows = tile(q, b, h, i, d, sizes.i, D, True)

    # Above all that is hidden: were a hidden score the maximum, s · scale2 − m would be no 0 but a rounding error of 1e20,
    # since the hardware multiplies and subtracts in one step and rounds the maximum apart.
    m = tl.full([BLOCK_I], NOTHING, tl.float32)
    l = tl.zeros([BLOCK_I], tl.float32)
    t = tl.zeros([BLOCK_I], tl.float32)
    mean_distance = tl.zeros([BLOCK_I], tl.float32)
    mass = tl.zeros([BLOCK_I], tl.float32)
    argmax = tl.full([BLOCK_I], 2147483647, tl.int32)
    y = tl.zeros([BLOCK_I, BLOCK_E], tl.float32)
    best, visits = m, start * 0

    for r in range(0, seen.spans):
        first, full_from, full_to, past = key_blocks(start, b, r, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
        left = full_from - first
        for EDGE in tl.static_range(2 if EDGES else 1):  # tiles seen in full, then those at the edges of the mask
            for n in range(0 if EDGE else full_from, left + past - full_to if EDGE else full_to):
                at = tl.where(n < left, first + n, full_to + n - left) if EDGE else n
                j = at * BLOCK_J + tl.arange(0, BLOCK_J)
                if PAIR == "product":
                    if TMA and (WHOLE or not EDGE):
                        near = fetch(k_desc, k_map, b, hk, at * BLOCK_J)
                    else:
                        near = tile(k, b, hk, j, d, sizes.j, D, EDGE == 1)
                    s = product(rows, near.T, EXACT)
                else:
                    s = tanh_sum(pair, i, j, b, h, hk, sizes, PAIR, False)
                s, _ = scored(s, i[:, None], j[None, :], b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, 0)
                if EDGE:
                    s = tl.where(visible(i[:, None], j[None, :], b, h, r, seen, sizes, MASK), s, FLOOR)
                if not Y:
                    values = s
                elif SAME:
                    values = near
                elif TMA and (WHOLE or not EDGE):
                    values = fetch(v_desc, v_map, b, hv, at * BLOCK_J)
                else:
                    values = tile(v, b, hv, j, e, sizes.j, E, EDGE == 1)
                chosen = mass
                if MASS:
                    chosen = tl.load(place(keys, b, h) + j.to(tl.int64) * keys.j, mask=j < sizes.j, other=0.0)
                m, l, t, mean_distance, mass, argmax, p, a, largest = weighed(
                    s, m, l, t, mean_distance, mass, argmax, i, j, chosen, scale2, sizes.offset, ENTROPY, MEAN_DISTANCE, MASS, ARGMAX, FOLD
                )  # fmt: skip
                if Y:
                    y = add_product(p.to(values.dtype), values, y * a[:, None], EXACT_V)
                if BESTS:
                    visit = visits + (n if EDGE else n - full_from)
                    best = noted(bests, per_best, best, largest, visit, b, h, i, sizes)
            visits += left + past - full_to if EDGE else full_to - full_from
    if BESTS:
        for group in range(tl.cdiv(visits, per_best), groups):
            lowest = tl.full([BLOCK_I], FLOOR, tl.float32)
            tl.store(place(bests, b, h) + group * bests.i + i, lowest, mask=i < sizes.i)

    share, nothing = told(
        out,
        sink,
        m,
        l,
        t,
        mean_distance,
        mass,
        argmax,
        b,
        h,
        i,
        sizes,
        SINK,
        LSE,
        NORM,
        MAX,
        ENTROPY,
        MEAN_DISTANCE,
        MASS,
        ARGMAX,
    )
    if Y:
        put_tile(out.y, b, h, i, e, tl.where(nothing[:, None], 0.0, y * share[:, None]), sizes.i, E)


__all__ = ["Outputs", "forward_kernel", "in_order", "noted", "told", "weighed"]
