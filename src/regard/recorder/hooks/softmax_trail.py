"""A listener's memory of attention that is written out: recent products, and softmaxes on their way to values.

Tensors are known by their storage. Views share it, so transposes and reshapes need no interception; the axis of keys is
the one with the stride of keys. Storages on a trail are referred to weakly: one that was freed is off the trail, though
its address may be used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import tap
from .call_site import CallSite

__all__ = [
    "CHOSEN",
    "COMBINED",
    "DIVIDED",
    "LOGARITHM",
    "POINTWISE",
    "UNNORMALISED",
    "Alias",
    "EagerTracker",
    "OpenSoftmax",
    "RecentProduct",
    "axes_of_keys",
    "axis_of_keys",
    "before_dropout",
    "storage_of",
    "with_strides_of",
]

#: The number of operators after which an open softmax is given up: the product with the values comes soon. That of a
#: product of queries and keys may wait for the softmaxes of other heads or layers.
PATIENCE, PATIENCE_WITH_PRODUCT = 40, 400

#: Softmaxes that may be open at once: heads that are computed one by one before they meet their values.
MOST_OPEN = 64

# Reasons why a tensor on a trail is no longer, or not yet, the weights.
COMBINED = "its weights are combined with others before they meet the values, as in differential attention"
CHOSEN = "only its largest weights or scores meet the values, gathered from their positions (top-k)"
UNNORMALISED = "exp of its scores meets the values before it is divided by its sum: no weights are computed"
DIVIDED = "exp of its scores is divided by something that is not its sum over the keys"
LOGARITHM = "its weights are logarithms"
POINTWISE = "it weighs keys by a function of each score alone, without a softmax: its rows do not sum to 1"


class Alias(NamedTuple):
    """A tensor that holds the weights of a softmax."""

    clean: Tensor | None  # the weights before dropout, if dropout came since
    key_stride: int
    keys: int
    altered: str | None = None  # the reason why these are not weights
    changed: bool = False  # whether the numbers are other ones than those of softmax

    @property
    def dropped(self) -> bool:
        """Whether dropout came since."""
        return self.clean is not None


def storage_of(x: Tensor) -> int:
    """The address of a tensor's memory."""
    return x.untyped_storage().data_ptr()


def axes_of_keys(x: Tensor, alias: Alias) -> list[int]:
    """The axes of a view of weights that may be that of the keys, from the end; none if it was merged with another."""
    axes = range(-1, -x.ndim - 1, -1)
    if alias.altered in (DIVIDED, POINTWISE, UNNORMALISED):  # the axis that is summed over says it
        return list(axes)
    if alias.keys == 1:
        return [n for n in axes if x.shape[n] == 1]
    along = [n for n in axes if 1 < x.shape[n] <= alias.keys and x.stride(n) == alias.key_stride]
    parts = {x.stride(n) for n in axes if x.shape[n] > 1}  # keys that were split over two axes have both strides
    split = any(x.shape[n] < alias.keys and alias.key_stride * x.shape[n] in parts for n in along)
    return along if len(along) == 1 and not split else []


def axis_of_keys(x: Tensor, alias: Alias) -> int | None:
    """The first of them; None if there is none."""
    return next(iter(axes_of_keys(x, alias)), None)


def before_dropout(x: Tensor, alias: Alias) -> Tensor:
    """The weights before dropout that a view of weights after it stands for; x itself if there was none."""
    clean = alias.clean
    return x if clean is None else clean.as_strided(x.shape, x.stride(), clean.storage_offset() + x.storage_offset())


