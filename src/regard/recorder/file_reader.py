"""Reading of `.regard` files, which are untrusted input.

Sizes are compared with the length of the file before anything is allocated, bytes with their checksums before they are
used, and the factors of a layer with each other before a kernel may see them (`factor_check`): kernels read by raw
pointers, and checksums do not help against a file that was written to mislead. Every misfit is a `RegardFileError`.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from .._io import as_path
from ..core.problem import Factors
from ..core.pytree import unflatten
from ..core.stored import require
from ..core.types import EngineName
from ..core.weights import Weights
from .calls import SavedCall
from .detached import RecordedWeights
from .factor_check import check_factors, check_values
from .file import BLANK, FORMAT, MAX_HEADER, NODES, TYPES, VERSION, RegardFileError, digest
from .recording import STORED_STATISTICS, Layer, Pass, Recording

__all__ = ["load"]

#: The deepest tree of a description: scores and masks are a few levels deep.
MAX_DEPTH = 64


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording that `Recording.save`, or `record(path=)`, wrote.

    Args:
        path: The .regard file.

    Returns:
        The `Recording`, with all tensors in memory on the CPU.

    Raises:
        RegardFileError: The file is truncated, changed, foreign, newer, or does not describe a recording.

    Example:
        >>> import os, tempfile, regard
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with regard.record(model) as seen:
        ...     y = model(x, x, x)
        >>> path = os.path.join(tempfile.mkdtemp(), "run.regard")
        >>> seen.save(path)
        >>> len(regard.load(path))
        1
    """
    path = as_path(path, "regard.load(path)")
    with _opened(path) as file:
        try:
            header, description = _read_header(file, path)
            tensors = dict(_read_tensors(file, path, header, description.get("checksums")))
            if file.read(1):
                _damaged(path, "it is longer than its header says")
            return _recording(description, tensors)
        except (RegardFileError, OSError):
            raise
        except (Exception, RecursionError) as error:
            raise RegardFileError(
                f"{path}: its description does not make a recording ({error!r:.300}). It was not written by regard."
            ) from error


