"""Look: pictures of attention in the terminal, in a page and in a notebook.

From words to pictures: `token_text` (special tokens, words, names), `token_groups` (weights of words), `layers` (one
sequence, layer by layer), `ranking` (which heads matter for a word), `spotlight` (one word lit, and all words),
`walk` (the six steps), `compare` with `alignment` (two recordings), `history` (training). One module for every medium:
`terminal`, `terminal_walk` and `terminal_compare` (with `text_layout`), `svg`, `page`. `view` and `options` join them,
`loading` opens models, `command` has the verbs of the command line.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_getattr

if TYPE_CHECKING:
    from .options import ViewOptions
    from .svg_patterns import draw_patterns
    from .view import View

__all__ = ["View", "ViewOptions", "draw_patterns"]

__getattr__ = lazy_getattr(
    __name__, {"options": ("ViewOptions",), "svg_patterns": ("draw_patterns",), "view": ("View",)}
)
