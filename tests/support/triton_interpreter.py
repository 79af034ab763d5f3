"""Kernels in Triton's interpreter: python tests/support/triton_interpreter.py <part> <of> [heads | indexers | tiles].

Prints what is wrong; exit code 1 if anything. A last word names the kernels beside the engine's own: heads together, indexers, tiles.

A process of its own, since Triton asks once, when it is imported, whether it is to interpret. bfloat16 is silently
wrong there, and races never show: those are for tests/gpu.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import regard
from regard.core.masks import intervals
from regard.core.stats import Request
from regard.engines.triton import (
    backward_pass,
    comparison_pass,
    decode_pass,
    forward_pass,
    head_rows_pass,
    indexer_pass,
    kernel_inputs,
    mask_args,
    profile_pass,
    short_pass,
    tile_config,
    tile_pool_pass,
    topk_pass,
)
from support import comparison_cases, head_cases, indexer_cases, kernel_cases, profile_cases, tile_pool_cases

torch.set_num_threads(1)
np.seterr(all="ignore")  # empty rows divide by 0, and are told so; what comes out is judged


empty = kernel_inputs.empty


def poisoned(*shape: int, dtype: torch.dtype, **more) -> torch.Tensor:
    """Outputs are full of nan before a kernel runs: what it does not write shows."""
    return empty(*shape, dtype=dtype, **more).fill_(torch.nan if dtype.is_floating_point else -9)


def tables(lo, hi, flags: bool, block_i: int, block_j: int, keys: int):
    """The tables of rows and of keys by their definition, tile by tile: (r, I, 4) and (J, 4)."""
    rows = lo.shape[1]
    ends_i, ends_j = (range(0, n, block) for n, block in ((rows, block_i), (keys, block_j)))
    by_rows = np.zeros((len(lo), len(ends_i), 4), int)
    touched, full = (np.zeros((len(ends_i), len(ends_j)), bool) for _ in range(2))
    for r, (n, i) in itertools.product(range(len(lo)), enumerate(ends_i)):
        low, high = lo[r, i : i + block_i], hi[r, i : i + block_i]
        seen = [(a, b) for a, b in zip(low, high, strict=True) if a < b]
        begin, end = min((a for a, _ in seen), default=0), max((b for _, b in seen), default=0)
        all_from, all_to = low.max(), 0 if flags else high.min()
        first = begin // block_j
        by_rows[r, n] = (
            first,
            -(-all_from // block_j),
            min(all_to, keys) // block_j,
            -(-end // block_j) if seen else first,
        )
        for m, j in enumerate(ends_j):
            past = min(j + block_j, keys)
            touched[n, m] |= bool(seen) and begin < past and end > j
            full[n, m] |= all_from <= j and all_to >= past and i + block_i <= rows and j + block_j <= keys
    by_keys = np.zeros((len(ends_j), 4), int)
    for m in range(len(ends_j)):
        some, full_tiles = np.flatnonzero(touched[:, m]), np.flatnonzero(touched[:, m] & full[:, m])
        first, past = (some[0], some[-1] + 1) if len(some) else (0, 0)
        run = (full_tiles[0], full_tiles[-1] + 1) if len(full_tiles) else (0, 0)
        by_keys[m] = first, *(run if run[1] - run[0] == len(full_tiles) else (first, first)), past
    return by_rows, by_keys


def tables_that_are_wrong(cases: int = 60) -> int:
    rng, wrong = np.random.default_rng(0), 0
    for case in range(cases):
        b, n_intervals, rows, keys = (int(rng.integers(1, most)) for most in (3, 4, 80, 100))
        ends = np.sort(rng.integers(0, keys + 1, (b, 2 * n_intervals, rows)), 1)
        if case % 3 == 0:  # as padding: all rows alike, some see nothing
            ends = np.broadcast_to(ends[:, :, :1], ends.shape) * (rng.random((b, 1, 1)) > 0.2)
        lo, hi = ends[:, ::2], ends[:, 1::2]
        intervals = tuple(torch.tensor(np.ascontiguousarray(x), dtype=torch.int32) for x in (lo, hi))
        mask_format = mask_args.MaskFormat("flags" if case % 4 == 1 else "intervals", None, intervals)
        for block_i, block_j in ((16, 32), (32, 16)):
            computed = (
                mask_args.row_table(mask_format, block_i, block_j, keys),
                mask_args.key_table(mask_format, block_i, block_j, keys),
            )
            for n in range(b):
                right = tables(lo[n], hi[n], mask_format.kind == "flags", block_i, block_j, keys)
                if not all(np.array_equal(x[n].numpy(), y) for x, y in zip(computed, right, strict=True)):
                    wrong += 1
                    print(f"tables of case {case}, {block_i} × {block_j}: {[x[n] for x in computed]} for {right}")
    return wrong


def _wrong_of_few_rows(part: int, of: int) -> int:
    """Keys in one split and in several, of which some are empty; the largest of a row from one part and from many."""
    tile_config.forced.clear()
    splits, searched, wrong = decode_pass._splits, decode_pass.SCORES_PER_PROGRAM, 0
    for n, case in enumerate(kernel_cases.of_few_rows((torch.float32, torch.float16))[part::of]):
        tile_config.forced["decode"] = tile_config.Config(16 if n % 2 else 32, 32 if n % 3 else 16, 4, 1, tma=False)
        decode_pass._splits = lambda *_, count=(1, 2, 3, 7)[n % 4]: count
        decode_pass.SCORES_PER_PROGRAM = 16 if n % 2 else 64
        try:
            kernel_cases.judged(case, gradients=False)
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [{case}]")
    tile_config.forced.clear()
    decode_pass._splits, decode_pass.SCORES_PER_PROGRAM = splits, searched
    return wrong


def _wrong_comparisons(part: int, of: int) -> int:
    """Two matrices: kl of every pair of masks, and every other measure of two of them."""
    names = list(comparison_cases.CASES)
    cases = [(name, "kl") for name in names]
    cases += [
        (names[(n + m) % len(names)], measure)
        for n, measure in enumerate(comparison_cases.MEASURES[1:])
        for m in (1, 4)
    ]
    wrong = 0
    for n, (name, measure) in enumerate(cases[part::of]):
        tile_config.forced["any"] = tile_config.Config(*((16, 32), (32, 16))[n % 2], 4, 1, tma=False)
        try:
            comparison_cases.judged(name, measure)
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [{measure} of two matrices, {name}]")
    tile_config.forced["any"] = tile_config.Config(16, 32, 4, 1, tma=False)
    for measure, broken in list(itertools.product(("kl", "js"), ("bias", "gradient")))[part::of]:
        comparison_cases.judged_where_a_row_is_nan(measure, broken)
    tile_config.forced.clear()
    return wrong


def _wrong_profiles(part: int, of: int) -> int:
    """Profiles of heads, in tiles that are taller than wide and wider than tall."""
    wrong = 0
    for n, name in list(enumerate(profile_cases.CASES))[part::of]:
        tile_config.forced["any"] = tile_config.Config(*((16, 32), (32, 16))[n % 2], 4, 1, tma=False)
        try:
            profile_cases.judged(name, (torch.float32, torch.float16)[n // 2 % 2])
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [profile, {name}]")
    tile_config.forced.clear()
    return wrong


def indexers(part: int, of: int) -> int:
    """Losses of indexers, in tiles of two shapes, with one tile a program and several; gradients from one strip and from several."""
    indexer_pass.empty = kernel_inputs.empty = poisoned
    wrong, strip = 0, (indexer_pass.STRIP, indexer_pass.BLOCK)
    for n, (name, case) in list(enumerate(indexer_cases.CASES.items()))[part::of]:
        tile_config.forced["any"] = tile_config.Config(*((16, 32), (32, 16))[n % 2], 4, 1, tma=False)
        indexer_pass.STRIP, indexer_pass.BLOCK = (900, 32) if n % 3 else strip
        indexer_pass.PROGRAMS = 1 if n % 4 < 2 else 32
        torch.manual_seed(n)
        try:
            indexer_cases.judged(case, (torch.float32, torch.float16)[n // 2 % 2])
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [indexer, {name}]")
    return int(wrong > 0)


def heads_together(part: int, of: int) -> int:
    """Heads taken together, in tiles that are taller than wide and wider than tall."""
    head_rows_pass.empty = forward_pass.empty = kernel_inputs.empty = poisoned
    strips, wrong = (head_rows_pass.STRIP_NUMBERS, head_rows_pass.STRIP_ROWS), 0
    for n, name in list(enumerate(head_cases.CASES))[part::of]:
        tile_config.forced["any"] = tile_config.Config(*((16, 32), (32, 16))[n % 2], 4, 1, tma=False)
        try:
            dtype = (torch.float32, torch.float16)[n // 2 % 2]
            head_cases.judged(name, dtype)
            head_rows_pass.STRIP_NUMBERS, head_rows_pass.STRIP_ROWS = (1, 32) if n % 3 else strips
            if head_cases.with_gradients(name):
                head_cases.judged_gradients(name, dtype)
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [heads together, {name}]")
    return int(wrong > 0)


def tiles(part: int, of: int) -> int:
    """Tiles of the matrix; half of the maps take several passes over some of their rows."""
    tile_pool_pass.empty = poisoned
    tile_pool_pass.MERGED_ROWS = 16  # tiles have more rows, which are merged in several steps
    most, wrong = tile_pool_pass.MAX_STATE_BYTES, 0
    for n, name in list(enumerate(tile_pool_cases.CASES))[part::of]:
        tile_config.forced["any"] = tile_config.Config(*((16, 32), (32, 16))[n % 2], 4, 1, tma=False)
        tile_pool_pass.MAX_STATE_BYTES = most if n % 2 else 8 * 8 * 4 * 17
        try:
            tile_pool_cases.judged(name, (torch.float32, torch.float16)[n // 2 % 2])
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [tiles, {name}]")
    return int(wrong > 0)


def _wrong_near_sums() -> int:
    """What the pipelined profile, which no interpreter runs, leaves to others: bins near the diagonal, the row of the largest."""
    wrong = 0
    for t, d, causal in ((200, 16, True), (150, 24, False), (70, 16, False)):
        make = torch.Generator().manual_seed(t)
        q, k = (torch.randn(2, heads, t, d, generator=make) for heads in (4, 2))
        k = k if causal else q[:, ::2]  # rows that look at themselves most, which is no tie
        matrix = regard.weights(q, k, mask=regard.causal() if causal else None, engine="triton")
        p = kernel_inputs.KernelInputs(matrix._factors.problem())
        rows = matrix._ask(Request(("norm", "entropy", "max_score")))
        norm2 = p.norm2(rows["norm"].contiguous())
        bins = poisoned(2, 4, 3 + -(-t // profile_pass.NEAR_ROWS), 32, like=q, dtype=torch.float32)
        profile_pass.near_bins(p, norm2, bins, 3, 64)
        w = matrix.dense().double()
        away = (torch.arange(t)[:, None] - torch.arange(t)).abs()
        edges = (0, 1, 2, 4, 8, 16, 32, 64)
        for n in range(32):
            low, high = (edges[n], edges[n + 1]) if n < 7 else (0, 0)
            right = w.masked_fill((away < low) | (away >= high), 0).sum((-2, -1))
            if not torch.allclose(bins[:, :, 3:, n].double().sum(2), right, rtol=1e-5, atol=1e-5):
                wrong += 1
                print(f"bin {n} of {t} rows, causal {causal}: {bins[:, :, 3:, n].sum(2)}, must be {right}")
        tile_config.forced["any"] = tile_config.Config(32, 32, 4, 1, tma=False)
        over_keys = profile_pass._over_keys(p, norm2, tile_config.forced["any"])
        over_keys["chosen"] = profile_pass._chosen_keys(p, norm2, torch.zeros(1, t, dtype=torch.int64))
        right = profile_pass.head_sums(p, norm2, rows, over_keys, 1)["place"]
        over_keys["query"] = over_keys["query"] // 64 * 64
        place = profile_pass.head_sums(p, norm2, rows, over_keys, 64)["place"]
        if not torch.equal(place, right):
            wrong += 1
            print(f"largest of {t} rows, causal {causal}: {place}, must be {right}")
        tile_config.forced.clear()
    return wrong


def main(part: int, of: int) -> int:
    profile_pass.empty = comparison_pass.empty = backward_pass.empty = decode_pass.empty = topk_pass.empty = (
        short_pass.empty
    ) = forward_pass.empty = kernel_inputs.empty = poisoned
    intervals.CACHING_DEVICES = ("cpu",) if part % 2 else ()  # half of the masks as intervals, as they come on a GPU
    wrong = tables_that_are_wrong() if part == 0 else _wrong_near_sums() if part == 1 % of else 0
    for n, case in enumerate(kernel_cases.pairwise((torch.float32, torch.float16))[part::of]):
        # Tiles of two shapes, so that rows and keys cannot be mistaken for one another. The longest lengths still have
        # several tiles each way, the last ones partial; smaller tiles take twice as long.
        tiles = ((64, 32), (32, 64)) if max(case.lengths[:2]) > 100 else ((16, 32), (32, 32))
        tile_config.forced["any"] = tile_config.Config(*tiles[n % 2], 4, 1)
        try:
            kernel_cases.judged(case)
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [{case}]")
    wrong += _wrong_of_few_rows(part, of)
    wrong += _wrong_comparisons(part, of)
    wrong += _wrong_profiles(part, of)
    if part == 1:
        tile_config.forced["any"] = tile_config.Config(32, 32, 4, 1)
        wrong += kernel_cases.count_wrong_topk_of_long_rows((torch.float16,))
    if part == 4:
        tile_config.forced["any"] = tile_config.Config(32, 32, 4, 1)
        kernel_cases.judged_with_maps_of_full_tiles(torch.float16)
    if part == 3:
        tile_config.forced["any"] = tile_config.Config(16, 32, 4, 1)
        kernel_cases.judged_where_keys_are_equal(torch.float32)
        kernel_cases.judged_where_keys_are_equal(torch.float16)
        kernel_cases.judged_by_parts()
    if part == 2:
        tile_config.forced["any"] = tile_config.Config(16, 32, 4, 1)
        for wanted in (
            ("y", "lse", "entropy"),
            ("norm", "z", "received"),
        ):  # tangents one by one, and keys shared by heads
            kernel_cases.judged(
                kernel_cases.KernelCase(
                    "additive", "causal", wanted, torch.float32, (17, 40, "end"), (1, 4, 2, 24, 16), 30.0
                )
            )
        kernel_cases.judged_with_many_columns(torch.float32)
    if part == 0:
        kernel_cases.judged_where_all_scores_are_huge(torch.float32)
        kernel_cases.judged_where_all_scores_are_huge(torch.float16)
        kernel_cases.judged_where_numbers_are_nan(torch.float32)
        kernel_cases.judged_where_rows_are_nan(torch.float32)
    return int(wrong > 0)


if __name__ == "__main__":
    parts = {"heads": heads_together, "indexers": indexers, "tiles": tiles}
    sys.exit(parts.get("".join(sys.argv[3:]), main)(int(sys.argv[1]), int(sys.argv[2])))
