"""The base of all masks, and how masks combine: `& | ~` over bool tensors, functions and the masks of `kinds`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..block import MatrixBlock, shifted, take
from ..broadcast import MatrixShape, per_cell, refuse_flags_of_sequences
from ..pytree import flatten, is_node, register_node, replace_fields, tree_map
from ..stored import check_broadcasts, require
from ..tensor_kinds import readable
from .call_hints import cells_of_function, mask_call
from .intervals import Geometry, KeyIntervals

__all__ = ["And", "Dense", "Mask", "Not", "Or", "Predicate", "as_mask"]

#: Rows and columns of a mask that are printed.
CORNER = 32

#: Attributes about the cells of a mask, beside `visible`.
_ABOUT_CELLS = ["intervals", "visible_keys", "sees_all_keys", "sees_itself", "band", "dense_parts"]
_ABOUT_CELLS += ["interval_source", "structured", "is_one_interval", "rows_alike"]


class Mask:
    """Which query may see which key. Combine masks with ``& | ~``; `print` draws one.

    A mask of your own is a subclass with `visible`, and with `intervals` and `interval_source` where these are exact.

    >>> print((regard.causal() & ~regard.window(0, 0)).draw(3, 3))  # the past without oneself
    · · ·
    ■ · ·
    ■ ■ ·
    """

    positional: ClassVar[bool] = False  #: Whether positions are compared, so that `align` matters if lengths differ.
    sees_itself: ClassVar[bool] = False  #: Whether every query sees the key at its own position.
    #: The source of exact intervals; None where they may be inexact.
    interval_source: ClassVar[Literal["positions", "tensors"] | None] = None
    #: Whether a row sees one interval and all of it, as far as is certain without reading tensors.
    is_one_interval: ClassVar[bool] = False
    rows_alike: ClassVar[bool] = False  #: Whether all rows see the same keys.
    is_function: ClassVar[bool] = False  #: Whether the mask is a Python function, without a tensor.

    def __init_subclass__(cls) -> None:
        """A subclass that shows other cells inherits nothing that says which ones."""
        for name in _ABOUT_CELLS if "visible" in vars(cls) else ():
            if name not in vars(cls):
                setattr(cls, name, getattr(Mask, name))

    @property
    def structured(self) -> bool:
        """Whether the intervals of a mask that is broadcast to a matrix are exact.

        >>> regard.causal().structured
        True
        """
        return self.interval_source is not None

    def visible(self, block: MatrixBlock) -> Tensor:
        """Which cells of a block are visible.

        Args:
            block: Rows and columns, with their positions ``block.i`` ``(i, 1)`` and ``block.j`` ``(1, j)``.

        Returns:
            bool, broadcastable to ``(b, h, i, j)``.

        >>> regard.causal().visible(MatrixBlock(slice(0, 2), slice(0, 2), 0, torch.device("cpu")))
        tensor([[ True, False],
                [ True,  True]])
        """
        raise NotImplementedError

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        """Intervals of keys that hold all that is visible.

        Args:
            geometry: Lengths and positions of the matrix.

        Returns:
            A few intervals for every row. Default: one of all keys, inexact.

        >>> regard.causal().intervals(Geometry(2, 3, 0, torch.device("cpu"))).hi
        tensor([[[1, 2]]])
        """
        return geometry.interval(0, geometry.keys, exact=False)

    def visible_keys(self, geometry: Geometry) -> Tensor | None:
        """Which keys at least one row sees.

        Args:
            geometry: Lengths and positions of the matrix.

        Returns:
            bool ``(b|1, j)``; None where the mask cannot say it at once.

        >>> regard.padding(1).visible_keys(Geometry(2, 3, 0, torch.device("cpu")))
        tensor([[ True, False, False]])
        """
        return None

    def band(self) -> tuple[int | None, int | None] | None:
        """The band around the own position that a mask shows.

        Returns:
            Number of keys before and after, where None is no limit; None for any other mask.

        >>> (regard.causal() & regard.window(4, 4)).band()
        (4, 0)
        """
        return None

    def dense_parts(self) -> list[Tensor] | None:
        """Bool tensors that hide more of what is inside the intervals.

        Returns:
            The tensors, all of which must be True; None for a mask of another form.

        >>> regard.causal().dense_parts()
        []
        """
        return [] if self.structured else None

    def masks(self) -> tuple[Mask, ...]:
        """The masks that this one is combined from.

        Returns:
            None, one or two masks.

        >>> (~regard.causal()).masks()
        (causal(),)
        """
        return ()

    def leaves(self) -> list[Mask]:
        """The uncombined masks in it.

        Returns:
            At least one: the mask itself.

        >>> (regard.causal() & ~regard.window(0, 0)).leaves()
        [causal(), window(0, 0)]
        """
        return [leaf for mask in self.masks() for leaf in mask.leaves()] or [self]

    def broadcast_to(self, matrix: MatrixShape) -> Mask:
        """The same mask for one matrix.

        Args:
            matrix: Its shape ``(*batch, h, i, j)``, offset and device.

        Returns:
            A mask whose tensors were checked, and have the axes ``(*batch|1, h|1, x, y)``.

        >>> regard.padding([2, 1]).broadcast_to(MatrixShape((2, 1, 3, 3), 0, torch.device("cpu"))).lengths.shape
        torch.Size([2, 1, 1, 1])
        """
        return self

    def narrow(self, rows: slice) -> Mask:
        """The same for adjacent rows, of a mask that is broadcast to a matrix.

        Args:
            rows: A slice with both ends.

        Returns:
            A mask whose tensors are cut to these rows.

        >>> as_mask(torch.ones(4, 4, dtype=torch.bool)).narrow(slice(0, 2)).size()
        (2, 4)
        """
        return tree_map(self, lambda t: take(t, -2, rows))

    def crop(self, rows: slice, cols: slice) -> Mask:
        """The same for a part of the matrix, of a mask that is broadcast to one; positions move along.

        Args:
            rows: Adjacent rows, a slice with both ends.
            cols: Adjacent keys, likewise.

        Returns:
            A mask whose tensors and key positions are those of the part.

        >>> as_mask(torch.ones(4, 4, dtype=torch.bool)).crop(slice(0, 2), slice(1, 4)).size()
        (2, 3)
        """
        return Cropped(self, rows.start, cols.start)

    def check_stored(self, shape: tuple[int, ...], offset: int) -> None:
        """Check that the fields, read from a file, are those of a mask broadcast to a matrix.

        The masks that this one is combined from are checked by the caller.

        Args:
            shape: ``(b, h, i, j)``.
            offset: The key position of query 0.

        Raises:
            ValueError: A field has another type, shape or range.

        >>> regard.causal().check_stored((1, 1, 3, 3), 0)
        """
        others = len(self.parts) - len(self.masks())  # type: ignore[attr-defined]
        require(others == 0, f"no recording has a mask {type(self).__name__}")

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache, which belongs to these very tensors; of a user's own mask all attributes."""
        return {name: getattr(self, name) for name in self.parts} if is_node(self) else vars(self)  # type: ignore[attr-defined]

    def size(self) -> tuple[int, int] | None:
        """Lengths of the matrix that this mask is for.

        Returns:
            ``(i, j)``; None where no tensor of the mask says it.

        >>> regard.documents([0, 0, 1]).size()
        (3, 3)
        """
        sizes = [size for mask in self.masks() if (size := mask.size())]
        return (min(i for i, _ in sizes), min(j for _, j in sizes)) if sizes else None

    def sees_all_keys(self, geometry: Geometry) -> bool:
        """Whether every key is seen by some row, as far as is certain without reading tensors.

        Args:
            geometry: Lengths and positions of the matrix.

        Returns:
            False where a tensor would have to be read.

        >>> regard.causal().sees_all_keys(Geometry(3, 3, 0, torch.device("cpu")))
        True
        """
        return self.sees_itself and geometry.offset <= 0 and geometry.rows + geometry.offset >= geometry.keys

    def __and__(self, other: Mask | Tensor | Callable[[Tensor, Tensor], Tensor]) -> Mask:
        return And(self, as_mask(other))

    def __rand__(self, other: Mask | Tensor | Callable[[Tensor, Tensor], Tensor]) -> Mask:
        return And(as_mask(other), self)

    def __or__(self, other: Mask | Tensor | Callable[[Tensor, Tensor], Tensor]) -> Mask:
        return Or(self, as_mask(other))

    def __ror__(self, other: Mask | Tensor | Callable[[Tensor, Tensor], Tensor]) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is neither true nor false: combine masks with & | ~ (not and, or, not).")

    def draw(self, i: int | None = None, j: int | None = None, align: Literal["start", "end"] = "start") -> str:
        """The mask as text: ■ visible, · hidden; of a batch the first sequence.

        Args:
            i: Number of rows. Default: what the mask's tensors say, else 8.
            j: Number of columns, likewise.
            align: Which query and key stand at the same position: the first ones or the last ones.

        Returns:
            i lines of j cells.

        >>> print(regard.causal().draw(3, 5, align="end"))
        ■ ■ ■ · ·
        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■
        """
        if align not in ("start", "end"):
            raise ValueError(f'draw(align=) must be "start" or "end"; got {align!r}.')
        size = self.size() or (8, 8)
        i, j = (size[0] if i is None else i), (size[1] if j is None else j)
        offset = j - i if align == "end" else 0
        device = next((tensor.device for tensor in flatten(self)[1]), torch.device("cpu"))
        cells = self.visible(MatrixBlock(slice(0, i), slice(0, j), offset, device))
        if 0 in cells.shape[:-2]:
            return ""
        cells = cells[(0,) * (cells.ndim - 2)].expand(i, j)
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in cells.tolist())

    def __str__(self) -> str:
        """The drawing; of a large mask its first corner."""
        i, j = self.size() or (8, 8)
        shown = self.draw(min(i, CORNER), min(j, CORNER))
        return shown if max(i, j) <= CORNER else f"{shown}\n(the first {CORNER} rows and columns; draw() shows all)"

    def _repr_html_(self) -> str:
        return str(import_module("regard.look.notebook").mask_html(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}()"


@register_node(storable=True)
class Dense(Mask):
    """A bool tensor: True is visible."""

    cells: Tensor  # bool, broadcastable to (*batch, h, i, j)
    structured = False

    def broadcast_to(self, matrix: MatrixShape) -> Mask:
        refuse_flags_of_sequences(self.cells.shape, matrix.full)
        return Dense(per_cell(self.cells, matrix, "mask"))

    def dense_parts(self) -> list[Tensor] | None:
        return [self.cells]

    def check_stored(self, shape: tuple[int, ...], offset: int) -> None:
        check_broadcasts(self.cells, shape, "a mask", lambda x: x.dtype == torch.bool)

    def crop(self, rows: slice, cols: slice) -> Mask:
        return Dense(take(take(self.cells, -2, rows), -1, cols))

    def visible(self, block: MatrixBlock) -> Tensor:
        return block.take(self.cells)

    def size(self) -> tuple[int, int] | None:
        return self.cells.shape[-2], self.cells.shape[-1]


@register_node
class Cropped(Mask):
    """Adjacent rows and keys of a mask that reads positions, such as a function: it is asked at those of the matrix."""

    of: Mask
    row_start: int
    key_start: int
    structured = False

    def visible(self, block: MatrixBlock) -> Tensor:
        rows, cols = shifted(block.rows, self.row_start), shifted(block.cols, self.key_start)
        return self.of.visible(MatrixBlock(rows, cols, block.offset - self.row_start + self.key_start, block.device))

    def narrow(self, rows: slice) -> Mask:
        return Cropped(self.of, self.row_start + rows.start, self.key_start)


@register_node
class Predicate(Mask):
    """A user's function f(i, j) of positions: True is visible."""

    function: Callable[[Tensor, Tensor], Tensor]
    positional = True
    structured = False
    is_function = True

    def visible(self, block: MatrixBlock) -> Tensor:
        i, j = block.i, block.j
        return cells_of_function(self.function(i, j), (i.shape[0], j.shape[1]))


@register_node(storable=True)
class And(Mask):
    """Visible in both."""

    left: Mask
    right: Mask
    sign: ClassVar[str] = "&"

    def __repr__(self) -> str:
        return f"({self.left!r} {self.sign} {self.right!r})"

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.left.positional or self.right.positional

    @property
    def structured(self) -> bool:
        return self.left.structured and self.right.structured

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.left.sees_itself and self.right.sees_itself

    @property
    def is_one_interval(self) -> bool:  # type: ignore[override]
        return self.left.is_one_interval and self.right.is_one_interval

    def band(self) -> tuple[int | None, int | None] | None:
        a, b = self.left.band(), self.right.band()
        return None if a is None or b is None else (_narrower(a[0], b[0]), _narrower(a[1], b[1]))

    def dense_parts(self) -> list[Tensor] | None:
        left, right = self.left.dense_parts(), self.right.dense_parts()
        return None if left is None or right is None else left + right

    def masks(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def broadcast_to(self, matrix: MatrixShape) -> Mask:
        return replace_fields(self, left=self.left.broadcast_to(matrix), right=self.right.broadcast_to(matrix))

    def crop(self, rows: slice, cols: slice) -> Mask:
        return replace_fields(self, left=self.left.crop(rows, cols), right=self.right.crop(rows, cols))

    def visible(self, block: MatrixBlock) -> Tensor:
        return self.left.visible(block) & self.right.visible(block)

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        return self.left.intervals(geometry).intersect(self.right.intervals(geometry))


def _narrower(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@register_node(storable=True)
class Or(And):
    """Visible in one of the two."""

    sign = "|"
    structured = And.structured
    is_one_interval = False

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.left.sees_itself or self.right.sees_itself

    def visible(self, block: MatrixBlock) -> Tensor:
        return self.left.visible(block) | self.right.visible(block)

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        left, right = self.left.intervals(geometry), self.right.intervals(geometry)
        neither = left.complement(geometry.keys).intersect(right.complement(geometry.keys))
        return neither.complement(geometry.keys)


@register_node(storable=True)
class Not(Mask):
    """Visible where the other mask hides."""

    of: Mask

    def __repr__(self) -> str:
        return f"~{self.of!r}"

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.of.positional

    @property
    def structured(self) -> bool:
        return self.of.structured

    def masks(self) -> tuple[Mask, ...]:
        return (self.of,)

    def broadcast_to(self, matrix: MatrixShape) -> Mask:
        return Not(self.of.broadcast_to(matrix))

    def crop(self, rows: slice, cols: slice) -> Mask:
        return Not(self.of.crop(rows, cols))

    def visible(self, block: MatrixBlock) -> Tensor:
        return ~self.of.visible(block)

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        intervals = self.of.intervals(geometry)
        # Inexact intervals over-approximate; their complement does not.
        return intervals.complement(geometry.keys) if intervals.exact else super().intervals(geometry)


def as_mask(mask: Any) -> Mask:
    """A mask from what users pass: a Mask, a bool tensor (True: visible), or a function of (i, j)."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        mask = readable(mask, "mask")
        if mask.dtype != torch.bool:
            for_numbers = "For numbers that are added to the scores use score=ScaledDot().bias(tensor)."
            for_flags = "For flags of 0 and 1 pass mask.bool(), for lengths padding(lengths)."
            raise TypeError(
                f"a mask tensor must be bool, True where a key is visible; got dtype {mask.dtype}. "
                f"{for_numbers if mask.is_floating_point() else for_flags}"
            )
        if mask.ndim < 2:
            raise ValueError(
                f"a mask tensor needs the axes (..., i, j); got shape {tuple(mask.shape)}. "
                "For one flag a key use mask[None, :], for lengths use padding(lengths)."
            )
        return Dense(mask)
    if callable(mask):
        if (call := mask_call(mask)) is not None:
            raise TypeError(f"mask must be a mask, and regard.{mask.__name__} is the function that makes one: {call}.")
        return Predicate(mask)
    flags = isinstance(mask, list | tuple) or hasattr(mask, "__array__")
    raise TypeError(
        "mask must be causal(), window(), padding(), documents(), a bool tensor or a function of (i, j); "
        f"got {type(mask).__name__}.{' Use torch.as_tensor(mask), or padding(lengths).' if flags else ''}"
    )
