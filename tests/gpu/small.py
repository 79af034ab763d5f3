"""A little of everything on small shapes, for the memory and race checkers of `make test-gpu-checked`.

`small.py part parts [plain]`: one part of so many, so that they can run in parallel. With `plain`, no kernel is warp-specialised:
the compiler passes arguments to specialised warps through shared memory, which the race checker reports as a race.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

import regard
from support import kernel_cases

TYPES = (torch.bfloat16, torch.float32)


def everything(t: int, d: int, mask: regard.Mask | None) -> None:
    q, k, v = (torch.randn(1, 2, t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    W = regard.weights(q, k, mask=mask, engine="triton")
    seen = W.see("lse", "max_score", "entropy", "mean_distance", "received", topk=4, pool=(8, 8), values=v)
    loss = seen.y.float().square().sum() + seen.entropy.sum()
    loss.backward(retain_graph=True)  # without further columns, as warp specialisation needs
    (loss + seen.received.square().sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def main(part: int, parts: int, plain: str = "") -> None:
    if plain:
        from regard.engines.triton import tile_config

        tile_config.GLUON.clear()
    torch.manual_seed(0)
    shapes = ((512, 64, None), (512, 128, regard.causal()), (500, 64, regard.causal()), (257, 40, None))
    checks = [partial(everything, *shape) for shape in shapes]
    checks += [partial(kernel_cases.judged, case, "cuda") for case in kernel_cases.pairwise(TYPES)[::6]]
    for ask in checks[part::parts]:
        ask()
    torch.cuda.synchronize()
    print(f"part {part} of {parts}: all answers are right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
