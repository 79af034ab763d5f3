"""A pytest plugin that hides installed packages: `REGARD_HIDE=numba,numpy pytest -p support.hidden`, with tests/ on the path."""

from __future__ import annotations

import os
import sys

for name in filter(None, os.environ.get("REGARD_HIDE", "").split(",")):
    if name in sys.modules:
        raise RuntimeError(f"{name} is imported already: it cannot be hidden")
    sys.modules[name] = None  # type: ignore[assignment]  # import raises, find_spec returns None
