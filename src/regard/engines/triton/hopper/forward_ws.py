"""The forward pass with its warps parted by hand, for Hopper's 16-bit products of 128 components.

One warp loads: rows, keys and values come by the copy engine, a few tiles ahead. Two groups of four warps compute, 64 rows
each, and both products of a tile run beside the arithmetic on the tile before it: while the tensor cores add tile n − 1 to the
output, the weights of tile n are made. The groups take turns in giving the tensor cores work, so that one computes
weights while the other multiplies. As many programs run as there are multiprocessors; each draws block after block, since under a
mask some take far longer than others.

What a tile does to the state of a row, and what finished rows tell, are the words of `forward`. Written in Gluon, Triton's own
lower language; imported only where `configuration` says that the compiler at hand was tested with it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..kernels.forward import in_order, noted, told, weighed
from ..kernels.tile_ops import FLOOR, NOTHING, Map, key_blocks, place, visible

#: Registers of a thread that computes, and of one that loads; together with the first group's they fill a multiprocessor.
COMPUTING, LOADING = gl.constexpr(240), gl.constexpr(24)


def laid_out(told: tuple[Any, Map] | None) -> tuple[TensorDescriptor, Map]:
    """What the copy engine is told of a tensor, and in which order its tiles lie in shared memory."""
    assert told is not None, "asked for where the copy engine serves"
    desc, where = told
    layout = gl.NVMMASharedLayout.get_default_for(desc.block_shape, gl.bfloat16)  # float16 lies alike
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, layout), where


def in_lines(x: Tensor, heads: int, length: int, lines: int) -> tuple[TensorDescriptor, Map]:
    """Numbers of rows, (b, h, i) without gaps, as the copy engine takes them: `lines` of a `length` for each head."""
    desc = TensorDescriptor(x, [x.numel() // length, length], [length, 1], [1, length], gl.NVMMASharedLayout(0, 32))
    return desc, Map(heads * lines, lines, 0)


# Words for kernels in Gluon.


@gluon.jit
def room(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COLUMNS: gl.constexpr = desc.block_type.shape[1]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, ROWS, COLUMNS], desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which opens after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(found.index(n), count=ARRIVALS)
    return found


@gluon.jit
def copy(desc, where, b, h, row, ready, to):
    """Rows of one head into shared memory; `ready` is told when they are there."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    at = [(b * where.row_b + h * where.row_h + row).to(gl.int32), (h * where.col_h).to(gl.int32)]
    tma.async_copy_global_to_shared(desc, at, ready, to)


@gluon.jit
def copy_out(desc, where, b, h, row, tile):
    """A tile that is written to shared memory into the rows of one head."""
    fence_async_shared()
    at = [(b * where.row_b + h * where.row_h + row).to(gl.int32), (h * where.col_h).to(gl.int32)]
    tma.async_copy_shared_to_global(desc, at, tile)


@gluon.jit
def draw(drawer):
    """The next block of work that nobody has."""
    return gl.num_programs(0) + gl.atomic_add(drawer, 1)


@gluon.jit
def lot():
    """Where the warp that loads says which block was drawn, and the barriers on both sides of it."""
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return number, barriers(1, 1), barriers(1, 2)


