"""The backward pass: weights are recomputed, and with them the gradient of the scores.

In every cell  ds = w ∘ (left · right + d_distance |distance| − delta − d_entropy log w),  as in `ScoreGrad`. The output's
part of left · right (dp) is a product on tensor cores; the few further columns (received, mass, …) are added one by one.
`dkdv_kernel` owns a block of keys and computes dk and dv, `dq_kernel` owns a block of rows and computes dq; each sums in a
fixed order. `modifier_grad_kernel` computes the gradient of one modifier. Additive scores sum their gradients in memory
(`add_tanh_grad`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .additive import add_tanh_grad, tanh_sum
from .forward import schedule_tile
from .tile_ops import (
    LN2,
    add_product,
    apply_score_mods,
    head_ptr,
    key_blocks,
    load_block,
    load_norm2,
    load_row_values,
    load_tile,
    log_weight,
    per_key,
    per_row,
    product,
    row_blocks,
    store_row,
    store_tile,
    visible,
    visible_at_all,
)


class ScoreGradArg(NamedTuple):
    """`ScoreGrad` as a kernel argument: row terms (b, h, i) and the further columns of left and right, all contiguous."""

    norm: Any
    delta: Any
    d_entropy: Any
    d_distance: Any
    left: Any  # b h i x
    right: Any  # b|1 h|1 j x
    right_b: int
    right_h: int
    n_extra: int


@triton.jit
def row_dot_kernel(a, b, out, heads, I, E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_E: tl.constexpr):
    """Σ_e a b of BLOCK_I rows."""
    blocks = tl.cdiv(I, BLOCK_I)
    head = tl.program_id(0) // blocks
    n, h = head // heads, head % heads
    i = tl.program_id(0) % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    e = tl.arange(0, BLOCK_E)
    x = load_tile(a, n, h, i, e, I, E, True).to(tl.float32) * load_tile(b, n, h, i, e, I, E, True).to(tl.float32)
    store_row(out, n, h, i, tl.sum(x, 1), I)


@triton.jit
def reorder_kernel(parts, out, scale, heads, I, D: tl.constexpr):
    """A tile of 64 × 64 numbers that lie in the order of the registers of a Hopper product, times scale, to its rows and columns."""
    per_row = D // 64
    head, tile = tl.program_id(0) // (I // 64 * per_row), tl.program_id(0) % (I // 64 * per_row)
    x = tl.load(parts + tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096))
    # Of an element: warp, row and column of its thread; which half of 16 rows, which 8 columns, which of 2.
    x = tl.permute(tl.reshape(x, (4, 8, 4, 2, 8, 2)), (0, 3, 1, 4, 2, 5))
    i, d = tile // per_row * 64 + tl.arange(0, 64), tile % per_row * 64 + tl.arange(0, 64)
    store_tile(out, head // heads, head % heads, i, d, tl.reshape(x, (64, 64)) * scale, I, D)


@triton.jit
def row_terms(grad, i, b, h, sizes, SCALE_FOLDED: tl.constexpr, D_ENTROPY: tl.constexpr, D_DISTANCE: tl.constexpr):
    """Terms that are constant along a row: m2, log₂ l, delta, d_entropy in base 2, d_distance."""
    m2, log2l = load_norm2(grad.norm, b, h, i, sizes, SCALE_FOLDED)
    delta = load_row_values(grad.delta, b, h, i, sizes, 0.0)
    d_entropy2, d_distance = delta, delta
    if D_ENTROPY:
        d_entropy2 = load_row_values(grad.d_entropy, b, h, i, sizes, 0.0) * LN2
    if D_DISTANCE:
        d_distance = load_row_values(grad.d_distance, b, h, i, sizes, 0.0)
    return m2, log2l, delta, d_entropy2, d_distance


@triton.jit
def extra_column(grad, row, head, x, i, j, sizes, KEYS_FIRST: tl.constexpr):
    """The term of a tile that column x of left · right adds."""
    left = tl.load(grad.left + row * grad.n_extra + x, mask=i < sizes.i, other=0.0)
    right = tl.load(head + j.to(tl.int64) * grad.n_extra + x, mask=j < sizes.j, other=0.0)
    return per_row(left, KEYS_FIRST) * per_key(right, KEYS_FIRST)


@triton.jit
def score_grad(
    dp, w, log2w, slope, delta, d_entropy2, d_distance, grad, i, j, b, h, sizes,
    D_ENTROPY: tl.constexpr, D_DISTANCE: tl.constexpr, EXTRA: tl.constexpr, FP32: tl.constexpr, KEYS_FIRST: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """ds of a tile; `dp` is the output's part of left · right. At an EDGE of the mask some weights are 0."""
    if EXTRA:
        row = (b * sizes.h + h).to(tl.int64) * sizes.i + i
        head = grad.right + b.to(tl.int64) * grad.right_b + h.to(tl.int64) * grad.right_h
        if FP32:
            # Partial sums of 16: a running sum of hundreds of columns would lose the last digits. 16-bit types have none to
            # lose, and their larger tiles leave no registers for a second sum.
            for begin in range(0, grad.n_extra, 16):
                some = tl.zeros_like(dp)
                for x in range(begin, tl.minimum(begin + 16, grad.n_extra)):
                    some += extra_column(grad, row, head, x, i, j, sizes, KEYS_FIRST)
                dp += some
        else:
            for x in range(0, grad.n_extra):
                dp += extra_column(grad, row, head, x, i, j, sizes, KEYS_FIRST)
    dp -= per_row(delta, KEYS_FIRST)
    if D_DISTANCE:
        distance = tl.abs(per_row(i + sizes.offset, KEYS_FIRST) - per_key(j, KEYS_FIRST)).to(tl.float32)
        dp += per_row(d_distance, KEYS_FIRST) * distance
    if D_ENTROPY:
        dp -= per_row(d_entropy2, KEYS_FIRST) * log2w
    if EDGE:
        dp = tl.where(w == 0.0, 0.0, dp)  # in a row that is nan, 0 · nan would reach hidden keys
    return w * dp * slope


