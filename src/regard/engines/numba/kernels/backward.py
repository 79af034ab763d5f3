"""Gradients of q, k, v and of biases per row and per key, from weights made once more.

In every cell ds = w (left · right + ρ |distance| − c − η log w). Rows are cut into chunks; each chunk of a group of
heads has sums of its own for the keys, so the result does not depend on who was faster.
Imports `rows`, `task` and `words`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray, njit

from .intrinsics import draw, f32, floats_at, longs_at, product_nn, product_nt, product_tn, use_wide_vectors
from .params import SOFTCAP, steps_at
from .row_ops import (
    add_far,
    add_vector,
    into_scores,
    into_scores_entropy,
    modify,
    norm_of,
    times,
    total,
    visible_range,
    weights_and_logs,
    weights_kept,
    zeroed,
)


def entry(stamp: int) -> Callable[[Any], None]:
    """The kernel; the stamp of its sources is part of what its compiled form is filed under."""

    def backward_kernel(pointer):
        if stamp:
            backward(carray(pointer, 1)[0])

    return backward_kernel


@njit
def backward(T):
    use_wide_vectors()
    mine = T.scratch + draw(T.counter + 8) * T.scratch_size
    per_chunk = ((T.I + T.tall - 1) // T.tall + T.chunks - 1) // T.chunks * T.tall
    group = T.H // T.G
    while True:
        item = draw(T.counter)
        if item >= T.B * T.G * T.chunks:
            return
        chunk, b, g = item // (T.B * T.G), item // T.G % T.B, item % T.G
        for h in range(g * group, (g + 1) * group):
            for i0 in range(chunk * per_chunk, min(T.I, (chunk + 1) * per_chunk), T.tall):
                block_of_rows(T, mine, item, chunk, b, g, h, i0, min(T.tall, T.I - i0))


@njit
def block_of_rows(T, mine, item, chunk, b, g, h, i0, rows):
    """`mine` is this thread's room: a tile of weights, one of gradients, a row of logs, a row of slopes."""
    grads = mine + 4 * T.tall * T.wide
    head = b * T.H + h
    q = T.q + 4 * (b * T.q_b + h * T.q_h + i0 * T.q_i)
    k = T.k + 4 * (b * T.k_b + g * T.k_h)
    left = T.left + 4 * (b * T.left_b + h * T.left_h + i0 * T.left_i)
    right = T.right + 4 * (b * T.right_b + h // T.right_group * T.right_h)
    dy = T.dy + 4 * (b * T.dy_b + h * T.dy_h + i0 * T.dy_i)
    dq = T.dq + 4 * (head * T.I + i0) * T.D
    dk = T.dk + 4 * item * T.J * T.D
    dv = T.dv + 4 * item * T.J * T.E
    dkey = T.dkey + 4 * (chunk * T.B * T.H + head) * T.J
    one = f32(1)
    for span in range(T.spans):
        edge = 8 * (b * T.spans_b + span * T.I)
        lo, hi = carray(longs_at(T.lo + edge), T.I), carray(longs_at(T.hi + edge), T.I)
        first, end = visible_range(lo, hi, i0, rows)
        for j0 in range(first, end, T.wide):
            cols = min(T.wide, end - j0)
            keys = k + 4 * j0 * T.k_j
            values = right + 4 * j0 * T.right_j
            product_nt(T.gemm, rows, cols, T.D, T.scale, q, T.q_i, keys, T.k_j, f32(0), mine, T.wide)
            product_nt(T.gemm, rows, cols, T.X, one, left, T.left_i, values, T.right_j, f32(0), grads, T.wide)
            for r in range(rows):
                a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                if a < z:
                    row_gradient(T, mine, b, h, i0 + r, r, a, z - a, j0, dkey)
                else:
                    a = z = 0
                for at in (mine, grads):
                    row = carray(floats_at(at + 4 * r * T.wide), T.wide)
                    zeroed(row, 0, a)
                    zeroed(row, z, cols)
            if T.E > 0:
                product_tn(T.gemm, cols, T.E, rows, one, mine, T.wide, dy, T.dy_i, one, dv + 4 * j0 * T.E, T.E)
            product_nn(T.gemm, rows, T.D, cols, T.scale, grads, T.wide, keys, T.k_j, one, dq, T.D)
            product_tn(T.gemm, cols, T.D, rows, T.scale, grads, T.wide, q, T.q_i, one, dk + 4 * j0 * T.D, T.D)


@njit
def row_gradient(T, mine, b, h, i, r, a, n, j0, dkey):
    """Scores of a row become weights, and left · right becomes the gradient of the scores."""
    tile = 4 * T.tall * T.wide
    here = mine + 4 * (r * T.wide + a)
    w, d = carray(floats_at(here), n), carray(floats_at(here + tile), n)
    log = carray(floats_at(mine + 2 * tile), n)
    row = (b * T.H + h) * T.I + i
    steps = carray(steps_at(T.steps), max(T.step_count, 1))
    slope = carray(floats_at(mine + 2 * tile + 4 * T.wide), n if has_cap(steps, T.step_count) else 0)
    if T.step_count > 0:
        modify(w, slope, n, steps, T.step_count, b, h, i, i + T.offset, j0 + a)
    m, share = norm_of(T, row)
    c = carray(floats_at(T.c + 4 * row), 1)[0]
    if T.rho != 0:
        add_far(d, n, carray(floats_at(T.rho + 4 * row), 1)[0], i + T.offset - j0 - a)
    if T.eta != 0:
        weights_and_logs(w, n, m, share, log)
        into_scores_entropy(d, w, n, c, carray(floats_at(T.eta + 4 * row), 1)[0], log)
    else:
        weights_kept(w, n, m, share)
        into_scores(d, w, n, c)
    if len(slope) > 0:
        times(d, n, slope)
    if T.drow != 0:
        carray(floats_at(T.drow + 4 * row), 1)[0] += total(d, n)
    if T.dkey != 0:
        add_vector(carray(floats_at(dkey + 4 * (j0 + a)), n), n, d)


@njit
def has_cap(steps, count):
    for n in range(count):
        if steps[n].kind == SOFTCAP:
            return True
    return False
