"""Patches of an image as tokens: their places, the grid they stand in, and the image itself."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

__all__ = ["ImageLike", "PatchTokens"]


class HasArrayInterface(Protocol):
    """An array of NumPy or an image of Pillow."""

    @property
    def __array_interface__(self) -> dict[str, object]: ...


#: An image: (h, w, 3), (h, w) or (3, h, w).
ImageLike: TypeAlias = Tensor | HasArrayInterface


class PatchTokens(tuple[str, ...]):
    """Tokens of an image: "row,column" of every patch, after those that are no patches. They carry the image along."""

    grid: tuple[int, int]
    image: ImageLike | None

    @classmethod
    def of_grid(cls, length: int, grid: tuple[int, int], image: ImageLike | None = None) -> PatchTokens:
        """The tokens of so many positions.

        Args:
            length: Positions of the axis; those before the patches are [CLS] and registers.
            grid: Rows and columns of patches.
            image: The image.
        """
        rows, cols = grid
        before = length - rows * cols
        if min(rows, cols) < 1 or before < 0:
            raise ValueError(
                f"a grid of {rows} × {cols} patches needs at least {rows * cols} positions; got {length}. The grid is "
                "that of the model: (14, 14) for images of 224 pixels and patches of 16."
            )
        first = ["[CLS]", *(f"<|register {n}|>" for n in range(1, before))][:before]
        tokens = cls([*first, *(f"{row},{col}" for row in range(rows) for col in range(cols))])
        tokens.grid, tokens.image = (rows, cols), image
        return tokens
