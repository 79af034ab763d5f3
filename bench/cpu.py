"""Speed and memory of the core on the CPU: `make bench` writes bench/results/cpu.json.

Each figure is a ratio to a peer in the same run: PyTorch's fused attention (output only), or eager code that stores
the t × t weights and answers the same questions.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

from .rows import Row, merged, ratios, row, write

SHAPES = [(1, 12, 512, 32), (8, 12, 128, 32), (1, 12, 2048, 64), (1, 12, 4096, 64)]
#: Shapes over which PyTorch's attention takes 6, 30 and 300 µs.
SHORT_SHAPES = [(1, 1, 15, 64), (1, 12, 15, 32), (8, 12, 15, 64)]


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The same answers from stored weights, as one writes it by hand."""
    t = q.shape[2]
    s = q @ k.mT / q.shape[-1] ** 0.5
    distance = torch.arange(t)[:, None] - torch.arange(t)
    if causal:
        s = s.masked_fill(distance < 0, -torch.inf)
    w = s.softmax(-1)
    tiles = w.unflatten(3, (64, -1)).sum(4).unflatten(2, (64, -1)).sum(3)
    return (
        w @ v,
        s.logsumexp(-1),
        s.amax(-1),
        torch.special.entr(w).sum(-1),
        w.sum(2),
        (w * distance.abs()).sum(-1),
        tiles,
        *w.topk(8),
    )


