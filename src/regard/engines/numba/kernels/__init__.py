"""Tiles compiled for the CPU: BLAS for the products, one fused pass over each row for everything else.

Kernels walk the tiles as `blockwise` does, in float32 or float64: forward, column_pass, strip_pass, tile_pool, profile,
cells, backward. Those of `comparison` and `head_rows` walk the tiles of two matrices, in float32. Each is a C function
of one argument, a params record of addresses and sizes, that any number of threads may enter at once: they take work
items from a shared counter, so that no thread waits for the slowest. Needs numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import carray, cfunc, types

from . import backward, cells, column_pass, comparison, forward, head_rows, profile, strip_pass, tile_pool
from .params import (
    DENSE_MASK,
    DISTANCE,
    MEASURES,
    MODIFIER_KINDS,
    ONE_PASS,
    PARAMS,
    POOL_BY,
    ROW_STATISTICS,
    WORDS,
    modifier_table,
    params_record,
)

__all__ = [
    "DENSE_MASK",
    "DISTANCE",
    "MEASURES",
    "MODIFIER_KINDS",
    "ONE_PASS",
    "POOL_BY",
    "ROW_STATISTICS",
    "WORDS",
    "kernel",
    "log_if_slow",
    "modifier_table",
    "params_record",
]

_KERNELS = {
    "forward": forward.forward,
    "column_pass": column_pass.column_pass,
    "strip_pass": strip_pass.strip_pass,
    "cells": cells.cells,
    "backward": backward.backward,
    "compare": comparison.compare,
    "compare_finished": comparison.compare_finished,
    "compare_backward": comparison.compare_backward,
    "head_rows": head_rows.head_rows,
    "head_rows_backward": head_rows.head_rows_backward,
    "tile_pool": tile_pool.tile_pool,
    "profile": profile.profile,
}


class CompiledKernel:
    """A kernel as a C function of the address of its params record."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.address = compiled, compiled.address
        # Made once: numba's own property makes a new type and function in every call, as long as a short kernel runs.
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


@functools.cache
def kernel(name: str, itemsize: int) -> CompiledKernel:
    """A kernel for numbers of 4 or 8 bytes, compiled when first needed and cached on disk.

    numba's cache sees the source of one function only, so a checksum of all sources of this package is made part of it.
    """
    stamp = 1
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stamp = zlib.crc32(source.read_bytes(), stamp)
    signature, c_entry = types.void(types.CPointer(PARAMS[itemsize])), entry(_KERNELS[name], stamp or 1)
    with log_if_slow(f"compiling the {name} pass for this CPU; the result is cached on disk"):
        try:
            return CompiledKernel(cfunc(signature, cache=True)(c_entry))
        except RuntimeError:  # no directory for the cache: a read-only installation without a home
            return CompiledKernel(cfunc(signature)(c_entry))


def entry(run: Any, stamp: int) -> Callable[[Any], None]:
    """The C entry point of a kernel; its argument is the address of the params record.

    numba's cache key holds the bytecode and the closure of this function. `stamp` is in the closure, so that an edit of
    any source misses the cache. `run` must not be: numba pickles a compiled function with a random id, so every process
    would compile anew. So `run` is a global of the function; its qualified name keeps the cache files apart.
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
    """Log `what` by the logger "regard" if the body takes longer than `seconds`."""
    clock = threading.Timer(seconds, logging.getLogger("regard").info, (what,))
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
