"""A second pass over the weights of finished rows: what columns can tell.

A program owns a block of keys and walks the blocks of rows that see them, so that every column is added up in one
fixed order by one program: no atomics, the same bits every time. It gives `received`, `z` = Wᵀ u and, for every
tile row of a pooled map, the sum of each column (`PARTS`), which the host adds up along the columns.
Imports `tiles`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .additive import tanh_sum
from .forward import in_order
from .tile_ops import (
    add_product,
    fetch,
    log_weight,
    norm_in_base_2,
    product,
    put_row,
    put_tile,
    row_blocks,
    scored,
    tile,
    visible_at_all,
)


class Pool(NamedTuple):
    """How rows are pooled: `rows` tiles over i0 <= i < i1, into `sums` (b, h, rows, j), which has no gaps."""

    sums: Any
    rows: int
    i0: int
    i1: int
    blocks: int  # blocks of rows in a tile row, where these are whole


@triton.jit
def start_of_parts(pool, b, h, j, sizes):
    """Where the first tile row of a pooled map keeps the sums of columns j."""
    return pool.sums + (b * sizes.h + h).to(tl.int64) * pool.rows * sizes.j + j


@triton.jit
def blank_parts(pool, b, h, j, first, past, sizes, BLOCK_I: tl.constexpr):
    """Write the tile rows of the pooled map that end before the first block of rows that sees these keys."""
    until = tl.maximum(first - pool.i0 // BLOCK_I, 0) // pool.blocks
    until = tl.where(first < past, tl.minimum(until, pool.rows), pool.rows)
    for r in range(0, until):
        tl.store(start_of_parts(pool, b, h, j, sizes) + tl.cast(r, tl.int64) * sizes.j, j * 0.0, mask=j < sizes.j)


@triton.jit
def add_block_to_parts(column, part, pool, b, h, n, j, sizes, BLOCK_I: tl.constexpr):
    """Add the columns of block n to the sums of its tile row, where every block of rows lies in one; written when it ends."""
    block = n + tl.program_id(0) * 0 - pool.i0 // BLOCK_I  # counted from the first pooled row
    inside = (block >= 0) & (block < pool.blocks * pool.rows)
    part += tl.where(inside, column, 0.0)
    ends = inside & ((block + 1) % pool.blocks == 0)
    at = start_of_parts(pool, b, h, j, sizes) + (block // pool.blocks).to(tl.int64) * sizes.j
    tl.store(at, part, mask=j < tl.where(ends, sizes.j, 0))
    return tl.where(ends, 0.0, part)


@triton.jit
def close_parts(part, pool, b, h, j, first, past, sizes, BLOCK_I: tl.constexpr):
    """Write the sums of a tile row that a window leaves in its middle."""
    block = past - 1 + tl.program_id(0) * 0 - pool.i0 // BLOCK_I
    inside = (block >= 0) & (block < pool.blocks * pool.rows) & (block + pool.i0 // BLOCK_I >= first)
    open_row = inside & ((block + 1) % pool.blocks != 0)
    at = start_of_parts(pool, b, h, j, sizes) + (block // pool.blocks).to(tl.int64) * sizes.j
    tl.store(at, part, mask=j < tl.where(open_row, sizes.j, 0))


@triton.jit
def add_rows_to_parts(w, pool, b, h, i, j, sizes):
    """Add the columns of a tile (j, i) to those tile rows of the pooled map that its rows fall into."""
    inside = (i >= pool.i0) & (i < pool.i1) & (i < sizes.i)
    position = (i - pool.i0).to(tl.int64)
    row = tl.where(inside, ((position + 1) * pool.rows - 1) // (pool.i1 - pool.i0), -1)
    last = tl.max(row, 0)
    first = tl.min(tl.where(inside, row, last), 0)
    for r in range(tl.maximum(first, 0), last + 1):
        column = tl.sum(tl.where((row == r)[None, :], w, 0.0), 1)
        at = start_of_parts(pool, b, h, j, sizes) + (j.to(tl.int64) * 0 + r) * sizes.j  # rows times keys may pass 2³¹
        tl.store(at, tl.load(at, mask=j < sizes.j, other=0.0) + column, mask=j < sizes.j)
        tl.debug_barrier()  # the next block of rows may add to the same tile row


@triton.jit
def columns_of(
    keys, q, pair, q_desc, q_map, norm, u, steps, strides, caps, seen, pool, sizes, j, d, e, b, h, received, part, z, scale, scale2,
    begin, end, PAIR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, EXACT_U: tl.constexpr, RECEIVED: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
    Z: tl.constexpr, TMA: tl.constexpr, BLOCK_I: tl.constexpr, EDGE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add up the weights of some blocks of rows, column by column."""
    next_m2, next_log2l = norm_in_base_2(norm, b, h, begin * BLOCK_I + tl.arange(0, BLOCK_I), sizes, FOLD)
    for n in range(begin, end):
        i = n * BLOCK_I + tl.arange(0, BLOCK_I)
        m2, log2l = next_m2, next_log2l
        # A block ahead: the compiler fetches early what products are made of, not this.
        next_m2, next_log2l = norm_in_base_2(norm, b, h, i + BLOCK_I, sizes, FOLD)
        if PAIR == "product":
            if TMA and (WHOLE or not EDGE):
                rows = fetch(q_desc, q_map, b, h, n * BLOCK_I)
            else:
                rows = tile(q, b, h, i, d, sizes.i, D, EDGE)
            s = product(keys, rows.T, EXACT)  # j i
        else:
            s = tanh_sum(pair, i, j, b, h, h // sizes.k_group, sizes, PAIR, True)
        s, _ = scored(s, i[None, :], j[:, None], b, h, steps, strides, caps, scale, sizes, STEPS, FOLD, 0)
        w = tl.exp2(log_weight(s, m2[None, :], log2l[None, :], scale2, FOLD))
        if EDGE:
            w = tl.where(visible_at_all(i[None, :], j[:, None], b, h, seen, sizes, MASK), w, 0.0)
        if RECEIVED or (PARTS and ALIGNED):
            column = tl.sum(w, 1)
            received += column
        if PARTS and ALIGNED:
            part = add_block_to_parts(column, part, pool, b, h, n, j, sizes, BLOCK_I)
        elif PARTS:
            add_rows_to_parts(w, pool, b, h, i, j, sizes)
        if Z:
            mixed = tile(u, b, h, i, e, sizes.i, E, True)
            z = add_product(w.to(mixed.dtype), mixed, z, EXACT_U)
    return received, part, z


@triton.jit
def column_pass_kernel(
    q, k, pair, q_desc, q_map, norm, u, steps, strides, caps, seen, table, pool, out_received, out_z, sizes, heads,
    per_group, scale, scale2,
    PAIR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    EXACT: tl.constexpr, EXACT_U: tl.constexpr, RECEIVED: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
    Z: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All that BLOCK_J columns can tell."""
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    block, head = in_order(blocks, heads, per_group)
    b, h = head // sizes.h, head % sizes.h
    start = (blocks - 1 - block) * BLOCK_J  # the first keys are seen by most rows
    j = start + tl.arange(0, BLOCK_J)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    keys = j
    if PAIR == "product":
        keys = tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
    received = tl.zeros([BLOCK_J], tl.float32)
    part = tl.zeros([BLOCK_J], tl.float32)
    z = tl.zeros([BLOCK_J, BLOCK_E], tl.float32)
    first, full_from, full_to, past = row_blocks(start, b, table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
    if PARTS and ALIGNED and MASK == "causal":
        blank_parts(pool, b, h, j, first, past, sizes, BLOCK_I)
    # In the order of the rows, since the tile rows of a pooled map are written as they end; an edge of the mask on either side.
    for PART in tl.static_range(3):
        if EDGES or PART == 1:
            begin = first if PART == 0 else full_from if PART == 1 else full_to
            end = full_from if PART == 0 else full_to if PART == 1 else past
            received, part, z = columns_of(
                keys, q, pair, q_desc, q_map, norm, u, steps, strides, caps, seen, pool, sizes, j, d, e, b, h, received, part, z,
                scale, scale2, begin, end, PAIR, D, E, STEPS, MASK, FOLD, EXACT, EXACT_U, RECEIVED, PARTS, ALIGNED, Z, TMA,
                BLOCK_I, PART != 1, WHOLE,
            )  # fmt: skip
    if PARTS and ALIGNED:
        close_parts(part, pool, b, h, j, first, past, sizes, BLOCK_I)
    if RECEIVED:
        put_row(out_received, b, h, j, received, sizes.j)
    if Z:
        put_tile(out_z, b, h, j, e, z, sizes.j, E)


@triton.jit
def pool_kernel(sums, out, tiles, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of columns added up, WIDTH neighbours together."""
    tile_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        sums + tile_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=tile_row[:, None] < tiles, other=0.0
    )
    tl.store(out + tile_row, tl.sum(x, 1), mask=tile_row < tiles)


__all__ = ["Pool", "add_block_to_parts", "blank_parts", "close_parts", "column_pass_kernel", "pool_kernel"]
