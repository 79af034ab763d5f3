"""Heads taken together: the weighted sum, or the largest, of the heads' weights in every cell, from the norms of all rows.

A program owns a block of rows of a group of heads and some of its key blocks. For each it adds up the weights of all heads in
registers (`heads_of_tile`), and then takes from the finished tile what is asked: Σ p log p, or the tile itself. A mean is a sum
that is divided once, at the end. Sums over key blocks are added up in a fixed order by `finish_entropy_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .comparison import key_blocks_of_all
from .tile_ops import (
    LN2,
    LOG2E,
    head_ptr,
    load_row_norm,
    log_weight,
    scores_of_head,
    visible_at_all,
)

#: Replaces a weight of 0 inside a logarithm, which 0 then multiplies.
TINY = tl.constexpr(1e-37)


@triton.jit
def heads_of_tile(
    q, k, q_desc, k_desc, q_layout, k_layout, norm, factors, modifiers, strides, caps, mask, sizes, i, j, d, b, start_i, start_j,
    first, count, scale, scale2, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, TMA: tl.constexpr, BY: tl.constexpr, HEAD_MASK: tl.constexpr,
):  # fmt: skip
    """Σ_h factor_h w_h of `count` heads from `first` on in a tile (i, j), or the largest w_h (BY "max"); 0 where hidden.

    Also the sum of their factors, which divides a mean. `norm` is (b, h, i, 2), `factors` one number a head. The mask is
    applied once, to the sum, unless heads have masks of their own (HEAD_MASK).
    """
    p, total = tl.zeros([i.shape[0], j.shape[0]], tl.float32), 0.0
    next_m2, next_log2l = load_row_norm(norm, b, first, i, sizes, SCALE_FOLDED)
    for n in range(0, count):
        h = first + n
        m2, log2l = next_m2, next_log2l
        next_m2, next_log2l = load_row_norm(norm, b, tl.minimum(h + 1, sizes.h - 1), i, sizes, SCALE_FOLDED)
        s = scores_of_head(
            q, k, q_desc, q_layout, k_desc, k_layout, modifiers, strides, caps, sizes, i, j, d, b, h, start_i, start_j, scale,
            D, MODIFIERS, SCALE_FOLDED, FP32, TMA,
        )  # fmt: skip
        w = tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
        if HEAD_MASK:
            w = tl.where(visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK), w, 0.0)
        if BY == "max":
            p = tl.maximum(p, w, propagate_nan=tl.PropagateNan.ALL)
        else:
            factor = tl.load(factors + h)
            p += factor * w
            total += factor
    if not HEAD_MASK:
        p = tl.where(visible_at_all(i[:, None], j[None, :], b, first, mask, sizes, MASK), p, 0.0)
    return p, total


@triton.jit
def work_item(n, sizes, groups, splits, BLOCK_I: tl.constexpr):
    """Sequence, group of heads, first row and split of item n. The last rows come first: under a causal mask they take longest."""
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    at = n // (splits * blocks)
    return at // groups, at % groups, (blocks - 1 - n // splits % blocks) * BLOCK_I, n % splits


@triton.jit
def entropy_kernel(
    q, k, q_desc, k_desc, q_layout, k_layout, norm, factors, modifiers, strides, caps, mask, row_table, out, sizes, groups, splits,
    scale, scale2, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    TMA: tl.constexpr, BY: tl.constexpr, HEAD_MASK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Σ_j p (log₂ total − log₂ p) of BLOCK_I rows over every `splits`-th key block, p not divided yet: (b, g, splits, i)."""
    b, group, start, split = work_item(tl.program_id(0), sizes, groups, splits, BLOCK_I)
    count = sizes.h // groups
    i, d = start + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    x = tl.zeros([BLOCK_I], tl.float32)
    first, _, _, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    for n in range(first + split, past, splits):
        j = n * BLOCK_J + tl.arange(0, BLOCK_J)
        p, total = heads_of_tile(
            q, k, q_desc, k_desc, q_layout, k_layout, norm, factors, modifiers, strides, caps, mask, sizes, i, j, d, b, start, n * BLOCK_J,
            group * count, count, scale, scale2, D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, BY, HEAD_MASK,
        )  # fmt: skip
        x += tl.sum(p * ((tl.log2(total) if BY == "mean" else 0.0) - tl.log2(tl.maximum(p, TINY))), 1)
    row = ((b * groups + group) * splits + split).to(tl.int64) * sizes.i + i
    tl.store(out + row, x, mask=i < sizes.i)


