"""Keys that ranks of an even split send and receive, by formulas: a million ranks take no longer than a hundred.

A rank sees the keys up to a band before and after its rows. How often the keys before a position are seen is a sum over
ranks of cuts of the sequence, floor(m · n / parts): a sum of floors takes as many steps as its numbers have digits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EvenSplit", "Share"]

#: Up to as many ranks are all looked at; of more, those where a formula bends, the ends, and some between them.
ALL_RANKS, ENDS, BETWEEN = 64, 8, 24


class Share(NamedTuple):
    """One rank's rows, the keys that it receives, and how often its own are sent."""

    rows: int
    incoming: int
    outgoing: int


@dataclass(frozen=True)
class EvenSplit:
    """A sequence over ranks with equal parts, adjacent positions or zig-zag.

    Args:
        length: Positions of the sequence.
        ranks: Those without a position, where there are more ranks than positions, are left out.
        band: Keys that a row sees before and after itself; None: all.
        zigzag: Rank r has parts r and 2·ranks − 1 − r. Then a row sees all keys before it.
    """

    length: int
    ranks: int
    band: tuple[int | None, int | None]
    zigzag: bool

    @property
    def used(self) -> int:
        """Ranks that have a position in every part."""
        return max(1, min(self.ranks, self.length // 2 if self.zigzag else self.length))

    @property
    def parts(self) -> int:
        return 2 * self.used if self.zigzag else self.used

    def shares(self) -> list[Share]:
        """The shares of all ranks, or of some with the largest among them but for the rounding to positions."""
        return [self.share(rank) for rank in self._looked_at()]

    def share(self, rank: int) -> Share:
        n, (before, after) = self.length, self.band
        parts = (rank, self.parts - 1 - rank) if self.zigzag else (rank,)
        runs = [(self.cut(part), self.cut(part + 1)) for part in parts]
        rows = sum(stop - start for start, stop in runs)
        first = 0 if before is None else max(0, runs[0][0] - before)
        end = n if after is None else min(n, runs[-1][1] + after)
        return Share(
            rows, end - first - rows, sum(self._views(stop) - self._views(start) for start, stop in runs) - rows
        )

    def cut(self, part: int) -> int:
        """The first position of a part."""
        return part * self.length // self.parts

    def _looked_at(self) -> list[int]:
        """Numbers of keys rise and fall with the rank by straight lines, which bend where a band meets an end."""
        count = self.used
        if count <= ALL_RANKS:
            return list(range(count))
        ranks = {*range(ENDS), *range(count - ENDS, count), *(n * count // BETWEEN for n in range(BETWEEN))}
        for reach in self.band:
            for position in () if reach is None else (reach, self.length // 2 + reach, self.length - reach):
                part = position * self.parts // max(self.length, 1)
                ranks |= {near for at in (part, self.parts - 1 - part) for near in range(at - 2, at + 3)}
        return sorted(rank for rank in ranks if 0 <= rank < count)

    def _views(self, position: int) -> int:
        """How often all keys before a position are seen, over all ranks."""
        before, after = self.band
        ends = range(self.parts - self.used + 1, self.parts + 1)
        to_end = self.used * position if after is None else self._clipped(ends, after, position)
        return to_end if before is None else to_end - self._clipped(range(self.used), -before, position)

    def _clipped(self, parts: range, shift: int, most: int) -> int:
        """The sum over some cuts, each shifted, of what is between 0 and `most`."""
        above = bisect_right(parts, -shift, key=self.cut)
        full = bisect_left(parts, most - shift, key=self.cut)
        if most == 0:
            return 0
        cuts = _sum_of_floors(parts[0] + full, self.length, self.parts)
        cuts -= _sum_of_floors(parts[0] + above, self.length, self.parts)
        return cuts + (full - above) * shift + (len(parts) - full) * most


def _sum_of_floors(count: int, factor: int, divisor: int) -> int:
    """The sum of floor(m · factor / divisor) over m = 0 … count − 1."""
    total = offset = 0
    while count > 0:
        # Whole multiples leave the fraction; then rows and columns of the points below its line change places.
        total += (factor // divisor) * (count * (count - 1) // 2) + (offset // divisor) * count
        factor, offset = factor % divisor, offset % divisor
        top = factor * count + offset
        if top < divisor:
            break
        count, offset = top // divisor, top % divisor
        factor, divisor = divisor, factor
    return total
