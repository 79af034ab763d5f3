"""Gradients of scores −c |q − k|² on a CPU.

Engines compute such a score as a product and two biases, so that dq = 2c Σ_j ds (k − q) is the difference of two sums.
Where queries are near their keys and far from the origin, it is small and both sums are large: in float32 little of it
is left. In float64 all of it is, for four times the time. Across ranks a piece of keys has the norm of all, to which
only scores of float32 belong: there plain tiles take these two sums, and nothing else, in float64
(`engines/blockwise`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..engines import FusedEngine
from ..engines.score_grad import InputGrads
from .problem import Problem, to_float64
from .pytree import replace_fields, tree_map
from .stats import Request, Results

__all__ = ["distances_cancel", "in_float64"]

#: Gradients of a problem's tensors, v and u, from an engine, results, the outputs' gradients, and who needs one.
Gradients = Callable[[Problem, Request, FusedEngine, Results, Results, list[bool]], InputGrads]


def distances_cancel(problem: Problem, engine: FusedEngine) -> bool:
    """Whether this engine's gradients of a problem need `in_float64`."""
    return problem.distances_cancel and not engine.keeps_grad_dtype


def in_float64(gradients: Gradients) -> Gradients:
    """The same gradients by way of float64, where the score's own biases get none: theirs is part of dq and dk."""

    def widened(
        problem: Problem,
        request: Request,
        engine: FusedEngine,
        results: Results,
        grad_outputs: Results,
        needs: list[bool],
    ) -> InputGrads:
        wide, wide_request = problem.in_float64(), tree_map(request, to_float64)
        indices = {name: x for name, x in results.items() if not x.is_floating_point()}
        names = tuple(name for name in results if name not in indices)
        computed = engine.compute(wide, replace_fields(wide_request, names=names), names, {})
        incoming = {name: to_float64(g) for name, g in grad_outputs.items()}
        grads, dv, du = gradients(wide, wide_request, engine, computed | indices, incoming, needs)
        return InputGrads(wide.with_own_grads(grads, torch.float64), dv, du)

    return widened
