"""What flows back: the passes of gradients, from what `gradient` wrote down to dq, dk, dv and the gradients of modifiers.

Imports `prepared` and the kernels of `backward`; loaded only when the engine computes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem
from ...core.scores import Alibi
from ..score_grad import ScoreGrad
from .kernel_inputs import Arguments, Prepared, copied, empty, into_shared_memory, lots, multiprocessors, padded
from .kernels.backward import Flow, keys_kernel, row_dot_kernel, rows_kernel, steps_kernel
from .kernels.tile_ops import cells, copies_serve, rows_of
from .launcher import start
from .tile_config import Config, configured, short

__all__ = ["Flowing", "backward", "flowing", "keys_pass", "row_dot", "rows_pass", "step_gradient"]

#: For sums along rows of what was multiplied just before. Threads that share a row each add the others' products to their own;
#: were one's own product fused into that sum, and so never rounded, their sums would differ, and any of them may be written.
ALIKE = {"enable_fp_fusion": False}


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


def flowing(problem: Problem, v: Tensor | None, norm: Tensor, gradient: ScoreGrad) -> Flowing:
    v = None if gradient.dy is None else v
    # The gradient of y came in the type of y: nothing is lost.
    dy = None if v is None or gradient.dy is None else gradient.dy.to(v.dtype)
    e = 0 if v is None else v.shape[-1]
    p = Prepared(problem, 1 if v is None else v.shape[1])
    v = None if v is None else v.expand(p.b, -1, -1, -1)
    extras = gradient.left.shape[-1] - e
    eta = p.q if gradient.d_entropy is None else gradient.d_entropy.contiguous()
    rho = p.q if gradient.d_distance is None else gradient.d_distance.contiguous()
    left, right = p.q, p.nothing
    if extras:
        left = gradient.left[..., e:].expand(p.b, p.h, -1, -1).contiguous()
        right = cells(gradient.right[..., e:].contiguous())
    flow = Flow(p.in_base_2(norm), gradient.delta.contiguous(), eta, rho, left, right.ptr, right.b, right.h, extras)
    constants = {
        "EXACT_V": v is not None and v.dtype == torch.float32, "Y": v is not None, "ETA": gradient.d_entropy is not None,
        "RHO": gradient.d_distance is not None, "EXTRAS": extras > 0,
    }  # fmt: skip
    return Flowing(p, v, dy, flow, constants)


def backward(problem: Problem, v: Tensor | None, norm: Tensor, gradient: ScoreGrad) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
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
    dk = empty(p.b, heads, p.j, p.d, like=p.k, dtype=p.k.dtype if heads == g else torch.float32, lying=True)
    dv = None
    if v is not None:
        dv = empty(p.b, heads, p.j, f.e, like=v, dtype=v.dtype if heads == hv else torch.float32, lying=True)
    config = _keys_config(f, heads)
    table = p.table(config)
    if config.gluon and v is not None and dy is not None and dv is not None:
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

    def fits(_: Config) -> bool:
        if v is None or f.dy is None or f.constants["EXTRAS"] or short(p, f.e):
            return False
        tiles = (p.q, 64), (p.k, 64), (v, 64), (f.dy, 64)
        own_heads = heads == p.k.shape[1] == v.shape[1]
        return own_heads and all(x.dtype == p.q.dtype for x, _ in tiles) and copies_serve(p.d, *tiles)

    return configured("keys", p, f.e, v, fits)


def _parted_keys(f: Flowing, config: Config, v: Tensor, dy: Tensor, dk: Tensor, dv: Tensor) -> None:
    from .hopper.dkdv_ws import parted_keys_kernel

    p, heads, half = f.p, dk.shape[1], config.block_j // 2
    drawer, table = lots(p), p.table(config)

    def arguments() -> Arguments:
        rows, keys = config.block_i, p.j // config.block_j
        copies = into_shared_memory(
            q=(p.q, rows), dy=(dy, rows), k=(p.k, half), v=(v, half), dk=(dk, half), dv=(dv, half)
        )
        common = {name: p.common[name] for name in ("seen", "sizes", "scale", "scale2", "D", "MASK")}
        return min(keys * p.b * heads, multiprocessors(p.q.device)), {
            "drawer": drawer, "flow": f.flow, "table": table, "heads": heads, "group": p.h // heads, "batch": p.b,
            "per_group": min(p.per_group(f.e), p.b * heads), "ETA": f.constants["ETA"], "RHO": f.constants["RHO"],
            "STAGES": config.stages, **copies, **common, **config.launch,
        }  # fmt: skip

    given = [*f.tensors, table.ptr, dk, dv, drawer]
    start(parted_keys_kernel, f.key and (f.key, config), given, arguments)


def rows_pass(f: Flowing) -> Tensor:
    """dq."""
    p, v = f.p, f.v
    dq = empty(p.b, p.h, p.i, p.d, like=p.q, dtype=p.q.dtype, lying=True)
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
        return outer[0] * outer[1] * triton.cdiv(n, 32), told | {"BLOCK_I": 32, "BLOCK_E": padded(e)} | ALIKE

    start(row_dot_kernel, (), [a, b, out], arguments)
    return out


def step_gradient(problem: Problem, n: int, v: Tensor | None, norm: Tensor, gradient: ScoreGrad) -> Tensor:
    """The gradient of the tensor of step n, in its own shape."""
    f = flowing(problem, v, norm, gradient)
    p, step = f.p, problem.modifiers[n]
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
            "out_heads": like[1], "batch": p.b, "TARGET": n, "ALONG": along, **told, **config.launch, **ALIKE,
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
