"""softmax(q kᵀ) v written out by the model ("eager" attention): recognised operator by operator, kept as computed.

A product of two computed tensors may be scores. A softmax opens a trail, operators such as dropout extend it, and the
product with the values ends it. Several softmaxes may be open at once (attention in both directions). Linear attention
also takes softmaxes, over features: there the values are a product themselves, or no product made the scores.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import AttentionCall
from . import tap
from .call_site import SHARED_AXIS, CallSite, looks_like_attention, split_heads

__all__ = ["CHUNKED", "EagerTracker", "install"]

#: Modules that attend within chunks or to samples: their softmax is over keys that are not the sequence's positions.
CHUNKED = {
    "BigBirdBlockSparseAttention",
    "BigBirdPegasusBlockSparseAttention",
    "LEDEncoderSelfAttention",
    "LocalSelfAttention",
    "LongT5LocalAttention",
    "LongT5TransientGlobalAttention",
    "LongformerSelfAttention",
    "LSHSelfAttention",
    "ProphetNetNgramSelfAttention",
    "XLMProphetNetNgramSelfAttention",
    "NystromformerSelfAttention",
    "YosoSelfAttention",
}


#: Operators between a softmax and its product after which weights are still weights.
KEEPS_WEIGHTS = (
    "dropout", "native_dropout", "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy", "type_as",
    "contiguous", "clone", "mul.Tensor", "nan_to_num", "masked_fill.Scalar", "masked_fill.Tensor",
)  # fmt: skip

#: Operators that combine weights with something else.
COMBINES_WEIGHTS = ("add.Tensor", "sub.Tensor", "add_.Tensor", "sub_.Tensor")

#: The number of operators after which an open softmax is given up: the product with the values comes soon.
PATIENCE = 40

#: Softmaxes that may be open at once.
MOST_OPEN = 4

COMBINED = "its weights are combined with others before they meet the values, as in differential attention"


def install() -> None:
    """Intercept products and softmax; the operators between them only while a softmax is open."""
    for name in ("softmax.int", "_softmax"):
        tap.intercept(name, on_softmax)
    for name in ("matmul", "bmm", "baddbmm"):
        tap.intercept(name, on_product)
    tap.intercept("einsum", on_einsum)
    for name in KEEPS_WEIGHTS:
        tap.intercept(name, OnElementwise("dropout" in name), tap.FOLLOW_KEY)
    for name in COMBINES_WEIGHTS:
        tap.intercept(name, on_combination, tap.FOLLOW_KEY)
    tap.intercept("dropout_", on_dropout_in_place, tap.FOLLOW_KEY)


class Alias(NamedTuple):
    """A tensor that holds the weights of a softmax."""

    clean: Tensor  # the weights before dropout
    dropped: bool  # whether dropout came since
    key_stride: int
    altered: str | None = None  # the reason why these are no longer weights


@dataclass
class OpenSoftmax:
    """A softmax whose product with values has not come yet."""

    site: CallSite
    from_product: bool  # whether its scores came from a product of two computed tensors
    scores: Tensor | None  # for a listener that wants them
    operators: int = 0  # operators since
    aliases: dict[int, Alias] = field(default_factory=dict)  # by storage
    alive: list[Tensor] = field(default_factory=list)  # keeps the allocator from reusing these storages

    def add(self, out: Tensor, alias: Alias) -> None:
        self.aliases[_storage(out)] = alias
        self.alive.append(out)

    def alias_of(self, x: Any) -> Alias | None:
        return self.aliases.get(_storage(x)) if isinstance(x, Tensor) else None

    def holds(self, x: Any) -> bool:
        """Whether x is the weights with keys on the last axis."""
        alias = self.alias_of(x)
        return alias is not None and (x.shape[-1] == 1 or x.stride(-1) == alias.key_stride)


class RecentProduct(NamedTuple):
    """The address and shape of a product of two computed tensors; the tensor itself may be gone."""

    storage: int
    shape: torch.Size

    def may_be_scores_of(self, w: Tensor) -> bool:
        """Whether w could be a softmax of this product, perhaps with a sink as one more column."""
        i, j = self.shape[-2:]
        rows = self.shape.numel() // max(1, j)
        if w.shape[-1] == i and w.numel() == self.shape.numel():  # of the transposed scores
            return True
        return w.shape[-1] in (j, j + 1) and w.numel() == rows * w.shape[-1]

    def is_tensor(self, x: Tensor) -> bool:
        return self.storage == _storage(x) and self.shape[-2:] == x.shape[-2:]


class EagerTracker:
    """What one listener remembers: recent products and open softmaxes."""

    def __init__(self) -> None:
        self.products: deque[RecentProduct] = deque(maxlen=16)
        self.open: list[OpenSoftmax] = []

    def start(self, w: Tensor, site: CallSite, scores: Tensor | None) -> None:
        """A softmax with output w."""
        if len(self.open) == MOST_OPEN:
            self.open.pop(0)
        softmax = OpenSoftmax(site, any(product.may_be_scores_of(w) for product in self.products), scores)
        softmax.add(w, Alias(w, False, w.stride(-1)))
        self.open.append(softmax)
        tap.follow(True)

    def count_operator(self) -> None:
        """One more operator passed; softmaxes that waited too long are closed."""
        if not self.open:
            return
        for softmax in self.open:
            softmax.operators += 1
        self.open = [softmax for softmax in self.open if softmax.operators <= PATIENCE]
        self._unfollow()

    def close(self, softmax: OpenSoftmax) -> None:
        self.open = [other for other in self.open if other is not softmax]
        self._unfollow()

    def clear(self) -> None:
        self.open = []
        self._unfollow()

    def softmax_of(self, x: Any) -> OpenSoftmax | None:
        """The open softmax that x shares storage with."""
        return next((softmax for softmax in reversed(self.open) if softmax.alias_of(x) is not None), None)

    def weights_in(self, x: Any) -> OpenSoftmax | None:
        """The open softmax whose weights x is."""
        return next((softmax for softmax in reversed(self.open) if softmax.holds(x)), None)

    def _unfollow(self) -> None:
        if not any(other.eager.open for other in tap.listeners()):
            tap.follow(False)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def on_softmax(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    if out.is_nested or out.ndim < 3 or call["dim"] % out.ndim != out.ndim - 1:
        return
    if (site := listener.call_site(frame)) is None:
        return
    if type(site.module).__name__ in CHUNKED:
        listener.refuse_at(frame, "it attends to chunks, landmarks or samples, which are not positions of the sequence")
        return
    listener.eager.start(out, site, call["self"] if listener.wants_scores else None)


class OnElementwise:
    """Handler of an operator after which weights are still weights."""

    def __init__(self, is_dropout: bool) -> None:
        self.is_dropout = is_dropout

    def __call__(self, listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        eager = listener.eager
        eager.count_operator()
        first: Any = call.get("self", call.get("input"))
        if eager.softmax_of(first) is None:
            first = call.get("other")  # mask * w
        result = out[0] if isinstance(out, tuple) else out
        softmax = eager.softmax_of(first)
        if softmax is None or softmax.alias_of(result) is not None:
            return
        alias = softmax.aliases[_storage(first)]
        stride = result.stride(-1)
        if self.is_dropout:
            softmax.add(result, Alias(alias.clean if alias.dropped else first, True, stride, alias.altered))
        elif alias.dropped:  # converted after dropout: the same numbers in another type
            softmax.add(result, Alias(alias.clean, True, stride, alias.altered))
        else:
            softmax.add(result, Alias(result, False, stride, alias.altered))


def on_combination(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    """Weights plus or minus something: no longer the weights of one softmax."""
    eager = listener.eager
    eager.count_operator()
    for operand in (call["self"], call["other"]):
        if (softmax := eager.softmax_of(operand)) is not None:
            softmax.add(out, Alias(out, False, out.stride(-1), COMBINED))


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


def on_product(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    left, right = (call[name] for name in (("batch1", "batch2") if "batch1" in call else ("self", _other(call))))
    eager = listener.eager
    eager.count_operator()
    if (softmax := eager.weights_in(left)) is not None:
        _finish(listener, softmax, left, right)
    elif _is_computed(left) and _is_computed(right) and not out.is_nested:
        eager.products.append(RecentProduct(_storage(out), out.shape))


def _other(call: dict[str, Any]) -> str:
    return "other" if "other" in call else "mat2"


def _is_computed(x: Tensor) -> bool:
    """Whether a factor is computed, not a parameter of the model."""
    return x.ndim >= 3 and not isinstance(x, torch.nn.Parameter) and not isinstance(x._base, torch.nn.Parameter)


def on_einsum(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    eager = listener.eager
    operands = call["tensors"]
    eager.count_operator()
    weighted = [(x, softmax) for x in operands if (softmax := eager.weights_in(x)) is not None]
    if not weighted:
        if len(operands) == 2 and all(_is_computed(x) for x in operands):
            eager.products.append(RecentProduct(_storage(out), out.shape))
        return
    w, softmax = weighted[0]
    name = softmax.site.name
    sides, _, result = call["equation"].replace(" ", "").partition("->")
    letters = sides.split(",")
    if len(operands) != 2 or "." in sides:
        eager.close(softmax)
        listener.refuse(name, f"its weights enter einsum({call['equation']!r}), which is not read")
        return
    here = 0 if operands[0] is w else 1
    mine, others, v = letters[here], letters[1 - here], operands[1 - here]
    if mine[-1] not in others or mine[-1] in result:  # the sum must run over the keys
        eager.close(softmax)
        listener.refuse(
            name, f"its weights enter einsum({call['equation']!r}), which does not sum over their last axis"
        )
        return
    _finish(listener, softmax, w, v, keys_first=others[-2:-1] == mine[-1])


def _finish(listener: tap.Listener, softmax: OpenSoftmax, used: Tensor, v: Tensor, keys_first: bool = True) -> None:
    """Weights meet values: report the weights, if weights they are."""
    if used.ndim < 3 or v.ndim < 3:
        return
    eager, site = listener.eager, softmax.site
    alias = softmax.aliases[_storage(used)]
    v_is_product = any(product.is_tensor(v) for product in eager.products)
    for other in eager.open:
        if other.alias_of(used) is not None:
            eager.close(other)
    reason = alias.altered or _no_weights(softmax, v_is_product) or _shape_reason(alias, used)
    if reason is not None:
        listener.refuse(site.name, reason)
        return
    w = alias.clean.reshape(used.shape) if alias.dropped else used
    w4 = split_heads(w, site.module, listener.batch_size())
    if w4 is None:
        listener.refuse(site.name, SHARED_AXIS)
        return
    call = AttentionCall(v=split_heads(v, site.module, listener.batch_size()) if keys_first else None, w=w4)
    s = softmax.scores
    if s is not None and s.shape[:-1] == w.shape[:-1]:
        call.s = split_heads(s[..., : w.shape[-1]], site.module, listener.batch_size())  # without the column of a sink
    listener.attention(site, call)


def _no_weights(softmax: OpenSoftmax, v_is_product: bool) -> str | None:
    """The reason why a softmax is not over keys; None if it is."""
    module = softmax.site.module
    if softmax.from_product or (not v_is_product and module is not None and looks_like_attention(module)):
        return None
    why = (
        "is multiplied with a product, as in linear attention"
        if v_is_product
        else "is not of a product of queries and keys"
    )
    return f"it multiplies something with a softmax that {why}: no weights over keys are to be had"


def _shape_reason(alias: Alias, used: Tensor) -> str | None:
    if alias.dropped and alias.clean.numel() != used.numel():
        return "its weights change shape after dropout"
    return f"its weights have {used.ndim} axes; (batch, heads, queries, keys) is read" if used.ndim > 4 else None
