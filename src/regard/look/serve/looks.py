"""The recordings of a server, that a worker makes ready one after the other, and the tiles of their heads."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..layers import LayerView, all_layers
from ..page.format import Packed
from ..page.payload import pack
from ..token_text import printable
from ..view import View
from .pyramid import Pyramid

__all__ = ["BusyError", "Look", "Looks", "Progress"]

#: Recordings that are held, the latest ones; heads of each with all their tiles; work that may wait for the worker.
LOOKS, PYRAMIDS, WAITING = 4, 4, 8


class BusyError(Exception):
    """More work waits than may wait."""


class _StoppedError(Exception):
    """The server ends, or the look was dropped, so that no request can reach the result."""


@dataclass
class Progress:
    """A step of the work and the share of it that is done; None where the share is unknown."""

    step: str
    done: float | None = None


class Look:
    """One view that is shown: ready once `packed` is there, failed once `error` is."""

    def __init__(self, accepts_text: bool) -> None:
        self.id = secrets.token_urlsafe(12)
        self.accepts_text = accepts_text
        self.progress = Progress("waiting")
        self.packed: Packed | None = None
        self.error: str | None = None
        self.dropped = False
        self._layers: list[LayerView] = []
        self._pyramids: OrderedDict[tuple[int, int], Pyramid] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self,
        make: Callable[[], View],
        device: str,
        stopped: Callable[[], bool],
        served: dict[str, Any] | None = None,
    ) -> None:
        """Make the view and pack its page, which knows `served` of its server. Errors of the input become `error`."""

        def report(step: str, done: float) -> None:
            if self.dropped or stopped():
                raise _StoppedError
            self.progress = Progress(step, done)

        try:
            self.progress = Progress("running the model")
            view = make()
            self.progress = Progress("summing up every head")
            options = view.options
            layers = (
                all_layers(view.subject, options.item, options.values) if not isinstance(view.subject, list) else []
            )
            if device != "cpu":
                for layer in layers:
                    if layer.maybe_weights is not None:
                        layer.maybe_weights = layer.maybe_weights.to(device)
            self._layers = [layer for layer in layers if layer.maybe_weights is not None]
            self.packed = pack(
                view.subject, options, layers, served or {"look": self.id, "types": self.accepts_text}, report
            )
        except (ValueError, LookupError, OSError, ImportError, MemoryError, RuntimeError, TypeError) as error:
            self.error = printable(" ".join(str(error).split()) or type(error).__name__, 400)

    def pyramid(self, place: int, head: int) -> Pyramid:
        """The tiles of a head; raises IndexError if the page has no such head, or a short one."""
        if not 0 <= place < len(self._layers) or not 0 <= head < self._layers[place].heads:
            raise IndexError("there is no such head.")
        view = self._layers[place]
        if not view.long:
            raise IndexError("the page holds all weights of this head.")
        with self._lock:
            if (place, head) not in self._pyramids:
                self._pyramids[place, head] = Pyramid(view.weights, head, view.summary.lse[head])
                while len(self._pyramids) > PYRAMIDS:
                    self._pyramids.popitem(last=False)
            self._pyramids.move_to_end((place, head))
            return self._pyramids[place, head]

    def compute_first(self, pyramid: Pyramid, stopped: Callable[[], bool]) -> None:
        """Compute the first levels of a head."""

        def progress(done: float) -> None:
            if self.dropped or stopped():
                raise _StoppedError
            self.progress = Progress("computing the first levels of the map", done)

        if pyramid.first is None:
            pyramid.compute_first(progress)

    def vectors(
        self, place: int, head: int, rows: slice, cols: slice
    ) -> tuple[float, torch.Tensor, torch.Tensor] | None:
        """The scale, queries and keys of a window; None for scores that are more than their products."""
        factors = self._layers[place].weights._factors
        scale = factors.score.product_scale(factors.q.shape[-1])
        if scale is None or factors.score.modifiers:
            return None
        key = head * factors.k.shape[-3] // factors.q.shape[-3]
        return scale, factors.q[head, rows].float().cpu(), factors.k[key, cols].float().cpu()


class Looks:
    """The recordings that a server holds, and the thread that makes them ready."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._looks: OrderedDict[str, Look] = OrderedDict()
        self._work: queue.Queue[Callable[[], None]] = queue.Queue(WAITING)
        self._requested: set[int] = set()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._worker = threading.Thread(target=self._run, daemon=True, name="regard-looks")
        self._worker.start()

    def add(self, make: Callable[[], View], accepts_text: bool = False) -> Look:
        """Have a view made ready; raises BusyError if too many wait."""
        look = Look(accepts_text)
        self._put(lambda: look.prepare(make, self.device, self._stop.is_set))
        with self._lock:
            self._looks[look.id] = look
            while len(self._looks) > LOOKS:
                self._looks.popitem(last=False)[1].dropped = True
        return look

    def find(self, name: str) -> Look | None:
        """The look of this id, if it is still held."""
        with self._lock:
            return self._looks.get(name)

    def request_first(self, look: Look, pyramid: Pyramid) -> None:
        """Have the first levels of a head computed, once."""
        with self._lock:
            if id(pyramid) in self._requested or pyramid.first is not None:
                return
            self._requested.add(id(pyramid))

        def compute() -> None:
            try:
                look.compute_first(pyramid, self._stop.is_set)
            finally:
                with self._lock:
                    self._requested.discard(id(pyramid))

        try:
            self._put(compute)
        except BusyError:
            with self._lock:
                self._requested.discard(id(pyramid))
            raise

    def close(self) -> None:
        """End the worker, at the next step of what it does."""
        self._stop.set()
        with contextlib.suppress(queue.Full):
            self._work.put_nowait(lambda: None)
        self._worker.join(timeout=1)

    def is_working(self) -> bool:
        """Whether the worker goes on; after `close` it does so where its step is a long one."""
        return self._worker.is_alive()

    def _put(self, work: Callable[[], None]) -> None:
        try:
            self._work.put_nowait(work)
        except queue.Full:
            raise BusyError from None

    @torch.no_grad()
    def _run(self) -> None:
        while not self._stop.is_set():
            work = self._work.get()
            if not self._stop.is_set():
                with contextlib.suppress(_StoppedError):
                    work()
