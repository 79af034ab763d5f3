"""Under what circumstances something is asked: while a graph is drawn, under torch.func, under autocast.

Imports only torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["exactly", "in_graph", "transformed"]

_mode, _KINDS = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey


def in_graph() -> bool:
    """Whether what is asked becomes part of a graph: while torch.compile, torch.export or make_fx follow the code."""
    return torch.compiler.is_compiling() or _mode(_KINDS.PROXY) is not None or _mode(_KINDS.FAKE) is not None


def transformed() -> bool:
    """Whether tensors may be those of torch.func (vmap, grad, …), which have no address."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def exactly(x: Tensor, compute: Callable[[], Any]) -> Any:
    """Without autocast: the tensors of a question say in which type it is computed."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return compute()
    with torch.autocast(kind, enabled=False):
        return compute()
