"""One rank of benchmarks/attention.py: runs every variant of every case next to one rank's own run, and measures."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
from attention_machine import COARSE_S, DISTURBED, PeakMemory, busy_seconds, wait_until_quiet
from attention_rivals import TorchRing, context_parallel_error
from torch import Tensor

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.kernels import chosen_kernel
from megatron_hdp.attention.trace import Trace, exchange_seconds
from megatron_hdp.attention.traffic import exchange_bytes
from megatron_hdp.types import EXCHANGES, Plan


@dataclass(frozen=True)
class Shape:
    """Attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None
    kernel: str

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class Case:
    """One micro-batch: a sequence that all ranks share, and local ones."""

    name: str
    shared: int
    local: tuple[int, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One way of running a case on several ranks."""

    exchange: str
    head_ranks: int = 1
    overlap: bool = True
    rival: bool = False

    def name(self, ranks: int) -> str:
        """As tables show it."""
        return self.exchange if self.head_ranks in (1, ranks) else f"{self.exchange} {self.head_ranks} x ring"


ONE_RANK = Variant("one rank")
ONE_RANK_EACH = Variant("one rank, on every core at once")


@dataclass(frozen=True)
class Work:
    """What all ranks do, in the same order."""

    shape: Shape
    cases: tuple[Case, ...]
    variants: dict[int, tuple[Variant, ...]]
    """By number of ranks, each above 1."""
    repeats: int
    contended: bool
    """Also time all ranks running the whole case at once: what the machine loses when all its cores work."""
    deadline: float
    """Until then (seconds since 1970) disturbed measurements are made again."""
    store: str
    """File of the process group."""


@dataclass(frozen=True)
class Run:
    """One measurement, on one rank."""

    begin_s: float
    """Of a clock that all processes share."""
    end_s: float
    cpu_s: float
    busy_s: float
    """CPU seconds of the whole machine meanwhile."""
    exchange_s: tuple[float, float]
    """Seconds with an exchange in flight, and those of them spent waiting."""
    trace: Trace


@dataclass
class Found:
    """What one rank measured of one variant of one case."""

    case: str
    ranks: int
    variant: Variant
    error: float | None = None
    """Largest difference from one rank's results over their largest value, of output and gradients."""
    bytes_sent: int = 0
    bytes_expected: int | None = None
    peak_bytes: int | None = None
    """Memory at its highest, over what the process held before."""
    runs: list[Run] = field(default_factory=list)


def serve(rank: int, ranks: int, work: Work, answers: Connection) -> None:
    """Main function of one process: sends a list of `Found`, and the error of torch's context_parallel if any."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{work.store}", rank=rank, world_size=ranks, timeout=timedelta(hours=2)
    )
    groups = {size: dist.new_group(list(range(size))) for size in work.variants}
    for size, group in groups.items():
        if rank < size:
            RingComm(group, range(size)).warm_up()
    found: list[Found] = []
    small = Case("warm-up", 2 * math.lcm(*work.variants, 1))
    _Runner(work, small, rank, groups).warm_up()  # what is loaded and set up once is not the first variant's memory
    for case in work.cases:
        found += _Runner(work, case, rank, groups).run()
    # Last, because it leaves torch's attention patched where it fails.
    error = None
    if 2 in groups and rank < 2:
        with contextlib.redirect_stdout(sys.stderr):
            error = context_parallel_error(groups[2])
    answers.send((found, error))
    dist.barrier()
    dist.destroy_process_group()


def case_plan(case: Case, ranks: int, variant: Variant) -> Plan:
    """The case on ``ranks`` ranks, one micro-batch each: local sequences go, longest first, where least work is."""
    lengths = [case.shared, *case.local]
    held: list[list[int]] = [[0] for _ in range(ranks)]
    starts, load = [0] * len(lengths), [0] * ranks
    for sequence in sorted(range(1, len(lengths)), key=lambda s: -lengths[s]):
        starts[sequence] = load.index(min(load))
        load[starts[sequence]] += lengths[sequence] ** 2
        held[starts[sequence]].append(sequence)
    sizes = [ranks] + [1] * len(case.local)
    chosen = variant.exchange if variant.exchange in EXCHANGES and ranks > 1 else "ring"
    return Plan(
        num_ranks=ranks,
        capacity=sum(lengths) + 2 * ranks * len(lengths),
        pad_multiple=2,
        lengths=np.array(lengths),
        ring_start=np.array(starts),
        ring_size=np.array(sizes),
        offload=np.zeros(len(lengths)),
        rank_offsets=np.arange(ranks + 1),
        microbatch_offsets=np.cumsum([0, *map(len, held)]),
        piece_sequence=np.array([s for sequences in held for s in sorted(sequences)]),
        exchange=np.array([EXCHANGES.index(chosen)] + [0] * len(case.local)),
        head_ranks=np.array([variant.head_ranks] + [1] * len(case.local)),
    )


def token_rows(plan: Plan, rank: int) -> Tensor:
    """Index, among the real tokens of all sequences one after the other, of every row of a rank; -1 for padding."""
    first = np.cumsum(plan.lengths) - plan.lengths
    rows = []
    for piece in plan.micro_batch(rank, 0).pieces:
        for begin, end in piece.spans:
            tokens = np.arange(begin, end)
            rows.append(np.where(tokens < piece.length, first[piece.sequence] + tokens, -1))
    return torch.from_numpy(np.concatenate(rows))


type Tensors = tuple[Tensor, ...]
"""q, k, v and the gradient of the output; or output and the gradients of q, k and v."""


class _Runner:
    """All variants of one case on one rank."""

    def __init__(self, work: Work, case: Case, rank: int, groups: dict[int, dist.ProcessGroup]) -> None:
        self.work, self.case, self.rank, self.groups = work, case, rank, groups
        shape = self.shape = work.shape
        tokens = case.shared + sum(case.local)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        random = torch.Generator().manual_seed(1234)
        self.inputs: Tensors = tuple(
            torch.randn(tokens, count, shape.head_dim, generator=random).to(shape.torch_dtype) for count in heads
        )
        self.results: Tensors = ()
        self._parts: dict[tuple[int, bool], tuple[Tensor, Tensors]] = {}

    def part(self, size: int, plan: Plan, *, rival: bool) -> tuple[Tensor, Tensors]:
        """Rows of this rank (`token_rows`) and their inputs; the same for all variants."""
        key = size, rival
        if key not in self._parts:
            own = _rival_rows(self.case.shared, size, self.rank) if rival else token_rows(plan, self.rank % size)
            self._parts[key] = own, tuple(_taken(x, own) for x in self.inputs)
        return self._parts[key]

    def warm_up(self) -> tuple["_Task", list["_Task"]]:
        """Run one rank's task and all shared ones once."""
        one = _Task(self, 1, ONE_RANK)
        shared = [
            _Task(self, size, variant)
            for size, variants in self.work.variants.items()
            for variant in variants
            if not variant.rival or _rival_can(self.case, size)
        ]
        for task in (one, *shared):
            self._first(task)
        return one, shared

    def run(self) -> list[Found]:
        """Warm up, then time all tasks in turn, ``repeats`` times."""
        one, shared = self.warm_up()
        each = [_Task(self, 1, ONE_RANK_EACH)] if self.work.contended else []
        for _ in range(self.work.repeats):
            for task in (one, *each, *shared):
                self._timed(task)
        return [task.found for task in (one, *each, *shared) if task.found.runs]

    def _first(self, task: "_Task") -> None:
        """Warms up; and notes exactness, traffic and memory."""
        dist.barrier()
        if self.rank < task.size:
            before = 0 if task.comm is None else task.comm.bytes_sent
            with PeakMemory() as memory:
                results = task.call()
            task.found.peak_bytes = memory.peak
            if task.comm is not None:
                task.found.bytes_sent = task.comm.bytes_sent - before
        if task.variant == ONE_RANK:
            q, k, v, _ = self.inputs
            self.results = tuple(torch.empty_like(x) for x in (q, q, k, v))
            for index, whole in enumerate(self.results):
                if self.rank == 0:
                    real = task.rows >= 0
                    whole[task.rows[real]] = results[index][real]
                dist.broadcast(whole, 0)
        elif self.rank < task.size:
            task.found.error = max(_error(got, want, task.rows) for got, want in zip(results, self.results))

    def _timed(self, task: "_Task") -> None:
        """One measurement; while patience lasts, another one in its place if other processes disturbed it."""
        while True:
            if self.rank == 0:
                wait_until_quiet(self.work.deadline)
            dist.barrier()
            everywhere = task.variant == ONE_RANK_EACH and self.rank < len(os.sched_getaffinity(0))
            run = _measured(task) if self.rank < task.size or everywhere else None
            mine = [0.0, 0.0, 0.0] if run is None else [run.cpu_s, 0.0, 0.0]
            if self.rank == 0 and run is not None:
                mine[1:] = [run.busy_s, float(time.time() < self.work.deadline)]
            of_all = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(of_all)
            cpu, busy, patient = of_all.tolist()
            if not patient or busy < (1 + DISTURBED) * cpu + COARSE_S:
                break
        if run is not None:
            task.found.runs.append(run)


def _measured(task: "_Task") -> Run:
    trace = Trace()
    if task.comm is not None:
        task.comm.trace = trace
    busy, begin, cpu = busy_seconds(), time.perf_counter(), time.process_time()
    task.call()
    end, cpu_s, busy_s = time.perf_counter(), time.process_time() - cpu, busy_seconds() - busy
    return Run(begin, end, cpu_s, busy_s, exchange_seconds(trace), trace)


class _Task:
    """One variant of one case: its tensors and what was found."""

    def __init__(self, runner: _Runner, size: int, variant: Variant) -> None:
        self.size, self.variant = size, variant
        self.found = Found(runner.case.name, size, variant)
        shape, rank = runner.shape, runner.rank
        self.comm: RingComm | None = None
        if size > 1 and rank < size and not variant.rival:
            self.comm = RingComm(runner.groups[size], range(size), overlap=variant.overlap)
        plan = case_plan(runner.case, size, variant)
        if rank >= size and variant != ONE_RANK_EACH:
            return
        here = rank % size
        self.rows, inputs = runner.part(size, plan, rival=variant.rival)
        if variant.rival:
            self.call: Callable[[], Tensors] = TorchRing(runner.groups[size], inputs, variant.exchange).run
            return
        heads = (shape.heads, shape.kv_heads, shape.head_dim, shape.torch_dtype.itemsize)
        self.found.bytes_expected = int(exchange_bytes(plan, *heads, window=shape.window)[here])
        kernel = chosen_kernel(shape.kernel, torch.device("cpu"), shape.torch_dtype, shape.head_dim)
        micro_batch = plan.micro_batch(here, 0)
        scale, window, comm = shape.head_dim**-0.5, shape.window, self.comm
        dout = inputs[3]

        def call() -> Tensors:
            q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
            out = hdp_attention(q, k, v, micro_batch, here, comm, softmax_scale=scale, kernel=kernel, window=window)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

        self.call = call


def _rival_can(case: Case, ranks: int) -> bool:
    """torch's ring takes one sequence, in 2d equal chunks."""
    return not case.local and case.shared % (2 * ranks) == 0


def _rival_rows(length: int, ranks: int, rank: int) -> Tensor:
    """Zigzag without our walking order: rank p holds chunks p and 2d-1-p."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def _taken(whole: Tensor, rows: Tensor) -> Tensor:
    """The rows of a rank, padding 0."""
    taken = whole[rows.clamp(min=0)]
    taken[rows < 0] = 0
    return taken


def _error(got: Tensor, want: Tensor, rows: Tensor) -> float:
    """Largest difference of the real rows over the largest value."""
    real = rows >= 0
    difference = (got[real].float() - want[rows[real]].float()).abs().max()
    return float(difference / want.float().abs().max())
