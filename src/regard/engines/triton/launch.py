"""The passes: from a problem to the arguments of a kernel, and from its outputs to answers.

Each says which tensors its kernel is given and how its other arguments are made; `start` makes them once for a form.
Imports `prepared` and the kernels; loaded only when the engine computes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
from torch import Tensor

from ...factors import Problem
from ...score import Alibi
from ...statistics import Tiling
from ..gradient import Gradient
from .backward import Flow, keys_kernel, row_dot_kernel, rows_kernel, steps_kernel
from .configuration import Config, configured
from .forward import Outputs, forward_kernel
from .prepared import Prepared, copied, empty, padded
from .reread import Pool, pool_kernel, reread_kernel
from .start import start
from .tiles import Map, cells, copies_serve, described, rows_of
from .top import ballot_kernel, bound_kernel, count_kernel, search_kernel, settle_kernel

#: Of how many groups of tiles the largest product is noted: four times as many as a ballot is asked for (`by_ballot`), and no
#: more, since all are sorted for a bound.
MOST_GROUPS = 64
#: Bytes for marks on keys that may be among the largest, one bit a cell: what does not fit is done in turns.
MOST_MARKS = 2**30
#: Rows of one program that writes down marked keys, and of one that scores and sorts them (with slots and components at a
#: time, and warps). One warp: what several share must wait for all of them, in every round.
COUNTED, SETTLED = 4, (8, 8, 32, 1)

Arguments = tuple[int, dict[str, Any]]


def forward(problem: Problem, names: tuple[str, ...], v: Tensor | None, keys: Tensor | None, best: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """What one pass tells: y, lse, norm, max_score, argmax, entropy, reach, mass. `keys` is (b|1, h|1, 1, j).

    For `top` also, if `best`, `bests`: the largest product of every few tiles.
    """
    p = Prepared(problem, 1 if v is None else v.shape[1])
    e = 16 if v is None else v.shape[-1]
    found = {name: _row_output(p, name) for name in names if name != "y"}
    if v is not None:
        v = v.expand(p.b, -1, -1, -1)
        found["y"] = empty(p.b, p.h, p.i, e, like=p.q, dtype=v.dtype)
    config = _forward_config(p, v, e)
    per_best = 1
    if best:
        ragged = 0 if p.form.kind in ("none", "causal") else 2  # at most: an edge on either side
        visits = triton.cdiv(p.j, config.block_j) + ragged
        per_best = triton.cdiv(visits, MOST_GROUPS)
        found["bests"] = empty(p.b, p.h, triton.cdiv(visits, per_best), p.i, like=p.q, dtype=torch.float32)
    table = p.row_table(config)
    kernel = _parted_kernel() if config.apart else forward_kernel

    def arguments() -> Arguments:
        rows = {
            name: p.nothing if name not in found else cells(found[name]) if found[name].ndim == 4 else rows_of(found[name])
            for name in (*Outputs._fields, "bests")
        }  # fmt: skip
        bests, common = rows.pop("bests"), p.common
        told: dict[str, Any] = {
            name.upper(): name in names for name in ("lse", "norm", "entropy", "reach", "mass", "argmax")
        }
        told |= {
            "out": Outputs(**rows), "bests": bests, "per_best": per_best, "groups": found["bests"].shape[2] if best else 0,
            "keys": p.nothing if keys is None else cells(keys), "sink": p.nothing if problem.sink is None else cells(problem.sink),
            "row_table": table, "heads": p.b * p.h, "per_group": p.per_group(e), "MAX": "max_score" in names, "BESTS": best,
            "SINK": problem.sink is not None, "SAME": v is not None and p.product and _same(v, p.k), **config.launch,
        }  # fmt: skip
        if config.apart and v is not None:
            common = {name: common[name] for name in ("seen", "sizes", "scale2", "D", "MASK")}
            return _parted_arguments(p, config, v, found["y"], {"drawer": drawer, **told, **common})
        tma, descriptors, maps = _forward_copies(p, config, v, e)
        return triton.cdiv(p.i, config.block_i) * p.b * p.h, {
            "q": cells(p.q), "k": cells(p.k), "v": p.nothing if v is None else cells(v), "pair": p.pair,
            "q_desc": descriptors[0], "k_desc": descriptors[1], "v_desc": descriptors[2],
            "q_map": maps[0], "k_map": maps[1], "v_map": maps[2], "PAIR": p.pair_kind, "E": e, "FOLD": p.fold, "Y": v is not None,
            "EXACT_V": v is not None and v.dtype == torch.float32, "TMA": tma,
            "EDGES": p.form.kind != "none" or p.j % config.block_j != 0, "WHOLE": p.j % config.block_j == 0,
            "BLOCK_D": padded(p.d, p.q), "BLOCK_E": padded(e, p.q), **told, **common,
        }  # fmt: skip

    drawer = _drawer(p) if config.apart else None
    given = [*p.tensors, v, keys, problem.sink, table.ptr, *found.values(), drawer]
    start(kernel, p.key and (p.key, names, best, config), given, arguments)
    return found


def _row_output(p: Prepared, name: str) -> Tensor:
    shape = (p.b, p.h, p.i, 2) if name == "norm" else (p.b, p.h, p.i)
    return empty(*shape, like=p.q, dtype=torch.int64 if name == "argmax" else torch.float32)


def _forward_config(p: Prepared, v: Tensor | None, e: int) -> Config:
    """Warps are parted only where the copy engine loads everything, and where there are two products to part them for."""
    name = "self" if v is not None and e <= 128 and _same(v, p.k) else "forward"
    config = configured(name, p, e, v, whole_warps=v is None)
    if config.apart:
        alike = v is not None and v.shape[-1] == p.d and v.dtype == p.q.dtype == p.k.dtype
        tiles = [] if v is None else [(p.q, config.block_i // 2), (p.k, config.block_j), (v, config.block_j)]
        if not (alike and p.one_loop(config) and copies_serve(p.d, *tiles)):
            config = dataclasses.replace(configured(name, p, e, v, whole_warps=True), apart=False)
    return config


def _forward_copies(p: Prepared, config: Config, v: Tensor | None, e: int) -> tuple[bool, list[Any], list[Map]]:
    keys = p.k, (config.block_j, padded(p.d, p.q))
    values = keys if v is None or _same(v, p.k) else (v, (config.block_j, padded(e, p.q)))
    return copied(p, config, (p.q, (config.block_i, padded(p.d, p.q))), keys, values)


def _parted_kernel() -> Any:
    from .parted import parted_kernel

    return parted_kernel


def _parted_arguments(p: Prepared, config: Config, v: Tensor, y: Tensor, told: dict[str, Any]) -> Arguments:
    half, blocks = config.block_i // 2, p.i // config.block_i * p.b * p.h
    copies = _into_shared_memory(q=(p.q, half), k=(p.k, config.block_j), v=(v, config.block_j), y=(y, half))
    return min(blocks, _multiprocessors(p.q.device)), {"blocks": blocks, "STAGES": config.stages, **copies, **told}


def _into_shared_memory(**tensors: tuple[Tensor, int]) -> dict[str, Any]:
    """What the copy engine is told of each tensor, for tiles of so many rows."""
    from .parted import in_shared_memory

    told = {}
    for name, (x, rows) in tensors.items():
        told[f"{name}_desc"], told[f"{name}_map"] = in_shared_memory(described(x, (rows, x.shape[-1])))
    return told


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _drawer(p: Prepared) -> Tensor:
    """From which the programs of a parted kernel, as many as multiprocessors, draw one block of work after the other."""
    return torch.zeros(1, dtype=torch.int32, device=p.q.device)


def _same(v: Tensor, k: Tensor) -> bool:
    """Whether values and keys are the same numbers in the same place: then they are read once."""
    return v.data_ptr() == k.data_ptr() and v.shape == k.shape and v.stride() == k.stride() and v.dtype == k.dtype


def top(problem: Problem, n: int, bests: Tensor | None = None, norm: Tensor | None = None) -> dict[str, Tensor]:
    """The n largest scores of every row, and with `norm` their weights. With `bests` of a forward pass: by ballot, else by
    search."""
    p = Prepared(problem)
    found = {"top_score": empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)}
    found["top_index"] = empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.int64)
    if norm is not None:
        norm, found["top_weight"] = norm.contiguous(), empty(p.b, p.h, p.i, n, like=p.q, dtype=torch.float32)
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
    told = {name.removeprefix("top_"): cells(x) for name, x in found.items()}
    return {"weight": p.nothing, **told, "norm": p.nothing if norm is None else cells(norm), "WEIGHT": norm is not None}


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
    widest = max(configured(kernel, p, p.d, None).block_j for kernel in ("forward", "ballot"))
    seen = p.form.seen.before + p.form.seen.after if p.form.kind == "band" else p.j
    return p.j % widest == 0 and min(seen, p.j) >= 2 * n * widest


def reread(problem: Problem, names: tuple[str, ...], norm: Tensor, u: Tensor | None, tiling: Tiling | None) -> dict[str, Tensor]:  # fmt: skip
    """What columns tell: received, z, pool."""
    p = Prepared(problem)
    found: dict[str, Tensor] = {}
    if "received" in names:
        found["received"] = empty(p.b, p.h, p.j, like=p.q, dtype=torch.float32)
    e = 16
    if "z" in names and u is not None:
        u, e = u.expand(p.b, p.h, -1, -1), u.shape[-1]
        found["z"] = empty(p.b, p.h, p.j, e, like=p.q, dtype=torch.float32)
    config = configured("reread", p, e if "z" in names else 0, u)
    pool, aligned = Pool(p.q, 1, 0, 1, 1), False
    if "pool" in names and tiling is not None:
        n = tiling.i1 - tiling.i0
        aligned = n > 0 and n % (tiling.rows * config.block_i) == 0 and tiling.i0 % config.block_i == 0
        shape = p.b, p.h, tiling.rows, p.j
        if aligned and p.form.kind in ("none", "causal"):
            sums = empty(*shape, like=p.q, dtype=torch.float32)
        else:  # what nobody sees is never written
            sums = torch.zeros(shape, dtype=torch.float32, device=p.q.device)
        pool = Pool(sums, tiling.rows, tiling.i0, tiling.i1, n // (tiling.rows * config.block_i) if aligned else 1)
    norm2, table = p.in_base_2(norm), p.table(config)

    def arguments() -> Arguments:
        block_d, heads = padded(p.d, p.q), p.b * p.h
        tma, descriptors, maps = copied(p, config, (p.q, (config.block_i, block_d)))
        return triton.cdiv(p.j, config.block_j) * heads, {
            "q": cells(p.q), "k": cells(p.k), "pair": p.pair, "q_desc": descriptors[0], "q_map": maps[0], "heads": heads,
            "per_group": p.per_group(0), "norm": norm2, "u": p.nothing if u is None else cells(u), "table": table, "pool": pool,
            "out_received": rows_of(found["received"]) if "received" in found else p.nothing,
            "out_z": cells(found["z"]) if "z" in found else p.nothing, "PAIR": p.pair_kind, "E": e, "FOLD": p.fold,
            "EXACT_U": u is not None and u.dtype == torch.float32, "RECEIVED": "received" in names, "PARTS": "pool" in names,
            "ALIGNED": aligned, "Z": "z" in names, "TMA": tma, "EDGES": p.edges(config), "WHOLE": p.whole(config),
            "BLOCK_D": block_d, "BLOCK_E": padded(e, p.q), **p.common, **config.launch,
        }  # fmt: skip

    given = [*p.tensors, norm2, u, table.ptr, pool.sums, *found.values()]
    start(reread_kernel, p.key and (p.key, names, pool[1:], aligned, config), given, arguments)
    if "pool" in names and tiling is not None:
        found["pool"] = _columns_pooled(pool.sums, tiling)
    return found


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


# Backward.


@dataclasses.dataclass
class Flowing:
    """What flows back as the kernels take it: the output's part apart from the further columns."""

    p: Prepared
    v: Tensor | None
    dy: Tensor | None
    flow: Flow
    constants: dict[str, bool]

    @property
    def e(self) -> int:
        return 1 if self.v is None else self.v.shape[-1]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.p.tensors, self.v, self.dy, *self.flow[:6]]

    @property
    def key(self) -> Any:
        return self.p.key and (self.p.key, *self.constants.values())

    def common(self) -> dict[str, Any]:
        """What every kernel of the backward pass takes."""
        p = self.p
        return {
            "q": cells(p.q), "k": cells(p.k), "v": p.nothing if self.v is None else cells(self.v),
            "dy": p.nothing if self.dy is None else cells(self.dy), "flow": self.flow, "E": self.e, "FOLD": p.fold,
            "BLOCK_D": padded(p.d, p.q), "BLOCK_E": padded(self.e, p.q), **self.constants, **p.common,
        }  # fmt: skip


