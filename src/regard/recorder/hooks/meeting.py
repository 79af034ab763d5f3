"""Where weights meet their values: whether this is attention, in which layout, and what is reported."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..calls import AttentionCall
from . import tap
from .call_site import CallSite, enclosing_module, has_parameter_axis, looks_like_attention
from .layout import collapsed, heads_come_first, heads_of, shared_axis_reason, split_heads
from .softmax_trail import (
    CHOSEN,
    DIVIDED,
    LOGARITHM,
    POINTWISE,
    UNNORMALISED,
    Alias,
    OpenSoftmax,
    axes_of_keys,
    axis_of_keys,
    before_dropout,
    storage_of,
)

__all__ = ["finish", "is_attention", "is_linear_attention", "meet", "sums_to_one"]


OTHER_AXIS = "its weights are summed over another axis than the one softmax ran over, as in slot attention"
LINEAR = "it multiplies a softmax with a product, as in linear attention: no weights over keys are to be had"
NO_AXIS = "its weights meet the values in a view in which nothing says which axis is that of their keys"


def meet(
    listener: tap.Listener, softmax: OpenSoftmax, weights: Tensor, v: Tensor, *, right_way: bool, direct: bool
) -> bool:
    """Weights (…, i, j) meet v in a product, (…, j, e) if the sum runs over the axis of softmax.

    Returns:
        Whether this is attention, recorded or refused.
    """
    alias = softmax.aliases[storage_of(weights)]
    if not is_attention(listener, softmax, alias, weights, v, direct):
        return False
    if weights.ndim > 1:  # weights without an axis for the batch stand for all of it
        weights = weights[(None,) * (v.ndim - weights.ndim)]
    if right_way:
        finish(listener, softmax, weights, v if v.ndim > 1 else None, weights, v)
    elif softmax.product is not None and alias.altered not in (CHOSEN, DIVIDED, UNNORMALISED):
        listener.eager.close(softmax)
        listener.refuse(softmax.site.name, alias.altered or (OTHER_AXIS if axes_of_keys(weights, alias) else NO_AXIS))
    return True


def is_linear_attention(listener: tap.Listener, factors: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether a product sums a softmax's mixture of values over its rows: softmax(k)ᵀ v before the queries come.

    Each of those rows is a feature of the keys, and what was recorded as weights is taken back.

    Args:
        listener: The listener.
        factors: The factors of the product, each with the size of the axis that is summed over.
    """
    for x, summed in factors:
        if (site := listener.eager.site_of_mixture(x, summed)) is not None:
            listener.retract(site, LINEAR)
            return True
    return False


def is_attention(
    listener: tap.Listener, softmax: OpenSoftmax, alias: Alias, weights: Tensor, v: Tensor, direct: bool
) -> bool:
    """Whether a softmax that meets something is one over keys, or linear attention, which is refused later on.

    Args:
        listener: The listener.
        softmax: The softmax.
        alias: The tensor on its trail that meets the values.
        weights: That tensor, a view of it, or its axes in another order.
        v: The values.
        direct: Whether the weights are the left factor of a product, as attention is mostly written.
    """
    if alias.altered is LOGARITHM or (alias.altered is UNNORMALISED and softmax.product is None):
        return False
    if softmax.product is not None and not (softmax.is_flat and max(_axes(weights), _axes(v)) > 2):
        return True
    module = softmax.site.module
    usual = direct and softmax.axis == -1 and weights.ndim > 2 and v.ndim > 2
    if usual and ((module is not None and looks_like_attention(module)) or listener.eager.is_product(v)):
        return True
    if usual and v.shape[-2] == weights.shape[-1] == weights.shape[-2] > 1:  # a row and a column for each position
        return not has_parameter_axis(softmax.site, weights.shape[-1])
    return _pools_a_sequence(listener, softmax, alias, weights, v)


def _axes(x: Tensor) -> int:
    """The number of axes of more than one."""
    return sum(size > 1 for size in x.shape)


