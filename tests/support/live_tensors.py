"""The bytes of all tensors that are alive, counted operator by operator; not those of the process."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts storages that operators return while the block is open.

    Attributes:
        peak: Most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.live = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self, *tensors: torch.Tensor) -> None:
        """Add tensors that exist already."""
        for key in [key for key, (storage, _) in self._storages.items() if storage.expired()]:
            self.live -= self._storages.pop(key)[1]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._storages:
                self._storages[key] = StorageWeakRef(storage), storage.nbytes()
                self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(*(x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.device.type == "cpu"))
        return out
