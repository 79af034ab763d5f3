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

from . import einsum_attention, moved_weights, other_operators, pairs, tap, weight_operators
from .call_site import CAPTURED, CallSite
from .chunked_modules import CHUNKED, IN_CHUNKS
from .meeting import collapsed, finish, is_attention, meet
from .product_factors import factors_of, has_learned_queries, is_computed, is_layer, is_parameter
from .softmax_trail import (
    CHOSEN,
    LOGARITHM,
    POINTWISE,
    UNNORMALISED,
    Alias,
    EagerTracker,
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
    """Intercept products and softmax; the operators between them only while a softmax is open."""
    for name in ("softmax.int", "_softmax", "softmax.int_out", "_softmax.out"):
        tap.intercept(name, on_softmax, attends=True)
    tap.intercept("_sparse_softmax.int", on_sparse_softmax, attends=True)
    for name in ("log_softmax.int", "_log_softmax"):
        tap.intercept(name, on_log_softmax)
    for name in ("exp", "exp_", "exp2", "exp2_", "pow.Scalar"):
        tap.intercept(name, on_exp)
    for name in POINTWISE_FUNCTIONS:
        tap.intercept(name, on_pointwise, skip=_is_activation)
    for name in ("clamp", "clamp_", "clamp_min", "clamp_min_"):
        tap.intercept(name, on_clamp, skip=_is_far_from_weights)
    tap.intercept("topk", on_topk)
    for name in ("matmul", "mm", "mv", "matmul.out", "mm.out"):
        tap.intercept(name, on_product, skip=is_layer, multiplies=True)
    for name in ("bmm", "baddbmm", "bmm.out", "baddbmm.out"):
        tap.intercept(name, on_product, multiplies=True)
    for name in ("addmm", "addmm.out"):  # every nn.Linear is one: intercepted only where weights may meet values
        tap.intercept(name, on_product, tap.FOLLOW_KEY)
    tap.intercept("cdist", on_distances)
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
    if (softmax := eager.softmax_of(exponent)) is not None:
        alias = softmax.aliases[storage_of(exponent)]
        if alias.altered is LOGARITHM:
            softmax.add(out, alias._replace(altered=None))
            return
    if out.ndim < 2 or not any(product.shape.numel() == out.numel() for product in eager.products):
        return
    if (site := listener.call_site(frame)) is not None and eager.product_of(out, None, site) is not None:
        if type(site.module).__name__ in CHUNKED:
            listener.refuse_at(frame, IN_CHUNKS)
        else:
            eager.start(out, None, site, None, UNNORMALISED)


def _is_activation(live: list[Any], args: tuple[Any, ...]) -> bool:
    """Whether no listener has seen a product of that shape last: most such functions are of a feed-forward layer."""
    return not any(_is_newest_product(listener, args[0]) for listener in live)


def _is_newest_product(listener: tap.Listener, x: Tensor) -> bool:
    """Whether x may be a view of the newest product, or its scores after scale and mask."""
    if not (products := listener.eager.products):
        return False
    shape = products[-1].shape
    return x.ndim > 1 and len(shape) > 1 and x.shape[-2:] == shape[-2:] and x.numel() == shape.numel()


def on_pointwise(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """A function of each score alone: weights, if it is of the newest product. Activations and gates are such too."""
    eager = listener.eager
    if not _is_newest_product(listener, out):
        return  # of another listener
    site = listener.call_site(frame)
    if site is not None and eager.product_of(out, -1, site) is eager.products[-1]:
        eager.start(out, -1, site, None, POINTWISE)


def _is_far_from_weights(live: list[Any], args: tuple[Any, ...]) -> bool:
    return _is_activation(live, args) and not any(listener.eager.open for listener in live)


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
        axes = axes_of_keys(left, softmax.aliases[storage_of(left)])
        met = meet(listener, softmax, left, right, right_way=-1 in axes, direct=True)
    elif (softmax := eager.softmax_of(right)) is not None and not is_parameter(left):
        axes, one_row = axes_of_keys(right, softmax.aliases[storage_of(right)]), right.ndim == 1
        used, v = right if one_row else right.mT, left.mT if left.ndim > 1 else left
        met = meet(listener, softmax, used, v, right_way=(-1 if one_row else -2) in axes, direct=False)
    learned = has_learned_queries(left, right)
    computed = is_computed(left) and is_computed(right) and (left.ndim > 2) == (right.ndim > 2)
    if met or not (learned or computed) or (site := listener.call_site(frame)) is None or _is_cast_layer(right, site):
        return
    if site.compiled and left.ndim > 2 and _is_around_fused_softmax(eager, left, right, site):
        listener.refuse(site.name, CAPTURED)
    ends = out.shape[-1:] if learned else out.shape[-2:]  # a softmax over the queries is that of a layer
    eager.add_product(out, site.name, flat=not learned and left.ndim <= 2, ends=tuple(ends))


def _is_cast_layer(right: Tensor, site: CallSite) -> bool:
    """Whether a matrix may be a parameter of the module that autocast has copied to another type."""
    if right.ndim != 2 or site.module is None:
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
    if call["keepdim"] or not call["dim"]:
        return
    w, v = softmax.weighted[storage_of(x)]
    w = collapsed(w)
    axis, *more = [dim % x.ndim - x.ndim for dim in call["dim"]]
    if (
        more
        or axis not in axes_of_keys(w, softmax.aliases[storage_of(w)])
        or not isinstance(v, Tensor)
        or not v.is_floating_point()
        or is_parameter(v)
    ):
        return
    # Where the values have no axis of their own for the rows of w, the axis of their features stands in its place.
    grown = [n for n in range(-w.ndim, 0) if w.shape[n] == 1 and x.shape[n] > 1 and n != axis]
    rows = [n for n in range(-w.ndim, 0) if w.shape[n] > 1 and n != axis and (-n > v.ndim or v.shape[n] == 1)]
    used = w.movedim(axis, -1)
    if grown and (rows or w.ndim > 4):
        used = w.squeeze(grown[-1]).movedim(axis if axis > grown[-1] else axis + 1, -1)
    if is_attention(listener, softmax, softmax.aliases[storage_of(w)], used, v, direct=False):
        finish(listener, softmax, used, None if rows or grown != [-1] else v, w, v)
