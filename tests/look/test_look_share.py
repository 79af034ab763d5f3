"""Sharing a view: links that lead back to it, the view as SVG, PNG and CSV, and a caption that makes it again."""

from __future__ import annotations

import csv
import html
import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import regard
from regard.look import View
from support.opened_page import Shown, finish_lab, number
from support.page_probe import CAT, HOSTILE, history, minilm

SVG = "{http://www.w3.org/2000/svg}"
IT = 10


def saved(shown: Shown, key: str, folder: Path) -> Path:
    if not shown.tab.locator(".share[open]").count():
        shown.click("share")
    with shown.tab.expect_download() as info:
        shown.click(key)
    path = folder / info.value.suggested_filename
    info.value.save_as(path)
    return path


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(node.itertext()).strip() for node in root.iter(f"{SVG}text")]


# Links.


def test_a_link_opens_exactly_this_view(show: Any, it: View) -> None:
    shown = show(it, permissions=["clipboard-read", "clipboard-write"])
    shown.click("word-6")
    shown.tab.mouse.move(2, 2)
    shown.view("overview")
    shown.choose("sort", "tie")
    shown.choose("cells", "row")
    order = "[...document.querySelectorAll('.headcell')].map((x) => x.dataset.key)"
    before = shown.tab.evaluate(order)
    link = shown.ask("page.link")
    assert link.startswith("file://")
    assert "cross" not in link, "no word of the text"
    other = shown.tab.context.new_page()
    other.goto(link)
    other.wait_for_selector(".headcell")
    assert other.evaluate(order) == before
    assert other.locator('[data-key="cells"]').input_value() == "row"


# What a reader sees of a view: the state of every control, and the text.
SEEN = """[...document.querySelectorAll('main [data-key]')].map((x) => [x.dataset.key, x.value ?? '', Boolean(x.checked),
    x.getAttribute('aria-pressed')]).concat([[document.querySelector('main').innerText]])"""
CHOSEN: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "the rules of the lab": ("play", [("similarity", "cosine"), ("power", 1.3), ("causal", True), ("width", 3), ("window", True)]),
    "a shuffled lab": ("play", [("shuffle", None), ("forbid-3", None), ("forbid-7", None)]),
    "word vectors": ("walk", [("walk-words", None), ("walk-Wq", True), ("walk-Wv", True), ("dot-4", None)]),
    "a product of a head": ("walk", [("head", 5), ("dot-0", None)]),
    "what a word gives to": ("overview", [("metric", "sink"), ("sort", "given"), ("given", 8), ("word", 3), ("cells", "row")]),
    "axes of the atlas": ("overview", [("axis-x", "mean_distance_without_sink"), ("axis-y", "sink")]),
    "every head of the spotlight": ("spotlight", [("chip-all", None), ("merge", True), ("hide", True)]),
    "the colours of the square": ("square", [("fit", True), ("head", 3)]),
}  # fmt: skip


def use(shown: Shown, key: str, value: Any) -> None:
    control = shown.tab.locator(f'[data-key="{key}"]')
    kind = control.evaluate("(x) => x.type")
    if value is None:
        control.click()
    elif kind == "select-one":
        control.select_option(str(value))
    elif kind == "checkbox":
        control.set_checked(value)
    else:
        control.fill(str(value))


def settled(tab: Any) -> list[Any]:
    """What is seen once the slices of the Lab are done and the address is written."""
    tab.wait_for_timeout(200)
    finish_lab(tab)
    return tab.evaluate(SEEN)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_link_holds_all_that_was_chosen(show: Any, it: View, name: str) -> None:
    view, steps = CHOSEN[name]
    shown: Shown = show(it)
    if view != "spotlight":
        shown.view(view)
    fresh = settled(shown.tab)
    for key, value in steps:
        use(shown, key, value)
    shown.tab.mouse.move(2, 2)
    seen = settled(shown.tab)
    assert seen != fresh
    assert shown.tab.evaluate("location.href") == shown.ask("page.link"), "the address is the link"
    other = shown.tab.context.new_page()
    other.goto(shown.ask("page.link"))
    other.wait_for_selector(f"section.view.{view}")
    assert settled(other) == seen


