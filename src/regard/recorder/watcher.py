"""`regard.watch`: entropy and largest score of every head while a model trains.

Every so many training steps one forward pass is intercepted and reduced to two numbers a head: the mean entropy of its
rows as a share of the largest possible, and its largest score. Entropy collapse and exploding scores are the two ways
attention fails in training; both are warned of, once a layer.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from importlib import import_module
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..core.pytree import tree_map
from ..core.torch_state import in_backward
from ..core.weights import Weights
from .calls import AttentionCall, MaskCache, Overwritten, SavedCall, save_call, visible_counts
from .first_rank import is_first_rank
from .hooks import seams, tap, transformers
from .hooks.call_site import CAPTURED, CallSite, calling_module, original_module
from .hooks.census import census_of
from .hooks.eager_attention import EagerTracker
from .hooks.heard_layers import HeardLayers, regime_of
from .hooks.model_hooks import Hook, batch_size, first_axes, is_compiled, remove_all
from .observer import RefusedWarning
from .slicing import real_rows, row_mean

if TYPE_CHECKING:
    from ..look.options import ViewChoices
    from ..look.view import View

__all__ = ["AttentionWarning", "Watch", "watch"]


#: Queries and keys of a pass that wait for their measures at most; a training step holds them for backward anyway.
WAITING_BYTES = 2**26


class AttentionWarning(UserWarning):
    """The entropy of a head collapsed, or its scores exploded.

    Example:
        >>> issubclass(AttentionWarning, UserWarning)
        True
    """


def watch(
    model: nn.Module,
    *,
    every: int = 100,
    callback: Callable[[dict[str, float], int], None] | None = None,
    collapse: float = 0.02,
    explode: float = 100.0,
) -> Watch:
    """Watch every head of a model while it trains; call `close()`, or use it as a block.

    Args:
        model: The model. Compiled code cannot be watched: it is named in a `RefusedWarning`.
        every: Training passes (model.training and gradients on) between two looks; the first pass is looked at.
        callback: Called with (numbers, step) after each look; of a model under DistributedDataParallel or FSDP2 on its
            first rank alone, with the numbers of that rank's batch.
        collapse: Entropy share of a head below which an `AttentionWarning` is given.
        explode: Score above which an `AttentionWarning` is given (QK-clip acts at 100).

    Returns:
        A `Watch`, which is also a context manager.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        >>> with watch(model, every=1) as watching:
        ...     model(torch.randn(1, 4, 8)).sum().backward()
        >>> sorted(watching.numbers())[0]
        'layers.0.self_attn/entropy_share/0'
    """
    return Watch(model, every, callback, collapse, explode)


class Watch:
    """Numbers of every head of a model, renewed every so many training passes.

    Attributes:
        step: Training passes so far, counted from 0; -1 before the first.
        fresh: Whether the last training pass was looked at.
        layers: The last look: module name → {"entropy_share": ``(h,)``, "max_score": ``(h,)``}.
        history: (step, numbers) of every look so far.
        refused: Pairs (module, reason) of attention that could not be read in the last look.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        >>> watching = watch(model, every=1)
        >>> _ = model(torch.randn(1, 4, 8))
        >>> watching.step, watching.layers["layers.0.self_attn"]["max_score"].shape
        (0, torch.Size([2]))
        >>> watching.close()
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        callback: Callable[[dict[str, float], int], None] | None,
        collapse: float,
        explode: float,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch(model) needs an nn.Module; got {type(model).__name__}.")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"watch(every=...) needs a number of passes, at least 1; got {every!r}.")
        if callback is not None and not callable(callback):
            raise TypeError(f"watch(callback=...) is called with (numbers, step); got {type(callback).__name__}.")
        for name, limit in (("collapse", collapse), ("explode", explode)):
            if isinstance(limit, bool) or not isinstance(limit, int | float):
                raise TypeError(f"watch({name}=...) is a number; got {limit!r}.")
        if isinstance(model, nn.TransformerEncoderLayer):
            raise ValueError(
                "watch(model): hooks make an nn.TransformerEncoderLayer leave its C++ path; watch a module around it."
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError("watch(model): TorchScript modules take no hooks; watch the module it was made from.")
        seams.install()
        transformers.install(self)
        self.every, self.callback, self.collapse, self.explode = every, callback, collapse, explode
        self.step = -1
        self.fresh = False
        self.layers: dict[str, dict[str, Tensor]] = {}
        self.history: list[tuple[int, dict[str, float]]] = []
        self.refused: list[tuple[str, str]] = []
        self._looks: dict[int, _PassListener] = {}  # by the id of the thread that the model runs in
        self._lock = threading.RLock()
        self._warned: set[tuple[str, str]] = set()
        self._reports = is_first_rank(model)  # the other ranks of a wrapped model neither call back nor warn
        # The modules of a compiled model are those of the original, under their own names.
        modules = dict(original_module(model).named_modules())
        self._names = {id(module): name for name, module in modules.items()}
        for name, module in modules.items():
            if is_compiled(module):
                self._refuse(name, CAPTURED)
        self._handles = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._end), always_call=True),
        ]
        weakref.finalize(self, remove_all, self._handles)

    def numbers(self) -> dict[str, float]:
        """The last look as a plain dict, for any logger.

        Returns:
            Names such as `"layers.0.self_attn/entropy_share/1"` (module, measure, head) to numbers.

        Example:
            >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            >>> model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            >>> with watch(model, every=1) as watching:
            ...     _ = model(torch.randn(1, 4, 8))
            >>> sorted(watching.numbers())[-1]
            'layers.0.self_attn/max_score/1'
        """
        return {
            f"{name}/{measure}/{head}": value
            for name, measures in self.layers.items()
            for measure, values in measures.items()
            for head, value in enumerate(values.tolist())
        }

    def show(self, **options: Unpack[ViewChoices]) -> View:
        """The picture: entropy share and largest score of every head over the steps.

        Args:
            **options: Of `look.View`.

        Returns:
            A `look.View`; .save("x.html") and .save("x.svg") write it.

        Example:
            >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            >>> model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            >>> with watch(model, every=1) as watching:
            ...     _ = model(torch.randn(1, 4, 8)), model(torch.randn(1, 4, 8))
            >>> "entropy" in str(watching.show())
            True
        """
        return import_module("regard.look").View(self.history, **options)

    def close(self) -> None:
        """Stop watching: the hooks are removed. A second call does nothing.

        Example:
            >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
            >>> watching = watch(model)
            >>> watching.close()
        """
        remove_all(self._handles)
        transformers.uninstall(self)

    def __repr__(self) -> str:
        looked = f"{len(self.history)} looks, {len(self.layers)} layers in the last" if self.history else "no look yet"
        return f"Watch(every={self.every}, step {self.step}: {looked})"

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self.step < 0:
            self._refuse(
                "",
                "no training pass was seen: it was not called in training mode with gradients, or it was " + CAPTURED,
            )

    def __del__(self) -> None:
        if getattr(self, "_handles", None) and self.step < 0:
            text = "regard.watch(model) watched nothing: its object is gone. Keep it, `watching = regard.watch(model)`."
            warnings.warn(text, RefusedWarning, stacklevel=2)

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or in_backward():
            return
        with self._lock:
            self.step += 1
            self.fresh = False
            if self.step % self.every == 0:
                regime = "watch", regime_of(model, args, kwargs)
                model = original_module(model)
                look = _PassListener(self._names, model, self.step, first_axes(args, kwargs), regime)
                self._looks[threading.get_ident()] = look
                tap.activate(look)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        look = self._looks.pop(threading.get_ident(), None)
        if look is None:
            return
        tap.deactivate(look)
        look.heard.end(output is not None)
        with self._lock:
            self.layers, self.fresh, self.refused = look.numbers_on_host(), True, look.refused
            if not look.layers and is_compiled(model):
                look.refuse("", CAPTURED)
            for name, reason in look.refused:
                self._refuse(name, reason)
            self._judge(look.step)
            self.history.append((look.step, self.numbers()))
            self.history.sort(key=lambda one: one[0])  # two threads may end in another order than they began
            if self.callback is not None and self._reports:
                self.callback(self.numbers(), look.step)

    def _judge(self, step: int) -> None:
        for name, measures in self.layers.items():
            low = float(measures["entropy_share"].min())
            high = float(measures["max_score"].max()) if "max_score" in measures else -math.inf
            if low < self.collapse:
                head = int(measures["entropy_share"].argmin())
                self._warn(
                    step,
                    name,
                    "entropy_share",
                    f"the entropy of head {head} of {name} is {low:.3f} of the largest possible: it collapsed",
                )
            if high > self.explode:
                head = int(measures["max_score"].argmax())
                advice = "regard.losses.qk_clip bounds it"
                self._warn(
                    step,
                    name,
                    "max_score",
                    f"the largest score of head {head} of {name} is {high:.1f}, above {self.explode:g}: {advice}",
                )

    def _warn(self, step: int, name: str, measure: str, text: str) -> None:
        if self._reports and (name, measure) not in self._warned:
            self._warned.add((name, measure))
            warnings.warn(f"step {step}: {text}.", AttentionWarning, stacklevel=2)

    def _refuse(self, name: str, reason: str) -> None:
        if (name, reason) not in self.refused:
            self.refused.append((name, reason))
        if self._reports and (name, reason) not in self._warned:
            self._warned.add((name, reason))
            warnings.warn(f"not watched: {name or '(the model)'}: {reason}.", RefusedWarning, stacklevel=4)


