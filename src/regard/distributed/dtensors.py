"""DTensors as queries, keys and values: results come back as DTensors, sharded alike.

Sharded batches and heads are computed where they are, without any exchange. A sequence that is sharded (`Shard(-2)`)
is split over its mesh axis, in the split that `distribute_tensor` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.api import check_tensors
from ..core.array_protocol import Scores
from ..core.evaluation import SeeKey, Transposed
from ..core.indexing import Pick
from ..core.problem import Factors
from ..core.pytree import flatten, unflatten
from ..core.results import Peak, Statistics, TopK
from ..core.rows.head_reduction import HeadReduction
from ..core.rows.spans import PoolBy
from ..core.types import EngineName, PoolLike, SegmentsLike
from ..core.weights import Weights
from .build import Parts, local_factors, shard_weights
from .calls import shared_methods
from .handshake import checked_together
from .shards import Shards
from .transport import Ranks

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DTensorWeights", "dtensor_weights"]

X = TypeVar("X")

#: Statistics with one number for every key, and those with none for rows; all others have rows.
OF_KEYS, OF_NEITHER = ("received",), ("pool",)


@dataclass(frozen=True)
class MeshLayout:
    """The axis that each axis of a mesh splits: a batch axis (its number), "heads", "sequence", or None for none."""

    mesh: Any
    roles: tuple[int | str | None, ...]
    batch: tuple[int, ...]  # of the global matrix
    heads: int | None  # of the global matrix; None where the head axis is not shown

    def wrap(self, local: Tensor, length: int | None) -> DTensor:
        """A result as a DTensor; `length`: of its sequence axis in the global matrix, None where it has none."""
        outer = (*self.batch, *(() if self.heads is None else (self.heads,)))
        shape = [*outer, *local.shape[len(outer) :]]
        if length is not None:
            shape[len(outer)] = length
        placements: list[Any] = []
        for role in self.roles:
            axis = {"heads": len(self.batch), "sequence": len(outer)}.get(role, role) if role is not None else None  # type: ignore[arg-type]
            replicated = axis is None or (role == "sequence" and length is None)
            placements.append(Replicate() if replicated else Shard(int(axis)))  # type: ignore[arg-type]
        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=size, stride=stride)

    def unwrap(self, x: Any, name: str) -> Tensor:
        """The local part of values or vectors that are sharded as this layout says."""
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, as q and k are; got {type(x).__name__}.")
        if x.device_mesh != self.mesh or _roles(x, name) != self.roles:
            raise ValueError(
                f"{name} must be sharded as q and k are, {self.roles} over {self.mesh}; got {list(x.placements)} over "
                f"{x.device_mesh}. Use {name}.redistribute(...)."
            )
        return x.to_local()


class DTensorWeights(Weights):
    """`Weights` of DTensors: made by `regard.weights` from DTensors. `shape` is global, results are DTensors.

    >>> regard.distributed.DTensorWeights.__mro__[1].__name__
    'Weights'
    """

    _shared = True

    def __init__(self, local: Weights, layout: MeshLayout) -> None:
        super().__init__(local._factors, local._engine, one_head=local._one_head, tokens=local._tokens)
        self._local, self._layout = local, layout

    @property
    def shape(self) -> torch.Size:
        """``(..., h, i, j)`` of the global matrix.

        Example:
            >>> regard.weights(torch.eye(3)).shape  # of DTensors: that of all ranks together
            torch.Size([3, 3])
        """
        heads = () if self._layout.heads is None else (self._layout.heads,)
        return torch.Size((*self._layout.batch, *heads, *self._local._sizes))

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._local._sizes

    def _with(self, factors: Factors, **changes: Any) -> Self:
        return type(self)(self._local._with(factors, **changes), self._layout)

    def _explain(self, request: Any) -> str:
        return self._local._explain(request)

    def _checked(self, check: Callable[[], X]) -> X:
        return self._local._checked(check)

    def _called(self, function: Callable[..., X], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> X:
        return self._local._called(function, args, kwargs)

    @property
    def _entire(self) -> bool:
        return False

    def _need_entire(self, what: str) -> None:
        raise NotImplementedError(f"{what} is not computed of DTensors; use full_tensor() of q and k first.")

    @property
    def _rows_here(self) -> Tensor:
        return self._local_factors().q

    def numpy(self) -> np.ndarray:
        """All of it as a NumPy array, on every rank.

        Returns:
            ``(..., h, i, j)`` or ``(i, j)`` of the global matrix.

        Example:
            >>> regard.weights(torch.zeros(1, 4)).numpy()  # of DTensors: gathered from all ranks
            array([[1.]], dtype=float32)
        """
        return _gathered(self.dense()).numpy(force=True)

    def __dlpack__(self, **options: Any) -> Any:
        return _gathered(self.dense()).__dlpack__(**options)

    # Questions about rows: those without tensors of their own are asked of the part that is here.

    def _local_factors(self) -> Factors:
        raise NotImplementedError(
            "this question is not answered of DTensors yet; ask for statistics of `see`, pass q.to_local() with mesh=, "
            "or use full_tensor() first."
        )

    def _of_rows(self, local: Tensor) -> DTensor:
        return self._layout.wrap(local, self._sizes[0])

    def _compare(self, measure: str, other: Any) -> Tensor:
        def check() -> Weights:
            if not isinstance(other, DTensorWeights):
                raise TypeError(f"{measure}(other): both matrices must be of DTensors; got {type(other).__name__}.")
            if other._layout != self._layout:
                raise ValueError(
                    f"{measure}(other): both matrices must be sharded alike; got {self._layout} and {other._layout}. "
                    "Use redistribute(...) of queries and keys."
                )
            return other._local

        return self._of_rows(self._local._compare(measure, self._checked(check)))

    # Per row, with the rows; rows taken together and tiles are the same on every rank along the sequence's axis.

    def offset_mass(self, offset: int) -> Tensor:
        return self._of_rows(self._local.offset_mass(offset))

    def induction_mass(self, tokens: Tensor | Sequence[int | str]) -> Tensor:
        return self._of_rows(self._local.induction_mass(tokens))

    def distance_variance(self) -> Tensor:
        return self._of_rows(self._local.distance_variance())

    def distance_histogram(self, edges: Sequence[int] | Tensor) -> Tensor:
        return self._of_rows(self._local.distance_histogram(edges))

    def segment_mass(
        self, keys: SegmentsLike, rows: SegmentsLike | None = None, by: Literal["sum", "mean"] = "sum"
    ) -> Tensor:
        return self._layout.wrap(self._local.segment_mass(keys, rows, by), self._sizes[0] if rows is None else None)

    def pool_blocks(self, rows: int, cols: int, by: PoolBy = "sum") -> Tensor:
        return self._layout.wrap(self._local.pool_blocks(rows, cols, by), None)

    def _pool_by(self, pool: PoolLike, by: str) -> Tensor:
        return self._layout.wrap(self._local._pool_by(pool, by), None)

    def cover(self, share: float, rows: int, cols: int) -> Tensor:
        return self._layout.wrap(self._local.cover(share, rows, cols), None)

    def rows(self, part: slice) -> Self:
        if "sequence" in self._layout.roles:
            raise NotImplementedError(
                "rows of a sharded sequence are not in the split of a DTensor; pass q.to_local() with mesh=."
            )
        return type(self)(self._local.rows(part), self._layout)

    def reduce_heads(
        self,
        by: Literal["mean", "sum", "max"] = "mean",
        *,
        heads: Sequence[int] | Tensor | None = None,
        groups: int | Literal["kv"] | None = None,
        weights: Tensor | None = None,
    ) -> HeadReduction:
        raise NotImplementedError(
            "heads of DTensors are not taken together yet; pass q.to_local() with mesh=, or use full_tensor() first."
        )

    def _over_ranks(self, own: Tensor, what: str, by: Literal["sum", "max"] = "sum") -> Tensor:
        assert isinstance(own, DTensor)
        return own.redistribute(placements=[Replicate() if p.is_partial() else p for p in own.placements])

    def _select(self, picks: list[Pick]) -> Self:
        if all(isinstance(pick, range) and pick == range(n) for pick, n in zip(picks, self.shape, strict=False)):
            return self
        if any(role is not None and role != "sequence" for role in self._layout.roles):
            raise NotImplementedError(
                "batch and heads are sharded over the mesh, and a part of them would leave ranks without any; index "
                "rows and columns, W[..., i, j], or the tensors before."
            )
        local = self._local._select(picks)
        batch, heads = tuple(local._factors.batch), None if local._one_head else local._factors.heads
        return type(self)(local, MeshLayout(self._layout.mesh, self._layout.roles, batch, heads))

    def _statistics(self, statistics: list[str], inputs: dict[str, Any], question: SeeKey | None = None) -> Statistics:
        if (v := inputs.get("v")) is not None:
            inputs = {**inputs, "v": self._checked(lambda: self._layout.unwrap(v, "values"))}
        local = self._local._statistics(statistics, inputs)
        i, j = self._sizes
        fields: dict[str, Any] = {}
        for name, value in vars(local).items():
            length = j if name in OF_KEYS else None if name in OF_NEITHER else i
            if isinstance(value, (Peak, TopK)):
                fields[name] = type(value)(*(self._layout.wrap(part, length) for part in value))
            else:
                fields[name] = self._layout.wrap(value, length)
        return Statistics(**fields)

    @property
    def scores(self) -> Scores:
        """Not of DTensors yet.

        Raises:
            NotImplementedError: Always; the message says what to do.

        Example:
            >>> regard.weights(torch.eye(3)).scores.shape  # of tensors; full_tensor() makes them of DTensors
            torch.Size([3, 3])
        """
        raise NotImplementedError(
            "scores are not computed of DTensors yet; index the weights, or use full_tensor() of q and k first."
        )

    def __rmatmul__(self, u: Tensor) -> Tensor:
        return _TransposedDTensor(self).__matmul__(u.mT).mT if isinstance(u, Tensor) else NotImplemented

    @property
    def mT(self) -> Transposed:
        """The transposed matrix, for ``W.mT @ u`` with a DTensor u.

        Example:
            >>> (regard.weights(torch.eye(3)).mT @ torch.ones(3, 1)).shape  # a DTensor u gives a DTensor
            torch.Size([3, 1])
        """
        return _TransposedDTensor(self)

    T = mT

    def _block(self, rows: list[int] | range, cols: list[int] | range) -> Tensor:
        block = self._local._block(rows, cols)
        shown = MeshLayout(self._layout.mesh, self._layout.roles, self._layout.batch, self._layout.heads or 1)
        return shown.wrap(block, None)


class _TransposedDTensor(Transposed):
    def __matmul__(self, u: Tensor) -> Tensor:
        w: Any = self.mT
        local = w._checked(lambda: w._layout.unwrap(u, "vectors"))
        return w._layout.wrap(w._local.mT @ local, w._sizes[1])


def _gathered(x: Tensor) -> Tensor:
    gathered: Any = x.detach()
    return gathered.full_tensor()  # type: ignore[no-any-return]


shared_methods(DTensorWeights)


class _SharedParameter(torch.autograd.Function):
    """A score's parameter that every rank has: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        with ctx.ranks.together("the backward pass"):
            return ctx.ranks.sum(g), None


