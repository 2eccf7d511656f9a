"""Types of the compiled planner core, csrc/."""

from megatron_hdp.types import IntArray

def best_fit(sizes: IntArray, capacity: int, rooms: IntArray) -> IntArray: ...
