"""Passes while the block is open: the calls of one forward, and the forwards of one generation.

A pass begins where the model's forward does; outside it, where its first layer is called again. A pass whose first
call goes on where the last pass ended is its next step. Imports `capture`, `stitch` and `tokens`.
"""

from __future__ import annotations

from torch import Tensor

from .calls import AttentionCall, SavedCall
from .kv_cache import CachedGeneration, CannotStitch, continues
from .tokens import Embedded

__all__ = ["Call", "OpenPass", "with_encoders"]


class Call:
    """A layer while the block is open."""

    def __init__(self, name: str, nth: int, kind: str, kept: SavedCall | None, shape: tuple[int, ...]) -> None:
        self.name, self.nth, self.kind, self.kept, self.shape = name, nth, kind, kept, shape
        self.statistics: dict[str, Tensor] = {}
        self.growing: CachedGeneration | None = None

    def goes_on(self, found: AttentionCall) -> bool:
        """Whether a later call looks like the next step after this one."""
        if self.kind != "self" or self.kept is None or found.shape[:2] != self.shape[:2]:
            return False
        try:
            growing = self.growing or CachedGeneration(self.kept.loaded(), cross=False)
        except CannotStitch:
            return False
        return continues(found, growing.total)

    def grow(self, found: AttentionCall, kept: SavedCall) -> None:
        """One more step of a generation; `CannotStitch` if it is none."""
        assert self.kept is not None, "numbers cannot grow"
        growing = self.growing or CachedGeneration(self.kept.loaded(), cross=self.kind == "cross")
        growing.extend(found, kept)
        self.growing = growing

    def finished(self) -> SavedCall | None:
        """What is kept in the end, stitched and untouched; else `CannotStitch` or `Overwritten`."""
        kept = self.kept if self.growing is None else self.growing.finish()
        if self.growing is not None:
            self.shape = (*self.shape[:2], self.growing.rows, self.growing.total)
        if kept is not None:
            kept.check()
        return kept


class OpenPass:
    """A pass while the block is open."""

    def __init__(self, loose: bool) -> None:
        self.loose = loose  # outside the model's own forward
        self.calls: list[Call] = []
        self.embedded: list[Embedded] = []
        self.steps = 1
        self.fresh = True  # whether its first call is still to come
        self.step_of: OpenPass | None = None  # the generation this pass is a step of
        self.count = 0
        self._times: dict[str, int] = {}

    def counted(self, name: str) -> tuple[int, int]:
        """The number of a call in this pass, and among the calls of its module."""
        number, nth = self.count, self._times.get(name, 0)
        self.count, self._times[name] = number + 1, nth + 1
        return number, nth

    def begins_again_with(self, name: str) -> bool:
        """Whether a call outside any forward is the first of another pass: its first layer comes a second time."""
        if not self.loose or not self.calls or self.calls[0].name != name:
            return False
        return len({call.name for call in self.calls}) == len(self.calls)  # else one module is called many times a pass

    def find(self, name: str, nth: int) -> Call | None:
        return next((call for call in self.calls if call.name == name and call.nth == nth), None)


def with_encoders(passes: list[OpenPass]) -> list[OpenPass]:
    """generate() runs the encoder before the model's first forward: the two belong together."""
    joined: list[OpenPass] = []
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
