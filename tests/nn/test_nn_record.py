"""The law of the recorder's seam for regard.nn: what is recorded is what the layer tells, and nothing changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import regard
from regard.nn import Block, CrossAttention, LanguageModel, Probe, SelfAttention, Translator

B, T, DIM, H = 2, 7, 20, 5
SCORES = ["scaled_dot", "dot", "cosine", "additive", "bilinear", regard.Gaussian(2.0), regard.ScaledDot().softcap(3.0)]


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("mask", [None, regard.padding([7, 3]), regard.window(2, 1)], ids=repr)
def test_a_layer_is_heard_once_with_its_own_weights(score, mask):
    layer = SelfAttention(DIM, H, score=score, positions=None if score == "additive" else "rotary", causal=True)
    model = nn.Sequential(nn.Linear(DIM, DIM), layer) if mask is None else layer
    x = torch.randn(B, T, DIM)
    args = (x,) if mask is None else (x, mask)
    with torch.no_grad():
        want = model(*args)
        with regard.record(model, values=True) as seen:
            assert torch.equal(model(*args), want), "recording changes nothing"
    assert len(seen.layers) == 1
    assert not seen.refused
    assert seen.layers[0].kind == "self"
    own = layer.weights(model[0](x)) if mask is None else layer.weights(x, mask)
    torch.testing.assert_close(seen.layers[0].weights.dense(), own.dense())


def test_parameters_of_a_score_are_those_of_the_call():
    layer = SelfAttention(DIM, H, score="additive")
    x = torch.randn(B, T, DIM)
    with torch.no_grad(), regard.record(layer) as seen:
        layer(x)
    before = layer.weights(x).dense()
    with torch.no_grad():
        layer.score.v.mul_(3)
    torch.testing.assert_close(seen.layers[0].weights.dense(), before)


def test_a_translator_shows_all_three_kinds_of_attention(tmp_path):
    model = Translator(31, dim=DIM, heads=2, layers=2).eval()
    source, target = torch.randint(1, 31, (1, 6)), torch.randint(1, 31, (1, T))
    words = [f"s{n}" for n in range(6)], [f"t{n}" for n in range(T)]
    with torch.no_grad(), regard.record(model, tokens=words) as seen:
        model(source, target)
    assert [(layer.name, layer.kind) for layer in seen.layers] == [
        ("encoder.blocks.0.attention", "self"),
        ("encoder.blocks.1.attention", "self"),
        ("decoder.blocks.0.attention", "self"),
        ("decoder.blocks.0.cross", "cross"),
        ("decoder.blocks.1.attention", "self"),
        ("decoder.blocks.1.cross", "cross"),
    ]
    assert seen[3, 1]["t6", "s0"] > 0
    assert seen[2, 0]["t0", "t1"] == 0
    seen.save(tmp_path / "run.regard")
    back = regard.load(tmp_path / "run.regard")
    theirs, ours = back.layers[3].weights, seen.layers[3].weights
    for loaded, recorded in zip(theirs._leaves, ours._leaves, strict=True):
        assert torch.equal(loaded, recorded)
    # The file lays them out in order, and BLAS may round a product of other strides another way: a score by γ = d + 1
    # roundings of its terms' magnitudes, here and there, and a weight relatively by that; softmax adds its own few.
    q, k = ours._leaves[:2]
    magnitude = (q.abs() @ k.abs().mT).max().item() / q.shape[-1] ** 0.5
    off = 2.0**-24 * (2 * (q.shape[-1] + 1) * magnitude + 8)
    torch.testing.assert_close(theirs.dense(), ours.dense(), rtol=2 * off, atol=0)


@pytest.mark.parametrize("score", ["additive", "bilinear"])
def test_scores_with_parameters_go_into_the_file(score, tmp_path):
    layer = SelfAttention(DIM, H, score=score, causal=True)
    with torch.no_grad(), regard.record(layer) as seen:
        layer(torch.randn(B, T, DIM))
    seen.save(tmp_path / "run.regard")
    torch.testing.assert_close(
        regard.load(tmp_path / "run.regard").layers[0].weights.dense(), seen.layers[0].weights.dense()
    )


@pytest.mark.parametrize("score", [None, "additive"])
def test_a_generation_with_a_cache_becomes_one_causal_matrix(score):
    positions = "rotary" if score is None else "learned"
    model = LanguageModel(31, dim=DIM, heads=2, layers=2, context=T, positions=positions, score=score).eval()
    ids = torch.randint(31, (1, T))
    with torch.no_grad():
        with regard.record(model) as at_once:
            model(ids)
        with regard.record(model) as steps:
            cache = model.cache()
            model(ids[:, :3], cache)
            for t in range(3, T):
                model(ids[:, t : t + 1], cache)
    assert len(steps.passes) == 1
    for mine, want in zip(steps.layers, at_once.layers, strict=True):
        torch.testing.assert_close(mine.weights.dense(), want.weights.dense(), atol=1e-5, rtol=1e-4)


def test_asking_on_the_way_and_recording_go_together():
    model = LanguageModel(31, dim=DIM, heads=2, layers=2).eval()
    ids, probe = torch.randint(31, (B, T)), Probe("entropy")
    with torch.no_grad(), regard.record(model) as seen:
        model(ids, probe=probe)
    for layer, probed in zip(seen.layers, probe, strict=True):
        torch.testing.assert_close(layer.weights.entropy(), probed.entropy)


@pytest.mark.parametrize("score", [None, "cosine", "additive"], ids=str)
def test_watch_sees_every_head_while_training(score):
    model = LanguageModel(31, dim=DIM, heads=2, layers=2, positions="learned", score=score)
    ids = torch.randint(31, (B, T))
    with regard.watch(model, every=2) as watching:
        for step in range(3):
            model(ids).sum().backward()
            assert watching.fresh == (step % 2 == 0)
    names = {name.rsplit("/", 2)[0] for name in watching.numbers()}
    assert names == {"body.blocks.0.attention", "body.blocks.1.attention"}
    probe = Probe("max_score")
    model(ids, probe=probe)
    max_scores = torch.stack([watching.layers[f"body.blocks.{n}.attention"]["max_score"] for n in range(2)])
    torch.testing.assert_close(max_scores, probe.heads("max_score"))
    entropies = [v for k, v in watching.numbers().items() if "/entropy_share/" in k]
    assert all(0 < v <= 1.0001 for v in entropies)


def test_watch_warns_when_scores_explode():
    model = Block(DIM, H, bias=False)
    with torch.no_grad():
        model.attention.query.weight.mul_(300)
    outer = nn.Sequential(model)
    with regard.watch(outer, every=1), pytest.warns(regard.recorder.AttentionWarning, match=r"0\.attention"):
        outer(torch.randn(B, T, DIM)).sum().backward()


def test_cross_attention_alone_and_without_a_batch():
    layer = CrossAttention(DIM, H)
    x, memory = torch.randn(T, DIM), torch.randn(4, DIM)
    with torch.no_grad(), regard.record(layer) as seen:
        layer(x, memory)
    assert seen.layers[0].kind == "cross"
    torch.testing.assert_close(seen.layers[0].weights.dense()[0], layer.weights(x, memory).dense())
    with warnings.catch_warnings(record=True) as caught, torch.no_grad(), regard.record(layer) as seen:
        warnings.simplefilter("always")
        layer(x.expand(2, 3, T, DIM), memory.expand(2, 3, 4, DIM))
    assert "2 batch axes" in str(caught[0].message)
