"""The suite in other surroundings, part by part: what pytest says there goes into a result file of bench/results.

A row of the file is one part of the suite in one surrounding, with the versions, the machine, the day and the counts. A part that
passed is not run again while src/ and tests/ are what they were, so a run that was stopped goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Parts of the suite: what is given to pytest. The kernels on a GPU have their own target.
PARTS: dict[str, list[str]] = {
    **{path.name: [f"tests/{path.name}"] for path in sorted((ROOT / "tests").iterdir()) if any(path.glob("test_*.py")) and path.name != "gpu"},
    "docs": sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("test_*.py")),
}  # fmt: skip

#: One pytest for everything: quicker on many cores, but a run that is stopped has no result.
ALL = {"all": ["tests", "--ignore=tests/gpu"]}

VERSIONS = """
import importlib.metadata, json, platform
packages = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version()} | {
    name: packages[name].partition("+")[0] for name in ("torch", "triton", "numba", "transformers") if name in packages
}))
"""


def parser(text: str, results: Path) -> argparse.ArgumentParser:
    """Options of every script that runs the suite."""
    options = argparse.ArgumentParser(description=text.partition("\n")[0])
    options.add_argument("--parts", nargs="+", choices=[*PARTS, *ALL], default=list(PARTS), help="parts of the suite")
    options.add_argument("--workers", type=int, default=2, help="processes that pytest runs side by side")
    options.add_argument("--results", type=Path, default=results, help="the file that results are put into")
    options.add_argument("--again", action="store_true", help="run what passed with these sources, too")
    return options


def run(
    name: str,
    python: str | Path,
    environment: Mapping[str, str],
    options: argparse.Namespace,
    plugins: Sequence[str] = (),
) -> int:
    """Run the chosen parts of the suite in one surrounding; the number of failures."""
    digest, failed = sources(), 0
    for part in options.parts:
        here = {"name": name, "machine": machine(), "part": part}
        before = next((row for row in read(options.results) if here.items() <= row.items()), None)
        if before and before["sources"] == digest and not before["failed"] and not options.again:
            print(f"== {name}, {part}: passed on {before['date']} with these sources", flush=True)
            continue
        print(f"== {name}, {part}", flush=True)
        row = {
            **here,
            **_pytest(python, environment, options.workers, [*plugins, *{**PARTS, **ALL}[part]]),
            "sources": digest,
        }
        failed += row["failed"]
        write(options.results, [*(other for other in read(options.results) if not replaces(row, other)), row])
        counts = ", ".join(f"{row[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"== {name}, {part}: {counts} in {row['seconds']} s", flush=True)
    return failed


def replaces(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a result takes the place of another: the same part in the same surrounding, or one of them has all parts."""
    parts = {row["part"], other["part"]}
    return row["name"] == other["name"] and row["machine"] == other["machine"] and (len(parts) == 1 or "all" in parts)


@contextlib.contextmanager
def collected(options: argparse.Namespace) -> Iterator[None]:
    """Within, results go to a file below .cache/; at the end to `options.results`, whose tables the suite itself tests."""
    published, options.results = options.results, ROOT / ".cache" / options.results.name
    write(options.results, read(options.results) or read(published))
    yield
    write(published, read(options.results))
    print(f"results: {published}; python -m bench.tables puts them into the docs")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a result file; it names the parts that make the suite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"parts": list(PARTS), "rows": rows}, indent=1, ensure_ascii=False) + "\n")


def _pytest(
    python: str | Path, environment: Mapping[str, str], workers: int, arguments: Sequence[str]
) -> dict[str, Any]:
    """What pytest says of these files; its output is passed on."""
    start, summary, failures = time.perf_counter(), "", []
    command = [
        str(python), "-m", "pytest", "-n", str(workers), "--dist", "worksteal", "-m", "not slow", "-p", "no:cacheprovider", *arguments,
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            summary = line if re.search(r"\d+ (passed|failed|skipped|error)", line) else summary
            failures += re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", line.rstrip())
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    broken = process.returncode not in (0, 1)  # pytest itself stopped
    installed = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0) + broken,
        "skipped": counts.get("skipped", 0),
        "failures": failures,
        "versions": json.loads(installed.stdout),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - start),
    }


def machine() -> str:
    """The processor and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{model.replace('(R)', '')}, {os.cpu_count()} cores"


def sources() -> str:
    """A digest of every file of src/ and tests/."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]
