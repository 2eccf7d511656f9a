"""Random plans on eight processes: none hangs, and every tensor that passes is of the micro-batch it should be of."""

import re
from pathlib import Path

import pytest
from forked import run_ranks

SCRIPT = str(Path(__file__).parent / "run_plans.py")


def seen(output: str) -> dict[str, int]:
    """What the plans that ran had: the script's last line."""
    return {name: int(number) for name, number in re.findall(r"'([^']+)': (\d+)", output.splitlines()[-1])}


def run_plans(seed: int, number: int, folder: Path, timeout: float) -> None:
    outcome = run_ranks(8, [SCRIPT, str(seed), str(number)], folder, launcher=False, timeout=timeout).check()
    found = [seen(output) for output in outcome.outputs]
    assert all(each == found[0] for each in found)
    layouts = [found[0][f"{stages} stages of {parts}"] for stages in (2, 4) for parts in (1, 2)]
    assert sum(layouts) == number
    assert min(layouts) > number // 6
    assert min(found[0]["rings"], found[0]["unequal counts"]) > number // 4
    assert found[0]["rings in different slots"] > number // 20


def test_random_plans_end(tmp_path):
    run_plans(1, 30, tmp_path, 100)


@pytest.mark.slow
def test_five_hundred_random_plans_end(tmp_path):
    run_plans(2, 500, tmp_path, 280)
