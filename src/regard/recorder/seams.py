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
| which tokens went in | aten::embedding | their numbers |

The flash and flex attention of transformers are heard at its own interface: see `hugging`.
A seam turns arguments into an `Attention` and hands it on. Imports `tap`, `where` and `capture`.
"""

from __future__ import annotations

from collections import deque
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask import padding
from . import tap
from .capture import Attention
from .recognise import Said
from .where import batch_first_owner, heads_of, looks_like_attention

__all__ = ["CHUNKED", "Trail", "flash_like", "listen"]

#: Modules that attend within chunks or to samples: their softmax is over keys that are not the sequence's positions.
CHUNKED = {
    "BigBirdBlockSparseAttention",
    "BigBirdPegasusBlockSparseAttention",
    "LEDEncoderSelfAttention",
    "LocalSelfAttention",
    "LongT5LocalAttention",
    "LongT5TransientGlobalAttention",
    "LongformerSelfAttention",
    "LSHSelfAttention",
    "ProphetNetNgramSelfAttention",
    "XLMProphetNetNgramSelfAttention",
    "NystromformerSelfAttention",
    "YosoSelfAttention",
}


def listen() -> None:
    """Begin to overhear every seam. Without a listener in the thread this changes nothing, for nobody."""
    tap.hear("scaled_dot_product_attention", heard_sdpa)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        tap.hear(f"_scaled_dot_product_{kernel}", heard_fused)
    tap.hear("_native_multi_head_attention", heard_native_mha)
    tap.hear("_transformer_encoder_layer_fwd", heard_encoder_layer)
    tap.hear("softmax.int", heard_softmax)
    tap.hear("_softmax", heard_softmax)
    tap.hear("embedding", heard_embedding)
    for name in (
        "dropout",
        "native_dropout",
        "to.dtype",
        "to.dtype_layout",
        "to.device",
        "to.other",
        "_to_copy",
        "type_as",
        "contiguous",
        "clone",
        "mul.Tensor",
        "nan_to_num",
        "masked_fill.Scalar",
        "masked_fill.Tensor",
    ):
        tap.hear(name, _Step(name.partition(".")[0]), tap.FOLLOW)
    for name in ("matmul", "bmm", "baddbmm"):
        tap.hear(name, heard_product)
    tap.hear("einsum", heard_einsum)
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
    q4, k4, v4 = (_split_heads(x, at.module, listener.batch()) for x in (q, k, v))
    if q4 is None or k4 is None or v4 is None:
        listener.failed(frame, _SHARED_AXIS)
        return
    if given is not None and q.ndim == 3 and given.ndim == 3:
        given = _split_heads(given, at.module, listener.batch()) if given.shape[0] > 1 else given[None]
    k4, v4 = (_once(x, q4, at.module) for x in (k4, v4))
    if (given is not None and given.ndim > 4) or q4.ndim > 4:
        listener.failed(
            frame, f"scaled_dot_product_attention was called with {q.ndim} axes; (batch, heads, length, size) is read"
        )
        return
    listener.attention(at, Attention(q4, k4, v4, scale=call["scale"], given=given, causal=call["is_causal"]))


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
    found = Attention(call["query"], call["key"], call["value"], scale=call.get("scale"), given=given)
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
) -> Attention:
    """What FlashAttention computes: causal and windows are counted from the last query, which stands at the last key."""
    from ..mask import causal as causal_mask
    from ..mask import window

    mask, (before, after) = None, sides
    if causal:
        mask = causal_mask()
    if before >= 0 or after >= 0:
        far = k.shape[2] + q.shape[2]
        part = window(before if before >= 0 else far, 0 if causal else after if after >= 0 else far)
        mask = part if mask is None else mask & part
    return Attention(q, k, v, scale=scale, softcap=softcap or None, said=Said(mask, None, "end" if mask else None))


_SHARED_AXIS = (
    "batch and heads share one axis and nothing says in which order; record one sequence at a time, "
    "or shape it (batch, heads, length, size)"
)


def _split_heads(x: Tensor, module: Any, batch: int | None) -> Tensor | None:
    """(n, i, d) with batch and heads in one axis to (b, h, i, d); None where nothing says how."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim != 3:
        return x
    heads = heads_of(module)
    if x.shape[0] == 1 or heads == 1 or (heads is None and batch == x.shape[0]):
        return x.unsqueeze(1)
    if heads == x.shape[0] and batch in (None, 1):
        return x[None]
    if heads and x.shape[0] % heads == 0 and batch_first_owner(module):
        return x.unflatten(0, (-1, heads))
    return None


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
        found = Attention(_projected(q, weight, bias, 0, d, h), _projected(k, weight, bias, 1, d, h))
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
        found = Attention(_projected(x, weight, bias, 0, d, h), _projected(x, weight, bias, 1, d, h))
        found.v = _projected(x, weight, bias, 2, d, h) if listener.values else None
        _read_native_mask(found, call["mask"], call["mask_type"])
    found.same = True
    # The layer's attention is a module of its own, though the C++ path never calls it.
    listener.attention(at, found, inside="self_attn")


