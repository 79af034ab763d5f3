"""The profile of a head: all sums of finished rows that a corpus run takes, in one pass.

A program owns a block of keys and walks the row blocks that see them, as in `column_pass`, in a fixed order and without
atomics. Distances are counted in bins: 0, 1, then from each power of two to the next. A tile of weights far from the
diagonal lies within one bin, so that the sums of its columns are those of the bin too; only tiles across an edge of a bin
look at every cell. `chosen_keys_kernel` has the weights of every row on the few keys that a corpus run names, and
`head_sums_kernel` adds up a head's rows, keys and tiles: PyTorch takes forty kernels for that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import schedule_tile
from .tile_ops import (
    apply_score_mods,
    head_ptr,
    load_block,
    load_norm2,
    load_tile,
    log_weight,
    product,
    row_blocks,
    store_row,
    visible_at_all,
)

#: Bins of distances: a power of two above the bits of any distance.
BINS = tl.constexpr(32)


@triton.jit
def bin_of(distance):
    """The bin of whole distances below 2²⁴: the exponent of a float."""
    return tl.maximum((distance.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def weights_of_tile(
    k_tile, q, q_desc, q_layout, norm, modifiers, strides, caps, mask, sizes, i, j, d, b, h, start, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Weights (j, i) of rows i, which begin at `start`."""
    m2, log2l = load_norm2(norm, b, h, i, sizes, SCALE_FOLDED)
    q_tile = load_block(q, q_desc, q_layout, b, h, start, i, d, sizes.i, D, TMA, EDGE)
    s = product(k_tile, q_tile.T, FP32)
    s, _ = apply_score_mods(
        s, i[None, :], j[:, None], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
    )
    w = tl.exp2(log_weight(s, m2[None, :], log2l[None, :], scale2, SCALE_FOLDED))
    if EDGE:
        w = tl.where(visible_at_all(i[None, :], j[:, None], b, h, mask, sizes, MASK), w, 0.0)
    return w


@triton.jit
def add_far_tile(w, column, d0, distance, square, BLOCK_I: tl.constexpr):
    """Add Σ w |i − j| and Σ w (i − j)² of a tile on one side of the diagonal; d0 is i − j in its first row."""
    r = tl.arange(0, BLOCK_I).to(tl.float32)[None, :]
    by_row, by_row2 = tl.sum(w * r, 1), tl.sum(w * (r * r), 1)
    return distance + tl.abs(d0 * column + by_row), square + d0 * (d0 * column + 2.0 * by_row) + by_row2


@triton.jit
def add_near_tile(w, away, lowest, highest, distance, square, bins):
    """The same of a tile whose distances `away` fall into bins `lowest` to `highest`, and its sums by bin."""
    far, own_bin = away.to(tl.float32), bin_of(away)
    weighted = w * far
    slot = tl.arange(0, BINS)
    for n in range(lowest, highest + 1):
        bins += tl.where(slot == n, tl.sum(tl.sum(tl.where(own_bin == n, w, 0.0), 1), 0), 0.0)
    return distance + tl.sum(weighted, 1), square + tl.sum(weighted * far, 1), bins


