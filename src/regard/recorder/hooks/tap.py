"""Interception of ATen operators in one thread, without changing them.

PyTorch's dispatcher reads a set of keys, part of which is thread-local. Two keys that PyTorch reserves for experiments
(`TESTING_ONLY_*`) do nothing until a thread includes them in its set. A kernel registered under such a key runs first,
in that thread alone: it redispatches to the operator unchanged and hands inputs and output to the listeners. No
`__torch_function__` is involved, so `nn.TransformerEncoder` keeps its C++ path, and calls from TorchScript or C++ are
intercepted as well. Both keys are private to PyTorch; they are resolved when a recording starts, never on import.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from ...core.torch_state import in_backward, in_gradient_transform, in_jit_trace
from .listener import Listener
from .plain_tensors import memory_of, unreadable_kind

__all__ = [
    "FOLLOW_KEY",
    "PRODUCT_KEY",
    "RECORD_KEY",
    "Listener",
    "activate",
    "deactivate",
    "failure",
    "follow",
    "guarded",
    "hear_products",
    "hears_products",
    "intercept",
    "intercept_higher_order",
    "intercept_others",
    "is_complete",
    "is_suspended",
    "listeners",
    "suspended",
]


#: A handler of an intercepted operator: (listener, arguments by name, output, the caller's frame).
Handler = Callable[[Any, dict[str, Any], Any, FrameType], None]

#: A handler of any other operator: (listener, operator, arguments, output, the caller's frame).
OtherHandler = Callable[[Any, Any, tuple[Any, ...], Any, FrameType], None]

#: Whether a call, by its positional arguments, is nothing to a listener without an open softmax: it is not reported.
Skip = Callable[[tuple[Any, ...]], bool]

#: A function that tells of a call: (arguments by position, by name, output, the caller's frame).
CallReport = Callable[[tuple[Any, ...], dict[str, Any], Any, FrameType], None]

#: Included while a thread records: attention is intercepted.
RECORD_KEY = "TESTING_ONLY_GenericWrapper"

#: Included as well, but in layers that do what another one did: products that may be scores are intercepted.
PRODUCT_KEY = "DeferredInit"

#: The first of the three, included only while a listener follows scores or weights.
FOLLOW_KEY = "TESTING_ONLY_GenericMode"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.listeners: list[weakref.ref[Any]] = []  # weak: a block that was not closed properly ends with its object


_thread = _Thread()
_lock = threading.Lock()
_libraries: list[Any] = []  # a registration lasts as long as its library object
_registered: set[tuple[str, str]] = set()
_other_libraries: dict[str, Any] = {}  # of the operators without a handler of their own, by namespace
_visited_operators: set[str] = set()  # the operators that `intercept_others` has seen
_definitions: tuple[int, int] | None = None  # how many there were then


@functools.cache
def _key(name: str) -> Any:
    """A dispatch key by its name, resolved on first use."""
    try:
        return torch._C._dispatch_key_parse(name)
    except (AttributeError, RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"regard.record needs PyTorch's dispatch key {name}; torch {torch.__version__} does not have it ({error}). "
            "Use a version of PyTorch that regard is tested with."
        ) from error


@functools.cache
def _all_keys() -> Any:
    keys = [torch._C.DispatchKeySet(_key(name)) for name in (RECORD_KEY, PRODUCT_KEY, FOLLOW_KEY)]
    return keys[0] | keys[1] | keys[2]


def _include(name: str, on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_key(name), on)


def listeners() -> list[Any]:
    """The listeners of this thread, the newest last."""
    return [listener for ref in _thread.listeners if (listener := ref()) is not None]


def activate(listener: Listener) -> None:
    """Report this thread's attention to the listener from now on."""
    _thread.listeners = [*_thread.listeners, weakref.ref(listener)]
    _include(RECORD_KEY, True)
    hear_products()
    if listener.eager.open or listener.eager.scores:  # it was paused
        follow(True)


def deactivate(listener: Listener) -> None:
    """Stop reporting to the listener; without listeners the thread's keys are as before."""
    _retain([other for other in listeners() if other is not listener])


def _retain(live: list[Any]) -> None:
    _thread.listeners = [weakref.ref(listener) for listener in live]
    if not _thread.listeners:
        follow(False)
        _include(PRODUCT_KEY, False)
        _include(RECORD_KEY, False)


