"""`attn_implementation="regard"`: outputs and gradients of eager attention, whatever conventions a model has for its masks."""

import copy
import sys
import warnings

import pytest
import torch

import regard

transformers = pytest.importorskip("transformers")
from regard.integrations import transformers as on_regard  # noqa: E402
from regard.recorder import RefusedWarning  # noqa: E402
from support import zoo  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

#: Models that call the attention their configuration names.
SUPPORTED = [
    "bert", "llama", "mistral, window 4", "gemma2, soft cap, window", "gpt-oss, sinks", "t5, bias", "vit", "gpt2", "bart", "swin",
    "beit, bias", "deepseek-v3, MLA", "modernbert",
]  # fmt: skip
#: Models that compute attention by themselves, with masks that transformers makes for the implementation that is set.
THEIR_OWN = ["mpnet", "megatron-bert", "bloom"]


@pytest.fixture(autouse=True)
def registered():
    on_regard.register()


def pair(name):
    """A model with eager attention, its inputs, and the same model on regard."""
    modeling = sys.modules[getattr(transformers, zoo.ZOO[name][0]).__module__]
    if name not in THEIR_OWN and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{name} of this transformers has an attention of its own, and takes no other")
    eager, inputs = zoo.build(name, "eager")
    ours, _ = zoo.build(name, "regard")
    ours.load_state_dict(eager.state_dict())
    return eager, inputs, ours


def real_rows(inputs, y):
    mask = inputs.get("attention_mask")
    return mask.bool() if mask is not None and mask.shape == y.shape[:2] else torch.ones(y.shape[:2], dtype=torch.bool)


@pytest.mark.parametrize("name", SUPPORTED)
def test_outputs_and_gradients_are_those_of_eager_attention(name):
    eager, inputs, ours = pair(name)
    results = []
    for model in (eager, ours):
        with on_regard.statistics("entropy") if model is ours else warnings.catch_warnings() as by_layer:
            y = model(**inputs)[0]
        y = y[real_rows(inputs, y)]
        torch.manual_seed(0)
        (y * torch.randn_like(y)).sum().backward()
        results.append((y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert by_layer
    (expected, wanted), (y, grads) = results
    torch.testing.assert_close(y, expected, atol=2e-4, rtol=0)
    for parameter, grad in wanted.items():
        assert parameter in grads, f"{parameter} has no gradient"
        torch.testing.assert_close(grads[parameter], grad, atol=2e-4 * max(1, grad.abs().max().item()), rtol=0)


@pytest.mark.parametrize("name", THEIR_OWN)
def test_a_model_with_an_attention_of_its_own_is_right_and_named(name):
    eager, inputs, ours = pair(name)
    with torch.no_grad():
        expected = eager(**inputs)[0]
        named = pytest.warns(RefusedWarning, match=r"no layer computed its attention by regard.*regard\.record")
        with named, on_regard.statistics("entropy"):
            y = ours(**inputs)[0]
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


def test_a_layer_without_a_word_on_causality_sees_what_eager_attention_sees():
    config = transformers.SplinterConfig(**zoo.TEXT)
    eager = transformers.SplinterModel(config).eval()
    config = copy.deepcopy(config)
    config._attn_implementation = "regard"
    ours = transformers.SplinterModel(config).eval()
    ours.load_state_dict(eager.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(zoo.ids())[0], eager(zoo.ids())[0], atol=1e-5, rtol=0)


def language_model(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**zoo.DECODER, attn_implementation="regard", **more))


def test_a_model_trains_on_its_own_entropy():
    model, text = language_model(), zoo.ids(4, 16)

    def entropy():
        with on_regard.statistics("entropy") as statistics:
            model(text)
        return torch.stack([seen.entropy.mean() for seen in statistics.values()]).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = entropy().item()
    for _ in range(10):
        optimizer.zero_grad()
        entropy().backward()
        optimizer.step()
    assert entropy().item() < before - 0.05


def gradient(model, backward_inside):
    """The gradient of a loss with an entropy, and the layers that the block has after it."""
    with on_regard.statistics("entropy") as by_layer:
        loss = model(zoo.ids(), use_cache=False).logits.square().mean()
        loss = loss + sum(seen.entropy.mean() for seen in by_layer.values())
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return model.model.layers[0].self_attn.q_proj.weight.grad, list(by_layer)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_checkpoints_count_a_layer_once_and_have_its_gradient(backward_inside):
    expected, _ = gradient(language_model().train(), backward_inside)
    model = language_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    grad, layers = gradient(model, backward_inside)
    assert layers == ["0", "1"]
    torch.testing.assert_close(grad, expected)


def test_a_reentrant_checkpoint_says_that_it_builds_no_graph():
    model = language_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match=r"use_reentrant.: False"):
        gradient(model, True)


