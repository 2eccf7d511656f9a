"""Our numbering of processes is that of Megatron's own groups."""

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_hdp.rank_layout import RankLayout

ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


def members(layout, kind):
    """Processes by what they do not share."""
    groups = {}
    for process in range(layout.processes):
        place = layout.place(process)
        name = {
            "tp": (place.pool, place.stage),
            "dp": (place.tensor, place.stage),
            "pp": (place.tensor, place.pool),
            "tp-pp": (place.pool,),
        }[kind]
        groups.setdefault(name, []).append(process)
    return sorted(groups.values())


@pytest.mark.parametrize("stages_first", ORDERS)
@pytest.mark.parametrize(("tensor", "stages", "pool"), [(1, 1, 3), (2, 1, 3), (1, 4, 2), (2, 3, 4), (4, 2, 1)])
def test_groups(tensor, stages, pool, stages_first):
    layout = RankLayout(tensor_parallel=tensor, stages=stages, pool=pool, per_node=8, stages_first=stages_first)
    theirs = RankGenerator(tp=tensor, ep=1, dp=pool, pp=stages, cp=1, order=ORDERS[stages_first])
    for kind in ("tp", "dp", "pp", "tp-pp"):
        assert sorted(sorted(group) for group in theirs.get_ranks(kind)) == members(layout, kind)


@pytest.mark.parametrize(("tensor", "expert_tensor", "experts", "group"), [(2, 2, 4, 4), (2, 1, 4, 2), (1, 1, 2, 2)])
def test_expert_groups_are_consecutive_pool_ranks(tensor, expert_tensor, experts, group):
    stages, pool = 2, 8
    layout = RankLayout(tensor_parallel=tensor, stages=stages, pool=pool, per_node=8, expert_group=group)
    rest = tensor * pool // (expert_tensor * experts)
    theirs = RankGenerator(tp=expert_tensor, ep=experts, dp=rest, pp=stages, cp=1, order=ORDERS[False])
    found = sorted(sorted({layout.place(process).pool for process in ranks}) for ranks in theirs.get_ranks("tp-ep"))
    ours = [list(range(begin, begin + group)) for begin in range(0, pool, group)]
    assert found == sorted(ours * stages)
