"""Dull twins of the planner's clever parts: plain loops over pieces, and ranks run as a rendezvous simulation."""

from collections import Counter
from collections.abc import Iterator

from megatron_hdp.types import Plan

LAYERS = 2  # two are enough for a ring of the second layer to wait behind one of the first

Op = tuple[str, int, int]  # direction "F" or "B", model part of the stage, slot
Key = tuple[int, int]  # rank, stage


def assert_invariants(plan: Plan) -> None:
    """Every token once, rings as intervals, capacity, order, counts; by walking over every piece."""
    seen: Counter[tuple[int, int]] = Counter()
    tokens: dict[int, set[int]] = {s: set() for s in range(plan.num_sequences)}
    peers: dict[int, set[int]] = {r: set() for r in range(plan.num_ranks)}
    for rank, micro_batches in enumerate(plan):
        assert micro_batches, rank
        for micro_batch in micro_batches:
            assert sum(p.tokens - int(p.tokens * p.offload) for p in micro_batch.pieces) <= plan.capacity
            order = [p.sequence for p in micro_batch.pieces]
            assert order == sorted(set(order))
            for piece in micro_batch.pieces:
                assert rank in piece.ring.ranks
                assert piece.tokens % plan.pad_multiple == 0
                seen[piece.sequence, rank] += 1
                peers[rank].update(set(piece.ring.neighbours(rank)) - {rank})
                for begin, end in piece.spans:
                    span = set(range(begin, min(end, piece.length)))
                    assert not span & tokens[piece.sequence]
                    tokens[piece.sequence] |= span
    for sequence, length in enumerate(plan.lengths.tolist()):
        ring = plan.ring(sequence)
        assert set(ring.ranks) == set(range(ring.start, ring.start + ring.size)) <= set(range(plan.num_ranks))
        assert all(seen[sequence, rank] == 1 for rank in ring.ranks)
        assert tokens[sequence] == set(range(length))
    assert sum(seen.values()) == int(plan.ring_size.sum())
    assert max(len(others) for others in peers.values()) <= 4


def schedule(count: int, stage: int, stages: int, parts: int) -> list[Op]:
    """Order of forward and backward steps of one stage: no pipeline, 1F1B (parts 1) or interleaved."""
    total = count * parts
    warmup = stages - stage - 1 if parts == 1 else (stages - stage - 1) * 2 + (parts - 1) * stages
    warmup = min(warmup, total)

    def op(direction: str, k: int) -> Op:
        if parts == 1:
            return direction, 0, k
        group, rest = divmod(k, stages * parts)
        part = rest // stages
        return direction, part if direction == "F" else parts - 1 - part, group * stages + rest % stages

    ops = [op("F", k) for k in range(warmup)]
    for k in range(warmup, total):
        ops += [op("F", k), op("B", k - warmup)]
    return ops + [op("B", k) for k in range(total - warmup, total)]


def deadlocks(plan: Plan, stages: int = 1, parts: int = 1) -> bool:
    """Run every (rank, stage) as a program of ring rendezvous until nothing moves; True if someone is not done.

    A ring is met layer by layer, forward and again in backward; a stage's step also needs the step of its neighbour
    stage on the same rank. Sends between stages are buffered.
    """
    counts = plan.microbatch_counts.tolist()
    shared = [[[p for p in mb.pieces if p.ring.size > 1] for mb in mbs] for mbs in plan]

    def program(rank: int, stage: int) -> Iterator[tuple[str, Op, tuple[int, int]]]:
        for op in schedule(counts[rank], stage, stages, parts):
            yield "begin", op, (0, 0)
            for layer in range(LAYERS):
                for piece in shared[rank][op[2]]:
                    yield "ring", op, (layer, piece.sequence)
            yield "end", op, (0, 0)

    programs = {(r, p): list(program(r, p)) for r in range(plan.num_ranks) for p in range(stages)}
    at = dict.fromkeys(programs, 0)
    done: set[tuple[Key, Op]] = set()

    def needs(key: Key, op: Op) -> tuple[Key, Op] | None:
        (rank, stage), (direction, part, slot) = key, op
        place = part * stages + stage + (-1 if direction == "F" else 1)
        if direction == "B" and place == stages * parts:
            return key, ("F", part, slot)
        if place < 0:
            return None
        return (rank, place % stages), (direction, place // stages, slot)

    def meets(key: Key, event: tuple[str, Op, tuple[int, int]]) -> list[Key]:
        """Members of the ring if all of them stand at this ring, layer, direction and part; else nobody."""
        _, (direction, part, _), where = event
        keys = [(r, key[1]) for r in plan.ring(where[1]).ranks]
        for other in keys:
            if at[other] >= len(programs[other]):
                return []
            kind, op, place = programs[other][at[other]]
            if kind != "ring" or op[:2] != (direction, part) or place != where:
                return []
        return keys

    moved = True
    while moved:
        moved = False
        for key, steps in programs.items():
            while at[key] < len(steps):
                kind, op, _ = steps[at[key]]
                if kind == "begin":
                    need = needs(key, op)
                    if need is not None and need not in done:
                        break
                    at[key] += 1
                elif kind == "end":
                    done.add((key, op))
                    at[key] += 1
                else:
                    keys = meets(key, steps[at[key]])
                    if not keys:
                        break
                    for other in keys:
                        at[other] += 1
                moved = True
    return any(at[key] < len(steps) for key, steps in programs.items())
