"""The forward pass and the column pass: from a problem to kernel arguments, and from outputs to results.

Each pass names the tensors of its kernel and how the other arguments are computed; `launch` computes them once a signature.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.pytree import replace_fields
from ...core.stats import Tiling
from .kernel_inputs import (
    KernelInputs,
    LaunchArgs,
    empty,
    forward_outputs,
    gluon_tma_args,
    new_tile_counter,
    num_sms,
    output_args,
    padded_size,
    tma_descriptors,
)
from .kernels.column_pass import Pool, column_pass_kernel, pool_kernel
from .kernels.forward import forward_kernel, row_stats
from .kernels.parts import halves_kernel, thirds_kernel
from .kernels.tile_ops import TmaLayout, row_arg, tensor_arg, tma_fits, tma_fits_heads
from .launcher import launch
from .tile_config import Config, choose_config, gluon_config, is_short, uses_parts

#: Groups of tiles whose largest score is stored: four times the 16 that `uses_candidates` allows, since all are sorted for a bound.
MAX_GROUPS = 64
#: Tiles of all keys up to which one loop takes them.
FEW_TILES = 3
#: Neighbouring columns of a pooled map that are summed before they are stored: at most what a warp has of a product side by side.
POOLED_TOGETHER = (16, 8, 4, 2)
#: Columns of float32 vectors up to which Wᵀ u is sums of weights times a number a row: a product at float32 accuracy takes longer.
FEW_COLUMNS = 4
#: Results of `row_pass_pipelined`.
ROW_PASS = ("lse", "norm", "max_score", "entropy")
#: Common arguments that the Gluon kernels accept: they support no score modifiers.
GLUON_ARGS = ("mask", "sizes", "scale2", "D", "MASK")


def forward(problem: Problem, names: tuple[str, ...], v: Tensor | None, keys: Tensor | None, with_tile_maxima: bool = False, store: bool = False, by_parts: bool = True) -> dict[str, Tensor]:  # fmt: skip
    """Row statistics `names`: y, lse, norm, max_score, argmax, entropy, mean_distance, mass. `keys` is (b|1, h|1, 1, j).

    With `with_tile_maxima` also `tile_maxima`, the largest score of every few tiles, for topk. With `store` also `scores`
    (b, h, i, pitch), written where tiles are visited; values are then at most 64 wide. Without `by_parts` scores are those of all
    other passes.
    """
    p = KernelInputs(problem, 1 if v is None else v.shape[1])
    v, e, outputs = forward_outputs(p, names, v)
    parts = parts_of(p, v) if by_parts else None
    config = (
        _forward_config(p, names, v, e, store, with_tile_maxima)
        if parts is None
        else choose_config("parts", p, e, None)
    )
    tiles_per_group = 1
    if with_tile_maxima:
        ragged = 0 if p.mask_format.kind in ("none", "causal") else 2  # an edge on either side, at most
        visits = triton.cdiv(p.j, config.block_j) + ragged
        tiles_per_group = triton.cdiv(visits, MAX_GROUPS)
        outputs["tile_maxima"] = empty(
            p.b, p.h, triton.cdiv(visits, tiles_per_group), p.i, like=p.q, dtype=torch.float32
        )
    pitch = triton.cdiv(p.j, 16) * 16  # so that the stores of a thread are 8 bytes wide
    if store:
        outputs["scores"] = empty(p.b, p.h, p.i, pitch, like=p.q, dtype=torch.float32)
    table = p.row_table(config)
    kernel = forward_kernel
    if config.gluon and v is None:
        from .hopper.row_pass_pipelined import row_pass_pipelined_kernel as kernel
    elif config.gluon:
        from .hopper.forward_ws import forward_ws_kernel as kernel

    def launch_args() -> LaunchArgs:
        tile_maxima, common_args = tensor_arg(outputs["tile_maxima"]) if with_tile_maxima else p.unused, p.common_args
        args: dict[str, Any] = {
            "STATS": row_stats(names),
            "out": output_args(p, outputs), "tile_maxima": tile_maxima, "tiles_per_group": tiles_per_group, "groups": outputs["tile_maxima"].shape[2] if with_tile_maxima else 0,
            "keys": p.unused if keys is None else tensor_arg(keys), "sink": p.unused if problem.sink is None else tensor_arg(problem.sink),
            "row_table": table, "heads": p.b * p.h, "heads_per_group": p.heads_per_group(e), "TILE_MAXIMA": with_tile_maxima,
            "SINK": problem.sink is not None, "SHARED_KV": p.product and p.values_are_keys(v), **config.launch,
        }  # fmt: skip
        if config.gluon and v is None:
            return p.i // config.block_i * p.b * p.h, _row_pass_args(p, config, args)
        if config.gluon and v is not None:
            args |= {"tile_counter": tile_counter, **{name: common_args[name] for name in GLUON_ARGS}}
            return _forward_ws_args(p, config, v, outputs["y"], args)
        tma, descriptors, layouts = _forward_descriptors(p, config, v, e)
        return triton.cdiv(p.i, config.block_i) * p.b * p.h, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "v": p.unused if v is None else tensor_arg(v), "tanh_arg": p.tanh_arg,
            "q_desc": descriptors[0], "k_desc": descriptors[1], "v_desc": descriptors[2],
            "q_layout": layouts[0], "k_layout": layouts[1], "v_layout": layouts[2], "scores": outputs.get("scores", p.q), "pitch": pitch, "q_scale": p.q, "k_scale": p.q, "PARTS": parts is not None, "SCORES": store, "SIMILARITY": p.similarity, "E": e, "SCALE_FOLDED": p.scale_folded, "Y": v is not None,
            "FP32_V": v is not None and v.dtype == torch.float32, "TMA": tma,
            "EDGES": _edges(p, config), "EVEN_BLOCKS": p.j % config.block_j == 0,
            "BLOCK_D": padded_size(p.d, p.q), "BLOCK_E": padded_size(e, p.q), **args, **common_args, **({} if parts is None else parts.args()),
        }  # fmt: skip

    tile_counter = new_tile_counter(p) if config.gluon and v is not None else None
    tensors = [*p.tensors, v, keys, problem.sink, table.ptr, *outputs.values(), tile_counter, *(parts or ())]
    launch(kernel, p.key and (p.key, names, with_tile_maxima, store, config), tensors, launch_args)
    return outputs


class SplitInputs(NamedTuple):
    """Queries, keys and values of float32 in parts of 16 bits."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor | None

    def args(self) -> dict[str, Any]:
        values = {} if self.v is None else {"v": tensor_arg(self.v)}
        scales = {"q_scale": self.q_scale, "k_scale": self.k_scale}
        return {"q": tensor_arg(self.q), "k": tensor_arg(self.k), **scales, **values, "SHARED_KV": False, "TMA": False}


