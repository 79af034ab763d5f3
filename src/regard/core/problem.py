"""What the attention matrix is made of, in one normal form.

`Factors` are queries, keys, a score and a mask laid over one another: every tensor in them has the axes
(*batch|1, heads|1, x, y), so that selecting a head or folding the batch is the same act for all of them.
`Problem` is the form that engines compute: one batch axis, the score lowered. Imports score, mask and block.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .block import MatrixBlock, PickedCells, take
from .intervals import lower_to_intervals
from .masks import Geometry, KeyIntervals, Mask
from .pytree import flatten, register_node, split_ints, tree_map, unflatten
from .scores import Function, Modifier, Precomputed, Product, Score, TanhSum, upcast
from .torch_state import is_tracing

__all__ = ["Factors", "Problem", "from_weights", "mask_scores", "repeat_kv", "strides_like", "zero_keys"]


@register_node
class Factors:
    """Queries and keys, how they are scored, and who may look at whom."""

    q: Tensor  # *batch h i d
    k: Tensor  # *batch g j d′
    score: Score
    mask: Mask | None
    offset: int | None  # key position of query 0; None where lengths differ and nobody said

    @property
    def batch(self) -> torch.Size:
        return self.q.shape[:-3]

    @property
    def heads(self) -> int:
        return self.q.shape[-3]

    @property
    def query_offset(self) -> int:
        """The key position of query 0, or 0 where nobody said."""
        return 0 if self.offset is None else self.offset  # not `or`: a symbol would be asked whether it is 0

    def tensors(self) -> list[Tensor]:
        return flatten(self)[1]

    def map(self, how: Callable[[Tensor], Tensor]) -> Factors:
        """One change to every tensor but the parameters of users' functions, whose axes are their own."""
        return tree_map(self, how)

    def expanded(self, batch: torch.Size) -> Factors:
        """Over a larger batch that this one broadcasts to."""
        if batch == self.batch:
            return self
        own = self.q.ndim - 3
        wider = self.map(lambda t: t.reshape(*[1] * (len(batch) - own), *t.shape))
        return dataclasses.replace(
            wider, q=wider.q.expand(*batch, *self.q.shape[-3:]), k=wider.k.expand(*batch, *self.k.shape[-3:])
        )

    def folded(self) -> Factors:
        """With all batch axes as one."""
        return self if len(self.batch) == 1 else self.map(lambda t: _fold(t, self.batch))

    def pick(self, axis: int, where: int | range | list[int]) -> Factors:
        """Chosen places of one batch or head axis; an int drops a batch axis."""
        q, k = (_pick(t, axis, where, broadcasts=False) for t in (self.q, self.k))
        return dataclasses.replace(self.map(lambda t: _pick(t, axis, where)), q=q, k=k)

    def pick_heads(self, heads: int | range | list[int]) -> Factors:
        """Chosen query heads, each with the keys it looks at; the head axis stays."""
        chosen = [heads] if isinstance(heads, int) else list(heads)
        per_key_head = self.heads // max(self.k.shape[-3], 1)
        k = self.k
        if per_key_head > 1 or k.shape[-3] > 1:
            k = _pick(k, k.ndim - 3, [head // per_key_head for head in chosen])
        # The keys have heads of their own, and may have fewer: they do not follow the others.
        others = dataclasses.replace(self, k=self.k[..., :1, :, :]).map(lambda t: _pick(t, t.ndim - 3, chosen))
        return dataclasses.replace(others, q=_pick(self.q, self.q.ndim - 3, chosen, broadcasts=False), k=k)

    def problem(self) -> Problem:
        """Fold the batch axes into one, lower the mask and the score."""
        folded = self.folded()
        if self.mask is not None and folded.mask is not None:
            layout = Geometry(self.q.shape[-2], self.k.shape[-2], self.query_offset, self.q.device)
            folded = dataclasses.replace(folded, mask=lower_to_intervals(self.mask, self.batch, folded.mask, layout))
        low = folded.score.lower(folded.q, folded._keys_to_lower())
        return Problem(
            low.q, low.k, low.similarity_kernel, low.modifiers, folded.score.sink_logits, folded.mask, self.query_offset
        )

    def _keys_to_lower(self) -> Tensor:
        """Keys of one batch axis; zeros where no row may see them if the score makes something else of keys.

        A length or a projection of such a key is never looked at, but it has a gradient, and 0 · nan is nan.
        """
        if self.mask is None or not self.score.transforms_keys:
            return self.k
        bare = Problem(self.q.detach(), self.k.detach(), Product(1.0), (), None, self.mask, self.query_offset)
        if is_tracing():  # there nobody can ask whether all keys are seen
            spec, tensors = flatten(bare)
            spec, numbers = split_ints(spec)
            return zero_keys(self.k, torch.ops.regard.seen(tensors, numbers, repr(spec)), -2)
        seen = bare.visible_keys()
        return self.k if seen is None else zero_keys(self.k, seen, -2)


@register_node
class Problem:
    """The attention matrix as the engines see it."""

    q: Tensor  # b h i d
    k: Tensor  # b g j d
    similarity_kernel: Product | TanhSum | Function
    modifiers: tuple[Modifier, ...]  # tensors b|1 h|1 i|1 j|1
    sink: Tensor | None  # b|1 h|1 1 1
    mask: Mask | None
    offset: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, i, j)"""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that scores and statistics are computed in."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def layout(self) -> Geometry:
        return Geometry(self.shape[2], self.shape[3], self.offset, self.q.device)

    @functools.cached_property
    def intervals(self) -> KeyIntervals:
        """Intervals of keys that hold all that each row sees."""
        layout = self.layout()
        return layout.everything() if self.mask is None else self.mask.intervals(layout)

    def block(self, rows: slice | Tensor, cols: slice | Tensor) -> MatrixBlock:
        return MatrixBlock(rows, cols, self.offset, self.q.device)

    def at(self, block: MatrixBlock) -> Problem:
        """The part of the factors that a block needs: slices of all tensors, the mask left out."""
        return dataclasses.replace(
            self,
            q=_rows(self.q, block.rows),
            k=_rows(self.k, block.cols),
            modifiers=tuple(tree_map(step, block.take) for step in self.modifiers),
            mask=None,
        )

    def narrow(self, start: int, stop: int) -> Problem:
        """The same problem for a run of neighbouring rows."""
        rows = slice(start, stop)
        return dataclasses.replace(
            self,
            q=_rows(self.q, rows),
            modifiers=tree_map(self.modifiers, lambda t: take(t, -2, rows)),
            mask=None if self.mask is None else self.mask.narrow(rows),
            offset=self.offset + start,
        )

    def scores(self, block: MatrixBlock) -> Tensor:
        """Scores of a block, −inf where nothing may be seen: (b, h, i, j)."""
        local = self.at(block)
        if self.mask is None:
            return local.bare_scores(block)
        visible = self.mask.visible(block)
        visible = visible.reshape(*[1] * (4 - visible.ndim), *visible.shape)
        # A key that no row of the block sees must not reach it, not even as the nan of 0 · nan in a gradient.
        local = local.blanked(visible.any(2).any(1).expand(-1, local.k.shape[2]))
        return local.bare_scores(block).masked_fill(~visible, -torch.inf)

    def bare_scores(self, block: MatrixBlock) -> Tensor:
        """Scores of a block whose tensors are `at` it already, mask not applied."""
        q, k = upcast(self.q), upcast(self.k)
        if isinstance(self.similarity_kernel, Product):
            # Heads that share keys stand as further rows: no copy of the keys.
            b, g, j, d = k.shape
            _, h, i, _ = q.shape
            # The number of rows is written out: -1 is ambiguous where an axis is empty.
            s = self.similarity_kernel.pairwise(q.reshape(b, g, h // max(g, 1) * i, d), k).reshape(b, h, i, j)
        else:
            s = self.similarity_kernel.pairwise(q, repeat_kv(k, q.shape[1]))
        return _modified(s, self.modifiers, block)

    def picked_scores(self, cols: Tensor) -> Tensor:
        """Scores of a few cells a row: cols (b, h, i, n) gives (b, h, i, n). Only cells that may be seen are asked."""
        b, h, i, n = cols.shape
        if self.k.shape[2] == 0:  # no key can be picked, and gather has no index for that
            return torch.zeros(cols.shape, dtype=self.compute_dtype, device=cols.device)
        k = repeat_kv(self.k, h)  # b h j d
        index = cols.reshape(b, h, i * n, 1).expand(-1, -1, -1, k.shape[-1])
        near = upcast(k.gather(2, index).reshape(b, h, i, n, k.shape[-1]))
        s = self.similarity_kernel.pairwise(upcast(self.q).unsqueeze(-2), near).squeeze(-2)
        cells = PickedCells(cols, self.offset)
        return _modified(s, tuple(tree_map(step, cells.take) for step in self.modifiers), cells)

    def visible_keys(self) -> Tensor | None:
        """Which keys at least one row may see, (b|1, j); None where that is all of them."""
        if self.mask is None or self.mask.sees_all_keys(self.layout()):
            return None
        exact, seen = True, self.mask.visible_keys(self.layout())
        if seen is None:
            exact, seen = self.intervals.exact, self.intervals.visible_keys(self.shape[3])
        # To be told that all is seen, or nothing, would save work; but a GPU would have to be waited for.
        may_ask = self.q.device.type == "cpu"
        if not exact and not (may_ask and not bool(seen.any())):
            seen = self._scan_visible_keys(seen)
        return None if may_ask and bool(seen.all()) else seen

    def _scan_visible_keys(self, outer: Tensor) -> Tensor:
        b, _, rows, keys = self.shape
        assert self.mask is not None
        seen = torch.zeros(b, keys, dtype=torch.bool, device=self.q.device)
        step = max(1, 2**22 // max(1, keys))
        for start in range(0, rows, step):
            cells = self.mask.visible(self.block(slice(start, min(rows, start + step)), slice(0, keys)))
            cells = cells.reshape(*[1] * (4 - cells.ndim), *cells.shape)
            seen |= cells.any(2).any(1)
        return seen & outer

    def zero_invisible_keys(self, request: Any) -> tuple[Problem, Any]:
        """Zeros for keys and values that no row may see: what stands there, nan or inf, must not matter."""
        if self.mask is None or self.mask.sees_all_keys(self.layout()):
            return self, request
        if self.q.device.type == "cpu" and self._all_finite(request.v):
            return self, request
        seen = self.visible_keys()
        if seen is None:
            return self, request
        v = None if request.v is None else zero_keys(request.v, seen, -2)
        return self.blanked(seen), dataclasses.replace(request, v=v)

    def blanked(self, seen: Tensor) -> Problem:
        steps = tree_map(self.modifiers, lambda t: zero_keys(t, seen, -1))
        blanked = dataclasses.replace(self, k=zero_keys(self.k, seen, -2), modifiers=steps)
        if "intervals" in vars(self):  # found out already, and the same
            vars(blanked)["intervals"] = self.intervals
        return blanked

    def _all_finite(self, v: Tensor | None) -> bool:
        per_key = [t for t in flatten(self.modifiers)[1] if t.ndim == 4 and t.shape[-1] > 1]
        # A sum is finite only if all its parts are.
        return all(t is None or bool(t.sum().isfinite()) for t in (self.k, v, *per_key))


# The schema is spelt out: torch 2.6 cannot infer it from list[Tensor].
@torch.library.custom_op(
    "regard::seen", mutates_args=(), schema="(Tensor[] tensors, SymInt[] numbers, str spec) -> Tensor"
)
def _seen_op(tensors: list[Tensor], numbers: list[int], spec: str) -> Tensor:
    """Which keys at least one row may see, (b, j), as an operator that torch.compile can put into a graph."""
    problem = unflatten(ast.literal_eval(spec), tensors, numbers)
    b, _, _, j = problem.shape
    seen = problem.visible_keys()
    return torch.ones(b, j, dtype=torch.bool, device=problem.q.device) if seen is None else seen.expand(b, j).clone()


@_seen_op.register_fake
def _(tensors: list[Tensor], numbers: list[int], spec: str) -> Tensor:
    problem = unflatten(ast.literal_eval(spec), tensors, numbers)
    return problem.q.new_empty(problem.shape[0], problem.shape[3], dtype=torch.bool)


def zero_keys(x: Tensor, seen: Tensor, axis: int) -> Tensor:
    """Zero where no row sees the key; `axis` is that of the keys."""
    if x.ndim != 4 or x.shape[axis] != seen.shape[1]:
        return x
    return torch.where(seen[:, None, :, None] if axis == -2 else seen[:, None, None, :], x, 0)


def mask_scores(s: Tensor, mask: Mask | None, block: MatrixBlock) -> Tensor:
    return s if mask is None else s.masked_fill(~mask.visible(block), -torch.inf)


def strides_like(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides for something new of this shape: its heads lie within its positions where those of x do, as models have
    them, which lay the heads of a position side by side when they are done."""
    _, h, n, e = shape
    # The stride of a single head or position says nothing, and in a graph it is another. (A symbol stands for several.)
    several = all(not isinstance(size, int) or size > 1 for size in x.shape[1:3])
    return (n * h * e, e, h * e, 1) if several and x.stride(1) < x.stride(2) else (h * n * e, n * e, e, 1)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """One head of keys or values for every head of queries: (b, g, j, e) to (b, h, j, e)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _modified(s: Tensor, steps: tuple[Modifier, ...], block: Any) -> Tensor:
    for step in steps:
        s = step.apply(s, block)
    return s


def _rows(x: Tensor, where: slice | Tensor) -> Tensor:
    if isinstance(where, slice):
        return x.narrow(2, where.start, where.stop - where.start)
    return x.index_select(2, where)


def from_weights(w: Tensor) -> Factors:
    """Factors of weights that are written out already: only their sizes are cached, and the weights."""
    w = w.unsqueeze(0) if w.ndim == 2 else w
    *outer, i, j = w.shape
    return Factors(w.new_empty(*outer, i, 0), w.new_empty(*outer, j, 0), Precomputed(w), None, 0 if i == j else None)


def _pick(t: Tensor, axis: int, where: int | range | list[int], broadcasts: bool = True) -> Tensor:
    """Places along one axis; where the tensor `broadcasts`, an axis of size one stands for any length."""
    if isinstance(where, int):
        return t.select(axis, where if t.shape[axis] > 1 else 0)
    if broadcasts and t.shape[axis] == 1 and len(where):
        return t
    if isinstance(where, range) and where.step > 0:
        return t[(slice(None),) * axis + (slice(where.start, where.stop, where.step),)]
    return t.index_select(axis, torch.tensor(list(where), dtype=torch.int64, device=t.device))


def _fold(t: Tensor, batch: torch.Size) -> Tensor:
    """(*batch|1, h, x, y) to (b|1, h, x, y)."""
    own = t.shape[:-3]
    if len(batch) == 1:
        return t
    if all(n == 1 for n in own):
        return t.reshape(1, *t.shape[-3:]) if batch else t.unsqueeze(0)
    return t.expand(*batch, *t.shape[-3:]).reshape(batch.numel(), *t.shape[-3:])
