"""Messages between pipeline stages without a handshake: all stages of a column hold the same plan.

Megatron's communicator sends the shape of a tensor ahead of the tensor and waits for the device each time. Ours looks
the shape up: micro-batch k of the column has so many tokens, and the schedule says which k a message belongs to.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.planner.messages import message_order

Shape = tuple[int, int, int]
"""Rows of one tensor-parallel rank, 1, hidden size: Megatron's sequence-first layout."""


def refuse_pipeline(config: Any) -> None:
    """Raise `ConfigError` for what messages of planned shapes, or the order of the schedule, cannot be had with.

    Args:
        config: the model's TransformerConfig. No process group need exist yet.
    """
    stages = config.pipeline_model_parallel_size
    if stages == 1:
        return
    if config.use_ring_exchange_p2p:
        raise ConfigError("--use-ring-exchange-p2p needs a torch of its own, which --hdp does not know: drop the flag")
    if config.mtp_standalone:
        raise ConfigError(
            "--hdp: a pipeline stage of multi-token prediction alone gets tensors of other shapes than micro-batches "
            "have; put it on a stage with other layers in --pipeline-model-parallel-layout"
        )
    group = config.microbatch_group_size_per_vp_stage
    if config.virtual_pipeline_model_parallel_size is not None and group not in (None, stages):
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage is {group}: plans are made, and checked against "
            f"deadlock, for an order in which {stages} micro-batches, as many as there are pipeline stages, go through "
            f"a model part at a time; drop the flag, or set it to {stages}"
        )


class PlannedCommunicator(P2PCommunicator):  # type: ignore[misc]
    """Megatron's communicator, with shapes from the plan; of use inside `step` only."""

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        """``config``: the model's. It stays as it is; the communicator goes by a changed copy."""
        super().__init__(pp_group, config)
        self._model_config = config
        self._shapes: list[Shape] = []
        self._slots: dict[str, deque[int]] = {}
        self._sending: dict[str, Any] = {}

    @contextlib.contextmanager
    def step(self, tokens: Sequence[int], *, forward_only: bool) -> Iterator[None]:
        """Be ready for one call of Megatron's schedule.

        Args:
            tokens: of every micro-batch of this column, padding counted, whole rows of all tensor-parallel ranks.
            forward_only: the schedule's own argument.

        Raises:
            SeamError: a tensor of another shape than planned is sent, or a message too few or too many passes.
        """
        config = self._model_config
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._shapes = [(each // ranks, 1, config.hidden_size) for each in tokens]
        order = message_order(
            len(self._shapes),
            self.current_stage,
            self.total_stages,
            self.virtual_pipeline_model_parallel_size or 1,
            forward_only=forward_only,
        )
        self._slots = {
            name: deque(getattr(order, name)) for name in ("from_previous", "to_next", "from_next", "to_previous")
        }
        # copied anew in each step, because Megatron's loop sets timers on its config as it goes
        self.config = copy.copy(config)
        self.config.variable_seq_lengths = True  # shapes are asked for, in _communicate_shapes
        self.config.batch_p2p_sync = False  # a wait for the device, for versions of torch older than we run on
        self._sending = {}
        yield
        for handle in self._sending.values():
            if not handle.is_completed():
                handle.wait()
        left = {name: len(slots) for name, slots in self._slots.items() if slots}
        if left:
            raise SeamError(
                f"{self._place()}: Megatron's schedule ended with messages left: "
                + ", ".join(f"{number} {name}" for name, number in left.items())
            )

    def _communicate(self, **messages: Any) -> tuple[Tensor | None, Tensor | None, Any]:
        """Megatron's own; the newest messages that nobody has waited for yet are kept until the step ends.

        Megatron waits for the one before the newest. It drops the newest itself where forward passes alone overlap
        their messages (--overlap-p2p-communication-warmup-flush), and gloo then drops what was not sent by then.
        """
        previous, following, handles = super()._communicate(**messages)
        for name in ("send_next", "send_prev"):
            if handles and name in handles:
                self._sending[name] = handles[name]
        return previous, following, handles

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Shapes of what comes from the previous and from the next stage, None where nothing does."""
        self._check_sent("to_next", tensor_send_next)
        self._check_sent("to_previous", tensor_send_prev)
        coming = [
            self._shapes[self._next_slot(name)] if comes else None
            for name, comes in (("from_previous", recv_prev), ("from_next", recv_next))
        ]
        return coming[0], coming[1]

    def _check_sent(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        slot = self._next_slot(name)
        if tuple(tensor.shape) != self._shapes[slot]:
            raise SeamError(
                f"{self._place()}: micro-batch {slot} sends a tensor of shape {list(tensor.shape)} {name}, by the plan "
                f"it is {list(self._shapes[slot])} and that is what the other stage waits for"
            )

    def _next_slot(self, name: str) -> int:
        if not self._slots.get(name):
            raise SeamError(
                f"{self._place()}: Megatron's schedule passes a message {name} more than the {len(self._shapes)} "
                "micro-batches of this step have by the planner's order"
            )
        return self._slots[name].popleft()

    def _place(self) -> str:
        return f"pipeline stage {self.current_stage} of {self.total_stages}"
