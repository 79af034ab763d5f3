"""The column pass, software-pipelined for Hopper's 16-bit products.

While a program turns one tile of products into weights, the tensor cores compute the next. Its keys stay in registers, query
tiles are loaded by TMA a few blocks ahead, and a row block is two tiles whose products alternate. The column sums are those of
`kernels.column_pass`. The kernel is written in Gluon, under the same conditions as `forward_ws`.
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

from ..kernels.column_pass import add_block_to_pool, flush_pool_row, pool_columns, zero_pool_rows_before
from ..kernels.forward import schedule_tile
from ..kernels.tile_ops import FLOOR, row_blocks, store_row, visible_at_all
from .gluon_ops import alloc_barriers, alloc_smem, fold, sync_threads, tma_load_async


@gluon.jit
def prefetch(q_desc, q_layout, lse2_desc, row_layout, b, h, n, past, slots, slot, BLOCK_I: gl.constexpr):
    """Load row block n, if there is one, and its row terms into a slot."""
    if n < past:
        ready = slots[2].index(slot)
        tma_load_async(q_desc, q_layout, b, h, n * BLOCK_I, ready, slots[0].index(slot))
        tma_load_async(lse2_desc, row_layout, b, h, n, ready, slots[1].index(slot))


@gluon.jit
def prefetch_factors(factors_desc, row_layout, b, h, n, past, slots, slot, WEIGHTED: gl.constexpr):
    """Load the factors of row block n, if rows have factors."""
    if WEIGHTED:
        if n < past:
            tma_load_async(factors_desc, row_layout, b, h, n, slots[2].index(slot), slots[3].index(slot))


@gluon.jit
def issue_qk(k_tile, slots, slot, zero_acc, HALF: gl.constexpr, SECOND: gl.constexpr):
    """Issue the products of one half of the rows in a slot, without waiting for them."""
    q_tile = slots[0].index(slot).slice(SECOND * HALF, HALF)
    return warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero_acc, use_acc=False, is_async=True)


@gluon.jit
def columns_of_tile(s, lse2, factors, received, pool_sum, pool, mask, sizes, n, j, b, h, scale2, MASK: gl.constexpr, POOL: gl.constexpr,
                    HALF: gl.constexpr, EDGE: gl.constexpr, WEIGHTED: gl.constexpr):  # fmt: skip
    """Add the weights of tile n to the sums of the columns. EDGE: the tile is masked first. WEIGHTED: times a factor of each row."""
    if EDGE:
        i = n * HALF + gl.arange(0, HALF, gl.SliceLayout(0, s.type.layout))
        s = gl.where(visible_at_all(i[None, :], j[:, None], b, h, mask, sizes, MASK), s, FLOOR)
    w = gl.exp2(s * scale2 - lse2)
    if WEIGHTED:
        w = w * factors
    column = fold(w)
    if POOL:
        column_sum = gl.convert_layout(gl.sum(column, 1), j.type.layout)
        pool_sum = add_block_to_pool(column_sum, pool_sum, pool, b, h, n, pool_columns(j, POOL), sizes, HALF, POOL)
    return received + column, pool_sum


@gluon.jit
def column_pass_pipelined_kernel(
    q_desc, k_desc, lse2_desc, factors_desc, q_layout, k_layout, row_layout, mask, key_table, pool, out_received, sizes, heads, heads_per_group,
    scale2, D: gl.constexpr, MASK: gl.constexpr, RECEIVED: gl.constexpr, POOL: gl.constexpr, WEIGHTED: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_J columns; full blocks only."""
    HALF: gl.constexpr = BLOCK_I // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    columns = sizes.j // BLOCK_J
    block, head = schedule_tile(columns, heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = (columns - 1 - block) * BLOCK_J  # the first keys are seen by most rows, so they start first
    j = start + gl.arange(0, BLOCK_J, gl.SliceLayout(1, S))
    first, full_from, full_to, past = row_blocks(start, b, key_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    ready, kv_ready = alloc_barriers(STAGES, 3 if WEIGHTED else 2), alloc_barriers(1, 1)
    fence_async_shared()
    k_smem = alloc_smem(k_desc, 1)
    tma_load_async(k_desc, k_layout, b, h // sizes.k_group, start, kv_ready.index(0), k_smem.index(0))
    mbarrier.wait(kv_ready.index(0), 0)
    k_tile = k_smem.index(0).load(gl.DotOperandLayout(0, S, 2))
    sync_threads()
    # The buffer of the keys and their mbarrier is reused below: invalidate the mbarrier first (PTX rule). Otherwise its 8 bytes
    # reappeared in the new data when another CTA started.
    mbarrier.invalidate(kv_ready.index(0))
    fence_async_shared()
    tiles, terms = alloc_smem(q_desc, STAGES), alloc_smem(lse2_desc, STAGES)
    factors = terms
    if WEIGHTED:
        factors = alloc_smem(factors_desc, STAGES)
    slots = tiles, terms, ready, factors
    for n in gl.static_range(STAGES):
        prefetch(q_desc, q_layout, lse2_desc, row_layout, b, h, first + n, past, slots, n, BLOCK_I)
        prefetch_factors(factors_desc, row_layout, b, h, first + n, past, slots, n, WEIGHTED)
    zero_acc = gl.zeros([BLOCK_J, HALF], gl.float32, S)
    received = fold(zero_acc)
    pool_sum = gl.zeros([BLOCK_J], gl.float32, gl.SliceLayout(1, S))
    if POOL and MASK != "none":
        zero_pool_rows_before(pool, b, h, pool_columns(j, POOL), 2 * first, 2 * past, sizes, HALF, POOL)
    if first < past:
        mbarrier.wait(ready.index(0), 0)
    s = issue_qk(k_tile, slots, 0, zero_acc, HALF, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    # Edge, fully visible, edge: in the order of the rows, since the tile rows of a pooled map are stored as they end.
    if MASK == "causal":  # every edge comes before every fully visible tile
        full_from, full_to = past - (full_to - full_from), past
    for SECTION in gl.static_range(0 if MASK != "none" else 1, 2 if MASK == "none" or MASK == "causal" else 3):
        begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
        end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
        for n in range(begin, end):
            count = n - first
            slot = count % STAGES
            after = gl.minimum(count + 1, past - first - 1)  # after the last block it is computed again and unused
            lse2 = slots[1].index(slot).slice(0, HALF, 1).load(S)
            next_lse2 = slots[1].index(slot).slice(HALF, HALF, 1).load(S)
            factor, next_factor = lse2, next_lse2
            if WEIGHTED:
                factor = slots[3].index(slot).slice(0, HALF, 1).load(S)
                next_factor = slots[3].index(slot).slice(HALF, HALF, 1).load(S)
            other = issue_qk(k_tile, slots, slot, zero_acc, HALF, 1)
            received, pool_sum = columns_of_tile(
                s, lse2, factor, received, pool_sum, pool, mask, sizes, 2 * n, j, b, h, scale2, MASK, POOL, HALF, SECTION != 1,
                WEIGHTED,
            )  # fmt: skip
            other = warpgroup_mma_wait(0, deps=(other,))
            mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1)
            s = issue_qk(k_tile, slots, after % STAGES, zero_acc, HALF, 0)
            received, pool_sum = columns_of_tile(
                other, next_lse2, next_factor, received, pool_sum, pool, mask, sizes, 2 * n + 1, j, b, h, scale2, MASK, POOL, HALF, SECTION != 1,
                WEIGHTED,
            )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=(s,))
            sync_threads()  # no thread reads this block any more
            prefetch(q_desc, q_layout, lse2_desc, row_layout, b, h, n + STAGES, past, slots, slot, BLOCK_I)
            prefetch_factors(factors_desc, row_layout, b, h, n + STAGES, past, slots, slot, WEIGHTED)
    if POOL:
        flush_pool_row(pool_sum, pool, b, h, pool_columns(j, POOL), 2 * first, 2 * past, sizes, HALF, POOL)
    if RECEIVED:
        store_row(out_received, b, h, j, gl.convert_layout(gl.sum(received, 1), gl.SliceLayout(1, S)), sizes.j)


__all__ = ["column_pass_pipelined_kernel"]
