"""`regard.record`: the context manager, and the observer that listens while it is open.

The observer is told of every attention call of its thread (`seams`), keeps what was asked for, notices where one
pass ends and the next begins, and at the end says which attention it could not record. On the model it leaves, for
the time of the block, one hook on the whole (where passes begin) and one on each module that calls itself attention
(whether it ran); both look at the thread first and touch nothing. Imports the other rooms of the recorder.
"""

from __future__ import annotations

import fnmatch
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from . import seams, tap
from .capture import Attention, Kept, Overwritten, keep
from .recording import Layer, Pass, Recording, numbers
from .stitch import Broken, Growing, continues
from .tokens import Embedded, label
from .where import Place, called_by, looks_like_attention, place, trail

__all__ = ["Observer", "RefusedWarning", "record"]


class RefusedWarning(UserWarning):
    """Some attention of the model could not be recorded."""


def record(
    model: nn.Module | None,
    *,
    tokens: Any = None,
    keep: str = "factors",
    values: bool = False,
    to: Any = None,
    layers: Any = None,
) -> Observer:
    """Look into any PyTorch model while it runs, unchanged and on its own kernels.

    with regard.record(model, tokens=tokenizer) as seen:
        model(**inputs)
    seen[3, 1]["it", "animal"]

    tokens   a tokenizer, a list of words, a list of such lists (one a sequence), or nothing
    keep     "factors" (queries and keys, from which every weight can be had) or "statistics" (numbers only)
    values   keep the value vectors too
    to       where recorded tensors go: None (they stay), "cpu", or a path: a .regard file written at the end
    layers   which layers: numbers in the order of calls, module names, patterns such as "*.self_attn"
    model    None records every attention of this thread
    """
    return Observer(model, tokens, keep, values, to, layers)


