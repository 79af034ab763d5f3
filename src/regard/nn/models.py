"""Two whole models: one that guesses the next token, and one that translates. Imports `stack` and `positions`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..core.masks import Mask, padding
from .attention import Cache, Probe
from .block import Block
from .encoder_decoder import Decoder, Encoder
from .positions import Learned, Positions, Rotary, as_positions

__all__ = ["LanguageModel", "Translator"]


class _Words(nn.Module):
    """Token numbers to vectors with positions, and vectors to scores over the vocabulary by the same table."""

    def __init__(self, vocabulary: int, dim: int, positions: Positions | None, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim)
        self.positions = None if isinstance(positions, Rotary) else positions
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.table(ids) * math.sqrt(self.table.embedding_dim)  # b t dim
        return self.dropout(x if self.positions is None else self.positions.add_to(x, start))

    def logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.table.weight)


class LanguageModel(nn.Module):
    """Guesses the next token: words, causal blocks, and a score for every word of the vocabulary.

    context    how many tokens it is trained to look back; learned positions end there
    positions  "rotary" (in every layer), "sinusoidal" or "learned" (added to the words once), or None
    block      what else Block takes

    >>> model = LanguageModel(65, dim=16, heads=2, layers=2)
    >>> model(torch.randint(65, (3, 10))).shape
    torch.Size([3, 10, 65])
    """

    def __init__(
        self, vocabulary: int, *, dim: int = 128, heads: int = 4, layers: int = 4, context: int = 64,
        dropout: float = 0.0, positions: Any = "rotary", **block: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        kind = as_positions(positions, dim, context)
        self.context = context
        self.words = _Words(vocabulary, dim, kind, dropout)
        turning = kind if isinstance(kind, Rotary) else None
        self.body = Encoder(dim, heads, layers, dropout=dropout, positions=turning, causal=True, **block)
        _initialise(self, depth=2 * layers)

    def cache(self) -> list[list[Cache]]:
        """Empty caches of all blocks, for `forward(ids, cache)`."""
        return self.body.cache()

    def forward(
        self, ids: Tensor, cache: list[list[Cache]] | None = None, probe: Probe | None = None, mask: Any = None
    ) -> Tensor:
        """Scores of the next token at every position, (b, t, vocabulary)."""
        start = 0 if cache is None else len(cache[0][0])
        return self.words.logits(self.body(self.words(ids, start), mask, cache, probe))


class Translator(nn.Module):
    """Reads a sentence in one language and writes it in another; both share one vocabulary and one table.

    Sentences of a batch are filled up on the right with token 0: nobody looks at what comes after the last other token.

    >>> model = Translator(100, dim=16, heads=2, layers=2)
    >>> model(torch.randint(1, 100, (3, 7)), torch.randint(1, 100, (3, 9))).shape
    torch.Size([3, 9, 100])
    """

    PAD = 0

    def __init__(
        self, vocabulary: int, *, dim: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.0,
        positions: Any = "rotary", **block: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        kind = as_positions(positions, dim)
        options = {"dropout": dropout, "positions": kind if isinstance(kind, Rotary) else None, **block}
        self.words = _Words(vocabulary, dim, kind, dropout)
        self.encoder = Encoder(dim, heads, layers, **options)
        self.decoder = Decoder(dim, heads, layers, **options)
        _initialise(self, depth=2 * layers)

    def forward(self, source: Tensor, target: Tensor, probe: Probe | None = None) -> Tensor:
        """Scores of the next target token at every position, (b, t, vocabulary); the target begins with a start."""
        memory, visible = self.encode(source, probe)
        return self.decode(target, memory, visible, probe=probe)

    @property
    def max_positions(self) -> int | None:
        """How many tokens have a position, where positions are learned; None: there is no end."""
        return len(self.words.positions.table) if isinstance(self.words.positions, Learned) else None

    def lengths(self, source: Tensor) -> Tensor:
        """How long each sentence of (b, n) tokens is: up to the last that does not fill up."""
        places = torch.arange(1, source.shape[-1] + 1, device=source.device)
        return ((source != self.PAD) * places).amax(-1)

    def encode(self, source: Tensor, probe: Probe | None = None) -> tuple[Tensor, Mask]:
        """What the encoder makes of (b, n) tokens, and which of it is real."""
        visible = padding(self.lengths(source))
        return self.encoder(self.words(source), visible, probe=probe), visible

    def decode(
        self, target: Tensor, memory: Tensor | None, visible: Any, cache: list[list[Cache]] | None = None,
        probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        """Scores of what comes after each target token."""
        start = 0 if cache is None else len(cache[0][0])
        x = self.decoder(self.words(target, start), memory, None, visible, cache, probe)
        return self.words.logits(x)


@torch.no_grad()
def _initialise(model: nn.Module, depth: int) -> None:
    """What has length 1 keeps it through every matrix; what is added to the residual stream shrinks with the depth."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):  # times √dim, words are as large as the waves of their positions
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.embedding_dim))
    for module in model.modules():
        if isinstance(module, Block):
            parts = [module.attention, module.cross]
            outer = [part.output for part in parts if part is not None] + [module.feed_forward.outer]
            for linear in outer:
                if isinstance(linear, nn.Linear):
                    linear.weight.div_(math.sqrt(depth))
