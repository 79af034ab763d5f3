"""What was seen: layers in the order they were called, each with its attention matrix.

A `Recording` is passes of layers. Plain indexing means the last pass: `seen[3, 1]` is layer 3, head 1; with a batch
`seen[3, 1, 0]` is its first sequence without padding. Everything else is asked of `Weights`.
Imports `capture`, `part` and `tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..core.weights import Statistics, Weights
from . import head_metrics
from .calls import SavedCall
from .head_metrics import Table
from .slicing import sequence_of, span_of

__all__ = ["STATISTICS", "Layer", "Pass", "Recording"]

#: What keep="statistics" keeps of every layer; reach where positions are known.
STATISTICS = ("entropy", "max_score", "received", "lse")

#: The words of a batch: one list a sequence.
Words = list[list[str]]


@dataclass
class Layer:
    """One attention call of a pass."""

    name: str
    index: int
    kind: str  # "self" or "cross"
    kept: SavedCall | None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    words: tuple[Words | None, Words | None] = (None, None)  # of rows, of columns
    of: Pass | None = field(default=None, repr=False)
    _made: Weights | None = field(default=None, repr=False)

    @property
    def weights(self) -> Weights:
        """The attention matrix, (b, h, i, j); with words where there is one sequence."""
        if self.kept is None:
            raise ValueError(
                f"of layer {self.index} ({self.name}) only numbers were kept: {', '.join(self.statistics)}; they are "
                'in .statistics. For its weights record with keep="factors".'
            )
        self.kept.check()
        if self._made is not None:
            return self._made
        kept = self.kept.loaded()
        made = kept.weights()
        made = self._labelled(made, 0) if made.shape[0] == 1 else made
        if kept is self.kept:  # what lies on the disk is not held in memory as well
            self._made = made
        return made

    @property
    def values(self) -> Tensor | None:
        """The value vectors, (b, g, j, e), where they were recorded (values=True)."""
        return None if self.kept is None else self.kept.loaded().v

    def head(self, h: Any) -> Weights:
        """One head; without the batch axis when there is one sequence."""
        weights = self.weights
        return weights[0, h] if weights.shape[0] == 1 else weights[:, h]

    def sequence(self, item: int) -> Weights:
        """One sequence of the batch, (h, i, j), without its padding."""
        weights = self.weights
        if not -weights.shape[0] <= item < weights.shape[0]:
            raise IndexError(f"sequence {item} was asked for and the batch has {weights.shape[0]}.")
        item %= weights.shape[0]
        cols = span_of(weights, item)
        rows = cols if self.kind == "self" else self._rows_of(item)
        if self.kind == "self" and weights.shape[-2] != weights.shape[-1]:
            behind = weights.shape[-1] - weights.shape[-2]
            rows = slice(max(0, cols.start - behind), weights.shape[-2])
        part = sequence_of(weights, item, rows, cols)
        above, beside = self.words
        if above is None or beside is None:
            return part
        return part.label(above[item][rows], beside[item][cols])

    def norm_weighted(self, item: int = 0) -> Tensor:
        """w_ij · |v_j| for one sequence, (h, i, j): what each key really adds. Quadratic, like `dense`."""
        if self.values is None:
            raise ValueError("w_ij·|v_j| needs the values: record(model, values=True).")
        w = self.weights[item].dense()
        size = self.values[item].float().norm(dim=-1)  # g j
        return w * size.repeat_interleave(w.shape[0] // size.shape[0], 0).unsqueeze(-2)

    def numpy(self) -> Any:
        """The weights written out, as a NumPy array (b, h, i, j)."""
        return self.weights.dense().numpy(force=True)

    def __repr__(self) -> str:
        return f"Layer({self.index}, {self.name!r}, {self.kind}, {'×'.join(map(str, self.shape))})"

    def _labelled(self, weights: Weights, item: int) -> Weights:
        rows, cols = self.words
        return weights if rows is None or cols is None else weights.label(rows[item], cols[item])

    def _rows_of(self, item: int) -> slice:
        """Which rows of a cross-attention are real: those its decoder's self-attention sees."""
        i = self.shape[-2]
        for layer in self.of.layers if self.of else ():
            if layer.kind == "self" and layer.kept is not None and layer.shape[-1] == layer.shape[-2] == i:
                stem = self.name.split(".")[0]
                if layer.name.split(".")[0] == stem or layer.index > 0:
                    return span_of(layer.weights, item)
        return slice(0, i)


@dataclass
class Pass:
    """One forward pass, or one whole generation."""

    layers: list[Layer] = field(default_factory=list)
    steps: int = 1  # forward passes that were stitched into this one

    def __repr__(self) -> str:
        steps = f", {self.steps} steps stitched" if self.steps > 1 else ""
        return f"Pass({len(self.layers)} layers{steps})"


