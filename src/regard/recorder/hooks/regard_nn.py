"""Interception of the layers of `regard.nn`, with the score and the mask they attend by.

Most of what these layers compute is no operator of PyTorch, so the one method in which all of them attend is wrapped
when a recording starts. In a thread that does not record, and inside torch.compile, the wrapper only calls it.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor

from ...core.api import weights
from ...core.pytree import tree_map
from ...core.scores.kinds import Score
from ...core.torch_state import in_backward
from ..calls import AttentionCall
from ..mask_recognition import ParsedMask
from . import tap

__all__ = ["install"]


def install() -> None:
    """Wrap the layers of `regard.nn`, if they are imported."""
    module: Any = sys.modules.get("regard.nn.attention")
    own = None if module is None else module._Attention._attended
    if own is not None and not hasattr(own, "__wrapped__"):
        module._Attention._attended = _intercepted(own)


def _intercepted(own: Any) -> Any:
    @functools.wraps(own)
    def attended(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, align: Any, probe: Any) -> Tensor:
        if torch.compiler.is_compiling() or not tap.listeners() or tap.is_suspended():
            return own(layer, q, k, v, mask, align, probe)
        with tap.suspended():
            y = own(layer, q, k, v, mask, align, probe)
        if not in_backward():  # not a checkpoint that recomputes
            frame = sys._getframe(0)
            for listener in tap.listeners():
                with tap.guarded(listener, frame):
                    _report(listener, layer, q, k, v, mask, align, frame)
        return y

    return attended


def _report(
    listener: tap.Listener, layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, align: Any, frame: FrameType
) -> None:
    if (site := listener.call_site(frame)) is None:
        return
    if q.ndim > 4:
        listener.refuse(site.name, f"it has {q.ndim - 3} batch axes; one is read. Flatten them before the layer")
        return
    if _has_split_sequence(q):
        listener.refuse(
            site.name, "its sequence is split over ranks, and each would record its own rows and keys alone"
        )
        return
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:  # regard.attend casts first, as SDPA does
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    q, k, v = (x if x.ndim == 4 else x.unsqueeze(0) for x in (q, k, v))
    # Copied: an optimizer changes parameters in place. The copy is part of the graph where gradients are on.
    score = tree_map(layer.score(), lambda t: t.clone())
    if hasattr(q, "placements"):  # DTensors: the sequences and heads of this rank
        q, k, v = (cast(Any, x).to_local() for x in (q, k, v))
        if not _fits(q, k, score, mask, align):
            listener.refuse(
                site.name,
                "its score or mask has tensors for sequences and heads of which this rank has a part; record the layer "
                "on plain tensors",
            )
            return
    parsed = ParsedMask(mask, None, align if mask is not None and mask.positional else None)
    call = AttentionCall(q, k, v, full_score=score, parsed_mask=parsed, is_self=hasattr(layer, "causal"))
    listener.attention(site, call)


def _fits(q: Tensor, k: Tensor, score: Score, mask: Any, align: Any) -> bool:
    """Whether a score and a mask are of as many sequences and heads as queries and keys have."""
    try:
        weights(q, k, score=score, mask=mask, align=align)
    except ValueError:
        return False
    return True


def _has_split_sequence(q: Tensor) -> bool:
    """Whether q is a DTensor whose length is sharded. Its module is not imported for that."""
    dims = [getattr(placement, "dim", None) for placement in getattr(q, "placements", ())]
    return any(dim is not None and dim % q.ndim == q.ndim - 2 for dim in dims)
