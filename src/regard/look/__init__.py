"""Look: the picture of attention, in the terminal, in a page, in a notebook.

Rooms: `words` (tokens as people read them), `reading` (weights of words), `walk` (the six steps), `ranking` (which
heads matter for a word), `spot` (one word lit), `model` (what is looked at), then one room a face: `terminal` (with
`lines`, laid out in cells), `picture` (SVG), `page` (with `payload`, page.js and page.css); `view` holds them together,
`command` has the verbs.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_getattr

if TYPE_CHECKING:
    from .view import View

__all__ = ["View"]

__getattr__ = lazy_getattr(__name__, {"view": ("View",)})
