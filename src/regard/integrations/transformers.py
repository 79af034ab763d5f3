"""`attn_implementation="regard"` for transformers models: `register` adds it, `statistics` collects its results."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _lazy
from ..core.api import weights
from ..core.dropout import attend_with_dropout
from ..core.masks.kinds import Dense
from ..core.torch_state import host_sync_forbidden, in_backward
from ..core.types import StatisticName
from ..core.weights import Statistics
from ..recorder.calls import AttentionCall
from ..recorder.hooks.call_site import runs_code_of
from ..recorder.mask_recognition import ParsedMask
from ..recorder.observer import RefusedWarning

__all__ = ["register", "statistics"]


class _OpenBlocks(threading.local):
    """The `statistics` blocks that are open in this thread: requested names, and results by layer."""

    def __init__(self) -> None:
        self.stack: list[tuple[tuple[StatisticName, ...], dict[str, Statistics]]] = []


_blocks = _OpenBlocks()

#: Statistics that the last forward pass of a layer computed.
_requested: weakref.WeakKeyDictionary[nn.Module, tuple[StatisticName, ...]] = weakref.WeakKeyDictionary()

#: Masks that are in use, which layers share: mask → (its version, what else the result depends on, the result).
_parsed_masks = WeakTensorKeyDictionary()


def register() -> None:
    """Add `attn_implementation="regard"` to transformers.

    The model then computes attention by `regard.weights`, whose statistics are part of the autograd graph; collect
    them with `statistics`. Attention dropout is computed by PyTorch's fused attention on a GPU where score and mask
    allow, else block by block; statistics are those before it. A model that transformers gives no choice of attention
    keeps its own, or raises `KeyError: 'regard'`; `regard.record` sees it as it is.

    Example:
        >>> from regard.integrations import transformers
        >>> transformers.register()  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="regard")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    torch.compiler.assume_constant_result(_takes_sdpa_masks)  # else a compiled graph would read the module's names
    AttentionInterface.register("regard", attention)
    AttentionMaskInterface.register("regard", _mask)