def with_strides_of(result: Tensor, x: Tensor) -> Tensor:
    """x with the strides of a result that an operator made of it; a copy if it has others."""
    if x.stride() == result.stride():
        return x
    return torch.empty_strided(result.shape, result.stride(), dtype=x.dtype, device=x.device).copy_(x)


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
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)  # of the aliases
    strayed: str | None = None  # an operator that took its weights with something else, and is not followed

    def add(self, out: Tensor, alias: Alias) -> None:
        address = storage_of(out)
        if address in self.storages and self.storages[address].expired():  # another tensor lies there now
            self.parts = {part for part in self.parts if part[0] != address}
            self.weighted.pop(address, None)
        self.aliases[address] = alias
        self.storages[address] = StorageWeakRef(out.untyped_storage())

    def alias_of(self, x: Any) -> Alias | None:
        if not isinstance(x, Tensor) or (address := storage_of(x)) not in self.aliases:
            return None
        return None if self.storages[address].expired() else self.aliases[address]

    @property
    def is_over(self) -> bool:
        """Whether it waited too long, or none of its weights is left."""
        is_softmax_of_product = self.product is not None and all(
            a.altered is not POINTWISE for a in self.aliases.values()
        )
        patience = PATIENCE_WITH_PRODUCT if is_softmax_of_product else PATIENCE
        return self.operators > patience or all(storage.expired() for storage in self.storages.values())

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
    ends: tuple[int, ...]  # the sizes of the axes that only one of its factors has: queries and keys
    chosen: bool = False  # whether only its largest scores are left

    def may_be_scores_of(self, w: Tensor, axis: int | None) -> bool:
        """Whether w could be a softmax of this product over that axis, or any; perhaps with a sink as one more key."""
        if self.chosen or len(self.shape) < 2:
            return w.shape == self.shape
        if w.numel() == self.shape.numel():
            return any(keys in self.ends for keys in (w.shape if axis is None else w.shape[axis : axis + 1 or None]))
        keys, j = w.shape[-1], self.shape[-1]
        return axis == -1 and keys == j + 1 and w.numel() * j == self.shape.numel() * keys

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
    """One listener's memory: recent products and open softmaxes.

    Args:
        refuse: The listener's method, in a weak reference.
        by_name: Whether modules have names that say where they are.
    """

    def __init__(self, refuse: Callable[[], Any] = lambda: None, by_name: bool = True) -> None:
        self.products: deque[RecentProduct] = deque(maxlen=16)
        self.open: list[OpenSoftmax] = []
        self.refuse, self.by_name = refuse, by_name

    def add_product(self, out: Tensor, name: str, flat: bool, ends: tuple[int, ...] | None = None) -> None:
        """A product of two computed tensors, in the module of that name; by default its last axes are the ends."""
        ends = tuple(out.shape[-2:]) if ends is None else ends
        self.products.append(RecentProduct(storage_of(out), out.shape, name, flat, ends))

    def product_of(self, w: Tensor, axis: int | None, site: CallSite) -> RecentProduct | None:
        """The newest product that w may be a softmax of, over that axis or any, and at that site."""
        for product in reversed(self.products):
            if product.may_be_scores_of(w, axis) and (not self.by_name or product.is_near(site)):
                return product
        return None

    def is_product(self, x: Tensor) -> bool:
        """Whether x is one of the recent products."""
        return any(p.storage == storage_of(x) and p.shape[-2:] == x.shape[-2:] for p in self.products)

    def start(
        self, w: Tensor, axis: int | None, site: CallSite, scores: Tensor | None, altered: str | None = None
    ) -> None:
        """A softmax with output w over an axis, counted from the end; None where what follows will say which."""
        over = [softmax for softmax in self.open if softmax.is_over]
        if len(self.open) - len(over) >= MOST_OPEN:
            over.append(next((softmax for softmax in self.open if softmax.parts), self.open[0]))
        self._give_up(over)
        product = self.product_of(w, axis, site)
        if product is not None and product.chosen:
            altered = CHOSEN
        axis = -1 if axis is None else axis
        softmax = OpenSoftmax(site, product, axis, scores, w.numel())
        softmax.add(w, Alias(None, w.stride(axis), w.shape[axis], altered))
        self.open.append(softmax)
        tap.follow(True)

    def count_operator(self) -> None:
        """One more operator passed; softmaxes that waited too long are closed."""
        for softmax in self.open:
            softmax.operators += 1
        if any(softmax.operators > PATIENCE for softmax in self.open):
            self._give_up([softmax for softmax in self.open if softmax.is_over])

    def close(self, softmax: OpenSoftmax) -> None:
        """It met its values, or was refused."""
        self.open = [other for other in self.open if other is not softmax]
        self._unfollow()

    def clear(self) -> None:
        self._give_up(self.open)

    def softmax_of(self, x: Any) -> OpenSoftmax | None:
        """The open softmax that x shares storage with."""
        return next((softmax for softmax in reversed(self.open) if softmax.alias_of(x) is not None), None)

    def _give_up(self, over: list[OpenSoftmax]) -> None:
        """These met no values that were seen: named, where an operator that is not followed took their weights."""
        if not over:
            return
        refuse = self.refuse()
        for softmax in over:
            if softmax.strayed is not None and not softmax.parts and refuse is not None:
                refuse(softmax.site.name, f"its weights meet their values in {softmax.strayed}, which is not followed")
        self.open = [softmax for softmax in self.open if not any(softmax is other for other in over)]
        self._unfollow()

    def _unfollow(self) -> None:
        if not any(other.eager.open for other in tap.listeners()):
            tap.follow(False)
