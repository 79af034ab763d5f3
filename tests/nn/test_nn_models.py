"""The law of whole models: blocks add to a residual stream, caches change nothing, torch.nn's weights fit both ways."""

from __future__ import annotations

import functools
import inspect
import re
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import regard
from regard.core import autograd
from regard.nn import (
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    FeedForward,
    LanguageModel,
    Probe,
    SelfAttention,
    TextEncoder,
    Translator,
)
from regard.nn.options import AttentionOptions, BlockOptions, ModelOptions

B, T, DIM, H = 3, 7, 20, 5


# torch.nn, both ways.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_of_torch_comes_and_goes(bias, batch_first):
    mha = nn.MultiheadAttention(DIM, H, bias=bias, batch_first=batch_first, dropout=0.3).eval()
    if bias:
        nn.init.normal_(mha.in_proj_bias)
        nn.init.normal_(mha.out_proj.bias)
    x = torch.randn(B, T, DIM)
    inputs = x if batch_first else x.transpose(0, 1)
    want, weights = mha(inputs, inputs, inputs, average_attn_weights=False)
    want = want if batch_first else want.transpose(0, 1)
    layer = SelfAttention.from_torch(mha)
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.weights(x).dense(), weights)
    back = layer.to_torch()
    torch.testing.assert_close(back(x, x, x)[0], want)
    assert back.batch_first
    assert not back.training


