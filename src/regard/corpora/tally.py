"""The sums of a corpus so far: exact, so that tallies of parts merge to the same total in any split and order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import exact
from .profile import BINS, SUMS, Profile, bin_sizes

__all__ = ["COLUMNS", "LayerTally", "Tally", "Tie"]

#: Sums of a head.
COLUMNS = len(SUMS) + 2 * BINS

#: Tokens on either side of a query and of its key that an example shows.
CONTEXT = 6


class Tie(NamedTuple):
    """A weight of one head: where it stands, and the tokens around it."""

    weight: float
    document: int
    start: int  # of the sequence, in tokens of its document
    query: int  # in the sequence
    key: int
    source: str
    excerpt: tuple[tuple[int, str], ...]  # (position in the sequence, token); empty where texts are not stored

    @property
    def rank(self) -> tuple[float, int, int, int, int]:
        """Strongest first; equal weights in the order of the corpus."""
        return -self.weight, self.document, self.start, self.query, self.key


@dataclass
class LayerTally:
    """The sums and the strongest ties of one layer."""

    name: str
    sums: Tensor  # h COLUMNS DIGITS
    ties: list[list[Tie]]  # of every head, strongest first

    @classmethod
    def empty(cls, name: str, heads: int) -> LayerTally:
        digits = torch.zeros(heads, COLUMNS, exact.DIGITS, dtype=torch.int64, device="cpu")
        return cls(name, digits, [[] for _ in range(heads)])


@dataclass
class Tally:
    """The counts and sums over some documents.

    Attributes:
        examples: Ties that are stored of every head.
        layers: One for each layer of self-attention.
        rows: Rows that were summed: tokens of all sequences.
        followers: Rows with a position before them.
        repeats: Rows whose token occurred before.
        keys: Keys in each bin of positions.
        documents: Number of documents.
        sequences: Number of sequences that they were cut into.
        refused: Attention that was left out: module → reason.
    """

    examples: int
    layers: list[LayerTally] = field(default_factory=list)
    rows: int = 0
    followers: int = 0
    repeats: int = 0
    keys: list[int] = field(default_factory=lambda: [0] * BINS)
    documents: int = 0
    sequences: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        names: Sequence[str],
        heads: Sequence[int],
        parts: Iterable[Sequence[Profile]],
        targets: Tensor,
        places: Sequence[tuple[int, int, str]],
        excerpts: Sequence[Callable[[list[int]], list[str]]] | None,
    ) -> None:
        """Add one pass over sequences of equal length.

        Args:
            names: Of the layers.
            heads: Of each layer.
            parts: The profiles of the layers on the host, some layers at a time, in order.
            targets: ``(b, 1, t, 1)``, as `profile` takes them.
            places: For each sequence its document, its first token there and the name of its source.
            excerpts: For each sequence a function from positions to tokens; None stores no text.
        """
        batch, _, length, _ = targets.shape
        self._check_layers(names, heads)
        self.rows += batch * length
        self.followers += batch * (length - 1)
        self.repeats += int((targets >= 0).sum())
        self.sequences += batch
        self.keys = [a + batch * b for a, b in zip(self.keys, bin_sizes(length), strict=True)]
        remaining = iter(self.layers)
        for profiles in parts:
            self._add_profiles([next(remaining) for _ in profiles], profiles, places, excerpts, length)

    def _add_profiles(
        self, layers: list[LayerTally], profiles: Sequence[Profile], places: Any, excerpts: Any, length: int
    ) -> None:
        # All at once; digits of fewer than 2³¹ sequences add up without a carry.
        numbers_of_pass = torch.cat([p.sums for p in profiles], 1)
        if not bool(numbers_of_pass.isfinite().all()):
            _refuse_nan(layers, profiles, places)
        digits = exact.as_digits(numbers_of_pass).sum(0)
        total = exact.add(torch.cat([layer.sums for layer in layers]), digits)
        sums = total.split([len(layer.ties) for layer in layers])
        for layer, numbers, of_layer in zip(layers, profiles, sums, strict=True):
            layer.sums = of_layer
            if self.examples:
                self._add_ties(layer, numbers, places, excerpts, length)

    def _check_layers(self, names: Sequence[str], heads: Sequence[int]) -> None:
        if not self.layers:
            self.layers = [LayerTally.empty(name, h) for name, h in zip(names, heads, strict=True)]
        expected = [(layer.name, len(layer.ties)) for layer in self.layers]
        if expected != list(zip(names, heads, strict=True)):
            raise ValueError(
                f"every pass must have the same layers; got {list(names)} after {[name for name, _ in expected]}."
            )

    def _add_ties(self, layer: LayerTally, numbers: Profile, places: Any, excerpts: Any, length: int) -> None:
        weights, queries, keys = (x.tolist() for x in (numbers.tie, numbers.query, numbers.key))
        for n, (document, start, source) in enumerate(places):
            for h, ties in enumerate(layer.ties):
                weight = weights[n][h]
                if weight <= 0 or (len(ties) == self.examples and weight < ties[-1].weight):
                    continue
                query, key = queries[n][h], keys[n][h]
                positions = [] if excerpts is None else _excerpt_positions(query, key, length)
                texts = [] if excerpts is None else excerpts[n](positions)
                excerpt = tuple(zip(positions, texts, strict=True))
                tie = Tie(weight, document, start, query, key, source, excerpt)
                layer.ties[h] = strongest([*ties, tie], self.examples)

    def merge(self, other: Tally) -> Tally:
        """The tally of the documents of both: associative and commutative, without rounding."""
        merged = Tally(self.examples)
        for name in ("rows", "followers", "repeats", "documents", "sequences"):
            setattr(merged, name, getattr(self, name) + getattr(other, name))
        merged.keys = [a + b for a, b in zip(self.keys, other.keys, strict=True)]
        merged.refused = dict(sorted((self.refused | other.refused).items()))
        if not self.layers or not other.layers:
            merged.layers = self.layers or other.layers
            return merged
        for part in (self, other):
            merged._check_layers([x.name for x in part.layers], [len(x.ties) for x in part.layers])
        merged.layers = [
            LayerTally(
                a.name,
                exact.add(a.sums, b.sums),
                [strongest([*x, *y], self.examples) for x, y in zip(a.ties, b.ties, strict=True)],
            )
            for a, b in zip(self.layers, other.layers, strict=True)
        ]
        return merged

    def to_json(self) -> dict[str, Any]:
        """As plain values; sums are integers in hexadecimal, in units of 2⁻⁹⁶."""
        fields = {name: getattr(self, name) for name in _COUNTS}
        layers = [
            {"name": layer.name, "sums": [f"{n:x}" for n in exact.as_integers(layer.sums)], "ties": layer.ties}
            for layer in self.layers
        ]
        return {**fields, "layers": layers}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """The inverse of `to_json`, also of values that a file has held."""
        tally = cls(**{name: value[name] for name in _COUNTS})
        for layer in value["layers"]:
            ties = [[_tie(tie) for tie in head] for head in layer["ties"]]
            sums = [int(text, 16) for text in layer["sums"]]
            tally.layers.append(LayerTally(layer["name"], exact.from_integers(sums, (len(ties), COLUMNS)), ties))
        return tally


_COUNTS = ("examples", "rows", "followers", "repeats", "keys", "documents", "sequences", "refused")


def strongest(ties: Iterable[Tie], count: int) -> list[Tie]:
    """The strongest ties, one of each document at most."""
    best: dict[int, Tie] = {}
    for tie in ties:
        if tie.document not in best or tie.rank < best[tie.document].rank:
            best[tie.document] = tie
    return heapq.nsmallest(count, best.values(), key=lambda tie: tie.rank)


def _excerpt_positions(query: int, key: int, length: int) -> list[int]:
    """Positions near the key and near the query."""
    near = (range(max(at - CONTEXT, 0), min(at + CONTEXT + 1, length)) for at in (key, query))
    return sorted({*chain.from_iterable(near)})


def _tie(value: list[Any]) -> Tie:
    weight, document, start, query, key, source, excerpt = value
    return Tie(weight, document, start, query, key, source, tuple((int(at), str(token)) for at, token in excerpt))


def _refuse_nan(layers: list[LayerTally], profiles: Sequence[Profile], places: Any) -> None:
    """Raise ValueError with the layer, head and document of the first weights that are not numbers."""
    for layer, profile in zip(layers, profiles, strict=True):
        bad = (~profile.sums.isfinite()).any(-1).nonzero()  # (sequence, head)
        if len(bad):
            sequence, head = bad[0].tolist()
            document, start, source = places[sequence]
            raise ValueError(
                f"layer {layer.name} of the model has weights that are not numbers: head {head}, document {document} "
                f"({source}), from token {start} on. Its activations are nan or inf there: try it in float32, or leave "
                "that document out."
            )
