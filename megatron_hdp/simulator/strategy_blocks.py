"""Block-level placement (FCP, arXiv 2605.08524) as an estimate: the best that it could do, not a plan of it.

Sequences are cut into blocks of some thousand tokens; each rank keeps an equal share for everything but attention, and
attention of a block may run on any rank, which pulls what it needs and pushes back what comes of it. Nobody waits for a
longer piece, so the estimate lets every rank have exactly the same work in every wave. What is counted:

* linear work of an equal share of the tokens, without padding, and attention of an equal share of the wave's;
* the least that a rank must fetch for its share of a sequence, see `_moved`, spread evenly over all ranks and hidden
  behind attention; one latency a layer and pass;
* with pipeline stages, waves as equal as the longest sequence lets them be, and the number of waves that is best.

What is left out, all in its favour: moving tokens between where the loader and where attention wants them, ahead of and
after every attention; kernels that lose efficiency on blocks of 4K tokens, and the 6 to 8 multiprocessors that its
communication takes; collisions at NICs, which it schedules by edge colouring for seconds a batch; memory of the blocks
that are pulled. A sequence is in one wave, because its keys and values must be there.
"""

import dataclasses
import heapq

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.planner.span import PHASES, ends_of_columns
from megatron_hdp.simulator.durations import Durations
from megatron_hdp.simulator.flops import batch_flops
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.result import StepResult
from megatron_hdp.simulator.simulate import simulate_step
from megatron_hdp.simulator.strategy_setting import Asked
from megatron_hdp.types import IntArray, Plan

Floats = npt.NDArray[np.float64]
BLOCK = 4096
"""Tokens of a block. A pair of blocks is on one rank, so a wave takes as long as one at least."""
FINER = (1, 2, 4, 8)
"""Times as many waves as the capacity asks for, that are tried in a pipeline."""


