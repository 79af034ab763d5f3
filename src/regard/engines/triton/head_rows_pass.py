"""Heads taken together on the GPU: from a problem to kernel arguments, and from outputs to results."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.stats import Request
from . import ENGINE, unsupported_reason
from .kernel_inputs import KernelInputs, LaunchArgs, empty, num_sms, padded_size, tma_descriptors
from .kernels.head_rows import entropy_kernel, finish_entropy_kernel, tiles_kernel
from .kernels.tile_ops import tensor_arg
from .launcher import INTERPRETED, launch
from .tile_config import Config, choose_config

__all__ = ["HeadInputs", "entropy", "serves_heads", "tiles"]

#: Programs for each multiprocessor: the last ones leave few of them idle.
PROGRAMS = 16
#: Rows of a program of `finish_entropy_kernel`.
FINISHED_ROWS = 128


def serves_heads(problem: Problem) -> bool:
    """Whether the kernels can add up these heads."""
    product = problem.similarity_kernel.kernel_op == "product"
    there = 0 not in (*problem.shape, problem.q.shape[-1])
    return product and there and unsupported_reason(problem, Request(("norm",))) is None


class HeadInputs:
    """A problem, its norm and the shares of its heads as kernel arguments.

    `factors` has one number a head, in groups of as many heads each as there are groups; `total` divides the sum of a
    group, None where nothing does. Without factors it is the largest weight that counts.
    """

    def __init__(
        self, problem: Problem, norm: Tensor | None, groups: int, factors: Tensor | None, total: Tensor | None
    ) -> None:
        self.p, self.groups = KernelInputs(problem), groups
        if norm is None:
            norm = ENGINE.compute(problem, Request(("norm",)), ("norm",), {})["norm"]
        self.norm = self.p.norm2(norm)
        self.by = "max" if factors is None else "sum" if total is None else "mean"
        self.factors = self.norm if factors is None else factors.float().contiguous()
        self.total = self.norm if total is None else total.float().contiguous()
        self.config = choose_config("head_rows", self.p, 0, None)
        self.table = self.p.row_table(self.config)
        self.key = self.p.key and (self.p.key, self.config, self.by, groups)

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.p.tensors, self.norm, self.factors, self.total, self.table.ptr]

    def args(self) -> dict[str, Any]:
        """Arguments that all kernels of tiles take."""
        p, config, width = self.p, self.config, padded_size(self.p.d, self.p.q)
        tma, descriptors, layouts = tma_descriptors(
            p, config, (p.q, (config.block_i, width)), (p.k, (config.block_j, width))
        )
        return {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "q_desc": descriptors[0], "k_desc": descriptors[1], "q_layout": layouts[0],
            "k_layout": layouts[1], "norm": self.norm, "factors": self.factors, "total": self.total, "row_table": self.table,
            "groups": self.groups, "SCALE_FOLDED": p.scale_folded, "TMA": tma, "BY": self.by,
            "HEAD_MASK": p.mask_format.kind == "flags" and p.mask_format.arg.flags_h != 0, "BLOCK_D": width, **p.common_args,
            **config.launch,
        }  # fmt: skip


def entropy(heads: HeadInputs) -> Tensor:
    """The entropy of every row of every group (b, g, i); a sink's share is one more outcome."""
    p, groups, config = heads.p, heads.groups, heads.config
    splits, sink = _splits(p, groups, config), p.problem.sink
    sums = empty(p.b, groups, splits, p.i, like=p.q, dtype=torch.float32)
    out = empty(p.b, groups, p.i, like=p.q, dtype=torch.float32)

    def launch_args() -> LaunchArgs:
        programs = p.b * groups * splits * triton.cdiv(p.i, config.block_i)
        return programs, {**heads.args(), "out": sums, "splits": splits}

    def finish_args() -> LaunchArgs:
        return p.b * groups * triton.cdiv(p.i, FINISHED_ROWS), {
            "sums": sums, "norm": heads.norm, "factors": heads.factors, "total": heads.total, "out": out,
            "sink": p.unused if sink is None else tensor_arg(sink),
            "sizes": p.common_args["sizes"], "groups": groups, "splits": splits, "SCALE_FOLDED": p.scale_folded,
            "SINK": sink is not None, "BY": heads.by, "BLOCK_I": FINISHED_ROWS, "num_warps": 4,
        }  # fmt: skip

    launch(entropy_kernel, heads.key and (heads.key, splits), [*heads.tensors, sums], launch_args)
    tensors = [p.q, sums, heads.norm, heads.factors, heads.total, sink, out]
    launch(finish_entropy_kernel, heads.key and (heads.key, splits), tensors, finish_args)
    return out


def tiles(heads: HeadInputs, rows: slice, keys: slice) -> Tensor:
    """A rectangle of the finished matrix, (b, g, rows, keys); 0 where hidden."""
    p, groups, config = heads.p, heads.groups, heads.config
    i, j = rows.stop - rows.start, keys.stop - keys.start
    out = empty(p.b, groups, i, j, like=p.q, dtype=torch.float32)
    if 0 in out.shape:
        return out

    def launch_args() -> LaunchArgs:
        row_blocks = triton.cdiv(rows.stop, config.block_i) - rows.start // config.block_i
        key_blocks = triton.cdiv(keys.stop, config.block_j) - keys.start // config.block_j
        place = {"out": out, "i0": rows.start, "rows": i, "j0": keys.start, "cols": j}
        return p.b * groups * row_blocks * key_blocks, {**heads.args(), **place}

    key = heads.key and (heads.key, rows.start, i, keys.start, j)
    launch(tiles_kernel, key, [*heads.tensors, out], launch_args)
    return out


def _splits(p: KernelInputs, groups: int, config: Config) -> int:
    """Among how many programs the key blocks of a row block are split: as many as fill the GPU."""
    widest = triton.cdiv(p.j, config.block_j)
    if p.mask_format.kind == "band":
        arg = p.mask_format.arg
        widest = min(widest, (arg.before + arg.after + config.block_i) // config.block_j + 2)
    blocks = p.b * groups * triton.cdiv(p.i, config.block_i)
    sms = 1 if INTERPRETED else num_sms(p.q.device)
    return max(1, min(widest, triton.cdiv(PROGRAMS * sms, blocks)))
