"""PyTorch's own sample inputs for `scaled_dot_product_attention`, through `attend`.

They never pass their grouped-heads flag and drop a sample with values of another size, so those are added here.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's own test files, while they are imported
    from torch.testing._internal import common_methods_invocations as invocations


def samples(dtype: torch.dtype, grad: bool) -> list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    drawn = invocations.sample_inputs_scaled_dot_product_attention(None, "cpu", dtype, grad)
    calls = [((s.input, *s.args), s.kwargs) for s in drawn]
    extra = [
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 5)),
        ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
        ((2, 4, 3, 8), (2, 1, 6, 8), (2, 1, 6, 3)),
    ]
    for shapes in extra:
        q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes)
        calls.append(((q, k, v), {"enable_gqa": k.shape[1] != q.shape[1]}))
    return calls


def ours(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any], engine: str) -> Tensor:
    """The same request in this library's words."""
    score: Any = regard.ScaledDot(kwargs.get("scale"))
    mask = None
    if (attn_mask := kwargs.get("attn_mask")) is not None:
        mask, score = (attn_mask, score) if attn_mask.dtype == torch.bool else (None, score.bias(attn_mask))
    if kwargs.get("is_causal"):
        mask = regard.causal() if mask is None else regard.causal() & mask
    return regard.attend(q, k, v, score=score, mask=mask, align="start", engine=engine)


def reference(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Tensor:
    wide = [x.double() for x in (q, k, v)]
    attn_mask = kwargs.get("attn_mask")
    attn_mask = attn_mask.double() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    return F.scaled_dot_product_attention(*wide, **{**kwargs, "attn_mask": attn_mask})


# Units of roundoff that a chain of products and an exp may cost, times the largest magnitude in the row.
SLACK = {torch.float64: 256 * 2**-53, torch.float32: 256 * 2**-24, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("engine", ["auto", "blockwise", "reference"])
def test_samples_of_pytorch_give_what_pytorch_gives(dtype: torch.dtype, engine: str) -> None:
    cases = [case for case in samples(dtype, grad=False) if not case[1].get("dropout_p")]
    assert len(cases) >= 10
    for (q, k, v), kwargs in cases:
        want, got = reference(q, k, v, kwargs), ours(q, k, v, kwargs, engine)
        assert got.dtype == dtype
        assert got.shape == want.shape
        scale = 1 + v.abs().max().item()
        torch.testing.assert_close(
            got.double(),
            want,
            rtol=0,
            atol=SLACK[dtype] * scale,
            msg=lambda m, s=(q.shape, k.shape, kwargs): f"{s}: {m}",
        )


@pytest.mark.parametrize("engine", ["auto", "blockwise"])
def test_samples_of_pytorch_have_the_gradients_pytorch_has(engine: str) -> None:
    for (q, k, v), kwargs in samples(torch.float64, grad=True):
        if kwargs.get("dropout_p"):
            continue
        leaves = [q, k, v]
        if (
            (attn_mask := kwargs.get("attn_mask")) is not None
            and attn_mask.is_floating_point()
            and attn_mask.requires_grad
        ):
            leaves.append(attn_mask)
        want, got = reference(q, k, v, kwargs), ours(q, k, v, kwargs, engine)
        seed = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, leaves, seed), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2**12 * 2**-53 * (1 + b.abs().max().item()))
