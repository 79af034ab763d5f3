"""Record the attention of any PyTorch model: `regard.record`, `regard.load`, `regard.watch`.

While the model runs: `hooks/` (interception, call sites, module hooks), `mask_recognition`, `calls`, `spill`,
`kv_cache`, `passes`, `observer`, `watcher`. Afterwards: `tokens`, `recording`, `slicing`, `head_metrics`,
`file` and `file_reader`.
"""

from .. import _lazy
from .file import RegardFileError
from .file_reader import load
from .observer import RefusedWarning, record
from .recording import Layer, Recording
from .watcher import AttentionWarning, Watch, watch

__all__ = [
    "AttentionWarning",
    "Layer",
    "Recording",
    "RefusedWarning",
    "RegardFileError",
    "Watch",
    "load",
    "record",
    "watch",
]

_lazy.publish(__name__)