@contextmanager
def statistics(*names: StatisticName) -> Iterator[dict[str, Statistics]]:
    """Collect statistics of every layer of a model with `attn_implementation="regard"`, as part of the graph.

    A block in which no layer called regard warns. Layers that a checkpoint computes again count once.

    Args:
        *names: Row statistics as in `Weights.see`: "entropy", "max_score", "lse", ...

    Returns:
        A context manager whose value is a dict: the number of the layer, in the order of calls, as a string, to
        `Statistics` with one attribute a name, each ``(b, h, i)``, and the output ``y``.

    Example:
        >>> from regard.integrations.transformers import statistics
        >>> with statistics("entropy") as by_layer:  # doctest: +SKIP
        ...     loss = model(**batch).loss
        >>> loss = loss - 0.01 * sum(s.entropy.mean() for s in by_layer.values())  # doctest: +SKIP
    """
    by_layer: dict[str, Statistics] = {}
    _blocks.stack.append((names, by_layer))
    try:
        yield by_layer
    finally:
        _blocks.stack.pop()
    if not by_layer:
        text = (
            "no layer computed its attention by regard in this block. Load the model with "
            'attn_implementation="regard" after register(), and run it here, in this thread. A model that computes '
            "attention by itself, whatever that is set to, is seen by regard.record(model, grad=True)."
        )
        warnings.warn(text, RefusedWarning, stacklevel=3)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface, computed by `regard.weights`."""
    return _attended(module, query, key, value, attention_mask, dropout, **more)[0]


def _attended(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[tuple[Tensor, None], AttentionCall]:
    """The same, with the call as a recording reads it: the matrix holds what its pass computed."""
    call = _call(module, query, key, value, attention_mask, **more)
    parsed, score = call.parse_mask(), call.score()
    if parsed.uniform_rows is not None:
        query = query.masked_fill(parsed.uniform_rows, 0)
    w = weights(query, key, score=score, mask=parsed.mask, align=parsed.align)
    names, by_layer = _open_block(module)
    if dropout:
        results = w.see(*dict.fromkeys((*names, "lse")))
        y = attend_with_dropout(query, key, value, score, parsed.mask, parsed.align, results.lse, dropout)
        results = Statistics(**{**vars(results), "y": y})
    else:
        results = w.see(*names, values=value)
    if by_layer is not None:
        by_layer[f"{len(by_layer)}"] = results  # layers in the order they are called
    call.matrix = w
    return (results.y.transpose(1, 2).contiguous(), None), call


attention.with_call = _attended  # type: ignore[attr-defined]  # for the recorder, see its hooks


def _open_block(module: nn.Module) -> tuple[tuple[StatisticName, ...], dict[str, Statistics] | None]:
    """The statistics to compute, and where they go: nowhere if a checkpoint computes a layer again."""
    if torch.compiler.is_compiling():
        return _blocks.stack[-1] if _blocks.stack else ((), None)
    if in_backward():  # maybe outside of the block, and yet it must save the same tensors
        return _requested.get(module, ()), None
    names, by_layer = _blocks.stack[-1] if _blocks.stack else ((), None)
    _requested[module] = names
    if (
        by_layer is not None
        and not torch.is_grad_enabled()
        and runs_code_of([sys._getframe()], "torch.utils.checkpoint")
    ):
        raise RuntimeError(
            "statistics need a graph, which a reentrant activation checkpoint does not build; use "
            'model.gradient_checkpointing_enable({"use_reentrant": False}), or run the model without checkpoints.'
        )
    return names, by_layer


def _call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> AttentionCall:
    """The call in the recorder's terms, its mask parsed: once for all layers that pass the same tensor."""
    call = AttentionCall(q, k, v, scale=scaling, mask=mask, softcap=softcap, sink=s_aux)
    if mask is None and q.shape[2] > 1:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
        if causal is None:
            encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
            causal = _takes_sdpa_masks(type(module).__module__, encoder_decoder)
        call.is_causal = bool(causal)
    if mask is not None and _is_read_as_it_is(mask):
        call.parsed_mask = ParsedMask(Dense(mask)) if mask.dtype == torch.bool else ParsedMask(bias=mask)
    elif mask is not None and not mask.is_inference():
        form = mask._version, call.shape
        previous, call.parsed_mask = _parsed_masks.get(mask, (None, None))
        if previous != form:
            with torch.no_grad():
                call.parsed_mask = None
                _parsed_masks[mask] = form, call.parse_mask()
    parsed = call.parse_mask()
    if position_bias is not None:
        bias = position_bias if parsed.bias is None else parsed.bias + position_bias
        call.parsed_mask = ParsedMask(parsed.mask, bias, parsed.align, parsed.uniform_rows)
    return call


def _is_read_as_it_is(mask: Tensor) -> bool:
    """Whether a mask is used without parsing its cells: in graphs, and where a bias in it has a gradient."""
    return mask.requires_grad or torch.compiler.is_compiling() or host_sync_forbidden(mask.device)


def _mask(*shape: Any, config: Any = None, **more: Any) -> Tensor | None:
    """A model's mask: SDPA's, or eager attention's for models that do not know the conventions of SDPA."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    modeling = type(config).__module__.replace(".configuration_", ".modeling_")
    takes_sdpa_masks = _takes_sdpa_masks(modeling, getattr(config, "is_encoder_decoder", False))
    return (sdpa_mask if takes_sdpa_masks else eager_mask)(*shape, config=config, **more)


def _takes_sdpa_masks(modeling: str, encoder_decoder: bool) -> bool:
    """Whether models of a module of transformers are written for bool masks, and for none where all is causal.

    Others add the mask to their scores, or let a missing mask hide nothing. Models for flash and flex attention, which
    take no such sums either, say in their layers what is causal, if all of them are.
    """
    from transformers import PreTrainedModel

    names = vars(sys.modules.get(modeling, torch))
    models = [x for x in names.values() if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    own = [model for model in models if model.__module__ == modeling]
    fused = not encoder_decoder and any(_says(model, "flash_attn") or _says(model, "flex_attn") for model in own)
    return not own or fused or any(_says(model, "sdpa") for model in own)


def _says(model: type, implementation: str) -> bool:
    """Whether a class of transformers says that it supports an implementation of attention."""
    return bool(getattr(model, f"_supports_{implementation}", True))


_lazy.publish(__name__)
