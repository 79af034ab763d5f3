"""Twin layers, which repeat a layer of their kind: between their attention calls no product is intercepted.

A model on fused kernels computes no scores of its own, and calls a dozen products, sums and means a layer, each of
which takes as long in Python as the operator itself. So the operators between two calls are heard once for each pair of
kinds of layers, and again wherever anything differs. Two layers are of one kind if they stand in one list, are made of
the same classes, and their attention has the same plain attributes, but for its number.

An unheard attention cannot hide: softmax is intercepted always, and an attention module that ran without a call
where its twin made one is named. Either ends the trust in the model, for this recording and those that follow.
"""

from __future__ import annotations

import itertools
import operator
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from .softmax_trail import EagerTracker

__all__ = ["UNHEARD", "TwinLayers", "regime_of"]

UNHEARD = (
    "it attends in another way than the layer of its kind before it, whose products were not all followed; record the "
    "model again"
)

#: The innermost list that a module stands in: what comes before the number, the number, and what comes behind it.
_IN_LIST = re.compile(r"(.*\.|)(\d+)((?:\.(?!\d+(?:\.|$))[^.]+)*)$")

#: Types of attributes that are compared.
_PLAIN = frozenset({bool, int, float, str, NoneType})

#: Attributes by which layers know their number.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "idx", "index"})

_START, _END = -1, -2

_NO_READER: tuple[int, tuple[str, ...], Any] = (-1, (), None)

#: Regimes of a model that are remembered at once: lengths of prompts, mostly.
REGIMES = 16


class Place(NamedTuple):
    """A module that attends."""

    kind: int  # the same for twins
    prefix: str  # its name is prefix, number, suffix; without a number it has no twins
    number: int
    suffix: str


@dataclass
class _Stretches:
    """The stretches that were heard in passes of one regime."""

    stretches: dict[tuple[int, int], int] = field(default_factory=dict)  # by their ends: other modules entered there
    first: str | None = None  # the name of the first call
    next: dict[int, tuple[int, str]] = field(default_factory=dict)  # steps of the number, and suffix, of the next call


@dataclass
class _Memory:
    """The stretches of a model that were heard so far, by regime."""

    kinds: dict[Any, int] = field(default_factory=dict)
    regimes: dict[Any, _Stretches] = field(default_factory=dict)
    structure: list[tuple[str, type]] = field(default_factory=list)  # the model's modules
    places: dict[str, tuple[Place, tuple[Any, ...]]] = field(default_factory=dict)  # by name: with its attributes
    #: How many attributes a module of a class has, which of them are plain, and a function that reads these.
    readers: dict[type, tuple[int, tuple[str, ...], Any]] = field(default_factory=dict)
    is_regular: bool = True  # whether no layer did something else than its twins


_memories: weakref.WeakKeyDictionary[nn.Module, _Memory] = weakref.WeakKeyDictionary()


def _memory_of(model: nn.Module | None) -> _Memory:
    """The memory of a model; that of none trusts nothing."""
    if model is None:
        return _Memory(is_regular=False)
    if model not in _memories:
        _memories[model] = _Memory()
    return _memories[model]


