"""The triton engine over two ranks: `rank_triton.py` in Triton's interpreter, `rank_triton.py cuda` on one GPU. Raises where it is wrong.

A process of its own, since Triton asks once, when it is imported, whether it is to interpret. Two ranks on one GPU talk through gloo,
by way of the host's memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0" if "cuda" in sys.argv[1:] else "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import regard
from regard.distributed import Shards, sharded, shards, zigzag

DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
#: Length, size, the shortest piece of keys that travels, and the rows of a strip: on a GPU, too, there are several of each.
N, D, PIECE, ROWS = (75, 16, 16, 32) if DEVICE == "cpu" else (3001, 64, 256, 512)
WORLD = 2
#: What plain float32 may gain by luck: 4 ulp.
ROUNDING = 4 * 2.0**-23
np.seterr(all="ignore")


def answers(W: regard.Weights, v: Tensor, u: Tensor) -> dict[str, Tensor]:
    seen = W.see("lse", "max_score", "entropy", "mean_distance", "received", topk=2, pool=(3, 5), mass=[0], values=v)
    parts = {name: getattr(seen, name) for name in ("y", "lse", "max_score", "entropy", "mean_distance", "received")}
    return parts | {"mass": seen.mass, "top": seen.topk.values, "pool": seen.pool, "a part": W.pool(2, 3, slice(9, 60), slice(5, 50)), "z": W.mT @ u}  # fmt: skip


def gradients(results: dict[str, Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
    sum(t.sin().sum() for t in results.values()).backward()
    return {f"gradient of {name}": t.grad for name, t in zip("qkvu", inputs, strict=True)}


def in_one_process(inputs: list[Tensor]) -> dict[str, Tensor]:
    """The same by the textbook, in the type of the inputs."""
    results = answers(regard.weights(*inputs[:2], mask=regard.causal(), engine="reference"), *inputs[2:])
    return results | gradients(results, inputs)


def rank_of_two(rank: int, store: str, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    shards.SHORTEST_PIECE, sharded.ROWS = PIECE, ROWS
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, N, D).to(device).requires_grad_() for h in (2, 1, 1, 2)]
    rows = zigzag(N, WORLD)[rank]
    index = torch.tensor([n for run in rows for n in run], device=device)
    local = [t.detach()[:, :, index].requires_grad_() for t in inputs]
    mesh = Shards(dist.group.WORLD, rows, exchange="ring", timeout=500)
    got = answers(regard.weights(*local[:2], mask=regard.causal(), mesh=mesh, engine="triton"), *local[2:])
    # What every rank has enters the loss once: the reference has it once, the ranks have it together.
    got |= gradients(got, local)
    plain, exact = in_one_process(inputs), in_one_process([t.detach().double().requires_grad_() for t in inputs])
    for name, t in got.items():
        mine, right = (
            (x if name in ("pool", "a part") else x[:, :, index]).double() for x in (plain[name], exact[name])
        )
        error, allowed = (t.double() - right).norm(), 2 * (mine - right).norm() + ROUNDING * right.norm()
        assert error <= allowed, (
            f"{name}: error {error:.2e}, and twice that of one process without kernels is {allowed:.2e}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of_two, (str(Path(folder) / "store"), DEVICE), nprocs=WORLD)
