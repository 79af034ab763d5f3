"""The listener of one thread in a recording: it gathers attention calls into passes and saves what was requested.

The thread that opens the block has one for as long as the block is open. Another thread has one too, active from its
start on, or, where it is older than the block, while a module of the model or work of a pool runs in it: streamed
generation and pools of workers are recorded, and two threads that run the model at once fill passes of their own. Their
common state is in `SharedRecording`, changed under its lock.
"""

from __future__ import annotations

import fnmatch
import threading
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .calls import AttentionCall, LayerKind, MaskCache, SavedCall, save_again, save_call, without_tensors
from .detached import DetachedWeights, as_detached
from .hooks import tap
from .hooks.call_site import CAPTURED, CallSite, called_by, calling_module, module_stack, runs_code_of
from .hooks.eager_attention import EagerTracker
from .hooks.layer_history import UNHEARD, LayerHistory
from .hooks.model_hooks import ModelHooks, batch_size
from .hooks.recurring_calls import Form, RecurringCall, form_of, is_shareable, recognised
from .kv_cache import CannotStitch, WaitingKeys, compare_keys
from .layer import row_statistics
from .passes import Call, OpenPass
from .recording import Recording
from .spill import Spill
from .tokens import EmbeddedIds

__all__ = ["SharedRecording", "ThreadRecorder"]


@dataclass
class SharedRecording:
    """The request of a block, and the calls that its threads have recorded so far."""

    hooks: ModelHooks
    names: dict[int, str] | None  # of the model's modules, by id; None: every module counts
    keep: str
    values: bool
    device: str | None
    spill: Spill | None
    only: list[int | str] | None
    grad: bool
    ids: bool
    recording: Recording = field(default_factory=Recording)
    done: list[OpenPass] = field(default_factory=list)
    most_calls: int = 0  # attention calls of a pass, those that were not requested included
    closed: bool = False  # the block has ended; a thread that still runs adds nothing
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]

    def refuse(self, name: str, reason: str) -> None:
        """Name attention that is not recorded, once."""
        with self.lock:
            if not self.closed and (name, reason) not in self.recording.refused:
                self.recording.refused.append((name, reason))

    def wants(self, name: str, number: int) -> bool:
        """Whether the call of that number in its pass, by the module of that name, was requested."""
        if self.only is None:
            return True
        return any(w == number if isinstance(w, int) else fnmatch.fnmatchcase(name, w) for w in self.only)