class TwinLayers:
    """The stretches of a model's passes that were heard: from one attention call to the next.

    Args:
        modules: The model's modules by name, a module before its parts.
        entered: The names of modules that look like attention and were called, emptied here at every attention call.
        tracker: A weak reference to a method that gives the memory of products and softmaxes.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        entered: list[str],
        tracker: Callable[[], Callable[[], EagerTracker] | None],
    ) -> None:
        self.modules, self._entered, self._tracker = modules, entered, tracker
        self.hears = True  # whether products are to be intercepted now
        self._memory, self._stretches = _memory_of(modules[0][1] if modules else None), _Stretches()
        self._positions: dict[str, int] = {}  # in `modules`, by name
        self._places: dict[str, Place] = {}
        self._at: Place | None = None  # the last call, if a pass is open
        self._before = 0  # products and softmaxes at the last call

    def begin(self, regime: Any) -> None:
        """A pass begins; what was heard counts for passes of the same regime."""
        regimes = self._memory.regimes
        if regime not in regimes:
            if len(regimes) >= REGIMES:
                regimes.clear()
            regimes[regime] = _Stretches()
        self._stretches = regimes[regime]
        self._open(Place(_START, "", -1, ""))

    def call(self, name: str) -> list[str]:
        """A module attends.

        Returns:
            Modules that should have attended before it as their twins did, and did not.
        """
        if self._at is None or not self._memory.is_regular:
            return []
        place = self._places.get(name) or self._place(name)
        missed = self._close(place.kind, name)
        before = self._at
        if before.kind == _START:
            self._stretches.first = name
        if place.prefix == before.prefix and place.number >= 0:
            self._stretches.next[before.kind] = place.number - before.number, place.suffix
        self._open(place)
        return missed

    def end(self, completed: bool) -> list[str]:
        """The pass ends; the same as `call`."""
        if self._at is None:
            return []
        missed = self._close(_END, None) if completed else []
        if not completed:
            self._stretches.stretches.clear()
        self._at, self.hears = None, True
        return missed

    def _memory_of_scores(self) -> EagerTracker:
        method = self._tracker()
        assert method is not None
        return method()

    def distrust(self) -> None:
        """A layer does what its twins did not: all is heard from now on."""
        self._memory.is_regular, self.hears = False, True

    def _open(self, place: Place) -> None:
        tracker = self._memory_of_scores()
        self._at, self._before = place, tracker.started
        self._entered.clear()
        is_quiet = self._memory.is_regular and (place.kind, self._kind_after(place)) in self._stretches.stretches
        self.hears = not is_quiet or bool(tracker.open or tracker.scores)

    def _close(self, kind: int, name: str | None) -> list[str]:
        """A stretch ends with a call of that kind and name: it was heard, or must be what its twin was."""
        assert self._at is not None
        others = [one for one in self._entered if one != name and (name is None or not _is_part(name, one))]
        stretch = self._at.kind, kind
        if self.hears:
            if self._memory_of_scores().started == self._before and stretch != (_START, _END):
                self._stretches.stretches[stretch] = len(others)
            return []
        if len(others) == self._stretches.stretches.get(stretch, 0):
            return []
        self.distrust()
        return others

    def _kind_after(self, place: Place) -> int:
        """The kind of the call that will follow one, by what followed its twins."""
        if place.kind == _START:
            first = self._stretches.first
            return _END if first is None else (self._places.get(first) or self._place(first)).kind
        steps, suffix = self._stretches.next.get(place.kind, (0, ""))
        name = f"{place.prefix}{place.number + steps}{suffix}"
        if place.number < 0 or not (suffix or steps):
            return _END
        self._find_modules()
        return (self._places.get(name) or self._place(name)).kind if name in self._positions else _END

    def _find_modules(self) -> None:
        """Places in the model that were found before count while it has the same modules."""
        if self._positions:
            return
        self._positions = {name: n for n, (name, _) in enumerate(self.modules)}
        structure = [(name, type(module)) for name, module in self.modules]
        if structure != self._memory.structure:
            self._memory.structure = structure
            self._memory.places.clear()
            # TorchScript runs other operators once it has optimised a graph.
            if any(issubclass(kind, torch.jit.ScriptModule) for _, kind in structure):
                self._memory.is_regular = False

    def _place(self, name: str) -> Place:
        """The place of a module that attends, whose attributes are read anew."""
        self._find_modules()
        at, entry = self._positions.get(name), self._memory.places.get(name)
        own = () if at is None else self._attributes(self.modules[at][1])
        try:
            is_same = entry is not None and entry[1] == own
            if not is_same:
                entry = self._find(name, at, own), own
                self._memory.places[name] = entry
        except (TypeError, RuntimeError):  # an attribute that has no hash, or a tensor
            entry = self._find(name, None, ()), ()
        assert entry is not None
        self._places[name] = entry[0]
        return entry[0]

    def _find(self, name: str, at: int | None, own: tuple[Any, ...]) -> Place:
        kinds, match = self._memory.kinds, _IN_LIST.match(name)
        if match is None or at is None:
            return Place(kinds.setdefault(name, len(kinds)), "", -1, "")
        prefix, number, suffix = match[1], int(match[2]), match[3]
        block, inside = self._positions[f"{prefix}{number}"], f"{prefix}{number}."
        parts = itertools.takewhile(lambda part: part[0].startswith(inside), self.modules[block + 1 :])
        key = prefix, suffix, type(self.modules[block][1]), tuple([type(module) for _, module in parts]), own
        return Place(kinds.setdefault(key, len(kinds)), prefix, number, suffix)

    def _attributes(self, module: nn.Module) -> tuple[Any, ...]:
        """The plain attributes of a module, but for its number, and its forward."""
        own, kind = vars(module), type(module)
        count, names, read = self._memory.readers.get(kind, _NO_READER)
        if count != len(own):
            names = tuple([name for name, x in own.items() if type(x) in _PLAIN and name not in _NUMBERS])
            read = operator.itemgetter(*names) if names else len
            self._memory.readers[kind] = len(own), names, read
        try:
            return id(kind.__dict__.get("forward")), names, read(own)
        except KeyError:  # another object of the class has as many attributes, of other names
            self._memory.readers.pop(kind)
            return self._attributes(module)


def _is_part(name: str, other: str) -> bool:
    """Whether one module is the other, or stands inside it."""
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def regime_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a pass but for numbers in tensors, and its settings: those of one regime take the same paths."""
    arguments = [(None, x) for x in args] + [*kwargs.items()]
    passed = tuple([(name, x if type(x) in _PLAIN else (type(x), getattr(x, "ndim", None))) for name, x in arguments])
    return torch.is_grad_enabled(), model.training, passed, _settings(vars(model).get("config"))


def _settings(config: Any) -> Any:
    """The plain attributes of a model's configuration, and of those inside it: its attention is one of them."""
    own = getattr(config, "__dict__", {})
    inner = tuple([_settings(x) for x in own.values() if type(x).__name__.endswith("Config")])
    return tuple([x for x in own.items() if type(x[1]) in _PLAIN]), inner
