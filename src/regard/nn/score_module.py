"""Scores as parts of a module: their tensors are its parameters and buffers.

A `Score` is a value with tensors in it. A layer must own them, so that an optimizer finds them, `.to()` moves them and
`state_dict` saves them; the score is put together from them again at every call. Imports `score` and `tree`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.pytree import flatten, unflatten
from ..core.scores import Additive, Bilinear, Score, as_score

__all__ = ["Scoring", "as_scoring"]


class Scoring(nn.Module):
    """Calling it gives the score over the tensors it has now. What came as nn.Parameter is trained."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self._spec, tensors = flatten(score)
        self._names = list(_paths(score))
        for name, tensor in zip(self._names, tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self) -> Score:
        return unflatten(self._spec, [getattr(self, name) for name in self._names])

    def extra_repr(self) -> str:
        return repr(self())


def as_scoring(score: Any, heads: int, key_size: int) -> Scoring:
    """A score from what users pass; "additive" and "bilinear" make parameters for every head."""
    if score == "bilinear":
        # Begins as the scaled dot product: the identity over √d, and what is learned is what differs from it.
        start = torch.eye(key_size).repeat(heads, 1, 1) / math.sqrt(key_size)
        return Scoring(Bilinear(nn.Parameter(start)))
    if score == "additive":
        spread = 1 / math.sqrt(key_size)
        matrix, vector = (heads, key_size, key_size), (heads, key_size)
        a, b, v = (nn.Parameter(torch.randn(shape) * spread) for shape in (matrix, matrix, vector))
        return Scoring(Additive(query_weight=a, key_weight=b, v=v))
    try:
        return Scoring(as_score(score))
    except ValueError as wrong:
        raise ValueError(f'{wrong} A layer also knows "additive" and "bilinear", whose parameters it makes.') from None


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """A name for every tensor of a tree, in the order of `flatten`: where it stands."""
    if isinstance(value, Tensor):
        yield "_".join(path)
    elif isinstance(value, tuple):
        for n, part in enumerate(value):
            yield from _paths(part, (*path, str(n)))
    elif hasattr(value, "parts"):
        for name in value.parts:
            yield from _paths(getattr(value, name), (*path, name))