class _PassListener:
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
        self.heard = HeardLayers(*census_of(model), [], weakref.WeakMethod(self._tracker))
        self.heard.begin(regime)
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
        self.heard.read(number)
        self._hear()

    def distrust(self) -> None:
        self.heard.distrust()
        self._hear()

    def _tracker(self) -> EagerTracker:
        return self.eager

    def _hear(self) -> None:
        """Intercept as much as the layers that come ask for; see `heard_layers`."""
        if self.heard.hears != self.hears_products:
            self.hears_products = self.heard.hears
            tap.hear_products()

    def compiling(self, frame: FrameType) -> None:
        self.refuse_at(frame, CAPTURED)

    def refuse(self, name: str, reason: str) -> None:
        if (name, reason) not in self.refused:
            self.refused.append((name, reason))

    def embedding(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        """Not reported: `wants_ids` is False."""

    def attention_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, frame: FrameType) -> bool:
        return False

    def attention(self, site: CallSite, call: AttentionCall, submodule: str | None = None) -> None:
        if site.hides_modules:
            self.refuse(site.name, CAPTURED)
            return
        name = f"{site.name}.{submodule}" if submodule else site.name
        while name in self.layers:
            name += "'"
        call.parse_mask(self.masks)
        saved = save_call(call, False, None)
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
        if not self.heard.again(name):
            self.heard.call(name)
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
