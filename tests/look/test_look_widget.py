"""The page in a notebook with the kernel behind it: its questions, and the page in a host that relays them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.look import View
from regard.look.page.html import html
from regard.look.serve import widget as widget_module
from regard.look.serve.looks import Look, Looks
from regard.look.serve.widget import answer_page
from support.opened_page import Shown, number


@pytest.fixture(scope="module")
def subject() -> regard.Weights:
    numbers = torch.Generator().manual_seed(6)
    score = regard.ScaledDot().softcap(20.0)
    return regard.weights(2 * torch.randn(1, 700, 8, generator=numbers), score=score, mask=regard.causal())


@pytest.fixture(scope="module")
def kernel(subject: regard.Weights) -> tuple[Looks, Look]:
    look = Look(accepts_text=False)
    look.prepare(lambda: View(subject), "cpu", lambda: False, {"kernel": True})
    return Looks(), look


QUESTIONS: dict[str, tuple[Any, str]] = {
    "no object": ("tiles", "a question must be an object."),
    "another path": ({"id": "1", "path": "look", "fields": {"text": "x"}}, "there is no such question."),
    "a path of files": ({"id": "1", "path": "../data", "fields": {}}, "there is no such question."),
    "no fields": ({"id": "1", "path": "row", "fields": None}, "there is no such question."),
    "no head": ({"id": "1", "path": "row", "fields": {"row": 3}}, "the question must have one head."),
    "a row that is not there": (
        {"id": "1", "path": "row", "fields": {"head": "0.0", "row": 700}},
        "there is no such row.",
    ),
    "text as a row": ({"id": "1", "path": "row", "fields": {"head": "0.0", "row": "x"}}, "places must be 1 numbers"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_wrong_question_is_answered_by_a_sentence(kernel: tuple[Looks, Look], name: str) -> None:
    question, expected = QUESTIONS[name]
    answer, block = answer_page(*kernel, question)
    assert answer["error"].startswith(expected)
    assert block == b""


def test_a_row_comes_from_the_kernel(kernel: tuple[Looks, Look], subject: regard.Weights) -> None:
    answer, block = answer_page(*kernel, {"id": "7", "path": "row", "fields": {"head": "0.0", "row": 300}})
    assert answer == {"id": "7"}
    (size,) = struct.unpack("<I", block[:4])
    assert json.loads(block[4 : 4 + size])["arrays"] == [["f4", 0, 700]]
    row = torch.frombuffer(bytearray(block[4 + size :]), dtype=torch.float32)
    torch.testing.assert_close(row.clamp(min=0), subject[0, 300], rtol=1e-4, atol=1e-7)
    assert (row[301:] == -1).all()


def test_without_anywidget_it_says_what_to_install(subject: regard.Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    widget_module._widget_class.cache_clear()
    monkeypatch.setattr(widget_module, "import_module", missing)
    with pytest.raises(ImportError, match=r'pip install "regard\[notebook\]"'):
        View(regard.weights(torch.eye(3))).widget()


#: What anywidget does: the module renders into an element, and its model carries messages to Python and back.
HOST = """<!doctype html><body data-jp-theme-light="false"><div id="cell"></div><script type="module">
const heard = {{}}, page = atob("{page}"), fields = {{ page, height: 500 }};
const model = {{ get: (name) => fields[name], on: (name, act) => {{ heard[name] = act; }}, off: () => {{}},
  send: async (question) => {{ const [answer, block] = await window.kernel(question);
    const bytes = Uint8Array.from(atob(block), (c) => c.charCodeAt(0));
    heard["msg:custom"](answer, bytes.length ? [new DataView(bytes.buffer)] : []); }} }};
{script}
render({{ model, el: document.getElementById("cell") }});
</script>"""


def test_the_page_asks_the_kernel_for_what_it_cannot_compute(
    kernel: tuple[Looks, Look], subject: regard.Weights, browser: Any, tmp_path: Path
) -> None:
    script = (
        (Path(regard.__file__).parent / "look/page/js/widget.js").read_text().replace("export default { render };", "")
    )
    page = base64.b64encode(html(kernel[1].packed).encode()).decode()
    path = tmp_path / "notebook.html"
    path.write_text(HOST.format(page=page, script=script))
    shown = Shown(browser.new_context(viewport={"width": 1100, "height": 900}).new_page())

    def ask(question: Any) -> list[Any]:
        answer, block = answer_page(*kernel, question)
        return [answer, base64.b64encode(block).decode()]

    shown.tab.expose_function("kernel", ask)
    shown.tab.goto(path.as_uri())
    frame = shown.tab.frame_locator("iframe")
    frame.locator("[data-key=find]").fill("350")
    frame.locator("[data-key=find]").press("Enter")
    frame.locator("[data-read=level]", has_text="Exact, computed by the kernel").wait_for(timeout=60_000)
    frame.locator(".readout [data-read=weight]").wait_for()
    weight = number(frame.locator(".readout [data-read=weight]").inner_text())
    assert weight == pytest.approx(float(subject.peak().values[0, 350]), abs=6e-4)
    assert frame.locator("html").get_attribute("data-theme") == "dark", "the notebook's theme"
    assert shown.tab.locator("iframe").bounding_box()["height"] > 700, "the height of its page"
    assert shown.wrong == []
    shown.tab.context.close()
