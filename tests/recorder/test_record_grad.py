"""Recorded weights and autograd: part of the graph with grad=True, refused by name where there is none, else an error."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.recorder import RefusedWarning


class Fused(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.heads(x)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


def softmax_weights(q, k):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


class Eager(Fused):
    def attend(self, q, k, v):
        return softmax_weights(q, k) @ v


@pytest.fixture
def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Stack(nn.Sequential):
    """A model with a forward of its own, not one of PyTorch's containers."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def net_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind()).double().train()


def entropy_of(w):
    return -(w * torch.where(w > 0, w, 1).log()).sum(-1)


def expected_gradients(net, x):
    total = x.new_zeros(())
    for layer in net:
        q, k, _ = layer.heads(x)
        total = total + entropy_of(softmax_weights(q, k)).sum()
        x = layer(x)
    return torch.autograd.grad(total, list(net.parameters()))


@pytest.mark.parametrize("keep", ["factors", "statistics"])
@pytest.mark.parametrize("kind", [Fused, Eager])
def test_entropy_reaches_the_parameters(kind, keep, x):
    net = net_of(kind)
    expected = expected_gradients(net, x)
    with regard.record(net, grad=True, keep=keep) as seen:
        net(x)
    if keep == "statistics":
        total = sum(layer.statistics["entropy"].sum() for layer in seen.layers)
    else:
        total = sum(seen[n].entropy().sum() for n in range(2))
    total.backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=1e-7)


def test_a_term_of_the_loss(x):
    net = net_of(Fused)
    with regard.record(net, grad=True) as seen:
        loss = net(x).pow(2).mean()
    (loss - 0.1 * seen[1].entropy().mean()).backward()
    with_term = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).pow(2).mean().backward()
    assert any(not torch.allclose(a, p.grad) for a, p in zip(with_term, net.parameters(), strict=True))


def test_layers_of_regard_with_a_trained_score(x):
    net = regard.nn.SelfAttention(8, 2).double()
    with regard.record(net, grad=True) as seen:
        net(x)
    seen[0].entropy().sum().backward()
    assert sum(p.grad.abs().sum() for p in net.parameters() if p.grad is not None) > 0


def test_a_learned_bias_is_part_of_the_graph(x):
    class Biased(Fused):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, 2, 5, 5))

        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)

    net = Biased().double()
    with regard.record(net, grad=True) as seen:
        net(x)
    seen[0].entropy().sum().backward()
    q, k, _ = net.heads(x)
    bias = net.bias.detach().requires_grad_()
    entropy_of((q @ k.mT / 2 + bias).softmax(-1)).sum().backward()
    torch.testing.assert_close(net.bias.grad, bias.grad, atol=1e-9, rtol=1e-7)


# Refused by name.


def refusal(net, x, run):
    with pytest.warns(RefusedWarning, match="grad=True, and"), regard.record(net, grad=True) as seen:
        run(net, x)
    assert len(seen) == 0
    assert {name for name, _ in seen.refused} == {"0", "1"}
    return seen.refused[0][1]


@pytest.mark.parametrize("kind", [Fused, Eager])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind, mode, x):
    def run(net, x):
        with mode():
            net(x)

    assert "gradients are off" in refusal(net_of(kind), x, run)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant, x):
    def run(net, x):
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    assert "activation checkpoint" in refusal(net_of(Fused), x.requires_grad_(), run)


def test_on_the_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)
    with pytest.warns(RefusedWarning, match=r"C\+\+ path has no gradients"), regard.record(net, grad=True) as seen:
        net(torch.randn(1, 4, 8))
    assert len(seen) == 0
    assert len(seen.refused) == 2


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::regard.recorder.RefusedWarning")
@pytest.mark.parametrize("of", ["the model", "a container", "a block"])
def test_compiled_code(of, x):
    if of == "a container" and torch.__version__ < (2, 7):
        pytest.skip(
            "torch.compile of 2.6 leaves no mark of a container's code, and its graph calls no attention by name"
        )
    torch._dynamo.reset()
    net = net_of(Fused)
    net = Stack(*net) if of == "the model" else net
    run = net
    if of == "a block":
        forward = torch.compile(net[1].forward, backend="aot_eager")
        net[1].forward = lambda x: forward(x)
    else:
        run = torch.compile(net, backend="aot_eager")
    run(x)
    with regard.record(net, grad=True) as seen:
        run(x)
    named = {name for name, _ in seen.refused}
    assert named == ({"1"} if of == "a block" else {""}) or named == {"0", "1"}
    assert all("compile" in reason for _, reason in seen.refused)
    assert len(seen) == (1 if of == "a block" else 0)


def test_a_file_has_no_graph(tmp_path):
    with pytest.raises(ValueError, match="grad=True"):
        regard.record(nn.Linear(2, 2), grad=True, path=tmp_path / "a.regard")


def test_a_recording_with_a_graph_is_saved(x, tmp_path):
    net = net_of(Fused)
    with regard.record(net, grad=True) as seen:
        net(x)
    seen.save(tmp_path / "a.regard")
    loaded = regard.load(tmp_path / "a.regard")
    torch.testing.assert_close(loaded[0].dense(), seen[0].dense().detach(), atol=1e-12, rtol=0)


# Without grad=True.


def numbers(net, x, **options):
    with regard.record(net, **options) as seen:
        net(x)
    return seen


