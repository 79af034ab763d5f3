"""Calls of scaled_dot_product_attention that come again: from the same code, in the same form, with other numbers.

To read a call takes some hundred functions of Python: which module it came from, which axis is that of the heads, what
the mask hides, whether keys come from another sequence. All of it follows from the code on the stack, the module and
its attributes, and the layout of the operands. So these are remembered for each module beside what else was heard of it
(`layer_history`), and the same again is recorded without a second reading.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...core.torch_state import in_plain_forward
from ..calls import SavedCall, without_tensors
from .call_site import may_have_other_sequence

if TYPE_CHECKING:
    from ..calls import AttentionCall, LayerKind
    from .call_site import CallSite

__all__ = ["Form", "RecurringCall", "form_of", "is_shareable", "recognised"]


class Form(NamedTuple):
    """The common part of the calls of one module."""

    codes: tuple[CodeType, ...]  # of the stack, from the operator's caller to the call of the module
    layout: tuple[Any, ...]  # of the operands
    scale: float | None
    is_causal: bool
    is_square: bool
    kind: LayerKind
    unmasked: SavedCall | None  # the score and the mask of a call without a mask of tensors


class RecurringCall(NamedTuple):
    """The operands of a call of a known form."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    shape: tuple[int, int, int, int]  # b h i j


def is_shareable(call: AttentionCall) -> bool:
    """Whether the score and the mask of a call hold nothing of the call itself."""
    parsed, mask = call.parsed_mask, call.mask
    if not call.is_direct or parsed is None or (mask is not None and mask.is_inference()):
        return False
    return parsed.bias is None and parsed.uniform_rows is None


def form_of(site: CallSite, call: AttentionCall, kind: LayerKind, saved: SavedCall) -> Form | None:
    """The form of a call that was read and saved; None if more than a form tells how to read it."""
    q, k, v, frame = call.q, call.k, call.v, site.frame
    if not call.is_direct or q is None or k is None or v is None or frame is None or site.module is None:
        return None
    first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    codes: list[CodeType] = []
    at: FrameType | None = frame
    while first is site.module and at is not None:
        codes.append(at.f_code)
        if "call_impl" in at.f_code.co_name:
            unmasked = None if call.mask is not None else without_tensors(saved)
            square = q.shape[2] == k.shape[2]
            return Form(tuple(codes), _layout(q, k, v), call.scale, call.is_causal, square, kind, unmasked)
        if may_have_other_sequence(at.f_code):
            return None
        at = at.f_back
    return None


def recognised(
    names: dict[int, str],
    forms: dict[str, Form],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    frame: FrameType,
) -> tuple[str, Form, RecurringCall] | None:
    """A call of a known form: the name of its module, the form and the operands.

    Args:
        names: The names of the model's modules, by id.
        forms: The known forms, by name.
        args: Arguments of the operator.
        kwargs: Those by name.
        out: Its result.
        frame: Its caller.
    """
    code = frame.f_code
    name = names.get(id(frame.f_locals.get(code.co_varnames[0]))) if code.co_argcount else None
    form = None if name is None else forms.get(name)
    call = None if form is None else _recurring_call(form, args, kwargs, out, frame)
    return None if name is None or form is None or call is None else (name, form, call)


def _recurring_call(
    form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, frame: FrameType
) -> RecurringCall | None:
    """The operands of a call, if it has this form: by the arguments of the operator, its result and its caller."""
    count = len(args)
    if count < 3 or kwargs.get("scale") != form.scale:
        return None
    at: FrameType | None = frame
    for code in form.codes:
        if at is None or at.f_code is not code:
            return None
        at = at.f_back
    q, k, v = args[:3]
    if (
        type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or q.is_nested
        or k.is_nested
        or v.is_nested
    ):
        return None
    is_causal = args[5] if count > 5 else kwargs.get("is_causal", False)
    if out.dtype is not q.dtype or is_causal is not form.is_causal or _layout(q, k, v) != form.layout:
        return None
    if not in_plain_forward():
        return None
    b, h, i, _ = q.shape
    j = k.shape[2]
    if (i == j) is not form.is_square:
        return None
    return RecurringCall(q, k, v, args[3] if count > 3 else kwargs.get("attn_mask"), (b, h, i, j))


def _layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The sizes, steps and types that tell the axes of the operands apart; the number of keys does not."""
    b, g, _, d = k.shape
    c, e, _, _ = v.shape
    return q.shape, q.stride(), q.dtype, q.device, b, g, d, k.dtype, k.device, c, e
