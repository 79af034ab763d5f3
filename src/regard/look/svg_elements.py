"""Elements of a picture: text, rectangles, colours, the document and how wide it is.

Every text of the subject goes through `text_element` or `safe_xml`, which escape it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from torch import Tensor

from .token_text import cell_width, printable

__all__ = [
    "FONT", "GROUND", "HUES", "INK", "LETTERS", "MARGIN", "PALE", "SIGNED", "TINTS", "cell_places", "document",
    "fitted_width", "frame_rect", "inches", "marked_cells", "note_lines", "page_units", "rect", "right_to_left",
    "safe_xml", "signed_fill", "text_element", "text_width", "tint_fill",
]  # fmt: skip

INK, PALE, GROUND = "#1c2024", "#5d646c", "#ffffff"
#: The first two heads in the colours of the page: an orange and a blue that colour-blind readers tell apart.
HUES = ("#c04a06", "#0a66ad")
#: The shades of weights in the page, from 0 to 1; `page.css` has the same.
TINTS = ((250, 249, 246), (205, 222, 238), (122, 171, 214), (33, 104, 172), (8, 44, 96))
#: The ends of signed numbers in the page, negative and positive.
SIGNED = ((190, 84, 16), (22, 98, 168))
FONT = "'Helvetica Neue', Helvetica, Arial, 'Noto Sans', sans-serif"
#: How wide Helvetica, Arial and Liberation Sans set the signs from the blank to the tilde, in thousandths of the size.
_WIDTHS = [
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556, 556, 556,
    556, 556, 556, 278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833,
    722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556, 333, 556, 556, 500, 556,
    556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334,
    260, 334, 584,
]  # fmt: skip
LETTERS = 13.0  # size of letters, in user units
MARGIN = 24.0


def text_element(
    x: float,
    y: float,
    text: str,
    size: float = 13,
    fill: str = INK,
    anchor: str = "start",
    *,
    bold: bool = False,
    halo: bool = False,
    extra: str = "",
) -> str:
    """A text; `extra` is further attributes."""
    if not text:
        return ""
    style = ' font-weight="700"' if bold else ""
    style += f' stroke="{GROUND}" stroke-width="3" paint-order="stroke"' if halo else ""
    style += "" if anchor == "start" else f' text-anchor="{anchor}"'
    style += ' unicode-bidi="isolate"' if right_to_left(text) else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{style}{extra}>{safe_xml(text)}</text>'


def right_to_left(text: str) -> bool:
    """Whether a text has letters that are written from right to left."""
    return any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in text)


def rect(x: float, y: float, width: float, height: float, style: str) -> str:
    """A rectangle; `style` is its fill or stroke."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>'


def tint_fill(shade: float) -> str:
    """The colour of a shade, 0 to 1, as the page blends it."""
    at = min(max(shade, 0.0), 1.0) * (len(TINTS) - 1)
    n = min(int(at), len(TINTS) - 2)
    return 'fill="#{:02x}{:02x}{:02x}"'.format(
        *(round(a + (b - a) * (at - n)) for a, b in zip(TINTS[n], TINTS[n + 1], strict=True))
    )


def cell_places(marked: Tensor) -> list[tuple[int, int]]:
    """Row and column of the cells of a matrix that are true."""
    return [(i, j) for i, j in marked.nonzero().tolist()]


def marked_cells(cells: Iterable[tuple[int, int]], left: float, top: float, side: float, crossed: bool = False) -> str:
    """Cells of a square, (row, column), under a slanted line, or under a cross; empty without cells."""
    up = "M{x:.1f} {end:.1f}l{side:.1f} -{side:.1f}"
    stroke = up + "m0 {side:.1f}l-{side:.1f} -{side:.1f}" if crossed else up
    lines = [stroke.format(x=left + j * side, end=top + (i + 1) * side, side=side) for i, j in cells]
    return f'<path d="{"".join(lines)}" fill="none" stroke="{PALE}" stroke-width="0.5"/>' if lines else ""


