"""The machine and the software of a profile, as texts that training can compare."""

import os
import platform
from pathlib import Path

import torch


def hardware(device: torch.device) -> str:
    """What this rank computes on: the GPU's name and memory, or the processor's and the threads of a rank."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{_printable(found.name)}, {round(found.total_memory / 2**30)} GiB"
    threads = torch.get_num_threads()
    return f"CPU rank: {_printable(_processor())}, {threads} thread{'s' if threads > 1 else ''} per rank"


def software(megatron: str, kernel: str) -> str:
    """Versions, and the attention kernel."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"megatron-core {megatron}"]
    if torch.version.cuda and torch.cuda.is_available():
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return ", ".join([*parts, f"attention kernel {kernel}"])


def device_memory(device: torch.device, ranks_on_machine: int) -> float:
    """Bytes of the GPU; of CPU ranks an equal share of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory() / ranks_on_machine


def machine_memory() -> float:
    """Bytes of memory of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _printable(text: str) -> str:
    """What the system says, as a profile may hold it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
