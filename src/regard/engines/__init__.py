"""Who computes: the engines and the table by which `engine="auto"` picks one.

An engine turns a problem and a question into numbers, and a gradient of the weights into gradients of what
they were made of. Engines agree by test; each says what it serves. Imports `factors`, `statistics`, `state`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..factors import Problem
from ..statistics import Answers, Question
from . import blockwise
from .gradient import Gradient, Gradients

__all__ = ["ENGINES", "Engine", "named"]

#: What users may name. `auto` picks the first that serves; `reference` is t × t and is never picked.
ENGINES = ("auto", "blockwise", "reference")


class Engine(Protocol):
    name: str

    def compute(self, problem: Problem, question: Question, names: tuple[str, ...], known: Answers) -> Answers:
        """The named answers to the question; `known` may hold lse already."""

    def backward(
        self, problem: Problem, question: Question, lse: Tensor, gradient: Gradient, needs: list[bool]
    ) -> Gradients:
        """Gradients of the problem's tensors, of v and of u; `needs` says of which of the problem's tensors."""


def named(name: str) -> Engine:
    """The engine of that name; `auto` is `blockwise` on every device so far."""
    return blockwise.ENGINE
