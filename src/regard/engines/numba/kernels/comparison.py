"""Two matrices row by row: the measures of `core/rows/comparison.py` and their gradients, both tiles of scores at hand.

T is the record of the first matrix, p, and `T.other` the address of that of the second, q. `compare` carries the state
(m, l) of both rows and t = Σ exp(s − m) ((s − m) − (s' − m')), which merges as an entropy does: centred on both maxima,
large scores cancel nothing. The measures that need finished weights take both norms (`compare_finished`).

Every measure is a sum over keys of a function f(p, q), and a = p ∂f/∂p, b = q ∂f/∂q give everything: the sums of a and
b over a row are the two numbers by which softmax's gradient is centred, ds = g (a − p Σa) and ds' = g (b − q Σb), and
they add up to the measure, since f is homogeneous (Euler); kl and the cross-entropy are Σa alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .backward import has_cap
from .intrinsics import (
    LOWEST,
    NEGATIVE_INFINITY,
    exp,
    f32,
    floats_at,
    i64,
    log,
    product_nn,
    product_tn,
    use_wide_vectors,
)
from .params import JS, KL, OVERLAP, TOTAL_VARIATION, modifiers_at, params_at
from .row_ops import (
    apply_modifiers_,
    items,
    mul_,
    norm_of,
    own_scratch,
    row_max,
    tile_products,
    total,
    visible_keys,
)

INFINITY = f32(np.inf)


@njit
def compare(T):
    """kl and cross-entropy in one pass over the keys, with the norms of both matrices."""
    use_wide_vectors()
    S = carray(params_at(T.other), 1)[0]
    scratch = own_scratch(T)
    blocks = (T.I + T.block_i - 1) // T.block_i
    for item in items(T, T.B * T.heads * blocks):
        head, i0 = item // blocks, item % blocks * T.block_i
        merge_tiles(T, S, scratch, head // T.heads, head % T.heads, i0, min(T.block_i, T.I - i0))


@njit
def merge_tiles(T, S, scratch, b, h, i0, rows):
    """All tiles of a block of rows. `scratch`: a tile of scores of each matrix, then the state of each row."""
    tile = 4 * T.block_i * T.block_j
    state = carray(floats_at(scratch + 2 * tile + 16 * T.block_j), (T.block_i, 8))
    state[:] = f32(0)
    for r in range(rows):
        state[r, 0] = state[r, 2] = NEGATIVE_INFINITY
    first, end = range_of_both(T, S, b, i0, rows)
    for j0 in range(first, end, T.block_j):
        cols = min(T.block_j, end - j0)
        tile_products(T, scratch, b, h, i0, rows, j0, cols)
        tile_products(S, scratch + tile, b, h, i0, rows, j0, cols)
        for r in range(rows):
            at = scratch + 4 * r * T.block_j
            finish_scores(T, at, 0, cols, b, h, i0 + r, j0)
            finish_scores(S, at + tile, 0, cols, b, h, i0 + r, j0)
            merge_rows(T, carray(floats_at(at), cols), carray(floats_at(at + tile), cols), cols, state[r])
    out = (b * T.heads + h) * T.I + i0
    norm, other = carray(floats_at(T.norm + 8 * out), (rows, 2)), carray(floats_at(S.norm + 8 * out), (rows, 2))
    value = carray(floats_at(T.value + 4 * out), rows)
    for r in range(rows):
        m, l, m2, l2, t, forbidden = state[r, 0], state[r, 1], state[r, 2], state[r, 3], state[r, 4], state[r, 5]
        norm[r, 0], norm[r, 1], other[r, 0], other[r, 1] = m, l, m2, l2
        if forbidden > f32(0):
            value[r] = INFINITY
        elif l == f32(0):
            value[r] = f32(0)
        else:
            value[r] = t / l + np.log(l2) - (np.log(l) if T.measure == KL else f32(0))


@njit
def merge_rows(T, s, s2, n, state):
    """Merge n scores of a row of both matrices into its state m, l, m', l', t, and a count of forbidden keys."""
    old, old2 = state[0], state[2]
    m, m2 = max(old, row_max(s, n)), max(old2, row_max(s2, n))
    entropy = f32(1) if T.measure == KL else f32(0)
    shift = f32(0) if old == NEGATIVE_INFINITY else old - m
    shift2 = f32(0) if old2 == NEGATIVE_INFINITY else old2 - m2
    alpha = exp(shift)
    l, l2, t, forbidden = exp_both(
        s, s2, n, f32(0) if m == NEGATIVE_INFINITY else m, f32(0) if m2 == NEGATIVE_INFINITY else m2, entropy
    )
    state[4] = alpha * (state[4] + (entropy * shift - shift2) * state[1]) + t
    state[1] = alpha * state[1] + l
    state[3] = exp(shift2) * state[3] + l2
    state[0], state[2] = m, m2
    state[5] += forbidden


@njit(fastmath={"contract", "reassoc"})
def exp_both(s, s2, n, m, m2, entropy):
    """Sums of exp(s − m), of exp(s' − m'), of exp(s − m) (entropy (s − m) − (s' − m')); the keys that only s sees."""
    use_wide_vectors()
    l = l2 = t = forbidden = f32(0)
    for j in range(n):
        x, y = s[j] - m, s2[j] - m2
        p = exp(x)
        hidden = y == NEGATIVE_INFINITY
        l += p
        l2 += exp(y)
        ratio = entropy * x - y
        t += p * (f32(0) if x < LOWEST or hidden else ratio)  # 0 · inf would be nan
        forbidden += f32(1) if hidden and x > NEGATIVE_INFINITY else f32(0)
    return l, l2, t, forbidden


@njit
def compare_finished(T):
    """Σa and Σb of every row (`T.delta`, `S.delta`), of measures that need finished weights."""
    use_wide_vectors()
    S = carray(params_at(T.other), 1)[0]
    scratch = own_scratch(T)
    blocks = (T.I + T.block_i - 1) // T.block_i
    for item in items(T, T.B * T.heads * blocks):
        head, i0 = item // blocks, item % blocks * T.block_i
        add_terms(T, S, scratch, head // T.heads, head % T.heads, i0, min(T.block_i, T.I - i0))


@njit
def add_terms(T, S, scratch, b, h, i0, rows):
    tile = 4 * T.block_i * T.block_j
    out = (b * T.heads + h) * T.I + i0
    delta, delta2 = carray(floats_at(T.delta + 4 * out), rows), carray(floats_at(S.delta + 4 * out), rows)
    first, end = range_of_both(T, S, b, i0, rows)
    for j0 in range(first, end, T.block_j):
        cols = min(T.block_j, end - j0)
        tile_products(T, scratch, b, h, i0, rows, j0, cols)
        tile_products(S, scratch + tile, b, h, i0, rows, j0, cols)
        for r in range(rows):
            a, a2, _, _ = terms(T, S, scratch, b, h, i0, r, j0, cols)
            delta[r] += total(a, cols)
            delta2[r] += total(a2, cols)


@njit
def compare_backward(T):
    """Gradients of queries and keys, of one matrix or of both (those whose `dq` is not 0)."""
    use_wide_vectors()
    S = carray(params_at(T.other), 1)[0]
    scratch = own_scratch(T)
    per_chunk = ((T.I + T.block_i - 1) // T.block_i + T.chunks - 1) // T.chunks * T.block_i
    per_group = T.heads // T.groups
    for item in items(T, T.B * T.groups * T.chunks):
        chunk, b, group = item // (T.B * T.groups), item // T.groups % T.B, item % T.groups
        for h in range(group * per_group, (group + 1) * per_group):
            for i0 in range(chunk * per_chunk, min(T.I, (chunk + 1) * per_chunk), T.block_i):
                add_gradients(T, S, scratch, chunk, b, h, i0, min(T.block_i, T.I - i0))


@njit
def add_gradients(T, S, scratch, chunk, b, h, i0, rows):
    tile = 4 * T.block_i * T.block_j
    out = (b * T.heads + h) * T.I + i0
    g = carray(floats_at(T.grad + 4 * out), rows)
    delta, delta2 = carray(floats_at(T.delta + 4 * out), rows), carray(floats_at(S.delta + 4 * out), rows)
    first, end = range_of_both(T, S, b, i0, rows)
    for j0 in range(first, end, T.block_j):
        cols = min(T.block_j, end - j0)
        tile_products(T, scratch, b, h, i0, rows, j0, cols)
        tile_products(S, scratch + tile, b, h, i0, rows, j0, cols)
        for r in range(rows):
            a, a2, p, p2 = terms(T, S, scratch, b, h, i0, r, j0, cols)
            centre_(a, p, cols, g[r], delta[r])
            centre_(a2, p2, cols, g[r], delta2[r])
            if is_nan(g[r]) or is_nan(delta[r]) or is_nan(delta2[r]):
                clear_hidden_(T, a, scratch + 2 * tile, cols, b, h, i0 + r, j0)
                clear_hidden_(S, a2, scratch + 2 * tile, cols, b, h, i0 + r, j0)
            slopes = scratch + 2 * tile + 8 * T.block_j
            scale_by_slopes_(T, a, cols, slopes)
            scale_by_slopes_(S, a2, cols, slopes + 4 * T.block_j)
        add_to_inputs(T, T.heads, scratch, T.block_j, chunk, b, h, i0, rows, j0, cols)
        add_to_inputs(S, T.heads, scratch + tile, T.block_j, chunk, b, h, i0, rows, j0, cols)


@njit
def add_to_inputs(P, heads, grads, stride, chunk, b, h, i0, rows, j0, cols):
    """Add a tile's gradient of the scores to those of the queries and keys of one matrix."""
    if P.dq == 0:
        return
    own, key_head = h * P.H // heads, h * P.H // heads * P.G // P.H
    q = P.q + 4 * (b * P.q_b + own * P.q_h + i0 * P.q_i)
    k = P.k + 4 * (b * P.k_b + key_head * P.k_h + j0 * P.k_j)
    dq = P.dq + 4 * ((b * P.H + own) * P.I + i0) * P.D
    dk = P.dk + 4 * (((chunk * P.B + b) * P.G + key_head) * P.J + j0) * P.D
    product_nn(P, rows, P.D, cols, P.scale, grads, stride, k, P.k_j, f32(1), dq, P.D)
    product_tn(P, cols, P.D, rows, P.scale, grads, stride, q, P.q_i, f32(1), dk, P.D)


