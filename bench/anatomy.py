"""Where the time of a question goes on this GPU: every kernel's own time, and what the host needs to ask.

PYTHONPATH=src python3 -m bench.anatomy
"""

from __future__ import annotations

import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import regard

SHAPES = [(4, 16, 4096, 128), (2, 16, 16384, 128), (4, 32, 4096, 64), (1, 16, 16384, 64)]
TIMES = 10


def kernels(ask) -> dict[str, float]:
    """Milliseconds of each kernel in one call."""
    ask(), ask()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(TIMES):
            ask()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in watched.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:48]] += event.device_time / 1000 / TIMES
    return times


def host(ask) -> float:
    """Milliseconds that the host needs, the device not waited for."""
    ask()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(TIMES):
        ask()
    needed = (time.perf_counter() - begin) / TIMES
    torch.cuda.synchronize()
    return needed * 1000


def tell(what: str, ask, peer: float) -> None:
    times = kernels(ask)
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda x: -x[1])[:7])
    print(f"  {what:18s} {sum(times.values()):.3f} ms = {sum(times.values()) / peer:.3f}x, host {host(ask):.3f} ms: {parts}", flush=True)  # fmt: skip


def main() -> None:
    for shape in SHAPES:
        for causal in (False, True):
            q, k, v, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
            mask = regard.causal() if causal else None

            def see(*names, q=q, k=k, v=v, mask=mask, **more):
                return regard.weights(q, k, mask=mask, engine="triton").see(*names, values=v, **more)

            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                peer = sum(kernels(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)).values())
            print(shape, "causal" if causal else "full", f"cuDNN {peer:.3f} ms", flush=True)
            tell("rows", lambda: see("lse", "max_score", "entropy"), peer)
            tell("rows, columns", lambda: see("lse", "max_score", "entropy", "received", pool=(64, 64)), peer)
            tell("top-8", lambda: see(topk=8), peer)
            tell("self", lambda: regard.weights(q, mask=mask, engine="triton").see("entropy", values=q), peer)
            live = [x.clone().requires_grad_() for x in (q, k, v)]

            def train(live=live, dy=dy, mask=mask):
                seen = regard.weights(*live[:2], mask=mask, engine="triton").see("lse", "entropy", values=live[2])
                torch.autograd.grad((seen.y, seen.entropy), live, (dy, torch.ones_like(seen.entropy)))

            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                theirs = sum(kernels(lambda: torch.autograd.grad(F.scaled_dot_product_attention(*live, is_causal=causal), live, dy)).values())  # fmt: skip
            tell("forward + backward", train, theirs)


if __name__ == "__main__":
    main()
