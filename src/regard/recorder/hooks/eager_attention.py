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

import torch
from torch import Tensor

from . import einsum_attention, moved_weights, other_operators, pairs, tap, weight_operators
from .call_site import CAPTURED, CallSite
from .chunked_modules import CHUNKED, IN_CHUNKS
from .layer_history import UNHEARD
from .meeting import is_linear_attention, meet
from .product_factors import (
    factors_of,
    has_learned_queries,
    is_computed,
    is_layer,
    is_layer_with_bias,
    is_parameter,
    is_table,
)
from .softmax_trail import (
    CHOSEN,
    LOGARITHM,
    POINTWISE,
    UNNORMALISED,
    Alias,
    EagerTracker,
    ScoreProduct,
    axes_of_keys,
    axis_of_keys,
    storage_of,
)

__all__ = ["EagerTracker", "install"]

#: Functions of each score alone that models weigh keys by; activations and gates as well.
POINTWISE_FUNCTIONS = (
    "sigmoid", "sigmoid_", "relu", "relu_", "silu", "silu_", "gelu", "elu", "tanh", "softplus", "leaky_relu", "square",
    "hardsigmoid", "hardtanh",
)  # fmt: skip


def install() -> None:
    """Intercept products and softmax; the operators between them only while scores or weights are followed."""
    for name in ("softmax.int", "_softmax", "softmax.int_out", "_softmax.out"):
        tap.intercept(name, on_softmax, attends=True)
    tap.intercept("_sparse_softmax.int", on_sparse_softmax, attends=True)
    for name in ("log_softmax.int", "_log_softmax"):
        tap.intercept(name, on_log_softmax)
    for name in ("exp", "exp_", "exp2", "exp2_", "pow.Scalar"):
        tap.intercept(name, on_exp, tap.FOLLOW_KEY)
    for name in POINTWISE_FUNCTIONS:
        tap.intercept(name, on_pointwise, tap.FOLLOW_KEY)
    for name in ("clamp", "clamp_", "clamp_min", "clamp_min_"):
        tap.intercept(name, on_clamp, tap.FOLLOW_KEY)
    tap.intercept("topk", on_topk, tap.FOLLOW_KEY)
    for name in ("matmul", "mm", "mv", "matmul.out", "mm.out"):
        tap.intercept(name, on_product, tap.PRODUCT_KEY, skip=is_layer, multiplies=True)
    for name in ("addmm", "addmv", "addmm.out"):
        tap.intercept(name, on_product, tap.PRODUCT_KEY, skip=is_layer_with_bias, multiplies=True)
    for name in ("bmm", "baddbmm", "dot", "bmm.out", "baddbmm.out"):
        tap.intercept(name, on_product, tap.PRODUCT_KEY, multiplies=True)
    convolves, adds = (OnOtherProduct(op.default) for op in (torch.ops.aten.convolution, torch.ops.aten.addbmm))
    tap.intercept("convolution", convolves, tap.PRODUCT_KEY, skip=is_layer, multiplies=True)
    tap.intercept("addbmm", adds, tap.PRODUCT_KEY, multiplies=True)
    tap.intercept("cdist", on_distances, tap.PRODUCT_KEY)
    einsum_attention.install()
    weight_operators.install()
    moved_weights.install()
    pairs.install({"sum.dim_IntList": on_sum, "add.Tensor": weight_operators.on_combination, **moved_weights.BY_NAME})
    other_operators.install()


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
    eager, exponent = listener.eager, call.get("exponent", call["self"])
    softmax, product = eager.softmax_of(exponent), eager.product_behind(exponent)
    alias = None if softmax is None else softmax.aliases[storage_of(exponent)]
    if softmax is not None and alias is not None and alias.altered is LOGARITHM:
        softmax.add(out, alias._replace(altered=None))
        return
    if softmax is not None and product is None:
        moved_weights.mark_as_unknown(softmax, out, "exp")
    if out.ndim < 2 or product is None or (site := listener.call_site(frame)) is None:
        return
    if type(site.module).__name__ in CHUNKED:
        listener.refuse_at(frame, IN_CHUNKS)
    else:
        eager.start(out, None, site, product, None, UNNORMALISED)


