"""Rotary positions; the comparison needs Megatron's modules, so it runs in a process of its own."""

from forked import run_ranks

HERE = __file__.rpartition("/")[0]


def test_angles_are_megatrons_at_all_positions_up_to_two_million(tmp_path):
    outcome = run_ranks(1, [f"{HERE}/rotary.py"], tmp_path, launcher=False).check()
    assert "all bit-equal" in outcome.output