class ThreadRecorder:
    """The listener of one thread; see `tap.Listener`."""

    wants_scores = False

    def __init__(self, shared: SharedRecording, guest: bool) -> None:
        self.shared, self.guest = shared, guest  # guest: of another thread than the block's
        self.wants_ids, self.wants_values, self.wants_grad = shared.ids, shared.values, shared.grad
        self.eager = EagerTracker(weakref.WeakMethod(self.refuse))
        here = weakref.WeakMethod(self._tracker)
        hooks = shared.hooks
        self.history = LayerHistory(None if guest else hooks.census, hooks.modules, hooks.entered, here)
        self.masks: MaskCache = {}  # masks of the running pass that were parsed
        self._shares = _saves_all(shared) and not guest  # whether calls may share what was read of the one before
        self._like: tuple[Any, ...] | None = None  # the last call with a mask: mask, version, shape, score and mask
        self._waiting: WaitingKeys = []
        self.inside = 0  # nesting of the model's modules, in a guest
        self.requests = 0  # in a guest: functions that run and are recorded outside of modules too
        self.depth = 0  # nesting of the model's own forward
        self.axes: tuple[int, int] | None = None  # the first two axes of the running pass's input
        self.hears_products = True
        self._thread = threading.get_ident()
        self._pass: OpenPass | None = None
        self._last: OpenPass | None = None  # the last of this thread that is done, or the generation of its last step
        self._beams = False

    # Called by the hooks on the model.

    def begin(self, axes: tuple[int, int] | None, regime: Any = None) -> None:
        """The model's own forward begins."""
        self.enter()
        if self.depth == 0:
            self.end_pass()
            self.axes = axes
            self.history.begin(regime)
            self._hear([])
        self.depth += 1

    def end(self, completed: bool = True) -> None:
        """The model's own forward ends."""
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            self._hear(self.history.end(completed))
            self.end_pass()
        self.leave()

    def _hear(self, unheard: list[str]) -> None:
        """Intercept as much as the layers that come ask for, and name those that did something else."""
        for name in unheard:
            self.refuse(name, UNHEARD)
        if self.history.hears != self.hears_products:
            self.hears_products = self.history.hears
            tap.hear_products()

    def _tracker(self) -> EagerTracker:
        return self.eager

    def read_number(self, number: Any) -> None:
        self.history.read(number)
        self._hear([])

    def distrust(self) -> None:
        self.history.distrust()
        self._hear([])

    def enter(self) -> None:
        """A module of the model begins."""
        if self.guest:
            self.inside += 1
            self._switch()

    def leave(self) -> None:
        """It ends."""
        if self.guest and self.inside:
            self.inside -= 1
            self._switch()

    def start_over(self) -> None:
        """A thread begins; the one that had its id before has ended."""
        self.end_pass()
        self.inside = self.requests = self.depth = 0
        self._last = None

    def request(self, on: bool) -> None:
        """A function begins that is recorded outside of modules too; or it has ended."""
        if self.guest:
            self.requests = max(0, self.requests + (1 if on else -1))
            self._switch()

    def _switch(self) -> None:
        """Be active while a module or such a function runs."""
        wanted = self.inside + self.requests > 0
        if wanted == any(listener is self for listener in tap.listeners()):
            return
        if wanted:
            tap.activate(self)
        else:
            self.eager.clear()
            tap.deactivate(self)

    @property
    def in_pass(self) -> bool:
        """Whether a guest has a pass that has attended, and may go on."""
        return self.guest and self._pass is not None and bool(self._pass.count)

    def pause(self, on: bool) -> None:
        """Before and after code that torch.compile made."""
        (tap.deactivate if on else tap.activate)(self)

    # The listener.

    def covers(self, model: nn.Module | None) -> bool:
        names = self.shared.names
        return not self.guest and (names is None or id(model) in names)

    def call_site(self, frame: FrameType) -> CallSite | None:
        # A thread with a block of its own for this model is not recorded twice.
        if self.guest and any(other.covers(self.shared.hooks.model) for other in tap.listeners()):
            return None
        return calling_module(frame, self.shared.names)

    def batch_size(self, rows: int, keys: int | None = None, count: int | None = None) -> int | None:
        return batch_size(self.axes, rows, keys, count)

    def refuse(self, name: str, reason: str) -> None:
        self.shared.refuse(name, reason)

    def retract(self, site: CallSite, reason: str) -> None:
        one = self._pass
        last = None if one is None else next((call for call in reversed(one.calls) if call.name == site.name), None)
        if one is not None and last is not None:
            one.remove(last)
            self.refuse(site.name, reason)

    def refuse_at(self, frame: FrameType, reason: str) -> None:
        if (site := self.call_site(frame)) is not None:
            self.refuse(site.name, reason)

    def compiling(self, frame: FrameType) -> None:
        site = self.call_site(frame)
        if site is not None and site.module is not None:
            self.shared.hooks.compiling(site.name, site.module)

    def embedding(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        stack = module_stack(frame, self.shared.names)
        if stack and self.call_site(frame) is not None:  # not of another model, such as an assistant
            entry = EmbeddedIds(stack, table.shape[0], table.data_ptr(), ids.detach().clone())
            self._running().embedded.append(entry)

    def attention(self, site: CallSite, call: AttentionCall, submodule: str | None = None) -> None:
        name = site.name
        if site.hides_modules:
            self.refuse(name, CAPTURED)
            return
        if submodule is not None and hasattr(site.module, submodule):
            name = f"{name}.{submodule}" if name else submodule
        with self.shared.lock:
            if not self.shared.closed:
                self._add(name, site, call)
        if not self.history.again(name):
            self._hear(self.history.call(name))

    def attention_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, frame: FrameType) -> bool:
        one, names = self._pass, self.shared.names
        if self.depth == 0 or not self._shares or names is None:
            return False
        if (one is None or one.fresh) and (self._last is not None or self.shared.done):
            return False  # it may be a step of a generation
        recurring = recognised(names, self.history.forms, args, kwargs, out, frame)
        if recurring is None:
            return False
        name, form, operands = recurring
        like = form.unmasked if operands.mask is None else self._like_of(operands, form)
        if like is None:
            return False
        try:
            with self.shared.lock:
                if not self.shared.closed:
                    self._add_again(one or self._running(), name, form, operands, like)
            if not self.history.again(name):
                self._hear(self.history.call(name))
        except Exception as error:  # never reaches the model
            self.refuse(name, tap.failure(error))
        return True

    def _like_of(self, operands: RecurringCall, form: Form) -> SavedCall | None:
        """The last call of the pass, if it had the same mask, so that its score and its mask may be shared."""
        if self._like is None:
            return None
        mask, version, settings, saved = self._like
        is_same = operands.mask is mask and operands.mask is not None and operands.mask._version == version
        return saved if is_same and settings == (form.scale, form.is_causal, operands.shape) else None

    def _add_again(self, one: OpenPass, name: str, form: Form, operands: RecurringCall, like: SavedCall) -> None:
        """Save a call of a known form, with the score and the mask of another one."""
        number, nth = one.number_call(name)
        saved = save_again(operands.q, operands.k, operands.v if self.wants_values else None, like)
        one.fresh = False
        if one.step_of is None:
            one.add(Call(name, number, nth, form.kind, saved, operands.shape))
            return
        entry = one.step_of.find(name, nth)
        if entry is not None and one.before is None:
            try:
                if entry.grow(saved, self._waiting):
                    return
            except CannotStitch as error:
                self.refuse(name, str(error))
                one.step_of.remove(entry)
                return
        q, k, v, mask, _ = operands
        call = AttentionCall(q, k, v, scale=form.scale, mask=mask, is_causal=form.is_causal)
        call.parse_mask(self.masks)
        self._add_step(one.step_of, one.before, name, nth, call, saved)

    def _add(self, name: str, site: CallSite, call: AttentionCall) -> None:
        """Save a call of the module of that name, as a layer of its pass or as a step of a generation."""
        shared, one = self.shared, self._running(name)
        number, nth = one.number_call(name)
        if not shared.wants(name, number):
            return
        if self.wants_grad and (reason := _no_graph(site, call)) is not None:
            self.refuse(name, f"grad=True, and {reason}")
            return
        call.parse_mask(self.masks)
        saved = save_call(call, self.wants_values, shared.device, copy=site.compiled, grad=self.wants_grad)
        if one.fresh and shared.keep == "factors" and self._continue_generation(one, site, name, nth, call, saved):
            return
        one.fresh = False
        if one.step_of is not None:
            before = one.step_of.find(name, nth)
            self._learn(name, site, call, None if before is None else before.kind, saved)
            self._add_step(one.step_of, one.before, name, nth, call, saved)
            return
        entry = Call(name, number, nth, _kind(site, call), saved, call.shape)
        self._learn(name, site, call, entry.kind, saved)
        if call.w is not None:
            entry.note_last_value(call, call.shape[2])
        if shared.keep == "statistics":
            statistics = row_statistics(saved.weights())
            detached = issubclass(saved.matrix, DetachedWeights)
            entry.statistics = {n: as_detached(x) for n, x in statistics.items()} if detached else statistics
            entry.saved = None
        elif shared.spill is not None:
            entry.saved = shared.spill.put(saved)
        one.add(entry)

    def _learn(self, name: str, site: CallSite, call: AttentionCall, kind: LayerKind | None, saved: SavedCall) -> None:
        """Remember how this call was read, for those that come again."""
        self._like = None
        if not self._shares or kind is None or name != site.name or not is_shareable(call):
            return
        if call.mask is not None:
            settings = call.scale, call.is_causal, call.shape
            self._like = call.mask, call.mask._version, settings, without_tensors(saved)
        if (form := form_of(site, call, kind, saved)) is not None:
            self.history.forms[name] = form

    # Passes.

    def _running(self, name: str | None = None) -> OpenPass:
        """The running pass; a new one if a call outside any forward starts it over."""
        one = self._pass
        if one is not None and name is not None and self.depth == 0 and one.restarts_with(name):
            self.end_pass()
        if self._pass is None:
            self._pass = OpenPass(loose=self.depth == 0, thread=self._thread)
        return self._pass

    def end_pass(self) -> None:
        """The running pass is done, if there is one."""
        one, self._pass, self._like = self._pass, None, None
        if self._waiting:
            with tap.suspended(), torch.no_grad():
                compare_keys(self._waiting)
        self.eager.clear()
        self.eager, self.masks = EagerTracker(self.eager.refuse), {}
        if one is None:
            return
        with self.shared.lock:
            self.shared.most_calls = max(self.shared.most_calls, one.count)
            if one.step_of is not None:
                for ids in one.embedded:
                    ids.before = one.before
                one.step_of.embedded += one.embedded
                one.step_of.steps += 1
            elif (one.calls or one.embedded) and not self.shared.closed:
                self.shared.done.append(one)
                self._last = one

    def _continue_generation(
        self, one: OpenPass, site: CallSite, name: str, nth: int, call: AttentionCall, saved: SavedCall
    ) -> bool:
        """Whether the pass that begins with this call is the next step of the last one; then add the step."""
        # The last pass of this thread: those of others may have come between. A pool may take a thread for each step.
        before = self._last or (self.shared.done[-1] if self.shared.done else None)
        entry = None if before is None else before.find(name, nth)
        if before is None or entry is None or not entry.is_continued_by(call):
            return False
        if self._beams or called_by(site.frames[0] if site.frames else None, "beam_search"):
            self._beams = True
            self.refuse("generate", "beam search reorders the cache between steps; record with num_beams=1")
            one.step_of, one.fresh = OpenPass(loose=True, thread=self._thread), False  # a pass that is thrown away
            return True
        if called_by(site.frames[0] if site.frames else None, "assisted_decoding"):
            one.before = call.shape[3] - call.shape[2]
        try:
            entry.extend(call, saved, one.before)
        except CannotStitch as error:  # a pass of its own
            if call.w is not None or error.is_step:  # weights without keys cannot prove that they are something else
                self.refuse(name, f"its steps are passes of their own: {error}")
            return False
        one.step_of, one.fresh, self._last = before, False, before
        return True

    def _add_step(
        self, generation: OpenPass, before: int | None, name: str, nth: int, call: AttentionCall, saved: SavedCall
    ) -> None:
        entry = generation.find(name, nth)
        if entry is None:
            if not self._beams:
                self.refuse(name, "it ran in a later step of a generation and not in the first")
            return
        try:
            entry.extend(call, saved, before, is_step=True)
        except CannotStitch as error:
            self.refuse(name, str(error))
            generation.remove(entry)


