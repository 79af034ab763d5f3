"""Random questions about complete rows, heads and two matrices, against formulas in float64 (`support/question_cases.py`)."""

from __future__ import annotations

import pytest

from support.question_cases import Case


@pytest.mark.parametrize("number", range(24))
def test_some_questions_of_random_matrices(number: int) -> None:
    case = Case(number)
    assert not list(case.failures(step=9)), case


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_all_questions_of_many_random_matrices(first: int) -> None:
    for number in range(first, first + 20):
        case = Case(number)
        assert not list(case.failures()), case
