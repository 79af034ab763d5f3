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

__all__ = ["ENGINES", "Engine", "named", "serving"]

#: What users may name. `auto` picks the first that serves; `reference` is t × t and is never picked.
ENGINES = ("auto", "triton", "blockwise", "reference")


class Engine(Protocol):
    name: str
    #: Whether the gradient of y is taken in its own type, not in float32.
    narrow: bool

    def compute(self, problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
        """The named answers to the question; `known` may hold norm already."""

    def backward(
        self, problem: Problem, question: Question, norm: Tensor, gradient: Gradient, needs: list[bool]
    ) -> Gradients:
        """Gradients of the problem's tensors, of v and of u; `needs` says of which of the problem's tensors."""

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ_e a b for every row, (b, h, i), in the type of statistics."""


class Auto:
    """`engine="auto"`, decided for every problem: the first row that serves.

    | on | what | engine |
    |---|---|---|
    | NVIDIA GPUs | all that `triton` serves: see `triton.why_not` | `triton` |
    | anywhere | everything | `blockwise` |
    """

    name = "auto"
    narrow = False

    def picked(self, problem: Problem, question: Question) -> Engine:
        """The engine that `auto` means for this problem."""
        on_gpu = problem.q.device.type == "cuda"
        return triton.ENGINE if on_gpu and triton.why_not(problem, question) is None else blockwise.ENGINE

    def compute(self, problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
        return self.picked(problem, question).compute(problem, question, names, known)

    def backward(
        self, problem: Problem, question: Question, norm: Tensor, gradient: Gradient, needs: list[bool]
    ) -> Gradients:
        return self.picked(problem, question).backward(problem, question, norm, gradient, needs)

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        return blockwise.ENGINE.row_dot(a, b)


def serving(engine: Engine, problem: Problem, question: Question) -> Engine:
    """The engine that computes: `auto` decided, any other itself."""
    return AUTO.picked(problem, question) if isinstance(engine, Auto) else engine


def named(name: str) -> Engine:
    """The engine of that name."""
    by_name: dict[str, Engine] = {"auto": AUTO, "triton": triton.ENGINE}
    return by_name.get(name, blockwise.ENGINE)


AUTO = Auto()
