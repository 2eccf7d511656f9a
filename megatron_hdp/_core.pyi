"""Types of the compiled planner core, csrc/."""

import numpy as np
import numpy.typing as npt

from megatron_hdp.types import IntArray

class Arena:
    def __init__(self, bytes: int) -> None: ...
    def allocate(self, bytes: int) -> int | None: ...
    def free(self, offset: int) -> None: ...
    def reset_high_water(self) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_in_use(self) -> int: ...
    @property
    def high_water(self) -> int: ...
    @property
    def largest_free(self) -> int: ...

def host_memory(bytes: int) -> tuple[npt.NDArray[np.uint8], int]: ...
def best_fit(sizes: IntArray, capacity: int, rooms: IntArray) -> IntArray: ...
def cost_picoseconds(
    arguments: IntArray, lengths: IntArray, rings: IntArray, tiers: IntArray, phase: int
) -> IntArray: ...
def cost_plain(arguments: IntArray, lengths: IntArray, starts: IntArray, rings: IntArray) -> IntArray: ...
def lower_bound(
    arguments: IntArray,
    lengths: IntArray,
    offload: IntArray,
    num_ranks: int,
    capacity: int,
    stages: int,
    virtual_stages: int,
) -> IntArray: ...
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
def check(
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    lengths: IntArray,
    ring_start: IntArray,
    ring_size: IntArray,
    offload: npt.NDArray[np.float64],
    rank_offsets: IntArray,
    microbatch_offsets: IntArray,
    piece_sequence: IntArray,
    exchange: IntArray,
    head_ranks: IntArray,
    stages: int,
    virtual_stages: int,
    expert_group: int,
) -> int: ...
def run_graph(
    queue_offsets: IntArray, queue_nodes: IntArray, edge_from: IntArray, edge_to: IntArray, duration: IntArray
) -> IntArray: ...
def plan_dp(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: IntArray,
    bound: int,
    last_time: int,
    last_share: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]: ...
def place_rings(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    cost: IntArray,
    num_coarse: int,
    target: int,
    tie: int,
    share: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]: ...
def spread(work: IntArray, loads: IntArray) -> IntArray: ...
def pack_ranks(rank: IntArray, size: IntArray, num_ranks: int, capacity: int, rooms: IntArray) -> IntArray: ...
def place_units(size: IntArray, work: IntArray, num_packs: int, num_ranks: int) -> tuple[IntArray, IntArray]: ...
def candidate_times(
    arguments: IntArray,
    front_rings: IntArray,
    front_ranks: IntArray,
    back_rings: IntArray,
    back_ranks: IntArray,
    locals: IntArray,
    lost: IntArray,
    capacity: int,
    stages: int,
    virtual_stages: int,
    expert_group: int,
    rooms: IntArray,
    room_offsets: IntArray,
    leads: IntArray,
    enough: int,
) -> tuple[IntArray, IntArray]: ...
def stack_rings(
    start: IntArray, size: IntArray, end: IntArray, num_ranks: int
) -> tuple[IntArray, IntArray, IntArray]: ...
