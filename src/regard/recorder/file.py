"""The file `.regard`: a recording as safetensors with versioned JSON.

The layout is that of safetensors, so any of its readers can open one: eight bytes of length, a JSON header, the
tensors end to end. Added to it: under `__metadata__` a description of the recording, a checksum for every tensor,
and one for the header itself, all verified when read. Nothing in a file is ever executed: the description may name
only the classes listed here. A file is written under another name, synced, and renamed: whoever is killed on the
way leaves the old file or the new one. Imports `recording`, `capture` and what is below them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._io import atomic_write as write
from ..core.masks import And, Causal, Dense, Documents, Not, Or, Padding, Window
from ..core.problem import Factors
from ..core.pytree import flatten, unflatten
from ..core.scores import Additive, Alibi, Bias, Bilinear, Cosine, Dot, Gaussian, Precomputed, ScaledDot, Score, Softcap
from ..core.weights import Weights
from .calls import SavedCall
from .recording import Layer, Pass, Recording

__all__ = ["VERSION", "RegardFileError", "load", "save"]

FORMAT, VERSION = "regard recording", 1

#: What a description may name. Functions of users are not among them: code is never stored.
NODES = {
    cls.__name__: cls
    for cls in (
        Factors,
        ScaledDot,
        Dot,
        Cosine,
        Gaussian,
        Bilinear,
        Additive,
        Precomputed,
        Bias,
        Alibi,
        Softcap,
        Causal,
        Window,
        Padding,
        Documents,
        Dense,
        And,
        Or,
        Not,
    )
}

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

#: A header longer than this is not ours; safetensors has the same limit.
LONGEST_HEADER = 100_000_000

_BLANK = "0" * 32


class RegardFileError(ValueError):
    """A file that is not a whole recording: truncated, changed, foreign or newer."""


# Writing.


def save(seen: Recording, path: Any) -> None:
    """Write a recording. The old file, if there is one, stays whole until the new one is."""
    path = Path(path)
    shelf = _Shelf()
    description = {
        "format": FORMAT,
        "version": VERSION,
        "passes": [
            {"steps": one.steps, "layers": [_described(layer, shelf) for layer in one.layers]} for one in seen.passes
        ],
        "refused": [list(pair) for pair in seen.refused],
        "checksums": {name: entry.checksum for name, entry in shelf.entries.items()},
    }
    write(path, _chunks(description, shelf.entries))


@dataclass
class _Entry:
    """A tensor of the file: its form, its checksum, and how to have it when its bytes are written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: str
    again: Callable[[], Tensor]


class _Shelf:
    """Tensors by name, each stored once: layers that share a mask share its bytes."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self._known: dict[Any, str] = {}

    def put(self, tensor: Tensor, again: Callable[[], Tensor] | None = None) -> str:
        """A tensor's name in the file. `again` fetches one that need not stay in memory until then."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if again is None and tensor.numel() and key in self._known:
            return self._known[key]
        name = f"t{len(self.entries)}"
        plain = _plain_tensor(tensor)
        self.entries[name] = _Entry(plain.dtype, tuple(plain.shape), _digest(_bytes(plain)), again or (lambda: plain))
        if again is None:
            self._known[key] = name
        return name


def _plain_tensor(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.clone() if x.is_inference() else x).cpu().contiguous()


def _described(layer: Layer, shelf: _Shelf) -> dict[str, Any]:
    """A layer as JSON, its tensors put on the shelf."""
    known: dict[str, Any] = {
        "name": layer.name,
        "kind": layer.kind,
        "shape": list(layer.shape),
        "words": list(layer.words),
    }
    known["statistics"] = {name: shelf.put(tensor) for name, tensor in layer.statistics.items()}
    if layer.kept is not None:
        weights, values = layer.weights, layer.values
        on_disk = layer.kept.loaded() is not layer.kept
        spec, tensors = flatten(weights._factors)
        names = [shelf.put(t, partial(_factor, layer, n) if on_disk else None) for n, t in enumerate(tensors)]
        known["factors"] = _plain(spec, names)
        known["engine"] = "reference" if weights._engine == "reference" else "auto"
        known["values"] = None if values is None else shelf.put(values, partial(_values, layer) if on_disk else None)
    return known


def _factor(layer: Layer, n: int) -> Tensor:
    return flatten(layer.weights._factors)[1][n]


def _values(layer: Layer) -> Tensor:
    assert layer.values is not None, "they were there a moment ago"
    return layer.values


def _plain(spec: Any, names: list[str]) -> Any:
    """What `flatten` gives, with tensors by name, as JSON can say it."""
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
    return [kind, *(_plain(part, names) for part in parts)]


def _chunks(description: dict[str, Any], entries: dict[str, _Entry]) -> Iterator[bytes]:
    yield _header(description, entries)
    for entry in entries.values():
        yield _bytes(_plain_tensor(entry.again()))


