"""The textbook, t × t: what it computes is right by definition.

Scores are written out, softmax is taken over whole rows, and every statistic is its formula on dense weights.
Plain PyTorch throughout, so it differentiates as often as one likes. Memory is quadratic: for tests and for
small inputs. Imports `factors` and `statistics`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..block import Block
from ..factors import Factors, blank, hide, per_query_head
from ..score import Given, wide
from ..statistics import Answers, Question, lse_of, of_dense
from ..tree import change

__all__ = ["answer", "dense", "softmax", "weights"]


def answer(factors: Factors, question: Question) -> Answers:
    """Everything asked of the weights of these factors, whose batch is one axis."""
    s, w, norm, sink = dense(factors)
    if question.v is not None and (seen := _seen(factors)) is not None:
        question = dataclasses.replace(question, v=blank(question.v, seen, -2))
    answers = of_dense(w, s, question, factors.place, sink)
    answers |= {"norm": norm, "lse": lse_of(norm)}
    if question.v is not None:
        answers["y"] = answers["y"].to(question.v.dtype)
    return {name: answers[name] for name in question.names}


def weights(factors: Factors) -> Tensor:
    """The matrix written out, (b, h, i, j)."""
    return dense(factors)[1]


def dense(factors: Factors) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores and weights (b, h, i, j), the norm of rows (b, h, i, 2), and the share of the sink, if there is one."""
    score = factors.score
    if isinstance(score, Given):
        w = wide(score.w)
        return w.log(), w, w.new_tensor([0.0, 1.0]).expand(*w.shape[:3], 2), None
    k, steps = factors.k, score.steps
    if (seen := _seen(factors)) is not None:  # what no row may see may be anything, also nan
        k, steps = blank(k, seen, -2), change(steps, lambda t: blank(t, seen, -1))
    block = Block(slice(0, factors.q.shape[2]), slice(0, k.shape[2]), factors.place, k.device)
    s = score.similarity(wide(factors.q), per_query_head(wide(k), factors.heads))
    for step in steps:
        s = step.apply(s, block)
    s = hide(s, factors.mask, block)
    return (s, *softmax(s, score.sink_logits))


def _seen(factors: Factors) -> Tensor | None:
    return factors.problem().seen() if factors.mask is not None else None


def softmax(s: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights (b, h, i, j) and the norm (b, h, i, 2) of scores; with a sink's logits also the share it takes."""
    if logits is not None:
        s = torch.cat([s, logits.to(s.dtype).expand(*s.shape[:3], 1)], -1)
    # softmax of a row of −inf is nan, in its gradient too: such a row is set to 0 before. And what is hidden weighs
    # 0 also in a row that is nan.
    hidden = s == -torch.inf
    empty = hidden.all(-1, keepdim=True)
    flat = s.masked_fill(empty, 0)
    w = flat.softmax(-1).masked_fill(hidden, 0)
    m = flat.detach().amax(-1, keepdim=True) if s.shape[-1] else flat.sum(-1, keepdim=True)
    l = (flat - m).exp().sum(-1, keepdim=True)
    norm = torch.cat([m.masked_fill(empty, -torch.inf), l.masked_fill(empty, 0)], -1)
    return (w, norm, None) if logits is None else (w[..., :-1], norm, w[..., -1])
