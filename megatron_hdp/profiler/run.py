"""The whole measurement: what a rank's `Work` and the links can say, made into a profile by rank 0."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.errors import ConfigError
from megatron_hdp.profiler.agree import Everyone
from megatron_hdp.profiler.assemble import Fits, Links, Machine, Model, build, link_of, stage_fit
from megatron_hdp.profiler.cases import Case, all_cases
from megatron_hdp.profiler.fit import Transfers, check_unseen, fit_layer, fit_line, fit_transfers
from megatron_hdp.profiler.links import exchanger, ring_sizes, time_copies, time_ring
from megatron_hdp.profiler.report import Findings, deliver
from megatron_hdp.profiler.request import ProfileRequest
from megatron_hdp.profiler.ring_steps import MOST_RANKS, NUM_RUNS, PIECES, RingSample, ring_steps, sample
from megatron_hdp.profiler.rounds import Runner, run_rounds
from megatron_hdp.profiler.samples import Measured, combine
from megatron_hdp.profiler.timer import Timer
from megatron_hdp.types import Ring

_SHARE = 0.8
"""Of the time, for the model; links and copies take little and the rest is reserve."""
_MOST_TRANSFER = 64 << 20


class Work(Protocol):
    """What a rank can be asked to run."""

    capacity: int
    windows: tuple[int | None, ...]
    """What a query sees in each layer of the whole model."""
    attention_window: int | None
    """That of the cases of attention: the widest."""
    device: torch.device
    timer: Timer

    @property
    def model(self) -> Model:
        """What follows from the model's shape."""

    @property
    def machine(self) -> Machine:
        """The rank's machine."""

    def has(self, case: Case) -> bool:
        """Can this rank run the case?"""

    def prepare(self, case: Case) -> Runner:
        """The function that runs it once. Raises MemoryError."""

    @property
    def ring_timer(self) -> Timer:
        """What times rings."""

    def ring_runner(self, ring: Ring, tokens: int) -> Runner:
        """The function that runs core attention of its piece of so many tokens once; all ranks of ``ring`` call it."""

    def activation_bytes(self, lengths: tuple[int, ...]) -> float:
        """Bytes that one layer keeps of a micro-batch."""


def run_profile(request: ProfileRequest, work: Work, comm: RingComm, everyone: Everyone, date: str) -> None:
    """Measure, and on rank 0 print the report and write the profile. Collective over all ranks.

    Raises ConfigError if the profile cannot be written, or too little could be measured for a fit.
    """
    begin = time.perf_counter()
    links, transfers = _links(work, comm, everyone)
    left = max(request.seconds / 2, request.seconds - (time.perf_counter() - begin))
    on_rings = _on_rings(work, comm)
    rounds = run_rounds(all_cases(work.capacity), work.has, work.prepare, _SHARE * left, everyone)
    measured = combine(everyone.gather(rounds.samples))
    capacity = _largest(measured, work.capacity)
    kept = _activations(work, everyone, [m.case for m in measured])
    samples = [each for own in everyone.gather(on_rings) for each in own]
    if everyone.rank != 0:
        return
    times = {m.case: m.seconds for m in measured}
    layer = fit_layer(times, work.windows, work.attention_window, capacity)
    activations = fit_line("activation bytes", list(kept), list(kept.values()), "tokens")
    rows = work.model.kv_per_token, work.model.kv_gradient_per_token
    sent = None if work.ring_timer.leaves_waiting_out else links.inside or links.across
    steps = ring_steps(samples, layer, rows, None if sent is None else link_of(sent))
    fits = Fits(layer, activations, stage_fit(times, "loss"), stage_fit(times, "embedding"), steps)
    profile = build(Path(request.out).stem, date, work.model, work.machine, fits, links, capacity)
    findings = Findings(
        measured=measured,
        left_out=rounds.left_out,
        fits=fits,
        unseen=check_unseen(times, layer),
        transfers=transfers,
        clock=work.timer.name,
        seconds=time.perf_counter() - begin,
    )
    deliver(profile, findings, request.out)


def _links(work: Work, comm: RingComm, everyone: Everyone) -> tuple[Links, tuple[Transfers, ...]]:
    """Transfers inside nodes and over the whole pool, and copies alone and beside them."""
    per_node = work.machine.gpus_per_node
    nodes = [rank // per_node for rank in comm.ranks]
    mine = [place for place, node in enumerate(nodes) if node == nodes[comm.rank]]
    inner = Ring(mine[0], len(mine)) if len(mine) > 1 else None
    outer = Ring(0, comm.size) if len(set(nodes)) > 1 else None
    largest = min(_MOST_TRANSFER, int(work.model.kv_gradient_per_token * work.capacity))
    sizes = ring_sizes(largest)
    found: dict[str, Transfers] = {}
    for name, ring in (("inside nodes", inner), ("across nodes", outer)):
        times = time_ring(comm, ring, sizes, everyone)
        if times is not None:
            found[name] = fit_transfers(name, sizes, *times)
    alone = time_copies(everyone)
    if not alone.pinned and everyone.device.type == "cuda":
        print("megatron_hdp: WARNING: this machine locks no host memory: copies were timed without", flush=True)
    shared = None
    ring = outer or inner
    if found and ring is not None:
        slope = list(found.values())[-1].fit.coefficients[1]
        shared = time_copies(everyone, exchanger(comm, ring, work.device), 1 / slope if slope > 0 else 1e9)
    copies = [(c.out, c.back) for c in (alone, shared) if c is not None]
    medians = [[statistics.median(part) for part in zip(*each)] for each in zip(*everyone.gather(copies))]
    beside = medians[1] if len(medians) > 1 else [None, None]
    inside, across = (found[name].fit if name in found else None for name in ("inside nodes", "across nodes"))
    return Links(inside, across, *medians[0], *beside), tuple(found.values())


def _on_rings(work: Work, comm: RingComm) -> list[RingSample]:
    """Core attention on a ring of the pool's first ranks of one node, on those that are on it."""
    nodes = [rank // work.machine.gpus_per_node for rank in comm.ranks]
    ring = Ring(0, min(MOST_RANKS, nodes.count(nodes[0]) if nodes.count(nodes[0]) > 1 else comm.size))
    if ring.size < 2 or comm.rank >= ring.size:
        return []
    found = []
    for tokens in (tokens for tokens in PIECES if tokens <= work.capacity):
        run = work.ring_runner(ring, tokens)
        found.append(sample(tokens, ring.size, [run() for _ in range(NUM_RUNS)]))
    return found


def _largest(measured: Sequence[Measured], capacity: int) -> int:
    """Tokens of the largest micro-batch that was measured. Raises ConfigError if there are too few for a fit."""
    lengths = {m.case.tokens for m in measured if m.case.kind == "attention"}
    whole = [m for m in measured if m.case.kind == "layers" and not m.case.unseen]
    if len(lengths) < 3 or len(whole) < 3:
        raise ConfigError(
            f"profile: only {len(lengths)} lengths were measured before time or memory ran out (capacity {capacity}): "
            "raise --seconds, or lower --hdp-tokens-per-rank"
        )
    return max(m.case.tokens for m in whole)


def _activations(work: Work, everyone: Everyone, cases: Sequence[Case]) -> dict[int, float]:
    """Tokens to bytes kept by one layer, of every micro-batch of one sequence; of the rank that keeps most."""
    tokens = sorted({case.tokens for case in cases if case.kind == "layers" and len(case.lengths) == 1})
    layer = Case("layers", (2,))
    own = [work.activation_bytes((length,)) if work.has(layer) else 0.0 for length in tokens]
    return dict(zip(tokens, everyone.most(*own)))