def _projected(x: Tensor, weight: Tensor, bias: Tensor, part: int, d: int, h: int) -> Tensor:
    rows = slice(part * d, (part + 1) * d)
    y = torch.nn.functional.linear(x, weight[rows], None if bias is None else bias[rows])
    return y.unflatten(-1, (h, -1)).transpose(1, 2)  # b h i d


def _nested(x: Tensor, weight: Tensor, bias: Tensor, d: int, h: int) -> Attention:
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    q, k, v = (_projected(padded, weight, bias, part, d, h) for part in range(3))
    whole = bool((lengths == padded.shape[1]).all())
    return Attention(q, k, v, said=Said(None if whole else padding(lengths)))


def _read_native_mask(found: Attention, given: Tensor | None, kind: int | None) -> None:
    """In these paths True hides: kind 0 is (i, j), 1 is padding (b, j), 2 is (b, h, i, j)."""
    if given is None:
        return
    visible = ~given if given.dtype == torch.bool else given
    found.given = visible[:, None, None, :] if kind == 1 or (given.ndim == 2 and kind is None) else visible


# softmax(q kᵀ) v by hand: a product makes scores, the softmax opens a trail, steps continue it, the product with the
# values ends it. A softmax over features (linear attention) looks alike but for what it is multiplied with.


class Trail:
    """What one listener remembers of products and of a softmax whose product has not come yet."""

    def __init__(self) -> None:
        self.products: deque[Product] = deque(maxlen=16)
        self.at: Any = None  # where the softmax was called; None while none is open
        self.s: Tensor | None = None  # what softmax was taken of, for a listener that wants scores
        self.scored = False  # whether its scores came from a product of queries and keys
        self.steps = 0
        #: Where the weights live now: storage → (the weights before dropout, whether dropout came since, stride of keys).
        self.places: dict[int, tuple[Tensor, bool, int]] = {}
        self.alive: list[Tensor] = []  # a storage must not be given to somebody else while it is looked for

    def open(self, w: Tensor, at: Any, scores: Tensor | None) -> None:
        self.close()
        self.at, self.steps, self.s = at, 0, scores
        self.scored = any(product.scores(w) for product in self.products)
        self.grow(w, w, False)
        tap.follow(True)

    def grow(self, out: Tensor, clean: Tensor, dropped: bool) -> None:
        self.places[_storage(out)] = clean, dropped, out.stride(-1)
        self.alive.append(out)

    def close(self) -> None:
        self.at, self.s, self.places, self.alive = None, None, {}, []
        if all(other.trail.at is None for other in tap.listeners()):
            tap.follow(False)

    def step(self) -> bool:
        """One more operator; whether a softmax is still open."""
        self.steps += 1
        if self.at is not None and self.steps > PATIENCE:
            self.close()
        return self.at is not None

    def holds(self, x: Any) -> bool:
        """Whether x is the weights, its last axis the keys."""
        if not isinstance(x, Tensor) or _storage(x) not in self.places:
            return False
        return x.shape[-1] == 1 or x.stride(-1) == self.places[_storage(x)][2]


class Product(NamedTuple):
    """A product of two things the model computed, by what it looks like; it is not kept alive."""

    storage: int
    shape: torch.Size

    def scores(self, w: Tensor) -> bool:
        """Whether softmax could have been taken of this, perhaps with a sink as one more column."""
        j = self.shape[-1]
        rows = self.shape.numel() // max(1, j)
        return w.shape[-1] in (j, j + 1) and w.numel() == rows * w.shape[-1]

    def is_(self, x: Tensor) -> bool:
        return self.storage == _storage(x) and self.shape[-2:] == x.shape[-2:]


