"""Shapes beside the common ones on this GPU: decoding, chunks, odd sizes, short rows, float32. Writes bench/results/gpu_shapes.json.

Both sides are replayed as CUDA graphs. Inputs that would fit the cache are rotated past it. The peer is the fastest backend that
PyTorch's `scaled_dot_product_attention` has for the shape, named in `against`.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

from .rows import RESULTS, row

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
#: Bytes of keys and values past which nothing of the last call is left in the cache.
ROTATED = 150e6
BANDWIDTH = 4.8e12
BEGIN = time.time()
COMPILING = False  # in the processes that only fill the compilers' caches
ROWS: list[dict] = []


class Shape(NamedTuple):
    b: int
    h: int
    g: int
    i: int
    j: int
    d: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False

    @property
    def name(self) -> list[int | str]:
        kind = str(self.dtype).removeprefix("torch.")
        return [self.b, self.h, self.g, self.i, self.j, self.d, *(["causal"] if self.causal else []), kind]

    @property
    def bytes(self) -> int:
        return 2 * self.b * self.g * self.j * self.d * self.dtype.itemsize


DECODING = [
    Shape(8, 32, 8, 1, 8192, 128), Shape(1, 32, 8, 1, 131072, 128), Shape(1, 16, 16, 1, 131072, 64), Shape(1, 32, 8, 1, 8192, 128),
    Shape(1, 32, 8, 16, 65536, 128), Shape(1, 32, 8, 64, 16384, 128), Shape(4, 8, 8, 1, 32768, 256),
]  # fmt: skip
OTHERS = [
    Shape(32, 12, 12, 128, 128, 64), Shape(8, 16, 16, 512, 512, 64, causal=True), Shape(4, 32, 8, 1024, 1024, 128, causal=True),
    Shape(2, 16, 16, 4096, 4096, 256, causal=True), Shape(2, 16, 16, 4096, 4096, 96),
    Shape(2, 16, 16, 4096, 4096, 80, torch.float16), Shape(2, 16, 16, 4096, 4096, 160), Shape(2, 16, 16, 4096, 4096, 192),
    Shape(8, 10, 10, 4096, 77, 64, torch.float16), Shape(1, 20, 20, 16384, 1500, 64),
    Shape(2, 16, 16, 4099, 4099, 128, causal=True),
]  # fmt: skip
FLOAT32 = [Shape(2, 16, 16, 2048, 2048, 64, torch.float32), Shape(2, 16, 16, 2048, 2048, 128, torch.float32)]

Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Tensor, Tensor, Tensor], object]


def draw(shape: Shape) -> list[Inputs]:
    """Queries, keys and values, as many of them as the cache cannot hold."""
    count = max(1, min(16, math.ceil(ROTATED / shape.bytes)))
    sizes = (shape.h, shape.i), (shape.g, shape.j), (shape.g, shape.j)
    return [
        tuple(torch.randn(shape.b, h, n, shape.d, device="cuda", dtype=shape.dtype) for h, n in sizes)
        for _ in range(count)
    ]


def captured(run: Call, inputs: list[Inputs]) -> torch.cuda.CUDAGraph:
    if COMPILING:
        run(*inputs[0])
        return torch.cuda.CUDAGraph()
    for _ in range(3):
        run(*inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in inputs:
            run(*each)
    return graph


def timed(graph: torch.cuda.CUDAGraph, calls: int, turns: int = 7, ms: float = 12.0) -> list[float]:
    """Microseconds of one call, a sample for every turn."""
    if COMPILING:
        return [1.0]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replayed(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    replayed(1)
    times = max(1, min(200, int(ms / turns / max(replayed(1), 1e-3))))
    return [replayed(times) * 1e3 / times / calls for _ in range(turns)]


def peer(shape: Shape, inputs: list[Inputs]) -> tuple[str, float]:
    """The fastest backend of PyTorch's attention, and its microseconds."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.h != shape.g)

    times = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend), contextlib.suppress(RuntimeError):
            times[name] = statistics.median(timed(captured(attention, inputs), len(inputs)))
    best = min(times, key=times.__getitem__)
    return best, times[best]


