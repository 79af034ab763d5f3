"""The attention matrix in two normal forms: `Factors` as users think of it, `Problem` as engines compute it.

`Factors` are queries, keys, a score and a mask, broadcast to one another: every tensor in them has the axes
(*batch|1, heads|1, x, y), so that selecting a head or folding the batch is the same operation for all of them.
`Problem` has one batch axis and the score lowered.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .block import MatrixBlock, PickedCells, take
from .masks.intervals import Geometry, KeyIntervals
from .masks.kinds import Mask
from .masks.lowering import lower_cells, lower_to_intervals
from .masks.selection import follow_selection
from .pytree import flatten, has_text, register_node, replace_fields, split_ints, tree_map, unflatten
from .scores.kinds import Bias, Modifier, Precomputed, Product, Score, SimilarityKernel, repeat_kv, upcast
from .torch_state import in_functorch, is_tracing, without_autocast

__all__ = [
    "Factors",
    "Problem",
    "from_weights",
    "mask_scores",
    "repeat_kv",
    "strides_like",
    "sum_groups",
    "to_float64",
    "zero_keys",
]


@register_node(storable=True)
class Factors:
    """Queries and keys, how they are scored, and who may look at whom."""

    q: Tensor  # *batch h i d
    k: Tensor  # *batch g j d′
    score: Score
    mask: Mask | None
    offset: int | None  # key position of query 0; None where lengths differ and `align` was not passed

    @property
    def batch(self) -> torch.Size:
        return self.q.shape[:-3]

    @property
    def heads(self) -> int:
        return self.q.shape[-3]

    @property
    def query_offset(self) -> int:
        """The key position of query 0, or 0 where `align` was not passed."""
        return 0 if self.offset is None else self.offset  # not `or`: that would put a guard on a SymInt

    def tensors(self) -> list[Tensor]:
        return flatten(self)[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Factors:
        """One change to every tensor but the parameters of users' functions, whose axes are their own."""
        return tree_map(self, change)

    def map_all(self, change: Callable[[Tensor], Tensor]) -> Factors:
        """One change that keeps axes, to every tensor."""
        spec, tensors = flatten(self)
        return unflatten(spec, [change(t) for t in tensors])

    def _with_selectable_mask(self) -> Factors:
        """The same, whose mask follows a selection of sequences and heads."""
        if self.mask is None:
            return self
        mask = follow_selection(self.mask, self.batch, self.heads, self.q.device)
        return self if mask is self.mask else replace_fields(self, mask=mask)

    def expanded(self, batch: torch.Size) -> Factors:
        """Over a larger batch that this one broadcasts to."""
        if batch == self.batch:
            return self
        own = self.q.ndim - 3
        wider = self._with_selectable_mask().map(lambda t: t.reshape(*[1] * (len(batch) - own), *t.shape))
        return replace_fields(
            wider, q=wider.q.expand(*batch, *self.q.shape[-3:]), k=wider.k.expand(*batch, *self.k.shape[-3:])
        )

    def folded(self) -> Factors:
        """With all batch axes as one."""
        return self if len(self.batch) == 1 else self.map(lambda t: _fold(t, self.batch))

    def pick(self, axis: int, where: int | range | list[int]) -> Factors:
        """Chosen positions of one batch or head axis; an int drops a batch axis."""
        q, k = (_pick(t, axis, where, broadcasts=False) for t in (self.q, self.k))
        others = self._with_selectable_mask().map(lambda t: _pick(t, axis, where))
        return replace_fields(others, q=q, k=k)

    def pick_heads(self, heads: int | range | list[int]) -> Factors:
        """Chosen query heads, each with the keys it looks at; the head axis stays."""
        chosen = [heads] if isinstance(heads, int) else list(heads)
        per_key_head = self.heads // max(self.k.shape[-3], 1)
        k = self.k
        if per_key_head > 1 or k.shape[-3] > 1:
            k = _pick(k, k.ndim - 3, [head // per_key_head for head in chosen])
        # The keys have heads of their own, and may have fewer: they do not follow the others.
        factors = self._with_selectable_mask()
        others = replace_fields(factors, k=self.k[..., :1, :, :]).map(lambda t: _pick(t, t.ndim - 3, chosen))
        return replace_fields(others, q=_pick(self.q, self.q.ndim - 3, chosen, broadcasts=False), k=k)

    def problem(self) -> Problem:
        """Fold the batch axes into one, lower the mask and the score."""
        folded = self.folded()
        if self.mask is not None and folded.mask is not None:
            geometry = Geometry(self.q.shape[-2], self.k.shape[-2], self.query_offset, self.q.device)
            folded = replace_fields(folded, mask=lower_to_intervals(self.mask, self.batch, folded.mask, geometry))
        keys = folded._keys_to_lower()
        # A projection is in the type that the score says, else cells of one pass would not belong to rows of another.
        low = without_autocast(folded.q, lambda: folded.score.lower(folded.q, keys))
        return Problem(
            low.q, low.k, low.similarity_kernel, low.modifiers, folded.score.sink_logits, folded.mask, self.query_offset
        )

    def _keys_to_lower(self) -> Tensor:
        """Keys, with zeros where no row sees them if the score transforms keys.

        The norm or projection of an invisible key is never read, but it has a gradient, and 0 · nan is nan.
        """
        if self.mask is None or not self.score.transforms_keys:
            return self.k
        visible = Problem(self.q, self.k, Product(1.0), (), None, self.mask, self.query_offset).visible_keys()
        return self.k if visible is None else zero_keys(self.k, visible, -2)


@register_node
class Problem:
    """The attention matrix as engines compute it."""

    q: Tensor  # b h i d
    k: Tensor  # b g j d
    similarity_kernel: SimilarityKernel
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
        """The dtype that scores and statistics are computed in."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def distances_cancel(self) -> bool:
        """Whether scores are squared distances whose gradients the compute type, float32, does not hold; on a CPU."""
        squared = bool(self.similarity_kernel.distance_scale)
        return squared and self.q.device.type == "cpu" and self.compute_dtype == torch.float32

    def geometry(self) -> Geometry:
        return Geometry(self.shape[2], self.shape[3], self.offset, self.q.device)

    @functools.cached_property
    def intervals(self) -> KeyIntervals:
        """For each row, intervals of keys that hold all that it sees."""
        return self._intervals()

    def _intervals(self) -> KeyIntervals:
        """Those of `intervals`, which Dynamo cannot read: Python 3.11 locks cached properties."""
        geometry = self.geometry()
        return geometry.everything() if self.mask is None else self.mask.intervals(geometry)

    def with_lowered_mask(self) -> Problem:
        """The same, with intervals of a mask whose cells have to be evaluated, where few make a row."""
        mask = None if self.mask is None else lower_cells(self.mask, self.geometry())
        return self if mask is self.mask else replace_fields(self, mask=mask)

    def block(self, rows: slice | Tensor, cols: slice | Tensor) -> MatrixBlock:
        return MatrixBlock(rows, cols, self.offset, self.q.device)

    def at(self, block: MatrixBlock) -> Problem:
        """The problem cut to a block: slices of all tensors, without the mask."""
        return replace_fields(
            self,
            q=_rows(self.q, block.rows),
            k=_rows(self.k, block.cols),
            modifiers=tree_map(self.modifiers, block.take),
            mask=None,
        )

    def in_float64(self) -> Problem:
        """The same in float64, with the similarity's own modifiers computed in float64 too."""
        spec, tensors = flatten(self)
        wide = unflatten(spec, [to_float64(t) for t in tensors])
        own = self.similarity_kernel.own_biases(wide.q, wide.k)
        modifiers = (*map(Bias, own), *wide.modifiers[len(own) :])
        return self._with_intervals(replace_fields(wide, modifiers=modifiers, mask=self.mask))

    def with_own_grads(self, grads: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
        """Gradients of the tensors of a problem in float64, those of its similarity's own biases as parts of dq and dk.

        The parts cancel, so that `dtype` is for the results.
        """
        own = self.similarity_kernel.own_modifiers
        parts = [g for g in grads[: 2 + own] if g is not None]
        dq, dk = self.similarity_kernel.with_own_grads(self.q, self.k, *parts)
        return [None if g is None else g.to(dtype) for g in (dq, dk, *[None] * own, *grads[2 + own :])]

    def with_exact_distances(self) -> Problem:
        """The same, in float64 if its scores are distances with gradients, which cancel: see `distance_grads`."""
        if not self.distances_cancel or not torch.is_grad_enabled():
            return self
        return self.in_float64() if any(t.requires_grad for t in flatten(self)[1]) else self

    def narrow(self, start: int, stop: int) -> Problem:
        """The same problem for adjacent rows."""
        rows = slice(start, stop)
        return replace_fields(
            self,
            q=_rows(self.q, rows),
            modifiers=tree_map(self.modifiers, lambda t: take(t, -2, rows)),
            mask=None if self.mask is None else self.mask.narrow(rows),
            offset=self.offset + start,
        )

    def scores(self, block: MatrixBlock) -> Tensor:
        """Scores of a block, −inf where hidden: (b, h, i, j)."""
        local = self.at(block)
        if self.mask is None:
            return local.bare_scores(block)
        visible = self.mask.visible(block)
        visible = visible.reshape(*[1] * (4 - visible.ndim), *visible.shape)
        # A key that no row of the block sees must not reach it, not even in a gradient as the nan of 0 · nan.
        local = local.blanked(visible.any(2).expand(-1, -1, local.k.shape[2]))
        return local.bare_scores(block).masked_fill(~visible, -torch.inf)

    def bare_scores(self, block: MatrixBlock) -> Tensor:
        """Scores of a block to which this problem is cut already (`at`), mask not applied."""
        q, k = upcast(self.q), upcast(self.k)
        return self._modified(self.similarity_kernel.grouped(q, k), self.modifiers, block, q, k)

    def picked_scores(self, cols: Tensor) -> Tensor:
        """Scores at a few keys a row, cols (b, h, i, n): (b, h, i, n). All of them must be visible."""
        b, h, i, n = cols.shape
        if self.k.shape[2] == 0:  # gather has no valid index
            return torch.zeros(cols.shape, dtype=self.compute_dtype, device=cols.device)
        k = repeat_kv(self.k, h)  # b h j d
        index = cols.reshape(b, h, i * n, 1).expand(-1, -1, -1, k.shape[-1])
        picked = upcast(k.gather(2, index).reshape(b, h, i, n, k.shape[-1]))
        q = upcast(self.q)
        s = self.similarity_kernel.pairwise(q.unsqueeze(-2), picked).squeeze(-2)
        cells = PickedCells(cols, self.offset)
        return self._modified(s, tree_map(self.modifiers, cells.take), cells, q, picked)

    def _modified(
        self, s: Tensor, modifiers: tuple[Modifier, ...], block: MatrixBlock | PickedCells, q: Tensor, k: Tensor
    ) -> Tensor:
        """Scores with these modifiers, which are cut to the block already, as its queries and keys are."""
        own = self.similarity_kernel.own_modifiers
        for modifier in modifiers[:own]:
            s = modifier.apply(s, block)
        s = self.similarity_kernel.corrected(s, q, k)
        for modifier in modifiers[own:]:
            s = modifier.apply(s, block)
        return s

    def visible_keys(self) -> Tensor | None:
        """Which keys at least one row of a head sees, (b|1, h|1, j); None where that is all of them."""
        if self.mask is None or self.mask.sees_all_keys(self.geometry()):
            return None
        # The operator has no batching rule. To Dynamo all code is inside a transform, which says nothing there.
        in_graph = is_tracing() and (torch.compiler.is_compiling() or not in_functorch())
        if in_graph and (visible := self._visible_keys_in_graph()) is not None:
            return visible
        exact, of_any_head = True, self.mask.visible_keys(self.geometry())
        if of_any_head is None:
            intervals = self._intervals() if is_tracing() else self.intervals
            exact, of_any_head = intervals.exact, intervals.visible_keys(self.shape[3])
        visible = of_any_head.unsqueeze(1)
        # Where all keys are seen, or none, work is saved; but reading that syncs with a GPU.
        may_sync = self.q.device.type == "cpu" and not in_functorch()
        if not exact and not (may_sync and not bool(visible.any())):
            visible = self._scan_visible_keys(visible)
        return None if may_sync and bool(visible.all()) else visible

    def _visible_keys_in_graph(self) -> Tensor | None:
        """The same as an operator, since the host cannot branch on numbers of a graph; None of a user's function."""
        bare = Problem(self.q.detach(), self.k.detach(), Product(1.0), (), None, self.mask, self.offset)
        spec, tensors = flatten(bare)
        spec, ints = split_ints(spec)
        return torch.ops.regard.visible_keys(tensors, ints, repr(spec)) if has_text(spec) else None

    def _scan_visible_keys(self, outer: Tensor) -> Tensor:
        """Visible keys block by block, for a mask with inexact intervals; `outer` holds them all."""
        b, _, rows, keys = self.shape
        assert self.mask is not None
        visible = torch.zeros(b, 1, keys, dtype=torch.bool, device=self.q.device)
        step = max(1, 2**22 // max(1, keys))
        for start in range(0, rows, step):
            cells = self.mask.visible(self.block(slice(start, min(rows, start + step)), slice(0, keys)))
            cells = cells.reshape(*[1] * (4 - cells.ndim), *cells.shape)
            visible = visible | cells.any(2)  # not in place: inside torch.vmap the cells may have a batch
        return visible & outer

    def zero_invisible_keys(self, request: Any) -> tuple[Problem, Any]:
        """Zeros for keys and values that no row of their heads sees: nan or inf there must not matter."""
        if self.mask is None or self.mask.sees_all_keys(self.geometry()):
            return self, request
        may_sync = self.q.device.type == "cpu" and not in_functorch() and not is_tracing()
        if may_sync and self._all_finite(request.v):
            return self, request
        visible = self.visible_keys()
        if visible is None:
            return self, request
        v = None if request.v is None else zero_keys(request.v, visible, -2)
        return self.blanked(visible), replace_fields(request, v=v)

    def blanked(self, visible: Tensor) -> Problem:
        """The same with blanks for keys that are not `visible` (b|1, h|1, j)."""
        modifiers = tree_map(self.modifiers, lambda t: self.blank(t, visible, -1))
        return self._with_intervals(replace_fields(self, k=self.blank(self.k, visible, -2), modifiers=modifiers))

    def blank(self, x: Tensor, visible: Tensor, axis: int) -> Tensor:
        """A tensor with zeros at keys that are not `visible`; if a function reads it, ones where it is not finite.

        A user's function may have no slope at zero: that of k / |k| is nan, and 0 · nan would reach the queries.
        """
        at_keys = _visible_in(x, visible, axis)
        if at_keys is None:
            return x
        return torch.where(at_keys | x.isfinite(), x, 1) if self.has_functions else torch.where(at_keys, x, 0)

    def with_nan_as_bias(self) -> Problem:
        """The same, where a gradient of the queries is wanted, with zeros for keys of nan and nan in a bias for them.

        The rows that see such a key are nan as before. The others take 0 · k of it into their gradient. On a CPU: a GPU
        would have to wait for the answer.
        """
        wanted = torch.is_grad_enabled() and self.q.requires_grad and self.mask is not None
        if not wanted or self.k.device.type != "cpu" or is_tracing() or in_functorch():
            return self
        if self.has_functions or not bool(upcast(self.k.detach()).sum().isnan()):
            return self
        at = self.k.detach().isnan().any(-1, keepdim=True)  # b g j 1
        bias = torch.zeros(at.shape, dtype=self.compute_dtype, device="cpu").masked_fill(at, torch.nan)
        modifiers = (*self.modifiers, Bias(repeat_kv(bias, self.shape[1]).mT))
        return self._with_intervals(replace_fields(self, k=_Zeroed.apply(self.k, at), modifiers=modifiers))

    @property
    def has_functions(self) -> bool:
        """Whether a user's function makes scores."""
        return self.similarity_kernel.kernel_op is None or any(m.kernel_op is None for m in self.modifiers)

    def _with_intervals(self, other: Problem) -> Problem:
        """Another problem with the same mask, which need not compute the intervals again."""
        if not is_tracing() and "intervals" in vars(self):  # a cached property, with the same value
            vars(other)["intervals"] = self.intervals
        return other

    def _all_finite(self, v: Tensor | None) -> bool:
        per_key = [t for t in flatten(self.modifiers)[1] if t.ndim == 4 and t.shape[-1] > 1]
        # A sum is finite only if all its terms are.
        return all(t is None or bool(t.sum().isfinite()) for t in (self.k, v, *per_key))


class _Zeroed(torch.autograd.Function):
    """x, but 0 at some positions; the gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor) -> Tensor:
        return x.masked_fill(at, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# The schema is spelt out: torch 2.6 cannot infer it from list[Tensor].
@torch.library.custom_op(
    "regard::visible_keys", mutates_args=(), schema="(Tensor[] tensors, SymInt[] ints, str spec) -> Tensor"
)
def _visible_keys_op(tensors: list[Tensor], ints: list[int], spec: str) -> Tensor:
    """Which keys at least one row of a head sees, (b, h, j), as an operator that torch.compile can put into a graph."""
    problem = unflatten(ast.literal_eval(spec), tensors, ints)
    b, h, _, j = problem.shape
    visible = problem.visible_keys()
    if visible is None:
        return torch.ones(b, h, j, dtype=torch.bool, device=problem.q.device)
    return visible.expand(b, h, j).clone()


@_visible_keys_op.register_fake
def _(tensors: list[Tensor], ints: list[int], spec: str) -> Tensor:
    problem = unflatten(ast.literal_eval(spec), tensors, ints)
    b, h, _, j = problem.shape
    return problem.q.new_empty(b, h, j, dtype=torch.bool)


def to_float64(x: Tensor) -> Tensor:
    """The same numbers in float64, but for whole ones and bools."""
    return x.double() if x.is_floating_point() else x


def zero_keys(x: Tensor, visible: Tensor, axis: int) -> Tensor:
    """Zero where no row of a head that x (b|1, g|1, ...) serves sees the key; `axis` is that of the keys."""
    at_keys = _visible_in(x, visible, axis)
    return x if at_keys is None else torch.where(at_keys, x, 0)


def _visible_in(x: Tensor, visible: Tensor, axis: int) -> Tensor | None:
    """Which keys of x are visible, (b|1, g|1, j, 1) or (b|1, g|1, 1, j); None where x has no axis of keys."""
    if x.ndim != 4 or x.shape[axis] != visible.shape[-1]:
        return None
    if visible.shape[1] not in (1, x.shape[1]):
        visible = visible.unflatten(1, (x.shape[1], -1)).any(2)
    return visible.unsqueeze(-1) if axis == -2 else visible.unsqueeze(-2)


def mask_scores(s: Tensor, mask: Mask | None, block: MatrixBlock) -> Tensor:
    """Scores of a block, −inf where hidden."""
    return s if mask is None else s.masked_fill(~mask.visible(block), -torch.inf)


def strides_like(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new (b, h, n, e) tensor in x's layout: (b, n, h, e) order if x has it, else contiguous.

    Keeps a model's final transpose + flatten free of copies.
    """
    _, h, n, e = shape
    # The stride of an axis of size 1 is arbitrary, and in a graph it is another. (A SymInt stands for several.)
    several = all(not isinstance(size, int) or size > 1 for size in x.shape[1:3])
    return (n * h * e, e, h * e, 1) if several and x.stride(1) < x.stride(2) else (h * n * e, n * e, e, 1)


def sum_groups(x: Tensor, heads: int) -> Tensor:
    """The sum over the query heads that share a key head: (b, h, j, e) to (b, g, j, e)."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def _rows(x: Tensor, where: slice | Tensor) -> Tensor:
    if isinstance(where, slice):
        return x.narrow(2, where.start, where.stop - where.start)
    return x.index_select(2, where)


def from_weights(w: Tensor) -> Factors:
    """Factors of weights that exist already: queries and keys of size 0, and the weights as `Precomputed`."""
    w = w.unsqueeze(0) if w.ndim == 2 else w
    *outer, i, j = w.shape
    return Factors(w.new_empty(*outer, i, 0), w.new_empty(*outer, j, 0), Precomputed(w), None, 0 if i == j else None)


def _pick(t: Tensor, axis: int, where: int | range | list[int], broadcasts: bool = True) -> Tensor:
    """Positions along one axis; where the tensor `broadcasts`, an axis of size one stands for any length."""
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
    return t.expand(*batch, *t.shape[-3:]).reshape(math.prod(batch), *t.shape[-3:])
