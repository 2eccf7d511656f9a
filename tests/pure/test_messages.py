"""The table of messages: what a stage sends is what the next one waits for, in the order of its exchanges."""

import pytest

from megatron_hdp.planner.messages import MessageOrder, message_order
from megatron_hdp.planner.schedule import BACKWARD, FORWARD, Exchange, steps

CASES = [(stages, parts) for stages in range(2, 6) for parts in range(1, 4)]


def counts(stages: int, parts: int) -> list[int]:
    return [stages * turns for turns in range(1, 5)] if parts > 1 else list(range(1, 3 * stages + 2))


@pytest.mark.parametrize(("stages", "parts"), CASES)
@pytest.mark.parametrize("messages", ["together", "apart"])
def test_messages_are_those_of_the_exchanges(stages, parts, messages):
    for count in counts(stages, parts):
        for stage in range(stages):
            made = [step for step in steps(count, stage, stages, parts, messages) if isinstance(step, Exchange)]
            asks = [op for exchange in made for op in exchange.asks]
            sends = [op for exchange in made for op in exchange.sends]
            assert message_order(count, stage, stages, parts) == MessageOrder(
                from_previous=tuple(op.slot for op in asks if op.phase == FORWARD),
                to_next=tuple(op.slot for op in sends if op.phase == FORWARD),
                from_next=tuple(op.slot for op in asks if op.phase == BACKWARD),
                to_previous=tuple(op.slot for op in sends if op.phase == BACKWARD),
            )


@pytest.mark.parametrize(("stages", "parts"), CASES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_what_is_sent_is_what_is_waited_for(stages, parts, forward_only):
    for count in counts(stages, parts):
        orders = [message_order(count, stage, stages, parts, forward_only=forward_only) for stage in range(stages)]
        for stage, order in enumerate(orders):
            after = orders[(stage + 1) % stages]
            assert order.to_next == after.from_previous
            assert after.to_previous == order.from_next
        forward = sum(len(order.to_next) for order in orders)
        assert forward == count * (stages * parts - 1)  # one message for each border between model parts
        assert sum(len(order.to_previous) for order in orders) == (0 if forward_only else forward)


def test_by_hand():
    # stage 1 of 2: its part 0 follows stage 0's part 0; its part 1 is the last of the model
    order = message_order(2, 1, 2, 2)
    assert order == MessageOrder(from_previous=(0, 1, 0, 1), to_next=(0, 1), from_next=(0, 1), to_previous=(0, 1, 0, 1))
    assert message_order(3, 0, 2) == MessageOrder((), (0, 1, 2), (0, 1, 2), ())
    assert message_order(3, 0, 2, forward_only=True) == MessageOrder((), (0, 1, 2), (), ())
    # four micro-batches go through a part two at a time
    assert message_order(4, 0, 2, 2).to_next == (0, 1, 0, 1, 2, 3, 2, 3)


def test_without_a_pipeline_nothing_passes():
    assert message_order(5, 0, 1) == MessageOrder((), (), (), ())