@gluon.jit
def announce(drawn, number, ready, free, turn):
    mbarrier.wait(free.index(0), (turn & 1) ^ 1)
    number.store(gl.full([1], drawn, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ready.index(0))


@gluon.jit
def heard(number, ready, free, turn):
    mbarrier.wait(ready.index(0), turn & 1)
    drawn = gl.max(number.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(free.index(0))
    return drawn


# The forward pass.


@gluon.jit
def load(q_desc, k_desc, v_desc, q_map, k_map, v_map, tiles, ready, free, lots, drawer, seen, row_table, sizes, heads, per_group, blocks,
         MASK: gl.constexpr, SAME: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that loads: for every block of rows, their keys and values from the last to the first. It also draws the next
    block, and says which it is once it has loaded all for this one."""
    q_tiles, k_tiles, v_tiles = tiles
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    number, lot_ready, lot_free = lots
    n, count, turn = gl.program_id(0), 0, 0
    while n < blocks:
        drawn = draw(drawer)
        block, head = in_order(sizes.i // BLOCK_I, heads, per_group, n - gl.program_id(0))
        b, h = head // sizes.h, head % sizes.h
        first, full_from, full_to, past = key_blocks(
            block * BLOCK_I, b, 0, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J
        )
        for w in gl.static_range(2):
            mbarrier.wait(q_free.index(w), (turn & 1) ^ 1)
            copy(q_desc, q_map, b, h, block * BLOCK_I + w * (BLOCK_I // 2), q_ready.index(w), q_tiles.index(w))
        for back in range(0, past - first):
            row, slot, odd = (past - 1 - back) * BLOCK_J, count % STAGES, (count // STAGES) & 1
            mbarrier.wait(k_free.index(slot), odd ^ 1)
            copy(k_desc, k_map, b, h // sizes.k_group, row, k_ready.index(slot), k_tiles.index(slot))
            if not SAME:
                mbarrier.wait(v_free.index(slot), odd ^ 1)
                copy(v_desc, v_map, b, h // sizes.v_group, row, v_ready.index(slot), v_tiles.index(slot))
            count += 1
        announce(drawn, number, lot_ready, lot_free, turn)
        n = drawn
        turn += 1


@gluon.jit
def weights_of(s, m, l, t, mean_distance, mass, argmax, best, i, j, visit, b, h, keys, seen, bests, per_best, sizes, scale2, MASK: gl.constexpr,
               ENTROPY: gl.constexpr, MEAN_DISTANCE: gl.constexpr, MASS: gl.constexpr, ARGMAX: gl.constexpr, BESTS: gl.constexpr,
               EDGE: gl.constexpr):  # fmt: skip
    """The state with one more tile in it, as `weighed`. EDGE: some rows do not see all of the tile."""
    if EDGE:
        s = gl.where(visible(i[:, None], j[None, :], b, h, 0, seen, sizes, MASK), s, FLOOR)
    chosen = mass
    if MASS:
        chosen = gl.load(place(keys, b, h) + j.to(gl.int64) * keys.j)
    m, l, t, mean_distance, mass, argmax, p, a, largest = weighed(
        s,
        m,
        l,
        t,
        mean_distance,
        mass,
        argmax,
        i,
        j,
        chosen,
        scale2,
        sizes.offset,
        ENTROPY,
        MEAN_DISTANCE,
        MASS,
        ARGMAX,
        True,
    )
    if BESTS:
        best = noted(bests, per_best, best, largest, visit, b, h, i, sizes)
    return m, l, t, mean_distance, mass, argmax, best, p, a


@gluon.jit
def compute(
    y_desc, y_map, tiles, y_tiles, ready, free, turns, lots, keys, sink, seen, row_table, out, bests, per_best, groups, sizes, heads, per_group, blocks, scale2,
    W: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, SAME: gl.constexpr,
    LSE: gl.constexpr, NORM: gl.constexpr, MAX: gl.constexpr, ENTROPY: gl.constexpr, MEAN_DISTANCE: gl.constexpr, MASS: gl.constexpr,
    ARGMAX: gl.constexpr, SINK: gl.constexpr, BESTS: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute: rows W · BLOCK_I/2 and on of every block."""
    q_tiles, k_tiles, v_tiles = tiles
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    number, lot_ready, lot_free = lots
    HALF: gl.constexpr = BLOCK_I // 2
    dtype: gl.constexpr = y_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_J, 16])
    Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, Y, 2)
    rows = q_tiles.index(W)
    blank = gl.zeros([HALF, BLOCK_J], gl.float32, S)
    zeros = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
    column = gl.arange(0, BLOCK_J, gl.SliceLayout(0, S))
    n, count, turn, step = gl.program_id(0), 0, 0, 0
    while n < blocks:
        block, head = in_order(sizes.i // BLOCK_I, heads, per_group, n - gl.program_id(0))
        b, h = head // sizes.h, head % sizes.h
        start = block * BLOCK_I + W * HALF
        i = start + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, full_from, full_to, past = key_blocks(
            block * BLOCK_I, b, 0, row_table, seen, sizes, MASK, BLOCK_I, BLOCK_J
        )
        m, l, t, mean_distance, mass, best = zeros + NOTHING, zeros, zeros, zeros, zeros, zeros
        argmax = gl.full([HALF], 2147483647, gl.int32, gl.SliceLayout(1, S))
        y = gl.zeros([HALF, D], gl.float32, Y)
        mbarrier.wait(q_ready.index(W), turn & 1)

        # The last tile has nothing before it.
        slot, odd = count % STAGES, (count // STAGES) & 1
        mbarrier.wait(k_ready.index(slot), odd)
        s = warpgroup_mma(rows, k_tiles.index(slot).permute((1, 0)), blank, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if not SAME:
            mbarrier.arrive(k_free.index(slot))
        m, l, t, mean_distance, mass, argmax, best, p, a = weights_of(
            s, m, l, t, mean_distance, mass, argmax, best, i, (past - 1) * BLOCK_J + column, 0, b, h, keys, seen, bests, per_best, sizes,
            scale2, MASK, ENTROPY, MEAN_DISTANCE, MASS, ARGMAX, BESTS, MASK != "none",
        )  # fmt: skip
        p = gl.convert_layout(p.to(dtype), P)
        # The tiles at one edge of the mask, those seen in full, those at the other edge.
        begins = 1, gl.maximum(past - full_to, 1), past - full_from
        ends = begins[1], begins[2], past - first
        for PART in gl.static_range(0 if MASK != "none" else 1, 3 if MASK == "band" else 2):
            for back in range(begins[PART], ends[PART]):
                before, odd_before = slot, odd
                count += 1
                slot, odd = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_ready.index(slot), odd)
                mbarrier.wait(turns.index(W), (step & 1) ^ (1 - W))
                s = warpgroup_mma(rows, k_tiles.index(slot).permute((1, 0)), blank, use_acc=False, is_async=True)
                if not SAME:
                    mbarrier.wait(v_ready.index(before), odd_before)
                y = warpgroup_mma(p, v_tiles.index(before), y, is_async=True)
                mbarrier.arrive(turns.index(1 - W))
                step += 1
                s = warpgroup_mma_wait(1, deps=(s,))
                if not SAME:
                    mbarrier.arrive(k_free.index(slot))
                m, l, t, mean_distance, mass, argmax, best, weights, a = weights_of(
                    s, m, l, t, mean_distance, mass, argmax, best, i, (past - 1 - back) * BLOCK_J + column, back, b, h, keys, seen, bests,
                    per_best, sizes, scale2, MASK, ENTROPY, MEAN_DISTANCE, MASS, ARGMAX, BESTS, PART != 1,
                )  # fmt: skip
                y, p = warpgroup_mma_wait(0, deps=(y, p))
                mbarrier.arrive(v_free.index(before))
                y = y * gl.convert_layout(a, gl.SliceLayout(1, Y))[:, None]
                p = gl.convert_layout(weights.to(dtype), P)

        mbarrier.arrive(q_free.index(W))
        if not SAME:
            mbarrier.wait(v_ready.index(slot), odd)
        y = warpgroup_mma(p, v_tiles.index(slot), y, is_async=True)
        y, p = warpgroup_mma_wait(0, deps=(y, p))
        mbarrier.arrive(v_free.index(slot))
        n = heard(number, lot_ready, lot_free, turn)
        count += 1
        turn += 1
        if BESTS:
            for group in range(gl.cdiv(past - first, per_best), groups):
                gl.store(place(bests, b, h) + group * bests.i + i, zeros + FLOOR)
        share, nothing = told(
            out,
            sink,
            m,
            l,
            t,
            mean_distance,
            mass,
            argmax,
            b,
            h,
            i,
            sizes,
            SINK,
            LSE,
            NORM,
            MAX,
            ENTROPY,
            MEAN_DISTANCE,
            MASS,
            ARGMAX,
        )
        share, nothing = (
            gl.convert_layout(share, gl.SliceLayout(1, Y)),
            gl.convert_layout(nothing, gl.SliceLayout(1, Y)),
        )
        tma.store_wait(0)
        gl.thread_barrier()
        y_tiles.index(W).store(gl.where(nothing[:, None], 0.0, y * share[:, None]).to(dtype))
        copy_out(y_desc, y_map, b, h, start, y_tiles.index(W))
    tma.store_wait(0)


@gluon.jit
def parted_kernel(
    q_desc, k_desc, v_desc, y_desc, q_map, k_map, v_map, y_map, keys, sink, seen, row_table, out, bests, per_best, groups,
    sizes, heads, per_group, blocks, drawer, scale2, D: gl.constexpr, MASK: gl.constexpr, SAME: gl.constexpr,
    LSE: gl.constexpr, NORM: gl.constexpr, MAX: gl.constexpr, ENTROPY: gl.constexpr, MEAN_DISTANCE: gl.constexpr, MASS: gl.constexpr,
    ARGMAX: gl.constexpr, SINK: gl.constexpr, BESTS: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All that one pass tells of blocks of BLOCK_I rows; whole blocks, and at least one key for each."""
    q_tiles, y_tiles, k_tiles = room(q_desc, 2), room(y_desc, 2), room(k_desc, STAGES)
    q_ready, q_free, k_ready, k_free = barriers(2, 1), barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    v_tiles, v_ready, v_free = k_tiles, k_ready, k_free
    if not SAME:
        v_tiles, v_ready, v_free = room(v_desc, STAGES), barriers(STAGES, 1), barriers(STAGES, 2)
    turns, lots = barriers(2, 1), lot()
    fence_async_shared()
    tiles, ready, free = (q_tiles, k_tiles, v_tiles), (q_ready, k_ready, v_ready), (q_free, k_free, v_free)
    gl.warp_specialize(
        [
            (compute, (y_desc, y_map, tiles, y_tiles, ready, free, turns, lots, keys, sink, seen, row_table, out, bests, per_best, groups,
                       sizes, heads, per_group, blocks, scale2, 0, D, MASK, SAME, LSE, NORM, MAX, ENTROPY, MEAN_DISTANCE, MASS, ARGMAX, SINK, BESTS,
                       BLOCK_I, BLOCK_J, STAGES)),
            (compute, (y_desc, y_map, tiles, y_tiles, ready, free, turns, lots, keys, sink, seen, row_table, out, bests, per_best, groups,
                       sizes, heads, per_group, blocks, scale2, 1, D, MASK, SAME, LSE, NORM, MAX, ENTROPY, MEAN_DISTANCE, MASS, ARGMAX, SINK, BESTS,
                       BLOCK_I, BLOCK_J, STAGES)),
            (load, (q_desc, k_desc, v_desc, q_map, k_map, v_map, tiles, ready, free, lots, drawer, seen, row_table, sizes, heads, per_group,
                    blocks, MASK, SAME, BLOCK_I, BLOCK_J, STAGES)),
        ],
        [4, 1], [COMPUTING, LOADING],
    )  # fmt: skip


__all__ = [
    "COMPUTING",
    "LOADING",
    "announce",
    "barriers",
    "copy",
    "copy_out",
    "draw",
    "heard",
    "in_lines",
    "laid_out",
    "lot",
    "parted_kernel",
    "room",
]
