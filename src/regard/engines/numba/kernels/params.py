"""The params record of a kernel: addresses, strides and sizes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numba import from_dtype

from .intrinsics import pointer_to

__all__ = [
    "ALIBI",
    "BIAS",
    "BIAS_PER_ROW",
    "CROSS_ENTROPY",
    "DENSE_MASK",
    "DISTANCE",
    "ENTROPY",
    "JS",
    "KL",
    "MEASURES",
    "MODIFIER",
    "MODIFIER_KINDS",
    "ONE_PASS",
    "OVERLAP",
    "PARAMS",
    "POOL_BY",
    "POOL_LSE",
    "POOL_MAX",
    "POOL_SUM",
    "ROW_STATISTICS",
    "SOFTCAP",
    "TOTAL_VARIATION",
    "WORDS",
    "modifier_table",
    "modifiers_at",
    "params_at",
    "params_record",
]

# Kinds of modifiers, which change a row of scores between the product and the softmax.
BIAS_PER_ROW, BIAS, ALIBI, SOFTCAP, DENSE_MASK, DISTANCE = 0, 1, 2, 3, 4, 5
# Measures of two matrices, and the entropy of heads together.
KL, CROSS_ENTROPY, JS, OVERLAP, TOTAL_VARIATION, ENTROPY = 0, 1, 2, 3, 4, 5

# How the cells of a pooled tile are merged.
POOL_SUM, POOL_MAX, POOL_LSE = 0, 1, 2

#: The kind of each modifier that the kernels compute, by `Modifier.kernel_op`.
MODIFIER_KINDS = {
    "bias": BIAS,
    "bias_keys": BIAS,
    "bias_rows": BIAS_PER_ROW,
    "alibi": ALIBI,
    "softcap": SOFTCAP,
}

#: The number of each measure, by its name in `core/rows/comparison.py`.
MEASURES = {
    "kl": KL,
    "cross_entropy": CROSS_ENTROPY,
    "js": JS,
    "overlap": OVERLAP,
    "total_variation": TOTAL_VARIATION,
    "entropy": ENTROPY,
}

#: The number of each way to pool, by its name in `core/rows/spans.py`.
POOL_BY = {"sum": POOL_SUM, "max": POOL_MAX, "lse": POOL_LSE}

_MODIFIER = np.dtype(
    [(name, "i8") for name in ("kind", "at", "b", "h", "i", "j")]
    + [("cap", "f8")]
    + [(name, "i8") for name in ("k", "k_b", "k_h", "k_d", "group", "size")]
    + [("near", "f8")]
)

#: One modifier: its kind, the address of its tensor and strides over (b, h, i, j) in elements; cap for SOFTCAP. Of
#: DISTANCE the tensor is q, `j` the stride of k and `cap` the factor of distances. Then come other strides of k, the
#: number of heads that share keys, the size of vectors, and NEAR of `core.scores.similarity`. Of short vectors all
#: cells are differences: `j` is 1, and `k_d` the stride of the components of k; of others it is 0.
MODIFIER = from_dtype(_MODIFIER)

modifiers_at = pointer_to(MODIFIER)

#: Results of the forward kernel that are one number a row.
ROW_STATISTICS = ("lse", "max_score", "entropy", "mean_distance", "mass")
#: All results of the forward kernel.
ONE_PASS = frozenset([*ROW_STATISTICS, "norm", "y", "argmax", "topk_scores", "topk_indices"])

_ADDRESSES = (
    "gemm counter scratch lo hi modifiers q k norm "  # of all kernels
    f"v y {' '.join(ROW_STATISTICS)} keys argmax topk_scores topk_indices sink "  # forward
    "u z received pool "  # column_pass
    "tiles row_tile key_tile key_edges "  # tile_pool: tile of every query and key
    "diagonals targets first at_target tie tie_query tie_key "  # profile
    "cells row_at row_place col_at col_place "  # cells
    "left right dy delta d_entropy d_distance dq dk dv drow dkey "  # backward
    "other value grad "  # comparison: the record of the second matrix, the measure of every row and its gradient
    "shares"  # head_rows: the factor of each head in a sum, then what divides that of each group
)
_STRIDES = (
    "q_b q_h q_i k_b k_h k_j v_b v_h v_j sink_b sink_h u_b u_h u_i "
    "left_b left_h left_i right_b right_h right_j dy_b dy_h dy_i"
)
_SIZES = (
    "B H G V I J D "  # batch, heads of q, k and v, queries, keys, size of q and k
    "E U X "  # size of v, of u, of left and right
    "itemsize offset n_intervals intervals_b modifier_count topk block_i block_j chunks scratch_size right_group "
    "strip "  # forward, strip_pass: tiles of a block of rows that stay in scratch memory
    "tile_rows tile_cols i0 i1 j0 j1 "  # the pooled map
    "row_from row_to key_from key_to "  # column_pass, tile_pool: the part of the matrix that is visited
    "pool_by "  # tile_pool
    "row_count col_count "  # the cells
    "measure heads groups "  # comparison: heads of the result, and groups of them that share no keys
    "index_heads divided"  # head_rows: terms of a sum of ReLUs; whether rows are divided by their sum
)
_INTEGERS = f"{_ADDRESSES} {_STRIDES} {_SIZES}".split()
#: The word of the record that each integer is.
WORDS = {name: word for word, name in enumerate(_INTEGERS)}
_FIELDS: dict[str, Any] = dict.fromkeys([*_INTEGERS, "scale"], 0)
#: By the bytes of a number: the record, and how it is packed. The type of `scale` is that of all numbers of a kernel.
_RECORDS = {4: [("scale", "f4"), ("_", "f4")], 8: [("scale", "f8")]}
_PACKED = {4: struct.Struct(f"{len(_INTEGERS)}qf4x"), 8: struct.Struct(f"{len(_INTEGERS)}qd")}

#: Addresses are 0 for outputs that are not wanted; strides and sizes count elements.
PARAMS = {n: from_dtype(np.dtype([(name, "i8") for name in _INTEGERS] + end)) for n, end in _RECORDS.items()}

params_at = pointer_to(PARAMS[4])


def params_record(fields: dict[str, Any]) -> bytes:
    """The record of these fields; all others are 0."""
    record = _FIELDS | fields
    assert len(record) == len(_FIELDS), "unknown field"
    return _PACKED[record["itemsize"]].pack(*record.values())


def modifier_table(modifiers: list[tuple[Any, ...]]) -> np.ndarray:
    """The modifiers as the kernels read them."""
    return np.array(modifiers, _MODIFIER)
