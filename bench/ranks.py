"""A sequence over 4 processes on this CPU, against one process: CPU time, tensor bytes and bytes sent.

python -m bench.ranks      into bench/results/ranks.json, some minutes
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
from regard.distributed import Machine, Shards, zigzag
from regard.distributed.sharded import ROWS

from .rows import Row, row, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

RANKS, SIZE, TOPK = 4, 64, 8
STATISTICS = ("lse", "max_score", "peak", "entropy", "received", "mean_distance")

#: Name → length and mask. Adjacent positions under the window, zig-zag under the causal mask.
CASES = {"window(4096, 0)": (2**20, regard.window(4096, 0)), "causal": (2**17, regard.causal())}


def see(W: regard.Weights) -> Any:
    return W.see(*STATISTICS, topk=TOPK, pool=(64, 64), mass=[0])


def measured(rank: int, world: int, case: str, group: Any, live: bool) -> dict[str, float]:
    """One run on this rank: its CPU seconds, and with `live` its tensor bytes (counting takes time of its own)."""
    from support.live_tensors import LiveTensors

    n, mask = CASES[case]
    rows = [range(rank * n // world, (rank + 1) * n // world)] if case != "causal" else zigzag(n, world)[rank]
    torch.manual_seed(rank)
    q, k = (torch.randn(1, sum(map(len, rows)), SIZE) for _ in range(2))
    mesh = None if world == 1 else Shards(group, rows, timeout=1000)
    counting = LiveTensors()
    counting.count(q, k)
    began, wall = time.process_time(), time.perf_counter()
    if live:
        with counting:
            see(regard.weights(q, k, mask=mask, mesh=mesh))
        return {"peak": counting.peak, "inputs": 2 * q.nbytes, "block": k.nbytes}
    W = regard.weights(q, k, mask=mask, mesh=mesh)
    see(W)
    sent = 0 if world == 1 else W._plan.ranks.bytes_sent
    return {"cpu": time.process_time() - began, "wall": time.perf_counter() - wall, "sent": sent, "keys": k.nbytes}


def serve(rank: int, world: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    see(regard.weights(torch.randn(1, 512, SIZE), mask=regard.causal()))  # compiles or loads the kernels
    for case in CASES:
        for live in (False, True):
            # One process alone holds all of the rows: its bytes are not those of a rank.
            numbers = None if live and world == 1 else measured(rank, world, case, dist.group.WORLD, live)
            results.put((case, live, rank, numbers))
    if world > 1:
        results.put(("link", False, rank, {"bandwidth": bandwidth(rank)}))
    dist.barrier()
    dist.destroy_process_group()


def bandwidth(rank: int) -> float:
    """Bytes a second between two neighbours, both ways at once."""
    out, into = torch.zeros(2**22), torch.zeros(2**22)
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        peers = [dist.P2POp(dist.isend, out, rank ^ 1), dist.P2POp(dist.irecv, into, rank ^ 1)]
        for work in dist.batch_isend_irecv(peers):
            work.wait()
        best = min(best, time.perf_counter() - began)
    return out.nbytes / best


def gathered(world: int) -> dict[tuple[str, bool], list[dict[str, float]]]:
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (world, str(Path(folder) / "store"), results), nprocs=world)
    by_case: dict[tuple[str, bool], list[dict[str, float]]] = {}
    while not results.empty():
        case, live, _, numbers = results.get()
        if numbers is not None:
            by_case.setdefault((case, live), []).append(numbers)
    return by_case


def rows_of(one: Any, several: Any) -> list[Row]:
    rows = []
    for case, (n, mask) in CASES.items():
        shape = f"1×{n}×{SIZE}, {case}"
        alone, ranks, live = one[case, False][0], several[case, False], several[case, True]
        cpu = sum(r["cpu"] for r in ranks) / alone["cpu"]
        rows.append(row(f"CPU time of {RANKS} ranks, all statistics", shape, "one process", [cpu], 1.15, None))
        held = [r["peak"] / (r["inputs"] + r["block"]) for r in live]
        rows.append(row("tensor bytes of a rank", shape, "inputs + keys of one rank", [max(held)], 1.3, None))
        sent = [r["sent"] / r["keys"] for r in ranks]
        rows.append(row("bytes that a rank sends", shape, "its keys", [max(sent)], None, None))
        # Rates of one process; ranks share two cores, so that their wall time is that of the CPU over the cores.
        rates = {"forward": 1.0, "second_pass": 1.0, "backward": 1.0, "memory": 1e12, "memory_bandwidth": 1e30}
        probe = Machine("", **rates, bandwidth=1e30, latency=0.0)
        options = {"mask": mask, "values": False, "second_pass": True, "itemsize": 4}
        operations = regard.cost((1, 1, 1, n, SIZE), 1, machine=probe, **options).operations
        rate = operations / alone["cpu"]
        link = min(r["bandwidth"] for r in several["link", False])
        here = Machine("", rate, rate, rate, 1e12, link, 1e-4, 1e10, rows=ROWS)
        predicted = regard.cost((1, 1, 1, n, SIZE), (1, 1, RANKS), machine=here, topk=TOPK, **options)
        busiest = max(r["cpu"] for r in ranks)
        rows.append(
            row(
                "CPU time that `regard.cost` says",
                shape,
                "the busiest rank's",
                [predicted.computing / busiest],
                None,
                None,
            )
        )
        held = [predicted.memory / r["peak"] for r in live]
        rows.append(row("memory that `regard.cost` says", shape, "tensor bytes of a rank", [min(held)], None, None))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)  # as every process that is measured
    write("ranks", rows_of(gathered(1), gathered(RANKS)))
