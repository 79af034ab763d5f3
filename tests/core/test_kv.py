"""Scores of cache compression, by the formulas of their methods on dense weights; eviction from a transformers cache."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import kv

B, H, G, T = 2, 6, 3, 20


def subject(rows: int = T) -> tuple[regard.Weights, Tensor]:
    q, k = torch.randn(B, H, rows, 4).double(), torch.randn(B, G, T, 4).double()
    W = regard.weights(q, k, mask=regard.causal(), align="end")
    return W, W.dense()


def of_groups(x: Tensor) -> Tensor:
    return x.unflatten(1, (G, H // G)).mean(2)


def test_h2o_is_the_mean_weight_from_queries_that_see_the_key() -> None:
    W, w = subject()
    sees = torch.arange(T, 0, -1)
    torch.testing.assert_close(kv.h2o(W), of_groups(w.sum(2) / sees))
    torch.testing.assert_close(kv.h2o(W, mean=False), of_groups(w.sum(2)))


def test_h2o_of_a_chunk_counts_its_queries_alone() -> None:
    W, w = subject(rows=5)
    sees = (torch.arange(5)[:, None] + T - 5 >= torch.arange(T)).sum(0)
    torch.testing.assert_close(kv.h2o(W), of_groups(w.sum(2) / sees))


def test_tova_is_the_last_row_over_all_heads_and_keeps_the_last_key() -> None:
    W, w = subject()
    row = w[:, :, -1].mean(1, keepdim=True)
    scores = kv.tova(W)
    assert scores.shape == (B, G, T)
    torch.testing.assert_close(scores[..., :-1], row[..., :-1].expand(B, G, -1))
    assert (scores[..., -1] > row[..., :-1].max()).all()
    for n in (1, 2, 5):  # the largest of the others does not take its place
        assert (kv.keep(scores, n)[..., -1] == T - 1).all()


@pytest.mark.parametrize(("window", "kernel"), [(4, 5), (1, 1), (7, 3)])
def test_snapkv_observes_from_the_last_queries(window: int, kernel: int) -> None:
    W, w = subject()
    mean = w[:, :, -window:, : T - window].mean(2)
    half = kernel // 2
    padded = torch.nn.functional.pad(mean, (half, half))
    smooth = sum(padded[..., n : n + T - window] for n in range(kernel)) / kernel
    want, scores = of_groups(smooth), kv.snapkv(W, window, kernel)
    torch.testing.assert_close(scores[..., :-window], want)
    assert (scores[..., -window:] > scores[..., :-window].max()).all()
    assert torch.equal(kv.keep(scores, window), torch.arange(T - window, T).expand(B, G, -1))


@pytest.mark.parametrize("by", ["sum", "max"])
def test_the_oracle_knows_the_queries_to_come(by: str) -> None:
    W, w = subject(rows=5)
    groups = w.unflatten(1, (G, H // G))
    want = groups.sum(3).mean(2) if by == "sum" else groups.amax((2, 3))
    torch.testing.assert_close(kv.oracle(W, by), want)


def test_a_decoding_step_adds_its_own_row() -> None:
    W, _ = subject()
    factors = W._factors
    scores = kv.h2o(regard.weights(factors.q[:, :, :15], factors.k[:, :, :15], mask=regard.causal()), mean=False)
    for at in range(15, T):
        step = regard.weights(factors.q[:, :, at : at + 1], factors.k[:, :, : at + 1])
        scores = kv.update(scores, step)
    torch.testing.assert_close(scores, kv.h2o(W, mean=False))


def test_rows_alone_are_rows_of_the_matrix() -> None:
    q, bias = torch.randn(3, 9, 4).double(), torch.randn(3, 9, 9).double()
    W = regard.weights(q, score=regard.Dot().bias(bias).alibi(torch.rand(3).double()), mask=regard.window(4, 0))
    part = W.label(list("abcdefghi")).rows(slice(-4, -1))
    torch.testing.assert_close(part.dense(), W.dense()[:, -4:-1])
    torch.testing.assert_close(part.mean_distance(), W.mean_distance()[:, -4:-1])
    torch.testing.assert_close(part["g", "f"], W.dense()[:, 6, 5])
    existing = regard.Weights.from_dense(W.dense())
    torch.testing.assert_close(existing.rows(slice(2, 4)).received(), W.dense()[:, 2:4].sum(1))


def test_eviction_leaves_the_best_keys_in_their_order() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    keys, values = torch.randn(2, B, G, T, 4), torch.randn(2, B, G, T, 5)
    for layer in range(2):
        cache.update(keys[layer], values[layer], layer)
    scores = torch.rand(2, B, G, T)
    kv.evict(cache, list(scores), 6)
    assert cache.get_seq_length() == T, "tokens that were seen, as caches of windows count"
    needed = rf"layer 0 needs a score for each key of the cache, \({B}, {G}, 6\); got \({B}, {G}, {T}\)"
    with pytest.raises(ValueError, match=needed):
        kv.evict(cache, list(scores), 6)  # scores of keys that are gone
    for layer in range(2):
        for b in range(B):
            for g in range(G):
                best = sorted(range(T), key=lambda j: -scores[layer, b, g, j])[:6]
                torch.testing.assert_close(cache.layers[layer].keys[b, g], keys[layer, b, g, sorted(best)])
                torch.testing.assert_close(cache.layers[layer].values[b, g], values[layer, b, g, sorted(best)])


def small_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def decode(
    model: Any, ids: Tensor, steps: int, evict: Callable[[Any], list[int]], **options: Any
) -> tuple[Tensor, ...]:
    """Tokens and logits of a model over an evicted cache, and over a full one whose other keys a mask hides."""
    transformers = pytest.importorskip("transformers")
    cache, full = transformers.DynamicCache(config=model.config), transformers.DynamicCache(config=model.config)
    for each in (cache, full):
        model(ids[:, :T], past_key_values=each)
    stay = evict(cache)
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=steps, do_sample=False, output_logits=True,
        return_dict_in_generate=True, attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    logits, tokens = [], ids
    for at in range(T, T + steps):
        hidden = torch.full((1, 1, 1, at + 1), torch.finfo(model.dtype).min, dtype=model.dtype)
        hidden[..., [*stay, *range(T, at + 1)]] = 0
        mask = {"full_attention": hidden, "sliding_attention": None} if options.get("windows") else hidden
        step = {"past_key_values": full, "position_ids": torch.tensor([[at]]), "attention_mask": mask}
        logits.append(model(tokens[:, -1:], **step).logits[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
    return out.sequences, torch.stack(out.logits), tokens, torch.stack(logits)


def test_scores_of_query_heads_are_told_how_to_become_those_of_key_heads() -> None:
    layer = SimpleNamespace(keys=torch.ones(1, 2, 6, 3), values=torch.ones(1, 2, 6, 3))
    scores = torch.rand(1, 8, 6)
    with pytest.raises(ValueError, match=r"eager attention.*unflatten\(1, \(2, -1\)\)\.mean\(2\)"):
        regard.kv.evict(SimpleNamespace(layers=[layer]), [scores], 3)
    regard.kv.evict(SimpleNamespace(layers=[layer]), [scores.unflatten(1, (2, -1)).mean(2)], 3)
    assert layer.keys.shape == (1, 2, 3, 3)


@torch.no_grad()
@pytest.mark.parametrize("evictions", [(6,), (9, 4)])
def test_generation_over_an_evicted_cache_is_that_with_the_rest_hidden(evictions: tuple[int, ...]) -> None:
    model, ids = small_llama().double(), torch.randint(50, (1, T + 1))

    def evict(cache: Any) -> list[int]:
        at = torch.arange(T).expand(1, 2, T)
        for n in evictions:
            scores = torch.rand(at.shape[-1]).expand(
                at.shape
            )  # the same in every layer and head: one mask hides as much
            at = at.gather(-1, kv.evict(cache, [scores, scores], n)[0])
        assert cache.get_mask_sizes(1, 0) == (evictions[-1] + 1, T - evictions[-1])
        return at[0, 0].tolist()

    got, logits, want, exact = decode(model, ids, 5, evict)
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, exact.float(), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_chunks_over_an_evicted_cache_see_what_stays_and_what_is_before_them() -> None:
    transformers = pytest.importorskip("transformers")
    model, ids = small_llama().double(), torch.randint(50, (1, T + 4))
    cache, full = transformers.DynamicCache(), transformers.DynamicCache()
    for each in (cache, full):
        model(ids[:, :T], past_key_values=each)
    scores = torch.rand(T).expand(1, 2, T)
    stay, _ = kv.evict(cache, [scores, scores], 6)
    copies = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    hidden = torch.full((1, 1, 4, T + 4), torch.finfo(torch.float64).min, dtype=torch.float64)
    hidden[..., stay[0, 0]] = 0
    hidden[..., T:] = hidden[..., T:].triu(1)
    want = model(ids[:, T:], past_key_values=full, attention_mask=hidden).logits
    for each in copies:
        got = model(ids[:, T:], past_key_values=each).logits
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    cache.crop(-3)
    assert (cache.get_seq_length(), cache.layers[0].keys.shape[2]) == (T + 1, 7)
    cache.reset()
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_model_with_windows_decodes_on_where_its_other_layers_are_evicted() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval().double()
    ids = torch.randint(50, (1, T + 1))

    def evict(cache: Any) -> list[int]:
        return kv.evict(cache, [None, torch.rand(T).expand(1, 2, T)], 6)[1][0, 0].tolist()

    got, logits, want, exact = decode(model, ids, 4, evict, windows=True)
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, exact.float(), rtol=1e-5, atol=1e-6)


def test_every_layer_of_a_cache_is_evicted_right_or_refused_by_name() -> None:
    utils = pytest.importorskip("transformers.cache_utils")
    kinds = [
        x
        for x in vars(utils).values()
        if isinstance(x, type) and issubclass(x, utils.CacheLayerMixin | utils.LinearAttentionCacheLayerMixin)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        for cls in (kind, type("Mine", (kind,), {})):  # of one's own
            if cls.__abstractmethods__ or kind is utils.DynamicLayer:
                continue
            layer = object.__new__(cls)
            layer.keys = layer.values = torch.rand(1, 2, 6, 4)
            with pytest.raises(TypeError, match=f"layer 0 of the cache is a {kind.__name__}, which holds more"):
                kv.evict(SimpleNamespace(layers=[layer]), [torch.rand(1, 2, 6)], 3)
    with pytest.raises(ValueError, match="layer 0 of the cache holds no keys yet"):
        kv.evict(SimpleNamespace(layers=[utils.DynamicLayer()]), [torch.rand(1, 2, 6)], 3)
    two = utils.EncoderDecoderCache(utils.DynamicCache(), utils.DynamicCache())
    with pytest.raises(TypeError, match=r"has two caches. Pass cache\.self_attention_cache"):
        kv.evict(two, [], 3)


@torch.no_grad()
def test_both_caches_of_a_decoder_with_memory_are_evicted() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=32,
        decoder_attention_heads=4, decoder_ffn_dim=32, attn_implementation="eager",
    )  # fmt: skip
    model, ids = transformers.BartForConditionalGeneration(config).eval().double(), torch.randint(3, 50, (1, T + 1))

    def step(evicted: bool) -> Tensor:
        out = model(input_ids=ids, decoder_input_ids=ids[:, :T], use_cache=True)
        cache, memory, mask = out.past_key_values, torch.ones(1, T + 1).long(), torch.ones(1, T + 1).long()
        if evicted:  # to the last keys of both: what a mask of flags can hide as well
            for each, n in ((cache.self_attention_cache, T), (cache.cross_attention_cache, T + 1)):
                kv.evict(each, [torch.arange(n).expand(1, 4, n).double()], 6)
            memory = memory[:, :6]
        else:
            memory[:, :-6] = mask[:, : T - 6] = 0
        return model(
            encoder_outputs=(out.encoder_last_hidden_state,), decoder_input_ids=ids[:, T:], past_key_values=cache,
            attention_mask=memory, decoder_attention_mask=None if evicted else mask,
        ).logits  # fmt: skip

    torch.testing.assert_close(step(True), step(False), rtol=1e-5, atol=1e-6)


def test_scores_follow_a_cache_that_is_evicted_at_every_step() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, H, T, 4).double(), torch.randn(1, G, T, 4).double()
    layer = SimpleNamespace(keys=k[:, :, :8], values=k[:, :, :8])
    scores = kv.h2o(regard.weights(q[:, :, :8], layer.keys, mask=regard.causal()), mean=False)
    at = torch.arange(8).expand(1, G, 8)  # the position of every key that is left
    for t in range(8, T):
        (stay,) = kv.evict(SimpleNamespace(layers=[layer]), [scores], 7)
        scores, at = scores.gather(-1, stay), torch.cat([at.gather(-1, stay), torch.full((1, G, 1), t)], -1)
        layer.keys = layer.values = torch.cat([layer.keys, k[:, :, t : t + 1]], 2)
        scores = kv.update(scores, regard.weights(q[:, :, t : t + 1], layer.keys))
    torch.testing.assert_close(layer.keys, k.gather(2, at[..., None].expand(-1, -1, -1, 4)))
    # By hand: each key adds up what every step since its own put on it, among the keys that were left.
    total = torch.zeros(G, T).double()
    left = [list(range(8)) for _ in range(G)]
    causal = torch.ones(8, 8).tril().bool()
    for g in range(G):
        heads = slice(g * H // G, (g + 1) * H // G)
        w = (q[0, heads, :8] @ k[0, g, :8].mT / 2).masked_fill(~causal, -torch.inf).softmax(-1)
        total[g, :8] = w.sum(1).mean(0)
        for t in range(8, T):
            left[g] = [*sorted(sorted(left[g], key=lambda j: -total[g, j])[:7]), t]
            total[g, left[g]] += (q[0, heads, t] @ k[0, g, left[g]].mT / 2).softmax(-1).mean(0)
    assert at[0].tolist() == left
    torch.testing.assert_close(scores[0], total.gather(-1, at[0]))


def test_layers_that_hold_more_than_keys_and_values_are_left_or_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    cache = transformers.DynamicCache(config=config)
    for number in range(2):
        cache.update(torch.randn(1, G, 6, 4), torch.randn(1, G, 6, 4), number)
    before = cache.layers[1].keys
    with pytest.raises(TypeError, match="layer 0 of the cache is a DynamicSlidingWindowLayer"):
        kv.evict(cache, [torch.rand(1, G, 6)] * 2, 3)
    assert cache.layers[1].keys is before
    stay = kv.evict(cache, [None, torch.rand(1, G, 6)], 3)
    assert stay[0] is None
    assert [layer.keys.shape[2] for layer in cache.layers] == [6, 3]


def test_attention_over_what_stays_is_attention_without_the_rest() -> None:
    q, k, v = torch.randn(H, 1, 4).double(), torch.randn(G, T, 4).double(), torch.randn(G, T, 4).double()
    W = regard.weights(q, k)
    positions = kv.keep(kv.oracle(W), T - 1)
    dropped = torch.tensor([next(j for j in range(T) if j not in row) for row in positions.tolist()])
    at = positions[..., None].expand(-1, -1, 4)
    y = regard.attend(q, k.gather(1, at), v.gather(1, at))
    share = W.dense().unflatten(0, (G, -1)).gather(-1, dropped.view(G, 1, 1, 1).expand(-1, 2, -1, -1)).flatten(0, 1)
    lost = share * v[torch.arange(G), dropped].repeat_interleave(2, 0)[:, None]
    torch.testing.assert_close(y, (W @ v - lost) / (1 - share))


def test_errors_say_what_must_hold() -> None:
    W, _ = subject()
    with pytest.raises(TypeError, match=r"outputs\.past_key_values.*use_cache=True; got NoneType"):
        kv.evict(None, [], 3)
    one = regard.weights(torch.randn(4, 3))
    for ask in (kv.h2o, kv.tova, kv.snapkv, kv.oracle):
        with pytest.raises(
            TypeError, match=rf"{ask.__name__}\(weights\) takes a Weights, .*; got Tensor.*from_dense\(w\)"
        ):
            ask(W.dense())
        with pytest.raises(ValueError, match="needs a head axis, and this matrix is one head"):
            ask(one)
    with pytest.raises(ValueError, match="a matrix without rows"):
        kv.tova(W.rows(slice(0, 0)))
    assert (kv.oracle(W.rows(slice(0, 0)), by="max") == 0).all()
    with pytest.raises(TypeError, match=r"keep\(scores, n\) takes a tensor .* got list"):
        kv.keep([0.5, 0.2], 1)
    with pytest.raises(ValueError, match=r"of the step's key heads, \(2, 3, 20\) after it; got \(2, 6, 20\)"):
        kv.update(torch.rand(B, H, T), W)
    with pytest.raises(
        ValueError, match=r"less than the 20 keys, .*; got 20\. Pass a smaller one, such as window=10\."
    ):
        kv.snapkv(W, window=20)
    with pytest.raises(ValueError, match="must be odd; got 4"):
        kv.snapkv(W, window=4, kernel=4)
    with pytest.raises(ValueError, match="'sum' or 'max'; got 'mean'"):
        kv.oracle(W, by="mean")
    with pytest.raises(ValueError, match="at most the 4 keys; got 5"):
        kv.keep(torch.rand(2, 4), 5)
    with pytest.raises(ValueError, match="the step must see all 30 keys; got 20"):
        kv.update(torch.rand(B, G, 30), W)
    with pytest.raises(ValueError, match="a slice without step"):
        W.rows(slice(0, 9, 2))
