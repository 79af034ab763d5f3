"""One request over ranks: row statistics, column statistics, and the gradients of both.

Each piece of keys is computed by an engine of one process. Its results become a partial state, and states are merged
in the dtype of statistics, in the order in which pieces arrive, which is the same in every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import cell_grads, gathered_grads
from ..core.online_softmax import State
from ..core.problem import Factors, repeat_kv, sum_groups
from ..core.pytree import flatten, unflatten
from ..core.scores.kinds import upcast
from ..core.stats import GATHERED, ONE_PASS, SECOND_PASS, Request, Results, required
from ..engines import FusedEngine, resolve
from ..engines.score_grad import ScoreGrad
from .exchange import Plan, Wants, visit_keys
from .pairs import cut, local_tiling, state_of, visible_span

__all__ = ["Job", "compute", "pull_back", "vjp"]


@dataclass(frozen=True, eq=False)
class Job:
    """A request to the rows of this rank."""

    plan: Plan
    wants: Wants
    spans: list[tuple[range, slice]]  # global positions of the rows, and their place in q
    engine: FusedEngine
    factors: Factors  # q and k of this rank, one batch axis; score and mask of the global matrix
    request: Request  # v and u of this rank; keys, rows, cols and tiling in global positions

    @property
    def compute_dtype(self) -> torch.dtype:
        return upcast(self.factors.q[..., :0, :0]).dtype


def compute(job: Job, cached: Results) -> Results:
    """Every result that the request names; `cached` may hold some."""
    missing = tuple(name for name in job.request.names if name not in cached)
    results = dict(cached)
    rows = tuple(name for name in missing if name in (*ONE_PASS, "cells"))
    columns = tuple(name for name in missing if name in SECOND_PASS)
    if columns and "norm" not in (*cached, *rows):
        rows = (*rows, "norm")
    if rows:
        results |= _row_pass(job, dataclasses.replace(job.request, names=rows))
    if columns:
        results |= _column_pass(job, dataclasses.replace(job.request, names=columns), results["norm"])
    if "y" in missing:
        results["y"] = results["y"].to(required(job.request.v).dtype)
    return {name: results[name] for name in job.request.names}


#: The results that an engine computes for a piece, beside the norm: `state_of` needs them for the results of all.
_PARTS: dict[str, tuple[str, ...]] = {
    "lse": (),
    "norm": (),
    "max_score": (),
    "y": ("y",),
    "argmax": ("argmax",),
    "entropy": ("entropy",),
    "mean_distance": ("mean_distance",),
    "mass": ("mass",),
    "topk_scores": ("topk_scores", "topk_indices"),
    "topk_indices": ("topk_scores", "topk_indices"),
    "cells": ("cells",),
}


def _row_pass(job: Job, request: Request) -> Results:
    """Row statistics of this rank's rows: the merged states of all pieces of keys."""
    factors, (b, h, count, _) = job.factors, job.factors.q.shape
    if unknown := [name for name in request.names if name not in _PARTS]:
        raise NotImplementedError(f"{', '.join(unknown)} cannot be merged over ranks yet; ask a matrix of one process.")
    request = request if request.wants("y") else dataclasses.replace(request, v=None)
    request = request if request.wants("topk_scores", "topk_indices") else dataclasses.replace(request, topk=0)
    names = tuple(dict.fromkeys(("norm", *(part for name in request.names for part in _PARTS[name]))))
    like = factors.q.new_empty(0, dtype=job.compute_dtype)
    states = [State.empty((b, h, len(rows)), request, like) for rows, _ in job.spans]
    cells = None
    if request.wants("cells"):
        cells = like.new_full((b, h, count, len(required(request.cols))), -torch.inf)

    def visit(keys: range, blocks: list[Tensor]) -> list[Tensor]:
        for n, rows, at, visible, where in _visible_rectangles(job, keys):
            problem = cut(factors, rows, visible, factors.q[:, :, at], blocks[0][:, :, where]).problem()
            v = blocks[1][:, :, where] if request.wants("y") else None
            part = dataclasses.replace(_of_keys(request, visible), names=names, v=v)
            if cells is not None:
                part = dataclasses.replace(part, rows=torch.arange(len(rows), device=like.device))
            problem, part = problem.zero_invisible_keys(part)
            results = job.engine.compute(problem, part, names, {})
            states[n] = states[n].merge(state_of(results, visible.start))
            if cells is not None:
                cells[:, :, at, _inside(required(request.cols), visible)] = results["cells"]
        return []

    own = [factors.k, required(request.v)] if request.wants("y") else [factors.k]
    visit_keys(job.plan, job.wants, own, visit, [])
    sink = factors.score.sink_logits
    if not states:
        states = [State.empty((b, h, 0), request, like)]
    # Each state is freed when it is finished, and each part of a result when it is joined: no second copy of them all.
    finished = [states.pop(0).finish(request, sink) for _ in range(len(states))]
    results = {name: torch.cat([part.pop(name) for part in finished], 2) for name in tuple(finished[0])}
    return results if cells is None else {**results, "cells": cells}


