"""The profile of a head: all sums of finished rows that a corpus run takes, in one pass.

Sums of columns and of diagonals, the weight of every row on the first key and on its target, and the largest weight on
a key that is neither the first nor the row's own. Each chunk of rows of a head has sums of its own, as in
`column_pass`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import doubles_at, exp, f32, longs_at, reals, use_wide_vectors
from .params import modifiers_at
from .row_ops import (
    apply_modifiers_,
    index_of,
    items,
    norm_of,
    own_scratch,
    row_max,
    rows_of_item,
    tile_products,
    visible_keys,
    zero_,
)


@njit
def profile(T):
    use_wide_vectors()
    size = T.itemsize
    scratch = own_scratch(T)
    sums = T.block_i + 2 * T.block_j
    zero_(reals(T, scratch + size * T.block_i * T.block_j, sums), 0, sums)
    for item in items(T, T.B * T.H * T.chunks):
        head, first, past = rows_of_item(T, 0, T.I, item)
        for i0 in range(first, past, T.block_i):
            block_of_rows(T, scratch, item, head, i0, min(T.block_i, T.I - i0))


@njit
def block_of_rows(T, scratch, item, head, i0, rows):
    """All tiles of a block of rows. `scratch`: a tile of scores, then sums of its columns and of its diagonals."""
    b, h = head // T.H, head % T.H
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            tile_products(T, scratch, b, h, i0, rows, j0, cols)
            add_tile(T, scratch, item, head, i0, rows, j0, cols, lo, hi)


@njit
def add_tile(T, scratch, item, head, i0, rows, j0, cols, lo, hi):
    """Turn a tile of scores into weights, and add up its columns and its diagonals."""
    size = T.itemsize
    columns = scratch + size * T.block_i * T.block_j
    diagonals = columns + size * T.block_j
    for r in range(rows):
        i = i0 + r
        a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
        if a >= z:
            continue
        n = z - a
        s = reals(T, scratch + size * (r * T.block_j + a), n)
        if T.modifier_count > 0:
            modifiers = carray(modifiers_at(T.modifiers), T.modifier_count)
            apply_modifiers_(s, s[:0], n, modifiers, T.modifier_count, head // T.H, head % T.H, i, i, j0 + a)
        m, share = norm_of(T, head * T.I + i)
        # Cells of one diagonal, j − i, have one place: a row begins one place before the row above it.
        on_diagonals = reals(T, diagonals + size * (rows - 1 - r + a), n)
        weigh_and_add_(s, n, m, share, reals(T, columns + size * a, n), on_diagonals)
        look_at_row(T, item, head, i, j0 + a, s, n, share)
    flush(reals(T, columns, cols), carray(doubles_at(T.received + 8 * (item * T.J + j0)), cols), cols)
    n, lowest = rows + cols - 1, j0 - (i0 + rows - 1)  # the lowest j − i of the tile
    total = T.diagonals + 8 * (item * (T.I + T.J - 1) + lowest + T.I - 1)
    flush(reals(T, diagonals, n), carray(doubles_at(total), n), n)


@njit(fastmath={"contract"})
def weigh_and_add_(s, n, m, share, column, diagonal):
    """s ← exp(s − m) / l, and add it to the sums of the columns and of the diagonals."""
    use_wide_vectors()
    for j in range(n):
        w = exp(s[j] - m) * share
        s[j] = w
        column[j] += w
        diagonal[j] += w


@njit
def look_at_row(T, item, head, i, key, w, n, share):
    """Note what a row gives to single keys: its n weights are those of keys from `key` on, which it may lose."""
    out = head * T.I + i
    if key == 0:
        reals(T, T.first + T.itemsize * out, 1)[0] = w[0]
    target = carray(longs_at(T.targets), T.B * T.I)[head // T.H * T.I + i] - key
    if 0 <= target < n:
        reals(T, T.at_target + T.itemsize * out, 1)[0] = w[target]
    best = reals(T, T.tie + T.itemsize * item, 1)
    if share < best[0]:  # no weight of a row exceeds 1 / l
        return
    if key == 0:
        w[0] = f32(0)
    if 0 <= i - key < n:
        w[i - key] = f32(0)
    here, query = row_max(w, n), carray(longs_at(T.tie_query), item + 1)
    if here > best[0] or (here == best[0] and i < query[item]):
        best[0] = here
        query[item] = i
        carray(longs_at(T.tie_key), item + 1)[item] = key + index_of(w, n, here)


@njit
def flush(sums, totals, n):
    """Add sums to totals, in float64, and zero them."""
    use_wide_vectors()
    for x in range(n):
        totals[x] += np.float64(sums[x])
    zero_(sums, 0, n)
