"""Record the host work of a call (allocations, ATen ops, launches) and replay it on new tensors of the same shapes.

Which mask, tiles and passes Python chooses depends on the constants of a request and on the shapes, strides and dtypes
of its tensors, not on their values; and beside a GPU that computes in 50 µs, choosing is most of the time. The second
call of a signature is recorded, and later ones replay it. On a CPU these are short questions, and the sixteenth call is
recorded: recording takes as long as four of them save. `REGARD_REPLAY=0` turns replay off.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.torch_state import in_functorch, replay_state, without_autocast

__all__ = [
    "current_recorder", "is_constant", "is_replayed_device", "is_short", "on_device_of", "record_launch",
    "replay_alias", "replay_or_record",
]  # fmt: skip

log = logging.getLogger("regard")

#: Devices whose kernels run beside the host, so that its time counts.
DEVICES = ("cuda",)
#: Numbers of the queries up to which a CPU computes no longer than its host chooses.
SHORT = 2**18
#: Calls of a signature before it is recorded, on `DEVICES` and on a CPU.
CALLS_BEFORE, CALLS_BEFORE_ON_CPU = 1, 15
#: Switch for tests and comparisons.
enabled = os.environ.get("REGARD_REPLAY", "1") != "0"
#: Limits of a tape. Beyond them, in steps or in bytes that recording holds, the work takes longer than the host does.
MAX_STEPS, MAX_BYTES = 64, 2**28
#: Per signature: how often it was called, a Tape, or NOT_REPLAYABLE. Cleared beyond MAX_TAPES entries.
TAPES: dict[Hashable, Tape | int | str] = {}
MAX_TAPES, NOT_REPLAYABLE = 1024, "not replayable"

CONSTANTS = (type(None), bool, int, float, str, torch.SymInt, torch.SymFloat)
PLAIN = frozenset((Tensor, torch.nn.Parameter))
TensorPlace = tuple[int, int]  # a tensor's number, and an offset in bytes
LaunchAt = Callable[[list[int]], None]
_no_context = nullcontext()


def replay_alias(key: Hashable, tensors: list[Tensor]) -> Any:
    """The replay of a call that `replay_or_record` was given this `alias` for; None where none was recorded.

    Only where nothing traces or transforms the code (`torch_state.in_plain_eager`).
    """
    if not enabled or replay_state.recorder is not None or torch.is_autocast_enabled(tensors[0].device.type):
        return None
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    at = [x.data_ptr() for x in tensors]
    try:
        tape = TAPES.get(_signature(key, tensors, at))
    except TypeError:  # an unhashable key
        return None
    return tape(tensors, at) if type(tape) is Tape else None


def _signature(key: Hashable, tensors: list[Tensor], at: list[int]) -> tuple[Any, ...]:
    """All that the host work of a call depends on; `at` are the addresses of its tensors."""
    # Kernels are specialised by alignment; and two inputs at one address may share a load.
    shared = None if len({*at}) == len(at) else tuple(map(at.index, at))
    each = [(x.shape, x.stride(), x.dtype, x.device, a % 16) for x, a in zip(tensors, at, strict=True)]
    return key, shared, *each


def replay_or_record(
    key: Hashable, tensors: list[Tensor], compute: Callable[[], Any], on_cpu: bool = False, alias: Hashable = None
) -> Any:
    """`compute()`, or the replay of an earlier call.

    Args:
        key: All that the result depends on, but for `tensors`.
        tensors: At least one. `compute` may branch on their shapes, strides and dtypes, but not on their values.
        compute: Returns a list or a dict of tensors, with None for some.
        on_cpu: Whether the tensors are those of a short question on a CPU.
        alias: Another key, by which `replay_alias` finds the call once it is recorded.
    """
    if torch.is_autocast_enabled(tensors[0].device.type):
        return without_autocast(tensors[0], lambda: replay_or_record(key, tensors, compute, on_cpu))
    # A call inside a recorded call belongs to the outer one.
    if (
        not (on_cpu or is_replayed_device(tensors[0]))
        or not PLAIN.issuperset(map(type, tensors))
        or current_recorder()
        or in_functorch()
    ):
        return compute()
    at = [x.data_ptr() for x in tensors]
    signature = _signature(key, tensors, at)
    try:
        cached = TAPES.get(signature)
    except TypeError:  # an unhashable key
        return compute()
    if type(cached) is Tape:
        if alias is not None:
            _bound_tapes()
            TAPES[alias, *signature[1:]] = cached
        return cached(tensors, at)
    if cached is None and is_constant(key):
        _bound_tapes()
        cached = 0
    if type(cached) is not int:
        return compute()
    if cached < (CALLS_BEFORE_ON_CPU if on_cpu else CALLS_BEFORE):
        TAPES[signature] = cached + 1
        return compute()
    with OpRecorder(tensors) as recorder:
        results = compute()
    tape = recorder.tape(results)
    if tape is None:
        log.debug("not replayable: %s", key[0] if isinstance(key, tuple) else key)
    TAPES[signature] = tape or NOT_REPLAYABLE
    return results


def _bound_tapes() -> None:
    if len(TAPES) >= MAX_TAPES:
        TAPES.clear()


def is_replayed_device(x: Tensor) -> bool:
    """Whether calls on such a tensor are recorded and replayed."""
    return enabled and x.device.type in DEVICES


def is_short(x: Tensor) -> bool:
    """Whether a question of such queries is replayed on a CPU."""
    return enabled and x.device.type == "cpu" and x.numel() <= SHORT


def is_constant(key: Any) -> bool:
    """Whether a key holds constants alone: a user's function may compute something else each time."""
    return all(map(is_constant, key)) if type(key) is tuple else type(key) in CONSTANTS


