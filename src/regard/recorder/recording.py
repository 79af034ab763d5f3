"""A recording: passes of layers in the order they were called, each layer with its attention matrix.

Plain indexing means the last pass: `seen[3, 1]` is layer 3, head 1; with a batch `seen[3, 1, 0]` is its first sequence
without padding. Every other question goes to `Weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from ..core.types import StatisticName
from ..core.weights import Statistics, Weights
from . import head_metrics
from .calls import SavedCall
from .head_metrics import HeadSummary, HeadValue, Table
from .slicing import real_rows, sequence_of, span_of

__all__ = ["STATISTICS", "Layer", "Pass", "Recording", "TokenLists"]

#: The statistics that keep="statistics" saves of every layer.
STATISTICS: tuple[StatisticName, ...] = ("entropy", "max_score", "received", "lse")

#: The tokens of a batch: one list a sequence.
TokenLists = list[list[str]]


@dataclass
class Layer:
    """One attention call of a pass.

    Attributes:
        name: Path of the module that attended, `"encoder.layer.3.attention"`.
        index: Number of the call in its pass; it stays when layers are selected.
        kind: `"self"` if keys and queries come from one sequence, else `"cross"`.
        saved: Queries, keys, score and mask, or weights that the model computed; None with keep="statistics".
        statistics: With keep="statistics": `entropy`, `max_score`, `lse` as ``(b, h, i)``, `received` as ``(b, h, j)``.
        shape: ``(b, h, i, j)``.
        tokens: Tokens of the rows and of the columns: for each side None, or a list of tokens for each sequence.

    Example:
        >>> import regard
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
        ...     y = model(x, x, x)
        >>> layer = seen.layers[0]
        >>> layer.shape, layer.tokens[1]
        ((1, 2, 3, 3), [['the', 'cat', 'sat']])
        >>> layer.weights.shape
        torch.Size([1, 2, 3, 3])
    """

    name: str
    index: int
    kind: str
    saved: SavedCall | None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    tokens: tuple[TokenLists | None, TokenLists | None] = (None, None)
    parent: Pass | None = field(default=None, repr=False)
    _weights: Weights | None = field(default=None, repr=False)

    @property
    def weights(self) -> Weights:
        """The attention matrix ``(b, h, i, j)``; with tokens where there is one sequence."""
        if self.saved is None:
            raise ValueError(
                f"of layer {self.index} ({self.name}) only numbers were kept: {', '.join(self.statistics)}; they "
                'are in .statistics. For its weights record with keep="factors".'
            )
        self.saved.check()
        if self._weights is not None:
            return self._weights
        saved = self.saved.loaded()
        weights = saved.weights()
        weights = self._labelled(weights, 0) if weights.shape[0] == 1 else weights
        if saved is self.saved:  # tensors on disk are not held in memory as well
            self._weights = weights
        return weights

    @property
    def values(self) -> Tensor | None:
        """The value vectors ``(b, g, j, e)``, where they were recorded (values=True)."""
        return None if self.saved is None else self.saved.loaded().v

    def head(self, h: Any) -> Weights:
        """One head: ``(i, j)`` when there is one sequence, else ``(b, i, j)``."""
        weights = self.weights
        return weights[0, h] if weights.shape[0] == 1 else weights[:, h]

    def sequence(self, item: int) -> Weights:
        """One sequence of the batch, ``(h, i, j)``, without its padding."""
        weights = self.weights
        if not -weights.shape[0] <= item < weights.shape[0]:
            raise IndexError(f"the batch has {weights.shape[0]} sequences; got item {item}.")
        item %= weights.shape[0]
        cols = span_of(weights, item)
        rows = cols if self.kind == "self" else self._rows_of(item)
        if self.kind == "self" and weights.shape[-2] != weights.shape[-1]:
            behind = weights.shape[-1] - weights.shape[-2]
            rows = slice(max(0, cols.start - behind), weights.shape[-2])
        part = sequence_of(weights, item, rows, cols)
        row_tokens, key_tokens = self.tokens
        if row_tokens is None or key_tokens is None:
            return part
        return part.label(row_tokens[item][rows], key_tokens[item][cols])

    def norm_weighted(self, item: int = 0) -> Tensor:
        """w_ij · |v_j| for one sequence, ``(h, i, j)``: what each key really adds. Quadratic memory, like `dense`."""
        if self.values is None:
            raise ValueError("w_ij·|v_j| needs the values: record(model, values=True).")
        w = self.weights[item].dense()
        size = self.values[item].float().norm(dim=-1)  # g j
        return w * size.repeat_interleave(w.shape[0] // size.shape[0], 0).unsqueeze(-2)

    def numpy(self) -> Any:
        """The dense weights as a NumPy array ``(b, h, i, j)``."""
        return self.weights.dense().numpy(force=True)

    def real_rows(self) -> Tensor | None:
        """The rows that are no padding, bool ``(b, i)``; None: all of them, or not known (cross-attention)."""
        if self.saved is not None:
            return real_rows(self.weights, self.kind)
        received = self.statistics.get("received")
        if received is None or self.kind != "self" or self.shape[-1] != self.shape[-2]:
            return None
        return received.sum(1) > 0  # a key that receives nothing is padding

    def __repr__(self) -> str:
        return f"Layer({self.index}, {self.name!r}, {self.kind}, {'×'.join(map(str, self.shape))})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_weights": None}  # a copy makes its own

    def _labelled(self, weights: Weights, item: int) -> Weights:
        rows, cols = self.tokens
        return weights if rows is None or cols is None else weights.label(rows[item], cols[item])

    def _rows_of(self, item: int) -> slice:
        """The rows of cross-attention that are no padding: those that its decoder's self-attention sees."""
        i = self.shape[-2]
        for layer in self.parent.layers if self.parent else ():
            if layer.kind == "self" and layer.saved is not None and layer.shape[-1] == layer.shape[-2] == i:
                stem = self.name.split(".")[0]
                if layer.name.split(".")[0] == stem or layer.index > 0:
                    return span_of(layer.weights, item)
        return slice(0, i)


