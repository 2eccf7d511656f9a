"""Runs random plans on eight processes: Megatron's schedules, our communicator, rings over columns, tiny layers.

python run_plans.py SEED PLANS. Columns x stages are 4 x 2 and 2 x 4, each stage with one or two model parts. Plans are
the planner's own, and random ones that its check accepts, with rings in different slots of their columns. Each plan
must be done in `LIMIT_S` seconds, or every process shows where it stands and dies. A number that no layer touches rides
along with every tensor, activations and gradients, and tells on arrival of which micro-batch it is.
"""

import faulthandler
import functools
import itertools
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

sys.path.insert(0, str(Path(__file__).parents[1] / "pure"))

from column_executor import random_plan

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.kernels import pick_kernel
from megatron_hdp.errors import PlanError
from megatron_hdp.planner import check, plan
from megatron_hdp.planner.deadlock import same_slots
from megatron_hdp.seams.p2p import PlannedCommunicator
from megatron_hdp.types import MicroBatch, Plan

LIMIT_S = 20.0
HEADS, DIM = 2, 4
HIDDEN = HEADS * DIM
MARK = 0
"""The number that no layer touches."""


@dataclass(frozen=True)
class Place:
    """Where this process is in one layout."""

    stages: int
    column: int
    pipeline: Any
    alone: Any
    comm: RingComm


@dataclass(frozen=True)
class Case:
    """One plan, and how Megatron is to run it."""

    plan: Plan
    stages: int
    parts: int
    overlap: bool
    flush: bool
    forward_only: bool
    deallocate: bool


class Part(torch.nn.Module):
    """A model part: one layer of attention over rings."""

    def __init__(self, config: ModelParallelConfig, place: Place, is_first: bool, vp_stage: int | None) -> None:
        super().__init__()
        self.config, self.place, self.is_first, self.vp_stage = config, place, is_first, vp_stage
        self.model_type = None
        self.weights = torch.nn.Parameter(torch.randn(3, HIDDEN, HIDDEN) * 0.3)
        self.rest = torch.ones(HIDDEN)
        self.rest[MARK] = 0
        self.kernel = pick_kernel(torch.device("cpu"), torch.float32, DIM)
        self.input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self.input = tensors[0]

    def forward(self, slot: int, micro_batch: MicroBatch) -> torch.Tensor:
        rows = micro_batch.tokens or 2
        if self.is_first:
            x_T1H = torch.randn(rows, 1, HIDDEN)
            x_T1H[..., MARK] = slot
            x_T1H.requires_grad_()
        else:
            assert self.input is not None
            x_T1H = self.input
            assert bool((x_T1H[..., MARK] == slot).all()), f"input of slot {slot} is of {x_T1H[0, 0, MARK].item()}"
        assert x_T1H.shape == (rows, 1, HIDDEN)
        rest_TH = (x_T1H * self.rest)[:, 0]
        q, k, v = ((rest_TH @ weight).view(rows, HEADS, DIM) for weight in self.weights)
        place = self.place
        out_THD = hdp_attention(
            q, k, v, micro_batch, place.column, place.comm, softmax_scale=DIM**-0.5, kernel=self.kernel
        )
        y_T1H = x_T1H + out_THD.reshape(rows, 1, HIDDEN) * self.rest
        y_T1H.register_hook(functools.partial(require_gradient, slot))
        return y_T1H


def require_gradient(slot: int, gradient: torch.Tensor) -> None:
    assert bool((gradient[..., MARK] == slot + 0.5).all()), f"gradient of slot {slot} is {gradient[0, 0, MARK].item()}"


