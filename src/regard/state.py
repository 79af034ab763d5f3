"""Partial attention and its merge: the one idea that the code is built on.

What attention over a set of keys has found out is a `State`. The state of two disjoint sets of keys is the
merge of their states; merging is associative and commutative, and the state of no keys changes nothing. So
blocks of keys, tiles of a kernel, steps of a cache and a sink are all the same thing: a state to merge in.
Imports `block`, `factors` and `statistics`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .block import Block, take
from .factors import per_query_head
from .statistics import Answers, Question, lse_of

__all__ = ["State"]


@dataclass(frozen=True, eq=False)
class State:
    """Attention over some keys, rows not yet divided by their sum. What nobody asked for is None."""

    m: Tensor  # b h i : row maximum of s
    l: Tensor  # b h i : Σ exp(s − m)
    t: Tensor | None = None  # b h i : Σ exp(s − m) (s − m), for the entropy
    y: Tensor | None = None  # b h i e : Σ exp(s − m) v
    reach: Tensor | None = None  # b h i : Σ exp(s − m) |distance|
    mass: Tensor | None = None  # b h i : Σ exp(s − m) over chosen keys
    argmax: Tensor | None = None  # b h i
    top_score: Tensor | None = None  # b h i n
    top_index: Tensor | None = None  # b h i n

    @staticmethod
    def empty(shape: tuple[int, ...], question: Question, like: Tensor) -> State:
        """The state of no keys: the identity of `merge`. shape is (b, h, i)."""
        zero = like.new_zeros(shape)
        none_yet = torch.full(shape, -1, dtype=torch.int64, device=like.device)
        top = (*shape, question.top)
        return State(
            m=zero - torch.inf,
            l=zero,
            t=zero if question.wants("entropy") else None,
            y=like.new_zeros(*shape, question.v.shape[-1]) if question.v is not None else None,
            reach=zero if question.wants("reach") else None,
            mass=zero if question.wants("mass") else None,
            argmax=none_yet if question.wants("argmax") else None,
            top_score=like.new_full(top, -torch.inf) if question.top else None,
            top_index=none_yet.unsqueeze(-1).expand(top) if question.top else None,
        )

    @staticmethod
    def of_block(s: Tensor, block: Block, question: Question) -> State:
        """The state of one block of scores (b, h, i, j), −inf where nothing may be seen."""
        if s.shape[-1] == 0:
            return State.empty(s.shape[:-1], question, s)
        m = s.amax(-1)
        above = s - _pivot(m).unsqueeze(-1)
        p = above.exp()  # b h i j
        y = mass = None
        if question.v is not None:
            y = p @ per_query_head(take(question.v, 2, block.cols), p.shape[1]).to(p.dtype)
        if question.keys is not None:
            mass = p @ take(question.keys, 0, block.cols).to(p.dtype)
        top_score, top_index = largest(s, block, question.top) if question.top else (None, None)
        return State(
            m=m,
            l=p.sum(-1),
            # exp(−inf)·(−inf) is nan; against the smallest number it is 0.
            t=(p * above.clamp(min=torch.finfo(s.dtype).min)).sum(-1) if question.wants("entropy") else None,
            y=y,
            reach=(p * (block.i - block.j).abs()).sum(-1) if question.wants("reach") else None,
            mass=mass,
            argmax=largest(s, block, 1)[1].squeeze(-1) if question.wants("argmax") else None,
            top_score=top_score,
            top_index=top_index,
        )

    @staticmethod
    def of_sink(logits: Tensor, question: Question, shape: tuple[int, ...]) -> State:
        """A sink as the state of one more key, which gives nothing."""
        nothing = State.empty(shape, question, logits)
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
        return State(
            m, a * self.l + b * other.l, t,
            both(self.y, other.y), both(self.reach, other.reach), both(self.mass, other.mass),
            argmax, *_merged_top(self, other),
        )  # fmt: skip

    def finish(self, question: Question, sink: Tensor | None = None) -> Answers:
        """Divide by the row sums and name the answers."""
        whole = self if sink is None else self.merge(State.of_sink(sink.to(self.m.dtype), question, self.m.shape))
        l = whole.l
        share = torch.where(l == 0, 0, 1 / l)  # a row with no key has weights 0, not 0/0
        norm = torch.stack([whole.m, l], -1)
        found: dict[str, Tensor | None] = {
            "norm": norm,
            # A sink takes weight but is no key: the maximum is that of the keys.
            "max_score": self.m,
            "argmax": self.argmax,
            "top_score": self.top_score,
            "top_index": self.top_index,
            "y": None if whole.y is None else whole.y * share.unsqueeze(-1),
            "reach": None if whole.reach is None else whole.reach * share,
            "mass": None if whole.mass is None else whole.mass * share,
        }
        if question.wants("lse"):
            found["lse"] = lse_of(norm)
        if whole.t is not None:
            found["entropy"] = torch.where(l == 0, 0, l.log() - whole.t * share).clamp(min=0)
        return {name: value for name in question.names if (value := found.get(name)) is not None}


def _pivot(m: Tensor) -> Tensor:
    """What to subtract before exp; 0 for a row with no key, since −inf − −inf is nan."""
    return torch.where(m == -torch.inf, 0, m)


def _shift(old: Tensor, new: Tensor) -> Tensor:
    """old − new, for rescaling; 0 where there was nothing, since 0 · −inf is nan."""
    return torch.where(old == -torch.inf, 0, old - new)


def _rows(factor: Tensor, x: Tensor) -> Tensor:
    return factor.unsqueeze(-1) if x.ndim > factor.ndim else factor


def _before(a: Tensor, b: Tensor) -> Tensor:
    """Index a comes before b, where −1 (no key) comes last."""
    return (a >= 0) & ((a < b) | (b < 0))


def largest(s: Tensor, block: Block, n: int) -> tuple[Tensor, Tensor]:
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
    if a.top_score is None or b.top_score is None or a.top_index is None or b.top_index is None:
        return None, None
    n = a.top_score.shape[-1]
    score, index = torch.cat([a.top_score, b.top_score], -1), torch.cat([a.top_index, b.top_index], -1)
    # Two stable sorts: by index, −1 (no key) last, then by score.
    by_index = torch.where(index < 0, torch.iinfo(index.dtype).max, index).argsort(dim=-1)
    score, index = score.gather(-1, by_index), index.gather(-1, by_index)
    by_score = score.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return score.gather(-1, by_score), index.gather(-1, by_score)