def frame_rect(x: float, y: float, width: float, height: float, stroke: str, thick: float) -> str:
    """An empty rectangle with a border."""
    return rect(x, y, width, height, f'fill="none" stroke="{stroke}" stroke-width="{thick}"')


def safe_xml(text: str) -> str:
    """A text that `printable` made, as XML can hold it: U+FFFE and U+FFFF are no characters of XML."""
    return escape(text.replace("\ufffe", "\N{REPLACEMENT CHARACTER}").replace("\uffff", "\N{REPLACEMENT CHARACTER}"))


def fitted_width(text: str) -> float:
    """How wide a word is set that every font fits into its box; of letters beyond ASCII about: an n, wide ones two."""
    thousandths = sum(_WIDTHS[ord(letter) - 32] for letter in text if " " <= letter <= "~")
    others = "".join(letter for letter in text if not " " <= letter <= "~")
    return max(6.0, LETTERS * (thousandths / 1000 + 0.56 * cell_width(others)))


def text_width(text: str) -> float:
    """How wide a text gets that fonts set as they like: some are an eighth wider than Helvetica."""
    return 1.13 * fitted_width(text)


def signed_fill(change: float) -> str:
    """The colour of a change between −1 and 1, as the page blends it: orange below 0, blue above."""
    shade = min(1.0, abs(change) ** 0.6)
    ends = zip(TINTS[0], SIGNED[change > 0], strict=True)
    return 'fill="#{:02x}{:02x}{:02x}"'.format(*(round(a + (b - a) * shade) for a, b in ends))


# How wide a picture is.

_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72, "px": 1 / 96}
#: User units of an inch, so that letters are 7.5 points high, and user units of a picture, at most: a slide is the
#: picture of a page, magnified.
_UNITS_PER_INCH, _WIDEST = LETTERS * 72 / 7.5, 861.0


def inches(width: str) -> float:
    """A width such as "3.3in", "84mm" or "240pt" in inches."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(in|cm|mm|pt|px)\s*", width) if isinstance(width, str) else None
    if size is None or not 0.5 <= (value := float(size[1]) * _UNITS[size[2]]) <= 100:
        raise ValueError(
            f'width must be a length from 0.5 to 100 inches, such as "3.3in", "84mm" or "240pt"; got {width!r}.'
        )
    return value


def page_units(width: str | None, default: float) -> float:
    """How many user units wide a picture may get, so that its letters can be read at its width."""
    return default if width is None else min(_WIDEST, inches(width) * _UNITS_PER_INCH)


def note_lines(note: str, width: float) -> list[str]:
    """A sentence in lines of at most so many user units."""
    lines = [""]
    for word in note.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer) * 12 / LETTERS > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def document(
    title: str, description: str, width: float, height: float, elements: Iterable[str], size: str | None = None
) -> str:
    """The file: elements in a box of user units; with a `size` such as "3.3in" as wide as that, and in its middle."""
    name = printable(title, 400)
    body = "\n".join(element for element in elements if element)
    wide, height = round(max(width, page_units(size, width))), round(height)
    left = (width - wide) / 2
    across, down = f"{wide}", f"{height}"
    ground = f'fill="{GROUND}"'
    if size is not None:
        across, down = f"{inches(size):.4g}in", f"{inches(size) * height / wide:.4g}in"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" '
        f'viewBox="{left:.0f} 0 {wide} {height}" role="img" aria-label={quoteattr(_safe_attribute(name))} '
        f'font-family="{FONT}">\n<title>{safe_xml(name)}</title>\n<desc>{safe_xml(description)}</desc>\n'
        f"{rect(left - 1, -1, wide + 2, height + 2, ground)}\n{body}\n</svg>\n"
    )


def _safe_attribute(text: str) -> str:
    return text.replace("\ufffe", "").replace("\uffff", "")
