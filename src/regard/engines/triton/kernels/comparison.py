"""Two matrices row by row: the measures of `core/rows/comparison.py` and their gradients, both tiles of scores at hand.

Arguments of the first matrix, p, have plain names, those of the second, q, a 2 before the rest of the name. The state of a
row is (m, l) of both and t = Σ 2^(s − m) ((s − m) − (s' − m')), as in the compiled tiles of the CPU; a and b of a cell are
p ∂f/∂p and q ∂f/∂q, whose sums over a row centre the gradients. A hidden score is FLOOR, which is finite: no nan arises.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import schedule_tile
from .tile_ops import (
    EMPTY_MAX,
    FLOOR,
    HUGE,
    LN2,
    add_product,
    apply_score_mods,
    key_blocks,
    load_tile,
    product,
    row_blocks,
    store_row,
    store_tile,
    visible_at_all,
)

#: A smaller score is hidden: FLOOR and everything that a bias may add to it.
HIDDEN = tl.constexpr(-1.0e29)


@triton.jit
def scores(
    a, b_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS: tl.constexpr, MASK: tl.constexpr,
    FP32: tl.constexpr, KEYS_FIRST: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2, FLOOR where hidden, and their slope; a · bᵀ is (i, j), with KEYS_FIRST (j, i)."""
    s = product(a, b_tile.T, FP32)
    at_i = i[None, :] if KEYS_FIRST else i[:, None]
    at_j = j[:, None] if KEYS_FIRST else j[None, :]
    slope = tl.full(s.shape, 1.0, tl.float32)
    if len(MODIFIERS) > 0:
        s, slope = apply_score_mods(s, at_i, at_j, b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, False, -1)
    else:
        s = s * scale2
    if EDGE:
        s = tl.where(visible_at_all(at_i, at_j, b, h, mask, sizes, MASK), s, FLOOR)
    return s, slope


@triton.jit
def range_of_both(
    first, full_from, full_to, past, first2, full_from2, full_to2, past2, SEVERAL: tl.constexpr
):  # fmt: skip
    """Blocks that either matrix sees; and those that are fully visible in both."""
    some, some2 = first < past, first2 < past2
    begin = tl.where(some & some2, tl.minimum(first, first2), tl.where(some, first, first2))
    end = tl.maximum(tl.where(some, past, begin), tl.where(some2, past2, begin))
    both_from, both_to = tl.maximum(full_from, full_from2), tl.minimum(full_to, full_to2)
    full = (both_from < both_to) & some & some2
    if SEVERAL:  # tiles between two intervals of a row are no full ones
        full = full & (begin < 0)
    return begin, tl.where(full, both_from, begin), tl.where(full, both_to, begin), end