def on_pointwise(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """A function of each score alone: weights, perhaps. Activations and gates are such too."""
    eager = listener.eager
    product = eager.product_behind(call["self"])
    if product is None:
        weight_operators.changes_weights(listener, call, out, frame)
    elif out.ndim > 1 and (site := listener.call_site(frame)) is not None:
        eager.start(out, None, site, product, None, POINTWISE)


def on_clamp(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Weights that are clamped; or scores above a threshold, as in sparsemax, whose rows sum to 1."""
    if listener.eager.softmax_of(call["self"]) is not None:
        weight_operators.changes_weights(listener, call, out, frame)
    elif not isinstance(call["min"], Tensor) and call["min"] == 0 and call.get("max") is None:
        on_pointwise(listener, call, out, frame)


def on_topk(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    """The largest weights, or the largest scores, of which a softmax may follow: their keys are no longer positions."""
    eager = listener.eager
    if (softmax := eager.softmax_of(call["self"])) is not None:
        softmax.add(out[0], Alias(None, out[0].stride(call["dim"]), call["k"], CHOSEN))
    elif (product := eager.product_behind(call["self"])) is not None:
        eager.add_scores(out[0], product._replace(chosen=True))


def _start(
    listener: tap.Listener, scores: Tensor, out: Tensor, dim: int, frame: FrameType, altered: str | None
) -> None:
    if out.is_nested or out.ndim == 0 or (site := listener.call_site(frame)) is None:
        return
    axis = dim % out.ndim - out.ndim
    if type(site.module).__name__ in CHUNKED and out.ndim > 2:
        listener.refuse_at(frame, IN_CHUNKS)
        return
    wanted = scores if listener.wants_scores and axis == -1 else None
    before = listener.eager.softmax_of(scores)  # a softmax of weights gives weights again
    product = listener.eager.product_behind(scores) or (None if before is None else before.product)
    if not tap.hears_products():
        listener.distrust()
        product, altered = ScoreProduct(out.shape, site.name, False, tuple(out.shape[-2:])), UNHEARD
    listener.eager.start(out, axis, site, product, wanted, altered)


# Where a trail ends: weights meet values.


def on_product(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    left, right = factors_of(call)
    eager = listener.eager
    eager.count_operator()
    if out.is_nested:
        return
    if eager.mixtures and is_linear_attention(listener, ((left, left.shape[-1]), (right, left.shape[-1]))):
        return
    met = False
    if moved_weights.on_two_weights(eager, (left, right), out):
        pass
    elif (softmax := eager.softmax_of(left)) is not None and _is_of_layer(listener, right, frame):
        if axis_of_keys(left, softmax.aliases[storage_of(left)]) not in (None, -1):
            moved_weights.mark_as_unknown(softmax, out, "a layer over its heads (talking heads)")
    elif softmax is not None:
        axes = axes_of_keys(left, softmax.aliases[storage_of(left)])
        met = meet(listener, softmax, left, right, right_way=-1 in axes, direct=True)
        eager.add_mixture(out, softmax, rows=left.shape[-2] if left.ndim > 1 else 1)
    elif (softmax := eager.softmax_of(right)) is not None and not _is_of_layer(listener, left, frame):
        axes, one_row = axes_of_keys(right, softmax.aliases[storage_of(right)]), right.ndim == 1
        weights, v = right if one_row else right.mT, left.mT if left.ndim > 1 else left
        met = meet(listener, softmax, weights, v, right_way=(-1 if one_row else -2) in axes, direct=False)
    learned = has_learned_queries(left, right)
    computed = is_computed(left) and is_computed(right) and (left.ndim > 2) == (right.ndim > 2)
    if met or not (learned or computed) or (site := listener.call_site(frame)) is None or _is_cast_layer(right, site):
        return
    if left.shape[-1] == 1 and is_table(site.module, left.shape[-2:-1], right.shape[-1:]):
        return
    if site.compiled and left.ndim > 2 and _is_around_fused_softmax(eager, left, right, site):
        listener.refuse(site.name, CAPTURED)
    ends = out.shape[-1:] if learned else out.shape[-2:]  # a softmax over the queries is that of a layer
    eager.add_product(out, site.name, flat=not learned and left.ndim <= 2, ends=tuple(ends), patience=100)


def _is_of_layer(listener: tap.Listener, x: Tensor, frame: FrameType) -> bool:
    """Whether a factor is a parameter, or may be one that autocast has copied to another type."""
    if is_parameter(x) or x.ndim != 2:
        return is_parameter(x)
    return (site := listener.call_site(frame)) is not None and _is_cast_layer(x, site)


def _is_cast_layer(right: Tensor, site: CallSite) -> bool:
    """Whether a matrix or kernel may be a parameter of the module that autocast has copied to another type."""
    if right.ndim < 2 or site.module is None:
        return False
    shapes = (right.shape, right.mT.shape)
    return any(p.shape in shapes and p.dtype != right.dtype for p in site.module.parameters(recurse=False))


def _is_around_fused_softmax(eager: EagerTracker, left: Tensor, right: Tensor, site: CallSite) -> bool:
    """Whether a product in compiled code takes what has the shape of scores made there, as weights meet their values.

    The softmax between the two is part of a fused kernel. Compiled code passes parameters as other tensors of the same
    memory: a product with one of them is a layer (experts, say).
    """
    parameters = () if site.module is None else site.module.parameters()
    return any(product.shape == left.shape and product.name == site.name for product in eager.products) and not any(
        storage_of(p) == storage_of(right) for p in parameters
    )


class OnOtherProduct:
    """Handler of a product that may give scores and, where weights meet their values in it, is not followed."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
        left, right = (call["input"], call["weight"]) if "weight" in call else factors_of(call)
        if listener.eager.open:
            other_operators.on_other(listener, self.op, (left, right), out, frame)
        if not (is_computed(left) and is_computed(right)) or (site := listener.call_site(frame)) is None:
            return
        if not _is_cast_layer(right, site):
            # A convolution has queries or keys as its channels.
            ends = (len(right) // call["groups"], *out.shape[2:]) if "groups" in call else tuple(out.shape)
            listener.eager.add_product(out, site.name, flat=False, ends=ends)


_over_heads = moved_weights.OnReduced("sum")


def on_sum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """(w * v).sum over the keys."""
    eager, x = listener.eager, call["self"]
    eager.count_operator()
    softmax = eager.softmax_of(x)
    if softmax is not None and storage_of(x) not in softmax.weighted:
        softmax = None
    if softmax is None:
        _over_heads(listener, call, out, frame)
        return
    summed = [dim % x.ndim - x.ndim for dim in call["dim"] or ()]
    if summed and not einsum_attention.on_weighted(listener, softmax, x, summed):
        softmax.strayed = softmax.strayed or "sum"