class Observer:
    """The block of a recording: listens between `__enter__` and `__exit__`."""

    wants_scores = False

    def __init__(self, model: Any, tokens: Any, keep: str, values: bool, to: Any, layers: Any) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"record(model): an nn.Module is recorded, or None for everything in this thread; {type(model).__name__} came."
            )
        if keep not in ("factors", "statistics"):
            raise ValueError(f'keep is "factors" or "statistics"; {keep!r} came.')
        self.model, self.tokens, self.keep, self.values = model, tokens, keep, values
        self.to, self.path = _destination(to)
        self.only = None if layers is None else _as_list(layers)
        self._modules = [] if model is None else list(model.named_modules())
        self.names = None if model is None else {id(module): name for name, module in self._modules}
        self.masks: dict[Any, Any] = {}  # masks of the running pass that were read already
        self.wants_ids = tokens is not None and not isinstance(tokens, list | tuple)
        self.seen = Recording()
        self.trail = seams.Trail()
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []
        self._ran: dict[str, nn.Module] = {}
        self._depth = 0
        self._pass: _Open | None = None
        self._done: list[_Open] = []
        self._batch: int | None = None
        self._asleep = False
        self._transformers: Any = None
        self._beams = False
        self._used = False

    # The block.

    def __enter__(self) -> Recording:
        if self._used:
            raise RuntimeError("a recording is one block; call regard.record(model) again for another.")
        self._used = True
        seams.listen()
        self._transformers = _transformers()
        if self._transformers is not None:
            self._transformers.listen()
        self._thread = threading.get_ident()
        self._asleep = self._refuse_captured()
        self._hook()
        if not self._asleep:
            tap.enter(self)
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tap.leave(self)
        if self._transformers is not None:
            self._transformers.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end_pass()
        with tap.quiet(), torch.no_grad():
            self._finish()
        if kind is None:
            self._warn()
            if self.path is not None:
                self.seen.save(self.path)

    def _finish(self) -> None:
        for one in _with_encoders(self._done):
            finished = Pass([], one.steps)
            for call in one.calls:
                if (layer := self._closed(call, len(finished.layers))) is not None:
                    layer.of = finished
                    finished.layers.append(layer)
            label(finished.layers, one.embedded, self.tokens, self.model)
            if finished.layers:
                self.seen.passes.append(finished)
        self._done = []
        self._refuse_silent()
        self.names, self.model, self._ran, self._modules, self.masks = None, None, {}, [], {}

    def _closed(self, call: _Call, index: int) -> Layer | None:
        """A finished layer, or a refusal."""
        try:
            kept = call.growing.finish() if call.growing is not None else call.kept
            if kept is not None:
                kept.check()
        except (Broken, Overwritten) as why:
            self.refuse(call.name, str(why))
            return None
        shape = call.shape
        if call.growing is not None:
            shape = (*shape[:2], call.growing.rows, call.growing.total)
        return Layer(call.name, index, call.kind, kept, call.statistics, shape)

    # What the seams tell.

    def place(self, frame: FrameType) -> Place | None:
        """Where in the model a call came from; None if the model is not on the stack."""
        return place(frame, self.names)

    def batch(self) -> int | None:
        """How many sequences go in at once, as far as it is known."""
        return self._batch

    def failed(self, frame: FrameType, why: str) -> None:
        """Something that may be attention passed and could not be read."""
        at = self.place(frame)
        if at is not None:
            self.refuse(at.name, why)

    def captured(self, frame: FrameType) -> None:
        """A compiler is tracing attention: this time it shows; what it made of it may run unheard, now and later."""
        at = self.place(frame)
        if at is not None and at.module is not None:
            _CAPTURED_MODULES.add(at.module)
            self._ran[at.name] = at.module

    def refuse(self, name: str, why: str) -> None:
        """Name what is not recorded, once."""
        if (name, why) not in self.seen.refused:
            self.seen.refused.append((name, why))

    def embedded(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        """Token numbers that went into a layer of embeddings."""
        stack = trail(frame, self.names)
        if stack:
            self._open().embedded.append(Embedded(stack, table.shape[0], table.data_ptr(), ids.detach().cpu().clone()))

    def attention(self, at: Place, found: Attention, inside: str | None = None) -> None:
        """An attention call."""
        name = at.name
        if inside is not None and hasattr(at.module, inside):
            name = f"{name}.{inside}" if name else inside
        one = self._open(name)
        number, nth = one.count, one.times.get(name, 0)
        one.count += 1
        one.times[name] = nth + 1
        if not self._wanted(name, number):
            return
        found.read_mask(self.masks)
        kept = keep(found, self.values, self.to)
        if one.fresh and self._continue(one, at, name, nth, found, kept):
            return
        if one.steps_of is not None:
            self._add_step(one.steps_of, name, nth, found, kept)
            return
        one.fresh = False
        call = _Call(name, nth, self._kind(at, found), kept, found.shape)
        if self.keep == "statistics":
            call.statistics, call.kept = numbers(kept.weights()), None
        one.calls.append(call)

    def _kind(self, at: Place, found: Attention) -> str:
        if found.same is not None:
            return "self" if found.same else "cross"
        if at.other_sequence():
            return "cross"
        *_, i, j = found.shape
        alike = i == j or any(hasattr(at.module, mark) for mark in ("layer_idx", "is_causal")) or "self" in at.name
        return "self" if alike else "cross"

    def _wanted(self, name: str, number: int) -> bool:
        if self.only is None:
            return True
        return any(
            which == number if isinstance(which, int) else fnmatch.fnmatchcase(name, which) for which in self.only
        )

    # Passes.

    def _open(self, name: str | None = None) -> _Open:
        """The pass that runs now. Outside the model's forward, a new one begins where its first layer is called again."""
        one = self._pass
        if one is not None and self._depth == 0 and name is not None and one.calls and one.calls[0].name == name:
            again = one.times.get(name, 0) and one.loose
            if again and len({call.name for call in one.calls}) == len(one.calls):
                self._end_pass()
        if self._pass is None:
            self._pass = _Open(loose=self._depth == 0)
        return self._pass

    def _end_pass(self) -> None:
        one, self._pass = self._pass, None
        self.trail.close()
        self.trail, self.masks = seams.Trail(), {}
        if one is None:
            return
        if one.steps_of is not None:
            one.steps_of.embedded += one.embedded
            one.steps_of.steps += 1
        elif one.calls or one.embedded:
            self._done.append(one)

    def _continue(self, one: _Open, at: Place, name: str, nth: int, found: Attention, kept: Kept) -> bool:
        """Whether the pass that begins with this call is the next step of the one before; then take the step."""
        before = self._done[-1] if self._done else None
        call = before.find(name, nth) if before is not None else None
        if before is None or call is None or call.kind != "self" or call.kept is None or self.keep != "factors":
            return False
        total = call.growing.total if call.growing is not None else _total(call.kept)
        if found.shape[:2] != call.shape[:2] or not continues(found, total):
            return False
        if self._beams or called_by(at.frames[0] if at.frames else None, "beam_search"):
            self._beams = True
            self.refuse("generate", "beam search reorders the cache between steps; record with num_beams=1")
            one.steps_of, one.fresh = _Open(loose=True), False  # the steps of beams go nowhere
            return True
        try:
            call.grow(found, kept)
        except Broken:  # not its continuation after all: a pass of its own
            return False
        one.steps_of, one.fresh = before, False
        return True

    def _add_step(self, whole: _Open, name: str, nth: int, found: Attention, kept: Kept) -> None:
        call = whole.find(name, nth)
        if call is None:
            if not self._beams:
                self.refuse(name, "it ran in a later step of a generation and not in the first")
            return
        try:
            call.grow(found, kept)
        except Broken as why:
            self.refuse(name, str(why))
            whole.calls.remove(call)

    # The model's hooks.

    def _hook(self) -> None:
        model = self.model
        if model is None or self._asleep:
            return
        # With a hook on it an encoder layer leaves its C++ path, in every thread: passes are then told by repetition.
        if not isinstance(model, nn.TransformerEncoderLayer):
            self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
            self._hooks.append(model.register_forward_hook(self._end, always_call=True))
        # Nor may captured code find hooks it was not compiled with.
        closed: set[int] = set()
        for _, part in self._modules:
            if isinstance(part, nn.TransformerEncoderLayer) or _captured(part):
                closed |= {id(module) for module in part.modules()}
        for name, module in self._modules:
            suspect = looks_like_attention(module) or module in _CAPTURED_MODULES
            if name and id(module) not in closed and suspect:
                self._hooks.append(module.register_forward_pre_hook(_Ran(self, name)))

    def _here(self) -> bool:
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._here():
            return
        if self._depth == 0:
            self._end_pass()
            self._batch = _batch_of(args, kwargs)
        self._depth += 1

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._here():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._end_pass()

    # What cannot be recorded.

    def _refuse_captured(self) -> bool:
        """Name what torch.compile has captured; True if that is the whole model."""
        if self.model is None:
            return False
        for name, module in self._modules:
            if _captured(module):
                self.refuse(name, _CAPTURED)
                if not name:
                    return True
                # While captured code runs, the thread's keys must be those it was compiled under.
                if type(module).__name__ == "OptimizedModule":
                    self._hooks.append(module.register_forward_pre_hook(lambda *_: self._pause(True)))
                    self._hooks.append(module.register_forward_hook(lambda *_: self._pause(False), always_call=True))
        if isinstance(self.model, nn.DataParallel) and len(self.model.device_ids) > 1:
            self.refuse("", "DataParallel runs its replicas in threads of their own; record model.module")
        return False

    def _pause(self, on: bool) -> None:
        if self._here() and not self._asleep:
            (tap.leave if on else tap.enter)(self)

    def _refuse_silent(self) -> None:
        """Name the modules that call themselves attention, ran, and were not seen attending."""
        heard = {layer.name for p in self.seen.passes for layer in p.layers} | {name for name, _ in self.seen.refused}
        heard |= {call.name for one in self._done for call in one.calls}
        for name, module in self._ran.items():
            known = any(_within(other, name) or _within(name, other) for other in heard)
            chosen = self.only is None or any(isinstance(w, str) and fnmatch.fnmatchcase(name, w) for w in self.only)
            inner = any(other != name and _within(other, name) for other in self._ran)
            if not known and chosen and not inner:
                silent = f"{type(module).__name__} ran no attention that PyTorch's operators show: {_GUESSES}"
                self.refuse(name, _CAPTURED if module in _CAPTURED_MODULES else silent)

    def _warn(self) -> None:
        if self.seen.refused:
            named = "; ".join(f"{name or '(the model)'}: {why}" for name, why in self.seen.refused[:4])
            more = f"; and {len(self.seen.refused) - 4} more" if len(self.seen.refused) > 4 else ""
            warnings.warn(f"not recorded (all in seen.refused): {named}{more}.", RefusedWarning, stacklevel=3)


_CAPTURED = "captured by torch.compile, which fuses its attention away; record the module it was made from"

#: Modules in whose calls a compiler was seen at work.
_CAPTURED_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_GUESSES = "linear attention keeps no weights, a kernel called directly or captured by torch.compile shows none"


class _Ran:
    """A hook that notes that a module ran."""

    def __init__(self, observer: Observer, name: str) -> None:
        self.observer, self.name = observer, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.observer._here():
            self.observer._ran[self.name] = module


class _Call:
    """A layer while the block is open."""

    def __init__(self, name: str, nth: int, kind: str, kept: Kept | None, shape: tuple[int, ...]) -> None:
        self.name, self.nth, self.kind, self.kept, self.shape = name, nth, kind, kept, shape
        self.statistics: dict[str, Tensor] = {}
        self.growing: Growing | None = None

    def grow(self, found: Attention, kept: Kept) -> None:
        """One more step of a generation."""
        assert self.kept is not None
        growing = self.growing or Growing(self.kept, cross=self.kind == "cross")
        growing.extend(found, kept)
        self.growing = growing


class _Open:
    """A pass while the block is open."""

    def __init__(self, loose: bool) -> None:
        self.loose = loose  # outside the model's own forward
        self.calls: list[_Call] = []
        self.embedded: list[Embedded] = []
        self.times: dict[str, int] = {}
        self.count = 0
        self.steps = 1
        self.fresh = True  # whether its first call is still to come
        self.steps_of: _Open | None = None  # the generation this pass is a step of

    def find(self, name: str, nth: int) -> _Call | None:
        return next((call for call in self.calls if call.name == name and call.nth == nth), None)


def _with_encoders(passes: list[_Open]) -> list[_Open]:
    """generate() runs the encoder before the model's first forward: the two belong together."""
    joined: list[_Open] = []
    for one in passes:
        last = joined[-1] if joined else None
        names = {call.name for call in one.calls}
        if last is not None and last.loose and not one.loose and not names & {call.name for call in last.calls}:
            one.calls = last.calls + one.calls
            one.embedded = last.embedded + one.embedded
            joined[-1] = one
        else:
            joined.append(one)
    return joined


def _within(name: str, other: str) -> bool:
    """Whether a module is another one or stands inside it."""
    return name == other or not other or name.startswith(other + ".")


def _captured(module: nn.Module) -> bool:
    """Whether torch.compile was applied to a module, in either way."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _total(kept: Kept) -> int:
    if kept.w is not None:
        return kept.w.shape[-1]
    assert kept.q is not None and kept.k is not None
    return Growing(kept, cross=False).total


def _destination(to: Any) -> tuple[str | None, Any]:
    if to is None or to == "cpu":
        return to, None
    if isinstance(to, torch.device):
        return str(to), None
    try:
        import os

        path = os.fspath(to)
    except TypeError:
        raise TypeError(f'to is None, "cpu", a device or a path; {type(to).__name__} came.') from None
    if path.split(":")[0] in ("cuda", "mps", "xpu", "meta"):
        return path, None
    return "cpu", path


def _as_list(layers: Any) -> list[Any]:
    chosen = (
        [layers]
        if isinstance(layers, int | str)
        else list(layers)
        if isinstance(layers, Sequence | range | set)
        else None
    )
    if chosen is None or not all(isinstance(which, int | str) and not isinstance(which, bool) for which in chosen):
        raise TypeError(f"layers are numbers in the order of calls, module names or patterns; {layers!r} came.")
    return chosen


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    first = next(
        (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim >= 2 and not x.is_nested), None
    )
    return None if first is None else first.shape[0]


def _transformers() -> Any:
    """The room for transformers, if the program uses that."""
    import sys

    if "transformers.modeling_utils" not in sys.modules:
        return None
    from . import hugging

    return hugging
