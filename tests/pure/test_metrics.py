"""The lines of --hdp-log."""

import json

import numpy as np

from megatron_hdp.metrics import RingTraffic, StepLog, record_step
from megatron_hdp.planner import plan


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    """A step whose labels all do not count has no mean loss."""
    traffic = RingTraffic(
        layer_windows=(None,), recomputed=(False,), heads=2, kv_heads=1, head_dim=8, bytes_per_element=2
    )
    record = record_step(0, traffic, 3, plan(np.array([8, 40]), 2, 32), (0.5, 0.25))
    log = StepLog(str(tmp_path / "new" / "log.jsonl"))
    log.write(record, {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    log.write(record, {"loss": 2.5, "grad_norm": None, "learning_rate": np.float64("-inf")})

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    lines = (tmp_path / "new" / "log.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert (first["loss"], first["grad_norm"], first["learning_rate"]) == (None, None, 0.1)
    assert (second["loss"], second["grad_norm"], second["learning_rate"]) == (2.5, None, None)
    assert (first["step"], first["tokens"], first["plan_seconds"]) == (3, 48, 0.5)
