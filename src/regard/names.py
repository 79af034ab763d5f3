"""Names whose rooms are entered when they are used: `import regard` is light, and the command line answers at once.

Imports nothing of regard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["later"]


def later(package: str, rooms: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `rooms` says in which of its rooms a name is; any room is a name, too."""

    def find(name: str) -> Any:
        if name in rooms:
            found = getattr(import_module(f"{package}.{rooms[name]}"), name)
        elif name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            try:
                found = import_module(f"{package}.{name}")
            except ModuleNotFoundError as missing:
                if missing.name != f"{package}.{name}":  # the room is there, and lacks something else
                    raise
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        setattr(sys.modules[package], name, found)  # from now on it is there at once
        return found

    return find
