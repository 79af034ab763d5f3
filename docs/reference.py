"""What the API reference must know of our sources; loaded by griffe, which reads them without running them."""

from __future__ import annotations

import re
from typing import Any

import griffe

DATACLASS = griffe.ExprName("dataclass", parent=griffe.ExprName("dataclasses"))
#: An example: from its first prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", flags=re.M)


class Regard(griffe.Extension):
    """Signatures of our dataclasses, and examples as code."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Classes under `@register_node` are dataclasses; griffe knows `dataclasses.dataclass` by name alone."""
        for decorator in cls.decorators:
            if decorator.callable_path.rpartition(".")[2] in ("node", "register_node"):
                decorator.value = DATACLASS

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence examples: outside of an `Examples:` section Markdown would take their prompts for quotations."""
        if obj.docstring and not re.search(r"^ *Examples:$", obj.docstring.value, flags=re.M):
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
