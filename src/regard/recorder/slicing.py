"""Parts of an attention matrix that are matrices again: one sequence of a batch, without its padding, and single cells.

Imports `matrix` and what is below it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.masks import And, Documents, Mask, Not, Or, Padding
from ..core.problem import Factors
from ..core.pytree import tree_map
from ..core.scores import Precomputed
from ..core.weights import Weights

__all__ = ["cells", "sequence_of", "span_of"]


def span_of(weights: Weights, item: int) -> slice:
    """The keys of a sequence that at least one row may see: the rest is padding."""
    factors = weights._factors
    keys = factors.k.shape[-2]
    if isinstance(factors.score, Precomputed):
        seen: Tensor | None = factors.score.w[item].ne(0).any(-2).any(0)
    elif factors.mask is None:
        return slice(0, keys)
    else:
        one = factors.pick(0, range(item, item + 1)).problem().visible_keys()
        seen = None if one is None else one[0]
    if seen is None or not bool(seen.any()):
        return slice(0, keys)
    places = seen.nonzero().flatten()
    return slice(int(places[0]), int(places[-1]) + 1)


def sequence_of(weights: Weights, item: int, rows: slice, cols: slice) -> Weights:
    """One sequence of a batch cut to these rows and columns, (h, i, j)."""
    one = weights._factors.pick(0, item)
    i, j = one.q.shape[-2], one.k.shape[-2]

    def cut(t: Tensor) -> Tensor:
        t = t[..., rows, :] if t.shape[-2] == i and i > 1 else t
        return t[..., cols] if t.shape[-1] == j and j > 1 else t

    mask = None if one.mask is None else _cut_mask(one.mask, cut, cols)
    offset = None if one.offset is None else one.offset + rows.start - cols.start
    part = Factors(one.q[..., rows, :], one.k[..., cols, :], tree_map(one.score, cut), mask, offset)
    return Weights(part, weights._engine, one_head=False)


def _cut_mask(mask: Mask, cut: Any, cols: slice) -> Mask:
    if isinstance(mask, And | Or):
        return type(mask)(_cut_mask(mask.left, cut, cols), _cut_mask(mask.right, cut, cols))
    if isinstance(mask, Not):
        return Not(_cut_mask(mask.of, cut, cols))
    if isinstance(mask, Padding):
        return Padding((mask.lengths - cols.start).clamp(0, cols.stop - cols.start))
    if isinstance(mask, Documents):
        assert mask.key_ids is not None, "laid over a matrix"
        return Documents(cut(mask.ids), cut(mask.key_ids))
    return tree_map(mask, cut)


def cells(weights: Weights, rows: Tensor, cols: Tensor, chunk: int = 32) -> Tensor:
    """The weights at (rows[n], cols[n]), (..., h, n), a few rows at a time: linear memory."""
    found = []
    for start in range(0, len(rows), chunk):
        r, c = rows[start : start + chunk], cols[start : start + chunk]
        r0, r1 = int(r.min()), int(r.max()) + 1
        if r1 - r0 > 4 * chunk:  # far apart: one by one
            found += [weights[..., int(a), [int(b)]] for a, b in zip(r, c, strict=True)]
            continue
        where, place = c.unique(return_inverse=True)
        block = weights[..., r0:r1, where.tolist()]  # ... h r c
        found.append(block[..., r - r0, place])
    return torch.cat(found, -1) if found else torch.zeros(*weights.shape[:-2], 0)
