"""The column pass: column sums, pooled map and Wᵀ u from the weights of finished rows.

Rows are cut into chunks. Each chunk of a head has sums of its own, so that no two threads add to one number and the
result does not depend on timing.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import doubles_at, exp, f32, i64, product_tn, reals, use_wide_vectors
from .params import modifiers_at
from .row_ops import (
    apply_modifiers_,
    items,
    norm_of,
    normalize_and_accumulate_,
    own_scratch,
    rescale_and_accumulate_,
    rows_of_item,
    tile_products,
    visible_keys,
    zero_,
)


@njit
def column_pass(T):
    size = T.itemsize
    use_wide_vectors()
    scratch = own_scratch(T)
    zero_(reals(T, scratch + size * T.block_i * T.block_j, T.block_j), 0, T.block_j)
    for item in items(T, T.B * T.H * T.chunks):
        head, first, past = rows_of_item(T, T.row_from, T.row_to, item)
        for i0 in range(first, past, T.block_i):
            block_of_rows(T, scratch, item, head, i0, min(T.block_i, T.I - i0))


@njit
def block_of_rows(T, scratch, item, head, i0, rows):
    """All tiles of a block of rows. `scratch` (this thread's memory): a tile of scores, then sums of its columns."""
    no_maxima = reals(T, scratch, 0)
    columns = scratch + T.itemsize * T.block_i * T.block_j
    b, h = head // T.H, head % T.H
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            if j0 + cols <= T.key_from or j0 >= T.key_to:
                continue
            tile_products(T, scratch, b, h, i0, rows, j0, cols)
            add_tile(T, scratch, no_maxima, columns, item, head, i0, rows, j0, cols, lo, hi)


@njit
def add_tile(T, tile, maxima, columns, item, head, i0, rows, j0, cols, lo, hi):
    """Turn a tile into weights and add it to all sums; it holds scores, or with `maxima` exp(s − maxima)."""
    size = T.itemsize
    group = pool_row(T, i0)
    for r in range(rows):
        i = i0 + r
        if pool_row(T, i) != group:
            flush(T, columns, cols, j0, group, item)
            group = pool_row(T, i)
        row = reals(T, tile + size * r * T.block_j, T.block_j)
        a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
        if a >= z:
            zero_(row, 0, cols)
            continue
        n = z - a
        s, column = reals(T, tile + size * (r * T.block_j + a), n), reals(T, columns + size * a, n)
        m, share = norm_of(T, head * T.I + i)
        if len(maxima) > 0:
            rescale_and_accumulate_(s, n, exp(maxima[r] - m) * share, column)
            continue
        if T.modifier_count > 0:
            modifiers = carray(modifiers_at(T.modifiers), T.modifier_count)
            apply_modifiers_(
                s, row[:0], n, modifiers, T.modifier_count, head // T.H, head % T.H, i, i + T.offset, j0 + a
            )
        normalize_and_accumulate_(s, n, m, share, column)
        zero_(row, 0, a)
        zero_(row, z, cols)
    flush(T, columns, cols, j0, group, item)
    if T.U > 0:
        u = T.u + size * (head // T.H * T.u_b + head % T.H * T.u_h + i0 * T.u_i)
        at = T.z + size * (item * T.J + j0) * T.U
        product_tn(T, cols, T.U, rows, f32(1), tile, T.block_j, u, T.u_i, f32(1), at, T.U)


@njit
def pool_row(T, i):
    """The row of the pooled map that query i belongs to; −1 for none."""
    if T.pool == 0 or i < T.i0 or i >= T.i1:
        return i64(-1)
    return ((i - T.i0 + 1) * T.tile_rows - 1) // (T.i1 - T.i0)


@njit
def flush(T, columns, cols, j0, row, item):
    """Add column sums to the totals, in float64, and to a row of the pooled map; then zero them."""
    use_wide_vectors()
    column = reals(T, columns, cols)
    if T.received != 0:
        received = carray(doubles_at(T.received + 8 * (item * T.J + j0)), cols)
        for j in range(cols):
            received[j] += np.float64(column[j])
    if row >= 0:
        pool = carray(doubles_at(T.pool + 8 * (item * T.tile_rows + row) * T.tile_cols), T.tile_cols)
        j, stop, n = max(j0, T.j0), min(j0 + cols, T.j1), T.j1 - T.j0
        while j < stop:
            tile = ((j - T.j0 + 1) * T.tile_cols - 1) // n
            end = min(stop, T.j0 + (tile + 1) * n // T.tile_cols)
            sum_here = np.float64(0)
            for x in range(j - j0, end - j0):
                sum_here += np.float64(column[x])
            pool[tile] += sum_here
            j = end
    zero_(column, 0, cols)
