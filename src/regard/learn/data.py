"""Batches: each is a function of the seed and the step alone, so a resumed run draws the same ones."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["SentencePairs", "TextWindows", "step_seed"]


def step_seed(seed: int, step: int) -> int:
    """The seed of one step, unrelated to its neighbours'."""
    return random.Random(f"{seed}/{step}").getrandbits(63)


class TextWindows:
    """Windows of a long text: `context` tokens as input, and the same shifted by one as targets."""

    def __init__(
        self, read: Callable[[], Tensor], context: int, batch: int, seed: int, device: torch.device | None = None
    ) -> None:
        self.read, self.context, self.batch, self.seed = read, context, batch, seed
        self.device = device or self.ids.device  # ids that are mapped from a file stay on the CPU

    @property
    def ids(self) -> Tensor:
        """The token ids. Those of a file are mapped again: pages that were read before do not stay in memory."""
        return self.read()

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, each (batch, context)."""
        ids, generator = self.ids, torch.Generator().manual_seed(step_seed(self.seed, step))
        starts = torch.randint(len(ids) - self.context, (self.batch,), generator=generator).to(ids.device)
        windows = ids[starts[:, None] + torch.arange(self.context + 1, device=ids.device)]
        windows = windows.to(self.device, torch.long)
        return windows[:, :-1], windows[:, 1:]

    def all(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of the text in windows that do not overlap; an incomplete last one is left out if there are others."""
        last = len(self.ids) - 1
        size = min(self.context, last)
        count = last // size
        for n in range(0, count, batch):
            rows = min(batch, count - n)
            part = self.ids[n * size : (n + rows) * size + 1].to(self.device, torch.long)
            yield part[:-1].view(rows, size), part[1:].view(rows, size)


class SentencePairs:
    """Sentence pairs in batches of similar length: source, decoder input and decoder target."""

    #: Batches that are sorted by length together; the order of such pools is random.
    POOL = 32

    def __init__(
        self, source: list[list[int]], target: list[list[int]], marks: tuple[int, int, int], batch: int, seed: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.pad, start, end = marks
        self.source = _Sentences(([*row, end] for row in source), self.pad, device)
        self.target = _Sentences(([start, *row, end] for row in target), self.pad, device)
        self.batch, self.seed = batch, seed
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def batches(self) -> int:
        """Batches in one pass over the data."""
        return -(-len(self.source.lengths) // self.batch)

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Source, decoder input and decoder target of a step, each (batch, length)."""
        epoch, n = divmod(step, self.batches)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        return self._tensors(self._epoch[1][n])

    def all(self, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All pairs, sorted by length."""
        order = sorted(range(len(self.source.lengths)), key=self._length)
        for n in range(0, len(order), batch):
            yield self._tensors(order[n : n + batch])

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = random.Random(f"{self.seed}/epoch {epoch}")
        order = list(range(len(self.source.lengths)))
        generator.shuffle(order)
        pool = self.batch * self.POOL
        batches = []
        for n in range(0, len(order), pool):
            similar = sorted(order[n : n + pool], key=self._length)
            batches += [similar[m : m + self.batch] for m in range(0, len(similar), self.batch)]
        generator.shuffle(batches)
        return batches

    def _length(self, n: int) -> tuple[int, int]:
        return self.target.lengths[n], self.source.lengths[n]

    def _tensors(self, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.tensor(chosen).to(self.source.ids.device)[:, None]
        before = self.target.padded(chosen, numbers, drop_last=True)
        return self.source.padded(chosen, numbers), before, self.target.padded(chosen, numbers, drop_first=True)


class _Sentences:
    """Rows of token ids of different lengths, one after the other on the device: a batch of them is a few launches."""

    def __init__(self, rows: Iterable[list[int]], pad: int, device: torch.device) -> None:
        ids = array("q")
        self.lengths: list[int] = []
        for row in rows:
            ids.extend(row)
            self.lengths.append(len(row))
        self.pad, self.ids = pad, torch.tensor(ids).to(device)
        self.sizes = torch.tensor(self.lengths).to(device)
        self.starts = self.sizes.cumsum(0) - self.sizes

    def padded(
        self, chosen: list[int], numbers: Tensor, drop_first: bool = False, drop_last: bool = False
    ) -> Tensor:  # fmt: skip
        """The chosen rows, whose numbers are also on the device, padded on the right to a multiple of 8 tokens."""
        dropped = drop_first + drop_last
        longest = -(-(max(self.lengths[n] for n in chosen) - dropped) // 8) * 8
        columns = torch.arange(longest, device=self.ids.device)
        real = columns < self.sizes[numbers] - dropped
        places = self.starts[numbers] + columns + int(drop_first)
        return self.ids[places.where(real, 0)].where(real, self.pad)
