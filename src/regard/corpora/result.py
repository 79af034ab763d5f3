"""The result of a corpus run, as tables: numbers of every head, weight by distance, received weight, examples."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ..recorder.head_metrics import Table
from . import exact
from .folder import read_result
from .profile import BINS, EDGES, SUMS
from .tally import LayerTally, Tally, Tie

__all__ = ["Corpus", "CorpusDistance", "CorpusExample", "CorpusHead", "CorpusPosition", "load_corpus"]


class CorpusHead(NamedTuple):
    """A head over a corpus: means over its rows, with standard deviations of entropy, distance and peak.

    Attributes:
        layer: Number of the layer.
        head: Number of the head.
        name: Module of the layer.
        entropy: Of the rows, in nats.
        entropy_std: Its standard deviation over rows.
        distance: ``|i − j|`` over all weight.
        distance_std: Its standard deviation over all weight.
        peak: The largest weight of a row.
        peak_std: Its standard deviation over rows.
        previous: Weight on the position before, over rows that have one.
        first: Weight on the first position, over all other rows.
        induction: Weight on the token after the last occurrence of the row's token, over rows that have one; nan
            where no token occurs twice.

    Example:
        >>> regard.corpora.CorpusHead._fields[:4]
        ('layer', 'head', 'name', 'entropy')
    """

    layer: int
    head: int
    name: str
    entropy: float
    entropy_std: float
    distance: float
    distance_std: float
    peak: float
    peak_std: float
    previous: float
    first: float
    induction: float


class CorpusDistance(NamedTuple):
    """The share of a head's weight at distances ``start ≤ |i − j| < stop``.

    Example:
        >>> regard.corpora.CorpusDistance(0, 1, 2, 4, 0.25).share
        0.25
    """

    layer: int
    head: int
    start: int
    stop: int
    share: float


class CorpusPosition(NamedTuple):
    """The mean weight that a key at positions ``start ≤ j < stop`` of its sequence receives from all rows.

    Example:
        >>> regard.corpora.CorpusPosition(0, 1, 2, 4, 1.5).received
        1.5
    """

    layer: int
    head: int
    start: int
    stop: int
    received: float


class CorpusExample(NamedTuple):
    """A strong weight of a head, from a query to a key that is neither the first nor the query's own.

    Attributes:
        layer: Number of the layer.
        head: Number of the head.
        weight: The weight.
        document: Number of the document in the corpus.
        source: Its line or file.
        query: Position of the query in its document, in tokens.
        key: Position of the key.
        query_token: The token at the query; empty where texts were not stored.
        key_token: The token at the key.
        text: Tokens around both, with … where some are left out.

    Example:
        >>> regard.corpora.CorpusExample._fields[5:7]
        ('query', 'key')
    """

    layer: int
    head: int
    weight: float
    document: int
    source: str
    query: int
    key: int
    query_token: str
    key_token: str
    text: str


class Corpus:
    """The statistics of every head of a model over a corpus: what `regard.corpus` and `regard.load_corpus` return.

    Attributes:
        settings: Of the run: model, data, length, batch, checksums.
        documents: Number of documents.
        sequences: Number of sequences that they were cut into.
        tokens: Number of tokens.
        refused: Attention that was left out: module → reason.

    Example:
        >>> from regard.nn import LanguageModel
        >>> model = LanguageModel(9, dim=8, layers=1, heads=2)
        >>> seen = regard.corpus(model, [[1, 2, 3, 1, 2, 3]])
        >>> seen.heads.columns[3:6]
        ('entropy', 'entropy_std', 'distance')
        >>> round(sum(row.share for row in seen.distances if row.head == 0), 5)
        1.0
    """

    def __init__(self, settings: Mapping[str, object], tally: Tally) -> None:
        self.settings, self.tally = settings, tally
        self.documents, self.sequences, self.tokens = tally.documents, tally.sequences, tally.rows
        self.refused = dict(tally.refused)

    @property
    def heads(self) -> Table[CorpusHead]:
        """Every head with its means and deviations.

        Returns:
            `CorpusHead` rows, by layer and head.

        Example:
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=2)
            >>> regard.corpus(model, [[1, 2, 3, 1, 2, 3]]).heads[1].head
            1
        """
        rows = [
            CorpusHead(n, h, layer.name, *_means(sums, self.tally))
            for n, layer in enumerate(self.tally.layers)
            for h, sums in enumerate(_sums(layer))
        ]
        return Table(CorpusHead._fields, rows)

    @property
    def distances(self) -> Table[CorpusDistance]:
        """Where the weight of every head lies, by distance.

        Returns:
            `CorpusDistance` rows, up to the longest distance with weight in any head.

        Example:
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=1)
            >>> [row.stop for row in regard.corpus(model, [[1, 2, 3, 1, 2, 3]]).distances]
            [1, 2, 4, 8]
        """
        rows = []
        for n, h, sums in self._all_sums():
            bins = sums[len(SUMS) : len(SUMS) + BINS]
            total = sum(bins) or 1
            rows += [CorpusDistance(n, h, EDGES[b], EDGES[b + 1], bins[b] / total) for b in range(self._bins)]
        return Table(CorpusDistance._fields, rows)

    @property
    def received(self) -> Table[CorpusPosition]:
        """The weight that keys receive, by their position in the sequence.

        Returns:
            `CorpusPosition` rows.

        Example:
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=1)
            >>> regard.corpus(model, [[1, 2, 3, 1, 2, 3]]).received[0].start
            0
        """
        rows = []
        for n, h, sums in self._all_sums():
            bins = sums[len(SUMS) + BINS :]
            means = [_ratio(bins[b], self.tally.keys[b]) for b in range(self._bins)]
            rows += [CorpusPosition(n, h, EDGES[b], EDGES[b + 1], mean) for b, mean in enumerate(means)]
        return Table(CorpusPosition._fields, rows)

    @property
    def examples(self) -> Table[CorpusExample]:
        """The strongest ties of every head, one a document.

        Returns:
            `CorpusExample` rows, by layer and head, the strongest first.

        Example:
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=1)
            >>> seen = regard.corpus(model, [[1, 2, 3, 1, 2, 3], [4, 5, 6, 7]])
            >>> sorted(row.document for row in seen.examples)
            [0, 1]
        """
        rows = [
            _example(n, h, tie)
            for n, layer in enumerate(self.tally.layers)
            for h, ties in enumerate(layer.ties)
            for tie in ties
        ]
        return Table(CorpusExample._fields, rows)

    def html(self) -> str:
        """The atlas of heads as a page.

        Returns:
            One HTML document that needs no network, no script and no other file.

        Example:
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=1)
            >>> regard.corpus(model, [[1, 2, 3, 1, 2, 3]]).html()[:15]
            '<!doctype html>'
        """
        return str(import_module("regard.look.corpus_page").corpus_page(self))

    def json(self) -> str:
        """All tables for other programs.

        Returns:
            One JSON object: `settings`, `documents`, `sequences`, `tokens`, `refused`, and the rows of `heads`,
            `distances`, `received` and `examples` as objects. A number that is nan is null.

        Example:
            >>> import json
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=2)
            >>> seen = json.loads(regard.corpus(model, [[1, 2, 3, 4]]).json())
            >>> seen["tokens"], seen["heads"][1]["head"], seen["heads"][1]["induction"]
            (4, 1, None)
        """
        names = ("heads", "distances", "received", "examples")
        counts = {"documents": self.documents, "sequences": self.sequences, "tokens": self.tokens}
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in names}
        fields = {"settings": dict(self.settings), **counts, "refused": self.refused, **rows}
        return str(import_module("regard.look.command").to_json(fields))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the atlas of heads.

        Args:
            path: A .html file.

        Example:
            >>> import pathlib, tempfile
            >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=1)
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "atlas.html"
            >>> regard.corpus(model, [[1, 2, 3, 1, 2, 3]]).save(file)
            >>> file.stat().st_size > 1000
            True
        """
        from .._io import atomic_write

        file = Path(path)
        if file.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"save(path) writes .html; got {file.name!r}.")
        atomic_write(file, [self.html().encode()])

    def _all_sums(self) -> list[tuple[int, int, list[int]]]:
        return [(n, h, sums) for n, layer in enumerate(self.tally.layers) for h, sums in enumerate(_sums(layer))]

    @property
    def _bins(self) -> int:
        """Bins up to the last that holds a key."""
        return max((b for b, keys in enumerate(self.tally.keys) if keys), default=-1) + 1

    def __repr__(self) -> str:
        about = (
            f"{self.settings['model']} over {self.documents:,} documents, {self.sequences:,} sequences, "
            f"{self.tokens:,} tokens"
        )
        return f"{about}\n{self.heads!r}"


