"""Online softmax: partial attention as a `State`, and its merge. The one idea that the code is built on.

The state of two disjoint sets of keys is the merge of their states; merging is associative and commutative, and the
state of no keys is its identity. Blocks of keys, tiles of a kernel, steps of a cache and a sink are all such states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .block import MatrixBlock, take
from .problem import repeat_kv
from .stats import Request, Results, lse_of

__all__ = ["State"]


@dataclass(frozen=True, eq=False)
class State:
    """Attention over some keys, rows not yet divided by their sum. A statistic that was not requested is None."""

    m: Tensor  # b h i : row maximum of s
    l: Tensor  # b h i : Σ exp(s − m)
    t: Tensor | None = None  # b h i : Σ exp(s − m) (s − m), for the entropy
    y: Tensor | None = None  # b h i e : Σ exp(s − m) v
    mean_distance: Tensor | None = None  # b h i : Σ exp(s − m) |distance|
    mass: Tensor | None = None  # b h i : Σ exp(s − m) over chosen keys
    argmax: Tensor | None = None  # b h i
    topk_scores: Tensor | None = None  # b h i n
    topk_indices: Tensor | None = None  # b h i n

    @staticmethod
    def empty(shape: tuple[int, ...], request: Request, like: Tensor) -> State:
        """The state of no keys: the identity of `merge`. shape is (b, h, i)."""
        zero = like.new_zeros(shape)
        none_yet = torch.full(shape, -1, dtype=torch.int64, device=like.device)
        top = (*shape, request.topk)
        return State(
            m=zero - torch.inf,
            l=zero,
            t=zero if request.wants("entropy") else None,
            y=like.new_zeros(*shape, request.v.shape[-1]) if request.v is not None else None,
            mean_distance=zero if request.wants("mean_distance") else None,
            mass=zero if request.wants("mass") else None,
            argmax=none_yet if request.wants("argmax") else None,
            topk_scores=like.new_full(top, -torch.inf) if request.topk else None,
            topk_indices=none_yet.unsqueeze(-1).expand(top) if request.topk else None,
        )

    @staticmethod
    def of_block(s: Tensor, block: MatrixBlock, request: Request) -> State:
        """The state of one block of scores (b, h, i, j), −inf where hidden."""
        if s.shape[-1] == 0:
            return State.empty(s.shape[:-1], request, s)
        m = s.amax(-1)
        above = s - _pivot(m).unsqueeze(-1)
        p = above.exp()  # b h i j
        y = mass = None
        if request.v is not None:
            y = p @ repeat_kv(take(request.v, 2, block.cols), p.shape[1]).to(p.dtype)
        if request.keys is not None:
            mass = p @ take(request.keys, 0, block.cols).to(p.dtype)
        topk_scores, topk_indices = largest(s, block, request.topk) if request.topk else (None, None)
        return State(
            m=m,
            l=p.sum(-1),
            # exp(−inf)·(−inf) is nan; against the smallest number it is 0.
            t=(p * above.clamp(min=torch.finfo(s.dtype).min)).sum(-1) if request.wants("entropy") else None,
            y=y,
            mean_distance=(p * (block.i - block.j).abs()).sum(-1) if request.wants("mean_distance") else None,
            mass=mass,
            argmax=largest(s, block, 1)[1].squeeze(-1) if request.wants("argmax") else None,
            topk_scores=topk_scores,
            topk_indices=topk_indices,
        )

    @staticmethod
    def of_sink(logits: Tensor, request: Request, shape: tuple[int, ...]) -> State:
        """A sink as the state of one more key, without a value."""
        nothing = State.empty(shape, request, logits)
        m = logits.squeeze(-1).expand(shape)
        one = torch.where(m == -torch.inf, nothing.l, 1)  # a sink of −inf is no key at all
        return State(**{**vars(nothing), "m": m, "l": one})

    def merge(self, other: State) -> State:
        """The state of both sets of keys together."""
        m = torch.maximum(self.m, other.m)
        ours, theirs = _shift(self.m, m), _shift(other.m, m)  # ≤ 0
        a, b = ours.exp(), theirs.exp()

        def both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
            if x is None or y is None:
                return None
            return _rows(a, x) * x + _rows(b, y) * y

        t = None
        if self.t is not None and other.t is not None:
            # A lower maximum shifts every s − m by the same amount, once for each unit of l.
            t = a * (self.t + ours * self.l) + b * (other.t + theirs * other.l)
        argmax = None
        if self.argmax is not None and other.argmax is not None:
            tie = (self.m == other.m) & _before(self.argmax, other.argmax)
            argmax = torch.where((self.m > other.m) | tie, self.argmax, other.argmax)
        topk_scores, topk_indices = _merged_top(self, other)
        return State(
            m=m,
            l=a * self.l + b * other.l,
            t=t,
            y=both(self.y, other.y),
            mean_distance=both(self.mean_distance, other.mean_distance),
            mass=both(self.mass, other.mass),
            argmax=argmax,
            topk_scores=topk_scores,
            topk_indices=topk_indices,
        )

    def finish(self, request: Request, sink: Tensor | None = None) -> Results:
        """The requested results: sums divided by the row sums."""
        total = self if sink is None else self.merge(State.of_sink(sink.to(self.m.dtype), request, self.m.shape))
        l = total.l
        share = torch.where(l == 0, 0, 1 / l)  # a row with no key has weights 0, not 0/0
        norm = torch.stack([total.m, l], -1)
        results: dict[str, Tensor | None] = {
            "norm": norm,
            # A sink takes weight but is no key: the maximum is over keys.
            "max_score": self.m,
            "argmax": self.argmax,
            "topk_scores": self.topk_scores,
            "topk_indices": self.topk_indices,
            "y": None if total.y is None else total.y * share.unsqueeze(-1),
            "mean_distance": None if total.mean_distance is None else total.mean_distance * share,
            "mass": None if total.mass is None else total.mass * share,
        }
        if request.wants("lse"):
            results["lse"] = lse_of(norm)
        if total.t is not None:
            results["entropy"] = torch.where(l == 0, 0, l.log() - total.t * share).clamp(min=0)
        return {name: value for name in request.names if (value := results.get(name)) is not None}


def _pivot(m: Tensor) -> Tensor:
    """The number to subtract before exp; 0 for a row with no key, since −inf − −inf is nan."""
    return torch.where(m == -torch.inf, 0, m)


def _shift(old: Tensor, new: Tensor) -> Tensor:
    """old − new, for rescaling; 0 where there was no key, since 0 · −inf is nan."""
    return torch.where(old == -torch.inf, 0, old - new)


def _rows(factor: Tensor, x: Tensor) -> Tensor:
    return factor.unsqueeze(-1) if x.ndim > factor.ndim else factor


def _before(a: Tensor, b: Tensor) -> Tensor:
    """Index a comes before b, where −1 (no key) comes last."""
    return (a >= 0) & ((a < b) | (b < 0))


def largest(s: Tensor, block: MatrixBlock, n: int) -> tuple[Tensor, Tensor]:
    """The n largest scores of a block with their key indices, ties to the lower index; (−inf, −1) where fewer."""
    count = min(n, s.shape[-1])
    if s.dtype == torch.float32:
        # One integer that orders by score, then by lower column: `topk` says nothing about ties.
        bits = (s.detach() + 0.0).contiguous().view(torch.int32)  # + 0.0 makes −0.0 a 0.0
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
        code = (ordered << 32) | (2**31 - 1 - torch.arange(s.shape[-1], device=s.device))
        column = 2**31 - 1 - (code.topk(count, dim=-1).values & 0xFFFFFFFF)
        score = s.gather(-1, column)
    else:
        score, column = s.sort(dim=-1, descending=True, stable=True)
        score, column = score[..., :count], column[..., :count]
    index = block.j[0][column].masked_fill(score == -torch.inf, -1)
    pad = (0, n - count)
    return torch.nn.functional.pad(score, pad, value=-torch.inf), torch.nn.functional.pad(index, pad, value=-1)


def _merged_top(a: State, b: State) -> tuple[Tensor | None, Tensor | None]:
    if a.topk_scores is None or b.topk_scores is None or a.topk_indices is None or b.topk_indices is None:
        return None, None
    n = a.topk_scores.shape[-1]
    score, index = torch.cat([a.topk_scores, b.topk_scores], -1), torch.cat([a.topk_indices, b.topk_indices], -1)
    # Two stable sorts: by index, −1 (no key) last, then by score.
    by_index = torch.where(index < 0, torch.iinfo(index.dtype).max, index).argsort(dim=-1)
    score, index = score.gather(-1, by_index), index.gather(-1, by_index)
    by_score = score.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return score.gather(-1, by_score), index.gather(-1, by_score)
