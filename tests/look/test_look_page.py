"""What a page holds: the true numbers, packed small, and no text of the subject outside the packing."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import itertools
import math
import re
import zlib
from pathlib import Path

import pytest
import torch

import regard
from regard.look import View
from regard.look.page import content, payload
from regard.look.page import html as page_html
from regard.look.ranking import beyond_habit
from regard.recorder.head_metrics import BY
from support.page_probe import (
    HOSTILE,
    SENTENCE,
    SUBJECTS,
    Read,
    history,
    hostile_recording,
    minilm,
    refused,
    simple,
    translation,
)


def read(subject: object, **options: object) -> Read:
    return Read(View(subject, **options).html())


# The numbers are the numbers.


def test_every_weight_of_every_head_is_in_the_page_to_the_last_bit() -> None:
    seen, _ = minilm()
    held = read(seen)
    for n, layer in enumerate(held.header["layers"]):
        assert torch.equal(held.array(layer["w"]), seen.layers[n].weights[0].dense())
        assert layer["held"] == list(range(12))


def test_queries_keys_and_values_are_there_in_half_precision_and_give_the_same_weights() -> None:
    seen, _ = minilm()
    held = read(seen)
    for n, layer in enumerate(held.header["layers"]):
        q, k, v = (held.array(layer[name]).float() for name in "qkv")
        saved = seen.layers[n].saved
        for mine, theirs in ((q, saved.q), (k, saved.k), (v, saved.v)):
            assert (mine - theirs[0]).abs().max() <= 2**-11 * theirs.abs().max()
        again = regard.weights(q, k, score=regard.ScaledDot(layer["scale"])).dense()
        assert (again - held.array(layer["w"])).abs().max() < 5e-3


def test_small_subjects_keep_full_precision() -> None:
    x = torch.randn(6, 8)
    held = read(regard.weights(x, x + 1), values=2 * x)
    layer = held.header["layers"][0]
    assert torch.equal(held.array(layer["q"])[0], x)
    assert torch.equal(held.array(layer["k"])[0], x + 1)
    assert torch.equal(held.array(layer["v"])[0], 2 * x)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_kind_of_subject_has_a_page(name: str) -> None:
    subject, options = SUBJECTS[name]()
    held = read(subject, **options)
    if held.header["kind"] == "training":
        return
    assert all(torch.isfinite(held.array(layer["w"])).all() for layer in held.header["layers"] if "w" in layer)
    assert held.header["start"]["word"] >= 0
    assert any(layer["held"] for layer in held.header["layers"])


def test_a_batch_shows_one_sequence_without_its_padding() -> None:
    seen, options = SUBJECTS["a batch"]()
    held = read(seen, **options)
    assert held.header["sequences"][0]["tokens"] == ["e", "f", "g"]
    assert torch.equal(held.array(held.header["layers"][1]["w"]), seen.layers[1].sequence(1).dense())
    assert torch.equal(held.array(held.header["layers"][1]["v"]), seen.layers[1].values[1][:, :3])
    assert "batch of 2" in held.header["notes"][0]


def test_shared_keys_and_values_go_to_the_heads_that_look_at_them() -> None:
    q, k, v = torch.randn(4, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    held = read(regard.weights(q, k), values=v)
    layer = held.header["layers"][0]
    assert layer["per_key"] == layer["per_value"] == 2
    assert torch.equal(held.array(layer["k"]), k)
    assert torch.equal(held.array(layer["v"]), v)


def test_scores_that_are_no_plain_products_are_written_out_before_the_mask() -> None:
    q, bias = torch.randn(2, 5, 8), torch.randn(5, 5)
    score = regard.ScaledDot().bias(bias).softcap(3.0)
    held = read(regard.weights(q, score=score, mask=regard.causal()))
    layer = held.header["layers"][0]
    want = 3 * torch.tanh((q @ q.mT / 8**0.5 + bias) / 3)
    torch.testing.assert_close(held.array(layer["s"]), want)
    assert torch.equal(held.array(layer["visible"]).bool()[0], torch.ones(5, 5).tril().bool())


@pytest.mark.parametrize("by", payload.METRICS)
def test_the_overview_has_the_numbers_of_recording_heads(by: str) -> None:
    seen, _ = minilm()
    numbers = read(seen).header["metrics"][by]
    for layer, head, _, value in seen.heads(by):
        assert numbers[layer][head] == pytest.approx(value, rel=1e-4)
    assert set(BY) == {*payload.METRICS, "entropy_without_sink"}


def test_word_vectors_are_shown_with_all_their_products() -> None:
    seen, vectors = minilm()
    held = read(seen, word_vectors=vectors)
    mine = held.header["embedded"]
    x, q, k = vectors.x, vectors.q, vectors.k
    want = torch.stack([x @ x.T, q @ x.T, x @ k.T, q @ k.T])
    torch.testing.assert_close(held.array(mine["dots"]), want)
    for name in "xqkv":
        assert torch.equal(held.array(mine[name]), getattr(vectors, name)[:, : payload.COORDINATES])


def test_word_vectors_of_another_sentence_are_left_out() -> None:
    seen, vectors = minilm()
    short = simple(**{name: getattr(vectors, name)[:4] for name in "xqkv"})
    assert read(seen, word_vectors=short).header["embedded"] is None


def test_a_training_history_is_a_strip_for_each_number() -> None:
    held = read(history())
    for one in held.header["strips"]:
        table = held.array(one["values"])
        assert table.shape == (12, 20)
        for row, (layer, head) in enumerate(one["heads"]):
            want = [numbers[f"{layer}/{one['what']}/{head}"] for _, numbers in history()]
            torch.testing.assert_close(table[row], torch.tensor(want))


def test_a_history_may_come_as_watch_hands_it_out() -> None:
    either = read([(numbers, step) for step, numbers in history()]).header
    assert either == read(dict(history())).header == read(history()).header


# Which heads come first.


def test_a_head_that_looks_at_the_word_before_has_no_more_than_its_habit() -> None:
    w = torch.zeros(1, 6, 6)
    w[0, 0, 0] = 1
    w[0, range(1, 6), range(5)] = 1
    assert beyond_habit(w, [False] * 6, same=True).beyond[0, 2] <= 0


def test_a_head_that_rests_on_one_word_has_no_more_than_its_habit() -> None:
    w = torch.full((1, 6, 6), 0.02)
    w[..., 3] = 0.9
    assert float(beyond_habit(w, [False] * 6, same=True).beyond.max()) < 0.05


def test_a_head_that_ties_two_words_stands_out_and_special_tokens_do_not_count() -> None:
    w = torch.full((2, 6, 6), 1 / 6)
    w[0, 4] = torch.tensor([0.0, 0.0, 0.9, 0.1, 0.0, 0.0])
    w[1, 4] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    best = beyond_habit(w, [True, False, False, False, False, False], same=True)
    assert int(best.key[0, 4]) == 2
    assert float(best.beyond[0, 4]) > 0.7
    assert float(best.beyond[1, 4]) < float(best.beyond[0, 4])


def test_in_the_sentence_it_is_tied_to_animal_and_to_tired() -> None:
    seen, _ = minilm()
    tokens = seen.layers[0].weights.tokens[0]
    start = read(seen, word="it").header["start"]
    assert tokens[start["word"]] == "it"
    best = [
        (L, beyond_habit(L.weights[0].dense(), [t in ("[CLS]", "[SEP]") for t in tokens], True)) for L in seen.layers
    ]
    rows = sorted(((float(b.beyond[h, start["word"]]), L.index, h, tokens[int(b.key[h, start["word"]])]) for L, b in best for h in range(12)), reverse=True)  # fmt: skip
    assert (3, 1, "animal") in [row[1:] for row in rows[:4]]
    assert rows[0][1:] == (2, 1, "tired")


# How large it is.


def test_a_page_of_fifteen_tokens_and_all_heads_is_small() -> None:
    seen, vectors = minilm()
    size = len(View(seen, word="it", word_vectors=vectors).html().encode())
    assert size <= 450_000, f"{size:,} bytes"


def test_without_a_word_the_page_begins_with_a_word_and_not_with_a_special_token() -> None:
    seen, _ = minilm()
    held = read(seen).header
    assert held["start"]["word"] not in held["sequences"][0]["special"] == [0, 14]


def test_a_page_of_a_small_matrix_is_mostly_the_script() -> None:
    assert len(View(regard.weights(torch.randn(6, 8))).html()) < 100_000


def test_a_long_page_is_linear_in_the_length_and_never_asks_for_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard.Weights, "dense", lambda self: pytest.fail("the whole matrix was asked for"))
    sizes = {t: read(regard.weights(torch.randn(t, 8)), word=5).size for t in (4000, 8000)}
    assert sizes[8000] < 5_200_000
    held = read(regard.weights(torch.randn(8000, 8)), word=5)
    assert max(torch.Size(shape).numel() for _, *shape in held.header["arrays"]) < 8000 * 8000 / 100


def test_long_pages_hold_exact_rows_sums_and_links() -> None:
    W = regard.weights(3 * torch.randn(900, 16))
    held = read(W, word=77)
    long = held.header["layers"][0]["long"]
    assert 77 in long["rows"]
    for n, row in enumerate(long["rows"]):
        if "exact" in long:
            torch.testing.assert_close(held.array(long["exact"])[0, n], W.row(row))
    torch.testing.assert_close(held.array(long["pool"])[0], W.pool(*long["tiles"]))
    torch.testing.assert_close(held.array(long["entropy"])[0], W.entropy())
    torch.testing.assert_close(held.array(long["received"])[0], W.received())
    assert torch.equal(held.array(long["peak_at"])[0].long(), W.peak().indices)


def test_exact_rows_are_spread_over_the_whole_text() -> None:
    for t, heads in ((2048, 4), (440, 12)):
        held = read(regard.weights(torch.randn(heads, t, 8), mask=regard.causal()), word=t // 3)
        rows = held.header["layers"][0]["long"]["rows"]
        assert t // 3 in rows
        assert (rows[0], rows[-1]) == (0, t - 1)
        count = len(rows)
        assert max(b - a for a, b in itertools.pairwise(rows)) <= 1 + (t - 1) // max(1, count // 2 - 3)


def test_queries_and_keys_that_do_not_fit_are_left_out_before_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "VECTOR_BYTES", 2000)
    q, k, v = torch.randn(8, 10, 16), torch.randn(4, 10, 16), torch.randn(4, 10, 16)
    held = read(regard.weights(q, k), head=5, values=v)
    layer = held.header["layers"][0]
    assert layer["held"] == list(range(8))
    assert 5 in layer["with_vectors"]
    assert 1 <= len(layer["with_vectors"]) < 8
    assert torch.equal(held.array(layer["q"]).float(), q[layer["with_vectors"]])
    assert torch.equal(held.array(layer["k"]).float(), k[[h // 2 for h in layer["with_vectors"]]])
    assert "the weights of all 8 heads, and queries and keys of" in held.header["notes"][0]


def test_what_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "WEIGHT_BYTES", 40_000)  # six matrices
    held = read(regard.weights(torch.randn(16, 40, 8)), head=13)
    assert 13 in held.header["layers"][0]["held"]
    assert len(held.header["layers"][0]["held"]) < 16
    assert re.search(r"holds \d of 16 heads", held.header["notes"][0])
    layer = held.header["layers"][0]
    assert held.array(layer["q"]).shape[0] == len(layer["with_vectors"]) == len(layer["held"]) == 6


# Nothing gets out.


class Tags(html.parser.HTMLParser):
    """The tags and attributes of a page, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))


