"""The textbook, t × t: its results are right by definition.

Scores of all cells, softmax over rows, every statistic by its formula on dense weights. Plain PyTorch throughout, so
that autograd differentiates it any number of times. Memory is quadratic: for tests and small inputs.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.problem import Factors, mask_scores, repeat_kv, zero_keys
from ..core.pytree import tree_map
from ..core.scores.kinds import upcast
from ..core.stats import Request, Results, lse_of, of_dense, required, softmax, with_sink
from ..core.torch_state import without_autocast
from .score_grad import weights_from_norm

__all__ = ["ENGINE", "Reference", "dense", "log_weights"]


class Reference:
    """The engine of this file. It takes `Factors`, since it computes the score's formula and not its lowered form.

    Autograd differentiates what it computes; it needs no backward of its own.
    """

    name = "reference"
    plain = True
    avoids_gpu_kernels = False

    def prepare(self, factors: Factors) -> Factors:
        return factors.folded()

    def compute(self, factors: Factors, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        """The named results of factors with one batch axis. Beside the statistics, `weights` are those of a block."""
        return without_autocast(factors.q, lambda: self._compute(factors, request, names))

    def _compute(self, factors: Factors, request: Request, names: tuple[str, ...]) -> Results:
        s, w, norm, sink = dense(factors)
        if request.v is not None and (visible := _visible_keys(factors)) is not None:
            request = dataclasses.replace(request, v=zero_keys(request.v, visible, -2))
        results = of_dense(w, s, request, factors.query_offset, sink)
        results |= {"norm": norm, "lse": lse_of(norm)}
        if request.v is not None:
            results["y"] = results["y"].to(request.v.dtype)
        if "weights" in names:
            results["weights"] = w[:, :, required(request.rows)][..., required(request.cols)]
        return {name: results[name] for name in names}


ENGINE = Reference()


def dense(factors: Factors) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores and weights (b, h, i, j), norm (b, h, i, 2), and the share (b, h, i) of the sink, if there is one."""
    score = factors.score
    if score.precomputed is not None:
        w = upcast(score.precomputed)
        return w.log(), w, w.new_tensor([0.0, 1.0]).expand(*w.shape[:3], 2), None
    k, modifiers = factors.k, score.modifiers
    problem = None if factors.mask is None else factors.problem()
    if problem is not None and (visible := problem.visible_keys()) is not None:  # a key that no row sees may hold nan
        k, modifiers = problem.blank(k, visible, -2), tree_map(modifiers, lambda t: problem.blank(t, visible, -1))
    block = MatrixBlock(slice(0, factors.q.shape[2]), slice(0, k.shape[2]), factors.query_offset, k.device)
    s = score.similarity(upcast(factors.q), repeat_kv(upcast(k), factors.heads))
    for modifier in modifiers:
        s = modifier.apply(s, block)
    s = mask_scores(s, factors.mask, block)
    w, share = softmax(s, score.sink_logits)
    return s, w, _norm(with_sink(s, score.sink_logits)), share


def log_weights(factors: Factors) -> tuple[Tensor, Tensor | None]:
    """Logarithms of the weights (b, h, i, j), −inf where hidden, and of the share (b, h, i) of the sink, if any."""
    if (w := factors.score.precomputed) is not None:
        w = upcast(w)  # log 0 is −inf with the slope inf: a weight of 0 stays out of the graph
        return torch.where(w > 0, w, 1).log().masked_fill(w <= 0, -torch.inf), None
    s, _, norm, _ = dense(factors)
    _, log_w = weights_from_norm(s, norm, False)
    if (sink := factors.score.sink_logits) is None:
        return log_w, None
    return log_w, weights_from_norm(upcast(sink).expand(*s.shape[:3], 1), norm, True)[1].squeeze(-1)


def _visible_keys(factors: Factors) -> Tensor | None:
    return factors.problem().visible_keys() if factors.mask is not None else None


def _norm(s: Tensor) -> Tensor:
    """Maximum and sum of every row of scores, (b, h, i, 2); a sink is one of the columns."""
    empty = (s == -torch.inf).all(-1, keepdim=True)
    flat = s.masked_fill(empty, 0)
    m = flat.detach().amax(-1, keepdim=True) if s.shape[-1] else flat.sum(-1, keepdim=True)
    l = (flat - m).exp().sum(-1, keepdim=True)
    return torch.cat([m.masked_fill(empty, -torch.inf), l.masked_fill(empty, 0)], -1)
