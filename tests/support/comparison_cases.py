"""Pairs of matrices for the kernels that compare them, and a judge: on the CPU, in Triton's interpreter, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard

MEASURES = ("kl", "cross_entropy", "js", "overlap", "total_variation")


def some_cells(i: int, j: int) -> Tensor:
    cells = torch.rand(2, i, j, generator=torch.Generator().manual_seed(3)) < 0.7
    cells[:, i // 2] = False  # a row with no key
    return cells


class ComparisonCase:
    """Two matrices: heads, key heads and sizes of each, their masks and scores."""

    def __init__(self, *sides: tuple[int, int, int, Any, str], batch: int = 1, i: int = 21, j: int = 37) -> None:
        self.sides, self.batch, self.i, self.j = sides, batch, i, j

    def leaves(self) -> list[Tensor]:
        return [x for h, g, d, *_ in self.sides for x in (torch.randn(self.batch, h, self.i, d), torch.randn(self.batch, g, self.j, d))]  # fmt: skip

    def matrices(self, leaves: list[Tensor], engine: str = "auto") -> list[regard.Weights]:
        slopes, bias = torch.linspace(0.1, 1, 2), torch.linspace(-1, 1, self.j)
        scores = {
            "scaled_dot": regard.ScaledDot(),
            "softcap": regard.ScaledDot().softcap(2.0),
            "alibi": regard.ScaledDot().alibi(slopes.to(leaves[0].dtype)),
            "bias": regard.ScaledDot().bias(bias.to(leaves[0].dtype)).softcap(3.0),
        }
        return [
            regard.weights(leaves[2 * n], leaves[2 * n + 1], score=scores[score], mask=mask, align="end", engine=engine)
            for n, (_, _, _, mask, score) in enumerate(self.sides)
        ]


CASES = {
    "no mask": ComparisonCase((2, 2, 8, None, "scaled_dot"), (2, 2, 3, None, "scaled_dot")),
    "groups, causal": ComparisonCase(
        (4, 2, 8, regard.causal(), "scaled_dot"), (4, 4, 8, regard.causal(), "softcap"), batch=2
    ),
    "one head for all": ComparisonCase((4, 2, 8, regard.causal(), "scaled_dot"), (1, 1, 8, None, "scaled_dot")),
    "all heads for one": ComparisonCase(
        (1, 1, 8, regard.window(5, 0), "scaled_dot"), (2, 1, 8, regard.causal(), "alibi")
    ),
    "several intervals": ComparisonCase((2, 2, 8, ~regard.window(2, 2), "bias"), (2, 2, 8, None, "scaled_dot")),
    "a tensor": ComparisonCase(
        (2, 2, 8, some_cells(21, 37), "scaled_dot"), (2, 2, 8, some_cells(21, 37), "scaled_dot")
    ),
    "forbidden keys": ComparisonCase((2, 2, 8, None, "scaled_dot"), (2, 2, 8, regard.window(40, 12), "scaled_dot")),
}


def compared(
    case: ComparisonCase, leaves: list[Tensor], measure: str, engine: str = "auto"
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The measure, and its gradients for a fixed seed; of infinite rows there is none."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    first, second = case.matrices(leaves, engine)
    rows = getattr(first, measure)(second)
    seed = torch.linspace(-1, 2, rows.numel(), dtype=rows.dtype).reshape(rows.shape)
    grads = torch.autograd.grad(rows, leaves, seed) if engine == "auto" else torch.autograd.grad(
        rows[rows.isfinite()], leaves, seed[rows.isfinite()])  # fmt: skip
    return rows.detach(), grads


def judged(name: str, measure: str) -> None:
    """Compare a measure and its gradients in float32 with the textbook in float64."""
    case = CASES[name]
    leaves = case.leaves()
    got, grads = compared(case, leaves, measure)
    want, exact = compared(case, [x.double() for x in leaves], measure, "reference")
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert name != "forbidden keys" or measure not in ("kl", "cross_entropy") or not finite.all()
    # Scores up to about 5 from 8 components, sums of 37 weights: some 30 roundings.
    torch.testing.assert_close(got[finite], want[finite].float(), rtol=3e-6, atol=3e-6)
    for g, e in zip(grads, exact, strict=True):
        e = torch.nan_to_num(e)  # the textbook's gradient beside an infinite row
        torch.testing.assert_close(g, e.float(), rtol=1e-5, atol=1e-5 * max(1.0, float(e.abs().max())))
