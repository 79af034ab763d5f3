"""Matrices for the kernels that profile heads, and a judge: in Triton's interpreter and on a GPU alike."""

from __future__ import annotations

from typing import Any

import torch

import regard
from regard.corpora.profile import SUMS, Profile, profile, targets_of

#: Relative rounding of the inputs' type does not matter: they are drawn in it, and products are added in float32.
BOUND = 2e-5


def some_cells(t: int) -> torch.Tensor:
    cells = torch.rand(t, t, generator=torch.Generator().manual_seed(3)) < 0.7
    cells[t // 2] = False  # a row with no key
    return cells


#: Name → (length, heads, heads of keys, score, mask).
CASES: dict[str, tuple[int, int, int, str, Any]] = {
    "no mask": (70, 2, 2, "plain", lambda t: None),
    "causal, groups": (110, 4, 2, "plain", lambda t: regard.causal()),
    "causal, full tiles": (128, 2, 1, "plain", lambda t: regard.causal()),
    "window, alibi": (97, 2, 2, "alibi", lambda t: regard.window(40, 3)),
    "cells, softcap and sink": (61, 2, 2, "softcap", some_cells),
    "several intervals, bias": (80, 2, 2, "bias", lambda t: ~regard.window(2, 2)),
    "one token": (1, 2, 2, "plain", lambda t: regard.causal()),
}


def measured(name: str, dtype: torch.dtype, device: str, engine: str, double: bool) -> Profile:
    t, h, g, score_name, mask = CASES[name]
    make = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=make).to(dtype).to(device)
        return x.double() if double else x

    q, k = draw(2, h, t, 16) * 2, draw(2, g, t, 16)
    scores = {
        "plain": lambda: regard.ScaledDot(),
        "alibi": lambda: regard.ScaledDot().alibi(draw(h).abs() / 8),
        "softcap": lambda: regard.ScaledDot().softcap(2.0).sink(draw(h)),
        "bias": lambda: regard.ScaledDot().bias(draw(h, t, t)),
    }
    cells = mask(t)
    cells = cells.to(device) if isinstance(cells, torch.Tensor) else cells
    weights = regard.weights(q, k, score=scores[score_name](), mask=cells, engine=engine)
    ids = torch.randint(12, (2, t), generator=make)
    return profile(weights, targets_of(ids))


def judged(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare the triton engine with float64: every sum within its bound, the strongest weight at its place."""
    mine = measured(name, dtype, device, "triton", False)
    right = measured(name, dtype, device, "blockwise", True)
    for n in range(mine.sums.shape[-1]):
        what = SUMS[n] if n < len(SUMS) else f"bin {n - len(SUMS)}"
        a, b = mine.sums[..., n].cpu(), right.sums[..., n].cpu()
        slack = BOUND * b.abs() + BOUND
        assert bool(((a - b).abs() <= slack).all()), f"{name}: {what} is {a.tolist()}, must be {b.tolist()}"
    assert torch.equal(mine.query.cpu(), right.query.cpu()), f"{name}: queries {mine.query} for {right.query}"
    assert torch.equal(mine.key.cpu(), right.key.cpu()), f"{name}: keys {mine.key} for {right.key}"
    torch.testing.assert_close(mine.tie.double().cpu(), right.tie.double().cpu(), rtol=BOUND, atol=BOUND)
