"""One Ray cluster for all tests of this folder that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scale.cluster import small_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """All of them run in one process of pytest-xdist (``tests/balance.py``)."""
    with small_cluster():
        yield
