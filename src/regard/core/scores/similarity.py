"""Similarities as engines compute them, on blocks (..., i, d) and (..., j, d) with the same leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..broadcast import repeat_kv
from ..pytree import register_node
from ..torch_state import in_functorch, is_tracing

__all__ = ["Distance", "Function", "Product", "ReluSum", "SimilarityKernel", "TanhSum"]


#: |q − k|² as a share of |q|² below which |q|² + |k|² − 2 q·k has lost a bit or more.
NEAR = 0.5
#: The share of such cells from which on all cells of a tile are computed from differences.
MANY = 1 / 16


class SimilarityKernel:
    """The lowered form of a score's similarity. Engines ask for its attributes and need to know no class by name."""

    #: Its name in the kernels of engines; None for a Python function, which only plain PyTorch tiles can call.
    kernel_op: ClassVar[str | None] = None
    #: The factor of a product of queries and keys, which engines may fold into either.
    scale: float = 1.0
    #: The first modifiers of a problem that belong to the similarity itself.
    own_modifiers: ClassVar[int] = 0
    #: The factor of squared distances that products and these modifiers make up; 0 where there are none.
    distance_scale: float = 0.0
    #: The number NEAR of `Distance`, for kernels.
    distance_near: ClassVar[float] = 0.0

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores (..., i, j) of q (..., i, d) and k (..., j, d)."""
        raise NotImplementedError

    def grouped(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores (b, h, i, j) of q (b, h, i, d) and k (b, g, j, d), where heads share keys."""
        return self.pairwise(q, repeat_kv(k, q.shape[1]))

    def corrected(self, s: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Scores (b, h, i, j) after its own modifiers, without the errors of these.

        Args:
            s: Scores ``(b, h, i, j)``.
            q: Queries ``(b, h, i, d)``.
            k: Keys ``(b, g, j, d)``, or keys of each row ``(b, h, i, j, d)``.
        """
        return s

    def own_biases(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """The tensors of its own modifiers, from all queries and keys."""
        return ()

    def with_own_grads(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of q and k, with those that reach them through its own biases."""
        return dq, dk

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
class Distance(Product):
    """−distance_scale · |q − k|², as a product and two modifiers: a bias of each row and one of each key.

    Where q and k are near, the three terms cancel: such scores are computed from differences instead. On a GPU, and
    inside torch.func and torch.compile, they stay as they are: the host cannot ask which cells these are.
    """

    distance_scale: float
    own_modifiers = 2
    distance_near = NEAR

    def own_biases(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        row, key = (_squared_length(x) * -self.distance_scale for x in (q, k))
        return row.unsqueeze(-1), repeat_kv(key.unsqueeze(-2), q.shape[-3])  # *batch h i 1, *batch h 1 j

    def with_own_grads(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
        row, key = own
        key = key.unflatten(-3, (k.shape[-3], -1)).sum(-3).mT if key.shape[-3] != k.shape[-3] else key.mT
        return dq - 2 * self.distance_scale * q * row, dk - 2 * self.distance_scale * k * key

    def corrected(self, s: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if s.device.type != "cpu" or in_functorch() or is_tracing():
            return s
        with torch.no_grad():
            squared = q.square().sum(-1, keepdim=True) * self.distance_scale  # b h i 1
            near = (s > -NEAR * squared) & (squared > 0)
            if not (count := int(near.count_nonzero())):
                return s
            if count < MANY * near.numel() and k.ndim == 4:
                b, h, i, j = cells = near.nonzero(as_tuple=True)
                delta = q[b, h, i] - k[b, h // (q.shape[1] // k.shape[1]), j]
                exact = s.detach().index_put(cells, 0 - delta.square().sum(-1) * self.distance_scale)  # 0 −: not −0
            else:
                exact = torch.where(near, self._direct(q, k), s)
        return s + (exact - s).detach() if s.requires_grad else exact  # the gradient is that of s

    def _direct(self, q: Tensor, k: Tensor) -> Tensor:
        """The score of every cell from differences."""
        if k.ndim == 5:
            return 0 - (q.unsqueeze(-2) - k).square().sum(-1) * self.distance_scale
        keys = repeat_kv(k, q.shape[1]).double()
        distances = torch.cdist(q.double(), keys, compute_mode="donot_use_mm_for_euclid_dist")
        return (0 - distances.square_() * self.distance_scale).to(q.dtype)


def _squared_length(x: Tensor) -> Tensor:
    """|x|², added up in float64: its error is that of every score of a row or a key."""
    squared = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square()
    return squared if x.dtype == torch.float64 else squared.float()


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

    def unpacked(self, q: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Queries (..., n, i, d) of every head and their weights (..., n, i), each head for itself."""
        queries, weights = q.split((self.heads * size, self.heads), -1)
        return queries.unflatten(-1, (self.heads, size)).transpose(-3, -2), weights.mT

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
        if not isinstance(s, Tensor) or s.shape != shape or not s.is_floating_point():
            got = f"{tuple(s.shape)} of {s.dtype}" if isinstance(s, Tensor) else type(s).__name__
            raise ValueError(
                f"a similarity f(q, k) must return scores {shape} of floating point for "
                f"q {tuple(q.shape)} and k {tuple(k.shape)}; got {got}. "
                "The dot product, for example, is lambda q, k: q @ k.mT."
            )
        return s