def test_a_link_holds_two_heads_that_are_compared(show: Any, it: View) -> None:
    shown: Shown = show(it).view("overview")
    shown.click("head-1-2")
    shown.tab.locator('[data-key="head-3-1"]').click(modifiers=["Shift"])
    peek = shown.text(".peek")
    assert "layer 1, head 2 and layer 3, head 1" in peek
    shown.tab.goto("about:blank")
    shown.tab.go_back()
    shown.tab.wait_for_selector(".peek")
    assert shown.text(".peek") == peek


HOSTILE_FIELDS = [
    "v=play&sim=constructor&x=Infinity&near=-1&out=99.1e9&order=0.0.1",
    "v=play&sim=__proto__&x=&near=&out=&order=&mask=<img>",
    "v=play&order=" + "1." * 9000,
    "v=walk&from=head&on=qkv&dot=99",
    "v=walk&from=nowhere&on=<script>&dot=-1",
    "v=overview&o=constructor.toString.x.__proto__.y&to=x&vs=9.9.9.9",
    "v=overview&o=entropy.given&to=99",
    "v=overview&o=&vs=1.2.3",
]


def test_a_hostile_field_is_left_out(show: Any, it: View) -> None:
    shown: Shown = show(it)
    first = {}
    for view in ("play", "walk", "overview"):
        shown.tab.evaluate(f"location.hash = '#v={view}&w=10'")
        shown.tab.wait_for_selector(f"section.view.{view}")
        first[view] = settled(shown.tab)
    for hostile in HOSTILE_FIELDS:
        shown.tab.evaluate(f"location.hash = '#w=10&{hostile}'")
        view = re.search(r"v=(\w+)", hostile)[1]  # type: ignore[index]
        shown.tab.wait_for_selector(f"section.view.{view}")
        assert settled(shown.tab) == first[view], hostile


def test_a_field_that_fits_is_taken_beside_one_that_does_not(show: Any, it: View) -> None:
    shown: Shown = show(it)
    shown.tab.evaluate("location.hash = '#v=play&w=10&sim=nothing&x=20&out=3.99'")
    shown.tab.wait_for_selector("section.view.play")
    assert shown.ask("[page.play.similarity, page.play.power, page.play.forbidden]") == ["recorded", 2, [3]]
    shown.tab.evaluate("location.hash = '#v=overview&w=10&o=nothing.given.row.sink.nothing&to=4'")
    shown.tab.wait_for_selector("section.view.overview")
    assert shown.ask("[page.overview.by, page.overview.sort, page.overview.target, page.overview.x]") == ["entropy", "given", 4, "sink"]  # fmt: skip


def test_the_way_back_leads_through_the_views(show: Any, it: View) -> None:
    shown = show(it)
    shown.view("walk")
    shown.view("square")
    shown.tab.go_back()
    shown.tab.wait_for_selector("section.view.walk")
    shown.tab.go_back()
    shown.tab.wait_for_selector("section.view.spotlight")
    shown.tab.go_forward()
    shown.tab.wait_for_selector("section.view.walk")


def test_a_window_of_a_long_text_is_linked(show: Any) -> None:
    W = regard.weights(torch.randn(400, 8, generator=torch.Generator().manual_seed(0)))
    shown = show(W.show(7))
    for _ in range(200):
        if not shown.ask("page.vectorsPending"):
            break
        shown.tab.wait_for_timeout(20)
    shown.tab.focus('[data-key="map"]')
    for _ in range(3):
        shown.tab.keyboard.press("+")
    shown.tab.wait_for_timeout(300)
    view = shown.ask("page.long.view")
    address = shown.tab.evaluate("location.hash")
    assert re.search(r"z=\d+\.\d+\.\d+\.\d+", address)
    shown.click("read")
    where = shown.tab.evaluate("location.hash")
    assert "win=0." in where
    words = shown.texts(".word .token")
    shown.tab.reload()
    shown.tab.wait_for_selector(".word")
    assert shown.texts(".word .token") == words
    shown.tab.evaluate(f"location.hash = {address!r}")
    shown.tab.wait_for_selector("section.view.long")
    again = shown.ask("page.long.view")
    assert again == pytest.approx(view, abs=1)
    for hostile in (
        "#v=long&w=1&z=9.1.1.1",
        "#v=long&w=1&z=0.9999.0.1",
        "#win=0.0.500.0.1&w=3",
        "#o=x.y.z&w=1",
        "#z=a.b",
    ):
        shown.tab.evaluate(f"location.hash = {hostile!r}")
        shown.tab.wait_for_timeout(30)
        assert shown.tab.locator("main section.view").count() == 1


