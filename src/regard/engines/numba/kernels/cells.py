"""Scores at chosen rows and keys, from the products that the norm was computed from.

BLAS rounds a product of another shape differently, so a cell is copied out of the tile that `forward` computes: same
rows, same keys, same strides. Tiles without a chosen cell are skipped.
"""

from __future__ import annotations

from numba import carray, njit

from .intrinsics import i64, longs_at, reals, use_wide_vectors
from .params import modifiers_at
from .row_ops import apply_modifiers_, items, own_scratch, tile_products, visible_keys


@njit
def cells(T):
    use_wide_vectors()
    scratch = own_scratch(T)
    blocks = (T.I + T.block_i - 1) // T.block_i
    for item in items(T, T.B * T.H * blocks):
        i0 = item % blocks * T.block_i
        row_at = carray(longs_at(T.row_at), T.row_count)
        chosen, end = first_from(row_at, T.row_count, i0), first_from(row_at, T.row_count, i0 + T.block_i)
        if chosen < end:
            block_of_rows(T, scratch, item // blocks, i0, min(T.block_i, T.I - i0), chosen, end)


@njit
def block_of_rows(T, scratch, head, i0, rows, chosen, end_chosen):
    """All tiles of a block of rows with chosen cells. `scratch`, this thread's memory, holds a tile of scores."""
    b, h = head // T.H, head % T.H
    col_at = carray(longs_at(T.col_at), T.col_count)
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            here, stop = first_from(col_at, T.col_count, j0), first_from(col_at, T.col_count, j0 + cols)
            if here == stop:
                continue
            tile_products(T, scratch, b, h, i0, rows, j0, cols)
            copy_tile(T, scratch, b, h, i0, chosen, end_chosen, j0, cols, here, stop, lo, hi)


@njit
def copy_tile(T, scratch, b, h, i0, chosen, end_chosen, j0, cols, here, stop, lo, hi):
    """Apply the modifiers to the chosen rows of a tile, and copy the visible ones of their chosen keys out."""
    size = T.itemsize
    row_at, row_place = carray(longs_at(T.row_at), T.row_count), carray(longs_at(T.row_place), T.row_count)
    col_at, col_place = carray(longs_at(T.col_at), T.col_count), carray(longs_at(T.col_place), T.col_count)
    last = i64(-1)
    for n in range(chosen, end_chosen):
        i = row_at[n]
        a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
        row = reals(T, scratch + size * (i - i0) * T.block_j, T.block_j)
        if a < z and T.modifier_count > 0 and i != last:  # a row that is chosen twice is modified once
            s = reals(T, scratch + size * ((i - i0) * T.block_j + a), z - a)
            modifiers = carray(modifiers_at(T.modifiers), T.modifier_count)
            apply_modifiers_(s, row[:0], z - a, modifiers, T.modifier_count, b, h, i, i + T.offset, j0 + a)
        last = i
        out = T.cells + size * ((b * T.H + h) * T.row_count + row_place[n]) * T.col_count
        out_row = reals(T, out, T.col_count)
        for c in range(here, stop):
            if a <= col_at[c] - j0 < z:
                out_row[col_place[c]] = row[col_at[c] - j0]


@njit
def first_from(ordered, n, x):
    """Index of the first of n sorted numbers that is at least x."""
    low, high = i64(0), i64(n)
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low
