"""`W.explain` names what serves a request, without computing it, and gives the reason why faster ways do not."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.engines import blockwise, numba, replay


def lines(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled tiles", "plain tiles"])
def test_passes_are_those_of_the_request(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "enabled", compiled)
    together = compiled and numba.load() is not None
    W = regard.weights(torch.randn(2, 5, 4))
    assert lines(W.explain())["passes over the keys"].startswith("1: rows (lse")
    both = lines(W.explain("received", topk=2, values=torch.randn(5, 3)))["passes over the keys"]
    assert both.startswith(f"{1 if together else 2}: rows (topk_scores")
    assert both.endswith(f"{' and' if together else ','} columns (received)")


def test_kernels_are_those_that_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    W = regard.weights(torch.randn(2, 5, 4))
    compiled = numba.load() is not None
    assert ("compiled" in lines(W.explain())["kernels"]) == compiled
    monkeypatch.setattr(numba, "enabled", False)
    plain = lines(W.explain())
    assert plain["kernels"] == "tiles in plain PyTorch"
    assert "REGARD_COMPILED" in plain["why not compiled tiles"]


@pytest.mark.parametrize(
    ("W", "reason"),
    [
        (lambda: regard.weights(torch.eye(3), score=regard.Similarity(lambda q, k: q @ k.mT)), "dot products"),
        (lambda: regard.weights(torch.eye(3), score=regard.Dot().modify(lambda s, i, j: s)), "modify(f)"),
        (lambda: regard.weights(torch.zeros(5000, 1), mask=lambda i, j: (i * 3 + j) % 4 != 1), "the mask"),
    ],
)
def test_compiled_tiles_say_why_they_do_not_serve(W, reason) -> None:
    assert reason in lines(W().explain("entropy"))["why not compiled tiles"]


def test_a_chosen_engine_is_named() -> None:
    x = torch.eye(3)
    assert lines(regard.weights(x, engine="blockwise").explain())["engine"] == "blockwise"
    assert lines(regard.weights(x, engine="reference").explain())["engine"] == "reference"
    assert lines(regard.Weights.from_dense(x).explain("entropy"))["engine"] == "reference"
    assert "cannot serve: it needs" in regard.weights(x, engine="triton").explain()


def test_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise.Blockwise, "compute", lambda *_: pytest.fail("computed"))
    regard.weights(torch.randn(2, 5, 4), mask=regard.causal()).explain("entropy", "received", topk=3, pool=(2, 2))


def test_replay_is_shown_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    W = regard.weights(torch.randn(2, 5, 4))
    assert "replay" not in lines(W.explain())
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    assert lines(W.explain())["replay"].startswith("on")
    monkeypatch.setattr(replay, "enabled", False)
    assert "REGARD_REPLAY=0" in lines(W.explain())["replay"]
    assert not replay.is_replayed_device(W.lse())


def test_an_unknown_statistic_is_refused_as_by_see() -> None:
    with pytest.raises(ValueError, match="unknown statistic 'entropi'"):
        regard.weights(torch.eye(3)).explain("entropi")