def test_selected_words_are_copied_as_a_text(show: Any, it: View) -> None:
    shown = show(it)
    first, last = (shown.tab.locator(f'[data-key="word-{n}"] .token').bounding_box() for n in (1, 6))
    shown.tab.mouse.move(first["x"] + 1, first["y"] + 12)
    shown.tab.mouse.down()
    shown.tab.mouse.move(last["x"] + last["width"] - 1, last["y"] + 12, steps=8)
    shown.tab.mouse.up()
    copied = """new Promise((done) => { addEventListener('copy', (event) => done([event.defaultPrevented,
        event.clipboardData.getData('text/plain')]), { once: true }); document.execCommand('copy'); })"""
    assert shown.tab.evaluate(copied) == [True, "the animal didn ' t cross"]


def test_a_page_in_a_frame_says_that_it_has_no_link(browser: Any, it: View) -> None:
    shown = Shown(browser.new_page())
    shown.tab.set_content(
        f'<iframe sandbox="allow-scripts" width="900" height="800" srcdoc="{html.escape(it.html())}"></iframe>'
    )
    frame = shown.tab.frame_locator("iframe")
    frame.locator('[data-key="share"]').click()
    frame.locator('[data-key="copy-link"]').click()
    assert "save the page as a file" in frame.locator(".sheet .hint").inner_text()
    frame.locator('[data-key="copy-caption"]').click()
    assert "Attention of “it”" in frame.locator(".sheet .hint").inner_text(), "to be copied by hand"
    assert shown.wrong == []
    shown.tab.close()


@pytest.mark.parametrize("theme", ["system", "button"])
def test_paper_is_light_and_shows_bars_and_shades(show: Any, it: View, theme: str) -> None:
    shown = show(it, dark=theme == "system").view("square")
    if theme == "button":
        shown.click("theme")
    ground = "getComputedStyle(document.body).backgroundColor"
    faint = """(() => { const c = document.querySelector('.matrix canvas'); return Math.max(...c.getContext('2d').getImageData(0, 0,
        c.width, 1).data.filter((_, n) => n % 4 === 0)); })()"""
    dark = shown.tab.evaluate(ground)
    assert shown.tab.evaluate(f"(dispatchEvent(new Event('beforeprint')), {ground})") == "rgb(253, 252, 250)"
    assert shown.tab.evaluate(faint) > 240, "the cells are those of the light theme, too"
    shown.tab.emulate_media(media="print")
    assert shown.tab.evaluate("getComputedStyle(document.querySelector('.matrix')).printColorAdjust") == "exact"
    shown.ask("page.open('spotlight')")
    assert "Follow the lines" in shown.text(".look")
    assert "click" not in shown.text(".look"), "nobody clicks on paper"
    shown.ask("page.open('square')")
    assert shown.tab.evaluate(f"(dispatchEvent(new Event('afterprint')), {ground})") == dark == "rgb(20, 23, 27)"


# Pictures.


def test_the_svg_is_the_view(show: Any, it: View, tmp_path: Path) -> None:
    shown = show(it)
    path = saved(shown, "save-svg", tmp_path)
    assert path.name == "regard-spotlight-2-1_3-1.svg"
    assert "click" not in path.read_text(), "nor in a picture"
    root = ElementTree.parse(path).getroot()
    got = texts(root)
    for word in ("animal", "tired", "0.69", "0.64", "layer 2, head 1"):
        assert word in got
    assert "Share" not in got
    assert "hide special tokens" not in got, "the picture, not its controls"
    paths = [node for node in root.iter(f"{SVG}path") if node.get("stroke") not in (None, "none")]
    assert len(paths) == shown.tab.locator(".lines path").count()
    assert {node.get("stroke") for node in paths} == {"#c04a06", "#0a66ad"}
    described = root.find(f"{SVG}desc").text
    assert "Attention of “it” in layer 2, head 1 and layer 3, head 1" in described
    bands = [node for node in root.iter(f"{SVG}rect") if node.get("fill") == "#c04a06" and node.get("fill-opacity")]
    assert max(float(node.get("fill-opacity")) for node in bands) > 0.4, "words are shaded by their weights"
    places = [float(node.get("x")) for node in root.iter(f"{SVG}text") if "".join(node.itertext()) == "animal"]
    box = shown.tab.locator('[data-key="word-2"] .token').bounding_box()
    view = shown.tab.locator("section.view").bounding_box()
    assert min(abs(x - (box["x"] + box["width"] / 2 - view["x"] + 12)) for x in places) < 3
    shown.tab.select_option('[data-key="share-size"]', "column")
    assert ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot().get("width") == "3.3in"


