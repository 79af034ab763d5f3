"""Stacks of blocks: an encoder, and a decoder whose blocks also attend to the encoder's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn

from ..core.types import MaskLike
from .block import Block, make_norm
from .cache import Cache
from .options import BlockOptions, check_layer_options, typed_as
from .probe import Probe

__all__ = ["Decoder", "Encoder"]


class Encoder(nn.Module):
    """`layers` blocks, and a final norm where norms come first.

    Args:
        dim: Size of the vectors.
        heads: Number of attention heads per block.
        layers: Number of blocks.
        block: Further arguments of `Block`.

    Example:
        >>> Encoder(16, heads=4, layers=2)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, dim: int, heads: int = 1, layers: int = 1, **block: Unpack[BlockOptions]) -> None:
        super().__init__()
        check_layer_options(self, block, BlockOptions)
        self.blocks = nn.ModuleList(Block(dim, heads, **block) for _ in range(layers))
        first = block.get("norm_first", True)
        self.norm = make_norm(block.get("norm", "layer"), dim, block.get("bias", True)) if first else nn.Identity()

    def cache(self) -> list[list[Cache]]:
        """Empty caches of all blocks, for `forward`.

        Returns:
            For each block the caches of its attention layers.

        Example:
            >>> len(Encoder(16, layers=3).cache())
            3
        """
        return [block.cache() for block in self.blocks]  # type: ignore[operator]

    def forward(
        self, x: Tensor, mask: MaskLike | None = None, cache: list[list[Cache]] | None = None,
        probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        """Run all blocks.

        Args:
            x: Input ``(..., t, dim)``.
            mask: Mask of self-attention in every block.
            cache: Caches from `cache()`, for generation.
            probe: Collects statistics of every attention layer.

        Returns:
            Output ``(..., t, dim)``.

        Example:
            >>> lengths = torch.tensor([5, 3])
            >>> Encoder(16, heads=4)(torch.randn(2, 5, 16), regard.padding(lengths)).shape
            torch.Size([2, 5, 16])
        """
        for n, block in enumerate(self.blocks):
            x = block(x, mask=mask, cache=None if cache is None else cache[n], probe=probe)
        return self.norm(x)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Decoder(Encoder):
    """Causal blocks with cross-attention to a memory.

    Args:
        dim: Size of the vectors.
        heads: Number of attention heads per block.
        layers: Number of blocks.
        block: Further arguments of `Block`.

    Example:
        >>> Decoder(16, heads=4, layers=2)(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, dim: int, heads: int = 1, layers: int = 1, **block: Unpack[BlockOptions]) -> None:
        options: BlockOptions = {"causal": True, **block, "cross": True}
        super().__init__(dim, heads, layers, **options)

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor | None, mask: MaskLike | None = None, memory_mask: MaskLike | None = None,
        cache: list[list[Cache]] | None = None, probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        """Run all blocks.

        Args:
            x: Input ``(..., t, dim)``.
            memory: The encoder's output ``(..., n, dim)``; None with filled caches.
            mask: Mask of self-attention, combined with the causal one.
            memory_mask: Mask of cross-attention.
            cache: Caches from `cache()`, for generation.
            probe: Collects statistics of every attention layer.

        Returns:
            Output ``(..., t, dim)``.

        Example:
            >>> decoder, memory = Decoder(16, heads=4), torch.randn(1, 9, 16)
            >>> caches = decoder.cache()
            >>> [decoder(torch.randn(1, 1, 16), memory, cache=caches).shape[1] for _ in range(3)]
            [1, 1, 1]
        """
        for n, block in enumerate(self.blocks):
            x = block(x, memory, mask, memory_mask, None if cache is None else cache[n], probe)
        return self.norm(x)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]
