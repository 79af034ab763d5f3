"""The file .regard: what is read is what was written, or an error; never something else, and nothing is executed."""

import base64
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard._io import atomic_write
from regard.core.scores.kinds import ScaledDot
from regard.recorder import Recording, RegardFileError
from regard.recorder.calls import SavedCall
from regard.recorder.recording import Layer, Pass


class Net(nn.Module):
    def forward(self, q, mask=None):
        y = F.scaled_dot_product_attention(q, q, q, mask, scale=0.3)
        return (y @ y.mT).softmax(-1) @ y


def recorded(mask=None, **more):
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad(), regard.record(net, **more) as seen:
        net(torch.randn(2, 2, 6, 4), mask)
    return seen


def same(a, b):
    assert a.refused == b.refused
    assert len(a.passes) == len(b.passes)
    for p, r in zip(a.passes, b.passes, strict=True):
        assert p.steps == r.steps
        for x, y in zip(p.layers, r.layers, strict=True):
            assert (x.name, x.index, x.kind, tuple(x.shape), x.tokens) == (
                y.name,
                y.index,
                y.kind,
                tuple(y.shape),
                y.tokens,
            )
            if x.saved is not None:
                assert torch.equal(x.weights.dense(), y.weights.dense())
                assert (x.values is None) == (y.values is None)
            for name, tensor in x.statistics.items():
                assert torch.equal(tensor, y.statistics[name])


