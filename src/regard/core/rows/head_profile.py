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

__all__ = ["BINS", "SUMS", "head_profile"]

#: Bins of distances and of positions: 0, 1, then from each power of two to the next.
BINS = 32
#: The sums of a head, in the order of their columns; BINS sums of weight by distance and of received weight follow.
SUMS = (
    "entropy", "entropy²", "peak", "peak²", "weight", "distance", "distance²", "previous", "first", "induction",
)  # fmt: skip


def head_profile(matrix: Relations, targets: Tensor) -> Results | None:
    """The numbers of every head of self-attention; None where no kernel serves the matrix.

    Args:
        matrix: ``(b, h, t, t)``.
        targets: A key for each row, or −1: ``(b, 1, t, 1)``.

    Returns:
        On a GPU `sums` (b, h, SUMS and 2 · BINS) and `place` (b, h, 3), in float64: of the largest weight on a key that
        is neither the first nor the row's own the weight, its row and its key. Of compiled tiles the numbers that these
        follow from: `entropy`, `largest`, `first`, `target` of every row (b, h, t), but for `first` of the first row;
        `received` (b, h, t); `diagonals` (b, h, 2 t − 1), index j − i + t − 1; `tie`, `query`, `key` (b, h) for the
        largest weight.
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
    numbers = without_autocast(problem.q, lambda: kernels.profile_pass(problem, rows, targets))
    if "sums" in numbers:
        return numbers
    return numbers | {
        "entropy": rows["entropy"],
        "largest": weights_of_scores(rows["max_score"], rows["norm"]),
    }


def _kernels(problem: Problem, engine: engines.FusedEngine) -> Any | None:
    """The module whose kernel has these scores, by the product that the norm comes from; None where none has."""
    if engines.resolve(engine, problem, Request(("norm",))) is engines.triton.ENGINE:
        from ...engines.triton import profile_pass

        return profile_pass if profile_pass.serves_profile(problem) else None
    return compiled if compiled.serves_profile(problem) else None
