"""DTensor cases for a `RankPool` of 4 processes: what each rank computes, beside the answer of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard
from regard.distributed import RankError
from support.judge import library_answers_at_once

MESHES: dict[Any, Any] = {}


def mesh_of(group: Any, world: int) -> Any:
    if world not in MESHES:
        MESHES[world] = dist.DeviceMesh.from_group(group, "cpu")
    return MESHES[world]


def square_mesh() -> Any:
    """Two by two: all processes of the pool take part."""
    if "square" not in MESHES:
        MESHES["square"] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    return MESHES["square"]


PLACEMENTS = {"batch": [Shard(0)], "heads": [Shard(1)], "sequence": [Shard(2)], "replicated": [Replicate()]}


def answers(group: Any, rank: int, world: int, how: str, shape: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """For every answer and gradient: that of DTensors, gathered, and that of one process."""
    mesh = square_mesh() if how == "batch and sequence" else mesh_of(group, world)
    placements = [Shard(0), Shard(2)] if how == "batch and sequence" else PLACEMENTS[how]
    b, h, g, n, d = shape
    torch.manual_seed(7)
    full = [torch.randn(b, heads, n, d, requires_grad=True) for heads in (h, g, g, h)]
    slopes = torch.rand(h, requires_grad=True)
    # Documents and lengths differ between the sequences of the batch: each rank must take its own.
    mask = regard.causal() & regard.padding(torch.arange(n, n - b, -1).clamp(min=1))
    shared = slopes.detach().clone().requires_grad_()
    parts = [distribute_tensor(t.detach().clone(), mesh, placements).requires_grad_() for t in full]
    got, want = (
        library_answers_at_once(W := regard.weights(q, k, mask=mask, score=regard.ScaledDot().alibi(m)), v)
        | {"z": W.mT @ u, "cells": W[..., : n // 2 + 1, [0, n - 1]]}
        for (q, k, v, u), m in ((parts, shared), (full, slopes))
    )
    for results in (got, want):
        loss = sum(torch.where(t == -torch.inf, 0, t).sin().sum() for t in results.values() if t.is_floating_point())
        loss.backward()
    got |= {f"gradient {place}": t.grad for place, t in enumerate(parts)}
    want |= {f"gradient {place}": t.grad for place, t in enumerate(full)}
    for name, t in got.items():
        assert isinstance(t, DTensor), f"{name} is a {type(t)}"
    pairs = {name: (t.full_tensor().detach(), want[name].detach()) for name, t in got.items()}
    return pairs | {"gradient of slopes": (shared.grad, slopes.grad)}


def refused(group: Any, rank: int, world: int, what: str) -> tuple[str, str]:
    """The name and the text of the error."""
    mesh = mesh_of(group, world)
    try:
        if what == "another split":
            q = DTensor.from_local(torch.randn(1, 2, (40, 20, 1)[rank], 4), mesh, [Shard(2)])
            regard.weights(q).entropy()
        elif what == "heads without their keys":
            q, k = (distribute_tensor(torch.randn(1, n, 5, 4), mesh, [Shard(1)]) for n in (6, 3 if world == 2 else 2))
            regard.weights(q, k).entropy()
        elif what == "sharded sizes":
            regard.weights(distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(3)])).entropy()
        elif what == "plain values":
            regard.weights(distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(2)])) @ torch.randn(1, 2, 5, 4)
        elif what == "one of a sharded batch":
            regard.weights(distribute_tensor(torch.randn(4, 2, 5, 4), mesh, [Shard(0)]))[0]
    except (RankError, ValueError, TypeError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""
