"""The same request again: what the host did for an answer is done once more, on other tensors.

Which mask, which tiles, which passes: all that Python decides for an answer depends on the constants of the request
and on the forms of its tensors, not on the numbers in them; and on a GPU that computes in 50 µs it is most of the time.
So an answer is noted down step by step: what was allocated, which operators of PyTorch ran, which kernels were started.
The next one of that form takes these steps and decides nothing. Imports `around`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.torch_state import in_functorch, replay_state, without_autocast

__all__ = ["current_recorder", "is_constant", "is_replayed_device", "on_device_of", "record_launch", "replay_or_record"]

#: Where kernels run beside the host, so that its time counts. (The CPU's kernels write where no operator is seen.)
DEVICES = ("cuda",)
#: More steps, or more memory held while they are noted, and the work itself takes longer than the host does.
MOST_STEPS, MOST_BYTES = 64, 2**28
#: Per signature: SEEN_ONCE (recorded on the second call), a Tape, or NOT_REPLAYABLE. Cleared beyond MAX_TAPES entries.
TAPES: dict[Hashable, Tape | str] = {}
MAX_TAPES, SEEN_ONCE, NOT_REPLAYABLE = 1024, "asked", "never"

CONSTANTS = (type(None), bool, int, float, str, torch.SymInt, torch.SymFloat)
PLAIN = frozenset((Tensor, torch.nn.Parameter))
TensorPlace = tuple[int, int]  # a tensor's number, and how many bytes from where it begins
Start = Callable[[list[int]], None]
_nothing = nullcontext()


def replay_or_record(key: Hashable, tensors: list[Tensor], compute: Callable[[], Any]) -> Any:
    """What `compute` returns, a list or a dict of tensors (None may stand among them), for at least one tensor.

    `key`: all that it depends on, but for `tensors`; of those it may ask the form, but not the numbers.
    """
    if torch.is_autocast_enabled(tensors[0].device.type):
        return without_autocast(tensors[0], lambda: replay_or_record(key, tensors, compute))
    # A request inside a request belongs to the outer one.
    if (
        not is_replayed_device(tensors[0])
        or not PLAIN.issuperset(map(type, tensors))
        or current_recorder()
        or in_functorch()
    ):
        return compute()
    at = [x.data_ptr() for x in tensors]
    # Kernels are compiled for aligned addresses; and tensors in one place may be read once.
    shared = None if len({*at}) == len(at) else tuple(map(at.index, at))
    forms = [(x.shape, x.stride(), x.dtype, x.get_device(), a % 16) for x, a in zip(tensors, at, strict=True)]
    whole = (key, shared, *forms)
    try:
        cached = TAPES.get(whole)
    except TypeError:  # a key that cannot be looked up
        return compute()
    if type(cached) is Tape:
        return cached(tensors, at)
    if cached is None and is_constant(key):
        if len(TAPES) >= MAX_TAPES:
            TAPES.clear()
        TAPES[whole] = SEEN_ONCE
    if cached != SEEN_ONCE:
        return compute()
    with OpRecorder(tensors) as notes:
        found = compute()
    TAPES[whole] = notes.steps(found) or NOT_REPLAYABLE
    return found


def is_replayed_device(x: Tensor) -> bool:
    """Whether results about such a tensor are done again."""
    return x.device.type in DEVICES


def is_constant(key: Any) -> bool:
    """Whether nothing in it can change: a function of a user's may do another thing each time."""
    return all(map(is_constant, key)) if type(key) is tuple else type(key) in CONSTANTS


def current_recorder() -> OpRecorder | None:
    """Where steps are noted down at present, if they are."""
    return replay_state.recorder


def record_launch(start: Start | None, tensors: list[Tensor | None]) -> None:
    """A kernel was started on these; `start` starts it at other addresses, None if it cannot be started again."""
    if (notes := current_recorder()) is not None:
        notes.started(start, tensors)


