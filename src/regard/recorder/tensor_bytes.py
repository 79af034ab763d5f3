"""The bytes of a tensor, without NumPy."""

from __future__ import annotations

import ctypes

from torch import Tensor

__all__ = ["tensor_bytes"]


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor in row-major order, as they are in memory."""
    tensor = tensor.detach().cpu().contiguous()
    # `Tensor.numpy` would need NumPy, which regard does not depend on.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""
