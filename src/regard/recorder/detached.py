"""Numbers of a recording that is cut from the autograd graph: `.backward()` through them says so.

A model that ran with gradients was recorded without `grad=True`. PyTorch's own error for its numbers would name
"element 0 of tensors", and `loss + penalty` would train without the penalty in silence. So these numbers are tensors of
a subclass whose `backward` is an error with the remedy. `detach()`, pickles and NumPy see plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.weights import Weights

__all__ = ["DetachedTensor", "DetachedWeights", "RecordedWeights", "as_detached"]

ADVICE = (
    "recorded weights are not part of the autograd graph: regard.record(model, grad=True) makes them part of it. For "
    "numbers that are constants on purpose call .detach() first."
)

#: Functions that walk the graph backwards.
_BACKWARD = (Tensor.backward, torch.autograd.grad)

#: Functions that take such a number for a plain tensor.
_PLAIN = (Tensor.detach, Tensor.__repr__, Tensor.__reduce_ex__, Tensor.__deepcopy__)


class DetachedTensor(Tensor):
    """A number of a recording, or one computed from it, outside the model's graph."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARD:
            raise RuntimeError(ADVICE)
        if func in _PLAIN:
            args = (args[0].as_subclass(Tensor), *args[1:])
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class RecordedWeights(Weights):
    """Weights of a recorded call; its values, if they were recorded, are in `Layer.values`."""

    keys_are_values = False


class DetachedWeights(RecordedWeights):
    """Weights of a recorded call that ran with gradients, without them: their answers are `DetachedTensor`s."""

    def _ask(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        results = super()._ask(*args, **kwargs)
        return {name: as_detached(x) for name, x in results.items()} if torch.is_grad_enabled() else results

    def _ask_rows(self, question: Any, *others: Any) -> list[Tensor]:
        results = super()._ask_rows(question, *others)
        return [as_detached(x) for x in results] if torch.is_grad_enabled() else results

    def _block(self, rows: Any, cols: Any) -> Tensor:
        block = super()._block(rows, cols)
        return as_detached(block) if torch.is_grad_enabled() else block


def as_detached(x: Tensor) -> Tensor:
    """A `DetachedTensor`; indices, and numbers with a graph of their own (`W @ v` with a trained v), stay plain."""
    return x if x.requires_grad or not x.is_floating_point() else x.as_subclass(DetachedTensor)
