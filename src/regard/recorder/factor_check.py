"""Checks of loaded factors: everything that `regard.weights` guarantees of a user's tensors holds of a file's.

Loaded factors are in normal form: every tensor has four axes that broadcast to (b, h, i, j), as `core.api` makes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core.masks import And, Causal, Dense, Documents, Mask, Not, Padding, Window
from ..core.problem import Factors
from ..core.scores import (
    Additive,
    Alibi,
    Bias,
    Bilinear,
    Cosine,
    Dot,
    Gaussian,
    Precomputed,
    ScaledDot,
    Score,
    Softcap,
)

__all__ = ["check_factors", "check_values", "require"]

#: The widest window of a file.
MAX_WINDOW = 2**31

#: The longest axis of a tensor without elements: its size is not bounded by the bytes of the file.
MAX_EMPTY = 2**16


def require(holds: bool, otherwise: str) -> None:
    """Raise ValueError unless something holds."""
    if not holds:
        raise ValueError(otherwise)


def check_factors(factors: Factors, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the factors make an attention matrix of this shape (b, h, i, j)."""
    b, h, i, j = shape
    q, k = factors.q, factors.k
    _check_floats(q, "queries")
    _check_floats(k, "keys")
    require(q.ndim == 4 and k.ndim == 4, "queries and keys need four axes")
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
    require(isinstance(factors.score, Score), "there is no score")
    _check_score(factors.score, factors, shape)
    if factors.mask is not None:
        _check_mask(factors.mask, shape, factors.query_offset, 0)
        require(not factors.mask.positional or offset is not None, "a mask compares positions and there is no offset")


def _is_unbounded(factors: Factors) -> bool:
    """Whether an axis is long though no bytes stand behind it."""
    q, k, score = factors.q, factors.k, factors.score
    content = [score.w] if isinstance(score, Precomputed) and isinstance(score.w, Tensor) else [q, k]
    return any(not x.numel() for x in content) and max(*q.shape, *k.shape) > MAX_EMPTY


def check_values(values: Tensor, factors: Factors) -> None:
    """Raise ValueError unless value vectors belong to the keys."""
    _check_floats(values, "values")
    (b, h), j = factors.q.shape[:2], factors.k.shape[2]
    fits = values.ndim == 4 and values.shape[0] == b and values.shape[2] == j
    fits = fits and ((h == values.shape[1] == 0) or (values.shape[1] > 0 and h % values.shape[1] == 0))
    require(fits, f"values {tuple(values.shape)} do not belong to keys {tuple(factors.k.shape)}")


def _check_score(score: Score, factors: Factors, shape: tuple[int, ...]) -> None:
    require(isinstance(score.modifiers, tuple), "a score's modifiers are no tuple")
    b, h, i, j = shape
    for modifier in score.modifiers:
        if isinstance(modifier, Bias):
            _check_broadcast(modifier.tensor, shape, "a bias", torch.is_floating_point)
        elif isinstance(modifier, Alibi):
            _check_broadcast(modifier.slopes, (b, h, 1, 1), "slopes", torch.is_floating_point)
            require(factors.offset is not None, "slopes compare positions and there is no offset")
        elif isinstance(modifier, Softcap):
            _check_positive(modifier.cap, "a soft cap")
        else:
            raise ValueError(f"a score has a modifier {type(modifier).__name__}")
    if score.sink_logits is not None:
        _check_broadcast(score.sink_logits, (b, h, 1, 1), "a sink", torch.is_floating_point)
    if isinstance(score, Precomputed):
        _check_floats(score.w, "weights")
        require(tuple(score.w.shape) == (b, h, i, j), f"weights {tuple(score.w.shape)} do not have the shape {shape}")
        plain = not score.modifiers and score.sink_logits is None and factors.mask is None
        require(plain, "weights have a modifier, a sink or a mask")
        require(score.w.dtype == factors.q.dtype, "weights and queries differ in type")
    else:
        _check_sizes(score, factors.q.shape[-1], factors.k.shape[-1], h)


