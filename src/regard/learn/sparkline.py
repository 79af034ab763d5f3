"""A curve as one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["LEVELS", "sparkline"]

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of at most `width` bars from the least value to the largest; a gap where a value is not finite."""
    picked = [values[n * len(values) // width] for n in range(width)] if len(values) > width else values
    finite = [x for x in picked if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = 7.999 / (high - low) if high > low else 0.0
    return "".join(LEVELS[int((x - low) * step)] if math.isfinite(x) else " " for x in picked)
