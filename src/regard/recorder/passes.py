"""Passes while the block is open: the calls of one forward, and the forwards of one generation.

A pass begins where the model's forward does; outside a forward, where its first layer is called again. A pass whose
first call continues the KV cache of the last pass is the next step of its generation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import AttentionCall, LayerKind, SavedCall
from .kv_cache import CachedGeneration, CannotStitch, WaitingKeys, continues
from .tokens import EmbeddedIds

__all__ = ["Call", "OpenPass", "with_encoders"]


class Call:
    """A layer of an open pass."""

    def __init__(
        self, name: str, number: int, nth: int, kind: LayerKind, saved: SavedCall | None, shape: tuple[int, ...]
    ) -> None:
        self.name, self.kind, self.saved, self.shape = name, kind, saved, shape
        self.number, self.nth = number, nth  # among the calls of the pass, and of the module
        self.statistics: dict[str, Tensor] = {}
        self.generation: CachedGeneration | None = None
        self._last_value: Tensor | None = None  # b g e : of weights, which have no keys to say what they continue

    def note_last_value(self, call: AttentionCall, positions: int) -> None:
        """Keep the value of the last of so many positions, if a call of weights saw no more, to know it again."""
        v, self._last_value = call.v, None
        if call.w is not None and v is not None and v.ndim == 4 and v.shape[2] == positions > 0:
            self._last_value = v[:, :, -1].detach().clone()

    def is_continued_by(self, call: AttentionCall) -> bool:
        """Whether a later call looks like the next step after this one."""
        if self.kind != "self" or self.saved is None or call.shape[:2] != self.shape[:2]:
            return False
        try:
            generation = self.generation or CachedGeneration(self.saved.loaded(), cross=False)
        except CannotStitch:
            return False
        return continues(call, generation.total)

    def extend(self, call: AttentionCall, saved: SavedCall, before: int | None = None, is_step: bool = False) -> None:
        """Add a step of the generation; raises `CannotStitch` if it is none. See `CachedGeneration.extend`."""
        assert self.saved is not None, "statistics cannot be stitched"
        generation = self.generation or CachedGeneration(self.saved.loaded(), cross=self.kind == "cross")
        if before is None and self.kind == "self" and not self._sees_last_value(call, generation.total):
            raise CannotStitch("values change between steps: its cache is that of another sequence, or was edited")
        generation.extend(call, saved, before, is_step)
        self.generation = generation
        if call.w is not None:
            self.note_last_value(call, generation.total)

    def grow(self, saved: SavedCall, waiting: WaitingKeys) -> bool:
        """Add a step of a cache that grew; see `CachedGeneration.grow`."""
        generation = self.generation
        return generation is not None and generation.first.w is None and generation.grow(saved, waiting)

    def _sees_last_value(self, call: AttentionCall, total: int) -> bool:
        """Whether weights over a cache that grows meet the value that was last in it; True where nothing says."""
        last, v = self._last_value, call.v
        if last is None or v is None or v.ndim != 4 or v.shape[2] != total + call.shape[2]:
            return True
        before = v[:, :, total - 1]
        return before.shape == last.shape and torch.equal(before.to(last.device), last)

    def finished(self) -> SavedCall | None:
        """The saved call, stitched; raises `CannotStitch` or `Overwritten`."""
        saved = self.saved if self.generation is None else self.generation.finish()
        if self.generation is not None:
            self.shape = (*self.shape[:2], self.generation.rows, self.generation.total)
        if saved is not None:
            saved.check()
        return saved


class OpenPass:
    """A forward pass while the block is open."""

    def __init__(self, loose: bool, thread: int) -> None:
        self.loose, self.thread = loose, thread  # loose: outside the model's own forward
        self.calls: list[Call] = []
        self.embedded: list[EmbeddedIds] = []
        self.steps = 1
        self.fresh = True  # whether its first call is still to come
        self.step_of: OpenPass | None = None  # the generation this pass is a step of
        self.before: int | None = None  # positions in the cache before this step, where it may have been cut back
        self.count = 0
        self._times: dict[str, int] = {}
        self._by_place: dict[tuple[str, int], Call] = {}

    def number_call(self, name: str) -> tuple[int, int]:
        """The number of a call in this pass, and among the calls of its module."""
        number, nth = self.count, self._times.get(name, 0)
        self.count, self._times[name] = number + 1, nth + 1
        return number, nth

    def restarts_with(self, name: str) -> bool:
        """Whether a call outside any forward is the first of another pass: its first layer comes a second time."""
        # Of all calls: those of a later step of a generation are not among `calls`.
        if not self.loose or next(iter(self._times), None) != name:
            return False
        return max(self._times.values()) == 1  # else one module is called many times a pass

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self._by_place[call.name, call.nth] = call

    def remove(self, call: Call) -> None:
        self.calls.remove(call)
        self._by_place.pop((call.name, call.nth), None)

    def find(self, name: str, nth: int) -> Call | None:
        """The call of a module of that name, the nth of its calls."""
        return self._by_place.get((name, nth))


def with_encoders(passes: list[OpenPass]) -> list[OpenPass]:
    """generate() runs the encoder before the model's first forward: the two belong together, in each thread."""
    joined: list[OpenPass] = []
    for one in passes:
        at = next((n for n in reversed(range(len(joined))) if joined[n].thread == one.thread), 0)
        last = joined[at] if joined and joined[at].thread == one.thread else None
        names = {call.name for call in one.calls}
        if last is not None and last.loose and not one.loose and not names & {call.name for call in last.calls}:
            for call in one.calls:
                call.number += last.count
            one.count += last.count
            one.calls = last.calls + one.calls
            one.embedded = last.embedded + one.embedded
            joined[at] = one
        else:
            joined.append(one)
    return joined
