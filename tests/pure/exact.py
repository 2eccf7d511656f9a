"""Best plans of tiny batches by constraint programming (no pipeline), that planners and bounds are held against."""

import itertools
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from megatron_hdp.cost import CostModel
from megatron_hdp.types import Plan


@dataclass(frozen=True)
class Place:
    """One way to run a sequence: its ring, and what a piece of it takes and holds."""

    start: int
    size: int
    forward: int
    backward: int
    tokens: int

    def covers(self, rank: int) -> bool:
        return self.start <= rank < self.start + self.size


def best_plan(lengths: list[int], num_ranks: int, capacity: int, cost: CostModel, steps: int = 5000) -> Plan | None:
    """A plan of least span under the evaluator's rules, but for rounding times up to the longest piece's / ``steps``.

    A *group* is what the evaluator makes of linked micro-batches: sequences that share micro-batches wherever their
    rings meet. It holds all its ranks while its costliest forward and then its costliest backward last. Sequence s may
    be in a group named by it or by an earlier one, which breaks the symmetry of names. None if a fixed amount of search
    does not prove a plan best.
    """
    places = [_places(length, num_ranks, capacity, cost) for length in lengths]
    unit = max(1, max(p.forward + p.backward for ways in places for p in ways) // steps)
    constant = [-(-cost.microbatch_picoseconds(phase) // unit) for phase in ("forward", "backward")]
    horizon = sum(max(-(-(p.forward + p.backward) // unit) + 2 for p in ways) + sum(constant) for ways in places)
    model = cp_model.CpModel()
    span = model.new_int_var(sum(constant), horizon, "span")
    chosen = {
        (s, g, w): model.new_bool_var(f"{s} {g} {w}")
        for s, ways in enumerate(places)
        for g in range(s + 1)
        for w in range(len(ways))
    }
    for s, ways in enumerate(places):
        model.add_exactly_one(chosen[s, g, w] for g in range(s + 1) for w in range(len(ways)))
    on_rank: list[list[cp_model.IntervalVar]] = [[] for _ in range(num_ranks)]
    starts = []
    for g in range(len(lengths)):
        start, end = model.new_int_var(0, horizon, f"start {g}"), model.new_int_var(0, horizon, f"end {g}")
        passes = [model.new_int_var(0, horizon, f"{name} {g}") for name in ("forward", "backward")]
        length = model.new_int_var(0, horizon, f"length {g}")
        model.add(length == sum(passes))
        model.add(end <= span)
        starts.append(start)
        for rank in range(num_ranks):
            here = [
                (places[s][w], chosen[s, g, w])
                for s in range(g, len(lengths))
                for w in range(len(places[s]))
                if places[s][w].covers(rank)
            ]
            present = model.new_bool_var(f"present {g} {rank}")
            model.add_max_equality(present, [take for _, take in here])
            model.add(sum(place.tokens * take for place, take in here) <= capacity)
            for total, fixed, times in zip(passes, constant, ("forward", "backward")):
                model.add(sum(-(-getattr(p, times) // unit) * take for p, take in here) + fixed * present <= total)
            on_rank[rank].append(model.new_optional_interval_var(start, length, end, present, f"{g} on {rank}"))
    for intervals in on_rank:
        model.add_no_overlap(intervals)
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = 3.0  # counts work, not seconds, so that every machine does as much
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    picked = {s: (solver.value(starts[g]), g, places[s][w]) for (s, g, w), take in chosen.items() if solver.value(take)}
    return _plan(lengths, num_ranks, capacity, cost.pad_multiple, picked)


def _places(length: int, num_ranks: int, capacity: int, cost: CostModel) -> list[Place]:
    places = []
    for size in range(1, num_ranks + 1):
        tokens = int(cost.piece_tokens(length, size))
        for start in range(num_ranks - size + 1) if tokens <= capacity else ():
            tier = cost.tier(start, size)
            times = (int(cost.picoseconds(length, size, tier, phase)) for phase in ("forward", "backward"))
            places.append(Place(start, size, *times, tokens))
    return places


def _plan(
    lengths: list[int], num_ranks: int, capacity: int, pad: int, picked: dict[int, tuple[int, int, Place]]
) -> Plan:
    """Micro-batches in the order in which their groups start."""
    ranks: list[list[list[int]]] = []
    for rank in range(num_ranks):
        here = sorted((start, group, s) for s, (start, group, place) in picked.items() if place.covers(rank))
        ranks.append([[s for _, _, s in part] for _, part in itertools.groupby(here, key=lambda x: x[:2])] or [[]])
    return to_plan(lengths, num_ranks, capacity, pad, [picked[s][2].start for s in range(len(lengths))],
                   [picked[s][2].size for s in range(len(lengths))], ranks)  # fmt: skip


def to_plan(lengths, num_ranks, capacity, pad, starts, sizes, ranks, offload=None) -> Plan:
    """Columns from every rank's list of micro-batches, each a list of sequences."""
    batches = [batch for rank in ranks for batch in rank]
    return Plan(
        num_ranks=num_ranks,
        capacity=capacity,
        pad_multiple=pad,
        lengths=np.array(lengths),
        ring_start=np.array(starts),
        ring_size=np.array(sizes),
        offload=np.zeros(len(lengths)) if offload is None else offload,
        rank_offsets=np.cumsum([0] + [len(rank) for rank in ranks]),
        microbatch_offsets=np.cumsum([0] + [len(batch) for batch in batches]),
        piece_sequence=np.array([s for batch in batches for s in sorted(batch)], dtype=np.int64),
    )
