"""The tile step compiled for the CPU: BLAS for the products, one fused pass over each row for all the rest.

Three kernels walk the tiles as `blockwise` does, in float32: `forward_kernel`, `reread_kernel`,
`backward_kernel`. Each is a C function of one argument, a record of addresses and sizes, that any number of
threads may enter at once: they draw work from a shared counter, so nobody waits for the slowest. The matrix
product is the one inside PyTorch itself, reached by its address. Loaded only by `compiled`; needs numba.
"""

# ruff: noqa: N803 (BLAS and tile names are capitals in the literature)

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "ADDED",
    "ADDED_VECTOR",
    "ALIBI",
    "HIDDEN",
    "SOFTCAP",
    "STEP",
    "TASK",
    "backward_kernel",
    "forward_kernel",
    "reread_kernel",
]

f32, i32, i64 = np.float32, np.int32, np.int64
NEGATIVE_INFINITY = f32(-np.inf)

# Kinds of steps: what is done to a row of scores between the product and softmax.
ADDED, ADDED_VECTOR, ALIBI, SOFTCAP, HIDDEN = 0, 1, 2, 3, 4

#: One step: its kind, the address of its tensor and strides over (b, h, i, j) in elements; cap for SOFTCAP.
STEP = np.dtype(
    [("kind", "i8"), ("at", "i8"), ("b", "i8"), ("h", "i8"), ("i", "i8"), ("j", "i8"), ("cap", "f4"), ("_", "f4")]
)


def _task_type() -> np.dtype:
    addresses = (
        "gemm counter scratch lo hi steps "
        "q k v y m l t reach mass keys argmax top_score top_index sink "  # forward
        "lse u z received pool "  # reread
        "left right dy c eta rho dq dk dv drow dkey"  # backward
    ).split()
    strides = ["q_b", "q_h", "q_i", "k_b", "k_h", "k_j", "v_b", "v_h", "v_j", "u_b", "u_h", "u_i", "left_b", "left_h", "left_i", "right_b", "right_h", "right_j", "dy_b", "dy_h", "dy_i", "sink_b", "sink_h"]
    sizes = ["B", "H", "G", "V", "I", "J", "D", "E", "U", "X", "offset", "spans", "spans_b", "step_count", "top", "threads", "tall", "wide", "chunks", "scratch_size", "tile_rows", "tile_cols", "i0", "i1", "j0", "j1", "right_group"]
    return np.dtype([(name, "i8") for name in (*addresses, *strides, *sizes)] + [("scale", "f4"), ("_", "f4")])


#: Everything a kernel is told: addresses (0 for what is not wanted), strides and sizes in elements.
TASK = _task_type()
_TASK = from_dtype(TASK)
_STEP = from_dtype(STEP)


# What numba cannot say: addresses as arrays, bits of a float, an atomic counter, wide vectors, a call of BLAS.


def _pointer_to(kind: Any) -> Any:
    """A function that takes an address as a pointer to numbers of this kind."""

    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ctx.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return at


floats_at, doubles_at, longs_at, bytes_at, steps_at = map(
    _pointer_to, (types.float32, types.float64, types.int64, types.uint8, _STEP)
)


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def as_bits(context: Any, number: Any) -> Any:
    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


#: How many scores are looked at in one instruction when the largest are sought.
LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _load_lanes(builder: Any, address: Any) -> Any:
    vector = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()))
    vector.align = 4
    return vector


def _spread(builder: Any, number: Any) -> Any:
    """One number in all lanes."""
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(vector, vector, zeros)


def _store_lanes(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, builder.inttoptr(address, _VECTOR.as_pointer()), align=4)


