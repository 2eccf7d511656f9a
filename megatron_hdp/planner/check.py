"""Every invariant of a plan, checked on every plan before it is used."""

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.deadlock import require_order
from megatron_hdp.planner.graph import tie_experts
from megatron_hdp.planner.host import host_peaks, most_in_flight
from megatron_hdp.planner.native import _core
from megatron_hdp.planner.peers import HEADS, peers, ring_peers
from megatron_hdp.planner.span import ends_of_columns
from megatron_hdp.types import EXCHANGES, IntArray, Plan

__all__ = ["check", "check_python", "held_tokens", "peers"]

MAX_PEERS = 4
"""Ranks that one rank exchanges data with along rings, over a whole run."""

LIMIT = 2**31
"""Ranks, capacity, pad_multiple, lengths and the tokens of a batch are below this, so that no sum of them wraps."""

MAX_MODEL_PARTS = 4096
"""Most model parts (stages x virtual stages) of a pipeline: no model has so many layers."""

_SOUND, _BROKEN, _UNDECIDED = 0, 1, 2
"""What the C++ check says. Undecided: a pipeline whose rings have different slots on their ranks; huge numbers."""


def check(
    plan: Plan,
    *,
    stages: int = 1,
    virtual_stages: int = 1,
    expert_group: int = 1,
    cost: CostModel | None = None,
    host_bytes: int | None = None,
) -> None:
    """Return if the plan keeps every invariant.

    Args:
        plan: the plan.
        stages: pipeline stages. Counts may differ between ranks, and a ring's slots too, as long as no rank would wait
            forever under 1F1B or the interleaved schedule. At most `MAX_MODEL_PARTS` with all their model parts.
        virtual_stages: model parts per stage. With more than one, every rank's count must be a multiple of ``stages``,
            as Megatron's interleaved schedule demands.
        expert_group: ranks that exchange tokens between experts, consecutive; counts must be equal inside a group.
        cost: of one pipeline stage, for ``host_bytes``.
        host_bytes: bytes of activations that one process may have in host memory at a time; no limit when None.

    Raises:
        PlanError: names the broken invariant, rank, sequence and numbers; or a setting that no run can have.
    """
    _check_settings(stages, virtual_stages, expert_group)
    if host_bytes is not None and cost is None:
        raise PlanError("settings: host_bytes without cost: what a piece takes depends on both, give the cost model")
    _check_numbers(plan)
    verdict = _check_in_core(plan, stages, virtual_stages, expert_group)
    if verdict != _SOUND:
        check_python(plan, stages=stages, virtual_stages=virtual_stages, expert_group=expert_group)
    if verdict == _BROKEN:
        raise PlanError(
            "check: the C++ check refuses this plan and its Python twin does not, which is an error of this package: "
            "report it with the plan's JSON"
        )
    if verdict == _SOUND and expert_group > 1:  # the C++ check does not look at this
        _check_experts(plan, stages, virtual_stages, expert_group)
    if host_bytes is not None and cost is not None:
        _check_host(plan, cost, host_bytes, stages, virtual_stages)


def check_python(plan: Plan, *, stages: int = 1, virtual_stages: int = 1, expert_group: int = 1) -> None:
    """Twin of the C++ check, and the one that says what is wrong; refuses exactly what `check` refuses."""
    _check_settings(stages, virtual_stages, expert_group)
    _check_numbers(plan)
    _check_columns(plan)
    microbatch = np.repeat(np.arange(plan.microbatch_offsets.size - 1), np.diff(plan.microbatch_offsets))
    rank_of = np.repeat(np.arange(plan.num_ranks), np.diff(plan.rank_offsets))
    rank = rank_of[microbatch]
    _check_rings(plan)
    _check_exchanges(plan)
    _check_pieces(plan, rank)
    _check_order_inside(plan, microbatch, rank_of)
    _check_capacity(plan, microbatch, rank_of)
    _check_peers(plan)
    _check_counts(plan, stages, virtual_stages, expert_group)
    require_order(plan, stages, virtual_stages)
    if expert_group > 1:
        _check_experts(plan, stages, virtual_stages, expert_group)


def _check_in_core(plan: Plan, stages: int, virtual_stages: int, expert_group: int) -> int:
    """Verdict of the C++ check; undecided where it is not built or cannot read the columns."""
    if _core is None or any(getattr(plan, name).ndim != 1 for name in plan._columns()):
        return _UNDECIDED
    return _core.check(
        plan.num_ranks,
        plan.capacity,
        plan.pad_multiple,
        plan.lengths,
        plan.ring_start,
        plan.ring_size,
        plan.offload,
        plan.rank_offsets,
        plan.microbatch_offsets,
        plan.piece_sequence,
        plan.exchange,
        plan.head_ranks,
        stages,
        virtual_stages,
        expert_group,
    )