#: A product comes soon after its softmax, or it is not one.
PATIENCE = 40


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def heard_softmax(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    if out.is_nested or out.ndim < 3 or call["dim"] % out.ndim != out.ndim - 1:
        return
    if (at := listener.place(frame)) is None:
        return
    if type(at.module).__name__ in CHUNKED:
        listener.failed(frame, "it attends to chunks, landmarks or samples, which are not positions of the sequence")
        return
    listener.trail.open(out, at, call["self"] if listener.wants_scores else None)


class _Step:
    """An operator that may stand between a softmax and its product."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, listener: Any, call: dict[str, Any], out: Any, frame: FrameType) -> None:
        trail: Trail = listener.trail
        if not trail.step():
            return
        first = call.get("self", call.get("input"))
        result = out[0] if isinstance(out, tuple) else out
        place = trail.places.get(_storage(first)) if isinstance(first, Tensor) else None
        if place is None or not isinstance(result, Tensor) or _storage(result) in trail.places:
            return
        clean, dropped, _ = place
        if "dropout" in self.name:
            trail.grow(result, clean if dropped else first, True)
        elif dropped:  # converted after dropout: the same numbers in another type
            trail.grow(result, clean, True)
        else:
            trail.grow(result, result, False)


def heard_product(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    left, right = (
        (call["batch1"], call["batch2"]) if "batch1" in call else (call["self"], call.get("other", call.get("mat2")))
    )
    trail: Trail = listener.trail
    if trail.step() and trail.holds(left):
        _finish(listener, left, right)
    elif _computed(left) and _computed(right) and not out.is_nested:
        trail.products.append(Product(_storage(out), out.shape))


def _computed(x: Tensor) -> bool:
    """Whether a factor is something the model computed, not one of its parameters."""
    return x.ndim >= 3 and not isinstance(x, torch.nn.Parameter) and not isinstance(x._base, torch.nn.Parameter)


def heard_einsum(listener: Any, call: dict[str, Any], out: Tensor, frame: FrameType) -> None:
    trail: Trail = listener.trail
    operands = call["tensors"]
    is_open = trail.step()
    weighted = [x for x in operands if is_open and trail.holds(x)]
    if not weighted:
        if len(operands) == 2 and all(_computed(x) for x in operands):
            trail.products.append(Product(_storage(out), out.shape))
        return
    w, name = weighted[0], trail.at.name
    sides, _, result = call["equation"].replace(" ", "").partition("->")
    letters = sides.split(",")
    if len(operands) != 2 or "." in sides:
        trail.close()
        listener.refuse(name, f"its weights enter einsum({call['equation']!r}), which is not read")
        return
    here = 0 if operands[0] is w else 1
    mine, others, v = letters[here], letters[1 - here], operands[1 - here]
    if mine[-1] not in others or mine[-1] in result:  # the keys must be what is summed over
        trail.close()
        listener.refuse(
            name, f"its weights enter einsum({call['equation']!r}), which does not sum over their last axis"
        )
        return
    _finish(listener, w, v, values=others[-2:-1] == mine[-1])


def _finish(listener: Any, used: Tensor, v: Tensor, values: bool = True) -> None:
    """The product of weights and values came: hand the weights on, if weights they are."""
    trail: Trail = listener.trail
    if used.ndim < 3 or v.ndim < 3:
        return
    clean, dropped, _ = trail.places[_storage(used)]
    at, scored, s = trail.at, trail.scored, trail.s
    fed = any(product.is_(v) for product in trail.products)
    trail.close()
    if not scored and (fed or not looks_like_attention(at.module)):
        why = (
            "is multiplied with a product, as in linear attention" if fed else "is not of a product of queries and keys"
        )
        listener.refuse(
            at.name, f"it multiplies something with a softmax that {why}: no weights over keys are to be had"
        )
        return
    if dropped and clean.numel() != used.numel():
        listener.refuse(at.name, "its weights change shape after dropout")
        return
    w = clean.reshape(used.shape) if dropped else used
    if w.ndim > 4:
        listener.refuse(at.name, f"its weights have {w.ndim} axes; (batch, heads, queries, keys) is read")
        return
    w4 = _split_heads(w, at.module, listener.batch())
    if w4 is None:
        listener.refuse(at.name, _SHARED_AXIS)
        return
    found = Attention(v=_split_heads(v, at.module, listener.batch()) if values else None, w=w4)
    if s is not None and s.shape[:-1] == w.shape[:-1]:
        found.s = _split_heads(s[..., : w.shape[-1]], at.module, listener.batch())  # without the column of a sink
    listener.attention(at, found)


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
        said = Said()
        if bool(hidden.any()):
            from .recognise import as_mask

            visible = ~hidden
            if bool((visible == visible[:, :1]).all()):
                visible = visible[:, :1]
            said.mask, said.align = as_mask(visible)
        listener.attention(at, Attention(q, k, v, scale=call["scale"], said=said))
    else:
        empty = hidden.all(-1, keepdim=True)
        listener.attention(at, Attention(v=v, w=changed.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)))


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