def _visible_rectangles(job: Job, keys: range) -> Iterator[tuple[int, range, slice, range, slice]]:
    """For each block of rows that sees some of these keys: its number, its rows, their place, these keys, theirs."""
    for n, (rows, at) in enumerate(job.spans):
        first, end = visible_span(job.factors, rows, keys.start, keys.stop)
        if first < end:
            yield n, rows, at, range(first, end), slice(first - keys.start, end - keys.start)


def _inside(positions: Tensor, keys: range) -> Tensor:
    """Indices of those global positions that are among these keys."""
    return ((positions >= keys.start) & (positions < keys.stop)).nonzero().flatten()


def _of_keys(request: Request, keys: range) -> Request:
    """The request about some of the keys: flags and columns in their positions; v and u are left out."""
    flags = None if request.keys is None else request.keys[keys.start : keys.stop]
    cols = None if request.cols is None else request.cols[_inside(request.cols, keys)] - keys.start
    return dataclasses.replace(request, v=None, u=None, keys=flags, cols=cols, rows=None, tiling=None)


def _column_pass(job: Job, request: Request, norm: Tensor) -> Results:
    """Column statistics: each key's sums come back to its rank, the pooled map is summed over ranks."""
    factors, (b, h, _, _), own_keys = job.factors, job.factors.q.shape, job.factors.k.shape[2]
    totals = {}
    if request.wants("received"):
        totals["received"] = norm.new_zeros(b, h, own_keys)
    if request.wants("z"):
        totals["z"] = norm.new_zeros(b, h, own_keys, required(request.u).shape[-1])
    pool = None
    if request.wants("pool"):
        pool = norm.new_zeros(b, h, required(request.tiling).rows, required(request.tiling).cols)

    def visit(keys: range, blocks: list[Tensor]) -> list[Tensor]:
        sums = {n: t.new_zeros(*t.shape[:2], len(keys), *t.shape[3:]) for n, t in totals.items()}
        for _, rows, at, visible, where in _visible_rectangles(job, keys):
            tiling = local_tiling(request, rows, visible)
            names = (*totals, *(("pool",) if tiling is not None else ()))
            if not names:
                continue
            problem = cut(factors, rows, visible, factors.q[:, :, at], blocks[0][:, :, where]).problem()
            u = None if "z" not in totals else required(request.u)[:, :, at]
            part = dataclasses.replace(_of_keys(request, visible), names=names, tiling=tiling, u=u)
            problem, part = problem.zero_invisible_keys(part)
            results = job.engine.compute(problem, part, names, {"norm": norm[:, :, at]})
            for name, total in sums.items():
                total[:, :, where] += results[name]
            if pool is not None and tiling is not None:
                pool.add_(results["pool"])
        return list(sums.values())

    visit_keys(job.plan, job.wants, [factors.k], visit, list(totals.values()))
    return totals if pool is None else {**totals, "pool": job.plan.ranks.sum(pool)}


# Gradients.


