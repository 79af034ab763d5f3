"""Trees of frozen dataclasses with tensors at the leaves: flatten, unflatten, map.

Scores, masks, problems and requests are such trees. Autograd and `torch.compile` take flat lists of tensors and plain
constants instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform, overload

from torch import SymFloat, SymInt, Tensor

__all__ = [
    "STORABLE", "flatten", "has_text", "is_node", "register_node", "replace_fields", "split_ints", "tree_map",
    "unflatten",
]  # fmt: skip

T = TypeVar("T")

_NODES: dict[str, type] = {}
#: Nodes that a file may name. A node that holds a user's function is not among them: code is never stored.
STORABLE: dict[str, type] = {}
#: A tuple: torch.compile of 2.6 cannot look a class up in a frozenset.
_CONSTANTS = (type(None), bool, int, float, str)


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def register_node(cls: type[T]) -> type[T]: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def register_node(*, storable: bool = False) -> Callable[[type[T]], type[T]]: ...
def register_node(cls: Any = None, *, storable: bool = False) -> Any:
    """Class decorator: a frozen dataclass that may be a node of a tree, compared by identity as tensors are.

    Args:
        cls: The class; its name is its name in specs and files.
        storable: Whether recordings may contain it.
    """
    if cls is None:
        return lambda cls: _register(cls, storable)
    return _register(cls, storable)


def _register(cls: type[T], storable: bool) -> type[T]:
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    node: Any = cls
    node.parts = tuple(field.name for field in dataclasses.fields(node))
    node.in_order = not any(field.kw_only for field in dataclasses.fields(node))
    # Dynamo of 2.6 gives positional arguments to the first fields, and keyword-only ones of a base class come first.
    fields = node.__dataclass_fields__
    node.__dataclass_fields__ = dict(sorted(fields.items(), key=lambda named: named[1].kw_only is True))
    _NODES[cls.__name__] = cls
    if storable:
        STORABLE[cls.__name__] = cls
    return cls


def is_node(value: Any) -> bool:
    """Whether a value is a node of a tree; a class that a user derives from one is none."""
    return _NODES.get(type(value).__name__) is type(value)


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """A tree as a spec of plain constants, and its tensors in order."""
    tensors: list[Tensor] = []
    return _plain(value, tensors), tensors


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in _CONSTANTS:  # checked first: most leaves are constants, and every request is flattened often
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    parts: Sequence[Any]
    if isinstance(value, tuple):
        kind, parts = "tuple", value
    elif (kind := type(value).__name__) in _NODES:
        parts = [getattr(value, name) for name in value.parts]
    else:
        return value
    spec: list[Any] = [kind]
    for part in parts:
        if type(part) in _CONSTANTS:  # constants and tensors are not worth a call each: nearly all parts are such
            spec.append(part)
        elif type(part) is Tensor:
            spec.append(("tensor", len(tensors)))
            tensors.append(part)
        else:
            spec.append(_plain(part, tensors))
    return tuple(spec)


def split_ints(spec: Any) -> tuple[Any, list[int]]:
    """The spec without its ints, and the ints in order: in a graph they may be SymInts, which have no text form."""
    ints: list[int] = []
    return _without_ints(spec, ints), ints


def _without_ints(spec: Any, ints: list[Any]) -> Any:
    if isinstance(spec, (int, SymInt)) and not isinstance(spec, bool):
        ints.append(spec)
        return ("int", len(ints) - 1)
    if isinstance(spec, (float, SymFloat)):
        # A key is a constant to the compiler of PyTorch 2.8; a float that a graph may be given anew is not.
        return next(iter({float(spec): None}))
    if type(spec) is not tuple or spec[0] == "tensor":
        return spec
    return (spec[0], *[_without_ints(part, ints) for part in spec[1:]])


def has_text(spec: Any) -> bool:
    """Whether `repr` of a spec is a literal; that of a user's function is not."""
    if isinstance(spec, tuple):
        return all(has_text(part) for part in spec)
    return spec is None or isinstance(spec, (bool, int, float, str))


def unflatten(spec: Any, tensors: list[Tensor], ints: Sequence[int] = ()) -> Any:
    """The tree of a spec over these tensors, and over these ints if the spec is from `split_ints`."""
    if not isinstance(spec, tuple):
        return spec
    kind, *parts = spec
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "int":
        return ints[parts[0]]
    built = [unflatten(part, tensors, ints) for part in parts]
    if kind == "tuple":
        return tuple(built)
    cls: Any = _NODES[kind]
    # A score's own fields come after `modifiers` and `sink_logits`, which are keyword-only.
    return cls(*built) if cls.in_order else cls(**dict(zip(cls.parts, built, strict=True)))


def tree_map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with every tensor changed, but for the `parameters` of users' functions, whose axes are their own."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple([tree_map(part, change) for part in value]) if value else value
    if type(value).__name__ not in _NODES:
        return value
    changed = {}
    for name in value.parts:
        part = getattr(value, name)
        if type(part) in _CONSTANTS or name == "parameters":
            continue
        mapped = tree_map(part, change)
        # The compiler of PyTorch 2.8 cannot ask whether two tuples are the same: one with members counts as new.
        is_new = bool(part) if isinstance(part, tuple) else mapped is not part
        if is_new:
            changed[name] = mapped
    return replace_fields(value, **changed) if changed else value  # a node without tensors is itself


def replace_fields(node: T, **changes: Any) -> T:
    """A copy of a node with other values of some fields: `dataclasses.replace`, traceable by torch.compile of 2.6."""
    values = {name: getattr(node, name) for name in node.parts}  # type: ignore[attr-defined]
    values.update(changes)
    # Dynamo of 2.6 returns an object from a graph only where it can look up the class, and `type(node)` has no address.
    registered = _NODES.get(type(node).__name__)
    return (registered if registered is type(node) else type(node))(**values)
