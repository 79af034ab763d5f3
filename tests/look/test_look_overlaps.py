"""Nothing of a sentence lies on anything else, at any width: numbers, lines and shades stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.look import View
from support.opened_page import Shown
from support.page_probe import SENTENCE, translation

WIDTHS = (390, 640, 720, 1024, 1440)
#: Pairs of boxes that overlap by more than a third of a pixel: of numbers that can be seen, and, where
#: numbers have a ground of their own, between two sentences, of numbers with shades.
OVERLAPS = """(() => { const boxes = (where) => [...document.querySelectorAll(where)].filter((x) => x.textContent
      && getComputedStyle(x).visibility === 'visible').map((x) => [x.textContent, x.getBoundingClientRect()]);
    const numbers = boxes('.num > span'), words = boxes('.stage.two .word .token'), meet = ([, a], [, b]) =>
      Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.3 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.3;
    const names = (x, y) => `${x[0]} on ${y[0]}`;
    return [...numbers.flatMap((x, n) => numbers.slice(n + 1).filter((y) => meet(x, y)).map((y) => names(x, y))),
      ...numbers.flatMap((x) => words.filter((y) => meet(x, y)).map((y) => names(x, y)))]; })()"""
#: How far lines reach above and below the stage, in pixels.
BEYOND = """(() => { const stage = document.querySelector('.stage').getBoundingClientRect();
    const lines = [...document.querySelectorAll('.lines path')].map((x) => x.getBoundingClientRect());
    return [Math.max(0, ...lines.map((x) => stage.top - x.top)), Math.max(0, ...lines.map((x) => x.bottom - stage.bottom))]; })()"""


def pieces(heads: int = 2) -> View:
    """A sentence of pieces of words, one letter each, which share a row among few of them."""
    tokens = ["did", "##n", "'", "t", "do", "##e", "##s", "##i", "##t", ".", *SENTENCE.split()]
    q, k = torch.randn(2, heads, len(tokens), 4, generator=torch.Generator().manual_seed(2))
    k[:, :9] *= 2
    return regard.weights(q, k).label(tokens).show("do", merge=False)


def lit_one_by_one(shown: Shown, count: int) -> Any:
    for n in range(count):
        shown.ask(f"page.set({{ word: {n}, hover: null }})")
        yield n


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_and_lines_of_a_sentence_lie_on_nothing(show: Any, it: View, width: int) -> None:
    shown = show(it, width=width)
    for n in lit_one_by_one(shown, 15):
        assert shown.tab.evaluate(OVERLAPS) == [], f"word {n}"
        assert max(shown.tab.evaluate(BEYOND)) <= 1, f"word {n}"
    numbers = shown.ask("[...document.querySelectorAll('.num > span')].length")
    assert numbers, "there are numbers to lie on each other"


@pytest.mark.parametrize("heads", [2, 4])
def test_of_numbers_that_would_overlap_the_larger_is_shown(show: Any, heads: int) -> None:
    shown = show(pieces(heads), width=720)
    shown.ask("page.set({ chosen: page.stack.heads.map((head) => head.id) })")
    hidden = 0
    for n in lit_one_by_one(shown, 10):
        assert shown.tab.evaluate(OVERLAPS) == [], f"word {n}"
        for by, beside in shown.tab.evaluate(
            """(() => { const marks = [...document.querySelectorAll('.num')].filter((x) => x.textContent), size = (x) => Number(x.dataset.by);
              const hidden = (x) => x.style.visibility === 'hidden', box = (x) => x.getBoundingClientRect();
              const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
              return marks.filter(hidden).map((x) => [size(x), Math.max(...marks.filter((y) => !hidden(y) && meet(box(x), box(y))).map(size))]); })()"""
        ):
            hidden += 1
            assert by <= beside, "a number that it would lie on is as large, and can be seen"
    assert hidden, "some numbers gave way"


def test_numbers_between_two_sentences_do_not_cut_the_shades(show: Any) -> None:
    shown = show(translation().show("Haus"))
    for _ in lit_one_by_one(shown, 5):
        assert shown.tab.evaluate(OVERLAPS) == []


def test_the_closer_look_at_a_head_stays_in_sight(show: Any) -> None:
    x = torch.randn(900, 6, 4, generator=torch.Generator().manual_seed(0))
    shown = show(regard.weights(x).show(2), height=700).view("overview")
    shown.choose("sort", "metric")
    cell = shown.tab.locator(".headcell").last
    cell.scroll_into_view_if_needed()
    cell.hover()
    box = shown.tab.locator(".peek canvas").first.bounding_box()
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 700
