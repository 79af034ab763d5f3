"""DTensor cases for a `RankPool` of 4 processes: what each rank computes, beside the answer of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard
from regard.distributed import RankError, Shards
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


def questions(group: Any, rank: int, world: int, how: str) -> dict[str, tuple[Tensor, Tensor]]:
    """For every question about rows, its gradient and two losses: those of DTensors, gathered, and of one process."""
    mesh = square_mesh() if world == 4 else mesh_of(group, world)
    placements = {"batch twice": [Shard(0), Shard(0)], "heads and sequence": [Shard(1), Shard(2)]}.get(how)
    placements = placements or PLACEMENTS[how]
    torch.manual_seed(7)
    full = [torch.randn(5, 4, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    parts = [distribute_tensor(t.detach().clone(), mesh, placements).requires_grad_() for t in full]
    results = []
    for q, k in (parts, full):
        W, other = regard.weights(q, k, mask=regard.causal()), regard.weights(k, mask=regard.causal())
        results.append({
            "kl": W.kl(other), "offset": W.offset_mass(1), "histogram": W.distance_histogram([0, 1, 4]),
            "variance": W.distance_variance(), "induction": W.induction_mass([n % 3 for n in range(9)]),
            "segments": W.segment_mass([slice(0, 3), [4]]), "of rows": W.segment_mass([[0]], rows=[slice(1, 8)]),
            "pool": W.pool(2, 3, by="max"), "blocks": W.pool_blocks(4, 4, by="lse"), "cover": W.cover(0.7, 3, 3),
            "floor": regard.losses.entropy_floor(W, 3.0), "clip": regard.losses.clip_factors(W, 0.1),
            "u @ W": q.mT @ W,
        })  # fmt: skip
        loss = sum(torch.where(t == -torch.inf, 0, t).sin().sum() for t in results[-1].values() if t.requires_grad)
        loss.backward()
    got, want = results
    assert all(isinstance(t, DTensor) for t in got.values())
    pairs = {name: (t.full_tensor().detach(), want[name].detach()) for name, t in got.items()}
    return pairs | {f"gradient {n}": (t.grad.full_tensor(), full[n].grad) for n, t in enumerate(parts)}


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
        elif what in ("values of one rank", "vectors of one rank", "keys of one rank"):
            full = torch.randn(1, 2, 5, 4)
            q = distribute_tensor(full, mesh, [Shard(2)])
            odd = full if rank == 1 else q
            if what == "keys of one rank":
                regard.weights(q, odd)
            else:
                W = regard.weights(q)
                _ = W @ odd if what == "values of one rank" else W.mT @ odd
        elif what == "a mask that is a DTensor":
            cells = torch.ones(5, 5, dtype=torch.bool)
            mask = distribute_tensor(cells, mesh, [Replicate()])
            regard.weights(distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(2)]), mask=mask)
        elif what == "positions of their own":
            q = distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(2)])
            regard.weights(q, mesh=Shards(mesh, rows=[range(5)] if rank == 1 else None))
        elif what == "another mesh":
            q = distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(2)])
            regard.weights(q, mesh=Shards(group, timeout=20)).entropy()  # the group of its own axis
            regard.weights(q, mesh=Shards(dist.group.WORLD, timeout=20))
        elif what == "a mesh of another kind":
            regard.weights(distribute_tensor(torch.randn(4, 2, 5, 4), mesh, [Shard(0)]), mesh="cpu")
        elif what == "heads together":
            regard.kv.h2o(regard.weights(distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(1)])))
        elif what == "rows of a sharded sequence":
            regard.weights(distribute_tensor(torch.randn(1, 2, 5, 4), mesh, [Shard(2)])).rows(slice(0, 2))
        elif what == "one of a sharded batch":
            regard.weights(distribute_tensor(torch.randn(4, 2, 5, 4), mesh, [Shard(0)]))[0]
    except (RankError, ValueError, TypeError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""
