"""One pass over the keys for blocks of rows: y, norm and the statistics that rows can tell.

The state of a row is merged with that of each tile as `State.merge` does it. Imports `rows`, `task` and `words`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit

from .intrinsics import (
    NEGATIVE_INFINITY,
    draw,
    exponential,
    f32,
    floats_at,
    longs_at,
    product_nn,
    product_nt,
    use_wide_vectors,
)
from .params import steps_at
from .row_ops import (
    dot,
    exponentials,
    exponentials_and_t,
    far_sum,
    first_place,
    keep_largest,
    largest,
    modify,
    scaled,
    visible_range,
    zeroed,
)


def entry(stamp: int) -> Callable[[Any], None]:
    """The kernel; the stamp of its sources is part of what its compiled form is filed under."""

    def forward_kernel(pointer):
        if stamp:
            forward(carray(pointer, 1)[0])

    return forward_kernel


@njit
def forward(T):
    use_wide_vectors()
    mine = T.scratch + draw(T.counter + 8) * T.scratch_size
    blocks = (T.I + T.tall - 1) // T.tall
    while True:
        item = draw(T.counter)
        if item >= T.B * T.H * blocks:
            return
        b, h, i0 = item // (T.H * blocks), item // blocks % T.H, item % blocks * T.tall
        rows_of_one_head(T, mine, b, h, i0, min(T.tall, T.I - i0))


@njit
def rows_of_one_head(T, mine, b, h, i0, rows):
    """All tiles of a block of rows. `mine` is this thread's room: a tile of scores, then m, l and t of every row."""
    after = mine + 4 * T.tall * T.wide
    m = carray(floats_at(after), T.tall)
    l = carray(floats_at(after + 4 * T.tall), T.tall)
    t = carray(floats_at(after + 8 * T.tall), T.tall)
    m[:] = NEGATIVE_INFINITY
    l[:] = f32(0)
    t[:] = f32(0)
    q = T.q + 4 * (b * T.q_b + h * T.q_h + i0 * T.q_i)
    k = T.k + 4 * (b * T.k_b + h * T.G // T.H * T.k_h)
    v = T.v + 4 * (b * T.v_b + h * T.V // T.H * T.v_h)
    out = (b * T.H + h) * T.I + i0  # where this block's answers stand
    y = T.y + 4 * out * T.E
    untouched = True
    for span in range(T.spans):
        edge = 8 * (b * T.spans_b + span * T.I)
        lo, hi = carray(longs_at(T.lo + edge), T.I), carray(longs_at(T.hi + edge), T.I)
        first, end = visible_range(lo, hi, i0, rows)
        for j0 in range(first, end, T.wide):
            cols = min(T.wide, end - j0)
            product_nt(T.gemm, rows, cols, T.D, T.scale, q, T.q_i, k + 4 * j0 * T.k_j, T.k_j, f32(0), mine, T.wide)
            for r in range(rows):
                a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                row = carray(floats_at(mine + 4 * r * T.wide), T.wide)
                if a >= z:
                    zeroed(row, 0, cols)
                    continue
                merge_row(T, mine + 4 * (r * T.wide + a), z - a, j0 + a, b, h, i0 + r, out + r, r, m, l, t, after)
                zeroed(row, 0, a)
                zeroed(row, z, cols)
            if T.E > 0:
                beta = f32(0) if untouched else f32(1)
                product_nn(T.gemm, rows, T.E, cols, f32(1), mine, T.wide, v + 4 * j0 * T.v_j, T.v_j, beta, y, T.E)
                untouched = False
    finish_rows(T, b, h, out, rows, m, l, t, untouched)


@njit
def merge_row(T, at, n, key, b, h, i, out, r, m, l, t, room):
    """Merge the n scores at an address, of keys from `key` on, into the state of row r; they become exp(s − m)."""
    s = carray(floats_at(at), n)
    position = i + T.offset
    if T.step_count > 0:
        no_slope = carray(floats_at(at), 0)
        modify(s, no_slope, n, carray(steps_at(T.steps), T.step_count), T.step_count, b, h, i, position, key)
    old, here = m[r], largest(s, n)
    new = max(old, here)
    if T.argmax != 0 and here > old:
        carray(longs_at(T.argmax + 8 * out), 1)[0] = key + first_place(s, n, here)
    if T.top > 0:
        best = carray(floats_at(T.topk_scores + 4 * out * T.top), T.top)
        places = carray(longs_at(T.topk_indices + 8 * out * T.top), T.top)
        keep_largest(best, places, T.top, at, n, key, room + 12 * T.tall)
    pivot = f32(0) if new == NEGATIVE_INFINITY else new
    if T.t != 0:
        here_l, here_t = exponentials_and_t(s, n, pivot)
    else:
        here_l, here_t = exponentials(s, n, pivot), f32(0)
    if new > old and old != NEGATIVE_INFINITY:
        shrink(T, out, r, old - new, l, t)
    l[r] += here_l
    t[r] += here_t
    m[r] = new
    if T.mean_distance != 0:
        carray(floats_at(T.mean_distance + 4 * out), 1)[0] += far_sum(s, n, position - key)
    if T.mass != 0:
        carray(floats_at(T.mass + 4 * out), 1)[0] += dot(s, n, carray(floats_at(T.keys + 4 * key), n))


@njit
def shrink(T, out, r, shift, l, t):
    """A higher maximum was found: all that was summed so far shrinks by the same factor."""
    alpha = exponential(shift)
    t[r] = alpha * (t[r] + shift * l[r])
    l[r] *= alpha
    if T.E > 0:
        scaled(carray(floats_at(T.y + 4 * out * T.E), T.E), T.E, alpha)
    if T.mean_distance != 0:
        carray(floats_at(T.mean_distance + 4 * out), 1)[0] *= alpha
    if T.mass != 0:
        carray(floats_at(T.mass + 4 * out), 1)[0] *= alpha


@njit
def merge_sink(sink, r, m, l, t):
    """The sink is the state of one more key: maximum its logit, sum 1, value nothing. Returns what values shrink by."""
    new = max(m[r], sink)
    if new == NEGATIVE_INFINITY:
        return f32(1)
    ours = f32(0) if m[r] == NEGATIVE_INFINITY else m[r] - new
    theirs = f32(0) if sink == NEGATIVE_INFINITY else sink - new
    one = f32(0) if sink == NEGATIVE_INFINITY else exponential(theirs)
    alpha = exponential(ours)
    t[r] = alpha * (t[r] + ours * l[r]) + one * theirs
    l[r] = alpha * l[r] + one
    m[r] = new
    return alpha


@njit
def finish_rows(T, b, h, first, rows, m, l, t, untouched):
    """Merge the sink in, divide by the row sums, and write what was asked for."""
    for r in range(rows):
        out = first + r
        if T.m != 0:
            # A score that is nan leaves no trace in the maximum, but in the sum.
            carray(floats_at(T.m + 4 * out), 1)[0] = m[r] if l[r] == l[r] else l[r]
        alpha = f32(1)
        if T.sink != 0:
            alpha = merge_sink(carray(floats_at(T.sink + 4 * (b * T.sink_b + h * T.sink_h)), 1)[0], r, m, l, t)
        share = f32(0) if l[r] == f32(0) else alpha / l[r]
        log_l = np.log(l[r])
        norm = carray(floats_at(T.norm + 8 * out), 2)
        norm[0], norm[1] = m[r], l[r]
        if T.t != 0:
            entropy = f32(0) if l[r] == f32(0) else log_l - t[r] / l[r]
            carray(floats_at(T.t + 4 * out), 1)[0] = f32(0) if entropy < f32(0) else entropy
        if T.mean_distance != 0:
            carray(floats_at(T.mean_distance + 4 * out), 1)[0] *= share
        if T.mass != 0:
            carray(floats_at(T.mass + 4 * out), 1)[0] *= share
        if T.E > 0:
            row = carray(floats_at(T.y + 4 * out * T.E), T.E)
            if untouched:
                zeroed(row, 0, T.E)
            else:
                scaled(row, T.E, share)
