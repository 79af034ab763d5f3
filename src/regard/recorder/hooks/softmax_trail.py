"""A listener's memory of attention that is written out: recent products, and softmaxes on their way to values.

Tensors are known by their storage. Views share it, so transposes and reshapes need no interception; the axis of keys is
the one with the stride of keys. Storages on a trail are referred to weakly: one that was freed is off the trail, though
its address may be used again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import tap
from .call_site import CallSite
from .plain_tensors import memory_of

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
    "ScoreProduct",
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


#: Types of masks and positions, which are no scores.
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Alias(NamedTuple):
    """A tensor that holds the weights of a softmax."""

    clean: Tensor | None  # the weights before dropout, if dropout came since
    key_stride: int
    keys: int
    altered: str | None = None  # the reason why these are not weights
    changed: bool = False  # whether the numbers are other ones than those of softmax
    lost_keys: bool = False  # whether it is unknown which of its numbers belongs to which key

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
    product: ScoreProduct | None  # the product of two computed tensors that made its scores
    axis: int  # the axis it ran over, from the end
    scores: Tensor | None  # for a listener that wants them
    is_flat: bool  # whether its scores are a matrix without batch axes, a product of two matrices
    unmet: int  # cells that have not met values yet: a loop over heads takes its weights part by part
    operators: int = 0  # operators since
    aliases: dict[int, Alias] = field(default_factory=dict)  # by storage
    weighted: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # w * v by storage: (w, v, shape, strides)
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

    def absorb(self, other: OpenSoftmax) -> None:
        """Follow the weights of another softmax as well: they were joined with these."""
        self.aliases |= other.aliases
        self.storages |= other.storages
        self.weighted |= other.weighted
        self.parts |= other.parts
        self.unmet += other.unmet
        self.product, self.scores = self.product or other.product, None

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


class ScoreProduct(NamedTuple):
    """A product of two computed tensors, which may be scores."""

    shape: torch.Size
    name: str  # of the module that multiplied
    flat: bool  # whether its factors are matrices without batch axes
    ends: tuple[int, ...]  # the sizes of the axes that only one of its factors has: queries and keys
    chosen: bool = False  # whether only its largest scores are left
    moved_by: str | None = None  # the operator that has put its queries or keys in another order

    def survives_layer(self, x: Tensor, operands: list[Tensor]) -> bool:
        """Whether a layer leaves the axes of queries and keys of this product as they are.

        It runs over the last axis of x; or it is a convolution of single cells, over heads that are channels.
        """
        if any(other.ndim == x.ndim == 4 and other.shape[2:].numel() == 1 for other in operands):
            return self.shape[-2:] == x.shape[-2:]
        pairs, sizes = math.prod(self.ends), x.shape[:-1]
        if len(self.ends) < 2 or x.ndim < 2 or pairs == 0 or sizes.numel() % pairs:
            return False
        return all(any(size % end == 0 for size in sizes) for end in self.ends)  # as axes, or merged with others


class EagerTracker:
    """One listener's memory: products, what was made of them, and open softmaxes.

    Args:
        refuse: The listener's method, in a weak reference.
    """

    def __init__(self, refuse: Callable[[], Any] = lambda: None) -> None:
        self.products: deque[ScoreProduct] = deque(maxlen=16)  # the newest
        self.scores: dict[int, tuple[ScoreProduct, StorageWeakRef]] = {}  # what was made of a product, by storage
        self.patience = 0  # operators until scores are given up that no softmax took
        self.open: list[OpenSoftmax] = []
        self.mixtures: dict[int, tuple[CallSite, int, StorageWeakRef]] = {}  # sites and rows, by storage
        self.started = 0  # products and softmaxes so far
        self.refuse = refuse

    def add_product(
        self, out: Tensor, name: str, flat: bool, ends: tuple[int, ...] | None = None, patience: int = PATIENCE
    ) -> None:
        """A product of two computed tensors, in the module of that name; by default its last axes are the ends."""
        product = ScoreProduct(out.shape, name, flat, tuple(out.shape[-2:]) if ends is None else ends)
        self.started += 1
        self.products.append(product)
        self.patience = max(self.patience, patience)
        self.add_scores(out, product)
        tap.follow(True)

    def add_scores(self, x: Tensor, product: ScoreProduct) -> None:
        """Tensor x is made of a product; one without elements has no memory to be known by."""
        if x.numel() == 0:
            return
        self.scores[storage_of(x)] = product, StorageWeakRef(x.untyped_storage())

    def product_behind(self, x: Any) -> ScoreProduct | None:
        """The product that a tensor was made of, by whatever operators."""
        if not self.scores or (x := memory_of(x)) is None:
            return None
        product, storage = self.scores.get(storage_of(x), (None, None))
        return None if storage is None or storage.expired() else product

    def carry(self, operands: Iterable[Any], out: Any, multiplies: bool = False) -> None:
        """Mark the results of an operator on scores as scores; but for a layer that mixes queries or keys.

        Args:
            operands: What the operator takes.
            out: What it returns.
            multiplies: Whether it is a product.
        """
        self.patience -= 1
        every = list(_tensors(operands))
        sources = [(x, product) for x in every if (product := self.product_behind(x)) is not None]
        sources.sort(key=lambda source: source[1].moved_by is not None)  # a bias that was moved into its place
        carried = next((product for x, product in sources if not multiplies or product.survives_layer(x, every)), None)
        for result in _tensors((out,)):
            if carried is not None and result.dtype not in _INTEGERS and self.product_behind(result) is None:
                self.add_scores(result, carried)
        if self.patience < 0 or all(storage.expired() for _, storage in self.scores.values()):
            self.scores.clear()
            self._unfollow()

    def move(self, x: Tensor, result: Tensor, dims: Iterable[int], operator: str) -> None:
        """An operator moves numbers along axes of x, which may be scores, and those their queries' or keys'."""
        if (product := self.product_behind(x)) is None or product.moved_by is not None:
            return
        ends = [n for n in range(-x.ndim, 0) if x.shape[n] > 1 and x.shape[n] in product.ends]
        if product.shape == x.shape and product.ends == tuple(x.shape[-2:]):
            ends = [n for n in ends if n >= -2]
        if any(dim % x.ndim - x.ndim in ends for dim in dims):
            self.add_scores(result, product._replace(moved_by=operator))

    def is_product(self, x: Tensor) -> bool:
        """Whether x is a product of two computed tensors, perhaps scaled."""
        product = self.product_behind(x)
        return product is not None and product.shape[-2:] == x.shape[-2:]

    def start(
        self,
        w: Tensor,
        axis: int | None,
        site: CallSite,
        product: ScoreProduct | None,
        scores: Tensor | None,
        altered: str | None = None,
    ) -> None:
        """A softmax with output w over an axis, counted from the end; None where what follows will say which."""
        over = [softmax for softmax in self.open if softmax.is_over]
        if len(self.open) - len(over) >= MOST_OPEN:
            over.append(next((softmax for softmax in self.open if softmax.parts), self.open[0]))
        self._give_up(over)
        if product is not None and product.chosen:
            altered = CHOSEN
        elif product is not None and product.moved_by is not None:
            altered = (
                f"its scores pass through {product.moved_by} before the softmax, after which the order of its queries "
                "and keys is not known"
            )
        axis = -1 if axis is None else axis
        is_flat = product is not None and product.flat and w.ndim <= 2
        softmax = OpenSoftmax(site, product, axis, scores, is_flat, w.numel())
        softmax.add(w, Alias(None, w.stride(axis), w.shape[axis], altered))
        self.open.append(softmax)
        self.started += 1
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

    def merge(self, joined: list[OpenSoftmax]) -> None:
        """Softmaxes of heads, or of chunks of rows, whose weights were joined are one."""
        first = joined[0] if joined else None
        for other in joined:
            if first is not None and other is not first and any(other is softmax for softmax in self.open):
                first.absorb(other)
                self.close(other)

    def add_mixture(self, out: Tensor, softmax: OpenSoftmax, rows: int) -> None:
        """Values were summed with weights that were recorded, and that no product of queries and keys made."""
        if softmax.product is None and softmax.parts and rows > 1:
            self.mixtures[storage_of(out)] = softmax.site, rows, StorageWeakRef(out.untyped_storage())

    def site_of_mixture(self, x: Tensor, summed: int) -> CallSite | None:
        """The site of such a sum, if x is one and is summed over its rows: these are features then, not queries."""
        site, rows, storage = self.mixtures.get(storage_of(x), (None, 0, None))
        return None if storage is None or storage.expired() or rows != summed else site

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
        if not any(other.eager.open or other.eager.scores for other in tap.listeners()):
            tap.follow(False)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors of plain numbers among values, those in lists and inside of wrappers included."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif (x := memory_of(value)) is not None:
            yield x
