"""Gradients of everything in one pass: the weights once more, and what flows into the scores.

In every cell  ds = w ∘ (left · right + ρ |distance| − c − η log w),  as `gradient.Gradient` writes it: the output's
part of left · right is a product of tensor cores, the few further columns (received, mass, …) are added one by one.
`keys_kernel` owns a block of keys and gives dk and dv; `rows_kernel` owns a block of rows and gives dq; each adds in
one fixed order. `steps_kernel` gives the gradient of one modifier. Imports `tiles`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .forward import in_order
from .tile_ops import (
    LN2,
    across,
    add_product,
    down,
    fetch,
    key_blocks,
    log_weight,
    norm_in_base_2,
    of_rows,
    place,
    product,
    put_row,
    put_tile,
    row_blocks,
    scored,
    tile,
    visible,
    visible_at_all,
)


class Flow(NamedTuple):
    """What flows back: numbers of every row (b, h, i), and further columns of left and right. None has gaps."""

    norm: Any
    c: Any
    eta: Any
    rho: Any
    left: Any  # b h i x
    right: Any  # b|1 h|1 j x
    right_b: int
    right_h: int
    extras: int


@triton.jit
def row_dot_kernel(a, b, out, heads, I, E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_E: tl.constexpr):
    """Σ_e a b of BLOCK_I rows."""
    blocks = tl.cdiv(I, BLOCK_I)
    head = tl.program_id(0) // blocks
    n, h = head // heads, head % heads
    i = tl.program_id(0) % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    e = tl.arange(0, BLOCK_E)
    x = tile(a, n, h, i, e, I, E, True).to(tl.float32) * tile(b, n, h, i, e, I, E, True).to(tl.float32)
    put_row(out, n, h, i, tl.sum(x, 1), I)


@triton.jit
def row_terms(flow, i, b, h, sizes, FOLD: tl.constexpr, ETA: tl.constexpr, RHO: tl.constexpr):
    """What is the same along a row: m2, log₂ l, c, η in base 2, ρ."""
    m2, log2l = norm_in_base_2(flow.norm, b, h, i, sizes, FOLD)
    c = of_rows(flow.c, b, h, i, sizes, 0.0)
    eta2, rho = c, c
    if ETA:
        eta2 = of_rows(flow.eta, b, h, i, sizes, 0.0) * LN2
    if RHO:
        rho = of_rows(flow.rho, b, h, i, sizes, 0.0)
    return m2, log2l, c, eta2, rho


@triton.jit
def extra(flow, row, head, x, i, j, sizes, KEYS_FIRST: tl.constexpr):
    """What column x of left · right adds to a tile."""
    left = tl.load(flow.left + row * flow.extras + x, mask=i < sizes.i, other=0.0)
    right = tl.load(head + j.to(tl.int64) * flow.extras + x, mask=j < sizes.j, other=0.0)
    return down(left, KEYS_FIRST) * across(right, KEYS_FIRST)


@triton.jit
def into_scores(
    inside, w, log2w, slope, c, eta2, rho, flow, i, j, b, h, sizes,
    ETA: tl.constexpr, RHO: tl.constexpr, EXTRAS: tl.constexpr, EXACT: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """ds of a tile. `inside` is the output's part of left · right."""
    if EXTRAS:
        row = (b * sizes.h + h).to(tl.int64) * sizes.i + i
        head = flow.right + b.to(tl.int64) * flow.right_b + h.to(tl.int64) * flow.right_h
        if EXACT:
            # Sums of sums: of hundreds, one after the other, the last digits would be lost. (Narrow types have none to lose, and
            # large tiles, which leave no registers for a second sum.)
            for begin in range(0, flow.extras, 16):
                some = tl.zeros_like(inside)
                for x in range(begin, tl.minimum(begin + 16, flow.extras)):
                    some += extra(flow, row, head, x, i, j, sizes, KEYS_FIRST)
                inside += some
        else:
            for x in range(0, flow.extras):
                inside += extra(flow, row, head, x, i, j, sizes, KEYS_FIRST)
    inside -= down(c, KEYS_FIRST)
    if RHO:
        far = tl.abs(down(i + sizes.offset, KEYS_FIRST) - across(j, KEYS_FIRST)).to(tl.float32)
        inside += down(rho, KEYS_FIRST) * far
    if ETA:
        inside -= down(eta2, KEYS_FIRST) * log2w
    return w * inside * slope


