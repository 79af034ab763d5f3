"""Run the tests of this folder in several processes at a time: `side_by_side.py [--seconds N] [--state FILE]`.

A test compiles kernels of its own for seconds on one core, so one process leaves a GPU idle and most cores of its host too. What
fails beside others, where time and memory are shared, is run again alone. A run ends before its limit of time; with the same state
file the next one goes on with what has not passed, as long as src/ and tests/ are what they were. The file also says why a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.suite import ROOT, sources

#: In the folder of the tests, without the project's own options: the machine of a GPU may lack the plugins that they name.
PYTEST = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "--confcutdir", ".", "-p", "no:cacheprovider"]  # fmt: skip
OUTCOME = re.compile(r"^(test_\w+\.py::.+) (PASSED|FAILED|ERROR|SKIPPED)\b")
#: A line of pytest's summary, which comes last.
REASON = re.compile(r"^(?:FAILED|ERROR) (test_\w+\.py::.+?) - (.+)")
#: Status of a process whose GPU context a test spoiled (conftest.py): the tests after it are run by another one.
CONTEXT_LOST = 70
#: Seconds that pytest has for its summary when the time is up.
GRACE = 5.0


class Progress:
    """What became of every test so far, kept in a file that a later run reads."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.lock = path, threading.Lock()
        self.began = time.monotonic()
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.sources = sources()
        if path and path.exists():
            earlier = json.loads(path.read_text())
            if earlier["sources"] == self.sources:
                self.outcomes, self.reasons = earlier["outcomes"], earlier["reasons"]

    def write(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            contents = {"sources": self.sources, "outcomes": self.outcomes, "reasons": self.reasons}
            self.path.write_text(json.dumps(contents, indent=1))

    def explain(self, test: str, reason: str) -> None:
        """Keep why a test failed, and show it."""
        with self.lock:
            self.reasons[test] = reason
            self.write()
            print(f"{test}: {reason}", flush=True)

    def put(self, test: str, outcome: str) -> None:
        with self.lock:
            self.outcomes[test] = outcome
            if outcome == "PASSED":
                self.reasons.pop(test, None)
            self.write()
            if outcome in ("FAILED", "ERROR") or len(self.outcomes) % 50 == 0:
                print(f"{time.monotonic() - self.began:5.0f}s {len(self.outcomes)} tests; {test} {outcome}", flush=True)

    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome not in ("PASSED", "SKIPPED")]


def collected(folder: Path) -> list[str]:
    """The names of all tests of a folder."""
    command = [*PYTEST, "--collect-only", "-q"]
    ran = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    names = [line for line in ran.stdout.splitlines() if re.match(r"test_\w+\.py::", line)]
    if ran.returncode not in (0, 5):
        raise SystemExit(f"the tests cannot be collected:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
    return names


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # Plugins of the machine take a second of every start; pytest cuts reasons to the width of the terminal.
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "400"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def run(folder: Path, tests: Sequence[str], progress: Progress, deadline: float, show: bool = False) -> None:
    """One pytest over these tests, until the deadline; with `show`, what it prints where a test fails."""
    command, pending, lines = [*PYTEST, "-v", "--tb=short", *tests], set(tests), []
    options = {
        "cwd": folder,
        "env": environment(),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with subprocess.Popen(command, **options) as pytest:
        left = max(deadline - time.monotonic(), 0)
        timers = [
            threading.Timer(max(left - GRACE, 0), pytest.send_signal, [signal.SIGINT]),
            threading.Timer(left, pytest.kill),
        ]
        for timer in timers:
            timer.start()
        for line in pytest.stdout:
            lines.append(line)
            if (match := OUTCOME.match(line)) and match[1] in pending:
                pending.discard(match[1])
                progress.put(match[1], match[2])
            if (match := REASON.match(line)) and match[1] in tests:
                progress.explain(match[1], match[2])
    for timer in timers:
        timer.cancel()
    lost = pytest.returncode == CONTEXT_LOST  # the test that failed last spoiled it
    if pending and not lost and time.monotonic() < deadline - GRACE:
        # The first test without an outcome took the process with it.
        progress.put(next(test for test in tests if test in pending), "ERROR")
    if show and pytest.returncode:
        print("".join(lines)[-4000:], flush=True)


def side_by_side(folder: Path, tests: Sequence[str], processes: int, progress: Progress, deadline: float) -> None:
    """All tests, dealt out in turn: neighbours take about as long as one another."""
    shares = [tests[first::processes] for first in range(min(processes, len(tests)))]
    threads = [threading.Thread(target=run, args=(folder, share, progress, deadline)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="end before so many seconds (default 3600)")
    parser.add_argument("--state", type=Path, help="a file of outcomes; a later run goes on from it")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="side by side")
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="the tests (default: those beside this file)"
    )
    options = parser.parse_args(arguments)
    progress, deadline = Progress(options.state), time.monotonic() + options.seconds
    tests = collected(options.folder)
    if not tests:
        raise SystemExit(f"{options.folder} has no tests to run here; those of the kernels need an NVIDIA GPU")
    todo = [test for test in tests if progress.outcomes.get(test) not in ("PASSED", "SKIPPED")]
    while todo and time.monotonic() < deadline:
        before = len(todo)
        side_by_side(options.folder, todo, options.processes, progress, deadline)
        todo = [test for test in tests if test not in progress.outcomes]
        if len(todo) == before:
            break
    for test in progress.failed():
        if time.monotonic() < deadline:
            run(options.folder, [test], progress, deadline, show=True)
    counts = {kind: list(progress.outcomes.values()).count(kind) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failed, left = counts["FAILED"] + counts["ERROR"], len(tests) - len(progress.outcomes)
    print(f"{counts['PASSED']} passed, {failed} failed, {counts['SKIPPED']} skipped, {left} not run")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
