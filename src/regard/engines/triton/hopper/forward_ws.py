"""The forward pass with warp specialisation, for Hopper's 16-bit products of up to 256 components.

A producer warp loads queries, keys and values by TMA, a few tiles ahead. Two consumer groups of four warps own 64 rows each.
Both products of a tile overlap with arithmetic: while the tensor cores add tile n − 1 to the output, a consumer computes the
weights of tile n. The consumers alternate in issuing products (pingpong), so that one computes weights while the other
multiplies. The kernel is persistent, one program a multiprocessor, and programs take tiles from a counter, since under a mask
some tiles take far longer than others.

The softmax update and the epilogue are those of `kernels.forward`. The kernel is written in Gluon, Triton's lower-level
language; `tile_config` selects it only for Triton versions that it was tested with.
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

from ..kernels.forward import online_softmax_update, schedule_tile, store_row_stats, store_tile_max
from ..kernels.tile_ops import EMPTY_MAX, FLOOR, head_ptr, key_blocks, visible, wants
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
def producer(q_desc, k_desc, v_desc, tiles, ready, free, tile_queue, tile_counter, mask, row_table, sizes, heads, heads_per_group, blocks,
         MASK: gl.constexpr, SHARED_KV: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: for every row block, its queries, then keys and values from the last tile to the first. It also takes the
    next row block from the counter and publishes it when all loads of this one are issued."""
    q_tiles, k_tiles, v_tiles = tiles
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
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
            mbarrier.wait(q_free.index(w), (tile_phase & 1) ^ 1)
            load_head_tile(q_desc, b, h, block * BLOCK_I + w * (BLOCK_I // 2), q_ready.index(w), q_tiles.index(w))
        for tiles_back in range(0, past - first):
            row, slot, phase = (past - 1 - tiles_back) * BLOCK_J, count % STAGES, (count // STAGES) & 1
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            load_head_tile(k_desc, b, h // sizes.k_group, row, k_ready.index(slot), k_tiles.index(slot))
            if not SHARED_KV:
                mbarrier.wait(v_free.index(slot), phase ^ 1)
                load_head_tile(v_desc, b, h // sizes.v_group, row, v_ready.index(slot), v_tiles.index(slot))
            count += 1
        publish_tile(next_id, queue_slot, queue_ready, queue_free, tile_phase)
        n = next_id
        tile_phase += 1


@gluon.jit
def masked_softmax_update(s, m, l, t, mean_distance, mass, argmax, group_max, i, j, visit, b, h, keys, mask, tile_maxima, tiles_per_group, sizes, scale2, MASK: gl.constexpr,
               STATS: gl.constexpr, TILE_MAXIMA: gl.constexpr,
               EDGE: gl.constexpr):  # fmt: skip
    """`online_softmax_update` of one tile. EDGE: the tile is masked first."""
    if EDGE:
        s = gl.where(visible(i[:, None], j[None, :], b, h, 0, mask, sizes, MASK), s, FLOOR)
    key_mass = s
    if wants(STATS, "mass"):
        key_mass = gl.load(head_ptr(keys, b, h) + j.to(gl.int64) * keys.j, mask=j < sizes.j, other=0.0)[None, :]
    m, l, t, mean_distance, mass, argmax, p, alpha, tile_max = online_softmax_update(
        s, m, l, t, mean_distance, mass, argmax, i, j, key_mass, scale2, sizes.offset, STATS, True,
    )  # fmt: skip
    if TILE_MAXIMA:
        group_max = store_tile_max(tile_maxima, tiles_per_group, group_max, tile_max, visit, b, h, i, sizes)
    return m, l, t, mean_distance, mass, argmax, group_max, p, alpha


@gluon.jit
def issue_scores(q_tile, k_tile, zero_acc, D: gl.constexpr):
    """The scores of a tile, issued. Tiles are as wide as a power of two; D = 192 leaves out what fills up a tile of 256."""
    if D == 192:
        q_tail, k_tail = q_tile.slice(128, 64, 1), k_tile.slice(128, 64, 1)
        q_tile, k_tile = q_tile.slice(0, 128, 1), k_tile.slice(0, 128, 1)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    return s


@gluon.jit
def issue_output(p, v_tile, y, y_tail, E: gl.constexpr):
    """A tile's part of the output, issued. E = 192: `y` has the first 128 components and `y_tail` the other 64."""
    if E == 192:
        y = warpgroup_mma(p, v_tile.slice(0, 128, 1), y, is_async=True)
        P_TAIL: gl.constexpr = gl.DotOperandLayout(0, y_tail.type.layout, 2)
        y_tail = warpgroup_mma(gl.convert_layout(p, P_TAIL), v_tile.slice(128, 64, 1), y_tail, is_async=True)
    else:
        y = warpgroup_mma(p, v_tile, y, is_async=True)
    return y, y_tail


@gluon.jit
def await_output(y, y_tail, p, E: gl.constexpr):
    """The output, once all products are done."""
    if E == 192:
        y, y_tail, p = warpgroup_mma_wait(0, deps=(y, y_tail, p))
    else:
        y, p = warpgroup_mma_wait(0, deps=(y, p))
    return y, y_tail, p


@gluon.jit
def scale_rows(y, factor):
    return y * gl.convert_layout(factor, gl.SliceLayout(1, y.type.layout))[:, None]


@gluon.jit
def finished_rows(y, share, empty, dtype: gl.constexpr):
    """Rows divided by their sums; zeros for rows without keys."""
    return gl.where(gl.convert_layout(empty, gl.SliceLayout(1, y.type.layout))[:, None], 0.0, scale_rows(y, share)).to(
        dtype
    )


@gluon.jit
def consumer(
    y_desc, tiles, y_tiles, ready, free, pingpong, tile_queue, keys, sink, mask, row_table, out, tile_maxima, tiles_per_group, groups, sizes, heads, heads_per_group, blocks, scale2,
    W: gl.constexpr, D: gl.constexpr, E: gl.constexpr, RAGGED: gl.constexpr, REUSE: gl.constexpr, MASK: gl.constexpr, SHARED_KV: gl.constexpr,
    STATS: gl.constexpr, SINK: gl.constexpr, TILE_MAXIMA: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: rows from W · BLOCK_I/2 on of every row block.

    `tile_phase` counts row blocks; its lowest bit is the phase of the mbarriers that change once a row block.
    """
    q_tiles, k_tiles, v_tiles = tiles
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_I // 2
    dtype: gl.constexpr = y_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_J, 16])
    E_HEAD: gl.constexpr = 128 if E == 192 else E
    Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E_HEAD, 16])
    Y_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUTPUTS: gl.constexpr = 2 if E == 192 else 1  # products of a tile with values, pending beside its scores
    P: gl.constexpr = gl.DotOperandLayout(0, Y, 2)
    q_tile = head_tile(q_tiles, W)
    zero_acc = gl.zeros([HALF, BLOCK_J], gl.float32, S)
    zeros = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
    column = gl.arange(0, BLOCK_J, gl.SliceLayout(0, S))
    n, count, tile_phase, step = gl.program_id(0), 0, 0, 0
    while n < blocks:
        block, head = schedule_tile(gl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group, n - gl.program_id(0))
        b, h = head // sizes.h, head % sizes.h
        start = block * BLOCK_I + W * HALF
        i = start + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, full_from, full_to, past = key_blocks(
            block * BLOCK_I, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J
        )
        m, l, t, mean_distance, mass, group_max = zeros + EMPTY_MAX, zeros, zeros, zeros, zeros, zeros
        argmax = gl.full([HALF], 2147483647, gl.int32, gl.SliceLayout(1, S))
        y, y_tail = gl.zeros([HALF, E_HEAD], gl.float32, Y), zeros
        if E == 192:
            y_tail = gl.zeros([HALF, 64], gl.float32, Y_TAIL)
        mbarrier.wait(q_ready.index(W), tile_phase & 1)

        # The last tile comes first: no product with values is pending yet.
        slot, phase = count % STAGES, (count // STAGES) & 1
        mbarrier.wait(k_ready.index(slot), phase)
        s = issue_scores(q_tile, head_tile(k_tiles, slot), zero_acc, D)
        s = warpgroup_mma_wait(0, deps=(s,))
        if not SHARED_KV:
            mbarrier.arrive(k_free.index(slot))
        m, l, t, mean_distance, mass, argmax, group_max, p, alpha = masked_softmax_update(
            s, m, l, t, mean_distance, mass, argmax, group_max, i, (past - 1) * BLOCK_J + column, 0, b, h, keys, mask, tile_maxima, tiles_per_group, sizes,
            scale2, MASK, STATS, TILE_MAXIMA, RAGGED or MASK != "none",
        )  # fmt: skip
        p = gl.convert_layout(p.to(dtype), P)
        # Tiles at one edge of the mask, fully visible tiles, tiles at the other edge.
        begins = 1, gl.maximum(past - full_to, 1), past - full_from
        ends = begins[1], begins[2], past - first
        for SECTION in gl.static_range(0 if MASK != "none" else 1, 3 if MASK == "band" else 2):
            for tiles_back in range(begins[SECTION], ends[SECTION]):
                prev_slot, prev_phase = slot, phase
                count += 1
                slot, phase = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_ready.index(slot), phase)
                mbarrier.wait(pingpong.index(W), (step & 1) ^ (1 - W))
                s = issue_scores(q_tile, head_tile(k_tiles, slot), zero_acc, D)
                if not SHARED_KV:
                    mbarrier.wait(v_ready.index(prev_slot), prev_phase)
                y, y_tail = issue_output(p, head_tile(v_tiles, prev_slot), y, y_tail, E)
                mbarrier.arrive(pingpong.index(1 - W))
                step += 1
                s = warpgroup_mma_wait(OUTPUTS, deps=(s,))
                if not SHARED_KV:
                    mbarrier.arrive(k_free.index(slot))
                m, l, t, mean_distance, mass, argmax, group_max, weights, alpha = masked_softmax_update(
                    s, m, l, t, mean_distance, mass, argmax, group_max, i, (past - 1 - tiles_back) * BLOCK_J + column, tiles_back, b, h, keys, mask, tile_maxima,
                    tiles_per_group, sizes, scale2, MASK, STATS, TILE_MAXIMA, SECTION != 1,
                )  # fmt: skip
                y, y_tail, p = await_output(y, y_tail, p, E)
                mbarrier.arrive(v_free.index(prev_slot))
                y = scale_rows(y, alpha)
                if E == 192:
                    y_tail = scale_rows(y_tail, alpha)
                p = gl.convert_layout(weights.to(dtype), P)

        if not REUSE:
            mbarrier.arrive(q_free.index(W))
        if not SHARED_KV:
            mbarrier.wait(v_ready.index(slot), phase)
        y, y_tail = issue_output(p, head_tile(v_tiles, slot), y, y_tail, E)
        y, y_tail, p = await_output(y, y_tail, p, E)
        mbarrier.arrive(v_free.index(slot))
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase, 4)
        count += 1
        tile_phase += 1
        if TILE_MAXIMA:
            for group in range(gl.cdiv(past - first, tiles_per_group), groups):
                gl.store(head_ptr(tile_maxima, b, h) + group * tile_maxima.i + i, zeros + FLOOR, mask=i < sizes.i)
        share, empty = store_row_stats(
            out, sink, m, l, t, mean_distance, mass, argmax, b, h, i, sizes, SINK, STATS,
        )  # fmt: skip
        if not REUSE:
            tma.store_wait(0)
        sync_threads()
        if E == 192:
            head_tile(y_tiles, W).slice(0, 128, 1).store(finished_rows(y, share, empty, dtype))
            head_tile(y_tiles, W).slice(128, 64, 1).store(finished_rows(y_tail, share, empty, dtype))
        else:
            head_tile(y_tiles, W).store(finished_rows(y, share, empty, dtype))
        store_head_tile(y_desc, b, h, start, y_tiles.index(W))
        if REUSE:
            tma.store_wait(0)
            sync_threads()
            mbarrier.arrive(q_free.index(W))
    tma.store_wait(0)


@gluon.jit
def forward_ws_kernel(
    q_desc, k_desc, v_desc, y_desc, keys, sink, mask, row_table, out, tile_maxima, tiles_per_group, groups,
    sizes, heads, heads_per_group, blocks, tile_counter, scale2, D: gl.constexpr, E: gl.constexpr, RAGGED: gl.constexpr, REUSE: gl.constexpr, MASK: gl.constexpr, SHARED_KV: gl.constexpr,
    STATS: gl.constexpr, SINK: gl.constexpr, TILE_MAXIMA: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output and statistics of row blocks of BLOCK_I rows, each with at least one key.

    RAGGED: the keys do not fill their last tile. REUSE: the output leaves through the buffer of the queries, which are then not
    prefetched.
    """
    q_tiles, k_tiles = alloc_head_tiles(q_desc, 2), alloc_head_tiles(k_desc, STAGES)
    y_tiles = q_tiles
    if not REUSE:
        y_tiles = alloc_head_tiles(y_desc, 2)
    q_ready, q_free, k_ready, k_free = (
        alloc_barriers(2, 1),
        alloc_barriers(2, 1),
        alloc_barriers(STAGES, 1),
        alloc_barriers(STAGES, 2),
    )
    v_tiles, v_ready, v_free = k_tiles, k_ready, k_free
    if not SHARED_KV:
        v_tiles, v_ready, v_free = (
            alloc_head_tiles(v_desc, STAGES),
            alloc_barriers(STAGES, 1),
            alloc_barriers(STAGES, 2),
        )
    pingpong, tile_queue = alloc_barriers(2, 1), alloc_tile_queue(2)
    fence_async_shared()
    tiles, ready, free = (q_tiles, k_tiles, v_tiles), (q_ready, k_ready, v_ready), (q_free, k_free, v_free)
    gl.warp_specialize(
        [
            (consumer, (y_desc, tiles, y_tiles, ready, free, pingpong, tile_queue, keys, sink, mask, row_table, out, tile_maxima, tiles_per_group, groups,
                       sizes, heads, heads_per_group, blocks, scale2, 0, D, E, RAGGED, REUSE, MASK, SHARED_KV, STATS, SINK, TILE_MAXIMA,
                       BLOCK_I, BLOCK_J, STAGES)),
            (consumer, (y_desc, tiles, y_tiles, ready, free, pingpong, tile_queue, keys, sink, mask, row_table, out, tile_maxima, tiles_per_group, groups,
                       sizes, heads, heads_per_group, blocks, scale2, 1, D, E, RAGGED, REUSE, MASK, SHARED_KV, STATS, SINK, TILE_MAXIMA,
                       BLOCK_I, BLOCK_J, STAGES)),
            (producer, (q_desc, k_desc, v_desc, tiles, ready, free, tile_queue, tile_counter, mask, row_table, sizes, heads, heads_per_group,
                    blocks, MASK, SHARED_KV, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["forward_ws_kernel"]
