"""The law of memory: nothing of t × t is ever made, forward or backward, and doubling t at most doubles the peak."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from support.judge import draw


class Live(TorchDispatchMode):
    """Watches every tensor that is made: the largest, and the most bytes alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            if isinstance(x, Tensor):
                self._meet(x.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        size = storage.nbytes()
        self.sizes[key] = size
        self.largest, self.alive = max(self.largest, size), self.alive + size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.alive -= self.sizes.pop(key, 0)


D = 8


def tensors(t: int, dtype: torch.dtype) -> list[Tensor]:
    return [draw(1, 1, t, D, dtype=dtype, grad=True) for _ in range(3)]


ASK = {
    "W @ v": lambda W, v: (W @ v).sum(),
    "W.mT @ u": lambda W, v: (W.mT @ v).sum(),
    "lse": lambda W, v: W.lse().sum(),
    "entropy": lambda W, v: W.entropy().sum(),
    "received": lambda W, v: W.received().square().sum(),
    "pool": lambda W, v: W.pool(8, 8).square().sum(),
    "mean_distance": lambda W, v: W.mean_distance().sum(),
    "mass": lambda W, v: W.mass([0, 5]).sum(),
    "top": lambda W, v: W.topk(4).values.sum(),
    "peak": lambda W, v: W.peak().values.sum(),
    "a row": lambda W, v: W.row(3).square().sum(),
    "a column": lambda W, v: W.column(3).sum(),
    "see": lambda W, v: sum(
        x.sum() for x in vars(W.see("entropy", "received", "mean_distance", pool=(8, 8), values=v)).values()
    ),
}

SCORES = {
    "scaled_dot": lambda t: regard.ScaledDot(),
    "gaussian with a sink": lambda t: regard.Gaussian(2.0).sink(torch.zeros(1).double()),
    "alibi and a cap": lambda t: regard.ScaledDot().alibi(torch.ones(1).double()).softcap(20.0),
}


def cost(ask, score, t: int, mask: regard.Mask | None, dtype: torch.dtype = torch.float64) -> Live:
    """What is alive and made in a forward and a backward."""
    q, k, v = tensors(t, dtype)
    with Live() as watch:
        ask(regard.weights(q, k, score=score(t), mask=mask), v).backward()
    return watch


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(20, 3)], ids=str)
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK.keys())
def test_no_tensor_of_t_times_t_is_ever_made(ask, mask, tiles) -> None:
    tiles(24, 32)
    t = 512
    watch = cost(ask, SCORES["scaled_dot"], t, mask)
    # The largest thing there may be is a few columns for every position: q, k, v, a strip of 24 rows, pools of 8.
    assert watch.largest <= 4 * t * D * 8
    assert watch.largest < t * t * 8 // 8


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK.keys())
def test_doubling_the_length_at_most_doubles_the_peak(ask, score, tiles) -> None:
    tiles(32, 32)
    small, large = (cost(ask, score, t, regard.causal()).peak for t in (256, 512))
    assert large <= 2.1 * small


def test_the_watch_of_this_file_sees_a_square() -> None:
    with Live() as watch:
        x = torch.zeros(64, 64)
        y = x + 1
    assert watch.largest == 64 * 64 * 4
    assert watch.peak == 2 * 64 * 64 * 4
    del x, y
    assert watch.alive == 0


def test_the_reference_fails_what_this_file_asks() -> None:
    q, k, v = tensors(256, torch.float64)
    with Live() as watch:
        (regard.weights(q, k, engine="reference") @ v).sum().backward()
    assert watch.largest >= 256 * 256 * 8


def test_what_is_remembered_is_linear_and_dies_with_the_matrix() -> None:
    x = draw(300, 4)
    W = regard.weights(x)
    references = [weakref.ref(W.lse()), weakref.ref(W.received())]
    W.dense(), W[3:200], W @ x
    held = [v for v in vars(W).values() if isinstance(v, Tensor)]
    assert all(v.numel() <= x.numel() for v in held)
    del W, held
    assert all(ref() is None for ref in references)


PEAK = """
import re, sys, torch, regard
torch.set_num_threads(1)
t, against = int(sys.argv[1]), sys.argv[2]
def run(t):
    q, k, v = (torch.randn(1, 2, t, 32, requires_grad=True) for _ in range(3))
    if against == "eager":
        (torch.softmax(q @ k.mT / 32**0.5, -1) @ v).sum().backward()
    else:
        seen = regard.weights(q, k, mask=regard.causal()).see("entropy", "received", values=v)
        (seen.y.sum() + seen.entropy.sum() + seen.received.square().sum()).backward()
def highest():
    # Not ru_maxrss: a child inherits that of the process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
run(300)  # what is loaded and compiled once does not count
before = highest()
run(t)
print(highest() - before)
"""


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak"
)


def peak(t: int, against: str = "regard") -> int:
    """Kilobytes that the process grew by, forward and backward, at its highest."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(t), against], capture_output=True, text=True, timeout=300, check=True
    )
    return int(done.stdout)


@needs_proc
def test_the_process_grows_by_a_small_part_of_the_matrix() -> None:
    t = 4096
    matrix = 2 * t * t * 4 // 1024
    assert peak(t) < matrix // 2  # q, k, v, their gradients and tiles: 20 MB of 134
    assert peak(t, "eager") > 2 * matrix  # what this test would see if the matrix were kept


@needs_proc
@pytest.mark.slow
def test_the_process_grows_linearly() -> None:
    # Above 8192 positions the tiles, which do not grow, are small beside q, k, v and their gradients.
    # Of three processes the leanest: by chance an allocator holds two megabytes more.
    small, large = (min(peak(t) for _ in range(3)) for t in (8192, 16384))
    assert large <= 2.1 * small
