"""Ambient PyTorch state: tracing, functorch transforms, autocast, replay recording and CUDA-graph capture."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "as_size",
    "host_sync_forbidden",
    "in_backward",
    "in_forward_ad",
    "in_functionalize",
    "in_functorch",
    "in_gradient_transform",
    "in_jit_trace",
    "in_plain_eager",
    "in_plain_forward",
    "is_tracing",
    "is_zero_tensor",
    "outside_of_graphs",
    "replay_state",
    "without_autocast",
]

log = logging.getLogger("regard")

P = ParamSpec("P")
X = TypeVar("X")

# Private names of PyTorch, each with a fallback: a release that renames one must not break `import regard`. Read here
# and not in a cached function, which torch.compile cannot trace.
_get_mode: Any = getattr(torch._C, "_get_dispatch_mode", None)
_keys: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_PROXY, _FAKE = getattr(_keys, "PROXY", None), getattr(_keys, "FAKE", None)
if _get_mode is None or _PROXY is None or _FAKE is None:
    _get_mode = None
    log.warning("this PyTorch has no torch._C._get_dispatch_mode: make_fx cannot trace regard's results")
#: How many dispatch modes are active, those that trace among them.
_count_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_interpreter: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
if _interpreter is None:
    log.warning("this PyTorch has no peek_interpreter_stack: torch.func transforms of regard's results are not refused")
_tracing_state: Any = getattr(torch._C, "_get_tracing_state", None)
if _tracing_state is None:
    log.warning("this PyTorch has no torch._C._get_tracing_state: torch.jit.trace of regard's results is not refused")
_graph_task: Any = getattr(torch._C, "_current_graph_task_id", None)
if _graph_task is None:
    log.warning("this PyTorch has no torch._C._current_graph_task_id: recordings hold recomputed checkpoints twice")
if not hasattr(forward_ad, "_current_level"):
    log.warning("this PyTorch has no forward_ad._current_level: every call looks for forward-mode tangents")
if not hasattr(Tensor, "_is_zerotensor"):
    log.warning("this PyTorch has no Tensor._is_zerotensor: gradients without memory are not noticed")

#: True for a tensor of zeros without memory, which autograd makes. Tensor's own method, since short calls use it.
is_zero_tensor: Callable[[Tensor], bool] = getattr(Tensor, "_is_zerotensor", lambda x: False)


class _ReplayState(threading.local):
    #: The recorder of `engines.replay` that is active in this thread.
    recorder: Any = None


replay_state = _ReplayState()


def is_tracing() -> bool:
    """True while torch.compile, torch.export or make_fx trace the code: results become part of a graph."""
    if torch.compiler.is_compiling():
        return True
    return _get_mode is not None and (_get_mode(_PROXY) is not None or _get_mode(_FAKE) is not None)


def outside_of_graphs(function: Callable[P, X]) -> Callable[P, X]:
    """The function, which torch.compile calls between two graphs and does not trace."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> X:
        if "torch._dynamo" not in sys.modules:  # which takes seconds to import
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]

    return called


def in_functorch() -> bool:
    """True inside torch.func transforms (vmap, grad, ...), whose tensors have no address."""
    return _interpreter is not None and _interpreter() is not None


def in_gradient_transform() -> bool:
    """True inside torch.func.grad and its relatives (vjp, jacrev, hessian), at any level."""
    if not in_functorch():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in levels)


def in_functionalize() -> bool:
    """True inside torch.func.functionalize, whose tensors hold their numbers elsewhere."""
    transform = None if _interpreter is None else _interpreter()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Functionalize


def in_jit_trace() -> bool:
    """True while torch.jit.trace runs the code."""
    return _tracing_state is not None and _tracing_state() is not None


def in_plain_forward() -> bool:
    """True outside of torch.func transforms, of autograd's backward and of torch.jit.trace, in one call."""
    if (_interpreter is not None and _interpreter() is not None) or (_graph_task is not None and _graph_task() != -1):
        return False
    return _tracing_state is None or _tracing_state() is None


def in_plain_eager() -> bool:
    """True where nothing traces or transforms the code: a tensor is what it seems, and has an address."""
    if torch.compiler.is_compiling():  # before what the compiler cannot follow
        return False
    if (_interpreter is not None and _interpreter() is not None) or in_jit_trace():
        return False
    return (_count_modes is not None and _count_modes() == 0) or not is_tracing()


def in_forward_ad() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level`, where tensors may have tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def in_backward() -> bool:
    """True while autograd runs a backward in this thread: a model that runs then is a checkpoint that recomputes."""
    return _graph_task is not None and _graph_task() != -1


def host_sync_forbidden(device: torch.device) -> bool:
    """True during CUDA-graph capture and replay recording: no cached tensors, no host–device sync.

    Also inside torch.func transforms, where a number may be a batch of them.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return replay_state.recorder is not None or capturing or in_functorch()


def without_autocast(x: Tensor, compute: Callable[[], Any]) -> Any:
    """`compute()` with autocast off on x's device: the tensors of a request say in which type it is computed."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return compute()
    with torch.autocast(kind, enabled=False):
        return compute()


def as_size(dims: Iterable[int]) -> torch.Size:
    """A `torch.Size`. While torch.compile traces, the plain tuple: 2.6 cannot construct a `torch.Size` in a graph."""
    return tuple(dims) if torch.compiler.is_compiling() else torch.Size(dims)  # type: ignore[return-value]
