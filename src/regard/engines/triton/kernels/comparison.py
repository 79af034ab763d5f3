"""Two matrices row by row: the measures of `core/rows/comparison.py` and their gradients, both tiles of scores at hand.

Arguments of the first matrix, p, have plain names, those of the second, q, a 2 before the rest of the name. The state of a
row is (m, l) of both and t = Σ 2^(s − m) ((s − m) − (s' − m')), as in the compiled tiles of the CPU.

A cell of finished rows is x = s − m and y = s' − m' in base 2: p = 2^x / l, and log₂ p − log₂ q = x − y − c with one number c a
row, so that no logarithm of a weight, which is ten times as large as their difference, is rounded. Every measure is
Σ p A + q B, up to a factor, with p A and q B = p ∂f/∂p and q ∂f/∂q, whose sums over a row centre the gradients
ds = g p (A − Σ p A). A hidden score is FLOOR, which is finite: no nan arises.
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
    key_blocks,
    load_block,
    load_tile,
    per_row,
    row_blocks,
    scores_of_product,
    store_tile,
    visible,
)

#: A smaller score is hidden: FLOOR and everything that a bias may add to it.
HIDDEN = tl.constexpr(-1.0e29)


# Tiles of scores.


@triton.jit
def round_to_tf32(x):
    """float32 with the 10-bit mantissa of TF32, rounded to nearest. Tensor cores would drop the bits, always towards 0."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # the bits of a nan would carry into its sign: -0


@triton.jit
def add_product(a, b, total, FP32: tl.constexpr):
    """total + a · b. FP32: three products of rounded parts; a fourth, left out, is 2⁻²² of them, to either side.

    Their sum joins the total by an addition, which rounds: tensor cores cut what they accumulate, in every step, and of long
    sums that was eight times plain PyTorch's error.
    """
    if FP32:
        a_high, b_high = round_to_tf32(a), round_to_tf32(b)
        a_low, b_low = round_to_tf32(a - a_high), round_to_tf32(b - b_high)
        product = tl.dot(a_low, b_high, input_precision="tf32")
        product = tl.dot(a_high, b_low, product, input_precision="tf32")
        return total + tl.dot(a_high, b_high, product, input_precision="tf32")
    return tl.dot(a, b, total, input_precision="tf32")