def norm_of_product(p: KernelInputs, norm: Tensor) -> Tensor:
    """The norm by the product whose scores are to be divided by it.

    Scores by parts of 16 bits may be an ulp off those of other passes: near 10,000 a weight exceeds 1 by a thousandth.
    """
    return forward(p.problem, ("norm",), None, None, by_parts=False)["norm"] if uses_parts(p, None) else norm


def norm2_of_product(p: KernelInputs, norm: Tensor) -> Tensor:
    """The same in base 2, as `load_norm2` reads it."""
    return p.norm2(norm_of_product(p, norm))


def parts_of(p: KernelInputs, v: Tensor | None) -> SplitInputs | None:
    """Parts of the inputs of a forward pass, where its products go by them."""
    if not uses_parts(p, v):
        return None
    return SplitInputs(*_halves(p.q), *_halves(p.k), None if v is None else _thirds(v))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    b, h, n, d = x.shape
    out, scale = empty(b, h, n, 2 * d, like=x, dtype=torch.float16), empty(b, h, n, like=x, dtype=torch.float32)
    rows = max(1, 2048 // padded_size(d))

    def launch_args() -> LaunchArgs:
        sizes = {"H": h, "N": n, "D": d, "ROWS": rows, "BLOCK_D": padded_size(d)}
        return triton.cdiv(n, rows) * b * h, {"x": tensor_arg(x), "out": out, "scale": scale, **sizes}

    launch(halves_kernel, "halves", [x, out, scale], launch_args)
    return out, scale


def _thirds(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    out = empty(b, h, n, 3 * d, like=x, dtype=torch.bfloat16)
    rows = max(1, 2048 // padded_size(d))

    def launch_args() -> LaunchArgs:
        sizes = {"H": h, "N": n, "D": d, "ROWS": rows, "BLOCK_D": padded_size(d)}
        return triton.cdiv(n, rows) * b * h, {"x": tensor_arg(x), "out": out, **sizes}

    launch(thirds_kernel, "thirds", [x, out], launch_args)
    return out


def _forward_config(
    p: KernelInputs, names: tuple[str, ...], v: Tensor | None, e: int, store: bool, with_tile_maxima: bool
) -> Config:
    """Warp specialisation needs TMA for all inputs, and values as wide as keys."""

    def fits(config: Config) -> bool:
        return p.i > 64 and v is not None and v.dtype == p.q.dtype == p.k.dtype and tma_fits_heads(p.q, p.k, v)

    def rows_fit(config: Config) -> bool:
        same, tma = p.q.dtype == p.k.dtype, tma_fits(p.d, (p.q, config.block_i), (p.k, config.block_j))
        return same and p.even_blocks(config) and tma and {*names} <= {*ROW_PASS}

    if v is None and not (with_tile_maxima or store or is_short(p, e)):
        rows = gluon_config("row_pass", p, 0, rows_fit, ("forward",))
        if rows is not None:
            return rows
    return choose_config(_forward_name(p, names, v, e, store), p, e, v, fits)


def _forward_name(p: KernelInputs, names: tuple[str, ...], v: Tensor | None, e: int, store: bool) -> str:
    """Name of the tile configuration of a forward pass."""
    if max(p.d, e) <= 64 and ("argmax" in names or p.mask_format.kind == "flags"):
        return "many_stats"
    if store or is_short(p, e):  # keys that end early in a tile of 64 take narrower ones
        return "narrow" if 0 < p.j % 64 <= 32 else "short"
    return "shared_kv" if e <= 128 and p.values_are_keys(v) else "forward"


def _forward_descriptors(
    p: KernelInputs, config: Config, v: Tensor | None, e: int
) -> tuple[bool, list[Any], list[TmaLayout]]:
    keys = p.k, (config.block_j, padded_size(p.d, p.q))
    values = keys if v is None or p.values_are_keys(v) else (v, (config.block_j, padded_size(e, p.q)))
    return tma_descriptors(p, config, (p.q, (config.block_i, padded_size(p.d, p.q))), keys, values)


def _edges(p: KernelInputs, config: Config) -> int:
    """EDGES of the forward kernel. Few tiles, of which the last is partial, are one loop: the loads of another would begin when it ends."""
    ragged = p.j % config.block_j != 0
    if ragged and p.mask_format.kind == "none" and p.j <= FEW_TILES * config.block_j:
        return 2
    return int(ragged or p.mask_format.kind != "none")


def _forward_ws_args(p: KernelInputs, config: Config, v: Tensor, y: Tensor, args: dict[str, Any]) -> LaunchArgs:
    from .hopper.gluon_ops import head_descriptor

    half, blocks = config.block_i // 2, triton.cdiv(p.i, config.block_i) * p.b * p.h
    d, e = padded_size(p.d, p.q), padded_size(v.shape[-1], p.q)
    return min(blocks, num_sms(p.q.device)), {
        **args,
        "q_desc": head_descriptor(p.q, half, d),
        "k_desc": head_descriptor(p.k, config.block_j, d),
        "v_desc": head_descriptor(v, config.block_j, e),
        "y_desc": head_descriptor(y, half, e),
        "blocks": blocks,
        "STAGES": config.stages,
        "D": _counted(p.d, d),
        "E": _counted(v.shape[-1], e),
        "RAGGED": p.j % config.block_j != 0,
        "REUSE": d == e == 256,
    }


def _row_pass_args(p: KernelInputs, config: Config, args: dict[str, Any]) -> dict[str, Any]:
    wanted = "STATS", "out", "sink", "row_table", "heads", "heads_per_group", "SINK"
    return {
        **{name: args[name] for name in wanted},
        **{name: p.common_args[name] for name in GLUON_ARGS},
        **gluon_tma_args(q=(p.q, config.block_i), k=(p.k, config.block_j)),
        **config.launch,
        "STAGES": config.stages,
        "WARPS": config.warps,
    }


def _counted(size: int, width: int) -> int:
    """Components of a tile that are multiplied: all of its width, but for 160 or 192 in a tile of 256 only three quarters."""
    return 192 if 128 < size <= 192 and width == 256 else width


def column_pass(problem: Problem, names: tuple[str, ...], norm: Tensor, u: Tensor | None, tiling: Tiling | None) -> dict[str, Tensor]:  # fmt: skip
    """Column statistics `names`: received, z, pool."""
    if "z" in names and u is not None and u.shape[-1] <= (FEW_COLUMNS if u.dtype == torch.float32 else 1):
        others = tuple(name for name in names if name != "z")
        of_rows = u.float().expand(*problem.shape[:2], -1, -1)
        columns = [_columns(problem, ("received",), norm, None, None, x.contiguous()) for x in of_rows.unbind(-1)]
        z = torch.stack([column["received"] for column in columns], -1)
        return {**(_columns(problem, others, norm, None, tiling) if others else {}), "z": z}
    return _columns(problem, names, norm, u, tiling)


def _columns(
    problem: Problem, names: tuple[str, ...], norm: Tensor, u: Tensor | None, tiling: Tiling | None, factors: Tensor | None = None
) -> dict[str, Tensor]:  # fmt: skip
    """The same by one launch; every row counts times one of `factors` (b, h, i), if there are any."""
    p = KernelInputs(problem)
    outputs: dict[str, Tensor] = {}
    if "received" in names:
        outputs["received"] = empty(p.b, p.h, p.j, like=p.q, dtype=torch.float32)
    e = 16
    if "z" in names and u is not None:
        u, e = u.expand(p.b, p.h, -1, -1), u.shape[-1]
        outputs["z"] = empty(p.b, p.h, p.j, e, like=p.q, dtype=torch.float32)
    config = _column_config(p, names, e, u, tiling)
    if factors is not None:  # they take registers, and a limit would spill
        config = replace(config, registers=None)
    pool, rows, together = _pool(p, config, tiling if "pool" in names else None)
    norm2, table = p.norm2(norm), p.key_table(config)
    kernel = column_pass_kernel
    if config.gluon:
        from .hopper.column_pass_pipelined import column_pass_pipelined_kernel as kernel

    def launch_args() -> LaunchArgs:
        block_d, heads = padded_size(p.d, p.q), p.b * p.h
        args: dict[str, Any] = {
            "heads": heads, "heads_per_group": p.heads_per_group(0), "key_table": table, "pool": pool, "RECEIVED": "received" in names, "WEIGHTED": factors is not None,
            "POOL": together, "out_received": row_arg(outputs["received"]) if "received" in outputs else p.unused,
            **config.launch,
        }  # fmt: skip
        if config.gluon:
            return p.j // config.block_j * heads, args | _column_pipeline_args(p, config, norm2, factors)
        tma, descriptors, layouts = tma_descriptors(p, config, (p.q, (config.block_i, block_d)))
        return triton.cdiv(p.j, config.block_j) * heads, {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "tanh_arg": p.tanh_arg, "q_desc": descriptors[0], "q_layout": layouts[0], "norm": norm2, "factors": norm2 if factors is None else factors,
            "u": p.unused if u is None else tensor_arg(u), "out_z": tensor_arg(outputs["z"]) if "z" in outputs else p.unused,
            "SIMILARITY": p.similarity, "E": e, "SCALE_FOLDED": p.scale_folded, "FP32_U": u is not None and u.dtype == torch.float32,
            "POOL_ROWS": rows, "Z": "z" in names, "TMA": tma, "EDGES": p.edges(config), "EVEN_BLOCKS": p.even_blocks(config),
            "BLOCK_D": block_d, "BLOCK_E": padded_size(e, p.q), **p.common_args, **args,
        }  # fmt: skip

    tensors = [*p.tensors, norm2, factors, u, table.ptr, pool.sums, *outputs.values()]
    launch(kernel, p.key and (p.key, names, pool[1:], rows, together, config), tensors, launch_args)
    if "pool" in names and tiling is not None:
        ends = {"j0": tiling.j0 // together, "j1": tiling.j1 // together}
        outputs["pool"] = _pool_columns(pool.sums, replace_fields(tiling, **ends))
    return outputs


def pipelined_args(p: KernelInputs, config: Config, norm2: Tensor) -> dict[str, Any]:
    """Arguments of the pipelined kernels that walk rows: tiles of queries with one number a row."""
    from .hopper.gluon_ops import row_vector_descriptor

    descriptors, lines = gluon_tma_args(q=(p.q, config.block_i), k=(p.k, config.block_j)), p.i // config.block_i
    descriptors["lse2_desc"], descriptors["row_layout"] = row_vector_descriptor(norm2, p.h, config.block_i, lines)
    common_args = {name: p.common_args[name] for name in GLUON_ARGS}
    return {"STAGES": config.stages, "WARPS": config.warps, **descriptors, **common_args}


def _column_pipeline_args(p: KernelInputs, config: Config, norm2: Tensor, factors: Tensor | None) -> dict[str, Any]:
    from .hopper.gluon_ops import row_vector_descriptor

    args = pipelined_args(p, config, norm2)
    if factors is None:
        return args | {"factors_desc": args["lse2_desc"]}
    return args | {"factors_desc": row_vector_descriptor(factors, p.h, config.block_i, p.i // config.block_i)[0]}


def _pool(p: KernelInputs, config: Config, tiling: Tiling | None) -> tuple[Pool, int, int]:
    """Buffer of a pooled map's column sums, POOL_ROWS of the kernel, and how many neighbouring columns a sum is of; 0 without
    a map."""
    if tiling is None:
        return Pool(p.q, 1, 0, 1, 1), 0, 0
    block_i = _tile_rows(config)
    aligned = _aligned(tiling, p.i, block_i)
    rows = 0 if aligned else _low_rows(tiling, p.i, block_i)
    widths = POOLED_TOGETHER[:1] if config.gluon else POOLED_TOGETHER
    together = next((n for n in widths if rows >= 0 and _columns_fit(tiling, p.j, n)), 1)
    shape = p.b, p.h, tiling.rows, p.j // together
    if rows >= 0 and p.mask_format.kind in ("none", "causal"):
        sums = empty(*shape, like=p.q, dtype=torch.float32)
    else:  # columns that no row sees are never stored
        sums = torch.zeros(shape, dtype=torch.float32, device=p.q.device)
    blocks = (tiling.i1 - tiling.i0) // (tiling.rows * block_i) if aligned else 1
    return Pool(sums, tiling.rows, tiling.i0, tiling.i1, blocks), rows, together


def _low_rows(tiling: Tiling, rows: int, block_i: int) -> int:
    """The rows of a tile row, where they divide a row block and all begin at multiples of them; else −1."""
    n = tiling.i1 - tiling.i0
    height, rest = divmod(n, tiling.rows)
    here = 0 <= tiling.i0 < tiling.i1 <= rows
    return height if here and not rest and block_i % height == 0 and tiling.i0 % height == 0 else -1


def _columns_fit(tiling: Tiling, keys: int, together: int) -> bool:
    """Whether every tile of the map begins and ends at multiples of `together` keys, all of which are here."""
    n = tiling.j1 - tiling.j0
    here = tiling.j0 >= 0 and tiling.j1 <= keys
    return here and keys % together == 0 and tiling.j0 % together == 0 and n % (tiling.cols * together) == 0


def _column_config(p: KernelInputs, names: tuple[str, ...], e: int, u: Tensor | None, tiling: Tiling | None) -> Config:
    """The pipelined kernel needs TMA for all inputs, and tiles that lie within one tile row."""

    def fits(config: Config) -> bool:
        if p.q.dtype != p.k.dtype or not p.even_blocks(config):
            return False
        aligned = "pool" not in names or tiling is None or _aligned(tiling, p.i, _tile_rows(config))
        return aligned and tma_fits(p.d, (p.q, config.block_i), (p.k, config.block_j))

    return choose_config("columns_with_u", p, e, u) if "z" in names else choose_config("column_pass", p, 0, u, fits)


def _tile_rows(config: Config) -> int:
    """Rows of a tile: a row block of the pipelined kernel is two tiles."""
    return config.block_i // 2 if config.gluon else config.block_i


def _aligned(tiling: Tiling, rows: int, block_i: int) -> bool:
    """Whether the pooled rows are all here, and every row block lies within one tile row of the map."""
    n = tiling.i1 - tiling.i0
    here = 0 <= tiling.i0 < tiling.i1 <= rows
    return here and n % (tiling.rows * block_i) == 0 and tiling.i0 % block_i == 0


def _pool_columns(sums: Tensor, tiling: Tiling) -> Tensor:
    """Column sums (b, h, rows, j) summed within each tile: (b, h, rows, cols), in a fixed order."""
    n = tiling.j1 - tiling.j0
    if tiling.j0 < 0 or tiling.j1 > sums.shape[3]:
        return _pool_some_columns(sums, tiling)
    part = sums[..., tiling.j0 : tiling.j1]
    width = n // tiling.cols
    if width == 1 and n == tiling.cols:
        return part if n == sums.shape[3] else part.contiguous()
    if n == sums.shape[3] and n % tiling.cols == 0 and 4 <= width <= 4096 and width & (width - 1) == 0:
        out = empty(*sums.shape[:3], tiling.cols, like=sums, dtype=torch.float32)
        tiles, block = out.numel(), 4096 // width
        launch_args = {"sums": sums, "out": out, "tiles": tiles, "WIDTH": width, "BLOCK": block}
        # PyTorch's sum of short rows takes three times as long.
        launch(pool_kernel, width, [sums, out], lambda: (triton.cdiv(tiles, block), launch_args))
        return out
    if n % tiling.cols == 0:
        return part.unflatten(-1, (tiling.cols, width)).sum(-1)
    edge = torch.arange(tiling.cols + 1, device=sums.device) * n // tiling.cols
    widest = -(-n // tiling.cols)
    at = edge[:-1, None] + torch.arange(widest, device=sums.device)
    inside = at < edge[1:, None]
    return (part[..., at.clamp(max=n - 1)] * inside).sum(-1)


def _pool_some_columns(sums: Tensor, tiling: Tiling) -> Tensor:
    """The same for keys that are a part of a larger matrix: tiles that reach beyond them, and others that do not meet."""
    n, j = tiling.j1 - tiling.j0, sums.shape[3]
    out = sums.new_zeros(*sums.shape[:3], tiling.cols)
    edges = [tiling.j0 + tile * n // tiling.cols for tile in range(tiling.cols + 1)]
    for tile, (start, stop) in enumerate(pairwise(edges)):
        if start < j and stop > 0:
            out[..., tile] = sums[..., max(start, 0) : stop].sum(-1)
    return out