def forward_step(iterator: Any, model: Part) -> tuple[torch.Tensor, Any]:
    slot, micro_batch = next(iterator)

    def loss(y_T1H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        total = (y_T1H[..., MARK] * (slot + 0.5)).sum() + (y_T1H * model.rest).square().sum() * 0.1
        return total, torch.tensor(1, dtype=torch.int), {"slot": float(slot)}

    return model(slot, micro_batch), loss


def places() -> dict[int, Place]:
    """Layouts by number of stages; a process's rank is stage x columns + column, as in Megatron."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    found = {}
    for stages in (2, 4):
        columns = world // stages
        pipelines = [dist.new_group([stage * columns + c for stage in range(stages)]) for c in range(columns)]
        pools = [[stage * columns + c for c in range(columns)] for stage in range(stages)]
        groups = [dist.new_group(ranks) for ranks in pools]
        stage, column = divmod(rank, columns)
        comm = RingComm(groups[stage], pools[stage])
        comm.warm_up()
        found[stages] = Place(stages, column, pipelines[column], alone, comm)
    return found


def cases(seed: int, world: int) -> Any:
    """Endless, the same on all processes; yields None for a plan that the planner's check refuses."""
    rng = np.random.default_rng(seed)
    for stages, parts in itertools.cycle([(2, 1), (4, 1), (2, 2), (4, 2)]):
        columns = world // stages
        if rng.random() < 0.5:
            lengths = rng.integers(1, 12, int(rng.integers(1, 14))) * rng.choice([1, 1, 4], 1)
            capacity = 2 * int(rng.integers(max(2, -(-int(lengths.max()) // (2 * columns))), 24))
            made = plan(lengths, columns, capacity, balance="pp", stages=stages, virtual_stages=parts)
        else:
            made = random_plan(rng, stages, parts, shuffle=0.5, num_ranks=columns)
        overlap = parts > 1 and (stages == 2 or rng.random() < 0.6)
        flush, forward_only = overlap and rng.random() < 0.4, rng.random() < 0.1
        deallocate = rng.random() < 0.5
        try:
            check(made, stages=stages, virtual_stages=parts)
        except PlanError:
            yield None
            continue
        yield Case(made, stages, parts, overlap, flush, forward_only, deallocate)


def run(case: Case, place: Place) -> None:
    """One step of Megatron's schedule on this process's stage of its column."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=case.stages,
        virtual_pipeline_model_parallel_size=case.parts if case.parts > 1 else None,
        pipeline_dtype=torch.float32,
        microbatch_group_size_per_vp_stage=case.stages,
        overlap_p2p_comm=case.overlap,
        batch_p2p_comm=not case.overlap,
        overlap_p2p_comm_warmup_flush=case.flush,
        deallocate_pipeline_outputs=case.deallocate,
    )
    config.hidden_size, config.calculate_per_token_loss = HIDDEN, True
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = place.alone
    is_first, is_last = place.pipeline.rank() == 0, place.pipeline.rank() == case.stages - 1
    models = [
        Part(config, place, is_first and part == 0, part if case.parts > 1 else None) for part in range(case.parts)
    ]
    micro_batches = case.plan.micro_batches(place.column)
    communicator = PlannedCommunicator(place.pipeline, config)
    interleaved = schedules.forward_backward_pipelining_with_interleaving
    loop = interleaved if case.parts > 1 else schedules.forward_backward_pipelining_without_interleaving
    iterators = [iter(enumerate(micro_batches)) for _ in models]
    with communicator.step([each.tokens or 2 for each in micro_batches], forward_only=case.forward_only):
        losses = loop(
            forward_step_func=forward_step,
            data_iterator=iterators if case.parts > 1 else iterators[0],
            model=models if case.parts > 1 else models[0],
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=case.forward_only,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    assert [entry["slot"] for entry in losses] == (list(range(len(micro_batches))) if is_last else [])
    assert all((model.weights.grad is not None) == (not case.forward_only) for model in models)


def main(seed: int, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place_of = places()
    seen: Counter[str] = Counter()
    begin = time.monotonic()
    done = 0
    for index, case in enumerate(cases(seed, dist.get_world_size())):
        if done == number:
            break
        if case is None:
            seen["refused"] += 1
            continue
        print(f"plan {index}: {case.stages} stages of {case.parts}, counts {case.plan.microbatch_counts}", flush=True)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        torch.manual_seed(index * 100 + dist.get_rank())
        run(case, place_of[case.stages])
        faulthandler.cancel_dump_traceback_later()
        done += 1
        seen[f"{case.stages} stages of {case.parts}"] += 1
        seen["rings"] += bool((case.plan.ring_size > 1).any())
        seen["rings in different slots"] += not same_slots(case.plan)
        seen["unequal counts"] += len(set(case.plan.microbatch_counts.tolist())) > 1
    dist.barrier()
    print(f"done {done} in {time.monotonic() - begin:.1f} s: {dict(seen)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
