"""The gradient of queries with warp specialisation.

A program owns 128 rows, 64 for each of its two consumers, and a producer warp loads keys and values by TMA. The gradient of a
tile's scores stays in the registers from which its product with the keys reads it. That product overlaps with the scores of
the next tile, and one consumer's arithmetic with the other's products. Terms that are constant along a row initialise the
accumulator of the product with the output's gradient. The kernel is persistent, and programs take row blocks from a counter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.backward import row_terms
from ..kernels.forward import schedule_tile
from ..kernels.tile_ops import key_blocks, visible
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
    store_head_tile,
    sync_threads,
)


@gluon.jit
def producer(q_desc, dy_desc, k_desc, v_desc, tiles, ready, free, tile_queue, tile_counter, mask, row_table, sizes, heads, heads_per_group, blocks,
             MASK: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: for every row block its queries and the output's gradient, then keys and values from the last tile to the
    first."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    row_ready, k_ready, v_ready = ready
    row_free, k_free, v_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < blocks:
        next_id = next_tile(tile_counter)
        block, head = schedule_tile(gl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group, n - gl.program_id(0))
        b, h = head // sizes.h, head % sizes.h
        first, full_from, full_to, past = key_blocks(
            block * BLOCK_I, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J
        )
        for w in gl.static_range(2):
            row = block * BLOCK_I + w * (BLOCK_I // 2)
            mbarrier.wait(row_free.index(w), (tile_phase & 1) ^ 1)
            load_head_tile(q_desc, b, h, row, row_ready.index(w), q_tiles.index(w))
            load_head_tile(dy_desc, b, h, row, row_ready.index(w), dy_tiles.index(w))
        for tiles_back in range(0, past - first):
            key, slot, phase = (past - 1 - tiles_back) * BLOCK_J, count % STAGES, (count // STAGES) & 1
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            load_head_tile(k_desc, b, h // sizes.k_group, key, k_ready.index(slot), k_tiles.index(slot))
            mbarrier.wait(v_free.index(slot), phase ^ 1)
            load_head_tile(v_desc, b, h // sizes.v_group, key, v_ready.index(slot), v_tiles.index(slot))
            count += 1
        publish_tile(next_id, queue_slot, queue_ready, queue_free, tile_phase)
        n = next_id
        tile_phase += 1


@gluon.jit
def consumer(
    dq_desc, tiles, ready, free, tile_queue, grad, mask, row_table, sizes, heads, heads_per_group, blocks, scale, scale2,
    W: gl.constexpr, D: gl.constexpr, RAGGED: gl.constexpr, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: rows from W · BLOCK_I/2 on of every row block."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    row_ready, k_ready, v_ready = ready
    row_free, k_free, v_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_I // 2
    dtype: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_J, 16])
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, G, 2)
    q_tile, dy_tile = head_tile(q_tiles, W), head_tile(dy_tiles, W)
    zero_acc = gl.zeros([HALF, BLOCK_J], gl.float32, S)
    column = gl.arange(0, BLOCK_J, gl.SliceLayout(0, S))
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < blocks:
        block, head = schedule_tile(gl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group, n - gl.program_id(0))
        b, h = head // sizes.h, head % sizes.h
        start = block * BLOCK_I + W * HALF
        i = start + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, full_from, full_to, past = key_blocks(
            block * BLOCK_I, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J
        )
        lse2, _, delta, d_entropy2, d_distance = row_terms(grad, i, b, h, sizes, True, D_ENTROPY, D_DISTANCE)
        dq = gl.zeros([HALF, D], gl.float32, G)
        remaining = past - first
        mbarrier.wait(row_ready.index(W), tile_phase & 1)
        mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1)
        s = warpgroup_mma(
            q_tile, head_tile(k_tiles, count % STAGES).permute((1, 0)), zero_acc, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=(s,))
        # Tiles at one edge of the mask, fully visible tiles, tiles at the other edge.
        begins = 0, gl.maximum(past - full_to, 1 if RAGGED else 0), past - full_from
        ends = begins[1], begins[2], past - first
        for SECTION in gl.static_range(0 if RAGGED or MASK != "none" else 1, 3 if MASK == "band" else 2):
            for tiles_back in range(begins[SECTION], ends[SECTION]):
                j = (past - 1 - tiles_back) * BLOCK_J + column
                slot, phase = count % STAGES, (count // STAGES) & 1
                log2w = s * scale2 - lse2[:, None]
                w = gl.exp2(log2w)
                if SECTION != 1:
                    w = gl.where(visible(i[:, None], j[None, :], b, h, 0, mask, sizes, MASK), w, 0.0)
                dp = zero_acc - delta[:, None]
                if D_ENTROPY:
                    dp -= d_entropy2[:, None] * log2w
                if D_DISTANCE:
                    dp += d_distance[:, None] * gl.abs(i[:, None] + sizes.offset - j[None, :]).to(gl.float32)
                mbarrier.wait(v_ready.index(slot), phase)
                dp = warpgroup_mma(dy_tile, head_tile(v_tiles, slot).permute((1, 0)), dp, is_async=True)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                mbarrier.arrive(v_free.index(slot))
                ds = w * dp
                if SECTION != 1:
                    ds = gl.where(w == 0.0, 0.0, ds)  # in a row that is nan, 0 · nan would reach hidden keys
                ds = gl.convert_layout(ds.to(dtype), A)
                # Next scores overlap with this gradient; after the last tile they are computed again and unused.
                remaining -= 1
                count += gl.where(remaining > 0, 1, 0)
                mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1)
                s = warpgroup_mma(
                    q_tile, head_tile(k_tiles, count % STAGES).permute((1, 0)), zero_acc, use_acc=False, is_async=True
                )
                dq = warpgroup_mma(ds, head_tile(k_tiles, slot), dq, is_async=True)
                s, dq, ds = warpgroup_mma_wait(0, deps=(s, dq, ds))
                mbarrier.arrive(k_free.index(slot))
        count += 1
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase, 4)
        tile_phase += 1
        # The buffer of the queries is free and takes the output.
        q_tile.store((dq * scale).to(dtype))
        store_head_tile(dq_desc, b, h, start, q_tiles.index(W))
        tma.store_wait(0)
        sync_threads()  # store_wait covers only the stores of its own thread
        mbarrier.arrive(row_free.index(W))


@gluon.jit
def dq_ws_kernel(
    q_desc, dy_desc, k_desc, v_desc, dq_desc, tile_counter, grad, mask, row_table, sizes, heads, heads_per_group, blocks, scale, scale2,
    D: gl.constexpr, RAGGED: gl.constexpr, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq of row blocks of BLOCK_I rows, each with at least one key. RAGGED: the keys do not fill their last tile."""
    tiles = (
        alloc_head_tiles(q_desc, 2),
        alloc_head_tiles(dy_desc, 2),
        alloc_head_tiles(k_desc, STAGES),
        alloc_head_tiles(v_desc, STAGES),
    )
    # Two arrivals a phase: a query tile and its gradient.
    ready = alloc_barriers(2, 2), alloc_barriers(STAGES, 1), alloc_barriers(STAGES, 1)
    free = alloc_barriers(2, 1), alloc_barriers(STAGES, 2), alloc_barriers(STAGES, 2)
    tile_queue = alloc_tile_queue(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (dq_desc, tiles, ready, free, tile_queue, grad, mask, row_table, sizes, heads, heads_per_group, blocks, scale, scale2,
                        0, D, RAGGED, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (consumer, (dq_desc, tiles, ready, free, tile_queue, grad, mask, row_table, sizes, heads, heads_per_group, blocks, scale, scale2,
                        1, D, RAGGED, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (producer, (q_desc, dy_desc, k_desc, v_desc, tiles, ready, free, tile_queue, tile_counter, mask, row_table, sizes, heads,
                        heads_per_group, blocks, MASK, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["dq_ws_kernel"]
