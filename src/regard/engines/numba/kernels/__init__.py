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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import carray, cfunc, types

from . import backward, cells, column_pass, forward
from .params import ALIBI, BIAS, BIAS_PER_ROW, DENSE_MASK, PARAMS, SOFTCAP, modifier_table, params_record

__all__ = [
    "ALIBI",
    "BIAS",
    "BIAS_PER_ROW",
    "DENSE_MASK",
    "SOFTCAP",
    "kernel",
    "log_if_slow",
    "modifier_table",
    "params_record",
]

_KERNELS = {
    "forward": forward.forward,
    "column_pass": column_pass.column_pass,
    "cells": cells.cells,
    "backward": backward.backward,
}


@functools.cache
def kernel(name: str) -> Any:
    """A kernel as a C function, compiled when it is first needed; the result is kept on disk.

    numba files it under the source of one function only, so a stamp of all sources of this folder is made part of it.
    """
    stamp = 1
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stamp = zlib.crc32(source.read_bytes(), stamp)
    signature, c_entry = types.void(types.CPointer(PARAMS)), entry(_KERNELS[name], stamp or 1)
    with log_if_slow(f"compiling the {name} pass for this CPU; it is kept for the next time"):
        try:
            return cfunc(signature, cache=True)(c_entry)
        except RuntimeError:  # nowhere to keep it: a read-only installation without a home
            return cfunc(signature)(c_entry)


def entry(run: Any, stamp: int) -> Callable[[Any], None]:
    """The C entry point of a kernel; its argument is the address of the params record.

    numba's cache key holds the bytecode and the closure of this function. `stamp` is in the closure, so that an edit of
    any source misses the cache. `run` must not be: numba pickles a compiled function with a random id, so every process
    would compile anew. So `run` is a global of the function; its qualified name keeps the four cache files apart.
    """

    def c_entry(pointer: Any) -> None:
        if stamp:
            run_kernel(carray(pointer, 1)[0])  # type: ignore[name-defined]  # noqa: F821

    names = {"carray": carray, "run_kernel": run, "__name__": __name__}
    named = FunctionType(c_entry.__code__, names, run.__name__, None, c_entry.__closure__)
    named.__qualname__ = f"{run.__name__}_kernel"
    return named


@contextlib.contextmanager
def log_if_slow(what: str, seconds: float = 1.0) -> Iterator[None]:
    """Say by the logger "regard" what takes so long; nothing where it is quick, as it is from the second time on."""
    clock = threading.Timer(seconds, logging.getLogger("regard").info, (what,))
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
