"""A problem as kernel arguments: sizes, modifiers, the mask, TMA descriptors."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from ...core.problem import Problem, strides_like
from ...core.pytree import flatten
from .kernels.additive import MAX_PAIRED, TanhArg
from .kernels.forward import Outputs
from .kernels.tile_ops import NO_LAYOUT, Sizes, TensorArg, TmaLayout, norm_kernel, row_arg, tensor_arg, tma_descriptor
from .launcher import INTERPRETED, launch
from .mask_args import MaskFormat, choose_mask_format, key_table, row_table
from .tile_config import Config

__all__ = [
    "KernelInputs",
    "LaunchArgs",
    "empty",
    "forward_outputs",
    "gluon_tma_args",
    "new_tile_counter",
    "num_sms",
    "output_args",
    "padded_size",
    "tma_descriptors",
]

#: Bytes of keys and values of heads that are scheduled together: half the L2 cache of an H200.
CACHE = 24 * 2**20
LOG2E = 1.4426950408889634

#: Number of programs and the arguments of their kernel.
LaunchArgs = tuple[int, dict[str, Any]]


def empty(*shape: int, like: Tensor, dtype: torch.dtype, keep_layout: bool = False) -> Tensor:
    """Output buffer of a kernel, with `keep_layout` in the memory layout of `like`. Tests fill it with nan to find cells that
    no kernel writes."""
    if keep_layout:
        return torch.empty_strided(shape, strides_like(like, shape), dtype=dtype, device=like.device)
    return torch.empty(shape, dtype=dtype, device=like.device)


def empty_row_output(p: KernelInputs, name: str) -> Tensor:
    """Memory for a result of every row: (b, h, i), and (b, h, i, 2) for the norm."""
    shape = (p.b, p.h, p.i, 2) if name == "norm" else (p.b, p.h, p.i)
    return empty(*shape, like=p.q, dtype=torch.int64 if name == "argmax" else torch.float32)


def forward_outputs(
    p: KernelInputs, names: tuple[str, ...], v: Tensor | None
) -> tuple[Tensor | None, int, dict[str, Tensor]]:
    """Values (b, …) and their size, which is 16 where there are none; and memory for the results of a forward pass."""
    outputs = {name: empty_row_output(p, name) for name in names if name != "y"}
    if v is None:
        return None, 16, outputs
    v, e = v.expand(p.b, -1, -1, -1), v.shape[-1]
    outputs["y"] = empty(p.b, p.h, p.i, e, like=v, dtype=v.dtype, keep_layout=True)
    return v, e, outputs


def output_args(p: KernelInputs, outputs: dict[str, Tensor]) -> Outputs:
    """Results of a forward pass as an argument of its kernel."""
    args = {
        name: tensor_arg(x) if x.ndim == 4 else row_arg(x) for name, x in outputs.items() if name in Outputs._fields
    }
    return Outputs(**{name: args.get(name, p.unused) for name in Outputs._fields})


class KernelInputs:
    """A problem as kernel arguments. Properties that only the first launch of a signature needs are computed on demand."""

    def __init__(self, problem: Problem, v_heads: int = 1) -> None:
        self.problem, self.v_heads = problem, v_heads
        self.q, self.k = problem.q, problem.k
        self.b, self.h, self.i, self.j = problem.shape
        self.d = self.q.shape[-1]
        self.product = problem.similarity_kernel.kernel_op == "product"
        self.scale = problem.similarity_kernel.scale
        self.scale_folded = self.product and not problem.modifiers and 1e-6 < self.scale < 1e6
        self.fp32 = self.q.dtype == torch.float32
        self.modifier_kinds = tuple(modifier.kernel_op for modifier in problem.modifiers)
        self.unused = TensorArg(self.q, 0, 0, 0, 0)

    @cached_property
    def mask_format(self) -> MaskFormat:
        return choose_mask_format(self.problem)

    @cached_property
    def key(self) -> Hashable | None:
        """Everything but tensors that the arguments of a kernel depend on; None where launches cannot be cached."""
        if not self.product:
            return None
        arg, mask_format = self.mask_format.arg, self.mask_format.kind
        caps = tuple(modifier.constant for modifier in self.problem.modifiers)
        return (
            self.v_heads,
            self.scale,
            self.problem.offset,
            self.modifier_kinds,
            caps,
            mask_format,
            arg.before,
            arg.after,
        )

    @cached_property
    def tensors(self) -> list[Tensor | None]:
        """Tensors that every kernel reads."""
        modifiers = [modifier.operand for modifier in self.problem.modifiers]
        arg = self.mask_format.arg
        return [self.q, self.k, *modifiers, *([arg.lo, arg.hi, arg.flags] if self.mask_format.intervals else [])]

    @property
    def common_args(self) -> dict[str, Any]:
        """Arguments that every kernel takes."""
        tensors = [modifier.operand for modifier in self.problem.modifiers]
        modifiers = [self.unused if x is None else tensor_arg(x) for x in tensors]
        caps = tuple(modifier.constant for modifier in self.problem.modifiers)
        groups = self.h // self.k.shape[1], self.h // self.v_heads
        return {
            "modifiers": tuple(step.ptr for step in modifiers), "strides": tuple(n for step in modifiers for n in step[1:]), "caps": caps,
            "mask": self.mask_format.arg, "sizes": Sizes(self.h, self.i, self.j, *groups, self.problem.offset),
            "scale": self.scale, "scale2": self.scale * LOG2E,
            "D": self.d, "MODIFIERS": self.modifier_kinds, "MASK": self.mask_format.kind, "FP32": self.fp32,
        }  # fmt: skip

    @cached_property
    def tanh_arg(self) -> TanhArg:
        """Additive scores: the projected queries and keys, and their exponentials."""
        if self.product:
            unused = self.q
            return TanhArg(unused, unused, unused, unused, unused, 0, 0, unused, 0, 0, 0)
        (v,) = flatten(self.problem.similarity_kernel)[1]
        a, rows, keys = self.d + self.d % 2, _round_up_to_tiles(self.i), _round_up_to_tiles(self.j)
        q, k, v = (
            pad(x.float(), (0, a - self.d, 0, n - x.shape[2])).mT.contiguous()
            for x, n in ((self.q, rows), (self.k, keys), (v, v.shape[2]))
        )
        paired = (
            ((q.abs().amax() <= MAX_PAIRED) & (k.abs().amax() <= MAX_PAIRED)).int()
            if q.numel() and k.numel()
            else q.new_ones(1)
        )
        exps = [_in_pairs((2 * x.clamp(-MAX_PAIRED, MAX_PAIRED)).exp()) for x in (q, k)]
        at = tensor_arg(v)  # b h a 1
        return TanhArg(q, k, exps[0], exps[1], v, at.b, at.h, paired, a, rows, keys)

    @property
    def similarity(self) -> str:
        return "product" if self.product else "tanh-plain" if INTERPRETED else "tanh"

    def norm2(self, norm: Tensor) -> Tensor:
        """The norm of finished rows in base 2, as `load_norm2` reads it."""
        norm, rows = norm.contiguous(), norm.numel() // 2
        out = empty(rows if self.scale_folded else 2 * rows, like=norm, dtype=torch.float32)
        arguments = {"norm": norm, "out": out, "rows": rows, "SCALE_FOLDED": self.scale_folded, "BLOCK": 1024}
        launch(norm_kernel, self.scale_folded, [norm, out], lambda: (triton.cdiv(rows, 1024), arguments))
        return out

    def values_are_keys(self, v: Tensor | None) -> bool:
        """Whether values are the memory of the keys: then it is read once."""
        if v is None:
            return False
        k = self.k
        return v.data_ptr() == k.data_ptr() and v.shape == k.shape and v.stride() == k.stride() and v.dtype == k.dtype

    def heads_per_group(self, e: int) -> int:
        """Number of heads that are scheduled together, so that their keys and values fit the L2 cache."""
        if self.mask_format.kind == "none":
            return 1
        one = self.j * (self.d + e) * self.k.element_size()
        return max(1, min(self.b * self.h, CACHE // max(one, 1)))

    def edges(self, config: Config) -> bool:
        """Whether some tiles must be masked cell by cell."""
        return self.mask_format.kind != "none" or not self.even_blocks(config)

    def even_blocks(self, config: Config) -> bool:
        """Whether rows and keys fill their last blocks: then TMA never reads past an end."""
        return self.i % config.block_i == 0 and self.j % config.block_j == 0

    def single_tma_loop(self, config: Config) -> bool:
        """Whether one TMA loop covers all tiles, with at least one visible tile for every row."""
        kind, offset = self.mask_format.kind, self.problem.offset
        see_some = kind in ("none", "causal") or (kind == "band" and self.i + offset <= self.j)
        return self.scale_folded and see_some and offset >= 0 and self.j > 0

    def key_table(self, config: Config) -> TensorArg:
        """Row blocks that see each key block."""
        if self.mask_format.intervals is None:
            return self.unused
        ranges = key_table(self.mask_format, config.block_i, config.block_j, self.j)
        return TensorArg(ranges, ranges.stride(0) if len(ranges) > 1 else 0, 0, 4, 1)

    def row_table(self, config: Config) -> TensorArg:
        """Key blocks that each row block sees, for each of its intervals."""
        if self.mask_format.intervals is None:
            return self.unused
        ranges = row_table(self.mask_format, config.block_i, config.block_j, self.j)
        return TensorArg(ranges, ranges.stride(0) if len(ranges) > 1 else 0, ranges.stride(1), 4, 1)


def _round_up_to_tiles(n: int) -> int:
    """n rounded up to full tiles, which are at most 128 long."""
    return triton.cdiv(n, 128) * 128


def _in_pairs(x: Tensor) -> Tensor:
    """(b, h, a, i) with two neighbours along a packed into 64 bits: (b, h, a / 2, i)."""
    return x.unflatten(2, (-1, 2)).transpose(3, 4).contiguous().view(torch.int64).squeeze(-1)


def padded_size(n: int, x: Tensor | None = None) -> int:
    """The tile size for n components: a power of two that tensor cores take.

    On a GPU at least 64 for 16-bit types: Triton 3.6 reads past the end of narrower tiles in swizzled shared memory
    (d = 24, e = 8 gave nan or an illegal access).
    """
    narrowest = 64 if x is not None and x.is_cuda and x.element_size() == 2 else 16
    return max(narrowest, triton.next_power_of_2(n))


def tma_descriptors(
    p: KernelInputs, config: Config, *wanted: tuple[Tensor, tuple[int, int]]
) -> tuple[bool, list[Any], list[TmaLayout]]:
    """Whether TMA is used, its descriptors and layouts; it is used for all of these tensors or for none."""
    descriptors = [tma_descriptor(x, block) for x, block in wanted] if config.tma and p.product else [None]
    if any(f is None for f in descriptors):
        return False, [x for x, _ in wanted], [NO_LAYOUT] * len(wanted)
    return True, [f[0] for f in descriptors if f], [f[1] for f in descriptors if f]


def gluon_tma_args(**tensors: tuple[Tensor, int]) -> dict[str, Any]:
    """TMA descriptors and layouts of these tensors for Gluon kernels, for tiles of so many rows."""
    from .hopper.gluon_ops import gluon_descriptor

    args = {}
    for name, (x, rows) in tensors.items():
        args[f"{name}_desc"], args[f"{name}_layout"] = gluon_descriptor(tma_descriptor(x, (rows, x.shape[-1])))
    return args


@lru_cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def new_tile_counter(p: KernelInputs) -> Tensor:
    """The counter from which the programs of a persistent kernel take tiles."""
    return torch.zeros(1, dtype=torch.int32, device=p.q.device)