@triton.jit
def add_dkdv(
    k_tile, v_tile, q, dy, tanh_arg, tanh_grad, q_desc, dy_desc, q_layout, dy_layout, modifiers, strides, caps, mask, grad, sizes, j, d, e, b, h,
    dk, dv, scale, scale2, begin, end, SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr,
    SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, FP32_V: tl.constexpr, Y: tl.constexpr, D_ENTROPY: tl.constexpr,
    D_DISTANCE: tl.constexpr, EXTRA: tl.constexpr, TMA: tl.constexpr, BLOCK_I: tl.constexpr, EDGE: tl.constexpr,
    EVEN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the contributions of row blocks `begin` to `end` to dk and dv."""
    i_first = begin * BLOCK_I + tl.arange(0, BLOCK_I)
    next_m2, next_log2l, next_delta, next_d_entropy2, next_d_distance = row_terms(
        grad, i_first, b, h, sizes, SCALE_FOLDED, D_ENTROPY, D_DISTANCE
    )
    for n in range(begin, end):
        i = n * BLOCK_I + tl.arange(0, BLOCK_I)
        m2, log2l, delta, d_entropy2, d_distance = next_m2, next_log2l, next_delta, next_d_entropy2, next_d_distance
        # One block ahead by hand: the compiler prefetches only the operands of products.
        next_m2, next_log2l, next_delta, next_d_entropy2, next_d_distance = row_terms(
            grad, i + BLOCK_I, b, h, sizes, SCALE_FOLDED, D_ENTROPY, D_DISTANCE
        )
        if SIMILARITY == "product":
            q_tile = load_block(
                q, q_desc, q_layout, b, h, n * BLOCK_I, i, d, sizes.i, D, TMA and (EVEN_BLOCKS or not EDGE), EDGE
            )
            s = product(k_tile, q_tile.T, FP32)  # j i
        else:
            s = tanh_sum(tanh_arg, i, j, b, h, h // sizes.k_group, sizes, SIMILARITY, True)
        s, slope = apply_score_mods(
            s, i[None, :], j[:, None], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, -1
        )
        log2w = log_weight(s, m2[None, :], log2l[None, :], scale2, SCALE_FOLDED)
        w = tl.exp2(log2w)
        if EDGE:
            w = tl.where(visible_at_all(i[None, :], j[:, None], b, h, mask, sizes, MASK), w, 0.0)
        if Y:
            dy_tile = load_block(
                dy, dy_desc, dy_layout, b, h, n * BLOCK_I, i, e, sizes.i, E, TMA and (EVEN_BLOCKS or not EDGE), EDGE
            )
            dv = add_product(w.to(dy_tile.dtype), dy_tile, dv, FP32_V)
            dp = product(v_tile, dy_tile.T, FP32_V)
        else:
            dp = tl.zeros_like(s)
        ds = score_grad(
            dp, w, log2w, slope, delta, d_entropy2, d_distance, grad, i, j, b, h, sizes, D_ENTROPY, D_DISTANCE, EXTRA, FP32,
            True, EDGE,
        )  # fmt: skip
        if SIMILARITY == "product":
            dk = add_product(ds.to(q_tile.dtype), q_tile, dk, FP32)
        else:
            add_tanh_grad(ds, tanh_arg, tanh_grad, i, j, b, h, h // sizes.k_group, sizes, SIMILARITY, True)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, k, v, dy, tanh_arg, tanh_grad, q_desc, dy_desc, q_layout, dy_layout, modifiers, strides, caps, mask, key_table, grad, out_dk, out_dv, sizes, heads, group, batch,
    heads_per_group, scale, scale2, SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_V: tl.constexpr, Y: tl.constexpr, D_ENTROPY: tl.constexpr, D_DISTANCE: tl.constexpr,
    EXTRA: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_J keys of one of `heads` output heads, each the sum of `group` query heads."""
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    block, head = schedule_tile(blocks, heads * batch, heads_per_group)
    b, out_head = head // heads, head % heads
    start = (blocks - 1 - block) * BLOCK_J  # the first keys are seen by most rows, so they start first
    j = start + tl.arange(0, BLOCK_J)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k_tile = j
    if SIMILARITY == "product":
        k_tile = load_tile(k, b, out_head * group // sizes.k_group, j, d, sizes.j, D, True)
    else:
        tanh_grad += head.to(tl.int64) * tanh_arg.a * tanh_arg.keys
    v_tile = load_tile(v, b, out_head * group // sizes.v_group, j, e, sizes.j, E, True) if Y else k_tile
    dk = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_J, BLOCK_E], tl.float32)
    first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    for n in range(0, group):
        h = out_head * group + n
        for SECTION in tl.static_range(3):  # edge of the mask, fully visible, edge
            if EDGES or SECTION == 1:
                begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
                end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
                dk, dv = add_dkdv(
                    k_tile, v_tile, q, dy, tanh_arg, tanh_grad, q_desc, dy_desc, q_layout, dy_layout, modifiers, strides, caps, mask, grad, sizes, j, d, e, b, h,
                    dk, dv, scale, scale2, begin, end, SIMILARITY, D, E, MODIFIERS, MASK, SCALE_FOLDED, FP32, FP32_V, Y, D_ENTROPY, D_DISTANCE, EXTRA, TMA,
                    BLOCK_I, SECTION != 1, EVEN_BLOCKS,
                )  # fmt: skip
    if SIMILARITY == "product":
        store_tile(out_dk, b, out_head, j, d, dk * scale, sizes.j, D)
    if Y:
        store_tile(out_dv, b, out_head, j, e, dv, sizes.j, E)


@triton.jit
def add_dq(
    q_tile, dy_tile, m2, log2l, delta, d_entropy2, d_distance, k, v, tanh_arg, tanh_grad, k_desc, v_desc, k_layout, v_layout, modifiers, strides, caps, mask, grad, sizes,
    i, d, e, b, h, r, dq, scale, scale2, begin, split, jump, end, SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr,
    SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, FP32_V: tl.constexpr, Y: tl.constexpr, D_ENTROPY: tl.constexpr,
    D_DISTANCE: tl.constexpr, EXTRA: tl.constexpr, TMA: tl.constexpr, BLOCK_J: tl.constexpr, EDGE: tl.constexpr,
    EVEN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the contributions of key blocks `begin` to `split` and `jump` to `end` to dq."""
    hk, hv = h // sizes.k_group, h // sizes.v_group
    left = split - begin
    for n in range(0, left + end - jump):
        block = tl.where(n < left, begin + n, jump + n - left)
        j = block * BLOCK_J + tl.arange(0, BLOCK_J)
        if SIMILARITY == "product":
            k_tile = load_block(
                k, k_desc, k_layout, b, hk, block * BLOCK_J, j, d, sizes.j, D, TMA and (EVEN_BLOCKS or not EDGE), EDGE
            )
            s = product(q_tile, k_tile.T, FP32)
        else:
            s = tanh_sum(tanh_arg, i, j, b, h, hk, sizes, SIMILARITY, False)
        s, slope = apply_score_mods(
            s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, -1
        )
        log2w = log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED)
        w = tl.exp2(log2w)
        if EDGE:
            w = tl.where(visible(i[:, None], j[None, :], b, h, r, mask, sizes, MASK), w, 0.0)
        if Y:
            v_tile = load_block(
                v, v_desc, v_layout, b, hv, block * BLOCK_J, j, e, sizes.j, E, TMA and (EVEN_BLOCKS or not EDGE), EDGE
            )
            dp = product(dy_tile, v_tile.T, FP32_V)
        else:
            dp = tl.zeros_like(s)
        ds = score_grad(
            dp, w, log2w, slope, delta, d_entropy2, d_distance, grad, i, j, b, h, sizes, D_ENTROPY, D_DISTANCE, EXTRA, FP32,
            False, EDGE,
        )  # fmt: skip
        if SIMILARITY == "product":
            dq = add_product(ds.to(k_tile.dtype), k_tile, dq, FP32)
        else:
            add_tanh_grad(ds, tanh_arg, tanh_grad, i, j, b, h, hk, sizes, SIMILARITY, False)
    return dq


@triton.jit
def dq_kernel(
    q, k, v, dy, tanh_arg, tanh_grad, k_desc, v_desc, k_layout, v_layout, modifiers, strides, caps, mask, row_table, grad, out_dq, sizes, heads, heads_per_group,
    scale, scale2, SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_V: tl.constexpr, Y: tl.constexpr, D_ENTROPY: tl.constexpr, D_DISTANCE: tl.constexpr,
    EXTRA: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_I rows."""
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_tile = i
    if SIMILARITY == "product":
        q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    else:
        tanh_grad += head.to(tl.int64) * (2 * tanh_arg.a) * tanh_arg.rows
    dy_tile = load_tile(dy, b, h, i, e, sizes.i, E, True) if Y else q_tile
    m2, log2l, delta, d_entropy2, d_distance = row_terms(grad, i, b, h, sizes, SCALE_FOLDED, D_ENTROPY, D_DISTANCE)
    dq = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for r in range(0, mask.n_intervals):
        first, full_from, full_to, past = key_blocks(start, b, r, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        dq = add_dq(
            q_tile, dy_tile, m2, log2l, delta, d_entropy2, d_distance, k, v, tanh_arg, tanh_grad, k_desc, v_desc, k_layout, v_layout, modifiers, strides, caps, mask, grad, sizes,
            i, d, e, b, h, r, dq, scale, scale2, full_from, full_to, full_to, full_to, SIMILARITY, D, E, MODIFIERS, MASK, SCALE_FOLDED, FP32, FP32_V, Y, D_ENTROPY, D_DISTANCE,
            EXTRA, TMA, BLOCK_J, False, EVEN_BLOCKS,
        )  # fmt: skip
        if EDGES:
            dq = add_dq(
                q_tile, dy_tile, m2, log2l, delta, d_entropy2, d_distance, k, v, tanh_arg, tanh_grad, k_desc, v_desc, k_layout, v_layout, modifiers, strides, caps, mask, grad, sizes,
                i, d, e, b, h, r, dq, scale, scale2, first, full_from, full_to, past, SIMILARITY, D, E, MODIFIERS, MASK, SCALE_FOLDED, FP32, FP32_V, Y, D_ENTROPY, D_DISTANCE,
                EXTRA, TMA, BLOCK_J, True, EVEN_BLOCKS,
            )  # fmt: skip
    if SIMILARITY == "product":
        store_tile(out_dq, b, h, i, d, dq * scale, sizes.i, D)


@triton.jit
def modifier_grad_tile(
    q, k, v, dy, tanh_arg, modifiers, strides, caps, mask, grad, sizes, i, j, d, e, b, h, scale, scale2,
    SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, FP32: tl.constexpr,
    FP32_V: tl.constexpr, Y: tl.constexpr, D_ENTROPY: tl.constexpr, D_DISTANCE: tl.constexpr, EXTRA: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Gradient of what modifier TARGET adds to the scores of one tile (i, j)."""
    if SIMILARITY == "product":
        q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
        k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
        s = product(q_tile, k_tile.T, FP32)
    else:
        s = tanh_sum(tanh_arg, i, j, b, h, h // sizes.k_group, sizes, SIMILARITY, False)
    s, slope = apply_score_mods(
        s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, False, TARGET
    )
    m2, log2l, delta, d_entropy2, d_distance = row_terms(grad, i, b, h, sizes, False, D_ENTROPY, D_DISTANCE)
    log2w = log_weight(s, m2[:, None], log2l[:, None], scale2, False)
    shown = visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK)
    w = tl.where(shown, tl.exp2(log2w), 0.0)
    if Y:
        dy_tile = load_tile(dy, b, h, i, e, sizes.i, E, True)
        v_tile = load_tile(v, b, h // sizes.v_group, j, e, sizes.j, E, True)
        dp = product(dy_tile, v_tile.T, FP32_V)
    else:
        dp = tl.zeros_like(s)
    return score_grad(
        dp, w, log2w, slope, delta, d_entropy2, d_distance, grad, i, j, b, h, sizes, D_ENTROPY, D_DISTANCE, EXTRA, FP32,
        False, True,
    )  # fmt: skip


@triton.jit
def modifier_grad_kernel(
    q, k, v, dy, tanh_arg, modifiers, strides, caps, mask, key_table, row_table, grad, out, sizes, out_heads, scale, scale2, batch,
    SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, FP32: tl.constexpr,
    FP32_V: tl.constexpr, Y: tl.constexpr, D_ENTROPY: tl.constexpr, D_DISTANCE: tl.constexpr, EXTRA: tl.constexpr,
    TARGET: tl.constexpr, ALONG: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradient of modifier TARGET.

    ALONG "rows": the sum along each row, (b, h, i); for ALiBi's slopes times −distance. "keys": the sum along each
    column, (b, h, j). "cells": every cell (b|1, h|1, i, j), summed over the sequences and heads that share it.
    """
    pid = tl.program_id(0)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    blocks_i, blocks_j = tl.cdiv(sizes.i, BLOCK_I), tl.cdiv(sizes.j, BLOCK_J)
    if ALONG == "rows":
        head = pid // blocks_i
        b, h = head // sizes.h, head % sizes.h
        start = (pid % blocks_i) * BLOCK_I
        i = start + tl.arange(0, BLOCK_I)
        total = tl.zeros([BLOCK_I], tl.float32)
        for r in range(0, mask.n_intervals):
            first, _, _, past = key_blocks(start, b, r, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
            for n in range(first, past):
                j = n * BLOCK_J + tl.arange(0, BLOCK_J)
                ds = modifier_grad_tile(q, k, v, dy, tanh_arg, modifiers, strides, caps, mask, grad, sizes, i, j, d, e, b, h, scale, scale2,
                               SIMILARITY, D, E, MODIFIERS, MASK, FP32, FP32_V, Y, D_ENTROPY, D_DISTANCE, EXTRA, TARGET)  # fmt: skip
                # Tiles of two intervals may overlap: each counts its own visible cells.
                ds = tl.where(visible(i[:, None], j[None, :], b, h, r, mask, sizes, MASK), ds, 0.0)
                if MODIFIERS[TARGET] == "alibi":
                    ds = -ds * tl.abs(i[:, None] + sizes.offset - j[None, :]).to(tl.float32)
                total += tl.sum(ds, 1)
        store_row(out, b, h, i, total, sizes.i)
    elif ALONG == "keys":
        head = pid // blocks_j
        b, h = head // sizes.h, head % sizes.h
        start = (pid % blocks_j) * BLOCK_J
        j = start + tl.arange(0, BLOCK_J)
        total = tl.zeros([BLOCK_J], tl.float32)
        first, _, _, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        for n in range(first, past):
            i = n * BLOCK_I + tl.arange(0, BLOCK_I)
            ds = modifier_grad_tile(q, k, v, dy, tanh_arg, modifiers, strides, caps, mask, grad, sizes, i, j, d, e, b, h, scale, scale2,
                           SIMILARITY, D, E, MODIFIERS, MASK, FP32, FP32_V, Y, D_ENTROPY, D_DISTANCE, EXTRA, TARGET)  # fmt: skip
            total += tl.sum(ds, 0)
        store_row(out, b, h, j, total, sizes.j)
    else:
        tiles = blocks_i * blocks_j
        out_head = pid // tiles
        out_b, out_h = out_head // out_heads, out_head % out_heads
        i = (pid % tiles // blocks_j) * BLOCK_I + tl.arange(0, BLOCK_I)
        j = (pid % tiles % blocks_j) * BLOCK_J + tl.arange(0, BLOCK_J)
        dbias = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
        b0 = tl.where(out.b == 0, 0, out_b)
        b1 = tl.where(out.b == 0, batch, out_b + 1)
        h0 = tl.where(out.h == 0, 0, out_h)
        h1 = tl.where(out.h == 0, sizes.h, out_h + 1)
        for n in range(0, b1 - b0):
            for m in range(0, h1 - h0):
                b, h = b0 + n, h0 + m
                dbias += modifier_grad_tile(q, k, v, dy, tanh_arg, modifiers, strides, caps, mask, grad, sizes, i, j, d, e, b, h, scale, scale2,
                                   SIMILARITY, D, E, MODIFIERS, MASK, FP32, FP32_V, Y, D_ENTROPY, D_DISTANCE, EXTRA, TARGET)  # fmt: skip
        at = head_ptr(out, out_b, out_h) + i.to(tl.int64)[:, None] * out.i + j.to(tl.int64)[None, :] * out.j
        tl.store(at, dbias, mask=(i[:, None] < sizes.i) & (j[None, :] < sizes.j))


__all__ = ["ScoreGradArg", "dkdv_kernel", "dq_kernel", "modifier_grad_kernel", "reorder_kernel", "row_dot_kernel"]
