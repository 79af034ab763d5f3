"""The statistics of the weights: their names, a request for them, and their definitions on dense weights.

Row statistics take one pass over the keys, with a running state; column statistics need finished rows and take a second
pass. The formulas at the end of this file define every statistic; `reference` and `Weights.from_dense` use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .problem import repeat_kv
from .pytree import register_node
from .torch_state import in_functorch

__all__ = [
    "ONE_PASS",
    "SECOND_PASS",
    "Request",
    "Results",
    "Tiling",
    "lse_of",
    "of_dense",
    "required",
    "softmax",
    "with_sink",
]

#: Results of the pass over the keys. `norm` is a row's maximum m and its sum l, from which weights are recomputed as
#: exp(s − m) / l. The one number lse = m + log l would not do: where all scores of a row are huge (a bias of −1e9),
#: log l is lost in it.
ONE_PASS = (
    "y",
    "lse",
    "norm",
    "max_score",
    "argmax",
    "entropy",
    "mean_distance",
    "mass",
    "topk_scores",
    "topk_indices",
)
#: Results of the pass over columns, from the norm of every row.
SECOND_PASS = ("received", "pool", "z")
# Beside the two passes, `cells` are scores at chosen rows and keys, by the very product that the norm comes from, so
# that no weight exp(s − m) / l exceeds 1: a product of another shape is an ulp off, and at scores near 10,000 an ulp is
# a thousandth of the weight.
#: Outputs an engine may add for free (eager only; no gradient).
OPTIONAL_OUTPUTS = ("topk_weights",)
#: Row results that a first pass may have at no cost; each engine says which (`Engine.free_outputs`).
FREE_OUTPUTS = ("norm", "lse", "max_score", "entropy")
#: Indices have no gradient.
NOT_DIFFERENTIATED = ("argmax", "topk_indices")
#: Scores at an index: their gradient is that of the score there.
GATHERED = (("max_score", "argmax"), ("topk_scores", "topk_indices"))

Results = dict[str, Tensor]

T = TypeVar("T")


@register_node
class Tiling:
    """How a part of the matrix is pooled: `rows` × `cols` tiles over i0 ≤ i < i1 and j0 ≤ j < j1.

    Tile r of n positions begins at ⌊r·n/rows⌋ and ends before ⌊(r+1)·n/rows⌋.
    """

    rows: int
    cols: int
    i0: int
    i1: int
    j0: int
    j1: int

    def row_of(self, i: Tensor) -> Tensor:
        return _tile_of(i - self.i0, self.rows, self.i1 - self.i0)

    def col_of(self, j: Tensor) -> Tensor:
        return _tile_of(j - self.j0, self.cols, self.j1 - self.j0)


def _tile_of(position: Tensor, tiles: int, n: int) -> Tensor:
    return ((position + 1) * tiles - 1) // max(n, 1)


@register_node
class Request:
    """Names of the wanted results, and the tensors they need."""

    names: tuple[str, ...]
    topk: int = 0
    tiling: Tiling | None = None
    v: Tensor | None = None  # b g|h j e : y = W v
    u: Tensor | None = None  # b h i e : z = Wᵀ u
    keys: Tensor | None = None  # j : 1 for the keys whose mass is requested, else 0
    rows: Tensor | None = None  # n : rows of the cells
    cols: Tensor | None = None  # n : keys of the cells

    def wants(self, *names: str) -> bool:
        return not frozenset(names).isdisjoint(self.names)  # no generator: every pass asks a dozen times

    @property
    def window(self) -> Tiling | None:
        """The pooled map, where no other result needs the rows and keys outside of its part."""
        only_pool = self.wants("pool") and all(name in ("pool", "norm") for name in self.names)
        return self.tiling if only_pool else None


def required(part: T | None) -> T:
    """A part of a request that its names imply."""
    assert part is not None, "the request names a result without the input it needs"
    return part


def of_dense(w: Tensor, s: Tensor, request: Request, offset: int, sink: Tensor | None = None) -> Results:
    """Every statistic by its definition, from weights w and scores s, both (b, h, i, j).

    `sink` (b, h, i) is the share of each row that a sink took: one more outcome for the entropy.
    """
    formulas: dict[str, Callable[[], Tensor]] = {
        "y": lambda: w @ repeat_kv(required(request.v), w.shape[1]).to(w.dtype),
        "z": lambda: w.mT @ required(request.u).to(w.dtype),
        "entropy": lambda: entropy(w) if sink is None else entropy(w) + entropy(sink.unsqueeze(-1)),
        "mean_distance": lambda: (w * distance(w.shape[-2], w.shape[-1], offset, w)).sum(-1),
        "mass": lambda: w @ required(request.keys).to(w.dtype),
        "received": lambda: w.sum(-2),
        "pool": lambda: pooled(w, required(request.tiling)),
        "max_score": lambda: stable_topk(s, 1)[0].squeeze(-1),
        "argmax": lambda: stable_topk(s, 1)[1].squeeze(-1),
        "topk_scores": lambda: stable_topk(s, request.topk)[0],
        "topk_indices": lambda: stable_topk(s, request.topk)[1],
    }
    return {name: formulas[name]() for name in request.names if name in formulas}


def softmax(s: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weights (b, h, i, j) of complete rows of scores; with a sink's logits also the share (b, h, i) that it takes."""
    every, j = with_sink(s, logits), s.shape[-1]
    # softmax of a row of −inf is nan. A hidden key weighs 0, also in a row that is nan.
    hidden = every == -torch.inf
    in_place = not every.requires_grad and not in_functorch()
    # The gradient of a row of −inf is nan as well: such a row is set to 0 before.
    p = (every if in_place else every.masked_fill(hidden.all(-1, keepdim=True), 0)).softmax(-1)
    if p.device.type == "cpu":
        # softmax adds up a row in one running sum a lane there, and a row of 65,536 keys misses 1 by 54 ulp; `sum` adds
        # in a tree, as both do on a GPU.
        total = p.detach().sum(-1, keepdim=True)
        p = p.div_(total) if in_place else p / total
    p = p.masked_fill_(hidden, 0) if in_place else p.masked_fill(hidden, 0)
    return (p, None) if logits is None else (p[..., :j].contiguous(), p[..., j])


