"""CPU mode: torch.cuda calls of an unmodified script run on CPU ranks. Pure torch, no Megatron.

The mode replaces functions on torch's own modules and classes rather than using a `TorchFunctionMode`: a mode is local
to the thread that entered it, and a loader or checkpoint thread would fall out of it. It therefore holds in every
thread and in forked children; a spawned child enables it again (see `megatron_hdp.spawned`).
"""

from megatron_hdp.cpu.environment import prepare_environment
from megatron_hdp.errors import ConfigError

__all__ = ["enable", "is_enabled", "prepare_environment"]

_enabled = False


def is_enabled() -> bool:
    """Whether this process runs in the CPU mode. Does not import torch."""
    return _enabled


def enable() -> None:
    """Turn the CPU mode on for the rest of the process; a second call does nothing.

    Call it before Megatron is imported, because Megatron binds some of torch's functions by name.

    Raises:
        ConfigError: this process has already used a GPU.
    """
    global _enabled
    if _enabled:
        return
    prepare_environment()
    import torch

    if torch.cuda.is_initialized():
        raise ConfigError("the CPU mode must be turned on before the first use of a GPU: pass --cpu to the launcher")

    from megatron_hdp.cpu import collectives, cuda, devices, loaders, packages

    packages.hide()
    devices.apply()
    cuda.apply()
    loaders.apply()
    if torch.distributed.is_available():
        collectives.apply()
    _enabled = True
