"""Products that an einsum computes: of queries and keys, and of weights with values, in whatever order of axes."""

from __future__ import annotations

import math
from types import FrameType
from typing import Any

from torch import Tensor

from . import other_operators, tap
from .einsum_equation import may_be_scores, own_axes, sorted_axes, spell_out
from .layout import collapsed, own_shape
from .meeting import finish, is_attention, is_linear_attention
from .moved_weights import on_two_weights
from .product_factors import has_learned_queries, is_computed, is_parameter
from .softmax_trail import POINTWISE, EagerTracker, OpenSoftmax, axes_of_keys, storage_of

__all__ = ["install"]


def install() -> None:
    """Intercept einsum."""
    tap.intercept("einsum", on_einsum, tap.PRODUCT_KEY, multiplies=True)


def on_einsum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    eager = listener.eager
    operands, equation = call["tensors"], call["equation"].replace(" ", "")
    eager.count_operator()
    sides, _, result = spell_out(equation, operands).partition("->")
    letters = sides.split(",")
    weighted = [(x, softmax) for x in operands if (softmax := eager.softmax_of(x)) is not None]
    if eager.mixtures and is_linear_attention(listener, _summed_sizes(operands, letters, result)):
        return
    if on_two_weights(eager, operands, out):
        return
    if weighted:
        w, softmax = weighted[0]
        v = next((x for x in reversed(operands) if x is not w), w)
        if is_attention(listener, softmax, softmax.aliases[storage_of(w)], w, v, direct=True):
            if _on_values(listener, softmax, w, operands, letters, result, equation):
                eager.add_mixture(out, softmax, rows=_own_rows(w, v, letters, operands))
            else:
                other_operators.stray(eager, f"einsum({equation!r})", operands, out)
        return
    _carry_scores(eager, operands, letters, result, out)
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
) -> bool:
    """Weights w meet the other operand: their axes are put in order (batch, heads, queries, keys).

    Returns:
        Whether this is attention, recorded or refused.
    """
    alias = softmax.aliases[storage_of(w)]
    if len(operands) != 2 or any("." in side or len(set(side)) < len(side) for side in letters):
        reason = "which is not read"
    else:
        at = 0 if operands[0] is w else 1
        mine, others, v = letters[at], letters[1 - at], operands[1 - at]
        summed = [n for n in axes_of_keys(w, alias) if mine[n] in others and mine[n] not in result]
        if alias.altered is POINTWISE:  # a gate of one number weighs no keys
            summed = [n for n in summed if w.shape[n] > 1]
        if summed:  # the sum must run over the keys
            if _finish_in_order(listener, softmax, w, v, (mine, others, result), mine[summed[0]], w):
                return True
            reason = "whose batch, heads and queries cannot be told apart"
        elif alias.altered is POINTWISE or not is_computed(v) or not set(others) - set(mine):
            return False  # no values: a layer over the heads, or numbers with the axes of the weights
        else:
            reason = "which does not sum over the axis of softmax"
    listener.eager.close(softmax)
    unknown = alias.altered if alias.lost_keys else None
    listener.refuse(softmax.site.name, unknown or f"its weights enter einsum({equation!r}), {reason}")
    return True


def _summed_sizes(operands: list[Tensor], letters: list[str], result: str) -> list[tuple[Tensor, int]]:
    """The operands, each with the size of an axis that is summed over."""
    return [
        (x, x.shape[n])
        for x, mine in zip(operands, letters, strict=False)
        for n, letter in enumerate("" if "." in mine else mine)
        if letter not in result
    ]


def _own_rows(w: Tensor, v: Tensor, letters: list[str], operands: list[Tensor]) -> int:
    """The number of rows that weights have, by the axes that the values lack."""
    mine, others = (next(side for x, side in zip(operands, letters, strict=False) if x is y) for y in (w, v))
    return math.prod(w.shape[n] for n, letter in enumerate(mine) if letter not in others) if "." not in mine else 1


