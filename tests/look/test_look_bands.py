"""The summary of a long input, band by band: the same numbers as in one pass, in fewer products, with progress."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import regard
from regard.look import View, layers
from regard.look.bands import summarise

MATRICES = {
    "dot products": (regard.ScaledDot(), None),
    "a causal window": (regard.ScaledDot(), regard.causal() & regard.window(60, 0)),
    "two documents": (regard.Dot(), regard.documents(torch.arange(230) // 120)),
    "a soft cap": (regard.ScaledDot().softcap(2.0), regard.causal()),
    "biases of rows and keys": (
        regard.Cosine().bias(torch.arange(230.0).reshape(230, 1) / 40).bias(torch.linspace(0, 2, 230).reshape(1, 230)),
        None,
    ),
    "a sink": (regard.ScaledDot().sink(torch.tensor([1.0, 0.0])), None),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", MATRICES)
def test_bands_give_the_numbers_of_the_complete_matrix(name: str, threads: int) -> None:
    score, mask = MATRICES[name]
    numbers = torch.Generator().manual_seed(2)
    weights = regard.weights(
        torch.randn(2, 230, 8, generator=numbers), torch.randn(1, 230, 8, generator=numbers), score=score, mask=mask
    )
    reports: list[float] = []
    summary, most = summarise(weights, 7, 9, lambda step, done: reports.append(done), threads)
    assert reports == sorted(reports)
    assert (len(reports), reports[-1]) == (8, 1.0)
    for field in ("entropy", "lse", "received"):
        torch.testing.assert_close(getattr(summary, field), getattr(weights, field)())
    torch.testing.assert_close(summary.pool, weights.pool(7, 9))
    torch.testing.assert_close(most, weights.pool(7, 9, by="max"))
    values, indices = weights.peak()
    torch.testing.assert_close(summary.peak.values, values)
    assert torch.equal(summary.peak.indices, indices)


def test_a_row_without_keys_weighs_nothing() -> None:
    mask = regard.window(5, 0) & ~regard.window(10, 0) | regard.documents(
        torch.arange(40).clamp(min=10)
    ) & ~regard.window(0, 0)
    weights = regard.weights(torch.randn(1, 40, 4), mask=mask)
    empty = weights.dense()[0].sum(-1) == 0
    assert 0 < empty.sum() < 40
    summary, most = summarise(weights, 4, 4, lambda step, done: None)
    torch.testing.assert_close(most, weights.pool(4, 4, by="max"))
    assert float(summary.received.sum()) == pytest.approx(float((~empty).sum()))


def test_saving_a_long_input_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BANDS_FROM", 301)
    reports: list[tuple[str, float]] = []
    view: Any = View(regard.weights(torch.randn(310, 4)))
    view._report = lambda step, done: reports.append((step, done))
    view.html()
    assert reports[0] == ("summing up every row", 0.0)
    assert reports[-1] == ("summing up every row", 1.0)
    assert len(reports) == 78


def test_what_a_report_raises_ends_the_work_and_leaves_the_threads_as_they_were() -> None:
    before, reports = torch.get_num_threads(), []

    def stop(step: str, done: float) -> None:
        reports.append(done)
        if done > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        summarise(regard.weights(torch.randn(1, 200, 4)), 40, 5, stop, threads=2)
    assert reports[-1] == pytest.approx(9 / 40)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before] == [torch.get_num_threads()]