def _roles(x: DTensor, name: str) -> tuple[int | str | None, ...]:
    """The axis of a tensor (*batch, heads, length, size) that each axis of the mesh splits."""
    roles: list[int | str | None] = []
    for placement in x.placements:
        if isinstance(placement, Replicate):
            roles.append(None)
        elif type(placement) is Shard and placement.dim % x.ndim != x.ndim - 1:
            axis = placement.dim % x.ndim
            roles.append({x.ndim - 2: "sequence", x.ndim - 3: "heads"}.get(axis, axis))
        else:
            raise ValueError(
                f"{name} must be sharded on batch, heads or length, or replicated; got {placement}. "
                f"Use {name}.redistribute(...)."
            )
    for role, what in (("sequence", "the length"), ("heads", "the heads")):
        if roles.count(role) > 1:
            raise ValueError(f"{what} of {name} must be sharded over one axis of the mesh; got {list(x.placements)}.")
    return tuple(roles)


def _share(length: int, parts: int, rank: int) -> range:
    """The positions that `distribute_tensor` gives to a rank: all but the last ones have the same length."""
    longest = -(-length // parts)
    return range(min(rank * longest, length), min((rank + 1) * longest, length))


def dtensor_weights(
    q: Any, k: Any, *, score: Any, mask: Any, align: Any, engine: EngineName, mesh: Any
) -> DTensorWeights:
    """The matrix of DTensor queries and keys.

    Raises:
        ValueError: They are not sharded alike, or in a way that splits no batch, heads or length.
        RankError: A rank's part of the sequence is not that of `distribute_tensor`; the same on every rank.
    """
    if not isinstance(q, DTensor):
        raise TypeError(f"q and k must both be DTensors or both plain; q is a {type(q).__name__}.")
    options = mesh if isinstance(mesh, Shards) else Shards(mesh)
    roles = _roles(q, "q")
    layout = MeshLayout(q.device_mesh, roles, tuple(q.shape[:-3]), None if q.ndim == 2 else q.shape[-3])

    def check() -> tuple[Parts, list[Tensor]]:
        _need_alike(q, k, roles)
        _check_options(options, q.device_mesh, roles)
        return _parts(q, k, roles), check_tensors(q=q.to_local(), k=k.to_local())

    if "sequence" in roles:  # a rank that raises alone would be waited for
        ranks = Ranks(q.device_mesh.get_group(roles.index("sequence")), float(options.timeout))
        parts, (local_q, local_k) = checked_together(ranks, "weights()", check)
    else:
        parts, (local_q, local_k) = check()
    coordinate = q.device_mesh.get_coordinate() or ()
    for axis, role in enumerate(roles):
        if role is not None and role != "sequence" and not isinstance(score, str):
            ranks = Ranks(q.device_mesh.get_group(axis), float(options.timeout))
            score = _with_summed_gradients(score, ranks)
    if "sequence" not in roles:
        factors = local_factors(local_q, local_k, q.shape[-2], k.shape[-2], score, mask, align, parts)
        return DTensorWeights(Weights(factors, engine, one_head=q.ndim == 2), layout)
    axis = roles.index("sequence")
    rows, keys = (_share(x.shape[-2], q.device_mesh.size(axis), coordinate[axis]) for x in (q, k))
    group = q.device_mesh.get_group(axis)
    shards = Shards(group, [rows], [keys], options.exchange, options.timeout)
    local = shard_weights(
        local_q, local_k, score=score, mask=mask, align=align, engine=engine, mesh=shards, parts=parts
    )
    return DTensorWeights(local, layout)


def _check_options(options: Shards, mesh: DeviceMesh, roles: Sequence[int | str | None]) -> None:
    """Raise where options say otherwise what DTensors say themselves."""
    if not (options.mesh is None or options.mesh == mesh):
        others = _ranks_of(options.mesh)
        own = mesh.get_group(roles.index("sequence")) if "sequence" in roles else None
        if own is None or others != torch.distributed.get_process_group_ranks(own):
            raise ValueError(
                f"DTensors say which mesh they are on, and q is on {mesh}; got a mesh= of ranks {others}. Leave mesh= "
                "out, or redistribute q and k on that mesh."
            )
    if options.rows is not None or options.keys is not None:
        raise ValueError(
            "DTensors say which positions a rank has; got Shards(rows=) or Shards(keys=) as well. Leave them out, or "
            "pass q.to_local() with them."
        )


def _ranks_of(mesh: Any) -> list[int]:
    """The ranks of a mesh or process group, in their order."""
    if isinstance(mesh, torch.distributed.ProcessGroup):
        return torch.distributed.get_process_group_ranks(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, a ProcessGroup or Shards(mesh, ...); got {type(mesh).__name__}.")
    return mesh.mesh.flatten().tolist()


def _need_alike(q: DTensor, k: Any, roles: tuple[int | str | None, ...]) -> None:
    if not isinstance(k, DTensor):
        raise TypeError(f"q and k must both be DTensors or both plain; k is a {type(k).__name__}.")
    if q.device_mesh != k.device_mesh or roles != _roles(k, "k") or q.ndim != k.ndim:
        raise ValueError(
            f"q and k must be sharded alike; got {list(q.placements)} and {list(k.placements)}. "
            "Use k.redistribute(placements=q.placements)."
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q and k must have the same batch axes; got {tuple(q.shape)} and {tuple(k.shape)}.")


def _parts(q: DTensor, k: DTensor, roles: Sequence[int | str | None]) -> Parts:
    """Which of the global batch and heads are here."""
    mesh = q.device_mesh
    coordinate = mesh.get_coordinate() or ()
    batch: dict[int, range] = {}
    heads: range | None = None
    for axis, role in enumerate(roles):
        n, rank = mesh.size(axis), coordinate[axis]
        if role == "heads":
            h, g = q.shape[-3], k.shape[-3]
            shared = h // max(g, 1)
            for other in range(n):
                own, of_keys = _share(h, n, other), _share(g, n, other)
                if own and (own.start != of_keys.start * shared or own.stop != of_keys.stop * shared):
                    raise ValueError(
                        f"{h} query heads and {g} key heads over {n} ranks separate heads from their keys. Use a "
                        "number of ranks that divides the key heads, or repeat them."
                    )
            heads = _share(h, n, rank)
        elif role != "sequence" and role is not None:
            before = batch.get(int(role), range(q.shape[int(role)]))  # of an earlier axis that splits it as well
            share = _share(len(before), n, rank)
            batch[int(role)] = before[share.start : share.stop]
    return Parts(tuple(q.shape[:-3]), (q.shape[-3], k.shape[-3]) if q.ndim > 2 else (1, 1), batch, heads)


def _with_summed_gradients(score: Any, ranks: Ranks) -> Any:
    if not hasattr(score, "parts"):
        return score
    spec, tensors = flatten(score)
    if not any(t.requires_grad for t in tensors):
        return score
    return unflatten(spec, [_SharedParameter.apply(t, ranks) if t.requires_grad else t for t in tensors])
