"""Inherited methods named after the class that a user has: a wrong call of ``W.row()`` says ``Weights.row()``."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import TypeVar

__all__ = ["named_by_class"]

C = TypeVar("C", bound=type)


def named_by_class(cls: C) -> C:
    """`cls` with its own copies of the public methods that it inherits from this package.

    Python's errors about missing and unexpected arguments name the class in which a method was written, such as
    ``RowQuestions``, and users have a `Weights`.
    """
    for name, value in inspect.getmembers_static(cls, inspect.isfunction):
        if not name.startswith("_") and name not in vars(cls) and value.__module__.startswith("regard."):
            setattr(cls, name, _renamed(value, cls))
    return cls


def _renamed(function: FunctionType, cls: type) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__doc__, copy.__dict__ = function.__doc__, dict(function.__dict__)
    copy.__module__, copy.__qualname__ = cls.__module__, f"{cls.__qualname__}.{function.__name__}"
    return copy
