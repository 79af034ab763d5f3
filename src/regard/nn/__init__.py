"""Trainable layers on regard's own attention: every layer answers `weights(x)` and `see(x, …)` for its input.

From small to large: positions, `SelfAttention` and `CrossAttention` (with `Cache` and `Probe`), `Block`, `Encoder` and
`Decoder`, `LanguageModel`, `Translator` and `TextEncoder`. Weights go to and from the layers of `torch.nn`, and come
from BERT-like and GPT-2 models of transformers by `from_pretrained`.
"""

from .. import _lazy
from .attention import CrossAttention, SelfAttention
from .block import Block, FeedForward
from .cache import Cache
from .encoder_decoder import Decoder, Encoder
from .models import LanguageModel, Translator
from .positions import Learned, Positions, Rotary, Sinusoidal
from .pretrained import from_pretrained
from .probe import Probe
from .text_encoder import TextEncoder

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
    "TextEncoder",
    "Translator",
    "from_pretrained",
]

_lazy.publish(__name__)
