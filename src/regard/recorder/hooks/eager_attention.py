"""softmax(q kᵀ) v written out by the model ("eager" attention): recognised operator by operator, kept as computed.

A product of two computed tensors may be scores. A softmax opens a trail (`softmax_trail`), operators such as dropout
extend it, and the sum over keys with the values ends it: a product on either side, an einsum, or `(w * v).sum`. So does
a sigmoid or ReLU of scores, whose rows need not sum to 1; it is named, unless it is divided by its sum. A
softmax that never meets values (a classifier's, a router's) is not attention and is not named. Linear attention also
takes softmaxes, over features: there the values are a product themselves, or no product made the scores.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import Tensor

from ..calls import AttentionCall
from . import moved_weights, tap
from .call_site import CAPTURED, CallSite, has_parameter_axis, looks_like_attention, shared_axis_reason, split_heads
from .chunked_modules import CHUNKED, IN_CHUNKS
from .einsum_equation import may_be_scores, spell_out
from .product_factors import factors_of, is_computed, is_layer, is_parameter
from .softmax_trail import (
    CHOSEN,
    COMBINED,
    LOGARITHM,
    POINTWISE,
    UNNORMALISED,
    Alias,
    EagerTracker,
    OpenSoftmax,
    axis_of_keys,
    copy_like,
    storage_of,
)

__all__ = ["EagerTracker", "install"]

#: Operators between a softmax and its product after which weights are still weights.
KEEPS_WEIGHTS = (
    "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy", "type_as", "contiguous", "clone", "mul.Tensor",
    "nan_to_num", "masked_fill.Scalar", "masked_fill.Tensor",
)  # fmt: skip

#: Operators that make other numbers of them, which are weights if rows still sum to at most 1.
CHANGES_WEIGHTS = (
    "div.Tensor", "div_.Tensor", "mul_.Tensor", "pow.Tensor_Scalar", "square", "sqrt", "abs", "round", "clamp_max",
    "clamp_max_", "tril", "tril_", "triu", "triu_", "where.self", "where.ScalarOther", "scatter.src", "scatter_.src",
    "masked_fill_.Scalar", "masked_fill_.Tensor", "masked_scatter", "index_fill.int_Scalar",
)  # fmt: skip

#: Operators that combine weights with something else.
COMBINES_WEIGHTS = (
    "add.Tensor", "sub.Tensor", "add_.Tensor", "sub_.Tensor", "rsub.Scalar", "rsub.Tensor", "maximum", "minimum",
)  # fmt: skip


def install() -> None:
    """Intercept products and softmax; the operators between them only while a softmax is open."""
    for name in ("softmax.int", "_softmax", "softmax.int_out", "_softmax.out"):
        tap.intercept(name, on_softmax, attends=True)
    tap.intercept("_sparse_softmax.int", on_sparse_softmax, attends=True)
    for name in ("log_softmax.int", "_log_softmax"):
        tap.intercept(name, on_log_softmax)
    for name in ("exp", "exp_"):
        tap.intercept(name, on_exp)
    for name in ("sigmoid", "sigmoid_", "relu", "relu_", "silu", "silu_"):
        tap.intercept(name, on_pointwise, skip=_is_activation)
    for name in ("clamp", "clamp_", "clamp_min", "clamp_min_"):
        tap.intercept(name, on_clamp, skip=_is_far_from_weights)
    tap.intercept("topk", on_topk)
    for name in ("matmul", "mm", "mv", "matmul.out", "mm.out"):
        tap.intercept(name, on_product, skip=is_layer)
    for name in ("bmm", "baddbmm", "bmm.out", "baddbmm.out"):
        tap.intercept(name, on_product)
    for name in ("addmm", "addmm.out"):  # every nn.Linear is one: intercepted only where weights may meet values
        tap.intercept(name, on_product, tap.FOLLOW_KEY)
    tap.intercept("cdist", on_distances)
    tap.intercept("einsum", on_einsum)
    for name in ("dropout", "native_dropout"):
        tap.intercept(name, OnElementwise(is_dropout=True), tap.FOLLOW_KEY)
    for name in KEEPS_WEIGHTS:
        tap.intercept(name, OnElementwise(), tap.FOLLOW_KEY)
    for name in CHANGES_WEIGHTS:
        tap.intercept(name, _changes_weights, tap.FOLLOW_KEY)
    for name in COMBINES_WEIGHTS:
        tap.intercept(name, on_combination, tap.FOLLOW_KEY)
    tap.intercept("dropout_", on_dropout_in_place, tap.FOLLOW_KEY)
    tap.intercept("sum.dim_IntList", on_sum, tap.FOLLOW_KEY)
    moved_weights.install()


# Where a trail begins.


def on_softmax(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    _start(listener, call["self"], out, call["dim"], frame, None)


def on_log_softmax(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    _start(listener, call["self"], out, call["dim"], frame, LOGARITHM)


def on_sparse_softmax(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    listener.refuse_at(frame, "its softmax is over a sparse matrix, which is not read")


def on_distances(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Distances of queries and keys, which a Gaussian similarity squares and negates."""
    computed = is_computed(call["x1"]) and is_computed(call["x2"])
    if computed and (site := listener.call_site(frame)) is not None:
        listener.eager.add_product(out, site.name, flat=out.ndim <= 2)


