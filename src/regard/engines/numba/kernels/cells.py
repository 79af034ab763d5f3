"""Scores at chosen rows and keys, by the products that made the norm.

BLAS rounds a product of another shape another way, so a cell is copied out of the very tile that `forward` would make:
same rows, same keys, same strides. Tiles that hold no chosen cell are not made. Imports `rows`, `task` and `words`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray, njit

from .intrinsics import draw, f32, floats_at, i64, longs_at, product_nt, use_wide_vectors
from .params import steps_at
from .row_ops import modify, visible_range


def entry(stamp: int) -> Callable[[Any], None]:
    """The kernel; the stamp of its sources is part of what its compiled form is filed under."""

    def cells_kernel(pointer):
        if stamp:
            cells(carray(pointer, 1)[0])

    return cells_kernel


@njit
def cells(T):
    use_wide_vectors()
    mine = T.scratch + draw(T.counter + 8) * T.scratch_size
    blocks = (T.I + T.tall - 1) // T.tall
    while True:
        item = draw(T.counter)
        if item >= T.B * T.H * blocks:
            return
        i0 = item % blocks * T.tall
        row_at = carray(longs_at(T.row_at), T.row_count)
        chosen, end = first_from(row_at, T.row_count, i0), first_from(row_at, T.row_count, i0 + T.tall)
        if chosen < end:
            block_of_rows(T, mine, item // blocks, i0, min(T.tall, T.I - i0), chosen, end)


@njit
def block_of_rows(T, mine, head, i0, rows, chosen, end_chosen):
    """`mine` is this thread's scratch memory: a tile of scores. Its chosen rows are those from `chosen` on."""
    b, h = head // T.H, head % T.H
    q = T.q + 4 * (b * T.q_b + h * T.q_h + i0 * T.q_i)
    k = T.k + 4 * (b * T.k_b + h * T.G // T.H * T.k_h)
    col_at = carray(longs_at(T.col_at), T.col_count)
    for span in range(T.spans):
        edge = 8 * (b * T.spans_b + span * T.I)
        lo, hi = carray(longs_at(T.lo + edge), T.I), carray(longs_at(T.hi + edge), T.I)
        first, end = visible_range(lo, hi, i0, rows)
        for j0 in range(first, end, T.wide):
            cols = min(T.wide, end - j0)
            here, stop = first_from(col_at, T.col_count, j0), first_from(col_at, T.col_count, j0 + cols)
            if here == stop:
                continue
            product_nt(T.gemm, rows, cols, T.D, T.scale, q, T.q_i, k + 4 * j0 * T.k_j, T.k_j, f32(0), mine, T.wide)
            copy_tile(T, mine, b, h, i0, chosen, end_chosen, j0, cols, here, stop, lo, hi)


@njit
def copy_tile(T, mine, b, h, i0, chosen, end_chosen, j0, cols, here, stop, lo, hi):
    """The chosen rows of a tile go through all steps, and what is visible of their chosen keys is copied out."""
    row_at, row_place = carray(longs_at(T.row_at), T.row_count), carray(longs_at(T.row_place), T.row_count)
    col_at, col_place = carray(longs_at(T.col_at), T.col_count), carray(longs_at(T.col_place), T.col_count)
    last = i64(-1)
    for n in range(chosen, end_chosen):
        i = row_at[n]
        a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
        row = carray(floats_at(mine + 4 * (i - i0) * T.wide), T.wide)
        if a < z and T.step_count > 0 and i != last:  # a row that is chosen twice is modified once
            s = carray(floats_at(mine + 4 * ((i - i0) * T.wide + a)), z - a)
            steps = carray(steps_at(T.steps), T.step_count)
            modify(s, row[:0], z - a, steps, T.step_count, b, h, i, i + T.offset, j0 + a)
        last = i
        out = T.cells + 4 * ((b * T.H + h) * T.row_count + row_place[n]) * T.col_count
        found = carray(floats_at(out), T.col_count)
        for c in range(here, stop):
            if a <= col_at[c] - j0 < z:
                found[col_place[c]] = row[col_at[c] - j0]


@njit
def first_from(ordered, n, x):
    """The place of the first of n ordered numbers that is at least x."""
    low, high = i64(0), i64(n)
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low