def _pools_a_sequence(listener: tap.Listener, softmax: OpenSoftmax, alias: Alias, weights: Tensor, v: Tensor) -> bool:
    """Whether a softmax without a product of queries and keys weighs the positions of each sequence.

    Additive attention scores positions by a small network. A router's softmax, and that of a mixture, runs over the
    outputs of a layer instead: a parameter has an axis of that size, and it is the last axis.
    """
    if weights.ndim == 2 and v.ndim == 3:  # (b, j) in an einsum
        weights = weights.unsqueeze(1)
    axis = axis_of_keys(weights, alias)
    if axis is None or not 2 < weights.ndim <= 4 or v.ndim < 3 or v.shape[-1] < 2 or weights.shape[0] != v.shape[0]:
        return False
    if weights.shape[0] != listener.batch_size(weights.shape[-2]) or softmax.site.module is None:
        return False
    if (
        weights.numel() != weights.shape[0] * weights.shape[axis]
    ):  # several rows, as linear attention sums keys by feature
        return False
    return softmax.axis != -1 or not has_parameter_axis(softmax.site, weights.shape[axis])


def finish(
    listener: tap.Listener, softmax: OpenSoftmax, weights: Tensor, values: Tensor | None, factor: Tensor, v: Tensor
) -> None:
    """Record `weights` (…, i, j), or refuse the layer where these are no weights over keys.

    Args:
        listener: The listener.
        softmax: The softmax that they come from.
        weights: Their axes in order.
        values: The values (…, j, e); None where the model does not say which axis is which.
        factor: The operand of the product that held the weights.
        v: Its other operand.
    """
    eager, site = listener.eager, softmax.site
    alias = softmax.aliases[storage_of(factor)]
    v_is_product = eager.is_product(v)
    is_new = softmax.meet(collapsed(factor))
    for other in eager.open:
        if other.alias_of(factor) is not None and (other is not softmax or softmax.unmet <= 0):
            eager.close(other)
    if not is_new:
        return
    w = before_dropout(weights, alias)
    divided = alias.altered in (DIVIDED, POINTWISE, UNNORMALISED) and sums_to_one(w)
    altered = None if divided else alias.altered
    reason = altered or _no_weights(softmax, v_is_product, w, alias)
    if reason is not None:
        eager.close(softmax)
        listener.refuse(site.name, reason)
        return
    w = w if w.ndim > 1 else w.unsqueeze(0)
    batch = listener.batch_size(w.shape[-2], w.shape[-1], w.shape[0] if w.ndim == 3 else None)
    module = _naming_heads(site)
    s = softmax.scores if softmax.scores is not None and softmax.scores.shape[:-1] == w.shape[:-1] else None
    if s is not None:
        s = s[..., : w.shape[-1]]  # without the column of a sink
    swapped: bool | None = False
    if w.ndim == 4:
        has_both = v.ndim >= 4 and all(of_v >= of_w for of_v, of_w in zip(v.shape[:2], w.shape[:2], strict=True))
        swapped = heads_come_first(v if has_both else w, module, batch, as_projected=has_both)
    if swapped:
        w = w.transpose(0, 1)
        s, values = (x if x is None or x.ndim < 4 else x.transpose(0, 1) for x in (s, values))
    w4 = split_heads(w, module, batch)
    if w4 is None or swapped is None:
        listener.refuse(site.name, shared_axis_reason(site))
        return
    call = AttentionCall(v=None if values is None else split_heads(values, module, batch), w=w4)
    call.s = None if s is None else split_heads(s, module, batch)
    listener.attention(site, call)


def _naming_heads(site: CallSite) -> nn.Module | None:
    """The module of a site; the one around it, where that alone names the number of heads."""
    around = None if heads_of(site.module) is not None else enclosing_module(site)
    return site.module if heads_of(around) is None else around


def sums_to_one(w: Tensor, axis: int = -1) -> bool:
    """Whether rows sum to 1, or to 0 where all is masked: exp(s − logsumexp(s)) is divided by its sum before exp."""
    sums = w.float().sum(axis)
    return bool((((sums - 1).abs() < 0.01) | (w == 0).all(axis)).all() and (w >= 0).all() and (w > 0).any())


def _no_weights(softmax: OpenSoftmax, v_is_product: bool, w: Tensor, alias: Alias) -> str | None:
    """The reason why a softmax gives no weights over keys; None if it does."""
    if softmax.product is None and v_is_product:
        return LINEAR
    if not w.is_floating_point():
        return f"its weights are of type {w.dtype}; floating-point numbers are read"
    if w.ndim > 4:
        return f"its weights have {w.ndim} axes; (batch, heads, queries, keys) is read"
    if alias.changed and (bool((w < 0).any()) or bool((w.sum(-1) > 1.01).any())):
        return "its softmax is changed before it meets the values: some rows are negative or sum to more than 1"
    return None
