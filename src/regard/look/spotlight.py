"""One word lit: which heads tie it to another word, and whom it looks at in them.

What is looked at, a recording or a `Weights`, becomes `Sheet`s, one a layer; `spotlight` finds the lit word, ranks the
heads and reads the rows, tokens merged and special ones hidden as asked; `overview` does it for every word; `series`
reads a training history. Rows only, or a sample of them, where the input is long: never t × t.
Imports `ranking`, `words`, and the recorder's `part` and `tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.weights import Weights
from ..recorder import Recording
from ..recorder.head_metrics import BY
from ..recorder.slicing import span_of
from .ranking import beyond_habit, unknown_in
from .token_groups import Reading, reading
from .token_text import is_special, resolve, shown

__all__ = [
    "WATCHED",
    "Head",
    "Overview",
    "Sheet",
    "Spot",
    "is_history",
    "overview",
    "sequence_of",
    "series",
    "sheets",
    "spotlight",
]

#: Cells of a layer up to which its heads are ranked on the whole matrix.
DENSE = 2**22
#: Rows that stand for all of them beyond that.
SAMPLE = 64


@dataclass(frozen=True)
class Sheet:
    """One layer of what is looked at, as one sequence."""

    index: int
    name: str
    kind: str  # "self" or "cross"
    weights: Weights  # h i j
    values: Tensor | None = field(repr=False)  # g j e
    rows: tuple[str, ...] = field(repr=False)
    cols: tuple[str, ...] = field(repr=False)

    @property
    def heads(self) -> int:
        return self.weights.shape[0]

    @property
    def same(self) -> bool:
        """Whether rows and columns are one sentence; with a cache the rows are the end of it only."""
        return self.kind == "self" and self.rows == self.cols

    @property
    def small(self) -> bool:
        return self.weights.shape.numel() <= DENSE

    def place(self, head: int) -> str:
        """Where a head stands, for people; nothing where there is only one."""
        if not self.name:
            return f"head {head}" if self.heads > 1 else ""
        kind = "cross-attention, " if self.kind == "cross" else ""
        return f"{kind}layer {self.index}, head {head}"

    def values_of(self, head: int) -> Tensor | None:
        """The value vectors that a head mixes, (j, e); heads may share them."""
        return None if self.values is None else self.values[head * self.values.shape[0] // self.heads]


@dataclass(frozen=True)
class Head:
    """One head and the word that the lit one is tied to in it."""

    layer: int
    head: int
    key: int  # among the words of the columns
    weight: float
    beyond: float  # the weight beyond what the head gives that key, or that distance, anyway


@dataclass(frozen=True)
class Spot:
    """A lit word, the heads that matter for it, best first, and the rows of those that are shown."""

    word: str
    at: int  # among the words of the rows
    rows: Reading
    cols: Reading
    same: bool  # whether rows and columns are one sequence
    heads: list[Head]
    shown: list[Head]
    weights: list[list[float]]  # of every shown head, one number a word
    hidden: list[float]  # the weight that hidden tokens had, before the rest was renormalised
    to: int | None  # the word that was asked for, among the words of the columns
    alone: bool  # whether there is no other word; heads are then ranked by the weight they give most
    layers: dict[int, Sheet]
    notes: list[str]  # what must be said besides


def sheets(subject: Any, item: int = 0) -> list[Sheet]:
    """The layers of a recording, or a `Weights` as the only one."""
    if isinstance(subject, Weights):
        if 0 in subject.shape:
            raise ValueError(f"there is nothing to see in weights of shape {tuple(subject.shape)}.")
        return [_of_weights(subject, item)]
    if not isinstance(subject, Recording):
        raise TypeError(f"a Recording or a Weights can be looked at; {type(subject).__name__} came.")
    if not subject.layers:
        subject.layer(0)  # says what was refused
    if all(layer.saved is None for layer in subject.layers):
        _ = subject.layers[0].weights  # says that only numbers were kept
    return [_of_layer(layer, place, item) for place, layer in enumerate(subject.layers) if layer.saved is not None]


def _of_layer(layer: Any, place: int, item: int) -> Sheet:
    whole = layer.weights
    one = whole[0] if whole.shape[0] == 1 else layer.sequence(item)
    values = layer.values
    if values is not None:
        values = values[0] if whole.shape[0] == 1 else values[item][:, span_of(whole, item)]
    return Sheet(place, layer.name, layer.kind, one, values, *_labels(one))


def _of_weights(weights: Weights, item: int) -> Sheet:
    if weights.ndim == 2:
        weights = Weights(weights._factors, weights._engine, one_head=False, tokens=weights._tokens)
    for place in place_of(item, weights.shape[:-3]):
        weights = weights[place]
    rows, cols = _labels(weights)
    kind = "self" if rows == cols else "cross"
    return Sheet(0, "", kind, weights, None, rows, cols)


def place_of(item: int, batch: torch.Size) -> list[int]:
    """Where a sequence stands among all batch axes, counted as one."""
    if batch and not -batch.numel() <= item < batch.numel():
        raise IndexError(f"item {item} is out of range for {batch.numel()} sequences.")
    return [item % batch.numel() // batch[n + 1 :].numel() % size for n, size in enumerate(batch)]


def _labels(weights: Weights) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = weights.tokens
    i, j = weights.shape[-2:]
    return given[0] or tuple(map(str, range(i))), given[1] or tuple(map(str, range(j)))


# One word.


@torch.no_grad()
def spotlight(
    subject: Any,
    word: str | int,
    *,
    to: str | int | None = None,
    layer: int | str | None = None,
    head: int | None = None,
    hide_special: bool = False,
    merge: bool = False,
    item: int = 0,
    count: int = 2,
) -> Spot:
    """Light a word: the heads that matter for it, best first, and whom it looks at in the first `count` of them.

    to      rank the heads by the weight on this word
    layer   only this one; with `head`, only that head is shown
    item    which sequence of a batch
    """
    chosen, at = _holding(chosen_layers(sheets(subject, item), layer), word, hide_special, merge)
    rows = reading(chosen[0].rows, hide_special=hide_special, merge=merge)
    cols = reading(chosen[0].cols, hide_special=hide_special, merge=merge)
    target = None if to is None else cols.resolve(to)
    alone = target is None and not _others(cols, at if chosen[0].same else None)
    ranked: list[Head] = []
    for sheet in chosen:
        check_head(sheet, head)
        found = _ranked(sheet, rows, cols, at, target, alone)
        ranked += found if head is None else [one for one in found if one.head == head % sheet.heads]
    unknown = sum(one.weight != one.weight for one in ranked)
    ranked.sort(key=lambda one: -_or_least(one.beyond if to is None else one.weight))
    first = ranked[:1] if head is not None else _first(ranked, count, to is None)
    by_index = {sheet.index: sheet for sheet in chosen}
    read = [cols.shares(_row(by_index[one.layer], rows, at)[one.head]) for one in first]
    return Spot(
        rows.labels[at], at, rows, cols, chosen[0].same, ranked, first,
        [w.tolist() for w, _ in read], [float(took) for _, took in read], target, alone, by_index,
        [*sequence_of(subject, item), *unknown_in(unknown, len(ranked))],
    )  # fmt: skip


def _others(cols: Reading, at: int | None) -> bool:
    """Whether a word can be tied to another one, which is not special."""
    return any(j != at and not is_special(label) for j, label in enumerate(cols.labels))


def _or_least(x: float) -> float:
    """A number to order by; what is none comes last."""
    return x if x == x else -float("inf")


def sequence_of(subject: Any, item: int) -> list[str]:
    """Of a batch, that one sequence is shown, and which."""
    if isinstance(subject, Weights):
        batch = subject.shape[:-3].numel()
    else:
        batch = max((layer.shape[0] for layer in subject.layers), default=1)
    return [f"Sequence {item % batch} of a batch of {batch}."] if batch > 1 else []


def chosen_layers(all_: list[Sheet], layer: int | str | None) -> list[Sheet]:
    """The layer that was asked for, or all of them."""
    if layer is None:
        return all_
    last = all_[-1].index
    if isinstance(layer, str):
        found = [sheet for sheet in all_ if sheet.name == layer or sheet.name.endswith("." + layer)]
    else:
        found = [sheet for sheet in all_ if sheet.index == (layer if layer >= 0 else last + 1 + layer)]
    if len(found) != 1:
        there = "only layer 0 is there" if last == 0 else f"the layers are 0 to {last}"
        named = f" ({shown(all_[0].name)} …)" if isinstance(layer, str) and all_[0].name else ""
        raise LookupError(f"layer {shown(str(layer))} was asked for; {there}{named}.")
    return found


def check_head(sheet: Sheet, head: int | None) -> None:
    if head is not None and not -sheet.heads <= head < sheet.heads:
        there = (
            "only head 0 is there"
            if sheet.heads == 1
            else f"the heads of layer {sheet.index} are 0 to {sheet.heads - 1}"
        )
        raise LookupError(f"head {head} was asked for; {there}.")


def _holding(all_: list[Sheet], word: str | int, hide_special: bool, merge: bool) -> tuple[list[Sheet], int]:
    """The layers whose rows hold a word, and where; of several sentences that the decoder writes comes first."""
    by_sentence: dict[tuple[Any, ...], list[Sheet]] = {}
    for sheet in sorted(all_, key=lambda sheet: sheet.kind != "cross"):
        by_sentence.setdefault((sheet.rows, sheet.cols, sheet.kind), []).append(sheet)
    wrong: LookupError | None = None
    for (rows, _, _), found in by_sentence.items():
        try:
            return found, resolve(reading(rows, hide_special=hide_special, merge=merge).labels, word)
        except LookupError as why:
            # A word that occurs twice is more to the point than a sentence that lacks it.
            wrong = why if wrong is None or "occurs" in str(why) else wrong
    assert wrong is not None, "there is a layer"
    raise wrong


def _first(ranked: list[Head], count: int, varied: bool) -> list[Head]:
    """The heads to show: the best, then the best of those that look at another word."""
    shown: list[Head] = []
    for one in ranked:
        if len(shown) < count and (not varied or all(one.key != other.key for other in shown)):
            shown.append(one)
    return (shown + [one for one in ranked if one not in shown])[:count]


def _row(sheet: Sheet, rows: Reading, at: int) -> Tensor:
    """How a word looks in every head, (h, j): the mean over its tokens."""
    group = rows.groups[at]
    # A list, not a slice: a slice of all rows would be a Weights again.
    return sheet.weights[..., list(range(group.start, group.stop)), :].mean(-2)


def _ranked(sheet: Sheet, rows: Reading, cols: Reading, at: int, target: int | None, alone: bool) -> list[Head]:
    """Every head of a layer with the key that it gives most to beyond habit, or with the key that was asked for.

    alone   there is no other word: the key that is given most, whatever it is
    """
    special = [is_special(label) for label in cols.labels]
    w, _ = cols.shares(_row(sheet, rows, at))  # h n
    if target is not None:
        return [Head(sheet.index, h, target, float(w[h, target]), float(w[h, target])) for h in range(sheet.heads)]
    if alone:
        beyond, keys = w.max(-1)
    elif sheet.small:
        best = beyond_habit(_folded(sheet, rows, cols), special, sheet.same)
        keys, beyond = best.key[:, at], best.beyond[:, at]
    else:
        keys, beyond = _beyond_sample(sheet, _sample(sheet, rows, cols), w, at, special)
    return [
        Head(sheet.index, h, key, float(w[h, key]), more)
        for h, (key, more) in enumerate(zip(keys.tolist(), beyond.tolist(), strict=True))
    ]


def _folded(sheet: Sheet, rows: Reading, cols: Reading) -> Tensor:
    """The whole layer in words, (h, n, m)."""
    w, _ = cols.shares(sheet.weights.dense())
    return rows.rows(w.mT).mT


def _sample(sheet: Sheet, rows: Reading, cols: Reading) -> tuple[list[int], Tensor]:
    """Some words, evenly spread, and how they look, (h, s, m): they tell the habits of a long input's heads."""
    some = torch.linspace(0, len(rows.labels) - 1, SAMPLE).long().unique().tolist()
    return some, torch.stack([cols.shares(_row(sheet, rows, at))[0] for at in some], 1)


