"""Arguments of `Weights` methods: checked, and converted to what a request holds.

Each error says what must hold, what it got and what to do.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .indexing import Tokens, as_index, as_int, parse, positions_of, slice_bounds
from .scores.kinds import upcast
from .stats import Tiling
from .tensor_kinds import readable, readable_numbers

__all__ = ["as_number", "as_tiling", "as_tokens", "as_values", "at_least_one", "chosen_keys", "segment_flags"]


#: The most flags, segments × positions: 1 GB in float32. One segment with a huge number would make as many rows.
MOST_FLAGS = 2**28


def at_least_one(n: Any, what: str) -> int:
    """A whole number of at least 1."""
    if (count := as_int(n)) is None or count < 1:
        raise ValueError(f"{what} needs a whole number of at least 1; got {n!r}.")
    return count


def as_number(value: Any) -> float | Tensor | None:
    """A user's real number, of Python or NumPy, or a tensor with one; None for a bool, nan and all else."""
    if isinstance(value, Tensor):
        real = value.numel() == 1 and value.dtype != torch.bool and not (value.is_complex() or value.is_meta)
    else:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        value = float(value) if real else None
    return value if real and value == value else None


def as_tokens(words: Any, n: int, axis: str) -> Tokens:
    """One token for each of n positions."""
    if isinstance(words, str):
        raise TypeError(f"{axis} tokens must be a list of strings, one a position; got the string {words!r:.40}.")
    if not isinstance(words, Collection):
        raise TypeError(f"{axis} tokens must be a list of strings, one a position; got {type(words).__name__}.")
    for at, word in enumerate(words):
        if not isinstance(word, str):
            kind = type(word).__name__
            raise TypeError(f"{axis} tokens must be a list of strings, one a position; got {kind} at position {at}.")
    if len(words) != n:
        raise ValueError(f"{n} {axis} positions need one token each; got {len(words)} {axis} tokens.")
    return Tokens(tuple(words))


def as_values(v: Any, length: int, what: str, weights: Any) -> Tensor:
    """A tensor (..., heads, length, e) that fits these weights."""
    v = readable(v, what) if isinstance(v, Tensor) else v
    if not isinstance(v, Tensor) or not v.is_floating_point():
        got = v.dtype if isinstance(v, Tensor) else type(v).__name__
        raise TypeError(f"{what} must be a floating-point tensor (..., {length}, size); got {got}.")
    if v.device != weights.device:
        raise ValueError(f"{what} are on {v.device} and the weights on {weights.device}; move one with .to().")
    if v.ndim < 2 or v.shape[-2] != length:
        raise ValueError(
            f"{what} of shape {tuple(v.shape)} do not fit weights {tuple(weights.shape)}: "
            f"the axis before the last must have {length} positions."
        )
    return v.unsqueeze(0) if v.ndim == 2 else v


def as_tiling(pool: Any, sizes: tuple[int, int]) -> Tiling:
    """Tiling of (rows, cols) or (rows, cols, i, j), with slices i and j for the part that is pooled."""
    if not isinstance(pool, tuple) or not 2 <= len(pool) <= 4:
        raise ValueError(f"pool=(rows, cols) or (rows, cols, i, j) with slices i and j; got {pool!r}.")
    rows, cols = at_least_one(pool[0], "pool(rows, ...)"), at_least_one(pool[1], "pool(..., cols)")
    i = pool[2] if len(pool) > 2 else None
    j = pool[3] if len(pool) > 3 else None
    return Tiling(rows, cols, *_ends(i, sizes[0], "i"), *_ends(j, sizes[1], "j"))


def _ends(part: Any, n: int, name: str) -> tuple[int, int]:
    # Not slice(None): the compiler of PyTorch 2.8 takes no slice as a default.
    if part is None:
        return 0, n
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise ValueError(f"pool(..., {name}=): a slice without a step says which part is pooled; got {part!r}.")
    start, stop, _ = slice_bounds(part, n)
    return start, max(start, stop)


def chosen_keys(keys: Any, n: int, tokens: Tokens | None, q: Tensor) -> Tensor:
    """(j,): 1 for chosen keys, else 0, in the dtype of statistics."""
    flags = torch.zeros(n, dtype=upcast(q[..., :0]).dtype, device=q.device)
    keys = readable_numbers(keys, "mass(keys)") if isinstance(keys, Tensor) else keys
    if isinstance(keys, Tensor) and keys.dtype == torch.bool:
        if keys.shape != (n,):
            raise ValueError(f"mass(keys): a bool tensor has one flag a key, ({n},); got {tuple(keys.shape)}.")
        return keys.to(flags)
    pick = parse((slice(None), keys), (1, n), (None, tokens))[1]
    flags[as_index(positions_of(pick), q.device)] = 1
    return flags


def segment_flags(segments: Any, n: int, tokens: Tokens | None, q: Tensor, what: str) -> Tensor:
    """(segments, n): 1 where a position is in a segment, else 0, in the dtype of statistics."""
    if isinstance(segments, Tensor) and not segments.is_floating_point() and segments.dtype != torch.bool:
        segments = readable_numbers(segments, f"segment_mass({what})")
        if segments.shape != (n,):
            raise ValueError(f"segment_mass({what}): one segment a position, ({n},); got {tuple(segments.shape)}.")
        count = int(segments.max()) + 1 if n else 0
        if count * n > MOST_FLAGS:
            raise ValueError(
                f"segment_mass({what}): segments are numbered from 0 without gaps, -1 is none; got number {count - 1} "
                f"of {n} positions. Number them with segments.unique(return_inverse=True)[1]."
            )
        return (torch.arange(max(count, 0), device=q.device)[:, None] == segments.to(q.device)).to(upcast(q[..., :0]))
    if not isinstance(segments, (list, tuple)) or not segments:
        raise TypeError(
            f"segment_mass({what}) takes an int tensor with the segment of each position, or a list of segments; "
            f"got {type(segments).__name__}."
        )
    if all(as_int(segment) is not None for segment in segments):
        raise TypeError(
            f"segment_mass({what}): a list of numbers has two readings; got {list(segments)!r:.60}. Pass "
            "torch.tensor(list) for the segment of each position, or [[3], [5]] for segments of one position each."
        )
    return torch.stack([chosen_keys(segment, n, tokens, q) for segment in segments])
