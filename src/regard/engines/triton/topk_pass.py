"""The largest keys of every row: which kernels of `top` run, and on what.

By ballot where there are many tiles of plain products, else by search. Imports `prepared` and the kernels; loaded only when
the engine computes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from .kernel_inputs import Arguments, Prepared, copied, empty, padded
from .kernels.tile_ops import cells, rows_of
from .kernels.topk import ballot_kernel, bound_kernel, count_kernel, search_kernel, settle_kernel
from .launcher import start
from .tile_config import configured

__all__ = ["by_ballot", "top"]

#: Bytes for marks on keys that may be among the largest, one bit a cell: what does not fit is done in turns.
MOST_MARKS = 2**30
#: Rows of one program that writes down marked keys, and of one that scores and sorts them (with slots and components at a
#: time, and warps). One warp: what several share must wait for all of them, in every round.
COUNTED, SETTLED = 4, (8, 8, 32, 1)


def top(problem: Problem, n: int, bests: Tensor | None = None, norm: Tensor | None = None) -> dict[str, Tensor]:
    """The n largest scores of every row, and with `norm` their weights. With `bests` of a forward pass: by ballot, else by
    search."""
    p = Prepared(problem)
    found = {"topk_scores": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    found["topk_indices"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    if norm is not None:
        norm, found["topk_weights"] = norm.contiguous(), empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
    flags, flagged = (None, 0) if bests is None else _balloted(p, n, bests, norm, found)
    config = configured("top", p, 0, None)
    assert not flagged or flagged % config.block_i == 0, "one flag for each block of rows"
    table = p.row_table(config)

    def arguments() -> Arguments:
        heads, block_d = p.b * p.h, padded(p.d, p.q)
        tma, descriptors, maps = copied(p, config, (p.k, (config.block_j, block_d)))
        return triton.cdiv(p.i, config.block_i) * heads, {
            "q": cells(p.q), "k": cells(p.k), "pair": p.pair, "k_desc": descriptors[0], "k_map": maps[0], "row_table": table,
            "flags": p.q if flags is None else flags, "heads": heads, **_told_of_top(p, norm, found),
            "per_group": p.per_group(0), "PAIR": p.pair_kind, "FOLD": p.fold, "TMA": tma, "N": n,
            "BLOCK_N": triton.next_power_of_2(n), "BLOCK_D": block_d, "FLAGGED": flagged, **p.common, **config.launch,
        }  # fmt: skip

    given = [*p.tensors, table.ptr, norm, *found.values(), flags]
    start(search_kernel, p.key and (p.key, flagged, config), given, arguments)
    return found


def _told_of_top(p: Prepared, norm: Tensor | None, found: dict[str, Tensor]) -> dict[str, Any]:
    names = {"topk_scores": "score", "topk_indices": "index", "topk_weights": "weight"}
    outputs = {argument: cells(found[name]) if name in found else p.nothing for name, argument in names.items()}
    return {**outputs, "norm": p.nothing if norm is None else cells(norm), "WEIGHT": norm is not None}


def _balloted(p: Prepared, n: int, bests: Tensor, norm: Tensor | None, best: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Write the n best of nearly all rows; returns flags for blocks of rows that must be searched, and their height."""
    config = configured("ballot", p, 0, None)
    # Of fewer groups than this the n-th largest is no good bound: too many keys would reach it, one row in a million.
    enough = (n + 3 * n // 4) * triton.cdiv(p.j, bests.shape[2])
    room = triton.next_power_of_2(3 * n + 8)
    bounds = _bounds(bests, n)
    found = empty(p.b, p.h, p.i, room, like=p.q, dtype=torch.int32)
    counts = empty(p.b, p.h, p.i, like=p.q, dtype=torch.int32)
    blocks, heads = triton.cdiv(p.i, config.block_i), p.b * p.h
    flags = torch.zeros(heads * blocks, dtype=torch.int32, device=p.q.device)
    words = triton.cdiv(triton.cdiv(p.j, config.block_j), 32) * config.block_j  # of a row
    together = max(1, min(blocks * heads, MOST_MARKS // (4 * words * config.block_i)))
    marks = empty(together, config.block_i, words, like=p.q, dtype=torch.int32)
    table = p.row_table(config)
    told = {"heads": heads, "per_group": p.per_group(0), "row_table": table, "bounds": bounds, "marks": marks, "words": words, "N": n}  # fmt: skip

    def ballot(program: int, programs: int) -> Arguments:
        block_d = padded(p.d, p.q)
        tma, descriptors, maps = copied(p, config, (p.k, (config.block_j, block_d)))
        return programs, {
            "q": cells(p.q), "k": cells(p.k), "k_desc": descriptors[0], "k_map": maps[0], "program": program, "FOLD": p.fold,
            "TMA": tma, "enough": enough, "BLOCK_D": block_d, **told, **p.common, **config.launch,
        }  # fmt: skip

    def count(program: int, programs: int) -> Arguments:
        common = {name: p.common[name] for name in ("seen", "sizes", "MASK")}
        blocks = {"BLOCK_I": config.block_i, "BLOCK_J": config.block_j}
        rows = {"found": found, "counts": counts, "flags": flags, "program": program, "ROOM": room, "ROWS": COUNTED}
        return programs * (config.block_i // COUNTED), {"num_warps": 1, **told, **common, **blocks, **rows}

    def settle() -> Arguments:
        rows, slots, part, warps = SETTLED
        return triton.cdiv(p.i, rows) * heads, {
            "q": cells(p.q), "k": cells(p.k), "found": cells(found), "counts": rows_of(counts), **_told_of_top(p, norm, best),
            "heads": heads, "FOLD": p.fold, "N": n, "ROOM": room, "ROWS": rows, "SLOTS": slots,
            "PART": min(part, padded(p.d)), "num_warps": warps, **p.common,
        }  # fmt: skip

    for program in range(0, blocks * heads, together):
        programs = min(together, blocks * heads - program)
        # Turns are many and long: each is started the slow way, and none is kept.
        key = p.key and (p.key, n, enough, config) if programs == blocks * heads else None
        start(ballot_kernel, key, [*p.tensors, table.ptr, bounds, marks], lambda: ballot(program, programs))  # noqa: B023
        given = [*p.tensors, table.ptr, bounds, marks, found, counts, flags]
        start(count_kernel, key, given, lambda: count(program, programs))  # noqa: B023
    start(settle_kernel, p.key and (p.key, n), [*p.tensors, found, counts, norm, *best.values()], settle)
    return flags, config.block_i


def _bounds(bests: Tensor, n: int) -> Tensor:
    """For every row a score that its n best reach, and hardly more keys than those; from bests (b, h, groups, i)."""
    b, h, groups, rows = bests.shape
    bounds = empty(b, h, rows, like=bests, dtype=torch.float32)
    blocks = {"BLOCK_GROUPS": triton.next_power_of_2(groups), "BLOCK": 32, "num_warps": 1}
    arguments = {"bests": bests, "out": bounds, "I": rows, "groups": groups, "N": n, **blocks}
    start(bound_kernel, n, [bests, bounds], lambda: (b * h * triton.cdiv(rows, 32), arguments))
    return bounds


def by_ballot(problem: Problem, n: int) -> bool:
    """Whether the n largest are found by ballot: it wants whole tiles of products that one band shows, and twice as many
    tiles as keys are asked for; else many keys reach the bound."""
    p = Prepared(problem)
    if not p.product or p.exact or n > 16 or p.form.kind not in ("none", "causal", "band"):
        return False
    if p.i > 2**25:  # within a head its kernels count places in 32 bits
        return False
    widest = max(configured(kernel, p, p.d, None, lambda _: True).block_j for kernel in ("forward", "ballot"))
    seen = p.form.seen.before + p.form.seen.after if p.form.kind == "band" else p.j
    return p.j % widest == 0 and min(seen, p.j) >= 2 * n * widest
