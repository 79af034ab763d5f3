"""Patterns of heads as they learn: stored at every validation, resumed, verified, and shown by `regard look run/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.learn import checkpoint, lm, open_model, patterns, translate
from regard.learn.patterns import read_patterns
from regard.look import View
from support.page_probe import Read, history

pytest.importorskip("tokenizers")
SMALL = {"dim": 8, "heads": 2, "layers": 1, "device": "cpu"}
TEXT = "the cat sat on the mat. the dog ran. " * 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_text(TEXT)
    lm(folder / "text", folder / "run", steps=6, context=16, eval_every=2, **SMALL)
    return folder / "run"


def test_every_validation_stores_what_every_head_gives(run: Path) -> None:
    stored = read_patterns(run)
    assert stored.steps == [2, 4, 6]
    assert list(stored.layers) == ["body.blocks.0.attention"]
    rows, cols = stored.tokens["body.blocks.0.attention"]
    assert rows == cols
    text = TEXT[int(len(TEXT) * 0.9) :][:16]
    assert "".join(rows) == text
    # The best model gives the same weights as the look at its step, in 255 steps.
    _, fields = checkpoint.read_tensors(run / checkpoint.MODEL)
    look = stored.layers["body.blocks.0.attention"][stored.steps.index(int(fields["step"]))]
    assert look.shape == (2, 16, 16)
    trained = open_model(run)
    with regard.record(trained.model) as seen:
        trained.model(trained.ids(text))
    torch.testing.assert_close(look / 255, seen[0][0].dense().detach(), atol=3e-3, rtol=0)


def test_a_resumed_run_has_the_patterns_of_an_uninterrupted_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    settings = {"steps": 6, "context": 16, "eval_every": 2, **SMALL}

    class Stop(patterns.PatternLog):
        def look(self, model: Any, task: Any, step: int) -> None:
            super().look(model, task, step)
            if step == 4:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.learn.training.PatternLog", Stop)
        with pytest.raises(KeyboardInterrupt):
            lm(tmp_path / "text", tmp_path / "run", **settings)
    assert read_patterns(tmp_path / "run").steps == [2]
    lm(tmp_path / "text", tmp_path / "run", resume=True, **settings)
    again, first = read_patterns(tmp_path / "run"), read_patterns(run)
    assert again.steps == first.steps
    for name, looks in first.layers.items():
        assert all(torch.equal(a, b) for a, b in zip(looks, again.layers[name], strict=True))


def test_a_translator_stores_encoder_decoder_and_cross_attention(tmp_path: Path) -> None:
    (tmp_path / "en").write_text("a red cat\na blue dog\n" * 9)
    (tmp_path / "de").write_text("eine rote Katze\nein blauer Hund\n" * 9)
    translate(tmp_path / "en", tmp_path / "de", tmp_path / "run", steps=2, vocabulary=30, batch=4, **SMALL)
    stored = read_patterns(tmp_path / "run")
    shapes = {name: tuple(looks[0].shape) for name, looks in stored.layers.items()}
    assert {"encoder", "decoder"} == {name.split(".")[0] for name in shapes}
    for name, (rows, cols) in stored.tokens.items():
        assert shapes[name] == (2, len(rows), len(cols))
        assert stored.layers[name][0].sum() > 0
    assert len(shapes) == 3, "within either sentence, and from one to the other"


def test_many_looks_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LOOKS", 4)
    (tmp_path / "text").write_text(TEXT)
    lm(tmp_path / "text", tmp_path / "run", steps=6, context=16, eval_every=1, **SMALL)
    assert read_patterns(tmp_path / "run").steps == [1, 3, 5, 6]


def test_a_damaged_file_is_named(run: Path, tmp_path: Path) -> None:
    data = bytearray((run / checkpoint.PATTERNS).read_bytes())
    data[-5] ^= 1
    (tmp_path / checkpoint.PATTERNS).write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"patterns\.safetensors"):
        read_patterns(tmp_path)
    tensors, fields = checkpoint.read_tensors(run / checkpoint.PATTERNS)
    for wrong in ({**fields, "steps": "[1]"}, {**fields, "layers": '{"nothing": [[], []]}'}, {"steps": "x"}):
        checkpoint.save(tmp_path / checkpoint.PATTERNS, tensors, wrong)
        with pytest.raises(ValueError, match="damaged"):
            read_patterns(tmp_path)
    assert read_patterns(tmp_path / "nowhere").steps == []


def test_regard_look_opens_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], show: Any) -> None:
    assert main(["look", str(run)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("steps 1 to 6")
    page = tmp_path / "run.html"
    assert main(["look", str(run), "--out", str(page)]) == 0
    header = Read(page.read_text()).header
    assert header["title"] == "Training of run"
    assert header["curves"][0][0] == "loss"
    assert header["patterns"]["steps"] == [2, 4, 6]
    assert main(["look", str(run), "--word", "cat"]) == 2
    assert "is a training run: leave out --word" in capsys.readouterr().err
    assert main(["look", str(run), "--json"]) == 2
    assert "leave out --json; its numbers are JSON in" in capsys.readouterr().err


def test_the_page_shows_the_pattern_of_a_head_at_every_look(run: Path, show: Any) -> None:
    stored = read_patterns(run)
    shown = show(View(history(), patterns=stored), reduced_motion="reduce")
    assert shown.texts(".patterns .headcell span") == ["2", "4", "6"]
    shown.tab.focus('[data-key="look"]')
    shown.tab.keyboard.press("Home")
    assert "step 2" in shown.text(".patterns .readout")
    assert shown.tab.locator(".patterns .headcell.on").get_attribute("data-key") == "look-0"
    shown.choose("pattern-head", 1)
    box = shown.tab.locator(".pattern-now").bounding_box()
    shown.tab.mouse.move(box["x"] + box["width"] * 0.5 / 16, box["y"] + box["height"] * 3.5 / 16)
    weight = float(stored.layers["body.blocks.0.attention"][0][1, 3, 0]) / 255
    assert float(shown.text('[data-read="pattern"]')) == pytest.approx(weight, abs=6e-3)
    shown.click("look-2")
    assert "step 6" in shown.text(".patterns .readout")
    assert shown.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