def test_dropout_drops_its_share_of_the_weights_after_their_statistics():
    torch.manual_seed(0)
    layer = torch.nn.Module()
    q, k = (torch.randn(2, 4, 64, 8) for _ in range(2))
    identity = torch.eye(64).expand(2, 4, 64, 64)
    with on_regard.statistics("entropy") as by_layer:
        y, _ = on_regard.attention(layer, q, k, identity, None, dropout=0.25, is_causal=False)
    w, dropped = regard.weights(q, k), y.transpose(1, 2)
    torch.testing.assert_close(by_layer["0"].entropy, w.entropy())
    stay = dropped > 0
    assert 0.72 < stay.float().mean().item() < 0.78  # 32,768 draws: the standard deviation is 0.0024
    torch.testing.assert_close(dropped[stay], (w.dense() / 0.75)[stay], atol=1e-5, rtol=1e-4)


def test_a_model_whose_config_drops_weights_trains():
    torch.manual_seed(0)
    config = transformers.BertConfig(**zoo.TEXT, attn_implementation="regard")
    assert config.attention_probs_dropout_prob > 0
    model = transformers.BertModel(config).train()
    model(**zoo.padded())[0].square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("inputs", [zoo.padded, lambda: zoo.padded(left=True), lambda: {"input_ids": zoo.ids()}])
def test_a_compiled_model_is_one_graph(inputs):
    model, inputs = language_model().eval(), inputs()
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, expected, atol=1e-5, rtol=0)


def test_a_mask_that_layers_share_is_parsed_once(monkeypatch):
    from regard.recorder import calls

    masks = []
    own = calls.parse_mask
    monkeypatch.setattr(calls, "parse_mask", lambda mask, *more: masks.append(mask) or own(mask, *more))
    model = language_model().eval()
    with torch.no_grad():
        model(**zoo.padded())
    assert len(masks) == 1


def test_a_mask_that_changes_is_parsed_anew():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    layer = torch.nn.Module()
    on_regard.attention(layer, q, k, v, mask)
    mask[..., 3:] = False
    y, _ = on_regard.attention(layer, q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(y.transpose(1, 2), expected)


def test_a_bias_in_the_mask_learns():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    y, _ = on_regard.attention(torch.nn.Module(), q, k, v, bias)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    (grad,), (wanted,) = (torch.autograd.grad(x.square().sum(), bias) for x in (y, expected))
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generation_is_that_of_eager_attention(padding, more):
    model = language_model().eval()
    inputs = zoo.padded(left=padding == "left")
    arguments = {**inputs, "max_new_tokens": 6, "do_sample": False, **more}
    ours = model.generate(**arguments)
    model.set_attn_implementation("eager")
    assert ours.tolist() == model.generate(**arguments).tolist()


def floats(model, inputs):
    """What the model puts out, and the gradients of its parameters for a fixed random direction."""
    model.zero_grad()
    out = model(**inputs)
    tensors = [x for x in out.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    torch.manual_seed(0)
    loss = sum(((x * torch.randn_like(x)).mean() for x in tensors if x.requires_grad), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    return [x.detach() for x in tensors], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(ours, expected, share):
    limit = share * max(1.0, expected.abs().max().item()) if expected.numel() else 0
    return (ours.shape == expected.shape and not ours.numel()) or (ours - expected).abs().max().item() <= limit


def verdict(name):
    """Whether an architecture on regard is itself: its output and its gradients those of eager attention."""
    from support import architectures

    if (ready := architectures.prepared(name)) is None:
        return "left out"
    model, inputs, _ = ready
    try:
        eager = architectures.with_attention(model, "eager")
        (expected, wanted), (again, _) = floats(eager, inputs), floats(eager, inputs)
    except Exception:
        return "no eager attention"
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(expected, again, strict=True)):
        return "random"
    try:
        model = architectures.with_attention(model, "regard")
    except KeyError as error:
        return "refused" if error.args == ("regard",) else "raises"
    with on_regard.statistics("entropy") as by_layer:
        y, grads = floats(model, inputs)
    if not all(close(a.nan_to_num(), b.nan_to_num(), 1e-4) for a, b in zip(y, expected, strict=True)):
        return "wrong"
    if not all(n in grads and close(grads[n], wanted[n], 1e-3) for n in wanted):
        return "wrong gradient"
    return "equal" if by_layer else "its own attention"


@pytest.mark.slow
def test_every_architecture_has_the_output_and_gradients_of_eager_attention():
    from support import architectures

    transformers.logging.set_verbosity_error()
    verdicts = architectures.verdicts(verdict)
    print({kind: len(names) for kind, names in verdicts.items()})
    assert verdicts["wrong"] in ([], ["paligemma"])  # transformers' own SDPA differs from its eager attention there
    assert verdicts["wrong gradient"] == []
    assert verdicts["raises"] == []
    assert len(verdicts["equal"]) >= 200