def vjp(job: Job, results: Results, grad_outputs: Results, needs: list[bool]) -> list[Tensor | None]:
    """Gradients of all tensors of (factors, request), in the order of `flatten`; `needs` says for which."""
    spec, tensors = flatten((job.factors, job.request))
    grads = {name: g.to(job.compute_dtype) for name, g in grad_outputs.items()}
    gradient, right, du = _score_grad(job, results, grads)
    totals = [_zeros(t, job.compute_dtype) if t.is_floating_point() else t for t in tensors]
    factors, request = unflatten(spec, totals)
    dq, dk, dv = factors.q, factors.k, request.v if gradient.dy is not None else None
    score_spec, score_tensors = flatten(job.factors.score)
    of_score = flatten(factors.score)[1]
    learned = [t.is_floating_point() and needs[2 + n] for n, t in enumerate(score_tensors)]

    def visit(keys: range, blocks: list[Tensor]) -> list[Tensor]:
        k, *others = blocks
        v = others.pop(0) if gradient.dy is not None else None
        key_columns = _key_columns(job, grads, keys, v, others)
        sums = [_zeros(t, job.compute_dtype) for t in (k, v) if t is not None]
        for _, rows, at, visible, where in _visible_rectangles(job, keys):
            leaves = [t.detach().requires_grad_() for t in (job.factors.q[:, :, at], k[:, :, where])]
            leaves += [
                t.detach().requires_grad_() if learn else t for t, learn in zip(score_tensors, learned, strict=True)
            ]
            with torch.enable_grad():
                score = unflatten(score_spec, leaves[2:])
                problem = cut(dataclasses.replace(job.factors, score=score), rows, visible, *leaves[:2]).problem()
            local = _rows_of(gradient, at, key_columns[:, :, where])
            values = None if v is None else v[:, :, where]
            of_problem, of_values = _piece_grads(job, problem, visible, at, values, local, results, grads)
            pulled = pull_back(flatten(problem)[1], of_problem, leaves)
            for total, g in zip([dq[:, :, at], sums[0][:, :, where], *of_score], pulled, strict=True):
                if g is not None:
                    total += g
            if of_values is not None:
                sums[1][:, :, where] += of_values
        return sums

    own = [job.factors.k, *([required(job.request.v)] if gradient.dy is not None else []), *right]
    visit_keys(job.plan, job.wants, own, visit, [t for t in (dk, dv) if t is not None])
    if job.factors.score.sink_logits is not None:
        factors.score.sink_logits.add_(gradient.of_sink(job.factors.score.sink_logits, results["norm"]))
    for total, learn in zip(of_score, learned, strict=True):
        if learn:  # every rank has the parameters of the score, and gets all of their gradient
            total.copy_(job.plan.ranks.sum(total))
    if request.u is not None and du is not None:
        request.u.copy_(du)
    return [
        g.to(t.dtype) if need and t.is_floating_point() else None
        for g, t, need in zip(totals, tensors, needs, strict=True)
    ]


def _score_grad(job: Job, results: Results, grads: Results) -> tuple[ScoreGrad, list[Tensor], Tensor | None]:
    """The row terms of the gradient of the scores, the columns that travel with the keys, and the gradient of u.

    `right` of the `ScoreGrad` is empty: it differs for every piece of keys.
    """
    request, (b, h, i, _) = job.request, job.factors.q.shape
    norm = results["norm"]
    delta = norm.new_zeros(b, h, i)
    left, du = [], None
    if (g := grads.get("y")) is not None:
        delta = delta + job.engine.row_dot(g, results["y"])
        left.append(g)
    for name in ("mass", "entropy", "mean_distance"):
        if (g := grads.get(name)) is not None:
            delta = delta + g * results[name]
    if (g := grads.get("mass")) is not None:
        left.append(g.unsqueeze(-1))
    for name in ("lse", "norm"):
        if (g := grads.get(name)) is not None:
            delta = delta - (g if name == "lse" else g[..., 0])
    columns = _columns(job, grads)
    right = []
    if columns:
        # Their row term Σ_j w (left · right) was not computed in forward: it is left · (W right).
        left += [l.expand(b, h, -1, -1) for l, _ in columns]
        right = [torch.cat([repeat_kv(r, h).expand(b, h, -1, -1) for _, r in columns], -1)]
        mixed = _row_pass(dataclasses.replace(job, request=Request(("y",), v=right[0])), Request(("y",), v=right[0]))[
            "y"
        ]
        delta = delta + (torch.cat(left[len(left) - len(columns) :], -1) * mixed).sum(-1)
        if "z" in grads:
            du = mixed[..., : required(request.u).shape[-1]]
    left = left or [torch.zeros_like(delta).unsqueeze(-1)]
    product = left[0] if len(left) == 1 else torch.cat(left, -1)  # cat copies even one
    nothing = delta.new_zeros(1, 1, 0, 1)
    dy = grads.get("y")
    return ScoreGrad(product, nothing, delta, grads.get("entropy"), grads.get("mean_distance"), dy=dy), right, du


def _columns(job: Job, grads: Results) -> list[tuple[Tensor, Tensor]]:
    """Column statistics: what their gradient multiplies each row and each key with. That of u comes first."""
    b, h, i, _ = job.factors.q.shape
    columns = []
    if (g := grads.get("z")) is not None:
        columns.append((upcast(required(job.request.u)), g))
    if (g := grads.get("received")) is not None:
        columns.append((g.new_ones(b, h, i, 1), g.unsqueeze(-1)))
    if (g := grads.get("pool")) is not None:
        tiling, rank = required(job.request.tiling), job.plan.ranks.rank
        rows, keys = _positions(job.spans, g), _positions(job.plan.keys.spans(rank), g)
        left, right = g.new_zeros(b, h, len(rows), tiling.cols), g.new_zeros(1, 1, len(keys), tiling.cols)
        inside = ((rows >= tiling.i0) & (rows < tiling.i1)).nonzero().flatten()
        left[:, :, inside] = g[:, :, tiling.row_of(rows[inside])]
        inside = ((keys >= tiling.j0) & (keys < tiling.j1)).nonzero().flatten()
        right[:, :, inside, tiling.col_of(keys[inside])] = 1
        columns.append((left, right))
    return columns


