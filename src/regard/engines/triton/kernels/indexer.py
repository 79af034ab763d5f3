"""An indexer beside the attention of its teacher: kl or cross-entropy of softmax(I) from the teacher's heads together, and gradients.

The teacher's heads are added up tile by tile from known norms: t = Σ_h f_h w_h. Index scores are I = Σ_n w_n ReLU(q_n · k), with
one key for all index heads. The state of a row is (m, l) of I, x = Σ t (log t − (I − m)) and Σ t, as in the compiled tiles of the
CPU; keys are split among programs, and `merge_kernel` merges their states. A gradient is linear in dI = c softmax(I) − r t, with
two factors a row: `cells_kernel` writes dI for some rows at a time, from which `queries_kernel` and `keys_kernel` take
their sums. Names of the index have a 2; scores are in base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .comparison import HIDDEN, key_blocks_of_all, range_of_both
from .tile_ops import (
    EMPTY_MAX,
    FLOOR,
    HUGE,
    LN2,
    LOG2E,
    add_product,
    head_ptr,
    load_norm2,
    load_tile,
    log_weight,
    product,
    row_blocks,
    scores_of_head,
    visible_at_all,
)

#: A smaller sum of weights has the logarithm of this one.
TINY = tl.constexpr(1.0e-37)


class StripArg(NamedTuple):
    """Cells of `rows` rows from `i` on and `cols` keys, of sequences from `b` on."""

    ptr: Any
    b: int
    i: int
    rows: int
    cols: int


@triton.jit
def schedule_part(rows, parts, side_by_side):
    """Sequence, row block and part of its keys of this program: some blocks side by side, so that the queries and keys of programs
    that run at a time fit the L2 cache; the last rows first."""
    pid = tl.program_id(0)
    b, n = pid // (rows * parts), pid % (rows * parts)
    group = n // (side_by_side * parts)
    here = tl.minimum(side_by_side, rows - group * side_by_side)
    n -= group * side_by_side * parts
    return b, rows - 1 - (group * side_by_side + n % here), n // here


@triton.jit
def sum_of_heads(
    q, k, q_desc, q_layout, k_desc, k_layout, norm, modifiers, strides, caps, mask, sizes, i, j, d, b, start, start_j, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Σ_h f_h w_h of a tile (i, j), and which cells some head sees. Factors are in the norm. The exponentials of a head
    run beside the product of the next one."""
    s = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    total, log2l = s, tl.zeros([i.shape[0]], tl.float32)
    m2 = log2l + HUGE
    if MASK == "flags":
        seen = visible_at_all(i[:, None], j[None, :], b, b * 0, mask, sizes, MASK)
    for n in range(0, sizes.h):
        h = n + b * 0
        next_s = scores_of_head(
            q, k, q_desc, q_layout, k_desc, k_layout, modifiers, strides, caps, sizes, i, j, d, b, h, start, start_j, scale,
            D, MODIFIERS, SCALE_FOLDED, FP32, TMA,
        )  # fmt: skip
        if MASK == "flags":
            shown = visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK)
            next_s = tl.where(shown, next_s, FLOOR)
            seen = seen | shown
        total += tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
        s = next_s
        m2, log2l = load_norm2(norm, b, h, i, sizes, SCALE_FOLDED)
    total += tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
    if MASK != "flags":
        seen = visible_at_all(i[:, None], j[None, :], b, b * 0, mask, sizes, MASK)
    return tl.where(seen, total, 0.0), seen


@triton.jit
def relu(x):
    return tl.where(x <= 0.0, 0.0, x)  # nan stays nan


@triton.jit
def index_scores(
    q2, k2_tile, w2, mask2, sizes2, i, j, d2, b, D2: tl.constexpr, MASK2: tl.constexpr, FP32_2: tl.constexpr
):  # fmt: skip
    """I of a tile in base 2, FLOOR where hidden."""
    s = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    for n in range(0, sizes2.h):
        h = n + b * 0
        q2_tile = load_tile(q2, b, h, i, d2, sizes2.i, D2, True)
        x = product(q2_tile, k2_tile.T, FP32_2)
        w = tl.load(head_ptr(w2, b, h) + i.to(tl.int64) * w2.i, mask=i < sizes2.i, other=0.0)
        s += w[:, None] * relu(x)
    shown = visible_at_all(i[:, None], j[None, :], b, b * 0, mask2, sizes2, MASK2)
    return tl.where(shown, s * LOG2E, FLOOR)


