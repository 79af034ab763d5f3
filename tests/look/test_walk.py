"""`regard.walk`: the six steps of one word are the row of W and of W @ v, whatever the score."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard.look.terminal_walk import draw_walk
from regard.look.token_text import cell_width

D, T, E = 5, 7, 3  # all different, so that no axis can stand for another


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


SCORES = {
    "dot": lambda: regard.Dot(),
    "scaled": lambda: regard.ScaledDot(),
    "scaled by hand": lambda: regard.ScaledDot(0.3),
    "cosine": lambda: regard.Cosine(4.0),
    "gaussian": lambda: regard.Gaussian(1.5),
    "bilinear": lambda: regard.Bilinear(drawn(D, D)),
    "additive": lambda: regard.Additive(drawn(D, 4), drawn(D, 4), drawn(4)),
    "your own": lambda: regard.Similarity(lambda q, k: -torch.cdist(q, k, p=1)),
    "biased": lambda: regard.ScaledDot().bias(drawn(T, T)),
    "alibi": lambda: regard.Dot().alibi(torch.tensor([0.25], dtype=torch.float64)),
    "softcapped": lambda: regard.Dot().softcap(2.0),
    "biased, then softcapped": lambda: regard.ScaledDot().bias(drawn(T)).softcap(1.0),
    "modified": lambda: regard.Dot().modify(lambda s, i, j: s - 0.1 * (i - j) ** 2),
    "sink": lambda: regard.ScaledDot().sink(torch.tensor([0.7], dtype=torch.float64)),
}
MASKS = {
    "no mask": lambda: None,
    "causal": lambda: regard.causal(),
    "window": lambda: regard.window(1, 2),
    "padding": lambda: regard.padding(torch.tensor(5)),
    "flags": lambda: torch.rand(T, T) > 0.4,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_the_steps_end_in_the_row_and_in_the_output(score, mask):
    q, k, v = drawn(T, D), drawn(T, D), drawn(T, E)
    weights = regard.weights(q, k, score=SCORES[score](), mask=MASKS[mask]())
    for i in range(T):
        steps = regard.walk(weights, v, i)
        torch.testing.assert_close(steps.weights, weights.row(i), atol=1e-12, rtol=0)
        torch.testing.assert_close(steps.y, (weights @ v)[i], atol=1e-12, rtol=0)
        torch.testing.assert_close(steps.weighted.sum(0), steps.y, atol=1e-12, rtol=0)
        seen = (weights.row(i) > 0).sum()
        assert steps.sink + steps.weights.sum() == pytest.approx(1.0 if seen or steps.sink else 0.0, abs=1e-12)
        assert ((steps.masked == -math.inf) == (steps.weights == 0)).all()


@pytest.mark.parametrize("heads", range(6))
def test_grouped_heads_are_walked_one_at_a_time(heads):
    q, k, v = drawn(6, T, D), drawn(2, T, D), drawn(2, T, E)
    weights = regard.weights(q, k, mask=regard.causal())
    named = regard.walk(weights, v, 4, head=heads)
    picked = regard.walk(weights[heads], v[heads // 3], 4)
    torch.testing.assert_close(named.y, (weights @ v)[heads, 4], atol=1e-12, rtol=0)
    torch.testing.assert_close(picked.y, named.y, atol=0, rtol=0)
    torch.testing.assert_close(named.product, q[heads, 4] @ k[heads // 3].mT, atol=1e-12, rtol=0)


def test_a_score_of_one_matrix_a_head_follows_its_head():
    q, v = drawn(3, T, D), drawn(3, T, E)
    weights = regard.weights(q, score=regard.Bilinear(drawn(3, D, D)).sink(drawn(3)))
    for head in range(3):
        steps = regard.walk(weights, v, 2, head=head)
        torch.testing.assert_close(steps.weights, weights[head].row(2), atol=1e-12, rtol=0)
        torch.testing.assert_close(steps.y, (weights @ v)[head, 2], atol=1e-12, rtol=0)


def test_the_textbook_sentence_can_be_checked_by_hand():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    steps = regard.walk(regard.weights(x).label(["the", "cat", "sat"]), x, "cat")
    assert steps.q.tolist() == [0.0, 2.0]
    assert steps.product.tolist() == [0.0, 4.0, 2.0]
    torch.testing.assert_close(steps.scaled, torch.tensor([0.0, 4.0, 2.0]) / math.sqrt(2))
    assert (steps.formula, steps.scaling) == ("q·k", "÷ √2")
    assert steps.shapes["weighted"] == (3, 2)
    assert steps.shapes["y"] == (2,)


def test_every_formula_and_scale_is_named():
    x = drawn(T, D)
    named = {
        "dot": ("q·k", "unscaled"),
        "scaled": ("q·k", "÷ √5"),
        "scaled by hand": ("q·k", "× 0.3"),
        "cosine": ("cos(q, k)", "× 4"),
        "gaussian": ("|q − k|²", "÷ −2·1.5²"),
        "bilinear": ("qᵀ W k", "unscaled"),
        "additive": ("vᵀ tanh(q A + k B)", "unscaled"),
        "your own": ("f(q, k)", "unscaled"),
    }
    for score, formula in named.items():
        steps = regard.walk(regard.weights(x, score=SCORES[score]()), x, 0)
        assert (steps.formula, steps.scaling) == formula
    changed = regard.walk(regard.weights(x, score=SCORES["biased, then softcapped"]()), x, 0)
    assert [name for name, _ in changed.changes] == ["bias", "softcap"]


def test_weights_that_were_given_have_no_scores_but_the_last_steps():
    w = drawn(T, T).softmax(-1)
    v = drawn(T, E)
    steps = regard.walk(regard.Weights.from_dense(w), v, 3)
    assert steps.q is steps.product is steps.masked is None
    torch.testing.assert_close(steps.y, w[3] @ v, atol=1e-12, rtol=0)
    assert "ready-made" in str(steps)


def test_what_may_not_be_seen_may_be_anything():
    q, k, v = drawn(T, D), drawn(T, D), drawn(T, E)
    k[5:], v[5:] = math.nan, math.inf
    weights = regard.weights(q, k, mask=regard.padding(torch.tensor(5)))
    steps = regard.walk(weights, v, 1)
    assert steps.y.isfinite().all()
    torch.testing.assert_close(steps.y, (weights @ v)[1], atol=1e-12, rtol=0)


def test_a_row_that_sees_nothing_gives_nothing():
    x = drawn(T, D)
    steps = regard.walk(regard.weights(x, mask=torch.zeros(T, T, dtype=torch.bool)), x, 2)
    assert steps.weights.sum() == 0
    assert steps.y.abs().sum() == 0


def test_a_row_that_sees_nothing_does_not_claim_to_sum_to_one():
    x = drawn(T, D)
    text = str(regard.walk(regard.weights(x, mask=torch.zeros(T, T, dtype=torch.bool)), x, 2))
    assert "nothing may be looked at" in text
    assert "their sum 1" not in text


def test_no_graph_is_kept():
    q = drawn(T, D).requires_grad_()
    steps = regard.walk(regard.weights(q), q, 0)
    assert not steps.q.requires_grad
    assert str(steps)
    assert not steps.y.requires_grad


WRONG = [
    (lambda W, v: regard.walk(v, v, 0), TypeError, "W must be a Weights"),
    (lambda W, v: regard.walk(W, v, 0), ValueError, "W has 2 heads"),
    (lambda W, v: regard.walk(W, v, 0, head=2), IndexError, "head must be 0 to 1, got 2"),
    (lambda W, v: regard.walk(W[0], v, 0), ValueError, "v must be .j, e. with a row for each of 7 keys"),
    (lambda W, v: regard.walk(W[0], v[0, :3], 0), ValueError, "each of 7 keys, got shape"),
    (lambda W, v: regard.walk(W[0], [1.0], 0), TypeError, "v must be a tensor"),
    (lambda W, v: regard.walk(W[0], v[0], "cat"), LookupError, "have no tokens"),
    (lambda W, v: regard.walk(W[0], v[0], 7), LookupError, "position must be 0 to 6, got 7"),
    (lambda W, v: regard.walk(W[0].label(list("abcdefg")), v[0], "x"), LookupError, "'x' is not among the words"),
    (lambda W, v: regard.walk(W[0].label(list("aacdefg")), v[0], "a"), LookupError, "a:1 is the first"),
    (lambda W, v: regard.walk(regard.Weights.from_dense(W[0].dense()), None, 0), ValueError, "pass the values"),
    (lambda W, v: regard.walk(W, drawn(3, T, E), 0, head=0), ValueError, "must divide"),
    (lambda W, v: regard.walk(W[0], v[0], 0, head=1), IndexError, "W is one head, got 1"),
    (lambda W, v: regard.walk(regard.weights(drawn(1, 2, T, D)), v, 0), ValueError, "one sequence"),
]


@pytest.mark.parametrize(("call", "kind", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_mistakes_are_told(call, kind, says):
    with pytest.raises(kind, match=says):
        call(regard.weights(drawn(2, T, D)), drawn(2, T, E))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_long_row_is_shown_by_its_strongest_words(width):
    q = drawn(5000, 4)
    text = draw_walk(regard.walk(regard.weights(q), q, 1234), width=width)
    lines = text.splitlines()
    assert len(lines) < 60
    assert max(map(cell_width, lines)) <= width
    assert "more" in text


def test_printing_says_every_step():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    text = str(regard.walk(regard.weights(x, mask=regard.causal()).label(["the", "cat", "sat"]), x, "cat"))
    for caption in (
        "1 query",
        "2 q·k",
        "3 ÷ √2",
        "\nmask: ",
        "4 softmax",
        "5 weight × value",
        "6 sum",
        "−∞",
        "2.000·2.000",
    ):
        assert caption in text
    assert repr(regard.walk(regard.weights(x), x, 0)) == str(regard.walk(regard.weights(x), x, 0))


def test_the_values_of_a_recorded_head_are_passed_and_never_taken_from_its_keys(tmp_path):
    torch.manual_seed(3)
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    with torch.no_grad(), regard.record(layer, values=True) as seen:
        layer(x, x, x, need_weights=False)
    seen.save(tmp_path / "x.regard")
    for one in (seen, regard.load(tmp_path / "x.regard")):
        for W in (one[0, 1], one[0, 1, 0], one[0][0, 1], one[0, 1].double()):
            with pytest.raises(ValueError, match=r"other vectors than its keys: record\(model, values=True\)"):
                regard.walk(W, None, 2)
        v = one.layer(0).values[0, 1]
        torch.testing.assert_close(regard.walk(one[0, 1], v, 2).y, (one[0, 1] @ v)[2])
