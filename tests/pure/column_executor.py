"""A dull executor of plans: every stage of every column walks its own list of things to do until nothing moves."""

import numpy as np
from plan_twins import Op, schedule

from megatron_hdp.types import Plan

Key = tuple[int, int]  # rank, stage


def random_plan(
    rng: np.random.Generator, stages: int, parts: int, shuffle: float, num_ranks: int | None = None
) -> Plan:
    """A small plan: rings in the same slot of all their ranks, counts unequal; then some slots swapped.

    Of 2 to 4 ranks, if their number is not given.
    """
    num_ranks = int(rng.integers(2, 5)) if num_ranks is None else num_ranks
    unit = stages if parts > 1 else 1
    counts = unit * rng.integers(1, 4 if unit > 1 else 6, num_ranks)
    ranks: list[list[list[int]]] = [[[] for _ in range(n)] for n in counts]
    rings = []
    for _ in range(int(rng.integers(1, 6))):
        size = int(rng.integers(1, num_ranks + 1))
        start = int(rng.integers(0, num_ranks - size + 1))
        slot = int(rng.integers(0, counts[start : start + size].min()))
        for rank in range(start, start + size):
            ranks[rank][slot].append(len(rings))
        rings.append((start, size))
    for mbs in ranks:
        if rng.random() < shuffle:
            a, b = rng.integers(0, len(mbs), 2)
            mbs[a], mbs[b] = mbs[b], mbs[a]
    flat = [mb for mbs in ranks for mb in mbs]
    return Plan(
        num_ranks=num_ranks,
        capacity=1000,
        pad_multiple=2,
        lengths=np.array([int(rng.integers(1, 10)) * size for _, size in rings]),
        ring_start=np.array([start for start, _ in rings]),
        ring_size=np.array([size for _, size in rings]),
        offload=np.zeros(len(rings)),
        rank_offsets=np.cumsum([0, *map(len, ranks)]),
        microbatch_offsets=np.cumsum([0, *map(len, flat)]),
        piece_sequence=np.array([s for mb in flat for s in mb], dtype=np.int64),
    )


def linked(plan: Plan) -> dict[tuple[int, int], frozenset[tuple[int, int]]]:
    """(rank, slot) -> all (rank, slot) that it shares rings with, directly or through others; itself included."""
    pieces = {
        (rank, slot): {p.sequence for p in mb.pieces if p.ring.size > 1}
        for rank, mbs in enumerate(plan)
        for slot, mb in enumerate(mbs)
    }
    result: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}
    for start in pieces:
        if start in result:
            continue
        found, todo = {start}, [start]
        while todo:
            here = todo.pop()
            new = {other for other, mine in pieces.items() if mine & pieces[here]} - found
            found |= new
            todo += new
        result.update(dict.fromkeys(found, frozenset(found)))
    return result


def one_by_one(count: int, stage: int, stages: int, parts: int, overlap: bool) -> list[tuple[str, Op]]:
    """What a stage does, after Megatron's loops: run; send and ask (which only begin); sent and came (which wait)."""
    ops = schedule(count, stage, stages, parts)
    forward, backward = [op for op in ops if op[0] == "F"], [op for op in ops if op[0] == "B"]
    ahead = stages - stage - 1 if parts == 1 else (stages - stage - 1) * 2 + (parts - 1) * stages
    ahead = min(ahead, len(forward))
    todo: list[tuple[str, Op]] = []

    def exchange(sends: list[Op], asks: list[Op], wait: bool = True) -> None:
        todo.extend([("send", op) for op in sends] + [("ask", op) for op in asks] + [("sent", op) for op in sends])
        if wait:
            todo.extend(("came", op) for op in asks)

    def run(op: Op) -> None:
        todo.append(("run", op))

    rest = len(forward) - ahead
    if parts == 1:
        for i in range(ahead):
            exchange([], [forward[i]])
            run(forward[i])
            exchange([forward[i]], [])
        if rest:
            exchange([], [forward[ahead]])
        for i in range(rest):
            run(forward[ahead + i])
            exchange([forward[ahead + i]], [backward[i]])
            run(backward[i])
            exchange([backward[i]], forward[ahead + i + 1 : ahead + i + 2])
        for op in backward[rest:]:
            exchange([], [op])
            run(op)
            exchange([op], [])
        return todo
    exchange([], forward[:1])
    for k in range(ahead):
        run(forward[k])
        first = backward[:1] if k == ahead - 1 and rest else []
        exchange([forward[k]], forward[k + 1 : k + 2] + ([] if overlap else first))
        if overlap:
            exchange([], first, wait=False)
    for k in range(rest):
        run(forward[ahead + k])
        if overlap:
            exchange([forward[ahead + k]], forward[ahead + k + 1 : ahead + k + 2], wait=False)
        run(backward[k])
        if overlap:
            exchange([backward[k]], backward[k + 1 : k + 2], wait=False)
        else:
            exchange(
                [forward[ahead + k], backward[k]], forward[ahead + k + 1 : ahead + k + 2] + backward[k + 1 : k + 2]
            )
    if not rest:
        exchange([], backward[:1])
    for k in range(rest, len(backward)):
        run(backward[k])
        exchange([backward[k]], backward[k + 1 : k + 2])
    return todo


