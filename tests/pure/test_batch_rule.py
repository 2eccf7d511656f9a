"""A run that goes on from a checkpoint keeps the rule that cuts the data into steps, or is refused."""

import pytest

from megatron_hdp.batch_rule import BatchRule, first_rule, resumed_rule
from megatron_hdp.errors import ConfigError


def resumed(batch_tokens, sequences, saved):
    return resumed_rule(batch_tokens, sequences, saved, checkpoint="--load DIR, iteration 3")


@pytest.mark.parametrize(
    ("batch_tokens", "sequences", "rule"),
    [
        (None, None, BatchRule(None, 4)),  # the pool
        (None, 7, BatchRule(None, 7)),
        (1000, None, BatchRule(1000, 10)),
        (99, None, BatchRule(99, 1)),
        (1000, 7, BatchRule(1000, 7)),
    ],
)
def test_rule_of_a_run_that_starts(batch_tokens, sequences, rule):
    assert first_rule(batch_tokens, sequences, context=96, pool_size=4) == rule


@pytest.mark.parametrize("saved", [BatchRule(None, 7), BatchRule(300, 3)])
def test_the_same_rule_or_none_goes_on(saved):
    assert resumed(None, None, saved) == saved
    assert resumed(saved.batch_tokens, saved.sequences, saved) == saved


def test_a_budget_alone_keeps_what_the_schedule_counts():
    assert resumed(300, None, BatchRule(300, 5)) == BatchRule(300, 5)


@pytest.mark.parametrize(
    ("batch_tokens", "sequences", "saved", "asked"),
    [
        (None, 8, BatchRule(None, 7), "--global-batch-size 8"),
        (200, None, BatchRule(300, 3), "--hdp-batch-tokens 200"),
        (300, None, BatchRule(None, 7), "--hdp-batch-tokens 300"),
        (None, 3, BatchRule(300, 3), "--global-batch-size 3"),
        (300, 4, BatchRule(300, 3), "--hdp-batch-tokens 300 --global-batch-size 4"),
    ],
)
def test_another_rule_is_refused_with_both(batch_tokens, sequences, saved, asked):
    with pytest.raises(ConfigError) as caught:
        resumed(batch_tokens, sequences, saved)
    message = str(caught.value)
    assert message.startswith(f"--load DIR, iteration 3, was made with {saved.flags}, and this run asks for {asked}")
    assert f"Set {saved.flags}, or" in message