#: The sizes of a picture: its width in inches, and the least height of its letters, in points.
SIZES = {"column": (3.3, 5), "page": (6.9, 5), "slide": (13.33, 9)}


def letter_sizes(root: ElementTree.Element) -> list[float]:
    """The size of every text as it is drawn, in units of the picture; a drawing inside may be magnified."""
    sizes = [float(node.get("font-size")) for node in root.findall(f"{SVG}text")]
    for drawing in root.findall(f"{SVG}svg"):
        box = (drawing.get("viewBox") or "").split()
        scale = float(drawing.get("width")) / float(box[2]) if box else 1
        sizes += [scale * float(node.get("font-size").removesuffix("px")) for node in drawing.iter(f"{SVG}text")]
    return sizes


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", ["spotlight", "square", "overview", "play"])
def test_letters_of_a_picture_can_be_read_at_its_width(
    show: Any, it: View, tmp_path: Path, width: int, view: str
) -> None:
    shown = show(it, width=width).view(view)
    before = shown.tab.locator("section.view").bounding_box()
    shown.click("share")
    for size, (inches, least) in SIZES.items():
        shown.tab.select_option('[data-key="share-size"]', size)
        root = ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()
        _, _, across, _ = map(float, root.get("viewBox").split())
        letters = sorted(size * inches * 72 / across for size in letter_sizes(root))
        assert letters[0] >= least, size
        assert root.get("width") == f"{inches}in"
    assert shown.tab.locator("section.view").bounding_box() == before, "the page is as it was"
    assert shown.tab.evaluate("document.body.style.width") == ""


def test_a_png_for_paper_has_300_dots_an_inch(show: Any, it: View, tmp_path: Path) -> None:
    shown = show(it)
    shown.click("share")
    shown.tab.select_option('[data-key="share-size"]', "column")
    data = saved(shown, "save-png", tmp_path).read_bytes()
    assert abs(int.from_bytes(data[16:20], "big") - 3.3 * 300) <= 3


def test_slides_saved_on_a_phone_are_those_of_a_desktop(show: Any, it: View, tmp_path: Path) -> None:
    decks = []
    for width in (390, 1440):
        shown = show(it, width=width, reduced_motion="reduce").view("story")
        with shown.tab.expect_download() as info:
            shown.click("story-slides")
        decks.append(re.findall(r"<text[^>]*>([^<]*)</text>", Path(info.value.path()).read_text()))
    assert decks[0] == decks[1]
    assert decks[0].count("[SEP]") >= 5


@pytest.mark.parametrize("view", ["square", "overview", "walk", "play"])
def test_every_view_is_saved_as_a_picture(show: Any, it: View, tmp_path: Path, view: str) -> None:
    shown = show(it).view(view)
    root = ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()
    shown.tab.wait_for_timeout(50)
    canvases = shown.tab.locator("section.view canvas").count()
    assert len(list(root.iter(f"{SVG}image"))) >= min(canvases, 1) * (canvases - 4)
    assert len(texts(root)) > 10
    text = ElementTree.tostring(root, encoding="unicode")
    assert not re.search(r"var\(|color-mix|http://(?!www\.w3\.org)|<script|onload", text), "a picture of its own"


