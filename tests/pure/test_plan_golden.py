"""The same batch gives the same plan, to the byte, on every platform, in every process, with and without C++."""

import json
import os
import subprocess
import sys
from pathlib import Path

import golden_plans
import pytest

GOLDEN = {
    "hdp": "84d90c2ecae689123dd73ed124e851445bb45a711c5bc3fee571576702d94358",
    "static": "bb1315c16bd92343c7fa2853525193b6fc309610d026b4f066b1d86421b67d6a",
    "pipeline": "5bfb62fadc4314c165d0c3a6ba1a07d5c9e99b71f66ac77481e9fc3e84200edf",
    "interleaved": "22e7fe3ead5be43dc3922703a51bcc99e0abf567b858435b33a71909054e0677",
    "experts": "d6762aac528ad4dccaa39185e1e123b8a835a3b8f0a5855a808d72a90458c7a9",
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
