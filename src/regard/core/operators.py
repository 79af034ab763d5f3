"""Python's operators on numbers, refused by name: a lazy matrix has none that could be compared or added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["NotElementwise"]

#: Operators of two operands, by the names of Python's methods.
_BINARY = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^",
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
}  # fmt: skip
#: Those that Python also asks the right operand for.
_REFLECTED = _BINARY.keys() - {"lt", "le", "gt", "ge"}


class NotElementwise:
    """A matrix whose cells are computed where they are asked for: `W > 0.5` is an error that says what to write."""

    def __eq__(self, other: object) -> bool:
        if _is_number(other):
            raise _refusal(self, "==")
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        if _is_number(other):
            raise _refusal(self, "!=")
        return NotImplemented

    __hash__ = object.__hash__  # matrices are equal where they are one object

    def __neg__(self) -> Any:
        raise _refusal(self, "-")

    def __abs__(self) -> Any:
        raise _refusal(self, "abs()")


def _is_number(x: object) -> bool:
    """Whether x is a number or many of them, none of which is equal to a matrix."""
    return isinstance(x, (int, float, complex, Tensor)) or type(x).__module__ == "numpy"


def _refusal(matrix: Any, sign: str) -> TypeError:
    return TypeError(
        f"{sign} takes numbers, and {type(matrix).__name__} stores none. Compute those you need first, with .row(i) "
        f"or [..., i, j], or all of them in quadratic memory, with .dense(), and use {sign} on these."
    )


def _operator(sign: str) -> Callable[[Any, Any], Any]:
    def refused(self: Any, other: Any) -> Any:
        raise _refusal(self, sign)

    return refused


for _name, _sign in _BINARY.items():
    setattr(NotElementwise, f"__{_name}__", _operator(_sign))
    if _name in _REFLECTED:
        setattr(NotElementwise, f"__r{_name}__", _operator(_sign))
