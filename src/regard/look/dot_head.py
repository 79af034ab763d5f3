"""A head whose weights follow from dot products alone: exp(scale · q·k − lse) inside a few intervals of keys a row.

Of such a head a page computes any weight exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.pytree import replace_fields
from ..core.weights import Weights

__all__ = ["DotHead", "max_map", "tile_of_key", "why_not_exact"]

#: Intervals of keys a row, at most.
INTERVALS = 4
#: Scores that are written out at a time; few enough for a core's own cache, but on a GPU, where a launch costs more.
CELLS, GPU_CELLS = 2**18, 2**28


def why_not_exact(weights: Weights) -> str | None:
    """Why a page cannot compute weights (h, i, j) from queries and keys; None if it can."""
    factors = weights._factors
    if factors.score.product_scale(factors.q.shape[-1]) is None:
        return "only scores that are dot products are computed in a page"
    if factors.score.modifiers:
        return "the scores have a bias, a cap or another change that a page does not compute"
    if factors.mask is not None:
        intervals = factors.problem().intervals
        if not intervals.exact or len(intervals.lo) > 1 or intervals.lo.shape[1] > INTERVALS:
            return "the mask is not a few intervals of keys a row"
    return None


@dataclass
class DotHead:
    """One head whose weights are exp(scale · q·k − lse) inside of some intervals."""

    q: Tensor  # i d
    k: Tensor  # j d
    scale: float
    lse: Tensor  # i
    lo: Tensor | None  # r i
    hi: Tensor | None  # r i

    @staticmethod
    def of(weights: Weights, head: int, lse: Tensor | None = None, device: torch.device | str = "cpu") -> DotHead:
        """A head of weights (h, i, j) that `why_not_exact` has no objection to."""
        factors = weights._factors
        q, k, score = factors.q, factors.k, factors.score
        lo = hi = None
        if factors.mask is not None:
            intervals = factors.problem().intervals
            lo, hi = intervals.lo[0].int().cpu(), intervals.hi[0].int().cpu()
        scale = score.product_scale(q.shape[-1])
        assert scale is not None, "why_not_exact has no objection"
        key = head * k.shape[-3] // q.shape[-3]
        lse = weights[head].lse() if lse is None else lse
        q, k, lse = (x.to(device, torch.float32) for x in (q[head], k[key], lse))
        return DotHead(q, k, scale, lse, lo, hi)

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
        visible = self.visible(rows)
        return s.exp() if visible is None else torch.where(visible, s.exp(), 0.0)

    def halved(self, weights: Weights, head: int, rows: list[int] | None = None) -> DotHead:
        """The same head with q and k in 16 bits, and the lse of those; of some rows alone, if they are given."""
        q, k = self.q.half().float(), self.k.half().float()
        one = weights[[head]]
        if rows is None:
            stored = one._with(replace_fields(one._factors, q=q.unsqueeze(0), k=k.unsqueeze(0)))
            return DotHead(q, k, self.scale, stored.lse()[0].float().cpu(), self.lo, self.hi)
        # The sum of what the row has with the old lse says by how much the new one differs; a sink keeps its share.
        changed = DotHead(q, k, self.scale, self.lse, self.lo, self.hi)
        before, after = self.rows(rows).sum(-1), changed.rows(rows).sum(-1)
        lse = self.lse.clone()
        lse[rows] += torch.log(1 + after - before).float()
        return DotHead(q, k, self.scale, lse, self.lo, self.hi)

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
            w = torch.addmm(norm, q, self.k[part].T).exp_()
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
            most[r].scatter_reduce_(-1, tiles, maxima.nan_to_num(), "amax")
        return most


@torch.no_grad()
def max_map(weights: Weights, rows: int, cols: int, lse: Tensor | None = None) -> Tensor:
    """The largest weight in each of rows × cols tiles, (h, rows, cols): a mean hides a weight of 1 among many of 0.

    Args:
        weights: Weights (h, i, j), with at least as many rows and keys as there are tiles.
        rows: Number of tiles along the queries.
        cols: Number of tiles along the keys.
        lse: Their `lse`, (h, i), if it is there already.
    """
    if why_not_exact(weights) is None:
        lse = weights.lse() if lse is None else lse
        return torch.stack([DotHead.of(weights, h, lse[h]).max_map(rows, cols) for h in range(weights.shape[0])])
    return weights.pool(rows, cols, by="max").float().cpu().nan_to_num()


def tile_of_key(keys: int, tiles: int) -> Tensor:
    """The tile of every key, (j,): tile c begins at ⌊c · keys / tiles⌋."""
    edges = torch.tensor([c * keys // tiles for c in range(tiles + 1)])
    return torch.repeat_interleave(torch.arange(tiles), edges.diff())