def _opened(path: Path) -> BinaryIO:
    """The file, if it is a regular one: a FIFO would wait for ever."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        what = "a folder" if stat.S_ISDIR(kind) else "no regular file"
        raise RegardFileError(f"{path}: it is {what}. A recording is a file that seen.save(path) wrote.")
    return os.fdopen(handle, "rb")


def _damaged(path: Path, reason: str) -> NoReturn:
    raise RegardFileError(
        f"{path}: {reason}. The file is damaged or not a recording; write it again, or take a complete copy."
    )


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    start = file.read(8)
    if len(start) < 8:
        _damaged(path, f"a recording begins with 8 bytes of length and this has {len(start)} bytes")
    size = struct.unpack("<Q", start)[0]
    available = os.fstat(file.fileno()).st_size - 8
    if size > min(available, MAX_HEADER):
        _damaged(path, f"its header claims {size} bytes and {available} follow")
    text = file.read(size)
    try:
        header = json.loads(text)
        meta = header.pop("__metadata__")
        checksum, described = meta["checksum"], meta["regard"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        _damaged(path, "its header is not that of a .regard file")
    if not isinstance(checksum, str) or not isinstance(described, str) or len(checksum) != 32:
        _damaged(path, "its header is not that of a .regard file")
    if digest(text.replace(checksum.encode("utf-8", "replace"), BLANK.encode(), 1)) != checksum:
        _damaged(path, "its header does not fit its checksum")
    description = json.loads(described)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        _damaged(path, "its description is not that of a recording")
    version = description.get("version")
    if type(version) is not int or version != VERSION:
        raise RegardFileError(
            f"{path}: it was written in version {version!r:.80} of the format and this regard reads {VERSION}. "
            "Update regard."
        )
    return header, description


def _read_tensors(file: BinaryIO, path: Path, header: dict[str, Any], checksums: Any) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(checksums, dict):
        _damaged(path, "its checksums are no table")
    available = os.fstat(file.fileno()).st_size - file.tell()
    at = 0
    for name, entry in header.items():
        dtype, shape, size = _tensor_entry(path, name, entry, at)
        if size > available - at:
            _damaged(path, f"it ends inside tensor {name!r:.80}: {size} bytes are announced, {available - at} follow")
        data = file.read(size)
        if len(data) != size:
            _damaged(path, f"it ends inside tensor {name!r:.80}: {size} bytes are announced, {len(data)} follow")
        if checksums.get(name) != digest(data):
            _damaged(path, f"tensor {name!r:.80} does not fit its checksum")
        at += size
        if dtype is torch.bool and data.translate(None, b"\0\1"):
            _damaged(path, f"tensor {name!r:.80} has bytes that are no bool")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
        yield name, flat.reshape(shape)


def _tensor_entry(path: Path, name: str, entry: Any, at: int) -> tuple[torch.dtype, list[int], int]:
    """Type, shape and size in bytes of a tensor that begins at offset `at`."""
    try:
        dtype, shape, offsets = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, *offsets]
        fits = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and len(shape) <= 8
        fits = fits and all(type(n) is int and 0 <= n < 2**48 for n in numbers)
        size = math.prod(shape) * dtype.itemsize if fits else 0
        fits = fits and offsets == [at, at + size]
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        _damaged(path, f"tensor {name!r:.80} is described wrongly")
    return dtype, shape, size


def _recording(description: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    passes = []
    for described in _list(description["passes"], "passes"):
        steps = _int(described["steps"], "steps")
        require(steps >= 1, "a pass has no steps")
        one = Pass([], steps)
        one.layers = [
            _layer(layer, n, tensors, one) for n, layer in enumerate(_list(described["layers"], "the layers of a pass"))
        ]
        numbers = [layer.index for layer in one.layers]
        require(numbers == sorted(set(numbers)), "the layers of a pass are not in order")
        passes.append(one)
    refused = [(_str(name, "a module"), _str(reason, "a reason")) for name, reason in description["refused"]]
    return Recording(passes, refused)


def _layer(described: dict[str, Any], position: int, tensors: dict[str, Tensor], one: Pass) -> Layer:
    name, kind = _str(described["name"], "a layer's name"), described["kind"]
    require(kind in ("self", "cross"), f"a layer's kind is {kind!r:.80}")
    shape = tuple(_int(n, "a layer's shape") for n in _list(described["shape"], "a layer's shape"))
    require(len(shape) == 4 and all(0 <= n < 2**31 for n in shape), f"a layer's shape is {shape!r:.80}")
    index = _int(described.get("index", position), "a layer's index")
    require(index >= 0, "a layer's index is negative")
    saved = _saved_call(described, shape, tensors) if "factors" in described else None
    statistics = _statistics(described["statistics"], shape, tensors)
    require(saved is not None or "entropy" in statistics, "a layer has neither factors nor statistics")
    return Layer(name, index, kind, saved, statistics, shape, _tokens(described["words"], shape), one)  # type: ignore[arg-type]


def _saved_call(described: dict[str, Any], shape: tuple[int, ...], tensors: dict[str, Tensor]) -> SavedCall:
    factors = _built(described["factors"], tensors)
    require(isinstance(factors, Factors), "a layer's factors are none")
    check_factors(factors, shape)
    engine = described["engine"]
    require(engine in ("auto", "reference"), f"a layer's engine is {engine!r:.80}")
    dense = factors.score.precomputed is not None
    require(dense == (engine == "reference"), "a layer's engine does not fit its score")
    saved = _LoadedCall(None, None, None, None, factors.score, factors.mask, None)
    saved.factors, saved.engine = factors, engine
    if dense:
        saved.w = factors.score.precomputed
    else:
        saved.q, saved.k = factors.q, factors.k
    if described["values"] is not None:
        saved.v = tensors[described["values"]]
        check_values(saved.v, factors)
    return saved


def _statistics(described: Any, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    require(isinstance(described, dict), "a layer's statistics are no table")
    b, h, i, j = shape
    statistics = {}
    for name, key in described.items():
        require(name in STORED_STATISTICS, f"there is no statistic {name!r:.80}")
        tensor = tensors[key]
        expected = (b, h, j if name == "received" else i)
        fits = tuple(tensor.shape) == expected and tensor.is_floating_point()
        require(fits, f"the statistic {name} of a layer has {tuple(tensor.shape)} and its shape is {expected}")
        statistics[name] = tensor
    return statistics


def _tokens(described: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    require(isinstance(described, list) and len(described) == 2, "a layer's tokens have not two sides")
    sides: list[list[list[str]] | None] = []
    for side, size in zip(described, shape[2:], strict=True):
        if side is None:
            sides.append(None)
            continue
        lines = [[_str(token, "a token") for token in _list(line, "tokens")] for line in _list(side, "tokens")]
        fits = len(lines) == shape[0] and all(len(line) == size for line in lines)
        require(fits, "the tokens of a layer do not have its shape")
        sides.append(lines)
    return tuple(sides)


class _LoadedCall(SavedCall):
    """Factors from a file, checked and broadcast to one another already."""

    factors: Factors
    engine: EngineName

    def weights(self) -> Weights:
        return RecordedWeights(self.factors, self.engine, one_head=False)


def _built(described: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree of a description over these tensors; only classes of `NODES`."""
    order: list[Tensor] = []

    def spec(part: Any, depth: int) -> Any:
        require(depth < MAX_DEPTH, f"a tree is deeper than {MAX_DEPTH}")
        if isinstance(part, dict):
            require(len(part) == 1, "a part of a tree has several values")
            if "tensor" in part:
                order.append(tensors[part["tensor"]])
                return ("tensor", len(order) - 1)
            return float.fromhex(part["float"])
        if not isinstance(part, list):
            require(part is None or type(part) in (bool, int, str), f"a part of a tree is {part!r:.80}")
            return part
        kind, *rest = part
        require(kind == "tuple" or (isinstance(kind, str) and kind in NODES), f"no recording has a class {kind!r:.80}")
        return (kind, *(spec(inner, depth + 1) for inner in rest))

    return unflatten(spec(described, 0), order)


def _list(value: Any, what: str) -> list[Any]:
    require(isinstance(value, list), f"{what}: a list is needed")
    return value


def _str(value: Any, what: str) -> str:
    require(isinstance(value, str), f"{what}: text is needed")
    return value


def _int(value: Any, what: str) -> int:
    require(type(value) is int, f"{what}: a whole number is needed")
    return value
