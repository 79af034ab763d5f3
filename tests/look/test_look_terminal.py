"""What a terminal shows: numbers that are true, lines that fit, tokens that can do no harm."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.look import layers, spotlight, text_layout, token_text
from regard.look.terminal import draw
from regard.look.terminal_walk import draw_walk
from regard.recorder.calls import SavedCall
from regard.recorder.recording import Layer, Pass, Recording
from support.look_subjects import HISTORY, TOKENS, WIDE, attention, fake_recording

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"
# Snapshots.

X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
PICTURES = {
    "word": lambda **how: draw(fake_recording(), word="it", **how),
    "one head": lambda **how: draw(fake_recording(), word="the:2", layer=1, head=2, **how),
    "target": lambda **how: draw(fake_recording(), word="it", target="animal", **how),
    "hidden and merged": lambda **how: draw(fake_recording(), word="it", hide_special=True, merge=True, **how),
    "top": lambda **how: draw(fake_recording(), word="it", top=3, **how),
    "overview": lambda **how: draw(fake_recording(), **how),
    "cross": lambda **how: draw(fake_recording(["das", "Tier", "war", "müde", "</s>"], source=["the", "animal", "was", "tired", "</s>"]), word="müde", **how),
    "wide letters": lambda **how: draw(fake_recording(WIDE), word="שלום", **how),
    "weights": lambda **how: draw(regard.weights(X, score="dot").label(["the", "cat", "sat"]), word="cat", **how),
    "training": lambda **how: draw(HISTORY, **how),
    "walk": lambda **how: draw_walk(regard.walk(regard.weights(X, mask=regard.causal()).label(["the", "cat", "sat"]), X, "cat"), **how),
}  # fmt: skip


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_the_one_that_was_looked_at(name, width, colour):
    """REGARD_SNAPSHOTS=1 writes them anew: look at what changed before it is committed."""
    picture = PICTURES[name](width=width, colour=colour)
    snapshot = SNAPSHOTS / f"{name.replace(' ', '-')}.{width}{'.colour' if colour else ''}.txt"
    text = picture.replace("\x1b", "␛") + "\n"  # so that the file can be read and compared anywhere
    if os.environ.get("REGARD_SNAPSHOTS"):
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 57, 80, 120])
@pytest.mark.parametrize("name", PICTURES)
def test_no_line_is_wider_than_the_terminal(name, width):
    for line in PICTURES[name](width=width).splitlines():
        assert token_text.cell_width(line) <= width, line
        assert line == line.rstrip()


@pytest.mark.parametrize("name", PICTURES)
def test_colour_adds_nothing_but_colour(name):
    plain, coloured = (PICTURES[name](width=80, colour=how) for how in (False, True))
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


def test_colours_come_down_to_what_the_terminal_can_show():
    assert "\x1b[38;2;" in draw(fake_recording(), word="it", colour=True)
    assert re.search(r"\x1b\[[\d;]*48;5;\d", draw(fake_recording(), word="it", colour="256"))
    assert "38;" not in draw(fake_recording(), word="it", colour="standard")


# What is shown is true.


def test_the_numbers_shown_are_the_weights():
    seen = fake_recording()
    shown = draw(seen, word="it", layer=1, head=2)
    names = token_text.numbered_texts(TOKENS)
    for token, weight in zip(names, seen[1, 2].row("it").tolist(), strict=True):
        assert re.search(rf"^{re.escape(token)} .*{weight:.3f}$", shown, re.M)


def test_shading_and_bars_grow_with_the_weight():
    assert text_layout.bar(0.0, 8) == ""
    assert text_layout.bar(1.0, 8) == "█" * 8
    lengths = [len(text_layout.bar(x / 50, 10)) for x in range(51)]
    assert lengths == sorted(lengths)
    # Black letters must be readable on every shade: contrast at least 4.5.
    for hue in range(2):
        for t in range(11):
            red, green, blue = (int(text_layout.blend(t / 10, hue)[n : n + 2], 16) / 255 for n in (1, 3, 5))
            light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
            assert (0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] + 0.05) / 0.05 >= 4.5


def test_heads_are_ranked_by_what_they_do_beyond_their_habit():
    """A head that always looks at the word before tells nothing about "it"; one that ties it to "animal" does."""
    t = len(TOKENS)
    before = torch.eye(t).roll(-1, 1) * 0.99 + 0.01 / t
    before = before / before.sum(-1, keepdim=True)
    ties = torch.full((t, t), 1 / t)
    ties[10] = 0.02
    ties[10, 2] = 1 - 0.02 * (t - 1)
    sink = torch.full((t, t), 0.01)
    sink[:, 6] = 1 - 0.01 * (t - 1)
    lit = spotlight.spotlight(regard.Weights.from_dense(torch.stack([before, sink, ties])).label(TOKENS), "it")
    assert (lit.ranking[0].head, lit.cols.labels[lit.ranking[0].key]) == (2, "animal")
    assert lit.ranking[0].weight == pytest.approx(0.72)
    assert lit.ranking[0].beyond > 10 * max(one.beyond for one in lit.ranking[1:])


def test_a_long_text_is_ranked_by_a_sample_of_its_rows(monkeypatch):
    q, k = torch.randn(4, 300, 8), torch.randn(4, 300, 8)
    weights = regard.weights(q * 1.5, k, mask=regard.causal())
    unsampled = spotlight.spotlight(weights, 250)
    monkeypatch.setattr(layers, "DENSE_CELLS", 0)
    monkeypatch.setattr(spotlight, "SAMPLE_ROWS", 300)
    sampled = spotlight.spotlight(weights, 250)
    assert [one.key for one in sampled.ranking[:2]] == [one.key for one in unsampled.ranking[:2]]
    for a, b in zip(
        sorted(unsampled.ranking, key=lambda x: x.head), sorted(sampled.ranking, key=lambda x: x.head), strict=True
    ):
        assert a.weight == pytest.approx(b.weight, abs=1e-6)
    assert spotlight.overview(weights).metrics == {}


def test_a_long_input_is_never_written_out():
    q = torch.randn(2, 20_000, 8)
    weights = regard.weights(q, mask=regard.causal())
    text = draw(weights, word=12_345, width=80)
    assert len(text.splitlines()) < 60
    assert ":12345" in text
    assert "19,9" in text  # so many more words


def test_a_batch_shows_the_sequence_that_was_asked_for():
    x = torch.randn(2, 1, 3, 5, 4)
    for item in (0, 1):
        alone = f"Sequence {item}, counted from 0, of a batch of 2.\n\n{draw(regard.weights(x[item, 0]), word=0)}"
        assert draw(regard.weights(x), word=0, item=item) == alone
        assert str(regard.weights(x).show(0, item=item)) == alone
    with pytest.raises(IndexError, match="item must be one of 2 sequences, got 2"):
        draw(regard.weights(x), word=0, item=2)
    with pytest.raises(IndexError, match="item must be one of 2 sequences, got 2"):
        regard.weights(x).show(0, item=2).html()


def test_a_batch_of_a_recording_shows_the_sequence_that_was_asked_for():
    w = torch.stack([attention(n, 2, 5, 5) for n in range(3)])
    words_of = [[f"{letter}{n}" for n in range(5)] for letter in "abc"]
    saved = SavedCall(None, None, None, w, None, None, None)
    seen = Recording([Pass([Layer("x", 0, "self", saved, {}, tuple(w.shape), (words_of, words_of))])])
    assert spotlight.spotlight(seen, "b3", item=1, head=0).weights[0] == pytest.approx(w[1, 0, 3].tolist())
    assert "»a1«" in draw(seen, word="a1")
    assert "»c1«" in draw(seen, word="c1", item=2)


def test_with_a_cache_the_rows_are_the_end_of_the_sentence():
    q, k = torch.randn(2, 3, 4), torch.randn(2, 8, 4)
    weights = regard.weights(q, k, mask=regard.causal(), align="end").label(list("fgh"), list("abcdefgh"))
    lit = spotlight.spotlight(weights, "g")
    assert lit.weights[0] == pytest.approx(weights[lit.heads[0].head].row("g").tolist())
    assert not lit.same
    assert "»g« → a b c d e f g h" in draw(weights, word="g")


@pytest.mark.parametrize("count", [1, 2])
def test_the_shortest_sentences_can_be_looked_at(count):
    weights = regard.weights(torch.randn(2, count, 4)).label(list("ab")[:count])
    assert "»a«" in draw(weights, word="a")
    assert draw(weights)


NONE = float("nan")
NO_NUMBERS = {
    "nan": torch.tensor([[NONE, 1.0], [1.0, 1.0]]),
    "overflow": torch.full((3, 4), 1e20),
    "long": torch.cat([torch.full((1, 4), NONE), torch.randn(400, 4)]),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_weights_that_are_not_numbers_are_shown_as_such(name):
    x = NO_NUMBERS[name]
    weights = regard.weights(x)
    for colour in (False, True):
        for word in (None, 0):
            assert "are not numbers (NaN)" in draw(weights, word=word, colour=colour)
    rows = [line for line in draw(weights, word=0).splitlines() if line.startswith(("0 ", "1 "))]
    assert [row.split()[-1] for row in rows] == ["NaN", "NaN"]
    assert not set("".join(rows)) & set("▏▎▍▌▋▊▉█")
    steps = regard.walk(weights, x, 1)
    assert "are not numbers (NaN)" in str(steps)
    assert "their sum 1" not in str(steps)
    assert steps.y.isnan().all()
    assert (weights @ x)[1].isnan().all()


def test_a_row_that_is_not_a_number_leaves_the_others_as_they_are():
    x = torch.randn(6, 4)
    finite = spotlight.spotlight(regard.weights(x, mask=regard.causal()), 3)
    x[5] = NONE
    broken = regard.weights(x, mask=regard.causal())
    lit = spotlight.spotlight(broken, 3)
    assert lit.weights == finite.weights
    assert lit.notes == []
    assert {link.word for link in spotlight.overview(broken).ties} == set(range(5))
    assert spotlight.spotlight(broken, 5).notes != []


def test_a_training_that_diverged_is_shown():
    history = [
        (0, {"a/entropy_share/0": 0.5, "a/max_score/0": 2.0}),
        (1, {"a/entropy_share/0": NONE, "a/max_score/0": math.inf}),
    ]
    assert "0.5 → NaN" in draw(history)
    assert "2 → inf" in draw(history)


def test_of_a_batch_it_is_said_which_sequence_is_shown():
    weights = regard.weights(torch.randn(2, 3, 4, 8))
    for word in (None, 0):
        assert "Sequence 1, counted from 0, of a batch of 2." in draw(weights, word=word, item=1)
        assert "batch" not in draw(weights[0], word=word)


def test_words_that_are_written_the_same_are_told_apart():
    w = torch.eye(5).roll(1, -1) * 0.5 + 0.1
    out = draw(regard.Weights.from_dense(w).label(["the", "cat", "saw", "the", "dog"]))
    assert re.search(r"^  the:1 +→ cat", out, re.M)
    assert re.search(r"^  the:2 +→ dog", out, re.M)
    assert re.search(r"^  saw +→ the:2", out, re.M)


def test_headline_bars_heads_and_walk_number_a_word_that_recurs():
    W = regard.weights(torch.eye(5).roll(1, -1) + torch.eye(5)[[0, 1, 2, 0, 4]], score="dot")
    W = W.label(["the", "cat", "saw", "the", "dog"])
    out = draw(regard.Weights.from_dense(torch.eye(5).roll(1, -1)[None].repeat(2, 1, 1)).label(W.tokens[0]), word=2)
    assert "“saw” → “the:2” 1.000" in out
    assert re.search(r"^the:1 .*\nthe:2 ", re.sub(r"^(cat|saw) .*\n", "", out, flags=re.M), re.M), "bars"
    lit = draw(W, word="the:2")
    assert "“the:2” → “" in lit
    walked = str(regard.walk(W, torch.eye(5), "the:2"))
    assert "Attention for “the:2”, step by step" in walked
    assert len(re.findall(r"^the:[12] ", walked, re.M)) == 4, "scores, and weighted values"
    crossing = regard.walk(
        regard.weights(torch.eye(2), torch.eye(3, 2)).label(["a", "b"], ["x", "x", "y"]), torch.eye(3), "b"
    )
    assert "Attention for “b”" in str(crossing)


def test_nothing_is_told_to_be_nothing():
    for word in (None, 0):
        with pytest.raises(ValueError, match=r"nothing to see in weights of shape \(0, 0\)"):
            draw(regard.weights(torch.randn(0, 8)), word=word)


def test_what_cannot_be_looked_at_is_told():
    with pytest.raises(TypeError, match="a Recording, a Weights or a training history"):
        draw("text", word=0)
    with pytest.raises(ValueError, match="nothing was recorded"):
        draw(Recording(), word=0)
    only_numbers = Recording([Pass([Layer("a", 0, "self", None, {"entropy": torch.ones(1, 1, 3)}, (1, 1, 3, 3))])])
    with pytest.raises(ValueError, match="only statistics"):
        draw(only_numbers, word=0)


# Hidden, merged.


def test_hidden_tokens_leave_a_row_that_still_sums_to_one():
    seen = fake_recording()
    row = seen[1, 2].row("it")
    lit = spotlight.spotlight(seen, "it", layer=1, head=2, hide_special=True)
    assert lit.cols.labels == tuple(TOKENS[1:-1])
    assert sum(lit.weights[0]) == pytest.approx(1.0)
    assert lit.hidden[0] == pytest.approx(float(row[0] + row[-1]))
    torch.testing.assert_close(torch.tensor(lit.weights[0], dtype=torch.float64), row[1:-1] / row[1:-1].sum())
    assert f"special tokens are hidden: they had {lit.hidden[0]:.3f}" in draw(
        seen, word="it", layer=1, head=2, hide_special=True
    )


def test_merged_tokens_take_the_sum_and_look_with_the_mean():
    seen = fake_recording()
    w = seen[0, 1].dense()
    lit = spotlight.spotlight(seen, "didn't", layer=0, head=1, merge=True)
    assert lit.word == "didn't"
    expected = torch.cat([w[3:6].mean(0)[:3], w[3:6].mean(0)[3:6].sum(0, keepdim=True), w[3:6].mean(0)[6:]])
    torch.testing.assert_close(torch.tensor(lit.weights[0], dtype=torch.float64), expected)


def test_a_sink_takes_its_share_before_and_after_hiding():
    score = regard.ScaledDot().sink(torch.tensor([1.0]))
    weights = regard.weights(torch.randn(4, 3), score=score).label(["[CLS]", "a", "b", "[SEP]"])
    lit = spotlight.spotlight(weights, "a", hide_special=True)
    assert sum(lit.weights[0]) == pytest.approx(float(weights.row("a").sum()))
    assert "goes to no word" in draw(weights, word="a")


# Words.

MERGES = {
    "wordpiece": ("token ##ization is fun", ["tokenization", "is", "fun"]),
    "apostrophe": ("didn ' t we ' ll dog ' s the ' a '", ["didn't", "we'll", "dog's", "the", "'", "a", "'"]),
    "byte-level": ("The Ġanimal Ġdidn 't Ġtoken ization . Ġ3 . 5", ["The", "animal", "didn't", "tokenization", ".", "3", ".", "5"]),
    "sentencepiece": ("▁Das ▁Tier ▁über quer te ▁ ▁nicht .", ["Das", "Tier", "überquerte", "▁", "nicht", "."]),
    "bytes of one letter": ("Ġa <0xE2> <0x98> <0x83> Ġb", ["a☃", "b"]),
    "special": ("<s> ▁a b </s> ▁c", ["<s>", "ab", "</s>", "c"]),
    "nothing marked": ("a b c", ["a", "b", "c"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["我", "[UNK:爱]", "北", "京", "，", "and", "学", "习"], "我爱北京， and 学习"),
        (["the", "cat", "didn", "'", "t", "sit", ",", "it", "was", "(", "well", ")", "tired", "."], "the cat didn't sit, it was (well) tired."),
        (["▁Das", "▁Haus", "!"], "Das Haus!"),
        (["😀", "👩", "!"], "😀 👩!"),
        (list("to be, or"), "to be, or"),
        ([], ""),
    ],
)  # fmt: skip
def test_tokens_are_written_as_the_text_they_come_from(tokens: list[str], text: str) -> None:
    assert token_text.text_of(tokens) == text


@pytest.mark.parametrize("name", MERGES)
def test_tokens_make_words(name):
    text, expected = MERGES[name]
    tokens = text.split(" ")
    groups = token_text.word_slices(tokens)
    assert [token_text.join_tokens(tokens[group]) for group in groups] == expected
    assert [n for group in groups for n in range(group.start, group.stop)] == list(range(len(tokens)))


def test_letters_make_words_between_spaces():
    tokens = list("to be, or")
    assert [token_text.join_tokens(tokens[g]) for g in token_text.word_slices(tokens)] == [
        "to",
        " ",
        "be",
        ",",
        " ",
        "or",
    ]


@given(st.lists(st.sampled_from(["a", "##b", "Ġc", "d", "▁", "<0xE2>", "'", "t", "[CLS]", "", " ", "▁e"])))
def test_words_cover_all_tokens_once(tokens):
    groups = token_text.word_slices(tokens)
    assert [n for g in groups for n in range(g.start, g.stop)] == list(range(len(tokens)))
    assert all(g.stop > g.start for g in groups)


@pytest.mark.parametrize("token", ["[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>", "<|endoftext|>", "<bos>", "<end>", "<start_of_turn>"])  # fmt: skip
def test_special_tokens_are_known(token):
    assert token_text.is_special(token)


@pytest.mark.parametrize("token", ["cat", "[MASK]", "[UNK]", "</script>", "<b>", "[", "<0x0A>", "", "<|", "s"])
def test_words_are_not_special(token):
    assert not token_text.is_special(token)


def test_a_word_is_found_by_name_number_and_position():
    assert token_text.resolve(TOKENS, "it") == 10
    assert token_text.resolve(TOKENS, "The:1") == 1
    assert token_text.resolve(TOKENS, "the:2") == 7
    assert token_text.resolve(TOKENS, 3) == 3
    assert token_text.resolve(TOKENS, -1) == 14
    assert token_text.resolve(TOKENS, "3") == 3
    assert token_text.resolve([*TOKENS, "3"], "3") == 15
    assert token_text.resolve(["Ġcat", "sat"], "cat") == 0
    assert token_text.resolve(["a:1", "a"], "a:1") == 0
    for n in range(len(TOKENS)):
        assert token_text.resolve(TOKENS, token_text.name_of(TOKENS, n)) == n


LOST = [
    ("the", r"'the' occurs 2 times, at positions 1, 7; say which one: the:1 is the first, the:2 the last\."),
    ("the:3", r"'the' occurs 2 times, counted from 1; got the:3"),
    ("it:2", r"'it' occurs once"),
    ("it:0", r"counted from 1"),
    ("dog", r"'dog' is not among the words: the animal didn ' t cross street because it was too tired\."),
    ("dog:1", r"'dog' is not among the words"),
    ("didn't", r"\"didn't\" is 3 tokens here: didn ' t; name one, or merge them"),
    ("99", r"position must be 0 to 14, got 99"),
    (15, r"position must be 0 to 14, got 15"),
    ("\x1b[31m", "'␛.31m' is not among"),
]


@pytest.mark.parametrize(("word", "says"), LOST)
def test_a_word_that_is_not_there_is_told(word, says):
    with pytest.raises(LookupError, match=says):
        token_text.resolve(TOKENS, word)


def test_a_word_that_neither_sentence_has_is_looked_for_in_the_longer_one():
    model = regard.nn.Translator(9, dim=8, heads=1, layers=1).requires_grad_(False)
    with regard.record(model, tokens=(["zwei", "Hunde", "laufen"], ["<start>"])) as seen:
        model(torch.tensor([[3, 4, 5]]), torch.tensor([[1]]))
    with pytest.raises(LookupError, match="'dogs' is not among the words: zwei Hunde laufen"):
        spotlight.spotlight(seen, "dogs")


def test_a_long_list_of_words_is_cut():
    with pytest.raises(LookupError, match=r"… \(500 in all\)"):
        token_text.resolve([f"w{n}" for n in range(500)], "x")


# Odd tokens.

HOSTILE = [
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "a\0b", "\r\nforged", "\x08\x08", "\x7f", "\u2028", "\u2029",
    "\u202eevil", "\u2066x\u2069", "\u200b", "\u200d", "\ufeff", "\ud800", "a\udfffb", "\u0301", "", " ", "\t", "\x85", "\xad",
    "\U000e0001", "x" * 10_000, "日" * 5000, "\uffff", "\ue000", "[bold]", "[/]", "{0}", "%s", "</script>",
]  # fmt: skip


@pytest.mark.parametrize("token", HOSTILE, ids=[ascii(token[:12]) for token in HOSTILE])
def test_no_token_reaches_the_terminal_as_anything_but_letters(token):
    tokens = ["the", token, "cat"]
    for picture in (
        draw(fake_recording(tokens), word=1, width=80),
        draw(fake_recording(tokens), width=40),
        draw_walk(regard.walk(regard.weights(X).label(tokens), X, 1), width=40),
    ):
        picture.encode()  # no lone surrogate
        kinds = {unicodedata.category(letter) for letter in picture.replace("\n", "")}
        assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
        assert set(picture) & {letter for letter in picture if unicodedata.category(letter) == "Cf"} <= {
            "\u2068",
            "\u2069",
        }
        assert all(token_text.cell_width(line) <= 80 for line in picture.splitlines())


@given(st.text(max_size=30))
def test_any_text_is_shown_on_one_line_and_is_visible(text):
    safe = token_text.printable(text)
    assert safe.strip()
    assert len(safe.splitlines()) == 1
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in safe)
    safe.encode()


@given(st.text(max_size=40), st.integers(1, 20))
def test_a_cut_text_fits(text, width):
    assert token_text.cell_width(token_text.clip(text, width)) <= width


def test_cells_are_counted_as_terminals_do():
    counted = {
        "abc": 3,
        "日本": 4,
        "👩‍👩‍👧": 2,
        "❤️": 2,
        "❤": 1,
        "e\u0301": 1,
        "שלום": 4,
        "👍🏽": 2,
        "ก็": 1,
        "🇩🇪": 2,
        "": 0,
    }
    assert {text: token_text.cell_width(text) for text in counted} == counted
    rich = pytest.importorskip("rich.cells")
    for text in WIDE:
        assert token_text.cell_width(text) == rich.cell_len(text)
