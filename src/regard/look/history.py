"""Training histories: the numbers that `regard.watch` reports, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .token_text import printable

__all__ = ["MEASURES", "History", "HistoryLike", "as_history", "head_label", "head_series", "is_history"]

#: (step, numbers) pairs in the order of the steps; numbers are named layer/measure/head.
History = list[tuple[int, dict[str, float]]]

#: The same as users may have it: pairs either way round, or {step: numbers}.
HistoryLike = (
    Sequence[tuple[int, Mapping[str, float]]]
    | Sequence[tuple[Mapping[str, float], int]]
    | Mapping[int, Mapping[str, float]]
)

#: The numbers that `regard.watch` measures of every head, with their titles.
MEASURES = {"entropy_share": "entropy, a share of the most it could be", "max_score": "largest score"}


def is_history(subject: Any) -> bool:
    """Whether this is a training history: pairs of a step and its numbers, either way round, or {step: numbers}."""
    if isinstance(subject, Mapping):
        return bool(subject) and all(isinstance(numbers, Mapping) for numbers in subject.values())
    if not isinstance(subject, Sequence) or isinstance(subject, str):
        return False
    return all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in subject)


def as_history(subject: Any) -> History:
    """Sort a history by its steps, whichever way round its pairs are."""
    pairs = list(subject.items()) if isinstance(subject, Mapping) else [tuple(pair) for pair in subject]
    pairs = [(b, a) if isinstance(a, Mapping) else (a, b) for a, b in pairs]
    if not pairs:
        raise ValueError(
            "a training history needs at least one step, got none: take the history of regard.watch after training."
        )
    return sorted(((int(step), dict(numbers)) for step, numbers in pairs), key=lambda pair: pair[0])


def head_series(history: History, measure: str) -> dict[tuple[str, str], dict[int, float]]:
    """The value of every head at every step that has one, by (layer, head): {step: value}.

    Layers are in the order in which the history names them first, heads in the order of their numbers.
    """
    layers: dict[str, int] = {}
    series: dict[tuple[str, str], dict[int, float]] = {}
    for step, numbers in history:
        for name, value in numbers.items():
            if name.count("/") >= 2:
                layer, kind, head = name.rsplit("/", 2)
                layers.setdefault(layer, len(layers))
                if kind == measure:
                    series.setdefault((layer, head), {})[step] = float(value)
    order = sorted(series, key=lambda pair: (layers[pair[0]], int(pair[1]) if pair[1].isdecimal() else 0))
    return {pair: series[pair] for pair in order}


def head_label(layer: str, head: str) -> str:
    """A head of a history, printable on one line."""
    return printable(f"{layer} {head}", 60)
