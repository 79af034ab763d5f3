"""Modules of transformers whose softmax is over chunks, landmarks or samples."""

from __future__ import annotations

__all__ = ["CHUNKED", "IN_CHUNKS"]

#: Modules that attend within chunks or to samples: their softmax is over keys that are not the sequence's positions.
CHUNKED = {
    "BigBirdBlockSparseAttention",
    "BigBirdPegasusBlockSparseAttention",
    "LEDEncoderSelfAttention",
    "LocalSelfAttention",
    "LongT5LocalAttention",
    "LongT5TransientGlobalAttention",
    "LongformerSelfAttention",
    "LSHSelfAttention",
    "ProphetNetNgramSelfAttention",
    "XLMProphetNetNgramSelfAttention",
    "NystromformerSelfAttention",
    "YosoSelfAttention",
}

IN_CHUNKS = "it attends to chunks, landmarks or samples, which are not positions of the sequence"