def plan_blocks(asked: Asked) -> Plan:
    """What stands for the blocks: one local sequence for each rank and wave, of an equal share of the tokens."""
    setting, tokens = asked.setting, int(asked.lengths.sum())
    least = max(1, -(-tokens // (setting.ranks * setting.tokens_per_rank)))
    plans: list[Plan] = []
    for finer in FINER if setting.stages > 1 else FINER[:1]:
        multiple = setting.layout.count_multiple
        waves = -(-least * finer // multiple) * multiple
        if not plans or waves * setting.ranks <= tokens:
            plans.append(_even(tokens, waves, asked))
    spans = [_span(plan, asked) for plan in plans]
    return plans[int(np.argmin(spans))]


def simulate_blocks(plan: Plan, asked: Asked, job: Job, timeline: bool) -> StepResult:
    """The step of a plan of `plan_blocks`; tokens and FLOPs are the batch's own."""
    times, moved = _durations(plan, asked)
    found = simulate_step(plan, job, timeline=timeline, times=times)
    per_layer = job.cost.layers_per_stage * job.stages * job.tensor_parallel
    links = dict(found.bytes_by_link)
    links["across_nodes"] += round(float(moved.sum()) * plan.num_ranks * per_layer)
    peak, gpus = job.cluster.peak_flops, found.gpus
    flops = batch_flops(asked.lengths, job)
    busiest = moved / np.maximum(times.total[: moved.shape[0]] / job.cost.layers_per_stage / 1e12, 1e-12)
    flows = max(1, job.cluster.gpus_per_node // job.cluster.nics_per_node)
    return dataclasses.replace(
        found,
        mfu=flops / (found.seconds * gpus * peak) if peak and flops else None,
        bytes_by_link=links,
        nic_peak=float(busiest.max()) * flows,
    )


def _even(tokens: int, waves: int, asked: Asked) -> Plan:
    """``waves`` micro-batches on each rank, each of one local sequence; lengths differ by one token at most."""
    setting = asked.setting
    number = setting.ranks * waves
    lengths = np.full(number, tokens // number, dtype=np.int64)
    lengths[: tokens - int(lengths.sum())] += 1
    lengths = lengths[lengths > 0]
    each = np.arange(number, dtype=np.int64)
    full = np.minimum(np.arange(number + 1), lengths.size)
    return Plan(
        num_ranks=setting.ranks,
        capacity=setting.tokens_per_rank,
        pad_multiple=2,
        lengths=lengths,
        ring_start=each[: lengths.size] // waves,
        ring_size=np.ones_like(lengths),
        offload=np.zeros(lengths.size),
        rank_offsets=np.arange(setting.ranks + 1) * waves,
        microbatch_offsets=full,
        piece_sequence=each[: lengths.size],
    )


def _span(plan: Plan, asked: Asked) -> int:
    """Picoseconds; all ranks are alike."""
    times, layout, waves = _durations(plan, asked)[0].total, asked.setting.layout, int(plan.microbatch_counts[0])
    columns = (np.array([0, waves]), np.zeros(waves + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    ends = ends_of_columns(*columns, times[:waves, 0], times[:waves, 1], layout.stages, layout.virtual_stages)
    return int(ends.max())


def _durations(plan: Plan, asked: Asked) -> tuple[Durations, Floats]:
    """Of every micro-batch; and bytes that a GPU moves in each wave and pass, one layer, float64 [num_waves, 2]."""
    setting, lengths = asked.setting, asked.lengths
    ranks, waves = setting.ranks, int(plan.microbatch_counts[0])
    cost = setting.cost.with_stages(setting.stages)
    free = cost.with_free_links("all")
    profile, layers = cost.profile, cost.layers_per_stage
    attention = np.stack([free.attention_picoseconds(lengths, 1, Tier.ACROSS_NODES, phase) for phase in PHASES], axis=1)
    besides = np.stack([free.picoseconds(lengths, 1, Tier.ACROSS_NODES, phase) for phase in PHASES], axis=1) - attention
    wave = _waves(attention.sum(axis=1), waves)
    of_wave = np.zeros((waves, 2))
    np.add.at(of_wave, wave, attention / ranks)  # float: an estimate
    blocks = -(-lengths // BLOCK)
    np.maximum.at(of_wave, wave, attention / (blocks * (blocks + 1) / 2)[:, None])
    linear = besides.sum(axis=0) / (ranks * waves) + [cost.microbatch_picoseconds(phase) for phase in PHASES]
    moved = np.stack([_moved(lengths, attention, wave, of_wave, cost, backward) for backward in (False, True)], axis=1)
    moved /= ranks
    transfers = (moved / profile.across_nodes.bandwidth + profile.across_nodes.latency * (moved > 0)) * layers * 1e12
    compute, waiting = (
        np.tile(np.rint(part).astype(np.int64), (ranks, 1))
        for part in (of_wave + linear, np.maximum(transfers - of_wave, 0))
    )
    nothing = np.zeros((plan.num_sequences, 2), dtype=np.int64)
    return Durations(compute=compute, ring=waiting, copy=0 * compute, attention=nothing), moved


def _waves(work: IntArray, waves: int) -> IntArray:
    """Wave of every sequence: heaviest first to the wave with least work."""
    heap = [(0, wave) for wave in range(waves)]
    found = np.empty(work.size, dtype=np.int64)
    for sequence in np.argsort(-work, kind="stable").tolist():
        load, wave = heap[0]
        found[sequence] = wave
        heapq.heapreplace(heap, (load + int(work[sequence]), wave))
    return found


def _moved(
    lengths: IntArray,
    attention: IntArray,
    wave: IntArray,
    of_wave: Floats,
    cost: CostModel,
    backward: bool,
) -> Floats:
    """Bytes that all ranks of a wave fetch and push in one pass over one layer, at least; float64 [num_waves].

    A sequence of s tokens whose attention is worth k ranks' share makes each of k ranks compute s^2 / 2k pairs. With x
    queries and y keys, x y >= s^2 / 2k. Either x is what the rank has anyway, s / k, and y = s / 2 keys and values
    come; or both come, and x Q + y V is least where they are equal: 2 sqrt(Q V s^2 / 2k). Q are the bytes of a
    token's query and output (backward: those, and both gradients), V those of its keys and values (and gradients).
    """
    layer = cost.layer_profile
    share = attention[:, int(backward)] / np.maximum(of_wave[wave, int(backward)], 1)
    spread = share > 1
    heads = 2.0 * (cost.heads or 1) / (cost.kv_heads or 1) / 2 * layer.kv_per_token  # queries and outputs
    query = heads * (2 if backward else 1)
    value = layer.kv_per_token + (layer.kv_gradient_per_token if backward else 0)
    pairs = lengths.astype(np.float64) ** 2 / (2 * np.maximum(share, 1))
    each = np.minimum(value * lengths / 2, 2 * np.sqrt(query * value * pairs))
    total = np.zeros(of_wave.shape[0])
    np.add.at(total, wave[spread], (share * each)[spread])
    return total
