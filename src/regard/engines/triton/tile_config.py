"""Tile sizes, warps and pipeline stages of each kernel: a small table by shape, measured on one H200.

No autotuning: it would compile for minutes at the first call, and it runs accumulating kernels several times on one output.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..replay import record_launch

__all__ = ["Config", "choose_config", "choose_pair_config", "forced", "gluon_config", "is_short"]


@dataclass(frozen=True)
class Config:
    """Rows and keys of a tile, warps, pipeline stages; whether TMA loads tiles; whether the Gluon kernel runs; and a limit on
    registers of a thread, where fewer let more programs run on a multiprocessor."""

    block_i: int
    block_j: int
    warps: int
    stages: int
    tma: bool = True
    gluon: bool = False
    registers: int | None = None

    @property
    def launch(self) -> dict[str, Any]:
        return {
            "BLOCK_I": self.block_i, "BLOCK_J": self.block_j, "num_warps": self.warps, "num_stages": self.stages,
            "maxnreg": self.registers,
        }  # fmt: skip


#: (kernel, largest of d and e up to) → configuration, for 16-bit types on Hopper.
HOPPER: dict[tuple[str, int], Config] = {
    ("forward", 64): Config(64, 128, 4, 2, registers=168),  # three programs at a time
    ("forward", 128): Config(128, 64, 8, 2, registers=128),  # two
    ("forward", 256): Config(128, 64, 8, 2),
    # `short`: at most 256 keys. `many_stats`: row state that would spill with the configuration above.
    ("short", 64): Config(64, 64, 4, 3, registers=128),
    ("narrow", 64): Config(64, 32, 4, 3, registers=80),  # six programs at a time
    ("many_stats", 64): Config(128, 64, 8, 3, registers=128),
    # `shared_kv`: keys are values, and one tile for both leaves shared memory for more stages.
    ("shared_kv", 64): Config(64, 128, 4, 3, registers=168),
    ("shared_kv", 128): Config(128, 64, 8, 3, registers=128),
    ("topk", 64): Config(64, 64, 4, 3),
    ("topk", 128): Config(64, 64, 4, 3),
    ("topk", 256): Config(64, 64, 4, 2),
    ("one_tile", 64): Config(64, 128, 4, 2),  # all keys at once: nothing is bounded, and nothing is searched twice
    ("topk_network", 64): Config(64, 64, 4, 2, registers=128),  # four programs at a time
    ("topk_network", 256): Config(64, 64, 4, 2, registers=168),
    ("topk_lists", 64): Config(64, 64, 4, 3, registers=128),
    ("topk_lists", 128): Config(64, 64, 4, 3, registers=168),
    ("topk_lists", 256): Config(64, 64, 4, 2),
    ("column_pass", 64): Config(64, 128, 4, 3, registers=128),
    ("column_pass", 128): Config(64, 128, 4, 3),
    ("column_pass", 256): Config(64, 64, 4, 2),
    # By registers alone, as compiled for sm_90: nothing is spilled. Not measured yet.
    ("profile", 64): Config(64, 64, 4, 3, registers=168),  # three programs at a time
    ("profile", 128): Config(64, 64, 4, 3),
    ("profile", 256): Config(64, 64, 4, 2),
    # The teacher's heads and an index: by shared memory and registers, as compiled for sm_90. `queries` and `keys`: sums of dI.
    ("indexer", 64): Config(64, 64, 4, 3),
    ("indexer", 128): Config(128, 128, 8, 3),
    ("indexer", 256): Config(64, 64, 4, 2),
    ("indexer_queries", 128): Config(128, 128, 8, 2, tma=False),
    ("indexer_queries", 256): Config(64, 64, 4, 1, tma=False),
    ("indexer_keys", 128): Config(128, 128, 8, 2, tma=False),
    ("indexer_keys", 256): Config(64, 64, 4, 1, tma=False),
    # Heads together: the sum over heads and the scores of one of them are in registers, and both tiles of every head come from L2.
    ("head_rows", 64): Config(128, 128, 8, 3),
    ("head_rows", 128): Config(128, 128, 8, 3),
    ("head_rows", 256): Config(128, 64, 8, 2),
    ("tile_states", 64): Config(64, 128, 4, 3, registers=168),
    ("tile_states", 128): Config(128, 64, 8, 3, registers=128),
    ("tile_states", 256): Config(128, 64, 8, 2),
    ("head_rows_dq", 64): Config(64, 64, 4, 3, tma=False),
    ("head_rows_dq", 128): Config(128, 64, 8, 3, tma=False),
    ("head_rows_dq", 256): Config(64, 32, 8, 1, tma=False),
    ("head_rows_dk", 64): Config(64, 64, 4, 3, tma=False),
    ("head_rows_dk", 128): Config(64, 128, 8, 3, tma=False),
    ("head_rows_dk", 256): Config(32, 64, 8, 1, tma=False),
    # With z = Wᵀ u, a second product.
    ("columns_with_u", 64): Config(64, 128, 4, 3, registers=128),
    ("columns_with_u", 128): Config(64, 64, 4, 3),
    ("columns_with_u", 256): Config(64, 64, 4, 2),
    ("dkdv", 64): Config(64, 64, 4, 2),
    ("dkdv", 128): Config(32, 128, 8, 3),
    ("dkdv", 256): Config(32, 64, 8, 1),
    ("dq", 64): Config(64, 64, 4, 2, registers=168),
    ("dq", 128): Config(64, 64, 4, 2),
    ("dq", 256): Config(64, 32, 8, 1),
    ("dbias", 256): Config(64, 32, 4, 1),
}
#: The same for the Gluon kernels, which need full tiles of products. Gluon still changes: only tested versions are used.
GLUON: dict[tuple[str, int], Config] = {
    ("forward", 128): Config(128, 128, 4, 2, gluon=True, registers=168),
    ("shared_kv", 128): Config(128, 128, 4, 4, gluon=True, registers=168),
    ("forward", 256): Config(128, 64, 4, 2, gluon=True, registers=168),
    ("column_pass", 64): Config(128, 128, 4, 3, gluon=True, registers=168),
    ("column_pass", 128): Config(128, 128, 4, 3, gluon=True),
    ("head_rows", 64): Config(128, 128, 4, 4, gluon=True, registers=168),
    ("head_rows", 128): Config(128, 128, 4, 3, gluon=True, registers=168),
    ("row_pass", 64): Config(64, 128, 4, 3, gluon=True, registers=128),
    ("profile", 64): Config(128, 128, 8, 3, gluon=True, registers=128),
    ("profile", 128): Config(128, 128, 8, 2, gluon=True, registers=168),  # by registers alone
    # All gradients of products in one pass.
    ("backward", 64): Config(128, 128, 4, 2, gluon=True, registers=168),
    ("backward", 128): Config(64, 128, 4, 2, gluon=True, registers=168),
    ("dkdv", 64): Config(64, 128, 4, 3, gluon=True, registers=168),
    ("dkdv", 128): Config(64, 128, 4, 3, gluon=True, registers=168),
    ("dq", 64): Config(128, 128, 4, 3, gluon=True, registers=168),
    ("dq", 128): Config(128, 128, 4, 2, gluon=True, registers=168),
    # Two matrices, by the larger of their sizes.
    ("compare", 128): Config(128, 128, 4, 2, gluon=True, registers=168),
    ("compare_sums", 128): Config(128, 128, 4, 2, gluon=True, registers=168),
    ("compare_queries", 128): Config(128, 64, 4, 3, gluon=True, registers=168),
    ("compare_keys", 128): Config(32, 128, 4, 6, gluon=True, registers=168),
}
GLUON_VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
#: Kernels whose loop spills as some versions compile it.
SPILLING: dict[tuple[str, int], tuple[str, ...]] = {("backward", 64): ("3.8.",)}
HOPPER_KERNELS = os.environ.get("REGARD_HOPPER", "1") != "0"
#: float32 on Hopper, each product three of TF32: both parts of an operand take registers and shared memory.
FLOAT32: dict[tuple[str, int], Config] = {
    ("forward", 64): Config(128, 64, 4, 1, tma=False),
    ("forward", 128): Config(128, 64, 8, 1, tma=False),
    ("parts", 128): Config(128, 32, 8, 3, tma=False),
    ("column_pass", 64): Config(128, 64, 4, 1, tma=False),
    ("column_pass", 128): Config(64, 32, 4, 1, tma=False),
    ("column_pass", 256): Config(64, 32, 8, 1, tma=False),
    ("topk", 128): Config(64, 64, 4, 1, tma=False),
    ("indexer", 128): Config(64, 64, 8, 2, tma=False),
    ("head_rows", 64): Config(64, 64, 4, 1, tma=False),
    ("tile_states", 64): Config(128, 64, 4, 1, tma=False),
    ("tile_states", 128): Config(128, 64, 8, 1, tma=False),
    ("head_rows", 128): Config(64, 32, 8, 1, tma=False),
    ("indexer_queries", 128): Config(64, 64, 4, 2, tma=False),
    ("indexer_keys", 128): Config(64, 64, 4, 2, tma=False),
    ("topk_network", 128): Config(64, 32, 4, 1, tma=False),
}
#: Older GPUs, and kernels that are not listed above: small tiles fit everywhere.
PLAIN: dict[tuple[str, int], Config] = {
    ("any", 64): Config(32, 32, 4, 2, tma=False),
    ("any", 128): Config(32, 32, 4, 1, tma=False),
    ("any", 256): Config(16, 32, 4, 1, tma=False),
}
#: Additive scores, by the size of values: all arithmetic. Wide values leave registers for fewer keys. Gradients are summed for every
#: component: tiles with 64 of the positions that a program owns have each sum within a warp.
TANH: dict[tuple[str, int], Config] = {
    ("any", 64): Config(32, 128, 8, 1, tma=False, registers=128),
    ("any", 256): Config(32, 64, 8, 1, tma=False, registers=128),
    ("dkdv", 64): Config(32, 64, 4, 1, tma=False, registers=168),
    ("dkdv", 128): Config(32, 64, 4, 1, tma=False),
    ("dkdv", 256): Config(32, 64, 8, 1, tma=False),
    ("dq", 64): Config(64, 32, 4, 1, tma=False, registers=168),
    ("dq", 256): Config(64, 32, 4, 1, tma=False),
}

#: Two matrices, by the larger of their sizes: both tiles of scores and, for gradients, both sums are in registers.
PAIRS: dict[tuple[str, int], Config] = {
    ("compare", 64): Config(128, 64, 8, 3, tma=False),
    ("compare", 128): Config(128, 64, 8, 3, tma=False),
    ("compare", 256): Config(64, 32, 4, 2, tma=False),
    ("compare_sums", 64): Config(128, 64, 8, 3, tma=False),
    ("compare_sums", 128): Config(128, 64, 8, 3, tma=False),
    ("compare_sums", 256): Config(64, 32, 4, 2, tma=False),
    ("compare_queries", 64): Config(64, 64, 4, 2, tma=False),
    ("compare_queries", 128): Config(128, 64, 8, 2, tma=False),
    ("compare_queries", 256): Config(64, 32, 8, 1, tma=False),
    ("compare_keys", 64): Config(64, 64, 4, 2, tma=False),
    ("compare_keys", 128): Config(32, 128, 8, 3, tma=False),
    ("compare_keys", 256): Config(32, 64, 8, 1, tma=False),
}

#: Kernel of a configuration, where a kernel has several.
VARIANTS = {
    "short": "forward",
    "narrow": "forward",
    "many_stats": "forward",
    "columns_with_u": "column_pass",
    "one_tile": "topk",
}
#: Variants of the forward pass, which are one in float32.
FORWARD = ("short", "narrow", "many_stats", "shared_kv")
forced: dict[str, Config] = {}  # by kernel; set by tests and benchmarks


def is_short(p: Any, e: int) -> bool:
    """Two wide tiles or fewer fill no pipeline: narrow tiles are as fast or faster, without warp specialisation."""
    return p.j <= 256 and max(p.d, e) <= 64


#: Sizes of float32 queries, above the first and up to the second, whose products go by parts of 16 bits; values are at most as large.
PART_SIZES = (64, 128)


def uses_parts(p: Any, v: Tensor | None) -> bool:
    """Whether the products of a forward pass go by parts of 16 bits: of float32 on Hopper, where TF32 would spill."""
    of_float32 = p.product and p.fp32 and (v is None or v.dtype == torch.float32) and not forced
    return (
        of_float32
        and PART_SIZES[0] < p.d <= PART_SIZES[1]
        and (v is None or v.shape[-1] <= PART_SIZES[1])
        and _hopper(p.q.device)
    )


def choose_config(
    kernel: str, p: Any, e: int, v: Tensor | None, fits: Callable[[Config], bool] | None = None
) -> Config:
    """The configuration of a kernel for a prepared problem with values of size e.

    `fits`: whether the Gluon kernel, where there is one, supports the request; None: it is not considered.
    """

    def in_gluon(config: Config) -> bool:
        return fits is not None and p.single_tma_loop(config) and fits(config)

    if (own := forced.get(VARIANTS.get(kernel, kernel)) or forced.get("any")) is not None:
        record_launch(None, [])  # a replay must not outlive a forced configuration
        return own if not own.gluon or in_gluon(own) else replace(own, gluon=False)
    size = max(p.d if p.product else 0, e)
    chosen: Config | None
    if not p.product:
        chosen = _first(TANH, kernel, size) or _first(TANH, "any", size)
    elif not _hopper(p.q.device):
        chosen = _first(PLAIN, "any", size)
    elif p.fp32 or (v is not None and v.dtype == torch.float32):
        chosen = _first(FLOAT32, "forward" if kernel in FORWARD else kernel, size) or _first(PLAIN, "any", size)
    else:
        chosen = _first(HOPPER, kernel, size)
        planned = GLUON.get((kernel, _tile_width(kernel, size)))
        if planned is not None and _runs_gluon(p.q.device) and in_gluon(planned):
            return planned
    assert chosen is not None, (kernel, size)
    if "bias" in p.modifier_kinds:  # its tiles take shared memory beside the keys
        chosen = Config(min(chosen.block_i, 64), min(chosen.block_j, 64), 4, min(chosen.stages, 2), chosen.tma)
    # Few rows need no tall tile.
    height = min(chosen.block_i, max(16, 1 << (p.i - 1).bit_length()))
    if height == chosen.block_i:
        return chosen
    return Config(height, min(chosen.block_j, 64), 4, chosen.stages, chosen.tma and height >= 64, False)


def gluon_config(
    kernel: str, p: Any, e: int, fits: Callable[[Config], bool], instead_of: tuple[str, ...]
) -> Config | None:
    """The configuration of a kernel that exists in Gluon only; None where it does not serve the request.

    `instead_of`: kernels that it replaces, and does not where one of them is forced.
    """
    import triton

    if forced:
        record_launch(None, [])  # a replay must not outlive a forced configuration
    if kernel not in forced and forced.keys() & {"any", *instead_of}:
        return None
    key = kernel, _tile_width(kernel, max(p.d, e))
    planned = forced.get(kernel) or GLUON.get(key)
    if planned is None or not p.product or p.fp32 or not _runs_gluon(p.q.device):
        return None
    if triton.__version__.startswith(SPILLING.get(key, ("none",))):
        return None
    return planned if p.single_tma_loop(planned) and fits(planned) else None


def choose_pair_config(kernel: str, first: Any, second: Any, fits: Callable[[Config], bool] | None = None) -> Config:
    """The configuration of a kernel for two prepared problems. `fits`: as for `choose_config`."""
    size = max(first.d, second.d)
    narrow = _hopper(first.q.device) and not (
        first.fp32 or second.fp32 or "bias" in first.modifier_kinds + second.modifier_kinds
    )
    plain = _first(PAIRS, kernel, size) if narrow else _first(PLAIN, "any", size)
    assert plain is not None, (kernel, size)

    def in_gluon(config: Config | None) -> bool:
        return config is not None and narrow and fits is not None and _runs_gluon(first.q.device) and fits(config)

    if (own := forced.get(kernel) or forced.get("any")) is not None:
        record_launch(None, [])  # a replay must not outlive a forced configuration
        return plain if own.gluon and not in_gluon(own) else own
    planned = _first(GLUON, kernel, size)
    return planned if planned is not None and in_gluon(planned) else plain


def _first(table: dict[tuple[str, int], Config], kernel: str, size: int) -> Config | None:
    """The first configuration of a kernel that holds tiles of a size; None where there is none."""
    return next((config for (name, most), config in table.items() if name == kernel and size <= most), None)


def _tile_width(kernel: str, size: int) -> int:
    """The width of a tile in Gluon. Passes that own rows fill up what is narrower: the copy engine writes zeros past the end of a row."""
    if kernel not in ("forward", "shared_kv", "dq", "head_rows"):
        return size
    return 64 if size <= 64 else 128 if size <= 128 else 256


@lru_cache
def _runs_gluon(device: torch.device) -> bool:
    """Whether the Gluon kernels run: their products (wgmma) exist on Hopper only. REGARD_HOPPER=0 turns them off."""
    import triton

    if not HOPPER_KERNELS or _capability(device) != 9:
        return False
    supported = triton.__version__.startswith(GLUON_VERSIONS)
    if not supported:
        logging.getLogger("regard").warning(
            "Triton %s: the Hopper kernels support Triton %s, so the plain kernels run; at d = 128 they take 1.2 to 1.35 times as "
            "long.", triton.__version__, ", ".join(v.rstrip(".") for v in GLUON_VERSIONS)
        )  # fmt: skip
    return supported


@lru_cache
def _hopper(device: torch.device) -> bool:
    return _capability(device) >= 9


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
