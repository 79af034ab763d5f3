"""Two matrices compared on the GPU: from two problems to kernel arguments, and from outputs to results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.problem import Problem, sum_groups
from ...core.stats import Request
from . import unsupported_reason
from .kernel_inputs import KernelInputs, LaunchArgs, empty, new_tile_counter, num_sms, padded_size, tma_descriptors
from .kernels.comparison import compare_kernel, keys_kernel, queries_kernel, row_terms_kernel, sums_kernel
from .kernels.tile_ops import TensorArg, tensor_arg, tma_fits_heads
from .launcher import launch
from .tile_config import Config, choose_pair_config

__all__ = ["backward", "forward_pass", "serves_pair"]

#: Measures that need no finished weights: their state merges, and one pass over the keys is enough.
MERGING = ("kl", "cross_entropy")
#: Common arguments of a problem that the kernels take for each matrix.
OWN_ARGS = ("modifiers", "strides", "caps", "mask", "sizes")
#: Numbers of a row that `row_terms_kernel` writes.
ROW_TERMS = 7


def serves_pair(problems: tuple[Problem, Problem]) -> bool:
    """Whether the kernels can compute both matrices; a sink is one more outcome, which they do not compare."""
    return all(
        problem.similarity_kernel.kernel_op == "product"
        and problem.sink is None
        and 0 not in (*problem.shape, problem.q.shape[-1])
        and unsupported_reason(problem, Request(("norm",))) is None
        for problem in problems
    )


class PairInputs:
    """Two problems as kernel arguments."""

    def __init__(self, problems: tuple[Problem, Problem], measure: str) -> None:
        self.first, self.second = (KernelInputs(problem) for problem in problems)
        self.measure = measure
        self.merged = (
            measure if measure in MERGING else "norms"
        )  # one kernel for all measures that need finished weights
        self.heads = max(self.first.h, self.second.h)
        self.rows = (self.first.b, self.heads, self.first.i)
        key, key2 = self.first.key, self.second.key
        self.key = (key, key2, measure) if key is not None and key2 is not None else None

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.first.tensors, *self.second.tensors]

    def row_buffer(self, *size: int) -> Tensor:
        return empty(*self.rows, *size, like=self.first.q, dtype=torch.float32)

    def edges(self, config: Config) -> bool:
        return any(p.edges(config) for p in (self.first, self.second))

    def fits_hopper(self, config: Config) -> bool:
        """Whether the Hopper kernels can run: bands and no modifiers, positions alike, all in 16 bits and within reach of TMA."""
        first, second = self.first, self.second
        tensors = (first.q, first.k, second.q, second.k)
        return (
            all(p.scale_folded and p.mask_format.kind in ("none", "causal", "band") for p in (first, second))
            and all(p.q.dtype == p.k.dtype for p in (first, second))
            and all(x.shape[0] == first.b for x in tensors)
            and first.problem.offset == second.problem.offset
            and first.i > 64
            and tma_fits_heads(*tensors)
        )

    def launch_hopper(self, config: Config, norms: list[Tensor], outputs: list[Tensor], sums: bool) -> None:
        """Both norms, and a measure that merges; or `sums`, of finished rows the two sums of a measure."""
        from .hopper.compare_ws import compare_ws_kernel
        from .hopper.gluon_ops import head_descriptor

        first, second = self.first, self.second
        tile_counter = new_tile_counter(first)

        def launch_args() -> LaunchArgs:
            b, h, i = self.rows
            blocks = triton.cdiv(i, config.block_i) * b * h
            args: dict[str, Any] = {
                "tile_counter": tile_counter, "norm": norms[0], "norm2": norms[1], "out": outputs[0], "out2": outputs[1],
                "heads": self.heads, "batch_heads": b * self.heads, "heads_per_group": self.heads_per_group, "blocks": blocks,
                "RAGGED": first.j % config.block_j != 0, "MEASURE": self.measure if sums else self.merged, "SUMS": sums, "STAGES": config.stages, **config.launch,
            }  # fmt: skip
            for p, mark in ((first, ""), (second, "2")):
                own, d = p.common_args, padded_size(p.d, p.q)
                args |= {
                    f"q{mark}_desc": head_descriptor(p.q, config.block_i // 2, d), f"k{mark}_desc": head_descriptor(p.k, config.block_j, d),
                    f"mask{mark}": own["mask"], f"sizes{mark}": own["sizes"], f"MASK{mark}": own["MASK"],
                    "scale2_of2" if mark else "scale2": own["scale2"],
                }  # fmt: skip
            return min(blocks, num_sms(first.q.device)), args

        tensors = [*self.tensors, *norms, *outputs, tile_counter]
        launch(compare_ws_kernel, self.key and (self.key, sums, config), tensors, launch_args)

    def launch_hopper_grads(
        self, config: Config, row_terms: Tensor, outputs: tuple[Tensor | None, ...], keys_first: bool
    ) -> None:
        """Gradients of the queries of both, or of their keys."""
        from .hopper.compare_grads_ws import compare_grads_ws_kernel
        from .hopper.gluon_ops import head_descriptor

        first, second = self.first, self.second
        tile_counter = new_tile_counter(first)
        own, walk = (config.block_j, config.block_i) if keys_first else (config.block_i, config.block_j)

        def launch_args() -> LaunchArgs:
            b, h, i = self.rows
            blocks = triton.cdiv(first.j if keys_first else i, own) * b * h
            args: dict[str, Any] = {
                "tile_counter": tile_counter, "row_terms": row_terms, "all_rows": row_terms[0].numel(), "heads": self.heads,
                "batch_heads": b * self.heads, "heads_per_group": self.heads_per_group, "blocks": blocks,
                "RAGGED": not first.even_blocks(config), "MEASURE": self.measure, "KEYS_FIRST": keys_first, "OWN": own, "WALK": walk,
                "STAGES": config.stages, "num_warps": config.warps, "maxnreg": config.registers,
            }  # fmt: skip
            for p, mark, out in ((first, "", outputs[0]), (second, "2", outputs[1])):
                common, d = p.common_args, padded_size(p.d, p.q)
                owned, walked = (p.k, p.q) if keys_first else (p.q, p.k)
                args |= {
                    f"own{mark}_desc": head_descriptor(owned, own // 2, d), f"walk{mark}_desc": head_descriptor(walked, walk, d),
                    f"mask{mark}": common["mask"], f"sizes{mark}": common["sizes"], f"MASK{mark}": common["MASK"], f"out{mark}": p.unused if out is None else tensor_arg(out), f"GRAD{mark}": out is not None,
                    f"D{mark}": p.d, "scale_of2" if mark else "scale": common["scale"], "scale2_of2" if mark else "scale2": common["scale2"],
                }  # fmt: skip
            return min(blocks, num_sms(first.q.device)), args

        tensors = [*self.tensors, row_terms, *outputs, tile_counter]
        launch(compare_grads_ws_kernel, self.key and (self.key, keys_first, config), tensors, launch_args)

    @property
    def heads_per_group(self) -> int:
        """Heads that are scheduled together, so that the keys of both matrices fit the L2 cache."""
        if self.first.mask_format.kind == "none":
            return 1
        return max(1, min(self.first.b * self.heads, self.first.heads_per_group(self.second.d)))

    def args(self, config: Config, moving: str, tables: Sequence[TensorArg]) -> dict[str, Any]:
        """Arguments that all kernels of two matrices take; `moving`: "k" or "q", the tiles that a program walks over."""
        table, rows = ("row_table", config.block_j) if moving == "k" else ("key_table", config.block_i)
        walked = [(getattr(p, moving), (rows, padded_size(p.d, p.q))) for p in (self.first, self.second)]
        tma, descriptors, layouts = tma_descriptors(self.first, config, *walked)
        args: dict[str, Any] = {
            "heads": self.heads, "batch_heads": self.first.b * self.heads, "EDGES": self.edges(config), "TMA": tma,
            "MEASURE": self.measure, "heads_per_group": self.heads_per_group, **config.launch,
        }  # fmt: skip
        for n, (p, mark) in enumerate(((self.first, ""), (self.second, "2"))):
            own = p.common_args
            args |= {f"{name}{mark}": own[name] for name in OWN_ARGS}
            args |= {
                f"q{mark}": tensor_arg(p.q), f"k{mark}": tensor_arg(p.k), f"{table}{mark}": tables[n], f"D{mark}": p.d,
                f"desc{mark}": descriptors[n], f"layout{mark}": layouts[n], f"FOLDED{mark}": p.scale_folded,
                f"BLOCK_D{mark}": padded_size(p.d, p.q), f"MODIFIERS{mark}": p.modifier_kinds, f"MASK{mark}": p.mask_format.kind,
                "scale_of2" if mark else "scale": own["scale"], "scale2_of2" if mark else "scale2": own["scale2"],
                "FP32_2" if mark else "FP32": p.fp32,
            }  # fmt: skip
        return args


def forward_pass(problems: tuple[Problem, Problem], measure: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The measure of every row (b, h, i), the norms of both matrices, and the row sums that centre their gradients."""
    pair = PairInputs(problems, measure)
    value, norms = _norms(pair)
    if measure in MERGING:
        sees_keys = norms[0][..., 1] != 0
        return value, norms, [value.masked_fill(value == math.inf, 0), -sees_keys.float()]
    deltas = _sums(pair, norms)
    value = deltas[0] + deltas[1]
    return value.clamp(min=0) if measure == "js" else value, norms, deltas


