"""A user's file. It is not run: `make lint` type-checks it strictly with mypy, `make lint-pyright` with pyright.

Every `assert_type` fails where a public signature says less than it could, and every ignored error where it takes too much.
"""

from typing import Literal, assert_type

import torch
from torch import Tensor

import regard
from regard import Mask, Peak, Score, Statistics, TopK, Weights
from regard.learn import Result, Trained
from regard.look import View, ViewOptions
from regard.nn import (
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    FeedForward,
    LanguageModel,
    SelfAttention,
    TextEncoder,
    Translator,
)
from regard.recorder import Layer, Recording


def matrix(q: Tensor, k: Tensor, v: Tensor) -> None:
    W = regard.weights(q, k, score=regard.ScaledDot().softcap(30.0), mask=regard.causal() & regard.window(64, 0))
    assert_type(W, Weights)
    assert_type(W @ v, Tensor)
    assert_type(W.mT @ v, Tensor)
    assert_type(W.entropy(), Tensor)
    assert_type(W.topk(5), TopK)
    assert_type(W.topk(5).indices, Tensor)
    assert_type(W.peak(), Peak)
    assert_type(W.shape, torch.Size)
    assert_type(W.size(), torch.Size)
    assert_type(W.size(-1), int)
    assert_type(W.to("cuda", torch.bfloat16), Weights)
    assert_type(W.row("it"), Tensor)
    assert_type(W[0], Weights)
    assert_type(W[0, 3], Weights)
    assert_type(W[0, 2:4], Weights)
    assert_type(W[0, [1, 2], :, :], Weights)
    assert_type(W[..., :, :], Weights)
    assert_type(W["it"], Tensor)
    assert_type(W["it", "animal"], Tensor)
    assert_type(W[0, "it"], Tensor)
    assert_type(W[0, 3, W.at("the", 2)], Tensor)
    assert_type(W[0, 3, 10], Tensor)
    assert_type(W[..., 10, 2], Tensor)
    assert_type(W[..., 0:5, :3], Tensor)
    assert_type(W[0, 3, :, 2:], Tensor)
    assert_type(W.scores[..., -1, :], Tensor)
    W.entrpy()  # type: ignore[attr-defined]  # pyright: ignore
    W.scores.entropy()  # type: ignore[attr-defined]  # pyright: ignore
    for sequence in W:
        assert_type(sequence.entropy(), Tensor)
    assert_type(W.mass([0, "it"]), Tensor)
    assert_type(W.pool(8, 8, slice(0, 64)), Tensor)
    seen = W.see("entropy", "received", topk=3, pool=(8, 8), values=v)
    assert_type(seen, Statistics)
    assert_type(seen.y, Tensor)
    assert_type(seen.topk.values, Tensor)
    assert_type(W.explain("entropy"), str)
    assert_type(W.show("it", merge=True, title="it"), View)
    assert_type(regard.attend(q, k, v, mask=lambda i, j: j <= i, engine="blockwise"), Tensor)


def nodes(bias: Tensor) -> None:
    score = regard.Cosine(10.0).bias(bias).modify(lambda s, i, j: s - (i - j).abs())
    assert_type(score, regard.Cosine)
    mask: Mask = ~regard.padding([3, 2]) | regard.documents([0, 0, 1])
    assert_type(mask.draw(3, 3), str)
    scores: list[Score] = [score, regard.Similarity(lambda q, k: -torch.cdist(q, k))]
    for each in scores:
        regard.weights(bias, score=each)


class Distance(Score):
    """A score of one's own."""

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.cdist(q, k)


def layers(x: Tensor) -> None:
    layer = SelfAttention(16, 4, kv_heads=2, score="bilinear", positions="rotary", causal=True)
    seen = layer.see(x, "entropy", topk=2)
    assert_type(seen.entropy, Tensor)
    assert_type(layer.weights(x), Weights)
    assert_type(layer(x, mask=regard.padding([3])), Tensor)
    assert_type(CrossAttention(16, 4)(x, x), Tensor)
    assert_type(Block(16, 4, kv_heads=2, causal=True)(x), Tensor)
    assert_type(Encoder(16, 4, 2, norm="rms", positions="rotary", dropout=0.1)(x), Tensor)
    assert_type(Decoder(16, 4, 2)(x, x), Tensor)
    assert_type(LanguageModel(65, dim=16, heads=2, kv_heads=1, norm="rms")(x), Tensor)
    assert_type(Translator(65, dim=16, heads=2)(x, x), Tensor)
    assert_type(TextEncoder(65, dim=16, heads=2)(x), Tensor)
    assert_type(FeedForward(16)(x), Tensor)
    layer(x, masked=True)  # type: ignore[call-arg]  # pyright: ignore
    Block(16, 4, norm="group")  # type: ignore[arg-type]  # pyright: ignore
    SelfAttention(16, 4, positions="spiral")  # type: ignore[arg-type]  # pyright: ignore


