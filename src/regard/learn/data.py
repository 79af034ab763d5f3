"""Batches: each is a function of the seed and the step alone, so a resumed run draws the same ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["SentencePairs", "TextWindows", "pad_rows", "step_seed"]


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
        self.source, self.target, self.batch, self.seed, self.device = source, target, batch, seed, device
        self.pad, self.start, self.end = marks
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def batches(self) -> int:
        """Batches in one pass over the data."""
        return -(-len(self.source) // self.batch)

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Source, decoder input and decoder target of a step, each (batch, length)."""
        epoch, n = divmod(step, self.batches)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        return self._tensors(self._epoch[1][n])

    def all(self, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All pairs, sorted by length."""
        order = sorted(range(len(self.source)), key=self._length)
        for n in range(0, len(order), batch):
            yield self._tensors(order[n : n + batch])

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = random.Random(f"{self.seed}/epoch {epoch}")
        order = list(range(len(self.source)))
        generator.shuffle(order)
        pool = self.batch * self.POOL
        batches = []
        for n in range(0, len(order), pool):
            similar = sorted(order[n : n + pool], key=self._length)
            batches += [similar[m : m + self.batch] for m in range(0, len(similar), self.batch)]
        generator.shuffle(batches)
        return batches

    def _length(self, n: int) -> tuple[int, int]:
        return len(self.target[n]), len(self.source[n])

    def _tensors(self, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        source = [[*self.source[n], self.end] for n in chosen]
        before = [[self.start, *self.target[n]] for n in chosen]
        after = [[*self.target[n], self.end] for n in chosen]
        return tuple(pad_rows(rows, self.pad, self.device) for rows in (source, before, after))  # type: ignore[return-value]


def pad_rows(rows: list[list[int]], pad: int, device: torch.device) -> Tensor:
    """Rows of different lengths as one tensor, padded on the right to a multiple of 8."""
    longest = -(-max(map(len, rows)) // 8) * 8
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows]).to(device)