def _norms(pair: PairInputs) -> tuple[Tensor, list[Tensor]]:
    """The measure of every row where one pass over the keys is enough, and the norms of both matrices."""
    config = choose_pair_config("compare", pair.first, pair.second, pair.fits_hopper)
    value, norms = pair.row_buffer(), [pair.row_buffer(2), pair.row_buffer(2)]
    tables = [pair.first.row_table(config), pair.second.row_table(config)]

    if config.gluon:
        pair.launch_hopper(config, norms, [value, value], sums=False)
        return value, norms

    def launch_args() -> LaunchArgs:
        b, h, i = pair.rows
        own = {"out": value, "out_norm": norms[0], "out_norm2": norms[1], "MEASURE": pair.merged}
        return triton.cdiv(i, config.block_i) * b * h, pair.args(config, "k", tables) | own

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), value, *norms]
    launch(compare_kernel, pair.key and (pair.key, config), tensors, launch_args)
    return value, norms


def _sums(pair: PairInputs, norms: list[Tensor]) -> list[Tensor]:
    """The two sums of finished rows that add up to a measure."""
    config = choose_pair_config("compare_sums", pair.first, pair.second, pair.fits_hopper)
    tables = [pair.first.row_table(config), pair.second.row_table(config)]
    deltas = [pair.row_buffer(), pair.row_buffer()]
    if config.gluon:
        pair.launch_hopper(config, norms, deltas, sums=True)
        return deltas

    def launch_args() -> LaunchArgs:
        b, h, i = pair.rows
        own = {"norm": norms[0], "norm2": norms[1], "delta": deltas[0], "delta2": deltas[1]}
        return triton.cdiv(i, config.block_i) * b * h, pair.args(config, "k", tables) | own

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), *norms, *deltas]
    launch(sums_kernel, pair.key and (pair.key, config), tensors, launch_args)
    return deltas


