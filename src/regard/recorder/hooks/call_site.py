"""The module an operator was called from, read off the Python stack.

Reading the stack leaves the model untouched, and costs only where attention runs.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = [
    "CAPTURED",
    "CallSite",
    "attribute",
    "called_by",
    "calling_module",
    "enclosing_module",
    "has_parameter_axis",
    "is_only_thread",
    "is_plain_layer",
    "looks_like_attention",
    "may_have_other_sequence",
    "module_stack",
    "original_module",
    "runs_code_of",
    "runs_method",
]

#: Names of modules whose keys come from another sequence than their queries.
_CROSS = re.compile(r"cross|encoder_attn|enc_?dec|encdecattention|(^|\.)multihead_attn$|(^|\.)attn2$|src_attn", re.I)

#: Names of arguments that carry the other sequence into such a module.
_OTHER = frozenset(
    ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory", "kv_states")
)

#: Names of classes that compute attention, linear attention and its relatives included.
_ATTENTION_CLASS = re.compile(
    r"(attention|attn)(\d*d?)?(block|layer|module)?$|attn(?!.*(adapter|drop|norm|mask|out|bias|proj|embed))"
    r"|deltanet|mamba\d?mixer|retention$|recurrentblock|rglru|hyena"
    r"|(?-i:GAT|Gat)(v\d)?(?-i:E?Conv|Layer|$)|(transformer|hgt|han|agnn|rgat|dotgat)conv$",  # of graphs
    re.I,
)

#: Names of classes that never do, whatever a model calls them: `ln_attn` is a norm.
_NEVER_ATTENTION = re.compile(
    r"norm\d*d?$|dropout\d*d?$|^(droppath|identity|linear|conv\d*d?)$|^squeeze_?(and_?)?excit|^se(module|block|layer)?$",
    re.I,
)

#: Names that models use for an attention module, whatever its class.
_ATTENTION_NAME = re.compile(r"(^|[._])(attn|attention)\d?$", re.I)

#: Modules that belong to the attention around them.
_OF_OTHERS = (nn.Softmax, nn.Dropout)

CAPTURED = "captured by torch.compile, which fuses its attention away; record the module it was made from"

#: Modules of PyTorch that run compiled graphs.
_COMPILED_CODE = ("torch._inductor", "torch._functorch._aot_autograd")


class CallSite:
    """The module an operator was called from."""

    def __init__(self, name: str, module: nn.Module | None, frame: FrameType | None, compiled: bool = False) -> None:
        self.name, self.module, self.frame = name, module, frame
        self.compiled = compiled  # whether code made by torch.compile stands between the module and the operator

    @functools.cached_property
    def frames(self) -> list[FrameType]:
        """The frames of the module's call, innermost first: its forward, and the methods that this called."""
        stack = itertools.takewhile(lambda one: one[1] is self.module, _modules(self.frame, True))
        return [frame for frame, _ in stack]

    @property
    def hides_modules(self) -> bool:
        """Whether compiled code swallowed modules of its own, so that the true name of the call is lost."""
        if not self.compiled or self.module is None:
            return self.compiled
        return any(part is not self.module and not is_plain_layer(part) for part in self.module.modules())

    def has_other_sequence(self, keys: int) -> bool:
        """Whether the module's name, flags or arguments say that its keys come from another sequence."""
        if (self.module is not None and attribute(self.module, "is_cross_attention")) or _says_cross(self.name):
            return True
        frame = self.frame
        while frame is not None and not may_have_other_sequence(frame.f_code):
            if "call_impl" in frame.f_code.co_name:
                return False
            frame = frame.f_back
        passed = [x for at in self.frames for name, x in at.f_locals.items() if name in _OTHER and x is not None]
        # Where both sequences are joined and attend to one another, there are more keys than the other sequence has.
        return any(not (isinstance(x, Tensor) and keys not in x.shape[:-1]) for x in passed)


def may_have_other_sequence(code: CodeType) -> bool:
    """Whether a function may hold another sequence in a variable: one of such a name, or one that others share."""
    return not _OTHER.isdisjoint(code.co_varnames) or bool(code.co_cellvars)


@functools.lru_cache(maxsize=4096)
def _says_cross(name: str) -> bool:
    return _CROSS.search(name) is not None


def attribute(module: Any, name: str, default: Any = None) -> Any:
    """An attribute that a module may lack: `getattr` looks among its parameters then, and raises, which is slow."""
    is_usual = getattr(type(module), "__getattr__", None) is nn.Module.__getattr__
    may_have = not is_usual or name in vars(module) or hasattr(type(module), name)
    return getattr(module, name, default) if may_have else default


def calling_module(frame: FrameType | None, names: dict[int, str] | None) -> CallSite | None:
    """The innermost module on the stack; None when it is not part of the model.

    Args:
        frame: Where the operator was called.
        names: Names of the model's modules by id; None: every module counts and is named by its class.
    """
    if names is not None and frame is not None and (code := frame.f_code).co_argcount:  # the quick way, mostly
        first = frame.f_locals.get(code.co_varnames[0])
        name = names.get(id(first))
        is_call = "call_impl" in code.co_name or name is None or first is None or "_orig_mod" in first._modules
        if name is not None and not is_call and not isinstance(first, (*_OF_OTHERS, torch.jit.ScriptModule)):
            return CallSite(name, first, frame)
    for at, module in _modules(frame):
        if names is None and not (isinstance(module, fx.GraphModule) and _is_compiled(frame, None)):
            return CallSite(type(module).__name__, module, at, _is_compiled(frame, at))
        if names is not None and id(module) in names:
            return CallSite(names[id(module)], module, at, _is_compiled(frame, at))
        if _has_own_state(module) and not isinstance(module, fx.GraphModule):  # a compiled graph is no model
            return None  # another model, called by a method of this one
    return CallSite("", None, None) if names is None else None


