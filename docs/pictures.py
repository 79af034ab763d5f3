"""Draw the pictures of the README again: `python docs/pictures.py`, into docs/pictures.

Each is what a reader gets: the SVG of `view.save("it.svg")`, and the page of `view.save("it.html")` photographed in
Chromium (REGARD_CHROMIUM says where it is, if not at /usr/bin/chromium). The model is the bundled one; nothing is
downloaded.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch

import regard
from regard.look.loading import BUNDLED, load_model, look_at
from regard.look.svg_elements import HUES, PALE, document, rect, text_element
from regard.look.word_vectors import word_vectors

SENTENCE = "The animal didn't cross the street because it was too tired"
FOLDER = Path(__file__).parent / "pictures"
CHROMIUM = os.environ.get("REGARD_CHROMIUM") or "/usr/bin/chromium"
LARGEST = 150_000  # bytes of a picture

#: Pictures of the page: name → the view, what is done there, how high the picture is, and whether it is dark.
PAGES: dict[str, tuple[str, list[tuple[str, str]], int, bool]] = {
    "spotlight": ("spotlight", [], 700, False),
    "spotlight-dark": ("spotlight", [], 700, True),
    "walk": ("walk", [("click", "dot-13")], 935, False),
    "story": ("story", [("click", "chapter-3")], 1030, False),
    "play": ("play", [("click", "forbid-13")], 1060, False),
    "square": ("square", [], 1000, False),
    "heads": ("overview", [], 720, False),
}


def main() -> None:
    """Draw everything, and say what became how large."""
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = load_model()
    vectors = word_vectors(SENTENCE, model)
    view = look_at(SENTENCE, model).show("it", title=SENTENCE, model=BUNDLED, word_vectors=vectors)
    view.save(FOLDER / "it.svg")
    _photograph(view, PAGES)
    wide = look_at(SENTENCE.replace("tired", "wide"), model)
    changes = regard.compare(look_at(SENTENCE, model), wide, names=("tired", "wide"))
    _photograph(
        changes.show(word="it", title="What “it” looks at, before tired and before wide"),
        {"compare": ("", [], 1230, False)},
    )
    _photograph(_long().show(1500, title="A causal head over 3,000 tokens"), {"long": ("", [], 940, False)})
    (FOLDER / "patterns.svg").write_text(_patterns())
    (FOLDER / "losses.svg").write_text(_curves())
    for path in sorted(FOLDER.iterdir()):
        size = path.stat().st_size
        print(f"{size:8,d}  {path.name}")
        if size > LARGEST:
            raise ValueError(f"{path.name} has {size:,} bytes; a picture has at most {LARGEST:,}.")


def _patterns() -> str:
    """Two layers of heads made by hand, one pattern each, as in docs/uses.md."""
    t, at = 96, torch.arange(96)
    targets = [at, at - 1, at * 0, at - 3, at, at]
    strength = [9.0, 4.0, 9.0, 4.0, 3.0, 0.0]
    keys = torch.eye(t)
    queries = torch.stack([s * keys[x.clamp(min=0)] for s, x in zip(strength, targets, strict=True)])
    exact = regard.weights(3 * queries, keys.expand(6, t, t), score="dot", mask=regard.causal())
    slopes = torch.tensor([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
    near = regard.weights(torch.zeros(6, t, 4), mask=regard.causal(), score=regard.Dot().alibi(slopes))
    return regard.look.draw_patterns(regard.patterns.classify([exact, near]), title="Two layers made by hand")


def _curves() -> str:
    """The curves of `examples/losses_at_work.py`."""
    curves = runpy.run_path(str(FOLDER.parent.parent / "examples" / "losses_at_work.py"))["main"]()
    width, height, gap = 270.0, 110.0, 44.0
    elements = []
    for n, (title, lines) in enumerate(curves.items()):
        left, top = 24 + (n % 2) * (width + gap), 40 + (n // 2) * (height + gap + 8)
        largest = max(float(line.max()) for line in lines.values())
        frame = f'fill="none" stroke="{PALE}" stroke-opacity="0.4"'
        elements += [text_element(left, top - 12, title, 12, bold=True), rect(left, top, width, height, frame)]
        elements.append(text_element(left + width + 4, top + 10, f"{largest:.2g}", 10, PALE))
        elements.append(text_element(left + width + 4, top + height, "0", 10, PALE))
        steps = f"{len(next(iter(lines.values())))} steps"
        elements.append(text_element(left + width, top + height + 15, steps, 10, PALE, "end"))
        for m, (name, line) in enumerate(lines.items()):
            hue = HUES[1 - m]
            at = [
                (left + width * x / (len(line) - 1), top + height * (1 - float(y) / largest))
                for x, y in enumerate(line)
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            elements.append(f'<polyline points="{path}" fill="none" stroke="{hue}" stroke-width="2"/>')
            elements.append(text_element(left + 6 + 70 * m, top + height + 15, name, 11, hue))
    described = "Curves of sixty steps of training for each loss."
    across, down = 48 + 2 * width + gap + 30, -(-len(curves) // 2) * (height + gap + 8) + 30
    return document("Losses on attention at work", described, across, down, elements)


def _long() -> regard.Weights:
    """Three thousand positions with rotary-like queries and keys: a neighbourhood, a sink and a few far ties."""
    t, d = 3000, 16
    at = torch.arange(t).unsqueeze(-1) / 40.0
    turn = at * torch.logspace(0, -2, d // 2)
    q = torch.cat([turn.cos(), turn.sin(), torch.full((t, 1), 1.0), 0.6 * torch.randn(t, 8)], -1)
    k = torch.cat([turn.cos(), turn.sin(), torch.zeros(t, 1), 0.6 * torch.randn(t, 8)], -1)
    k[0, d] = 5.0
    return regard.weights(3 * q, k, score=regard.ScaledDot(1.0), mask=regard.causal())


def _photograph(view: Any, pages: dict[str, tuple[str, list[tuple[str, str]], int, bool]]) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "page.html"
        view.save(path)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])
        for name, (tab, acts, height, dark) in pages.items():
            scheme = "dark" if dark else "light"
            page = browser.new_page(
                viewport={"width": 1100, "height": height}, color_scheme=scheme, reduced_motion="reduce"
            )
            page.goto(path.as_uri())
            page.wait_for_selector("main section.view")
            page.wait_for_function("regard.then((page) => !page.vectorsPending)")
            if tab:
                page.click(f"#tab-{tab}")
            for act, key in acts:
                getattr(page, act)(f'[data-key="{key}"]')
            page.mouse.move(1, 1)
            page.evaluate("scrollTo(0, 0)")  # a click below brings its place into sight
            page.screenshot(path=FOLDER / f"{name}.png", animations="disabled")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
