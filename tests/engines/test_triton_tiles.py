"""Tile configurations: one for every kernel and size, and who gets the kernels for Hopper."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import regard
from regard.engines import explain, triton
from regard.engines.triton import tile_config

#: Variants for sizes up to 64 or 128, which `forward_pass` and `topk_pass` choose by size.
VARIANTS = {
    "short": 64,
    "narrow": 64,
    "many_stats": 64,
    "shared_kv": 128,
    "one_tile": 64,
    "parts": tile_config.PART_SIZES[1],
}
#: What these Gluon kernels do not serve goes to kernels of other names.
GLUON_ALONE = {"backward", "row_pass"}
TABLES = (tile_config.HOPPER, tile_config.PAIRS, tile_config.GLUON, tile_config.FLOAT32)
KERNELS = {name for table in TABLES for name, _ in table} - GLUON_ALONE


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_size_has_a_configuration(kernel: str) -> None:
    own = {"compare": tile_config.PAIRS, "parts": tile_config.FLOAT32}
    table = next((table for name, table in own.items() if kernel.startswith(name)), tile_config.HOPPER)
    smallest = tile_config.PART_SIZES[0] + 8 if kernel == "parts" else 8
    for size in range(smallest, VARIANTS.get(kernel, 256) + 1, 8):
        assert tile_config._first(table, kernel, size) is not None, size


def test_smaller_sizes_come_first() -> None:
    """`_first` takes the first that holds a size."""
    for table in (tile_config.HOPPER, tile_config.FLOAT32, tile_config.PLAIN):
        for kernel in {name for name, _ in table}:
            sizes = [most for name, most in table if name == kernel]
            assert sizes == sorted(sizes), kernel


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(tile_config, "_capability", lambda device: 9)
    monkeypatch.setattr(triton, "unsupported_reason", lambda problem, request: None)
    tile_config._runs_gluon.cache_clear()
    yield
    tile_config._runs_gluon.cache_clear()


@pytest.mark.parametrize(
    ("version", "d", "forced", "serves"),
    [
        ("3.6.0", 64, (), True),
        ("3.8.0", 64, (), False),  # spills as compiled by this version
        ("3.8.0", 128, (), True),
        ("3.6.0", 64, ("dkdv",), False),  # a test or a benchmark asks for one of the two kernels
        ("3.6.0", 64, ("forward",), True),
        ("3.5.1", 128, (), False),
    ],
)
def test_one_kernel_for_all_gradients_where_it_serves(
    on_hopper, monkeypatch, version: str, d: int, forced: tuple[str, ...], serves: bool
) -> None:
    import triton as installed

    monkeypatch.setattr(installed, "__version__", version)
    for kernel in forced:
        monkeypatch.setitem(tile_config.forced, kernel, tile_config.HOPPER[kernel, d])
    problem = SimpleNamespace(
        d=d, product=True, fp32=False, q=torch.zeros(1), single_tma_loop=lambda config: config.gluon
    )
    for fits in (True, False):
        config = tile_config.gluon_config("backward", problem, d, lambda _, fits=fits: fits, ("dkdv", "dq"))
        assert (config is not None) == (serves and fits)


@pytest.mark.parametrize(("version", "serves"), [("3.6.0", True), ("3.9.1", True), ("3.10.0", False), ("3.5.1", False)])
def test_an_untested_triton_falls_back_with_one_line(
    on_hopper, monkeypatch, caplog, version: str, serves: bool
) -> None:
    import triton as installed

    monkeypatch.setattr(installed, "__version__", version)
    monkeypatch.setattr(explain, "triton_version", lambda: version)
    with caplog.at_level(logging.WARNING, "regard"):
        assert [tile_config._runs_gluon(torch.device("cpu")) for _ in range(2)] == [serves, serves]
    assert len(caplog.records) == (0 if serves else 1)
    explanation = regard.weights(torch.zeros(4, 4), engine="triton").explain()
    assert ("why not Hopper's kernels" in explanation) != serves
    if not serves:
        assert version in caplog.text
        assert "times as long" in caplog.text
        assert f"got {version}" in explanation
