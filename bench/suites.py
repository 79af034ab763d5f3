"""Tables of the suite in other surroundings: rows of `tests/support/suite.py`, one for each of its parts, added up."""

from __future__ import annotations

import json
from typing import Any

from .rows import RESULTS, head, line

#: Columns of versions, in the order in which they are shown.
VERSIONS = {
    "python": "Python",
    "torch": "PyTorch",
    "triton": "Triton",
    "numba": "numba",
    "transformers": "transformers",
}


def table(name: str) -> str:
    """The results of a file as a Markdown table: one line for each surrounding and machine."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault((row["name"], row["machine"]), []).append(row)
    settings = any(not setting.startswith("PyTorch ") for setting, _ in groups)
    lines = head(*["setting"] * settings, *VERSIONS.values(), "tests", "passed", "failed", "skipped", "machine", "day")
    for (setting, machine), rows in groups.items():
        versions = [rows[-1]["versions"].get(package, "–") for package in VERSIONS]
        counts = [f"{sum(row[kind] for row in rows):,}" for kind in ("passed", "failed", "skipped")]
        tests = parts([row["part"] for row in rows], results["parts"])
        lines.append(line(*[setting] * settings, *versions, tests, *counts, machine, max(row["date"] for row in rows)))
    return "\n".join(lines)


def parts(ran: list[str], of: list[str]) -> str:
    """The parts of the suite that were run, or "all"."""
    return "all" if "all" in ran or {*ran} >= {*of} else ", ".join(part for part in of if part in ran)
