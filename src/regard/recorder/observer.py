"""`regard.record`: the context manager.

While it is open, every thread in which the model runs has a listener that saves the requested parts of its attention
calls (`thread_recorder`). At the end passes become layers, and attention that could not be recorded is named.
"""

from __future__ import annotations

import fnmatch
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .._io import as_path
from ..core.indexing import as_int
from ..core.torch_state import in_backward
from .calls import Overwritten
from .file import check_target
from .first_rank import is_first_rank
from .hooks import other_threads, seams, tap, transformers
from .hooks.call_site import CAPTURED, runs_method
from .hooks.model_hooks import ModelHooks
from .kv_cache import CannotStitch
from .layer import Layer
from .passes import Call, with_encoders
from .recording import Pass, Recording
from .spill import Spill
from .thread_recorder import SharedRecording, ThreadRecorder
from .tokens import EmbeddedIds, TokensLike, check_tokens, label

__all__ = ["Observer", "RefusedWarning", "record"]

STILL_RUNNING = (
    "the block ended while the model was running in another thread, and that pass is not recorded; wait for the thread "
    "inside the block, such as by thread.join()"
)


class RefusedWarning(UserWarning):
    """Some attention of the model could not be recorded.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():  # a recording that lacks something is then an error
        ...     warnings.simplefilter("error", RefusedWarning)
    """