def _check_experts(plan: Plan, stages: int, virtual_stages: int, expert_group: int) -> None:
    """Ranks that share experts run in lockstep: no rank may wait forever then either."""
    columns = (plan.microbatch_offsets, plan.piece_sequence, plan.ring_size)
    nothing = np.zeros(int(plan.rank_offsets[-1]), dtype=np.int64)
    try:
        ends_of_columns(
            plan.rank_offsets,
            *tie_experts(plan.rank_offsets, *columns, expert_group),
            nothing,
            nothing,
            stages,
            virtual_stages,
        )
    except PlanError as error:
        raise PlanError(
            f"experts: groups of {expert_group} ranks run every slot together, and with their rings some would wait "
            f"forever: {error}; a ring must have the same slot on all its ranks"
        ) from error


def _check_host(plan: Plan, cost: CostModel, host_bytes: int, stages: int, virtual_stages: int) -> None:
    """No rank has more in host memory at a time than it may."""
    peaks = host_peaks(plan, cost, stages, virtual_stages)
    rank = int(np.argmax(peaks))
    if peaks[rank] > host_bytes:
        flight = most_in_flight(stages, virtual_stages)
        together = f" with up to {flight} micro-batches in flight" if flight > 1 else ""
        raise PlanError(
            f"host: rank {rank} has {int(peaks[rank]):,} bytes of activations in host memory at a time{together}, "
            f"{host_bytes:,} are allowed: raise --hdp-offload-gib, or plan with this limit"
        )


def held_tokens(tokens: IntArray, offload: npt.NDArray[np.float64]) -> IntArray:
    """Tokens of pieces that stay on the device after offload, rounded up; same shapes."""
    return tokens - np.floor(tokens * offload).astype(np.int64)


def _check_settings(stages: int, virtual_stages: int, expert_group: int) -> None:
    """Whole numbers that a run can have; that expert groups divide the pool is for `_check_counts`."""
    settings = (("stages", stages), ("virtual_stages", virtual_stages), ("expert_group", expert_group))
    for name, value in settings:
        most = LIMIT - 1 if name == "expert_group" else MAX_MODEL_PARTS
        if not _is_whole(value) or not 1 <= value <= most:
            raise PlanError(f"settings: {name} is {_shown(value)}, must be a whole number from 1 to {most}")
    if virtual_stages > 1 and stages == 1:
        raise PlanError(
            f"settings: virtual_stages is {virtual_stages} with 1 pipeline stage: interleaving needs two or more stages"
        )
    if int(stages) * int(virtual_stages) > MAX_MODEL_PARTS:
        raise PlanError(
            f"settings: {stages} stages of {virtual_stages} virtual stages are {int(stages) * int(virtual_stages)} "
            f"model parts, at most {MAX_MODEL_PARTS} may be"
        )


