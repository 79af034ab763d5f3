"""The largest keys of every row: which kernels of `kernels.topk` run, and on what.

Products under at most one band go by sorting networks where rows see few keys, and by candidates where they have many tiles. All
others go by search.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
from .kernels.topk_network import topk_network_kernel
from .launcher import launch
from .tile_config import Config, choose_config, forced

__all__ = ["topk", "uses_candidates", "uses_network"]

#: Bytes for the marks of candidates, one bit a cell: larger problems take several launches.
MAX_MARK_BYTES = 2**30
#: At most this many of a row are found by sorting networks, which sort `SORTED` at a time.
MAX_IN_NETWORK = SORTED = 8
#: Keys that a row sees on average, up to which a network takes less time than candidates do; and than a search.
NETWORK_KEYS, NETWORK_KEYS_OF_SEARCH = 768, 4096
#: At most this many of a row stay sorted in the registers of a thread.
MAX_SORTED = 16
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
    if tile_maxima is None and uses_network(p, n):
        _by_network(p, n, norm, outputs)
        return outputs
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
            "BLOCK_N": triton.next_power_of_2(n), "BLOCK_D": block_d, "ROWS_PER_FLAG": rows_per_flag, "SORTED": n <= MAX_SORTED, "BOUND": p.j > config.block_j,
            "GROUPS": _groups(n, config), **p.common_args, **config.launch,
        }  # fmt: skip

    tensors = [*p.tensors, table.ptr, norm, *outputs.values(), flags]
    launch(topk_search_kernel, p.key and (p.key, rows_per_flag, config), tensors, launch_args)
    return outputs


def _by_network(p: KernelInputs, n: int, norm: Tensor | None, outputs: dict[str, Tensor]) -> None:
    """Store the n largest of every row, found by sorting networks."""
    config, table = choose_config("topk_network", p, 0, None), p.unused

    def launch_args() -> LaunchArgs:
        heads, block_d = p.b * p.h, padded_size(p.d, p.q)
        tma, descriptors, layouts = tma_descriptors(p, config, (p.k, (config.block_j, block_d)))
        even = p.j % config.block_j == 0
        return triton.cdiv(p.i, config.block_i) * heads, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "k_desc": descriptors[0], "k_layout": layouts[0], "row_table": table, "heads": heads,
            "heads_per_group": p.heads_per_group(0), **_topk_args(p, norm, outputs), "SCALE_FOLDED": p.scale_folded, "TMA": tma, "N": n,
            "SORTED": SORTED, "EVEN_BLOCKS": even, "EDGES": p.mask_format.kind != "none" or not even, "BLOCK_D": block_d,
            **p.common_args, **config.launch,
        }  # fmt: skip

    launch(topk_network_kernel, p.key and (p.key, n, config), [*p.tensors, norm, *outputs.values()], launch_args)


def _topk_args(p: KernelInputs, norm: Tensor | None, outputs: dict[str, Tensor]) -> dict[str, Any]:
    names = {"topk_scores": "score", "topk_indices": "index", "topk_weights": "weight"}
    args = {argument: tensor_arg(outputs[name]) if name in outputs else p.unused for name, argument in names.items()}
    return {**args, "norm": p.unused if norm is None else tensor_arg(norm), "WEIGHT": norm is not None}


@dataclass(frozen=True)
class CandidateBuffers:
    """Buffers that the three kernels of `_by_candidates` share. A key of a row is a candidate if its score reaches the row's bound."""

    config: Config
    n: int
    min_keys: int  # with fewer visible keys a row finds its own bound
    capacity: int  # candidates of a row at most
    bounds: Tensor  # b h i
    candidates: Tensor  # b h i capacity
    counts: Tensor  # b h i
    flags: Tensor  # of row blocks that have too many candidates
    marks: Tensor  # blocks at a time, rows, words: one bit a cell
    row_table: Any

    def shared_args(self, p: KernelInputs) -> dict[str, Any]:
        return {
            "heads": p.b * p.h, "heads_per_group": p.heads_per_group(0), "row_table": self.row_table, "bounds": self.bounds,
            "marks": self.marks, "words": self.marks.shape[2], "N": self.n,
        }  # fmt: skip


