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
from .kernel_inputs import KernelInputs, LaunchArgs, empty, padded_size
from .kernels.comparison import compare_kernel, keys_kernel, rows_kernel
from .kernels.tile_ops import TensorArg, row_arg, tensor_arg
from .launcher import launch
from .tile_config import Config, choose_pair_config

__all__ = ["backward", "forward_pass", "serves_pair"]

#: Measures that need no finished weights: their state merges, and one pass over the keys is enough.
MERGING = ("kl", "cross_entropy")
#: Common arguments of a problem that the kernels take for each matrix.
OWN_ARGS = ("modifiers", "strides", "caps", "mask", "sizes")


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

    def args(self, config: Config, table: str, tables: Sequence[TensorArg]) -> dict[str, Any]:
        """Arguments that all kernels of two matrices take."""
        args: dict[str, Any] = {
            "heads": self.heads, "batch_heads": self.first.b * self.heads, "EDGES": self.edges(config),
            "heads_per_group": 1 if self.first.mask_format.kind == "none" else max(1, min(
                self.first.b * self.heads, self.first.heads_per_group(self.second.d))),
        }  # fmt: skip
        for p, mark, ranges in ((self.first, "", tables[0]), (self.second, "2", tables[1])):
            own = p.common_args
            args |= {f"{name}{mark}": own[name] for name in OWN_ARGS}
            args |= {
                f"q{mark}": tensor_arg(p.q), f"k{mark}": tensor_arg(p.k), f"{table}{mark}": ranges, f"D{mark}": p.d,
                f"BLOCK_D{mark}": padded_size(p.d, p.q), f"MODIFIERS{mark}": p.modifier_kinds, f"MASK{mark}": p.mask_format.kind,
                "scale_of2" if mark else "scale": own["scale"], "scale2_of2" if mark else "scale2": own["scale2"],
                "FP32_2" if mark else "FP32": p.fp32,
            }  # fmt: skip
        return args


def forward_pass(problems: tuple[Problem, Problem], measure: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The measure of every row (b, h, i), the norms of both matrices, and the row sums that centre their gradients."""
    pair = PairInputs(problems, measure)
    config = choose_pair_config("compare", pair.first, pair.second)
    value, norms = pair.row_buffer(), [pair.row_buffer(2), pair.row_buffer(2)]
    tables = [pair.first.row_table(config), pair.second.row_table(config)]

    def launch_args() -> LaunchArgs:
        b, h, i = pair.rows
        return triton.cdiv(i, config.block_i) * b * h, {
            **pair.args(config, "row_table", tables), "out": row_arg(value), "out_norm": norms[0], "out_norm2": norms[1],
            "ENTROPY": int(measure != "cross_entropy"), **config.launch,
        }  # fmt: skip

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), value, *norms]
    launch(compare_kernel, pair.key and (pair.key, config), tensors, launch_args)
    if measure in MERGING:
        sees_keys = norms[0][..., 0] < 1e29
        return value, norms, [value.masked_fill(value == math.inf, 0), -sees_keys.float()]
    deltas = _over_rows(pair, norms, [pair.row_buffer(), pair.row_buffer()], None, (None, None))
    value = deltas[0] + deltas[1]
    return value.clamp(min=0) if measure == "js" else value, norms, deltas


def _over_rows(
    pair: PairInputs, norms: list[Tensor], deltas: list[Tensor], grad: Tensor | None, outputs: tuple[Tensor | None, ...]
) -> list[Tensor]:
    """Walk finished rows: without a gradient Σa and Σb into `deltas`, else the gradients of the queries."""
    config = choose_pair_config("compare_rows", pair.first, pair.second)
    tables = [pair.first.row_table(config), pair.second.row_table(config)]

    def launch_args() -> LaunchArgs:
        b, h, i = pair.rows
        unused = pair.first.unused
        return triton.cdiv(i, config.block_i) * b * h, {
            **pair.args(config, "row_table", tables), "norm": norms[0], "norm2": norms[1], "delta": deltas[0], "delta2": deltas[1],
            "grad": deltas[0] if grad is None else grad, "MEASURE": pair.measure, "SUMS": grad is None,
            "out_dq": unused if outputs[0] is None else tensor_arg(outputs[0]), "DQ": outputs[0] is not None,
            "out_dq2": unused if outputs[1] is None else tensor_arg(outputs[1]), "DQ2": outputs[1] is not None, **config.launch,
        }  # fmt: skip

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), *norms, *deltas, grad, *outputs]
    launch(rows_kernel, pair.key and (pair.key, config), tensors, launch_args)
    return deltas


def _over_keys(
    pair: PairInputs, norms: list[Tensor], deltas: list[Tensor], grad: Tensor, outputs: tuple[Tensor | None, ...]
) -> None:
    """Walk the keys: their gradients."""
    config = choose_pair_config("compare_keys", pair.first, pair.second)
    tables = [pair.first.key_table(config), pair.second.key_table(config)]

    def launch_args() -> LaunchArgs:
        b, h, _ = pair.rows
        unused = pair.first.unused
        return triton.cdiv(pair.first.j, config.block_j) * b * h, {
            **pair.args(config, "key_table", tables), "norm": norms[0], "norm2": norms[1], "delta": deltas[0], "delta2": deltas[1],
            "grad": grad, "MEASURE": pair.measure,
            "out_dk": unused if outputs[0] is None else tensor_arg(outputs[0]), "DK": outputs[0] is not None,
            "out_dk2": unused if outputs[1] is None else tensor_arg(outputs[1]), "DK2": outputs[1] is not None, **config.launch,
        }  # fmt: skip

    tensors = [*pair.tensors, *(ranges.ptr for ranges in tables), *norms, *deltas, grad, *outputs]
    launch(keys_kernel, pair.key and (pair.key, config), tensors, launch_args)


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
    _over_rows(pair, norms, deltas, grad, of_queries)
    _over_keys(pair, norms, deltas, grad, of_keys)
    return [
        None if dq is None or dk is None else (sum_groups(dq, problem.q.shape[1]), sum_groups(dk, problem.k.shape[1]))
        for problem, dq, dk in zip(problems, of_queries, of_keys, strict=True)
    ]
