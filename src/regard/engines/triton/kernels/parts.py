"""float32 products by 16-bit parts: queries and keys as two of float16, values and weights as three of bfloat16.

TF32 splits every tile again in every program, and its parts take twice the shared memory. Rows of queries and keys are scaled by a power of
two, so that float16 holds their largest component; three products of parts are a score. Values keep their range in bfloat16, and
six products are an output. The smallest products come first, in a sum of their own for every tile: tensor cores cut off what they add to a larger
sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launcher import INTERPRETED
from .tile_ops import head_ptr, load_tile

#: The interpreter multiplies bfloat16 as the integers that it keeps them in.
INTERPRETER = tl.constexpr(INTERPRETED)
#: The largest component of a scaled row lies between 2¹³ and 2¹⁴: far below float16's largest number, and parts of components down to 2⁻¹⁷ of it
#: keep all their bits.
HEADROOM = tl.constexpr(13)


@triton.jit
def power_of_2(n):
    """2ⁿ for −126 <= n <= 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves_kernel(x, out, scale, H, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of x (b, h, n, D) in two parts, (b, h, n, 2 D) of float16, and by what their product is multiplied, (b, h, n)."""
    blocks = tl.cdiv(N, ROWS)
    head = tl.program_id(0) // blocks
    i, d = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    a = load_tile(x, head // H, head % H, i, d, N, D, True)
    bits = tl.max(tl.abs(a), 1).to(tl.int32, bitcast=True)
    n = tl.minimum(tl.maximum((bits >> 23) - 127, -100), 126)
    n = n - HEADROOM
    a = a * power_of_2(-n)[:, None]
    high = a.to(tl.float16)
    low = (a - high.to(tl.float32)).to(tl.float16)
    row = head.to(tl.int64) * N + i
    at = out + row[:, None] * (2 * D) + d[None, :]
    inside = (i[:, None] < N) & (d[None, :] < D)
    tl.store(at, high, mask=inside)
    tl.store(at + D, low, mask=inside)
    tl.store(scale + row, power_of_2(n), mask=i < N)


@triton.jit
def thirds_kernel(x, out, H, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of x (b, h, n, D) in three parts, (b, h, n, 3 D) of bfloat16."""
    blocks = tl.cdiv(N, ROWS)
    head = tl.program_id(0) // blocks
    i, d = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    first, second, third = thirds(load_tile(x, head // H, head % H, i, d, N, D, True))
    at = out + (head.to(tl.int64) * N + i)[:, None] * (3 * D) + d[None, :]
    inside = (i[:, None] < N) & (d[None, :] < D)
    tl.store(at, first, mask=inside)
    tl.store(at + D, second, mask=inside)
    tl.store(at + 2 * D, third, mask=inside)


@triton.jit
def thirds(x):
    """Three parts of a tile, the largest first."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def add_part(a, b, total):
    if INTERPRETER:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, total)


@triton.jit
def load_part(x, b, h, i, d, I, D: tl.constexpr, OF: tl.constexpr, PART: tl.constexpr):
    """Part PART of OF of the rows i of one head."""
    at = head_ptr(x, b, h) + i.to(tl.int64)[:, None] * (OF * D) + (d[None, :] + PART * D)
    return tl.load(at, mask=(i[:, None] < I) & (d[None, :] < D), other=0.0)


@triton.jit
def without_nan(x):
    """Sums of products with lower parts, of which infinity makes nan; that of the highest parts keeps both."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def product_of_halves(q_high, q_low, k_high, k_low):
    """q · kᵀ of scaled rows."""
    s = add_part(q_low, k_high.T, tl.zeros([q_high.shape[0], k_high.shape[0]], tl.float32))
    return add_part(q_high, k_high.T, without_nan(add_part(q_high, k_low.T, s)))


@triton.jit
def product_of_thirds(p, first, second, third):
    """p · v, from three parts of v."""
    high, middle, low = thirds(p)
    y = add_part(low, first, tl.zeros([p.shape[0], first.shape[1]], tl.float32))
    y = add_part(middle, second, add_part(high, third, y))
    return add_part(high, first, without_nan(add_part(high, second, add_part(middle, first, y))))


__all__ = ["halves_kernel", "load_part", "product_of_halves", "product_of_thirds", "thirds_kernel"]
