"""What the mask forbids is hatched in every picture, what is not a number has a colour of its own; neither is a weight of 0."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

import regard
from regard.look.masked_tiles import forbidden_tiles
from regard.look.page import comparison, content
from regard.look.svg import svg
from support.opened_page import Shown

WORDS = ["the", "cat", "sat", "on", "a", "mat"]
#: The picture of a canvas: "masked" where it is transparent over a hatched ground, "NaN" in the colour for it, else "".
CELLS = """(canvas) => { const { width, height } = canvas, d = canvas.getContext('2d').getImageData(0, 0, width, height).data;
    const hatched = getComputedStyle(canvas).backgroundImage.includes('repeating-linear-gradient');
    const broken = getComputedStyle(document.documentElement).getPropertyValue('--broken').trim();
    return Array.from({ length: height }, (_, r) => Array.from({ length: width }, (_, c) => { const at = 4 * (r * width + c);
      return d[at + 3] === 0 ? (hatched ? 'masked' : 'nothing') : `${d[at]} ${d[at + 1]} ${d[at + 2]}` === broken ? 'NaN' : ''; })); }"""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cells(shown: Shown, where: str, n: int = 0) -> list[list[str]]:
    return shown.tab.locator(where).nth(n).evaluate(CELLS)


def expected(mask: torch.Tensor, broken: torch.Tensor | None = None) -> list[list[str]]:
    """What a picture of a mask (i, j) says."""
    names = [["" if seen else "masked" for seen in row] for row in mask.tolist()]
    for i, j in [] if broken is None else (broken & mask).nonzero().tolist():
        names[i][j] = "NaN"
    return names


CAUSAL = torch.ones(6, 6).tril().bool()


@pytest.fixture
def broken() -> regard.Weights:
    """Three heads under a causal mask; the first has rows that are not numbers, and the fifth word sees nothing."""
    x, mask = randn(3, 6, 8), CAUSAL.clone()
    x[0, 2, 0] = torch.nan
    mask[4] = False
    return regard.weights(x, mask=mask).label(WORDS)


def test_thumbnails_and_the_closer_look_are_hatched(show: Any, broken: regard.Weights) -> None:
    shown = show(broken.show(5, head=1)).view("overview")
    mask = CAUSAL.clone()
    mask[4] = False
    nan = broken[0].dense().isnan()
    assert nan.any()
    assert cells(shown, ".headcell canvas", 0) == expected(mask, nan)
    assert cells(shown, ".headcell canvas", 1) == expected(mask)
    shown.tab.hover('[data-key="head-0-1"]')
    assert cells(shown, ".peek canvas") == expected(mask)
    shown.tab.click('[data-key="head-0-2"]', modifiers=["Shift"])
    assert cells(shown, ".versus figure canvas") == expected(mask), "what both forbid has no difference"
    assert "masked" in shown.text(".columns .legend")
    assert "not a number" in shown.text(".columns .legend")
    shown.choose("cells", "row")
    strip = cells(shown, ".headcell canvas", 1)
    shown.choose("word", 2)
    strip = cells(shown, ".headcell canvas", 1)
    assert [column[0] for column in zip(*strip, strict=True)] == ["", "", "", "masked", "masked", "masked"]


def test_a_page_without_a_mask_speaks_of_none(show: Any) -> None:
    shown = show(regard.weights(randn(2, 6, 8)).label(WORDS).show(5))
    for view in ("overview", "square", "play"):
        shown.view(view)
        shown.tab.wait_for_selector(".legend")
        assert "masked" not in shown.text(".legend")
        assert "not a number" not in shown.text(".legend")
        assert shown.tab.locator("canvas.hatched").count() == 0


def test_the_lab_hatches_what_its_own_rules_forbid(show: Any) -> None:
    shown = show(regard.weights(randn(1, 6, 8)).label(WORDS).show(5)).view("play")
    for key, mask in (("causal", CAUSAL), ("window", CAUSAL & torch.ones(6, 6).triu(-2).bool())):
        shown.tab.check(f'[data-key="{key}"]')
        shown.finish_lab()
        assert cells(shown, ".plays .map > figure > canvas") == expected(mask)


def test_the_story_hatches_what_heads_may_not_see(show: Any, broken: regard.Weights) -> None:
    shown = show(broken.show(2, head=1), reduced_motion="reduce").view("story")
    shown.tab.locator(".chips .chip", has_text="Many heads").click()
    assert shown.tab.locator(".scene g .storyhatch").count() == 3 * 3, "three words after the lit one, of three heads"
    shown.tab.locator(".chips .chip", has_text="Mask").click()
    numbers = shown.tab.locator(".scene > g > text, .scene g g > text").all_text_contents()
    assert len(numbers) == 3, f"a word that is hatched has no weight, not one of 0.00: {numbers}"
    shown.tab.locator(".chips .chip", has_text="Long").click()
    assert shown.tab.locator(".scene .storyhatch").count() == 1 + 15 + 5, (
        "the ground, the future, and the row of nothing"
    )


def test_the_walk_hatches_weights_under_the_mask(show: Any) -> None:
    shown = show(regard.weights(randn(1, 6, 8), mask=regard.causal()).label(WORDS).show(2)).view("walk")
    assert [cell.get_attribute("class") for cell in shown.tab.locator(".steps .w").all()] == ["w"] * 3 + [
        "w masked"
    ] * 3


@pytest.mark.parametrize("name", ["by place", "in tiles", "NaN"])
def test_compare_tells_masked_words_from_words_that_a_text_lacks(
    show: Any, broken: regard.Weights, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "in tiles":
        monkeypatch.setattr(comparison, "LONG", 3)
    other = regard.weights(randn(3, 7, 8, seed=2), mask=regard.window(1, 1)).label([*WORDS[:5], "red", "mat"])
    changes = regard.compare(broken, other)
    shown = show(changes.show())
    head = 0 if name == "NaN" else 1
    n = [pair.heads[0] for pair in changes.pairs].index(head)
    shown.tab.evaluate(f"location.hash = '#v=compare&w=0&p={n}'")
    shown.tab.wait_for_function(f"async () => (await regard).state.pair === {n}")
    both = [0, 1, 2, 3, 4, 6]  # the places of the words of the first text
    a, b = CAUSAL.clone(), torch.ones(7, 7).triu(-1).tril(1).bool()
    a[4] = False
    first, second, change = (cells(shown, ".three canvas", n) for n in range(3))
    assert [[first[i][j] for j in both] for i in both] == expected(a, broken[head].dense().isnan())
    assert second == expected(b)
    assert all(first[i][5] == first[5][i] == "" for i in range(7)), "lacked"
    for i, p in enumerate(both):
        for j, q in enumerate(both):
            assert (change[p][q] == "masked") == bool(~a[i, j] & ~b[p, q])
    if name == "NaN":
        rows = shown.opened_table()
        assert "not a number" in shown.text(".triple .keys")
        shown.click("word-2")
        assert shown.text(".bars").count("NaN") >= 1
        assert [text for row in rows if row[0] != "red" for text in row].count("no such word") == 0


@pytest.mark.parametrize("held", [True, False])
def test_long_heads_are_hatched_where_a_page_has_no_intervals(
    show: Any, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """A dense mask with holes: the page knows it by tiles alone."""
    mask = torch.ones(320, 320).tril().bool()
    mask[160:, 80:160] = False
    mask[:, ::2] &= torch.rand(320, 160, generator=torch.Generator().manual_seed(0)) > 0.5
    if not held:
        monkeypatch.setattr(content, "LONG_BYTES", 250_000)
    x = randn(6, 320, 4)
    x[2, 0] = torch.nan
    shown = show(regard.weights(x, mask=mask).label([f"w{n}" for n in range(320)]).show(300))
    have = shown.ask("page.book.heads.map((h) => h.head)")
    assert (have == list(range(6))) == held
    if held:
        assert shown.tab.evaluate("document.querySelector('.map-canvas').classList.contains('hatched')")
        big = cells(shown, ".map-canvas")
        size = len(big)
        assert big[int(0.75 * size)][int(0.4 * size)] == big[size // 4][3 * size // 4] == "masked"
        assert big[3 * size // 4][size // 8] == ""
        assert "masked" in shown.text(".map-below .legend")
    shown.view("overview")
    spans = [slice(a, b) for a, b in itertools.pairwise(n * 320 // 48 for n in range(49))]  # of a thumbnail
    seen = torch.tensor([[bool(mask[down, across].any()) for across in spans] for down in spans])
    for n in range(6):
        got = cells(shown, ".headcell canvas", n)
        hatched = torch.tensor([[cell == "masked" for cell in row] for row in got])
        if n in have:  # pooled twice: a cell that the mask forbids in part may be lost to its neighbours
            assert hatched[40, 20]
            assert hatched[5, 40]
            assert not (hatched & seen).any()
        else:
            assert torch.equal(hatched, ~seen)


@pytest.mark.parametrize(
    "mask",
    [
        regard.causal(),
        regard.window(3, 0),
        regard.causal() & regard.documents(torch.arange(30) // 11),
        torch.rand(30, 20, generator=torch.Generator().manual_seed(1)) > 0.8,
        torch.rand(2, 30, 20, generator=torch.Generator().manual_seed(1)) > 0.8,
    ],
)
def test_tiles_are_forbidden_where_every_weight_is(mask: Any) -> None:
    keys = 30 if isinstance(mask, regard.Mask) else 20
    W = regard.weights(randn(2, 30, 4), randn(2, keys, 4, seed=1), mask=mask)
    got = forbidden_tiles(W, 7, 6)
    seen = W.dense() > 0  # no weight of these scores is rounded to 0
    for r in range(7):
        for c in range(6):
            part = seen[:, r * 30 // 7 : (r + 1) * 30 // 7, c * keys // 6 : (c + 1) * keys // 6]
            assert got.expand(2, -1, -1)[:, r, c].tolist() == (~part.flatten(1).any(1)).tolist()
    assert forbidden_tiles(regard.weights(randn(2, 30, 4)), 7, 6) is None


# Pictures without a browser.


def strokes(text: str) -> tuple[int, int]:
    """How many cells of an SVG are hatched, and how many are crossed."""
    paths = re.findall(r'<path d="([^"]*)" fill="none" stroke="#5d646c"', text)
    crossed = [path for path in paths if "m0 " in path]
    return sum(path.count("M") for path in paths if "m0 " not in path), sum(path.count("M") for path in crossed)


def test_saved_pictures_hatch_and_cross(broken: regard.Weights) -> None:
    mask, nan = CAUSAL.clone(), int(broken[0].dense().isnan().sum())
    mask[4] = False
    text = svg(broken, head=0)
    assert strokes(text) == (int((~mask).sum()), nan)
    assert "hatched: the mask hides it; crossed: not a number" in text
    text = svg(broken, head=1)
    assert strokes(text) == (int((~mask).sum()), 0)
    assert "crossed" not in text


def test_saved_pictures_of_long_texts_hatch_tiles() -> None:
    W = regard.weights(randn(1, 200, 4), mask=regard.causal())
    hidden = int(forbidden_tiles(W, 48, 48).sum())
    assert hidden > 1000
    assert strokes(svg(W)) == (hidden, 0)


def test_saved_comparisons_hatch_and_cross(broken: regard.Weights) -> None:
    plain = regard.weights(randn(3, 6, 8, seed=2)).label(WORDS)
    mask = CAUSAL.clone()
    mask[4] = False
    changes = regard.compare(broken[1:], plain[1:], names=("masked", "plain"))
    assert strokes(svg(changes)) == (int((~mask).sum()), 0), "the first alone: what one allows can change"
    assert "hatched: masked" in svg(changes)
    assert "masked in masked" in svg(changes, word="a"), "the word that sees nothing"
    nan = regard.compare(broken[:1], plain[:1])
    assert strokes(svg(nan))[1] == 2 * int(broken[0].dense().isnan().sum()), "and their difference"
    assert "no such word" not in svg(nan, word="sat")


def test_a_notebook_shows_masked_cells_in_grey(broken: regard.Weights) -> None:
    page = broken._repr_html_()
    assert "grey is masked, purple is not a number; show() opens the page" in page
    assert "grey" not in regard.weights(randn(2, 6, 8))._repr_html_()
