"""Worked examples: what the documents about self-attention compute by hand, and what they say of it."""

from __future__ import annotations

import importlib
import math
import pkgutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
import regard.core
from regard.core import pytree
from support.judge import draw

# "the cat sat": three vectors of two numbers, chosen so that every product can be had in the head.
THE, CAT, SAT = [1.0, 0.0], [0.0, 2.0], [1.0, 1.0]
X = torch.tensor([THE, CAT, SAT], dtype=torch.float64)


def softmax(*scores: float) -> list[float]:
    return [math.exp(s) / sum(map(math.exp, scores)) for s in scores]


def test_basic_self_attention_of_the_cat_sat_by_hand(engine: str) -> None:
    W = regard.weights(X, score="dot", engine=engine).label(["the", "cat", "sat"])
    # Raw weights of "cat": with "the" 0·1 + 2·0 = 0, with itself 2·2 = 4, with "sat" 0·1 + 2·1 = 2.
    the, cat, sat = softmax(0, 4, 2)
    assert W["cat"].tolist() == pytest.approx([the, cat, sat], rel=1e-14)
    assert W["cat", "sat"].item() == pytest.approx(sat, rel=1e-14)
    # y_cat = Σ_j w_j x_j, the word itself included.
    assert (W @ X)[1].tolist() == pytest.approx([the * 1 + sat * 1, cat * 2 + sat * 1], rel=1e-14)
    assert W.lse()[1].item() == pytest.approx(math.log(1 + math.exp(4) + math.exp(2)), rel=1e-14)
    assert W.entropy()[1].item() == pytest.approx(-sum(w * math.log(w) for w in (the, cat, sat)), rel=1e-13)
    assert W.peak().indices.tolist() == [0, 1, 1]  # "sat" is drawn to "cat", the longest vector


def test_every_row_sums_to_one_and_every_weight_lies_between_zero_and_one(engine: str) -> None:
    w = regard.weights(X, score="dot", engine=engine).dense()
    assert w.sum(-1).tolist() == pytest.approx([1, 1, 1], rel=1e-14)
    assert ((w >= 0) & (w <= 1)).all()


def test_raw_weights_are_symmetric_and_weights_are_not(engine: str) -> None:
    W = regard.weights(X, score="dot", engine=engine)
    s = W.dense().log() + W.lse()[:, None]
    torch.testing.assert_close(s, s.mT)
    assert not torch.allclose(W.dense(), W.dense().mT)


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine"])
def test_the_matrix_form_is_one_vector_at_a_time(score: str, engine: str) -> None:
    x = draw(7, 5)
    matrix_form = regard.weights(x, score=score, engine=engine) @ x
    for i in range(7):
        q = x[i]
        s = [(q @ k).item() for k in x]
        if score == "scaled_dot":
            s = [value / math.sqrt(5) for value in s]
        if score == "cosine":
            s = [(q @ k / (q.norm() * k.norm())).item() for k in x]
        w = softmax(*s)
        y = sum(w_j * x_j for w_j, x_j in zip(w, x, strict=True))
        torch.testing.assert_close(matrix_form[i], y, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            regard.attend(q[None], x, x, score=score, engine=engine)[0], y, rtol=1e-13, atol=1e-13
        )


def test_six_steps_with_keys_of_64_numbers_and_division_by_8(engine: str) -> None:
    # (1) q, k and v of three words; sizes 512 → 64 as in the paper.
    x, w_q, w_k, w_v = draw(3, 512), draw(512, 64) / 512**0.5, draw(512, 64) / 512**0.5, draw(512, 64) / 512**0.5
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    # (2) scores of the first word against every word, (3) divided by 8, (4) softmax.
    scores = [(q[0] @ k[j]).item() for j in range(3)]
    weights = softmax(*[s / 8 for s in scores])
    # (5) every value times its weight, (6) added up.
    z = sum(weights[j] * v[j] for j in range(3))
    W = regard.weights(q, k, engine=engine)
    assert W.max_score()[0].item() == pytest.approx(max(scores) / 8, rel=1e-12)
    assert W[0].tolist() == pytest.approx(weights, rel=1e-12)
    torch.testing.assert_close((W @ v)[0], z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regard.attend(q, k, v, engine=engine)[0], z, rtol=1e-12, atol=1e-12)


def test_scores_of_112_and_96_become_14_and_12_and_088_and_012() -> None:
    # q · k = 112 and 96; divided by 8: 14 and 12; softmax: 0.88 and 0.12.
    q, k = torch.zeros(1, 64), torch.zeros(2, 64)
    q[0, 0], k[0, 0], k[1, 0] = 8, 14, 12
    W = regard.weights(q, k)
    assert W.max_score().item() == 14
    assert [round(w, 2) for w in W[0].tolist()] == [0.88, 0.12]


