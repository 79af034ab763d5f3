"""Tiles of a matrix for the kernels of `engines/triton/tile_pool_pass.py`, and a judge: in Triton's interpreter and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import regard
from regard.engines import replay
from regard.engines.triton import tile_pool_pass

#: Products are added in float32 and inputs are drawn in their type; a weight is as exact as its score is, and these reach 30.
BOUND = 2e-5


def some_cells(i: int, j: int) -> Tensor:
    cells = torch.rand(i, j, generator=torch.Generator().manual_seed(3)) < 0.3
    cells[i // 2] = False  # a row with no key
    return cells


#: Positions of keys in segments, which overlap.
SPANS = [slice(3, 30), slice(20, 44), [1, 46, 47]]

#: Name → (i, j, score, mask, what is asked).
CASES: dict[str, tuple[int, int, str, Callable[..., Any], Callable[[Any], Tensor]]] = {
    "narrow tiles by max": (40, 48, "plain", lambda i, j: None, lambda W: W.pool_blocks(8, 16, by="max")),
    "narrow tiles by lse, causal": (48, 48, "plain", lambda i, j: regard.causal(), lambda W: W.pool_blocks(16, 8, by="lse")),
    "narrow tiles by sum, window": (48, 50, "softcap", lambda i, j: regard.window(20, 3), lambda W: W.pool_blocks(16, 16)),
    "tiles askew by max, causal": (47, 47, "sink", lambda i, j: regard.causal(), lambda W: W.pool(3, 5, by="max")),
    "tiles askew by lse": (33, 50, "bias", lambda i, j: None, lambda W: W.pool(4, 7, by="lse")),
    "several intervals by lse": (48, 48, "plain", lambda i, j: ~regard.window(9, 20), lambda W: W.pool(4, 5, by="lse")),
    "cells by max": (40, 40, "softcap", some_cells, lambda W: W.pool_blocks(9, 13, by="max")),
    "a part by max": (48, 48, "plain", lambda i, j: regard.causal(), lambda W: W.pool(3, 2, slice(5, 41), slice(7, 39), by="max")),
    "a part by lse": (48, 48, "plain", lambda i, j: regard.window(30, 0), lambda W: W.pool(2, 2, slice(16, 48), slice(16, 32), by="lse")),
    "more tiles than positions": (9, 11, "plain", lambda i, j: regard.causal(), lambda W: W.pool(12, 15, by="max")),
    "huge scores by max": (40, 40, "huge", lambda i, j: regard.causal(), lambda W: W.pool(3, 3, by="max")),
    "far scores by lse": (40, 40, "far", lambda i, j: None, lambda W: W.pool_blocks(40, 9, by="lse")),
    "rows and key blocks": (40, 50, "plain", lambda i, j: None, lambda W: W.pool_blocks(1, 7)),
    "segments": (41, 48, "sink", lambda i, j: regard.causal(), lambda W: W.segment_mass(torch.arange(48, device=W.device) * 5 // 48)),
    "segments of several runs": (48, 48, "plain", lambda i, j: regard.window(20, 5), lambda W: W.segment_mass(
        torch.tensor([-1] * 6 + [1] * 10 + [0] * 20 + [2] * 3 + [1] * 9, device=W.device))),
    "recall of blocks": (47, 47, "plain", lambda i, j: regard.causal(), lambda W: W.recall(
        torch.rand(6, 5, generator=torch.Generator().manual_seed(1)).to(W.device) > 0.5, block=(8, 10))),
    "segments that overlap": (48, 48, "plain", lambda i, j: regard.causal(), lambda W: W.segment_mass(SPANS)),
}  # fmt: skip


def matrix(name: str, dtype: torch.dtype, device: str, double: bool, engine: str) -> regard.Weights:
    i, j, score_name, mask, _ = CASES[name]
    make = torch.Generator().manual_seed(len(name))

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=make).to(dtype).to(device)
        return x.double() if double else x

    q, k = draw(2, 4, i, 16) * 2, draw(2, 2, j, 16)
    scores = {
        "plain": lambda: regard.ScaledDot(),
        "softcap": lambda: regard.ScaledDot().softcap(2.0),
        "sink": lambda: regard.ScaledDot().sink(draw(4)),
        "bias": lambda: regard.ScaledDot().bias(draw(4, i, j)),
        "huge": lambda: regard.ScaledDot().bias(8000 * torch.ones_like(draw(1, 1, i, 1))),
        "far": lambda: regard.ScaledDot().bias(-512.0 * (torch.arange(j, device=device) // 9).to(q.dtype)),
    }
    cells = mask(i, j)
    cells = cells.to(device) if isinstance(cells, Tensor) else cells
    return regard.weights(
        q, k, score=scores[score_name](), mask=cells, align="start" if i == j else "end", engine=engine
    )


def judged(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare the kernels with float64, three times: computed, recorded, replayed."""
    ask = CASES[name][-1]
    right = ask(matrix(name, dtype, device, True, "blockwise"))
    replay.TAPES.clear()  # of another case with such tensors
    for turn in range(3):
        with mock.patch.object(tile_pool_pass, "_replayed", wraps=tile_pool_pass._replayed) as passes:
            mine = ask(matrix(name, dtype, device, False, "auto"))
        # A tape of the question launches them itself.
        assert passes.called or turn, f"{name}: the kernels were not asked"
        bound = 8000 * 2.0**-23 if "huge" in name else BOUND  # an ulp of a score is that of its weight
        slack = bound * right.abs() + BOUND / 10
        fine = (mine == right) | ((mine - right).abs() <= slack)
        assert bool(fine.all()), f"{name}, call {turn}: {mine.tolist()}, must be {right.tolist()}"