def test_there_are_about_two_hundred_hostile_strings() -> None:
    assert len(HOSTILE) >= 200
    assert any(len(text) == 10_000 for text in HOSTILE)


@pytest.mark.parametrize("where", ["tokens, layers, refusals", "title", "file name", "history"])
def test_hostile_strings_leave_the_page_as_it_is(where: str, tmp_path: Path) -> None:
    plain = Tags(View(refused()).html()).tags
    views = {
        "tokens, layers, refusals": lambda: [View(hostile_recording())],
        "title": lambda: [View(refused(), title=text) for text in HOSTILE],
        "file name": lambda: [],
        "history": lambda: [View([(1, {f"{text}/entropy_share/0": 0.5 for text in HOSTILE})])],
    }[where]()
    if where == "file name":
        names = {re.sub(r"[\x00/]", "_", text).encode("utf-8", "replace").decode()[:60] for text in HOSTILE}
        for name in names - {"", ".", ".."}:
            path = tmp_path / f"{name}.html"
            View(regard.weights(torch.randn(2, 2))).save(path)
            assert Tags(path.read_text()).tags == plain
    for view in views:
        page_ = view.html()
        assert page_.isascii()
        assert Tags(page_).tags == plain
        assert "bad=1" not in re.sub(r"<title>.*?</title>", "", page_)