def flowing(problem: Problem, v: Tensor | None, norm: Tensor, gradient: Gradient) -> Flowing:
    v = None if gradient.dy is None else v
    # The gradient of y came in the type of y: nothing is lost.
    dy = None if v is None or gradient.dy is None else gradient.dy.to(v.dtype)
    e = 0 if v is None else v.shape[-1]
    p = Prepared(problem, 1 if v is None else v.shape[1])
    v = None if v is None else v.expand(p.b, -1, -1, -1)
    extras = gradient.left.shape[-1] - e
    eta = p.q if gradient.eta is None else gradient.eta.contiguous()
    rho = p.q if gradient.rho is None else gradient.rho.contiguous()
    left, right = p.q, p.nothing
    if extras:
        left = gradient.left[..., e:].expand(p.b, p.h, -1, -1).contiguous()
        right = cells(gradient.right[..., e:].contiguous())
    flow = Flow(p.in_base_2(norm), gradient.c.contiguous(), eta, rho, left, right.ptr, right.b, right.h, extras)
    constants = {
        "EXACT_V": v is not None and v.dtype == torch.float32, "Y": v is not None, "ETA": gradient.eta is not None,
        "RHO": gradient.rho is not None, "EXTRAS": extras > 0,
    }  # fmt: skip
    return Flowing(p, v, dy, flow, constants)


