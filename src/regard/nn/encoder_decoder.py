"""Blocks on top of each other: an encoder, and a decoder that also looks at what the encoder made. Imports `block`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .attention import Cache, Probe
from .block import Block, norm_of

__all__ = ["Decoder", "Encoder"]


class Encoder(nn.Module):
    """`layers` blocks, and a last norm where norms come first; further options are those of Block.

    >>> Encoder(16, heads=4, layers=2)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, dim: int, heads: int = 1, layers: int = 1, **block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads, **block) for _ in range(layers))
        first = block.get("norm_first", True)
        self.norm = norm_of(block.get("norm", "layer"), dim, block.get("bias", True)) if first else nn.Identity()

    def cache(self) -> list[list[Cache]]:
        """Empty caches of all blocks."""
        return [block.cache() for block in self.blocks]  # type: ignore[operator]

    def forward(
        self, x: Tensor, mask: Any = None, cache: list[list[Cache]] | None = None, probe: Probe | None = None
    ) -> Tensor:
        for n, block in enumerate(self.blocks):
            x = block(x, mask=mask, cache=None if cache is None else cache[n], probe=probe)
        return self.norm(x)


class Decoder(Encoder):
    """Blocks that see what was written so far (causal) and, by cross-attention, a memory.

    >>> Decoder(16, heads=4, layers=2)(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, dim: int, heads: int = 1, layers: int = 1, **block: Any) -> None:
        super().__init__(dim, heads, layers, **{"causal": True, **block, "cross": True})

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor | None, mask: Any = None, memory_mask: Any = None,
        cache: list[list[Cache]] | None = None, probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        for n, block in enumerate(self.blocks):
            x = block(x, memory, mask, memory_mask, None if cache is None else cache[n], probe)
        return self.norm(x)
