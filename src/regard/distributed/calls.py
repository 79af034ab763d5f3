"""Calls that all ranks make alike: agreements compare their arguments, and one rank's error is that of all."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from ..core.operators import NotElementwise
from ..core.shared import Shareable
from ..core.torch_state import outside_of_graphs
from .checksums import describe

__all__ = ["call_of", "shared_methods"]

X = TypeVar("X")

#: Arguments that belong to the rows or keys of a rank; and masks, which the question inside describes.
OWN = {"self", "v", "u", "values", "x", "dy", "value_norms", "scores", "mask", "cells", "other"}
OWN_OF = {"gather": {"keys"}}
#: Longer texts are shortened to as much, and their checksum.
LONGEST = 200


def call_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A call as a text, without what belongs to one rank: the same on every rank that makes the same call."""
    name = function.__name__
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself says what is wrong
        return name
    own = OWN | OWN_OF.get(name, set())
    shared = {n: x for n, x in arguments.items() if n not in own and not isinstance(x, Shareable)}
    texts = [f"{argument}={_shortened(_text(value))}" for argument, value in shared.items()]
    return f"{name}({', '.join(texts)})"


def _text(value: Any) -> str:
    if isinstance(value, Shareable):
        return "a matrix"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, (bool, int, float, str, slice, range)):
        return repr(value)
    if isinstance(value, Tensor) or hasattr(value, "parts"):
        try:
            return describe(value)
        except TypeError:  # no dense tensor, which the call refuses
            pass
    return type(value).__name__


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... with checksum {zlib.crc32(text.encode()):08x}"


def shared_methods(*kinds: type) -> None:
    """Give these classes their public methods and operators as calls that all ranks make alike."""
    operators = {name for name, value in vars(NotElementwise).items() if inspect.isfunction(value)}
    operators |= {"__getitem__", "__matmul__", "__rmatmul__", "__array__", "__bool__", "__contains__"}
    for kind in kinds:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
            if (not name.startswith("_") or name in operators) and not is_static:
                setattr(kind, name, _shared(method))


def _shared(method: Callable[..., X]) -> Callable[..., X]:
    @outside_of_graphs
    @wraps(method)
    def called(self: Shareable, *args: Any, **kwargs: Any) -> X:
        return self._called(method, (self, *args), kwargs)

    return called
