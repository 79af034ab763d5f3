"""One pass each over the n visible scores of a row.

Loops start at 0: an index that might be negative is no vector. Imports `words` and `task`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import (
    LANES,
    LOWEST,
    NEGATIVE_INFINITY,
    as_bits,
    as_float,
    bytes_at,
    exponential,
    f32,
    floats_at,
    i32,
    i64,
    lowest_bit,
    not_below,
    nth_lane,
    ordered,
    raise_lanes,
    store_lanes,
    tangent,
    use_wide_vectors,
)
from .params import ADDED, ADDED_VECTOR, ALIBI, SOFTCAP


@njit
def largest(s, n):
    use_wide_vectors()
    top = ordered(as_bits(NEGATIVE_INFINITY))
    for j in range(n):
        top = max(top, ordered(as_bits(s[j])))
    return as_float(ordered(top))


@njit(fastmath={"contract", "reassoc"})
def exponentials(s, n, m):
    """s ← exp(s − m); returns their sum l."""
    use_wide_vectors()
    l = f32(0)
    for j in range(n):
        p = exponential(s[j] - m)
        s[j] = p
        l += p
    return l


@njit(fastmath={"contract", "reassoc"})
def exponentials_and_t(s, n, m):
    """The same, with t = Σ exp(s − m)(s − m) for the entropy."""
    use_wide_vectors()
    l = f32(0)
    t = f32(0)
    for j in range(n):
        x = s[j] - m
        p = exponential(x)
        s[j] = p
        l += p
        t += p * (LOWEST if x < LOWEST else x)  # 0 · −inf would be nan
    return l, t


@njit(fastmath={"contract", "reassoc"})
def far_sum(p, n, behind):
    """Σ p · |distance|; `behind` is the query's position less that of the tile's first key."""
    use_wide_vectors()
    total = f32(0)
    for j in range(n):
        total += p[j] * f32(abs(i32(behind) - i32(j)))
    return total


@njit(fastmath={"contract", "reassoc"})
def dot(p, n, x):
    use_wide_vectors()
    total = f32(0)
    for j in range(n):
        total += p[j] * x[j]
    return total


@njit
def scaled(x, n, factor):
    use_wide_vectors()
    for e in range(n):
        x[e] *= factor


@njit
def zeroed(s, a, z):
    s[a:z] = f32(0)


@njit
def first_place(s, n, value):
    for j in range(n):
        if s[j] == value:
            return j
    return -1


@njit
def keep_largest(score, index, n, s, count, first, lanes):
    """Keep the n largest of a row in a sorted list; of equal ones the first stays. `lanes` is room for 16 numbers."""
    bar = NEGATIVE_INFINITY
    if score[n - 1] == NEGATIVE_INFINITY and n <= LANES and count >= 4 * LANES:
        # Nothing to beat yet. At least n scores reach the nth largest maximum of 16 interleaved lanes: with that as
        # a first bar most insertions are spared.
        store_lanes(lanes, s)
        for start in range(LANES, count - LANES + 1, LANES):
            raise_lanes(lanes, s + 4 * start)
        bar = nth_lane(lanes, n)
    whole = count // LANES * LANES
    for start in range(0, whole, LANES):
        found = not_below(s + 4 * start, max(bar, score[n - 1]))
        while found != 0:
            place = lowest_bit(found)
            found &= found - 1
            insert(score, index, n, carray(floats_at(s + 4 * (start + place)), 1)[0], first + start + place)
    for j in range(whole, count):
        insert(score, index, n, carray(floats_at(s + 4 * j), 1)[0], first + j)


@njit
def insert(score, index, n, x, key):
    if not x > score[n - 1]:
        return
    place = n - 1
    while place > 0 and x > score[place - 1]:
        score[place] = score[place - 1]
        index[place] = index[place - 1]
        place -= 1
    score[place] = x
    index[place] = key


@njit
def add_number(s, n, x):
    use_wide_vectors()
    for j in range(n):
        s[j] += x


@njit
def add_vector(s, n, x):
    use_wide_vectors()
    for j in range(n):
        s[j] += x[j]


@njit
def add_strided(s, n, x, stride):
    for j in range(n):
        s[j] += x[j * stride]


@njit(fastmath={"contract"})
def add_alibi(s, n, slope, behind):
    use_wide_vectors()
    for j in range(n):
        s[j] -= slope * f32(abs(i32(behind) - i32(j)))


@njit(fastmath={"contract"})
def cap_scores(s, n, cap):
    use_wide_vectors()
    inverse = f32(1) / cap
    for j in range(n):
        s[j] = cap * tangent(s[j] * inverse)


@njit(fastmath={"contract"})
def cap_scores_and_slopes(s, slope, n, cap):
    """The same, keeping the derivative 1 − tanh² of every score."""
    use_wide_vectors()
    inverse = f32(1) / cap
    for j in range(n):
        t = tangent(s[j] * inverse)
        s[j] = cap * t
        slope[j] = f32(1) - t * t


@njit
def hide_scores(s, n, visible):
    use_wide_vectors()
    for j in range(n):
        s[j] = s[j] if visible[j] != 0 else NEGATIVE_INFINITY


@njit
def hide_strided(s, n, visible, stride):
    for j in range(n):
        if visible[j * stride] == 0:
            s[j] = NEGATIVE_INFINITY


@njit
def modify(s, slope, n, steps, count, b, h, i, position, first):
    """All steps, in the order written, on the scores of a row from key `first` on; slopes where there is room."""
    for number in range(count):
        step = steps[number]
        kind = step.kind
        at = step.at + 4 * (b * step.b + h * step.h + i * step.i)
        if kind == ADDED:
            add_number(s, n, carray(floats_at(at), 1)[0])
        elif kind == ADDED_VECTOR:
            if step.j == 1:
                add_vector(s, n, carray(floats_at(at + 4 * first), n))
            else:
                add_strided(s, n, carray(floats_at(at + 4 * first * step.j), n * step.j), step.j)
        elif kind == ALIBI:
            add_alibi(s, n, carray(floats_at(at), 1)[0], position - first)
        elif kind == SOFTCAP:
            if len(slope) > 0:
                cap_scores_and_slopes(s, slope, n, step.cap)
            else:
                cap_scores(s, n, step.cap)
        else:
            cells = step.at + b * step.b + h * step.h + i * step.i + first * step.j
            if step.j == 1:
                hide_scores(s, n, carray(bytes_at(cells), n))
            else:
                hide_strided(s, n, carray(bytes_at(cells), n * max(step.j, 1)), step.j)


@njit
def visible_range(lo, hi, i0, rows):
    """The keys that some row of a block sees."""
    first, end = i64(2**62), i64(0)
    for r in range(i0, i0 + rows):
        if lo[r] < hi[r]:
            first, end = min(first, lo[r]), max(end, hi[r])
    return first, end


@njit
def norm_of(T, row):
    """What weights of a row are made with: its maximum m and 1 / l; 0 both for a row with no key."""
    norm = carray(floats_at(T.norm + 8 * row), 2)
    if norm[1] == f32(0):
        return f32(0), f32(0)
    return norm[0], f32(1) / norm[1]


@njit(fastmath={"contract"})
def weights_added(s, n, m, share, column):
    """s ← exp(s − m) / l, also added to the sums of the columns."""
    use_wide_vectors()
    for j in range(n):
        w = exponential(s[j] - m) * share
        s[j] = w
        column[j] += w


@njit(fastmath={"contract"})
def weights_kept(s, n, m, share):
    use_wide_vectors()
    for j in range(n):
        s[j] = exponential(s[j] - m) * share


@njit(fastmath={"contract"})
def weights_and_logs(s, n, m, share, log):
    use_wide_vectors()
    log_share = np.log(share)
    for j in range(n):
        x = s[j] - m
        log_w = x + log_share
        log[j] = LOWEST if log_w < LOWEST else log_w
        s[j] = exponential(x) * share


@njit(fastmath={"contract"})
def into_scores(d, w, n, c):
    """d ← w (d − c): the gradient of a row of scores."""
    use_wide_vectors()
    for j in range(n):
        d[j] = w[j] * (d[j] - c)


@njit(fastmath={"contract"})
def into_scores_entropy(d, w, n, c, eta, log):
    use_wide_vectors()
    for j in range(n):
        d[j] = w[j] * (d[j] - c - eta * log[j])


@njit(fastmath={"contract"})
def add_far(d, n, rho, behind):
    use_wide_vectors()
    for j in range(n):
        d[j] += rho * f32(abs(i32(behind) - i32(j)))


@njit
def times(d, n, x):
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
