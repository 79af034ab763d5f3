"""Compiled tiles for `blockwise` on the CPU: which problems they support, and how their kernels are called.

The kernels (in `kernels`, compiled by numba when first needed and cached on disk) run on PyTorch's own OpenMP threads
with PyTorch's own sgemm and dgemm, all reached through symbols of its library: no second thread pool competes for the
cores, and a product inside a parallel region stays on one thread. Where numba or those symbols are missing, `load`
returns None and `blockwise` computes with plain PyTorch tiles.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import logging
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.problem import Problem, repeat_kv, sum_groups
from ...core.pytree import flatten, unflatten
from ...core.stats import SECOND_PASS, Request, Results, required
from ...core.torch_state import in_functorch
from ..replay import record_launch
from ..score_grad import InputGrads, ScoreGrad

__all__ = ["backward", "cells", "column_pass", "forward", "serves", "serves_backward", "unsupported_reason"]

log = logging.getLogger("regard")

#: REGARD_COMPILED=0 selects plain PyTorch tiles, for tests and comparisons.
enabled = os.environ.get("REGARD_COMPILED", "1") != "0"

#: REGARD_BLAS=torch hides MKL and GOMP: the path of ARM and macOS, whose PyTorch exports neither, is tested on any CPU.
_hide_blas = os.environ.get("REGARD_BLAS") == "torch"


@dataclass(frozen=True)
class Runtime:
    """The kernels, and the symbols of PyTorch's library that they use."""

    kernels: Any
    gemm: dict[int, int | None]  # address of sgemm and dgemm, by the bytes of a number
    parallel: Callable[..., Any]
    set_local_threads: Callable[[int], int] | None


@functools.cache
def load() -> Runtime | None:
    """The kernels and the symbols they need; None where numba or a symbol is missing."""
    if _hide_blas:
        return None
    if importlib.util.find_spec("numba") is None:
        log.info("numba is not installed: tiles on the CPU run in plain PyTorch; pip install regard[fast] brings it")
        return None
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(folder / name))
            symbols = {4: library.sgemm_, 8: library.dgemm_}
            parallel = library.GOMP_parallel
        except (OSError, AttributeError):  # another system, or a build with other symbols
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        from . import kernels

        gemm = {size: ctypes.cast(symbol, ctypes.c_void_p).value for size, symbol in symbols.items()}
        return Runtime(kernels, gemm, parallel, getattr(library, "MKL_Set_Num_Threads_Local", None))
    log.info("this PyTorch exports no sgemm_, dgemm_ and GOMP_parallel: tiles on the CPU run in plain PyTorch")
    return None


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


# A forked child inherits the record of the parent's OpenMP threads but not the threads: it must use one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def serves(problem: Problem, kernel_ops: tuple[str, ...] = ("product",)) -> bool:
    """Whether the kernels can compute these scores and this mask."""
    return unsupported_reason(problem, kernel_ops) is None


def unsupported_reason(problem: Problem, kernel_ops: tuple[str, ...] = ("product",)) -> str | None:
    """The reason why the kernels cannot serve; None where they can."""
    if not enabled:
        return "REGARD_COMPILED=0 turns them off"
    if in_functorch():
        return "inside torch.func tensors have no address"
    if problem.q.device.type != "cpu":
        return f"they run on the CPU, and these tensors are on {problem.q.device}"
    if problem.similarity_kernel.kernel_op not in kernel_ops:
        return "they compute scores that are dot products of something"
    if any(modifier.kernel_op is None for modifier in problem.modifiers):
        return "modify(f) is a Python function, and they take none"
    if problem.mask is not None and problem.mask.dense_parts() is None:
        return "the mask is neither a few intervals a row nor a bool tensor"
    if (runtime := load()) is None:
        return "numba is not installed, or this build of PyTorch lacks sgemm_, dgemm_ or GOMP_parallel"
    for modifier in problem.modifiers:
        if modifier.kernel_op not in runtime.kernels.MODIFIER_KINDS:
            return f"they have no code for {modifier.kernel_op}"
    return None


