"""Functions that users pass as a mask: those that make masks, passed without brackets, and the cells of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["cells_of_function", "makes_mask", "mask_call"]

F = TypeVar("F", bound=Callable[..., Any])

#: Functions that make masks, with a call of each: passed themselves as a mask they would be called with positions.
_MASK_FUNCTIONS: dict[Callable[..., Any], str] = {}


def makes_mask(call: str) -> Callable[[F], F]:
    """Decorator of a public function that makes a mask; `call` is shown to a user who forgot the brackets."""

    def register(function: F) -> F:
        _MASK_FUNCTIONS[function] = call
        return function

    return register


def mask_call(function: Callable[..., Any]) -> str | None:
    """A call of a function that makes masks; None for any other."""
    return next((call for other, call in _MASK_FUNCTIONS.items() if other is function), None)


def cells_of_function(cells: Any, block: tuple[int, int]) -> Tensor:
    """Check the cells that a user's mask function returned for a block of rows and keys, and return them."""
    if not isinstance(cells, Tensor) or cells.dtype != torch.bool:
        got = f"dtype {cells.dtype}" if isinstance(cells, Tensor) else type(cells).__name__
        raise TypeError(
            f"a mask function must return a bool tensor of visible cells; got {got}. "
            "Write a comparison, for example lambda i, j: j <= i."
        )
    fits = all(a == 1 or a == b for a, b in zip(cells.shape[-2:][::-1], block[::-1], strict=False))
    if cells.ndim > 4 or not fits:
        raise ValueError(
            f"a mask function of i ({block[0]}, 1) and j (1, {block[1]}) must return cells that broadcast to "
            f"(b, h, {block[0]}, {block[1]}); got shape {tuple(cells.shape)}. It is called block by block: use the "
            "positions i and j alone."
        )
    return cells
