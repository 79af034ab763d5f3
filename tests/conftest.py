"""What every test shares: a seed of its own, and ways to make the engines work in tiles smaller than a matrix."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from regard.core.rows import strips as core_strips
from regard.engines import blockwise, numba, replay
from support.opened_page import it, show  # noqa: F401

# Property tests draw the same examples on every machine; time limits would make them flicker on a busy one.
settings.register_profile("regard", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("regard")

# Tests run side by side, one process per core, on matrices too small to split; `test_inputs` uses two threads itself.
# `make test-everywhere` sets another number of threads.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long come first: at the end one of two processes would wait for the other's."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.fixture(autouse=True)
def _own_seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _own_tapes() -> None:
    """Nothing is replayed that another test recorded, perhaps with other tiles."""
    replay.TAPES.clear()


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Make `blockwise` and its compiled tiles walk in tiles of this height and width, so that small matrices have many."""

    def cut(height: int, width: int) -> None:
        for walk in (blockwise, numba):
            monkeypatch.setattr(walk, "_tile_size", lambda problem: (height, width))

    return cut


@pytest.fixture(params=["reference", "blockwise", "blockwise in tiles of 3 by 4"])
def engine(request: pytest.FixtureRequest, tiles: Callable[[int, int], None]) -> str:
    """Every engine; the blockwise one also where no tile divides the matrix."""
    name, _, cut = request.param.partition(" in tiles of ")
    if cut:
        tiles(3, 4)
    return name


CHROMIUM = os.environ.get("REGARD_CHROMIUM") or "/usr/bin/chromium"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of a process: its driver runs once at a time."""
    why = None if shutil.which(CHROMIUM) else f"no Chromium at {CHROMIUM}; set REGARD_CHROMIUM to where it is"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        why = "playwright is not installed"
    if why:
        # Where everything is checked, a check that does not run is a failure.
        (pytest.fail if os.environ.get("CI") or os.environ.get("REGARD_CI") else pytest.skip)(why)
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(params=["one strip", "strips of a row"])
def strips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks over complete rows in one strip, and in strips of one row of one head."""
    if request.param == "strips of a row":
        monkeypatch.setattr(core_strips, "STRIP_NUMBERS", 1)


@pytest.fixture(params=["reference", "one strip", "strips of a row"])
def row_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to compute questions about complete rows; the name of the engine."""
    if request.param == "strips of a row":
        monkeypatch.setattr(core_strips, "STRIP_NUMBERS", 1)
    return "reference" if request.param == "reference" else "auto"
