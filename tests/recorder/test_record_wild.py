"""Attention as public repositories write it: recorded right or named, and nothing named that is no attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from support.toy_models import Calls, recorded


@pytest.fixture
def x():
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


def weights(seen):
    return [layer.weights.dense() for layer in seen.layers]


def reasons(seen):
    return " | ".join(reason for _, reason in seen.refused)


# Generation by a wrapper, whose own forward never runs.


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, cache):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        s = q @ k.mT
        s = s.masked_fill(torch.ones_like(s).triu(k.shape[2] - q.shape[2] + 1).bool(), -torch.inf)
        return (s.softmax(-1) @ v).squeeze(1), (k, v)


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Step(), Step()

    def generate(self, x):
        caches = [None, None]
        for part in (x[:, :3], x[:, 3:4], x[:, 4:5], x[:, 5:6]):
            for n, step in enumerate((self.first, self.second)):
                part, caches[n] = step(part, caches[n])


def test_a_generation_outside_of_every_forward_is_stitched_to_its_end(x):
    model = Wrapper()
    with torch.no_grad(), regard.record(model) as seen:
        model.generate(x)
    assert seen.refused == []
    assert [layer.shape for layer in seen.layers] == [(2, 1, 6, 6)] * 2
    q, k, _ = model.first.qkv(x).chunk(3, -1)
    causal = torch.ones(6, 6).triu(1).bool()
    torch.testing.assert_close(weights(seen)[0][:, 0], (q @ k.mT).masked_fill(causal, -torch.inf).softmax(-1))


# Scores whose keys were moved.

PERMUTED = torch.tensor([2, 0, 5, 1, 4, 3])


def scores(x):
    return x @ x.mT


MOVED = {
    "flip": lambda x: scores(x).flip(-1).softmax(-1) @ x.flip(1),
    "roll": lambda x: scores(x).roll(2, -1).softmax(-1) @ x.roll(2, 1),
    "index": lambda x: scores(x)[..., PERMUTED].softmax(-1) @ x[:, PERMUTED],
    "index_select": lambda x: scores(x).index_select(-1, PERMUTED).softmax(-1) @ x[:, PERMUTED],
    "gather": lambda x: scores(x).gather(-1, PERMUTED.expand(2, 6, 6)).softmax(-1) @ x[:, PERMUTED],
    "sort": lambda x: scores(x).sort(-1)[0].softmax(-1) @ x,
}


@pytest.mark.parametrize("operator", MOVED)
def test_keys_in_another_order_are_named(operator, x):
    seen = recorded(Calls(MOVED[operator]), x)
    assert not seen.passes
    assert f"pass through {operator} before the softmax" in reasons(seen)


def test_queries_in_another_order_are_named(x):
    assert "pass through index before" in reasons(recorded(Calls(lambda x: scores(x)[:, PERMUTED].softmax(-1) @ x), x))


@pytest.mark.parametrize("moves", [lambda s: s[[1, 0]], lambda s: s.flip(0), lambda s: s[None][[0]][0]])
def test_sequences_in_another_order_are_recorded(moves, x):
    seen = recorded(Calls(lambda x: moves(scores(x)).softmax(-1) @ moves(x)), x)
    assert seen.refused == []
    torch.testing.assert_close(weights(seen)[0][:, 0], moves(scores(x)).softmax(-1))


def test_a_position_bias_that_was_gathered_into_its_place_is_no_move(x):
    table = torch.randn(11, 8)
    distance = (torch.arange(6)[:, None] - torch.arange(6) + 5).expand(2, 6, 6)

    def attend(x):
        return (scores(x) + (x @ table.T).gather(-1, distance)).softmax(-1) @ x

    seen = recorded(Calls(attend), x)
    assert seen.refused == []
    torch.testing.assert_close(
        weights(seen)[0][:, 0], (scores(x) + (x @ table.T).gather(-1, distance)).softmax(-1), rtol=1e-5, atol=1e-6
    )


# Talking heads, by einsum and by a convolution.


class Talking(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.before, self.after = before, after
        self.mix, self.convolution = nn.Parameter(torch.randn(3, 3)), nn.Conv2d(3, 3, 1)
        self.qkv, self.norm = nn.Linear(8, 36), nn.InstanceNorm2d(3)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.talk(self.talk(q @ k.mT, self.before).softmax(-1), self.after) @ v

    def talk(self, s, way):
        if way == "einsum":
            return torch.einsum("bhij,hg->bgij", s, self.mix)
        return self.convolution(s) if way == "convolution" else self.norm(s) if way == "norm" else s


@pytest.mark.parametrize("before", ["einsum", "convolution"])
def test_heads_that_talk_before_the_softmax_are_recorded(before, x):
    model = Talking(before, None)
    x = x[:, :5]
    seen = recorded(model, x)
    assert seen.refused == []
    q, k, _ = model.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(weights(seen)[0], model.talk(q @ k.mT, before).softmax(-1))


@pytest.mark.parametrize(("before", "after"), [("einsum", "einsum"), ("convolution", "norm"), (None, "einsum")])
def test_heads_that_talk_after_the_softmax_are_named_by_the_operator(before, after, x):
    seen = recorded(Talking(before, after), x[:, :5])
    assert not seen.passes
    operator = "einsum('bhij,hg->bgij')" if after == "einsum" else "native_batch_norm"
    assert f"its weights pass through {operator} before they meet the values" in reasons(seen)


def test_weights_that_enter_another_einsum_first_are_recorded(x):
    def attend(x):  # token sampling scores tokens by the weights of the first one and the size of values
        w = scores(x).softmax(-1)
        importance = torch.einsum("bij,bj->bij", w, x.norm(dim=-1)).amax((1, 2))
        return torch.einsum("bij,bjd->bid", w, x) * importance[:, None, None]

    seen = recorded(Calls(attend), x)
    assert seen.refused == []
    torch.testing.assert_close(weights(seen)[0][:, 0], scores(x).softmax(-1))


# Axes that another module, or the input, tells apart.


class Heads(nn.Module):
    """Names its heads; the products are in a module of their own, which sees them in one axis with the batch."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv = 3, nn.Linear(8, 36)
        self.inner = Calls(lambda q, k, v: weights_of(q, k) @ v)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(x).flatten(1, 2)
        return self.inner(q, k, v).unflatten(0, (len(x), 3)).transpose(1, 2).flatten(2)


