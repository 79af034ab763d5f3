"""Training by several processes: the losses and weights of one process with the same batch, and one set of files."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import regard
from regard.learn.parallel import Replicas
from support.rank_models import losses_of
from support.rank_pool import RankPool

SMALL = {"dim": 8, "heads": 2, "layers": 1, "batch": 5, "eval_every": 3, "device": "cpu", "dropout": 0.0}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    if pool.workers:
        pool.stop()


@pytest.fixture
def data(tmp_path):
    rng = random.Random(0)
    words = ["red", "cat", "sat", "mat", "the", "a", "dog"]
    lines = [" ".join(rng.choices(words, k=rng.randint(2, 7))) for _ in range(60)]
    for place in ("one", "two"):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "text").write_text("\n".join(lines))
        (folder / "en").write_text("\n".join(lines))
        (folder / "de").write_text("\n".join(line[::-1] for line in lines))
    return tmp_path


def close(got, want) -> None:
    for name in ("loss", "val_loss"):
        assert [step for step, _ in got[name]] == [step for step, _ in want[name]]
        assert [x for _, x in got[name]] == pytest.approx([x for _, x in want[name]], rel=1e-5)
    for name, t in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], t, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["lm", "translate"])
def test_two_processes_have_the_losses_of_one(ranks, data, kind) -> None:
    settings = SMALL | {"steps": 6} | ({"context": 8} if kind == "lm" else {"vocabulary": 40})
    if kind == "lm":  # five sequences in parts of two, two and one; the run is resumed
        settings |= {"accumulate": 2}
        regard.learn.lm(data / "one" / "text", data / "one" / "run", **settings)
        runs = [settings | {"steps": 3}, {"steps": 6, "resume": True}]
    else:
        regard.learn.translate(data / "one" / "en", data / "one" / "de", data / "one" / "run", **settings)
        runs = [settings]
    want = losses_of(data / "one" / "run")
    both = ranks.run(2, "support.rank_models.trained", kind, str(data / "two"), runs)
    assert [rank["step"] for rank in both] == [6, 6]
    assert both[0]["best"] == both[1]["best"]
    if kind == "lm":  # the learning rate follows the longer run from step 3 on
        regard.learn.lm(data / "one" / "text", data / "one" / "again", **(settings | {"steps": 3}))
        regard.learn.lm(data / "one" / "text", data / "one" / "again", steps=6, resume=True)
        want = losses_of(data / "one" / "again")
    close(both[0], want)
    files = sorted(file.name for file in (data / "two" / "run").iterdir())
    assert files == sorted(file.name for file in (data / "one" / "run").iterdir())


def test_parts_of_a_batch_go_to_one_process_each() -> None:
    parts = [(n, 0.2) for n in range(5)]
    shares = [Replicas(rank, 3, torch.device("cpu")).own_parts(parts) for rank in range(3)]
    assert [[part for part, _, _ in own] for own in shares] == [[0, 1], [2, 3], [4, 0]]
    assert [[round(weight, 6) for _, weight, _ in own] for own in shares] == [[0.6, 0.6], [0.6, 0.6], [0.6, 0.0]]
    assert all([travels for _, _, travels in own] == [False, True] for own in shares)
    alone = Replicas(0, 1, torch.device("cpu")).own_parts(parts)
    assert [weight for _, weight, _ in alone] == [0.2] * 5
