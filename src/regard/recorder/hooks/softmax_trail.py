"""A listener's memory of attention that is written out: recent products, and softmaxes on their way to values.

Tensors are known by their storage. Views share it, so transposes and reshapes need no interception; the axis of keys is
the one with the stride of keys. A tensor on a trail is held until the trail ends, so that its storage is not reused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tap
from .call_site import CallSite

__all__ = [
    "CHOSEN",
    "COMBINED",
    "LOGARITHM",
    "POINTWISE",
    "UNNORMALISED",
    "Alias",
    "EagerTracker",
    "OpenSoftmax",
    "RecentProduct",
    "axis_of_keys",
    "copy_like",
    "storage_of",
]

#: The number of operators after which an open softmax is given up: the product with the values comes soon.
PATIENCE = 40

#: Softmaxes that may be open at once.
MOST_OPEN = 4

# Reasons why a tensor on a trail is no longer, or not yet, the weights.
COMBINED = "its weights are combined with others before they meet the values, as in differential attention"
CHOSEN = "only its largest weights or scores meet the values, gathered from their positions (top-k)"
UNNORMALISED = "exp of its scores meets the values before it is divided by its sum: no weights are computed"
LOGARITHM = "its weights are logarithms"
POINTWISE = "it weighs keys by a sigmoid, ReLU or SiLU of each score, without a softmax: its rows do not sum to 1"


class Alias(NamedTuple):
    """A tensor that holds the weights of a softmax."""

    clean: Tensor  # the weights before dropout
    dropped: bool  # whether dropout came since
    key_stride: int
    keys: int
    altered: str | None = None  # the reason why these are not weights
    changed: bool = False  # whether the numbers are other ones than those of softmax


def storage_of(x: Tensor) -> int:
    """The address of a tensor's memory."""
    return x.untyped_storage().data_ptr()


def axis_of_keys(x: Tensor, alias: Alias) -> int | None:
    """The axis of keys in a view of weights, from the end; None if it was merged with another."""
    if alias.keys == 1:
        return next((n for n in range(-1, -x.ndim - 1, -1) if x.shape[n] == 1), None)
    axes = range(-1, -x.ndim - 1, -1)
    return next((n for n in axes if x.shape[n] > 1 and x.stride(n) == alias.key_stride), None)


def copy_like(result: Tensor, clean: Tensor, operand: Tensor) -> Tensor:
    """The weights before dropout in the order of `result`, which was computed from the view `operand` after it."""
    view = clean.as_strided(operand.shape, operand.stride(), operand.storage_offset())
    if view.stride() == result.stride():
        return view
    return torch.empty_strided(result.shape, result.stride(), dtype=view.dtype, device=view.device).copy_(view)


@dataclass
class OpenSoftmax:
    """A softmax whose product with values has not come yet."""

    site: CallSite
    product: RecentProduct | None  # the product of two computed tensors that made its scores
    axis: int  # the axis it ran over, from the end
    scores: Tensor | None  # for a listener that wants them
    unmet: int  # cells that have not met values yet: a loop over heads takes its weights part by part
    operators: int = 0  # operators since
    aliases: dict[int, Alias] = field(default_factory=dict)  # by storage
    weighted: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)  # w * v by storage: (w, v)
    parts: set[Any] = field(default_factory=set)  # the views that have met values
    alive: list[Tensor] = field(default_factory=list)  # keeps the allocator from reusing these storages

    def add(self, out: Tensor, alias: Alias) -> None:
        self.aliases[storage_of(out)] = alias
        self.alive.append(out)

    def alias_of(self, x: Any) -> Alias | None:
        return self.aliases.get(storage_of(x)) if isinstance(x, Tensor) else None

    def meet(self, part: Tensor) -> bool:
        """A view of its weights meets values; returns whether it does so for the first time."""
        view = storage_of(part), part.storage_offset(), part.shape, part.stride()
        if view in self.parts:
            return False
        self.parts.add(view)
        self.unmet -= part.numel()
        self.operators = 0
        return True


class RecentProduct(NamedTuple):
    """The address and shape of a product of two computed tensors; the tensor itself may be gone."""

    storage: int
    shape: torch.Size
    name: str  # of the module that multiplied
    flat: bool  # whether its factors are matrices without batch axes
    chosen: bool = False  # whether only its largest scores are left

    def may_be_scores_of(self, w: Tensor, axis: int) -> bool:
        """Whether w could be a softmax of this product over that axis, perhaps with a sink as one more column."""
        keys = w.shape[axis]
        if self.chosen or len(self.shape) < 2:
            return w.shape == self.shape
        i, j = self.shape[-2:]
        if w.numel() == self.shape.numel() and keys in (i, j):
            return True
        return axis == -1 and keys == j + 1 and w.numel() == self.shape.numel() // max(1, j) * keys

    def is_near(self, site: CallSite) -> bool:
        """Whether the module that multiplied is that of the site, a part of it, around it, or beside a helper."""
        mine, name = self.name, site.name
        if mine == name or not mine or not name or name.startswith(mine + ".") or mine.startswith(name + "."):
            return True
        # A softmax that is a module of its own stands beside the one that multiplies; a router, which has parameters,
        # may stand beside the product of rotary angles.
        helper = site.module is None or next(site.module.parameters(), None) is None
        return helper and mine.rpartition(".")[0] == name.rpartition(".")[0]


class EagerTracker:
    """One listener's memory: recent products and open softmaxes."""

    def __init__(self, by_name: bool = True) -> None:
        self.products: deque[RecentProduct] = deque(maxlen=16)
        self.open: list[OpenSoftmax] = []
        self.by_name = by_name  # whether modules have names that say where they are

    def add_product(self, out: Tensor, name: str, flat: bool) -> None:
        """A product of two computed tensors, in the module of that name."""
        self.products.append(RecentProduct(storage_of(out), out.shape, name, flat))

    def product_of(self, w: Tensor, axis: int, site: CallSite) -> RecentProduct | None:
        """The newest product that w may be a softmax of, over that axis and at that site."""
        for product in reversed(self.products):
            if product.may_be_scores_of(w, axis) and (not self.by_name or product.is_near(site)):
                return product
        return None

    def is_product(self, x: Tensor) -> bool:
        """Whether x is one of the recent products."""
        return any(p.storage == storage_of(x) and p.shape[-2:] == x.shape[-2:] for p in self.products)

    def start(self, w: Tensor, axis: int, site: CallSite, scores: Tensor | None, altered: str | None = None) -> None:
        """A softmax with output w over an axis, counted from the end."""
        if len(self.open) == MOST_OPEN:
            self.close(next((softmax for softmax in self.open if softmax.parts), self.open[0]))
        product = self.product_of(w, axis, site)
        if product is not None and product.chosen:
            altered = CHOSEN
        softmax = OpenSoftmax(site, product, axis, scores, w.numel())
        softmax.add(w, Alias(w, False, w.stride(axis), w.shape[axis], altered))
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

    def _unfollow(self) -> None:
        if not any(other.eager.open for other in tap.listeners()):
            tap.follow(False)
