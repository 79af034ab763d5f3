"""Conversion from and to `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`.

Outputs are equal in eval mode. Dropout inside the feed-forward network has no counterpart here and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import CrossAttention, SelfAttention
from .block import Block
from .options import ActivationName

__all__ = ["block", "cross_attention", "encoder_layer", "multihead", "self_attention"]


FUNCTIONS: dict[type, Callable[[Tensor], Tensor]] = {
    nn.ReLU: nn.functional.relu,
    nn.GELU: nn.functional.gelu,
    nn.SiLU: nn.functional.silu,
}


# From torch.nn.


def self_attention(mha: nn.MultiheadAttention, causal: bool) -> SelfAttention:
    """A `SelfAttention` with the weights of PyTorch's layer."""
    _check_multihead(mha)
    if mha.in_proj_weight is None:
        raise ValueError(f"kdim {mha.kdim} and vdim {mha.vdim} differ from {mha.embed_dim}: use CrossAttention.")
    bias, dropout = mha.in_proj_bias is not None, mha.dropout
    layer = SelfAttention(mha.embed_dim, mha.num_heads, bias=bias, causal=causal, attention_dropout=dropout)
    return _copy_weights(layer, mha)


def cross_attention(mha: nn.MultiheadAttention) -> CrossAttention:
    """A `CrossAttention` with the weights of PyTorch's layer."""
    _check_multihead(mha)
    if mha.kdim != mha.vdim:
        raise ValueError(
            f"keys and values come from one memory here: kdim and vdim must be equal; got {mha.kdim} and {mha.vdim}."
        )
    options = {"bias": mha.in_proj_bias is not None, "attention_dropout": mha.dropout}
    return _copy_weights(CrossAttention(mha.embed_dim, mha.num_heads, memory_dim=mha.kdim, **options), mha)


def block(layer: nn.TransformerEncoderLayer, causal: bool) -> Block:
    """A `Block` with the weights of PyTorch's layer."""
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise TypeError(
            f"from_torch takes an nn.TransformerEncoderLayer; got {type(layer).__name__}. Convert the attentions of "
            "another layer one by one, by SelfAttention.from_torch and CrossAttention.from_torch."
        )
    hidden, dim = layer.linear1.weight.shape
    bias = layer.linear1.bias is not None
    new = Block(
        dim, layer.self_attn.num_heads, hidden=hidden, activation=_activation_name(layer.activation),
        norm_first=layer.norm_first, dropout=layer.dropout1.p, hidden_dropout=layer.dropout.p, bias=bias, causal=causal,
    ).to(layer.linear1.weight)  # fmt: skip  # before copying: float64 weights must not pass through float32
    new.attention = self_attention(layer.self_attn, causal)
    pairs = [
        (new.attention_norm, layer.norm1),
        (new.feed_forward_norm, layer.norm2),
        (new.feed_forward.inner, layer.linear1),
        (new.feed_forward.outer, layer.linear2),
    ]
    for ours, theirs in pairs:
        ours.load_state_dict(theirs.state_dict())
    new.attention_norm.eps, new.feed_forward_norm.eps = layer.norm1.eps, layer.norm2.eps  # type: ignore[assignment]
    return new.train(layer.training)


def _copy_weights(layer: Any, mha: nn.MultiheadAttention) -> Any:
    if mha.in_proj_weight is not None:
        matrices = mha.in_proj_weight.chunk(3)
    else:
        matrices = mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight
    layer.to(mha.out_proj.weight)
    biases: Any = (None,) * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    parts = [*zip((layer.query, layer.key, layer.value), matrices, biases, strict=True)]
    parts.append((layer.output, mha.out_proj.weight, mha.out_proj.bias))
    for linear, weight, bias in parts:
        _set(linear, weight, bias)
    return layer.train(mha.training)


def _check_multihead(mha: Any) -> None:
    if not isinstance(mha, nn.MultiheadAttention):
        raise TypeError(f"from_torch takes an nn.MultiheadAttention; got {type(mha).__name__}.")
    if mha.bias_k is not None or mha.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn add keys that this layer does not have.")


