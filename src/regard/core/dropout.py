"""Dropout of attention weights while training, in linear memory: PyTorch's fused attention on a GPU, or the code here.

A dropped weight is 0, the others are divided by 1 − p, and rows are not normalised again:
y_i = Σ_j d_ij w_ij v_j with d_ij = 0 or 1/(1 − p). Whether a weight is dropped is a hash of a seed and its position, so
that the backward pass, which computes scores again, drops the same ones. No mask of i × j is stored.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .api import try_sdpa, weights
from .masks.kinds import Mask
from .scores.kinds import Score
from .types import Align

__all__ = ["attend_with_dropout", "check_dropout"]

#: Hashes are compared with p in so many steps.
_STEPS = 2**24
#: Odd constants whose bits are spread evenly, as 64-bit integers: the golden ratio, and two of SplitMix64.
_ROW, _MIX, _MIX_AGAIN = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def check_dropout(p: float) -> float:
    """A share of weights to drop, from a user's argument."""
    if not 0 <= p < 1:
        raise ValueError(f"attention_dropout is a share of the weights, at least 0 and below 1; got {p}.")
    return p


def attend_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Mask | None, align: Align | None, lse: Tensor | None, p: float
) -> Tensor:
    """Attention whose weights are dropped with probability p, (..., h, i, e); PyTorch's generator gives the seeds.

    On a GPU PyTorch's fused attention computes it where score and mask allow. Elsewhere a second matrix has the score
    −inf where a weight is dropped. Its rows sum to exp(lse′), those of the first to exp(lse), so its output times
    exp(lse′ − lse) is the sum of the weights that stay.

    Args:
        q: Queries ``(..., h, i, d)``.
        k: Keys ``(..., g, j, d)``.
        v: Values ``(..., g, j, e)``.
        score: The score of both matrices.
        mask: The mask of both.
        align: As in `regard.weights`.
        lse: That of the weights before dropout, ``(..., h, i)``, where it is known.
        p: Probability of a weight to be dropped, below 1.
    """
    if q.device.type == "cuda" and (y := try_sdpa(q, k, v, score, mask, p)) is not None:
        return y
    if lse is None:
        lse = weights(q, k, score=score, mask=mask, align=align).lse()
    seeds = torch.randint(2**62, (q.shape[:-3].numel(), q.shape[-3], 1, 1), device=q.device)
    # `_drop` numbers cells by their positions, for which either alignment serves.
    align = align or ("start" if q.shape[-2] != k.shape[-2] else None)
    dropped = score.modify(functools.partial(_drop, seeds=seeds, p=p))
    statistics = weights(q, k, score=dropped, mask=mask, align=align).see("lse", values=v)
    # A row with no visible key has lse = -inf, and -inf - -inf is nan.
    share = (statistics.lse - lse.masked_fill(lse == -torch.inf, 0)).exp() / (1 - p)
    return statistics.y * share.unsqueeze(-1).to(statistics.y.dtype)


def _drop(s: Tensor, i: Tensor, j: Tensor, seeds: Tensor, p: float) -> Tensor:
    """The scores of a block, −inf where the hash of seed, i and j is among the share p."""
    z = (seeds + i * _ROW) ^ j
    z = (z ^ (z >> 30)) * _MIX
    z = (z ^ (z >> 27)) * _MIX_AGAIN
    z = z ^ (z >> 31)
    return s.masked_fill((z % _STEPS) < p * _STEPS, -torch.inf)
