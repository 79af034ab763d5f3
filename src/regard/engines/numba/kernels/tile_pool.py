"""Tiles between edges of rows and of keys: sums or maxima of the weights of finished rows, or log Σ exp of scores.

Each chunk of rows of a head has tiles (maximum, sum) of its own, in float64. The columns of a tile of scores are
reduced first, all rows of a pooled tile together, so that every loop runs over adjacent keys.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import (
    NEGATIVE_INFINITY,
    doubles_at,
    exp,
    f32,
    longs_at,
    reals,
    use_wide_vectors,
)
from .params import POOL_LSE, POOL_MAX, modifiers_at
from .row_ops import (
    apply_modifiers_,
    items,
    norm_of,
    normalize_and_accumulate_,
    own_scratch,
    rows_of_item,
    tile_products,
    visible_keys,
)


@njit
def tile_pool(T):
    use_wide_vectors()
    scratch = own_scratch(T)
    for item in items(T, T.B * T.H * T.chunks):
        head, first, past = rows_of_item(T, T.row_from, T.row_to, item)
        for i0 in range(first, past, T.block_i):
            pool_rows(T, scratch, item, head, i0, min(T.block_i, T.I - i0))


@njit
def pool_rows(T, scratch, item, head, i0, rows):
    """All tiles of a block of rows. `scratch`: a tile of scores, then maxima and sums of its columns."""
    b, h = head // T.H, head % T.H
    row_tile = carray(longs_at(T.row_tile), T.I)
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            if j0 + cols <= T.key_from or j0 >= T.key_to:
                continue
            tile_products(T, scratch, b, h, i0, rows, j0, cols)
            r = 0
            while r < rows:
                tile, start = row_tile[i0 + r], r
                while r < rows and row_tile[i0 + r] == tile:
                    r += 1
                if tile >= 0:
                    pool_group(T, scratch, item, head, tile, i0, start, r, j0, cols, lo, hi)


@njit
def pool_group(T, scratch, item, head, row, i0, start, stop, j0, cols, lo, hi):
    """Merge rows of one pooled tile, all in one tile of scores, into their row of tiles."""
    size = T.itemsize
    at = scratch + size * T.block_i * T.block_j
    top, sums = reals(T, at, T.block_j), reals(T, at + size * T.block_j, T.block_j)
    top[:cols] = f32(0) if T.pool_by == POOL_MAX else NEGATIVE_INFINITY
    sums[:cols] = f32(0)
    for r in range(start, stop):
        i = i0 + r
        a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
        if a >= z:
            continue
        n = z - a
        s = reals(T, scratch + size * (r * T.block_j + a), n)
        if T.modifier_count > 0:
            modifiers = carray(modifiers_at(T.modifiers), T.modifier_count)
            apply_modifiers_(
                s, top[:0], n, modifiers, T.modifier_count, head // T.H, head % T.H, i, i + T.offset, j0 + a
            )
        column = reals(T, at + size * a, n)
        if T.pool_by == POOL_LSE:
            raise_(column, s, n)
            continue
        m, share = norm_of(T, head * T.I + i)
        if T.pool_by == POOL_MAX:
            raise_to_weights_(column, s, n, m, share)
        else:
            normalize_and_accumulate_(s, n, m, share, reals(T, at + size * (T.block_j + a), n))
    tiles = carray(doubles_at(T.tiles + 16 * (item * T.tile_rows + row) * T.tile_cols), (T.tile_cols, 2))
    if T.pool_by == POOL_LSE:
        level_tiles(T, tiles, top, j0, cols)
        for r in range(start, stop):
            a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
            if a < z:
                s = reals(T, scratch + size * (r * T.block_j + a), z - a)
                add_exp_(sums[a:], s, z - a, top[a:])
    merge_columns(T, tiles, top, sums, j0, cols)


@njit
def raise_(column, s, n):
    use_wide_vectors()
    for j in range(n):
        column[j] = column[j] if column[j] > s[j] else s[j]


@njit(fastmath={"contract"})
def raise_to_weights_(column, s, n, m, share):
    """column ← max(column, exp(s − m) / l)."""
    use_wide_vectors()
    for j in range(n):
        w = exp(s[j] - m) * share
        column[j] = column[j] if column[j] > w or column[j] != column[j] else w  # nan stays


@njit(fastmath={"contract"})
def add_exp_(sums, s, n, pivot):
    use_wide_vectors()
    for j in range(n):
        sums[j] += exp(s[j] - pivot[j])


@njit
def pooled_tile(T, j):
    """The pooled tile of key j, and the key after its last."""
    tile = carray(longs_at(T.key_tile), T.J)[j]
    return tile, carray(longs_at(T.key_edges), T.tile_cols + 1)[tile + 1]


@njit
def level_tiles(T, tiles, top, j0, cols):
    """Raise the maximum of every tile to that of its columns, and set these to it: what exp is centred on."""
    j, stop = max(j0, T.key_from), min(j0 + cols, T.key_to)
    while j < stop:
        tile, edge = pooled_tile(T, j)
        end = min(stop, edge)
        new = tiles[tile, 0]
        for x in range(j - j0, end - j0):
            new = max(new, np.float64(top[x]))
        if new > tiles[tile, 0] and tiles[tile, 1] > 0:
            tiles[tile, 1] *= np.exp(tiles[tile, 0] - new)
        tiles[tile, 0] = new
        top[j - j0 : end - j0] = f32(0) if new == -np.inf else top.dtype.type(new)
        j = end


@njit
def merge_columns(T, tiles, top, sums, j0, cols):
    """Merge the columns of a tile of scores into the pooled tiles."""
    j, stop = max(j0, T.key_from), min(j0 + cols, T.key_to)
    while j < stop:
        tile, edge = pooled_tile(T, j)
        end = min(stop, edge)
        for x in range(j - j0, end - j0):
            if T.pool_by == POOL_MAX:
                if not top[x] <= tiles[tile, 0]:  # nan, too
                    tiles[tile, 0] = np.float64(top[x])
            else:
                tiles[tile, 1] += np.float64(sums[x])
        j = end
