"""Attention for one word, step by step: `regard.walk(W, v, "cat")`.

The textbook's six steps as tensors: how alike the word's query is to every key, the scaled scores, what may be seen,
the weights, each value times its weight, and the sum. They follow the score's own formula, so that the last two are
what `W.row(i)` and `W @ v` give. One row only: linear in the length. Imports `matrix` and what is below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.indexing import At
from ..core.problem import Factors
from ..core.pytree import tree_map
from ..core.scores import Additive, Bilinear, Cosine, Dot, Gaussian, Precomputed, ScaledDot, Score, upcast
from ..core.weights import Weights
from .ranking import unknown_in
from .token_text import resolve

__all__ = ["Walk", "walk"]


@dataclass(frozen=True, eq=False)
class Walk:
    """The six steps of attention for one word; printing it shows them. Axes: j keys, d size of q and k, e size of v."""

    word: str
    position: int
    words: tuple[str, ...]  # of the keys
    formula: str  # how `product` is made
    scaling: str  # what was done to it to give `scaled`
    q: Tensor | None  # d: the word's query; None, as k and the steps up to the mask, where only weights were recorded
    k: Tensor | None  # j d
    v: Tensor  # j e
    product: Tensor | None  # j: step 1, how alike the query and each key are
    scaled: Tensor | None  # j: step 2, the scores
    changes: tuple[tuple[str, Tensor], ...]  # what further modifiers made of the scores, in their order
    masked: Tensor | None  # j: step 3, −inf where the word may not look
    weights: Tensor  # j: step 4, softmax
    sink: float  # the weight that a sink takes and gives to nobody
    weighted: Tensor  # j e: step 5, weight × value
    y: Tensor  # e: step 6, their sum

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every step."""
        names = ("q", "k", "v", "product", "scaled", "masked", "weights", "weighted", "y")
        return {name: tuple(x.shape) for name in names if (x := getattr(self, name)) is not None}

    @property
    def notes(self) -> list[str]:
        """What must be said besides."""
        return unknown_in(int(bool(self.weights.isnan().any())), 1)

    def __str__(self) -> str:
        from .terminal import draw_walk

        return draw_walk(self)

    def __repr__(self) -> str:
        return str(self)


@torch.no_grad()
def walk(weights: Weights, v: Tensor | None = None, word: int | str | At = 0, *, head: int | None = None) -> Walk:
    """Attention for one word, step by step.

    weights  those of one head, (i, j), or of several, (h, i, j), with `head`
    v        the values, (j, e); (g, j, e) with `head`, where heads may share them; None where values are the keys
    word     "cat", "the:1" for the first of several, or a position

    >>> import regard
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> steps = walk(regard.weights(x, score="dot").label(["the", "cat", "sat"]), x, "cat")
    >>> steps.product
    tensor([0., 4., 2.])
    >>> torch.allclose(steps.y, regard.attend(x, score="dot")[1])
    True
    """
    if not isinstance(weights, Weights):
        came = type(weights).__name__
        raise TypeError(f"walk(W, v, word): W is a Weights, of regard.weights or of a recording; {came} came.")
    weights, v = _one_head(weights.detach(), v, head)
    v = _values(weights, v)
    at = _position(weights, word)
    rows, cols = weights.tokens
    names = tuple(cols) if cols else tuple(map(str, range(weights.shape[1])))
    steps = _steps(weights._factors.folded(), at)
    w = steps["weights"].unsqueeze(-1)
    weighted = torch.where(w == 0, 0, w * upcast(v))  # 0 · nan is nan, and what is not looked at may be anything
    y = weighted.sum(0).to(v.dtype)
    return Walk(rows[at] if rows else str(at), at, names, v=v, weighted=weighted, y=y, **steps)


def _steps(factors: Factors, at: int) -> dict[str, Any]:
    """The steps up to the weights, by the score's own formula."""
    score = factors.score
    if isinstance(score, Precomputed):
        w = upcast(score.w)[0, 0, at]
        unknown = dict.fromkeys(("q", "k", "product", "scaled", "masked"))
        return {"formula": "", "scaling": "", "changes": (), "sink": 0.0, "weights": w, **unknown}
    q, k = upcast(factors.q[:, :, at : at + 1]), upcast(factors.k)  # 1 1 1 d, 1 1 j d
    keys = k.shape[2]
    block = MatrixBlock(slice(at, at + 1), slice(0, keys), factors.offset or 0, k.device)
    visible = torch.ones(keys, dtype=torch.bool, device=k.device)
    if factors.mask is not None:
        visible = factors.mask.visible(block).expand(1, 1, 1, keys)[0, 0, 0]
    product, formula = _product(score, q, k)
    s, scaling = _scaled(score, product, q.shape[-1])
    found = {"q": q, "product": product, "scaled": s}
    changes = []
    for step in score.modifiers:
        s = tree_map(step, block.take).apply(s, block)
        changes.append((type(step).__name__.lower(), s[0, 0, 0]))
    masked = s[0, 0, 0].masked_fill(~visible, -torch.inf)
    weights, sink = _softmax(masked, score.sink_logits)
    told = {"formula": formula, "scaling": scaling, "changes": tuple(changes), "sink": sink}
    one_row = {name: x[0, 0, 0] for name, x in found.items()}
    return {**told, **one_row, "k": k[0, 0], "masked": masked, "weights": weights}