def backward(problem: Problem, v: Tensor | None, norm: Tensor, gradient: Gradient) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq, dk and dv."""
    f = flowing(problem, v, norm, gradient)
    dk, dv = keys_pass(f)
    return rows_pass(f), dk, dv


def keys_pass(f: Flowing) -> tuple[Tensor, Tensor | None]:
    """dk and dv."""
    p, v, dy = f.p, f.v, f.dy
    g, hv = p.k.shape[1], 1 if v is None else v.shape[1]
    # Keys and values that are shared by the same query heads are added up where they are computed.
    heads = g if v is None or hv == g else p.h
    dk = empty(p.b, heads, p.j, p.d, like=p.q, dtype=p.k.dtype if heads == g else torch.float32)
    dv = None if v is None else empty(p.b, heads, p.j, f.e, like=p.q, dtype=v.dtype if heads == hv else torch.float32)
    config = _keys_config(f, heads)
    table = p.table(config)
    if config.apart and v is not None and dy is not None and dv is not None:
        _parted_keys(f, config, v, dy, dk, dv)
        return dk, dv

    def arguments() -> Arguments:
        back = (p.q, (config.block_i, padded(p.d, p.q))) if dy is None else (dy, (config.block_i, padded(f.e, p.q)))
        tma, descriptors, maps = copied(p, config, (p.q, (config.block_i, padded(p.d, p.q))), back)
        return triton.cdiv(p.j, config.block_j) * p.b * heads, {
            "q_desc": descriptors[0], "dy_desc": descriptors[1], "q_map": maps[0], "dy_map": maps[1], "table": table,
            "out_dk": cells(dk), "out_dv": p.nothing if dv is None else cells(dv), "heads": heads, "group": p.h // heads,
            "batch": p.b, "per_group": min(p.per_group(f.e), p.b * heads), "TMA": tma, "EDGES": p.edges(config),
            "WHOLE": p.whole(config), **f.common(), **config.launch,
        }  # fmt: skip

    start(keys_kernel, f.key and (f.key, config), [*f.tensors, table.ptr, dk, dv], arguments)
    return _per_key_head(dk, g), None if dv is None else _per_key_head(dv, hv)


def _keys_config(f: Flowing, heads: int) -> Config:
    """Warps are parted where the copy engine takes everything in and out, and nothing but products and rows' terms flows."""
    p, v = f.p, f.v
    config = configured("keys", p, f.e, v)
    if config.apart:
        tiles = [] if v is None or f.dy is None else [(p.q, 64), (p.k, 64), (v, 64), (f.dy, 64)]
        alike = len(tiles) > 0 and all(x.dtype == p.q.dtype for x, _ in tiles)
        own_heads = v is not None and heads == p.k.shape[1] == v.shape[1]
        if f.constants["EXTRAS"] or not (alike and own_heads and p.one_loop(config) and copies_serve(p.d, *tiles)):
            config = dataclasses.replace(configured("keys", p, f.e, v, whole_warps=True), apart=False)
    return config


