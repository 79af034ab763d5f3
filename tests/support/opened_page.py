"""A page that is open in a real browser, as the tests of pages use it: what it shows, and all that it must not do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regard.look import View
from regard.look.page.html import frame
from support.page_probe import minilm

if TYPE_CHECKING:
    from regard.look.serve.server import PageServer

__all__ = ["Once", "Shown", "it", "number", "numbered", "running", "show", "weight"]


class Shown:
    """A page that is open, and everything it did that it should not."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.seconds = 0.0  # from asking for the page until a view stood
        tab.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        tab.on("pageerror", lambda error: self.wrong.append(f"error {error}"))
        tab.on(
            "console", lambda message: self.wrong.append(message.text) if message.type in ("error", "warning") else None
        )
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("popup", lambda _: self.wrong.append("popup"))

    def view(self, name: str) -> Shown:
        self.tab.click(f"#tab-{name}")
        return self

    def text(self, where: str) -> str:
        return self.tab.locator(where).first.inner_text()

    def texts(self, where: str) -> list[str]:
        return self.tab.locator(where).all_inner_texts()

    def click(self, key: str) -> None:
        self.tab.click(f'[data-key="{key}"]')

    def choose(self, key: str, value: Any) -> None:
        self.tab.select_option(f'[data-key="{key}"]', str(value))

    def ask(self, script: str) -> Any:
        """A value of the page's own state: `page` is the page."""
        return self.tab.evaluate(f"(async () => {{ const page = await regard; return {script}; }})()")

    def finish_lab(self) -> None:
        """Wait for what the Lab computes in slices. Playwright's `wait_for_function` takes any answer of an async function."""
        finish_lab(self.tab)

    def opened_table(self, where: str = "details.behind") -> list[list[str]]:
        self.tab.locator(where).first.locator("summary").click()
        rows = self.tab.locator(where).first.locator("tbody tr")
        rows.first.wait_for()
        return [[cell.strip() for cell in row.split("\t")] for row in rows.all_inner_texts()]


def finish_lab(tab: Any) -> None:
    """The same of a tab alone."""
    tab.evaluate(
        """async () => { const page = await regard; while (page.slices) await new Promise(requestAnimationFrame); }"""
    )


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Shown]]:
    contexts = []
    opened: list[tuple[Shown, str]] = []

    def open_(
        view: View, *, width: int = 1180, height: int = 860, dark: bool = False, name: str = "page.html", **more: Any
    ) -> Shown:
        path = tmp_path / name
        view.save(path)
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **more
        )
        contexts.append(context)
        shown = Shown(context.new_page())
        url = path.as_uri()
        began = time.perf_counter()
        shown.tab.goto(url)
        shown.tab.wait_for_selector("main section.view", timeout=60_000)
        shown.seconds = time.perf_counter() - began
        opened.append((shown, url))
        return shown

    yield open_
    for shown, url in opened:
        assert shown.wrong == [], shown.wrong
        local = {one for one in shown.requests if one.startswith("blob:")}  # pictures that the page drew itself
        assert set(shown.requests) - local == {url}, "a page asks for nothing but itself"
        assert shown.tab.evaluate("window.bad") is None
    for context in contexts:
        context.close()


class Once(View):
    """A view that many tests open: its page is made once."""

    page: str | None = None

    def html(self, fragment: bool = False) -> str:
        self.page = self.page or super().html()
        return frame(self.page) if fragment else self.page


@pytest.fixture(scope="module")
def it() -> View:
    seen, vectors = minilm()
    return Once(seen, word="it", word_vectors=vectors)


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf").replace("<", "").replace(",", ""))


def weight(text: str) -> float:
    """A weight as pictures write it; "<0.001" is one that would be rounded to 0.000."""
    return 2.5e-4 if text == "<0.001" else number(text)


def numbered(tokens: Sequence[str]) -> list[str]:
    """Words as views name them: those that occur several times have a number."""
    digits = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
    return [
        token + (str(tokens[: n + 1].count(token)).translate(digits) if tokens.count(token) > 1 else "")
        for n, token in enumerate(tokens)
    ]


@contextlib.contextmanager
def running(server: PageServer) -> Iterator[PageServer]:
    """A server that answers while the block runs."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
