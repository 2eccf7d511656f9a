"""Block kernels behind one interface, picked by what can run."""

from megatron_hdp.attention.kernels.interface import BlockKernel, Segments, accumulate_dtype
from megatron_hdp.attention.kernels.select import available_kernels, chosen_kernel, named_kernel, pick_kernel
from megatron_hdp.attention.kernels.trial import try_kernel

__all__ = [
    "BlockKernel",
    "Segments",
    "accumulate_dtype",
    "available_kernels",
    "chosen_kernel",
    "named_kernel",
    "pick_kernel",
    "try_kernel",
]
