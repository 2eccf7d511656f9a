"""`megatron-hdp simulate` asks Megatron's own scheduler, in a process of its own."""

import os
import re
import subprocess
import sys

FLAGS = "--lengths byted --model llama-7b --gpus 16 --context 32K --batch-tokens 512K --steps 1 --no-search"


def test_nobody_is_told_that_there_is_no_gpu():
    """Torch, which Megatron imports, says so where there is CUDA but no GPU."""
    command = [sys.executable, "-m", "megatron_hdp.cli", "simulate", *FLAGS.split(), "--strategies", "megatron"]
    without = os.environ | {"CUDA_HOME": "/usr/local", "CUDA_VISIBLE_DEVICES": ""}
    imported = [sys.executable, "-c", "import torch.utils.cpp_extension"]
    torch = subprocess.run(imported, env=without, capture_output=True, text=True, timeout=300)
    assert "No CUDA runtime is found" in torch.stderr, "what is silenced is not said any more"
    done = subprocess.run(command, env=without, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^megatron +[0-9]", done.stdout, re.M)
    told = [line for line in done.stderr.splitlines() if not line.startswith("megatron-hdp simulate: ")]
    assert told == []
