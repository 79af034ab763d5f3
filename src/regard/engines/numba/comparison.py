"""Two matrices compared by compiled tiles: the calls of the kernels in `kernels/comparison.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.problem import Problem
from . import KernelCall, _chunks, _sum_chunks, serves

__all__ = ["backward", "forward_pass", "serves_pair"]

#: Measures that need no finished weights: their state merges, and one pass over the keys is enough.
MERGING = ("kl", "cross_entropy")
#: Rows and keys of a tile: two tiles of scores and two of keys in a core's cache.
BLOCK_I, BLOCK_J = 128, 256


def serves_pair(problems: tuple[Problem, Problem]) -> bool:
    """Whether the kernels can compute both matrices; a sink is one more outcome, which they do not compare."""
    return all(_serves_one(problem) and problem.sink is None for problem in problems)


def _serves_one(problem: Problem) -> bool:
    return serves(problem) and problem.compute_dtype == torch.float32 and 0 not in problem.shape


class _PairCall:
    """The calls of both matrices; the second is reached through the first."""

    def __init__(self, problems: tuple[Problem, Problem], measure: str) -> None:
        b, _, i, j = problems[0].shape
        self.heads = max(problem.shape[1] for problem in problems)
        self.rows = (b, self.heads, i)
        self.block_i, self.block_j = min(i, BLOCK_I), min(j, BLOCK_J)
        self.calls = [KernelCall(problem, self.block_i, self.block_j) for problem in problems]
        self.calls[0].set(measure=self.calls[0].runtime.kernels.MEASURES[measure], heads=self.heads)
        self.calls[0].work = b * self.heads * i * j * sum(problem.q.shape[3] for problem in problems)

    def run(self, kernel: str, items: int) -> None:
        first, second = self.calls
        first.other = second
        scratch = 4 * (self.block_j * (2 * self.block_i + 4) + 8 * self.block_i)
        first.run(kernel, items, scratch)

    def run_rows(self, kernel: str) -> None:
        b, h, i = self.rows
        self.run(kernel, b * h * -(-i // self.block_i))


def forward_pass(problems: tuple[Problem, Problem], measure: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The measure of every row (b, h, i), the norms of both matrices, and the row sums that centre their gradients."""
    pair = _PairCall(problems, measure)
    b, h, i = pair.rows
    norms = [call.out("norm", torch.empty(b, h, i, 2, dtype=torch.float32, device="cpu")) for call in pair.calls]
    value = pair.calls[0].out("value", torch.empty(b, h, i, dtype=torch.float32, device="cpu"))
    pair.run_rows("compare")
    if measure in MERGING:
        sees_keys = norms[0][..., 1] != 0
        return value, norms, [value.masked_fill(value == math.inf, 0), -sees_keys.float()]
    # Norms from these very tiles: that of another product is an ulp off, which large scores turn into wrong digits.
    deltas = [call.out("delta", torch.zeros(b, h, i, dtype=torch.float32, device="cpu")) for call in pair.calls]
    pair.run_rows("compare_finished")
    value = deltas[0] + deltas[1]
    return value.clamp(min=0) if measure == "js" else value, norms, deltas


def backward(
    problems: tuple[Problem, Problem], measure: str, norms: list[Tensor], deltas: list[Tensor], grad: Tensor,
    needs: Sequence[bool],
) -> list[tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Gradients of queries and keys of each matrix that needs them; `grad` (b, h, i) is 0 in infinite rows."""
    pair = _PairCall(problems, measure)
    b, h, i = pair.rows
    groups = math.gcd(*(problem.k.shape[1] if problem.shape[1] == h else 1 for problem in problems))
    chunks = _chunks(i, b * groups, pair.block_i)
    pair.calls[0].out("grad", grad.float().contiguous())
    pair.calls[0].set(chunks=chunks, groups=groups)
    outputs: list[tuple[Tensor, Tensor] | None] = []
    for call, problem, norm, delta, need in zip(pair.calls, problems, norms, deltas, needs, strict=True):
        call.out("norm", norm)
        call.out("delta", delta)
        if not need:
            outputs.append(None)
            continue
        dq = call.out("dq", torch.zeros(problem.q.shape, dtype=torch.float32, device="cpu"))
        dk = call.out("dk", torch.zeros(chunks, *problem.k.shape, dtype=torch.float32, device="cpu"))
        outputs.append((dq, dk))
    pair.run("compare_backward", b * groups * chunks)
    return [x if x is None else (x[0], _sum_chunks(x[1])) for x in outputs]
