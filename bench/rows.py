"""Rows of results: how they are measured, written and shown. Every benchmark of the project uses these."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One figure. `ratio` is ours over theirs, or theirs over ours where `better` is "higher"."""

    what: str
    shape: list[int] | str
    against: str
    ratio: float
    must: float | None
    goal: float | None
    better: str
    samples: list[float]
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""

    def verdict(self) -> str:
        """In the words of the tables: `must` is the limit, `goal` the target."""

        def meets(bound: float) -> bool:
            return self.ratio <= bound if self.better == "lower" else self.ratio >= bound

        if self.must is not None and not meets(self.must):
            return "limit missed"
        if self.goal is not None and meets(self.goal):
            return "target met"
        if self.must is not None:
            return "within the limit"
        return "" if self.goal is None else "short of the target"

    def environment(self) -> str:
        """The machine and the versions that decide its speed, as readers name them."""
        compiler = "triton" if self.device.startswith("NVIDIA") else "numba"
        names = {"torch": "torch", "triton": "Triton", "numba": "numba"}
        parts = [
            f"{names[name]} {self.versions[name].partition('+')[0]}"
            for name in ("torch", compiler)
            if name in self.versions
        ]
        return ", ".join([self.device.replace("(R)", ""), *parts])


def ratios(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Time the two by turns, so that a machine's moods fall on both."""
    for run in (ours, theirs, ours, theirs):
        run()
    samples = []
    for _ in range(repeats):
        start = clock()
        theirs()
        middle = clock()
        ours()
        samples.append((clock() - middle) / (middle - start))
    return samples


def row(
    what: str,
    shape: Any,
    against: str,
    samples: list[float],
    must: float | None,
    goal: float | None,
    better: str = "lower",
    device: str = "",
) -> Row:
    return Row(
        what, shape, against, round(statistics.median(samples), 4), must, goal, better,
        [round(s, 4) for s in samples], device or cpu_name(), versions(), commit(),
    )  # fmt: skip


def write(name: str, rows: list[Row]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1, ensure_ascii=False) + "\n")
    print(table(rows))
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def read(name: str) -> list[Row]:
    fields = set(Row.__dataclass_fields__)
    return [
        Row(**{k: v for k, v in r.items() if k in fields}) for r in json.loads((RESULTS / f"{name}.json").read_text())
    ]


def merged(name: str, rows: list[Row]) -> list[Row]:
    """The rows of a result file, with these in the place of those of the same question and shape on that kind of device, new ones last."""

    def question(r: Row) -> tuple[str, ...]:
        return str(r.device.startswith("NVIDIA")), r.what, *map(str, r.shape)

    new = {question(r) for r in rows}
    old = [r for r in read(name) if question(r) not in new] if (RESULTS / f"{name}.json").exists() else []
    return [*old, *rows]


def unit(r: Row) -> str:
    """What the number counts: how many times the peer's, unless the question names something else."""
    units = {": seconds": " s", ": GB ": " GB", ": µs ": " µs"}
    return next((unit for mark, unit in units.items() if mark in r.what), "×")


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, with what they were measured on: below it, or row by row where that differs."""
    differ = len({r.environment() for r in rows}) > 1
    lines = head("what", "shape", "against", "ratio", "limit", "target", "result", *["measured on"] * differ)
    for r in rows:
        sign = "≤" if r.better == "lower" else "≥"
        bounds = [f"{sign} {b:g}{unit(r)}" if b is not None else "" for b in (r.must, r.goal)]
        shape = r.shape if isinstance(r.shape, str) else "×".join(map(str, r.shape))
        cells = [r.what, shape, r.against, f"{r.ratio:.3g}{unit(r)}", *bounds, r.verdict()]
        lines.append(line(*cells, *[r.environment()] * differ))
    return "\n".join([*lines, *_measured_on(rows)])


def summary(rows: list[Row]) -> str:
    """One line for each question and peer: the ratios of all its shapes, from the least to the largest."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        name = r.what.replace(" (causal)", "").replace(" (deterministic)", "")
        groups.setdefault((name, re.sub(r" \(.*\)", "", r.against), r.better, r.environment()), []).append(r)
    differ = len({r.environment() for r in rows}) > 1
    lines = head("what", "against", "ratio", "shapes", *["measured on"] * differ)
    for (name, against, better, environment), group in groups.items():
        low, high = min(r.ratio for r in group), max(r.ratio for r in group)
        span = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g}–{high:.3g}"
        sign = "" if better == "lower" else ", more is better"
        cells = [name, against, f"{span}{unit(group[0])}{sign}", str(len(group))]
        lines.append(line(*cells, *[environment] * differ))
    return "\n".join([*lines, *_measured_on(rows)])


def head(*names: str) -> list[str]:
    return [line(*names), "|" + "---|" * len(names)]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _measured_on(rows: list[Row]) -> list[str]:
    """The one environment of all rows as a sentence; nothing where rows name their own."""
    environments = {r.environment() for r in rows}
    return ["", f"Measured on: {environments.pop()}."] if len(environments) == 1 else []


def versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "triton"):
        if name in sys.modules:
            versions[name] = sys.modules[name].__version__
    return versions


def commit() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return answer.stdout.strip()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}"
