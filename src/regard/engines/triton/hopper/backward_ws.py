"""All gradients of products in one pass with warp specialisation.

A program owns 128 keys, 64 for each of its two consumers, and visits the row blocks that see them. Each score is computed once:
tiles are (keys, rows), so that weights stay in the registers from which the gradient of values reads them. Score gradients go to
shared memory, where both consumers read them for the gradients of keys and for their halves of a part of dq, the product with
these keys. A warp of its own adds the parts in global memory, key block after key block: each row block counts the parts that it
has, and a part waits for its turn, so that sums have the same bits in every run. It waits only for tiles that were taken from the
counter before its own: they belong to programs that run, however many of them the GPU runs at a time.
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
from ..kernels.tile_ops import LN2, key_blocks, row_blocks, visible_at_all
from .gluon_ops import (
    CONSUMER_REGS,
    PRODUCER_REGS,
    alloc_barriers,
    alloc_smem,
    alloc_tile_queue,
    async_reduce_add,
    async_store,
    await_stores,
    load_acquire,
    publish_tile,
    receive_tile,
    round_pairs,
    sync_threads,
    tma_load_async,
    tma_store_async,
)


@gluon.jit
def schedule_keys(n, columns, heads, batch, heads_per_group):
    """Key block, batch and head of tile n. The first key blocks start first: under a causal mask they take longest."""
    block, head = schedule_tile(columns, heads * batch, heads_per_group, n - gl.program_id(0))
    return columns - 1 - block, head // heads, head % heads


@gluon.jit
def producer(q_desc, k_desc, v_desc, dy_desc, q_layout, k_layout, v_layout, dy_layout, tiles, terms, ready, free, tile_queue, tile_counter, grad, mask, sizes,
         heads, group, batch, heads_per_group, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
         BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: keys and values once, then row blocks with the terms that are constant along a row."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    q_ready, dy_ready, kv_ready = ready
    q_free, dy_free, kv_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    columns = sizes.j // BLOCK_J
    row = gl.arange(0, BLOCK_I, gl.BlockedLayout([BLOCK_I // 32], [32], [1], [0]))
    n, count, tile_phase = gl.atomic_add(tile_counter, 1), 0, 0
    publish_tile(n, queue_slot, queue_ready, queue_free, tile_phase)
    while n < columns * heads * batch:
        block, b, out_head = schedule_keys(n, columns, heads, batch, heads_per_group)
        mbarrier.wait(kv_free.index(0), (tile_phase & 1) ^ 1)
        for w in gl.static_range(2):
            key = block * BLOCK_J + w * (BLOCK_J // 2)
            tma_load_async(
                k_desc, k_layout, b, out_head * group // sizes.k_group, key, kv_ready.index(0), k_tiles.index(w)
            )
            tma_load_async(
                v_desc, v_layout, b, out_head * group // sizes.v_group, key, kv_ready.index(0), v_tiles.index(w)
            )
        first, full_from, full_to, past = row_blocks(block * BLOCK_J, b, None, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        for step in range(0, group * (past - first)):
            h = out_head * group + step // (past - first)
            i = (past - 1 - step % (past - first)) * BLOCK_I
            slot, phase = count % (STAGES + 1), (count // (STAGES + 1)) & 1
            mbarrier.wait(q_free.index(slot), phase ^ 1)
            tma_load_async(q_desc, q_layout, b, h, i, q_ready.index(slot), q_tiles.index(slot))
            at = (b * sizes.h + h).to(gl.int64) * sizes.i + i + row
            terms.index(4 * slot).store(gl.load(grad.norm + at))
            terms.index(4 * slot + 1).store(gl.load(grad.delta + at))
            if D_ENTROPY:
                terms.index(4 * slot + 2).store(gl.load(grad.d_entropy + at) * LN2)
            if D_DISTANCE:
                terms.index(4 * slot + 3).store(gl.load(grad.d_distance + at))
            mbarrier.arrive(q_ready.index(slot))
            slot, phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(dy_free.index(slot), phase ^ 1)
            tma_load_async(dy_desc, dy_layout, b, h, i, dy_ready.index(slot), dy_tiles.index(slot))
            count += 1
        # Taken late: a tile that waited behind this one would keep others waiting for its parts.
        n = gl.atomic_add(tile_counter, 1)
        tile_phase += 1
        publish_tile(n, queue_slot, queue_ready, queue_free, tile_phase)


@gluon.jit
def weights_and_dp(s, terms, q_slot, scale2, dtype: gl.constexpr, D_ENTROPY: gl.constexpr, FP16_SCALE: gl.constexpr):
    """Weights of a tile, rounded as the products read them, and the terms of their gradient that initialise the accumulator of the
    product with the output's gradient."""
    ALONG_ROWS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    log2w = s * scale2 - terms.index(4 * q_slot).load(ALONG_ROWS)[None, :]
    dp = gl.zeros_like(s) - terms.index(4 * q_slot + 1).load(ALONG_ROWS)[None, :]
    if D_ENTROPY:
        dp -= terms.index(4 * q_slot + 2).load(ALONG_ROWS)[None, :] * log2w
    return round_pairs(gl.exp2(log2w) * FP16_SCALE, dtype), dp


