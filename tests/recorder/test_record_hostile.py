"""Files are input: hostile .regard files with right checksums are refused, or read as what they are."""

import hashlib
import json
import os
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard.core.scores.kinds import ScaledDot
from regard.recorder import Recording, RegardFileError
from regard.recorder.calls import SavedCall
from regard.recorder.recording import Layer, Pass

GENERATOR = Path(__file__).parents[1] / "support" / "hostile_files.py"


def judged(first, count, timeout):
    """Judge files in a process of their own: a crash or a hang is a failure, not the end of the tests."""
    run = subprocess.run(
        [sys.executable, str(GENERATOR), str(first), str(count)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, f"exit {run.returncode} at file {run.stderr[-2000:]}\n{run.stdout[-2000:]}"
    assert re.search(rf"^{count} hostile files, 0 wrong$", run.stdout, re.M)


def test_three_hundred_hostile_files():
    judged(0, 300, 600)


@pytest.mark.slow
def test_ten_thousand_hostile_files():
    judged(1000, 10_000, 1800)


# The files of the first report, each with right checksums.


def layer_file(path, shape, tensors, factors, values=None, words=(None, None)):
    table, body, at = {}, b"", 0
    names = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    for n, tensor in enumerate(tensors):
        data = tensor.contiguous().numpy().tobytes()
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        table[f"t{n}"], body, at = entry, body + data, at + len(data)
    layer = {"name": "x", "kind": "self", "shape": list(shape), "words": list(words), "statistics": {}}
    layer |= {"factors": factors, "engine": "auto", "values": values}
    sums = {
        name: hashlib.blake2b(body[slice(*entry["data_offsets"])], digest_size=16).hexdigest()
        for name, entry in table.items()
    }
    description = {
        "format": "regard recording",
        "version": 1,
        "passes": [{"steps": 1, "layers": [layer]}],
        "refused": [],
        "checksums": sums,
    }
    blank = "0" * 32
    text = json.dumps({"__metadata__": {"checksum": blank, "regard": json.dumps(description)}, **table}).encode()
    checksum = hashlib.blake2b(text, digest_size=16).hexdigest()
    path.write_bytes(struct.pack("<Q", len(text)) + text.replace(blank.encode(), checksum.encode(), 1) + body)


def t(n):
    return {"tensor": f"t{n}"}


def scaled(*modifiers, sink=None):
    return ["ScaledDot", ["tuple", *modifiers], sink, None]


ones = torch.ones
MISFITS = {
    "k without heads": ((1, 2, 6, 6), [ones(1, 2, 6, 4), ones(1, 0, 6, 4)], [scaled(), None, 0]),
    "k of another batch": ((8, 2, 6, 6), [ones(8, 2, 6, 4), ones(2, 2, 6, 4)], [scaled(), None, 0]),
    "k of another size": ((1, 2, 6, 6), [ones(1, 2, 6, 8), ones(1, 2, 6, 1)], [scaled(), None, 0]),
    "k of a type of its own": ((1, 2, 6, 6), [ones(1, 2, 6, 4), ones(1, 2, 6, 4).long()], [scaled(), None, 0]),
    "few documents": (
        (1, 2, 6, 6),
        [ones(1, 2, 6, 4), ones(1, 2, 6, 4), ones(1, 1, 2, 1).long(), ones(1, 1, 1, 2).long()],
        [scaled(), ["Documents", t(2), t(3), None, False], 0],
    ),
    "a small bias": (
        (1, 2, 6, 6),
        [ones(1, 2, 6, 4), ones(1, 2, 6, 4), ones(1, 1, 2, 2)],
        [scaled(["Bias", t(2)]), None, 0],
    ),
    "a small mask": (
        (1, 2, 6, 6),
        [ones(1, 2, 6, 4), ones(1, 2, 6, 4), ones(1, 1, 2, 2).bool()],
        [scaled(), ["Dense", t(2)], 0],
    ),
    "a mask of floats": (
        (1, 2, 6, 6),
        [ones(1, 2, 6, 4), ones(1, 2, 6, 4), ones(1, 1, 6, 6)],
        [scaled(), ["Dense", t(2)], 0],
    ),
    "few slopes": (
        (1, 4, 6, 6),
        [ones(1, 4, 6, 4), ones(1, 4, 6, 4), ones(1, 2, 1, 1)],
        [scaled(["Alibi", t(2)]), None, 0],
    ),
    "few sinks": (
        (1, 4, 6, 6),
        [ones(1, 4, 6, 4), ones(1, 4, 6, 4), ones(1, 2, 1, 1)],
        [scaled(sink=t(2)), None, 0],
    ),
    "padding beyond the keys": (
        (1, 2, 6, 6),
        [ones(1, 2, 6, 4), ones(1, 2, 6, 4), 9 * ones(1, 1, 1, 1).long()],
        [scaled(), ["Padding", t(2)], 0],
    ),
    "an offset far away": ((1, 2, 6, 6), [ones(1, 2, 6, 4), ones(1, 2, 6, 4)], [scaled(), ["Causal"], 10**6]),
    "a length without bytes": ((1, 2, 2**30, 6), [ones(1, 2, 2**30, 0), ones(1, 2, 6, 0)], [scaled(), None, None]),
    "weights of another shape": (
        (1, 2, 6, 6),
        [ones(1, 2, 6, 0), ones(1, 2, 6, 0), ones(1, 2, 3, 3)],
        [["Precomputed", ["tuple"], None, t(2)], None, 0],
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_factors_that_do_not_fit_are_refused_when_read(kind, tmp_path):
    shape, tensors, (score, mask, offset) = MISFITS[kind]
    layer_file(tmp_path / "a.regard", shape, tensors, ["Factors", t(0), t(1), score, mask, offset])
    with pytest.raises(RegardFileError):
        regard.load(tmp_path / "a.regard")


def test_factors_that_fit_are_read(tmp_path):
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    layer_file(tmp_path / "a.regard", (1, 2, 3, 3), [q, k], ["Factors", t(0), t(1), scaled(), ["Causal"], 0])
    expected = regard.weights(q, k, mask=regard.causal()).dense()
    torch.testing.assert_close(regard.load(tmp_path / "a.regard")[0].dense(), expected)


def test_values_of_other_keys_are_refused(tmp_path):
    tensors = [ones(1, 2, 6, 4), ones(1, 2, 6, 4), ones(1, 2, 5, 4)]
    layer_file(tmp_path / "a.regard", (1, 2, 6, 6), tensors, ["Factors", t(0), t(1), scaled(), None, 0], values="t2")
    with pytest.raises(RegardFileError, match="values"):
        regard.load(tmp_path / "a.regard")


# Sizes that the file does not have.


@pytest.mark.parametrize("size", [64 * 2**30, 2**62, 2**70, -1, 1.5, "8", None, float("inf")], ids=str)
def test_sizes_are_compared_with_the_file(size, tmp_path):
    entry = {"dtype": "BOOL", "shape": [size], "data_offsets": [0, size]}
    description = {"format": "regard recording", "version": 1, "passes": [], "refused": [], "checksums": {"t0": ""}}
    blank = "0" * 32
    text = json.dumps({"__metadata__": {"checksum": blank, "regard": json.dumps(description)}, "t0": entry}).encode()
    checksum = hashlib.blake2b(text, digest_size=16).hexdigest()
    path = tmp_path / "a.regard"
    path.write_bytes(struct.pack("<Q", len(text)) + text.replace(blank.encode(), checksum.encode(), 1))
    with pytest.raises(RegardFileError, match=r"tensor 't0'"):
        regard.load(path)


# What is no file, links and modes.


def recording():
    q = torch.arange(4, dtype=torch.float32).view(1, 1, 2, 2)
    saved = SavedCall(q, q, None, None, ScaledDot(0.5), None, None)
    return Recording([Pass([Layer("x", 0, "self", saved, {}, (1, 1, 2, 2))])])


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.regard")
    with pytest.raises(RegardFileError, match="no regular file"):
        regard.load(tmp_path / "a.regard")
    with pytest.raises(ValueError, match="no regular file"):
        recording().save(tmp_path / "a.regard")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(RegardFileError, match="a folder"):
        regard.load(tmp_path)
    with pytest.raises(IsADirectoryError, match="a folder"):
        recording().save(tmp_path)


def test_the_mode_of_an_existing_file_is_kept(tmp_path):
    path = tmp_path / "a.regard"
    recording().save(path)
    os.chmod(path, 0o600)
    recording().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "real.regard", tmp_path / "a.regard"
    target.write_bytes(b"old")
    link.symlink_to(target)
    recording().save(link)
    assert link.is_symlink()
    assert len(regard.load(target)) == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.regard", "folder", "real.regard"]


def test_no_numpy_is_needed(tmp_path):
    code = f"""
import sys
sys.modules["numpy"] = None
import torch, regard
net = torch.nn.MultiheadAttention(8, 2, batch_first=True)
x = torch.randn(1, 3, 8)
with regard.record(net) as seen:
    net(x, x, x)
seen.save({str(tmp_path / "a.regard")!r})
with regard.record(net, path={str(tmp_path / "b.regard")!r}):
    net(x, x, x)
assert torch.equal(regard.load({str(tmp_path / "a.regard")!r})[0].dense(), seen[0].dense())
assert len(regard.load({str(tmp_path / "b.regard")!r})) == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_reading_does_not_depend_on_private_keys(tmp_path):
    """A PyTorch without the keys that recording uses still reads files."""
    recording().save(tmp_path / "a.regard")
    code = f"""
import torch
def missing(name):
    raise RuntimeError(f"no key {{name}}")
torch._C._dispatch_key_parse = missing
import regard
assert len(regard.load({str(tmp_path / "a.regard")!r})) == 1
try:
    with regard.record(None):
        pass
except RuntimeError as error:
    assert "dispatch key" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
