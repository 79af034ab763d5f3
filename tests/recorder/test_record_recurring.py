"""Attention calls that come again in the form they had are recorded as they were the first time."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.recorder import kv_cache
from regard.recorder.thread_recorder import ThreadRecorder

transformers = pytest.importorskip("transformers")


@pytest.fixture
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def again(monkeypatch):
    """How many calls were recorded without a second reading, and how many with one."""
    counts = {"again": 0, "read": 0}
    own, plain = ThreadRecorder._add_again, ThreadRecorder._add

    def add_again(self, *args):
        counts["again"] += 1
        own(self, *args)

    def add(self, *args):
        counts["read"] += 1
        plain(self, *args)

    monkeypatch.setattr(ThreadRecorder, "_add_again", add_again)
    monkeypatch.setattr(ThreadRecorder, "_add", add)
    return counts


def weights_of(seen):
    return [layer.weights.dense() for one in seen.passes for layer in one.layers]


def recordings(model, run, count=3, **options):
    seen = []
    for _ in range(count):
        with torch.no_grad(), regard.record(model, **options) as one:
            run()
        assert one.refused == []
        seen.append(one)
    return seen


def assert_same(first, *others):
    for other in others:
        assert [(x.name, x.kind, x.shape) for x in first.layers] == [(x.name, x.kind, x.shape) for x in other.layers]
        for one, another in zip(weights_of(first), weights_of(other), strict=True):
            torch.testing.assert_close(one, another, rtol=0, atol=0)


def test_a_forward(llama, again):
    x = torch.arange(6)[None]
    assert_same(*recordings(llama, lambda: llama(input_ids=x, use_cache=False)))
    assert again == {"again": 6, "read": 3}


def test_other_numbers_are_those_of_their_own_pass(llama):
    inputs = [torch.arange(6)[None] + n for n in range(3)]
    for x in (*inputs, *inputs):
        with torch.no_grad(), regard.record(llama) as seen:
            want = llama(input_ids=x, use_cache=False).logits
        eager = transformers.LlamaForCausalLM.from_pretrained(
            None, config=llama.config, state_dict=llama.state_dict(), attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            y = eager(input_ids=x, use_cache=False, output_attentions=True)
        torch.testing.assert_close(y.logits, want)
        for layer, w in zip(seen.layers, y.attentions, strict=True):
            torch.testing.assert_close(layer.weights.dense(), w)


def test_padding_and_values(llama):
    x, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    run = lambda: llama(input_ids=x, attention_mask=mask, use_cache=False)  # noqa: E731
    first, *others = recordings(llama, run, values=True)
    assert_same(first, *others)
    for other in others:
        for one, another in zip(first.layers, other.layers, strict=True):
            torch.testing.assert_close(one.norm_weighted(1), another.norm_weighted(1))


@pytest.mark.parametrize("waits", [False, True])
def test_a_generation(waits, llama, again, monkeypatch):
    if waits:  # as on a GPU, where keys of all layers are compared at once
        monkeypatch.setattr(kv_cache, "AT_HAND", ())
    x = torch.arange(4)[None]
    run = lambda: llama.generate(x, max_new_tokens=6, min_new_tokens=6, do_sample=False)  # noqa: E731
    seen = recordings(llama, run)
    assert seen[0][0].shape[-2:] == (9, 9)
    assert_same(*seen)
    assert again["again"] > again["read"]
    w = seen[-1][1].dense()
    torch.testing.assert_close(w.sum(-1), torch.ones_like(w.sum(-1)))
    assert not w.triu(1).any()


def test_watched_steps_have_the_numbers_of_the_first(llama):
    x = torch.arange(12).view(2, 6)
    looks = []
    for _ in range(3):
        with regard.watch(llama.train(), every=1) as watching:
            llama(input_ids=x, use_cache=False)
        looks.append(watching.numbers())
    assert looks[0] == looks[1] == looks[2]


class Writes(nn.Module):
    """Attention that may write over its queries after the call, as no attribute of a layer says."""

    late: list[bool] = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part.contiguous() for part in self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4))
        y = F.scaled_dot_product_attention(q, k, v)
        if self.late:
            q.zero_()
        return y.transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@torch.no_grad()
def test_queries_that_are_written_over_are_noticed(monkeypatch):
    monkeypatch.setattr(Writes, "late", [])
    net, x = nn.Sequential(Writes(), Writes()), torch.randn(2, 5, 8)
    for _ in range(2):
        with regard.record(net) as seen:
            net(x)
        assert len(seen.layers) == 2
    Writes.late.append(True)
    with regard.record(net) as seen:
        net(x)
    assert [name for name, _ in seen.refused] == ["0", "1"]


@torch.no_grad()
def test_autocast_and_batches_are_forms_of_their_own():
    torch.manual_seed(0)
    net = nn.Sequential(Writes(), Writes()).eval()
    for batch, cast in [(2, False), (3, False), (2, True), (2, False), (3, True), (3, False)]:
        x = torch.randn(batch, 5, 8)
        with torch.autocast("cpu", enabled=cast), regard.record(net) as seen:
            net(x)
        assert [layer.shape for layer in seen.layers] == [(batch, 2, 5, 5)] * 2
        q, k, _ = net[0].qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        tolerance = {"rtol": 0.1, "atol": 0.02} if cast else {}
        torch.testing.assert_close(seen[0].dense().float(), (q @ k.mT / 2).softmax(-1), **tolerance)


@torch.no_grad()
def test_the_memory_of_a_model_does_not_hold_it():
    net = nn.Sequential(Writes(), Writes())
    net[0].around = [net]  # a part that knows its model
    for _ in range(2):
        with regard.record(net) as seen:
            net(torch.randn(2, 5, 8))
    alive = weakref.ref(net)
    del net, seen
    gc.collect()
    assert alive() is None
