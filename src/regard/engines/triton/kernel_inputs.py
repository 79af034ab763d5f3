"""A problem as the kernels take it: sizes, steps of the score, the mask's form, and what the copy engine is told.

Imports `form`, `tiles`, `start`, `configuration`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from ...core.problem import Problem, strides_like
from ...core.scores import Alibi, Bias, Product, Softcap
from .kernels.additive import TAME, TanhPair
from .kernels.tile_ops import NOWHERE, Cells, Map, Sizes, cells, described, norm_kernel
from .launcher import INTERPRETED, start
from .mask_args import Form, form_of, key_table, row_table
from .tile_config import Config

__all__ = ["Arguments", "Prepared", "copied", "empty", "into_shared_memory", "lots", "multiprocessors", "padded"]

#: Keys and values of as many heads as fit here are worked on together (bytes; half the cache of an H200).
CACHE = 24 * 2**20
LOG2E = 1.4426950408889634

#: How many programs run, and the arguments of their kernel.
Arguments = tuple[int, dict[str, Any]]


def empty(*shape: int, like: Tensor, dtype: torch.dtype, lying: bool = False) -> Tensor:
    """Where a kernel writes; `lying`: in the order in which `like` lies. Tests fill it with nan, to see that all of it is
    written."""
    if lying:
        return torch.empty_strided(shape, strides_like(like, shape), dtype=dtype, device=like.device)
    return torch.empty(shape, dtype=dtype, device=like.device)


class Prepared:
    """A problem as the kernels take it. What only the first call of a form needs is made when it is asked for."""

    def __init__(self, problem: Problem, v_heads: int = 1) -> None:
        self.problem, self.v_heads = problem, v_heads
        self.q, self.k = problem.q, problem.k
        self.b, self.h, self.i, self.j = problem.shape
        self.d = self.q.shape[-1]
        self.product = isinstance(problem.similarity_kernel, Product)
        self.scale = problem.similarity_kernel.scale if isinstance(problem.similarity_kernel, Product) else 1.0
        self.fold = self.product and not problem.modifiers and 1e-6 < self.scale < 1e6
        self.exact = self.q.dtype == torch.float32
        self.kinds = tuple(_kind(s) for s in problem.modifiers)
        self.nothing = Cells(self.q, 0, 0, 0, 0)

    @cached_property
    def form(self) -> Form:
        return form_of(self.problem)

    @cached_property
    def key(self) -> Hashable | None:
        """All that the arguments of a kernel depend on, but for tensors; None where they are made anew for every call."""
        if not self.product:
            return None
        seen, form = self.form.seen, self.form.kind
        caps = tuple(s.cap for s in self.problem.modifiers if isinstance(s, Softcap))
        return self.v_heads, self.scale, self.problem.offset, self.kinds, caps, form, seen.before, seen.after

    @cached_property
    def tensors(self) -> list[Tensor | None]:
        """Those that every kernel is given."""
        steps = [_tensor_of(s) for s in self.problem.modifiers]
        seen = self.form.seen
        return [self.q, self.k, *steps, *([seen.lo, seen.hi, seen.flags] if self.form.spans else [])]

    @property
    def common(self) -> dict[str, Any]:
        """What every kernel takes."""
        found = [_tensor_of(s) for s in self.problem.modifiers]
        steps = [self.nothing if x is None else cells(x) for x in found]
        caps = tuple(s.cap if isinstance(s, Softcap) else 0.0 for s in self.problem.modifiers)
        groups = self.h // self.k.shape[1], self.h // self.v_heads
        return {
            "steps": tuple(step.ptr for step in steps), "strides": tuple(n for step in steps for n in step[1:]), "caps": caps,
            "seen": self.form.seen, "sizes": Sizes(self.h, self.i, self.j, *groups, self.problem.offset),
            "scale": self.scale, "scale2": self.scale * LOG2E,
            "D": self.d, "STEPS": self.kinds, "MASK": self.form.kind, "EXACT": self.exact,
        }  # fmt: skip

    @cached_property
    def pair(self) -> TanhPair:
        """Additive scores: what is in front of tanh, and its exponentials."""
        if self.product:
            unused = self.q
            return TanhPair(unused, unused, unused, unused, unused, 0, 0, unused, 0, 0, 0)
        v = self.problem.similarity_kernel.v  # type: ignore[union-attr]
        a, rows, keys = self.d + self.d % 2, _whole(self.i), _whole(self.j)
        q, k, v = (
            pad(x.float(), (0, a - self.d, 0, n - x.shape[2])).mT.contiguous()
            for x, n in ((self.q, rows), (self.k, keys), (v, v.shape[2]))
        )
        tame = ((q.abs().amax() <= TAME) & (k.abs().amax() <= TAME)).int() if q.numel() and k.numel() else q.new_ones(1)
        grown = [_in_pairs((2 * x.clamp(-TAME, TAME)).exp()) for x in (q, k)]
        at = cells(v)  # b h a 1
        return TanhPair(q, k, grown[0], grown[1], v, at.b, at.h, tame, a, rows, keys)

    @property
    def pair_kind(self) -> str:
        return "product" if self.product else "tanh-plain" if INTERPRETED else "tanh"

    def in_base_2(self, norm: Tensor) -> Tensor:
        """The norm of finished rows as the kernels read it."""
        norm, rows = norm.contiguous(), norm.numel() // 2
        out = empty(rows if self.fold else 2 * rows, like=norm, dtype=torch.float32)
        arguments = {"norm": norm, "out": out, "rows": rows, "FOLD": self.fold, "BLOCK": 1024}
        start(norm_kernel, self.fold, [norm, out], lambda: (triton.cdiv(rows, 1024), arguments))
        return out

    def per_group(self, e: int) -> int:
        """How many heads are worked on together."""
        if self.form.kind == "none":
            return 1
        one = self.j * (self.d + e) * self.k.element_size()
        return max(1, min(self.b * self.h, CACHE // max(one, 1)))

    def edges(self, config: Config) -> bool:
        """Whether there are tiles that must be looked at cell by cell."""
        return self.form.kind != "none" or not self.whole(config)

    def whole(self, config: Config) -> bool:
        """Whether rows and keys fill their last blocks: then no copy reads past an end."""
        return self.i % config.block_i == 0 and self.j % config.block_j == 0

    def one_loop(self, config: Config) -> bool:
        """Whether one loop by the copy engine can take all tiles, and at least one for every row."""
        kind, offset = self.form.kind, self.problem.offset
        see_some = kind in ("none", "causal") or (kind == "band" and self.i + offset <= self.j)
        return self.fold and see_some and offset >= 0 and self.whole(config) and self.j > 0

    def table(self, config: Config) -> Cells:
        """Which blocks of rows see a block of keys."""
        if self.form.spans is None:
            return self.nothing
        table = key_table(self.form, config.block_i, config.block_j, self.j)
        return Cells(table, table.stride(0) if len(table) > 1 else 0, 0, 4, 1)

    def row_table(self, config: Config) -> Cells:
        """Which blocks of keys a block of rows sees, in each of its intervals."""
        if self.form.spans is None:
            return self.nothing
        table = row_table(self.form, config.block_i, config.block_j, self.j)
        return Cells(table, table.stride(0) if len(table) > 1 else 0, table.stride(1), 4, 1)


def _whole(n: int) -> int:
    """Positions filled up to whole tiles, none of which is longer than 128."""
    return triton.cdiv(n, 128) * 128


def _in_pairs(x: Tensor) -> Tensor:
    """(b, h, a, i) with two neighbours along a in 64 bits each: (b, h, a / 2, i)."""
    return x.unflatten(2, (-1, 2)).transpose(3, 4).contiguous().view(torch.int64).squeeze(-1)


def _tensor_of(step: Any) -> Tensor | None:
    return step.tensor if isinstance(step, Bias) else step.slopes if isinstance(step, Alibi) else None


def _kind(step: Any) -> str:
    """What a step does to a tile; a bias that is the same along rows or along keys is not read cell by cell."""
    if not isinstance(step, Bias):
        return type(step).__name__.lower()
    return "bias_rows" if step.tensor.shape[3] == 1 else "bias_keys" if step.tensor.shape[2] == 1 else "bias"


def padded(n: int, x: Tensor | None = None) -> int:
    """The tile size for n components: a power of two that tensor cores take.

    On a GPU at least 64 for 16-bit types: with narrower tiles in swizzled shared memory Triton 3.6 reads past their end
    (seen with d = 24, e = 8: nan, or an illegal access).
    """
    narrowest = 64 if x is not None and x.is_cuda and x.element_size() == 2 else 16
    return max(narrowest, triton.next_power_of_2(n))


def copied(p: Prepared, config: Config, *wanted: tuple[Tensor, tuple[int, int]]) -> tuple[bool, list[Any], list[Map]]:
    """Whether the copy engine serves, its descriptors and maps; where one tensor does not suit it, it copies none."""
    found = [described(x, block) for x, block in wanted] if config.tma and p.product else [None]
    if any(f is None for f in found):
        return False, [x for x, _ in wanted], [NOWHERE] * len(wanted)
    return True, [f[0] for f in found if f], [f[1] for f in found if f]


# For kernels in Gluon.


def into_shared_memory(**tensors: tuple[Tensor, int]) -> dict[str, Any]:
    """What the copy engine is told of each tensor, for tiles of so many rows."""
    from .hopper.forward_ws import laid_out

    told = {}
    for name, (x, rows) in tensors.items():
        told[f"{name}_desc"], told[f"{name}_map"] = laid_out(described(x, (rows, x.shape[-1])))
    return told


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def lots(p: Prepared) -> Tensor:
    """From which the programs of a parted kernel, as many as multiprocessors, draw one block of work after the other."""
    return torch.zeros(1, dtype=torch.int32, device=p.q.device)
