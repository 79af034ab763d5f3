"""The key-value cache of a layer, for generation one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Cache", "check_cache", "check_caches"]


class Cache:
    """Keys and values of the tokens so far, for generation one token at a time.

    A layer's `forward` and `see` append the keys and values of their input; `weights` only reads the cache.

    Attributes:
        k: Keys ``(b, g, n, d)``, None while empty.
        v: Values ``(b, g, n, e)``, None while empty.
        memory: The memory that cross-attention filled the cache from.

    Example:
        >>> from regard.nn import SelfAttention
        >>> layer, cache = SelfAttention(16, heads=4, causal=True), Cache()
        >>> x = torch.randn(1, 3, 16)
        >>> steps = [layer(x[:, n : n + 1], cache=cache) for n in range(3)]
        >>> len(cache), torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
        (3, True)
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.memory: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.shape[-2]

    def __repr__(self) -> str:
        return f"Cache({len(self)} position{'s' * (len(self) != 1)})"

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Cached keys and values followed by k and v; the cache itself is unchanged.

        Args:
            k: New keys ``(b, g, t, d)``.
            v: New values ``(b, g, t, e)``.

        Returns:
            Keys ``(b, g, n + t, d)`` and values ``(b, g, n + t, e)``.

        Raises:
            ValueError: The cache belongs to another batch or another number of heads.

        Example:
            >>> cache = Cache()
            >>> cache.k, cache.v = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
            >>> cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))[0].shape, len(cache)
            (torch.Size([1, 2, 4, 4]), 3)
        """
        if self.k is None or self.v is None:
            return k, v
        if self.k.shape[:-2] != k.shape[:-2]:
            cached, new = (tuple(x.shape[:-2]) for x in (self.k, k))
            raise ValueError(
                f"this cache holds keys of (batch, heads) {cached}, got {new}: begin a new one with Cache()."
            )
        return torch.cat([self.k, k], -2), torch.cat([self.v, v], -2)

    def reorder(self, sequences: Tensor) -> None:
        """Select sequences of the batch, in this order: the surviving beams of a beam search.

        Args:
            sequences: Indices ``(n,)`` into the batch axis.

        Example:
            >>> cache = Cache()
            >>> cache.k = cache.v = torch.arange(3.0).view(3, 1, 1, 1)
            >>> cache.reorder(torch.tensor([2, 2, 0]))
            >>> cache.k.flatten()
            tensor([2., 2., 0.])
        """
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, sequences), self.v.index_select(0, sequences)
        if self.memory is not None:
            self.memory = self.memory.index_select(0, sequences)


def check_cache(cache: Any) -> None:
    """Refuse another object in the place of a layer's cache: `nn.MultiheadAttention` is called with (x, x, x)."""
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(
            f"cache must be a Cache(); got {type(cache).__name__}. A layer is called with x, or with x and memory: "
            "it makes queries, keys and values itself."
        )


def check_caches(cache: Any) -> None:
    """Refuse another object in the place of a model's caches: models of transformers take a mask there."""
    if cache is not None and not isinstance(cache, list):
        raise TypeError(
            f"cache must be what model.cache() returned; got {type(cache).__name__}. A mask is passed as mask=."
        )