def test_the_policy_allows_two_scripts_and_a_style_by_their_hashes_and_nothing_else() -> None:
    text = View(refused()).html()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    inline = re.search(r'<script type="module" async>(.*?)</script>', text, re.S).group(1)
    blocks = [re.search(f'id="regard-{what}">([^<]*)<', text).group(1) for what in ("script", "style")]
    assert html.escape("".join(blocks)) == "".join(blocks), "a frame of a notebook holds them as they are"
    rfc_1924 = str.maketrans(",./:", "&<>`")
    packed = [zlib.decompress(base64.b85decode(block.translate(rfc_1924))).decode() for block in blocks]
    hashes = [
        "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (inline, *packed)
    ]
    assert f"script-src '{hashes[0]}' '{hashes[1]}'; style-src '{hashes[2]}';" in policy
    assert len(re.findall("sha256-", policy)) == 3


def test_the_first_picture_does_not_wait_for_queries_and_keys() -> None:
    page_ = View(regard.weights(torch.randn(1, 310, 4))).html()
    places = [page_.index(part) for part in ('id="regard-data"', '<script type="module" async>', 'id="regard-vectors"')]
    assert places == sorted(places), "an async module runs as soon as it is read, before what stands after it"


def test_the_script_writes_text_as_text_and_asks_for_nothing() -> None:
    script = page_html._script()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "XMLHttp",
        "import(",
        "localStorage",
        "WebSocket",
        "sendBeacon",
    ):
        assert word not in script, word
    # A page that has a server asks it; the policy of a saved page forbids every question.
    assert script.count("fetch(") == page_html._file("js/served.js").count("fetch(")
    assert "connect-src" not in View(refused()).html()
    assert set(re.findall(r"https?://[\w.]+", script + page_html._file("page.css"))) <= {"http://www.w3.org"}


