"""Values made of tensors and constants, taken apart and put together again.

Scores, masks, problems and questions are trees of frozen dataclasses with tensors at the leaves. Autograd and
`torch.compile` want flat lists of tensors and plain constants: `flatten` and `unflatten` go between the two.
Imports nothing of regard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

from torch import SymFloat, SymInt, Tensor

__all__ = ["flatten", "register_node", "split_ints", "tree_map", "unflatten"]

T = TypeVar("T")

_NODES: dict[str, type] = {}
_CONSTANTS = frozenset((type(None), bool, int, float, str))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def register_node(cls: type[T]) -> type[T]:
    """A frozen dataclass that may stand in a tree. Compared by identity: tensors have no plain equality."""
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    made: Any = cls
    made.parts = tuple(field.name for field in dataclasses.fields(made))
    made.in_order = not any(field.kw_only for field in dataclasses.fields(made))
    _NODES[cls.__name__] = cls
    return cls


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """A tree as plain constants and the tensors that stood in it, in order."""
    tensors: list[Tensor] = []
    return _plain(value, tensors), tensors


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in _CONSTANTS:  # most leaves; asked first, since every request is taken apart several times
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, tuple):
        return ("tuple", *[_plain(part, tensors) for part in value])
    if type(value).__name__ in _NODES:
        return (type(value).__name__, *[_plain(getattr(value, name), tensors) for name in value.parts])
    return value


def split_ints(spec: Any) -> tuple[Any, list[int]]:
    """The constants without whole numbers, and those in order: in a graph they may be symbols, which no text holds."""
    numbers: list[int] = []
    return _without_numbers(spec, numbers), numbers


def _without_numbers(spec: Any, numbers: list[Any]) -> Any:
    if isinstance(spec, (int, SymInt)) and not isinstance(spec, bool):
        numbers.append(spec)
        return ("number", len(numbers) - 1)
    if isinstance(spec, SymFloat):
        return float(spec)
    if type(spec) is not tuple or spec[0] == "tensor":
        return spec
    return (spec[0], *[_without_numbers(part, numbers) for part in spec[1:]])


def unflatten(spec: Any, tensors: list[Tensor], numbers: Sequence[int] = ()) -> Any:
    """The tree that `flatten` took apart, over these tensors; and over these numbers, if it is `split_ints`."""
    if not isinstance(spec, tuple):
        return spec
    kind, *parts = spec
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "number":
        return numbers[parts[0]]
    built = [unflatten(part, tensors, numbers) for part in parts]
    if kind == "tuple":
        return tuple(built)
    cls: Any = _NODES[kind]
    # A score's own fields come after `steps` and `sink_logits`, which are given by name only.
    return cls(*built) if cls.in_order else cls(**dict(zip(cls.parts, built, strict=True)))


def tree_map(value: Any, how: Callable[[Tensor], Tensor]) -> Any:
    """The tree with every tensor changed, but for the `parameters` of users' functions, whose axes are their own."""
    if isinstance(value, Tensor):
        return how(value)
    if isinstance(value, tuple):
        return tuple(tree_map(part, how) for part in value)
    if type(value).__name__ not in _NODES:
        return value
    fields = {name: getattr(value, name) for name in value.parts}
    return type(value)(**{n: part if n == "parameters" else tree_map(part, how) for n, part in fields.items()})