@triton.jit
def key_blocks_of_all(start, b, row_table, mask, sizes, MASK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):  # fmt: skip
    """`key_blocks` over all intervals of the rows."""
    first, full_from, full_to, past = key_blocks(start, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    if MASK == "intervals":
        for r in range(1, mask.n_intervals):
            first2, _, _, past2 = key_blocks(start, b, r, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
            some, some2 = first < past, first2 < past2
            first = tl.where(some & some2, tl.minimum(first, first2), tl.where(some, first, first2))
            past = tl.maximum(tl.where(some, past, first), tl.where(some2, past2, first))
    return first, full_from, full_to, past


@triton.jit
def merge_rows(s, s2, m, l, m2, l2, t, forbidden, ENTROPY: tl.constexpr, HIDES: tl.constexpr):
    """Merge one tile of both matrices into the states of its rows. ENTROPY: 1 for kl, 0 for the cross-entropy."""
    new, new2 = tl.maximum(m, tl.max(s, 1)), tl.maximum(m2, tl.max(s2, 1))
    x, y = s - new[:, None], s2 - new2[:, None]
    p = tl.exp2(x)
    alpha = tl.exp2(m - new)
    shift = (m - new) * ENTROPY - (m2 - new2)
    # A row that has seen no key of the first has nothing to move, and 0 · huge is 0.
    t = alpha * (t + shift * l) + tl.sum(p * (x * ENTROPY - y), 1)
    l = alpha * l + tl.sum(p, 1)
    l2 = tl.exp2(m2 - new2) * l2 + tl.sum(tl.exp2(y), 1)
    if HIDES:
        forbidden += tl.sum(tl.where((s > HIDDEN) & (s2 <= HIDDEN), 1.0, 0.0), 1)
    return new, l, new2, l2, t, forbidden


@triton.jit
def compare_kernel(
    q, k, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, row_table2, sizes2, scale_of2, scale2_of2,
    out, out_norm, out_norm2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, MASK: tl.constexpr,
    MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, ENTROPY: tl.constexpr, EDGES: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """kl or cross-entropy of BLOCK_I rows, and the norms of both matrices."""
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), batch_heads, heads_per_group)
    b, h_all = head // heads, head % heads
    h, h2 = tl.minimum(h_all, sizes.h - 1), tl.minimum(h_all, sizes2.h - 1)  # one head stands for all
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    q_tile, q2_tile = load_tile(q, b, h, i, d, sizes.i, D, True), load_tile(q2, b, h2, i, d2, sizes.i, D2, True)
    m = tl.full([BLOCK_I], EMPTY_MAX, tl.float32)
    m2 = tl.full([BLOCK_I], EMPTY_MAX, tl.float32)
    l = tl.zeros([BLOCK_I], tl.float32)
    l2, t, forbidden = l, l, l
    first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = key_blocks_of_all(start, b, row_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)  # fmt: skip
    begin, both_from, both_to, end = range_of_both(first, full_from, full_to, past, first2, full_from2, full_to2, past2, MASK == "intervals" or MASK2 == "intervals")  # fmt: skip
    for SECTION in tl.static_range(3):  # edge of the masks, fully visible, edge
        if EDGES or SECTION == 1:
            begin_here = begin if SECTION == 0 else both_from if SECTION == 1 else both_to
            end_here = both_from if SECTION == 0 else both_to if SECTION == 1 else end
            for n in range(begin_here, end_here):
                j = n * BLOCK_J + tl.arange(0, BLOCK_J)
                k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, SECTION != 1)
                k2_tile = load_tile(k2, b, h2 // sizes2.k_group, j, d2, sizes.j, D2, SECTION != 1)
                s, _ = scores(q_tile, k_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, MASK, FP32, False, SECTION != 1)  # fmt: skip
                s2, _ = scores(q2_tile, k2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, MASK2, FP32_2, False, SECTION != 1)  # fmt: skip
                m, l, m2, l2, t, forbidden = merge_rows(
                    s, s2, m, l, m2, l2, t, forbidden, ENTROPY, SECTION != 1 or len(MODIFIERS2) > 0
                )
    seen, seen2 = l != 0.0, l2 != 0.0
    log2l, log2l2 = tl.log2(tl.where(seen, l, 1.0)), tl.log2(tl.where(seen2, l2, 1.0))
    value = LN2 * (t / tl.where(seen, l, 1.0) + log2l2 - log2l * ENTROPY)
    value = tl.where(forbidden > 0.0, float("inf"), tl.where(seen, value, 0.0))
    store_row(out, b, h_all, i, value, sizes.i)
    row = 2 * ((b * heads + h_all).to(tl.int64) * sizes.i + i)
    tl.store(out_norm + row, tl.where(seen, m, HUGE), mask=i < sizes.i)
    tl.store(out_norm + row + 1, log2l, mask=i < sizes.i)
    tl.store(out_norm2 + row, tl.where(seen2, m2, HUGE), mask=i < sizes.i)
    tl.store(out_norm2 + row + 1, log2l2, mask=i < sizes.i)


@triton.jit
def terms(log2p, log2q, MEASURE: tl.constexpr):
    """p, q, a and b of every cell."""
    p, q = tl.exp2(log2p), tl.exp2(log2q)
    if MEASURE == "kl":
        a, b = p * ((log2p - log2q) * LN2), -p
    elif MEASURE == "cross_entropy":
        a, b = p * (-log2q * LN2), -p
    elif MEASURE == "js":
        middle = 2.0 / tl.maximum(p + q, 1e-37)
        a = 0.5 * LN2 * p * tl.log2(tl.maximum(p * middle, 1e-37))
        b = 0.5 * LN2 * q * tl.log2(tl.maximum(q * middle, 1e-37))
    elif MEASURE == "overlap":
        share = tl.where(p == q, 0.5, tl.where(p < q, 1.0, 0.0))
        a, b = p * share, q * (1.0 - share)
    else:  # total_variation
        sign = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
        a, b = p * sign, -q * sign
    return p, q, a, b


@triton.jit
def load_norm_of(norm, b, h, heads, i, I):
    """m and log₂ l of rows; HUGE, which makes every weight 0, past the end."""
    row = 2 * ((b * heads + h).to(tl.int64) * I + i)
    return tl.load(norm + row, mask=i < I, other=HUGE), tl.load(norm + row + 1, mask=i < I, other=0.0)


@triton.jit
def load_row_of(x, b, h, heads, i, I):
    return tl.load(x + (b * heads + h).to(tl.int64) * I + i, mask=i < I, other=0.0)


@triton.jit
def rows_kernel(
    q, k, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, row_table2, sizes2, scale_of2, scale2_of2,
    norm, norm2, delta, delta2, grad, out_dq, out_dq2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, MASK: tl.constexpr,
    MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, MEASURE: tl.constexpr, EDGES: tl.constexpr,
    SUMS: tl.constexpr, DQ: tl.constexpr, DQ2: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_I finished rows: Σa and Σb (SUMS, into `delta`), or the gradients of their queries."""
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), batch_heads, heads_per_group)
    b, h_all = head // heads, head % heads
    h, h2 = tl.minimum(h_all, sizes.h - 1), tl.minimum(h_all, sizes2.h - 1)
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    q_tile, q2_tile = load_tile(q, b, h, i, d, sizes.i, D, True), load_tile(q2, b, h2, i, d2, sizes.i, D2, True)
    m, log2l = load_norm_of(norm, b, h_all, heads, i, sizes.i)
    m2, log2l2 = load_norm_of(norm2, b, h_all, heads, i, sizes.i)
    g, centre, centre2 = log2l, tl.zeros([BLOCK_I], tl.float32), tl.zeros([BLOCK_I], tl.float32)
    if not SUMS:
        g = load_row_of(grad, b, h_all, heads, i, sizes.i)
        centre = load_row_of(delta, b, h_all, heads, i, sizes.i)
        centre2 = load_row_of(delta2, b, h_all, heads, i, sizes.i)
    dq, dq2 = tl.zeros([BLOCK_I, BLOCK_D], tl.float32), tl.zeros([BLOCK_I, BLOCK_D2], tl.float32)
    first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = key_blocks_of_all(start, b, row_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)  # fmt: skip
    begin, both_from, both_to, end = range_of_both(first, full_from, full_to, past, first2, full_from2, full_to2, past2, MASK == "intervals" or MASK2 == "intervals")  # fmt: skip
    for SECTION in tl.static_range(3):  # edge of the masks, fully visible, edge
        if EDGES or SECTION == 1:
            begin_here = begin if SECTION == 0 else both_from if SECTION == 1 else both_to
            end_here = both_from if SECTION == 0 else both_to if SECTION == 1 else end
            for n in range(begin_here, end_here):
                j = n * BLOCK_J + tl.arange(0, BLOCK_J)
                k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, SECTION != 1)
                k2_tile = load_tile(k2, b, h2 // sizes2.k_group, j, d2, sizes.j, D2, SECTION != 1)
                s, slope = scores(q_tile, k_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, MASK, FP32, False, SECTION != 1)  # fmt: skip
                s2, slope2 = scores(q2_tile, k2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, MASK2, FP32_2, False, SECTION != 1)  # fmt: skip
                w, w2, a, a2 = terms(s - m[:, None] - log2l[:, None], s2 - m2[:, None] - log2l2[:, None], MEASURE)
                if SUMS:
                    centre += tl.sum(a, 1)
                    centre2 += tl.sum(a2, 1)
                if DQ:
                    ds = (a - w * centre[:, None]) * g[:, None] * slope
                    dq = add_product(ds.to(k_tile.dtype), k_tile, dq, FP32)
                if DQ2:
                    ds2 = (a2 - w2 * centre2[:, None]) * g[:, None] * slope2
                    dq2 = add_product(ds2.to(k2_tile.dtype), k2_tile, dq2, FP32_2)
    if SUMS:
        row = (b * heads + h_all).to(tl.int64) * sizes.i + i
        tl.store(delta + row, centre, mask=i < sizes.i)
        tl.store(delta2 + row, centre2, mask=i < sizes.i)
    if DQ:
        store_tile(out_dq, b, h_all, i, d, dq * scale, sizes.i, D)
    if DQ2:
        store_tile(out_dq2, b, h_all, i, d2, dq2 * scale_of2, sizes.i, D2)


@triton.jit
def keys_kernel(
    q, k, modifiers, strides, caps, mask, key_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, key_table2, sizes2, scale_of2, scale2_of2,
    norm, norm2, delta, delta2, grad, out_dk, out_dk2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, MASK: tl.constexpr,
    MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, MEASURE: tl.constexpr, EDGES: tl.constexpr,
    DK: tl.constexpr, DK2: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_J keys of both matrices, for one head of the result."""
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    block, head = schedule_tile(blocks, batch_heads, heads_per_group)
    b, h_all = head // heads, head % heads
    h, h2 = tl.minimum(h_all, sizes.h - 1), tl.minimum(h_all, sizes2.h - 1)
    start = (blocks - 1 - block) * BLOCK_J  # the first keys are seen by most rows, so they start first
    j = start + tl.arange(0, BLOCK_J)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
    k2_tile = load_tile(k2, b, h2 // sizes2.k_group, j, d2, sizes.j, D2, True)
    dk, dk2 = tl.zeros([BLOCK_J, BLOCK_D], tl.float32), tl.zeros([BLOCK_J, BLOCK_D2], tl.float32)
    first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = row_blocks(start, b, key_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)
    begin, both_from, both_to, end = range_of_both(first, full_from, full_to, past, first2, full_from2, full_to2, past2, False)  # fmt: skip
    for SECTION in tl.static_range(3):  # edge of the masks, fully visible, edge
        if EDGES or SECTION == 1:
            begin_here = begin if SECTION == 0 else both_from if SECTION == 1 else both_to
            end_here = both_from if SECTION == 0 else both_to if SECTION == 1 else end
            for n in range(begin_here, end_here):
                i = n * BLOCK_I + tl.arange(0, BLOCK_I)
                q_tile = load_tile(q, b, h, i, d, sizes.i, D, SECTION != 1)
                q2_tile = load_tile(q2, b, h2, i, d2, sizes.i, D2, SECTION != 1)
                s, slope = scores(k_tile, q_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, MASK, FP32, True, SECTION != 1)  # fmt: skip
                s2, slope2 = scores(k2_tile, q2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, MASK2, FP32_2, True, SECTION != 1)  # fmt: skip
                m, log2l = load_norm_of(norm, b, h_all, heads, i, sizes.i)
                m2, log2l2 = load_norm_of(norm2, b, h_all, heads, i, sizes.i)
                g = load_row_of(grad, b, h_all, heads, i, sizes.i)
                w, w2, a, a2 = terms(s - m[None, :] - log2l[None, :], s2 - m2[None, :] - log2l2[None, :], MEASURE)
                if DK:
                    centre = load_row_of(delta, b, h_all, heads, i, sizes.i)
                    ds = (a - w * centre[None, :]) * g[None, :] * slope
                    dk = add_product(ds.to(q_tile.dtype), q_tile, dk, FP32)
                if DK2:
                    centre2 = load_row_of(delta2, b, h_all, heads, i, sizes.i)
                    ds2 = (a2 - w2 * centre2[None, :]) * g[None, :] * slope2
                    dk2 = add_product(ds2.to(q2_tile.dtype), q2_tile, dk2, FP32_2)
    if DK:
        store_tile(out_dk, b, h_all, j, d, dk * scale, sizes.j, D)
    if DK2:
        store_tile(out_dk2, b, h_all, j, d2, dk2 * scale_of2, sizes.j, D2)


__all__ = ["compare_kernel", "keys_kernel", "rows_kernel"]