def record(
    model: nn.Module | None,
    *,
    tokens: TokensLike | None = None,
    keep: Literal["factors", "statistics"] = "factors",
    values: bool = False,
    device: str | torch.device | None = None,
    path: str | os.PathLike[str] | None = None,
    layers: int | str | Iterable[int | str] | None = None,
    grad: bool = False,
) -> Observer:
    """Record the attention of any PyTorch model while it runs, unchanged and on its own kernels.

    Args:
        model: The model, in whatever thread it runs; None records every attention call of this thread.
        tokens: A tokenizer, a function id -> text, a list of tokens, a list of such lists (one a sequence), or a tuple
            (source, target) of lists for encoder and decoder. Default: positions have no text.
        keep: `"factors"` saves queries and keys, from which every weight follows; `"statistics"` saves row
            statistics only, for long runs.
        values: Save the value vectors too.
        device: Where saved tensors go, such as `"cpu"`. Default: they stay where they are.
        path: A .regard file: tensors go to disk layer by layer, and the file is written when the block ends; of a
            model under DistributedDataParallel or FSDP2 by its first rank alone.
        layers: The layers to record: numbers in the order of calls, module names, patterns such as `"*.self_attn"`.
            Default: all. Layers keep their numbers.
        grad: Leave recorded weights part of the autograd graph: `seen[0].entropy().sum().backward()` reaches the
            parameters of the model. Attention that has no graph (under `torch.no_grad` or `inference_mode`, on
            PyTorch's C++ path, compiled, or in an activation checkpoint) is then refused by name.

    Returns:
        A context manager whose value is the `Recording`. It fills when the block ends, and works for one block.

    Example:
        >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with record(model, tokens=["the", "cat", "sat"]) as seen:
        ...     y = model(x, x, x)
        >>> seen[0, 1]["cat", "the"].shape
        torch.Size([])
        >>> with record(model, grad=True) as seen:
        ...     y = model(x, x, x)
        >>> seen[0].entropy().sum().backward()
        >>> model.in_proj_weight.grad.shape
        torch.Size([24, 8])
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"record(model) needs an nn.Module, or None for all of this thread; got {type(model).__name__}."
        )
    if keep not in ("factors", "statistics"):
        raise ValueError(f'keep is "factors" or "statistics"; got {keep!r}.')
    check_tokens(tokens)
    if grad and path is not None:
        raise ValueError(
            "grad=True keeps tensors in the autograd graph, and a file has none; got path=. Drop one of them."
        )
    for name, flag in (("values", values), ("grad", grad)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is True or False; got {flag!r}.")
    only = _as_list(layers)
    if model is not None and only is not None:
        _check_names(only, model)
    return Observer(model, tokens, keep, values, _as_device(device, path), _as_path(path), only, grad)


_IS_A_BLOCK = "regard.record(model) is a block: `with regard.record(model) as seen:`, then ask `seen`."


class Observer:
    """The block of a recording: active between `__enter__` and `__exit__`."""

    _started = True  # until `__init__` is through: an object that failed there warns of nothing

    def __init__(
        self,
        model: nn.Module | None,
        tokens: TokensLike | None,
        keep: str,
        values: bool,
        device: str | None,
        path: str | None,
        only: list[int | str] | None,
        grad: bool,
    ) -> None:
        self.source, self.path, self.only, self.hooks = tokens, path, only, ModelHooks(model)
        names = None if model is None else self.hooks.names()
        wants_ids = tokens is not None and not isinstance(tokens, list | tuple)
        spill = None if path is None else Spill(path)
        self.shared = SharedRecording(self.hooks, names, keep, values, device, spill, only, grad, wants_ids)
        self.recording = self.shared.recording
        self._threads: dict[int, ThreadRecorder] = {}  # by the id of the thread
        self._thread = 0  # the one that opened the block
        self._started = False
        self._reports = is_first_rank(model)  # the other ranks of a wrapped model neither warn nor write a file
        self._undo: Any = None

    # The block.

    def __enter__(self) -> Recording:
        if self._started:
            raise RuntimeError("a recording is one block; call regard.record(model) again for another.")
        self._started = True
        seams.install()
        transformers.install(self.hooks)
        # Undone when the block ends, or with this object where Ctrl-C came into `__exit__` itself.
        self._undo = weakref.finalize(self, _undo, self.hooks)
        for name, reason in self.hooks.announced_refusals():
            self.shared.refuse(name, reason)
        self._thread = threading.get_ident()
        own = self._threads[self._thread] = ThreadRecorder(self.shared, guest=False)
        self.hooks.attach(self._recorder_here)
        if not self.hooks.is_fully_compiled():
            tap.activate(own)
            if self.shared.names is not None:
                other_threads.install(self.hooks)
        return self.recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread not in self._threads:
            raise RuntimeError("a recording ends once, with its block: `with regard.record(model) as seen:`.")
        try:
            tap.deactivate(self._threads[self._thread])
            with self.shared.lock, tap.suspended(), torch.set_grad_enabled(self.shared.grad):
                for ident, thread in list(self._threads.items()):
                    if thread.inside or (thread.in_pass and runs_method(ident, self.shared.names)):
                        self.shared.refuse("", STILL_RUNNING)
                    else:
                        thread.end_pass()
                self._finish()
        finally:
            self._undo()
        if kind is None and self._reports:
            self._warn()
            if self.path is not None:
                self.recording.save(self.path)

    def _recorder_here(self) -> ThreadRecorder | None:
        """The listener of this thread; None where what runs is not to be recorded."""
        if in_backward():  # a checkpoint that recomputes
            return None
        thread = threading.get_ident()
        # A thread with a block of its own for this model is not recorded twice.
        if thread != self._thread and any(other.covers(self.hooks.model) for other in tap.listeners()):
            return None
        if thread not in self._threads:
            self._threads[thread] = ThreadRecorder(self.shared, guest=True)
        return self._threads[thread]

    def __repr__(self) -> str:
        state = "open or done" if self._started else "not started: write `with regard.record(model) as seen:`"
        return f"<regard.record, {state}>"

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(_IS_A_BLOCK)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_IS_A_BLOCK)

    if not TYPE_CHECKING:  # hidden from type checkers, which then report a misspelt name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(_IS_A_BLOCK if not name.startswith("_") else f"a recording's block has no {name!r}")

    def __del__(self) -> None:
        if not self._started:
            text = "regard.record(model) recorded nothing: it is a block, `with regard.record(model) as seen:`."
            warnings.warn(text, RefusedWarning, stacklevel=2)

    def _finish(self) -> None:
        """Make layers of calls, join and label passes, and name the attention that was not intercepted."""
        recorded = {name for name, _ in self.recording.refused}
        counts = [self.shared.most_calls]
        for one in with_encoders(self.shared.done):
            finished = Pass([], one.steps)
            counts.append(one.count)
            for call in one.calls:
                recorded.add(call.name)
                if (layer := self._layer(call)) is not None:
                    layer.parent = finished
                    finished.layers.append(layer)
            self._label(finished, one.embedded)
            if finished.layers:
                self.recording.passes.append(finished)
        for name, reason in self.hooks.missed_modules(recorded):
            if self.only is None or any(isinstance(w, str) and fnmatch.fnmatchcase(name, w) for w in self.only):
                self.shared.refuse(name, reason)
        self._drop_needless_refusals()
        self._check_request(max(counts))
        self.shared.closed, self.shared.done, self.shared.names = True, [], None
        self._threads.clear()

    def _label(self, one: Pass, embedded: list[EmbeddedIds]) -> None:
        """Give layers their tokens; a tokenizer that raises costs these, and not the recording."""
        try:
            label(one.layers, embedded, self.source, self.hooks.model)
        except Exception as error:
            self.shared.refuse("tokens", f"the tokenizer raised {error!r:.200} for ids that the model looked up")

    def _layer(self, call: Call) -> Layer | None:
        try:
            saved = call.finished()
        except (CannotStitch, Overwritten) as error:
            self.shared.refuse(call.name, str(error))
            return None
        return Layer(call.name, call.number, call.kind, saved, call.statistics, call.shape)

    def _drop_needless_refusals(self) -> None:
        """A compiled module that still called PyTorch's kernels is recorded, not refused."""
        names = {layer.name for one in self.recording.passes for layer in one.layers}
        self.recording.refused[:] = [
            (name, why) for name, why in self.recording.refused if why != CAPTURED or name not in names
        ]

    def _check_request(self, calls: int) -> None:
        """Name layers that were requested and never called, and tokens that fit no layer."""
        missing = [w for w in self.only or () if isinstance(w, int) and w >= calls]
        if missing and calls:
            self.shared.refuse("layers", f"layers {missing} were requested, and a pass has {calls} attention calls")
        layers = [layer for one in self.recording.passes for layer in one.layers]
        if self.source is None or not layers or any(x.tokens != (None, None) for x in layers):
            return
        if any(name == "tokens" for name, _ in self.recording.refused):
            return
        if not isinstance(self.source, list | tuple):
            self.shared.refuse("tokens", "no embedding looked up ids of these lengths; pass the list of tokens instead")
        else:
            sizes = sorted({(layer.shape[0], *layer.shape[2:]) for layer in layers})[:4]
            shapes = ", ".join(f"{b} × {i} × {j}" for b, i, j in sizes)
            self.shared.refuse(
                "tokens",
                f"{_describe(self.source)} fit no layer; layers have batch × queries × keys {shapes}. Pass one list of "
                "tokens, or one list for each sequence",
            )

    def _warn(self) -> None:
        if refused := self.recording.refused:
            named = "; ".join(f"{name or '(the model)'}: {reason}" for name, reason in refused[:4])
            more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
            warnings.warn(f"not recorded (all in seen.refused): {named}{more}.", RefusedWarning, stacklevel=3)


