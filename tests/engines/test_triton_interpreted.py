"""The triton engine agrees with float64 in Triton's interpreter: scores × masks × questions × types × lengths, pairwise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard

SUPPORT = Path(__file__).parents[1] / "support"
PARTS = 8


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed on this machine")
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_agree_with_float64_in_the_interpreter(part: int) -> None:
    """Several cases a process: what it prints names the case, the answer, both values and the bound."""
    run = subprocess.run(
        [sys.executable, SUPPORT / "triton_interpreter.py", str(part), str(PARTS)],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


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
