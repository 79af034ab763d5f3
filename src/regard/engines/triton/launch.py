"""From a problem to the arguments of the kernels, and from their outputs to answers.

Everything the kernels take is prepared here once: strides, the mask as a band, as intervals or as flags, the steps of
the score, and the configuration. Imports `tiles` and the kernels; loaded only when the engine computes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from ...block import Block
from ...factors import Problem
from ...mask import And, Causal, Mask, Window
from ...score import Alibi, Bias, Product, Softcap
from ...statistics import Tiling
from ..gradient import Gradient
from .additive import TAME, TanhPair
from .backward import Flow, keys_kernel, row_dot_kernel, rows_kernel, steps_kernel
from .configuration import Config, configured
from .forward import Outputs, forward_kernel
from .reread import Pool, pool_kernel, reread_kernel
from .tiles import NOWHERE, Cells, Seen, Sizes, cells, described, launch_on, norm_kernel, rows_of
from .top import ballot_kernel, search_kernel, settle_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: No band is wider: further than any position, and far from overflow.
UNBOUNDED = 2**30
#: Keys and values of as many heads as fit here are worked on together (bytes; half the cache of an H200).
CACHE = 24 * 2**20
#: Of how many groups of tiles the largest product is noted, at most.
MOST_GROUPS = 128
#: Cells written out for a mask that is no set of intervals.
MOST_FLAGS = 2**33


def empty(*shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Where a kernel writes. Tests fill it with nan, to see that all of it is written."""
    return torch.empty(shape, dtype=dtype, device=like.device)


# The mask, in one of five forms.


@dataclass(frozen=True)
class Form:
    """How the kernels are told who is seen."""

    kind: str  # none, causal, band, spans, flags
    seen: Seen
    spans: tuple[Tensor, Tensor] | None = None  # lo, hi (b|1, r, i)


def form_of(problem: Problem) -> Form:
    nothing = Cells(problem.q, 0, 0, 0, 0)
    if problem.mask is None:
        return Form("none", _seen(nothing))
    if (band := _band(problem.mask)) is not None:
        kind = "causal" if band == (UNBOUNDED, 0) else "band"
        return Form(kind, _seen(nothing, *band))
    spans = problem.spans
    if spans.exact:
        lo, hi = spans.lo.int().contiguous(), spans.hi.int().contiguous()
        return Form("spans", _seen(nothing, spans=(lo, hi)), (lo, hi))
    flags = written_out(problem)
    lo, hi = _ends_of_rows(flags)
    return Form("flags", _seen(cells(flags), spans=(lo, hi)), (lo, hi))


def _seen(flags: Cells, before: int = 0, after: int = 0, spans: tuple[Tensor, Tensor] | None = None) -> Seen:
    lo, hi = spans or (flags.ptr, flags.ptr)
    count = lo.shape[1] if spans else 1
    return Seen(before, after, lo, hi, count, lo.stride(0) if spans and len(lo) > 1 else 0, *flags)


def _band(mask: Mask) -> tuple[int, int] | None:
    """(before, after) of masks that show a band round the own position."""
    if isinstance(mask, Causal):
        return UNBOUNDED, 0
    if isinstance(mask, Window):
        return min(mask.before, UNBOUNDED), min(mask.after, UNBOUNDED)
    if type(mask) is And and (a := _band(mask.left)) and (b := _band(mask.right)):
        return min(a[0], b[0]), min(a[1], b[1])
    return None


def written_out(problem: Problem) -> Tensor:
    """The visible cells (b|1, h|1, i, j) as bytes."""
    _, _, i, j = problem.shape
    assert problem.mask is not None
    flags = problem.mask.visible(Block(slice(0, i), slice(0, j), problem.offset, problem.q.device))
    flags = flags.reshape(*[1] * (4 - flags.ndim), *flags.shape)
    return flags.expand(*flags.shape[:2], i, j).view(torch.uint8)


