"""A sequence over ranks: every answer within the bound of one process, whatever the split; gradients to float64."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.configurations import assert_places, used
from support.rank_cases import SPLITS, ShardedCase, index_of, true_gradients
from support.rank_pool import RankPool

# Cells of (ranks, split, seed): the seed draws score, mask, dtype, sizes, alignment, exchange and length of pieces.
QUICK = [(world, split, 4 * world + n) for world in (1, 2, 3, 5) for n, split in enumerate(SPLITS)]
ALL = [(world, split, 1000 + 60 * world + 4 * batch + n) for world in (1, 2, 3, 5) for batch in range(15) for n, split in enumerate(SPLITS)]  # fmt: skip
EIGHT = [(8, split, 2000 + 4 * batch + n) for batch in range(15) for n, split in enumerate(SPLITS)]


@pytest.fixture(scope="module")
def eight_ranks():
    pool = RankPool(8)
    yield pool
    if pool.workers:
        pool.stop()


def hold(ranks, world: int, split: str, seed: int) -> None:
    case = ShardedCase(seed, world, split)
    got = case.joined(ranks.run(world, "support.rank_cases.answers", seed, split))
    truth = case.truth()
    for name, share in used(case, truth, got):
        assert share <= 1, f"{name} uses {share:.3g} of its bound: {case.about}, {case.rows}, {case.keys}"
    assert_places(case, truth, got)


@pytest.mark.parametrize(("world", "split", "seed"), QUICK)
def test_every_answer_stays_within_the_bound_of_one_process(ranks, world, split, seed) -> None:
    hold(ranks, world, split, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "split", "seed"), ALL)
def test_more_answers_stay_within_the_bound(ranks, world, split, seed) -> None:
    hold(ranks, world, split, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "split", "seed"), EIGHT)
def test_answers_over_eight_ranks_stay_within_the_bound(eight_ranks, world, split, seed) -> None:
    hold(eight_ranks, world, split, seed)


def hold_gradients(ranks, world: int, split: str, seed: int) -> None:
    case = ShardedCase(seed, world, split, torch.float64)
    parts = ranks.run(world, "support.rank_cases.gradients", seed, split)
    for place, (name, want) in enumerate(zip(parts[0], true_gradients(case, seed), strict=True)):
        if isinstance(name, int):  # parameters of the score: the gradient of all rows, on every rank
            got = parts[0][name]
            assert all(torch.equal(got, part[name]) for part in parts)
        else:
            runs = case.rows if name in ("q", "u") else case.keys
            values = torch.cat([part[name] for part in parts], 2)
            got = torch.empty_like(values).index_copy_(2, torch.cat([index_of(r) for r in runs]), values)
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9, msg=lambda m, n=place: f"gradient {n}: {m} {case.about}")  # fmt: skip


@pytest.mark.parametrize(("world", "split", "seed"), [cell for cell in QUICK if cell[0] in (2, 3)])
def test_gradients_are_those_of_one_process(ranks, world, split, seed) -> None:
    hold_gradients(ranks, world, split, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "split", "seed"), [cell for cell in ALL if cell[0] > 1])
def test_more_gradients_are_those_of_one_process(ranks, world, split, seed) -> None:
    hold_gradients(ranks, world, split, seed)


@pytest.mark.parametrize(
    "name",
    ["values", "received", *(pytest.param(name, marks=pytest.mark.slow) for name in ("entropy", "lse", "mean_distance", "pool"))],
)  # fmt: skip
def test_gradients_over_two_ranks_are_finite_differences(ranks, name) -> None:
    assert all(ranks.run(2, "support.rank_cases.gradcheck", name))


def test_gradients_of_distances_over_ranks_keep_their_digits(ranks) -> None:
    """In clusters far from the origin, at most twice as far off as plain PyTorch's; half an ulp of them is no error."""
    pooled: dict[str, list[float]] = {}
    for seed in range(3):
        for part in ranks.run(2, "support.rank_cases.distance_gradients", seed):
            for name, squares in part.items():
                pooled[name] = [a + b for a, b in zip(pooled.get(name, (0.0, 0.0, 0.0)), squares, strict=True)]
    for name, (ours, plain, exact) in pooled.items():
        assert ours <= 4 * max(plain, 2**-48 * exact), f"{name}: {(ours / plain) ** 0.5:.3g} times as far off"


def test_answers_about_all_rows_and_keys_are_refused_by_name(ranks) -> None:
    for texts in ranks.run(2, "support.rank_cases.entire_matrices"):
        assert len(texts) == 5, texts
        assert all("takes all rows and keys, and this rank has some of them" in text for text in texts)


def test_a_matrix_over_ranks_has_the_methods_of_any_other(ranks) -> None:
    for rank, seen in enumerate(ranks.run(2, "support.rank_cases.other_methods")):
        assert seen["shape"] == (2, 8, 8)
        assert seen["repr"].startswith(f"ShardedWeights(rank {rank} of 2, 2×8×8, ScaledDot(), causal(),")
        assert f"ranks: 2; rank {rank} has 4 of 8 rows and 4 of 8 keys" in seen["explained"]
        assert "without values" in seen["explained"]
        assert seen["word"]
        assert seen["head"]
        assert 0 < seen["cached"] < 1500, "a cached result needs texts alone, and no keys"
        assert seen["double"] == torch.float64
        assert not seen["detached"]
        assert seen["copied"]
        assert "cannot be pickled: its ranks are running processes" in seen["pickled"]
        # Under a causal mask the first rank sends its four keys, 2 heads × 5 floats each, and the last rank none.
        texts = seen["sent"] - (4 * 2 * 5 * 4 if rank == 0 else 0)
        assert 0 < texts < 1500


def test_functions_of_positions_are_called_with_global_ones(ranks) -> None:
    for pairs in ranks.run(2, "support.rank_cases.functions_of_positions"):
        for got, want in pairs:
            torch.testing.assert_close(got, want)


def test_scores_are_those_of_one_process(ranks) -> None:
    for pairs in ranks.run(2, "support.rank_cases.scores_of_cells"):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_pooled_map_alone_reads_no_rows_and_keys_of_other_ranks(ranks) -> None:
    for pairs in ranks.run(2, "support.rank_cases.pooled_alone"):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed on this machine")
def test_triton_over_ranks_agrees_with_the_textbook_in_the_interpreter() -> None:
    script = Path(__file__).parents[1] / "support" / "rank_triton.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
