"""Pictures for papers: parts and widths of the SVG, PDF and PNG without a browser, and the PDF that a page prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import regard
from regard.look import View
from regard.look.svg import svg
from regard.look.svg_elements import signed_fill
from support.page_probe import CAT, history

SVG = "{http://www.w3.org/2000/svg}"
FOX = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "sleeps",
    "for",
    "the",
    "whole",
    "long",
    "day",
]


def fox(heads: int = 2) -> regard.Weights:
    x = 1.5 * torch.randn(heads, len(FOX), 8, generator=torch.Generator().manual_seed(0))
    return regard.weights(x).label(FOX)


def inches_of(root: ElementTree.Element) -> tuple[float, float]:
    return tuple(float(root.get(name).removesuffix("in")) for name in ("width", "height"))


@pytest.mark.parametrize(("width", "inches"), [("3.3in", 3.3), ("84mm", 3.307), ("6.9in", 6.9), ("960px", 10.0)])
def test_a_picture_has_its_width_and_letters_that_can_be_read(width: str, inches: float) -> None:
    root = ElementTree.fromstring(svg(fox(), word="fox", width=width))
    across, down = inches_of(root)
    assert across == pytest.approx(inches, rel=1e-3)
    left, _, wide, high = map(float, root.get("viewBox").split())
    assert down / across == pytest.approx(high / wide, rel=1e-3)
    words = [node for node in root.iter(f"{SVG}text") if node.text in FOX and node.get("font-size") == "13.0"]
    assert len(words) == len(FOX)
    assert 13 * 72 * across / wide >= 7, "letters of seven points"
    assert all(left <= float(node.get("x")) <= left + wide for node in root.iter(f"{SVG}text"))


def test_in_a_column_no_line_passes_through_a_word() -> None:
    root = ElementTree.fromstring(svg(fox(), word="fox", part="lines", width="3.3in"))
    lines = sorted({float(node.get("y")) for node in root.iter(f"{SVG}text") if node.get("font-size") == "13.0"})
    assert len(lines) > 1
    for path in root.iter(f"{SVG}path"):
        if "H" not in path.get("d"):
            continue
        for y in map(float, re.findall(r"V([\d.]+)H", path.get("d"))):
            assert not any(line - 13 < y < line + 4 for line in lines), "along the words, not through them"
        for x in map(float, re.findall(r"Q([\d.]+) ", path.get("d"))):
            assert x < 24 or x > 24 + 300, "from line to line in the margin"


def test_the_parts_of_a_picture() -> None:
    both, lines, square = (svg(fox(), word="fox", part=part) for part in (None, "lines", "square"))
    assert "rows look at columns" in both
    assert "rows look at columns" not in lines
    assert "<path" not in square
    assert "<path" in lines
    assert "<path" in svg(fox(), part="lines"), "without a word, the one that is tied most"
    with pytest.raises(ValueError, match='part must be "lines"'):
        svg(fox(), part="circle")
    with pytest.raises(ValueError, match="leave it out here"):
        svg(history(), part="lines")
    for wrong in ("wide", "-1in", "0in", "3.3", 3.3, "1e9in"):
        with pytest.raises(ValueError, match="width must be a length"):
            svg(fox(), width=wrong)
    with pytest.raises(ValueError, match="a page has all parts"):
        fox().show().save("page.html", width="3in")


def test_a_comparison_is_a_picture_of_two_squares_and_their_difference() -> None:
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    a, b = (regard.weights(s * x).label(words) for s, words in ((1, CAT[:3]), (3, ["the", "dog", "sat"])))
    changes = regard.compare(a, b, names=("before", "after"))
    root = ElementTree.fromstring(svg(changes, word="sat", width="6.9in"))
    texts = ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]
    assert {"before", "after", "after − before", "cat (a)", "dog (b)"} <= set(texts)
    assert "“sat” → “" in root.find(f"{SVG}desc").text
    grey = [node for node in root.iter(f"{SVG}rect") if node.get("fill") == "#dcdfe4"]
    # Words without a counterpart: a row and a column in either pattern, two rows in the difference, and the legend.
    assert len(grey) == 2 * (4 + 4 - 1) + 2 * 4 + 1
    assert "one text has no such word" in texts
    assert {"−1: before gives more,", "1: after does"} <= set(texts), "the change has a scale"
    scale = [node.get("fill") for node in root.iter(f"{SVG}rect") if node.get("width") == "8.0"][10:19]
    assert [f'fill="{fill}"' for fill in scale] == [signed_fill((n - 4) / 4) for n in range(9)]
    same = svg(regard.compare(a, a, names=("before", "after")), word="sat", width="6.9in")
    assert "no such word" not in same, "said only where it is so"


def test_pdf_and_png_are_made_without_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    view = fox().show("fox")
    view.save(tmp_path / "fig.pdf", part="lines", width="3.3in")
    data = (tmp_path / "fig.pdf").read_bytes()
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", data)
    assert data.startswith(b"%PDF-")
    assert float(box[1]) == pytest.approx(3.3 * 72, abs=0.5)
    assert b"/Font" in data, "letters are letters"
    view.save(tmp_path / "fig.png", width="3.3in")
    data = (tmp_path / "fig.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == pytest.approx(3.3 * 300, abs=2), "300 pixels in an inch"
    View(history()).save(tmp_path / "run.pdf", width="6.9in")
    regard.weights(torch.eye(2)).label(["<&>", "\ud800"]).show(0).save(tmp_path / "odd.pdf")


def test_without_the_library_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(ImportError, match=r'pip install "regard\[figure\]"'):
        fox().show("fox").save(tmp_path / "fig.pdf")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_page_prints_the_view_alone_on_paper_of_its_size(show: Any, tmp_path: Path) -> None:
    shown = show(fox().show("fox"))
    shown.tab.evaluate("void (window.print = () => { window.printed = (window.printed ?? 0) + 1; })")
    shown.click("share")
    shown.tab.select_option('[data-key="share-size"]', "column")
    shown.click("save-pdf")
    shown.tab.wait_for_selector(".print", state="attached")
    assert shown.tab.evaluate("window.printed") == 1
    path = tmp_path / "printed.pdf"
    shown.tab.pdf(path=path, prefer_css_page_size=True)
    data = path.read_bytes()
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", data)
    assert float(box[1]) == pytest.approx(3.3 * 72, abs=1.5)
    assert len(re.findall(rb"/Type /Page\b", data)) == 1, "one page"
    shown.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown.tab.locator(".print").count() == 0