def _candidate_buffers(p: KernelInputs, n: int, tile_maxima: Tensor) -> CandidateBuffers:
    config = choose_config("mark_candidates", p, 0, None)
    # With fewer groups the n-th largest maximum is too low a bound: in one row in a million too many keys reach it.
    min_keys = (n + 3 * n // 4) * triton.cdiv(p.j, tile_maxima.shape[2])
    capacity = triton.next_power_of_2(3 * n + 8)
    tiles = triton.cdiv(p.j, config.block_j)
    is_short = tiles * config.block_j < min_keys  # then every block of rows finds its own bounds
    bounds = empty(p.b, p.h, p.i, like=tile_maxima, dtype=torch.float32) if is_short else _bounds(tile_maxima, n)
    candidates = empty(p.b, p.h, p.i, capacity, like=p.q, dtype=torch.int32)
    counts = empty(p.b, p.h, p.i, like=p.q, dtype=torch.int32)
    programs = p.b * p.h * triton.cdiv(p.i, config.block_i)
    flags = torch.zeros(programs, dtype=torch.int32, device=p.q.device)
    words = triton.cdiv(tiles, 32) * config.block_j  # of a row
    programs_at_once = max(1, min(programs, MAX_MARK_BYTES // (4 * words * config.block_i)))
    marks = empty(programs_at_once, config.block_i, words, like=p.q, dtype=torch.int32)
    return CandidateBuffers(
        config, n, min_keys, capacity, bounds, candidates, counts, flags, marks, p.row_table(config)
    )


def _by_candidates(
    p: KernelInputs, n: int, tile_maxima: Tensor, norm: Tensor | None, outputs: dict[str, Tensor]
) -> tuple[Tensor, int]:
    """Store the n largest of nearly all rows; returns flags of row blocks that must be searched, and rows per flag."""
    c = _candidate_buffers(p, n, tile_maxima)
    total, at_once = c.flags.shape[0], c.marks.shape[0]
    read = [*p.tensors, c.row_table.ptr, c.bounds, c.marks]
    for first in range(0, total, at_once):
        programs = min(at_once, total - first)
        # Several launches are long: they are not cached.
        key = p.key and (p.key, n, c.min_keys, c.config) if programs == total else None
        launch(mark_candidates_kernel, key, read, partial(_mark_args, p, c, first, programs))
        launch(
            compact_kernel, key, [*read, c.candidates, c.counts, c.flags], partial(_compact_args, p, c, first, programs)
        )
    tensors = [*p.tensors, c.candidates, c.counts, norm, *outputs.values()]
    launch(rescore_sort_kernel, p.key and (p.key, n), tensors, partial(_rescore_args, p, c, norm, outputs))
    return c.flags, c.config.block_i


def _mark_args(p: KernelInputs, c: CandidateBuffers, first_program: int, programs: int) -> LaunchArgs:
    config, block_d = c.config, padded_size(p.d, p.q)
    tma, descriptors, layouts = tma_descriptors(p, config, (p.k, (config.block_j, block_d)))
    return programs, {
        "q": tensor_arg(p.q), "k": tensor_arg(p.k), "k_desc": descriptors[0], "k_layout": layouts[0], "first_program": first_program, "SCALE_FOLDED": p.scale_folded,
        "TMA": tma, "min_keys": c.min_keys, "EVEN_BLOCKS": p.j % config.block_j == 0, "GROUPS": _groups(c.n, config),
        "EDGES": p.mask_format.kind != "none" or p.j % config.block_j != 0, "BLOCK_D": block_d, **c.shared_args(p), **p.common_args, **config.launch,
    }  # fmt: skip


def _compact_args(p: KernelInputs, c: CandidateBuffers, first_program: int, programs: int) -> LaunchArgs:
    common = {name: p.common_args[name] for name in ("mask", "sizes", "MASK")}
    return programs * (c.config.block_i // COMPACT_ROWS), {
        "candidates": c.candidates, "counts": c.counts, "flags": c.flags, "first_program": first_program, "CAPACITY": c.capacity,
        "ROWS": COMPACT_ROWS, "BLOCK_I": c.config.block_i, "BLOCK_J": c.config.block_j, "num_warps": 1, **c.shared_args(p), **common,
    }  # fmt: skip


def _rescore_args(
    p: KernelInputs, c: CandidateBuffers, norm: Tensor | None, outputs: dict[str, Tensor]
) -> LaunchArgs:  # fmt: skip
    rows, slots, part, warps = RESCORE_TILE
    heads = p.b * p.h
    return triton.cdiv(p.i, rows) * heads, {
        "q": tensor_arg(p.q), "k": tensor_arg(p.k), "candidates": tensor_arg(c.candidates), "counts": row_arg(c.counts), **_topk_args(p, norm, outputs),
        "heads": heads, "SCALE_FOLDED": p.scale_folded, "N": c.n, "CAPACITY": c.capacity, "ROWS": rows, "SLOTS": slots,
        "BLOCK_D": min(part, padded_size(p.d)), "num_warps": warps, **p.common_args,
    }  # fmt: skip


def _bounds(tile_maxima: Tensor, n: int) -> Tensor:
    """For every row a score that its n largest keys reach, and hardly any other key; from maxima (b, h, groups, i)."""
    b, h, groups, rows = tile_maxima.shape
    bounds = empty(b, h, rows, like=tile_maxima, dtype=torch.float32)
    blocks = {"BLOCK_GROUPS": triton.next_power_of_2(groups), "BLOCK": 32, "num_warps": 1}
    launch_args = {"tile_maxima": tile_maxima, "out": bounds, "I": rows, "groups": groups, "N": n, **blocks}
    launch(topk_bound_kernel, n, [tile_maxima, bounds], lambda: (b * h * triton.cdiv(rows, 32), launch_args))
    return bounds


def _groups(n: int, config: Config) -> int:
    """Groups of keys of whose maxima the n-th largest is a bound: twice as many as keys, so that about 1.4 n keys pass it."""
    return min(max(4, 2 * triton.next_power_of_2(n)), config.block_j // 2)


def uses_network(p: KernelInputs, n: int) -> bool:
    """Whether the n largest are found by sorting networks: of products under at most one band, and few keys."""
    if not p.product or n > MAX_IN_NETWORK or p.mask_format.kind not in ("none", "causal", "band") or "topk" in forced:
        return False
    seen = _visible_keys(p)
    if p.mask_format.kind == "causal":
        seen = min(seen, p.problem.offset + p.i // 2)
    return seen <= (NETWORK_KEYS if _fits_candidates(p, n) else NETWORK_KEYS_OF_SEARCH)


def uses_candidates(problem: Problem, n: int) -> bool:
    """Whether the n largest go by candidates."""
    p = KernelInputs(problem)
    return _fits_candidates(p, n) and not uses_network(p, n)


def _fits_candidates(p: KernelInputs, n: int) -> bool:
    """Products under at most one band, and enough tiles that walking them twice takes longer than the work a row."""
    if not p.product or p.fp32 or n > 16 or p.mask_format.kind not in ("none", "causal", "band"):
        return False
    if p.i > 2**25:  # its kernels use 32-bit offsets within a head
        return False
    widest = max(
        choose_config(kernel, p, p.d, None, lambda _: True).block_j for kernel in ("forward", "mark_candidates")
    )
    return _visible_keys(p) >= min(2 * n, 8) * widest


def _visible_keys(p: KernelInputs) -> int:
    """Keys that a row sees at most."""
    arg = p.mask_format.arg
    return min(p.j, arg.before + arg.after + 1) if p.mask_format.kind == "band" else p.j
