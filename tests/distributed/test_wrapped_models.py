"""Layers of regard under FSDP2 and DistributedDataParallel: one process's outputs and gradients, and one report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    if pool.workers:
        pool.stop()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["lm", "translator", "encoder"])
def test_outputs_and_gradients_are_those_of_one_process(ranks, how, kind) -> None:
    for pairs in ranks.run(2, "support.rank_models.gradients", how, kind):
        assert len(pairs) > 5
        for name, (got, want) in pairs.items():
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_wrapped_model_is_recorded_and_watched_and_reports_once(ranks, how, tmp_path) -> None:
    first, second = ranks.run(2, "support.rank_models.recorded", how, str(tmp_path))
    for rank in (first, second):
        assert rank["names"]
        assert rank["same"] == [True, True]
        assert rank["watched"] == 2
        assert rank["files"] == ["seen.regard"]
        assert rank["readable"] == 2
    assert (first["calls"], second["calls"]) == ([0], [])
    assert first["warnings"] > 0  # every head is below collapse=2.0
    assert second["warnings"] == 0


def test_a_layer_on_dtensors_is_recorded_with_the_sequences_that_each_rank_has(ranks) -> None:
    for rank in ranks.run(2, "support.rank_models.recorded_dtensors", 0):
        shapes = [((2, 2, 6, 6), (2, 2, 6, 6), (2, 2, 6, 4))]
        assert rank == {"answered": True, "refused": [], "same": [True], "shapes": shapes}


@pytest.mark.parametrize(
    ("dim", "padded", "reason"),
    [(1, False, "its sequence is split over ranks"), (0, True, "sequences and heads of which this rank has a part")],
)
def test_a_layer_on_dtensors_that_no_rank_has_all_of_is_named(ranks, dim, padded, reason) -> None:
    for rank in ranks.run(2, "support.rank_models.recorded_dtensors", dim, padded):
        assert rank["answered"]
        assert rank["same"] == []
        assert len(rank["refused"]) == 1
        assert reason in rank["refused"][0]
