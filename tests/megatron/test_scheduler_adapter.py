"""Megatron's own scheduler runs as installed, and its answers become plans; its failures are named as its own."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError, SeamError
from megatron_hdp.planner.check import check
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.seams.scheduler import _rounded, plan_megatron
from megatron_hdp.types import chunk_tokens

STRADDLING = (
    "168376 124081 115818 88799 43497 41611 38659 36731 30491 24453 21823 19307 18400 17148 16600 14709 14277 12505 "
    "12410 11345 7035 935 262"
)
COST = CostModel(load_profile("bytescale"), 32)

CHECKOUT = """
class DefaultDynamicCPScheduler:
    def __init__(self, max_seqlen_per_dp_cp_rank, cp_size, dp_size, microbatch_group_size_per_vp_stage):
        self.ranks = cp_size * dp_size
        self.group = microbatch_group_size_per_vp_stage

    def get_groups_and_subsamples(self, sample_id_seqlens):
        print("noise on standard output")
        assert len(sample_id_seqlens) < 5, "no tail microbatch has enough ids to split"
        return [[[sample]] * self.ranks for sample, _ in sample_id_seqlens] * (1 if self.group is None else 0)
"""


@pytest.fixture
def checkout(tmp_path):
    """A tree with the place, the name and the arguments of the dev branch's scheduler, and a plan easy to foretell."""
    folder = tmp_path / "megatron" / "core" / "datasets"
    folder.mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "data_schedule.py").write_text(CHECKOUT)
    return tmp_path


def test_a_batch_that_is_easy_to_foretell():
    """The longest on two ranks, and each of the others on a rank; nothing is packed."""
    result = plan_megatron(np.array([64, 128, 60]), 4, 64, 2)
    assert [[[p.sequence for p in mb.pieces] for mb in rank] for rank in result] == [[[1]], [[1]], [[0]], [[2]]]
    result = plan_megatron(np.array([10, 10, 10, 10]), 2, 64, 2)
    assert result.microbatch_counts.tolist() == [2, 2]  # four micro-batches where one pack would do


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
@pytest.mark.parametrize("pad", [2, 8])
def test_random_batches_keep_every_sequence(num_ranks, pad):
    random = np.random.default_rng(num_ranks)
    for _ in range(5):
        lengths = np.minimum(random.lognormal(7.5, 1.6, 150).astype(np.int64) + 1, num_ranks * 8192)
        result = plan_megatron(lengths, num_ranks, 8192, pad)
        check(result)
        assert result.lengths.tolist() == lengths.tolist()
        assert set(result.ring_size.tolist()) <= {1 << k for k in range(6)}
        assert rank_ends(result, COST).max() > 0


def test_rounded_lengths_cut_evenly_and_need_no_larger_ring():
    lengths = np.random.default_rng(0).integers(1, 16 * 8192 + 1, 500)
    lengths[:4] = [16 * 8192, 8 * 8192, 8192, 1]
    rounded = _rounded(lengths, 8192, 2)
    power = 1 << np.ceil(np.log2(np.maximum(lengths / 8192, 1))).astype(np.int64)
    assert np.all((rounded >= lengths) & (rounded < lengths + 16 * power) & (rounded <= power * 8192))
    for wider in (1, 2, 4, 8):
        assert np.all(2 * chunk_tokens(lengths, wider * power, 2) <= rounded // (wider * power))
        assert np.all(rounded % (2 * wider * power) == 0)


def test_a_ring_without_a_communicator_is_the_rivals_failure():
    lengths = np.array([int(length) for length in STRADDLING.split()])
    with pytest.raises(PlanError, match=r"BalancedCPScheduler.*ranks 40 to 55, for which it has no communicator"):
        plan_megatron(lengths, 64, 8192, 2)
    check(plan_megatron(lengths, 64, 8192, 2, any_ring=True))


@pytest.mark.parametrize(
    ("num_ranks", "lengths"),
    [(6, [16033, 19069, 518]), (12, [10412, 7501]), (12, [9 * 8192, 100]), (2, [3 * 8192])],
)
def test_what_it_cannot_plan_is_the_rivals_failure(num_ranks, lengths):
    with pytest.raises(PlanError, match="Megatron-LM's BalancedCPScheduler"):
        plan_megatron(np.array(lengths), num_ranks, 8192, 2)


def test_pipelines_are_refused():
    for options in ({"equal_counts": True}, {"count_multiple": 2}):
        with pytest.raises(ConfigError, match="without pipeline stages"):
            plan_megatron(np.array([5]), 2, 64, 2, **options)


def test_a_checkout_answers_from_a_process_of_its_own(checkout):
    result = plan_megatron(np.array([100, 64, 3]), 4, 64, 2, checkout=checkout)
    assert result.ring_size.tolist() == [4, 4, 4]
    assert result.microbatch_counts.tolist() == [3] * 4
    with pytest.raises(PlanError, match=r"DefaultDynamicCPScheduler.*AssertionError: no tail microbatch"):
        plan_megatron(np.array([3] * 5), 4, 64, 2, checkout=checkout)
    with pytest.raises(PlanError, match="lacks sequence 0"):  # the stand-in answers nothing for interleaved schedules
        plan_megatron(np.array([3]), 4, 64, 2, checkout=checkout, count_multiple=2)


def test_a_folder_that_is_no_checkout_is_refused(checkout, tmp_path_factory):
    with pytest.raises(SeamError, match="no folder megatron/core"):
        plan_megatron(np.array([3]), 4, 64, 2, checkout=tmp_path_factory.mktemp("empty"))
    (checkout / "megatron" / "core" / "datasets" / "data_schedule.py").write_text("")
    with pytest.raises(SeamError, match="no DefaultDynamicCPScheduler"):
        plan_megatron(np.array([3]), 4, 64, 2, checkout=checkout)


@pytest.mark.skipif("MEGATRON_LM_DEV" not in os.environ, reason="set MEGATRON_LM_DEV to a checkout of the dev branch")
def test_the_dev_branch():
    checkout = Path(os.environ["MEGATRON_LM_DEV"])
    lengths = np.array([20000, 5000, 3000, 3000, 100])
    result = plan_megatron(lengths, 8, 8192, 2, checkout=checkout)
    check(result, stages=2)
    assert result.ring_size[0] == 4
    random = np.random.default_rng(0).lognormal(7.5, 1.6, 300).astype(np.int64) + 1
    result = plan_megatron(np.minimum(random, 16 * 8192), 16, 8192, 2, checkout=checkout)
    check(result, stages=2)
    with pytest.raises(PlanError, match="requires CP size 16"):
        plan_megatron(np.array([9 * 8192]), 12, 8192, 2, checkout=checkout)
