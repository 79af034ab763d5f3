"""Chosen sequences and heads of masks whose cells come from Python: these have no tensors that could be indexed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..block import MatrixBlock
from ..pytree import is_node, register_node, replace_fields
from .algebra import Mask

__all__ = ["follow_selection"]


@register_node
class Selected(Mask):
    """The cells of some sequences and heads. Numbers have the axes of a matrix, so a selection is one of them too."""

    of: Mask
    sequences: Tensor  # *batch 1 1 1 : numbers of sequences, as engines count them
    heads: Tensor  # h 1 1, behind an axis of size 1 for each of the batch
    is_function = True

    def __repr__(self) -> str:
        return repr(self.of)

    def visible(self, block: MatrixBlock) -> Tensor:
        cells = self.of.visible(block)
        cells = cells.reshape(*[1] * (4 - cells.ndim), *cells.shape)
        for axis, numbers in enumerate((self.sequences, self.heads)):
            if cells.shape[axis] > 1:
                cells = cells.index_select(axis, numbers.flatten())
        return cells

    def narrow(self, rows: slice) -> Mask:
        return replace_fields(self, of=self.of.narrow(rows))


def follow_selection(mask: Mask, batch: torch.Size, heads: int, device: torch.device) -> Mask:
    """The same, whose functions, and masks of a user's own, show the cells of what is selected.

    Args:
        mask: A mask that is broadcast to a matrix.
        batch: Batch axes of the matrix.
        heads: Its heads.
        device: Where it is.
    """
    if isinstance(mask, Selected):
        return mask
    if mask.is_function or not is_node(mask):
        sequences = torch.arange(batch.numel(), device=device).reshape(*batch, 1, 1, 1)
        return Selected(mask, sequences, torch.arange(heads, device=device).reshape(*[1] * len(batch), heads, 1, 1))
    changed: dict[str, Any] = {}
    for name in mask.parts:  # type: ignore[attr-defined]
        part = getattr(mask, name)
        if isinstance(part, Mask) and (followed := follow_selection(part, batch, heads, device)) is not part:
            changed[name] = followed
    return replace_fields(mask, **changed) if changed else mask
