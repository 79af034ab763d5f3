"""Additive attention: s = Σ_a v_a tanh(q_a + k_a), in linear memory, and its gradients.

Tensor cores do not help: every cell takes `a` hyperbolic tangents, and the special-function units, at 16 results a clock,
are the limit. So tangents are not computed one by one. With A = e^2q and B = e^2k, computed once for every position,

    tanh(q + k) = 1 − 2 / (1 + A B),      v/D + v′/D′ = (v D′ + v′ D) / (D D′),

two tangents cost one reciprocal and a few multiply-adds, in full float32 accuracy. That holds while A B and D D′ stay
within float32: for |q|, |k| <= MAX_PAIRED. Beyond it a flag tells the kernel to compute the tangents one by one.

With r = 1 / (1 + A B) the slope of a tangent is 4 A B r², so gradients take one reciprocal for two tangents as well. Their sums
have a component each: a program adds them to memory that it alone writes, component by component, since registers cannot be
indexed in a loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile_ops import LOG2E, per_key, per_row

#: Largest projected query or key for which the paired form cannot overflow: (e^4·10)² < 2^127.
MAX_PAIRED = 10.0


class TanhArg(NamedTuple):
    """Projected queries (b, h, a, rows) and keys (b, g, a, keys), contiguous; and e^2x of two components packed into
    64 bits, (b, h, a / 2, rows) and (b, g, a / 2, keys)."""

    q: Any
    k: Any
    exp_q: Any
    exp_k: Any
    v: Any  # b|1 h|1 a
    v_b: int
    v_h: int
    paired: Any  # one int: 1 where the paired form serves
    a: int  # even
    rows: int  # padded to full tiles, so that no load needs a bounds check
    keys: int


@triton.jit
def reciprocal(x, SIMILARITY: tl.constexpr):
    """1/x to about one unit in the last place; PAIR "tanh-plain" without the hardware's own instruction."""
    if SIMILARITY == "tanh":
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def load_pair(at):
    """Two components of every position in one load: this kernel is bound by loads."""
    two = tl.load(at)
    return two.to(tl.int32).to(tl.float32, bitcast=True), (two >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def tanh_sum(tanh_arg, i, j, b, h, hk, sizes, SIMILARITY: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Σ_a v_a tanh(q_a + k_a) of a tile, (i, j) or (j, i)."""
    v = tanh_arg.v + b.to(tl.int64) * tanh_arg.v_b + h.to(tl.int64) * tanh_arg.v_h
    # Pointers to rows of components, not to every position: one addition a component.
    head_q = (b * sizes.h + h).to(tl.int64) * tanh_arg.a * tanh_arg.rows
    head_k = (b * (sizes.h // sizes.k_group) + hk).to(tl.int64) * tanh_arg.a * tanh_arg.keys
    s = tl.zeros((per_row(i, KEYS_FIRST) + per_key(j, KEYS_FIRST)).shape, tl.float32)
    if tl.load(tanh_arg.paired) != 0:
        total = 0.0
        a_ptr, b_ptr = tanh_arg.exp_q + head_q // 2, tanh_arg.exp_k + head_k // 2
        for n in tl.range(0, tanh_arg.a, 2):
            v0, v1 = tl.load(v + n), tl.load(v + n + 1)
            a0, a1 = load_pair(a_ptr + i)
            b0, b1 = load_pair(b_ptr + j)
            d0 = per_row(a0, KEYS_FIRST) * per_key(b0, KEYS_FIRST) + 1.0
            d1 = per_row(a1, KEYS_FIRST) * per_key(b1, KEYS_FIRST) + 1.0
            s += (v0 * d1 + v1 * d0) * reciprocal(d0 * d1, SIMILARITY)
            total += v0 + v1
            a_ptr += tanh_arg.rows
            b_ptr += tanh_arg.keys
        s = total - 2.0 * s
    else:
        q_ptr, k_ptr = tanh_arg.q + head_q, tanh_arg.k + head_k
        for n in tl.range(0, tanh_arg.a):
            x = per_row(tl.load(q_ptr + i), KEYS_FIRST) + per_key(tl.load(k_ptr + j), KEYS_FIRST)
            # e^2x may overflow to inf: then the fraction is 0, and tanh is 1.
            s += tl.load(v + n) * (1.0 - 2.0 * reciprocal(tl.exp2(x * (2.0 * LOG2E)) + 1.0, SIMILARITY))
            q_ptr += tanh_arg.rows
            k_ptr += tanh_arg.keys
    return s


@triton.jit
def add_component(out, past, d_sum, d_v, GRAD_V: tl.constexpr):
    """Add the sums of a tile along its second axis: of d_sum at `out`, and of d_v `past` numbers behind it."""
    # Atomic, since it waits for no answer. The order of the additions is that of the loop: each number has its thread.
    tl.atomic_add(out, tl.sum(d_sum, 1), sem="relaxed")
    if GRAD_V:
        tl.atomic_add(out + past, tl.sum(d_v, 1), sem="relaxed")


@triton.jit
def add_tanh_grad(ds, tanh_arg, out, i, j, b, h, hk, sizes, SIMILARITY: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Add a tile's part of Σ ds v tanh′, along keys for rows and along rows for keys; and for rows of Σ ds tanh.

    `ds` is (i, j), or (j, i) with KEYS_FIRST. `out`: (a, keys) of a head of keys; or (2 a, rows), of which the second half is for
    Σ ds tanh. Zeros before the first tile.
    """
    GRAD_V: tl.constexpr = not KEYS_FIRST
    length = tanh_arg.keys if KEYS_FIRST else tanh_arg.rows
    past = tanh_arg.a * length
    out += j if KEYS_FIRST else i
    v = tanh_arg.v + b.to(tl.int64) * tanh_arg.v_b + h.to(tl.int64) * tanh_arg.v_h
    head_q = (b * sizes.h + h).to(tl.int64) * tanh_arg.a * tanh_arg.rows
    head_k = (b * (sizes.h // sizes.k_group) + hk).to(tl.int64) * tanh_arg.a * tanh_arg.keys
    if tl.load(tanh_arg.paired) != 0:
        a_ptr, b_ptr = tanh_arg.exp_q + head_q // 2, tanh_arg.exp_k + head_k // 2
        for n in tl.range(0, tanh_arg.a, 2):
            v0, v1 = 4.0 * tl.load(v + n), 4.0 * tl.load(v + n + 1)
            a0, a1 = load_pair(a_ptr + i)
            b0, b1 = load_pair(b_ptr + j)
            ab0 = per_row(a0, KEYS_FIRST) * per_key(b0, KEYS_FIRST)
            ab1 = per_row(a1, KEYS_FIRST) * per_key(b1, KEYS_FIRST)
            both = reciprocal((ab0 + 1.0) * (ab1 + 1.0), SIMILARITY)
            r0, r1 = (ab1 + 1.0) * both, (ab0 + 1.0) * both
            add_component(out, past, ds * (v0 * ab0 * r0 * r0), ds * (1.0 - 2.0 * r0), GRAD_V)
            add_component(out + length, past, ds * (v1 * ab1 * r1 * r1), ds * (1.0 - 2.0 * r1), GRAD_V)
            out += 2 * length
            a_ptr += tanh_arg.rows
            b_ptr += tanh_arg.keys
    else:
        q_ptr, k_ptr = tanh_arg.q + head_q, tanh_arg.k + head_k
        for n in tl.range(0, tanh_arg.a):
            x = per_row(tl.load(q_ptr + i), KEYS_FIRST) + per_key(tl.load(k_ptr + j), KEYS_FIRST)
            # e^−2|x| cannot overflow, and tanh′ is even.
            ab = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
            r = reciprocal(ab + 1.0, SIMILARITY)
            tanh_x = (1.0 - ab) * r
            add_component(
                out, past, ds * (4.0 * tl.load(v + n) * ab * r * r), ds * tl.where(x < 0, -tanh_x, tanh_x), GRAD_V
            )
            out += length
            q_ptr += tanh_arg.rows
            k_ptr += tanh_arg.keys


__all__ = ["MAX_PAIRED", "TanhArg", "add_tanh_grad", "tanh_sum"]
