"""The patches of an image in a picture: their grid over the image, once for every head, shaded by weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.patches import ImageLike
from .patches import image_pixels
from .png import png_source
from .spotlight import Spotlight
from .svg_elements import HUES, INK, LETTERS, MARGIN, PALE, frame_rect, rect, text_element, text_width
from .token_text import is_special

__all__ = ["PatchGrids"]

#: How wide the grid of a head gets, at most and at least, in user units; and the space between two.
_WIDE, _NARROW, _GAP = 260.0, 130.0, 20.0


class PatchGrids:
    """A grid for every shown head, side by side where there is room; what is no patch stands above, with its weight.

    Args:
        lit: What the lit word or patch looks at: patches.
        image: The image, drawn pale below its patches.
        top: Where the first grid begins.
        widest: How wide they get together.
    """

    def __init__(self, lit: Spotlight, image: ImageLike | None, top: float, widest: float) -> None:
        self.lit = lit
        self.elements: list[str] = []
        heads, labels = len(lit.heads), lit.cols.labels
        self.before = [n for n, label in enumerate(labels) if is_special(label)]
        self.patches = [n for n in range(len(labels)) if n not in set(self.before)]
        self.rows, self.columns = (int(place) + 1 for place in labels[self.patches[-1]].split(","))
        beside = (widest - _GAP * (heads - 1)) / heads
        size = min(_WIDE, beside if beside >= _NARROW else widest)
        across = max(1, int((widest + _GAP) // (size + _GAP)))
        source = None if image is None else png_source(_pale(image_pixels(image)))
        self.side, tall = size / self.columns, 0.0
        self.right = self.bottom = 0.0
        for n in range(heads):
            x, y = MARGIN + n % across * (size + _GAP), top + n // across * tall
            end = self._grid(n, x, y, source)
            tall = end + _GAP - y
            self.right, self.bottom = max(self.right, x + size), max(self.bottom, end)

    def _grid(self, n: int, x: float, top: float, source: str | None) -> float:
        """The grid of the n-th head at a place; returns where it ends."""
        weights = self.lit.weights[n]
        most = max((weights[j] for j in self.patches if weights[j] == weights[j]), default=0.0) or 1.0
        named = "   ".join(f"{self.lit.cols.labels[j]} {weights[j]:.2f}" for j in self.before)
        wide, y = self.side * self.columns, top + (LETTERS if named else 0)
        tall = self.side * self.rows
        if named and text_width(named) <= 1.4 * wide:
            self.elements.append(text_element(x, top + 6, named, 9.5, HUES[n]))
        if source is not None:
            place = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
            self.elements.append(f'<image {place} preserveAspectRatio="none" href="{source}"/>')
        for m, j in enumerate(self.patches):
            share = weights[j] / most
            if share >= 0.02:  # NaN is not
                left, over = x + m % self.columns * self.side, y + m // self.columns * self.side
                shade = f'fill="{HUES[n]}" fill-opacity="{0.85 * share**0.7:.3f}"'
                self.elements.append(rect(left, over, self.side, self.side, shade))
        self.elements.append(frame_rect(x, y, wide, tall, PALE, 0.75))
        if self.lit.same and self.lit.position in self.patches:
            m = self.patches.index(self.lit.position)
            left, over = x + m % self.columns * self.side, y + m // self.columns * self.side
            self.elements.append(frame_rect(left, over, self.side, self.side, INK, 1.5))
        tie = self.lit.heads[n]
        name = self.lit.layers[tie.layer].head_name(tie.head)
        strongest = f"{name}{': ' if name else ''}the strongest patch has {most:.3f}"
        self.elements.append(text_element(x, y + tall + 14, strongest, 10.5, PALE))
        return y + tall + 18


def _pale(pixels: Tensor) -> Tensor:
    """An image (3, h, w) as the page draws it below its patches, nearly grey and pale: colours are the weights'."""
    colour = pixels.float()
    grey = (colour * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0, keepdim=True)
    pale = 255 - 0.8 * (255 - (0.85 * grey + 0.15 * colour))
    return torch.cat([pale, torch.full_like(grey, 255)]).round().to(torch.uint8).permute(1, 2, 0)
