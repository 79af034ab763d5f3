"""A BERT-like encoder: token ids in, one vector for every token out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..core.types import MaskLike
from .embedding import look_up
from .encoder_decoder import Encoder
from .options import ModelOptions, check_layer_options, typed_as
from .positions import Learned
from .probe import Probe

__all__ = ["TextEncoder"]


class TextEncoder(nn.Module):
    """An encoder of texts: word, position and segment vectors, their sum normed, and blocks that see all tokens.

    Args:
        vocabulary: Number of tokens.
        dim: Size of the vectors.
        heads: Number of attention heads per block.
        layers: Number of blocks.
        context: Number of positions.
        segments: Number of kinds of segments, such as first and second sentence.
        dropout: Share dropped while training, of embeddings and residual branches.
        block: Further arguments of `Block`. Norms come after the sums unless ``norm_first=True``.

    Example:
        >>> model = TextEncoder(100, dim=16, heads=2, layers=2)
        >>> model(torch.randint(100, (3, 7))).shape
        torch.Size([3, 7, 16])
    """

    def __init__(
        self, vocabulary: int, *, dim: int = 128, heads: int = 4, layers: int = 4, context: int = 512,
        segments: int = 2, dropout: float = 0.0, **block: Unpack[ModelOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        check_layer_options(self, block, ModelOptions)
        self.words = nn.Embedding(vocabulary, dim)
        self.positions = Learned(context, dim)
        self.segments = nn.Embedding(segments, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        options: ModelOptions = {"norm_first": False, **block}
        self.body = Encoder(dim, heads, layers, dropout=dropout, **options)

    def forward(
        self, ids: Tensor, mask: MaskLike | None = None, segments: Tensor | None = None, probe: Probe | None = None
    ) -> Tensor:
        """One vector for every token.

        Args:
            ids: Token ids ``(b, t)``.
            mask: Mask of self-attention in every block, for example `regard.padding(lengths)`.
            segments: The segment of every token ``(b, t)``. Default: all are of the first.
            probe: Collects statistics of every attention layer.

        Returns:
            Vectors ``(b, t, dim)``.

        Example:
            >>> model = TextEncoder(100, dim=16, heads=2)
            >>> model(torch.tensor([[5, 6, 7], [8, 9, 0]]), regard.padding([3, 2])).shape
            torch.Size([2, 3, 16])
        """
        segments = torch.zeros_like(ids) if segments is None else segments
        vectors = look_up(self.words, ids, "ids") + look_up(self.segments, segments, "segments")
        x = self.positions.add_to(vectors)  # b t dim
        return self.body(self.dropout(self.norm(x)), mask, probe=probe)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
