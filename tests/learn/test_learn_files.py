"""The law of a run's files: they are input. Damaged, edited or hostile, they are one clear error on open and on resume."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard import cli
from regard.learn import checkpoint, history, is_checkpoint, lm, open_model

TINY = {
    "steps": 4,
    "eval_every": 2,
    "batch": 2,
    "dim": 8,
    "heads": 2,
    "layers": 1,
    "context": 8,
    "device": "cpu",
    "ema": 0.9,
}
FILES = ("settings.json", "tokenizer.json", "model.safetensors", "last.safetensors")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("the cat sat on the mat. " * 30)
    return path


@pytest.fixture(scope="module")
def done(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("done") / "run"
    lm(text, out, **TINY)
    return out


@pytest.fixture
def run(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


def refused(function, *arguments, **more) -> str:
    with pytest.raises(ValueError) as wrong:  # noqa: PT011  its text is looked at by each test
        function(*arguments, **more)
    message = str(wrong.value)
    assert len(message) < 500
    return message


def test_opening_a_model_does_not_load_the_compiler_of_pytorch(run):
    """It takes longer to load than to translate."""
    code = (
        "import sys; from regard.learn import open_model; before = set(sys.modules)\n"
        "open_model(sys.argv[1]); print(*sorted(set(sys.modules) - before))"
    )
    opened = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert {"safetensors"} <= set(opened.stdout.split())
    assert not {"torch._dynamo", "torch._inductor", "sympy"} & set(opened.stdout.split())


def test_a_trained_model_is_used_without_what_training_and_recording_load(run):
    """They take a second to load, as long as a short text takes to be written."""
    code = (
        "import gc, sys; from regard.cli import main; code = main(['generate', sys.argv[1], '--count', '1'])\n"
        "print(code, gc.isenabled(), gc.get_freeze_count() > 100_000, *sorted(sys.modules))"
    )
    used = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    code, collects, frozen, *modules = used.stdout.splitlines()[-1].split()
    assert (code, collects, frozen) == ("0", "True", "True")
    assert "regard.learn.trained" in modules
    assert not {"regard.learn.training", "regard.recorder", "regard.learn.progress"} & set(modules)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_when_a_model_is_opened_and_when_a_run_is_resumed(name, text, run):
    """Wherever it is: a bit of a tensor, of its name, type and shape, of the step, the seed, the tokens."""
    data, chance = (run / name).read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little") if name.endswith("safetensors") else 0
    places = {chance.randrange(len(data)) for _ in range(20)} | {
        chance.randrange(8, header) for _ in range(10) if header
    }
    for place in sorted(places):
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        if header > place and json_of(broken) == json_of(data):
            continue  # a blank of the header
        (run / name).write_bytes(broken)
        if name != "last.safetensors":
            refused(open_model, run)
        refused(lm, text, run, resume=True)
    (run / name).write_bytes(data)
    assert lm(text, run, resume=True).finished


def json_of(data: bytes):
    try:
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except ValueError:
        return None


def test_a_flipped_bit_of_a_tensor_is_named(text, run):
    for name, tensor in (
        ("model.safetensors", "embedding.table.weight"),
        ("last.safetensors", "weights/embedding.table.weight"),
    ):
        library, _ = checkpoint.safetensors()
        tensors, fields = checkpoint.read_tensors(run / name)
        sealed = {"regard": json.dumps(metadata_of(run / name))}
        tensors[tensor].view(torch.int32)[0, 0] ^= 1
        (run / name).write_bytes(library.save(tensors, sealed))
        assert f"{name} is damaged: the checksum of {tensor} differs" in refused(lm, text, run, resume=True)
        tensors[tensor].view(torch.int32)[0, 0] ^= 1
        checkpoint.save(run / name, tensors, fields)


def metadata_of(path: Path):
    with checkpoint.safetensors()[1].safe_open(str(path), "pt") as file:
        return json.loads(file.metadata()["regard"])


def test_an_edited_seed_is_refused(text, run):
    settings = json.loads((run / "settings.json").read_text())
    settings["settings"]["seed"] = 7
    (run / "settings.json").write_text(json.dumps(settings))
    assert "settings.json is damaged or was edited: its checksum differs" in refused(lm, text, run, resume=True)
    assert "settings.json is damaged or was edited" in refused(open_model, run)


def test_the_tokenizer_of_another_run_is_refused(text, run, tmp_path):
    (tmp_path / "other").write_text("abc " * 60)
    lm(tmp_path / "other", tmp_path / "another", **TINY)
    shutil.copy(tmp_path / "another" / "tokenizer.json", run / "tokenizer.json")
    assert "tokenizer.json is damaged or was edited" in refused(open_model, run)
    assert "tokenizer.json is damaged or was edited" in refused(lm, text, run, resume=True)


@pytest.mark.parametrize(
    "content", [b"{}", b"[1]", b'"regard model 2"', b"\xff\xfe", b"", b"[" * 100_000, b'{"a":' * 100_000]
)
@pytest.mark.parametrize("name", ["settings.json", "history.json", "tokenizer.json"])
def test_json_that_is_none_of_ours_is_one_line(name, content, text, run, capsys):
    (run / name).write_bytes(content)
    words = ["learn", "lm", str(text), "--out", str(run), "--resume"]
    assert cli.main(words) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert name in message or "settings.json" in message
    if name == "settings.json":
        assert not is_checkpoint(run)


HISTORIES = [[1, 2], {"step": 1}, [{"step": "1"}], [{"loss": 1.0}], [{"step": 1, "heads": [1]}], [{"step": 1, "heads": {"a": {"entropy": "x"}}}],
             [{"step": 1, "heads": {"a": {"entropy": [None]}}}]]  # fmt: skip


@pytest.mark.parametrize("rows", HISTORIES, ids=str)
def test_a_history_that_is_none_is_said(rows, text, run):
    checkpoint.save_json(run / "history.json", checkpoint.seal({"rows": rows}))
    assert "history.json is damaged: it must be a list of rows" in refused(history, run)
    assert "history.json is damaged" in refused(lm, text, run, resume=True)


def test_an_edited_history_is_refused(text, run):
    sealed = json.loads((run / "history.json").read_text())
    sealed["rows"][0]["loss"] = 0.0
    (run / "history.json").write_text(json.dumps(sealed))
    assert "history.json is damaged or was edited: its checksum differs" in refused(history, run)
    assert "history.json is damaged or was edited" in refused(lm, text, run, resume=True)
    (run / "history.json").write_text(json.dumps(sealed["rows"]))
    assert "history.json was written without a checksum: remove it" in refused(history, run)


def reseal_tokenizer(run: Path, tokenizer: dict) -> None:
    """A tokenizer with a right checksum: whoever changes a file can change its checksum, too."""
    data = checkpoint.encode_json(tokenizer)
    (run / "tokenizer.json").write_bytes(data)
    settings = json.loads((run / "settings.json").read_text())
    settings["tokenizer"] = checkpoint.hashlib.sha256(data).hexdigest()
    (run / "settings.json").write_text(json.dumps(checkpoint.seal(settings)))


def test_hostile_tokenizers_with_right_checksums_are_refused(run):
    tokenizer = json.loads((run / "tokenizer.json").read_text())
    far = json.loads(json.dumps(tokenizer))
    far["model"]["vocab"]["t"] = 10**6
    for hostile in (far, {}, {**tokenizer, "model": 3}, [1]):
        reseal_tokenizer(run, hostile)
        assert "tokenizer.json is no tokenizer" in refused(open_model, run)
    tokenizer["model"]["vocab"]["é"] = len(tokenizer["model"]["vocab"])
    reseal_tokenizer(run, tokenizer)
    assert "does not fit its settings" in refused(open_model, run)


def test_hostile_tensors_with_right_checksums_are_refused(text, run):
    for name in ("model.safetensors", "last.safetensors"):
        tensors, fields = checkpoint.read_tensors(run / name)
        first = next(key for key in tensors if key.endswith("embedding.table.weight"))
        changes = [
            {**tensors, first: tensors[first][:1]},
            {**tensors, first: tensors[first].double()},
            {key: value for key, value in tensors.items() if key != first},
            {},
        ]
        for change in changes:
            checkpoint.save(run / name, change, fields)
            assert "does not fit its settings" in refused(lm, text, run, resume=True)
        checkpoint.save(run / name, tensors, fields)
    moments = {key: value[:1] if key.startswith("optimizer/exp_avg/") else value for key, value in tensors.items()}
    checkpoint.save(run / "last.safetensors", moments, fields)
    assert "does not fit its settings" in refused(lm, text, run, resume=True), "it would broadcast"
    for wrong in ({}, {**fields, "step": "x"}, {**fields, "step": "99"}, {**fields, "step": "-1"}):
        checkpoint.save(run / "last.safetensors", tensors, wrong)
        assert "last.safetensors is damaged: its step" in refused(lm, text, run, resume=True)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_is_not_waited_for(name, text, run):
    (run / name).unlink()
    os.mkfifo(run / name)
    if name != "last.safetensors":
        refused(open_model, run)
    refused(lm, text, run, resume=True)
