"""Pairs of matrices for the kernels that compare them, and a judge: on the CPU, in Triton's interpreter, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard

MEASURES = ("kl", "cross_entropy", "js", "overlap", "total_variation")
#: Masks of both matrices on a GPU.
MASKS = {
    "none": (None, None),
    "causal": (regard.causal(), regard.causal()),
    "window": (regard.window(90, 0), regard.causal()),
    "forbidden": (None, regard.window(700, 130)),
}
#: Of the inputs' type: ds is rounded to it before its product, and the sum of the products after it.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


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


def judged_where_a_row_is_nan(measure: str, broken: str, device: str = "cpu", engine: str = "auto") -> None:
    """A row of nan, by its scores in the second matrix or by its gradient, reaches the keys that it sees and no other."""
    cells = (torch.arange(37)[:, None] + torch.arange(37)).to(device) % 3 > 0
    for masks in ((regard.causal(), regard.causal()), (regard.window(3, 0), regard.causal()), (cells, cells)):
        leaves = [torch.randn(1, 2, 37, 8, device=device).requires_grad_() for _ in range(4)]
        nan = torch.zeros(1, 2, 37, device=device)
        nan[0, 1, 5] = torch.nan
        second = regard.ScaledDot().bias(nan[..., None]) if broken == "bias" else regard.ScaledDot()
        pair = [
            regard.weights(*leaves[2 * n : 2 * n + 2], mask=mask, score=score, engine=engine)
            for n, (mask, score) in enumerate(zip(masks, (regard.ScaledDot(), second), strict=True))
        ]
        rows = getattr(pair[0], measure)(pair[1])
        assert torch.equal(rows.isnan(), nan.isnan() & (broken == "bias"))
        grads = torch.autograd.grad((rows * (1 + nan) if broken == "gradient" else rows).sum(), leaves)
        seen = [W.detach()[:, :, 5].nan_to_num(1) > 0 for W in pair]
        for n, (g, keys) in enumerate(zip(grads[1::2], seen, strict=True)):
            here = g.isnan().any(-1)  # b h j
            assert not here[0, 0].any()
            # Of a weight of nan min and sign are no nan in the gradient of the other.
            of_all = broken == "gradient" or n == 1
            hit = here[0, 1] & keys[0, 1] if not of_all else keys[0, 1]
            assert torch.equal(here[0, 1], hit), f"keys of matrix {n}, {measure}, nan {broken}, {masks[0]!r}"


class PairOnGpu:
    """Two matrices on a GPU, and their judge: heads, key heads and sizes of each, and their masks."""

    def __init__(
        self, masks: str, heads: tuple[int, int], key_heads: tuple[int, int], sizes: tuple[int, int], n: int,
        keys: int | None = None, batch: int = 2, scale: float = 1.0, student_alone: bool = False,
    ) -> None:  # fmt: skip
        self.masks, self.heads, self.key_heads, self.sizes = MASKS[masks], heads, key_heads, sizes
        self.lengths, self.batch, self.scale = (n, n if keys is None else keys), batch, scale
        self.first_wanted = 2 if student_alone else 0  # of the leaves q, k, q', k'

    def draw(self, dtype: torch.dtype) -> list[Tensor]:
        return [
            (torch.randn(self.batch, h, n, d, device="cuda") * factor).to(dtype)
            for d, *both in zip(self.sizes, self.heads, self.key_heads, strict=True)
            for h, n, factor in zip(both, self.lengths, (self.scale, 1.0), strict=True)
        ]

    def matrices(self, leaves: list[Tensor], engine: str = "auto") -> list[regard.Weights]:
        return [
            regard.weights(*leaves[2 * n : 2 * n + 2], mask=mask, align="end", engine=engine)
            for n, mask in enumerate(self.masks)
        ]

    def compared(self, leaves: list[Tensor], measure: str, seed: Tensor, engine: str = "auto") -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """The measure, and its gradients for a seed that is 0 in infinite rows."""
        leaves = [x.detach().requires_grad_(n >= self.first_wanted) for n, x in enumerate(leaves)]
        first, second = self.matrices(leaves, engine)
        rows = getattr(first, measure)(second)
        finite = seed != 0
        return rows.detach(), torch.autograd.grad(
            rows[finite], leaves[self.first_wanted :], seed.to(rows.dtype)[finite]
        )

    def judge(self, measure: str, dtype: torch.dtype, times: int = 3) -> list[tuple[float, float]]:
        """Judge a measure by float64. Returns for each gradient its error and the bound: in float32 twice that of the textbook's
        formulas in float32."""
        leaves = self.draw(dtype)
        exact = [x.double() for x in leaves]
        with torch.no_grad():
            first, second = self.matrices(exact, "reference")
            want, p, q = getattr(first, measure)(second), first.dense(), second.dense()
        finite = want.isfinite()
        seed = torch.linspace(-1, 2, want.numel(), dtype=torch.float64, device="cuda").reshape(want.shape) * finite
        if measure in (
            "overlap",
            "total_variation",
        ):  # a sign that rounding decides, of one cell, is 1e-3 of a gradient
            seed = seed * ((p - q).abs() > 2.0**-18 * torch.maximum(p, q)).logical_or((p == 0) & (q == 0)).all(-1)
        want, exact_grads = self.compared(exact, measure, seed, "reference")
        bounds = [2 * ROUNDOFF[dtype]] * len(exact_grads) if dtype in ROUNDOFF else [
            2 * float((g.double() - e).norm() / e.norm())
            for g, e in zip(self.compared(leaves, measure, seed, "reference")[1], exact_grads, strict=True)
        ]  # fmt: skip
        errors = [0.0] * len(bounds)
        for _ in range(times):  # computed, recorded, replayed
            got, grads = self.compared(leaves, measure, seed)
            assert torch.equal(got.isfinite(), finite)
            torch.testing.assert_close(got[finite], want[finite].float(), rtol=2e-5, atol=2e-5)
            here = [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, exact_grads, strict=True)]
            errors = [max(pair) for pair in zip(errors, here, strict=True)]
        assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)
        return list(zip(errors, bounds, strict=True))
