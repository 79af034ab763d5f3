"""The page of a training history: entropy and largest score of every head over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..history import MEASURES, History, head_series
from ..token_text import printable
from .format import Packed, Packer, regard_version

if TYPE_CHECKING:
    from ...learn.patterns import PatternLog

__all__ = ["pack_history"]


def pack_history(
    history: History,
    title: str | None,
    notes: Sequence[str] = (),
    texts: Sequence[tuple[str, str]] = (),
    patterns: PatternLog | None = None,
) -> Packed:
    """Pack a training history for a page.

    Args:
        history: The numbers of every step.
        title: The title of the page.
        notes: Sentences below it.
        texts: Headings, with texts that the model wrote.
        patterns: What every head gives at every validation.
    """
    packer = Packer()
    steps = [step for step, _ in history]
    strips = []
    for measure in MEASURES:
        if series := head_series(history, measure):
            table = [_filled(values, steps) for values in series.values()]
            strips.append({"what": measure, "heads": list(series), "values": packer.add(torch.tensor(table))})
    # Numbers of the run itself, such as the loss: their names have no layer and no head.
    names = dict.fromkeys(name for _, numbers in history for name in numbers if "/" not in name)
    curves = [
        [name, packer.add(torch.tensor([float(numbers.get(name, math.nan)) for _, numbers in history]))]
        for name in names
    ]
    if not strips:
        raise ValueError(
            'a training history must have numbers named "layer/entropy_share/head" or "layer/max_score/head", as '
            f"regard.watch makes them; got {', '.join(sorted(history[0][1])[:3]) or 'none'}."
        )
    header = {
        "kind": "training",
        "title": title if title is not None else "Attention while training",
        "version": regard_version(),
        "steps": steps,
        "strips": strips,
        "curves": curves,
        "refused": [],
        "notes": list(notes),
        "texts": [list(text) for text in texts],
        "patterns": None if patterns is None else _pattern_arrays(packer, patterns),
    }
    return packer.pack(header)


def _filled(values: dict[int, float], steps: list[int]) -> list[float]:
    """A value for every step: steps that have none, such as validations, take the one before."""
    row, last = [], math.nan
    for step in steps:
        last = values.get(step, last)
        row.append(last)
    return row


def _pattern_arrays(packer: Packer, patterns: PatternLog) -> dict[str, Any]:
    """The patterns of every layer, (look, h, i, j) in 255 steps, with the tokens of its rows and columns."""
    layers = [
        {
            "name": printable(name, 60),
            "rows": [printable(token) for token in patterns.tokens[name][0]],
            "cols": [printable(token) for token in patterns.tokens[name][1]],
            "w": packer.add(torch.stack(looks), "u1"),
        }
        for name, looks in patterns.layers.items()
        if looks
    ]
    return {"steps": patterns.steps, "layers": layers}