def hear_products() -> None:
    """Intercept products that may be scores if a listener is to hear them; other attention is heard all the same."""
    _include(PRODUCT_KEY, any(listener.hears_products for listener in listeners()))


def hears_products() -> bool:
    """Whether this thread intercepts products that may be scores."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_key(PRODUCT_KEY)))


def follow(on: bool) -> None:
    """Whether this thread also intercepts the operators between scores and the product of weights with values.

    Not inside torch.func.grad and its relatives, whose backward divides by wrapped tensors: no Python kernel takes.
    """
    _include(FOLLOW_KEY, on and not in_gradient_transform())


def _leaves_off(live: list[Any]) -> bool:
    """Whether an operator runs in a gradient transform; then none is followed there."""
    if not in_gradient_transform():
        return False
    for listener in live:
        for softmax in listener.eager.open:
            softmax.strayed = softmax.strayed or "a transform of torch.func"
    follow(False)
    return True


@contextmanager
def suspended() -> Iterator[None]:
    """Intercept nothing inside: for computations that are not the model's."""
    if not _thread.listeners:
        yield
        return
    with torch._C._ExcludeDispatchKeyGuard(_all_keys()):
        yield


class guarded:  # noqa: N801  a context manager; a generator would take as long as the handler
    """For the work of a handler: not intercepted, without gradients unless the listener wants them.

    Its errors never reach the model.
    """

    __slots__ = ("_frame", "_grad", "_keys", "_listener")

    def __init__(self, listener: Listener, frame: FrameType) -> None:
        self._listener, self._frame = listener, frame

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled() and not self._listener.wants_grad
        self._keys = None if is_suspended() else torch._C._ExcludeDispatchKeyGuard(_all_keys())
        if self._keys is not None:
            self._keys.__enter__()
        if self._grad:
            torch._C._set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._grad:
            torch._C._set_grad_enabled(True)
        if self._keys is not None:
            self._keys.__exit__(kind, error, trace)
        if kind is None or not issubclass(kind, Exception):
            return False
        self._listener.refuse_at(self._frame, failure(error))
        return True


def failure(error: BaseException | None) -> str:
    """The reason of a refusal where recording raised an error."""
    return f"recording it failed: {type(error).__name__}: {error}"


def is_suspended() -> bool:
    """Whether this thread is inside `suspended`."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_key(RECORD_KEY))


def intercept(
    name: str,
    handler: Handler,
    key: str = RECORD_KEY,
    namespace: str = "aten",
    attends: bool = False,
    skip: Skip | None = None,
    multiplies: bool = False,
    native: Callable[..., Any] | None = None,
) -> None:
    """Register a handler for an operator, once per operator.

    Args:
        name: "scaled_dot_product_attention" or "softmax.int".
        handler: What is called with its arguments and output.
        key: The key under which it is intercepted.
        namespace: The library of the operator.
        attends: Whether a compiler that traces it traces attention; that of a product is no sign of it.
        skip: Which calls are not reported while no softmax is open: for operators that a model calls often.
        multiplies: Whether its result may be scores where it cannot be read, as inside `torch.vmap`.
        native: The operator as PyTorch's own Python calls it, for one whose calls a listener may know.
    """
    if (key, f"{namespace}::{name}") in _registered:
        return
    with _lock:
        if (key, f"{namespace}::{name}") in _registered:  # by another thread, meanwhile
            return
        _pass_through(key)
        if (op := _operator(namespace, name)) is None:
            return
        library = torch.library.Library(namespace, "IMPL")
        report = _reporter(op._schema, handler, (), attends, skip, multiplies)
        if native is not None:
            library.impl(name, _kernel_of_recurring(op, native, report), key)
        elif skip is None:
            library.impl(name, _kernel(op, report), key)
        else:
            _pass_through(FOLLOW_KEY)
            library.impl(name, _kernel_at_rest(op, skip, report), key)
            library.impl(name, _kernel(op, report), FOLLOW_KEY)
        _libraries.append(library)
        _registered.add((key, f"{namespace}::{name}"))


def intercept_higher_order(op: Any, names: tuple[str, ...], handler: Handler) -> None:
    """The same for an operator that takes functions, such as FlexAttention's."""
    if (RECORD_KEY, op.name()) in _registered:
        return
    with _lock:
        if (RECORD_KEY, op.name()) not in _registered:
            _pass_through(RECORD_KEY)
            op.py_impl(_key(RECORD_KEY))(_kernel(op, _reporter(None, handler, names, attends=True)))
            _registered.add((RECORD_KEY, op.name()))


