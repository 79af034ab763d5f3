"""Gradients of two compared matrices with warp specialisation, for Hopper's 16-bit products of up to 128 components.

One kernel for queries, which walk over keys, and for keys, which walk over queries (KEYS_FIRST): a program owns 128 of the ones,
64 for each of its two consumers, and a producer warp loads tiles of the others. The gradients of a tile's scores stay in the
registers from which their products read them. These overlap with the scores of the next tile, and one consumer's arithmetic
with the other's products. The kernel is persistent, and programs take blocks from a counter.
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

from ..kernels.comparison import hide_both, key_blocks_of_all, load_row_terms, range_of_both, score_grads, unit
from ..kernels.forward import schedule_tile
from ..kernels.tile_ops import row_blocks, store_tile
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
def owned_block(n, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group, MASK: gl.constexpr, MASK2: gl.constexpr,
                KEYS_FIRST: gl.constexpr, OWN: gl.constexpr, WALK: gl.constexpr):  # fmt: skip
    """Of block n: its sequence, its head in the result and in either matrix, where it starts, and the ranges of blocks that it meets."""
    blocks = gl.cdiv(sizes.j if KEYS_FIRST else sizes.i, OWN)
    block, head = schedule_tile(blocks, batch_heads, heads_per_group, n - gl.program_id(0))
    b, h_all = head // heads, head % heads
    h, h2 = gl.minimum(h_all, sizes.h - 1), gl.minimum(h_all, sizes2.h - 1)  # one head stands for all
    if KEYS_FIRST:
        start = (blocks - 1 - block) * OWN  # the first keys are seen by most rows, so they start first
        first, full_from, full_to, past = row_blocks(start, b, mask, mask, sizes, MASK, WALK, OWN)
        first2, full_from2, full_to2, past2 = row_blocks(start, b, mask2, mask2, sizes2, MASK2, WALK, OWN)
    else:
        start = block * OWN
        first, full_from, full_to, past = key_blocks_of_all(start, b, mask, mask, sizes, MASK, OWN, WALK)
        first2, full_from2, full_to2, past2 = key_blocks_of_all(start, b, mask2, mask2, sizes2, MASK2, OWN, WALK)
    begin, both_from, both_to, end = range_of_both(
        first, full_from, full_to, past, first2, full_from2, full_to2, past2, False
    )
    return b, h_all, h, h2, start, begin, both_from, both_to, end


@gluon.jit
def producer(own_desc, walk_desc, own2_desc, walk2_desc, tiles, ready, free, tile_queue, tile_counter, mask, sizes, mask2, sizes2, heads,
             batch_heads, heads_per_group, blocks, MASK: gl.constexpr, MASK2: gl.constexpr, KEYS_FIRST: gl.constexpr,
             OWN: gl.constexpr, WALK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: for every block the owned tiles, then those that it meets, of both matrices."""
    own_tiles, walk_tiles, own2_tiles, walk2_tiles = tiles
    own_ready, walk_ready = ready
    own_free, walk_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = OWN // 2
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < blocks:
        next_id = next_tile(tile_counter)
        b, _, h, h2, start, begin, _, _, end = owned_block(
            n, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group, MASK, MASK2, KEYS_FIRST, OWN, WALK
        )
        own_h, walk_h = h, h // sizes.k_group
        own_h2, walk_h2 = h2, h2 // sizes2.k_group
        if KEYS_FIRST:
            own_h, walk_h, own_h2, walk_h2 = walk_h, own_h, walk_h2, own_h2
        for w in gl.static_range(2):
            mbarrier.wait(own_free.index(w), (tile_phase & 1) ^ 1)
            load_head_tile(own_desc, b, own_h, start + w * HALF, own_ready.index(w), own_tiles.index(w))
            load_head_tile(own2_desc, b, own_h2, start + w * HALF, own_ready.index(w), own2_tiles.index(w))
        for tile in range(begin, end):
            slot, phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(walk_free.index(slot), phase ^ 1)
            load_head_tile(walk_desc, b, walk_h, tile * WALK, walk_ready.index(slot), walk_tiles.index(slot))
            load_head_tile(walk2_desc, b, walk_h2, tile * WALK, walk_ready.index(slot), walk2_tiles.index(slot))
            count += 1
        publish_tile(next_id, queue_slot, queue_ready, queue_free, tile_phase)
        n = next_id
        tile_phase += 1


