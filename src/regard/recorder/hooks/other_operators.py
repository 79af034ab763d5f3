"""Operators between a softmax and its values that have no rule of their own: their results of weights are named.

Every operator passes here while a softmax is open, but for those with a rule and views, which share the storage. The
result that an operator makes of weights is not the weights any more, and is refused by the operator's name where it
meets values; an operator that takes weights and values at once is named itself, unless the weights met values as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from . import tap
from .moved_weights import mark_as_unknown
from .plain_tensors import is_readable
from .product_factors import is_computed
from .softmax_trail import LOGARITHM, POINTWISE, EagerTracker, OpenSoftmax, axis_of_keys, storage_of

__all__ = ["install", "stray"]

#: Types of indices.
INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

#: Operators that sum the weighted values of a query over edges of a graph.
SEGMENT_SUMS = (
    "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "segment_reduce",
)  # fmt: skip


def install() -> None:
    """Intercept every operator without a rule while a softmax is open; last of all, when the others have theirs."""
    gather, index = torch.ops.aten.gather.default, torch.ops.aten.index.Tensor
    tap.intercept("gather", OnLookup(gather, "index", lambda call: [call["dim"]]), tap.FOLLOW_KEY)
    tap.intercept("index.Tensor", OnLookup(index, "indices", _indexed_axes), tap.FOLLOW_KEY)
    for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select"):
        tap.intercept(name, OnRead(getattr(torch.ops.aten, name).default))
    tap.intercept_others(on_other, tap.FOLLOW_KEY)


class OnRead:
    """Handler of an operator that reads a number, or whose result is as long as there are numbers of a kind."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        if listener.eager.open:
            on_other(listener, self.op, tuple(call.values()), out, frame)
        listener.read_number(out.shape if isinstance(out, Tensor) else out)


class OnLookup:
    """Handler of an operator that looks numbers up by their places along some axes."""

    def __init__(self, op: Any, places: str, axes: Callable[[dict[str, Any]], list[int]]) -> None:
        self.op, self.places, self.axes = op, places, axes

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
        x, eager = call["self"], listener.eager
        if eager.open:
            on_other(listener, self.op, (x, call[self.places]), out, frame)
        if x.ndim and eager.softmax_of(x) is None:
            eager.move(x, out, self.axes(call), self.op.name().removeprefix("aten::").partition(".")[0])


def _indexed_axes(call: dict[str, Any]) -> list[int]:
    """The axes of x[..., places]; a mask takes several."""
    axes: list[int] = []
    at = 0
    for places in call["indices"]:
        count = places.ndim if places is not None and places.dtype is torch.bool else 1
        axes += [] if places is None else range(at, at + count)
        at += count
    return axes


def on_other(listener: tap.Listener, op: Any, operands: tuple[Any, ...], out: Any, frame: FrameType) -> None:
    name = op.name().removeprefix("aten::").partition(".")[0]
    if torch.Tag.inplace_view in op.tags or name.startswith("new_") or name.endswith("_like"):
        return  # it reads the shape alone
    stray(listener.eager, name, operands, out)


def stray(eager: EagerTracker, name: str, operands: Sequence[Any], out: Any) -> None:
    """Weights enter an operator of that name, which is not followed; the result is not the weights any more."""
    tensors = list(_tensors(operands))
    w, softmax = next(((x, one) for x in tensors if (one := eager.softmax_of(x)) is not None), (None, None))
    if w is None or softmax is None or w.dtype in INDICES:  # an index made of weights looks something else up
        return
    alias = softmax.aliases[storage_of(w)]
    axis = None if alias.altered is not None else axis_of_keys(w, alias)
    results = list(_tensors((out,)))
    if isinstance(out, Tensor) and not results and out.ndim >= w.ndim:  # sparse, say
        softmax.strayed = softmax.strayed or name
    others = [x for x in tensors if x is not w and not any(x is result for result in results)]  # out= is no operand
    meets = _are_weighted(w, softmax) if name in SEGMENT_SUMS else any(_may_be_values(x, w, softmax) for x in others)
    if meets:
        softmax.strayed = softmax.strayed or name
    for result in results:
        if result.ndim >= w.ndim and (axis is None or result.shape[axis] > 1):  # else it is a sum or maximum over keys
            mark_as_unknown(softmax, result, name)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists included, whose storage can be read."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, Tensor) and is_readable(value):
            yield value


def _are_weighted(w: Tensor, softmax: OpenSoftmax) -> bool:
    """Whether a tensor is the product of weights and values, key by key, whose sum is still to come."""
    is_weight = softmax.aliases[storage_of(w)].altered is not POINTWISE  # else it may be a gate
    return is_weight and softmax.product is not None and storage_of(w) in softmax.weighted


def _may_be_values(x: Tensor, w: Tensor, softmax: OpenSoftmax) -> bool:
    """Whether an operand beside weights may be values: it has their keys, and features of its own."""
    alias = softmax.aliases[storage_of(w)]
    if softmax.product is None or alias.altered is LOGARITHM or not is_computed(x) or x.ndim < 2:
        return False
    axis = None if alias.altered is not None else axis_of_keys(w, alias)
    keys = {*w.shape, *softmax.product.ends} if axis is None else {w.shape[axis]}
    same = len(x.shape) <= w.ndim and all(a in (1, b) for a, b in zip(x.shape[::-1], w.shape[::-1], strict=False))
    # Several groups may share an axis.
    return not same and any(size % count == 0 for size in x.shape for count in keys if count > 1)
