"""Runs that are extended, stopped early, accumulated, begun from a pretrained model, or fed from a mapped file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import cli
from regard.learn import captured, checkpoint, corpus, lm, open_model, optimizer, tasks, training, translate
from regard.learn import tokenizer as texts
from regard.learn.data import SentencePairs
from regard.learn.progress import TrainingProgress
from regard.learn.settings import LMSettings, TranslateSettings

TINY = {
    "steps": 6, "eval_every": 3, "batch": 4, "dim": 8, "heads": 2, "layers": 1, "context": 8, "device": "cpu",
    "dropout": 0.2, "ema": 0.9, "warmup": 2,
}  # fmt: skip


class CountedOperators(TorchDispatchMode):
    """Counts what PyTorch is asked to run: on a GPU about as many launches."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = ["the", "cat", "sat", "on\n", "a", "mät", "and\r\n", "then ", "it", "ran", "\nover"]
    path.write_bytes(" ".join(draw.choices(words, k=600)).encode())
    return path


class Interrupt(TrainingProgress):
    """Interrupts a run at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def update(self, step: int, numbers) -> None:
        if step >= self.step and "val_loss" not in numbers:
            os.kill(os.getpid(), signal.SIGINT)


def same_files(a: Path, b: Path) -> None:
    for name in checkpoint.FILES:
        assert (a / name).exists() == (b / name).exists(), name
        if (a / name).exists() and name != checkpoint.HISTORY:  # it holds speeds
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


# Extended.


def test_a_finished_run_is_extended_and_an_interruption_of_that_changes_no_bit(text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    for name in ("once", "twice"):
        assert lm(text, tmp_path / name, **TINY).step == 6
    result = lm(text, tmp_path / "once", resume=True, steps=11)
    assert (result.step, result.finished) == (11, True)
    stopped = lm(text, tmp_path / "twice", resume=True, steps=11, progress=Interrupt(8))
    assert not stopped.finished
    assert lm(text, tmp_path / "twice", resume=True).step == 11, "the run keeps its new number of steps"
    same_files(tmp_path / "once", tmp_path / "twice")


def test_the_rate_of_an_extended_run_is_that_of_the_longer_one(text, tmp_path):
    lm(text, tmp_path / "run", **TINY)
    lm(text, tmp_path / "run", resume=True, steps=12)
    lm(text, tmp_path / "long", **{**TINY, "steps": 12})
    rates = [
        {row["step"]: row["lr"] for row in checkpoint.read_history(tmp_path / name) if "lr" in row}
        for name in ("run", "long")
    ]
    assert rates[0][12] == rates[1][12]
    assert rates[0][9] == rates[1][9] > rates[0][6], "at its first end the rate was smaller"


# Stopped early.


def test_a_run_stops_when_its_validations_bring_nothing_and_can_be_given_more_patience(text, tmp_path, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5])
    monkeypatch.setattr(tasks.LMTask, "validate", lambda self, model: next(losses))
    wild = {**TINY, "steps": 30}
    result = lm(text, tmp_path / "run", patience=2, **wild)
    assert (result.step, result.best, result.finished, result.stopped_early) == (12, 2.0, True, True)
    again = lm(text, tmp_path / "run", resume=True)
    assert (again.step, again.stopped_early) == (12, True), "it has ended, and stays so"
    more = lm(text, tmp_path / "run", resume=True, patience=3)
    assert (more.step, more.best) == (24, 1.0)


def test_an_interrupted_run_remembers_its_patience(text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    losses = [3.0, 4.0, 5.0, 6.0]
    for name, at in (("a", 99), ("b", 7)):
        left = iter(losses)
        monkeypatch.setattr(tasks.LMTask, "validate", lambda self, model, left=left: next(left))
        result = lm(text, tmp_path / name, patience=3, progress=Interrupt(at), **{**TINY, "steps": 30})
        if not result.finished:
            result = lm(text, tmp_path / name, resume=True)
        assert result.step == 12
    same_files(tmp_path / "a", tmp_path / "b")


# Accumulated.


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("kind", ["lm", "translate"])
def test_accumulated_gradients_are_those_of_the_whole_batch(kind, parts, text, tmp_path):
    """In float64, so that only the order of sums differs; the parts of a translator have different numbers of words."""
    lines = ["the cat sat", "a", "it ran over the mat and then", "the", "on a mat", "then it"] * 2
    for language in ("en", "de"):
        (tmp_path / language).write_text("\n".join(lines) + "\n")
    shape = {"batch": 5, "dim": 8, "heads": 2, "layers": 1}
    if kind == "lm":
        task = tasks.make_task("lm", (text,), None, LMSettings(context=8, **shape), tasks.Saved(), torch.device("cpu"), tmp_path)  # fmt: skip
    else:
        settings = TranslateSettings(vocabulary=24, dropout=0.0, **shape)
        files = (tmp_path / "en", tmp_path / "de")
        task = tasks.make_task("translate", files, None, settings, tasks.Saved(), torch.device("cpu"), tmp_path)
    torch.manual_seed(0)
    model = tasks.build(kind, task.settings, task.tokenizer.get_vocab_size()).double()
    batch = task.batch(0)
    gradients = []
    for split in ([(batch, 1.0)], tasks.split_batch(task, batch, parts)):
        model.zero_grad()
        for part, share in split:
            (task.loss(model, part) * share).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    # float() of the logits in the loss rounds to float32: as far from the whole batch as that rounding.
    assert torch.allclose(*gradients, rtol=0, atol=4e-7 * float(gradients[0].abs().max()))
    assert len(split) > 1


def test_an_accumulated_run_is_resumed_with_the_same_bits(text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    lm(text, tmp_path / "a", accumulate=2, **TINY)
    lm(text, tmp_path / "b", accumulate=2, progress=Interrupt(2), **TINY)
    lm(text, tmp_path / "b", resume=True)
    same_files(tmp_path / "a", tmp_path / "b")


def test_more_parts_than_sequences_are_refused():
    with pytest.raises(ValueError, match=r"--accumulate must be at most --batch 4; got 5"):
        LMSettings(batch=4, accumulate=5)


# Mapped from a file.


@pytest.mark.parametrize("tokens", ["characters", "bytes", "bpe"])
def test_a_mapped_text_trains_the_same_model_as_one_in_memory(tokens, text, tmp_path, monkeypatch):
    options = {**TINY, "tokens": tokens, **({"vocabulary": 30} if tokens == "bpe" else {})}
    lm(text, tmp_path / "memory", **options)
    monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 61)
    lm(text, tmp_path / "mapped", **{**options, "steps": 3})
    assert not (tmp_path / "memory" / "tokens.bin").exists()
    monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", 1 << 25)  # the folder decides, not the size
    lm(text, tmp_path / "mapped", resume=True, steps=6)
    lm(text, tmp_path / "memory2", **{**options, "steps": 3})
    lm(text, tmp_path / "memory2", resume=True, steps=6)
    for name in ("model.safetensors", "last.safetensors", "tokenizer.json"):
        assert (tmp_path / "mapped" / name).read_bytes() == (tmp_path / "memory2" / name).read_bytes(), name


def test_the_pieces_of_a_text_have_the_ids_of_the_text(text):
    """Also for GPT-2's kind of tokenizer, whose tokens join spaces and line ends."""
    read = text.read_bytes().decode().replace("\r\n", "\n")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_bpe = Tokenizer(models.BPE())
    byte_bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_bpe.decoder = decoders.ByteLevel()
    byte_bpe.train_from_iterator([read], trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))  # fmt: skip
    for tokenizer in (byte_bpe, texts.byte_level(), texts.characters(read), texts.bpe(read, 30)):
        ids = texts.encode(tokenizer, read)
        for size in (7, 40, 333):
            pieces = list(_pieces(text, size))
            assert "".join(pieces) == read
            assert len(pieces) > 3
            assert [n for piece in pieces for n in texts.encode(tokenizer, piece)] == ids
        assert tokenizer.decode(ids) == read
    assert texts.encode(texts.byte_level(), "mät") == list("mät".encode())


