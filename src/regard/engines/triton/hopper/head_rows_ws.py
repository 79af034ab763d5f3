"""The entropy of heads together, with warp specialisation.

A program owns 128 rows, 64 for each of its two consumers; a producer warp loads queries and keys of one head after another by
TMA. While a consumer turns the scores of one head into weights and adds them up, the tensor cores compute those of the next
head. The sums are those of `kernels.head_rows`. The kernel is persistent, and programs take work from a counter: row blocks,
each with every `splits`-th of its key blocks.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.comparison import key_blocks_of_all
from ..kernels.head_rows import TINY, work_item
from ..kernels.tile_ops import load_row_norm, visible_at_all
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
def producer(q_desc, k_desc, tiles, ready, free, tile_queue, tile_counter, mask, row_table, sizes, groups, splits, items,
             MASK: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer warp: for every key block the queries of both consumers and the keys of all heads."""
    q_tiles, k_tiles = tiles
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_I // 2
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < items:
        b, group, start, split = work_item(n, sizes, groups, splits, BLOCK_I)
        first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        per_group = sizes.h // groups
        for block in range(first + split, past, splits):
            for at in range(0, per_group):
                h, slot, phase = group * per_group + at, count % STAGES, (count // STAGES) & 1
                mbarrier.wait(free.index(slot), phase ^ 1)
                load_head_tile(k_desc, b, h // sizes.k_group, block * BLOCK_J, ready.index(slot), k_tiles.index(slot))
                load_head_tile(q_desc, b, h, start, ready.index(slot), q_tiles.index(2 * slot))
                load_head_tile(q_desc, b, h, start + HALF, ready.index(slot), q_tiles.index(2 * slot + 1))
                count += 1
        next_id = next_tile(tile_counter)  # late: items taken ahead of time would leave other programs idle at the end
        publish_tile(next_id, queue_slot, queue_ready, queue_free, tile_phase)
        n = next_id
        tile_phase += 1


@gluon.jit
def issue_scores(tiles, ready, count, remaining, zero_acc, W: gl.constexpr, STAGES: gl.constexpr):
    """Issue the product of consumer W in the slot of this count, without waiting for it.

    Where nothing remains, the slot is freed already: whatever it holds is multiplied, and the product is unused.
    """
    q_tiles, k_tiles = tiles
    slot = count % STAGES
    if remaining > 0:
        mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
    k_tile = head_tile(k_tiles, slot).permute((1, 0))
    return warpgroup_mma(head_tile(q_tiles, 2 * slot + W), k_tile, zero_acc, use_acc=False, is_async=True)


@gluon.jit
def consumer(
    out, tiles, ready, free, tile_queue, norm, factors, mask, row_table, sizes, groups, splits, items, scale2,
    W: gl.constexpr, MASK: gl.constexpr, BY: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W of two: rows from W · BLOCK_I/2 on of every row block."""
    queue_slot, queue_ready, queue_free = tile_queue
    HALF: gl.constexpr = BLOCK_I // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_J, 16])
    zero_acc = gl.zeros([HALF, BLOCK_J], gl.float32, S)
    column = gl.arange(0, BLOCK_J, gl.SliceLayout(0, S))
    n, count, tile_phase = gl.program_id(0), 0, 0
    while n < items:
        b, group, start, split = work_item(n, sizes, groups, splits, BLOCK_I)
        first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        i = start + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        per_group = sizes.h // groups
        x = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
        blocks = gl.maximum(past - first - split + splits - 1, 0) // splits
        remaining = blocks * per_group
        if remaining > 0:
            s = issue_scores(tiles, ready, count, remaining, zero_acc, W, STAGES)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(free.index(count % STAGES))
            next_m2, next_log2l = load_row_norm(norm, b, group * per_group, i, sizes, True)
            next_factor = gl.load(factors + group * per_group)
            for block in range(first + split, past, splits):
                p, total = gl.zeros([HALF, BLOCK_J], gl.float32, S), 0.0
                for at in range(0, per_group):
                    # The next head, of this tile or the next one; after the last it is computed again and unused.
                    remaining -= 1
                    count += gl.where(remaining > 0, 1, 0)
                    other = issue_scores(tiles, ready, count, remaining, zero_acc, W, STAGES)
                    m2, factor = next_m2, next_factor
                    after = group * per_group + gl.where(at + 1 < per_group, at + 1, 0)
                    next_m2, next_log2l = load_row_norm(norm, b, after, i, sizes, True)
                    next_factor = gl.load(factors + after)
                    w = gl.exp2(s * scale2 - m2[:, None])
                    if BY == "max":
                        p = gl.maximum(p, w, propagate_nan=tl.PropagateNan.ALL)
                    else:
                        p += factor * w
                        total += factor
                    s = warpgroup_mma_wait(0, deps=(other,))
                    if remaining > 0:
                        mbarrier.arrive(free.index(count % STAGES))
                j = block * BLOCK_J + column
                p = gl.where(visible_at_all(i[:, None], j[None, :], b, group, mask, sizes, MASK), p, 0.0)
                x += gl.sum(p * ((gl.log2(total) if BY == "mean" else 0.0) - gl.log2(gl.maximum(p, TINY))), 1)
            count += 1
        row = ((b * groups + group) * splits + split).to(gl.int64) * sizes.i + i
        gl.store(out + row, x, mask=i < sizes.i)
        n = receive_tile(queue_slot, queue_ready, queue_free, tile_phase, 4)
        tile_phase += 1


@gluon.jit
def entropy_ws_kernel(
    q_desc, k_desc, tile_counter, out, norm, factors, mask, row_table, sizes, groups, splits, items, scale2,
    MASK: gl.constexpr, BY: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`entropy_kernel` of products without modifiers, whose heads share a mask."""
    tiles = alloc_head_tiles(q_desc, 2 * STAGES), alloc_head_tiles(k_desc, STAGES)
    ready, free = alloc_barriers(STAGES, 3), alloc_barriers(STAGES, 2)  # three tiles a phase; two consumers
    tile_queue = alloc_tile_queue(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (out, tiles, ready, free, tile_queue, norm, factors, mask, row_table, sizes, groups, splits, items, scale2,
                        0, MASK, BY, BLOCK_I, BLOCK_J, STAGES)),
            (consumer, (out, tiles, ready, free, tile_queue, norm, factors, mask, row_table, sizes, groups, splits, items, scale2,
                        1, MASK, BY, BLOCK_I, BLOCK_J, STAGES)),
            (producer, (q_desc, k_desc, tiles, ready, free, tile_queue, tile_counter, mask, row_table, sizes, groups, splits, items,
                        MASK, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


__all__ = ["entropy_ws_kernel"]
