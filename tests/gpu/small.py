"""A little of everything on small shapes, for the memory and race checkers of `make test-gpu-checked`."""

from __future__ import annotations

import torch

import cover
import regard

TYPES = (torch.bfloat16, torch.float32)


def everything(t: int, d: int, mask: regard.Mask | None) -> None:
    q, k, v = (torch.randn(1, 2, t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    W = regard.weights(q, k, mask=mask, engine="triton")
    seen = W.see("lse", "max_score", "entropy", "reach", "received", top=4, pool=(8, 8), values=v)
    loss = seen.y.float().square().sum() + seen.entropy.sum()
    loss.backward(retain_graph=True)  # without further columns, as warps are parted for
    (loss + seen.received.square().sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def main() -> None:
    torch.manual_seed(0)
    for case in cover.pairwise(TYPES)[::6]:
        cover.judged(case, "cuda")
    for t, d, mask in ((1024, 64, None), (1024, 128, regard.causal()), (1000, 64, regard.causal()), (257, 40, None)):
        everything(t, d, mask)
    torch.cuda.synchronize()
    print("all answers are right")


if __name__ == "__main__":
    main()
