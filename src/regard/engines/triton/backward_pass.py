"""The backward passes: from a `ScoreGrad` to dq, dk, dv and the gradients of modifiers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem, sum_groups
from ...core.pytree import flatten
from ...core.stats import required
from ..score_grad import ScoreGrad
from .forward_pass import norm2_of_product
from .kernel_inputs import (
    CACHE,
    KernelInputs,
    LaunchArgs,
    empty,
    gluon_tma_args,
    new_tile_counter,
    num_sms,
    padded_size,
    tma_descriptors,
)
from .kernels.backward import ScoreGradArg, dkdv_kernel, dq_kernel, modifier_grad_kernel, reorder_kernel, row_dot_kernel
from .kernels.tile_ops import row_arg, tensor_arg, tma_fits, tma_fits_heads
from .launcher import launch
from .tile_config import Config, choose_config, forced, gluon_config, is_short

__all__ = ["BackwardInputs", "backward", "backward_inputs", "dkdv_pass", "dq_pass", "modifier_grad", "row_dot"]

#: Compiler option for kernels that sum products along rows. With FMA a thread fuses its own, unrounded product into the sum,
#: so that threads of one row disagree in the last bit, and any of them may store the result.
NO_FMA = {"enable_fp_fusion": False}


@dataclasses.dataclass
class BackwardInputs:
    """A `ScoreGrad` as kernel arguments: the output's gradient dy separate from the further columns."""

    p: KernelInputs
    v: Tensor | None
    dy: Tensor | None
    grad: ScoreGradArg
    constants: dict[str, bool]

    @property
    def e(self) -> int:
        return 1 if self.v is None else self.v.shape[-1]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.p.tensors, self.v, self.dy, *self.grad[:6]]

    @property
    def key(self) -> Any:
        return self.p.key and (self.p.key, *self.constants.values())

    def common_args(self) -> dict[str, Any]:
        """Arguments that every kernel of the backward pass takes."""
        p = self.p
        return {
            "q": tensor_arg(p.q), "k": tensor_arg(p.k), "v": p.unused if self.v is None else tensor_arg(self.v),
            "dy": p.unused if self.dy is None else tensor_arg(self.dy), "tanh_arg": p.tanh_arg, "grad": self.grad, "SIMILARITY": p.similarity,
            "E": self.e, "SCALE_FOLDED": p.scale_folded,
            "BLOCK_D": padded_size(p.d, p.q), "BLOCK_E": padded_size(self.e, p.q), **self.constants, **p.common_args,
        }  # fmt: skip


def backward_inputs(problem: Problem, v: Tensor | None, norm: Tensor, gradient: ScoreGrad) -> BackwardInputs:
    v = None if gradient.dy is None else v
    # dy arrived in the dtype of y: the cast loses nothing.
    dy = None if v is None or gradient.dy is None else gradient.dy.to(v.dtype)
    e = 0 if v is None else v.shape[-1]
    p = KernelInputs(problem, 1 if v is None else v.shape[1])
    v = None if v is None else v.expand(p.b, -1, -1, -1)
    n_extra = gradient.left.shape[-1] - e
    d_entropy = p.q if gradient.d_entropy is None else gradient.d_entropy.contiguous()
    d_distance = p.q if gradient.d_distance is None else gradient.d_distance.contiguous()
    left, right = p.q, p.unused
    if n_extra:
        left = gradient.left[..., e:].expand(p.b, p.h, -1, -1).contiguous()
        right = tensor_arg(gradient.right[..., e:].contiguous())
    grad = ScoreGradArg(
        norm2_of_product(p, norm),
        gradient.delta.contiguous(),
        d_entropy,
        d_distance,
        left,
        right.ptr,
        right.b,
        right.h,
        n_extra,
    )
    constants = {
        "FP32_V": v is not None and v.dtype == torch.float32, "Y": v is not None, "D_ENTROPY": gradient.d_entropy is not None,
        "D_DISTANCE": gradient.d_distance is not None, "EXTRA": n_extra > 0,
    }  # fmt: skip
    return BackwardInputs(p, v, dy, grad, constants)


