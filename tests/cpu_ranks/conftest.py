"""One pool of eight processes for all tests of this folder."""

from collections.abc import Iterator

import pytest
from pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Eight gloo processes; cases that need fewer run on the first n of them."""
    with RankPool(8) as pool:
        yield pool
