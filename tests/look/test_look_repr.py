"""What a notebook shows of weights, recordings, tables, walks and masks: plain HTML, escaped, without a script."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import regard
from support.page_probe import CAT, HOSTILE, hostile_recording, refused


class Checked(HTMLParser):
    """Reads HTML and notes its tags; every one is closed, and none can run anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []
        assert set(self.tags) <= {"div", "figure", "figcaption", "img", "table", "thead", "tbody", "tr", "th", "td"}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert {name for name, _ in attrs} <= {"style", "src", "alt"}, attrs
        assert all(value.startswith("data:image/png;base64,") for name, value in attrs if name == "src")
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def opacities(text: str) -> torch.Tensor:
    """The opacity of every pixel of the first picture."""
    data = base64.b64decode(re.search(r"base64,([^\"]+)\"", text).group(1))
    width, height = struct.unpack(">II", data[16:24])
    size = struct.unpack(">I", data[33:37])[0]
    rows = torch.frombuffer(bytearray(zlib.decompress(data[41 : 41 + size])), dtype=torch.uint8)
    return rows.reshape(height, 1 + 4 * width)[:, 1:].reshape(height, width, 4)[..., 3]


def test_weights_show_the_pattern_of_their_heads() -> None:
    W = regard.weights(torch.randn(3, 20, 6, 8), mask=regard.causal())
    shown = W._repr_html_()
    assert Checked(shown).tags.count("img") == 12
    assert "the first 12 of 20 heads, the first sequence" in shown
    assert "dense" in shown
    expected = (255 * W[0, 0].dense() ** 0.6).round().where(torch.ones(6, 6).tril().bool(), torch.tensor(70.0))
    assert (opacities(shown) - expected).abs().max() <= 1


def test_weights_that_are_many_are_described_alone() -> None:
    W = regard.weights(torch.zeros(1, 20_000, 2))
    assert "img" not in Checked(W._repr_html_()).tags
    assert "img" not in Checked(regard.weights(torch.zeros(0, 1, 3, 2))._repr_html_()).tags


def test_a_recording_and_a_table_are_tables() -> None:
    seen = refused()
    shown = seen._repr_html_()
    assert Checked(shown).tags.count("tr") == 1 + len(seen.layers)
    assert "not recorded: layers.2.mixer: it keeps no weights" in shown
    summary = seen.summary()
    assert Checked(summary._repr_html_()).tags.count("tr") == 1 + len(summary)
    assert f'<td style="text-align:right;padding:2px 8px">{summary[0].entropy:.3f}</td>' in summary._repr_html_()
    long = type(summary)(summary.columns, list(summary) * 9)
    assert f"… {len(long) - 24} more rows" in long._repr_html_()


def test_a_walk_shows_its_steps_and_the_weights_as_bars() -> None:
    W = regard.weights(torch.randn(6, 8), mask=regard.causal()).label(CAT)
    steps = regard.walk(W, torch.randn(6, 8), "sat")
    shown = steps._repr_html_()
    assert Checked(shown).tags.count("tr") == 7
    for j in range(6):
        assert f"{float(W[2, j]):.3f}" in shown
        assert f"width:{100 * float(W[2, j]):.1f}px" in shown
    assert "-inf" in shown


def test_a_mask_is_drawn() -> None:
    shown = regard.causal()._repr_html_()
    Checked(shown)
    assert torch.equal(opacities(shown) > 0, torch.ones(8, 8).tril().bool())
    large = regard.documents(torch.arange(100) // 50)
    assert "the first 48 rows and columns of 100 × 100" in large._repr_html_()


@pytest.mark.parametrize("part", range(0, len(HOSTILE), 40))
def test_hostile_strings_stay_text(part: int) -> None:
    some = HOSTILE[part : part + 40]
    W = regard.weights(torch.randn(len(some), 4)).label(some)
    Checked(regard.walk(W, torch.randn(len(some), 4), 0)._repr_html_())
    Checked(W._repr_html_())
    if part == 0:
        Checked(hostile_recording()._repr_html_())


def test_wrong_options_of_a_view_say_what_there_is() -> None:
    W = regard.weights(torch.eye(3))
    with pytest.raises(TypeError, match=r"a view has no option 'heads'; its options are word, target, layer, head"):
        W.show(heads=[0, 1])
    with pytest.raises(
        TypeError, match=r"word must be a token or its position; got Weights\. .*regard\.compare\(a, b\)"
    ):
        W.show(W)
    with pytest.raises(TypeError, match=r"are ViewOptions; got Weights\. .*regard\.compare\(a, b\)"):
        regard.look.View(W, W)
