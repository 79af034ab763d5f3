"""Every public method of a matrix over ranks answers or is refused by name, and a wrong call of one ends on all."""

from __future__ import annotations

import pytest
import torch

from support.rank_methods import TABLES, WRONG, public


@pytest.mark.parametrize("kind", TABLES)
def test_every_public_method_answers_as_one_process_or_is_refused_by_name(ranks, kind) -> None:
    table, owner, _ = TABLES[kind]
    assert set(table) == public(owner), "a new method is entered in support/rank_methods.py"
    for answered in ranks.run(3, "support.rank_methods.answers", kind):
        for name, got, want in answered:
            if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
            else:
                assert got == want, name


@pytest.mark.parametrize("kind", TABLES)
def test_another_call_of_one_rank_is_one_error_on_all(ranks, kind) -> None:
    for of_ranks in zip(*ranks.run(3, "support.rank_methods.errors_of_other_calls", kind), strict=True):
        assert len(set(of_ranks)) == 1, of_ranks
        name, error, text = of_ranks[0]
        assert error == "RankError", (name, error, text)
        assert "rank" in text, (name, text)
        assert "sent nothing" not in text, (name, text)


@pytest.mark.parametrize("what", WRONG)
def test_one_wrong_call_of_one_rank_is_told_to_all(ranks, what) -> None:
    errors = ranks.run(3, "support.rank_methods.error_of_wrong_call", what)
    assert len(set(errors)) == 1, errors
    assert WRONG[what][2] in errors[0], errors


@pytest.mark.parametrize("what", ["a result is left out", "another order"])
def test_backward_passes_of_different_results_are_told_apart(ranks, what) -> None:
    errors = ranks.run(3, "support.rank_methods.backward", what)
    assert len(set(errors)) == 1, errors
    assert "all ranks must make the same calls in the same order; rank 1 of 3 is at the backward pass of" in errors[0]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a second time", "Trying to backward through the graph a second time"),
        ("second derivatives", "got create_graph"),
    ],
)
def test_a_backward_pass_that_one_rank_cannot_make_is_told_to_all(ranks, what, text) -> None:
    errors = ranks.run(3, "support.rank_methods.backward", what)
    assert len(set(errors)) == 1, errors
    assert "rank 1 of 3 cannot take part in the backward pass of" in errors[0]
    assert text in errors[0]


@pytest.mark.parametrize("what", ["one learns", "one asks"])
def test_a_parameter_gets_its_gradient_where_one_rank_wants_it(ranks, what) -> None:
    assert ranks.run(3, "support.rank_methods.backward", what) == ["equal"] * 3


@pytest.mark.parametrize("what", ["keys of one rank", "a result of one rank", "the mask"])
def test_numbers_that_are_changed_in_place_are_computed_again_on_all_ranks(ranks, what) -> None:
    for pairs in ranks.run(3, "support.rank_methods.changed_in_place", what):
        for got, want in pairs:
            torch.testing.assert_close(got, want)


def test_an_activation_checkpoint_computes_again_over_ranks(ranks) -> None:
    for pairs in ranks.run(2, "support.rank_methods.checkpointed"):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_compiled_code_calls_a_matrix_over_ranks_between_its_graphs(ranks) -> None:
    for pairs in ranks.run(2, "support.rank_methods.compiled"):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_one_graph_cannot_hold_an_exchange(ranks) -> None:
    errors = ranks.run(2, "support.rank_methods.compiled_as_one_graph")
    assert all("return _over_ranks(" in error for error in errors), errors


def test_transforms_that_cannot_follow_an_exchange_are_refused_on_all_ranks(ranks) -> None:
    errors = ranks.run(2, "support.rank_methods.transformed")
    assert len(set(errors)) == 1, errors
    assert "torch.func cannot follow an exchange between ranks" in errors[0]