def _saves_all(shared: SharedRecording) -> bool:
    """Whether every call is saved as it is: queries and keys, without a graph, where they are."""
    is_plain = shared.keep == "factors" and shared.device is None and shared.spill is None and not shared.grad
    return is_plain and shared.only is None and shared.names is not None


def _kind(site: CallSite, call: AttentionCall) -> LayerKind:
    """ "self" if keys come from the sequence of the queries, else "cross"."""
    if call.is_self is not None:
        return "self" if call.is_self else "cross"
    *_, i, j = call.shape
    if site.has_other_sequence(j):
        return "cross"
    cached = i == j or any(hasattr(site.module, mark) for mark in ("layer_idx", "is_causal")) or "self" in site.name
    return "self" if cached else "cross"


def _no_graph(site: CallSite, call: AttentionCall) -> str | None:
    """The reason why a call has no autograd graph that outlives it; None if it has one."""
    if site.compiled:
        return "torch.compile made its code, whose intermediate tensors have no graph; record the plain module"
    if runs_code_of(site.frames, "torch.utils.checkpoint"):
        return "it runs in an activation checkpoint, which throws the graph away; switch checkpointing off"
    if not torch.is_grad_enabled():
        return "gradients are off (torch.no_grad or inference_mode); run the model with gradients"
    if call.native:
        return "PyTorch's C++ path has no gradients; parameters that require them, or model.train(), avoid it"
    return None
