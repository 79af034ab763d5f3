"""Attention that neither the class nor the name of a module announces: recorded right, or named with a true reason.

Each case is a function of x (b, n, d) with the weights it computes, (b, h, i, j), or the reason for which it is refused.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.recorder import RefusedWarning
from support.toy_models import Calls, Model, recorded

B, N, D = 3, 5, 8


@pytest.fixture
def x():
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1))


def scores(x):
    return x @ x.mT


def heads(x):
    """(b, 2, n, d / 2)"""
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def by_exp(x):
    e = scores(x).exp()
    return e / e.sum(-1, keepdim=True)


def by_shifted_exp(x):
    s = scores(x)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(dim=-1, keepdim=True)


def in_place(x):
    s = scores(x)
    s.sub_(s.amax(-1, keepdim=True)).exp_()
    return s.div_(s.sum(-1, keepdim=True))


def by_sigmoid(x):
    w = scores(x).sigmoid()
    return w / w.sum(-1, keepdim=True)


def by_distance(x):
    return (-0.1 * torch.cdist(x, x) ** 2).softmax(-1)


def into_a_buffer(x):
    w = torch.softmax(scores(x), -1, out=torch.empty(B, N, N))
    return torch.matmul(w, x, out=torch.empty(B, N, D))


def largest_renormalised(x):
    w = scores(x).softmax(-1)
    top, at = w.topk(2, -1)
    return torch.zeros_like(w).scatter(-1, at, top / top.sum(-1, keepdim=True))


def below_the_second_hidden(x):
    w = scores(x).softmax(-1)
    second = w.topk(2, -1).values[..., -1:]
    w = torch.where(w >= second, w, 0.0)
    return w / w.sum(-1, keepdim=True)


def lower_triangle(x):
    w = scores(x).softmax(-1).tril()
    return w / w.sum(-1, keepdim=True)


def masked_exp(x):
    w = torch.where(torch.ones(N, N).tril().bool(), (0.1 * scores(x)).exp(), 0.0)
    return w / w.sum(-1, keepdim=True)


def sparsemax(x):
    s = scores(x)
    ordered = s.sort(-1, descending=True).values
    sums, count = ordered.cumsum(-1), torch.arange(1, N + 1)
    support = (1 + count * ordered > sums).sum(-1, keepdim=True)
    return (s - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)


def by_products(x, axis=-1, in_place=False):
    s = scores(F.elu(x) + 1)
    return s.div_(s.sum(axis, keepdim=True)) if in_place else s / (s.sum(axis, keepdim=True) + 1e-6)


def complex_weights(x):
    z = torch.complex(x, x.flip(-1))
    return (z @ z.mT.conj()).real.softmax(-1)


def second_softmax(x):
    w = scores(x).softmax(-1)
    return w.masked_fill(w < 0.2, -1e9).softmax(-1)


def written_over(x):
    w = scores(x).softmax(-1)
    w[..., 0] = 0
    w[:, 1].fill_(1 / N)
    return w.index_fill_(-1, torch.tensor([2]), 0.0)


def scores_of(q, x):
    return q @ x.mT


RECORDED = {
    "softmax over the rows, transposed": (lambda x: scores(x).softmax(-2).mT @ x, lambda x: scores(x).softmax(-2).mT),
    "softmax over axis 1, einsum": (
        lambda x: torch.einsum("bji,bjd->bid", scores(x).softmax(1), x),
        lambda x: scores(x).softmax(1).mT,
    ),
    "values on the left": (lambda x: x.mT @ scores(x).softmax(-1).mT, lambda x: scores(x).softmax(-1)),
    "values on the left, bmm": (
        lambda x: torch.bmm(x.mT, scores(x).softmax(2).permute(0, 2, 1)),
        lambda x: scores(x).softmax(-1),
    ),
    "weighted sum": (
        lambda x: (scores(x).softmax(-1)[..., None] * x[:, None]).sum(-2),
        lambda x: scores(x).softmax(-1),
    ),
    "weighted sum, values by feature": (
        lambda x: (scores(x).softmax(-1)[:, :, None] * x.mT[:, None]).sum(-1),
        lambda x: scores(x).softmax(-1),
    ),
    "weighted sum, heads": (
        lambda x: (scores(heads(x)).softmax(-1)[..., None] * heads(x)[:, :, None]).sum(-2),
        lambda x: scores(heads(x)).softmax(-1),
    ),
    "weighted sum, weights expanded": (
        lambda x: (scores(x).softmax(-1)[..., None].expand(-1, -1, -1, D) * x[:, None]).sum(-2),
        lambda x: scores(x).softmax(-1),
    ),
    "exp and sum": (lambda x: by_exp(x) @ x, by_exp),
    "exp and sum in place": (lambda x: in_place(x) @ x, in_place),
    "exp of scores less their logsumexp": (
        lambda x: (scores(x) - scores(x).logsumexp(-1, keepdim=True)).exp() @ x,
        lambda x: scores(x).softmax(-1),
    ),
    "exp and F.normalize": (lambda x: F.normalize(scores(x).exp(), p=1, dim=-1) @ x, by_exp),
    "sigmoid over its sum": (lambda x: by_sigmoid(x) @ x, by_sigmoid),
    "a Gaussian of distances": (lambda x: by_distance(x) @ x, by_distance),
    "einsum with an ellipsis": (
        lambda x: torch.einsum("...qk,...kc->...qc", torch.einsum("...qc,...kc->...qk", x, x).softmax(-1), x),
        lambda x: scores(x).softmax(-1),
    ),
    "out=": (into_a_buffer, lambda x: scores(x).softmax(-1)),
    "exp of shifted scores and sum": (lambda x: by_shifted_exp(x) @ x, by_shifted_exp),
    "log_softmax and exp": (
        lambda x: scores(x).log_softmax(-1).exp() @ x,
        lambda x: scores(x).log_softmax(-1).exp(),
    ),
    "top-k renormalised": (lambda x: largest_renormalised(x) @ x, largest_renormalised),
    "threshold renormalised": (lambda x: below_the_second_hidden(x) @ x, below_the_second_hidden),
    "mean over heads": (
        lambda x: scores(heads(x)).softmax(-1).mean(1, keepdim=True) @ heads(x),
        lambda x: scores(heads(x)).softmax(-1).mean(1, keepdim=True),
    ),
    "mean over heads, without their axis": (
        lambda x: scores(heads(x)).softmax(-1).mean(1) @ x,
        lambda x: scores(heads(x)).softmax(-1).mean(1),
    ),
    "half the sum over heads": (
        lambda x: (scores(heads(x)).softmax(-1).sum(1) / 2) @ x,
        lambda x: scores(heads(x)).softmax(-1).mean(1),
    ),
    "clamped from above": (
        lambda x: scores(x).softmax(-1).clamp(max=0.4) @ x,
        lambda x: scores(x).softmax(-1).clamp(max=0.4),
    ),
    "lower triangle renormalised": (lambda x: lower_triangle(x) @ x, lower_triangle),
    "masked exp over its sum": (lambda x: masked_exp(x) @ x, masked_exp),
    "sparsemax": (lambda x: sparsemax(x) @ x, sparsemax),
    "rows joined": (
        lambda x: torch.cat([scores_of(q, x).softmax(-1) for q in x.split(2, 1)], 1) @ x,
        lambda x: scores(x).softmax(-1),
    ),
    "rows joined one by one": (
        lambda x: torch.cat([scores_of(q, x).softmax(-1) for q in x.split(1, 1)], 1) @ x,
        lambda x: scores(x).softmax(-1),
    ),
    "heads stacked": (
        lambda x: torch.stack([scores(h).softmax(-1) for h in heads(x).unbind(1)], 1) @ heads(x),
        lambda x: scores(heads(x)).softmax(-1),
    ),
    "rows reversed": (lambda x: scores(x).softmax(-1).flip(1) @ x, lambda x: scores(x).softmax(-1).flip(1)),
    "products over their sum": (lambda x: by_products(x) @ x, by_products),
    "products over their sum, in place": (lambda x: by_products(x, in_place=True) @ x, by_products),
    "products over their sum, by column": (
        lambda x: torch.einsum("bji,bjd->bid", by_products(x, axis=1), x),
        lambda x: by_products(x, axis=1).mT,
    ),
    "softmax of a softmax": (
        lambda x: scores(x).softmax(-1).softmax(-1) @ x,
        lambda x: scores(x).softmax(-1).softmax(-1),
    ),
    "softmax of the largest weights": (lambda x: second_softmax(x) @ x, second_softmax),
    "complex queries and keys": (lambda x: complex_weights(x) @ x, complex_weights),
    "some written over": (lambda x: written_over(x) @ x, written_over),
    "one query": (
        lambda x: torch.einsum("bd,bnd->bn", x[:, 0], x).softmax(-1)[:, None] @ x,
        lambda x: torch.einsum("bd,bnd->bn", x[:, 0], x).softmax(-1)[:, None],
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_right(case, x):
    function, expected = RECORDED[case]
    seen = recorded(Calls(function), x)
    w = expected(x)
    assert seen.refused == []
    assert [layer.name for layer in seen.layers] == ["step"]
    torch.testing.assert_close(seen[0].dense(), w if w.ndim == 4 else w[:, None], atol=1e-6, rtol=1e-5)


FLAT = {
    "2-D": lambda x: (x @ x.T).softmax(-1) @ x,
    "2-D, mm": lambda x: torch.mm(torch.mm(x, x.T).softmax(-1), x),
    "2-D, einsum": lambda x: torch.einsum("ij,jd->id", torch.einsum("id,jd->ij", x, x).softmax(-1), x),
    "2-D, softmax over rows": lambda x: (x @ x.T).softmax(0).T @ x,
    "2-D, weighted sum": lambda x: ((x @ x.T).softmax(-1)[..., None] * x).sum(-2),
    "2-D, values on the left": lambda x: x.T @ (x @ x.T).softmax(-1).T,
    "2-D, addmm": lambda x: torch.addmm(torch.zeros_like(x), (x @ x.T).softmax(-1), x),
}


@pytest.mark.parametrize("case", FLAT)
def test_without_a_batch(case, x):
    x = x[0]
    seen = recorded(Calls(FLAT[case]), x)
    assert seen.refused == []
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].dense()[0, 0], (x @ x.T).softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "summed", [lambda w, keys: w @ keys, lambda w, keys: keys.T @ w, lambda w, keys: torch.mv(keys.T, w)]
)
def test_one_query_without_a_batch(summed, x):
    keys = x[0]
    seen = recorded(Calls(lambda keys: summed((keys @ keys[0]).softmax(0), keys)), keys)
    torch.testing.assert_close(seen[0].dense(), (keys @ keys[0]).softmax(0)[None, None, None])


def test_dropout_before_a_transpose(x):
    """The weights before dropout, in the order of the tensor that meets the values."""
    torch.manual_seed(0)
    model = Model(Calls(lambda x: torch.dropout(scores(x).softmax(-2), 0.5, True).mT.contiguous() @ x))
    with regard.record(model) as seen:
        model(x)
    torch.testing.assert_close(seen[0].dense()[:, 0], scores(x).softmax(-2).mT)


def rows_apart(x, w):
    return torch.cat([w[:, :, :2] @ heads(x), w[:, :, 2:] @ heads(x)], 2)


def rows_apart_dropped(x, w):
    return torch.cat([torch.dropout(part, 0.1, False) @ heads(x) for part in (w[:, :, :2], w[:, :, 2:])], 2)


def keys_apart(x, w):
    return w[..., :2] @ heads(x)[..., :2, :] + w[..., 2:] @ heads(x)[..., 2:, :]


def heads_apart(x, w):
    return torch.stack([w[:, h] @ heads(x)[:, h] for h in range(2)], 1)


def matrices_apart(x, w):
    return torch.stack([torch.tensordot(w[b, h], heads(x)[b, h], 1) for b in range(B) for h in range(2)])


PARTS = {
    "rows": (rows_apart, lambda w: [w[:, :, :2], w[:, :, 2:]]),
    "rows after dropout": (rows_apart_dropped, lambda w: [w[:, :, :2], w[:, :, 2:]]),
    "keys": (keys_apart, lambda w: [w[..., :2], w[..., 2:]]),
    "heads": (heads_apart, lambda w: [w[:, :1], w[:, 1:]]),
    "matrices": (matrices_apart, lambda w: [w[b : b + 1, h : h + 1] for b in range(B) for h in range(2)]),
    "the same part twice": (lambda x, w: w[:, :1] @ heads(x) + w[:, :1] @ heads(2 * x), lambda w: [w[:, :1]]),
    "the whole twice": (lambda x, w: w @ heads(x) + w @ heads(2 * x), lambda w: [w]),
}


@pytest.mark.parametrize("case", PARTS)
def test_every_part_of_a_softmax_that_meets_values_is_a_layer(case, x):
    function, parts = PARTS[case]
    seen = recorded(Calls(lambda x: function(x, scores(heads(x)).softmax(-1))), x)
    assert seen.refused == []
    for layer, w in zip(seen.layers, parts(scores(heads(x)).softmax(-1)), strict=True):
        torch.testing.assert_close(layer.weights.dense(), w)


def test_many_heads_in_a_loop_are_all_recorded(x):
    """More products than operators after which a softmax that met nothing is given up."""
    many = x.new_zeros(1, 64, N, 2)
    seen = recorded(Calls(lambda _: torch.stack([w @ many[0, 0] for w in scores(many).softmax(-1)[0]])), x)
    assert seen.refused == []
    assert len(seen.layers) == 64


def chosen_and_gathered(x):
    top, at = scores(x).topk(2, -1)
    values = x[torch.arange(B)[:, None, None], at]
    return (top.softmax(-1)[..., None] * values).sum(-2)


def weights_chosen_and_gathered(x):
    top, at = scores(x).softmax(-1).topk(2, -1)
    values = x[torch.arange(B)[:, None, None], at]
    return ((top / top.sum(-1, keepdim=True))[..., None] * values).sum(-2)


def slots(x):
    w = scores(x).softmax(-2) + 1e-8
    w = w / w.sum(-1, keepdim=True)
    return w @ x


def indexed_and_summed(x):
    w = scores(x).softmax(-1)[torch.arange(B)]
    return (w[:, :, None] * x.mT[:, None]).sum(-1)


def key_by_key(x):
    w = scores(x).softmax(-1)
    return sum(w[..., j : j + 1] * x[:, j : j + 1] for j in range(N))


def two_steps(x):
    w = scores(x).softmax(-1)
    return (w @ w) @ x


def two_steps_by_einsum(x):
    w = torch.einsum("bij,bjk->bik", scores(x).softmax(-1), scores(2 * x).softmax(-1))
    return w @ x


REFUSED = {
    "differential": (lambda x: (scores(x).softmax(-1) - 0.5 * scores(2 * x).softmax(-1)) @ x, "differential"),
    "one minus": (lambda x: ((1 - scores(x).softmax(-1)) / N) @ x, None),
    "top-k of scores, gathered": (chosen_and_gathered, "top-k"),
    "top-k of weights, gathered": (weights_chosen_and_gathered, "top-k"),
    "normalised afterwards": (lambda x: (scores(x).exp() @ x) / scores(x).exp().sum(-1, keepdim=True), "before it is divided"),
    "a fifth axis": (lambda x: scores(x.view(1, B, N, 2, 4).transpose(2, 3)).softmax(-1) @ x.view(1, B, N, 2, 4).transpose(2, 3), "5 axes"),
    "slots": (slots, "slot attention"),
    "sparse": (lambda x: torch.stack([torch.sparse.softmax(scores(one).to_sparse(), 1) @ one for one in x]), "sparse"),
    "multiplied": (lambda x: (2 * scores(x).softmax(-1)) @ x, "sum to more than 1"),
    "multiplied in place": (lambda x: scores(x).softmax(-1).mul_(-1.0) @ x, "some rows are negative"),
    "scaled up": (lambda x: (scores(x).softmax(-1) / 0.1) @ x, "sum to more than 1"),
    "sigmoid": (lambda x: scores(x).sigmoid() @ x, "without a softmax"),
    "sigmoid of scaled and masked scores": (lambda x: (scores(x) / 2 - 1).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).sigmoid() @ x, "without a softmax"),
    "ReLU over the length": (lambda x: (scores(heads(x)).relu() / N) @ heads(x), "without a softmax"),
    "ReLU squared": (lambda x: scores(x).relu().square() @ x, "without a softmax"),
    "ReLU to a power": (lambda x: (F.relu(scores(x)) ** 2 / N) @ x, "without a softmax"),
    "ReLU in place": (lambda x: F.relu(scores(x), inplace=True) @ x, "without a softmax"),
    "SiLU": (lambda x: F.silu(scores(x)) / N @ x, "without a softmax"),
    "sigmoid, values on the left": (lambda x: (x.mT @ scores(x).sigmoid()).mT, "without a softmax"),
    "sigmoid by einsum": (lambda x: torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", x, x).sigmoid(), x), "without a softmax"),
    "sigmoid, weighted sum": (lambda x: (scores(x).sigmoid()[..., None] * x[:, None]).sum(-2), "without a softmax"),
    "clamped from below": (lambda x: scores(x).softmax(-1).clamp(min=0.3) @ x, "sum to more than 1"),
    "clamped from below in place": (lambda x: scores(x).softmax(-1).clamp_(min=0.3) @ x, "sum to more than 1"),
    "sum over heads": (lambda x: scores(heads(x)).softmax(-1).sum(1) @ x, "sum to more than 1"),
    "larger of two": (lambda x: torch.maximum(scores(x).softmax(-1), scores(2 * x).softmax(-1)) @ x, "combined"),
    "keys reversed": (lambda x: scores(x).softmax(-1).flip(-1) @ x.flip(1), "pass through flip"),
    "keys reversed, values on the left": (lambda x: x.flip(1).mT @ scores(x).softmax(-1).flip(-1).mT, "pass through flip"),
    "keys rolled": (lambda x: torch.roll(scores(x).softmax(-1), 1, -1) @ x, "pass through roll"),
    "all axes rolled": (lambda x: torch.roll(scores(x).softmax(-1), 1) @ x, "pass through roll"),
    "keys chosen": (lambda x: scores(x).softmax(-1).index_select(-1, torch.tensor([0, 2])) @ x[:, [0, 2]], "pass through index_select"),
    "keys indexed": (lambda x: scores(x).softmax(-1)[..., [0, 2]] @ x[:, [0, 2]], "pass through index"),
    "keys added": (lambda x: F.pad(scores(x).softmax(-1), (0, 1)) @ F.pad(x, (0, 0, 0, 1)), "pass through constant_pad_nd"),
    "keys joined": (lambda x: (torch.cat([scores(x).softmax(-1), scores(2 * x).softmax(-1)], -1) / 2) @ torch.cat([x, x], 1), "pass through cat"),
    "running sum": (lambda x: (scores(x).softmax(-1).cumsum(-1) / N) @ x, "pass through cumsum"),
    "keys indexed, weighted sum": (indexed_and_summed, "pass through index"),
    "key by key": (key_by_key, "a sum of single keys"),
    "two steps": (two_steps, "a product with other weights"),
    "two steps by einsum": (two_steps_by_einsum, "a product with other weights"),
    "every second key": (lambda x: scores(x).softmax(-1)[..., ::2] @ x[:, ::2], "nothing says which axis"),
    "complex values": (lambda x: (scores(x).softmax(-1).to(torch.complex64) @ torch.complex(x, x)).real, "complex64"),
    "whole numbers": (lambda x: ((scores(x).softmax(-1) * 255).to(torch.int32) @ (x * 9).int()) / 255, "int32"),
    "sigmoid with dropout": (lambda x: torch.dropout(scores(x).sigmoid(), 0.1, False) @ x, "without a softmax"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case, x):
    function, reason = REFUSED[case]
    seen = recorded(Calls(function), x)
    if reason is None:  # still weights: rows of (1 - w) / n sum to less than 1
        assert len(seen) == 1
        torch.testing.assert_close(seen[0].dense()[:, 0], (1 - scores(x).softmax(-1)) / N)
        return
    assert len(seen) == 0
    assert [name for name, _ in seen.refused] == ["step"]
    assert reason in seen.refused[0][1]


class Cell(nn.Module):
    """Additive attention in a recurrent cell."""

    def __init__(self, size=D, summed=False):
        super().__init__()
        self.keys, self.state, self.score = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, 1)
        self.rnn = nn.GRUCell(size, size)
        self.summed = summed
        self.weights = []

    def forward(self, x):
        h = x.new_zeros(len(x), x.shape[-1])
        self.weights = []
        for _ in range(2):
            w = self.score(torch.tanh(self.keys(x) + self.state(h)[:, None])).softmax(1)
            self.weights.append(w.mT)
            h = self.rnn((w * x).sum(1) if self.summed else (w.mT @ x)[:, 0], h)
        return h


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("length", [N, D])
def test_additive_attention_in_a_cell(summed, batch, length):
    torch.manual_seed(0)
    cell = Cell(summed=summed)
    seen = recorded(cell, torch.randn(batch, length, D))
    assert [layer.name for layer in seen.layers] == ["step", "step"]
    for layer, w in zip(seen.layers, cell.weights, strict=True):
        torch.testing.assert_close(layer.weights.dense(), w[:, None])


class TalkingHeads(nn.Module):
    """A layer mixes the heads after softmax; class and name say nothing."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(2, 2)

    def forward(self, x):
        w = scores(heads(x)).softmax(-1)
        return self.mix(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ heads(x)


def test_talking_heads_are_named(x):
    seen = recorded(TalkingHeads(), x)
    assert len(seen) == 0
    assert [name for name, _ in seen.refused] == ["step"]
    assert "talking heads" in seen.refused[0][1]


# No false alarms.


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).softmax(-1)


