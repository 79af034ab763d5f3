"""The networks by which the largest of a row are found: they sort whatever there is, and know which column is where."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", minversion="3.5", reason="the kernels need Triton 3.5")

from regard.engines.triton.kernels.topk_network import column_at, merging_pairs, sorting_pairs


def exchanged(numbers, pairs):
    numbers = list(numbers)
    for a, b in pairs:
        assert a < b
        numbers[a], numbers[b] = max(numbers[a], numbers[b]), min(numbers[a], numbers[b])
    return numbers


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_the_sorting_network_sorts_all_zeros_and_ones(n):
    """Then it sorts any numbers: the 0–1 principle of comparison networks."""
    for numbers in itertools.product((0, 1), repeat=n):
        assert exchanged(numbers, sorting_pairs(n)) == sorted(numbers, reverse=True)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_two_sorted_lists_become_the_largest_of_both(n):
    """Place by place against the other list backwards: what is left is bitonic, and has the n largest."""
    for ones, others in itertools.product(range(n + 1), repeat=2):
        a, b = ([1] * m + [0] * (n - m) for m in (ones, others))
        left = [max(x, y) for x, y in zip(a, reversed(b), strict=True)]
        assert exchanged(left, merging_pairs(n)) == [1] * min(ones + others, n) + [0] * max(n - ones - others, 0)


@pytest.mark.parametrize("count", [8, 16, 32])
def test_columns_that_are_split_keep_their_keys(count):
    """By halves of even and odd places, as the kernel splits a lane's columns 8 c + 2 l + p."""
    parts = [[8 * (place // 2) + place % 2 for place in range(count)]]
    while len(parts[0]) > 1:
        parts = [half for part in parts for half in (part[::2], part[1::2])]
    assert [key for (key,) in parts] == [column_at(n, count) for n in range(count)]