@triton.jit
def profile_kernel(
    q, k, q_desc, q_layout, norm, modifiers, strides, caps, mask, key_table, out_received, out_distance, out_square, out_bins, out_tie,
    out_query, out_key, sizes, heads, heads_per_group, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, TMA: tl.constexpr,
    EDGES: tl.constexpr, EVEN_BLOCKS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The profile of BLOCK_J columns."""
    blocks = tl.cdiv(sizes.j, BLOCK_J)
    block, head = schedule_tile(blocks, heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = (blocks - 1 - block) * BLOCK_J  # the first keys are seen by most rows, so they start first
    j, d = start + tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_D)
    k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
    received, distance, square = (
        tl.zeros([BLOCK_J], tl.float32),
        tl.zeros([BLOCK_J], tl.float32),
        tl.zeros([BLOCK_J], tl.float32),
    )
    best, best_block = tl.zeros([BLOCK_J], tl.float32), tl.zeros([BLOCK_J], tl.int32)
    in_bin, bins, now = tl.zeros([BLOCK_J], tl.float32), tl.zeros([BINS], tl.float32), start * 0
    slot = tl.arange(0, BINS)
    first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    for SECTION in tl.static_range(3):
        if EDGES or SECTION == 1:
            begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
            end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
            for n in range(begin, end):
                i = n * BLOCK_I + tl.arange(0, BLOCK_I)
                w = weights_of_tile(
                    k_tile, q, q_desc, q_layout, norm, modifiers, strides, caps, mask, sizes, i, j, d, b, h, n * BLOCK_I, scale, scale2,
                    D, MODIFIERS, MASK, SCALE_FOLDED, FP32, TMA and (EVEN_BLOCKS or SECTION == 1), SECTION != 1,
                )  # fmt: skip
                column = tl.sum(w, 1)
                received += column
                others = w
                if SECTION != 1 or MASK != "causal":  # a fully visible tile of a causal mask is below the diagonal
                    others = tl.where(i[None, :] == j[:, None], 0.0, w)
                largest = tl.max(others, 1)
                best_block = tl.where(largest > best, n, best_block)
                best = tl.maximum(best, largest)
                corner = n * BLOCK_I - start
                low, high = corner - (BLOCK_J - 1), corner + (BLOCK_I - 1)  # of i − j
                lowest = bin_of(tl.maximum(tl.maximum(low, -high), 0))
                highest = bin_of(tl.maximum(high, -low))
                if lowest == highest:
                    distance, square = add_far_tile(
                        w, column, (n * BLOCK_I - j).to(tl.float32), distance, square, BLOCK_I
                    )
                    if lowest != now:
                        bins += tl.where(slot == now, tl.sum(in_bin, 0), 0.0)
                        in_bin = tl.zeros([BLOCK_J], tl.float32)
                        now = lowest
                    in_bin += column
                else:
                    away = tl.abs(i[None, :] - j[:, None])
                    distance, square, bins = add_near_tile(w, away, lowest, highest, distance, square, bins)
    bins += tl.where(slot == now, tl.sum(in_bin, 0), 0.0)
    store_row(out_received, b, h, j, received, sizes.j)
    store_row(out_distance, b, h, j, distance, sizes.j)
    store_row(out_square, b, h, j, square, sizes.j)
    program = (b * sizes.h + h).to(tl.int64) * blocks + start // BLOCK_J
    tl.store(out_bins + program * BINS + slot, bins)
    # The row of the largest weight, from its tile once more: the same product has the same bits.
    best = tl.where(j == 0, 0.0, best)
    at = tl.argmax(best, 0)
    row_start = tl.sum(tl.where(j == start + at, best_block, 0), 0) * BLOCK_I
    i = row_start + tl.arange(0, BLOCK_I)
    w = weights_of_tile(
        k_tile, q, q_desc, q_layout, norm, modifiers, strides, caps, mask, sizes, i, j, d, b, h, row_start, scale, scale2,
        D, MODIFIERS, MASK, SCALE_FOLDED, FP32, False, True,
    )  # fmt: skip
    others = tl.where((j[:, None] == start + at) & (i[None, :] != j[:, None]), w, 0.0)
    tl.store(out_tie + program, tl.max(best, 0))
    tl.store(out_query + program, (row_start + tl.argmax(tl.max(others, 0), 0)).to(tl.int64))
    tl.store(out_key + program, (start + at).to(tl.int64))


@triton.jit
def chosen_keys_kernel(
    q, k, norm, targets, targets_b, modifiers, strides, caps, mask, out, sizes, blocks, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Σ of the weights of BLOCK_I rows on the first key (but for the first row), the previous key and the target."""
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = head // sizes.h, head % sizes.h
    i, d = block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True).to(tl.float32)
    m2, log2l = load_norm2(norm, b, h, i, sizes, SCALE_FOLDED)
    target = tl.load(targets + b.to(tl.int64) * targets_b + i, mask=i < sizes.i, other=-1).to(tl.int32)
    for CHOICE in tl.static_range(3):
        j = tl.where(i > 0, 0, -1) if CHOICE == 0 else i - 1 if CHOICE == 1 else target
        there = (j >= 0) & (j < sizes.j) & (i < sizes.i)
        j = tl.where(there, j, 0)
        at = head_ptr(k, b, h // sizes.k_group) + j.to(tl.int64)[:, None] * k.i + d[None, :] * k.j
        k_rows = tl.load(at, mask=there[:, None] & (d[None, :] < D), other=0.0).to(tl.float32)
        s = tl.sum(q_tile * k_rows, 1)[:, None]
        s, _ = apply_score_mods(
            s, i[:, None], j[:, None], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
        )
        w = tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))
        shown = there[:, None] & visible_at_all(i[:, None], j[:, None], b, h, mask, sizes, MASK)
        w = tl.where(shown, tl.where(w > 1.0, 1.0, w), 0.0)  # not the product of the norm: it may be an ulp off
        tl.store(out + (head.to(tl.int64) * 3 + CHOICE) * blocks + block, tl.sum(tl.sum(w, 1), 0))


