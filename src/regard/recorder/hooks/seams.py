"""The ways a PyTorch model computes attention ("seams"), one handler each.

| seam | intercepted at | kept as |
|---|---|---|
| `F.scaled_dot_product_attention`, however imported or called | aten::scaled_dot_product_attention | q, k |
| its fused kernels called directly | aten::_scaled_dot_product_*_attention* | q, k |
| `nn.MultiheadAttention`, C++ path | aten::_native_multi_head_attention | q, k, projected once more |
| `nn.TransformerEncoderLayer`, C++ path | aten::_transformer_encoder_layer_fwd | q, k, projected once more |
| softmax(q kᵀ) v written out | aten::softmax, then the product with v | the weights as computed |
| `flex_attention` | the operator flex_attention | q, k; with a score_mod the weights |
| flash-attention as a PyTorch operator | flash_attn::_flash_attn_forward | q, k |
| the layers of `regard.nn` | the method in which they attend, in `regard_nn` | q, k and their own score |
| token ids | aten::embedding | the ids |

Attention that is written out is recognised in `eager_attention`; the flash and flex attention of transformers are
intercepted at its own interface, in `transformers`. A handler turns arguments into an `AttentionCall`.
"""

from __future__ import annotations

import functools
import logging
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ...core.masks.kinds import causal as causal_mask
from ...core.masks.kinds import padding, window
from ...core.scores.kinds import repeat_kv
from ..calls import AttentionCall
from ..mask_recognition import ParsedMask, mask_of_cells
from . import eager_attention, regard_nn, tap
from .call_site import attribute
from .layout import heads_come_first, may_be_heads_of_one, shared_axis_reason, split_heads

__all__ = ["flash_like", "install"]

log = logging.getLogger("regard")


def install() -> None:
    """Register every handler. Nothing changes in a thread without a listener."""
    regard_nn.install()
    if tap.is_complete():
        return
    native = torch._C._nn.scaled_dot_product_attention
    tap.intercept("scaled_dot_product_attention", on_sdpa, attends=True, native=native)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        tap.intercept(f"_scaled_dot_product_{kernel}", on_fused, attends=True)
    tap.intercept("_native_multi_head_attention", on_native_mha, attends=True)
    tap.intercept("_transformer_encoder_layer_fwd", on_encoder_layer, attends=True)
    tap.intercept("embedding", on_embedding)
    eager_attention.install()
    if (flex := _flex_operator()) is not None:
        tap.intercept_higher_order(flex, _FLEX_NAMES, on_flex)
    if hasattr(torch.ops, "flash_attn") and hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
        tap.intercept("_flash_attn_forward", on_flash, namespace="flash_attn", attends=True)


# scaled_dot_product_attention and its kernels.


def on_sdpa(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    q, k, v = call["query"], call["key"], call["value"]
    if q.is_nested or k.is_nested:
        listener.refuse_at(frame, "scaled_dot_product_attention was called with nested tensors")
        return
    site = listener.call_site(frame)
    if site is None:
        return
    if q.ndim > 4 or out.ndim > 4:
        listener.refuse_at(
            frame, f"scaled_dot_product_attention was called with {out.ndim} axes; (batch, heads, length, size) is read"
        )
        return
    # Under autocast the operator casts first, to the type of its output.
    if q.dtype != out.dtype or k.dtype != out.dtype:
        q, k = q.to(out.dtype), k.to(out.dtype)
    mask, batch = call["attn_mask"], listener.batch_size(q.shape[-2])
    q, k, v, mask = _broadcast(q, k, v, mask, out)
    if batch != 1 and q.ndim == 3 and may_be_heads_of_one(q, k, v):
        batch = None  # as many heads as the pass has sequences are no reason to take them for these
    swapped = heads_come_first(q, site.module, batch) if q.ndim == 4 else False
    if swapped:
        q, k, v, mask = (None if x is None else x.transpose(0, 1) for x in (q, k, v, mask))
    if q.ndim == k.ndim == v.ndim == 4:
        q4, k4, v4 = q, k, v
    else:
        q4, k4, v4 = (split_heads(x, site.module, batch) for x in (q, k, v))
    if swapped is None or q4 is None or k4 is None or v4 is None:
        listener.refuse_at(frame, shared_axis_reason(site))
        return
    if mask is not None and q.ndim == 3:
        mask = split_heads(mask, site.module, batch) if mask.shape[0] > 1 else mask[None]
    is_direct = q4 is call["query"] and k4 is call["key"] and mask is call["attn_mask"]
    if (group := _repeats_of(k4, q4, site.module)) > 1:
        is_direct, (k4, v4) = False, _without_repeats(k4, v4, group)
    read = AttentionCall(q4, k4, v4, scale=call["scale"], mask=mask, is_causal=call["is_causal"], is_direct=is_direct)
    listener.attention(site, read)


def _broadcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor) -> tuple[Any, ...]:
    """The operands with the axes of the output: any of them may lack a batch or heads that another has."""
    lacks = not q.ndim == k.ndim == v.ndim == out.ndim
    if lacks or q.shape[:-2] != out.shape[:-2] or not k.shape[0] == v.shape[0] == out.shape[0]:
        q, k, v = (x.reshape(*[1] * (out.ndim - x.ndim), *x.shape) for x in (q, k, v))
        q = q.expand(*out.shape[:-2], *q.shape[-2:])
        k, v = (x.expand(out.shape[0], *x.shape[1:]) if out.ndim > 2 else x for x in (k, v))
    if mask is not None:
        mask = mask.reshape(*[1] * (out.ndim - mask.ndim), *mask.shape)
    return q, k, v, mask