@intrinsic
def store_lanes(context: Any, target: Any, source: Any) -> Any:
    """Copy 16 numbers."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store_lanes(builder, _load_lanes(builder, args[1]), args[0])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def raise_lanes(context: Any, target: Any, source: Any) -> Any:
    """Raise 16 numbers to 16 others where those are larger."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new = _load_lanes(builder, args[0]), _load_lanes(builder, args[1])
        larger = builder.fcmp_ordered(">", new, old)
        _store_lanes(builder, builder.select(larger, new, old), args[0])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def nth_lane(context: Any, address: Any, n: Any) -> Any:
    """The nth largest of 16 numbers: the largest that is reached by at least n of them."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load_lanes(builder, args[0])
        counts = ir.VectorType(ir.IntType(32), LANES)
        reached = ir.Constant(counts, [0] * LANES)
        for lane in range(LANES):
            one = _spread(builder, builder.extract_element(lanes, ir.Constant(ir.IntType(32), lane)))
            reached = builder.add(reached, builder.zext(builder.fcmp_ordered(">=", one, lanes), counts))
        best = ir.Constant(ir.FloatType(), float("-inf"))
        for lane in range(LANES):
            at = ir.Constant(ir.IntType(32), lane)
            enough = builder.icmp_signed(
                ">=", builder.extract_element(reached, at), builder.trunc(args[1], ir.IntType(32))
            )
            number = builder.extract_element(lanes, at)
            best = builder.select(builder.and_(enough, builder.fcmp_ordered(">", number, best)), number, best)
        return best

    return types.float32(types.int64, types.int64), generate


@intrinsic
def not_below(context: Any, address: Any, bar: Any) -> Any:
    """Which of 16 numbers reach the bar, as bits."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        hits = builder.fcmp_ordered(">=", _load_lanes(builder, args[0]), _spread(builder, args[1]))
        return builder.zext(builder.bitcast(hits, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(types.int64, types.float32), generate


@intrinsic
def lowest_bit(context: Any, bits: Any) -> Any:
    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def draw(context: Any, counter: Any) -> Any:
    """Take the next number from a counter that all threads share."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def use_wide_vectors(context: Any) -> Any:
    """Let LLVM use 512-bit vectors where the machine has them; left alone it prefers 256 (0.39 against 0.30 ns a score)."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return ctx.get_dummy_value()

    return types.void(), generate


@intrinsic
def gemm(context: Any, f: Any, ta: Any, tb: Any, m: Any, n: Any, k: Any, alpha: Any, a: Any, lda: Any, b: Any, ldb: Any, beta: Any, c: Any, ldc: Any) -> Any:  # fmt: skip
    """C ← alpha·op(A)·op(B) + beta·C by the `sgemm` at an address: Fortran's column order, all arguments by reference."""
    long, real = types.int64, types.float32
    signature = types.void(long, long, long, long, long, long, real, long, long, long, long, real, long, long)

    def generate(ctx: Any, builder: Any, _: Any, args: Any) -> Any:
        f, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = args
        char, integer, pointer = ir.IntType(8), ir.IntType(32), ir.IntType(8).as_pointer()

        def by_reference(value: Any, kind: Any) -> Any:
            place = cgutils.alloca_once(builder, kind)
            builder.store(value if kind == ir.FloatType() else builder.trunc(value, kind), place)
            return builder.bitcast(place, pointer)

        function = builder.inttoptr(f, ir.FunctionType(ir.VoidType(), [pointer] * 13).as_pointer())
        sizes = [by_reference(x, integer) for x in (m, n, k)]
        builder.call(function, [
            by_reference(ta, char), by_reference(tb, char), *sizes, by_reference(alpha, ir.FloatType()),
            builder.inttoptr(a, pointer), by_reference(lda, integer), builder.inttoptr(b, pointer), by_reference(ldb, integer),
            by_reference(beta, ir.FloatType()), builder.inttoptr(c, pointer), by_reference(ldc, integer),
        ])  # fmt: skip
        return ctx.get_dummy_value()

    return signature, generate


_PLAIN, _TRANSPOSED = ord("N"), ord("T")


@njit
def product_nt(f, rows, cols, inner, alpha, a, lda, b, ldb, beta, c, ldc):
    """C (rows × cols) ← alpha · A Bᵀ + beta · C, all row by row: Fortran sees the transposed matrices."""
    gemm(f, _TRANSPOSED, _PLAIN, cols, rows, inner, alpha, b, ldb, a, lda, beta, c, ldc)


@njit
def product_nn(f, rows, cols, inner, alpha, a, lda, b, ldb, beta, c, ldc):
    """C (rows × cols) ← alpha · A B + beta · C."""
    gemm(f, _PLAIN, _PLAIN, cols, rows, inner, alpha, b, ldb, a, lda, beta, c, ldc)


@njit
def product_tn(f, rows, cols, inner, alpha, a, lda, b, ldb, beta, c, ldc):
    """C (rows × cols) ← alpha · Aᵀ B + beta · C."""
    gemm(f, _PLAIN, _TRANSPOSED, cols, rows, inner, alpha, b, ldb, a, lda, beta, c, ldc)


# Functions of one number, made of operations that LLVM turns into vectors.

_LOWEST = f32(-87.0)
_LOG2E, _LN2_HIGH, _LN2_LOW, _ROUND = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4), f32(12582912.0)
_E0, _E1, _E2, _E3, _E4, _E5 = (
    f32(x) for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)  # fmt: skip


@njit(fastmath={"contract"}, inline="always")
def exponential(x):
    """exp(x) for x ≤ 88, to about one unit in the last place; 0 below −87; nan stays nan.

    x = n·ln 2 + r, with ln 2 in two parts so that r is exact, a polynomial in r, and 2ⁿ put into the exponent.
    """
    c = _LOWEST if x < _LOWEST else x
    z = c * _LOG2E + _ROUND  # adding and taking away 1.5·2²³ rounds to a whole number
    n = z - _ROUND
    r = c - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    power = as_float(i32((as_bits(z) + i32(127)) << i32(23)))
    y = (p * (r * r) + r + f32(1)) * power
    return f32(0) if x < _LOWEST else y


_T0, _T1, _T2, _T3, _T4 = (
    f32(x) for x in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)


@njit(fastmath={"contract"}, inline="always")
def tangent(x):
    """tanh(x): a polynomial near 0, where 1 − 2/(e²ˣ + 1) would cancel."""
    z = x * x
    near = ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4) * z * x + x
    e = exponential(f32(-2) * abs(x))
    far = (f32(1) - e) / (f32(1) + e)
    far = -far if x < f32(0) else far
    return near if abs(x) < f32(0.625) else far