class OpRecorder(TorchDispatchMode):
    """What is done between its beginning and its end."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.given, self.device = len(tensors), tensors[0].device
        self.tensors: list[Tensor] = []  # held, so that no two are ever in one place
        self.numbers: dict[Hashable, int] = {}
        self.places: list[TensorPlace] = []
        self.taken: list[TapeStep] = []
        self.bytes, self.whole = 0, True
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
        if self.whole:
            try:
                self._ran(func, args, kwargs or {}, out)
            except Exception:  # kinds of tensors that have no place, for one: what was computed is right all the same
                self._give_up()
        return out

    def started(self, start: Start | None, tensors: list[Tensor | None]) -> None:
        numbers = [self._known(x) if x is not None and x.numel() else None for x in tensors]
        if not self.whole or start is None or -1 in numbers:
            self._give_up()
        else:
            self._take(LaunchStep(start, [None if n is None else self.places[n] for n in numbers]))

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One operator. To be done blindly, it must tell the host no number and come in a size that depends on none."""
        read: list[Tensor] = []
        told = [_hollow(x, read) for x in args], {name: _hollow(x, read) for name, x in kwargs.items()}
        outs = out if isinstance(out, list | tuple) else [out]
        reads = [self._known(x) for x in read]
        stays = all(isinstance(x, Tensor) and (not read or x.device == self.device) for x in outs)
        if -1 in reads or not stays or torch.Tag.dynamic_output_shape in func.tags:
            self._give_up()
            return
        if (make := _maker(func, kwargs, out, self.device)) is not None:
            self._take(AllocStep(make, self._number(out, None)))
            return
        step = OpStep(func, *told, reads)
        for n, x in enumerate(outs):
            cached = self._known(x)
            of = next((at for r, at in zip(read, reads, strict=True) if _one_storage(r, x)), None)
            if cached < 0:
                step.makes.append((n, self._number(x, of)))
                step.view = of is not None
            elif of is None or self._place_in(x, of) != self.places[cached]:
                # A part of one tensor that lies where another does: in the next request they may lie apart.
                self._give_up()
                return
        step.several = outs is out
        if step.makes or func._schema.is_mutable:  # else it gave back what it was given
            self._take(step)

    def _known(self, x: Tensor) -> int:
        """The number of a tensor; -1 for one from elsewhere."""
        return self.numbers.get(_place(x), -1)

    def _number(self, x: Tensor, of: int | None) -> int:
        """A number for a new tensor, which lies in memory of its own or in that of another."""
        number = len(self.tensors)
        self.tensors.append(x)
        self.numbers.setdefault(_place(x), number)
        if of is None:
            self.places.append((number, 0))
            self.bytes += x.untyped_storage().nbytes() if number >= self.given else 0
        else:
            self.places.append(self._place_in(x, of))
        return number

    def _place_in(self, x: Tensor, of: int) -> TensorPlace:
        root, offset = self.places[of]
        return root, offset + x.data_ptr() - self.tensors[of].data_ptr()

    def _take(self, step: TapeStep) -> None:
        self.taken.append(step)
        if len(self.taken) > MOST_STEPS or self.bytes > MOST_BYTES:
            self._give_up()

    def _give_up(self) -> None:
        self.whole = False
        self.tensors, self.taken, self.numbers = [], [], {}

    def steps(self, found: Any) -> Tape | None:
        """All that was noted, ready to be done again; None if that cannot be."""
        names, results = (list(found), found.values()) if isinstance(found, dict) else (None, found)
        numbers = [None if x is None else self._known(x) for x in results]
        own = [x for x in results if x is not None]
        there = [n for n in numbers if n is not None]
        # Another tensor of the same numbers (one that is detached) cannot be told from the first.
        alike = len({*map(id, own)}) == len({*there}) and all(
            n >= self.given or self.tensors[n] is x for n, x in zip(there, own, strict=True) if n >= 0
        )
        return Tape(self.taken, len(self.tensors), numbers, names) if self.whole and -1 not in there and alike else None


MAKERS = frozenset(
    (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.zeros.default)
)


class AllocStep:
    """Memory that was taken for a new tensor; most steps are such."""

    used: frozenset[int] = frozenset()

    def __init__(self, make: Callable[[], Tensor], number: int) -> None:
        self.make, self.number = make, number

    def __call__(self, tensors: list[Any], at: list[int]) -> None:
        tensors[self.number] = made = self.make()
        at[self.number] = made.data_ptr()