def on_exp(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """exp of log-weights gives weights; exp of scores gives them once they are divided by their sum."""
    eager = listener.eager
    if (softmax := eager.softmax_of(call["self"])) is not None:
        alias = softmax.aliases[storage_of(call["self"])]
        if alias.altered is LOGARITHM:
            softmax.add(out, alias._replace(clean=out, altered=None))
        return
    if out.ndim < 2 or not any(product.shape == out.shape for product in eager.products):
        return
    if (site := listener.call_site(frame)) is not None and eager.product_of(out, -1, site) is not None:
        if type(site.module).__name__ in CHUNKED:
            listener.refuse_at(frame, IN_CHUNKS)
        else:
            eager.start(out, -1, site, None, UNNORMALISED)


def _is_activation(live: list[Any], args: tuple[Any, ...]) -> bool:
    """Whether no listener has seen a product of that shape last: most such functions are of a feed-forward layer."""
    return not any(listener.eager.products and listener.eager.products[-1].shape == args[0].shape for listener in live)


def on_pointwise(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """A function of each score alone: weights, if it is of the newest product. Activations and gates are such too."""
    eager = listener.eager
    if out.ndim < 2 or not eager.products or eager.products[-1].shape != out.shape:
        return  # of another listener
    site = listener.call_site(frame)
    if site is not None and eager.product_of(out, -1, site) is eager.products[-1]:
        eager.start(out, -1, site, None, POINTWISE)


def _is_far_from_weights(live: list[Any], args: tuple[Any, ...]) -> bool:
    return _is_activation(live, args) and not any(listener.eager.open for listener in live)


def on_clamp(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Weights that are clamped; or scores above a threshold, as in sparsemax, whose rows sum to 1."""
    if listener.eager.softmax_of(call["self"]) is not None:
        _changes_weights(listener, call, out, frame)
    elif not isinstance(call["min"], Tensor) and call["min"] == 0 and call.get("max") is None:
        on_pointwise(listener, call, out, frame)


def on_topk(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    """The largest weights, or the largest scores, of which a softmax may follow: their keys are no longer positions."""
    eager = listener.eager
    if (softmax := eager.softmax_of(call["self"])) is not None:
        softmax.add(out[0], Alias(out[0], False, out[0].stride(call["dim"]), call["k"], CHOSEN))
    elif eager.products and (site := listener.call_site(frame)) is not None:
        product = eager.product_of(call["self"], call["dim"], site)
        if product is not None:
            eager.products.append(product._replace(storage=storage_of(out[0]), shape=out[0].shape, chosen=True))


def _start(
    listener: tap.Listener, scores: Tensor, out: Tensor, dim: int, frame: FrameType, altered: str | None
) -> None:
    if out.is_nested or out.ndim == 0 or (site := listener.call_site(frame)) is None:
        return
    axis = dim % out.ndim - out.ndim
    if type(site.module).__name__ in CHUNKED and out.ndim > 2:
        listener.refuse_at(frame, IN_CHUNKS)
        return
    listener.eager.start(out, axis, site, scores if listener.wants_scores and axis == -1 else None, altered)


# Operators on the trail.


class OnElementwise:
    """Handler of an operator after which weights are still weights."""

    def __init__(self, is_dropout: bool = False, changes: bool = False) -> None:
        self.is_dropout, self.changes = is_dropout, changes

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
        if self.changes:
            self._alter_alias(softmax, alias, call, operand, result)
        elif (axis := axis_of_keys(operand, alias)) is not None:
            self._extend_alias(softmax, alias, axis, call, operand, result)

    def _extend_alias(
        self, softmax: OpenSoftmax, alias: Alias, axis: int, call: dict[str, Any], operand: Tensor, result: Tensor
    ) -> None:
        stride, keys = result.stride(axis), result.shape[axis]
        if self.is_dropout:
            clean = alias.clean if alias.dropped else operand
            softmax.add(result, alias._replace(clean=clean, dropped=True, key_stride=stride, keys=keys))
        elif alias.dropped:  # converted after dropout: the same numbers, perhaps in another type and order
            clean = copy_like(result, alias.clean, operand)
            softmax.add(result, alias._replace(clean=clean, key_stride=stride, keys=keys))
        else:
            scaled = alias.changed or "other" in call  # by a gate or a mask; or by what makes rows sum to more than 1
            softmax.add(result, alias._replace(clean=result, key_stride=stride, keys=keys, changed=scaled))
        if result.numel() > _collapsed(operand).numel():
            other = call["other"] if operand is call.get("self") else call.get("self")
            softmax.weighted[storage_of(result)] = operand, other

    @staticmethod
    def _alter_alias(softmax: OpenSoftmax, alias: Alias, call: dict[str, Any], operand: Tensor, result: Tensor) -> None:
        if operand is call.get("src"):  # weights put back in their places: scatter
            axis = call["dim"] % result.ndim
            softmax.add(result, Alias(result, False, result.stride(axis), result.shape[axis], None, changed=True))
            return
        if operand is call.get("other") and "condition" not in call:  # something divided by weights
            return
        altered, axis_of_sum = alias.altered, axis_of_keys(operand, alias)
        if altered is UNNORMALISED and "condition" not in call and isinstance(call.get("other"), Tensor):
            thin = _thin_axes(call["other"])
            axis_of_sum = next((axis for axis in reversed(thin) if operand.shape[axis] > 1), None)
            altered = None
        if axis_of_sum is None or result.shape != operand.shape:
            return
        stride, keys = result.stride(axis_of_sum), result.shape[axis_of_sum]
        softmax.add(result, Alias(result, False, stride, keys, altered, changed=True))


_changes_weights = OnElementwise(changes=True)


def _thin_axes(x: Tensor) -> list[int]:
    """The axes along which x has one number, expanded ones included, from the end."""
    return [n for n in range(-x.ndim, 0) if x.shape[n] == 1 or x.stride(n) == 0]


def _collapsed(x: Tensor) -> Tensor:
    """x with one number along each of its expanded axes."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def on_combination(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Weights plus or minus something: no longer the weights of one softmax; plus a number: perhaps still."""
    eager = listener.eager
    eager.count_operator()
    for operand, other in ((call["self"], call["other"]), (call["other"], call["self"])):
        if (softmax := eager.softmax_of(operand)) is not None:
            alias = softmax.aliases[storage_of(operand)]
            axis = axis_of_keys(operand, alias)
            if axis is None or out.shape != operand.shape:
                continue
            is_number = not isinstance(other, Tensor) or other.ndim == 0
            may_be_weights = alias.altered in (None, LOGARITHM, POINTWISE, UNNORMALISED)
            altered = COMBINED if may_be_weights and not is_number else alias.altered
            softmax.add(out, Alias(out, False, out.stride(axis), out.shape[axis], altered, changed=True))


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


# Where a trail ends: weights meet values.


def on_product(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    left, right = factors_of(call)
    eager = listener.eager
    eager.count_operator()
    if out.is_nested:
        return
    met = False
    if (softmax := eager.softmax_of(left)) is not None and is_parameter(right):
        if axis_of_keys(left, softmax.aliases[storage_of(left)]) not in (None, -1):
            moved_weights.mark_as_unknown(softmax, out, "a layer over its heads (talking heads)")
    elif softmax is not None:
        axis = axis_of_keys(left, softmax.aliases[storage_of(left)])
        met = _meet(listener, softmax, left, right, right_way=axis == -1, direct=True)
    elif (softmax := eager.softmax_of(right)) is not None and not is_parameter(left):
        axis, one_row = axis_of_keys(right, softmax.aliases[storage_of(right)]), right.ndim == 1
        used, v = right if one_row else right.mT, left.mT if left.ndim > 1 else left
        met = _meet(listener, softmax, used, v, right_way=axis == (-1 if one_row else -2), direct=False)
    computed = is_computed(left) and is_computed(right) and (left.ndim > 2) == (right.ndim > 2)
    if not met and computed and (site := listener.call_site(frame)) is not None:
        if site.compiled and left.ndim > 2 and _is_around_fused_softmax(eager, left, right, site):
            listener.refuse(site.name, CAPTURED)
        eager.add_product(out, site.name, flat=left.ndim <= 2)


def _is_around_fused_softmax(eager: EagerTracker, left: Tensor, right: Tensor, site: CallSite) -> bool:
    """Whether a product in compiled code takes what has the shape of scores made there, as weights meet their values.

    The softmax between the two is part of a fused kernel. Compiled code passes parameters as other tensors of the same
    memory: a product with one of them is a layer (experts, say).
    """
    parameters = () if site.module is None else site.module.parameters()
    return any(product.shape == left.shape and product.name == site.name for product in eager.products) and not any(
        storage_of(p) == storage_of(right) for p in parameters
    )


def on_einsum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    eager = listener.eager
    operands, equation = call["tensors"], call["equation"].replace(" ", "")
    eager.count_operator()
    sides, _, result = spell_out(equation, operands).partition("->")
    letters = sides.split(",")
    weighted = [(x, softmax) for x in operands if (softmax := eager.softmax_of(x)) is not None]
    if not weighted:
        computed = len(operands) == 2 and all(is_computed(x) for x in operands)
        scores = computed and may_be_scores(operands, letters, result)
        if scores and (site := listener.call_site(frame)) is not None:
            eager.add_product(out, site.name, flat=all(x.ndim <= 2 for x in operands))
        return
    w, softmax = weighted[0]
    name, alias = softmax.site.name, softmax.aliases[storage_of(w)]
    axis = axis_of_keys(w, alias)
    if not _is_attention(listener, softmax, alias, w, operands[-1], direct=True):
        return
    if len(operands) != 2 or "." in sides:
        eager.close(softmax)
        listener.refuse(name, f"its weights enter einsum({equation!r}), which is not read")
        return
    here = 0 if operands[0] is w else 1
    mine, others, v = letters[here], letters[1 - here], operands[1 - here]
    if axis is None or mine[axis] not in others or mine[axis] in result:  # the sum must run over the keys
        eager.close(softmax)
        listener.refuse(name, f"its weights enter einsum({equation!r}), which does not sum over the axis of softmax")
        return
    keys_first = others[-2:-1] == mine[axis]
    _finish(listener, softmax, w.movedim(axis, -1), v if keys_first else None, w, v)


_over_heads = moved_weights.OnReduced("sum")


def on_sum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """(w * v).sum over the keys."""
    eager, x = listener.eager, call["self"]
    eager.count_operator()
    softmax = next((s for s in reversed(eager.open) if isinstance(x, Tensor) and storage_of(x) in s.weighted), None)
    if softmax is None:
        _over_heads(listener, call, out, frame)
        return
    if call["keepdim"] or not call["dim"]:
        return
    w, v = softmax.weighted[storage_of(x)]
    w = _collapsed(w)
    axis = axis_of_keys(w, softmax.aliases[storage_of(w)])
    dims = [dim % x.ndim - x.ndim for dim in call["dim"]]
    if axis is None or dims != [axis] or not isinstance(v, Tensor) or not v.is_floating_point() or is_parameter(v):
        return
    # Where the values have no axis of their own for the rows of w, the axis of their features stands in its place.
    grown = [n for n in range(-w.ndim, 0) if w.shape[n] == 1 and x.shape[n] > 1 and n != axis]
    rows = [n for n in range(-w.ndim, 0) if w.shape[n] > 1 and n != axis and (-n > v.ndim or v.shape[n] == 1)]
    used = w.movedim(axis, -1)
    if rows and grown:
        used = w.squeeze(grown[-1]).movedim(axis if axis > grown[-1] else axis + 1, -1)
    if _is_attention(listener, softmax, softmax.aliases[storage_of(w)], used, v, direct=False):
        _finish(listener, softmax, used, None if rows or grown != [-1] else v, w, v)


def _meet(
    listener: tap.Listener, softmax: OpenSoftmax, used: Tensor, v: Tensor, *, right_way: bool, direct: bool
) -> bool:
    """Weights meet something in a product: used (…, i, j) and v (…, j, e) if the sum runs over the axis of softmax.

    Returns:
        Whether this is attention, recorded or refused.
    """
    alias = softmax.aliases[storage_of(used)]
    if not _is_attention(listener, softmax, alias, used, v, direct):
        return False
    if right_way:
        _finish(listener, softmax, used, v if v.ndim > 1 else None, used, v)
    elif softmax.product is not None and alias.altered not in (CHOSEN, UNNORMALISED):
        listener.eager.close(softmax)
        other_axis = "its weights are summed over another axis than the one softmax ran over, as in slot attention"
        listener.refuse(softmax.site.name, alias.altered or other_axis)
    return True


def _is_attention(
    listener: tap.Listener, softmax: OpenSoftmax, alias: Alias, used: Tensor, v: Tensor, direct: bool
) -> bool:
    """Whether a softmax that meets something is one over keys, or linear attention, which is refused later on.

    Args:
        listener: The listener.
        softmax: The softmax.
        alias: The tensor on its trail that meets the values.
        used: The same.
        v: The values.
        direct: Whether the weights are the left factor of a product, as attention is mostly written.
    """
    if alias.altered is LOGARITHM or (alias.altered is UNNORMALISED and softmax.product is None):
        return False
    if softmax.product is not None and not (softmax.product.flat and (used.ndim > 2 or v.ndim > 2)):
        return True
    module = softmax.site.module
    usual = direct and softmax.axis == -1 and used.ndim > 2 and v.ndim > 2
    if usual and ((module is not None and looks_like_attention(module)) or listener.eager.is_product(v)):
        return True
    return _pools_a_sequence(listener, softmax, alias, used, v)


def _pools_a_sequence(listener: tap.Listener, softmax: OpenSoftmax, alias: Alias, used: Tensor, v: Tensor) -> bool:
    """Whether a softmax without a product of queries and keys weighs the positions of each sequence.

    Additive attention scores positions by a small network. A router's softmax, and that of a mixture, runs over the
    outputs of a layer instead: a parameter has an axis of that size, and it is the last axis.
    """
    axis = axis_of_keys(used, alias)
    if axis is None or not 2 < used.ndim <= 4 or v.ndim < 3 or v.shape[-1] < 2 or used.shape[0] != v.shape[0]:
        return False
    if used.shape[0] != listener.batch_size(used.shape[-2]) or softmax.site.module is None:
        return False
    if (
        used.numel() != used.shape[0] * used.shape[axis]
    ):  # several rows: linear attention sums keys by feature like this
        return False
    return softmax.axis != -1 or not has_parameter_axis(softmax.site, used.shape[axis])


def _finish(
    listener: tap.Listener, softmax: OpenSoftmax, used: Tensor, values: Tensor | None, factor: Tensor, v: Tensor
) -> None:
    """Report the weights `used` (…, i, j), if weights they are; `factor` and v are the operands that met."""
    eager, site = listener.eager, softmax.site
    alias = softmax.aliases[storage_of(factor)]
    v_is_product = eager.is_product(v)
    is_new = softmax.meet(_collapsed(factor))
    for other in eager.open:
        if other.alias_of(factor) is not None and (other is not softmax or softmax.unmet <= 0):
            eager.close(other)
    if not is_new:
        return
    w = alias.clean.as_strided(used.shape, used.stride(), used.storage_offset()) if alias.dropped else used
    divided = alias.altered in (UNNORMALISED, POINTWISE) and _is_normalised(w)
    altered = None if divided else alias.altered
    reason = altered or _no_weights(softmax, v_is_product, w, alias)
    if reason is not None:
        eager.close(softmax)
        listener.refuse(site.name, reason)
        return
    w = w if w.ndim > 1 else w.unsqueeze(0)
    batch = listener.batch_size(w.shape[-2])
    w4 = split_heads(w, site.module, batch)
    if w4 is None:
        listener.refuse(site.name, shared_axis_reason(site))
        return
    call = AttentionCall(v=None if values is None else split_heads(values, site.module, batch), w=w4)
    s = softmax.scores
    if s is not None and s.shape[:-1] == w.shape[:-1]:
        call.s = split_heads(s[..., : w.shape[-1]], site.module, batch)  # without the column of a sink
    listener.attention(site, call)


def _is_normalised(w: Tensor) -> bool:
    """Whether rows sum to 1: exp(s − logsumexp(s)) is divided by its sum before exp."""
    return bool(((w.float().sum(-1) - 1).abs() < 0.01).all())


def _no_weights(softmax: OpenSoftmax, v_is_product: bool, w: Tensor, alias: Alias) -> str | None:
    """The reason why a softmax gives no weights over keys; None if it does."""
    if softmax.product is None and v_is_product:
        return "it multiplies a softmax with a product, as in linear attention: no weights over keys are to be had"
    if w.ndim > 4:
        return f"its weights have {w.ndim} axes; (batch, heads, queries, keys) is read"
    if alias.changed and (bool((w < 0).any()) or bool((w.sum(-1) > 1.01).any())):
        return "its softmax is changed before it meets the values: some rows are negative or sum to more than 1"
    return None
