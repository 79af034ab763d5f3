"""Processes that stay: one gloo process each, started once, which run a function on the first n of them together.

A fork server imports PyTorch and the library once for all of them. A case that does not end within its limit is an
error of that case alone: the processes are killed and the next case gets new ones.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Seconds that a case may take on a busy machine.
LIMIT = 180


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def serve(rank: int, size: int, store: str, calls: Any) -> None:
    """The life of one process: run what arrives, answer with its result or its traceback."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    while (call := calls.recv()) is not None:
        world, name, arguments = call
        module, function = name.rsplit(".", 1)
        try:
            torch.manual_seed(0)
            value = getattr(importlib.import_module(module), function)(groups[world], rank, world, *arguments)
            calls.send((True, packed(value)))
        except BaseException:
            calls.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def forking() -> Any:
    """A multiprocessing context whose processes have the heavy modules already."""
    context = multiprocessing.get_context("forkserver")
    # The fork server does not look below tests/, and passes over what it cannot import.
    context.set_forkserver_preload(["pytest", "regard.distributed", "regard.engines.numba.kernels"])
    return context


class RankPool:
    """`size` processes; `run` calls a function ``f(group, rank, world, *arguments)`` on the first `world` of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.context = forking()
        self.workers: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(
                target=serve, args=(rank, self.size, str(Path(self.folder.name) / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, world: int, name: str, *arguments: Any) -> list[Any]:
        """The results of all ranks."""
        if not self.workers:
            self.start()
        for _, calls in self.workers[:world]:
            calls.send((world, name, arguments))
        answers = []
        for rank, (_, calls) in enumerate(self.workers[:world]):
            try:
                answers.append(calls.recv() if calls.poll(LIMIT) else (False, f"rank {rank} did not answer"))
            except EOFError:
                answers.append((False, f"rank {rank} died"))
        if not all(fine for fine, _ in answers):
            self.stop()
            texts = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(answers) if not fine]
            raise AssertionError("\n".join(texts))
        return [unpacked(data) for _, data in answers]

    def stop(self) -> None:
        for process, calls in self.workers:
            calls.close()
            process.kill()
            process.join()
        self.workers = []
        self.folder.cleanup()
