"""Tile operations that every kernel uses: loads and stores, visible ranges, scores, norms.

A tile is a rectangle of the attention matrix that one program holds in registers. Row-owning kernels hold tiles (i, j),
column-owning kernels (j, i). Index tensors have the shape of the caller's tile, `i` (I, 1) or (1, I) and `j` the other
way round, so that one function serves both.

Scores are in base 2 (s · log₂e) from `apply_score_mods` on, since the hardware's exponential is 2ˣ; names carry a 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Score of a hidden cell. Finite, since 0 · −inf and −inf − −inf are nan; no real score comes near.
FLOOR = tl.constexpr(-1.0e30)
#: Maximum of a row that has seen no key. FLOOR times any folded scale is below it.
EMPTY_MAX = tl.constexpr(-1.0e22)
#: Replaces the maximum of a row that sees no key: every weight becomes 2^−huge = 0.
HUGE = tl.constexpr(1.0e30)


class TensorArg(NamedTuple):
    """A 4-D tensor as a kernel argument: pointer and strides."""

    ptr: Any
    b: int
    h: int
    i: int
    j: int


class Sizes(NamedTuple):
    """Sizes of the problem; query head h reads key head h // k_group and value head h // v_group."""

    h: int
    i: int
    j: int
    k_group: int
    v_group: int
    offset: int  # key position of query 0


class MaskArg(NamedTuple):
    """The mask as a kernel argument: a band around the own position, intervals of every row, or flags of every cell.

    Flat, as every tuple that a loop uses: the compiler loses strides of 1 in a tuple within a tuple.
    """

    before: int
    after: int
    lo: Any  # (b|1, r, i), contiguous
    hi: Any
    n_intervals: int  # intervals of a row
    intervals_b: int  # stride over sequences, 0 where all share one mask
    flags: Any
    flags_b: int
    flags_h: int
    flags_i: int
    flags_j: int


class TmaLayout(NamedTuple):
    """Where a head starts in the 2-D view of a tensor that TMA reads: row b·row_b + h·row_h, column h·col_h."""

    row_b: int
    row_h: int
    col_h: int


def tensor_arg(x: Tensor) -> TensorArg:
    """A tensor as a kernel argument; axes of size one get stride 0, so that they broadcast."""
    b, h, i, j = x.shape
    at_b, at_h, at_i, at_j = x.stride()
    return TensorArg(x, 0 if b == 1 else at_b, 0 if h == 1 else at_h, 0 if i == 1 else at_i, 0 if j == 1 else at_j)