def weights_of(q, k):
    return (q @ k.mT).softmax(-1)


def test_heads_that_the_module_around_names(x):
    model = Heads()
    seen = recorded(model, x[:1])
    assert seen.refused == []
    torch.testing.assert_close(weights(seen)[0], weights_of(*model.split(x[:1])[:2]))
    assert "batch and heads share one axis" in reasons(recorded(model, x))


class Windows(Heads):
    """Batch and heads in the first axis, windows of two positions in the second."""

    def forward(self, x):
        q, k, v = self.split(x).flatten(1, 2).unflatten(2, (-1, 2))
        return (weights_of(q, k) @ v).flatten(1, 2).unflatten(0, (len(x), 3)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_windows_are_not_taken_for_heads(batch):
    seen = recorded(Windows(), torch.randn(batch, 8, 8))
    assert not seen.passes
    assert "batch and heads share one axis" in reasons(seen)


class Translator(nn.Module):
    """A recurrent encoder and decoder of (length, batch), as in the first papers."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.GRU(8, 8), nn.GRU(8, 8)

    def forward(self, x):
        keys, h = self.encoder(x)
        w = torch.einsum("bd,jbd->bj", h[0], keys).softmax(-1)
        y, _ = self.decoder((w.unsqueeze(1) @ keys.transpose(0, 1)).transpose(0, 1), h)
        self.truth = w
        return y


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_sequences_behind_the_length_of_the_input(batch):
    model = Translator()
    seen = recorded(model, torch.randn(6, batch, 8))
    if batch == 6:  # as many sequences as positions
        assert all(layer.shape == (6, 1, 1, 6) for layer in seen.layers)
    else:
        torch.testing.assert_close(weights(seen)[0], model.truth[:, None, None])


# Weights over positions that no product of queries and keys made.


def average_of_the_past(x):
    s = torch.zeros(len(x), 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    return s.softmax(-1) @ x


def test_an_average_of_the_past_is_recorded(x):
    seen = recorded(Calls(average_of_the_past), x)
    assert seen.refused == []
    torch.testing.assert_close(weights(seen)[0][0, 0], torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None])


class Synthesizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x):
        return self.scores.softmax(-1) @ x.unsqueeze(1)


def test_learned_weights_of_positions_are_recorded(x):
    model = Synthesizer()
    torch.testing.assert_close(weights(recorded(model, x))[0][0], model.scores.softmax(-1))


class SquareMixture(nn.Module):
    """As many experts as tokens."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 6), nn.Linear(8, 48)

    def forward(self, x):
        outputs = self.experts(x.mean(1)).unflatten(-1, (6, 8))
        return self.gate(x).softmax(-1) @ outputs


def test_as_many_experts_as_tokens_are_no_attention(x):
    seen = recorded(SquareMixture(), x)
    assert not seen.passes
    assert seen.refused == []


# Linear attention whose keys alone pass a softmax.


class Linear(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.qkv = way, nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part.mT for part in self.qkv(x).chunk(3, -1))  # b d n
        k = k.softmax(-1)
        if self.way == "matmul":
            return (q.mT @ (k @ v.mT)).mT
        q = q.softmax(1) if self.way == "softmax of queries" else q
        return torch.einsum("bde,bdn->ben", torch.einsum("bdn,ben->bde", k, v), q)


class LinearAttention(Linear):
    """Named as attention is."""


@pytest.mark.parametrize("way", ["einsum", "softmax of queries", "matmul"])
def test_linear_attention_has_no_weights_over_keys(way, x):
    seen = recorded(nn.Sequential(LinearAttention(way)), x)
    assert not seen.passes
    assert seen.refused == [("step.0", reasons(seen))]
    assert "as in linear attention" in reasons(seen)


@pytest.mark.parametrize("way", ["einsum", "matmul"])
def test_linear_attention_is_not_watched(way, x):
    model = nn.Sequential(LinearAttention(way))
    with (
        pytest.warns(regard.recorder.RefusedWarning, match="linear attention"),
        regard.watch(model, every=1) as watching,
    ):
        model(x).sum().backward()
    assert watching.numbers() == {}


# Attention along the edges of a graph.


class Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, edges):
        i, j = edges
        q, k, v = (project(x).view(-1, 2, 4) for project in (self.q, self.k, self.v))
        e = (q[i] * k[j]).sum(-1).exp()
        total = torch.zeros(len(x), 2).index_add(0, i, e)
        return torch.zeros_like(v).index_add(0, i, (e / total[i]).unsqueeze(-1) * v[j])


