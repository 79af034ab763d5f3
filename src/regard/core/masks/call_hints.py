"""Functions that make masks, so that one passed without its brackets is told from a user's function of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["makes_mask", "mask_call"]

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
