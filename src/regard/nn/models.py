"""Two complete models: a language model (next token) and a translator (encoder and decoder)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..core.masks.kinds import Mask, padding
from ..core.types import MaskLike
from .block import Block
from .cache import Cache, check_caches
from .embedding import look_up
from .encoder_decoder import Decoder, Encoder
from .options import BlockOptions, ModelOptions, check_layer_options, typed_as
from .positions import Learned, Positions, PositionsLike, Rotary, as_positions
from .probe import Probe

__all__ = ["LanguageModel", "Translator"]


class _TokenEmbedding(nn.Module):
    """Token ids to vectors with positions, and vectors to logits by the same (tied) table."""

    def __init__(
        self, vocabulary: int, dim: int, positions: Positions | None, dropout: float, scale: float | None = None
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(dim) if scale is None else scale
        self.table = nn.Embedding(vocabulary, dim)
        self.positions = None if isinstance(positions, Rotary) else positions
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = look_up(self.table, ids, "ids") * self.scale  # b t dim
        return self.dropout(x if self.positions is None else self.positions.add_to(x, start))

    def logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.table.weight)


class LanguageModel(nn.Module):
    """A decoder-only language model: embeddings, causal blocks, logits by the tied embedding table.

    Args:
        vocabulary: Number of tokens.
        dim: Size of the vectors.
        heads: Number of attention heads per block.
        layers: Number of blocks.
        context: Number of tokens it is trained to look back; learned positions end there.
        dropout: Share dropped while training, of embeddings and residual branches.
        positions: "rotary" (in every layer), "sinusoidal" or "learned" (added to the embeddings), an object, or None.
        embedding_scale: Factor of the embeddings. Default: √dim.
        block: Further arguments of `Block`.

    Example:
        >>> model = LanguageModel(65, dim=16, heads=2, layers=2)
        >>> model(torch.randint(65, (3, 10))).shape
        torch.Size([3, 10, 65])
    """

    def __init__(
        self, vocabulary: int, *, dim: int = 128, heads: int = 4, layers: int = 4, context: int = 64,
        dropout: float = 0.0, positions: PositionsLike | None = "rotary", embedding_scale: float | None = None,
        **block: Unpack[ModelOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        check_layer_options(self, block, ModelOptions)
        kind = as_positions(positions, dim, context)
        self.context = context
        self.embedding = _TokenEmbedding(vocabulary, dim, kind, dropout, embedding_scale)
        rotary = kind if isinstance(kind, Rotary) else None
        self.body = Encoder(dim, heads, layers, dropout=dropout, positions=rotary, causal=True, **block)
        _initialise(self, depth=2 * layers)

    def cache(self) -> list[list[Cache]]:
        """Empty caches of all blocks, for `forward`.

        Returns:
            For each block the caches of its attention layers.

        Example:
            >>> model = LanguageModel(65, dim=16, heads=2).eval()
            >>> caches, ids = model.cache(), torch.randint(65, (1, 4))
            >>> steps = [model(ids[:, n : n + 1], caches) for n in range(4)]
            >>> torch.allclose(torch.cat(steps, 1), model(ids), atol=1e-4)
            True
        """
        return self.body.cache()

    def forward(
        self, ids: Tensor, cache: list[list[Cache]] | None = None, probe: Probe | None = None,
        mask: MaskLike | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits of the next token at every position.

        Args:
            ids: Token ids ``(b, t)``.
            cache: Caches from `cache()`, for generation.
            probe: Collects statistics of every attention layer.
            mask: Further mask, combined with the causal one.

        Returns:
            Logits ``(b, t, vocabulary)``.

        Example:
            >>> LanguageModel(65, dim=16)(torch.randint(65, (3, 10)), mask=regard.window(4, 0)).shape
            torch.Size([3, 10, 65])
        """
        check_caches(cache)
        start = 0 if cache is None else len(cache[0][0])
        return self.embedding.logits(self.body(self.embedding(ids, start), mask, cache, probe))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Translator(nn.Module):
    """An encoder-decoder model; both languages share one vocabulary and one embedding table.

    The sentences of a batch are padded on the right with token 0, which attention never sees.

    Args:
        vocabulary: Number of tokens.
        dim: Size of the vectors.
        heads: Number of attention heads per block.
        layers: Number of blocks, of the encoder and of the decoder each.
        dropout: Share dropped while training, of embeddings and residual branches.
        positions: "rotary" (in every layer), "sinusoidal" or "learned" (added to the embeddings), an object, or None.
        block: Further arguments of `Block`.

    Example:
        >>> model = Translator(100, dim=16, heads=2, layers=2)
        >>> model(torch.randint(1, 100, (3, 7)), torch.randint(1, 100, (3, 9))).shape
        torch.Size([3, 9, 100])
    """

    #: Id of the padding token.
    PAD = 0

    def __init__(
        self, vocabulary: int, *, dim: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.0,
        positions: PositionsLike | None = "rotary", **block: Unpack[ModelOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        check_layer_options(self, block, ModelOptions)
        kind = as_positions(positions, dim)
        options: BlockOptions = {"dropout": dropout, "positions": kind if isinstance(kind, Rotary) else None, **block}
        self.embedding = _TokenEmbedding(vocabulary, dim, kind, dropout)
        self.encoder = Encoder(dim, heads, layers, **options)
        self.decoder = Decoder(dim, heads, layers, **options)
        _initialise(self, depth=2 * layers)

    def forward(self, source: Tensor, target: Tensor, probe: Probe | None = None) -> Tensor:
        """Logits of the next target token at every position.

        Args:
            source: Token ids ``(b, n)``, padded with 0.
            target: Token ids so far ``(b, t)``, beginning with a start token.
            probe: Collects statistics of every attention layer, encoder first.

        Returns:
            Logits ``(b, t, vocabulary)``.

        Example:
            >>> model = Translator(100, dim=16, layers=1)
            >>> model(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 4], [1, 4]])).shape
            torch.Size([2, 2, 100])
        """
        memory, visible = self.encode(source, probe)
        return self.decode(target, memory, visible, probe=probe)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def max_positions(self) -> int | None:
        """Number of learned positions; None where positions have no limit.

        Example:
            >>> Translator(100, dim=16, positions="learned").max_positions
            1024
        """
        return len(self.embedding.positions.table) if isinstance(self.embedding.positions, Learned) else None

    def lengths(self, source: Tensor) -> Tensor:
        """Length of every sentence, up to its last token that is not padding.

        Args:
            source: Token ids ``(b, n)``, padded with 0.

        Returns:
            Lengths ``(b,)``.

        Example:
            >>> Translator(100, dim=16).lengths(torch.tensor([[5, 6, 7], [8, 9, 0]]))
            tensor([3, 2])
        """
        numbers = torch.arange(1, source.shape[-1] + 1, device=source.device)
        return ((source != self.PAD) * numbers).amax(-1)

    def encode(self, source: Tensor, probe: Probe | None = None, *, copies: int = 1) -> tuple[Tensor, Mask]:
        """Run the encoder.

        Args:
            source: Token ids ``(b, n)``, padded with 0.
            probe: Collects statistics of every attention layer.
            copies: How often each sentence's memory is repeated, one after the other: hypotheses of a beam search.

        Returns:
            The memory ``(b · copies, n, dim)``, and the mask that hides its padding.

        Example:
            >>> memory, visible = Translator(100, dim=16).encode(torch.tensor([[5, 6, 7], [8, 9, 0]]))
            >>> memory.shape
            torch.Size([2, 3, 16])
        """
        lengths = self.lengths(source)
        visible = padding(lengths)
        memory = self.encoder(self.embedding(source), visible, probe=probe)
        if copies == 1:
            return memory, visible
        return memory.repeat_interleave(copies, 0), padding(lengths.repeat_interleave(copies))

    def decode(
        self, target: Tensor, memory: Tensor | None, visible: MaskLike | None,
        cache: list[list[Cache]] | None = None, probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the decoder.

        Args:
            target: Token ids ``(b, t)``; with a cache, only the new ones.
            memory: The encoder's output ``(b, n, dim)``; None with filled caches.
            visible: The mask from `encode`.
            cache: Caches from ``decoder.cache()``, for generation.
            probe: Collects statistics of every attention layer.

        Returns:
            Logits ``(b, t, vocabulary)`` of the token after each target token.

        Example:
            >>> model = Translator(100, dim=16)
            >>> memory, visible = model.encode(torch.tensor([[5, 6, 7]]))
            >>> model.decode(torch.tensor([[1]]), memory, visible).shape
            torch.Size([1, 1, 100])
        """
        start = 0 if cache is None else len(cache[0][0])
        x = self.decoder(self.embedding(target, start), memory, None, visible, cache, probe)
        return self.embedding.logits(x)


@torch.no_grad()
def _initialise(model: nn.Module, depth: int) -> None:
    """Variance-preserving weights; outputs onto the residual stream are divided by √depth, as in GPT-2."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):  # scaled by √dim in forward: as large as sinusoidal positions
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.embedding_dim))
    for module in model.modules():
        if isinstance(module, Block):
            parts = [module.attention, module.cross]
            outputs = [part.output for part in parts if part is not None] + [module.feed_forward.outer]
            for linear in outputs:
                if isinstance(linear, nn.Linear):
                    linear.weight.div_(math.sqrt(depth))
