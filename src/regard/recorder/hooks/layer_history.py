"""The history of a model: where it computed no scores of its own, no product is intercepted the next time.

A model on fused kernels calls a dozen products, sums and means a layer, each of which takes as long in Python as the
operator itself. So the operators between two attention calls are heard once, in every layer by itself, and again
wherever anything differs: the arguments of the pass, the configuration, the modules, their plain attributes, functions
and hooks, the order of the calls, or a number that was read from a tensor, from there on. No layer is trusted for what
another one did.

Another way that no attribute shows is caught where it ends: softmax is intercepted always, and an attention module that
ran without a call where it had made one is named. Either ends the trust in the model, for this recording and those that
follow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .call_site import is_plain_layer
from .census import Census

if TYPE_CHECKING:
    from .recurring_calls import Form
    from .softmax_trail import EagerTracker

__all__ = ["UNHEARD", "LayerHistory", "regime_of"]

UNHEARD = (
    "it attends in another way than it was heard to before, and its products were not all followed; record the model "
    "again"
)

#: Types of attributes that are compared.
_PLAIN = frozenset({bool, int, float, str, NoneType})

#: Regimes of a model that are remembered at once: lengths of prompts, mostly.
REGIMES = 16


@dataclass
class PassHistory:
    """The course of the passes of one regime."""

    names: list[str] = field(default_factory=list)  # of the modules that attended, call by call
    quiet: list[bool] = field(default_factory=list)  # whether no scores may have been computed before each, and behind
    entered: list[list[str]] = field(default_factory=list)  # the modules called there that look like attention
    others: list[list[str]] = field(default_factory=list)  # those of them that are not part of the one that attends
    attributes: list[Any] = field(default_factory=list)  # of all modules
    numbers: list[Any] = field(default_factory=list)  # read from tensors, on which a path may depend
    forms: dict[str, Form] = field(default_factory=dict)  # of the calls, by the name of the module


class LayerHistory:
    """One thread's pass through a model beside those that were heard before.

    Args:
        census: What is remembered of the model; None: all is past.
        modules: The model's modules by name.
        entered: The names of modules that look like attention and were called, emptied here at every attention call.
        tracker: A weak reference to a method that gives the memory of products and softmaxes.
    """

    def __init__(
        self,
        census: Census | None,
        modules: Sequence[tuple[str, nn.Module]],
        entered: list[str],
        tracker: Callable[[], Callable[[], EagerTracker] | None],
    ) -> None:
        self._census = Census(is_regular=False) if census is None else census
        self._modules, self._entered, self._tracker = modules, entered, tracker
        self.hears = True  # whether products are to be intercepted now
        self._reads: list[tuple[dict[str, Any], Any]] = []  # attributes of modules, and what reads them
        self.forms: dict[str, Form] = {}  # of calls in passes of this regime, by the name of the module
        self._past: PassHistory | None = None  # of the regime of the pass, if one is open
        self._now: PassHistory | None = None  # what the pass does; None: so far what was heard
        self._at: int | None = 0  # the number of the next call there; None: the calls are others
        self._before = 0  # products and softmaxes at the last call
        self._numbers: list[Any] = []  # that the pass has read
        self._is_other = False  # whether one of them is another than before

    def begin(self, regime: Any) -> None:
        """A pass begins; what was heard counts for passes of the same regime."""
        if not self._census.is_regular:
            return
        regimes = self._census.facts.setdefault("regimes", {})
        past, attributes = regimes.get(regime), self._attributes()
        if past is None or not _are_equal(attributes, past.attributes):
            self._census.facts.pop("readers", None)  # an attribute may be of another type
            self._reads = []
            if len(regimes) >= REGIMES:
                regimes.clear()
            past = regimes[regime] = PassHistory(attributes=self._attributes())
        self._past, self._now, self._at = past, None, 0
        self.forms = past.forms
        self._numbers, self._is_other = [], False
        self._open()

    def again(self, name: str) -> bool:
        """A module attends, after what was heard before it, and nothing is to be heard after it; else use `call`."""
        past, at = self._past, self._at
        if past is None or self.hears or self._now is not None or at is None or at >= len(past.names):
            return False
        if past.names[at] != name or self._entered != past.entered[at] or not past.quiet[at + 1]:
            return False
        self._at = at + 1
        self._entered.clear()
        return True

    def read(self, number: Any) -> None:
        """A number, or a size that depends on numbers, is read from a tensor: another one may lead elsewhere."""
        past = self._past
        if past is None:
            return
        at = len(self._numbers)
        self._numbers.append(number)
        if past.numbers[at : at + 1] != [number]:
            self._is_other = self.hears = True

    def call(self, name: str) -> list[str]:
        """A module attends.

        Returns:
            Modules that should have attended before it, as they had done, and did not.
        """
        past, at = self._past, self._at
        if past is None:
            return []
        missed = self._close(name)
        if at is not None and past.names[at : at + 1] == [name]:
            self._at = at + 1
        else:  # a layer was left out, or calls come in another order
            self._at = past.names.index(name) + 1 if name in past.names else None
        if self._past is not None:
            self._open()
        return missed

    def end(self, completed: bool) -> list[str]:
        """The pass ends; the same as `call`."""
        past = self._past
        if past is None:
            return []
        missed: list[str] = []
        is_same = self._now is None and self._at == len(past.names) and not self.hears
        if completed and not (is_same and self._entered == past.entered[self._at]):  # type: ignore[index]
            missed = self._close(None)
        if completed and self._census.is_regular and (now := self._now) is not None:
            past.numbers = self._numbers
            past.names, past.quiet, past.entered, past.others = now.names, now.quiet, now.entered, now.others
        self._past, self.hears, self.forms = None, True, {}
        return missed

    def distrust(self) -> None:
        """A layer does what it had not done: all is heard from now on."""
        self._census.is_regular, self.hears, self._past, self.forms = False, True, None, {}
        self._census.facts.pop("regimes", None)

    def _memory_of_scores(self) -> EagerTracker:
        method = self._tracker()
        assert method is not None
        return method()

    def _open(self) -> None:
        tracker = self._memory_of_scores()
        self._before = tracker.started
        self._entered.clear()
        quiet = self._past.quiet if self._past is not None else []
        is_quiet = self._at is not None and self._at < len(quiet) and quiet[self._at]
        self.hears = not is_quiet or self._is_other or bool(tracker.open or tracker.scores)

    def _close(self, name: str | None) -> list[str]:
        """A stretch ends with a call of that name: it was past, or must be what it was before."""
        past, at = self._past, self._at
        assert past is not None
        others = [one for one in self._entered if one != name and (name is None or not _is_part(name, one))]
        is_quiet = not self.hears or self._memory_of_scores().started == self._before
        self._add(name, is_quiet, list(self._entered), others)
        if self.hears:
            return []
        is_same_call = at is not None and [*past.names, None][at : at + 1] == [name]
        expected = past.others[at] if is_same_call else [one for stretch in past.others for one in stretch]  # type: ignore[index]
        missed = [one for one in others if one not in expected]
        if missed:
            self.distrust()
        return missed

    def _add(self, name: str | None, is_quiet: bool, entered: list[str], others: list[str]) -> None:
        past, at = self._past, self._at or 0
        if (now := self._now) is None and past is not None:
            now = self._now = PassHistory(past.names[:at], past.quiet[:at], past.entered[:at], past.others[:at])
        assert now is not None
        if name is not None:
            now.names.append(name)
        now.quiet.append(is_quiet and bool(now.names))
        now.entered.append(entered)
        now.others.append(others)

    def _attributes(self) -> list[Any]:
        """The plain attributes of all modules that may attend; read in every pass."""
        if not self._reads:
            readers = self._census.facts.get("readers")
            if readers is None:
                readers = [_reader(module) for _, module in self._modules]
                self._census.facts["readers"] = readers
            every = zip(self._modules, readers, strict=True)
            self._reads = [(module.__dict__, read) for (_, module), read in every if read is not None]
        try:
            return [(len(own), read(own)) for own, read in self._reads]
        except KeyError:  # one was deleted: equal to nothing
            return [object()]


def _reader(module: nn.Module) -> Callable[[dict[str, Any]], Any] | None:
    """A function that reads the plain attributes of a module; None for a layer of PyTorch's own."""
    if is_plain_layer(module):
        return None
    names = [name for name, x in module.__dict__.items() if type(x) in _PLAIN]
    return operator.itemgetter(*names) if names else len


def _are_equal(attributes: list[Any], before: list[Any]) -> bool:
    try:
        return attributes == before
    except (RuntimeError, ValueError):  # an attribute has become a tensor or an array
        return False


def _is_part(name: str, other: str) -> bool:
    """Whether one module is the other, or stands inside it."""
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def regime_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a pass but for numbers in tensors, and its settings: those of one regime take the same paths."""
    arguments = [(None, x) for x in args] + [*kwargs.items()]
    passed = tuple([(name, x if type(x) in _PLAIN else (type(x), getattr(x, "ndim", None))) for name, x in arguments])
    casts = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return torch.is_grad_enabled(), casts, model.training, passed, _settings(vars(model).get("config"))


def _settings(config: Any) -> Any:
    """The plain attributes of a model's configuration, and of those inside it: its attention is one of them."""
    own = getattr(config, "__dict__", {})
    inner = tuple([_settings(x) for x in own.values() if type(x).__name__.endswith("Config")])
    return tuple([x for x in own.items() if type(x[1]) in _PLAIN]), inner
