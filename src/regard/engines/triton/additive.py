"""Additive attention: s = Σ_a v_a tanh(q_a + k_a), in linear memory.

No product of tensor cores gives it: every cell takes `a` hyperbolic tangents, and the special-function units, which
make 16 numbers a clock, are the limit. So the tangents are not taken one by one. With A = e^2q and B = e^2k, made once
for every position,

    tanh(q + k) = 1 − 2 / (1 + A B),      v/D + v′/D′ = (v D′ + v′ D) / (D D′),

two cells' worth of tanh is one reciprocal and a few multiply-adds, in full float32 accuracy. That holds while A B and
D D′ stay within float32: for |q|, |k| <= TAME. Beyond, the tangents are taken one by one (the kernel looks at a flag).
Imports `tiles`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import LOG2E, across, down

#: Largest projected query or key for which the paired form cannot overflow: (e^4·10)² < 2^127.
TAME = 10.0


class TanhPair(NamedTuple):
    """Projected queries and keys with positions last, (b, h, a, i) and (b, g, a, j): as they are, and e^2x. No gaps."""

    q: Any
    k: Any
    grown_q: Any
    grown_k: Any
    v: Any  # b|1 h|1 a
    v_b: int
    v_h: int
    tame: Any  # one int: 1 where the paired form serves
    a: int  # even


@triton.jit
def reciprocal(x, PAIR: tl.constexpr):
    """1/x to about one unit in the last place; PAIR "tanh-plain" without the hardware's own instruction."""
    if PAIR == "tanh":
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def tanh_sum(pair, i, j, b, h, hk, sizes, PAIR: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Σ_a v_a tanh(q_a + k_a) of a tile, (i, j) or (j, i)."""
    v = pair.v + b.to(tl.int64) * pair.v_b + h.to(tl.int64) * pair.v_h
    # Pointers of whole rows of components, not of every position: one addition a component.
    head_q = (b * sizes.h + h).to(tl.int64) * pair.a * sizes.i
    head_k = (b * (sizes.h // sizes.k_group) + hk).to(tl.int64) * pair.a * sizes.j
    s = tl.zeros((down(i, KEYS_FIRST) + across(j, KEYS_FIRST)).shape, tl.float32)
    i, j = tl.minimum(i, sizes.i - 1), tl.minimum(j, sizes.j - 1)  # past the end anything may stand
    if tl.load(pair.tame) != 0:
        total = 0.0
        a0_ptr, b0_ptr = pair.grown_q + head_q, pair.grown_k + head_k
        a1_ptr, b1_ptr = a0_ptr + sizes.i, b0_ptr + sizes.j
        for n in tl.range(0, pair.a, 2):
            v0, v1 = tl.load(v + n), tl.load(v + n + 1)
            a0, a1 = down(tl.load(a0_ptr + i), KEYS_FIRST), down(tl.load(a1_ptr + i), KEYS_FIRST)
            b0, b1 = across(tl.load(b0_ptr + j), KEYS_FIRST), across(tl.load(b1_ptr + j), KEYS_FIRST)
            d0, d1 = a0 * b0 + 1.0, a1 * b1 + 1.0
            s += (v0 * d1 + v1 * d0) * reciprocal(d0 * d1, PAIR)
            total += v0 + v1
            a0_ptr += 2 * sizes.i
            a1_ptr += 2 * sizes.i
            b0_ptr += 2 * sizes.j
            b1_ptr += 2 * sizes.j
        s = total - 2.0 * s
    else:
        q_ptr, k_ptr = pair.q + head_q, pair.k + head_k
        for n in tl.range(0, pair.a):
            x = down(tl.load(q_ptr + i), KEYS_FIRST) + across(tl.load(k_ptr + j), KEYS_FIRST)
            # e^2x may overflow to inf: then the fraction is 0, and tanh is 1.
            s += tl.load(v + n) * (1.0 - 2.0 * reciprocal(tl.exp2(x * (2.0 * LOG2E)) + 1.0, PAIR))
            q_ptr += sizes.i
            k_ptr += sizes.j
    return s


__all__ = ["TAME", "TanhPair", "tanh_sum"]
