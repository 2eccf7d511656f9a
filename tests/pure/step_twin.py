"""A dull simulation of a step: one event at a time, every ring step of every layer a meeting of two neighbours.

Nothing here comes from the simulator, the cost model or the planner's graphs: seconds are computed from the profile's
coefficients in floats, links by counting GPUs one by one, and lanes are generators that a heap of events wakes up.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from plan_twins import schedule

from megatron_hdp.simulator import Job
from megatron_hdp.types import Plan

# What a lane asks for: ("work", seconds), ("until", time), ("wait", keys). Posting and sending take no time.
Lane = Generator[tuple[str, Any], None, None]


@dataclass
class World:
    """Meetings: each has so many parties and lasts so long from when the last of them has come."""

    now: float = 0.0
    events: list[tuple[float, int, Any]] = field(default_factory=list)
    number: Any = field(default_factory=itertools.count)
    came: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    over: set[Any] = field(default_factory=set)
    waiting: dict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def at(self, time: float, action: Any) -> None:
        heapq.heappush(self.events, (time, next(self.number), action))

    def post(self, key: Any, parties: int, seconds: float) -> None:
        """One more party of a meeting has come."""
        self.came[key] += 1
        assert self.came[key] <= parties, key
        if self.came[key] == parties:
            self.at(self.now + seconds, ("over", key))

    def run(self, lanes: list[Lane]) -> None:
        """All lanes to their ends. A lane that never wakes up is an error."""
        left = len(lanes)
        for lane in lanes:
            self.at(0.0, ("lane", lane))
        while self.events:
            self.now, _, (kind, what) = heapq.heappop(self.events)
            if kind == "over":
                self.over.add(what)
                for wake in self.waiting.pop(what, []):
                    wake()
            else:
                left -= self.step(what)
        assert not left, f"{left} lanes wait forever"

    def step(self, lane: Lane) -> int:
        """Let a lane go on to its next request; 1 if it has ended."""
        try:
            kind, what = next(lane)
        except StopIteration:
            return 1
        if kind == "work":
            self.at(self.now + what, ("lane", lane))
        elif kind == "until":
            self.at(max(self.now, what), ("lane", lane))
        else:
            missing = [key for key in what if key not in self.over]
            left = [len(missing)]

            def wake() -> None:
                left[0] -= 1
                if left[0] == 0:
                    self.at(self.now, ("lane", lane))

            for key in missing:
                self.waiting[key].append(wake)
            if not missing:
                self.at(self.now, ("lane", lane))
        return 0


class Wires:
    """Which links a ring uses, by looking at each of its GPUs."""

    def __init__(self, job: Job, ranks: list[int], stage: int, pool: int) -> None:
        self.job, self.c, self.tp = job, job.cluster, job.tensor_parallel
        self.ranks, self.first = ranks, stage * pool * job.tensor_parallel
        self.hops: dict[Any, float] = {}

    def gpus(self, rank: int) -> list[int]:
        return [self.first + rank * self.tp + i for i in range(self.tp)]

    def node(self, gpu: int) -> int:
        return gpu // self.c.gpus_per_node

    def leaf(self, gpu: int) -> int:
        return 0 if self.c.nodes_per_leaf is None else self.node(gpu) // self.c.nodes_per_leaf

    def nic(self, gpu: int) -> tuple[int, int]:
        share = self.c.gpus_per_node / self.c.nics_per_node
        return self.node(gpu), int(gpu % self.c.gpus_per_node // share) if share >= 1 else gpu % self.c.gpus_per_node

    def nic_speed(self) -> float:
        return self.c.nic_bandwidth * max(1, self.c.nics_per_node / self.c.gpus_per_node)

    def pairs(self, by: int) -> list[tuple[int, int]]:
        """Hops between GPUs, all made at the same time."""
        size = len(self.ranks)
        return [
            pair
            for i in range(size)
            for pair in zip(self.gpus(self.ranks[i]), self.gpus(self.ranks[(i + by) % size]), strict=True)
        ]

    def hop_seconds(self, i: int, by: int, amount: float) -> float:
        """From place ``i`` of the ring, ``by`` places on, so many bytes of each GPU."""
        if (i, by, amount) not in self.hops:
            self.hops[i, by, amount] = self.hop(i, by, amount)
        return self.hops[i, by, amount]

    def hop(self, i: int, by: int, amount: float) -> float:
        pairs = self.pairs(by)
        one, other = (self.gpus(self.ranks[(i + step) % len(self.ranks)]) for step in (0, by))
        longest = 0.0
        for a, b in zip(one, other, strict=True):
            if self.node(a) == self.node(b):
                longest = max(longest, self.c.inside_latency + amount / self.c.inside_bandwidth)
                continue
            outside = [pair for pair in pairs if self.node(pair[0]) != self.node(pair[1])]
            sends = sum(self.nic(pair[0]) == self.nic(a) for pair in outside)
            gets = sum(self.nic(pair[1]) == self.nic(b) for pair in outside)
            speeds = [self.nic_speed() / sends, self.nic_speed() / gets]
            if self.leaf(a) != self.leaf(b):
                far = [pair for pair in pairs if self.leaf(pair[0]) != self.leaf(pair[1])]
                uplink = self.c.nodes_per_leaf * self.c.nics_per_node * self.c.nic_bandwidth / self.c.oversubscription
                speeds.append(uplink / sum(self.leaf(pair[0]) == self.leaf(a) for pair in far))
                speeds.append(uplink / sum(self.leaf(pair[1]) == self.leaf(b) for pair in far))
            longest = max(longest, self.c.nic_latency + amount / min(speeds))
        return longest

    def all_seconds(self, group: int, amount: float) -> float:
        """Groups of neighbours on the ring; each rank sends ``amount`` bytes, in equal parts, to the others."""
        inside, nics, leaves = defaultdict(float), defaultdict(float), defaultdict(float)
        for begin in range(0, len(self.ranks), group):
            members = self.ranks[begin : begin + group]
            for one, other in itertools.permutations(members, 2):
                for a, b in zip(self.gpus(one), self.gpus(other), strict=True):
                    part = amount / (group - 1)
                    if self.node(a) == self.node(b):
                        inside[a] += part
                        continue
                    nics[self.nic(a)] += part
                    if self.leaf(a) != self.leaf(b):
                        leaves[self.leaf(a)] += part
        times = [max(inside.values(), default=0) / self.c.inside_bandwidth]
        times.append(max(nics.values(), default=0) / self.nic_speed())
        if leaves:
            uplink = self.c.nodes_per_leaf * self.c.nics_per_node * self.c.nic_bandwidth / self.c.oversubscription
            times.append(max(leaves.values()) / uplink)
        return (self.c.nic_latency if nics else self.c.inside_latency) + max(times)


@dataclass
class Twin:
    """One step. ``gather`` and ``reduce``: seconds of each stage's parameters and gradients over the pool."""

    plan: Plan
    job: Job
    messages: list[float]
    """Seconds of each micro-batch's message between stages."""
    gather: list[float]
    reduce: list[float]
    load: list[float]
    """When each rank has its tokens."""
    world: World = field(default_factory=World)
    done: dict[Any, float] = field(default_factory=dict)
    """(stage, part, layer, rank) -> when the last micro-batch has run backward through it."""
    ends: dict[Any, float] = field(default_factory=dict)
    """(rank, stage) -> end of the last op."""
    layer_seconds: list[float] = field(default_factory=list)
    known: dict[Any, Wires] = field(default_factory=dict)

    def run(self) -> float:
        """End of all reductions."""
        lanes = [self.lane(rank, stage) for rank in range(self.plan.num_ranks) for stage in range(self.job.stages)]
        self.world.run(lanes)
        ends = []
        for stage in range(self.job.stages):
            last = max(self.ends[rank, stage] for rank in range(self.plan.num_ranks))
            if not self.job.sync.overlap_grad_reduce:
                ends.append(last + self.reduce[stage])
                continue
            buckets = defaultdict(float)
            for (of, part, layer, _), time in self.done.items():
                if of == stage:
                    buckets[part, layer] = max(buckets[part, layer], time)
            free = 0.0
            for ready in sorted(buckets.values()):
                free = max(free, ready) + self.reduce[stage] / len(buckets)
            ends.append(free)
        return max(ends)

    def wires(self, ranks: tuple[int, ...], stage: int) -> Wires:
        if (ranks, stage) not in self.known:
            self.known[ranks, stage] = Wires(self.job, list(ranks), stage, self.plan.num_ranks)
        return self.known[ranks, stage]

    @property
    def layers(self) -> int:
        """Of a model part."""
        return self.job.cost.layers_per_stage // self.job.virtual_stages

    def lane(self, rank: int, stage: int) -> Lane:
        count = int(self.plan.microbatch_counts[rank])
        last_place = self.job.stages * self.job.virtual_stages - 1
        yield "until", self.load[rank]
        for direction, part, slot in schedule(count, stage, self.job.stages, self.job.virtual_stages):
            place, forward = part * self.job.stages + stage, direction == "F"
            name = (rank, slot, direction)
            if place != (0 if forward else last_place):
                yield "wait", [("message", *name, place)]
            elif not forward:
                yield "wait", [("turn", *name)]
            for i in range(self.layers):
                if forward and slot == 0:
                    yield "until", self.gathered(stage, part, i)
                begin = self.world.now
                yield from self.layer(rank, stage, slot, part, i, forward)
                self.layer_seconds.append(self.world.now - begin)
                if not forward and slot == count - 1:
                    self.done[stage, part, i, rank] = self.world.now
            seconds = self.messages[int(self.plan.rank_offsets[rank]) + slot]
            after = place + 1 if forward else place - 1
            if 0 <= after <= last_place:
                self.world.post(("message", *name, after), 1, seconds)
            elif forward:
                self.world.post(("turn", rank, slot, "B"), 1, 0.0)
        self.ends[rank, stage] = self.world.now

    def gathered(self, stage: int, part: int, layer: int) -> float:
        if not self.job.sync.overlap_param_gather:
            return self.gather[stage]
        return self.gather[stage] * (part * self.layers + layer + 1) / self.job.cost.layers_per_stage

    def layer(self, rank: int, stage: int, slot: int, part: int, number: int, forward: bool) -> Lane:
        passes = [True] if forward else [True, False] if self.job.cost.recompute == "full" else [False]
        for direction in passes:
            where = (stage, part, number, forward, direction)
            profile = self.job.cost.layer_profile
            factor = 1.0 if direction else profile.linear_backward_factor
            tokens = 0
            yield "work", profile.microbatch_constant
            for piece in self.plan.micro_batch(rank, slot).pieces:
                tokens += piece.tokens
                yield "work", profile.sequence_constant
                yield from self.attention(piece, rank, (piece.sequence, *where), direction, stage)
            yield "work", profile.linear_forward * factor * tokens
        if self.job.expert_group > 1:
            key = ("experts", rank // self.job.expert_group, slot, stage, part, number, forward)
            self.world.post(key, self.job.expert_group, 0.0)
            yield "wait", [key]

    def attention(self, piece: Any, rank: int, where: Any, forward: bool, stage: int) -> Lane:
        profile = self.job.cost.layer_profile
        factor = 1.0 if forward else profile.attention_backward_factor
        step = profile.attention_forward * factor * piece.tokens**2
        if piece.ring.size == 1:
            yield "work", step
            return
        ranks = list(piece.ring.ranks)
        wires = self.wires(tuple(ranks), stage)
        at, kv, grad = ranks.index(rank), profile.kv_per_token, profile.kv_gradient_per_token
        if piece.exchange == "ring":
            yield from self.walk(wires, at, 1, step, piece.tokens * kv, piece.tokens * grad, where, forward)
        elif piece.exchange == "gather":
            rows = (len(ranks) - 1) * piece.tokens
            key = ("gather", where)
            self.world.post(key, len(ranks), wires.all_seconds(len(ranks), rows * kv))
            yield "work", step
            yield "wait", [key]
            yield "work", step * (len(ranks) - 1)
            if not forward:
                self.world.post((*key, "back"), len(ranks), wires.all_seconds(len(ranks), rows * grad))
                yield "wait", [(*key, "back")]
        else:
            yield from self.heads(wires, at, piece, step, where, forward)

    def walk(
        self, wires: Wires, at: int, by: int, step: float, kv: float, grad: float, where: Any, forward: bool
    ) -> Lane:
        """Slices of so many bytes go ``by`` places on at each of the steps."""
        size = len(wires.ranks) // by
        for k in range(size):
            amount = kv * (k < size - 1) + grad * (k > 0 and not forward)
            keys = self.meet(wires, at, by, amount, (*where, k)) if amount else []
            yield "work", step
            yield "wait", keys
        if not forward:
            yield "wait", self.meet(wires, at, by, grad, (*where, "home"))

    def meet(self, wires: Wires, at: int, by: int, amount: float, where: Any) -> list[Any]:
        """Send to the next, get from the one before."""
        before = (at - by) % len(wires.ranks)
        keys = [("hop", where, at), ("hop", where, before)]
        for key, place in zip(keys, (at, before), strict=True):
            self.world.post(key, 2, wires.hop_seconds(place, by, amount))
        return keys

    def heads(self, wires: Wires, at: int, piece: Any, step: float, where: Any, forward: bool) -> Lane:
        a, profile = piece.head_ranks, self.job.cost.layer_profile
        heads, kv_heads = self.job.cost.heads, self.job.cost.kv_heads
        head, own = profile.kv_per_token / (2 * kv_heads), max(kv_heads // a, 1)  # bytes of a head's keys; heads
        replicated = profile.kv_gradient_per_token / (2 * kv_heads) if a > kv_heads else head
        queries, keys, back = heads // a * head, 2 * own * head, 2 * own * replicated
        amounts = (queries + keys, queries) if forward else (queries, queries + back)
        rows = (a - 1) * piece.tokens

        def swap(turn: str, amount: float) -> Lane:
            key = ("swap", where, turn, at // a)
            self.world.post(key, a, wires.all_seconds(a, rows * amount))
            yield "wait", [key]

        yield from swap("ahead", amounts[0])
        share = a * piece.tokens * own / kv_heads
        if len(wires.ranks) > a:
            kv, grad = share * profile.kv_per_token, share * profile.kv_gradient_per_token
            yield from self.walk(wires, at, a, a * step, kv, grad, where, forward)
        else:
            yield "work", a * step
        yield from swap("after", amounts[1])
