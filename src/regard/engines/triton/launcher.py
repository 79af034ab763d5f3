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

__all__ = ["INTERPRETED", "start"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Kept launches. Lengths that grow from call to call would keep one each: beyond this many, all are forgotten.
KEPT: dict[Hashable, Launch] = {}
MOST = 4096
#: Versions of Triton whose way from a compiled kernel to the GPU is cached.
KNOWN = ("3.6.",)
#: Arguments of kept launches for addresses that they met: a model that trains meets the same ones in every step.
PACKED: dict[tuple[Any, ...], list[Any]] = {}
MOST_PACKED = 8192

Prepare = Callable[[], tuple[int, dict[str, Any]]]


def start(kernel: Any, key: Hashable | None, tensors: list[Tensor | None], prepare: Prepare) -> None:
    """Run a kernel with the arguments that `prepare` makes, and with as many programs as it says.

    `key`: all that they depend on, but for `tensors` (every one that the kernel is given, the first not None). With the key
    None, nothing is kept.
    """
    first = tensors[0]
    assert first is not None
    with on_device_of(first):
        if key is None or INTERPRETED:
            programs, arguments = prepare()
            kernel[(programs,)](**arguments)
            record_launch(None, tensors)
            return
        # A kernel is compiled for aligned addresses; and which tensors are one decides where their address goes.
        at = [0 if x is None else x.data_ptr() for x in tensors]
        forms = [x if x is None else (x.shape, x.stride(), x.dtype, at[n] % 16) for n, x in enumerate(tensors)]
        whole = (kernel.__name__, key, *forms, *map(at.index, at), first.device)
        if (kept := KEPT.get(whole)) is not None:
            kept(at)
        else:
            programs, arguments = prepare()
            compiled = kernel[(programs,)](**arguments)
            if len(KEPT) >= MOST:
                KEPT.clear()
                PACKED.clear()
            kept = KEPT[whole] = Launch(compiled, programs, [arguments[name] for name in kernel.arg_names], tensors)
        record_launch(kept, tensors)


class Launch:
    """A compiled kernel with all its arguments, but for where its tensors lie; those themselves are not kept."""

    def __init__(self, compiled: Any, programs: int, arguments: list[Any], tensors: list[Tensor | None]) -> None:
        self.run, self.way = compiled[(programs, 1, 1)], short_way(compiled, programs)
        places = {id(x): n for n, x in enumerate(tensors) if x is not None}
        movers = [_mover(x, places) for x in arguments]
        self.fixed = [x if mover is None else None for x, mover in zip(arguments, movers, strict=True)]
        self.moving = [(n, mover) for n, mover in enumerate(movers) if mover is not None]

    def __call__(self, at: list[int]) -> None:
        """Start it on tensors of the same forms at these addresses."""
        if self.way is None or self.way.watched():
            self.run(*self.arguments(at))
            return
        where = (self, *at)
        if (packed := PACKED.get(where)) is None:
            if len(PACKED) >= MOST_PACKED:
                PACKED.clear()
            packed = PACKED[where] = self.way.packed(self.arguments(at))
        self.way.run(packed)

    def arguments(self, at: list[int]) -> list[Any]:
        arguments = self.fixed.copy()
        for n, moved in self.moving:
            arguments[n] = moved(at)
        return arguments


def short_way(compiled: Any, programs: int) -> ShortWay | None:
    """None where Triton's inside is another, or does more than start a kernel."""
    import triton

    if not triton.__version__.startswith(KNOWN):
        return None
    scratch = compiled.run.global_scratch_size or compiled.run.profile_scratch_size
    return None if scratch else ShortWay(compiled, programs)


class ShortWay:
    """From a compiled kernel to the GPU; what the copy engine is told is written once for each place that it reads.

    Triton's own way writes it anew for every start, which takes as long as all the rest.
    """

    def __init__(self, compiled: Any, programs: int) -> None:
        from triton import knobs
        from triton.backends.nvidia.driver import make_tensordesc_arg
        from triton.runtime import driver

        launcher, kinds = compiled.run, list(compiled.src.signature.values())
        described = [n for n, kind in enumerate(kinds) if isinstance(kind, str) and kind.startswith("tensordesc")]
        told = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(described)
        self.described, self.write = dict(zip(described, told, strict=True)), make_tensordesc_arg
        self.start = launcher.launch
        if described:  # then it stands inside the function that writes what the copy engine is told
            inside = dict(zip(self.start.__code__.co_freevars, self.start.__closure__, strict=True))
            self.start = inside["launcher"].cell_contents
        self.programs, self.function, self.hooks = programs, compiled.function, knobs.runtime
        self.rest = (
            launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, None, None, None
        )  # fmt: skip
        self.stream_of, self.device = driver.active.get_current_stream, driver.active.get_current_device()

    def watched(self) -> bool:
        """Whether somebody wants to hear of starts; they are told by Triton's own way."""
        return bool(self.hooks.launch_enter_hook.calls or self.hooks.launch_exit_hook.calls)

    def packed(self, arguments: list[Any]) -> list[Any]:
        parts = [self.write(x, self.described[n]) if n in self.described else [x] for n, x in enumerate(arguments)]
        return [x for part in parts for x in part]

    def run(self, packed: list[Any]) -> None:
        self.start(self.programs, 1, 1, self.stream_of(self.device), self.function, *self.rest, *packed)


def _mover(x: Any, places: dict[int, int]) -> Callable[[list[int]], Any] | None:
    """What makes an argument anew from the addresses of the tensors; None for one that holds none.

    A tensor without a place would stay where it was when the launch was kept: that is an error (KeyError).
    """
    if isinstance(x, Tensor):
        return operator.itemgetter(places[id(x)])
    if isinstance(x, tuple):
        movers = [_mover(part, places) for part in x]
        if any(movers[1:]):
            parts = [part if mover is None else None for part, mover in zip(x, movers, strict=True)]
            return lambda at: tuple([p if m is None else m(at) for p, m in zip(parts, movers, strict=True)])
        if movers and movers[0] is not None:  # as nearly all are: where it is, and strides
            head, rest = movers[0], tuple(x[1:])
            return lambda at: (head(at), *rest)
        return None
    if isinstance(getattr(x, "base", None), Tensor):  # what the copy engine is told
        kind, place, told = type(x), places[id(x.base)], {**vars(x), "base": None}

        def described(at: list[int]) -> Any:
            moved = object.__new__(kind)
            vars(moved).update(told, base=Address(at[place]))
            return moved

        return described
    return None


class Address(int):
    """Where a tensor lies, for those who would ask a tensor."""

    def data_ptr(self) -> int:
        return self