def _parted_keys(f: Flowing, config: Config, v: Tensor, dy: Tensor, dk: Tensor, dv: Tensor) -> None:
    from .parted_keys import parted_keys_kernel

    p, heads, half = f.p, dk.shape[1], config.block_j // 2
    drawer, table = _drawer(p), p.table(config)

    def arguments() -> Arguments:
        rows, keys = config.block_i, p.j // config.block_j
        copies = _into_shared_memory(
            q=(p.q, rows), dy=(dy, rows), k=(p.k, half), v=(v, half), dk=(dk, half), dv=(dv, half)
        )
        common = {name: p.common[name] for name in ("seen", "sizes", "scale", "scale2", "D", "MASK")}
        return min(keys * p.b * heads, _multiprocessors(p.q.device)), {
            "drawer": drawer, "flow": f.flow, "table": table, "heads": heads, "group": p.h // heads, "batch": p.b,
            "per_group": min(p.per_group(f.e), p.b * heads), "ETA": f.constants["ETA"], "RHO": f.constants["RHO"],
            "STAGES": config.stages, **copies, **common, **config.launch,
        }  # fmt: skip

    given = [*f.tensors, table.ptr, dk, dv, drawer]
    start(parted_keys_kernel, f.key and (f.key, config), given, arguments)


