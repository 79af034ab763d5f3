"""Block by block in plain PyTorch: any score, any mask, any device, linear memory.

Four loops over the same tiles. `forward` merges the state of every tile into that of its rows; `column_pass` recomputes
the weights from the norm and adds up columns; `cells` copies scores out of the few tiles that hold them; `backward`
recomputes the weights and differentiates the scores of each tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.block import MatrixBlock, take
from ..core.masks.intervals import KeyIntervals
from ..core.online_softmax import State
from ..core.problem import Factors, Problem, mask_scores, sum_groups
from ..core.pytree import flatten, unflatten
from ..core.scores.kinds import upcast
from ..core.stats import ONE_PASS, SECOND_PASS, Request, Results, Tiling, required
from ..core.torch_state import in_functorch
from . import numba
from .score_grad import InputGrads, ScoreGrad, weights_from_norm

__all__ = ["ENGINE", "backward", "cells", "column_pass", "forward"]

#: How many numbers a tile may hold at once, all heads and sequences of a batch together.
TILE_NUMBERS = 2**21


class Blockwise:
    """The engine of this file; where `numba` serves a problem, its compiled tiles are used."""

    name = "blockwise"
    plain = False
    avoids_gpu_kernels = True
    keeps_grad_dtype = False

    def prepare(self, factors: Factors) -> Problem:
        return factors.problem()

    def compute(self, problem: Problem, request: Request, names: tuple[str, ...], cached: Results) -> Results:
        results = dict(cached)
        first = tuple(name for name in names if name in ONE_PASS)
        tiles = numba if numba.serves(problem) and numba.serves_statistics(first) else None
        second = tuple(name for name in names if name in SECOND_PASS)
        if second and "norm" not in (*cached, *first):
            first = (*first, "norm")
        if tiles and first:  # both from the same scores
            first, second = (*first, *second), ()
        if first:
            rows = request if first == request.names else dataclasses.replace(request, names=first)
            results |= tiles.forward(problem, rows) if tiles else forward(problem, rows)
        if second:
            columns, norm = dataclasses.replace(request, names=second), results["norm"]
            results |= tiles.column_pass(problem, columns, norm) if tiles else column_pass(problem, columns, norm)
        if "cells" in names:
            results["cells"] = tiles.cells(problem, request) if tiles else cells(problem, request)
        return results

    def free_outputs(self, problem: Problem, request: Request) -> tuple[str, ...]:
        # In plain PyTorch lse is one formula of the norm, and the sum of an entropy one more walk over every tile.
        return ("norm", "lse", "max_score", "entropy") if numba.serves(problem) else ("norm", "max_score")

    def backward(
        self, problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad, needs: list[bool]
    ) -> InputGrads:
        if gradient.dz is None and not problem.distances_cancel and numba.serves_backward(problem, needs):
            return numba.backward(problem, request, norm, gradient)
        return backward(problem, request, norm, gradient)

    def row_dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (upcast(a) * upcast(b)).sum(-1)


ENGINE = Blockwise()


def forward(problem: Problem, request: Request) -> Results:
    """One pass over the keys: row statistics."""
    like = torch.empty(0, dtype=problem.compute_dtype, device=problem.q.device)
    b, h, i, _ = problem.shape
    parts = []
    for rows, tiles in tiled(problem):
        state = State.empty((b, h, rows.stop - rows.start), request, like)
        for cols, all_visible in tiles:
            block = problem.block(rows, cols)
            s = problem.at(block).bare_scores(block)
            state = state.merge(
                State.of_block(s if all_visible else mask_scores(s, problem.mask, block), block, request)
            )
        parts.append(state.finish(request, problem.sink))
    if not parts:  # no rows at all
        parts = [State.empty((b, h, i), request, like).finish(request, problem.sink)]
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def column_pass(problem: Problem, request: Request, norm: Tensor) -> Results:
    """A second pass, over the weights of finished rows: column statistics."""
    b, h, _, j = problem.shape
    total = {}
    if request.wants("received"):
        total["received"] = norm.new_zeros(b, h, j, dtype=problem.compute_dtype)
    if request.wants("z"):
        assert request.u is not None
        total["z"] = norm.new_zeros(b, h, j, request.u.shape[-1], dtype=problem.compute_dtype)
    if request.wants("pool"):
        assert request.tiling is not None
        total["pool"] = norm.new_zeros(b, h, request.tiling.rows, request.tiling.cols, dtype=torch.float64)
    window = request.window
    for rows, tiles in tiled(problem):
        if window is not None and not _overlap(rows, window.i0, window.i1):
            continue
        for cols, all_visible in tiles:
            if window is not None and not _overlap(cols, window.j0, window.j1):
                continue
            w, _ = weights_of(problem, rows, cols, all_visible, norm)
            if "received" in total:
                total["received"][:, :, cols] += w.sum(2)
            if "z" in total:
                total["z"][:, :, cols] += w.mT @ required(request.u)[:, :, rows].to(w.dtype)
            if "pool" in total:
                _add_to_pool(total["pool"], w, rows, cols, required(request.tiling))
    return {name: x.to(problem.compute_dtype) for name, x in total.items()}


def cells(problem: Problem, request: Request) -> Tensor:
    """Scores at chosen rows and keys, (b, h, rows, cols), −inf where hidden; from the tiles of `forward`."""
    b, h, _, _ = problem.shape
    rows, cols = required(request.rows), required(request.cols)
    # new_full: inside torch.vmap it has the batch of q, and takes scores in.
    scores = problem.q.new_full((b, h, len(rows), len(cols)), -torch.inf, dtype=problem.compute_dtype)
    for row_block, tiles in tiled(problem):
        if not len(i := _inside(rows, row_block)):
            continue
        for keys, all_visible in tiles:
            if not len(j := _inside(cols, keys)):
                continue
            block = problem.block(row_block, keys)
            s = problem.at(block).bare_scores(block)
            s = s if all_visible else mask_scores(s, problem.mask, block)
            scores[:, :, i[:, None], j] = s[:, :, (rows[i] - row_block.start)[:, None], cols[j] - keys.start]
    return scores


def _overlap(part: slice, start: int, stop: int) -> bool:
    return part.start < stop and start < part.stop


def _inside(positions: Tensor, part: slice) -> Tensor:
    """Indices of the positions that are in a part."""
    return ((positions >= part.start) & (positions < part.stop)).nonzero().flatten()


def backward(problem: Problem, request: Request, norm: Tensor, gradient: ScoreGrad) -> InputGrads:
    """Gradients of the problem's tensors in their order, of v and of u."""
    compiled = numba.serves(problem)  # then the norm is that of compiled tiles
    # Of distances dq is a product less a part of a bias, which cancel: the scores are differentiated in float64.
    exact = problem.in_float64() if problem.distances_cancel else problem
    spec, tensors = flatten(exact)
    totals = [torch.zeros(t.shape, dtype=exact.compute_dtype, device=t.device) for t in tensors]
    total = unflatten(spec, totals)
    v, u, dy, dz = request.v, request.u, gradient.dy, gradient.dz
    dv = None if dy is None or v is None else torch.zeros(v.shape, dtype=problem.compute_dtype, device=v.device)
    du = None if dz is None or u is None else torch.zeros(u.shape, dtype=problem.compute_dtype, device=u.device)
    for rows, tiles in tiled(problem):
        for cols, all_visible in tiles:
            block = problem.block(rows, cols)
            local = dataclasses.replace(exact.at(block), sink=None)
            local_spec, local_tensors = flatten(local)
            inputs = [upcast(t) for t in local_tensors if t.is_floating_point()]

            def scores(
                *parts: Tensor, spec: Any = local_spec, block: MatrixBlock = block, tensors: Any = local_tensors
            ) -> Tensor:
                return unflatten(spec, _with_floats(tensors, parts)).bare_scores(block)

            s, vjp = torch.func.vjp(scores, *inputs)[:2]
            if compiled:  # one ulp of a large score would take the weights out of their norm
                s = numba.cells(problem, _cells_of(rows, cols, s.device))
            else:
                if problem.similarity_kernel.distance_scale and not in_functorch():  # which `vjp` leaves uncorrected
                    s = problem.at(block).bare_scores(block)
                s = s if all_visible else mask_scores(s, problem.mask, block)
            w, log_w = weights_from_norm(s, norm[:, :, rows], all_visible)
            distance = (block.i - block.j).abs() if gradient.d_distance is not None else None
            ds = gradient.into_scores(w, log_w, rows, cols, distance)
            # In a row that is nan so are its gradients, and 0 · nan would reach keys that the row does not see.
            grads = vjp((ds if all_visible else ds.masked_fill(s == -torch.inf, 0)).to(exact.compute_dtype))
            _add_block(
                unflatten(local_spec, _with_floats([t.new_zeros(()) for t in local_tensors], grads, local_tensors)),
                dataclasses.replace(total, sink=None),
                block,
            )
            if dv is not None and dy is not None:
                dv[:, :, cols] += sum_groups(w.mT @ dy[:, :, rows], dv.shape[1])
            if du is not None and dz is not None:
                du[:, :, rows] += w @ dz[:, :, cols]
    if problem.sink is not None:
        total.sink.add_(gradient.of_sink(problem.sink, norm))
    grads = list(totals) if exact is problem else exact.with_own_grads(totals, problem.compute_dtype)
    return InputGrads(grads, dv, du)


