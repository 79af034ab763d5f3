"""Types of what users may pass, by role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .indexing import At
from .masks.kinds import Mask
from .results import StatisticName
from .scores.kinds import Score

__all__ = [
    "Align",
    "EngineName",
    "IndexLike",
    "KeyLike",
    "KeysLike",
    "MaskLike",
    "PoolLike",
    "ScoreLike",
    "SegmentsLike",
    "StatisticName",
    "ToLike",
]

#: A score: by name, as an object, or as a function f(q, k) of blocks (..., i, d) and (..., j, d′).
ScoreLike: TypeAlias = Literal["scaled_dot", "dot", "cosine"] | Score | Callable[..., Tensor]

#: A mask: an object, a bool tensor that broadcasts to (..., h, i, j), or a function f(i, j); True is visible.
MaskLike: TypeAlias = Mask | Tensor | Callable[[Tensor, Tensor], Tensor]

#: One position of a row or key: its number, its token, or one of several equal tokens (`Weights.at`).
KeyLike: TypeAlias = int | str | At

#: Several keys: one of them, a slice, a list, int64 positions, or one bool a key.
KeysLike: TypeAlias = KeyLike | slice | Sequence[KeyLike] | Tensor

#: The brackets of `W[...]`, for one axis or as a tuple for several.
IndexLike: TypeAlias = KeysLike | EllipsisType | range | tuple[KeysLike | EllipsisType | range, ...]

#: Segments of positions: the number of each position's segment, -1 for none, or a list of segments.
SegmentsLike: TypeAlias = Tensor | Sequence[KeysLike]

#: Tiles of `Weights.pool`: (rows, cols), and slices of the part that is pooled.
PoolLike: TypeAlias = tuple[int, int] | tuple[int, int, slice | None] | tuple[int, int, slice | None, slice | None]

#: Arguments of `torch.Tensor.to`.
ToLike: TypeAlias = torch.device | torch.dtype | str | int | bool | Tensor | torch.memory_format | None

#: Which query and key stand at the same position where the lengths differ: the first ones or the last ones.
Align: TypeAlias = Literal["start", "end"]

#: Who computes.
EngineName: TypeAlias = Literal["auto", "triton", "blockwise", "reference"]
