"""What a user starts: a script under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_sequence.py"


def test_the_example_prints_the_same_alone_and_under_torchrun() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for start in ([], torchrun):
        run = subprocess.run(
            [sys.executable, *start, str(EXAMPLE)], env={**os.environ, "LENGTH": "203", "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        printed.append(run.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith("203 words, 2 heads: a word looks"), printed[0]