@gluon.jit
def issue_dq_half(ds_tile, k_tile, dq, use_acc, W: gl.constexpr, D: gl.constexpr):
    """Issue consumer W's half of the product of score gradients (64 keys, rows) with these keys: 64 of 128 columns, or of 128 rows."""
    if D == 128:
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile.slice(64 * W, 64, 1), dq, use_acc=use_acc, is_async=True)
    else:
        dq = warpgroup_mma(ds_tile.slice(64 * W, 64, 1).permute((1, 0)), k_tile, dq, use_acc=use_acc, is_async=True)
    return dq


@gluon.jit
def hand_over(dq, dq_tile, dq_ready, dq_free, count):
    """Hand half a part of dq to the warp that adds it. It lies in the order of registers, 32 of each thread, which makes 128-bit
    stores without bank conflicts; `reorder_kernel` restores rows and columns."""
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 1, 3, 5)).reshape([128, 32])
    mbarrier.wait(dq_free.index(0), (count & 1) ^ 1)
    dq_tile.store(dq)
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(dq_ready.index(0))


@gluon.jit
def consumer(
    dk_desc, dv_desc, dk_layout, dv_layout, tiles, ds_tiles, dq_tiles, terms, ready, free, shared, tile_queue, mask, sizes, heads, group, batch, heads_per_group,
    scale, scale2, W: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: keys from W · BLOCK_J/2 on of every key block. `count` counts row blocks over all key blocks."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    q_ready, dy_ready, kv_ready = ready
    q_free, dy_free, kv_free = free
    ds_ready, dq_ready, dq_free, kv_read = shared
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_J // 2
    dtype: gl.constexpr = q_tiles.dtype
    # Layouts: scores (keys, rows), gradients (keys, d), an operand in registers, vectors along the rows, and half a dq.
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_I, 16])
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, G, 2)
    ALONG_ROWS: gl.constexpr = gl.SliceLayout(0, S)
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    # float16 weights below 2⁻¹⁴ are subnormal and lose digits: they are multiplied by 1024 first.
    FP16_SCALE: gl.constexpr = 1024.0 if dtype == gl.float16 else 1.0
    k_tile, v_tile, dq_tile = k_tiles.index(W), v_tiles.index(W), dq_tiles.index(W)
    zero_acc, zero_dq = gl.zeros([HALF, BLOCK_I], gl.float32, S), gl.zeros([64, 64], gl.float32, DQ)
    columns = sizes.j // BLOCK_J
    n, count, tile_phase = receive_tile(queue_slot, queue_ready, queue_free, 0, 4), 0, 0
    while n < columns * heads * batch:
        block, b, out_head = schedule_keys(n, columns, heads, batch, heads_per_group)
        start = block * BLOCK_J
        j = start + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, full_from, full_to, past = row_blocks(start, b, None, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        steps = group * (past - first)
        dk = gl.zeros([HALF, D], gl.float32, G)
        dv = gl.zeros([HALF, D], gl.float32, G)
        mbarrier.wait(kv_ready.index(0), tile_phase & 1)
        if steps > 0:
            mbarrier.wait(q_ready.index(count % (STAGES + 1)), (count // (STAGES + 1)) & 1)
        s = warpgroup_mma(
            k_tile, q_tiles.index(count % (STAGES + 1)).permute((1, 0)), zero_acc, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=(s,))
        block_i = past
        for step in range(0, steps):
            block_i = gl.where(block_i > first, block_i, past) - 1
            q_slot, slot, phase = count % (STAGES + 1), count % STAGES, (count // STAGES) & 1
            at_edge = (block_i < full_from) | (block_i >= full_to)
            i = block_i * BLOCK_I + gl.arange(0, BLOCK_I, ALONG_ROWS)
            w, dp = weights_and_dp(s, terms, q_slot, scale2, dtype, D_ENTROPY, FP16_SCALE)
            if MASK != "none":
                if at_edge:
                    w = gl.where(visible_at_all(i[None, :], j[:, None], b, out_head, mask, sizes, MASK), w, 0.0)
            if D_DISTANCE:
                distance = gl.abs(i[None, :] + sizes.offset - j[:, None]).to(gl.float32)
                dp += terms.index(4 * q_slot + 3).load(ALONG_ROWS)[None, :] * distance
            p = gl.convert_layout(w, A)
            mbarrier.wait(dy_ready.index(slot), phase)
            dp = warpgroup_mma(v_tile, dy_tiles.index(slot).permute((1, 0)), dp, is_async=True)
            dv = warpgroup_mma(p, dy_tiles.index(slot), dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = w.to(gl.float32) * dp * (1.0 / FP16_SCALE)
            if MASK != "none":
                if at_edge:
                    ds = gl.where(w == 0.0, 0.0, ds)  # in a row that is nan, 0 · nan would reach hidden keys
            ds_tiles.index(2 * (count & 1) + W).store(ds.to(dtype))
            fence_async_shared()
            sync_threads()
            mbarrier.arrive(ds_ready.index(0))
            dq = issue_dq_half(ds_tiles.index(2 * (count & 1) + W), k_tile, zero_dq, False, W, D)
            mbarrier.wait(ds_ready.index(0), count & 1)
            dq = issue_dq_half(ds_tiles.index(2 * (count & 1) + 1 - W), k_tiles.index(1 - W), dq, True, W, D)
            dv, p = warpgroup_mma_wait(2, deps=(dv, p))
            mbarrier.arrive(dy_free.index(slot))
            # After the last row block, scores are computed again and unused.
            next_count = count + gl.where(step + 1 < steps, 1, 0)
            next_slot = next_count % (STAGES + 1)
            mbarrier.wait(q_ready.index(next_slot), (next_count // (STAGES + 1)) & 1)
            s = warpgroup_mma(k_tile, q_tiles.index(next_slot).permute((1, 0)), zero_acc, use_acc=False, is_async=True)
            dk = warpgroup_mma(ds_tiles.index(2 * (count & 1) + W), q_tiles.index(q_slot), dk, is_async=True)
            dq = warpgroup_mma_wait(2, deps=(dq,))
            hand_over(dq, dq_tile, dq_ready, dq_free, count)
            s, dk = warpgroup_mma_wait(0, deps=(s, dk))
            mbarrier.arrive(q_free.index(q_slot))
            count += 1
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase + 1, 4)
        # The buffers of keys and values take the outputs, when both consumers have read the keys.
        mbarrier.arrive(kv_read.index(0))
        mbarrier.wait(kv_read.index(0), tile_phase & 1)
        k_tile.store((dk * scale).to(dtype))
        v_tile.store((dv * (1.0 / FP16_SCALE)).to(dtype))
        tma_store_async(dk_desc, dk_layout, b, out_head, start + W * HALF, k_tile)
        tma_store_async(dv_desc, dv_layout, b, out_head, start + W * HALF, v_tile)
        tma.store_wait(0)
        sync_threads()  # store_wait covers only the stores of its own thread
        mbarrier.arrive(kv_free.index(0))
        tile_phase += 1


@gluon.jit
def dq_adder(
    dq_desc, dq_tiles, shared, tile_queue, turns, mask, sizes, heads, group, batch, heads_per_group,
    D: gl.constexpr, MASK: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
):  # fmt: skip
    """The warp that adds parts of dq in global memory, those of a row block from its first key block on.

    `turns` counts the parts that a row block has. The first one is stored, so the memory needs no zeros.
    """
    ds_ready, dq_ready, dq_free, kv_read = shared
    queue_slot, queue_ready, queue_free = tile_queue
    columns = sizes.j // BLOCK_J
    n, count, tile_phase = receive_tile(queue_slot, queue_ready, queue_free, 0, 1), 0, 0
    while n < columns * heads * batch:
        block, b, out_head = schedule_keys(n, columns, heads, batch, heads_per_group)
        first, full_from, full_to, past = row_blocks(block * BLOCK_J, b, None, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        for step in range(0, group * (past - first)):
            h = b * sizes.h + out_head * group + step // (past - first)
            i = past - 1 - step % (past - first)
            edges = key_blocks(i * BLOCK_I, b, 0, None, mask, sizes, MASK, BLOCK_I, BLOCK_J)
            turn = block - edges[0]
            parts = turns + h * (sizes.i // BLOCK_I) + i
            tile = h * (sizes.i * D // 4096) + 2 * i
            while load_acquire(parts) < turn:  # while the consumers compute this part
                pass
            mbarrier.wait(dq_ready.index(0), count & 1)
            for w in gl.static_range(2):
                if turn > 0:
                    async_reduce_add(dq_desc, [(tile + w) * 128, 0], dq_tiles.index(w))
                else:
                    async_store(dq_desc, [(tile + w) * 128, 0], dq_tiles.index(w))
            tma.store_wait(0)
            sync_threads()
            mbarrier.arrive(dq_free.index(0))
            await_stores()
            sync_threads()
            gl.atomic_add(parts, 1, sem="release", scope="gpu")
            count += 1
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase + 1, 1)
        tile_phase += 1


@gluon.jit
def backward_ws_kernel(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, dq_desc, q_layout, k_layout, v_layout, dy_layout, dk_layout, dv_layout, counters, grad, mask,
    sizes, heads, group, batch, heads_per_group, scale, scale2, D: gl.constexpr, MASK: gl.constexpr, D_ENTROPY: gl.constexpr, D_DISTANCE: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of key blocks of BLOCK_J keys of `heads` heads, each summed over `group` query heads, and the sum of ds · k in float32.

    Full blocks only. `counters`: zeros, the tile counter and the parts of every row block.
    """
    q_tiles, dy_tiles, k_tiles, v_tiles = (
        alloc_smem(q_desc, STAGES + 1),
        alloc_smem(dy_desc, STAGES),
        alloc_smem(k_desc, 2),
        alloc_smem(v_desc, 2),
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_J // 2, BLOCK_I], q_desc.dtype)
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [4, BLOCK_J // 2, BLOCK_I], ds_layout)
    dq_tiles = alloc_smem(dq_desc, 2)
    terms = gl.allocate_shared_memory(gl.float32, [4 * (STAGES + 1), BLOCK_I], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Two arrivals a phase: a query tile and its row terms. Four: both halves of keys and values.
    ready = alloc_barriers(STAGES + 1, 2), alloc_barriers(STAGES, 1), alloc_barriers(1, 4)
    free = alloc_barriers(STAGES + 1, 2), alloc_barriers(STAGES, 2), alloc_barriers(1, 2)
    # Between the consumers, and to the adder and back.
    shared = alloc_barriers(1, 2), alloc_barriers(1, 2), alloc_barriers(1, 1), alloc_barriers(1, 2)
    tiles, tile_queue = (q_tiles, dy_tiles, k_tiles, v_tiles), alloc_tile_queue(3)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (dk_desc, dv_desc, dk_layout, dv_layout, tiles, ds_tiles, dq_tiles, terms, ready, free, shared, tile_queue, mask, sizes, heads, group, batch,
                       heads_per_group, scale, scale2, 0, D, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (consumer, (dk_desc, dv_desc, dk_layout, dv_layout, tiles, ds_tiles, dq_tiles, terms, ready, free, shared, tile_queue, mask, sizes, heads, group, batch,
                       heads_per_group, scale, scale2, 1, D, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (producer, (q_desc, k_desc, v_desc, dy_desc, q_layout, k_layout, v_layout, dy_layout, tiles, terms, ready, free, tile_queue, counters, grad, mask,
                    sizes, heads, group, batch, heads_per_group, MASK, D_ENTROPY, D_DISTANCE, BLOCK_I, BLOCK_J, STAGES)),
            (dq_adder, (dq_desc, dq_tiles, shared, tile_queue, counters + 1, mask, sizes, heads, group, batch, heads_per_group, D, MASK, BLOCK_I, BLOCK_J)),
        ],
        [4, 1, 1], [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["backward_ws_kernel"]