@dataclass
class Pass:
    """One forward pass, or all steps of one generation.

    Attributes:
        layers: Its layers, in the order they were called.
        steps: The number of forward passes that were stitched into this one.
    """

    layers: list[Layer] = field(default_factory=list)
    steps: int = 1

    def __repr__(self) -> str:
        steps = f", {self.steps} steps stitched" if self.steps > 1 else ""
        return f"Pass({len(self.layers)} layers{steps})"


class Recording:
    """What `regard.record` recorded and `regard.load` reads: passes of layers with their attention matrices.

    | index | result |
    |---|---|
    | `seen[3]` | the weights of layer 3, ``(b, h, i, j)``; a module's name works too |
    | `seen[3, 1]` | its head 1, without the batch axis when there is one sequence |
    | `seen[3, 1, 0]` | of the first sequence, without its padding |

    Attributes:
        passes: Every forward pass, or generation, in order.
        refused: Pairs (module, reason) of attention that could not be recorded.

    Example:
        >>> import regard
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
        ...     y = model(x, x, x)
        >>> seen[0, 1].shape
        torch.Size([3, 3])
        >>> seen.find("cat", "the").columns
        ('layer', 'head', 'weight')
    """

    def __init__(self, passes: list[Pass] | None = None, refused: list[tuple[str, str]] | None = None) -> None:
        self.passes = [] if passes is None else passes
        self.refused = [] if refused is None else refused

    @property
    def layers(self) -> list[Layer]:
        """The layers of the last pass, in the order they were called."""
        return self.passes[-1].layers if self.passes else []

    def select(self, kind: Literal["self", "cross"] | None = None, name: str | None = None) -> Recording:
        """The same recording with a part of the layers, which keep their numbers.

        Args:
            kind: `"self"` or `"cross"`; None: both.
            name: Text that the module's name contains; None: all.
        """
        if kind not in (None, "self", "cross"):
            raise ValueError(f'kind is "self" or "cross"; got {kind!r}.')

        def wanted(layer: Layer) -> bool:
            return (kind is None or layer.kind == kind) and (name is None or name in layer.name)

        chosen = [Pass([layer for layer in p.layers if wanted(layer)], p.steps) for p in self.passes]
        return Recording(chosen, self.refused)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def layer(self, which: int | str) -> Layer:
        """A layer by its number (`Layer.index`; negative: from the end), its module's name, or the end of that name."""
        if not self.layers:
            refused = f" Refused: {self.refused[0][0]}: {self.refused[0][1]}." if self.refused else ""
            raise IndexError(f"nothing was recorded. Run the model inside the block.{refused}")
        if isinstance(which, str):
            return self._layer_by_name(which)
        if which < 0 and -which <= len(self.layers):
            return self.layers[which]
        layer = next((layer for layer in self.layers if layer.index == which), None)
        if layer is None:
            numbers = [layer.index for layer in self.layers]
            has = f"{len(numbers)} were" if numbers == list(range(len(numbers))) else f"{numbers} were"
            raise IndexError(f"layer {which} was asked for and {has} recorded.")
        return layer

    def _layer_by_name(self, name: str) -> Layer:
        exact = [layer for layer in self.layers if layer.name == name]
        matches = exact or [layer for layer in self.layers if layer.name.endswith("." + name)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise KeyError(f"no layer {name!r} was recorded; there are {', '.join(x.name for x in self.layers[:12])}.")
        places = ", ".join(f"{layer.index} ({layer.name})" for layer in matches)
        raise KeyError(f"{name!r} names {len(matches)} layers: {places}. Take one by its number.")

    def __getitem__(self, key: Any) -> Weights:
        if not isinstance(key, tuple):
            return self.layer(key).weights
        if not 2 <= len(key) <= 3:
            raise IndexError("seen[layer], seen[layer, head] or seen[layer, head, sequence].")
        layer = self.layer(key[0])
        return layer.head(key[1]) if len(key) == 2 else layer.sequence(key[2])[key[1]]

    # Questions to all layers at once.

    def find(self, a: Any, b: Any = None, item: int | None = None) -> Table[Any]:
        """The heads that tie token a to token b.

        Args:
            a: The token that attends, or its position.
            b: The token it attends to, or its position; None: the key that each head gives most to.
            item: The sequence, for a batch.

        Returns:
            Rows `(layer, head, weight)`, or `(layer, head, key, weight)` without b; the largest weight first.
        """
        return head_metrics.find(self.layers, a, b, item)

    def heads(self, by: str = "entropy", item: int | None = None) -> Table[HeadValue]:
        """Every head with one number.

        Args:
            by: The measure.
                `"entropy"`: mean over rows of `Weights.entropy`, in nats; the smallest first.
                `"entropy_without_sink"`: the same for the weights without the sink (the key that the layer's heads give
                most to), renormalised: Σ r·H′ / Σ r over rows, where r is the weight left and H′ its entropy.
                `"mean_distance"`: mean distance to the keys without the sink, weighted in the same way.
                `"sink"`: mean weight on the sink.
                `"previous"`: mean weight on the position before.
                `"induction"`: mean weight on the token after the last occurrence of the same token.
            item: The sequence, for a batch.

        Returns:
            Rows `(layer, head, name, value)`; measures that compare positions skip cross-attention.
        """
        return head_metrics.heads(self.layers, by, item)

    def rollout(self, token: Any, item: int | None = None) -> Tensor:
        """Attention rollout: the share of each input position in this token after all layers.

        Args:
            token: The token, or its position.
            item: The sequence, for a batch.

        Returns:
            ``(j,)``, summing to 1.
        """
        return head_metrics.rollout(self.layers, token, item)

    def summary(self) -> Table[HeadSummary]:
        """Every head with its mean entropy, mean largest weight, and the share of the key that receives most."""
        return head_metrics.overview(self.layers)

    def to_pandas(self) -> Any:
        """`summary` as a pandas DataFrame."""
        return self.summary().to_pandas()

    def show(self, word: Any = None, **options: Any) -> Any:
        """The picture: a page in a notebook, text in a terminal, .save("x.html") or .save("x.svg"); see `look.View`."""
        return import_module("regard.look").View(self, word=word, **options)

    def save(self, path: Any) -> None:
        """Write the recording to a .regard file, which `regard.load` reads.

        Args:
            path: The file. An old one stays complete until the new one is; its permissions are kept.
        """
        from .file import save

        save(self, path)

    def __repr__(self) -> str:
        lines = [self._title()]
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers[:24]:
            saved = layer.saved
            content = "statistics" if saved is None else "weights" if _is_dense(saved) else "factors"
            mask = "" if saved is None or saved.mask is None else f"  {_brief(saved.mask)}"
            size = "×".join(map(str, layer.shape))
            lines.append(f"{layer.index:4d}  {layer.name:{width}}  {layer.kind:5}  {size}  {content}{mask}")
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


def _is_dense(saved: SavedCall) -> bool:
    return saved.w is not None or getattr(saved, "dense", False)


def _brief(mask: Any) -> str:
    text = repr(mask)
    return text if len(text) <= 40 else text[:39] + "…"


def row_statistics(weights: Weights) -> dict[str, Tensor]:
    """The statistics that keep="statistics" saves of a layer."""
    names = [name for name in STATISTICS if not (weights._engine == "reference" and name in ("max_score", "lse"))]
    seen: Statistics = weights.see(*names)
    return {name: getattr(seen, name).clone() for name in names}
