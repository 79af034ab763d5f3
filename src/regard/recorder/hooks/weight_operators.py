"""Operators between a softmax and its values that work element by element: weights stay weights, or become others."""

from __future__ import annotations

from types import FrameType
from typing import Any, cast

from torch import Tensor

from . import tap
from .layout import collapsed
from .meeting import sums_to_one
from .moved_weights import mark_as_unknown
from .softmax_trail import (
    COMBINED,
    DIVIDED,
    LOGARITHM,
    UNNORMALISED,
    Alias,
    OpenSoftmax,
    axis_of_keys,
    before_dropout,
    storage_of,
    with_strides_of,
)

__all__ = ["OnElementwise", "changes_weights", "install", "on_combination"]

#: Operators between a softmax and its product after which weights are still weights.
KEEPS_WEIGHTS = (
    "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy", "type_as", "contiguous", "clone", "nan_to_num",
)  # fmt: skip

#: Operators that scale them or leave some out.
SCALES_WEIGHTS = ("mul.Tensor", "masked_fill.Scalar", "masked_fill.Tensor")

#: Operators that make other numbers of them, which are weights if rows still sum to at most 1.
CHANGES_WEIGHTS = (
    "mul_.Tensor", "pow.Tensor_Scalar", "square", "sqrt", "abs", "round", "clamp_max",
    "clamp_max_", "tril", "tril_", "triu", "triu_", "where.self", "where.ScalarOther", "scatter.src", "scatter_.src",
    "masked_fill_.Scalar", "masked_fill_.Tensor", "masked_scatter", "index_fill.int_Scalar",
)  # fmt: skip

#: Operators that combine weights with something else.
COMBINES_WEIGHTS = (
    "sub.Tensor", "add_.Tensor", "sub_.Tensor", "rsub.Scalar", "rsub.Tensor", "maximum", "minimum",
)  # fmt: skip


#: Operators that write a number into some of them in place, where the others stay.
FILLS_WEIGHTS = ("fill_.Scalar", "fill_.Tensor", "zero_", "index_fill_.int_Scalar")


def install() -> None:
    """Intercept these operators while a softmax is open."""
    for name in ("dropout", "native_dropout"):
        tap.intercept(name, OnElementwise(is_dropout=True), tap.FOLLOW_KEY)
    for name in KEEPS_WEIGHTS:
        tap.intercept(name, OnElementwise(), tap.FOLLOW_KEY)
    for name in SCALES_WEIGHTS:
        tap.intercept(name, OnElementwise(scales=True), tap.FOLLOW_KEY)
    for name in CHANGES_WEIGHTS:
        tap.intercept(name, changes_weights, tap.FOLLOW_KEY)
    for name in ("div.Tensor", "div_.Tensor"):
        tap.intercept(name, on_division, tap.FOLLOW_KEY)
    for name in COMBINES_WEIGHTS:
        tap.intercept(name, on_combination, tap.FOLLOW_KEY)
    for name in FILLS_WEIGHTS:
        tap.intercept(name, on_filled, tap.FOLLOW_KEY)
    tap.intercept("dropout_", on_dropout_in_place, tap.FOLLOW_KEY)


