"""Small models of the recorder's tests, and what is asked of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.recorder import RefusedWarning


class Calls(nn.Module):
    """A module whose forward is any function; neither its class nor its name says attention."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Model(nn.Module):
    """A model of one module, `step`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.step = inner

    def forward(self, *args: Any) -> Any:
        return self.step(*args)


def recorded(inner: nn.Module, *args: Any) -> regard.Recording:
    """A recording of a module as the one step of a model; its output is the same as without."""
    model = Model(inner)
    plain = model(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusedWarning)
        with regard.record(model) as seen:
            y = model(*args)
    assert torch.equal(y, plain)
    return seen


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