def intercept_others(handler: OtherHandler, key: str) -> None:
    """Register a handler for all operators without one of their own, but for views and for those made of others.

    Each by its name: a kernel in Python that serves all operators raises under a dispatch mode (a FLOP counter, fake
    tensors while torch.compile traces) and for tensor subclasses, since PyTorch looks such kernels up by name there.
    Operators that were defined since are registered the next time.
    """
    global _definitions
    definitions = _count_definitions()
    if is_complete():
        return  # to list some thousand names takes longer than a small model
    every = set(torch._C._dispatch_get_all_op_names())
    with _lock:
        _pass_through(key)
        for full_name in sorted(every - _visited_operators):
            _visited_operators.add(full_name)
            namespace, _, name = full_name.partition("::")
            is_registered = any(
                (own_key, full_name) in _registered for own_key in (RECORD_KEY, PRODUCT_KEY, FOLLOW_KEY)
            )
            op = None if is_registered else _operator(namespace, name)
            if op is None or not _is_followed(op):
                continue
            if namespace not in _other_libraries:
                _other_libraries[namespace] = torch.library.Library(namespace, "IMPL")
            _other_libraries[namespace].impl(name, _other_kernel(op, handler), key)
        _definitions = definitions


def is_complete() -> bool:
    """Whether every operator has its handler: none was defined since they were registered."""
    return _definitions is not None and _definitions == _count_definitions()


def _count_definitions() -> tuple[int, int] | None:
    """Two numbers that grow with every new operator: of extensions, which are modules, and of definitions in Python."""
    definitions = getattr(torch.library, "_defs", None)
    return None if definitions is None else (len(sys.modules), len(definitions))


def _operator(namespace: str, name: str) -> Any:
    """An operator by its name; None for one of another version of PyTorch."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


def _is_followed(op: Any) -> bool:
    """Whether an operator takes tensors, and is neither a view of the first nor made of others that are intercepted."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return False
    arguments = op._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    is_view = alias is not None and not alias.is_write
    return not is_view and any("Tensor" in str(argument.type) for argument in arguments)


def _other_kernel(op: Any, handler: OtherHandler) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_all_keys()):
            out = op(*args, **kwargs)
        live = [listener for listener in listeners() if listener.eager.open or listener.eager.scores]
        if live and not in_backward() and not in_jit_trace() and not _leaves_off(live):
            frame, operands = sys._getframe(1), (*args, *kwargs.values())
            for listener in live:
                with guarded(listener, frame):
                    listener.eager.carry(operands, out)
                    if listener.eager.open:
                        handler(listener, op, operands, out, frame)
        return out

    return kernel


def _pass_through(key: str) -> None:
    """Let every operator without a handler ignore the key."""
    if (key, "_") in _registered:
        return
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, key)
    _libraries.append(library)
    _pass_through_higher_order(_key(key))
    _registered.add((key, "_"))


def _pass_through_higher_order(key: Any) -> None:
    """The same for operators that take functions (cond, scan, vmap of autograd.Function), which read no fallback.

    Such an operator raises for a key without a kernel; those that PyTorch defines later copy their keys from the list.
    """
    from torch import _ops

    for op in _ops._higher_order_ops.values():
        op.fallthrough(key)
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)


def _kernel(op: Any, report: CallReport) -> Callable[..., Any]:
    """The operator, and then a report of the call."""
    run, keys, guard = getattr(op, "_op", op), _all_keys(), torch._C._ExcludeDispatchKeyGuard

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with guard(keys):
            out = run(*args, **kwargs)
            report(args, kwargs, out, sys._getframe(1))
        return out

    return kernel


def _kernel_of_recurring(op: Any, native: Callable[..., Any], report: CallReport) -> Callable[..., Any]:
    """The same for an operator whose calls come again; Python's own function is warm, since the model has called it."""
    run, keys, guard = op._op, _all_keys(), torch._C._ExcludeDispatchKeyGuard
    include, key = torch._C._dispatch_tls_set_dispatch_key_included, _key(RECORD_KEY)
    count_modes = torch._C._len_torch_function_stack  # a function mode would see the native function again

    def kernel(*args: Any, **kwargs: Any) -> Any:
        live = _thread.listeners
        only = live[0]() if len(live) == 1 else None
        if only is None or only.hears_products or count_modes():
            with guard(keys):
                out = run(*args, **kwargs)
                report(args, kwargs, out, sys._getframe(1))
            return out
        include(key, False)  # a third of what a guard costs; the other two keys are not included
        try:
            out = native(*args, **kwargs)
            if not only.attention_again(args, kwargs, out, frame := sys._getframe(1)):
                report(args, kwargs, out, frame)
        finally:
            include(key, bool(_thread.listeners))
        return out

    return kernel