@triton.jit
def finish_entropy_kernel(
    sums, norm, factors, sink, out, sizes, groups, splits, SCALE_FOLDED: tl.constexpr, SINK: tl.constexpr, BY: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The entropy of BLOCK_I rows: sums over key blocks, and the share of a sink, which is one more outcome."""
    blocks = tl.cdiv(sizes.i, BLOCK_I)
    at = tl.program_id(0) // blocks
    b, group, count = at // groups, at % groups, sizes.h // groups
    i = tl.program_id(0) % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    x = tl.zeros([BLOCK_I], tl.float32)
    for split in range(splits):
        x += tl.load(sums + (at * splits + split).to(tl.int64) * sizes.i + i, mask=i < sizes.i, other=0.0)
    total = 1.0
    if BY == "mean":
        at_h = tl.arange(0, BLOCK_H)
        total = tl.sum(tl.load(factors + group * count + at_h, mask=at_h < count, other=0.0), 0)
    if SINK:
        p = tl.zeros([BLOCK_I], tl.float32)
        for n in range(0, count):
            h = group * count + n
            m2, log2l = load_row_norm(norm, b, h, i, sizes, SCALE_FOLDED)
            sink2 = tl.load(head_ptr(sink, b, h)).to(tl.float32) * LOG2E
            w = tl.exp2(log_weight(sink2, m2, log2l, 1.0, SCALE_FOLDED))
            p = tl.maximum(p, w, propagate_nan=tl.PropagateNan.ALL) if BY == "max" else p + tl.load(factors + h) * w
        x += p * (tl.log2(total) - tl.log2(tl.maximum(p, TINY)))
    x *= LN2
    if BY == "mean":
        x = x / total
        x = tl.where(x < 0, 0.0, x)  # rounding may put a one-hot row just below 0; this form keeps nan
    tl.store(out + at.to(tl.int64) * sizes.i + i, x, mask=i < sizes.i)


@triton.jit
def tiles_kernel(
    q, k, q_desc, k_desc, q_layout, k_layout, norm, factors, modifiers, strides, caps, mask, row_table, out, sizes, groups,
    i0, rows, j0, cols, scale, scale2, D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr,
    SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr, BY: tl.constexpr, HEAD_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of the finished matrix, for `rows` rows from i0 on and `cols` keys from j0 on: `out` (b, g, rows, cols)."""
    key_blocks = tl.cdiv(j0 + cols, BLOCK_J) - j0 // BLOCK_J
    row_blocks = tl.cdiv(i0 + rows, BLOCK_I) - i0 // BLOCK_I
    pid = tl.program_id(0)
    n, block = j0 // BLOCK_J + pid % key_blocks, i0 // BLOCK_I + pid // key_blocks % row_blocks
    at = pid // (key_blocks * row_blocks)
    b, group, count = at // groups, at % groups, sizes.h // groups
    start = block * BLOCK_I
    i, j, d = start + tl.arange(0, BLOCK_I), n * BLOCK_J + tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_D)
    first, _, _, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    shown = tl.where((n >= first) & (n < past), count, 0)
    p, total = heads_of_tile(
        q, k, q_desc, k_desc, q_layout, k_layout, norm, factors, modifiers, strides, caps, mask, sizes, i, j, d, b, start, n * BLOCK_J,
        group * count, shown, scale, scale2, D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA, BY, HEAD_MASK,
    )  # fmt: skip
    if BY == "mean":
        p = tl.div_rn(p, tl.where(total == 0.0, 1.0, total))  # of a tile that no row sees nothing was added up
    row = at.to(tl.int64) * rows + (i - i0)
    inside = (i >= i0) & (i < i0 + rows)
    tl.store(
        out + row[:, None] * cols + (j - j0)[None, :],
        p,
        mask=inside[:, None] & (j >= j0)[None, :] & (j < j0 + cols)[None, :],
    )


__all__ = ["entropy_kernel", "finish_entropy_kernel", "heads_of_tile", "tiles_kernel"]
