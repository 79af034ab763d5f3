"""Saved calls on disk while the model still runs: with path="run.regard" one layer is in memory, not all of them.

Each call is a file of raw tensor bytes in a temporary folder; types, shapes and structure stay in memory. The folder is
removed with the recording.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.pytree import flatten, unflatten
from .calls import SavedCall
from .tensor_bytes import tensor_bytes

__all__ = ["Spill", "Spilled"]


class Spill:
    """A temporary folder beside the file that will be written."""

    def __init__(self, path: Any) -> None:
        path = Path(path)
        self._folder = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".parts", dir=path.parent)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count = 0

    def put(self, saved: SavedCall) -> Spilled:
        """Write the tensors of a call to disk."""
        self._count += 1
        return Spilled(saved, Path(self._folder) / str(self._count), self)


class Spilled(SavedCall):
    """A call whose tensors are on disk."""

    def __init__(self, saved: SavedCall, path: Path, spill: Spill) -> None:
        mask = None if saved.mask is None or saved.mask.dense_parts() else saved.mask
        super().__init__(None, None, None, None, None, mask, saved.align)
        self.path, self.dense = path, saved.w is not None
        self._spill = spill  # keeps the folder alive
        self._spec, tensors = flatten((saved.q, saved.k, saved.v, saved.w, saved.score, saved.mask))
        self._forms = [(tensor.dtype, tensor.shape) for tensor in tensors]
        with open(path, "xb") as file:
            for tensor in tensors:
                file.write(tensor_bytes(tensor))

    def weights(self) -> Any:
        return self.loaded().weights()

    def loaded(self) -> SavedCall:
        with open(self.path, "rb") as file:
            tensors = [_read(file, dtype, shape) for dtype, shape in self._forms]
        q, k, v, w, score, mask = unflatten(self._spec, tensors)
        return SavedCall(q, k, v, w, score, mask, self.align)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle has its tensors in memory."""
        saved = self.loaded()
        return SavedCall, (saved.q, saved.k, saved.v, saved.w, saved.score, saved.mask, saved.align)


def _read(file: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    size = shape.numel() * dtype.itemsize
    data = bytearray(file.read(size))
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
