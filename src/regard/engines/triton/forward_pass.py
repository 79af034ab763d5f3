"""The passes over rows and columns: from a problem to the arguments of a kernel, and from its outputs to results.

Each says which tensors its kernel is given and how its other arguments are made; `start` makes them once for a form. The largest
of a row are `largest`, gradients are `flow`. Imports `prepared` and the kernels; loaded only when the engine computes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.stats import Tiling
from .kernel_inputs import Arguments, Prepared, copied, empty, into_shared_memory, lots, multiprocessors, padded
from .kernels.column_pass import Pool, column_pass_kernel, pool_kernel
from .kernels.forward import Outputs, forward_kernel
from .kernels.tile_ops import Map, cells, copies_serve, rows_of
from .launcher import start
from .tile_config import Config, configured, short

#: Of how many groups of tiles the largest product is noted: four times as many as a ballot is asked for (`by_ballot`), and no
#: more, since all are sorted for a bound.
MOST_GROUPS = 64
#: What kernels in Gluon take of that which all are told: they know no steps, only products.
PRODUCTS = ("seen", "sizes", "scale2", "D", "MASK")


def forward(problem: Problem, names: tuple[str, ...], v: Tensor | None, keys: Tensor | None, best: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """What one pass tells: y, lse, norm, max_score, argmax, entropy, mean_distance, mass. `keys` is (b|1, h|1, 1, j).

    For `top` also, if `best`, `bests`: the largest product of every few tiles.
    """
    p = Prepared(problem, 1 if v is None else v.shape[1])
    e = 16 if v is None else v.shape[-1]
    found = {name: _row_output(p, name) for name in names if name != "y"}
    if v is not None:
        v = v.expand(p.b, -1, -1, -1)
        found["y"] = empty(p.b, p.h, p.i, e, like=v, dtype=v.dtype, lying=True)
    config = _forward_config(p, names, v, e)
    per_best = 1
    if best:
        ragged = 0 if p.form.kind in ("none", "causal") else 2  # at most: an edge on either side
        visits = triton.cdiv(p.j, config.block_j) + ragged
        per_best = triton.cdiv(visits, MOST_GROUPS)
        found["bests"] = empty(p.b, p.h, triton.cdiv(visits, per_best), p.i, like=p.q, dtype=torch.float32)
    table = p.row_table(config)
    kernel = forward_kernel
    if config.gluon:
        from .hopper.forward_ws import parted_kernel as kernel

    def arguments() -> Arguments:
        rows = {
            name: p.nothing if name not in found else cells(found[name]) if found[name].ndim == 4 else rows_of(found[name])
            for name in (*Outputs._fields, "bests")
        }  # fmt: skip
        bests, common = rows.pop("bests"), p.common
        told: dict[str, Any] = {
            name.upper(): name in names for name in ("lse", "norm", "entropy", "mean_distance", "mass", "argmax")
        }
        told |= {
            "out": Outputs(**rows), "bests": bests, "per_best": per_best, "groups": found["bests"].shape[2] if best else 0,
            "keys": p.nothing if keys is None else cells(keys), "sink": p.nothing if problem.sink is None else cells(problem.sink),
            "row_table": table, "heads": p.b * p.h, "per_group": p.per_group(e), "MAX": "max_score" in names, "BESTS": best,
            "SINK": problem.sink is not None, "SAME": v is not None and p.product and _same(v, p.k), **config.launch,
        }  # fmt: skip
        if config.gluon and v is not None:
            told |= {"drawer": drawer, **{name: common[name] for name in PRODUCTS}}
            return _parted_arguments(p, config, v, found["y"], told)
        tma, descriptors, maps = _forward_copies(p, config, v, e)
        return triton.cdiv(p.i, config.block_i) * p.b * p.h, {
            "q": cells(p.q), "k": cells(p.k), "v": p.nothing if v is None else cells(v), "pair": p.pair,
            "q_desc": descriptors[0], "k_desc": descriptors[1], "v_desc": descriptors[2],
            "q_map": maps[0], "k_map": maps[1], "v_map": maps[2], "PAIR": p.pair_kind, "E": e, "FOLD": p.fold, "Y": v is not None,
            "EXACT_V": v is not None and v.dtype == torch.float32, "TMA": tma,
            "EDGES": p.form.kind != "none" or p.j % config.block_j != 0, "WHOLE": p.j % config.block_j == 0,
            "BLOCK_D": padded(p.d, p.q), "BLOCK_E": padded(e, p.q), **told, **common,
        }  # fmt: skip

    drawer = lots(p) if config.gluon else None
    given = [*p.tensors, v, keys, problem.sink, table.ptr, *found.values(), drawer]
    start(kernel, p.key and (p.key, names, best, config), given, arguments)
    return found


def _row_output(p: Prepared, name: str) -> Tensor:
    shape = (p.b, p.h, p.i, 2) if name == "norm" else (p.b, p.h, p.i)
    return empty(*shape, like=p.q, dtype=torch.int64 if name == "argmax" else torch.float32)


def _forward_config(p: Prepared, names: tuple[str, ...], v: Tensor | None, e: int) -> Config:
    """Warps are parted only where the copy engine loads everything, and where there are two products to part them for."""

    def fits(config: Config) -> bool:
        if v is None or v.shape[-1] != p.d or not v.dtype == p.q.dtype == p.k.dtype:
            return False
        return copies_serve(p.d, (p.q, config.block_i // 2), (p.k, config.block_j), (v, config.block_j))

    return configured(_forward_name(p, names, v, e), p, e, v, fits)


def _forward_name(p: Prepared, names: tuple[str, ...], v: Tensor | None, e: int) -> str:
    """Which configuration a forward pass wants."""
    if max(p.d, e) <= 64 and ("argmax" in names or p.form.kind == "flags"):
        return "laden"
    if short(p, e):
        return "short"
    return "self" if v is not None and e <= 128 and _same(v, p.k) else "forward"


def _forward_copies(p: Prepared, config: Config, v: Tensor | None, e: int) -> tuple[bool, list[Any], list[Map]]:
    keys = p.k, (config.block_j, padded(p.d, p.q))
    values = keys if v is None or _same(v, p.k) else (v, (config.block_j, padded(e, p.q)))
    return copied(p, config, (p.q, (config.block_i, padded(p.d, p.q))), keys, values)


def _parted_arguments(p: Prepared, config: Config, v: Tensor, y: Tensor, told: dict[str, Any]) -> Arguments:
    half, blocks = config.block_i // 2, p.i // config.block_i * p.b * p.h
    copies = into_shared_memory(q=(p.q, half), k=(p.k, config.block_j), v=(v, config.block_j), y=(y, half))
    return min(blocks, multiprocessors(p.q.device)), {"blocks": blocks, "STAGES": config.stages, **copies, **told}


def _same(v: Tensor, k: Tensor) -> bool:
    """Whether values and keys are the same numbers in the same place: then they are read once."""
    return v.data_ptr() == k.data_ptr() and v.shape == k.shape and v.stride() == k.stride() and v.dtype == k.dtype


def column_pass(problem: Problem, names: tuple[str, ...], norm: Tensor, u: Tensor | None, tiling: Tiling | None) -> dict[str, Tensor]:  # fmt: skip
    """What columns tell: received, z, pool."""
    p = Prepared(problem)
    found: dict[str, Tensor] = {}
    if "received" in names:
        found["received"] = empty(p.b, p.h, p.j, like=p.q, dtype=torch.float32)
    e = 16
    if "z" in names and u is not None:
        u, e = u.expand(p.b, p.h, -1, -1), u.shape[-1]
        found["z"] = empty(p.b, p.h, p.j, e, like=p.q, dtype=torch.float32)
    config = _reread_config(p, names, e, u, tiling)
    pool, aligned = _pool(p, config, tiling if "pool" in names else None)
    norm2, table = p.in_base_2(norm), p.table(config)
    kernel = column_pass_kernel
    if config.gluon:
        from .hopper.column_pass_pipelined import ahead_kernel as kernel

    def arguments() -> Arguments:
        block_d, heads = padded(p.d, p.q), p.b * p.h
        told: dict[str, Any] = {
            "heads": heads, "per_group": p.per_group(0), "table": table, "pool": pool, "RECEIVED": "received" in names,
            "PARTS": "pool" in names, "out_received": rows_of(found["received"]) if "received" in found else p.nothing,
            **config.launch,
        }  # fmt: skip
        if config.gluon:
            return p.j // config.block_j * heads, told | _ahead_arguments(p, config, norm2)
        tma, descriptors, maps = copied(p, config, (p.q, (config.block_i, block_d)))
        return triton.cdiv(p.j, config.block_j) * heads, {
            "q": cells(p.q), "k": cells(p.k), "pair": p.pair, "q_desc": descriptors[0], "q_map": maps[0], "norm": norm2,
            "u": p.nothing if u is None else cells(u), "out_z": cells(found["z"]) if "z" in found else p.nothing,
            "PAIR": p.pair_kind, "E": e, "FOLD": p.fold, "EXACT_U": u is not None and u.dtype == torch.float32,
            "ALIGNED": aligned, "Z": "z" in names, "TMA": tma, "EDGES": p.edges(config), "WHOLE": p.whole(config),
            "BLOCK_D": block_d, "BLOCK_E": padded(e, p.q), **p.common, **told,
        }  # fmt: skip

    given = [*p.tensors, norm2, u, table.ptr, pool.sums, *found.values()]
    start(kernel, p.key and (p.key, names, pool[1:], aligned, config), given, arguments)
    if "pool" in names and tiling is not None:
        found["pool"] = _columns_pooled(pool.sums, tiling)
    return found


def _ahead_arguments(p: Prepared, config: Config, norm2: Tensor) -> dict[str, Any]:
    from .hopper.forward_ws import in_lines

    copies = into_shared_memory(q=(p.q, config.block_i), k=(p.k, config.block_j))
    copies["lse2_desc"], copies["lse2_map"] = in_lines(norm2, p.h, config.block_i, p.i // config.block_i)
    return {"STAGES": config.stages, **copies, **{name: p.common[name] for name in PRODUCTS}}


def _pool(p: Prepared, config: Config, tiling: Tiling | None) -> tuple[Pool, bool]:
    """Where columns are added up for a pooled map, and whether each tile of weights lies within one of its tile rows."""
    if tiling is None:
        return Pool(p.q, 1, 0, 1, 1), False
    block_i = _tile_rows(config)
    aligned, shape = _aligned(tiling, block_i), (p.b, p.h, tiling.rows, p.j)
    if aligned and p.form.kind in ("none", "causal"):
        sums = empty(*shape, like=p.q, dtype=torch.float32)
    else:  # what nobody sees is never written
        sums = torch.zeros(shape, dtype=torch.float32, device=p.q.device)
    blocks = (tiling.i1 - tiling.i0) // (tiling.rows * block_i) if aligned else 1
    return Pool(sums, tiling.rows, tiling.i0, tiling.i1, blocks), aligned


def _reread_config(p: Prepared, names: tuple[str, ...], e: int, u: Tensor | None, tiling: Tiling | None) -> Config:
    """Products run ahead only where the copy engine loads everything, and where a tile falls into one tile row."""

    def fits(config: Config) -> bool:
        if p.q.dtype != p.k.dtype:
            return False
        aligned = "pool" not in names or tiling is None or _aligned(tiling, _tile_rows(config))
        return aligned and copies_serve(p.d, (p.q, config.block_i), (p.k, config.block_j))

    return configured("sent", p, e, u) if "z" in names else configured("column_pass", p, 0, u, fits)


def _tile_rows(config: Config) -> int:
    """Rows of a tile: where products run ahead, a block of rows is two."""
    return config.block_i // 2 if config.gluon else config.block_i


def _aligned(tiling: Tiling, block_i: int) -> bool:
    """Whether every block of rows lies within one tile row of a pooled map."""
    n = tiling.i1 - tiling.i0
    return n > 0 and n % (tiling.rows * block_i) == 0 and tiling.i0 % block_i == 0


def _columns_pooled(sums: Tensor, tiling: Tiling) -> Tensor:
    """Sums of columns (b, h, rows, j) added up within each tile: (b, h, rows, cols), in a fixed order."""
    n = tiling.j1 - tiling.j0
    part = sums[..., tiling.j0 : tiling.j1]
    width = n // tiling.cols
    if n == sums.shape[3] and n % tiling.cols == 0 and 4 <= width <= 4096 and width & (width - 1) == 0:
        out = empty(*sums.shape[:3], tiling.cols, like=sums, dtype=torch.float32)
        tiles, block = out.numel(), 4096 // width
        arguments = {"sums": sums, "out": out, "tiles": tiles, "WIDTH": width, "BLOCK": block}
        # PyTorch's sum of short rows takes three times as long.
        start(pool_kernel, width, [sums, out], lambda: (triton.cdiv(tiles, block), arguments))
        return out
    if n % tiling.cols == 0:
        return part.unflatten(-1, (tiling.cols, width)).sum(-1)
    edge = torch.arange(tiling.cols + 1, device=sums.device) * n // tiling.cols
    widest = -(-n // tiling.cols)
    at = edge[:-1, None] + torch.arange(widest, device=sums.device)
    inside = at < edge[1:, None]
    return (part[..., at.clamp(max=n - 1)] * inside).sum(-1)
