"""Which tensors engines can read: dense ones, with their numbers in memory. All others are refused by name here.

Engines take addresses and strides. A tensor without memory of its own (a DTensor, a FakeTensor, one on the meta device)
has the address 0, which a kernel would read; a sparse or nested one has no strides.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .pytree import flatten
from .torch_state import (
    in_forward_ad,
    in_functionalize,
    in_functorch,
    in_jit_trace,
    in_plain_eager,
    is_tracing,
    is_zero_tensor,
)

__all__ = [
    "is_plain", "materialized", "readable", "readable_numbers", "refuse_jit_trace", "refuse_meta", "refuse_transforms",
]  # fmt: skip

#: What to do with sequences of several lengths.
_PAD = "torch.nested.to_padded_tensor({}, 0.0) and mask=regard.padding(lengths)"


def readable(x: Tensor, name: str) -> Tensor:
    """The tensor, as engines can read it.

    Args:
        x: A tensor that a user passed.
        name: Its name in messages: `q`, `bias(tensor)`.

    Returns:
        x itself; a copy where its numbers are not in memory as they are (a lazily negated view).

    Raises:
        TypeError: It has no dense numbers in memory.
        NotImplementedError: `torch.jit.trace` is tracing.
    """
    if in_plain_eager() and is_plain(x):
        return x
    if is_tracing():  # tensors of a graph have no memory yet, and operators take them
        return x
    refuse_jit_trace()
    if (remedy := _remedy(x)) is not None:
        argument = named[1] if (named := re.search(r"\((\w+)", name)) else name  # tensor of bias(tensor)
        raise TypeError(
            f"{name} must be a dense tensor with its numbers in memory; got {_kind(x)}. {remedy.format(argument)}."
        )
    return x if in_functorch() else materialized(x)


def readable_numbers(x: Tensor, name: str) -> Tensor:
    """The same of a tensor whose numbers say what is asked (positions, lengths, flags): the meta device has none."""
    if x.is_meta and not is_tracing():
        raise NotImplementedError(
            f"{name} is on the meta device, which holds shapes and no numbers. Pass a tensor that has them."
        )
    return readable(x, name)


def is_plain(x: Any) -> bool:
    """Whether x is a plain tensor with its numbers in memory as they are: most are, and nothing else need be asked."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_meta or x.is_neg() or is_zero_tensor(x))
        and x.untyped_storage().nbytes() > 0
    )


def _kind(x: Tensor) -> str:
    if x.is_nested:
        return "a nested tensor"
    if x.is_quantized:
        return str(x.dtype)
    return type(x).__name__ if x.layout is torch.strided else str(x.layout)


def _remedy(x: Tensor) -> str | None:
    """What to do with a tensor that engines cannot read; None where they can."""
    if type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and not (x.is_nested or x.is_quantized):
        freed = not in_functorch() and x.untyped_storage().nbytes() == 0 and x.numel() > 0 and not x.is_meta
        return "Its memory was freed (resize_(0)): compute {} again" if freed else None
    if x.is_nested:
        return f"Use {_PAD}"
    if x.is_quantized:
        return "Use {}.dequantize()"
    if x.layout is not torch.strided:
        return "Use {}.to_dense()"
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        if hasattr(x, "full_tensor"):
            return "Use {0}.full_tensor(), or {0}.to_local() for the part that is here"
        return "Convert it to a torch.Tensor"
    return None


def materialized(x: Tensor) -> Tensor:
    """The tensor with its numbers in memory as they are: PyTorch may leave a negation to the reader, or zeros out."""
    return x.clone() if x.is_neg() or is_zero_tensor(x) else x


def refuse_jit_trace() -> None:
    """Raise NotImplementedError under `torch.jit.trace`, which would store the addresses of this call's results."""
    if in_jit_trace() and not is_tracing():
        raise NotImplementedError(
            "torch.jit.trace cannot follow regard's engines, which compute outside of PyTorch's operators. "
            "Use torch.compile or torch.export."
        )


def refuse_meta(x: Tensor, name: str) -> None:
    """Raise NotImplementedError for a tensor on the meta device."""
    if x.is_meta and not is_tracing():
        raise NotImplementedError(
            f"{name} is on the meta device, which holds shapes and no numbers; engines compute numbers. "
            f"Use torch.empty_like({name}, device='cpu'), or torch.compile, which infers shapes."
        )


def refuse_transforms(tree: Any) -> None:
    """Raise NotImplementedError where PyTorch transforms or traces what engines compute in a way they cannot follow."""
    refuse_jit_trace()
    _refuse_forward_ad(tree)
    _refuse_functionalize()


def _refuse_forward_ad(tree: Any) -> None:
    """Raise NotImplementedError where a tensor of the tree has a forward-mode tangent, which engines would drop."""
    if not in_forward_ad() or in_functorch():
        return
    if any(t.is_floating_point() and forward_ad.unpack_dual(t).tangent is not None for t in flatten(tree)[1]):
        raise NotImplementedError(
            "torch.autograd.forward_ad cannot follow regard's engines, which compute outside of PyTorch's operators. "
            'engine="reference" is plain PyTorch, in quadratic memory; torch.func.jvp is followed by all engines.'
        )


def _refuse_functionalize() -> None:
    """Raise NotImplementedError inside `torch.func.functionalize`, whose tensors hold their numbers elsewhere."""
    if in_functionalize():
        raise NotImplementedError(
            "torch.func.functionalize cannot follow regard's engines, which compute outside of PyTorch's operators. "
            'engine="reference" is plain PyTorch, in quadratic memory; or use torch.compile.'
        )