@gluon.jit
def consumer(
    tiles, ready, free, pingpong, tile_queue, row_terms, all_rows, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group,
    blocks, scale, scale2, scale_of2, scale2_of2, W: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, MASK: gl.constexpr, MASK2: gl.constexpr,
    RAGGED: gl.constexpr, MEASURE: gl.constexpr, KEYS_FIRST: gl.constexpr, GRAD: gl.constexpr, GRAD2: gl.constexpr, OWN: gl.constexpr, WALK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: OWN/2 positions from W · OWN/2 on of every block."""
    own_tiles, walk_tiles, own2_tiles, walk2_tiles = tiles
    own_ready, walk_ready = ready
    own_free, walk_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = OWN // 2
    dtype: gl.constexpr = own_tiles.dtype
    dtype2: gl.constexpr = own2_tiles.dtype
    WIDTH: gl.constexpr = own_tiles.shape[4]
    WIDTH2: gl.constexpr = own2_tiles.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALK, 16])
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    G2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH2, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, G, 2)
    A2: gl.constexpr = gl.DotOperandLayout(0, G2, 2)
    own_tile, own2_tile = head_tile(own_tiles, W), head_tile(own2_tiles, W)
    zero_acc = gl.zeros([HALF, WALK], gl.float32, S)
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < blocks:
        b, h_all, h, h2, start, begin, both_from, both_to, end = owned_block(
            n, mask, sizes, mask2, sizes2, heads, batch_heads, heads_per_group, MASK, MASK2, KEYS_FIRST, OWN, WALK
        )
        start += W * HALF
        own_at = start + gl.arange(0, HALF, gl.SliceLayout(1, S))
        rows = load_row_terms(row_terms, all_rows, b, h_all, heads, own_at, sizes.i, MEASURE)  # unused with KEYS_FIRST
        grad, grad2 = gl.zeros([HALF, WIDTH], gl.float32, G), gl.zeros([HALF, WIDTH2], gl.float32, G2)
        mbarrier.wait(own_ready.index(W), tile_phase & 1)
        s, s2 = zero_acc, zero_acc
        if begin < end:
            slot = count % STAGES
            mbarrier.wait(walk_ready.index(slot), (count // STAGES) & 1)
            s = warpgroup_mma(own_tile, head_tile(walk_tiles, slot).permute((1, 0)), zero_acc, use_acc=False, is_async=True)  # fmt: skip
            s2 = warpgroup_mma(own2_tile, head_tile(walk2_tiles, slot).permute((1, 0)), zero_acc, use_acc=False, is_async=True)  # fmt: skip
            s, s2 = warpgroup_mma_wait(0, deps=(s, s2))
        EDGES: gl.constexpr = RAGGED or MASK != "none" or MASK2 != "none"
        BANDS: gl.constexpr = MASK == "band" or MASK2 == "band" or (KEYS_FIRST and EDGES)
        # Of a key under causal masks alone every edge comes before every fully visible tile.
        FIRST_EDGES: gl.constexpr = KEYS_FIRST and MASK == "causal" and MASK2 == "causal" and not RAGGED
        if FIRST_EDGES:
            both_from, both_to = end - (both_to - both_from), end
        begins, ends = (begin, both_from, both_to), (both_from, both_to, end)
        for SECTION in gl.static_range(0 if BANDS else 1, 3 if EDGES and not FIRST_EDGES else 2):
            for tile in range(begins[SECTION], ends[SECTION]):
                walk_at = tile * WALK + gl.arange(0, WALK, gl.SliceLayout(0, S))
                if SECTION != 1:
                    i, j = (walk_at[None, :], own_at[:, None]) if KEYS_FIRST else (own_at[:, None], walk_at[None, :])
                    s, s2 = hide_both(s, s2, i, j, b, h, h2, mask, sizes, mask2, sizes2, MASK, MASK2)
                rows_here = (
                    load_row_terms(row_terms, all_rows, b, h_all, heads, walk_at, sizes.i, MEASURE)
                    if KEYS_FIRST
                    else rows
                )
                ds, ds2 = score_grads(
                    s, s2, rows_here, 1.0, 1.0, scale2, scale2_of2, MEASURE, True, True, KEYS_FIRST, SECTION != 1
                )
                ds, ds2 = gl.convert_layout(ds.to(dtype), A), gl.convert_layout(ds2.to(dtype2), A2)
                # After the last tile its scores are computed again and unused.
                slot, after = count % STAGES, count + gl.where(tile + 1 < end, 1, 0)
                following = after % STAGES
                mbarrier.wait(walk_ready.index(following), (after // STAGES) & 1)
                mbarrier.wait(pingpong.index(W), (count & 1) ^ (1 - W))
                if GRAD:
                    grad = warpgroup_mma(ds, head_tile(walk_tiles, slot), grad, is_async=True)
                if GRAD2:
                    grad2 = warpgroup_mma(ds2, head_tile(walk2_tiles, slot), grad2, is_async=True)
                s = warpgroup_mma(own_tile, head_tile(walk_tiles, following).permute((1, 0)), zero_acc, use_acc=False, is_async=True)  # fmt: skip
                s2 = warpgroup_mma(own2_tile, head_tile(walk2_tiles, following).permute((1, 0)), zero_acc, use_acc=False, is_async=True)  # fmt: skip
                mbarrier.arrive(pingpong.index(1 - W))
                if GRAD and GRAD2:
                    s, s2, grad, grad2, ds, ds2 = warpgroup_mma_wait(0, deps=(s, s2, grad, grad2, ds, ds2))
                elif GRAD:
                    s, s2, grad, ds = warpgroup_mma_wait(0, deps=(s, s2, grad, ds))
                else:
                    s, s2, grad2, ds2 = warpgroup_mma_wait(0, deps=(s, s2, grad2, ds2))
                mbarrier.arrive(walk_free.index(slot))
                count += 1
        mbarrier.arrive(own_free.index(W))
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase, 4)
        tile_phase += 1
        at, at2 = start + gl.arange(0, HALF, gl.SliceLayout(1, G)), start + gl.arange(0, HALF, gl.SliceLayout(1, G2))
        owners = sizes.j if KEYS_FIRST else sizes.i
        if GRAD:
            store_tile(out, b, h_all, at, gl.arange(0, WIDTH, gl.SliceLayout(0, G)), grad * (scale * unit(MEASURE, False)), owners, D)  # fmt: skip
        if GRAD2:
            store_tile(out2, b, h_all, at2, gl.arange(0, WIDTH2, gl.SliceLayout(0, G2)), grad2 * (scale_of2 * unit(MEASURE, True)), owners, D2)  # fmt: skip


@gluon.jit
def compare_grads_ws_kernel(
    own_desc, walk_desc, own2_desc, walk2_desc, tile_counter, row_terms, all_rows, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads,
    heads_per_group, blocks, scale, scale2, scale_of2, scale2_of2, D: gl.constexpr, D2: gl.constexpr, MASK: gl.constexpr, MASK2: gl.constexpr,
    RAGGED: gl.constexpr, MEASURE: gl.constexpr, KEYS_FIRST: gl.constexpr, GRAD: gl.constexpr, GRAD2: gl.constexpr, OWN: gl.constexpr, WALK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of the queries of both matrices, or of their keys. RAGGED: some tile is not full."""
    tiles = (
        alloc_head_tiles(own_desc, 2),
        alloc_head_tiles(walk_desc, STAGES),
        alloc_head_tiles(own2_desc, 2),
        alloc_head_tiles(walk2_desc, STAGES),
    )
    # Two arrivals a phase: a tile of either matrix.
    ready = alloc_barriers(2, 2), alloc_barriers(STAGES, 2)
    free = alloc_barriers(2, 1), alloc_barriers(STAGES, 2)
    pingpong, tile_queue = alloc_barriers(2, 1), alloc_tile_queue(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (tiles, ready, free, pingpong, tile_queue, row_terms, all_rows, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads,
                        heads_per_group, blocks, scale, scale2, scale_of2, scale2_of2, 0, D, D2, MASK, MASK2, RAGGED, MEASURE, KEYS_FIRST,
                        GRAD, GRAD2, OWN, WALK, STAGES)),
            (consumer, (tiles, ready, free, pingpong, tile_queue, row_terms, all_rows, out, out2, mask, sizes, mask2, sizes2, heads, batch_heads,
                        heads_per_group, blocks, scale, scale2, scale_of2, scale2_of2, 1, D, D2, MASK, MASK2, RAGGED, MEASURE, KEYS_FIRST,
                        GRAD, GRAD2, OWN, WALK, STAGES)),
            (producer, (own_desc, walk_desc, own2_desc, walk2_desc, tiles, ready, free, tile_queue, tile_counter, mask, sizes, mask2, sizes2,
                        heads, batch_heads, heads_per_group, blocks, MASK, MASK2, KEYS_FIRST, OWN, WALK, STAGES)),
        ],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["compare_grads_ws_kernel"]