def _maker(func: Any, kwargs: dict[str, Any], out: Any, device: torch.device) -> Callable[[], Tensor] | None:
    """What makes room for a tensor like `out` on this device, if that is all that `func` did."""
    if func not in MAKERS or out.device != device:
        return None
    said = {name for name, x in kwargs.items() if x not in (None, False, torch.strided)}
    if not said <= {"dtype", "device"}:
        return None
    if func is torch.ops.aten.zeros.default:
        return partial(torch.zeros, tuple(out.shape), dtype=out.dtype, device=device)
    # The door that compiled graphs have for it: half the way.
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if make is None:
        return partial(torch.empty_strided, tuple(out.shape), out.stride(), dtype=out.dtype, device=device)
    return partial(make, tuple(out.shape), out.stride(), out.dtype)


class LaunchStep:
    """A kernel that was started."""

    def __init__(self, start: Start, places: list[TensorPlace | None]) -> None:
        self.start, self.places = start, places
        self.used = {place[0] for place in places if place is not None}

    def __call__(self, tensors: list[Any], at: list[int]) -> None:
        self.start([0 if place is None else at[place[0]] + place[1] for place in self.places])


class OpStep:
    """An operator that ran, with holes in its arguments where tensors stood."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], reads: list[int]) -> None:
        self.func, self.args, self.kwargs, self.reads, self.used = func, args, kwargs, reads, set(reads)
        self.makes: list[tuple[int, int]] = []  # which of its results is which tensor
        self.view = self.several = False

    def __call__(self, tensors: list[Any], at: list[int]) -> None:
        if self.reads:
            read = iter(self.reads)
            args = [_filled(x, tensors, read) for x in self.args]
            out = self.func(*args, **{name: _filled(x, tensors, read) for name, x in self.kwargs.items()})
        else:
            out = self.func(*self.args, **self.kwargs)
        for n, number in self.makes:
            made = out[n] if self.several else out
            tensors[number], at[number] = made, made.data_ptr()


TapeStep = AllocStep | LaunchStep | OpStep


class Tape:
    """What was done for one answer, without the views that only kernels took: those are told addresses."""

    def __init__(self, taken: list[TapeStep], count: int, found: list[int | None], names: list[str] | None) -> None:
        self.count, self.found, self.names = count, found, names
        self.taken: list[tuple[TapeStep, list[int]]] = []  # with the tensors that nobody needs afterwards
        needed = {n for n in found if n is not None}
        for step in reversed(taken):
            if isinstance(step, OpStep) and step.view and needed.isdisjoint(number for _, number in step.makes):
                continue
            self.taken.insert(0, (step, sorted(step.used - needed)))
            needed |= step.used

    def __call__(self, tensors: list[Tensor], at: list[int]) -> Any:
        rest = self.count - len(tensors)
        held: list[Any] = [*tensors, *[None] * rest]
        at = at + [0] * rest
        with on_device_of(tensors[0]):
            for step, dropped in self.taken:
                step(held, at)
                for number in dropped:
                    held[number] = None
        found = [None if n is None else held[n] for n in self.found]
        return found if self.names is None else dict(zip(self.names, found, strict=True))


class TensorSlot:
    """Where a tensor stood among the arguments of an operator."""


def _hollow(x: Any, read: list[Tensor]) -> Any:
    if isinstance(x, Tensor):
        read.append(x)
        return TensorSlot
    return [_hollow(part, read) for part in x] if isinstance(x, list | tuple) else x


def _filled(x: Any, tensors: list[Any], read: Any) -> Any:
    if x is TensorSlot:
        return tensors[next(read)]
    return [_filled(part, tensors, read) for part in x] if isinstance(x, list) else x


def _place(x: Tensor) -> Hashable:
    """What two tensors share only if they are the same numbers in the same form."""
    return x.untyped_storage()._cdata, x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def on_device_of(x: Tensor) -> Any:
    """A guard: kernels start on the device of their tensors, whichever is current."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _nothing
