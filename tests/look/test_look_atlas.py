"""The atlas in a real browser: a thumbnail of every head, sorted, as rows, in the tray, compared."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.page import content
from support.opened_page import Shown
from support.page_probe import minilm, translation

IT, ANIMAL = 10, 2


def order(shown: Shown) -> list[tuple[int, int]]:
    keys = shown.tab.evaluate("[...document.querySelectorAll('.headcell')].map((x) => x.dataset.key)")
    return [tuple(map(int, key.split("-")[1:])) for key in keys]


@pytest.mark.parametrize("by", ["entropy", "previous", "sink"])
def test_heads_are_sorted_by_any_number(show: Any, it: View, by: str) -> None:
    shown = show(it).view("overview")
    shown.choose("metric", by)
    shown.choose("sort", "metric")
    values = {(layer, head): value for layer, head, _, value in minilm()[0].heads(by)}
    numbers = [values[pair] for pair in order(shown)]
    assert len(numbers) == 72
    assert numbers == pytest.approx(sorted(numbers, reverse=by != "entropy"), abs=1e-4)


def test_heads_are_sorted_by_what_a_word_gives_to_another(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    shown.choose("sort", "given")
    shown.choose("given", ANIMAL)
    seen, _ = minilm()
    weights_to = [float(seen[layer, head][IT, ANIMAL]) for layer, head in order(shown)]
    assert weights_to == pytest.approx(sorted(weights_to, reverse=True), abs=1e-6)
    assert order(shown)[0] == (5, 11)
    shown.choose("sort", "tie")
    assert order(shown)[:2] == [(2, 1), (2, 3)], "as the chips of the spotlight"


def test_cells_show_the_row_of_the_lit_word(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    shown.choose("cells", "row")
    heights = """(key) => { const c = document.querySelector(`[data-key="${key}"] canvas`), d = c.getContext('2d').getImageData(0, 0,
        c.width, c.height).data; return [...Array(c.width).keys()].map((x) => [...Array(c.height).keys()].filter((y) =>
        d[4 * (y * c.width + x)] < 200).length); }"""
    row = minilm()[0][2, 1].row(IT)
    got = torch.tensor(shown.tab.evaluate(heights, "head-2-1")).double() / 24
    torch.testing.assert_close(got, row.double().sqrt(), atol=0.03, rtol=0)
    shown.choose("word", 6)
    got = torch.tensor(shown.tab.evaluate(heights, "head-2-1")).double() / 24
    torch.testing.assert_close(got, minilm()[0][2, 1].row(6).double().sqrt(), atol=0.03, rtol=0)


def test_a_click_adds_a_head_and_the_tray_goes_through_all_views(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    for key in ("head-1-1", "head-4-4", "head-0-2"):
        shown.click(key)
        shown.tab.wait_for_timeout(20)
    cells = shown.tab.locator('.headcell[aria-pressed="true"]')
    assert sorted(cells.evaluate_all("(x) => x.map((y) => y.dataset.key)")) == ["head-0-2", "head-1-1", "head-4-4"]
    shown.click("head-4-4")
    shown.click("open-tray")
    assert shown.ask("page.state.view") == "spotlight"
    assert [re.search(r"layer \d+, head \d+", text).group() for text in shown.texts(".hero .who")] == [
        "layer 1, head 1",
        "layer 0, head 2",
    ]
    shown.view("walk")
    assert "layer 1, head 1" in shown.text(".message")
    shown.view("overview")
    shown.tab.locator('[data-key="head-3-3"]').dblclick()
    assert shown.ask("page.state.view") == "spotlight"


def test_heads_of_the_tray_are_marked_before_any_is_chosen(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    marked = shown.tab.locator(".headcell.on")
    assert marked.evaluate_all("(x) => x.map((y) => [y.dataset.key, y.querySelector('b').textContent.trim()])") == [
        ["head-2-1", "A"],
        ["head-3-1", "B"],
    ]
    assert shown.tab.locator('.headcell[aria-pressed="true"]').count() == 0, "none was chosen"
    assert marked.first.get_attribute("aria-label").endswith("; shown as A")


PER_PIXEL = "(canvas) => canvas.width / canvas.getBoundingClientRect().width"
DARK = """(canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data
    .filter((x, n) => n % 4 === 0 && x < 60).length"""


@pytest.mark.parametrize("width", [390, 1440])
def test_no_weight_is_lost_where_a_pattern_has_fewer_pixels_than_words(show: Any, width: int) -> None:
    """A canvas with more cells than pixels shows every third row or so, and not the others."""
    t, at = 300, torch.arange(300)
    w = torch.zeros(2, t, t)
    w[0, at, (7 * at + 3) % t] = 1.0
    w[1] = 1 / t
    single = torch.zeros(2, t, t)
    single[:, at, at] = 1.0
    single[0, 150], single[0, 150, 203] = 0.0, 1.0
    shown = show(regard.Weights.from_dense(w).show(5), width=width).view("overview")
    shown.tab.hover('[data-key="head-0-0"]')
    closer = shown.tab.locator(".peek canvas")
    assert closer.evaluate(PER_PIXEL) <= 1
    assert closer.evaluate(DARK) > 150, "of 300 weights, some in one cell"
    shown.tab.locator('[data-key="head-0-1"]').click(modifiers=["Shift"])
    for canvas in shown.tab.locator(".versus canvas").all():
        assert canvas.evaluate(PER_PIXEL) <= 1
    q = 30 * torch.nn.functional.one_hot((7 * at + 3) % t, t).float()
    lab = show(regard.weights(q, torch.eye(t), score="dot").show(5), width=width, name="lab.html").view("play")
    lab.tab.wait_for_selector(".map canvas")
    all_words = lab.tab.locator(".map canvas").first
    assert all_words.evaluate(PER_PIXEL) <= 1
    assert all_words.evaluate(DARK) > 150
    both = [regard.Weights.from_dense(one[0]) for one in (torch.eye(t).expand(2, t, t), single)]
    compared = show(regard.compare(*both).show(), width=width, name="compared.html")
    for canvas in compared.tab.locator(".triple .three canvas, .flow canvas").all():
        assert canvas.evaluate(PER_PIXEL) <= 1
    orange = """(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return d.filter((x, n) => n % 4 === 0 && Math.abs(x - d[n + 2]) > 60).length; }"""
    assert compared.tab.locator(".flow canvas").first.evaluate(orange) == 2, (
        "what one row gives less, and what it gives more"
    )


def middle_of(shown: Shown, key: str) -> tuple[float, float]:
    shown.tab.locator(f'[data-key="{key}"]').scroll_into_view_if_needed()
    box = shown.tab.locator(f'[data-key="{key}"]').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_shift_and_click_compare_two_heads(show: Any, it: View) -> None:
    seen, _ = minilm()
    shown = show(it).view("overview")
    mouse, keys = shown.tab.mouse, shown.tab.keyboard
    for key in ("head-4-4", "head-3-2", "head-3-1"):  # the way to a head leads over others
        mouse.move(*middle_of(shown, key))
    keys.down("Shift")
    mouse.down()
    mouse.up()
    keys.up("Shift")
    assert shown.texts(".peek b") == ["layer 2, head 1", "layer 3, head 1"], "with the first head of the tray"
    mouse.move(*middle_of(shown, "head-0-0"))
    assert shown.texts(".peek b") == ["layer 2, head 1", "layer 3, head 1"], "they stay in sight"
    difference = seen[2, 1].dense() - seen[3, 1].dense()
    i, j = divmod(int(difference.abs().argmax()), 15)
    words = seen.layers[0].weights.tokens[0]
    sentence = shown.text('[data-read="difference"]')
    assert sentence.startswith(f"most: {words[i]} → {words[j]}")
    colours = shown.tab.evaluate(
        """(() => { const c = document.querySelector('.versus figure canvas'), d = c.getContext('2d').getImageData(0, 0, 15, 15).data;
            return [...Array(225).keys()].map((n) => d[4 * n] - d[4 * n + 2]); })()"""
    )
    red = torch.tensor(colours).reshape(15, 15)
    assert int(red[difference < -0.3].min()) > 0 > int(red[difference > 0.3].max()), "orange and blue"
    shown.click("compare")
    assert len(shown.texts(".peek b")) == 1


def test_keys_and_fingers_compare_two_heads(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    shown.tab.focus('[data-key="head-4-4"]')
    shown.tab.keyboard.press("Shift+Enter")
    assert shown.texts(".peek b") == ["layer 2, head 1", "layer 4, head 4"]
    assert shown.tab.evaluate("document.activeElement.dataset.key") == "head-4-4"
    shown.click("open-head")
    assert [re.search(r"layer \d+, head \d+", text).group() for text in shown.texts(".hero .who")] == [
        "layer 2, head 1",
        "layer 4, head 4",
    ]
    phone = show(it, width=390, height=844, has_touch=True, is_mobile=True, name="phone.html").view("overview")
    for key in ("head-1-5", "head-3-1", "compare"):
        phone.tab.tap(f'[data-key="{key}"]')
    assert phone.texts(".peek b") == ["layer 1, head 5", "layer 3, head 1"]
    assert phone.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("touch", [False, True])
def test_the_hint_names_what_a_hand_can_do(show: Any, it: View, touch: bool) -> None:
    shown = show(it, width=390 if touch else 1440, has_touch=touch, is_mobile=touch).view("overview")
    hint = shown.tab.locator(".peek .hint").last.inner_text()
    assert ("A click adds" in shown.text(".look"), "A tap adds" in shown.text(".look")) == (not touch, touch)
    shown.view("spotlight")
    assert ("or click" in shown.text(".look"), "Tap another word" in shown.text(".look")) == (not touch, touch)
    shown.view("overview")
    assert ("shift-click" in hint, "A tap adds" in hint) == (not touch, touch)
    boxes = [button.bounding_box() for button in shown.tab.locator(".peek .chip").all()]
    assert touch or max(box["height"] for box in boxes) < 40, "a line each"


def test_the_atlas_says_what_its_colours_and_bars_are(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    assert shown.text(".columns .legend").split() == ["0", "1"]
    shown.choose("cells", "row")
    assert "the root of the weight" in shown.text(".columns .hint")


def test_keys_reach_every_head_and_enter_opens_it(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    shown.choose("sort", "metric")
    first = order(shown)
    shown.tab.locator('.headcell[tabindex="0"]').focus()
    shown.tab.keyboard.press("ArrowRight")
    key = shown.tab.evaluate("document.activeElement.dataset.key")
    assert key == f"head-{first[1][0]}-{first[1][1]}"
    shown.tab.keyboard.press("Space")
    shown.tab.wait_for_timeout(20)
    assert shown.tab.evaluate("document.activeElement.dataset.key") == key, "the focus stays on the head"
    assert shown.tab.locator(f'[data-key="{key}"]').get_attribute("aria-pressed") == "true"
    shown.tab.keyboard.press("Enter")
    assert shown.ask("page.state.view") == "spotlight"


def test_a_grid_of_32_heads_is_seen_whole(show: Any) -> None:
    shown = show(regard.weights(torch.randn(32, 6, 4)).show(), width=1440).view("overview")
    assert shown.tab.evaluate(
        "(() => { const x = document.querySelector('.columns .scroll'); return x.scrollWidth <= x.clientWidth; })()"
    )


def test_thumbnails_of_few_heads_are_no_posters_on_a_phone(show: Any) -> None:
    shown = show(translation().show(), width=390, height=844).view("overview")
    assert max(cell.bounding_box()["width"] for cell in shown.tab.locator(".headcell").all()) <= 96


def test_the_grid_fits_a_phone(show: Any, it: View) -> None:
    shown = show(it, width=390, height=844).view("overview")
    right = shown.tab.evaluate(
        "Math.max(...[...document.querySelectorAll('.headcell')].map((x) => x.getBoundingClientRect().right))"
    )
    assert right <= 382
    boxes = shown.tab.evaluate(
        "[...document.querySelectorAll('.headcell')].map((x) => x.getBoundingClientRect().width)"
    )
    assert min(boxes) >= 24, "large enough for a finger"
    assert shown.tab.locator(".peek").bounding_box()["y"] < shown.tab.locator(".grid").bounding_box()["y"]


def test_heads_of_two_stacks_are_not_mixed(show: Any) -> None:
    shown = show(translation().show("Haus")).view("overview")
    shown.click("head-0-0")
    shown.tab.wait_for_timeout(450)
    shown.click("head-0-1")
    assert len(shown.ask("page.state.chosen")) == 2
    shown.tab.wait_for_timeout(450)
    shown.tab.locator(".headcell").last.click()
    assert shown.ask("page.state.chosen.length") == 1


def test_heads_that_the_page_does_not_hold_have_thumbnails_all_the_same(
    show: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "LONG_BYTES", 300_000)
    numbers = torch.Generator().manual_seed(0)
    q, k = (torch.randn(40, 304, 4, generator=numbers) for _ in "qk")
    q[33, 200], k[33, 100], q[33, :, -1], k[33, :, -1] = 0, 0, 0, 0
    q[33, 200, -1] = k[33, 100, -1] = 9
    W = regard.weights(q, k)
    shown = show(W.show(3)).view("overview")
    held = shown.ask("page.book.heads.filter((h) => !h.stack.window).map((h) => h.head)")
    assert 33 not in held
    assert len(held) < 10
    assert shown.tab.locator(".headcell canvas").count() == 40
    size, at = shown.tab.evaluate(
        """(() => { const c = document.querySelector('[data-key="head-0-33"] canvas'), d = c.getContext('2d').getImageData(0,
            0, c.width, c.height).data; let best = 0; for (let n = 0; n < d.length; n += 4) if (d[n] < d[best]) best = n;
            return [c.width, best / 4]; })()"""
    )
    assert (at // size, at % size) == (200 * size // 304, 100 * size // 304)


@pytest.mark.slow
def test_a_thousand_thumbnails_are_drawn_at_once(show: Any) -> None:
    W = regard.weights(torch.randn(1024, 304, 4), torch.randn(1024, 304, 4))
    shown = show(W.show(3))
    began = time.perf_counter()
    shown.view("overview")
    assert shown.tab.locator(".headcell canvas").count() == 1024
    assert time.perf_counter() - began <= 1.5


def test_the_axes_of_the_scatter_are_named_as_in_their_menus(show: Any, it: View) -> None:
    """They had the names of the fields: mean_distance_without_sink."""
    shown = show(it).view("overview")
    for by in ("mean_distance_without_sink", "sink"):
        shown.choose("axis-y", by)
        chosen = shown.tab.evaluate("document.querySelector('[data-key=\"axis-y\"]').selectedOptions[0].text")
        named = shown.tab.locator(".scatter > text").all_text_contents()[-2:]
        assert named == ["entropy", chosen]
    assert "_" not in shown.text(".plot") + shown.tab.locator(".scatter").get_attribute("aria-label")
    assert "_" not in "".join(shown.tab.locator(".scatter title").all_text_contents())


def test_heads_of_the_tray_are_ringed_in_the_scatter(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    places = """(() => { const at = (x) => [x.getAttribute('cx'), x.getAttribute('cy')].join();
        const named = Object.fromEntries([...document.querySelectorAll('.point')].map((x) => [at(x), x.textContent.split(':')[0]]));
        return [...document.querySelectorAll('.scatter .ring')].map((x) => [named[at(x)], x.style.stroke]); })()"""
    assert sorted(shown.tab.evaluate(places)) == [["layer 2, head 1", "var(--h0)"], ["layer 3, head 1", "var(--h1)"]]


def test_points_of_one_layer_are_no_paler_than_those_of_many(show: Any, it: View) -> None:
    """The later the layer, the stronger the colour: a single one had the colour of the first of many, next to white."""
    least = """Math.min(...[...document.querySelectorAll('.point')].map((x) => { const [r, g, b] = x.style.fill.match(/\\d+/g).map(Number);
        return Math.abs(250 - r); }))"""
    one = show(regard.weights(torch.randn(4, 9, 8)).show(3)).view("overview")
    assert one.tab.evaluate(least) > 150
    assert one.texts(".grid tbody th") == [""], "a layer without a name has no number either"
    assert "layer" not in one.text(".plot figcaption")
    assert "the later the layer" in show(it, name="many.html").view("overview").text(".plot figcaption")


def test_a_point_is_looked_at_beside_the_scatter(show: Any, it: View) -> None:
    """The closer look stood above, out of sight, while one pointed at the points."""
    shown = show(it, width=1440, height=900).view("overview")
    point = shown.tab.locator(".point").nth(40)
    point.scroll_into_view_if_needed()
    point.hover()
    name = point.locator("title").text_content().split(":")[0]
    assert shown.text(".peek b") == name
    box = shown.tab.locator(".peek b").first.bounding_box()
    assert 0 <= box["y"] <= 900 - box["height"], "in sight"


def test_the_head_of_a_window_is_marked_in_the_atlas(show: Any) -> None:
    x = torch.randn(2, 400, 8, generator=torch.Generator().manual_seed(0))
    shown = show(regard.weights(x, mask=regard.causal()).show(200))
    shown.ask("page.vectors")
    shown.view("spotlight")
    heads = shown.ask("page.heads.map((head) => head.head)")
    shown.view("overview")
    marked = [one.get_attribute("data-key") for one in shown.tab.locator(".headcell.on").all()]
    assert heads
    assert sorted(marked) == sorted(f"head-0-{head}" for head in heads)
