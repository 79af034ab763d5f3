"""Nothing wrong in silence: what a model does beside plain attention is recorded right, or named."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows

import regard
from regard.recorder import RefusedWarning
from regard.recorder.hooks.call_site import looks_like_attention
from support.toy_models import Attention, hooks_of


def model(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*[Attention() for _ in range(layers)]).eval()


def expected_weights(layer, x):
    q, k, _ = layer.heads(x)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


@pytest.fixture
def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


# Higher-order operators.


class AddOne(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


HIGHER_ORDER = {
    "vmap": lambda x: torch.vmap(AddOne.apply)(x),
    "grad": lambda x: torch.func.grad(lambda t: AddOne.apply(t).sum())(x),
    "cond": lambda x: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)),
    "while_loop": lambda x: torch._higher_order_ops.while_loop(
        lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.tensor(0), x)
    )[1],
    "scan": lambda x: torch._higher_order_ops.scan(lambda c, t: (c + t, c * 1), torch.zeros_like(x[0]), x)[1],
    "map": lambda x: map_rows(lambda t: t + 1, x),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_higher_order_operators_run_through(name, x):
    operator = HIGHER_ORDER[name]
    net = Attention()
    net.register_forward_hook(lambda module, args, y: operator(y))
    with torch.no_grad():
        plain = net(x)
        with regard.record(net) as seen:
            assert torch.equal(net(x), plain)
    assert len(seen) == 1


# torch.compile.


def truth(net, x):
    weights = []
    with torch.no_grad():
        for layer in net:
            weights.append(expected_weights(layer, x))
            x = layer(x)
    return weights


def compiled_outside(net):
    return torch.compile(net)


def compiled_in_place(net):
    net.compile()
    return net


def compiled_forward(net):
    net.forward = torch.compile(net.forward)
    return net


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::regard.recorder.RefusedWarning")
@pytest.mark.parametrize("way", [compiled_outside, compiled_in_place, compiled_forward])
@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model_is_recorded_right_or_named(way, before, x):
    """By the default backend, which reuses buffers without counting their versions."""
    torch._dynamo.reset()
    net = model()
    weights = truth(net, x)
    run = way(net)
    with torch.no_grad():
        if before:
            run(x)
        with regard.record(net) as seen:
            run(x)
    if len(seen):
        for layer, w in zip(seen.layers, weights, strict=True):
            torch.testing.assert_close(layer.weights.dense(), w, atol=1e-5, rtol=1e-5)
        assert [layer.name for layer in seen.layers] == ["0", "1", "2"]
    else:
        assert any("torch.compile" in reason for _, reason in seen.refused)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_compiled_block_inside_is_copied(x):
    """One compiled attention among others: its buffers are written over by the time the block ends."""
    torch._dynamo.reset()
    net = model()
    weights = truth(net, x)
    forward = torch.compile(net[1].forward)
    net[1].forward = lambda x: forward(x)
    with torch.no_grad():
        net(x)
        with regard.record(net) as seen:
            net(x)
    for layer in seen.layers:
        torch.testing.assert_close(layer.weights.dense(), weights[int(layer.name)], atol=1e-5, rtol=1e-5)
    assert {layer.name for layer in seen.layers} | {name for name, _ in seen.refused} == {"0", "1", "2"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::regard.recorder.RefusedWarning")
def test_a_block_that_compiles_itself_is_recorded_or_named_not_both(x):
    torch._dynamo.reset()
    net = model()
    weights = truth(net, x)
    net[0].compile()
    with torch.no_grad():
        plain = net(x)
        for _ in range(2):
            with regard.record(net) as seen:
                assert torch.equal(net(x), plain)
            recorded, refused = {layer.name for layer in seen.layers}, {name for name, _ in seen.refused}
            assert recorded | refused == {"0", "1", "2"}
            assert not recorded & refused
            for layer in seen.layers:
                torch.testing.assert_close(layer.weights.dense(), weights[int(layer.name)], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("way", [compiled_outside, compiled_in_place, compiled_forward])
def test_watching_a_compiled_model_gives_numbers_or_a_warning(way, x, monkeypatch):
    torch._dynamo.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: compile(f, backend="aot_eager", **more))
    monkeypatch.setattr(
        nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", torch.compile(self._call_impl))
    )
    net = model().train()
    run = way(net)
    run(x)
    for watched in (net, run):
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", RefusedWarning)
            with regard.watch(watched, every=1) as watching:
                run(x).sum().backward()
        if watching.numbers():
            assert {name.split("/")[0] for name in watching.numbers()} == {"0", "1", "2"}
        else:
            assert any("torch.compile" in str(message.message) for message in messages)


# Other models.


def test_another_model_called_inside_is_not_taken_for_ours(x):
    teacher = Attention()

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = Attention()

        def forward(self, x):
            return self.own(x)

        def distil(self, x):
            return self(x) - teacher(x)

    student = Student()
    with torch.no_grad(), regard.record(student) as seen:
        student.distil(x)
    assert [layer.name for p in seen.passes for layer in p.layers] == ["own"]
    torch.testing.assert_close(seen[0].dense(), expected_weights(student.own, x))


# Attention that is written out.


class TwoDirections(nn.Module):
    def forward(self, q, k, v, u):
        a = q @ k.mT
        back = a.mT.softmax(-1)
        forth = a.softmax(-1)
        return forth @ v, back @ u


def test_two_softmaxes_open_at_once_are_two_layers():
    q, k, v, u = (torch.randn(1, 2, n, 4) for n in (5, 7, 7, 5))
    net = TwoDirections()
    with regard.record(net) as seen:
        net(q, k, v, u)
    torch.testing.assert_close(seen.layers[0].weights.dense(), (q @ k.mT).softmax(-1))
    torch.testing.assert_close(seen.layers[1].weights.dense(), (q @ k.mT).mT.softmax(-1))


class Differential(nn.Module):
    def forward(self, a, b, v):
        return ((a @ a.mT).softmax(-1) - 0.5 * (b @ b.mT).softmax(-1)) @ v


def test_differential_attention_is_named():
    a, b, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    net = Differential()
    with pytest.warns(RefusedWarning, match="differential attention"), regard.record(net) as seen:
        net(a, b, v)
    assert len(seen) == 0


# False alarms.


class Block(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn


@pytest.mark.parametrize(
    "part",
    [
        nn.LayerNorm(8),
        nn.Identity(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1), nn.Sigmoid()),
        type("RMSNorm", (nn.LayerNorm,), {})(8),
    ],
    ids=lambda part: type(part).__name__,
)
def test_no_false_alarm_by_name(part):
    assert not looks_like_attention(part, "h.0.attn")
    assert not looks_like_attention(part, "attention")


def test_attention_by_name_is_still_suspected():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    assert looks_like_attention(Mixer(), "blocks.0.attn")
    assert not looks_like_attention(Mixer(), "blocks.0.mlp")
    assert looks_like_attention(nn.MultiheadAttention(8, 2))
    for name in (
        "SelfAttention",
        "SqueezeBertSelfAttention",
        "SegformerEfficientSelfAttention",
        "Conv1DAttn",
        "GatedDeltaNet",
    ):
        assert looks_like_attention(type(name, (nn.Module,), {})())
    for name in ("LlamaRMSNorm", "ConvDropoutLayerNorm", "SqueezeExcite", "SEModule", "DropPath"):
        assert not looks_like_attention(type(name, (Mixer,), {})(), "attn")


# Requests that do not fit.


def test_tokens_of_a_wrong_length_are_named(x):
    net = model()
    with pytest.warns(RefusedWarning, match="2 tokens fit no layer"), regard.record(net, tokens=["a", "b"]) as seen:
        net(x)
    assert len(seen) == 3


def test_unknown_layers_are_an_error_at_once():
    with pytest.raises(ValueError, match=r"no module of the model is named 'foo'"):
        regard.record(model(), layers=["foo"])


@pytest.mark.parametrize("layers", [[1, 7], [7]])
def test_a_layer_number_that_never_comes_is_named(layers, x):
    net = model()
    with pytest.warns(RefusedWarning, match=r"layers \[7\].*3 attention calls"), regard.record(net, layers=layers):
        net(x)


def test_a_recording_without_a_block_says_so():
    recording = regard.record(model())
    assert "with regard.record" in repr(recording)
    with pytest.raises(TypeError, match="block"):
        recording[0]
    with pytest.warns(RefusedWarning, match="it is a block"):
        del recording


def test_layers_keep_their_numbers(x, tmp_path):
    net = model()
    with regard.record(net, layers=[2]) as seen:
        net(x)
    assert seen[2].shape == (2, 2, 5, 5)
    assert seen[-1].shape == (2, 2, 5, 5)
    with pytest.raises(IndexError, match=r"layers \[2\] were recorded; got layer 0"):
        seen[0]
    assert [row.layer for row in seen.heads("entropy", item=0)] == [2, 2]
    seen.save(tmp_path / "a.regard")
    assert regard.load(tmp_path / "a.regard").layers[0].index == 2


# Copies.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_recording_and_a_layer(copied, x, tmp_path):
    net = model()
    with regard.record(net, values=True) as seen:
        net(x)
    twin = copied(seen)
    layer = copied(seen.layers[1])
    for a, b in zip(seen.layers, twin.layers, strict=True):
        assert torch.equal(a.weights.dense(), b.weights.dense())
        assert torch.equal(a.values, b.values)
    assert torch.equal(layer.weights.dense(), seen[1].dense())
    with regard.record(net, path=tmp_path / "a.regard") as spilled:
        net(x)
    assert torch.equal(copied(spilled)[1].dense(), seen[1].dense())
    assert torch.equal(copied(regard.load(tmp_path / "a.regard"))[1].dense(), seen[1].dense())


def test_a_shallow_copy_still_notices_writes(x):
    net = model(1)
    with regard.record(net) as seen:
        net(x)
    shallow = copy.copy(seen.layers[0].saved)
    seen.layers[0].saved.q.zero_()
    with pytest.raises(RuntimeError, match="in place"):
        shallow.check()
    with pytest.raises(RuntimeError, match="in place"):
        copy.deepcopy(seen)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("block", [regard.record, lambda net: regard.watch(net, every=1)], ids=["record", "watch"])
def test_copies_of_a_model_inside_a_block(copied, block, x):
    net = model().train()
    with block(net):
        plain = net(x)
        other = copied(net)
        assert torch.equal(other(x), plain)
    assert hooks_of(net) == 0
    other(x)
    assert hooks_of(other) == 0


# Padding.


def test_padding_rows_are_left_out_of_averages():
    torch.manual_seed(0)
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1, enable_nested_tensor=False
    ).train()
    x = torch.randn(2, 20, 8)
    lengths = torch.tensor([20, 3])
    hidden = torch.arange(20) >= lengths[:, None]
    with regard.watch(net, every=1) as watching:
        net(x, src_key_padding_mask=hidden)
    with regard.record(net) as seen:
        net(x, src_key_padding_mask=hidden)
    with regard.record(net, keep="statistics") as numbers:
        net(x, src_key_padding_mask=hidden)
    entropy = seen[0].entropy()
    real = torch.cat([entropy[0], entropy[1, :, :3]], -1)
    share = torch.cat([entropy[0] / torch.tensor(20.0).log(), entropy[1, :, :3] / torch.tensor(3.0).log()], -1)
    torch.testing.assert_close(watching.layers["layers.0.self_attn"]["entropy_share"], share.mean(-1).detach())
    by_head = {row.head: row.entropy for row in seen.summary()}
    torch.testing.assert_close(torch.tensor([by_head[0], by_head[1]]), real.mean(-1).detach())
    of_numbers = {row.head: row.value for row in numbers.heads("entropy")}
    torch.testing.assert_close(torch.tensor([of_numbers[0], of_numbers[1]]), real.mean(-1).detach())


def test_entropy_is_that_of_the_weights(x):
    net = model()
    with regard.record(net) as seen:
        net(x)
    for row in seen.heads("entropy", item=0):
        assert row.value == pytest.approx(seen[row.layer, row.head, 0].entropy().mean().item(), abs=1e-6)


# transformers.


def test_an_eager_window_cache_is_stitched_or_named():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    net = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(1, 50, (1, 4))
    with pytest.warns(RefusedWarning, match="a cache that keeps a window"), regard.record(net) as seen:
        net.generate(ids, max_new_tokens=10, do_sample=False)
    assert seen.refused


def test_an_assistant_is_not_taken_for_the_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)

    def llama(layers):
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
            num_key_value_heads=2, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()

    net, assistant = llama(2), llama(1)
    ids = torch.randint(1, 50, (1, 4))
    with regard.record(net) as seen:
        net.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=assistant)
    names = {layer.name for p in seen.passes for layer in p.layers}
    assert names == {f"model.layers.{n}.self_attn" for n in range(2)}


# Small things that raised, or misled.


def test_a_token_of_a_batch_says_which_index_is_missing(x):
    net = model()
    with regard.record(net, tokens=list("abcde")) as seen:
        net(x)
    with pytest.raises(KeyError, match=r"seen\[layer, head, 0\]"):
        seen[1, 1]["a", "b"]
    torch.testing.assert_close(seen[1, 1, 0]["a", "b"], seen[1].dense()[0, 1, 0, 1], rtol=0, atol=1e-6)


def test_a_summary_of_statistics(x):
    net = model()
    with regard.record(net, keep="statistics") as numbers:
        net(x)
    with regard.record(net) as seen:
        net(x)
    for row, expected in zip(numbers.summary(), seen.summary(), strict=True):
        assert row.entropy == pytest.approx(expected.entropy, abs=1e-5)
        assert row.sink == pytest.approx(expected.sink, abs=1e-5)
        assert row.peak != row.peak  # largest weights were not saved


def test_rollout_of_a_decoder_token():
    net = nn.Transformer(8, 2, 3, 2, 16, 0.0, batch_first=True).eval()
    source, target = torch.randn(1, 5, 8), torch.randn(1, 4, 8)
    with torch.no_grad(), regard.record(net, tokens=(list("abcde"), list("wxyz"))) as seen:
        net(source, target)
    assert seen.rollout("a").shape == (5,)
    assert seen.rollout("x").shape == (4,)
    with pytest.raises(KeyError, match="'a' 'b' 'c' 'd' 'e'; and 'w' 'x' 'y' 'z'"):
        seen.rollout("q")
    with pytest.raises(ValueError, match=r"several stacks of layers, decoder, encoder"):
        seen.rollout(2)
    assert seen.select(name="decoder").rollout(2).shape == (4,)