@triton.jit
def scores(
    a, b_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS: tl.constexpr, FOLDED: tl.constexpr,
    MASK: tl.constexpr, FP32: tl.constexpr, KEYS_FIRST: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2, FLOOR where hidden, and their slope; a · bᵀ is (i, j), with KEYS_FIRST (j, i).

    FOLDED: a moderate scale and no modifiers. Then these are products, which `above` scales and centres in one FMA.
    """
    s = add_product(a, b_tile.T, tl.zeros([a.shape[0], b_tile.shape[0]], tl.float32), FP32)
    return scores_of_product(
        s, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, FOLDED, MASK, KEYS_FIRST, EDGE
    )


@triton.jit
def hide_both(s, s2, i, j, b, h, h2, mask, sizes, mask2, sizes2, MASK: tl.constexpr, MASK2: tl.constexpr):
    """Both tiles of scores, FLOOR where hidden by masks of one interval a row. Two causal masks are one."""
    shown = visible(i, j, b, h, 0, mask, sizes, MASK)
    shown2 = shown
    if MASK != MASK2 or MASK == "band":
        shown2 = visible(i, j, b, h2, 0, mask2, sizes2, MASK2)
    return tl.where(shown, s, FLOOR), tl.where(shown2, s2, FLOOR)


@triton.jit
def above(s, m, scale2, FOLDED: tl.constexpr):
    """s − m."""
    if FOLDED:
        return s * scale2 - m
    return s - m


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


# Cells and measures.


@triton.jit
def merge_rows(
    s, s2, m, l, m2, l2, t, forbidden, scale2, scale2_of2, MEASURE: tl.constexpr, FOLDED: tl.constexpr, FOLDED2: tl.constexpr,
    HIDES: tl.constexpr,
):  # fmt: skip
    """Merge one tile of both matrices into the states of its rows: t of kl and of the cross-entropy, of others the norms alone."""
    new, new2 = tl.max(s, 1), tl.max(s2, 1)
    if FOLDED:
        new = new * scale2
    if FOLDED2:
        new2 = new2 * scale2_of2
    new, new2 = tl.maximum(m, new), tl.maximum(m2, new2)
    x, y = above(s, new[:, None], scale2, FOLDED), above(s2, new2[:, None], scale2_of2, FOLDED2)
    p, alpha = tl.exp2(x), tl.exp2(m - new)
    # A row that has seen no key of the first has nothing to move, and 0 · huge is 0.
    if MEASURE == "kl":
        t = alpha * (t + ((m - new) - (m2 - new2)) * l) + tl.sum(p * (x - y), 1)
    elif MEASURE == "cross_entropy":
        t = alpha * (t - (m2 - new2) * l) - tl.sum(p * y, 1)
    if HIDES and (MEASURE == "kl" or MEASURE == "cross_entropy"):
        forbidden += tl.sum(tl.where((s > HIDDEN) & (s2 <= HIDDEN), 1.0, 0.0), 1)
    l = alpha * l + tl.sum(p, 1)
    l2 = tl.exp2(m2 - new2) * l2 + tl.sum(tl.exp2(y), 1)
    return new, l, new2, l2, t, forbidden


@triton.jit
def store_norms(out, out_norm, out_norm2, m, l, m2, l2, t, forbidden, b, h, heads, i, I, MEASURE: tl.constexpr):
    """Store the measure of finished rows and the norms of both matrices: without a key m = HUGE and l = 0."""
    at, there, seen, seen2 = (b * heads + h).to(tl.int64) * I + i, i < I, l != 0.0, l2 != 0.0
    if MEASURE == "kl" or MEASURE == "cross_entropy":
        value = t / tl.where(seen, l, 1.0) + tl.log2(tl.where(seen2, l2, 1.0))
        if MEASURE == "kl":
            value -= tl.log2(tl.where(seen, l, 1.0))
        value = tl.where(forbidden > 0.0, float("inf"), tl.where(seen, value * LN2, 0.0))
        tl.store(out + at, value, mask=there)
    tl.store(out_norm + 2 * at, tl.where(seen, m, HUGE), mask=there)
    tl.store(out_norm + 2 * at + 1, l, mask=there)
    tl.store(out_norm2 + 2 * at, tl.where(seen2, m2, HUGE), mask=there)
    tl.store(out_norm2 + 2 * at + 1, l2, mask=there)


@triton.jit
def one_minus_log2_of_1p(e):
    """1 − log₂(1 + e) for 0 ≤ e ≤ 1, a polynomial: the special functions are what such kernels wait for."""
    z = 0.5 - 0.5 * e  # −log₂(1 − z)
    high = 0.381661475 + z * (-0.26195249 + z * (1.73846757 + z * (-2.35189819 + z * 2.03125215)))
    return z * (1.44269502 + z * (0.721338511 + z * (0.481372505 + z * (0.351205975 + z * high))))


@triton.jit
def terms(x, y, c, MEASURE: tl.constexpr):
    """A and B of every cell: of js in units of log 2 / 2."""
    d = x - y - c
    if MEASURE == "js":
        # log₂(2p / (p + q)) = 1 − log₂(1 + 2^−d), without a large power.
        larger = one_minus_log2_of_1p(tl.exp2(-tl.abs(d)))
        a, b = larger + tl.minimum(d, 0.0), larger - tl.maximum(d, 0.0)
    elif MEASURE == "overlap":
        a = tl.where(d == 0.0, 0.5, tl.where(d < 0.0, 1.0, 0.0))
        b = 1.0 - a
    else:  # total_variation
        a = tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, 0.0))
        b = -a
    return a, b


@triton.jit
def add_terms(x, y, c, total, total2, MEASURE: tl.constexpr):
    """Add l Σ p A and l' Σ q B of a tile to those of its rows."""
    a, b = terms(x, y, c, MEASURE)
    return total + tl.sum(tl.exp2(x) * a, 1), total2 + tl.sum(tl.exp2(y) * b, 1)


@triton.jit
def score_grads(
    s, s2, rows, slope, slope2, scale2, scale2_of2, MEASURE: tl.constexpr, FOLDED: tl.constexpr, FOLDED2: tl.constexpr,
    KEYS_FIRST: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of both, in the unit of the measure, from the terms of their rows."""
    m, m2, c, share, share2, centre, centre2 = rows
    x = above(s, per_row(m, KEYS_FIRST), scale2, FOLDED)
    y = above(s2, per_row(m2, KEYS_FIRST), scale2_of2, FOLDED2)
    c = per_row(c, KEYS_FIRST)
    p, q = per_row(share, KEYS_FIRST) * tl.exp2(x), per_row(share2, KEYS_FIRST) * tl.exp2(y)
    if MEASURE == "kl":
        ds, ds2 = p * (x - y - c), q - p
    elif MEASURE == "cross_entropy":
        ds, ds2 = p * (c - y), q - p
    else:
        a, b = terms(x, y, c, MEASURE)
        ds, ds2 = p * (a - per_row(centre, KEYS_FIRST)), q * (b - per_row(centre2, KEYS_FIRST))
    if HIDES:  # in a row that is nan, 0 · nan would reach hidden keys
        ds, ds2 = tl.where(s <= HIDDEN, 0.0, ds), tl.where(s2 <= HIDDEN, 0.0, ds2)
    return ds * slope, ds2 * slope2


@triton.constexpr_function
def unit(measure, second):
    """Factor of a measure's terms, which its sums and gradients are multiplied by in the end."""
    if measure == "js":
        return 0.5 * 0.6931471805599453
    return 0.6931471805599453 if measure in ("kl", "cross_entropy") and not second else 1.0


# Kernels.


@triton.jit
def compare_kernel(
    q, k, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, row_table2, sizes2, scale_of2, scale2_of2,
    desc, layout, desc2, layout2, out, out_norm, out_norm2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, FOLDED: tl.constexpr, FOLDED2: tl.constexpr,
    MASK: tl.constexpr, MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, MEASURE: tl.constexpr, TMA: tl.constexpr,
    EDGES: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """kl or cross-entropy of BLOCK_I rows, and the norms of both matrices; of another measure the norms alone."""
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
                k_tile = load_block(k, desc, layout, b, h // sizes.k_group, n * BLOCK_J, j, d, sizes.j, D, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                k2_tile = load_block(k2, desc2, layout2, b, h2 // sizes2.k_group, n * BLOCK_J, j, d2, sizes.j, D2, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                s, _ = scores(q_tile, k_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, FOLDED, MASK, FP32, False, SECTION != 1)  # fmt: skip
                s2, _ = scores(q2_tile, k2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, FOLDED2, MASK2, FP32_2, False, SECTION != 1)  # fmt: skip
                m, l, m2, l2, t, forbidden = merge_rows(
                    s, s2, m, l, m2, l2, t, forbidden, scale2, scale2_of2, MEASURE, FOLDED, FOLDED2,
                    SECTION != 1 or len(MODIFIERS2) > 0,
                )  # fmt: skip
    store_norms(out, out_norm, out_norm2, m, l, m2, l2, t, forbidden, b, h_all, heads, i, sizes.i, MEASURE)


@triton.jit
def load_norms(norm, norm2, b, h, heads, i, I):
    """m, m', c, 1 / l and 1 / l' of rows; past the end and without keys every weight is 0."""
    at, there = 2 * ((b * heads + h).to(tl.int64) * I + i), i < I
    m, l = tl.load(norm + at, mask=there, other=HUGE), tl.load(norm + at + 1, mask=there, other=0.0)
    m2, l2 = tl.load(norm2 + at, mask=there, other=HUGE), tl.load(norm2 + at + 1, mask=there, other=0.0)
    l, l2 = tl.where(l == 0.0, 1.0, l), tl.where(l2 == 0.0, 1.0, l2)
    return m, m2, tl.log2(l) - tl.log2(l2), 1.0 / l, 1.0 / l2


@triton.jit
def store_sums(delta, delta2, total, total2, share, share2, b, h, heads, i, I, MEASURE: tl.constexpr):
    at = (b * heads + h).to(tl.int64) * I + i
    tl.store(delta + at, total * share * unit(MEASURE, False), mask=i < I)
    tl.store(delta2 + at, total2 * share2 * unit(MEASURE, True), mask=i < I)


@triton.jit
def row_terms_kernel(norm, norm2, delta, delta2, grad, out, rows, MEASURE: tl.constexpr, BLOCK: tl.constexpr):
    """Terms of rows for the gradients of their cells: m, m', c, g / l, g / l', and both centres in the unit of the measure."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    m, l = tl.load(norm + 2 * row, mask=there, other=HUGE), tl.load(norm + 2 * row + 1, mask=there, other=0.0)
    m2, l2 = tl.load(norm2 + 2 * row, mask=there, other=HUGE), tl.load(norm2 + 2 * row + 1, mask=there, other=0.0)
    a, b = tl.load(delta + row, mask=there, other=0.0), tl.load(delta2 + row, mask=there, other=0.0)
    g = tl.load(grad + row, mask=there, other=0.0)
    l, l2 = tl.where(l == 0.0, 1.0, l), tl.where(l2 == 0.0, 1.0, l2)
    c = tl.log2(l) - tl.log2(l2)
    share, share2 = g / l, g / l2
    if MEASURE == "kl":  # centred by c as well
        c, share2 = c + a / LN2, -b * share2
    elif MEASURE == "cross_entropy":
        c, share2 = tl.log2(l2) - a / LN2, -b * share2
    idle = g == 0.0  # 0 · nan, in a row that is infinite or unused
    tl.store(out + row, m, mask=there)
    tl.store(out + rows + row, m2, mask=there)
    tl.store(out + 2 * rows + row, c, mask=there)
    tl.store(out + 3 * rows + row, tl.where(idle, 0.0, share), mask=there)
    tl.store(out + 4 * rows + row, tl.where(idle, 0.0, share2), mask=there)
    tl.store(out + 5 * rows + row, a / unit(MEASURE, False), mask=there)
    tl.store(out + 6 * rows + row, b / unit(MEASURE, True), mask=there)


@triton.jit
def load_row_terms(row_terms, rows, b, h, heads, i, I, MEASURE: tl.constexpr):
    """Terms of rows, from `row_terms_kernel`; past the end every weight is 0."""
    at, there = row_terms + (b * heads + h).to(tl.int64) * I + i, i < I
    m, m2 = tl.load(at, mask=there, other=HUGE), tl.load(at + rows, mask=there, other=HUGE)
    c = tl.load(at + 2 * rows, mask=there, other=0.0)
    share, share2 = tl.load(at + 3 * rows, mask=there, other=0.0), tl.load(at + 4 * rows, mask=there, other=0.0)
    centre, centre2 = c, c
    if MEASURE != "kl" and MEASURE != "cross_entropy":
        centre, centre2 = tl.load(at + 5 * rows, mask=there, other=0.0), tl.load(at + 6 * rows, mask=there, other=0.0)
    return m, m2, c, share, share2, centre, centre2


@triton.jit
def sums_kernel(
    q, k, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, row_table2, sizes2, scale_of2, scale2_of2,
    desc, layout, desc2, layout2, norm, norm2, delta, delta2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, FOLDED: tl.constexpr, FOLDED2: tl.constexpr,
    MASK: tl.constexpr, MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, MEASURE: tl.constexpr, TMA: tl.constexpr,
    EDGES: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """Σ p A and Σ q B of BLOCK_I finished rows, which add up to the measure."""
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), batch_heads, heads_per_group)
    b, h_all = head // heads, head % heads
    h, h2 = tl.minimum(h_all, sizes.h - 1), tl.minimum(h_all, sizes2.h - 1)
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    q_tile, q2_tile = load_tile(q, b, h, i, d, sizes.i, D, True), load_tile(q2, b, h2, i, d2, sizes.i, D2, True)
    m, m2, c, share, share2 = load_norms(norm, norm2, b, h_all, heads, i, sizes.i)
    total, total2 = tl.zeros([BLOCK_I], tl.float32), tl.zeros([BLOCK_I], tl.float32)
    first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = key_blocks_of_all(start, b, row_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)  # fmt: skip
    begin, both_from, both_to, end = range_of_both(first, full_from, full_to, past, first2, full_from2, full_to2, past2, MASK == "intervals" or MASK2 == "intervals")  # fmt: skip
    for SECTION in tl.static_range(3):  # edge of the masks, fully visible, edge
        if EDGES or SECTION == 1:
            begin_here = begin if SECTION == 0 else both_from if SECTION == 1 else both_to
            end_here = both_from if SECTION == 0 else both_to if SECTION == 1 else end
            for n in range(begin_here, end_here):
                j = n * BLOCK_J + tl.arange(0, BLOCK_J)
                k_tile = load_block(k, desc, layout, b, h // sizes.k_group, n * BLOCK_J, j, d, sizes.j, D, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                k2_tile = load_block(k2, desc2, layout2, b, h2 // sizes2.k_group, n * BLOCK_J, j, d2, sizes.j, D2, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                s, _ = scores(q_tile, k_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, FOLDED, MASK, FP32, False, SECTION != 1)  # fmt: skip
                s2, _ = scores(q2_tile, k2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, FOLDED2, MASK2, FP32_2, False, SECTION != 1)  # fmt: skip
                total, total2 = add_terms(
                    above(s, m[:, None], scale2, FOLDED), above(s2, m2[:, None], scale2_of2, FOLDED2), c[:, None], total, total2, MEASURE
                )  # fmt: skip
    store_sums(delta, delta2, total, total2, share, share2, b, h_all, heads, i, sizes.i, MEASURE)


@triton.jit
def queries_kernel(
    q, k, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, row_table2, sizes2, scale_of2, scale2_of2,
    desc, layout, desc2, layout2, row_terms, all_rows, out_dq, out_dq2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, FOLDED: tl.constexpr, FOLDED2: tl.constexpr,
    MASK: tl.constexpr, MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, MEASURE: tl.constexpr, TMA: tl.constexpr,
    EDGES: tl.constexpr, DQ: tl.constexpr, DQ2: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_I queries of both matrices."""
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), batch_heads, heads_per_group)
    b, h_all = head // heads, head % heads
    h, h2 = tl.minimum(h_all, sizes.h - 1), tl.minimum(h_all, sizes2.h - 1)
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    q_tile, q2_tile = load_tile(q, b, h, i, d, sizes.i, D, True), load_tile(q2, b, h2, i, d2, sizes.i, D2, True)
    rows = load_row_terms(row_terms, all_rows, b, h_all, heads, i, sizes.i, MEASURE)
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
                k_tile = load_block(k, desc, layout, b, h // sizes.k_group, n * BLOCK_J, j, d, sizes.j, D, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                k2_tile = load_block(k2, desc2, layout2, b, h2 // sizes2.k_group, n * BLOCK_J, j, d2, sizes.j, D2, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                s, slope = scores(q_tile, k_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, FOLDED, MASK, FP32, False, SECTION != 1)  # fmt: skip
                s2, slope2 = scores(q2_tile, k2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, FOLDED2, MASK2, FP32_2, False, SECTION != 1)  # fmt: skip
                ds, ds2 = score_grads(
                    s, s2, rows, slope, slope2, scale2, scale2_of2, MEASURE, FOLDED, FOLDED2, False,
                    SECTION != 1 or len(MODIFIERS) + len(MODIFIERS2) > 0,
                )  # fmt: skip
                if DQ:
                    dq = add_product(ds.to(k_tile.dtype), k_tile, dq, FP32)
                if DQ2:
                    dq2 = add_product(ds2.to(k2_tile.dtype), k2_tile, dq2, FP32_2)
    if DQ:
        store_tile(out_dq, b, h_all, i, d, dq * (scale * unit(MEASURE, False)), sizes.i, D)
    if DQ2:
        store_tile(out_dq2, b, h_all, i, d2, dq2 * (scale_of2 * unit(MEASURE, True)), sizes.i, D2)


@triton.jit
def keys_kernel(
    q, k, modifiers, strides, caps, mask, key_table, sizes, scale, scale2,
    q2, k2, modifiers2, strides2, caps2, mask2, key_table2, sizes2, scale_of2, scale2_of2,
    desc, layout, desc2, layout2, row_terms, all_rows, out_dk, out_dk2, heads, batch_heads, heads_per_group,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MODIFIERS2: tl.constexpr, FOLDED: tl.constexpr, FOLDED2: tl.constexpr,
    MASK: tl.constexpr, MASK2: tl.constexpr, FP32: tl.constexpr, FP32_2: tl.constexpr, MEASURE: tl.constexpr, TMA: tl.constexpr,
    EDGES: tl.constexpr, DK: tl.constexpr, DK2: tl.constexpr,
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
                q_tile = load_block(q, desc, layout, b, h, n * BLOCK_I, i, d, sizes.i, D, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                q2_tile = load_block(q2, desc2, layout2, b, h2, n * BLOCK_I, i, d2, sizes.i, D2, TMA and SECTION == 1, SECTION != 1)  # fmt: skip
                s, slope = scores(k_tile, q_tile, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, FOLDED, MASK, FP32, True, SECTION != 1)  # fmt: skip
                s2, slope2 = scores(k2_tile, q2_tile, i, j, b, h2, modifiers2, strides2, caps2, mask2, sizes2, scale_of2, scale2_of2, MODIFIERS2, FOLDED2, MASK2, FP32_2, True, SECTION != 1)  # fmt: skip
                rows = load_row_terms(row_terms, all_rows, b, h_all, heads, i, sizes.i, MEASURE)
                ds, ds2 = score_grads(
                    s, s2, rows, slope, slope2, scale2, scale2_of2, MEASURE, FOLDED, FOLDED2, True,
                    SECTION != 1 or len(MODIFIERS) + len(MODIFIERS2) > 0,
                )  # fmt: skip
                if DK:
                    dk = add_product(ds.to(q_tile.dtype), q_tile, dk, FP32)
                if DK2:
                    dk2 = add_product(ds2.to(q2_tile.dtype), q2_tile, dk2, FP32_2)
    if DK:
        store_tile(out_dk, b, h_all, j, d, dk * (scale * unit(MEASURE, False)), sizes.j, D)
    if DK2:
        store_tile(out_dk2, b, h_all, j, d2, dk2 * (scale_of2 * unit(MEASURE, True)), sizes.j, D2)


__all__ = ["compare_kernel", "keys_kernel", "queries_kernel", "row_terms_kernel", "sums_kernel"]
