"""The judge: attention written out t × t in float64, by formulas that share no code with the library.

`SCORES` and `MASKS` are every score and mask a test may draw, each beside its formula in plain PyTorch.
`Truth` is the matrix they make, and what can be asked of it. All of it differentiates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import regard
from regard import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot, Similarity


class Sizes(NamedTuple):
    """b sequences, h heads of queries on g of keys, i queries, j keys, sizes d of q, c of k, e of v."""

    b: int = 2
    h: int = 6
    g: int = 3
    i: int = 7
    j: int = 11
    d: int = 5
    c: int = 5
    e: int = 13

    @property
    def q(self) -> tuple[int, ...]:
        return self.b, self.h, self.i, self.d

    @property
    def k(self) -> tuple[int, ...]:
        return self.b, self.g, self.j, self.c

    @property
    def v(self) -> tuple[int, ...]:
        return self.b, self.g, self.j, self.e

    @property
    def u(self) -> tuple[int, ...]:
        return self.b, self.h, self.i, self.e


def draw(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False, times: float = 1.0) -> Tensor:
    """Normal numbers, exactly representable in `dtype`."""
    return (torch.randn(shape, dtype=torch.float64) * times).to(dtype).requires_grad_(grad)


def per_query_head(x: Tensor, h: int) -> Tensor:
    """Query head n looks at key head n // (h / g)."""
    return torch.stack([x[:, n * x.shape[1] // h] for n in range(h)], 1)


# Scores: how one is made, and its formula for q (b, h, i, d), k (b, h, j, c) and positions i (i, 1), j (1, j).


@dataclass(frozen=True)
class ScoreCase:
    name: str
    make: Callable[..., Any]
    formula: Callable[..., Tensor]
    shapes: Callable[[Sizes], tuple[tuple[int, ...], ...]] = lambda n: ()
    sizes_differ: bool = False
    sink: bool = False  # the last parameter is a sink's logits, one a head

    def sizes(self, **changes: int) -> Sizes:
        n = Sizes(**changes)
        return n._replace(c=n.d + 2) if self.sizes_differ else n._replace(c=n.d)

    def parameters(self, n: Sizes, dtype: torch.dtype = torch.float64, grad: bool = False) -> list[Tensor]:
        return [draw(*shape, dtype=dtype, grad=grad) for shape in self.shapes(n)]


class Sharpness(nn.Module):
    """A similarity with parameters of its own: Σ_d sharpness_d · q_d · k_d + offset."""

    def __init__(self, sharpness: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.sharpness, self.offset = nn.Parameter(sharpness.detach()), nn.Parameter(offset.detach())

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.sharpness.to(q.dtype)) @ k.mT + self.offset.to(q.dtype)


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def _scaled(q: Tensor, k: Tensor) -> Tensor:
    return _dot(q, k) / math.sqrt(q.shape[-1])


def _heads(x: Tensor) -> Tensor:
    """(h,) over the cells (b, h, i, j)."""
    return x[:, None, None]


SCORES = [
    ScoreCase("dot", Dot, lambda q, k, i, j: _dot(q, k)),
    ScoreCase("scaled_dot", ScaledDot, lambda q, k, i, j: _scaled(q, k)),
    ScoreCase("scaled_dot(0.3)", lambda: ScaledDot(0.3), lambda q, k, i, j: 0.3 * _dot(q, k)),
    ScoreCase(
        "cosine", lambda: Cosine(2.5),
        lambda q, k, i, j: 2.5 * _dot(q, k) / (_dot(q, q).diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1) * _dot(k, k).diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-2)),
    ),
    ScoreCase("gaussian", lambda: Gaussian(1.7), lambda q, k, i, j: -((q.unsqueeze(-2) - k.unsqueeze(-3)) ** 2).sum(-1) / (2 * 1.7**2)),
    ScoreCase("bilinear", Bilinear, lambda q, k, i, j, W: torch.einsum("bhid,dc,bhjc->bhij", q, W, k), lambda n: ((n.d, n.c),), sizes_differ=True),
    ScoreCase("bilinear a head", Bilinear, lambda q, k, i, j, W: torch.einsum("bhid,hdc,bhjc->bhij", q, W, k), lambda n: ((n.h, n.d, n.c),), sizes_differ=True),
    ScoreCase(
        "additive", Additive,
        lambda q, k, i, j, A, B, v: torch.tanh((q @ A).unsqueeze(-2) + (k @ B).unsqueeze(-3)).mul(v).sum(-1),
        lambda n: ((n.d, 3), (n.c, 3), (3,)), sizes_differ=True,
    ),
    ScoreCase(
        "additive a head", Additive,
        lambda q, k, i, j, A, B, v: torch.tanh((q @ A).unsqueeze(-2) + (k @ B).unsqueeze(-3)).mul(v[:, None, None]).sum(-1),
        lambda n: ((n.h, n.d, 3), (n.h, n.c, 3), (n.h, 3)), sizes_differ=True,
    ),
    ScoreCase(
        "function", lambda p: Similarity(lambda q, k, p: p * torch.tanh(q @ k.mT), (p,)),
        lambda q, k, i, j, p: p * torch.tanh(_dot(q, k)), lambda n: ((),),
    ),
    ScoreCase("bias", lambda b: Dot().bias(b), lambda q, k, i, j, b: _dot(q, k) + b, lambda n: ((n.b, n.h, n.i, n.j),)),
    ScoreCase("bias a key", lambda b: Dot().bias(b), lambda q, k, i, j, b: _dot(q, k) + b, lambda n: ((n.b, 1, 1, n.j),)),
    ScoreCase("alibi", lambda m: ScaledDot().alibi(m), lambda q, k, i, j, m: _scaled(q, k) - _heads(m) * (i - j).abs(), lambda n: ((n.h,),)),
    ScoreCase("softcap", lambda: Dot().softcap(1.5), lambda q, k, i, j: 1.5 * torch.tanh(_dot(q, k) / 1.5)),
    ScoreCase(
        "bias then softcap", lambda b: Dot().bias(b).softcap(2.0),
        lambda q, k, i, j, b: 2 * torch.tanh((_dot(q, k) + b) / 2), lambda n: ((n.h, n.i, n.j),),
    ),
    ScoreCase(
        "softcap then bias", lambda b: Dot().softcap(2.0).bias(b),
        lambda q, k, i, j, b: 2 * torch.tanh(_dot(q, k) / 2) + b, lambda n: ((n.i, n.j),),
    ),
    ScoreCase(
        "modify", lambda p: ScaledDot().modify(lambda s, i, j, p: s * p + 0.1 * (i - 2 * j), p),
        lambda q, k, i, j, p: _scaled(q, k) * p + 0.1 * (i - 2 * j), lambda n: ((),),
    ),
    ScoreCase("sink", lambda z: ScaledDot().sink(z), lambda q, k, i, j, z: _scaled(q, k), lambda n: ((n.h,),), sink=True),
    ScoreCase(
        "all modifiers and a sink",
        lambda b, m, p, z: Gaussian(2.0).bias(b).softcap(3.0).alibi(m).modify(lambda s, i, j, p: s + p * torch.cos((j - i).to(s.dtype)), p).sink(z),
        lambda q, k, i, j, b, m, p, z: (
            3 * torch.tanh((-((q.unsqueeze(-2) - k.unsqueeze(-3)) ** 2).sum(-1) / 8 + b) / 3) - _heads(m) * (i - j).abs() + p * torch.cos((j - i).to(p.dtype))
        ),
        lambda n: ((n.b, 1, n.i, 1), (n.h,), (), (n.h,)), sink=True,
    ),
]  # fmt: skip


# Masks: how one is made, and who sees whom, for positions i (i, 1) and j (1, j) of n's sizes.


@dataclass(frozen=True)
class MaskCase:
    name: str
    make: Callable[[Sizes], Any]
    visible: Callable[[Sizes, Tensor, Tensor], Tensor]


def lengths_of(n: Sizes) -> list[int]:
    """From all keys down to none, one a sequence."""
    return [n.j * (n.b - 1 - s) // max(n.b - 1, 1) if s else max(n.j - 2, 0) for s in range(n.b)]


def documents_of(n: Sizes, shuffled: bool = False) -> Tensor:
    ids = torch.stack([(torch.arange(n.j) + s) * 3 // max(n.j, 1) for s in range(n.b)])
    return ids[:, torch.randperm(n.j, generator=torch.Generator().manual_seed(5))] if shuffled else ids


def _same_document(ids: Tensor, i: Tensor, j: Tensor) -> Tensor:
    inside = (i >= 0) & (i < ids.shape[1])
    return ((ids[:, i.clamp(0, ids.shape[1] - 1)] == ids[:, None, :]) & inside).unsqueeze(1)


def _chance(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.6


def _shorter(n: Sizes, j: Tensor) -> Tensor:
    return j < torch.tensor(lengths_of(n))[:, None, None, None]


MASKS = [
    MaskCase("none", lambda n: None, lambda n, i, j: torch.ones_like(j >= i)),
    MaskCase("causal", lambda n: regard.causal(), lambda n, i, j: j <= i),
    MaskCase("window", lambda n: regard.window(2, 1), lambda n, i, j: (j - i <= 1) & (i - j <= 2)),
    MaskCase("padding", lambda n: regard.padding(lengths_of(n)), lambda n, i, j: _shorter(n, j)),
    MaskCase("documents", lambda n: regard.documents(documents_of(n)), lambda n, i, j: _same_document(documents_of(n), i, j)),
    MaskCase(
        "documents out of order", lambda n: regard.documents(documents_of(n, shuffled=True)),
        lambda n, i, j: _same_document(documents_of(n, shuffled=True), i, j),
    ),
    MaskCase("a tensor", lambda n: _chance(n.b, n.h, n.i, n.j), lambda n, i, j: _chance(n.b, n.h, n.i, n.j)),
    MaskCase("a tensor of rows and columns", lambda n: _chance(n.i, n.j), lambda n, i, j: _chance(n.i, n.j)),
    MaskCase("a function", lambda n: lambda i, j: (i * 3 + j) % 4 != 1, lambda n, i, j: (i * 3 + j) % 4 != 1),
    MaskCase("causal and padding", lambda n: regard.causal() & regard.padding(lengths_of(n)), lambda n, i, j: (j <= i) & _shorter(n, j)),
    MaskCase("window or first keys", lambda n: regard.window(1, 0) | regard.padding([min(2, n.j)]), lambda n, i, j: ((j <= i) & (i - j <= 1)) | (j < 2)),
    MaskCase("not a window", lambda n: ~regard.window(1, 1), lambda n, i, j: (i - j).abs() > 1),
    MaskCase(
        "causal in documents without a window", lambda n: regard.causal() & regard.documents(documents_of(n)) & ~regard.window(1, 0),
        lambda n, i, j: (j <= i) & _same_document(documents_of(n), i, j) & ~((j <= i) & (i - j <= 1)),
    ),
    MaskCase(
        "a function or a window", lambda n: (lambda i, j: j % 3 == 0) | regard.window(0, 2),
        lambda n, i, j: (j % 3 == 0) | ((j >= i) & (j - i <= 2)),
    ),
]  # fmt: skip


def named(cases: list[Any], name: str) -> Any:
    return next(case for case in cases if case.name == name)


# The matrix and what can be asked of it.


class Truth:
    """softmax of scores (b, h, i, j) in float64, whole rows at once; `sink` (h,) are logits of one more key."""

    def __init__(self, s: Tensor, visible: Tensor, sink: Tensor | None = None, offset: int = 0) -> None:
        self.offset = offset
        self.visible = visible.expand(s.shape)
        self.s = s.masked_fill(~self.visible, -torch.inf)
        every = self.s if sink is None else torch.cat([self.s, _heads(sink).expand(*s.shape[:-1], 1)], -1)
        m = every.detach().amax(-1, keepdim=True) if every.shape[-1] else every.new_zeros(*s.shape[:-1], 1)
        m = torch.where(m == -torch.inf, 0, m)
        p = (every - m).exp()
        l = p.sum(-1, keepdim=True)
        there = l > 0
        w = p / torch.where(there, l, 1)
        self.lse = torch.where(there, m + torch.where(there, l, 1).log(), -torch.inf).squeeze(-1)
        self.w, self.sink_share = (w, None) if sink is None else (w[..., :-1], w[..., -1])

    @staticmethod
    def of(
        case: ScoreCase,
        mask: MaskCase,
        n: Sizes,
        q: Tensor,
        k: Tensor,
        parameters: list[Tensor],
        offset: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Truth:
        """The matrix of a score and a mask; in another `dtype` it is what plain PyTorch makes of it."""
        i, j = torch.arange(n.i)[:, None] + offset, torch.arange(n.j)[None, :]
        q, k, *parameters = (x.to(dtype) for x in (q, k, *parameters))
        s = case.formula(q, per_query_head(k, n.h), i, j, *parameters)
        return Truth(s, mask.visible(n, i, j), parameters[-1] if case.sink else None, offset)

    def y(self, v: Tensor) -> Tensor:
        return self.w @ per_query_head(v.to(self.w.dtype), self.w.shape[1])

    def z(self, u: Tensor) -> Tensor:
        return self.w.mT @ u.to(self.w.dtype)

    def entropy(self) -> Tensor:
        shares = self.w if self.sink_share is None else torch.cat([self.w, self.sink_share.unsqueeze(-1)], -1)
        return -(shares * torch.where(shares > 0, shares, 1).log()).sum(-1)

    def received(self) -> Tensor:
        return self.w.sum(-2)

    def mean_distance(self) -> Tensor:
        return (self.w * self.distance()).sum(-1)

    def distance(self) -> Tensor:
        i, j = self.w.shape[-2:]
        return (torch.arange(i)[:, None] + self.offset - torch.arange(j)).abs()

    def mass(self, keys: list[int]) -> Tensor:
        return sum((self.w[..., n] for n in keys), torch.zeros_like(self.lse))

    def pool(self, rows: int, cols: int, i: slice = slice(None), j: slice = slice(None)) -> Tensor:
        part = self.w[..., i, j]
        tall, wide = part.shape[-2:]
        return torch.stack([
            torch.stack([
                part[..., r * tall // rows : (r + 1) * tall // rows, c * wide // cols : (c + 1) * wide // cols].sum((-2, -1))
                for c in range(cols)
            ], -1)
            for r in range(rows)
        ], -2)  # fmt: skip

    def top(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, scores and keys of the n largest scores, the lower key first among equals; (0, −inf, −1) beyond."""
        keys = self.s.shape[-1]
        order = (-self.s.detach()).argsort(dim=-1, stable=True)[..., :n]
        w, s = self.w.gather(-1, order), self.s.gather(-1, order)
        index = order.masked_fill(s == -torch.inf, -1)
        pad = (0, max(n - keys, 0))
        full = nn.functional.pad
        return full(w, pad), full(s, pad, value=-torch.inf), full(index, pad, value=-1)

    def answers(
        self, v: Tensor, u: Tensor, tiles: tuple[int, int] = (3, 4), top: int = 3, keys: tuple[int, ...] = (0, 2)
    ) -> dict[str, Tensor]:
        """Everything at once, under the names that `asked` gives."""
        w, _s, index = self.top(top)
        peak_w, peak_s, peak_index = (x.squeeze(-1) for x in self.top(1))
        return {
            "y": self.y(v), "z": self.z(u), "lse": self.lse, "entropy": self.entropy(), "received": self.received(),
            "mean_distance": self.mean_distance(), "mass": self.mass([n for n in keys if n < self.s.shape[-1]]), "pool": self.pool(*tiles),
            "top": w, "top index": index, "peak": peak_w, "peak index": peak_index, "max_score": peak_s, "dense": self.w,
        }  # fmt: skip


def library_answers(
    W: regard.Weights,
    v: Tensor,
    u: Tensor,
    tiles: tuple[int, int] = (3, 4),
    top: int = 3,
    keys: tuple[int, ...] = (0, 2),
) -> dict[str, Tensor]:
    """The library's answers, each asked for alone."""
    peak, most = W.peak(), W.topk(top)
    return {
        "y": W @ v, "z": W.mT @ u, "lse": W.lse(), "entropy": W.entropy(), "received": W.received(), "mean_distance": W.mean_distance(),
        "mass": W.mass([n for n in keys if n < W.shape[-1]]), "pool": W.pool(*tiles), "top": most.values, "top index": most.indices,
        "peak": peak.values, "peak index": peak.indices, "max_score": W.max_score(), "dense": W.dense(),
    }  # fmt: skip


def library_answers_at_once(
    W: regard.Weights, v: Tensor, tiles: tuple[int, int] = (3, 4), top: int = 3, keys: tuple[int, ...] = (0, 2)
) -> dict[str, Tensor]:
    """The library's answers from one `see`."""
    seen = W.see(
        "lse",
        "max_score",
        "peak",
        "entropy",
        "received",
        "mean_distance",
        topk=top,
        pool=tiles,
        mass=[n for n in keys if n < W.shape[-1]],
        values=v,
    )
    return {
        "y": seen.y, "lse": seen.lse, "entropy": seen.entropy, "received": seen.received, "mean_distance": seen.mean_distance, "mass": seen.mass,
        "pool": seen.pool, "top": seen.topk.values, "top index": seen.topk.indices, "peak": seen.peak.values, "peak index": seen.peak.indices,
        "max_score": seen.max_score,
    }  # fmt: skip


#: Outputs that differentiate.
SMOOTH = ("y", "z", "lse", "entropy", "received", "mean_distance", "mass", "pool", "top", "peak", "max_score", "dense")