def rows_pass(f: Flowing) -> Tensor:
    """dq."""
    p, v = f.p, f.v
    dq = empty(p.b, p.h, p.i, p.d, like=p.q, dtype=p.q.dtype)
    config = configured("rows", p, f.e, v)
    table = p.row_table(config)

    def arguments() -> Arguments:
        keys = p.k, (config.block_j, padded(p.d, p.q))
        tma, descriptors, maps = copied(p, config, keys, keys if v is None else (v, (config.block_j, padded(f.e, p.q))))
        return triton.cdiv(p.i, config.block_i) * p.b * p.h, {
            "k_desc": descriptors[0], "v_desc": descriptors[1], "k_map": maps[0], "v_map": maps[1], "row_table": table,
            "out_dq": cells(dq), "heads": p.b * p.h, "per_group": p.per_group(f.e), "TMA": tma, "EDGES": p.edges(config),
            "WHOLE": p.whole(config), **f.common(), **config.launch,
        }  # fmt: skip

    start(rows_kernel, f.key and (f.key, config), [*f.tensors, table.ptr, dq], arguments)
    return dq


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_e a b, (b, h, i, e) twice to (b, h, i), in float32."""
    *outer, n, e = a.shape
    out = empty(*outer, n, like=a, dtype=torch.float32)
    if not out.numel() or not e:
        return torch.zeros_like(out)

    def arguments() -> Arguments:
        told = {"a": cells(a), "b": cells(b), "out": rows_of(out), "heads": outer[1], "I": n, "E": e}
        return outer[0] * outer[1] * triton.cdiv(n, 32), told | {"BLOCK_I": 32, "BLOCK_E": padded(e)}

    start(row_dot_kernel, (), [a, b, out], arguments)
    return out


def step_gradient(problem: Problem, n: int, v: Tensor | None, norm: Tensor, gradient: Gradient) -> Tensor:
    """The gradient of the tensor of step n, in its own shape."""
    f = flowing(problem, v, norm, gradient)
    p, step = f.p, problem.steps[n]
    tensor = step.slopes if isinstance(step, Alibi) else step.tensor  # type: ignore[attr-defined]
    like = tensor.shape
    along = "rows" if like[3] == 1 else "keys" if like[2] == 1 else "cells"
    if p.j == 1 and like[2] > 1:
        along = "rows"
    config = configured("steps", p, f.e, f.v)
    shape = {"rows": (p.b, p.h, p.i), "keys": (p.b, p.h, p.j), "cells": (like[0], like[1], p.i, p.j)}[along]
    out = empty(*shape, like=p.q, dtype=torch.float32)
    table, row_table = p.table(config), p.row_table(config)

    def arguments() -> Arguments:
        blocks_i, blocks_j = triton.cdiv(p.i, config.block_i), triton.cdiv(p.j, config.block_j)
        programs = {"rows": blocks_i, "keys": blocks_j, "cells": blocks_i * blocks_j}[along] * shape[0] * shape[1]
        told = f.common()
        del told["FOLD"]
        return programs, {
            "table": table, "row_table": row_table, "out": cells(out) if along == "cells" else rows_of(out),
            "out_heads": like[1], "batch": p.b, "TARGET": n, "ALONG": along, **told, **config.launch,
        }  # fmt: skip

    start(
        steps_kernel,
        f.key and (f.key, n, along, config),
        [*f.tensors, table.ptr, row_table.ptr, tensor, out],
        arguments,
    )
    if along == "rows":
        return out.unsqueeze(-1).sum_to_size(like)
    return out.unsqueeze(-2).sum_to_size(like) if along == "keys" else out


def _per_key_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
