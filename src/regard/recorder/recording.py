"""A recording: passes of layers in the order they were called, each layer with its attention matrix.

Plain indexing means the last pass: `seen[3, 1]` is layer 3, head 1; with a batch `seen[3, 1, 0]` is its first sequence
without padding. Every other question goes to `Weights`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

from torch import Tensor

from ..core.indexing import as_int
from ..core.inherited import named_by_class
from ..core.masks.kinds import Mask
from ..core.types import KeyLike
from ..core.weights import Weights
from . import head_metrics
from .calls import SavedCall
from .head_metrics import HeadKey, HeadMeasure, HeadSummary, HeadValue, HeadWeight, Table
from .layer import STORED_STATISTICS, Layer, TokenLists

if TYPE_CHECKING:
    import pandas

    from ..look.options import ViewChoices
    from ..look.view import View

__all__ = ["STORED_STATISTICS", "Layer", "LayerStack", "Pass", "Recording", "TokenLists"]

#: The brackets of `seen[...]`: a layer, (layer, head) or (layer, head, sequence).
LayerIndex: TypeAlias = int | str | tuple[int | str, int] | tuple[int | str, int, int]

_BRACKETS = (
    " The indices are seen[layer], seen[layer, head] or seen[layer, head, sequence]; rows and columns come in brackets "
    'of their own: seen[3, 1]["it", "animal"].'
)


class LayerStack:
    """Layers in the order they were called, and the questions to all of them: the base of `Pass` and `Recording`."""

    layers: Any  # a field of `Pass`, a property of `Recording`

    def _recording(self) -> Recording:
        """The same as a `Recording`."""
        raise NotImplementedError

    def _refusal(self) -> str:
        return ""

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __contains__(self, which: object) -> bool:
        """Whether a layer, or one of that number or name, was recorded."""
        if isinstance(which, Layer):
            return any(layer is which for layer in self.layers)
        if as_int(which) is not None:
            return any(layer.index == which for layer in self.layers)
        return isinstance(which, str) and any(
            layer.name == which or layer.name.endswith("." + which) for layer in self.layers
        )

    def _recorded(self) -> Any:
        """The layers; an error if there are none."""
        if not self.layers:
            raise IndexError(
                f"nothing was recorded. Run the model inside the block, and ask after its end.{self._refusal()}"
            )
        return self.layers

    def layer(self, which: int | str) -> Layer:
        """A layer.

        Args:
            which: Its number (`Layer.index`; negative: from the end), its module's name, or the end of that name.

        Returns:
            The recorded layer.

        Raises:
            IndexError: There is no layer of that number, or nothing was recorded.
            KeyError: No layer, or more than one, has that name.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layer(-1)
            Layer(0, '', self, 1×2×3×3)
        """
        self._recorded()
        if isinstance(which, str):
            return self._layer_by_name(which)
        if as_int(which) is None:
            raise IndexError(f"a layer is a number or the name of a module; got {which!r}.{_BRACKETS}")
        if which < 0 and -which <= len(self.layers):
            return self.layers[which]
        layer = next((layer for layer in self.layers if layer.index == which), None)
        if layer is None:
            numbers = [layer.index for layer in self.layers]
            has = f"0 to {numbers[-1]}" if numbers == list(range(len(numbers))) else f"{numbers}"
            raise IndexError(f"layers {has} were recorded; got layer {which}.")
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

    def __getitem__(self, key: LayerIndex) -> Weights:
        if not isinstance(key, tuple):
            return self.layer(key).weights
        if not 2 <= len(key) <= 3:
            raise IndexError(f"{len(key)} indices.{_BRACKETS}")
        layer = self.layer(key[0])
        if len(key) == 3 and as_int(key[2]) is None:
            raise IndexError(f"the third index is the number of a sequence; got {key[2]!r}.{_BRACKETS}")
        return layer.head(key[1]) if len(key) == 2 else layer.sequence(key[2])[key[1]]

    # Questions to all layers at once.

    @overload
    def find(self, a: KeyLike, b: None = None, item: int | None = None) -> Table[HeadKey]: ...
    @overload
    def find(self, a: KeyLike, b: KeyLike, item: int | None = None) -> Table[HeadWeight]: ...
    def find(self, a: KeyLike, b: KeyLike | None = None, item: int | None = None) -> Table[HeadWeight] | Table[HeadKey]:
        """The heads that tie token a to token b.

        Args:
            a: The token that attends, or its position.
            b: The token it attends to, or its position; None: the key that each head gives most to.
            item: The sequence, for a batch.

        Returns:
            Rows `(layer, head, weight)`, or `(layer, head, key, weight)` without b; the largest weight first.

        Raises:
            KeyError: No layer has these tokens.
            ValueError: There are several sequences, and no `item`.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> best = seen.find("cat", "the")[0]
            >>> best.weight == seen[best.layer, best.head]["cat", "the"]
            tensor(True)
            >>> seen.find("cat").columns
            ('layer', 'head', 'key', 'weight')
        """
        return head_metrics.find(self._recorded(), a, b, item)

    def heads(self, by: HeadMeasure = "entropy", item: int | None = None) -> Table[HeadValue]:
        """Every head with one number.

        Args:
            by: The measure.
                `"entropy"`: mean over rows of `Weights.entropy`, in nats; the smallest first.
                `"entropy_without_sink"`: the same for the weights without the sink (the key that the layer's heads give
                most to), renormalised: Σ r·H′ / Σ r over rows, where r is the weight left and H′ its entropy.
                `"mean_distance_without_sink"`: mean distance to the other keys than the sink, weighted in the same way.
                `"sink"`: mean weight on the sink.
                `"previous"`: mean weight on the position before.
                `"induction"`: mean weight on the token after the last occurrence of the same token.
            item: The sequence, for a batch.

        Returns:
            Rows `(layer, head, name, value)`; measures that compare positions skip cross-attention.

        Raises:
            ValueError: The measure is unknown, or there are several sequences and no `item`.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> first, second = seen.heads(by="previous")
            >>> first.value >= second.value
            True
        """
        return head_metrics.heads(self._recorded(), by, item)

    def rollout(self, token: KeyLike, item: int | None = None) -> Tensor:
        """Attention rollout: the share of each input position in this token after all layers.

        Args:
            token: The token, or its position.
            item: The sequence, for a batch.

        Returns:
            ``(j,)``, summing to 1.

        Raises:
            ValueError: No self-attention was recorded.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> round(seen.rollout("cat").sum().item(), 4)
            1.0
        """
        return head_metrics.rollout(self._recorded(), token, item)

    def summary(self) -> Table[HeadSummary]:
        """Every head with its mean entropy, mean largest weight, and the share of its weight on the sink.

        Returns:
            Rows `(layer, name, kind, head, entropy, peak, sink)`, over all sequences without their padding; `peak` is
            nan with keep="statistics".

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> [(row.layer, row.head) for row in seen.summary()]
            [(0, 0), (0, 1)]
        """
        return head_metrics.summary(self.layers)

    def to_pandas(self) -> pandas.DataFrame:
        """`summary` as a pandas DataFrame.

        Returns:
            One row a head.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> list(seen.to_pandas().columns)
            ['layer', 'name', 'kind', 'head', 'entropy', 'peak', 'sink']
        """
        return self.summary().to_pandas()

    def show(self, word: KeyLike | None = None, **options: Unpack[ViewChoices]) -> View:
        """The picture: a page in a notebook, text in a terminal.

        Args:
            word: The token whose row is drawn, or its position; None: the page, or an overview.
            **options: Of `look.View`: layer, head, item, target, merge, hide_special, ...

        Returns:
            A `look.View`; .save("x.html") and .save("x.svg") write it.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> "cat" in str(seen.show("cat", layer=0, head=1))
            True
        """
        return import_module("regard.look").View(self._recording(), word=word, **options)


@named_by_class
@dataclass(repr=False)
class Pass(LayerStack):
    """One forward pass, or all steps of one generation. It answers what a `Recording` does.

    Attributes:
        layers: Its layers, in the order they were called.
        steps: The number of forward passes that were stitched into this one.

    Example:
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
        ...     y = model(x, x, x), model(x, x, x)
        >>> first = seen.passes[0]
        >>> first, first[0, 1].shape
        (Pass(1 layer), torch.Size([3, 3]))
        >>> first.find("cat", "the").columns
        ('layer', 'head', 'weight')
    """

    layers: list[Layer] = field(default_factory=list)
    steps: int = 1

    def _recording(self) -> Recording:
        return Recording([self])

    def __repr__(self) -> str:
        steps = f", {self.steps} steps stitched" if self.steps > 1 else ""
        return f"Pass({_counted(len(self.layers), 'layer')}{steps})"


@named_by_class
class Recording(LayerStack):
    """A recording, made by `regard.record` or read by `regard.load`: passes of layers with their attention matrices.

    | index | result |
    |---|---|
    | `seen[3]` | the weights of layer 3, ``(b, h, i, j)``; a module's name works too |
    | `seen[3, 1]` | its head 1, without the batch axis when there is one sequence |
    | `seen[3, 1, 0]` | of the first sequence, without its padding |

    Attributes:
        passes: Every forward pass, or generation, in order.
        refused: Pairs (module, reason) of attention that could not be recorded.

    Example:
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
        """The layers of the last pass, in the order they were called.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers
            [Layer(0, '', self, 1×2×3×3)]
        """
        return self.passes[-1].layers if self.passes else []

    def select(self, kind: Literal["self", "cross"] | None = None, name: str | None = None) -> Recording:
        """The same recording with a part of the layers, which keep their numbers.

        Args:
            kind: `"self"` or `"cross"`; None: both.
            name: Text that the module's name contains; None: all.

        Returns:
            A `Recording` that shares the layers.

        Raises:
            ValueError: The kind is unknown.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> len(seen.select(kind="cross"))
            0
        """
        if kind not in (None, "self", "cross"):
            raise ValueError(f'kind is "self" or "cross"; got {kind!r}.')

        def wanted(layer: Layer) -> bool:
            return (kind is None or layer.kind == kind) and (name is None or name in layer.name)

        chosen = [Pass([layer for layer in p.layers if wanted(layer)], p.steps) for p in self.passes]
        return Recording(chosen, self.refused)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a .regard file, which `regard.load` reads.

        Args:
            path: The file. An old one stays complete until the new one is; its permissions are kept.

        Example:
            >>> import os, tempfile
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> path = os.path.join(tempfile.mkdtemp(), "seen.regard")
            >>> seen.save(path)
            >>> len(regard.load(path))
            1
        """
        from .file import save

        save(self, path)

    def _recording(self) -> Recording:
        return self

    def _refusal(self) -> str:
        if not self.refused:
            return ""
        name, reason = self.refused[0]
        return f" Refused: {name or '(the model)'}: {reason}."

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
        lines += [f"refused  {name or '(the model)'}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return str(import_module("regard.look.notebook").recording_html(self))

    def _title(self) -> str:
        layers = self.layers
        if not layers:
            return "Recording: nothing recorded"
        heads = sorted({layer.shape[1] for layer in layers})
        tokens = sorted({layer.shape[-1] for layer in layers})
        spread = [f"{s[0]}" if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in (heads, tokens)]
        batch = layers[0].shape[0]
        parts = [_counted(len(layers), "layer"), _counted(spread[0], "head"), _counted(spread[1], "token")]
        parts += [f"{batch} sequences"] if batch > 1 else []
        passes = f", pass {len(self.passes)} of {len(self.passes)}" if len(self.passes) > 1 else ""
        steps = f", {self.passes[-1].steps} steps stitched" if self.passes[-1].steps > 1 else ""
        return " × ".join(parts) + passes + steps


def _is_dense(saved: SavedCall) -> bool:
    return saved.w is not None or getattr(saved, "dense", False)


def _counted(n: int | str, name: str) -> str:
    return f"{n} {name}" if str(n) == "1" else f"{n} {name}s"


def _brief(mask: Mask | None) -> str:
    text = repr(mask)
    return text if len(text) <= 40 else text[:39] + "…"
