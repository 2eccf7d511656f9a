"""Random batches, layouts, costs and options: no invariant broken, no crash, no span below the bound."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_twins import assert_invariants

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.planner import plan
from megatron_hdp.planner.baselines import BASELINES
from megatron_hdp.planner.bound import lower_bound
from megatron_hdp.planner.check import check, peers
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.types import EXCHANGES, Plan

CASES = int(os.environ.get("HDP_RANDOM_CASES", "20000"))
PROFILES = [load_profile("bytescale"), load_profile("h100")]
PROFILES += [  # a large vocabulary, and copies that share PCIe with the NIC
    replace(
        PROFILES[1],
        d2h_bandwidth_shared=5e9,
        h2d_bandwidth_shared=4e9,
        layers={"llama-7b": replace(PROFILES[1].layer(), loss_per_token=2e-6, embedding_per_token=3e-7)},
    )
]


@st.composite
def requests(draw: st.DrawFn) -> dict:
    """Arguments of `plan`: 1 to 100 ranks, odd sizes, pipelines, experts, offload, windows, two clusters."""
    num_ranks = draw(st.integers(1, 100))
    pad = draw(st.sampled_from([2, 2, 2, 4, 6, 16]))
    capacity = pad * draw(st.integers(1, 600))
    stages = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8]))
    divisors = [g for g in range(1, num_ranks + 1) if num_ranks % g == 0]
    expert_group = draw(st.sampled_from([1, 1, 1, *divisors]))
    most = num_ranks * capacity
    multiple = st.builds(lambda d, e: max(1, d * capacity + e), st.integers(1, num_ranks), st.integers(-1, 0))
    short = st.integers(1, min(most, 2 * capacity))
    length = st.one_of(st.integers(1, most), short, short, multiple)
    virtual_stages = draw(st.integers(1, 3)) if stages > 1 else 1
    cost = CostModel(
        draw(st.sampled_from(PROFILES)),
        layers_per_stage=draw(st.integers(virtual_stages, 8)),
        window=draw(st.one_of(st.none(), st.none(), st.integers(1, 3000))),
        recompute=draw(st.sampled_from(["none", "full"])),
        pad_multiple=pad,
        **draw(st.sampled_from([{}, {"heads": 8, "kv_heads": 2}, {"heads": 12, "kv_heads": 12}])),
    )
    forced = ["auto", "auto", "ring", *(["gather", "heads"] if cost.heads else [])]
    return {
        "lengths": draw(st.lists(length, min_size=1, max_size=60)),
        "num_ranks": num_ranks,
        "tokens_per_rank": capacity,
        "balance": "pp" if stages > 1 or expert_group > 1 else draw(st.sampled_from(["dp", "dp", "pp"])),
        "pad_multiple": pad,
        "stages": stages,
        "virtual_stages": virtual_stages,
        "expert_group": expert_group,
        "cost": cost,
        "offload": draw(st.sampled_from([False, False, True])),
        "host_bytes": draw(st.sampled_from([None, None, 1 << 20, 1 << 30])),
        "exchange": draw(st.sampled_from(forced)),
    }


def judge(request: dict) -> None:
    result = plan(**request)
    layout = {name: request[name] for name in ("stages", "virtual_stages")}
    assert result.lengths.tolist() == request["lengths"]
    check(
        result,
        **layout,
        expert_group=request["expert_group"],
        cost=request["cost"],
        host_bytes=request["host_bytes"],
    )
    if not request["offload"]:
        assert_invariants(result)
        assert not result.offload.any()
    judge_exchanges(request, result)
    forced = request["exchange"] in ("gather", "heads")
    bound = lower_bound(
        result.lengths,
        result.num_ranks,
        result.capacity,
        request["cost"],
        offload=result.offload if request["offload"] else None,
        free="all" if forced else None,
        **layout,
    )
    ends = rank_ends(result, request["cost"], **layout, expert_group=request["expert_group"])
    assert int(ends.max()) >= bound.picoseconds
    counts = result.microbatch_counts
    assert counts.min() >= 1
    assert not np.ptp(counts.reshape(-1, request["expert_group"]), axis=1).any()
    if request["virtual_stages"] > 1:
        assert not (counts % request["stages"]).any()


def judge_exchanges(request: dict, result: Plan) -> None:
    """What is chosen stays inside nodes, lengthens no micro-batch, and leaves everything else of the plan alone."""
    cost, exchange = request["cost"], request["exchange"]
    rings = replace(result, exchange=0 * result.exchange, head_ranks=0 * result.head_ranks + 1)
    if exchange == "auto":
        others = result.exchange > 0
        assert not np.any(cost.tier(result.ring_start, result.ring_size)[others])
        assert not others.any() or (cost.heads is not None and cost.window is None)
        assert choose_exchanges(rings, cost) == result
        for chosen, ring in zip(microbatch_picoseconds(result, cost), microbatch_picoseconds(rings, cost)):
            assert np.all(chosen <= ring)
        assert peers(result).max() <= max(4, cost.ranks_per_node + 3)
    elif exchange == "heads":
        assert np.all((result.exchange == 2) == (result.head_ranks > 1))
    else:
        assert np.all(result.exchange == np.where(result.ring_size > 1, EXCHANGES.index(exchange), 0))
    assert exchange != "ring" or peers(result).max() <= 4


@settings(max_examples=150, deadline=None)
@given(requests())
def test_random_plans(request_):
    judge(request_)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_many_random_plans(request_):
    judge(request_)


@settings(max_examples=60, deadline=None)
@given(requests(), st.sampled_from(sorted(BASELINES)))
def test_random_plans_of_baselines(request_, algorithm):
    result = plan(**{**request_, "algorithm": algorithm, "offload": False, "stages": 1, "virtual_stages": 1,
                     "expert_group": 1, "balance": "dp"})  # fmt: skip
    assert_invariants(result)
