"""Operations that numba lacks: addresses as arrays, bits of a number, vectors of 16 lanes, a call of BLAS.

Also exp, log and tanh, written in operations that LLVM vectorises. Kernels are compiled for float32 and for float64; a
`kind` is any number of the type that is meant, of which the type alone counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
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
def reals_at(context: Any, kind: Any, address: Any) -> Any:
    """An address as a pointer to numbers of this kind."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], ctx.get_value_type(signature.return_type))

    return types.CPointer(kind)(kind, types.int64), generate


@njit(inline="always")
def reals(T, address, n):
    """The n numbers of T's kind at an address."""
    return carray(reals_at(T.scale, address), n)


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    real = types.float32 if bits == types.int32 else types.float64

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ctx.get_value_type(real))

    return real(bits), generate


@intrinsic
def as_bits(context: Any, number: Any) -> Any:
    integer = types.int32 if number == types.float32 else types.int64

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ctx.get_value_type(integer))

    return integer(number), generate


#: Scores compared by one instruction in the search for the largest.
LANES = 16


def _vector_of(kind: Any) -> Any:
    return ir.VectorType(ir.FloatType() if kind == types.float32 else ir.DoubleType(), LANES)


def _load_lanes(builder: Any, address: Any, vector: Any) -> Any:
    lanes = builder.load(builder.inttoptr(address, vector.as_pointer()))
    lanes.align = 4
    return lanes


def _store_lanes(builder: Any, lanes: Any, address: Any) -> None:
    builder.store(lanes, builder.inttoptr(address, lanes.type.as_pointer()), align=4)


def _spread(builder: Any, number: Any) -> Any:
    """One number in all lanes."""
    vector = ir.VectorType(number.type, LANES)
    lanes = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(lanes, lanes, zeros)


@intrinsic
def store_lanes(context: Any, kind: Any, target: Any, source: Any) -> Any:
    """Copy 16 numbers."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store_lanes(builder, _load_lanes(builder, args[2], _vector_of(kind)), args[1])
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.int64), generate


@intrinsic
def max_lanes(context: Any, kind: Any, target: Any, source: Any) -> Any:
    """Elementwise maximum of 16 numbers and 16 others, in place."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new = (_load_lanes(builder, address, _vector_of(kind)) for address in args[1:])
        larger = builder.fcmp_ordered(">", new, old)
        _store_lanes(builder, builder.select(larger, new, old), args[1])
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.int64), generate