def test_in_a_notebook_the_page_stands_in_a_frame_without_rights() -> None:
    view = View(refused())
    framed = view._repr_html_()
    assert Tags(framed).tags == [("iframe", ("sandbox", "allow", "srcdoc", "style", "title")), ("script", ())]
    assert 'sandbox="allow-scripts allow-downloads"' in framed
    assert framed.endswith(f"<script>{page_html._FIT}</script>"), "no text of the subject stands beside the frame"
    inside = html.unescape(re.search('srcdoc="([^"]*)"', framed).group(1))
    assert inside == view.html()


# Colours can be told apart.


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_heads_stand_out_from_the_paper(theme: int) -> None:
    style = page_html._file("page.css")
    pairs = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root[^{]*\{(.*?)\}", style, re.S)
    ]
    colours = pairs[theme]
    assert pairs[1] == pairs[2], "the dark theme is the same however it is chosen"
    for name in ("ink", "soft", "h0", "h1", "h2", "h3"):
        a, b = sorted((_luminance(colours[name]), _luminance(colours["paper"])))
        assert (b + 0.05) / (a + 0.05) >= 4.5, name


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_can_be_read_on_every_weight(theme: int) -> None:
    block = re.findall(r":root[^{]*\{(.*?)\}", page_html._file("page.css"), re.S)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    wash = int(re.search(r"--wash: (\d+)", block).group(1)) / 100
    parts = {name: [int(colour[n : n + 2], 16) for n in (1, 3, 5)] for name, colour in colours.items()}
    for head in ("h0", "h1", "h2", "h3"):
        ground = [round(a * wash + b * (1 - wash)) for a, b in zip(parts[head], parts["paper"], strict=True)]
        a, b = sorted((_luminance("#" + bytes(ground).hex()), _luminance(colours["ink"])))
        assert (b + 0.05) / (a + 0.05) >= 4.5, head


# One object, every face.


def test_show_gives_a_view_and_save_writes_pages_and_pictures(tmp_path: Path) -> None:
    seen = translation()
    for subject, word in ((seen, "Haus"), (seen[0, 1], "house")):
        view = subject.show(word)
        assert isinstance(view, View)
        view.save(tmp_path / "x.html")
        view.save(str(tmp_path / "x.svg"))
        assert (tmp_path / "x.html").read_text() == view.html()
        assert (tmp_path / "x.svg").read_text().lstrip().startswith(("<svg", "<?xml"))
        assert word in str(view)
        assert str(view) == repr(view)


def test_a_word_is_found_in_the_sentence_that_has_it() -> None:
    seen = translation()
    for word, rows in (("house", "the house is small"), ("Haus", "das Haus ist sehr klein")):
        held = read(seen, word=word)
        start = held.header["start"]
        shown = held.header["sequences"][held.header["stacks"][start["stack"]]["rows"]]["tokens"]
        assert " ".join(shown) == rows
        assert shown[start["word"]] == word


