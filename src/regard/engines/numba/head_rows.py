"""Heads taken together by compiled tiles: the calls of the kernels in `kernels/head_rows.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.problem import Problem
from ...core.stats import Request
from . import KernelCall, _sum_chunks, _tile_size, forward, serves

__all__ = ["backward", "forward_pass", "serves_heads"]

#: Chunks of rows for each thread: the last rows of a causal mask take longest.
CHUNKS = 4


def serves_heads(problem: Problem, other: Problem | None, heads: int) -> bool:
    """Whether the kernels can add up these heads and, if there is one, compare them with another matrix.

    The other matrix must show what the heads show: then no key is forbidden, and tiles are those of the heads' norm.
    """
    if not serves(problem) or problem.compute_dtype != torch.float32 or 0 in problem.shape:
        return False
    if other is None:
        return problem.sink is None
    if not serves(other, ("product", "relu_sum")) or other.modifiers or other.sink is not None:
        return False
    if other.compute_dtype != torch.float32:
        return False
    if other.similarity_kernel.kernel_op == "relu_sum" and other.shape[1] != 1:
        return False
    a, b = problem.intervals, other.intervals
    return a.exact and b.exact and torch.equal(a.lo, b.lo) and torch.equal(a.hi, b.hi)


class HeadCall:
    """The calls of the heads and of the other matrix, which is reached through the first."""

    def __init__(
        self, problem: Problem, norm: Tensor, shares: Tensor, heads: int, other: Problem | None, measure: str,
        divided: bool,
    ) -> None:  # fmt: skip
        b, _, i, _ = problem.shape
        self.rows = (b, heads, i)
        # The tiles of the pass that the norm is from: that of another product is an ulp off.
        self.block_i, self.block_j = _tile_size(problem)
        self.call = KernelCall(problem, self.block_i, self.block_j)
        self.call.out("norm", norm.contiguous())
        self.call.out("shares", shares.float().contiguous())
        self.call.set(measure=self.call.runtime.kernels.MEASURES[measure], heads=heads, divided=int(divided))
        self.other = self.call if other is None else KernelCall(other, self.block_i, self.block_j)
        if other is not None and other.similarity_kernel.kernel_op == "relu_sum":
            size = other.k.shape[3]
            self.other.set(D=size, index_heads=other.q.shape[3] // (size + 1))

    def run(self, kernel: str, items: int) -> None:
        self.call.other = self.other
        self.call.run(kernel, items, 4 * (3 * self.block_i * self.block_j + 4 * self.block_i))


def forward_pass(
    problem: Problem, norm: Tensor | None, shares: Tensor, heads: int, other: Problem | None, measure: str,
    divided: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The measure of every row (b, heads, i), and what a backward needs: the norm, that of the other, and row sums.

    `shares` (h + heads,) are the factors of all heads, then what divides the sum of each group.
    """
    if norm is None:
        norm = forward(problem, Request(("norm",)))["norm"]
    call = HeadCall(problem, norm, shares, heads, other, measure, divided)
    b, _, i = call.rows
    value = call.call.out("value", torch.empty(call.rows, dtype=torch.float32, device="cpu"))
    sums = call.call.out("delta", torch.empty(call.rows, dtype=torch.float32, device="cpu"))
    other_norm = (
        norm if other is None else call.other.out("norm", torch.empty(*call.rows, 2, dtype=torch.float32, device="cpu"))
    )
    call.run("head_rows", b * heads * -(-i // call.block_i))
    return value, [norm, other_norm, sums]


def backward(
    problem: Problem, shares: Tensor, other: Problem, divided: bool, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and keys of the other matrix."""
    norm, other_norm, sums = saved
    call = HeadCall(problem, norm, shares, grad.shape[1], other, "kl", divided)
    b, heads, i = call.rows
    call.call.out("delta", sums)
    call.call.out("grad", grad.float().contiguous())
    call.other.out("norm", other_norm)
    groups = other.k.shape[1] if other.shape[1] == heads else 1
    chunks = max(1, min(-(-i // call.block_i), CHUNKS * torch.get_num_threads() // (b * groups)))
    call.call.set(chunks=chunks, groups=groups)
    dq = call.other.out("dq", torch.zeros(other.q.shape, dtype=torch.float32, device="cpu"))
    dk = call.other.out("dk", torch.zeros(chunks, *other.k.shape, dtype=torch.float32, device="cpu"))
    call.run("head_rows_backward", b * groups * chunks)
    return dq, _sum_chunks(dk)
