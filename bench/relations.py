"""Two matrices, many heads, many spans: `python -m bench.relations` writes bench/results/relations.json, on a GPU with --device cuda.

Ratios to PyTorch's fused attention of the first matrix, to the pooled map, or to how a published library computes the same. The
figures of the other device stay in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import chains, kv, losses

from .rows import RESULTS, Row, ratios, read, row


class Bench:
    """Where and in which type is measured, and how long."""

    def __init__(self, device: str, repeats: int, t: int) -> None:
        self.device, self.repeats, self.t = device, repeats, t
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.name = torch.cuda.get_device_name() if device == "cuda" else ""

    def draw(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).requires_grad_(grad)

    def clock(self) -> float:
        if self.device == "cuda":
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

    def of_one(self, what: str, shape: Any, against: str, value: float, must: float | None) -> Row:
        print(f"{value:8.3f} {what} {shape}", file=sys.stderr, flush=True)
        return row(what, shape, against, [value], must, None, device=self.name)


def comparisons(bench: Bench) -> Iterator[Row]:
    """kl of two matrices, forward, and with gradients of both sides."""
    for causal in (False, True):
        shape = (1, 2, bench.t, 128) if bench.device == "cpu" else (4, 16, bench.t, 128)
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
    if bench.device == "cuda":
        yield _indexer_memory(bench)


def _indexer_memory(bench: Bench) -> Row:
    t = 32768
    _, loss, qkv = _indexer(bench, t)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss().backward()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    return bench.of_one(
        "indexer loss, forward + backward: memory (causal)", [1, 16, t, 128], "[b, h, i, j] in float32",
        taken / (16 * t * t * 4), 0.01,
    )  # fmt: skip


def spans(bench: Bench) -> Iterator[Row]:
    """Segments and block maps beside the pooled map."""
    q, k = (bench.draw(1, 4 if bench.device == "cpu" else 16, bench.t, 128) for _ in range(2))
    shape, mask = list(q.shape), regard.causal()
    segments = torch.arange(bench.t, device=bench.device) * 64 // bench.t

    def pool() -> Tensor:
        return regard.weights(q, k, mask=mask).pool(64, 64)

    with torch.no_grad():
        yield bench.row(
            "64 segments (causal)", shape, "the pooled map", lambda: regard.weights(q, k, mask=mask).segment_mass(segments), pool, 1.2, 1.0
        )  # fmt: skip
        for by in ("max", "lse"):
            yield bench.row(
                f"blocks by {by} (causal)", shape, "the pooled map",
                lambda: regard.weights(q, k, mask=mask).pool(64, 64, by=by), pool, 1.2, 1.0,
            )  # fmt: skip


def snapkv_as_kvpress(q: Tensor, k: Tensor, window: int, kernel: int = 5) -> Tensor:
    """SnapKV's scores in the steps that kvpress takes: keys repeated for every head, a softmax over all weights of the window."""
    b, h, _, d = q.shape
    groups, j = k.shape[1], k.shape[2]
    keys = k[:, :, None].expand(b, groups, h // groups, j, d).reshape(b, h, j, d)
    s = q[:, :, -window:] @ keys.transpose(2, 3) / d**0.5
    s += torch.triu(torch.ones_like(s) * float("-inf"), diagonal=j - window + 1)
    w = s.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :-window]
    scores = F.avg_pool1d(w.mean(-2), kernel, stride=1, padding=kernel // 2)
    scores = scores.view(b, groups, h // groups, j - window).mean(2)
    return F.pad(scores, (0, window), value=scores.max().item() + 1)


def snapkv(bench: Bench) -> Iterator[Row]:
    """Scores of the keys of a cache: 64 queries over 32,768 keys, 8 key heads for 32 query heads."""
    t, window = 32768, 64
    k = bench.draw(1, 8, t, 128)
    q = bench.draw(1, 32, window, 128)  # kvpress projects the last queries alone, too

    def ours() -> Tensor:
        return kv.snapkv(regard.weights(q, k, mask=regard.causal(), align="end"), window)

    with torch.no_grad():
        yield bench.row(
            "SnapKV scores, 64 queries", [1, "32/8", t, 128], "the steps of kvpress", ours, lambda: snapkv_as_kvpress(q, k, window), 0.5, 0.1
        )  # fmt: skip


def rollout(bench: Bench) -> Iterator[Row]:
    """One row of the rollout over 12 layers of 12 heads, beside 12 forward passes."""
    t = 32768
    layers = [regard.weights(bench.draw(1, 12, t, 64), mask=regard.causal()) for _ in range(12)]
    q, k, v = (bench.draw(1, 12, t, 64) for _ in range(3))
    with torch.no_grad():
        start = bench.clock()
        for _ in range(12):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = bench.clock()
        chains.rollout_rows(layers, [t - 1])
        seconds, forwards = bench.clock() - middle, middle - start
    yield bench.of_one("rollout, 12 layers of 12 heads, one row: seconds", [12, 12, t, 64], "", seconds, None)
    yield bench.of_one(
        "rollout, 12 layers of 12 heads, one row", [12, 12, t, 64], "12 SDPA forwards", seconds / forwards, None
    )


PARTS = {"comparisons": comparisons, "head_mean": head_mean, "indexer": indexer, "spans": spans, "snapkv": snapkv, "rollout": rollout}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    bench = Bench(options.device, options.repeats, options.length)
    path = RESULTS / "relations.json"
    stored = read("relations") if path.exists() else []
    for name in options.parts or PARTS:
        for result in PARTS[name](bench):
            stored = [r for r in stored if (r.what, r.shape, _kind(r)) != (result.what, result.shape, _kind(result))]
            stored.append(result)
            path.write_text(json.dumps([asdict(r) for r in stored], indent=1, ensure_ascii=False) + "\n")


def _kind(r: Row) -> str:
    return "cuda" if r.device.startswith("NVIDIA") else "cpu"


if __name__ == "__main__":
    main()
