"""The story of a page: chapters on the user's own words, with the numbers of the recorded head, forth and back."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from support.opened_page import Shown, number
from support.page_probe import minilm

IT = 10
CHAPTERS = ["Alike", "Scale", "Queries, keys, values", "Softmax", "Mix", "Many heads", "Mask", "Two sentences", "Long"]


def tell(shown: Shown, at: float) -> list[float]:
    """Go to a place in the story; returns the numbers of the scene, of one line each."""
    shown.tab.locator('[data-key="scrub"]').evaluate(
        "(x, at) => { x.value = at; x.dispatchEvent(new Event('input')); }", at
    )
    texts = shown.tab.locator(".scene text.tiny").all_text_contents()
    return [number(text) for text in texts if re.fullmatch(r"[−\d.,]+", text)]


@pytest.fixture
def narrated(show: Any, it: View) -> Shown:
    return show(it, reduced_motion="reduce").view("story")


def test_the_chapters_are_those_of_the_documents_with_the_numbers_of_the_head(narrated: Shown) -> None:
    seen, words = minilm()
    head, x = seen[2, 1], words.x
    assert [text.split(" ", 1)[1] for text in narrated.texts(".story .chips .chip")[:9]] == CHAPTERS
    alike = x[IT] @ x.T
    assert tell(narrated, 1) == pytest.approx(alike.tolist(), abs=5.1e-3)
    assert tell(narrated, 2) == pytest.approx((alike / 384**0.5).tolist(), abs=5.1e-3)
    assert f"one word up to {alike.softmax(-1).max():.3f} before" in narrated.text(".telling")
    scores = head.scores[IT].tolist()
    assert tell(narrated, 3) == pytest.approx(scores, abs=2e-2)  # of queries and keys in 16 bits
    assert tell(narrated, 4) == pytest.approx(head.row(IT).tolist(), abs=5.1e-3)
    assert "“it” gives “tired” 0.694" in narrated.text(".telling")
    table = narrated.opened_table(".story details.behind")
    assert [number(row[3]) for row in table] == pytest.approx(head.row(IT).tolist(), abs=5.1e-4)
    y = head.row(IT) @ seen.layers[2].values[0, 1]
    mixed = tell(narrated, 5)
    assert mixed[:15] == pytest.approx(head.row(IT).tolist(), abs=5.1e-3)
    assert mixed[15:] == pytest.approx(y[:8].tolist(), abs=1e-2)
    shares = narrated.tab.evaluate(
        "[...document.querySelectorAll('.scene g[opacity]')].map((x) => x.getAttribute('opacity'))"
    )
    want = [0.15 + 0.85 * w for w in head.row(IT).tolist()]
    assert [float(x) for x in shares[:15]] == pytest.approx(want, abs=1e-3), (
        "what was mixed stays in sight, by its weight"
    )
    tell(narrated, 6)
    assert narrated.tab.locator(".scene g[opacity]").count() == 12
    causal = torch.tensor(scores)[: IT + 1].softmax(-1)
    assert tell(narrated, 7) == pytest.approx(causal.tolist(), abs=1e-2), "the words after it have no numbers"
    tell(narrated, 9)
    assert "layer 2, head 1, which you were looking at" in narrated.text(".telling")
    narrated.click("story-open")
    assert narrated.ask("page.state.view") == "spotlight"
    assert narrated.text(".hero .who").startswith("layer 2, head 1")


def test_softmax_grows_by_exp_and_shrinks_to_the_sum_one(narrated: Shown) -> None:
    scores = torch.tensor(minilm()[0][2, 1].scores[IT].tolist())
    assert tell(narrated, 3.5) == pytest.approx((scores - scores.max()).exp().tolist(), abs=1e-2)
    assert sum(tell(narrated, 4)) == pytest.approx(1, abs=0.04)
    grown = float((scores - scores.max()).exp().sum())
    assert f"divided by their sum {grown:.2f}" in narrated.tab.locator(".scene .story-note").text_content()


@pytest.mark.parametrize("width", [390, 1024])
def test_no_text_is_cut_off_or_lies_on_another(show: Any, it: View, width: int) -> None:
    shown = show(it, width=width, reduced_motion="reduce").view("story")
    for n, name in enumerate(CHAPTERS):
        shown.click(f"chapter-{n}")
        scene = shown.tab.locator(".scene").bounding_box()
        boxes = shown.tab.evaluate(
            """[...document.querySelectorAll('.scene text:not(.story-word)')].filter((x) => x.textContent.trim()).map((x) => {
               const b = x.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom, x.textContent]; })"""
        )
        for box in boxes:
            assert scene["x"] - 1 <= box[0], (name, box)
            assert box[2] <= scene["x"] + scene["width"] + 1, (name, box)
        for a, b in itertools.combinations(boxes, 2):
            across, down = (min(a[k + 2], b[k + 2]) - max(a[k], b[k]) for k in (0, 1))
            assert across <= 1 or down <= 2, (name, a, b)


def test_slanted_words_at_the_left_end_are_seen_whole(show: Any) -> None:
    words = ["beautiful", "[SEP]", "because", "of", "strangers", "everybody", "was", "too", "tired"]
    numbers = torch.Generator().manual_seed(1)
    view = regard.weights(torch.randn(2, 9, 16, generator=numbers)).label(words).show("of")
    shown = show(view, width=390, reduced_motion="reduce").view("story")
    for chapter in ("Mask", "Many heads"):
        shown.tab.get_by_role("button", name=chapter).click()
        scene = shown.tab.locator(".scene").bounding_box()
        assert shown.tab.locator(".scene .story-word[transform]").all_text_contents() == words
        for text in shown.tab.locator(".scene text").all():
            assert text.bounding_box()["x"] >= scene["x"] - 1, text.text_content()


LONG = ["antidisestablishmentarianism", "mmmmmmmmmmmmmmmm", "w200", "w201", "w202", "w203", "w204", "w205", "w206"]


@pytest.mark.parametrize("words", [LONG, [*LONG[2:], "w207", "w208"]], ids=["slanted", "upright"])
def test_words_and_bars_of_a_small_screen_have_space(show: Any, words: list[str]) -> None:
    numbers = torch.Generator().manual_seed(1)
    q, k, v = (2 * torch.randn(2, 9, 16, generator=numbers) for _ in range(3))
    q[:, 0], k[:, 3] = 3.0, -3.0  # the longest bar points down
    view = regard.weights(q, k).label(words).show(words[0], values=v)
    shown = show(view, width=390, reduced_motion="reduce").view("story")
    chapters = shown.tab.locator('[data-key^="chapter-"]').count()
    assert chapters == 9
    for n in range(chapters):
        shown.click(f"chapter-{n}")
        scene = shown.tab.locator(".scene").bounding_box()
        boxes = """(which) => [...document.querySelectorAll(`.scene ${which}`)].map((x) => { const b = x.getBoundingClientRect();
               return [b.left, b.top, b.right, b.bottom]; })"""
        for left, _, right, bottom in shown.tab.evaluate(boxes, "text.story-word"):
            assert scene["x"] - 1 <= left, n
            assert right <= scene["x"] + scene["width"] + 1, n
            assert bottom <= scene["y"] + scene["height"] + 1, n
        upright = shown.tab.evaluate(boxes, "text.story-word:not([transform])")
        for a, b in itertools.pairwise(sorted(upright, key=lambda x: (round(x[1] / 9), x[0]))):
            assert abs(a[1] - b[1]) > 9 or a[2] <= b[0], f"words of chapter {n + 1} lie on each other"
        strips = shown.tab.evaluate(boxes, ".cellframe")
        for text in shown.tab.evaluate(boxes, "text.tiny") if n in (0, 2) else []:
            for strip in strips:
                assert min(text[2], strip[2]) - max(text[0], strip[0]) <= 1 or text[3] <= strip[1] + 1, n


def test_the_words_that_are_shown_are_those_that_it_says(show: Any) -> None:
    words = [f"w{n}" for n in range(40)]
    W = regard.weights(torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(0))).label(words)
    shown = show(W.show(20), reduced_motion="reduce", width=390).view("story")
    assert "Shown are 9 of 40 words: “w20”, up to two after it, and those with the largest weights." in shown.text(
        ".telling"
    )
    weights = W[0].row(20)
    others = [n for n in weights.argsort(descending=True).tolist() if n not in (20, 21, 22)][:6]
    drawn = shown.tab.locator(".scene .story-word").all_text_contents()
    assert sorted(drawn) == sorted(f"w{n}" for n in (20, 21, 22, *others))


def test_every_step_is_reversible_and_reached_by_keys(narrated: Shown) -> None:
    picture = "document.querySelector('.scene').innerHTML"
    narrated.tab.focus('[data-key="scene"]')
    pictures = []
    for n, name in enumerate(CHAPTERS, 1):
        assert narrated.text(".chapter") == f"{n} · {name}"
        pictures.append(narrated.tab.evaluate(picture))
        narrated.tab.keyboard.press("ArrowRight")
    assert len(set(pictures)) == 9
    for expected in reversed(pictures[:-1]):
        narrated.tab.keyboard.press("ArrowLeft")
        assert narrated.tab.evaluate(picture) == expected
    narrated.tab.keyboard.press("End")
    assert narrated.text(".chapter") == "9 · Long"
    narrated.tab.keyboard.press("Home")
    assert narrated.text(".chapter") == "1 · Alike"
    narrated.click("chapter-3")
    assert narrated.text(".chapter") == "4 · Softmax"
    other = narrated.tab.context.new_page()
    other.goto(narrated.ask("page.link"))
    other.wait_for_selector(".chapter")
    assert other.locator(".chapter").inner_text() == "4 · Softmax"


def test_it_moves_unless_motion_is_unwanted(show: Any, it: View) -> None:
    shown = show(it).view("story")
    begun = "const look = () => page.story.at > 0 ? done(page.story.at) : requestAnimationFrame(look); look();"
    assert 0 < shown.ask(f"new Promise((done) => {{ {begun} }})") < 1
    shown.tab.focus('[data-key="scene"]')
    shown.tab.keyboard.press("Space")
    shown.tab.wait_for_timeout(60)
    assert shown.ask("page.story.playing") is None
    stopped = shown.ask("page.story.at")
    shown.tab.wait_for_timeout(120)
    assert shown.ask("page.story.at") == stopped
    took = shown.tab.evaluate(
        """() => { const x = document.querySelector('[data-key="scrub"]'), all = [];
           for (let n = 0; n < 90; n++) { x.value = n / 10; const t = performance.now();
             x.dispatchEvent(new Event('input')); all.push(performance.now() - t); }
           return all.sort((a, b) => a - b)[9]; }"""
    )
    assert took <= 8, "a frame has time for more"


def test_slides_are_one_file_without_a_script(narrated: Shown, tmp_path: Path) -> None:
    with narrated.tab.expect_download() as info:
        narrated.click("story-slides")
    info.value.save_as(tmp_path / "slides.html")
    text = (tmp_path / "slides.html").read_text()
    assert text.count("<section>") == 9
    assert not re.search(r"<script|var\(|onload|http://(?!www\.w3\.org)", text)
    for name in CHAPTERS:
        assert f"· {name}" in text
    assert narrated.text(".chapter") == "1 · Alike", "the story is where it was"


def test_it_works_for_matrices_of_every_kind(show: Any) -> None:
    words = [f"w{n}" for n in range(40)]
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    for view, chapters in (
        (regard.weights(x, mask=regard.causal()).label(words).show(20), 8),  # without values there is no mix
        (regard.Weights.from_dense(torch.eye(3)).label(["a", "b", "c"]).show(1), 2),
        (regard.weights(x[0, :4], x[1, :6]).label(list("abcd"), list("uvwxyz")).show("b"), 6),
    ):
        shown = show(view, reduced_motion="reduce", width=390).view("story")
        assert shown.tab.locator('.story [data-key^="chapter-"]').count() == chapters
        for n in range(chapters):
            tell(shown, n + 0.5)
            assert shown.tab.locator(".scene text").count() > 2
        if chapters == 8:  # a causal head, of which only some words are drawn: the mask changes nothing
            weights, drawn = shown.ask("[...page.head.row(20)]"), tell(shown, 6)
            names = shown.tab.locator(".scene .story-word").all_text_contents()
            assert max(int(name[1:]) for name in names) > 20, "and words that the mask hides, without numbers"
            seen = [int(name[1:]) for name in names if int(name[1:]) <= 20]
            assert drawn == pytest.approx([weights[n] for n in seen], abs=5.1e-3)
        assert shown.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "NaN" not in shown.text(".tale")


def test_words_from_right_to_left_do_not_turn_the_sentence_around_them(show: Any) -> None:
    """Where letters stand on the screen: the quotation marks enclose the word, and the weight comes after both."""
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    shown = show(regard.weights(x).label(["the", "שלום", "עולם", "cat"]).show("שלום"), reduced_motion="reduce").view(
        "story"
    )
    shown.tab.locator("[data-key^=chapter-]", has_text="Softmax").click()
    places = shown.tab.evaluate(
        """() => { const node = document.querySelector('.telling').firstChild, text = node.data, part = document.createRange();
             const at = (n) => { part.setStart(node, n); part.setEnd(node, n + 1); const b = part.getBoundingClientRect(); return [b.left + b.width / 2, b.top]; };
             const end = text.lastIndexOf('”'), from = text.lastIndexOf('“');
             return { quotes: [at(from), at(end)], word: [...text.slice(from + 1, end)].map((_, n) => at(from + 1 + n)),
               weight: at(text.lastIndexOf('.') - 1) }; }"""
    )
    (left, line), (right, other) = places["quotes"]
    assert line == other
    assert left < right < places["weight"][0] or places["weight"][1] > line
    assert all(left <= x <= right for x, y in places["word"] if y == line)


def test_products_of_queries_and_keys_are_not_called_those_of_words(show: Any) -> None:
    """A word multiplied by itself gives no negative number; a query multiplied by the key of its own word does."""
    q, k = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3))
    k[2] = -q[2]
    shown = show(regard.weights(q, k).label(list("abcdef")).show(2), reduced_motion="reduce").view("story")
    assert tell(shown, 1)[2] < 0
    assert "How alike are the query of “c”, what it looks for, and the key of every word, what it offers" in shown.text(
        ".telling"
    )
    basic = show(regard.weights(q).label(list("abcdef")).show(2), reduced_motion="reduce", name="basic.html")
    assert "How alike are “c” and every other word?" in basic.view("story").text(".telling")


def test_the_controls_of_a_story_begin_at_one_edge(narrated: Shown) -> None:
    edge = narrated.tab.locator('[data-key="chapter-0"]').bounding_box()["x"]
    slides = narrated.tab.locator('[data-key="story-slides"]')
    starts = slides.evaluate(
        "(x) => { const r = document.createRange(); r.selectNodeContents(x); return r.getBoundingClientRect().left; }"
    )
    assert starts == pytest.approx(edge, abs=2)