def current_recorder() -> OpRecorder | None:
    """The recorder of this thread, if a call is being recorded."""
    return replay_state.recorder


def record_launch(start: LaunchAt | None, tensors: list[Tensor | None]) -> None:
    """Record a kernel launch on these tensors; `start` launches it at other addresses, None if that is impossible."""
    if (recorder := current_recorder()) is not None:
        recorder.launched(start, tensors)


class OpRecorder(TorchDispatchMode):
    """Records the host work of one call."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.n_inputs, self.device = len(tensors), tensors[0].device
        self.tensors: list[Tensor] = []  # held, so that no address is used twice
        self.numbers: dict[Hashable, int] = {}
        self.places: list[TensorPlace] = []
        self.steps: list[TapeStep] = []
        self.bytes, self.replayable = 0, True
        for x in tensors:
            self._number(x, None)

    def __enter__(self) -> OpRecorder:
        replay_state.recorder = self
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        replay_state.recorder = None
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.replayable:
            try:
                self._record_op(func, args, kwargs or {}, out)
            except Exception:  # tensors without an address, for one: the result is right all the same
                self._give_up()
        return out

    def hold(self, x: Tensor) -> None:
        """Hold a tensor that depends on constants alone and never changes."""
        if self._number_of(x) < 0:
            self._take(HeldStep(x, self._number(x, None)))

    def launched(self, start: LaunchAt | None, tensors: list[Tensor | None]) -> None:
        numbers = [self._number_of(x) if x is not None and x.numel() else None for x in tensors]
        if not self.replayable or start is None or -1 in numbers:
            self._give_up()
        else:
            self._take(LaunchStep(start, [None if n is None else self.places[n] for n in numbers]))

    def _record_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record one op. To be replayed, it must return no number to the host, and shapes that depend on no value."""
        read: list[Tensor] = []
        arguments = [_with_slots(x, read) for x in args], {name: _with_slots(x, read) for name, x in kwargs.items()}
        outs = out if isinstance(out, list | tuple) else [out]
        reads = [self._number_of(x) for x in read]
        on_device = all(isinstance(x, Tensor) and (not read or x.device == self.device) for x in outs)
        if -1 in reads or not on_device or torch.Tag.dynamic_output_shape in func.tags:
            self._give_up()
            return
        if (make := _allocator(func, kwargs, out, self.device)) is not None:
            self._take(AllocStep(make, self._number(out, None)))
            return
        step = OpStep(func, *arguments, reads)
        for n, x in enumerate(outs):
            cached = self._number_of(x)
            of = next((at for r, at in zip(read, reads, strict=True) if _shares_storage(r, x)), None)
            if cached < 0:
                step.makes.append((n, self._number(x, of)))
                step.view = of is not None
            elif of is None or self._place_in(x, of) != self.places[cached]:
                # A part of one tensor at the address of another: in the next call they may not overlap.
                self._give_up()
                return
        step.several = outs is out
        if step.makes or func._schema.is_mutable:  # else it returned its input
            self._take(step)

    def _number_of(self, x: Tensor) -> int:
        """The number of a tensor; -1 for one that was not recorded."""
        return self.numbers.get(_place(x), -1)

    def _number(self, x: Tensor, of: int | None) -> int:
        """A number for a new tensor, which has its own storage or that of tensor `of`."""
        number = len(self.tensors)
        self.tensors.append(x)
        self.numbers.setdefault(_place(x), number)
        if of is None:
            self.places.append((number, 0))
            self.bytes += x.untyped_storage().nbytes() if number >= self.n_inputs else 0
        else:
            self.places.append(self._place_in(x, of))
        return number

    def _place_in(self, x: Tensor, of: int) -> TensorPlace:
        root, offset = self.places[of]
        return root, offset + x.data_ptr() - self.tensors[of].data_ptr()

    def _take(self, step: TapeStep) -> None:
        self.steps.append(step)
        if len(self.steps) > MAX_STEPS or self.bytes > MAX_BYTES:
            self._give_up()

    def _give_up(self) -> None:
        self.replayable = False
        self.tensors, self.steps, self.numbers = [], [], {}

    def tape(self, results: dict[str, Tensor | None] | list[Tensor | None]) -> Tape | None:
        """The recorded steps as a tape that computes such results; None if that is impossible."""
        names, values = (list(results), list(results.values())) if isinstance(results, dict) else (None, results)
        numbers = [None if x is None else self._number_of(x) for x in values]
        tensors = [x for x in values if x is not None]
        of_tensors = [n for n in numbers if n is not None]
        # An alias of a tensor (a detached one) has the same number: only the tensor itself may be a result.
        unique = len({*map(id, tensors)}) == len({*of_tensors}) and all(
            n >= self.n_inputs or self.tensors[n] is x for n, x in zip(of_tensors, tensors, strict=True) if n >= 0
        )
        if not self.replayable or -1 in of_tensors or not unique:
            return None
        return Tape(self.steps, len(self.tensors), numbers, names)


