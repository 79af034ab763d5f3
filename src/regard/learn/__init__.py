"""Training of small language models and translators, to be looked into.

`lm` and `translate` train, `open_model` opens what they saved, `history` reads the statistics of every head from the
run. On the command line: `regard learn`, `regard generate`, `regard translate`.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_getattr

if TYPE_CHECKING:
    from .checkpoint import is_checkpoint
    from .settings import LMSettings, TranslateSettings
    from .trained import Trained, history, open_model
    from .training import Diverged, Result, lm, translate

__all__ = [
    "Diverged",
    "LMSettings",
    "Result",
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
        "checkpoint": ("is_checkpoint",),
        "settings": ("LMSettings", "TranslateSettings"),
        "trained": ("Trained", "history", "open_model"),
        "training": ("Diverged", "Result", "lm", "translate"),
    },
)
