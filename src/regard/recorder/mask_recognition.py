"""Structured masks from dense ones: causal, a window, padding on either side.

A dense mask at 16,384 tokens takes 268 MB, and most of them are causal. Each row of a mask is read as one interval of
visible keys, a structured mask is guessed from the intervals, and the guess is taken only if its intervals are exactly
the same. A mask whose rows have gaps stays dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.masks.kinds import Dense, Geometry, Mask, causal, padding, window
from ..core.types import Align

__all__ = ["ParsedMask", "RowIntervals", "intervals", "mask_of_cells", "parse_mask", "recognise"]


@dataclass
class RowIntervals:
    """Row r of sequence b sees the keys lo <= j < hi; lo = hi = 0 where it sees none."""

    lo: Tensor  # b|1 i
    hi: Tensor  # b|1 i


@dataclass
class ParsedMask:
    """The mask of an attention call: visible keys, an added bias, and how positions correspond."""

    mask: Mask | None = None
    bias: Tensor | None = None
    align: Align | None = None
    uniform_rows: Tensor | None = None  # b|1 h|1 i 1 : rows whose scores a huge added number makes all equal
    rows: RowIntervals | None = None  # the visible keys of a step of a generation, once they were read


def intervals(cells: Tensor) -> RowIntervals | None:
    """The rows of a bool mask (b|1, 1, i, j) as intervals; None if some row has a gap, or heads differ."""
    if cells.shape[1] > 1:
        if not bool((cells == cells[:, :1]).all()):
            return None
        cells = cells[:, :1]
    lows, highs = [], []
    keys = cells.shape[-1]
    position = torch.arange(keys, device=cells.device, dtype=torch.int32)
    step = max(1, 2**24 // max(1, keys * cells.shape[0]))  # few rows at a time: memory stays linear
    for rows in cells[:, 0].split(step, dim=1):
        count = rows.sum(-1)
        lo = torch.where(rows, position, keys).amin(-1) if keys else count
        hi = torch.where(rows, position + 1, 0).amax(-1) if keys else count
        if not bool((count == (hi - lo).clamp(min=0)).all()):
            return None
        lows.append(torch.where(count > 0, lo, 0).long())
        highs.append(torch.where(count > 0, hi, 0).long())
    if not lows:
        return None
    return RowIntervals(torch.cat(lows, 1), torch.cat(highs, 1))


def recognise(rows: RowIntervals, keys: int) -> tuple[Mask | None, Align] | None:
    """A structured mask with exactly these intervals, and its align; None if no structured mask fits."""
    i = rows.lo.shape[1]
    aligns: tuple[Align, ...] = ("end", "start") if i != keys else ("start",)
    for align in aligns:
        offset = keys - i if align == "end" else 0
        for guess in _guesses(rows, keys, offset):
            if _same(guess, rows, keys, offset):
                return guess, align
    return None


def _guesses(rows: RowIntervals, keys: int, offset: int) -> list[Mask | None]:
    filled = rows.hi > rows.lo
    if not bool(filled.any()):
        return []
    at = torch.arange(rows.lo.shape[1], device=rows.lo.device) + offset
    first = torch.where(filled, rows.lo, keys).amin(1)  # b : the keys before it are never visible
    last = torch.where(filled, rows.hi, 0).amax(1)
    before = int(torch.where(filled, at - rows.lo, -1).amax())
    after = int(torch.where(filled, rows.hi - 1 - at, -1).amax())
    sides: list[Mask] = []
    if bool((last < keys).any()):
        sides.append(padding(last))
    if bool((first > 0).any()):
        sides.append(~padding(first))
    bands: list[Mask | None] = [None]
    if before >= 0:
        bands = [None, causal(), window(before, max(after, 0)), causal() & window(before, 0)]
    return [_all([band, *chosen]) for band in bands for chosen in ([], sides)]


def _all(parts: list[Mask | None]) -> Mask | None:
    joined: Mask | None = None
    for part in parts:
        if part is not None:
            joined = part if joined is None else joined & part
    return joined


def _same(guess: Mask | None, rows: RowIntervals, keys: int, offset: int) -> bool:
    geometry = Geometry(rows.lo.shape[1], keys, offset, rows.lo.device)
    key_intervals = geometry.interval(0, keys) if guess is None else guess.intervals(geometry)
    if not key_intervals.exact or key_intervals.lo.shape[1] != 1:
        return False
    lo, hi = key_intervals.lo[:, 0], key_intervals.hi[:, 0]
    empty = lo >= hi
    lo, hi = torch.where(empty, 0, lo), torch.where(empty, 0, hi)
    return bool((lo == rows.lo).all()) and bool((hi == rows.hi).all())


def mask_of_cells(cells: Tensor) -> tuple[Mask | None, Align | None]:
    """A bool mask (b|1, h|1, i, j), True where visible, structured if possible, and its align."""
    if bool(cells.all()):
        return None, None
    rows = intervals(cells)
    structured = None if rows is None else recognise(rows, cells.shape[-1])
    if structured is None:
        return Dense(cells.clone()), None
    mask, align = structured
    return mask, align if mask is not None and mask.positional else None


def parse_mask(mask_tensor: Tensor | None, causal_flag: bool, shape: tuple[int, int, int, int]) -> ParsedMask:
    """`attn_mask` and `is_causal` of an attention call on (b, h, i, j) scores, together."""
    _, _, i, j = shape
    if mask_tensor is None:
        if not causal_flag:
            return ParsedMask()
        return ParsedMask(causal(), None, None if i == j else "start")
    cells = mask_tensor.reshape(*[1] * (4 - mask_tensor.ndim), *mask_tensor.shape)
    cells = _shrunk(cells)
    bias = uniform = None
    if cells.dtype != torch.bool:
        hidden, bias, uniform = _split(cells.expand(*cells.shape[:2], i, j))
        cells = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=cells.device) if hidden is None else ~hidden
    cells = cells.expand(*cells.shape[:2], i, j)
    if causal_flag:
        cells = cells & torch.ones(i, j, dtype=torch.bool, device=cells.device).tril()
    mask, align = mask_of_cells(cells)
    return ParsedMask(mask, bias, align, uniform)


def _shrunk(x: Tensor) -> Tensor:
    """Expanded axes (stride 0) narrowed to one: a mask expanded over heads is one mask."""
    for axis in (0, 1):
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _split(added: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """An additive mask (b|1, h|1, i, j) as hidden cells, a bias, and the rows it makes uniform."""
    hidden = added <= torch.finfo(added.dtype).min / 2
    infinite = added == -torch.inf
    uniform = hidden.all(-1, keepdim=True) & ~infinite.all(-1, keepdim=True)
    if bool(uniform.any()):
        # The smallest number added to all keys of a row hides none of them: it makes their scores equal.
        low, high = (torch.where(infinite, fill, added) for fill in (torch.inf, -torch.inf))
        if bool((uniform & (low.amin(-1, keepdim=True) != high.amax(-1, keepdim=True))).any()):
            raise NotImplementedError("an additive mask hides a row with numbers that differ")
        hidden = torch.where(uniform, infinite, hidden)
    rest = added.masked_fill(hidden | uniform, 0)
    # In half precision the smallest number is -65504, next to which scores still count: there it cancels in softmax.
    uniform_rows = uniform if added.dtype != torch.float16 and bool(uniform.any()) else None
    return (hidden if bool(hidden.any()) else None), (rest.clone() if bool((rest != 0).any()) else None), uniform_rows
