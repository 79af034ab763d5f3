"""Row and column statistics from one pass over the scores, as exact as two passes over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.core.problem import Problem
from regard.core.stats import Request, Results, Tiling
from regard.engines import get_engine
from regard.engines import numba as compiled

pytestmark = pytest.mark.skipif(compiled.load() is None, reason="no compiled tiles on this machine")

#: Two heads share keys; rows fill two tiles and some, keys two.
B, H, G, I, J, D = 2, 4, 2, 150, 600, 12
COLUMNS = ("received", "pool", "z")
ROWS = ("norm", "lse", "max_score", "entropy", "mean_distance", "topk_scores", "topk_indices", "y")

MASKS = {
    "no mask": lambda: None,
    "causal": regard.causal,
    "window": lambda: regard.window(40, 9),
    "two intervals": lambda: ~regard.window(200, 90),
    "padding": lambda: regard.padding(torch.tensor([0, 417])),
    "cells": lambda: torch.rand(I, J) > 0.6,
    "causal cells": lambda: regard.causal() & (torch.rand(I, J) > 0.6),
}
SCORES = {
    "plain": lambda: regard.ScaledDot(),
    "sink and cap": lambda: regard.ScaledDot().softcap(9.0).sink(torch.randn(H)),
    "alibi and bias": lambda: regard.ScaledDot().alibi(torch.rand(H)).bias(torch.randn(H, I, J)),
}
STRIPS = {"kept": compiled.STRIP, "too few": 1}


def problem(mask: object, score: regard.Score, dtype: torch.dtype, size: float = 3.0) -> Problem:
    q, k = size * torch.randn(B, H, I, D, dtype=dtype), torch.randn(B, G, J, D, dtype=dtype)
    W = regard.weights(q, k, score=score, mask=mask, align="end")
    return get_engine("blockwise").prepare(W._factors).with_lowered_mask()


def request(names: tuple[str, ...], dtype: torch.dtype) -> Request:
    v, u = torch.randn(B, G, J, 5, dtype=dtype), torch.randn(B, H, I, 3, dtype=dtype)
    return Request(names, topk=3, tiling=Tiling(7, 9, 0, I, 0, J), v=v, u=u)


def close(ours: Results, theirs: Results, of: Tensor) -> None:
    """Columns add up at most 64 rows in the type of the scores; a weight is a few roundings off."""
    eps = torch.finfo(of.dtype).eps
    for name in ours:
        size = theirs[name].abs().amax().item() if theirs[name].numel() else 0.0
        torch.testing.assert_close(ours[name], theirs[name], rtol=80 * eps, atol=80 * eps * size, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("strip", STRIPS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_one_pass_has_the_sums_of_two(
    mask: str, score: str, strip: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STRIP", STRIPS[strip])
    matrix, both = problem(MASKS[mask](), SCORES[score](), dtype), request((*ROWS, *COLUMNS), dtype)
    ours = compiled.forward(matrix, both)
    rows = compiled.forward(matrix, Request(ROWS, topk=3, v=both.v))
    columns = compiled.column_pass(matrix, Request(COLUMNS, tiling=both.tiling, u=both.u), rows["norm"])
    close(ours, {**rows, **columns}, matrix.q)
    seen = (rows["norm"][..., 1] > 0).sum(-1)
    if score != "sink and cap":  # a sink takes a share of every row
        torch.testing.assert_close(ours["received"].sum(-1), seen.to(dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strip", STRIPS)
def test_a_row_of_nan_reaches_the_keys_that_it_sees_and_no_other(strip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "STRIP", STRIPS[strip])
    q, k = torch.randn(1, 2, I, D), torch.randn(1, 2, J, D)
    q[0, 1, 70, 3] = torch.nan
    cells = torch.rand(I, J) > 0.5
    received = regard.weights(q, k, mask=cells).see("entropy", "received").received
    assert not received[0, 0].isnan().any()
    assert torch.equal(received[0, 1].isnan(), cells[70])


def test_a_strip_that_holds_some_blocks_of_rows_alone_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 1100, D)
    W = regard.weights(q, mask=regard.causal())
    one_strip = W.see("lse", "received").received
    monkeypatch.setattr(compiled, "STRIP", 2 * 128 * 512)  # of three tiles of the last rows
    two_ways = regard.weights(q, mask=regard.causal()).see("lse", "received").received
    torch.testing.assert_close(two_ways, one_strip, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one_strip.sum(-1), torch.full((1, 2), 1100.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_chunks_of_rows_are_added_up(threads: int) -> None:
    before = torch.get_num_threads()
    q, k, u = torch.randn(1, 1, 700, D), torch.randn(1, 1, 900, D), torch.randn(1, 1, 700, 2)
    truth = regard.weights(q.double(), k.double(), engine="reference")
    torch.set_num_threads(threads)
    try:
        W = regard.weights(q, k)
        received = W.see("entropy", "received").received
        collected = regard.weights(q, k).mT @ u
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(received.double(), truth.received(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(collected.double(), truth.mT @ u.double(), rtol=1e-5, atol=1e-5)
