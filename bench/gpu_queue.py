"""All that needs a GPU, what matters most first, within a limit of time: `python -m bench.gpu_queue [--seconds N] [NAME …]`.

A job that does not fit into the rest of the time is left for the next call, which goes on where this one ended: what came to an end
is kept in STATE (.cache/gpu), as long as src/, tests/ and bench/ are what they were. With --archive FILE the state and
bench/results are packed into one tar file after every job, for a machine that is given back.

    tests      tests/gpu, side by side            shapes     bench.gpu_shapes          corpus     bench.corpus
    random     2,000 random configurations        speed      bench.gpu                 serve      a tile of a million tokens
    checked    memory and race checkers           relations  bench.relations           record     bench.record
    learn      models that are trained and judged, if .cache/data has what bench.learn reads
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PYTHON: str = sys.executable
#: What models learn from, and where their runs go on.
DATA, RUNS = ROOT / ".cache" / "data", ROOT / ".cache" / "learn"
#: Random configurations that are asked for, and how many of them one job takes.
CONFIGURATIONS, AT_ONCE = 2000, 250


class Job(NamedTuple):
    """A command, the seconds without which it is not begun, and the folders that decide its result."""

    name: str
    command: list[str]
    seconds: int
    folders: tuple[str, ...] = ("src", "tests")

    @property
    def sources(self) -> str:
        """A digest of all that decides the result."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for path in sorted((ROOT / folder).rglob("*.py")):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:12]


def jobs(state: Path) -> list[Job]:
    """What there is to do, in this order; LEFT in a command is the rest of the time."""

    def bench(name: str, seconds: int, module: str, *arguments: str) -> Job:
        return Job(name, [PYTHON, "-m", f"bench.{module}", *arguments], seconds, ("src", "bench"))

    def learn(what: str, seconds: int) -> Job:
        return bench(f"learn {what}", seconds, "learn", what, str(DATA), str(RUNS), "limit=LEFT")

    def checked(name: str, tool: str, *arguments: str) -> Job:
        part = f"compute-sanitizer --tool {tool} --error-exitcode 1 {PYTHON} tests/gpu/small.py {{}} 10 {' '.join(arguments)}"
        return Job(name, ["sh", "-c", f"seq 0 9 | PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -P 10 -I{{}} {part}"], 150)

    tests = [PYTHON, "tests/gpu/side_by_side.py", "--state", str(state / "tests.json"), "--seconds", "LEFT"]
    random = [
        Job(f"random {first}", [PYTHON, "tests/gpu/configurations.py", str(first), str(first + AT_ONCE)], 160)
        for first in range(0, CONFIGURATIONS, AT_ONCE)
    ]
    translators, others = [learn("multi30k", 150), learn("seconds", 60)], [learn("gpu", 200), learn("large", 300)]
    return [
        Job("tests", tests, 60),
        bench("relations", 240, "relations", "--device", "cuda"),
        bench("record", 120, "record", "--device", "cuda"),
        bench("corpus", 120, "corpus"),
        random[0],
        *(translators if DATA.exists() else []),
        bench("speed", 240, "gpu"),
        bench("shapes", 200, "gpu_shapes"),
        bench("serve", 90, "page", "--only", "serve", "--device", "cuda", "--length", "1000000"),
        *(others if DATA.exists() else []),
        checked("checked memory", "memcheck"),
        checked("checked races", "racecheck", "plain"),
        *random[1:],
    ]


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def run(job: Job, left: float, log: Path) -> int:
    """Its status; -1 where the time ended first. What it prints is passed on and kept."""
    command = [part.replace("LEFT", str(round(left - 10))) for part in job.command]
    with log.open("w") as file:
        options = {"cwd": ROOT, "env": environment(), "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            status = process.wait(timeout=left)
        except BaseException as stop:  # the time ended, or Ctrl-C: with all processes that the job began
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
            status = -1
    print("\n".join(log.read_text().splitlines()[-60:]), flush=True)
    return status


def pack(archive: Path | None, state: Path) -> None:
    """One file of all results, put in its place at once."""
    if archive is None:
        return
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        tar.add(ROOT / "bench" / "results", "bench/results")
        tar.add(state, state.relative_to(ROOT) if state.is_relative_to(ROOT) else state.name)
    partial.replace(archive)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only jobs whose names begin so")
    parser.add_argument("--seconds", type=float, default=7200.0, help="end before so many seconds")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "gpu", help="where it is kept what is done")
    parser.add_argument("--archive", type=Path, help="a tar file of results and state")
    options = parser.parse_args(arguments)
    options.state.mkdir(parents=True, exist_ok=True)
    end, book = time.monotonic() + options.seconds, options.state / "done.json"
    done = json.loads(book.read_text()) if book.exists() else {}
    for job in jobs(options.state.resolve()):
        if options.names and not any(job.name.startswith(name) for name in options.names):
            continue
        left, sources = end - time.monotonic(), job.sources
        if done.get(job.name, {}).get("sources") == sources and done[job.name]["status"] == 0:
            print(f"== {job.name}: done", flush=True)
        elif left < job.seconds:
            print(
                f"== {job.name}: left for the next call; it takes {job.seconds} s, and {left:.0f} are left", flush=True
            )
        else:
            print(f"== {job.name}", flush=True)
            began = time.monotonic()
            status = run(job, left, options.state / f"{job.name.replace(' ', '-')}.log")
            taken = round(time.monotonic() - began)
            print(f"== {job.name}: status {status} after {taken} s", flush=True)
            if status >= 0:
                done[job.name] = {"sources": sources, "status": status, "seconds": taken}
                book.write_text(json.dumps(done, indent=1))
            pack(options.archive, options.state.resolve())


if __name__ == "__main__":
    main()
