"""One model trained by several processes: each takes some sequences of every batch, and gradients are added up.

Under torchrun every process runs the same command. The first one shows progress and writes the files; the others read
the same data, compute their part of each step and stay equal. A process alone is the same with one part.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Replicas", "choose_device", "joined", "wake"]

BatchPart = TypeVar("BatchPart")


class Replicas:
    """The processes that train together, and this one's place among them.

    Attributes:
        rank: This process.
        size: Number of processes.
        device: Where this one computes.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    @property
    def first(self) -> bool:
        """Whether this process shows progress and writes the files."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as a step calls it: DistributedDataParallel adds gradients up while the backward still runs."""
        if self.size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def own_parts(self, parts: list[tuple[BatchPart, Any]]) -> list[tuple[BatchPart, Any, bool]]:
        """This process's parts of a batch: each with its weight in the backward, and whether gradients travel after it.

        DistributedDataParallel takes the mean over processes, so shares are multiplied by their number. All of them run
        equally many parts: one that has fewer repeats the first with weight 0.
        """
        count = -(-len(parts) // self.size)
        own = parts[self.rank * count : (self.rank + 1) * count]
        own += [(parts[0][0], 0.0)] * (count - len(own))
        return [(part, share * self.size, n == count - 1) for n, (part, share) in enumerate(own)]

    def syncing(self, model: nn.Module, travels: bool) -> contextlib.AbstractContextManager[None]:
        """Exchange gradients after this part if they travel: DistributedDataParallel does it after every backward."""
        if self.size == 1 or travels:
            return contextlib.nullcontext()
        return model.no_sync()  # type: ignore[operator,no-any-return]

    def mean(self, loss: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.size > 1:
            torch.distributed.all_reduce(loss)
            loss = loss / self.size
        return loss

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some process: all must stop after the same step."""
        if self.size == 1:
            return flag
        flags = torch.tensor([float(flag)], device=self.device)
        torch.distributed.all_reduce(flags)
        return bool(flags.item())

    def from_first(self, value: float) -> float:
        """The first process's number, on all of them."""
        if self.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(number, 0)
        return float(number.item())

    def finish(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        """The end of a run: no process returns before the first has written its files; a failed one does not wait."""
        if kind is None:
            self.barrier()

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            torch.distributed.barrier()


def choose_device(name: str) -> torch.device:
    """A device by name; "auto" is a GPU if there is one."""
    gpu = torch.cuda.is_available()
    if name == "cuda" and not gpu:
        raise ValueError("--device cuda: PyTorch finds no GPU here; use --device cpu or auto.")
    return torch.device("cuda" if gpu and name != "cpu" else "cpu")


def wake(device: torch.device) -> None:
    """Start a GPU in the background, which takes half a second, while a model and its input are read."""
    if device.type == "cuda":
        threading.Thread(target=_first_product, args=(device,), daemon=True).start()


def _first_product(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # the model's first use of the device says what is wrong
        x = torch.ones(16, 16, device=device)
        (x @ x).sum().item()


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Replicas]:
    """The processes of the process group, or of torchrun; this one alone where there is neither."""
    dist = torch.distributed
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        has_others = dist.get_world_size() > 1
        yield Replicas(dist.get_rank(), dist.get_world_size(), _numbered(device, local) if has_others else device)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        here = _numbered(device, local)
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
        try:
            yield Replicas(dist.get_rank(), dist.get_world_size(), here)
        finally:
            dist.destroy_process_group()
    else:
        yield Replicas(0, 1, device)


def _numbered(device: torch.device, local: int) -> torch.device:
    """The GPU of this process: those of one machine have one each."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
