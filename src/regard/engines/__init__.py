"""Who computes: the engines, and the table by which `engine="auto"` picks one.

An engine turns a problem and a request into results, and the gradient of the scores into gradients of the problem's
tensors. All engines agree by test; each says what it serves.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ..core.problem import Factors, Problem
from ..core.stats import Request, Results
from . import blockwise, reference, triton
from .score_grad import InputGrads, ScoreGrad

__all__ = ["ENGINES", "Engine", "FusedEngine", "fused_engine", "get_engine", "resolve", "same_product"]


class Engine(Protocol):
    """An engine computes results. It takes the form of the matrix that its own `prepare` returns."""

    name: str
    #: Whether results are plain PyTorch over `Factors`, which autograd and torch.func follow by themselves. Any other
    #: engine is a `FusedEngine`, and its results become outputs of an autograd node.
    plain: bool
    #: Whether on a GPU a question about complete rows is walked in PyTorch operations, and never by kernels.
    avoids_gpu_kernels: bool

    def prepare(self, factors: Factors) -> Any:
        """The factors, with any batch axes, in the form that `compute` takes."""

    def compute(self, problem: Any, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        """The named results of the request; `cached` may hold `norm` already."""


class FusedEngine(Engine, Protocol):
    """An engine that computes a `Problem` in linear memory, and has a backward of its own."""

    #: Whether the gradient of y is taken in its own type, not in float32.
    keeps_grad_dtype: bool

    def prepare(self, factors: Factors) -> Problem: ...

    def free_outputs(self, problem: Problem, request: Request) -> tuple[str, ...]:
        """The row results, `norm` among them, that every pass over the keys has at no measurable cost."""

    def backward(
        self, problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]
    ) -> InputGrads:
        """Gradients of the problem's tensors, of v and of u; `needs`: for each of the problem's tensors."""

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ_e a b for every row, (b, h, i), in the dtype of statistics."""


class Auto:
    """`engine="auto"`, decided for every problem: the first row that serves.

    | on | what | engine |
    |---|---|---|
    | NVIDIA GPUs | all that `triton` serves: see `triton.unsupported_reason` | `triton` |
    | anywhere | everything | `blockwise` |
    """

    name = "auto"
    plain = False
    avoids_gpu_kernels = False
    keeps_grad_dtype = False

    def prepare(self, factors: Factors) -> Problem:
        return factors.problem()

    def pick(self, problem: Problem, request: Request) -> FusedEngine:
        """The engine that `auto` means for this problem."""
        on_gpu = problem.q.device.type == "cuda" and not request.wants("cells")
        return triton.ENGINE if on_gpu and triton.unsupported_reason(problem, request) is None else blockwise.ENGINE

    def compute(self, problem: Problem, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        return self.pick(problem, request).compute(problem, request, names, cached)

    def free_outputs(self, problem: Problem, request: Request) -> tuple[str, ...]:
        return self.pick(problem, request).free_outputs(problem, request)

    def backward(
        self, problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]
    ) -> InputGrads:
        return self.pick(problem, request).backward(problem, request, norm, gradient, needs)

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        return blockwise.ENGINE.row_dot(a, b)


AUTO = Auto()

_FUSED: dict[str, FusedEngine] = {engine.name: engine for engine in (AUTO, triton.ENGINE, blockwise.ENGINE)}
_BY_NAME: dict[str, Engine] = {**_FUSED, reference.ENGINE.name: reference.ENGINE}
#: The names that users may pass. `auto` picks the first that serves; `reference` is t × t and is never picked.
ENGINES = tuple(_BY_NAME)


def get_engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown engine {name!r}; the engines are {', '.join(map(repr, ENGINES))}.")
    return _BY_NAME[name]


def fused_engine(engine: Engine) -> FusedEngine:
    """The same engine, of one that is not plain."""
    return _FUSED[engine.name]


def resolve(engine: FusedEngine, problem: Problem, request: Request) -> FusedEngine:
    """The engine that computes: `auto` decided, any other itself."""
    return AUTO.pick(problem, request) if engine is AUTO else engine


def same_product(engine: FusedEngine, problem: Problem) -> bool:
    """Whether `cells` are the very scores that this engine's norm of the same problem was computed from.

    Not where the cells of a mask have to be evaluated: then the tiles depend on which rows are asked for.
    """
    if problem.mask is not None and problem.mask.dense_parts() is None:
        return False
    return resolve(engine, problem, Request(("norm",))) is blockwise.ENGINE
