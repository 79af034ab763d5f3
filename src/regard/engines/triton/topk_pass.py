"""The largest keys of every row: which kernels of `kernels.topk` run, and on what.

Products under at most one band go by sorting networks where rows see few keys, and by candidates where they have many tiles. All
others go by search.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from .kernel_inputs import KernelInputs, LaunchArgs, empty, padded_size, tma_descriptors
from .kernels.tile_ops import tensor_arg
from .kernels.topk import topk_bound_kernel, topk_search_kernel
from .kernels.topk_lists import topk_lists_kernel
from .kernels.topk_network import topk_network_kernel
from .launcher import launch
from .tile_config import Config, choose_config, forced

__all__ = ["topk", "uses_candidates", "uses_network"]

#: Bytes for lists of candidates: larger problems take several launches.
MAX_LIST_BYTES = 2**30
#: At most this many of a row are found by sorting networks, which sort `SORTED` at a time.
MAX_IN_NETWORK = SORTED = 8
#: Places of a list of candidates, which belongs to one of the lanes that share a row.
CAPACITY, LISTS = 16, 4
#: Keys that a row sees on average, up to which a network takes less time than candidates do; and than a search.
NETWORK_KEYS, NETWORK_KEYS_OF_SEARCH = 768, 4096
#: Scores that are compared with their bound at once, by the largest of them.
TOGETHER = 4
#: Keys that a block of rows sees, up to which all are sorted.
FEW_KEYS = 256
#: At most this many of a row stay sorted in the registers of a thread.
MAX_SORTED = 16


def topk(problem: Problem, n: int, tile_maxima: Tensor | None = None, norm: Tensor | None = None) -> dict[str, Tensor]:
    """The n largest scores of every row, and with `norm` their weights: by candidates where a forward pass stored
    `tile_maxima`, else by search."""
    p = KernelInputs(problem)
    outputs = {"topk_scores": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    outputs["topk_indices"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    if norm is not None:
        norm, outputs["topk_weights"] = norm.contiguous(), empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    if tile_maxima is not None:
        _by_lists(p, n, tile_maxima, norm, outputs)
    elif uses_network(p, n):
        _by_network(p, n, norm, outputs)
    else:
        _by_search(p, n, norm, outputs)
    return outputs


def _by_search(p: KernelInputs, n: int, norm: Tensor | None, outputs: dict[str, Tensor]) -> None:
    """Store the n largest of every row, searched tile by tile."""
    one_tile = p.product and not p.fp32 and p.d <= 64 < p.j <= 128
    config = choose_config("one_tile" if one_tile else "topk", p, 0, None)
    table = p.row_table(config)

    def launch_args() -> LaunchArgs:
        heads, block_d = p.b * p.h, padded_size(p.d, p.q)
        tma, descriptors, layouts = tma_descriptors(p, config, (p.k, (config.block_j, block_d)))
        return triton.cdiv(p.i, config.block_i) * heads, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "tanh_arg": p.tanh_arg, "k_desc": descriptors[0], "k_layout": layouts[0], "row_table": table,
            "heads": heads, **_topk_args(p, norm, outputs),
            "heads_per_group": p.heads_per_group(0), "SIMILARITY": p.similarity, "SCALE_FOLDED": p.scale_folded, "TMA": tma, "N": n,
            "BLOCK_N": triton.next_power_of_2(n), "BLOCK_D": block_d, "SORTED": n <= MAX_SORTED, "BOUND": p.j > config.block_j,
            "GROUPS": _groups(n, config), **p.common_args, **config.launch,
        }  # fmt: skip

    tensors = [*p.tensors, table.ptr, norm, *outputs.values()]
    launch(topk_search_kernel, p.key and (p.key, n, config), tensors, launch_args)


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


def _by_lists(p: KernelInputs, n: int, tile_maxima: Tensor, norm: Tensor | None, outputs: dict[str, Tensor]) -> None:
    """Store the n largest of every row, found in lists of candidates."""
    config, few = choose_config("topk_lists", p, 0, None), n <= SORTED
    # With fewer groups the n-th largest maximum is too low a bound: in one row in a million too many keys reach it.
    min_keys = (n + 3 * n // 4) * triton.cdiv(p.j, tile_maxima.shape[2])
    is_short = (
        triton.cdiv(p.j, config.block_j) * config.block_j < min_keys
    )  # then every block of rows finds its own bounds
    bounds = empty(p.b, p.h, p.i, like=tile_maxima, dtype=torch.float32) if is_short else _bounds(tile_maxima, n)
    places = (CAPACITY * (1 if few else 2) + TOGETHER) * LISTS * config.block_i
    total = p.b * p.h * triton.cdiv(p.i, config.block_i)
    at_once = max(1, min(total, MAX_LIST_BYTES // (8 * places)))
    lists = empty(at_once, places, like=p.q, dtype=torch.int64)
    table = p.row_table(config)

    def launch_args(first: int, programs: int) -> LaunchArgs:
        block_d, even = padded_size(p.d, p.q), p.j % config.block_j == 0
        tma, descriptors, layouts = tma_descriptors(p, config, (p.k, (config.block_j, block_d)))
        return programs, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "k_desc": descriptors[0], "k_layout": layouts[0], "row_table": table, "heads": p.b * p.h,
            "heads_per_group": p.heads_per_group(0), "bounds": bounds, "lists": lists, "min_keys": min_keys, "few_keys": FEW_KEYS, "first_program": first,
            **_topk_args(p, norm, outputs), "SCALE_FOLDED": p.scale_folded, "TMA": tma, "N": n, "SORTED": SORTED if few else 2 * SORTED,
            "CAPACITY": CAPACITY * (1 if few else 2), "TOGETHER": TOGETHER, "GROUPS": _groups(n, config), "EVEN_BLOCKS": even, "EDGES": p.mask_format.kind != "none" or not even,
            "BLOCK_D": block_d, **p.common_args, **config.launch,
        }  # fmt: skip

    for first in range(0, total, at_once):
        programs = min(at_once, total - first)
        # Several launches are long: they are not cached.
        key = p.key and (p.key, n, min_keys, config) if programs == total else None
        tensors = [*p.tensors, table.ptr, bounds, lists, norm, *outputs.values()]
        launch(topk_lists_kernel, key, tensors, partial(launch_args, first, programs))


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
    widest = max(choose_config(kernel, p, p.d, None, lambda _: True).block_j for kernel in ("forward", "topk_lists"))
    return _visible_keys(p) >= min(2 * n, 8) * widest


def _visible_keys(p: KernelInputs) -> int:
    """Keys that a row sees at most."""
    arg = p.mask_format.arg
    return min(p.j, arg.before + arg.after + 1) if p.mask_format.kind == "band" else p.j