ALLOCATORS = frozenset(
    (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.zeros.default)
)


class AllocStep:
    """An allocation; most steps are allocations."""

    used: frozenset[int] = frozenset()

    def __init__(self, make: Callable[[], Tensor], number: int) -> None:
        self.make, self.number = make, number


def _allocator(func: Any, kwargs: dict[str, Any], out: Any, device: torch.device) -> Callable[[], Tensor] | None:
    """A function that allocates a tensor like `out` on this device, if that is all that `func` did."""
    if func not in ALLOCATORS or out.device != device:
        return None
    options = {name for name, x in kwargs.items() if x not in (None, False, torch.strided)}
    if not options <= {"dtype", "device"}:
        return None
    if func is torch.ops.aten.zeros.default:
        return partial(torch.zeros, tuple(out.shape), dtype=out.dtype, device=device)
    if (make := _inductor_allocator(device.type)) is None:
        return partial(torch.empty_strided, tuple(out.shape), out.stride(), dtype=out.dtype, device=device)
    return partial(make, tuple(out.shape), out.stride(), out.dtype)


@functools.cache
def _inductor_allocator(device_type: str) -> Callable[..., Tensor] | None:
    """Inductor's allocator, in half the time of the public one; None where this private name is missing."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make = getattr(guards, f"_empty_strided_{device_type}", None)
    if make is None:
        log.info("this PyTorch has no _empty_strided_%s: replay allocates by torch.empty_strided", device_type)
    return make


class HeldStep:
    """A tensor that is the same in every call."""

    used: frozenset[int] = frozenset()

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.tensor, self.number = tensor, number

    def __call__(self, tensors: list[Any], at: list[int]) -> None:
        tensors[self.number], at[self.number] = self.tensor, self.tensor.data_ptr()


class LaunchStep:
    """A kernel launch."""

    def __init__(self, start: LaunchAt, places: list[TensorPlace | None]) -> None:
        self.start, self.places = start, places
        self.used = {place[0] for place in places if place is not None}
        # The usual case: every tensor begins where its memory does.
        self.numbers = [place[0] for place in places if place is not None and place[1] == 0]
        self.at_begin = len(self.numbers) == len(places)

    def __call__(self, tensors: list[Any], at: list[int]) -> None:
        if self.at_begin:
            self.start([at[number] for number in self.numbers])
        else:
            self.start([0 if place is None else at[place[0]] + place[1] for place in self.places])


class OpStep:
    """An ATen op, with a `TensorSlot` for every tensor among its arguments."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], reads: list[int]) -> None:
        self.func, self.args, self.kwargs, self.reads, self.used = func, args, kwargs, reads, set(reads)
        self.makes: list[tuple[int, int]] = []  # which of its results is which tensor
        self.view = self.several = False

    def __call__(self, tensors: list[Any], at: list[int]) -> None:
        if self.reads:
            read = iter(self.reads)
            args = [_fill_slots(x, tensors, read) for x in self.args]
            out = self.func(*args, **{name: _fill_slots(x, tensors, read) for name, x in self.kwargs.items()})
        else:
            out = self.func(*self.args, **self.kwargs)
        for n, number in self.makes:
            x = out[n] if self.several else out
            tensors[number], at[number] = x, x.data_ptr()


