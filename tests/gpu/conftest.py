"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere they are not collected."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
