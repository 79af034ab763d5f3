"""Tiles of the matrix by sum, maximum or log-sum-exp, compiled: the call of the kernel in `kernels/tile_pool.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.problem import Problem
from ...core.stats import Request
from . import KernelCall, _chunks, _tile_size, forward, serves

__all__ = ["pooled", "serves_pool"]


def serves_pool(problem: Problem) -> bool:
    """Whether the kernel can pool this matrix."""
    return serves(problem) and 0 not in problem.shape


def pooled(
    problem: Problem, norm: Tensor | None, row_edges: tuple[int, ...], key_edges: tuple[int, ...], by: str
) -> Tensor:
    """(b, h, rows, cols): tiles between ascending edges; one without a visible cell is 0, by lse −inf."""
    b, h, i, j = problem.shape
    shape = (b, h, len(row_edges) - 1, len(key_edges) - 1)
    block_i, block_j = _tile_size(problem)
    call = KernelCall(problem, block_i, block_j)
    if by != "lse":
        call.out("norm", (forward(problem, Request(("norm",)))["norm"] if norm is None else norm).contiguous())
    row_from = row_edges[0] - row_edges[0] % block_i  # whole tiles, whose products are those of the norm
    chunks = _chunks(row_edges[-1] - row_from, b * h, block_i)
    call.set(chunks=chunks, row_from=row_from, row_to=row_edges[-1], key_from=key_edges[0], key_to=key_edges[-1])
    call.work = b * h * (row_edges[-1] - row_from) * (key_edges[-1] - key_edges[0]) * problem.q.shape[3]
    call.set(tile_rows=shape[2], tile_cols=shape[3], pool_by=call.runtime.kernels.POOL_BY[by])
    call.out("row_tile", _tile_of_each(row_edges, i))
    call.out("key_tile", _tile_of_each(key_edges, j))
    call.out("key_edges", torch.tensor(key_edges, device="cpu"))
    tiles = torch.zeros(chunks, *shape, 2, dtype=torch.float64, device="cpu")  # maximum and sum
    if by == "lse":
        tiles[..., 0] = -torch.inf
    call.out("tiles", tiles)
    call.run("tile_pool", b * h * chunks, call.dtype.itemsize * block_j * (block_i + 2))
    top, total = tiles.unbind(-1)
    merged = {
        "sum": lambda: total.sum(0),
        "max": lambda: top.amax(0),
        "lse": lambda: torch.logsumexp(top + total.log(), 0),
    }
    return merged[by]().to(call.dtype)


def _tile_of_each(edges: tuple[int, ...], n: int) -> Tensor:
    """The tile of every position, −1 outside the edges."""
    tiles = torch.full((n,), -1, device="cpu")
    tiles[edges[0] : edges[-1]] = torch.repeat_interleave(torch.tensor(edges, device="cpu").diff())
    return tiles
