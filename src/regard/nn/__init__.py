"""Trainable layers on regard's own attention: every layer answers `weights(x)` and `see(x, …)` for its input.

From small to large: positions, `SelfAttention` and `CrossAttention` (with `Cache` and `Probe`), `Block`, `Encoder` and
`Decoder`, `LanguageModel` and `Translator`. Weights go to and from the layers of `torch.nn`.
"""

from .attention import CrossAttention, SelfAttention
from .block import Block, FeedForward
from .cache import Cache
from .encoder_decoder import Decoder, Encoder
from .models import LanguageModel, Translator
from .positions import Learned, Positions, Rotary, Sinusoidal
from .probe import Probe

__all__ = [
    "Block",
    "Cache",
    "CrossAttention",
    "Decoder",
    "Encoder",
    "FeedForward",
    "LanguageModel",
    "Learned",
    "Positions",
    "Probe",
    "Rotary",
    "SelfAttention",
    "Sinusoidal",
    "Translator",
]
