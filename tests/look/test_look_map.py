"""The map of a long input in a real browser: no weight is hidden, any weight can be zoomed to, and exact means exact."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.dot_head import DotHead, max_map, why_not_exact
from regard.look.page import exact
from support.opened_page import Once, Shown, number, weight
from support.page_probe import Read

ROW, KEY = 18_000, 12_345


def needle(length: int, row: int, key: int, mask: Any = None, score: Any = None) -> regard.Weights:
    """Noise, and one row that gives one key the weight 1."""
    numbers = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, length, 8, generator=numbers) for _ in "qk")
    q[0, row], k[0, key], q[..., -1], k[..., -1] = 0, 0, 0, 0  # of the last coordinate only these two have any
    q[0, row, -1] = k[0, key, -1] = 14
    words = ["recall" if n == row else "needle" if n == key else f"w{n % 50}" for n in range(length)]
    return regard.weights(q, k, score=score or regard.ScaledDot(), mask=mask).label(words)


@pytest.fixture(scope="module")
def haystack() -> View:
    return Once(needle(20_000, ROW, KEY), word="recall")


@pytest.fixture(scope="module")
def middle() -> tuple[regard.Weights, View]:
    W = needle(1500, 1200, 345, regard.causal() & regard.window(900, 0))
    return W, Once(W, word="recall")


def darkest(shown: Shown) -> tuple[float, float]:
    """Where the darkest pixel of the map is, as shares of its height and width."""
    x, y, dark, second = shown.tab.evaluate(
        """(() => { const c = document.querySelector('.map-canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            const found = []; let least = 255; for (let n = 0; n < d.length; n += 4) least = Math.min(least, d[n]);
            for (let n = 0; n < d.length; n += 4) if (d[n] === least) found.push(n / 4);
            const mean = (f) => found.reduce((s, n) => s + f(n), 0) / found.length;
            return [mean((n) => n % c.width) / c.width, mean((n) => Math.floor(n / c.width)) / c.height, least, found.length]; })()"""
    )
    assert dark < 40, "it is dark"
    assert second < 400, "and the only one"
    return y, x


def ready(shown: Shown) -> Shown:
    """Wait until the page has read its queries and keys, and drawn what it computes."""
    for _ in range(300):
        level = "document.querySelector('[data-read=level]').textContent"
        if not shown.ask(f"page.vectorsPending || {level}.includes('computing')"):
            return shown
        shown.tab.wait_for_timeout(20)
    raise AssertionError("the page computes no tiles")


def drawn(shown: Shown) -> None:
    """Wait until the window that was asked for is drawn: the map draws once a frame."""
    shown.tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(null))))")


def ring(shown: Shown) -> tuple[float, float]:
    """The middle of the ring around the planted weight, on the screen."""
    return tuple(
        shown.tab.evaluate(
            """(link) => { const b = document.querySelector(`[data-link="${link}"]`).getBoundingClientRect();
                           return [b.left + b.width / 2, b.top + b.height / 2]; }""",
            f"{ROW} {KEY}",
        )
    )


def map_box(shown: Shown) -> dict[str, float]:
    return shown.tab.locator(".map-canvas").bounding_box()


# The mask.

PAGES = torch.arange(700) // 230
MASKS = {
    "causal": (regard.causal(), lambda i, j: j > i, 458),
    "window": (regard.window(60, 60), lambda i, j: abs(i - j) > 60, 520),
    "documents": (regard.documents(PAGES), lambda i, j: PAGES[i] != PAGES[j], 457),
}


#: Whether places of the map lie in what is hatched.
HATCHED = """((places, { i0, i1, j0, j1 }) => { const { width, height } = document.querySelector('.map-over .border').getBBox(),
    path = document.querySelector('.map-over .masked'), { x, y } = document.querySelector('.map-over .border').getBBox();
    return places.map(([i, j]) => path.isPointInFill(new DOMPoint(x + ((j + 0.5 - j0) / (j1 - j0)) * width, y + ((i + 0.5 - i0) / (i1 - i0)) * height))); })"""


@pytest.mark.parametrize("name", MASKS)
def test_what_the_mask_forbids_is_hatched_at_every_zoom(show: Any, name: str) -> None:
    mask, forbids, edge = MASKS[name]
    numbers = torch.Generator().manual_seed(1)
    W = regard.weights(torch.randn(2, 700, 8, generator=numbers), mask=mask).label([f"w{n}" for n in range(700)])
    shown = ready(show(W.show(350)))
    for i0, i1, j0, j1 in ((0, 700, 0, 700), (360, 560, edge - 100, edge + 100), (454, 466, edge - 6, edge + 6)):
        view, side = {"i0": i0, "i1": i1, "j0": j0, "j1": j1}, i1 - i0
        shown.ask(f"(page.long.view = {json.dumps(view)}, page.draw())")
        drawn(shown)
        air, step = side // 100, max(1, side // 24)  # a strip has several rows where they are smaller than two pixels
        places = [
            (i, j)
            for i in range(i0 + air, i1 - air, step)
            for j in range(j0, j1, step)
            if len({bool(forbids(i + d, j)) for d in (-air, 0, air)}) == 1
        ]
        hatched = shown.ask(f"{HATCHED}({json.dumps(places)}, {json.dumps(view)})")
        assert hatched == [bool(forbids(i, j)) for i, j in places], view
        assert len(places) > 100
        assert len(set(hatched)) == 2, "both sides of its edge are seen"


def test_a_map_without_a_mask_is_not_hatched(show: Any) -> None:
    shown = ready(show(regard.weights(torch.randn(1, 400, 8)).show(3)))
    assert shown.tab.locator(".map-over .masked").count() == 0


# Python: the largest weight of every tile, and what the page computes.


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.causal() & regard.window(40, 0)])
@pytest.mark.parametrize("score", ["scaled_dot", "cosine"])
def test_the_largest_weight_of_every_tile(mask: Any, score: str) -> None:
    torch.manual_seed(0)
    W = regard.weights(2 * torch.randn(3, 101, 8), torch.randn(3, 101, 8), score=score, mask=mask)
    assert why_not_exact(W) is None, "a cosine is a product of normalised vectors"
    tiles, dense = max_map(W, 13, 10), W.dense()
    for r in range(13):
        for c in range(10):
            part = dense[:, r * 101 // 13 : (r + 1) * 101 // 13, c * 101 // 10 : (c + 1) * 101 // 10]
            torch.testing.assert_close(tiles[:, r, c], part.amax((1, 2)))


BIASES = {
    "of keys": lambda score: score.bias(torch.randn(1, 60)),
    "of rows": lambda score: score.bias(torch.randn(60, 1)).sink(torch.tensor([1.0, 0.0])),
    "of both": lambda score: score.bias(torch.randn(2, 1, 60)).bias(torch.randn(2, 60, 1)),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("score", [regard.ScaledDot(), regard.Cosine(), regard.Gaussian(1.5)])
def test_biases_of_rows_and_keys_are_exact(name: str, score: Any) -> None:
    torch.manual_seed(0)
    W = regard.weights(torch.randn(2, 60, 8), torch.randn(2, 60, 8), score=BIASES[name](score), mask=regard.causal())
    assert why_not_exact(W) is None
    rows = [0, 7, 59]
    for h in range(2):
        head = DotHead.of(W, h)
        torch.testing.assert_close(head.rows(rows).float(), W[h].dense()[rows])
        rounded = head.in_16_bits(W, h)
        if W._factors.score.sink_logits is None:
            torch.testing.assert_close(rounded.rows(rows).sum(-1), torch.ones(3).double(), rtol=1e-5, atol=0)
        torch.testing.assert_close(rounded.rows(rows).float(), W[h].dense()[rows], rtol=2e-2, atol=1e-4)


def test_the_page_adds_the_bias_of_a_key(show: Any) -> None:
    torch.manual_seed(0)
    W = regard.weights(torch.randn(1, 340, 8), score=regard.ScaledDot().bias(torch.randn(1, 340)), mask=regard.causal())
    shown = ready(show(W.show(200)))
    assert shown.ask("page.head.stored.exact.isExact")
    row = torch.tensor(shown.ask("[...await page.head.stored.row(200)]"))
    torch.testing.assert_close(row, W[0, 200], rtol=1e-3, atol=1e-7)
    one = shown.ask("page.head.stored.exact.weight(200, 77)")
    assert one == pytest.approx(float(W[0, 200, 77]), rel=1e-3)


def test_shared_keys_sinks_and_masks_are_exact() -> None:
    torch.manual_seed(0)
    score = regard.ScaledDot().sink(torch.tensor([1.0, 2.0, 0.5, 0.0]))
    W = regard.weights(torch.randn(4, 30, 8), torch.randn(2, 30, 8), score=score, mask=regard.causal())
    for h in range(4):
        torch.testing.assert_close(DotHead.of(W, h).rows([0, 7, 29]).float(), W[h].dense()[[0, 7, 29]])


@pytest.mark.parametrize(("size", "bits"), [(0.1, 16), (2.5, 32)])
def test_sixteen_bits_where_they_suffice_and_the_largest_error_is_told(size: float, bits: int) -> None:
    torch.manual_seed(0)
    x = size * torch.randn(1, 400, 16)
    W = regard.weights(x, x.flip(1), score="dot")
    read = Read(W.show(3).html())
    (spec,) = read.header["vectors"]
    assert spec["bits"] == bits
    assert spec["error"] <= exact.TOLERANCE
    head = DotHead.of(W, 0)
    rows = list(range(0, 400, 7))
    stored = head.in_16_bits(W, 0) if bits == 16 else head
    truth = regard.weights(x.double(), x.double().flip(1), score="dot").dense()[0][rows]
    off = lambda one: float((one.rows(rows) / truth - 1).abs()[truth > 1e-30].max())  # noqa: E731
    assert off(stored) <= 3 * max(spec["error"], 1e-5)
    assert off(head.in_16_bits(W, 0)) > exact.TOLERANCE or bits == 16
    part, full = head.in_16_bits(W, 0, rows), head.in_16_bits(W, 0)
    torch.testing.assert_close(part.rows(rows), full.rows(rows), rtol=1e-4, atol=1e-12)


def test_the_page_says_why_it_is_not_exact(show: Any) -> None:
    x = torch.randn(1, 320, 8)
    shown = show(regard.weights(x, score=regard.ScaledDot().softcap(3.0)).show(3))
    assert "No exact weights: the scores have a bias of every cell, a cap" in shown.text("[data-read=level]")
    assert shown.tab.locator('[data-key="read"]').is_hidden()


# The map.


@pytest.mark.parametrize("dark", [False, True])
def test_a_planted_weight_of_one_is_the_strongest_pixel(show: Any, haystack: View, dark: bool) -> None:
    shown = show(haystack, dark=dark, height=1200)
    shown.tab.uncheck('[data-key="marks"]')
    if not dark:
        y, x = darkest(shown)
        assert (y, x) == (pytest.approx(ROW / 20_000, abs=0.008), pytest.approx(KEY / 20_000, abs=0.008))
    shown.tab.check('[data-key="marks"]')
    shown.tab.wait_for_timeout(100)
    assert f"{ROW} {KEY}" in shown.tab.evaluate("[...document.querySelectorAll('.ring')].map((x) => x.dataset.link)")


def test_the_needle_is_zoomed_to_its_exact_weight(show: Any, haystack: View) -> None:
    shown = ready(show(haystack, height=1200))
    box = map_box(shown)
    assert shown.text('[data-key="read"]') == "zoom in to 300 words to read them"
    for _ in range(14):  # turn the wheel over the ring
        shown.tab.mouse.move(*ring(shown))
        shown.tab.mouse.wheel(0, -240)
        shown.tab.wait_for_timeout(30)
        drawn(shown)
    view = shown.ask("page.long.view")
    assert view["i1"] - view["i0"] < 64
    assert view["i0"] <= ROW < view["i1"]
    shown.tab.locator('[data-key="read"]:enabled').wait_for()  # it follows the window a while later
    assert shown.text('[data-key="read"]') == "read these words"
    ready(shown)
    assert map_box(shown) == box, "zooming does not move the map"
    shown.tab.mouse.move(*ring(shown))
    assert shown.text(".readout").split() == ["18000", "recall", "→", "12345", "needle", "1.000", "exact"]
    assert shown.text("[data-read=level]").startswith("Exact: weights from q and k of ")
    assert "recall" in shown.tab.locator(".ruler").all_text_contents()
    assert "needle" in shown.tab.locator(".ruler").all_text_contents()
    y, x = darkest_share(shown)  # the corner of the darkest cell
    view = shown.ask("page.long.view")
    half = box["width"] / (view["j1"] - view["j0"]) / 2
    assert box["x"] + x * box["width"] == pytest.approx(ring(shown)[0] - half, abs=3)
    assert box["y"] + y * box["height"] == pytest.approx(ring(shown)[1] - half, abs=3)


def darkest_share(shown: Shown) -> tuple[float, float]:
    return tuple(
        shown.tab.evaluate(
            """(() => { const c = document.querySelector('.map-canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                let best = 0; for (let n = 0; n < d.length; n += 4) if (d[n] < d[best]) best = n;
                return [Math.floor(best / 4 / c.width) / c.height, (best / 4 % c.width) / c.width]; })()"""
        )
    )


def test_every_exact_tile_and_row_is_the_weight(show: Any, middle: tuple[regard.Weights, View]) -> None:
    W, view = middle
    dense = W.dense()[0]
    shown = ready(show(view, height=1200))
    for i0, i1, j0, j1 in ((0, 20, 0, 25), (1190, 1210, 340, 360), (1480, 1500, 0, 1500), (700, 701, 600, 705)):
        block = shown.ask(f"[...page.head.stored.exact.block({i0}, {i1}, {j0}, {j1})]")
        want = dense[i0:i1, j0:j1].flatten()
        torch.testing.assert_close(torch.tensor(block), want, rtol=1e-3, atol=1e-7)
        assert torch.equal(torch.tensor(block) == 0, want == 0), "the mask is the same"
    assert shown.ask("page.head.stored.exact.weight(1200, 345)") == pytest.approx(float(dense[1200, 345]), rel=1e-3)
    shown.tab.mouse.move(5, 5)
    shown.ask("page.source.row(800)")
    row = shown.ask("[...(await page.source.row(800))]")
    torch.testing.assert_close(torch.tensor(row), dense[800], rtol=1e-3, atol=1e-7)


def test_drag_double_click_keys_and_crumbs_move_the_window(show: Any, middle: tuple[regard.Weights, View]) -> None:
    shown = ready(show(middle[1], height=1200))
    size = lambda: shown.ask("page.long.view ? page.long.view.i1 - page.long.view.i0 : 1500")  # noqa: E731
    box = map_box(shown)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    shown.tab.mouse.dblclick(x, y)
    shown.tab.wait_for_timeout(50)
    assert size() == pytest.approx(375)
    before = shown.ask("page.long.view.i0")
    shown.tab.mouse.move(x, y)
    shown.tab.mouse.down()
    shown.tab.mouse.move(x + 10, y + 60, steps=4)
    shown.tab.mouse.up()
    assert shown.ask("page.long.view.i0") == pytest.approx(before - 60 / box["height"] * 375, rel=0.02)
    shown.tab.focus('[data-key="map"]')
    keys = shown.tab.keyboard
    keys.press("+")
    assert size() == pytest.approx(187.5)
    keys.press("-")
    assert size() == pytest.approx(375)
    for _ in range(3):
        keys.press("ArrowDown")
    shown.tab.wait_for_timeout(50)
    assert re.search(r"\d", shown.text(".readout b, .readout .who"))
    keys.press("0")
    shown.tab.wait_for_timeout(50)
    assert size() == 1500
    assert shown.texts(".crumb") == ["1,500 words"]
    keys.press("+")
    keys.press("+")
    keys.press("+")
    shown.tab.wait_for_timeout(100)
    crumbs = shown.texts(".crumb")
    assert crumbs[0] == "1,500 words"
    assert len(crumbs) >= 2
    shown.click("crumb-0")
    assert size() == 1500
    assert shown.tab.evaluate("document.activeElement !== document.body"), "the focus stays"


def test_two_fingers_zoom(show: Any, middle: tuple[regard.Weights, View]) -> None:
    shown = ready(show(middle[1], width=390, height=844, has_touch=True))
    shown.tab.locator(".map-canvas").scroll_into_view_if_needed()
    shown.tab.evaluate(
        """() => { const over = document.querySelector('.map-over'), b = document.querySelector('.map-canvas').getBoundingClientRect();
            const at = (id, x, type) => over.dispatchEvent(new PointerEvent(type, { pointerId: id, bubbles: true, pointerType: 'touch',
              clientX: b.left + b.width / 2 + x, clientY: b.top + b.height / 2 + x }));
            at(1, -20, 'pointerdown'); at(2, 20, 'pointerdown'); at(1, -40, 'pointermove'); at(2, 40, 'pointermove');
            at(1, -40, 'pointerup'); at(2, 40, 'pointerup'); }"""
    )
    shown.tab.wait_for_timeout(50)
    assert shown.ask("page.long.view.i1 - page.long.view.i0") == pytest.approx(750, rel=0.02)
    assert shown.tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_word_is_found_and_a_row_is_gone_to(show: Any, middle: tuple[regard.Weights, View]) -> None:
    shown = ready(show(middle[1], height=1200))
    shown.tab.fill('[data-key="find"]', "Recall")
    shown.tab.keyboard.press("Enter")
    shown.tab.wait_for_timeout(250)
    view = shown.ask("page.long.view")
    assert view["i0"] < 1200 < view["i1"]
    assert view["j0"] < 345 < view["j1"], "where that row looks most"
    assert shown.text(".best .token") == "345 needle"
    assert any(", words " in text for text in shown.texts(".profile figcaption")), "profiles follow the window"
    shown.tab.fill('[data-key="find"]', "7")
    shown.tab.keyboard.press("Enter")
    shown.tab.wait_for_timeout(50)
    assert shown.ask("page.long.row") == 7
    shown.tab.fill('[data-key="find"]', "nowhere")
    shown.tab.keyboard.press("Enter")
    assert "no word “nowhere”" in shown.text(".readout")


def test_mean_and_max_are_told_apart_and_colours_are_fitted_only_by_choice(show: Any) -> None:
    W = needle(1500, 1200, 345, score=regard.ScaledDot().softcap(1e4))
    shown = show(W.show("recall"), height=1200)
    box = map_box(shown)
    tiles = shown.ask("page.source.tiles")[0]
    a, b = 1200 * tiles // 1500, 345 * tiles // 1500
    where = box["x"] + (b + 0.5) * box["width"] / tiles, box["y"] + (a + 0.5) * box["height"] / tiles
    shown.tab.mouse.move(*where)
    assert number(shown.text('[data-read="tile"]')) == pytest.approx(1, abs=2e-3)
    assert shown.text(".longmap .legend").split() == ["0", "1"]
    shown.choose("mode", "mean")
    shown.tab.mouse.move(where[0] + 0.5, where[1])
    rows, cols = (slice(n * 1500 // tiles, (n + 1) * 1500 // tiles) for n in (a, b))
    want = float(W.dense()[0][rows, cols].sum(-1).mean())
    assert number(shown.text('[data-read="tile"]')) == pytest.approx(want, rel=0.06)
    shown.tab.check('[data-key="fit"]')
    assert "fitted: " in shown.text(".longmap .legend")


# No cliff at 300 tokens.


def test_a_window_of_a_long_text_is_read_like_a_short_one(show: Any, middle: tuple[regard.Weights, View]) -> None:
    W, view = middle
    dense = W.dense()[0]
    shown = ready(show(view, height=1200))
    assert shown.texts("[role=tab]")[:4] == ["Map", "Spotlight", "Story", "Walk"]
    shown.view("spotlight")
    assert shown.text(".word.lit .token") == "recall"
    assert shown.text("[data-read=window]").endswith("of 1,500; 100 % of the weight of recall is outside.")
    shown.view("long")
    shown.ask("page.long.view = {i0: 1150, i1: 1250, j0: 300, j1: 400}, page.refresh()")
    shown.click("read")
    shown.tab.mouse.move(5, 5)  # off the words that now lie where the button was
    assert shown.ask("page.state.view") == "cross"
    assert re.sub(r"\s+", " ", shown.text(".hero")) == "recall → needle 1.00"
    shown.ask("page.set({word: 7, hover: null})")
    row = shown.ask("[...page.head.row(7)]")
    torch.testing.assert_close(torch.tensor(row), dense[1157, 300:400], rtol=1e-3, atol=1e-7)
    shown.view("walk")
    weights = [weight(t) for t in shown.texts(".steps .w")]
    assert weights == pytest.approx(dense[1157, 300:400].tolist(), abs=6e-4)
    shown.view("square")
    assert shown.tab.locator(".matrix canvas").count() >= 1


def test_what_lies_outside_of_a_window_is_that_of_the_word_and_the_head_that_are_shown(show: Any) -> None:
    x = torch.randn(3, 500, 8, generator=torch.Generator().manual_seed(6))
    W = regard.weights(1.5 * x, x.flip(0))
    shown = ready(show(W.show(250)))
    for view in ("spotlight", "story", "walk", "play", "square"):
        shown.view(view)
        for head, word in ((2, 10), (0, 10), (1, 60)):
            shown.ask(f"page.set({{ chosen: [page.stack.heads[{head}].id], word: {word}, hover: null }})")
            first, last, *_ = shown.ask("page.stack.window")
            outside = 1 - float(W[head].row(first + word)[first:last].sum())
            note = re.search(
                r"; (\d+) % of the weight of (\d+) in head (\d+) is outside", shown.text("[data-read=window]")
            )
            assert note, shown.text("[data-read=window]")
            assert float(note[1]) == pytest.approx(100 * outside, abs=0.51)
            assert (note[2], note[3]) == (str(first + word), str(head))
    shown.view("play")
    assert "words of the window share the whole row" in shown.text(".bars figcaption")
    shown.view("long")
    assert shown.tab.locator("[data-read=window]").count() == 0


def test_the_first_window_holds_the_word_that_the_row_looks_at_most(show: Any) -> None:
    shown = ready(show(needle(1500, 700, 820).show("recall"))).view("spotlight")
    assert re.sub(r"\s+", " ", shown.text(".hero")) == "recall → needle 1.00"
    first, last, *_ = shown.ask("page.stack.window")
    assert last - first <= 300


def test_the_page_of_a_long_input_is_as_large_as_its_vectors(show: Any, haystack: View, tmp_path: Path) -> None:
    show(haystack)
    (spec,) = Read(haystack.html()).header["vectors"]
    vectors = 2 * 20_000 * 8 * spec["bits"] // 8
    assert (tmp_path / "page.html").stat().st_size <= 1.4 * vectors + 2_000_000


def test_beyond_shows_what_exceeds_its_place_and_not_the_sink(show: Any) -> None:
    """Every row gives the first key a third, one row gives one key nearly all: the column is what one expects."""
    numbers = torch.Generator().manual_seed(4)
    q, k = (0.1 * torch.randn(1, 600, 8, generator=numbers) for _ in "qk")
    q[..., 6], k[0, 0, 6] = 1, 17  # a sink
    q[0, 500, 7], k[0, 200, 7] = 30, 1.2
    shown = show(regard.weights(q, k).show(500))
    ready(shown)
    shown.choose("mode", "beyond")
    drawn(shown)
    assert "exceeds an equal share, and what its key or its distance gets" in shown.text("[data-read=level]")
    y, x = darkest(ready(shown))
    assert (y, x) == (pytest.approx(500.5 / 600, abs=0.01), pytest.approx(200.5 / 600, abs=0.01))
    sink = shown.ask("[300, 400].map((i) => page.head.stored.exact.weight(i, 0) - page.head.stored.expected(i, 0))")
    assert all(abs(beyond) < 0.05 for beyond in sink)
    assert shown.ask("location.hash.includes('m=beyond')")


def test_beyond_leaves_the_first_rows_of_a_causal_text_pale(show: Any) -> None:
    """They see few words, and give each of them much, whatever the head does."""
    numbers = torch.Generator().manual_seed(4)
    shown = ready(show(regard.weights(0.1 * torch.randn(1, 600, 8, generator=numbers), mask=regard.causal()).show(500)))
    source = "page.head.stored"
    assert shown.ask(f"{source}.exact.weight(0, 0)") == pytest.approx(1, abs=1e-3)
    first = shown.ask(
        f"[0, 1, 5, 30].flatMap((i) => [0, i].map((j) => {source}.exact.weight(i, j) - {source}.expected(i, j)))"
    )
    assert max(first) < 0.02
    assert shown.ask(f"{source}.beyond(0, 0)") < 0.02


def test_the_story_of_a_window_is_told(middle: tuple[regard.Weights, View], show: Any) -> None:
    shown = ready(show(middle[1]))
    shown.view("story")
    for _ in range(12):
        shown.tab.keyboard.press("ArrowRight")
    assert shown.tab.locator("section.view.story").is_visible()


def test_a_window_can_be_played_with(middle: tuple[regard.Weights, View], show: Any) -> None:
    W, view = middle
    shown = ready(show(view))
    shown.view("play")
    window = shown.ask("page.stack.window")
    assert window[1] - window[0] == 80
    word = shown.ask("page.state.word") + window[0]
    weights = torch.tensor(shown.ask("[...page.played.w[page.state.word]]"))
    here = W[0, word, window[2] : window[3]]
    torch.testing.assert_close(weights, here / here.sum(), rtol=2e-3, atol=1e-6)
