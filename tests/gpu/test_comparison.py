"""Two matrices compared by the triton kernels on a GPU, judged by float64: long rows, full tiles and edges, every measure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard

MEASURES = ("kl", "cross_entropy", "js", "overlap", "total_variation")
MASKS = {
    "none": (None, None),
    "causal": (regard.causal(), regard.causal()),
    "window": (regard.window(90, 0), regard.causal()),
    "forbidden": (None, regard.window(700, 130)),
}
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


def compared(leaves: list[Tensor], masks: str, measure: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    first, second = (regard.weights(*leaves[2 * n : 2 * n + 2], mask=mask) for n, mask in enumerate(MASKS[masks]))
    rows = getattr(first, measure)(second)
    seed = torch.linspace(-1, 2, rows.numel(), dtype=rows.dtype, device="cuda").reshape(rows.shape)
    return rows.detach(), torch.autograd.grad(rows, leaves, seed)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize(("d", "d2", "n"), [(128, 64, 512), (64, 64, 333)])
def test_a_measure_and_its_gradients_are_those_of_float64(
    d: int, d2: int, n: int, dtype: torch.dtype, masks: str, measure: str
) -> None:
    leaves = [torch.randn(2, h, n, size, device="cuda").to(dtype) for h, size in ((4, d), (2, d), (4, d2), (4, d2))]
    want, exact = compared([x.double() for x in leaves], masks, measure)
    finite = want.isfinite()
    for _ in range(3):  # computed, recorded, replayed
        got, grads = compared(leaves, masks, measure)
        assert torch.equal(got.isfinite(), finite)
        torch.testing.assert_close(got[finite], want[finite].float(), rtol=2e-5, atol=2e-5)
        for g, e in zip(grads, exact, strict=True):
            error = (g.double() - e).norm() / e.norm()
            # ds is rounded to the inputs' type before its product, and the sum of the products after it.
            assert error <= 2 * ROUNDOFF[dtype]
