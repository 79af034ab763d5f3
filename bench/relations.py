"""Two matrices, many heads, many spans: `python -m bench.relations` writes bench/results/relations.json, on a GPU with --device cuda.

Ratios to PyTorch's fused attention of the first matrix (on a GPU by cuDNN, on Hopper the fastest of its backends), to the pooled map,
or to how a published library computes the same. The figures of the other device stay in the file. On the CPU seconds are those of one thread at work: what runs beside it does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import chains, kv, losses
from regard.engines import numba

from .rows import RESULTS, Row, ratios, read, row

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ROLLOUT = "rollout, 12 layers of 12 heads, one row (causal)"


class Bench:
    """Where and in which type is measured, and how long."""

    def __init__(self, device: str, repeats: int, t: int) -> None:
        self.device, self.repeats, self.t = device, repeats, t
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.name = torch.cuda.get_device_name() if device == "cuda" else ""

    def draw(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).requires_grad_(grad)

    def fastest_peer(self) -> contextlib.AbstractContextManager[None]:
        """Within, PyTorch's attention on a GPU runs on the backend that is the fastest on Hopper."""
        return sdpa_kernel(BACKENDS, set_priority=True) if self.device == "cuda" else contextlib.nullcontext()

    def clock(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def several(self, call: Callable[[], Any]) -> Callable[[], None]:
        """On a GPU eight calls, so that the host works beside the device."""

        def repeated() -> None:
            for _ in range(8 if self.device == "cuda" else 1):
                call()

        return repeated

    def row(self, what: str, shape: Any, against: str, ours: Callable[[], Any], theirs: Callable[[], Any],
            must: float | None, goal: float | None) -> Row:  # fmt: skip
        samples = ratios(self.several(ours), self.several(theirs), self.repeats, self.clock)
        result = row(what, shape, against, samples, must, goal, device=self.name)
        print(f"{result.ratio:8.3f}× {what} {shape}", file=sys.stderr, flush=True)
        return result

    def of_one(
        self, what: str, shape: Any, against: str, value: float, must: float | None, goal: float | None = None
    ) -> Row:
        print(f"{value:8.3f} {what} {shape}", file=sys.stderr, flush=True)
        return row(what, shape, against, [value], must, goal, device=self.name)


def comparisons(bench: Bench) -> Iterator[Row]:
    """kl of two matrices, forward, and with gradients of both sides."""
    for causal in (False, True):
        shape = [1, 2, bench.t, 128] if bench.device == "cpu" else [4, 16, bench.t, 128]
        q, k, v, q2, k2 = (bench.draw(*shape, grad=True) for _ in range(5))
        mask, kind = (regard.causal(), " (causal)") if causal else (None, "")
        flowing = bench.draw(*shape)

        def sdpa(causal: bool = causal, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def kl(mask: Any = mask, parts: tuple[Tensor, ...] = (q, k, q2, k2)) -> Tensor:
            return regard.weights(*parts[:2], mask=mask).kl(regard.weights(*parts[2:], mask=mask))

        with torch.no_grad():
            yield bench.row(f"kl of two matrices{kind}", shape, "SDPA", kl, sdpa, 2.0, 1.5)
        yield bench.row(
            f"kl, forward + backward of both{kind}", shape, "SDPA, forward + backward",
            lambda: kl().sum().backward(), lambda: sdpa().backward(flowing), 2.5, 1.8,
        )  # fmt: skip
        if causal:
            with torch.no_grad():
                for measure in ("js", "total_variation"):
                    yield bench.row(
                        f"{measure} of two matrices{kind}", shape, "SDPA",
                        lambda: getattr(regard.weights(q, k, mask=mask), measure)(regard.weights(q2, k2, mask=mask)),
                        sdpa, None, None,
                    )  # fmt: skip


def head_mean(bench: Bench) -> Iterator[Row]:
    """The entropy of the mean over heads, whose rows need every lse first."""
    q, k, v = (bench.draw(1, 16, bench.t, 128) for _ in range(3))
    shape, mask = list(q.shape), regard.causal()

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def fresh() -> Tensor:
        return regard.weights(q, k, mask=mask).reduce_heads("mean").entropy()

    with torch.no_grad():
        yield bench.row("entropy of the head mean (causal)", shape, "SDPA", fresh, sdpa, 2.5, 2.0)
        W = regard.weights(q, k, mask=mask)
        W.lse()
        yield bench.row(
            "entropy of the head mean (causal), lse at hand", shape, "SDPA", lambda: W.reduce_heads("mean").entropy(), sdpa, 1.3, 1.0
        )  # fmt: skip


def _indexer(bench: Bench, t: int, heads: int = 16) -> tuple[Any, Callable[[], Tensor], list[Tensor]]:
    q, k, v = (bench.draw(1, heads, t, 128) for _ in range(3))
    index = [bench.draw(*shape, grad=True) for shape in ((1, 4, t, 64), (1, t, 64), (1, t, 4))]
    teacher = regard.weights(q, k, mask=regard.causal())
    teacher.lse()
    return teacher, lambda: losses.indexer(teacher, losses.index_weights(*index, regard.causal())), [q, k, v]


def indexer(bench: Bench) -> Iterator[Row]:
    """The dense loss of a sparse-attention indexer, and its memory beside [b, h, i, j] in float32."""
    t = 2 * bench.t
    _, loss, qkv = _indexer(bench, t)
    shape, flowing = [1, 16, t, 128], bench.draw(1, 16, t, 128)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    with torch.no_grad():
        yield bench.row("indexer loss, lse at hand (causal)", shape, "SDPA", loss, sdpa, 2.0, 1.3)
    for x in qkv:
        x.requires_grad_()
    yield bench.row(
        "indexer loss, forward + backward (causal)", shape, "SDPA, forward + backward",
        lambda: loss().backward(), lambda: sdpa().backward(flowing), 3.0, 2.0,
    )  # fmt: skip


def memory(bench: Bench) -> Iterator[Row]:
    """What the indexer's loss and its gradients take beside the scores of all heads, which Megatron-LM writes."""
    t = 32768
    yield bench.of_one(
        "indexer loss, forward + backward: memory (causal)", [1, 16, t, 128], "[b, h, i, j] in float32",
        _taken(bench, _indexer_gradients, t) / (16 * t * t * 4), 0.01,
    )  # fmt: skip


def _indexer_gradients(bench: Bench, t: int) -> Callable[[], Any]:
    loss = _indexer(bench, t)[1]
    return lambda: loss().backward()


def _rollout(bench: Bench, t: int, layers: int = 12) -> Callable[[], Tensor]:
    stack = [regard.weights(bench.draw(1, 12, t, 64), mask=regard.causal()) for _ in range(layers)]
    return lambda: chains.rollout_rows(stack, [t - 1])


def _taken(bench: Bench, prepare: Callable[[Bench, int], Callable[[], Any]], t: int) -> int:
    """Bytes that the prepared call takes above its arguments."""
    if bench.device == "cuda":
        return _bytes_on_gpu(bench, prepare, t)
    # In a process of its own, whose peak nothing else has raised.
    threads = torch.get_num_threads()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (threads,)) as alone:
        return alone.submit(_bytes_of_process, bench, prepare, t).result()


def _bytes_on_gpu(bench: Bench, prepare: Callable[[Bench, int], Callable[[], Any]], t: int) -> int:
    call = prepare(bench, t)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _bytes_of_process(bench: Bench, prepare: Callable[[Bench, int], Callable[[], Any]], t: int) -> int:
    def memory(name: str) -> int:
        return 1024 * int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    prepare(bench, 300)()  # what is loaded and compiled once does not count
    call = prepare(bench, t)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def spans(bench: Bench) -> Iterator[Row]:
    """Segments and block maps beside the pooled map of sums."""
    q, k = (bench.draw(1, 4 if bench.device == "cpu" else 16, bench.t, 128) for _ in range(2))
    shape, mask = list(q.shape), regard.causal()
    segments = torch.arange(bench.t, device=bench.device) * 64 // bench.t

    def pool() -> Tensor:
        """By a pass for the norm and one for the map, as when the limits were set: alone it takes one on a CPU."""
        W = regard.weights(q, k, mask=mask)
        W.lse()
        return W.pool(64, 64)

    with torch.no_grad():
        yield bench.row(
            "64 segments (causal)", shape, "the pooled map, by two passes", lambda: regard.weights(q, k, mask=mask).segment_mass(segments), pool, 1.2, 1.0
        )  # fmt: skip
        for by in ("max", "lse"):
            yield bench.row(
                f"blocks by {by} (causal)", shape, "the pooled map, by two passes",
                lambda: regard.weights(q, k, mask=mask).pool(64, 64, by=by), pool, 1.2, 1.0,
            )  # fmt: skip


def snapkv(bench: Bench) -> Iterator[Row]:
    """Scores of the keys of a cache: 64 queries over 32,768 keys, 8 key heads for 32 query heads."""
    sys.path += ["tests", ".libraries"]
    from support.kvpress_code import FOLDER, llama_attention, press

    if FOLDER is None:
        print("SnapKV needs kvpress: make test-libraries", file=sys.stderr)
        return
    t, window, h, g, d = 32768, 64, 32, 8, 128
    layer = llama_attention(h, g, d).to(bench.device, bench.dtype)
    x, k = bench.draw(1, t, h * d), bench.draw(1, g, t, d)
    unrotated = {"position_embeddings": (torch.ones_like(x[..., :d]), torch.zeros_like(x[..., :d]))}
    theirs = press("snapkv_press", "SnapKVPress")(window_size=window)

    def ours() -> Tensor:
        q = layer.q_proj(x[:, -window:]).view(1, window, h, d).transpose(1, 2)
        return kv.snapkv(regard.weights(q, k, mask=regard.causal(), align="end"), window)

    with torch.no_grad():
        yield bench.row(
            "SnapKV scores, 64 queries", [1, f"{h}/{g}", t, d], "kvpress", ours, lambda: theirs.score(layer, x, k, k, None, unrotated), 0.5, 0.1
        )  # fmt: skip


def rollout(bench: Bench) -> Iterator[Row]:
    """One row of the rollout over 12 layers of 12 heads, beside 12 forward passes."""
    t, layers = 32768, 12
    shape = [layers, 12, t, 64]
    with torch.no_grad():
        q, k, v = (bench.draw(1, 12, t, 64) for _ in range(3))
        # Compiled once; on a GPU kernels are compiled for the length, and for layers below the last.
        _rollout(bench, *((t, 2) if bench.device == "cuda" else (300, 2)))()
        forwards = [_seconds(bench, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) for _ in range(3)]
        seconds = _seconds(bench, _rollout(bench, t, layers))
        forwards += [_seconds(bench, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) for _ in range(3)]
    yield bench.of_one(f"{ROLLOUT}: seconds", shape, "", seconds, None)
    ratio = seconds / (layers * statistics.median(forwards))
    yield bench.of_one(ROLLOUT, shape, "12 SDPA forwards", ratio, None, 1.0)


def rollout_memory(bench: Bench) -> Iterator[Row]:
    """What a row of the rollout takes: as much a token at every length."""
    for t in (8192, 32768):
        yield bench.of_one(
            f"{ROLLOUT}: memory", [12, 12, t, 64], "[h, i, j] of one layer in float32",
            _taken(bench, _rollout, t) / (12 * t * t * 4), None,
        )  # fmt: skip


def _seconds(bench: Bench, call: Callable[[], Any]) -> float:
    start = bench.clock()
    call()
    return bench.clock() - start


PARTS = {"comparisons": comparisons, "head_mean": head_mean, "indexer": indexer, "memory": memory, "spans": spans, "snapkv": snapkv, "rollout": rollout, "rollout_memory": rollout_memory}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        numba.load()  # its version is part of every row
    bench = Bench(options.device, options.repeats, options.length)
    path = RESULTS / "relations.json"
    stored = read("relations") if path.exists() else []
    for name in options.parts or PARTS:
        with bench.fastest_peer():
            for result in PARTS[name](bench):
                stored = [
                    r for r in stored if (r.what, r.shape, _kind(r)) != (result.what, result.shape, _kind(result))
                ]
                stored.append(result)
                path.write_text(json.dumps([asdict(r) for r in stored], indent=1, ensure_ascii=False) + "\n")


def _kind(r: Row) -> str:
    return "cuda" if r.device.startswith("NVIDIA") else "cpu"


if __name__ == "__main__":
    main()
