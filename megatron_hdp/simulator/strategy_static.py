"""Strategies with a fixed mesh: the pool in equal blocks of the fewest ranks that hold the context, packs in blocks.

All deal packs out by their work and send a pack's keys and values together, see `megatron_hdp.cost.packed`. They differ
in the exchange: a ring, one gather (Llama 3), heads (Ulysses), or heads inside a ring (USP).
"""

import dataclasses

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.planner import check
from megatron_hdp.planner.baselines import packed_rank_ends, plan_static
from megatron_hdp.planner.baselines.static import smallest_static_ring
from megatron_hdp.planner.peers import GATHER, HEADS
from megatron_hdp.simulator.strategy_setting import Asked, Setting
from megatron_hdp.types import Plan


def static_ring(asked: Asked) -> Plan:
    """Keys and values of a pack walk round its block."""
    return _checked(_mesh(asked), asked.setting)


def static_gather(asked: Asked) -> Plan:
    """Each rank gets all keys and values of a pack at once."""
    return _checked(_exchanged(_mesh(asked), GATHER, 1), asked.setting)


def static_heads(asked: Asked) -> Plan:
    """All ranks of a block swap rows for heads. Raises PlanError where there are not as many heads."""
    setting, cost = asked.setting, asked.setting.cost
    ring = smallest_static_ring(setting.ranks, setting.tokens_per_rank, asked.longest)
    if ring > 1 and not cost.swaps_heads(ring):
        sizes = [ranks for ranks in range(1, (cost.heads or 1) + 1) if ranks == 1 or cost.swaps_heads(ranks)]
        most = sizes[-1]
        why = (
            f"{most} ranks at most can share them, which hold {most * setting.tokens_per_rank:,} tokens: shorten "
            "--context, raise --tokens-per-rank, or use less tensor parallelism"
            if most < ring
            else f"{', '.join(map(str, sizes))} ranks can share them: use --gpus or --tokens-per-rank that make a mesh "
            "of so many"
        )
        raise PlanError(
            f"a mesh of {ring} ranks holds {asked.longest:,} tokens, and attention cannot be cut over so many: a rank "
            f"has {cost.heads} heads, {cost.kv_heads} of keys and values, and {why}"
        )
    return _checked(_exchanged(_mesh(asked), HEADS, ring), setting)


def static_heads_ring(asked: Asked) -> Plan:
    """Groups of ranks swap rows for heads, the groups are a ring; of all sizes of a group the one with the least span.

    Raises PlanError where no two ranks can.
    """
    setting, cost, mesh = asked.setting, asked.setting.cost, _mesh(asked)
    ring = int(mesh.ring_size.max())
    sizes = [a for a in range(2, min(ring, cost.heads or 1) + 1) if ring % a == 0 and cost.swaps_heads(a)]
    if ring > 1 and not sizes:
        raise PlanError(
            f"no group of ranks can swap rows for heads: a rank has {cost.heads} heads, {cost.kv_heads} of keys and "
            f"values, the mesh {ring} ranks"
        )
    plans = [_exchanged(mesh, HEADS, a) for a in sizes or [1]]
    layout = (setting.stages, setting.virtual_stages, setting.expert_group)
    spans = [int(packed_rank_ends(plan, cost, *layout).max()) for plan in plans]
    return _checked(plans[int(np.argmin(spans))], setting)


def _mesh(asked: Asked) -> Plan:
    """The static plan with rings."""
    setting = asked.setting
    return plan_static(
        asked.lengths,
        setting.ranks,
        setting.tokens_per_rank,
        setting.cost.pad_multiple,
        cost=setting.cost,
        ring_size=smallest_static_ring(setting.ranks, setting.tokens_per_rank, asked.longest),
        count_multiple=setting.layout.count_multiple,
    )


def _exchanged(plan: Plan, exchange: int, head_ranks: int) -> Plan:
    """The plan with this exchange on all rings."""
    if int(plan.ring_size.max()) == 1:
        return plan
    ones = np.ones_like(plan.exchange)
    return dataclasses.replace(plan, exchange=exchange * ones, head_ranks=head_ranks * ones)


def _checked(plan: Plan, setting: Setting) -> Plan:
    check(
        plan,
        stages=setting.stages,
        virtual_stages=setting.virtual_stages,
        expert_group=setting.expert_group,
        cost=setting.cost,
    )
    return plan