@pytest.mark.parametrize(
    ("word", "position"), [("the:1", 0), ("the:2", 4), (4, 4), (-1, 5), ("mat", 5)], ids=["first", "second", "number", "last", "name"]
)  # fmt: skip
def test_words_are_named_as_everywhere(word: object, position: int) -> None:
    W = regard.weights(torch.randn(6, 4)).label(["the", "cat", "sat", "on", "the", "mat"])
    assert read(W, word=word).header["start"]["word"] == position
    assert read(W, word=W.at("the", 2)).header["start"]["word"] == 4


def test_with_pieces_merged_a_word_is_named_as_it_is_read() -> None:
    W = regard.weights(torch.randn(4, 4)).label(["the", "pro", "##noun", "it"])
    assert read(W, word="pronoun", merge=True).header["start"]["word"] == 1
    with pytest.raises(LookupError, match="2 tokens here: pro ##noun"):
        read(W, word="pronoun")


def test_the_title_is_the_sentence_unless_another_is_given() -> None:
    seen, _ = minilm()
    assert read(seen).header["title"] == SENTENCE.lower()
    assert read(seen, title="mine").header["title"] == "mine"
    assert "<title>mine</title>" in View(seen, title="mine").html()


CAT = ["the", "cat", "sat", "on", "the", "mat"]
WRONG = {
    "a word that is not there": (lambda: regard.weights(torch.randn(6, 4)).label(CAT), {"word": "dog"}, LookupError, "'dog' is not among the words: the cat sat on mat"),
    "a word that occurs twice": (lambda: regard.weights(torch.randn(6, 4)).label(CAT), {"word": "the"}, LookupError, "occurs 2 times, at positions 0, 4"),
    "a word without tokens": (lambda: regard.weights(torch.randn(6, 4)), {"word": "cat"}, LookupError, "have no tokens"),
    "a position too far": (lambda: regard.weights(torch.randn(6, 4)), {"word": 9}, LookupError, "position must be 0 to 5, got 9"),
    "a layer of a matrix": (lambda: regard.weights(torch.randn(6, 4)), {"layer": 3}, LookupError, "layer must be 0, got 3"),
    "a layer too far": (refused, {"layer": 9}, LookupError, "layer must be 0 to 1 or a name such as layers.0.self_attn, got 9"),
    "a head too far": (refused, {"layer": 0, "head": 9}, LookupError, "head must be 0 to 3 in layer 0, got 9"),
    "a head of no layer": (refused, {"head": 1}, ValueError, "head 1 of which layer"),
    "something else": (lambda: 3, {}, TypeError, "got int"),
    "nothing recorded": (lambda: regard.Recording(), {}, ValueError, "nothing was recorded"),
    "all refused": (lambda: regard.Recording([], [("mamba", "no weights")]), {}, ValueError, "Refused: mamba: no weights"),
    "no words at all": (lambda: regard.weights(torch.randn(0, 4)), {}, ValueError, "nothing to see"),
    "an empty history": (lambda: [], {}, ValueError, "at least one step, got none"),
    "a history of other numbers": (lambda: [(0, {"loss": 1.0})], {}, ValueError, "layer/entropy_share/head"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name: str) -> None:
    subject, options, kind, says = WRONG[name]
    with pytest.raises(kind, match=re.escape(says)):
        View(subject(), **options).html()


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, view = tmp_path / "page.html", regard.weights(torch.randn(4, 3)).show()
    page.write_text("the old one")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        view.save(page)
    assert page.read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    monkeypatch.undo()
    view.save(page)
    assert "<html" in page.read_text()


@pytest.mark.parametrize("length", [3, 400])
def test_a_page_says_that_weights_are_not_numbers(length: int) -> None:
    x = torch.randn(length, 4)
    x[0] = math.nan
    assert any("not numbers (NaN)" in note for note in Read(regard.weights(x).show().html()).header["notes"])
    assert Read(regard.weights(torch.randn(length, 4)).show().html()).header["notes"] == []


def test_a_file_is_a_page_or_a_picture(tmp_path: Path) -> None:
    view = View(regard.weights(torch.randn(3, 4)))
    with pytest.raises(ValueError, match=r"\.html, \.svg, \.pdf or \.png, got 'x\.gif'"):
        view.save(tmp_path / "x.gif")
    with pytest.raises(FileNotFoundError, match="there is no such folder; make it first"):
        view.save(tmp_path / "nowhere" / "x.html")
    assert list(tmp_path.iterdir()) == []


def test_statistics_alone_are_no_page() -> None:
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1, enable_nested_tensor=False
    )
    with torch.no_grad(), regard.record(model.eval(), keep="statistics") as seen:
        model(torch.randn(1, 4, 16))
    with pytest.raises(ValueError, match="this recording has only statistics"):
        View(seen).html()


