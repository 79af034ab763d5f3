"""Masks: which query may see which key. Here are those from positions and those from lengths and ids.

Masks combine with `& | ~` and draw themselves when printed. Engines ask a mask two things: which cells of a block are
visible (`visible`), and, for every row, a few intervals of keys outside which nothing is (`intervals`). For masks built
from `causal`, `window`, `padding` and `documents` the intervals are exact, so that empty blocks are never visited; a
tensor or a function is evaluated block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..block import MatrixBlock, take
from ..broadcast import MatrixShape, check_broadcast, with_leading_axes
from ..indexing import as_int
from ..pytree import flatten, register_node
from ..stored import check_broadcasts, is_int64, require
from ..tensor_kinds import readable_numbers
from ..torch_state import host_sync_forbidden, is_tracing
from .algebra import And, Dense, Mask, Not, Or, Predicate, as_mask
from .call_hints import makes_mask
from .intervals import Geometry, KeyIntervals, band, cached_on_mask

__all__ = [
    "And",
    "Causal",
    "Dense",
    "Documents",
    "Geometry",
    "KeyIntervals",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Predicate",
    "Window",
    "as_mask",
    "causal",
    "documents",
    "padding",
    "window",
]

#: The reach of all windows, of masks and of files, is below this; no two positions are so far apart.
MAX_WINDOW = 2**31


@register_node(storable=True)
class Causal(Mask):
    """Keys up to the own position."""

    positional = True
    sees_itself = True
    interval_source = "positions"
    is_one_interval = True

    def crop(self, rows: slice, cols: slice) -> Mask:
        return self  # distances do not move

    def visible(self, block: MatrixBlock) -> Tensor:
        return block.j <= block.i

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        return band(geometry, None, 0)

    def band(self) -> tuple[int | None, int | None] | None:
        return None, 0

    def sees_all_keys(self, geometry: Geometry) -> bool:
        return geometry.rows > 0 and geometry.rows + geometry.offset >= geometry.keys  # the last row sees all


@register_node(storable=True)
class Window(Mask):
    """Keys around the own position."""

    before: int
    after: int
    positional = True
    sees_itself = True
    interval_source = "positions"
    is_one_interval = True

    def __repr__(self) -> str:
        return f"window({self.before}, {self.after})"

    def crop(self, rows: slice, cols: slice) -> Mask:
        return self  # distances do not move

    def visible(self, block: MatrixBlock) -> Tensor:
        distance = block.j - block.i
        return (distance >= -self.before) & (distance <= self.after)

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        return band(geometry, self.before, self.after)

    def band(self) -> tuple[int | None, int | None] | None:
        return self.before, self.after

    def check_stored(self, shape: tuple[int, ...], offset: int) -> None:
        for side in (self.before, self.after):
            require(type(side) is int and 0 <= side < MAX_WINDOW, f"a window reaches {side!r:.80}")


_ONE_LENGTH = "padding(lengths) takes one length a sequence"
_FLAGS_ARE_A_MASK = (
    "Flags (b, j) of what is no padding, such as attention_mask, are a mask: mask=flags.bool()[:, None, None, :]."
)


@register_node(storable=True)
class Padding(Mask):
    """The first keys of every sequence."""

    lengths: Tensor  # the user's; (*batch|1, 1, 1, 1) once broadcast to a matrix
    interval_source = "tensors"
    is_one_interval = True
    rows_alike = True

    @property
    def ends(self) -> tuple[int, int]:
        """The shortest and the longest. Cached: one mask serves all layers of a model, and this syncs with a GPU."""
        version = 0 if self.lengths.is_inference() else self.lengths._version
        cached = vars(self).setdefault("ends_by_version", {})
        if version not in cached:
            cached.clear()
            cached[version] = int(self.lengths.min()), int(self.lengths.max())
        return cached[version]

    def broadcast_to(self, matrix: MatrixShape) -> Mask:
        return cached_on_mask(self, matrix.full, [self.lengths], matrix.device, partial(self._broadcast, matrix))

    def _broadcast(self, matrix: MatrixShape) -> Padding:
        lengths, keys = self.lengths.to(matrix.device), matrix.full[-1]
        if lengths.ndim == len(matrix.batch) + 1 and lengths.shape[-1] == keys:
            raise ValueError(f"{_ONE_LENGTH}; got one number a key, {tuple(lengths.shape)}. {_FLAGS_ARE_A_MASK}")
        check_broadcast(lengths.shape, matrix.batch, "padding(lengths)", "one length a sequence")
        if not is_tracing() and not host_sync_forbidden(matrix.device) and lengths.numel():
            least, most = self.ends
            if least < 0 or most > keys:
                raise ValueError(
                    f"padding(lengths) must lie between 0 and the {keys} keys there are; got {least} … {most}."
                )
        return Padding(with_leading_axes(lengths[..., None, None, None], len(matrix.batch)))

    def check_stored(self, shape: tuple[int, ...], offset: int) -> None:
        check_broadcasts(self.lengths, (shape[0], 1, 1, 1), "padding", is_int64)
        inside = bool(((self.lengths >= 0) & (self.lengths <= shape[3])).all())
        require(inside, f"padding does not lie between 0 and {shape[3]}")

    def crop(self, rows: slice, cols: slice) -> Mask:
        return Padding((self.lengths - cols.start).clamp(0, cols.stop - cols.start))

    def visible(self, block: MatrixBlock) -> Tensor:
        lengths = self.lengths if self.lengths.ndim >= 4 else self.lengths.reshape(-1, 1, 1, 1)
        return block.j < lengths

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        hi = self.lengths.reshape(-1, 1, 1).clamp(0, geometry.keys).expand(-1, -1, geometry.rows)
        return KeyIntervals(torch.zeros_like(hi), hi, exact=True)

    def visible_keys(self, geometry: Geometry) -> Tensor | None:
        return (
            torch.arange(geometry.keys, device=geometry.device) < self.lengths.reshape(-1, 1) if geometry.rows else None
        )

    def size(self) -> tuple[int, int] | None:
        longest = self.ends[1] + 1 if self.lengths.numel() else 1
        return longest, longest


@register_node(storable=True)
class Documents(Mask):
    """Keys of the own document."""

    ids: Tensor  # of the queries: the user's; (*batch|1, 1, i, 1) once broadcast to a matrix
    key_ids: Tensor | None = None  # of the keys: (*batch|1, 1, 1, j) once broadcast to a matrix
    #: Whether every document was contiguous when the mask was built (None: unknown). Captured graphs cannot sync to
    #: check.
    contiguous: bool | None = None
    same_sequence: bool = False  # broadcast to a matrix: queries have the ids of the keys at their positions
    interval_source = "tensors"

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.same_sequence

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.key_ids is None

    @property
    def is_one_interval(self) -> bool:  # type: ignore[override]
        return self.contiguous is True

    @property
    def structured(self) -> bool:
        """Whether every document is one run of keys."""
        return (
            self.key_ids is not None
            and self.intervals(Geometry(self.ids.shape[-2], self.key_ids.shape[-1], 0, self.ids.device)).exact
        )

    def broadcast_to(self, matrix: MatrixShape) -> Mask:
        tensors, key = flatten(self)[1], (matrix.full, matrix.offset)
        return cached_on_mask(self, key, tensors, matrix.device, partial(self._broadcast, matrix))

    def _broadcast(self, matrix: MatrixShape) -> Documents:
        i, j = matrix.full[-2:]
        ids = self.ids.to(matrix.device)
        keys = ids if self.key_ids is None else self.key_ids.to(matrix.device)
        lengths = [("documents(ids)", ids, j)]
        if self.key_ids is not None:
            lengths = [("documents(ids)", ids, i), ("documents(key_ids)", keys, j)]
        for what, numbers, n in lengths:
            if numbers.ndim < 1 or numbers.shape[-1] != n:
                raise ValueError(
                    f"{what} needs one id a position, {n} on the last axis; got shape {tuple(numbers.shape)}. "
                    "Queries numbered apart: documents(ids, key_ids)."
                )
            check_broadcast(numbers.shape[:-1], matrix.batch, what, "one row of ids a sequence")
        same_sequence = self.key_ids is None
        if same_sequence:
            # Query row r stands at key position r + offset; a position outside the keys belongs to no document.
            at = torch.arange(i, device=matrix.device) + matrix.offset
            inside = (at >= 0) & (at < j)
            ids = torch.where(inside, ids[..., at.clamp(0, max(j - 1, 0))] if j else 0, torch.iinfo(torch.int64).min)
        n = len(matrix.batch)
        ids, keys = with_leading_axes(ids[..., None, :, None], n), with_leading_axes(keys[..., None, None, :], n)
        return Documents(ids, keys, self.contiguous, same_sequence)

    def check_stored(self, shape: tuple[int, ...], offset: int) -> None:
        b, _, i, j = shape
        require(isinstance(self.ids, Tensor) and isinstance(self.key_ids, Tensor), "documents have no ids")
        assert self.key_ids is not None
        check_broadcasts(self.ids, (b, 1, i, 1), "documents", is_int64, exact=2)
        check_broadcasts(self.key_ids, (b, 1, 1, j), "documents", is_int64, exact=3)
        require(self.contiguous is None or type(self.contiguous) is bool, "documents are contiguous, or not")
        require(type(self.same_sequence) is bool, "documents are of one sequence, or not")
        keys = self.key_ids.flatten(1)
        if self.contiguous:
            runs = (keys.diff(dim=1) != 0).sum(1) + (1 if j else 0)
            require(all(int(n) == len(row.unique()) for n, row in zip(runs, keys, strict=True)), "documents have gaps")
        if self.same_sequence:
            at = torch.arange(i, device="cpu") + offset
            inside = (at >= 0) & (at < j)
            rows = self.ids.flatten(1)[:, inside]
            require(bool((rows == keys[:, at[inside]]).all()), "documents of queries and keys differ")

    def crop(self, rows: slice, cols: slice) -> Mask:
        assert self.key_ids is not None, "broadcast to a matrix"
        return Documents(take(self.ids, -2, rows), take(self.key_ids, -1, cols))

    def visible(self, block: MatrixBlock) -> Tensor:
        if self.key_ids is None or self.ids.ndim < 3:  # not broadcast to a matrix yet: only drawn
            both = self.ids, self.ids if self.key_ids is None else self.key_ids
            ids, key_ids = (x.unsqueeze(0).flatten(0, -2)[:1, None] for x in both)
            return block.take(ids.mT) == block.take(key_ids)
        return block.take(self.ids) == block.take(self.key_ids)

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        assert self.key_ids is not None, "broadcast to a matrix"
        keys = self.key_ids.flatten(-3).flatten(0, -2)  # b|1 j
        ids = self.ids.flatten(-3).flatten(0, -2)  # b|1 i
        (batch,) = torch.broadcast_shapes(keys.shape[:1], ids.shape[:1])
        keys, ids = keys.expand(batch, -1).contiguous(), ids.expand(batch, -1).contiguous()
        if keys.shape[1] == 0:
            return geometry.interval(0, 0)
        ordered, order = keys.sort(dim=1, stable=True)
        begin, end = torch.searchsorted(ordered, ids), torch.searchsorted(ordered, ids, right=True)
        # Within an id the order is that of the keys: first and last occurrence bound the document.
        last = keys.shape[1] - 1
        lo = order.gather(1, begin.clamp(max=last))
        hi = order.gather(1, (end - 1).clamp(min=0)) + 1
        some = end > begin
        lo, hi = torch.where(some, lo, 0), torch.where(some, hi, 0)
        # Checked again, since ids may have been changed in place, unless a sync is forbidden.
        trusted = self.contiguous is True and (is_tracing() or host_sync_forbidden(geometry.device))
        exact = trusted or bool((hi - lo == end - begin).all())
        return KeyIntervals(lo[:, None], hi[:, None], exact)

    def size(self) -> tuple[int, int] | None:
        rows = self.ids.shape[-1]
        return rows, (rows if self.key_ids is None else self.key_ids.shape[-1])


@makes_mask("causal()")
def causal() -> Mask:
    """A query sees itself and the keys before it.

    Returns:
        A `Mask`.

    >>> print(regard.causal().draw(3, 3))
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    """
    return _CAUSAL


_CAUSAL = Causal()  # one for all, so that it is known again


@makes_mask("window(before, after)")
def window(before: int, after: int) -> Mask:
    """A query sees `before` keys before its own position, itself, and `after` keys after it.

    Args:
        before: Number of keys, at least 0.
        after: Number of keys, at least 0.

    Returns:
        A `Mask`.

    >>> print(regard.window(1, 0).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """
    sides = []
    for name, value in (("before", before), ("after", after)):
        if (count := as_int(value)) is None or count < 0:
            raise ValueError(
                f"window({name}=...) counts the keys {name} a position and must be an int >= 0; got {value!r}. "
                "window(0, 0) shows a query only itself."
            )
        sides.append(min(count, MAX_WINDOW - 1))  # beyond int64 no distance could be compared with it
    return Window(*sides)


@makes_mask("padding(lengths)")
def padding(lengths: Tensor | Sequence[int] | int) -> Mask:
    """The first lengths[b] keys of sequence b are real; the rest is padding that no query sees.

    Args:
        lengths: Whole numbers that broadcast to the batch axes, each from 0 to the number of keys. A compiled or
            captured graph cannot check them, and clamps them instead.

    Returns:
        A `Mask`. Where padding stands on the left, ``~padding(n)`` hides the first n keys of every sequence.

    >>> print(regard.padding([2]).draw(2, 4))
    ■ ■ · ·
    ■ ■ · ·
    >>> print((~regard.padding([1])).draw(2, 4))  # one key of padding on the left
    · ■ ■ ■
    · ■ ■ ■
    """
    if isinstance(lengths, Tensor) and lengths.dtype == torch.bool:
        raise TypeError(f"{_ONE_LENGTH}; got flags of shape {tuple(lengths.shape)}. {_FLAGS_ARE_A_MASK}")
    return Padding(_as_integers(lengths, "padding(lengths)"))


@makes_mask("documents(ids)")
def documents(ids: Tensor | Sequence[int], key_ids: Tensor | Sequence[int] | None = None) -> Mask:
    """A query sees the keys of its own document.

    Args:
        ids: Document of every position, whole numbers ``(..., j)``; with `key_ids` that of every query, ``(..., i)``.
            They may be changed in place; but in a captured graph, documents that were contiguous when the mask was
            built must stay so.
        key_ids: Document of every key, ``(..., j)``, where queries and keys are different sequences.

    Returns:
        A `Mask`.

    >>> print(regard.documents([0, 0, 1]))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    numbers = _as_integers(ids, "documents(ids)")
    if numbers.ndim == 0:
        raise ValueError(f"documents(ids) needs one id a position; got the number {ids!r}. Use a list of ids.")
    keys = None if key_ids is None else _as_integers(key_ids, "documents(key_ids)")
    return Documents(numbers, keys, _contiguous(numbers if keys is None else keys))


def _contiguous(ids: Tensor) -> bool | None:
    """Whether every document is one run of positions; None where a sync is forbidden."""
    if is_tracing() or host_sync_forbidden(ids.device) or ids.is_meta or ids.ndim == 0:
        return None
    changes, documents = ((x[..., 1:] != x[..., :-1]).sum(-1) for x in (ids, ids.sort(-1).values))
    return bool((changes == documents).all())


def _as_integers(values: Any, name: str) -> Tensor:
    # A list or an array is copied: its owner may change it.
    if isinstance(values, Tensor):
        tensor = readable_numbers(values, name)
    else:
        try:
            tensor = torch.tensor(values, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            got = type(values).__name__
            raise TypeError(f"{name} must be whole numbers, in a tensor or a list; got {got} {values!r:.40}.") from None
        if tensor.numel() == 0:  # of an empty list, which has no type
            tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers; got dtype {tensor.dtype}. Convert with .long().")
    return tensor.long()
