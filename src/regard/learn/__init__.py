"""Learn: small language models and translators, trained here, to be looked into.

Rooms: `settings` (what can be chosen, with its defaults), `text` (tokens), `data` (batches; each a function of the seed
and the step), `tasks` (the two things that are learned), `training` (the loop), `progress` (what is shown meanwhile),
`checkpoint` (what is on the disk, and opened again), `generate` (sampling, beam search, BLEU), `command` (the verbs).
Imports `regard.nn`, `regard.watch` and the recorder's way to write files; tokenizers, safetensors, rich and sacrebleu
only when they are used.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_getattr

if TYPE_CHECKING:
    from .checkpoint import Trained, history, is_checkpoint, open_model
    from .settings import LMSettings, TranslateSettings
    from .training import Diverged, lm, translate

__all__ = [
    "Diverged",
    "LMSettings",
    "Trained",
    "TranslateSettings",
    "history",
    "is_checkpoint",
    "lm",
    "open_model",
    "translate",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "checkpoint": ("Trained", "history", "is_checkpoint", "open_model"),
        "settings": ("LMSettings", "TranslateSettings"),
        "training": ("Diverged", "lm", "translate"),
    },
)
