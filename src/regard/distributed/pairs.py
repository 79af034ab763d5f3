"""One rank's rows against one piece of keys: a rectangle of the global matrix as a problem of its own.

Positions are global: the mask and the modifiers of scores are cut to the rectangle, and the offset moves along.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..core.block import MatrixBlock, PickedCells
from ..core.intervals import Geometry
from ..core.masks import And, Causal, Dense, Documents, Mask, Not, Padding, Window
from ..core.modifiers import Alibi, Modifier
from ..core.online_softmax import State
from ..core.problem import Factors, Problem
from ..core.pytree import register_node, replace_fields
from ..core.scores import Product
from ..core.stats import Request, Results, Tiling

__all__ = ["cut", "cut_mask", "local_tiling", "state_of", "visible_span"]


@register_node
class ShiftedMask(Mask):
    """A rectangle of a mask that compares global positions, such as a user's function."""

    of: Mask
    row_start: int
    key_start: int
    offset: int  # of the global matrix
    structured = False

    def visible(self, block: MatrixBlock) -> Tensor:
        rows, cols = _shift(block.rows, self.row_start), _shift(block.cols, self.key_start)
        return self.of.visible(MatrixBlock(rows, cols, self.offset, block.device))

    def narrow(self, rows: slice) -> Mask:
        return replace_fields(self, row_start=self.row_start + rows.start)


def _shift(where: slice | Tensor, start: int) -> slice | Tensor:
    return slice(where.start + start, where.stop + start) if isinstance(where, slice) else where + start


@register_node
class ShiftedModifier(Modifier):
    """A modifier that reads positions, such as a user's function, applied with global ones."""

    of: Modifier
    key_start: int
    positional = True

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        cols, offset = _shift(block.cols, self.key_start), block.offset + self.key_start
        globally: Any = dataclasses.replace(block, cols=cols, offset=offset)  # type: ignore[arg-type]
        return self.of.apply(s, globally)


#: Masks whose `crop` is exact: from distances or from tensors.
_CUT_BY_THEMSELVES = (Causal, Window, Padding, Documents, Dense)


def cut_mask(mask: Mask, rows: range, keys: range, offset: int) -> Mask:
    """The rectangle rows × keys of a mask that is broadcast to the global matrix."""
    if isinstance(mask, And):  # and Or
        return type(mask)(cut_mask(mask.left, rows, keys, offset), cut_mask(mask.right, rows, keys, offset))
    if isinstance(mask, Not):
        return Not(cut_mask(mask.of, rows, keys, offset))
    if type(mask) in _CUT_BY_THEMSELVES:
        return mask.crop(slice(rows.start, rows.stop), slice(keys.start, keys.stop))
    return ShiftedMask(mask, rows.start, keys.start, offset)


def cut(factors: Factors, rows: range, keys: range, q: Tensor, k: Tensor) -> Factors:
    """The factors of the rectangle rows × keys, from its queries and keys, without a sink.

    Args:
        factors: Those of this rank, folded; score and mask are global.
        rows: Global positions of `q`.
        keys: Global positions of `k`.
        q: Queries ``(b, h, i, d)``.
        k: Keys ``(b, g, j, d)``.
    """
    offset = factors.query_offset
    cropped = factors.score.crop(slice(rows.start, rows.stop), slice(keys.start, keys.stop))
    modifiers = tuple(
        # ALiBi reads distances alone, and those do not move.
        ShiftedModifier(modifier, keys.start) if modifier.positional and type(modifier) is not Alibi else modifier
        for modifier in cropped.modifiers
    )
    score = replace_fields(cropped, modifiers=modifiers, sink_logits=None)
    mask = None if factors.mask is None else cut_mask(factors.mask, rows, keys, offset)
    return Factors(q, k, score, mask, rows.start + offset - keys.start)


def visible_span(factors: Factors, rows: range, start: int, stop: int) -> tuple[int, int]:
    """The keys from `start` to `stop` that some of these rows may see, as one range; (start, start) for none."""
    if factors.mask is None or not rows:
        return (start, stop) if rows else (start, start)
    keys = range(start, stop)
    layout = Geometry(len(rows), len(keys), rows.start + factors.query_offset - start, factors.q.device)
    intervals = cut_mask(factors.mask, rows, keys, factors.query_offset).intervals(layout)
    some = intervals.lo < intervals.hi
    if not bool(some.any()):
        return start, start
    return start + int(intervals.lo[some].min()), start + int(intervals.hi[some].max())


def hidden_from_all(factors: Factors, rows: int, keys: range) -> Tensor | None:
    """Which of these keys no row of the global matrix sees, (b|1, j); None where all are seen."""
    if factors.mask is None:
        return None
    empty = factors.q.new_empty(1)
    q, k = empty.expand(1, 1, rows, 1), empty.expand(1, 1, len(keys), 1)
    offset = factors.query_offset
    mask = cut_mask(factors.mask, range(rows), keys, offset)
    seen = Problem(q, k, Product(1.0), (), None, mask, offset - keys.start).visible_keys()
    return None if seen is None else ~seen


def state_of(results: Results, key_start: int) -> State:
    """An engine's finished results about some keys as a partial state, with global key positions."""
    m, l = results["norm"].unbind(-1)
    entropy = results.get("entropy")
    t = None
    if entropy is not None:  # H = log l − t / l
        t = torch.where(l == 0, 0, l * (torch.where(l == 0, 1, l).log() - entropy))

    def times_l(name: str) -> Tensor | None:
        x = results.get(name)
        return None if x is None else x.to(l.dtype) * (l.unsqueeze(-1) if x.ndim > l.ndim else l)

    def globally(name: str) -> Tensor | None:
        index = results.get(name)
        return None if index is None else torch.where(index < 0, index, index + key_start)

    return State(
        m, l, t, times_l("y"), times_l("mean_distance"), times_l("mass"),
        globally("argmax"), results.get("topk_scores"), globally("topk_indices"),
    )  # fmt: skip


def local_tiling(request: Request, rows: range, keys: range) -> Tiling | None:
    """The tiling of the global matrix in positions of a rectangle; None where they do not meet."""
    t = request.tiling
    if t is None or rows.stop <= t.i0 or rows.start >= t.i1 or keys.stop <= t.j0 or keys.start >= t.j1:
        return None
    return Tiling(t.rows, t.cols, t.i0 - rows.start, t.i1 - rows.start, t.j0 - keys.start, t.j1 - keys.start)
