"""Which tensors hold plain numbers in memory of their own, and of what kind the others are."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.torch_state import in_functorch, is_zero_tensor

__all__ = ["is_plain", "is_readable", "memory_of", "unreadable_kind"]

#: The types of tensors that no subclass has made into something else.
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

#: Types of arguments that hold no tensor.
_NUMBERS = (NoneType, float, int, bool)


@functools.cache
def _python_key() -> Any:
    return torch._C._dispatch_key_parse("Python")


def is_readable(x: Tensor) -> bool:
    """Whether a tensor holds plain numbers in memory of its own."""
    return unreadable_kind([x]) is None


def is_plain(x: Any) -> bool:
    """The same, quickly: whether it is certainly a tensor that can be read; nested ones count as such."""
    return type(x) in _PLAIN and x.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def memory_of(x: Any) -> Tensor | None:
    """The tensor of plain numbers that x holds; None if there is none."""
    while isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    is_plain = isinstance(x, Tensor) and not is_zero_tensor(x) and not torch._C._dispatch_keys(x).has(_python_key())
    return x if is_plain and x.layout == torch.strided and not x.is_nested and not x.is_meta else None


def unreadable_kind(values: Iterable[Any], nested: bool = True) -> str | None:
    """The kind of a tensor that holds no plain numbers, in lists as well; None when all do."""
    outside = not in_functorch()
    for value in values:
        own_type = type(value)
        if own_type in _NUMBERS:
            continue
        if outside and own_type in _PLAIN and value.layout is torch.strided and not (value.is_meta or value.is_nested):
            continue
        if isinstance(value, list | tuple):
            if (kind := unreadable_kind(value, nested)) is not None:
                return kind
        elif isinstance(value, Tensor):
            if type(value) not in _PLAIN:
                name = type(value).__name__
                return "FakeTensor" if name in ("FakeTensor", "FunctionalTensor", "ProxyTensor") else name
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                return "wrapped by torch.func"
            if value.is_meta:
                return "meta"
            if nested and (value.layout is not torch.strided or value.is_nested):
                return "nested" if value.is_nested else "sparse"
    return None
