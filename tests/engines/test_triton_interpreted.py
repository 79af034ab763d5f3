"""The triton engine agrees with float64 in Triton's interpreter: scores × masks × questions × types × lengths, pairwise."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.engines import triton

SUPPORT = Path(__file__).parents[1] / "support"


def parts(of: int, quick: int) -> list[Any]:
    """Numbers of parts; those from `quick` on are left to `make test-numerics`, which runs all: a part takes a minute or so."""
    return [pytest.param(part, of, marks=[pytest.mark.slow] * (part >= quick)) for part in range(of)]


def reads_arrays_of_one_number() -> bool:
    """Whether Triton's interpreter turns an array of shape (1,) into a number by itself: NumPy 2.4 does not any more."""
    if importlib.util.find_spec("triton") is None:
        return False
    return tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) >= (3, 7)


in_the_interpreter = pytest.mark.skipif(
    not reads_arrays_of_one_number(),
    reason="Triton is not installed on this machine, or before 3.7: its interpreter needs NumPy before 2.4",
)


def interpret(*arguments: object, script: str = "triton_interpreter.py") -> None:
    """Several cases a process: what it prints names the case, the answer, both values and the bound."""
    run = subprocess.run(
        [sys.executable, SUPPORT / script, *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


@in_the_interpreter
@pytest.mark.early
@pytest.mark.parametrize(("part", "of"), parts(8, quick=3))
def test_kernels_agree_with_float64_in_the_interpreter(part: int, of: int) -> None:
    interpret(part, of)


@in_the_interpreter
@pytest.mark.early
@pytest.mark.parametrize(("part", "of"), parts(2, quick=1))
def test_heads_together_agree_with_float64_in_the_interpreter(part: int, of: int) -> None:
    interpret(part, of, "heads")


@in_the_interpreter
@pytest.mark.early
@pytest.mark.parametrize(("part", "of"), parts(4, quick=2))
def test_losses_of_indexers_agree_with_float64_in_the_interpreter(part: int, of: int) -> None:
    interpret(part, of, "indexers")


@in_the_interpreter
@pytest.mark.early
@pytest.mark.parametrize(("part", "of"), parts(2, quick=1))
def test_tiles_agree_with_float64_in_the_interpreter(part: int, of: int) -> None:
    interpret(part, of, "tiles")


@in_the_interpreter
@pytest.mark.early
def test_a_replayed_loss_of_an_indexer_has_the_bits_of_a_direct_one() -> None:
    interpret(script="interpreted_tape.py")


def test_importing_regard_does_not_import_triton() -> None:
    code = "import sys, regard; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter serves the CPU")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "needs tensors on an NVIDIA GPU, and these are on cpu|Triton is not installed"),
    ],
)
def test_what_the_engine_cannot_serve_is_named_with_one_that_can(change: dict, reason: str) -> None:
    W = regard.weights(torch.randn(3, 8), engine="triton", **change)
    with pytest.raises(NotImplementedError, match=reason) as error:
        W.entropy()
    assert 'engine="blockwise" can' in str(error.value)


def test_a_triton_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "3.2.0")
    for name, answer in (("_installed", True), ("_interpreted", True)):
        monkeypatch.setattr(triton, name, lambda answer=answer: answer)
    triton._too_old.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match=r"need Triton 3\.5 .* 3\.2\.0 is installed"):
            regard.weights(torch.randn(3, 8), engine="triton").entropy()
    finally:
        triton._too_old.cache_clear()
