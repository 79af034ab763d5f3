"""Attention written out by hand, in any order of axes and by any operator: recorded in (b, h, i, j), or named.

Neither the class nor the name of the module says attention.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from support.toy_models import Calls, Model, recorded


def projected(b, n, h, d, seed=0):
    """A projection (b, n, h · d), seen as (b, h, n, d)."""
    x = torch.randn(b, n, h * d, generator=torch.Generator().manual_seed(seed))
    return x.view(b, n, h, d).transpose(1, 2)


def weights_of(q, k):
    return (q @ k.mT).softmax(-1)


# Orders of axes.

SIZES = [(2, 3, 5, 5), (3, 2, 4, 6), (3, 3, 5, 5), (4, 4, 4, 4), (1, 3, 5, 5), (2, 2, 1, 5)]

#: Queries, keys, weights, values and outputs of an attention by einsum.
ORDERS = [
    ("ibhd", "jbhd", "ijbh", "jbhd", "ibhd"),  # Transformer-XL, XLNet
    ("bhid", "bhjd", "hbij", "bhjd", "bhid"),
    ("bhid", "bhjd", "hbij", "bhjd", "bihd"),
    ("hbid", "hbjd", "hbij", "hbjd", "hbid"),
    ("bihd", "bjhd", "bhij", "bjhd", "bihd"),
    ("bihd", "bjhd", "bijh", "bjhd", "bihd"),
    ("bhid", "bhjd", "jhib", "bhjd", "bihd"),
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_einsum_in_any_order_of_axes(order, sizes):
    b, h, i, j = sizes
    q, k, v = projected(b, i, h, 6, 1), projected(b, j, h, 6, 2), projected(b, j, h, 6, 3)
    of_q, of_k, of_w, of_v, of_y = order

    def attend(q, k, v):
        q = q.permute(["bhid".index(axis) for axis in of_q])
        k, v = (x.permute(["bhjd".index(axis) for axis in of]) for x, of in ((k, of_k), (v, of_v)))
        w = torch.einsum(f"{of_q},{of_k}->{of_w}", q, k).softmax(of_w.index("j"))
        return torch.einsum(f"{of_w},{of_v}->{of_y}", w, v)

    seen = recorded(Calls(attend), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), weights_of(q, k))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads_before_the_batch_in_a_product(sizes):
    b, h, i, j = sizes
    q, k, v = projected(b, i, h, 6, 1), projected(b, j, h, 6, 2), projected(b, j, h, 6, 3)

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return (q @ k.mT).softmax(-1) @ v

    seen = recorded(Calls(attend), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), weights_of(q, k))


def test_equal_numbers_of_heads_and_sequences_that_were_copied_are_right_or_named():
    """Where memory, sizes and letters say nothing of the order, it may not be guessed."""
    q, k, v = (projected(3, 5, 3, 4, seed).contiguous() for seed in range(3))
    seen = recorded(
        Calls(lambda q, k, v: weights_of(*(x.transpose(0, 1) for x in (q, k))) @ v.transpose(0, 1)), q, k, v
    )
    assert [name for name, _ in seen.refused] == ["step"]
    assert "either order" in seen.refused[0][1]


def test_keys_and_values_that_all_heads_share():
    q, k = projected(2, 5, 3, 4), projected(2, 5, 1, 4, 1)[:, 0]

    def attend(q, k):
        w = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bjd->bhid", w, k)

    seen = recorded(Calls(attend), q, k)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), weights_of(q, k[:, None]))


def test_weights_without_a_batch_stand_for_every_sequence():
    """(h, i, j) of learned queries, times values (b, h, j, d), with as many heads as sequences."""
    q, k, v = projected(1, 5, 3, 4)[0], projected(1, 5, 3, 4, 1)[0], projected(3, 5, 3, 4, 2)
    seen = recorded(Calls(lambda v: weights_of(q, k) @ v), v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), weights_of(q, k)[None])


# Broadcasting in scaled_dot_product_attention.

LEADING = [(3, 2), (1, 2), (3, 1), (1, 1)]


@pytest.mark.parametrize("mask", [None, (4, 5), (3, 1, 1, 5), (1, 2, 4, 5), (3, 2, 4, 5)], ids=str)
@pytest.mark.parametrize("of_k", LEADING, ids=str)
@pytest.mark.parametrize("of_q", LEADING, ids=str)
def test_broadcast_attention(of_q, of_k, mask):
    torch.manual_seed(0)
    x, q, k = torch.randn(3, 5, 4), torch.randn(*of_q, 4, 6), torch.randn(*of_k, 5, 6)
    s = q @ k.mT / 6**0.5
    if mask is not None and any(a not in (1, b) for a, b in zip(mask[:-2], s.shape[:2], strict=False)):
        pytest.skip("PyTorch takes no mask with more axes than the scores have")
    visible = None if mask is None else torch.rand(mask) > 0.3
    if visible is not None:
        visible[..., 0] = True
        s = s.masked_fill(~visible, -torch.inf)
    for of_v in LEADING:
        v = torch.randn(*of_v, 5, 6)
        seen = recorded(Calls(lambda x, v=v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible)), x)
        assert seen.refused == []
        shape = F.scaled_dot_product_attention(q, k, v, attn_mask=visible).shape
        torch.testing.assert_close(seen.layers[0].weights.dense(), s.softmax(-1).expand(*shape[:-1], 5))


# Scores without a product of matrices, heads one by one.


def by_sum(q, k):
    return (q[:, :, :, None] * k[:, :, None]).sum(-1)


def by_distance(q, k):
    return -(q[:, :, :, None] - k[:, :, None]).norm(dim=-1)


def by_distance_along_the_axes(q, k):
    return -(q[:, :, :, None] - k[:, :, None]).norm(p=1, dim=-1)


def by_heads(q, k):
    return torch.stack([a @ b.mT for a, b in zip(q.unbind(1), k.unbind(1), strict=True)], 1)


def by_chunks_of_rows(q, k):
    return torch.cat([part @ k.mT for part in q.split(2, 2)], 2)


def by_outer_sum(q, k):
    return F.leaky_relu(q.sum(-1, keepdim=True) + k.sum(-1)[:, :, None])


SCORES = [by_sum, by_distance, by_distance_along_the_axes, by_heads, by_chunks_of_rows, by_outer_sum]


@pytest.mark.parametrize("scores", SCORES)
def test_scores_of_every_kind(scores):
    q, k, v = (projected(2, 5, 3, 4, seed) for seed in range(3))
    seen = recorded(Calls(lambda q, k, v: scores(q, k).softmax(-1) @ v), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), scores(q, k).softmax(-1))


class Additive(nn.Module):
    """v · tanh(q + k) of every pair."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1)

    def weights(self, q, k):
        return self.score(torch.tanh(q[:, :, None] + k[:, None])).squeeze(-1).softmax(-1)

    def forward(self, q, k, v):
        return self.weights(q, k) @ v