def _check_numbers(plan: Plan) -> None:
    """Numbers so small that no sum or product of them wraps in int64, here or in C++."""
    scalars = (("num_ranks", plan.num_ranks), ("capacity", plan.capacity), ("pad_multiple", plan.pad_multiple))
    for name, value in scalars:
        if not _is_whole(value) or not -LIMIT < value < LIMIT:
            raise PlanError(f"columns: {name} is {_shown(value)}, must be a whole number below {LIMIT}")
    lengths = plan.lengths.reshape(-1)
    wrong = np.flatnonzero(lengths >= LIMIT)
    if wrong.size:
        raise PlanError(f"length: sequence {wrong[0]} has {lengths[wrong[0]]} tokens, must have fewer than {LIMIT}")
    total = int(np.maximum(lengths, 0).sum())
    if total >= LIMIT:
        raise PlanError(f"length: the batch has {total} tokens, must have fewer than {LIMIT}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """For a message; Python writes no integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _check_columns(plan: Plan) -> None:
    """Sizes, offsets and ranges: after this, indexing is safe."""
    if plan.num_ranks < 1 or plan.capacity < 1 or plan.pad_multiple < 2 or plan.pad_multiple % 2:
        raise PlanError(
            f"columns: num_ranks {plan.num_ranks} and capacity {plan.capacity} must be positive, pad_multiple "
            f"{plan.pad_multiple} positive and even"
        )
    for name in ("lengths", "ring_start", "ring_size", "offload", "exchange", "head_ranks"):
        shape = getattr(plan, name).shape
        if shape != (plan.lengths.size,):
            raise PlanError(f"columns: {name} has shape {list(shape)}, the batch has {plan.lengths.size} sequences")
    _check_offsets("rank_offsets", plan.rank_offsets, plan.num_ranks, plan.microbatch_offsets.size - 1)
    _check_offsets("microbatch_offsets", plan.microbatch_offsets, None, plan.piece_sequence.size)
    if plan.piece_sequence.ndim != 1:
        raise PlanError(f"columns: piece_sequence has shape {list(plan.piece_sequence.shape)}, must be flat")
    wrong = np.flatnonzero((plan.piece_sequence < 0) | (plan.piece_sequence >= plan.lengths.size))
    if wrong.size:
        raise PlanError(
            f"columns: piece {wrong[0]} is of sequence {plan.piece_sequence[wrong[0]]}, the batch has sequences 0 to "
            f"{plan.lengths.size - 1}"
        )


def _check_offsets(name: str, offsets: IntArray, num: int | None, total: int) -> None:
    """Offsets start at 0, never fall and end at the size of what they cut."""
    if offsets.ndim != 1 or offsets.size < 1 or (num is not None and offsets.size != num + 1):
        raise PlanError(f"columns: {name} has shape {list(offsets.shape)}, must be [{'?' if num is None else num + 1}]")
    falls = bool(np.any(offsets[1:] < offsets[:-1]))  # a difference could wrap
    if offsets[0] != 0 or offsets[-1] != total or falls:
        raise PlanError(
            f"columns: {name} must rise from 0 to {total}; it starts at {offsets[0]} and ends at {offsets[-1]}"
            + (", and falls in between" if falls else "")
        )


def _check_rings(plan: Plan) -> None:
    """Rings are intervals inside the pool, sequences have tokens, offload is a fraction."""
    wrong = np.flatnonzero(plan.lengths < 1)
    if wrong.size:
        raise PlanError(f"length: sequence {wrong[0]} has {plan.lengths[wrong[0]]} tokens, must have at least 1")
    wrong = np.flatnonzero(
        (plan.ring_size < 1)
        | (plan.ring_size > plan.num_ranks)
        | (plan.ring_start < 0)
        | (plan.ring_start > plan.num_ranks - plan.ring_size)
    )
    if wrong.size:
        s = wrong[0]
        raise PlanError(
            f"ring: sequence {s} has the ring of {plan.ring_size[s]} ranks from rank {plan.ring_start[s]}, which is no "
            f"interval inside the pool of ranks 0 to {plan.num_ranks - 1}"
        )
    wrong = np.flatnonzero(~((plan.offload >= 0) & (plan.offload <= 1)))  # a NaN is wrong too
    if wrong.size:
        raise PlanError(f"offload: sequence {wrong[0]} has offload {plan.offload[wrong[0]]}, must be in 0 .. 1")


def _check_exchanges(plan: Plan) -> None:
    """Exchanges exist, local sequences have none, and groups that swap rows for heads tile their ring."""
    exchange, head_ranks, size = plan.exchange, plan.head_ranks, plan.ring_size
    wrong = np.flatnonzero((exchange < 0) | (exchange >= len(EXCHANGES)))
    if wrong.size:
        s, names = wrong[0], ", ".join(f"{index} ({name})" for index, name in enumerate(EXCHANGES))
        raise PlanError(f"exchange: sequence {s} has exchange {exchange[s]}, must be one of {names}")
    wrong = np.flatnonzero((size == 1) & ((exchange != 0) | (head_ranks != 1)))
    if wrong.size:
        s = wrong[0]
        raise PlanError(
            f"exchange: sequence {s} is local and has exchange {EXCHANGES[exchange[s]]} with head_ranks "
            f"{head_ranks[s]}, must have ring with 1"
        )
    wrong = np.flatnonzero(np.where(exchange == HEADS, head_ranks < 2, head_ranks != 1))
    if wrong.size:
        s = wrong[0]
        least = "at least 2" if exchange[s] == HEADS else "1"
        raise PlanError(
            f"exchange: sequence {s} has exchange {EXCHANGES[exchange[s]]} with head_ranks {head_ranks[s]}, must have "
            f"{least}"
        )
    wrong = np.flatnonzero(size % head_ranks)
    if wrong.size:
        s = wrong[0]
        raise PlanError(
            f"exchange: sequence {s} has head_ranks {head_ranks[s]}, which does not divide its ring of {size[s]} ranks"
        )


def _check_pieces(plan: Plan, rank: IntArray) -> None:
    """A sequence has exactly one piece on each rank of its ring, and none elsewhere."""
    sequence = plan.piece_sequence
    offset = rank - plan.ring_start[sequence]
    wrong = np.flatnonzero((offset < 0) | (offset >= plan.ring_size[sequence]))
    if wrong.size:
        s = sequence[wrong[0]]
        raise PlanError(
            f"pieces: rank {rank[wrong[0]]} has a piece of sequence {s}, whose ring is ranks {plan.ring_start[s]} to "
            f"{plan.ring_start[s] + plan.ring_size[s] - 1}"
        )
    first = np.cumsum(plan.ring_size) - plan.ring_size
    times = np.bincount(first[sequence] + offset, minlength=int(plan.ring_size.sum()))
    wrong = np.flatnonzero(times != 1)
    if wrong.size:
        s = int(np.searchsorted(first, wrong[0], side="right")) - 1
        raise PlanError(
            f"pieces: rank {plan.ring_start[s] + wrong[0] - first[s]} has {times[wrong[0]]} pieces of sequence {s}, "
            "must have exactly 1"
        )


def _check_order_inside(plan: Plan, microbatch: IntArray, rank_of: IntArray) -> None:
    """Ascending sequences inside a micro-batch, so that rings meet in one global order."""
    falls = (np.diff(plan.piece_sequence) <= 0) & (np.diff(microbatch) == 0)
    wrong = np.flatnonzero(falls)
    if wrong.size:
        i = wrong[0]
        where = _where(plan, int(microbatch[i]), rank_of)
        raise PlanError(
            f"order: {where} has sequence {plan.piece_sequence[i]} before sequence {plan.piece_sequence[i + 1]}, "
            "must be ascending"
        )


def _check_capacity(plan: Plan, microbatch: IntArray, rank_of: IntArray) -> None:
    """No micro-batch holds more than the capacity, counted after offload."""
    held = np.zeros(rank_of.size, dtype=np.int64)
    np.add.at(held, microbatch, held_tokens(2 * plan.chunk_tokens, plan.offload)[plan.piece_sequence])
    wrong = np.flatnonzero(held > plan.capacity)
    if wrong.size:
        where = _where(plan, int(wrong[0]), rank_of)
        raise PlanError(f"capacity: {where} holds {held[wrong[0]]} tokens, capacity is {plan.capacity}")


def _check_peers(plan: Plan) -> None:
    """No rank exchanges data along rings with more than four others. Gather and heads may have more, and say so."""
    number = ring_peers(plan)
    worst = int(np.argmax(number))
    if number[worst] > MAX_PEERS:
        raise PlanError(
            f"peers: rank {worst} exchanges data along rings with {number[worst]} ranks, at most {MAX_PEERS} may be"
        )


def _check_counts(plan: Plan, stages: int, virtual_stages: int, expert_group: int) -> None:
    """Micro-batch counts: at least one each, and equal where the model needs it."""
    counts = plan.microbatch_counts
    if counts.min() < 1:
        raise PlanError(f"counts: rank {int(np.argmin(counts))} has no micro-batch, must have at least 1")
    wrong = np.flatnonzero(counts % stages) if virtual_stages > 1 else counts[:0]
    if wrong.size:
        raise PlanError(
            f"counts: rank {wrong[0]} has {counts[wrong[0]]} micro-batches, the interleaved schedule needs a multiple "
            f"of the {stages} pipeline stages"
        )
    if expert_group < 1 or plan.num_ranks % expert_group:
        raise PlanError(f"counts: expert groups of {expert_group} ranks do not divide the pool of {plan.num_ranks}")
    groups = counts.reshape(-1, expert_group)
    wrong = np.flatnonzero(groups.min(axis=1) != groups.max(axis=1))
    if wrong.size:
        raise PlanError(
            f"counts: ranks {wrong[0] * expert_group} to {(wrong[0] + 1) * expert_group - 1} share experts and have "
            f"{groups[wrong[0]].tolist()} micro-batches, must be equal"
        )


def _where(plan: Plan, microbatch: int, rank_of: IntArray) -> str:
    rank = int(rank_of[microbatch])
    return f"rank {rank}, slot {microbatch - int(plan.rank_offsets[rank])}"
