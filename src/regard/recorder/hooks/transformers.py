"""transformers: its flash and flex attention overheard, and an attention of our own for it.

Its sdpa and eager attention are heard by `seams` like everybody's. Flash and flex run kernels outside PyTorch's
operators, so there its own interface is the seam: while somebody records, the entries of its table are functions
that call the old ones and, in a thread that records, look at what went in.
`register()` adds `attn_implementation="regard"`: attention whose statistics are part of the graph, to train on.
Imports `tap`, `seams`, `capture` and the door; transformers only inside functions.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.api import weights
from ...core.weights import Statistics, Weights
from ..calls import AttentionCall
from ..mask_recognition import parse_mask
from . import tap
from .seams import flash_like

__all__ = ["leave", "listen", "register", "statistics"]

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


_lock = threading.Lock()
_replaced: dict[str, Callable[..., Any]] = {}
_users = 0


def listen() -> None:
    """Overhear flash and flex attention of transformers. In a thread that does not record this changes nothing."""
    global _users
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface._global_mapping
    with _lock:
        _users += 1
        for name in (*_FLASH, "flex_attention"):
            if name in table and name not in _replaced:
                _replaced[name] = table[name]
                table[name] = _overheard(table[name], _flex_call if name == "flex_attention" else _flash_call)


def leave() -> None:
    """When nobody records any more, in any thread, the table is as it was."""
    global _users
    from transformers.modeling_utils import AttentionInterface

    with _lock:
        _users -= 1
        if _users == 0:
            AttentionInterface._global_mapping.update(_replaced)
            _replaced.clear()


def _overheard(own: Callable[..., Any], read: Callable[..., AttentionCall]) -> Callable[..., Any]:
    @functools.wraps(own)
    def heard(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **more: Any
    ) -> Any:
        listeners = tap.listeners()
        if not listeners:
            return own(module, query, key, value, attention_mask, **more)
        with tap.quiet():
            out = own(module, query, key, value, attention_mask, **more)
        if torch._C._current_graph_task_id() == -1 and not torch.compiler.is_compiling():
            frame = sys._getframe(0)
            for listener in listeners:
                if (at := listener.place(frame)) is not None:
                    with tap.beside(listener, frame):
                        listener.attention(at, read(module, query, key, value, attention_mask, **more))
        return out

    return heard


def _flash_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Any,
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
    found = flash_like(
        q, k, v, scaling, causal, (before, -1 if before < 0 else 0 if causal else before), softcap or 0.0
    )
    if given is not None:
        if given.ndim != 2:
            raise NotImplementedError(f"a mask with {given.ndim} axes")
        cells = given.bool()[:, None, None, :]
        side = parse_mask(cells.expand(-1, 1, q.shape[2], -1), False, found.shape)
        assert found.said is not None
        found.said.mask = (
            side.mask if found.said.mask is None else found.said.mask & side.mask if side.mask else found.said.mask
        )
    found.sink = s_aux
    return found


def _flex_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> AttentionCall:
    found = AttentionCall(q, k, v, scale=scaling, softcap=softcap, sink=s_aux)
    if isinstance(given, Tensor):
        found.given = given[..., : k.shape[2]]
    elif given is not None:
        found.given = _cells_of(given, q.shape[2], k.shape[2], q.device)
    if position_bias is not None:
        if softcap is not None:
            raise NotImplementedError("a position bias after a soft cap")
        visible = found.given
        added = position_bias.expand(q.shape[0], -1, -1, -1)
        if visible is not None:
            added = added.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else added + visible
        found.given = added
    return found


def _cells_of(block_mask: Any, i: int, j: int, device: torch.device) -> Tensor:
    """A BlockMask asked for every cell."""
    from torch.nn.attention.flex_attention import create_mask

    b, h = block_mask.kv_num_blocks.shape[:2]
    return create_mask(block_mask.mask_mod, b, h, i, j, device=str(device))


# attn_implementation="regard".


class _Asked(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[tuple[str, ...], dict[str, Statistics]]] = []


_asked = _Asked()


def register() -> None:
    """Make `attn_implementation="regard"` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("regard", attention)
    AttentionMaskInterface.register("regard", sdpa_mask)


@contextmanager
def statistics(*names: str) -> Iterator[dict[str, Statistics]]:
    """What the layers of a model with `attn_implementation="regard"` find inside the block, as part of the graph.

    with statistics("entropy") as found:
        loss = model(**batch).loss
    loss = loss - 0.01 * sum(seen.entropy.mean() for seen in found.values())
    """
    found: dict[str, Statistics] = {}
    _asked.stack.append((names, found))
    try:
        yield found
    finally:
        _asked.stack.pop()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' interface for attention, answered by `regard.weights`."""
    if dropout:
        raise ValueError(
            f"regard computes attention without dropout; dropout={dropout} came. Set attention_dropout=0 in the config."
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    found = AttentionCall(query, key, value, scale=scaling, given=attention_mask, softcap=softcap, sink=s_aux)
    found.causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    with torch.no_grad():
        said = found.read_mask()
    if position_bias is not None:
        said.bias = position_bias
    w: Weights = weights(query, key, score=found.score(), mask=said.mask, align=said.align)
    names = _asked.stack[-1][0] if _asked.stack else ()
    seen = w.see(*names, values=value)
    if _asked.stack:
        found_so_far = _asked.stack[-1][1]
        found_so_far[f"{len(found_so_far)}"] = seen  # layers by the order they are called in
    return seen.y.transpose(1, 2).contiguous(), None
