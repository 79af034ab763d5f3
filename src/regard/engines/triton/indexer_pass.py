"""The loss of a sparse-attention indexer on the GPU: from a teacher's heads and the index to kernel arguments, and to results."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.pytree import replace_fields
from ...core.scores.similarity import Product
from ...core.stats import Request
from . import ENGINE, MAX_SIZE, unsupported_reason
from .forward_pass import norm2_of_product
from .kernel_inputs import KernelInputs, LaunchArgs, empty, num_sms, padded_size, tma_descriptors
from .kernels.indexer import StripArg, cells_kernel, indexer_kernel, keys_kernel, merge_kernel, queries_kernel
from .kernels.tile_ops import TensorArg, row_arg, tensor_arg
from .launcher import INTERPRETED, launch
from .tile_config import Config, choose_config

__all__ = ["backward", "forward_pass", "serves_heads"]

#: Parts of the keys at most: each has a state of its own for every row.
PARTS = 64
#: Programs of a multiprocessor, so that all end at about the same time, and tiles of each at most.
PROGRAMS, MOST_TILES = 32, 4
#: Parts at most of a walk over rows or keys that sums up gradients.
MOST_SPLITS = 8
#: Blocks of rows whose programs run side by side.
SIDE_BY_SIDE = 12
#: Cells of dI that exist at a time: 64 MB in a 16-bit type.
STRIP = 2**25
#: Rows and keys of a strip are a multiple of this, and so of every block's.
BLOCK = 128


def serves_heads(problem: Problem, other: Problem | None, heads: int) -> bool:
    """Whether the kernels can compare these heads, taken together as so many matrices, with the scores of an indexer."""
    if other is None or other.similarity_kernel.kernel_op != "relu_sum" or heads != 1 or other.shape[1] != 1:
        return False
    if other.modifiers or other.sink is not None or other.compute_dtype == torch.float64 or other.k.shape[3] > MAX_SIZE:
        return False
    return (
        problem.similarity_kernel.kernel_op == "product"
        and 0 not in (*problem.shape, problem.q.shape[-1], *other.shape, other.k.shape[-1])
        and unsupported_reason(problem, Request(("norm",))) is None
    )


class IndexInputs:
    """The teacher's heads and the index as kernel arguments; queries of the index unpacked, each head for itself."""

    def __init__(self, problem: Problem, other: Problem) -> None:
        self.teacher, self.packed = KernelInputs(problem), other.q
        q, w = other.similarity_kernel.unpacked(other.q[:, 0], other.k.shape[3])  # type: ignore[attr-defined]  # a `ReluSum`
        self.w = w.float().contiguous()  # b n i
        view = other._with_intervals(replace_fields(other, q=q.contiguous(), similarity_kernel=Product(1.0)))
        self.index = KernelInputs(view)
        self.b, self.i, self.j = self.teacher.b, self.teacher.i, self.teacher.j
        key, key2 = self.teacher.key, self.index.key
        self.key: Hashable | None = (key, key2) if key is not None and key2 is not None else None

    @property
    def forbids(self) -> bool:
        """Whether the index may hide a key that the teacher sees."""
        first, second = self.teacher.problem, self.index.problem
        if second.mask is None or first.mask is second.mask:
            return second.mask is not None and first.offset != second.offset
        kinds = [p.mask_format.kind for p in (self.teacher, self.index)]
        if not set(kinds) <= {"causal", "band"}:
            return True
        a, b = (p.mask_format.arg for p in (self.teacher, self.index))
        return (a.before, a.after, first.offset) != (b.before, b.after, second.offset)

    def shared_norm(self, norm: Tensor, shares: Tensor) -> Tensor:
        """The teacher's norm in base 2, less the logarithm of each head's factor: weights come out multiplied by it."""
        p = self.teacher
        norm2 = norm2_of_product(p, norm).view(p.b, p.h, p.i, -1)
        norm2.select(-1, -1).sub_(shares.float().reshape(-1, p.h, 1).log2())
        return norm2

    def tile_config(self) -> Config:
        """The configuration of kernels that compute tiles of both matrices."""
        chosen = choose_config("indexer", self.teacher, self.index.d, self.index.q)
        if "flags" not in (self.teacher.mask_format.kind, self.index.mask_format.kind):
            return chosen
        # Tiles of flags take registers beside the scores.
        return replace(
            chosen, block_i=min(chosen.block_i, 64), block_j=min(chosen.block_j, 64), stages=min(chosen.stages, 2)
        )

    def tables(self, config: Config, by: str) -> list[TensorArg]:
        """The `row_table` or `key_table` of both matrices."""
        return [getattr(p, by)(config) for p in (self.teacher, self.index)]

    def tensors(self, tables: list[TensorArg]) -> list[Tensor | None]:
        """Tensors that every kernel reads."""
        return [*self.teacher.tensors, *self.index.tensors, self.w, *(table.ptr for table in tables)]

    def tile_args(self, config: Config, tables: list[TensorArg]) -> dict[str, Any]:
        """Arguments of kernels that compute tiles of both matrices."""
        p, block_d = self.teacher, padded_size(self.teacher.d, self.teacher.q)
        tma, (q, k, *_), (q_layout, k_layout, *_) = _descriptors(p, config, block_d)
        names = ("modifiers", "strides", "caps", "scale", "scale2", "D", "MODIFIERS", "FP32")
        args = {name: x for name, x in p.common_args.items() if name in names}
        return self.mask_args(config, tables, "row_table") | args | {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "q_desc": q, "k_desc": k, "q_layout": q_layout, "k_layout": k_layout,
            "w2": row_arg(self.w), "SCALE_FOLDED": p.scale_folded, "TMA": tma, "BLOCK_D": block_d,
        }  # fmt: skip

    def mask_args(self, config: Config, tables: list[TensorArg], by: str) -> dict[str, Any]:
        """The index, and who sees whom in both matrices."""
        return {
            "mask": self.teacher.mask_format.arg, "mask2": self.index.mask_format.arg, "sizes": self.teacher.common_args["sizes"],
            "sizes2": self.index.common_args["sizes"], by: tables[0], f"{by}2": tables[1], "MASK": self.teacher.mask_format.kind,
            "MASK2": self.index.mask_format.kind, "q2": tensor_arg(self.index.q), "k2": tensor_arg(self.index.k),
            "D2": self.index.d, "FP32_2": self.index.fp32, "BLOCK_D2": padded_size(self.index.d, self.index.q), **config.launch,
        }  # fmt: skip

    def parts(self, rows: int, config: Config) -> tuple[int, int]:
        """Number of parts of the keys, for so many rows of all sequences, and blocks of each."""
        blocks = triton.cdiv(self.j, config.block_j)
        each = min(MOST_TILES, triton.cdiv(rows, config.block_i) * blocks // (PROGRAMS * _sms(self.w)))
        each = max(1, each, triton.cdiv(blocks, PARTS))
        return triton.cdiv(blocks, each), each


def _sms(x: Tensor) -> int:
    return 4 if INTERPRETED else num_sms(x.device)


def _descriptors(p: KernelInputs, config: Config, block_d: int) -> tuple[bool, list[Any], list[Any]]:
    return tma_descriptors(p, config, (p.q, (config.block_i, block_d)), (p.k, (config.block_j, block_d)))


def forward_pass(
    problem: Problem, norm: Tensor | None, shares: Tensor, heads: int, other: Problem, measure: str, divided: bool
) -> tuple[Tensor, list[Tensor]]:
    """The measure of every row (b, 1, i), and what a backward needs: the shared norm, and four numbers a row."""
    pair = IndexInputs(problem, other)
    if norm is None:
        norm = ENGINE.compute(problem, Request(("norm",)), ("norm",), {})["norm"]
    norm2 = pair.shared_norm(norm, shares)
    b, i = pair.b, pair.i
    config = pair.tile_config()
    rows = triton.cdiv(i, config.block_i)
    parts, each = pair.parts(b * i, config)
    states = empty(parts, b * i, 4, like=norm2, dtype=torch.float32)
    tables, forbids, entropy = pair.tables(config, "row_table"), pair.forbids, int(measure == "kl")

    def launch_args() -> LaunchArgs:
        return b * rows * parts, {
            **pair.tile_args(config, tables), "norm": norm2, "out": states, "rows": rows, "parts": parts, "blocks_each": each,
            "side_by_side": SIDE_BY_SIDE, "ENTROPY": entropy, "FORBIDS": forbids,
        }  # fmt: skip

    key = pair.key and (pair.key, config, parts, each, entropy, forbids)
    launch(indexer_kernel, key, [*pair.tensors(tables), norm2, states], launch_args)
    value = empty(b, 1, i, like=norm2, dtype=torch.float32)
    factors = empty(b, i, 4, like=norm2, dtype=torch.float32)

    def merge_args() -> LaunchArgs:
        return triton.cdiv(b * i, 128), {
            "states": states, "out": value, "out_factors": factors, "rows": b * i, "parts": parts, "ENTROPY": entropy,
            "DIVIDED": divided, "BLOCK": 128,
        }  # fmt: skip

    launch(merge_kernel, (b * i, parts, entropy, divided), [states, value, factors], merge_args)
    return value, [norm2, factors]


class StripRows(NamedTuple):
    """Some rows of some sequences."""

    first_b: int
    batch: int
    first_i: int
    rows: int


def _strips(b: int, i: int, cols: int) -> Iterator[StripRows]:
    """Strips of at most STRIP cells, but at least BLOCK rows: several sequences, or some rows of one."""
    i = _full(i)
    if i * cols <= STRIP:
        batch = STRIP // (i * cols)
        yield from (StripRows(first, min(batch, b - first), 0, i) for first in range(0, b, batch))
    else:
        rows = max(1, STRIP // cols // BLOCK) * BLOCK
        for n in range(b):
            yield from (StripRows(n, 1, first, min(rows, i - first)) for first in range(0, i, rows))


def _full(n: int) -> int:
    """n rounded up to full blocks."""
    return triton.cdiv(n, BLOCK) * BLOCK


def backward(
    problem: Problem, shares: Tensor, other: Problem, divided: bool, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of packed queries and of keys of the index; those of infinite rows are 0."""
    norm2, factors = saved
    pair = IndexInputs(problem, other)
    b, i, j = pair.b, pair.i, pair.j
    grad = grad.float().reshape(b, i).contiguous()
    of_rows = pair.w * grad.unsqueeze(1)  # b n i
    # In half precision the gradient of a mean would underflow: rows are scaled to 1 at most, and keys back.
    scale = torch.where(of_rows.isfinite(), of_rows.abs(), 0).amax().clamp(min=1e-30)
    of_rows = of_rows / scale
    strips = list(_strips(b, i, _full(j)))
    of_queries, of_keys = (
        choose_config(f"indexer_{name}", pair.index, pair.index.d, None) for name in ("queries", "keys")
    )
    programs = strips[0].batch * triton.cdiv(strips[0].rows, of_queries.block_i) * pair.index.h
    parts = _splits(programs, triton.cdiv(j, of_queries.block_j), pair)
    key_parts = _splits(
        strips[0].batch * triton.cdiv(j, of_keys.block_j), triton.cdiv(strips[0].rows, of_keys.block_i), pair
    )
    wide = torch.float32 if parts > 1 else pair.packed.dtype
    dq = empty(parts * b, 1, i, pair.packed.shape[3], like=norm2, dtype=wide)
    dk = empty(key_parts, b, j, pair.index.d, like=norm2, dtype=torch.float32)
    cells = empty(max(s.batch * s.rows for s in strips), _full(j), like=norm2, dtype=pair.index.q.dtype)
    for strip in strips:
        _write_cells(pair, strip, cells, norm2, factors)
        _add_to_queries(pair, strip, cells, grad, dq, of_queries, parts)
        _add_to_keys(pair, strip, cells, of_rows, dk, of_keys, key_parts)
    dq = dq.unflatten(0, (parts, b)).sum(0) if parts > 1 else dq
    return dq, (dk.sum(0) * scale).unsqueeze(1)


def _splits(programs: int, blocks: int, pair: IndexInputs) -> int:
    """Parts of a walk over so many blocks, each with sums of its own, for enough programs to fill the GPU."""
    return max(1, min(blocks, MOST_SPLITS, 4 * _sms(pair.w) // programs))


def _strip_arg(strip: StripRows, cells: Tensor) -> StripArg:
    return StripArg(cells, strip.first_b, strip.first_i, strip.rows, cells.shape[1])


def _write_cells(pair: IndexInputs, strip: StripRows, cells: Tensor, norm2: Tensor, factors: Tensor) -> None:
    config = pair.tile_config()
    parts, each = pair.parts(strip.batch * strip.rows, config)
    tables = pair.tables(config, "row_table")

    def launch_args() -> LaunchArgs:
        rows = triton.cdiv(min(strip.rows, pair.i - strip.first_i), config.block_i)  # a table has no row past the end
        return strip.batch * rows * parts, {
            **pair.tile_args(config, tables), "norm": norm2, "factors": factors, "strip": _strip_arg(strip, cells), "rows": rows,
            "parts": parts, "blocks_each": each, "side_by_side": SIDE_BY_SIDE,
        }  # fmt: skip

    key = pair.key and (pair.key, config, strip, parts, each)
    launch(cells_kernel, key, [*pair.tensors(tables), norm2, factors, cells], launch_args)


def _add_to_queries(
    pair: IndexInputs, strip: StripRows, cells: Tensor, grad: Tensor, dq: Tensor, config: Config, parts: int
) -> None:
    tables = pair.tables(config, "row_table")

    def launch_args() -> LaunchArgs:
        blocks = triton.cdiv(min(strip.rows, pair.i - strip.first_i), config.block_i)
        return strip.batch * blocks * pair.index.h * parts, {
            **pair.mask_args(config, tables, "row_table"), "w2": row_arg(pair.w), "strip": _strip_arg(strip, cells), "grad": grad,
            "out_dq": tensor_arg(dq), "blocks": blocks, "parts": parts, "batch": pair.b,
        }  # fmt: skip

    launch(
        queries_kernel,
        pair.key and (pair.key, config, strip, parts),
        [*pair.tensors(tables), cells, grad, dq],
        launch_args,
    )


def _add_to_keys(
    pair: IndexInputs, strip: StripRows, cells: Tensor, of_rows: Tensor, dk: Tensor, config: Config, parts: int
) -> None:
    tables = pair.tables(config, "key_table")

    def launch_args() -> LaunchArgs:
        return strip.batch * triton.cdiv(pair.j, config.block_j) * parts, {
            **pair.mask_args(config, tables, "key_table"), "row_factors": row_arg(of_rows), "strip": _strip_arg(strip, cells),
            "out_dk": dk, "parts": parts, "blocks_each": triton.cdiv(triton.cdiv(strip.rows, config.block_i), parts),
            "batch": pair.b, "ADD": strip.first_i > 0,
        }  # fmt: skip

    launch(
        keys_kernel,
        pair.key and (pair.key, config, strip, parts),
        [*pair.tensors(tables), of_rows, cells, dk],
        launch_args,
    )
