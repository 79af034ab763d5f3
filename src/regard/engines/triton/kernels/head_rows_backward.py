"""Gradients of the entropy of heads together, from tiles of their finished matrix p̄ and the norms of all heads.

With L = −log p̄ the entropy of a row has the gradient f_h w_h (L − E_h) in the scores of head h, where f_h is the head's share
and E_h = Σ w_h L: the constant of d(−p̄ log p̄) = (L − 1) dp̄ cancels in a softmax. `rows_kernel` owns rows of one head, takes E_h
in a first walk over the keys and the gradient of the queries in a second; `keys_kernel` owns keys. Both read p̄ of a strip of
rows, which the heads of a group share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .comparison import key_blocks_of_all
from .head_rows import TINY
from .tile_ops import (
    LN2,
    add_product,
    load_row_norm,
    load_row_values,
    load_tile,
    log_weight,
    product,
    row_blocks,
    scores_of_product,
    store_tile,
)


@triton.jit
def minus_log2(strip, at, i, j, i0, rows, cols):
    """−log₂ p̄ of a tile, from a strip (b, g, rows, cols) of rows from i0 on; 0 where it holds no cell. i and j as in the tile."""
    cell = (at.to(tl.int64) * rows + (i - i0)) * cols + j
    p = tl.load(strip + cell, mask=(i < i0 + rows) & (j < cols), other=1.0)
    return -tl.log2(tl.maximum(p, TINY))


@triton.jit
def rows_kernel(
    q, k, norm, factors, grad, strip, modifiers, strides, caps, mask, row_table, out_centre, out_dq, sizes, groups, i0, rows, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """E and the gradient of the queries of BLOCK_I rows of one head."""
    row_blocks_here = tl.cdiv(rows, BLOCK_I)
    h, at = tl.program_id(0) % sizes.h, tl.program_id(0) // sizes.h  # heads side by side: they read the same p̄
    b, start = at // row_blocks_here, i0 + (row_blocks_here - 1 - at % row_blocks_here) * BLOCK_I
    at = b * groups + h // (sizes.h // groups)
    i, d = start + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    m2, log2l = load_row_norm(norm, b, h, i, sizes, SCALE_FOLDED)
    centre = tl.zeros([BLOCK_I], tl.float32)
    g = load_row_of_group(grad, at, i, sizes) * tl.load(factors + h)
    dq = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    first, _, _, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    for WALK in tl.static_range(2):
        for n in range(first, past):
            j = n * BLOCK_J + tl.arange(0, BLOCK_J)
            k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
            # By the product that made the norm.
            s, slope = scores_of_product(product(q_tile, k_tile.T, FP32), i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, False, MASK, False, True)  # fmt: skip
            w = tl.exp2(log_weight(s, m2[:, None], log2l[:, None], 1.0, SCALE_FOLDED))
            x = minus_log2(strip, at, i[:, None], j[None, :], i0, rows, sizes.j)
            if WALK == 0:
                centre += tl.sum(w * x, 1)
            else:
                ds = w * (x - centre[:, None]) * slope
                dq = add_product(ds.to(k_tile.dtype), k_tile, dq, FP32)
    tl.store(out_centre + (b * sizes.h + h).to(tl.int64) * sizes.i + i, centre, mask=i < sizes.i)
    store_tile(out_dq, b, h, i, d, dq * (g * (scale * LN2))[:, None], sizes.i, D)


@triton.jit
def load_row_of_group(x, at, i, sizes):
    """One number for each of rows i of a group, from a contiguous tensor (b, g, i)."""
    return tl.load(x + at.to(tl.int64) * sizes.i + i, mask=i < sizes.i, other=0.0)


@triton.jit
def keys_kernel(
    q, k, norm, factors, grad, strip, centre, modifiers, strides, caps, mask, key_table, out_dk, sizes, groups, i0, rows, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, ADD: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of BLOCK_J keys of one head from a strip of rows; ADD: to that of earlier strips, in float32."""
    h, at = tl.program_id(0) % sizes.h, tl.program_id(0) // sizes.h
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    b, start = at // blocks, at % blocks * BLOCK_J  # the first keys are seen by most rows, so they start first
    at = b * groups + h // (sizes.h // groups)
    j, d = start + tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_D)
    k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
    dk = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    first, _, _, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first, past = tl.maximum(first, i0 // BLOCK_I), tl.minimum(past, tl.cdiv(i0 + rows, BLOCK_I))
    for n in range(first, past):
        i = n * BLOCK_I + tl.arange(0, BLOCK_I)
        q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
        s, slope = scores_of_product(product(k_tile, q_tile.T, FP32), i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS, False, MASK, True, True)  # fmt: skip
        m2, log2l = load_row_norm(norm, b, h, i, sizes, SCALE_FOLDED)
        w = tl.exp2(log_weight(s, m2[None, :], log2l[None, :], 1.0, SCALE_FOLDED))
        x = minus_log2(strip, at, i[None, :], j[:, None], i0, rows, sizes.j)
        g = load_row_of_group(grad, at, i, sizes) * tl.load(factors + h)
        c = load_row_values(centre, b, h, i, sizes, 0.0)
        ds = w * (x - c[None, :]) * g[None, :] * slope
        dk = add_product(ds.to(q_tile.dtype), q_tile, dk, FP32)
    dk *= scale * LN2
    if ADD:
        dk += load_tile(out_dk, b, h, j, d, sizes.j, D, True)
    store_tile(out_dk, b, h, j, d, dk, sizes.j, D)


__all__ = ["keys_kernel", "rows_kernel"]
