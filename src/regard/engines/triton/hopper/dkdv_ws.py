"""The gradient of keys and values with warps parted by hand: `parted` for the backward pass.

A program owns 128 keys, 64 for each of its two computing groups. Tiles are (keys, rows), so that weights and what flows into
scores leave the first two products in the very registers from which the last two take them: nothing of a tile is ever
written to shared memory. What is the same along a row stands in the accumulator before the product with the output's gradient
is added to it. Each key is added up in one fixed order. Imports `parted` and the words of `tiles`.
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

from ..kernels.forward import in_order
from ..kernels.tile_ops import LN2, row_blocks, visible_at_all
from .forward_ws import COMPUTING, LOADING, announce, barriers, copy, copy_out, draw, heard, lot, room


@gluon.jit
def nth_block(n, first, full_from, full_to, past):
    """The n-th block of rows of those that see some keys: the edges of the mask first, then those that see all of them."""
    left, edges = full_from - first, full_from - first + past - full_to
    at_edge = gl.where(n < left, first + n, full_to + n - left)
    return gl.where(n < edges, at_edge, full_from + n - edges)


@gluon.jit
def load(q_desc, k_desc, v_desc, dy_desc, q_map, k_map, v_map, dy_map, tiles, terms, ready, free, lots, drawer, flow, seen, table, sizes,
         heads, group, batch, per_group, MASK: gl.constexpr, ETA: gl.constexpr, RHO: gl.constexpr,
         BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that loads: keys and values once, then block after block of rows with all that is the same along a row."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    q_ready, dy_ready, own_ready = ready
    q_free, dy_free, own_free = free
    number, lot_ready, lot_free = lots
    columns = sizes.j // BLOCK_J
    n, count, turn = gl.program_id(0), 0, 0
    while n < columns * heads * batch:
        drawn = draw(drawer)
        block, head = in_order(columns, heads * batch, per_group, n - gl.program_id(0))
        b, own = head // heads, head % heads
        start = (columns - 1 - block) * BLOCK_J
        for w in gl.static_range(2):
            mbarrier.wait(own_free.index(w), (turn & 1) ^ 1)
            key = start + w * (BLOCK_J // 2)
            copy(k_desc, k_map, b, own * group // sizes.k_group, key, own_ready.index(w), k_tiles.index(w))
            copy(v_desc, v_map, b, own * group // sizes.v_group, key, own_ready.index(w), v_tiles.index(w))
        first, full_from, full_to, past = row_blocks(start, b, table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
        for step in range(0, group * (past - first)):
            h = own * group + step // (past - first)
            i = nth_block(step % (past - first), first, full_from, full_to, past) * BLOCK_I
            slot, odd = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(q_free.index(slot), odd ^ 1)
            copy(q_desc, q_map, b, h, i, q_ready.index(slot), q_tiles.index(slot))
            mbarrier.wait(dy_free.index(slot), odd ^ 1)
            copy(dy_desc, dy_map, b, h, i, dy_ready.index(slot), dy_tiles.index(slot))
            at = (
                (b * sizes.h + h).to(gl.int64) * sizes.i
                + i
                + gl.arange(0, BLOCK_I, gl.BlockedLayout([2], [32], [1], [0]))
            )
            terms.index(4 * slot).store(gl.load(flow.norm + at))
            terms.index(4 * slot + 1).store(gl.load(flow.c + at))
            if ETA:
                terms.index(4 * slot + 2).store(gl.load(flow.eta + at) * LN2)
            if RHO:
                terms.index(4 * slot + 3).store(gl.load(flow.rho + at))
            mbarrier.arrive(q_ready.index(slot))
            count += 1
        announce(drawn, number, lot_ready, lot_free, turn)
        n = drawn
        turn += 1


@gluon.jit
def compute(
    dk_desc, dv_desc, dk_map, dv_map, tiles, terms, ready, free, lots, seen, table, sizes, heads, group, batch, per_group, scale, scale2,
    W: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, ETA: gl.constexpr, RHO: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute: keys W · BLOCK_J/2 and on of every block."""
    q_tiles, dy_tiles, k_tiles, v_tiles = tiles
    q_ready, dy_ready, own_ready = ready
    q_free, dy_free, own_free = free
    number, lot_ready, lot_free = lots
    HALF: gl.constexpr = BLOCK_J // 2
    dtype: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_I, 16])
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, G, 2)
    ALONG: gl.constexpr = gl.SliceLayout(0, S)
    # A small weight in float16 has few digits or none: it is multiplied 1024 times as large.
    TIMES: gl.constexpr = 1024.0 if dtype == gl.float16 else 1.0
    near, values = k_tiles.index(W), v_tiles.index(W)
    blank = gl.zeros([HALF, BLOCK_I], gl.float32, S)
    columns = sizes.j // BLOCK_J
    n, count, turn = gl.program_id(0), 0, 0
    while n < columns * heads * batch:
        block, head = in_order(columns, heads * batch, per_group, n - gl.program_id(0))
        b, own = head // heads, head % heads
        start = (columns - 1 - block) * BLOCK_J
        j = start + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, full_from, full_to, past = row_blocks(start, b, table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
        edges = full_from - first + past - full_to
        dk = gl.zeros([HALF, D], gl.float32, G)
        dv = gl.zeros([HALF, D], gl.float32, G)
        steps = group * (past - first)
        mbarrier.wait(own_ready.index(W), turn & 1)
        if steps > 0:
            mbarrier.wait(q_ready.index(count % STAGES), (count // STAGES) & 1)
        s = warpgroup_mma(near, q_tiles.index(count % STAGES).permute((1, 0)), blank, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        for member in range(0, group):
            h = own * group + member
            for EDGE in gl.static_range(1 if MASK != "none" else 0, -1, -1):
                for step in range(0 if EDGE or MASK == "none" else edges, edges if EDGE else past - first):
                    i = nth_block(step, first, full_from, full_to, past) * BLOCK_I + gl.arange(0, BLOCK_I, ALONG)
                    slot, odd = count % STAGES, (count // STAGES) & 1
                    log2w = s * scale2 - terms.index(4 * slot).load(ALONG)[None, :]
                    w = gl.exp2(log2w) * TIMES
                    if EDGE:
                        w = gl.where(visible_at_all(i[None, :], j[:, None], b, h, seen, sizes, MASK), w, 0.0)
                    inside = blank - terms.index(4 * slot + 1).load(ALONG)[None, :]
                    if ETA:
                        inside -= terms.index(4 * slot + 2).load(ALONG)[None, :] * log2w
                    if RHO:
                        far = gl.abs(i[None, :] + sizes.offset - j[:, None]).to(gl.float32)
                        inside += terms.index(4 * slot + 3).load(ALONG)[None, :] * far
                    w = w.to(dtype)  # as it is multiplied; both at once would not fit the registers
                    p = gl.convert_layout(w, A)
                    mbarrier.wait(dy_ready.index(slot), odd)
                    inside = warpgroup_mma(values, dy_tiles.index(slot).permute((1, 0)), inside, is_async=True)
                    dv = warpgroup_mma(p, dy_tiles.index(slot), dv, is_async=True)
                    inside = warpgroup_mma_wait(1, deps=(inside,))
                    ds = gl.convert_layout((w.to(gl.float32) * inside * (1.0 / TIMES)).to(dtype), A)
                    # The next scores beside this gradient; after the last block of rows the same once more, and unused.
                    steps -= 1
                    count += gl.where(steps > 0, 1, 0)
                    mbarrier.wait(q_ready.index(count % STAGES), (count // STAGES) & 1)
                    s = warpgroup_mma(
                        near, q_tiles.index(count % STAGES).permute((1, 0)), blank, use_acc=False, is_async=True
                    )
                    dk = warpgroup_mma(ds, q_tiles.index(slot), dk, is_async=True)
                    s, dk, ds, dv, p = warpgroup_mma_wait(0, deps=(s, dk, ds, dv, p))
                    mbarrier.arrive(q_free.index(slot))
                    mbarrier.arrive(dy_free.index(slot))
        count += gl.where(past > first, 1, 0)
        n = heard(number, lot_ready, lot_free, turn)
        turn += 1
        # Keys and values are done with: their places take what goes out.
        near.store((dk * scale).to(dtype))
        values.store((dv * (1.0 / TIMES)).to(dtype))
        copy_out(dk_desc, dk_map, b, own, start + W * HALF, near)
        copy_out(dv_desc, dv_map, b, own, start + W * HALF, values)
        tma.store_wait(0)
        gl.thread_barrier()  # each thread waits for its own copies
        mbarrier.arrive(own_free.index(W))


@gluon.jit
def parted_keys_kernel(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, q_map, k_map, v_map, dy_map, dk_map, dv_map, drawer, flow, seen, table,
    sizes, heads, group, batch, per_group, scale, scale2, D: gl.constexpr, MASK: gl.constexpr, ETA: gl.constexpr, RHO: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of blocks of BLOCK_J keys of `heads` heads, each the sum of `group` query heads; whole blocks only."""
    q_tiles, dy_tiles, k_tiles, v_tiles = room(q_desc, STAGES), room(dy_desc, STAGES), room(k_desc, 2), room(v_desc, 2)
    terms = gl.allocate_shared_memory(gl.float32, [4 * STAGES, BLOCK_I], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Rows come with what is the same along them, keys with their values.
    ready = barriers(STAGES, 2), barriers(STAGES, 1), barriers(2, 2)
    free = barriers(STAGES, 2), barriers(STAGES, 2), barriers(2, 1)
    tiles, lots = (q_tiles, dy_tiles, k_tiles, v_tiles), lot()
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute, (dk_desc, dv_desc, dk_map, dv_map, tiles, terms, ready, free, lots, seen, table, sizes, heads, group, batch, per_group,
                       scale, scale2, 0, D, MASK, ETA, RHO, BLOCK_I, BLOCK_J, STAGES)),
            (compute, (dk_desc, dv_desc, dk_map, dv_map, tiles, terms, ready, free, lots, seen, table, sizes, heads, group, batch, per_group,
                       scale, scale2, 1, D, MASK, ETA, RHO, BLOCK_I, BLOCK_J, STAGES)),
            (load, (q_desc, k_desc, v_desc, dy_desc, q_map, k_map, v_map, dy_map, tiles, terms, ready, free, lots, drawer, flow, seen, table,
                    sizes, heads, group, batch, per_group, MASK, ETA, RHO, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [COMPUTING, LOADING],
    )  # fmt: skip


__all__ = ["parted_keys_kernel"]
