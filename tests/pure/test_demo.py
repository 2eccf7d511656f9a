"""The demo's own arithmetic; the training that it starts is that of the other tests."""

import runpy
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.mark.parametrize(("iterations", "warm_up"), [(1, 0), (2, 1), (3, 2), (8, 2)])
def test_warm_up_is_shorter_than_the_run(iterations, warm_up):
    """Megatron stops at an assertion otherwise."""
    flags = runpy.run_path(str(DEMO))["_data_flags"](Path("corpus"), iterations)
    assert flags[flags.index("--lr-warmup-iters") + 1] == str(warm_up)
    assert flags[flags.index("--train-iters") + 1] == str(iterations)


@pytest.mark.parametrize("iterations", ["0", "-1"])
def test_no_iterations_are_refused(iterations, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", f"--iterations={iterations}"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(DEMO), run_name="__main__")
    assert f"--iterations {iterations}: it must be at least 1" in capsys.readouterr().err