def _activation_name(activation: Any) -> ActivationName:
    if activation is nn.functional.relu or isinstance(activation, nn.ReLU):
        return "relu"
    exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
    if activation is nn.functional.gelu or exact:
        return "gelu"
    if activation is nn.functional.silu or isinstance(activation, nn.SiLU):
        return "silu"
    raise ValueError(f"the activation must be relu, gelu or silu; got {activation!r}.")


# To torch.nn.


def multihead(layer: SelfAttention | CrossAttention) -> nn.MultiheadAttention:
    """PyTorch's layer with the weights of one of ours."""
    d = layer.dim // layer.heads
    sizes = (layer.kv_heads, layer.key_size, layer.value_size, layer.heads * d)
    _require(sizes == (layer.heads, d, d, layer.dim), "heads of size dim // heads for queries, keys and values", layer)
    _require(isinstance(layer.query, nn.Linear) and isinstance(layer.output, nn.Linear), "projections and W_o", layer)
    score = layer.score()
    scale = score.product_scale(d) if not score.modifiers and score.sink_logits is None else None
    plain = scale is not None and math.isclose(scale, d**-0.5)
    _require(plain, "the plain scaled dot product as score", layer)
    _require(getattr(layer, "positions", None) is None, "no positions of its own", layer)
    memory = getattr(layer, "memory_dim", layer.dim)
    bias = layer.query.bias is not None
    mha = nn.MultiheadAttention(
        layer.dim, layer.heads, layer.attention_dropout, bias=bias, kdim=memory, vdim=memory, batch_first=True
    )
    mha.to(layer.query.weight)  # type: ignore[arg-type]
    parts: list[Any] = [layer.query, layer.key, layer.value]
    with torch.no_grad():
        if mha.in_proj_weight is not None:
            mha.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        else:
            for weight, part in zip((mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight), parts, strict=True):
                weight.copy_(part.weight)
        if bias:
            mha.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    _set(mha.out_proj, layer.output.weight, layer.output.bias)  # type: ignore[arg-type]
    return mha.train(layer.training)


def encoder_layer(block: Block) -> nn.TransformerEncoderLayer:
    """PyTorch's layer with the weights of a `Block`."""
    feed = block.feed_forward
    _require(block.cross is None, "no cross-attention", block)
    _require(feed.gate is None and type(feed.activation) in FUNCTIONS, "no gate", block)
    _require(isinstance(block.attention_norm, nn.LayerNorm), "layer norms", block)
    # Its C++ path takes every nn.GELU for the exact one.
    _require(getattr(feed.activation, "approximate", "none") == "none", "no approximate gelu", block)
    layer = nn.TransformerEncoderLayer(
        block.attention.dim, block.attention.heads, feed.inner.out_features, block.dropout.p, batch_first=True,
        activation=FUNCTIONS[type(feed.activation)],
        norm_first=block.norm_first, bias=feed.inner.bias is not None,
    ).to(feed.inner.weight)  # fmt: skip
    mha = multihead(block.attention)
    layer.self_attn.load_state_dict(mha.state_dict())
    layer.self_attn.dropout = mha.dropout
    layer.norm1.load_state_dict(block.attention_norm.state_dict())
    layer.norm2.load_state_dict(block.feed_forward_norm.state_dict())
    layer.norm1.eps, layer.norm2.eps = block.attention_norm.eps, block.feed_forward_norm.eps  # type: ignore[assignment]
    layer.dropout.p = feed.dropout.p
    layer.linear1.load_state_dict(feed.inner.state_dict())
    layer.linear2.load_state_dict(feed.outer.state_dict())
    return layer.train(block.training)


def _require(condition: bool, what: str, layer: nn.Module) -> None:
    if not condition:
        raise ValueError(
            f"torch.nn's layer has {what}; this one differs: {type(layer).__name__}({layer.extra_repr()})."
        )


@torch.no_grad()
def _set(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
