"""Rows of few keys: when the forward pass stores their scores, and what is taken from them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from .kernel_inputs import KernelInputs, LaunchArgs, empty, padded_size
from .kernels.few_keys import CHUNK, few_keys_kernel
from .kernels.short_rows import short_rows_kernel
from .kernels.tile_ops import tensor_arg
from .launcher import launch
from .tile_config import forced
from .topk_pass import SORTED, uses_network

__all__ = ["by_chunks", "from_scores", "serves", "serves_by_chunks"]

#: Keys of a row at most. Chunks of 32 are unrolled: with 16 of them compiling takes half a minute.
MOST_KEYS = 128
#: The same where a sorting network serves as well.
MOST_KEYS_BESIDE_NETWORK = 96
#: The same where no scores are stored: with a fourth chunk of 32 keys the sums of columns spill.
MOST_KEYS_BY_CHUNKS = 96
#: Bytes of stored scores at most.
MAX_SCORE_BYTES = 2**28
#: Rows that a program, which is one warp, has at a time: with more warps, sums of columns would synchronise them.
ROWS = 4
#: How often a program goes on to its next rows: it begins and adds up its columns once.
TURNS = 4
#: Rows of a tile, pipeline stages and registers of a thread of `few_keys_kernel`.
BLOCK, STAGES, REGISTERS = 64, 2, 128


def serves(p: KernelInputs, n: int, v: Tensor | None) -> bool:
    """Whether the n largest of every row are taken from stored scores, or by chunks.

    For wider queries and values the forward pass is a kernel that stores none.
    """
    size = max(p.d, 0 if v is None else v.shape[-1])
    most = MOST_KEYS_BESIDE_NETWORK if uses_network(p, n) else MOST_KEYS
    few = p.i >= 64 and 32 <= p.j <= most and n <= 16 and "topk" not in forced
    return few and p.product and size <= 64 and 4 * p.b * p.h * p.i * p.j <= MAX_SCORE_BYTES


def from_scores(problem: Problem, n: int, scores: Tensor, norm: Tensor | None, received: bool) -> dict[str, Tensor]:
    """The n largest scores of every row with their keys, with `norm` also their weights; and what every key receives, if asked for."""
    p, pitch = KernelInputs(problem), scores.shape[3]
    outputs = {"topk_scores": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    outputs["topk_indices"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    if norm is not None:
        norm, outputs["topk_weights"] = norm.contiguous(), empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    blocks = triton.cdiv(p.i, ROWS * TURNS)
    sums = empty(p.b, p.h, blocks, pitch, like=p.q, dtype=torch.float32) if received else None

    def launch_args() -> LaunchArgs:
        chunks = triton.cdiv(p.j, 32)
        shared = {name: p.common_args[name] for name in ("mask", "sizes", "scale2", "MASK")}
        return blocks * p.b * p.h, {
            "scores": scores, "norm": p.q if norm is None else norm, "score": tensor_arg(outputs["topk_scores"]), "pitch": pitch,
            "index": tensor_arg(outputs["topk_indices"]), "weight": p.unused if norm is None else tensor_arg(outputs["topk_weights"]),
            "received": p.q if sums is None else sums, "SCALE_FOLDED": p.scale_folded, "N": n, "BLOCK_N": triton.next_power_of_2(n),
            "BITS": (32 * chunks - 1).bit_length(), "WEIGHT": norm is not None, "RECEIVED": received, "CHUNKS": chunks,
            "ROWS": ROWS, "TURNS": TURNS, "num_warps": 1, **shared,
        }  # fmt: skip

    launch(short_rows_kernel, p.key and (p.key, n), [*p.tensors, scores, norm, *outputs.values(), sums], launch_args)
    if sums is not None:
        outputs["received"] = sums[..., : p.j].sum(2)
    return outputs


def serves_by_chunks(p: KernelInputs, n: int) -> bool:
    """Whether the n largest of rows that `serves` admits need no stored scores: eight of 16 bits at most, which a network sorts."""
    return n <= SORTED and p.j <= MOST_KEYS_BY_CHUNKS and not p.fp32


def by_chunks(problem: Problem, n: int, norm: Tensor, received: bool) -> dict[str, Tensor]:
    """The n largest and what every key receives of rows whose norm is known."""
    p = KernelInputs(problem)
    norm = norm.contiguous()
    outputs = {"topk_scores": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    outputs["topk_indices"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    outputs["topk_weights"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    chunks, blocks = triton.cdiv(p.j, CHUNK.value), triton.cdiv(p.i, BLOCK * TURNS)
    sums = empty(p.b, p.h, blocks, chunks * CHUNK.value, like=p.q, dtype=torch.float32) if received else None

    def launch_args() -> LaunchArgs:
        return blocks * p.b * p.h, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "norm": norm, "received": p.q if sums is None else sums, "RECEIVED": received,
            "score": tensor_arg(outputs["topk_scores"]), "index": tensor_arg(outputs["topk_indices"]), "weight": tensor_arg(outputs["topk_weights"]),
            "WEIGHT": True, "N": n, "SORTED": SORTED, "SCALE_FOLDED": p.scale_folded, "CHUNKS": chunks, "LAST": 16 if 0 < p.j % 32 <= 16 else 32, "TURNS": TURNS, "BLOCK_I": BLOCK,
            "BLOCK_D": padded_size(p.d, p.q), "num_warps": 4, "num_stages": STAGES, "maxnreg": REGISTERS, **p.common_args,
        }  # fmt: skip

    tensors = [*p.tensors, norm, *outputs.values(), sums]
    launch(few_keys_kernel, p.key and (p.key, n), tensors, launch_args)
    if sums is not None:
        outputs["received"] = sums[..., : p.j].sum(2)
    return outputs
