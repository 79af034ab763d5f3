"""Heads taken together: entropy of their weighted sum, and kl or cross-entropy of another matrix from it.

T is the record of the heads, whose norms are known: the weights of all heads of a group are added up tile by tile. Of
the other matrix (`T.other`), whose scores are products or a sum of ReLUs, the state (m', l', Σ p (log p − (s' − m')),
Σ p) of every row merges as in `comparison`. Only the other matrix gets gradients: ds' = g (q − p), p divided by its
sum or not.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .comparison import add_to_inputs, finish_scores
from .intrinsics import (
    NEGATIVE_INFINITY,
    exp,
    f32,
    floats_at,
    log,
    product_nn,
    product_nt,
    product_tn,
    use_wide_vectors,
)
from .params import CROSS_ENTROPY, ENTROPY, modifiers_at, params_at
from .row_ops import (
    apply_modifiers_,
    items,
    norm_of,
    normalize_and_accumulate_,
    own_scratch,
    row_max,
    tile_products,
    visible_keys,
    zero_,
)

TINY = f32(1e-37)


@njit
def head_rows(T):
    """The measure of every row of a group of heads, Σ p, and the norm of the other matrix."""
    use_wide_vectors()
    scratch = own_scratch(T)
    blocks = (T.I + T.block_i - 1) // T.block_i
    for item in items(T, T.B * T.heads * blocks):
        head, block = item % (T.B * T.heads), blocks - 1 - item // (T.B * T.heads)  # long rows first
        i0 = block * T.block_i
        merge_tiles(T, scratch, head // T.heads, head % T.heads, i0, min(T.block_i, T.I - i0))


@njit
def merge_tiles(T, scratch, b, o, i0, rows):
    """All tiles of a block of rows. `scratch`: tiles of the sum, of one head and of the other matrix; state of rows."""
    S = carray(params_at(T.other), 1)[0]
    tile = 4 * T.block_i * T.block_j
    state = carray(floats_at(scratch + 3 * tile), (T.block_i, 4))
    state[:] = f32(0)
    state[:, 0] = NEGATIVE_INFINITY
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            add_heads(T, scratch, b, o, i0, rows, j0, cols, lo, hi)
            if T.measure != ENTROPY:
                other_scores(S, scratch + 2 * tile, scratch + tile, b, o, i0, rows, j0, cols)
            for r in range(rows):
                at = scratch + 4 * r * T.block_j
                a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                if a >= z:
                    continue
                p = carray(floats_at(at + 4 * a), z - a)
                if T.measure == ENTROPY:
                    state[r, 2] -= sum_of_logs(p, z - a)
                else:
                    merge_row(T, p, carray(floats_at(at + 2 * tile + 4 * a), z - a), z - a, state[r])
    finish_rows(T, S, (b * T.heads + o) * T.I + i0, rows, state)


@njit
def add_heads(T, scratch, b, o, i0, rows, j0, cols, lo, hi):
    """The weighted sum of the weights of a group's heads, in the first tile of the scratch memory."""
    tile = 4 * T.block_i * T.block_j
    for r in range(rows):
        zero_(carray(floats_at(scratch + 4 * r * T.block_j), T.block_j), 0, cols)
    per_group = T.H // T.heads
    for h in range(o * per_group, (o + 1) * per_group):
        factor = carray(floats_at(T.shares + 4 * h), 1)[0]
        if factor == f32(0):
            continue
        tile_products(T, scratch + tile, b, h, i0, rows, j0, cols)
        for r in range(rows):
            a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
            if a >= z:
                continue
            at = scratch + 4 * (r * T.block_j + a)
            s = carray(floats_at(at + tile), z - a)
            if T.modifier_count > 0:
                modifiers = carray(modifiers_at(T.modifiers), T.modifier_count)
                i = i0 + r
                apply_modifiers_(s, s[:0], z - a, modifiers, T.modifier_count, b, h, i, i + T.offset, j0 + a)
            m, share = norm_of(T, (b * T.H + h) * T.I + i0 + r)
            normalize_and_accumulate_(s, z - a, m, share * factor, carray(floats_at(at), z - a))
    total = carray(floats_at(T.shares + 4 * (T.H + o)), 1)[0]
    if total != f32(1):
        for r in range(rows):
            divide_(carray(floats_at(scratch + 4 * r * T.block_j), cols), cols, total)