def backward(
    problem: Problem, v: Tensor | None, norm: Tensor, gradient: ScoreGrad
) -> tuple[list[Tensor], Tensor | None]:
    """dq, dk and the gradient of the similarity's own tensor, where it has one; and dv."""
    f = backward_inputs(problem, v, norm, gradient)
    if (config := _fused_config(f)) is not None:
        return _fused_pass(f, config)
    dk, dv = dkdv_pass(f)
    dq, *own = dq_pass(f)
    return [dq, dk, *own], dv


def _fused_config(f: BackwardInputs) -> Config | None:
    """The configuration of the kernel for all gradients, where it serves the request: each tile of keys and values has its own
    gradient, and all tiles are full."""
    p, v = f.p, f.v

    def fits(config: Config) -> bool:
        own_heads = v is not None and v.shape[1] == p.k.shape[1]
        return own_heads and p.d == f.e and p.j > 256 and p.i > 64 and _dkdv_fits(f, config, p.k.shape[1])

    # Under a mask, programs of few wide tiles wait for each other: two kernels are as fast or faster (`bench/LOG.md`).
    if p.mask_format.kind != "none" and p.d > 64 and p.i < 8192 and "backward" not in forced:
        return None
    return gluon_config("backward", p, f.e, fits, instead_of=("dkdv", "dq"))


