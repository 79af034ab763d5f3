"""The law of the rows of training: three seeds, their mean, saved when the time is over, and gone on with."""

import os
from array import array
from types import SimpleNamespace

import pytest
from bench import learn
from torch import nn

from regard.learn import LMSettings, TranslateSettings


def test_a_row_is_the_mean_of_its_seeds_and_keeps_each(tmp_path):
    (tmp_path / "seconds").write_text("61.2")
    trained = SimpleNamespace(settings=LMSettings(device="cpu", optimizer="muon"), model=nn.Linear(100, 100))
    row = learn.row_of(learn.TASKS["cpu"], [1.5, 1.4, 1.75], trained, "validation loss 1.55", tmp_path)
    assert row.what == (
        "Tiny Shakespeare on a CPU: validation loss 1.55, three seeds 1.4000 to 1.7500, side by side in 61 s, "
        "0.01 M parameters"
    )
    assert row.shape == "4 layers, 4 heads, 128, context 64, 2000 steps of 12, muon"
    assert row.ratio == round(1.55 / 1.88, 4), "the mean, not the median"
    assert row.samples == [round(loss / 1.88, 4) for loss in (1.5, 1.4, 1.75)]
    assert (row.must, row.goal, row.better) == (round(1.62 / 1.88, 4), round(1.60 / 1.88, 4), "lower")
    trained.settings = TranslateSettings()
    row = learn.row_of(learn.TASKS["large"], [42.0, 41.0, 43.0], trained, "BLEU", tmp_path, ", beam 5")
    assert row.shape == "4 + 4 layers, 4 heads, 128, 6000 steps of 256, adamw, beam 5"
    assert (row.verdict(), row.better) == ("within the limit", "higher")


def test_every_row_of_training_has_flags_that_its_settings_know():
    for task in learn.TASKS.values():
        kind = LMSettings if task.kind == "lm" else TranslateSettings
        kind(**task.settings)
        assert "--compile" not in learn.flags({"compile": False})
        assert learn.flags({"eval_every": 3, "compile": True}) == ["--eval-every", "3", "--compile"]


def test_runs_that_are_stopped_go_on_and_end(tmp_path, monkeypatch):
    monkeypatch.setattr(learn, "SEEDS", range(1))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "tinyshakespeare.txt").write_text("the cat sat on the mat. " * 60)
    task = learn.TASKS["cpu"]
    settings = {"steps": 3, "dim": 8, "heads": 2, "layers": 1, "context": 8, "device": "cpu"}
    assert not learn.train(task, tmp_path, tmp_path / "out", settings, limit=0)
    assert learn.train(task, tmp_path, tmp_path / "out", settings, limit=600)
    monkeypatch.setattr(learn, "SEEDS", [0])
    row = learn.losses(task, tmp_path / "out")
    assert 0 < row.ratio < 4
    assert learn.seconds_of(tmp_path / "out") > 1
    with pytest.raises(SystemExit, match="--steps must be at least 1; got -1"):
        learn.train(task, tmp_path, tmp_path / "other", {**settings, "steps": -1}, limit=600)


def test_nanogpt_is_timed_by_the_lines_that_it_prints(tmp_path, monkeypatch):
    clock = iter([10.0, 11.0, 12.0, 14.0])
    monkeypatch.setattr(learn.time, "perf_counter", lambda: next(clock))
    lines = [
        "step 0: train loss 4",
        "iter 100: loss 3, time 1ms",
        "iter 200: loss 3",
        "iter 300: loss 2",
        "iter 400: loss 2",
    ]
    assert list(learn.rate(lines, 50)) == [100 * 50 / 1.0, 100 * 50 / 2.0]
    learn.prepare(tmp_path, "abcabcabcb")
    ids = array("H")
    ids.frombytes((tmp_path / "train.bin").read_bytes())
    assert list(ids) == [0, 1, 2, 0, 1, 2, 0, 1, 2]
