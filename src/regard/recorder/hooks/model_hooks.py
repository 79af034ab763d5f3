"""Hooks on a model while a recording is open, and the attention that it cannot intercept.

Hooks say where the model's forward begins and ends, in which threads its modules run, and which modules that look like
attention ran. They touch nothing. Where a hook would change the model there is none: an `nn.TransformerEncoderLayer`
with hooks leaves its C++ path, and compiled code would be compiled again.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...core.torch_state import in_backward
from .call_site import CAPTURED, is_only_thread, is_plain_layer, looks_like_attention
from .census import Census, OwnHook, census_of
from .layer_history import regime_of

__all__ = ["Hook", "ModelHooks", "batch_size", "first_axes", "is_compiled", "remove_all"]

log = logging.getLogger("regard")

NOT_CALLED = (
    "it was not called in the block, or only as code of torch.compile, which fuses its attention away; call the plain "
    "module in the block"
)

#: Kinds of modules, by the names of their classes, that compute no weights over keys.
_WITHOUT_WEIGHTS = (
    (r"deformable", "samples points between the positions: its weights are over samples, not over keys"),
    (
        r"deltanet|mamba|rglru|recurrent|retention|rwkv|hyena|lightning|linear",
        "is a recurrence or linear attention, which computes no weights over keys",
    ),
    (r"attentionmap$", "computes weights that meet no values: a map that is its output"),
)

_UNSEEN = (
    "ran no fused kernel of PyTorch and no softmax that met values as weights over keys do; kernels called past "
    "PyTorch's operators are not seen"
)

#: Modules in whose calls a compiler was once seen at work; the code it made runs without interception.
_compiled_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_lock = threading.Lock()


class Hook(OwnHook):
    """A hook on a model that ends with its owner: it holds a method weakly, and removes itself when that is gone.

    A block whose `__exit__` never came to its end (Ctrl-C) leaves none behind; in a copy of the model, or a pickle, a
    hook has no owner.
    """

    def __init__(self, method: Callable[..., None] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():  # a hook in compiled code would change the code
            return
        method = None if self._method is None else self._method()
        if method is None:
            self._remove_from(module)
        else:
            method(*self._first, module, *args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()

    def _remove_from(self, module: nn.Module) -> None:
        for hooks, *flags in (
            ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
            ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        ):
            for key in [key for key, hook in getattr(module, hooks, {}).items() if hook is self]:
                for table in (hooks, *flags):
                    getattr(module, table, {}).pop(key, None)


class EnterHook(Hook):
    """The same for `ModelHooks._enter`, which runs in every layer."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        enter = self._method() if self._method is not None else None
        if enter is None:
            self._remove_from(module)
        elif not torch.compiler.is_compiling():
            enter(module)


class _HookOnMany:
    """The handle of one hook before the forward of many modules: PyTorch's own way takes longer than the hook."""

    def __init__(self, modules: list[nn.Module], hook: Hook) -> None:
        self._modules = modules
        self._first = modules[0].register_forward_pre_hook(hook)
        for module in modules[1:]:
            module._forward_pre_hooks[self._first.id] = hook

    def remove(self) -> None:
        self._first.remove()
        for module in self._modules[1:]:
            module._forward_pre_hooks.pop(self._first.id, None)


class _Facts(NamedTuple):
    """Modules by their numbers."""

    is_suspect: bool  # whether the model itself looks like attention
    has_meta: bool  # whether parameters are on the meta device
    sample: int  # a module with parameters
    compiled: list[int]
    hookable: list[int]  # those that are not PyTorch's own layers, and may have hooks
    suspects: list[int]  # those of them that look like attention


def _facts_of(modules: list[tuple[str, nn.Module]]) -> _Facts:
    compiled = [n for n, (_, module) in enumerate(modules) if is_compiled(module)]
    untouched: set[int] = set()
    for n, (_, part) in enumerate(modules):
        if isinstance(part, (nn.TransformerEncoderLayer, torch.jit.ScriptModule)) or n in compiled:
            untouched |= {id(module) for module in part.modules()}
    hookable = [
        n
        for n, (name, module) in enumerate(modules)
        if name and not is_plain_layer(module) and id(module) not in untouched
    ]
    suspects = [n for n in hookable if looks_like_attention(modules[n][1], modules[n][0])]
    parameters = [(n, p) for n, (_, module) in enumerate(modules) for p in module._parameters.values() if p is not None]
    return _Facts(
        is_suspect=bool(modules) and looks_like_attention(modules[0][1]),
        has_meta=any(p.is_meta for _, p in parameters),
        sample=parameters[0][0] if parameters else 0,
        compiled=compiled,
        hookable=hookable,
        suspects=suspects,
    )


def remove_all(handles: list[Any]) -> None:
    """Remove hooks by their handles, and forget these."""
    while handles:
        handles.pop().remove()


