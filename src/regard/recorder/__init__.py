"""Look into any PyTorch model: `regard.record`, `regard.load`, `regard.watch`.

Rooms: `tap` (overhear operators in one thread), `seams` (every way attention passes), `where` (which module called),
`recognise` (masks in few words), `capture` (what is kept of a call), `stitch` (a generation as one matrix), `observe`
(the block), `tokens` (words of rows and columns), `recording`, `part` and `tables` (what can be asked), `file`
(.regard), `watch` (numbers while training), `hugging` (transformers). Nothing outside imports this room but
`regard/__init__.py`, when one of its names is used.
"""

from .file import RegardFileError, load
from .observe import RefusedWarning, record
from .recording import Layer, Recording
from .watch import AttentionWarning, Watch, qk_clip, watch

__all__ = [
    "AttentionWarning",
    "Layer",
    "Recording",
    "RefusedWarning",
    "RegardFileError",
    "Watch",
    "load",
    "qk_clip",
    "record",
    "watch",
]