def _carry_scores(eager: EagerTracker, operands: list[Tensor], letters: list[str], result: str, out: Tensor) -> None:
    """Scores that pass through a layer over another axis than those of queries and keys (talking heads) stay scores."""
    for x, mine in zip(operands, letters, strict=False):
        product = eager.product_behind(x)
        if product is not None and product.shape[-2:] == x.shape[-2:] and set(mine[-2:]) <= set(result):
            eager.add_scores(out, product)


def _finish_in_order(
    listener: tap.Listener,
    softmax: OpenSoftmax,
    w: Tensor,
    v: Tensor,
    letters: tuple[str, str, str],
    keys: str,
    factor: Tensor,
) -> bool:
    """Report weights with the axes in order; whether these can be told apart.

    Args:
        listener: The listener.
        softmax: The softmax of the weights.
        w: The weights.
        v: The values.
        letters: The axes of w, of v and of the result.
        keys: The axis of keys.
        factor: The operand that held the weights.
    """
    mine, others, result = letters
    order = sorted_axes(mine, others, result, keys, w.shape)
    if order is None:
        return False
    weights = w.permute([mine.index(letter) for letter in order.axes])
    weights = weights if order.has_rows else weights.unsqueeze(-2)
    values = v.permute([others.index(letter) for letter in order.of_values])
    finish(listener, softmax, weights, values if values.ndim == weights.ndim else None, factor, values)
    return True


def on_weighted(listener: tap.Listener, softmax: OpenSoftmax, x: Tensor, summed: list[int]) -> bool:
    """(w * v).sum over the keys, as the einsum that it is: an axis of 1 in one operand is no axis of it.

    Args:
        listener: The listener.
        softmax: The softmax of w.
        x: The product w * v.
        summed: The axes that are summed over, from the end.

    Returns:
        Whether this is understood: attention, recorded or refused, or a sum that is none.
    """
    w, v, *layout = softmax.weighted[storage_of(x)]
    if not isinstance(v, Tensor) or not v.is_floating_point() or is_parameter(v):
        return True
    alias, axis = softmax.aliases[storage_of(w)], summed[0]
    if layout != [x.shape, x.stride()] or len(summed) > 1:
        return False
    w_shape, v_shape = (own_shape(operand, x.ndim) for operand in (w, v))
    along = axes_of_keys(w, alias)
    if not alias.lost_keys and len(along) == 1 and axis not in along and v_shape[along[0]] > 1:
        return True  # a gate: what softmax ran over is no axis that the sum removes, nor one that only w has
    if axis not in along or v_shape[axis] == 1 < w_shape[axis]:
        return False
    spare = 2 - sum(a > 1 < b for n, (a, b) in enumerate(zip(w_shape, v_shape, strict=True)) if n - x.ndim != axis)
    mine = others = ""
    for letter, n in zip("abcdefghklmn", range(-x.ndim, 0), strict=False):
        is_batch = n != axis and w_shape[n] == v_shape[n] == 1 and spare > 0  # one sequence, or one head
        spare -= is_batch
        mine += letter if w_shape[n] > 1 or n == axis or is_batch else ""
        others += letter if v_shape[n] > 1 or n == axis or is_batch else ""
    letters = "abcdefghklmn"[: x.ndim]
    keys = letters[axis]
    own_w, own_v = (_only(operand, side, letters) for operand, side in ((w, mine), (v, others)))
    if not is_attention(listener, softmax, alias, own_w, own_v, direct=False):
        return True
    return _finish_in_order(listener, softmax, own_w, own_v, (mine, others, letters.replace(keys, "")), keys, w)


def _only(x: Tensor, side: str, letters: str) -> Tensor:
    """The axes of an operand that are among these letters; the others have one number."""
    x = collapsed(x)[(None,) * (len(letters) - x.ndim)]
    return x[tuple(slice(None) if letter in side else 0 for letter in letters)]
