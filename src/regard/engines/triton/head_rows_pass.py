"""Heads taken together on the GPU: from a problem to kernel arguments, and from outputs to results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem, sum_groups
from ...core.stats import Request
from . import ENGINE, unsupported_reason
from .forward_pass import norm_of_product
from .kernel_inputs import KernelInputs, LaunchArgs, empty, new_tile_counter, num_sms, padded_size, tma_descriptors
from .kernels.head_rows import entropy_kernel, finish_entropy_kernel, tiles_kernel
from .kernels.head_rows_backward import keys_kernel, rows_kernel
from .kernels.tile_ops import TensorArg, tensor_arg, tma_fits_heads
from .launcher import INTERPRETED, launch
from .tile_config import Config, choose_config

__all__ = ["HeadInputs", "entropy", "entropy_backward", "serves_heads", "tiles"]

#: Items of work for each multiprocessor: the last ones leave few of them idle.
ITEMS = 16
#: Rows of a program of `finish_entropy_kernel`.
FINISHED_ROWS = 128
#: Weights of heads together that a backward holds at a time, and what its strips of rows are a multiple of.
STRIP_NUMBERS, STRIP_ROWS = 2**26, 128


def serves_heads(problem: Problem) -> bool:
    """Whether the kernels can add up these heads."""
    product = problem.similarity_kernel.kernel_op == "product"
    there = 0 not in (*problem.shape, problem.q.shape[-1])
    return product and there and unsupported_reason(problem, Request(("norm",))) is None


class HeadInputs:
    """A problem, its norm and the shares of its heads as kernel arguments.

    `by`: "mean", "sum" or "max" of groups of adjacent heads; `factors` has a number a head, None for a maximum.
    """

    def __init__(self, problem: Problem, norm: Tensor | None, groups: int, by: str, factors: Tensor | None) -> None:
        self.p, self.groups, self.by = KernelInputs(problem), groups, by
        if norm is None:
            norm = ENGINE.compute(problem, Request(("norm",)), ("norm",), {})["norm"]
        self.norm = norm_of_product(self.p, norm).contiguous()
        self.factors = self.norm if factors is None else factors.float().contiguous()

    def key(self, *more: Hashable) -> Hashable | None:
        return self.p.key and (self.p.key, self.by, self.groups, *more)

    def tensors(self, table: TensorArg) -> list[Tensor | None]:
        return [*self.p.tensors, self.norm, self.factors, table.ptr]

    def args(self, config: Config, table: TensorArg) -> dict[str, Any]:
        """Arguments that the kernels of tiles take."""
        p, width = self.p, padded_size(self.p.d, self.p.q)
        tma, descriptors, layouts = tma_descriptors(
            p, config, (p.q, (config.block_i, width)), (p.k, (config.block_j, width))
        )
        return {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "q_desc": descriptors[0], "k_desc": descriptors[1], "q_layout": layouts[0],
            "k_layout": layouts[1], "norm": self.norm, "factors": self.factors, "row_table": table,
            "groups": self.groups, "SCALE_FOLDED": p.scale_folded, "TMA": tma, "BY": self.by,
            "HEAD_MASK": p.mask_format.kind == "flags" and p.mask_format.arg.flags_h != 0, "BLOCK_D": width, **p.common_args,
            **config.launch,
        }  # fmt: skip

    def fits_gluon(self, config: Config) -> bool:
        p = self.p
        return p.i > 64 and p.q.dtype == p.k.dtype and tma_fits_heads(p.q, p.k)


def entropy(heads: HeadInputs) -> Tensor:
    """The entropy of every row of every group (b, g, i); a sink's share is one more outcome."""
    p, groups, sink = heads.p, heads.groups, heads.p.problem.sink
    config = choose_config("head_rows", p, 0, None, heads.fits_gluon)
    splits = _splits(p, groups, config)
    sums = empty(p.b, groups, splits, p.i, like=p.q, dtype=torch.float32)
    out = empty(p.b, groups, p.i, like=p.q, dtype=torch.float32)

    def finish_args() -> LaunchArgs:
        return p.b * groups * triton.cdiv(p.i, FINISHED_ROWS), {
            "sums": sums, "norm": heads.norm, "factors": heads.factors, "out": out,
            "sink": p.unused if sink is None else tensor_arg(sink), "sizes": p.common_args["sizes"], "groups": groups, "splits": splits,
            "SCALE_FOLDED": p.scale_folded, "SINK": sink is not None, "BY": heads.by, "BLOCK_I": FINISHED_ROWS,
            "BLOCK_H": triton.next_power_of_2(p.h // groups), "num_warps": 4,
        }  # fmt: skip

    (_launch_ws if config.gluon else _launch_plain)(heads, config, sums, splits)
    tensors = [p.q, sums, heads.norm, heads.factors, sink, out]
    launch(finish_entropy_kernel, heads.key(splits), tensors, finish_args)
    return out


def _launch_plain(heads: HeadInputs, config: Config, sums: Tensor, splits: int) -> None:
    p, table = heads.p, heads.p.row_table(config)

    def launch_args() -> LaunchArgs:
        items = p.b * heads.groups * splits * triton.cdiv(p.i, config.block_i)
        return items, {**heads.args(config, table), "out": sums, "splits": splits}

    launch(entropy_kernel, heads.key(config, splits), [*heads.tensors(table), sums], launch_args)


def _launch_ws(heads: HeadInputs, config: Config, sums: Tensor, splits: int) -> None:
    from .hopper.gluon_ops import head_descriptor
    from .hopper.head_rows_ws import entropy_ws_kernel

    p, table, tile_counter = heads.p, heads.p.row_table(config), new_tile_counter(heads.p)

    def launch_args() -> LaunchArgs:
        width, items = padded_size(p.d, p.q), p.b * heads.groups * splits * triton.cdiv(p.i, config.block_i)
        return min(items, num_sms(p.q.device)), {
            "q_desc": head_descriptor(p.q, config.block_i // 2, width), "k_desc": head_descriptor(p.k, config.block_j, width),
            "tile_counter": tile_counter, "out": sums, "norm": heads.norm, "factors": heads.factors,
            "row_table": table, "groups": heads.groups, "splits": splits, "items": items, "BY": heads.by, "STAGES": config.stages,
            **{name: p.common_args[name] for name in ("mask", "sizes", "scale2", "MASK")}, **config.launch,
        }  # fmt: skip

    launch(entropy_ws_kernel, heads.key(config, splits), [*heads.tensors(table), sums, tile_counter], launch_args)


def tiles(heads: HeadInputs, rows: slice, keys: slice) -> Tensor:
    """A rectangle of the finished matrix, (b, g, rows, keys); 0 where hidden."""
    p, groups = heads.p, heads.groups
    config = choose_config("head_rows", p, 0, None)
    i, j, table = rows.stop - rows.start, keys.stop - keys.start, p.row_table(config)
    out = empty(p.b, groups, i, j, like=p.q, dtype=torch.float32)
    if 0 in out.shape:
        return out

    def launch_args() -> LaunchArgs:
        row_blocks = triton.cdiv(rows.stop, config.block_i) - rows.start // config.block_i
        key_blocks = triton.cdiv(keys.stop, config.block_j) - keys.start // config.block_j
        place = {"out": out, "i0": rows.start, "rows": i, "j0": keys.start, "cols": j}
        return p.b * groups * row_blocks * key_blocks, {**heads.args(config, table), **place}

    key = heads.key(config, rows.start, i, keys.start, j)
    launch(tiles_kernel, key, [*heads.tensors(table), out], launch_args)
    return out


def entropy_backward(heads: HeadInputs, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and keys from that of the entropy (b, g, i), without a sink; strip by strip of rows."""
    p = heads.p
    if heads.by == "mean":
        grad = grad / heads.factors.view(heads.groups, -1).sum(1, keepdim=True)
    grad = grad.float().contiguous()
    dq = empty(*p.q.shape, like=p.q, dtype=p.q.dtype)
    dk = empty(p.b, p.h, p.j, p.d, like=p.k, dtype=torch.float32)  # heads that share keys have sums of their own
    centre = empty(p.b, p.h, p.i, like=p.q, dtype=torch.float32)
    height = max(1, STRIP_NUMBERS // (p.b * heads.groups * p.j * STRIP_ROWS)) * STRIP_ROWS
    for start in range(0, p.i, height):
        rows = slice(start, min(p.i, start + height))
        strip = tiles(heads, rows, slice(0, p.j))
        _gradient(rows_kernel, heads, rows, [grad, strip, centre, dq])
        _gradient(keys_kernel, heads, rows, [grad, strip, centre, dk])
    return dq, sum_groups(dk, p.k.shape[1])


def _gradient(kernel: Any, heads: HeadInputs, rows: slice, tensors: list[Tensor]) -> None:
    """Launch a kernel of the backward on a strip of rows."""
    p, of_rows, count = heads.p, kernel is rows_kernel, rows.stop - rows.start
    config = choose_config("head_rows_dq" if of_rows else "head_rows_dk", p, 0, None)
    table = p.row_table(config) if of_rows else p.key_table(config)
    grad, strip, centre, out = tensors

    def launch_args() -> LaunchArgs:
        blocks = triton.cdiv(count, config.block_i) if of_rows else triton.cdiv(p.j, config.block_j)
        own = (
            {"row_table": table, "out_centre": centre, "out_dq": tensor_arg(out)}
            if of_rows
            else {"key_table": table, "centre": centre, "out_dk": tensor_arg(out), "ADD": rows.start > 0}
        )
        return p.b * p.h * blocks, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "norm": heads.norm, "factors": heads.factors, "grad": grad, "strip": strip,
            "groups": heads.groups, "i0": rows.start, "rows": count, "SCALE_FOLDED": p.scale_folded, "BLOCK_D": padded_size(p.d, p.q),
            **p.common_args, **config.launch, **own,
        }  # fmt: skip

    launch(kernel, heads.key(config, rows.start, count), [*heads.tensors(table), *tensors], launch_args)


def _splits(p: KernelInputs, groups: int, config: Config) -> int:
    """Among how many items of work the key blocks of a row block are split: as many as fill the GPU."""
    widest = triton.cdiv(p.j, config.block_j)
    if p.mask_format.kind == "band":
        arg = p.mask_format.arg
        widest = min(widest, (arg.before + arg.after + config.block_i) // config.block_j + 2)
    blocks = p.b * groups * triton.cdiv(p.i, config.block_i)
    sms = 1 if INTERPRETED else num_sms(p.q.device)
    return max(1, min(widest, triton.cdiv(ITEMS * sms, blocks)))
