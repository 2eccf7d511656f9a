"""Ways to train on the same batch, run through the same simulation: ours, published ones, and what people use today.

Each gets what its system gives it and, where a text leaves something open, what is best for it; `Strategy.notes` says
what. All share the layer's costs, the cluster, and the reduction of gradients.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.plan_step import MEGATRON, PlanOptions
from megatron_hdp.planner import plan
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.result import StepResult
from megatron_hdp.simulator.simulate import simulate_step
from megatron_hdp.simulator.strategy_blocks import plan_blocks, simulate_blocks
from megatron_hdp.simulator.strategy_setting import Asked, MegatronPlanner, Setting
from megatron_hdp.simulator.strategy_static import static_gather, static_heads, static_heads_ring, static_ring
from megatron_hdp.types import IntArray, Plan

__all__ = ["STRATEGIES", "Asked", "MegatronPlanner", "Setting", "Strategy", "StrategyStep", "run_strategy"]


@dataclass(frozen=True)
class Strategy:
    """One way to train."""

    words: str
    """For people, short."""
    notes: str
    """Where it comes from, and what was chosen for it."""
    plan: Callable[[Asked], Plan]
    """Makes a checked plan.

    Raises:
        ConfigError, PlanError: it cannot run this batch in this setting.
    """
    one_slice: bool = False
    """A pack's keys and values travel in one slice."""
    of: Callable[[Plan], str] = lambda _: ""
    """What is added to `words` of a plan."""
    simulate: Callable[[Plan, Asked, Job, bool], StepResult] = lambda *arguments: _simulate(*arguments)
    """The step of its plan; the last argument asks for a timeline."""
    estimate: bool = False
    """No plan, but what would be the best for it; never to be quoted as a measurement of that system."""


@dataclass(frozen=True)
class StrategyStep:
    """One step by one strategy."""

    plan: Plan
    result: StepResult
    plan_seconds: float
    """Making and checking the plan, on this machine; not a part of the step, which would differ from run to run."""
    words: str
    """For people: `Strategy.words`, with the size of a static ring."""


