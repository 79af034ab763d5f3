"""Measures over all heads of all layers: which head ties two tokens, which is sharpest, where attention flows.

Results are a `Table` of named tuples: iterate over it, print it, or turn it into NumPy or pandas.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..chains import rollout_rows
from ..core.indexing import At, as_int, parse
from ..core.rows.complete_rows import induction_targets
from ..core.weights import Weights
from .calls import LayerKind
from .slicing import row_mean

if TYPE_CHECKING:
    import numpy
    import pandas

__all__ = [
    "BY",
    "HeadKey",
    "HeadSummary",
    "HeadValue",
    "HeadWeight",
    "Table",
    "find",
    "heads",
    "rollout",
    "summary",
]


class HeadWeight(NamedTuple):
    """A head and the weight it gives from one token to another: a row of `Recording.find(a, b)`."""

    layer: int
    head: int
    weight: float


class HeadKey(NamedTuple):
    """A head, the key it gives most to from one token, and that weight: a row of `Recording.find(a)`."""

    layer: int
    head: int
    key: str | int
    weight: float


class HeadValue(NamedTuple):
    """A head and its value by one measure: a row of `Recording.heads`."""

    layer: int
    head: int
    name: str
    value: float


class HeadSummary(NamedTuple):
    """A head with mean entropy, mean largest weight, and the share of its weight on the sink: a row of `summary`.

    The sink is the key that the heads of the layer give most to, as in `Recording.heads`.
    """

    layer: int
    name: str
    kind: LayerKind
    head: int
    entropy: float
    peak: float
    sink: float


Row = TypeVar("Row", bound=tuple[Any, ...])


class Table(list[Row], Generic[Row]):
    """A list of named tuples with column titles.

    Attributes:
        columns: The titles.

    Example:
        >>> table = Table(("layer", "head", "weight"), [HeadWeight(3, 1, 0.25)])
        >>> table
        layer  head  weight
            3     1   0.250
        >>> table[0].weight
        0.25
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self.columns = tuple(columns)

    def numpy(self) -> numpy.ndarray:
        """The rows as a NumPy record array.

        Returns:
            A structured array with one field a column.

        Example:
            >>> Table(("layer", "head", "weight"), [HeadWeight(3, 1, 0.25)]).numpy()["weight"]
            array([0.25])
        """
        import numpy as np

        kinds = (
            [(c, object if isinstance(v, str) else type(v)) for c, v in zip(self.columns, self[0], strict=True)]
            if self
            else []
        )
        return np.array([tuple(row) for row in self], dtype=kinds)

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas DataFrame.

        Returns:
            A DataFrame with one column a title.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> Table(("layer", "head", "weight"), [HeadWeight(3, 1, 0.25)]).to_pandas()
               layer  head  weight
            0      3     1    0.25
        """
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas. Without it: iterate over the rows."
            ) from None
        return pandas.DataFrame([tuple(row) for row in self], columns=list(self.columns))

    def _repr_html_(self) -> str:
        return str(import_module("regard.look.notebook").table_html(self.columns, self))

    def __repr__(self) -> str:
        shown = [[_cell(v) for v in row] for row in self[:20]]
        widths = [max(map(len, column)) for column in zip(self.columns, *shown, strict=True)]
        lines = [
            "  ".join(f"{v:>{w}}" for v, w in zip(row, widths, strict=True)) for row in [list(self.columns), *shown]
        ]
        return "\n".join(lines + ([f"… {len(self) - 20} more"] if len(self) > 20 else []))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _one_sequence(layer: Any, item: int | None) -> Weights:
    """One sequence of a layer, (h, i, j)."""
    weights = layer.weights
    if item is not None:
        return layer.sequence(item)
    if weights.shape[0] != 1:
        raise ValueError(f"the batch has {weights.shape[0]} sequences: say which one, item=0.")
    return weights[0]


def _has_token(weights: Weights, token: Any, axis: int) -> bool:
    """Whether a token occurs among the rows or columns, `the:2` as often as it says; a position always does."""
    if as_int(token) is not None:
        return True
    if not isinstance(token, str | At):
        raise TypeError(f"one token, or its position, is needed; got {token!r}.")
    tokens = weights._tokens[axis]
    return tokens is not None and tokens.has(token)


@torch.no_grad()
def find(layers: list[Any], a: Any, b: Any, item: int | None) -> Table[Any]:
    """`HeadWeight` rows, largest first; without b `HeadKey` rows of the key each head gives most to."""
    rows: list[Any] = []
    has_tokens = False
    for layer in layers:
        weights = _one_sequence(layer, item)
        if not _has_token(weights, a, 0) or (b is not None and not _has_token(weights, b, 1)):
            continue
        has_tokens = True
        if b is not None:
            rows += [HeadWeight(layer.index, h, w) for h, w in enumerate(weights[..., a, b].tolist())]
        else:
            best = weights.row(a).max(-1)
            tokens = weights.tokens[1]
            keys = [tokens[j] if tokens else j for j in best.indices.tolist()]
            pairs = zip(keys, best.values.tolist(), strict=True)
            rows += [HeadKey(layer.index, h, key, w) for h, (key, w) in enumerate(pairs)]
    if not has_tokens:
        raise KeyError(f"no layer has the token {a!r}{'' if b is None else f' and {b!r}'}; {_tokens_hint(layers)}.")
    columns = HeadWeight._fields if b is not None else HeadKey._fields
    return Table(columns, sorted(rows, key=lambda row: -row.weight))


def _tokens_hint(layers: list[Any]) -> str:
    texts = dict.fromkeys(tuple(lists[0]) for layer in layers for lists in layer.tokens if lists)
    if not texts:
        return "the recording has no tokens: record(model, tokens=...)"
    return "the tokens are " + "; and ".join(" ".join(map(repr, tokens[:30])) for tokens in texts)


# One number a head. The sink is the key that a layer's heads give most to.


def _sink(weights: Weights) -> tuple[int, Tensor]:
    """The key that receives most over all heads, and its column (h, i)."""
    position = int(weights.received().sum(0).argmax())
    return position, weights.column(position)


def _entropy(weights: Weights) -> Tensor:
    """The mean over rows of `Weights.entropy`."""
    return weights.entropy().mean(-1)


def _entropy_without_sink(weights: Weights) -> Tensor:
    """The entropy of the weights without the sink, renormalised; rows count by the weight they give to other keys.

    With w the weight of the sink and r = 1 − w, the other weights have the entropy H′, and
    r·H′ = H + w log w + r log r. The mean over rows is Σ r·H′ / Σ r.
    """
    _, w = _sink(weights)
    rest = (1 - w).clamp(min=0)
    return _mean(weights.entropy() + _x_log_x(w) + _x_log_x(rest), rest)


def _mean_distance_without_sink(weights: Weights) -> Tensor:
    """The mean distance without the sink; rows count by the weight they give to other keys."""
    position, w = _sink(weights)
    i, j = weights.shape[-2:]
    distance = (torch.arange(i, device=w.device) + j - i - position).abs()
    return _mean(_positional(weights).mean_distance() - w * distance, (1 - w).clamp(min=0))


def _mean(weighted: Tensor, by: Tensor) -> Tensor:
    return weighted.clamp(min=0).sum(-1) / by.sum(-1).clamp(min=1e-6)


def _x_log_x(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x.clamp(min=1e-38).log(), 0)


def _positional(weights: Weights) -> Weights:
    if weights._factors.offset is None:
        raise ValueError(
            "mean_distance_without_sink compares positions, and in cross-attention there is nothing to compare: "
            "select(kind='self')."
        )
    return weights


def _share_of_sink(weights: Weights) -> Tensor:
    """The mean weight on the sink."""
    return _sink(weights)[1].mean(-1)


def _previous(weights: Weights) -> Tensor:
    """The mean weight on the position before, over rows that have one."""
    at = _at(weights)
    return weights.gather((at - 1).clamp(min=-1)[:, None])[..., at >= 1, 0].mean(-1)


def _induction(weights: Weights) -> Tensor:
    """The mean weight on the token after the last occurrence of the same token, over rows that have one."""
    tokens, at = weights.tokens[1], _at(weights)
    if tokens is None:
        raise ValueError("induction compares tokens: record(model, tokens=...).")
    targets = torch.where(at >= 0, induction_targets(tokens, at.clamp(min=0)), -1)
    if not bool((targets >= 0).any()):
        raise ValueError("no token occurs twice, so no head can continue what followed it.")
    return weights.gather(targets[:, None])[..., targets >= 0, 0].mean(-1)


def _at(weights: Weights) -> Tensor:
    """Key positions of the queries, the last one at the last key, (i,)."""
    i, j = weights.shape[-2:]
    return torch.arange(i, device=weights.device) + (j - i)


#: Names of the measures of `Recording.heads`.
HeadMeasure: TypeAlias = Literal[
    "entropy", "entropy_without_sink", "mean_distance_without_sink", "sink", "previous", "induction",
]  # fmt: skip

#: Each measure takes the weights (h, i, j) of one sequence and returns (h,).
BY: dict[HeadMeasure, Callable[[Weights], Tensor]] = {
    "entropy": _entropy,
    "mean_distance_without_sink": _mean_distance_without_sink,
    "sink": _share_of_sink,
    "previous": _previous,
    "induction": _induction,
    "entropy_without_sink": _entropy_without_sink,
}

#: Measures that need no correspondence of positions, and those where the smallest value comes first.
ANY_KIND = ("entropy", "entropy_without_sink", "sink")
SMALLEST_FIRST = ("entropy", "entropy_without_sink")


@torch.no_grad()
def heads(layers: list[Any], by: HeadMeasure, item: int | None) -> Table[HeadValue]:
    """Every head of every layer with one number; smallest first for entropies, largest first otherwise."""
    if not isinstance(by, str) or by not in BY:
        raise ValueError(f"unknown measure {by!r}; the measures are {', '.join(BY)}.")
    if by not in ANY_KIND:
        layers = [layer for layer in layers if layer.kind == "self"]
    rows = []
    for layer in layers:
        if layer.saved is None and by == "entropy":
            entropy = layer.statistics["entropy"].float()
            values = row_mean(entropy, layer.real_rows()) if item is None else entropy[item].mean(-1)
        else:
            values = BY[by](_one_sequence(layer, item))
        rows += [HeadValue(layer.index, h, layer.name, float(x)) for h, x in enumerate(values.tolist())]
    sign = 1 if by in SMALLEST_FIRST else -1
    return Table(("layer", "head", "name", by), sorted(rows, key=lambda row: sign * row.value))


@torch.no_grad()
def summary(layers: list[Any]) -> Table[HeadSummary]:
    """A `HeadSummary` for every head, over all sequences without their padding rows."""
    rows = []
    for layer in layers:
        rows_of_layer = layer.real_rows()
        if layer.saved is None:  # keep="statistics" has no largest weights
            entropies, received = layer.statistics["entropy"], layer.statistics["received"]
            peaks = torch.full_like(entropies, torch.nan)
        else:
            statistics = layer.weights.see("entropy", "received", "peak")
            entropies, received, peaks = statistics.entropy, statistics.received, statistics.peak.values
        entropy, peak = row_mean(entropies, rows_of_layer), row_mean(peaks, rows_of_layer)
        sink = received.sum(1, keepdim=True).argmax(-1, keepdim=True).expand(*received.shape[:2], 1)
        share = (received.gather(-1, sink).squeeze(-1) / received.sum(-1).clamp(min=1e-30)).mean(0)
        for h, numbers in enumerate(zip(entropy.tolist(), peak.tolist(), share.tolist(), strict=True)):
            rows.append(HeadSummary(layer.index, layer.name, layer.kind, h, *numbers))
    return Table(HeadSummary._fields, rows)


@torch.no_grad()
def rollout(layers: list[Any], token: Any, item: int | None) -> Tensor:
    """A row vector multiplied by ½ (I + mean over heads of W) of every layer, the last first: linear memory."""
    stack = _one_stack(layers, token, item)
    if not stack:
        raise ValueError("rollout follows self-attention through the layers, and none was recorded.")
    sequences = [_one_sequence(layer, item) for layer in stack]
    return rollout_rows(sequences, [_row_number(sequences[-1], token)])[0]


def _row_number(weights: Weights, token: Any) -> int:
    pick = parse(
        (token,) if not isinstance(token, int) else (Ellipsis, token, slice(None)), weights.shape, weights._tokens
    )[-2]
    if not isinstance(pick, int):
        raise IndexError(f"rollout begins at one position; {token!r} names several.")
    return pick


def _one_stack(layers: list[Any], token: Any, item: int | None) -> list[Any]:
    """The longest run of square self-attention layers of one size that has the token: an encoder, or a decoder."""
    square = [layer for layer in layers if layer.kind == "self" and layer.shape[-1] == layer.shape[-2]]
    runs = [list(run) for _, run in itertools.groupby(square, key=_stack_key)]
    with_token = [run for run in runs if _has_token(_one_sequence(run[-1], item), token, 0)]
    if runs and not with_token:
        raise KeyError(f"no self-attention has the token {token!r}; {_tokens_hint(layers)}.")
    stems = {run[0].name.split(".")[0] for run in with_token}
    if isinstance(token, int) and len(stems) > 1:
        raise ValueError(
            f"position {token} is one of several stacks of layers, {', '.join(sorted(stems))}: name its token, or "
            f"choose one by select(name={min(stems)!r})."
        )
    return max(with_token, key=len, default=[])


def _stack_key(layer: Any) -> tuple[Any, str]:
    """Equal for layers of one size whose names differ only in their numbers."""
    return tuple(layer.shape), re.sub(r"\d+", "#", layer.name)
