"""The forward pass over few rows (flash-decoding): query heads of a group share a tile, and the keys are split over programs.

Scores may be stored by that pass; `received` and `topk` then read them instead of the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from .kernel_inputs import (
    KernelInputs,
    LaunchArgs,
    empty,
    forward_outputs,
    num_sms,
    output_args,
    padded_size,
    tma_descriptors,
)
from .kernels.decode import (
    STATE_FIELDS,
    SplitArg,
    decode_kernel,
    merge_kernel,
    received_kernel,
    topk_of_part_kernel,
    topk_of_parts_kernel,
)
from .kernels.forward import row_stats
from .kernels.tile_ops import row_arg, tensor_arg
from .launcher import launch
from .tile_config import Config, forced

__all__ = ["forward", "received", "splits_keys", "stores_scores", "topk"]

#: Rows of a tile at most: more would be bound by products, not by reading keys.
MAX_TILE_ROWS = 64
#: Query positions up to which heads are packed and keys split.
MAX_POSITIONS = 64
#: Bytes of keys and values in a tile. With two more on their way a multiprocessor has 128 KB coming, four times what the memory's
#: latency takes at its bandwidth: one program keeps it busy. Smaller tiles wait more often for fewer bytes.
TILE_BYTES = 65536
#: Shared memory of a multiprocessor, in bytes.
SMEM_BYTES = 220 * 1024
#: The cost of a split before its first tile, in tiles.
SPLIT_OVERHEAD = 2
#: Splits of a row's keys at most.
MAX_SPLITS = 256
#: Bytes of stored scores at most.
MAX_SCORE_BYTES = 2**30
#: Scores of one row that one program searches for the largest.
SCORES_PER_PROGRAM = 2048


@dataclass(frozen=True)
class SplitPlan:
    """How programs share a pass over few rows."""

    config: Config
    pack: int  # heads of a group in one tile, for each position
    group: int  # query heads that share keys and values
    head_tiles: int  # tiles that the heads of a group take
    blocks: int  # tiles that the positions take
    units: int  # programs a split
    splits: int  # parts of the keys


def splits_keys(p: KernelInputs) -> bool:
    """Whether a pass over these rows is faster with the keys split over the machine."""
    if not p.product or p.i > MAX_POSITIONS:
        return False
    if "decode" in forced:
        return True
    return p.j >= 256 and (p.h > p.k.shape[1] or p.b * p.h < 2 * _num_sms(p))


def stores_scores(p: KernelInputs) -> bool:
    """Whether the scores of all rows are stored for columns and the largest, within a limit of memory.

    Passes of their own would read the keys again for every query head, each on as few multiprocessors as there are rows.
    """
    return 4 * p.b * p.h * p.i * p.j <= MAX_SCORE_BYTES


def forward(
    problem: Problem, names: tuple[str, ...], v: Tensor | None, keys: Tensor | None, store: bool = False
) -> dict[str, Tensor]:
    """One pass for those of y, lse, norm, max_score, argmax, entropy, mean_distance and mass in `names`; with `store` also `scores`."""
    p = KernelInputs(problem, 1 if v is None else v.shape[1])
    v, e, outputs = forward_outputs(p, names, v)
    plan = _split_plan(p, v, e)
    config, splits, rows = plan.config, plan.splits, p.b * p.h * p.i
    state = y_part = scores = None
    if splits > 1:
        state = empty(splits, STATE_FIELDS, rows, like=p.q, dtype=torch.float32)
        y_part = None if v is None else empty(splits, rows, e, like=p.q, dtype=torch.float32)
    if store:
        scores = empty(p.b, p.h, p.i, p.j, like=p.q, dtype=torch.float32)
    table = p.row_table(replace(config, block_i=config.block_i // plan.pack))

    def common() -> dict[str, Any]:
        buffers = (p.q if state is None else state, p.q if y_part is None else y_part)
        split = SplitArg(*buffers, rows, splits, plan.group, plan.head_tiles, plan.blocks)
        return _common_args(p, problem.sink, names, outputs, split, v is not None, e)

    def launch_args() -> LaunchArgs:
        values = (p.k, padded_size(p.d, p.q)) if v is None else (v, padded_size(e, p.q))
        tma, descriptors, layouts = tma_descriptors(
            p, config, (p.k, (config.block_j, padded_size(p.d, p.q))), (values[0], (config.block_j, values[1]))
        )
        return plan.units * splits, {
            "k_desc": descriptors[0], "v_desc": descriptors[1], "k_layout": layouts[0], "v_layout": layouts[1], "TMA": tma,
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "v": p.unused if v is None else tensor_arg(v), "row_table": table,
            "keys": p.unused if keys is None else tensor_arg(keys), "scores": p.q if scores is None else scores, "SCALE_FOLDED": p.scale_folded,
            "FP32_V": v is not None and v.dtype == torch.float32, "SHARED_KV": p.values_are_keys(v), "SPLIT": splits > 1,
            "SCORES": store, "EDGES": p.mask_format.kind != "none" or p.j % config.block_j != 0, "PACK": plan.pack,
            "BLOCK_D": padded_size(p.d, p.q), **common(), **p.common_args, **config.launch,
        }  # fmt: skip

    tensors = [*p.tensors, v, keys, problem.sink, table.ptr, *outputs.values(), state, y_part, scores]
    launch(decode_kernel, p.key and (p.key, names, config, plan.pack, splits), tensors, launch_args)
    if splits > 1:
        tensors = [p.q, problem.sink, *outputs.values(), state, y_part]
        launch(
            merge_kernel, p.key and (p.key, names, splits), tensors, lambda: (rows, _merge_args(p, common(), splits))
        )
    return outputs if scores is None else {**outputs, "scores": scores}


def _common_args(
    p: KernelInputs, sink: Tensor | None, names: tuple[str, ...], outputs: dict[str, Tensor], split: SplitArg, y: bool, e: int
) -> dict[str, Any]:  # fmt: skip
    """The arguments that `decode_kernel` and `merge_kernel` share."""
    return {
        "out": output_args(p, outputs), "split": split, "sink": p.unused if sink is None else tensor_arg(sink),
        "SINK": sink is not None, "STATS": row_stats(names), "Y": y, "E": e, "BLOCK_E": padded_size(e, p.q),
    }  # fmt: skip


def _merge_args(p: KernelInputs, common: dict[str, Any], splits: int) -> dict[str, Any]:
    splits_at_once = min(triton.next_power_of_2(splits), 32)
    return {"sizes": p.common_args["sizes"], "BLOCK_S": splits_at_once, "num_warps": 4, **common}


def _split_plan(p: KernelInputs, v: Tensor | None, e: int) -> SplitPlan:
    group = math.gcd(p.h // p.k.shape[1], p.h // p.v_heads)
    config, pack = _tile_shape(p, v, e, group)
    head_tiles, blocks = triton.cdiv(group, pack), triton.cdiv(p.i, config.block_i // pack)
    units = p.b * (p.h // group) * head_tiles * blocks
    splits = _splits(units, triton.cdiv(p.j, config.block_j), _slots(p, v, config))
    return SplitPlan(config, pack, group, head_tiles, blocks, units, splits)


def _tile_shape(p: KernelInputs, v: Tensor | None, e: int, group: int) -> tuple[Config, int]:
    """The tile of a program, and how many heads of a group it holds for each position."""
    most = (
        16 if p.fp32 else MAX_TILE_ROWS
    )  # three products of tf32 for one of float32: taller tiles have too few registers
    pack = min(triton.next_power_of_2(group), most)
    rows = max(16, pack * min(triton.next_power_of_2(p.i), most // pack))
    if (own := forced.get("decode")) is not None:
        return replace(own, block_i=max(own.block_i or rows, pack)), pack
    key_bytes = padded_size(p.d, p.q) * p.k.element_size() + (
        0 if v is None else padded_size(v.shape[-1], p.q) * v.element_size()
    )
    tall = rows > 32
    block_j = max(16, min(128, TILE_BYTES // (2 * key_bytes if tall else key_bytes)))
    return Config(rows, 1 << block_j.bit_length() - 1, 8 if tall and e > 128 else 4, 4 if tall else 3), pack


def _slots(p: KernelInputs, v: Tensor | None, config: Config) -> int:
    """How many programs run at a time: by their shared memory, and two a multiprocessor at most."""
    key_bytes = p.d * p.k.element_size() + (0 if v is None else v.shape[-1] * v.element_size())
    return _num_sms(p) * max(1, min(2, SMEM_BYTES // max(1, config.stages * config.block_j * key_bytes)))


@lru_cache(4096)
def _splits(units: int, tiles: int, slots: int) -> int:
    """How many splits of the keys: as few as give every slot the same number of tiles."""
    most = max(1, min(tiles, 4 * slots // units, MAX_SPLITS))
    return min(
        range(1, most + 1), key=lambda s: triton.cdiv(units * s, slots) * (triton.cdiv(tiles, s) + SPLIT_OVERHEAD)
    )


def _num_sms(p: KernelInputs) -> int:
    return num_sms(p.q.device) if p.q.is_cuda else 4


# From stored scores (b, h, i, j).


def received(problem: Problem, scores: Tensor, norm: Tensor) -> Tensor:
    """The sum of the weights on every key, (b, h, j)."""
    p = KernelInputs(problem)
    norm, out = norm.contiguous(), empty(p.b, p.h, p.j, like=p.q, dtype=torch.float32)
    block_i = min(triton.next_power_of_2(p.i), 16)
    block_j = max(64, 1024 // block_i)

    def launch_args() -> LaunchArgs:
        shared = {name: p.common_args[name] for name in ("mask", "sizes", "scale2", "MASK")}
        return triton.cdiv(p.j, block_j) * p.b * p.h, {
            "scores": scores, "norm": norm, "received": row_arg(out), "SCALE_FOLDED": p.scale_folded, "BLOCK_I": block_i, "BLOCK_J": block_j,
            "num_warps": 4, **shared,
        }  # fmt: skip

    launch(received_kernel, p.key, [*p.tensors, scores, norm, out], launch_args)
    return out


def topk(problem: Problem, n: int, scores: Tensor, norm: Tensor | None) -> dict[str, Tensor]:
    """The n largest scores of every row, and with `norm` their weights."""
    p = KernelInputs(problem)
    outputs = {"topk_scores": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    outputs["topk_indices"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    if norm is not None:
        norm, outputs["topk_weights"] = norm.contiguous(), empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    keys_per_part = max(SCORES_PER_PROGRAM, triton.next_power_of_2(triton.cdiv(p.j * n, 16384)))
    parts, rows = triton.cdiv(p.j, keys_per_part), p.b * p.h * p.i
    candidates = empty(rows, parts, n, like=p.q, dtype=torch.int64)

    def of_part() -> LaunchArgs:
        shared = {name: p.common_args[name] for name in ("mask", "sizes", "MASK")}
        return rows * parts, {
            "scores": scores, "candidates": candidates, "parts": parts, "N": n, "BITS": keys_per_part.bit_length() - 1, "BLOCK_J": keys_per_part,
            "num_warps": min(8, keys_per_part // 2048), **shared,
        }  # fmt: skip

    def of_parts() -> LaunchArgs:
        shared = {name: p.common_args[name] for name in ("sizes", "scale2")}
        block = triton.next_power_of_2(parts * n)
        return rows, {
            "candidates": candidates, "norm": p.unused if norm is None else tensor_arg(norm), "score": tensor_arg(outputs["topk_scores"]),
            "index": tensor_arg(outputs["topk_indices"]), "weight": tensor_arg(outputs["topk_weights"]) if norm is not None else p.unused,
            "parts": parts, "SCALE_FOLDED": p.scale_folded, "N": n, "WEIGHT": norm is not None, "BLOCK": block,
            "num_warps": 1 if block <= 512 else 4, **shared,
        }  # fmt: skip

    launch(topk_of_part_kernel, p.key and (p.key, n), [*p.tensors, scores, candidates], of_part)
    launch(topk_of_parts_kernel, p.key and (p.key, n), [p.q, candidates, norm, *outputs.values()], of_parts)
    return outputs
