"""From this rank's tensors to the matrix over all ranks: the handshake, the plan of the exchange, the factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..core.api import check_tensors, normalize_inputs
from ..core.problem import Factors
from ..core.pytree import replace_fields
from ..core.types import EngineName
from .checksums import describe
from .exchange import GATHERED_BYTES, Plan
from .handshake import agree, refuse_graphs
from .sharded import ShardedWeights, engine_of, nan_error
from .shards import Shards, Split, contiguous, runs_of
from .transport import Ranks

__all__ = ["Parts", "local_factors", "shard_weights"]


@dataclass(frozen=True)
class Parts:
    """Which of a larger batch and of more heads a rank has."""

    batch: tuple[int, ...]  # of the global matrix
    heads: tuple[int, int]  # of queries and of keys, in the global matrix
    batch_here: dict[int, range]  # by axis; an axis that is not named is all here
    heads_here: range | None  # of queries; None: all


def shard_weights(
    q: Any, k: Any, *, score: Any, mask: Any, align: Any, engine: EngineName, mesh: Any, parts: Parts | None = None
) -> ShardedWeights:
    """The matrix over the ranks of a mesh, from this rank's queries and keys.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        score: As for `regard.weights`, of the global matrix.
        mask: Likewise.
        align: Likewise.
        engine: Likewise, not ``"reference"``.
        mesh: A `DeviceMesh` of one axis, or `Shards`.
        parts: Which of the global batch and heads q and k hold. Default: all of them.

    Raises:
        RankError: Ranks do not agree, or one of them has a wrong input; the same on every rank.
        ValueError: There is no process group, or the mesh has several axes.
    """
    shards = mesh if isinstance(mesh, Shards) else Shards(mesh)
    ranks = Ranks(_group_of(shards.mesh), float(shards.timeout))
    with ranks.together("weights()"):
        record: dict[str, Any] = {}
        error: Exception | None = None
        try:
            record, q, k = _record(q, k, score, mask, align, engine, shards)
            ranks.check_reaches(q)
            if (fault := ranks.check_store()) is not None:
                raise RuntimeError(fault)
        except Exception as raised:
            error = raised
        records = agree(ranks, "weights()", record, error)
        plan, factors, error = None, None, None
        try:
            plan = _plan(ranks, records, shards, q, k)
            factors = local_factors(q, k, plan.rows.length, plan.keys.length, score, mask, align, parts)
            folded = factors.folded()
            error = nan_error(plan, folded, q=folded.q, k=folded.k)
        except Exception as raised:
            error = raised
        agree(ranks, "weights()", {}, error)
        assert plan is not None
        assert factors is not None
    return ShardedWeights(factors, engine, plan=plan, one_head=q.ndim == 2 and k.ndim == 2)


def _group_of(mesh: Any) -> Any:
    """The process group of a mesh of one axis."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError(
            "mesh= needs a process group; call torch.distributed.init_process_group first, or start with torchrun."
        )
    if isinstance(mesh, torch.distributed.ProcessGroup):
        return mesh
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh must be a DeviceMesh, a ProcessGroup or Shards(mesh, ...); got {type(mesh).__name__}.")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one axis, that of the sequence; got {mesh.ndim} axes. Take one: mesh['name']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {torch.distributed.get_rank()} is not part of the mesh of {mesh.size()} ranks.")
    return mesh.get_group()


def _record(
    q: Any, k: Any, score: Any, mask: Any, align: Any, engine: EngineName, shards: Shards
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """This rank's description of its inputs, for the others."""
    refuse_graphs()
    q, k = check_tensors(q=q, k=k)
    engine_of(engine)
    rows = None if shards.rows is None else runs_of(shards.rows, "Shards(rows)")
    keys = rows if shards.keys is None else runs_of(shards.keys, "Shards(keys)")
    for name, runs, t in (("rows", rows, q), ("keys", keys, k)):
        if runs is not None and sum(map(len, runs)) != t.shape[-2]:
            raise ValueError(
                f"Shards({name}) has {sum(map(len, runs))} positions and {'q' if name == 'rows' else 'k'} "
                f"{t.shape[-2]}. Keys of their own: Shards(mesh, rows=..., keys=...)."
            )
    record = {
        "version": __version__,
        "dtype": str(q.dtype),
        "device": q.device.type,
        "shape of q without its length": [*q.shape[:-2], q.shape[-1]],
        "shape of k without its length": [*k.shape[:-2], k.shape[-1]],
        "score": describe(score),
        "mask": describe(mask),
        "align": align,
        "engine": engine,
        "requires_grad": [q.requires_grad, k.requires_grad],
        "exchange": shards.exchange,
        "timeout": shards.timeout,
        "kind of positions": [rows is not None, keys is not None],
        "_lengths": [q.shape[-2], k.shape[-2]],
        "_rows": None if rows is None else [[run.start, run.stop] for run in rows],
        "_keys": None if keys is None else [[run.start, run.stop] for run in keys],
    }
    return record, q, k


def _plan(ranks: Ranks, records: list[dict[str, Any]], shards: Shards, q: Tensor, k: Tensor) -> Plan:
    splits = []
    for n, name in enumerate(("_rows", "_keys")):
        if records[0][name] is None:
            runs = contiguous([record["_lengths"][n] for record in records])
        else:
            runs = [[range(*run) for run in record[name]] for record in records]
        splits.append(Split(runs, f"Shards({name[1:]})"))
    rows, keys = splits
    per_key = math.prod((*k.shape[:-2], k.shape[-1])) * k.element_size()
    small = per_key * keys.length <= GATHERED_BYTES
    gather = shards.exchange == "gather" or (shards.exchange == "auto" and small)
    return Plan(ranks, rows, keys, keys.pieces(), gather, ranks.next_matrix())


def local_factors(
    q: Tensor, k: Tensor, rows: int, keys: int, score: Any, mask: Any, align: Any, parts: Parts | None
) -> Factors:
    """Factors with the queries and keys of this rank; score and mask are checked and broadcast to the global matrix.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        rows: Number of rows of the global matrix.
        keys: Number of its keys.
        score: As for `regard.weights`.
        mask: As for `regard.weights`.
        align: As for `regard.weights`.
        parts: Which of the global batch and heads are here. Default: all of them.
    """
    outer = [x.shape[:-2] for x in (q, k)]
    if parts is not None and q.ndim > 2:
        outer = [torch.Size((*parts.batch, heads)) for heads in parts.heads]
    # Tensors of the global shape without memory: no rank has all queries.
    placeholders = [
        x.detach().new_empty(1).expand(*axes, n, x.shape[-1])
        for x, axes, n in zip((q, k), outer, (rows, keys), strict=True)
    ]
    factors = normalize_inputs(placeholders[0], placeholders[1], score, mask, align)
    if parts is not None:
        factors = replace_fields(factors, q=factors.q[..., :0, :0], k=factors.k[..., :0, :0])
        for axis, chosen in parts.batch_here.items():
            factors = factors.pick(axis, chosen)
        if parts.heads_here is not None:
            factors = factors.pick_heads(parts.heads_here)
    local = [x.unsqueeze(0) if x.ndim == 2 else x for x in (q, k)]
    local = [x.expand(*factors.batch, *x.shape[-3:]) for x in local]
    return replace_fields(factors, q=local[0], k=local[1])
