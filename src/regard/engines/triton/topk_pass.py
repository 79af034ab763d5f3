"""The largest keys of every row: which kernels of `kernels.topk` run, and on what.

Problems with many tiles of plain products go by candidates, all others by search.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from .kernel_inputs import KernelInputs, LaunchArgs, empty, padded_size, tma_descriptors
from .kernels.tile_ops import row_arg, tensor_arg
from .kernels.topk import (
    compact_kernel,
    mark_candidates_kernel,
    rescore_sort_kernel,
    topk_bound_kernel,
    topk_search_kernel,
)
from .launcher import launch
from .tile_config import Config, choose_config

__all__ = ["topk", "uses_candidates"]

#: Bytes for the marks of candidates, one bit a cell: larger problems take several launches.
MAX_MARK_BYTES = 2**30
#: At most this many of a row are kept sorted in the registers of a thread.
MOST_SORTED = 16
#: Rows of a program of `compact_kernel`; rows, slots, components and warps of a program of `rescore_sort_kernel`. One warp
#: each: with more, every round would synchronise them.
COMPACT_ROWS, RESCORE_TILE = 4, (8, 8, 32, 1)


def topk(problem: Problem, n: int, tile_maxima: Tensor | None = None, norm: Tensor | None = None) -> dict[str, Tensor]:
    """The n largest scores of every row, and with `norm` their weights: by candidates where a forward pass stored
    `tile_maxima`, else by search."""
    p = KernelInputs(problem)
    outputs = {"topk_scores": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    outputs["topk_indices"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    if norm is not None:
        norm, outputs["topk_weights"] = norm.contiguous(), empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    flags, rows_per_flag = (None, 0) if tile_maxima is None else _by_candidates(p, n, tile_maxima, norm, outputs)
    one_tile = p.product and not p.fp32 and p.d <= 64 < p.j <= 128
    config = choose_config("one_tile" if one_tile else "topk", p, 0, None)
    assert not rows_per_flag or rows_per_flag % config.block_i == 0, "one flag for each block of rows"
    table = p.row_table(config)

    def launch_args() -> LaunchArgs:
        heads, block_d = p.b * p.h, padded_size(p.d, p.q)
        tma, descriptors, layouts = tma_descriptors(p, config, (p.k, (config.block_j, block_d)))
        return triton.cdiv(p.i, config.block_i) * heads, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "tanh_arg": p.tanh_arg, "k_desc": descriptors[0], "k_layout": layouts[0], "row_table": table,
            "flags": p.q if flags is None else flags, "heads": heads, **_topk_args(p, norm, outputs),
            "heads_per_group": p.heads_per_group(0), "SIMILARITY": p.similarity, "SCALE_FOLDED": p.scale_folded, "TMA": tma, "N": n,
            "BLOCK_N": triton.next_power_of_2(n), "BLOCK_D": block_d, "ROWS_PER_FLAG": rows_per_flag, "SORTED": n <= MOST_SORTED, "BOUND": p.j > config.block_j,
            "GROUPS": _groups(n, config), **p.common_args, **config.launch,
        }  # fmt: skip

    tensors = [*p.tensors, table.ptr, norm, *outputs.values(), flags]
    launch(topk_search_kernel, p.key and (p.key, rows_per_flag, config), tensors, launch_args)
    return outputs


def _topk_args(p: KernelInputs, norm: Tensor | None, outputs: dict[str, Tensor]) -> dict[str, Any]:
    names = {"topk_scores": "score", "topk_indices": "index", "topk_weights": "weight"}
    args = {argument: tensor_arg(outputs[name]) if name in outputs else p.unused for name, argument in names.items()}
    return {**args, "norm": p.unused if norm is None else tensor_arg(norm), "WEIGHT": norm is not None}


def _by_candidates(
    p: KernelInputs, n: int, tile_maxima: Tensor, norm: Tensor | None, outputs: dict[str, Tensor]
) -> tuple[Tensor, int]:
    """Store the n largest of nearly all rows; returns flags of row blocks that must be searched, and rows per flag."""
    config = choose_config("mark_candidates", p, 0, None)
    # With fewer groups the n-th largest maximum is too low a bound: in one row in a million too many keys reach it.
    min_keys = (n + 3 * n // 4) * triton.cdiv(p.j, tile_maxima.shape[2])
    capacity = triton.next_power_of_2(3 * n + 8)
    is_short = (
        triton.cdiv(p.j, config.block_j) * config.block_j < min_keys
    )  # then every block of rows finds its own bounds
    bounds = empty(p.b, p.h, p.i, like=tile_maxima, dtype=torch.float32) if is_short else _bounds(tile_maxima, n)
    candidates = empty(p.b, p.h, p.i, capacity, like=p.q, dtype=torch.int32)
    counts = empty(p.b, p.h, p.i, like=p.q, dtype=torch.int32)
    blocks, heads = triton.cdiv(p.i, config.block_i), p.b * p.h
    flags = torch.zeros(heads * blocks, dtype=torch.int32, device=p.q.device)
    words = triton.cdiv(triton.cdiv(p.j, config.block_j), 32) * config.block_j  # of a row
    blocks_at_once = max(1, min(blocks * heads, MAX_MARK_BYTES // (4 * words * config.block_i)))
    marks = empty(blocks_at_once, config.block_i, words, like=p.q, dtype=torch.int32)
    table = p.row_table(config)
    shared_args = {"heads": heads, "heads_per_group": p.heads_per_group(0), "row_table": table, "bounds": bounds, "marks": marks, "words": words, "N": n}  # fmt: skip

    def mark_args(first_program: int, programs: int) -> LaunchArgs:
        block_d = padded_size(p.d, p.q)
        tma, descriptors, layouts = tma_descriptors(p, config, (p.k, (config.block_j, block_d)))
        return programs, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "k_desc": descriptors[0], "k_layout": layouts[0], "first_program": first_program, "SCALE_FOLDED": p.scale_folded,
            "TMA": tma, "min_keys": min_keys, "EVEN_BLOCKS": p.j % config.block_j == 0, "GROUPS": _groups(n, config),
            "EDGES": p.mask_format.kind != "none" or p.j % config.block_j != 0, "BLOCK_D": block_d, **shared_args, **p.common_args, **config.launch,
        }  # fmt: skip

    def compact_args(first_program: int, programs: int) -> LaunchArgs:
        common = {name: p.common_args[name] for name in ("mask", "sizes", "MASK")}
        blocks = {"BLOCK_I": config.block_i, "BLOCK_J": config.block_j}
        rows = {
            "candidates": candidates,
            "counts": counts,
            "flags": flags,
            "first_program": first_program,
            "CAPACITY": capacity,
            "ROWS": COMPACT_ROWS,
        }
        return programs * (config.block_i // COMPACT_ROWS), {"num_warps": 1, **shared_args, **common, **blocks, **rows}

    def rescore_args() -> LaunchArgs:
        rows, slots, part, warps = RESCORE_TILE
        return triton.cdiv(p.i, rows) * heads, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "candidates": tensor_arg(candidates), "counts": row_arg(counts), **_topk_args(p, norm, outputs),
            "heads": heads, "SCALE_FOLDED": p.scale_folded, "N": n, "CAPACITY": capacity, "ROWS": rows, "SLOTS": slots,
            "BLOCK_D": min(part, padded_size(p.d)), "num_warps": warps, **p.common_args,
        }  # fmt: skip

    for first_program in range(0, blocks * heads, blocks_at_once):
        programs = min(blocks_at_once, blocks * heads - first_program)
        # Several launches are long: they are not cached.
        key = p.key and (p.key, n, min_keys, config) if programs == blocks * heads else None
        launch(
            mark_candidates_kernel,
            key,
            [*p.tensors, table.ptr, bounds, marks],
            lambda: mark_args(first_program, programs),  # noqa: B023
        )
        tensors = [*p.tensors, table.ptr, bounds, marks, candidates, counts, flags]
        launch(compact_kernel, key, tensors, lambda: compact_args(first_program, programs))  # noqa: B023
    launch(
        rescore_sort_kernel,
        p.key and (p.key, n),
        [*p.tensors, candidates, counts, norm, *outputs.values()],
        rescore_args,
    )
    return flags, config.block_i


def _bounds(tile_maxima: Tensor, n: int) -> Tensor:
    """For every row a score that its n largest keys reach, and hardly any other key; from bests (b, h, groups, i)."""
    b, h, groups, rows = tile_maxima.shape
    bounds = empty(b, h, rows, like=tile_maxima, dtype=torch.float32)
    blocks = {"BLOCK_GROUPS": triton.next_power_of_2(groups), "BLOCK": 32, "num_warps": 1}
    launch_args = {"tile_maxima": tile_maxima, "out": bounds, "I": rows, "groups": groups, "N": n, **blocks}
    launch(topk_bound_kernel, n, [tile_maxima, bounds], lambda: (b * h * triton.cdiv(rows, 32), launch_args))
    return bounds


def _groups(n: int, config: Config) -> int:
    """Groups of keys of whose maxima the n-th largest is a bound: twice as many as keys, so that about 1.4 n keys pass it."""
    return min(max(4, 2 * triton.next_power_of_2(n)), config.block_j // 2)


def uses_candidates(problem: Problem, n: int) -> bool:
    """Whether the n largest go by candidates: for products under at most one band, and enough tiles that walking them twice
    takes longer than the work a row."""
    p = KernelInputs(problem)
    if not p.product or p.fp32 or n > 16 or p.mask_format.kind not in ("none", "causal", "band"):
        return False
    if p.i > 2**25:  # its kernels use 32-bit offsets within a head
        return False
    widest = max(
        choose_config(kernel, p, p.d, None, lambda _: True).block_j for kernel in ("forward", "mark_candidates")
    )
    visible_keys = p.mask_format.arg.before + p.mask_format.arg.after if p.mask_format.kind == "band" else p.j
    return min(visible_keys, p.j) >= min(2 * n, 8) * widest