class Recording:
    """What `regard.record` saw; also what `regard.load` reads.

    seen[3]            the weights of layer 3, (b, h, i, j); a module's name works too
    seen[3, 1]         its head 1, without the batch axis when there is one sequence
    seen[3, 1, 0]      of the first sequence, without its padding
    seen.layers, seen.passes, seen.select(kind="cross"), seen.refused
    seen.find("it", "animal"), seen.heads(by="entropy"), seen.rollout("it")
    """

    def __init__(self, passes: list[Pass] | None = None, refused: list[tuple[str, str]] | None = None) -> None:
        self.passes = [] if passes is None else passes
        self.refused = [] if refused is None else refused

    @property
    def layers(self) -> list[Layer]:
        """The layers of the last pass, in the order they were called."""
        return self.passes[-1].layers if self.passes else []

    def select(self, kind: str | None = None, name: str | None = None) -> Recording:
        """The same recording with a part of the layers: kind "self" or "cross", or names that contain a text."""
        if kind not in (None, "self", "cross"):
            raise ValueError(f'kind is "self" or "cross"; {kind!r} came.')

        def wanted(layer: Layer) -> bool:
            return (kind is None or layer.kind == kind) and (name is None or name in layer.name)

        chosen = [Pass([layer for layer in p.layers if wanted(layer)], p.steps) for p in self.passes]
        return Recording(chosen, self.refused)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def layer(self, which: int | str) -> Layer:
        """A layer by its place in this recording, its module's name, or the end of that name."""
        if not self.layers:
            refused = f" Refused: {self.refused[0][0]}: {self.refused[0][1]}." if self.refused else ""
            raise IndexError(f"nothing was recorded. Run the model inside the block.{refused}")
        if isinstance(which, str):
            return self._named(which)
        if not -len(self.layers) <= which < len(self.layers):
            raise IndexError(f"layer {which} was asked for and {len(self.layers)} were recorded, counted from 0.")
        return self.layers[which]

    def _named(self, name: str) -> Layer:
        exact = [layer for layer in self.layers if layer.name == name]
        found = exact or [layer for layer in self.layers if layer.name.endswith("." + name)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise KeyError(f"no layer {name!r} was recorded; there are {', '.join(x.name for x in self.layers[:12])}.")
        places = ", ".join(f"{layer.index} ({layer.name})" for layer in found)
        raise KeyError(f"{name!r} names {len(found)} layers: {places}. Take one by its number.")

    def __getitem__(self, key: Any) -> Weights:
        if not isinstance(key, tuple):
            return self.layer(key).weights
        if not 2 <= len(key) <= 3:
            raise IndexError("seen[layer], seen[layer, head] or seen[layer, head, sequence].")
        layer = self.layer(key[0])
        return layer.head(key[1]) if len(key) == 2 else layer.sequence(key[2])[key[1]]

    # Questions to all layers at once.

    def find(self, a: Any, b: Any = None, item: int | None = None) -> Table:
        """Which heads tie word a to word b: (layer, head, weight), best first; without b the word each looks at."""
        return head_metrics.find(self.layers, a, b, item)

    def heads(self, by: str = "entropy", item: int | None = None) -> Table:
        """Every head with one number: entropy, mean_distance, sink, previous or induction."""
        return head_metrics.heads(self.layers, by, item)

    def rollout(self, word: Any, item: int | None = None) -> Tensor:
        """Attention rollout: how much of each input position reaches this word through all layers, (j,)."""
        return head_metrics.rollout(self.layers, word, item)

    def pandas(self) -> Any:
        """Every head of every layer with its statistics, as a pandas table."""
        return head_metrics.overview(self.layers).pandas()

    def show(self, word: Any = None, **options: Any) -> Any:
        """The picture: a page in a notebook, text in a terminal, .save("x.html") or .save("x.svg"); see `look.View`."""
        return import_module("regard.look").View(self, word=word, **options)

    def save(self, path: Any) -> None:
        """Write everything to a .regard file; the old file stays whole until the new one is."""
        from .file import save

        save(self, path)

    def __repr__(self) -> str:
        lines = [self._title()]
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers[:24]:
            kept = "statistics" if layer.kept is None else "weights" if _written_out(layer.kept) else "factors"
            mask = "" if layer.kept is None or layer.kept.mask is None else f"  {_brief(layer.kept.mask)}"
            size = "×".join(map(str, layer.shape))
            lines.append(f"{layer.index:4d}  {layer.name:{width}}  {layer.kind:5}  {size}  {kept}{mask}")
        if len(self.layers) > 24:
            lines.append(f"      … {len(self.layers) - 24} more")
        lines += [f"refused  {name or '(model)'}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)

    def _title(self) -> str:
        layers = self.layers
        if not layers:
            return "Recording: nothing recorded"
        heads = sorted({layer.shape[1] for layer in layers})
        tokens = sorted({layer.shape[-1] for layer in layers})
        spread = [f"{s[0]}" if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in (heads, tokens)]
        batch = layers[0].shape[0]
        parts = [f"{len(layers)} layers", f"{spread[0]} heads", f"{spread[1]} tokens"]
        parts += [f"{batch} sequences"] if batch > 1 else []
        passes = f", pass {len(self.passes)} of {len(self.passes)}" if len(self.passes) > 1 else ""
        steps = f", {self.passes[-1].steps} steps stitched" if self.passes[-1].steps > 1 else ""
        return " × ".join(parts) + passes + steps


def _written_out(kept: SavedCall) -> bool:
    return kept.w is not None or getattr(kept, "dense", False)


def _brief(mask: Any) -> str:
    text = repr(mask)
    return text if len(text) <= 40 else text[:39] + "…"


def numbers(weights: Weights) -> dict[str, Tensor]:
    """What keep="statistics" keeps of a layer."""
    names = [name for name in STATISTICS if not (weights._engine == "reference" and name in ("max_score", "lse"))]
    with torch.no_grad():
        seen: Statistics = weights.see(*names)
    return {name: getattr(seen, name).clone() for name in names}
