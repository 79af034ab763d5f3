"""`regard.record`: the context manager, and the observer that listens while it is open.

The observer is told of every attention call of its thread (`seams`), keeps what was asked for, and at the end says
which attention it could not record. Imports the other rooms of the recorder.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .calls import AttentionCall, Overwritten, SavedCall, save_call
from .hooks import seams, tap
from .hooks.call_site import CallSite, called_by, calling_module, module_stack
from .hooks.eager_attention import Trail
from .hooks.model_hooks import Attached
from .kv_cache import CannotStitch
from .passes import Call, OpenPass, with_encoders
from .recording import Layer, Pass, Recording, numbers
from .spill import Spill
from .tokens import Embedded, label

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

    model    None records every attention of this thread
    tokens   a tokenizer, a list of words, a list of such lists (one a sequence), (source, target) lists, or nothing
    keep     "factors" (queries and keys, from which every weight can be had) or "statistics" (numbers only)
    values   keep the value vectors too
    to       where recorded tensors go: None (they stay), "cpu", or a path: on the disk, a .regard file in the end
    layers   which layers: numbers in the order of calls, module names, patterns such as "*.self_attn"
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"record(model): an nn.Module is recorded, or None for all of this thread; {type(model).__name__} came."
        )
    if keep not in ("factors", "statistics"):
        raise ValueError(f'keep is "factors" or "statistics"; {keep!r} came.')
    return Observer(model, tokens, keep, values, *_destination(to), _as_list(layers))


class Observer:
    """The block of a recording: listens between `__enter__` and `__exit__`."""

    wants_scores = False

    def __init__(self, model: Any, tokens: Any, keep: str, values: bool, to: Any, path: Any, only: Any) -> None:
        self.tokens, self.keep, self.values, self.to, self.path, self.only = tokens, keep, values, to, path, only
        self.spill = None if path is None else Spill(path)
        self.attached = Attached(model)
        self.names = None if model is None else {id(module): name for name, module in self.attached.modules}
        self.wants_ids = tokens is not None and not isinstance(tokens, list | tuple)
        self.seen = Recording()
        self.trail = Trail()
        self.masks: dict[Any, Any] = {}  # masks of the running pass that were read already
        self._pass: OpenPass | None = None
        self._done: list[OpenPass] = []
        self._beams = self._used = False
        self._transformers: Any = None

    # The block.

    def __enter__(self) -> Recording:
        if self._used:
            raise RuntimeError("a recording is one block; call regard.record(model) again for another.")
        self._used = True
        seams.listen()
        if "transformers.modeling_utils" in sys.modules:
            from .hooks import transformers

            self._transformers = transformers
            transformers.listen()
        for name, why in self.attached.deaf_spots():
            self.refuse(name, why)
        self.attached.attach(self._end_pass, self._pause)
        if not self.attached.whole_is_captured():
            tap.enter(self)
        return self.seen

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        tap.leave(self)
        if self._transformers is not None:
            self._transformers.leave()
        self._end_pass()
        try:
            with tap.quiet(), torch.no_grad():
                self._finish()
        finally:
            self.attached.detach()
        if kind is None:
            self._warn()
            if self.path is not None:
                self.seen.save(self.path)

    def _pause(self, on: bool) -> None:
        (tap.leave if on else tap.enter)(self)

    def _finish(self) -> None:
        """Calls become layers, passes are joined and labelled, and what stayed silent is named."""
        heard = {name for name, _ in self.seen.refused}
        for one in with_encoders(self._done):
            finished = Pass([], one.steps)
            for call in one.calls:
                heard.add(call.name)
                if (layer := self._layer(call, len(finished.layers))) is not None:
                    layer.of = finished
                    finished.layers.append(layer)
            label(finished.layers, one.embedded, self.tokens, self.attached.model)
            if finished.layers:
                self.seen.passes.append(finished)
        for name, why in self.attached.silent(heard):
            if self.only is None or any(isinstance(w, str) and fnmatch.fnmatchcase(name, w) for w in self.only):
                self.refuse(name, why)
        self._done, self.names, self.masks = [], None, {}

    def _layer(self, call: Call, index: int) -> Layer | None:
        try:
            kept = call.finished()
        except (CannotStitch, Overwritten) as why:
            self.refuse(call.name, str(why))
            return None
        return Layer(call.name, index, call.kind, kept, call.statistics, call.shape)

    def _warn(self) -> None:
        if refused := self.seen.refused:
            named = "; ".join(f"{name or '(the model)'}: {why}" for name, why in refused[:4])
            more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
            warnings.warn(f"not recorded (all in seen.refused): {named}{more}.", RefusedWarning, stacklevel=3)

    # What the seams tell.

    def place(self, frame: FrameType) -> CallSite | None:
        """Where in the model a call came from; None if the model is not on the stack."""
        return calling_module(frame, self.names)

    def batch(self) -> int | None:
        """How many sequences go in at once, as far as it is known."""
        return self.attached.batch

    def failed(self, frame: FrameType, why: str) -> None:
        """Something that may be attention passed and could not be read."""
        if (at := self.place(frame)) is not None:
            self.refuse(at.name, why)

    def captured(self, frame: FrameType) -> None:
        """A compiler is tracing attention."""
        at = self.place(frame)
        if at is not None and at.module is not None:
            self.attached.compiling(at.name, at.module)

    def refuse(self, name: str, why: str) -> None:
        """Name what is not recorded, once."""
        if (name, why) not in self.seen.refused:
            self.seen.refused.append((name, why))

    def embedded(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        """Token numbers that went into a layer of embeddings."""
        stack = module_stack(frame, self.names)
        if stack:
            known = Embedded(stack, table.shape[0], table.data_ptr(), ids.detach().cpu().clone())
            self._running().embedded.append(known)

    def attention(self, at: CallSite, found: AttentionCall, inside: str | None = None) -> None:
        """An attention call."""
        name = at.name
        if inside is not None and hasattr(at.module, inside):
            name = f"{name}.{inside}" if name else inside
        one = self._running(name)
        number, nth = one.counted(name)
        if not self._wanted(name, number):
            return
        found.read_mask(self.masks)
        kept = save_call(found, self.values, self.to)
        if one.fresh and self.keep == "factors" and self._goes_on(one, at, name, nth, found, kept):
            return
        one.fresh = False
        if one.step_of is not None:
            self._add_step(one.step_of, name, nth, found, kept)
            return
        call = Call(name, nth, _kind(at, found), kept, found.shape)
        if self.keep == "statistics":
            call.statistics, call.kept = numbers(kept.weights()), None
        elif self.spill is not None:
            call.kept = self.spill.put(kept)
        one.calls.append(call)

    def _wanted(self, name: str, number: int) -> bool:
        if self.only is None:
            return True
        return any(w == number if isinstance(w, int) else fnmatch.fnmatchcase(name, w) for w in self.only)

    # Passes.

    def _running(self, name: str | None = None) -> OpenPass:
        """The pass that runs now."""
        one = self._pass
        if one is not None and name is not None and self.attached.depth == 0 and one.begins_again_with(name):
            self._end_pass()
        if self._pass is None:
            self._pass = OpenPass(loose=self.attached.depth == 0)
        return self._pass

    def _end_pass(self) -> None:
        one, self._pass = self._pass, None
        self.trail.close()
        self.trail, self.masks = Trail(), {}
        if one is None:
            return
        if one.step_of is not None:
            one.step_of.embedded += one.embedded
            one.step_of.steps += 1
        elif one.calls or one.embedded:
            self._done.append(one)

    def _goes_on(self, one: OpenPass, at: CallSite, name: str, nth: int, found: AttentionCall, kept: SavedCall) -> bool:
        """Whether the pass that begins with this call is the next step of the one before; then take the step."""
        before = self._done[-1] if self._done else None
        call = None if before is None else before.find(name, nth)
        if before is None or call is None or not call.goes_on(found):
            return False
        if self._beams or called_by(at.frames[0] if at.frames else None, "beam_search"):
            self._beams = True
            self.refuse("generate", "beam search reorders the cache between steps; record with num_beams=1")
            one.step_of, one.fresh = OpenPass(loose=True), False  # the steps of beams go nowhere
            return True
        try:
            call.grow(found, kept)
        except CannotStitch:  # not its continuation after all: a pass of its own
            return False
        one.step_of, one.fresh = before, False
        return True

    def _add_step(self, whole: OpenPass, name: str, nth: int, found: AttentionCall, kept: SavedCall) -> None:
        call = whole.find(name, nth)
        if call is None:
            if not self._beams:
                self.refuse(name, "it ran in a later step of a generation and not in the first")
            return
        try:
            call.grow(found, kept)
        except CannotStitch as why:
            self.refuse(name, str(why))
            whole.calls.remove(call)


def _kind(at: CallSite, found: AttentionCall) -> str:
    """Whether keys come from the sequence of the queries."""
    if found.same is not None:
        return "self" if found.same else "cross"
    *_, i, j = found.shape
    if at.other_sequence(j):
        return "cross"
    cached = any(hasattr(at.module, mark) for mark in ("layer_idx", "is_causal")) or "self" in at.name
    return "self" if i == j or cached else "cross"


def _destination(to: Any) -> tuple[str | None, str | None]:
    """A device for recorded tensors, and a path for the file."""
    if to is None or isinstance(to, torch.device):
        return None if to is None else str(to), None
    try:
        path = os.fspath(to)
    except TypeError:
        raise TypeError(f'to is None, "cpu", a device or a path; {type(to).__name__} came.') from None
    if path.split(":")[0] in ("cpu", "cuda", "mps", "xpu"):
        return path, None
    return "cpu", path


def _as_list(layers: Any) -> list[int | str] | None:
    if layers is None:
        return None
    listed = isinstance(layers, Sequence | range | set) and not isinstance(layers, str)
    chosen = list(layers) if listed else [layers]
    if not all(isinstance(which, int | str) and not isinstance(which, bool) for which in chosen):
        raise TypeError(f"layers are numbers in the order of calls, module names or patterns; {layers!r} came.")
    return chosen
