"""The listener of one watched pass, which reduces every call to two numbers a head; see `watcher`."""

from __future__ import annotations

import dataclasses
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.pytree import tree_map
from ..core.weights import Weights
from .calls import AttentionCall, MaskCache, Overwritten, SavedCall, save_again, save_call, visible_counts
from .hooks import tap
from .hooks.call_site import CAPTURED, CallSite, calling_module
from .hooks.census import census_of
from .hooks.eager_attention import EagerTracker
from .hooks.layer_history import LayerHistory
from .hooks.model_hooks import batch_size
from .hooks.recurring_calls import form_of, is_shareable, recognised
from .slicing import real_rows, row_mean

__all__ = ["PassListener"]

#: Queries and keys of a pass that wait for their measures at most; a training step holds them for backward anyway.
WAITING_BYTES = 2**26


class PassListener:
    """The listener of one pass: reduces every call to two numbers a head."""

    wants_ids = wants_values = wants_grad = False
    wants_scores = True

    hears_products = True

    def __init__(
        self, names: dict[int, str], model: nn.Module, step: int, axes: tuple[int, int] | None, regime: Any
    ) -> None:
        self.names, self.step, self.axes = names, step, axes
        self.layers: dict[str, dict[str, Tensor]] = {}  # on the model's device
        self.masks: MaskCache = {}  # masks that were parsed
        self.rows: dict[tuple[int, torch.device], _RealRows] = {}  # by parsed mask: layers share it
        self.refused: list[tuple[str, str]] = []
        self.eager = EagerTracker(weakref.WeakMethod(self.refuse))
        self.history = LayerHistory(*census_of(model), [], weakref.WeakMethod(self._tracker))
        self.history.begin(regime)
        self._waiting: list[tuple[str, AttentionCall, SavedCall]] = []  # calls whose measures are still to be taken
        self._bytes = 0  # of their queries and keys

    def covers(self, model: nn.Module | None) -> bool:
        return False

    def call_site(self, frame: FrameType) -> CallSite | None:
        return calling_module(frame, self.names)

    def batch_size(self, rows: int, keys: int | None = None, count: int | None = None) -> int | None:
        return batch_size(self.axes, rows, keys, count)

    def retract(self, site: CallSite, reason: str) -> None:
        last = next((name for name in reversed(self.layers) if name.rstrip("'") == site.name), None)
        if last is not None:
            del self.layers[last]
            self.refuse(site.name, reason)

    def refuse_at(self, frame: FrameType, reason: str) -> None:
        if (site := self.call_site(frame)) is not None:
            self.refuse(site.name, reason)

    def read_number(self, number: Any) -> None:
        self.history.read(number)
        self._hear()

    def distrust(self) -> None:
        self.history.distrust()
        self._hear()

    def _tracker(self) -> EagerTracker:
        return self.eager

    def _hear(self) -> None:
        """Intercept as much as the layers that come ask for; see `layer_history`."""
        if self.history.hears != self.hears_products:
            self.hears_products = self.history.hears
            tap.hear_products()

    def compiling(self, frame: FrameType) -> None:
        self.refuse_at(frame, CAPTURED)

    def refuse(self, name: str, reason: str) -> None:
        if (name, reason) not in self.refused:
            self.refused.append((name, reason))

    def embedding(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        """Not reported: `wants_ids` is False."""

    def attention_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, frame: FrameType) -> bool:
        recurring = recognised(self.names, self.history.forms, args, kwargs, out, frame)
        if recurring is None:
            return False
        name, form, (q, k, v, mask, _) = recurring
        if mask is not None or form.unmasked is None:
            return False
        with tap.guarded(self, frame):
            call = AttentionCall(q, k, v, scale=form.scale, is_causal=form.is_causal)
            call.parse_mask(self.masks)
            self._add(name, call, save_again(q, k, None, form.unmasked))
        return True

    def attention(self, site: CallSite, call: AttentionCall, submodule: str | None = None) -> None:
        if site.hides_modules:
            self.refuse(site.name, CAPTURED)
            return
        call.parse_mask(self.masks)
        saved = save_call(call, False, None)
        if submodule is None and is_shareable(call) and (form := form_of(site, call, "self", saved)) is not None:
            self.history.forms[site.name] = form
        self._add(f"{site.name}.{submodule}" if submodule else site.name, call, saved)

    def _add(self, name: str, call: AttentionCall, saved: SavedCall) -> None:
        while name in self.layers:
            name += "'"
        self.layers[name] = {}
        if _stacks(call, saved):
            assert saved.q is not None
            assert saved.k is not None
            self._waiting.append((name, call, saved))
            self._bytes += saved.q.nbytes + saved.k.nbytes
            if self._bytes > WAITING_BYTES:
                self.measure()
        else:
            self.layers[name] = self._measures(call, saved, 1)[0]
        if not self.history.again(name):
            self.history.call(name)
            self._hear()

    def measure(self) -> None:
        """Take the measures of the calls that wait: one request for all layers of a shape, and a mask.

        On a GPU a request takes its host longer than a training step its kernels.
        """
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        groups: dict[Any, list[tuple[str, AttentionCall, SavedCall]]] = {}
        for name, call, saved in waiting:
            assert saved.q is not None
            assert saved.k is not None
            try:
                saved.check()
            except Overwritten as error:
                self.layers.pop(name, None)
                self.refuse(name, str(error))
                continue
            form = saved.q.shape, saved.k.shape, saved.q.dtype, saved.q.device, call.scale, call.softcap
            groups.setdefault((*form, id(call.parsed_mask), call.is_self), []).append((name, call, saved))
        for group in groups.values():
            _, call, saved = group[0]
            try:
                if len(group) > 1:
                    q, k = (torch.cat([getattr(one, part) for *_, one in group]) for part in ("q", "k"))
                    saved = dataclasses.replace(saved, q=q, k=k, versions=[])
                every = self._measures(call, saved, len(group))
            except Exception as error:  # never reaches the model
                for name, *_ in group:
                    self.layers.pop(name, None)
                    self.refuse(name, tap.failure(error))
                continue
            for (name, *_), measures in zip(group, every, strict=True):
                if name in self.layers:  # else it was retracted
                    self.layers[name] = measures

    def _measures(self, call: AttentionCall, saved: SavedCall, layers: int) -> list[dict[str, Tensor]]:
        """Entropy share and largest score of every head, (h,), without padding rows; no score where it is not known.

        Args:
            call: The call; of several layers the first.
            saved: Its factors, those of all layers behind each other along the batch.
            layers: The number of layers.
        """
        weights = saved.weights()
        dense = call.w is not None
        statistics = weights.see("entropy") if dense else weights.see("entropy", "max_score")
        rows = self._rows(call, weights)
        entropy = statistics.entropy.unflatten(0, (layers, -1))  # n b h i
        shares = torch.where(rows.choose, entropy / rows.largest, 1.0)
        real = rows.real if call.is_self is not False else None
        measures = [{"entropy_share": share.float()} for share in _means(shares, real)]
        if not dense:
            largest = statistics.max_score.unflatten(0, (layers, -1)).amax((1, 3)).float()
        elif call.s is not None:
            largest = call.s.amax((0, 2, 3)).float()[None]
        else:
            return measures
        return [{**one, "max_score": most} for one, most in zip(measures, largest, strict=True)]

    def _rows(self, call: AttentionCall, weights: Weights) -> _RealRows:
        """The rows of a call; computed once for all layers that share a mask."""
        key = id(call.parsed_mask), weights.device
        rows = None if call.w is not None else self.rows.get(key)
        if rows is None:
            visible = visible_counts(call).unsqueeze(-2)  # b|1 1 i
            real = real_rows(weights, "self")
            real = None if real is None else real[: call.shape[0]]  # the layers that are measured at once share them
            rows = _RealRows(visible > 1, visible.clamp(min=2).log(), real, call.parsed_mask)
            if call.w is None:  # else the weights say which keys are visible
                self.rows[key] = rows
        return rows

    def numbers_on_host(self) -> dict[str, dict[str, Tensor]]:
        """`layers`, by one copy for each device: every copy waits until a GPU has done all it was told."""
        with tap.suspended(), torch.no_grad():
            self.measure()
        on_device = [x for measures in self.layers.values() for x in measures.values()]
        copied: dict[int, Tensor] = {}
        with tap.suspended():
            for device in dict.fromkeys(x.device for x in on_device):
                here = [x for x in on_device if x.device == device]
                parts = torch.cat(here).cpu().split([len(x) for x in here])
                copied |= {id(x): part for x, part in zip(here, parts, strict=True)}
        return {
            name: {measure: copied[id(x)] for measure, x in measures.items()} for name, measures in self.layers.items()
        }


class _RealRows(NamedTuple):
    """The rows of an attention matrix, by its mask."""

    choose: Tensor  # b|1 1 i : whether they see several keys; with one the entropy is 0 by necessity, and counts as 1
    largest: Tensor  # b|1 1 i : the largest entropy that they can have
    real: Tensor | None  # b i : whether they are no padding
    mask: Any  # the parsed mask itself, whose id would else be used again


def _stacks(call: AttentionCall, saved: SavedCall) -> bool:
    """Whether a call can be measured together with those of other layers: its score and its mask have no tensors."""
    parsed = call.parse_mask()
    if call.w is not None or call.full_score is not None or call.sink is not None or parsed.bias is not None:
        return False
    tensors: list[Tensor] = []
    tree_map(saved.mask, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    return not tensors and parsed.uniform_rows is None


def _means(shares: Tensor, real: Tensor | None) -> list[Tensor]:
    """The mean over sequences and real rows of each layer's heads, n times (h,)."""
    if real is None:
        return list(shares.mean((1, 3)))
    return [row_mean(share, real) for share in shares]
