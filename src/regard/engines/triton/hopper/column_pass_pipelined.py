"""The second pass with its products one tile ahead, for Hopper's 16-bit products.

While a program turns one tile of products into weights, the tensor cores make the next: the keys it owns stay in registers, rows
come by the copy engine a few blocks ahead, and a block of rows is two tiles, whose products take turns. What columns tell are
the words of `column_pass`. Written in Gluon, as `parted` is, and under the same conditions.
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

from ..kernels.column_pass import add_block_to_parts, blank_parts, close_parts
from ..kernels.forward import in_order
from ..kernels.tile_ops import put_row, row_blocks, visible_at_all
from .forward_ws import barriers, copy, room


@gluon.jit
def fill(q_desc, q_map, lse2_desc, lse2_map, b, h, n, past, slots, slot, BLOCK_I: gl.constexpr):
    """Block n of rows, if there is one, into its slot, with what is the same along each."""
    tiles, terms, ready = slots
    if n < past:
        copy(q_desc, q_map, b, h, n * BLOCK_I, ready.index(slot), tiles.index(slot))
        copy(lse2_desc, lse2_map, b, h, n, ready.index(slot), terms.index(slot))


@gluon.jit
def begun(keys, slots, slot, blank, HALF: gl.constexpr, SECOND: gl.constexpr):
    """The products of one half of the rows in a slot, under way."""
    rows = slots[0].index(slot).slice(SECOND * HALF, HALF)
    return warpgroup_mma(keys, rows.permute((1, 0)), blank, use_acc=False, is_async=True)


@gluon.jit
def columns_of_tile(s, lse2, received, part, pool, seen, sizes, n, j, b, h, scale2, MASK: gl.constexpr, PARTS: gl.constexpr,
                    HALF: gl.constexpr, EDGE: gl.constexpr):  # fmt: skip
    """Add up the weights of tile n, column by column. EDGE: some rows do not see all of it."""
    w = gl.exp2(s * scale2 - lse2)
    if EDGE:
        i = n * HALF + gl.arange(0, HALF, gl.SliceLayout(0, s.type.layout))
        w = gl.where(visible_at_all(i[None, :], j[:, None], b, h, seen, sizes, MASK), w, 0.0)
    column = gl.sum(w, 1)
    if PARTS:
        part = add_block_to_parts(column, part, pool, b, h, n, j, sizes, HALF)
    return received + column, part


@gluon.jit
def ahead_kernel(
    q_desc, k_desc, lse2_desc, q_map, k_map, lse2_map, seen, table, pool, out_received, sizes, heads, per_group, scale2,
    D: gl.constexpr, MASK: gl.constexpr, RECEIVED: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All that BLOCK_J columns can tell; whole blocks only."""
    HALF: gl.constexpr = BLOCK_I // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    columns = sizes.j // BLOCK_J
    block, head = in_order(columns, heads, per_group)
    b, h = head // sizes.h, head % sizes.h
    start = (columns - 1 - block) * BLOCK_J  # the first keys are seen by most rows
    j = start + gl.arange(0, BLOCK_J, gl.SliceLayout(1, S))
    first, full_from, full_to, past = row_blocks(start, b, table, seen, sizes, MASK, BLOCK_I, BLOCK_J)
    ready, own_ready = barriers(STAGES, 2), barriers(1, 1)
    fence_async_shared()
    own = room(k_desc, 1)
    copy(k_desc, k_map, b, h // sizes.k_group, start, own_ready.index(0), own.index(0))
    mbarrier.wait(own_ready.index(0), 0)
    keys = own.index(0).load(gl.DotOperandLayout(0, S, 2))
    gl.thread_barrier()
    # From here on the place of the keys and of their barrier is free. A barrier must be ended before: left as it was, its bytes came
    # back among the rows that lie there now, when another program began beside this one.
    mbarrier.invalidate(own_ready.index(0))
    fence_async_shared()
    slots = room(q_desc, STAGES), room(lse2_desc, STAGES), ready
    for n in gl.static_range(STAGES):
        fill(q_desc, q_map, lse2_desc, lse2_map, b, h, first + n, past, slots, n, BLOCK_I)
    blank = gl.zeros([BLOCK_J, HALF], gl.float32, S)
    received = gl.zeros([BLOCK_J], gl.float32, gl.SliceLayout(1, S))
    part = received
    if PARTS and MASK != "none":
        blank_parts(pool, b, h, j, 2 * first, 2 * past, sizes, HALF)
    if first < past:
        mbarrier.wait(ready.index(0), 0)
    s = begun(keys, slots, 0, blank, HALF, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    # In the order of the rows, since the tile rows of a pooled map are written as they end; an edge of the mask on either side.
    for PART in gl.static_range(3):
        if MASK != "none" or PART == 1:
            begin = first if PART == 0 else full_from if PART == 1 else full_to
            end = full_from if PART == 0 else full_to if PART == 1 else past
            for n in range(begin, end):
                count = n - first
                slot = count % STAGES
                after = gl.minimum(count + 1, past - first - 1)  # after the last the same again, and unused
                lse2 = slots[1].index(slot).slice(0, HALF, 1).load(S)
                next_lse2 = slots[1].index(slot).slice(HALF, HALF, 1).load(S)
                other = begun(keys, slots, slot, blank, HALF, 1)
                received, part = columns_of_tile(
                    s, lse2, received, part, pool, seen, sizes, 2 * n, j, b, h, scale2, MASK, PARTS, HALF, PART != 1
                )
                other = warpgroup_mma_wait(0, deps=(other,))
                mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1)
                s = begun(keys, slots, after % STAGES, blank, HALF, 0)
                received, part = columns_of_tile(
                    other, next_lse2, received, part, pool, seen, sizes, 2 * n + 1, j, b, h, scale2, MASK, PARTS, HALF, PART != 1,
                )  # fmt: skip
                s = warpgroup_mma_wait(0, deps=(s,))
                gl.thread_barrier()  # nobody reads this block any more
                fill(q_desc, q_map, lse2_desc, lse2_map, b, h, n + STAGES, past, slots, slot, BLOCK_I)
    if PARTS:
        close_parts(part, pool, b, h, j, 2 * first, 2 * past, sizes, HALF)
    if RECEIVED:
        put_row(out_received, b, h, j, received, sizes.j)


__all__ = ["ahead_kernel"]