def rows_only(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    return regard.weights(q, k, mask=mask).see("lse", "max_score", "entropy", values=v)


def everything(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    names = ("lse", "max_score", "entropy", "received", "mean_distance")
    return regard.weights(q, k, mask=mask).see(*names, topk=8, pool=(64, 64), values=v)


def speed() -> list[Row]:
    figures = []
    for shape in SHAPES:
        for causal in (False, True):
            q, k, v = (torch.randn(shape) for _ in range(3))
            mask = regard.causal() if causal else None
            long = shape[2] >= 2048
            repeats = 9 if long else 41
            kind = " (causal)" if causal else ""

            def sdpa(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            samples = ratios(lambda: rows_only(q, k, v, mask), sdpa, repeats)
            figures.append(
                row(f"output, lse, max, entropy{kind}", shape, "SDPA, output only", samples, 1.25 if long else 1.5, 1.0)
            )
            samples = ratios(lambda: regard.attend(q, k, v, mask=mask), sdpa, repeats)
            figures.append(row(f"attend, output only{kind}", shape, "SDPA", samples, None, 1.0))
            if long:
                samples = ratios(lambda: everything(q, k, v, mask), sdpa, repeats)
                figures.append(row(f"all statistics{kind}", shape, "SDPA, output only", samples, 2.5, 1.7))
                samples = [1 / r for r in ratios(lambda: everything(q, k, v, mask), lambda: eager(q, k, v, causal), 5)]
                figures.append(
                    row(f"all statistics{kind}, times faster", shape, "eager, t × t stored", samples, 3, 4.5, "higher")
                )
            figures.append(_trained(q, k, v, mask, causal, kind, repeats))
            print(*[f"{r.ratio:6.2f}× {r.what} {shape}" for r in figures[-5:]], sep="\n", file=sys.stderr)
    return figures


def double() -> list[Row]:
    """The rows' statistics in float64, by the CPU time of all threads."""
    figures = []
    for shape in SHAPES:
        for causal in (False, True):
            q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
            mask = regard.causal() if causal else None
            samples = ratios(
                lambda: rows_only(q, k, v, mask),
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                5 if shape[2] >= 2048 else 41,
                time.process_time,
            )
            kind = " (causal)" if causal else ""
            what = f"output, lse, max, entropy in float64{kind}"
            figures.append(row(what, shape, "SDPA in float64, output only", samples, 1.5, 1.2))
    return figures


def natural(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    W = regard.weights(q, k, mask=mask)
    return W @ v, W.lse(), W.entropy()


def host() -> list[Row]:
    """CPU time of one short question above that of PyTorch's attention, in microseconds."""
    figures = []
    for shape in SHORT_SHAPES:
        q, k, v = (torch.randn(shape) for _ in range(3))
        mask = regard.causal()
        for what, ask in (("output, lse, max, entropy", rows_only), ("W @ v, W.lse(), W.entropy()", natural)):
            samples = [
                _microseconds(lambda: ask(q, k, v, mask))
                - _microseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
                for _ in range(5)
            ]
            figures.append(row(f"host, {what}: µs more", shape, "SDPA, output only", samples, 120, 50))
    return figures


def _microseconds(run: Any, times: int = 100) -> float:
    """CPU time of one call: the least of 9 rounds, since other processes only add to it."""
    rounds = []
    for _ in range(9):
        start = time.process_time()
        for _ in range(times):
            run()
        rounds.append((time.process_time() - start) / times * 1e6)
    return min(rounds)


def _trained(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, kind: str, repeats: int) -> Row:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    flowing = torch.randn(v.shape)
    samples = ratios(
        lambda: regard.weights(q, k, mask=mask).see("lse", "max_score", "entropy", values=v).y.backward(flowing),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(flowing),
        max(5, repeats // 3),
    )
    return row(f"forward + backward{kind}", list(q.shape), "SDPA", samples, 1.4, 1.0)


def masked() -> list[Row]:
    """`attend` where PyTorch's own attention could be given a dense mask instead."""
    figures = []
    for shape in ((8, 12, 128, 32), (1, 12, 2048, 64)):
        q, k, v = (torch.randn(shape) for _ in range(3))
        b, h, t, d = shape
        lengths = torch.randint(t // 2, t + 1, (b,))
        cells = torch.rand(t, t) > 0.3
        near = (torch.arange(t)[:, None] - torch.arange(t)).abs() <= 32
        fewer = torch.randn(2, b, h // 4, t, d)
        cases = {
            "padding": (regard.padding(lengths), (torch.arange(t) < lengths[:, None])[:, None, None]),
            "bool tensor": (cells, cells),
            "window(32, 32)": (regard.window(32, 32), near),
        }
        for name, (mask, dense) in cases.items():
            samples = ratios(
                lambda: regard.attend(q, k, v, mask=mask),
                lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
                15,
            )
            figures.append(row(f"attend, {name}", shape, "SDPA with a dense mask", samples, None, 1.0))
        samples = ratios(
            lambda: regard.attend(q, *fewer), lambda: F.scaled_dot_product_attention(q, *fewer, enable_gqa=True), 15
        )
        figures.append(row("attend, 4 heads share keys", shape, "SDPA, enable_gqa", samples, None, 1.0))
    return figures


def windowed() -> Row:
    q, k, v = (torch.randn(1, 4, 32768, 64) for _ in range(3))
    mask = regard.causal() & regard.window(256, 0)
    samples = ratios(
        lambda: rows_only(q, k, v, mask), lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3
    )
    return row("window(256, 0): output, lse, max, entropy", list(q.shape), "SDPA causal", samples, 0.1, 0.03)


def growth() -> list[Row]:
    seconds, kilobytes = [], []
    for t in (2048, 4096, 8192):
        q, k, v = (torch.randn(1, 4, t, 64) for _ in range(3))
        everything(q, k, v, None)
        seconds.append(min(_timed(lambda: everything(q, k, v, None)) for _ in range(5)))
        kilobytes.append(_peak("ours", 4, t))
    in_time = [b / a for a, b in pairwise(seconds)]
    in_memory = [b / a for a, b in pairwise(kilobytes)]
    return [
        row("all statistics, time when t doubles", "1×4×t×64, t 2048 → 8192", "itself at t/2", in_time, 4.3, None),
        row("all statistics, memory when t doubles", "1×4×t×64, t 2048 → 8192", "itself at t/2", in_memory, 2.1, None),
    ]


def _timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def memory() -> Row:
    ours, theirs = _peak("ours", 12, 8192), _peak("eager", 12, 8192)
    return row(
        "output, lse, max, entropy: peak memory above the inputs",
        [1, 12, 8192, 64],
        "eager, t × t stored",
        [ours / theirs],
        0.04,
        0.01,
    )


def _peak(who: str, heads: int, t: int) -> float:
    """Peak memory above the inputs in kB, in a process of its own."""
    command = [sys.executable, "-m", "bench.cpu", "--peak", who, str(heads), str(t)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _peak_here(who: str, heads: int, t: int) -> float:
    small = [torch.randn(1, heads, 64, 64) for _ in range(3)]
    q, k, v = (torch.randn(1, heads, t, 64) for _ in range(3))
    run = {"ours": lambda x: rows_only(*x, None), "eager": lambda x: _eager_rows(*x)}[who]
    run(small)  # code and kernels are loaded before counting
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _memory("VmRSS")
    run((q, k, v))
    return _memory("VmHWM") - before


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name))


def _eager_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT / q.shape[-1] ** 0.5
    w = s.softmax(-1)
    return w @ v, s.logsumexp(-1), s.amax(-1), torch.special.entr(w).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--peak", nargs=3, metavar=("WHO", "HEADS", "T"), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="PART", help="measure these parts; other rows of the file stay")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak:
        who, heads, t = options.peak
        print(_peak_here(who, int(heads), int(t)))
        return
    parts = {
        "speed": speed, "double": double, "host": host, "masked": masked, "windowed": lambda: [windowed()],
        "growth": growth, "memory": lambda: [memory()],
    }  # fmt: skip
    figures = [figure for name in options.only or parts for figure in parts[name]()]
    write("cpu", merged("cpu", figures) if options.only else figures)
    missed = [r for r in figures if r.verdict() == "limit missed"]
    print(f"{len(missed)} of {len(figures)} figures miss their limit; median of all ratios to SDPA "
          f"{statistics.median(r.ratio for r in figures if r.against.startswith('SDPA')):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
