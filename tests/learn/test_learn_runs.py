"""The law of training runs: interrupted, killed or out of disk, nothing is lost, and the end is the same to the bit."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from regard import cli
from regard.learn import (
    Diverged,
    LMSettings,
    TranslateSettings,
    checkpoint,
    history,
    is_checkpoint,
    lm,
    open_model,
    training,
    translate,
)
from regard.learn.optimizer import averaging_decay
from regard.learn.progress import TrainingProgress
from regard.learn.tasks import build
from regard.look import svg
from regard.look.run_report import write_report
from regard.nn import Block

TINY = {
    "steps": 12,
    "eval_every": 4,
    "batch": 3,
    "dim": 8,
    "heads": 2,
    "layers": 1,
    "context": 8,
    "device": "cpu",
    "dropout": 0.2,
    "ema": 0.9,
    "warmup": 3,
}
PAIRS = {
    "steps": 8,
    "eval_every": 4,
    "batch": 4,
    "dim": 8,
    "heads": 2,
    "layers": 1,
    "vocabulary": 60,
    "device": "cpu",
    "warmup": 2,
}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "over",
    "the",
    "street",
    "to",
    "see",
    "what",
    "the",
    "dog",
    "did",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    chance = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(" ".join(chance.choices(WORDS, k=6)) + "." for _ in range(60)))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> tuple[Path, Path]:
    chance = random.Random(0)
    folder = tmp_path_factory.mktemp("pairs")
    lines = [chance.choices(WORDS, k=chance.randint(2, 7)) for _ in range(40)]
    (folder / "a.en").write_text("\n".join(" ".join(line) for line in lines) + "\n")
    (folder / "a.de").write_text("\n".join(" ".join(word[::-1] for word in line) for line in lines) + "\n")
    return folder / "a.en", folder / "a.de"


@pytest.fixture(scope="module")
def finished_run(text, tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    lm(text, out, **TINY)
    return out


class Stopping(TrainingProgress):
    """Does something at a step."""

    def __init__(self, step: int, what) -> None:
        self.step, self.what = step, what

    def update(self, step: int, numbers) -> None:
        if step >= self.step and "val_loss" not in numbers:
            self.what()


def same(a: Path, b: Path) -> None:
    for name in ("model.safetensors", "last.safetensors"):
        mine, header = checkpoint.read_tensors(a / name)
        want, other_header = checkpoint.read_tensors(b / name)
        assert header == other_header
        assert mine.keys() == want.keys()
        for key in want:
            assert torch.equal(mine[key], want[key]), f"{name}: {key}"
        assert (a / name).read_bytes() == (b / name).read_bytes(), f"{name}: the same run is the same bytes"


# Interrupted and resumed.


@pytest.mark.parametrize("at", [1, 3, 5, 8, 11])
def test_an_interrupted_run_that_is_resumed_ends_with_the_same_bits(at, text, finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    out = tmp_path / "run"
    stopped = lm(text, out, progress=Stopping(at, lambda: os.kill(os.getpid(), signal.SIGINT)), **TINY)
    assert not stopped.finished
    assert at <= stopped.step <= at + 1
    assert lm(text, out, resume=True).finished
    same(out, finished_run)


@pytest.mark.parametrize("at", [3, 5])
def test_an_interruption_leaves_no_trace_in_the_history(at, text, finished_run, tmp_path):
    out, taken = tmp_path / "run", []
    own = training._Training._step

    def step(self, batch, watching):
        taken.append(self.step)
        if self.step + 1 == at:
            self.interrupted.signalled = True
        return own(self, batch, watching)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Training, "_step", step)
        assert lm(text, out, **TINY).step == at == len(taken)
    assert lm(text, out, resume=True).finished

    def rows(folder):
        every = checkpoint.read_history(folder)
        return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in every]

    assert rows(out) == rows(finished_run)


def test_looking_or_not_the_result_is_the_same(text, finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 5)
    lm(text, tmp_path / "run", **TINY)
    same(tmp_path / "run", finished_run)


def test_a_translator_is_resumed_to_the_same_bits_too(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    assert translate(*pairs, tmp_path / "whole", **PAIRS).finished
    translate(*pairs, tmp_path / "run", progress=Stopping(5, lambda: os.kill(os.getpid(), signal.SIGTERM)), **PAIRS)
    assert translate(*pairs, tmp_path / "run", resume=True).finished
    same(tmp_path / "run", tmp_path / "whole")


def test_a_run_killed_at_a_random_moment_is_resumed_to_the_same_bits(text, tmp_path):
    more = {**TINY, "steps": 250, "eval_every": 5}
    code = f"import torch; torch.set_num_threads(1); from regard.learn import lm; lm({str(text)!r}, {str(tmp_path / 'run')!r}, **{more!r})"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (tmp_path / "run" / "last.safetensors").exists():
            assert child.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        time.sleep(random.random() / 4)
    finally:
        child.kill()
        child.wait()
    step = int(checkpoint.read_tensors(tmp_path / "run" / "last.safetensors")[1]["step"])
    assert 5 <= step < 250, "it was killed on its way"
    assert lm(text, tmp_path / "run", resume=True).finished
    lm(text, tmp_path / "whole", **more)
    same(tmp_path / "run", tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_begins_again(text, finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(training._Training, "run", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lm(text, tmp_path / "run", **TINY)
    monkeypatch.undo()
    assert is_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match="saved no model yet"):
        open_model(tmp_path / "run")
    lm(text, tmp_path / "run", resume=True)
    same(tmp_path / "run", finished_run)


def test_a_finished_run_that_is_resumed_stays_as_it_is(text, finished_run):
    before = (finished_run / "last.safetensors").stat().st_mtime_ns
    assert lm(text, finished_run, resume=True).finished
    assert (finished_run / "last.safetensors").stat().st_mtime_ns == before


def test_the_callers_random_numbers_are_left_alone(text, tmp_path):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    lm(text, tmp_path / "run", **TINY)
    assert torch.equal(torch.rand(3), want)


def test_the_best_weights_are_kept_not_the_last(text, tmp_path, monkeypatch):
    losses = iter([3.0, 2.0, 5.0])
    weights = {}

    def validate(self, model):
        value = next(losses)
        weights[value] = {name: p.detach().clone() for name, p in model.named_parameters()}
        return value

    monkeypatch.setattr(training.tasks.LMTask, "validate", validate)
    result = lm(text, tmp_path / "run", **TINY)
    assert (result.best, result.val_loss) == (2.0, 5.0)
    saved, header = checkpoint.read_tensors(tmp_path / "run" / "model.safetensors")
    assert header == {"step": "8", "val_loss": "2.0"}
    assert all(torch.equal(saved[name], value) for name, value in weights[2.0].items())


# Disk, numbers, options.


def test_when_the_disk_is_full_the_checkpoint_of_before_stands(text, finished_run, tmp_path):
    out = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = (finished_run / "last.safetensors").stat().st_size // 2  # a real write that breaks off in the middle

    class Filling(TrainingProgress):
        def update(self, step, numbers) -> None:
            if step >= 6:
                resource.setrlimit(resource.RLIMIT_FSIZE, (half, limits[1]))

    try:
        with pytest.raises(
            OSError, match=r"last\.safetensors .* could not be written: .*the old file is unchanged.*--resume"
        ):
            lm(text, out, progress=Filling(), **TINY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.read_tensors(out / "last.safetensors")[1]["step"] == "4"
    assert not list(out.glob(".*part")), "nothing half-written is left"
    open_model(out)
    lm(text, out, resume=True)
    same(out, finished_run)


def test_a_full_disk_is_called_by_its_name(text, tmp_path, monkeypatch):
    def full(path, chunks):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "atomic_write", full)
    with pytest.raises(OSError, match=r"the disk is full\. Free some space, then start again"):
        lm(text, tmp_path / "run", **TINY)
    monkeypatch.undo()

    def second(path, chunks):
        if path.name == "settings.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        own_write(path, chunks)

    own_write = checkpoint.atomic_write
    monkeypatch.setattr(checkpoint, "atomic_write", second)
    with pytest.raises(OSError, match="start again"):
        lm(text, tmp_path / "run", **TINY)
    monkeypatch.undo()
    assert lm(text, tmp_path / "run", **TINY).finished, "nothing is left in the way"


@pytest.mark.parametrize(("number", "remedy"), [
    (errno.EROFS, "Read-only file system. Make the folder writable"), (errno.EIO, "error. Check the disk"),
    (errno.ENOSPC, "the disk is full. Free some space"),
])  # fmt: skip
def test_a_report_or_ids_that_cannot_be_written_say_what_helps(
    number, remedy, text, finished_run, tmp_path, monkeypatch
):
    def refuse(path, chunks):
        raise OSError(number, os.strerror(number), str(path))

    out = tmp_path / "run"
    shutil.copytree(finished_run, out)
    (out / "report.html").unlink(missing_ok=True)
    monkeypatch.setattr(checkpoint, "atomic_write", refuse)
    with pytest.raises(OSError, match=rf"report\.html \(.* bytes\) could not be written: .*{remedy}, then continue"):
        write_report(out)
    monkeypatch.setattr(training.tasks.corpus, "atomic_write", refuse)
    monkeypatch.setattr(training.tasks.corpus, "IN_MEMORY_BYTES", 0)
    with pytest.raises(OSError, match=rf"tokens\.bin could not be written: .*{remedy}, then start again"):
        lm(text, tmp_path / "new", **TINY)
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_checkpoint(text, tmp_path, monkeypatch):
    own = training.tasks.LMTask.loss
    calls = iter(range(10**6))

    def loss(self, model, batch):
        value = own(self, model, batch)
        return value * float("nan") if model.training and next(calls) == 6 else value

    monkeypatch.setattr(training.tasks.LMTask, "loss", loss)
    with pytest.raises(
        Diverged, match=r"NaN or infinite at step 8; the checkpoint of step 4 is in .*smaller --lr \(it is 0\.003\)"
    ):
        lm(text, tmp_path / "run", **TINY)
    tensors, message = checkpoint.read_tensors(tmp_path / "run" / "last.safetensors")
    assert message["step"] == "4"
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(p.isfinite().all() for p in open_model(tmp_path / "run").model.parameters())


def test_a_learning_rate_beyond_all_measure_is_told_on_the_command_line(text, tmp_path, capsys):
    code = cli.main(["learn", "lm", str(text), "--out", str(tmp_path / "run"), "--steps", "60", "--lr", "1e30", "--warmup", "0",
                     "--dim", "8", "--heads", "2", "--layers", "1", "--context", "8", "--device", "cpu"])  # fmt: skip
    assert code == 1
    message = capsys.readouterr().err
    assert "Try a smaller --lr" in message
    assert "nothing was saved yet" in message
    assert not (tmp_path / "run").exists()  # the same folder is free for another attempt


@pytest.mark.parametrize(("setting", "message"), [
    ("--hidden", "the model does not fit into memory: use a smaller --dim, --hidden"),
    ("--batch", "a step does not fit into memory: use a smaller --batch"),
])  # fmt: skip
def test_what_is_beyond_all_memory_leaves_its_folder_free(setting, message, text, tmp_path, capsys):
    words = ["learn", "lm", str(text), "--out", str(tmp_path / "in" / "run"), "--device", "cpu"]
    assert cli.main([*words, "--dim", "8", "--heads", "2", "--layers", "1", setting, str(10**13)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "in").exists()


def test_a_run_that_began_in_the_folder_meanwhile_is_left_alone(text, finished_run, tmp_path, monkeypatch):
    out, claimed = tmp_path / "run", training.run_folder.claimed
    (tmp_path / "other").write_text("another text " * 40)

    def meanwhile(folder):
        monkeypatch.setattr(training.run_folder, "claimed", claimed)
        lm(text, folder, **TINY)
        return claimed(folder)

    monkeypatch.setattr(training.run_folder, "claimed", meanwhile)
    with pytest.raises(ValueError, match="holds a run already"):
        lm(tmp_path / "other", out, **TINY)
    same(out, finished_run)


def test_a_mapped_text_is_not_written_into_the_folder_of_a_run(text, tmp_path, monkeypatch):
    """A run maps its token ids anew for each batch: those of another text must not take their place."""
    pytest.importorskip("fcntl")
    monkeypatch.setattr(training.tasks.corpus, "IN_MEMORY_BYTES", 0)
    (tmp_path / "other").write_text("another text " * 40)
    out, messages = tmp_path / "run", []
    own = training.tasks.corpus.write_tokens

    def meanwhile(*arguments) -> None:
        monkeypatch.setattr(training.tasks.corpus, "write_tokens", own)
        with pytest.raises(ValueError, match="is in use by another run") as wrong:
            lm(tmp_path / "other", out, **TINY)
        messages.append(wrong)
        own(*arguments)

    monkeypatch.setattr(training.tasks.corpus, "write_tokens", meanwhile)
    assert lm(text, out, **TINY).finished
    assert messages


def test_a_run_without_its_history_goes_on_and_one_without_its_best_model_does_not(text, tmp_path, capsys):
    out = tmp_path / "run"
    lm(text, out, **TINY)
    (out / "history.json").unlink()
    words = ["learn", "lm", str(text), "--out", str(out), "--resume"]
    assert cli.main(words) == 2
    assert f"regard: {out / 'history.json'} is missing" in capsys.readouterr().err
    assert cli.main([*words, "--steps", str(TINY["steps"] + 3)]) == 0
    assert (out / "report.html").exists(), "the first step that has no history reports the heads"
    (out / "model.safetensors").unlink()
    assert cli.main(words) == 2
    assert re.search(r"regard: .*model\.safetensors is missing.*another --out", capsys.readouterr().err)


def test_a_folder_without_a_name_is_no_folder(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["learn", "lm", str(text), "--out", ""]) == 2
    assert "argument --out: a path is needed" in capsys.readouterr().err
    assert not (tmp_path / "settings.json").exists()


def test_a_text_that_cannot_be_read_again_is_refused(tmp_path, capsys):
    for words in (["lm", "-"], ["translate", "en", "-"], ["translate", "en", "de", "--validation", "-", "de"]):
        assert cli.main(["learn", *words, "--out", str(tmp_path / "run")]) == 2
        assert "a file is needed, which --resume reads again" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_to_go_on_with_can_be_pasted(text, tmp_path, capsys):
    out = tmp_path / "my run"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    assert cli.main(["learn", "lm", str(text), "--out", str(out), *words]) == 0
    assert f"Try: regard generate '{out}' --prompt" in capsys.readouterr().err
    assert cli.main(["generate", ""]) == 2
    assert "argument DIR: a path is needed, got an empty one" in capsys.readouterr().err


def test_a_short_run_reaches_its_learning_rate(text, tmp_path):
    lm(text, tmp_path / "run", **{**TINY, "steps": 10, "eval_every": 1, "warmup": 1000})
    rates = [row["lr"] for row in checkpoint.read_history(tmp_path / "run") if "lr" in row]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert max(rates) == rates[1] == 3e-3


def test_what_a_killed_run_left_half_written_is_swept_away(text, tmp_path):
    lm(text, tmp_path / "run", **TINY)
    left, other = (tmp_path / "run" / name for name in (".last.safetensors.12-ab.part", ".notes.part"))
    left.write_bytes(b"half"), other.write_bytes(b"somebody's")
    lm(text, tmp_path / "run", resume=True)
    assert not left.exists()
    assert other.exists()


def test_every_dropout_of_the_settings_reaches_the_model():
    chosen = {"dim": 8, "heads": 2, "layers": 1, "dropout": 0.1, "attention_dropout": 0.2, "hidden_dropout": 0.3}
    for kind, settings in (("lm", LMSettings(**chosen)), ("translate", TranslateSettings(**chosen))):
        model = build(kind, settings, 20)
        for block in (module for module in model.modules() if isinstance(module, Block)):
            parts = [block.attention, *([block.cross] if block.cross else [])]
            assert [part.attention_dropout for part in parts] == [0.2] * len(parts)
            assert (block.dropout.p, block.feed_forward.dropout.p) == (0.1, 0.3)


def test_the_moving_average_forgets_its_beginning_and_spans_a_fifth_of_the_run():
    share, age, weight = 1.0, 0.0, 0.0  # of the first weights; the mean age of those in the average
    for step in range(5000):
        decay = averaging_decay(0.9999, step)
        share, age, weight = share * decay, (age + weight) * decay, weight * decay + 1 - decay
    assert share < 1e-12
    assert age / weight == pytest.approx(5000 / 6, rel=0.01)
    assert averaging_decay(0.9, 5000) == 0.9


@pytest.mark.parametrize(("change", "message"), [
    ({"steps": 0}, "--steps must be at least 1; got 0"),
    ({"dropout": 1.0}, "--dropout must be at least 0 and below 1"),
    ({"attention_dropout": -0.1}, "--attention-dropout must be at least 0 and below 1"),
    ({"hidden_dropout": 1.0}, "--hidden-dropout must be at least 0 and below 1"),
    ({"lr": -1.0}, "--lr must be above 0"),
    ({"lr": float("nan")}, "--lr must be above 0 and finite; got nan"),
    ({"clip": float("nan")}, "--clip must be above 0; got nan"),
    ({"weight_decay": float("inf")}, "--weight-decay must be at least 0 and finite"),
    ({"dim": "32"}, "--dim must be an integer; got '32'"),
    ({"steps": True}, "--steps must be an integer; got True"),
    ({"seed": 10**24}, r"--seed must be smaller than 2\^63"),
    ({"heads": 3}, "--dim 8 must split into --heads 3 heads of even size"),
    ({"weight_decay": -1.0}, "--weight-decay must be at least 0"),
    ({"positions": "none"}, "--positions must be one of rotary"),
    ({"context": 10_000}, r"has \d+ tokens, \d+ of them for training, and --context 10000 needs 10001"),
    ({"tokens": "bpe", "vocabulary": 5000}, r"the data has \d+ BPE tokens, got --vocabulary 5000: use --vocabulary \d+ or less"),
    ({"tokens": "bpe", "vocabulary": 3}, r"--vocabulary must be at least \d+, the number of different characters of the data; got 3"),
    ({"validation": 1e-9}, "1 of them for validation"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_written(change, message, text, tmp_path):
    with pytest.raises(ValueError, match=message):
        lm(text, tmp_path / "run", **{**TINY, **change})
    assert not (tmp_path / "run").exists()


def test_cuda_that_is_not_there_is_said(text, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="finds no GPU here"):
        lm(text, tmp_path / "run", **{**TINY, "device": "cuda"})


@pytest.mark.parametrize("content", [b"", b" \n\n  \n"])
def test_an_empty_file_is_said(content, tmp_path):
    (tmp_path / "e").write_bytes(content)
    with pytest.raises(ValueError, match="e is empty"):
        lm(tmp_path / "e", tmp_path / "run", **TINY)


def test_a_file_of_one_line_is_learned_if_it_is_long_enough(tmp_path):
    (tmp_path / "one").write_text("the cat sat on the mat " * 20)
    assert lm(tmp_path / "one", tmp_path / "run", **TINY).finished
    (tmp_path / "short").write_text("the cat")
    with pytest.raises(ValueError, match="use more text or a smaller --context or --validation"):
        lm(tmp_path / "short", tmp_path / "run2", **TINY)
    with pytest.raises(ValueError, match=r"1 of them for validation, and that needs 2: .* or a larger --validation"):
        lm(tmp_path / "one", tmp_path / "run2", **{**TINY, "validation": 0.002})


def test_what_is_no_text_is_said(tmp_path):
    (tmp_path / "x").write_bytes(b"abc\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text: byte 3"):
        lm(tmp_path / "x", tmp_path / "run", **TINY)


def test_an_empty_last_line_is_a_line(tmp_path):
    (tmp_path / "en").write_text("a b\nc d\ne f\n\n")
    (tmp_path / "de").write_text("a b\nc d\ne f\ng\n")
    assert translate(tmp_path / "en", tmp_path / "de", tmp_path / "run", **{**PAIRS, "vocabulary": 13}).finished


def test_files_that_are_no_pairs_are_counted(pairs, tmp_path):
    (tmp_path / "b.de").write_text("eins\nzwei\n")
    with pytest.raises(ValueError, match=r"a\.en has 40 lines and .*b\.de has 2"):
        translate(pairs[0], tmp_path / "b.de", tmp_path / "run", **PAIRS)
    (tmp_path / "c.en").write_text("one\n")
    (tmp_path / "c.de").write_text("eins\n")
    with pytest.raises(ValueError, match=r"have 1 pair of lines.*at least 2 are needed"):
        translate(tmp_path / "c.en", tmp_path / "c.de", tmp_path / "run", **PAIRS)
    with pytest.raises(ValueError, match=r"the data has \d+ BPE tokens, got --vocabulary 9999"):
        translate(*pairs, tmp_path / "run", **{**PAIRS, "vocabulary": 9999})
    (tmp_path / "d").write_text("a b c d e f g h\n" * 30)
    with pytest.raises(ValueError, match="no pair has at most --max-length 4"):
        translate(tmp_path / "d", tmp_path / "d", tmp_path / "run", **{**PAIRS, "max_length": 4, "vocabulary": 15})
    assert not (tmp_path / "run").exists()


def test_a_folder_has_one_run_at_a_time(text, tmp_path):
    pytest.importorskip("fcntl")
    out, messages = tmp_path / "run", []

    def meanwhile() -> None:
        with pytest.raises(ValueError, match=r"run is in use by another run") as wrong:
            lm(text, out, resume=True)
        messages.append(wrong)

    lm(text, out, progress=Stopping(5, meanwhile), **TINY)
    assert messages
    assert lm(text, out, resume=True).finished


def test_a_run_goes_on_only_as_it_began(text, finished_run, tmp_path):
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        lm(text, finished_run, **TINY)
    with pytest.raises(ValueError, match="holds no run to resume"):
        lm(text, tmp_path / "none", resume=True)
    with pytest.raises(
        ValueError, match=r"has --steps 12, got 11: a resumed run keeps its settings; it can only be extended"
    ):
        lm(text, finished_run, resume=True, steps=11)
    with pytest.raises(ValueError, match="of the kind 'lm', not 'translate'"):
        translate(text, text, finished_run, resume=True)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "!")
    with pytest.raises(ValueError, match=r"data must be that of the first run: .*other\.txt changed"):
        lm(other, finished_run, resume=True)
    other.write_text(text.read_text() + ".")
    with pytest.raises(ValueError, match="data must be that of the first run"):
        lm(other, finished_run, resume=True)


@pytest.mark.parametrize("name", ["model.safetensors", "last.safetensors", "settings.json", "tokenizer.json"])
def test_a_damaged_file_is_named(name, text, finished_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished_run, out)
    data = (out / name).read_bytes()
    (out / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(
        (ValueError, OSError), match=re.escape(name) if name != "settings.json" else "holds no (model|run)"
    ):
        lm(text, out, resume=True) if name == "last.safetensors" else open_model(out)


@pytest.mark.parametrize("left", ["settings.json", "last.safetensors", "model.safetensors", "tokenizer.json"])
def test_a_new_run_goes_on_from_nothing_and_overwrites_nothing(left, text, finished_run, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    data = b"" if left == "settings.json" else (finished_run / left).read_bytes()
    (out / left).write_bytes(data)
    for resume in (False, True):
        with pytest.raises(ValueError, match=rf"holds {left}, and no readable settings\.json .* Choose another --out"):
            lm(text, out, resume=resume, **TINY)
    assert [path.name for path in out.iterdir()] == [left]
    assert (out / left).read_bytes() == data


def test_a_history_is_that_of_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        history(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no model trained by `regard learn`"):
        history(tmp_path)


def test_an_unknown_setting_is_named_with_the_nearest_one(text, finished_run, tmp_path):
    for out, resume in ((tmp_path / "run", False), (finished_run, True)):
        with pytest.raises(TypeError, match=r"learn\.lm\(\.\.\.\) has no option 'stepz'.* Did you mean 'steps'\?"):
            lm(text, out, resume=resume, stepz=5)
    assert not (tmp_path / "run").exists()


SETTINGS = [
    (lambda d: d.pop("settings"), r"settings\.json is damaged: 'settings' must be in it"),
    (lambda d: d.pop("data"), r"settings\.json is damaged: 'data' must be in it"),
    (lambda d: d.update(kind="foo"), r"kind of a model must be one of lm, translate; got 'foo'"),
    (lambda d: d.update(kind=["lm"]), r"kind of a model must be one of lm, translate; got list"),
    (lambda d: d.update(settings=3), r"settings must be names with values; got 3"),
    (lambda d: d["settings"].update(dim="32"), r"settings\.json: --dim must be an integer; got '32'"),
    (lambda d: d["settings"].update(dim={"a": [1] * 999}), r"settings\.json: --dim must be an integer; got dict"),
    (lambda d: d["settings"].update(color=1), r"unknown settings color"),
    (lambda d: d["settings"].update(layers=10**9), r"safetensors does not fit its settings"),
    (lambda d: d["settings"].update(dim=2**40), r"safetensors does not fit its settings"),
    (lambda d: d["settings"].update(dim=2**62), r"safetensors does not fit its settings"),
    (lambda d: d["settings"].update(dim=16), r"safetensors does not fit its settings"),
]


@pytest.mark.parametrize(("change", "message"), SETTINGS)
def test_settings_that_cannot_be_are_told_in_one_line(change, message, text, finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "run")
    settings = json.loads((finished_run / "settings.json").read_text())
    change(settings)
    (tmp_path / "run" / "settings.json").write_text(json.dumps(checkpoint.seal(settings)))  # with a right checksum
    for words in (["generate", str(tmp_path / "run")], ["learn", "lm", str(text), "--out", str(tmp_path / "run"), "--resume"]):  # fmt: skip
        assert cli.main(words) == 2
        assert re.search(message, capsys.readouterr().err)


def test_a_file_where_a_folder_must_be_and_the_other_way_round(text, tmp_path):
    with pytest.raises(ValueError, match="is a file, and --out names the folder"):
        lm(text, text, **TINY)
    with pytest.raises(OSError, match=r"the folder .* could not be created: Not a directory\. Choose another --out"):
        lm(text, text / "run", **TINY)
    with pytest.raises(OSError, match="is a folder; a text file is needed"):
        lm(tmp_path, tmp_path / "run", **TINY)
    with pytest.raises(FileNotFoundError, match=r"none cannot be read \(No such file or directory\)"):
        lm(tmp_path / "none", tmp_path / "run", **TINY)


def test_nothing_is_pickled(finished_run):
    assert sorted(path.name for path in finished_run.iterdir()) == [
        "history.json", "last.safetensors", "model.safetensors", "patterns.safetensors", "settings.json", "tokenizer.json",
    ]  # fmt: skip
    for path in finished_run.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            checkpoint.read_tensors(path)


def test_mixed_precision_and_compilation_learn_too(text, tmp_path, monkeypatch):
    narrow = lm(text, tmp_path / "narrow", **{**TINY, "precision": "bfloat16"})
    plain = lm(text, tmp_path / "plain", **TINY)
    assert narrow.best == pytest.approx(plain.best, abs=0.05)
    assert narrow.best != plain.best
    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode: own(f, backend="aot_eager"))
    torch._dynamo.reset()
    fast = lm(text, tmp_path / "fast", **{**TINY, "compile": True, "dropout": 0.0})
    slow = lm(text, tmp_path / "slow", **{**TINY, "dropout": 0.0})
    assert fast.best == pytest.approx(slow.best, abs=1e-4)


def test_every_step_of_a_compiled_run_takes_the_compiled_loss_also_those_whose_heads_are_reported(
    text, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "WATCH_EVERY", 2)
    calls = []

    def counted(loss, mode):
        return lambda model, batch: (calls.append(len(batch[0])), loss(model, batch))[1]

    monkeypatch.setattr(torch, "compile", counted)
    lm(text, tmp_path / "run", **{**TINY, "compile": True, "batch": 9})
    assert calls == [9] * TINY["steps"]
    rows = checkpoint.read_history(tmp_path / "run")
    assert sum("heads" in row for row in rows) == TINY["steps"] // 2


def test_history_has_loss_speed_and_every_head(text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 2)
    lm(text, tmp_path / "run", **TINY)
    rows = checkpoint.read_history(tmp_path / "run")
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8, 12]
    looked = [row for row in rows if "heads" in row]
    assert len(looked) == 6
    assert all("loss" in row and "lr" in row for row in looked)
    assert all(row["tokens_per_second"] > 0 for row in looked[1:])
    head = looked[0]["heads"]["body.blocks.0.attention"]
    assert len(head["entropy_share"]) == len(head["max_score"]) == 2
    entries = history(tmp_path / "run")
    assert [step for step, _ in entries] == [row["step"] for row in looked]
    assert entries[0][1]["body.blocks.0.attention/entropy_share/1"] == head["entropy_share"][1]
    assert "<svg" in svg.svg(entries)
