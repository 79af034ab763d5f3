"""Cached kernel launches: the first call of a signature prepares the arguments, later ones only exchange addresses.

`kernel[grid](…)` re-specialises every argument, 0.1 ms of Python, as long as a short sequence takes to compute. Here the first
call of a signature goes that way; the compiled kernel is cached with its arguments, and later calls write the addresses of
their tensors into them. `DirectLauncher` also skips Triton's launcher; REGARD_DIRECT_LAUNCH=0 turns it off.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..replay import on_device_of, record_launch

__all__ = ["INTERPRETED", "launch"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Cached launches by signature. Growing lengths add one each: at MAX_LAUNCHES all are dropped.
LAUNCHES: dict[Hashable, Launch] = {}
MAX_LAUNCHES = 4096
DIRECT_LAUNCH = os.environ.get("REGARD_DIRECT_LAUNCH", "1") != "0"
#: Triton versions whose launcher `DirectLauncher` knows: PyTorch 2.11 to 2.15 bring them.
DIRECT_LAUNCH_VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
#: Packed arguments of cached launches by address: a training loop meets the same addresses in every step.
PACKED_ARGS: dict[tuple[Any, ...], list[Any]] = {}
MAX_PACKED_ARGS = 8192
#: Encoded TMA descriptors by launcher, argument and address: with a result at a new address those of the inputs stay.
ENCODED: dict[tuple[DirectLauncher, int, int], list[Any]] = {}

Prepare = Callable[[], tuple[int, dict[str, Any]]]


def launch(kernel: Any, key: Hashable | None, tensors: list[Tensor | None], prepare: Prepare) -> None:
    """Run a kernel with the number of programs and the arguments that `prepare` returns.

    `key`: everything they depend on but `tensors`, all tensors of the kernel (the first not None). None: not cached.
    """
    like = tensors[0]
    assert like is not None
    with on_device_of(like):
        if key is None or INTERPRETED:
            programs, arguments = prepare()
            kernel[(programs,)](**arguments)
            record_launch(None, tensors)
            return
        # Kernels are specialised on alignment; and equal tensors share one slot of the rebinding.
        at = [0 if x is None else x.data_ptr() for x in tensors]
        layouts = [x if x is None else (x.shape, x.stride(), x.dtype, at[n] % 16) for n, x in enumerate(tensors)]
        signature = (kernel.__name__, key, *layouts, *map(at.index, at), like.device)
        if (cached := LAUNCHES.get(signature)) is not None:
            cached(at)
        else:
            programs, arguments = prepare()
            compiled = kernel[(programs,)](**arguments)
            if len(LAUNCHES) >= MAX_LAUNCHES:
                LAUNCHES.clear()
                _clear_packed_args()
            cached = LAUNCHES[signature] = Launch(
                compiled, programs, [arguments[name] for name in kernel.arg_names], tensors
            )
        record_launch(cached, tensors)


def _clear_packed_args() -> None:
    PACKED_ARGS.clear()
    ENCODED.clear()


class Launch:
    """A compiled kernel with all its arguments but the addresses of tensors; it keeps no tensor alive."""

    def __init__(self, compiled: Any, programs: int, arguments: list[Any], tensors: list[Tensor | None]) -> None:
        self.run, self.direct = compiled[(programs, 1, 1)], direct_launcher(compiled, programs)
        indices = {id(x): n for n, x in enumerate(tensors) if x is not None}
        rebinds = [_rebind(x, indices) for x in arguments]
        self.fixed = [x if rebind is None else None for x, rebind in zip(arguments, rebinds, strict=True)]
        self.rebound = [(n, rebind) for n, rebind in enumerate(rebinds) if rebind is not None]

    def __call__(self, at: list[int]) -> None:
        """Launch it on tensors of the same shapes, strides and dtypes at these addresses."""
        if self.direct is None or self.direct.has_launch_hooks():
            self.run(*self.arguments(at))
            return
        addresses = (self, *at)
        if (packed_args := PACKED_ARGS.get(addresses)) is None:
            if len(PACKED_ARGS) >= MAX_PACKED_ARGS:
                _clear_packed_args()
            packed_args = PACKED_ARGS[addresses] = self.direct.packed_args(self.arguments(at))
        self.direct.run(packed_args)

    def arguments(self, at: list[int]) -> list[Any]:
        arguments = self.fixed.copy()
        for n, rebind in self.rebound:
            arguments[n] = rebind(at)
        return arguments


def direct_launcher(compiled: Any, programs: int) -> DirectLauncher | None:
    """None where Triton's launcher is unknown, or does more than launch a kernel."""
    import triton

    if not DIRECT_LAUNCH:
        return None
    if not triton.__version__.startswith(DIRECT_LAUNCH_VERSIONS):
        _log_slow_launches(triton.__version__)
        return None
    launcher = compiled.run
    more = launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
    if more:
        return None
    return (
        DirectLauncher(compiled, programs)
        if triton.__version__.startswith("3.6.")
        else DirectLauncherSince37(compiled, programs)
    )