def measure(shape: Shape, limits: dict[str, tuple[float | None, float | None]]) -> None:
    inputs = draw(shape)
    backend, theirs = peer(shape, inputs)
    mask, align = (regard.causal() if shape.causal else None), ("end" if shape.i != shape.j else None)

    def ask(*names: str, **more: int) -> Call:
        return lambda q, k, v: regard.weights(q, k, mask=mask, align=align, engine="triton").see(
            *names, values=v, **more
        )

    rows = ("lse", "max_score", "entropy")
    calls: dict[str, Call] = {
        "y + lse + max + entropy": ask(*rows),
        "attend": lambda q, k, v: regard.attend(q, k, v, mask=mask, align=align),
        "+ received + top-8": ask(*rows, "received", topk=8),
    }
    for what, run in calls.items():
        ours = timed(captured(run, inputs), len(inputs))
        must, goal = limits[what]
        note(what, shape, f"SDPA y alone ({backend}), graphs", [t / theirs for t in ours], must, goal, ours)
        if what.startswith("y +") and shape.i == 1 and shape.bytes >= 64e6:
            share = [shape.bytes / (t * 1e-6) / BANDWIDTH for t in ours]
            note("decode, share of 4.8 TB/s", shape, "memory bandwidth", share, 0.78, 0.88, ours, "higher")


def note(what: str, shape: Shape, against: str, samples: list[float], must: float | None, goal: float | None, us: list[float], better: str = "lower") -> None:  # fmt: skip
    figure = row(what, shape.name, against, samples, must, goal, better, torch.cuda.get_device_name())
    ROWS.append({**asdict(figure), "ms": statistics.median(us) / 1e3})
    print(f"{time.time() - BEGIN:5.0f}s {what:26s} {shape.name!s:52s} {figure.ratio:7.3f} {figure.verdict():16s} {statistics.median(us):9.1f} us {against}", flush=True)  # fmt: skip


def limits_of(shape: Shape) -> dict[str, tuple[float | None, float | None]]:
    few, exact = shape.i <= 64, shape.dtype == torch.float32
    of_rows = (1.05, 0.95) if few else (0.8, 0.6) if exact else (1.25, 1.05)
    return {"y + lse + max + entropy": of_rows, "attend": (1.05, 1.0), "+ received + top-8": (4.0, 2.5)}


def tried(shape: Shape) -> None:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measure(shape, limits_of(shape))
    except Exception as error:
        print(f"{shape.name} failed: {type(error).__name__} {str(error)[:300]}", flush=True)
    torch.cuda.empty_cache()


def compiled(shape: Shape) -> None:
    """What the compilers have to do for a shape: kernels are kept on disk."""
    global COMPILING
    COMPILING = True
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        tried(shape)


def save() -> None:
    """After every shape: a run that is interrupted leaves what it has."""
    text = json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n"
    for folder in (RESULTS, *([os.environ["OUT"]] if os.environ.get("OUT") else [])):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "gpu_shapes.json"), "w") as file:
            file.write(text)


def main(patience: float = 120.0) -> None:
    shapes = [*DECODING, *OTHERS, *FLOAT32]
    pool = multiprocessing.get_context("spawn").Pool(min(14, len(shapes)))
    pool.map_async(compiled, shapes, chunksize=1).wait(patience)
    pool.terminate()
    print(f"{time.time() - BEGIN:5.0f}s compiled", flush=True)
    for shape in shapes:
        tried(shape)
        save()
    missed = [r for r in ROWS if r["must"] is not None and (r["ratio"] > r["must"]) == (r["better"] == "lower")]
    print(f"{len(ROWS)} figures, {len(missed)} beyond their limit", file=sys.stderr)


if __name__ == "__main__":
    main()