def _row_terms(pair: PairInputs, norms: list[Tensor], deltas: list[Tensor], grad: Tensor) -> Tensor:
    """Terms of rows for the gradients of their cells."""
    terms = empty(ROW_TERMS, *pair.rows, like=pair.first.q, dtype=torch.float32)
    args = {
        "norm": norms[0], "norm2": norms[1], "delta": deltas[0], "delta2": deltas[1], "grad": grad, "out": terms,
        "rows": grad.numel(), "MEASURE": pair.measure, "BLOCK": 512,
    }  # fmt: skip
    tensors: list[Tensor | None] = [*norms, *deltas, grad, terms]
    launch(row_terms_kernel, pair.measure, tensors, lambda: (triton.cdiv(grad.numel(), 512), args))
    return terms


def _over_rows(pair: PairInputs, row_terms: Tensor, outputs: tuple[Tensor | None, ...]) -> None:
    """Walk rows: the gradients of the queries."""
    config = choose_pair_config("compare_queries", pair.first, pair.second, pair.fits_hopper)
    if config.gluon:
        pair.launch_hopper_grads(config, row_terms, outputs, keys_first=False)
        return
    tables = [pair.first.row_table(config), pair.second.row_table(config)]

    def launch_args() -> LaunchArgs:
        b, h, i = pair.rows
        args = pair.args(config, "k", tables) | _gradient_args(pair, row_terms, outputs, "dq", "DQ")
        return triton.cdiv(i, config.block_i) * b * h, args

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), row_terms, *outputs]
    launch(queries_kernel, pair.key and (pair.key, config), tensors, launch_args)


