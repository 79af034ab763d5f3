"""A head whose weights follow from dot products alone: exp(scale · q·k − lse) inside a few intervals of keys a row.

Of such a head a page computes any weight exactly, and the largest weight of every tile of its matrix is found without a
single exponential.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.pytree import replace_fields
from ..core.weights import Weights

__all__ = ["DotHead", "max_map", "why_not_exact"]

#: Intervals of keys a row, at most.
INTERVALS = 4
#: Scores that are written out at a time.
CELLS = 2**22


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
    def of(weights: Weights, head: int, lse: Tensor | None = None) -> DotHead:
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
        return DotHead(q[head].float().cpu(), k[key].float().cpu(), scale, lse.float().cpu(), lo, hi)

    def visible(self, rows: slice | list[int], first: int = 0, last: int | None = None) -> Tensor | None:
        """Which of the keys from `first` to before `last` some rows see, (n, keys); None without a mask."""
        if self.lo is None or self.hi is None:
            return None
        at = torch.arange(first, self.k.shape[0] if last is None else last)
        return ((at >= self.lo[:, rows].unsqueeze(-1)) & (at < self.hi[:, rows].unsqueeze(-1))).any(0)

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

    def max_map(self, rows: int, cols: int) -> Tensor:
        """The largest weight in each of rows × cols tiles, (rows, cols); tiles are cut as in `Weights.pool`.

        The exponential is monotone, so it is taken of the largest score alone; a further coordinate of the vectors
        subtracts lse within the product. Of a mask only the keys are scored that some row of a band sees.
        """
        i, j = self.q.shape[0], self.k.shape[0]
        q = torch.cat([self.scale * self.q, -self.lse.unsqueeze(-1)], -1)
        k = torch.cat([self.k, torch.ones(j, 1)], -1)
        tile_of_key, step = _tile_of_key(j, cols), max(1, CELLS // j)
        tiles = torch.full((rows, cols), -torch.inf)
        for r in range(rows):
            last = (r + 1) * i // rows
            for start in range(r * i // rows, last, step):
                band = slice(start, min(last, start + step))
                keys = slice(0, j)
                if self.lo is not None and self.hi is not None:
                    keys = slice(int(self.lo[:, band].amin()), int(self.hi[:, band].amax()))
                if keys.start >= keys.stop:
                    continue
                s = q[band] @ k[keys].T
                if (visible := self.visible(band, keys.start, keys.stop)) is not None:
                    s.masked_fill_(~visible, -torch.inf)
                most = s.amax(0).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                tiles[r].scatter_reduce_(-1, tile_of_key[keys], most, "amax")
        return tiles.exp()


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


def _tile_of_key(keys: int, tiles: int) -> Tensor:
    """The tile of every key, (j,): tile c begins at ⌊c · keys / tiles⌋."""
    edges = torch.tensor([c * keys // tiles for c in range(tiles + 1)])
    return torch.repeat_interleave(torch.arange(tiles), edges.diff())
