"""Which axis is the batch and which the heads, of tensors (batch, heads, length, size) and of those with fewer axes.

Nothing in a tensor says so. The sizes do where they differ, by the input of the pass and the number of heads that the
module names; else the memory: a view of a projection (batch, length, heads · size) has its heads closer together than
its sequences, wherever their axes stand.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .call_site import CAPTURED, CallSite, attribute

__all__ = [
    "collapsed", "heads_come_first", "heads_of", "may_be_heads_of_one", "own_shape", "shared_axis_reason",
    "split_heads",
]  # fmt: skip

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads")


def heads_come_first(x: Tensor, module: Any, batch: int | None, as_projected: bool = True) -> bool | None:
    """Whether the first two axes of x are heads and batch; mostly they are batch and heads.

    Args:
        x: Queries, values or weights as the model laid them out.
        module: The module that attends.
        batch: The number of sequences of the pass, if it is not uncertain.
        as_projected: Whether x may be a view of a projection; weights are not.

    Returns:
        None where something contradicts the usual order and nothing else says which it is.
    """
    first, second = x.shape[:2]
    if first != second and first == batch:
        return False
    heads = heads_of(module)
    if heads is not None and heads > 1 and second not in (1, heads) and first == heads * (batch or first // heads):
        return None  # batch and heads in one axis, and windows in the other
    if first != second and heads is not None and (batch is not None or second > 1):
        return first == heads and batch in (None, second)
    steps = x.stride()
    if as_projected and first > 1 and steps[0] > 0 and (second == 1 or steps[0] < steps[1]):
        # Only heads lie inside the positions, next to each other: a projection gives (batch, length, heads · size).
        inside = any(size > 1 and step > steps[0] for size, step in zip(x.shape[2:], steps[2:], strict=True))
        return True if inside else None if second > 1 or second == batch else False
    return None if first != second == batch else False


def heads_of(module: nn.Module | None) -> int | None:
    """The number of heads a module or its config names."""
    if module is None:
        return None
    for name in _HEADS:
        count = attribute(module, name)
        if isinstance(count, int) and count > 0:
            return count
    config = attribute(module, "config")
    counts = [] if config is None else (getattr(config, name, None) for name in _HEADS)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def _batch_first_owner(module: Any) -> bool:
    """Whether the module's library puts batch before heads where the two share an axis."""
    return type(module).__module__.split(".")[0] in ("torch", "transformers", "diffusers")


def shared_axis_reason(site: CallSite) -> str:
    """The reason of a refusal where batch and heads cannot be told apart."""
    if site.hides_modules:  # a compiled graph flattens axes on its own
        return CAPTURED
    if site.module is None:
        return (
            "it has one axis before (length, size), and no module says whether that is the batch or the heads; shape "
            "it (batch, heads, length, size), or record the module that calls it"
        )
    return (
        "batch and heads share one axis, or stand in either order, and nothing says which is which; record one "
        "sequence at a time, or shape it (batch, heads, length, size)"
    )


def may_be_heads_of_one(*operands: Tensor) -> bool:
    """Whether the first axis of all of (n, i, d) lies inside the positions, as the heads of one sequence do.

    So do the sequences of a batch where the model has its sequence axis first.
    """
    return all(x.ndim == 3 and min(x.shape[:2]) > 1 and 0 < x.stride(0) < x.stride(1) for x in operands)


def collapsed(x: Tensor) -> Tensor:
    """x with one number along each of its expanded axes."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


def own_shape(x: Tensor, ndim: int = 0) -> list[int]:
    """The shape of x before axes were expanded; of an operand that is broadcast to `ndim` axes with all of them."""
    own = [min(size, 1) if step == 0 else size for size, step in zip(x.shape, x.stride(), strict=True)]
    return [1] * (ndim - x.ndim) + own


def split_heads(x: Tensor, module: Any, batch: int | None) -> Tensor | None:
    """(n, i, d) with batch and heads in one axis to (b, h, i, d); None where the order is ambiguous."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim != 3:
        return x
    heads = heads_of(module)
    if x.shape[0] == 1 or heads == 1 or (heads is None and batch == x.shape[0]):
        return x.unsqueeze(1)
    if heads == x.shape[0] and (batch == 1 or (batch is None and _batch_first_owner(module))):
        return x[None]  # without a batch size, n = heads may also be n sequences of one head
    if heads and x.shape[0] % heads == 0 and _batch_first_owner(module):
        return x.unflatten(0, (-1, heads))
    return None