def test_without_the_division_rows_are_sharper() -> None:
    q, k = draw(11, 64), draw(13, 64)
    assert (regard.weights(q, k).entropy() > regard.weights(q, k, score="dot").entropy()).all()
    assert (regard.weights(q, k).peak().values < regard.weights(q, k, score="dot").peak().values).all()


def test_both_the_of_the_cat_walks_on_the_street_get_the_same_output(engine: str) -> None:
    vocabulary = {word: draw(16) for word in ("the", "cat", "walks", "on", "street")}
    words = ["the", "cat", "walks", "on", "the", "street"]
    x = torch.stack([vocabulary[word] for word in words])
    W = regard.weights(x, score="dot", engine=engine).label(words)
    y = W @ x
    torch.testing.assert_close(y[0], y[4], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(W[W.at("the", 1)], W[W.at("the", 2)], rtol=1e-14, atol=1e-14)
    # With positions they differ.
    near = regard.weights(x, score=regard.Cosine().alibi(torch.tensor([1.0]).double()), engine=engine) @ x
    assert not torch.allclose(near[0], near[4])


@given(st.permutations(range(7)))
def test_permuting_the_words_permutes_the_output(order: list[int]) -> None:
    x = draw(7, 3)
    for score in ("dot", "scaled_dot", "cosine", regard.Gaussian(1.5)):
        W, shuffled = regard.weights(x, score=score), regard.weights(x[order], score=score)
        torch.testing.assert_close(shuffled @ x[order], (W @ x)[order], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shuffled.received(), W.received()[order], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shuffled.entropy(), W.entropy()[order], rtol=1e-12, atol=1e-12)


@given(st.permutations(range(7)))
def test_the_order_of_keys_and_values_does_not_matter_to_a_query(order: list[int]) -> None:
    q, k, v = draw(3, 5), draw(7, 5), draw(7, 2)
    torch.testing.assert_close(regard.attend(q, k[order], v[order]), regard.attend(q, k, v), rtol=1e-12, atol=1e-12)


def test_a_word_looks_at_itself_most_unless_another_vector_is_much_longer() -> None:
    unit = torch.nn.functional.normalize(draw(9, 5), dim=-1)
    assert regard.weights(unit, score="dot").peak().indices.tolist() == list(range(9))
    long = unit.clone()
    long[4] = unit[3] * 50
    assert regard.weights(long, score="dot").peak().indices[3] == 4


def test_a_bilinear_score_ties_what_a_dot_product_cannot() -> None:
    # "cat" and "mat" are orthogonal; a matrix that turns one into the other ties them, in one direction only.
    cat, mat, on = torch.eye(3).double() * 3
    turn = torch.outer(cat, mat)
    x = torch.stack([cat, mat, on])
    tied = regard.weights(x, score=regard.Bilinear(turn))
    assert tied.peak().indices[0] == 1
    assert tied.entropy()[1].item() == pytest.approx(math.log(3))
    assert regard.weights(x, score="dot").peak().indices.tolist() == [0, 1, 2]


def test_values_may_have_a_size_of_their_own() -> None:
    q, k, v = draw(5, 64), draw(5, 64), draw(5, 17)
    assert regard.attend(q, k, v).shape == (5, 17)


def test_two_heads_are_two_attentions_side_by_side(engine: str) -> None:
    q, k, v = draw(2, 7, 3), draw(2, 7, 3), draw(2, 7, 3)
    both: Tensor = regard.weights(q, k, engine=engine) @ v
    for head in range(2):
        torch.testing.assert_close(
            both[head], regard.weights(q[head], k[head], engine=engine) @ v[head], rtol=1e-13, atol=1e-13
        )


def test_a_window_of_one_before_and_one_after_mixes_neighbours_only(engine: str) -> None:
    x = draw(6, 3)
    W = regard.weights(x, score="dot", mask=regard.window(1, 1), engine=engine)
    for i in range(6):
        near = [j for j in (i - 1, i, i + 1) if 0 <= j < 6]
        assert W[i, near].tolist() == pytest.approx(softmax(*[(x[i] @ x[j]).item() for j in near]), rel=1e-12)


def test_every_node_that_holds_no_function_can_be_stored() -> None:
    for module in pkgutil.walk_packages(regard.core.__path__, "regard.core."):  # some register nodes when first used
        importlib.import_module(module.name)
    with_functions = {"Cropped", "Function", "Modify", "Predicate", "Selected", "Similarity"}
    # Made from factors when asked; Indexer's queries are packed by regard.losses, no recorded layer has such a score.
    computed = {"Distance", "Indexer", "IntervalMask", "Problem", "Product", "ReluSum", "Request", "TanhSum", "Tiling"}
    homes = ("regard.core.rows.", "regard.corpora.profile")
    questions = {name for name, node in pytree._NODES.items() if node.__module__.startswith(homes)}
    assert set(pytree.STORABLE) == set(pytree._NODES) - with_functions - computed - questions - {"Score"}