@njit(fastmath={"contract"})
def divide_(x, n, total):
    """A mean divides once: 14 times 1/14 is more than 1."""
    use_wide_vectors()
    for j in range(n):
        x[j] /= total


@njit
def other_scores(S, target, buffer, b, o, i0, rows, j0, cols):
    """A tile of scores of the other matrix, −inf where hidden."""
    if S.index_heads == 0:
        tile_products(S, target, b, o, i0, rows, j0, cols)
    else:
        relu_sums(S, target, buffer, b, i0, rows, j0, cols)
    for r in range(rows):
        finish_scores(S, target + 4 * r * S.block_j, 0, cols, b, o, i0 + r, j0)


@njit
def relu_sums(S, target, buffer, b, i0, rows, j0, cols):
    """Σ_n w_n ReLU(q_n · k); a packed query is all q_n, then all w_n."""
    q = S.q + 4 * (b * S.q_b + i0 * S.q_i)
    k = S.k + 4 * (b * S.k_b + j0 * S.k_j)
    for r in range(rows):
        zero_(carray(floats_at(target + 4 * r * S.block_j), S.block_j), 0, cols)
    for n in range(S.index_heads):
        at = q + 4 * n * S.D
        product_nt(S, rows, cols, S.D, f32(1), at, S.q_i, k, S.k_j, f32(0), buffer, S.block_j)
        for r in range(rows):
            w = carray(floats_at(q + 4 * (r * S.q_i + S.index_heads * S.D + n)), 1)[0]
            row = 4 * r * S.block_j
            add_relu_(carray(floats_at(target + row), cols), carray(floats_at(buffer + row), cols), cols, w)


@njit(fastmath={"contract"})
def add_relu_(target, x, n, w):
    use_wide_vectors()
    for j in range(n):
        target[j] += w * max(x[j], f32(0))


@njit(fastmath={"contract", "reassoc"})
def sum_of_logs(p, n):
    """Σ p log p; 0 where p is."""
    use_wide_vectors()
    total = f32(0)
    for j in range(n):
        total += p[j] * log(max(p[j], TINY))
    return total


@njit
def merge_row(T, p, s2, n, state):
    """Merge n keys of a row into its state: m', l', Σ p (log p − (s' − m')), Σ p."""
    old = state[0]
    new = max(old, row_max(s2, n))
    shift = f32(0) if old == NEGATIVE_INFINITY else old - new
    entropy = f32(0) if T.measure == CROSS_ENTROPY else f32(1)
    l, t, total = sums_of_row(p, s2, n, f32(0) if new == NEGATIVE_INFINITY else new, entropy)
    state[2] += t - shift * state[3]
    state[1] = exp(shift) * state[1] + l
    state[3] += total
    state[0] = new


@njit(fastmath={"contract", "reassoc"})
def sums_of_row(p, s2, n, m, entropy):
    use_wide_vectors()
    l = t = total = f32(0)
    for j in range(n):
        y = s2[j] - m
        l += exp(y)
        total += p[j]
        t += p[j] * (entropy * log(max(p[j], TINY)) - y)
    return l, t, total


@njit
def finish_rows(T, S, out, rows, state):
    value = carray(floats_at(T.value + 4 * out), rows)
    if T.measure == ENTROPY:
        for r in range(rows):
            value[r] = state[r, 2]
        return
    norm, sums = carray(floats_at(S.norm + 8 * out), (rows, 2)), carray(floats_at(T.delta + 4 * out), rows)
    for r in range(rows):
        m, l, t, total = state[r, 0], state[r, 1], state[r, 2], state[r, 3]
        norm[r, 0], norm[r, 1], sums[r] = m, l, total
        if total == f32(0):
            value[r] = f32(0)
        elif T.divided == 0:
            value[r] = t + total * np.log(l)
        else:
            value[r] = t / total + np.log(l) - (f32(0) if T.measure == CROSS_ENTROPY else np.log(total))


