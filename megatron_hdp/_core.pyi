"""Types of the compiled planner core, csrc/."""

from megatron_hdp.types import IntArray

def best_fit(sizes: IntArray, capacity: int, rooms: IntArray) -> IntArray: ...
def cost_picoseconds(
    arguments: IntArray, lengths: IntArray, rings: IntArray, tiers: IntArray, phase: int
) -> IntArray: ...
def cost_plain(arguments: IntArray, lengths: IntArray, starts: IntArray, rings: IntArray) -> IntArray: ...
def rank_ends(
    rank_offsets: IntArray,
    microbatch_offsets: IntArray,
    piece_sequence: IntArray,
    ring_size: IntArray,
    forward: IntArray,
    backward: IntArray,
    stages: int,
    virtual_stages: int,
) -> IntArray: ...
