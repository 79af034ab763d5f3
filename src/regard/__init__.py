"""regard: the attention matrix as an object you can index, multiply and question, and that is never stored."""

from typing import TYPE_CHECKING

from .names import later

if TYPE_CHECKING:
    from .door import attend, weights
    from .look.walk import walk
    from .mask import Mask, causal, documents, padding, window
    from .matrix import Weights
    from .recorder import Recording, load, record, watch
    from .score import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot, Score, Similarity

__version__ = "0.1.0"

__all__ = [
    "Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "Mask", "Recording", "ScaledDot", "Score", "Similarity",
    "Weights",
    "attend", "causal", "documents", "load", "padding", "record", "walk", "watch", "weights", "window",
]  # fmt: skip

__getattr__ = later(
    __name__,
    {
        "door": ("attend", "weights"),
        "look.walk": ("walk",),
        "mask": ("Mask", "causal", "documents", "padding", "window"),
        "matrix": ("Weights",),
        "recorder": ("Recording", "load", "record", "watch"),
        "score": ("Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "ScaledDot", "Score", "Similarity"),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
