"""One attention call of a recorded pass: its attention matrix, values, statistics and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.indexing import as_int
from ..core.scores.kinds import repeat_kv
from ..core.types import StatisticName
from ..core.weights import Statistics, Weights
from ..engines import get_engine
from .calls import LayerKind, SavedCall
from .slicing import real_rows, sequence_of, span_of

if TYPE_CHECKING:
    import numpy

    from .recording import Pass

__all__ = ["STORED_STATISTICS", "Layer", "TokenLists", "row_statistics"]

#: The statistics that keep="statistics" saves of every layer.
STORED_STATISTICS: tuple[StatisticName, ...] = ("entropy", "max_score", "received", "lse")

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
    kind: LayerKind
    saved: SavedCall | None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    tokens: tuple[TokenLists | None, TokenLists | None] = (None, None)
    parent: Pass | None = field(default=None, repr=False)
    _weights: Weights | None = field(default=None, repr=False)

    @property
    def weights(self) -> Weights:
        """The attention matrix ``(b, h, i, j)``; with tokens where there is one sequence.

        Raises:
            ValueError: Only statistics were recorded.
            RuntimeError: The model changed its queries, keys or weights in place after the call.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].weights["cat", "the"].shape
            torch.Size([1, 2])
        """
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
        """The value vectors ``(b, g, j, e)``, where they were recorded (values=True); else None.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, values=True) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].values.shape
            torch.Size([1, 2, 3, 4])
        """
        return None if self.saved is None else self.saved.loaded().v

    def head(self, h: int) -> Weights:
        """One head.

        Args:
            h: Its number.

        Returns:
            `Weights` ``(i, j)`` when there is one sequence, else ``(b, i, j)``.

        Raises:
            IndexError: The layer has fewer heads.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].head(1).shape
            torch.Size([3, 3])
        """
        weights = self.weights
        heads, number = weights.shape[1], as_int(h)
        if number is not None and not -heads <= number < heads:
            raise IndexError(f"layer {self.index} has heads 0 to {heads - 1}; got head {h}.")
        return weights[0, h] if weights.shape[0] == 1 else weights[:, h]

    def sequence(self, item: int) -> Weights:
        """One sequence of the batch.

        Args:
            item: Its number; negative from the end.

        Returns:
            `Weights` ``(h, i, j)`` without the padding, with tokens where they are known.

        Raises:
            IndexError: The batch has fewer sequences.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(2, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].sequence(1).tokens[0]
            ('the', 'cat', 'sat')
        """
        weights, number = self.weights, as_int(item)
        if number is None:
            raise TypeError(f"a sequence is asked for by its number in the batch, such as item=0; got {item!r}.")
        item = number
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
        """w_ij · |v_j|: how much each key adds to the output of a row. Quadratic memory, like `dense`.

        Args:
            item: The sequence.

        Returns:
            ``(h, i, j)``.

        Raises:
            ValueError: No values were recorded.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, values=True) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].norm_weighted().shape
            torch.Size([2, 3, 3])
        """
        if self.values is None:
            raise ValueError("w_ij·|v_j| needs the values: record(model, values=True).")
        w = self.weights[item].dense()
        size = self.values[item].float().norm(dim=-1)  # g j
        return w * repeat_kv(size.unsqueeze(-2), w.shape[0])

    def numpy(self) -> numpy.ndarray:
        """The dense weights.

        Returns:
            A NumPy array ``(b, h, i, j)``.

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].numpy().shape
            (1, 2, 3, 3)
        """
        return self.weights.dense().numpy(force=True)

    def real_rows(self) -> Tensor | None:
        """The rows that are no padding.

        Returns:
            Bool ``(b, i)``; None: all of them, or not known (cross-attention).

        Example:
            >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> with regard.record(model, tokens=["the", "cat", "sat"]) as seen:
            ...     y = model(x, x, x)
            >>> seen.layers[0].real_rows()
            tensor([[True, True, True]])
        """
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


def row_statistics(weights: Weights) -> dict[str, Tensor]:
    """The statistics that keep="statistics" saves of a layer."""
    plain = get_engine(weights._engine).plain
    names = [name for name in STORED_STATISTICS if not (plain and name in ("max_score", "lse"))]
    statistics: Statistics = weights.see(*names)
    return {name: getattr(statistics, name).clone() for name in names}
