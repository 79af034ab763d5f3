"""Attention for one word, step by step: `regard.walk(W, v, "cat")`.

The textbook's six steps as tensors: (1) query, keys and values, (2) how alike the query is to every key, (3) the scaled
scores, (4) the weights, (5) each value times its weight, (6) the sum. A mask stands between 3 and 4. They follow the
score's own formula, so that weights and sum are what `W.row(i)` and `W @ v` give. One row only: linear in the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.indexing import At
from ..core.problem import Factors
from ..core.pytree import tree_map
from ..core.scores.kinds import upcast
from ..core.shared import called_by_all_ranks
from ..core.weights import Weights
from .ranking import nan_note
from .token_text import resolve

__all__ = ["Walk", "walk"]


@dataclass(frozen=True, eq=False)
class Walk:
    """The six steps of attention for one word; `print` shows them. Axes: j keys, d size of q and k, e size of v.

    q, k and the steps up to the mask are None if only the weights are there (`Weights.from_dense`).
    """

    word: str
    position: int
    words: tuple[str, ...]  # of the keys
    formula: str  # of `product`
    scaling: str  # from `product` to `scaled`
    q: Tensor | None  # d: step 1, the word's query
    k: Tensor | None  # j d: step 1
    v: Tensor  # j e: step 1
    product: Tensor | None  # j: step 2, how alike the query and each key are
    scaled: Tensor | None  # j: step 3, the scores
    changes: tuple[tuple[str, Tensor], ...]  # j: the scores after every modifier, by its name
    masked: Tensor | None  # j: the mask, −inf where the word may not look
    weights: Tensor  # j: step 4, softmax
    sink: float  # the weight of the sink, which has no value
    weighted: Tensor  # j e: step 5, weight × value
    y: Tensor  # e: step 6, their sum

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every step."""
        names = ("q", "k", "v", "product", "scaled", "masked", "weights", "weighted", "y")
        return {name: tuple(x.shape) for name in names if (x := getattr(self, name)) is not None}

    @property
    def notes(self) -> list[str]:
        """Warnings to print: weights that are NaN."""
        return nan_note(int(bool(self.weights.isnan().any())), 1)

    def __str__(self) -> str:
        from .terminal_walk import draw_walk

        return draw_walk(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from .notebook import walk_html

        return walk_html(self)


@torch.no_grad()
@called_by_all_ranks
def walk(weights: Weights, v: Tensor | None = None, word: int | str | At = 0, *, head: int | None = None) -> Walk:
    """Attention for one word, step by step.

    Args:
        weights: The weights of one head, ``(i, j)``, or of several, ``(h, i, j)``, with `head`.
        v: The values ``(j, e)``, or ``(g, j, e)`` with `head`, where heads may share them. Default: the keys; the
            values of a recorded head must be passed.
        word: ``"cat"``, ``"the:1"`` for the first of several, or a position.
        head: Which head.

    Returns:
        `Walk`: every step as a tensor. Its weights are ``W.row(word)``, its `y` is that row of ``W @ v``.

    Example:
        >>> import regard
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> steps = walk(regard.weights(x, score="dot").label(["the", "cat", "sat"]), x, "cat")
        >>> steps.product
        tensor([0., 4., 2.])
        >>> torch.allclose(steps.y, regard.attend(x, score="dot")[1])
        True
    """
    if not isinstance(weights, Weights):
        raise TypeError(
            f"walk(W, v, word): W must be a Weights, of regard.weights or of a recording, got {type(weights).__name__}."
        )
    weights._need_entire("walk")
    weights, v = _one_head(weights.detach(), v, head)
    v = _values(weights, v)
    position = _position(weights, word)
    rows, cols = weights.tokens
    labels = tuple(cols) if cols else tuple(map(str, range(weights.shape[1])))
    steps = _steps(weights._factors.folded(), position)
    w = steps["weights"].unsqueeze(-1)
    weighted = torch.where(w == 0, 0, w * upcast(v))  # 0 · NaN is NaN, and masked values may be NaN
    y = weighted.sum(0).to(v.dtype)
    label = rows[position] if rows else str(position)
    return Walk(label, position, labels, v=v, weighted=weighted, y=y, **steps)


def _steps(factors: Factors, row: int) -> dict[str, Any]:
    """The steps up to the weights, by the score's own formula."""
    score = factors.score
    if (w := score.precomputed) is not None:
        missing = dict.fromkeys(("q", "k", "product", "scaled", "masked"))
        weights = upcast(w)[0, 0, row]
        return {"formula": "", "scaling": "", "changes": (), "sink": 0.0, "weights": weights, **missing}
    q, k = upcast(factors.q[:, :, row : row + 1]), upcast(factors.k)  # 1 1 1 d, 1 1 j d
    keys = k.shape[2]
    block = MatrixBlock(slice(row, row + 1), slice(0, keys), factors.offset or 0, k.device)
    visible = torch.ones(keys, dtype=torch.bool, device=k.device)
    if factors.mask is not None:
        visible = factors.mask.visible(block).expand(1, 1, 1, keys)[0, 0, 0]
    product, formula, scaled, scaling = score.formula_steps(q, k)
    s, changes = scaled, []
    for modifier in score.modifiers:
        s = tree_map(modifier, block.take).apply(s, block)
        changes.append((type(modifier).__name__.lower(), s[0, 0, 0]))
    masked = s[0, 0, 0].masked_fill(~visible, -torch.inf)
    weights, sink = _softmax(masked, score.sink_logits)
    return {
        "formula": formula,
        "scaling": scaling,
        "q": q[0, 0, 0],
        "k": k[0, 0],
        "product": product[0, 0, 0],
        "scaled": scaled[0, 0, 0],
        "changes": tuple(changes),
        "masked": masked,
        "weights": weights,
        "sink": sink,
    }


def _softmax(masked: Tensor, sink: Tensor | None) -> tuple[Tensor, float]:
    """Step 4: weights (j,), 0 in a row that sees nothing, and the share of a sink."""
    s = masked if sink is None else torch.cat([masked, sink.to(masked.dtype).flatten()[:1]])
    if bool((s == -torch.inf).all()):
        return torch.zeros_like(masked), 0.0
    w = s.softmax(-1)
    return (w, 0.0) if sink is None else (w[:-1], float(w[-1]))


# Arguments.


def _one_head(weights: Weights, v: Tensor | None, head: int | None) -> tuple[Weights, Tensor | None]:
    if weights.ndim == 2:
        if head not in (None, 0):
            raise IndexError(f"head must be 0, since W is one head, got {head}.")
        return weights, v
    heads = weights.shape[-3]
    if weights.ndim > 3:
        raise ValueError(
            f"walk takes one sequence, got W of shape {tuple(weights.shape)}: walk(W[0], v[0], word, head=0)."
        )
    if head is None:
        raise ValueError(f"W has {heads} heads: walk(W, v, word, head=0), or walk(W[0], v[0], word).")
    if not -heads <= head < heads:
        raise IndexError(f"head must be 0 to {heads - 1}, got {head}.")
    head %= heads
    if v is not None and v.ndim == 3:
        if v.shape[0] == 0 or heads % v.shape[0]:
            raise ValueError(f"heads of v must divide the {heads} of W, got {v.shape[0]}.")
        v = v[head * v.shape[0] // heads]
    return weights[head], v


def _values(weights: Weights, v: Tensor | None) -> Tensor:
    if v is None:
        if weights._factors.score.precomputed is not None:
            raise ValueError("these weights have no keys to use as values: pass the values, walk(W, v, word).")
        if not weights._keys_are_values:
            raise ValueError(
                "the values of a recorded head are other vectors than its keys: record(model, values=True), and pass "
                "seen.layer(n).values[0, h], those of the head: walk(seen[n, h], v, word)."
            )
        v = weights._factors.k.reshape(weights._factors.k.shape[-2:])
    if not isinstance(v, Tensor):
        raise TypeError(f"walk(W, v, word): v must be a tensor of values, got {type(v).__name__}.")
    if v.ndim != 2 or v.shape[0] != weights.shape[1]:
        raise ValueError(
            f"v must be (j, e) with a row for each of {weights.shape[1]} keys, got shape {tuple(v.shape)}. "
            "If v has several heads, take that of W: v[head]."
        )
    return v.detach()


def _position(weights: Weights, word: Any) -> int:
    if isinstance(word, At):
        word = f"{word.word}:{word.nth}"
    rows = weights.tokens[0]
    if rows is None:
        if isinstance(word, str) and not word.isdecimal():
            raise LookupError(f"{word!r}: these weights have no tokens. Label them first: W.label(tokens).")
        rows = tuple(map(str, range(weights.shape[0])))
    return resolve(rows, word)