def test_a_picture_ends_where_its_content_does(show: Any, it: View, tmp_path: Path) -> None:
    shown = show(it, width=1440).view("square")
    root = ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()
    x, y, width, height = map(float, root.get("viewBox").split())
    assert (float(root.get("width")), float(root.get("height"))) == (width, height)
    assert width < 1000, "the square does not fill the page, and neither does its picture"
    tops = [float(node.get("y")) - y for node in root.iter(f"{SVG}text") if node.get("y") and node.get("x")]
    assert min(tops) < 60, "nothing stands where the controls were"
    assert x <= 0 <= x + width
    assert shown.tab.locator(".snapped").count() == 0
    assert shown.tab.locator(".controls").first.is_visible()


def test_hatches_frames_and_strengths_are_in_the_picture(show: Any, it: View, tmp_path: Path) -> None:
    masked = regard.weights(torch.randn(2, 6, 8), mask=regard.causal()).label(CAT).show("sat")

    def drawn(shown: Any) -> ElementTree.Element:
        return ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()

    def hatched(root: ElementTree.Element) -> int:
        return sum(str(node.get("fill")).startswith("url(#hatching") for node in root.iter(f"{SVG}rect"))

    shown = show(masked)
    assert hatched(drawn(shown)) == shown.tab.locator(".word.unseen").count() == 3
    root = drawn(shown.view("play"))
    assert hatched(root) == 3 + 1 + 1, "words, the map of all words below its colours, and the legend"
    frames = [node for node in root.iter(f"{SVG}path") if node.get("stroke-opacity") == "0.6"]
    assert len(frames) == shown.tab.locator(".lane .ghost").count() == 6
    lines = [node for node in drawn(shown.view("walk")).iter(f"{SVG}path") if node.get("stroke-opacity") == "1"]
    assert len(lines) > 20, "lines between the steps"
    shown = show(it).view("overview")
    shares = shown.tab.evaluate(
        "[...document.querySelectorAll('.headcell')].map((x) => Number(x.style.getPropertyValue('--strength')))"
    )
    width = shown.tab.locator(".headcell > span").first.bounding_box()["width"]
    height = shown.tab.locator(".headcell > span").first.bounding_box()["height"]
    bars = [
        node
        for node in drawn(shown).iter(f"{SVG}rect")
        if abs(float(node.get("height", "0").rstrip("%")) - height) < 0.02
    ]
    assert [float(node.get("width")) / width for node in bars] == pytest.approx([x for x in shares if x > 0], abs=0.01)


def test_the_picture_of_an_image_shows_its_patches_above_it(show: Any, tmp_path: Path) -> None:
    picture = torch.zeros(8, 8, 3, dtype=torch.uint8)
    picture[..., 0] = 255
    W = regard.weights(torch.randn(1, 10, 8)).label(grid=(3, 3), image=picture)
    shown = show(W.show("1,1"))
    root = ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()
    order = [node.tag.removeprefix(SVG) for node in root]
    shades = [n for n, node in enumerate(root) if node.get("fill") == "#c04a06" and node.get("fill-opacity")]
    assert sum(n > order.index("image") for n in shades) >= 5, "what is drawn later lies above"
    red, green, _, alpha = shown.tab.evaluate(
        """async (href) => { const bytes = Uint8Array.from(atob(href.split(',')[1]), (x) => x.charCodeAt(0));
           const d = document.createElement('canvas').getContext('2d'); d.drawImage(await createImageBitmap(new Blob([bytes])), 0, 0);
           return [...d.getImageData(2, 2, 1, 1).data]; }""",
        root.find(f"{SVG}image").get("href"),
    )
    assert abs(red - green) < 60, "its colours are faint, as on the page"
    assert alpha < 255
    assert texts(root).count("0,2") <= 1, "no names on the patches; bars may have one"


def test_a_picture_cuts_words_where_the_page_does(show: Any, tmp_path: Path) -> None:
    words = [
        "a",
        "antidisestablishmentarianismically" * 2,
        "x" * 200,
        "😀",
        "end",
    ]  # too long for a heading in any font
    shown = show(regard.weights(2 * torch.randn(5, 8)).label(words).show(1))
    written = texts(ElementTree.fromstring(saved(shown, "save-svg", tmp_path).read_text(encoding="utf-8")))
    for word in words[1:3]:
        drawn = [text for text in written if text.endswith("…") and word.startswith(text[:-1])]
        assert drawn, word
        assert min(map(len, drawn)) < 20, "as narrow as in the sentence"
        assert written.count(word) <= 1, "only the heading has it complete"
    assert "😀" in written
    assert "end" in written


