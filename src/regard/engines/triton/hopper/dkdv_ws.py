"""The gradients of keys and values with warp specialisation.

A program owns 128 keys, 64 for each of its two consumers. Tiles are (keys, rows), so that the first two products leave weights
and score gradients in the registers from which the last two read them: no tile is written to shared memory. Terms that are
constant along a row initialise the accumulator of the product with the output's gradient. Each key is summed in a fixed order.
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

from ..kernels.forward import schedule_tile
from ..kernels.tile_ops import LN2, row_blocks, visible_at_all
from .gluon_ops import (
    CONSUMER_REGS,
    PRODUCER_REGS,
    alloc_barriers,
    alloc_smem,
    alloc_tile_queue,
    next_tile,
    publish_tile,
    receive_tile,
    round_pairs,
    sync_threads,
    tma_load_async,
    tma_store_async,
)


@gluon.jit
def nth_block(n, first, full_from, full_to, past):
    """The n-th row block that sees some of the keys: the edges of the mask first, then those that see all keys."""
    left, edges = full_from - first, full_from - first + past - full_to
    at_edge = gl.where(n < left, first + n, full_to + n - left)
    return gl.where(n < edges, at_edge, full_from + n - edges)


@gluon.jit
def producer(q_desc, k_desc, v_desc, dy_desc, q_layout, k_layout, v_layout, dy_layout, tiles, terms, ready, free, tile_queue, tile_counter, grad, mask, key_table, sizes,
         heads, group, batch, heads_per_group, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
         BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: keys and values once, then row blocks with the terms that are constant along a row."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    q_ready, dy_ready, kv_ready = ready
    q_free, dy_free, kv_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    columns = sizes.j // BLOCK_J
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < columns * heads * batch:
        next_id = next_tile(tile_counter)
        block, head = schedule_tile(columns, heads * batch, heads_per_group, n - gl.program_id(0))
        b, out_head = head // heads, head % heads
        start = (columns - 1 - block) * BLOCK_J
        for w in gl.static_range(2):
            mbarrier.wait(kv_free.index(w), (tile_phase & 1) ^ 1)
            key = start + w * (BLOCK_J // 2)
            tma_load_async(
                k_desc, k_layout, b, out_head * group // sizes.k_group, key, kv_ready.index(w), k_tiles.index(w)
            )
            tma_load_async(
                v_desc, v_layout, b, out_head * group // sizes.v_group, key, kv_ready.index(w), v_tiles.index(w)
            )
        first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        for step in range(0, group * (past - first)):
            h = out_head * group + step // (past - first)
            i = nth_block(step % (past - first), first, full_from, full_to, past) * BLOCK_I
            slot, phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(q_free.index(slot), phase ^ 1)
            tma_load_async(q_desc, q_layout, b, h, i, q_ready.index(slot), q_tiles.index(slot))
            mbarrier.wait(dy_free.index(slot), phase ^ 1)
            tma_load_async(dy_desc, dy_layout, b, h, i, dy_ready.index(slot), dy_tiles.index(slot))
            at = (
                (b * sizes.h + h).to(gl.int64) * sizes.i
                + i
                + gl.arange(0, BLOCK_I, gl.BlockedLayout([2], [32], [1], [0]))
            )
            terms.index(4 * slot).store(gl.load(grad.norm + at))
            terms.index(4 * slot + 1).store(gl.load(grad.delta + at))
            if D_ENTROPY:
                terms.index(4 * slot + 2).store(gl.load(grad.d_entropy + at) * LN2)
            if D_DISTANCE:
                terms.index(4 * slot + 3).store(gl.load(grad.d_distance + at))
            mbarrier.arrive(q_ready.index(slot))
            count += 1
        publish_tile(next_id, queue_slot, queue_ready, queue_free, tile_phase)
        n = next_id
        tile_phase += 1


@gluon.jit
def consumer(
    dk_desc, dv_desc, dk_layout, dv_layout, tiles, terms, ready, free, tile_queue, mask, key_table, sizes, heads, group, batch, heads_per_group, scale, scale2,
    W: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: keys from W · BLOCK_J/2 on of every key block."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    q_ready, dy_ready, kv_ready = ready
    q_free, dy_free, kv_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_J // 2
    dtype: gl.constexpr = q_tiles.dtype
    # Layouts: scores (keys, rows), gradients (keys, d), an operand in registers, and vectors along the rows.
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_I, 16])
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, G, 2)
    ALONG_ROWS: gl.constexpr = gl.SliceLayout(0, S)
    # float16 weights below 2⁻¹⁴ are subnormal and lose digits: they are multiplied by 1024 first.
    FP16_SCALE: gl.constexpr = 1024.0 if dtype == gl.float16 else 1.0
    k_tile, v_tile = k_tiles.index(W), v_tiles.index(W)
    zero_acc = gl.zeros([HALF, BLOCK_I], gl.float32, S)
    columns = sizes.j // BLOCK_J
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < columns * heads * batch:
        block, head = schedule_tile(columns, heads * batch, heads_per_group, n - gl.program_id(0))
        b, out_head = head // heads, head % heads
        start = (columns - 1 - block) * BLOCK_J
        j = start + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        edges = full_from - first + past - full_to
        dk = gl.zeros([HALF, D], gl.float32, G)
        dv = gl.zeros([HALF, D], gl.float32, G)
        remaining = group * (past - first)
        mbarrier.wait(kv_ready.index(W), tile_phase & 1)
        if remaining > 0:
            mbarrier.wait(q_ready.index(count % STAGES), (count // STAGES) & 1)
        s = warpgroup_mma(k_tile, q_tiles.index(count % STAGES).permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        for member in range(0, group):
            h = out_head * group + member
            for EDGE in gl.static_range(1 if MASK != "none" else 0, -1, -1):
                for step in range(0 if EDGE or MASK == "none" else edges, edges if EDGE else past - first):
                    i = nth_block(step, first, full_from, full_to, past) * BLOCK_I + gl.arange(0, BLOCK_I, ALONG_ROWS)
                    slot, phase = count % STAGES, (count // STAGES) & 1
                    log2w = s * scale2 - terms.index(4 * slot).load(ALONG_ROWS)[None, :]
                    w = gl.exp2(log2w) * FP16_SCALE
                    if EDGE:
                        w = gl.where(visible_at_all(i[None, :], j[:, None], b, h, mask, sizes, MASK), w, 0.0)
                    dp = zero_acc - terms.index(4 * slot + 1).load(ALONG_ROWS)[None, :]
                    if D_ENTROPY:
                        dp -= terms.index(4 * slot + 2).load(ALONG_ROWS)[None, :] * log2w
                    if D_DISTANCE:
                        distance = gl.abs(i[None, :] + sizes.offset - j[:, None]).to(gl.float32)
                        dp += terms.index(4 * slot + 3).load(ALONG_ROWS)[None, :] * distance
                    w = round_pairs(w, dtype)  # rounded as the product reads it; keeping both would spill
                    p = gl.convert_layout(w, A)
                    mbarrier.wait(dy_ready.index(slot), phase)
                    dp = warpgroup_mma(v_tile, dy_tiles.index(slot).permute((1, 0)), dp, is_async=True)
                    dv = warpgroup_mma(p, dy_tiles.index(slot), dv, is_async=True)
                    dp = warpgroup_mma_wait(1, deps=(dp,))
                    ds = w.to(gl.float32) * dp * (1.0 / FP16_SCALE)
                    if EDGE:
                        ds = gl.where(w == 0.0, 0.0, ds)  # in a row that is nan, 0 · nan would reach hidden keys
                    ds = gl.convert_layout(ds.to(dtype), A)
                    # Next scores overlap with this gradient; after the last row block they are computed again and unused.
                    remaining -= 1
                    count += gl.where(remaining > 0, 1, 0)
                    mbarrier.wait(q_ready.index(count % STAGES), (count // STAGES) & 1)
                    s = warpgroup_mma(
                        k_tile, q_tiles.index(count % STAGES).permute((1, 0)), zero_acc, use_acc=False, is_async=True
                    )
                    dk = warpgroup_mma(ds, q_tiles.index(slot), dk, is_async=True)
                    s, dk, ds, dv, p = warpgroup_mma_wait(0, deps=(s, dk, ds, dv, p))
                    mbarrier.arrive(q_free.index(slot))
                    mbarrier.arrive(dy_free.index(slot))
        count += gl.where(past > first, 1, 0)
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase, 4)
        tile_phase += 1
        # The buffers of keys and values are free and take the outputs.
        k_tile.store((dk * scale).to(dtype))
        v_tile.store((dv * (1.0 / FP16_SCALE)).to(dtype))
        tma_store_async(dk_desc, dk_layout, b, out_head, start + W * HALF, k_tile)
        tma_store_async(dv_desc, dv_layout, b, out_head, start + W * HALF, v_tile)
        tma.store_wait(0)
        sync_threads()  # store_wait covers only the stores of its own thread
        mbarrier.arrive(kv_free.index(W))


@gluon.jit
def dkdv_ws_kernel(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, q_layout, k_layout, v_layout, dy_layout, dk_layout, dv_layout, tile_counter, grad, mask, key_table,
    sizes, heads, group, batch, heads_per_group, scale, scale2, D: gl.constexpr, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of key blocks of BLOCK_J keys of `heads` heads, each summed over `group` query heads; full blocks only."""
    q_tiles, dy_tiles, k_tiles, v_tiles = (
        alloc_smem(q_desc, STAGES),
        alloc_smem(dy_desc, STAGES),
        alloc_smem(k_desc, 2),
        alloc_smem(v_desc, 2),
    )
    terms = gl.allocate_shared_memory(gl.float32, [4 * STAGES, BLOCK_I], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Two arrivals a phase: a query tile and its row terms; a key tile and its values.
    ready = alloc_barriers(STAGES, 2), alloc_barriers(STAGES, 1), alloc_barriers(2, 2)
    free = alloc_barriers(STAGES, 2), alloc_barriers(STAGES, 2), alloc_barriers(2, 1)
    tiles, tile_queue = (q_tiles, dy_tiles, k_tiles, v_tiles), alloc_tile_queue(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (dk_desc, dv_desc, dk_layout, dv_layout, tiles, terms, ready, free, tile_queue, mask, key_table, sizes, heads, group, batch, heads_per_group,
                       scale, scale2, 0, D, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (consumer, (dk_desc, dv_desc, dk_layout, dv_layout, tiles, terms, ready, free, tile_queue, mask, key_table, sizes, heads, group, batch, heads_per_group,
                       scale, scale2, 1, D, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (producer, (q_desc, k_desc, v_desc, dy_desc, q_layout, k_layout, v_layout, dy_layout, tiles, terms, ready, free, tile_queue, tile_counter, grad, mask, key_table,
                    sizes, heads, group, batch, heads_per_group, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["dkdv_ws_kernel"]
