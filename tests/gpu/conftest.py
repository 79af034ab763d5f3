"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere they are not collected."""

from __future__ import annotations

import zlib

import pytest
import torch

from gpu.side_by_side import CONTEXT_LOST

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The seed comes from the test's name: a case that fails has the same inputs when it is run again alone."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """After an illegal access every call to the GPU fails in this process: the tests that are left run in another one."""
    if report.failed:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{report.nodeid} spoiled the GPU's context: {error}", returncode=CONTEXT_LOST)
