"""Models that several ranks run together, wrapped by DistributedDataParallel or FSDP2: one rank reports for all."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_first_rank"]


def is_first_rank(model: Any) -> bool:
    """Whether this process is the first of the ranks that run a wrapped model; True where it is not wrapped.

    DistributedDataParallel says its process group. FSDP2 leaves the modules as they are, and makes DTensors of their
    parameters, which say their mesh.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or model is None:
        return True
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return torch.distributed.get_rank(module.process_group) == 0
    for parameter in model.parameters():
        if (mesh := getattr(parameter, "device_mesh", None)) is not None:
            return not any(mesh.get_coordinate() or ())
    return True
