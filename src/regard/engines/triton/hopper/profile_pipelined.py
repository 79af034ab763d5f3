"""The profile of a head, software-pipelined for Hopper's 16-bit products.

The loop is that of `column_pass_pipelined`, and the sums are those of `kernels.profile`. Blocks are squares, so a block of rows
that is n blocks from the diagonal lies within one bin of distances, unless |n| is a power of two: then an edge of a bin is its
diagonal. Thus the rows are walked in runs, each of one kind: the block on the diagonal; blocks that an edge splits; and all
others, which do the least. Distances shorter than a block fall into many bins: `near_bins_kernel` counts those.

A thread has every fourth pair of the columns of a product, and keeps sums of its own: a row of a tile has four of them, which
are added across threads when the last tile is done.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from ..kernels.forward import schedule_tile
from ..kernels.profile import BINS, bin_of
from ..kernels.tile_ops import FLOOR, store_row
from .column_pass_pipelined import issue_qk, prefetch
from .gluon_ops import alloc_barriers, alloc_smem, fold, own_cells, sync_threads, tma_load_async

#: Kinds of blocks.
NEAR, SPLIT, FAR = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def add_to_bin(x, bins, n, WARPS: gl.constexpr):
    """Add sums (j, 4) to bin n, one line of bins for each warp: no thread waits for another warp."""
    J: gl.constexpr = x.shape[0]
    of_warp = gl.sum(gl.sum(gl.reshape(x, [J // (16 * WARPS), WARPS, 64]), 2), 0)
    of_warp = gl.convert_layout(of_warp, gl.SliceLayout(1, bins.type.layout))
    slot = gl.arange(0, BINS, gl.SliceLayout(0, bins.type.layout))
    return bins + gl.where(slot[None, :] == n, of_warp[:, None], 0.0)


@gluon.jit
def add_tile(s, lse2, sums, origin, start, j, n, edge, scale2, CAUSAL: gl.constexpr, KIND: gl.constexpr,
             WARPS: gl.constexpr):  # fmt: skip
    """Add the weights of tile n to the sums. `edge`: the distance where the next bin begins, of a tile that it splits."""
    received, distance, square, best, best_tile, below, above, bins = sums
    I: gl.constexpr = s.shape[1]
    r = gl.arange(0, I, gl.SliceLayout(0, s.type.layout))
    i = n * I + r
    if KIND == NEAR and CAUSAL:
        s = gl.where(i[None, :] >= j[:, None], s, FLOOR)
    w = gl.exp2(s * scale2 - lse2)
    if KIND == NEAR:
        away = i[None, :] - j[:, None]
        others, far = gl.where(away == 0, 0.0, w), gl.maximum(away, -away).to(gl.float32)
        column, weighted = fold(w), w * far
        distance += fold(weighted)
        by_square = fold(weighted * far)
    else:
        others = w
        if KIND == SPLIT:
            away = i[None, :] - j[:, None]
            there = gl.maximum(away, -away) >= edge
            beyond = fold(gl.where(there, w, 0.0))
            within = fold(gl.where(there, 0.0, w))
            above, below, column = above + beyond, below + within, within + beyond
        else:
            column = fold(w)
            below += column
        own = (r - (r & 6)).to(gl.float32)[None, :]  # within its thread's cells: a constant of each register
        by_row, by_square = fold(w * own), fold(w * (own * own))
        first = origin + (n * I - start).to(gl.float32)  # i − j of the first cell
        by_distance = first * column + by_row
        distance += gl.maximum(by_distance, -by_distance)
        by_square += first * (by_distance + by_row)
    largest = gl.max(own_cells(others), 2)
    best_tile = gl.where(largest > best, n, best_tile)
    best = gl.maximum(largest, best)
    return received + column, distance, square + by_square, best, best_tile, below, above, bins


@gluon.jit
def add_block(k_tile, s, sums, slots, zero_acc, origin, q_desc, q_layout, lse2_desc, row_layout, b, h, start, j, n, first, past, edge,
              scale2, CAUSAL: gl.constexpr, KIND: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Add row block n, whose first products are s, to the sums. Returns the first products of the next block too."""
    HALF: gl.constexpr = BLOCK // 2
    S: gl.constexpr = s.type.layout
    count = n - first
    slot = count % STAGES
    after = gl.minimum(count + 1, past - first - 1)  # after the last block it is computed again and unused
    lse2 = slots[1].index(slot).slice(0, HALF, 1).load(S)
    next_lse2 = slots[1].index(slot).slice(HALF, HALF, 1).load(S)
    other = issue_qk(k_tile, slots, slot, zero_acc, HALF, 1)
    sums = add_tile(s, lse2, sums, origin, start, j, 2 * n, edge, scale2, CAUSAL, KIND, WARPS)
    other = warpgroup_mma_wait(0, deps=(other,))
    mbarrier.wait(slots[2].index(after % STAGES), (after // STAGES) & 1)
    s = issue_qk(k_tile, slots, after % STAGES, zero_acc, HALF, 0)
    sums = add_tile(other, next_lse2, sums, origin, start, j, 2 * n + 1, edge, scale2, CAUSAL, KIND, WARPS)
    s = warpgroup_mma_wait(0, deps=(s,))
    sync_threads()  # no thread reads this block any more
    prefetch(q_desc, q_layout, lse2_desc, row_layout, b, h, n + STAGES, past, slots, slot, BLOCK)
    return s, sums


@gluon.jit
def end_bin(sums, n, NEXT: gl.constexpr, WARPS: gl.constexpr):
    """Add the sums of the nearer bin, or of the farther one, to bin n; the other's sums go on."""
    received, distance, square, best, best_tile, below, above, bins = sums
    if NEXT:
        bins, below = add_to_bin(below, bins, n, WARPS), above
    else:
        bins = add_to_bin(above, bins, n, WARPS)
    return received, distance, square, best, best_tile, below, above * 0.0, bins


@gluon.jit
def profile_pipelined_kernel(
    q_desc, k_desc, lse2_desc, q_layout, k_layout, row_layout, out_received, out_distance, out_square, out_bins, out_tie, out_query,
    out_key, lines, sizes, heads, heads_per_group, scale2,
    D: gl.constexpr, MASK: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The profile of BLOCK_J columns; full blocks only, of as many rows as keys. `out_query`: the first row of a tile."""
    HALF: gl.constexpr = BLOCK_I // 2
    CAUSAL: gl.constexpr = MASK == "causal"
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    blocks = sizes.j // BLOCK_J
    block, head = schedule_tile(blocks, heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    at = blocks - 1 - block  # the first keys are seen by most rows, so they start first
    start = at * BLOCK_J
    j = start + gl.arange(0, BLOCK_J, gl.SliceLayout(1, S))
    first, past = at * 0, blocks
    if CAUSAL:
        first = at
    ready, kv_ready = alloc_barriers(STAGES, 2), alloc_barriers(1, 1)
    fence_async_shared()
    k_smem = alloc_smem(k_desc, 1)
    tma_load_async(k_desc, k_layout, b, h // sizes.k_group, start, kv_ready.index(0), k_smem.index(0))
    mbarrier.wait(kv_ready.index(0), 0)
    k_tile = k_smem.index(0).load(gl.DotOperandLayout(0, S, 2))
    sync_threads()
    mbarrier.invalidate(kv_ready.index(0))  # as in `column_pass_pipelined`
    fence_async_shared()
    slots = alloc_smem(q_desc, STAGES), alloc_smem(lse2_desc, STAGES), ready
    for stage in gl.static_range(STAGES):
        prefetch(q_desc, q_layout, lse2_desc, row_layout, b, h, first + stage, past, slots, stage, BLOCK_I)
    zero_acc = gl.zeros([BLOCK_J, HALF], gl.float32, S)
    r = gl.arange(0, HALF, gl.SliceLayout(0, S))
    cells = gl.where(r[None, :] - (r & 6)[None, :] == 0, r[None, :] - j[:, None], 0)
    thread_first = fold(cells)  # of each thread's first cell, r − j
    thread_keys = fold(gl.where(r[None, :] - (r & 6)[None, :] == 0, j[:, None], 0))
    origin = (thread_first + start).to(gl.float32)
    zero = origin * 0.0
    sums = zero, zero, zero, zero, thread_keys * 0, zero, zero, gl.zeros([WARPS, BINS], gl.float32, LINES)
    mbarrier.wait(ready.index(0), 0)
    s = issue_qk(k_tile, slots, 0, zero_acc, HALF, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    # The bin below an edge 2ⁿ is n. `near_bins_kernel` counts distances below the first edge.
    EDGE_BIN: gl.constexpr = 7 if BLOCK_J == 128 else 6
    NO_BIN: gl.constexpr = 32
    if not CAUSAL:  # rows before the keys, the farthest first
        levels = bin_of(at - first) - 1
        for m in range(0, levels + 1):
            level = levels - m
            for n in range(gl.maximum(at - (2 << level) + 1, first), at - (1 << level)):
                s, sums = add_block(
                    k_tile, s, sums, slots, zero_acc, origin, q_desc, q_layout, lse2_desc, row_layout, b, h, start, j, n, first, past, 0,
                    scale2, CAUSAL, FAR, BLOCK_I, STAGES, WARPS,
                )  # fmt: skip
            # These are beyond the edge of the split block.
            received, distance, square, best, best_tile, below, above, bins = sums
            sums = received, distance, square, best, best_tile, above, below, bins
            s, sums = add_block(
                k_tile, s, sums, slots, zero_acc, origin, q_desc, q_layout, lse2_desc, row_layout, b, h, start, j, at - (1 << level), first, past,
                BLOCK_J << level, scale2, CAUSAL, SPLIT, BLOCK_I, STAGES, WARPS,
            )  # fmt: skip
            sums = end_bin(sums, EDGE_BIN + level + 1, False, WARPS)
        sums = end_bin(sums, NO_BIN, True, WARPS)
    s, sums = add_block(
        k_tile, s, sums, slots, zero_acc, origin, q_desc, q_layout, lse2_desc, row_layout, b, h, start, j, at, first, past, 0,
        scale2, CAUSAL, NEAR, BLOCK_I, STAGES, WARPS,
    )  # fmt: skip
    levels = bin_of(past - 1 - at)
    for level in range(0, levels):
        s, sums = add_block(
            k_tile, s, sums, slots, zero_acc, origin, q_desc, q_layout, lse2_desc, row_layout, b, h, start, j, at + (1 << level), first, past,
            BLOCK_J << level, scale2, CAUSAL, SPLIT, BLOCK_I, STAGES, WARPS,
        )  # fmt: skip
        sums = end_bin(sums, gl.where(level == 0, NO_BIN, EDGE_BIN + level), True, WARPS)
        for n in range(at + (1 << level) + 1, gl.minimum(at + (2 << level), past)):
            s, sums = add_block(
                k_tile, s, sums, slots, zero_acc, origin, q_desc, q_layout, lse2_desc, row_layout, b, h, start, j, n, first, past, 0,
                scale2, CAUSAL, FAR, BLOCK_I, STAGES, WARPS,
            )  # fmt: skip
    sums = end_bin(sums, EDGE_BIN + levels, True, WARPS)
    received, distance, square, best, best_tile, below, above, bins = sums
    store_row(out_received, b, h, j, gl.convert_layout(gl.sum(received, 1), gl.SliceLayout(1, S)), sizes.j)
    store_row(out_distance, b, h, j, gl.convert_layout(gl.sum(distance, 1), gl.SliceLayout(1, S)), sizes.j)
    store_row(out_square, b, h, j, gl.convert_layout(gl.sum(square, 1), gl.SliceLayout(1, S)), sizes.j)
    head = (b * sizes.h + h).to(gl.int64)
    line, slot = gl.arange(0, WARPS, gl.SliceLayout(1, LINES)), gl.arange(0, BINS, gl.SliceLayout(0, LINES))
    gl.store(out_bins + ((head * lines + at * WARPS + line) * BINS)[:, None] + slot[None, :], bins)
    # The largest weight, its key and its tile; among equal ones those that come first.
    best = gl.where(thread_keys == 0, 0.0, best)
    largest = gl.max(gl.max(best, 1), 0)
    key = gl.min(gl.min(gl.where(best == largest, thread_keys, 2147483647), 1), 0)
    here = (best == largest) & (thread_keys == key)
    tile = gl.min(gl.min(gl.where(here, best_tile, 2147483647), 1), 0)
    gl.store(out_tie + head * blocks + at, largest)
    gl.store(out_query + head * blocks + at, (tile * HALF).to(gl.int64))
    gl.store(out_key + head * blocks + at, key.to(gl.int64))


__all__ = ["profile_pipelined_kernel"]
