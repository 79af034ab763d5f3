"""Names whose rooms are entered when they are used: `import regard` is light, and the command line answers at once.

Imports nothing of regard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_getattr"]


def lazy_getattr(package: str, rooms: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `rooms` says which names are in which of its rooms; any room is a name, too."""
    room_of = {name: room for room, names in rooms.items() for name in names}

    def find(name: str) -> Any:
        if name in room_of:
            found = getattr(import_module(f"{package}.{room_of[name]}"), name)
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