@njit(inline="always")
def ordered(bits):
    """Bits of a float as an integer that orders as the float does. LLVM makes vectors of an integer maximum, not of a float one."""
    return i32(bits ^ ((bits >> i32(31)) & i32(0x7FFFFFFF)))


# One pass each over the n visible scores of a row. Loops start at 0: an index that might be negative is no vector.


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
        t += p * (_LOWEST if x < _LOWEST else x)  # 0 · −inf would be nan
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
def hide_scores(s, n, visible, stride):
    for j in range(n):
        if visible[j * stride] == 0:
            s[j] = NEGATIVE_INFINITY


@njit
def modify(s, slope, n, steps, count, b, h, i, position, first):
    """All steps, in the order written, on the visible scores of a row, from key `first` on. `slope` is kept where it is given."""
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
            hide_scores(s, n, carray(bytes_at(cells), n * max(step.j, 1)), step.j)


@njit
def visible_range(lo, hi, i0, rows):
    """The keys that some row of a block sees."""
    first, end = i64(2**62), i64(0)
    for r in range(i0, i0 + rows):
        if lo[r] < hi[r]:
            first, end = min(first, lo[r]), max(end, hi[r])
    return first, end


def forward_kernel(pointer):
    """One pass over the keys for blocks of rows: y, lse and the statistics that rows can tell."""
    use_wide_vectors()
    T = carray(pointer, 1)[0]
    counters = T.counter
    mine = T.scratch + draw(counters + 8) * T.scratch_size
    blocks = (T.I + T.tall - 1) // T.tall
    steps = carray(steps_at(T.steps), max(T.step_count, 1))
    no_slope = carray(floats_at(mine), 0)
    rest = mine + 4 * T.tall * T.wide
    m = carray(floats_at(rest), T.tall)
    l = carray(floats_at(rest + 4 * T.tall), T.tall)
    t = carray(floats_at(rest + 8 * T.tall), T.tall)
    while True:
        item = draw(counters)
        if item >= T.B * T.H * blocks:
            break
        b, h, i0 = item // (T.H * blocks), item // blocks % T.H, item % blocks * T.tall
        rows = min(T.tall, T.I - i0)
        out = (b * T.H + h) * T.I + i0
        for r in range(rows):
            m[r] = NEGATIVE_INFINITY
            l[r] = f32(0)
            t[r] = f32(0)
        q = T.q + 4 * (b * T.q_b + h * T.q_h + i0 * T.q_i)
        k = T.k + 4 * (b * T.k_b + h * T.G // T.H * T.k_h)
        v = T.v + 4 * (b * T.v_b + h * T.V // T.H * T.v_h)
        y = T.y + 4 * out * T.E
        fresh = True  # no tile has written to y yet
        for span in range(T.spans):
            edge = 8 * (b * T.spans_b + span * T.I)
            lo, hi = carray(longs_at(T.lo + edge), T.I), carray(longs_at(T.hi + edge), T.I)
            first, end = visible_range(lo, hi, i0, rows)
            for j0 in range(first, end, T.wide):
                cols = min(T.wide, end - j0)
                product_nt(T.gemm, rows, cols, T.D, T.scale, q, T.q_i, k + 4 * j0 * T.k_j, T.k_j, f32(0), mine, T.wide)
                for r in range(rows):
                    row = carray(floats_at(mine + 4 * r * T.wide), T.wide)
                    a, z = max(lo[i0 + r] - j0, 0), min(hi[i0 + r] - j0, cols)
                    if a >= z:
                        zeroed(row, 0, cols)
                        continue
                    n, key, position = z - a, j0 + a, i0 + r + T.offset
                    here_at = mine + 4 * (r * T.wide + a)
                    s = carray(floats_at(here_at), n)
                    if T.step_count > 0:
                        modify(s, no_slope, n, steps, T.step_count, b, h, i0 + r, position, key)
                    old = m[r]
                    here = largest(s, n)
                    new = max(old, here)
                    if T.argmax != 0 and here > old:
                        carray(longs_at(T.argmax + 8 * (out + r)), 1)[0] = key + first_place(s, n, here)
                    if T.top > 0:
                        at = (out + r) * T.top
                        keep_largest(
                            carray(floats_at(T.top_score + 4 * at), T.top),
                            carray(longs_at(T.top_index + 8 * at), T.top),
                            T.top,
                            here_at,
                            n,
                            key,
                            rest + 12 * T.tall,
                        )
                    pivot = f32(0) if new == NEGATIVE_INFINITY else new
                    if T.t != 0:
                        here_l, here_t = exponentials_and_t(s, n, pivot)
                    else:
                        here_l, here_t = exponentials(s, n, pivot), f32(0)
                    zeroed(row, 0, a)
                    zeroed(row, z, cols)
                    if new > old and old != NEGATIVE_INFINITY:
                        # A higher maximum: what was summed so far shrinks by the same factor.
                        shift = old - new
                        alpha = exponential(shift)
                        t[r] = alpha * (t[r] + shift * l[r])
                        l[r] *= alpha
                        if T.E > 0:
                            scaled(carray(floats_at(y + 4 * r * T.E), T.E), T.E, alpha)
                        if T.reach != 0:
                            carray(floats_at(T.reach + 4 * (out + r)), 1)[0] *= alpha
                        if T.mass != 0:
                            carray(floats_at(T.mass + 4 * (out + r)), 1)[0] *= alpha
                    l[r] += here_l
                    t[r] += here_t
                    m[r] = new
                    if T.reach != 0:
                        carray(floats_at(T.reach + 4 * (out + r)), 1)[0] += far_sum(s, n, position - key)
                    if T.mass != 0:
                        carray(floats_at(T.mass + 4 * (out + r)), 1)[0] += dot(
                            s, n, carray(floats_at(T.keys + 4 * key), n)
                        )
                if T.E > 0:
                    product_nn(
                        T.gemm,
                        rows,
                        T.E,
                        cols,
                        f32(1),
                        mine,
                        T.wide,
                        v + 4 * j0 * T.v_j,
                        T.v_j,
                        f32(0 if fresh else 1),
                        y,
                        T.E,
                    )
                    fresh = False
        finish_rows(T, b, h, out, rows, m, l, t, y, fresh)


@njit
def finish_rows(T, b, h, out, rows, m, l, t, y, untouched):
    """Merge the sink in, divide by the row sums, and write what was asked for."""
    for r in range(rows):
        if T.m != 0:
            carray(floats_at(T.m + 4 * (out + r)), 1)[0] = m[r]
        shrink = f32(1)
        if T.sink != 0:
            # The sink is the state of one more key: maximum = its logit, sum 1, value nothing.
            sink = carray(floats_at(T.sink + 4 * (b * T.sink_b + h * T.sink_h)), 1)[0]
            new = max(m[r], sink)
            if new != NEGATIVE_INFINITY:
                ours = f32(0) if m[r] == NEGATIVE_INFINITY else m[r] - new
                theirs = f32(0) if sink == NEGATIVE_INFINITY else sink - new
                one = f32(0) if sink == NEGATIVE_INFINITY else exponential(theirs)
                shrink = exponential(ours)
                t[r] = shrink * (t[r] + ours * l[r]) + one * theirs
                l[r] = shrink * l[r] + one
                m[r] = new
        share = f32(0) if l[r] == f32(0) else shrink / l[r]
        log_l = np.log(l[r])
        carray(floats_at(T.lse + 4 * (out + r)), 1)[0] = m[r] + log_l
        if T.t != 0:
            entropy = f32(0) if l[r] == f32(0) else log_l - t[r] / l[r]
            carray(floats_at(T.t + 4 * (out + r)), 1)[0] = f32(0) if entropy < f32(0) else entropy
        if T.reach != 0:
            carray(floats_at(T.reach + 4 * (out + r)), 1)[0] *= share
        if T.mass != 0:
            carray(floats_at(T.mass + 4 * (out + r)), 1)[0] *= share
        if T.E > 0:
            row = carray(floats_at(y + 4 * r * T.E), T.E)
            if untouched:
                zeroed(row, 0, T.E)
            else:
                scaled(row, T.E, share)


@njit(fastmath={"contract"})
def weights_added(s, n, lse, column):
    """s ← exp(s − lse), also added to the sums of the columns."""
    use_wide_vectors()
    for j in range(n):
        w = exponential(s[j] - lse)
        s[j] = w
        column[j] += w


@njit
def flush(T, column, cols, j0, row, received, pool):
    """Column sums of some rows go into the totals, in float64, and into a row of the pooled map; then they start again."""
    use_wide_vectors()
    if T.received != 0:
        for j in range(cols):
            received[j0 + j] += np.float64(column[j])
    if row >= 0:
        j = max(j0, T.j0)
        stop = min(j0 + cols, T.j1)
        n = T.j1 - T.j0
        while j < stop:
            tile = ((j - T.j0 + 1) * T.tile_cols - 1) // n
            end = min(stop, T.j0 + (tile + 1) * n // T.tile_cols)
            total = np.float64(0)
            for x in range(j, end):
                total += np.float64(column[x - j0])
            pool[row * T.tile_cols + tile] += total
            j = end
    for j in range(cols):
        column[j] = f32(0)


@njit
def pool_row(T, i):
    """The row of the pooled map that query i belongs to; −1 for none."""
    if T.pool == 0 or i < T.i0 or i >= T.i1:
        return i64(-1)
    return ((i - T.i0 + 1) * T.tile_rows - 1) // (T.i1 - T.i0)


def reread_kernel(pointer):
    """A second pass over finished rows: column sums, pooled map, Wᵀ u. Each chunk of rows has totals of its own."""
    use_wide_vectors()
    T = carray(pointer, 1)[0]
    counters = T.counter
    mine = T.scratch + draw(counters + 8) * T.scratch_size
    steps = carray(steps_at(T.steps), max(T.step_count, 1))
    no_slope = carray(floats_at(mine), 0)
    columns = mine + 4 * T.tall * T.wide
    column = carray(floats_at(columns), T.wide)
    zeroed(column, 0, T.wide)
    per_chunk = ((T.I + T.tall - 1) // T.tall + T.chunks - 1) // T.chunks * T.tall
    while True:
        item = draw(counters)
        if item >= T.B * T.H * T.chunks:
            break
        chunk, head = item // (T.B * T.H), item % (T.B * T.H)
        b, h = head // T.H, head % T.H
        received = carray(doubles_at(T.received + 8 * item * T.J), T.J)
        pool = carray(doubles_at(T.pool + 8 * item * T.tile_rows * T.tile_cols), max(T.tile_rows * T.tile_cols, 1))
        z_sum = T.z + 4 * item * T.J * T.U
        k = T.k + 4 * (b * T.k_b + h * T.G // T.H * T.k_h)
        lse = carray(floats_at(T.lse + 4 * head * T.I), T.I)
        for i0 in range(chunk * per_chunk, min(T.I, (chunk + 1) * per_chunk), T.tall):
            rows = min(T.tall, T.I - i0)
            q = T.q + 4 * (b * T.q_b + h * T.q_h + i0 * T.q_i)
            u = T.u + 4 * (b * T.u_b + h * T.u_h + i0 * T.u_i)
            for span in range(T.spans):
                edge = 8 * (b * T.spans_b + span * T.I)
                lo, hi = carray(longs_at(T.lo + edge), T.I), carray(longs_at(T.hi + edge), T.I)
                first, end = visible_range(lo, hi, i0, rows)
                for j0 in range(first, end, T.wide):
                    cols = min(T.wide, end - j0)
                    product_nt(
                        T.gemm, rows, cols, T.D, T.scale, q, T.q_i, k + 4 * j0 * T.k_j, T.k_j, f32(0), mine, T.wide
                    )
                    group = pool_row(T, i0)
                    for r in range(rows):
                        i = i0 + r
                        row = carray(floats_at(mine + 4 * r * T.wide), T.wide)
                        if pool_row(T, i) != group:
                            flush(T, column, cols, j0, group, received, pool)
                            group = pool_row(T, i)
                        a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
                        if a >= z:
                            zeroed(row, 0, cols)
                            continue
                        n = z - a
                        s = carray(floats_at(mine + 4 * (r * T.wide + a)), n)
                        if T.step_count > 0:
                            modify(s, no_slope, n, steps, T.step_count, b, h, i, i + T.offset, j0 + a)
                        pivot = f32(0) if lse[i] == NEGATIVE_INFINITY else lse[i]
                        weights_added(s, n, pivot, carray(floats_at(columns + 4 * a), n))
                        zeroed(row, 0, a)
                        zeroed(row, z, cols)
                    flush(T, column, cols, j0, group, received, pool)
                    if T.U > 0:
                        product_tn(
                            T.gemm, cols, T.U, rows, f32(1), mine, T.wide, u, T.u_i, f32(1), z_sum + 4 * j0 * T.U, T.U
                        )


@njit(fastmath={"contract"})
def weights_kept(s, n, lse):
    use_wide_vectors()
    for j in range(n):
        s[j] = exponential(s[j] - lse)


@njit(fastmath={"contract"})
def weights_and_logs(s, n, lse, log):
    use_wide_vectors()
    for j in range(n):
        x = s[j] - lse
        log[j] = _LOWEST if x < _LOWEST else x
        s[j] = exponential(x)


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


def backward_kernel(pointer):
    """Gradients of q, k, v and of biases per row and per key. Each chunk of rows has sums of its own for the keys."""
    use_wide_vectors()
    T = carray(pointer, 1)[0]
    counters = T.counter
    mine = T.scratch + draw(counters + 8) * T.scratch_size
    tile = 4 * T.tall * T.wide
    grads = mine + tile
    steps = carray(steps_at(T.steps), max(T.step_count, 1))
    log = carray(floats_at(mine + 2 * tile), T.wide)
    slopes_at = mine + 2 * tile + 4 * T.wide
    capped = False
    for n in range(T.step_count):
        capped = capped or steps[n].kind == SOFTCAP
    slope = carray(floats_at(slopes_at), T.wide if capped else 0)
    per_chunk = ((T.I + T.tall - 1) // T.tall + T.chunks - 1) // T.chunks * T.tall
    group = T.H // T.G
    while True:
        item = draw(counters)
        if item >= T.B * T.G * T.chunks:
            break
        chunk, b, g = item // (T.B * T.G), item // T.G % T.B, item % T.G
        k = T.k + 4 * (b * T.k_b + g * T.k_h)
        dk = T.dk + 4 * item * T.J * T.D
        dv = T.dv + 4 * item * T.J * T.E
        for h in range(g * group, (g + 1) * group):
            head = b * T.H + h
            lse = carray(floats_at(T.lse + 4 * head * T.I), T.I)
            c = carray(floats_at(T.c + 4 * head * T.I), T.I)
            right = T.right + 4 * (b * T.right_b + h // T.right_group * T.right_h)
            dkey = T.dkey + 4 * (chunk * T.B * T.H + head) * T.J
            for i0 in range(chunk * per_chunk, min(T.I, (chunk + 1) * per_chunk), T.tall):
                rows = min(T.tall, T.I - i0)
                q = T.q + 4 * (b * T.q_b + h * T.q_h + i0 * T.q_i)
                left = T.left + 4 * (b * T.left_b + h * T.left_h + i0 * T.left_i)
                dy = T.dy + 4 * (b * T.dy_b + h * T.dy_h + i0 * T.dy_i)
                dq = T.dq + 4 * (head * T.I + i0) * T.D
                for span in range(T.spans):
                    edge = 8 * (b * T.spans_b + span * T.I)
                    lo, hi = carray(longs_at(T.lo + edge), T.I), carray(longs_at(T.hi + edge), T.I)
                    first, end = visible_range(lo, hi, i0, rows)
                    for j0 in range(first, end, T.wide):
                        cols = min(T.wide, end - j0)
                        k_here = k + 4 * j0 * T.k_j
                        product_nt(T.gemm, rows, cols, T.D, T.scale, q, T.q_i, k_here, T.k_j, f32(0), mine, T.wide)
                        product_nt(
                            T.gemm,
                            rows,
                            cols,
                            T.X,
                            f32(1),
                            left,
                            T.left_i,
                            right + 4 * j0 * T.right_j,
                            T.right_j,
                            f32(0),
                            grads,
                            T.wide,
                        )
                        for r in range(rows):
                            i = i0 + r
                            a, z = max(lo[i] - j0, 0), min(hi[i] - j0, cols)
                            for at in (mine, grads):
                                row = carray(floats_at(at + 4 * r * T.wide), T.wide)
                                zeroed(row, 0, min(a, cols))
                                zeroed(row, max(z, 0) if a < z else min(a, cols), cols)
                            if a >= z:
                                continue
                            n = z - a
                            w = carray(floats_at(mine + 4 * (r * T.wide + a)), n)
                            d = carray(floats_at(grads + 4 * (r * T.wide + a)), n)
                            if T.step_count > 0:
                                modify(w, slope, n, steps, T.step_count, b, h, i, i + T.offset, j0 + a)
                            pivot = f32(0) if lse[i] == NEGATIVE_INFINITY else lse[i]
                            if T.rho != 0:
                                add_far(
                                    d, n, carray(floats_at(T.rho + 4 * (head * T.I + i)), 1)[0], i + T.offset - j0 - a
                                )
                            if T.eta != 0:
                                weights_and_logs(w, n, pivot, log)
                                eta = carray(floats_at(T.eta + 4 * (head * T.I + i)), 1)[0]
                                into_scores_entropy(d, w, n, c[i], eta, log)
                            else:
                                weights_kept(w, n, pivot)
                                into_scores(d, w, n, c[i])
                            if capped:
                                times(d, n, slope)
                            if T.drow != 0:
                                carray(floats_at(T.drow + 4 * (head * T.I + i)), 1)[0] += total(d, n)
                            if T.dkey != 0:
                                add_vector(carray(floats_at(dkey + 4 * (j0 + a)), n), n, d)
                        if T.E > 0:
                            product_tn(
                                T.gemm,
                                cols,
                                T.E,
                                rows,
                                f32(1),
                                mine,
                                T.wide,
                                dy,
                                T.dy_i,
                                f32(1),
                                dv + 4 * j0 * T.E,
                                T.E,
                            )
                        product_nn(T.gemm, rows, T.D, cols, T.scale, grads, T.wide, k_here, T.k_j, f32(1), dq, T.D)
                        product_tn(
                            T.gemm, cols, T.D, rows, T.scale, grads, T.wide, q, T.q_i, f32(1), dk + 4 * j0 * T.D, T.D
                        )


@functools.cache
def kernel(function: Any) -> Any:
    """A kernel compiled to a C function, when it is first needed; the result is kept on disk."""
    return cfunc(types.void(types.CPointer(_TASK)), cache=True, nopython=True)(function)


def new_task() -> np.ndarray:
    return np.zeros(1, TASK)


def steps_table(steps: list[tuple[Any, ...]]) -> np.ndarray:
    """The steps as the kernels read them."""
    return np.array(steps, STEP) if steps else np.zeros(1, STEP)
