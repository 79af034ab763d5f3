"""Tiles of the matrix by sum, maximum or log-sum-exp: the state of every row in each tile of keys, then their merge over rows.

A program of the first kernel owns a block of rows and walks the key blocks that they see, in order. A tile of keys is open while
its keys go by and stored when it ends: Σ 2^(s − pivot) and the pivot, or the largest score. By sum and maximum the pivot is
the row's maximum so far, and the norm of the row is finished beside its tiles; by lse every tile has a maximum of its own, so that
none underflows. The second kernel makes weights of the states and merges the rows of a tile. So the map takes one pass over the
scores, and no two products of different shapes meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .comparison import key_blocks_of_all
from .forward import schedule_tile
from .tile_ops import (
    EMPTY_MAX,
    FLOOR,
    HUGE,
    LN2,
    LOG2E,
    apply_score_mods,
    head_ptr,
    load_block,
    product,
    visible_at_all,
)


@triton.jit
def largest(s, scale2, AXIS: tl.constexpr, SCALE_FOLDED: tl.constexpr):
    """The largest score along an axis, in base 2; FLOOR or below where all are hidden."""
    top = tl.max(s, AXIS)
    if SCALE_FOLDED:
        top = top * scale2
    return top


@triton.jit
def exp_above(s, pivot, scale2, SCALE_FOLDED: tl.constexpr):
    """2^(s − pivot)."""
    if SCALE_FOLDED:
        return tl.exp2(s * scale2 - pivot)
    return tl.exp2(s - pivot)


@triton.jit
def merge_scores(s, m, l, scale2, SCALE_FOLDED: tl.constexpr):
    """Merge scores (i, j) into the state (m, l) of their rows. Also returns 2^(s − m), its sums, the factor of what was
    summed before, and the largest scores."""
    top = largest(s, scale2, 1, SCALE_FOLDED)
    new_m = tl.maximum(m, top)
    p = exp_above(s, new_m[:, None], scale2, SCALE_FOLDED)
    alpha, total = tl.exp2(m - new_m), tl.sum(p, 1)
    return new_m, l * alpha + total, p, alpha, total, top


@triton.jit
def raised(top, other, total):
    """The larger of two maxima; nan where a sum over the same scores is nan, which maxima drop."""
    return tl.where(total == total, tl.maximum(top, other), float("nan"))


@triton.jit
def merge_part(s, p, inside, m, l, open_tile, total, scale2, BY: tl.constexpr, SCALE_FOLDED: tl.constexpr):
    """Merge the cells `inside` of a block into the open tile."""
    if BY == "sum":
        open_tile += tl.sum(tl.where(inside, p, 0.0), 1)
    elif BY == "max":
        top = largest(tl.where(inside, s, FLOOR), scale2, 1, SCALE_FOLDED)
        open_tile = raised(open_tile, top, total)
    else:
        m, l, _, _, _, _ = merge_scores(tl.where(inside, s, FLOOR), m, l, scale2, SCALE_FOLDED)
    return m, l, open_tile


@triton.jit
def store_states(out, out_pivot, b, h, i, c, state, pivot, there, tiles, sizes, BY: tl.constexpr):
    """Store states of the tiles c; `i`, `c` and `there` broadcast to their shape."""
    line = (b * sizes.h + h).to(tl.int64) * tiles + c
    at = line * sizes.i + i
    inside = there & (c >= 0) & (c < tiles) & (i < sizes.i)
    tl.store(out + at, state, mask=inside)
    if BY != "max":
        tl.store(out_pivot + at, pivot, mask=inside)


@triton.jit
def store_nothing(out, out_pivot, b, h, i, first, past, tiles, sizes, BY: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store the state of no keys in the tiles from `first` to `past`."""
    for c0 in range(first, past, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)[:, None]
        at = i[None, :]
        empty = tl.zeros([BLOCK_C, i.shape[0]], tl.float32)
        state = empty + FLOOR if BY == "max" else empty
        store_states(out, out_pivot, b, h, at, c, state, empty + EMPTY_MAX, c < past, tiles, sizes, BY)


@triton.jit
def tile_of_key(edges, j, tiles):
    """The last tile that begins at or before key j: −1 before all of them."""
    low, high = j * 0 - 1, j * 0 + tiles  # edges[low] <= j < edges[high + 1]
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(edges + middle) <= j
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low


