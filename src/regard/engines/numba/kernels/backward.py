"""Gradients of q, k, v and of biases per row and per key, from recomputed weights.

In every cell ds = w (left · right + d_distance |distance| − delta − d_entropy log w). Rows are cut into chunks. Each
chunk of a group of heads has sums of its own for the keys, so that the result does not depend on timing.
"""

from __future__ import annotations

from numba import carray, njit

from .intrinsics import f32, product_nn, product_nt, product_tn, reals, use_wide_vectors
from .params import SOFTCAP, modifiers_at
from .row_ops import (
    add_distance_,
    add_vector_,
    apply_modifiers_,
    items,
    mul_,
    norm_of,
    normalize_,
    normalize_with_logs_,
    own_scratch,
    score_grad_,
    score_grad_with_entropy_,
    tile_products,
    total,
    visible_keys,
    zero_,
)


@njit
def backward(T):
    use_wide_vectors()
    scratch = own_scratch(T)
    per_chunk = ((T.I + T.block_i - 1) // T.block_i + T.chunks - 1) // T.chunks * T.block_i
    group = T.H // T.G
    for item in items(T, T.B * T.G * T.chunks):
        chunk, b, g = item // (T.B * T.G), item // T.G % T.B, item % T.G
        for h in range(g * group, (g + 1) * group):
            for i0 in range(chunk * per_chunk, min(T.I, (chunk + 1) * per_chunk), T.block_i):
                block_of_rows(T, scratch, item, chunk, b, g, h, i0, min(T.block_i, T.I - i0))


@njit
def block_of_rows(T, scratch, item, chunk, b, g, h, i0, rows):
    """All tiles of a block of rows. `scratch`: a tile of weights, one of gradients, a row of logs, a row of slopes."""
    size = T.itemsize
    grads = scratch + size * T.block_i * T.block_j
    head = b * T.H + h
    q = T.q + size * (b * T.q_b + h * T.q_h + i0 * T.q_i)
    k = T.k + size * (b * T.k_b + g * T.k_h)
    left = T.left + size * (b * T.left_b + h * T.left_h + i0 * T.left_i)
    right = T.right + size * (b * T.right_b + h // T.right_group * T.right_h)
    dy = T.dy + size * (b * T.dy_b + h * T.dy_h + i0 * T.dy_i)
    dq = T.dq + size * (head * T.I + i0) * T.D
    dk = T.dk + size * item * T.J * T.D
    dv = T.dv + size * item * T.J * T.E
    dkey = T.dkey + size * (chunk * T.B * T.H + head) * T.J
    one = f32(1)
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            keys = k + size * j0 * T.k_j
            values = right + size * j0 * T.right_j
            tile_products(T, scratch, b, h, i0, rows, j0, cols)
            product_nt(T, rows, cols, T.X, one, left, T.left_i, values, T.right_j, f32(0), grads, T.block_j)
            for r in range(rows):
                a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                if a < z:
                    row_gradient(T, scratch, b, h, i0 + r, r, a, z - a, j0, dkey)
                else:
                    a = z = 0
                for at in (scratch, grads):
                    row = reals(T, at + size * r * T.block_j, T.block_j)
                    zero_(row, 0, a)
                    zero_(row, z, cols)
            if T.E > 0:
                product_tn(T, cols, T.E, rows, one, scratch, T.block_j, dy, T.dy_i, one, dv + size * j0 * T.E, T.E)
            product_nn(T, rows, T.D, cols, T.scale, grads, T.block_j, keys, T.k_j, one, dq, T.D)
            product_tn(T, cols, T.D, rows, T.scale, grads, T.block_j, q, T.q_i, one, dk + size * j0 * T.D, T.D)


@njit
def row_gradient(T, scratch, b, h, i, r, a, n, j0, dkey):
    """Scores of a row become weights, and left · right becomes the gradient of the scores."""
    size = T.itemsize
    tile = size * T.block_i * T.block_j
    here = scratch + size * (r * T.block_j + a)
    w, d = reals(T, here, n), reals(T, here + tile, n)
    log = reals(T, scratch + 2 * tile, n)
    row = (b * T.H + h) * T.I + i
    modifiers = carray(modifiers_at(T.modifiers), max(T.modifier_count, 1))
    slope = reals(T, scratch + 2 * tile + size * T.block_j, n if has_cap(modifiers, T.modifier_count) else 0)
    if T.modifier_count > 0:
        apply_modifiers_(w, slope, n, modifiers, T.modifier_count, b, h, i, i + T.offset, j0 + a)
    m, share = norm_of(T, row)
    c = reals(T, T.delta + size * row, 1)[0]
    if T.d_distance != 0:
        add_distance_(d, n, reals(T, T.d_distance + size * row, 1)[0], i + T.offset - j0 - a)
    if T.d_entropy != 0:
        normalize_with_logs_(w, n, m, share, log)
        score_grad_with_entropy_(d, w, n, c, reals(T, T.d_entropy + size * row, 1)[0], log)
    else:
        normalize_(w, n, m, share)
        score_grad_(d, w, n, c)
    if len(slope) > 0:
        mul_(d, n, slope)
    if T.drow != 0:
        reals(T, T.drow + size * row, 1)[0] += total(d, n)
    if T.dkey != 0:
        add_vector_(reals(T, dkey + size * (j0 + a), n), n, d)


@njit
def has_cap(modifiers, count):
    for n in range(count):
        if modifiers[n].kind == SOFTCAP:
            return True
    return False
