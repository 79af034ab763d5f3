"""One pool of processes for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(5)
    yield pool
    if pool.workers:
        pool.stop()
