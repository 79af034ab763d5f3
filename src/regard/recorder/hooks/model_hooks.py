"""What a recording leaves on the model while it is open, and which attention it could not hear.

Hooks tell where the model's forward begins and ends, and whether a module that calls itself attention ran. They look
at the thread first and touch nothing. Where a hook would change the model there is none: with hooks an
`nn.TransformerEncoderLayer` leaves its C++ path, and captured code would be compiled again. Imports `where`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .call_site import looks_like_attention

__all__ = ["CAPTURED", "Attached"]

CAPTURED = "captured by torch.compile, which fuses its attention away; record the module it was made from"

_GUESSES = "linear attention keeps no weights, a kernel called directly or captured by torch.compile shows none"

#: Modules in whose calls a compiler was once seen at work; what it made runs unheard.
_captured_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Attached:
    """Hooks on one model for one thread."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.modules = [] if model is None else list(model.named_modules())
        self.thread = threading.get_ident()
        self.ran: dict[str, nn.Module] = {}
        self.depth = 0  # how deep in the model's own forward
        self.batch: int | None = None  # how many sequences went in
        self._hooks: list[Any] = []

    def here(self) -> bool:
        """Whether this is the recording's thread, and not a checkpoint computing again."""
        return threading.get_ident() == self.thread and torch._C._current_graph_task_id() == -1

    def attach(self, boundary: Callable[[], None], pause: Callable[[bool], None]) -> None:
        """Call `boundary` where a forward of the model begins and ends, `pause` round captured code."""
        self.thread = threading.get_ident()
        model = self.model
        if model is None or _is_captured(model):
            return
        if not isinstance(model, nn.TransformerEncoderLayer):
            self._hooks += [
                model.register_forward_pre_hook(self._begin(boundary), with_kwargs=True, prepend=True),
                model.register_forward_hook(self._end(boundary), always_call=True),
            ]
        closed: set[int] = set()
        for _, part in self.modules:
            if isinstance(part, nn.TransformerEncoderLayer) or _is_captured(part):
                closed |= {id(module) for module in part.modules()}
            if type(part).__name__ == "OptimizedModule":
                # While captured code runs, the thread's keys must be those it was compiled under.
                self._hooks.append(part.register_forward_pre_hook(lambda *_: self._round(pause, True)))
                self._hooks.append(part.register_forward_hook(lambda *_: self._round(pause, False), always_call=True))
        for name, module in self.modules:
            suspect = looks_like_attention(module, name) or module in _captured_modules
            if name and suspect and id(module) not in closed:
                self._hooks.append(module.register_forward_pre_hook(self._noted(name)))

    def detach(self) -> None:
        """Leave nothing behind."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.model, self.modules, self.ran = [], None, [], {}

    def _round(self, pause: Callable[[bool], None], on: bool) -> None:
        if self.here():
            pause(on)

    def _begin(self, boundary: Callable[[], None]) -> Callable[..., None]:
        def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.here():
                if self.depth == 0:
                    boundary()
                    self.batch = _batch_of(args, kwargs)
                self.depth += 1

        return begin

    def _end(self, boundary: Callable[[], None]) -> Callable[..., None]:
        def end(*_: Any) -> None:
            if self.here():
                self.depth = max(0, self.depth - 1)
                if self.depth == 0:
                    boundary()

        return end

    def _noted(self, name: str) -> Callable[..., None]:
        def noted(module: nn.Module, args: Any) -> None:
            if self.here():
                self.ran[name] = module

        return noted

    # What cannot be heard.

    def whole_is_captured(self) -> bool:
        return self.model is not None and _is_captured(self.model)

    def deaf_spots(self) -> Iterator[tuple[str, str]]:
        """What is known beforehand not to be heard: (name, reason)."""
        for name, module in self.modules:
            if _is_captured(module):
                yield name, CAPTURED
                if not name:
                    return
        if isinstance(self.model, nn.DataParallel) and len(self.model.device_ids) > 1:
            yield "", "DataParallel runs its replicas in threads of their own; record model.module"

    def compiling(self, name: str, module: nn.Module) -> None:
        """A compiler is tracing attention in this module: it shows this time, and may not the next."""
        _captured_modules.add(module)
        self.ran[name] = module

    def silent(self, heard: set[str]) -> Iterator[tuple[str, str]]:
        """Modules that call themselves attention, ran, and were not heard attending: (name, reason)."""
        for name, module in self.ran.items():
            known = any(_within(other, name) or _within(name, other) for other in heard)
            inner = any(other != name and _within(other, name) for other in self.ran)
            if not known and not inner:
                reason = f"{type(module).__name__} ran no attention that PyTorch's operators show: {_GUESSES}"
                yield name, CAPTURED if module in _captured_modules else reason


def _is_captured(module: nn.Module) -> bool:
    """Whether torch.compile was applied to a module, in either way."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _within(name: str, other: str) -> bool:
    """Whether a module is another one or stands inside it."""
    return name == other or not other or name.startswith(other + ".")


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and not x.is_nested and x.ndim >= 2:
            return x.shape[0]
    return None
