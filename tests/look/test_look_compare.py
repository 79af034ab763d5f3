"""Two recordings side by side: distances per head, words aligned by their text, the page, the terminal, the command."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.look import loading
from regard.look.alignment import align_tokens
from regard.look.compare import HeadChanges
from regard.look.svg import svg
from regard.recorder.calls import SavedCall
from regard.recorder.recording import Layer, Pass
from support.opened_page import Shown, number

TIRED = ["[CLS]", "it", "was", "too", "tired", "[SEP]"]
WIDE = ["[CLS]", "it", "was", "far", "too", "wide", "[SEP]"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(words: list[str], seed: int, heads: int = 3, **more: Any) -> regard.Weights:
    return regard.weights(2 * randn(heads, len(words), 8, seed=seed).double(), **more).label(words)


# Distances.


def test_on_equal_words_the_distances_are_those_of_weights() -> None:
    a, b = matrix(TIRED, 1, mask=regard.causal()), matrix(TIRED, 2)
    changes = regard.compare(a, b)
    js, variation = a.js(b).mean(-1), a.total_variation(b).mean(-1)
    assert [c.head for c in changes] == js.argsort(descending=True).tolist()
    for change in changes:
        assert change.js == pytest.approx(float(js[change.head]), rel=1e-9)
        assert change.total_variation == pytest.approx(float(variation[change.head]), rel=1e-9)
        assert change.weight == pytest.approx(float(a[change.head, TIRED.index(change.word), TIRED.index(change.key)]))
        gap = (a[change.head].dense() - b[change.head].dense()).abs()
        assert abs(change.weight - change.weight_b) == pytest.approx(float(gap.max()))
    assert list(changes.to_pandas().columns) == list(changes.columns)


def test_words_that_one_text_lacks_are_outcomes_of_their_own() -> None:
    a, b = matrix(TIRED, 1, 1), matrix(WIDE, 2, 1)
    (change,) = regard.compare(a, b)
    # By hand: the words of both, then those of one alone.
    both = [(0, 0), (1, 1), (2, 2), (3, 4), (5, 6)]
    p, q = a[0].dense(), b[0].dense()
    total = js = 0.0
    for i, k in both:
        left = [float(p[i, m]) for m, _ in both] + [float(p[i, 4]), 0.0, 0.0]
        right = [float(q[k, n]) for _, n in both] + [0.0, float(q[k, 3]), float(q[k, 5])]
        total += sum(abs(x - y) for x, y in zip(left, right, strict=True)) / 2
        js += sum(x * math.log(2 * x / (x + y)) / 2 for x, y in zip(left, right, strict=True) if x > 0)
        js += sum(y * math.log(2 * y / (x + y)) / 2 for x, y in zip(left, right, strict=True) if y > 0)
    assert change.total_variation == pytest.approx(total / 5, rel=1e-9)
    assert change.js == pytest.approx(js / 5, rel=1e-9)


def test_what_a_sink_takes_is_an_outcome_too() -> None:
    x = randn(1, 4, 8).double()
    sink = regard.weights(x, score=regard.ScaledDot().sink(torch.full((1,), 3.0, dtype=torch.float64)))
    (change,) = regard.compare(regard.weights(x), sink)
    taken = 1 - sink.dense().sum(-1)
    assert change.total_variation == pytest.approx(float(taken.mean()), rel=1e-9), "only the sink's share moved"


def test_rows_in_small_blocks_and_rows_that_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = matrix(TIRED, 1, mask=torch.eye(6, dtype=torch.bool).roll(1, 0).triu()), matrix(TIRED, 2)
    changes = regard.compare(a, b)
    monkeypatch.setattr("regard.look.compare.CELLS", 1)
    for change, again in zip(changes, regard.compare(a, b), strict=True):
        assert (change.head, change.word, change.key) == (again.head, again.word, again.key)
        assert change[4:6] == pytest.approx(again[4:6], rel=1e-12)
        assert 0 <= change.total_variation <= 1 + 1e-12
        assert change.js <= math.log(2) + 1e-12


def test_the_nearest_head_is_found_in_a_model_of_another_shape() -> None:
    a = matrix(TIRED, 1, 4)
    b = regard.Weights.from_dense(a.dense()[[2, 0, 3]]).label(TIRED)
    nearest = {change.head: change.head_b for change in regard.compare(a, b, match="nearest")}
    assert {head: nearest[head] for head in (0, 2, 3)} == {0: 1, 2: 0, 3: 2}
    by_place = regard.compare(a, b)
    assert len(by_place) == 3
    assert "3 heads are at the same place in both, of 4 and 3" in by_place.notes[0]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="label both"):
        regard.compare(regard.weights(randn(4, 2)), regard.weights(randn(5, 2)))
    with pytest.raises(ValueError, match="no head of a has a counterpart"):
        regard.compare(matrix(["a", "b"], 0), matrix(["c", "d"], 0))


def test_tokens_of_two_tokenizers_are_aligned_as_words() -> None:
    bert, gpt = ["[CLS]", "the", "animal", "didn", "'", "t", "cross"], ["The", "Ġanimal", "Ġdidn", "'t", "Ġcross"]
    aligned = align_tokens(bert, gpt, (7, 5))
    assert [aligned.labels[n] for n in aligned.in_both] == ["the", "animal", "didn't", "cross"]
    assert aligned.places[0] == (0, None), "[CLS] has no counterpart"
    same = align_tokens(TIRED, WIDE, (6, 7))
    assert [len(side.labels) for side in same.sides] == [6, 7], "tokens where words find no more"


# The page.


@pytest.fixture
def changes() -> HeadChanges:
    return regard.compare(matrix(TIRED, 1), matrix(WIDE, 2), names=("tired", "wide"))


def test_the_page_shows_both_patterns_and_the_change(show: Any, changes: Any) -> None:
    shown = show(changes.show(word="it"))
    n, place = changes.first("it")
    pair = changes.pairs[n]
    a, b = (pair.weights(side, [place])[0].nan_to_num(0.0) for side in (0, 1))
    rows = shown.opened_table()
    assert [row[0] for row in rows] == pair.cols.labels
    for row, x, y in zip(rows, a.tolist(), b.tolist(), strict=True):
        got = [0.0 if text == "no such word" else number(text) for text in row[1:3]]
        assert got == pytest.approx([x, y], abs=5.1e-4)
    best = int((b - a).abs().argmax())
    assert number(shown.text('[data-read="change"]').lstrip("+")) == pytest.approx(float(b[best] - a[best]), abs=5.1e-3)
    assert shown.texts(".lonely .only") == ["only b", "only a", "only b"], "far, tired, wide"
    assert shown.tab.locator(".triple canvas").count() == 5, "two patterns, their difference, both scales"
    # A cell that the second gives more is blue, one that it gives less orange.
    colour = """([i, j]) => { const c = document.querySelectorAll('.triple .three canvas')[2];
        return [...c.getContext('2d').getImageData(j, i, 1, 1).data].slice(0, 3); }"""
    red, _, blue = shown.tab.evaluate(colour, [place, best])
    assert (blue > red) == (float(b[best]) > float(a[best]))


def test_the_colours_of_a_change_have_a_scale_and_the_numbers_of_the_heads_a_unit(show: Any, changes: Any) -> None:
    shown = show(changes.show(word="it"))
    scale = shown.tab.locator(".legend.signed")
    assert re.fullmatch(r"gives more:\s*tired\s*−1\s*1\s*wide", scale.inner_text().strip())
    ends = scale.locator("canvas").evaluate(
        "(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, 1).data, at = (n) => [...d.slice(4 * n, 4 * n + 3)]; return [at(0), at(c.width >> 1), at(c.width - 1)]; }"
    )
    first, middle, last = ends
    colours = shown.ask("[page.paint.signed(-1), page.paint.tint(0), page.paint.signed(1)]")
    assert [first, middle, last] == colours
    assert "divergence of its rows in nats" in shown.text(".view > .hint")
    phone = show(changes.show(word="it"), width=390, name="phone.html").tab.locator(".legend.signed").bounding_box()
    assert phone["height"] < 30, "one line on a phone"


def test_heads_and_words_are_reached_by_keyboard_and_linked(show: Any, changes: Any) -> None:
    shown = show(changes.show())
    shown.tab.focus('[data-key="pair-0"]')
    shown.tab.keyboard.press("ArrowRight")
    shown.tab.keyboard.press("Enter")
    assert shown.ask("page.state.pair") == 1
    assert shown.tab.evaluate("document.activeElement.dataset.key") == "pair-1"
    before = shown.ask("page.state.word")
    shown.tab.focus(f'[data-key="word-{before}"]')
    shown.tab.keyboard.press("Home")
    assert shown.ask("page.state.word") == 0
    shown.tab.focus('[data-key="map-2"]')
    shown.tab.keyboard.press("ArrowDown")
    assert shown.tab.locator(".cellmark:not([hidden])").count() == 3
    other = shown.tab.context.new_page()
    other.goto(shown.ask("page.link"))
    other.wait_for_selector(".headcell.on")
    assert other.locator(".headcell.on").get_attribute("data-key") == "pair-1"
    for hostile in ("#v=compare&w=99&p=99", "#w=-1&p=x"):
        shown.tab.evaluate(f"location.hash = {hostile!r}")
        shown.tab.wait_for_timeout(30)
        assert shown.tab.locator("section.view .headcell.on").count() == 1


@pytest.mark.parametrize("width", [390, 1440])
def test_pointing_moves_nothing_and_nothing_overflows(show: Any, changes: Any, width: int) -> None:
    shown = show(changes.show(), width=width)
    box = shown.tab.locator(".stage").bounding_box()
    for n in range(0, 8, 3):
        shown.tab.hover(f'[data-key="word-{n}"]')
        assert shown.tab.locator(".stage").bounding_box() == box
    assert shown.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [390, 1440])
def test_pieces_of_a_word_stand_close_and_words_that_recur_are_numbered(show: Any, width: int) -> None:
    words = ["the", "dog", "didn", "'", "t", "see", "the", "em", "##bed", "##ding"]
    other = [*words[:5], "like", *words[6:]]
    changes = regard.compare(matrix(words, 1), matrix(other, 2))
    assert changes.pairs[0].cols.continued == [3, 4, 9, 10], "like and see stand side by side"
    shown = show(changes.show(word="the:2"), width=width)
    letters = shown.tab.evaluate(
        """[...document.querySelectorAll('.word .token')].map((x) => { const r = document.createRange();
           r.selectNodeContents(x); const b = r.getBoundingClientRect(); return [b.left, b.right, b.bottom]; })"""
    )
    gaps = {n + 1: b[0] - a[1] for n, (a, b) in enumerate(itertools.pairwise(letters)) if a[2] == b[2]}
    inside = [gap for n, gap in gaps.items() if n in (3, 4, 9, 10)]
    assert len(inside) >= 3, "they stand in one line"
    assert max(inside) < min(gap for n, gap in gaps.items() if n not in (3, 4, 9, 10))
    assert max(inside) <= 14
    assert shown.text(".hero .tie .token") == "the₂"
    assert shown.opened_table()[0][0] == "the₁"
    assert "“the:2” looks at" in str(changes.show(word="the:2"))
    assert "“the:2” → “" in svg(changes, word="the:2")


def test_a_long_text_is_compared_in_tiles(show: Any) -> None:
    q = randn(1, 400, 4)
    k = q.clone()
    k[:, 50] *= 8
    changes = regard.compare(regard.weights(q), regard.weights(q, k))
    shown = show(changes.show())
    assert shown.ask("page.pairs[0].rows") == 192
    assert "Of 400 words, each that is written here stands for up to 3 from it on" in shown.text(".stage .hint")
    tile = 50 * 192 // 400
    assert shown.ask(f"page.pairs[0].changes.some((x, n) => Math.abs(x) > 0.5 && n % 192 === {tile})")


# Terminal and command.


def test_the_terminal_names_the_same_change(changes: Any) -> None:
    text = str(changes.show(word="it"))
    assert text.startswith("tired and wide: 3 pairs of heads, 5 words in both")
    assert "“it” looks at" in text
    assert "(a) only in tired: tired" in text
    assert "(b) only in wide: far wide" in text
    assert all(len(line) <= 80 for line in text.splitlines())


class SmallModel(loading.LoadedModel):
    """A model without weights: a head looks by the letters of the words."""

    name, limit = "small", None

    def look_at(self, text: str, *, decoder_text: str | None = None, cut: bool = False) -> regard.Recording:
        words = text.split()
        q = torch.stack([randn(2, 4, seed=sum(map(ord, word))) for word in words], 1).unsqueeze(0)  # 1 h i d
        saved = SavedCall(q, q, None, None, regard.ScaledDot(), None, None)
        shape = (1, 2, len(words), len(words))
        return regard.Recording([Pass([Layer("attention", 0, "self", saved, {}, shape, ([words], [words]))])])


def test_the_command_compares_recordings_and_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(loading, "load_model", lambda name=None: opened.append(name) or SmallModel())
    a, b = tmp_path / "a.regard", tmp_path / "b.regard"
    for path, text in ((a, "it was too tired"), (b, "it was too wide")):
        assert main(["look", text, "--save", str(path), "--json"]) == 0
    capsys.readouterr()
    assert main(["look", str(a), str(b), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["subject"] == ["a.regard", "b.regard"]
    assert len(fields["heads"]) == 2
    opened.clear()
    assert main(["look", "it was too tired", "it was too wide", "--word", "it"]) == 0
    assert capsys.readouterr().out.startswith("… too tired and … too wide: 2 pairs of heads, 3 words in both")
    assert opened == [None], "the model is opened once"
    assert main(["look", "it was too tired", "--against", "other", "--nearest"]) == 0
    assert opened[1:] == [None, "other"]
    page = tmp_path / "ab.html"
    assert main(["look", str(a), str(b), "--out", str(page)]) == 0
    assert page.stat().st_size < 500_000
    assert main(["look", str(a), str(b), "--head", "3"]) == 2
    assert "--head is for one input" in capsys.readouterr().err


@pytest.mark.parametrize("width", [390, 1024])
def test_neither_names_nor_captions_of_a_comparison_are_cut_off(show: Any, width: int) -> None:
    names = ("all-MiniLM-L6-v2 before training", "all-MiniLM-L6-v2 after fine-tuning on pairs")
    both = (regard.weights(randn(3, 6, 8, seed=n)).label(["the", "cat", "sat", "on", "the", "mat"]) for n in (1, 2))
    shown: Shown = show(regard.compare(*both, names=names).show(), width=width)
    cut = """[...document.querySelectorAll('h1, .hero .who, .hero .side-of, figcaption, .keys span')].filter((x) =>
        x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display !== 'inline' || x.scrollHeight > x.clientHeight + 1
        && getComputedStyle(x).display !== 'inline').map((x) => x.innerText)"""
    assert shown.tab.evaluate(cut) == []
    assert all(name in shown.text(".hero") for name in names)
    places = shown.tab.evaluate(
        "[...document.querySelectorAll('.three')].slice(0, 2).map((x) => x.getBoundingClientRect().top)"
    )
    assert places[0] == pytest.approx(places[1], abs=1), "patterns stand side by side under captions of any length"
