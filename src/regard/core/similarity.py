"""Similarities as engines compute them, on blocks (..., i, d) and (..., j, d) with the same leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from .broadcast import repeat_kv
from .pytree import register_node

__all__ = ["Function", "Product", "ReluSum", "SimilarityKernel", "TanhSum"]


class SimilarityKernel:
    """The lowered form of a score's similarity. Engines ask for its attributes and need to know no class by name."""

    #: Its name in the kernels of engines; None for a Python function, which only plain PyTorch tiles can call.
    kernel_op: ClassVar[str | None] = None
    #: The factor of a product of queries and keys, which engines may fold into either.
    scale: float = 1.0

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores (..., i, j) of q (..., i, d) and k (..., j, d)."""
        raise NotImplementedError

    def grouped(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores (b, h, i, j) of q (b, h, i, d) and k (b, g, j, d), where heads share keys."""
        return self.pairwise(q, repeat_kv(k, q.shape[1]))

    def numbers_per_cell(self, size: int) -> int:
        """How many numbers `pairwise` holds at once for each score, with queries of this size."""
        return 1


@register_node
class Product(SimilarityKernel):
    """scale · q kᵀ."""

    scale: float
    kernel_op = "product"

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT) * self.scale

    def grouped(self, q: Tensor, k: Tensor) -> Tensor:
        # Heads that share keys become more rows: no copy of the keys.
        b, g, j, d = k.shape
        _, h, i, _ = q.shape
        # Not -1, which is ambiguous where an axis is empty.
        return self.pairwise(q.reshape(b, g, h // max(g, 1) * i, d), k).reshape(b, h, i, j)


@register_node
class TanhSum(SimilarityKernel):
    """Σ_a v_a tanh(q_a + k_a), of projected queries and keys. v is (*batch|1, h|1, 1, a)."""

    v: Tensor
    kernel_op = "tanh_sum"

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        v = self.v.mT.to(q.dtype)  # b h a 1
        v = v.reshape(*v.shape[:-2], *[1] * (q.ndim - v.ndim + 1), *v.shape[-2:])
        return (torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ v).squeeze(-1)

    def numbers_per_cell(self, size: int) -> int:
        return size


@register_node
class ReluSum(SimilarityKernel):
    """Σ_n w_n ReLU(q_n · k), of packed queries: all q_n of a row, then all w_n."""

    heads: int
    kernel_op = "relu_sum"

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        d = k.shape[-1]
        w = q[..., self.heads * d :]
        heads = [q[..., n * d : (n + 1) * d] for n in range(self.heads)]
        return sum((w[..., n : n + 1] * torch.relu(x @ k.mT) for n, x in enumerate(heads)), q.new_zeros(()))

    def numbers_per_cell(self, size: int) -> int:
        return 2


@register_node
class Function(SimilarityKernel):
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
