"""The forward pass: one pass over the keys for the output and all row statistics.

A program owns a block of query rows and walks the key blocks that they see. Each is merged into the online-softmax state
(m, l, t, y, …): fully visible tiles first, loaded by TMA where possible, then the tiles at the edges of the mask, which
are masked cell by cell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .additive import tanh_sum
from .parts import load_part, product_of_halves, product_of_thirds
from .tile_ops import (
    EMPTY_MAX,
    FLOOR,
    LN2,
    LOG2E,
    add_product,
    apply_score_mods,
    head_ptr,
    key_blocks,
    load_block,
    load_row_values,
    load_tile,
    product,
    store_row,
    store_tile,
    tma_load,
    visible,
    wants,
)


class Outputs(NamedTuple):
    """Outputs, each a `TensorArg`; kernels touch only those named in STATS, and y."""

    y: Any
    lse: Any
    norm: Any
    max_score: Any
    entropy: Any
    mean_distance: Any
    mass: Any
    argmax: Any


def row_stats(names: tuple[str, ...]) -> tuple[str, ...]:
    """STATS of the kernels: those of `names` that are one number a row, in one order, so that each set compiles once."""
    return tuple(name for name in Outputs._fields if name in names and name != "y")


@triton.jit
def schedule_tile(rows, heads, heads_per_group, first=0):
    """Row block and head of this program; `first` programs ran in earlier launches.

    Heads are scheduled in groups whose keys and values fit the L2 cache together. Within a group the last rows start
    first, since they take longest under a causal mask.
    """
    pid = tl.program_id(0) + first
    group = pid // (heads_per_group * rows)
    here = tl.minimum(heads_per_group, heads - group * heads_per_group)
    n = pid - group * heads_per_group * rows
    return rows - 1 - n // here, group * heads_per_group + n % here


@triton.jit
def online_softmax_update(s, m, l, t, mean_distance, mass, argmax, i, j, keys, scale2, offset,
            STATS: tl.constexpr, SCALE_FOLDED: tl.constexpr):  # fmt: skip
    """Merge one tile of scores into the online-softmax state of its rows, as `State.merge` of the blockwise engine does.

    Also returns the tile's unnormalised weights p and the factor alpha of earlier ones, for the output; and the largest
    score of the tile in every row, before a folded scale.
    """
    tile_max = tl.max(s, 1)
    unscaled_max = tile_max
    if wants(STATS, "argmax"):
        first = tl.min(tl.where(s == tile_max[:, None], j[None, :], 2147483647), 1)
    if SCALE_FOLDED:
        tile_max = tile_max * scale2
    new_m = tl.maximum(m, tile_max)
    if SCALE_FOLDED:
        x = s * scale2 - new_m[:, None]
    else:
        x = s - new_m[:, None]
    p = tl.exp2(x)
    alpha = tl.exp2(m - new_m)
    if wants(STATS, "entropy"):
        # A higher maximum shifts every s − m by the same amount, once for each unit of l.
        t = alpha * (t + (m - new_m) * l) + tl.sum(p * x, 1)
    if wants(STATS, "mean_distance"):
        mean_distance = alpha * mean_distance + tl.sum(p * tl.abs(i[:, None] + offset - j[None, :]).to(tl.float32), 1)
    if wants(STATS, "mass"):
        mass = alpha * mass + tl.sum(p * keys, 1)
    if wants(STATS, "argmax"):
        # Ties go to the lower index; tiles are not visited in the order of the keys.
        tie = tl.where(tile_max == m, tl.minimum(first, argmax), argmax)
        argmax = tl.where(tile_max > m, first, tie)
    l = l * alpha + tl.sum(p, 1)
    return new_m, l, t, mean_distance, mass, argmax, p, alpha, unscaled_max


@triton.jit
def store_tile_max(tile_maxima, tiles_per_group, group_max, tile_max, visit, b, h, i, sizes):
    """Store the largest score of every row over groups of `tiles_per_group` visited tiles."""
    group_max = tl.where(visit % tiles_per_group == 0, tile_max, tl.maximum(group_max, tile_max))
    tl.store(head_ptr(tile_maxima, b, h) + visit // tiles_per_group * tile_maxima.i + i, group_max, mask=i < sizes.i)
    return group_max


@triton.jit
def store_row_stats(out, sink, m, l, t, mean_distance, mass, argmax, b, h, i, sizes, SINK: tl.constexpr,
         STATS: tl.constexpr):  # fmt: skip
    """Epilogue: store the statistics of finished rows. Returns the factor that normalises y, and which rows saw no key."""
    # max() drops nan, the sum keeps it.
    empty, no_finite_key = (m <= EMPTY_MAX) & (l == 0.0), m <= EMPTY_MAX
    if wants(STATS, "max_score"):
        max_score = tl.where(l == l, m * LN2, float("nan"))
        store_row(out.max_score, b, h, i, tl.where(empty, float("-inf"), max_score), sizes.i)
    if wants(STATS, "argmax"):
        store_row(out.argmax, b, h, i, tl.where(no_finite_key, -1, argmax), sizes.i)
    alpha = 1.0
    if SINK:  # one more key with value 0
        sink2 = tl.maximum(tl.load(head_ptr(sink, b, h)).to(tl.float32) * LOG2E, FLOOR)
        new_m = tl.maximum(m, sink2)
        alpha, sink_weight = tl.exp2(m - new_m), tl.exp2(sink2 - new_m)
        t = alpha * (t + (m - new_m) * l) + sink_weight * (sink2 - new_m)
        l = alpha * l + sink_weight
        m = new_m
        empty = (m <= EMPTY_MAX) & (l == 0.0)
    share = tl.where(empty, 0.0, alpha / l)
    if wants(STATS, "lse"):
        store_row(out.lse, b, h, i, tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2), sizes.i)
    if wants(STATS, "norm"):
        store_row(out.norm, b, h, i, tl.where(empty, float("-inf"), m * LN2), sizes.i)
        tl.store(head_ptr(out.norm, b, h) + i.to(tl.int64) * out.norm.i + 1, tl.where(empty, 0.0, l), mask=i < sizes.i)
    if wants(STATS, "entropy"):
        h2 = tl.log2(l) - tl.where(empty, 0.0, t / l)
        # Rounding may put a one-hot row just below 0; this form keeps nan.
        store_row(out.entropy, b, h, i, tl.where(empty | (h2 < 0), 0.0, h2 * LN2), sizes.i)
    if wants(STATS, "mean_distance"):
        store_row(out.mean_distance, b, h, i, tl.where(empty, 0.0, mean_distance * share), sizes.i)
    if wants(STATS, "mass"):
        store_row(out.mass, b, h, i, tl.where(empty, 0.0, mass * share), sizes.i)
    return share, empty


@triton.jit
def forward_kernel(
    q, k, v, tanh_arg, q_desc, k_desc, v_desc, q_layout, k_layout, v_layout, modifiers, strides, caps, sink,
    keys, q_scale, k_scale, mask, row_table, out, tile_maxima, tiles_per_group, groups, scores, pitch, sizes, heads, heads_per_group, scale, scale2,
    SIMILARITY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr,
    FP32: tl.constexpr, FP32_V: tl.constexpr, SINK: tl.constexpr, SHARED_KV: tl.constexpr,
    Y: tl.constexpr, STATS: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, EVEN_BLOCKS: tl.constexpr, TILE_MAXIMA: tl.constexpr, SCORES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Output and statistics of BLOCK_I rows.

    EDGES: 1 if some tiles are partly visible, 2 if all are taken as such, in one loop. EVEN_BLOCKS: the keys fill their last block. TILE_MAXIMA: store the largest
    score of every few tiles, for topk. SCORES: store the scores of visited tiles, in rows of `pitch` numbers. PARTS: q, k and v come as
    parts of 16 bits (`parts`), with scales of the rows of q and k.
    """
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i = start + tl.arange(0, BLOCK_I)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    hk, hv = h // sizes.k_group, h // sizes.v_group
    if SIMILARITY == "product":
        if PARTS:
            q_tile = load_part(q, b, h, i, d, sizes.i, D, 2, 0)
            q_low = load_part(q, b, h, i, d, sizes.i, D, 2, 1)
            of_rows = load_row_values(q_scale, b, h, i, sizes, 0.0)
        elif TMA:  # rows past the end may be another head's; they are computed and never stored
            q_tile = tma_load(q_desc, q_layout, b, h, start)
        else:
            q_tile = load_tile(q, b, h, i, d, sizes.i, D, True)

    # Above every hidden score. A hidden score as maximum would make s · scale2 − m a rounding error of 1e20 instead of 0:
    # the FMA does not round the product, but the maximum was rounded.
    m = tl.full([BLOCK_I], EMPTY_MAX, tl.float32)
    l = tl.zeros([BLOCK_I], tl.float32)
    t = tl.zeros([BLOCK_I], tl.float32)
    mean_distance = tl.zeros([BLOCK_I], tl.float32)
    mass = tl.zeros([BLOCK_I], tl.float32)
    argmax = tl.full([BLOCK_I], 2147483647, tl.int32)
    y = tl.zeros([BLOCK_I, BLOCK_E], tl.float32)
    group_max, visits = m, start * 0

    for r in range(0, mask.n_intervals):
        first, full_from, full_to, past = key_blocks(start, b, r, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
        if EDGES == 2:
            full_from, full_to = first, first
        left = full_from - first
        # Fully visible tiles, then those at the edges of the mask.
        for EDGE in tl.static_range(1 if EDGES == 2 else 0, 2 if EDGES else 1):
            for n in range(0 if EDGE else full_from, left + past - full_to if EDGE else full_to):
                at = tl.where(n < left, first + n, full_to + n - left) if EDGE else n
                j = at * BLOCK_J + tl.arange(0, BLOCK_J)
                if SIMILARITY == "product" and PARTS:
                    k_tile = load_part(k, b, hk, j, d, sizes.j, D, 2, 0)
                    k_low = load_part(k, b, hk, j, d, sizes.j, D, 2, 1)
                    of_keys = tl.load(
                        k_scale + (b * (sizes.h // sizes.k_group) + hk).to(tl.int64) * sizes.j + j,
                        mask=j < sizes.j,
                        other=0.0,
                    )
                    s = product_of_halves(q_tile, q_low, k_tile, k_low) * of_rows[:, None] * of_keys[None, :]
                elif SIMILARITY == "product":
                    k_tile = load_block(
                        k, k_desc, k_layout, b, hk, at * BLOCK_J, j, d, sizes.j, D, TMA and (EVEN_BLOCKS or not EDGE),
                        EDGE == 1,
                    )  # fmt: skip
                    s = product(q_tile, k_tile.T, FP32)
                else:
                    s = tanh_sum(tanh_arg, i, j, b, h, hk, sizes, SIMILARITY, False)
                s, _ = apply_score_mods(
                    s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
                )
                if SCORES:
                    cell = ((b * sizes.h + h).to(tl.int64) * sizes.i + i)[:, None] * pitch + j[None, :]
                    tl.store(scores + cell, s, mask=(i[:, None] < sizes.i) & (j[None, :] < pitch))
                if EDGE:
                    s = tl.where(visible(i[:, None], j[None, :], b, h, r, mask, sizes, MASK), s, FLOOR)
                if not Y or PARTS:
                    v_tile = s
                elif SHARED_KV:
                    v_tile = k_tile
                else:
                    v_tile = load_block(
                        v, v_desc, v_layout, b, hv, at * BLOCK_J, j, e, sizes.j, E, TMA and (EVEN_BLOCKS or not EDGE),
                        EDGE == 1,
                    )  # fmt: skip
                key_mass = s
                if wants(STATS, "mass"):
                    key_mass = tl.load(head_ptr(keys, b, h) + j.to(tl.int64) * keys.j, mask=j < sizes.j, other=0.0)[
                        None, :
                    ]
                m, l, t, mean_distance, mass, argmax, p, alpha, tile_max = online_softmax_update(
                    s, m, l, t, mean_distance, mass, argmax, i, j, key_mass, scale2, sizes.offset, STATS, SCALE_FOLDED
                )  # fmt: skip
                if Y and PARTS:
                    v_first = load_part(v, b, hv, j, e, sizes.j, E, 3, 0)
                    v_second = load_part(v, b, hv, j, e, sizes.j, E, 3, 1)
                    v_third = load_part(v, b, hv, j, e, sizes.j, E, 3, 2)
                    y = y * alpha[:, None] + product_of_thirds(p, v_first, v_second, v_third)
                elif Y:
                    y = add_product(p.to(v_tile.dtype), v_tile, y * alpha[:, None], FP32_V)
                if TILE_MAXIMA:
                    visit = visits + (n if EDGE else n - full_from)
                    group_max = store_tile_max(tile_maxima, tiles_per_group, group_max, tile_max, visit, b, h, i, sizes)
            visits += left + past - full_to if EDGE else full_to - full_from
    if TILE_MAXIMA:
        for group in range(tl.cdiv(visits, tiles_per_group), groups):
            lowest = tl.full([BLOCK_I], FLOOR, tl.float32)
            tl.store(head_ptr(tile_maxima, b, h) + group * tile_maxima.i + i, lowest, mask=i < sizes.i)

    share, empty = store_row_stats(
        out, sink, m, l, t, mean_distance, mass, argmax, b, h, i, sizes, SINK, STATS,
    )  # fmt: skip
    if Y:
        store_tile(out.y, b, h, i, e, tl.where(empty[:, None], 0.0, y * share[:, None]), sizes.i, E)


__all__ = [
    "Outputs",
    "forward_kernel",
    "online_softmax_update",
    "row_stats",
    "schedule_tile",
    "store_row_stats",
    "store_tile_max",
]