@pytest.mark.parametrize("kdim", [DIM, 9])
def test_cross_attention_comes_and_goes(kdim):
    mha = nn.MultiheadAttention(DIM, H, kdim=kdim, vdim=kdim, batch_first=True)
    x, memory = torch.randn(B, T, DIM), torch.randn(B, 4, kdim)
    layer = CrossAttention.from_torch(mha)
    torch.testing.assert_close(layer(x, memory), mha(x, memory, memory)[0])
    torch.testing.assert_close(layer.to_torch()(x, memory, memory)[0], mha(x, memory, memory)[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", nn.functional.silu, nn.GELU()], ids=["relu", "gelu", "a function", "a module"]
)
@pytest.mark.parametrize("bias", [True, False])
def test_an_encoder_layer_of_torch_comes_and_goes(norm_first, activation, bias):
    theirs = nn.TransformerEncoderLayer(
        DIM, H, 31, 0.2, activation, layer_norm_eps=1e-3, batch_first=True, norm_first=norm_first, bias=bias
    ).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(B, T, DIM)
    block = Block.from_torch(theirs)
    assert block.dropout.p == 0.2
    torch.testing.assert_close(block(x), theirs(x), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(block.to_torch()(x), theirs(x), atol=2e-5, rtol=1e-4)


def test_a_causal_layer_of_torch_is_one_with_a_mask():
    theirs = nn.TransformerEncoderLayer(DIM, H, 31, batch_first=True).eval()
    x = torch.randn(B, T, DIM)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    want = theirs(x, src_mask=mask, is_causal=True)
    torch.testing.assert_close(Block.from_torch(theirs, causal=True)(x), want, atol=2e-5, rtol=1e-4)
    lengths = torch.tensor([7, 4, 2])
    hidden = torch.arange(T) >= lengths[:, None]
    mine = Block.from_torch(theirs)(x, mask=regard.padding(lengths))
    want = theirs(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(mine[~hidden], want[~hidden], atol=2e-5, rtol=1e-4)


NOT_TORCH = [
    (lambda: SelfAttention(DIM, H, kv_heads=1).to_torch(), r"heads of size dim // heads"),
    (lambda: SelfAttention(DIM, H, key_size=3).to_torch(), r"heads of size dim // heads"),
    (lambda: SelfAttention(DIM, H, output=False).to_torch(), r"projections and W_o"),
    (lambda: SelfAttention(DIM, H, score="bilinear").to_torch(), r"plain scaled dot product"),
    (lambda: SelfAttention(DIM, H, positions="sinusoidal").to_torch(), r"no positions of its own"),
    (lambda: Block(DIM, H, norm="rms").to_torch(), r"layer norms"),
    (lambda: Block(DIM, H, activation="swiglu").to_torch(), r"no gate"),
    (lambda: Block(DIM, H, cross=True).to_torch(), r"no cross-attention"),
    (lambda: SelfAttention.from_torch(nn.MultiheadAttention(DIM, H, add_zero_attn=True)), r"add_zero_attn add keys"),
    (lambda: SelfAttention.from_torch(nn.MultiheadAttention(DIM, H, kdim=3, vdim=3)), r"use CrossAttention"),
    (lambda: CrossAttention.from_torch(nn.MultiheadAttention(DIM, H, kdim=3, vdim=4)), r"come from one memory"),
    (lambda: Block.from_torch(nn.TransformerEncoderLayer(DIM, H, activation=nn.functional.elu)), r"relu, gelu or silu"),
    (lambda: Block(DIM, H, norm="batch"), r"norm must be \"layer\" or \"rms\"; got 'batch'"),
    (lambda: FeedForward(DIM, activation="sin"), r"activation must be one of gelu.*got 'sin'"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "message"), NOT_TORCH, ids=[message[:30] for _, message in NOT_TORCH])
def test_what_does_not_fit_is_said(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake()


@pytest.mark.parametrize("layer", [nn.TransformerDecoderLayer(DIM, H), nn.Linear(3, 3)])
def test_a_layer_that_is_no_encoder_layer_is_refused(layer):
    with pytest.raises(TypeError, match=rf"takes an nn\.TransformerEncoderLayer; got {type(layer).__name__}"):
        Block.from_torch(layer)


def test_a_causal_block_gives_its_mask_at_every_call_of_torch():
    block = Block(DIM, H, causal=True).eval()
    x, mask = torch.randn(B, T, DIM), nn.Transformer.generate_square_subsequent_mask(T)
    theirs = block.to_torch()
    torch.testing.assert_close(theirs(x, src_mask=mask, is_causal=True), block(x), atol=2e-5, rtol=1e-4)
    assert "pass it a causal mask at every call" in Block.to_torch.__doc__


def test_float64_weights_come_and_go_as_they_are():
    theirs = nn.TransformerEncoderLayer(DIM, H, 31, batch_first=True, dtype=torch.float64).eval()
    theirs.norm1.eps, theirs.norm2.eps = 1e-3, 0.1
    block = Block.from_torch(theirs)
    assert torch.equal(block.feed_forward.inner.weight, theirs.linear1.weight)
    assert torch.equal(block.attention.query.weight, theirs.self_attn.in_proj_weight[:DIM])
    back = block.to_torch()
    assert (back.norm1.eps, back.norm2.eps) == (1e-3, 0.1)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    torch.testing.assert_close(block(x), theirs(x), atol=1e-13, rtol=1e-13)
    cross = nn.MultiheadAttention(DIM, H, kdim=9, vdim=9, dtype=torch.float64)
    again = CrossAttention.from_torch(cross).to_torch()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in cross.state_dict().items())


def test_cross_attention_of_a_block_has_the_options_of_its_self_attention():
    block = Block(10, heads=3, key_size=4, cross=True, causal=True, positions="rotary")
    assert block.cross.key_size == 4
    assert block(torch.randn(2, 5, 10), torch.randn(2, 7, 10)).shape == (2, 5, 10)
    block = Decoder(12, heads=4, layers=1, kv_heads=2, score="bilinear").blocks[0]
    assert block.cross.kv_heads == 2
    assert type(block.cross.score()) is regard.Bilinear
    own, other = (list(part.score.parameters()) for part in (block.attention, block.cross))
    assert len(own) == len(other) == 1
    assert own[0] is not other[0], "each learns its own"


def test_what_fills_up_is_what_comes_after_the_last_token():
    model = Translator(31, dim=DIM, heads=2, layers=1).eval()
    assert model.lengths(torch.tensor([[3, 0, 5, 0], [0, 0, 0, 0], [1, 2, 3, 4]])).tolist() == [3, 0, 4]
    target = torch.tensor([[1, 4]])
    last = [model(torch.tensor([[3, 0, word, 0]]), target) for word in (5, 6)]
    assert not torch.allclose(*last), "the last real token is seen, whatever stands before it"
    torch.testing.assert_close(model(torch.tensor([[3, 0, 5]]), target), last[0])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Block(DIM, headz=3), "Block(...) has no option 'headz'; its options are dim, heads, hidden"),
        (lambda: Encoder(DIM, num_heads=3), "Encoder(...) has no option 'num_heads'"),
        (lambda: Decoder(DIM, layer=3), "Decoder(...) has no option 'layer'"),
        (lambda: LanguageModel(9, dims=16), "LanguageModel(...) has no option 'dims'"),
        (lambda: LanguageModel(9, causal=False), "LanguageModel(...) has no option 'causal'"),
        (lambda: Translator(9, n_heads=2), "Translator(...) has no option 'n_heads'"),
        (lambda: TextEncoder(9, contexts=16), "TextEncoder(...) has no option 'contexts'"),
        (lambda: SelfAttention(4).see(torch.ones(3, 4), topp=2), "see(...) has no option 'topp'"),
        (lambda: SelfAttention(4).see(torch.ones(3, 4), values=2), "see(...) has no option 'values'; its options are mask"),
        (lambda: CrossAttention(4).see(torch.ones(3, 4), torch.ones(3, 4), pol=2), "see(...) has no option 'pol'"),
    ],
)  # fmt: skip
def test_an_unknown_option_is_named_by_the_layer_that_was_called(make, text):
    with pytest.raises(TypeError, match=re.escape(text)) as error:
        make()
    near = re.search(r"Did you mean '(\w+)'\?", str(error.value))
    expected = {"headz": "heads", "num_heads": "heads", "layer": "layers", "dims": "dim", "n_heads": "heads"}
    expected |= {"contexts": "context", "topp": "topk", "pol": "pool"}
    (unknown,) = re.findall(r"no option '(\w+)'", text)
    assert (near and near[1]) == expected.get(unknown)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: LanguageModel(9, dim=8)(torch.tensor([[3, 9]])), IndexError, "ids must lie between 0 and 8, for a table of 9; got 3 … 9."),
        (lambda: Translator(9, dim=8)(torch.tensor([[-1]]), torch.tensor([[1]])), IndexError, "got -1 … -1."),
        (lambda: TextEncoder(9, dim=8)(torch.tensor([[1]]), segments=torch.tensor([[2]])), IndexError, "segments must lie between 0 and 1"),
        (lambda: LanguageModel(9, dim=8)(torch.ones(1, 2)), TypeError, "ids must be whole numbers, int64 or int32; got dtype torch.float32."),
        (lambda: SelfAttention("16"), TypeError, "dim must be a whole number; got '16'."),
        (lambda: SelfAttention(16.0, 2), TypeError, "dim must be a whole number; got 16.0."),
        (lambda: SelfAttention(16, heads=2.0), TypeError, "heads must be a whole number; got 2.0."),
        (lambda: Probe("entropy")[0], ValueError, "this probe has no results yet"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_model_is_named(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_every_option_that_is_handed_down_is_one_of_the_layer_below():
    """`check_layer_options` refuses what the TypedDicts lack, so these must have all."""

    def own(function):
        return {name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}

    attention, block = own(SelfAttention.__init__), own(Block.__init__)
    assert set(AttentionOptions.__annotations__) == attention - {"bias"}
    assert set(BlockOptions.__annotations__) == (attention | block)
    assert set(ModelOptions.__annotations__) == (attention | block) - {"positions", "causal", "dropout", "cross"}


# Blocks and stacks.


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_block_is_attention_and_feed_forward_on_residual_branches(norm_first, activation):
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    block = Block(DIM, H, norm="rms", norm_first=norm_first, activation=activation).double()
    f, g, m, n = block.attention, block.feed_forward, block.attention_norm, block.feed_forward_norm
    if norm_first:
        y = x + f(m(x))
        y = y + g(n(y))
    else:
        y = m(x + f(x))
        y = n(y + g(y))
    torch.testing.assert_close(block(x), y)


def test_dropout_is_on_the_residual_branches():
    x = torch.randn(B, T, DIM)
    block = Block(DIM, H, dropout=1.0 - 1e-7)
    torch.testing.assert_close(block(x), x)
    assert not torch.equal(block.eval()(x), x)


def test_a_decoder_sees_its_past_and_all_of_the_memory():
    x, memory = torch.randn(B, T, DIM), torch.randn(B, 4, DIM)
    decoder = Decoder(DIM, H, 2).eval()
    y = decoder(x, memory)
    later = x.clone()
    later[:, 4:] = 7.0
    torch.testing.assert_close(decoder(later, memory)[:, :4], y[:, :4])
    assert (decoder(x, memory + 1)[:, 0] - y[:, 0]).abs().max() > 1e-4
    mask = regard.padding([4, 2, 1])
    other = memory.clone()
    other[1, 2:] = other[2, 1:] = -5.0
    torch.testing.assert_close(decoder(x, memory, memory_mask=mask), decoder(x, other, memory_mask=mask))


def test_an_encoder_of_torch_layers_is_the_same_encoder():
    layer = nn.TransformerEncoderLayer(DIM, H, 31, batch_first=True, norm_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(DIM), enable_nested_tensor=False).eval()
    ours = Encoder(DIM, H, 2, hidden=31, activation="relu").eval()
    ours.blocks = nn.ModuleList(Block.from_torch(part) for part in theirs.layers)
    x = torch.randn(B, T, DIM)
    torch.testing.assert_close(ours(x), theirs(x), atol=2e-5, rtol=1e-4)


# Models.

KINDS = [{"positions": "rotary"}, {"positions": "learned", "norm": "rms"}, {"positions": "sinusoidal", "kv_heads": 1}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_language_model_with_a_cache_gives_the_same_numbers(kind):
    model = LanguageModel(31, dim=DIM, heads=2, layers=3, context=T, **kind).eval()
    ids = torch.randint(31, (B, T))
    full = model(ids)
    assert full.shape == (B, T, 31)
    cache = model.cache()
    parts = [model(ids[:, :3], cache), *(model(ids[:, t : t + 1], cache) for t in range(3, T))]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=1e-4)


def test_a_language_model_does_not_see_the_future():
    model = LanguageModel(31, dim=DIM, heads=2, layers=2).eval()
    ids = torch.randint(31, (B, T))
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 31
    torch.testing.assert_close(model(ids)[:, :5], model(changed)[:, :5])
    assert (model(ids)[:, 5] - model(changed)[:, 5]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_translator_writes_step_by_step_what_it_writes_at_once(kind):
    model = Translator(31, dim=DIM, heads=2, layers=2, **kind).eval()
    source, target = torch.randint(1, 31, (B, 6)), torch.randint(1, 31, (B, T))
    source[1, 4:] = source[2, 2:] = Translator.PAD
    full = model(source, target)
    memory, visible = model.encode(source)
    cache = model.decoder.cache()
    parts = [model.decode(target[:, t : t + 1], memory, visible, cache) for t in range(T)]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=1e-4)
    alone = model(source[2:, :2], target[2:])
    torch.testing.assert_close(full[2:], alone, atol=1e-5, rtol=1e-4)


def test_an_activation_checkpoint_that_recomputes_adds_nothing_to_a_probe():
    model, x = Encoder(DIM, heads=H, layers=3), torch.randn(B, T, DIM)
    gradients = []
    for checkpointed in (False, True):
        probe, y = Probe("entropy"), x
        for block in model.blocks:
            run = functools.partial(block, probe=probe)
            y = torch.utils.checkpoint.checkpoint(run, y, use_reentrant=False) if checkpointed else run(y)
        model.zero_grad()
        (y.square().mean() - 0.1 * sum(seen.entropy.mean() for seen in probe)).backward()
        assert len(probe) == 3
        assert probe.heads("entropy").shape == (3, H)
        gradients.append(model.blocks[0].attention.query.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_every_layer_answers_what_is_asked():
    model = Translator(31, dim=DIM, heads=2, layers=2).eval()
    probe = Probe("entropy", "max_score")
    model(torch.randint(1, 31, (B, 6)), torch.randint(1, 31, (B, T)), probe=probe)
    assert [tuple(seen.entropy.shape) for seen in probe] == [(B, 2, 6)] * 2 + [(B, 2, T)] * 4
    assert probe.heads("entropy").shape == (6, 2)


def test_training_step_compiles_into_one_graph():
    model = LanguageModel(31, dim=DIM, heads=2, layers=2, norm="rms", bias=False)
    ids = torch.randint(31, (B, T + 1))

    def loss_of(ids):
        probe = Probe("entropy", "max_score")
        logits = model(ids[:, :-1], probe=probe)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), probe.heads("entropy")

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, entropy = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(ids)
        loss.backward()
    graph = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    want, entropy_too = loss_of(ids)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(entropy, entropy_too)
    for mine, p in zip(graph, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_statistics_that_are_only_looked_at_cost_no_gradient(compiled, monkeypatch):
    model = LanguageModel(31, dim=16, heads=2, layers=1)
    ids = torch.randint(31, (B, T))
    flowed: list[set[str]] = []
    own = autograd.vjp

    def pull_back(problem, question, engine, answers, flowing, needs):
        flowed.append(set(flowing))
        return own(problem, question, engine, answers, flowing, needs)

    monkeypatch.setattr(autograd, "vjp", pull_back)

    def loss_of(ids):
        probe = Probe("lse", "entropy", "max_score")
        return model(ids, probe=probe).square().mean(), probe.heads("entropy"), probe.heads("max_score")

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (torch.compile(loss_of, fullgraph=True, backend="aot_eager") if compiled else loss_of)(ids)[0].backward()
    assert flowed == [{"y"}]


def test_lengths_may_change_inside_torch_compile():
    model = Translator(31, dim=16, heads=2, layers=1).eval()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        for n in (5, 7, 9):
            source, target = torch.randint(1, 31, (2, n)), torch.randint(1, 31, (2, n + 2))
            source[1, 3:] = Translator.PAD
            torch.testing.assert_close(compiled(source, target), model(source, target), atol=1e-5, rtol=1e-4)


def test_a_model_learns_what_only_attention_can():
    """Repeat what was said half a sequence ago: a word's neighbour tells nothing, looking back tells all."""
    torch.manual_seed(0)
    model = LanguageModel(16, dim=32, heads=2, layers=2, context=16)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(300):
        half = torch.randint(16, (32, 8))
        ids = torch.cat([half, half], 1)
        loss = nn.functional.cross_entropy(model(ids[:, :-1])[:, 8:].flatten(0, 1), ids[:, 9:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1, "chance is 2.77"