def test_the_steps_of_a_walk_are_saved_as_a_table(show: Any, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    W = regard.weights(x, mask=regard.causal()).label(["the", "cat", "sat", "down"])
    shown = show(W.show("sat")).view("walk")
    rows = list(csv.reader(io.StringIO(saved(shown, "save-csv", tmp_path).read_text(encoding="utf-8-sig"))))
    assert rows[0] == ["word", "q·k", "scaled ÷ √8", "masked", "weight"]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx((x[2] @ x.T).tolist(), rel=1e-3, abs=1e-3)
    assert [float(row[4]) for row in rows[1:]] == pytest.approx(W.row("sat").tolist(), abs=1e-3)
    assert rows[4][3] == "-Infinity"


def test_the_png_is_twice_as_large(show: Any, it: View, tmp_path: Path) -> None:
    shown = show(it)
    root = ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()
    data = saved(shown, "save-png", tmp_path).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(data[16:20], "big")
    assert width == 2 * int(root.get("width"))


def test_hostile_words_are_text_in_a_picture(show: Any, tmp_path: Path) -> None:
    words = [text for text in HOSTILE[:40] if text.strip()]
    shown = show(regard.weights(torch.randn(len(words), 4)).label(words).show(1))
    root = ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot()
    tags = {node.tag.removeprefix(SVG) for node in root.iter()}
    assert tags <= {"svg", "title", "desc", "rect", "text", "path", "image", "line", "circle", "g"}


# Tables and captions.


def test_the_csv_has_the_weights_and_no_formula(show: Any, tmp_path: Path) -> None:
    words = ["=1+1", "+x", "-y", "@z", 'a "b", c', "plain"]
    W = regard.weights(torch.randn(6, 4, generator=torch.Generator().manual_seed(0))).label(words)
    shown = show(W.show(5))
    rows = list(csv.reader(io.StringIO(saved(shown, "save-csv", tmp_path).read_text(encoding="utf-8-sig"))))
    assert [row[0] for row in rows[1:]] == ["'=1+1", "'+x", "'-y", "'@z", 'a "b", c', "plain"]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(W.row(5).tolist(), rel=1e-6)
    shown.view("square")
    rows = list(csv.reader(io.StringIO(saved(shown, "save-csv", tmp_path).read_text(encoding="utf-8-sig"))))
    got = torch.tensor([[float(x) for x in row[1:7]] for row in rows[1:]])
    torch.testing.assert_close(got, W.dense())


def test_the_caption_names_model_head_version_and_command(show: Any) -> None:
    seen, _ = minilm()
    options = {"word": "it", "model": "all-MiniLM-L6-v2", "command": 'regard look "The animal"'}
    shown = show(View(seen, **options), permissions=["clipboard-read", "clipboard-write"])
    shown.click("share")
    shown.click("copy-caption")
    shown.tab.wait_for_selector(".sheet .hint:not(:empty)")
    text = shown.tab.evaluate("navigator.clipboard.readText()")
    assert text == (
        "Attention of “it” in layer 2, head 1 and layer 3, head 1. all-MiniLM-L6-v2 · 6 layers × 12 heads · 15 tokens. "
        f'Made with regard {regard.__version__}: regard look "The animal" --word 10 --layer 2 --head 1'
    )
    shown.tab.keyboard.press("Escape")
    assert shown.tab.locator(".share[open]").count() == 0
    assert shown.tab.evaluate("document.activeElement.dataset.key") == "share"


def test_a_training_page_is_shared_as_well(show: Any, tmp_path: Path) -> None:
    shown = show(View(history()))
    assert len(texts(ElementTree.parse(saved(shown, "save-svg", tmp_path)).getroot())) > 10
    rows = list(csv.reader(io.StringIO(saved(shown, "save-csv", tmp_path).read_text(encoding="utf-8-sig"))))
    assert len(rows) == 21
    assert number(rows[1][1]) == pytest.approx(0.9, abs=1e-3)
