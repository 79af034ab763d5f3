"""One sequence over several processes: how far its words look, what the favourite one receives, and a gradient.

Every process makes its own part of the queries and keys, and no process ever has all of them. What is printed is the
same for any number of processes.

    pip install ".[fast]"
    python examples/long_sequence.py
    torchrun --nproc-per-node 4 examples/long_sequence.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import regard
from regard.distributed import Shards, zigzag

LENGTH, HEADS, SIZE = int(os.environ.get("LENGTH", "20000")), 2, 32


def features(positions, shift):
    """Queries or keys of these positions, (heads, positions, size): waves, so that near ones are alike."""
    waves = torch.logspace(0, -4, SIZE // 2, dtype=torch.float64)
    turns = positions.double()[:, None] * waves + shift
    x = 3 * torch.cat([turns.cos(), turns.sin()], -1).float()
    return torch.stack([x * (head + 1) for head in range(HEADS)])


def total(x):
    """The sum of a number over all processes."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def main():
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    runs = zigzag(LENGTH, ranks)[rank]  # equal work under a causal mask
    here = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    q, k = features(here, 0.0).requires_grad_(), features(here, 0.5).requires_grad_()
    shards = Shards(init_device_mesh("cpu", (ranks,)), rows=runs) if ranks > 1 else None

    W = regard.weights(q, k, mask=regard.causal(), mesh=shards)
    distance = W.mean_distance()  # of this process's rows
    received = W.received().detach()  # of its keys
    distance.sum().backward()  # the loss of all processes is the sum of theirs

    most = received[0].max()
    if ranks > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    last_row = W.detach()[0, LENGTH - 1, [0, LENGTH - 1]]  # on every process: the one that has the row computes it
    mean, change = total(distance.detach().sum()) / (HEADS * LENGTH), total(q.grad.double().square().sum()).sqrt()
    if rank == 0:
        print(f"{LENGTH:,} words, {HEADS} heads: a word looks {float(mean):.1f} words back")
        print(f"the word that is looked at most in head 0 receives {float(most):.2f}")
        print(f"the last word gives the first {float(last_row[0]):.2e} and itself {float(last_row[1]):.2e}")
        print(f"gradient of all queries: {float(change):.3g}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
