"""How the kernels are told who is seen: nothing hidden, a band, intervals of every row, or flags of every cell.

Also the tables by which they skip tiles: which blocks of keys a block of rows sees, and the other way round.
Imports `tiles` for the groups of arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...block import Block
from ...factors import Problem
from ...mask import And, Causal, Mask, Window
from .tiles import Cells, Seen, cells

__all__ = ["Form", "band_of", "form_of", "key_table", "row_table"]

#: No band is wider: further than any position, and far from overflow.
UNBOUNDED = 2**30


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
    if (band := band_of(problem.mask)) is not None:
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


def band_of(mask: Mask) -> tuple[int, int] | None:
    """(before, after) of masks that show a band round the own position."""
    if isinstance(mask, Causal):
        return UNBOUNDED, 0
    if isinstance(mask, Window):
        return min(mask.before, UNBOUNDED), min(mask.after, UNBOUNDED)
    if type(mask) is And and (a := band_of(mask.left)) and (b := band_of(mask.right)):
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