def _repeats_of(k: Tensor, q: Tensor, module: Any) -> int:
    """How often `repeat_kv` may have copied keys for the query heads of a group, as the module says; else 1."""
    group = 1 if module is None else attribute(module, "num_key_value_groups", 1)
    may_repeat = isinstance(group, int) and group > 1 and k.ndim == 4
    return group if may_repeat and k.shape[1] == q.shape[1] and k.shape[1] % group == 0 else 1


def _without_repeats(k: Tensor, v: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Keys and values without the copies that `repeat_kv` made for the query heads of a group."""
    few = k[:, ::group]
    # Of keys alone: values are repeated with them, and on a GPU each comparison waits for all that was launched before.
    if not bool((k.unflatten(1, (-1, group)) == few.unsqueeze(2)).all()):
        return k, v
    return few.clone(), v[:, ::group].clone() if v.shape[1] == k.shape[1] else v


def on_fused(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (site := listener.call_site(frame)) is None:
        return
    mask = call.get("attn_mask", call.get("attn_bias"))
    attention = AttentionCall(call["query"], call["key"], call["value"], scale=call.get("scale"), mask=mask)
    attention.is_causal = bool(call.get("is_causal", False))
    listener.attention(site, attention)


def on_flash(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (site := listener.call_site(frame)) is None:
        return
    q, k, v = (call[name].transpose(1, 2) for name in ("q", "k", "v"))  # from (b, i, h, d)
    sides = call.get("window_size_left", -1), call.get("window_size_right", -1)
    listener.attention(
        site, flash_like(q, k, v, call["softmax_scale"], call["causal"], sides, call.get("softcap", 0.0))
    )


def flash_like(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, sides: tuple[int, int], softcap: float
) -> AttentionCall:
    """FlashAttention's call: causal masks and windows are aligned at the end of the keys."""
    mask, (before, after) = None, sides
    if causal:
        mask = causal_mask()
    if before >= 0 or after >= 0:
        unlimited = k.shape[2] + q.shape[2]
        part = window(before if before >= 0 else unlimited, 0 if causal else after if after >= 0 else unlimited)
        mask = part if mask is None else mask & part
    return AttentionCall(
        q,
        k,
        v,
        scale=scale,
        softcap=softcap or None,
        parsed_mask=ParsedMask(mask, None, None if mask is None else "end"),
    )


# PyTorch's own C++ paths. Queries and keys are projected once more, from the same inputs and weights.


def on_native_mha(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (site := listener.call_site(frame)) is None:
        return
    q, k, d, h = call["query"], call["key"], call["embed_dim"], call["num_head"]
    if q.is_nested:
        attention = _nested(q, call["qkv_weight"], call["qkv_bias"], d, h)
    else:
        weight, bias = call["qkv_weight"], call["qkv_bias"]
        attention = AttentionCall(_projected(q, weight, bias, 0, d, h), _projected(k, weight, bias, 1, d, h))
        attention.v = _projected(call["value"], weight, bias, 2, d, h) if listener.wants_values else None
        _read_native_mask(attention, call["mask"], call["mask_type"])
    attention.is_self, attention.native = q.data_ptr() == k.data_ptr(), True
    listener.attention(site, attention)


def on_encoder_layer(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (site := listener.call_site(frame)) is None:
        return
    x, d, h = call["src"], call["embed_dim"], call["num_heads"]
    weight, bias = call["qkv_weight"], call["qkv_bias"]
    if x.is_nested:
        if call["norm_first"]:
            listener.refuse_at(frame, "the C++ path normalises nested tensors first; pass enable_nested_tensor=False")
            return
        attention = _nested(x, weight, bias, d, h)
    else:
        if call["norm_first"]:
            x = torch.nn.functional.layer_norm(x, (d,), call["norm_weight_1"], call["norm_bias_1"], call["eps"])
        attention = AttentionCall(_projected(x, weight, bias, 0, d, h), _projected(x, weight, bias, 1, d, h))
        attention.v = _projected(x, weight, bias, 2, d, h) if listener.wants_values else None
        _read_native_mask(attention, call["mask"], call["mask_type"])
    attention.is_self = attention.native = True
    # The layer's attention is a submodule, which the C++ path never calls.
    listener.attention(site, attention, submodule="self_attn")


def _projected(x: Tensor, weight: Tensor, bias: Tensor, part: int, d: int, h: int) -> Tensor:
    rows = slice(part * d, (part + 1) * d)
    y = torch.nn.functional.linear(x, weight[rows], None if bias is None else bias[rows])
    return y.unflatten(-1, (h, -1)).transpose(1, 2)  # b h i d


def _nested(x: Tensor, weight: Tensor, bias: Tensor, d: int, h: int) -> AttentionCall:
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    q, k, v = (_projected(padded, weight, bias, part, d, h) for part in range(3))
    is_full = bool((lengths == padded.shape[1]).all())
    return AttentionCall(q, k, v, parsed_mask=ParsedMask(None if is_full else padding(lengths)))


def _read_native_mask(attention: AttentionCall, mask: Tensor | None, kind: int | None) -> None:
    """In these paths True hides: kind 0 is (i, j), 1 is padding (b, j), 2 is (b, h, i, j)."""
    if mask is None:
        return
    visible = ~mask if mask.dtype == torch.bool else mask
    attention.mask = visible[:, None, None, :] if kind == 1 or (mask.ndim == 2 and kind is None) else visible


# FlexAttention.

_FLEX_NAMES = (
    "query",
    "key",
    "value",
    "score_mod",
    "block_mask",
    "scale",
    "kernel_options",
    "score_buffers",
    "mask_buffers",
)

#: The most weights that are materialised for a score_mod.
FLEX_CELLS = 2**26


@functools.cache
def _flex_operator() -> Any:
    """FlexAttention's operator, a private name of PyTorch; None where there is none of that name."""
    try:
        from torch._higher_order_ops import flex_attention
    except ImportError:
        flex_attention = None  # type: ignore[assignment]
    if not hasattr(flex_attention, "py_impl"):  # without the operator, the import returns the module of this name
        log.warning("this PyTorch has no operator flex_attention: regard.record does not record FlexAttention")
        return None
    return flex_attention


def on_flex(listener: tap.Listener, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (site := listener.call_site(frame)) is None:
        return
    q, k, v = call["query"], call["key"], call["value"]
    cells = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if cells > FLEX_CELLS:
        listener.refuse(
            site.name, f"its score_mod and mask_mod are functions of single cells, and there are {cells} of them"
        )
        return
    plain, changed = _flex_scores(call, q.shape[1])
    hidden = changed == -torch.inf
    if bool((changed == plain).logical_or(hidden).all()):  # a mask and no score_mod
        parsed = ParsedMask()
        if bool(hidden.any()):
            visible = ~hidden
            if bool((visible == visible[:, :1]).all()):
                visible = visible[:, :1]
            parsed.mask, parsed.align = mask_of_cells(visible)
        listener.attention(site, AttentionCall(q, k, v, scale=call["scale"], parsed_mask=parsed))
    else:
        empty = hidden.all(-1, keepdim=True)
        listener.attention(site, AttentionCall(v=v, w=changed.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)))


def _flex_scores(call: dict[str, Any], heads: int) -> tuple[Tensor, Tensor]:
    """Scores before and after score_mod and mask_mod, by PyTorch's own math path."""
    from importlib import import_module

    inner = import_module("torch._higher_order_ops.flex_attention")._math_attention_inner
    q, k, v = call["query"], call["key"], call["value"]
    k, v = (repeat_kv(x, heads) for x in (k, v))
    return inner(
        q,
        k,
        v,
        call["score_mod"],
        call["block_mask"],
        call["scale"],
        call.get("kernel_options", {}),
        call.get("score_buffers", ()),
        call.get("mask_buffers", ()),
    )


# Tokens.


def on_embedding(listener: tap.Listener, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    ids = call["indices"]
    if listener.wants_ids and ids.ndim == 2 and not ids.is_floating_point():
        listener.embedding(call["weight"], ids, frame)
