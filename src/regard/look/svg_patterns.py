"""The picture of what heads do: layers as rows, heads as columns, each cell the pattern of a head and its strength."""

from __future__ import annotations

from ..patterns import HeadPatterns
from .svg_elements import GROUND, HUES, INK, MARGIN, PALE, document, rect, text_element, text_width, tint_fill

__all__ = ["draw_patterns"]

_CELL_HEIGHT, _LEFT = 26.0, 74.0


def draw_patterns(patterns: HeadPatterns, title: str = "What heads do", width: str | None = None) -> str:
    """Draw the patterns of heads as an SVG: the darker a cell, the more of its weight a head puts there.

    Args:
        patterns: The result of `regard.patterns.classify`.
        title: Title of the picture.
        width: How wide the picture is, such as ``"6.9in"``.

    Returns:
        The text of an SVG file. Heads that match no pattern are empty; those of induction have a frame.

    >>> W = regard.weights(torch.zeros(2, 40, 4), mask=regard.causal())
    >>> regard.look.draw_patterns(regard.patterns.classify(W)).startswith("<svg")
    True
    """
    if not isinstance(patterns, HeadPatterns):
        got = type(patterns).__name__
        raise TypeError(f"draw_patterns(patterns) takes the result of regard.patterns.classify(W); got {got}.")
    heads = max(len(layer) for layer in patterns.names)
    cell = max(44.0, *(0.8 * text_width(name) + 10 for layer in patterns.names for name in layer))
    elements = [text_element(MARGIN, MARGIN + 6, title, 14, bold=True)]
    top = MARGIN + 40
    for head in range(heads):
        middle = MARGIN + _LEFT + (head + 0.5) * cell
        elements.append(text_element(middle, top - 8, f"head {head}", 10, PALE, "middle"))
    for n, layer in enumerate(patterns.names):
        y = top + n * _CELL_HEIGHT
        elements.append(text_element(MARGIN, y + 17, f"layer {n}", 11, PALE))
        for head, name in enumerate(layer):
            x, share = MARGIN + _LEFT + head * cell, patterns.share(n, head)
            fill = f'fill="{GROUND}"' if name == "mixed" else tint_fill(share)
            border = (
                f'stroke="{HUES[0]}" stroke-width="2"'
                if name == "induction"
                else f'stroke="{PALE}" stroke-opacity="0.25"'
            )
            elements.append(rect(x + 1, y + 1, cell - 2, _CELL_HEIGHT - 2, f"{fill} {border}"))
            ink = PALE if name == "mixed" else GROUND if share > 0.55 else INK
            elements.append(text_element(x + cell / 2, y + 17, name, 10, ink, "middle"))
    bottom = top + len(patterns.names) * _CELL_HEIGHT
    return document(title, _sentence(patterns), MARGIN * 2 + _LEFT + heads * cell, bottom + MARGIN, elements, width)


def _sentence(patterns: HeadPatterns) -> str:
    """How many heads have each pattern, for readers who do not see the picture."""
    names = [name for layer in patterns.names for name in layer]
    counts = sorted({name: names.count(name) for name in names}.items(), key=lambda item: -item[1])
    return "Heads by pattern: " + ", ".join(f"{name} {count}" for name, count in counts) + "."
