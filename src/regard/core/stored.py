"""Checks of what a file holds: everything that `regard.weights` guarantees of a user's tensors holds of stored ones.

Stored tensors are in normal form: four axes that broadcast to (b, h, i, j), as `api` makes them. Each check raises
ValueError; `recorder.file_reader` turns that into its error about the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_broadcasts",
    "check_finite",
    "check_floats",
    "check_parameter",
    "check_positive",
    "is_int64",
    "require",
]


def require(holds: bool, otherwise: str) -> None:
    """Raise ValueError unless something holds."""
    if not holds:
        raise ValueError(otherwise)


def check_floats(x: Any, what: str) -> None:
    """A tensor of floating-point numbers."""
    require(isinstance(x, Tensor) and x.is_floating_point(), f"{what} are no floating-point tensor")


def check_finite(x: Any, what: str) -> None:
    """A finite number; a bool is none."""
    require(type(x) in (int, float) and math.isfinite(x), f"{what} is {x!r:.80}")


def check_positive(x: Any, what: str) -> None:
    """A finite number above 0."""
    check_finite(x, what)
    require(x > 0, f"{what} is {x!r:.80}")


def check_broadcasts(
    x: Any,
    onto: tuple[int, ...],
    what: str,
    fits_type: Callable[[Tensor], bool] = torch.is_floating_point,
    exact: int | None = None,
) -> None:
    """A tensor of four axes that broadcasts; the axis `exact` has its full size."""
    require(isinstance(x, Tensor) and fits_type(x), f"{what} has the wrong type")
    fits = x.ndim == 4 and all(a in (1, n) for a, n in zip(x.shape, onto, strict=True))
    fits = fits and (exact is None or x.shape[exact] == onto[exact])
    require(fits, f"{what} of shape {tuple(x.shape)} does not broadcast to {onto}")


def check_parameter(x: Any, sizes: tuple[int, int], h: int, what: str) -> None:
    """A parameter (1, h|1, *sizes) of a score."""
    check_floats(x, what)
    fits = x.ndim == 4 and tuple(x.shape[-2:]) == sizes and x.shape[0] == 1 and x.shape[1] in (1, h)
    require(fits, f"{what}: a parameter of shape {tuple(x.shape)} does not fit {sizes}")


def is_int64(x: Tensor) -> bool:
    """Whether a tensor holds lengths or ids."""
    return x.dtype == torch.int64
