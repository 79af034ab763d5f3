"""The steps of a generation with a KV cache, stitched into one attention matrix.

Each step has a few new queries and the keys of all positions so far. Stitched by position they are one causal matrix:
the queries of all steps below each other, the keys of the last step. The sizes tell a growing cache, a static one and
one that keeps a window apart; the numbers prove it: keys that two steps share must be bit-equal, or the layer is
refused (beam search reorders the cache; other methods edit it). Weights have no keys: there the value that was last in
a growing cache must be met again (`passes.Call`). Assisted generation cuts rejected candidates off the cache: their
rows go with their keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.masks.kinds import Dense, Geometry, Mask
from ..core.pytree import tree_map
from ..core.scores.kinds import Score
from ..core.types import Align
from .calls import AttentionCall, SavedCall
from .mask_recognition import ParsedMask, RowIntervals, intervals, recognise

X = TypeVar("X")

__all__ = ["CachedGeneration", "CannotStitch", "WaitingKeys", "compare_keys", "continues"]

#: The most numbers that a stitched position bias, or stitched eager weights, may have.
DENSE_CELLS = 2**26

#: Devices whose numbers can be read without waiting for others.
AT_HAND = ("cpu",)

#: The most bytes of a layer's keys that wait for those of the other layers, to be compared with them.
WAITING_BYTES = 2**22

#: Keys that should be equal, and the generation that they belong to.
WaitingKeys = list[tuple["CachedGeneration", Tensor, Tensor]]

CHANGED = "keys change between steps, as when beam search reorders the cache"


class CannotStitch(Exception):  # noqa: N818  a fact about steps
    """The steps do not make one matrix; the message says why.

    Attributes:
        is_step: Whether the keys say that the call continues the cache all the same.
    """

    def __init__(self, reason: str, is_step: bool = False) -> None:
        super().__init__(reason)
        self.is_step = is_step


def continues(call: AttentionCall, total: int) -> bool:
    """Whether a call looks like the next step after `total` positions: more keys than queries."""
    _, _, i, j = call.shape
    if i >= j and not (i == 1 and total):
        return False
    return j == total + i or j > total + i or (j < total + i and j > i)


class CachedGeneration:
    """One layer of a generation: queries step by step, keys by position."""

    def __init__(self, first: SavedCall, cross: bool) -> None:
        self.cross, self.first = cross, first
        w = first.w
        self.steps = 1
        self._unchanged: list[Tensor] = []  # flags on a GPU: whether keys that two steps share were equal
        if w is not None:
            end = w.shape[-1] if cross or w.shape[-1] == w.shape[-2] else _filled_slots(w)
            self.rows_of_w = [w[..., :end]]
            self.start, self.total = end - w.shape[-2], end
            self.values = None if first.v is None else first.v[:, :, :end]
            return
        assert first.q is not None
        assert first.k is not None
        assert first.score is not None
        self.queries = [first.q]
        visible = _intervals(first.mask, first.q.shape[2], first.k.shape[2], first.align, first.q.device)
        end = first.k.shape[2] if cross else int(visible.hi.max())
        self.keys = first.k[:, :, :end]
        self.values = None if first.v is None else first.v[:, :, :end]
        self.row_intervals = [visible]
        self.start, self.total = end - first.q.shape[2], end
        bias = next((modifier.tensor for modifier in first.score.modifiers if hasattr(modifier, "tensor")), None)
        self.biases = [bias]

    @property
    def rows(self) -> int:
        parts = self.rows_of_w if self.first.w is not None else self.queries
        return sum(part.shape[2] for part in parts)

    def extend(self, call: AttentionCall, saved: SavedCall, before: int | None = None, is_step: bool = False) -> None:
        """Add a step: its queries, and its new keys.

        Args:
            call: The call.
            saved: Its tensors.
            before: The positions that the cache held before the step, where it may have been cut back.
            is_step: Whether another layer has shown that this is a step. Keys that changed are then an error of
                `finish`: to look at them on a GPU waits for all that it was told.
        """
        self.steps += 1
        self._is_step = is_step
        if before is not None:
            self._cut_back(before, saved)
        if self.first.w is not None or call.w is not None:
            self._extend_dense(saved.w)
            self.values = None if saved.v is None else saved.v[:, :, : self.total]
            return
        assert saved.q is not None
        assert saved.k is not None
        if saved.q.shape[:2] != self.queries[0].shape[:2] or saved.k.shape[:2] != self.keys.shape[:2]:
            raise CannotStitch("the batch changes between steps")
        m, n = saved.q.shape[2], saved.k.shape[2]
        visible = _intervals(saved.mask, m, n, saved.align, saved.q.device, call.parsed_mask)
        last = n if saved.mask is None else int(visible.hi.max())
        bias = None if call.parsed_mask is None else call.parsed_mask.bias
        shift = self._extend_keys(saved.k, saved.v, m, last, biased=bias is not None)
        self.queries.append(saved.q)
        if saved.mask is not None:
            filled = visible.hi > visible.lo
            visible = RowIntervals(*(torch.where(filled, end + shift, 0) for end in (visible.lo, visible.hi)))
        elif shift:
            visible = RowIntervals(visible.lo + shift, visible.hi + shift)
        self.row_intervals.append(visible)
        self.biases.append(None if bias is None else bias[..., : self.total])

    def grow(self, saved: SavedCall, waiting: WaitingKeys) -> bool:
        """Add a step of a cache that grew, which sees all keys: as `extend`, in fewer operations.

        Args:
            saved: Its tensors.
            waiting: Where keys are put that are to be compared when all layers have made their step.

        Returns:
            Whether it is such a step; else nothing was changed.
        """
        q, k, before, total = saved.q, saved.k, self.keys, self.total
        if q is None or k is None or self.cross or saved.mask is not None or q.shape[:2] != self.queries[0].shape[:2]:
            return False
        m, (b, g, n, d) = q.shape[2], k.shape
        if n != total + m or (b, g, total, d) != before.shape:
            return False
        old = k[:, :, :total]
        if k.device.type in AT_HAND or k.nbytes > WAITING_BYTES or k.dtype is not before.dtype:
            self._is_step = True
            if not self._are_equal(old, before):
                raise CannotStitch(CHANGED)
        else:
            waiting.append((self, old, before))
        self.steps += 1
        self.queries.append(q)
        self.row_intervals.append(_all_keys(m, n))
        self.biases.append(None)
        self.keys, self.values, self.total = k, saved.v, n
        return True

    def _cut_back(self, positions: int, saved: SavedCall) -> None:
        """Forget the last rows, and their keys, if the cache was cut back to fewer positions."""
        count = (self.rows if self.cross else self.total) - positions
        if count <= 0:
            return
        if count >= self.rows:
            raise CannotStitch("the cache is cut back to before the first step")
        if (
            not self.cross
            and saved.k is not None
            and not self._are_equal(saved.k[:, :, :positions], self.keys[:, :, :positions])
        ):
            raise CannotStitch("keys change between steps")
        parts = self.rows_of_w if self.first.w is not None else self.queries
        while count:
            rows = parts[-1].shape[2]
            remaining = max(0, rows - count)
            count -= rows - remaining
            self._cut_last_step(remaining)
        if not self.cross:
            self.total = positions
            self.values = None if self.values is None else self.values[:, :, :positions]
            if self.first.w is None:
                self.keys = self.keys[:, :, :positions]
            else:
                self.rows_of_w = [w[..., :positions] for w in self.rows_of_w]

    def _cut_last_step(self, rows: int) -> None:
        """Leave so many rows of the last step; none: forget it."""
        if self.first.w is not None:
            self.rows_of_w[-1:] = [self.rows_of_w[-1][:, :, :rows]] if rows else []
            return
        q, visible, bias = self.queries.pop(), self.row_intervals.pop(), self.biases.pop()
        if rows:
            self.queries.append(q[:, :, :rows])
            self.row_intervals.append(RowIntervals(visible.lo[:, :rows], visible.hi[:, :rows]))
            self.biases.append(bias if bias is None or bias.shape[-2] == 1 else bias[..., :rows, :])

    def _extend_keys(self, k: Tensor, v: Tensor | None, m: int, last: int, biased: bool) -> int:
        """Append the new keys; returns the position of the first key of this step. An error leaves all as it was.

        Args:
            k: The keys of the step.
            v: Its values, if they are recorded.
            m: The number of its queries.
            last: The end of the keys that it sees.
            biased: Whether a bias is added to its scores.
        """
        if self.cross:
            if k.shape != self.keys.shape or not (k.data_ptr() == self.keys.data_ptr() or torch.equal(k, self.keys)):
                raise CannotStitch("the keys of its cross-attention change between steps")
            return 0
        end, n = self.total + m, k.shape[2]
        if n >= end:  # all positions so far; a static cache has unused slots behind them
            if last > end:
                raise CannotStitch(f"a step sees {last} keys where {end} positions have passed")
            if not self._are_equal(k[:, :, : self.total], self.keys):
                raise CannotStitch(CHANGED)
            # Only the filled slots of a static cache are saved, as a copy: the model writes over them.
            self.keys = k if n == end else k[:, :, :end].clone()
            self.values = v if v is None or n == end else v[:, :, :end].clone()
            shift = 0
        else:  # a cache that keeps a window: the last n positions
            old = n - m
            if old > self.total or not self._are_equal(k[:, :, :old], self.keys[:, :, self.total - old :]):
                raise CannotStitch("keys change between steps, or the cache does not keep the latest ones in order")
            if biased:
                raise CannotStitch("its cache drops keys, and it adds a bias to the scores of those that stay", True)
            self.keys = torch.cat([self.keys, k[:, :, old:]], 2)
            self.values = None if v is None or self.values is None else torch.cat([self.values, v[:, :, old:]], 2)
            shift = end - n
        self.total = end
        return shift

    def _are_equal(self, keys: Tensor, before: Tensor) -> bool:
        """Whether keys are as they were; where that can wait, True, and a flag for `finish`."""
        if keys.device.type in AT_HAND or not self._is_step or keys.shape != before.shape:
            return torch.equal(keys, before)
        self._unchanged.append((keys == before).all())
        return True

    def _extend_dense(self, w: Tensor | None) -> None:
        if w is None or w.shape[:2] != self.rows_of_w[0].shape[:2]:
            raise CannotStitch("some steps have computed weights and others queries and keys, or the batch changes")
        end = self.total if self.cross else self.total + w.shape[-2]
        if w.shape[-1] > end and _filled_slots(w) == end:  # a static cache has unused slots behind
            w = w[..., :end]
        if w.shape[-1] != end:
            raise CannotStitch(
                "its weights were computed over a part of the keys (a cache that keeps a window), and without keys "
                'their positions are not known; attn_implementation="sdpa" records queries and keys'
            )
        self.total = w.shape[-1]
        self.rows_of_w.append(w)

    def finish(self) -> SavedCall:
        """The stitched matrix as one call."""
        if self.first.w is not None:
            cells = self.rows * self.total * self.rows_of_w[0].shape[0] * self.rows_of_w[0].shape[1]
            if cells > DENSE_CELLS:
                raise CannotStitch(f"its weights have {cells} numbers together, more than {DENSE_CELLS}")
            wide = [torch.nn.functional.pad(w, (0, self.total - w.shape[-1])) for w in self.rows_of_w]
            return SavedCall(None, None, self.values, torch.cat(wide, 2), None, None, None)
        if self._unchanged and not bool(torch.stack(self._unchanged).all()):
            raise CannotStitch(CHANGED)
        q = torch.cat(self.queries, 2)
        mask, align = self._mask(q)
        return SavedCall(q, self.keys, self.values, None, self._score(q), mask, align)

    def _mask(self, q: Tensor) -> tuple[Mask | None, Align | None]:
        rows, structured = _joined(tuple(map(_Same, self.row_intervals)), self.total)
        if structured is not None:
            mask, align = structured
            # Aligned at the end: the last query is the last position.
            mask = None if mask is None else tree_map(mask, lambda t: t.to(q.device))
            return mask, None if self.cross and (mask is None or not mask.positional) else align
        if rows.lo.numel() * self.total > DENSE_CELLS:
            raise CannotStitch("its mask is neither causal, a window nor padding, and too large for a dense one")
        at = torch.arange(self.total)
        cells = (at >= rows.lo[..., None]) & (at < rows.hi[..., None])
        return Dense(cells[:, None].to(q.device)), None if self.cross else "end"

    def _score(self, q: Tensor) -> Score:
        score = self.first.score
        assert score is not None
        if all(bias is None for bias in self.biases):
            return score
        heads = max(bias.shape[1] for bias in self.biases if bias is not None)
        batch = max(bias.shape[0] for bias in self.biases if bias is not None)
        if batch * heads * q.shape[2] * self.total > DENSE_CELLS:
            raise CannotStitch("its position biases are too large to be stitched")
        stitched = q.new_zeros(batch, heads, q.shape[2], self.total)
        row = 0
        for part, bias in zip(self.queries, self.biases, strict=True):
            if bias is not None:
                stitched[:, :, row : row + part.shape[2], : bias.shape[-1]] = bias
            row += part.shape[2]
        others = tuple(modifier for modifier in score.modifiers if not hasattr(modifier, "tensor"))
        return dataclasses.replace(score, modifiers=others).bias(stitched)


class _Same(Generic[X]):
    """An object that is equal to itself alone: masks and rows that the layers of a step share."""

    __slots__ = ("one",)

    def __init__(self, one: X) -> None:
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.one is other.one

    def __hash__(self) -> int:
        return id(self.one)


@functools.lru_cache(maxsize=1)
def _joined(steps: tuple[_Same[RowIntervals], ...], keys: int) -> tuple[RowIntervals, tuple[Mask | None, Align] | None]:
    """The rows of all steps, and their structured mask; for all layers at once, which follow each other."""
    b = max(step.one.lo.shape[0] for step in steps)
    lo = torch.cat([step.one.lo.expand(b, -1) for step in steps], 1)
    hi = torch.cat([step.one.hi.expand(b, -1) for step in steps], 1)
    rows = RowIntervals(lo, hi)
    return rows, recognise(rows, keys)


def compare_keys(waiting: WaitingKeys) -> None:
    """Compare the keys of all layers of a step at once; whether they changed is read at the end of the block."""
    groups: dict[Any, WaitingKeys] = {}
    for one in waiting:
        groups.setdefault((one[1].shape, one[1].dtype, one[1].device), []).append(one)
    waiting.clear()
    for group in groups.values():
        now = torch.stack([keys for _, keys, _ in group])
        before = torch.stack([keys for *_, keys in group])
        flags = (now == before).flatten(1).all(1)
        for (generation, *_), flag in zip(group, flags.unbind(), strict=True):
            generation._unchanged.append(flag)


def _filled_slots(w: Tensor) -> int:
    """The number of keys up to the last one with a weight in the last row, which sees its own position."""
    visible = (w[:, :, -1] != 0).flatten(0, -2).any(0).nonzero()
    return int(visible[-1]) + 1 if len(visible) else w.shape[-1]


def _intervals(
    mask: Mask | None, i: int, j: int, align: Align | None, device: torch.device, parsed: ParsedMask | None = None
) -> RowIntervals:
    """The visible keys of each row of a step, on the CPU: a GPU is read once for all layers that share a mask."""
    if mask is None:  # as in every step of one token
        return _all_keys(i, j)
    if parsed is None or parsed.mask is None:
        return (
            _shared_intervals(_Same(mask), i, j, align)
            if not _has_tensors(mask)
            else _read_intervals(mask, i, j, align, device)
        )
    if parsed.rows is None:
        parsed.rows = _read_intervals(mask, i, j, align, device)
    return parsed.rows


@functools.lru_cache(maxsize=1)
def _shared_intervals(mask: _Same[Mask], i: int, j: int, align: Align | None) -> RowIntervals:
    """The same of a mask without tensors, for all layers at once, which follow each other."""
    return _read_intervals(mask.one, i, j, align, torch.device("cpu"))


def _has_tensors(mask: Mask) -> bool:
    tensors: list[Tensor] = []
    tree_map(mask, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    return bool(tensors)


def _read_intervals(mask: Mask, i: int, j: int, align: Align | None, device: torch.device) -> RowIntervals:
    geometry = Geometry(i, j, j - i if align == "end" else 0, device if _has_tensors(mask) else torch.device("cpu"))
    if mask.dense_parts():
        cells = mask.visible(MatrixBlock(slice(0, i), slice(0, j), geometry.offset, geometry.device))
        rows = intervals(cells.expand(*cells.shape[:2], i, j))
        if rows is None:
            raise CannotStitch("a row of its mask has gaps")
        return RowIntervals(rows.lo.cpu(), rows.hi.cpu())
    key_intervals = mask.intervals(geometry)
    if not key_intervals.exact or key_intervals.lo.shape[1] != 1:
        raise CannotStitch("a row of its mask has gaps")
    return RowIntervals(key_intervals.lo[:, 0].cpu(), key_intervals.hi[:, 0].cpu())


@functools.lru_cache(maxsize=8)
def _all_keys(i: int, j: int) -> RowIntervals:
    """Rows that see all keys: the same for every layer of a step."""
    lo = torch.zeros(1, i, dtype=torch.int64)
    return RowIntervals(lo, lo + j)
