"""Every way attention passes in a PyTorch model; one function a seam.

| seam | overheard at | kept as |
|---|---|---|
| `F.scaled_dot_product_attention`, however imported or called | aten::scaled_dot_product_attention | q, k |
| its fused kernels called directly | aten::_scaled_dot_product_*_attention* | q, k |
| `nn.MultiheadAttention`, C++ path | aten::_native_multi_head_attention | q, k, projected beside it |
| `nn.TransformerEncoderLayer`, C++ path | aten::_transformer_encoder_layer_fwd | q, k, projected beside it |
| softmax(q kᵀ) v written by hand | aten::softmax, then the product with v | the weights it wrote |
| `flex_attention` | the operator flex_attention | q, k; with a score_mod the weights |
| flash-attention as a PyTorch operator | flash_attn::_flash_attn_forward | q, k |
| the layers of `regard.nn` | where they attend, in `layers` | q, k and their own score |
| which tokens went in | aten::embedding | their numbers |

What is written by hand is found in `byhand`; the flash and flex attention of transformers are heard at its own
interface, in `hugging`. A seam turns arguments into an `AttentionCall` and hands it on.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ...core.masks import causal as causal_mask
from ...core.masks import padding, window
from ..calls import AttentionCall
from ..mask_recognition import ParsedMask, as_mask
from . import eager_attention, regard_nn, tap
from .call_site import SHARED_AXIS, split_heads

__all__ = ["flash_like", "listen"]


def listen() -> None:
    """Begin to overhear every seam. Without a listener in the thread this changes nothing, for nobody."""
    tap.hear("scaled_dot_product_attention", heard_sdpa)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        tap.hear(f"_scaled_dot_product_{kernel}", heard_fused)
    tap.hear("_native_multi_head_attention", heard_native_mha)
    tap.hear("_transformer_encoder_layer_fwd", heard_encoder_layer)
    tap.hear("embedding", heard_embedding)
    eager_attention.listen()
    regard_nn.listen()
    tap.hear_higher_order(_flex(), _FLEX_NAMES, heard_flex)
    if hasattr(torch.ops, "flash_attn") and hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
        tap.hear("_flash_attn_forward", heard_flash, namespace="flash_attn")


# scaled_dot_product_attention and its kernels.


def heard_sdpa(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    q, k, v = call["query"], call["key"], call["value"]
    if q.is_nested or k.is_nested:
        listener.failed(frame, "scaled_dot_product_attention was called with nested tensors")
        return
    at = listener.place(frame)
    if at is None:
        return
    # Under autocast the operator casts first; its output tells to what.
    q, k = q.to(out.dtype), k.to(out.dtype)
    given = call["attn_mask"]
    q4, k4, v4 = (split_heads(x, at.module, listener.batch()) for x in (q, k, v))
    if q4 is None or k4 is None or v4 is None:
        listener.failed(frame, SHARED_AXIS)
        return
    if given is not None and q.ndim == 3 and given.ndim == 3:
        given = split_heads(given, at.module, listener.batch()) if given.shape[0] > 1 else given[None]
    k4, v4 = (_once(x, q4, at.module) for x in (k4, v4))
    if (given is not None and given.ndim > 4) or q4.ndim > 4:
        listener.failed(
            frame, f"scaled_dot_product_attention was called with {q.ndim} axes; (batch, heads, length, size) is read"
        )
        return
    listener.attention(at, AttentionCall(q4, k4, v4, scale=call["scale"], given=given, causal=call["is_causal"]))


def _once(x: Tensor, q: Tensor, module: Any) -> Tensor:
    """Keys that were repeated for every query head of a group, without the repetition."""
    group = getattr(module, "num_key_value_groups", 1)
    if not isinstance(group, int) or group < 2 or x.ndim != 4 or x.shape[1] != q.shape[1] or x.shape[1] % group:
        return x
    few = x[:, ::group]
    repeated = bool((x.unflatten(1, (-1, group)) == few.unsqueeze(2)).all())
    return few.clone() if repeated else x


def heard_fused(listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (at := listener.place(frame)) is None:
        return
    given = call.get("attn_mask", call.get("attn_bias"))
    found = AttentionCall(call["query"], call["key"], call["value"], scale=call.get("scale"), given=given)
    found.causal = bool(call.get("is_causal", False))
    listener.attention(at, found)


def heard_flash(listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (at := listener.place(frame)) is None:
        return
    q, k, v = (call[name].transpose(1, 2) for name in ("q", "k", "v"))  # from (b, i, h, d)
    sides = call.get("window_size_left", -1), call.get("window_size_right", -1)
    listener.attention(at, flash_like(q, k, v, call["softmax_scale"], call["causal"], sides, call.get("softcap", 0.0)))


def flash_like(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, sides: tuple[int, int], softcap: float
) -> AttentionCall:
    """What FlashAttention computes: the last query stands at the last key, for causal and for windows."""
    mask, (before, after) = None, sides
    if causal:
        mask = causal_mask()
    if before >= 0 or after >= 0:
        far = k.shape[2] + q.shape[2]
        part = window(before if before >= 0 else far, 0 if causal else after if after >= 0 else far)
        mask = part if mask is None else mask & part
    return AttentionCall(
        q, k, v, scale=scale, softcap=softcap or None, said=ParsedMask(mask, None, "end" if mask else None)
    )


# PyTorch's own C++ paths. Queries and keys are projected beside them, from the same inputs and weights.


def heard_native_mha(listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (at := listener.place(frame)) is None:
        return
    q, k, d, h = call["query"], call["key"], call["embed_dim"], call["num_head"]
    given, kind = call["mask"], call["mask_type"]
    if q.is_nested:
        found = _nested(q, call["qkv_weight"], call["qkv_bias"], d, h)
    else:
        weight, bias = call["qkv_weight"], call["qkv_bias"]
        found = AttentionCall(_projected(q, weight, bias, 0, d, h), _projected(k, weight, bias, 1, d, h))
        found.v = _projected(call["value"], weight, bias, 2, d, h) if listener.values else None
        _read_native_mask(found, given, kind)
    found.same = q.data_ptr() == k.data_ptr()
    listener.attention(at, found)


def heard_encoder_layer(listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (at := listener.place(frame)) is None:
        return
    x, d, h = call["src"], call["embed_dim"], call["num_heads"]
    weight, bias = call["qkv_weight"], call["qkv_bias"]
    if x.is_nested:
        if call["norm_first"]:
            listener.failed(frame, "the C++ path normalises nested tensors first; pass enable_nested_tensor=False")
            return
        found = _nested(x, weight, bias, d, h)
    else:
        if call["norm_first"]:
            x = torch.nn.functional.layer_norm(x, (d,), call["norm_weight_1"], call["norm_bias_1"], call["eps"])
        found = AttentionCall(_projected(x, weight, bias, 0, d, h), _projected(x, weight, bias, 1, d, h))
        found.v = _projected(x, weight, bias, 2, d, h) if listener.values else None
        _read_native_mask(found, call["mask"], call["mask_type"])
    found.same = True
    # The layer's attention is a module of its own, though the C++ path never calls it.
    listener.attention(at, found, inside="self_attn")


def _projected(x: Tensor, weight: Tensor, bias: Tensor, part: int, d: int, h: int) -> Tensor:
    rows = slice(part * d, (part + 1) * d)
    y = torch.nn.functional.linear(x, weight[rows], None if bias is None else bias[rows])
    return y.unflatten(-1, (h, -1)).transpose(1, 2)  # b h i d


def _nested(x: Tensor, weight: Tensor, bias: Tensor, d: int, h: int) -> AttentionCall:
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    q, k, v = (_projected(padded, weight, bias, part, d, h) for part in range(3))
    whole = bool((lengths == padded.shape[1]).all())
    return AttentionCall(q, k, v, said=ParsedMask(None if whole else padding(lengths)))


def _read_native_mask(found: AttentionCall, given: Tensor | None, kind: int | None) -> None:
    """In these paths True hides: kind 0 is (i, j), 1 is padding (b, j), 2 is (b, h, i, j)."""
    if given is None:
        return
    visible = ~given if given.dtype == torch.bool else given
    found.given = visible[:, None, None, :] if kind == 1 or (given.ndim == 2 and kind is None) else visible


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

#: How many weights may be written out for a score_mod that is not the identity.
FLEX_CELLS = 2**26


def _flex() -> Any:
    from torch._higher_order_ops import flex_attention

    return flex_attention


def heard_flex(listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
    if (at := listener.place(frame)) is None:
        return
    q, k, v = call["query"], call["key"], call["value"]
    cells = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if cells > FLEX_CELLS:
        listener.refuse(
            at.name, f"its score_mod and mask_mod are functions of single cells, and there are {cells} of them"
        )
        return
    plain, changed = _flex_scores(call, q.shape[1])
    hidden = changed == -torch.inf
    if bool((changed == plain).logical_or(hidden).all()):  # a mask and no score_mod
        said = ParsedMask()
        if bool(hidden.any()):
            visible = ~hidden
            if bool((visible == visible[:, :1]).all()):
                visible = visible[:, :1]
            said.mask, said.align = as_mask(visible)
        listener.attention(at, AttentionCall(q, k, v, scale=call["scale"], said=said))
    else:
        empty = hidden.all(-1, keepdim=True)
        listener.attention(at, AttentionCall(v=v, w=changed.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)))


def _flex_scores(call: dict[str, Any], heads: int) -> tuple[Tensor, Tensor]:
    """Scores before and after score_mod and mask_mod, by PyTorch's own formula for them."""
    from importlib import import_module

    inner = import_module("torch._higher_order_ops.flex_attention")._math_attention_inner
    q, k, v = call["query"], call["key"], call["value"]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
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


def heard_embedding(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    ids = call["indices"]
    if listener.wants_ids and ids.ndim == 2 and not ids.is_floating_point():
        listener.embedded(call["weight"], ids, frame)
