"""Orders of pipeline stages: each op once, messages matched, and few micro-batches run in the order of many."""

import pytest
from plan_twins import schedule as dull_schedule

from megatron_hdp.planner.schedule import BACKWARD, FORWARD, Exchange, Op, next_place, previous_place, schedule, steps

CASES = [(stages, parts) for stages in range(1, 6) for parts in range(1, 4) if stages > 1 or parts == 1]


def counts(stages: int, parts: int) -> list[int]:
    return [stages * turns for turns in range(1, 5)] if parts > 1 else list(range(1, 3 * stages + 2))


@pytest.mark.parametrize(("stages", "parts"), CASES)
def test_order_is_that_of_the_dull_twin(stages, parts):
    for count in counts(stages, parts):
        for stage in range(stages):
            ours = schedule(count, stage, stages, parts)
            assert [("FB"[op.phase], op.part, op.slot) for op in ours] == dull_schedule(count, stage, stages, parts)
            assert sorted(ours) == sorted(
                Op(phase, slot, part) for phase in (FORWARD, BACKWARD) for slot in range(count) for part in range(parts)
            )


@pytest.mark.parametrize(("stages", "parts"), CASES)
def test_few_micro_batches_run_in_the_order_of_many(stages, parts):
    most = counts(stages, parts)[-1]
    for stage in range(stages):
        many = schedule(most, stage, stages, parts)
        for count in counts(stages, parts):
            assert schedule(count, stage, stages, parts) == [op for op in many if op.slot < count]


@pytest.mark.parametrize(("stages", "parts"), [case for case in CASES if case[0] > 1])
@pytest.mark.parametrize("messages", ["together", "apart"])
def test_every_message_is_sent_once_and_asked_for_once_in_the_same_order(stages, parts, messages):
    for count in counts(stages, parts):
        sent: dict[tuple[int, int, int], list[Op]] = {}  # from stage, to stage, phase -> ops that take over, in order
        asked: dict[tuple[int, int, int], list[Op]] = {}
        for stage in range(stages):
            ran: set[Op] = set()
            for step in steps(count, stage, stages, parts, messages):
                if not isinstance(step, Exchange):
                    ran.add(step)
                    continue
                for op in step.sends:
                    assert op in ran  # a result leaves after it was made
                    there, taken = next_place(op, stage, stages, parts)
                    sent.setdefault((stage, there, op.phase), []).append(taken)
                for op in step.asks:
                    assert op not in ran  # an input comes before it is used
                    back, _ = previous_place(op, stage, stages, parts)
                    asked.setdefault((back, stage, op.phase), []).append(op)
        assert sent == asked  # NCCL and gloo match messages by order alone
        total = sum(len(ops) for ops in sent.values())
        assert total == 2 * count * (stages * parts - 1)


def test_free_messages_need_no_exchanges():
    assert steps(4, 0, 2, 2, "free") == schedule(4, 0, 2, 2)
