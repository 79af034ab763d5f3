"""generate() with a KV cache is one causal matrix a layer, whatever the cache: that of one forward of the whole text."""

import warnings

import pytest
import torch

import regard
from regard.recorder import RefusedWarning

transformers = pytest.importorskip("transformers")

from support import zoo  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
transformers.logging.set_verbosity_error()

PROMPT, NEW = 5, 9


def tiny_model(name, cls, attention="sdpa"):
    _, config_class, config, _ = zoo.ZOO[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**config)
    config._attn_implementation = attention if zoo.takes_any_attention(name) else "eager"
    return getattr(transformers, cls)(config).eval()


def generate(model, mask=None, **more):
    prompt = zoo.ids(2, PROMPT)
    mask = torch.ones_like(prompt) if mask is None else mask
    arguments = {
        "input_ids": prompt,
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }
    with torch.no_grad():
        plain = model.generate(**arguments)
        with regard.record(model, tokens=lambda n: f"w{n}") as seen:
            out = model.generate(**arguments)
    assert torch.equal(plain, out)
    return seen, out, mask


CASES = {
    "dynamic": ("llama", "LlamaForCausalLM", {}),
    "dynamic, eager": ("llama", "LlamaForCausalLM", {"attention": "eager"}),
    "static": ("llama", "LlamaForCausalLM", {"cache_implementation": "static"}),
    "static, eager": ("llama", "LlamaForCausalLM", {"attention": "eager", "cache_implementation": "static"}),
    "window": ("mistral, window 4", "MistralForCausalLM", {}),
    "static window": ("mistral, window 4", "MistralForCausalLM", {"cache_implementation": "static"}),
    "window and global layers": ("gemma3, window", "Gemma3ForCausalLM", {}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "latent keys": ("deepseek-v3, MLA", "DeepseekV3ForCausalLM", {}),
}


@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_generation_is_one_matrix(case, left_padded):
    name, cls, more = CASES[case]
    model = tiny_model(name, cls, more.get("attention", "sdpa"))
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    if left_padded:
        mask[1, :2] = 0
    seen, out, mask = generate(model, mask, **{k: v for k, v in more.items() if k != "attention"})
    assert seen.refused == []
    assert len(seen.passes) == 1
    assert seen.passes[0].steps == NEW
    text = out[:, :-1]  # the last token is chosen and never embedded
    full_mask = torch.cat([mask, torch.ones(2, NEW - 1, dtype=torch.long)], 1)
    eager = tiny_model(name, cls, "eager")
    eager.load_state_dict(model.state_dict())
    positions = (full_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        reported = eager(
            input_ids=text, attention_mask=full_mask, position_ids=positions, output_attentions=True
        ).attentions
    assert len(reported) == len(seen)
    for layer, expected in zip(seen.layers, reported, strict=True):
        assert layer.shape == (2, 4, PROMPT + NEW - 1, PROMPT + NEW - 1)
        real = full_mask.bool()[:, None, :, None]
        torch.testing.assert_close(layer.weights.dense() * real, expected * real, atol=1e-5, rtol=0)
        assert layer.tokens[0] == [[f"w{n}" for n in row] for row in text.tolist()]
        if layer.saved.mask is not None:
            assert "dense" not in repr(layer.saved.mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_assisted_generation_is_one_matrix_without_rejected_candidates(attention):
    model = tiny_model("llama", "LlamaForCausalLM", attention)
    torch.manual_seed(5)
    assistant = transformers.LlamaForCausalLM(model.config).eval()  # other weights: nearly all it says is rejected
    prompt = zoo.ids(1, PROMPT)
    more = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "assistant_model": assistant}
    with regard.record(model, tokens=lambda n: f"w{n}") as seen:
        out = model.generate(prompt, **more)
    assert seen.refused == []
    assert [len(one) for one in seen.passes] == [2]
    assert seen.passes[0].steps > 3
    text = out[:, : PROMPT + NEW - 1]
    with torch.no_grad(), regard.record(model) as complete:
        model(text)
    for layer, right in zip(seen.layers, complete.layers, strict=True):
        torch.testing.assert_close(layer.weights.dense(), right.weights.dense(), atol=1e-5, rtol=0)
        assert layer.tokens[0][0] == [f"w{n}" for n in text[0].tolist()]


def test_two_generations_are_two_passes():
    model = tiny_model("llama", "LlamaForCausalLM")
    with torch.no_grad(), regard.record(model) as seen:
        for length in (5, 7):
            model.generate(zoo.ids(1, length), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [(p.steps, p.layers[0].shape[-1]) for p in seen.passes] == [(4, 8), (4, 10)]


def test_two_static_generations_are_two_passes():
    model = tiny_model("llama", "LlamaForCausalLM")
    with torch.no_grad(), regard.record(model) as seen:
        for length in (5, 7):
            model.generate(
                zoo.ids(1, length),
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
            )
    assert [(p.steps, p.layers[0].shape[-1]) for p in seen.passes] == [(4, 8), (4, 10)]


def test_chunks_of_a_prompt_are_stitched():
    model = tiny_model("llama", "LlamaForCausalLM")
    text = zoo.ids(1, 12)
    with torch.no_grad(), regard.record(model) as at_once:
        model(text)
    with torch.no_grad(), regard.record(model) as seen:
        cache = None
        for start, stop in ((0, 5), (5, 9), (9, 12)):
            cache = model(text[:, start:stop], past_key_values=cache, use_cache=True).past_key_values
    assert len(seen.passes) == 1
    assert seen.passes[0].steps == 3
    for a, b in zip(seen.layers, at_once.layers, strict=True):
        torch.testing.assert_close(a.weights.dense(), b.weights.dense(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "cls"),
    [("t5, bias", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration"), ("marian", "MarianMTModel")],
)
def test_an_encoder_decoder_is_one_pass_with_the_right_words(name, cls):
    model = tiny_model(name, cls)
    seen, out, _ = generate(model)
    assert seen.refused == []
    assert len(seen.passes) == 1
    encoder, decoder, cross = (
        [layer for layer in seen.layers if layer.kind == "self" and "encoder" in layer.name],
        [layer for layer in seen.layers if layer.kind == "self" and "decoder" in layer.name],
        seen.select(kind="cross").layers,
    )
    assert [len(group) for group in (encoder, decoder, cross)] == [2, 2, 2]
    eager = tiny_model(name, cls, "eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        reported = eager(input_ids=zoo.ids(2, PROMPT), decoder_input_ids=out[:, :-1], output_attentions=True)
    for group, expected in (
        (encoder, reported.encoder_attentions),
        (decoder, reported.decoder_attentions),
        (cross, reported.cross_attentions),
    ):
        for layer, w in zip(group, expected, strict=True):
            torch.testing.assert_close(layer.weights.dense(), w, atol=1e-5, rtol=0)
    source = [[f"w{n}" for n in row] for row in zoo.ids(2, PROMPT).tolist()]
    target = [[f"w{n}" for n in row] for row in out[:, :-1].tolist()]
    assert encoder[0].tokens == (source, source)
    assert decoder[0].tokens == (target, target)
    assert cross[0].tokens == (target, source)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beams_are_refused_by_name(name):
    model = (
        tiny_model("llama", "LlamaForCausalLM")
        if name == "llama"
        else tiny_model("t5, bias", "T5ForConditionalGeneration")
    )
    with torch.no_grad(), pytest.warns(RefusedWarning, match="beam search"), regard.record(model) as seen:
        model.generate(zoo.ids(2, 5), max_new_tokens=6, num_beams=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert any("beam" in why for _, why in seen.refused)
    assert all(p.steps == 1 for p in seen.passes)


def test_a_generation_is_stitched_from_the_disk_too(tmp_path):
    model = tiny_model("llama", "LlamaForCausalLM")
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad(), regard.record(model) as expected:
        model.generate(zoo.ids(1, 5), **arguments)
    with torch.no_grad(), regard.record(model, path=tmp_path / "run.regard"):
        model.generate(zoo.ids(1, 5), **arguments)
    again = regard.load(tmp_path / "run.regard")
    assert again.passes[0].steps == 4
    for a, b in zip(again.layers, expected.layers, strict=True):
        assert torch.equal(a.weights.dense(), b.weights.dense())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
def test_values_of_a_generation_belong_to_its_keys(attention, cache):
    model = tiny_model("llama", "LlamaForCausalLM", attention)
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **cache}
    with torch.no_grad(), regard.record(model, values=True) as seen:
        out = model.generate(zoo.ids(1, PROMPT), **arguments)
    with torch.no_grad(), regard.record(model, values=True) as forward:
        model(out[:, :-1])
    for layer, expected in zip(seen.layers, forward.layers, strict=True):
        torch.testing.assert_close(layer.values, expected.values)
        torch.testing.assert_close(layer.norm_weighted(), expected.norm_weighted())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_step_of_another_sequence_is_not_stitched(attention):
    """Its cache is as long as that of the last pass."""
    model = tiny_model("llama", "LlamaForCausalLM", attention)
    first, second = zoo.ids(2, PROMPT).split(1)
    with torch.no_grad(), warnings.catch_warnings(), regard.record(model) as seen:
        warnings.simplefilter("ignore", RefusedWarning)
        cache = model(first, use_cache=True).past_key_values
        model(second, use_cache=True)
        model(zoo.ids(1, 1), past_key_values=cache)
    assert [layer.shape[2:] for one in seen.passes for layer in one.layers[:1]] == [(5, 5), (5, 5), (1, 6)]
    assert all("of another sequence" in reason for _, reason in seen.refused)
    assert bool(seen.refused) == (attention == "eager")


def test_an_edited_cache_is_not_stitched():
    model = tiny_model("llama", "LlamaForCausalLM")
    text = zoo.ids(1, 6)
    with torch.no_grad(), regard.record(model) as seen:
        cache = model(text[:, :5], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys = layer.keys * 2
        model(text[:, 5:], past_key_values=cache)
    assert [p.steps for p in seen.passes] == [1, 1]
    assert seen[0].shape == (1, 4, 1, 6)


def test_memory_of_a_generation_grows_with_its_length_not_its_square():
    model = tiny_model("llama", "LlamaForCausalLM")
    with torch.no_grad(), regard.record(model) as seen:
        model.generate(zoo.ids(1, 5), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    saved = seen.layers[0].saved
    assert saved.k.untyped_storage().nbytes() <= saved.k.numel() * saved.k.element_size() * 2
    assert saved.q.shape[2] == saved.k.shape[2] == 44


class BiasedWindow(torch.nn.Module):
    """A cache that keeps four positions, and a bias of their distances."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.past = None

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
        bias = -torch.arange(k.shape[2] - 1.0, -1, -1).expand(q.shape[2], -1)
        if q.shape[2] > 1:
            bias = bias.masked_fill(torch.ones(bias.shape).triu(1).bool(), -torch.inf)
        self.past = k[:, :, -3:], v[:, :, -3:]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None, None])


@pytest.mark.parametrize("prompt", [2, 4, 6])
def test_a_window_cache_with_a_bias_is_named_when_it_drops_keys(prompt):
    """Steps before that are stitched, and those after it are passes of their own."""
    torch.manual_seed(0)
    model, x = BiasedWindow(), torch.randn(1, 9, 8)
    steps = [x[:, :prompt], *x[:, prompt:].split(1, 1)]
    with pytest.warns(RefusedWarning, match="its cache drops keys"), torch.no_grad(), regard.record(model) as seen:
        _ = [model(step) for step in steps]
    assert seen.passes[0].layers[0].shape[-2:] == (max(prompt, 4), max(prompt, 4))
    assert all(one.layers[0].shape[-2:] == (1, 4) for one in seen.passes[1:])
    q, k, _ = model.qkv(x).view(1, 9, 3, 2, 4).permute(2, 0, 3, 1, 4)
    s = q[:, :, -1:] @ k[:, :, -4:].mT / 2 - torch.arange(3.0, -1, -1)
    torch.testing.assert_close(seen.passes[-1].layers[0].weights.dense(), s.softmax(-1))