@intrinsic
def nth_lane(context: Any, kind: Any, address: Any, n: Any) -> Any:
    """The nth largest of 16 numbers: the largest that is reached by at least n of them."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load_lanes(builder, args[1], _vector_of(kind))
        counts = ir.VectorType(ir.IntType(32), LANES)
        reached = ir.Constant(counts, [0] * LANES)
        for lane in range(LANES):
            one = _spread(builder, builder.extract_element(lanes, ir.Constant(ir.IntType(32), lane)))
            reached = builder.add(reached, builder.zext(builder.fcmp_ordered(">=", one, lanes), counts))
        best = ir.Constant(_vector_of(kind).element, float("-inf"))
        for lane in range(LANES):
            at = ir.Constant(ir.IntType(32), lane)
            enough = builder.icmp_signed(
                ">=", builder.extract_element(reached, at), builder.trunc(args[2], ir.IntType(32))
            )
            number = builder.extract_element(lanes, at)
            best = builder.select(builder.and_(enough, builder.fcmp_ordered(">", number, best)), number, best)
        return best

    return kind(kind, types.int64, types.int64), generate


@intrinsic
def ge_bitmask(context: Any, address: Any, threshold: Any) -> Any:
    """Bitmask of those of 16 numbers that are at least the threshold."""

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load_lanes(builder, args[0], _vector_of(threshold))
        hits = builder.fcmp_ordered(">=", lanes, _spread(builder, args[1]))
        return builder.zext(builder.bitcast(hits, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(types.int64, threshold), generate


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
    kind: Any,
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
    """C ← alpha·op(A)·op(B) + beta·C by the gemm of this kind at address f: column order, arguments by reference."""
    long = types.int64
    signature = types.void(long, kind, long, long, long, long, long, kind, long, long, long, long, kind, long, long)

    def generate(ctx: Any, builder: Any, _: Any, args: Any) -> Any:
        f, _, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = args
        real = ctx.get_value_type(kind)
        char, integer, pointer = ir.IntType(8), ir.IntType(32), ir.IntType(8).as_pointer()

        def by_reference(value: Any, to: Any) -> Any:
            place = cgutils.alloca_once(builder, to)
            builder.store(value if to == real else builder.trunc(value, to), place)
            return builder.bitcast(place, pointer)

        function = builder.inttoptr(f, ir.FunctionType(ir.VoidType(), [pointer] * 13).as_pointer())
        sizes = [by_reference(x, integer) for x in (m, n, k)]
        builder.call(
            function,
            [
                by_reference(ta, char),
                by_reference(tb, char),
                *sizes,
                by_reference(alpha, real),
                builder.inttoptr(a, pointer),
                by_reference(lda, integer),
                builder.inttoptr(b, pointer),
                by_reference(ldb, integer),
                by_reference(beta, real),
                builder.inttoptr(c, pointer),
                by_reference(ldc, integer),
            ],
        )
        return ctx.get_dummy_value()

    return signature, generate


_PLAIN, _TRANSPOSED = ord("N"), ord("T")


@njit
def product_nt(T, rows, cols, inner, alpha, a, lda, b, ldb, beta, c, ldc):
    """C (rows × cols) ← alpha · A Bᵀ + beta · C, all row by row: Fortran sees the transposed matrices."""
    gemm(T.gemm, T.scale, _TRANSPOSED, _PLAIN, cols, rows, inner, alpha, b, ldb, a, lda, beta, c, ldc)


@njit
def product_nn(T, rows, cols, inner, alpha, a, lda, b, ldb, beta, c, ldc):
    """C (rows × cols) ← alpha · A B + beta · C."""
    gemm(T.gemm, T.scale, _PLAIN, _PLAIN, cols, rows, inner, alpha, b, ldb, a, lda, beta, c, ldc)


@njit
def product_tn(T, rows, cols, inner, alpha, a, lda, b, ldb, beta, c, ldc):
    """C (rows × cols) ← alpha · Aᵀ B + beta · C."""
    gemm(T.gemm, T.scale, _PLAIN, _TRANSPOSED, cols, rows, inner, alpha, b, ldb, a, lda, beta, c, ldc)


# exp, log and tanh, in operations that LLVM vectorises: coefficients of Cephes, or of the Taylor series.

#: Where exp becomes 0, for float32 and float64.
LOWEST, _LOWEST64 = f32(-87.0), f64(-708.0)
_LOG2E, _LN2_HIGH, _LN2_LOW, _ROUND = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4), f32(12582912.0)
_E0, _E1, _E2, _E3, _E4, _E5 = (
    f32(x)
    for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


def exp(x):
    """exp(x) for x ≤ 88, to about one unit in the last place; 0 below `lowest(x)`; nan stays nan.

    x = n·ln 2 + r, with ln 2 in two parts so that r is exact, a polynomial in r, and 2ⁿ put into the exponent.
    """
    raise NotImplementedError("kernels call it")


@overload(exp, jit_options={"fastmath": {"contract"}, "forceinline": True})
def _exp_of(x):
    return _exp32 if x == types.float32 else _exp64


def _exp32(x):
    c = LOWEST if x < LOWEST else x
    z = c * _LOG2E + _ROUND  # adding and taking away 1.5·2²³ rounds to a whole number
    n = z - _ROUND
    r = c - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    power = as_float(i32((as_bits(z) + i32(127)) << i32(23)))
    y = (p * (r * r) + r + f32(1)) * power
    return f32(0) if x < LOWEST else y


_LOG2E64, _LN2_HIGH64, _LN2_LOW64, _ROUND64 = (
    f64(x) for x in (1.4426950408889634, 6.93145751953125e-1, 1.42860682030941723212e-6, 6755399441055744.0)
)
_S3, _S4, _S5, _S6, _S7, _S8, _S9, _S10, _S11, _S12, _S13 = (f64(1 / math.factorial(n)) for n in range(3, 14))


def _exp64(x):
    c = _LOWEST64 if x < _LOWEST64 else x
    z = c * _LOG2E64 + _ROUND64
    n = z - _ROUND64
    r = c - n * _LN2_HIGH64
    r = r - n * _LN2_LOW64
    p = ((((_S13 * r + _S12) * r + _S11) * r + _S10) * r + _S9) * r + _S8
    p = (((((p * r + _S7) * r + _S6) * r + _S5) * r + _S4) * r + _S3) * r + f64(0.5)
    power = as_float(i64((as_bits(z) + i64(1023)) << i64(52)))
    y = (p * (r * r) + r + f64(1)) * power
    return f64(0) if x < _LOWEST64 else y


def lowest(x):
    """The number of x's kind below which exp is 0."""
    raise NotImplementedError("kernels call it")


@overload(lowest, jit_options={"forceinline": True})
def _lowest_of(x):
    return (lambda x: LOWEST) if x == types.float32 else (lambda x: _LOWEST64)


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
    """log(x) of a normal float32 > 0, to about one unit in the last place: x = 2ⁿ r, and a polynomial in r − 1."""
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
_P0, _P1, _P2 = (f64(x) for x in (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3))
_Q0, _Q1, _Q2 = (f64(x) for x in (1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3))


def tanh(x):
    """tanh(x): a polynomial or a fraction of two near 0, where 1 − 2e/(1 + e) with e = exp(−2|x|) would cancel.

    Far from 0 the subtraction is the only rounding that counts; (1 − e)/(1 + e) has three, each of a unit of 1.
    """
    raise NotImplementedError("kernels call it")


@overload(tanh, jit_options={"fastmath": {"contract"}, "forceinline": True})
def _tanh_of(x):
    return _tanh32 if x == types.float32 else _tanh64


def _tanh32(x):
    z = x * x
    near = ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4) * z * x + x
    e = exp(f32(-2) * abs(x))
    far = f32(1) - f32(2) * e / (f32(1) + e)
    far = -far if x < f32(0) else far
    return near if abs(x) < f32(0.625) else far


def _tanh64(x):
    z = x * x
    near = ((_P0 * z + _P1) * z + _P2) / (((z + _Q0) * z + _Q1) * z + _Q2) * z * x + x
    e = exp(f64(-2) * abs(x))
    far = f64(1) - f64(2) * e / (f64(1) + e)
    far = -far if x < f64(0) else far
    return near if abs(x) < f64(0.625) else far


def ordered(bits):
    """Bits of a number as an integer of the same order: LLVM vectorises the maximum of integers only."""
    raise NotImplementedError("kernels call it")


@overload(ordered, jit_options={"forceinline": True})
def _ordered_of(bits):
    if bits == types.int32:
        return lambda bits: i32(bits ^ ((bits >> i32(31)) & i32(0x7FFFFFFF)))
    return lambda bits: i64(bits ^ ((bits >> i64(63)) & i64(0x7FFFFFFFFFFFFFFF)))
