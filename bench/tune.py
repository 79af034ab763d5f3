"""Find the fastest configuration of every kernel for the shapes of the GPU benchmark.

    PYTHONPATH=src python3 -m bench.tune [kernel ...]

Every candidate is compiled in parallel first, checked against the first candidate, then timed. What is fastest belongs
into `regard/engines/triton/tile_config.py`, by hand.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.core.stats import Tiling
from regard.engines.score_grad import ScoreGrad
from regard.engines.triton import backward_pass, forward_pass, tile_config, topk_pass
from regard.engines.triton.tile_config import Config as C

SHAPES = [(4, 16, 4096, 128), (2, 16, 16384, 128), (4, 32, 4096, 64), (1, 16, 16384, 64)]
STATISTICS = ("y", "norm", "max_score", "entropy")

CANDIDATES = {
    "forward": [
        C(128, 128, 4, 2, gluon=True, registers=168), C(128, 64, 8, 3, registers=128), C(64, 128, 4, 2, registers=168),
        C(128, 64, 8, 2, registers=128),
    ],
    "column_pass": [
        C(64, 128, 4, 3), C(64, 128, 4, 3, registers=168), C(64, 128, 4, 3, registers=128), C(64, 128, 4, 2, registers=168),
        C(128, 128, 4, 3, gluon=True), C(128, 128, 4, 3, gluon=True, registers=168),
    ],
    "topk": [C(64, 64, 4, 3), C(64, 128, 4, 3), C(128, 128, 8, 3), C(128, 64, 8, 3), C(64, 128, 8, 3)],
    "topk_lists": [C(64, 64, 4, 3), C(64, 64, 4, 3, registers=128), C(64, 64, 4, 2, registers=128), C(64, 128, 4, 2), C(128, 64, 8, 3)],
    "dkdv": [
        C(32, 128, 8, 3), C(64, 128, 4, 3, gluon=True, registers=168), C(64, 128, 4, 2, gluon=True, registers=168), C(64, 64, 4, 2),
    ],
    "dq": [
        C(64, 64, 4, 2), C(64, 64, 4, 3), C(64, 64, 4, 3, registers=168), C(64, 64, 4, 2, registers=168),
    ],
    "shared_kv": [
        C(128, 64, 8, 3, registers=128), C(128, 128, 4, 4, gluon=True, registers=168), C(64, 128, 4, 3, registers=168),
    ],
}  # fmt: skip


def call(kernel: str, b: int, h: int, t: int, d: int, causal: bool):
    q, k, v, dy = (torch.randn(b, h, t, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    problem = regard.weights(q, k, mask=regard.causal() if causal else None)._factors.problem()
    if kernel == "forward":
        return lambda: forward_pass.forward(problem, STATISTICS, v, None)
    if kernel == "shared_kv":
        own = regard.weights(q, mask=regard.causal() if causal else None)._factors.problem()
        return lambda: forward_pass.forward(own, ("y", "norm", "entropy"), q, None)
    if kernel == "topk":
        return lambda: topk_pass.topk(problem, 8)
    if kernel == "topk_lists":
        tile_maxima = forward_pass.forward(problem, (), None, None, with_tile_maxima=True)["tile_maxima"]
        return lambda: topk_pass.topk(problem, 8, tile_maxima)
    outputs = forward_pass.forward(problem, STATISTICS, v, None)
    if kernel == "column_pass":
        tiling = Tiling(64, 64, 0, t, 0, t)
        return lambda: forward_pass.column_pass(problem, ("received", "pool"), outputs["norm"], None, tiling)
    c = (dy.float() * outputs["y"].float()).sum(-1)
    gradient = ScoreGrad(dy.float(), v.float(), c, torch.randn_like(c), None, dy=dy)
    inputs = backward_pass.backward_inputs(problem, v, outputs["norm"], gradient)
    return (lambda: backward_pass.dkdv_pass(inputs)) if kernel == "dkdv" else (lambda: backward_pass.dq_pass(inputs))


def flat(outputs) -> list[torch.Tensor]:
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    return [
        x
        for x in (outputs if isinstance(outputs, list | tuple) else [outputs])
        if x is not None and x.is_floating_point()
    ]


def compile_one(job) -> tuple:
    kernel, config, d, causal = job
    torch.cuda.set_per_process_memory_fraction(0.05)
    tile_config.forced.clear()
    try:
        ask = call(kernel, 2, 4, 2048, d, causal)
        tile_config.forced[kernel] = config
        ask()
        torch.cuda.synchronize()
        return job, ""
    except Exception as error:
        return job, f"{job}: {type(error).__name__} {str(error)[:100]}"


def timed(ask) -> list[float]:
    return triton.testing.do_bench(ask, warmup=15, rep=50, return_mode="all")


def peers(b, h, t, d, causal) -> dict[str, float]:
    q, k, v = (torch.randn(b, h, t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dy = torch.randn_like(q)
    out = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            ask = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
            out[name] = statistics.median(timed(lambda: ask().detach()))
            y = ask()
            out[name + "_backward"] = statistics.median(
                timed(lambda y=y: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))
            )
    return out


def main(kernels: list[str], patience: float = 45.0) -> None:
    table = []
    jobs = [(n, c, d, m) for n in kernels for c in CANDIDATES[n] for d in (128, 64) for m in (False, True)]
    # A compiler that aborts takes its worker along, and the pool would wait for ever.
    pool, begin = multiprocessing.get_context("spawn").Pool(15), time.time()
    good = set()
    answers = pool.imap_unordered(compile_one, jobs)
    for done in range(len(jobs)):
        try:
            job, complaint = answers.next(timeout=max(1.0, begin + patience - time.time()))
        except multiprocessing.TimeoutError:
            print(f"compiled {done} of {len(jobs)}", flush=True)
            break
        if complaint:
            print(complaint, flush=True)
        else:
            good.add(job)
    pool.terminate()
    for shape in SHAPES:
        for causal in (False, True):
            base = peers(*shape, causal)
            print(shape, "causal" if causal else "full", {n: round(x, 3) for n, x in base.items()}, flush=True)
            for kernel in kernels:
                results = []
                tile_config.forced.clear()
                torch.manual_seed(0)
                ask, first = call(kernel, *shape, causal), None
                for config in CANDIDATES[kernel]:
                    if (kernel, config, shape[3], causal) not in good:
                        continue
                    tile_config.forced[kernel] = config
                    try:
                        outputs = [x.float() for x in flat(ask())]
                        first = outputs if first is None else first
                        error = max(float((a - b).norm() / b.norm()) for a, b in zip(outputs, first, strict=True))
                        samples = timed(ask)
                    except Exception as problem:
                        print("  ", kernel, config, "failed:", type(problem).__name__, str(problem)[:80], flush=True)
                        continue
                    ms = statistics.median(samples)
                    results.append((ms, config, error))
                    table.append({"kernel": kernel, "shape": shape, "causal": causal, "config": vars(config), "ms": ms,
                                  "error": error, "cudnn": base["cudnn"], "cudnn_backward": base["cudnn_backward"]})  # fmt: skip
                results.sort(key=lambda r: r[0])
                for ms, config, error in results:
                    c = config
                    mark = "gluon" if c.gluon else ""
                    print(f"   {kernel:8s} {ms:7.3f} ms {ms / base['cudnn']:.3f}x  {c.block_i},{c.block_j} w{c.warps} s{c.stages} r{c.registers} {mark} err {error:.1e}", flush=True)  # fmt: skip
                del ask, first, outputs
                torch.cuda.empty_cache()
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "tune.json"), "w") as file:
            json.dump(table, file)


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or list(CANDIDATES))
    except Exception:
        traceback.print_exc()
        raise