def _fused_pass(f: BackwardInputs, config: Config) -> tuple[list[Tensor], Tensor]:
    """dq, dk and dv in one pass, which sums dq in float32."""
    from .hopper.backward_ws import backward_ws_kernel
    from .hopper.gluon_ops import float32_descriptor

    p, v, dy = f.p, required(f.v), required(f.dy)
    heads, half, row_blocks = p.k.shape[1], config.block_j // 2, p.i // config.block_i
    dq = empty(p.b, p.h, p.i, p.d, like=p.q, dtype=p.q.dtype, keep_layout=True)
    dk = empty(p.b, heads, p.j, p.d, like=p.k, dtype=p.k.dtype, keep_layout=True)
    dv = empty(p.b, heads, p.j, p.d, like=v, dtype=v.dtype, keep_layout=True)
    dq_sum = empty(p.b * p.h * p.i * p.d // 4096, 1, 128, 32, like=p.q, dtype=torch.float32)
    counters = torch.zeros(1 + p.b * p.h * row_blocks, dtype=torch.int32, device=p.q.device)

    def launch_args() -> LaunchArgs:
        descriptors = gluon_tma_args(
            q=(p.q, config.block_i), dy=(dy, config.block_i), k=(p.k, half), v=(v, half), dk=(dk, half), dv=(dv, half)
        )
        common = {name: p.common_args[name] for name in ("mask", "sizes", "scale", "scale2", "D", "MASK")}
        return min(p.j // config.block_j * p.b * heads, num_sms(p.q.device)), {
            "dq_desc": float32_descriptor(dq_sum, 128), "counters": counters, "grad": f.grad, "heads": heads, "group": p.h // heads, "batch": p.b,
            "heads_per_group": _heads_together(p), "D_ENTROPY": f.constants["D_ENTROPY"], "D_DISTANCE": f.constants["D_DISTANCE"],
            "STAGES": config.stages, **descriptors, **common, **config.launch,
        }  # fmt: skip

    tensors = [*f.tensors, dk, dv, dq_sum, counters]
    launch(backward_ws_kernel, f.key and (f.key, config), tensors, launch_args)
    reorder = {"parts": dq_sum, "out": tensor_arg(dq), "scale": p.scale, "heads": p.h, "I": p.i, "D": p.d}
    launch(reorder_kernel, f.key and (f.key, config), [dq_sum, dq], lambda: (dq_sum.shape[0], reorder))
    return [dq, dk], dv


def _heads_together(p: KernelInputs) -> int:
    """Number of key heads whose tiles are scheduled side by side.

    Wide heads that fit the L2 cache a few at a time are taken so: what their programs read and add to stays there. Else many
    heads, so that few programs share one and have to wait for each other's parts of dq.
    """
    heads = p.b * p.k.shape[1]
    one = p.h // p.k.shape[1] * p.i * p.d * (2 * p.q.element_size() + 4)  # rows, their gradients, and sums in float32
    fit = CACHE // one
    return min(heads, fit if p.d > 64 and fit >= 4 else num_sms(p.q.device) // 2)


def dkdv_pass(f: BackwardInputs) -> tuple[Tensor, Tensor | None]:
    """dk and dv."""
    p, v, dy = f.p, f.v, f.dy
    g, hv = p.k.shape[1], 1 if v is None else v.shape[1]
    # Where keys and values are shared by the same query heads, the kernel sums over them; else `sum_groups` does.
    heads = g if v is None or hv == g else p.h
    dk = empty(p.b, heads, p.j, p.d, like=p.k, dtype=p.k.dtype if heads == g else torch.float32, keep_layout=True)
    dv = None
    if v is not None:
        dv = empty(p.b, heads, p.j, f.e, like=v, dtype=v.dtype if heads == hv else torch.float32, keep_layout=True)
    tanh_grad = p.q if p.product else _zeros(p.b * heads, p.tanh_arg.a, p.tanh_arg.keys, like=p.q)
    config = _dkdv_config(f, heads)
    table = p.key_table(config)
    if config.gluon and v is not None and dy is not None and dv is not None:
        _launch_dkdv_ws(f, config, v, dy, dk, dv)
        return dk, dv

    def launch_args() -> LaunchArgs:
        dy_or_q = (
            (p.q, (config.block_i, padded_size(p.d, p.q)))
            if dy is None
            else (dy, (config.block_i, padded_size(f.e, p.q)))
        )
        tma, descriptors, layouts = tma_descriptors(p, config, (p.q, (config.block_i, padded_size(p.d, p.q))), dy_or_q)
        return triton.cdiv(p.j, config.block_j) * p.b * heads, {
            "q_desc": descriptors[0], "dy_desc": descriptors[1], "q_layout": layouts[0], "dy_layout": layouts[1], "key_table": table, "tanh_grad": tanh_grad,
            "out_dk": tensor_arg(dk), "out_dv": p.unused if dv is None else tensor_arg(dv), "heads": heads, "group": p.h // heads,
            "batch": p.b, "heads_per_group": min(p.heads_per_group(f.e), p.b * heads), "TMA": tma, "EDGES": p.edges(config),
            "EVEN_BLOCKS": p.even_blocks(config), **f.common_args(), **config.launch,
        }  # fmt: skip

    launch(dkdv_kernel, f.key and (f.key, config), [*f.tensors, table.ptr, dk, dv], launch_args)
    if not p.product:
        dk = tanh_grad.view(p.b, heads, -1, p.tanh_arg.keys)[:, :, : p.d, : p.j].mT.to(dk.dtype)
    return sum_groups(dk, g), None if dv is None else sum_groups(dv, hv)


def _dkdv_config(f: BackwardInputs, heads: int) -> Config:
    """Warp specialisation needs TMA for all inputs and outputs, and no further columns."""
    return choose_config("dkdv", f.p, f.e, f.v, lambda config: _dkdv_fits(f, config, heads))


def _dkdv_fits(f: BackwardInputs, config: Config, heads: int) -> bool:
    p, v = f.p, f.v
    if not p.even_blocks(config) or v is None or f.dy is None or f.constants["EXTRA"] or is_short(p, f.e):
        return False
    tiles = (p.q, 64), (p.k, 64), (v, 64), (f.dy, 64)
    own_heads = heads == p.k.shape[1] == v.shape[1]
    return own_heads and all(x.dtype == p.q.dtype for x, _ in tiles) and tma_fits(p.d, *tiles)


def _launch_dkdv_ws(f: BackwardInputs, config: Config, v: Tensor, dy: Tensor, dk: Tensor, dv: Tensor) -> None:
    from .hopper.dkdv_ws import dkdv_ws_kernel

    p, heads, half = f.p, dk.shape[1], config.block_j // 2
    tile_counter, table = new_tile_counter(p), p.key_table(config)

    def launch_args() -> LaunchArgs:
        rows, keys = config.block_i, p.j // config.block_j
        descriptors = gluon_tma_args(
            q=(p.q, rows), dy=(dy, rows), k=(p.k, half), v=(v, half), dk=(dk, half), dv=(dv, half)
        )
        common = {name: p.common_args[name] for name in ("mask", "sizes", "scale", "scale2", "D", "MASK")}
        return min(keys * p.b * heads, num_sms(p.q.device)), {
            "tile_counter": tile_counter, "grad": f.grad, "key_table": table, "heads": heads, "group": p.h // heads, "batch": p.b,
            "heads_per_group": min(p.heads_per_group(f.e), p.b * heads), "D_ENTROPY": f.constants["D_ENTROPY"], "D_DISTANCE": f.constants["D_DISTANCE"],
            "STAGES": config.stages, **descriptors, **common, **config.launch,
        }  # fmt: skip

    tensors = [*f.tensors, table.ptr, dk, dv, tile_counter]
    launch(dkdv_ws_kernel, f.key and (f.key, config), tensors, launch_args)


def dq_pass(f: BackwardInputs) -> list[Tensor]:
    """dq, and of an additive score the gradient of its v."""
    p, v = f.p, f.v
    dq = empty(p.b, p.h, p.i, p.d, like=p.q, dtype=p.q.dtype, keep_layout=True)
    tanh_grad = p.q if p.product else _zeros(p.b * p.h, 2 * p.tanh_arg.a, p.tanh_arg.rows, like=p.q)
    config = _dq_config(f)
    table = p.row_table(config)
    if config.gluon and v is not None and f.dy is not None:
        _launch_dq_ws(f, config, v, f.dy, dq)
        return [dq]

    def launch_args() -> LaunchArgs:
        keys = p.k, (config.block_j, padded_size(p.d, p.q))
        tma, descriptors, layouts = tma_descriptors(
            p, config, keys, keys if v is None else (v, (config.block_j, padded_size(f.e, p.q)))
        )
        return triton.cdiv(p.i, config.block_i) * p.b * p.h, {
            "k_desc": descriptors[0], "v_desc": descriptors[1], "k_layout": layouts[0], "v_layout": layouts[1], "row_table": table, "tanh_grad": tanh_grad,
            "out_dq": tensor_arg(dq), "heads": p.b * p.h, "heads_per_group": p.heads_per_group(f.e), "TMA": tma, "EDGES": p.edges(config),
            "EVEN_BLOCKS": p.even_blocks(config), **f.common_args(), **config.launch,
        }  # fmt: skip

    launch(dq_kernel, f.key and (f.key, config), [*f.tensors, table.ptr, dq], launch_args)
    return [dq] if p.product else _tanh_row_grads(p, tanh_grad)


def _zeros(*shape: int, like: Tensor) -> Tensor:
    """Sums in float32 that a kernel adds to."""
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _tanh_row_grads(p: KernelInputs, sums: Tensor) -> list[Tensor]:
    """Gradients of projected queries and of v, from what `dq_kernel` summed for every row."""
    (v,) = flatten(p.problem.similarity_kernel)[1]
    dq, dv = sums.view(p.b, p.h, 2, -1, p.tanh_arg.rows)[..., : p.d, : p.i].unbind(2)  # b h a i
    return [dq.mT.to(p.q.dtype), dv.sum(-1, keepdim=True).mT.sum_to_size(v.shape).to(v.dtype)]


def _dq_config(f: BackwardInputs) -> Config:
    """Warp specialisation needs TMA for all inputs, and no further columns."""
    p, v, dy = f.p, f.v, f.dy

    def fits(config: Config) -> bool:
        if v is None or dy is None or f.constants["EXTRA"] or p.i <= 64 or is_short(p, f.e):
            return False
        return p.q.dtype == p.k.dtype == v.dtype and tma_fits_heads(p.q, p.k, v, dy)

    return choose_config("dq", p, f.e, v, fits)


def _launch_dq_ws(f: BackwardInputs, config: Config, v: Tensor, dy: Tensor, dq: Tensor) -> None:
    from .hopper.dq_ws import dq_ws_kernel
    from .hopper.gluon_ops import head_descriptor

    p, half = f.p, config.block_i // 2
    tile_counter, table = new_tile_counter(p), p.row_table(config)

    def launch_args() -> LaunchArgs:
        blocks, d, e = triton.cdiv(p.i, config.block_i) * p.b * p.h, padded_size(p.d, p.q), padded_size(f.e, p.q)
        common = {name: p.common_args[name] for name in ("mask", "sizes", "scale", "scale2", "MASK")}
        return min(blocks, num_sms(p.q.device)), {
            "q_desc": head_descriptor(p.q, half, d), "dy_desc": head_descriptor(dy, half, e), "k_desc": head_descriptor(p.k, config.block_j, d),
            "v_desc": head_descriptor(v, config.block_j, e), "dq_desc": head_descriptor(dq, half, d), "tile_counter": tile_counter,
            "grad": f.grad, "row_table": table, "heads": p.b * p.h, "heads_per_group": p.heads_per_group(f.e), "blocks": blocks, "D": d,
            "RAGGED": p.j % config.block_j != 0, "D_ENTROPY": f.constants["D_ENTROPY"], "D_DISTANCE": f.constants["D_DISTANCE"],
            "STAGES": config.stages, **common, **config.launch,
        }  # fmt: skip

    tensors = [*f.tensors, table.ptr, dq, tile_counter]
    launch(dq_ws_kernel, f.key and (f.key, config), tensors, launch_args)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_e a b, (b, h, i, e) twice to (b, h, i), in float32."""
    *outer, n, e = a.shape
    out = empty(*outer, n, like=a, dtype=torch.float32)
    if not out.numel() or not e:
        return torch.zeros_like(out)

    def launch_args() -> LaunchArgs:
        args = {"a": tensor_arg(a), "b": tensor_arg(b), "out": row_arg(out), "heads": outer[1], "I": n, "E": e}
        return outer[0] * outer[1] * triton.cdiv(n, 32), args | {"BLOCK_I": 32, "BLOCK_E": padded_size(e)} | NO_FMA

    launch(row_dot_kernel, (), [a, b, out], launch_args)
    return out


def modifier_grad(problem: Problem, n: int, v: Tensor | None, norm: Tensor, gradient: ScoreGrad) -> Tensor:
    """The gradient of the tensor of modifier n, in the shape of that tensor."""
    f = backward_inputs(problem, v, norm, gradient)
    p, modifier = f.p, problem.modifiers[n]
    tensor = required(modifier.operand)
    like = tensor.shape
    along = "rows" if like[3] == 1 else "keys" if like[2] == 1 else "cells"
    if p.j == 1 and like[2] > 1:
        along = "rows"
    config = choose_config("dbias", p, f.e, f.v)
    shape = {"rows": (p.b, p.h, p.i), "keys": (p.b, p.h, p.j), "cells": (like[0], like[1], p.i, p.j)}[along]
    out = empty(*shape, like=p.q, dtype=torch.float32)
    table, row_table = p.key_table(config), p.row_table(config)

    def launch_args() -> LaunchArgs:
        blocks_i, blocks_j = triton.cdiv(p.i, config.block_i), triton.cdiv(p.j, config.block_j)
        programs = {"rows": blocks_i, "keys": blocks_j, "cells": blocks_i * blocks_j}[along] * shape[0] * shape[1]
        args = f.common_args()
        del args["SCALE_FOLDED"]
        return programs, {
            "key_table": table, "row_table": row_table, "out": tensor_arg(out) if along == "cells" else row_arg(out),
            "out_heads": like[1], "batch": p.b, "TARGET": n, "ALONG": along, **args, **config.launch, **NO_FMA,
        }  # fmt: skip

    launch(
        modifier_grad_kernel,
        f.key and (f.key, n, along, config),
        [*f.tensors, table.ptr, row_table.ptr, tensor, out],
        launch_args,
    )
    if along == "rows":
        return out.unsqueeze(-1).sum_to_size(like)
    return out.unsqueeze(-2).sum_to_size(like) if along == "keys" else out
