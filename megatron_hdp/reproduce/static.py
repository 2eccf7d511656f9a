"""The paper's baseline: packs dealt to the blocks of a static mesh in the order in which they come.

`simulator.strategies` has static packs dealt by their work, which is the best that a static mesh can do. The paper's
baseline packs at random (section 3.3) and does not look at work.
"""

import numpy as np

from megatron_hdp.planner import check
from megatron_hdp.planner.baselines.static import smallest_static_ring
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.units import Units, units_plan
from megatron_hdp.simulator import StepResult, simulate_step
from megatron_hdp.simulator.strategies import Setting
from megatron_hdp.types import IntArray, Plan


def packs(lengths: IntArray, setting: Setting) -> tuple[IntArray, int]:
    """Pack of every sequence [num_sequences], by best fit, and ranks of a block."""
    ring = smallest_static_ring(setting.ranks, setting.tokens_per_rank, setting.context)
    pieces = np.asarray(setting.cost.piece_tokens(lengths, ring), dtype=np.int64)
    return best_fit(pieces, setting.tokens_per_rank), ring


def plan_in_order(lengths: IntArray, setting: Setting) -> Plan:
    """Packs in the order of their first sequences, one to each block in turn; a checked plan with equal counts."""
    of, ring = packs(lengths, setting)
    number = int(of.max()) + 1
    first = np.full(number, lengths.size, dtype=np.int64)
    np.minimum.at(first, of, np.arange(lengths.size))
    turn = np.empty(number, dtype=np.int64)
    turn[np.argsort(first)] = np.arange(number)
    blocks = setting.ranks // ring
    units = Units(of, turn % blocks * ring, np.full(number, ring, dtype=np.int64), turn // blocks)
    made = units_plan(
        lengths,
        setting.ranks,
        setting.tokens_per_rank,
        setting.cost.pad_multiple,
        units,
        equal_counts=True,
        count_multiple=setting.layout.count_multiple,
    )
    check(made, stages=setting.stages, virtual_stages=setting.virtual_stages, expert_group=setting.expert_group)
    return made


def static_step(lengths: IntArray, setting: Setting) -> StepResult:
    """One simulated step; a pack's keys and values travel in one slice."""
    return simulate_step(plan_in_order(lengths, setting), setting.job(one_slice=True), timeline=False)
