"""regard: the attention matrix as an object you can index, multiply and question, and that is never stored."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .door import attend, weights
from .mask import Mask, causal, documents, padding, window
from .matrix import Weights
from .score import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot, Score, Similarity

__version__ = "0.1.0"

__all__ = [
    "Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "Mask", "Recording", "ScaledDot", "Score", "Similarity",
    "Weights",
    "attend", "causal", "documents", "load", "padding", "record", "walk", "watch", "weights", "window",
]  # fmt: skip

if TYPE_CHECKING:
    from .look.walk import walk
    from .recorder import Recording, load, record, watch

#: Names whose rooms are entered only when they are used: `import regard` stays light.
_LATER = {
    "Recording": "recorder",
    "load": "recorder",
    "record": "recorder",
    "walk": "look.walk",
    "watch": "recorder",
}


def __getattr__(name: str) -> Any:
    if name in ("nn", "look"):
        return import_module(f".{name}", __name__)
    if room := _LATER.get(name):
        return getattr(import_module(f".{room}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
