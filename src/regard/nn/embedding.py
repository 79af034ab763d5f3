"""Ids to vectors, by a table: where an id has no row, the error says which."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["look_up"]


def look_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """The rows of a table.

    Args:
        table: The table.
        ids: Whole numbers, below the number of rows.
        what: Name of the ids in errors.

    Returns:
        ``(*ids.shape, dim)``.

    Raises:
        TypeError: The ids are no whole numbers.
        IndexError: An id has no row; on a GPU PyTorch's own error comes instead.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"{what} must be a tensor of whole numbers; got {type(ids).__name__}. Use torch.tensor.")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{what} must be whole numbers, int64 or int32; got dtype {ids.dtype}.")
    if torch.compiler.is_compiling():
        return table(ids)  # type: ignore[no-any-return]
    try:
        return table(ids)  # type: ignore[no-any-return]
    except IndexError:
        rows = table.num_embeddings
        raise IndexError(
            f"{what} must lie between 0 and {rows - 1}, for a table of {rows}; got {int(ids.min())} … {int(ids.max())}."
        ) from None
