"""Questions to all heads of all layers: which one ties two words, which is sharpest, what flows where.

Answers are a `Table`: rows one can loop over, print, and turn into NumPy or pandas. Imports `part`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.weights import Weights
from .slicing import cells

__all__ = ["BY", "Table", "find", "heads", "overview", "rollout"]


class Table(list[tuple[Any, ...]]):
    """Rows with named columns: a list, and a readable one."""

    def __init__(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        super().__init__(rows)
        self.columns = tuple(columns)

    def numpy(self) -> Any:
        """The rows as a NumPy record array."""
        import numpy as np

        kinds = (
            [(c, object if isinstance(v, str) else type(v)) for c, v in zip(self.columns, self[0], strict=True)]
            if self
            else []
        )
        return np.array(list(self), dtype=kinds)

    def pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(list(self), columns=list(self.columns))

    def __repr__(self) -> str:
        shown = [[_cell(v) for v in row] for row in self[:20]]
        widths = [max(map(len, column)) for column in zip(self.columns, *shown, strict=True)]
        lines = [
            "  ".join(f"{v:>{w}}" for v, w in zip(row, widths, strict=True)) for row in [list(self.columns), *shown]
        ]
        return "\n".join(lines + ([f"… {len(self) - 20} more"] if len(self) > 20 else []))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _one(layer: Any, item: int | None) -> Weights:
    """One sequence of a layer, (h, i, j)."""
    weights = layer.weights
    if item is not None:
        return layer.sequence(item)
    if weights.shape[0] != 1:
        raise ValueError(f"the batch has {weights.shape[0]} sequences: say which one, item=0.")
    return weights[0]


def _knows(weights: Weights, word: Any, axis: int) -> bool:
    if isinstance(word, int):
        return True
    words = weights.tokens[axis]
    return words is not None and getattr(word, "word", word) in words


@torch.no_grad()
def find(layers: list[Any], a: Any, b: Any, item: int | None) -> Table:
    """Rows (layer, head, weight), best first; without b, (layer, head, key, weight) of the key each head looks at."""
    rows: list[tuple[Any, ...]] = []
    known = False
    for layer in layers:
        weights = _one(layer, item)
        if not _knows(weights, a, 0) or (b is not None and not _knows(weights, b, 1)):
            continue
        known = True
        if b is not None:
            rows += [(layer.index, h, w) for h, w in enumerate(weights[..., a, b].tolist())]
        else:
            best = weights.row(a).max(-1)
            words = weights.tokens[1]
            names = [words[j] if words else j for j in best.indices.tolist()]
            rows += [(layer.index, h, n, w) for h, (n, w) in enumerate(zip(names, best.values.tolist(), strict=True))]
    if not known:
        tokens = next((x.weights.tokens[0] for x in layers if x.kept is not None and x.weights.tokens[0]), None)
        told = (
            f"the tokens are {' '.join(map(repr, tokens[:30]))}"
            if tokens
            else "the recording has no tokens: record(model, tokens=...)"
        )
        raise KeyError(f"no layer knows {a!r}{'' if b is None else f' and {b!r}'}; {told}.")
    columns = ("layer", "head", "weight") if b is not None else ("layer", "head", "key", "weight")
    return Table(columns, sorted(rows, key=lambda row: -row[-1]))


# One number a head. The sink is the key that a layer's heads give most to; where it misleads, it is taken out.


def _sink(weights: Weights) -> tuple[int, Tensor]:
    """The key that receives most over all heads, and its column (h, i)."""
    place = int(weights.received().sum(0).argmax())
    return place, weights.column(place)


def _entropy(weights: Weights) -> Tensor:
    """Entropy without the sink: with its weight w and r = 1 − w, r·H′ = H + w log w + r log r; a mean weighted by r."""
    _, w = _sink(weights)
    rest = (1 - w).clamp(min=0)
    return _mean(weights.entropy() + _x_log_x(w) + _x_log_x(rest), rest)


def _mean_distance(weights: Weights) -> Tensor:
    """How far is looked, the sink taken out; rows count as much as they give to other keys."""
    place, w = _sink(weights)
    i, j = weights.shape[-2:]
    far = (torch.arange(i, device=w.device) + j - i - place).abs()
    return _mean(_positional(weights).mean_distance() - w * far, (1 - w).clamp(min=0))


def _mean(weighted: Tensor, by: Tensor) -> Tensor:
    return weighted.clamp(min=0).sum(-1) / by.sum(-1).clamp(min=1e-6)


def _x_log_x(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x.clamp(min=1e-38).log(), 0)


def _positional(weights: Weights) -> Weights:
    if weights._factors.offset is None:
        raise ValueError(
            "mean_distance compares positions, and in cross-attention there is nothing to compare: select(kind='self')."
        )
    return weights


def _share_of_sink(weights: Weights) -> Tensor:
    return _sink(weights)[1].mean(-1)


def _previous(weights: Weights) -> Tensor:
    """Mean weight on the position before."""
    i, j = weights.shape[-2:]
    at = torch.arange(i) + (j - i)
    rows = torch.arange(i)[at >= 1]
    return cells(weights, rows, at[at >= 1] - 1).mean(-1)


def _induction(weights: Weights) -> Tensor:
    """Mean weight on what followed the last occurrence of the same word: a head that continues what it saw before."""
    words, (i, j) = weights.tokens[1], weights.shape[-2:]
    if words is None:
        raise ValueError("induction compares words: record(model, tokens=...).")
    last: dict[str, int] = {}
    pairs = []
    for at, word in enumerate(words):
        if word in last and at - (j - i) >= 0:
            pairs.append((at - (j - i), last[word] + 1))
        last[word] = at
    if not pairs:
        raise ValueError("no word occurs twice, so no head can continue what followed it.")
    rows, cols = torch.tensor(pairs).T
    return cells(weights, rows, cols).mean(-1)


BY: dict[str, Callable[[Weights], Tensor]] = {
    "entropy": _entropy,
    "mean_distance": _mean_distance,
    "sink": _share_of_sink,
    "previous": _previous,
    "induction": _induction,
}


@torch.no_grad()
def heads(layers: list[Any], by: str, item: int | None) -> Table:
    """Every head of every layer with one number; sharpest first for entropy, largest first otherwise."""
    if by not in BY:
        raise ValueError(f"unknown measure {by!r}; heads are told apart by {', '.join(BY)}.")
    if by != "entropy" and by != "sink":
        layers = [layer for layer in layers if layer.kind == "self"]
    rows = []
    for layer in layers:
        if layer.kept is None and by == "entropy":
            values = layer.statistics["entropy"].float().mean((0, 2))
        else:
            values = BY[by](_one(layer, item))
        rows += [(layer.index, h, layer.name, float(x)) for h, x in enumerate(values.tolist())]
    return Table(("layer", "head", "name", by), sorted(rows, key=lambda row: row[3] if by == "entropy" else -row[3]))


@torch.no_grad()
def overview(layers: list[Any]) -> Table:
    """Every head with mean entropy, largest weight, and the share of the most received key; over the whole batch."""
    rows = []
    for layer in layers:
        weights = layer.weights
        seen = weights.see("entropy", "received", "peak")
        entropy = seen.entropy.mean((0, 2))
        peak = seen.peak.values.mean((0, 2))
        share = (seen.received / seen.received.sum(-1, keepdim=True).clamp(min=1e-30)).amax(-1).mean(0)
        for h, numbers in enumerate(zip(entropy.tolist(), peak.tolist(), share.tolist(), strict=True)):
            rows.append((layer.index, layer.name, layer.kind, h, *numbers))
    return Table(("layer", "name", "kind", "head", "entropy", "peak", "sink"), rows)


@torch.no_grad()
def rollout(layers: list[Any], word: Any, item: int | None) -> Tensor:
    """A row vector carried down through ½ (I + mean over heads of W) of every layer, the last first: linear memory."""
    chosen = _one_stack(layers)
    if not chosen:
        raise ValueError("rollout follows self-attention through the layers, and none was recorded.")
    top = _one(chosen[-1], item)
    flow = torch.zeros(top.shape[-2], dtype=top.dtype, device=top.device)
    flow[_row_number(top, word)] = 1
    for layer in reversed(chosen):
        weights = _one(layer, item)
        spread = weights.mT @ flow.expand(weights.shape[0], -1).unsqueeze(-1)  # h j 1
        flow = (flow + spread.squeeze(-1).mean(0)) / 2
    return flow


def _row_number(weights: Weights, word: Any) -> int:
    from ..core.indexing import parse

    pick = parse(
        (word,) if not isinstance(word, int) else (Ellipsis, word, slice(None)), weights.shape, weights._tokens
    )[-2]
    if not isinstance(pick, int):
        raise IndexError(f"rollout begins at one position; {word!r} names several.")
    return pick


def _one_stack(layers: list[Any]) -> list[Any]:
    """The longest run of square self-attention layers of one size: an encoder, or a decoder."""
    square = [layer for layer in layers if layer.kind == "self" and layer.shape[-1] == layer.shape[-2]]
    runs = [list(run) for _, run in itertools.groupby(square, key=_stack)]
    return max(runs, key=len, default=[])


def _stack(layer: Any) -> tuple[Any, str]:
    """Layers of one size whose names differ only in their numbers stand on one another."""
    return tuple(layer.shape), re.sub(r"\d+", "#", layer.name)
