"""The law of the edge: no keys, no rows, −inf and NaN at hidden keys never make a NaN, in values, statistics or gradients.

Each edge is held to the judge. Where something is poisoned (NaN, inf or a huge number at keys that no row may see)
the judge is shown the same tensors without the poison: it must not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import regard
from regard.engines import numba
from support.judge import (
    MASKS,
    SCORES,
    SMOOTH,
    MaskCase,
    Sizes,
    Truth,
    draw,
    library_answers,
    library_answers_at_once,
    named,
)

Tensors = dict[str, Tensor]
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Edge:
    name: str
    score: str = "scaled_dot"
    mask: MaskCase = MASKS[0]
    sizes: dict[str, int] = field(default_factory=dict)
    align: str = "end"
    shape: Callable[[Tensors], None] = lambda t: None  # makes the case, before anyone looks
    poison: Callable[[Tensors], None] = lambda t: None  # changes what nobody sees, for the library only
    nothing: bool = False  # no row sees a key


def mask_of(make: Callable, visible: Callable) -> MaskCase:
    return MaskCase("", make, visible)


def put(name: str, keys: slice | int, value: float) -> Callable[[Tensors], None]:
    """A value at these keys: of k and v the axis before the last, of a bias the last."""

    def change(t: Tensors) -> None:
        (t[name][..., keys, :] if name in "kv" else t[name][..., keys]).fill_(value)

    return change


def in_heads(heads: slice, change: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    """A change to some heads alone: of k and v the group that has two query heads, of a bias these two."""
    return lambda t: change(
        {name: x if x.ndim < 4 else x[:, heads] if name[0] == "p" else x[:, 1:2] for name, x in t.items()}
    )


def both(*changes: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    return lambda t: [change(t) for change in changes] and None


def scores_become(value: Callable[[Tensors], float]) -> Callable[[Tensors], None]:
    """Queries and keys of one number, so that dot products are what we say."""

    def change(t: Tensors) -> None:
        t["q"].fill_(1)
        t["k"].copy_(value(t).expand_as(t["k"]) / t["k"].shape[-1])

    return change


def _hidden_from_group(n: Sizes, j: Tensor) -> Tensor:
    """Key 4 is hidden from the query heads 2 and 3, which share keys."""
    return (j != 4) | (torch.arange(n.h) // 2 != 1)[:, None, None]


SHORT = mask_of(lambda n: regard.padding([n.j - 3]), lambda n, i, j: (j < n.j - 3) & (i > -99))
NONE = mask_of(lambda n: regard.padding([0]), lambda n, i, j: (j < 0) & (i > -99))
EARLY = mask_of(lambda n: regard.causal(), lambda n, i, j: j <= i)  # with align="start" the last keys are unseen
COLUMN = mask_of(lambda n: torch.arange(n.j) != 4 + torch.zeros(n.i, 1), lambda n, i, j: (j != 4) & (i > -99))
CALLED = mask_of(lambda n: lambda i, j: (j != 4) & (i > -99), lambda n, i, j: (j != 4) & (i > -99))
ROW = mask_of(
    lambda n: torch.arange(n.i)[:, None].expand(n.i, n.j) != 2, lambda n, i, j: (i != 2 + n.j - n.i) & (j > -1)
)
GROUP = mask_of(
    lambda n: _hidden_from_group(n, torch.arange(n.j)).expand(n.h, n.i, n.j),
    lambda n, i, j: _hidden_from_group(n, j) & (i > -99),
)
HEAD = mask_of(
    lambda n: (torch.arange(n.h) != 1)[:, None, None].expand(n.h, n.i, n.j),
    lambda n, i, j: (torch.arange(n.h) != 1)[:, None, None] & (i > -99) & (j > -1),
)
STRANGER = mask_of(
    lambda n: regard.documents([0] * (n.i - 2) + [7, 7], [0] * (n.j - 4) + [3] * 4),
    lambda n, i, j: (i - (n.j - n.i) < n.i - 2) & (j < n.j - 4),
)
FEW, MANY = {"i": 7, "j": 3}, {"i": 3, "j": 11}
LAST = slice(-3, None)

EDGES = [
    # Rows with no visible key.
    Edge("causal with more queries than keys", mask=EARLY, sizes=FEW),
    Edge("a window with more queries than keys", mask=named(MASKS, "window"), sizes=FEW),
    Edge("padding of length 0 for one sequence", mask=named(MASKS, "padding")),
    Edge("padding of length 0 for all", mask=NONE, nothing=True),
    Edge("a tensor that shows nothing", mask=mask_of(lambda n: torch.zeros(n.i, n.j).bool(), lambda n, i, j: (i < -99) & (j < 0)), nothing=True),
    Edge("a tensor that hides one row", mask=ROW),
    Edge("a tensor that hides one head", mask=HEAD),
    Edge("a function that shows nothing", mask=mask_of(lambda n: lambda i, j: (i < -99) & (j < 0), lambda n, i, j: (i < -99) & (j < 0)), nothing=True),
    Edge("documents without keys", mask=STRANGER),
    Edge("a mask and its opposite", mask=mask_of(lambda n: regard.causal() & ~regard.causal(), lambda n, i, j: (j <= i) & (j > i)), nothing=True),
    Edge("not everything", mask=mask_of(lambda n: ~regard.padding([n.j]), lambda n, i, j: (j < 0) & (i > -99)), nothing=True),
    *[Edge(f"empty rows under {s}", score=s, mask=EARLY, sizes=FEW) for s in ("dot", "cosine", "gaussian", "bilinear", "additive a head", "function", "bias", "alibi", "softcap", "modify", "sink", "all modifiers and a sink")],
    Edge("only a sink to look at", score="sink", mask=NONE, nothing=True),
    # Poison at keys that no row may see.
    Edge("NaN in k", mask=SHORT, poison=put("k", LAST, NAN)),
    Edge("inf in k", mask=SHORT, poison=put("k", LAST, INF)),
    Edge("−inf in k", mask=SHORT, poison=put("k", LAST, -INF)),
    Edge("NaN in v", mask=SHORT, poison=put("v", LAST, NAN)),
    Edge("inf in v", mask=SHORT, poison=put("v", LAST, INF)),
    Edge("NaN in k and v", mask=SHORT, poison=both(put("k", LAST, NAN), put("v", LAST, NAN))),
    Edge("NaN in a bias", score="bias", mask=SHORT, poison=put("p0", LAST, NAN)),
    Edge("inf in a bias", score="bias", mask=SHORT, poison=put("p0", LAST, INF)),
    Edge("NaN in a bias a key", score="bias a key", mask=SHORT, poison=put("p0", LAST, NAN)),
    Edge("NaN in a bias before a soft cap", score="bias then softcap", mask=SHORT, poison=put("p0", LAST, NAN)),
    Edge("NaN in k, v and a bias", score="bias", mask=SHORT, poison=both(put("k", LAST, NAN), put("v", LAST, NAN), put("p0", LAST, NAN))),
    Edge("NaN after what causal shows", mask=EARLY, sizes=MANY, align="start", poison=both(put("k", slice(3, None), NAN), put("v", slice(3, None), NAN))),
    Edge("NaN before what a window shows", mask=named(MASKS, "window"), sizes=MANY, poison=both(put("k", slice(0, 6), NAN), put("v", slice(0, 6), NAN))),
    Edge("NaN in a column a tensor hides", mask=COLUMN, poison=both(put("k", 4, NAN), put("v", 4, NAN))),
    Edge("NaN in a column a function hides", mask=CALLED, poison=both(put("k", 4, NAN), put("v", 4, NAN))),
    *[
        Edge(f"NaN at a key that other heads see, {s}", score=s, mask=GROUP, poison=in_heads(slice(2, 4), both(*(put(x, 4, NAN) for x in ("k", "v", *biases)))))
        for s, biases in (("scaled_dot", ()), ("cosine", ()), ("gaussian", ()), ("bilinear a head", ()), ("additive", ()), ("function", ()), ("bias", ("p0",)), ("bias then softcap", ()))
    ],
    Edge("NaN in documents nobody is in", mask=STRANGER, poison=both(put("k", LAST, NAN), put("v", LAST, NAN))),
    Edge("NaN everywhere and nothing visible", mask=NONE, poison=both(put("k", slice(None), NAN), put("v", slice(None), NAN)), nothing=True),
    *[Edge(f"NaN in k and v under {s}", score=s, mask=SHORT, poison=both(put("k", LAST, NAN), put("v", LAST, NAN))) for s in ("dot", "cosine", "gaussian", "bilinear", "additive", "additive a head", "function", "alibi", "softcap", "modify", "sink", "all modifiers and a sink")],
    Edge("1e30 in k under a Gaussian", score="gaussian", mask=SHORT, poison=put("k", LAST, 1e30)),
    Edge("1e30 in k and v", mask=SHORT, poison=both(put("k", LAST, 1e30), put("v", LAST, 1e30))),
    # Scores far out.
    Edge("−inf in some cells of a bias", score="bias", shape=lambda t: t["p0"].masked_fill_(torch.arange(11) % 3 == 0, -INF)),
    Edge("−inf in a whole row of a bias", score="bias", shape=lambda t: t["p0"][:, :, 2].fill_(-INF)),
    Edge("−inf in all of a bias", score="bias", shape=lambda t: t["p0"].fill_(-INF), nothing=True),
    Edge("−inf at the first keys", score="bias a key", shape=lambda t: t["p0"][..., :6].fill_(-INF)),
    Edge("scores of 1000", score="dot", shape=scores_become(lambda t: torch.tensor(1000.0))),
    Edge("scores of −1000", score="dot", shape=scores_become(lambda t: torch.tensor(-1000.0))),
    Edge("scores from −1000 to 1000", score="dot", shape=scores_become(lambda t: torch.linspace(-1000, 1000, t["k"].shape[-2])[:, None])),
    Edge("scores from 1000 to −1000", score="dot", shape=scores_become(lambda t: torch.linspace(1000, -1000, t["k"].shape[-2])[:, None])),
    Edge("scores of 1000 beside empty rows", score="dot", mask=EARLY, sizes=FEW, shape=scores_become(lambda t: torch.tensor(1000.0))),
    Edge("a sink far above", score="sink", shape=lambda t: t["p0"].fill_(1000)),
    Edge("a sink far below", score="sink", shape=lambda t: t["p0"].fill_(-1000)),
    Edge("a sink of −inf is no sink", score="sink", shape=lambda t: t["p0"].fill_(-INF)),
    Edge("all scores alike", score="dot", shape=lambda t: t["q"].zero_()),
    Edge("zero vectors under a cosine", score="function", shape=lambda t: (t["q"].zero_(), t["k"].zero_())),
    # Sizes at the end of the range.
    Edge("no keys", sizes={"j": 0}, nothing=True),
    Edge("no keys and a sink", score="sink", sizes={"j": 0}, nothing=True),
    Edge("no keys and a mask", mask=EARLY, sizes={"j": 0}, nothing=True),
    Edge("no keys and every modifier", score="all modifiers and a sink", sizes={"j": 0}, nothing=True),
    Edge("no keys, additive", score="additive", sizes={"j": 0}, nothing=True),
    Edge("no rows", sizes={"i": 0}),
    Edge("no rows and a mask", mask=EARLY, sizes={"i": 0}),
    Edge("no rows and every modifier", score="all modifiers and a sink", sizes={"i": 0}),
    Edge("no rows and no keys", sizes={"i": 0, "j": 0}),
    Edge("no sequences", sizes={"b": 0}),
    Edge("no sequences and a mask", mask=EARLY, sizes={"b": 0}),
    Edge("no sequences, additive with a sink", score="all modifiers and a sink", sizes={"b": 0}),
    Edge("length 1", sizes={"i": 1, "j": 1}),
    Edge("length 1 under a mask", mask=EARLY, sizes={"i": 1, "j": 1}),
    Edge("length 1, hidden", mask=NONE, sizes={"i": 1, "j": 1}, nothing=True),
    Edge("one key for many rows", sizes={"j": 1}),
    Edge("one row for many keys", mask=EARLY, sizes={"i": 1}),
    Edge("one head, one sequence, one cell", score="all modifiers and a sink", sizes={"b": 1, "h": 1, "g": 1, "i": 1, "j": 1, "d": 1, "e": 1}),
    Edge("vectors of size 0", score="dot", sizes={"d": 0}),
    Edge("values of size 0", sizes={"e": 0}),
]  # fmt: skip


def finite(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0, x)


def gradients(outputs: dict[str, Tensor], seeds: dict[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    total = sum((seeds[name].to(x.dtype) * finite(x)).sum() for name, x in outputs.items() if name in seeds)
    grads = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def check_edge(edge: Edge, engine: str, dtype: torch.dtype) -> None:
    """Everything asked of this edge, alone and at once, values and gradients, against the judge."""
    case = named(SCORES, edge.score)
    n = case.sizes(**edge.sizes)
    clean = {"q": draw(*n.q), "k": draw(*n.k), "v": draw(*n.v), "u": draw(*n.u)}
    clean |= {f"p{m}": p for m, p in enumerate(case.parameters(n))}
    clean = {name: x.to(dtype) for name, x in clean.items()}
    edge.shape(clean)
    dirty = {name: x.clone() for name, x in clean.items()}
    edge.poison(dirty)
    for t in (clean, dirty):
        for x in t.values():
            x.requires_grad_(True)

    truth = Truth.of(
        case,
        edge.mask,
        n,
        clean["q"],
        clean["k"],
        [clean[x] for x in clean if x[0] == "p"],
        0 if edge.align == "start" else n.j - n.i,
    )
    if edge.nothing:
        assert not (truth.s > -INF).any()
    want = truth.answers(clean["v"], clean["u"])
    W = regard.weights(
        dirty["q"], dirty["k"], score=case.make(*[dirty[x] for x in dirty if x[0] == "p"]), mask=edge.mask.make(n), align=edge.align, engine=engine
    )  # fmt: skip
    # Roundoff grows with the scores: exp turns an absolute error of s into a relative one of w.
    s = truth.s[truth.s > -INF].abs().max().item() if (truth.s > -INF).any() else 0.0
    u = torch.finfo(dtype).eps
    slack = u * 64 * (1 + s)
    seeds = {name: draw(*want[name].shape) for name in SMOOTH}
    for answers in (library_answers(W, dirty["v"], dirty["u"]), library_answers_at_once(W, dirty["v"])):
        for name, got in answers.items():
            assert got.shape == want[name].shape, name
            if name.endswith("index"):
                assert torch.equal(got, want[name]), name
                continue
            assert not got.isnan().any(), name
            scale = 1 + finite(want[name]).abs().max().item() if want[name].numel() else 1
            torch.testing.assert_close(
                got.double(), want[name], rtol=0, atol=slack * scale, msg=lambda m, name=name: f"{name}: {m}"
            )
        chosen = {name: seeds[name] for name in answers if name in seeds}
        right = gradients({name: want[name] for name in chosen}, chosen, list(clean.values()))
        grads = gradients({name: answers[name] for name in chosen}, chosen, list(dirty.values()))
        for name, a, b in zip(clean, grads, right, strict=True):
            assert a.isfinite().all(), f"gradient of {name}"
            scale = (1 + b.abs().max().item()) * (1 + s) if b.numel() else 1
            torch.testing.assert_close(
                a.double(),
                b.double(),
                rtol=0,
                atol=4 * slack * scale,
                msg=lambda m, name=name: f"gradient of {name}: {m}",
            )


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_an_edge_in_float64(edge: Edge, engine: str) -> None:
    check_edge(edge, engine, torch.float64)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_an_edge_in_float32(edge: Edge) -> None:
    check_edge(edge, "blockwise", torch.float32)


def test_there_are_enough_edges() -> None:
    assert len({edge.name for edge in EDGES}) == len(EDGES) >= 48


def test_a_row_that_sees_nothing_follows_the_vocabulary(engine: str) -> None:
    x = draw(3, 2)
    W = regard.weights(
        x, mask=torch.tensor([[True, True, True], [False, False, False], [True, False, True]]), engine=engine
    )
    assert W.lse()[1] == -INF
    assert W.max_score()[1] == -INF
    assert W.dense()[1].tolist() == [0, 0, 0]
    assert (W @ x)[1].tolist() == [0, 0]
    assert W.entropy()[1] == 0
    assert W.mean_distance()[1] == 0
    assert W.peak().values[1] == 0
    assert W.peak().indices[1] == -1
    assert W.topk(2).indices[1].tolist() == [-1, -1]
    assert W.topk(2).values[1].tolist() == [0, 0]
    assert W[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("nan", [NAN, -NAN], ids=["nan", "−nan"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nan_at_a_visible_key_is_not_hidden(engine: str, dtype: torch.dtype, nan: float) -> None:
    q, k = draw(3, 2, dtype=dtype), draw(70, 2, dtype=dtype)
    k[1] = nan
    W = regard.weights(q, k, align="end", engine=engine)
    for got in (
        W.lse(),
        W.max_score(),
        W @ draw(70, 2, dtype=dtype),
        W.entropy(),
        W.received(),
        W.mean_distance(),
        W.mass(slice(None)),
        W.pool(1, 1),
    ):
        assert got.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nan_at_a_key_that_one_row_sees_reaches_that_row(dtype: torch.dtype) -> None:
    q, k = draw(3, 2, dtype=dtype), draw(3, 2, dtype=dtype)
    k[2] = NAN
    W = regard.weights(q, k, mask=regard.causal())
    assert W.lse().isnan().tolist() == [False, False, True]


ASKS: dict[str, Callable[[regard.Weights, Tensor], Tensor]] = {
    "y": lambda W, v: W @ v,
    "entropy": lambda W, v: W.entropy(),
    "kl": lambda W, v: W.kl(regard.weights(v, mask=regard.causal())),
    "heads": lambda W, v: W.reduce_heads(groups=2).entropy(),
    "gather": lambda W, v: W.gather(torch.zeros(6, 1, dtype=torch.long)).squeeze(-1),
    "row": lambda W, v: W[..., 0:4, :],
    "cells": lambda W, v: W[..., 0:4, 1:6],
    "scores": lambda W, v: W.scores[..., 0:4, 0:4],
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_a_key_of_nan_gives_no_gradient_to_rows_that_do_not_see_it(
    ask: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba, "enabled", compiled and numba.enabled)
    additive = regard.Additive(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2))
    for score in (regard.ScaledDot(), regard.Cosine().softcap(2.0), regard.Gaussian(), additive):
        q, k, v = draw(2, 2, 6, 3), draw(2, 1, 6, 3), draw(2, 2, 6, 3)
        gradients = []
        for hidden in (NAN, 0.0):
            k[:, :, 4] = hidden
            queries = q.detach().clone().requires_grad_()
            answer = ASKS[ask](regard.weights(queries, k, score=score, mask=regard.causal()), v)[:, :, :4]
            assert not answer.isnan().any()
            gradients += torch.autograd.grad(answer[answer.isfinite()].sum(), queries)
        torch.testing.assert_close(gradients[0][:, :, :4], gradients[1][:, :, :4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_key_of_nan_that_one_head_hides_stays_with_the_other(dtype: torch.dtype) -> None:
    q, k = draw(1, 2, 6, 3, dtype=dtype).requires_grad_(), draw(1, 1, 6, 3, dtype=dtype)
    k[:, :, 4] = NAN
    k.requires_grad_()
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    mask[0, :, 4] = False
    regard.weights(q, k, mask=mask).entropy().sum().backward()
    assert q.grad.isnan().flatten(2).any(-1).tolist() == [[False, True]]
    assert k.grad[:, :, 4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_query_of_nan_is_no_row_that_sees_nothing(engine: str, dtype: torch.dtype) -> None:
    q, k = draw(3, 2, dtype=dtype), draw(70, 2, dtype=dtype)
    q[1] = NAN
    W = regard.weights(q, k, align="end", engine=engine)
    for got in (W.lse(), W.max_score(), W @ draw(70, 1, dtype=dtype), W.entropy(), W.mean_distance()):
        assert got.isnan().flatten().tolist() == [False, True, False]


#: Masks of which row 5 sees keys on both sides of some that are hidden, or in front of all of them.
HIDING = {"intervals": regard.causal(), "cells": (torch.arange(40)[:, None] + torch.arange(40)) % 3 > 0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("what", ["scores", "a bias a cell", "the gradient of the row"])
def test_a_row_of_nan_gives_no_gradient_to_what_it_does_not_see(
    engine: str, dtype: torch.dtype, compiled: bool, hiding: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba, "enabled", compiled and numba.enabled)
    q, k, v = (draw(40, 2, dtype=dtype).requires_grad_() for _ in range(3))
    mask, score = HIDING[hiding], regard.ScaledDot()
    seen_by_5 = regard.weights(torch.zeros(40, 1), mask=mask).dense()[5] > 0
    bias = torch.zeros(40, 40 if what == "a bias a cell" else 1, dtype=dtype)
    bias[5, 2 if what == "a bias a cell" else 0] = NAN
    if what != "the gradient of the row":
        score = score.bias(bias)
    seen = regard.weights(q, k, score=score, mask=mask, engine=engine).see("entropy", values=v)
    if what == "the gradient of the row":
        (seen.entropy * (1 + bias[:, 0])).sum().backward()
    else:
        (seen.y.sum() + seen.entropy.sum()).backward()
        assert v.grad.isnan().any(-1).equal(seen_by_5)
    assert k.grad.isnan().any(-1).equal(seen_by_5)
    assert q.grad.isnan().any(-1).tolist() == [row == 5 for row in range(40)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("hiding", HIDING)
def test_what_is_hidden_weighs_nothing_in_a_row_of_nan_either(
    engine: str, dtype: torch.dtype, compiled: bool, hiding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba, "enabled", compiled and numba.enabled)
    q, k = draw(40, 2, dtype=dtype), draw(40, 2, dtype=dtype)
    q[5] = NAN
    W = regard.weights(q, k, mask=HIDING[hiding], engine=engine)
    seen = regard.weights(torch.zeros(40, 1), mask=HIDING[hiding]).dense()[5] > 0
    for got in (W[5], W.received(), W.pool(1, 40), W.mT @ torch.ones(40, 1, dtype=dtype)):
        assert got.isnan().flatten().equal(seen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inf_in_a_score_is_nan_as_in_plain_softmax(engine: str, dtype: torch.dtype) -> None:
    b = torch.zeros(2, 3, dtype=dtype)
    b[1, 2] = INF
    W = regard.weights(
        torch.zeros(2, 2, dtype=dtype), torch.zeros(3, 2, dtype=dtype), score=regard.Dot().bias(b), engine=engine
    )
    assert (W @ torch.ones(3, 1, dtype=dtype)).isnan().flatten().tolist() == [False, True]
    assert torch.isfinite(W.lse()[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_poison_is_harmless_in_short_types_too(dtype: torch.dtype) -> None:
    q, k, v = (draw(1, 2, 9, 4, dtype=dtype) for _ in range(3))
    k[..., 6:, :], v[..., 6:, :] = NAN, INF
    for x in (q, k, v):
        x.requires_grad_(True)
    W = regard.weights(q, k, mask=regard.padding([6]))
    y = regard.attend(q, k, v, mask=regard.padding([6]))
    (y.float().sum() + W.entropy().sum() + W.received()[..., 0].sum()).backward()
    for x in (y, W.lse(), W.received(), q.grad, k.grad, v.grad):
        assert x.isfinite().all()
    assert (k.grad[..., 6:, :] == 0).all()


def test_attend_never_lets_poison_through() -> None:
    q, k, v = (
        draw(1, 2, 5, 4, dtype=torch.float32),
        draw(1, 2, 9, 4, dtype=torch.float32),
        draw(1, 2, 9, 4, dtype=torch.float32),
    )
    k[..., 6:, :], v[..., 6:, :] = NAN, INF
    want = torch.nn.functional.scaled_dot_product_attention(q, k[..., :6, :], v[..., :6, :])
    got = regard.attend(q, k, v, mask=regard.padding([6]))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("where", ["k", "v"])
def test_attend_lets_no_single_poisoned_number_through(where: str, poison: float) -> None:
    lengths = torch.tensor([3, 5])
    q, k, v = (draw(2, 2, n, 3, dtype=torch.float32) for n in (4, 6, 6))
    clean = regard.attend(q, k, v, mask=regard.padding(lengths))
    for b, h, j, c in itertools.product(range(2), range(2), range(6), range(3)):
        if j >= lengths[b]:
            spoiled = {"k": k.clone(), "v": v.clone()}
            spoiled[where][b, h, j, c] = poison
            got = regard.attend(q, spoiled["k"], spoiled["v"], mask=regard.padding(lengths))
            torch.testing.assert_close(got, clean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [-1e4, -1e9, -1e20, -3e38, 1e9, 1e37])
def test_a_row_whose_scores_are_all_huge_is_a_row_like_any_other(engine: str, level: float, dtype: torch.dtype) -> None:
    # Masks are often written as a bias of −1e9 or of the type's lowest number; then a row may have nothing else, and
    # in lse = m + log l the second part is lost.
    q, k, v = (draw(1, 2, n, 4, dtype=dtype).requires_grad_() for n in (5, 7, 7))
    bias = torch.zeros(1, 1, 5, 7, dtype=dtype)
    bias[..., 2, :] = level
    W = regard.weights(torch.zeros_like(q) + 0 * q, k, score=regard.Dot().bias(bias), engine=engine)
    even = torch.full((1, 2, 5, 7), 1 / 7, dtype=W.dtype)
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(W.dense(), even, **close)
    torch.testing.assert_close(W[..., 2, :], even[..., 2, :], **close)
    torch.testing.assert_close(W.received(), even.sum(-2), **close)
    torch.testing.assert_close(W.topk(2).values, even[..., :2], **close)
    torch.testing.assert_close(W.entropy(), torch.full_like(W.entropy(), math.log(7)), **close)
    (dv,) = torch.autograd.grad((W @ v).sum(), v, retain_graph=True)
    torch.testing.assert_close(dv, torch.full_like(dv, 5 / 7))
    ours = torch.autograd.grad(W.see("entropy", "received", values=v).y.square().sum(), (q, k, v))
    w = even.to(dtype).requires_grad_()
    (want,) = torch.autograd.grad((w.detach() @ v).square().sum(), v)
    torch.testing.assert_close(ours[2], want, **({} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}))
    assert all(g.isfinite().all() for g in ours)


def test_attend_keeps_a_hidden_infinity_out_of_gradients_too() -> None:
    # With one positive component a hidden key of −inf has a score of −inf: the output shows nothing of it.
    q, k, v = torch.rand(1, 1, 5, 1) + 1, torch.rand(1, 1, 9, 1), torch.randn(1, 1, 9, 4)
    k[..., 6:, :] = -INF
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = regard.attend(q, k, v, mask=regard.padding([6]))
    grads = torch.autograd.grad(y.square().sum(), leaves)
    want = torch.nn.functional.scaled_dot_product_attention(q, k[..., :6, :], v[..., :6, :])
    torch.testing.assert_close(y, want)
    for g, w in zip(grads, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(g, w)


#: Scores by functions that have no slope at a key of zeros, which no key here is.
NO_SLOPE_AT_ZERO = {
    "k / |k|": (
        lambda: regard.Similarity(lambda q, k: q @ (k / k.norm(dim=-1, keepdim=True)).mT),
        lambda q, k: q @ (k / k.norm(dim=-1, keepdim=True)).mT,
    ),
    "√|s|": (lambda: regard.Dot().modify(lambda s, i, j: s.abs().sqrt()), lambda q, k: (q @ k.mT).abs().sqrt()),
}


@pytest.mark.parametrize("hidden", [0.5, NAN], ids=["finite", "nan"])
@pytest.mark.parametrize("name", NO_SLOPE_AT_ZERO)
def test_a_function_is_not_called_with_keys_of_zeros_for_those_that_nobody_sees(
    engine: str, name: str, hidden: float
) -> None:
    """0 · nan would reach the queries, as the slope of a hidden score."""
    make, formula = NO_SLOPE_AT_ZERO[name]
    q, k = draw(2, 5, 3, grad=True), draw(2, 7, 3)
    k[:, 4:] = hidden
    k.requires_grad_()
    causal = torch.ones(5, 4, dtype=torch.bool).tril()
    want = formula(q, k[:, :4]).masked_fill(~causal, -INF).softmax(-1)
    W = regard.weights(q, k, score=make(), mask=regard.causal() & regard.padding(4), align="start", engine=engine)
    seed = draw(2, 5, 4)
    right = torch.autograd.grad((want * seed).sum(), (q, k), retain_graph=True)
    first = torch.autograd.grad((want[:, 1] * seed[:, 1]).sum(), (q, k))
    answers = {
        "dense": (W.dense()[..., :4], seed, right),
        "tiles": (torch.cat([W[..., :, :2], W[..., :, 2:4]], -1), seed, right),
        "W @ v": (W @ torch.eye(7)[:, :4].double(), seed, right),
        "row": (W.row(1)[..., :4], seed[:, 1], first),
        "heads": (torch.stack([W.reduce_heads("sum", heads=[h]).row(1)[:4] for h in (0, 1)]), seed[:, 1], first),
    }
    for way, (got, seeds, grads) in answers.items():
        for g, w in zip(torch.autograd.grad((got * seeds).sum(), (q, k)), grads, strict=True):
            torch.testing.assert_close(g, w, msg=lambda text, way=way: f"{way}: {text}")
