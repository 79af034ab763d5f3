"""Where in the model an operator was called: the module whose `forward` stands on the stack.

Reading the stack leaves the model untouched; hooks on every module would cost more and be visible to other
threads. Imports nothing of regard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

__all__ = [
    "SHARED_AXIS",
    "CallSite",
    "called_by",
    "calling_module",
    "looks_like_attention",
    "module_stack",
    "split_heads",
]

#: Names of modules whose keys come from another sequence than their queries.
_CROSS = re.compile(r"cross|encoder_attn|enc_?dec|encdecattention|(^|\.)multihead_attn$|(^|\.)attn2$|src_attn", re.I)

#: Names of arguments that carry the other sequence into such a module.
_OTHER = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory", "kv_states")

_ATTENTION = re.compile(
    r"(attention|attn)(\d*d?)?(block|layer|module)?$|attn(?!.*(adapter|drop|norm|mask|out|bias|proj|embed))"
    r"|deltanet|mamba\d?mixer|retention$|recurrentblock|rglru|hyena",
    re.I,
)

#: The same for the name that a model gives such a module, whatever its class.
_CALLED = re.compile(r"(^|[._])(attn|attention)\d?$", re.I)

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads")


class CallSite:
    """The module an operator was called from."""

    def __init__(self, name: str, module: nn.Module | None, frames: list[FrameType]) -> None:
        self.name, self.module, self.frames = name, module, frames

    def other_sequence(self, keys: int) -> bool:
        """Whether the module says, by its name or by what it was given, that its keys come from elsewhere."""
        if getattr(self.module, "is_cross_attention", False):
            return True
        if _CROSS.search(self.name):
            return True
        given = [frame.f_locals.get(name) for frame in self.frames for name in _OTHER]
        # Where both sequences are joined and look at one another, there are more keys than the other sequence has.
        return any(x is not None and not (isinstance(x, Tensor) and keys not in x.shape[:-1]) for x in given)


def calling_module(frame: FrameType | None, names: dict[int, str] | None) -> CallSite | None:
    """The innermost module of the model on the stack; None when the model is not on it.

    Without names every module counts, called by its class.
    """
    found: CallSite | None = None
    for at, module in _modules(frame):
        if found is not None:
            if module is not found.module:
                break
            found.frames.append(at)  # a function of the module, called by its forward
        elif names is None:
            found = CallSite(type(module).__name__, module, [at])
        elif id(module) in names:
            found = CallSite(names[id(module)], module, [at])
    return found or (CallSite("", None, []) if names is None else None)


def module_stack(frame: FrameType | None, names: dict[int, str] | None) -> list[str]:
    """The names of all modules on the stack, innermost first."""
    if names is None:
        return [type(module).__name__ for _, module in _modules(frame)]
    return list(dict.fromkeys(names[id(module)] for _, module in _modules(frame) if id(module) in names))


def called_by(frame: FrameType | None, word: str) -> bool:
    """Whether a function whose name contains the word is on the stack."""
    while frame is not None:
        if word in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


def _modules(frame: FrameType | None) -> Iterator[tuple[FrameType, nn.Module]]:
    while frame is not None:
        code = frame.f_code
        # The machinery of nn.Module itself would name every module twice.
        if code.co_argcount and "call_impl" not in code.co_name:
            first = frame.f_locals.get(code.co_varnames[0])
            # A softmax that is a module of its own belongs to the attention it stands in.
            if isinstance(first, nn.Module) and not isinstance(first, nn.Softmax | nn.Dropout):
                yield frame, first
        frame = frame.f_back


def looks_like_attention(module: nn.Module, name: str = "") -> bool:
    """Whether a module calls itself attention, or is called so, so that silence about it would mislead."""
    return _ATTENTION.search(type(module).__name__) is not None or _CALLED.search(name) is not None


def _heads_of(module: nn.Module | None) -> int | None:
    """How many heads a module says it has."""
    for source in (module, getattr(module, "config", None)):
        for name in _HEADS:
            count = getattr(source, name, None)
            if isinstance(count, int) and count > 0:
                return count
    return None


def _batch_first_owner(module: Any) -> bool:
    """Whether batch and heads that share an axis are known to stand in this order, batch first."""
    return type(module).__module__.split(".")[0] in ("torch", "transformers", "diffusers")


SHARED_AXIS = (
    "batch and heads share one axis and nothing says in which order; record one sequence at a time, "
    "or shape it (batch, heads, length, size)"
)


def split_heads(x: Tensor, module: Any, batch: int | None) -> Tensor | None:
    """(n, i, d) with batch and heads in one axis to (b, h, i, d); None where nothing says how."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim != 3:
        return x
    heads = _heads_of(module)
    if x.shape[0] == 1 or heads == 1 or (heads is None and batch == x.shape[0]):
        return x.unsqueeze(1)
    if heads == x.shape[0] and batch in (None, 1):
        return x[None]
    if heads and x.shape[0] % heads == 0 and _batch_first_owner(module):
        return x.unflatten(0, (-1, heads))
    return None