def test_additive_attention_of_every_pair():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    seen = recorded(module := Additive(), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense()[:, 0], module.weights(q, k))


class AdditiveExpanded(Additive):
    """The same with both sequences expanded before they are added."""

    def weights(self, q, k):
        i, j = q.shape[1], k.shape[1]
        pairs = q[:, :, None].expand(-1, -1, j, -1) + k[:, None].expand(-1, i, -1, -1)
        return self.score(torch.tanh(pairs)).squeeze(-1).softmax(-1)


def test_additive_attention_of_expanded_pairs():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    seen = recorded(module := AdditiveExpanded(), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense()[:, 0], module.weights(q, k))


class LearnedQueries(nn.Module):
    """Three queries that are parameters, on (b, n, 8)."""

    def __init__(self, scores):
        super().__init__()
        self.queries, self.scores = nn.Parameter(torch.randn(3, 8)), scores

    def weights(self, x):
        return self.scores(self.queries, x).softmax(-1)

    def forward(self, x):
        return self.weights(x) @ x


LEARNED = {
    "product": lambda q, x: q @ x.mT,
    "expanded": lambda q, x: torch.bmm(q.expand(len(x), -1, -1), x.mT),
    "einsum": lambda q, x: torch.einsum("id,bjd->bij", q, x),
}