def row_arg(x: Tensor) -> TensorArg:
    """A tensor (b, h, i), one number a row, as a kernel argument."""
    b, h, i = (0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return TensorArg(x, b, h, i, 0)


NO_LAYOUT = TmaLayout(0, 0, 0)


def tma_descriptor(x: Tensor, block: tuple[int, int]) -> tuple[Any, TmaLayout] | None:
    """TMA descriptor and layout of a tensor (b, h, i, d), or None where TMA cannot read it.

    TMA needs the rows of all heads in one 2-D view, and every stride a multiple of 16 bytes.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    if (view := _tma_view(x, block)) is None:
        return None
    rows, cols, layout = view
    return TensorDescriptor(x, [rows, cols], [x.stride(2), 1], list(block)), layout


def tma_fits(d: int, *wanted: tuple[Tensor, int]) -> bool:
    """Whether TMA can load tiles of so many rows and d components of each of these tensors."""
    return all(_tma_view(x, (rows, d)) is not None for x, rows in wanted)


def tma_fits_heads(*wanted: Tensor) -> bool:
    """Whether the copy engine takes tiles of single heads (b, h, i, d): every stride a multiple of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and _strided(x.shape, x.stride(), 16 // x.element_size()) for x in wanted)


@lru_cache(4096)
def _strided(shape: Any, stride: Any, per_16: int) -> bool:
    return stride[3] == 1 and all(
        n == 1 or (s > 0 and s % per_16 == 0) for n, s in zip(shape[:3], stride[:3], strict=True)
    )


def _tma_view(x: Tensor, block: tuple[int, int]) -> tuple[int, int, TmaLayout] | None:
    return None if x.data_ptr() % 16 else _tma_view_of(x.shape, x.stride(), x.element_size(), block)


@lru_cache(4096)
def _tma_view_of(shape: Any, stride: Any, bytes_each: int, block: tuple[int, int]) -> tuple[int, int, TmaLayout] | None:
    """Rows and columns of the 2-D view, and the layout of heads in it."""
    (b, h, i, d), (sb, sh, si, sd) = shape, stride
    per_16 = 16 // bytes_each
    if sd != 1 or d != block[1] or i < block[0] or si <= 0 or si % per_16:
        return None
    if b > 1 and (sb % si or sb <= 0):
        return None
    row_b = sb // si if b > 1 else 0
    if h == 1 or (sh % si == 0 and sh > 0):
        layout = TmaLayout(row_b, sh // si if h > 1 else 0, 0)
        rows, cols = (b - 1) * layout.row_b + (h - 1) * layout.row_h + i, d
    elif sh > 0 and (h - 1) * sh + d <= si and sh % per_16 == 0:
        layout = TmaLayout(row_b, 0, sh)
        rows, cols = (b - 1) * row_b + i, (h - 1) * sh + d
    else:
        return None
    return None if rows >= 2**31 else (rows, cols, layout)


@triton.constexpr_function
def wants(stats, name):
    """Whether a statistic is among those that a kernel was compiled for."""
    return name in stats


# Loads and stores.


@triton.jit
def head_ptr(x, b, h):
    """Pointer to one head of a tensor. Offsets are 64 bits wide: tensors may have more than 2³¹ elements."""
    return x.ptr + b.to(tl.int64) * x.b + h.to(tl.int64) * x.h


@triton.jit
def load_tile(x, b, h, i, d, I, D: tl.constexpr, CHECK: tl.constexpr):
    """Rows i of one head: (I, D). CHECK: rows past the end are read as 0."""
    at = head_ptr(x, b, h) + i.to(tl.int64)[:, None] * x.i + d[None, :] * x.j
    if CHECK:
        return tl.load(at, mask=(i[:, None] < I) & (d[None, :] < D), other=0.0)
    if d.shape[0] != D:
        return tl.load(at, mask=d[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def store_tile(x, b, h, i, d, value, I, D: tl.constexpr):
    at = head_ptr(x, b, h) + i.to(tl.int64)[:, None] * x.i + d[None, :] * x.j
    tl.store(at, value.to(x.ptr.dtype.element_ty), mask=(i[:, None] < I) & (d[None, :] < D))


@triton.jit
def store_row(x, b, h, i, value, I):
    tl.store(head_ptr(x, b, h) + i.to(tl.int64) * x.i, value.to(x.ptr.dtype.element_ty), mask=i < I)


@triton.jit
def tma_load(desc, layout, b, h, start):
    """Rows of one head from `start` on, by TMA. Only for full blocks: past the end of a head TMA reads the next one."""
    return desc.load([(b * layout.row_b + h * layout.row_h + start).to(tl.int32), (h * layout.col_h).to(tl.int32)])


@triton.jit
def load_block(x, desc, layout, b, h, start, i, d, I, D: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr):
    """Rows i of one head, which begin at `start`: by TMA, or else by `load_tile`."""
    if TMA:
        return tma_load(desc, layout, b, h, start)
    return load_tile(x, b, h, i, d, I, D, CHECK)


# Visibility.


@triton.jit
def key_interval(i, b, r, mask, sizes, MASK: tl.constexpr):
    """lo <= j < hi: keys that rows i see in their r-th interval. Rows past the end see none."""
    if MASK == "none":
        lo = i * 0
        hi = i * 0 + sizes.j
    elif MASK == "causal":
        lo = i * 0
        hi = tl.minimum(i + (sizes.offset + 1), sizes.j)
    elif MASK == "band":
        lo = tl.maximum(i + (sizes.offset - mask.before), 0)
        hi = tl.minimum(i + (sizes.offset + mask.after + 1), sizes.j)
    else:
        at = b.to(tl.int64) * mask.intervals_b + r * sizes.i + i
        lo = tl.load(mask.lo + at, mask=i < sizes.i, other=0)
        hi = tl.load(mask.hi + at, mask=i < sizes.i, other=0)
    return lo, tl.where(i < sizes.i, hi, 0)


@triton.jit
def key_blocks(start, b, r, row_table, mask, sizes, MASK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """Key blocks that the rows from `start` on see: first, fully visible from, to, past the last."""
    if MASK == "none":
        block = start * 0
        full_from = block
        full_to = block + sizes.j // BLOCK_J
        past = block + tl.cdiv(sizes.j, BLOCK_J)
    elif MASK == "band" or MASK == "causal":
        end = tl.minimum(start + BLOCK_I, sizes.i) - 1
        first = tl.maximum(start + sizes.offset - mask.before, 0)
        last = tl.minimum(end + sizes.offset + mask.after + 1, sizes.j)
        full_lo = tl.maximum(end + sizes.offset - mask.before, 0)
        full_hi = tl.minimum(start + sizes.offset + mask.after + 1, sizes.j)
        block = first // BLOCK_J
        past = tl.maximum(tl.cdiv(last, BLOCK_J), block)
        full_from = tl.cdiv(full_lo, BLOCK_J)
        full_to = tl.maximum(full_hi, 0) // BLOCK_J
    else:
        # From a table: a reduction over the rows here would cost time, and Triton 3.6 allocates too little shared
        # memory for it in these kernels.
        at = row_table.ptr + b.to(tl.int64) * row_table.b + r * row_table.h + (start // BLOCK_I) * 4
        block = tl.load(at)
        full_from = tl.load(at + 1)
        full_to = tl.load(at + 2)
        past = tl.load(at + 3)
    some = full_from < full_to
    return block, tl.where(some, full_from, block), tl.where(some, full_to, block), past


@triton.jit
def row_blocks(start, b, key_table, mask, sizes, MASK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """Row blocks that see the keys from `start` on: first, those that see all of them from, to, past the last."""
    if MASK == "none":
        block = start * 0
        full_from = block
        # A last key block that is not full has no fully visible tile.
        full_to = tl.where(start + BLOCK_J <= sizes.j, sizes.i // BLOCK_I, 0)
        past = block + tl.cdiv(sizes.i, BLOCK_I)
    elif MASK == "band" or MASK == "causal":
        end = tl.minimum(start + BLOCK_J, sizes.j) - 1
        # Row i sees key j where j − after − offset <= i <= j + before − offset.
        first = tl.maximum(start - mask.after - sizes.offset, 0)
        last = tl.minimum(end + mask.before - sizes.offset + 1, sizes.i)
        full_lo = tl.maximum(end - mask.after - sizes.offset, 0)
        full_hi = tl.minimum(start + mask.before - sizes.offset + 1, sizes.i)
        full_hi = tl.where(start + BLOCK_J <= sizes.j, full_hi, 0)
        block = first // BLOCK_I
        past = tl.maximum(tl.cdiv(last, BLOCK_I), block)
        full_from = tl.cdiv(full_lo, BLOCK_I)
        full_to = tl.maximum(full_hi, 0) // BLOCK_I
    else:
        # From a table: intervals belong to rows, not to columns.
        at = key_table.ptr + b.to(tl.int64) * key_table.b + (start // BLOCK_J) * 4
        block = tl.load(at)
        full_from = tl.load(at + 1)
        full_to = tl.load(at + 2)
        past = tl.load(at + 3)
    some = full_from < full_to
    return block, tl.where(some, full_from, block), tl.where(some, full_to, block), past


@triton.jit
def visible(i, j, b, h, r, mask, sizes, MASK: tl.constexpr):
    """Cells of a tile that are visible in the r-th interval of their rows."""
    lo, hi = key_interval(i, b, r, mask, sizes, MASK)
    shown = j < hi
    if MASK != "none" and MASK != "causal":
        shown = shown & (j >= lo)
    if MASK == "flags":
        head = mask.flags + b.to(tl.int64) * mask.flags_b + h.to(tl.int64) * mask.flags_h
        at = head + i.to(tl.int64) * mask.flags_i + j.to(tl.int64) * mask.flags_j
        shown = shown & (tl.load(at, mask=shown, other=0) != 0)
    return shown


@triton.jit
def visible_at_all(i, j, b, h, mask, sizes, MASK: tl.constexpr):
    """Cells of a tile that are visible in any interval of their rows."""
    shown = visible(i, j, b, h, 0, mask, sizes, MASK)
    if MASK == "intervals":
        for r in range(1, mask.n_intervals):
            shown = shown | visible(i, j, b, h, r, mask, sizes, MASK)
    return shown


# Scores.


@triton.jit
def tanh(x):
    """Accurate near 0, where 1 − 2/(e²ˣ + 1) cancels."""
    x2 = x * x
    series = x + x * x2 * (-0.33333333 + x2 * (0.13333333 + x2 * (-0.053968254 + x2 * 0.021869488)))
    tail = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -tail, tail))


@triton.jit
def modifier_ptr(modifiers, strides, n: tl.constexpr, b, h):
    """Pointer to the tensor of modifier n for one head; `strides` holds four numbers for each modifier."""
    return modifiers[n] + b.to(tl.int64) * strides[4 * n] + h.to(tl.int64) * strides[4 * n + 1]


@triton.jit
def apply_score_mods(s, i, j, b, h, modifiers, strides, caps, scale, sizes, MODIFIERS: tl.constexpr, SCALE_FOLDED: tl.constexpr, TARGET: tl.constexpr):  # fmt: skip
    """Scores from products, and their slope: d score / d (output of modifier TARGET; of the product for −1).

    SCALE_FOLDED: no modifiers and a moderate scale. The product is left unscaled, and the softmax update multiplies and
    subtracts in one FMA.
    """
    slope = tl.full(s.shape, 1.0, tl.float32)
    if not SCALE_FOLDED:
        s = s * scale
        for n in tl.static_range(len(MODIFIERS)):
            if MODIFIERS[n] == "bias":
                at = modifier_ptr(modifiers, strides, n, b, h)
                at = at + i.to(tl.int64) * strides[4 * n + 2] + j.to(tl.int64) * strides[4 * n + 3]
                s += tl.load(at, mask=(i < sizes.i) & (j < sizes.j), other=0.0).to(tl.float32)
            if MODIFIERS[n] == "bias_rows":
                at = modifier_ptr(modifiers, strides, n, b, h) + i.to(tl.int64) * strides[4 * n + 2]
                s += tl.load(at, mask=i < sizes.i, other=0.0).to(tl.float32)
            if MODIFIERS[n] == "bias_keys":
                at = modifier_ptr(modifiers, strides, n, b, h) + j.to(tl.int64) * strides[4 * n + 3]
                s += tl.load(at, mask=j < sizes.j, other=0.0).to(tl.float32)
            if MODIFIERS[n] == "alibi":
                alibi_slope = tl.load(modifier_ptr(modifiers, strides, n, b, h)).to(tl.float32)
                s -= alibi_slope * tl.abs(i + sizes.offset - j).to(tl.float32)
            if MODIFIERS[n] == "softcap":
                tanh_s = tanh(s / caps[n])
                s = caps[n] * tanh_s
                if n > TARGET:
                    slope = slope * (1.0 - tanh_s * tanh_s)
        s = s * LOG2E
        s = tl.where(s < FLOOR, FLOOR, s)  # a bias of −inf hides; this form keeps nan
    return s, slope


@triton.jit
def scores_of_product(
    s, i, j, b, h, modifiers, strides, caps, mask, sizes, scale, scale2, MODIFIERS: tl.constexpr, FOLDED: tl.constexpr, MASK: tl.constexpr,
    KEYS_FIRST: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2 from its product, FLOOR where hidden, and their slope; the tile is (i, j), with KEYS_FIRST (j, i).

    FOLDED: a moderate scale and no modifiers. Then products stay as they are. EDGE: some cells may be hidden.
    """
    at_i, at_j = per_row(i, KEYS_FIRST), per_key(j, KEYS_FIRST)
    slope = 1.0
    if len(MODIFIERS) > 0:
        s, slope = apply_score_mods(s, at_i, at_j, b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, False, -1)
    elif not FOLDED:
        s = s * scale2
    if EDGE:
        s = tl.where(visible_at_all(at_i, at_j, b, h, mask, sizes, MASK), s, FLOOR)
    return s, slope


@triton.jit
def per_row(x, KEYS_FIRST: tl.constexpr):
    """A vector over rows, broadcastable to a tile: (1, I) where the tile is (j, i), else (I, 1)."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def per_key(x, KEYS_FIRST: tl.constexpr):
    """A vector over keys, broadcastable to a tile."""
    return x[:, None] if KEYS_FIRST else x[None, :]


@triton.jit
def product(a, b, FP32: tl.constexpr):
    """a · b. FP32: at float32 accuracy by three TF32 products on tensor cores, not with the 10-bit mantissa of one."""
    return tl.dot(a, b, input_precision="tf32x3" if FP32 else "tf32")


@triton.jit
def add_product(a, b, total, FP32: tl.constexpr):
    return tl.dot(a, b, total, input_precision="tf32x3" if FP32 else "tf32")


@triton.jit
def scores_of_head(
    q, k, q_desc, q_layout, k_desc, k_layout, modifiers, strides, caps, sizes, i, j, d, b, h, start_i, start_j, scale,
    D: tl.constexpr, MODIFIERS: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores of a tile (i, j) of one head, none hidden yet. Past the end of a head TMA reads the next one: such rows must
    have weight 0, such keys be hidden."""
    q_tile = load_block(q, q_desc, q_layout, b, h, start_i, i, d, sizes.i, D, TMA, True)
    k_tile = load_block(k, k_desc, k_layout, b, h // sizes.k_group, start_j, j, d, sizes.j, D, TMA, True)
    s = product(q_tile, k_tile.T, FP32)
    s, _ = apply_score_mods(
        s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, -1
    )
    return s


@triton.jit
def load_row_values(x, b, h, i, sizes, other):
    """One number for each of rows i, from a contiguous tensor (b, h, i)."""
    return tl.load(x + (b * sizes.h + h).to(tl.int64) * sizes.i + i, mask=i < sizes.i, other=other)


@triton.jit
def norm_to_base2(m, l, SCALE_FOLDED: tl.constexpr):
    """The norm (m, l) of rows as `log_weight` takes it; one number for both where FOLD."""
    m2, log2l = m * LOG2E, tl.log2(tl.where(l == 0.0, 1.0, l))
    if SCALE_FOLDED:
        m2 = m2 + log2l
    return tl.where(l == 0.0, HUGE, m2), log2l


@triton.jit
def norm_kernel(norm, out, rows, SCALE_FOLDED: tl.constexpr, BLOCK: tl.constexpr):
    """The norm (m, l) of finished rows in base 2 for `load_norm2`, computed once instead of in every tile.

    SCALE_FOLDED: without a bias no score is huge, so lse2 replaces the pair.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(norm + 2 * row, mask=row < rows, other=0.0)
    l = tl.load(norm + 2 * row + 1, mask=row < rows, other=0.0)
    m2, log2l = norm_to_base2(m, l, SCALE_FOLDED)
    if SCALE_FOLDED:
        tl.store(out + row, m2, mask=row < rows)
    else:
        tl.store(out + 2 * row, m2, mask=row < rows)
        tl.store(out + 2 * row + 1, log2l, mask=row < rows)


@triton.jit
def load_norm2(norm, b, h, i, sizes, SCALE_FOLDED: tl.constexpr):
    """m2 and log₂ l of rows; HUGE, which makes every weight 0, for rows that see no key or are past the end."""
    row = (b * sizes.h + h).to(tl.int64) * sizes.i + i
    if SCALE_FOLDED:
        lse2 = tl.load(norm + row, mask=i < sizes.i, other=HUGE)
        return lse2, lse2
    m2 = tl.load(norm + 2 * row, mask=i < sizes.i, other=HUGE)
    return m2, tl.load(norm + 2 * row + 1, mask=i < sizes.i, other=0.0)


@triton.jit
def load_row_norm(norm, b, h, i, sizes, SCALE_FOLDED: tl.constexpr):
    """`load_norm2` from the norm (b, h, i, 2) itself, for kernels that read few rows of it."""
    row = 2 * ((b * sizes.h + h).to(tl.int64) * sizes.i + i)
    m = tl.load(norm + row, mask=i < sizes.i, other=0.0)
    l = tl.load(norm + row + 1, mask=i < sizes.i, other=0.0)
    return norm_to_base2(m, l, SCALE_FOLDED)


@triton.jit
def log_weight(s, m2, log2l, scale2, SCALE_FOLDED: tl.constexpr):
    """log₂ w of a tile from its scores and the norm of its rows, broadcast to the tile."""
    if SCALE_FOLDED:
        return s * scale2 - m2
    return s - m2 - log2l