def _positions(spans: list[tuple[range, slice]], like: Tensor) -> Tensor:
    parts = [torch.arange(run.start, run.stop, device=like.device) for run, _ in spans]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=like.device)


def _key_columns(job: Job, grads: Results, keys: range, v: Tensor | None, others: list[Tensor]) -> Tensor:
    """The counterpart of the rows' `left` at these keys, (b|1, h|g|1, j, e)."""
    b, h = job.factors.q.shape[:2]
    parts = [] if v is None else [upcast(v)]
    if "mass" in grads:
        flags = required(job.request.keys)[keys.start : keys.stop]
        parts.append(upcast(flags).view(1, 1, -1, 1))
    parts += others
    if not parts:
        return job.factors.q.new_zeros(1, 1, len(keys), 1, dtype=job.compute_dtype)
    return parts[0] if len(parts) == 1 else torch.cat([repeat_kv(p, h).expand(b, h, -1, -1) for p in parts], -1)


def _rows_of(gradient: ScoreGrad, at: slice, right: Tensor) -> ScoreGrad:
    def part(x: Tensor | None) -> Any:
        return None if x is None else x[:, :, at]

    return ScoreGrad(
        part(gradient.left), right, part(gradient.delta), part(gradient.d_entropy), part(gradient.d_distance),
        dy=part(gradient.dy),
    )  # fmt: skip


def _piece_grads(
    job: Job,
    problem: Any,
    keys: range,
    at: slice,
    v: Tensor | None,
    gradient: ScoreGrad,
    results: Results,
    grads: Results,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the tensors of one rectangle's problem, and of its values."""
    needs = [t.requires_grad for t in flatten(problem)[1]]
    with torch.no_grad():
        request = dataclasses.replace(_of_keys(job.request, keys), names=("norm",), v=v)
        visible, request = problem.zero_invisible_keys(request)
        visible = unflatten(*_detached(visible))
        engine = resolve(job.engine, visible, request)
        of_problem, dv, _ = engine.backward(visible, request, results["norm"][:, :, at], gradient, needs)
        addends = []
        for score, index in GATHERED:
            if (g := grads.get(score)) is not None:
                place = results[index][:, :, at]
                here = torch.where((place >= keys.start) & (place < keys.stop), place - keys.start, -1)
                addends.append(gathered_grads(visible, here, g[:, :, at]))
        if (g := grads.get("cells")) is not None:
            columns = _inside(required(job.request.cols), keys)
            chosen = dataclasses.replace(request, rows=torch.arange(at.stop - at.start, device=columns.device))
            parts = results["cells"][:, :, at][..., columns], g[:, :, at][..., columns]
            addends.append(cell_grads(visible, chosen, *parts))
    of_problem = list(of_problem)
    for more in addends:
        for n, addend in enumerate(more):
            of_problem[n] = _sum(of_problem[n], addend)
    if dv is not None and v is not None:
        dv = sum_groups(dv, v.shape[1])
    return of_problem, dv


def _sum(total: Tensor | None, addend: Tensor | None) -> Tensor | None:
    return addend if total is None else total if addend is None else total + addend


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _detached(tree: Any) -> tuple[Any, list[Tensor]]:
    spec, tensors = flatten(tree)
    return spec, [t.detach() for t in tensors]


def pull_back(outputs: list[Tensor], grads: list[Tensor | None], leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of the leaves that a problem was lowered from, from those of its tensors."""
    leaf_grads: list[Tensor | None] = [None] * len(leaves)
    lowered = []
    for output, g in zip(outputs, grads, strict=True):
        if g is None or not output.requires_grad:
            continue
        same = next((n for n, leaf in enumerate(leaves) if leaf is output), None)
        if same is None:
            lowered.append((output, g.to(output.dtype)))
        else:  # not lowered: its gradient keeps the dtype of statistics
            leaf_grads[same] = _sum(leaf_grads[same], g)
    wanted = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    if lowered:
        of_leaves = torch.autograd.grad(
            [output for output, _ in lowered], [leaves[n] for n in wanted], [g for _, g in lowered], allow_unused=True
        )
        for n, g in zip(wanted, of_leaves, strict=True):
            if g is not None:
                leaf_grads[n] = _sum(leaf_grads[n], g)
    return leaf_grads