def run_strategy(
    name: str,
    lengths: IntArray,
    setting: Setting,
    *,
    timeline: bool = False,
    longest: int | None = None,
    megatron: MegatronPlanner | None = None,
) -> StrategyStep:
    """Plan and simulate one step.

    Args:
        name: one of `STRATEGIES`.
        lengths: tokens of every sequence, int64 [num_sequences].
        setting: the run.
        timeline: keep the bars of all lanes.
        longest: tokens of the longest sequence of the run; the setting's context when None.
        megatron: for "megatron".

    Raises:
        ConfigError: no such strategy, or it cannot work in this setting.
        PlanError: it cannot run this batch.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy {name!r} is not known: choose one of {', '.join(STRATEGIES)}")
    strategy = STRATEGIES[name]
    asked = Asked(lengths, setting, setting.context if longest is None else longest, megatron)
    start = time.perf_counter()
    made = strategy.plan(asked)
    seconds = time.perf_counter() - start
    job = setting.job(one_slice=strategy.one_slice)
    return StrategyStep(
        made, strategy.simulate(made, asked, job, timeline), seconds, strategy.words + strategy.of(made)
    )


def _simulate(made: Plan, asked: Asked, job: Job, timeline: bool) -> StepResult:
    return simulate_step(made, job, timeline=timeline)


def _planned(asked: Asked, algorithm: str, exchange: str = "auto") -> Plan:
    """By `megatron_hdp.planner.plan`."""
    setting, layout = asked.setting, asked.setting.layout
    return plan(
        asked.lengths,
        setting.ranks,
        setting.tokens_per_rank,
        algorithm=algorithm,
        pad_multiple=setting.cost.pad_multiple,
        stages=layout.stages,
        virtual_stages=layout.virtual_stages,
        expert_group=layout.expert_group,
        cost=setting.cost,
        offload=setting.offload,
        host_bytes=setting.host_bytes,
        exchange=exchange,
    )


def _hdp(asked: Asked) -> Plan:
    return _planned(asked, "hdp")


def _naive(asked: Asked) -> Plan:
    return _planned(asked, "naive")


def _bytescale(asked: Asked) -> Plan:
    return _planned(asked, "bytescale-pp" if asked.setting.stages > 1 else "bytescale")


def _pow2(asked: Asked) -> Plan:
    return _planned(asked, "pow2")


def _megatron(asked: Asked) -> Plan:
    setting = asked.setting
    if asked.megatron is None:
        raise PlanError("Megatron-LM's own scheduler: no megatron-core at hand to ask")
    options = PlanOptions(
        num_ranks=setting.ranks,
        tokens_per_rank=setting.tokens_per_rank,
        cost=setting.cost,
        algorithm=MEGATRON,
        balance=setting.layout.balance("auto"),
        stages=setting.stages,
        virtual_stages=setting.virtual_stages,
        expert_group=setting.expert_group,
    )
    return asked.megatron(options, None)(asked.lengths)


def _ring(made: Plan) -> str:
    return f", ring of {int(made.ring_size.max()):,}"


def _mesh(made: Plan) -> str:
    return f", {int(made.ring_size.max()):,} ranks"


def _heads_ring(made: Plan) -> str:
    heads, ring = int(made.head_ranks.max()), int(made.ring_size.max())
    return f", {heads} x {ring // heads:,} ranks"


STRATEGIES: dict[str, Strategy] = {
    "hdp": Strategy("HDP, this package", "docs/planner.md", _hdp),
    "bytescale": Strategy(
        "ByteScale, balanced",
        "Algorithm 2 (SIGCOMM 2025), DP-Balance, or PP-Balance with pipeline stages; what the paper leaves open was "
        "tuned in its favour, see megatron_hdp/planner/baselines/bytescale.py",
        _bytescale,
    ),
    "naive": Strategy("ByteScale, naive", "Algorithm 1 (SIGCOMM 2025): the fewest ranks, dealt out in order", _naive),
    "pow2": Strategy(
        "dynamic CP, powers of two",
        "the idea of Megatron-LM's dynamic context parallelism with this package's cost model, the widths of the "
        "longest rings searched",
        _pow2,
    ),
    "megatron": Strategy(
        "Megatron-LM's scheduler",
        "the one that is installed (--hybrid-context-parallel), without its barriers between rounds and without its "
        "padding to multiples of twice the pool; pipelines it cannot",
        _megatron,
        one_slice=True,
    ),
    "static": Strategy(
        "static CP",
        "a fixed mesh of the fewest ranks that hold the context; packs by best fit, dealt to blocks by work; one slice "
        "per ring step",
        static_ring,
        one_slice=True,
        of=_ring,
    ),
    "all-gather": Strategy(
        "all-gather CP",
        "Llama 3's: the mesh of static CP, keys and values of a pack gathered at once beside a rank's own blocks, "
        "their gradients scattered at once; memory for what is gathered is not counted",
        static_gather,
        one_slice=True,
        of=_mesh,
    ),
    "ulysses": Strategy(
        "Ulysses",
        "DeepSpeed's: the mesh of static CP, all its ranks swap rows for heads, inside a node where they fit into one",
        static_heads,
        one_slice=True,
        of=_mesh,
    ),
    "heads-ring": Strategy(
        "heads x ring",
        "USP: the mesh of static CP; groups of ranks, inside a node where they fit, swap rows for heads and are a "
        "ring; of all sizes of a group the best",
        static_heads_ring,
        one_slice=True,
        of=_heads_ring,
    ),
    "blocks": Strategy(
        "blocks (estimate)",
        "FCP, block-level placement: not a plan, but the best that it could do, see "
        "megatron_hdp/simulator/strategy_blocks.py",
        plan_blocks,
        simulate=simulate_blocks,
        estimate=True,
    ),
}
"""Name -> strategy, in the order in which people read them."""
