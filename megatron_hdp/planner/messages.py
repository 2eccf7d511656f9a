"""Which micro-batch each message between pipeline stages belongs to, for a receiver that has to know its shape."""

from dataclasses import dataclass

from megatron_hdp.planner.schedule import BACKWARD, FORWARD, next_place, previous_place, schedule


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """Slots of the micro-batches of which one stage passes messages, in the order of the messages.

    Each of the four has an order of its own: how they mix depends on what the schedule overlaps, and they never take
    each other's place.
    """

    from_previous: tuple[int, ...]
    """Activations that come."""
    to_next: tuple[int, ...]
    """Activations that leave."""
    from_next: tuple[int, ...]
    """Gradients that come."""
    to_previous: tuple[int, ...]
    """Gradients that leave."""


def message_order(
    count: int, stage: int, stages: int, virtual_stages: int = 1, *, forward_only: bool = False
) -> MessageOrder:
    """Messages of one stage in one step: it asks for inputs, and passes results on, in the order of its ops.

    Args:
        count: micro-batches of the column; a multiple of ``stages`` if virtual_stages > 1.
        stage: 0 .. stages - 1.
        stages: pipeline stages.
        virtual_stages: model parts per stage.
        forward_only: no backward pass, as in evaluation; the forward passes keep their order.
    """
    ops = schedule(count, stage, stages, virtual_stages)
    forward = [op for op in ops if op.phase == FORWARD]
    backward = [] if forward_only else [op for op in ops if op.phase == BACKWARD]
    layout = (stage, stages, virtual_stages)
    return MessageOrder(
        from_previous=tuple(op.slot for op in forward if previous_place(op, *layout)),
        to_next=tuple(op.slot for op in forward if next_place(op, *layout)),
        from_next=tuple(op.slot for op in backward if previous_place(op, *layout)),
        to_previous=tuple(op.slot for op in backward if next_place(op, *layout)),
    )
