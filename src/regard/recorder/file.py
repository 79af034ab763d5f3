"""The `.regard` file: a recording as safetensors with versioned JSON.

The layout is that of safetensors, so any of its readers can open one: eight bytes of length, a JSON header, the tensors
end to end. Under `__metadata__` are a description of the recording, a checksum for every tensor, and one for the header
itself. The description names only the classes of `NODES`: nothing in a file is executed. A file is written under
another name, synced and renamed: a process that is killed while saving leaves the old file or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._io import as_path, atomic_write
from ..core.pytree import STORABLE, flatten
from ..engines import get_engine
from .recording import Layer, Recording
from .tensor_bytes import tensor_bytes

__all__ = ["VERSION", "RegardFileError", "check_target", "save"]

FORMAT, VERSION = "regard recording", 1

#: The classes that a description may name: those of `core` registered as storable. Functions of users are not among
#: them: code is never stored.
NODES = STORABLE

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}

#: The longest header in bytes; safetensors has the same limit.
MAX_HEADER = 100_000_000

BLANK = "0" * 32


class RegardFileError(ValueError):
    """A file that is not a complete recording: truncated, changed, foreign, newer, or made to mislead.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "notes.regard"
        >>> _ = file.write_text("no recording")
        >>> try:
        ...     regard.load(file)
        ... except RegardFileError:
        ...     print("refused")
        refused
    """


def save(recording: Recording, path: Any) -> None:
    """Write a recording; see `Recording.save`."""
    path = as_path(path, "seen.save(path)")
    check_target(path)
    tensors = _TensorTable()
    description = {
        "format": FORMAT,
        "version": VERSION,
        "passes": [
            {"steps": one.steps, "layers": [_described(layer, n, tensors) for n, layer in enumerate(one.layers)]}
            for one in recording.passes
        ],
        "refused": [list(pair) for pair in recording.refused],
        "checksums": {name: entry.checksum for name, entry in tensors.entries.items()},
    }
    atomic_write(path, _chunks(description, tensors.entries))


def check_target(path: Path) -> None:
    """Refuse a path that no recording can be written to."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; save a recording to a file, such as {path / 'run.regard'}.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file; save a recording to a file.")
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder; make it first", str(path.parent))


@dataclass
class _Entry:
    """A tensor of the file: its type, shape and checksum, and a function that fetches it for writing."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: str
    fetch: Callable[[], Tensor]


class _TensorTable:
    """Tensors by name, each stored once: layers that share a mask share its bytes."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self._names: dict[Any, str] = {}

    def add(self, tensor: Tensor, fetch: Callable[[], Tensor] | None = None) -> str:
        """The name of a tensor in the file. With `fetch` it need not stay in memory until it is written."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if fetch is None and tensor.numel() and key in self._names:
            return self._names[key]
        name = f"t{len(self.entries)}"
        plain = _plain_tensor(tensor)
        entry = _Entry(plain.dtype, tuple(plain.shape), digest(tensor_bytes(plain)), fetch or (lambda: plain))
        self.entries[name] = entry
        if fetch is None:
            self._names[key] = name
        return name


def _plain_tensor(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.clone() if x.is_inference() else x).cpu().contiguous()


def _described(layer: Layer, position: int, table: _TensorTable) -> dict[str, Any]:
    """A layer as JSON; its tensors are added to the table."""
    described: dict[str, Any] = {
        "name": layer.name,
        "kind": layer.kind,
        "shape": list(layer.shape),
        "words": list(layer.tokens),
    }
    if layer.index != position:  # a part of the layers was recorded
        described["index"] = layer.index
    described["statistics"] = {name: table.add(tensor) for name, tensor in layer.statistics.items()}
    if layer.saved is not None:
        weights, values = layer.weights, layer.values
        on_disk = layer.saved.loaded() is not layer.saved
        spec, tensors = flatten(weights._factors)
        names = [table.add(t, partial(_factor, layer, n) if on_disk else None) for n, t in enumerate(tensors)]
        described["factors"] = _as_json(spec, names)
        described["engine"] = "reference" if get_engine(weights._engine).plain else "auto"
        described["values"] = (
            None if values is None else table.add(values, partial(_values, layer) if on_disk else None)
        )
    return described


def _factor(layer: Layer, n: int) -> Tensor:
    return flatten(layer.weights._factors)[1][n]


def _values(layer: Layer) -> Tensor:
    values = layer.values
    assert values is not None
    return values


def _as_json(spec: Any, names: list[str]) -> Any:
    """The structure that `flatten` returns, with tensors by name, as JSON values."""
    if not isinstance(spec, tuple):
        if spec is None or isinstance(spec, bool | int | str):
            return spec
        if isinstance(spec, float):
            return {"float": spec.hex()}
        raise ValueError(
            f"a recording cannot be saved with {spec!r} in it: functions are code, and code is not stored. "
            "Save weights.dense() of that layer instead."
        )
    kind, *parts = spec
    if kind == "tensor":
        return {"tensor": names[parts[0]]}
    if kind != "tuple" and kind not in NODES:
        raise ValueError(f"a recording cannot be saved with a {kind} in it; these can: {', '.join(NODES)}.")
    return [kind, *(_as_json(part, names) for part in parts)]


def _chunks(description: dict[str, Any], entries: dict[str, _Entry]) -> Iterator[bytes]:
    yield _header(description, entries)
    for entry in entries.values():
        yield tensor_bytes(_plain_tensor(entry.fetch()))


def _header(description: dict[str, Any], entries: dict[str, _Entry]) -> bytes:
    at, table = 0, {}
    for name, entry in entries.items():
        size = math.prod(entry.shape) * entry.dtype.itemsize
        table[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    described = json.dumps(description, ensure_ascii=True, separators=(",", ":"))
    header = {"__metadata__": {"checksum": BLANK, "regard": described}, **table}
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # The header's checksum is in its first 64 bytes and is computed with zeros in its place.
    return struct.pack("<Q", len(text)) + text.replace(BLANK.encode(), digest(text).encode(), 1)


def digest(data: bytes) -> str:
    """The checksum of the format: BLAKE2b of 16 bytes, hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