def _check_sizes(score: Score, d: int, other: int, h: int) -> None:
    """The parameters of a score fit the sizes of queries and keys."""
    if isinstance(score, Bilinear):
        _check_matrix(score.weight, (d, other), h, "Bilinear")
        return
    if isinstance(score, Additive):
        require(isinstance(score.v, Tensor) and score.v.ndim == 4, "Additive: v needs four axes")
        a = score.v.shape[-1]
        _check_matrix(score.query_weight, (d, a), h, "Additive")
        _check_matrix(score.key_weight, (other, a), h, "Additive")
        _check_matrix(score.v, (1, a), h, "Additive")
        return
    require(d == other, f"queries have size {d} and keys {other}")
    if isinstance(score, ScaledDot):
        require(score.scale is None or _is_finite(score.scale), f"the scale is {score.scale!r:.80}")
    elif isinstance(score, Cosine):
        require(_is_finite(score.scale), f"the scale is {score.scale!r:.80}")
    elif isinstance(score, Gaussian):
        _check_positive(score.sigma, "sigma")
    else:
        require(type(score) is Dot, f"no recording has a score {type(score).__name__}")


def _check_matrix(x: Any, sizes: tuple[int, int], h: int, what: str) -> None:
    """A parameter (1, h|1, *sizes)."""
    _check_floats(x, what)
    fits = x.ndim == 4 and tuple(x.shape[-2:]) == sizes and x.shape[0] == 1 and x.shape[1] in (1, h)
    require(fits, f"{what}: a parameter of shape {tuple(x.shape)} does not fit {sizes}")


def _check_mask(mask: Any, shape: tuple[int, ...], offset: int, depth: int) -> None:
    require(isinstance(mask, Mask), "there is no mask")
    require(depth < 32, "a mask is nested too deep")
    b, _, i, j = shape
    if isinstance(mask, And):
        _check_mask(mask.left, shape, offset, depth + 1)
        _check_mask(mask.right, shape, offset, depth + 1)
    elif isinstance(mask, Not):
        _check_mask(mask.of, shape, offset, depth + 1)
    elif isinstance(mask, Window):
        for side in (mask.before, mask.after):
            require(type(side) is int and 0 <= side < MAX_WINDOW, f"a window reaches {side!r:.80}")
    elif isinstance(mask, Padding):
        _check_broadcast(mask.lengths, (b, 1, 1, 1), "padding", _is_int64)
        inside = not mask.lengths.numel() or bool(((mask.lengths >= 0) & (mask.lengths <= j)).all())
        require(inside, f"padding does not lie between 0 and {j}")
    elif isinstance(mask, Documents):
        _check_documents(mask, b, i, j, offset)
    elif isinstance(mask, Dense):
        _check_broadcast(mask.cells, shape, "a mask", lambda x: x.dtype == torch.bool)
    else:
        require(isinstance(mask, Causal), f"no recording has a mask {type(mask).__name__}")


def _check_documents(mask: Documents, b: int, i: int, j: int, offset: int) -> None:
    require(isinstance(mask.ids, Tensor) and isinstance(mask.key_ids, Tensor), "documents have no ids")
    _check_broadcast(mask.ids, (b, 1, i, 1), "documents", _is_int64, exact=2)
    _check_broadcast(mask.key_ids, (b, 1, 1, j), "documents", _is_int64, exact=3)
    require(mask.contiguous is None or type(mask.contiguous) is bool, "documents are contiguous, or not")
    require(type(mask.same_sequence) is bool, "documents are of one sequence, or not")
    assert mask.key_ids is not None
    keys = mask.key_ids.flatten(1)
    if mask.contiguous:
        runs = (keys.diff(dim=1) != 0).sum(1) + (1 if j else 0)
        require(all(int(n) == len(row.unique()) for n, row in zip(runs, keys, strict=True)), "documents have gaps")
    if mask.same_sequence:
        at = torch.arange(i) + offset
        inside = (at >= 0) & (at < j)
        rows = mask.ids.flatten(1)[:, inside]
        require(bool((rows == keys[:, at[inside]]).all()), "documents of queries and keys differ")


def _check_broadcast(x: Any, onto: tuple[int, ...], what: str, fits_type: Any, exact: int | None = None) -> None:
    """A tensor of four axes that broadcasts; the axis `exact` has its full size."""
    require(isinstance(x, Tensor) and fits_type(x), f"{what} has the wrong type")
    fits = x.ndim == 4 and all(a in (1, n) for a, n in zip(x.shape, onto, strict=True))
    fits = fits and (exact is None or x.shape[exact] == onto[exact])
    require(fits, f"{what} of shape {tuple(x.shape)} does not broadcast to {onto}")


def _is_int64(x: Tensor) -> bool:
    return x.dtype == torch.int64


def _check_floats(x: Any, what: str) -> None:
    require(isinstance(x, Tensor) and x.is_floating_point(), f"{what} are no floating-point tensor")


def _is_finite(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)


def _check_positive(x: Any, what: str) -> None:
    require(_is_finite(x) and x > 0, f"{what} is {x!r:.80}")
