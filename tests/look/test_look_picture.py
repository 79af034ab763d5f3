"""The picture for a paper: well-formed vectors whose numbers are true, whatever the tokens are."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
import torch

import regard
from regard.look import token_text
from regard.look.svg import svg
from regard.look.svg_elements import HUES, LETTERS, fitted_width, inches, tint_fill
from support.look_subjects import HISTORY, TOKENS, WIDE, fake_recording
from support.page_probe import HOSTILE, translation

NAME = "{http://www.w3.org/2000/svg}"


def read(picture):
    """The picture parsed back; only shapes and text may be in it."""
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{NAME}svg"
    kinds = {element.tag.removeprefix(NAME) for element in root.iter()}
    assert kinds <= {"svg", "title", "desc", "rect", "path", "text"}
    for element in root.iter():
        assert not [name for name in element.attrib if name.startswith("on") or "href" in name or name == "style"]
    return root


def texts(root):
    return [element.text for element in root.iter(f"{NAME}text")]


def test_every_word_is_text_and_every_strong_weight_is_written():
    seen = fake_recording()
    root = read(svg(seen, word="it", layer=1, head=2))
    for token in TOKENS:
        assert token in texts(root)
    for j, weight in enumerate(seen[1, 2].row("it").tolist()):
        if weight >= 0.1 and j != 10:
            assert f"{weight:.2f}" in texts(root)


def test_the_square_is_the_matrix():
    seen = fake_recording()
    root = read(svg(seen, word="it", layer=1, head=2))
    w = seen[1, 2].dense()
    cells = [e for e in root.iter(f"{NAME}rect") if e.get("width") == e.get("height") and not e.get("stroke")][1:]
    ground, *cells = [e for e in cells if float(e.get("width")) > 10]
    assert len(cells) == int((w**0.6 >= 0.01).sum())
    assert f'fill="{ground.get("fill")}"' == tint_fill(0.0), "what is next to 0 has the colour of 0, not of the paper"
    assert float(ground.get("width")) == pytest.approx(15 * float(cells[0].get("width")), abs=0.2)
    lit = next(e for e in root.iter(f"{NAME}rect") if e.get("stroke-width") == "1.5")
    order = list(root.iter(f"{NAME}rect"))
    assert order.index(lit) > max(map(order.index, cells)), "no cell covers a side of the lit row's frame"
    frame = next(e for e in root.iter(f"{NAME}rect") if e.get("stroke-width") == "0.75")
    left, top, side = float(frame.get("x")), float(frame.get("y")), float(cells[0].get("width"))
    for cell in cells:  # each shade stands at its own row and column
        i, j = round((float(cell.get("y")) - top) / side), round((float(cell.get("x")) - left) / side)
        assert f'fill="{cell.get("fill")}"' == tint_fill(float(w[i, j]) ** 0.6), "one scale, 0 to 1, as in the page"


def test_two_heads_are_told_apart_without_colour():
    root = read(svg(fake_recording(), word="it"))
    legend = [text for text in texts(root) if text.startswith("layer") and "→" in text]
    assert [text.rpartition(", ")[2] for text in legend] == ["above", "below"]
    assert len({path.get("stroke") for path in root.iter(f"{NAME}path")}) == 2


def test_a_word_that_occurs_twice_is_named_by_its_number():
    W = regard.Weights.from_dense(torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.8, 0.1, 0.1]]))
    root = read(svg(W.label(["the", "cat", "the"]), word="the:2"))
    assert "“the:2” → “the:1” 0.800" in texts(root)
    labels = [text for text in texts(root) if text in ("the:1", "the:2")]
    assert labels == ["the:1", "the:2"] * 2, "rows and columns of the square"
    assert "the:2 → the:1 0.80" in root.find(f"{NAME}desc").text


def test_a_number_stands_outside_of_its_arc():
    words = ["the", "dog", "saw", "it", "there"]
    w = torch.eye(5)
    w[3] = torch.tensor([0.1, 0.5, 0.0, 0.0, 0.4])
    root = read(svg(regard.Weights.from_dense(w).label(words), word="it", part="lines"))
    written = {e.text: (float(e.get("x")), e.get("text-anchor", "start")) for e in root.iter(f"{NAME}text")}
    ends = [float(re.findall(r"[-\d.]+", e.get("d"))[6]) for e in root.iter(f"{NAME}path")]  # arcs, the weak ones first
    assert written["0.50"][1] == "end"
    assert written["0.50"][0] < ends[2]
    assert written["0.40"][1] == "start"
    assert written["0.40"][0] > ends[1]


def test_those_who_cannot_see_are_told():
    root = read(svg(fake_recording(), word="it", title="A & B <i>"))
    assert root.get("role") == "img"
    assert root.get("aria-label") == root.find(f"{NAME}title").text == "A & B <i>"
    described = root.find(f"{NAME}desc").text
    assert "“it” →" in described
    assert described.count("→") >= len(TOKENS)


def test_what_is_hidden_or_merged_is_marked():
    root = read(svg(fake_recording(), word="didn't", hide_special=True, merge=True))
    assert "didn't" in texts(root)
    assert "[CLS]" not in texts(root)
    assert any("special tokens hidden; they had 0." in text for text in texts(root))


def test_without_a_word_the_strongest_head_is_shown():
    root = read(svg(fake_recording()))
    assert not list(root.iter(f"{NAME}path"))
    assert any(re.fullmatch(r"layer \d, head \d: rows look at columns", text) for text in texts(root))
    assert "layer 1, head 2: rows look at columns" in texts(read(svg(fake_recording(), layer=1, head=2)))


@pytest.mark.parametrize("word", [None, 0])
def test_weights_that_are_not_numbers_are_shown_as_such(word):
    for x in (torch.tensor([[math.nan, 1.0], [1.0, 1.0]]), torch.full((60, 4), 1e20)):
        text = svg(regard.weights(x), word=word)
        ElementTree.fromstring(text)
        assert "are not numbers (NaN)" in text
        assert not re.search(r'="[^"]*nan', text)


def test_of_a_batch_it_is_said_which_sequence_is_shown():
    assert "Sequence 1, counted from 0, of a batch of 2." in svg(regard.weights(torch.randn(2, 3, 4, 8)), item=1)


def test_a_training_that_diverged_is_shown():
    text = svg(
        [
            (0, {"a/entropy_share/0": 0.5, "b/entropy_share/0": 0.4}),
            (1, {"a/entropy_share/0": math.nan, "b/entropy_share/0": 0.3}),
        ]
    )
    assert "a 0 ends at NaN" in text
    assert not re.search(r'="[^"]*nan', text)


def test_a_long_input_becomes_tiles():
    q = torch.randn(1, 20_000, 8)
    picture = svg(regard.weights(q, mask=regard.causal()), word=15_000)
    assert len(picture) < 400_000
    assert "0 to 1, the largest weight in a tile" in picture
    assert "15000" in texts(read(picture))


def test_a_single_weight_of_one_is_the_darkest_tile_of_a_long_input():
    q, k = torch.zeros(1, 2000, 4), torch.randn(1, 2000, 4, generator=torch.Generator().manual_seed(0))
    q[0, 1800], k[0, 300] = torch.tensor([60.0, 0, 0, 0]), torch.tensor([60.0, 0, 0, 0])
    root = read(svg(regard.weights(q, k), word=1800))
    shades = [rect.get("fill") for rect in root.iter(f"{NAME}rect")]
    assert sum(f'fill="{fill}"' == tint_fill(1.0) for fill in shades) == 2, "the tile, and the end of the legend"


def test_cells_that_the_mask_hides_are_hatched():
    weights = regard.weights(torch.randn(1, 5, 4), mask=regard.causal()).label(list("abcde"))
    (hatched,) = [path for path in read(svg(weights)).iter(f"{NAME}path") if path.get("d").count("M") == 10]
    assert hatched.get("stroke-width") == "0.5"
    assert "0 to 1, weight; hatched: the mask hides it" in texts(read(svg(weights)))
    assert "hatched" not in svg(regard.weights(torch.randn(1, 5, 4)))


def test_two_sentences_are_shown_across():
    seen = fake_recording(["das", "Tier", "war", "müde"], source=["the", "animal", "was", "tired", "</s>"])
    root = read(svg(seen, word="müde"))
    assert {"müde", "animal", "</s>", "das"} <= set(texts(root))
    assert [text.rpartition(", ")[2] for text in texts(root) if "→" in text] == ["solid", "dashed"]
    assert {bool(path.get("stroke-dasharray")) for path in root.iter(f"{NAME}path")} == {False, True}


def test_a_training_history_is_a_line_a_head():
    root = read(svg(HISTORY))
    lines = list(root.iter(f"{NAME}path"))
    assert len(lines) == 2 * 4  # two measures of four heads
    assert sum(line.get("stroke") == HUES[0] for line in lines) == 2
    assert "entropy, a share of the most it could be: 4 heads; block.0 1 ends at 0.00865" in texts(root)
    assert "step 95" in texts(root)
    read(svg([(0, {"</script>/entropy_share/0": 0.5})], title="one step"))


@pytest.mark.parametrize("start", range(0, len(HOSTILE), 20))
def test_no_token_is_more_than_text(start):
    tokens = HOSTILE[start : start + 20]
    for merge in (False, True):
        root = read(svg(fake_recording(tokens), word=0, merge=merge, title=tokens[1]))
        shown = texts(root)
        if not merge:
            assert all(token_text.clip(token_text.printable(token), 24).replace("\uffff", "\ufffd").replace("\ufffe", "\ufffd") in shown for token in tokens)  # fmt: skip


def test_letters_are_not_stretched(browser, tmp_path):
    """A word fills its box by the space between its letters, whatever font the reader has."""
    path = tmp_path / "it.svg"
    path.write_text(svg(fake_recording(), word="it", part="lines"))
    tab = browser.new_page()
    tab.goto(path.as_uri())
    stretched = "[...document.querySelectorAll('text[textLength]')].map((x) => x.getAttribute('lengthAdjust'))"
    assert set(tab.evaluate(stretched)) == {"spacing"}
    widths = tab.evaluate(
        """[...document.querySelectorAll('text[textLength]')].map((x) => { const set = x.getComputedTextLength();
           x.removeAttribute('textLength'); return [set, x.getComputedTextLength(), x.textContent]; })"""
    )
    for fitted, natural, word in widths:
        assert abs(fitted - natural) <= 0.3 * natural, word
    tab.close()


def test_words_are_as_wide_as_helvetica_sets_them():
    """By a rule of thumb some were a sixth too wide, with gaps between their letters, beside others without."""
    by_hand = {
        "cross": 500 + 333 + 556 + 500 + 500,
        "tired": 278 + 222 + 333 + 556 + 556,
        "[CLS]": 278 + 722 + 556 + 667 + 278,
    }
    for word, thousandths in by_hand.items():
        assert fitted_width(word) == pytest.approx(LETTERS * thousandths / 1000), word
    boxes = {
        e.text: float(e.get("textLength"))
        for e in read(svg(fake_recording(), word="it", part="lines")).iter(f"{NAME}text")
        if e.get("textLength")
    }
    assert boxes["cross"] == pytest.approx(fitted_width("cross"), abs=0.06)


def test_a_browser_draws_it_inside_its_frame_and_runs_nothing(browser, tmp_path):
    requests = []
    for n, tokens in enumerate((TOKENS, WIDE, HOSTILE[:30])):
        picture = svg(fake_recording(tokens), word=1, title=tokens[2], hide_special=n == 1)
        (tmp_path / f"{n}.svg").write_text(picture, encoding="utf-8")
        tab = browser.new_page()
        tab.on("dialog", lambda dialog: requests.append(dialog.message))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(f"file://{tmp_path}/{n}.svg")
        assert tab.evaluate("window.bad === undefined")
        frame, parts = tab.evaluate(
            "() => { const at = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] };"
            " return [at(document.documentElement), [...document.querySelectorAll('text, path')].map(at)] }"
        )
        assert len(parts) > len(tokens)
        for left, top, right, bottom in parts:
            assert left >= frame[0] - 1
            assert top >= frame[1] - 1
            assert right <= frame[2] + 1
            assert bottom <= frame[3] + 1
    assert [url for url in requests if not url.startswith("file:")] == []


@pytest.mark.parametrize("width", [None, "2in"])
@pytest.mark.parametrize("word", ["das", "Haus", "klein"])
def test_lines_between_two_sentences_end_above_the_numbers(word, width):
    root = read(svg(translation(), word=word, part="lines", width=width))
    numbers = [x for x in root.iter(f"{NAME}text") if re.fullmatch(r"0\.\d\d", x.text) and x.get("fill") == HUES[0]]
    ends = [tuple(map(float, re.findall(r"[\d.]+", x.get("d"))[-2:])) for x in root.iter(f"{NAME}path")]
    assert len(numbers) >= 3
    assert ends
    for text in numbers:
        x, baseline = float(text.get("x")), float(text.get("y"))
        assert text.get("text-anchor") == "middle"
        for at, end in ends:
            assert not (abs(at - x) < 12 and baseline - 7 < end < baseline + 4), "a line ends in the number"
            assert end < baseline - 7 or end > baseline + 13


def test_words_from_right_to_left_do_not_turn_the_legend():
    """Without an isolate the weight would stand between the quotation marks of the word before it."""
    picture = svg(regard.weights(torch.eye(3)).label(["the", "שלום", "cat"]), word="שלום", part="lines")
    (legend,) = [text for text in texts(read(picture)) if "→" in text]
    assert legend.count("“\N{FIRST STRONG ISOLATE}שלום\N{POP DIRECTIONAL ISOLATE}”") >= 1


def place_of(root, text):
    """Where the middle of a word of the sentence stands."""
    return next(float(one.get("x")) for one in root.iter(f"{NAME}text") if one.text == text and one.get("text-anchor") == "middle")  # fmt: skip


def test_a_sentence_from_right_to_left_runs_from_the_right():
    hebrew = ["[CLS]", "השועל", "החום", "המהיר", "קופץ", "מעל", "הכלב", "העצלן", "[SEP]"]
    W = regard.weights(torch.randn(2, 9, 4)).label(hebrew)
    root = read(svg(W, word="קופץ", part="lines"))
    assert [place_of(root, word) for word in hebrew] == sorted((place_of(root, word) for word in hebrew), reverse=True)
    two_lines = read(svg(W, word="קופץ", part="lines", width="2in"))
    places = [place_of(two_lines, word) for word in hebrew]
    assert places[:4] == sorted(places[:4], reverse=True)
    assert places[4] > places[3], "the second line begins at the right as well"
    arabic = ["القطة", "جلست", "على", "الحصيرة"]
    joined = read(svg(regard.weights(torch.randn(1, 4, 4)).label(arabic), word=1, part="lines"))
    assert not [one for one in joined.iter(f"{NAME}text") if one.get("textLength")], "letters that are joined stay so"


@pytest.mark.parametrize("width", ["3.3in", "6.9in"])
def test_a_comparison_has_names_at_the_width_of_a_column(width):
    words = [*TOKENS, "and", "slow"]
    matrices = (regard.weights(torch.randn(2, len(words), 4)).label(words) for _ in range(2))
    changes = regard.compare(*matrices, names=("before the training", "after the training"))
    root = read(svg(changes, width=width))
    assert sum(text == "animal" for text in texts(root)) >= 3
    across = float(root.get("viewBox").split()[2])
    assert across <= inches(width) * 72 / 7.5 * 13 + 1, "nothing makes it wider, and its letters smaller"
    boxes = [one for one in root.iter(f"{NAME}rect") if one.get("stroke-width") == "0.75"]
    assert len(boxes) == 3
    assert len({one.get("y") for one in boxes}) == (2 if width == "3.3in" else 1), "two in a line, or three"


def test_a_long_legend_is_broken_and_makes_no_letter_smaller():
    W = regard.weights(torch.randn(2, 3, 4)).label(["W" * 40, "M" * 40, "end"])
    root = read(svg(W, word=0, target=1, part="lines", width="3.3in"))
    across = float(root.get("viewBox").split()[2])
    assert across <= 3.3 * 72 / 7.5 * 13 + 1
