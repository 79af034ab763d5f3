"""Operations on the n visible scores of a row, one pass each; a trailing underscore marks those that work in place.

Loops start at 0: LLVM does not vectorise a loop whose index might be negative.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import (
    LANES,
    NEGATIVE_INFINITY,
    as_bits,
    as_float,
    atomic_next,
    bytes_at,
    exp,
    f32,
    ge_bitmask,
    i32,
    i64,
    longs_at,
    lowest,
    lowest_bit,
    max_lanes,
    nth_lane,
    ordered,
    product_nt,
    reals,
    reals_at,
    store_lanes,
    tanh,
    use_wide_vectors,
)
from .params import ALIBI, BIAS, BIAS_PER_ROW, DISTANCE, SOFTCAP


@njit
def row_max(s, n):
    use_wide_vectors()
    top = ordered(as_bits(s.dtype.type(NEGATIVE_INFINITY)))
    for j in range(n):
        top = max(top, ordered(as_bits(s[j])))
    return as_float(ordered(top))


@njit(fastmath={"contract", "reassoc"})
def exp_(s, n, m):
    """s ← exp(s − m); returns their sum l."""
    use_wide_vectors()
    l = f32(0)
    for j in range(n):
        p = exp(s[j] - m)
        s[j] = p
        l += p
    return l


@njit(fastmath={"contract", "reassoc"})
def exp_with_t_(s, n, m):
    """The same, with t = Σ exp(s − m)(s − m) for the entropy."""
    use_wide_vectors()
    l = f32(0)
    t = f32(0)
    low = lowest(m)
    for j in range(n):
        x = s[j] - m
        p = exp(x)
        s[j] = p
        l += p
        t += p * (low if x < low else x)  # 0 · −inf would be nan
    return l, t


@njit(fastmath={"contract", "reassoc"})
def expected_distance(p, n, first_distance):
    """Σ p · |distance|; `first_distance` is the query's position minus that of the tile's first key."""
    use_wide_vectors()
    total = f32(0)
    for j in range(n):
        total += p[j] * p.dtype.type(abs(i32(first_distance) - i32(j)))
    return total


@njit(fastmath={"contract", "reassoc"})
def dot(p, n, x):
    use_wide_vectors()
    total = f32(0)
    for j in range(n):
        total += p[j] * x[j]
    return total


@njit
def scale_(x, n, factor):
    use_wide_vectors()
    for e in range(n):
        x[e] *= factor


@njit
def zero_(s, a, z):
    s[a:z] = f32(0)


@njit
def index_of(s, n, value):
    for j in range(n):
        if s[j] == value:
            return j
    return -1


@njit
def update_topk(score, index, n, s, count, first, lanes):
    """Merge scores into the sorted n largest of a row; ties keep the first. `lanes`: memory for 16 numbers."""
    kind, size = score.dtype.type(0), score.itemsize
    threshold = score.dtype.type(NEGATIVE_INFINITY)
    if score[n - 1] == NEGATIVE_INFINITY and n <= LANES and count >= 4 * LANES:
        # First tile of a row. At least n scores reach the nth largest of the maxima of 16 interleaved lanes: as a first
        # threshold it avoids most insertions.
        store_lanes(kind, lanes, s)
        for start in range(LANES, count - LANES + 1, LANES):
            max_lanes(kind, lanes, s + size * start)
        threshold = nth_lane(kind, lanes, n)
    full_lanes = count // LANES * LANES
    for start in range(0, full_lanes, LANES):
        hits = ge_bitmask(s + size * start, max(threshold, score[n - 1]))
        while hits != 0:
            lane = lowest_bit(hits)
            hits &= hits - 1
            insert(score, index, n, carray(reals_at(kind, s + size * (start + lane)), 1)[0], first + start + lane)
    for j in range(full_lanes, count):
        insert(score, index, n, carray(reals_at(kind, s + size * j), 1)[0], first + j)


@njit
def insert(score, index, n, x, key):
    if not x > score[n - 1]:
        return
    rank = n - 1
    while rank > 0 and x > score[rank - 1]:
        score[rank] = score[rank - 1]
        index[rank] = index[rank - 1]
        rank -= 1
    score[rank] = x
    index[rank] = key


@njit
def add_scalar_(s, n, x):
    use_wide_vectors()
    for j in range(n):
        s[j] += x


@njit
def add_vector_(s, n, x):
    use_wide_vectors()
    for j in range(n):
        s[j] += x[j]


@njit
def add_strided_(s, n, x, stride):
    for j in range(n):
        s[j] += x[j * stride]


@njit(fastmath={"contract"})
def add_alibi_(s, n, slope, first_distance):
    use_wide_vectors()
    for j in range(n):
        s[j] -= slope * s.dtype.type(abs(i32(first_distance) - i32(j)))


@njit(fastmath={"contract"})
def softcap_(s, n, cap):
    use_wide_vectors()
    inverse = f32(1) / cap
    for j in range(n):
        s[j] = cap * tanh(s[j] * inverse)


@njit(fastmath={"contract"})
def softcap_with_slopes_(s, slope, n, cap):
    """The same, with the derivative 1 − tanh² of every score in `slope`."""
    use_wide_vectors()
    inverse = f32(1) / cap
    for j in range(n):
        t = tanh(s[j] * inverse)
        s[j] = cap * t
        slope[j] = f32(1) - t * t


@njit
def hide_(s, n, visible):
    use_wide_vectors()
    for j in range(n):
        s[j] = s[j] if visible[j] != 0 else NEGATIVE_INFINITY


@njit
def hide_strided_(s, n, visible, stride):
    for j in range(n):
        if visible[j * stride] == 0:
            s[j] = NEGATIVE_INFINITY


@njit(fastmath={"contract", "reassoc"})
def squared_distance(q, k, size):
    use_wide_vectors()
    total = q.dtype.type(0)
    for d in range(size):
        total += (q[d] - k[d]) * (q[d] - k[d])
    return total


@njit(fastmath={"contract"})
def distances_(s, n, q, keys, stride, size, scale):
    """Scores −scale·|q − k|² of short vectors, all keys at once; `stride` is that of the components of keys."""
    use_wide_vectors()
    for d in range(size):
        k, x = key_at(s, keys, d * stride, n), q[d]
        for j in range(n):
            s[j] = (x - k[j]) * (x - k[j]) + (s[j] if d > 0 else f32(0))
    for j in range(n):
        s[j] = f32(0) - scale * s[j]  # not −0


@njit
def correct_distances_(s, n, q, keys, stride, size, scale, near):
    """Scores −scale·|q − k|² that were made of products: where these cancel, as `similarity.Distance` says."""
    squared = scale * dot(q, size, q)
    limit = -near * squared
    if not squared > f32(0):
        return
    full_lanes = n // LANES * LANES
    for start in range(0, full_lanes, LANES):
        hits = ge_bitmask(s.ctypes.data + s.itemsize * start, limit)
        while hits != 0:
            j = start + lowest_bit(hits)
            hits &= hits - 1
            s[j] = f32(0) - scale * squared_distance(q, key_at(s, keys, j * stride, size), size)  # not −0
    for j in range(full_lanes, n):
        if s[j] >= limit:
            s[j] = f32(0) - scale * squared_distance(q, key_at(s, keys, j * stride, size), size)  # not −0


@njit
def key_at(s, keys, offset, size):
    """`size` numbers like those of s, at an offset from an address."""
    return carray(reals_at(s.dtype.type(0), keys + s.itemsize * offset), size)


@njit
def apply_modifiers_(s, slope, n, modifiers, count, b, h, i, position, first):
    """Apply all modifiers in order to the scores of a row from key `first` on; slopes too unless `slope` is empty."""
    real, size = s.dtype.type(0), s.itemsize
    for number in range(count):
        modifier = modifiers[number]
        kind = modifier.kind
        at = modifier.at + size * (b * modifier.b + h * modifier.h + i * modifier.i)
        if kind == BIAS_PER_ROW:
            add_scalar_(s, n, carray(reals_at(real, at), 1)[0])
        elif kind == BIAS:
            if modifier.j == 1:
                add_vector_(s, n, carray(reals_at(real, at + size * first), n))
            else:
                add_strided_(s, n, carray(reals_at(real, at + size * first * modifier.j), n * modifier.j), modifier.j)
        elif kind == ALIBI:
            add_alibi_(s, n, carray(reals_at(real, at), 1)[0], position - first)
        elif kind == SOFTCAP:
            if len(slope) > 0:
                softcap_with_slopes_(s, slope, n, s.dtype.type(modifier.cap))
            else:
                softcap_(s, n, s.dtype.type(modifier.cap))
        elif kind == DISTANCE:
            keys = modifier.k + size * (b * modifier.k_b + h // modifier.group * modifier.k_h + first * modifier.j)
            q = carray(reals_at(real, at), modifier.size)
            scale, near = s.dtype.type(modifier.cap), s.dtype.type(modifier.near)
            if modifier.k_d > 0:
                distances_(s, n, q, keys, modifier.k_d, modifier.size, scale)
            else:
                correct_distances_(s, n, q, keys, modifier.j, modifier.size, scale, near)
        else:
            cells = modifier.at + b * modifier.b + h * modifier.h + i * modifier.i + first * modifier.j
            if modifier.j == 1:
                hide_(s, n, carray(bytes_at(cells), n))
            else:
                hide_strided_(s, n, carray(bytes_at(cells), n * max(modifier.j, 1)), modifier.j)


@njit
def own_scratch(T):
    """This thread's part of the scratch memory."""
    return T.scratch + atomic_next(T.counter + 8) * T.scratch_size


