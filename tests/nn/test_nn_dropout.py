"""Dropout of attention weights: the share that was asked for, the same in forward and backward, invisible to statistics."""

import functools

import pytest
import torch
from torch import nn

import regard
from regard.core import dropout as module
from regard.core.api import _sdpa_of_real_keys, try_sdpa
from regard.nn import Block, CrossAttention, Probe, SelfAttention

P = 0.4


def written_out(q, k, v, score, mask, p):
    """The textbook on the dense matrix, with the weights that `attend_with_dropout` drops after the same seed."""
    b, h, t = q.shape[:-3], q.shape[-3], torch.arange(q.shape[-2])
    seeds = torch.randint(2**62, (b.numel(), h, 1, 1)).reshape(*b, h, 1, 1)
    stays = module._drop(torch.zeros(*b, h, len(t), k.shape[-2]), t[:, None], torch.arange(k.shape[-2]), seeds, p) == 0
    w = regard.weights(q, k, score=score, mask=mask).dense()
    return (w * stays / (1 - p)) @ v.repeat_interleave(h // v.shape[-3], -3)


CASES = {
    "plain": ((2, 4), 4, regard.ScaledDot(), None),
    "causal, shared heads": ((2, 4), 2, regard.ScaledDot(), regard.causal()),
    "sink, two batch axes": ((3, 2, 4), 2, regard.ScaledDot().sink(torch.zeros(4)), None),
    "rows that see nothing, one sequence": ((4,), 4, regard.Dot(), regard.causal() & ~regard.window(0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_dense_matrix_with_the_same_weights_dropped(case):
    lead, groups, score, mask = CASES[case]
    torch.manual_seed(0)
    q = torch.randn(*lead, 7, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(*lead[:-1], groups, 7, size, dtype=torch.float64, requires_grad=True) for size in (8, 5))
    torch.manual_seed(1)
    y = module.attend_with_dropout(q, k, v, score, mask, None, regard.weights(q, k, score=score, mask=mask).lse(), P)
    torch.manual_seed(1)
    expected = written_out(q, k, v, score, mask, P)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), upstream) for x in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_whichever_row_column_head_or_sequence(p):
    torch.manual_seed(2)
    seeds = torch.randint(2**62, (4, 4, 1, 1))
    dropped = module._drop(torch.zeros(4, 4, 128, 128), torch.arange(128)[:, None], torch.arange(128), seeds, p) != 0
    spread = (p * (1 - p)) ** 0.5
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
        count = dropped[(slice(None),) * 4].numel() / dropped.double().mean(axes).numel()
        assert (dropped.double().mean(axes) - p).abs().max() < 5 * spread / count**0.5
    centred = dropped.double() - p
    neighbours = [
        (centred[:, :, 1:] * centred[:, :, :-1]),
        (centred[..., 1:] * centred[..., :-1]),
        centred[1:] * centred[:-1],
    ]
    for product in neighbours:  # neighbours, and sequences, are dropped independently
        assert product.mean().abs() < 5 * spread**2 / product.numel() ** 0.5


def test_a_layer_drops_while_training_by_the_generators_seed_and_never_in_eval():
    torch.manual_seed(3)
    layer, x = SelfAttention(16, heads=4, attention_dropout=P), torch.randn(2, 9, 16)
    plain = SelfAttention(16, heads=4)
    plain.load_state_dict(layer.state_dict())
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(layer(x))
    assert torch.equal(runs[0], runs[1])
    assert not torch.allclose(runs[0], runs[2])
    assert torch.equal(layer.eval()(x), plain(x))


def test_the_mean_over_many_seeds_is_the_output_without_dropout():
    torch.manual_seed(4)
    layer, x = SelfAttention(8, heads=2, attention_dropout=0.5), torch.randn(1, 6, 8)
    many = torch.stack([layer(x) for _ in range(400)]).detach()
    error = (many.mean(0) - layer.eval()(x)).abs()
    assert (error < 5 * many.std(0) / 400**0.5 + 1e-6).all()


def test_statistics_and_recordings_are_of_the_weights_before_dropout():
    torch.manual_seed(6)
    layer, x = SelfAttention(16, heads=4, causal=True, attention_dropout=P), torch.randn(2, 9, 16)
    plain = layer.weights(x)
    probe = Probe("entropy")
    torch.manual_seed(7)
    y = layer(x, probe=probe)
    torch.manual_seed(7)
    seen = layer.see(x, "entropy", "received")
    torch.testing.assert_close(seen.y, y)
    torch.testing.assert_close(probe[0].entropy, plain.entropy())
    torch.testing.assert_close(seen.received, plain.received())
    with torch.no_grad(), regard.record(layer) as recorded:
        layer(x)
    torch.testing.assert_close(recorded[0].dense(), plain.dense().detach())


def test_cross_attention_and_blocks_drop_too():
    torch.manual_seed(8)
    layer = CrossAttention(16, heads=4, attention_dropout=P)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
    first, second = layer(x, memory, regard.padding([9, 4])), layer(x, memory, regard.padding([9, 4]))
    assert not torch.allclose(first, second)
    block = Block(16, heads=4, cross=True, attention_dropout=P)
    assert block.attention.attention_dropout == block.cross.attention_dropout == P


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_pytorchs_attention_drops_the_same_share_of_single_weights(kind):
    """It computes attention with dropout on a GPU; with the unit vectors as values its output is the matrix."""
    torch.manual_seed(10)
    q, k = torch.randn(2, 3, 16, 8, 40).unbind()
    mask = {"none": None, "causal": regard.causal(), "padding": regard.padding([8] * 2 + [3])}[kind]
    fused = functools.partial(try_sdpa, score="scaled_dot", mask=mask)
    if kind == "padding":
        fused = functools.partial(_sdpa_of_real_keys, mask=mask, scale=None)
    y = fused(q, k, torch.eye(8).expand(3, 16, 8, 8), dropout=P)
    w = regard.weights(q, k, mask=mask).dense()
    torch.testing.assert_close(y, torch.where(y == 0, 0, w / (1 - P)))
    visible = w > 0
    share = float((y[visible] == 0).double().mean())
    assert abs(share - P) < 5 * (P * (1 - P) / int(visible.sum())) ** 0.5


def test_dropout_goes_to_torch_and_back():
    mha = nn.MultiheadAttention(16, 4, dropout=0.25, batch_first=True)
    assert SelfAttention.from_torch(mha).attention_dropout == 0.25
    assert CrossAttention.from_torch(mha).to_torch().dropout == 0.25
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.2, batch_first=True)
    layer.dropout.p = 0.3  # of the feed-forward network's hidden layer
    block = Block.from_torch(layer)
    assert (block.dropout.p, block.feed_forward.dropout.p) == (0.2, 0.3)
    back = block.to_torch()
    assert (back.self_attn.dropout, back.dropout1.p, back.dropout.p) == (0.2, 0.2, 0.3)


def test_the_hidden_layer_of_a_feed_forward_network_drops_while_training():
    torch.manual_seed(9)
    block, x = Block(16, heads=4, activation="swiglu", hidden_dropout=P), torch.randn(1, 64, 16)
    seen = []
    block.feed_forward.outer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    block(x)
    block.eval()(x)
    trained, plain = seen
    share = float((trained == 0).double().mean())
    assert abs(share - P) < 5 * (P * (1 - P) / trained.numel()) ** 0.5
    torch.testing.assert_close(trained, torch.where(trained == 0, 0, plain / (1 - P)))


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_a_share_outside_of_0_and_1_is_refused(p):
    with pytest.raises(ValueError, match=f"attention_dropout.*below 1; got {p}"):
        SelfAttention(16, attention_dropout=p)
