"""Tile configurations: one for every kernel and size."""

from __future__ import annotations

import pytest

from regard.engines.triton import tile_config

#: Variants for sizes up to 64 or 128, which `forward_pass` and `topk_pass` choose by size.
VARIANTS = {"short": 64, "narrow": 64, "many_stats": 64, "shared_kv": 128, "one_tile": 64}
KERNELS = {name for table in (tile_config.HOPPER, tile_config.GLUON, tile_config.FLOAT32) for name, _ in table}


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_size_has_a_configuration(kernel: str) -> None:
    for size in range(8, VARIANTS.get(kernel, 256) + 1, 8):
        assert tile_config._first(tile_config.HOPPER, kernel, size) is not None, size


def test_smaller_sizes_come_first() -> None:
    """`_first` takes the first that holds a size."""
    for table in (tile_config.HOPPER, tile_config.FLOAT32, tile_config.PLAIN):
        for kernel in {name for name, _ in table}:
            sizes = [most for name, most in table if name == kernel]
            assert sizes == sorted(sizes), kernel