def _product(score: Score, q: Tensor, k: Tensor) -> tuple[Tensor, str]:
    """Step 1: the similarity before any scale, (1, 1, 1, j), and its formula."""
    if isinstance(score, Dot | ScaledDot):
        return q @ k.mT, "q·k"
    if isinstance(score, Cosine):
        return Cosine().similarity(q, k), "cos(q, k)"
    if isinstance(score, Gaussian):
        return (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1), "|q − k|²"
    named = {Bilinear: "qᵀ W k", Additive: "vᵀ tanh(q A + k B)"}
    return score.similarity(q, k), named.get(type(score), "f(q, k)")


def _scaled(score: Score, product: Tensor, size: int) -> tuple[Tensor, str]:
    """Step 2: the score, (1, 1, 1, j), and what was done."""
    if isinstance(score, ScaledDot):
        usual = math.isclose(score.factor(size), size**-0.5, rel_tol=1e-6)  # models write 1/√d out
        return product * score.factor(size), f"÷ √{size}" if usual else f"× {score.scale:.4g}"
    if isinstance(score, Cosine):
        return product * score.scale, f"× {score.scale:.4g}"
    if isinstance(score, Gaussian):
        return -product / (2 * score.sigma**2), f"÷ −2·{score.sigma:.4g}²"
    return product, "unscaled"


def _softmax(masked: Tensor, sink: Tensor | None) -> tuple[Tensor, float]:
    """Step 4: weights (j,), 0 in a row that sees nothing, and the share of a sink."""
    s = masked if sink is None else torch.cat([masked, sink.to(masked.dtype).flatten()[:1]])
    if bool((s == -torch.inf).all()):
        return torch.zeros_like(masked), 0.0
    w = s.softmax(-1)
    return (w, 0.0) if sink is None else (w[:-1], float(w[-1]))


# What came in.


def _one_head(weights: Weights, v: Tensor | None, head: int | None) -> tuple[Weights, Tensor | None]:
    if weights.ndim == 2:
        if head not in (None, 0):
            raise IndexError(f"head {head} was asked for and these weights are one head.")
        return weights, v
    heads = weights.shape[-3]
    if weights.ndim > 3:
        raise ValueError(
            f"walk goes through one sequence; W is {tuple(weights.shape)}: walk(W[0], v[0], word, head=0)."
        )
    if head is None:
        raise ValueError(f"W has {heads} heads: walk(W, v, word, head=0), or walk(W[0], v[0], word).")
    if not -heads <= head < heads:
        raise IndexError(f"head {head} was asked for and there are {heads}: 0 to {heads - 1}.")
    head %= heads
    if v is not None and v.ndim == 3:
        if v.shape[0] == 0 or heads % v.shape[0]:
            raise ValueError(f"v has {v.shape[0]} heads and W has {heads}; heads of v must divide those of W.")
        v = v[head * v.shape[0] // heads]
    return weights[head], v


def _values(weights: Weights, v: Tensor | None) -> Tensor:
    if v is None:
        if isinstance(weights._factors.score, Precomputed):
            raise ValueError("these weights were given ready-made, without keys: pass the values, walk(W, v, word).")
        v = weights._factors.k.reshape(weights._factors.k.shape[-2:])
    if not isinstance(v, Tensor):
        raise TypeError(f"walk(W, v, word): v is a tensor of values; {type(v).__name__} came.")
    if v.ndim != 2 or v.shape[0] != weights.shape[1]:
        raise ValueError(
            f"v must be (j, e) with one row a key, {weights.shape[1]} here; shape {tuple(v.shape)} came. "
            "Of several heads take the one that W is of: v[head]."
        )
    return v.detach()


def _position(weights: Weights, word: Any) -> int:
    if isinstance(word, At):
        word = f"{word.word}:{word.nth}"
    rows = weights.tokens[0]
    if rows is None:
        if isinstance(word, str) and not word.isdecimal():
            raise LookupError(f"{word!r}: these weights have no words. Give them first: W.label(tokens).")
        rows = tuple(map(str, range(weights.shape[0])))
    return resolve(rows, word)
