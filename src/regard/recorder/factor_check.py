"""Checks of loaded factors: everything that `regard.weights` guarantees of a user's tensors holds of a file's.

Loaded factors are in normal form: every tensor has four axes that broadcast to (b, h, i, j), as `core.api` makes them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.masks.kinds import Mask
from ..core.problem import Factors
from ..core.scores.kinds import Score
from ..core.stored import check_floats, require

__all__ = ["check_factors", "check_values"]

#: The longest axis of a tensor without elements: its size is not bounded by the bytes of the file.
MAX_EMPTY = 2**16


def check_factors(factors: Factors, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the factors make an attention matrix of this shape (b, h, i, j)."""
    b, h, i, j = shape
    q, k = factors.q, factors.k
    check_floats(q, "queries")
    check_floats(k, "keys")
    require(q.ndim == 4 and k.ndim == 4, "queries and keys need four axes")
    require(isinstance(factors.score, Score), "there is no score")
    require(not _is_unbounded(factors), f"queries {tuple(q.shape)} or keys {tuple(k.shape)} have no elements")
    require(q.dtype == k.dtype, f"queries are {q.dtype} and keys {k.dtype}")
    require(tuple(q.shape[:3]) == (b, h, i), f"queries {tuple(q.shape)} do not have the layer's shape {shape}")
    require(k.shape[0] == b and k.shape[2] == j, f"keys {tuple(k.shape)} do not have the layer's shape {shape}")
    g = k.shape[1]
    require((h == g == 0) or (g > 0 and h % g == 0), f"{h} heads of queries are no multiple of {g} heads of keys")
    offset = factors.offset
    aligned = offset is None or (type(offset) is int and offset in (0, j - i))
    require(aligned, f"query 0 is at key {offset!r:.80}, which is neither the start nor the end")
    require(offset is not None or i != j, "queries and keys are as many and have no offset")
    factors.score.check_stored(q, k)
    dense = factors.score.precomputed is not None
    require(not dense or factors.mask is None, "weights have a mask")
    positional = any(modifier.positional for modifier in factors.score.modifiers)
    require(not positional or offset is not None, "a modifier compares positions and there is no offset")
    if factors.mask is not None:
        _check_mask(factors.mask, shape, factors.query_offset, 0)
        require(not factors.mask.positional or offset is not None, "a mask compares positions and there is no offset")


def _is_unbounded(factors: Factors) -> bool:
    """Whether an axis is long though no bytes stand behind it."""
    q, k, score = factors.q, factors.k, factors.score
    w = score.precomputed
    content = [w] if isinstance(w, Tensor) else [q, k]
    return any(not x.numel() for x in content) and max(*q.shape, *k.shape) > MAX_EMPTY


def check_values(values: Tensor, factors: Factors) -> None:
    """Raise ValueError unless value vectors belong to the keys."""
    check_floats(values, "values")
    (b, h), j = factors.q.shape[:2], factors.k.shape[2]
    fits = values.ndim == 4 and values.shape[0] == b and values.shape[2] == j
    fits = fits and ((h == values.shape[1] == 0) or (values.shape[1] > 0 and h % values.shape[1] == 0))
    require(fits, f"values {tuple(values.shape)} do not belong to keys {tuple(factors.k.shape)}")


def _check_mask(mask: Any, shape: tuple[int, ...], offset: int, depth: int) -> None:
    require(isinstance(mask, Mask), "there is no mask")
    require(depth < 32, "a mask is nested too deep")
    for part in mask.masks():
        _check_mask(part, shape, offset, depth + 1)
    mask.check_stored(shape, offset)