def _header(description: dict[str, Any], entries: dict[str, _Entry]) -> bytes:
    at, table = 0, {}
    for name, entry in entries.items():
        size = math.prod(entry.shape) * entry.dtype.itemsize
        table[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    said = json.dumps(description, ensure_ascii=True, separators=(",", ":"))
    whole = {"__metadata__": {"checksum": _BLANK, "regard": said}, **table}
    text = json.dumps(whole, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blank = _BLANK.encode()
    # The header's checksum stands in its first 64 bytes and is counted as zeros.
    return struct.pack("<Q", len(text)) + text.replace(blank, _digest(text).encode(), 1)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# Reading.


def load(path: Any) -> Recording:
    """Read a recording; every byte is checked against its checksum before it is used."""
    path = Path(path)
    with open(path, "rb") as file:
        header, description = _read_header(file, path)
        tensors = dict(_read_tensors(file, path, header, description.get("checksums", {})))
        if file.read(1):
            _bad(path, "it is longer than its header says")
    try:
        return _recording(description, tensors)
    except (KeyError, TypeError, IndexError, AttributeError, AssertionError, RuntimeError, ValueError) as error:
        raise RegardFileError(
            f"{path}: its description does not make a recording ({error!r}). It was not written by regard."
        ) from error


def _bad(path: Path, why: str) -> NoReturn:
    raise RegardFileError(
        f"{path}: {why}. The file is damaged or not a recording; write it again, or take a copy that is whole."
    )


def _read_header(file: Any, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    start = file.read(8)
    if len(start) < 8:
        _bad(path, f"a recording begins with 8 bytes of length and this has {len(start)} bytes")
    size = struct.unpack("<Q", start)[0]
    room = os.fstat(file.fileno()).st_size - 8
    if size > min(room, LONGEST_HEADER):
        _bad(path, f"its header claims {size} bytes and {room} follow")
    text = file.read(size)
    try:
        header = json.loads(text)
        meta = header.pop("__metadata__")
        told, said = meta["checksum"], meta["regard"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        _bad(path, "its header is not that of a .regard file")
    if not isinstance(told, str) or len(told) != 32 or _digest(text.replace(told.encode(), _BLANK.encode(), 1)) != told:
        _bad(path, "its header does not fit its checksum")
    description = json.loads(said)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        _bad(path, "its description is not that of a recording")
    if description.get("version") != VERSION:
        raise RegardFileError(
            f"{path}: it was written in version {description.get('version')!r} of the format and this regard reads "
            f"{VERSION}. Update regard."
        )
    return header, description


def _read_tensors(
    file: Any, path: Path, header: dict[str, Any], checksums: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = TYPES[entry["dtype"]], [int(n) for n in entry["shape"]], entry["data_offsets"]
            fits = start == at and end - start == math.prod(shape) * dtype.itemsize and all(n >= 0 for n in shape)
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            _bad(path, f"tensor {name!r} is described wrongly")
        data = file.read(end - start)
        if len(data) != end - start:
            _bad(path, f"it ends inside tensor {name!r}: {end - start} bytes were to come and {len(data)} did")
        if checksums.get(name) != _digest(data):
            _bad(path, f"tensor {name!r} does not fit its checksum")
        at = end
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
        yield name, flat.reshape(shape)


def _recording(description: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    passes = []
    for told in description["passes"]:
        one = Pass([], int(told["steps"]))
        one.layers = [_layer(layer, index, tensors, one) for index, layer in enumerate(told["layers"])]
        passes.append(one)
    return Recording(passes, [(str(name), str(why)) for name, why in description["refused"]])


def _layer(told: dict[str, Any], index: int, tensors: dict[str, Tensor], one: Pass) -> Layer:
    kept: SavedCall | None = None
    if "factors" in told:
        factors = _built(told["factors"], tensors)
        _need(isinstance(factors, Factors) and isinstance(factors.score, Score), "its factors are none")
        kept = _Loaded(None, None, None, None, factors.score, factors.mask, None)
        kept.factors, kept.engine = factors, told["engine"]
        kept.v = None if told["values"] is None else tensors[told["values"]]
        if isinstance(factors.score, Precomputed):
            kept.w = factors.score.w
        else:
            kept.q, kept.k = factors.q, factors.k
    statistics = {str(name): tensors[key] for name, key in told["statistics"].items()}
    words = tuple(None if side is None else [[str(word) for word in line] for line in side] for side in told["words"])
    shape = tuple(int(n) for n in told["shape"])
    _need(told["kind"] in ("self", "cross") and len(words) == 2 and len(shape) == 4, "a layer is described wrongly")
    if kept is not None:
        laid = (*factors.q.shape[:3], factors.k.shape[2])
        _need(factors.k.ndim == 4 and laid == shape, "the factors of a layer do not have its shape")
    for side, size in zip(words, shape[2:], strict=True):
        fits = side is None or (len(side) == shape[0] and all(len(line) == size for line in side))
        _need(fits, "the words of a layer do not have its shape")
    return Layer(str(told["name"]), index, told["kind"], kept, statistics, shape, words, one)  # type: ignore[arg-type]


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


class _Loaded(SavedCall):
    """Factors that are laid over one another already."""

    factors: Factors
    engine: str

    def weights(self) -> Weights:
        if self.engine not in ("auto", "reference"):
            raise ValueError(f"unknown engine {self.engine!r}")
        return Weights(self.factors, self.engine, one_head=False)


def _built(told: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree that a description tells, over these tensors; only known classes."""
    order: list[Tensor] = []

    def spec(part: Any) -> Any:
        if isinstance(part, dict):
            if "tensor" in part:
                order.append(tensors[part["tensor"]])
                return ("tensor", len(order) - 1)
            return float.fromhex(part["float"])
        if not isinstance(part, list):
            return part
        kind, *rest = part
        if kind != "tuple" and kind not in NODES:
            raise ValueError(f"it names a class {kind!r} that no recording has")
        return (kind, *(spec(inner) for inner in rest))

    return unflatten(spec(told), order)
