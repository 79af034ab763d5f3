"""The cost model: its bytes are those that ranks exchange, its cells those of the mask, its rates those that were measured."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import regard
from regard import cost
from regard.distributed import MACHINES, Machine, Mesh, ring_trace, zigzag
from regard.distributed.cost import _cells, _ring_seconds
from regard.distributed.cost_split import EvenSplit, Share
from regard.distributed.shards import contiguous

MASKS = {"full": None, "causal": regard.causal(), "window": regard.window(70, 0), "both sides": regard.window(9, 30)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("what", ["statistics", "values", "second pass", "backward"])
def test_ranks_receive_the_bytes_that_it_says(ranks, mask, what) -> None:
    moved = ranks.run(3, "support.rank_cases.received_bytes", mask, what)
    predicted = regard.cost(
        (2, 4, 2, 4000, 8), (1, 1, 3), mask=MASKS[mask], itemsize=4, values=what in ("values", "backward"),
        second_pass=what == "second pass", backward=what == "backward",
    )  # fmt: skip
    assert max(moved) == predicted.received
    assert predicted.received > 4000


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(
    ("what", "dtype"),
    [*((what, torch.float32) for what in ("statistics", "values", "second pass", "backward")),
     ("backward", torch.bfloat16)],
)  # fmt: skip
def test_ranks_hold_the_bytes_that_it_says(ranks, mask, what, dtype) -> None:
    most = max(ranks.run(2, "support.rank_cases.tensor_bytes", mask, what, 4096, dtype))
    values = what in ("values", "backward")
    predicted = regard.cost(
        (1, 2, 1, 8192, 64), (1, 1, 2), mask=MASKS[mask], itemsize=dtype.itemsize, values=values, topk=0 if values else 8,
        second_pass=what == "second pass", backward=what == "backward",
        machine=Machine("", 1e12, 1e12, 1e12, 1e12, 1e9, 1e-5, 1e11, rows=256),
    )  # fmt: skip
    assert most / 1.2 < predicted.memory < 1.2 * most


def test_a_rank_holds_two_pieces_of_other_ranks_keys(ranks) -> None:
    one_mib = 2**20
    inputs, results = 3 * one_mib, 8192 * (4 * 6 + 12 * 8)
    for held in ranks.run(4, "support.rank_cases.tensor_bytes", "full", "statistics", 2048):
        # Two pieces of half a MiB each out of six, and the temporaries of a block of 256 rows.
        assert inputs + results + one_mib < held < inputs + results + 1.6 * one_mib


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("n", [1, 2, 9, 64])
def test_cells_are_those_of_the_mask(mask, n) -> None:
    W = regard.weights(torch.zeros(n, 2), mask=MASKS[mask])
    assert _cells(n, (None, None) if MASKS[mask] is None else MASKS[mask].band()) == int((W.dense() > 0).sum())


def test_rates_are_those_that_were_measured() -> None:
    rows = json.loads((Path(__file__).parents[2] / "bench" / "results" / "gpu.json").read_text())
    ms = {
        row["what"]: row["ms"]
        for row in reversed(rows)
        if row["shape"] == [2, 16, 16384, 128, "causal"] and "Flex" not in row["against"]
    }
    cells = 2 * 16 * 16384**2 / 2
    forward = ms["y + lse + max + entropy"]
    second = ms["+ received + pool 64²"] - forward
    backward = ms["forward + backward, row statistics (deterministic)"] - forward
    for machine in MACHINES.values():
        assert machine.forward == pytest.approx(4 * 128 * cells / (forward / 1e3), rel=0.01)
        assert machine.second_pass == pytest.approx(2 * 128 * cells / (second / 1e3), rel=0.01)
        assert machine.backward == pytest.approx(10 * 128 * cells / (backward / 1e3), rel=0.01)


def test_a_trace_waits_for_keys_and_for_the_piece_before() -> None:
    hidden = ring_trace([4.0, 2.0, 2.0], [0.0, 3.0, 1.5])
    assert (hidden.seconds, hidden.computing) == (8.0, 8.0)
    # The second piece sets out when the first one is begun, at 4, and is there at 9.
    late = ring_trace([4.0, 2.0, 2.0], [0.0, 3.0, 5.0])
    assert late.seconds == 11.0
    assert late.steps[2] == (9.0, 9.0, 11.0)
    assert ring_trace([1.0], [0.0]).seconds == 1.0


def counted_shares(split: EvenSplit) -> list[Share]:
    """The shares of all ranks, position by position."""
    n, (before, after) = split.length, split.band
    cuts = [rank * n // split.ranks for rank in range(split.ranks + 1)]
    runs = zigzag(n, split.ranks) if split.zigzag else contiguous([b - a for a, b in pairwise(cuts)])
    own = [{place for run in of_rank for place in run} for of_rank in runs]
    seen = [
        {
            key
            for row in rows
            for key in range(0 if before is None else row - before, n if after is None else row + after + 1)
        }
        for rows in own
    ]
    return [
        Share(len(rows), len(keys & {*range(n)} - rows), sum(len(rows & other) for other in seen if other is not keys))
        for rows, keys in zip(own, seen, strict=True)
    ]


def test_shares_of_an_even_split_are_those_that_are_counted() -> None:
    chance = random.Random(0)
    for _ in range(300):
        zig, n = chance.random() < 0.5, chance.randrange(1, 60)
        before = None if zig or chance.random() < 0.3 else chance.randrange(30)
        after = chance.choice([0, 3, 20]) if zig else chance.choice([None, 0, 4, 25])
        split = EvenSplit(
            n, chance.randrange(1, max(2, n // (2 if zig else 1)) + 1) if n > 1 else 1, (before, after), zig
        )
        if not (zig and n < 2 * split.ranks):
            assert split.shares() == counted_shares(split), split


@pytest.mark.parametrize("band", [(None, None), (None, 0), (None, 9000), (4096, 0), (70_000, 30_000), (300_000, 0)])
def test_of_many_ranks_the_largest_shares_are_found_without_looking_at_all(band) -> None:
    split = EvenSplit(1_000_003, 1111, band, band[0] is None and band[1] is not None)
    looked_at, every = split.shares(), [split.share(rank) for rank in range(split.ranks)]
    assert len(looked_at) < 120
    # A part may be a position longer than the next one, and each position goes to all ranks at most.
    for number, abs_ in (
        (lambda s: s.rows, 2),
        (lambda s: s.incoming, 2),
        (lambda s: s.incoming + s.outgoing, 2 * 1111),
    ):
        assert max(map(number, every)) - max(map(number, looked_at)) <= abs_


def test_any_number_of_ranks_is_answered_at_once() -> None:
    began = time.process_time()
    for ranks in (10**6, 10**9):
        for mask in (None, regard.causal(), regard.window(4096, 0)):
            assert regard.cost((8, 32, 8, 2**20, 128), ranks, mask=mask, backward=True).fits
    assert regard.cost((1, 1, 1, 10**12, 128), 10**6, mask=regard.causal()).received > 10**12
    assert time.process_time() - began < 5


def test_equal_pieces_take_what_the_ring_takes_piece_by_piece() -> None:
    chance = random.Random(0)
    for _ in range(200):
        own, work, travel, less, sooner = (chance.choice([0.0, 1.0, chance.uniform(0, 9)]) for _ in range(5))
        pieces, last = chance.randrange(6), chance.choice([None, (less, sooner)])
        parts = [(own, 0.0)] + [(work, travel)] * pieces + ([last] if last else [])
        want = ring_trace([part[0] for part in parts], [part[1] for part in parts]).seconds
        assert _ring_seconds(own, pieces, (work, travel), last) == pytest.approx(want)


def test_the_mesh_that_exchanges_least_is_chosen_among_equals() -> None:
    shape = (2, 32, 8, 2**20, 128)
    assert regard.cost(shape, 2).mesh == Mesh(2, 1, 1)
    assert regard.cost(shape, 16).mesh == Mesh(2, 8, 1)
    assert regard.cost(shape, 16).received == 0
    assert regard.cost(shape, 64).mesh.sequence == 4
    assert regard.cost((1, 1, 1, 2**20, 64), 4096).mesh == Mesh(1, 1, 4096)


def test_memory_that_does_not_suffice_is_said() -> None:
    small = Machine("small", 1e12, 1e12, 1e12, 2**30, 1e9, 1e-5, 1e11)
    shape = (1, 8, 8, 2**20, 64)
    alone = regard.cost(shape, 1, machine=small)
    assert not alone.fits
    assert "does not fit" in str(alone)
    many = regard.cost(shape, 64, machine=small)
    assert many.fits
    assert many.memory < alone.memory / 30


def test_more_ranks_take_less_time_until_the_link_decides() -> None:
    seconds = [regard.cost((1, 8, 1, 10**7, 128), n, mask=regard.causal()).seconds for n in (1, 8, 64, 512)]
    assert seconds == sorted(seconds, reverse=True)
    slow = regard.cost((1, 8, 1, 2**20, 128), 4096, mask=regard.causal(), machine="h200-100gbit")
    assert slow.overlap < 0.5
    assert regard.cost((1, 8, 1, 2**20, 128), 8, mask=regard.causal(), machine="h200-nvlink").overlap > 0.95


def test_the_picture_is_the_one_that_the_model_draws(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import cost_plot

    assert cost_plot.PICTURE.read_text() == cost_plot.drawn(), "run: python docs/cost_plot.py"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": (1, 2)}, r"ranks >= 1 along \(batch, heads, sequence\); got \(1, 2\)"),
        ({"mesh": (0, 1, 1)}, r"ranks >= 1 along \(batch, heads, sequence\); got \(0, 1, 1\)"),
        ({"mask": 3}, r"must be causal\(\), window\(\) or both; got 3"),
        ({"topk": -1}, r"cost\(topk=\) must be a whole number >= 0; got -1"),
        ({"itemsize": "a"}, r"cost\(itemsize=\) must be a whole number >= 1; got 'a'"),
        ({"machine": 3}, r"must be a name of MACHINES or a Machine; got int"),
        ({"machine": replace(MACHINES["h200-nvlink"], forward=0)}, r"Machine\(forward=\) must be a rate > 0; got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cost(**{"shape": (1, 4, 2, 64, 8), "mesh": 2, **changes})


def test_numbers_of_ranks_and_pieces_are_checked() -> None:
    for length, count in ((-1, 2), (5, 0), (5.5, 2)):
        with pytest.raises(ValueError, match=r"zigzag.* takes whole numbers"):
            zigzag(length, count)
    with pytest.raises(ValueError, match="as many seconds of each; got 1 and 2"):
        ring_trace([1.0], [1.0, 2.0])


@pytest.mark.parametrize("backward", [False, True])
def test_more_work_never_costs_less(backward) -> None:
    for mask in MASKS.values():
        costs = [cost((1, 8, 2, 2**n, 64), (1, 1, 4), mask=mask, backward=backward) for n in range(10, 19)]
        for less, more in pairwise(costs):
            assert less.seconds <= more.seconds * 1.0001
            assert less.memory <= more.memory
        for option in ({"second_pass": True}, {"topk": 64}, {"itemsize": 4}):
            more = cost((1, 8, 2, 2**18, 64), (1, 1, 4), mask=mask, backward=backward, **option)
            assert costs[-1].seconds <= more.seconds * 1.0001
            assert costs[-1].memory <= more.memory


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"must be causal\(\), window\(\) or both"):
        regard.cost((1, 1, 1, 8, 2), 1, mask=regard.padding(torch.tensor([3])))
    with pytest.raises(ValueError, match="must divide batch and key heads"):
        regard.cost((1, 8, 2, 100, 8), (1, 4, 1))
    for shape in ((1, 4, 4, 8), (0, 4, 4, 8, 4), (1, 4, 4, 8.0, 4), (1, 4, 0, 8, 4), (1, 4, 4, -1, 4), "shape"):
        with pytest.raises(ValueError, match=r"\(batch, query heads, key heads, length, size\)"):
            regard.cost(shape, 2)
    with pytest.raises(ValueError, match="key heads must divide the query heads; got 3 and 4"):
        regard.cost((1, 4, 3, 8, 4), 2)
    with pytest.raises(ValueError, match=r"ranks >= 1; got 2\.5"):
        regard.cost((1, 4, 4, 8, 4), 2.5)
    with pytest.raises(ValueError, match=r"cost\(machine=\) must be .* or a Machine; got 'laptop'"):
        regard.cost((1, 4, 4, 8, 4), 2, machine="laptop")
    with pytest.raises(ValueError, match="ranks >= 1; got 0"):
        regard.cost((1, 8, 2, 100, 8), 0)
