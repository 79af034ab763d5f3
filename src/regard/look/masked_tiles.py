"""Tiles of a matrix that the mask forbids entirely: pictures hatch them, since a weight of 0 alone does not say so."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.weights import Weights
from .dot_head import tile_of_key

__all__ = ["forbidden_tiles"]


@torch.no_grad()
def forbidden_tiles(weights: Weights, rows: int, cols: int) -> Tensor | None:
    """Which of rows × cols tiles hold no weight that the mask allows, (h or 1, rows, cols); None without a mask.

    Args:
        weights: Weights (h, i, j), with at least as many rows and keys as there are tiles.
        rows: Number of tiles along the queries; tiles are cut as in `Weights.pool`.
        cols: Number of tiles along the keys.
    """
    mask, (h, i, j) = weights._factors.mask, weights.shape
    if mask is None:
        return None
    cell = MatrixBlock(slice(0, 1), slice(0, 1), 0, weights._factors.q.device)
    heads = range(1 if mask.visible(cell).numel() == 1 else h)  # a mask may serve all heads
    visible = torch.zeros(len(heads), rows, cols, dtype=torch.int8)
    for head in heads:
        problem = weights[[head]]._factors.problem()
        for r in range(rows):
            keys = problem.narrow(r * i // rows, (r + 1) * i // rows).visible_keys()
            any_key = torch.ones(j, dtype=torch.int8) if keys is None else keys[0, 0].to("cpu", torch.int8)
            visible[head, r].scatter_reduce_(0, tile_of_key(j, cols), any_key, "amax")
    return visible == 0
