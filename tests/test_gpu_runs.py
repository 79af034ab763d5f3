"""Runs on a GPU: tests side by side, and the queue of all jobs. What failed or did not fit is run again, what is done is not."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from pathlib import Path

import pytest
from bench import gpu_queue

from gpu import side_by_side

TOY = """
import os, pathlib, time
import pytest

HERE = pathlib.Path(__file__).parent

@pytest.mark.parametrize("n", range(6))
def test_right(n):
    (HERE / f"ran{n}").open("a").write("x")

def test_wrong():
    print("the number is 7")
    assert not (HERE / "wrong").exists()

def test_wrong_beside_others():
    assert (HERE / "second").exists() or (HERE / "second").touch()

def test_dies():
    if (HERE / "dies").exists():
        os._exit(3)

def test_takes_long():
    if (HERE / "slow").exists():
        time.sleep(100)
"""

#: As gpu/conftest.py does after an illegal access: a process ends with the test that spoiled its context.
SPOILED = """
import pytest

def pytest_runtest_logreport(report):
    if report.failed:
        pytest.exit("spoiled", returncode=70)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_toy.py").write_text(TOY)
    return tmp_path


def run(folder: Path, seconds: int = 1000) -> tuple[int, dict[str, str]]:
    state = folder / "state.json"
    arguments = ["--folder", str(folder), "--state", str(state), "--processes", "2", "--seconds", str(seconds)]
    code = side_by_side.main(arguments)
    outcomes = json.loads(state.read_text())["outcomes"]
    return code, {name.partition("::")[2]: outcome for name, outcome in outcomes.items()}


@pytest.mark.early
def test_what_fails_beside_others_is_run_alone(folder: Path) -> None:
    code, outcomes = run(folder)
    assert code == 0
    assert len(outcomes) == 10
    assert {*outcomes.values()} == {"PASSED"}


@pytest.mark.early
def test_a_process_that_dies_costs_one_test_and_a_later_run_goes_on(folder: Path, capfd) -> None:
    for name in ("wrong", "dies"):
        (folder / name).touch()
    code, outcomes = run(folder)
    assert code == 1
    assert outcomes.pop("test_dies") == "ERROR"
    assert outcomes.pop("test_wrong") == "FAILED"
    assert len(outcomes) == 8
    assert {*outcomes.values()} == {"PASSED"}
    assert "the number is 7" in capfd.readouterr().out
    for name in ("wrong", "dies"):
        (folder / name).unlink()
    code, outcomes = run(folder)
    assert code == 0
    assert len(outcomes) == 10
    assert all((folder / f"ran{n}").read_text() == "x" for n in range(6)), "what had passed ran again"


def test_a_spoiled_context_costs_one_test(folder: Path) -> None:
    """An illegal access failed every later test of its process, whatever they test."""
    (folder / "conftest.py").write_text(SPOILED)
    (folder / "wrong").touch()
    code, outcomes = run(folder)
    assert code == 1
    assert outcomes.pop("test_wrong") == "FAILED"
    assert len(outcomes) == 9
    assert {*outcomes.values()} == {"PASSED"}


def test_a_failure_comes_with_its_reason(folder: Path, capsys) -> None:
    (folder / "wrong").touch()
    run(folder)
    reasons = json.loads((folder / "state.json").read_text())["reasons"]
    assert [name.partition("::")[2] for name in reasons] == ["test_wrong"]
    assert "AssertionError" in reasons["test_toy.py::test_wrong"]
    assert "test_wrong: AssertionError" in capsys.readouterr().out


def test_a_test_that_is_running_at_the_end_has_no_outcome(folder: Path) -> None:
    (folder / "slow").touch()
    progress, began = side_by_side.Progress(None), time.monotonic()
    side_by_side.run(folder, ["test_toy.py::test_takes_long"], progress, began + 0.01)
    assert not progress.outcomes
    assert time.monotonic() - began < 90


def test_without_time_it_says_what_is_left(folder: Path, capsys) -> None:
    assert side_by_side.main(["--folder", str(folder), "--seconds", "0"]) == 1
    assert "10 not run" in capsys.readouterr().out


def test_a_folder_without_tests_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no tests to run here"):
        side_by_side.main(["--folder", str(tmp_path)])


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The queue of all that needs a GPU, with toys for its jobs; returns what it prints and the names in its archive."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text("1")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    state, archive = tmp_path / "state", tmp_path / "all.tar"
    toys = {"quick": ("print('hello')", 0), "wrong": ("raise SystemExit(1)", 0), "endless": ("import time; time.sleep(1000)", 0), "long": ("", 900)}  # fmt: skip
    monkeypatch.setattr(gpu_queue, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_queue, "jobs", lambda state: [gpu_queue.Job(name, [sys.executable, "-c", code], seconds) for name, (code, seconds) in toys.items()])  # fmt: skip

    def run(*arguments: str) -> list[str]:
        gpu_queue.main([*arguments, "--state", str(state), "--archive", str(archive)])
        with tarfile.open(archive) as tar:
            return tar.getnames()

    return run


def test_the_queue_keeps_what_came_to_an_end(queue, tmp_path: Path, capsys) -> None:
    names = queue("quick", "wrong", "long", "--seconds", "100")
    assert {"bench/results", "state/done.json", "state/quick.log"} <= {*names}
    first = capsys.readouterr().out
    assert "hello" in first
    assert "wrong: status 1" in first
    assert "long: left for the next call; it takes 900 s" in first
    queue("quick", "wrong", "--seconds", "100")
    again = capsys.readouterr().out
    assert "quick: done" in again
    assert "wrong: status 1" in again, "a job that failed is run again"
    (tmp_path / "src" / "one.py").write_text("2")
    queue("quick", "--seconds", "100")
    assert "hello" in capsys.readouterr().out, "other sources"


def test_the_queue_ends_a_job_in_time(queue, capsys) -> None:
    queue("endless", "--seconds", "1")
    assert "endless: status -1" in capsys.readouterr().out
    queue("endless", "--seconds", "1")
    assert "endless: status -1" in capsys.readouterr().out
