"""Tiles compiled for the CPU: BLAS for the products, one fused pass over each row for all the rest.

Four kernels walk the tiles as `blockwise` does, in float32: forward, column_pass, cells, backward. Each is a C function
of one argument, a record of addresses and sizes, that any number of threads may enter at once: they draw work from a
shared counter, so nobody waits for the slowest. Loaded only by `compiled`; needs numba.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numba import cfunc, types

from . import backward, cells, column_pass, forward
from .params import ADDED, ADDED_VECTOR, ALIBI, HIDDEN, SOFTCAP, TASK, new_steps, task_record

__all__ = ["ADDED", "ADDED_VECTOR", "ALIBI", "HIDDEN", "SOFTCAP", "kernel", "new_steps", "task_record", "told_if_long"]

_ENTRIES = {
    "forward": forward.entry,
    "column_pass": column_pass.entry,
    "cells": cells.entry,
    "backward": backward.entry,
}


@functools.cache
def kernel(name: str) -> Any:
    """A kernel as a C function, compiled when it is first needed; the result is kept on disk.

    numba files it under the source of one function only, so a stamp of all sources of this folder is made part of it.
    """
    stamp = 1
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stamp = zlib.crc32(source.read_bytes(), stamp)
    signature, entry = types.void(types.CPointer(TASK)), _ENTRIES[name](stamp or 1)
    with told_if_long(f"compiling the {name} pass for this CPU; it is kept for the next time"):
        try:
            return cfunc(signature, cache=True)(entry)
        except RuntimeError:  # nowhere to keep it: a read-only installation without a home
            return cfunc(signature)(entry)


@contextlib.contextmanager
def told_if_long(what: str, seconds: float = 1.0) -> Iterator[None]:
    """Say by the logger "regard" what takes so long; nothing where it is quick, as it is from the second time on."""
    clock = threading.Timer(seconds, logging.getLogger("regard").info, (what,))
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
