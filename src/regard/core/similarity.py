"""Similarities as engines compute them, on blocks (..., i, d) and (..., j, d) with the same leading axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .pytree import register_node

__all__ = ["Function", "Product", "TanhSum"]


@register_node
class Product:
    """scale · q kᵀ."""

    scale: float

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT) * self.scale


@register_node
class TanhSum:
    """Σ_a v_a tanh(q_a + k_a), of projected queries and keys. v is (*batch|1, h|1, 1, a)."""

    v: Tensor

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        v = self.v.mT.to(q.dtype)  # b h a 1
        v = v.reshape(*v.shape[:-2], *[1] * (q.ndim - v.ndim + 1), *v.shape[-2:])
        return (torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ v).squeeze(-1)


@register_node
class Function:
    """A user's similarity f(q, k, *parameters) on blocks."""

    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        s = self.function(q, k, *self.parameters)
        shape = (*q.shape[:-1], k.shape[-2])
        if not isinstance(s, Tensor) or s.shape != shape:
            got = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
            raise ValueError(
                f"a similarity f(q, k) must return scores {shape} for q {tuple(q.shape)} and k {tuple(k.shape)}; "
                f"got {got}. The dot product, for example, is lambda q, k: q @ k.mT."
            )
        return s
