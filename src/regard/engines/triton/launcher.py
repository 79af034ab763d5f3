"""Starting a kernel: what a call prepares is kept, and the next one only says where its tensors lie.

By Triton's own door every argument of every call is looked at, to find the compiled kernel that serves: 0.1 ms of Python, as
long as a short sequence takes to compute. Here the first call of a form goes through that door; the compiled kernel is
kept with its arguments, and later calls put the addresses of their tensors into them. Imports `again`, which notes launches down.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..replay import on_device_of, record_launch

__all__ = ["INTERPRETED", "launch"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Kept launches. Lengths that grow from call to call would keep one each: beyond this many, all are forgotten.
LAUNCHES: dict[Hashable, Launch] = {}
MAX_LAUNCHES = 4096
#: Versions of Triton whose way from a compiled kernel to the GPU is cached.
DIRECT_LAUNCH_VERSIONS = ("3.6.",)
#: Arguments of kept launches for addresses that they met: a model that trains meets the same ones in every step.
PACKED_ARGS: dict[tuple[Any, ...], list[Any]] = {}
MAX_PACKED_ARGS = 8192

Prepare = Callable[[], tuple[int, dict[str, Any]]]


def launch(kernel: Any, key: Hashable | None, tensors: list[Tensor | None], prepare: Prepare) -> None:
    """Run a kernel with the arguments that `prepare` makes, and with as many programs as it says.

    `key`: all that they depend on, but for `tensors` (every one that the kernel is given, the first not None). With the key
    None, nothing is kept.
    """
    like = tensors[0]
    assert like is not None
    with on_device_of(like):
        if key is None or INTERPRETED:
            programs, arguments = prepare()
            kernel[(programs,)](**arguments)
            record_launch(None, tensors)
            return
        # A kernel is compiled for aligned addresses; and which tensors are one decides where their address goes.
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
                PACKED_ARGS.clear()
            cached = LAUNCHES[signature] = Launch(
                compiled, programs, [arguments[name] for name in kernel.arg_names], tensors
            )
        record_launch(cached, tensors)


class Launch:
    """A compiled kernel with all its arguments, but for where its tensors lie; those themselves are not kept."""

    def __init__(self, compiled: Any, programs: int, arguments: list[Any], tensors: list[Tensor | None]) -> None:
        self.run, self.direct = compiled[(programs, 1, 1)], direct_launcher(compiled, programs)
        indices = {id(x): n for n, x in enumerate(tensors) if x is not None}
        rebinds = [_rebind(x, indices) for x in arguments]
        self.fixed = [x if rebind is None else None for x, rebind in zip(arguments, rebinds, strict=True)]
        self.rebound = [(n, rebind) for n, rebind in enumerate(rebinds) if rebind is not None]

    def __call__(self, at: list[int]) -> None:
        """Start it on tensors of the same forms at these addresses."""
        if self.direct is None or self.direct.has_launch_hooks():
            self.run(*self.arguments(at))
            return
        addresses = (self, *at)
        if (packed_args := PACKED_ARGS.get(addresses)) is None:
            if len(PACKED_ARGS) >= MAX_PACKED_ARGS:
                PACKED_ARGS.clear()
            packed_args = PACKED_ARGS[addresses] = self.direct.packed_args(self.arguments(at))
        self.direct.run(packed_args)

    def arguments(self, at: list[int]) -> list[Any]:
        arguments = self.fixed.copy()
        for n, rebind in self.rebound:
            arguments[n] = rebind(at)
        return arguments


def direct_launcher(compiled: Any, programs: int) -> DirectLauncher | None:
    """None where Triton's inside is another, or does more than start a kernel."""
    import triton

    if not triton.__version__.startswith(DIRECT_LAUNCH_VERSIONS):
        return None
    scratch = compiled.run.global_scratch_size or compiled.run.profile_scratch_size
    return None if scratch else DirectLauncher(compiled, programs)


class DirectLauncher:
    """From a compiled kernel to the GPU; what the copy engine is told is written once for each place that it reads.

    Triton's own way writes it anew for every start, which takes as long as all the rest.
    """

    def __init__(self, compiled: Any, programs: int) -> None:
        from triton import knobs
        from triton.backends.nvidia.driver import make_tensordesc_arg
        from triton.runtime import driver

        launcher, kinds = compiled.run, list(compiled.src.signature.values())
        descriptors = [n for n, kind in enumerate(kinds) if isinstance(kind, str) and kind.startswith("tensordesc")]
        meta = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(descriptors)
        self.descriptors, self.pack_descriptor = dict(zip(descriptors, meta, strict=True)), make_tensordesc_arg
        self.launch = launcher.launch
        if descriptors:  # then it stands inside the function that writes what the copy engine is told
            inside = dict(zip(self.launch.__code__.co_freevars, self.launch.__closure__, strict=True))
            self.launch = inside["launcher"].cell_contents
        self.programs, self.handle, self.hooks = programs, compiled.function, knobs.runtime
        self.rest = (
            launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, None, None, None
        )  # fmt: skip
        self.stream_of, self.device = driver.active.get_current_stream, driver.active.get_current_device()

    def has_launch_hooks(self) -> bool:
        """Whether somebody wants to hear of starts; they are told by Triton's own way."""
        return bool(self.hooks.launch_enter_hook.calls or self.hooks.launch_exit_hook.calls)

    def packed_args(self, arguments: list[Any]) -> list[Any]:
        parts = [
            self.pack_descriptor(x, self.descriptors[n]) if n in self.descriptors else [x]
            for n, x in enumerate(arguments)
        ]
        return [x for part in parts for x in part]

    def run(self, packed_args: list[Any]) -> None:
        self.launch(self.programs, 1, 1, self.stream_of(self.device), self.handle, *self.rest, *packed_args)


def _rebind(x: Any, indices: dict[int, int]) -> Callable[[list[int]], Any] | None:
    """What makes an argument anew from the addresses of the tensors; None for one that holds none.

    A tensor without a place would stay where it was when the launch was kept: that is an error (KeyError).
    """
    if isinstance(x, Tensor):
        return operator.itemgetter(indices[id(x)])
    if isinstance(x, tuple):
        rebinds = [_rebind(part, indices) for part in x]
        if any(rebinds[1:]):
            parts = [part if rebind is None else None for part, rebind in zip(x, rebinds, strict=True)]
            return lambda at: tuple([p if m is None else m(at) for p, m in zip(parts, rebinds, strict=True)])
        if rebinds and rebinds[0] is not None:  # as nearly all are: where it is, and strides
            head, rest = rebinds[0], tuple(x[1:])
            return lambda at: (head(at), *rest)
        return None
    if isinstance(getattr(x, "base", None), Tensor):  # what the copy engine is told
        kind, index, fields = type(x), indices[id(x.base)], {**vars(x), "base": None}

        def rebind_descriptor(at: list[int]) -> Any:
            rebound = object.__new__(kind)
            vars(rebound).update(fields, base=Address(at[index]))
            return rebound

        return rebind_descriptor
    return None


class Address(int):
    """Where a tensor lies, for those who would ask a tensor."""

    def data_ptr(self) -> int:
        return self