def training() -> None:
    assert_type(regard.learn.lm("text", "run", steps=10, context=32, tokens="bpe"), Result)
    regard.learn.lm("text", "run", optimizer="sgd")  # type: ignore[arg-type]  # pyright: ignore
    trained = regard.learn.open_model("run")
    assert_type(trained, Trained)
    assert_type(trained.tokens("a cat"), list[str])
    assert_type(trained.ids("a cat"), Tensor)
    history = regard.learn.history("run")
    View(history).save("run.html")


def recording(model: torch.nn.Module, x: Tensor) -> None:
    with regard.record(model, tokens=["a", "cat"], keep="factors", layers=[0, "h.1"]) as seen:
        model(x)
    assert_type(seen, Recording)
    assert_type(seen[0], Weights)
    assert_type(seen[-1, 1], Weights)
    assert_type(seen["h.1", 1, 0], Weights)
    assert_type(seen.layer("h.1"), Layer)
    for row in seen.summary():
        assert_type(row.entropy, float)
    assert_type(seen.layer(0).kind, Literal["self", "cross"])
    assert_type(seen.heads(by="previous")[0].value, float)
    assert_type(seen.find("cat", "a")[0].weight, float)
    assert_type(seen.find("cat")[0].key, str | int)
    seen.heads(by="entropi")  # type: ignore[arg-type]  # pyright: ignore
    assert_type(seen.show("cat", layer=1, head=0), View)
    with regard.record(model, tokens=str), regard.record(model, tokens=(["ein"], ["a", "cat"])):
        model(x)
    with regard.watch(model, every=10, callback=lambda numbers, step: print(step, numbers)) as watching:
        assert_type(watching.numbers(), dict[str, float])
    assert_type(watching.show(title="run"), View)


def over_a_corpus(model: torch.nn.Module) -> None:
    result = regard.corpus(model, ["a cat"], tokenizer=lambda text: [ord(letter) for letter in text])
    assert_type(result.heads[0].entropy, float)
    assert_type(result.html(), str)
    regard.corpus(model, ["a cat"], tokenizer=7)  # type: ignore[arg-type]  # pyright: ignore


def looking(W: Weights, image: Tensor) -> None:
    W.label(grid=(2, 2), image=image).label(grid=(2, 2), image="cat.png")  # type: ignore[arg-type]  # pyright: ignore
    view = View(W, ViewOptions(word="it"), merge=True)
    assert_type(view.html(), str)
    assert_type(regard.walk(W, word="it").weights, Tensor)


def questions(W: Weights, S: Weights) -> None:
    for number in (W.kl(S), W.js(S), W.cross_entropy(S), W.overlap(S), W.total_variation(S)):
        assert_type(number, Tensor)
    heads = W.reduce_heads("mean", heads=[0, 1])
    assert_type(heads, regard.HeadReduction)
    assert_type(heads.topk(3), TopK)
    assert_type(heads.entropy(), Tensor)
    assert_type(heads.mean_distance(), Tensor)
    heads.peak()  # type: ignore[attr-defined]  # pyright: ignore
    for number in (W.kl(heads), heads.kl(W), regard.losses.alignment(heads, regard.causal())):
        assert_type(number, Tensor)
    W.kl(number)  # type: ignore[arg-type]  # pyright: ignore
    assert_type(W.pool_blocks(8, 8), Tensor)
    assert_type(W.cover(0.9, 8, 8), Tensor)
    assert_type(W.recall(regard.causal()), Tensor)
    assert_type(W.segment_mass([slice(0, 2), [2]]), Tensor)
    assert_type(W.gather(torch.zeros(3, 2, dtype=torch.int64)), Tensor)
    assert_type(W.distance_histogram([1, 2, 4]), Tensor)


def uses(W: Weights, x: Tensor) -> None:
    scores = regard.kv.h2o(W)
    assert_type(scores, Tensor)
    assert_type(regard.kv.keep(scores, 3), Tensor)
    assert_type(regard.kv.update(scores, W), Tensor)
    assert_type(regard.losses.entropy_floor(W, 1.0), Tensor)
    assert_type(regard.losses.qk_clip(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), x, threshold=50.0), Tensor)
    assert_type(regard.losses.indexer(W, regard.losses.index_weights(x, x, x), topk=4), Tensor)
    assert_type(regard.chains.rollout([W], x), Tensor)
    assert_type(regard.patterns.classify(W, [1, 2, 3]).share(0, 0), float)


def comparing(a: Recording, b: Recording) -> None:
    changes = regard.compare(a, b, match="nearest")
    assert_type(changes[0].js, float)
    assert_type(changes.show(), View)
    assert_type(regard.load("run.regard"), Recording)


def planning() -> None:
    cost = regard.cost((1, 32, 8, 2**20, 128), 8)
    assert_type(cost.seconds, float)
    assert_type(cost.mesh.sequence, int)
    assert_type(regard.distributed.zigzag(16, 4), list[list[range]])