def _over_keys(pair: PairInputs, row_terms: Tensor, outputs: tuple[Tensor | None, ...]) -> None:
    """Walk keys: their gradients."""
    config = choose_pair_config("compare_keys", pair.first, pair.second, pair.fits_hopper)
    if config.gluon:
        pair.launch_hopper_grads(config, row_terms, outputs, keys_first=True)
        return
    tables = [pair.first.key_table(config), pair.second.key_table(config)]

    def launch_args() -> LaunchArgs:
        b, h, _ = pair.rows
        args = pair.args(config, "q", tables) | _gradient_args(pair, row_terms, outputs, "dk", "DK")
        return triton.cdiv(pair.first.j, config.block_j) * b * h, args

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), row_terms, *outputs]
    launch(keys_kernel, pair.key and (pair.key, config), tensors, launch_args)


def _gradient_args(
    pair: PairInputs, row_terms: Tensor, outputs: tuple[Tensor | None, ...], name: str, flag: str
) -> dict[str, Any]:
    first, second = (pair.first.unused if out is None else tensor_arg(out) for out in outputs)
    return {
        "row_terms": row_terms, "all_rows": row_terms[0].numel(), f"out_{name}": first, f"out_{name}2": second,
        flag: outputs[0] is not None, f"{flag}2": outputs[1] is not None,
    }  # fmt: skip


def backward(
    problems: tuple[Problem, Problem], measure: str, norms: list[Tensor], deltas: list[Tensor], grad: Tensor,
    needs: Sequence[bool],
) -> list[tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Gradients of queries and keys of each matrix that needs them; `grad` (b, h, i) is 0 in infinite rows."""
    pair = PairInputs(problems, measure)
    b, heads, _ = pair.rows
    grad = grad.float().contiguous()
    # Heads that share queries or keys each have sums of their own, added up in float32.
    of_queries, of_keys = (
        tuple(
            empty(b, heads, *x.shape[2:], like=x, dtype=x.dtype if x.shape[1] == heads else torch.float32)
            if need
            else None
            for x, need in zip(tensors, needs, strict=True)
        )
        for tensors in ([problem.q for problem in problems], [problem.k for problem in problems])
    )
    row_terms = _row_terms(pair, norms, deltas, grad)
    _over_rows(pair, row_terms, of_queries)
    _over_keys(pair, row_terms, of_keys)
    return [
        None if dq is None or dk is None else (sum_groups(dq, problem.q.shape[1]), sum_groups(dk, problem.k.shape[1]))
        for problem, dq, dk in zip(problems, of_queries, of_keys, strict=True)
    ]
