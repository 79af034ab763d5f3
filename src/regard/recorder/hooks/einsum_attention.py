"""Products that an einsum computes: of queries and keys, and of weights with values, in whatever order of axes."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import Tensor

from . import tap
from .einsum_equation import may_be_scores, own_axes, sorted_axes, spell_out
from .meeting import finish, is_attention
from .product_factors import has_learned_queries, is_computed
from .softmax_trail import OpenSoftmax, axes_of_keys, storage_of

__all__ = ["install"]


def install() -> None:
    """Intercept einsum."""
    tap.intercept("einsum", on_einsum, multiplies=True)


def on_einsum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    eager = listener.eager
    operands, equation = call["tensors"], call["equation"].replace(" ", "")
    eager.count_operator()
    sides, _, result = spell_out(equation, operands).partition("->")
    letters = sides.split(",")
    weighted = [(x, softmax) for x in operands if (softmax := eager.softmax_of(x)) is not None]
    if weighted:
        w, softmax = weighted[0]
        v = next((x for x in reversed(operands) if x is not w), w)
        if is_attention(listener, softmax, softmax.aliases[storage_of(w)], w, v, direct=True):
            _on_values(listener, softmax, w, operands, letters, result, equation)
        return
    if len(operands) != 2:
        return
    learned = "." not in sides and has_learned_queries(*operands)
    scores = learned or (all(is_computed(x) for x in operands) and may_be_scores(operands, letters, result))
    if scores and (site := listener.call_site(frame)) is not None:
        ends = own_axes(operands, letters, result, of_left=not learned)
        eager.add_product(out, site.name, flat=all(x.ndim <= 2 for x in operands), ends=ends)


def _on_values(
    listener: tap.Listener,
    softmax: OpenSoftmax,
    w: Tensor,
    operands: list[Tensor],
    letters: list[str],
    result: str,
    equation: str,
) -> None:
    """Weights w meet the other operand: their axes are put in order (batch, heads, queries, keys)."""
    alias = softmax.aliases[storage_of(w)]
    order = None
    if len(operands) != 2 or any("." in side or len(set(side)) < len(side) for side in letters):
        reason = "which is not read"
    else:
        at = 0 if operands[0] is w else 1
        mine, others, v = letters[at], letters[1 - at], operands[1 - at]
        summed = [n for n in axes_of_keys(w, alias) if mine[n] in others and mine[n] not in result]
        if summed:  # the sum must run over the keys
            order = sorted_axes(mine, others, result, mine[summed[0]], w.shape)
            reason = "whose batch, heads and queries cannot be told apart"
        else:
            reason = "which does not sum over the axis of softmax"
    if order is None:
        listener.eager.close(softmax)
        listener.refuse(softmax.site.name, f"its weights enter einsum({equation!r}), {reason}")
        return
    used = w.permute([mine.index(letter) for letter in order.axes])
    used = used if order.has_rows else used.unsqueeze(-2)
    values = v.permute([others.index(letter) for letter in order.of_values])
    finish(listener, softmax, used, values if values.ndim == used.ndim else None, w, values)