@pytest.mark.parametrize("way", LEARNED)
def test_queries_that_are_parameters(way):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    seen = recorded(module := LearnedQueries(LEARNED[way]), x)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense()[:, 0], module.weights(x))


class Pooled(nn.Module):
    """One weight for each position, and their sum by an einsum."""

    def __init__(self, equation):
        super().__init__()
        self.score, self.equation = nn.Linear(8, 1), equation

    def weights(self, x):
        return self.score(torch.tanh(x)).squeeze(-1).softmax(-1)

    def forward(self, x):
        w = self.weights(x)
        return torch.einsum(self.equation, *((w, x) if self.equation.startswith("bn,") else (x, w)))


@pytest.mark.parametrize("equation", ["bn,bnd->bd", "bnd,bn->bd"])
def test_a_sequence_pooled_by_einsum(equation):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    seen = recorded(module := Pooled(equation), x)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense()[:, 0, 0], module.weights(x))


def test_as_many_heads_as_sequences_one_sequence_at_a_time():
    """(h, n, d) of each sequence in turn, in a batch of h: these are not h sequences of one head."""
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))

    def attend(x):
        rows = (one.view(5, 4, 2).transpose(0, 1) for one in x)
        return torch.stack([F.scaled_dot_product_attention(one, one, one) for one in rows])

    seen = recorded(Calls(attend), x)
    assert all(layer.shape == (1, 4, 5, 5) for layer in seen.layers)
    assert len(seen.layers) == 4 or [name for name, _ in seen.refused] == ["step"]


def exp_of(s, axis):
    e = s.exp()
    return e / e.sum(axis, keepdim=True)


def exp_times_reciprocal(s, axis):
    e = (s - s.amax(axis, keepdim=True)).exp()
    return e * (1 / e.sum(axis, keepdim=True))


def power_of_two(s, axis):
    e = torch.exp2(s)
    return e / e.sum(axis, keepdim=True)


def less_its_logsumexp(s, axis):
    return (s - s.logsumexp(axis, keepdim=True)).exp()


def log_softmax(s, axis):
    return s.log_softmax(axis).exp()


@pytest.mark.parametrize("softmax", [exp_of, exp_times_reciprocal, power_of_two, less_its_logsumexp, log_softmax])
@pytest.mark.parametrize("of_w", ["bhij", "hjbi", "ijbh"])
@pytest.mark.parametrize("flat", [False, True])
def test_softmax_by_hand_over_any_axis(softmax, of_w, flat):
    q, k, v = (projected(2, 5, 3, 4, seed) for seed in range(3))

    def attend(q, k, v):
        if flat:
            s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, 3, 5, 5)
            s = s.permute(["bhij".index(axis) for axis in of_w])
        else:
            s = torch.einsum(f"bhid,bhjd->{of_w}", q, k)
        return torch.einsum(f"{of_w},bhjd->bihd", softmax(s, of_w.index("j")), v)

    seen = recorded(Calls(attend), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), softmax(q @ k.mT, -1), atol=1e-6, rtol=1e-5)