# Tiles of scores, and what the measures make of a row of them.


@njit
def range_of_both(T, S, b, i0, rows):
    """The range of keys that holds all that a block of rows sees in either matrix."""
    first, end = i64(2**62), i64(0)
    for n in range(T.n_intervals):
        _, _, a, z = visible_keys(T, b, n, i0, rows)
        first, end = min(first, a), max(end, z)
    for n in range(S.n_intervals):
        _, _, a, z = visible_keys(S, b, n, i0, rows)
        first, end = min(first, a), max(end, z)
    return first, end


@njit
def finish_scores(P, at, slopes, cols, b, h, i, j0):
    """Products of a row become scores: modifiers, and −inf outside of the row's intervals, which come in order."""
    s = carray(floats_at(at), cols)
    if P.modifier_count > 0:
        modifiers = carray(modifiers_at(P.modifiers), P.modifier_count)
        slope = carray(floats_at(slopes), cols if slopes != 0 and has_cap(modifiers, P.modifier_count) else 0)
        own = h if P.H > 1 else 0
        apply_modifiers_(s, slope, cols, modifiers, P.modifier_count, b, own, i, i + P.offset, j0)
    shown = i64(0)
    for n in range(P.n_intervals):
        lo, hi, _, _ = visible_keys(P, b, n, i, 1)
        a, z = max(lo[i] - j0, shown), min(hi[i] - j0, cols)
        if a < z:
            s[shown:a] = NEGATIVE_INFINITY
            shown = z
    s[shown:cols] = NEGATIVE_INFINITY