class OnElementwise:
    """Handler of an operator after which weights are still weights."""

    def __init__(self, is_dropout: bool = False, scales: bool = False, changes: bool = False) -> None:
        self.is_dropout, self.scales, self.changes = is_dropout, scales, changes

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        eager = listener.eager
        eager.count_operator()
        operands = [call.get(name) for name in ("self", "input", "src", "other")]
        operand = next((x for x in operands if eager.softmax_of(x) is not None), None)
        result = out[0] if isinstance(out, tuple) else out
        softmax = eager.softmax_of(operand)
        if operand is None or softmax is None or (softmax.alias_of(result) is not None and not self.changes):
            return
        alias = softmax.aliases[storage_of(operand)]
        if self.changes and alias.dropped:
            mark_as_unknown(softmax, result, "dropout and another change")
        elif self.changes:
            self._alter_alias(softmax, alias, call, operand, result)
        elif (axis := axis_of_keys(operand, alias)) is not None:
            self._extend_alias(softmax, alias, axis, call, operand, result)
        else:
            mark_as_unknown(softmax, result, "a view in which their keys are merged with another axis")
        if result.numel() > collapsed(operand).numel():
            other = call.get("other") if operand is call.get("self") else call.get("self")
            softmax.weighted[storage_of(result)] = operand, other, result.shape, result.stride()

    def _extend_alias(
        self, softmax: OpenSoftmax, alias: Alias, axis: int, call: dict[str, Any], operand: Tensor, result: Tensor
    ) -> None:
        other = call.get("other") if operand is call.get("self") else call.get("self")
        grows = result.numel() > collapsed(operand).numel()
        clean = None
        if self.is_dropout or alias.dropped:
            clean = before_dropout(operand, alias)
            if self.scales and not grows:
                clean = (
                    clean.masked_fill(call["mask"], call["value"]) if "mask" in call else clean * cast(Tensor, other)
                )
            clean = with_strides_of(result, clean.expand(result.shape))
        changed = alias.changed or self.scales  # by a gate or a mask; or by what makes rows sum to more than 1
        stride, keys = result.stride(axis), result.shape[axis]
        softmax.add(result, alias._replace(clean=clean, key_stride=stride, keys=keys, changed=changed))

    @staticmethod
    def _alter_alias(softmax: OpenSoftmax, alias: Alias, call: dict[str, Any], operand: Tensor, result: Tensor) -> None:
        if operand is call.get("src"):  # weights put back in their places: scatter
            axis = call["dim"] % result.ndim
            softmax.add(result, Alias(None, result.stride(axis), result.shape[axis], None, changed=True))
            return
        if operand is call.get("other") and "condition" not in call:  # something divided by weights
            return
        axis, altered = axis_of_keys(operand, alias), alias.altered
        if axis is None or result.shape != operand.shape:
            mark_as_unknown(softmax, result, "a view in which their keys are merged with another axis")
            return
        if altered is UNNORMALISED and "condition" not in call and isinstance(call.get("other"), Tensor):
            altered = DIVIDED
        softmax.add(result, Alias(None, result.stride(axis), result.shape[axis], altered, changed=True))


changes_weights = OnElementwise(changes=True)


def on_division(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Weights over something; or scores over their sum, which are weights without a softmax."""
    eager, operands = listener.eager, (call["self"], call["other"])
    product = eager.product_behind(call["self"])
    if product is None or any(eager.softmax_of(x) is not None for x in operands):
        changes_weights(listener, call, out, frame)
        return
    axis = _axis_of_sums(out, call["other"])
    if axis is not None and sums_to_one(out, axis) and (site := listener.call_site(frame)) is not None:
        eager.start(out, axis, site, product, None)


def _axis_of_sums(x: Tensor, sums: Any) -> int | None:
    """The axis, from the end, that a divisor of x may have been summed over and kept; None if there is none."""
    if not isinstance(sums, Tensor) or sums.ndim != x.ndim:
        return None
    differ = [n - x.ndim for n in range(x.ndim) if sums.shape[n] != x.shape[n]]
    return differ[0] if len(differ) == 1 and sums.shape[differ[0]] == 1 else None


def on_combination(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Weights plus or minus something: no longer the weights of one softmax; plus a number: perhaps still."""
    eager = listener.eager
    eager.count_operator()
    for operand, other in ((call["self"], call["other"]), (call["other"], call["self"])):
        if (softmax := eager.softmax_of(operand)) is not None:
            alias = softmax.aliases[storage_of(operand)]
            axis = axis_of_keys(operand, alias)
            if softmax.product is not None and storage_of(operand) in softmax.weighted:  # w * v, key by key
                softmax.strayed = softmax.strayed or "a sum of single keys"
            if alias.dropped:
                mark_as_unknown(softmax, out, "dropout and another change")
                return
            if axis is None or out.shape != operand.shape:
                mark_as_unknown(softmax, out, "a sum with something larger")
                return
            is_number = not isinstance(other, Tensor) or other.ndim == 0
            # A gate plus a parameter is a gate still.
            may_be_weights = alias.altered in (None, DIVIDED, LOGARITHM, UNNORMALISED)
            altered = COMBINED if may_be_weights and not is_number else alias.altered
            softmax.add(out, Alias(None, out.stride(axis), out.shape[axis], altered, changed=True))


def on_filled(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """A number in the place of some weights, as in `w[..., 0] = 0`."""
    listener.eager.count_operator()
    if (softmax := listener.eager.softmax_of(call["self"])) is not None:
        alias = softmax.aliases[storage_of(call["self"])]
        if alias.dropped:
            mark_as_unknown(softmax, out, "dropout and another change")
        else:
            softmax.add(out, alias._replace(changed=True))


def on_dropout_in_place(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    eager = listener.eager
    eager.count_operator()
    softmax = eager.softmax_of(call["self"]) if call["train"] and call["p"] > 0 else None
    if softmax is not None:
        eager.close(softmax)
        listener.refuse(
            softmax.site.name,
            "dropout wrote over its weights in place; nn.Dropout(inplace=False) leaves them readable",
        )
