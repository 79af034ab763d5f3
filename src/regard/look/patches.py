"""Recordings of images: positions become patches of a grid, and the image travels with the page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.patches import ImageLike, PatchTokens
from ..core.weights import Weights
from ..recorder.recording import Pass, Recording

if TYPE_CHECKING:
    from ..recorder.layer import Layer, TokenLists
    from .layers import Subject

__all__ = ["image_pixels", "with_patches"]

#: Pixels of the longer side of an image in a page, at most.
LONGEST = 224
#: Positions before the patches, at most: [CLS] and registers.
BEFORE = 16


def with_patches(subject: Subject, grid: tuple[int, int], image: ImageLike | None) -> Subject:
    """A recording or a matrix whose axes without tokens, where the grid fits, are patches.

    Args:
        subject: What is looked at.
        grid: Rows and columns of patches.
        image: The image.
    """
    if isinstance(subject, Weights):
        rows, cols = subject.tokens
        return subject.label(rows, cols, grid=grid, image=image)
    passes = [Pass([_with_patches(layer, grid) for layer in one.layers]) for one in subject.passes]
    if not any(_is_patches(side) for one in passes for layer in one.layers for side in layer.tokens):
        sizes = ", ".join(sorted({f"{n}" for layer in subject.layers for n in layer.shape[2:]}, key=int))
        raise ValueError(
            f"no layer has the {grid[0] * grid[1]} patches of a grid of {grid[0]} × {grid[1]}, or all have tokens; the "
            f"layers have {sizes} positions."
        )
    return Recording(passes, list(subject.refused))


def _is_patches(side: list[list[str]] | None) -> bool:
    return side is not None and bool(side) and isinstance(side[0], _PatchList)


class _PatchList(list[str]):
    """Tokens of patches as recordings have tokens, in lists."""


def _with_patches(layer: Layer, grid: tuple[int, int]) -> Layer:
    b, _, i, j = layer.shape
    rows, cols = layer.tokens
    tokens = rows or _patch_lists(b, i, grid), cols or _patch_lists(b, j, grid)
    return replace(layer, tokens=tokens, parent=None, _weights=None)


def _patch_lists(b: int, length: int, grid: tuple[int, int]) -> TokenLists | None:
    """Patches for every sequence of a batch; None where the grid does not fit."""
    if not 0 <= length - grid[0] * grid[1] <= BEFORE:
        return None
    return [_PatchList(PatchTokens.of_grid(length, grid)) for _ in range(b)]


def image_pixels(image: ImageLike) -> Tensor:
    """The pixels of an image, (3, h, w) in uint8, small enough for a page.

    Args:
        image: A tensor or an array (h, w, 3), (h, w) or (3, h, w), in uint8 or floating point, or an image of Pillow.
            Numbers outside of 0 to 1, as models take them, are scaled to that range.
    """
    pixels = _as_tensor(image)
    if pixels.ndim == 2:
        pixels = pixels.unsqueeze(0).expand(3, -1, -1)
    elif pixels.ndim == 3 and pixels.shape[-1] in (1, 3, 4) and pixels.shape[0] not in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3, 4) or not pixels.numel():
        raise ValueError(f"image must be (h, w, 3), (h, w) or (3, h, w); got a shape of {tuple(pixels.shape)}.")
    pixels = pixels[:3].float().expand(3, -1, -1).nan_to_num(nan=0.0)
    if image_is_integer := not _as_tensor(image).is_floating_point():
        pixels = pixels / 255
    if not image_is_integer and (pixels.min() < 0 or pixels.max() > 1):
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    shrink = max(pixels.shape[1:]) / LONGEST
    if shrink > 1:
        size = [max(1, round(n / shrink)) for n in pixels.shape[1:]]
        pixels = torch.nn.functional.interpolate(pixels[None], size=size, mode="area")[0]
    return (255 * pixels.clamp(0, 1)).round().to(torch.uint8)


def _as_tensor(image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image.detach().cpu()
    try:
        import numpy as np

        return torch.from_numpy(np.array(image))
    except (TypeError, ValueError):
        raise TypeError(
            f"image must be a tensor, an array or an image of Pillow; got {type(image).__name__}."
        ) from None
