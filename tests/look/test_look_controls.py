"""Every control of every view in a real browser: it keeps the focus, and its lines can be seen."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.svg import svg
from support.opened_page import Shown
from support.page_probe import CAT, history, translation

# What the keyboard can reach and use: its key and its kind, in the order of the page.
CONTROLS = """[...document.querySelectorAll('button, select, input, summary, [tabindex="0"]')].filter((x) => x.dataset.key
    && x.checkVisibility() && !x.disabled).map((x) => [x.dataset.key, x.matches('summary') ? 'summary' : x.type ?? ''])"""
ACTIVE = "document.activeElement.dataset.key ?? document.activeElement.tagName"
# These lead to another view, or to a file, or vanish once they are used; tests of their own say where the focus goes.
LEAVES = re.compile(r"^(tab-|head-|open-|clear-tray|share|story-slides|tray-auto|chip-auto)")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


PAGES: dict[str, Callable[[], View]] = {
    "words": lambda: regard.weights(randn(2, 6, 8), mask=regard.causal()).label(CAT).show("mat", values=randn(2, 6, 8)),
    "two sentences": lambda: View(translation()),
    "long": lambda: regard.weights(randn(2, 400, 8)).show(3),
    "comparison": lambda: regard.compare(*(regard.weights(x).label(CAT) for x in randn(2, 3, 6, 8))).show(),
    "training": lambda: View(history()),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_control_keeps_the_focus(show: Any, name: str) -> None:
    shown: Shown = show(PAGES[name](), reduced_motion="reduce")
    views = shown.ask("page.views.map(([id]) => id)")
    used = 0
    for view in views:
        for key, kind in _controls(shown, view, views):
            if not shown.tab.locator(f'[data-key="{key}"]').count():
                continue  # another list has taken its place
            shown.tab.focus(f'[data-key="{key}"]')
            shown.tab.keyboard.press({"checkbox": "Space", "range": "ArrowRight"}.get(kind, "Enter"))
            if kind == "select-one":
                shown.tab.keyboard.press("Escape")
                shown.tab.locator(f'[data-key="{key}"]').evaluate("(x) => x.dispatchEvent(new Event('change'))")
            shown.tab.wait_for_timeout(20)
            assert shown.tab.evaluate(ACTIVE) == key, f"{key} of {view}"
            used += 1
    assert used >= {"training": 2, "comparison": 6}.get(name, 40)


@pytest.mark.parametrize(("vanishes", "next_to_it"), [("clear-tray", "cells"), ("tray-auto", "tray-0")])
def test_a_control_that_vanishes_leaves_the_focus_beside_it(show: Any, vanishes: str, next_to_it: str) -> None:
    shown: Shown = show(PAGES["words"]()).view("overview")
    shown.click("head-0-0")
    shown.tab.focus(f'[data-key="{vanishes}"]')
    shown.tab.keyboard.press("Enter")
    assert not shown.tab.locator(f'[data-key="{vanishes}"]').count()
    assert shown.tab.evaluate(ACTIVE) == next_to_it


def test_buttons_of_a_choice_that_is_undone_leave_the_focus_among_them(show: Any) -> None:
    shown: Shown = show(PAGES["words"]())
    shown.click("chip-1")
    shown.tab.focus('[data-key="chip-auto"]')
    shown.tab.keyboard.press("Enter")
    assert not shown.tab.locator('[data-key="chip-auto"]').count()
    assert re.match(r"chip-\d+$", shown.tab.evaluate(ACTIVE))
    shown.view("overview").click("head-0-0")
    shown.tab.hover('[data-key="head-0-1"]')
    shown.tab.focus('[data-key="compare"]')
    for text in ("do not compare", "compare with"):
        shown.tab.keyboard.press("Enter")
        assert shown.tab.evaluate(ACTIVE) == "compare"
        assert shown.tab.evaluate("document.activeElement.textContent").startswith(text)


def test_all_pairs_of_a_comparison_keep_the_focus(show: Any) -> None:
    a, b = (regard.weights(x).label(CAT) for x in randn(2, 40, 6, 8))
    shown: Shown = show(regard.compare(a, b).show())
    shown.tab.focus('[data-key="pairs-all"]')
    shown.tab.keyboard.press("Enter")
    assert re.match(r"pair-\d+$", shown.tab.evaluate(ACTIVE))


def _controls(shown: Shown, view: str, views: list[str]) -> list[list[str]]:
    if len(views) > 1:
        shown.view(view)
    controls = [pair for pair in shown.tab.evaluate(CONTROLS) if not LEAVES.search(pair[0])]
    alike = itertools.groupby(controls, lambda pair: re.sub(r"-\d+$", "", pair[0]))
    return [pair for _, pairs in alike for pair in itertools.islice(pairs, 3)]


# Lines.


def luminance(colour: list[float]) -> float:
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in colour))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(line: list[float], opacity: float, ground: list[float]) -> float:
    mixed = [opacity * a + (1 - opacity) * b for a, b in zip(line, ground, strict=True)]
    low, high = sorted((luminance(mixed), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_can_be_read_on_a_cell_of_any_colour(show: Any, dark: bool) -> None:
    shown = show(regard.weights(randn(2, 6, 8)).label(CAT).show("cat"), dark=dark)
    inks = shown.ask(
        "[page.paint.tint, page.paint.signed].flatMap((colour) => Array.from({ length: 401 }, (_, n) => colour((n - 200) / 200)))"
        ".map((rgb) => [rgb, page.paint.ink(rgb)])"
    )
    for ground, ink in inks:
        assert contrast({"#000": [0.0] * 3, "#fff": [255.0] * 3}[ink], 1.0, ground) >= 4.5, (ground, ink)


@pytest.mark.parametrize("dark", [False, True])
def test_the_faintest_line_stands_out_from_the_paper(show: Any, dark: bool) -> None:
    shown = show(regard.weights(0.3 * randn(4, 9, 8)).show(3), dark=dark)
    shown.ask("page.set({chosen: [0, 1, 2, 3]})")
    ground, lines = shown.tab.evaluate(
        """(() => { const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
           return [rgb(getComputedStyle(document.body).backgroundColor), [...document.querySelectorAll('.lines path')]
             .map((x) => [rgb(getComputedStyle(x).stroke), Number(x.getAttribute('opacity'))])]; })()"""
    )
    assert len({tuple(colour) for colour, _ in lines}) == 4
    for colour, opacity in lines:
        assert contrast(colour, opacity, ground) >= 3


def test_the_faintest_line_of_a_picture_stands_out_from_its_ground() -> None:
    picture = svg(regard.weights(0.3 * randn(2, 9, 8)).label([f"w{n}" for n in range(9)]), word="w3", part="lines")
    lines = re.findall(r'stroke="#(\w{6})" stroke-width="[\d.]+" stroke-opacity="([\d.]+)"', picture)
    assert len({colour for colour, _ in lines}) == 2
    for colour, opacity in lines:
        assert contrast([int(colour[n : n + 2], 16) for n in (0, 2, 4)], float(opacity), [255, 255, 255]) >= 3
