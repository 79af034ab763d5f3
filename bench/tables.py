"""Tables in the docs come from result files: `python -m bench.tables` writes them between their markers."""

from __future__ import annotations

import re
from pathlib import Path

from . import suites
from .rows import RESULTS, read, summary, table

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md", "docs/install.md", "docs/speed.md", "docs/record.md", "docs/learn.md", "docs/uses.md",
    "docs/distributed.md", "docs/corpus.md",
)  # fmt: skip


def filled(text: str) -> str:
    """The text with every table made anew from its result file."""

    def fill(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        show = {
            "table": lambda: table(read(name)),
            "summary": lambda: summary(read(name)),
            "suite": lambda: suites.table(name),
        }
        body = show[kind]() if (RESULTS / f"{name}.json").exists() else "(not measured yet)"
        return f"<!-- {kind}: {name} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- (table|summary|suite): (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main() -> None:
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