def _has_own_state(module: nn.Module) -> bool:
    """Whether a module has parameters; one without is a function of the module that calls it."""
    return next(module.parameters(), None) is not None


def _is_compiled(frame: FrameType | None, end: FrameType | None) -> bool:
    """Whether code made by torch.compile runs between an operator and the frame of its module; None: anywhere."""
    dynamo = graph = False
    while frame is not None and frame is not end:
        name = frame.f_globals.get("__name__") or ""
        if name.startswith(_COMPILED_CODE):
            return True
        dynamo = dynamo or name.startswith("torch._dynamo.eval_frame")
        graph = graph or frame.f_code.co_filename.startswith("<eval_with_key>")
        frame = frame.f_back
    return dynamo and graph


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


def runs_code_of(frames: list[FrameType], module: str) -> bool:
    """Whether a function of a Python module is on the stack of the first frame."""
    frame = frames[0] if frames else None
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def runs_method(thread: int, names: dict[int, str] | None) -> bool:
    """Whether a thread runs a method of one of the model's modules now; a function that holds the model is none."""
    frame = sys._current_frames().get(thread)
    return names is not None and any(
        id(module) in names and getattr(getattr(type(module), at.f_code.co_name, None), "__code__", None) is at.f_code
        for at, module in _modules(frame)
    )


def is_only_thread() -> bool:
    """Whether no other thread runs Python now."""
    return len(sys._current_frames()) == 1


def _modules(frame: FrameType | None, innermost: bool = False) -> Iterator[tuple[FrameType, nn.Module]]:
    """Frames whose first argument is a module, innermost first.

    Args:
        frame: The first one.
        innermost: Whether to end where the call of the first of them began: to look at a frame copies its variables.
    """
    has_module = False
    while frame is not None:
        code = frame.f_code
        is_call = "call_impl" in code.co_name
        if is_call and has_module and innermost:
            return
        # torch.jit.trace takes a model as its first argument, and runs others.
        if code.co_argcount and not (frame.f_globals.get("__name__") or "").startswith("torch.jit"):
            first = frame.f_locals.get(code.co_varnames[0])
            # nn.Module's own __call__ machinery would name every module twice; TorchScript has no other frame.
            if is_call and not isinstance(first, torch.jit.ScriptModule):
                first = None
            # A softmax that is a module of its own belongs to the attention around it.
            if isinstance(first, nn.Module) and not isinstance(first, _OF_OTHERS):
                has_module = True
                yield frame, original_module(first)
        frame = frame.f_back


def original_module(module: nn.Module) -> nn.Module:
    """The module m of `torch.compile(m)`; any other module itself."""
    return attribute(module, "_orig_mod", module) if type(module).__name__ == "OptimizedModule" else module


def looks_like_attention(module: nn.Module, name: str = "") -> bool:
    """Whether a module's class or name says attention, so that silence about it would mislead.

    A name alone is not enough: models call norms, activations and squeeze-and-excite blocks `attn` as well. Such a
    module must also have the projections that attention takes.
    """
    kind: Any = type(module)
    says = _class_says_attention(kind)
    if says is not None:
        return says
    return _ATTENTION_NAME.search(name) is not None and _has_projections(module)


@functools.lru_cache(maxsize=1024)
def _class_says_attention(kind: Any) -> bool | None:
    """Whether a class of modules attends, by its name; None where it does not say."""
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if _is_plain_class(kind) or issubclass(kind, nn.Sequential) or _NEVER_ATTENTION.search(kind.__name__):
        return False
    return True if _ATTENTION_CLASS.search(kind.__name__) is not None else None


def is_plain_layer(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's own layers without attention: a Linear, a norm, an activation."""
    kind: Any = type(module)
    return _is_plain_class(kind)


@functools.lru_cache(maxsize=1024)
def _is_plain_class(kind: Any) -> bool:
    attend = (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    own: bool = kind.__module__.startswith("torch.nn.modules")
    return own and not issubclass(kind, attend) and kind not in containers


def _has_projections(module: nn.Module) -> bool:
    """Whether a module has matrices for queries and keys: two of them, or one that makes all three."""
    matrices = [p for p in module.parameters() if p.ndim == 2]
    return len(matrices) > 1 or any(max(m.shape) >= 3 * min(m.shape) for m in matrices)


def enclosing_module(site: CallSite) -> nn.Module | None:
    """The module that called the one of a site."""
    return next((module for _, module in _modules(site.frames[-1].f_back if site.frames else None)), None)


def has_parameter_axis(site: CallSite, size: int) -> bool:
    """Whether a layer of the module, or of a module around it on the stack, has so many inputs or outputs.

    A convolution has its outputs along the first axis; its kernel may happen to be as long as the sequence.
    """
    modules = [site.module, *(module for _, module in _modules(site.frames[-1].f_back if site.frames else None))]
    parameters = (p for module in modules[:2] if module is not None for p in module.parameters())
    return any(size in (p.shape if p.ndim <= 2 else p.shape[:1]) for p in parameters)
