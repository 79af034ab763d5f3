"""regard: the attention matrix as an object you can index, multiply and question, and that is never stored."""

from .door import attend, weights
from .mask import Mask, causal, documents, padding, window
from .matrix import Weights
from .score import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot, Score, Similarity

__version__ = "0.1.0"

__all__ = [
    "Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "Mask", "ScaledDot", "Score", "Similarity", "Weights",
    "attend", "causal", "documents", "padding", "weights", "window",
]  # fmt: skip
