"""Lines of a terminal, laid out in cells: pieces of text with a style, bars, columns that line up.

No token can move the cursor or turn a line round, and wide letters take two cells. Colour is added last, by rich, and
only where it is wanted: without it nothing else is needed. Imports `words`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

from . import token_text

__all__ = [
    "FAINT", "Line", "Span", "bar", "mixed", "number", "paragraph", "quoted", "rendered", "safe", "shade", "tint",
    "to_left", "to_right", "trimmed", "wrapped",
]  # fmt: skip

#: Ends of the scales of two heads: alike in lightness, black letters can be read on all of it, on any background.
_HUES = (((134, 124, 112), (255, 146, 43)), ((112, 124, 134), (77, 171, 247)))
_EIGHTHS = " ▏▎▍▌▋▊▉█"
FAINT = 0.02  # weights below this are not shaded


class Span(NamedTuple):
    """A piece of a line in one style, as rich writes styles."""

    text: str
    style: str = ""


Line = list[Span]


# Text.


def quoted(word: str, width: int = 28) -> str:
    """A word in quotation marks, safe to print."""
    return f"“{safe(word, width)}”"


def safe(word: str, width: int) -> str:
    """A word that is safe to print, cut to so many cells; right-to-left ones cannot turn the line round."""
    text = token_text.clip(token_text.shown(word), max(width, 1))
    if any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in text):
        return f"\N{FIRST STRONG ISOLATE}{text}\N{POP DIRECTIONAL ISOLATE}"
    return text


def to_left(text: str, width: int) -> str:
    """A text at the left of so many cells."""
    text = token_text.clip(text, width)
    return text + " " * (width - token_text.cells(text))


def to_right(text: str, width: int) -> str:
    """A text at the right of so many cells."""
    return " " * (width - token_text.cells(text)) + text


def paragraph(text: str, width: int, style: str = "", indent: str = "") -> list[Line]:
    """Words of a sentence of ours, wrapped."""
    lines, line = [], indent
    for part in text.split(" "):
        if token_text.cells(line) + token_text.cells(part) + 1 > width and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += part + " "
    return [[Span(text, style)] for text in [*lines, line.rstrip()]]


def wrapped(text: str, width: int) -> str:
    """A sentence of ours in lines of so many cells."""
    return rendered(paragraph(text, width), False)


def trimmed(line: Line) -> Line:
    """Without what cannot be seen at its end."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return line


# Numbers.


def number(x: float) -> str:
    """A number with three decimals, fewer where it is large; −∞ for what may not be seen."""
    if x != x or x in (float("inf"), float("-inf")):
        return "NaN" if x != x else "∞" if x > 0 else "−∞"
    text = f"{x:.3f}" if abs(x) < 1000 else f"{x:.3g}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def bar(weight: float, room: int) -> str:
    """A weight between 0 and 1 as a bar of at most so many cells, in eighths; none for what is not a number."""
    if weight != weight:
        return ""
    eighths = round(min(max(weight, 0.0), 1.0) * room * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


# Colour.


def shade(weight: float, hue: int) -> str:
    """The style of a word that is given this weight."""
    if not weight >= FAINT:  # NaN is not either
        return ""
    return f"black on {mixed(min(1.0, weight) ** 0.5, hue)}"


def tint(hue: int) -> str:
    """The colour of a head."""
    return mixed(1.0, hue)


def mixed(t: float, hue: int) -> str:
    """A colour on a head's scale, from 0, weak, to 1, strong."""
    weak, strong = _HUES[hue % len(_HUES)]
    return "#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(weak, strong, strict=True))


def rendered(lines: Iterable[Line], colour: bool | str) -> str:
    """Lines as one text, in colour as far as the terminal can show it."""
    if not colour:
        return "\n".join("".join(span.text for span in line).rstrip() for line in lines)
    try:
        from rich.color import ColorSystem
        from rich.style import Style
    except ImportError:
        raise ImportError('colours need rich: pip install "regard[look]" brings it, or use --color never.') from None
    system = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT}.get(str(colour), ColorSystem.TRUECOLOR)

    def coloured(span: Span) -> str:
        if not span.style or not span.text:
            return span.text
        # A copy: rich remembers in a style the first colours that it was rendered in.
        return Style.parse(span.style).copy().render(span.text, color_system=system)

    return "\n".join("".join(map(coloured, line)) for line in lines)