@njit
def is_nan(x):
    return x != x


@njit
def clear_hidden_(P, grads, at, cols, b, h, i, j0):
    """Zeros at the hidden keys of a row that is nan: 0 · nan would reach them. Its scores are computed again."""
    tile_products(P, at, b, h, i, 1, j0, cols)
    finish_scores(P, at, 0, cols, b, h, i, j0)
    s = carray(floats_at(at), cols)
    for j in range(cols):
        if s[j] == NEGATIVE_INFINITY:
            grads[j] = f32(0)


@njit
def scale_by_slopes_(P, grads, n, slopes):
    if P.modifier_count > 0 and has_cap(carray(modifiers_at(P.modifiers), P.modifier_count), P.modifier_count):
        mul_(grads, n, carray(floats_at(slopes), n))


@njit
def terms(T, S, scratch, b, h, i0, r, j0, cols):
    """a and b of every key of a row, in the place of its scores, and its weights p and q."""
    tile = 4 * T.block_i * T.block_j
    at, buffers = scratch + 4 * r * T.block_j, scratch + 2 * tile
    finish_scores(T, at, buffers + 8 * T.block_j, cols, b, h, i0 + r, j0)
    finish_scores(S, at + tile, buffers + 12 * T.block_j, cols, b, h, i0 + r, j0)
    s, s2 = carray(floats_at(at), cols), carray(floats_at(at + tile), cols)
    p, p2 = carray(floats_at(buffers), cols), carray(floats_at(buffers + 4 * T.block_j), cols)
    row = (b * T.heads + h) * T.I + i0 + r
    m, share = norm_of(T, row)
    m2, share2 = norm_of(S, row)
    if T.measure == JS:
        weights_of_both_(s, s2, p, p2, cols, m, m2, share, share2)
        js_terms_(s, s2, p, p2, cols)
    elif T.measure == OVERLAP:
        weights_of_both_(s, s2, p, p2, cols, m, m2, share, share2)
        overlap_terms_(s, s2, p, p2, cols)
    elif T.measure == TOTAL_VARIATION:
        weights_of_both_(s, s2, p, p2, cols, m, m2, share, share2)
        variation_terms_(s, s2, p, p2, cols)
    else:
        entropy = f32(1) if T.measure == KL else f32(0)
        log_share = (np.log(share) if T.measure == KL else f32(0)) - np.log(share2)
        kl_terms_(s, s2, p, p2, cols, m, m2, share, share2, log_share, entropy)
    return s, s2, p, p2