@lru_cache
def _log_slow_launches(version: str) -> None:
    logging.getLogger("regard").warning(
        "Triton %s: kernels are launched by Triton's own launcher, 0.1 ms of Python each instead of 0.02; "
        "regard's own knows Triton %s.", version, ", ".join(v.rstrip(".") for v in DIRECT_LAUNCH_VERSIONS)
    )  # fmt: skip


class DirectLauncher:
    """Triton's C launcher, called directly; a TMA descriptor is encoded once for each address.

    Triton encodes it at every launch, which takes as long as everything else.
    """

    def __init__(self, compiled: Any, programs: int) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launcher, kinds = compiled.run, list(compiled.src.signature.values())
        descriptors = [n for n, kind in enumerate(kinds) if isinstance(kind, str) and kind.startswith("tensordesc")]
        meta = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(descriptors)
        self.descriptors, self.pack_descriptor = dict(zip(descriptors, meta, strict=True)), make_tensordesc_arg
        self.launch = launcher.launch
        if descriptors:  # then the C launcher is in the closure of the function that encodes descriptors
            inside = dict(zip(self.launch.__code__.co_freevars, self.launch.__closure__, strict=True))
            self.launch = inside["launcher"].cell_contents
        self.rest: tuple[Any, ...] = (
            launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, None, None, None
        )  # fmt: skip

        self._set_common(compiled, programs)

    def _set_common(self, compiled: Any, programs: int) -> None:
        from triton import knobs
        from triton.runtime import driver

        self.programs, self.handle, self.hooks = programs, compiled.function, knobs.runtime
        self.stream_of, self.device = driver.active.get_current_stream, driver.active.get_current_device()

    def has_launch_hooks(self) -> bool:
        """Whether launch hooks are set (profilers); Triton's own launcher calls them."""
        return bool(self.hooks.launch_enter_hook.calls or self.hooks.launch_exit_hook.calls)

    def packed_args(self, arguments: list[Any]) -> list[Any]:
        packed_args: list[Any] = []
        for n, x in enumerate(arguments):
            if n in self.descriptors:
                packed_args += self._encoded(n, x)
            else:
                packed_args.append(x)
        return packed_args

    def _encoded(self, n: int, descriptor: Any) -> list[Any]:
        """The TMA descriptor that is argument n, as the C launcher takes it."""
        key = self, n, descriptor.base
        if (encoded := ENCODED.get(key)) is None:
            encoded = ENCODED[key] = self.pack_descriptor(descriptor, self.descriptors[n])
        return encoded

    def run(self, packed_args: list[Any]) -> None:
        self.launch(self.programs, 1, 1, self.stream_of(self.device), self.handle, *self.rest, *packed_args)


class DirectLauncherSince37(DirectLauncher):
    """The same since Triton 3.7, which has one function that launches all kernels and takes their arguments as one list."""

    def __init__(self, compiled: Any, programs: int) -> None:
        from triton.backends.nvidia.driver import wrap_handle_tensordesc
        from triton.runtime import driver

        launcher = compiled.run
        self.launch = driver.active.utils.launch
        self.rest = (
            launcher.launch_cooperative_grid, launcher.launch_pdl, compiled.packed_metadata, None, None, None, None, None,
            launcher.arg_annotations, launcher.kernel_signature,
        )  # fmt: skip
        descriptors = getattr(compiled.metadata, "tensordesc_meta", None)
        self.expand = wrap_handle_tensordesc(lambda arguments: arguments, dict(compiled.src.signature), descriptors)
        self._set_common(compiled, programs)

    def packed_args(self, arguments: list[Any]) -> list[Any]:
        return [self.expand(arguments)]


def _rebind(x: Any, indices: dict[int, int]) -> Callable[[list[int]], Any] | None:
    """A function from addresses to an argument; None for an argument without tensors.

    A tensor that is not in `indices` would keep its first address: that is an error (KeyError).
    """
    if isinstance(x, Tensor):
        return operator.itemgetter(indices[id(x)])
    if isinstance(x, tuple):
        rebinds = [_rebind(part, indices) for part in x]
        if any(rebinds[1:]):
            parts = [part if rebind is None else None for part, rebind in zip(x, rebinds, strict=True)]
            return lambda at: tuple([p if m is None else m(at) for p, m in zip(parts, rebinds, strict=True)])
        if rebinds and rebinds[0] is not None:  # the usual case: pointer and strides
            head, rest = rebinds[0], tuple(x[1:])
            return lambda at: (head(at), *rest)
        return None
    if isinstance(getattr(x, "base", None), Tensor):  # a TMA descriptor
        kind, index, fields = type(x), indices[id(x.base)], {**vars(x), "base": None}

        def rebind_descriptor(at: list[int]) -> Any:
            rebound = object.__new__(kind)
            vars(rebound).update(fields, base=Address(at[index]))
            return rebound

        return rebind_descriptor
    return None


class Address(int):
    """An address in place of a tensor, for code that calls data_ptr()."""

    def data_ptr(self) -> int:
        return self
