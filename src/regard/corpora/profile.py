"""The numbers of one pass of a corpus run: every one of every head, by kernels or from a walk over complete rows.

Rows are summed along diagonals: the weight at each signed distance is one vector a head, and the distance histogram,
its moments and the weight on the previous position all follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..core.pytree import register_node
from ..core.rows.complete_rows import ChosenKeys, RowEntropy, induction_targets
from ..core.rows.head_profile import BINS, SUMS, head_profile
from ..core.rows.sources import Part, Strip
from ..core.rows.strips import DenseForm, Merge, OfParts
from ..core.stats import Results, entropy
from ..core.weights import Weights

__all__ = ["BINS", "EDGES", "SUMS", "HeadProfile", "Profile", "bin_sizes", "profile", "sent_to_host", "targets_of"]

#: Edges of the bins.
EDGES = (0, *(2**n for n in range(BINS)))


@register_node
class HeadProfile:
    """Question: the numbers of every row, the weight by signed distance, and the weight that each key receives.

    Outputs: entropy, largest weight, weight on the first key, weight on the row's target, each (b, h, i); the largest
    weight on a key that is neither the first nor the row's own, and that key (b, h, i); weight at distance s = i − j
    (b, h, i + j − 1), index s + j − 1; received (b, h, j).
    """

    targets: Tensor  # b 1 i 1 : a key for each row, or −1
    name: ClassVar[str] = "a profile of heads"
    row_fields: ClassVar[tuple[str, ...]] = ("targets",)
    merges: ClassVar[tuple[Merge, ...]] = ("sum",) * 8
    counts_sink: ClassVar[bool] = True
    dense_form: ClassVar[DenseForm] = "weights"
    of_parts: ClassVar[OfParts] = None

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        b, h, i, j = shape
        rows = [like.new_zeros(b, h, i) for _ in range(5)]
        keys = torch.zeros(b, h, i, dtype=torch.int64, device=like.device)
        diagonals, received = (like.new_zeros(b, h, n, dtype=torch.float64) for n in (i + j - 1, j))
        return [*rows, keys, diagonals, received]

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        (strip,) = strips
        w, rows = strip.w, part.index(part.rows)
        first = w[..., 0] if part.cols.start == 0 and w.shape[-1] else w.new_zeros(w.shape[:3])
        tie, key = _largest(w.masked_fill((part.block.i == part.block.j) | (part.block.j == 0), 0))
        summed, smallest = _diagonal_sums(w, part)
        start = smallest + self.targets.shape[-2] - 1  # self-attention has as many keys as rows
        return [
            (RowEntropy().of_rows(strip, part), rows),
            (w.amax(-1) if w.shape[-1] else first, rows),
            (first, rows),
            (ChosenKeys(self.targets).of_rows(strip, part)[..., 0], rows),
            (tie, rows),
            (key + part.cols.start, rows),
            (summed, part.index(slice(start, start + summed.shape[-1]))),
            (w.sum(-2, dtype=torch.float64), part.index(part.cols)),
        ]

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        w = matrices[0][..., : self.targets.shape[-2]]  # a sink's share is a column behind the keys
        i, j = w.shape[-2:]
        at, keys = torch.arange(i, device=w.device)[:, None], torch.arange(j, device=w.device)
        tie, key = _largest(w.masked_fill((at == keys) | (keys == 0), 0))
        by_distance = torch.stack([w.masked_fill(at - keys != s, 0).sum((-2, -1)) for s in range(1 - j, i)], -1)
        target = ChosenKeys(self.targets).of_dense([w])[0][..., 0]
        return [
            entropy(matrices[0]), w.amax(-1), w[..., 0], target, tie, key, by_distance.double(), w.double().sum(-2),
        ]  # fmt: skip


def _largest(w: Tensor) -> tuple[Tensor, Tensor]:
    if not w.shape[-1]:
        return w.new_zeros(w.shape[:-1]), torch.zeros(w.shape[:-1], dtype=torch.int64, device=w.device)
    largest = w.max(-1)
    return largest.values, largest.indices


def _diagonal_sums(w: Tensor, part: Part) -> tuple[Tensor, int]:
    """Sums of a strip along its diagonals, by ascending s = i − j; and the smallest s.

    Every row is moved one place further to the right than the one below it, so that diagonals become columns: rows of
    r zeros and n weights, read as rows of r + n + 1.
    """
    r, n = w.shape[-2:]
    moved = functional.pad(functional.pad(w, (r, 0)).flatten(-2), (0, r)).unflatten(-1, (r, r + n + 1))
    summed = moved.sum(-2, dtype=torch.float64)[..., 1 : r + n].flip(-1)  # column c holds j − i = c − r, 1 ≤ c < r + n
    return summed, part.rows.start - part.cols.start - (n - 1)


class Profile(NamedTuple):
    """The numbers of one layer for a batch of sequences."""

    sums: Tensor  # b h (SUMS + 2 · BINS), float64
    place: Tensor  # b h 3, float64 : the largest weight on a key that is neither the first nor the row's own; row; key

    @property
    def tie(self) -> Tensor:
        """The largest weight (b, h)."""
        return self.place[..., 0]

    @property
    def query(self) -> Tensor:
        """Its row."""
        return self.place[..., 1].long()

    @property
    def key(self) -> Tensor:
        """Its key."""
        return self.place[..., 2].long()


def targets_of(ids: Tensor) -> Tensor:
    """The induction target of every row of sequences (b, t), which are on the host: (b, 1, t, 1)."""
    rows = torch.arange(ids.shape[1], device="cpu")
    return torch.stack([induction_targets(line, rows) for line in ids])[:, None, :, None]


def sent_to_host(profiles: Sequence[Profile]) -> Callable[[], list[Profile]]:
    """Start one copy of all numbers to the host; the function that is returned waits for it and has them.

    A GPU computes on meanwhile: a copy that is waited for at once would wait for its whole queue.
    """
    numbers = [x for profile in profiles for x in profile]
    flat = torch.cat([x.flatten() for x in numbers])
    copied = torch.cuda.Event() if flat.is_cuda else None
    flat = flat.to("cpu", non_blocking=copied is not None)
    if copied is not None:
        copied.record(torch.cuda.current_stream(numbers[0].device))

    def on_host() -> list[Profile]:
        if copied is not None:
            copied.synchronize()
        parts = flat.split([x.numel() for x in numbers])
        shaped = iter(part.reshape(x.shape) for part, x in zip(parts, numbers, strict=True))
        return [Profile(next(shaped), next(shaped)) for _ in profiles]

    return on_host


def bin_sizes(n: int) -> list[int]:
    """How many of 0, 1, …, n − 1 are in each bin."""
    return [min(n, above) - min(n, edge) for edge, above in pairwise(EDGES)]


def bin_of(n: int, device: torch.device | None = None) -> Tensor:
    """The bin of 0, 1, …, n − 1, one-hot: float64 (n, BINS)."""
    # Made on the device: the copy of a list would wait for it.
    numbers, bins = torch.arange(n, device=device), torch.arange(BINS, device=device)
    return (torch.bucketize(numbers, 2**bins, right=True)[:, None] == bins).double()


@torch.no_grad()
def profile(weights: Weights, targets: Tensor) -> Profile:
    """Measure self-attention of sequences without padding.

    Args:
        weights: ``(b, h, t, t)``.
        targets: The induction target of every row, `targets_of(ids)`.
    """
    targets = targets.to(weights.device)
    numbers = head_profile(weights, targets)
    if numbers is None:
        numbers = _of_rows(weights._ask_rows(HeadProfile(targets)))
    if "sums" in numbers:
        return Profile(numbers["sums"], numbers["place"])
    numbers |= _of_diagonals(numbers["diagonals"])
    # Rounding leaves the entropy of a one-hot row an ulp below 0.
    of_rows = [numbers[name].double().clamp(min=0) for name in ("entropy", "largest")]
    moments = [y for x in of_rows for y in (x.sum(-1), x.square().sum(-1))]
    by_distance = numbers["bins"].double().sum(-2)
    moments.append(by_distance.sum(-1))
    moments += [numbers[name].double().sum(-1) for name in ("distance", "distance²", "previous", "first", "target")]
    received = numbers["received"].double() @ bin_of(weights.shape[-1], weights.device)
    sums = torch.cat([torch.stack(moments, -1), by_distance, received], -1)
    return Profile(sums, torch.stack([numbers[name].double() for name in ("tie", "query", "key")], -1))


def _of_rows(outputs: list[Tensor]) -> Results:
    """The outputs of `HeadProfile` by the names of `head_profile`."""
    entropy, largest, first, target, ties, keys, by_distance, received = outputs
    best = ties.max(-1)
    return {
        "entropy": entropy, "largest": largest, "first": first[..., 1:], "target": target,
        "received": received, "diagonals": by_distance.flip(-1), "tie": best.values, "query": best.indices,
        "key": keys.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1),
    }  # fmt: skip


def _of_diagonals(diagonals: Tensor) -> Results:
    """Weight by distance, its moments and that on the previous key, from sums along diagonals by j − i."""
    t = diagonals.shape[-1] // 2 + 1
    distances = torch.arange(1 - t, t, device=diagonals.device).abs()
    ahead, back = diagonals[..., t - 1 :], diagonals[..., : t - 1].flip(-1)
    by_abs_distance = ahead + functional.pad(back, (1, 0))  # 0 … t − 1
    weighted = diagonals * distances
    return {
        "bins": (by_abs_distance @ bin_of(t, diagonals.device)).unsqueeze(-2),
        "distance": weighted,
        "distance²": weighted * distances,
        "previous": diagonals[..., max(t - 2, 0) : t - 1],
    }