class Router(nn.Module):
    """A mixture of experts, computed by all of them."""

    def __init__(self, way, experts=4, cast=False):
        super().__init__()
        self.way, self.cast = way, cast
        self.gate = nn.Linear(D, experts, bias=False)
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(experts)])

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight = self.gate.weight.double().float() if self.cast else self.gate.weight  # a copy is no parameter
        w = nn.functional.linear(tokens, weight).softmax(-1)
        outputs = torch.stack([expert(tokens) for expert in self.experts], 1)  # t e d
        if self.way == "topk":
            top, at = w.topk(2, -1)
            top = top / top.sum(-1, keepdim=True)
            y = (top[..., None] * outputs.gather(1, at[..., None].expand(-1, -1, D))).sum(1)
        elif self.way == "matmul":
            y = (w[:, None] @ outputs)[:, 0]
        elif self.way == "einsum":
            y = torch.einsum("te,ted->td", w, outputs)
        else:
            y = (w[..., None] * outputs).sum(1)
        return y.view_as(x)


class LanguageModel(nn.Module):
    def __init__(self, soft=False):
        super().__init__()
        self.table, self.soft = nn.Embedding(11, D), soft

    def forward(self, x):
        w = (x @ self.table.weight.T).softmax(-1)
        return w @ self.table.weight if self.soft else w


