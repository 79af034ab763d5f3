"""One word lit: the heads that tie it to another word, and the weights it gives in them; and the ties of all words.

`spotlight` lights one word, `overview` summarises all of them. Long inputs are ranked against a sample of their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..recorder.head_metrics import BY
from .layers import LayerView, Subject, batch_note, layers_of, select_layers, unknown_note
from .ranking import beyond_habit, beyond_sample, nan_note, sort_key
from .token_groups import TokenGroups, group_tokens
from .token_text import is_special, resolve

__all__ = ["HeadTie", "Overview", "Spotlight", "WordTie", "overview", "spotlight"]

#: Rows that stand for all rows of a long input.
SAMPLE_ROWS = 64


@dataclass(frozen=True)
class HeadTie:
    """One head and the word that it ties the lit word to."""

    layer: int
    head: int
    key: int | None  # among the words of the columns; None if the lit word has no weight on any of them
    weight: float
    beyond: float  # the weight beyond what the head gives that key, or that distance, anyway


@dataclass(frozen=True)
class Spotlight:
    """A lit word, the heads that matter for it, and the weights it gives in the first of them."""

    word: str
    position: int  # among the words of the rows
    rows: TokenGroups
    cols: TokenGroups
    same: bool  # whether rows and columns are one sequence
    ranking: list[HeadTie]  # every head, most telling first
    heads: list[HeadTie]  # those that are shown
    weights: list[list[float]]  # of every shown head, one number a word
    hidden: list[float]  # of every shown head, the weight on hidden tokens before it was spread over the others
    target: int | None  # the word to rank the heads by, among the words of the columns
    alone: bool  # whether there is no other word; heads are then ranked by their largest weight
    layers: dict[int, LayerView]
    notes: list[str]

    @property
    def next_word(self) -> str | None:
        """The word that the lit row of a decoder chooses: the one after it; None for any other row."""
        rows = self.rows.labels
        writes = next(iter(self.layers.values())).writes and self.position + 1 < len(rows)
        return rows[self.position + 1] if writes else None

    def headline_key(self, n: int) -> int | None:
        """The word to name in the headline of the n-th shown head: the target, or the word that the lit one is tied to.

        If no word has more weight than habit gives it, the word with the most weight; None if none has any.
        """
        if self.target is not None:
            return self.target
        tie = self.heads[n]
        if tie.key is None or tie.beyond > 0:
            return tie.key
        return max(range(len(self.weights[n])), key=self.weights[n].__getitem__)


@torch.no_grad()
def spotlight(
    subject: Subject,
    word: str | int,
    *,
    target: str | int | None = None,
    layer: int | str | None = None,
    head: int | None = None,
    hide_special: bool = False,
    merge: bool = False,
    item: int = 0,
    count: int = 2,
) -> Spotlight:
    """Light a word: rank the heads by how they tie it to another word.

    Args:
        subject: A recording or a `Weights`.
        word: The word, by name ("it", "the:2") or position.
        target: Rank the heads by the weight on this word instead.
        layer: Only this layer, by position or name.
        head: Only this head.
        hide_special: Leave special tokens out; the other weights are scaled up.
        merge: Join the pieces of a word.
        item: Which sequence of a batch.
        count: How many heads to show: the best, then the best of those that look at another word.
    """
    layers = select_layers(layers_of(subject, item), layer, head)
    layers, position = _layers_with_word(layers, word, hide_special, merge)
    rows = group_tokens(layers[0].rows, hide_special=hide_special, merge=merge)
    cols = group_tokens(layers[0].cols, hide_special=hide_special, merge=merge)
    key = None if target is None else cols.resolve(target)
    alone = key is None and not _has_other_word(cols, position if layers[0].same else None)
    ranking = [
        tie
        for view in layers
        for tie in _ties_of_word(view, rows, cols, position, key, alone)
        if head is None or tie.head == head % view.heads
    ]
    ranking.sort(key=lambda tie: sort_key(tie.beyond if target is None else tie.weight))
    heads = ranking[:1] if head is not None else _first_heads(ranking, count, varied=target is None)
    by_index = {view.index: view for view in layers}
    weights = [cols.word_weights(_word_row(by_index[tie.layer], rows, position)[tie.head]) for tie in heads]
    return Spotlight(
        word=rows.labels[position],
        position=position,
        rows=rows,
        cols=cols,
        same=layers[0].same,
        ranking=ranking,
        heads=heads,
        weights=[w.tolist() for w, _ in weights],
        hidden=[float(hidden) for _, hidden in weights],
        target=key,
        alone=alone,
        layers=by_index,
        notes=[
            *batch_note(subject, item),
            *unknown_note(layers),
            *nan_note(sum(tie.weight != tie.weight for tie in ranking), len(ranking)),
        ],
    )


def _has_other_word(cols: TokenGroups, position: int | None) -> bool:
    """Whether a word can be tied to another one that is not special."""
    return any(j != position and not is_special(label) for j, label in enumerate(cols.labels))


def _layers_with_word(
    layers: list[LayerView], word: str | int, hide_special: bool, merge: bool
) -> tuple[list[LayerView], int]:
    """The layers whose rows have a word, and its position; cross-attention comes first."""
    by_sequence: dict[tuple[object, ...], list[LayerView]] = {}
    for view in sorted(layers, key=lambda view: view.kind != "cross"):
        by_sequence.setdefault((view.rows, view.cols, view.kind), []).append(view)
    errors: list[LookupError] = []
    for views in by_sequence.values():
        labels = group_tokens(views[0].rows, hide_special=hide_special, merge=merge).labels
        try:
            return views, resolve(labels, word)
        except LookupError as error:
            errors.append(error)
    # A word that occurs twice or is several tokens is more to the point than a sequence that lacks it, however long.
    raise max(errors, key=lambda error: ("is not among" not in str(error), len(str(error))))


def _first_heads(ranking: list[HeadTie], count: int, varied: bool) -> list[HeadTie]:
    """The best head, then, if `varied`, the best of those that look at other words."""
    first: list[HeadTie] = []
    for tie in ranking:
        if len(first) < count and (not varied or all(tie.key != other.key for other in first)):
            first.append(tie)
    return (first + [tie for tie in ranking if tie not in first])[:count]


def _word_row(view: LayerView, rows: TokenGroups, position: int) -> Tensor:
    """The row of a word in every head, (h, j): the mean over its tokens."""
    group = rows.groups[position]
    return view.weights[..., group, :].mean(-2)


def _ties_of_word(
    view: LayerView, rows: TokenGroups, cols: TokenGroups, position: int, target: int | None, alone: bool
) -> list[HeadTie]:
    """Every head of a layer with the target or, without one, the best key of a word."""
    w, _ = cols.word_weights(_word_row(view, rows, position))  # h n
    if target is not None:
        return [HeadTie(view.index, h, target, x, x) for h, x in enumerate(w[:, target].tolist())]
    if alone:
        beyond, keys = w.max(-1)
    elif view.fits_dense:
        best = beyond_habit(_word_matrix(view, rows, cols), _special(cols), view.same)
        beyond, keys = best.beyond[:, position], best.key[:, position]
    else:
        beyond, keys = beyond_sample(w, position, *_sample_rows(view, rows, cols), _special(cols), view.same)
    weights = w.gather(-1, keys.unsqueeze(-1))[:, 0].tolist()
    return [
        HeadTie(view.index, h, key if weight != 0 else None, weight, more)
        for h, (key, weight, more) in enumerate(zip(keys.tolist(), weights, beyond.tolist(), strict=True))
    ]


def _special(cols: TokenGroups) -> list[bool]:
    return [is_special(label) for label in cols.labels]


def _word_matrix(view: LayerView, rows: TokenGroups, cols: TokenGroups) -> Tensor:
    """All weights of a layer in words, (h, n, m)."""
    w, _ = cols.word_weights(view.weights.dense())
    return rows.mean_rows(w)


def _sample_rows(view: LayerView, rows: TokenGroups, cols: TokenGroups) -> tuple[list[int], Tensor]:
    """Evenly spread words of a long input and their weights, (h, s, m), in one pass over the keys."""
    sample = torch.linspace(0, len(rows.labels) - 1, SAMPLE_ROWS).long().unique().tolist()
    groups = [range(rows.groups[n].start, rows.groups[n].stop) for n in sample]
    w = view.weights[..., [token for group in groups for token in group], :]
    ends = itertools.accumulate(map(len, groups), initial=0)
    means = [w[:, start:end].mean(-2) for start, end in itertools.pairwise(ends)]
    return sample, cols.word_weights(torch.stack(means, 1))[0]


# Every word.


@dataclass(frozen=True)
class WordTie:
    """A word, the word it is tied to most, and the head that ties them."""

    word: int  # among the words of the rows
    key: int  # among the words of the columns
    head: HeadTie


@dataclass(frozen=True)
class Overview:
    """The strongest tie of every word, and the heads that do one thing."""

    layers: list[LayerView]
    rows: TokenGroups
    cols: TokenGroups
    ties: list[WordTie]  # strongest first; empty if there is only one word
    metrics: dict[str, list[tuple[int, int, float]]]  # metric → (layer, head, value), most telling first
    notes: list[str]


@torch.no_grad()
def overview(
    subject: Subject,
    *,
    layer: int | str | None = None,
    head: int | None = None,
    hide_special: bool = False,
    merge: bool = False,
    item: int = 0,
    metrics: bool = True,
) -> Overview:
    """The strongest tie of every word and, with `metrics`, every head by every metric."""
    layers = select_layers(layers_of(subject, item), layer, head)
    first = next((view for view in layers if view.kind == "cross"), layers[0])
    alike = [view for view in layers if (view.rows, view.cols, view.kind) == (first.rows, first.cols, first.kind)]
    rows = group_tokens(first.rows, hide_special=hide_special, merge=merge)
    cols = group_tokens(first.cols, hide_special=hide_special, merge=merge)
    ties, nan_heads = _word_ties(alike, rows, cols, head)
    heads = sum(view.heads for view in alike) if head is None else len(alike)
    notes = [*batch_note(subject, item), *unknown_note(alike), *nan_note(nan_heads, heads)]
    return Overview(layers, rows, cols, ties, _head_metrics(alike) if metrics else {}, notes)


def _word_ties(
    layers: list[LayerView], rows: TokenGroups, cols: TokenGroups, head: int | None
) -> tuple[list[WordTie], int]:
    """The strongest tie of every word, or of a sample of a long input; and how many heads have NaN.

    Words that see few others, as the first ones of a causal text, come last: one of two keys always gets half.
    """
    best: dict[int, WordTie] = {}
    nan_heads: set[tuple[int, int]] = set()
    seen: dict[int, int] = {}  # how many keys a word sees
    for view in layers:
        heads = range(view.heads) if head is None else [head % view.heads]
        for position, w, keys, beyond in _best_keys_of_words(view, rows, cols):
            nan_heads |= {(view.index, h) for h in heads if beyond[h] != beyond[h]}
            seen[position] = max(seen.get(position, 0), int((w > 0).sum(-1).max()))
            label = rows.labels[position]
            if not _has_other_word(cols, position if view.same else None):
                continue
            if is_special(label) or not any(letter.isalnum() for letter in label):
                continue  # special tokens and punctuation
            h = min(heads, key=lambda h: sort_key(beyond[h]))
            if beyond[h] > -float("inf") and (position not in best or beyond[h] > best[position].head.beyond):
                tie = HeadTie(view.index, h, keys[h], float(w[h, keys[h]]), beyond[h])
                best[position] = WordTie(position, keys[h], tie)
    most = max(seen.values(), default=0)
    few = min(most, max(3, -(-most // 3)))
    return sorted(best.values(), key=lambda tie: (seen[tie.word] < few, -tie.head.beyond)), len(nan_heads)


def _best_keys_of_words(
    view: LayerView, rows: TokenGroups, cols: TokenGroups
) -> Iterator[tuple[int, Tensor, list[int], list[float]]]:
    """Of every word, or of a sample: its position, its weights (h, m), and the best key of every head with `beyond`."""
    special = _special(cols)
    if view.fits_dense:
        w = _word_matrix(view, rows, cols)
        best = beyond_habit(w, special, view.same)
        for position in range(len(rows.labels)):
            yield position, w[:, position], best.key[:, position].tolist(), best.beyond[:, position].tolist()
        return
    sample, sample_weights = _sample_rows(view, rows, cols)
    for n, position in enumerate(sample):
        w = sample_weights[:, n]
        best = beyond_sample(w, position, sample, sample_weights, special, view.same)
        yield position, w, best.key.tolist(), best.beyond.tolist()


def _head_metrics(layers: list[LayerView]) -> dict[str, list[tuple[int, int, float]]]:
    """The heads by every metric, most telling first; metrics that do not apply are left out."""
    tables: dict[str, list[tuple[int, int, float]]] = {}
    for name, metric in BY.items():
        if name == "entropy_without_sink":  # the overview shows one entropy, that of `Weights.entropy`
            continue
        table: list[tuple[int, int, float]] = []
        for view in layers:
            if not view.fits_dense or (view.kind == "cross" and name not in ("entropy", "sink")):
                continue
            try:
                values = metric(view.weights)
            except ValueError:  # no word occurs twice, or there are no positions to compare
                continue
            table += [(view.index, h, x) for h, x in enumerate(values.tolist()) if x == x]
        if table:
            tables[name] = sorted(table, key=lambda row: row[2] if name == "entropy" else -row[2])
    return tables