@njit
def items(T, count):
    """Items of work, of `count`, that no other thread has taken: one at a time, until none is left."""
    item = atomic_next(T.counter)
    while item < count:
        yield item
        item = atomic_next(T.counter)


@njit
def rows_of_item(T, row_from, row_to, item):
    """The head of an item of work, and its chunk of the rows from `row_from` to `row_to`, in whole blocks."""
    blocks = (row_to - row_from + T.block_i - 1) // T.block_i
    per_chunk = (blocks + T.chunks - 1) // T.chunks * T.block_i
    first = row_from + item // (T.B * T.H) * per_chunk
    return item % (T.B * T.H), first, min(row_to, first + per_chunk)


@njit
def visible_keys(T, b, interval, i0, rows):
    """Ends lo and hi of one interval of every row, and the range of keys that some row of a block sees in it."""
    offset = 8 * (b * T.intervals_b + interval * T.I)
    lo, hi = carray(longs_at(T.lo + offset), T.I), carray(longs_at(T.hi + offset), T.I)
    first, end = i64(2**62), i64(0)
    for r in range(i0, i0 + rows):
        if lo[r] < hi[r]:
            first, end = min(first, lo[r]), max(end, hi[r])
    return lo, hi, first, end


@njit
def tile_products(T, target, b, h, i0, rows, j0, cols):
    """The scaled products of a tile of queries and keys; a matrix of one head stands for all heads of another."""
    size, own = T.itemsize, h if T.H > 1 else 0
    q = T.q + size * (b * T.q_b + own * T.q_h + i0 * T.q_i)
    k = T.k + size * (b * T.k_b + own * T.G // T.H * T.k_h + j0 * T.k_j)
    product_nt(T, rows, cols, T.D, T.scale, q, T.q_i, k, T.k_j, f32(0), target, T.block_j)


@njit
def norm_of(T, row):
    """Maximum m and 1 / l of a row; both 0 for a row with no key."""
    norm = reals(T, T.norm + 2 * T.itemsize * row, 2)
    if norm[1] == f32(0):
        return f32(0), f32(0)
    return norm[0], f32(1) / norm[1]


@njit(fastmath={"contract"})
def weight(s, m, share):
    """exp(s − m) / l; 0 where hidden, also in a row that is nan."""
    w = exp(s - m) * share
    return f32(0) if s == NEGATIVE_INFINITY else w


@njit(fastmath={"contract"})
def weighted(w, x):
    """w x; 0 where w is 0, also where x is nan."""
    return w if w == f32(0) else w * x


@njit(fastmath={"contract"})
def normalize_and_accumulate_(s, n, m, share, column):
    """s ← exp(s − m) / l, and add it to the sums of the columns."""
    use_wide_vectors()
    for j in range(n):
        w = weight(s[j], m, share)
        s[j] = w
        column[j] += w


@njit
def rescale_and_accumulate_(p, n, factor, column):
    """p ← p · factor, and add it to the sums of the columns."""
    use_wide_vectors()
    for j in range(n):
        w = p[j] * factor
        p[j] = w
        column[j] += w


@njit(fastmath={"contract"})
def normalize_(s, n, m, share):
    use_wide_vectors()
    for j in range(n):
        s[j] = weight(s[j], m, share)


@njit(fastmath={"contract"})
def normalize_with_logs_(s, n, m, share, log):
    use_wide_vectors()
    log_share, low = np.log(share), lowest(m)
    for j in range(n):
        x = s[j] - m
        log_w = x + log_share
        log[j] = low if log_w < low else log_w
        s[j] = weight(s[j], m, share)


@njit(fastmath={"contract"})
def score_grad_(d, w, n, c):
    """d ← w (d − c): the gradient of a row of scores."""
    use_wide_vectors()
    for j in range(n):
        d[j] = weighted(w[j], d[j] - c)


@njit(fastmath={"contract"})
def score_grad_with_entropy_(d, w, n, c, d_entropy, log):
    use_wide_vectors()
    for j in range(n):
        d[j] = weighted(w[j], d[j] - c - d_entropy * log[j])


@njit(fastmath={"contract"})
def add_distance_(d, n, d_distance, first_distance):
    use_wide_vectors()
    for j in range(n):
        d[j] += d_distance * d.dtype.type(abs(i32(first_distance) - i32(j)))


@njit
def mul_(d, n, x):
    use_wide_vectors()
    for j in range(n):
        d[j] *= x[j]


@njit(fastmath={"contract", "reassoc"})
def total(d, n):
    use_wide_vectors()
    x = f32(0)
    for j in range(n):
        x += d[j]
    return x