def test_the_pictures_of_the_readme_are_there_and_small() -> None:
    folder = Path(__file__).parents[2] / "docs" / "pictures"
    names = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {
        "it.svg",
        "spotlight.png",
        "spotlight-dark.png",
        "walk.png",
        "play.png",
        "square.png",
        "heads.png",
        "long.png",
        "story.png",
        "compare.png",
    } <= set(names)
    assert max(names.values()) <= 150_000


def test_modules_of_the_page_import_what_they_use_and_share_no_name() -> None:
    """The modules become one script, in which a forgotten import would not be noticed."""
    folder = Path(page_html.__file__).parent / "js"
    sources = {name: (folder / f"{name}.js").read_text() for name in page_html._MODULES}
    files = {path.stem for path in folder.glob("*.js")} - {"widget"}  # the notebook's side of the page
    assert files == set(sources), "every file is in the page"
    declared: dict[str, str] = {}
    exported: dict[str, str] = {}
    for name, text in sources.items():
        for line in re.findall(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) .*", text, flags=re.M):
            names = re.match(
                r"(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+|\[[^\]]*\]|\{[^}]*\})", line
            )[1]
            more = re.findall(r", ([A-Z_]+) = [\d.]+", line)  # several numbers in one declaration
            for one in [*re.findall(r"\w+", names), *more]:
                assert one not in declared, f"{one} is declared in {declared[one]} and in {name}"
                declared[one] = name
                if line.startswith("export"):
                    exported[one] = name
    for name, text in sources.items():
        imports = {one: module for names, module in re.findall(r'^import \{([^}]*)\} from "\./(\w+)\.js";', text, flags=re.M) for one in re.findall(r"\w+", names)}  # fmt: skip
        for one, module in imports.items():
            assert exported.get(one) == module, f"{name} imports {one} from {module}"
        code = re.sub(r"^import .*|//.*|\"[^\"\n]*\"", "", text, flags=re.M)
        for one, module in exported.items():
            if module != name and one not in imports and len(one) > 4:
                used = re.search(rf"(?<![\w.$]){one}\(", code)
                own = re.search(rf"(?:const|let|\(|,|\{{) *{one} *(?:=|\)|,|\}}|:)|\n  {one}\(", code)
                assert not used or own, f"{name} uses {one} of {module} without importing it"


def test_a_script_loses_spaces_in_its_code_alone() -> None:
    """Texts, patterns and templates stay as they are, also those inside of other templates."""
    script = """const f = (a, b = "x = y, z") => { return /[", ] = /.test(a) ? `a, ${b ? `, in ${a + `= ${b}`} = ` : " , "} = c` : a && b; };"""
    assert page_html._without_spaces(script) == (
        """const f=(a,b="x = y, z")=>{return /[", ] = /.test(a)?`a, ${b?`, in ${a + `= ${b}`} = `:" , "} = c`:a&&b;};"""
    )
    signs = "if (a + b - c / d) { x = `{ ${ { a } } }`; } else { y = a - -b + +c + ++d % e; }"
    assert page_html._without_spaces(signs) == "if(a+b-c/d){x=`{ ${{a}} }`;}else{y=a - -b + +c + ++d%e;}"
    lines = "for (const a of b) {\n  f(`;\n}`);\n  g(a)\n}\nh;\nk"
    assert page_html._without_spaces(lines) == "for(const a of b){\n  f(`;\n}`);  g(a)}\nh;k"


@pytest.mark.parametrize("length", [4, 6, 10, 14])
def test_a_causal_text_opens_where_its_word_sees_several_others(length: int) -> None:
    """One of two keys always gets half: half of these opened on their second row, whatever the heads do."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "because",
        "it",
        "sleeps",
        "in",
        "sun",
    ][:length]
    for seed in range(6):
        numbers = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 4, length, 8, generator=numbers)
        view = regard.weights(q, k, mask=regard.causal()).label(words).show()
        row = Read(view.html()).header["start"]["word"]
        assert row + 1 >= max(3, length / 3)
        first = str(view).split("most telling first")[1].splitlines()[2].split()[0]
        assert first == words[row], "the terminal begins with the same word"
    two = regard.weights(torch.randn(2, 2, 4), mask=regard.causal()).label(words[:2])
    assert Read(two.show().html()).header["start"]["word"] == 1, "where there is no other row"
