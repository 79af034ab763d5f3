"""softmax(q kᵀ) v written out by the model itself: found, and kept as the model made it.

A product makes scores, the softmax opens a trail, steps such as dropout continue it, the product with the values ends
it. A softmax over features (linear attention) looks alike but for what it is multiplied with. Imports `tap`, `where`
and `capture`.
"""

from __future__ import annotations

from collections import deque
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import AttentionCall
from . import tap
from .call_site import SHARED_AXIS, looks_like_attention, split_heads

__all__ = ["CHUNKED", "Trail", "listen"]

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


#: Operators that may stand between a softmax and its product.
STEPS = (
    "dropout", "native_dropout", "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy", "type_as",
    "contiguous", "clone", "mul.Tensor", "nan_to_num", "masked_fill.Scalar", "masked_fill.Tensor",
)  # fmt: skip


def listen() -> None:
    """Begin to overhear products and softmax; the steps between them only while a softmax is open."""
    for name in ("softmax.int", "_softmax"):
        tap.hear(name, heard_softmax)
    for name in ("matmul", "bmm", "baddbmm"):
        tap.hear(name, heard_product)
    tap.hear("einsum", heard_einsum)
    for name in STEPS:
        tap.hear(name, Step("dropout" in name), tap.FOLLOW)
    tap.hear("dropout_", heard_dropout_in_place, tap.FOLLOW)


class Trail:
    """What one listener remembers of products and of a softmax whose product has not come yet."""

    def __init__(self) -> None:
        self.products: deque[Product] = deque(maxlen=16)
        self.at: Any = None  # where the softmax was called; None while none is open
        self.s: Tensor | None = None  # what softmax was taken of, for a listener that wants scores
        self.scored = False  # whether its scores came from a product of queries and keys
        self.steps = 0
        #: Where the weights live: storage → (weights before dropout, whether dropout came since, stride of the keys).
        self.places: dict[int, tuple[Tensor, bool, int]] = {}
        self.alive: list[Tensor] = []  # a storage must not be given to somebody else while it is looked for

    def open(self, w: Tensor, at: Any, scores: Tensor | None) -> None:
        self.close()
        self.at, self.steps, self.s = at, 0, scores
        self.scored = any(product.scores(w) for product in self.products)
        self.grow(w, w, False)
        tap.follow(True)

    def grow(self, out: Tensor, clean: Tensor, dropped: bool) -> None:
        self.places[_storage(out)] = clean, dropped, out.stride(-1)
        self.alive.append(out)

    def close(self) -> None:
        self.at, self.s, self.places, self.alive = None, None, {}, []
        if all(other.trail.at is None for other in tap.listeners()):
            tap.follow(False)

    def step(self) -> bool:
        """One more operator; whether a softmax is still open."""
        self.steps += 1
        if self.at is not None and self.steps > PATIENCE:
            self.close()
        return self.at is not None

    def knows(self, x: Any) -> bool:
        """Whether x lives where the weights do."""
        return isinstance(x, Tensor) and _storage(x) in self.places

    def holds(self, x: Any) -> bool:
        """Whether x is the weights, its last axis the keys."""
        if not self.knows(x):
            return False
        return x.shape[-1] == 1 or x.stride(-1) == self.places[_storage(x)][2]


class Product(NamedTuple):
    """A product of two things the model computed, by what it looks like; it is not kept alive."""

    storage: int
    shape: torch.Size

    def scores(self, w: Tensor) -> bool:
        """Whether softmax could have been taken of this, perhaps with a sink as one more column."""
        j = self.shape[-1]
        rows = self.shape.numel() // max(1, j)
        return w.shape[-1] in (j, j + 1) and w.numel() == rows * w.shape[-1]

    def is_(self, x: Tensor) -> bool:
        return self.storage == _storage(x) and self.shape[-2:] == x.shape[-2:]


