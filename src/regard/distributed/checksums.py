"""Texts that tell masks, scores and functions apart, with checksums of their tensors and of what functions read."""

from __future__ import annotations

import dis
import functools
import inspect
import zlib
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor_kinds import readable

__all__ = ["describe"]

#: Values whose `repr` says all about them, in every process alike.
PLAIN = (bool, int, float, complex, str, bytes, slice, range, type(None), type(...), torch.dtype, torch.device)


def describe(node: Any) -> str:
    """A text that tells two masks or scores apart, their tensors and functions included."""
    if isinstance(node, Tensor):
        node = readable(node, "a tensor of score or mask")
        return f"{str(node.dtype).removeprefix('torch.')}{list(node.shape)} with checksum {_checksum(node):016x}"
    if isinstance(node, (tuple, list)):
        return f"({', '.join(map(describe, node))})"
    if hasattr(node, "parts"):
        inside = ", ".join(describe(getattr(node, name)) for name in node.parts)
        return f"{type(node).__name__.lower()}({inside})"
    if callable(node):
        name = getattr(node, "__qualname__", type(node).__name__)
        return f"{name} with checksum {zlib.crc32(_Contents().of_function(node, True)):08x}"
    return repr(node)


def _checksum(t: Tensor) -> int:
    """A number that depends on every byte of a tensor and on its place."""
    flat = t.detach().contiguous().view(-1).view(torch.uint8).cpu()
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    place = torch.arange(1, words.numel() + 1, device="cpu")
    # Products wrap around; neither an odd factor nor a word's own upper bits, moved down without its sign, lose a bit.
    mixed = (words ^ ((words >> 29) & (2**35 - 1))) * (place * 2654435761 * 2 + 1)
    return int(mixed.sum()) & (2**64 - 1)


class _Contents:
    """A Python function as bytes: its code, and the numbers, tensors and functions that it reads from around it.

    Of an object those attributes count that the code names. Each object is looked at once, so that cycles end.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # the objects too: an id is that of another one when its object is gone

    def of_function(self, function: Any, outermost: bool = False) -> bytes:
        """Of helpers that a library brings the name alone: all ranks have the same libraries."""
        if isinstance(function, functools.partial):
            return self.of([function.func, function.args, function.keywords])
        owner, code_of = getattr(function, "__self__", None), getattr(function, "__func__", function)
        if isinstance(function, nn.Module):
            owner, code_of = function, type(function).forward
        elif not hasattr(code_of, "__code__"):
            owner, code_of = function, getattr(function, "__wrapped__", type(function).__call__)
        name = getattr(code_of, "__qualname__", type(code_of).__name__).encode()
        code: CodeType | None = getattr(code_of, "__code__", None)
        if code is None or ("-packages" in code.co_filename and not outermost):
            return name
        names = sorted({name for part in _parts(code) for name in part.co_names})
        variables = code_of.__globals__
        around = [*map(_content_of_cell, code_of.__closure__ or ())]
        around += [variables[name] for name in _global_names(code) if name in variables]
        around += [code_of.__defaults__, code_of.__kwdefaults__, owner]
        return self._of_code(code) + b"".join(self.of(value, names) for value in around)

    def _of_code(self, code: CodeType) -> bytes:
        constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
        inner = [self._of_code(c) for c in code.co_consts if isinstance(c, CodeType)]
        return b"".join((code.co_code, repr((code.co_names, code.co_freevars)).encode(), self.of(constants), *inner))

    def of(self, value: Any, names: Iterable[str] = ()) -> bytes:
        """Of a value that a function reads; `names` are those of attributes."""
        if isinstance(value, PLAIN):
            return repr(value).encode()
        if isinstance(value, Tensor):
            return describe(value).encode() if value.layout is torch.strided and not value.is_meta else b"Tensor"
        if hasattr(value, "__array_interface__"):  # of NumPy, also its numbers
            return repr((value.dtype, value.shape)).encode() + value.tobytes()
        if id(value) in self._seen:
            return b"again"
        self._seen[id(value)] = value
        if isinstance(value, dict):
            return self._of_all((x for pair in value.items() for x in pair), names)
        if isinstance(value, (list, tuple)):
            return self._of_all(value, names)
        if isinstance(value, (set, frozenset)):  # in an order that is no other one in another process
            return b"{" + b",".join(sorted(self.of(item, names) for item in value)) + b"}"
        inside = [self.of(x, names) for name in names if (x := _attribute(value, name)) is not None]
        if callable(value) and not isinstance(value, type):
            inside.append(self.of_function(value))
        return b"%s(%s)" % (type(value).__name__.encode(), b",".join(inside))

    def _of_all(self, items: Iterable[Any], names: Iterable[str]) -> bytes:
        return b"[" + b",".join(self.of(item, names) for item in items) + b"]"


def _attribute(value: Any, name: str) -> Any:
    """An attribute, without running a property's code; None where there is none."""
    if isinstance(value, nn.Module):  # in dicts of parameters, buffers and modules
        return getattr(value, name, None)
    return inspect.getattr_static(value, name, None)


def _parts(code: CodeType) -> Iterator[CodeType]:
    """The code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _global_names(code: CodeType) -> list[str]:
    steps = (step for part in _parts(code) for step in dis.get_instructions(part))
    return sorted({step.argval for step in steps if step.opname == "LOAD_GLOBAL"})


def _content_of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
