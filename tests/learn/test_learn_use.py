"""The law of what was trained: it is opened, writes, translates, is judged and looked into, from the command line too."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import cli
from regard.learn import is_checkpoint, lm, open_model, parallel, translate
from regard.learn.generate import Beam, beam_search, bleu, sample, text_pieces
from regard.learn.progress import PlainProgress, RichProgress, _table, open_progress
from regard.learn.tokenizer import bpe, byte_level, characters, encode, load, pairs_bpe
from regard.nn import LanguageModel, Learned, Translator

SENTENCE = "the quick brown fox jumps over the lazy dog.\n"


@pytest.fixture(scope="module")
def bard(tmp_path_factory) -> Path:
    """A model that knows one sentence by heart."""
    folder = tmp_path_factory.mktemp("bard")
    (folder / "text").write_text(SENTENCE * 40)
    result = lm(
        folder / "text",
        folder / "run",
        steps=150,
        eval_every=75,
        batch=8,
        dim=32,
        heads=2,
        layers=2,
        context=48,
        warmup=10,
        lr=1e-2,
        device="cpu",
    )
    assert result.best < 0.1
    return folder / "run"


@pytest.fixture(scope="module")
def ende(tmp_path_factory) -> Path:
    """A translator of colours and animals, which it learns to perfection."""
    folder = tmp_path_factory.mktemp("ende")
    kinds = [{"red": "rot", "green": "grün", "blue": "blau"}, {"cat": "Katze", "dog": "Hund", "bird": "Vogel"}]
    kinds += [{"runs": "läuft", "sleeps": "schläft"}, {"now": "jetzt", "here": "hier"}]
    lines = [
        list(words)
        for parts in ([0, 1, 2, 3], [0, 1, 2], [0, 1], [0])
        for words in itertools.product(*(kinds[n] for n in parts))
    ]
    names = {english: german for kind in kinds for english, german in kind.items()}
    (folder / "en").write_text("\n".join(" ".join(line) for line in lines * 5) + "\n")
    (folder / "de").write_text("\n".join(" ".join(names[word] for word in line) for line in lines * 5) + "\n")
    held = (folder / "en", folder / "de")
    result = translate(
        *held, folder / "run", validation=held, steps=200, eval_every=200, batch=32, dim=32, heads=2, layers=2, vocabulary=70,
        warmup=30, lr=5e-3, dropout=0.0, smoothing=0.0, ema=0.9, positions="sinusoidal", device="cpu",
    )  # fmt: skip
    assert result.best < 0.1
    return folder / "run"


# Language models.


def test_it_writes_what_it_learned(bard, capsys):
    assert cli.main(["generate", str(bard), "--prompt", "the quick", "--count", "100", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the quick brown fox jumps over the lazy dog.\nthe quick brown fox")


def test_the_same_seed_writes_the_same_text(bard, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        cli.main(
            [
                "generate",
                str(bard),
                "--prompt",
                "the",
                "--count",
                "60",
                "--temperature",
                "3",
                "--top",
                "9",
                "--seed",
                seed,
            ]
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_window_that_is_full_goes_on_with_its_later_half():
    model = LanguageModel(11, dim=8, heads=2, layers=2, context=6).eval()
    ids = torch.randint(11, (1, 3))
    written = list(sample(model, ids, 20, temperature=0))
    assert len(written) == 20
    past = ids[0].tolist()
    for n, number in enumerate(written):
        if n <= 3:  # the window is not yet full: the greedy choice of a plain pass
            logits = model(torch.tensor([past]))[0, -1]
            assert number == int(logits.argmax())
        past.append(number)


def test_what_is_printed_token_by_token_is_what_all_of_it_decodes_to(bard, capsys):
    trained, prompt = open_model(bard), SENTENCE * 30
    ids = trained.ids(prompt)
    wanted = trained.tokenizer.decode([*ids[0].tolist(), *sample(trained.model, ids, 40, temperature=0.0)])
    assert cli.main(["generate", str(bard), "--prompt", prompt, "--count", "40", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == wanted + "\n"


def test_a_character_of_several_tokens_is_printed_when_it_is_complete(tmp_path, capsys):
    text = "größer 日本 😀 ist schön\n"
    (tmp_path / "text").write_text(text * 40)
    settings = {"dim": 32, "heads": 2, "layers": 1, "context": 32, "lr": 1e-2, "tokens": "bytes", "device": "cpu"}
    lm(tmp_path / "text", tmp_path / "run", steps=120, batch=8, **settings)
    count = len(text.encode())
    assert cli.main(["generate", str(tmp_path / "run"), "--count", str(count), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "\n" + text + "\n", "it begins with a new line, which is byte 10"


def test_bytes_that_are_no_characters_are_all_shown_in_the_end():
    tokenizer = byte_level()
    for written in (b"\xff\xff", b"a\xe6\x97b\xe6\x97", "日".encode()[1:] + b"c" * 40 + "ß".encode()):
        for cut in range(len(written) + 1):
            pieces = list(text_pieces(tokenizer, list(written[:cut]), written[cut:]))
            assert "".join(pieces) == tokenizer.decode(list(written))


def test_what_it_never_saw_is_said(bard, capsys):
    assert cli.main(["generate", str(bard), "--prompt", "é"]) == 2
    assert "the model never saw 'é'" in capsys.readouterr().err
    assert cli.main(["generate", str(bard), "--count", "0"]) == 2
    assert cli.main(["generate", str(bard / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_it_is_opened_ready_to_be_looked_into(bard):
    assert is_checkpoint(bard)
    assert not is_checkpoint(bard.parent)
    trained = open_model(bard)
    assert trained.kind == "lm"
    assert trained.context == 48
    assert not trained.model.training
    text = "the lazy dog"
    assert trained.ids(text).shape == (1, len(text))
    assert trained.tokens(text) == list(text)
    with regard.record(trained.model, tokens=trained.tokens(text)) as seen:
        assert trained.run(text) == list(text)
    assert len(seen.layers) == 2
    assert seen[0, 0]["z", "d"] == 0, "what comes later is not seen"
    with pytest.raises(ValueError, match="looks back 48"):
        trained.run("a" * 49)
    with pytest.raises(ValueError, match="a translator is needed, got a language model"):
        trained.translate("x")
    with pytest.raises(ValueError, match="the text is empty"):
        trained.ids("")


def test_it_is_looked_into_from_the_command_line(bard, ende, capsys):
    assert cli.main(["look", "the lazy dog", "--model", str(bard)]) == 0
    assert "2 layers × 2 heads × 12 tokens" in capsys.readouterr().out
    assert cli.main(["look", "red cat", "--model", str(ende)]) == 0
    assert "cat" in capsys.readouterr().out


def test_a_model_of_pieces_of_words(tmp_path, capsys):
    (tmp_path / "text").write_text(SENTENCE * 60)
    lm(
        tmp_path / "text",
        tmp_path / "run",
        steps=4,
        eval_every=4,
        dim=8,
        heads=2,
        layers=1,
        context=8,
        tokens="bpe",
        vocabulary=40,
        device="cpu",
    )
    trained = open_model(tmp_path / "run")
    assert len(trained.tokens("the quick brown")) < len("the quick brown")
    assert cli.main(["generate", str(tmp_path / "run"), "--prompt", "the dog", "--count", "5"]) == 0
    assert capsys.readouterr().out.startswith("the dog")


# Translators.


def test_it_translates(ende, capsys, monkeypatch):
    assert cli.main(["translate", str(ende), "red cat sleeps", "blue bird"]) == 0
    assert capsys.readouterr().out == "rot Katze schläft\nblau Vogel\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"green dog runs\n\nblue\n")))
    assert cli.main(["translate", str(ende), "--beam", "1"]) == 0
    assert capsys.readouterr().out == "grün Hund läuft\n\nblau\n"


def test_it_is_judged(ende, capsys):
    files = ["--file", str(ende.parent / "en"), "--reference", str(ende.parent / "de")]
    assert cli.main(["translate", str(ende), *files, "--beam", "2"]) == 0
    message = capsys.readouterr().err
    assert float(message.split()[1].rstrip(",")) > 95
    assert "lower-cased" in message
    assert cli.main(["translate", str(ende), "x", *files]) == 2
    assert cli.main(["translate", str(ende), "x", *files[2:]]) == 2


def test_texts_may_stand_anywhere_among_options(ende, capsys):
    for words in (["--beam", "2", "red cat"], ["red cat", "--beam", "2"]):
        assert cli.main(["translate", str(ende), *words]) == 0
        assert capsys.readouterr().out == "rot Katze\n"
    assert cli.main(["translate", str(ende), "red cat", "--beam", "2", "blue dog"]) == 0
    assert capsys.readouterr().out == "rot Katze\nblau Hund\n"
    assert cli.main(["translate", str(ende), "--file", "some", "red cat"]) == 2
    assert "pass sentences or --file, not both" in capsys.readouterr().err
    assert cli.main(["translate", str(ende), "red cat", "--bean", "2"]) == 2
    assert (
        "unrecognized arguments: --bean 2 (did you mean --beam?); see regard translate --help"
        in capsys.readouterr().err
    )


def test_every_line_is_answered_by_a_line(ende, capsys, monkeypatch):
    for source_text, lines in (("red cat\n\nblue dog\n\n\n", 5), ("red cat", 1), ("\n", 1), ("", 0)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source_text.encode())))
        assert cli.main(["translate", str(ende)]) == 0
        assert capsys.readouterr().out.count("\n") == lines
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"red \xff"), errors="surrogateescape"))
    assert cli.main(["translate", str(ende)]) == 2
    assert "stdin is not UTF-8 text: byte 4" in capsys.readouterr().err


def test_references_are_counted_before_the_work(ende, tmp_path, capsys, monkeypatch):
    (tmp_path / "en").write_text("red cat\nblue dog\n")
    (tmp_path / "de").write_text("rot Katze\n")
    (tmp_path / "nothing").write_text("")
    messages = {
        "de": "has 2 lines and",
        "nothing": "is empty; a translation is needed",
        "nowhere": "cannot be read",
        "": "a path is needed",
    }
    for name, message in messages.items():
        reference = str(tmp_path / name) if name else ""
        assert cli.main(["translate", str(ende), "--file", str(tmp_path / "en"), "--reference", reference]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert message in printed.err


def test_its_three_kinds_of_attention_are_looked_into(ende):
    trained = open_model(ende)
    assert trained.context is None
    with regard.record(trained.model) as seen:
        source, target = trained.run("red cat")
    assert source[-1] == "<end>"
    assert target[0] == "<start>"
    assert [layer.kind for layer in seen.layers] == ["self", "self", "self", "cross", "self", "cross"], (
        "one pass, not the search"
    )
    assert seen.layers[3].shape[-2:] == (len(target), len(source))
    assert trained.tokens("red cat") == source
    assert trained.translate("red cat") == "rot Katze"


def test_the_wrong_kind_is_said(bard, ende, capsys):
    assert cli.main(["translate", str(bard), "x"]) == 2
    assert "a translator is needed, got a language model" in capsys.readouterr().err
    assert cli.main(["generate", str(ende)]) == 2
    assert "a language model is needed, got a translator" in capsys.readouterr().err


def exhaustive(model, source, start, end, penalty, longest):
    """The best target of at most `longest` words, all of them tried."""
    vocabulary = model.embedding.table.num_embeddings
    best, going = (-torch.inf, []), [(0.0, [start])]
    for length in range(1, longest + 1):
        longer = []
        for score, words in going:
            log_p = model(source, torch.tensor([words]))[0, -1].log_softmax(-1)
            for word in range(vocabulary):
                total = score + log_p[word].item()
                if word == end:
                    best = max(best, (total / length**penalty, words[1:]))
                elif word not in (model.PAD, start):
                    longer.append((total, [*words, word]))
        going = longer
    return best[1]


def test_a_wide_beam_finds_what_trying_everything_finds():
    torch.manual_seed(3)
    model = Translator(6, dim=8, heads=2, layers=1).eval()
    compared = 0
    for source in itertools.product(range(3, 6), repeat=2):
        with torch.no_grad():
            sentences = beam_search(model, torch.tensor([source]), 1, 2, Beam(100, 0.0))[0]
            if len(sentences) <= 3:  # beyond that not everything is tried
                assert sentences == exhaustive(model, torch.tensor([source]), 1, 2, 0.0, 4)
                compared += 1
    assert compared >= 3


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.5, 1.0, 2.0])
def test_a_wide_beam_finds_the_best_sentence_for_every_penalty(penalty):
    """Also where a shorter sentence ended first: a longer one that begins worse may end better."""
    for seed in range(8):
        torch.manual_seed(seed)
        model = Translator(6, dim=8, heads=2, layers=1, positions=Learned(4, 8)).eval()
        source = torch.randint(3, 6, (1, 3))
        with torch.no_grad():
            best = exhaustive(model, source, 1, 2, penalty, 4)
        assert beam_search(model, source, 1, 2, Beam(100, penalty)) == [best]


def test_a_beginning_that_ends_early_does_not_crowd_out_the_better_one(ende):
    """Beside a sure sentence stand many unlikely ones that end at once; they are no reason to stop."""
    trained = open_model(ende)
    for width in (1, 2, 5, 20):
        assert trained.translate("red cat sleeps now", Beam(width)) == "rot Katze schläft jetzt"


def test_sentences_of_a_batch_do_not_disturb_each_other():
    torch.manual_seed(0)
    model = Translator(30, dim=16, heads=2, layers=2).eval()
    rows = [torch.randint(4, 30, (n,)).tolist() for n in (3, 7, 5)]
    together = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    sentences = beam_search(model, together, 1, 2, Beam(3))
    for row, words in zip(rows, sentences, strict=True):
        assert words == beam_search(model, torch.tensor([row]), 1, 2, Beam(3))[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_translation_does_not_depend_on_its_neighbours(seed):
    """Sentences end early, late and never: by their own rule each."""
    torch.manual_seed(seed)
    model = Translator(12, dim=16, heads=2, layers=1).double().eval()
    rows = [torch.randint(3, 12, (n,)).tolist() for n in (1, 2, 3, 5, 8, 13, 1, 2, 3, 5)]
    together = torch.tensor([row + [0] * (13 - len(row)) for row in rows])
    sentences = beam_search(model, together, 1, 2, Beam(4))
    assert len({len(words) for words in sentences}) > 2
    assert sentences == [beam_search(model, torch.tensor([row]), 1, 2, Beam(4))[0] for row in rows]


def test_learned_positions_end_a_translation_where_they_end(monkeypatch):
    torch.manual_seed(0)
    model = Translator(30, dim=16, heads=2, layers=1, positions=Learned(6, 16)).eval()
    assert model.max_positions == 6
    own = model.embedding.logits
    monkeypatch.setattr(
        model.embedding, "logits", lambda x: own(x).index_fill(-1, torch.tensor(2), -100.0)
    )  # never ends
    words = beam_search(model, torch.randint(3, 30, (1, 5)), 1, 2, Beam(2))[0]
    assert len(words) == 6, "2 · 5 + 10 would be more than there is room for"


def test_marks_that_are_typed_are_text(ende):
    trained = open_model(ende)
    for mark in ("<pad>", "<start>", "<end>", "<unknown>"):
        numbers = trained.ids(f"red {mark} cat")[0, :-1]
        assert trained.tokenizer.token_to_id(mark) not in numbers.tolist() or mark == "<unknown>"
        assert len(numbers) > len(trained.ids("red cat")[0])
    fresh = pairs_bpe(["a <pad> b"] * 3, 12)
    assert 0 not in encode(fresh, "a <pad> b")
    assert fresh.decode(encode(fresh, "a <pad> b")) == "a <pad> b"


def test_a_text_without_line_ends_is_gone_on_from_its_first_token(tmp_path, capsys):
    (tmp_path / "text").write_text("abcab" * 60)
    lm(tmp_path / "text", tmp_path / "run", steps=2, eval_every=2, dim=8, heads=2, layers=1, context=8, device="cpu")
    assert cli.main(["generate", str(tmp_path / "run"), "--count", "5"]) == 0
    out = capsys.readouterr().out
    assert out[0] == "a"
    assert len(out.strip()) == 6


@pytest.mark.parametrize(("words", "message"), [
    (["--temperature", "nan"], "--temperature must be at least 0 and finite; got nan"),
    (["--temperature", "inf"], "--temperature must be at least 0 and finite; got inf"),
    (["--count", "0"], "--count must be at least 1; got 0"),
    (["--top", "0"], "--top must be at least 1; got 0"),
    (["--seed", "9" * 24], "--seed must be smaller than 2^63; got 999"),
])  # fmt: skip
def test_numbers_that_cannot_be_are_told_in_one_line(words, message, bard, capsys):
    assert cli.main(["generate", str(bard), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("penalty", ["nan", "inf", "1e300"])
def test_a_penalty_is_a_number(penalty, ende, capsys):
    assert cli.main(["translate", str(ende), "red cat", "--penalty", penalty]) == 2
    assert "a penalty must be a number from -10 to 10" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["1e-45", "1e-300"])
def test_the_coldest_is_the_likeliest(temperature, bard, capsys):
    for cold in (temperature, "0"):
        assert cli.main(["generate", str(bard), "--prompt", "the", "--count", "20", "--temperature", cold]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]


def test_sampling_leaves_the_callers_chance_alone():
    model = LanguageModel(11, dim=8, heads=2, layers=1, context=6).eval()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    list(sample(model, torch.tensor([[1]]), 3))
    assert torch.equal(torch.rand(3), want)


def test_greedy_is_a_beam_of_one():
    torch.manual_seed(1)
    model = Translator(30, dim=16, heads=2, layers=2).eval()
    source = torch.randint(4, 30, (1, 4))
    words = [1]
    with torch.no_grad():
        for _ in range(18):
            logits = model(source, torch.tensor([words]))[0, -1]
            logits[[0, 1]] = -torch.inf
            if (number := int(logits.argmax())) == 2:
                break
            words.append(number)
    assert beam_search(model, source, 1, 2, Beam(1))[0] == words[1:]
    with pytest.raises(ValueError, match="at least 1 wide"):
        Beam(0)


def test_bleu_is_sacrebleus():
    same = ["Der Hund läuft über die Straße."]
    assert bleu(same, same)["cased"] == pytest.approx(100)
    scores = bleu(["der hund läuft über die straße."], same)
    assert scores["cased"] < 60
    assert scores["lower"] == pytest.approx(100)
    assert "case:lc" in scores["lower_signature"]
    with pytest.raises(ValueError, match="2 translations and 1 references"):
        bleu(["a", "b"], same)


# Tokens, progress, help.


def test_tokens_lose_nothing():
    text = "First Citizen:\nBefore  we proceed, hear me.\n\nAll:\nSpeak! \n"
    for tokenizer in (characters(text), bpe(text * 5, 40)):
        assert tokenizer.decode(encode(tokenizer, text)) == text
    line = "Zwei Hunde laufen über die Straße, nicht wahr?"
    tokenizer = pairs_bpe([line] * 3, 60)
    assert tokenizer.decode(encode(tokenizer, line)) == line
    assert [tokenizer.token_to_id(name) for name in ("<pad>", "<start>", "<end>")] == [0, 1, 2]
    assert tokenizer.encode("Q").tokens == ["▁", "<unknown>"] or "<unknown>" in tokenizer.encode("Q").tokens


def test_ids_of_bytes_and_characters_are_those_of_their_tokenizers():
    text = "Zwei Hunde,\n\n über  die\tStraße ▁ \n"
    for tokenizer in (byte_level(), characters(text)):
        assert encode(tokenizer, text) == tokenizer.encode(text).ids
    turned = json.loads(byte_level().to_str())  # another order of the same 256 tokens
    turned["model"]["vocab"] = {token: 255 - byte for token, byte in turned["model"]["vocab"].items()}
    tokenizer = load(json.dumps(turned).encode(), "turned.json")
    assert encode(tokenizer, "mät") == tokenizer.encode("mät").ids == [255 - byte for byte in "mät".encode()]
    with pytest.raises(ValueError, match="never saw ' '"):
        encode(characters("▁ab"), "a b")


@pytest.mark.parametrize(
    ("missing", "verb"),
    [
        ("tokenizers", "learn"),
        ("safetensors", "learn"),
        ("safetensors.torch", "learn"),
        ("tokenizers", "generate"),
        ("sacrebleu.metrics", "translate"),
    ],
)
def test_what_is_not_installed_is_said_before_anything_is_done(
    missing, verb, bard, ende, tmp_path, monkeypatch, capsys
):
    (tmp_path / "text").write_text(SENTENCE * 20)
    monkeypatch.setitem(sys.modules, missing, None)
    files = ["--file", str(ende.parent / "en"), "--reference", str(ende.parent / "de"), "--beam", "1"]
    words = {
        "learn": ["learn", "lm", str(tmp_path / "text"), "--out", str(tmp_path / "run"), "--device", "cpu"],
        "generate": ["generate", str(bard)],
        "translate": ["translate", str(ende), *files],
    }
    assert cli.main(words[verb]) == 2
    assert "pip install 'regard[learn]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 9, 12, 40])
@pytest.mark.parametrize("width", [80, 40])
def test_no_number_of_the_training_panel_is_cut(heads, width):
    from rich.console import Console

    of = {"entropy_share": [0.5 + n for n in range(heads)], "max_score": [1000.5 - n for n in range(heads)]}
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(_table({f"body.blocks.{n}.attention": of for n in range(2)}, width))
    text = console.export_text()
    assert "…" not in text
    assert "0.50" in text
    assert "1000.5" in text or "1e+03" in text


def test_the_training_panel_has_curves_the_step_of_its_numbers_and_words_for_a_head_that_collapsed():
    from rich.console import Console

    panel = RichProgress()
    panel.console = panel.live.console = Console(width=60, file=io.StringIO(), record=True, force_terminal=False)
    panel.begin(0, 100)
    for step in range(1, 41):
        heads = {"body.blocks.0.attention": {"entropy_share": [0.5, 0.5 / step**2], "max_score": [3.0, float(step)]}}
        panel.update(step, {"loss": 4.0 / step} | ({"heads": heads} if step % 20 == 0 or step == 1 else {}))
    panel.close()
    text = panel.console.export_text()
    (loss,) = re.findall(r"^loss +(\S+) 4 → 0\.1$", text, re.M)
    assert (loss[0], loss[-1], len(loss)) == ("█", "▁", 35)
    assert re.search(r"^lowest entropy +█▁▁ 0\.5 → 0\.00031\d$", text, re.M)
    assert re.search(r"^largest score +▁▄█ 3 → 40$", text, re.M)
    assert "step 40" in text
    assert "0 head 1 has collapsed: it looks at one token alone" in text
    assert "0 head 0 has" not in text


def test_without_rich_or_a_terminal_progress_is_plain(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert type(open_progress()) is RichProgress
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert type(open_progress()) is PlainProgress


HEADS = {"body.blocks.0.attention": {"entropy_share": [0.5, 0.25], "max_score": [3.0, 40.0]}}


def test_plain_progress_is_lines_on_stderr(capsys):
    progress = open_progress()
    assert type(progress) is PlainProgress
    progress.begin(0, 100)
    progress.update(50, {"loss": 2.5, "tokens_per_second": 1234.5, "heads": HEADS})
    progress.update(50, {"val_loss": 2.6, "best": 2.6})
    progress.close()
    output = capsys.readouterr()
    assert output.out == ""
    assert (
        output.err
        == "step 50/100  loss 2.5000  val 2.6000  best 2.6000  1,234 tokens/s  entropy ≥ 0.25 (0 head 1)  max score ≤ 40.0 (0 head 1)\n"
    )


def test_rich_progress_shows_every_head(monkeypatch):
    from rich.console import Console

    progress = RichProgress()
    out = io.StringIO()
    progress.console = Console(file=out, force_terminal=True, width=120)
    progress.live.console = progress.bar.live.console = progress.console
    progress.begin(0, 100)
    progress.update(50, {"loss": 2.5, "val_loss": 2.6, "heads": HEADS})
    progress.note("[not markup]")
    progress.close()
    shown = out.getvalue()
    assert "0.25/40.0" in shown
    assert "loss 2.5000" in shown
    assert "[not markup]" in shown


def test_every_option_is_explained_with_its_default(capsys):
    for words in (["learn", "lm"], ["learn", "translate"], ["generate"], ["translate"], ["learn"]):
        with contextlib.suppress(SystemExit):
            assert cli.main([*words, "--help"]) == 0
        help_text = " ".join(capsys.readouterr().out.split())
        if words[0] == "learn" and len(words) > 1:
            for option in (
                "--steps",
                "--device",
                "--seed",
                "--layers",
                "--precision",
                "--compile",
                "--resume",
                "--lr",
                "--warmup",
            ):
                assert option in help_text
            assert "(default 0.003)" in help_text or "(default 0.002)" in help_text


def test_interrupted_it_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    from regard.learn import training

    (tmp_path / "my text").write_text(SENTENCE * 10)
    monkeypatch.setattr(training.Interrupted, "__enter__", lambda self: setattr(self, "signalled", True) or self)
    small = ["--dim", "8", "--heads", "2", "--layers", "1", "--context", "8", "--device", "cpu"]
    code = cli.main(["learn", "lm", str(tmp_path / "my text"), "--out", str(tmp_path / "run"), *small])
    message = capsys.readouterr().err
    assert code == 130
    assert "stopped at step 1 of 2,000, saved" in message
    assert f"regard learn lm '{tmp_path}/my text' --out {tmp_path}/run --resume" in message


def test_many_sentences_go_to_the_device_in_batches(ende, monkeypatch):
    """A thousand of them took as long one by one, to a GPU and back, as the search for their translations."""
    trained = open_model(ende)
    tensors = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **more: tensors.append(a) or tensor(*a, **more))
    written = trained.translate_all(["red cat", "blue dog runs", "green bird"] * 8)
    assert written[:2] == ["rot Katze", "blau Hund läuft"]
    assert len(tensors) < 10


def test_a_device_starts_in_the_background_and_reports_nothing(monkeypatch):
    started = []
    monkeypatch.setattr(parallel.threading, "Thread", lambda **what: started.append(what))
    parallel.wake(torch.device("cpu"))
    assert not started
    if not torch.cuda.is_available():
        monkeypatch.undo()
        with pytest.raises((RuntimeError, AssertionError)):
            torch.ones(1, device="cuda")
        parallel._first_product(torch.device("cuda"))
