"""Plan one step for the command line: by any algorithm, timed, checked and summed up."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner import PlanSummary, check, plan, summarize
from megatron_hdp.planner.baselines import packed_rank_ends, plan_static_smallest
from megatron_hdp.planner.entry import ALGORITHMS as PLANNERS
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.planner.host import host_peaks
from megatron_hdp.planner.summary import PICOSECOND
from megatron_hdp.types import IntArray, Plan

MEGATRON = "megatron"
"""Megatron-LM's own scheduler; who calls this module brings its planner, because only seams know Megatron."""
ALGORITHMS = (*(name for name in PLANNERS if name != "bytescale-pp"), MEGATRON)
"""Names of --algorithm; "bytescale" is "bytescale-pp" with pipeline stages."""
ONE_SLICE = ("static", "static-smallest", MEGATRON)
"""Systems that send the keys and values of a whole pack in one slice; see `megatron_hdp.planner.baselines.packed`."""

Planner = Callable[[IntArray], Plan]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan depends on besides lengths."""

    num_ranks: int
    tokens_per_rank: int
    cost: CostModel
    algorithm: str = "hdp"
    balance: str = "dp"
    stages: int = 1
    virtual_stages: int = 1
    expert_group: int = 1
    offload: bool = False
    host_bytes: int | None = None
    exchange: str = "auto"
    """As for `megatron_hdp.planner.plan`."""
    longest: int | None = None
    """Tokens of the longest sequence that may come in the run, for "static-smallest"; None: of each batch."""

    @property
    def layout(self) -> dict[str, Any]:
        """What the model is cut into, as keywords."""
        return {"stages": self.stages, "virtual_stages": self.virtual_stages, "expert_group": self.expert_group}


@dataclass(frozen=True)
class PlannedStep:
    """What is kept of the plan of one step."""

    summary: PlanSummary
    one_slice_seconds: float | None
    """Span if packs send their keys and values in one slice; None for algorithms that do not."""
    offloaded: int
    """Sequences of which activations leave for host memory."""
    host_bytes: int
    """Most that one process has there at a time."""
    tokens_by_ring: dict[int, int]
    """Ring size -> real tokens of the sequences with such rings."""
    digest: bytes
    seconds: float
    """Time of making and checking the plan, on this machine."""
    plan: Plan | None
    """Where it was asked for."""

    @property
    def hops(self) -> float:
        """Other ranks that need a token's keys and values, mean over real tokens: ring size - 1."""
        return sum((size - 1) * tokens for size, tokens in self.tokens_by_ring.items()) / self.summary.tokens


def plan_step(
    lengths: IntArray, options: PlanOptions, planner: Planner | None = None, *, keep: bool = False
) -> PlannedStep:
    """Plan one step of sequences, int64 [num_sequences].

    Args:
        lengths: tokens of every sequence.
        options: see `PlanOptions`.
        planner: makes the plan; that of ``options.algorithm`` when None.
        keep: keep the plan in the result.

    Raises:
        ConfigError: the options cannot work.
        PlanError: the batch cannot be planned with these options.
    """
    planner = planner_of(options) if planner is None else planner
    layout = options.layout
    start = time.perf_counter()
    made = planner(lengths)
    seconds = time.perf_counter() - start
    summary = summarize(made, options.cost, **layout)
    one_slice = None
    if options.algorithm in ONE_SLICE:
        one_slice = PICOSECOND * int(packed_rank_ends(made, options.cost, **layout).max())
    by_ring = {size: int(made.lengths[made.ring_size == size].sum()) for size in summary.ring_sizes}
    host = int(host_peaks(made, options.cost, options.stages, options.virtual_stages).max())
    return PlannedStep(
        summary,
        one_slice,
        int((made.offload > 0).sum()),
        host,
        by_ring,
        made.digest(),
        seconds,
        made if keep else None,
    )


def planner_of(options: PlanOptions) -> Planner:
    """Lengths -> checked plan, by any algorithm but `MEGATRON`."""
    name = options.algorithm
    if name == "static-smallest":
        return lambda lengths: _plan_static_smallest(lengths, options)
    if name == "bytescale" and options.stages > 1:
        name = "bytescale-pp"
    return lambda lengths: plan(
        lengths,
        options.num_ranks,
        options.tokens_per_rank,
        algorithm=name,
        balance=options.balance,
        pad_multiple=options.cost.pad_multiple,
        stages=options.stages,
        virtual_stages=options.virtual_stages,
        expert_group=options.expert_group,
        cost=options.cost,
        offload=options.offload,
        host_bytes=options.host_bytes,
        exchange=options.exchange,
    )


def _plan_static_smallest(lengths: IntArray, options: PlanOptions) -> Plan:
    """`plan` does not know what else may come in the run, and a static mesh must hold that too."""
    made = plan_static_smallest(
        lengths,
        options.num_ranks,
        options.tokens_per_rank,
        options.cost.pad_multiple,
        cost=options.cost,
        count_multiple=options.stages if options.virtual_stages > 1 else 1,
        longest=options.longest,
    )
    made = forced_exchange(made, options)
    check(made, **options.layout)
    return made


def forced_exchange(made: Plan, options: PlanOptions) -> Plan:
    """The plan of a system that knows rings only, with another exchange where the options force one."""
    return made if options.exchange == "auto" else choose_exchanges(made, options.cost, options.exchange)


def check_fits(longest: int, context: int, options: PlanOptions) -> None:
    """Raise `ConfigError` unless the pool can hold the longest sequence that may come, as training does at its start.

    ``longest``: tokens of the longest document, before it is cut at the context.
    """
    if options.num_ranks < 1:
        raise ConfigError(f"--ranks is {options.num_ranks}: the pool must have at least 1")
    held, pad = options.num_ranks * options.tokens_per_rank, options.cost.pad_multiple
    capacity = options.tokens_per_rank
    if capacity % pad:
        good = " or ".join(str(value) for value in (capacity // pad * pad, (capacity // pad + 1) * pad) if value)
        raise ConfigError(
            f"--tokens-per-rank is {capacity}: pieces are multiples of {pad} tokens (--pad-multiple), so use {good}"
        )
    sequence = min(longest, context)
    if sequence > held:
        raise ConfigError(
            f"the longest sequence has {sequence:,} tokens, a pool of {options.num_ranks} ranks with "
            f"{options.tokens_per_rank:,} tokens each holds {held:,}: set --ranks to at least "
            f"{-(-sequence // options.tokens_per_rank)}, --tokens-per-rank to at least "
            f"{-(-sequence // (pad * options.num_ranks)) * pad:,}, or --context to at most {held:,}"
        )
    if sequence > options.cost.max_length:
        raise PlanError(
            f"the longest sequence has {sequence:,} tokens, costs of this profile with "
            f"{options.cost.layers_per_stage} layers a stage are counted up to {options.cost.max_length:,}: lower "
            "--context or --layers-per-stage"
        )
