"""The binary format of a page's data: a JSON header and arrays behind it, deflated as one block of bytes."""

from __future__ import annotations

import ctypes
import json
import struct
import zlib
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Packed", "Packer", "raw_bytes", "regard_version"]


@dataclass
class Packed:
    """The content of a page: its title, one block of bytes and, of long inputs, a second one that is read later."""

    title: str
    data: bytes
    vectors: bytes = b""


def regard_version() -> str:
    """The version of the package, which captions name."""
    return str(import_module("regard").__version__)


def raw_bytes(x: Tensor) -> bytes:
    """The bytes of a tensor on the CPU, in the order of its elements."""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""


class Packer:
    """Collects the arrays of a page; equal arrays are written once.

    The n-th bytes of all numbers of an array stand together: they are alike, so deflate packs them better.
    """

    DTYPES: ClassVar = {"f4": torch.float32, "f2": torch.float16, "u4": torch.int32, "u1": torch.uint8}

    def __init__(self) -> None:
        self._shapes: list[list[Any]] = []  # [dtype, *shape] of every array
        self._parts: list[bytes] = []
        self._numbers: dict[tuple[str, bytes], int] = {}

    def add(self, x: Tensor, dtype: str = "f4") -> int:
        """Add an array; returns the number under which the page finds it."""
        flat = x.detach().to("cpu", self.DTYPES[dtype]).contiguous()
        planes = flat.reshape(-1, 1).view(torch.uint8).T if flat.element_size() > 1 else flat
        raw = raw_bytes(planes)
        key = (f"{dtype}{tuple(x.shape)}", raw)
        if key not in self._numbers:
            self._numbers[key] = len(self._parts)
            self._shapes.append([dtype, *x.shape])
            self._parts.append(raw)
        return self._numbers[key]

    def pack(self, header: dict[str, Any], vectors: bytes = b"") -> Packed:
        """The block: length of the header, header, arrays; deflated."""
        text = json.dumps({**header, "arrays": self._shapes}, allow_nan=False, separators=(",", ":")).encode()
        block = struct.pack("<I", len(text)) + text + b"".join(self._parts)
        return Packed(header["title"], zlib.compress(block, 6), vectors)
