"""A score as an nn.Module: the tensors of a `Score` become parameters and buffers.

A `Score` is a value that holds tensors. A layer must own them, so that an optimizer finds them, `.to()` moves them and
`state_dict` saves them; `forward` rebuilds the score from the tensors the module has now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.pytree import flatten, unflatten
from ..core.scores.kinds import Additive, Bilinear, Score, as_score

__all__ = ["ScoreModule", "as_score_module"]


class ScoreModule(nn.Module):
    """Owns the tensors of a score; calling it returns the score. An nn.Parameter is trained, other tensors are not."""

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


def as_score_module(score: Any, heads: int, key_size: int) -> ScoreModule:
    """A score module from a user's argument; "additive" and "bilinear" create parameters for every head."""
    if score == "bilinear":
        # Starts as the scaled dot product, the identity over √d: training learns the difference.
        start = torch.eye(key_size).repeat(heads, 1, 1) / math.sqrt(key_size)
        return ScoreModule(Bilinear(nn.Parameter(start)))
    if score == "additive":
        spread = 1 / math.sqrt(key_size)
        matrix, vector = (heads, key_size, key_size), (heads, key_size)
        a, b, v = (nn.Parameter(torch.randn(shape) * spread) for shape in (matrix, matrix, vector))
        return ScoreModule(Additive(query_weight=a, key_weight=b, v=v))
    try:
        return ScoreModule(as_score(score))
    except ValueError as error:
        raise ValueError(
            f'{error} A layer also takes "additive" and "bilinear", for which it creates the parameters.'
        ) from None


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """A name for every tensor of a pytree: its path, in the order of `flatten`."""
    if isinstance(value, Tensor):
        yield "_".join(path)
    elif isinstance(value, tuple):
        for n, part in enumerate(value):
            yield from _paths(part, (*path, str(n)))
    elif hasattr(value, "parts"):
        for name in value.parts:
            yield from _paths(getattr(value, name), (*path, name))