def _undo(hooks: ModelHooks) -> None:
    """Leave the model and transformers as they were before the block."""
    hooks.detach()
    other_threads.uninstall(hooks)
    transformers.uninstall(hooks)


def _as_device(device: Any, path: Any) -> str | None:
    """The device of saved tensors; with a path they pass through the CPU."""
    if device is None:
        return None if path is None else "cpu"
    try:
        chosen = torch.device(device)
    except (TypeError, RuntimeError) as error:
        hint = " A file goes to path=." if isinstance(device, str | os.PathLike) else ""
        raise TypeError(f'device must be a device such as "cpu"; got {device!r}.{hint}') from error
    try:
        holds = not torch.empty(0, device=chosen).is_meta
    except (AssertionError, NotImplementedError, RuntimeError):
        holds = False
    if not holds:
        raise ValueError(f'device must hold tensors on this machine, as "cpu" does; got {device!r}.')
    return str(chosen)


def _as_path(path: Any) -> str | None:
    if path is None:
        return None
    file = as_path(path, "record(path=)")
    check_target(file)  # a model may run for hours before it is written
    return os.fspath(file)


def _as_list(layers: Any) -> list[int | str] | None:
    if layers is None:
        return None
    is_one = isinstance(layers, str | Mapping) or getattr(layers, "ndim", None) == 0
    chosen: list[Any] = list(layers) if isinstance(layers, Iterable) and not is_one else [layers]
    chosen = [which if isinstance(which, str) else as_int(which) for which in chosen]
    if any(which is None for which in chosen):
        raise TypeError(f"layers are numbers in the order of calls, module names or patterns; got {layers!r}.")
    if not chosen or any(isinstance(which, int) and which < 0 for which in chosen):
        raise ValueError(
            f"layers are counted from 0 as they are called, and one at least is requested; got {layers!r}. Leave "
            "layers out for all."
        )
    return chosen


def _check_names(layers: list[int | str], model: nn.Module) -> None:
    """Every name or pattern must fit a module of the model."""
    names = [name for name, _ in model.named_modules()]
    for pattern in layers:
        if isinstance(pattern, str) and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(repr(name) for name in names if name)
            raise ValueError(
                f"layers: no module of the model is named {pattern!r}; there are {some[:300]}. "
                'Patterns such as "*.self_attn" work too.'
            )


def _describe(tokens: Any) -> str:
    if all(isinstance(token, str) for token in tokens):
        return f"{len(tokens)} tokens"
    return f"{len(tokens)} lists of {', '.join(str(len(line)) for line in tokens[:6])} tokens"
