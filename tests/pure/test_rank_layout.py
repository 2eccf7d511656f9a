"""Which process sits where."""

import pytest

from megatron_hdp.rank_layout import Place, RankLayout, ranges


@pytest.mark.parametrize("stages_first", [False, True])
@pytest.mark.parametrize(("tensor", "stages", "pool"), [(1, 1, 1), (2, 1, 3), (1, 4, 2), (2, 3, 4), (4, 2, 1)])
def test_every_process_has_one_place(tensor, stages, pool, stages_first):
    layout = RankLayout(tensor_parallel=tensor, stages=stages, pool=pool, per_node=5, stages_first=stages_first)
    places = [layout.place(process) for process in range(layout.processes)]
    assert len({(p.tensor, p.pool, p.stage) for p in places}) == layout.processes == tensor * stages * pool
    for process, place in enumerate(places):
        assert layout.process(place.pool, place.stage, place.tensor) == process
        assert place.node == process // 5
        assert process in layout.column(place.pool)[place.stage]
        assert layout.members(place.stage, place.tensor)[place.pool] == process
    with pytest.raises(IndexError, match=f"process {layout.processes} of {layout.processes}"):
        layout.place(layout.processes)


def test_order_of_megatron():
    """Tensor ranks are neighbours, then pool ranks; stages are farthest apart, unless asked for otherwise."""
    layout = RankLayout(tensor_parallel=2, stages=2, pool=4, per_node=8)
    assert layout.column(1) == [[2, 3], [10, 11]]
    assert layout.members(1, 1) == [9, 11, 13, 15]
    assert layout.place(13) == Place(tensor=1, pool=2, stage=1, node=1)
    mapped = RankLayout(tensor_parallel=2, stages=2, pool=4, per_node=8, stages_first=True)
    assert mapped.column(1) == [[4, 5], [6, 7]]
    assert mapped.members(1, 1) == [3, 7, 11, 15]


def test_rows_for_people():
    rows = RankLayout(tensor_parallel=2, stages=2, pool=8, per_node=8, expert_group=4).rows(most=3)
    assert rows[2] == ("...", "5 further columns")
    assert dict(rows) == {
        "column 0": "stage 0: processes 0-1; stage 1: processes 16-17",
        "column 1": "stage 0: processes 2-3; stage 1: processes 18-19",
        "...": "1 further node",
        "column 7": "stage 0: processes 14-15; stage 1: processes 30-31",
        "a pool": "processes 0-14 step 2; 3 others, one for each tensor rank and stage",
        "expert groups": "pool ranks 0-3; 4-7",
        "node 0": "stage 0: pool ranks 0-3",
        "node 1": "stage 0: pool ranks 4-7",
        "node 2": "stage 1: pool ranks 0-3",
    }
    assert dict(RankLayout(tensor_parallel=1, stages=1, pool=3, per_node=2).rows()) == {
        "column 0": "process 0",
        "column 1": "process 1",
        "column 2": "process 2",
        "a pool": "processes 0-2",
        "node 0": "pool ranks 0-1",
        "node 1": "pool rank 2",
    }
    assert dict(RankLayout(tensor_parallel=1, stages=2, pool=1, per_node=2).rows()) == {
        "column 0": "stage 0: process 0; stage 1: process 1",
        "a pool": "process 0; 1 other, one for each tensor rank and stage",
        "node 0": "stage 0: pool rank 0; stage 1: pool rank 0",
    }
    assert len(RankLayout(tensor_parallel=8, stages=16, pool=1024, per_node=8, expert_group=8).rows()) < 16


@pytest.mark.parametrize(
    ("pool", "names"),
    [
        (1, ["column 0"]),
        (2, ["column 0", "column 1"]),
        (3, ["column 0", "column 1", "column 2"]),
        (4, ["column 0", "column 1", "1 further column", "column 3"]),
        (9, ["column 0", "column 1", "6 further columns", "column 8"]),
    ],
)
def test_columns_that_are_left_out_are_counted(pool, names):
    rows = RankLayout(tensor_parallel=2, stages=1, pool=pool, per_node=2 * pool).rows()
    columns = rows[: [name for name, _ in rows].index("a pool")]
    assert [finding if name == "..." else name for name, finding in columns] == names


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0], "0"), ([3, 4], "3-4"), ([0, 1, 2, 8], "0-2, 8"), ([0, 4, 8], "0-8 step 4"), ([1, 5], "1, 5"), ([], "")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text
