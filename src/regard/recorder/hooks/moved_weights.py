"""Operators between a softmax and its values that reduce, join or move weights along an axis.

Along another axis than that of the keys, what they give are weights still, as the model computed them: the mean over
heads, or rows that are joined. Along the keys, the position of a weight is unknown afterwards: such
attention is named where it meets values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from . import tap
from .softmax_trail import Alias, EagerTracker, OpenSoftmax, axes_of_keys, axis_of_keys, storage_of

__all__ = ["BY_NAME", "OnJoined", "OnMoved", "OnReduced", "install", "mark_as_unknown", "on_two_weights"]


#: Those of these operators that put scores in another order; the others make other numbers of them.
MOVES_SCORES = ("flip", "roll", "index_select", "sort")


def install() -> None:
    """Intercept these operators while a softmax is open."""
    for name in ("amax", "amin", "max.dim", "min.dim"):
        tap.intercept(name, OnReduced(name), tap.FOLLOW_KEY)
    for name in ("cat", "concat", "stack"):
        tap.intercept(name, OnJoined(name), tap.FOLLOW_KEY)
    for name in ("flip", "roll"):
        tap.intercept(name, OnMoved(name, lambda call: call["dims"]), tap.FOLLOW_KEY)
    for name in ("index_select", "repeat_interleave.self_int", "cumsum", "cumprod", "sort"):
        tap.intercept(name, OnMoved(name, lambda call: [call["dim"]]), tap.FOLLOW_KEY)


def mark_as_unknown(softmax: OpenSoftmax, result: Tensor, operator: str) -> None:
    """The result is made of weights, and no longer weights whose keys are known."""
    reason = f"its weights pass through {operator} before they meet the values, after which their keys are not known"
    keys = result.shape[-1] if result.ndim else 1
    softmax.add(
        result, Alias(None, result.stride(-1) if result.ndim else 1, keys, reason, changed=True, lost_keys=True)
    )


def on_two_weights(eager: EagerTracker, operands: Sequence[Any], out: Tensor) -> bool:
    """Weights times the weights of another attention, or the same: those of two steps, which no softmax gives."""
    softmaxes = [softmax for x in operands if (softmax := eager.softmax_of(x)) is not None]
    if len(softmaxes) < 2 or any(softmax.product is None for softmax in softmaxes):
        return False
    mark_as_unknown(softmaxes[0], out, "a product with other weights")
    return True


def _carry_on(softmax: OpenSoftmax, operand: Tensor, result: Tensor, axis: int) -> None:
    """The result holds weights as well, with the keys along an axis from the end."""
    altered = softmax.aliases[storage_of(operand)].altered
    softmax.add(result, Alias(None, result.stride(axis), result.shape[axis], altered, changed=True))


class OnMoved:
    """Handler of an operator that moves weights along some axes; all of them, if it does not say which."""

    def __init__(self, name: str, axes: Callable[[dict[str, Any]], list[int]]) -> None:
        self.operator, self.axes = name.partition(".")[0], axes

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        listener.eager.count_operator()
        w = call["self"] if "self" in call else call["input"]
        result = out[0] if isinstance(out, tuple) else out
        if (softmax := listener.eager.softmax_of(w)) is None or not result.is_floating_point():
            if self.operator in MOVES_SCORES and w.ndim:
                listener.eager.move(w, result, [dim for dim in self.axes(call) if dim is not None], self.operator)
            return
        alias = softmax.aliases[storage_of(w)]
        axis = None if alias.dropped else axis_of_keys(w, alias)
        moved = [dim % w.ndim - w.ndim for dim in self.axes(call) if dim is not None]
        if not moved or axis is None or axis in moved:
            mark_as_unknown(softmax, result, self.operator)
        else:
            _carry_on(softmax, w, result, axis)


class OnReduced:
    """Handler of a mean or maximum: over heads it gives weights again, over keys it gives none."""

    def __init__(self, name: str) -> None:
        self.operator = name.partition(".")[0]

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        listener.eager.count_operator()
        w, result = call["self"], out[0] if isinstance(out, tuple) else out
        if (softmax := listener.eager.softmax_of(w)) is None:
            return
        alias = softmax.aliases[storage_of(w)]
        if len(axes_of_keys(w, alias)) > 1:  # exp before its axis is certain: this is the sum that divides it
            return
        axis = axis_of_keys(w, alias)
        dims = call["dim"] if isinstance(call["dim"], list | tuple) else [call["dim"]]
        reduced = [dim % w.ndim - w.ndim for dim in dims if dim is not None]
        if not reduced or axis is None or axis in reduced:
            return
        if alias.dropped:
            mark_as_unknown(softmax, result, self.operator)
            return
        _carry_on(softmax, w, result, axis if call["keepdim"] else axis + sum(dim > axis for dim in reduced))


class OnJoined:
    """Handler of cat and stack: chunks of rows, or heads, that were weighted one by one."""

    def __init__(self, name: str) -> None:
        self.operator = name

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
        eager = listener.eager
        eager.count_operator()
        place = call["dim"] % out.ndim - out.ndim
        eager.merge([softmax for w in call["tensors"] if (softmax := eager.softmax_of(w)) is not None])
        for w in call["tensors"]:
            if (softmax := eager.softmax_of(w)) is None or softmax.alias_of(out) is not None:
                continue
            alias = softmax.aliases[storage_of(w)]
            axis = None if alias.dropped else axis_of_keys(w, alias)
            if axis is not None and self.operator == "stack" and place >= axis:
                axis -= 1
            if axis is None or (axis == place and self.operator != "stack"):
                mark_as_unknown(softmax, out, self.operator)
            else:
                _carry_on(softmax, w, out, axis)
                softmax.unmet = max(softmax.unmet, out.numel())
                softmax.is_flat = softmax.is_flat and out.ndim <= 2


#: Handlers, by name, of operators that may also give scores: `pairs` registers them.
BY_NAME: dict[str, tap.Handler] = {
    "mean.dim": OnReduced("mean"),
}