@pytest.mark.parametrize(
    "ask",
    [
        lambda seen: seen[0].entropy().sum(),
        lambda seen: seen[0, 1].topk(2).values[0, 0, 0],
        lambda seen: seen[0, 1, 0].dense().mean() * 3,
        lambda seen: 1 - seen[0][0, 0, 1, 1],
        lambda seen: seen[0, 1, 0].row(1)[0],
    ],
)
def test_backward_says_what_to_do(ask, x):
    net = net_of(Fused)
    number = ask(numbers(net, x))
    for loss in (number, number + net(x).sum(), net(x).sum() + number):
        with pytest.raises(RuntimeError, match=r"regard.record\(model, grad=True\)"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"regard.record\(model, grad=True\)"):
            torch.autograd.grad(loss, list(net.parameters()))
    (net(x).sum() + number.detach()).backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [Fused, Eager])
def test_backward_of_a_recording_without_gradients_says_what_to_do(kind, mode, x):
    net = net_of(kind)
    with mode():
        seen = numbers(net, x)
    for number in (seen[0].entropy().sum(), seen[0].dense().mean(), seen.passes[0].layers[1].weights.lse().sum()
                   if kind is Fused else seen[1].entropy().sum()):  # fmt: skip
        for loss in (number, 3 * number.abs()):
            with pytest.raises(RuntimeError, match=r"regard.record\(model, grad=True\)"):
                loss.backward()
            with pytest.raises(RuntimeError, match=r"regard.record\(model, grad=True\)"):
                torch.autograd.grad(loss, list(net.parameters()))
        (net(x).sum() + number).backward()  # a constant on purpose


def test_numbers_of_a_recording_go_anywhere(x):
    """Into other matrices, comparisons and losses, like any tensor without a gradient."""
    with torch.no_grad():
        seen = numbers(net_of(Fused), x)
    w = seen[0].dense()
    torch.testing.assert_close(regard.Weights.from_dense(w).entropy(), seen[0].entropy())
    assert (seen[0].kl(seen[1]) >= 0).all()
    v = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (w @ v).sum().backward()
    torch.testing.assert_close(v.grad, w.sum((0, 1, 2))[:, None].expand(-1, 3).detach())
    (grad,) = torch.autograd.grad((w @ v).sum(), v)
    torch.testing.assert_close(grad, v.grad)


def test_backward_of_statistics_says_what_to_do(x):
    seen = numbers(net_of(Fused), x, keep="statistics")
    with pytest.raises(RuntimeError, match=r"grad=True"):
        seen.layers[0].statistics["entropy"].sum().backward()


def test_numbers_are_plain_to_everything_else(x):
    net = net_of(Fused)
    entropy = numbers(net, x)[0].entropy()
    with torch.no_grad():
        plain = numbers(net, x)[0].entropy()
    assert type(plain) is torch.Tensor
    assert type(entropy.detach()) is torch.Tensor
    assert repr(entropy) == repr(plain)
    assert entropy.tolist() == plain.tolist()
    assert entropy.numpy().shape == (2, 2, 5)
    buffer = io.BytesIO()
    torch.save(entropy, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), plain)
    assert torch.equal(copy.deepcopy(entropy), plain)


@pytest.mark.parametrize("gradients", [True, False])
def test_what_recorded_numbers_choose_is_the_users_own(gradients, x):
    """Positions and flags have no gradient: they index parameters and inputs, which train as ever."""
    net = net_of(Fused)
    with torch.set_grad_enabled(gradients):
        seen = numbers(net, x)
    received = seen[0].received()[0, 0]
    largest, at = received.sort(descending=True)
    assert type(largest) is not torch.Tensor
    for chosen in (
        at[:2],
        received.topk(2).indices,
        received > 0.5,
        received.argmax(),
        received.max(-1)[1],
        received.argsort(),
    ):
        assert type(chosen) is torch.Tensor
        rows = x[0][chosen]
        assert type(rows) is torch.Tensor
        net.zero_grad()
        net(rows.reshape(1, -1, 8)).sum().backward()
        assert net[0].qkv.weight.grad is not None


def test_a_cache_is_evicted_by_recorded_scores_and_recorded_again():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None
    )
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(1, 30, (1, 9))
    with torch.no_grad(), regard.record(model) as seen:
        cache = model(ids, use_cache=True).past_key_values
    stay = regard.kv.evict(cache, [regard.kv.h2o(layer.weights) for layer in seen.layers], 4)
    assert type(cache.layers[0].keys) is torch.Tensor
    with torch.no_grad(), regard.record(model) as step:
        model(torch.tensor([[7]]), past_key_values=cache)
    assert not step.refused
    assert step[1].shape == (1, 2, 1, 5)
    assert stay[1].shape == (1, 2, 4)


def test_values_keep_their_own_gradient(x):
    seen = numbers(net_of(Fused), x)
    v = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (seen[0] @ v).sum().backward()
    torch.testing.assert_close(v.grad, seen[0].received().sum((0, 1))[:, None].expand(-1, 3).detach())


@pytest.mark.parametrize("gradients", [True, False])
def test_numbers_of_a_recording_are_written_like_any_other(gradients: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)
    with torch.set_grad_enabled(gradients), regard.record(model) as seen:
        model(x, x, x)
    entropy = seen[0].entropy()[0, 0, 0]
    assert f"{entropy:.3f}" == f"{entropy.item():.3f}"
    assert f"{entropy}" == str(entropy.item())
    assert float(entropy) == entropy.item() == entropy.numpy()
