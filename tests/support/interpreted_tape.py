"""Replay of a loss of an indexer and its backward in Triton's interpreter: python tests/support/interpreted_tape.py.

A launch is recorded as on a GPU and replayed at other addresses, on tensors that are made there. Exit code 1 if a replayed call
differs from a direct one by a bit, or if nothing was replayed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import regard
from regard.core.stats import Request
from regard.engines import replay
from regard.engines.triton import indexer_pass, kernel_inputs, mask_args, tile_config
from regard.losses import index_weights, indexer

REPLAYED: list[str] = []


def tensor_at(x: Tensor, address: int) -> Tensor:
    """A tensor like x at another address."""
    count = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    memory = (ctypes.c_char * (count * x.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=x.dtype, count=count).as_strided(x.shape, x.stride())


def rebound(value: Any, tensors: dict[int, Tensor]) -> Any:
    """An argument of a kernel with other tensors."""
    if isinstance(value, tuple):
        parts = [rebound(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return tensors.get(id(value), value)


def launch(
    kernel: Any, key: Any, tensors: list[Tensor | None], prepare: Callable[[], tuple[int, dict[str, Any]]]
) -> None:
    programs, arguments = prepare()
    with _disable_current_modes():  # the interpreter copies tensors, which is no work of the host
        kernel[(programs,)](**arguments)

    def start(at: list[int]) -> None:
        REPLAYED.append(kernel.__name__)
        there = {id(x): tensor_at(x, at[n]) for n, x in enumerate(tensors) if x is not None and x.numel()}
        kernel[(programs,)](**{name: rebound(value, there) for name, value in arguments.items()})

    replay.record_launch(start, tensors)


def answers(seed: int, enabled: bool, t: int = 70) -> list[Tensor]:
    """The loss and its gradients; the teacher's norm is at hand."""
    torch.manual_seed(seed)
    replay.enabled = enabled
    q, k = torch.randn(1, 4, t, 16), torch.randn(1, 4, t, 16)
    index = [torch.randn(shape).requires_grad_() for shape in ((1, 3, t, 8), (1, t, 8), (1, t, 3))]
    teacher = regard.weights(q, k, mask=regard.causal())
    s = (q @ k.mT / 4).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
    m = s.amax(-1)
    norm = torch.stack([m, (s - m.unsqueeze(-1)).exp().sum(-1)], -1)
    teacher._cache.put(teacher._leaves, Request(("norm",)), {"norm": norm})
    loss = indexer(teacher, index_weights(*index, regard.causal()))
    return [loss.detach(), *torch.autograd.grad(loss * (seed + 1), index)]


def main() -> int:
    tile_config.forced["any"] = tile_config.Config(16, 32, 4, 1, tma=False)
    tile_config.record_launch = lambda start, tensors: None  # a forced configuration would end the recording
    indexer_pass.STRIP, indexer_pass.BLOCK = 3000, 32
    for module in (indexer_pass, kernel_inputs, mask_args):
        module.launch = launch
    replay.DEVICES = ("cpu",)
    wrong = 0
    for seed in range(4):
        right = answers(seed, enabled=False)
        for n, (got, want) in enumerate(zip(answers(seed, enabled=True), right, strict=True)):
            if not torch.equal(got, want):
                wrong += 1
                print(f"call {seed}, answer {n}: off by {float((got - want).abs().max())}")
    if missing := {"indexer_kernel", "merge_kernel", "cells_kernel", "queries_kernel", "keys_kernel"} - {*REPLAYED}:
        print(f"not replayed: {missing}")
    return int(wrong > 0 or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
