"""The column pass: a second pass over the weights of finished rows, for column statistics.

A program owns a block of keys and walks the row blocks that see them. Each column is summed by one program in a fixed
order: no atomics, and the same bits every time. Outputs are `received`, `z` = Wᵀ u and, for every tile row of a pooled
map, the sums of POOL neighbouring columns each, which `pool_kernel` then sums along the columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .additive import tanh_sum
from .forward import schedule_tile
from .tile_ops import (
    add_product,
    apply_score_mods,
    load_block,
    load_norm2,
    load_row_values,
    load_tile,
    log_weight,
    product,
    row_blocks,
    store_row,
    store_tile,
    visible_at_all,
)


class Pool(NamedTuple):
    """How rows are pooled: `rows` tile rows over i0 <= i < i1, into the contiguous `sums` (b, h, rows, j / POOL)."""

    sums: Any
    rows: int
    i0: int
    i1: int
    blocks: int  # row blocks in a tile row, where every row block lies within one


@triton.jit
def columns_together(x, WIDTH: tl.constexpr):
    """A vector over columns as (groups, WIDTH): neighbours, which a product leaves within a warp."""
    return tl.reshape(x, [x.shape[0] // WIDTH, WIDTH])


@triton.jit
def pool_columns(j, WIDTH: tl.constexpr):
    """Places of the columns j in a line of `sums`."""
    if WIDTH > 1:
        j = tl.min(columns_together(j, WIDTH), 1) // WIDTH
    return j


@triton.jit
def pool_ptr(pool, b, h, at, sizes, WIDTH: tl.constexpr):
    """Pointer to the sums at these places of the first tile row of a pooled map."""
    return pool.sums + (b * sizes.h + h).to(tl.int64) * pool.rows * (sizes.j // WIDTH) + at


@triton.jit
def store_pool_row(pool_sum, pool, b, h, row, at, there, sizes, WIDTH: tl.constexpr):
    """Store the sums of a tile row, of WIDTH neighbouring columns each, if `there`."""
    if WIDTH > 1:
        pool_sum = tl.sum(columns_together(pool_sum, WIDTH), 1)
    columns = sizes.j // WIDTH
    line = pool_ptr(pool, b, h, at, sizes, WIDTH) + tl.cast(row, tl.int64) * columns
    tl.store(line, pool_sum, mask=at < tl.where(there, columns, 0))


@triton.jit
def zero_pool_rows_before(pool, b, h, at, first, past, sizes, BLOCK_I: tl.constexpr, WIDTH: tl.constexpr):
    """Store zeros in the tile rows that end before the first row block that sees these keys."""
    until = tl.maximum(first - pool.i0 // BLOCK_I, 0) // pool.blocks
    until = tl.where(first < past, tl.minimum(until, pool.rows), pool.rows)
    columns = sizes.j // WIDTH
    for r in range(0, until):
        tl.store(pool_ptr(pool, b, h, at, sizes, WIDTH) + tl.cast(r, tl.int64) * columns, at * 0.0, mask=at < columns)


@triton.jit
def add_block_to_pool(column, pool_sum, pool, b, h, n, at, sizes, BLOCK_I: tl.constexpr, WIDTH: tl.constexpr):
    """Add the columns of row block n to the sum of its tile row, which is stored when the tile row ends."""
    block = n + tl.program_id(0) * 0 - pool.i0 // BLOCK_I  # counted from the first pooled row
    inside = (block >= 0) & (block < pool.blocks * pool.rows)
    pool_sum += tl.where(inside, column, 0.0)
    ends = inside & ((block + 1) % pool.blocks == 0)
    store_pool_row(pool_sum, pool, b, h, block // pool.blocks, at, ends, sizes, WIDTH)
    return tl.where(ends, 0.0, pool_sum)


@triton.jit
def flush_pool_row(pool_sum, pool, b, h, at, first, past, sizes, BLOCK_I: tl.constexpr, WIDTH: tl.constexpr):
    """Store the sum of a tile row that the last visible row block ends in."""
    block = past - 1 + tl.program_id(0) * 0 - pool.i0 // BLOCK_I
    inside = (block >= 0) & (block < pool.blocks * pool.rows) & (block + pool.i0 // BLOCK_I >= first)
    open_row = inside & ((block + 1) % pool.blocks != 0)
    store_pool_row(pool_sum, pool, b, h, block // pool.blocks, at, open_row, sizes, WIDTH)


@triton.jit
def low_row_sums(w, HEIGHT: tl.constexpr):
    """Columns (j, rows) of a tile (j, i) that holds several tile rows of HEIGHT rows each."""
    return tl.sum(tl.reshape(w, [w.shape[0], w.shape[1] // HEIGHT, HEIGHT]), 2)


@triton.jit
def store_low_rows(sums, pool, b, h, n, j, sizes, HEIGHT: tl.constexpr, BLOCK_I: tl.constexpr, WIDTH: tl.constexpr):
    """Store all tile rows of row block n, from their columns `sums` (j, rows)."""
    COUNT: tl.constexpr = BLOCK_I // HEIGHT
    at = j
    if WIDTH > 1:
        sums = tl.sum(tl.reshape(sums, [sums.shape[0] // WIDTH, WIDTH, COUNT]), 1)
        at = pool_columns(j, WIDTH)
    columns = sizes.j // WIDTH
    row = (n * BLOCK_I - pool.i0) // HEIGHT + tl.arange(0, COUNT)
    there = (row >= 0) & (row < pool.rows)
    line = pool_ptr(pool, b, h, at, sizes, WIDTH)[:, None] + row.to(tl.int64)[None, :] * columns
    tl.store(line, sums, mask=(at < columns)[:, None] & there[None, :])


@triton.jit
def zero_low_rows_before(
    pool, b, h, at, first, past, sizes, HEIGHT: tl.constexpr, BLOCK_I: tl.constexpr, WIDTH: tl.constexpr
):
    """Store zeros in the tile rows before the first row block that sees these keys."""
    until = tl.minimum(tl.maximum(first * BLOCK_I - pool.i0, 0) // HEIGHT, pool.rows)
    until = tl.where(first < past, until, pool.rows)
    columns = sizes.j // WIDTH
    for r in range(0, until):
        tl.store(pool_ptr(pool, b, h, at, sizes, WIDTH) + tl.cast(r, tl.int64) * columns, at * 0.0, mask=at < columns)


@triton.jit
def tile_row(i, pool):
    """The tile row of a pooled row."""
    return ((i - pool.i0 + 1).to(tl.int64) * pool.rows - 1) // (pool.i1 - pool.i0)


@triton.jit
def add_rows_to_pool(w, column, pool_sum, open_row, pool, b, h, n, i, j, sizes, BLOCK_I: tl.constexpr):
    """Add a tile (j, i) to the open tile row, which is stored when a row of the next one comes; any number may end here."""
    start = n * BLOCK_I
    begin, end = tl.maximum(start, pool.i0), tl.minimum(tl.minimum(start + BLOCK_I, sizes.i), pool.i1)
    first, last = tile_row(begin, pool), tile_row(end - 1, pool)
    last = tl.where(begin < end, last, first - 1)
    goes_on = (first == last) & (end - begin == BLOCK_I) & (first == open_row)
    if goes_on:
        pool_sum += column
    else:
        row = tl.where((i >= begin) & (i < end), tile_row(i, pool), -1)
        for r in range(first, last + 1):
            store_pool_row(pool_sum, pool, b, h, open_row, j, (open_row >= 0) & (r != open_row), sizes, 1)
            pool_sum = tl.where(r == open_row, pool_sum, 0.0) + tl.sum(tl.where((row == r)[None, :], w, 0.0), 1)
            open_row = r
    return pool_sum, open_row


@triton.jit
def add_columns(
    k_tile, q, tanh_arg, q_desc, q_layout, norm, factors, u, modifiers, strides, caps, mask, pool, sizes, j, d, e, b, h, received, pool_sum, open_row, z,
    scale, scale2, begin, end, SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_U: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, POOL_ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr, Z: tl.constexpr, TMA: tl.constexpr, BLOCK_I: tl.constexpr, EDGE: tl.constexpr,
    EVEN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the weights of row blocks `begin` to `end` to the sums of the columns."""
    next_m2, next_log2l = load_norm2(norm, b, h, begin * BLOCK_I + tl.arange(0, BLOCK_I), sizes, SCALE_FOLDED)
    for n in range(begin, end):
        i = n * BLOCK_I + tl.arange(0, BLOCK_I)
        m2, log2l = next_m2, next_log2l
        # One block ahead by hand: the compiler prefetches only the operands of products.
        next_m2, next_log2l = load_norm2(norm, b, h, i + BLOCK_I, sizes, SCALE_FOLDED)
        if SIMILARITY == "product":
            q_tile = load_block(
                q, q_desc, q_layout, b, h, n * BLOCK_I, i, d, sizes.i, D, TMA and (EVEN_BLOCKS or not EDGE), EDGE
            )
            s = product(k_tile, q_tile.T, FP32)  # j i
        else:
            s = tanh_sum(tanh_arg, i, j, b, h, h // sizes.k_group, sizes, SIMILARITY, True)
        s, _ = apply_score_mods(
            s, i[None, :], j[:, None], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
        )
        w = tl.exp2(log_weight(s, m2[None, :], log2l[None, :], scale2, SCALE_FOLDED))
        if EDGE:
            w = tl.where(visible_at_all(i[None, :], j[:, None], b, h, mask, sizes, MASK), w, 0.0)
        if WEIGHTED:
            w = w * load_row_values(factors, b, h, i, sizes, 0.0)[None, :]
        if POOL and POOL_ROWS > 0:
            low_rows = low_row_sums(w, POOL_ROWS)
            store_low_rows(low_rows, pool, b, h, n, j, sizes, POOL_ROWS, BLOCK_I, POOL)
            received += tl.sum(low_rows, 1)
        elif RECEIVED or POOL:
            column = tl.sum(w, 1)
            received += column
        if POOL and POOL_ROWS == 0:
            pool_sum = add_block_to_pool(column, pool_sum, pool, b, h, n, pool_columns(j, POOL), sizes, BLOCK_I, POOL)
        elif POOL and POOL_ROWS < 0:
            pool_sum, open_row = add_rows_to_pool(w, column, pool_sum, open_row, pool, b, h, n, i, j, sizes, BLOCK_I)
        if Z:
            u_tile = load_tile(u, b, h, i, e, sizes.i, E, True)
            z = add_product(w.to(u_tile.dtype), u_tile, z, FP32_U)
    return received, pool_sum, open_row, z


@triton.jit
def column_pass_kernel(
    q, k, tanh_arg, q_desc, q_layout, norm, factors, u, modifiers, strides, caps, mask, key_table, pool, out_received, out_z, sizes, heads,
    heads_per_group, scale, scale2,
    SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_U: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, POOL_ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr, Z: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_J columns.

    POOL: neighbouring columns that are summed before they are stored, 0 without a pooled map. POOL_ROWS: 0 where every row block
    lies within one tile row; the rows of a tile row where several fill a row block; −1 for any others. WEIGHTED: every row
    counts times one of `factors`.
    """
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    block, head = schedule_tile(blocks, heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = (blocks - 1 - block) * BLOCK_J  # the first keys are seen by most rows, so they start first
    j = start + tl.arange(0, BLOCK_J)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k_tile = j
    if SIMILARITY == "product":
        k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
    received = tl.zeros([BLOCK_J], tl.float32)
    pool_sum = tl.zeros([BLOCK_J], tl.float32)
    z = tl.zeros([BLOCK_J, BLOCK_E], tl.float32)
    first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    open_row = tl.full([], -1, tl.int64)
    if POOL and MASK == "causal":
        if POOL_ROWS == 0:
            zero_pool_rows_before(pool, b, h, pool_columns(j, POOL), first, past, sizes, BLOCK_I, POOL)
        elif POOL_ROWS > 0:
            zero_low_rows_before(pool, b, h, pool_columns(j, POOL), first, past, sizes, POOL_ROWS, BLOCK_I, POOL)
    # Edge, fully visible, edge: in the order of the rows, since the tile rows of a pooled map are stored as they end.
    for SECTION in tl.static_range(3):
        if EDGES or SECTION == 1:
            begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
            end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
            received, pool_sum, open_row, z = add_columns(
                k_tile, q, tanh_arg, q_desc, q_layout, norm, factors, u, modifiers, strides, caps, mask, pool, sizes, j, d, e, b, h, received, pool_sum,
                open_row, z, scale, scale2, begin, end, SIMILARITY, D, E, MODIFIERS, MASK, SCALE_FOLDED, FP32, FP32_U, RECEIVED, POOL, POOL_ROWS,
                WEIGHTED, Z, TMA, BLOCK_I, SECTION != 1, EVEN_BLOCKS,
            )  # fmt: skip
    if POOL and POOL_ROWS == 0:
        flush_pool_row(pool_sum, pool, b, h, pool_columns(j, POOL), first, past, sizes, BLOCK_I, POOL)
    if POOL and POOL_ROWS < 0:
        store_pool_row(pool_sum, pool, b, h, open_row, j, open_row >= 0, sizes, 1)
    if RECEIVED:
        store_row(out_received, b, h, j, received, sizes.j)
    if Z:
        store_tile(out_z, b, h, j, e, z, sizes.j, E)


@triton.jit
def pool_kernel(sums, out, tiles, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of WIDTH neighbouring columns each."""
    tile_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        sums + tile_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=tile_row[:, None] < tiles, other=0.0
    )
    tl.store(out + tile_row, tl.sum(x, 1), mask=tile_row < tiles)


__all__ = [
    "Pool",
    "add_block_to_pool",
    "column_pass_kernel",
    "flush_pool_row",
    "pool_columns",
    "pool_kernel",
    "zero_pool_rows_before",
]
