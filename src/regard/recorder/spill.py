"""What was kept, put on the disk while the model still runs: to="run.regard" holds one layer in memory, not all.

Each call is a file of bare numbers in a folder of its own; how they belong together stays in memory. The folder goes
when the recording does. Imports `capture`.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.masks import Dense
from ..core.pytree import flatten, unflatten
from .calls import SavedCall

__all__ = ["Spill", "Spilled"]


class Spill:
    """A folder beside the file that is to be written."""

    def __init__(self, path: Any) -> None:
        where = Path(path)
        self._folder = tempfile.mkdtemp(prefix=f".{where.name}.", suffix=".parts", dir=where.parent)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count = 0

    def put(self, kept: SavedCall) -> Spilled:
        """The tensors of a call on the disk, and what leads back to them."""
        self._count += 1
        return Spilled(kept, Path(self._folder) / str(self._count), self)


class Spilled(SavedCall):
    """A call whose tensors are on the disk."""

    def __init__(self, kept: SavedCall, path: Path, spill: Spill) -> None:
        mask = None if isinstance(kept.mask, Dense) else kept.mask
        super().__init__(None, None, None, None, None, mask, kept.align)
        self.path, self.dense = path, kept.w is not None
        self._spill = spill  # the folder lives as long as something leads into it
        self._spec, tensors = flatten((kept.q, kept.k, kept.v, kept.w, kept.score, kept.mask))
        self._forms = [(tensor.dtype, tensor.shape) for tensor in tensors]
        with open(path, "xb") as file:
            for tensor in tensors:
                file.write(_bytes(tensor))

    def weights(self) -> Any:
        return self.loaded().weights()

    def loaded(self) -> SavedCall:
        with open(self.path, "rb") as file:
            tensors = [_read(file, dtype, shape) for dtype, shape in self._forms]
        q, k, v, w, score, mask = unflatten(self._spec, tensors)
        return SavedCall(q, k, v, w, score, mask, self.align)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _read(file: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    size = shape.numel() * dtype.itemsize
    data = bytearray(file.read(size))
    return (torch.frombuffer(data, dtype=torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(
        shape
    )
