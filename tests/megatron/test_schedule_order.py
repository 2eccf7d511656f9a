"""The planner's order of operations and exchanges against Megatron's own pipeline loops, run with recording parts."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules, utils
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hdp.planner.schedule import BACKWARD, FORWARD, Op, schedule, steps


class Recorder(P2PCommunicator):
    """One stage's communicator: writes down what passes, receives what nobody sent."""

    def __init__(self, stage: int, stages: int, config: ModelParallelConfig, record: list) -> None:
        self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: stages)
        self.config, self.record = config, record
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _communicate(
        self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
    ):
        sends = tuple(op for op in (tensor_send_next, tensor_send_prev) if op is not None)
        self.record.append((sends, recv_prev, recv_next, wait_on_reqs))
        return ("input" if recv_prev else None), ("input" if recv_next else None), (None if wait_on_reqs else {})


@pytest.fixture
def loops(monkeypatch):
    """Megatron's schedule of (count, stage, stages, virtual stages, overlap) as a list of ops and exchanges."""
    record: list = []

    def forward_step(*args, current_microbatch, vp_stage=None, **kwargs):
        op = Op(FORWARD, current_microbatch, vp_stage or 0)
        record.append(op)
        return op, 0

    def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
        op = output_tensor._replace(phase=BACKWARD)
        record.append(op)
        return op

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(schedules, "backward_step", backward_step)
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group.rank())
    monkeypatch.setattr(utils, "get_pg_size", lambda group: group.size())

    def run(count: int, stage: int, stages: int, parts: int, overlap: bool) -> list:
        record.clear()
        config = ModelParallelConfig(
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=parts if parts > 1 else None,
            pipeline_dtype=torch.float32,
            microbatch_group_size_per_vp_stage=stages,
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
        )
        config.hidden_size = 8
        groups = ProcessGroupCollection()
        groups.tp = groups.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        models = [torch.nn.Module() for _ in range(parts)]
        for model in models:
            model.config, model.model_type = config, None
        loop = (
            schedules.forward_backward_pipelining_with_interleaving
            if parts > 1
            else schedules.forward_backward_pipelining_without_interleaving
        )
        loop(
            forward_step_func=None,
            data_iterator=[None] * parts,
            model=models,
            num_microbatches=count,
            seq_length=4,
            micro_batch_size=1,
            p2p_communicator=Recorder(stage, stages, config, record),
            pg_collection=groups,
        )
        return [*record]

    return run


def plain(step):
    """A step of ours in the recorder's terms; None where nothing passes."""
    if isinstance(step, Op):
        return step
    asks = [op.phase for op in step.asks]
    return (step.sends, FORWARD in asks, BACKWARD in asks, step.waits) if step.sends or asks else None


def without_idle(found: list) -> list:
    """Exchanges in which something passes; whether one waits for its inputs matters only where inputs come."""
    kept = [step for step in found if step is not None and (isinstance(step, Op) or any(step[:3]))]
    return [step if isinstance(step, Op) or any(step[1:3]) else (*step[:3], True) for step in kept]


CASES = [(count, stages, 1) for stages in range(2, 7) for count in range(1, 2 * stages + 3)]
CASES += [(turns * stages, stages, parts) for stages in range(2, 6) for parts in (2, 3, 4) for turns in (1, 2, 3)]


@pytest.mark.parametrize("overlap", [False, True])
def test_ops_and_exchanges_are_megatrons(loops, overlap):
    seen = 0
    for count, stages, parts in CASES:
        if overlap and parts == 1:
            continue  # Megatron refuses it
        for stage in range(stages):
            theirs = loops(count, stage, stages, parts, overlap)
            assert schedule(count, stage, stages, parts) == [step for step in theirs if isinstance(step, Op)]
            ours = steps(count, stage, stages, parts, "apart" if overlap else "together")
            assert without_idle([plain(step) for step in ours]) == without_idle(theirs)
            seen += len(theirs)
    assert seen > 1000


def test_without_a_pipeline_each_micro_batch_ends_before_the_next():
    assert schedule(2, 0, 1) == [Op(FORWARD, 0, 0), Op(BACKWARD, 0, 0), Op(FORWARD, 1, 0), Op(BACKWARD, 1, 0)]