def test_softmaxes_of_many_heads_before_their_values():
    """All weights first, then all values: none is forgotten."""
    q, k, v = (projected(2, 5, 12, 4, seed) for seed in range(3))

    def attend(q, k, v):
        w = [weights_of(q[:, n], k[:, n]) for n in range(12)]
        return torch.stack([w[n] @ v[:, n] for n in range(12)], 1)

    seen = recorded(Calls(attend), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(torch.cat([layer.weights.dense() for layer in seen.layers], 1), weights_of(q, k))


# Dropout.


@pytest.mark.parametrize(
    "after",
    [
        lambda w, v: torch.stack([torch.dropout(w[:, n], 0.5, True) @ v[:, n] for n in range(3)], 1),
        lambda w, v: torch.dropout(w[..., :-1], 0.5, True) @ v[..., :-1, :],
        lambda w, v: (torch.dropout(w, 0.5, True) * 0.5) @ v,
    ],
    ids=["heads one by one", "without the last key", "scaled"],
)
def test_weights_before_dropout_of_a_part_or_scaled(after):
    q, k, v = (projected(2, 5, 3, 4, seed) for seed in range(3))
    torch.manual_seed(0)
    with regard.record(model := Model(Calls(lambda q, k, v: after(weights_of(q, k), v)))) as seen:
        model(q, k, v)
    assert seen.refused == []
    got = torch.cat([layer.weights.dense() for layer in seen.layers], 1)
    w = weights_of(q, k)
    torch.testing.assert_close(got, w[..., : got.shape[-1]] * (0.5 if got.sum(-1).max() < 0.6 else 1))


# Operators that nobody wrote a rule for.


@torch.library.custom_op("regard_tests::weighted_sum", mutates_args=())
def weighted_sum(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return w @ v


NAMED = {
    "unary": (lambda w, v: w.flatten(0, 1).log1p() @ v.flatten(0, 1), "log1p"),
    "compared": (lambda w, v: (w > 0.2).float() @ v, "gt"),
    "a product of its own": (
        lambda w, v: torch.addbmm(torch.zeros(5, 4), w.flatten(0, 1), v.flatten(0, 1)),
        "addbmm",
    ),
    "an operator from elsewhere": (lambda w, v: weighted_sum(w, v), "regard_tests::weighted_sum"),
    "convolved": (lambda w, v: F.avg_pool2d(w, 3, 1, 1) @ v, "avg_pool2d"),
    "spectrum": (lambda w, v: torch.fft.rfft(w, norm="ortho").abs() @ v[..., :3, :], "fft"),
}


@pytest.mark.parametrize("case", NAMED)
def test_an_operator_without_a_rule_is_named(case):
    function, operator = NAMED[case]
    q, k, v = (projected(2, 5, 3, 4, seed) for seed in range(3))
    seen = recorded(Calls(lambda q, k, v: function(weights_of(q, k), v)), q, k, v)
    assert [name for name, _ in seen.refused] == ["step"]
    assert operator in seen.refused[0][1]
    assert len(seen) == 0


def test_an_operator_beside_the_values_is_not_named():
    q, k, v = (projected(2, 5, 3, 4, seed) for seed in range(3))

    def attend(q, k, v):
        w = weights_of(q, k)
        w.log1p().sum(), w.std(), w.argmax(-1), weighted_sum(w, v)
        return w @ v

    seen = recorded(Calls(attend), q, k, v)
    assert seen.refused == []
    torch.testing.assert_close(seen.layers[0].weights.dense(), weights_of(q, k))


# No false alarms.


def similarity_statistics(x):
    w = (x @ x.mT).softmax(-1)
    largest, order = w.max(-1).values, w.sort(-1).values
    return largest + order[..., 0] + w.diagonal(dim1=-2, dim2=-1) - (w * (w + 1e-9).log()).sum(-1)


def contrastive(x):
    a, b = x[:, 0], x[:, 1]
    target = (a @ a.T).softmax(-1)
    return F.cross_entropy(a @ b.T, torch.arange(len(x))) + F.kl_div(
        (a @ b.T).log_softmax(-1), target, reduction="batchmean"
    )


def transport(x):
    """Optimal transport between two sets of points, by Sinkhorn's iterations: a plan that meets no values."""
    s = torch.einsum("bid,bjd->bij", x, x.flip(1))
    u, v = torch.zeros(s.shape[:2]), torch.zeros(s.shape[:2])
    for _ in range(3):
        u = -(s + v[:, None]).logsumexp(2)
        v = -(s + u[:, :, None]).logsumexp(1)
    return (s + u[:, :, None] + v[:, None]).exp()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        first = F.one_hot(p.argmax(-1), 3).float()
        outputs = torch.stack([self.expert(x) * n for n in range(3)], -2)
        return torch.einsum("bne,bned->bnd", first * p, outputs) + (first.mean((0, 1)) * p.mean((0, 1))).sum()


class PairFeatures(nn.Module):
    """Pairs of positions without a softmax."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(F.gelu(self.left(x)[:, :, None] + self.right(x)[:, None])).sum(2)


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x[0])))


QUIET = {
    "similarities": lambda: Calls(similarity_statistics),
    "contrastive loss": lambda: Calls(contrastive),
    "optimal transport": lambda: Calls(transport),
    "experts": Experts,
    "pairs": PairFeatures,
    "feedforward": Feedforward,
    "mean of squares": lambda: Calls(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True))),
    "sums and softmax": lambda: Calls(lambda x: x.view(3, 5, 2, 4).sum(-1).softmax(-1)),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", QUIET)
def test_no_false_alarm(case, autocast):
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        seen = recorded(QUIET[case](), torch.randn(3, 5, 8))
    assert seen.refused == []
    assert len(seen) == 0


# Any of these together.


class Random(nn.Module):
    """An attention whose order of axes, scores, softmax and way to the values are chosen by a seed."""

    def __init__(self, seed):
        super().__init__()
        self.pick = random.Random(seed)
        self.b, self.h, self.i = (self.pick.choice([2, 3, 4]) for _ in range(3))
        self.orders = self.pick.choice(["bhid", "hbid", "ibhd", "bihd"]), "".join(self.pick.sample("bhij", 4))
        self.softmax = self.pick.choice([torch.softmax, torch.softmax, exp_of, less_its_logsumexp, log_softmax])
        self.mask = self.pick.choice(["none", "add", "fill", "where"])
        self.way = self.pick.choice(["einsum", "product", "bmm", "sum", "left", "loop"])

    def forward(self, q, k, v):
        order, of_w = self.orders
        of_k = order.replace("i", "j")
        q = q.permute(["bhid".index(axis) for axis in order])
        k, w_v = (x.permute(["bhjd".index(axis) for axis in of_k]) for x in (k, v))
        s = torch.einsum(f"{order},{of_k}->{of_w}", q, k)
        visible = torch.ones(self.i, self.i).tril().bool()[None, None].permute(["bhij".index(axis) for axis in of_w])
        if self.mask == "add":
            s = s + torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        elif self.mask != "none":
            s = s.masked_fill(~visible, -1e9) if self.mask == "fill" else torch.where(visible, s, -1e9)
        w = self.softmax(s, of_w.index("j"))
        u = w.permute([of_w.index(axis) for axis in "bhij"])
        self.truth = u.detach().clone()
        if self.way == "einsum":
            return torch.einsum(f"{of_w},{of_k}->bihd", w, w_v)
        if self.way == "bmm":
            return torch.bmm(u.reshape(-1, self.i, self.i), v.reshape(-1, self.i, 4))
        if self.way == "sum":
            return (u[..., None] * v[:, :, None]).sum(-2)
        if self.way == "left":
            return v.mT @ u.mT
        if self.way == "loop":
            return torch.stack([u[:, n] @ v[:, n] for n in range(self.h)], 2)
        return u @ v


@pytest.mark.parametrize("seed", range(60))
def test_random_attention_is_right_or_named(seed):
    module = Random(seed)
    q, k, v = (projected(module.b, module.i, module.h, 4, part) for part in range(3))
    seen = recorded(module, q, k, v)
    if len(seen.passes) == 0:
        assert [name for name, _ in seen.refused] == ["step"]
        assert "either order" in seen.refused[0][1]
        return
    assert seen.refused == []
    got = torch.cat([layer.weights.dense() for layer in seen.layers], 1)
    torch.testing.assert_close(got, module.truth, atol=1e-6, rtol=1e-5)