@triton.jit
def add_block(
    s, start, i, j, m, l, open_tile, c, edge, edges, tiles, out, out_pivot, b, h, sizes, scale2,
    BY: tl.constexpr, SCALE_FOLDED: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Merge a block of keys, in which any number of tiles may end. `c` is the open tile, `edge` the key after its last."""
    end = start + BLOCK_J
    p, total = s, m
    if BY != "lse":
        m, l, p, alpha, total, top = merge_scores(s, m, l, scale2, SCALE_FOLDED)
        if BY == "sum":
            open_tile *= alpha
    if edge >= end:
        if BY == "sum":
            open_tile += total
        elif BY == "max":
            open_tile = raised(open_tile, top, total)
        else:
            m, l, _, _, _, _ = merge_scores(s, m, l, scale2, SCALE_FOLDED)
    else:
        begin = start
        while edge < end:
            inside = ((j >= begin) & (j < edge))[None, :]
            m, l, open_tile = merge_part(s, p, inside, m, l, open_tile, total, scale2, BY, SCALE_FOLDED)
            store_open_tile(out, out_pivot, b, h, i, c, m, l, open_tile, tiles, sizes, BY)
            m, l, open_tile = no_keys(m, l, open_tile, BY)
            begin = edge
            c += 1
            edge = tl.load(edges + c + 1)
        m, l, open_tile = merge_part(s, p, (j >= begin)[None, :], m, l, open_tile, total, scale2, BY, SCALE_FOLDED)
    if edge == end:
        while edge == end:
            store_open_tile(out, out_pivot, b, h, i, c, m, l, open_tile, tiles, sizes, BY)
            m, l, open_tile = no_keys(m, l, open_tile, BY)
            c += 1
            edge = tl.load(edges + c + 1)
    return m, l, open_tile, c, edge


@triton.jit
def store_open_tile(out, out_pivot, b, h, i, c, m, l, open_tile, tiles, sizes, BY: tl.constexpr):
    store_states(out, out_pivot, b, h, i, c, l if BY == "lse" else open_tile, m, c >= 0, tiles, sizes, BY)


@triton.jit
def no_keys(m, l, open_tile, BY: tl.constexpr):
    """The state of a tile that begins; by sum and maximum m and l are the row's, and stay."""
    if BY == "lse":
        m, l = tl.full(m.shape, EMPTY_MAX, tl.float32), tl.zeros(l.shape, tl.float32)
    elif BY == "max":
        open_tile = tl.full(open_tile.shape, FLOOR, tl.float32)
    else:
        open_tile = tl.zeros(open_tile.shape, tl.float32)
    return m, l, open_tile


@triton.jit
def add_narrow_tiles(
    s, start, first_key, i, m, l, tiles, out, out_pivot, b, h, sizes, scale2,
    BY: tl.constexpr, SCALE_FOLDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Store the states of all tiles of a block, each of WIDTH keys that begin at a multiple of it."""
    COUNT: tl.constexpr = BLOCK_J // WIDTH
    parts = tl.reshape(s, [BLOCK_I, COUNT, WIDTH])
    if BY == "lse":
        pivot = tl.maximum(largest(parts, scale2, 2, SCALE_FOLDED), EMPTY_MAX)
        state = tl.sum(exp_above(parts, pivot[:, :, None], scale2, SCALE_FOLDED), 2)
    else:
        m, l, p, _, total, _ = merge_scores(s, m, l, scale2, SCALE_FOLDED)
        pivot = tl.broadcast_to(m[:, None], [BLOCK_I, COUNT])
        if BY == "sum":
            state = tl.sum(tl.reshape(p, [BLOCK_I, COUNT, WIDTH]), 2)
        else:
            top = largest(parts, scale2, 2, SCALE_FOLDED)
            state = tl.where((total == total)[:, None], top, float("nan"))
    c = (start - first_key) // WIDTH + tl.arange(0, COUNT)
    there = start + tl.arange(0, COUNT) * WIDTH >= first_key
    store_states(out, out_pivot, b, h, i[:, None], c[None, :], state, pivot, there[None, :], tiles, sizes, BY)
    return m, l


@triton.jit
def finish_rows(out_rows, sink, m, l, b, h, i, sizes, SINK: tl.constexpr):
    """Store the maximum of rows in base 2 and 1 / l, a sink's share included."""
    if SINK:
        sink2 = tl.maximum(tl.load(head_ptr(sink, b, h)).to(tl.float32) * LOG2E, FLOOR)
        new_m = tl.maximum(m, sink2)
        l = tl.exp2(m - new_m) * l + tl.exp2(sink2 - new_m)
        m = new_m
    empty = l == 0.0
    row = (b * sizes.h + h).to(tl.int64) * 2 * sizes.i + i
    tl.store(out_rows + row, tl.where(empty, HUGE, m), mask=i < sizes.i)
    tl.store(out_rows + row + sizes.i, 1.0 / tl.where(empty, 1.0, l), mask=i < sizes.i)


@triton.jit
def tile_states_kernel(
    q, k, q_desc, k_desc, q_layout, k_layout, modifiers, strides, caps, sink, mask, row_table, edges, tiles, first_key, past_key,
    out, out_pivot, out_rows, sizes, heads, heads_per_group, scale, scale2,
    D: tl.constexpr, MODIFIERS: tl.constexpr, MASK: tl.constexpr, SCALE_FOLDED: tl.constexpr, FP32: tl.constexpr, SINK: tl.constexpr,
    BY: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, EDGES: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """States of BLOCK_I rows in each tile of keys.

    WIDTH: keys of a tile where all tiles are so wide, begin at multiples of it and divide BLOCK_J; else 0, and tile c holds
    edges[c] <= j < edges[c + 1]. `edges` has one entry more, which no key reaches.
    """
    block, head = schedule_tile(tl.cdiv(sizes.i, BLOCK_I), heads, heads_per_group)
    b, h = head // sizes.h, head % sizes.h
    start = block * BLOCK_I
    i, d = start + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    q_tile = load_block(q, q_desc, q_layout, b, h, start, i, d, sizes.i, D, TMA, True)
    m = tl.full([BLOCK_I], EMPTY_MAX, tl.float32)
    l = tl.zeros([BLOCK_I], tl.float32)
    open_tile = l
    if BY == "max":
        open_tile = tl.full([BLOCK_I], FLOOR, tl.float32)
    first, full_from, full_to, past = key_blocks_of_all(start, b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)
    if MASK == "intervals":  # what is fully visible in one interval of several may lie before another
        several = mask.n_intervals > 1
        full_from, full_to = tl.where(several, first, full_from), tl.where(several, first, full_to)
    if BY == "lse":  # no other keys count
        first, past = tl.maximum(first, first_key // BLOCK_J), tl.minimum(past, tl.cdiv(past_key, BLOCK_J))
        past = tl.maximum(first, past)
        full_from, full_to = (
            tl.minimum(tl.maximum(full_from, first), past),
            tl.minimum(tl.maximum(full_to, first), past),
        )
    c, edge = start * 0 - 1, start * 0
    if WIDTH == 0:
        if (MASK != "none" and MASK != "causal") or BY == "lse":
            c = tile_of_key(edges, first * BLOCK_J, tiles)
        edge = tl.load(edges + c + 1)
        store_nothing(out, out_pivot, b, h, i, start * 0, tl.minimum(c, tiles), tiles, sizes, BY, 16)
    for SECTION in tl.static_range(3):  # edge of the mask, fully visible, edge
        if EDGES or SECTION == 1:
            begin = first if SECTION == 0 else full_from if SECTION == 1 else full_to
            end = full_from if SECTION == 0 else full_to if SECTION == 1 else past
            for n in range(begin, end):
                j = n * BLOCK_J + tl.arange(0, BLOCK_J)
                k_tile = load_block(
                    k, k_desc, k_layout, b, h // sizes.k_group, n * BLOCK_J, j, d, sizes.j, D,
                    TMA and (EVEN_BLOCKS or SECTION == 1), SECTION != 1,
                )  # fmt: skip
                s = product(q_tile, k_tile.T, FP32)
                s, _ = apply_score_mods(
                    s, i[:, None], j[None, :], b, h, modifiers, strides, caps, scale, sizes, MODIFIERS, SCALE_FOLDED, 0
                )
                if SECTION != 1:
                    s = tl.where(visible_at_all(i[:, None], j[None, :], b, h, mask, sizes, MASK), s, FLOOR)
                if WIDTH > 0:
                    m, l = add_narrow_tiles(
                        s, n * BLOCK_J, first_key, i, m, l, tiles, out, out_pivot, b, h, sizes, scale2, BY, SCALE_FOLDED, WIDTH,
                        BLOCK_I, BLOCK_J,
                    )  # fmt: skip
                else:
                    m, l, open_tile, c, edge = add_block(
                        s, n * BLOCK_J, i, j, m, l, open_tile, c, edge, edges, tiles, out, out_pivot, b, h, sizes, scale2, BY,
                        SCALE_FOLDED, BLOCK_J,
                    )  # fmt: skip
    if WIDTH > 0:
        before, after = first * BLOCK_J - first_key, past * BLOCK_J - first_key
        if MASK != "none" and MASK != "causal":
            store_nothing(out, out_pivot, b, h, i, start * 0, tl.minimum(tl.maximum(before, 0) // WIDTH, tiles), tiles, sizes, BY, 16)  # fmt: skip
        c = tl.maximum(after, 0) // WIDTH
    else:
        store_open_tile(out, out_pivot, b, h, i, c, m, l, open_tile, tiles, sizes, BY)
        c += 1
    store_nothing(out, out_pivot, b, h, i, tl.maximum(c, 0), tiles, tiles, sizes, BY, 16)
    if BY != "lse":
        finish_rows(out_rows, sink, m, l, b, h, i, sizes, SINK)


@triton.jit
def weights_of_states(state, pivot, m, share, BY: tl.constexpr):
    """The weight of a row in a tile, or its largest; 0 where the tile shows the row no key."""
    if BY == "sum":
        return tl.where(state == 0.0, 0.0, state * tl.exp2(pivot - m) * share)
    return tl.where(state <= EMPTY_MAX, 0.0, tl.exp2(state - m) * share)


@triton.jit
def load_states(states, pivots, rows, line, head, c, i, there, sizes, BY: tl.constexpr):
    """States (c, i) of rows, their pivots, and the rows' maximum and 1 / l."""
    at = (line + c)[:, None] * sizes.i + i[None, :]
    nothing = FLOOR if BY == "max" else 0.0
    state = tl.load(states + at, mask=there, other=nothing)
    pivot, m, share = state, state, state
    if BY != "max":
        pivot = tl.load(pivots + at, mask=there, other=EMPTY_MAX)
    if BY != "lse":
        row = head.to(tl.int64) * 2 * sizes.i + i
        m = tl.load(rows + row, mask=i < sizes.i, other=HUGE)[None, :]
        share = tl.load(rows + row + sizes.i, mask=i < sizes.i, other=0.0)[None, :]
    return state, pivot, m, share


@triton.jit
def finished_tile(top, total, BY: tl.constexpr):
    if BY == "sum":
        return total
    if BY == "max":
        return tl.where(total == total, top, float("nan"))
    return tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN2)


@triton.jit
def merge_rows_kernel(
    states, pivots, rows, row_edges, out, sizes, tiles, row_tiles,
    BY: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Tiles (row_tiles, tiles) from the states of their rows, BLOCK_C tiles of keys a program.

    HEIGHT: rows of a tile where all tiles are so high and divide BLOCK_I, which are merged at once; else 0, and a program merges
    the rows of one tile, row_edges[r] <= i < row_edges[r + 1].
    """
    column_blocks = tl.cdiv(tiles, BLOCK_C)
    row_blocks = tl.cdiv(sizes.i, BLOCK_I) if HEIGHT > 0 else row_tiles
    block, rest = tl.program_id(0) % column_blocks, tl.program_id(0) // column_blocks
    r, head = rest % row_blocks, rest // row_blocks
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    line = head.to(tl.int64) * tiles
    out_head = out + head.to(tl.int64) * row_tiles * tiles
    if HEIGHT > 0:
        COUNT: tl.constexpr = BLOCK_I // HEIGHT
        i = r * BLOCK_I + tl.arange(0, BLOCK_I)
        there = (c < tiles)[:, None] & (i < sizes.i)[None, :]
        state, pivot, m, share = load_states(states, pivots, rows, line, head, c, i, there, sizes, BY)
        if BY == "lse":
            pivot = tl.reshape(pivot, [BLOCK_C, COUNT, HEIGHT])
            top = tl.max(pivot, 2)
            total = tl.sum(tl.reshape(state, [BLOCK_C, COUNT, HEIGHT]) * tl.exp2(pivot - top[:, :, None]), 2)
        else:
            w = tl.reshape(weights_of_states(state, pivot, m, share, BY), [BLOCK_C, COUNT, HEIGHT])
            top, total = tl.max(w, 2), tl.sum(w, 2)
        row = r * COUNT + tl.arange(0, COUNT)
        at = out_head + row.to(tl.int64)[None, :] * tiles + c[:, None]
        tl.store(at, finished_tile(top, total, BY), mask=(row < row_tiles)[None, :] & (c < tiles)[:, None])
    else:
        first, past = tl.load(row_edges + r), tl.load(row_edges + r + 1)
        top = tl.full([BLOCK_C, BLOCK_I], EMPTY_MAX if BY == "lse" else 0.0, tl.float32)
        total = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
        for start in range(first, past, BLOCK_I):
            i = start + tl.arange(0, BLOCK_I)
            there = (c < tiles)[:, None] & (i < past)[None, :]
            state, pivot, m, share = load_states(states, pivots, rows, line, head, c, i, there, sizes, BY)
            if BY == "lse":
                new = tl.maximum(top, pivot)
                total = total * tl.exp2(top - new) + state * tl.exp2(pivot - new)
                top = new
            else:
                w = weights_of_states(state, pivot, m, share, BY)
                top, total = tl.maximum(top, w), total + w
        highest = tl.max(top, 1)
        if BY == "lse":
            total = total * tl.exp2(top - highest[:, None])
        tile = finished_tile(highest, tl.sum(total, 1), BY)
        tl.store(out_head + r.to(tl.int64) * tiles + c, tile, mask=c < tiles)


__all__ = ["merge_rows_kernel", "tile_states_kernel"]
