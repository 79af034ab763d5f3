"""The page of a training history: entropy and largest score of every head over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..history import MEASURES, History, head_series
from .format import Packed, Packer, regard_version

__all__ = ["pack_history"]


def pack_history(
    history: History, title: str | None, notes: Sequence[str] = (), texts: Sequence[tuple[str, str]] = ()
) -> Packed:
    """Pack a training history for a page, with notes below it, and headings with texts that the model wrote."""
    packer = Packer()
    steps = [step for step, _ in history]
    strips = []
    for measure in MEASURES:
        if series := head_series(history, measure):
            # Steps at which heads were watched: at others there may be a loss alone.
            watched = [step for step in steps if any(step in values for values in series.values())]
            table = [[values.get(step, math.nan) for step in watched] for values in series.values()]
            numbers = packer.add(torch.tensor(table))
            strips.append({"what": measure, "heads": list(series), "steps": watched, "values": numbers})
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
    }
    return packer.pack(header)
