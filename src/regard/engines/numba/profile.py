"""The profile of every head, compiled: the call of the kernel in `kernels/profile.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.problem import Problem
from ...core.stats import Results
from . import KernelCall, _chunks, _sum_chunks, _tile_size, serves

__all__ = ["profile_pass", "serves_profile"]


def serves_profile(problem: Problem) -> bool:
    """Whether the kernel can profile this matrix."""
    return serves(problem) and 0 not in problem.shape


def profile_pass(problem: Problem, rows: Results, targets: Tensor) -> Results:
    """All sums of finished rows, as `core/rows/head_profile.py` names them."""
    b, h, i, j = problem.shape
    block_i, block_j = _tile_size(problem)  # tiles whose products are those that the norm was computed from
    call = KernelCall(problem, block_i, block_j)
    chunks = _chunks(i, b * h, block_i)
    call.set(chunks=chunks)
    call.out("norm", rows["norm"].contiguous())
    call.out("targets", targets.expand(b, 1, i, 1).contiguous())
    received = call.out("received", torch.zeros(chunks, b, h, j, dtype=torch.float64, device="cpu"))
    diagonals = call.out("diagonals", torch.zeros(chunks, b, h, i + j - 1, dtype=torch.float64, device="cpu"))
    first = call.out("first", torch.zeros(b, h, i, dtype=call.dtype, device="cpu"))
    at_target = call.out("at_target", torch.zeros(b, h, i, dtype=call.dtype, device="cpu"))
    tie = call.out("tie", torch.zeros(chunks, b, h, dtype=call.dtype, device="cpu"))
    query = call.out("tie_query", torch.zeros(chunks, b, h, dtype=torch.int64, device="cpu"))
    key = call.out("tie_key", torch.zeros(chunks, b, h, dtype=torch.int64, device="cpu"))
    call.run("profile", b * h * chunks, call.dtype.itemsize * (block_i * block_j + block_i + 2 * block_j))
    best = tie.max(0, keepdim=True)  # of equal ones the first chunk
    return {
        "received": _sum_chunks(received),
        "diagonals": _sum_chunks(diagonals),
        "first": first[..., 1:],
        "target": at_target,
        "tie": best.values[0],
        "query": query.gather(0, best.indices)[0],
        "key": key.gather(0, best.indices)[0],
    }