def _pieces(path: Path, size: int):
    before, corpus.PIECE_BYTES = corpus.PIECE_BYTES, size
    try:
        yield from corpus.text_pieces(path)
    finally:
        corpus.PIECE_BYTES = before


class TensorBytes(TorchDispatchMode):
    """The largest tensor that an operator makes; a mapped file and views take none."""

    largest = 0
    free = (torch.ops.aten.from_file.default, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func not in self.free:
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("repeats", [1, 400])
def test_a_mapped_text_takes_as_much_memory_whatever_its_length(repeats, text, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", 0)
    long = tmp_path / "long.txt"
    long.write_bytes(text.read_bytes() * repeats)
    settings = LMSettings(context=8, tokens="bytes", dim=8, heads=2, batch=4)
    with TensorBytes() as seen:
        task = tasks.make_task("lm", (long,), None, settings, tasks.Saved(), torch.device("cpu"), tmp_path)
        batches = [task.batch(step) for step in range(5)]
        next(iter(task.valid.all(64)))
    assert task.valid.ids.element_size() == 1, "an id of a byte is a byte"
    assert long.stat().st_size > 2000 * repeats
    assert max(int(x.max()) for x, _ in batches) > 32
    assert seen.largest <= (64 * 8 + 1) * 8, "the largest tensor is a batch of validation windows"


@pytest.mark.skipif(sys.platform != "linux", reason="lists mappings by /proc")
def test_pages_of_a_mapped_text_leave_memory_after_every_batch(text, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", 0)
    settings = LMSettings(context=8, tokens="bytes", dim=8, heads=2, batch=4)
    task = tasks.make_task("lm", (text,), None, settings, tasks.Saved(), torch.device("cpu"), tmp_path)

    def is_mapped() -> bool:
        return str(tmp_path / "tokens.bin") in Path("/proc/self/maps").read_text()

    ids = task.valid.ids
    assert is_mapped()
    del ids
    assert not is_mapped()
    batch, windows = task.batch(0), task.valid.all(4)
    pair = next(windows)
    assert not is_mapped(), "neither between batches nor within a validation"
    assert len(batch) == len(pair) == 2


def test_a_mapped_text_sets_aside_no_more_for_validation_than_is_read_in_a_while(text, tmp_path, monkeypatch):
    settings = LMSettings(context=8, tokens="bytes", dim=8, heads=2, batch=4, validation=0.5)
    sizes = []
    for limit, most in ((1 << 25, 100), (0, 100), (0, 1 << 20)):
        monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", limit)
        monkeypatch.setattr(corpus, "VALIDATION_TOKENS", most)
        task = tasks.make_task("lm", (text,), None, settings, tasks.Saved(), torch.device("cpu"), tmp_path)
        sizes.append((len(task.train.ids), len(task.valid.ids)))
    in_memory, capped, not_capped = sizes
    assert in_memory == not_capped
    assert capped == (sum(in_memory) - 100, 100), "what is not set aside is trained on"


PEAK = """
import resource, sys
import torch
from regard.learn import lm
torch.set_num_threads(1)
lm(*sys.argv[1:], tokens="bytes", steps=40, dim=8, heads=2, layers=1, context=64, batch=16, device="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in other units elsewhere")
def test_the_memory_of_a_run_does_not_grow_with_its_corpus(text, tmp_path):
    peaks, long = [], tmp_path / "long.txt"
    for size in (40_000_000, 400_000_000):
        data = text.read_bytes()
        with long.open("wb") as file:
            for _ in range(size // len(data)):
                file.write(data)
        command = [sys.executable, "-c", PEAK, str(long), str(tmp_path / str(size))]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 60, f"MB: {peaks}"


def test_damaged_token_ids_are_noticed_and_a_failed_start_leaves_none(text, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", 0)
    with pytest.raises(ValueError, match="use more text or a smaller --context"):
        lm(text, tmp_path / "run", **{**TINY, "context": 100_000})
    assert not (tmp_path / "run").exists()
    lm(text, tmp_path / "run", **TINY)
    file = tmp_path / "run" / "tokens.bin"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"tokens\.bin is damaged or was edited"):
        lm(text, tmp_path / "run", resume=True, steps=9)
    file.unlink()
    with pytest.raises(ValueError, match=r"tokens\.bin is missing"):
        lm(text, tmp_path / "run", resume=True, steps=9)


@pytest.mark.parametrize(("data", "message"), [(b"a b " * 20 + b"\xff c", "byte 80 cannot be read"), (b"a b " * 20 + b"\xc3", "byte 80 cannot"), (b" \n " * 9, "is empty")])  # fmt: skip
def test_a_mapped_text_that_is_none_is_refused_as_one_in_memory(data, message, tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(data)
    errors = []
    for limit in (1 << 25, 0):
        monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", limit)
        monkeypatch.setattr(corpus, "PIECE_BYTES", 16)
        with pytest.raises(ValueError, match=message) as caught:
            lm(tmp_path / "text", tmp_path / "run", **TINY)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


# From a pretrained model.


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, text) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = texts.byte_level()
    size = {"vocab_size": 260, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


FINE = {"steps": 4, "eval_every": 2, "batch": 3, "device": "cpu", "context": 8}


def test_a_run_begins_with_the_outputs_of_the_pretrained_model(gpt2, text, tmp_path):
    transformers = pytest.importorskip("transformers")
    result = lm(text, tmp_path / "run", pretrained=gpt2, **{**FINE, "lr": 1e-30, "warmup": 0, "weight_decay": 0.0})
    ours = open_model(tmp_path / "run")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(gpt2).eval()
    ids = ours.ids("the mät")
    with torch.no_grad():
        want = theirs(ids).logits[..., :256]
        assert torch.allclose(ours.model(ids), want, atol=1e-5)
    assert (ours.settings.architecture, ours.settings.layers, result.finished) == ("gpt2", 2, True)


def test_fine_tuning_learns_and_is_resumed_with_the_same_bits(gpt2, text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    options = {**FINE, "steps": 20, "lr": 1e-2}
    result = lm(text, tmp_path / "a", pretrained=gpt2, **options)
    losses = [row["val_loss"] for row in checkpoint.read_history(tmp_path / "a") if "val_loss" in row]
    assert result.best < losses[0]
    lm(text, tmp_path / "b", pretrained=gpt2, progress=Interrupt(1), **options)
    lm(text, tmp_path / "b", resume=True)
    same_files(tmp_path / "a", tmp_path / "b")


def test_a_fine_tuning_that_is_killed_before_its_first_step_begins_from_the_pretrained_weights(gpt2, text, tmp_path, monkeypatch):  # fmt: skip
    def killed(self):
        raise KeyboardInterrupt

    lm(text, tmp_path / "a", pretrained=gpt2, **FINE)
    with monkeypatch.context() as patch:
        patch.setattr(training._Training, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            lm(text, tmp_path / "b", pretrained=gpt2, **FINE)
    assert lm(text, tmp_path / "b", resume=True).finished
    same_files(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "last.safetensors").unlink()
    with pytest.raises(ValueError, match="ended before its pretrained weights were saved"):
        lm(text, tmp_path / "b", resume=True)


@pytest.mark.parametrize(("options", "message"), [({"dim": 16}, "has dim 8, got 16: leave --dim out"), ({"tokens": "bpe"}, "its own tokenizer, got bpe"), ({"context": 17}, "at most 16, the positions of the model; got 17")])  # fmt: skip
def test_a_setting_that_contradicts_the_pretrained_model_is_refused(gpt2, options, message, text, tmp_path):
    with pytest.raises(ValueError, match=message):
        lm(text, tmp_path / "run", pretrained=gpt2, **{**FINE, **options})
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_gpt2_or_without_its_tokenizer_is_refused(gpt2, text, tmp_path):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="is no folder"):
        lm(text, tmp_path / "run", pretrained=tmp_path / "none", **FINE)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))  # fmt: skip
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="holds an encoder, which predicts no next token"):
        lm(text, tmp_path / "run", pretrained=tmp_path / "bert", **FINE)
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, activation_function="relu", bos_token_id=0, eos_token_id=0)  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "relu")
    with pytest.raises(ValueError, match=r"--from needs .*tokenizer\.json"):
        lm(text, tmp_path / "run", pretrained=tmp_path / "relu", **FINE)
    (tmp_path / "relu" / "tokenizer.json").write_text((gpt2 / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="has 256 tokens and the model 20"):
        lm(text, tmp_path / "run", pretrained=tmp_path / "relu", **FINE)


# The report.


def test_the_command_line_fine_tunes_and_writes_a_report(gpt2, text, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["learn", "lm", str(text), "--from", str(gpt2), "--out", str(out), "--steps", "2", "--context", "8", "--device", "cpu"]  # fmt: skip
    assert cli.main(command) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().err
    assert cli.main([*command[:3], "--out", str(out), "--resume", "--steps", "3"]) == 0
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Training of run" in page


def test_a_report_shows_losses_heads_and_translations(tmp_path):
    from regard.look import run_report

    for language, line in (("en", "the cat sat"), ("de", "die Katze saß")):
        (tmp_path / language).write_text(f"{line}\n{line} a\n" * 8)
    small = {"steps": 3, "eval_every": 2, "batch": 4, "dim": 8, "heads": 2, "layers": 1, "vocabulary": 24, "device": "cpu"}  # fmt: skip
    translate(tmp_path / "en", tmp_path / "de", tmp_path / "run", **small)
    rows = checkpoint.read_history(tmp_path / "run")
    steps = dict(run_report.run_numbers(rows))
    assert {"loss", "val_loss", "lr"} <= steps[3].keys()
    assert any(name.startswith("decoder.blocks.0.cross/entropy_share/") for name in steps[1])
    samples = run_report._samples(open_model(tmp_path / "run"), rows)
    assert samples[0][0] == "the cat sat a"
    assert samples[0][1].endswith("(reference: die Katze saß a)")


# Batches of pairs.


def test_batches_of_pairs_hold_every_pair_once_with_its_marks_and_padding():
    draw = random.Random(0)
    pairs = [([draw.randrange(3, 50) for _ in range(draw.randrange(1, 20))] for _ in range(2)) for _ in range(70)]
    source, target = (list(side) for side in zip(*pairs, strict=True))
    data = SentencePairs(source, target, (0, 1, 2), 8, 5, torch.device("cpu"))
    expected = sorted(([*s, 2], [1, *t], [*t, 2]) for s, t in zip(source, target, strict=True))
    for batches in ([data.at(step) for step in range(data.batches, 2 * data.batches)], list(data.all(16))):
        seen = []
        for batch in batches:
            assert all(side.dtype == torch.long and side.shape[1] % 8 == 0 for side in batch)
            longest = [max(row.count_nonzero() for row in side) for side in batch]
            assert all(side.shape[1] - most < 8 for side, most in zip(batch, longest, strict=True))
            rows = [[[n for n in row if n] for row in side.tolist()] for side in batch]
            assert all(torch.equal((side != 0).sort(1, descending=True).values, side != 0) for side in batch)
            seen += list(zip(*rows, strict=True))
        assert sorted(seen) == expected


def test_a_batch_of_pairs_takes_as_many_operators_whatever_its_size():
    def operators(batch):
        data = SentencePairs([[3, 4]] * 64, [[5]] * 64, (0, 1, 2), batch, 0, torch.device("cpu"))
        with CountedOperators() as counted:
            data.at(0)
        return counted.count

    assert operators(64) == operators(2) < 40


# Steps as CUDA graphs.


def repeated(run):
    """As `CudaGraphs`, without a GPU: a replay computes again, into the memory of the first outputs."""
    loss, gradients = run()

    def replay():
        again, others = run()
        for held, new in zip((loss, *gradients), (again, *others), strict=True):
            held.copy_(new)

    for held in (loss, *gradients):
        held.fill_(torch.nan)  # a capture computes nothing
    return replay, (loss, gradients)


def pairs_task(tmp_path, device="cpu", **more):
    draw = random.Random(0)
    for name in ("en", "de"):
        lines = (" ".join(draw.choices(["red", "cat", "dog"], k=draw.randrange(1, 30))) for _ in range(60))
        (tmp_path / name).write_text("\n".join(lines))
    settings = TranslateSettings(vocabulary=22, batch=4, dim=8, heads=2, layers=1, **more)
    files = (tmp_path / "en", tmp_path / "de")
    return tasks.TranslateTask(files, files, settings, tasks.Saved(), torch.device(device))


def test_gradients_that_are_replayed_are_those_of_the_batch_whatever_its_shape(tmp_path):
    task = pairs_task(tmp_path, dropout=0.0)
    model = tasks.build("translate", task.settings, task.tokenizer.get_vocab_size())
    captures = []
    gradients = captured.CapturedGradients(
        lambda batch: task.loss(model, batch), model.parameters(), lambda run: (captures.append(0), repeated(run))[1]
    )
    shapes = []
    for step in range(40):
        batch = task.batch(step)
        shapes.append(tuple(side.shape for side in batch))
        model.zero_grad()
        loss = gradients(batch).clone()
        replayed = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected = task.loss(model, batch)
        expected.backward()
        assert torch.equal(loss, expected.detach())
        assert all(torch.equal(own, p.grad) for own, p in zip(replayed, model.parameters(), strict=True))
    often = [shape for shape in set(shapes) if shapes.count(shape) > captured.RUNS_BEFORE]
    assert len(often) > 1
    assert len(captures) == len(often), "one graph for each shape that comes often"


def test_steps_that_cannot_be_captured_run_as_they_are_and_the_log_says_so_once(tmp_path, caplog):
    task = pairs_task(tmp_path, dropout=0.0)
    model = tasks.build("translate", task.settings, task.tokenizer.get_vocab_size())

    def fail(run):
        raise RuntimeError("operation failed due to a previous error during capture\nSearch for it elsewhere.")

    gradients = captured.CapturedGradients(lambda batch: task.loss(model, batch), model.parameters(), fail)
    batch = task.batch(0)
    with caplog.at_level("WARNING", "regard"):
        losses = [gradients(batch).item() for _ in range(6)]
    assert losses == [task.loss(model, batch).item()] * 6
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "operation failed due to a previous error during capture"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_that_are_replayed_learn_the_same_and_drop_by_the_seed(tmp_path):
    task = pairs_task(tmp_path, "cuda", dropout=0.3)
    files = (tmp_path / "en", tmp_path / "de")
    small = {"steps": 60, "batch": 4, "dim": 8, "heads": 2, "layers": 1, "vocabulary": 22, "precision": "float32"}
    plain, replayed = (
        translate(*files, tmp_path / str(n), validation=files, dropout=0.0, device="cuda", compile=n, **small)
        for n in (False, True)
    )
    assert replayed.best == pytest.approx(plain.best, rel=1e-3)
    model = tasks.build("translate", task.settings, task.tokenizer.get_vocab_size()).cuda()
    gradients = captured.CapturedGradients(
        lambda batch: task.loss(model, batch), model.parameters(), captured.CudaGraphs()
    )
    losses = []
    for seed in (0, 0, 0, 0, 1):  # the third is captured
        torch.manual_seed(seed)
        losses.append(gradients(task.batch(0)).item())
    assert losses[2] == losses[3] == pytest.approx(losses[0], rel=1e-4)
    assert losses[4] != losses[3]


# Muon.


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (9, 4)])
def test_an_orthogonal_factor_has_singular_values_near_one_and_the_singular_vectors_of_its_matrix(shape):
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = optimizer.orthogonal(x)
    assert ((torch.linalg.svdvals(y) > 0.5) & (torch.linalg.svdvals(y) < 1.3)).all()
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ y @ v.mT  # diagonal where the singular vectors are the same
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-10
    assert torch.allclose(optimizer.orthogonal(100 * x), y, atol=1e-5), "only the direction counts"


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest():
    settings = LMSettings(optimizer="muon", dim=8, heads=2, layers=1)
    model = tasks.build("lm", settings, 11)
    weights = dict(model.named_parameters())
    muon = optimizer.make_optimizer(settings, weights)
    by_muon = {name for name, p in weights.items() if "momentum" in optimizer.zero_state(muon, p)}
    assert by_muon == {name for name, p in weights.items() if p.ndim == 2} - {"embedding.table.weight"}
    before = {name: p.detach().clone() for name, p in weights.items()}
    model(torch.randint(11, (2, 6))).square().mean().backward()
    muon.step()
    for name, p in weights.items():
        moved = (p - before[name]).norm() / (optimizer.RATE * settings.lr)
        if name in by_muon:  # as many singular values as its shorter side has, each about one
            rows, columns = p.shape
            assert 0.6 < moved / (min(p.shape) * max(1, rows / columns)) ** 0.5 < 1.3, name
    muon.zero_grad()
    assert all(p.grad is None for p in weights.values())


def test_a_step_of_muon_launches_as_much_for_four_blocks_as_for_one():
    def launches(layers):
        settings = LMSettings(optimizer="muon", dim=8, heads=2, layers=layers)
        weights = dict(tasks.build("lm", settings, 11).named_parameters())
        muon = optimizer.make_optimizer(settings, weights)
        for p in weights.values():
            p.grad = torch.ones_like(p)
        muon.step()  # makes the state
        with CountedOperators() as operators:
            muon.step()
        return operators.count

    assert launches(4) == launches(1)


def test_a_run_with_muon_learns_and_is_resumed_with_the_same_bits(text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "WATCH_EVERY", 1)
    options = {**TINY, "optimizer": "muon", "steps": 9}
    result = lm(text, tmp_path / "a", **options)
    first = next(row["val_loss"] for row in checkpoint.read_history(tmp_path / "a") if "val_loss" in row)
    assert result.best < first
    lm(text, tmp_path / "b", progress=Interrupt(4), **options)
    lm(text, tmp_path / "b", resume=True)
    same_files(tmp_path / "a", tmp_path / "b")


def test_a_folder_to_start_from_that_is_not_there_is_named(text, tmp_path, capsys):
    assert cli.main(["learn", "lm", str(text), "--from", "nofolder", "--out", str(tmp_path / "run")]) == 2
    assert (
        "--from takes a folder with a GPT-2 that save_pretrained wrote; there is no folder nofolder."
        in capsys.readouterr().err
    )
