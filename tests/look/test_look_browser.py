"""The page in a real browser: what is shown is true, everything can be reached, nothing runs and nothing is asked for."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.page import content
from regard.look.ranking import beyond_habit
from regard.look.token_groups import group_tokens
from support.opened_page import Shown, number, numbered, weight
from support.page_probe import HOSTILE, SUBJECTS, Read, history, hostile_recording, minilm, translation

IT, ANIMAL, CROSS = 10, 2, 6


# Spotlight.


def test_a_newcomer_sees_it_and_animal_at_once(show: Any, it: View) -> None:
    shown = show(it)
    hero = shown.tab.locator(".hero")
    assert re.sub(r"\s+", " ", hero.inner_text()) == "it → tired 0.69 layer 2, head 1 it → animal 0.64 layer 3, head 1"
    box = hero.bounding_box()
    assert box["y"] + box["height"] < 400, "it stands at the top of the page"
    size = shown.tab.evaluate("getComputedStyle(document.querySelector('.hero .weight')).fontSize")
    assert float(size.removesuffix("px")) >= 24


def test_the_spotlight_shows_the_weights(show: Any, it: View) -> None:
    seen, _ = minilm()
    shown = show(it)
    rows = shown.opened_table()
    for j, (_, first, second) in enumerate(rows):
        assert number(first) == pytest.approx(float(seen[2, 1][IT, j]), abs=5.1e-4)
        assert number(second) == pytest.approx(float(seen[3, 1][IT, j]), abs=5.1e-4)
    assert shown.text(f'[data-key="word-{ANIMAL}"] .down') == f"{seen[3, 1]['it', 'animal']:.2f}"
    assert shown.tab.locator(".lines path").count() == sum(float(seen[a, b][IT, j]) >= 0.02 for a, b in ((2, 1), (3, 1)) for j in range(15) if j != IT)  # fmt: skip


def test_heads_are_ranked_as_in_python_for_every_word(show: Any, it: View) -> None:
    seen, _ = minilm()
    shown = show(it)
    special = [token in ("[CLS]", "[SEP]") for token in seen.layers[0].weights.tokens[0]]
    for layer in range(6):
        best = beyond_habit(seen[layer][0].dense(), special, same=True)
        mine = shown.ask(
            f"page.book.heads.filter((h) => h.place === {layer}).map((h) => page.stack.rows.tokens.map((_, i) => h.sheet(page.state).best(i)))"
        )
        beyond = torch.tensor([[one["beyond"] for one in head] for head in mine])
        torch.testing.assert_close(beyond, best.beyond, atol=1e-5, rtol=1e-4)
        assert torch.tensor([[one["key"] for one in head] for head in mine]).equal(best.key)


def test_pointing_lights_a_word_and_clicking_keeps_it(show: Any, it: View) -> None:
    shown = show(it)
    lit = lambda: shown.text(".word.lit .token")  # noqa: E731
    assert lit() == "it"
    shown.tab.hover(f'[data-key="word-{CROSS}"]')
    assert lit() == "cross"
    assert shown.text(".hero").startswith("cross")
    shown.tab.mouse.move(5, 5)
    assert lit() == "it"
    shown.click(f"word-{CROSS}")
    shown.tab.mouse.move(5, 5)
    assert lit() == "cross"
    seen, _ = minilm()
    layer, head = (int(n) for n in re.findall(r"\d+", shown.text(".hero .who")))
    best = seen[layer, head].row(CROSS)
    assert shown.text(".hero .weight") == f"{best.max():.2f}"


def test_heads_are_toggled_up_to_four_in_their_own_colours(show: Any, it: View) -> None:
    shown = show(it)
    chips = shown.tab.locator(".chips .chip[aria-pressed]")
    assert chips.count() == 8
    assert shown.tab.locator('.chip[aria-pressed="true"]').count() == 2
    for n in (1, 2):
        chips.nth(n).click()
    assert shown.tab.locator('.chip[aria-pressed="true"]').count() == 4
    colours = shown.tab.evaluate(
        "[...new Set([...document.querySelectorAll('.hero .weight')].map((x) => getComputedStyle(x).color))]"
    )
    assert len(colours) == 4
    chips.nth(4).click()
    assert shown.tab.locator('.chip[aria-pressed="true"]').count() == 4
    shown.click("chip-all")
    assert shown.tab.locator(".chips .chip[aria-pressed]").count() == 72
    shown.click("chip-auto")
    assert "tired 0.69" in re.sub(r"\s+", " ", shown.text(".hero"))


def test_hidden_tokens_leave_their_share_to_the_rest_and_this_is_said(show: Any, it: View) -> None:
    seen, _ = minilm()
    shown = show(it)
    shown.tab.check('[data-key="hide"]')
    shown.tab.check('[data-key="merge"]')
    assert "renormalised" in shown.text(".warn")
    assert shown.texts(".word .token") == [
        "the",
        "animal",
        "didn't",
        "cross",
        "the",
        "street",
        "because",
        "it",
        "was",
        "too",
        "tired",
    ]
    read = group_tokens(seen.layers[0].weights.tokens[0], hide_special=True, merge=True)
    want, _ = read.word_weights(seen[3, 1].row(IT))
    for (_, _, second), w in zip(shown.opened_table(), want.tolist(), strict=True):
        assert number(second) == pytest.approx(w, abs=5.1e-4)
    shown.click("word-3")  # a word of three tokens looks as they do on average
    assert shown.text(".word.lit .token") == "didn't"
    rows, _ = read.word_weights(read.mean_rows(seen[3, 1].dense()))
    mine = shown.ask("[...page.book.heads.find((h) => h.name === 'layer 3, head 1').sheet(page.state).w[2]]")
    assert mine == pytest.approx(rows[2].tolist(), abs=1e-5)


def test_a_view_may_begin_with_words_and_without_special_tokens(show: Any) -> None:
    seen, _ = minilm()
    shown = show(seen.show("it", hide_special=True, merge=True, layer=3, head=1))
    assert re.sub(r"\s+", " ", shown.text(".hero")) == "it → animal 0.75 layer 3, head 1"
    assert shown.tab.locator('[data-key="merge"]').is_checked()


@pytest.mark.parametrize("broken", [0, 3])
def test_weights_that_are_not_numbers_are_shown_as_such_in_every_view(show: Any, broken: int) -> None:
    x = torch.randn(2, 5, 4)
    x[0, broken] = float("nan")  # in one head, from that word on
    shown = show(regard.weights(x, mask=regard.causal()).label(list("abcde")).show("e", values=torch.randn(2, 5, 3)))
    assert "Weights of 1 of 2 heads are not numbers (NaN)" in shown.text("footer")
    assert "NaN" in str(shown.opened_table())
    for view in shown.tab.locator("[role=tab]").all():
        view.click()
        shown.tab.wait_for_selector("main section.view")


def test_a_page_may_begin_with_the_heads_that_tie_two_words(show: Any) -> None:
    seen, _ = minilm()
    hero = show(View(seen, word="it", target="animal")).text(".hero")
    assert re.findall(r"layer \d+, head \d+", hero) == ["layer 5, head 11", "layer 3, head 1"]


def test_two_sentences_are_tied_by_lines_between_them(show: Any) -> None:
    seen = translation()
    shown = show(seen.show("Haus", layer=3))
    assert shown.ask("page.state.view") == "cross"
    assert shown.text(".word.lit .token") == "Haus"
    assert shown.texts(".sentence:not(.sentence ~ .sentence) .token") == ["das", "Haus", "ist", "sehr", "klein"]
    assert shown.texts(".sentence ~ .sentence .token") == ["the", "house", "is", "small"]
    rows = shown.opened_table()
    for j, (_, first, *_) in enumerate(rows):
        h = int(re.findall(r"head (\d)", shown.text(".hero .who"))[0])
        assert number(first) == pytest.approx(float(seen[3, h]["Haus"][j]), abs=5.1e-4)
    assert shown.tab.locator(".lines path").count() >= 4
    shown.view("spotlight")
    assert shown.tab.locator('[data-key="stack"] option').count() == 2


def test_right_to_left_sentences_run_from_the_right(show: Any) -> None:
    words = ["[CLS]", "השועל", "החום", "המהיר", "קופץ", "[SEP]"]
    shown = show(regard.weights(torch.randn(6, 4)).label(words).show("החום"))
    left = [shown.tab.locator(f'[data-key="word-{n}"]').bounding_box()["x"] for n in range(6)]
    assert left == sorted(left, reverse=True)
    shown.tab.focus('[data-key="word-2"]')
    shown.tab.keyboard.press("ArrowLeft")
    assert shown.text(".word.lit .token") == "המהיר"


# Walk.


def test_the_walk_is_that_of_regard_walk(show: Any) -> None:
    x, y = torch.randn(5, 8), torch.randn(5, 6)
    W = regard.weights(x, x.flip(0), mask=regard.causal()).label(["the", "cat", "sat", "down", "again"])
    shown = show(W.show("down", values=y)).view("walk")
    steps = regard.walk(W, y, "down")
    rows = [shown.tab.locator(f".steps tbody tr:nth-child({n}) td").all_inner_texts() for n in range(1, 8)]
    for row, want, digits in ((1, steps.product, 2), (2, steps.scaled, 2), (3, steps.masked, 2), (4, steps.weights, 3)):
        assert [weight(t) for t in rows[row]] == pytest.approx(want.tolist(), abs=0.51 * 10**-digits)
    shown_y = [number(t) for t in re.findall(r"[−\d.]+(?=[,\]])", rows[6][0])]
    assert shown_y == pytest.approx(steps.y.tolist(), abs=5.1e-3)
    shapes = shown.texts(".steps .shape")
    assert shapes[:2] == ["q 1×8 · k 5×8", "1×8 · 8×5"]
    assert shapes[5:] == ["5×6", "1×6"]
    assert shown.texts(".steps .step") == ["1", "2", "3", "", "4", "5", "6"], "a mask is no step of the six"


def test_a_dot_product_is_shown_cell_by_cell(show: Any) -> None:
    x = torch.randn(4, 20)
    shown = show(regard.weights(x, score="dot").show(1)).view("walk")
    shown.click("dot-2")
    q, k, products = (
        [number(t) for t in shown.tab.locator(f".products tr:nth-child({n}) td").all_inner_texts()] for n in (1, 2, 3)
    )
    assert q == pytest.approx(x[1].tolist(), abs=5.1e-3)
    assert k == pytest.approx(x[2].tolist(), abs=5.1e-3)
    assert products == pytest.approx((x[1] * x[2]).tolist(), abs=5.1e-3)
    assert number(shown.text(".cells h3").split("=")[1]) == pytest.approx(float(x[1] @ x[2]), abs=5.1e-4)


@pytest.mark.parametrize("on", ["", "q", "qk", "qkv"])
def test_the_walk_of_word_vectors_switches_projections_on(show: Any, it: View, on: str) -> None:
    _, e = minilm()
    shown = show(it).view("walk")
    shown.click("walk-words")
    for name in on:
        shown.tab.check(f'[data-key="walk-W{name}"]')
    q, k = e.q if "q" in on else e.x, e.k if "k" in on else e.x
    raw = q[IT] @ k.T
    scale = 384**-0.5 if on else 1.0
    products, softmax = (
        [weight(t) for t in shown.tab.locator(f".steps tbody tr:nth-child({n}) td").all_inner_texts()] for n in (2, 5)
    )
    assert products == pytest.approx(raw.tolist(), abs=5.1e-3)
    assert softmax == pytest.approx((raw * scale).softmax(-1).tolist(), abs=5.1e-4)
    v = e.v if "v" in on else e.x
    y = (raw * scale).softmax(-1) @ v
    shown_y = [number(t) for t in re.findall(r"[−\d.]+(?=[,\]])", shown.text(".y .vector"))]
    assert shown_y == pytest.approx(y[:6].tolist(), abs=5.1e-3)
    shown.click("walk-head")
    seen, _ = minilm()
    weights = [weight(t) for t in shown.tab.locator(".steps .w").all_inner_texts()]
    assert weights == pytest.approx(seen[2, 1].row(IT).tolist(), abs=5.1e-4)


# Play.

PLAYED = {
    "scaled": lambda f, d: regard.ScaledDot(f / d**0.5),
    "dot": lambda f, d: regard.ScaledDot(f),
    "cosine": lambda f, d: regard.Cosine(f),
    "gaussian": lambda f, d: regard.Gaussian(f**-0.5),
    "additive": lambda f, d: regard.Additive(torch.eye(d), torch.eye(d), torch.full((d,), f)),
}


def slide(shown: Shown, power: float) -> None:
    shown.tab.locator('[data-key="power"]').evaluate(
        "(x, p) => { x.value = p; x.dispatchEvent(new Event('input')); }", power
    )


@pytest.mark.parametrize("similarity", PLAYED)
def test_what_the_page_computes_is_what_regard_computes(show: Any, it: View, similarity: str) -> None:
    held = Read(it.html())
    layer = held.header["layers"][2]
    q, k, v = (held.array(layer[name])[1].float() for name in "qkv")  # as the page has them
    shown = show(it).view("play")
    shown.choose("similarity", similarity)
    for power in (0.0, 1.5):
        slide(shown, power)
        for mask, keys in (
            (None, []),
            (regard.window(2, 2), ["window"]),
            (regard.causal() & regard.window(2, 2), ["causal", "window"]),
        ):
            for key in ("causal", "window"):
                shown.tab.locator(f'[data-key="{key}"]').set_checked(key in keys)
            W = regard.weights(q.double(), k.double(), score=_double(PLAYED[similarity](2.0**power, 32)), mask=mask)
            played = shown.ask("({w: page.played.w, y: page.played.y})")
            torch.testing.assert_close(torch.tensor(played["w"]), W.dense().float(), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(torch.tensor(played["y"]), (W @ v.double()).float(), atol=1e-5, rtol=1e-5)
            assert number(shown.text('[data-read="peak"]')) == pytest.approx(float(W.peak().values[IT]), abs=5.1e-4)
            assert number(shown.text('[data-read="entropy"]')) == pytest.approx(float(W.entropy()[IT]), abs=5.1e-4)


def _double(score: Any) -> Any:
    from regard.core.pytree import tree_map

    return tree_map(score, lambda t: t.double())


@pytest.mark.parametrize(
    "name",
    [
        "words with values",
        "heads",
        "shared keys",
        "a causal mask",
        "a recording",
        "another sentence",
        "cosine",
        "additive",
    ],
)
def test_before_anything_is_changed_the_page_computes_the_weights_that_were_recorded(show: Any, name: str) -> None:
    subject, options = SUBJECTS[name]()
    shown = show(View(subject, **options)).view("play")
    for n in shown.ask("page.stack.heads.map((head) => head.id)"):
        if shown.tab.locator('[data-key="head"]').count():
            shown.choose("head", n)
        layer, head = shown.ask("[page.head.place, page.head.head]")
        W = subject.layers[layer].weights[0] if isinstance(subject, regard.Recording) else subject
        want = W.dense().reshape(-1, *W.shape[-2:])[head]
        torch.testing.assert_close(torch.tensor(shown.ask("page.played.w")), want, atol=1e-5, rtol=1e-4)
        assert torch.equal(torch.tensor(shown.ask("[...page.head.w]")), want.flatten())


def test_the_lab_begins_with_the_scores_that_were_recorded(show: Any) -> None:
    x = torch.randn(5, 4)
    shown = show(View(regard.weights(x, score="dot"))).view("play")
    chosen = "document.querySelector('[data-key=similarity]').selectedOptions[0].textContent"
    assert shown.tab.evaluate(chosen) == "as recorded: q·k"
    torch.testing.assert_close(torch.tensor(shown.ask("page.played.w")), regard.weights(x, score="dot").dense())
    assert "sim=" not in shown.tab.evaluate("location.hash")
    shown.choose("similarity", "scaled")
    want = regard.weights(x).dense()
    torch.testing.assert_close(torch.tensor(shown.ask("page.played.w")), want)
    shown.tab.wait_for_timeout(300)
    assert "sim=scaled" in shown.tab.evaluate("location.hash")
    shown.tab.reload()
    shown.tab.wait_for_selector(".saturation")
    assert shown.tab.evaluate(chosen) == "scaled dot: q·k / √d"
    biased = show(View(regard.weights(x, score=regard.ScaledDot().bias(torch.randn(5, 5)))), name="biased.html")
    assert "scores are not those of ScaledDot().bias(" in biased.view("play").text(".bars figcaption")


@pytest.mark.parametrize("width", [390, 1180])
def test_pointing_at_all_words_of_the_lab_reads_a_weight(show: Any, width: int) -> None:
    W = regard.weights(torch.randn(6, 4), mask=regard.causal()).label(["the", "cat", "sat", "on", "the", "mat"])
    shown = show(W.show("sat"), width=width).view("play")
    cells = shown.tab.locator(".map canvas").first
    cells.wait_for()
    cells.scroll_into_view_if_needed()

    def point(row: int, key: int) -> dict[str, float]:
        box = cells.bounding_box()
        shown.tab.mouse.move(box["x"] + (key + 0.5) * box["width"] / 6, box["y"] + (row + 0.5) * box["height"] / 6)
        return box

    before = point(3, 1)
    assert shown.text(".map figcaption") == f"on → cat {float(W[3, 1]):.3f}"
    assert point(1, 5) == before, "pointing moves nothing"
    assert shown.text(".map figcaption") == "cat → mat masked"
    shown.tab.mouse.click(before["x"] + 5, before["y"] + before["height"] - 5)
    assert shown.ask("page.state.word") == 5
    shown.tab.mouse.move(1, 1)
    assert shown.text(".map figcaption") == "all words at once"
    shown.click("shuffle")
    shown.tab.wait_for_timeout(300)
    order = shown.ask("page.play.order")
    cells.scroll_into_view_if_needed()
    point(0, 4)
    names = [["the₁", "cat", "sat", "on", "the₂", "mat"][n] for n in order]
    assert shown.text(".map figcaption").startswith(f"{names[0]} → {names[4]} "), "words stand in their new order"


def test_heads_that_share_values_find_them_where_only_some_are_held(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "VECTOR_BYTES", 2 * 2 * 6 * 24)  # two heads
    q, k, v = torch.randn(8, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    W = regard.weights(q, k)
    shown = show(W.show(0, values=v, head=5))
    walked = shown.ask("page.book.heads.filter((h) => h.part('q')).map((h) => h.head)")
    assert len(walked) == 2
    for head in walked:
        shown.view("play").choose("head", head)
        torch.testing.assert_close(torch.tensor(shown.ask("page.played.w")), W[head].dense(), atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(
            torch.tensor(shown.ask("page.played.y")), W[head] @ v[head // 4], atol=1e-2, rtol=1e-2
        )
    other = next(h for h in range(8) if h not in walked)
    shown.choose("head", other)
    assert "holds the weights alone" in shown.text(".plays")
    shown.view("walk")
    assert "holds the weights alone" in shown.text(".message")


def test_the_scale_saturates_the_row(show: Any, it: View) -> None:
    shown = show(it).view("play")
    slide(shown, -5)
    assert number(shown.text('[data-read="peak"]')) < 0.12
    slide(shown, 5)
    assert number(shown.text('[data-read="peak"]')) > 0.999
    assert "saturated" in shown.text(".saturation figcaption")
    assert number(shown.text('[data-read="entropy"]')) < 0.001


def test_shuffled_words_keep_their_outputs_unless_places_matter(show: Any, it: View) -> None:
    shown = show(it).view("play")
    before = shown.ask("page.played.y")
    shown.click("shuffle")
    order, after = shown.ask("page.play.order"), shown.ask("page.played.y")
    assert order != sorted(order)
    torch.testing.assert_close(torch.tensor(after), torch.tensor(before)[order])
    caption = shown.tab.locator('[data-read="equivariant"]')  # outputs are drawn some frames after the row of the word
    caption.filter(has_text="every word keeps its output").wait_for()
    assert shown.texts(".outputs .token") == [numbered(minilm()[0].layers[0].weights.tokens[0])[n] for n in order]
    shown.tab.check('[data-key="causal"]')
    caption.filter(has_text="places matter").wait_for()
    shown.click("unshuffle")
    assert shown.ask("page.play.order") == sorted(order)


def test_a_recorded_mask_can_be_lifted(show: Any) -> None:
    x = torch.randn(5, 8)
    shown = show(regard.weights(x, mask=regard.causal()).show(1)).view("play")
    torch.testing.assert_close(
        torch.tensor(shown.ask("page.played.w")), regard.weights(x, mask=regard.causal()).dense()
    )
    shown.tab.uncheck('[data-key="recorded"]')
    torch.testing.assert_close(torch.tensor(shown.ask("page.played.w")), regard.weights(x).dense())


# Square.


def test_the_square_reads_every_cell_and_links_row_and_column(show: Any, it: View) -> None:
    seen, _ = minilm()
    shown = show(it, height=1200).view("square")
    shown.choose("head", shown.ask("page.book.heads.find((h) => h.name === 'layer 3, head 1').id"))
    W = seen[3, 1].dense()
    words = numbered(seen.layers[0].weights.tokens[0])
    shown.tab.evaluate("document.querySelector('.readout').scrollIntoView()")
    square = shown.tab.locator(".matrix > canvas")
    box = square.bounding_box()
    assert box["y"] + box["height"] <= 1200, "the number and the whole square are seen at once"
    assert shown.tab.locator(".readout").bounding_box()["y"] >= 0
    cell = box["width"] / 15
    for i, j in ((IT, ANIMAL), (0, 14), (14, 0), (7, 7)):
        shown.tab.mouse.move(box["x"] + (j + 0.5) * cell, box["y"] + (i + 0.5) * cell)
        assert shown.text('[data-read="cell"]') == f"{W[i, j]:.4f}"
        assert shown.texts(".readout .token") == [words[i], words[j]]
        assert shown.tab.locator(".matrix text.on").all_text_contents() == [words[i], words[j]]
        assert square.bounding_box() == box, "reading a cell moves nothing"
    shown.tab.focus(".matrix svg")
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowDown"):
        shown.tab.keyboard.press(key)
    i, j = shown.ask("page.state.cell")
    assert shown.text('[data-read="cell"]') == f"{W[i, j]:.4f}"
    table = shown.opened_table()
    got = torch.tensor([[number(x) for x in row[1:16]] for row in table])
    torch.testing.assert_close(got, W, atol=5.1e-4, rtol=0)


def test_rows_sum_to_what_a_sink_leaves(show: Any) -> None:
    W = regard.weights(torch.randn(5, 8), score=regard.ScaledDot().sink(torch.tensor([1.5])))
    shown = show(W.show()).view("square")
    sums = [number(t) for t in shown.tab.locator(".matrix g text.tiny").all_text_contents()]
    assert sums == pytest.approx(W.dense().sum(-1).tolist(), abs=5.1e-3)
    shown.view("walk")
    assert "with a sink that takes" in shown.text(".steps")


# All heads.


@pytest.mark.parametrize("by", ["entropy", "mean_distance_without_sink", "sink", "previous", "induction"])
def test_the_overview_has_every_head_and_opens_it(show: Any, it: View, by: str) -> None:
    seen, _ = minilm()
    shown = show(it).view("overview")
    shown.choose("metric", by)
    for layer, head, _, value in seen.heads(by)[::7]:
        caption = shown.tab.locator(f'[data-key="head-{layer}-{head}"]').get_attribute("aria-label")
        where, _, shown_value = caption.partition("; shown as ")[0].rpartition(": ")
        assert where == f"layer {layer}, head {head}"
        assert number(shown_value) == pytest.approx(value, abs=5.1e-3)
    layer, head = seen.heads(by)[0][:2]
    shown.tab.hover(f'[data-key="head-{layer}-{head}"]')
    assert shown.text(".peek b") == f"layer {layer}, head {head}"
    assert not any("_" in name for name in shown.tab.locator(".peek dt, option").all_inner_texts())
    shown.click("open-head")
    shown.tab.mouse.move(5, 5)
    who, _, most = shown.text(".hero .who").partition("; most goes to ")
    assert who == f"layer {layer}, head {head}"
    row = seen[layer, head].row("it")
    if most:  # the word is tied to one word, and gives more to another
        assert most == f"{seen[layer, head].tokens[1][int(row.argmax())]} {row.max():.2f}"
    else:
        assert shown.text(".hero .weight") == f"{row.max():.2f}"


def test_two_numbers_make_a_scatter(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    assert shown.tab.locator(".scatter .point").count() == 72
    shown.choose("axis-x", "previous")
    shown.choose("axis-y", "sink")
    seen, _ = minilm()
    layer, head = seen.heads("previous")[0][:2]
    titles = shown.tab.evaluate(
        "[...document.querySelectorAll('.point')].sort((a, b) => b.cx.baseVal.value - a.cx.baseVal.value)[0].textContent"
    )
    assert titles.startswith(f"layer {layer}, head {head}: previous")


# Long inputs and training.


def test_a_long_input_shows_its_map_rows_and_links(show: Any) -> None:
    W = regard.weights(3 * torch.randn(1000, 16), 3 * torch.randn(1000, 16))
    shown = show(W.show(77))
    for _ in range(200):
        if not shown.ask("page.vectorsPending"):
            break
        shown.tab.wait_for_timeout(20)
    box = shown.tab.locator(".map-canvas").bounding_box()
    for share in (0.1, 0.3, 0.6):
        shown.tab.mouse.move(box["x"] + share * box["width"], box["y"] + share * box["height"] / 2)
        i, j = (int(number(text)) for text in shown.texts(".readout .token"))
        assert number(shown.text('[data-read="weight"]')) == pytest.approx(float(W[i, j]), abs=5.1e-4, rel=0.06)
    for cell in shown.tab.locator(".best b[data-row]").all():
        i, j = int(cell.get_attribute("data-row")), int(cell.get_attribute("data-j"))
        assert i == 77
        assert number(cell.inner_text()) == pytest.approx(float(W[i, j]), abs=5.1e-4)
    shown.tab.locator('.halves .chips .chip[aria-pressed="false"]').first.click()
    shown.tab.wait_for_timeout(200)
    other = int(shown.tab.locator(".best b[data-row]").first.get_attribute("data-row"))
    assert other != 77
    assert number(shown.text(".best b")) == pytest.approx(float(W.peak().values[other]), abs=5.1e-4)
    links = shown.tab.locator(".links tbody tr").all_inner_texts()
    weights = [number(row.split("\t")[-1]) for row in links]
    assert weights == sorted(weights, reverse=True)
    for row in links[:5]:
        i, j, w = (number(x) for x in row.split("\t"))
        assert w == pytest.approx(float(W[int(i), int(j)]), abs=5.1e-4)


def test_the_long_view_asks_a_source_for_tiles_and_rows(show: Any) -> None:
    W = regard.weights(torch.randn(400, 8))
    shown = show(W.show(3))
    tiles = shown.ask("[...(await page.source.pool(100, 100, [0, 400], [0, 400]))]")
    torch.testing.assert_close(torch.tensor(tiles).reshape(100, 100), W.pool(100, 100))
    torch.testing.assert_close(torch.tensor(shown.ask("[...(await page.source.row(3))]")), W.row(3))
    assert shown.ask("await page.source.pool(100, 100, [0, 200], [0, 400])") is None, "a part is a server's to answer"


@pytest.mark.slow
def test_a_hundred_thousand_tokens_are_as_large_as_their_vectors_and_shown_at_once(
    show: Any, tmp_path: Path, capsys: Any
) -> None:
    W = regard.weights(torch.randn(100_000, 32), torch.randn(100_000, 32))
    shown = show(W.show(33_333))
    size = (tmp_path / "page.html").stat().st_size
    assert size <= 1.4 * 2 * 4 * 32 * 100_000 + 2_000_000
    assert shown.seconds <= 2
    began = time.perf_counter()
    shown.tab.locator('.halves .chips .chip[aria-pressed="false"]').first.click()
    shown.tab.wait_for_timeout(200)
    assert int(shown.tab.locator(".best b[data-row]").first.get_attribute("data-row")) != 33_333
    assert time.perf_counter() - began <= 1
    with capsys.disabled():
        print(f"\n100,000 tokens: {size:,} bytes, shown after {shown.seconds:.2f} s")


def test_training_shows_every_head_over_the_steps(show: Any) -> None:
    shown = show(View(history()))
    last = history()[-1][1]
    for what, head in (("entropy_share", 3), ("max_score", 3)):
        assert number(shown.text(f'[data-read="{what}"]')) == pytest.approx(
            last[f"layers.0.attn/{what}/{head}"], abs=5.1e-4
        )
    box = shown.tab.locator(".train .named canvas").first.bounding_box()
    shown.tab.mouse.move(box["x"] + 2, box["y"] + box["height"] - 2)
    assert number(shown.text('[data-read="entropy_share"]')) == pytest.approx(0.9)
    assert "layers.2.attn head 3, step 0" in shown.text(".train .readout")
    assert len(shown.opened_table()) == 20


def test_training_shows_its_numbers_on_a_phone(show: Any) -> None:
    """The name of a layer is as long as a line there, and what stands behind it is cut off."""
    name = "model.encoder.blocks.0.attention"
    rows = [(step, {f"{name}/{what}/0": 0.5 for what in ("entropy_share", "max_score")}) for step in (0, 1_000_000)]
    shown = show(View(rows), width=390)
    for what in ("entropy_share", "max_score"):
        place = shown.tab.locator(f'[data-read="{what}"]').bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 390


# Light and dark, keys, small screens, those who do not see.


def test_dark_follows_the_system_and_the_switch(show: Any, it: View) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    shown, dark = show(it), show(it, dark=True)
    light_is, dark_is = shown.tab.evaluate(ground), dark.tab.evaluate(ground)
    assert light_is != dark_is
    shown.click("theme")
    assert shown.tab.evaluate(ground) == dark_is
    dark.click("theme")
    assert dark.tab.evaluate(ground) == light_is
    dark.click("theme")
    assert dark.tab.evaluate(ground) == dark_is


def test_everything_is_reached_by_keys(show: Any, it: View) -> None:
    shown = show(it)
    keys = shown.tab.keyboard
    shown.tab.focus("#tab-spotlight")
    seen_views = []
    for _ in range(6):
        seen_views.append(shown.ask("page.state.view"))
        keys.press("ArrowRight")
    assert seen_views == ["spotlight", "story", "walk", "play", "square", "overview"]
    assert shown.ask("page.state.view") == "spotlight"
    assert shown.tab.evaluate("document.activeElement.id") == "tab-spotlight"
    for key in ("tray-0", "tray-1", "word-10"):
        keys.press("Tab")
        assert shown.tab.evaluate("document.activeElement.getAttribute('data-key')") == key
    keys.press("ArrowRight")
    assert shown.text(".word.lit .token") == "was"
    keys.press("ArrowLeft")
    keys.press("ArrowLeft")
    assert shown.text(".word.lit .token") == "because"
    keys.press("Home")
    assert shown.text(".word.lit .token") == "[CLS]"
    keys.press("End")
    assert shown.text(".word.lit .token") == "[SEP]"
    assert shown.tab.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    outline = shown.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "what has the focus is seen"
    keys.press("Tab")
    keys.press("Space")
    assert shown.ask("page.state.hide") is True
    assert shown.tab.evaluate("document.activeElement.getAttribute('data-key')") == "hide", (
        "the focus stays where it was"
    )


def test_keys_move_through_the_heads(show: Any, it: View) -> None:
    shown = show(it).view("overview")
    shown.tab.focus('[data-key="head-0-0"]')
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        shown.tab.keyboard.press(key)
    assert shown.text(".peek b") == "layer 1, head 2"
    shown.tab.keyboard.press("Enter")
    assert shown.text(".hero .who") == "layer 1, head 2"


UNNAMED = """[...document.querySelectorAll('button, select, input, [role=img], [tabindex="0"]')].filter((x) =>
    !(x.textContent.trim() || x.getAttribute('aria-label') || x.closest('label')?.textContent.trim())).map((x) => x.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_view_of_every_subject_fits_a_phone_and_has_names_and_tables(show: Any, name: str) -> None:
    subject, options = SUBJECTS[name]()
    shown = show(View(subject, **options), width=390, height=844)
    views = shown.ask("page.views.map(([id]) => id)")
    for view in views:
        if len(views) > 1:
            shown.view(view)
        assert len(shown.text(".look")) > 40, "one sentence says what to look for"
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= 390, f"{view} is too wide"
        assert shown.tab.evaluate(UNNAMED) == []
        assert shown.tab.locator("main table, main details.behind").count() > 0, f"{view} has no table"


def test_the_sentence_fits_a_phone(show: Any, it: View) -> None:
    shown = show(it, width=390, height=844)
    for view in shown.ask("page.views.map(([id]) => id)"):
        shown.view(view)
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= 390, view


def test_who_wants_no_motion_gets_none(show: Any, it: View) -> None:
    moving = "getComputedStyle(document.querySelector('.lane i')).transitionDuration"
    assert show(it, reduced_motion="reduce").tab.evaluate(moving) == "0s"
    assert show(it).tab.evaluate(moving) != "0s"


# Nothing runs.


def test_hostile_tokens_layers_and_refusals_are_text(show: Any) -> None:
    shown = show(View(hostile_recording(), title="".join(HOSTILE[:8])))
    assert shown.tab.locator(".word").count() == len(HOSTILE)
    for view in ("spotlight", "story", "walk", "play", "square", "overview"):
        shown.view(view)
        for fold in shown.tab.locator("details").all():
            fold.locator("summary").first.click()
        shown.tab.wait_for_timeout(50)
    shown.view("spotlight")
    text = shown.tab.locator(".sentence").inner_text()
    for n in range(3):
        assert HOSTILE[n] in text
    assert (
        shown.tab.locator(
            "main img, main iframe, main script, main style, main link, main object, main form, main video"
        ).count()
        == 0
    )
    assert shown.tab.locator("footer li").count() == len(HOSTILE)
    width = shown.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width <= 0, "ten thousand letters make no page wider"


def test_hostile_names_while_training_are_text(show: Any) -> None:
    shown = show(
        View([(step, {f"{text}/entropy_share/0": 0.5 for text in HOSTILE}) for step in (0, 1)], title=HOSTILE[3])
    )
    shown.opened_table()
    assert shown.tab.locator("main img, main script, main iframe").count() == 0
    assert shown.text("h1") == HOSTILE[3]
    assert shown.tab.title() == HOSTILE[3]


@pytest.mark.parametrize("name", ["<img src=x onerror=window.bad=1>.html", "'\">&#60;script>.html", "%3Cscript%3E.html", "a b?#c.html", "\u2028.html", "שלום.html"])  # fmt: skip
def test_hostile_file_names_are_names(show: Any, name: str) -> None:
    shown = show(regard.weights(torch.randn(3, 4)).show(), name=name)
    assert shown.tab.locator(".word").count() == 3


def test_a_page_that_was_tampered_with_runs_nothing_else(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    regard.weights(torch.randn(3, 4)).show().save(path)
    injected = "<img src=x onerror='window.bad=1'><script>window.bad=1</script><img src='http://evil.test/x'><style>@import 'http://evil.test'</style>"
    path.write_text(path.read_text().replace("<noscript>", injected + "<noscript>"))
    tab = browser.new_context().new_page()
    answered: list[str] = []
    tab.on("response", lambda response: answered.append(response.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector(".word")
    assert tab.evaluate("window.bad") is None
    assert answered == [path.as_uri()]
    tab.context.close()


def test_in_a_frame_of_a_notebook_several_views_stand_side_by_side(browser: Any, tmp_path: Path, it: View) -> None:
    path = tmp_path / "notebook.html"
    small = regard.weights(torch.randn(3, 4)).show()
    path.write_text(f"<!doctype html><body>{it._repr_html_()}{small._repr_html_()}</body>")
    tab = browser.new_context().new_page()
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(path.as_uri())
    first, second = (tab.frame_locator("iframe").nth(n) for n in (0, 1))
    first.locator(".hero").wait_for()
    assert "0.64" in first.locator(".hero").inner_text()
    second.locator(".word").first.wait_for()
    assert second.locator(".word").count() == 3
    assert {url for url in requests if not url.startswith("about:srcdoc")} == {path.as_uri()}
    tab.context.close()
