"""`regard.watch`: entropy and largest score of every head while a model trains.

Every so many training steps one forward pass is intercepted and reduced to two numbers a head: the mean entropy of its
rows as a share of the largest possible, and its largest score. Entropy collapse and exploding scores are the two ways
attention fails in training; both are warned of, once a layer.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..core.torch_state import in_backward
from .first_rank import is_first_rank
from .hooks import seams, tap, transformers
from .hooks.call_site import CAPTURED, original_module
from .hooks.census import census_of
from .hooks.layer_history import regime_of
from .hooks.model_hooks import Hook, first_axes, is_compiled, remove_all
from .observer import RefusedWarning
from .watch_listener import PassListener

if TYPE_CHECKING:
    from ..look.options import ViewChoices
    from ..look.view import View

__all__ = ["AttentionWarning", "Watch", "watch"]


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
        self._looks: dict[int, PassListener] = {}  # by the id of the thread that the model runs in
        self._lock = threading.RLock()
        self._warned: set[tuple[str, str]] = set()
        self._reports = is_first_rank(model)  # the other ranks of a wrapped model neither call back nor warn
        # The modules of a compiled model are those of the original, under their own names.
        _, modules = census_of(original_module(model))
        self._names = {id(module): name for name, module in modules}
        for name, module in modules:
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
                look = PassListener(self._names, model, self.step, first_axes(args, kwargs), regime)
                self._looks[threading.get_ident()] = look
                tap.activate(look)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        look = self._looks.pop(threading.get_ident(), None)
        if look is None:
            return
        tap.deactivate(look)
        look.history.end(output is not None)
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
