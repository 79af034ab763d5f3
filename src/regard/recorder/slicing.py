"""Parts of an attention matrix: one sequence of a batch without its padding, its real rows, and single cells."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.problem import Factors
from ..core.weights import Weights

__all__ = ["real_rows", "row_mean", "sequence_of", "span_of"]


def span_of(weights: Weights, item: int) -> slice:
    """The keys of a sequence that at least one row may see; the others are padding."""
    factors = weights._factors
    keys = factors.k.shape[-2]
    visible: Tensor | None
    if (w := factors.score.precomputed) is not None:
        visible = w[item].ne(0).any(-2).any(0)
    elif factors.mask is None:
        return slice(0, keys)
    else:
        one = factors.pick(0, range(item, item + 1)).problem().visible_keys()
        visible = None if one is None else one[0].any(0)
    if visible is None or not bool(visible.any()):
        return slice(0, keys)
    places = visible.nonzero().flatten()
    return slice(int(places[0]), int(places[-1]) + 1)


def visible_keys(weights: Weights) -> Tensor | None:
    """The keys that at least one row may see, bool (b, j); None: all of them."""
    factors = weights._factors
    if (w := factors.score.precomputed) is not None:
        return w.ne(0).any(-2).any(1)
    visible = None if factors.mask is None else factors.problem().visible_keys()
    return None if visible is None else visible.any(1).expand(weights.shape[0], -1)


def real_rows(weights: Weights, kind: str) -> Tensor | None:
    """The rows of self-attention that are no padding, bool (b, i); None: all of them, or not known.

    A position that no row may see is padding, as key and as query. Cross-attention has no such correspondence.
    """
    i, j = weights.shape[-2:]
    if kind != "self" or i != j:
        return None
    return visible_keys(weights)


def row_mean(values: Tensor, rows: Tensor | None) -> Tensor:
    """The mean of (b, h, i) over sequences and the chosen rows (b, i), (h,)."""
    if rows is None or not bool(rows.any()):
        return values.mean((0, 2))
    chosen = rows.to(values.device).unsqueeze(1)
    return torch.where(chosen, values, 0).sum((0, 2)) / chosen.sum((0, 2))


def sequence_of(weights: Weights, item: int, rows: slice, cols: slice) -> Weights:
    """One sequence of a batch cut to these rows and columns, (h, i, j)."""
    one = weights._factors.pick(0, item)
    mask = None if one.mask is None else one.mask.crop(rows, cols)
    offset = None if one.offset is None else one.offset + rows.start - cols.start
    part = Factors(one.q[..., rows, :], one.k[..., cols, :], one.score.crop(rows, cols), mask, offset)
    return type(weights)(part, weights._engine, one_head=False)
