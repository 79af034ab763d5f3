"""Small models of the recorder's tests, and what is asked of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Two heads whose queries, keys and values come from one projection."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def weights(self, x: Tensor) -> Tensor:
        """The weights that `forward` uses."""
        q, k, _ = self.heads(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def hooks_of(model: nn.Module) -> int:
    """Number of forward hooks on a model and its parts."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
