"""Pointing, tapping and typing in a real browser: nothing moves under the pointer, and no control loses the focus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View, spotlight
from regard.look.page import html as page_html
from regard.look.svg import svg
from regard.look.terminal import draw
from support.opened_page import Shown
from support.page_probe import SENTENCE, history, minilm, translation

WIDTHS = (390, 1024, 1440)
CLOSED = [
    "[CLS]",
    "一緒に",
    "a",
    "internationalisation",
    "😀",
    "the",
    "'",
    "of",
    "antidisestablishmentarianism",
    "שלום",
]


def long_labels() -> View:
    """Words of every length and script, in two heads: the headline has the most to write."""
    x = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(3))
    return regard.weights(2 * x).label(CLOSED).show("a")


def stage_top(shown: Shown) -> float:
    return shown.tab.evaluate("document.querySelector('.stage').getBoundingClientRect().top")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("subject", ["minilm", "long labels", "two sentences"])
def test_pointing_at_a_word_moves_nothing(show: Any, it: View, subject: str, width: int) -> None:
    view = {"minilm": lambda: it, "long labels": long_labels, "two sentences": lambda: translation().show("Haus")}
    shown = show(view[subject](), width=width, height=844)
    before = stage_top(shown)
    places = shown.tab.evaluate(
        """[...document.querySelectorAll('[role="option"]')].map((word) => {
             const b = word.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2, b.bottom]; })"""
    )
    for n, (x, y, bottom) in enumerate(places):
        if bottom > 844:
            continue
        shown.tab.mouse.move(x, y)
        shown.tab.wait_for_timeout(30)
        assert stage_top(shown) == before, f"word {n} moved the stage"
        assert shown.tab.evaluate("[...document.querySelectorAll('.word.lit')].map((x) => Number(x.dataset.n))") == [n]
    shown.tab.mouse.move(2, 2)
    assert stage_top(shown) == before


@pytest.mark.parametrize("width", [390, 768])
def test_every_word_can_be_tapped(show: Any, it: View, width: int) -> None:
    shown = show(it, width=width, height=844, has_touch=True, is_mobile=True)
    words = shown.tab.locator('[role="option"]')
    for n in range(words.count()):
        words.nth(n).scroll_into_view_if_needed()
        box = words.nth(n).bounding_box()
        shown.tab.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert shown.ask("[page.state.word, page.state.hover]") == [n, None]
        assert words.nth(n).get_attribute("aria-selected") == "true"


# What is named can be seen.


def quick_fox() -> regard.Weights:
    x = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    return regard.weights(x, mask=regard.causal()).label(words)


def test_the_headline_names_no_word_that_the_mask_forbids(show: Any) -> None:
    W = quick_fox()
    dense = W.dense()
    shown = show(W.show("the"))
    for i in range(9):
        shown.click(f"word-{i}")
        for one in shown.ask(
            "page.stack.heads.map((head) => { const sheet = head.sheet(page.state); "
            f"return [head.head, sheet.best({i}).key, sheet.named({i})]; }})"
        ):
            head, tied, named = one
            assert float(dense[head, i, tied]) > 0
            assert float(dense[head, i, named]) > 0
        for text in shown.texts(".hero p"):
            assert float(re.search(r"\d\.\d\d", text).group()) > 0
    cat = regard.weights(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), mask=regard.causal())
    shown = show(cat.label(["the", "cat", "sat"]).show("cat"))
    assert re.sub(r"\s+", " ", shown.text(".hero")) == "cat → cat 0.94"


def test_a_row_that_sees_nothing_names_nothing(show: Any) -> None:
    mask = torch.ones(4, 4).tril().bool()
    mask[2] = False
    W = regard.weights(torch.randn(2, 4, 8), mask=mask).label(list("abcd"))
    shown = show(W.show("c"))
    assert re.sub(r"\s+", " ", shown.text(".hero p")) == "c looks at nothing head 0"
    assert "“c” looks at nothing" in draw(W, word="c")
    assert "“c” looks at nothing" in svg(W, word="c")
    assert [tie.key for tie in spotlight.spotlight(W, "c").ranking] == [None, None]
    assert all(tie.word != 2 for tie in spotlight.overview(W).ties)


def first_of_page(shown: Shown) -> tuple[str, str]:
    """The first head and the word that the page names."""
    hero = shown.tab.locator(".hero p").first
    key = hero.locator(".token").nth(1).inner_text().rstrip("₀₁₂₃₄₅₆₇₈₉")
    return hero.locator(".who").inner_text().split(";")[0], key


FACES = {
    **{f"minilm {n}": (lambda: minilm()[0], {"word": n}) for n in range(0, 15, 2)},
    "minilm, it to animal": (lambda: minilm()[0], {"word": "it", "target": "animal"}),
    "minilm, it to was": (lambda: minilm()[0], {"word": "it", "target": "was"}),
    "minilm, one head": (lambda: minilm()[0], {"word": "it", "layer": 1, "head": 1}),
    **{f"causal {n}": (quick_fox, {"word": n}) for n in range(9)},
    "translation": (translation, {"word": "Haus"}),
}


@pytest.mark.parametrize("name", FACES)
def test_terminal_page_and_picture_name_the_same_head_and_word_first(show: Any, name: str) -> None:
    subject, options = FACES[name][0](), FACES[name][1]
    head, key = first_of_page(show(View(subject, **options)))
    place = r"(?:cross-attention, )?((?:layer \d+, )?head \d+)"
    headline = re.search(rf"^{place}  “.*?” → “(.*?)” ", draw(subject, **options), re.M)
    drawn = re.search(rf">{place}: “.*?” → “(.*?)” ", svg(subject, **options))
    assert (head, key) == headline.groups() == drawn.groups()


def test_without_a_word_the_page_begins_where_the_terminal_does(show: Any) -> None:
    for subject in (minilm()[0], quick_fox(), translation()):
        seen = spotlight.overview(subject)
        tie = seen.ties[0]
        shown = show(View(subject))
        assert shown.text(".word.lit .token") == seen.rows.labels[tie.word]
        place, key = first_of_page(shown)
        assert int(place.rpartition(" ")[2]) == tie.head.head
        assert key == seen.cols.labels[tie.key]


def test_a_square_of_two_sentences_is_cross_attention_everywhere(show: Any) -> None:
    W = regard.weights(torch.randn(3, 4), torch.randn(3, 4)).label(list("abc"), list("xyz"))
    shown = show(W.show("b"))
    assert shown.ask("page.state.view") == "cross"
    assert shown.texts(".sentence ~ .sentence .token") == ["x", "y", "z"]
    assert "»b« → x y z" in draw(W, word="b")
    assert "solid" not in svg(regard.weights(torch.randn(3, 4)).label(list("abc")), word="b")


# Focus.

ACTIVE = "document.activeElement.getAttribute('data-key')"


def test_controls_of_the_walk_keep_the_focus(show: Any, it: View) -> None:
    shown = show(it).view("walk")
    shown.click("walk-words")
    keys = shown.tab.keyboard
    for key, press in (
        ("walk-Wq", "Space"),
        ("dot-2", "Enter"),
        ("dot-2", "Enter"),
        ("walk-head", "Enter"),
        ("walk-words", "Space"),
    ):
        shown.tab.focus(f'[data-key="{key}"]')
        keys.press(press)
        assert shown.tab.evaluate(ACTIVE) == key


def test_the_products_of_a_walk_are_one_stop_of_the_tab_key(show: Any) -> None:
    """Of 197 patches each was a stop: who came by keys had to go through all of them."""
    x = torch.randn(1, 197, 8, generator=torch.Generator().manual_seed(0))
    shown = show(regard.weights(x).label([f"w{n}" for n in range(197)]).show(100)).view("walk")
    keys, products = shown.tab.keyboard, shown.tab.locator('[data-key^="dot-"]')
    assert products.count() == 197
    stops = products.locator("xpath=self::*[@tabindex='0']")
    assert [one.get_attribute("data-key") for one in stops.all()] == ["dot-100"], "that of the largest weight: its own"
    stops.first.focus()
    for press, place in (
        ("ArrowRight", 101),
        ("ArrowLeft", 100),
        ("ArrowLeft", 99),
        ("Home", 0),
        ("ArrowLeft", 0),
        ("End", 196),
    ):
        keys.press(press)
        assert shown.tab.evaluate(ACTIVE) == f"dot-{place}"
    named = shown.tab.locator(".steps tbody th").first.bounding_box()
    for place in (0, 150, 20):
        shown.tab.locator(f'[data-key="dot-{place + 1}"]').focus()
        keys.press("ArrowLeft")
        box = products.nth(place).bounding_box()
        assert box["x"] >= named["x"] + named["width"] - 1, "not below the names of the steps"
    keys.press("Enter")
    assert shown.tab.evaluate(ACTIVE) == "dot-20"


def test_a_head_that_is_opened_by_a_key_leaves_the_focus_on_the_lit_word(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    shown.tab.focus('[data-key="head-3-1"]')
    shown.tab.keyboard.press("Enter")
    assert shown.ask("page.state.view") == "spotlight"
    assert shown.tab.evaluate(ACTIVE) == "word-10"
    shown.tab.keyboard.press("ArrowRight")
    assert shown.text(".word.lit .token") == "was"


def test_chips_of_exact_rows_keep_the_focus(show: Any) -> None:
    shown = show(regard.weights(torch.randn(400, 8)).show(3))
    key = shown.tab.locator(".halves .chips .chip").nth(2).get_attribute("data-key")
    shown.tab.focus(f'[data-key="{key}"]')
    shown.tab.keyboard.press("Enter")
    shown.tab.wait_for_selector(f'[data-key="{key}"][aria-pressed="true"]')
    assert shown.tab.evaluate(ACTIVE) == key


def test_the_focus_outlives_a_resize_and_a_change_of_theme(show: Any, it: View) -> None:
    shown = show(it)
    chip = shown.tab.locator(".chips .chip").first.get_attribute("data-key")
    shown.tab.focus(f'[data-key="{chip}"]')
    shown.tab.set_viewport_size({"width": 700, "height": 800})
    shown.tab.wait_for_timeout(100)
    assert shown.tab.evaluate(ACTIVE) == chip
    shown.tab.emulate_media(color_scheme="dark")
    shown.tab.wait_for_timeout(100)
    assert shown.tab.evaluate(ACTIVE) == chip


# Play, all heads, what is looked at.


def slide(shown: Shown, power: float) -> None:
    shown.tab.locator('[data-key="power"]').evaluate(
        "(x, p) => { x.value = p; x.dispatchEvent(new Event('input')); }", power
    )


def test_bars_and_map_of_play_have_fixed_scales(show: Any, it: View) -> None:
    shown = show(it, reduced_motion="reduce").view("play")
    full = shown.tab.locator(".bars .lanes").first.bounding_box()["width"] * 0.74
    darkest = """(() => { const c = document.querySelector('.map canvas'), d = c.getContext('2d').getImageData(0, 0,
        c.width, c.height).data; let least = 255; for (let n = 0; n < d.length; n += 4) least = Math.min(least, d[n]);
        return least; })()"""
    shades = {}
    for power in (-5.0, 0.0, 5.0):
        slide(shown, power)
        weights = shown.ask("page.played.w[page.state.word]")
        for bar in shown.tab.locator(".bars .lane").all()[::4]:
            j = int(bar.locator("b").get_attribute("data-j"))
            assert bar.locator("i").bounding_box()["width"] == pytest.approx(max(1, weights[j] * full), abs=1)
        shown.finish_lab()  # the map is drawn after the bars
        shades[power] = shown.tab.evaluate(darkest)
    assert shades[-5.0] > 150 > shades[5.0], "uniform weights are pale, saturated ones dark"
    slide(shown, 2)
    recorded = minilm()[0][2, 1].row(10).tolist()
    for bar in shown.tab.locator(".bars .lane").all()[::4]:
        j = int(bar.locator("b").get_attribute("data-j"))
        ghost = bar.locator(".ghost").bounding_box()
        assert ghost["x"] + ghost["width"] - bar.bounding_box()["x"] == pytest.approx(recorded[j] * full, abs=1.5)


def test_looking_at_a_head_reads_the_style_sheet_once(show: Any) -> None:
    x = torch.randn(4, 220, 8)
    shown = show(regard.weights(x).show(3)).view("overview")
    shown.tab.evaluate(
        """() => { window.reads = 0; const read = window.getComputedStyle;
                   window.getComputedStyle = (...x) => { window.reads++; return read(...x); }; }"""
    )
    for head in range(4):
        shown.tab.hover(f'[data-key="head-0-{head}"]')
    assert shown.tab.evaluate("window.reads") <= 7


def test_every_head_has_a_thumbnail_of_its_weights(show: Any, it: View) -> None:
    seen, _ = minilm()
    shown = show(it).view("overview")
    assert shown.tab.locator(".headcell canvas").count() == 72
    grey = shown.tab.evaluate(
        """[...document.querySelectorAll('.headcell')].map((cell) => { const c = cell.querySelector('canvas');
            return [cell.dataset.key, c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]; })"""
    )
    for key, width, data in grey[::11]:
        _, layer, head = key.split("-")
        assert width == 15
        w = seen[int(layer), int(head)].dense().flatten()
        red = torch.tensor(data).reshape(-1, 4)[:, 0]
        order = w.argsort()
        assert (red[order].diff() <= 0).all(), "the more weight, the darker"


def test_a_thumbnail_of_many_words_shows_its_strongest_weight(show: Any) -> None:
    w = torch.full((2, 250, 250), 1 / 250)
    w[1, 200] = 0
    w[1, 200, 30] = 1
    shown = show(regard.Weights.from_dense(w).show(3)).view("overview")
    size, at = shown.tab.evaluate(
        """(() => { const c = document.querySelector('[data-key="head-0-1"] canvas'), d = c.getContext('2d').getImageData(0,
            0, c.width, c.height).data; let best = 0; for (let n = 0; n < d.length; n += 4) if (d[n] < d[best]) best = n;
            return [c.width, best / 4]; })()"""
    )
    assert size < 100
    assert (at // size, at % size) == (200 * size // 250, 30 * size // 250)


def test_the_page_says_which_model_it_is_and_how_large(show: Any) -> None:
    seen, vectors = minilm()
    shown = show(View(seen, word="it", word_vectors=vectors, model="all-MiniLM-L6-v2"))
    for view in shown.ask("page.views.map(([id]) => id)"):
        shown.view(view)
        assert shown.text(".about") == "all-MiniLM-L6-v2 · 6 layers × 12 heads · 15 tokens"
    assert shown.text("h1") == SENTENCE.lower()
    assert show(quick_fox().show(1)).text(".about") == "3 heads · 9 tokens"


def test_a_translation_opens_with_the_attention_between_its_sentences(show: Any) -> None:
    shown = show(View(translation()))
    assert shown.ask("page.state.view") == "cross"
    assert shown.ask("page.views[0][0]") == "cross"
    assert shown.text("h1") == "the house is small → das Haus ist sehr klein"
    assert show(View(translation(), word="Haus")).ask("page.state.view") == "cross"


def test_words_that_occur_twice_are_numbered_and_chips_say_what_orders_them(show: Any, it: View) -> None:
    shown = show(it)
    shown.click("word-7")
    assert shown.text(".hero .token") == "the₂"
    assert shown.texts('[role="option"] .token')[7] == "the", "the sentence itself is as it was written"
    chips = shown.texts(".chips .chip[aria-pressed]")
    beyond = [float(re.search(r"\+(\d\.\d\d)", chip).group(1)) for chip in chips]
    assert beyond == sorted(beyond, reverse=True)


def test_words_that_the_mask_forbids_are_grey(show: Any) -> None:
    shown = show(quick_fox().show("fox"))
    assert shown.texts(".word.unseen .token") == ["jumps", "over", "a", "lazy", "dog"]


def test_special_tokens_are_as_dark_as_words_where_they_are_shaded(show: Any, it: View) -> None:
    shown = show(it)
    colour = "(n) => getComputedStyle(document.querySelector(`[data-key='word-${n}'] .token`)).color"
    assert shown.tab.evaluate(colour, 0) == shown.tab.evaluate(colour, 2), "[CLS] has a weight of 0.13"
    assert shown.tab.evaluate(colour, 14) != shown.tab.evaluate(colour, 2), "[SEP] has next to none"


def test_the_address_leads_back_to_the_same_picture(show: Any, it: View) -> None:
    shown = show(it)
    assert shown.tab.evaluate("location.hash") == "", "nothing was changed yet"
    shown.click("word-6")
    shown.tab.mouse.move(2, 2)
    shown.tab.check('[data-key="hide"]')
    shown.tab.locator(".chips .chip[aria-pressed='false']").first.click()
    before = shown.text(".hero"), shown.text(".word.lit .token"), shown.ask("page.state.chosen")
    shown.tab.reload()
    shown.tab.wait_for_selector("main section.view")
    assert (shown.text(".hero"), shown.text(".word.lit .token"), shown.ask("page.state.chosen")) == before
    shown.view("square")
    assert shown.tab.evaluate("location.hash").startswith("#v=square&w=6&h=")
    for hostile in ("#v=<img>&w=99&h=x,9.9&s=-1", "#w=1e9", "#v=__proto__&w=2.5", "#%E0%A4%A"):
        shown.tab.evaluate(f"location.hash = {hostile!r}")
        shown.tab.wait_for_timeout(30)
        assert shown.tab.locator("main section.view").count() == 1


@pytest.mark.parametrize("subject", ["minilm", "long", "two sentences", "training"])
def test_the_modules_of_the_script_import_what_they_use(browser: Any, it: View, subject: str) -> None:
    """The page runs them joined; as modules of their own they must run as well."""
    view = {
        "minilm": lambda: it,
        "long": lambda: needle(3).show(3),
        "two sentences": lambda: View(translation()),
        "training": lambda: View(history()),
    }[subject]()
    data = re.search(r'id="regard-data">([^<]*)<', view.html()).group(1)
    frame = f'<div id="regard"></div><script id="regard-data" type="x">{data}</script>'
    if vectors := re.search(r'<script [^>]*id="regard-vectors">[^<]*</script>', view.html()):
        frame += vectors.group()
    folder = Path(page_html.__file__).parent
    tab = browser.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    script = "<script type=module src=/js/views.js></script>"
    tab.route("http://regard.test/", lambda route: route.fulfill(body=frame + script, content_type="text/html"))
    tab.route(
        re.compile(r"http://regard\.test/js/\w+\.js"),
        lambda route: route.fulfill(
            body=(folder / route.request.url.removeprefix("http://regard.test/")).read_text(),
            content_type="text/javascript",
        ),
    )
    tab.goto("http://regard.test/")
    tab.wait_for_selector("main section.view")
    for name in tab.evaluate("(async () => (await regard).views.map(([id]) => id))()"):
        if subject != "training":
            tab.click(f"#tab-{name}")
        tab.wait_for_selector(f"main section.view.{name}")
        for control in ("select", "summary", "canvas", ".chip", ".word", ".cell"):
            if tab.locator(f"main {control}").count():
                tab.locator(f"main {control}").first.dispatch_event("mousemove" if control == "canvas" else "click")
    assert errors == []
    tab.close()


# What is lit goes along.


def test_a_word_stays_lit_where_another_view_has_the_same_sentence(show: Any) -> None:
    shown = show(translation().show("Haus"))
    shown.click("word-3")
    shown.view("spotlight")
    assert shown.text(".word.lit .token") == "sehr", "in the attention of the decoder to itself"
    shown.click("word-1")
    shown.view("cross")
    assert shown.text(".word.lit .token") == "Haus"


def test_word_and_head_go_into_a_window_and_back_to_the_map(show: Any) -> None:
    shown = show(regard.weights(torch.randn(3, 400, 8)).show(123))
    shown.ask(
        "new Promise((done) => { const look = () => page.vectorsPending ? setTimeout(look, 20) : done(); look(); })"
    )
    shown.choose("head", 1)
    shown.view("spotlight")
    assert shown.ask("[page.head.head, page.state.word + page.stack.window[0]]") == [1, 123]
    shown.click("word-60")
    at = shown.ask("60 + page.stack.window[0]")
    shown.view("long")
    assert shown.ask("[page.head.head, page.state.word, page.long.row]") == [1, at, at]


def test_lines_between_two_sentences_pass_behind_their_words(show: Any) -> None:
    shown = show(translation().show("Haus"), width=390)
    grounds = """[...document.querySelectorAll('.stage .token')].map((x) => getComputedStyle(x).backgroundColor)"""
    paper = shown.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert set(shown.tab.evaluate(grounds)) == {paper}
    order = """[...document.querySelectorAll('.stage > .lines, .stage > .sentence')].map((x) => x.classList[0])"""
    assert shown.tab.evaluate(order) == ["lines", "sentence", "sentence"], "words are drawn after lines"


def test_one_word_has_an_entropy_of_at_most_zero(show: Any) -> None:
    shown = show(regard.weights(torch.randn(1, 4)).label(["hello"]).show()).view("play")
    assert shown.text(".saturation .pairs").split() == ["peak", "1.000", "entropy", "0.000", "of", "0.00", "nats"]


# Long inputs.


def needle(heads: int = 4) -> regard.Weights:
    """Causal noise; in the third head word 1500 looks at word 700 alone."""
    numbers = torch.Generator().manual_seed(1)
    q, k = torch.randn(heads, 2048, 16, generator=numbers), torch.randn(heads, 2048, 16, generator=numbers)
    q[2, 1500], k[2, 700] = 0, 0
    q[2, 1500, 0] = k[2, 700, 0] = 12
    words = ["recall" if n == 1500 else "needle" if n == 700 else f"w{n}" for n in range(2048)]
    return regard.weights(q, k, mask=regard.causal()).label(words)


def test_a_long_page_begins_with_the_head_and_word_that_tell(show: Any) -> None:
    W = needle()
    assert "head 2  “recall” → “needle” 1.000" in draw(W, word="recall")
    for view in (W.show("recall"), W.show()):
        shown = show(view)
        assert shown.ask("page.head.head") == 2
        assert shown.ask("page.long.row") == 1500
        assert shown.text(".best .token") == "700 needle"
        assert shown.text(".links tbody tr").split("\t")[0] == "1500 recall"


def test_noise_is_no_structure(show: Any) -> None:
    x = torch.randn(2, 4000, 8, generator=torch.Generator().manual_seed(2))
    shown = show(regard.weights(0.3 * x, mask=None).show(5))
    reds = shown.tab.evaluate(
        """(() => { const c = document.querySelector('.longmap canvas'); return [...c.getContext('2d').getImageData(0, 0,
            c.width, c.height).data].filter((_, n) => n % 4 === 0); })()"""
    )
    assert max(reds) - min(reds) < 60, "tiles that are nearly alike have nearly one colour"


def test_the_first_rows_of_a_causal_text_are_no_links_and_fix_no_scale(show: Any) -> None:
    shown = show(needle()[0:2].show())
    for row in shown.texts(".links tbody tr"):
        assert int(row.split()[0]) >= 63
    assert shown.ask("page.long.row") >= 63
    shown.choose("mode", "mean")
    shown.tab.check('[data-key="fit"]')
    shown.tab.wait_for_timeout(100)
    assert float(re.search(r"fitted: ([\d.]+)", shown.text(".longmap .legend"))[1]) < 0.5


def test_a_word_is_forbidden_by_a_click_and_the_row_renormalised(show: Any, it: View) -> None:
    shown = show(it, reduced_motion="reduce").view("play")
    recorded = torch.tensor(shown.ask("[...page.head.row(10)]"))
    shown.click("forbid-13")
    want = recorded.clone()
    want[13] = 0
    want /= want.sum()
    got = torch.tensor(shown.ask("page.played.w[10]"))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)  # the page has q and k in 16 bits
    assert shown.tab.evaluate("document.activeElement.dataset.key") == "forbid-13", "the button keeps the focus"
    assert shown.text(".barred .lane b") == "forbidden"
    assert "1 word forbidden: 0.694 of the recorded row" in shown.text('[data-read="forbidden"]')
    ghost = shown.tab.locator('.lane:has([data-j="13"]) .ghost').bounding_box()["width"]
    full = shown.tab.locator('.lane:has([data-j="13"])').bounding_box()["width"]
    assert ghost / (0.74 * full) == pytest.approx(0.694, abs=0.01), "the recorded weight stays as a frame"
    shown.tab.keyboard.press("Enter")
    torch.testing.assert_close(torch.tensor(shown.ask("page.played.w[10]")), recorded, atol=1e-3, rtol=1e-2)
    for n in (0, 2, 13):
        shown.click(f"forbid-{n}")
    shown.click("forbid-none")
    assert shown.tab.locator(".barred").count() == 0
    # A drag over the curves moves the slider.
    box = shown.tab.locator(".plot-area").bounding_box()
    shown.tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    shown.tab.mouse.down()
    shown.tab.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2)
    shown.tab.mouse.up()
    assert shown.ask("page.play.power") > 1
    assert shown.tab.locator('[data-key="power"]').input_value() == str(shown.ask("page.play.power"))
    assert shown.tab.evaluate("[...document.querySelectorAll('.saturation .tiny')].map((x) => x.textContent)")[:3] == [
        "0",
        "0.5",
        "1",
    ]


def test_the_slider_has_time_for_sixty_frames_at_three_hundred_tokens(show: Any) -> None:
    values = {"values": torch.randn(2, 300, 32, generator=torch.Generator().manual_seed(1))}
    shown = show(regard.weights(torch.randn(2, 300, 32, generator=torch.Generator().manual_seed(0))).show(3, **values))
    shown.view("play")
    bars = shown.tab.evaluate("[...document.querySelectorAll('.best .token')].map((x) => x.textContent)")
    took = shown.tab.evaluate(
        """() => { const x = document.querySelector('[data-key="power"]'), all = [];
           for (let n = 0; n < 40; n++) { x.value = n / 10; const t = performance.now();
             x.dispatchEvent(new Event('input')); document.body.offsetHeight; all.push(performance.now() - t); }
           return Math.min(...all); }"""
    )
    assert took <= 8, "half of a frame is left for painting"
    after = shown.tab.evaluate("[...document.querySelectorAll('.best .token')].map((x) => x.textContent)")
    assert after == bars, "bars stay where they are"
