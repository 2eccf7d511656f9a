"""What ranks say of the one that stopped first."""

import pytest

from megatron_hdp.liveness import News


@pytest.mark.parametrize(
    ("step", "when"), [(None, ""), (-1, " before the first step"), (0, " during step 0"), (7, " during step 7")]
)
def test_when(step, when):
    failed = News(2, "node1", 4711, step, "DataError: no documents")
    assert failed.sentence(0) == (
        f"megatron_hdp: rank 2 (host node1, pid 4711) failed{when}: DataError: no documents; rank 0 ends now\n"
    )
    gone = News(2, "node1", 4711, step, "")
    assert f"stopped without saying goodbye{when}; rank 0 ends now" in gone.sentence(0)
    assert f"lost the connection to rank 2{when}; rank 2 ends now" in gone.sentence(2)
