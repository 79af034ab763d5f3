"""What JupyterLab and marimo show, the applications themselves in a real browser: run by `make test-notebooks`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The folder of the commands jupyter and marimo; their Python finds regard as well.
APPS = os.environ.get("REGARD_NOTEBOOKS")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not APPS, reason="make test-notebooks installs the notebooks")]

SETUP = """import torch, regard
torch.manual_seed(0)
words = "the cat sat on the mat".split()
W = regard.weights(torch.randn(2, 6, 8), mask=regard.causal()).label(words)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False).eval()
with torch.no_grad(), regard.record(model, tokens=words, values=True) as seen:
    model(torch.randn(1, 6, 16))
long = regard.weights(torch.randn(1, 700, 8), score=regard.ScaledDot().softcap(20.0), mask=regard.causal())"""
#: What stands at the end of a cell → a text of what it shows.
SHOWN = {
    "W": "rows look at columns",
    "seen": "batch × heads × rows × keys",
    "seen.summary()": "entropy",
    'regard.walk(W[0], torch.randn(6, 8), "sat")': "“sat” at 2",
    "regard.causal()": "causal()",
}
PAGE, WIDGET = 'W.show("cat")', "long.show(350).widget()"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Starts a notebook server and waits until it answers."""
    running: list[subprocess.Popen[bytes]] = []
    folders = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "XDG_CONFIG_HOME")}

    def start(command: str, *arguments: str, url: str) -> None:
        line = [str(Path(str(APPS)).absolute() / command), *arguments]
        with (tmp_path / "log.txt").open("wb") as log:
            running.append(subprocess.Popen(line, cwd=tmp_path, env={**os.environ, **folders}, stdout=log, stderr=log))
        until = time.monotonic() + 120
        while time.monotonic() < until and running[-1].poll() is None:
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        pytest.fail((tmp_path / "log.txt").read_text()[-2000:])

    yield start
    for process in running:
        process.terminate()
        process.wait(30)


@pytest.fixture
def tab(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab that has the dark theme exactly where the notebook has it not; its picture stays in the test's folder."""
    context = browser.new_context(viewport={"width": 1300, "height": 3400}, color_scheme="light")
    tab = context.new_page()
    tab.set_default_timeout(40_000)
    yield tab
    tab.screenshot(path=tmp_path / "notebook.png", full_page=True)
    context.close()


def test_jupyterlab_shows_all_of_it(tab: Any, serve: Any, tmp_path: Path) -> None:
    cells = [SETUP, *SHOWN, PAGE, WIDGET]
    content = {
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
            for n, cell in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "one.ipynb").write_text(json.dumps(content))
    overrides = {"@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Dark"}}
    (tmp_path / "overrides.json").write_text(json.dumps(overrides))
    at = f"http://127.0.0.1:{(port := free_port())}"
    serve(
        "jupyter-lab", "--no-browser", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
        "--allow-root", "--expose-app-in-browser", f"--LabApp.app_settings_dir={tmp_path}", url=f"{at}/api",
    )  # fmt: skip
    tab.goto(f"{at}/doc/tree/one.ipynb")
    tab.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    tab.get_by_text("| Idle").wait_for()
    tab.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    for n, text in enumerate(SHOWN.values(), 1):
        output = tab.locator(".jp-CodeCell").nth(n).locator(".jp-OutputArea-output")
        output.get_by_text(text).first.wait_for()
    check_page(tab, tab.locator(".jp-CodeCell").nth(len(SHOWN) + 1).locator("iframe"), dark=True)
    check_widget(tab, tab.locator(".jp-CodeCell").nth(len(SHOWN) + 2).locator("iframe"), dark=True)
    assert tab.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0


def test_marimo_shows_all_of_it(tab: Any, serve: Any, tmp_path: Path) -> None:
    names = "W, long, regard, seen, torch"
    setup = "\n".join(f"    {line}" for line in SETUP.splitlines())
    cells = "\n\n".join(f"@app.cell\ndef _({names}):\n    {cell}\n    return" for cell in [*SHOWN, PAGE, WIDGET])
    code = f"import marimo\n\napp = marimo.App()\n\n\n@app.cell\ndef _():\n{setup}\n    return {names}\n\n\n{cells}\n"
    (tmp_path / "one.py").write_text(code)
    at = f"http://127.0.0.1:{(port := free_port())}"
    serve("marimo", "-q", "run", "one.py", "--headless", f"--port={port}", "--no-token", url=f"{at}/health")
    tab.goto(at)
    for text in SHOWN.values():
        tab.get_by_text(text).first.wait_for()
    around = tab.locator("iframe").first  # marimo's own, around an output with a script
    check_page(tab, around.content_frame.locator("iframe"), dark=False)
    check_widget(tab, tab.locator("iframe").last, dark=False)
    inner = around.content_frame.locator("iframe").bounding_box()
    assert around.bounding_box()["height"] == pytest.approx(inner["height"], abs=40), "nothing is cut off"


def check_page(tab: Any, frame: Any, *, dark: bool) -> None:
    """The page of a cell: as tall as its content, in the theme of the notebook, and alive."""
    page = frame.content_frame
    page.locator(".word.lit").wait_for()
    fitting(tab, frame, page, dark)
    page.locator('[data-key="word-5"]').click()
    assert page.locator(".word.lit .token").inner_text() == "mat"


def check_widget(tab: Any, frame: Any, *, dark: bool) -> None:
    """The widget of a cell: exact weights come from the kernel."""
    page = frame.content_frame
    page.locator("[data-key=find]").fill("350")
    page.locator("[data-key=find]").press("Enter")
    page.locator("[data-read=level]", has_text="Exact, computed by the kernel").wait_for()
    fitting(tab, frame, page, dark)


def fitting(tab: Any, frame: Any, page: Any, dark: bool) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        height, content = frame.bounding_box()["height"], page.locator(".regard").bounding_box()["height"]
        theme = page.locator("html").get_attribute("data-theme")
        if abs(height - content) <= 24 and theme == ("dark" if dark else "light"):
            return
        tab.wait_for_timeout(100)
    assert height == pytest.approx(content, abs=24)
    assert theme == ("dark" if dark else "light")
