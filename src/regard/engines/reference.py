"""The textbook, t × t: what it computes is right by definition.

Scores are written out, softmax is taken over whole rows, and every statistic is its formula on dense weights.
Plain PyTorch throughout, so it differentiates as often as one likes. Memory is quadratic: for tests and for
small inputs. Imports `factors` and `statistics`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.problem import Factors, mask_scores, repeat_kv, zero_keys
from ..core.pytree import tree_map
from ..core.scores import Precomputed, upcast
from ..core.stats import Request, Results, lse_of, of_dense, softmax, with_sink

__all__ = ["answer", "dense", "weights"]


def answer(factors: Factors, request: Request) -> Results:
    """Everything asked of the weights of these factors, whose batch is one axis."""
    s, w, norm, sink = dense(factors)
    if request.v is not None and (seen := _seen(factors)) is not None:
        request = dataclasses.replace(request, v=zero_keys(request.v, seen, -2))
    results = of_dense(w, s, request, factors.query_offset, sink)
    results |= {"norm": norm, "lse": lse_of(norm)}
    if request.v is not None:
        results["y"] = results["y"].to(request.v.dtype)
    return {name: results[name] for name in request.names}


def weights(factors: Factors) -> Tensor:
    """The matrix written out, (b, h, i, j)."""
    return dense(factors)[1]


def dense(factors: Factors) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores and weights (b, h, i, j), the norm of rows (b, h, i, 2), and the share of the sink, if there is one."""
    score = factors.score
    if isinstance(score, Precomputed):
        w = upcast(score.w)
        return w.log(), w, w.new_tensor([0.0, 1.0]).expand(*w.shape[:3], 2), None
    k, steps = factors.k, score.modifiers
    if (seen := _seen(factors)) is not None:  # what no row may see may be anything, also nan
        k, steps = zero_keys(k, seen, -2), tree_map(steps, lambda t: zero_keys(t, seen, -1))
    block = MatrixBlock(slice(0, factors.q.shape[2]), slice(0, k.shape[2]), factors.query_offset, k.device)
    s = score.similarity(upcast(factors.q), repeat_kv(upcast(k), factors.heads))
    for step in steps:
        s = step.apply(s, block)
    s = mask_scores(s, factors.mask, block)
    w, share = softmax(s, score.sink_logits)
    return s, w, _norm(with_sink(s, score.sink_logits)), share


def _seen(factors: Factors) -> Tensor | None:
    return factors.problem().visible_keys() if factors.mask is not None else None


def _norm(s: Tensor) -> Tensor:
    """Maximum and sum (b, h, i, 2) of rows of scores, in which a sink is one more column."""
    empty = (s == -torch.inf).all(-1, keepdim=True)
    flat = s.masked_fill(empty, 0)
    m = flat.detach().amax(-1, keepdim=True) if s.shape[-1] else flat.sum(-1, keepdim=True)
    l = (flat - m).exp().sum(-1, keepdim=True)
    return torch.cat([m.masked_fill(empty, -torch.inf), l.masked_fill(empty, 0)], -1)
