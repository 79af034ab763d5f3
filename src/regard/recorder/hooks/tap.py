"""How operators are overheard: in one thread, without changing them.

PyTorch's dispatcher looks at a set of keys, part of which belongs to the thread. Two keys that PyTorch reserves
for experiments do nothing at all until a thread puts them into its set. A kernel registered under them for an
attention operator is then called first, in that thread alone: it lets the operator run exactly as it would have
and looks at what went in and what came out. Nothing else passes through Python, `has_torch_function` stays false,
so `nn.TransformerEncoder` keeps its C++ path, and calls from TorchScript or C++ are overheard as well.
Imports nothing of regard.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Listener", "enter", "follow", "hear", "hear_higher_order", "is_quiet", "leave", "listeners", "quiet"]


class Listener(Protocol):
    """Whoever is told what was overheard."""

    def failed(self, frame: FrameType, why: str) -> None:
        """Something that may have been attention passed, and could not be understood."""

    def captured(self, frame: FrameType) -> None:
        """A compiler is tracing attention: what it makes of it will not be heard."""


#: What is done with a call that was overheard: (listener, arguments by name, result, the frame that called).
Handler = Callable[[Any, dict[str, Any], Any, FrameType], None]

#: Always on while a thread records; and on only between a softmax and the product it may belong to.
HEAR, FOLLOW = "TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.listeners: list[Any] = []


_thread = _Thread()
_lock = threading.Lock()
_libraries: list[Any] = []  # registrations last as long as their library object
_heard: set[tuple[str, str]] = set()


def _key(name: str) -> Any:
    return torch._C._dispatch_key_parse(name)


_BOTH = torch._C.DispatchKeySet(_key(HEAR)) | torch._C.DispatchKeySet(_key(FOLLOW))


def listeners() -> list[Any]:
    """Who listens in this thread, the latest last."""
    return _thread.listeners


def enter(listener: Any) -> None:
    """From now on this thread's attention is reported to the listener."""
    _thread.listeners = [*_thread.listeners, listener]
    torch._C._dispatch_tls_set_dispatch_key_included(_key(HEAR), True)


def leave(listener: Any) -> None:
    """No longer."""
    _thread.listeners = [other for other in _thread.listeners if other is not listener]
    if not _thread.listeners:
        torch._C._dispatch_tls_set_dispatch_key_included(_key(HEAR), False)
        follow(False)


def follow(on: bool) -> None:
    """Whether this thread also overhears the operators that may stand between a softmax and its product."""
    torch._C._dispatch_tls_set_dispatch_key_included(_key(FOLLOW), on)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is overheard inside: for our own computations."""
    with torch._C._ExcludeDispatchKeyGuard(_BOTH):
        yield


@contextmanager
def beside(listener: Any, frame: FrameType) -> Iterator[None]:
    """For what a listener makes of a call: unheard, without gradients; what goes wrong must not reach the model."""
    try:
        with quiet(), torch.no_grad():
            yield
    except Exception as error:
        listener.failed(frame, f"recording it failed: {type(error).__name__}: {error}")


def is_quiet() -> bool:
    """Whether this thread is inside `quiet`."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_key(HEAR))


def hear(name: str, handler: Handler, key: str = HEAR, namespace: str = "aten") -> None:
    """Overhear one operator, "scaled_dot_product_attention" or "softmax.int". Registering twice does nothing."""
    with _lock:
        if (key, f"{namespace}::{name}") in _heard:
            return
        _let_all_others_through(key)
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        if found is None:  # an operator of another version of PyTorch
            return
        op = getattr(found, overload or "default")
        library = torch.library.Library(namespace, "IMPL")
        library.impl(name, _kernel(op, op._schema, handler), key)
        _libraries.append(library)
        _heard.add((key, f"{namespace}::{name}"))


def hear_higher_order(op: Any, names: tuple[str, ...], handler: Handler) -> None:
    """The same for an operator that takes functions, such as FlexAttention's."""
    with _lock:
        if (HEAR, op.name()) not in _heard:
            _let_all_others_through(HEAR)
            op.py_impl(_key(HEAR))(_kernel(op, None, handler, names))
            _heard.add((HEAR, op.name()))


def _let_all_others_through(key: str) -> None:
    if (key, "_") not in _heard:
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, key)
        _libraries.append(library)
        _heard.add((key, "_"))


def _kernel(op: Any, schema: Any, handler: Handler, names: tuple[str, ...] = ()) -> Callable[..., Any]:
    names = tuple(argument.name for argument in schema.arguments) if schema else names
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} if schema else {}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BOTH):
            out = op(*args, **kwargs)
        # A checkpoint recomputes its forward inside backward: that is no new pass.
        if _thread.listeners and torch._C._current_graph_task_id() == -1:
            call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            _tell(handler, call, out, sys._getframe(1))
        return out

    return kernel


def _tell(handler: Handler, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    strange = _strange([*call.values(), out])
    if strange == "meta":  # nothing is computed
        return
    for listener in _thread.listeners:
        if strange == "FakeTensor":
            listener.captured(frame)
            continue
        if strange:
            listener.failed(frame, f"its tensors are {strange}, which cannot be read here")
            continue
        with beside(listener, frame):
            handler(listener, call, out, frame)


def _strange(values: list[Any]) -> str | None:
    """The kind of a tensor that holds no plain numbers; None when all do."""
    for value in values:
        if not isinstance(value, Tensor):
            continue
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            name = type(value).__name__
            return "FakeTensor" if name in ("FakeTensor", "FunctionalTensor", "ProxyTensor") else name
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return "wrapped by torch.func"
        if value.device.type == "meta":
            return "meta"
    return None
