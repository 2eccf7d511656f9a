"""Megatron's own pipeline loops, run one stage at a time in one process, with our communicator and parts that check."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication, schedules, utils
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hdp.seams.p2p import PlannedCommunicator

HIDDEN = 4


@dataclass(frozen=True)
class Loop:
    """One stage of one column, and what its schedule does with messages."""

    stage: int
    stages: int
    parts: int = 1
    overlap: bool = False
    flush: bool = False
    forward_only: bool = False


@dataclass
class Passed:
    """What one stage did."""

    messages: list[tuple[str, str, int]] = field(default_factory=list)
    """("send" or "receive", "forward" or "backward", rows), in the order in which Megatron posts them."""
    forward: int = 0
    backward: int = 0
    """Micro-batches, counted once for each model part."""
    handles: list["Handle"] = field(default_factory=list)
    """Of messages that Megatron does not wait for at once."""


class Handle:
    """A message on its way, which may be waited for once, as with gloo."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        assert not self.waited
        self.waited = True

    def is_completed(self) -> bool:
        return self.waited


class Nobody(p2p_communication.P2PCommunicator):
    """Megatron's communicator, but nobody is at the other end: what is received is empty, in the shape asked for."""

    passed: Passed

    def _communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, Any]:
        assert self.config.variable_seq_lengths
        assert not self.config.batch_p2p_sync
        shapes = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        came = [torch.empty(shape) if comes else None for shape, comes in zip(shapes, (recv_prev, recv_next))]
        posted = {
            "send_next": ("send", "forward", tensor_send_next),
            "recv_prev": ("receive", "forward", came[0]),
            "send_prev": ("send", "backward", tensor_send_prev),
            "recv_next": ("receive", "backward", came[1]),
        }
        odd = self.current_stage % 2
        order = ("recv_prev", "send_next", "recv_next", "send_prev") if odd else tuple(posted)
        handles: dict[str, Handle] = {}
        for name in order:
            way, phase, tensor = posted[name]
            if tensor is not None:
                self.passed.messages.append((way, phase, tensor.shape[0]))
                handles[name] = Handle()
        if wait_on_reqs:
            return came[0], came[1], None
        self.passed.handles.extend(handles.values())
        return came[0], came[1], handles


class Alone(PlannedCommunicator, Nobody):
    """Ours, on top of that."""


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages without process groups, on a machine without CUDA."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group.rank())
    monkeypatch.setattr(utils, "get_pg_size", lambda group: group.size())
    monkeypatch.setattr(p2p_communication.dist, "get_global_rank", lambda group, rank: rank)


def run(monkeypatch: pytest.MonkeyPatch, loop: Loop, tokens: list[int], sent: list[int] | None = None) -> Passed:
    """Run the loop over micro-batches of ``tokens``; the model makes tensors of ``sent`` rows, if given."""
    passed = Passed()
    made = tokens if sent is None else sent

    def forward_step(
        step_func, iterator, model, number, input_tensor, *args, current_microbatch, vp_stage=None, **more
    ):
        is_list = isinstance(input_tensor, list)
        came = input_tensor[0] if is_list else input_tensor
        is_first = loop.stage == 0 and not vp_stage
        assert (came is None) if is_first else (tuple(came.shape) == (tokens[current_microbatch], 1, HIDDEN))
        output = torch.empty(made[current_microbatch], 1, HIDDEN)
        output.slot = current_microbatch
        passed.forward += 1
        return ([output] if is_list else output), 0

    def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
        is_list = isinstance(input_tensor, list)
        came, output, grad = (
            x[0] if isinstance(x, list) else x for x in (input_tensor, output_tensor, output_tensor_grad)
        )
        if grad is not None:
            assert tuple(grad.shape) == (tokens[output.slot], 1, HIDDEN)
        passed.backward += 1
        result = None if came is None else torch.empty_like(came)
        return [result] if is_list else result

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(schedules, "backward_step", backward_step)
    config = ModelParallelConfig(
        pipeline_model_parallel_size=loop.stages,
        virtual_pipeline_model_parallel_size=loop.parts if loop.parts > 1 else None,
        pipeline_dtype=torch.float32,
        microbatch_group_size_per_vp_stage=loop.stages,
        overlap_p2p_comm=loop.overlap,
        batch_p2p_comm=not loop.overlap,
        overlap_p2p_comm_warmup_flush=loop.flush,
    )
    config.hidden_size = HIDDEN
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    models = [torch.nn.Module() for _ in range(loop.parts)]
    for model in models:
        model.config, model.model_type = config, None
    interleaved = schedules.forward_backward_pipelining_with_interleaving
    plain = schedules.forward_backward_pipelining_without_interleaving
    communicator = Alone(SimpleNamespace(rank=lambda: loop.stage, size=lambda: loop.stages), config)
    communicator.passed = passed
    with communicator.step(tokens, forward_only=loop.forward_only):
        (interleaved if loop.parts > 1 else plain)(
            forward_step_func=None,
            data_iterator=[None] * loop.parts,
            model=models,
            num_microbatches=len(made),
            seq_length=999,  # must not matter
            micro_batch_size=1,
            forward_only=loop.forward_only,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    assert all(handle.waited for handle in passed.handles)
    assert config.batch_p2p_sync  # the model's own config stays as Megatron made it
    assert not config.variable_seq_lengths
    return passed
