"""The forward pass: y, norm and the row statistics, one pass over the keys.

Each tile is merged into the online-softmax state of its rows, as `State.merge` does.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import (
    NEGATIVE_INFINITY,
    exp,
    f32,
    i64,
    longs_at,
    product_nn,
    reals,
    use_wide_vectors,
)
from .params import modifiers_at
from .row_ops import (
    apply_modifiers_,
    dot,
    exp_,
    exp_with_t_,
    expected_distance,
    index_of,
    items,
    own_scratch,
    row_max,
    scale_,
    tile_products,
    update_topk,
    visible_keys,
    zero_,
)


@njit
def forward(T):
    use_wide_vectors()
    scratch = own_scratch(T)
    blocks = (T.I + T.block_i - 1) // T.block_i
    for item in items(T, T.B * T.H * blocks):
        b, h, i0 = item // (T.H * blocks), item // blocks % T.H, item % blocks * T.block_i
        rows_of_one_head(T, scratch, 1, b, h, i0, min(T.block_i, T.I - i0))


@njit
def rows_of_one_head(T, scratch, strip, b, h, i0, rows):
    """All tiles of a block of rows; the last `strip` of them stay, as exp(s − m) with the maximum m of each row then.

    `scratch` (this thread's memory): T.strip tiles, the maxima of the rows at each, then m, l and t of each row.
    """
    size = T.itemsize
    maxima = scratch + size * T.strip * T.block_i * T.block_j
    buffers = maxima + size * T.strip * T.block_i
    m = reals(T, buffers, T.block_i)
    l = reals(T, buffers + size * T.block_i, T.block_i)
    t = reals(T, buffers + 2 * size * T.block_i, T.block_i)
    m[:] = NEGATIVE_INFINITY
    l[:] = f32(0)
    t[:] = f32(0)
    v = T.v + size * (b * T.v_b + h * T.V // T.H * T.v_h)
    out = (b * T.H + h) * T.I + i0  # where this block's answers stand
    y = T.y + size * out * T.E
    tiles = i64(0)
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            place = tiles % strip
            tile, m_here = tile_at(T, scratch, place), reals(T, maxima + size * place * T.block_i, T.block_i)
            tile_products(T, tile, b, h, i0, rows, j0, cols)
            for r in range(rows):
                a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                row = reals(T, tile + size * r * T.block_j, T.block_j)
                if a >= z:
                    zero_(row, 0, cols)
                    continue
                merge_row(
                    T, tile + size * (r * T.block_j + a), z - a, j0 + a, b, h, i0 + r, out + r, r, m, l, t, buffers
                )
                m_here[r] = m[r]
                zero_(row, 0, a)
                zero_(row, z, cols)
            if T.E > 0:
                beta = f32(0) if tiles == 0 else f32(1)
                product_nn(T, rows, T.E, cols, f32(1), tile, T.block_j, v + size * j0 * T.v_j, T.v_j, beta, y, T.E)
            tiles += 1
    finish_rows(T, b, h, out, rows, m, l, t, tiles == 0)


@njit
def tile_at(T, scratch, place):
    """Address of one tile of a strip."""
    return scratch + T.itemsize * place * T.block_i * T.block_j


@njit
def merge_row(T, at, n, key, b, h, i, out, r, m, l, t, buffers):
    """Merge the n scores at an address, of keys from `key` on, into the state of row r; they become exp(s − m)."""
    size = T.itemsize
    s = reals(T, at, n)
    position = i + T.offset
    if T.modifier_count > 0:
        no_slope = reals(T, at, 0)
        apply_modifiers_(
            s,
            no_slope,
            n,
            carray(modifiers_at(T.modifiers), T.modifier_count),
            T.modifier_count,
            b,
            h,
            i,
            position,
            key,
        )
    old, here = m[r], row_max(s, n)
    new = max(old, here)
    if T.argmax != 0 and here > old:
        carray(longs_at(T.argmax + 8 * out), 1)[0] = key + index_of(s, n, here)
    if T.topk > 0:
        best = reals(T, T.topk_scores + size * out * T.topk, T.topk)
        places = carray(longs_at(T.topk_indices + 8 * out * T.topk), T.topk)
        update_topk(best, places, T.topk, at, n, key, buffers + 3 * size * T.block_i)
    pivot = f32(0) if new == NEGATIVE_INFINITY else new
    if T.entropy != 0:
        here_l, here_t = exp_with_t_(s, n, pivot)
    else:
        here_l, here_t = exp_(s, n, pivot), f32(0)
    if new > old and old != NEGATIVE_INFINITY:
        shrink(T, out, r, old - new, l, t)
    l[r] += here_l
    t[r] += here_t
    m[r] = new
    if T.mean_distance != 0:
        reals(T, T.mean_distance + size * out, 1)[0] += expected_distance(s, n, position - key)
    if T.mass != 0:
        reals(T, T.mass + size * out, 1)[0] += dot(s, n, reals(T, T.keys + size * key, n))


@njit
def shrink(T, out, r, shift, l, t):
    """Rescale the sums of a row to a new maximum, `shift` = old − new."""
    size = T.itemsize
    alpha = exp(shift)
    t[r] = alpha * (t[r] + shift * l[r])
    l[r] *= alpha
    if T.E > 0:
        scale_(reals(T, T.y + size * out * T.E, T.E), T.E, alpha)
    if T.mean_distance != 0:
        reals(T, T.mean_distance + size * out, 1)[0] *= alpha
    if T.mass != 0:
        reals(T, T.mass + size * out, 1)[0] *= alpha


@njit
def merge_sink(sink, r, m, l, t):
    """Merge the sink, a key with its logit as score and value 0. Returns the factor by which values shrink."""
    new = max(m[r], sink)
    if new == NEGATIVE_INFINITY:
        return f32(1)
    ours = f32(0) if m[r] == NEGATIVE_INFINITY else m[r] - new
    theirs = f32(0) if sink == NEGATIVE_INFINITY else sink - new
    one = f32(0) if sink == NEGATIVE_INFINITY else exp(theirs)
    alpha = exp(ours)
    t[r] = alpha * (t[r] + ours * l[r]) + one * theirs
    l[r] = alpha * l[r] + one
    m[r] = new
    return alpha


@njit
def finish_rows(T, b, h, first, rows, m, l, t, untouched):
    """Epilogue: merge the sink, divide by the row sums, store the statistics."""
    size = T.itemsize
    for r in range(rows):
        out = first + r
        if T.max_score != 0:
            # max() drops nan, the sum keeps it.
            reals(T, T.max_score + size * out, 1)[0] = m[r] if l[r] == l[r] else l[r]
        alpha = f32(1)
        if T.sink != 0:
            alpha = merge_sink(reals(T, T.sink + size * (b * T.sink_b + h * T.sink_h), 1)[0], r, m, l, t)
        share = f32(0) if l[r] == f32(0) else alpha / l[r]
        log_l = np.log(l[r])
        norm = reals(T, T.norm + 2 * size * out, 2)
        norm[0], norm[1] = m[r], l[r]
        if T.lse != 0:  # in float64, as `lse_of`; of an empty row -inf + log 0
            reals(T, T.lse + size * out, 1)[0] = np.float64(m[r]) + np.log(np.float64(l[r]))
        if T.entropy != 0:
            entropy = f32(0) if l[r] == f32(0) else log_l - t[r] / l[r]
            reals(T, T.entropy + size * out, 1)[0] = f32(0) if entropy < f32(0) else entropy
        if T.mean_distance != 0:
            reals(T, T.mean_distance + size * out, 1)[0] *= share
        if T.mass != 0:
            reals(T, T.mass + size * out, 1)[0] *= share
        if T.E > 0:
            row = reals(T, T.y + size * out * T.E, T.E)
            if untouched:
                zero_(row, 0, T.E)
            else:
                scale_(row, T.E, share)