def _kernel_at_rest(op: Any, skip: Skip, report: CallReport) -> Callable[..., Any]:
    """The same for a thread that follows nothing, where most calls of an operator are nothing to a listener.

    A model calls it a dozen times a layer: everything here counts.
    """
    run, include, key = getattr(op, "_op", op), torch._C._dispatch_tls_set_dispatch_key_included, _key(PRODUCT_KEY)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        include(key, False)  # a third of what a guard costs
        try:
            out = run(*args, **kwargs)
        finally:
            include(key, True)
        if not skip(args):
            report(args, kwargs, out, sys._getframe(1))
        return out

    return kernel


def _reporter(
    schema: Any,
    handler: Handler,
    names: tuple[str, ...] = (),
    attends: bool = False,
    skip: Skip | None = None,
    multiplies: bool = False,
) -> CallReport:
    """The part of a kernel that follows the operator: its call reaches the listeners of the thread."""
    names = tuple(argument.name for argument in schema.arguments) if schema else names
    # In the order of the schema, whichever of them a call gives.
    blank = {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments} if schema else {}

    def report(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, frame: FrameType) -> None:
        # Inside backward, activation checkpointing recomputes a forward: that is no new pass.
        if not (live := listeners()):
            _retain(live)  # a block that Ctrl-C ended left the key behind
        elif not in_backward() and (attends or not _leaves_off(live)):
            if not attends and any(listener.eager.scores for listener in live):
                _carry(live, (*args, *kwargs.values()), out, frame, multiplies)
            unreadable = unreadable_kind((*args, *kwargs.values(), out), nested=not attends)
            if skip is not None and unreadable is None and not any(one.eager.open for one in live) and skip(args):
                return
            call = {**blank, **dict(zip(names, args, strict=False)), **kwargs}
            if attends or (unreadable is None and not in_jit_trace()):
                _report(live, handler, call, out, frame, unreadable)
            else:
                _pass_by(live, call, out, frame, unreadable, multiplies)

    return report


def _carry(live: list[Any], operands: tuple[Any, ...], out: Any, frame: FrameType, multiplies: bool) -> None:
    for listener in live:
        if listener.eager.scores:
            with guarded(listener, frame):
                listener.eager.carry(operands, out, multiplies)


def _report(
    live: list[Any], handler: Handler, call: dict[str, Any], out: Any, frame: FrameType, unreadable: str | None
) -> None:
    if unreadable == "meta":  # nothing is computed
        return
    for listener in live:
        if unreadable == "FakeTensor":
            listener.compiling(frame)
        elif in_jit_trace():  # shapes are tensors of the trace there
            listener.refuse_at(
                frame, "it was called by torch.jit.trace; record a call of the model, or of the traced one"
            )
        elif unreadable:
            listener.refuse_at(frame, f"its tensors are {unreadable}, which cannot be read here")
        else:
            with guarded(listener, frame):
                handler(listener, call, out, frame)


def _pass_by(
    live: list[Any], call: dict[str, Any], out: Any, frame: FrameType, unreadable: str | None, multiplies: bool
) -> None:
    """An operator that is no sign of attention takes tensors that cannot be read: named if weights are among them.

    A product may be scores, of which a softmax follows elsewhere: `torch.vmap(torch.mm)(q, k).softmax(-1)`.
    """
    if unreadable in (None, "meta", "FakeTensor"):
        return
    for listener in live:
        with guarded(listener, frame):
            inner = [x for value in call.values() if (x := memory_of(value)) is not None]
            if any(listener.eager.softmax_of(x) is not None for x in inner):
                listener.refuse_at(frame, f"its weights are {unreadable}, which cannot be read here")
                continue
            product = memory_of(out) if multiplies and out.ndim > 1 else None
            if product is not None and (site := listener.call_site(frame)) is not None:
                listener.eager.add_product(product, site.name, flat=False, ends=tuple(out.shape[-2:]))
