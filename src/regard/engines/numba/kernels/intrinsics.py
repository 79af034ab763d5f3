"""Operations that numba lacks: addresses as arrays, bits of a float, vectors of 16 lanes, a call of BLAS.

Also exp, log and tanh, written in operations that LLVM vectorises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

f32, i32, i64 = np.float32, np.int32, np.int64
NEGATIVE_INFINITY = f32(-np.inf)


def pointer_to(kind: Any) -> Any:
    """An intrinsic that turns an address into a pointer to this type."""

    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ctx.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return at


floats_at, doubles_at, longs_at, bytes_at = map(pointer_to, (types.float32, types.float64, types.int64, types.uint8))


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


#: Scores compared by one instruction in the search for the largest.
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
def max_lanes(context: Any, target: Any, source: Any) -> Any:
    """Elementwise maximum of 16 numbers and 16 others, in place."""

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
def ge_bitmask(context: Any, address: Any, threshold: Any) -> Any:
    """Bitmask of those of 16 numbers that are at least the threshold."""

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
def atomic_next(context: Any, counter: Any) -> Any:
    """Atomically increment a counter that all threads share; returns its old value."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def use_wide_vectors(context: Any) -> Any:
    """Let LLVM use 512-bit vectors where the CPU has them: 0.30 ns a score; by default it uses 256 bits and takes 0.39.

    `set.add` bypasses llvmlite's list of known attributes.
    """

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return ctx.get_dummy_value()

    return types.void(), generate


@intrinsic
def gemm(
    context: Any,
    f: Any,
    ta: Any,
    tb: Any,
    m: Any,
    n: Any,
    k: Any,
    alpha: Any,
    a: Any,
    lda: Any,
    b: Any,
    ldb: Any,
    beta: Any,
    c: Any,
    ldc: Any,
) -> Any:
    """C ← alpha·op(A)·op(B) + beta·C by the `sgemm` at address f: Fortran's column order, arguments by reference."""
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
        builder.call(
            function,
            [
                by_reference(ta, char),
                by_reference(tb, char),
                *sizes,
                by_reference(alpha, ir.FloatType()),
                builder.inttoptr(a, pointer),
                by_reference(lda, integer),
                builder.inttoptr(b, pointer),
                by_reference(ldb, integer),
                by_reference(beta, ir.FloatType()),
                builder.inttoptr(c, pointer),
                by_reference(ldc, integer),
            ],
        )
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


# exp, log and tanh, in operations that LLVM vectorises.

LOWEST = f32(-87.0)
_LOG2E, _LN2_HIGH, _LN2_LOW, _ROUND = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4), f32(12582912.0)
_E0, _E1, _E2, _E3, _E4, _E5 = (
    f32(x)
    for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


@njit(fastmath={"contract"}, inline="always")
def exp(x):
    """exp(x) for x ≤ 88, to about one unit in the last place; 0 below −87; nan stays nan.

    x = n·ln 2 + r, with ln 2 in two parts so that r is exact, a polynomial in r, and 2ⁿ put into the exponent.
    """
    c = LOWEST if x < LOWEST else x
    z = c * _LOG2E + _ROUND  # adding and taking away 1.5·2²³ rounds to a whole number
    n = z - _ROUND
    r = c - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    power = as_float(i32((as_bits(z) + i32(127)) << i32(23)))
    y = (p * (r * r) + r + f32(1)) * power
    return f32(0) if x < LOWEST else y


_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (
    f32(x)
    for x in (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )
)  # fmt: skip
_MANTISSA, _HALF_BITS, _SQRT_HALF = i32(0x007FFFFF), i32(0x3F000000), f32(0.70710678)


@njit(fastmath={"contract"}, inline="always")
def log(x):
    """log(x) of a normal x > 0, to about one unit in the last place: x = 2ⁿ r, and a polynomial in r − 1."""
    bits = as_bits(x)
    n = f32((bits >> i32(23)) - i32(126))
    r = as_float(i32((bits & _MANTISSA) | _HALF_BITS))
    low = r < _SQRT_HALF
    n = n - f32(1) if low else n
    r = r + r - f32(1) if low else r - f32(1)
    z = r * r
    p = (((((((_L0 * r + _L1) * r + _L2) * r + _L3) * r + _L4) * r + _L5) * r + _L6) * r + _L7) * r + _L8
    y = p * r * z + n * _LN2_LOW - f32(0.5) * z
    return r + y + n * _LN2_HIGH


_T0, _T1, _T2, _T3, _T4 = (
    f32(x) for x in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)


@njit(fastmath={"contract"}, inline="always")
def tanh(x):
    """tanh(x): a polynomial near 0, where 1 − 2e/(1 + e) with e = exp(−2|x|) would cancel.

    Far from 0 the subtraction is the only rounding that counts; (1 − e)/(1 + e) has three, each of a unit of 1.
    """
    z = x * x
    near = ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4) * z * x + x
    e = exp(f32(-2) * abs(x))
    far = f32(1) - f32(2) * e / (f32(1) + e)
    far = -far if x < f32(0) else far
    return near if abs(x) < f32(0.625) else far


@njit(inline="always")
def ordered(bits):
    """Bits of a float as an integer of the same order: LLVM vectorises the maximum of integers only."""
    return i32(bits ^ ((bits >> i32(31)) & i32(0x7FFFFFFF)))
