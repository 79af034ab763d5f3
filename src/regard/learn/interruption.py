"""Signals that end a run after its current step."""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["Interrupted"]


class Interrupted:
    """True after SIGINT or SIGTERM: the current step is finished first. A second signal raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signalled = False
        self._handlers: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signalled

    def __enter__(self) -> Interrupted:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.signalled:
            raise KeyboardInterrupt
        self.signalled = True
