"""The two factors of a product: which they are, and whether one is a parameter, as in every linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .plain_tensors import is_plain

__all__ = [
    "factors_of",
    "has_learned_queries",
    "is_computed",
    "is_layer",
    "is_layer_with_bias",
    "is_parameter",
    "is_table",
]


def factors_of(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The two operands of a product: operators name them differently."""
    if "batch1" in call:
        return call["batch1"], call["batch2"]
    if "mat1" in call:
        return call["mat1"], call["mat2"]
    if "vec" in call and "mat" in call:
        return call["mat"], call["vec"]
    return call["self"], next(call[name] for name in ("other", "mat2", "vec", "tensor") if name in call)


def is_computed(x: Tensor) -> bool:
    """Whether a factor is computed, not a parameter of the model."""
    return x.ndim > 0 and (x.is_floating_point() or x.is_complex()) and not is_parameter(x)


def is_layer(factors: tuple[Any, ...]) -> bool:
    """Whether a product is that of a linear layer, and no product of queries and keys."""
    if len(factors) < 2:
        return False
    left, right, *_ = factors
    if not (is_plain(left) and is_plain(right)):
        return False
    return is_parameter(right) or (is_parameter(left) and not has_learned_queries(left, right))


def is_layer_with_bias(arguments: tuple[Any, ...]) -> bool:
    """The same where the bias is the first argument."""
    return is_layer(arguments[1:])


def has_learned_queries(left: Tensor, right: Tensor) -> bool:
    """Whether a parameter stands where queries do, before keys of a batch; a layer has its parameter behind."""
    return right.ndim > 2 and left.ndim > 1 and is_parameter(left) and is_computed(right)


def is_parameter(x: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    base = x if x._base is None else x._base
    return type(base) is torch.nn.Parameter or isinstance(base, torch.nn.Parameter)  # the latter is slow


def is_table(module: torch.nn.Module | None, *sizes: torch.Size) -> bool:
    """Whether an outer product of these sizes is that of positions and a module's constants, as of rotary embeddings.

    The module has no parameters, and a buffer of one of the sizes.
    """
    if module is None or next(module.parameters(), None) is not None:
        return False
    return any(buffer.ndim == 1 and buffer.shape in sizes for buffer in module.buffers(recurse=False))
