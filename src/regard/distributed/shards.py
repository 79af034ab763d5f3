"""Which rank has which positions of a sequence, and what it needs of the other ranks' keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.indexing import as_int

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Exchange",
    "Piece",
    "Shards",
    "Spans",
    "Split",
    "chosen_rows",
    "contiguous",
    "positions_of",
    "row_blocks",
    "runs_of",
    "shifted",
    "zigzag",
]

#: How keys reach the ranks that need them.
Exchange = Literal["auto", "ring", "gather"]

#: Runs of positions, each with the part of a rank's tensors that has them.
Spans = list[tuple[range, slice]]

#: Pieces that each rank's keys travel in, and the fewest keys in one: two pieces are held beside the own keys. The
#: state of all rows is merged after every piece, so short pieces cost more than a late first one.
PIECES, SHORTEST_PIECE = 4, 4096
#: Runs of adjacent positions that a rank may have: every pair of runs is one call of an engine.
MOST_RUNS = 256


@dataclass(frozen=True, eq=False)
class Shards:
    """How a sequence is split over the ranks of a mesh, for `regard.weights(..., mesh=...)`.

    Args:
        mesh: A `DeviceMesh` of one axis; each of its ranks passes its own queries and keys.
        rows: Global positions of this rank's queries in their order: whole numbers, or ranges of them. Default: ranks
            hold adjacent positions, in the order of the ranks.
        keys: The same for keys. Default: `rows`.
        exchange: ``"ring"`` holds two pieces of other ranks' keys at a time, ``"gather"`` all that this rank's rows
            see. ``"auto"`` gathers where that takes at most 1 MiB.
        timeout: Seconds that a rank waits for another one before both raise `RankError`.

    >>> shards = regard.distributed.Shards(mesh=None, rows=[range(0, 4), range(12, 16)], timeout=10.0)
    >>> shards.exchange
    'auto'
    """

    mesh: DeviceMesh | ProcessGroup | None
    rows: Sequence[int] | Sequence[range] | Tensor | None = None
    keys: Sequence[int] | Sequence[range] | Tensor | None = None
    exchange: Exchange = "auto"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.exchange not in ("auto", "ring", "gather"):
            raise ValueError(f'Shards(exchange) must be "auto", "ring" or "gather"; got {self.exchange!r}.')
        if not isinstance(self.timeout, (int, float)) or not 0 < self.timeout < float("inf"):
            raise ValueError(f"Shards(timeout) must be seconds > 0; got {self.timeout!r}.")


def runs_of(positions: Any, what: str) -> list[range]:
    """Positions as runs of adjacent ones, in their order."""
    if isinstance(positions, Tensor):
        positions = positions.tolist()
    if isinstance(positions, range):
        positions = [positions]
    if not isinstance(positions, Sequence) or isinstance(positions, str):
        raise TypeError(f"{what} must be a list of whole numbers or of ranges; got {positions!r:.80}.")
    runs: list[range] = []
    for item in positions:
        if isinstance(item, bool) or not isinstance(item, (int, range)):
            raise TypeError(f"{what} must be whole numbers, or ranges of them; got {item!r:.80}.")
        part = item if isinstance(item, range) else range(item, item + 1)
        if part.step != 1 or part.start < 0:
            raise ValueError(f"{what} must be positions >= 0 or ranges without a step; got {part!r}.")
        if not part:
            continue
        if runs and runs[-1].stop == part.start:
            runs[-1] = range(runs[-1].start, part.stop)
        else:
            runs.append(part)
    if len(runs) > MOST_RUNS:
        raise ValueError(
            f"{what} may have {MOST_RUNS} runs of adjacent positions on a rank; got {len(runs)}. Split the sequence "
            "into longer parts, such as zigzag(length, ranks)."
        )
    return runs


def contiguous(lengths: Sequence[int]) -> list[list[range]]:
    """Adjacent positions in the order of the ranks, of these lengths."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [[range(start, start + n)] if n else [] for start, n in zip(starts, lengths, strict=True)]