def _cells_of(rows: slice, cols: slice, device: torch.device) -> Request:
    """The request for all scores of a tile."""
    i, j = (torch.arange(part.start, part.stop, device=device) for part in (rows, cols))
    return Request(("cells",), rows=i, cols=j)


def _with_floats(tensors: list[Tensor], floats: Sequence[Tensor], like: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors, but for those whose counterpart in `like` is floating point: they are taken from `floats` in order.

    Whole numbers, as a parameter of a user's function may be, have no gradient.
    """
    rest = iter(floats)
    return [next(rest) if x.is_floating_point() else t for t, x in zip(tensors, like or tensors, strict=True)]


def _add_block(part: Problem, total: Problem, block: MatrixBlock) -> None:
    """Add the gradients of a block's tensors into those of all tensors."""
    total.q[:, :, block.rows] += part.q
    total.k[:, :, block.cols] += part.k
    for g, all_g in zip(flatten(part.modifiers)[1], flatten(total.modifiers)[1], strict=True):
        cut = take(take(all_g, -2, block.rows), -1, block.cols) if all_g.ndim == 4 else all_g
        cut += g
    for g, all_g in zip(flatten(part.similarity_kernel)[1], flatten(total.similarity_kernel)[1], strict=True):
        all_g += g


def weights_of(problem: Problem, rows: slice, cols: slice, all_visible: bool, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of a block and their logarithms: exp(s − m) / l."""
    block = problem.block(rows, cols)
    s = problem.at(block).bare_scores(block)
    return weights_from_norm(s if all_visible else mask_scores(s, problem.mask, block), norm[:, :, rows], all_visible)


def _add_to_pool(pool: Tensor, w: Tensor, rows: slice, cols: slice, tiling: Tiling) -> None:
    i0, i1 = max(rows.start, tiling.i0), min(rows.stop, tiling.i1)
    j0, j1 = max(cols.start, tiling.j0), min(cols.stop, tiling.j1)
    if i0 >= i1 or j0 >= j1:
        return
    # In float64: index_add has one running sum for each tile.
    part = w[:, :, i0 - rows.start : i1 - rows.start, j0 - cols.start : j1 - cols.start].double()
    row = tiling.row_of(torch.arange(i0, i1, device=w.device))
    col = tiling.col_of(torch.arange(j0, j1, device=w.device))
    by_col = part.new_zeros(*part.shape[:3], tiling.cols).index_add_(3, col, part)
    pool.index_add_(2, row, by_col)


# Which tiles are visited.


def tiled(problem: Problem) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Row blocks, each with the key blocks its rows can see, and whether all cells of each are visible."""
    b, h, rows, keys = problem.shape
    if rows == 0 or b * h == 0:
        return
    height, width = _tile_size(problem)
    starts = list(range(0, rows, height))
    ranges = _ranges(problem.intervals, starts, rows) if problem.mask is not None else None
    for n, start in enumerate(starts):
        block = slice(start, min(rows, start + height))
        if ranges is None:
            yield block, [(slice(j, min(keys, j + width)), True) for j in range(0, keys, width)]
        else:
            yield block, list(_cut(ranges[n], width))


def _tile_size(problem: Problem) -> tuple[int, int]:
    b, h, rows, keys = problem.shape
    per_cell = problem.similarity_kernel.numbers_per_cell(problem.q.shape[-1])
    cells = max(256, TILE_NUMBERS // (b * h * per_cell))
    width = min(max(keys, 1), 512, cells)
    # Tall blocks would see much that a narrow window hides.
    tallest = rows if problem.mask is None else 256
    return min(rows, tallest, max(16, cells // width)), width


def _ranges(intervals: KeyIntervals, starts: list[int], rows: int) -> list[list[tuple[int, int, int, int]]]:
    """For each row block the key ranges it touches: (first, end, and the part all its rows see in full)."""
    ends = [*starts[1:], rows]
    ranges = []
    for start, end in zip(starts, ends, strict=True):
        lo, hi = intervals.lo[:, :, start:end], intervals.hi[:, :, start:end]
        filled = lo < hi
        first = torch.where(filled, lo, torch.iinfo(lo.dtype).max).amin((0, 2)).tolist()
        last = torch.where(filled, hi, 0).amax((0, 2)).tolist()
        one_exact = intervals.exact and intervals.lo.shape[1] == 1
        full = (int(lo.max()), int(hi.min())) if one_exact else (0, 0)
        ranges.append(_merge_ranges([(f, e, *full) for f, e in zip(first, last, strict=True) if f < e]))
    return ranges


def _merge_ranges(ranges: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Overlapping ranges united, so that no cell is visited twice."""
    out: list[tuple[int, int, int, int]] = []
    for first, end, full_from, full_to in sorted(ranges):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]), full_from, full_to)
        else:
            out.append((first, end, full_from, full_to))
    return out


def _cut(ranges: list[tuple[int, int, int, int]], width: int) -> Iterator[tuple[slice, bool]]:
    for first, end, full_from, full_to in ranges:
        for j in range(first, end, width):
            stop = min(end, j + width)
            yield slice(j, stop), full_from <= j and stop <= full_to
