"""The cost of a matrix over ranks, before anything runs: operations, bytes, memory and time of every rank.

The formulas are those of the exchange: a rank receives the keys that its rows see and does not have, computes with one
piece while the next one travels, and holds two pieces beside its own keys. Rates are measured ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.masks.kinds import Mask
from .cost_split import EvenSplit
from .shards import PIECES, SHORTEST_PIECE

__all__ = ["MACHINES", "Cost", "Machine", "Mesh", "Trace", "cost", "ring_trace"]

#: Copies that merging the states of a block of rows takes, of its numbers and of its top scores and places.
MERGED, MERGED_TOP = 5, 9
#: Sums of a piece that exist at once in the backward pass: those of the engine and computed, on their way and arriving.
SUMMED, RETURNED = 2, 2
#: The share of a rank's memory that a run may fill: the rest is the allocator's and the libraries'.
USABLE = 0.9


@dataclass(frozen=True)
class Machine:
    """The rates of one rank, in operations, bytes and seconds.

    Attributes:
        name: For people.
        forward: Operations a second of a forward pass with row statistics.
        second_pass: Of the pass for `received` and pooled maps.
        backward: Of the gradients.
        memory: Bytes.
        bandwidth: Bytes a second that a rank receives, and sends at the same time.
        latency: Seconds of a message.
        memory_bandwidth: Bytes a second of the own memory, in which the states of pieces are merged.
        rows: Rows that are computed and merged at once: 32,768 on a GPU, 4,096 on a CPU.

    Example:
        >>> regard.distributed.MACHINES["h200-nvlink"].bandwidth
        360000000000.0
    """

    name: str
    forward: float
    second_pass: float
    backward: float
    memory: float
    bandwidth: float
    latency: float
    memory_bandwidth: float
    rows: int = 2**15


#: Rates of the kernels: bench/results/gpu.json, bfloat16, causal, 16,384 tokens, size 128. Links: 80 % of what NVLink 4
#: names for one direction (450 GB/s), and 90 % of 100 Gb/s. Memory: 85 % of 4.8 TB/s, as decoding reaches.
_H200 = Machine(
    "H200, NVLink",
    forward=571e12,
    second_pass=481e12,
    backward=465e12,
    memory=139 * 2.0**30,
    bandwidth=360e9,
    latency=10e-6,
    memory_bandwidth=4.1e12,
)
MACHINES = {
    "h200-nvlink": _H200,
    "h200-100gbit": replace(_H200, name="H200, 100 Gb/s", bandwidth=11.25e9, latency=30e-6),
}


class Mesh(NamedTuple):
    """Ranks along each axis: batches and heads need no exchange, a sequence does.

    Example:
        >>> regard.distributed.Mesh(sequence=8)
        Mesh(batch=1, heads=1, sequence=8)
    """

    batch: int = 1
    heads: int = 1
    sequence: int = 1


class Trace(NamedTuple):
    """A simulated run of one rank.

    Attributes:
        seconds: From the first piece to the last.
        computing: Seconds of it in which the rank computes.
        steps: For each piece when its keys were there, when it was begun and when it was done.

    Example:
        >>> regard.distributed.ring_trace([1.0, 1.0], [0.0, 0.25]).seconds
        2.0
    """

    seconds: float
    computing: float
    steps: list[tuple[float, float, float]]


@dataclass(frozen=True)
class Cost:
    """The work, traffic and memory of each rank: the largest of all ranks.

    Attributes:
        mesh: The ranks.
        operations: Multiplications and additions.
        received: Bytes from other ranks.
        memory: Bytes held at once, inputs and results included.
        computing: Seconds of computing alone: the ideal.
        seconds: Seconds in all, with merging and what the exchange adds.
        fits: Whether the memory suffices.

    Example:
        >>> print(regard.cost((1, 32, 8, 2**20, 128), 8, mask=regard.causal()))
        Mesh(batch=1, heads=8, sequence=1): 1.13e+15 operations, 0 B received, 3.9 GB of memory; 1.97 s, 100 % computing
    """

    mesh: Mesh
    operations: float
    received: int
    memory: int
    computing: float
    seconds: float
    fits: bool

    @property
    def overlap(self) -> float:
        """The share of the time in which ranks compute: 1 where the exchange is hidden and nothing is merged.

        Example:
            >>> regard.cost((1, 1, 1, 2**20, 64), (1, 1, 8), mask=regard.causal()).overlap > 0.5
            True
        """
        return self.computing / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        state = "" if self.fits else "; does not fit"
        return (
            f"{self.mesh}: {self.operations:.3g} operations, {_bytes(self.received)} received, "
            f"{_bytes(self.memory)} of memory{state}; {self.seconds:.3g} s, {100 * self.overlap:.0f} % computing"
        )


def cost(
    shape: tuple[int, int, int, int, int],
    mesh: int | tuple[int, int, int],
    *,
    mask: Mask | None = None,
    values: bool = True,
    second_pass: bool = False,
    backward: bool = False,
    topk: int = 0,
    itemsize: int = 2,
    machine: str | Machine = "h200-nvlink",
) -> Cost:
    """Operations, bytes, memory and time of every rank, before anything runs.

    Args:
        shape: Batch, query heads, key heads, length and size of a head.
        mesh: Ranks along batch, heads and sequence; or a number of ranks: the mesh of least time is chosen among those
            that fit, of equal ones that with least exchange.
        mask: A causal mask, a window, or both. Default: every key is seen.
        values: Whether ``W @ v`` is computed; statistics alone send no values.
        second_pass: Whether `received` or a pooled map is computed.
        backward: Whether gradients are computed.
        topk: Keys that are returned of each row.
        itemsize: Bytes of a number of q, k and v.
        machine: A name of `MACHINES`, or the rates of another one.

    Returns:
        The cost of the rank with most to do. Where no mesh fits: that of the mesh with least memory; `fits` is False.

    Raises:
        ValueError: The mask is another one, or the mesh does not divide batch or heads.

    Example:
        >>> regard.cost((1, 32, 8, 2**24, 128), 64, mask=regard.causal()).mesh
        Mesh(batch=1, heads=8, sequence=8)
        >>> regard.cost((1, 32, 8, 2**20, 128), (1, 1, 1), mask=regard.window(4096, 0)).seconds < 0.2
        True
        >>> regard.cost((1, 32, 8, 100_000_000, 128), 8).fits
        False
    """
    band = (None, None) if mask is None else mask.band() if isinstance(mask, Mask) else None
    if band is None:
        raise ValueError(f"cost(mask=) must be causal(), window() or both; got {mask!r:.80}.")
    if isinstance(machine, str) and machine not in MACHINES:
        raise ValueError(f"cost(machine=) must be {', '.join(map(repr, MACHINES))} or a Machine; got {machine!r}.")
    rates = MACHINES[machine] if isinstance(machine, str) else machine
    _check_numbers(topk, itemsize, rates)
    _check_shape(shape)
    candidates = [_mesh(mesh)] if isinstance(mesh, tuple) else _meshes(shape, mesh)
    work = _Work(shape, band, values, second_pass, backward, topk, itemsize, rates)
    costs = [work.cost(one) for one in candidates]
    fitting = [one for one in costs if one.fits]
    # Meshes whose exchange is hidden take the same time: the one that sends least is left then.
    best = min(fitting, key=lambda one: (float(f"{one.seconds:.3g}"), one.received, -one.mesh.batch), default=None)
    return best or min(costs, key=lambda one: one.memory)


def _check_numbers(topk: Any, itemsize: Any, machine: Any) -> None:
    """Raise TypeError or ValueError unless sizes are whole numbers and rates positive."""
    for name, number, least in (("topk", topk, 0), ("itemsize", itemsize, 1)):
        if type(number) is not int or number < least:
            raise ValueError(f"cost({name}=) must be a whole number >= {least}; got {number!r}.")
    if not isinstance(machine, Machine):
        raise TypeError(f"cost(machine=) must be a name of MACHINES or a Machine; got {type(machine).__name__}.")
    for name, rate in vars(machine).items():
        if name not in ("name", "latency") and not rate > 0:
            raise ValueError(f"Machine({name}=) must be a rate > 0; got {rate!r}.")


def _mesh(mesh: tuple[int, ...]) -> Mesh:
    """The mesh of three numbers of ranks."""
    if len(mesh) != 3 or not all(type(n) is int and n >= 1 for n in mesh):
        raise ValueError(f"cost(mesh=) must be ranks >= 1 along (batch, heads, sequence); got {tuple(mesh)}.")
    return Mesh(*mesh)


def _check_shape(shape: Any) -> None:
    """Raise ValueError unless a shape is (batch, query heads, key heads, length, size)."""
    integers = isinstance(shape, (tuple, list)) and all(type(n) is int for n in shape)
    if not integers or len(shape) != 5 or min(shape) < 0 or 0 in (*shape[:3], shape[4]):
        raise ValueError(
            "cost(shape) takes whole numbers (batch, query heads, key heads, length, size), all but the length at "
            f"least 1; got {shape!r:.80}."
        )
    if shape[1] % shape[2]:
        raise ValueError(f"cost(shape): key heads must divide the query heads; got {shape[2]} and {shape[1]}.")


def _meshes(shape: tuple[int, int, int, int, int], ranks: int) -> list[Mesh]:
    """All meshes of so many ranks that divide batch and key heads."""
    b, _, g, _, _ = shape
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"cost(mesh=) must be ranks >= 1; got {ranks!r}.")
    of_batch, of_heads = ([x for x in range(1, min(n, ranks) + 1) if n % x == ranks % x == 0] for n in (b, g))
    return [Mesh(x, y, ranks // (x * y)) for x in of_batch for y in of_heads if ranks % (x * y) == 0]


@dataclass(frozen=True)
class _Work:
    """One request, to be spread over meshes."""

    shape: tuple[int, int, int, int, int]
    band: tuple[int | None, int | None]
    values: bool
    second_pass: bool
    backward: bool
    topk: int
    itemsize: int
    machine: Machine

    def cost(self, mesh: Mesh) -> Cost:
        b, h, g, n, d = self.shape
        if b % mesh.batch or g % mesh.heads or h % g:
            raise ValueError(
                f"a mesh must divide batch and key heads, and key heads the query heads; got {mesh} for {self.shape}."
            )
        b, h, g = b // mesh.batch, h // mesh.heads, g // mesh.heads
        # Zig-zag where earlier rows see less than later ones, else adjacent positions.
        split = EvenSplit(n, mesh.sequence, self.band, zigzag=self.band[0] is None and self.band[1] is not None)
        shares = split.shares()
        keys, rows = max(share.incoming for share in shares), max(share.rows for share in shares)
        cells = b * h * _cells(n, self.band) / mesh.sequence
        passes = self._passes(b, h, g, d)
        computing = [cells * one.operations / one.rate for one in passes]
        seconds = [self._seconds(ideal, one, keys, rows) for ideal, one in zip(computing, passes, strict=True)]
        memory = self._memory(b, h, g, d, rows, keys)
        return Cost(
            mesh,
            sum(cells * p.operations for p in passes),
            max(
                # Sums return to the rank whose keys went.
                sum(share.incoming * p.key_bytes + share.outgoing * p.sum_bytes for p in passes)
                for share in shares
            ),
            memory,
            sum(computing),
            sum(seconds),
            memory <= USABLE * self.machine.memory,
        )

    def _passes(self, b: int, h: int, g: int, d: int) -> list[_PassCost]:
        """For each pass: operations of a cell, bytes of a key that travels, of its returning sums, of a merged row."""
        key, wide = b * g * d * self.itemsize, b * g * d * 4
        of_keys = 2 if self.values else 1
        row = 3 * b * h * 4  # two numbers are read and one is written
        state = row * (d * self.values + 4)
        passes = [_PassCost(2.0 * d * of_keys, key * of_keys, 0, state, self.machine.forward)]
        if self.second_pass:
            passes.append(_PassCost(2.0 * d, key, b * h * 4, 0, self.machine.second_pass))
        if self.backward:
            operations = 10.0 * d if self.values else 6.0 * d
            passes.append(_PassCost(operations, key * of_keys, wide * of_keys, row * d, self.machine.backward))
        return passes

    def _seconds(self, computing: float, one: _PassCost, keys: int, rows: int) -> float:
        """Of a pass that computes so long: the own keys, then the pieces of others, which travel and are merged."""
        piece = max(SHORTEST_PIECE, -(-rows // PIECES))
        merging = rows * one.row_bytes / self.machine.memory_bandwidth if keys else 0.0
        of_key = computing / max(rows + keys, 1)
        travel_of_key = (one.key_bytes + one.sum_bytes) / self.machine.bandwidth

        def step(n: int) -> tuple[float, float]:
            return n * of_key + merging, self.machine.latency + n * travel_of_key

        last = step(keys % piece) if keys % piece else None
        return _ring_seconds(rows * of_key + -(-rows // piece) * merging, keys // piece, step(piece), last)

    def _memory(self, b: int, h: int, g: int, d: int, rows: int, keys: int) -> int:
        """Inputs, results, and the most of what the passes hold beside them."""
        piece = min(rows, max(SHORTEST_PIECE, -(-rows // PIECES)))
        pieces = min(2 * piece, keys)  # one is computed with while the next one arrives
        key, wide = g * d * (2 if self.values else 1), d * self.values
        inputs = rows * (h * d + key) * self.itemsize
        # Of each row: norm, log-sum-exp, maximum and its place, entropy, mean distance; top scores and their places.
        results = rows * h * (4 * wide + 32 + 12 * self.topk) + (4 * rows * h if self.second_pass else 0)
        merging = min(rows, self.machine.rows) * h * (MERGED * 4 * (wide + 6) + MERGED_TOP * 12 * self.topk)
        joining = rows * h * max(4 * wide, 8 * self.topk, 8)  # the blocks of the largest result, and that result
        most = max(merging + pieces * key * self.itemsize, joining) if keys else 0
        if self.backward:
            of_inputs = rows * (h * wide * self.itemsize + 4 * (h * d + key))  # in float32, and the incoming gradient
            # Before an exchange the incoming gradient is copied to float32, the dtype of statistics.
            of_inputs += rows * h * wide * 4 if keys and self.itemsize < 4 else 0
            sums = 4 * key * (SUMMED * piece + RETURNED * min(piece, keys))
            most = max(most, of_inputs + pieces * key * self.itemsize + sums)
        return b * (inputs + results + most)


class _PassCost(NamedTuple):
    """A pass over the keys: operations of a cell, bytes of a key and of its returning sums, and the rate."""

    operations: float
    key_bytes: int
    sum_bytes: int
    row_bytes: int  # moved in memory for each row when a piece is merged
    rate: float


def ring_trace(computing: list[float], travel: list[float]) -> Trace:
    """Simulate one rank: a piece begins when its keys are there, and the next one starts to travel then.

    Args:
        computing: Seconds of each piece, the own keys first.
        travel: Seconds that each piece travels; 0 for the own keys.

    Returns:
        The `Trace`.

    Example:
        >>> trace = regard.distributed.ring_trace([2.0, 1.0, 1.0], [0.0, 1.0, 3.0])  # the last one comes late
        >>> trace.seconds, trace.computing
        (6.0, 4.0)
    """
    if len(computing) != len(travel):
        raise ValueError(
            f"ring_trace(computing, travel) takes as many seconds of each; got {len(computing)} and {len(travel)}."
        )
    steps, done, sent = [], 0.0, 0.0
    for n, (work, seconds) in enumerate(zip(computing, travel, strict=True)):
        there = sent + seconds
        began = max(done, there)
        done = began + work
        steps.append((there, began, done))
        sent = 0.0 if n == 0 else began  # the first piece of others travels while the own keys are computed with
    return Trace(done, sum(computing), steps)


def _ring_seconds(own: float, pieces: int, step: tuple[float, float], last: tuple[float, float] | None) -> float:
    """Seconds by `ring_trace` of so many equal pieces and a shorter last one, each (computing, travel), at once."""
    began = done = 0.0
    if pieces:
        began = max(own, step[1]) + (pieces - 1) * max(step)
        done = began + step[0]
    if last is None:
        return done if pieces else own
    return max(done or own, began + last[1]) + last[0]


def _cells(n: int, band: tuple[int | None, int | None]) -> float:
    """Visible cells of n rows."""

    def side(limit: int | None) -> float:
        reach = n - 1 if limit is None else min(limit, n - 1)
        return reach * n - reach * (reach + 1) / 2

    return n + side(band[0]) + side(band[1])


def _bytes(n: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n:.0f} B"
