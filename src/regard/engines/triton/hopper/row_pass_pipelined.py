"""Row statistics without an output, software-pipelined for Hopper's 16-bit products.

The loop is that of `column_pass_pipelined` with rows and keys exchanged: queries stay in registers, key tiles come by TMA a few
blocks ahead, and while one half of a block is merged into the online softmax the tensor cores compute the other. A thread has
every fourth pair of a row's keys and a state (m, l, t) of its own for them, so that nothing is exchanged between threads until
the last block; then the states of a row are merged, as states of any parts of the keys are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..kernels.forward import schedule_tile, store_row_stats
from ..kernels.tile_ops import EMPTY_MAX, FLOOR, key_blocks, visible_at_all
from .column_pass_pipelined import issue_qk
from .gluon_ops import alloc_barriers, alloc_smem, own_cells, sync_threads, tma_load_async


@gluon.jit
def prefetch_keys(k_desc, k_layout, b, hk, n, past, slots, slot, BLOCK_J: gl.constexpr):
    """Load key block n, if there is one, into a slot."""
    tiles, ready = slots
    if n < past:
        tma_load_async(k_desc, k_layout, b, hk, n * BLOCK_J, ready.index(slot), tiles.index(slot))


@gluon.jit
def merge_tile(s, m, l, t, mask, sizes, n, i, b, h, scale2, MASK: gl.constexpr, EDGE: gl.constexpr):
    """Merge the scores of key tile n into the states of their threads. EDGE: the tile is masked first."""
    J: gl.constexpr = s.shape[1]
    if EDGE:
        j = n * J + gl.arange(0, J, gl.SliceLayout(0, s.type.layout))
        s = gl.where(visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK), s, FLOOR)
    cells = own_cells(s)
    new_m = gl.maximum(m, gl.max(cells, 2) * scale2)
    x = cells * scale2 - gl.expand_dims(new_m, 2)
    p = gl.exp2(x)
    shift = m - new_m
    alpha = gl.exp2(shift)
    # A higher maximum shifts every s − m by the same amount, once for each unit of l.
    t = alpha * (t + shift * l) + gl.sum(p * x, 2)
    return new_m, alpha * l + gl.sum(p, 2), t


@gluon.jit
def row_pass_pipelined_kernel(
    q_desc, k_desc, q_layout, k_layout, mask, row_table, out, sink, sizes, heads, heads_per_group, scale2,
    D: gl.constexpr, MASK: gl.constexpr, STATS: gl.constexpr, SINK: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_I rows; full blocks only."""
    HALF: gl.constexpr = BLOCK_J // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    block, head = schedule_tile(sizes.i // BLOCK_I, heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    hk, start = h // sizes.k_group, block * BLOCK_I
    i = start + gl.arange(0, BLOCK_I, gl.SliceLayout(1, S))
    first, full_from, full_to, past = key_blocks(start, b, 0, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    ready, q_ready = alloc_barriers(STAGES, 1), alloc_barriers(1, 1)
    fence_async_shared()
    q_smem = alloc_smem(q_desc, 1)
    tma_load_async(q_desc, q_layout, b, h, start, q_ready.index(0), q_smem.index(0))
    mbarrier.wait(q_ready.index(0), 0)
    q_tile = q_smem.index(0).load(gl.DotOperandLayout(0, S, 2))
    sync_threads()
    mbarrier.invalidate(q_ready.index(0))  # as in `column_pass_pipelined`
    fence_async_shared()
    tiles = alloc_smem(k_desc, STAGES)
    slots = tiles, ready
    for stage in gl.static_range(STAGES):
        prefetch_keys(k_desc, k_layout, b, hk, first + stage, past, slots, stage, BLOCK_J)
    zero_acc = gl.zeros([BLOCK_I, HALF], gl.float32, S)
    l = gl.sum(own_cells(zero_acc), 2)
    m, t = l + EMPTY_MAX, l
    if first < past:
        mbarrier.wait(ready.index(0), 0)
    s = issue_qk(q_tile, slots, 0, zero_acc, HALF, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    for SECTION in gl.static_range(3):
        if SECTION == 1 or (MASK != "none" and (SECTION == 2 or MASK != "causal")):
            begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
            end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
            for n in range(begin, end):
                count = n - first
                slot = count % STAGES
                after = gl.minimum(count + 1, past - first - 1)  # after the last block it is computed again and unused
                other = issue_qk(q_tile, slots, slot, zero_acc, HALF, 1)
                m, l, t = merge_tile(s, m, l, t, mask, sizes, 2 * n, i, b, h, scale2, MASK, SECTION != 1)
                other = warpgroup_mma_wait(0, deps=(other,))
                mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1)
                s = issue_qk(q_tile, slots, after % STAGES, zero_acc, HALF, 0)
                m, l, t = merge_tile(other, m, l, t, mask, sizes, 2 * n + 1, i, b, h, scale2, MASK, SECTION != 1)
                s = warpgroup_mma_wait(0, deps=(s,))
                sync_threads()  # no thread reads this block any more
                prefetch_keys(k_desc, k_layout, b, hk, n + STAGES, past, slots, slot, BLOCK_J)
    row_m = gl.max(m, 1)
    shift = m - gl.expand_dims(row_m, 1)
    alpha = gl.exp2(shift)
    row_t = gl.convert_layout(gl.sum(alpha * (t + shift * l), 1), gl.SliceLayout(1, S))
    row_l = gl.convert_layout(gl.sum(alpha * l, 1), gl.SliceLayout(1, S))
    row_m = gl.convert_layout(row_m, gl.SliceLayout(1, S))
    store_row_stats(out, sink, row_m, row_l, row_t, row_t, row_t, row_t, b, h, i, sizes, SINK, STATS)


__all__ = ["row_pass_pipelined_kernel"]