def _ends_of_rows(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Of every row the first key that some head sees and the one after the last, (b|1, 1, i)."""
    some = flags.amax(1, keepdim=True)  # b 1 i j
    first = some.argmax(-1)
    last = some.shape[-1] - some.flip(-1).argmax(-1)
    there = some.amax(-1) > 0
    return torch.where(there, first, 0).int().contiguous(), torch.where(there, last, 0).int().contiguous()


def _by_block(form: Form, block_i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every block of rows and each interval: the keys that some row sees, and those that all see. (b|1, r, blocks)"""
    assert form.spans is not None
    lo, hi = form.spans
    pad, big = -lo.shape[-1] % block_i, torch.iinfo(torch.int32).max
    filled = lo < hi

    def blocks(x: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, pad), value=value).unflatten(-1, (-1, block_i))

    touch_lo, touch_hi = blocks(torch.where(filled, lo, big), big).amin(-1), blocks(hi * filled, 0).amax(-1)
    full_lo, full_hi = blocks(lo, 0).amax(-1), blocks(hi, big).amin(-1)
    if form.kind == "flags":  # inside the intervals anything may be hidden
        full_hi = torch.zeros_like(full_hi)
    return touch_lo, touch_hi, full_lo, full_hi


def row_table(form: Form, block_i: int, block_j: int, keys: int) -> Tensor:
    """For every block of rows and each interval: first block of keys, those seen in full from and to, past the last.

    (b|1, r, blocks, 4)
    """
    touch_lo, touch_hi, full_lo, full_hi = _by_block(form, block_i)
    some = touch_lo < touch_hi
    first = torch.where(some, touch_lo, 0) // block_j
    past = torch.where(some, (touch_hi + block_j - 1) // block_j, first)
    full_from, full_to = (full_lo + block_j - 1) // block_j, full_hi.clamp(0, keys) // block_j
    return torch.stack([first, full_from, full_to, past], -1).int().contiguous()


def key_table(form: Form, block_i: int, block_j: int, keys: int) -> Tensor:
    """For every block of keys: the first block of rows that sees it, those that see all of it from and to, past the last.

    (b|1, blocks, 4). Rows have intervals, columns have none: so it is looked up, block by block.
    """
    assert form.spans is not None
    rows = form.spans[0].shape[-1]
    touch_lo, touch_hi, full_lo, full_hi = _by_block(form, block_i)
    begin = torch.arange(0, keys, block_j, device=touch_lo.device, dtype=torch.int32)
    end = (begin + block_j).clamp(max=keys)
    touched = ((touch_lo[..., None] < end) & (touch_hi[..., None] > begin)).any(1)  # b I J
    full = ((full_lo[..., None] <= begin) & (full_hi[..., None] >= end)).any(1) & touched
    # Tiles at the end of the rows or of the keys are edges: nothing is read past an end.
    full[:, rows // block_i :] = False
    full[:, :, keys // block_j :] = False
    first, past = _run(touched)
    full_from, full_to = _run(full)
    unbroken = full.sum(1) == full_to - full_from
    full_from, full_to = torch.where(unbroken, full_from, first), torch.where(unbroken, full_to, first)
    return torch.stack([first, full_from, full_to, past], -1).int().contiguous()


def _run(there: Tensor) -> tuple[Tensor, Tensor]:
    """First and past-the-last true place along axis 1; (0, 0) where there is none."""
    flags, some = there.int(), there.any(1)
    first = flags.argmax(1)
    past = there.shape[1] - flags.flip(1).argmax(1)
    return torch.where(some, first, 0), torch.where(some, past, 0)


# The rest of a problem.


class Prepared:
    """A problem as the kernels take it."""

    def __init__(self, problem: Problem, v_heads: int = 1) -> None:
        self.problem = problem
        self.q, self.k = problem.q, problem.k
        self.b, self.h, self.i, self.j = problem.shape
        self.d = self.q.shape[-1]
        self.product = isinstance(problem.pair, Product)
        self.scale = problem.pair.scale if isinstance(problem.pair, Product) else 1.0
        self.fold = self.product and not problem.steps and 1e-6 < self.scale < 1e6
        self.exact = self.q.dtype == torch.float32
        nothing = Cells(self.q, 0, 0, 0, 0)
        tensors = {Bias: "tensor", Alibi: "slopes"}
        steps = [cells(getattr(s, tensors[type(s)])) if type(s) in tensors else nothing for s in problem.steps]
        self.steps = tuple(step.ptr for step in steps)
        self.strides = tuple(stride for step in steps for stride in step[1:])
        self.caps = tuple(s.cap if isinstance(s, Softcap) else 0.0 for s in problem.steps)
        self.kinds = tuple(_kind(s) for s in problem.steps)
        self.sizes = Sizes(self.h, self.i, self.j, self.h // self.k.shape[1], self.h // v_heads, problem.offset)
        unused = self.q
        no_pair = TanhPair(unused, unused, unused, unused, unused, 0, 0, unused, 0)
        self.pair = no_pair if self.product else self._pair()

    @cached_property
    def form(self) -> Form:
        return form_of(self.problem)

    @property
    def common(self) -> dict[str, Any]:
        """What every kernel takes."""
        return {
            "steps": self.steps, "strides": self.strides, "caps": self.caps, "seen": self.form.seen, "sizes": self.sizes,
            "scale": self.scale, "scale2": self.scale * 1.4426950408889634,
            "D": self.d, "STEPS": self.kinds, "MASK": self.form.kind, "EXACT": self.exact,
        }  # fmt: skip

    def _pair(self) -> TanhPair:
        v = self.problem.pair.v  # type: ignore[union-attr]
        a = self.d + self.d % 2
        q, k = (torch.nn.functional.pad(x.float(), (0, a - self.d)).mT.contiguous() for x in (self.q, self.k))
        v = torch.nn.functional.pad(v.float(), (0, a - self.d)).mT.contiguous()  # b h a 1
        tame = ((q.abs().amax() <= TAME) & (k.abs().amax() <= TAME)).int() if q.numel() and k.numel() else q.new_ones(1)
        grown = [(2 * x.clamp(-TAME, TAME)).exp() for x in (q, k)]
        at = cells(v)
        return TanhPair(q, k, grown[0], grown[1], v, at.b, at.h, tame, a)

    @property
    def pair_kind(self) -> str:
        return "product" if self.product else "tanh-plain" if INTERPRETED else "tanh"

    def in_base_2(self, norm: Tensor) -> Tensor:
        """The norm of finished rows as the kernels read it."""
        rows = norm.numel() // 2
        out = empty(rows if self.fold else 2 * rows, like=norm, dtype=torch.float32)
        with launch_on(norm):
            norm_kernel[(triton.cdiv(rows, 1024),)](norm.contiguous(), out, rows, FOLD=self.fold, BLOCK=1024)
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
        """Whether one loop by the copy engine can take all tiles."""
        return self.whole(config) and self.form.kind in ("none", "causal") and not self.problem.steps

    def table(self, config: Config) -> Cells:
        """Which blocks of rows see a block of keys."""
        if self.form.spans is None:
            return Cells(self.q, 0, 0, 0, 0)
        table = key_table(self.form, config.block_i, config.block_j, self.j)
        return Cells(table, table.stride(0) if len(table) > 1 else 0, 0, 4, 1)

    def row_table(self, config: Config) -> Cells:
        """Which blocks of keys a block of rows sees, in each of its intervals."""
        if self.form.spans is None:
            return Cells(self.q, 0, 0, 0, 0)
        table = row_table(self.form, config.block_i, config.block_j, self.j)
        return Cells(table, table.stride(0) if len(table) > 1 else 0, table.stride(1), 4, 1)


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


def copied(config: Config, *tensors: tuple[Tensor, tuple[int, int]]) -> list[Any] | None:
    """Descriptors and maps for the copy engine, one after the other; None where one of the tensors does not suit it."""
    if not config.tma:
        return None
    found = [described(x, block) for x, block in tensors]
    return None if any(f is None for f in found) else [*[f[0] for f in found if f], *[f[1] for f in found if f]]


# The passes.


def forward(problem: Problem, names: tuple[str, ...], v: Tensor | None, keys: Tensor | None, best: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """What one pass tells: y, lse, norm, max_score, argmax, entropy, reach, mass. `keys` is (b|1, h|1, 1, j).

    For `top` also, if `best`, `bests`: the largest product of every few tiles.
    """
    p = Prepared(problem, 1 if v is None else v.shape[1])
    types = {"argmax": torch.int64}
    sizes = {"norm": (2,)}
    found = {
        name: empty(p.b, p.h, p.i, *sizes.get(name, ()), like=p.q, dtype=types.get(name, torch.float32))
        for name in names
        if name != "y"
    }
    e = 16
    if v is not None:
        v = v.expand(p.b, -1, -1, -1)
        e = v.shape[-1]
        found["y"] = empty(p.b, p.h, p.i, e, like=p.q, dtype=v.dtype)
    nothing = Cells(p.q, 0, 0, 0, 0)
    out = Outputs(*(
        nothing if name not in found else cells(found[name]) if found[name].ndim == 4 else rows_of(found[name])
        for name in Outputs._fields
    ))  # fmt: skip
    same = v is not None and p.product and _same(v, p.k)
    block_d, block_e = padded(p.d, p.q), padded(e, p.q)

    def prepared(config: Config) -> list[Any] | None:
        wanted = [(p.q, (config.block_i, block_d)), (p.k, (config.block_j, block_d))]
        if v is not None and not same:
            wanted.append((v, (config.block_j, block_e)))
        return copied(config, *wanted) if p.product else None

    config = configured("forward", p, e, v)
    tma = prepared(config)
    if config.apart and tma is None:
        config = configured("forward", p, e, v, whole_warps=True)
        tma = prepared(config)
    count = 2 if v is None or same else 3
    if tma is None:
        descriptors, maps = [p.q] * 3, [NOWHERE] * 3
    else:
        descriptors, maps = [*tma[:count], tma[1]][:3], [*tma[count:], tma[count + 1]][:3]
    heads = p.b * p.h
    apart = tma is not None and config.apart and p.one_loop(config)
    if apart:
        triton.set_allocator(_room)
    bests, per_best, groups = nothing, 1, 0
    if best:
        visits = triton.cdiv(p.j, config.block_j) + 2  # at most: an edge on either side
        per_best = triton.cdiv(visits, MOST_GROUPS)
        groups = triton.cdiv(visits, per_best)
        found["bests"] = empty(p.b, p.h, p.i, groups, like=p.q, dtype=torch.float32)
        bests = cells(found["bests"])
    with launch_on(p.q):
        forward_kernel[(triton.cdiv(p.i, config.block_i) * heads,)](
            q=cells(p.q), k=cells(p.k), v=nothing if v is None else cells(v), pair=p.pair,
            q_desc=descriptors[0], k_desc=descriptors[1], v_desc=descriptors[2],
            q_map=maps[0], k_map=maps[1], v_map=maps[2],
            sink=nothing if problem.sink is None else cells(problem.sink),
            keys=nothing if keys is None else cells(keys), row_table=p.row_table(config), out=out, bests=bests, per_best=per_best, groups=groups, heads=heads, per_group=p.per_group(e),
            PAIR=p.pair_kind, E=e, FOLD=p.fold, EXACT_V=v is not None and v.dtype == torch.float32,
            SINK=problem.sink is not None, SAME=same, Y=v is not None, LSE="lse" in names, NORM="norm" in names, MAX="max_score" in names,
            ENTROPY="entropy" in names, REACH="reach" in names, MASS="mass" in names, ARGMAX="argmax" in names,
            TMA=tma is not None, APART=apart, BESTS="bests" in found,
            EDGES=p.form.kind != "none" or p.j % config.block_j != 0, WHOLE=p.j % config.block_j == 0, BLOCK_D=block_d, BLOCK_E=block_e,
            **p.common, **config.launch,
        )  # fmt: skip
    return found


def _room(size: int, alignment: int, stream: Any) -> Tensor:
    """Where programs write the descriptors they make."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _same(v: Tensor, k: Tensor) -> bool:
    """Whether values and keys are the same numbers in the same place: then they are read once."""
    return v.data_ptr() == k.data_ptr() and v.shape == k.shape and v.stride() == k.stride() and v.dtype == k.dtype


def top(problem: Problem, n: int, bests: Tensor | None = None) -> dict[str, Tensor]:
    """The n largest scores of every row. With `bests` of a forward pass: by ballot, else by search."""
    p = Prepared(problem)
    score = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    index = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    flags, flagged = (None, 0) if bests is None else _balloted(p, n, bests, score, index)
    config = configured("top", p, 0, None)
    block_d = padded(p.d, p.q)
    tma = copied(config, (p.k, (config.block_j, block_d))) if p.product else None
    heads = p.b * p.h
    with launch_on(p.q):
        search_kernel[(triton.cdiv(p.i, config.block_i) * heads,)](
            q=cells(p.q), k=cells(p.k), pair=p.pair, k_desc=tma[0] if tma else p.k, k_map=tma[1] if tma else NOWHERE,
            row_table=p.row_table(config), score=cells(score), index=cells(index), flags=p.q if flags is None else flags,
            heads=heads, per_group=p.per_group(0), PAIR=p.pair_kind, FOLD=p.fold, TMA=tma is not None, N=n,
            BLOCK_N=triton.next_power_of_2(n), BLOCK_D=block_d, FLAGGED=flagged, **p.common, **config.launch,
        )  # fmt: skip
    return {"top_score": score, "top_index": index}


def _balloted(p: Prepared, n: int, bests: Tensor, score: Tensor, index: Tensor) -> tuple[Tensor, int]:
    """Write the n best of nearly all rows; returns flags for blocks of rows that must be searched, and their height."""
    config = configured("ballot", p, 0, None)
    # Of fewer groups than this the n-th largest is no good bound.
    enough = (n + n // 4 + 1) * configured("forward", p, p.d, None).block_j
    room = triton.next_power_of_2(3 * n + 8)
    found = empty(p.b, p.h, p.i, room, like=p.q, dtype=torch.int32)
    counts = torch.zeros(p.b, p.h, p.i, dtype=torch.int32, device=p.q.device)
    blocks, heads = triton.cdiv(p.i, config.block_i), p.b * p.h
    flags = empty(heads * blocks, like=p.q, dtype=torch.int32)
    block_d, groups = padded(p.d, p.q), bests.shape[-1]
    tma = copied(config, (p.k, (config.block_j, block_d)))
    with launch_on(p.q):
        ballot_kernel[(blocks * heads,)](
            q=cells(p.q), k=cells(p.k), k_desc=tma[0] if tma else p.k, k_map=tma[1] if tma else NOWHERE, row_table=p.row_table(config),
            bests=cells(bests), found=cells(found), counts=rows_of(counts), flags=flags, heads=heads, per_group=p.per_group(0), FOLD=p.fold,
            TMA=tma is not None, N=n, ROOM=room, GROUPS=groups, BLOCK_GROUPS=triton.next_power_of_2(groups), ENOUGH=enough,
            BLOCK_D=block_d, **p.common, **config.launch,
        )  # fmt: skip
        settle_kernel[(triton.cdiv(p.i, 16) * heads,)](
            q=cells(p.q), k=cells(p.k), found=cells(found), counts=rows_of(counts), score=cells(score), index=cells(index),
            heads=heads, FOLD=p.fold, N=n, ROOM=room, ROWS=16, SLOTS=16, PART=32, num_warps=4, **p.common,
        )  # fmt: skip
    return flags, config.block_i


def by_ballot(problem: Problem, n: int) -> bool:
    """Whether the n largest are found by ballot: it wants whole tiles of products that one band shows, and twice as many
    tiles as keys are asked for; else many keys reach the bound."""
    p = Prepared(problem)
    if not p.product or p.exact or n > 16 or p.form.kind not in ("none", "causal", "band"):
        return False
    widest = max(configured(kernel, p, p.d, None).block_j for kernel in ("forward", "ballot"))
    seen = p.form.seen.before + p.form.seen.after if p.form.kind == "band" else p.j
    return p.j % widest == 0 and min(seen, p.j) >= 2 * n * widest


def reread(problem: Problem, names: tuple[str, ...], norm: Tensor, u: Tensor | None, tiling: Tiling | None) -> dict[str, Tensor]:  # fmt: skip
    """What columns tell: received, z, pool."""
    p = Prepared(problem)
    nothing = Cells(p.q, 0, 0, 0, 0)
    found: dict[str, Tensor] = {}
    if "received" in names:
        found["received"] = empty(p.b, p.h, p.j, like=p.q, dtype=torch.float32)
    e = 16
    if "z" in names and u is not None:
        u, e = u.expand(p.b, p.h, -1, -1), u.shape[-1]
        found["z"] = empty(p.b, p.h, p.j, e, like=p.q, dtype=torch.float32)
    config = configured("reread", p, e if "z" in names else 0, u)
    sums, pool, aligned = None, Pool(p.q, 1, 0, 1, 1), False
    if "pool" in names and tiling is not None:
        n = tiling.i1 - tiling.i0
        aligned = n > 0 and n % (tiling.rows * config.block_i) == 0 and tiling.i0 % config.block_i == 0
        # Where every block of rows sees every key, each sum is written; else those that nobody sees stay 0.
        blank = torch.empty if aligned and p.form.kind == "none" else torch.zeros
        sums = blank(p.b, p.h, tiling.rows, p.j, dtype=torch.float32, device=p.q.device)
        pool = Pool(sums, tiling.rows, tiling.i0, tiling.i1, n // (tiling.rows * config.block_i) if aligned else 1)
    block_d = padded(p.d, p.q)
    tma = copied(config, (p.q, (config.block_i, block_d))) if p.product else None
    with launch_on(p.q):
        reread_kernel[(triton.cdiv(p.j, config.block_j) * p.b * p.h,)](
            q=cells(p.q), k=cells(p.k), pair=p.pair, q_desc=tma[0] if tma else p.q, q_map=tma[1] if tma else NOWHERE,
            heads=p.b * p.h, per_group=p.per_group(0), norm=p.in_base_2(norm), u=nothing if u is None else cells(u), table=p.table(config), pool=pool,
            out_received=rows_of(found["received"]) if "received" in found else nothing,
            out_z=cells(found["z"]) if "z" in found else nothing,
            PAIR=p.pair_kind, E=e, FOLD=p.fold, EXACT_U=u is not None and u.dtype == torch.float32,
            RECEIVED="received" in names, PARTS=sums is not None, ALIGNED=aligned, Z="z" in names,
            TMA=tma is not None, EDGES=p.edges(config), WHOLE=p.whole(config), BLOCK_D=block_d, BLOCK_E=padded(e, p.q), **p.common, **config.launch,
        )  # fmt: skip
    if sums is not None and tiling is not None:
        found["pool"] = _columns_pooled(sums, tiling)
    return found


def _columns_pooled(sums: Tensor, tiling: Tiling) -> Tensor:
    """Sums of columns (b, h, rows, j) added up within each tile: (b, h, rows, cols), in a fixed order."""
    n = tiling.j1 - tiling.j0
    part = sums[..., tiling.j0 : tiling.j1]
    width = n // tiling.cols
    if n == sums.shape[3] and n % tiling.cols == 0 and 4 <= width <= 4096 and width & (width - 1) == 0:
        out = empty(*sums.shape[:3], tiling.cols, like=sums, dtype=torch.float32)
        tiles, block = out.numel(), 4096 // width
        with launch_on(sums):  # PyTorch's sum of short rows takes three times as long
            pool_kernel[(triton.cdiv(tiles, block),)](sums, out, tiles, WIDTH=width, BLOCK=block)
        return out
    if n % tiling.cols == 0:
        return part.unflatten(-1, (tiling.cols, width)).sum(-1)
    edge = torch.arange(tiling.cols + 1, device=sums.device) * n // tiling.cols
    widest = -(-n // tiling.cols)
    at = edge[:-1, None] + torch.arange(widest, device=sums.device)
    inside = at < edge[1:, None]
    return (part[..., at.clamp(max=n - 1)] * inside).sum(-1)


# Backward.


def backward(problem: Problem, v: Tensor | None, norm: Tensor, gradient: Gradient, fast: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq, dk and dv; `fast` adds dq up in any order."""
    flowing = _flowing(problem, v, norm, gradient)
    if fast:
        return fused_pass(*flowing)
    dk, dv = keys_pass(*flowing)
    return rows_pass(*flowing), dk, dv


def fused_pass(p: Prepared, flow: Flow, constants: dict[str, Any], e: int, v: Tensor | None, dy: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    total = torch.zeros(p.b, p.h, p.i, p.d, dtype=torch.float32, device=p.q.device)
    dk, dv = keys_pass(p, flow, constants, e, v, dy, total)
    dq = empty(p.b, p.h, p.i, p.d, like=p.q, dtype=p.q.dtype)
    return torch.mul(total, p.scale, out=dq), dk, dv  # one pass: multiplied in float32, written in q's type


def keys_pass(p: Prepared, flow: Flow, constants: dict[str, Any], e: int, v: Tensor | None, dy: Tensor | None, dq: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dk and dv. Adds to `dq`, where it is given, its gradient without the scale."""
    nothing = Cells(p.q, 0, 0, 0, 0)
    g, hv = p.k.shape[1], 1 if v is None else v.shape[1]
    # Keys and values that are shared by the same query heads are added up where they are computed.
    heads = g if v is None or hv == g else p.h
    dk = empty(p.b, heads, p.j, p.d, like=p.q, dtype=p.k.dtype if heads == g else torch.float32)
    dv = None if v is None else empty(p.b, heads, p.j, e, like=p.q, dtype=v.dtype if heads == hv else torch.float32)
    block_d, block_e = padded(p.d, p.q), padded(e, p.q)
    config = configured("keys" if dq is None else "fused", p, e, v)
    tma = _copied_pair(config, p.q, dy, config.block_i, block_d, block_e)
    # The interpreter's copy engine cannot add.
    sums = None if dq is None or INTERPRETED else copied(config, (dq, (config.block_i, block_d)))
    with launch_on(p.q):
        keys_kernel[(triton.cdiv(p.j, config.block_j) * p.b * heads,)](
            q=cells(p.q), k=cells(p.k), v=nothing if v is None else cells(v), dy=nothing if dy is None else cells(dy),
            dq=nothing if dq is None else cells(dq), q_desc=tma[0], dy_desc=tma[1], dq_desc=sums[0] if sums else p.q,
            q_map=tma[2], dy_map=tma[3], dq_map=sums[1] if sums else NOWHERE, table=p.table(config), flow=flow,
            out_dk=cells(dk), out_dv=nothing if dv is None else cells(dv), heads=heads, group=p.h // heads, batch=p.b, per_group=min(p.per_group(e), p.b * heads),
            FOLD=p.fold, FUSED=dq is not None, TMA=tma[4] and (dq is None or sums is not None), EDGES=p.edges(config),
            WHOLE=p.whole(config), BLOCK_D=block_d, BLOCK_E=block_e, **constants, **p.common, **config.launch,
        )  # fmt: skip
    return _per_key_head(dk, g), None if dv is None else _per_key_head(dv, hv)


def rows_pass(p: Prepared, flow: Flow, constants: dict[str, Any], e: int, v: Tensor | None, dy: Tensor | None) -> Tensor:  # fmt: skip
    nothing = Cells(p.q, 0, 0, 0, 0)
    dq = empty(p.b, p.h, p.i, p.d, like=p.q, dtype=p.q.dtype)
    block_d, block_e = padded(p.d, p.q), padded(e, p.q)
    config = configured("rows", p, e, v)
    tma = _copied_pair(config, p.k, v, config.block_j, block_d, block_e)
    with launch_on(p.q):
        rows_kernel[(triton.cdiv(p.i, config.block_i) * p.b * p.h,)](
            q=cells(p.q), k=cells(p.k), v=nothing if v is None else cells(v), dy=nothing if dy is None else cells(dy),
            k_desc=tma[0], v_desc=tma[1], k_map=tma[2], v_map=tma[3], row_table=p.row_table(config), flow=flow, out_dq=cells(dq),
            heads=p.b * p.h, per_group=p.per_group(e), FOLD=p.fold, TMA=tma[4], EDGES=p.edges(config),
            WHOLE=p.whole(config), BLOCK_D=block_d, BLOCK_E=block_e, **constants, **p.common, **config.launch,
        )  # fmt: skip
    return dq


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_e a b, (b, h, i, e) twice to (b, h, i), in float32."""
    *outer, n, e = a.shape
    out = empty(*outer, n, like=a, dtype=torch.float32)
    if out.numel() and e:
        with launch_on(a):
            row_dot_kernel[(outer[0] * outer[1] * triton.cdiv(n, 32),)](
                a=cells(a), b=cells(b), out=rows_of(out), heads=outer[1], I=n, E=e, BLOCK_I=32, BLOCK_E=padded(e)
            )
    return out if e else torch.zeros_like(out)


def step_gradient(problem: Problem, n: int, v: Tensor | None, norm: Tensor, gradient: Gradient) -> Tensor:
    """The gradient of the tensor of step n, in its own shape."""
    p, flow, constants, e, v, dy = _flowing(problem, v, norm, gradient)
    step = problem.steps[n]
    tensor = step.slopes if isinstance(step, Alibi) else step.tensor  # type: ignore[attr-defined]
    like = tensor.shape
    along = "rows" if like[3] == 1 else "keys" if like[2] == 1 else "cells"
    if p.j == 1 and like[2] > 1:
        along = "rows"
    config = configured("steps", p, e, v)
    shape = {"rows": (p.b, p.h, p.i), "keys": (p.b, p.h, p.j), "cells": (like[0], like[1], p.i, p.j)}[along]
    out = empty(*shape, like=p.q, dtype=torch.float32)
    blocks_i, blocks_j = triton.cdiv(p.i, config.block_i), triton.cdiv(p.j, config.block_j)
    programs = {"rows": blocks_i, "keys": blocks_j, "cells": blocks_i * blocks_j}[along] * shape[0] * shape[1]
    nothing = Cells(p.q, 0, 0, 0, 0)
    with launch_on(p.q):
        steps_kernel[(programs,)](
            q=cells(p.q), k=cells(p.k), v=nothing if v is None else cells(v), dy=nothing if dy is None else cells(dy),
            table=p.table(config), row_table=p.row_table(config), flow=flow, out=cells(out) if along == "cells" else rows_of(out),
            out_heads=like[1], batch=p.b, TARGET=n, ALONG=along, BLOCK_D=padded(p.d, p.q), BLOCK_E=padded(e, p.q),
            **constants, **p.common, **config.launch,
        )  # fmt: skip
    if along == "rows":
        return out.unsqueeze(-1).sum_to_size(like)
    return out.unsqueeze(-2).sum_to_size(like) if along == "keys" else out


def _flowing(problem: Problem, v: Tensor | None, norm: Tensor, gradient: Gradient) -> tuple[Prepared, Flow, dict[str, Any], int, Tensor | None, Tensor | None]:  # fmt: skip
    """What flows back as the kernels take it: the output's part apart from the further columns."""
    v = None if gradient.dy is None else v
    # The gradient of y came in the type of y: nothing is lost.
    dy = None if v is None or gradient.dy is None else gradient.dy.to(v.dtype)
    e = 0 if v is None else v.shape[-1]
    p = Prepared(problem, 1 if v is None else v.shape[1])
    v = None if v is None else v.expand(p.b, -1, -1, -1)
    extras = gradient.left.shape[-1] - e
    left, right = gradient.left[..., e:], gradient.right[..., e:]
    eta = p.q if gradient.eta is None else gradient.eta.contiguous()
    rho = p.q if gradient.rho is None else gradient.rho.contiguous()
    lefts = left.expand(p.b, p.h, -1, -1).contiguous() if extras else p.q
    at = cells(right.contiguous()) if extras else Cells(p.q, 0, 0, 0, 0)
    flow = Flow(p.in_base_2(norm), gradient.c.contiguous(), eta, rho, lefts, at.ptr, at.b, at.h, extras)
    constants = {
        "E": max(e, 1), "EXACT_V": v is not None and v.dtype == torch.float32, "Y": v is not None,
        "ETA": gradient.eta is not None, "RHO": gradient.rho is not None, "EXTRAS": extras > 0,
    }  # fmt: skip
    return p, flow, constants, max(e, 1), v, dy


def _copied_pair(config: Config, x: Tensor, other: Tensor | None, block: int, block_d: int, block_e: int) -> list[Any]:
    wanted = [(x, (block, block_d)), *([(other, (block, block_e))] if other is not None else [])]
    tma = copied(config, *wanted)
    if tma is None:
        return [x, x, NOWHERE, NOWHERE, False]
    return [tma[0], tma[0], tma[1], tma[1], True] if len(tma) == 2 else [*tma, True]


def _per_key_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