MASKS = {
    "none": None,
    "causal": torch.ones(6, 6, dtype=torch.bool).tril(),
    "window": torch.ones(6, 6, dtype=torch.bool).tril().triu(-2),
    "padding": (torch.arange(6) < torch.tensor([[6], [4]]))[:, None, None],
    "left": (torch.arange(6) >= torch.tensor([[0], [2]]))[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril(),
    "dense": torch.eye(6, dtype=torch.bool) | torch.eye(6, dtype=torch.bool).flip(0),
    "bias": torch.linspace(-1, 1, 36).view(6, 6),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("more", [{}, {"values": True}, {"keep": "statistics"}, {"tokens": list("abcdef")}], ids=str)
def test_what_is_read_is_what_was_written(mask, more, tmp_path):
    seen = recorded(MASKS[mask], **more)
    seen.refused.append(("a.b", "because </script> \u2028 \U0001f600"))
    seen.save(tmp_path / "a.regard")
    same(seen, regard.load(tmp_path / "a.regard"))
    regard.load(tmp_path / "a.regard").save(tmp_path / "b.regard")
    assert (tmp_path / "a.regard").read_bytes() == (tmp_path / "b.regard").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_type_of_number(dtype, tmp_path):
    q = torch.randn(1, 2, 4, 3).to(dtype)
    seen = Recording(
        [Pass([Layer("x", 0, "self", SavedCall(q, q, None, None, ScaledDot(0.5), None, None), {}, (1, 2, 4, 4))])]
    )
    seen.save(tmp_path / "a.regard")
    again = regard.load(tmp_path / "a.regard")
    assert again.layers[0].saved.q.dtype == dtype
    same(seen, again)


def test_safetensors_can_read_it(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    seen = recorded(values=True)
    seen.save(tmp_path / "a.regard")
    with safetensors.safe_open(tmp_path / "a.regard", "pt") as file:
        assert json.loads(file.metadata()["regard"])["format"] == "regard recording"
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  safetensors' own object
    assert any(torch.equal(tensor, seen.layers[0].saved.q) for tensor in tensors if tensor.shape == (2, 2, 6, 4))


def golden():
    q = torch.arange(4, dtype=torch.float32).view(1, 1, 2, 2)
    layer = Layer(
        "layer.0", 0, "self", SavedCall(q, q + 1, None, None, ScaledDot(0.5), regard.causal(), None), {}, (1, 1, 2, 2)
    )
    layer.tokens = ([["a", "b"]], [["a", "b"]])
    return Recording([Pass([layer])], [("layer.1", "linear attention")])


GOLDEN = (
    "8AIAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJjaGVja3N1bSI6IjI2NTQyYjYzODk3NWEzMDJkNmZkMzhiMmRlODNmZmY1IiwicmVnYXJkIjoie1"
    "wiZm9ybWF0XCI6XCJyZWdhcmQgcmVjb3JkaW5nXCIsXCJ2ZXJzaW9uXCI6MSxcInBhc3Nlc1wiOlt7XCJzdGVwc1wiOjEsXCJsYXllcnNcIjpb"
    "e1wibmFtZVwiOlwibGF5ZXIuMFwiLFwia2luZFwiOlwic2VsZlwiLFwic2hhcGVcIjpbMSwxLDIsMl0sXCJ3b3Jkc1wiOltbW1wiYVwiLFwiYl"
    "wiXV0sW1tcImFcIixcImJcIl1dXSxcInN0YXRpc3RpY3NcIjp7fSxcImZhY3RvcnNcIjpbXCJGYWN0b3JzXCIse1widGVuc29yXCI6XCJ0MFwi"
    "fSx7XCJ0ZW5zb3JcIjpcInQxXCJ9LFtcIlNjYWxlZERvdFwiLFtcInR1cGxlXCJdLG51bGwse1wiZmxvYXRcIjpcIjB4MS4wMDAwMDAwMDAwMD"
    "AwcC0xXCJ9XSxbXCJDYXVzYWxcIl0sMF0sXCJlbmdpbmVcIjpcImF1dG9cIixcInZhbHVlc1wiOm51bGx9XX1dLFwicmVmdXNlZFwiOltbXCJs"
    "YXllci4xXCIsXCJsaW5lYXIgYXR0ZW50aW9uXCJdXSxcImNoZWNrc3Vtc1wiOntcInQwXCI6XCJiOTI2ZDE5MzU4MjkxZjI1NmZjZDQyMWRmNz"
    "ViYTUyZVwiLFwidDFcIjpcIjg0ZTk4NjliNDQxYjkxZmQyODM1Yzk1YTRmMjEwMjEzXCJ9fSJ9LCJ0MCI6eyJkdHlwZSI6IkYzMiIsInNoYXBl"
    "IjpbMSwxLDIsMl0sImRhdGFfb2Zmc2V0cyI6WzAsMTZdfSwidDEiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzEsMSwyLDJdLCJkYXRhX29mZn"
    "NldHMiOlsxNiwzMl19fSAgIAAAAAAAAIA/AAAAQAAAQEAAAIA/AAAAQAAAQEAAAIBA"
)


def test_golden_bytes(tmp_path):
    """The format itself: these bytes are version 1, for ever."""
    golden().save(tmp_path / "a.regard")
    written = (tmp_path / "a.regard").read_bytes()
    assert base64.b64encode(written).decode() == GOLDEN
    (tmp_path / "b.regard").write_bytes(base64.b64decode(GOLDEN))
    same(golden(), regard.load(tmp_path / "b.regard"))
    assert regard.load(tmp_path / "b.regard")[0, 0]["b", "a"].item() == pytest.approx(
        0.0066929, abs=1e-6
    )  # 1 / (1 + e⁵): scores 4 and 9


def test_ten_thousand_bit_flips_are_detected(tmp_path):
    path = tmp_path / "a.regard"
    recorded(MASKS["padding"], values=True, tokens=list("abcdef")).save(path)
    intact = path.read_bytes()
    pick = random.Random(0)
    # Every bit of the length and of the header's beginning, and places all over the file.
    places = list(range(64 * 8)) + [pick.randrange(len(intact) * 8) for _ in range(10_000 - 64 * 8)]
    silent = []
    for place in places:
        changed = bytearray(intact)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            regard.load(path)
            silent.append(place)
        except RegardFileError:
            pass
    assert len(places) == 10_000
    assert silent == []


def test_every_truncation_is_detected(tmp_path):
    path = tmp_path / "a.regard"
    recorded().save(path)
    intact = path.read_bytes()
    for length in range(0, len(intact), 7):
        path.write_bytes(intact[:length])
        with pytest.raises(RegardFileError):
            regard.load(path)
    path.write_bytes(intact + b"\0")
    with pytest.raises(RegardFileError, match="longer"):
        regard.load(path)


def dressed(description, tensors=b"", table=None):
    """A file with a right checksum round any description: what somebody hostile can write."""
    blank = "0" * 32
    text = json.dumps(
        {"__metadata__": {"checksum": blank, "regard": json.dumps(description)}, **(table or {})}
    ).encode()
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return struct.pack("<Q", len(text)) + text.replace(blank.encode(), digest.encode(), 1) + tensors


BASE = {"format": "regard recording", "version": 1, "passes": [], "refused": [], "checksums": {}}
LAYER = {
    "name": "x",
    "kind": "self",
    "shape": [1, 1, 1, 1],
    "words": [None, None],
    "statistics": {},
    "engine": "auto",
    "values": None,
}

FOREIGN = {
    "empty": b"",
    "text": b"hello, this is no recording at all",
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "other safetensors": struct.pack("<Q", 2) + b"{}",
    "deep json": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "another format": dressed({**BASE, "format": "something"}),
    "a class of its own": dressed(
        {**BASE, "passes": [{"steps": 1, "layers": [{**LAYER, "factors": ["Modify", "os.system"]}]}]}
    ),
    "a function": dressed({**BASE, "passes": [{"steps": 1, "layers": [{**LAYER, "factors": ["Predicate", "x"]}]}]}),
    "no layers": dressed({**BASE, "passes": [{"steps": 1}]}),
    "missing tensor": dressed({**BASE, "passes": [{"steps": 1, "layers": [{**LAYER, "factors": {"tensor": "t9"}}]}]}),
    "negative shape": dressed(BASE, b"", {"t0": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}),
    "overlap": dressed(BASE, b"\0" * 8, {"t0": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}),
    "unknown type": dressed(BASE, b"\0" * 8, {"t0": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}),
    "description is a list": dressed([1, 2]),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_get_a_clear_error(kind, tmp_path):
    path = tmp_path / "a.regard"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(RegardFileError, match=r"a\.regard"):
        regard.load(path)


def test_a_newer_file_says_update(tmp_path):
    path = tmp_path / "a.regard"
    path.write_bytes(dressed({**BASE, "version": 2}))
    with pytest.raises(RegardFileError, match="Update regard"):
        regard.load(path)


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        regard.load(tmp_path / "none.regard")


def test_functions_are_not_saved(tmp_path):
    q = torch.randn(1, 1, 2, 2)
    saved = SavedCall(q, q, None, None, ScaledDot().modify(lambda s, i, j: s), None, None)
    with pytest.raises(ValueError, match="Modify"):
        Recording([Pass([Layer("x", 0, "self", saved, {}, (1, 1, 2, 2))])]).save(tmp_path / "a.regard")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.regard"
    golden().save(path)
    old = path.read_bytes()

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        recorded().save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["a.regard"]


# kill -9 at every instant: the writer stops itself after any number of bytes, and at every call to the system.


def forked_writer(path, pieces, instant):
    """Write a file in small pieces in a child that dies by SIGKILL at an instant; returns whether it died."""

    child = os.fork()
    if child == 0:
        try:
            count = 0

            def tick():
                nonlocal count
                count += 1
                if count == instant:
                    os.kill(os.getpid(), signal.SIGKILL)

            def slowly():
                for piece in pieces:
                    tick()
                    yield piece
                    tick()

            for name in ("fsync", "replace"):
                real = getattr(os, name)

                def mortal(*args, real=real, **kwargs):
                    tick()
                    out = real(*args, **kwargs)
                    tick()
                    return out

                setattr(os, name, mortal)
            atomic_write(path, slowly())
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer raised"
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_500_instants_the_old_or_the_new_file_is_whole(tmp_path):
    path = tmp_path / "a.regard"
    golden().save(path)
    old = path.read_bytes()
    recorded(values=True).save(tmp_path / "new.regard")
    new = (tmp_path / "new.regard").read_bytes()
    size = len(new) // 249 + 1
    pieces = [new[at : at + size] for at in range(0, len(new), size)]
    instants, died, seen_new = 0, 0, 0
    for instant in range(1, 502):
        path.write_bytes(old)
        died += forked_writer(path, pieces, instant)
        instants += 1
        now = path.read_bytes()
        assert now in (old, new), f"instant {instant} left half a file"
        seen_new += now == new
        regard.load(path)
        for rest in tmp_path.glob(".a.regard.*.part"):
            rest.unlink()
    assert instants >= 500
    assert died >= 480
    assert seen_new >= 1  # killed after the rename, the new file is there


def test_killed_from_outside_while_saving(tmp_path):
    """The same without arranging anything: a process saves without end and is killed while it does."""
    code = textwrap.dedent("""
        import sys, torch, regard
        from regard.recorder import Recording
        from regard.recorder.calls import SavedCall
        from regard.recorder.recording import Layer, Pass
        from regard.core.scores.kinds import ScaledDot
        q = torch.randn(1, 8, 512, 64)
        print("ready", flush=True)
        while True:
            kept = SavedCall(q, q, None, None, ScaledDot(), None, None)
            Recording([Pass([Layer("x", 0, "self", kept, {}, (1, 8, 512, 512))])]).save(sys.argv[1])
    """)
    path = tmp_path / "a.regard"
    golden().save(path)
    for wait in (0.0, 0.013, 0.05):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        child.stdout.readline()
        try:
            child.wait(wait + 0.05)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        regard.load(path)
