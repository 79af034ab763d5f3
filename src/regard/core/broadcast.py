"""Tensors of masks and scores, checked and broadcast to the axes (*batch|1, h|1, x, y) of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "MatrixShape",
    "check_broadcast",
    "per_cell",
    "per_head",
    "refuse_flags_of_sequences",
    "repeat_kv",
    "with_leading_axes",
]


@dataclass(frozen=True)
class MatrixShape:
    """The matrix that masks and scores are broadcast to.

    No NamedTuple: torch.compile up to 2.8 cannot trace a property of one.
    """

    full: tuple[int, ...]  # *batch, h, i, j
    offset: int  # the key position of query 0
    device: torch.device

    @property
    def batch(self) -> tuple[int, ...]:
        return self.full[:-3]


def per_cell(tensor: Tensor, matrix: MatrixShape, what: str) -> Tensor:
    """A tensor that broadcasts to (..., h, i, j), with all axes."""
    _check_device(tensor, matrix, what)
    check_broadcast(tensor.shape, matrix.full, what, "(..., h, i, j)")
    return with_leading_axes(tensor, len(matrix.batch))


def per_head(tensor: Tensor, matrix: MatrixShape, what: str) -> Tensor:
    """One number for each head, (..., h), as (*batch|1, h|1, 1, 1)."""
    _check_device(tensor, matrix, what)
    check_broadcast(tensor.shape, matrix.full[:-2], what, "one number a head")
    return with_leading_axes(tensor[..., None, None], len(matrix.batch))


def _check_device(tensor: Tensor, matrix: MatrixShape, what: str) -> None:
    if tensor.device != matrix.device:
        raise ValueError(f"{what} is on {tensor.device} and q on {matrix.device}; move one with .to(device).")


def check_broadcast(shape: Sequence[int], onto: Sequence[int], what: str, axes: str) -> None:
    """Raise ValueError unless a tensor of this shape broadcasts."""
    shape, onto = tuple(shape), tuple(onto)
    # Equal lengths: torch.compile up to 2.8 cannot trace a zip() of unequal ones.
    fits = len(shape) <= len(onto) and all(
        a == 1 or a == b for a, b in zip(shape, onto[len(onto) - len(shape) :], strict=True)
    )  # `a in (1, b)` fails for a SymInt
    if not fits:
        raise ValueError(f"{what} of shape {shape} does not broadcast to {onto}: {axes} is needed.")


def refuse_flags_of_sequences(shape: Sequence[int], full: tuple[int, ...]) -> None:
    """Raise ValueError for flags of every sequence that lack the axis of heads: one a key, or one a query and key."""
    shape = tuple(shape)
    if len(full) != 4 or len(shape) >= 4 or shape not in ((full[0], full[3]), (full[0], full[2], full[3])):
        return
    if not all(a in (1, b) for a, b in zip(shape, full[4 - len(shape) :], strict=True)):
        index, meaning = ("[:, None, None, :]", "key") if len(shape) == 2 else ("[:, None]", "query and key")
        raise ValueError(
            f"mask of shape {shape} has one flag a {meaning} of every sequence, and (..., h, i, j) = {full} is "
            f"needed: pass mask{index}" + (", or padding(lengths)." if len(shape) == 2 else ".")
        )


def with_leading_axes(tensor: Tensor, batch_axes: int) -> Tensor:
    """With leading axes of size one, up to (*batch, h, x, y)."""
    return tensor.reshape(*[1] * (batch_axes + 3 - tensor.ndim), *tensor.shape)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """One head of keys or values for every head of queries: (..., g, j, e) to (..., h, j, e)."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)
