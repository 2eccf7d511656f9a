"""Main module of the children that multiprocessing spawns from a launched script; see `megatron_hdp.script`."""

import os

from megatron_hdp import cpu
from megatron_hdp.cpu.environment import CPU_MODE_VARIABLE
from megatron_hdp.script import attribute_in_child

if os.environ.get(CPU_MODE_VARIABLE) == "1":
    cpu.enable()

__getattr__ = attribute_in_child
