"""`regard.watch`: entropy and largest score of every head while a model trains.

Every so many training steps one forward pass is overheard and reduced to two numbers a head: the mean entropy of
its rows, relative to the most it could be, and its largest score. Collapse of the entropy and explosion of the scores
are the two ways attention dies in training; both are warned of, once a layer. Imports `observe`'s neighbours.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .calls import AttentionCall, save_call
from .hooks import seams, tap
from .hooks.call_site import CallSite, calling_module
from .hooks.eager_attention import Trail

__all__ = ["AttentionWarning", "Watch", "qk_clip", "watch"]


class AttentionWarning(UserWarning):
    """Attention is about to die: its entropy collapsed or its scores exploded."""


def watch(
    model: nn.Module,
    *,
    every: int = 100,
    to: Callable[[dict[str, float], int], None] | None = None,
    collapse: float = 0.02,
    explode: float = 100.0,
) -> Watch:
    """Watch every head of a model while it trains; call `close()`, or use it as a block.

    with regard.watch(model, every=100) as watching:
        for batch in data:
            loss = model(batch) ...
            if watching.fresh:
                logger.log(watching.numbers())      # a plain dict: name/head → number
    watching.show().save("training.html")           # every head over the steps

    every     training passes (model.training and gradients on) between two looks; the first pass is looked at
    to        called with (numbers, step) after each look
    collapse  a head's entropy, as a share of the most it could be, below which a warning is given
    explode   a score above which a warning is given (QK-clip acts at 100)
    """
    return Watch(model, every, to, collapse, explode)


class Watch:
    """What `regard.watch` returns."""

    def __init__(self, model: nn.Module, every: int, to: Any, collapse: float, explode: float) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch(model): an nn.Module is watched; {type(model).__name__} came.")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"watch(every=...): a whole number of passes, at least 1; {every!r} came.")
        if isinstance(model, nn.TransformerEncoderLayer):
            raise ValueError(
                "watch(model): hooks make an nn.TransformerEncoderLayer leave its C++ path; watch a module around it."
            )
        seams.listen()
        self.every, self.to, self.collapse, self.explode = every, to, collapse, explode
        self.step = -1  # training passes so far, counted from 0
        self.fresh = False  # whether the last pass was looked at
        self.layers: dict[str, dict[str, Tensor]] = {}
        self.history: list[tuple[int, dict[str, float]]] = []  # (step, numbers) of every look so far
        self.refused: list[tuple[str, str]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._look: _Look | None = None
        self._warned: set[tuple[str, str]] = set()
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def numbers(self) -> dict[str, float]:
        """The last look as a plain dict for any logger: "layer/entropy/head" and "layer/max_score/head"."""
        return {
            f"{name}/{what}/{head}": value
            for name, found in self.layers.items()
            for what, values in found.items()
            for head, value in enumerate(values.tolist())
        }

    def show(self, **options: Any) -> Any:
        """The picture: entropy and largest score of every head over the steps; see `look.View`."""
        return import_module("regard.look").View(self.history, **options)

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, model: nn.Module, args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        self.step += 1
        self.fresh = False
        if self.step % self.every == 0:
            self._look = _Look(self._names)
            tap.enter(self._look)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        look = self._look
        if look is None or look.thread != threading.get_ident():
            return
        self._look = None
        tap.leave(look)
        self.layers, self.fresh, self.refused = look.layers, True, look.refused
        self._judge()
        self.history.append((self.step, self.numbers()))
        if self.to is not None:
            self.to(self.numbers(), self.step)

    def _judge(self) -> None:
        for name, found in self.layers.items():
            low = float(found["entropy"].min())
            high = float(found["max_score"].max()) if "max_score" in found else -math.inf
            if low < self.collapse:
                head = int(found["entropy"].argmin())
                self._warn(
                    name,
                    "entropy",
                    f"the entropy of head {head} of {name} is {low:.3f} of what it could be: it collapsed",
                )
            if high > self.explode:
                head = int(found["max_score"].argmax())
                advice = "regard.recorder.qk_clip bounds it"
                self._warn(
                    name,
                    "score",
                    f"the largest score of head {head} of {name} is {high:.1f}, above {self.explode:g}: {advice}",
                )

    def _warn(self, name: str, what: str, text: str) -> None:
        if (name, what) not in self._warned:
            self._warned.add((name, what))
            warnings.warn(f"step {self.step}: {text}.", AttentionWarning, stacklevel=2)


class _Look:
    """Listens during one pass and keeps two numbers a head."""

    wants_ids = values = False
    wants_scores = True

    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.thread = names, threading.get_ident()
        self.layers: dict[str, dict[str, Tensor]] = {}
        self.history: list[tuple[int, dict[str, float]]] = []  # (step, numbers) of every look so far
        self.refused: list[tuple[str, str]] = []
        self.trail = Trail()

    def place(self, frame: FrameType) -> CallSite | None:
        return calling_module(frame, self.names)

    def batch(self) -> int | None:
        return None

    def failed(self, frame: FrameType, why: str) -> None:
        at = self.place(frame)
        self.refuse(at.name if at else "", why)

    def captured(self, frame: FrameType) -> None:
        self.failed(frame, "captured by torch.compile")

    def refuse(self, name: str, why: str) -> None:
        if (name, why) not in self.refused:
            self.refused.append((name, why))

    def attention(self, at: CallSite, found: AttentionCall, inside: str | None = None) -> None:
        name = f"{at.name}.{inside}" if inside else at.name
        while name in self.layers:
            name += "'"
        self.layers[name] = _two_numbers(found)


def _two_numbers(found: AttentionCall) -> dict[str, Tensor]:
    """Entropy and largest score of every head; only the entropy where the scores are not to be had."""
    weights = save_call(found, False, None).weights()
    dense = found.w is not None
    seen = weights.see("entropy") if dense else weights.see("entropy", "max_score")
    visible = _visible(found).unsqueeze(-2)  # b|1 1 i
    most = visible.clamp(min=2).log()
    # A row with one key has no entropy to lose.
    share = torch.where(visible > 1, seen.entropy / most, 1.0).mean((0, 2))
    numbers = {"entropy": share.float().cpu()}
    if not dense:
        numbers["max_score"] = seen.max_score.amax((0, 2)).float().cpu()
    elif found.s is not None:
        numbers["max_score"] = found.s.amax((0, 2, 3)).float().cpu()
    return numbers


def _visible(found: AttentionCall) -> Tensor:
    """How many keys each row may see, (b|1, i)."""
    from ..core.masks import Geometry

    said = found.read_mask()
    *_, i, j = found.shape
    device = (found.q if found.q is not None else found.w).device  # type: ignore[union-attr]
    if found.w is not None:
        return (found.w > 0).sum(-1).amax(1).float()
    if said.mask is None:
        return torch.full((1, i), float(j), device=device)
    spans = said.mask.intervals(Geometry(i, j, j - i if said.align == "end" else 0, device))
    return (spans.hi - spans.lo).clamp(min=0).sum(1).float()


@torch.no_grad()
def qk_clip(query: nn.Linear, key: nn.Linear, max_score: Tensor, limit: float = 100.0) -> Tensor:
    """QK-clip: where a head's largest score exceeds the limit, shrink its rows of W_q and W_k so that it no longer can.

    max_score is one number a head, as `watch.layers[name]["max_score"]` has them. Returns the factor of every head.
    Both projections take the square root of limit / score; heads that share a key head share its factor.
    """
    heads = len(max_score)
    if query.out_features % heads:
        raise ValueError(
            f"{heads} scores came for a query projection of {query.out_features} rows: one score a head is needed."
        )
    size = query.out_features // heads
    groups = key.out_features // size
    if groups == 0 or heads % groups:
        raise ValueError(
            f"a key projection of {key.out_features} rows does not make heads of {size} for {heads} query heads."
        )
    factor = (limit / max_score.clamp(min=limit)).to(query.weight)
    shared = factor.unflatten(0, (groups, -1)).amin(1)  # a key head serves its worst query head
    for layer, root in ((query, shared.repeat_interleave(heads // groups).sqrt()), (key, shared.sqrt())):
        rows = root.repeat_interleave(size)
        layer.weight.mul_(rows.unsqueeze(1))
        if layer.bias is not None:
            layer.bias.mul_(rows)
    return factor
