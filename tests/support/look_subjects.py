"""What the tests of the viewer look at: recordings, weights and histories that are the same on every machine."""

from __future__ import annotations

import math

import torch

from regard.recorder.calls import SavedCall
from regard.recorder.recording import Layer, Pass, Recording

TOKENS = [
    "[CLS]",
    "the",
    "animal",
    "didn",
    "'",
    "t",
    "cross",
    "the",
    "street",
    "because",
    "it",
    "was",
    "too",
    "tired",
    "[SEP]",
]


def attention(layer: int, heads: int, rows: int, cols: int) -> torch.Tensor:
    """Weights that are the same on every machine: a few keys stand out in every row."""
    h, i, j = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (heads, rows, cols)), indexing="ij")
    return (4 * torch.sin((layer + 1) * (h + 2) * (i + 1) * 0.37 + j * (h + 1) * 1.7)).softmax(-1)


def fake_recording(tokens=TOKENS, source=None, layers=2, heads=3) -> Recording:
    """A recording without a model: its weights are those of `attention`."""
    one = Pass()
    cols = source or tokens
    for n in range(layers):
        w = attention(n, heads, len(tokens), len(cols)).unsqueeze(0)
        kind = "cross" if source else "self"
        saved = SavedCall(None, None, None, w, None, None, None)
        one.layers.append(Layer(f"layer.{n}", n, kind, saved, {}, tuple(w.shape), ([list(tokens)], [list(cols)]), one))
    return Recording([one])


HISTORY = [(step, {f"block.{b}/{what}/{h}": math.exp(-step / 40 * (h + 1)) * (9 if what == "max_score" else 1)
                   for b in range(2) for what in ("entropy_share", "max_score") for h in range(2)}) for step in range(0, 100, 5)]  # fmt: skip
WIDE = ["[CLS]", "日本", "語", "は", "😀", "👩‍👩‍👧", "שלום", "עולם", "naïve", "e\u0301tude", "##s", "[SEP]"]