TapeStep = AllocStep | HeldStep | LaunchStep | OpStep


class Tape:
    """The recorded steps of one call, without views that only kernels read: those take addresses."""

    def __init__(self, steps: list[TapeStep], count: int, outputs: list[int | None], names: list[str] | None) -> None:
        self.count, self.outputs, self.names = count, outputs, names
        self.steps: list[tuple[TapeStep, list[int]]] = []  # with the tensors that no later step needs
        needed = {n for n in outputs if n is not None}
        for step in reversed(steps):
            if isinstance(step, OpStep) and step.view and needed.isdisjoint(number for _, number in step.makes):
                continue
            if isinstance(step, AllocStep) and step.number not in needed:  # scratch memory, which a launch makes anew
                continue
            self.steps.insert(0, (step, sorted(step.used - needed)))
            needed |= step.used

    def __call__(self, tensors: list[Tensor], at: list[int]) -> Any:
        rest = self.count - len(tensors)
        slots: list[Any] = [*tensors, *[None] * rest]
        at = at + [0] * rest
        with on_device_of(tensors[0]):
            for step, dropped in self.steps:
                if isinstance(step, AllocStep):  # most are, and a call would take as long as they do
                    slots[step.number] = x = step.make()
                    at[step.number] = x.data_ptr()
                else:
                    step(slots, at)
                for number in dropped:
                    slots[number] = None
        results = [None if n is None else slots[n] for n in self.outputs]
        return results if self.names is None else dict(zip(self.names, results, strict=True))


class TensorSlot:
    """Stands for a tensor among the arguments of an op."""


def _with_slots(x: Any, read: list[Tensor]) -> Any:
    if isinstance(x, Tensor):
        read.append(x)
        return TensorSlot
    return [_with_slots(part, read) for part in x] if isinstance(x, list | tuple) else x


def _fill_slots(x: Any, tensors: list[Any], read: Any) -> Any:
    if x is TensorSlot:
        return tensors[next(read)]
    return [_fill_slots(part, tensors, read) for part in x] if isinstance(x, list) else x


def _place(x: Tensor) -> Hashable:
    """Equal for two tensors only if they are the same memory in the same layout."""
    return x.untyped_storage()._cdata, x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def on_device_of(x: Tensor) -> Any:
    """Context: kernels launch on the device of their tensors, whichever is current."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _no_context