@triton.jit
def near_bins_kernel(
    q, k, norm, out, lines, before, sizes, blocks, scale2,
    D: tl.constexpr, FP32: tl.constexpr, CAUSAL: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The weights of BLOCK rows at distances below REACH, summed by bin: into line `before` and on of the `lines` of their head.

    A tile has few cells and one warp, which adds them up alone.
    """
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    b, h = head // sizes.h, head % sizes.h
    i, d, slot = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BINS)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)
    lse2, _ = load_norm2(norm, b, h, i, sizes, True)
    bins = tl.zeros([BINS], tl.float32)
    ahead = 0 if CAUSAL else REACH // BLOCK
    for n in range(tl.maximum(block - REACH // BLOCK, 0), tl.minimum(block + ahead + 1, blocks)):
        j = n * BLOCK + tl.arange(0, BLOCK)
        k_tile = load_tile(k, b, h // sizes.k_group, j, d, sizes.j, D, True)
        w = tl.exp2(product(q_tile, k_tile.T, FP32) * scale2 - lse2[:, None])
        away = tl.abs(i[:, None] - j[None, :])
        there = (i[:, None] < sizes.i) & (j[None, :] < sizes.j) & (away < REACH)
        if CAUSAL:
            there = there & (j[None, :] <= i[:, None])
        w = tl.where(there, tl.where(w > 1.0, 1.0, w), 0.0)  # not the product of the norm: it may be an ulp off
        own_bin, apart = bin_of(away), tl.abs(block - n) * BLOCK
        for at in range(bin_of(tl.maximum(apart - BLOCK + 1, 0)), bin_of(tl.minimum(apart + BLOCK, REACH) - 1) + 1):
            bins += tl.where(slot == at, tl.sum(tl.sum(tl.where(own_bin == at, w, 0.0), 1), 0), 0.0)
    tl.store(out + (head * lines + before + block) * BINS + slot, bins)


@triton.jit
def row_of_largest(q, k, norm, first, key, b, h, sizes, scale2, CAUSAL: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                   BLOCK_D: tl.constexpr):  # fmt: skip
    """The row, of ROWS from `first` on, that puts the largest weight on a key that is not its own."""
    i, d = first.to(tl.int32) + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    q_tile = load_tile(q, b, h, i, d, sizes.i, D, True).to(tl.float32)
    at = head_ptr(k, b, h // sizes.k_group) + key * k.i + d * k.j
    k_row = tl.load(at, mask=d < D, other=0.0).to(tl.float32)
    lse2, _ = load_norm2(norm, b, h, i, sizes, True)
    log2w = tl.sum(q_tile * k_row[None, :], 1) * scale2 - lse2
    there = (i < sizes.i) & (i != key)
    if CAUSAL:
        there = there & (i > key)
    return first + tl.argmax(tl.where(there, log2w, float("-inf")), 0)


@triton.jit
def add_up(x, n, BLOCK: tl.constexpr):
    """The sum of n float32 in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < n, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def add_up_rows(entropy, max_score, norm, n, BLOCK: tl.constexpr):
    """Sums of the entropy and of the largest weight of n rows, and of their squares."""
    e1, e2 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    w1, w2 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        e = tl.load(entropy + i, mask=i < n, other=0.0)
        e = tl.where(e < 0, 0.0, e).to(tl.float64)
        s = tl.load(max_score + i, mask=i < n, other=float("-inf"))
        m, l = tl.load(norm + 2 * i, mask=i < n, other=0.0), tl.load(norm + 2 * i + 1, mask=i < n, other=0.0)
        # A row without keys has l = 0, m = -inf and a largest score of -inf: its weight is 0.
        w = (tl.exp(s - tl.where(l == 0, 0.0, m)) / tl.where(l == 0, 1.0, l)).to(tl.float64)
        e1, e2, w1, w2 = e1 + e, e2 + e * e, w1 + w, w2 + w * w
    return tl.sum(e1, 0), tl.sum(e2, 0), tl.sum(w1, 0), tl.sum(w2, 0)


@triton.jit
def add_up_by_position(x, n, BLOCK: tl.constexpr):
    """Sums of n numbers by the bin of their position. Blocks but the first lie within one bin."""
    slot, j = tl.arange(0, BINS), tl.arange(0, BLOCK)
    first, own_bin = tl.load(x + j, mask=j < n, other=0.0).to(tl.float64), bin_of(j)
    bins = tl.zeros([BINS], tl.float64)
    for at in range(0, bin_of(tl.minimum(n, BLOCK) - 1) + 1):
        bins += tl.where(slot == at, tl.sum(tl.where(own_bin == at, first, 0.0), 0), 0.0)
    for start in range(BLOCK, n, BLOCK):
        numbers = tl.load(x + start + j, mask=start + j < n, other=0.0).to(tl.float64)
        bins += tl.where(slot == bin_of(start), tl.sum(numbers, 0), 0.0)
    return bins


@triton.jit
def head_sums_kernel(
    entropy, max_score, norm, chosen, received, distance, square, bins, tie, query, key, out, out_place, q, k, norm2, sizes, rows,
    chosen_blocks, lines, blocks, scale2, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of one head over its rows, keys and tiles, in float64 and in the order of `core/rows/head_profile.SUMS`.

    ROWS: `query` is the first of so many rows, among which the largest weight is searched; 1: it is the row itself.
    """
    head = tl.program_id(0).to(tl.int64)
    e1, e2, w1, w2 = add_up_rows(entropy + head * rows, max_score + head * rows, norm + 2 * head * rows, rows, BLOCK)
    slot, line = tl.arange(0, BINS), tl.arange(0, 64)
    by_distance = tl.zeros([64, BINS], tl.float64)
    for start in range(0, lines, 64):
        at = ((head * lines + start + line) * BINS)[:, None] + slot[None, :]
        by_distance += tl.load(bins + at, mask=(start + line)[:, None] < lines, other=0.0).to(tl.float64)
    by_distance = tl.sum(by_distance, 0)
    out += head * (10 + 2 * BINS)
    tl.store(out + 0, e1)
    tl.store(out + 1, e2)
    tl.store(out + 2, w1)
    tl.store(out + 3, w2)
    tl.store(out + 4, tl.sum(by_distance, 0))
    tl.store(out + 5, add_up(distance + head * rows, rows, BLOCK))
    tl.store(out + 6, add_up(square + head * rows, rows, BLOCK))
    for choice in range(0, 3):  # the first key, the previous key, the target
        weight = add_up(chosen + (head * 3 + choice) * chosen_blocks, chosen_blocks, 128)
        tl.store(out + tl.where(choice == 0, 8, tl.where(choice == 1, 7, 9)), weight)
    tl.store(out + 10 + slot, by_distance)
    tl.store(out + 10 + BINS + slot, add_up_by_position(received + head * rows, rows, BLOCK))
    largest, place = -1.0, head * 0
    for start in range(0, blocks, 128):
        at = start + tl.arange(0, 128)
        weights = tl.load(tie + head * blocks + at, mask=at < blocks, other=-1.0)
        here = tl.max(weights, 0)
        place = tl.where(here > largest, start + tl.argmax(weights, 0), place)
        largest = tl.maximum(here, largest)
    tl.store(out_place + head * 3, largest.to(tl.float64))  # type: ignore[attr-defined]  # a tensor after the loop
    row, column = tl.load(query + head * blocks + place), tl.load(key + head * blocks + place)
    if ROWS > 1:
        row = row_of_largest(
            q, k, norm2, row, column, head // sizes.h, head % sizes.h, sizes, scale2, CAUSAL, D, ROWS, BLOCK_D
        )
    tl.store(out_place + head * 3 + 1, row.to(tl.float64))
    tl.store(out_place + head * 3 + 2, column.to(tl.float64))


__all__ = ["BINS", "chosen_keys_kernel", "head_sums_kernel", "near_bins_kernel", "profile_kernel"]
