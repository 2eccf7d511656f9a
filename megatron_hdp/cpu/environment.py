"""Environment variables of the CPU mode; they count only if they are set before torch is imported. No torch."""

import os

CPU_MODE_VARIABLE = "MEGATRON_HDP_CPU"
"""Set to 1 for spawned children of a process in the CPU mode."""

_DEFAULTS = {
    # One thread a rank: ranks share the cores, and sums do not depend on how many cores there are.
    "OMP_NUM_THREADS": "1",
    # torch.compile would call a C++ compiler for every fused function; eager code is exact and starts at once.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron checks it for tensor parallelism although only GPUs have such queues.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def prepare_environment() -> None:
    """Set what the CPU mode needs, keep what the user has set, and hide GPUs so that nothing lands on one."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[CPU_MODE_VARIABLE] = "1"
