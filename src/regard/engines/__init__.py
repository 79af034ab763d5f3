"""Who computes: the engines and the table by which `engine="auto"` picks one.

An engine turns a problem and a question into numbers, and a gradient of the weights into gradients of what
they were made of. Engines agree by test; each says what it serves. Imports `factors`, `statistics`, `state`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..factors import Problem
from ..statistics import Answers, Question
from . import blockwise, triton
from .gradient import Gradient, Gradients

__all__ = ["ENGINES", "Engine", "named"]

#: What users may name. `auto` picks the first that serves; `reference` is t × t and is never picked.
ENGINES = ("auto", "triton", "blockwise", "reference")


class Engine(Protocol):
    name: str

    def compute(self, problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
        """The named answers to the question; `known` may hold lse already."""

    def backward(
        self, problem: Problem, question: Question, lse: Tensor, gradient: Gradient, needs: list[bool]
    ) -> Gradients:
        """Gradients of the problem's tensors, of v and of u; `needs` says of which of the problem's tensors."""


class Auto:
    """`engine="auto"`, decided for every problem: the first row that serves.

    | on | what | engine |
    |---|---|---|
    | NVIDIA GPUs | all that `triton` serves: see `triton.why_not` | `triton` |
    | anywhere | everything | `blockwise` |
    """

    name = "auto"

    def picked(self, problem: Problem, question: Question) -> Engine:
        """The engine that `auto` means for this problem."""
        on_gpu = problem.q.device.type == "cuda"
        return triton.ENGINE if on_gpu and triton.why_not(problem, question) is None else blockwise.ENGINE

    def compute(self, problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
        return self.picked(problem, question).compute(problem, question, names, known)

    def backward(
        self, problem: Problem, question: Question, lse: Tensor, gradient: Gradient, needs: list[bool]
    ) -> Gradients:
        return self.picked(problem, question).backward(problem, question, lse, gradient, needs)


def named(name: str) -> Engine:
    """The engine of that name."""
    by_name: dict[str, Engine] = {"auto": AUTO, "triton": triton.ENGINE}
    return by_name.get(name, blockwise.ENGINE)


AUTO = Auto()