@triton.jit
def keys_of(
    near, values, q, dy, q_desc, dy_desc, q_map, dy_map, steps, strides, caps, seen, flow, sizes, j, d, e, b, h, dk, dv,
    scale, scale2, begin, end, D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr,
    FOLD: tl.constexpr, EXACT: tl.constexpr, EXACT_V: tl.constexpr, Y: tl.constexpr, ETA: tl.constexpr,
    RHO: tl.constexpr, EXTRAS: tl.constexpr, TMA: tl.constexpr, BLOCK_I: tl.constexpr, EDGE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add what some blocks of rows send to these keys and values."""
    ahead = begin * BLOCK_I + tl.arange(0, BLOCK_I)
    next_m2, next_log2l, next_c, next_eta2, next_rho = row_terms(flow, ahead, b, h, sizes, FOLD, ETA, RHO)
    for n in range(begin, end):
        i = n * BLOCK_I + tl.arange(0, BLOCK_I)
        m2, log2l, c, eta2, rho = next_m2, next_log2l, next_c, next_eta2, next_rho
        # A block ahead: the compiler fetches early what products are made of, not these.
        next_m2, next_log2l, next_c, next_eta2, next_rho = row_terms(flow, i + BLOCK_I, b, h, sizes, FOLD, ETA, RHO)
        if TMA and (WHOLE or not EDGE):
            rows = fetch(q_desc, q_map, b, h, n * BLOCK_I)
        else:
            rows = tile(q, b, h, i, d, sizes.i, D, EDGE)
        s = product(near, rows.T, EXACT)  # j i
        s, slope = scored(s, i[None, :], j[:, None], b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, -1)
        log2w = log_weight(s, m2[None, :], log2l[None, :], scale2, FOLD)
        w = tl.exp2(log2w)
        if EDGE:
            w = tl.where(visible_at_all(i[None, :], j[:, None], b, h, seen, sizes, MASK), w, 0.0)
        if Y:
            if TMA and (WHOLE or not EDGE):
                back = fetch(dy_desc, dy_map, b, h, n * BLOCK_I)
            else:
                back = tile(dy, b, h, i, e, sizes.i, E, EDGE)
            dv = add_product(w.to(back.dtype), back, dv, EXACT_V)
            inside = product(values, back.T, EXACT_V)
        else:
            inside = tl.zeros_like(s)
        ds = into_scores(inside, w, log2w, slope, c, eta2, rho, flow, i, j, b, h, sizes, ETA, RHO, EXTRAS, EXACT, True)
        dk = add_product(ds.to(rows.dtype), rows, dk, EXACT)
    return dk, dv


@triton.jit
def keys_kernel(
    q, k, v, dy, q_desc, dy_desc, q_map, dy_map, steps, strides, caps, seen, table, flow, out_dk, out_dv, sizes, heads, group, batch, per_group,
    scale, scale2, D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, EXACT_V: tl.constexpr, Y: tl.constexpr, ETA: tl.constexpr, RHO: tl.constexpr,
    EXTRAS: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_J keys of one of `heads` output heads, each the sum of `group` query heads."""
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    block, head = in_order(blocks, heads * batch, per_group)
    b, own = head // heads, head % heads
    start = (blocks - 1 - block) * BLOCK_J  # the first keys are seen by most rows
    j = start + tl.arange(0, BLOCK_J)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    near = tile(k, b, own * group // sizes.k_group, j, d, sizes.j, D, True)
    values = tile(v, b, own * group // sizes.v_group, j, e, sizes.j, E, True) if Y else near
    dk = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_J, BLOCK_E], tl.float32)
    first, full_from, full_to, past = row_blocks(start, b, table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
    for n in range(0, group):
        h = own * group + n
        for PART in tl.static_range(3):  # an edge of the mask, rows that see all of these keys, an edge
            if EDGES or PART == 1:
                begin = first if PART == 0 else full_from if PART == 1 else full_to
                end = full_from if PART == 0 else full_to if PART == 1 else past
                dk, dv = keys_of(
                    near, values, q, dy, q_desc, dy_desc, q_map, dy_map, steps, strides, caps, seen, flow, sizes, j, d, e, b, h, dk, dv,
                    scale, scale2, begin, end, D, E, STEPS, MASK, FOLD, EXACT, EXACT_V, Y, ETA, RHO, EXTRAS, TMA,
                    BLOCK_I, PART != 1, WHOLE,
                )  # fmt: skip
    put_tile(out_dk, b, own, j, d, dk * scale, sizes.j, D)
    if Y:
        put_tile(out_dv, b, own, j, e, dv, sizes.j, E)


@triton.jit
def rows_of_keys(
    rows, back, m2, log2l, c, eta2, rho, k, v, k_desc, v_desc, k_map, v_map, steps, strides, caps, seen, flow, sizes, i, d, e, b, h,
    r, dq, scale, scale2, begin, split, jump, end, D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr,
    FOLD: tl.constexpr, EXACT: tl.constexpr, EXACT_V: tl.constexpr, Y: tl.constexpr, ETA: tl.constexpr,
    RHO: tl.constexpr, EXTRAS: tl.constexpr, TMA: tl.constexpr, BLOCK_J: tl.constexpr, EDGE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add what blocks of keys send to these rows: those from `begin` to `split`, then those from `jump` to `end`."""
    hk, hv = h // sizes.k_group, h // sizes.v_group
    left = split - begin
    for n in range(0, left + end - jump):
        block = tl.where(n < left, begin + n, jump + n - left)
        j = block * BLOCK_J + tl.arange(0, BLOCK_J)
        if TMA and (WHOLE or not EDGE):
            near = fetch(k_desc, k_map, b, hk, block * BLOCK_J)
        else:
            near = tile(k, b, hk, j, d, sizes.j, D, EDGE)
        s = product(rows, near.T, EXACT)
        s, slope = scored(s, i[:, None], j[None, :], b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, -1)
        log2w = log_weight(s, m2[:, None], log2l[:, None], scale2, FOLD)
        w = tl.exp2(log2w)
        if EDGE:
            w = tl.where(visible(i[:, None], j[None, :], b, h, r, seen, sizes, MASK), w, 0.0)
        if Y:
            if TMA and (WHOLE or not EDGE):
                values = fetch(v_desc, v_map, b, hv, block * BLOCK_J)
            else:
                values = tile(v, b, hv, j, e, sizes.j, E, EDGE)
            inside = product(back, values.T, EXACT_V)
        else:
            inside = tl.zeros_like(s)
        ds = into_scores(inside, w, log2w, slope, c, eta2, rho, flow, i, j, b, h, sizes, ETA, RHO, EXTRAS, EXACT, False)
        dq = add_product(ds.to(near.dtype), near, dq, EXACT)
    return dq


@triton.jit
def rows_kernel(
    q, k, v, dy, k_desc, v_desc, k_map, v_map, steps, strides, caps, seen, row_table, flow, out_dq, sizes, heads, per_group, scale, scale2,
    D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, EXACT_V: tl.constexpr, Y: tl.constexpr, ETA: tl.constexpr, RHO: tl.constexpr,
    EXTRAS: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_I rows."""
    block, head = in_order(tl.cdiv(sizes.i, BLOCK_I), heads, per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    rows = tile(q, b, h, i, d, sizes.i, D, True)
    back = tile(dy, b, h, i, e, sizes.i, E, True) if Y else rows
    m2, log2l, c, eta2, rho = row_terms(flow, i, b, h, sizes, FOLD, ETA, RHO)
    dq = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for r in range(0, seen.spans):
        first, full_from, full_to, past = key_blocks(start, b, r, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
        dq = rows_of_keys(
            rows, back, m2, log2l, c, eta2, rho, k, v, k_desc, v_desc, k_map, v_map, steps, strides, caps, seen, flow, sizes, i, d, e, b,
            h, r, dq, scale, scale2, full_from, full_to, full_to, full_to, D, E, STEPS, MASK, FOLD, EXACT, EXACT_V, Y, ETA, RHO,
            EXTRAS, TMA, BLOCK_J, False, WHOLE,
        )  # fmt: skip
        if EDGES:
            dq = rows_of_keys(
                rows, back, m2, log2l, c, eta2, rho, k, v, k_desc, v_desc, k_map, v_map, steps, strides, caps, seen, flow, sizes, i, d, e, b,
                h, r, dq, scale, scale2, first, full_from, full_to, past, D, E, STEPS, MASK, FOLD, EXACT, EXACT_V, Y, ETA, RHO,
                EXTRAS, TMA, BLOCK_J, True, WHOLE,
            )  # fmt: skip
    put_tile(out_dq, b, h, i, d, dq * scale, sizes.i, D)


@triton.jit
def step_tile(
    q, k, v, dy, steps, strides, caps, seen, flow, sizes, i, j, d, e, b, h, scale, scale2,
    D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr,
    EXACT_V: tl.constexpr, Y: tl.constexpr, ETA: tl.constexpr, RHO: tl.constexpr, EXTRAS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """The gradient of what step TARGET adds to the scores of one tile (i, j)."""
    rows = tile(q, b, h, i, d, sizes.i, D, True)
    near = tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
    s = product(rows, near.T, EXACT)
    s, slope = scored(s, i[:, None], j[None, :], b, h, steps, strides, caps, scale, sizes, STEPS, False, TARGET)
    m2, log2l, c, eta2, rho = row_terms(flow, i, b, h, sizes, False, ETA, RHO)
    log2w = log_weight(s, m2[:, None], log2l[:, None], scale2, False)
    shown = visible_at_all(i[:, None], j[None, :], b, h, seen, sizes, MASK)
    w = tl.where(shown, tl.exp2(log2w), 0.0)
    if Y:
        back = tile(dy, b, h, i, e, sizes.i, E, True)
        values = tile(v, b, h // sizes.v_group, j, e, sizes.j, E, True)
        inside = product(back, values.T, EXACT_V)
    else:
        inside = tl.zeros_like(s)
    return into_scores(inside, w, log2w, slope, c, eta2, rho, flow, i, j, b, h, sizes, ETA, RHO, EXTRAS, EXACT, False)


@triton.jit
def steps_kernel(
    q, k, v, dy, steps, strides, caps, seen, table, row_table, flow, out, sizes, out_heads, scale, scale2, batch,
    D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr,
    EXACT_V: tl.constexpr, Y: tl.constexpr, ETA: tl.constexpr, RHO: tl.constexpr, EXTRAS: tl.constexpr,
    TARGET: tl.constexpr, ALONG: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradient of step TARGET.

    ALONG "rows": one number a row (b, h, i), the sum along it; of ALiBi's slopes times −distance. "keys": one number a
    key (b, h, j). "cells": every cell (b|1, h|1, i, j), summed over the sequences and heads that share it.
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
        for r in range(0, seen.spans):
            first, _, _, past = key_blocks(start, b, r, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
            for n in range(first, past):
                j = n * BLOCK_J + tl.arange(0, BLOCK_J)
                ds = step_tile(q, k, v, dy, steps, strides, caps, seen, flow, sizes, i, j, d, e, b, h, scale, scale2,
                               D, E, STEPS, MASK, EXACT, EXACT_V, Y, ETA, RHO, EXTRAS, TARGET)  # fmt: skip
                # Tiles of two intervals may overlap: each counts what it shows.
                ds = tl.where(visible(i[:, None], j[None, :], b, h, r, seen, sizes, MASK), ds, 0.0)
                if STEPS[TARGET] == "alibi":
                    ds = -ds * tl.abs(i[:, None] + sizes.offset - j[None, :]).to(tl.float32)
                total += tl.sum(ds, 1)
        put_row(out, b, h, i, total, sizes.i)
    elif ALONG == "keys":
        head = pid // blocks_j
        b, h = head // sizes.h, head % sizes.h
        start = (pid % blocks_j) * BLOCK_J
        j = start + tl.arange(0, BLOCK_J)
        total = tl.zeros([BLOCK_J], tl.float32)
        first, _, _, past = row_blocks(start, b, table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
        for n in range(first, past):
            i = n * BLOCK_I + tl.arange(0, BLOCK_I)
            ds = step_tile(q, k, v, dy, steps, strides, caps, seen, flow, sizes, i, j, d, e, b, h, scale, scale2,
                           D, E, STEPS, MASK, EXACT, EXACT_V, Y, ETA, RHO, EXTRAS, TARGET)  # fmt: skip
            total += tl.sum(ds, 0)
        put_row(out, b, h, j, total, sizes.j)
    else:
        tiles = blocks_i * blocks_j
        own = pid // tiles
        out_b, out_h = own // out_heads, own % out_heads
        i = (pid % tiles // blocks_j) * BLOCK_I + tl.arange(0, BLOCK_I)
        j = (pid % tiles % blocks_j) * BLOCK_J + tl.arange(0, BLOCK_J)
        cells = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
        b0 = tl.where(out.b == 0, 0, out_b)
        b1 = tl.where(out.b == 0, batch, out_b + 1)
        h0 = tl.where(out.h == 0, 0, out_h)
        h1 = tl.where(out.h == 0, sizes.h, out_h + 1)
        for n in range(0, b1 - b0):
            for m in range(0, h1 - h0):
                b, h = b0 + n, h0 + m
                cells += step_tile(q, k, v, dy, steps, strides, caps, seen, flow, sizes, i, j, d, e, b, h, scale, scale2,
                                   D, E, STEPS, MASK, EXACT, EXACT_V, Y, ETA, RHO, EXTRAS, TARGET)  # fmt: skip
        at = place(out, out_b, out_h) + i.to(tl.int64)[:, None] * out.i + j.to(tl.int64)[None, :] * out.j
        tl.store(at, cells, mask=(i[:, None] < sizes.i) & (j[None, :] < sizes.j))


__all__ = ["Flow", "keys_kernel", "row_dot_kernel", "rows_kernel", "steps_kernel"]
