"""Layers that train, on regard's own operation: every one of them can be asked for its weights.

Rooms: `positions` (where a word stands), `scoring` (scores with parameters), `attention` (the layers themselves, their
cache, what can be asked on the way), `block` (attention and feed-forward), `stack` (encoder and decoder), `models`
(language model and translator), `exchange` (to and from torch.nn). Imports the door and what is below it.
"""

from .attention import Cache, CrossAttention, Probe, SelfAttention
from .block import Block, FeedForward
from .encoder_decoder import Decoder, Encoder
from .models import LanguageModel, Translator
from .positions import Learned, Positions, Rotary, Sinusoidal

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