@njit
def head_rows_backward(T):
    """Gradients of the other matrix. Chunks of rows have sums of their own for the keys; the longest come first."""
    use_wide_vectors()
    scratch = own_scratch(T)
    per_chunk = ((T.I + T.block_i - 1) // T.block_i + T.chunks - 1) // T.chunks * T.block_i
    for item in items(T, T.B * T.groups * T.chunks):
        chunk, b, group = T.chunks - 1 - item // (T.B * T.groups), item // T.groups % T.B, item % T.groups
        per_group = T.heads // T.groups
        for o in range(group * per_group, (group + 1) * per_group):
            for i0 in range(chunk * per_chunk, min(T.I, (chunk + 1) * per_chunk), T.block_i):
                add_gradients(T, scratch, chunk, b, o, i0, min(T.block_i, T.I - i0))


@njit
def add_gradients(T, scratch, chunk, b, o, i0, rows):
    S = carray(params_at(T.other), 1)[0]
    tile = 4 * T.block_i * T.block_j
    out = (b * T.heads + o) * T.I + i0
    g, sums = carray(floats_at(T.grad + 4 * out), rows), carray(floats_at(T.delta + 4 * out), rows)
    for interval in range(T.n_intervals):
        lo, hi, first, end = visible_keys(T, b, interval, i0, rows)
        for j0 in range(first, end, T.block_j):
            cols = min(T.block_j, end - j0)
            add_heads(T, scratch, b, o, i0, rows, j0, cols, lo, hi)
            other_scores(S, scratch + 2 * tile, scratch + tile, b, o, i0, rows, j0, cols)
            for r in range(rows):
                at = scratch + 4 * r * T.block_j
                m, share = norm_of(S, out + r)
                divisor = sums[r] if T.divided != 0 and sums[r] != f32(0) else f32(1)
                # Tiles of two intervals may overlap: each counts its own visible cells.
                a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                a, n = (a, z - a) if a < z else (0, 0)
                p, s = carray(floats_at(at + 4 * a), n), carray(floats_at(at + 2 * tile + 4 * a), n)
                row_gradient_(s, p, n, m, share * sums[r] / divisor, g[r], f32(1) / divisor)
                all_cells = carray(floats_at(at + 2 * tile), cols)
                zero_(all_cells, 0, a)
                zero_(all_cells, a + n, cols)
            if S.index_heads == 0:
                add_to_inputs(S, T.heads, scratch + 2 * tile, T.block_j, chunk, b, o, i0, rows, j0, cols)
            else:
                add_to_relu_sum(S, scratch + 2 * tile, scratch + tile, chunk, b, i0, rows, j0, cols)


@njit(fastmath={"contract"})
def row_gradient_(s, p, n, m, share, g, factor):
    """s ← g (q Σp − p), both divided by Σp or not; a hidden score weighs 0."""
    use_wide_vectors()
    for j in range(n):
        s[j] = g * (exp(s[j] - m) * share - p[j] * factor)


@njit
def add_to_relu_sum(S, grads, buffer, chunk, b, i0, rows, j0, cols):
    """Add a tile's gradient of the scores to those of packed queries and of keys."""
    width = S.index_heads * (S.D + 1)
    q = S.q + 4 * (b * S.q_b + i0 * S.q_i)
    k = S.k + 4 * (b * S.k_b + j0 * S.k_j)
    dq = S.dq + 4 * (b * S.I + i0) * width
    dk = S.dk + 4 * ((chunk * S.B + b) * S.J + j0) * S.D
    for n in range(S.index_heads):
        at = q + 4 * n * S.D
        product_nt(S, rows, cols, S.D, f32(1), at, S.q_i, k, S.k_j, f32(0), buffer, S.block_j)
        for r in range(rows):
            w_at = S.index_heads * S.D + n
            w = carray(floats_at(q + 4 * (r * S.q_i + w_at)), 1)[0]
            row = 4 * r * S.block_j
            x, d = carray(floats_at(buffer + row), cols), carray(floats_at(grads + row), cols)
            carray(floats_at(dq + 4 * (r * width + w_at)), 1)[0] += relu_gradient_(x, d, cols, w)
        product_nn(S, rows, S.D, cols, f32(1), buffer, S.block_j, k, S.k_j, f32(1), dq + 4 * n * S.D, width)
        product_tn(S, cols, S.D, rows, f32(1), buffer, S.block_j, at, S.q_i, f32(1), dk, S.D)


@njit(fastmath={"contract", "reassoc"})
def relu_gradient_(x, d, n, w):
    """x ← w d where x > 0, else 0; returns Σ d ReLU(x), the gradient of w."""
    use_wide_vectors()
    total = f32(0)
    for j in range(n):
        total += d[j] * max(x[j], f32(0))
        x[j] = w * d[j] if x[j] > f32(0) else f32(0)
    return total