def serves_statistics(names: tuple[str, ...]) -> bool:
    """Whether the forward kernel computes these results of the pass over the keys, for a problem that it serves."""
    runtime = load()
    return runtime is not None and runtime.kernels.ONE_PASS.issuperset(names)


def serves_backward(problem: Problem, needs: list[bool]) -> bool:
    """The same for gradients, where a bias must be constant along rows or keys and come before a softcap."""
    _, tensors = flatten(problem)
    needed = {id(t) for t, need in zip(tensors, needs, strict=True) if need}
    not_additive = 0
    for modifier in problem.modifiers:
        not_additive += not modifier.additive
        if id(modifier.operand) in needed and (not_additive or modifier.kernel_op not in ("bias_rows", "bias_keys")):
            return False
    return not_additive <= 1 and serves(problem)


#: Size of vectors up to which differences for all keys at once take less time than the search for near ones.
SHORT = 4

#: Multiply-adds below which waking a second thread costs more than it saves.
SMALL = 2_000_000
#: Scores of a block of rows that stay in scratch memory for the sums of their columns: 65,536 keys of 128 rows.
STRIP = 2**23
#: Words of a cache line.
LINE = 8


class KernelCall:
    """One call of a kernel: the fields of its params record, and the tensors whose addresses others are."""

    def __init__(self, problem: Problem, block_i: int, block_j: int) -> None:
        runtime = load()
        assert runtime is not None
        self.runtime, self.dtype = runtime, problem.compute_dtype
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        #: The call of a second matrix, which the kernel reads too.
        self.other: KernelCall | None = None
        b, h, i, j = problem.shape
        self.work = b * h * i * j * problem.q.shape[3]
        self.q, self.k = self.rows("q", problem.q, "bhi"), self.rows("k", problem.k, "bhj")
        intervals = problem.intervals
        lo = self.out("lo", intervals.lo.long().contiguous())
        self.out("hi", intervals.hi.long().contiguous())
        self.set(
            itemsize=self.dtype.itemsize,
            gemm=runtime.gemm[self.dtype.itemsize],
            B=b,
            H=h,
            G=problem.k.shape[1],
            I=i,
            J=j,
            D=problem.q.shape[3],
            offset=problem.offset,
            block_i=block_i,
            block_j=block_j,
            scale=problem.similarity_kernel.scale,
            n_intervals=lo.shape[1],
            intervals_b=lo.shape[1] * i if len(lo) > 1 else 0,
        )
        #: Rows of the modifier table, with a tensor in the place of its address.
        self.modifiers = self._modifiers(problem)

    def set(self, **fields: Any) -> None:
        self.fields.update(fields)

    def rows(self, name: str, tensor: Tensor, axes: str) -> Tensor:
        """Set a tensor as rows that BLAS can read: unit stride within a row, rows that do not overlap."""
        tensor = tensor.to(self.dtype)
        if tensor.stride(3) != 1 or tensor.stride(2) < tensor.shape[3]:
            tensor = tensor.contiguous()
        (b, h, _, size), (of_b, of_h, of_row, _) = tensor.shape, tensor.stride()
        self.fields[f"{name}_{axes[0]}"] = 0 if b == 1 else of_b
        self.fields[f"{name}_{axes[1]}"] = 0 if h == 1 else of_h
        self.fields[f"{name}_{axes[2]}"] = max(of_row, size, 1)
        return self.out(name, tensor)

    def out(self, name: str, tensor: Tensor) -> Tensor:
        self.tensors[name] = tensor
        return tensor

    def _modifiers(self, problem: Problem) -> list[tuple[Any, ...]]:
        kernels, no_keys = self.runtime.kernels, (0,) * 7
        rows: list[tuple[Any, ...]] = []
        for modifier in problem.modifiers:
            at: tuple[Any, ...] = (0, 0, 0, 0, 0)
            if modifier.operand is not None:
                tensor = modifier.operand.to(self.dtype)
                at = tensor, *_strides(tensor)
            rows.append((kernels.MODIFIER_KINDS[modifier.kernel_op], *at, modifier.constant, *no_keys))
        if problem.similarity_kernel.distance_scale:
            products, own = problem.q.shape[3] > SHORT, problem.similarity_kernel.own_modifiers
            rows[own if products else 0 : own] = [self._distances(problem)]
        for cells in [] if problem.mask is None else problem.mask.dense_parts() or []:
            rows.append((kernels.DENSE_MASK, cells, *_strides(cells), 0, *no_keys))
        return rows

    def _distances(self, problem: Problem) -> tuple[Any, ...]:
        """The row of the table by which scores become differences, where products of q and k would cancel."""
        kernel, (g, size) = problem.similarity_kernel, problem.k.shape[1::2]
        q = [self.q, *(self.fields[name] for name in ("q_b", "q_h", "q_i"))]
        k_j, k = self.fields["k_j"], [self.k, *(self.fields[name] for name in ("k_b", "k_h")), 0]
        if size <= SHORT:
            keys = self.k.mT.contiguous()
            k_j, k = 1, [keys, *_strides(keys)[:2], keys.shape[3]]
        group = max(1, problem.q.shape[1] // max(1, g))
        scale, near = kernel.distance_scale, kernel.distance_near
        return (self.runtime.kernels.DISTANCE, *q, k_j, scale, *k, group, size, near)

    def run(self, kernel: str, items: int, scratch: int) -> None:
        """Run the kernel over `items` on PyTorch's threads; `scratch` is the bytes of scratch memory per thread."""
        tensors: list[Tensor | None] = []
        launch = KernelLaunch(self, kernel, items, scratch, tensors)
        launch([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        record_launch(launch, tensors)


class KernelLaunch:
    """A kernel with its arguments as one block of words, all but the addresses of tensors; it keeps none alive.

    In the block are the params record, the modifiers, the same of a second matrix, and the counters of work.
    """

    def __init__(self, call: KernelCall, kernel: str, items: int, scratch: int, tensors: list[Tensor | None]) -> None:
        """`tensors` receives those whose addresses it takes."""
        self.runtime = call.runtime
        self.kernel = call.runtime.kernels.kernel(kernel, call.dtype.itemsize)
        self.items, self.wakes_threads = items, call.work >= SMALL
        self.scratch = (scratch + 127) // 64 * 64
        self.words = array("q")
        self.addresses: list[int] = []  # the word of each tensor's address
        self.places: list[tuple[int, int]] = []  # words whose address another word holds
        call.set(scratch_size=self.scratch)
        self._add(call, tensors)
        word_of = call.runtime.kernels.WORDS
        if call.other is not None:
            self.places.append((word_of["other"], len(self.words)))
            self._add(call.other, tensors)
        self.places.append((word_of["counter"], len(self.words) + LINE))  # in a cache line of their own
        self.words.extend([0] * 2 * LINE)
        self.scratch_word = word_of["scratch"]

    def _add(self, call: KernelCall, tensors: list[Tensor | None]) -> None:
        """Append the record of a call and its modifiers."""
        kernels, start = call.runtime.kernels, len(self.words)

        def point(word: int, tensor: Tensor) -> None:
            self.addresses.append(word)
            tensors.append(tensor)

        self.words.frombytes(kernels.params_record(call.fields | {"modifier_count": len(call.modifiers)}))
        for name, tensor in call.tensors.items():
            point(start + kernels.WORDS[name], tensor)
        if not call.modifiers:
            return
        self.places.append((start + kernels.WORDS["modifiers"], len(self.words)))
        for row in call.modifiers:
            start = len(self.words)
            plain = tuple(0 if isinstance(x, Tensor) else x for x in row)
            self.words.frombytes(kernels.modifier_table([plain]).tobytes())
            for column, x in enumerate(row):
                if isinstance(x, Tensor):
                    point(start + column, x)

    def __call__(self, at: list[int]) -> None:
        """Run it on tensors at these addresses."""
        words = self.words[:]
        start = words.buffer_info()[0]
        for word, place in self.places:
            words[word] = start + 8 * place
        for word, address in zip(self.addresses, at, strict=True):
            words[word] = address
        threads = max(1, min(torch.get_num_threads(), self.items)) if self.wakes_threads and not _forked else 1
        scratch = torch.empty(threads * self.scratch, dtype=torch.uint8, device="cpu")
        words[self.scratch_word] = scratch.data_ptr()
        if threads > 1:
            self.runtime.parallel(self.kernel.address, start, threads, 0)
            return
        set_threads = self.runtime.set_local_threads
        before = set_threads(1) if set_threads else 0
        self.kernel.call(start)
        if set_threads:
            set_threads(before)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides over (b, h, i, j) in elements; 0 along an axis that broadcasts."""
    return tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _tile_size(problem: Problem) -> tuple[int, int]:
    """Rows and keys of a tile: 128 × 512, but fewer rows for middling lengths, where a causal edge would waste more."""
    rows, keys = problem.shape[2:]
    block_i = 64 if 128 < rows < 1024 else 128
    return max(1, min(rows, block_i)), max(1, min(keys, 512))


def forward(problem: Problem, request: Request) -> Results:
    """One pass over the keys: row statistics, and with them column statistics, from the same scores."""
    b, h, i, j = problem.shape
    block_i, block_j = _tile_size(problem)
    call = KernelCall(problem, block_i, block_j)
    outputs = {"norm": call.out("norm", torch.empty(b, h, i, 2, dtype=call.dtype, device="cpu"))}
    if request.wants("y"):
        assert request.v is not None
        v = call.rows("v", request.v, "bhj")
        call.set(V=v.shape[1], E=v.shape[3])
        outputs["y"] = call.out("y", torch.empty(b, h, i, v.shape[3], dtype=call.dtype, device="cpu"))
    for name in call.runtime.kernels.ROW_STATISTICS:
        if request.wants(name):
            make = torch.zeros if name in ("mean_distance", "mass") else torch.empty  # those are added up in place
            outputs[name] = call.out(name, make(b, h, i, dtype=call.dtype, device="cpu"))
    if request.wants("mass"):
        call.out("keys", required(request.keys).to(call.dtype).contiguous())
    if request.wants("argmax"):
        outputs["argmax"] = call.out("argmax", torch.full((b, h, i), -1, dtype=torch.int64, device="cpu"))
    if request.wants("topk_scores", "topk_indices"):
        shape = (b, h, i, request.topk)
        outputs["topk_scores"] = call.out("topk_scores", torch.full(shape, -torch.inf, dtype=call.dtype, device="cpu"))
        outputs["topk_indices"] = call.out("topk_indices", torch.full(shape, -1, dtype=torch.int64, device="cpu"))
        call.set(topk=request.topk)
    if problem.sink is not None:
        sink = problem.sink.to(call.dtype)
        call.out("sink", sink)
        call.set(sink_b=_strides(sink)[0], sink_h=_strides(sink)[1])
    kernel, items, strip, columns = "forward", b * h * -(-i // block_i), 1, dict[str, Tensor]()
    if request.wants(*SECOND_PASS):
        strip = max(1, min(call.fields["n_intervals"] * -(-j // block_j), STRIP // (block_i * block_j)))
        chunks = _chunks(i, b * h, block_i, 1 if request.wants("z") else 4)  # of z each is as large as the keys
        columns = _column_sums(call, request, chunks)
        kernel, items = "strip_pass", b * h * chunks
    call.set(strip=strip)
    call.run(kernel, items, call.dtype.itemsize * (block_i * (block_j * strip + strip + 3) + block_j + 64))
    outputs |= {name: _sum_chunks(x).to(call.dtype) for name, x in columns.items()}
    return {name: outputs[name] for name in request.names}


def _chunks(rows: int, heads: int, block_i: int, per_thread: int = 1) -> int:
    """Number of chunks of rows, so that every thread has work; each chunk has column sums of its own."""
    items = torch.get_num_threads() * per_thread
    blocks = -(-rows // block_i)
    return max(1, min(blocks, -(-items // max(heads, 1))))


def _sum_chunks(parts: Tensor) -> Tensor:
    """The sum over chunks; of one chunk, itself."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def column_pass(problem: Problem, request: Request, norm: Tensor) -> Results:
    """The column pass: a second pass over the weights of finished rows, for the column statistics."""
    b, h, i, _ = problem.shape
    block_i, block_j = _tile_size(problem)
    call = KernelCall(problem, block_i, block_j)
    window = request.window
    row_from, row_to = (0, i) if window is None else (max(0, window.i0), min(i, window.i1))
    row_from -= row_from % block_i  # whole tiles, whose products are those that the norm was computed from
    chunks = _chunks(row_to - row_from, b * h, block_i)
    call.out("norm", norm.contiguous())
    call.set(row_from=row_from, row_to=row_to)
    outputs = _column_sums(call, request, chunks)
    call.work = b * h * (row_to - row_from) * (call.fields["key_to"] - call.fields["key_from"]) * problem.q.shape[3]
    call.run("column_pass", b * h * chunks, call.dtype.itemsize * block_j * (block_i + 1))
    return {name: _sum_chunks(x).to(call.dtype) for name, x in outputs.items()}


def _column_sums(call: KernelCall, request: Request, chunks: int) -> dict[str, Tensor]:
    """Memory for the column statistics, one for each chunk of rows."""
    b, h, j = (call.fields[name] for name in "BHJ")
    window = request.window
    # Over ranks a window reaches beyond the keys that are here.
    key_from, key_to = (0, j) if window is None else (max(0, window.j0), min(j, window.j1))
    call.set(chunks=chunks, key_from=key_from, key_to=key_to)
    outputs = {}
    if request.wants("received"):
        outputs["received"] = call.out("received", torch.zeros(chunks, b, h, j, dtype=torch.float64, device="cpu"))
    if request.wants("pool"):
        tiling = request.tiling
        assert tiling is not None
        outputs["pool"] = call.out(
            "pool", torch.zeros(chunks, b, h, tiling.rows, tiling.cols, dtype=torch.float64, device="cpu")
        )
        call.set(tile_rows=tiling.rows, tile_cols=tiling.cols, i0=tiling.i0, i1=tiling.i1, j0=tiling.j0, j1=tiling.j1)
    if request.wants("z"):
        assert request.u is not None
        u = call.rows("u", request.u, "bhi")
        call.set(U=u.shape[3])
        outputs["z"] = call.out("z", torch.zeros(chunks, b, h, j, u.shape[3], dtype=call.dtype, device="cpu"))
    return outputs


def cells(problem: Problem, request: Request) -> Tensor:
    """Scores at chosen rows and keys, (b, h, rows, cols), −inf where hidden; from the tiles of `forward`."""
    b, h, i, j = problem.shape
    assert request.rows is not None
    assert request.cols is not None
    block_i, block_j = _tile_size(problem)
    call = KernelCall(problem, block_i, block_j)
    shape = (b, h, len(request.rows), len(request.cols))
    outputs = call.out("cells", torch.full(shape, -torch.inf, dtype=call.dtype, device="cpu"))
    for name, positions in (("row", request.rows), ("col", request.cols)):
        ordered, place = positions.sort()
        call.out(f"{name}_at", ordered)
        call.out(f"{name}_place", place)
        call.set(**{f"{name}_count": len(positions)})
    # Upper bound of the tiles that are visited.
    rows, cols = min(i, len(request.rows) * block_i), min(j, len(request.cols) * block_j)
    call.work = b * h * rows * cols * problem.q.shape[3]
    call.run("cells", b * h * -(-i // block_i), call.dtype.itemsize * block_i * block_j)
    return outputs


def backward(problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad) -> InputGrads:
    """Gradients of the problem's tensors in their order, and of v."""
    b, h, i, j = problem.shape
    d, heads = problem.q.shape[3], problem.k.shape[1]
    dy = gradient.dy
    v = request.v if dy is not None else None
    if v is not None and v.shape[1] != heads:  # different groups of keys and values: repeat both for every query head
        repeated = unflatten(*_with_keys(problem, repeat_kv(problem.k, h)))
        (dq, dk, *rest), dv, _ = backward(repeated, _with_values(request, repeat_kv(v, h)), norm, gradient)
        return InputGrads([dq, sum_groups(required(dk), heads), *rest], sum_groups(required(dv), v.shape[1]), None)
    block_i, block_j = _tile_size(problem)
    call = KernelCall(problem, block_i, block_j)
    chunks = _chunks(i, b * heads, block_i)
    call.set(chunks=chunks)
    call.out("norm", norm.contiguous())
    call.out("delta", gradient.delta.to(call.dtype).contiguous())
    left = call.rows("left", gradient.left.expand(b, h, -1, -1), "bhi")
    right = call.rows("right", gradient.right, "bhj")
    call.set(X=left.shape[3], right_group=h // right.shape[1])
    if gradient.d_entropy is not None:
        call.out("d_entropy", gradient.d_entropy.to(call.dtype).contiguous())
    if gradient.d_distance is not None:
        call.out("d_distance", gradient.d_distance.to(call.dtype).contiguous())
    dq = call.out("dq", torch.zeros(b, h, i, d, dtype=call.dtype, device="cpu"))
    dk = call.out("dk", torch.zeros(chunks, b, heads, j, d, dtype=call.dtype, device="cpu"))
    dv = None
    if v is not None and dy is not None:
        call.rows("dy", dy, "bhi")
        call.set(E=v.shape[3])
        dv = call.out("dv", torch.zeros(chunks, b, heads, j, v.shape[3], dtype=call.dtype, device="cpu"))
    biases = [m.operand for m in problem.modifiers if m.kernel_op in ("bias", "bias_rows", "bias_keys")]
    if biases:
        drow = call.out("drow", torch.zeros(b, h, i, dtype=call.dtype, device="cpu"))
        dkey = call.out("dkey", torch.zeros(chunks, b, h, j, dtype=call.dtype, device="cpu"))
    call.run("backward", b * heads * chunks, call.dtype.itemsize * block_j * (2 * block_i + 2))
    outputs: list[Tensor | None] = [dq, _sum_chunks(dk)]
    for tensor in flatten(problem)[1][2:]:
        if tensor is problem.sink:
            outputs.append(gradient.of_sink(tensor, norm))
        elif any(tensor is bias for bias in biases) and 1 in tensor.shape[2:]:
            sums = drow[..., None] if tensor.shape[3] == 1 else _sum_chunks(dkey)[:, :, None, :]
            outputs.append(sums.sum_to_size(tensor.shape))
        else:
            outputs.append(None)
    return InputGrads(outputs, None if dv is None else _sum_chunks(dv), None)


def _with_keys(problem: Problem, k: Tensor) -> tuple[Any, list[Tensor]]:
    spec, tensors = flatten(problem)
    return spec, [tensors[0], k, *tensors[2:]]


def _with_values(request: Request, v: Tensor) -> Request:
    return dataclasses.replace(request, v=v)
