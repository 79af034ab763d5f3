"""transformers: interception of its flash and flex attention, and of `attn_implementation="regard"`.

Its sdpa and eager attention are intercepted as in any other model. Flash and flex run kernels that are no operators of
PyTorch, so there the interface of transformers is the seam: while a recording is open, the entries of its table of
attention functions are wrappers that call the original and, in a thread that records, report its arguments. An
attention function of regard (`integrations/transformers`) gives the call itself, with what its pass computed.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.torch_state import in_backward
from ..calls import AttentionCall
from ..mask_recognition import parse_mask
from . import tap
from .seams import flash_like

__all__ = ["install", "uninstall"]

_WRAPPED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "regard")


_lock = threading.Lock()
_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # weak: a recording that Ctrl-C ended leaves with its object


def install(owner: Any) -> None:
    """Wrap attention functions of transformers, if it is imported. Nothing changes in a thread without a listener.

    Args:
        owner: An object of the recording or watch, for `uninstall`.
    """
    if (table := _table()) is None:
        return
    with _lock:
        _owners.add(owner)
        for name in _WRAPPED:
            if name in table and not hasattr(table[name], "regard_original"):
                read = _flex_call if name == "flex_attention" else _flash_call
                table.register(name, _intercepted(table[name], read))


def uninstall(owner: Any) -> None:
    """Undo `install`; the table is as it was when the last recording or watch of any thread has ended."""
    if (table := _table()) is None:
        return
    with _lock:
        _owners.discard(owner)
        if not _owners:
            for name in _WRAPPED:
                if (own := getattr(table.get(name), "regard_original", None)) is not None:
                    table.register(name, own)


def _table() -> Any:
    """The attention functions of transformers by name, those of no model of its own; None if it is not imported."""
    module = sys.modules.get("transformers.modeling_utils")
    return None if module is None else module.AttentionInterface()


def _intercepted(own: Callable[..., Any], read: Callable[..., AttentionCall]) -> Callable[..., Any]:
    with_call = getattr(own, "with_call", None)

    @functools.wraps(own)
    def attention_function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **more: Any
    ) -> Any:
        listeners = tap.listeners()
        if not listeners:
            return own(module, query, key, value, attention_mask, **more)
        with tap.suspended():
            if with_call is not None:
                out, call = with_call(module, query, key, value, attention_mask, **more)
            else:
                out, call = own(module, query, key, value, attention_mask, **more), None
        if not torch.compiler.is_compiling() and not in_backward():
            frame = sys._getframe(0)
            for listener in listeners:
                if (site := listener.call_site(frame)) is not None:
                    with tap.guarded(listener, frame):
                        listener.attention(site, call or read(module, query, key, value, attention_mask, **more))
        return out

    attention_function.regard_original = own  # type: ignore[attr-defined]
    return attention_function


def _flash_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> AttentionCall:
    if any(more.get(name) is not None for name in ("cu_seq_lens_q", "cu_seqlens_q", "block_table", "cache")):
        raise NotImplementedError("packed or paged sequences")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal) and q.shape[2] > 1
    before = -1 if sliding_window is None or k.shape[2] <= sliding_window else sliding_window - 1
    call = flash_like(q, k, v, scaling, causal, (before, -1 if before < 0 else 0 if causal else before), softcap or 0.0)
    if mask is not None:
        if mask.ndim != 2:
            raise NotImplementedError(f"a mask with {mask.ndim} axes")
        cells = mask.bool()[:, None, None, :]
        side = parse_mask(cells.expand(-1, 1, q.shape[2], -1), False, call.shape)
        assert call.parsed_mask is not None
        parsed = call.parsed_mask
        if side.mask is not None:
            parsed.mask = side.mask if parsed.mask is None else parsed.mask & side.mask
    call.sink = s_aux
    return call


def _flex_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> AttentionCall:
    call = AttentionCall(q, k, v, scale=scaling, softcap=softcap, sink=s_aux)
    if isinstance(mask, Tensor):
        call.mask = mask[..., : k.shape[2]]
    elif mask is not None:
        call.mask = _cells_of(mask, q.shape[2], k.shape[2], q.device)
    if position_bias is not None:
        if softcap is not None:
            raise NotImplementedError("a position bias after a soft cap")
        visible = call.mask
        added = position_bias.expand(q.shape[0], -1, -1, -1)
        if visible is not None:
            added = added.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else added + visible
        call.mask = added
    return call


def _cells_of(block_mask: Any, i: int, j: int, device: torch.device) -> Tensor:
    """A BlockMask as a dense bool mask."""
    from torch.nn.attention.flex_attention import create_mask

    b, h = block_mask.kv_num_blocks.shape[:2]
    return create_mask(block_mask.mask_mod, b, h, i, j, device=str(device))