def with_sink(s: Tensor, logits: Tensor | None) -> Tensor:
    """Scores (b, h, i, j) with a sink's logits, if there are any, as one more column."""
    return s if logits is None else torch.cat([s, logits.to(s.dtype).expand(*s.shape[:3], 1)], -1)


def entropy(w: Tensor) -> Tensor:
    """−Σ w log w in nats, where 0 log 0 is 0."""
    # entr(0) is 0, but its slope there is inf and inf · 0 is nan: a weight of 0 stays out of the graph.
    return torch.special.entr(torch.where(w == 0, 1, w)).sum(-1)


def distance(rows: int, keys: int, offset: int, like: Tensor) -> Tensor:
    """|i − j| in positions, (i, j)."""
    i = torch.arange(rows, device=like.device)[:, None] + offset
    return (i - torch.arange(keys, device=like.device)).abs().to(like.dtype)


def pooled(w: Tensor, tiling: Tiling) -> Tensor:
    """The sum of the weights in each tile: (b, h, rows, cols)."""
    part = w[..., tiling.i0 : tiling.i1, tiling.j0 : tiling.j1]
    row = tiling.row_of(torch.arange(tiling.i0, tiling.i1, device=w.device))
    col = tiling.col_of(torch.arange(tiling.j0, tiling.j1, device=w.device))
    # In float64: index_add has one running sum for each tile.
    part = part.double()
    by_row = part.new_zeros(*w.shape[:2], tiling.rows, part.shape[-1]).index_add(2, row, part)
    return part.new_zeros(*w.shape[:2], tiling.rows, tiling.cols).index_add(3, col, by_row).to(w.dtype)


def lse_of(norm: Tensor) -> Tensor:
    """m + log l, (b, h, i); −inf for a row that sees nothing."""
    m, l = norm.double().unbind(-1)
    if not norm.requires_grad and not in_functorch():
        return (m + l.log()).to(norm.dtype)  # −inf + log 0 of an empty row is −inf; its gradient would be nan
    empty = l == 0
    lse = torch.where(empty, -torch.inf, torch.where(empty, 0, m) + torch.where(empty, 1, l).log())
    return lse.to(norm.dtype)


def stable_topk(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest along the last axis, ties to the lower index; −inf and index −1 where there are fewer.

    A value of −inf is a hidden key and counts as missing.
    """
    value, index = x.sort(dim=-1, descending=True, stable=True)
    value, index = value[..., :n], index[..., :n]
    missing = n - value.shape[-1]
    value = torch.nn.functional.pad(value, (0, missing), value=-torch.inf)
    index = torch.nn.functional.pad(index, (0, missing), value=-1)
    return value, index.masked_fill(value == -torch.inf, -1)
