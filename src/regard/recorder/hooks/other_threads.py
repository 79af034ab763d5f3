"""Threads other than the one that opened a recording: their functions are recorded as well, and not modules alone.

A method of the model that attends itself calls no hook, and dispatch keys belong to one thread. So each thread must
switch its own on: a new one at its first event, which `threading.setprofile` reports (and nothing is profiled after
it), and an older worker of a `ThreadPoolExecutor` at the work that is handed to it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

__all__ = ["Owner", "install", "uninstall"]


class Owner(Protocol):
    """The recording that follows threads."""

    def thread_begins(self) -> None:
        """A thread begins, and runs in it."""

    def work_begins(self) -> None:
        """A function that was handed to a pool begins."""

    def work_ends(self) -> None:
        """It has ended."""


_lock = threading.RLock()  # a recording that is freed while its thread is in here calls `uninstall` in between
_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # weak: a recording that Ctrl-C ended leaves with its object
_before: list[Any] = []  # the profile function of new threads, and `submit`, as they were; and `submit` as it is now


def install(owner: Owner) -> None:
    """Tell the owner of every thread that starts, and of work in pools, until `uninstall`."""
    with _lock:
        if not _before:
            submit = ThreadPoolExecutor.submit
            _before[:] = threading.getprofile(), submit, _submit(submit)
        if not _owners:
            threading.setprofile(_on_first_event)
            ThreadPoolExecutor.submit = _before[2]  # type: ignore[method-assign]
        _owners.add(owner)


def uninstall(owner: Owner) -> None:
    """Undo `install`; what others have set meanwhile stays."""
    with _lock:
        _owners.discard(owner)
        if _owners or not _before:
            return
        profile, submit, ours = _before
        if threading.getprofile() is _on_first_event:
            threading.setprofile(profile)
        if ThreadPoolExecutor.submit is ours:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        _before.clear()


def _on_first_event(frame: Any, event: Any, arg: Any) -> None:
    with _lock:
        owners = list(_owners)
        profile = _before[0] if _before else threading.getprofile()
    sys.setprofile(profile)
    for owner in owners:
        owner.thread_begins()
    if profile is not None:
        profile(frame, event, arg)


def _submit(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def submit(pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return own(pool, _run_work, fn, *args, **kwargs)

    return submit


def _run_work(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with _lock:
        owners = list(_owners)
    for owner in owners:
        owner.work_begins()
    try:
        return fn(*args, **kwargs)
    finally:
        for owner in owners:
            owner.work_ends()
