"""What the host does while it asks: python -m bench.host, on a machine with a GPU."""

from __future__ import annotations

import cProfile
import pstats
import time

import torch

import regard


def main(times: int = 300) -> None:
    q, k, v = (torch.randn(64, 6, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dy, de = torch.randn_like(q), torch.randn(64, 6, 256, device="cuda")
    mask = regard.causal()

    def rows() -> None:
        with torch.no_grad():
            regard.weights(q, k, mask=mask, engine="triton").see("lse", "max_score", "entropy", values=v)

    def train() -> None:
        seen = regard.weights(q, k, mask=mask, engine="triton").see("lse", "entropy", values=v)
        torch.autograd.grad((seen.y, seen.entropy), (q, k, v), (dy, de))

    for ask in (rows, train):
        ask()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            ask()
        torch.cuda.synchronize()
        print(f"{ask.__name__}: {(time.perf_counter() - begin) / times * 1000:.3f} ms a call")
        watched = cProfile.Profile()
        watched.enable()
        for _ in range(times):
            ask()
        watched.disable()
        pstats.Stats(watched).sort_stats("tottime").print_stats(24)


if __name__ == "__main__":
    main()
