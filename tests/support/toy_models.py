"""What tests of the recorder ask of their small models."""

from __future__ import annotations

from torch import nn


def hooks_of(model: nn.Module) -> int:
    """Number of forward hooks on a model and its parts."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
