"""Who may look at whom.

A mask says for every query i and key j whether i may see j. Masks combine with `& | ~` and draw
themselves when printed. The engines ask a mask two things: which cells of a block are visible
(`visible`), and, for every row, a few intervals of keys outside which nothing is (`spans`). For all
masks built from `causal`, `window`, `padding` and `documents` the intervals are the whole truth, so
empty blocks are never visited; a tensor or a function is evaluated block by block.
Imports `again`, `around`, `block` and `tree`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .block import MatrixBlock, take
from .pytree import flatten, register_node, tree_map
from .torch_state import host_sync_forbidden, in_functorch, is_tracing

__all__ = [
    "Geometry",
    "KeyIntervals",
    "Mask",
    "as_mask",
    "causal",
    "documents",
    "host_sync_forbidden",
    "padding",
    "window",
]


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """For every row a few disjoint intervals lo <= j < hi of keys, in order; the rest is invisible.

    `exact` says that everything inside is visible. Sets of intervals are closed under `& | ~`, which
    is why any combination of structured masks costs only what it shows.
    """

    lo: Tensor  # b|1 r i
    hi: Tensor  # b|1 r i
    exact: bool

    def __and__(self, other: KeyIntervals) -> KeyIntervals:
        lo = torch.maximum(self.lo[:, :, None], other.lo[:, None])  # b r r' i
        hi = torch.minimum(self.hi[:, :, None], other.hi[:, None])
        return _canonical(lo.flatten(1, 2), hi.flatten(1, 2), self.exact and other.exact)

    def complement(self, keys: int) -> KeyIntervals:
        """The gaps: before the first interval, between neighbours, after the last."""
        edge = torch.zeros_like(self.lo[:, :1])
        return _canonical(torch.cat([edge, self.hi], 1), torch.cat([self.lo, edge + keys], 1), self.exact)

    def visible_keys(self, keys: int) -> Tensor:
        """Which keys lie in an interval of at least one row: bool, (b|1, j)."""
        # Count starts and ends along the keys: a key is covered while more intervals began than ended.
        depth = self.lo.new_zeros(len(self.lo), keys + 1)
        one = torch.ones_like(self.lo.flatten(1))
        depth.scatter_add_(1, self.lo.flatten(1), one).scatter_add_(1, self.hi.flatten(1), -one)
        return depth.cumsum(1)[:, :keys] > 0


def _canonical(lo: Tensor, hi: Tensor, exact: bool) -> KeyIntervals:
    """Put the intervals in order, the empty ones last, and drop what is empty in every row."""
    empty = lo >= hi
    if lo.shape[1] == 1:
        return KeyIntervals(lo.masked_fill(empty, 0), hi.masked_fill(empty, 0), exact)
    lo, order = lo.masked_fill(empty, torch.iinfo(lo.dtype).max).sort(dim=1)
    # An empty interval becomes end..end of the one before it, so that gaps stay right.
    hi = hi.masked_fill(empty, 0).gather(1, order).cummax(dim=1).values
    lo = torch.minimum(lo, hi)
    # Only several are looked at for what can be dropped: on a GPU the host must wait for the answer.
    used = max(1, int((lo < hi).flatten(2).any(2).any(0).sum()))
    return KeyIntervals(lo[:, :used], hi[:, :used], exact)


@dataclass(frozen=True)
class Geometry:
    """What a mask must know of the matrix it is laid over."""

    rows: int
    keys: int
    offset: int  # the key position of query 0
    device: torch.device

    def interval(self, lo: Tensor | int, hi: Tensor | int, exact: bool = True) -> KeyIntervals:
        """One interval a row, cut to the keys there are; lo and hi broadcast to (b|1, 1, i)."""
        blank = torch.zeros(1, 1, self.rows, dtype=torch.int64, device=self.device)
        low, high = torch.broadcast_tensors(blank + lo, blank + hi)
        low = low.clamp(0, self.keys)
        return KeyIntervals(low, torch.maximum(low, high.clamp(0, self.keys)), exact)

    def everything(self) -> KeyIntervals:
        return _band(self, None, None)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.rows, device=self.device) + self.offset


def _band(layout: Geometry, before: int | None, after: int | None) -> KeyIntervals:
    """The interval from `before` keys before each position to `after` keys after it; None for no limit."""
    alone = is_tracing() or host_sync_forbidden(layout.device)
    return _made_around(layout, before, after) if alone else _kept_around(layout, before, after)


def _made_around(layout: Geometry, before: int | None, after: int | None) -> KeyIntervals:
    lo = 0 if before is None else layout.positions - before
    hi = layout.keys if after is None else layout.positions + after + 1
    return layout.interval(lo, hi)


#: Layers of a model ask for the same again and again.
_kept_around = functools.lru_cache(maxsize=8)(_made_around)

#: So many rows and columns of a mask are printed.
CORNER = 32


class Mask:
    """Who may look at whom. Combine masks with `& | ~`; `print` draws one."""

    #: Whether the mask compares positions, so that `align` matters when lengths differ.
    positional: ClassVar[bool] = False
    #: Whether `spans` tell everything, for a mask laid over a matrix.
    structured: ClassVar[bool] = True
    #: Whether every query sees the key at its own position.
    sees_itself: ClassVar[bool] = False

    def visible(self, block: MatrixBlock) -> Tensor:
        """Which cells of the block are visible: bool, broadcastable to (b, h, i, j)."""
        raise NotImplementedError

    def intervals(self, layout: Geometry) -> KeyIntervals:
        """Intervals of keys that hold all that is visible; nothing better cached: all of them."""
        return layout.interval(0, layout.keys, exact=False)

    def visible_keys(self, layout: Geometry) -> Tensor | None:
        """Which keys at least one row sees, (b|1, j), where the mask knows it at once."""
        return None

    def masks(self) -> tuple[Mask, ...]:
        """The masks this one is combined from."""
        return ()

    def narrow(self, rows: slice) -> Mask:
        """The same for a run of neighbouring rows, of a mask laid over a matrix."""
        return tree_map(self, lambda t: take(t, -2, rows))

    def __getstate__(self) -> dict[str, Any]:
        """Without what was found out: that belongs to these very tensors."""
        return {name: getattr(self, name) for name in self.parts}  # type: ignore[attr-defined]

    def size(self) -> tuple[int, int] | None:
        """The (i, j) this mask is made for, if its tensors tell."""
        cached = [size for mask in self.masks() if (size := mask.size())]
        return (min(i for i, _ in cached), min(j for _, j in cached)) if cached else None

    def sees_all_keys(self, layout: Geometry) -> bool:
        """Whether it is plain, without looking at tensors, that every key is seen by some row."""
        return self.sees_itself and layout.offset <= 0 and layout.rows + layout.offset >= layout.keys

    def __and__(self, other: Any) -> Mask:
        return And(self, as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return And(as_mask(other), self)

    def __or__(self, other: Any) -> Mask:
        return Or(self, as_mask(other))

    def __ror__(self, other: Any) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def draw(self, i: int | None = None, j: int | None = None, align: str = "start") -> str:
        """The mask as a drawing of i rows and j columns: ■ visible, · hidden.

        >>> print(causal().draw(3, 5, align="end"))
        ■ ■ ■ · ·
        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■
        """
        cached = self.size() or (8, 8)
        i, j = (cached[0] if i is None else i), (cached[1] if j is None else j)
        offset = j - i if align == "end" else 0
        device = next((tensor.device for tensor in flatten(self)[1]), torch.device("cpu"))
        cells = self.visible(MatrixBlock(slice(0, i), slice(0, j), offset, device))
        if 0 in cells.shape[:-2]:
            return ""
        cells = cells[(0,) * (cells.ndim - 2)].expand(i, j)  # of a batch, the first
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in cells.tolist())

    def __str__(self) -> str:
        """The drawing; of a large mask its first corner."""
        i, j = self.size() or (8, 8)
        shown = self.draw(min(i, CORNER), min(j, CORNER))
        return shown if max(i, j) <= CORNER else f"{shown}\n(the first {CORNER} rows and columns; draw() shows all)"

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}()"


@register_node
class Causal(Mask):
    positional = True
    sees_itself = True

    def visible(self, block: MatrixBlock) -> Tensor:
        return block.j <= block.i

    def intervals(self, layout: Geometry) -> KeyIntervals:
        return _band(layout, None, 0)

    def sees_all_keys(self, layout: Geometry) -> bool:
        return layout.rows + layout.offset >= layout.keys  # the last row sees all


@register_node
class Window(Mask):
    before: int
    after: int
    positional = True
    sees_itself = True

    def __repr__(self) -> str:
        return f"window({self.before}, {self.after})"

    def visible(self, block: MatrixBlock) -> Tensor:
        distance = block.j - block.i
        return (distance >= -self.before) & (distance <= self.after)

    def intervals(self, layout: Geometry) -> KeyIntervals:
        return _band(layout, self.before, self.after)


@register_node
class Padding(Mask):
    lengths: Tensor  # as given; (*batch|1, 1, 1, 1) once laid over a matrix

    @property
    def ends(self) -> tuple[int, int]:
        """The shortest and the longest. Kept: one mask serves all layers of a model, and a GPU is waited for once."""
        changes = 0 if self.lengths.is_inference() else self.lengths._version
        kept = vars(self).setdefault("ends_then", {})
        if changes not in kept:
            kept.clear()
            kept[changes] = int(self.lengths.min()), int(self.lengths.max())
        return kept[changes]

    def visible(self, block: MatrixBlock) -> Tensor:
        lengths = self.lengths if self.lengths.ndim >= 4 else self.lengths.reshape(-1, 1, 1, 1)
        return block.j < lengths

    def intervals(self, layout: Geometry) -> KeyIntervals:
        hi = self.lengths.reshape(-1, 1, 1).clamp(0, layout.keys).expand(-1, -1, layout.rows)
        return KeyIntervals(torch.zeros_like(hi), hi, exact=True)

    def visible_keys(self, layout: Geometry) -> Tensor | None:
        return torch.arange(layout.keys, device=layout.device) < self.lengths.reshape(-1, 1) if layout.rows else None

    def size(self) -> tuple[int, int] | None:
        longest = self.ends[1] + 1 if self.lengths.numel() else 1
        return longest, longest


@register_node
class Documents(Mask):
    ids: Tensor  # of the queries: as given; (*batch|1, 1, i, 1) once laid over a matrix
    key_ids: Tensor | None = None  # of the keys: (*batch|1, 1, 1, j) once laid over a matrix
    #: Whether each stood in one run of keys when the mask was made, for graphs, which cannot ask; None: not looked at.
    contiguous: bool | None = None
    same_sequence: bool = False  # laid over a matrix: queries are numbered as the keys at their positions

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.same_sequence

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.key_ids is None

    @property
    def structured(self) -> bool:  # type: ignore[override]
        """Whether every document is one run of keys."""
        return (
            self.key_ids is not None
            and self.intervals(Geometry(self.ids.shape[-2], self.key_ids.shape[-1], 0, self.ids.device)).exact
        )

    def visible(self, block: MatrixBlock) -> Tensor:
        if self.key_ids is None or self.ids.ndim < 3:  # not laid over a matrix yet: only drawn
            both = self.ids, self.ids if self.key_ids is None else self.key_ids
            ids, key_ids = (x.unsqueeze(0).flatten(0, -2)[:1, None] for x in both)
            return block.take(ids.mT) == block.take(key_ids)
        return block.take(self.ids) == block.take(self.key_ids)

    def intervals(self, layout: Geometry) -> KeyIntervals:
        assert self.key_ids is not None, "laid over a matrix"
        keys = self.key_ids.flatten(-3).flatten(0, -2)  # b|1 j
        ids = self.ids.flatten(-3).flatten(0, -2)  # b|1 i
        (batch,) = torch.broadcast_shapes(keys.shape[:1], ids.shape[:1])
        keys, ids = keys.expand(batch, -1).contiguous(), ids.expand(batch, -1).contiguous()
        if keys.shape[1] == 0:
            return layout.interval(0, 0)
        ordered, order = keys.sort(dim=1, stable=True)
        begin, end = torch.searchsorted(ordered, ids), torch.searchsorted(ordered, ids, right=True)
        # Within an id the order is that of the keys: first and last occurrence bound the document.
        last = keys.shape[1] - 1
        lo = order.gather(1, begin.clamp(max=last))
        hi = order.gather(1, (end - 1).clamp(min=0)) + 1
        some = end > begin
        lo, hi = torch.where(some, lo, 0), torch.where(some, hi, 0)
        # Asked, unless the host must not ask: it may have been changed in place.
        sure = self.contiguous is True and (is_tracing() or host_sync_forbidden(layout.device))
        exact = sure or bool((hi - lo == end - begin).all())
        return KeyIntervals(lo[:, None], hi[:, None], exact)

    def size(self) -> tuple[int, int] | None:
        rows = self.ids.shape[-1]
        return rows, (rows if self.key_ids is None else self.key_ids.shape[-1])


@register_node
class Dense(Mask):
    cells: Tensor  # bool, broadcastable to (*batch, h, i, j)
    structured = False

    def visible(self, block: MatrixBlock) -> Tensor:
        return block.take(self.cells)

    def size(self) -> tuple[int, int] | None:
        return self.cells.shape[-2], self.cells.shape[-1]


@register_node
class Predicate(Mask):
    function: Callable[[Tensor, Tensor], Tensor]
    positional = True
    structured = False

    def visible(self, block: MatrixBlock) -> Tensor:
        cells = self.function(block.i, block.j)
        if not isinstance(cells, Tensor) or cells.dtype != torch.bool:
            came = f"dtype {cells.dtype}" if isinstance(cells, Tensor) else type(cells).__name__
            raise TypeError(
                f"a mask function must return a bool tensor of visible cells; {came} came. "
                "Write a comparison, for example lambda i, j: j <= i."
            )
        return cells


@register_node
class And(Mask):
    left: Mask
    right: Mask
    sign: ClassVar[str] = "&"

    def __repr__(self) -> str:
        return f"({self.left!r} {self.sign} {self.right!r})"

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.left.positional or self.right.positional

    @property
    def structured(self) -> bool:  # type: ignore[override]
        return self.left.structured and self.right.structured

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.left.sees_itself and self.right.sees_itself

    def masks(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def visible(self, block: MatrixBlock) -> Tensor:
        return self.left.visible(block) & self.right.visible(block)

    def intervals(self, layout: Geometry) -> KeyIntervals:
        return self.left.intervals(layout) & self.right.intervals(layout)


@register_node
class Or(And):
    sign = "|"

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.left.sees_itself or self.right.sees_itself

    def visible(self, block: MatrixBlock) -> Tensor:
        return self.left.visible(block) | self.right.visible(block)

    def intervals(self, layout: Geometry) -> KeyIntervals:
        left, right = self.left.intervals(layout), self.right.intervals(layout)
        neither = left.complement(layout.keys) & right.complement(layout.keys)
        return neither.complement(layout.keys)


@register_node
class Not(Mask):
    of: Mask

    def __repr__(self) -> str:
        return f"~{self.of!r}"

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.of.positional

    @property
    def structured(self) -> bool:  # type: ignore[override]
        return self.of.structured

    def masks(self) -> tuple[Mask, ...]:
        return (self.of,)

    def visible(self, block: MatrixBlock) -> Tensor:
        return ~self.of.visible(block)

    def intervals(self, layout: Geometry) -> KeyIntervals:
        spans = self.of.intervals(layout)
        # Of the inside of an interval that is not exact nothing is cached, nor of its complement.
        return spans.complement(layout.keys) if spans.exact else layout.interval(0, layout.keys, exact=False)


def causal() -> Mask:
    """A query sees itself and what comes before it.

    >>> print(causal().draw(3, 3))
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    """
    return Causal()


def window(before: int, after: int) -> Mask:
    """A query sees `before` keys before its own position, itself, and `after` keys after it.

    >>> print(window(1, 0).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """
    for name, value in (("before", before), ("after", after)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"window({name}=...) counts the keys {name} a position and must be an int >= 0; {value!r} came. "
                "window(0, 0) shows a query only itself."
            )
    return Window(before, after)


def padding(lengths: Any) -> Mask:
    """Of sequence b the first lengths[b] keys are real; the rest is padding that nobody sees.

    That lengths fit the keys is checked, but inside a compiled graph they are cut to what fits.

    >>> print(padding([2]).draw(2, 4))
    ■ ■ · ·
    ■ ■ · ·
    """
    return Padding(_whole_numbers(lengths, "padding(lengths)"))


def documents(ids: Any, key_ids: Any = None) -> Mask:
    """A query sees the keys of its own document. `key_ids` where keys are numbered apart from queries.

    Ids may be changed in place; but in a graph that is replayed, documents that stood in one run each when the mask was
    made must stay so.

    >>> print(documents([0, 0, 1]))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    numbers = _whole_numbers(ids, "documents(ids)")
    keys = None if key_ids is None else _whole_numbers(key_ids, "documents(key_ids)")
    return Documents(numbers, keys, _in_runs(numbers if keys is None else keys))


def _in_runs(ids: Tensor) -> bool | None:
    """Whether every document is one run of positions; None where the host may not ask."""
    if is_tracing() or in_functorch() or host_sync_forbidden(ids.device) or ids.is_meta or ids.ndim == 0:
        return None
    changes, documents = ((x[..., 1:] != x[..., :-1]).sum(-1) for x in (ids, ids.sort(-1).values))
    return bool((changes == documents).all())


def _whole_numbers(values: Any, name: str) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)  # an array's memory is not ours
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers; dtype {tensor.dtype} came. Convert with .long().")
    return tensor.long()


def as_mask(mask: Any) -> Mask:
    """A mask from what users pass: a Mask, a bool tensor (True = visible), or a function of (i, j)."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"a mask tensor must be bool, True where a key is visible; dtype {mask.dtype} came. "
                "For numbers that are added to the scores use score=ScaledDot().bias(tensor)."
            )
        if mask.ndim < 2:
            raise ValueError(
                f"a mask tensor needs the axes (..., i, j); shape {tuple(mask.shape)} came. "
                "For one flag a key use mask[None, :], for lengths use padding(lengths)."
            )
        return Dense(mask)
    if callable(mask):
        return Predicate(mask)
    raise TypeError(
        "mask must be causal(), window(), padding(), documents(), a bool tensor or a function of (i, j); "
        f"{type(mask).__name__} came."
    )
