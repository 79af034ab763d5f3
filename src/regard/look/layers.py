"""Layers as they are looked at: one sequence of a recording or of a `Weights`, layer by layer.

A long input is summarised by rows and statistics. Nothing here writes its i × j weights out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.block import MatrixBlock
from ..core.problem import Factors
from ..core.shared import called_by_all_ranks
from ..core.weights import Weights
from ..recorder import Recording
from ..recorder.slicing import span_of
from .bands import Report, summarise
from .dot_head import max_map
from .masked_tiles import forbidden_tiles
from .ranking import peaks_beyond_received
from .token_text import is_special, printable, unknown_text

if TYPE_CHECKING:
    from ..core.weights import Statistics
    from ..recorder.recording import Layer

__all__ = [
    "LayerView",
    "Subject",
    "all_cells",
    "all_layers",
    "batch_note",
    "check_head",
    "layers_of",
    "select_layers",
    "unknown_note",
    "visible_cells",
]

#: Subjects of a view, a training history apart.
Subject = Recording | Weights

#: Cells h × i × j up to which the heads of a layer are ranked on all their weights.
DENSE_CELLS = 2**22
#: Tokens above which a page has a map of the matrix instead of the matrix.
LONG = 300
#: Rows from which a summary is computed band by band, with progress.
BANDS_FROM = 8192
#: Keys below which a row of a long input sees so few that each gets much.
FEW_KEYS = 64


@dataclass(eq=False)
class LayerView:
    """One layer of one sequence."""

    index: int
    name: str  # empty for a `Weights`
    kind: str  # "self" or "cross"
    maybe_weights: Weights | None  # h i j; None if only statistics were recorded
    values: Tensor | None = field(default=None, repr=False)  # g j e
    statistics: dict[str, Tensor] = field(default_factory=dict, repr=False)  # of a layer without weights, (b, h, i)
    report: Report = field(default=lambda step, done: None, repr=False)  # called with the progress of long work
    _maxima: Tensor | None = field(default=None, init=False, repr=False)  # largest weights of tiles, with the summary

    @property
    def weights(self) -> Weights:
        """The weights (h, i, j)."""
        assert self.maybe_weights is not None, "layers without weights are filtered out before"
        return self.maybe_weights

    @property
    def heads(self) -> int:
        return self.statistics["entropy"].shape[1] if self.maybe_weights is None else self.weights.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.weights.shape[-2], self.weights.shape[-1]

    @functools.cached_property
    def rows(self) -> tuple[str, ...]:
        """The tokens of the rows; positions if there are none."""
        return self.weights.tokens[0] or tuple(map(str, range(self.sizes[0])))

    @functools.cached_property
    def cols(self) -> tuple[str, ...]:
        """The tokens of the columns; positions if there are none."""
        return self.weights.tokens[1] or tuple(map(str, range(self.sizes[1])))

    @functools.cached_property
    def same(self) -> bool:
        """Whether rows and columns are one sequence; with a KV cache the rows are only its end."""
        return self.kind == "self" and self.rows == self.cols

    @property
    def writes(self) -> bool:
        """Whether rows are words that a decoder has read, from its start token on: each chooses the word after it."""
        return self.kind == "cross" and self.rows != self.cols and len(self.rows) > 1 and is_special(self.rows[0])

    @property
    def special(self) -> list[bool]:
        """Which columns are special tokens."""
        return [is_special(token) for token in self.cols]

    @property
    def fits_dense(self) -> bool:
        """Whether all weights of the layer may be written out to rank its heads."""
        return self.weights.shape.numel() <= DENSE_CELLS

    @property
    def long(self) -> bool:
        """Whether a page has a map of the matrix instead of the matrix."""
        return max(self.sizes) > LONG

    def pick(self, heads: list[int]) -> Weights:
        """The weights of some heads."""
        return self.weights if heads == list(range(self.heads)) else self.weights[heads]

    def values_of(self, head: int) -> Tensor | None:
        """The value vectors that a head mixes, (j, e); heads may share them."""
        return None if self.values is None else self.values[head * self.values.shape[0] // self.heads]

    def head_name(self, head: int) -> str:
        """The place of a head, such as "layer 3, head 1"; empty if there is only one head."""
        if not self.name:
            return f"head {head}" if self.heads > 1 else ""
        kind = "cross-attention, " if self.kind == "cross" else ""
        return f"{kind}layer {self.index}, head {head}"

    # Long inputs.

    @property
    def tiles(self) -> tuple[int, int]:
        """How many rows and columns the map of a long input has."""
        rows, cols = (min(n, max(64, min(192, n // 4))) for n in self.sizes)
        return rows, cols

    @functools.cached_property
    def summary(self) -> Statistics:
        """Row and column statistics and the map of every head of a long input."""
        if self.sizes[0] < BANDS_FROM:
            return self.weights.see("entropy", "peak", "received", "lse", pool=self.tiles)
        summary, self._maxima = summarise(self.weights, *self.tiles, self.report)
        return summary

    def max_map(self, heads: list[int]) -> Tensor:
        """The largest weight in every tile of a long input, of some heads: what the sums of the map hide.

        It is −1 where the mask forbids all of a tile, and NaN where a weight is not a number.
        """
        lse = self.summary.lse[heads]
        most = max_map(self.pick(heads), *self.tiles, lse) if self._maxima is None else self._maxima[heads]
        forbidden = forbidden_tiles(self.pick(heads), *self.tiles)
        return most if forbidden is None else most.masked_fill(forbidden, -1.0)

    @functools.cached_property
    def first_settled_row(self) -> int:
        """The first row of a long input that sees more than a few keys.

        The rows before it, in a causal text, give each of their few keys a large weight, whatever the head does.
        """
        few = min(FEW_KEYS, self.sizes[0] // 8, self.sizes[1] // 8)
        if not few:
            return 0
        visible = (self.weights[..., list(range(few)), :] > 0).sum(-1).amax(0)  # keys that each of these rows sees
        return int((visible < few).sum())

    def ties(self) -> Tensor:
        """How telling every row of a long input is, (h, i): its largest weight beyond what that key receives anyway."""
        peak = self.summary.peak
        beyond = peaks_beyond_received(peak.values, peak.indices, self.summary.received, self.special, self.same)
        beyond[:, : self.first_settled_row] = -math.inf
        return beyond


def all_layers(subject: Subject, item: int = 0, values: Tensor | None = None) -> list[LayerView]:
    """Every layer of a recording, or a `Weights` as the only one, as one sequence.

    Args:
        subject: What is looked at.
        item: Which sequence of a batch.
        values: The value vectors of a `Weights`.
    """
    if isinstance(subject, Weights):
        return [_from_weights(subject, item, values)]
    if not isinstance(subject, Recording):
        raise TypeError(
            "a view shows a Recording, a Weights or a training history (a list of (step, numbers)), "
            f"got {type(subject).__name__}."
        )
    return [_from_layer(layer, item) for layer in subject.layers]


def layers_of(subject: Subject, item: int = 0, values: Tensor | None = None) -> list[LayerView]:
    """The layers that have weights; an error says what to do if none has."""
    views = [view for view in all_layers(subject, item, values) if view.maybe_weights is not None]
    if views:
        return views
    if isinstance(subject, Recording) and subject.layers:
        raise ValueError('this recording has only statistics; for its weights record with keep="factors".')
    refused = getattr(subject, "refused", None)
    reason = f" Refused: {refused[0][0]}: {refused[0][1]}." if refused else ""
    raise ValueError(f"nothing was recorded. Run the model inside the block, and ask after its end.{reason}")


def _from_layer(layer: Layer, item: int) -> LayerView:
    if layer.saved is None:
        return LayerView(layer.index, layer.name, layer.kind, None, statistics=layer.statistics)
    batch, values = layer.weights, layer.values
    if batch.shape[0] == 1:
        return LayerView(layer.index, layer.name, layer.kind, batch[0], None if values is None else values[0])
    weights = layer.sequence(item)
    if values is not None:
        values = values[item][:, span_of(batch, item % batch.shape[0])]
    return LayerView(layer.index, layer.name, layer.kind, weights, values)


@called_by_all_ranks
def _from_weights(weights: Weights, item: int, values: Tensor | None) -> LayerView:
    weights._need_entire("a picture")
    if 0 in weights.shape:
        raise ValueError(f"there is nothing to see in weights of shape {tuple(weights.shape)}.")
    weights = weights.detach()
    if weights._one_head:
        weights = weights._with(weights._factors, one_head=False)
    if values is not None:
        values = weights._broadcast_values(values, weights.shape[-1], "values")
    for index in _batch_index(item, weights.shape[:-3]):
        if values is not None and values.ndim == weights.ndim:
            values = values[index if values.shape[0] > 1 else 0]
        weights = weights[index]
    rows, cols = weights.tokens
    # A square matrix whose rows and columns are other words is cross-attention, too.
    kind = "self" if rows == cols and weights.shape[-2] == weights.shape[-1] else "cross"
    return LayerView(0, "", kind, weights, values)


def _batch_index(item: int, batch: torch.Size) -> list[int]:
    """The index of a sequence on every batch axis, where `item` counts all sequences."""
    if batch and not -batch.numel() <= item < batch.numel():
        raise IndexError(f"item must be one of {batch.numel()} sequences, got {item}.")
    return [item % batch.numel() // batch[n + 1 :].numel() % size for n, size in enumerate(batch)]


def all_cells(factors: Factors) -> MatrixBlock:
    """All cells of a matrix as one block."""
    q, k = factors.q, factors.k
    return MatrixBlock(slice(0, q.shape[-2]), slice(0, k.shape[-2]), factors.problem().offset, q.device)


def visible_cells(factors: Factors, rows: Tensor | None = None) -> Tensor:
    """Which cells the mask lets rows see, all or some of them: (heads or 1, i, j)."""
    block = all_cells(factors)
    i, j = factors.q.shape[-2] if rows is None else len(rows), factors.k.shape[-2]
    if factors.mask is None:
        return torch.ones(1, i, j, dtype=torch.bool)
    visible = factors.mask.visible(block if rows is None else replace(block, rows=rows))
    return visible.expand(*visible.shape[:-2], i, j).reshape(-1, i, j)


def batch_note(subject: Subject, item: int) -> list[str]:
    """A note that one sequence of a batch is shown, and which; no note for a single sequence."""
    if isinstance(subject, Weights):
        batch = subject.shape[:-3].numel()
    else:
        batch = max((layer.shape[0] for layer in subject.layers), default=1)
    return [f"Sequence {item % batch}, counted from 0, of a batch of {batch}."] if batch > 1 else []


def unknown_note(layers: list[LayerView]) -> list[str]:
    """A note that the model does not know some tokens of the first layer's sequences; no note if it knows all."""
    sequences = dict.fromkeys(tokens for tokens in layers[0].weights.tokens if tokens)
    notes = []
    for tokens in sequences:
        if count := sum(unknown_text(token) is not None for token in tokens):
            notes.append(
                f"{count:,} of {len(tokens):,} tokens are unknown to this model, which sees one and the same token in "
                "their places; shown is the text they stand for."
            )
    return notes


def select_layers(layers: list[LayerView], layer: int | str | None, head: int | None = None) -> list[LayerView]:
    """The layer of this position or name, or all layers; checks that they have the head."""
    selected = layers
    if layer is not None:
        last = layers[-1].index
        if isinstance(layer, str):
            selected = [view for view in layers if view.name == layer or view.name.endswith("." + layer)]
        else:
            selected = [view for view in layers if view.index == (layer if layer >= 0 else last + 1 + layer)]
        if len(selected) != 1:
            names = f" or a name such as {printable(layers[0].name)}" if layers[0].name else ""
            raise LookupError(f"layer must be {_span(last)}{names}, got {printable(str(layer))}.")
    for view in selected:
        check_head(view, head)
    return selected


def check_head(view: LayerView, head: int | None) -> None:
    """Raise unless the layer has this head."""
    if head is None or -view.heads <= head < view.heads:
        return
    of_layer = f" in layer {view.index}" if view.name else ""
    raise LookupError(f"head must be {_span(view.heads - 1)}{of_layer}, got {head}.")


def _span(last: int) -> str:
    return f"0 to {last}" if last else "0"
