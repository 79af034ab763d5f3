"""Attention over images: patches of a grid, the image below them, and text that looks at an image."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.core.patches import PatchTokens
from regard.look.patches import image_pixels
from regard.look.spotlight import spotlight
from regard.look.svg import svg
from regard.look.svg_elements import HUES
from regard.look.terminal import draw
from support.page_probe import Read


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picture() -> torch.Tensor:
    """Red above, blue below, (40, 60, 3)."""
    image = torch.zeros(40, 60, 3, dtype=torch.uint8)
    image[:20, :, 0] = 200
    image[20:, :, 2] = 200
    return image


# Names.


def patches_of(length: int = 13, seed: int = 0) -> regard.Weights:
    return regard.weights(3 * randn(2, length, 8, seed=seed)).label(grid=(3, 4))


def test_positions_of_an_image_are_patches_in_a_terminal_and_in_pictures(tmp_path: Path) -> None:
    texts = [draw(patches_of(), word="1,2"), draw(patches_of()), draw(patches_of(), width=40)]
    changes = regard.compare(patches_of(), patches_of(seed=1))
    texts.append(draw(changes))
    for view in (changes.show(word="1,2"), patches_of().show("1,2"), patches_of().show()):
        view.save(tmp_path / "patches.svg")
        texts.append(" ".join(re.findall(">([^<]+)<", (tmp_path / "patches.svg").read_text())))
    for text in texts:
        assert not re.search(r"\bwords?\b", text), text
    assert "Heads that tie “1,2” to another patch" in texts[0]
    assert "Which patch is tied to which" in texts[1]
    assert "looks at few patches " in texts[1]
    assert "13 patches in both" in texts[3]
    assert "Which word is tied to which" in draw(regard.weights(randn(4, 8)).label(["3,8", "cat", "4,1", "5"]))


def test_two_recordings_of_an_image_are_compared_patch_by_patch(show: Any) -> None:
    changes = regard.compare(patches_of(), patches_of(seed=1))
    shown = show(changes.show(word="1,2"))
    text = shown.text("body") + " ".join(
        shown.tab.evaluate("[...document.querySelectorAll('[aria-label]')].map((x) => x.getAttribute('aria-label'))")
    )
    assert not re.search(r"\bwords?\b", text, re.IGNORECASE), text
    boxes = {n: shown.tab.locator(f'[data-key="word-{n}"]').bounding_box() for n in range(13)}
    assert len({round(boxes[n]["y"]) for n in range(1, 13)}) == 3, "three rows of four"
    assert len({round(boxes[n]["x"]) for n in range(1, 13)}) == 4
    assert boxes[0]["y"] < boxes[1]["y"], "[CLS] stands above"
    shown.tab.locator('[data-key="word-7"]').focus()
    shown.tab.keyboard.press("ArrowDown")
    assert shown.ask("page.state.word") == 11, "one row below"
    assert shown.text(".hero .token") == "2,2"


# Labels.


def test_positions_become_patches_after_what_is_no_patch() -> None:
    W = regard.weights(randn(2, 8, 4)).label(grid=(2, 3), image=picture())
    assert W.tokens[0] == ("[CLS]", "<|register 1|>", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2")
    assert torch.equal(W["1,1", "0,2"], W[..., 6, 4])
    assert W[0].tokens[0].image is not None, "the image goes along with a head"
    words = regard.weights(randn(3, 4), randn(6, 4)).label(["a", "red", "roof"], grid=(2, 3))
    assert words.tokens == (("a", "red", "roof"), PatchTokens.of_grid(6, (2, 3)))
    with pytest.raises(ValueError, match="a grid of 3 × 3 patches needs at least 9 positions; got 8"):
        regard.weights(randn(8, 4)).label(grid=(3, 3))
    with pytest.raises(ValueError, match=r"one token for each query position, or grid=.*; got neither"):
        regard.weights(randn(8, 4)).label()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.float() / 255,
        lambda x: torch.cat([x, torch.full((40, 60, 1), 255, dtype=torch.uint8)], -1),
    ],
)
def test_images_of_any_kind_have_the_same_pixels(make: Any) -> None:
    pixels = image_pixels(make(picture()))
    assert pixels.shape == (3, 40, 60)
    assert pixels[:, 0, 0].tolist() == [200, 0, 0]
    assert pixels[:, 39, 59].tolist() == [0, 0, 200]


def test_large_normalised_and_odd_images() -> None:
    assert image_pixels(torch.zeros(900, 450, 3)).shape == (3, 224, 112)
    normalised = image_pixels(randn(3, 8, 8))
    assert (int(normalised.min()), int(normalised.max())) == (0, 255)
    assert image_pixels(np.full((5, 4), 7, dtype=np.uint8))[:, 2, 2].tolist() == [7, 7, 7]
    for wrong in (torch.zeros(2, 2, 2, 2), torch.zeros(5, 5, 7), torch.zeros(0, 3, 3)):
        with pytest.raises(ValueError, match="image must be"):
            image_pixels(wrong)
    with pytest.raises(TypeError, match="an image of Pillow; got dict"):
        image_pixels({})


def shaded(text: str, hue: str) -> list[tuple[float, float, float]]:
    """Where patches of one colour stand, and how strong they are, the strongest first."""
    rects = re.findall(rf'<rect x="([\d.]+)" y="([\d.]+)" [^>]*fill="{hue}" fill-opacity="([\d.]+)"', text)
    return sorted(((float(x), float(y), float(o)) for x, y, o in rects), key=lambda one: -one[2])


@pytest.mark.parametrize("width", ["3.3in", "6.9in"])
def test_pictures_show_a_row_over_the_image(tmp_path: Path, width: str) -> None:
    W = regard.weights(3 * randn(2, 7, 8)).label(grid=(2, 3), image=picture())
    view = W.show("1,1")
    view.save(tmp_path / "patch.svg", part="lines", width=width)
    text = (tmp_path / "patch.svg").read_text()
    places = re.findall(
        r'<image x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" .*?href="data:image/png', text
    )
    assert len(places) == 2, "one for every head"
    assert ">1,0<" not in text
    first = spotlight(W, "1,1").heads
    for (x, y, wide, tall), tie, hue in zip([[*map(float, place)] for place in places], first, HUES, strict=True):
        assert wide / tall == pytest.approx(3 / 2, rel=0.01)
        row = W[tie.head].row("1,1")[1:]
        strongest = int(row.argmax())
        left, top, opacity = shaded(text, hue)[0]
        assert opacity == pytest.approx(0.85)
        assert left == pytest.approx(x + strongest % 3 * wide / 3, abs=0.2)
        assert top == pytest.approx(y + strongest // 3 * tall / 2, abs=0.2)
        assert len(shaded(text, hue)) == int((row / row.max() >= 0.02).sum())
        assert f"the strongest patch has {float(row.max()):.3f}" in text
    data = base64.b64decode(re.findall(r"base64,([^\"]+)", text)[0])
    assert struct.unpack(">II", data[16:24]) == (60, 40)


def test_pictures_of_words_that_look_at_patches(tmp_path: Path) -> None:
    W = regard.weights(randn(3, 8), randn(60, 8)).label(["a", "red", "roof"], grid=(6, 10))
    text = svg(W, word="red", image=picture(), grid=(6, 10))
    assert re.findall(r">(a|red|roof)</text>", text)[:3] == ["a", "red", "roof"]
    assert text.count("<image ") == 1, "of one head"
    assert "stroke-dasharray" not in text
    assert re.findall(r">(a|red|roof)</text>", text)[3:] == ["a", "red", "roof"], "the rows of the square have names"
    nothing = svg(W.label(["a", "red", "roof"], grid=(6, 10)), word="red", part="lines")
    assert "<image" not in nothing
    assert shaded(nothing, HUES[0])


# The page.


def test_a_patch_shows_its_row_over_the_picture(show: Any) -> None:
    W = regard.weights(2 * randn(1, 7, 8)).label(grid=(2, 3), image=picture())
    view = W.show("1,1")
    assert Read(view.html()).array(Read(view.html()).header["sequences"][0]["image"]).shape == (3, 40, 60)
    shown = show(view)
    canvas = shown.tab.locator(".image").bounding_box()
    first, last = (shown.tab.locator(f'[data-key="word-{n}"]').bounding_box() for n in (1, 6))
    assert canvas["x"] == pytest.approx(first["x"], abs=1)
    assert canvas["y"] == pytest.approx(first["y"], abs=1)
    assert canvas["x"] + canvas["width"] == pytest.approx(last["x"] + last["width"], abs=1)
    assert canvas["y"] + canvas["height"] == pytest.approx(last["y"] + last["height"], abs=1)
    red = "[...document.querySelector('.image').getContext('2d').getImageData(5, 5, 1, 1).data].slice(0, 3)"
    assert shown.tab.evaluate(red) == [200, 0, 0]
    # Fitted, the patch with the largest weight has the strongest colour, and the page says so.
    row = W[0].row("1,1")
    assert f"fitted: the strongest colour is {float(row[1:].max()):.3f}" in shown.text('[data-read="fit"]')
    ground = """(n) => document.querySelector(`[data-key="word-${n}"] .token`).style.background"""
    shares = [shown.tab.evaluate(ground, n) for n in range(1, 7)]
    strength = [int(text.split("%")[0].split()[-1]) for text in shares]
    assert int(np.argmax(strength)) == int(row[1:].argmax())
    assert max(strength) == 80
    shown.tab.uncheck('[data-key="fit"]')
    assert shown.text('[data-read="fit"]') == ""
    shown.tab.hover('[data-key="word-1"]')
    assert "0,0" in shown.text(".hero")
    shown.tab.focus('[data-key="word-5"]')
    shown.click("word-5")
    shown.tab.keyboard.press("ArrowUp")
    assert shown.ask("page.state.word") == 2, "a row up"


def test_words_look_at_an_image_and_patches_at_words(show: Any) -> None:
    q, k = 2 * randn(3, 8), 2 * randn(6, 8, seed=1)
    words = ["a", "red", "roof"]
    shown = show(regard.weights(q, k).label(words, grid=(2, 3), image=picture()).show("roof"))
    assert shown.tab.locator(".stage.two .sentence").count() == 2
    assert shown.tab.locator(".stage .image").count() == 1
    assert shown.tab.locator(".lines path").count() == 0
    nodes = "[...document.querySelectorAll('.sentence')].map((x) => x.childNodes.length)"
    assert shown.tab.evaluate(nodes) == [3, 7], "words, and patches with their image; nothing else"
    box = shown.tab.locator(".stage .image").bounding_box()
    assert box["width"] / box["height"] == pytest.approx(60 / 40, rel=0.02), "not stretched"
    back = show(regard.weights(k, q).label(None, words, grid=(2, 3), image=picture()).show("1,2"), width=390)
    assert back.tab.locator(".patches .lit").count() == 1
    assert back.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_recording_without_tokens_is_shown_over_its_image(show: Any) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    with regard.record(attention) as seen:
        x = randn(1, 7, 8)
        attention(x, x, x)
    view = seen.show("1,0", grid=(2, 3), image=picture())
    assert "“1,0” → " in str(view)
    shown = show(view)
    assert shown.text("h1") == "An image of 6 patches"
    shown.view("overview").choose("cells", "row")
    assert shown.tab.evaluate(
        "(() => { const c = document.querySelector('.headcell canvas'); return [c.width, c.height]; })()"
    ) == [3, 2]
    with pytest.raises(ValueError, match="no layer has the 36 patches"):
        seen.show(grid=(6, 6))
    assert seen.layers[0].tokens == (None, None), "the recording itself is as it was"


def test_a_page_of_patches_speaks_of_patches(show: Any) -> None:
    shown = show(regard.weights(randn(2, 7, 4)).label(grid=(2, 3), image=picture()).show())
    assert "Point at a patch" in shown.text(".look")
    assert shown.text(".tray .who") == "best heads for the patch"
    assert "the patch it is tied to" in shown.texts(".hint")[-1]
    words = regard.weights(randn(3, 4), randn(6, 4)).label(["a", "red", "roof"], grid=(2, 3), image=picture())
    both = show(words.show(), name="both.html")
    assert both.text("#tab-cross") == "Text and image"
    assert both.texts(".side") == ["these words look", "at these patches"]
    assert both.tab.locator(".image").bounding_box()["width"] >= 240, "a grid of few patches is not a stamp"


def test_no_view_of_patches_calls_them_words(show: Any) -> None:
    values = randn(2, 7, 4)
    view = regard.weights(randn(2, 7, 4)).label(grid=(2, 3), image=picture()).show("1,1", values=values)
    long = regard.weights(randn(1, 401, 4)).label(grid=(20, 20)).show("3,3")
    for shown in (show(view, reduced_motion="reduce"), show(long, name="long.html", reduced_motion="reduce")):
        shown.ask(
            "new Promise((done) => { const look = () => page.vectorsPending ? setTimeout(look, 20) : done(); look(); })"
        )
        for name in shown.ask("page.views.map(([id]) => id)"):
            shown.view(name)
            if name == "overview":
                shown.choose("sort", "tie")
            for n in range(shown.tab.locator('[data-key^="chapter-"]').count()):
                shown.click(f"chapter-{n}")
                assert not re.search(r"\bwords?\b", shown.text(".tale"), re.I), (name, n)
            page = shown.tab.evaluate(
                "document.querySelector('#regard').innerText + [...document.querySelectorAll('#regard *')].map((x) =>"
                " [x.getAttribute('aria-label'), x.getAttribute('title'), x.getAttribute('placeholder')].join(' ')).join(' ')"
            )
            assert not re.search(r".{0,40}\bwords?\b.{0,40}", page, re.I), (
                name,
                re.findall(r".{0,40}\bwords?\b.{0,40}", page, re.I),
            )


def test_a_square_of_few_rows_and_many_patches_can_be_read(show: Any) -> None:
    words = regard.weights(randn(4, 8), randn(197, 8)).label(list("abcd"), grid=(14, 14))
    shown = show(words.show("b"), width=390).view("square")
    canvas = shown.tab.locator(".matrix > canvas").bounding_box()
    assert canvas["height"] >= 4 * 14
    names = shown.tab.locator(".matrix text.name")
    assert names.all_text_contents()[:4] == list("abcd")
    shown.tab.mouse.move(canvas["x"] + 3, canvas["y"] + canvas["height"] * 0.9)
    assert shown.ask("page.state.cell[0]") == 3, "the pointer reads the row it is over"
