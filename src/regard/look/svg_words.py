"""The places of words in a picture: line after line, from the left, or from the right where they are written so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .svg_elements import MARGIN, fitted_width, right_to_left
from .token_text import is_special

__all__ = ["WordBox", "flow_words", "one_line"]

_GAP = 10.0


@dataclass(frozen=True)
class WordBox:
    """The place of a word."""

    x: float
    y: float  # of the line's middle
    width: float
    rtl: bool = False

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def gap(self) -> float:
        """The middle of the space before the word."""
        return self.x + self.width + _GAP / 2 if self.rtl else self.x - _GAP / 2


def flow_words(names: dict[int, str], first: float, step: float, line: float) -> dict[int, WordBox]:
    """Words in reading order, in as many lines as it takes.

    Args:
        names: The text of every place.
        first: Where the first line stands.
        step: The distance of two lines.
        line: How wide a line may get.
    """
    boxes: dict[int, WordBox] = {}
    x, y = MARGIN, first
    for place, text in names.items():
        size = fitted_width(text)
        if x + size > MARGIN + line and x > MARGIN:
            x, y = MARGIN, y + step
        boxes[place] = WordBox(x, y, size)
        x += size + _GAP
    if not _from_the_right(names):
        return boxes
    end = MARGIN + max(box.x + box.width for box in boxes.values())
    return {place: replace(box, x=end - box.x - box.width, rtl=True) for place, box in boxes.items()}


def one_line(names: dict[int, str], line: float) -> bool:
    """Whether words fit into one line."""
    return sum(map(fitted_width, names.values())) + _GAP * len(names) <= line


def _from_the_right(names: dict[int, str]) -> bool:
    """The direction of a text is that of its first word of letters, as in the page."""
    written = (text for text in names.values() if not is_special(text) and any(map(str.isalpha, text)))
    return next((right_to_left(text) for text in written), False)
