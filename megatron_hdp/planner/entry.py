"""The planner's front door: refuse what cannot work with numbers and a remedy, plan, check."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner.baselines import BASELINES
from megatron_hdp.planner.check import check
from megatron_hdp.planner.columns import Layout
from megatron_hdp.planner.exchange import choose_exchanges, require_choice
from megatron_hdp.planner.hdp import plan_hdp
from megatron_hdp.planner.host import host_peaks
from megatron_hdp.types import IntArray, Plan

ALGORITHMS = ("hdp", *BASELINES)
BALANCES = ("auto", "dp", "pp")
MAX_BATCH_TOKENS = 2**31 - 1
"""Megatron counts the tokens of a step in int32."""
DEFAULT_HEADS = (16, 4)
"""Query and key/value heads of one tensor-parallel rank in `default_cost`: 32 and 8 on two."""
MAX_RANKS = 2**20
MAX_STAGES = 1024
MAX_HOST_BYTES = 2**52


def plan(
    lengths: Sequence[int] | IntArray,
    num_ranks: int,
    tokens_per_rank: int,
    *,
    algorithm: str = "hdp",
    balance: str = "auto",
    pad_multiple: int = 2,
    stages: int = 1,
    virtual_stages: int = 1,
    expert_group: int = 1,
    cost: CostModel | None = None,
    offload: bool = False,
    host_bytes: int | None = None,
    exchange: str = "auto",
) -> Plan:
    """Who runs what for one global batch. A pure function of its arguments: the same bytes on every rank.

    Args:
        lengths: tokens of every sequence, shape [num_sequences].
        num_ranks: ranks of the pool.
        tokens_per_rank: capacity, tokens that one rank holds in one micro-batch.
        algorithm: "hdp" gives each sequence the ring that shortens the step most; others are baselines to compare
            with, see `megatron_hdp.planner.baselines.BASELINES`. "static": one ring over the whole pool.
        balance: "dp" lets ranks run as many micro-batches as they have time for; "pp" also gives a ring the same slot
            on all its ranks, as pipeline stages and experts need; "auto" is "pp" with those, else "dp".
        pad_multiple: pieces are multiples of this: 2, or lcm(2, TP) with sequence parallelism.
        stages: pipeline stages.
        virtual_stages: model parts per stage; with more than one, counts are a multiple of ``stages``.
        expert_group: consecutive ranks that share experts; counts are equal inside a group. With the size of the pool,
            all counts are equal.
        cost: what pieces cost; `default_cost` when None.
        offload: let activations of long sequences leave for host memory where the copy is free, for smaller rings.
        host_bytes: bytes of activations that one process may have in host memory at a time, all micro-batches in
            flight; no limit when None. Baselines, which know no limit, offload nothing where they would exceed it.
        exchange: how rings share attention, see `megatron_hdp.planner.exchange.choose_exchanges`. With "auto" the
            baselines keep the ring.

    Raises:
        ConfigError: a setting, or a combination of settings, cannot work.
        PlanError: the batch cannot be planned with these settings.
    """
    num_ranks = _whole("num_ranks", num_ranks, MAX_RANKS)
    tokens_per_rank = _whole("--hdp-tokens-per-rank", tokens_per_rank, MAX_BATCH_TOKENS)
    pad_multiple = _whole("pad_multiple", pad_multiple, MAX_BATCH_TOKENS)
    layout = Layout(
        _whole("stages", stages, MAX_STAGES),
        _whole("virtual_stages", virtual_stages, MAX_STAGES),
        _whole("expert_group", expert_group, MAX_RANKS),
    )
    if cost is not None and not isinstance(cost, CostModel):
        raise ConfigError(f"cost is {cost!r}: give a megatron_hdp.cost.CostModel")
    balance = layout.balance(balance)
    _refuse_settings(num_ranks, tokens_per_rank, algorithm, balance, pad_multiple, layout)
    array = _refuse_batch(lengths, num_ranks, tokens_per_rank, pad_multiple)
    cost = default_cost(layout.stages) if cost is None else cost
    if layout.virtual_stages > cost.layers_per_stage:
        raise ConfigError(
            f"virtual_stages is {virtual_stages} with {cost.layers_per_stage} layers per stage: each part needs a layer"
        )
    if cost.pad_multiple != pad_multiple:
        cost = dataclasses.replace(cost, pad_multiple=pad_multiple)
    cost = cost.with_stages(layout.stages)
    if host_bytes is not None:
        host_bytes = _whole("host_bytes", host_bytes, MAX_HOST_BYTES)
        if host_bytes < 0:
            raise ConfigError(f"host_bytes is {host_bytes}: give at least 0, or None for no limit")
        offload = offload and host_bytes > 0
    require_choice(exchange, cost)
    if algorithm == "hdp":
        result = plan_hdp(
            array,
            num_ranks,
            tokens_per_rank,
            cost,
            balance,
            layout,
            exchange=exchange,
            offload=offload,
            host_bytes=host_bytes,
        )
    else:

        def baseline(offload: bool) -> Plan:
            return BASELINES[algorithm](
                array,
                num_ranks,
                tokens_per_rank,
                pad_multiple,
                cost=cost,
                count_multiple=layout.count_multiple,
                equal_counts=balance == "pp",
                offload=offload,
            )

        result = baseline(offload)
        if host_bytes is not None and int(host_peaks(result, cost, stages, virtual_stages).max()) > host_bytes:
            result = baseline(False)
        if exchange != "auto":
            result = choose_exchanges(result, cost, exchange)
    check(
        result,
        stages=stages,
        virtual_stages=virtual_stages,
        expert_group=expert_group,
        cost=cost,
        host_bytes=host_bytes,
    )
    return result


@functools.lru_cache(maxsize=8)
def default_cost(stages: int = 1) -> CostModel:
    """Cost of a stage of LLaMA-7B on the cluster of the ByteScale paper, when nothing better is known."""
    return CostModel(load_profile("bytescale"), layers_per_stage=max(1, 32 // stages))


def _whole(name: str, value: Any, most: int) -> int:
    """A whole number of at most ``most`` as int; what is too small is refused where its meaning is known."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} is {value!r}: it must be a whole number")
    if int(value) > most:
        raise ConfigError(f"{name} is {value}: it may be at most {most}")
    return int(value)


