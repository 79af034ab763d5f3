"""Scores that no product of matrices computes: sums over features, and sums of two sequences.

`(q[:, None] * k).sum(-1)`, a distance, or additive attention's `v · tanh(q + k)` pairs two sequences by broadcasting.
The result may be scores: the softmax over it, and the product which that enters, decide.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from . import tap
from .layout import own_shape
from .plain_tensors import is_plain

__all__ = ["SUMS", "install", "on_outer_sum", "on_sum", "pairs", "sums_features"]

#: Operators that sum over features, in their own way.
SUMS = ("sum.dim_IntList", "mean.dim", "linalg_vector_norm")


def install(follow: dict[str, Callable[..., None]]) -> None:
    """Intercept these operators; while a softmax is open, `follow` has their handlers of weights, by name."""
    for names, begins, handler in (
        (SUMS, sums_features, on_sum),
        (("add.Tensor",), pairs, on_outer_sum),
    ):
        for name in names:
            tap.intercept(name, _both(follow.get(name), begins, handler), tap.PRODUCT_KEY, skip=_unless(begins))


def _unless(begins: Callable[[tuple[Any, ...]], bool]) -> tap.Skip:
    return lambda args: not begins(args)


def _both(follow: tap.Handler | None, begins: Callable[[tuple[Any, ...]], bool], handler: tap.Handler) -> tap.Handler:
    def on_operator(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        if follow is not None and listener.eager.open:
            follow(listener, call, out, frame)
        if begins(tuple(call.values())):
            handler(listener, call, out, frame)

    return on_operator


def sums_features(args: tuple[Any, ...]) -> bool:
    """Whether a sum, by its arguments, may give scores: over one axis of three or more, which it removes."""
    x, *how = args
    keepdim = True in [a is True for a in how]  # 1 is the order of a norm
    if keepdim or not is_plain(x) or x.ndim < 3 or not x.is_floating_point():
        return False
    dims = next((a for a in how if isinstance(a, list)), None)
    return dims is not None and len(dims) == 1


def on_sum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """A sum over features: a product of queries and keys by broadcasting, or a distance."""
    if listener.eager.softmax_of(call["self"]) is None and (site := listener.call_site(frame)) is not None:
        listener.eager.add_product(out, site.name, flat=out.ndim <= 2, ends=tuple(out.shape))


def pairs(args: tuple[Any, ...]) -> bool:
    """Whether two operands have an axis each that the other lacks, by which they are broadcast."""
    x, y, *_ = args
    if not (is_plain(x) and is_plain(y)) or x.ndim != y.ndim or x.ndim < 2 or x.is_nested or y.is_nested:
        return False
    if x.shape == y.shape and 0 not in x.stride() and 0 not in y.stride():  # nothing was expanded
        return False
    lacks = [(a == 1 < b) - (b == 1 < a) for a, b in zip(own_shape(x), own_shape(y), strict=True)]
    return 1 in lacks and -1 in lacks and x.is_floating_point() and y.is_floating_point()


def on_outer_sum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """The sum of two sequences, which is scores itself or gives them when a layer weighs its features."""
    if (site := listener.call_site(frame)) is None:
        return
    own = zip(own_shape(call["self"]), own_shape(call["other"]), strict=True)
    ends = tuple(max(a, b) for a, b in own if a != b and 1 in (a, b))
    listener.eager.add_product(out, site.name, flat=out.ndim <= 2, ends=ends)
