"""Look into any PyTorch model: `regard.record`, `regard.load`, `regard.watch`.

Rooms, from the model inwards: `tap` (overhear operators in one thread), `where` (which module called), `seams` and
`byhand` (every way attention passes), `layers` (those of regard.nn), `hugging` (transformers), `recognise` (masks in
few words), `capture` and `spill` (what is kept of a call), `stitch` and `passes` (a generation as one matrix),
`attached` (hooks, and what was not heard), `observe` (the block). And outwards: `tokens`, `recording`, `part`,
`tables` (what can be asked), `file` (.regard), `watching` (numbers while training). Outside, only
`regard/__init__.py` and `regard.learn` import this room, when one of its names is used.
"""

from .file import RegardFileError, load
from .observer import RefusedWarning, record
from .recording import Layer, Recording
from .watcher import AttentionWarning, Watch, qk_clip, watch

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