class ThreadEvents(Protocol):
    """The part of a recording that follows one thread, by what happens in it."""

    def begin(self, axes: tuple[int, int] | None, regime: Any) -> None:
        """The model's own forward begins, with an input of these first axes, in this regime; see `layer_history`."""

    def end(self, completed: bool) -> None:
        """The model's own forward ends, with a result or by an exception."""

    def enter(self) -> None:
        """A module of the model begins."""

    def leave(self) -> None:
        """A module of the model ends."""

    def pause(self, on: bool) -> None:
        """Compiled code begins, or has ended."""

    def start_over(self) -> None:
        """Another thread begins, perhaps with the id of one that ended."""

    def request(self, on: bool) -> None:
        """A function begins that is recorded outside of modules too; or it has ended."""


class ModelHooks:
    """The hooks of one recording on one model."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.census: Census | None = None
        self.modules: list[tuple[str, nn.Module]] = []
        if model is not None:
            self.census, self.modules = census_of(model)
        self.ran: dict[str, nn.Module] = {}  # modules that look like attention and were called
        self.entered: list[str] = []  # the same since the last attention call, in the thread that attached
        self.ran_here = False  # whether the model ran as Python and not as compiled code
        self._suspects: dict[int, str] = {}  # names of modules that look like attention, by id
        self._handles: list[Any] = []
        self._unhooked: list[nn.Module] = []  # modules that get hooks with the first other thread
        self._here: Callable[[], Any] = lambda: None  # a weak reference to the observer's method
        self._owner = 0  # the thread that attached: it listens all the time, in whatever module
        weakref.finalize(self, remove_all, self._handles)

    def names(self) -> dict[int, str]:
        """The names of the model's modules, by id."""
        memory = {} if self.census is None else self.census.facts
        if "names" not in memory:
            memory["names"] = {id(module): name for name, module in self.modules}
        names: dict[int, str] = memory["names"]
        return names

    def attach(self, here: Callable[[], ThreadEvents | None]) -> None:
        """Report to what `here()` answers in the thread of a hook: its part of the recording, or None."""
        self._here, self._owner = weakref.WeakMethod(here), threading.get_ident()
        model = self.model
        if model is None or is_compiled(model):
            return
        if isinstance(model, torch.jit.ScriptModule | nn.TransformerEncoderLayer):  # take no hooks, nor do their parts
            self._handles += [
                nn.modules.module.register_module_forward_pre_hook(Hook(self._begin_among_all)),
                nn.modules.module.register_module_forward_hook(Hook(self._end_among_all), always_call=True),
            ]
            return
        self._handles += [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._end), always_call=True),
        ]
        facts = self._facts()
        for n in facts.compiled:
            part = self.modules[n][1]
            if type(part).__name__ == "OptimizedModule":
                # While compiled code runs, the thread's keys must be those it was compiled under.
                self._handles.append(part.register_forward_pre_hook(Hook(self._pause_or_resume, True)))
                self._handles.append(part.register_forward_hook(Hook(self._pause_or_resume, False), always_call=True))
        self._unhooked = [self.modules[n][1] for n in facts.hookable]
        suspects = [self.modules[n] for n in facts.suspects]
        if _compiled_modules:
            suspects += [self.modules[n] for n in facts.hookable if self.modules[n][1] in _compiled_modules]
        self._suspects = {id(module): name for name, module in suspects}
        if suspects:
            self._handles.append(_HookOnMany([module for _, module in suspects], EnterHook(self._enter)))
        if not is_only_thread():
            self._hook_all()

    def _parameters_of(self, n: int) -> Iterable[nn.Parameter | None]:
        return self.modules[n][1]._parameters.values() if self.modules else ()

    def _facts(self, anew: bool = False) -> _Facts:
        """The facts about the model's modules, gathered once while they stay the same."""
        memory = {} if self.census is None else self.census.facts
        if anew or "hooks" not in memory:
            memory["hooks"] = _facts_of(self.modules)
        facts: _Facts = memory["hooks"]
        return facts

    def _hook_all(self) -> None:
        """Hook all modules, and where they end: this tells of other threads alone, and each hook takes time."""
        with _lock:
            modules, self._unhooked = self._unhooked, []
        for module in modules:
            if id(module) not in self._suspects:
                self._handles.append(module.register_forward_pre_hook(Hook(self._enter)))
            self._handles.append(module.register_forward_hook(Hook(self._leave), always_call=True))

    def detach(self) -> None:
        """Remove every hook."""
        remove_all(self._handles)
        self.model, self.modules, self.ran, self._suspects, self._unhooked = None, [], {}, {}, []

    def _thread(self) -> ThreadEvents | None:
        if self._unhooked and threading.get_ident() != self._owner:
            self._hook_all()
        here = self._here()
        return None if here is None else here()

    def _pause_or_resume(self, on: bool, *_: Any) -> None:
        if (thread := self._thread()) is not None:
            thread.pause(on)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (thread := self._thread()) is not None:
            self.ran_here = True
            if self._facts().is_suspect:
                self.ran[""] = model
            axes = first_axes(args, kwargs)
            thread.begin(axes, (axes, regime_of(model, args, kwargs)))

    def _begin_among_all(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is self.model:
            self._begin(module, args, {})

    def _end_among_all(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.model:
            self._end(module, args, output)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if (thread := self._thread()) is not None:
            thread.end(output is not None)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        suspect = self._suspects.get(id(module))
        if threading.get_ident() == self._owner:
            if suspect is not None and not in_backward():  # where a checkpoint recomputes
                self.ran[suspect] = module
                self.entered.append(suspect)
            return
        if (thread := self._thread()) is not None:
            thread.enter()
            if suspect is not None:
                self.ran[suspect] = module

    def _leave(self, *_: Any) -> None:
        if threading.get_ident() != self._owner and (thread := self._thread()) is not None:
            thread.leave()

    # Functions in other threads, outside of modules; see `other_threads.Owner`.

    def thread_begins(self) -> None:
        if (thread := self._thread()) is not None:
            thread.start_over()
            thread.request(True)

    def work_begins(self) -> None:
        if threading.get_ident() != self._owner and (thread := self._thread()) is not None:
            thread.request(True)

    def work_ends(self) -> None:
        if threading.get_ident() != self._owner and (thread := self._thread()) is not None:
            thread.request(False)

    # Attention that is not intercepted.

    def is_fully_compiled(self) -> bool:
        return self.model is not None and is_compiled(self.model)

    def announced_refusals(self) -> Iterator[tuple[str, str]]:
        """Modules that cannot be recorded, known before the model runs: (name, reason)."""
        for n in self._facts().compiled:
            yield self.modules[n][0], CAPTURED
            if n == 0:
                return
        facts = self._facts()
        if facts.has_meta or any(p is not None and p.is_meta for p in self._parameters_of(facts.sample)):
            facts = self._facts(anew=True)
        if facts.has_meta:
            yield "", "some of its parameters are on the meta device, which holds shapes and no numbers"
        if isinstance(self.model, nn.DataParallel) and len(self.model.device_ids) > 1:
            yield "", "DataParallel runs its replicas in threads of their own; record model.module"

    def compiling(self, name: str, module: nn.Module) -> None:
        """A compiler traces attention of this module: it is intercepted now, and perhaps not the next time."""
        _compiled_modules.add(module)
        self.ran[name] = module

    def missed_modules(self, recorded: set[str]) -> Iterator[tuple[str, str]]:
        """Modules that look like attention, ran, and were not intercepted: (name, reason)."""
        for name, module in list(self.ran.items()):  # a thread may still run
            if name in recorded:
                continue
            is_recorded = any(_within(other, name) or _within(name, other) for other in recorded)
            has_inner = any(other != name and _within(other, name) for other in self.ran)
            if not is_recorded and not has_inner:
                yield name, CAPTURED if module in _compiled_modules else _unseen_reason(module)
        if not recorded and not self.ran and not self.ran_here and _was_compiled(self.model):
            yield "", NOT_CALLED


def _unseen_reason(module: nn.Module) -> str:
    """The reason why no attention of a module was seen."""
    kind = type(module).__name__
    return f"{kind} {next((why for names, why in _WITHOUT_WEIGHTS if re.search(names, kind, re.I)), _UNSEEN)}"


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to a module: `torch.compile(m)`, `m.compile()`, or to its `forward`."""
    own = vars(module)
    if type(module).__name__ == "OptimizedModule" or own.get("_compiled_call_impl") is not None:
        return True
    return "forward" in own and hasattr(own["forward"], "_torchdynamo_orig_callable")


def _was_compiled(model: nn.Module | None) -> bool:
    """Whether torch.compile holds code for the model's class: `c = torch.compile(m)` leaves no mark on m itself.

    The code of PyTorch's containers (nn.Sequential) lies elsewhere, and is noticed when it runs, but not in 2.6.
    """
    if model is None or "torch._dynamo" not in sys.modules or (compiled_code := _compiled_code_list()) is None:
        return False
    try:
        return bool(compiled_code(type(model).forward.__code__))
    except (AttributeError, TypeError):  # a forward without bytecode
        return False


@functools.cache
def _compiled_code_list() -> Callable[[Any], list[Any]] | None:
    """A private function of PyTorch that lists what torch.compile holds for some code; None where there is none."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    except ImportError:
        log.warning("this PyTorch has no _debug_get_cache_entry_list: a model that ran only compiled is not announced")
        return None
    return _debug_get_cache_entry_list


def _within(name: str, other: str) -> bool:
    """Whether a module is another one or stands inside it."""
    return name == other or not other or name.startswith(other + ".")


def first_axes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """The first two axes of a model's first input with two or more."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and not x.is_nested and x.ndim >= 2:
            return x.shape[0], x.shape[1]
    return None


def batch_size(
    axes: tuple[int, int] | None, rows: int, keys: int | None = None, count: int | None = None
) -> int | None:
    """The number of sequences of an input with these axes; None if the first of them may be the sequence.

    Args:
        axes: The first two axes of the input.
        rows: The number of queries of a call.
        keys: The number of its keys.
        count: The size of its axis of sequences or heads; it is that of sequences in (length, batch) where both fit.
    """
    if axes is not None and axes[0] != axes[1] and axes == (keys, count):
        return count
    return None if axes is None or (axes[0] == rows > 1 and axes[1] != rows) else axes[0]
