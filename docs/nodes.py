"""Tell the API reference that classes under `@register_node` are dataclasses, so that their signatures are shown."""

from __future__ import annotations

from typing import Any

import griffe

DATACLASS = griffe.ExprName("dataclass", parent=griffe.ExprName("dataclasses"))


class Nodes(griffe.Extension):
    """griffe reads sources without running them and knows `dataclasses.dataclass` by name alone."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Put that name in place of ours."""
        for decorator in cls.decorators:
            if decorator.callable_path.rpartition(".")[2] in ("node", "register_node"):
                decorator.value = DATACLASS
