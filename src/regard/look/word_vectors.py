"""Word vectors of a model: embeddings before positions, and the first attention layer's projections of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.scores.kinds import repeat_kv
from .loading import LoadedModel, as_loaded
from .token_text import printable

__all__ = ["WordVectors", "word_vectors"]

#: Names that models give to the three projections of an attention layer.
_PROJECTIONS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
#: Names of one matrix that makes all three, one after the other.
_FUSED = ("c_attn", "qkv", "in_proj", "Wqkv", "qkv_proj")


@dataclass(frozen=True)
class WordVectors:
    """Word embeddings before positions, and the first layer's full-width projections of them, each (t, D)."""

    tokens: tuple[str, ...]
    x: Tensor
    q: Tensor  # x W_q
    k: Tensor  # x W_k
    v: Tensor  # x W_v


@torch.no_grad()
def word_vectors(text: str, model: str | Path | LoadedModel | None = None, *, cut: bool = False) -> WordVectors:
    """The words of a text as vectors, for self-attention in its basic form and with W_q, W_k, W_v one at a time.

    Args:
        text: The text.
        model: As for `look_at`.
        cut: Take the beginning of a text that is too long for the model.
    """
    model = as_loaded(model)
    ids = model.ids(text, cut)
    x = _embedding_table(model.model)(ids)[0].float()  # t D
    q, k, v = (_full_width(part.float(), x.shape[1], model) for part in _projections(model, x))
    return WordVectors(tuple(model.tokens(ids)), x, q, k, v)


def _embedding_table(model: nn.Module) -> nn.Module:
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings()  # type: ignore[operator]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ValueError("this model has no table of word embeddings.")
    return max(tables, key=lambda table: table.num_embeddings)


def _projections(model: LoadedModel, x: Tensor) -> Sequence[Tensor]:
    """x W_q, x W_k, x W_v of the first attention layer, in whichever way the model writes them."""
    x = x.to(next(model.model.parameters()).dtype)
    for module in model.model.modules():
        try:
            if (parts := _project(module, x, model.model)) is not None:
                return parts
        except RuntimeError:  # the layer takes another size than the embeddings have: there is a layer between them
            break
    raise ValueError(
        f"the W_q, W_k and W_v of {printable(model.name)} cannot be put on its word embeddings; "
        "walk its recorded head instead (--layer, --head)."
    )


def _project(module: nn.Module, x: Tensor, model: nn.Module) -> Sequence[Tensor] | None:
    """The three projections of x by one module, if it is an attention layer that has them: three matrices, or one."""
    for names in _PROJECTIONS:
        parts = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Module) for part in parts):
            return [part(x) for part in parts]  # type: ignore[misc]
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    for name in _FUSED:
        fused = getattr(module, name, None)
        if isinstance(fused, nn.Module) and (product := fused(x)).shape[-1] == 3 * x.shape[-1]:
            return product.chunk(3, -1)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", "") in ("gpt_neox", "bloom"):  # one matrix, head by head
        fused = getattr(module, "query_key_value", None)
        if isinstance(fused, nn.Module):
            return fused(x).reshape(len(x), config.num_attention_heads, 3, -1).transpose(1, 2).flatten(2).unbind(1)
    return None


def _full_width(part: Tensor, size: int, model: LoadedModel) -> Tensor:
    """A projection as wide as the embeddings; shared heads of keys and values are repeated."""
    if part.shape[1] == size:
        return part
    heads = getattr(getattr(model.model, "config", None), "num_attention_heads", None)
    if heads and size % heads == 0 and size % part.shape[1] == 0 and part.shape[1] % (size // heads) == 0:
        shared = part.reshape(len(part), -1, 1, size // heads)  # t g 1 d
        return repeat_kv(shared, heads).flatten(1)
    raise ValueError(
        f"the first layer of {printable(model.name)} projects words of size {size} to {part.shape[1]}, so W_q, W_k "
        "and W_v cannot be switched on one at a time; walk its recorded head instead (--layer, --head)."
    )
