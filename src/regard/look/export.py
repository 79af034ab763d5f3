"""A picture as PNG or PDF, without a browser: vl-convert renders the SVG offline, and letters stay letters."""

from __future__ import annotations

import re

__all__ = ["render_svg"]

#: Pixels a unit of a PNG: twice the picture on a screen, or 300 in an inch of a picture that has a width.
_SCREEN, _PRINT = 2.0, 300 / 96


def render_svg(svg: str, suffix: str, sized: bool) -> bytes:
    """Render an SVG.

    Args:
        svg: The picture.
        suffix: ".png" or ".pdf".
        sized: Whether it has a width in inches.

    Raises:
        ImportError: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise ImportError(
            f'a {suffix} file needs vl-convert: pip install "regard[figure]", or save an .svg file.'
        ) from None
    if suffix == ".png":
        return bytes(vl_convert.svg_to_png(svg, scale=_PRINT if sized else _SCREEN))
    return bytes(vl_convert.svg_to_pdf(_in_points(svg)))


def _in_points(svg: str) -> str:
    """The SVG with a size in points: a PDF takes a unit of it for a point, and not for a 96th of an inch."""

    def points(size: re.Match[str]) -> str:
        length = float(size[2]) * (72 if size[3] else 72 / 96)
        return f'{size[1]}="{length:.3f}"'

    return re.sub(r'\b(width|height)="([\d.]+)(in)?"', points, svg, count=2)
