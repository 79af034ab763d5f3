"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere they are not collected."""

from __future__ import annotations

import zlib

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The seed comes from the test's name: a case that fails has the same inputs when it is run again alone."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
