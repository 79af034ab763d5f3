"""The law of layers: each is the formula it says it is, tells the weights it uses, and keeps nothing."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import regard
from regard.nn import (
    Block,
    Cache,
    CrossAttention,
    LanguageModel,
    Learned,
    Probe,
    Rotary,
    SelfAttention,
    Sinusoidal,
)

B, T, DIM, H = 3, 7, 20, 5  # 20 = 5 heads of 4


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def test_without_parameters_it_is_basic_self_attention():
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    layer = SelfAttention(DIM, parameters=False)
    assert not list(layer.parameters())
    torch.testing.assert_close(layer(x), (x @ x.mT).softmax(-1) @ x)
    one_by_one = torch.stack(
        [sum(w * v for w, v in zip((x[0] @ x[0, i]).softmax(-1), x[0], strict=True)) for i in range(T)]
    )
    torch.testing.assert_close(layer(x[0]), one_by_one)


def test_one_head_without_output_is_the_six_steps():
    x = torch.randn(T, DIM, dtype=torch.float64)
    layer = SelfAttention(DIM, key_size=6, value_size=11, output=False).double()
    q, k, v = x @ layer.query.weight.T, x @ layer.key.weight.T, x @ layer.value.weight.T
    z = torch.zeros(T, 11, dtype=torch.float64)
    for i in range(T):
        scores = torch.stack([q[i] @ k[j] for j in range(T)]) / math.sqrt(6)
        w = scores.exp() / scores.exp().sum()
        z[i] = sum(w[j] * v[j] for j in range(T))
    torch.testing.assert_close(layer(x), z)


@pytest.mark.parametrize("kv_heads", [5, 1])
def test_heads_are_smaller_attentions_side_by_side(kv_heads):
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    layer = SelfAttention(DIM, H, kv_heads=kv_heads, key_size=6, value_size=3, bias=True).double()
    q, k, v = split(layer.query(x), H), split(layer.key(x), kv_heads), split(layer.value(x), kv_heads)
    k, v = (a.repeat_interleave(H // kv_heads, 1) for a in (k, v))
    y = (q @ k.mT / math.sqrt(6)).softmax(-1) @ v
    torch.testing.assert_close(layer(x), layer.output(y.transpose(1, 2).flatten(2)))


SCORES = ["dot", "scaled_dot", "cosine", "additive", "bilinear", regard.Gaussian(1.5), regard.ScaledDot().softcap(5.0)]


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("positions", [None, "rotary", "sinusoidal", "learned"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_weights_it_tells_are_those_it_uses(score, positions, causal):
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    layer = SelfAttention(DIM, H, score=score, positions=positions, causal=causal).double()
    w = layer.weights(x).dense()
    assert w.shape == (B, H, T, T)
    torch.testing.assert_close(w.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    if causal:
        assert w.triu(1).abs().max() == 0
    inputs = x if layer.positions is None else layer.positions.add_to(x)
    y = layer.output((w @ split(layer.value(inputs), H)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), y)
    seen = layer.see(x, "entropy", "max_score")
    torch.testing.assert_close(seen.y, y)
    torch.testing.assert_close(seen.entropy, -torch.special.xlogy(w, w).sum(-1))


@pytest.mark.parametrize("score", ["additive", "bilinear"])
def test_scores_with_parameters_are_trained_saved_and_moved(score):
    layer = SelfAttention(DIM, H, score=score)
    names = [name for name, _ in layer.named_parameters() if name.startswith("score.")]
    assert (
        names
        == {"additive": ["score.query_weight", "score.key_weight", "score.v"], "bilinear": ["score.weight"]}[score]
    )
    layer(torch.randn(B, T, DIM)).square().sum().backward()
    assert all(layer.get_parameter(name).grad.abs().sum() > 0 for name in names)
    twin = SelfAttention(DIM, H, score=score)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(B, T, DIM)
    torch.testing.assert_close(twin(x), layer(x))
    assert copy.deepcopy(layer).double().score().modifiers == ()


def test_a_score_of_ones_own_lends_its_parameters_to_the_layer():
    slopes, logits = nn.Parameter(torch.rand(H)), torch.zeros(H)
    layer = SelfAttention(DIM, H, score=regard.ScaledDot().alibi(slopes).sink(logits))
    assert dict(layer.named_parameters())["score.modifiers_0_slopes"] is slopes
    assert dict(layer.named_buffers())["score.sink_logits"] is logits
    layer(torch.randn(B, T, DIM)).sum().backward()
    assert slopes.grad.abs().sum() > 0


@pytest.mark.parametrize("make", [
    lambda: SelfAttention(6, 2, causal=True, positions="rotary", key_size=4),
    lambda: SelfAttention(6, 2, score="additive", kv_heads=1),
    lambda: SelfAttention(6, 3, score="bilinear", positions="learned"),
])  # fmt: skip
def test_gradients_are_those_of_the_formula(make):
    layer = make().double()
    x = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize("positions", [None, "rotary", "sinusoidal", "learned"])
@pytest.mark.parametrize("cuts", [(1,) * T, (4, 1, 2), (T,)])
@pytest.mark.parametrize("kv_heads", [H, 1])
def test_a_cache_gives_the_numbers_of_the_full_pass(positions, cuts, kv_heads):
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    layer = SelfAttention(DIM, H, kv_heads=kv_heads, positions=positions, causal=True).double()
    cache, parts, at = Cache(), [], 0
    for n in cuts:
        w = layer.weights(x[:, at : at + n], cache=cache)
        assert len(cache) == at, "asking for weights leaves the cache as it is"
        torch.testing.assert_close(w.dense(), layer.weights(x).dense()[:, :, at : at + n, : at + n])
        parts.append(layer(x[:, at : at + n], cache=cache))
        at += n
        assert len(cache) == at
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def test_a_cache_is_of_one_batch():
    layer, cache = SelfAttention(8, 2, causal=True), Cache()
    layer(torch.randn(2, 3, 8), cache=cache)
    with pytest.raises(ValueError, match=r"holds keys of \(batch, heads\) \(2, 2\), got \(3, 2\): begin a new one"):
        layer(torch.randn(3, 1, 8), cache=cache)
    assert len(cache) == 3


def test_a_cache_can_be_reordered():
    x = torch.randn(B, T, DIM)
    layer, cache = SelfAttention(DIM, H, causal=True), Cache()
    layer(x[:, :-1], cache=cache)
    chosen = torch.tensor([2, 2, 0])
    cache.reorder(chosen)
    torch.testing.assert_close(layer(x[chosen, -1:], cache=cache), layer(x[chosen])[:, -1:])


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    turn = Rotary().rotate
    near, far = turn(q, 3) @ turn(k, 1).mT, turn(q, 103) @ turn(k, 101).mT
    torch.testing.assert_close(near, far, atol=1e-5, rtol=0)
    assert (near - turn(q, 4) @ turn(k, 1).mT).abs() > 1e-3
    torch.testing.assert_close(turn(q, 0), q)


def test_sinusoidal_positions_are_the_papers():
    x = torch.zeros(1, 50, 7)
    p = Sinusoidal().add_to(x, start=3)[0]
    assert p[10, 4].item() == pytest.approx(math.sin(13 / 10_000 ** (4 / 7)), abs=1e-5)
    assert p[10, 5].item() == pytest.approx(math.cos(13 / 10_000 ** (4 / 7)), abs=1e-5)


def test_learned_positions_end_where_they_were_made_to():
    layer = SelfAttention(DIM, positions=Learned(4, DIM))
    layer(torch.randn(4, DIM))
    with pytest.raises(ValueError, match=r"there are 4 learned positions, and this input needs 5"):
        layer(torch.randn(5, DIM))


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
def test_masks_of_every_kind(score):
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    layer = SelfAttention(DIM, H, score=score, causal=True).double()
    flags = torch.rand(B, 1, T, T) < 0.7
    masks = [regard.padding([7, 4, 2]), regard.window(2, 0), flags, lambda i, j: (i + j) % 3 > 0]
    for mask in masks:
        w = layer.weights(x, mask).dense()
        assert w.triu(1).abs().max() == 0, "causal holds beside every mask"
        y = layer.output((w @ split(layer.value(x), H)).transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x, mask), y)
    assert layer.weights(x, masks[0]).dense()[1, :, :, 4:].abs().max() == 0


def test_what_is_padding_does_not_matter():
    x = torch.randn(2, T, DIM)
    layer = SelfAttention(DIM, H)
    mask = regard.padding([T, 3])
    other = x.clone()
    other[1, 3:] = 1e4
    torch.testing.assert_close(layer(x, mask)[1, :3], layer(other, mask)[1, :3])
    torch.testing.assert_close(layer(x, mask)[1, :3], layer(x[1, :3]))


def test_cross_attention_looks_at_the_memory():
    x, memory = torch.randn(B, T, DIM, dtype=torch.float64), torch.randn(B, 4, 9, dtype=torch.float64)
    layer = CrossAttention(DIM, H, memory_dim=9, key_size=6, bias=True).double()
    q, k, v = split(layer.query(x), H), split(layer.key(memory), H), split(layer.value(memory), H)
    w = (q @ k.mT / math.sqrt(6)).softmax(-1)
    torch.testing.assert_close(layer.weights(x, memory).dense(), w)
    torch.testing.assert_close(layer(x, memory), layer.output((w @ v).transpose(1, 2).flatten(2)))
    seen = layer.see(x, memory, "lse", topk=2)
    torch.testing.assert_close(seen.y, layer(x, memory))
    assert seen.topk.values.shape == (B, H, T, 2)
    basic = CrossAttention(DIM, parameters=False)
    other = torch.randn(B, 4, DIM, dtype=torch.float64)
    torch.testing.assert_close(basic(x, other), (x @ other.mT).softmax(-1) @ other)


def test_cross_attention_keeps_its_memory_in_a_cache():
    x, memory = torch.randn(B, T, DIM), torch.randn(B, 4, DIM)
    layer, cache = CrossAttention(DIM, H), Cache()
    first = layer(x[:, :2], memory, cache=cache)
    rest = layer(x[:, 2:], None, cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), layer(x, memory))
    with pytest.raises(ValueError, match="needs a memory"):
        layer(x, None)


def test_statistics_are_asked_on_the_way_and_are_part_of_the_graph():
    x = torch.randn(B, T, DIM, requires_grad=True)
    layer, probe = SelfAttention(DIM, H), Probe("entropy", "lse", "max_score")
    y = layer(x, probe=probe)
    torch.testing.assert_close(y, layer(x))
    w = layer.weights(x)
    torch.testing.assert_close(probe[0].entropy, w.entropy())
    assert probe.heads("max_score").shape == (1, H)
    torch.testing.assert_close(probe.heads("max_score")[0], w.max_score().amax((0, 2)).detach())
    torch.testing.assert_close(probe.heads("entropy")[0], w.entropy().mean((0, 2)).detach())
    (grad,) = torch.autograd.grad(probe[0].entropy.sum(), x)
    assert grad.abs().sum() > 0
    assert not probe.heads("entropy").requires_grad
    with pytest.raises(ValueError, match="unknown statistic 'entropie'"):
        Probe("entropie")


def test_a_layer_keeps_nothing_of_what_passes_through_it():
    layer = SelfAttention(DIM, H, positions="rotary")
    before = {name: id(value) for name, value in vars(layer).items()}
    layer(torch.randn(B, T, DIM), probe=Probe("entropy"))
    layer.weights(torch.randn(B, T, DIM)).entropy()
    assert {name: id(value) for name, value in vars(layer).items()} == before


@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "additive", "bilinear"])
def test_it_compiles_into_one_graph(score):
    layer = SelfAttention(DIM, H, score=score, causal=True, positions=None if score == "additive" else "rotary")
    x = torch.randn(B, T, DIM)

    def both(x):
        probe = Probe("entropy", "max_score")
        return layer(x, probe=probe), layer(x), probe.heads("entropy")

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own compiler
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for mine, want in zip(compiled(x), both(x), strict=True):
            torch.testing.assert_close(mine, want)
        sum(y.square().sum() for y in compiled(x)[:2]).backward()
    graph = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    sum(y.square().sum() for y in both(x)[:2]).backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(graph[name], p.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_stay_narrow(dtype):
    layer = SelfAttention(DIM, H, positions="rotary", causal=True).to(dtype)
    x = torch.randn(B, T, DIM, dtype=dtype)
    assert layer(x).dtype == dtype
    assert layer.see(x, "entropy").entropy.dtype == torch.float32


def test_under_autocast_it_computes_in_the_narrow_type():
    layer = SelfAttention(DIM, H, positions="rotary", causal=True)
    x = torch.randn(B, T, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        z = layer(x, probe=Probe("entropy"))
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), atol=0.03, rtol=0.05)


MISTAKES = [
    (lambda: SelfAttention(10, 3), r"dim 10 does not split into 3 heads of one size: pass key_size="),
    (lambda: SelfAttention(12, 4, kv_heads=3), r"heads must be a multiple of kv_heads.*got 4 and 3"),
    (lambda: SelfAttention(12, 0), r"both at least 1; got 0 and 0"),
    (lambda: SelfAttention(12, parameters=False, key_size=3), r"parameters=False is attention of x itself; key_size"),
    (lambda: SelfAttention(12, parameters=False, score="additive"), r"score='additive' needs parameters"),
    (lambda: SelfAttention(12, parameters=False, bias=True), r"bias=True needs parameters"),
    (lambda: SelfAttention(12, parameters=False, positions="learned"), r"leaves nothing to learn"),
    (lambda: SelfAttention(12, positions="relative"), r"""positions must be "rotary".*got 'relative'"""),
    (lambda: SelfAttention(12, score="dott"), r"""unknown score 'dott'.*also takes "additive" and "bilinear\""""),
    (lambda: SelfAttention(12, 4, positions="rotary")(torch.randn(2, 12)), r"key_size must be even, got 3"),
    (lambda: SelfAttention(12)(torch.randn(2, 5, 11)), r"x must be \(\.\.\., length, 12\); got shape \(2, 5, 11\)"),
    (lambda: CrossAttention(12, memory_dim=9, parameters=False), r"must have one size; got 12 and 9"),
    (lambda: CrossAttention(12)(torch.randn(2, 12), torch.randn(2, 3)), r"memory must be \(\.\.\., length, 12\)"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_every_mistake_has_its_sentence(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake()


def test_ids_where_vectors_are_expected_are_named():
    for call in (
        SelfAttention(12),
        SelfAttention(12, parameters=False),
        lambda x: CrossAttention(12)(torch.randn(2, 12), x),
    ):
        with pytest.raises(TypeError, match=r"must be vectors of floats; got torch.int64\. .*nn\.Embedding first"):
            call(torch.ones(5, 12).long())


# Mistakes, and what they leave behind.


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    x, memory = torch.randn(B, T, DIM), torch.randn(B, 4, DIM)
    own, cross = SelfAttention(DIM, H), CrossAttention(DIM, H)
    calls = [
        lambda cache, mask: own(x, mask, cache),
        lambda cache, mask: own.see(x, "entropy", mask=mask, cache=cache),
        lambda cache, mask: cross(x, memory, mask, cache),
        lambda cache, mask: cross.see(x, memory, "entropy", mask=mask, cache=cache),
    ]
    for call in calls:
        cache = Cache()
        with pytest.raises((ValueError, TypeError)):
            call(cache, torch.ones(2, 3, 5, 11, dtype=torch.bool))
        assert (cache.k, cache.v, cache.memory) == (None, None, None)
        call(cache, None)
        assert cache.k is not None


def test_a_filled_cache_is_given_no_other_memory():
    layer, cache = CrossAttention(DIM, H), Cache()
    x, memory = torch.randn(B, T, DIM), torch.randn(B, 4, DIM)
    want = layer(x, memory, cache=cache)
    for same in (memory, memory.clone(), None):
        torch.testing.assert_close(layer(x, same, cache=cache), want)
    for other in (memory + 1, memory[:, :3], torch.randn(B, 5, DIM)):
        with pytest.raises(ValueError, match="filled from another memory: pass memory=None"):
            layer(x, other, cache=cache)
    order = torch.tensor([2, 0, 1])
    cache.reorder(order)
    torch.testing.assert_close(layer(x[order], memory[order], cache=cache), want[order])


@pytest.mark.parametrize("kind", [SelfAttention, CrossAttention])
@pytest.mark.parametrize(("name", "size"), [("dim", 0), ("memory_dim", 0), ("key_size", -1), ("value_size", 0)])
def test_sizes_are_at_least_one(kind, name, size):
    if name == "memory_dim" and kind is SelfAttention:
        return
    with pytest.raises(ValueError, match=f"^{name} must be at least 1; got {size}."):
        kind(**{"dim": 16, "heads": 2, name: size})


def test_rotary_positions_want_even_heads_from_the_start():
    with pytest.raises(ValueError, match="key_size must be even, got 3"):
        SelfAttention(6, 2, positions="rotary")


def test_nothing_can_be_told_of_a_pass_that_was_not():
    probe = Probe("entropy")
    with pytest.raises(ValueError, match="call the model with probe=… first"):
        probe.heads("entropy")
    with pytest.raises(ValueError, match="'max_score' was not requested"):
        probe.heads("max_score")


def test_positions_are_as_exact_as_their_input():
    far = 10**6
    x = torch.zeros(1, 1, 4, dtype=torch.float64)
    want = torch.tensor([math.sin(far), math.cos(far), math.sin(far / 100), math.cos(far / 100)], dtype=torch.float64)
    torch.testing.assert_close(Sinusoidal().add_to(x, far)[0, 0], want, atol=1e-9, rtol=0)
    turned = Rotary().rotate(torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64), far)[0]
    want = torch.tensor([math.cos(far), math.cos(far / 100), math.sin(far), math.sin(far / 100)], dtype=torch.float64)
    torch.testing.assert_close(turned, want, atol=1e-9, rtol=0)


# Rotary positions are kept, and are no state.


def rotary(dim: int = 16) -> SelfAttention:
    return SelfAttention(dim, heads=2, positions="rotary")


def test_a_rotary_layer_filled_after_it_was_made_on_no_device_is_the_same_layer():
    layer, x = rotary(), torch.randn(2, 5, 16)
    with torch.device("meta"):
        empty = rotary()
    empty.to_empty(device="cpu")
    for _ in range(3):
        torch.full((1, 1024, 4), 7.0)  # what lay where an uninitialised table would be
    empty.load_state_dict(layer.state_dict())
    torch.testing.assert_close(empty(x), layer(x))
    assert not list(layer.buffers())


def test_positions_met_in_inference_can_be_trained_afterwards():
    with torch.inference_mode():
        layer = rotary()
        layer(torch.randn(1, 1100, 16))
    layer = rotary()
    with torch.inference_mode():
        layer(torch.randn(1, 1100, 16))
    layer(torch.randn(1, 1100, 16)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("start", [0, 3, 1020, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_rotations_are_those_of_the_formula(start, dtype):
    turning, q = Rotary(), torch.randn(2, 6, 8, dtype=dtype)
    at = torch.arange(start, start + 6, dtype=dtype)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=dtype) / 8)
    left, right = q.chunk(2, -1)
    truth = torch.cat([left * at.cos() - right * at.sin(), right * at.cos() + left * at.sin()], -1)
    for _ in range(2):
        torch.testing.assert_close(turning.rotate(q, start), truth, atol=0, rtol=0)
    assert turning.table.shape[1] <= 2048
    assert turning.table.dtype == torch.float32


def test_rotations_follow_the_layer_and_stay_wide():
    layer = rotary().half()
    assert layer.positions.table.dtype == torch.float32
    assert layer.to("meta").positions.table.device.type == "meta"
    with pytest.raises(ValueError, match="must be even"):
        Rotary().rotate(torch.randn(1, 2, 3, dtype=torch.float64))


def test_a_layer_called_as_pytorch_calls_its_own_says_what_it_takes() -> None:
    """`mha(x, x, x)`, `layer(x, mask)` and `model(ids, mask)` of others put something else into our third argument."""
    x, mask = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"cache must be a Cache\(\); got Tensor.*called with x"):
        SelfAttention(16, heads=4)(x, None, x)
    with pytest.raises(TypeError, match=r"cache must be a Cache\(\); got bool"):
        CrossAttention(16, heads=4)(x, x, cache=True)
    with pytest.raises(TypeError, match=r"what model\.cache\(\) returned; got Tensor. A mask is passed as mask="):
        LanguageModel(50, dim=16, heads=2, layers=1)(torch.zeros(2, 5, dtype=torch.int64), mask)


@pytest.mark.parametrize("name", ["memory", "memory_mask"])
def test_a_block_without_cross_attention_refuses_a_memory(name: str) -> None:
    """`nn.TransformerEncoderLayer` takes a mask in the place of our memory, where it would be ignored in silence."""
    block, x = Block(16, heads=4), torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match=r"cross-attention, and this block has none.*passed as mask="):
        block(x, **{name: regard.causal()})