#: A product comes soon after its softmax, or it is not one.
PATIENCE = 40


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def heard_softmax(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    if out.is_nested or out.ndim < 3 or call["dim"] % out.ndim != out.ndim - 1:
        return
    if (at := listener.place(frame)) is None:
        return
    if type(at.module).__name__ in CHUNKED:
        listener.failed(frame, "it attends to chunks, landmarks or samples, which are not positions of the sequence")
        return
    listener.trail.open(out, at, call["self"] if listener.wants_scores else None)


class Step:
    """An operator that may stand between a softmax and its product."""

    def __init__(self, drops: bool) -> None:
        self.drops = drops

    def __call__(self, listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        trail: Trail = listener.trail
        if not trail.step():
            return
        first: Any = call.get("self", call.get("input"))
        if not trail.knows(first):
            first = call.get("other")  # mask * w
        result = out[0] if isinstance(out, tuple) else out
        if not trail.knows(first) or trail.knows(result):
            return
        clean, dropped, _ = trail.places[_storage(first)]
        if self.drops:
            trail.grow(result, clean if dropped else first, True)
        elif dropped:  # converted after dropout: the same numbers in another type
            trail.grow(result, clean, True)
        else:
            trail.grow(result, result, False)


def heard_dropout_in_place(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    trail: Trail = listener.trail
    if trail.step() and call["train"] and call["p"] > 0 and trail.knows(call["self"]):
        name = trail.at.name
        trail.close()
        listener.refuse(name, "dropout wrote over its weights in place; nn.Dropout(inplace=False) leaves them readable")


def heard_product(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    left, right = (call[name] for name in (("batch1", "batch2") if "batch1" in call else ("self", _other(call))))
    trail: Trail = listener.trail
    if trail.step() and trail.holds(left):
        _finish(listener, left, right)
    elif _computed(left) and _computed(right) and not out.is_nested:
        trail.products.append(Product(_storage(out), out.shape))


def _other(call: dict[str, Any]) -> str:
    return "other" if "other" in call else "mat2"


def _computed(x: Tensor) -> bool:
    """Whether a factor is something the model computed, not one of its parameters."""
    return x.ndim >= 3 and not isinstance(x, torch.nn.Parameter) and not isinstance(x._base, torch.nn.Parameter)


def heard_einsum(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    trail: Trail = listener.trail
    operands = call["tensors"]
    is_open = trail.step()
    weighted = [x for x in operands if is_open and trail.holds(x)]
    if not weighted:
        if len(operands) == 2 and all(_computed(x) for x in operands):
            trail.products.append(Product(_storage(out), out.shape))
        return
    w, name = weighted[0], trail.at.name
    sides, _, result = call["equation"].replace(" ", "").partition("->")
    letters = sides.split(",")
    if len(operands) != 2 or "." in sides:
        trail.close()
        listener.refuse(name, f"its weights enter einsum({call['equation']!r}), which is not read")
        return
    here = 0 if operands[0] is w else 1
    mine, others, v = letters[here], letters[1 - here], operands[1 - here]
    if mine[-1] not in others or mine[-1] in result:  # the keys must be what is summed over
        trail.close()
        listener.refuse(
            name, f"its weights enter einsum({call['equation']!r}), which does not sum over their last axis"
        )
        return
    _finish(listener, w, v, values=others[-2:-1] == mine[-1])


def _finish(listener: Any, used: Tensor, v: Tensor, values: bool = True) -> None:
    """The product of weights and values came: hand the weights on, if weights they are."""
    trail: Trail = listener.trail
    if used.ndim < 3 or v.ndim < 3:
        return
    clean, dropped, _ = trail.places[_storage(used)]
    at, scored, s = trail.at, trail.scored, trail.s
    fed = any(product.is_(v) for product in trail.products)
    trail.close()
    if not scored and (fed or not looks_like_attention(at.module)):
        why = (
            "is multiplied with a product, as in linear attention" if fed else "is not of a product of queries and keys"
        )
        listener.refuse(
            at.name, f"it multiplies something with a softmax that {why}: no weights over keys are to be had"
        )
        return
    if dropped and clean.numel() != used.numel():
        listener.refuse(at.name, "its weights change shape after dropout")
        return
    w = clean.reshape(used.shape) if dropped else used
    if w.ndim > 4:
        listener.refuse(at.name, f"its weights have {w.ndim} axes; (batch, heads, queries, keys) is read")
        return
    w4 = split_heads(w, at.module, listener.batch())
    if w4 is None:
        listener.refuse(at.name, SHARED_AXIS)
        return
    found = AttentionCall(v=split_heads(v, at.module, listener.batch()) if values else None, w=w4)
    if s is not None and s.shape[:-1] == w.shape[:-1]:
        found.s = split_heads(s[..., : w.shape[-1]], at.module, listener.batch())  # without the column of a sink
    listener.attention(at, found)
