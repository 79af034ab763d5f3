"""A head's pattern in a word: previous token, first token, itself, induction, a fixed offset, near, even, or mixed.

>>> import regard.patterns
>>> W = regard.weights(8 * torch.eye(12), mask=regard.causal(), score="dot")
>>> regard.patterns.classify(W).names
(('itself',),)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .core.arguments import as_number
from .core.indexing import as_int
from .core.pytree import replace_fields
from .core.rows.complete_rows import induction_targets
from .core.scores.kinds import Dot
from .core.shared import Shareable, called_by_all_ranks
from .core.weights import Weights, need_weights

__all__ = ["HeadPatterns", "classify"]

#: Distances of keys before a row that are patterns of their own, and the last that counts as near.
OFFSETS, NEAR = tuple(range(2, 9)), 4


@dataclass(frozen=True)
class HeadPatterns:
    """The patterns of heads and how strong they are; made by `classify`.

    Args:
        names: The pattern of every head, layer by layer.
        kinds: What was looked for, in the order of the last axis of `shares`.
        shares: ``(layers, heads, kinds)``: the mean weight of a row on the key that a kind names; for ``"near"`` on
            all keys at most 4 positions away, for ``"even"`` the entropy as a share of the largest possible one.

    >>> W = regard.weights(torch.zeros(2, 40, 4), mask=regard.causal())
    >>> patterns = regard.patterns.classify(W)
    >>> patterns.names, patterns.shares.shape
    ((('even', 'even'),), torch.Size([1, 2, 13]))
    """

    names: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    shares: Tensor

    def share(self, layer: int, head: int) -> float:
        """How strong the pattern of a head is, 0 to 1; of a mixed head, its strongest.

        Args:
            layer: Number of the layer.
            head: Number of the head.

        Returns:
            The share of the pattern that the head is named after.

        >>> W = regard.weights(torch.zeros(1, 40, 4), mask=regard.causal())
        >>> round(regard.patterns.classify(W).share(0, 0), 3)
        1.0
        """
        for what, number, count in (("layer", layer, self.shares.shape[0]), ("head", head, self.shares.shape[1])):
            if (at := as_int(number)) is None or not -count <= at < count:
                raise IndexError(f"share({what}=) takes one of {count} {what}s, counted from 0; got {number!r}.")
        name, shares = self.names[layer][head], self.shares[layer, head]
        return float(shares[self.kinds.index(name)] if name in self.kinds else shares.max())


@called_by_all_ranks
def classify(
    weights: Weights | Sequence[Weights], tokens: Tensor | Sequence[int | str] | None = None, threshold: float = 0.4
) -> HeadPatterns:
    """Name what every head does with most of its weight.

    The strongest of the patterns with one key a row wins, if it holds at least `threshold` of the weight: ``"itself"``,
    ``"previous"``, ``"next"``, ``"first"``, ``"offset 2"`` to ``"offset 8"`` and, with tokens, ``"induction"`` (the key
    after the last earlier occurrence of the row's token). Else a head whose entropy is at least 90 % of the largest
    possible is ``"even"``, one with 60 % of its weight at most 4 positions away is ``"near"``; the rest is
    ``"mixed"``. Rows that see one key alone do not count. One pass over complete rows, in linear memory.

    Args:
        weights: Self-attention of one layer, or of several in order, ``(..., h, i, j)``; batch axes are averaged.
        tokens: Token of each key position, ids or strings, for induction heads.
        threshold: The weight that a pattern must hold to be the head's name.

    Returns:
        `HeadPatterns`; `regard.look.draw_patterns` draws them.

    >>> x = torch.eye(30)
    >>> previous = regard.weights(9 * x.roll(1, 0), 9 * x, score="dot", mask=regard.causal())  # row i asks for i - 1
    >>> regard.patterns.classify(previous).names
    (('previous',),)
    """
    if (number := as_number(threshold)) is None or not 0 < number <= 1:
        raise ValueError(f"classify(threshold=) needs a number between 0 and 1; got {threshold!r}.")
    layers = [weights] if isinstance(weights, Shareable) or not isinstance(weights, Iterable) else list(weights)
    for layer in layers:
        need_weights(layer, "classify(weights)")
    if not layers:
        raise ValueError("classify(weights) needs at least one layer; got none.")
    kinds: tuple[str, ...] = ()
    shares = []
    for layer in layers:
        kinds, of_layer = _shares(layer, tokens)
        shares.append(of_layer)
    if len({len(of_layer) for of_layer in shares}) > 1:
        counts = [len(of_layer) for of_layer in shares]
        raise ValueError(
            f"classify(weights): all layers must have as many heads; got {counts}. Classify them one by one."
        )
    names = tuple(tuple(_name(kinds, head, float(number)) for head in layer) for layer in shares)
    return HeadPatterns(names, kinds, torch.stack(shares))


def _shares(weights: Weights, tokens: Tensor | Sequence[int | str] | None) -> tuple[tuple[str, ...], Tensor]:
    """Kinds of patterns, and the share of each in every head: (h, kinds)."""
    at, j = weights._positions("classify"), weights.shape[-1]
    near = [offset for offset in range(-NEAR, NEAR + 1) if offset not in (0, 1, -1, *OFFSETS)]
    columns = {"itself": at, "previous": at - 1, "next": at + 1, "first": torch.zeros_like(at)}
    columns |= {f"offset {n}": at - n for n in OFFSETS}
    if tokens is not None:
        columns["induction"] = induction_targets(tokens, at)
    kinds = tuple(columns)
    targets = torch.stack([*columns.values(), *(at - offset for offset in near)], -1)  # i n
    targets = torch.where((targets >= 0) & (targets < j), targets, -1)
    with torch.no_grad():
        mass = weights.gather(targets)  # ... h i n
        entropy, most = weights.entropy(), _largest_entropy(weights)
    rows = most > 0.5  # log 2 is 0.69: at least two keys
    there = rows.unsqueeze(-1) & (targets >= 0)
    close = [n for n, kind in enumerate(kinds) if kind in ("itself", "previous", "next") or kind in _near_names()]
    close += range(len(kinds), targets.shape[-1])
    parts = [
        _mean(weights, mass[..., : len(kinds)], there[..., : len(kinds)]),
        _mean(weights, mass[..., close].sum(-1, keepdim=True), rows.unsqueeze(-1)),
        _mean(weights, (entropy / most.clamp(min=0.5)).unsqueeze(-1), rows.unsqueeze(-1)),
    ]
    shares = torch.cat(parts, -1)  # ... h kinds
    shares = shares if not weights._one_head else shares.unsqueeze(-2)
    return (*kinds, "near", "even"), shares.flatten(0, -3).mean(0) if shares.ndim > 2 else shares


def _near_names() -> tuple[str, ...]:
    return tuple(f"offset {n}" for n in OFFSETS if n <= NEAR)


def _largest_entropy(weights: Weights) -> Tensor:
    """log of the number of keys that every row sees: the lse of scores that are 0."""
    factors = weights._factors
    zeros = replace_fields(factors, q=factors.q[..., :1] * 0, k=factors.k[..., :1] * 0, score=Dot())
    return weights._with(zeros).lse()


def _mean(weights: Weights, x: Tensor, counts: Tensor) -> Tensor:
    """The mean over rows that count, (..., i, n) to (..., n)."""
    counts = counts.expand(x.shape)
    total, rows = torch.where(counts, x, 0).sum(-2), counts.sum(-2)
    return weights._over_ranks(total, "classify") / weights._over_ranks(rows, "classify").clamp(min=1)


def _name(kinds: tuple[str, ...], shares: Tensor, threshold: float) -> str:
    exact, near, even = shares[:-2], float(shares[-2]), float(shares[-1])
    if float(exact.max()) >= threshold:
        return kinds[int(exact.argmax())]
    return "even" if even >= 0.9 else "near" if near >= 0.6 else "mixed"
