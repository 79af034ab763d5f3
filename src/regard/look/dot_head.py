"""A head whose weights follow from dot products alone: exp(scale · q·k − lse) inside a few intervals of keys a row.

Of such a head a page computes any weight exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.pytree import replace_fields
from ..core.stats import required
from ..core.weights import Weights

__all__ = ["DotHead", "max_map", "tile_of_key", "why_not_exact"]

#: Intervals of keys a row, at most.
INTERVALS = 4
#: Scores that are written out at a time; few enough for a core's own cache, but on a GPU, where a launch costs more.
CELLS, GPU_CELLS = 2**18, 2**28


def why_not_exact(weights: Weights) -> str | None:
    """Why a page cannot compute weights (h, i, j) from queries and keys; None if it can."""
    if weights._factors.score.precomputed is not None:
        return "only scores that are dot products are computed in a page"
    problem = weights._factors.problem()
    if problem.similarity_kernel.kernel_op != "product":
        return "only scores that are dot products are computed in a page"
    if any(modifier.kernel_op not in ("bias_rows", "bias_keys") for modifier in problem.modifiers):
        return "the scores have a bias of every cell, a cap or another change that a page does not compute"
    if problem.mask is not None:
        intervals = problem.intervals
        if not intervals.exact or len(intervals.lo) > 1 or intervals.lo.shape[1] > INTERVALS:
            return "the mask is not a few intervals of keys a row"
    return None


@dataclass
class DotHead:
    """One head whose weights are exp(scale · q·k + bias − lse) inside of some intervals.

    Queries and keys are those of the lowered score: normalised for a cosine, say. A bias of rows is in lse.
    """

    q: Tensor  # i d
    k: Tensor  # j d
    scale: float
    lse: Tensor  # i
    lo: Tensor | None  # r i
    hi: Tensor | None  # r i
    bias: Tensor | None = None  # j

    @staticmethod
    def of(weights: Weights, head: int, lse: Tensor | None = None, device: torch.device | str = "cpu") -> DotHead:
        """A head of weights (h, i, j) that `why_not_exact` has no objection to."""
        one = weights[[head]]
        problem = one._factors.problem()
        lo = hi = bias = None
        if problem.mask is not None:
            intervals = problem.intervals
            lo, hi = intervals.lo[0].int().cpu(), intervals.hi[0].int().cpu()
        lse = one.lse()[0] if lse is None else lse
        q, k, lse = (x.to(device, torch.float32) for x in (problem.q[0, 0], problem.k[0, 0], lse))
        for modifier in problem.modifiers:
            added = required(modifier.operand)[0, 0].to(device, torch.float32)
            if modifier.kernel_op == "bias_rows":
                lse = lse - added[:, 0]
            else:
                bias = added[0] if bias is None else bias + added[0]
        return DotHead(q, k, problem.similarity_kernel.scale, lse, lo, hi, bias)

    def visible(self, rows: slice | list[int], first: int = 0, last: int | None = None) -> Tensor | None:
        """Which of the keys from `first` to before `last` some rows see, (n, keys); None where rows see them all."""
        if self.lo is None or self.hi is None:
            return None
        last = self.k.shape[0] if last is None else last
        lo, hi = self.lo[:, rows], self.hi[:, rows]
        if isinstance(rows, slice) and bool(((lo.amax(-1) <= first) & (hi.amin(-1) >= last)).any()):
            return None  # all of them
        at = torch.arange(first, last, device=self.k.device)
        lo, hi = (x.to(at.device).unsqueeze(-1) for x in (lo, hi))
        return ((at >= lo) & (at < hi)).any(0)

    def rows(self, rows: list[int]) -> Tensor:
        """Weights of some rows as a page computes them, (n, j), in float64."""
        s = self.scale * (self.q[rows].double() @ self.k.double().T) - self.lse[rows].double().unsqueeze(-1)
        s = s if self.bias is None else s + self.bias.double()
        visible = self.visible(rows)
        return s.exp() if visible is None else torch.where(visible, s.exp(), 0.0)

    def in_16_bits(self, weights: Weights, head: int, rows: list[int] | None = None) -> DotHead:
        """The same head with q and k rounded to 16 bits, and the lse of those; `rows`: the lse of these rows only."""
        changed = replace(self, q=self.q.half().float(), k=self.k.half().float())
        score = weights._factors.score
        if rows is None and not score.modifiers and score.product_scale(self.q.shape[-1]) is not None:
            one = weights[[head]]
            factors = replace_fields(one._factors, q=changed.q.unsqueeze(0), k=changed.k.unsqueeze(0))
            return replace(changed, lse=one._with(factors).lse()[0].float().cpu())
        # With the old lse a row, a sink's share included, sums to 1 + after − before: exp(new lse − old lse).
        lse = self.lse.clone()
        rows_here = list(range(len(lse))) if rows is None else rows
        step = max(1, CELLS // self.k.shape[0])
        for start in range(0, len(rows_here), step):
            some = rows_here[start : start + step]
            before, after = self.rows(some).sum(-1), changed.rows(some).sum(-1)
            lse[some] += torch.log(1 + after - before).float()
        return replace(changed, lse=lse)

    def columns(self, band: slice, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Of adjacent rows with this lse: what every key receives from them, and the largest weight it gets, each (j,).

        Of a mask only the keys are scored that some row of the band sees.
        """
        keys = slice(0, self.k.shape[0])
        if self.lo is not None and self.hi is not None:
            keys = slice(int(self.lo[:, band].amin()), int(self.hi[:, band].amax()))
        sums, maxima = (self.k.new_zeros(self.k.shape[0]) for _ in range(2))
        # A row without a key has lse −inf: it subtracts 0, and the mask hides it.
        q, norm = self.scale * self.q[band], -lse.float().nan_to_num(neginf=0.0).unsqueeze(-1)
        step = max(64, (CELLS if q.device.type == "cpu" else GPU_CELLS) // max(1, len(q)))
        for start in range(keys.start, keys.stop, step):
            part = slice(start, min(keys.stop, start + step))
            s = torch.addmm(norm, q, self.k[part].T)
            w = (s if self.bias is None else s.add_(self.bias[part])).exp_()
            if (visible := self.visible(band, part.start, part.stop)) is not None:
                w.masked_fill_(~visible, 0.0)
            torch.sum(w, 0, out=sums[part])
            torch.amax(w, 0, out=maxima[part])
        return sums, maxima

    def max_map(self, rows: int, cols: int) -> Tensor:
        """The largest weight in each of rows × cols tiles, (rows, cols); tiles are cut as in `Weights.pool`."""
        i, j = self.q.shape[0], self.k.shape[0]
        tiles, most = tile_of_key(j, cols), torch.zeros(rows, cols)
        for r in range(rows):
            band = slice(r * i // rows, (r + 1) * i // rows)
            maxima = self.columns(band, self.lse[band])[1]
            most[r].scatter_reduce_(-1, tiles, maxima, "amax")
        return most


@torch.no_grad()
def max_map(weights: Weights, rows: int, cols: int, lse: Tensor | None = None) -> Tensor:
    """The largest weight in each of rows × cols tiles, (h, rows, cols): a mean hides a weight of 1 among many of 0.

    A tile with a weight that is not a number is NaN.

    Args:
        weights: Weights (h, i, j), with at least as many rows and keys as there are tiles.
        rows: Number of tiles along the queries.
        cols: Number of tiles along the keys.
        lse: Their `lse`, (h, i), if it is there already.
    """
    if why_not_exact(weights) is None:
        lse = weights.lse() if lse is None else lse
        return torch.stack([DotHead.of(weights, h, lse[h]).max_map(rows, cols) for h in range(weights.shape[0])])
    return weights.pool(rows, cols, by="max").float().cpu()


def tile_of_key(keys: int, tiles: int) -> Tensor:
    """The tile of every key, (j,): tile c begins at ⌊c · keys / tiles⌋."""
    edges = torch.tensor([c * keys // tiles for c in range(tiles + 1)])
    return torch.repeat_interleave(torch.arange(tiles), edges.diff())
