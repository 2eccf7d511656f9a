"""The same batch gives the same plan, to the byte, on every platform, in every process, with and without C++."""

import json
import os
import subprocess
import sys
from pathlib import Path

import golden_plans
import pytest

GOLDEN = {
    "hdp": "bb9c58ebed17b95e13a87fdfc515886f001607367f0aa2c53214823598af6b9a",
    "static": "0918b51349b5f6ecccd6032359a8d050236d336f76125f2fe78373dca200a802",
    "pipeline": "2e482e0d284638f540fb42e00932f366643e09c975ab4cd141751f83738c1cbe",
    "interleaved": "1c1f05c8f75ce35d1df6a6b0fa498a71e26e9f485a4dfe8b50a5a4245455c23e",
    "experts": "f96269539d859596796fa7506d2db8341e80395a386da7d221615b8e555df1ff",
}
"""Name -> SHA-256. A change here is a change of algorithm, and belongs in its commit's message: run golden_plans.py."""


def test_plans_have_not_changed_by_accident():
    assert golden_plans.digests() == GOLDEN


def test_the_batch_has_everything_in_it():
    lengths = golden_plans.batch()
    assert sum(length <= golden_plans.CAPACITY for length in lengths) > 100
    assert sum(length > golden_plans.CAPACITY for length in lengths) > 50
    assert max(lengths) > 16 * golden_plans.CAPACITY


@pytest.mark.parametrize(("threads", "core"), [("1", "c++"), ("2", "c++"), ("1", "python")])
def test_same_bytes_in_a_fresh_process(threads, core):
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    arguments = [sys.executable, golden_plans.__file__, *(["no-core"] if core == "python" else [])]
    done = subprocess.run(arguments, env=env, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"core": core, **GOLDEN}
