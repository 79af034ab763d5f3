"""The layers of `regard.nn`, overheard where they attend: the score and the mask are known as they stand.

Most of what these layers compute never passes an operator of PyTorch, so the seam is the one method in which all of
them attend. It is wrapped when somebody first listens; in a thread that does not record, and inside torch.compile,
the wrapper only calls it. Imports `tap`, `capture` and, when they are in use, the layers.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from ...core.pytree import tree_map
from ..calls import AttentionCall
from ..mask_recognition import ParsedMask
from . import tap

__all__ = ["listen"]


def listen() -> None:
    """Begin to overhear the layers of `regard.nn`, if anybody imported them."""
    room: Any = sys.modules.get("regard.nn.attention")
    own = None if room is None else room._Attention._attended
    if own is not None and not hasattr(own, "__wrapped__"):
        room._Attention._attended = _overheard(own)


def _overheard(own: Any) -> Any:
    @functools.wraps(own)
    def heard(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, align: Any, probe: Any) -> Tensor:
        if torch.compiler.is_compiling() or not tap.listeners() or tap.is_quiet():
            return own(layer, q, k, v, mask, align, probe)
        with tap.quiet():
            y = own(layer, q, k, v, mask, align, probe)
        if torch._C._current_graph_task_id() == -1:  # not a checkpoint that computes again
            frame = sys._getframe(0)
            for listener in tap.listeners():
                with tap.beside(listener, frame):
                    _tell(listener, layer, q, k, v, mask, align, frame)
        return y

    return heard


def _tell(listener: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, align: Any, frame: Any) -> None:
    if (at := listener.place(frame)) is None:
        return
    if q.ndim > 4:
        listener.refuse(at.name, f"it has {q.ndim - 3} batch axes; one is read. Fold them before the layer")
        return
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:  # regard.attend casts first, as SDPA does
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    q, k, v = (x if x.ndim == 4 else x.unsqueeze(0) for x in (q, k, v))
    # An optimizer changes parameters in place: the recording keeps those of this call.
    score = tree_map(layer.score(), lambda t: t.detach().clone())
    said = ParsedMask(mask, None, align if mask is not None and mask.positional else None)
    listener.attention(at, AttentionCall(q, k, v, scored=score, said=said, same=hasattr(layer, "causal")))