def execute(
    plan: Plan,
    stages: int = 1,
    parts: int = 1,
    messages: str = "free",
    cost: dict[tuple[str, int, int], int] | None = None,
) -> list[int] | None:
    """Time at which each rank is done, or None if some never are.

    ``messages``: "free" lets senders go on; "together" and "apart" make them wait until they are asked, as Megatron
    does without and with overlapped messages. ``cost``: time of (direction, rank, slot) on one stage; None for 0.
    """
    counts = plan.microbatch_counts.tolist()
    groups = linked(plan)
    programs: dict[Key, list[tuple[str, Op]]] = {}
    for rank in range(plan.num_ranks):
        for stage in range(stages):
            ops = schedule(counts[rank], stage, stages, parts)
            todo = [("run", op) for op in ops]
            if messages != "free" and stages > 1:
                todo = one_by_one(counts[rank], stage, stages, parts, messages == "apart")
            programs[rank, stage] = todo
    at, clock = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)
    done: dict[tuple[int, int, str, int], int] = {}  # rank, model part of the whole, direction, slot -> end
    sent: set[tuple[int, int, str, int]] = set()
    asked: set[tuple[int, int, str, int]] = set()

    def place(key: Key, op: Op, by: int) -> tuple[int, int, str, int] | None:
        where = op[1] * stages + key[1] + (by if op[0] == "F" else -by)
        return (key[0], where, op[0], op[2]) if 0 <= where < stages * parts else None

    def try_run(key: Key, op: Op) -> bool:
        keys = [((r, key[1]), (op[0], op[1], slot)) for r, slot in groups[key[0], op[2]]]
        begin = 0
        for other, mine in keys:
            if at[other] >= len(programs[other]) or programs[other][at[other]] != ("run", mine):
                return False
            need = place(other, mine, -1)
            if op[0] == "B" and need is None:
                need = (other[0], stages * parts - 1, "F", mine[2])
            if need is not None and need not in done:
                return False
            begin = max(begin, clock[other], done[need] if need is not None else 0)
        lasts = max(cost[op[0], other[0], mine[2]] // parts if cost else 0 for other, mine in keys)
        for other, mine in keys:
            clock[other] = begin + lasts
            at[other] += 1
            here = place(other, mine, 0)
            assert here is not None
            done[here] = clock[other]
        return True

    def step(key: Key) -> bool:
        kind, op = programs[key][at[key]]
        if kind == "run":
            return try_run(key, op)
        here, there, back = place(key, op, 0), place(key, op, 1), place(key, op, -1)
        assert here is not None
        if (kind == "sent" and there is not None and there not in asked) or (
            kind == "came" and back is not None and back not in sent
        ):
            return False
        if kind in ("send", "ask"):
            (sent if kind == "send" else asked).add(here)
        at[key] += 1
        return True

    moved = True
    while moved:
        moved = False
        for key, todo in programs.items():
            while at[key] < len(todo) and step(key):
                moved = True
    if any(at[key] < len(todo) for key, todo in programs.items()):
        return None
    return [max(clock[rank, stage] for stage in range(stages)) for rank in range(plan.num_ranks)]
