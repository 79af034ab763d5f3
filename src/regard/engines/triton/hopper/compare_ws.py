"""Two matrices compared with warp specialisation, for Hopper's 16-bit products of up to 128 components.

A producer warp loads queries and keys of both matrices by TMA, a few tiles ahead. Two consumer groups of four warps own 64 rows
each and alternate in issuing both products of a tile (pingpong), so that one computes the exponentials of its cells while the
other multiplies: the special functions of two matrices take as long as their products. The kernel is persistent, and programs
take row blocks from a counter. The arithmetic of cells is that of `kernels.comparison`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.comparison import (
    above,
    add_terms,
    hide_both,
    key_blocks_of_all,
    load_norms,
    merge_rows,
    range_of_both,
    store_norms,
    store_sums,
)
from ..kernels.forward import schedule_tile
from ..kernels.tile_ops import EMPTY_MAX
from .gluon_ops import (
    CONSUMER_REGS,
    PRODUCER_REGS,
    alloc_barriers,
    alloc_head_tiles,
    alloc_tile_queue,
    head_tile,
    load_head_tile,
    next_tile,
    publish_tile,
    receive_tile,
)


@gluon.jit
def row_block(n, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group, MASK: gl.constexpr, MASK2: gl.constexpr,
              BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr):  # fmt: skip
    """Of row block n: its sequence, its head in the result and in either matrix, its first row, and the ranges of its key blocks."""
    block, head = schedule_tile(gl.cdiv(sizes.i, BLOCK_I), batch_heads, heads_per_group, n - gl.program_id(0))
    b, h_all = head // heads, head % heads
    h, h2 = gl.minimum(h_all, sizes.h - 1), gl.minimum(h_all, sizes2.h - 1)  # one head stands for all
    start = block * BLOCK_I
    first, full_from, full_to, past = key_blocks_of_all(start, b, mask, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    first2, full_from2, full_to2, past2 = key_blocks_of_all(start, b, mask2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)
    begin, both_from, both_to, end = range_of_both(
        first, full_from, full_to, past, first2, full_from2, full_to2, past2, False
    )
    return b, h_all, h, h2, start, begin, both_from, both_to, end


@gluon.jit
def producer(q_desc, k_desc, q2_desc, k2_desc, tiles, ready, free, tile_queue, tile_counter, mask, sizes, mask2, sizes2, heads, batch_heads,
             heads_per_group, blocks, MASK: gl.constexpr, MASK2: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: for every row block its queries, then its keys, of both matrices."""
    q_tiles, k_tiles, q2_tiles, k2_tiles = tiles
    q_ready, k_ready = ready
    q_free, k_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_I // 2
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < blocks:
        next_id = next_tile(tile_counter)
        b, _, h, h2, start, begin, _, _, end = row_block(
            n, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group, MASK, MASK2, BLOCK_I, BLOCK_J
        )
        for w in gl.static_range(2):
            mbarrier.wait(q_free.index(w), (tile_phase & 1) ^ 1)
            load_head_tile(q_desc, b, h, start + w * HALF, q_ready.index(w), q_tiles.index(w))
            load_head_tile(q2_desc, b, h2, start + w * HALF, q_ready.index(w), q2_tiles.index(w))
        for tile in range(begin, end):
            slot, phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            load_head_tile(k_desc, b, h // sizes.k_group, tile * BLOCK_J, k_ready.index(slot), k_tiles.index(slot))
            load_head_tile(k2_desc, b, h2 // sizes2.k_group, tile * BLOCK_J, k_ready.index(slot), k2_tiles.index(slot))
            count += 1
        publish_tile(next_id, queue_slot, queue_ready, queue_free, tile_phase)
        n = next_id
        tile_phase += 1


@gluon.jit
def consumer(
    tiles, ready, free, pingpong, tile_queue, norm, norm2, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group,
    blocks, scale2, scale2_of2, W: gl.constexpr, MASK: gl.constexpr, MASK2: gl.constexpr, RAGGED: gl.constexpr,
    MEASURE: gl.constexpr, SUMS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: rows from W · BLOCK_I/2 on of every row block."""
    q_tiles, k_tiles, q2_tiles, k2_tiles = tiles
    q_ready, k_ready = ready
    q_free, k_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_I // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_J, 16])
    q_tile, q2_tile = head_tile(q_tiles, W), head_tile(q2_tiles, W)
    zero_acc = gl.zeros([HALF, BLOCK_J], gl.float32, S)
    zeros = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
    column = gl.arange(0, BLOCK_J, gl.SliceLayout(0, S))
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < blocks:
        b, h_all, h, h2, start, begin, both_from, both_to, end = row_block(
            n, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group, MASK, MASK2, BLOCK_I, BLOCK_J
        )
        i = start + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        m, m2, l, l2, t, forbidden = zeros + EMPTY_MAX, zeros + EMPTY_MAX, zeros, zeros, zeros, zeros
        c, share, share2, total, total2 = zeros, zeros, zeros, zeros, zeros
        if SUMS:
            m, m2, c, share, share2 = load_norms(norm, norm2, b, h_all, heads, i, sizes.i)
        mbarrier.wait(q_ready.index(W), tile_phase & 1)
        begins, ends = (begin, both_from, both_to), (both_from, both_to, end)
        for SECTION in gl.static_range(
            0 if MASK == "band" or MASK2 == "band" else 1, 3 if RAGGED or MASK != "none" or MASK2 != "none" else 2
        ):
            for tile in range(begins[SECTION], ends[SECTION]):
                slot, phase = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_ready.index(slot), phase)
                mbarrier.wait(pingpong.index(W), (count & 1) ^ (1 - W))
                s = warpgroup_mma(
                    q_tile, head_tile(k_tiles, slot).permute((1, 0)), zero_acc, use_acc=False, is_async=True
                )
                s2 = warpgroup_mma(
                    q2_tile, head_tile(k2_tiles, slot).permute((1, 0)), zero_acc, use_acc=False, is_async=True
                )
                s, s2 = warpgroup_mma_wait(0, deps=(s, s2))
                mbarrier.arrive(pingpong.index(1 - W))
                mbarrier.arrive(k_free.index(slot))
                count += 1
                if SECTION != 1:
                    j = tile * BLOCK_J + column
                    s, s2 = hide_both(s, s2, i[:, None], j[None, :], b, h, h2, mask, sizes, mask2, sizes2, MASK, MASK2)
                if SUMS:
                    x, y = above(s, m[:, None], scale2, True), above(s2, m2[:, None], scale2_of2, True)
                    total, total2 = add_terms(x, y, c[:, None], total, total2, MEASURE)
                else:
                    m, l, m2, l2, t, forbidden = merge_rows(
                        s, s2, m, l, m2, l2, t, forbidden, scale2, scale2_of2, MEASURE, True, True, SECTION != 1
                    )
        mbarrier.arrive(q_free.index(W))
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase, 4)
        tile_phase += 1
        if SUMS:
            store_sums(out, out2, total, total2, share, share2, b, h_all, heads, i, sizes.i, MEASURE)
        else:
            store_norms(out, norm, norm2, m, l, m2, l2, t, forbidden, b, h_all, heads, i, sizes.i, MEASURE)


@gluon.jit
def compare_ws_kernel(
    q_desc, k_desc, q2_desc, k2_desc, tile_counter, norm, norm2, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group,
    blocks, scale2, scale2_of2, MASK: gl.constexpr, MASK2: gl.constexpr, RAGGED: gl.constexpr, MEASURE: gl.constexpr,
    SUMS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """kl or cross-entropy of row blocks of BLOCK_I rows into `out`, with the norms of both matrices; or, SUMS, of finished rows
    Σ p A and Σ q B into `out` and `out2`. RAGGED: the keys do not fill their last tile."""
    tiles = (
        alloc_head_tiles(q_desc, 2),
        alloc_head_tiles(k_desc, STAGES),
        alloc_head_tiles(q2_desc, 2),
        alloc_head_tiles(k2_desc, STAGES),
    )
    # Two arrivals a phase: a tile of either matrix.
    ready = alloc_barriers(2, 2), alloc_barriers(STAGES, 2)
    free = alloc_barriers(2, 1), alloc_barriers(STAGES, 2)
    pingpong, tile_queue = alloc_barriers(2, 1), alloc_tile_queue(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (tiles, ready, free, pingpong, tile_queue, norm, norm2, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads,
                        heads_per_group, blocks, scale2, scale2_of2, 0, MASK, MASK2, RAGGED, MEASURE, SUMS, BLOCK_I, BLOCK_J, STAGES)),
            (consumer, (tiles, ready, free, pingpong, tile_queue, norm, norm2, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads,
                        heads_per_group, blocks, scale2, scale2_of2, 1, MASK, MASK2, RAGGED, MEASURE, SUMS, BLOCK_I, BLOCK_J, STAGES)),
            (producer, (q_desc, k_desc, q2_desc, k2_desc, tiles, ready, free, tile_queue, tile_counter, mask, sizes, mask2, sizes2, heads,
                        batch_heads, heads_per_group, blocks, MASK, MASK2, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["compare_ws_kernel"]
