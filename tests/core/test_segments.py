"""Segments of keys become runs of adjacent keys, whose weights add up to those of the segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.core.masks import intervals
from regard.core.rows import segments
from regard.core.rows.segments import FEW_RUNS, SHORTEST_RUN, Runs, runs_of

CPU = torch.device("cpu")


def summed(runs: Runs, w: Tensor) -> Tensor:
    by_run = [w[..., a:z].sum(-1) for a, z in zip(runs.edges[:-1], runs.edges[1:], strict=True)]
    return runs.masses(torch.stack(by_run, -1))


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40))
def test_the_runs_of_ids_hold_what_the_segments_hold(ids: list[int]) -> None:
    keys, w = torch.tensor(ids), torch.rand(3, len(ids))
    runs = runs_of(keys, len(ids), None, CPU)
    if max(ids) < 0:
        assert runs is None
        return
    right = torch.stack([(w * (keys == n)).sum(-1) for n in range(max(ids) + 1)], -1)
    torch.testing.assert_close(summed(runs, w), right)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6))
def test_the_runs_of_spans_that_overlap_hold_what_they_hold(spans: list[tuple[int, int]]) -> None:
    w = torch.rand(2, 40)
    slices = [slice(start, start + size) for start, size in spans]
    runs = runs_of(slices, 40, None, CPU)
    torch.testing.assert_close(summed(runs, w), torch.stack([w[..., part].sum(-1) for part in slices], -1))


def test_sorted_ids_are_their_own_runs() -> None:
    runs = runs_of(torch.tensor([-1, 0, 0, 1, 2, 2, -1]), 7, None, CPU)
    assert runs == Runs((1, 3, 4, 6), None)


def test_too_many_runs_are_none() -> None:
    n = SHORTEST_RUN * FEW_RUNS * 2
    assert runs_of(torch.arange(n) % 2, n, None, CPU) is None
    assert runs_of(torch.arange(n) // SHORTEST_RUN, n, None, CPU) is not None


@pytest.mark.parametrize(
    "keys", [torch.zeros(4), torch.zeros(3, dtype=torch.int64), torch.ones(4, dtype=torch.bool), [], "it", None]
)
def test_what_is_no_segments_is_left_to_the_error(keys: object) -> None:
    assert runs_of(keys, 4, None, CPU) is None


def test_ids_are_read_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "CACHING_DEVICES", ("cpu",))
    monkeypatch.setattr(segments, "_CACHE", {})
    ids = torch.tensor([0, 0, 1, 1])
    first = runs_of(ids, 4, None, CPU)
    assert runs_of(ids, 4, None, CPU) is first
    ids[1] = 1
    assert runs_of(ids, 4, None, CPU) == Runs((0, 1, 4), None)
    other = torch.tensor([0, 1, 1, 1])
    assert runs_of(other, 4, None, CPU) == Runs((0, 1, 4), None)
