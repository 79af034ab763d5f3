"""Device operations in Gluon that the Hopper kernels share: shared memory, mbarriers, asynchronous TMA, the tile queue."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..kernels.tile_ops import TmaLayout

#: Registers of a consumer thread and of a producer thread; with those of the first consumer group they fill a multiprocessor.
CONSUMER_REGS, PRODUCER_REGS = gl.constexpr(240), gl.constexpr(24)

# Gluon renamed these between Triton 3.6 and 3.9.
sync_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def async_reduce_add(desc, coord, smem, _semantic=None):
    """Add a tile from shared memory to global memory by TMA. Gluon has the instruction, but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, smem.handle)


def gluon_descriptor(descriptor: tuple[Any, TmaLayout] | None) -> tuple[TensorDescriptor, TmaLayout]:
    """A TMA descriptor with the shared-memory layout that Gluon needs."""
    assert descriptor is not None, "the caller checked that TMA fits"
    desc, tma_layout = descriptor
    layout = gl.NVMMASharedLayout.get_default_for(desc.block_shape, gl.bfloat16)  # the same for float16
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, layout), tma_layout


def row_vector_descriptor(x: Tensor, heads: int, length: int, lines: int) -> tuple[TensorDescriptor, TmaLayout]:
    """TMA descriptor of a contiguous tensor (b, h, i), one number a row: `lines` vectors of `length` for each head."""
    desc = TensorDescriptor(x, [x.numel() // length, length], [length, 1], [1, length], gl.NVMMASharedLayout(0, 32))
    return desc, TmaLayout(heads * lines, lines, 0)


def float32_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of tiles of `rows` rows of a contiguous float32 tensor, as a matrix of all its rows."""
    n = x.shape[-1]
    layout = gl.NVMMASharedLayout.get_default_for([rows, n], gl.float32)
    return TensorDescriptor(x, [x.numel() // n, n], [n, 1], [rows, n], layout)


def head_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of tiles of `rows` positions of one head of (b, h, i, d).

    Reads past the end of a head or of a row give 0, and writes there are dropped: lengths and sizes need fill no tile.
    """
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)  # the same for float16
    unused = 8 * columns  # stride of an axis of size 1, which must still be a multiple of 16 bytes
    strides = [stride if n > 1 else unused for stride, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


@gluon.jit
def alloc_head_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of a descriptor made by `head_descriptor`."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, ROWS, COLUMNS], desc.layout)


@gluon.jit
def head_tile(tiles, n):
    """Tile n as a matrix (rows, columns)."""
    ROWS: gl.constexpr = tiles.shape[3]
    COLUMNS: gl.constexpr = tiles.shape[4]
    return tiles.index(n).reshape([ROWS, COLUMNS])


@gluon.jit
def load_head_tile(desc, b, h, row, ready, smem):
    """Load rows of one head into shared memory; `ready` completes its phase when they have arrived."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    async_load(desc, [b.to(gl.int32), h.to(gl.int32), row.to(gl.int32), 0], ready, smem)


@gluon.jit
def store_head_tile(desc, b, h, row, smem):
    """Store a tile from shared memory to rows of one head. The fence makes earlier writes visible to TMA."""
    fence_async_shared()
    async_store(desc, [b.to(gl.int32), h.to(gl.int32), row.to(gl.int32), 0], smem)


@gluon.jit
def alloc_smem(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COLUMNS: gl.constexpr = desc.block_type.shape[1]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, ROWS, COLUMNS], desc.layout)


@gluon.jit
def own_cells(x):
    """A product as (lines, 4, n): four threads share a line, and each has every fourth pair of its cells. Nothing is moved."""
    LINES: gl.constexpr = x.shape[0]
    CELLS: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [LINES, CELLS // 8, 4, 2]), (0, 2, 1, 3))
    return gl.reshape(x, [LINES, 4, CELLS // 4])


@gluon.jit
def fold(x):
    """Sums of the cells of a line that one thread has, (lines, 4): they are added across threads when the last tile is done."""
    return gl.sum(own_cells(x), 2)


@gluon.jit
def alloc_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers, each with ARRIVALS arrivals a phase."""
    barrier = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barrier.index(n), count=ARRIVALS)
    return barrier


@gluon.jit
def tma_load_async(desc, layout, b, h, row, ready, smem):
    """Load rows of one head into shared memory; `ready` completes its phase when they have arrived."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    coords = [(b * layout.row_b + h * layout.row_h + row).to(gl.int32), (h * layout.col_h).to(gl.int32)]
    async_load(desc, coords, ready, smem)


@gluon.jit
def tma_store_async(desc, layout, b, h, row, smem):
    """Store a tile from shared memory to rows of one head. The fence makes earlier writes visible to TMA."""
    fence_async_shared()
    coords = [(b * layout.row_b + h * layout.row_h + row).to(gl.int32), (h * layout.col_h).to(gl.int32)]
    async_store(desc, coords, smem)


@gluon.jit
def next_tile(tile_counter):
    """The next tile that no program has taken; the first ones are numbered by program."""
    return gl.num_programs(0) + gl.atomic_add(tile_counter, 1)


@gluon.jit
def await_stores():
    """Wait until what this thread's asynchronous stores wrote is in global memory; `tma.store_wait` waits until it is read."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def round_pairs(x, dtype: gl.constexpr):
    """float32 to a 16-bit type, two numbers an instruction. The compiler converts numbers that are read again one by one, sixteen
    times as slowly."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2)
    return y


@gluon.jit
def load_acquire(ptr):
    """A number that programs of other multiprocessors write, and with it what they wrote before."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [ptr], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def alloc_tile_queue(RECEIVERS: gl.constexpr):
    """A queue of one tile from the producer to the other warp groups: its slot, and the mbarriers ready and free."""
    queue_slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return queue_slot, alloc_barriers(1, 1), alloc_barriers(1, RECEIVERS)


@gluon.jit
def publish_tile(next_id, queue_slot, ready, free, tile_phase):
    mbarrier.wait(free.index(0), (tile_phase & 1) ^ 1)
    queue_slot.store(gl.full([1], next_id, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ready.index(0))


@gluon.jit
def receive_tile(queue_slot, ready, free, tile_phase, WARPS: gl.constexpr):
    """The next tile, for a group of WARPS warps."""
    mbarrier.wait(ready.index(0), tile_phase & 1)
    next_id = gl.max(queue_slot.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(free.index(0))
    return next_id


__all__ = [
    "CONSUMER_REGS",
    "PRODUCER_REGS",
    "alloc_barriers",
    "alloc_head_tiles",
    "alloc_smem",
    "alloc_tile_queue",
    "async_reduce_add",
    "async_store",
    "await_stores",
    "float32_descriptor",
    "fold",
    "gluon_descriptor",
    "head_descriptor",
    "head_tile",
    "load_acquire",
    "load_head_tile",
    "next_tile",
    "own_cells",
    "publish_tile",
    "receive_tile",
    "round_pairs",
    "row_vector_descriptor",
    "store_head_tile",
    "sync_threads",
    "tma_load_async",
    "tma_store_async",
]
