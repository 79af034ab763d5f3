"""Numbers of a recording that is cut from the autograd graph: `.backward()` through them says so.

A model was recorded without `grad=True`. PyTorch's own error for its numbers would name "element 0 of tensors", so they
are tensors of a subclass whose `backward` is an error with the remedy, wherever gradients are on. Where the model ran
with gradients, `loss + penalty` would train without the penalty in silence: that is an error too. `detach()`, pickles
and NumPy see plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.weights import Weights

__all__ = ["ConstantTensor", "ConstantWeights", "DetachedTensor", "DetachedWeights", "RecordedWeights", "as_detached"]

ADVICE = (
    "recorded weights are not part of the autograd graph: regard.record(model, grad=True) makes them part of it. For "
    "numbers that are constants on purpose call .detach() first."
)

#: Functions that walk the graph backwards.
_BACKWARD = (Tensor.backward, torch.autograd.grad)

#: Functions that take such a number for a plain tensor.
_PLAIN = (Tensor.detach, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__)


class ConstantTensor(Tensor):
    """A number of a recording under `torch.no_grad`, or one computed from it: a constant of what has a graph."""

    @classmethod
    def _refuses(cls, loss: Any) -> bool:
        losses = loss if isinstance(loss, (tuple, list)) else (loss,)
        return not any(isinstance(x, Tensor) and x.requires_grad for x in losses)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARD and cls._refuses(args[0] if args else (kwargs or {}).get("outputs")):
            raise RuntimeError(ADVICE)
        if func in _PLAIN:
            args = (args[0].as_subclass(Tensor), *args[1:])
            return func(*args, **(kwargs or {}))
        return _with_plain_indices(super().__torch_function__(func, types, args, kwargs))


def _with_plain_indices(out: Any) -> Any:
    """The result of a function, in which positions and flags are plain tensors.

    They have no gradient that could be lost; but what they index is the user's own, and would become such a number.
    """
    if isinstance(out, ConstantTensor):
        return out if out.is_floating_point() or out.is_complex() else out.as_subclass(Tensor)
    if isinstance(out, (tuple, list)) and any(isinstance(x, ConstantTensor) for x in out):
        parts = map(_with_plain_indices, out)
        return type(out)(parts)  # PyTorch makes its named tuples of one sequence as well
    return out


class DetachedTensor(ConstantTensor):
    """A number of a recording of a model that ran with gradients, or one computed from it."""

    @classmethod
    def _refuses(cls, loss: Any) -> bool:
        return True


class RecordedWeights(Weights):
    """Weights of a recorded call; its values, if they were recorded, are in `Layer.values`."""

    _keys_are_values = False


class ConstantWeights(RecordedWeights):
    """Weights of a call that was recorded without gradients: their answers are `ConstantTensor`s."""

    _answers: ClassVar[type[ConstantTensor]] = ConstantTensor
    _replays_questions = False

    def _ask(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: self._detached(x) for name, x in super()._ask(*args, **kwargs).items()}

    def _ask_rows(self, question: Any, *others: Any) -> list[Tensor]:
        return [self._detached(x) for x in super()._ask_rows(question, *others)]

    def _block(self, rows: Any, cols: Any) -> Tensor:
        return self._detached(super()._block(rows, cols))

    def _detached(self, x: Tensor) -> Tensor:
        return as_detached(x, self._answers) if torch.is_grad_enabled() else x


class DetachedWeights(ConstantWeights):
    """The same where the model ran with gradients: their answers are `DetachedTensor`s."""

    _answers = DetachedTensor


def as_detached(x: Tensor, kind: type[ConstantTensor] = DetachedTensor) -> Tensor:
    """A tensor of that kind; indices, and numbers with a graph of their own (`W @ v` with a trained v), stay plain."""
    return x if x.requires_grad or not x.is_floating_point() else x.as_subclass(kind)
