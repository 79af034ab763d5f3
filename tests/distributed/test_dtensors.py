"""DTensors in, DTensors out: sharded batches and heads as they are, a sharded sequence in PyTorch's own split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    if pool.workers:
        pool.stop()


@pytest.mark.parametrize(
    ("world", "how", "shape"),
    [
        (2, "batch", (3, 4, 2, 9, 5)),
        (2, "heads", (2, 8, 2, 9, 5)),
        (2, "heads", (2, 1, 1, 9, 5)),  # the second rank has none
        (2, "batch", (1, 2, 1, 9, 5)),
        (2, "replicated", (1, 2, 1, 9, 5)),
        (3, "sequence", (2, 4, 2, 61, 5)),
        (3, "sequence", (1, 2, 1, 2, 4)),
        (4, "batch and sequence", (3, 4, 2, 13, 5)),
    ],
)
def test_results_and_gradients_are_those_of_one_process(ranks, world, how, shape) -> None:
    for pairs in ranks.run(world, "support.rank_dtensors.answers", how, shape):
        for name, (got, want) in pairs.items():
            if "sequence" in how or "gradient" in name:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
            else:  # the same kernels on the same numbers
                assert torch.equal(got, want), name


@pytest.mark.parametrize(
    ("world", "how"),
    [(2, "heads"), (3, "sequence"), (4, "batch twice"), (4, "heads and sequence")],
)
def test_questions_about_rows_are_answered_in_the_same_placements(ranks, world, how) -> None:
    for pairs in ranks.run(world, "support.rank_dtensors.questions", how):
        for name, (got, want) in pairs.items():
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("world", "what", "error", "text"),
    [
        (3, "another split", "RankError", "rank 0 of 3"),
        (2, "heads without their keys", "ValueError", "separate heads from their keys"),
        (2, "sharded sizes", "ValueError", "must be sharded on batch, heads or length"),
        (2, "plain values", "TypeError", "values must be a DTensor"),
        (2, "one of a sharded batch", "NotImplementedError", "batch and heads are sharded"),
        (
            2,
            "values of one rank",
            "RankError",
            "rank 1 of 2 cannot take part in this request: TypeError: values must be",
        ),
        (
            2,
            "vectors of one rank",
            "RankError",
            "rank 1 of 2 cannot take part in this request: TypeError: vectors must",
        ),
        (2, "keys of one rank", "RankError", "rank 1 of 2 cannot take part in weights(): TypeError: q and k must both"),
        (2, "a mask that is a DTensor", "RankError", "a tensor of score or mask must be a dense tensor"),
        (2, "positions of their own", "RankError", "DTensors say which positions a rank has; got Shards(rows=)"),
        (2, "another mesh", "ValueError", "DTensors say which mesh they are on, and q is on DeviceMesh"),
        (
            2,
            "a mesh of another kind",
            "TypeError",
            "mesh must be a DeviceMesh, a ProcessGroup or Shards(mesh, ...); got str",
        ),
        (2, "heads together", "NotImplementedError", "heads of DTensors are not taken together yet"),
        (2, "rows of a sharded sequence", "NotImplementedError", "not in the split of a DTensor"),
    ],
)
def test_other_placements_are_refused_on_every_rank(ranks, world, what, error, text) -> None:
    errors = ranks.run(world, "support.rank_dtensors.refused", what)
    assert len(set(errors)) == 1, errors
    assert errors[0][0] == error, errors
    assert text in errors[0][1], errors
