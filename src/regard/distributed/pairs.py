"""One rank's rows against one piece of keys: a rectangle of the global matrix as a problem of its own.

Positions are global: the mask and the modifiers of scores are cut to the rectangle, and the offset moves along.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.masks.intervals import Geometry
from ..core.online_softmax import State
from ..core.problem import Factors, Problem
from ..core.pytree import replace_fields
from ..core.scores.kinds import Product
from ..core.stats import Request, Results, Tiling
from .exchange import Plan

__all__ = ["by_piece", "cut", "hidden_from_all", "hull", "local_tiling", "state_of", "visible_span", "wants_of"]


def cut(factors: Factors, rows: range, keys: range, q: Tensor, k: Tensor) -> Factors:
    """The factors of the rectangle rows × keys, from its queries and keys, without a sink.

    Args:
        factors: Those of this rank, folded; score and mask are global.
        rows: Global positions of `q`.
        keys: Global positions of `k`.
        q: Queries ``(b, h, i, d)``.
        k: Keys ``(b, g, j, d)``.
    """
    at = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
    score = replace_fields(factors.score.crop(*at), sink_logits=None)
    mask = None if factors.mask is None else factors.mask.crop(*at)
    return Factors(q, k, score, mask, rows.start + factors.query_offset - keys.start)


def visible_span(factors: Factors, rows: range, start: int, stop: int) -> tuple[int, int]:
    """The keys from `start` to `stop` that some of these rows may see, as one range; (start, start) for none."""
    if factors.mask is None or not rows:
        return (start, stop) if rows else (start, start)
    keys = range(start, stop)
    geometry = Geometry(len(rows), len(keys), rows.start + factors.query_offset - start, factors.q.device)
    intervals = factors.mask.crop(slice(rows.start, rows.stop), slice(start, stop)).intervals(geometry)
    some = intervals.lo < intervals.hi
    if not bool(some.any()):
        return start, start
    return start + int(intervals.lo[some].min()), start + int(intervals.hi[some].max())


def wants_of(plan: Plan, factors: Factors, spans: list[tuple[range, slice]]) -> list[tuple[int, int]]:
    """For every piece of every rank the keys that these rows may see."""
    return [
        hull((visible_span(factors, rows, piece.start, piece.stop) for rows, _ in spans), piece.start)
        for pieces in plan.pieces
        for piece in pieces
    ]


def hull(spans: Iterable[tuple[int, int]], start: int) -> tuple[int, int]:
    """The smallest range that holds these ranges of keys; (start, start) if all are empty."""
    some = [(first, end) for first, end in spans if first < end]
    return (min(first for first, _ in some), max(end for _, end in some)) if some else (start, start)


def by_piece(plan: Plan, wants: list[Any]) -> list[list[tuple[int, int]]]:
    """The keys that a rank needs, for every piece of every rank, from its list of all."""
    rest = iter(wants)
    return [[tuple(next(rest)) for _ in pieces] for pieces in plan.pieces]  # type: ignore[misc]


def hidden_from_all(factors: Factors, rows: int, keys: range) -> Tensor | None:
    """Which of these keys no row of the global matrix sees, (b|1, j); None where all are seen."""
    if factors.mask is None:
        return None
    empty = factors.q.new_empty(1)
    b = factors.q.shape[0]
    q, k = empty.expand(b, 1, rows, 1), empty.expand(b, 1, len(keys), 1)
    offset = factors.query_offset
    mask = factors.mask.crop(slice(0, rows), slice(keys.start, keys.stop))
    visible = Problem(q, k, Product(1.0), (), None, mask, offset - keys.start).visible_keys()
    return None if visible is None else ~visible.any(1)


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
        m,
        l,
        t=t,
        y=times_l("y"),
        mean_distance=times_l("mean_distance"),
        mass=times_l("mass"),
        argmax=globally("argmax"),
        topk_scores=results.get("topk_scores"),
        topk_indices=globally("topk_indices"),
    )


def local_tiling(request: Request, rows: range, keys: range) -> Tiling | None:
    """The tiling of the global matrix in positions of a rectangle; None where they do not meet."""
    t = request.tiling
    if t is None or rows.stop <= t.i0 or rows.start >= t.i1 or keys.stop <= t.j0 or keys.start >= t.j1:
        return None
    return Tiling(t.rows, t.cols, t.i0 - rows.start, t.i1 - rows.start, t.j0 - keys.start, t.j1 - keys.start)
