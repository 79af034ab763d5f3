"""A generator of hostile .regard files with right checksums, and the judge of what `regard.load` makes of them.

`python tests/support/hostile_files.py FIRST COUNT` judges COUNT files and prints those that went wrong; a crash of the
process, or a file that takes too long, is seen by the caller.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import struct
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import regard
from regard.core.masks.kinds import documents
from regard.core.scores.kinds import Additive, Bilinear, Cosine, Gaussian, ScaledDot
from regard.core.weights import Weights
from regard.recorder import Recording, RegardFileError
from regard.recorder.calls import SavedCall
from regard.recorder.recording import Layer, Pass

Parts = tuple[dict[str, Any], dict[str, Any], list[bytes]]  # description, table of tensors, bytes of each


def recordings() -> list[Recording]:
    """Recordings with every score, modifier and mask that a file may hold."""
    torch.manual_seed(0)
    b, h, g, i, j, d = 2, 4, 2, 6, 6, 4
    q, k, v = torch.randn(b, h, i, d), torch.randn(b, g, j, d), torch.randn(b, g, j, 3)
    scores = [
        ScaledDot(0.5).bias(torch.randn(h, i, j)).softcap(5.0),
        ScaledDot().alibi(torch.rand(h)).sink(torch.randn(h)),
        Cosine(2.0),
        Gaussian(1.5),
        Bilinear(torch.randn(h, d, d)),
        Additive(torch.randn(d, 3), torch.randn(d, 3), torch.randn(3)),
    ]
    masks = [
        regard.causal(),
        regard.window(2, 1) & regard.padding(torch.tensor([6, 4])),
        documents(torch.tensor([[0, 0, 1, 1, 1, 2]] * b)),
        ~regard.padding(torch.tensor([2, 0])) | regard.causal(),
        torch.ones(i, j, dtype=torch.bool).tril(1),
        None,
    ]
    layers = []
    for n, (score, mask) in enumerate(zip(scores, masks, strict=True)):
        mask = regard.weights(q, k, mask=mask)._factors.mask if isinstance(mask, torch.Tensor) else mask
        saved = SavedCall(q, k, v, None, score, mask, None)
        layers.append(Layer(f"layer.{n}", n, "self", saved, {}, (b, h, i, j), ([list("abcdef")] * b,) * 2))
    dense = SavedCall(None, None, None, torch.rand(b, h, i, 5).softmax(-1), None, None, None)
    layers.append(Layer("dense", len(layers), "cross", dense, {}, (b, h, i, 5)))
    short = SavedCall(q[:, :, :2], k, None, None, ScaledDot(), regard.causal(), "end")
    layers.append(Layer("cached", len(layers), "self", short, {}, (b, h, 2, j)))
    statistics = {"entropy": torch.rand(b, h, i), "received": torch.rand(b, h, j)}
    layers.append(Layer("numbers", len(layers), "self", None, statistics, (b, h, i, j)))
    return [Recording([Pass([layer])], [("x", "why")]) for layer in layers]


def taken_apart(data: bytes) -> Parts:
    """The description, the table and the tensors of a file."""
    (size,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + size])
    description = json.loads(table.pop("__metadata__")["regard"])
    body = data[8 + size :]
    return description, table, [body[slice(*entry["data_offsets"])] for entry in table.values()]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def put_together(description: Any, table: dict[str, Any], tensors: list[bytes], checksums: bool = True) -> bytes:
    """A file with right checksums."""
    if checksums and isinstance(description, dict):
        description = {**description, "checksums": {n: digest(t) for n, t in zip(table, tensors, strict=False)}}
    blank = "0" * 32
    meta = {"checksum": blank, "regard": description if isinstance(description, str) else json.dumps(description)}
    text = json.dumps({"__metadata__": meta, **table}).encode()
    text = text.replace(blank.encode(), digest(text).encode(), 1)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors)


HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**62, 2**70, -(2**40), 0.5, 1e308, math.inf, math.nan, "", "x", "self",
    "t0", "t1", "t99", [], {}, [[]], [None], {"tensor": "t0"}, {"tensor": "t1"}, {"tensor": "t99"}, {"tensor": []},
    {"float": "0x1p99999"}, {"float": "nan"}, {"float": "inf"}, {"float": "-0x1p3"}, {"float": 3}, ["Causal"],
    ["Window", 2**40, -1], ["Window", 10**9, 10**9], ["Padding", {"tensor": "t0"}], ["Dense", {"tensor": "t0"}], ["Not", ["Causal"]],
    ["Not", None], ["And", ["Causal"], "x"], ["tuple"], ["tuple", ["Softcap", 0]], ["Precomputed", ["tuple"], None,
    {"tensor": "t0"}], ["ScaledDot", ["tuple"], None, {"float": "0x1p-1"}], ["Dot", ["tuple"], {"tensor": "t0"}],
    ["Documents", {"tensor": "t0"}, {"tensor": "t1"}, True, True], ["Factors"], ["Predicate", "x"], ["os.system", "ls"],
    [[["Causal"]]],
]  # fmt: skip


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON tree."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, part in inner for p in nodes(part, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def change_description(pick: random.Random, parts: Parts) -> bytes:
    description, table, tensors = parts
    for _ in range(pick.choice((1, 1, 1, 2, 4))):
        path = pick.choice(nodes(description))
        new = pick.choice(HOSTILE)
        if pick.random() < 0.2:  # another part of the same file
            new = description
            for key in pick.choice(nodes(description)):
                new = new[key]
        description = replaced(description, path, copy.deepcopy(new))
        if not isinstance(description, dict):
            break
    return put_together(description, table, tensors, pick.random() < 0.95)


def remove_node(pick: random.Random, parts: Parts) -> bytes:
    description, table, tensors = copy.deepcopy(parts)
    *path, last = pick.choice([p for p in nodes(description) if p])
    parent: Any = description
    for key in path:
        parent = parent[key]
    del parent[last]
    return put_together(description, table, tensors)


def change_tensor(pick: random.Random, parts: Parts) -> bytes:
    """Another shape, type or content for a tensor, with offsets and checksums that fit."""
    description, table, tensors = copy.deepcopy(parts)
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
    for _ in range(pick.choice((1, 1, 2))):
        n = pick.randrange(len(table))
        entry = table[list(table)[n]]
        kind = pick.choice(("shape", "type", "axis", "axis", "content", "empty", "axes"))
        if kind == "type":
            entry["dtype"] = pick.choice(list(sizes))
        elif kind in ("axis", "shape") and entry["shape"]:
            axis = pick.randrange(len(entry["shape"]))
            entry["shape"][axis] = pick.choice((0, 1, 2, 3, 5, 8, 20))
        elif kind == "empty":
            entry["shape"] = [pick.choice((0, 1, 2**20, 2**40)) for _ in range(3)] + [0]
        elif kind == "axes":
            entry["shape"] = [1] * pick.randrange(6) + entry["shape"][: pick.randrange(5)]
        size = math.prod(entry["shape"]) * sizes[entry["dtype"]]
        if size > 2**20:  # a long axis of an empty tensor that was cut
            entry["shape"], size = [*entry["shape"], 0], 0
        body = tensors[n] * (size // max(1, len(tensors[n])) + 1) if tensors[n] else b"\0" * size
        tensors[n] = body[:size]
        if kind == "content":
            tensors[n] = bytes(pick.randrange(256) for _ in range(size))
    return put_together(description, _with_offsets(table, tensors), tensors)


def _with_offsets(table: dict[str, Any], tensors: list[bytes]) -> dict[str, Any]:
    at = 0
    for entry, body in zip(table.values(), tensors, strict=True):
        entry["data_offsets"] = [at, at + len(body)]
        at += len(body)
    return table


def fit_layer(pick: random.Random, parts: Parts) -> bytes:
    """Tensors of another shape, and a layer that claims this shape: only a full check finds the misfit."""
    description, table, tensors = copy.deepcopy(parts)
    layer = description["passes"][0]["layers"][0]
    axis = pick.randrange(4)
    size = pick.choice((0, 1, 2, 3, 12, 1000))
    old, layer["shape"][axis] = layer["shape"][axis], size
    layer["words"] = [None, None]
    for n, entry in enumerate(table.values()):
        if pick.random() < 0.6:
            entry["shape"] = [size if s == old and pick.random() < 0.8 else s for s in entry["shape"]]
        length = math.prod(entry["shape"]) * {"F32": 4, "I64": 8, "BOOL": 1}[entry["dtype"]]
        tensors[n] = (tensors[n] * (length // max(1, len(tensors[n])) + 1))[:length] if tensors[n] else b"\0" * length
    return put_together(description, _with_offsets(table, tensors), tensors)


def change_table(pick: random.Random, parts: Parts) -> bytes:
    description, table, tensors = copy.deepcopy(parts)
    wrapped = {"table": table}
    path = pick.choice([p for p in nodes(wrapped) if len(p) > 1])
    return put_together(description, replaced(wrapped, path, pick.choice(HOSTILE))["table"], tensors)


def change_bytes(pick: random.Random, parts: Parts) -> bytes:
    data = put_together(*parts)
    kind = pick.randrange(4)
    if kind == 0:
        return data[: pick.randrange(len(data))]
    if kind == 1:
        return struct.pack("<Q", pick.choice((0, 1, 2**20, 2**40, 2**64 - 1))) + data[8:]
    if kind == 2:
        return data + bytes(pick.randrange(1, 9))
    deep = "[" * 100_000 if pick.random() < 0.5 else "[" * 100_000 + "]" * 100_000
    return put_together(deep, parts[1], parts[2])


MUTATIONS = (change_description, change_description, remove_node, change_tensor, change_tensor, fit_layer, fit_layer, change_table, change_bytes)  # fmt: skip


def hostile_file(seed: int, bases: list[Parts]) -> bytes:
    pick = random.Random(seed)
    return pick.choice(MUTATIONS)(pick, copy.deepcopy(pick.choice(bases)))


def judge(path: Path) -> str | None:
    """What is wrong with the way a file was taken; None if it was refused, or read and answers rightly."""
    try:
        seen = regard.load(path)
    except RegardFileError:
        return None
    except BaseException as error:
        return f"load raised {error!r:.200}"
    try:
        return _use(seen, path)
    except BaseException as error:
        return f"using it raised {error!r:.200}"


def _use(seen: Recording, path: Path) -> str | None:
    repr(seen)
    for layer in (layer for one in seen.passes for layer in one.layers):
        if layer.saved is None:
            continue
        weights = layer.weights
        plain = Weights(weights._factors, "reference", one_head=False)
        weights.see("entropy", "received")
        numbers, expected = weights.dense(), plain.dense()
        # Random bytes make numbers near the end of a type's range, where formulas of engines overflow differently.
        moderate = all(bool((t.float().abs() < 1e3).all()) for t in weights._factors.tensors())
        if moderate and not torch.allclose(numbers, expected, atol=1e-3, rtol=1e-3, equal_nan=True):
            return "its weights differ from those of the reference engine"
        if weights.shape[0]:
            layer.sequence(0)
        if layer.values is not None and 0 not in weights.shape:
            _ = weights @ layer.values.to(weights.dtype)
    if seen.layers and all(0 not in layer.shape for layer in seen.layers):
        seen.heads("entropy", item=0)
    seen.save(path)
    regard.load(path)
    return None


def main(first: int, count: int) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.regard"
        bases = []
        for seen in recordings():
            seen.save(path)
            bases.append(taken_apart(path.read_bytes()))
        for seed in range(first, first + count):
            path.write_bytes(hostile_file(seed, bases))
            print(f"\r{seed}", end="", file=sys.stderr, flush=True)  # the last one, if the process dies
            if (reason := judge(path)) is not None:
                print(f"file {seed}: {reason}", flush=True)
                wrong += 1
    print(f"{count} hostile files, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
