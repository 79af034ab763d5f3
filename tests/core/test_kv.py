"""Scores of cache compression, by the formulas of their methods on dense weights; eviction from a transformers cache."""

from __future__ import annotations

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
    assert (scores[..., -1] == row[..., :-1].max()).all()


@pytest.mark.parametrize(("window", "kernel"), [(4, 5), (1, 1), (7, 3)])
def test_snapkv_observes_from_the_last_queries(window: int, kernel: int) -> None:
    W, w = subject()
    mean = w[:, :, -window:, : T - window].mean(2)
    half = kernel // 2
    padded = torch.nn.functional.pad(mean, (half, half))
    smooth = sum(padded[..., n : n + T - window] for n in range(kernel)) / kernel
    want, scores = of_groups(smooth), kv.snapkv(W, window, kernel)
    torch.testing.assert_close(scores[..., :-window], want)
    assert (scores[..., -window:] == scores[..., :-window].max()).all()


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
    assert cache.get_seq_length() == 6
    for layer in range(2):
        for b in range(B):
            for g in range(G):
                best = sorted(range(T), key=lambda j: -scores[layer, b, g, j])[:6]
                torch.testing.assert_close(cache.layers[layer].keys[b, g], keys[layer, b, g, sorted(best)])
                torch.testing.assert_close(cache.layers[layer].values[b, g], values[layer, b, g, sorted(best)])


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
    with pytest.raises(ValueError, match="more than that of 20 keys"):
        kv.snapkv(W, window=20)
    with pytest.raises(ValueError, match="must be odd; got 4"):
        kv.snapkv(W, window=4, kernel=4)
    with pytest.raises(ValueError, match="'sum' or 'max'; got 'mean'"):
        kv.oracle(W, by="mean")
    with pytest.raises(ValueError, match="there are 4 keys"):
        kv.keep(torch.rand(2, 4), 5)
    with pytest.raises(ValueError, match="the step must see all 30 keys; got 20"):
        kv.update(torch.rand(B, G, 30), W)
    with pytest.raises(ValueError, match="a slice without step"):
        W.rows(slice(0, 9, 2))
