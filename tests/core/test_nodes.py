"""What engines, recordings and pictures ask of masks, scores and modifiers, whatever their class."""

import pytest
import torch

import regard
from regard.core.block import MatrixBlock
from regard.core.broadcast import MatrixShape
from regard.core.masks.kinds import Causal, Dense, as_mask
from regard.core.scores.kinds import BY_NAME, Score
from regard.recorder.slicing import sequence_of

I, J = 5, 7
CELLS = torch.rand(I, J) < 0.6
BANDS = {
    "causal": (regard.causal(), (None, 0)),
    "window": (regard.window(2, 1), (2, 1)),
    "causal & window": (regard.causal() & regard.window(2, 1), (2, 0)),
    "two windows": (regard.window(3, 1) & regard.window(1, 2), (1, 1)),
    "causal | window": (regard.causal() | regard.window(2, 1), None),
    "~causal": (~regard.causal(), None),
    "padding": (regard.padding(3), None),
    "cells": (as_mask(CELLS), None),
    "function": (as_mask(lambda i, j: j <= i), None),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_what_the_mask_shows(name):
    mask, band = BANDS[name]
    assert mask.band() == band
    if band is not None:
        block = MatrixBlock(slice(0, I), slice(0, J), 1, torch.device("cpu"))
        before, after = (J if side is None else side for side in band)
        distance = block.j - block.i
        assert torch.equal(mask.visible(block), (distance >= -before) & (distance <= after))


def test_bool_tensors_hide_more_of_what_is_inside_the_intervals():
    more = torch.rand(I, J) < 0.6
    assert regard.causal().dense_parts() == []
    both = (regard.causal() & CELLS & more).dense_parts()
    assert [part is cells for part, cells in zip(both, (CELLS, more), strict=True)] == [True, True]
    for mask in (as_mask(CELLS) | regard.causal(), ~as_mask(CELLS), regard.causal() & (lambda i, j: j < i)):
        assert mask.dense_parts() is None


def test_a_mask_of_ones_own_is_not_taken_for_its_parent():
    class Shifted(Causal):
        def visible(self, block):
            return block.j <= block.i + 1

        def intervals(self, layout):
            return layout.interval(0, layout.positions + 2)

    class Flipped(Dense):
        def visible(self, block):
            return ~super().visible(block)

    assert Shifted().band() is None
    assert Flipped(CELLS).dense_parts() is None
    q = torch.randn(2, 6, 4)
    want = regard.attend(q, mask=lambda i, j: j <= i + 1)
    torch.testing.assert_close(regard.attend(q, mask=Shifted()), want)


def test_a_score_of_ones_own_is_not_taken_for_its_parent():
    class Negative(regard.ScaledDot):
        def similarity(self, q, k):
            return -super().similarity(q, k)

        def lower(self, q, k):
            return super().lower(-q, k)

    assert regard.Dot().product_scale(4) == 1
    assert regard.ScaledDot().product_scale(4) == 0.5
    assert Negative().product_scale(4) is None
    q, v = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    torch.testing.assert_close(regard.attend(q, q, v, score=Negative()), (-(q @ q.mT) / 2).softmax(-1) @ v)


SCORES = [
    *BY_NAME.values(),
    regard.ScaledDot(0.3),
    regard.Cosine(4.0),
    regard.Gaussian(0.7),
    regard.Bilinear(torch.randn(5, 5)),
    regard.Additive(torch.randn(5, 3), torch.randn(5, 3), torch.randn(3)),
    regard.Similarity(lambda q, k: -torch.cdist(q, k)),
]


@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_the_steps_of_a_formula_end_in_the_score(score):
    q, k = torch.randn(1, 2, I, 5), torch.randn(1, 2, J, 5)
    score = score.broadcast_to(MatrixShape((1, 2, I, J), 0, q.device))
    steps = score.formula_steps(q, k)
    torch.testing.assert_close(steps.scaled, score.similarity(q, k))
    assert (steps.scaling == "unscaled") == (steps.product is steps.scaled)
    assert steps.formula != Score.formula or isinstance(score, regard.Similarity)


# The weight of a bilinear score is as large as the rows and keys here: it must not be cut like a bias.
@pytest.mark.parametrize("score", [regard.Dot(), regard.Bilinear(torch.randn(6, 6)), regard.Gaussian()], ids=repr)
def test_a_part_of_a_matrix_has_its_weights(score):
    q, bias = torch.randn(2, 2, 6, 6), torch.randn(2, 6, 6)
    score = score.bias(bias).alibi(torch.tensor([0.3, 0.1])).modify(lambda s, i, j: s + (i - j) / 9)
    keys = slice(1, 5)
    inside = torch.zeros(6, 6, dtype=torch.bool)
    inside[:, keys] = True
    full = regard.weights(q, score=score, mask=as_mask(inside) & regard.window(2, 3))
    part = sequence_of(full, 1, slice(2, 6), keys)
    torch.testing.assert_close(part.dense(), full.dense()[1][:, 2:6, keys])


def test_a_part_of_dense_weights_is_cut_out():
    w = torch.rand(2, 2, 6, 6).softmax(-1)
    part = sequence_of(regard.Weights.from_dense(w), 0, slice(1, 4), slice(2, 6))
    assert torch.equal(part.dense(), w[0, :, 1:4, 2:6])
