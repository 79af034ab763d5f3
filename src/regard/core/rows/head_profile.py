"""The profile of every head by kernels: all sums of a corpus run in two passes over the scores.

The first pass is the one that attention itself makes, and has the norm, the entropy and the largest score of every row;
where attention was computed by regard, it has been made. The second goes over the weights of finished rows and takes
everything else. `corpora/profile.py` has the same numbers of any matrix, from complete rows in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import engines
from ...engines.numba import profile as compiled
from ..evaluation import weights_of_scores
from ..problem import Problem
from ..stats import Request, Results
from ..torch_state import in_functorch, is_tracing, without_autocast
from .relations import Relations
from .sources import ScoreRows

__all__ = ["head_profile"]


def head_profile(matrix: Relations, targets: Tensor) -> Results | None:
    """The numbers of every head of self-attention; None where no kernel serves the matrix.

    Args:
        matrix: ``(b, h, t, t)``.
        targets: A key for each row, or −1: ``(b, 1, t, 1)``.

    Returns:
        `entropy`, `largest`: of every row (b, h, t). `first`, `target`: the weight on the first key and on the target,
        of every row or summed over blocks of rows (b, h, n); the first row counts nothing in `first`. `received`
        (b, h, t). `diagonals` (b, h, 2 t − 1), index j − i + t − 1; or in their place, summed over blocks of keys
        (b, h, n): `bins` (b, h, n, BINS), `distance`, `distance²` and `previous`. `tie`, `query`, `key` (b, h): the
        largest weight on a key that is neither the first nor the row's own, and its place.
    """
    factors = matrix._factors
    if len(factors.batch) != 1 or matrix._one_head or factors.query_offset:
        return None
    engine = engines.get_engine(matrix._engine)
    if engine.plain:
        return None
    if is_tracing() or in_functorch():
        return None
    source = matrix._row_source(factors.batch)
    kernels = _kernels(source.problem, engines.fused_engine(engine)) if isinstance(source, ScoreRows) else None
    if kernels is None or not isinstance(source, ScoreRows):
        return None
    problem = source.problem
    rows = matrix._ask(Request(("norm", "entropy", "max_score")))
    numbers = without_autocast(problem.q, lambda: kernels.profile_pass(problem, rows["norm"], targets))
    return {
        "entropy": rows["entropy"],
        "largest": weights_of_scores(rows["max_score"], rows["norm"]),
        **numbers,
    }


def _kernels(problem: Problem, engine: engines.FusedEngine) -> Any | None:
    """The module whose kernel has these scores, by the product that the norm comes from; None where none has."""
    if engines.resolve(engine, problem, Request(("norm",))) is engines.triton.ENGINE:
        from ...engines.triton import profile_pass

        return profile_pass if profile_pass.serves_profile(problem) else None
    return compiled if compiled.serves_profile(problem) else None
