"""Layers that do what they were heard to do are heard less, and nothing hides in them."""

import functools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.recorder import kv_cache, watch_listener
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
def test_a_layer_that_was_heard_is_not_heard_again(net, x):
    recorded(net, x)
    assert Attention.flags == [True] * 5
    recorded(net, x)
    assert Attention.flags == [False] * 5


@torch.no_grad()
def test_another_argument_class_or_attribute_is_heard(net, x):
    recorded(net, x)
    recorded(net, x[:, :5])
    assert all(Attention.flags)
    net.blocks[2].attn.extra = 1
    recorded(net, x)
    assert all(Attention.flags)
    recorded(net, x)
    assert not any(Attention.flags)


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
    recorded(net, x)
    Attention.other = {3: way}  # no attribute says it
    seen = recorded(net, x)
    assert [layer.name for layer in seen.layers] == [f"blocks.{n}.attn" for n in (0, 1, 2, 4)]
    assert "blocks.3.attn" in [name for name, _ in seen.refused]
    seen = recorded(net, x)
    assert all(Attention.flags)
    assert [layer.name for layer in seen.layers] == [f"blocks.{n}.attn" for n in range(5) if way == "softmax" or n != 3]
    assert [name for name, _ in seen.refused] == ([] if way == "softmax" else ["blocks.3.attn"])


def by_hand(q, k, v):
    return (q @ k.mT / 2).sigmoid() @ v


class Beside(Attention):
    """Fused attention, and beside it attention without a softmax where `attends_twice` says so."""

    def __init__(self, number):
        super().__init__(number)
        self.twice = False

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        if self.attends_twice(x):
            y = y + by_hand(q, k, v)
        return y.transpose(1, 2).flatten(2)

    def attends_twice(self, x):
        return self.twice


class ByNumber(Beside):
    def attends_twice(self, x):
        return self.layer_idx == 3


class ByInput(Beside):
    def attends_twice(self, x):
        return self.layer_idx == 3 and bool(x.abs().max() > 50)


class BySize(Beside):
    def attends_twice(self, x):
        return self.layer_idx == 3 and len(x[x.abs() > 50]) > 0


class Around(nn.Module):
    """Attention without a softmax under a name that does not say so."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + by_hand(q, k, v).transpose(1, 2).flatten(2)


def attend_twice(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return (F.scaled_dot_product_attention(q, k, v) + by_hand(q, k, v)).transpose(1, 2).flatten(2)


def switch_attribute(net):
    net.blocks[3].attn.twice = True


def patch_forward(net):
    net.blocks[3].attn.forward = types.MethodType(attend_twice, net.blocks[3].attn)


def patch_class(net):
    kind = type("Other", (Beside,), {"forward": attend_twice})
    net.blocks[3].attn.__class__ = kind


def add_hook(net):
    net.blocks[3].mlp.register_forward_hook(lambda module, x, y: y + by_hand(y[:, None], y[:, None], y[:, None])[:, 0])


def swap_part(net):
    net.blocks[3].mlp = Around()


def swap_function(net):
    net.blocks[3].attn.attends_twice = lambda x: True


CHANGES = [switch_attribute, patch_forward, patch_class, add_hook, swap_part, swap_function]


def with_attention(kind):
    torch.manual_seed(0)
    net = Net()
    for n, block in enumerate(net.blocks):
        block.norm, block.attn = nn.Identity(), kind(n)
    return net.eval()


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@torch.no_grad()
@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("when", ["first", "later"])
def test_attention_without_softmax_in_one_layer_is_named(when, change, x):
    """Whatever makes one layer of its kind another one."""
    net = with_attention(ByNumber if change is None else Beside)
    if when == "later":
        for _ in range(2):
            recorded(net, x)
    if change is not None:
        change(net)
    for _ in range(3):
        seen = recorded(net, x)
        assert len(seen.layers) == 5
        assert [name.split(".")[1] for name, _ in seen.refused] == ["3"]


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@torch.no_grad()
def test_a_class_whose_forward_is_replaced_is_heard(x, monkeypatch):
    class Own(Beside):
        pass

    net = with_attention(Own)
    assert recorded(net, x).refused == []
    assert recorded(net, x).refused == []
    monkeypatch.setattr(Own, "forward", attend_twice)
    assert len(recorded(net, x).refused) == 5


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@torch.no_grad()
@pytest.mark.parametrize("kind", [ByInput, BySize])
def test_a_layer_that_depends_on_its_input_is_heard(kind, x):
    """Python reads a number from a tensor to choose its way, and another number is listened to from there on."""
    net = with_attention(kind)
    for _ in range(2):
        assert recorded(net, x).refused == []
    assert not any(Attention.flags)
    assert [name for name, _ in recorded(net, 100 * x).refused] == ["blocks.3.attn"]
    assert recorded(net, x).refused == []
    with regard.record(net) as seen:  # in one block
        net(x), net(x), net(100 * x)
    assert [name for name, _ in seen.refused] == ["blocks.3.attn"]


@pytest.mark.filterwarnings("ignore::regard.recorder.RefusedWarning")
@torch.no_grad()
def test_an_attribute_that_changes_within_a_block_is_noticed(x):
    net = with_attention(Beside)
    recorded(net, x)
    with regard.record(net) as seen:
        net(x)
        switch_attribute(net)
        net(x)
    assert [name for name, _ in seen.refused] == ["blocks.3.attn"]


class Differs(Attention):
    """Layers of one kind with another mask and scale each, which no attribute says."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.way(x.shape[1])).transpose(1, 2).flatten(2)

    def way(self, n):
        scale = 0.2 + 0.1 * self.layer_idx
        draw = torch.Generator().manual_seed(self.layer_idx)
        mask = [
            None,
            torch.ones(n, n).tril().bool(),
            torch.randn(n, n, generator=draw),
            self.shared(n),
            self.shared(n),
        ]
        return {"scale": scale, "attn_mask": mask[self.layer_idx]}

    @staticmethod
    @functools.cache
    def shared(n):
        return torch.ones(n, n).tril(1).bool()


@torch.no_grad()
def test_masks_and_scales_of_calls_that_come_again_are_their_own(x):
    net = with_attention(Differs)
    inputs = {}
    for n, block in enumerate(net.blocks):
        block.attn.register_forward_pre_hook(lambda module, args, n=n: inputs.__setitem__(n, args[0]))
    for length in (6, 6, 5, 6):
        seen = recorded(net, x[:, :length])
        for n, block in enumerate(net.blocks):
            q, k, _ = block.attn.qkv(inputs[n]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            way = block.attn.way(length)
            s, mask = q @ k.mT * way["scale"], way["attn_mask"]
            if mask is not None:
                s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
            torch.testing.assert_close(seen[n].dense(), s.softmax(-1))


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
        monkeypatch.setattr(watch_listener, "WAITING_BYTES", most)
        with regard.watch(net.train(), every=1) as watching:
            net(x)
        looks.append(watching.numbers())
    assert len(looks[0]) == 5 * 2 * 2
    assert looks[0] == pytest.approx(looks[1], rel=1e-6)