@triton.jit
def key_range(
    start, b, row_table, mask, sizes, row_table2, mask2, sizes2, MASK: tl.constexpr, MASK2: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Key blocks that the rows from `start` on see in either matrix."""
    first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = key_blocks_of_all(start, b, row_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)  # fmt: skip
    begin, _, _, end = range_of_both(first, full_from, full_to, past, first2, full_from2, full_to2, past2, True)
    return begin, end


@triton.jit(do_not_specialize=("rows", "parts", "blocks_each", "side_by_side"))
def indexer_kernel(
    q, k, q_desc, q_layout, k_desc, k_layout, norm, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, w2, mask2, row_table2, sizes2, out, rows, parts, blocks_each, side_by_side,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, MASK2: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_2: tl.constexpr, TMA: tl.constexpr, ENTROPY: tl.constexpr, FORBIDS: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """The state of BLOCK_I rows over one part of their keys. ENTROPY: 1 for kl, 0 for the cross-entropy; FORBIDS: the index
    may hide what the teacher sees."""
    b, block, part = schedule_part(rows, parts, side_by_side)
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    m = tl.full([BLOCK_I], EMPTY_MAX, tl.float32)
    l = tl.zeros([BLOCK_I], tl.float32)
    x, total, forbidden = l, l, l
    begin, end = key_range(start, b, row_table, mask, sizes, row_table2, mask2, sizes2, MASK, MASK2, BLOCK_I, BLOCK_J)
    for n in range(tl.maximum(begin, part * blocks_each), tl.minimum(end, (part + 1) * blocks_each)):
        j = n * BLOCK_J + tl.arange(0, BLOCK_J)
        t, seen = sum_of_heads(q, k, q_desc, q_layout, k_desc, k_layout, norm, modifiers, strides, caps, mask, sizes, i, j, d, b, start, n * BLOCK_J, scale, scale2, D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA)  # fmt: skip
        k2_tile = load_tile(k2, b, b * 0, j, d2, sizes2.j, D2, True)
        s = index_scores(q2, k2_tile, w2, mask2, sizes2, i, j, d2, b, D2, MASK2, FP32_2)
        new = tl.maximum(m, tl.max(s, 1))
        y = s - new[:, None]
        x += (new - m) * total + tl.sum(t * (tl.log2(tl.maximum(t, TINY)) * ENTROPY - y), 1)
        l = tl.exp2(m - new) * l + tl.sum(tl.exp2(y), 1)
        total += tl.sum(t, 1)
        m = new
        if FORBIDS:
            forbidden += tl.sum(tl.where(seen & (s <= HIDDEN), 1.0, 0.0), 1)
    x = tl.where(forbidden > 0.0, float("inf"), x)
    n_rows = (tl.num_programs(0) // (rows * parts)).to(tl.int64) * sizes.i
    at = out + 4 * (part * n_rows + b.to(tl.int64) * sizes.i + i)
    tl.store(at, m, mask=i < sizes.i)
    tl.store(at + 1, l, mask=i < sizes.i)
    tl.store(at + 2, x, mask=i < sizes.i)
    tl.store(at + 3, total, mask=i < sizes.i)


@triton.jit(do_not_specialize=("rows", "parts"))
def merge_kernel(
    states, out, out_factors, rows, parts, ENTROPY: tl.constexpr, DIVIDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The measure of rows from the states of all parts; and m, log₂ l, c and r of their gradients, which are 0 in infinite rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    m = tl.full([BLOCK], EMPTY_MAX, tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    x, total = l, l
    for part in range(0, parts):
        at = states + 4 * (part * tl.cast(rows, tl.int64) + row)
        part_m, part_l = tl.load(at, mask=there, other=EMPTY_MAX), tl.load(at + 1, mask=there, other=0.0)
        part_x, part_total = tl.load(at + 2, mask=there, other=0.0), tl.load(at + 3, mask=there, other=0.0)
        new = tl.maximum(m, part_m)
        x += (new - m) * total + part_x + (new - part_m) * part_total
        l = tl.exp2(m - new) * l + tl.exp2(part_m - new) * part_l
        total += part_total
        m = new
    seen, endless = total != 0.0, x == float("inf")
    divisor, log2l = tl.where(seen, total, 1.0), tl.log2(tl.where(l == 0.0, 1.0, l))
    if DIVIDED:
        value = x / divisor + log2l - tl.log2(divisor) * ENTROPY
    else:
        value = x + total * log2l
        divisor = tl.full([BLOCK], 1.0, tl.float32)
    value = tl.where(endless, float("inf"), tl.where(seen, LN2 * value, 0.0))
    tl.store(out + row, value, mask=there)
    ratio = tl.where(seen & (x != float("inf")), 1.0 / divisor, 0.0)
    tl.store(out_factors + 4 * row, tl.where(l == 0.0, HUGE, m), mask=there)
    tl.store(out_factors + 4 * row + 1, log2l, mask=there)
    tl.store(out_factors + 4 * row + 2, ratio * total, mask=there)
    tl.store(out_factors + 4 * row + 3, ratio, mask=there)


@triton.jit
def strip_ptr(strip, b, i, j):
    """Pointers to cells of a strip. Its rows and keys fill whole blocks: none is left out, and those past the ends do not count."""
    return strip.ptr + ((b - strip.b).to(tl.int64) * strip.rows + (i - strip.i)) * strip.cols + j


@triton.jit(do_not_specialize=("rows", "parts", "blocks_each", "side_by_side"))
def cells_kernel(
    q, k, q_desc, q_layout, k_desc, k_layout, norm, modifiers, strides, caps, mask, row_table, sizes, scale, scale2,
    q2, k2, w2, mask2, row_table2, sizes2, factors, strip, rows, parts, blocks_each, side_by_side,
    D: tl.constexpr, D2: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, MASK2: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_2: tl.constexpr, TMA: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """dI of BLOCK_I rows of a strip and one part of the keys; also 0 where no row sees the tile."""
    b, block, part = schedule_part(rows, parts, side_by_side)
    b += strip.b
    start = strip.i + block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, d2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D2)
    row = factors + 4 * (b.to(tl.int64) * sizes.i + i)
    m, log2l = tl.load(row, mask=i < sizes.i, other=HUGE), tl.load(row + 1, mask=i < sizes.i, other=0.0)
    c, r = tl.load(row + 2, mask=i < sizes.i, other=0.0), tl.load(row + 3, mask=i < sizes.i, other=0.0)
    begin, end = key_range(start, b, row_table, mask, sizes, row_table2, mask2, sizes2, MASK, MASK2, BLOCK_I, BLOCK_J)
    for n in range(part * blocks_each, tl.minimum((part + 1) * blocks_each, tl.cdiv(sizes.j, BLOCK_J))):
        j = n * BLOCK_J + tl.arange(0, BLOCK_J)
        at = strip_ptr(strip, b, i[:, None], j[None, :])
        if (n >= begin) & (n < end):
            t, seen = sum_of_heads(q, k, q_desc, q_layout, k_desc, k_layout, norm, modifiers, strides, caps, mask, sizes, i, j, d, b, start, n * BLOCK_J, scale, scale2, D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA)  # fmt: skip
            k2_tile = load_tile(k2, b, b * 0, j, d2, sizes2.j, D2, True)
            s = index_scores(q2, k2_tile, w2, mask2, sizes2, i, j, d2, b, D2, MASK2, FP32_2)
            ds = tl.exp2(s - m[:, None] - log2l[:, None]) * c[:, None] - t * r[:, None]
            tl.store(at, ds.to(strip.ptr.dtype.element_ty))
        else:
            tl.store(at, tl.zeros([BLOCK_I, BLOCK_J], tl.float32).to(strip.ptr.dtype.element_ty))


@triton.jit(do_not_specialize=("blocks", "parts", "batch"))
def queries_kernel(
    q2, k2, w2, strip, grad, out_dq, row_table, mask, sizes, row_table2, mask2, sizes2, blocks, parts,
    batch,    D2: tl.constexpr, MASK: tl.constexpr, MASK2: tl.constexpr, FP32_2: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_I queries of one index head, and of their weights, from one part of the keys that they see, into a packed
    query (`core/scores/kinds.Indexer`) of (parts · batch, 1, i, n · D2 + n)."""
    pid = tl.program_id(0)
    h, part = pid % sizes2.h, pid // sizes2.h % parts
    block = blocks - 1 - pid // (sizes2.h * parts) % blocks
    b = strip.b + pid // (sizes2.h * parts * blocks)
    start = strip.i + block * BLOCK_I
    i, d2 = start + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D2)
    q2_tile = load_tile(q2, b, h, i, d2, sizes2.i, D2, True)
    dq = tl.zeros([BLOCK_I, BLOCK_D2], tl.float32)
    dw = tl.zeros([BLOCK_I], tl.float32)
    begin, end = key_range(start, b, row_table, mask, sizes, row_table2, mask2, sizes2, MASK, MASK2, BLOCK_I, BLOCK_J)
    each = tl.cdiv(tl.maximum(end - begin, 0), parts)
    for n in range(begin + part * each, tl.minimum(end, begin + (part + 1) * each)):
        j = n * BLOCK_J + tl.arange(0, BLOCK_J)
        at = strip_ptr(strip, b, i[:, None], j[None, :])
        ds = tl.load(at).to(tl.float32)
        k2_tile = load_tile(k2, b, b * 0, j, d2, sizes2.j, D2, True)
        x = product(q2_tile, k2_tile.T, FP32_2)
        ds = tl.where(x <= 0.0, 0.0, ds)
        dw += tl.sum(ds * x, 1)
        dq = add_product(ds.to(k2_tile.dtype), k2_tile, dq, FP32_2)
    there = i < sizes.i
    g = tl.load(grad + b.to(tl.int64) * sizes.i + i, mask=there, other=0.0)
    w = tl.load(head_ptr(w2, b, h) + i.to(tl.int64) * w2.i, mask=there, other=0.0)
    packed = head_ptr(out_dq, part * batch + b, b * 0) + i.to(tl.int64) * out_dq.i
    at = packed[:, None] + (h * D2 + d2)[None, :] * out_dq.j
    tl.store(at, (dq * (g * w)[:, None]).to(out_dq.ptr.dtype.element_ty), mask=there[:, None] & (d2 < D2)[None, :])
    tl.store(packed + (sizes2.h * D2 + h) * out_dq.j, (dw * g).to(out_dq.ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("parts", "blocks_each"))
def keys_kernel(
    q2, k2, row_factors, strip, out_dk, key_table, mask, sizes, key_table2, mask2, sizes2, parts,
    blocks_each, batch, D2: tl.constexpr, MASK: tl.constexpr, MASK2: tl.constexpr, FP32_2: tl.constexpr, ADD: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D2: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_J keys from one part of a strip's rows, added to those of earlier strips with ADD; (parts, batch, j, D2)."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    part, block = pid % parts, pid // parts % blocks
    b = strip.b + pid // (parts * blocks)
    start = block * BLOCK_J
    j, d2 = start + tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_D2)
    k2_tile = load_tile(k2, b, b * 0, j, d2, sizes2.j, D2, True)
    dk = tl.zeros([BLOCK_J, BLOCK_D2], tl.float32)
    first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = row_blocks(start, b, key_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)
    begin, _, _, end = range_of_both(first, full_from, full_to, past, first2, full_from2, full_to2, past2, True)
    first_block = strip.i // BLOCK_I + part * blocks_each
    last_block = tl.minimum(first_block + blocks_each, tl.cdiv(strip.i + strip.rows, BLOCK_I))
    for r in range(tl.maximum(begin, first_block), tl.minimum(end, last_block)):
        i = r * BLOCK_I + tl.arange(0, BLOCK_I)
        ds = tl.load(strip_ptr(strip, b, i[None, :], j[:, None])).to(tl.float32)
        for n in range(0, sizes2.h):
            h = n + b * 0
            q2_tile = load_tile(q2, b, h, i, d2, sizes2.i, D2, True)
            x = product(k2_tile, q2_tile.T, FP32_2)
            f = tl.load(head_ptr(row_factors, b, h) + i.to(tl.int64) * row_factors.i, mask=i < sizes.i, other=0.0)
            scaled = (q2_tile.to(tl.float32) * f[:, None]).to(q2_tile.dtype)
            dk = add_product(tl.where(x <= 0.0, 0.0, ds).to(q2_tile.dtype), scaled, dk, FP32_2)
    at = out_dk + ((part * batch + b).to(tl.int64) * sizes.j + j)[:, None] * D2 + d2[None, :]
    there = (j < sizes.j)[:, None] & (d2 < D2)[None, :]
    if ADD:
        dk += tl.load(at, mask=there, other=0.0)
    tl.store(at, dk, mask=there)


__all__ = ["StripArg", "cells_kernel", "indexer_kernel", "keys_kernel", "merge_kernel", "queries_kernel"]
