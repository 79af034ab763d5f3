"""Lines of a terminal, laid out in cells: styled pieces of text, bars, columns that line up.

No token can move the cursor or reverse a line, and wide letters take two cells. Colour is added last, by rich, and only
if it is wanted: without colour, rich is not needed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .token_text import cell_width, clip, occurrence_suffix, printable

__all__ = [
    "FAINT", "NARROWEST", "Line", "Span", "align_left", "align_right", "bar", "blend", "format_number", "label_width",
    "numbered_label", "paragraph", "quoted", "quoted_label", "render", "safe", "shade", "strongest", "tint", "trim",
    "word_lines", "wrap",
]  # fmt: skip

#: Ends of the scales of two heads: alike in lightness, and black letters can be read on every shade.
_HUES = (((134, 124, 112), (255, 146, 43)), ((112, 124, 134), (77, 171, 247)))
_EIGHTHS = " ▏▎▍▌▋▊▉█"
#: Weights below this are not shaded.
FAINT = 0.02
#: Columns below which nothing lines up.
NARROWEST = 40
#: Words up to which every one gets a bar; of more words the strongest do.
_ALL_BARS, _STRONGEST_BARS = 24, 12


class Span(NamedTuple):
    """A piece of a line in one style, as rich writes styles."""

    text: str
    style: str = ""


Line = list[Span]


# Text.


def quoted(word: str, width: int = 28) -> str:
    """A word in quotation marks, safe to print."""
    return f"“{safe(word, width)}”"


def numbered_label(labels: Sequence[str], position: int, width: int) -> str:
    """A word, safe to print, with its number if it occurs several times: the:2."""
    suffix = occurrence_suffix(labels, position)
    return safe(labels[position], width - len(suffix)) + suffix


def quoted_label(labels: Sequence[str], position: int, width: int = 28) -> str:
    """A word in quotation marks, with its number if it occurs several times."""
    return f"“{numbered_label(labels, position, width)}”"


def safe(word: str, width: int) -> str:
    """A word that is safe to print, cut to so many cells; right-to-left words cannot reverse the line."""
    text = clip(printable(word), max(width, 1))
    if any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in text):
        return f"\N{FIRST STRONG ISOLATE}{text}\N{POP DIRECTIONAL ISOLATE}"
    return text


def align_left(text: str, width: int) -> str:
    """A text cut or padded to so many cells, at their left."""
    text = clip(text, width)
    return text + " " * (width - cell_width(text))


def align_right(text: str, width: int) -> str:
    """A text padded to so many cells, at their right."""
    return " " * (width - cell_width(text)) + text


def paragraph(text: str, width: int, style: str = "", indent: str = "") -> list[Line]:
    """A sentence, wrapped."""
    lines, line = [], indent
    for part in text.split(" "):
        if cell_width(line) + cell_width(part) + 1 > width and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += part + " "
    return [[Span(text, style)] for text in [*lines, line.rstrip()]]


def wrap(text: str, width: int) -> str:
    """A sentence, wrapped, as plain text."""
    return render(paragraph(text, width), False)


def trim(line: Line) -> Line:
    """The line without blanks at its end."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return line


def word_lines(pairs: list[tuple[Span, Span]], width: int) -> list[Line]:
    """Words, each with a mark under it, in as many double lines as it takes."""
    lines: list[Line] = []
    above: Line = [Span("  ")]
    below: Line = [Span("  ")]
    used = 2
    for word, mark in pairs:
        size = cell_width(word.text)
        if used + size > width and len(above) > 1:
            lines += [above, trim(below)]
            above, below, used = [Span("  ")], [Span("  ")], 2
        above += [word, Span(" ")]
        below += [mark, Span(" " * (size + 1 - cell_width(mark.text)))]
        used += size + 1
    return [line for line in [*lines, trim(above), trim(below)] if line]


def label_width(width: int) -> int:
    """Cells for a word in a table, in a terminal of so many columns."""
    return 18 if width >= 60 else 9


# Numbers.


def format_number(x: float) -> str:
    """A number with three decimals, fewer if it is large; −∞ for a masked score."""
    if x != x or x in (float("inf"), float("-inf")):
        return "NaN" if x != x else "∞" if x > 0 else "−∞"
    text = f"{x:.3f}" if abs(x) < 1000 else f"{x:.3g}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def bar(weight: float, width: int) -> str:
    """A weight between 0 and 1 as a bar of at most `width` cells, in eighths; empty for NaN."""
    if weight != weight:
        return ""
    cells, eighths = divmod(round(min(max(weight, 0.0), 1.0) * width * 8), 8)
    return "█" * cells + (_EIGHTHS[eighths] if eighths else "")


def strongest(weights: list[list[float]], total: int, top: int | None) -> list[int]:
    """The words that get a bar, in the order of the sentence: `top`, or all of a short text, or the strongest."""
    count = top or (total if total <= _ALL_BARS else _STRONGEST_BARS)
    if count >= total:
        return list(range(total))
    order = sorted(range(total), key=lambda j: -max((w[j] for w in weights if w[j] == w[j]), default=0.0))
    return sorted(order[:count])


# Colour.


def shade(weight: float, hue: int) -> str:
    """The style of a word with this weight."""
    if not weight >= FAINT:  # false for NaN, too
        return ""
    return f"black on {blend(min(1.0, weight) ** 0.5, hue)}"


def tint(hue: int) -> str:
    """The colour of a head."""
    return blend(1.0, hue)


def blend(t: float, hue: int) -> str:
    """A colour on the scale of a head, from 0, weak, to 1, strong."""
    weak, strong = _HUES[hue % len(_HUES)]
    return "#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(weak, strong, strict=True))


def render(lines: Iterable[Line], colour: bool | str) -> str:
    """Lines as one text, in the colours that the terminal can show."""
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
        # A copy, since rich caches in a style the first colour system that it was rendered in.
        return Style.parse(span.style).copy().render(span.text, color_system=system)

    return "\n".join("".join(map(coloured, line)) for line in lines)