@njit(fastmath={"contract"})
def kl_terms_(s, s2, p, p2, n, m, m2, share, share2, log_share, entropy):
    """a = p (entropy log p − log q), b = −p."""
    use_wide_vectors()
    for j in range(n):
        x, y = s[j] - m, s2[j] - m2
        w = exp(x) * share
        ratio = entropy * x - y + log_share
        p[j] = w
        p2[j] = exp(y) * share2
        s[j] = w * (f32(0) if x < LOWEST or y == NEGATIVE_INFINITY else ratio)
        s2[j] = -w


@njit(fastmath={"contract"})
def weights_of_both_(s, s2, p, p2, n, m, m2, share, share2):
    use_wide_vectors()
    for j in range(n):
        p[j] = exp(s[j] - m) * share
        p2[j] = exp(s2[j] - m2) * share2


@njit(fastmath={"contract"})
def js_terms_(a, b, p, q, n):
    """a = p/2 log(2p / (p + q)), b = q/2 log(2q / (p + q))."""
    use_wide_vectors()
    half, tiny = f32(0.5), f32(1e-37)
    for j in range(n):
        middle = f32(2) / max(p[j] + q[j], tiny)
        a[j] = half * p[j] * log(max(p[j] * middle, tiny))
        b[j] = half * q[j] * log(max(q[j] * middle, tiny))


@njit
def overlap_terms_(a, b, p, q, n):
    """a = p where p is the smaller, b = q where q is; half of each where they are equal."""
    use_wide_vectors()
    for j in range(n):
        share = f32(0.5) if p[j] == q[j] else f32(1) if p[j] < q[j] else f32(0)
        a[j] = p[j] * share
        b[j] = q[j] * (f32(1) - share)


@njit
def variation_terms_(a, b, p, q, n):
    """a = p/2 sign(p − q), b = −q/2 sign(p − q)."""
    use_wide_vectors()
    for j in range(n):
        sign = f32(0.5) if p[j] > q[j] else f32(-0.5) if p[j] < q[j] else f32(0)
        a[j] = p[j] * sign
        b[j] = -q[j] * sign


@njit(fastmath={"contract"})
def centre_(a, p, n, g, delta):
    """a ← g (a − p Σa): the gradient of a row of scores."""
    use_wide_vectors()
    for j in range(n):
        a[j] = g * (a[j] - p[j] * delta)