class Rotary(nn.Module):
    """A product of computed tensors elsewhere in the model, of the size of the router's softmax."""

    def __init__(self):
        super().__init__()
        self.angles, self.mlp = Calls(lambda a, b: a @ b), Router("matmul")

    def forward(self, x):
        angles = self.angles(torch.randn(1, 4, 1), torch.randn(1, 1, B * N))
        return self.mlp(x) + 0 * angles.sum()


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.shares, self.means = nn.Linear(D, 6), nn.Linear(D, 6 * D)

    def forward(self, x):
        return (self.shares(x).softmax(-1)[..., None] * self.means(x).unflatten(-1, (6, D))).sum(-2)


class DynamicConvolution(nn.Module):
    """Kernels of three positions from a softmax, as in ConvBERT."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Linear(D, 2 * 3)

    def forward(self, x):
        w = self.kernel(x).reshape(-1, 3, 1).softmax(1)
        windows = nn.functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).reshape(-1, D // 2, 3)
        return (windows @ w).view_as(x)


def expected_bins(x):
    return (x.softmax(-1) * torch.arange(D)).sum(-1)


class Gated(nn.Module):
    """A gate of the shape of a product before it, times the product, as in triangular updates."""

    def __init__(self, gate):
        super().__init__()
        self.left, self.right, self.open, self.gate = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(N, N), gate

    def forward(self, x):
        pairs = self.left(x) @ self.right(x).mT
        return pairs * self.gate(self.open(pairs))


class Feedforward(nn.Module):
    """A hidden layer of the shape of the scores before it."""

    def __init__(self, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, N), nn.Linear(N, D), act

    def forward(self, x):
        pairs = x @ x.mT
        return self.down(self.act(self.up(x))) + 0 * pairs.sum()


class SqueezeAndExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(D, 2), nn.Linear(2, D)

    def forward(self, x):
        return x * self.up(self.down(x.mean(1)).relu()).sigmoid()[:, None]


QUIET = {
    **{f"gate by {act.__name__}": (lambda act=act: Gated(act)) for act in (torch.sigmoid, torch.relu, F.silu)},
    **{
        f"feedforward with {act.__name__}": (lambda act=act: Feedforward(act))
        for act in (torch.sigmoid, torch.relu, F.silu)
    },
    "squeeze and excite": SqueezeAndExcite,
    "alikeness by sigmoid": lambda: Calls(lambda x: scores(x).sigmoid()),
    "soft-capped and gated": lambda: Calls(lambda x: x * scores(x).sigmoid().mean(-1, keepdim=True)),
    "LSTM": lambda: nn.Sequential(nn.LSTM(D, D, batch_first=True), Calls(lambda both: both[0])),
    "classifier": Classifier,
    "language model": LanguageModel,
    "soft embeddings": lambda: LanguageModel(soft=True),
    **{f"router, {way}": (lambda way=way: Router(way)) for way in ("topk", "matmul", "einsum", "sum")},
    **{f"router, {way}, cast": (lambda way=way: Router(way, cast=True)) for way in ("topk", "matmul", "einsum", "sum")},
    "router beside another product": Rotary,
    "mixture": Mixture,
    "dynamic convolution": DynamicConvolution,
    "expected bin": lambda: Calls(expected_bins),
    "similarities of two batches": lambda: Calls(lambda x: (x[:, 0] @ x[:, 1].T).softmax(-1)),
    "gate": lambda: Calls(lambda x: x * x.softmax(-1)),
    "loss": lambda: Calls(lambda x: nn.functional.cross_entropy(x[:, 0], torch.zeros(B, dtype=torch.long))),
    "cosine similarities": lambda: Calls(lambda x: (scores(x) / x.norm(dim=-1, keepdim=True)) @ x),
    "decay": lambda: Calls(lambda x: (x @ x.mT) + (x @ x.mT).exp()),
}


@pytest.mark.parametrize("case", QUIET)
def test_no_false_alarm(case, x):
    torch.manual_seed(0)
    seen = recorded(QUIET[case](), x)
    assert seen.refused == []
    assert len(seen) == 0


# Axes.


class ByHead(nn.Module):
    """Four heads, one at a time, on (batch, length, size)."""

    num_heads = 4

    def forward(self, x):
        return torch.cat([part.softmax(-1) for part in x.split(2, -1)], -1) + torch.cat(
            [nn.functional.scaled_dot_product_attention(part, part, part) for part in x.split(2, -1)], -1
        )


def test_heads_one_at_a_time_on_as_many_sequences():
    net, x = ByHead(), torch.randn(4, N, D)
    with warnings.catch_warnings(), regard.record(None) as seen:
        warnings.simplefilter("ignore", RefusedWarning)
        net(x)
    assert all(layer.shape == (4, 1, N, N) for layer in seen.layers)
    assert len(seen) == 4 or "share one axis" in seen.refused[0][1]


def sequence_first(x):
    """(length, batch, size) with batch and heads in one axis."""
    length, batch, size = x.shape
    q = x.reshape(length, batch * 4, size // 4).transpose(0, 1)
    return nn.functional.scaled_dot_product_attention(q, q, q).transpose(0, 1).reshape(length, batch, size)


def heads_first(x, attend):
    """(heads, batch, length, size), copied, in a module that names no heads."""
    q = heads(x).transpose(0, 1).contiguous()
    return attend(q).transpose(0, 1)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize(
    "attend", [lambda q: F.scaled_dot_product_attention(q, q, q), lambda q: scores(q / 2**0.5).softmax(-1) @ q]
)
def test_heads_before_the_batch_are_not_taken_for_it(batch, attend, x):
    seen = recorded(Calls(lambda x: heads_first(x, attend)), x[:batch])
    w = scores(heads(x[:batch]) / 2**0.5).softmax(-1)
    right = [layer.shape == w.shape and torch.allclose(layer.weights.dense(), w, atol=1e-6) for layer in seen.layers]
    assert right == [True] or (not right and "nothing says which" in seen.refused[0][1])


def test_a_sequence_as_long_as_batch_times_heads():
    seen = recorded(Calls(sequence_first), torch.randn(8, 2, D))
    assert all(layer.shape == (2, 4, 8, 8) for layer in seen.layers)
    assert len(seen) == 1 or "share one axis" in seen.refused[0][1]


def test_no_module_at_all(x):
    with pytest.warns(RefusedWarning, match="no module says"), regard.record(None) as seen:
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert len(seen) == 0
