"""The served page in a real browser: it asks its own server for what it cannot compute itself, and nobody else."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.serve.looks import Progress
from regard.look.serve.server import PageServer
from support.opened_page import Shown, number, running

LENGTH, ROW, KEY = 1500, 1200, 345


def needle() -> regard.Weights:
    """Noise under a mask that is no interval and a cap, and one weight of nearly 1."""
    numbers = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, LENGTH, 8, generator=numbers) for _ in "qk")
    q[0, ROW], k[0, KEY], q[..., -1], k[..., -1] = 0, 0, 0, 0
    q[0, ROW, -1] = k[0, KEY, -1] = 9
    visible = torch.rand(LENGTH, LENGTH, generator=numbers) > 0.3
    visible[ROW, KEY] = True
    visible[ROW, KEY + 1] = False
    words = ["recall" if n == ROW else "needle" if n == KEY else f"w{n % 50}" for n in range(LENGTH)]
    return regard.weights(q, k, score=regard.ScaledDot().softcap(40.0), mask=visible).label(words)


def typed(text: str, decoder: str | None) -> View:
    if text == "wrong":
        raise ValueError("the text must have another word.")
    return View(regard.weights(torch.eye(len(text.split()))).label(text.split()), title=text)


@pytest.fixture(scope="module")
def subject() -> regard.Weights:
    return needle()


@pytest.fixture(scope="module")
def server(subject: regard.Weights) -> Iterator[PageServer]:
    with running(PageServer(lambda: View(subject))) as one:
        yield one


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Shown]]:
    """Opens a server's link in a browser of its own; afterwards nothing was wrong, and nobody else was asked."""
    pages: list[tuple[Shown, str]] = []

    def open_(server: PageServer, width: int = 1180) -> Shown:
        shown = Shown(browser.new_context(viewport={"width": width, "height": 860}).new_page())
        pages.append((shown, f"http://{server.guard.hosts[0]}/"))
        shown.tab.goto(server.guard.link)
        shown.tab.wait_for_url(f"http://{server.guard.hosts[0]}/*")
        shown.tab.wait_for_selector("main section.view", timeout=120_000)
        return shown

    yield open_
    for shown, origin in pages:
        assert shown.wrong == []
        assert all(url.startswith(origin) for url in shown.requests), "it asks its own server alone"
        shown.tab.context.close()


def test_a_page_that_is_not_ready_says_how_far_it_is(browser: Any) -> None:
    ready = threading.Event()

    def late() -> View:
        ready.wait(120)
        return View(regard.weights(torch.eye(3)))

    with running(PageServer(late)) as slow:
        tab = browser.new_page()
        try:
            tab.goto(slow.guard.link)
            shown = tab.locator("[data-read=progress]")
            shown.wait_for()
            assert slow.first is not None
            assert shown.inner_text() == "running the model …"
            slow.first.progress = Progress("summing up every row", 0.068)
            tab.get_by_text("summing up every row … 6 %").wait_for()
        finally:
            ready.set()
            tab.wait_for_selector("main section.view")
            tab.close()


def settled(shown: Shown, text: str) -> str:
    """Wait until the map says this of its tiles; all that it says."""
    level = shown.tab.locator("[data-read=level]", has_text=text)
    level.wait_for(timeout=60_000)
    return level.inner_text()


def test_tiles_come_from_the_server_down_to_the_exact_weight(
    opened: Any, server: PageServer, subject: regard.Weights
) -> None:
    shown = opened(server)
    assert re.match("Cells of [24] × [24] words, computed by the server", settled(shown, "Cells of"))
    shown.tab.fill("[data-key=find]", "recall")
    shown.tab.press("[data-key=find]", "Enter")
    assert settled(shown, "Exact, computed by the server")
    shown.tab.locator(".readout [data-read=weight]").wait_for()
    weight = float(subject[0, ROW, KEY])
    assert number(shown.text(".readout [data-read=weight]")) == pytest.approx(weight, abs=6e-4)
    assert "exact" in shown.text(".readout")
    shown.tab.focus("[data-key=map]")
    shown.tab.keyboard.press("ArrowRight")
    assert shown.text(".readout [data-read=weight]") == "the mask forbids it"
    assert any("/tiles?" in url for url in shown.requests)


def test_any_row_and_any_window_can_be_read(opened: Any, server: PageServer, subject: regard.Weights) -> None:
    shown = opened(server)
    row = shown.ask(f"[...await page.head.stored.row({ROW + 7})]")
    torch.testing.assert_close(torch.tensor(row), subject[0, ROW + 7], rtol=1e-3, atol=1e-6)
    shown.tab.fill("[data-key=find]", str(ROW))
    shown.tab.press("[data-key=find]", "Enter")
    shown.tab.locator("[data-key=read]:not([disabled])").wait_for()
    shown.click("read")
    shown.tab.locator("section.view.cross").wait_for()
    span = shown.ask("page.stack.window")
    assert span[0] <= ROW < span[1]
    assert span[2] <= KEY < span[3]
    here = shown.ask(f"page.head.at({ROW} - {span[0]}, {KEY} - {span[2]})")
    assert here == pytest.approx(float(subject[0, ROW, KEY]), rel=1e-3)
    assert not shown.ask(f"page.head.visible({ROW} - {span[0]}, {KEY + 1} - {span[2]})")
    assert "win=" in shown.tab.url
    shown.tab.reload()
    shown.tab.locator("section.view.cross").wait_for()
    assert shown.ask("page.stack.window") == span, "a reload leads to the same window"


def test_a_typed_sentence_opens_its_own_page_and_the_address_has_no_word_of_it(opened: Any) -> None:
    with running(PageServer(lambda: typed("the cat sat", None), look_at=typed)) as server:
        shown = opened(server)
        assert shown.text("h1") == "the cat sat"
        edges = """[...document.querySelectorAll('header, .typing, .tabs')].map((x) => x.getBoundingClientRect()).map((x) => [x.top, x.bottom])"""
        (_, head), (top, bottom), (tabs, _) = shown.tab.evaluate(edges)
        assert min(top - head, tabs - bottom) >= 10, (
            "the field keeps its distance from the rule above and the views below"
        )
        shown.tab.fill("[data-key=typed]", "a private thing")
        shown.tab.press("[data-key=typed]", "Enter")
        shown.tab.locator("h1", has_text="a private thing").wait_for()
        assert "/?look=" in shown.tab.url
        assert not any("private" in url for url in [*shown.requests, shown.tab.url])
        shown.tab.reload()
        shown.tab.locator("h1", has_text="a private thing").wait_for()
        shown.tab.fill("[data-key=typed]", "wrong")
        shown.click("look")
        shown.tab.get_by_text("the text must have another word").wait_for()
        shown.wrong.clear()  # the browser reports the status 422 in its console


def test_a_link_opens_one_browser_and_a_server_that_has_ended_is_named(
    opened: Any, browser: Any, server: PageServer
) -> None:
    link = server.guard.link
    shown = opened(server)
    other = browser.new_context().new_page()
    assert other.goto(link).status == 403
    assert "was used" in other.inner_text("body")
    other.context.close()
    settled(shown, "computed by the server")
    shown.tab.evaluate("() => { globalThis.fetch = () => Promise.reject(new TypeError('refused')); }")
    shown.tab.fill("[data-key=find]", "recall")
    shown.tab.press("[data-key=find]", "Enter")
    settled(shown, "the server does not answer")