def _refuse_settings(
    num_ranks: int, capacity: int, algorithm: str, balance: str, pad_multiple: int, layout: Layout
) -> None:
    """Settings that no batch could be planned with."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--hdp-algorithm is {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    if balance not in BALANCES:
        raise ConfigError(f"--hdp-balance is {balance!r}: choose one of {', '.join(BALANCES)}")
    if num_ranks < 1:
        raise ConfigError(f"the pool has {num_ranks} ranks: it must have at least 1")
    if pad_multiple < 2 or pad_multiple % 2:
        raise ConfigError(
            f"pad_multiple is {pad_multiple}: a piece is two equal chunks, so it must be even; use 2, or "
            "lcm(2, tensor-parallel size) with sequence parallelism"
        )
    if capacity < 1:
        raise ConfigError(f"--hdp-tokens-per-rank is {capacity}: it must be positive, a multiple of {pad_multiple}")
    if capacity % pad_multiple:
        below = capacity // pad_multiple * pad_multiple
        good = " or ".join(str(value) for value in (below, below + pad_multiple) if value)
        raise ConfigError(
            f"--hdp-tokens-per-rank is {capacity}: pieces are multiples of {pad_multiple} tokens (two zigzag chunks"
            f"{', each cut over the tensor-parallel ranks' if pad_multiple > 2 else ''}), so use {good}"
        )
    stages, virtual_stages, expert_group = layout.stages, layout.virtual_stages, layout.expert_group
    if stages < 1 or virtual_stages < 1:
        raise ConfigError(f"stages is {stages} and virtual_stages {virtual_stages}: both must be at least 1")
    if virtual_stages > 1 and stages == 1:
        raise ConfigError(f"virtual_stages is {virtual_stages} with one pipeline stage: interleaving needs two or more")
    if expert_group < 1 or num_ranks % expert_group:
        raise ConfigError(
            f"expert groups of {expert_group} ranks do not divide the pool of {num_ranks}: use a divisor as "
            "--expert-model-parallel-size"
        )
    if stages > 1 and balance != "pp":
        raise ConfigError(f"--hdp-balance {balance} with {stages} pipeline stages: rings would not meet; use pp")
    if expert_group > 1 and balance != "pp":
        raise ConfigError(f"--hdp-balance {balance} with expert groups of {expert_group}: counts would differ; use pp")


def _refuse_batch(lengths: Sequence[int] | IntArray, num_ranks: int, capacity: int, pad_multiple: int) -> IntArray:
    """The lengths as int64 [num_sequences], or an error for a batch that cannot be planned."""
    try:
        array = np.asarray(lengths)
    except (ValueError, OverflowError) as error:
        raise PlanError(f"lengths must be a flat list of whole numbers: {error}") from error
    if array.size == 0:
        raise PlanError(
            "the batch is empty: a step needs at least one sequence; raise --global-batch-size or --hdp-batch-tokens"
        )
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.max() >= 1 << 63):
        raise PlanError(
            f"lengths must be a flat list of whole numbers below 2^63, got shape {list(array.shape)} of {array.dtype}"
        )
    array = array.astype(np.int64)
    wrong = np.flatnonzero(array < 1)
    if wrong.size:
        raise PlanError(
            f"sequence {wrong[0]} has {array[wrong[0]]} tokens: drop empty sequences from the data ({wrong.size} in "
            "this batch)"
        )
    longest = int(np.argmax(array))
    length = int(array[longest])
    if length > num_ranks * capacity:
        enough = -(-length // (num_ranks * pad_multiple)) * pad_multiple
        raise PlanError(
            f"sequence {longest} has {length} tokens and needs {-(-length // capacity)} ranks of {capacity} tokens, "
            f"the pool has {num_ranks} and holds {num_ranks * capacity}: raise --hdp-tokens-per-rank to {enough} or "
            f"more, lower --seq-length to {num_ranks * capacity}, or use more ranks"
        )
    total = int(array.sum())
    if total > MAX_BATCH_TOKENS:
        raise PlanError(
            f"the batch has {total} tokens, Megatron counts a step's tokens in int32, at most {MAX_BATCH_TOKENS}: "
            "lower --global-batch-size or --hdp-batch-tokens"
        )
    return array