class GATConv(nn.Module):
    """Additive scores, gathered from both ends of an edge: the name says it."""

    def __init__(self):
        super().__init__()
        self.of_query, self.of_key = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, edges):
        i, j = edges
        e = F.leaky_relu(self.of_query(x)[i] + self.of_key(x)[j]).exp()
        total = torch.zeros(len(x), 1).index_add(0, i, e)
        return torch.zeros_like(x).index_add(0, i, e / total[i] * x[j])


class GatedConv(nn.Module):
    """No attention: each edge has a gate of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, edges):
        i, j = edges
        gate = (self.q(x).view(-1, 2, 4)[i] * self.k(x).view(-1, 2, 4)[j]).sum(-1).sigmoid()
        return torch.zeros_like(x).index_add(0, i, (gate.unsqueeze(-1) * x.view(-1, 2, 4)[j]).flatten(1))


EDGES = torch.tensor([[0, 0, 1, 2, 3, 3, 4, 5], [1, 2, 0, 5, 3, 4, 4, 0]])


@pytest.mark.parametrize(
    ("model", "reason"), [(Edges, "its weights meet their values in index_add"), (GATConv, "GATConv ran no")]
)
def test_attention_along_edges_is_named(model, reason, x):
    seen = recorded(model(), x[0], EDGES)
    assert not seen.passes
    assert [name for name, _ in seen.refused] == ["step"]
    assert reason in reasons(seen)


def test_gates_along_edges_are_not_named(x):
    assert recorded(GatedConv(), x[0], EDGES).refused == []


# Modules that look like attention, and are the model itself.


class SigmoidAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        w = self.score(torch.tanh(x)).sigmoid()
        return (w / w.sum(1, keepdim=True) * x).sum(1)


def test_a_model_that_looks_like_attention_is_named_as_a_part_is(x):
    assert "SigmoidAttention ran no fused kernel" in reasons(recorded(SigmoidAttention(), x))
    with (
        pytest.warns(regard.recorder.RefusedWarning, match="SigmoidAttention"),
        regard.record(model := SigmoidAttention()) as seen,
    ):
        model(x)
    assert [name for name, _ in seen.refused] == [""]
    with regard.record(model := nn.MultiheadAttention(8, 2, batch_first=True)) as seen:
        model(x, x, x)
    assert seen.refused == []


# No false alarms.


def test_an_index_made_of_gates_is_no_attention(x):
    """Contextual position encoding: gates of scores are summed to positions, whose biases are looked up."""
    table = torch.randn(7, 8)

    def attend(x):
        s = scores(x)
        positions = s.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=6)
        floor = positions.floor().long()
        bias = (x @ table.T).gather(-1, floor) * (positions - floor)
        return (s + bias).softmax(-1) @ x

    seen = recorded(Calls(attend), x)
    assert seen.refused == []
    assert seen.layers[0].shape == (2, 1, 6, 6)


class HyperConnections(nn.Module):
    """Four residual streams, mixed by gates of their own numbers around a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.gates, self.static = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(4, 5))
        self.out, self.up, self.down = nn.Parameter(torch.randn(8)), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        streams = x.unsqueeze(2).expand(-1, -1, 4, -1)
        for _ in range(2):
            normed = F.rms_norm(streams, (8,))
            mix = (normed @ self.gates).tanh() * 0.1 + self.static
            mixed = torch.einsum("btsk,btsd->btkd", mix, streams)
            branch, streams = mixed[:, :, 0], mixed[:, :, 1:]
            y = self.down(F.gelu(self.up(branch)))
            depth = (normed @ self.out).tanh() + 1
            streams = streams + torch.einsum("btd,bts->btsd", y, depth)
        return streams.sum(2)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_hyper_connections_are_no_attention(batch):
    for length in (4, 5, 10):
        assert recorded(HyperConnections(), torch.randn(batch, length, 8)).refused == []


class Location(nn.Module):
    """A kernel over the weights of the step before that is as long as the sequence."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 7, padding=3)
        self.of_weights, self.of_keys, self.score = nn.Linear(3, 5), nn.Linear(8, 5), nn.Linear(5, 1)

    def forward(self, x):
        before = torch.full((len(x), 1, x.shape[1]), 1 / x.shape[1])
        e = self.of_weights(self.convolution(before).mT) + self.of_keys(x)
        return (self.score(torch.tanh(e)).squeeze(-1).softmax(-1).unsqueeze(-1) * x).sum(1)


@pytest.mark.parametrize("length", [6, 7, 9])
def test_a_kernel_as_long_as_the_sequence_hides_no_attention(length):
    seen = recorded(Location(), torch.randn(2, length, 8))
    assert [layer.shape for layer in seen.layers] == [(2, 1, 1, length)]
