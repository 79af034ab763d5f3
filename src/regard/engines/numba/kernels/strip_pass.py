"""Row and column statistics in one pass over the scores, where `forward` and `column_pass` would make two.

The tiles of a block of rows stay in scratch memory until the norm of its rows is known; then their columns are added up
from the very numbers that stand in the norm. Scores are computed again where a block sees more tiles than the scratch
memory holds, and where a row is nan: then a hidden cell must be told from a visible one.
"""

from __future__ import annotations

from numba import njit

from .column_pass import add_tile, block_of_rows
from .forward import rows_of_one_head, tile_at
from .intrinsics import i64, reals, use_wide_vectors
from .row_ops import items, own_scratch, rows_of_item, visible_keys, zero_


@njit
def strip_pass(T):
    use_wide_vectors()
    scratch = own_scratch(T)
    for item in items(T, T.B * T.H * T.chunks):
        head, first, past = rows_of_item(T, 0, T.I, item)
        for i0 in range(first, past, T.block_i):
            rows = min(T.block_i, T.I - i0)
            fits = tile_count(T, head // T.H, i0, rows) <= T.strip
            rows_of_one_head(T, scratch, T.strip if fits else 1, head // T.H, head % T.H, i0, rows)
            if fits and not any_nan(T, head, i0, rows):
                add_strip(T, scratch, item, head, i0, rows)
            else:
                zero_columns(T, tile_at(T, scratch, 1))
                block_of_rows(T, scratch, item, head, i0, rows)


@njit
def tile_count(T, b, i0, rows):
    """Number of tiles in which a block of rows sees keys."""
    count = i64(0)
    for interval in range(T.n_intervals):
        _, _, first, end = visible_keys(T, b, interval, i0, rows)
        count += max(end - first + T.block_j - 1, 0) // T.block_j
    return count


@njit
def any_nan(T, head, i0, rows):
    """Whether the sum of some row is nan."""
    norm = reals(T, T.norm + 2 * T.itemsize * (head * T.I + i0), 2 * rows)
    for r in range(rows):
        if norm[2 * r + 1] != norm[2 * r + 1]:
            return True
    return False


@njit
def zero_columns(T, columns):
    """Zero the sums of the columns, which `add_tile` leaves zeroed."""
    zero_(reals(T, columns, T.block_j), 0, T.block_j)


@njit
def add_strip(T, scratch, item, head, i0, rows):
    """Add the tiles of a block of finished rows to all sums. The sums of columns stand where the rows' sums did."""
    maxima, columns = tile_at(T, scratch, T.strip), scratch + T.itemsize * T.strip * T.block_i * (T.block_j + 1)
    zero_columns(T, columns)
    place = i64(0)
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, head // T.H, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            m_then = reals(T, maxima + T.itemsize * place * T.block_i, T.block_i)
            cols = min(T.block_j, end - j0)
            add_tile(T, tile_at(T, scratch, place), m_then, columns, item, head, i0, rows, j0, cols, lo, hi)
            place += 1