def load_corpus(path: str | os.PathLike[str]) -> Corpus:
    """Read the result of a corpus run.

    Args:
        path: The folder of the run, or its `corpus.json`.

    Returns:
        The `Corpus`.

    Raises:
        FileNotFoundError: The run is not complete, or there is none.
        ValueError: The file is damaged.

    Example:
        >>> import tempfile
        >>> model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=1)
        >>> folder = tempfile.mkdtemp()
        >>> _ = regard.corpus(model, [[1, 2, 3, 1, 2, 3]], folder)
        >>> regard.load_corpus(folder).tokens
        6
    """
    return Corpus(*read_result(Path(path)))


def _sums(layer: LayerTally) -> list[list[int]]:
    """The sums of every head, in units of 1 / exact.UNIT."""
    flat = exact.as_integers(layer.sums)
    columns = layer.sums.shape[1]
    return [flat[n : n + columns] for n in range(0, len(flat), columns)]


def _ratio(total: int, count: int) -> float:
    return float(Fraction(total, exact.UNIT * count)) if count else math.nan


def _means(sums: list[int], tally: Tally) -> list[float]:
    """The numbers of `CorpusHead`; sums and moments are exact, and each result is rounded once."""
    named = dict(zip(SUMS, sums, strict=False))
    weight = Fraction(named["weight"], exact.UNIT)
    return [
        *_moments(named["entropy"], named["entropy²"], Fraction(tally.rows)),
        *_moments(named["distance"], named["distance²"], weight),
        *_moments(named["peak"], named["peak²"], Fraction(tally.rows)),
        _ratio(named["previous"], tally.followers),
        _ratio(named["first"], tally.followers),
        _ratio(named["induction"], tally.repeats),
    ]


def _moments(first: int, second: int, count: Fraction) -> tuple[float, float]:
    """Mean and standard deviation, from the sums of values and of their squares."""
    if not count:
        return math.nan, math.nan
    mean, square = Fraction(first, exact.UNIT) / count, Fraction(second, exact.UNIT) / count
    return float(mean), math.sqrt(max(Fraction(0), square - mean * mean))


def _example(layer: int, head: int, tie: Tie) -> CorpusExample:
    tokens, text, last = dict(tie.excerpt), "", None
    for at, token in tie.excerpt:
        text += f" … {token}" if last is not None and at > last + 1 else f" {token}"
        last = at
    return CorpusExample(
        layer, head, tie.weight, tie.document, tie.source, tie.start + tie.query, tie.start + tie.key,
        tokens.get(tie.query, ""), tokens.get(tie.key, ""), text.strip(),
    )  # fmt: skip
