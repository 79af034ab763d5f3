"""The profile of every head on the GPU: from a problem to kernel arguments, and from outputs to results."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.stats import Request, Results
from . import unsupported_reason
from .forward_pass import norm2_of_product, pipelined_args
from .kernel_inputs import KernelInputs, LaunchArgs, empty, padded_size, tma_descriptors
from .kernels.profile import BINS, chosen_keys_kernel, head_sums_kernel, near_bins_kernel, profile_kernel
from .kernels.tile_ops import row_arg, tensor_arg, tma_fits
from .launcher import launch
from .tile_config import Config, choose_config

__all__ = ["profile_pass", "serves_profile"]

#: Rows of a program of `chosen_keys_kernel`.
CHOSEN_ROWS = 64
#: Rows of a program of `near_bins_kernel`, which has one warp.
NEAR_ROWS = 32


def serves_profile(problem: Problem) -> bool:
    """Whether the kernels can profile this matrix."""
    product = problem.similarity_kernel.kernel_op == "product"
    there = 0 not in (*problem.shape, problem.q.shape[-1]) and problem.shape[2] < 2**24
    return product and there and unsupported_reason(problem, Request(("norm",))) is None


def profile_pass(problem: Problem, rows: Results, targets: Tensor) -> Results:
    """All sums of every head, `sums` and `place` of `core/rows/head_profile.py`."""
    p = KernelInputs(problem)
    rows = {name: rows[name].contiguous() for name in ("norm", "entropy", "max_score")}
    norm2, config = norm2_of_product(p, rows["norm"]), _config(p)
    over_keys = _over_keys(p, norm2, config)
    over_keys["chosen"] = _chosen_keys(p, norm2, targets)
    return head_sums(p, norm2, rows, over_keys, config.block_i // 2 if config.gluon else 1)


def head_sums(p: KernelInputs, norm2: Tensor, rows: Results, over_keys: dict[str, Tensor], searched: int) -> Results:
    """Sums over the rows, keys and tiles of every head. `searched`: rows from `query` on, among which the largest weight is."""
    sums = empty(p.b, p.h, 10 + 2 * BINS.value, like=p.q, dtype=torch.float64)
    place = empty(p.b, p.h, 3, like=p.q, dtype=torch.float64)
    tensors = {
        "entropy": rows["entropy"], "max_score": rows["max_score"], "norm": rows["norm"], "out": sums, "out_place": place, "norm2": norm2,
        **over_keys,
    }  # fmt: skip
    sizes = {
        "rows": p.i, "chosen_blocks": over_keys["chosen"].shape[-1], "lines": over_keys["bins"].shape[2],
        "blocks": over_keys["tie"].shape[2], "ROWS": searched, "BLOCK": 1024, "num_warps": 8,
    }  # fmt: skip

    def launch_args() -> LaunchArgs:
        more = {name: p.common_args[name] for name in ("sizes", "scale2", "D")}
        more |= {"q": tensor_arg(p.q), "k": tensor_arg(p.k), "BLOCK_D": padded_size(p.d, p.q)}
        return p.b * p.h, {**tensors, **sizes, **more, "CAUSAL": p.mask_format.kind == "causal"}

    launch(head_sums_kernel, p.key and (p.key, *sizes.values()), [p.q, p.k, *tensors.values()], launch_args)
    return {"sums": sums, "place": place}


def _over_keys(p: KernelInputs, norm2: Tensor, config: Config) -> dict[str, Tensor]:
    table, blocks = p.key_table(config), triton.cdiv(p.j, config.block_j)
    kernel, lines, near = profile_kernel, blocks, triton.cdiv(p.i, NEAR_ROWS)
    if config.gluon:
        from .hopper.profile_pipelined import profile_pipelined_kernel as kernel

        lines = blocks * config.warps + near
    names = {"received": p.j, "distance": p.j, "square": p.j, "tie": blocks}
    out = {name: empty(p.b, p.h, n, like=p.q, dtype=torch.float32) for name, n in names.items()}
    out |= {name: empty(p.b, p.h, blocks, like=p.q, dtype=torch.int64) for name in ("query", "key")}
    out["bins"] = empty(p.b, p.h, lines, BINS.value, like=p.q, dtype=torch.float32)

    def launch_args() -> LaunchArgs:
        block_d, heads = padded_size(p.d, p.q), p.b * p.h
        outputs: dict[str, Any] = {
            "out_received": row_arg(out["received"]), "out_distance": row_arg(out["distance"]), "out_square": row_arg(out["square"]),
            "out_bins": out["bins"], "out_tie": out["tie"], "out_query": out["query"], "out_key": out["key"],
            "heads": heads, "heads_per_group": p.heads_per_group(0), **config.launch,
        }  # fmt: skip
        if config.gluon:
            arguments = outputs | pipelined_args(p, config, norm2) | {"lines": lines}
            return blocks * heads, {name: x for name, x in arguments.items() if name != "mask"}
        tma, descriptors, layouts = tma_descriptors(p, config, (p.q, (config.block_i, block_d)))
        return blocks * heads, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "q_desc": descriptors[0], "q_layout": layouts[0], "norm": norm2, "key_table": table,
            "SCALE_FOLDED": p.scale_folded, "TMA": tma, "EDGES": p.edges(config), "EVEN_BLOCKS": p.even_blocks(config),
            "BLOCK_D": block_d, **p.common_args, **outputs,
        }  # fmt: skip

    tensors = [*p.tensors, norm2, table.ptr, *out.values()]
    launch(kernel, p.key and (p.key, config), tensors, launch_args)
    if config.gluon:
        near_bins(p, norm2, out["bins"], blocks * config.warps, config.block_j)
    return out


def near_bins(p: KernelInputs, norm2: Tensor, bins: Tensor, before: int, reach: int) -> None:
    """Sum the weights at distances below `reach` by bin, into the lines of `bins` from `before` on, one for each block of rows."""
    blocks = triton.cdiv(p.i, NEAR_ROWS)

    def launch_args() -> LaunchArgs:
        return p.b * p.h * blocks, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "norm": norm2, "out": bins, "lines": bins.shape[2], "before": before,
            "blocks": blocks, "CAUSAL": p.mask_format.kind == "causal", "REACH": reach, "BLOCK": NEAR_ROWS,
            "BLOCK_D": padded_size(p.d, p.q), "num_warps": 1,
            **{name: p.common_args[name] for name in ("sizes", "scale2", "D", "FP32")},
        }  # fmt: skip

    launch(near_bins_kernel, p.key and (p.key, before, reach), [*p.tensors, norm2, bins], launch_args)


def _config(p: KernelInputs) -> Config:
    """The pipelined kernel needs TMA for all inputs, squares of rows and keys, and bins that begin on diagonals of blocks."""

    def fits(config: Config) -> bool:
        squares = p.i == p.j and p.mask_format.kind in ("none", "causal") and p.problem.offset == 0
        same = p.q.dtype == p.k.dtype and p.even_blocks(config)
        return squares and same and tma_fits(p.d, (p.q, config.block_i), (p.k, config.block_j))

    return choose_config("profile", p, 0, None, fits)


def _chosen_keys(p: KernelInputs, norm2: Tensor, targets: Tensor) -> Tensor:
    """Sums over blocks of rows of the weights on the first key, the previous key and the target: (b, h, 3, blocks)."""
    targets, blocks = targets.reshape(-1, p.i).contiguous(), triton.cdiv(p.i, CHOSEN_ROWS)
    out = empty(p.b, p.h, 3, blocks, like=p.q, dtype=torch.float32)

    def launch_args() -> LaunchArgs:
        return p.b * p.h * blocks, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "norm": norm2, "targets": targets,
            "targets_b": p.i if len(targets) > 1 else 0, "out": out, "blocks": blocks, "SCALE_FOLDED": p.scale_folded,
            "BLOCK_I": CHOSEN_ROWS, "BLOCK_D": padded_size(p.d, p.q), "num_warps": 4, **p.common_args,
        }  # fmt: skip

    launch(chosen_keys_kernel, p.key, [*p.tensors, norm2, targets, out], launch_args)
    return out
