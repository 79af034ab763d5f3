"""Who computes: the engines and the table by which `engine="auto"` picks one.

An engine turns a problem and a request into numbers, and a gradient of the weights into gradients of what
they were made of. Engines agree by test; each says what it serves. Imports `factors`, `statistics`, `state`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..core.problem import Problem
from ..core.stats import Request, Results
from . import blockwise, triton
from .score_grad import InputGrads, ScoreGrad

__all__ = ["ENGINES", "Engine", "get_engine", "resolve"]

#: What users may name. `auto` picks the first that serves; `reference` is t × t and is never picked.
ENGINES = ("auto", "triton", "blockwise", "reference")


class Engine(Protocol):
    name: str
    #: Whether the gradient of y is taken in its own type, not in float32.
    narrow: bool

    def compute(self, problem: Problem, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        """The named results to the question; `known` may hold norm already."""

    def backward(
        self, problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]
    ) -> InputGrads:
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

    def picked(self, problem: Problem, request: Request) -> Engine:
        """The engine that `auto` means for this problem."""
        on_gpu = problem.q.device.type == "cuda" and not request.wants("cells")
        return triton.ENGINE if on_gpu and triton.unsupported_reason(problem, request) is None else blockwise.ENGINE

    def compute(self, problem: Problem, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        return self.picked(problem, request).compute(problem, request, names, cached)

    def backward(
        self, problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]
    ) -> InputGrads:
        return self.picked(problem, request).backward(problem, request, norm, gradient, needs)

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        return blockwise.ENGINE.row_dot(a, b)


def resolve(engine: Engine, problem: Problem, request: Request) -> Engine:
    """The engine that computes: `auto` decided, any other itself."""
    return AUTO.picked(problem, request) if isinstance(engine, Auto) else engine


def same_product(engine: Engine, problem: Problem) -> bool:
    """Whether the scores of `cells` are those that this engine's norm of the same problem was made of."""
    return resolve(engine, problem, Request(("norm",))) is blockwise.ENGINE


def get_engine(name: str) -> Engine:
    """The engine of that name."""
    by_name: dict[str, Engine] = {"auto": AUTO, "triton": triton.ENGINE}
    return by_name.get(name, blockwise.ENGINE)


AUTO = Auto()