def _beyond_sample(
    sheet: Sheet, sample: tuple[list[int], Tensor], w: Tensor, at: int, special: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """For one row (h, m) of a long input: the key with the most weight beyond habit, and how much that is, (h,)."""
    others = [n for n, other in enumerate(sample[0]) if other != at]
    looks, m = sample[1][:, others].nan_to_num(), w.shape[-1]
    habit = looks.sum(1) / (looks > 0).sum(1).clamp(min=1)  # over the rows that may look there
    barred = torch.tensor(special, dtype=w.dtype, device=w.device) * 2
    if sheet.same:
        # The key at the same distance from each sampled row, where there is one.
        stand = torch.tensor([sample[0][n] for n in others], device=w.device).unsqueeze(-1)
        place = torch.arange(m, device=w.device) - at + stand  # s m
        there = (place >= 0) & (place < m)
        near = looks.gather(2, place.clamp(0, m - 1).expand(sheet.heads, -1, -1)) * there
        habit = torch.maximum(habit, near.sum(1) / (near > 0).sum(1).clamp(min=1))
        barred[at] += 2
    best = (w - habit - barred).max(-1)
    return best.indices, best.values


# Every word.


@dataclass(frozen=True)
class Link:
    """A word, the word it is tied to most, and the head that ties them."""

    word: int
    head: Head


@dataclass(frozen=True)
class Overview:
    """What a whole recording shows: for every word its strongest tie, and heads that do one thing."""

    sheets: list[Sheet]
    rows: Reading
    cols: Reading
    links: list[Link]  # strongest first; none where there is one word only
    measured: dict[str, list[tuple[int, int, float]]]  # measure → (layer, head, number), best first
    notes: list[str]  # what must be said besides


@torch.no_grad()
def overview(
    subject: Any,
    *,
    layer: int | str | None = None,
    head: int | None = None,
    hide_special: bool = False,
    merge: bool = False,
    item: int = 0,
) -> Overview:
    """The strongest tie of every word, and the heads that stand out."""
    chosen = chosen_layers(sheets(subject, item), layer)
    for sheet in chosen:
        check_head(sheet, head)
    cross = [sheet for sheet in chosen if sheet.kind == "cross"]
    first = (cross or chosen)[0]
    main = [sheet for sheet in chosen if (sheet.rows, sheet.cols, sheet.kind) == (first.rows, first.cols, first.kind)]
    rows = reading(first.rows, hide_special=hide_special, merge=merge)
    cols = reading(first.cols, hide_special=hide_special, merge=merge)
    links, unknown = _links(main, rows, cols, head)
    heads = sum(sheet.heads for sheet in main) if head is None else len(main)
    notes = [*sequence_of(subject, item), *unknown_in(unknown, heads)]
    return Overview(chosen, rows, cols, links, _measured(main), notes)


def _links(main: list[Sheet], rows: Reading, cols: Reading, head: int | None) -> tuple[list[Link], int]:
    """The strongest tie of every word, or of some of a long input, strongest first; how many heads are not numbers."""
    special = [is_special(label) for label in cols.labels]
    best: dict[int, Link] = {}
    unknown: set[tuple[int, int]] = set()
    for sheet in main:
        heads = range(sheet.heads) if head is None else [head % sheet.heads]
        for at, w, keys, beyond in _looks(sheet, rows, cols, special):
            unknown |= {(sheet.index, h) for h in heads if beyond[h] != beyond[h]}
            if not _others(cols, at if sheet.same else None):
                continue
            if is_special(rows.labels[at]) or not any(letter.isalnum() for letter in rows.labels[at]):
                continue  # marks and signs are no words
            h = max(heads, key=lambda h: _or_least(beyond[h]))
            if beyond[h] == beyond[h] and (at not in best or beyond[h] > best[at].head.beyond):
                best[at] = Link(at, Head(sheet.index, h, keys[h], float(w[h, keys[h]]), beyond[h]))
    return sorted(best.values(), key=lambda link: -link.head.beyond), len(unknown)


def _looks(
    sheet: Sheet, rows: Reading, cols: Reading, special: Sequence[bool]
) -> Iterator[tuple[int, Tensor, list[int], list[float]]]:
    """Of every word, or of a sample: where it stands, its row (h, m), and every head's key with the weight beyond."""
    if sheet.small:
        w = _folded(sheet, rows, cols)
        best = beyond_habit(w, special, sheet.same)
        for at in range(len(rows.labels)):
            yield at, w[:, at], best.key[:, at].tolist(), best.beyond[:, at].tolist()
        return
    sample = _sample(sheet, rows, cols)
    for n, at in enumerate(sample[0]):
        row = sample[1][:, n]
        keys, beyond = _beyond_sample(sheet, sample, row, at, special)
        yield at, row, keys.tolist(), beyond.tolist()


def _measured(main: list[Sheet]) -> dict[str, list[tuple[int, int, float]]]:
    """For every measure the heads, most telling first; measures that do not apply are left out."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for name, measure in BY.items():
        if name == "entropy_without_sink":  # the overview shows one entropy, that of `Weights.entropy`
            continue
        numbers: list[tuple[int, int, float]] = []
        for sheet in main:
            if not sheet.small or (sheet.kind == "cross" and name not in ("entropy", "sink")):
                continue
            try:
                values = measure(sheet.weights)
            except ValueError:  # no word occurs twice; no positions to compare
                continue
            numbers += [(sheet.index, h, x) for h, x in enumerate(values.tolist()) if x == x]
        if numbers:
            found[name] = sorted(numbers, key=lambda row: row[2] if name == "entropy" else -row[2])
    return found


# Training.

#: What `regard.watch` tells of every head.
WATCHED = {"entropy_share": "entropy, a share of the most it could be", "max_score": "largest score"}

History = Sequence[tuple[int, dict[str, float]]]


def is_history(subject: Any) -> bool:
    """Whether this is a training history: pairs of a step and what `regard.watch` told then."""
    return isinstance(subject, list) and bool(subject) and all(isinstance(pair, tuple | list) for pair in subject)


def series(history: History, kind: str) -> dict[str, list[tuple[int, float]]]:
    """Of every head, "layer head", what it was at every step: numbers are named layer/kind/head."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, numbers in history:
        for name, value in numbers.items():
            *layer, what, head = name.split("/") if name.count("/") > 1 else ("", "", "")
            if what == kind:
                found.setdefault(shown(f"{'/'.join(layer)} {head}", 60), []).append((step, value))
    return found
