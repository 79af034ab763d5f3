"""A pytest plugin that hides installed packages: `REGARD_HIDE=numba,numpy pytest -p support.hidden`, with tests/ on the path."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

NAMES = frozenset(filter(None, os.environ.get("REGARD_HIDE", "").split(",")))


class Hiding:
    """A finder of modules that does not find the hidden ones: an import raises, and `find_spec` returns None.

    None in sys.modules would do so too, but hypothesis takes a package that is listed there for one that is imported.
    """

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in NAMES else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


if NAMES:
    for module in NAMES & sys.modules.keys():
        raise RuntimeError(f"{module} is imported already: it cannot be hidden")
    sys.meta_path[:] = map(Hiding, sys.meta_path)
if "numpy" in NAMES:  # torch warns of it when it is imported, and a warning would end the tests
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch  # noqa: F401
