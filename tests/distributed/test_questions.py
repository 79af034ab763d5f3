"""Questions about rows over ranks: every answer and gradient that of one process, or refused with one error."""

from __future__ import annotations

import pytest
import torch

from support.rank_questions import QUESTIONS


@pytest.mark.parametrize(
    ("world", "kind", "split"),
    [
        (2, "no mask", "zigzag"),
        (2, "padding", "zigzag"),
        (2, "bilinear", "zigzag"),
        (3, "sinks", "zigzag"),
        (3, "padding", "one rank has all"),
    ],
)
def test_answers_and_gradients_are_those_of_one_process(ranks, world, kind, split) -> None:
    for pairs in ranks.run(world, "support.rank_questions.answers", kind, list(QUESTIONS), split):
        assert len(pairs) > 2 * len(QUESTIONS)
        for name, got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


REFUSED = (
    "topk of heads together takes complete rows",
    "received of a maximum of heads takes complete rows",
    "distance_variance takes complete rows",
    "one matrix is split over ranks and the other is not",
    "matrices that are compared must have the same rows and keys on every rank",
    "rank 0 of 2 cannot take part in this request: TypeError: mask must be",
    "all ranks must have the same arguments in this request; rank 1 of 2 has 'kl()' and rank 0 'js()'",
    "all ranks must have the same question in a question for log_mass; rank 1 of 2 has",
)


def test_questions_that_ranks_cannot_answer_are_one_error(ranks) -> None:
    first, second = ranks.run(2, "support.rank_questions.refused")
    for text, other, start in zip(first, second, REFUSED, strict=True):
        assert start in text, text
        assert start in other, other
