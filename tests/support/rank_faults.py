"""Three processes, one with a fault, and the error that each of the others gets."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import regard
from regard.distributed import RankError, Shards
from support.rank_pool import forking

WORLD, CULPRIT, TIMEOUT = 3, 1, 8.0
#: What the culprit's similarity does, beside computing.
FAULT = {"now": None}


def similarity(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The dot product, with a fault inside."""
    if (fault := FAULT["now"]) is not None:
        fault()
    return q @ k.mT


def _raise() -> None:
    raise ArithmeticError("this key is too far away")


IN_THE_MIDDLE = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "is interrupted": lambda: signal.raise_signal(signal.SIGINT),
    "raises": _raise,
}


class Outcome(NamedTuple):
    """How it ended for one rank: the name of the error, its text, and after how many seconds."""

    error: str
    text: str
    seconds: float


def live(rank: int, store: Any, fault: str, pipe: Any) -> None:
    """The life of one rank."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores interrupts
    at = dist.TCPStore(*store, is_master=False) if isinstance(store, tuple) else dist.FileStore(store, WORLD)
    dist.init_process_group("gloo", store=at, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    dist.barrier()
    shards = Shards(dist.group.WORLD, timeout=TIMEOUT)
    q = torch.randn(2, 6, 4)
    W = regard.weights(q, score=regard.Similarity(similarity), mesh=shards)
    W.lse()
    pipe.send("ready")
    if pipe.recv() != "go":  # the parent closes the store here
        return
    begin = time.monotonic()
    try:
        if rank == CULPRIT and fault == "leaves early":
            return
        if rank == CULPRIT and fault == "has too little memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**25
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if rank == CULPRIT:
            FAULT["now"] = IN_THE_MIDDLE.get(fault)
        if fault == "has a closed store":
            regard.weights(q, mesh=shards)
        elif fault == "has too little memory":
            W.pool(6000, 6000)
        elif fault == "takes a head that is not there" and rank == CULPRIT:
            W[9]  # others, which take one that is there, say nothing to each other
        elif fault == "takes a head that is not there":
            W = W[0]
            time.sleep(1.5 * TIMEOUT)
            W.entropy()
        else:
            W.entropy()
        outcome = Outcome("nothing", "", 0.0)
    except (RankError, KeyboardInterrupt) as error:
        outcome = Outcome(type(error).__name__, str(error), time.monotonic() - begin)
    pipe.send(outcome)


def outcomes(fault: str) -> tuple[list[Outcome | None], list[int | None]]:
    """What each rank raised (None: it did not live to tell), and how its process ended; None for one that is left."""
    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = ("127.0.0.1", server.port) if fault == "has a closed store" else str(Path(folder) / "store")
        pipes = [context.Pipe() for _ in range(WORLD)]
        processes = [context.Process(target=live, args=(rank, store, fault, pipes[rank][1])) for rank in range(WORLD)]
        try:
            for process in processes:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            for ours, _ in pipes:
                assert ours.poll(120), "a rank did not become ready"
                assert ours.recv() == "ready"
            if fault == "has a closed store":
                del server
            for ours, _ in pipes:
                ours.send("go")
            # The culprit last: it may be hanging, and has had its time when the others end.
            order = [*(rank for rank in range(WORLD) if rank != CULPRIT), CULPRIT]
            by_rank = {rank: _outcome_of(pipes[rank][0], 1 if rank == CULPRIT else 4 * TIMEOUT) for rank in order}
            ends = [by_rank[rank] for rank in range(WORLD)]
            for process, end in zip(processes, ends, strict=True):
                process.join(20 if end is not None else 1)
            return ends, [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _outcome_of(pipe: Any, seconds: float) -> Outcome | None:
    try:
        return pipe.recv() if pipe.poll(seconds) else None
    except EOFError:
        return None
