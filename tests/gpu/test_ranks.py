"""Two processes on one GPU, which talk through gloo by way of the host's memory: each answer is that of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_ranks_on_one_gpu_answer_as_one_process() -> None:
    script = Path(__file__).parents[1] / "support" / "rank_triton.py"
    ran = subprocess.run(
        [sys.executable, str(script), "cuda"], capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
