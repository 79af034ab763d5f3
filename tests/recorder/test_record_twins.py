"""Layers that do what their twins did are heard less, and nothing hides in them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.recorder import kv_cache, watcher
from regard.recorder.hooks import tap


class Attention(nn.Module):
    """Attention that a switch outside of the module may change, as no attribute says."""

    other: dict[int, str] = {}  # noqa: RUF012
    flags: list[bool] = []  # noqa: RUF012

    def __init__(self, number):
        super().__init__()
        self.qkv, self.layer_idx, self.fused = nn.Linear(8, 24), number, True

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        self.flags.append(tap.hears_products())
        way = self.other.get(self.layer_idx, "fused" if self.fused else "softmax")
        if way == "fused":
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        s = q @ k.mT / math.sqrt(4)
        w = s.softmax(-1) if way == "softmax" else s.sigmoid()
        return (w @ v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), Attention(number), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(n) for n in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _nothing_switched(monkeypatch):
    monkeypatch.setattr(Attention, "other", {})
    monkeypatch.setattr(Attention, "flags", [])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(2, 6, 8)


def recorded(net, x):
    Attention.flags.clear()
    plain = net(x)
    Attention.flags.clear()
    with regard.record(net) as seen:
        assert torch.equal(net(x), plain)
    return seen


@torch.no_grad()
def test_twins_of_a_heard_layer_are_not_heard(net, x):
    recorded(net, x)
    assert Attention.flags == [True, True, False, False, False]
    recorded(net, x)
    assert Attention.flags == [False] * 5


@torch.no_grad()
def test_another_argument_class_or_attribute_is_heard(net, x):
    recorded(net, x)
    recorded(net, x[:, :5])
    assert all(Attention.flags[:2])
    net.blocks[2].attn.extra = 1
    recorded(net, x)
    assert Attention.flags == [False, False, True, True, False]


@torch.no_grad()
def test_a_layer_that_is_switched_by_an_attribute_is_recorded(net, x):
    recorded(net, x)
    net.blocks[3].attn.fused = False
    seen = recorded(net, x)
    assert seen.refused == []
    assert [layer.saved.w is not None for layer in seen.layers] == [False, False, False, True, False]
    net.blocks[3].attn.fused = True
    want = recorded(net, x)
    for one, other in zip(seen.layers, want.layers, strict=True):
        torch.testing.assert_close(one.weights.dense(), other.weights.dense())


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@torch.no_grad()
@pytest.mark.parametrize("way", ["softmax", "sigmoid"])
def test_a_layer_that_attends_in_another_way_unheard_is_named_and_heard_the_next_time(way, net, x):
    Attention.other = {3: way}  # no attribute says it
    seen = recorded(net, x)
    assert [layer.name for layer in seen.layers] == [f"blocks.{n}.attn" for n in (0, 1, 2, 4)]
    assert "blocks.3.attn" in [name for name, _ in seen.refused]
    seen = recorded(net, x)
    assert all(Attention.flags)
    assert [layer.name for layer in seen.layers] == [f"blocks.{n}.attn" for n in range(5) if way == "softmax" or n != 3]
    assert [name for name, _ in seen.refused] == ([] if way == "softmax" else ["blocks.3.attn"])


class NoReading(TorchDispatchMode):
    """Raises where a number is read, which on a GPU waits for all that it was told."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_recorded_forward_of_fused_attention_reads_no_number(net, x):
    with regard.record(net) as seen, NoReading():
        net(x)
    assert len(seen.layers) == 5


class Cached(nn.Module):
    """A decoder whose cache a switch edits in one layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CachedAttention() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class CachedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.cache = []
        self.edits = False

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.cache:
            old = self.cache[0] + (1 if self.edits else 0)
            k, v = torch.cat([old, k], 2), torch.cat([self.cache[1], v], 2)
        self.cache = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@pytest.mark.parametrize("edits", [False, True])
@torch.no_grad()
def test_keys_that_are_compared_at_the_end_are_compared(edits, x, monkeypatch):
    """As on a GPU, where only the first layer of a step waits."""
    monkeypatch.setattr(kv_cache, "AT_HAND", ())
    net = Cached().eval()
    net.layers[1].edits = edits
    with regard.record(net) as seen:
        net(x[:, :3])
        for n in range(3, 6):
            net(x[:, n : n + 1])
    assert len(seen.passes) == 1
    assert [layer.name for layer in seen.layers] == [f"layers.{n}" for n in ([0, 2] if edits else [0, 1, 2])]
    assert [name for name, _ in seen.refused] == (["layers.1"] if edits else [])
    assert seen[0].shape[-2:] == (6, 6)


def test_layers_that_are_measured_at_once_have_the_same_numbers(net, x, monkeypatch):
    looks = []
    for most in (0, 2**26):
        monkeypatch.setattr(watcher, "WAITING_BYTES", most)
        with regard.watch(net.train(), every=1) as watching:
            net(x)
        looks.append(watching.numbers())
    assert len(looks[0]) == 5 * 2 * 2
    assert looks[0] == pytest.approx(looks[1], rel=1e-6)