def zigzag(length: int, ranks: int) -> list[list[range]]:
    """Positions of every rank such that under a causal mask all ranks have equal work.

    The sequence is cut into 2·ranks parts; rank r has part r and part 2·ranks − 1 − r.

    Args:
        length: Number of positions, any.
        ranks: Number of ranks.

    Returns:
        For every rank its ranges, as `Shards(rows=...)` takes them.

    >>> regard.distributed.zigzag(10, 2)
    [[range(0, 2), range(7, 10)], [range(2, 7)]]
    """
    if as_int(length) is None or as_int(ranks) is None or length < 0 or ranks < 1:
        raise ValueError(f"zigzag(length, ranks) takes whole numbers >= 0 and >= 1; got {length!r} and {ranks!r}.")
    parts = 2 * ranks
    cuts = [part * length // parts for part in range(parts + 1)]
    pieces = [range(a, b) for a, b in pairwise(cuts)]
    return [runs_of([pieces[rank], pieces[parts - 1 - rank]], "zigzag") for rank in range(ranks)]


@dataclass(frozen=True)
class Piece:
    """Adjacent keys of one rank: global positions start ≤ j < stop, at index `at` of the rank's keys."""

    rank: int
    start: int
    stop: int
    at: int


class Split:
    """The positions of every rank.

    Raises:
        ValueError: A position is there twice, or not at all.
    """

    def __init__(self, runs: list[list[range]], what: str) -> None:
        self.runs = runs
        end = 0
        for start, stop in sorted((run.start, run.stop) for own in runs for run in own):
            if start != end:
                fault = f"position {end} is on no rank" if start > end else f"position {start} is there twice"
                raise ValueError(f"{what} of all ranks must be 0, 1, 2, ... without gaps, each once; {fault}.")
            end = stop
        self.length = end

    def count(self, rank: int) -> int:
        return sum(map(len, self.runs[rank]))

    def spans(self, rank: int) -> Spans:
        """Runs of a rank, each with the part of its local tensors."""
        at, spans = 0, []
        for run in self.runs[rank]:
            spans.append((run, slice(at, at + len(run))))
            at += len(run)
        return spans

    def pieces(self) -> list[list[Piece]]:
        """The keys of every rank in the pieces that they travel in."""
        pieces = []
        for rank in range(len(self.runs)):
            longest = max(SHORTEST_PIECE, -(-self.count(rank) // PIECES))
            pieces.append(
                [
                    Piece(rank, start, min(run.stop, start + longest), span.start + start - run.start)
                    for run, span in self.spans(rank)
                    for start in range(run.start, run.stop, longest)
                ]
            )
        return pieces


def chosen_rows(own: Spans, rows: list[int] | range) -> tuple[list[int], list[int], Spans]:
    """Of the chosen rows those of a rank: their places in `rows`, their places in q, and spans over the latter."""
    place, index, positions = [], [], []
    for n, row in enumerate(rows):
        for run, at in own:
            if row in run:
                place.append(n)
                index.append(at.start + row - run.start)
                positions.append(row)
    spans: Spans = []
    for n, position in enumerate(positions):
        if spans and spans[-1][0].stop == position:
            run, at = spans[-1]
            spans[-1] = range(run.start, position + 1), slice(at.start, n + 1)
        else:
            spans.append((range(position, position + 1), slice(n, n + 1)))
    return place, index, spans


def positions_of(spans: Spans, device: torch.device) -> Tensor:
    """The positions themselves."""
    return torch.tensor([n for run, _ in spans for n in run], dtype=torch.int64, device=device)


def shifted(run: range, start: int, stop: int) -> range:
    """The part of a run between two positions, counted from the first of them."""
    return range(max(run.start, start) - start, max(min(run.stop, stop) - start, max(run.start, start) - start))


def row_blocks(spans: Spans, at_once: int) -> Spans:
    """Spans of at most so many rows."""
    return [
        (run[n : n + at_once], slice(at.start + n, min(at.stop, at.start + n + at_once)))
        for run, at in spans
        for n in range(0, len(run), at_once)
    ]
